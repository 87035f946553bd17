//! Faults on demand and by schedule: from the test itself, over `POST /_sim/fault`, or from a file.

mod force;
mod parse;

pub use force::Faults;
pub(crate) use force::{Action, Moment};
pub use parse::{Scheduled, schedule};

use std::time::Duration;

/// Where in an answer something goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Before the status line.
    Head,
    /// After status line, headers and so many bytes of the body; an answer that is shorter breaks after its last byte, before
    /// the mark that ends it.
    Body(usize),
}

/// What goes wrong.
#[derive(Clone, Debug, PartialEq)]
pub enum FaultKind {
    /// Answer this status with this JSON body instead of working; none gives SGLang's flat error body.
    Status(u16, Option<String>),
    /// The engine refuses the request with this code and message, as with a full queue: the status, or in a stream 200 and the
    /// error event of the protocol.
    ErrorEvent(u16, String),
    /// Never answer; the connection stays open.
    Hang,
    /// Answer up to there, then nothing more; the connection stays open.
    Stall(usize),
    /// Close the connection there, as a process that ends does.
    Cut(Place),
    /// Reset the connection there.
    Reset(Place),
    /// Close the sending side there and go on reading.
    HalfClose(Place),
    /// Send bytes there that are no HTTP, then close.
    Garbage(Place),
    /// Put bytes into the body there that are neither JSON nor an event; the framing stays right.
    Noise(usize),
    /// Declare so many bytes more (or less, when negative) than the body has.
    WrongLength(i64),
    /// Wait so long before doing anything.
    Delay(Duration),
    /// Wait so long before each piece of the body.
    Slow(Duration),
    /// End the whole worker as a crash does: requests under way are reset, the port is closed.
    Crash,
    /// End as a crash does, refuse connections for `down`, answer the probes with 503 for `warmup`, and be well again, with an
    /// empty cache and without sessions.
    Restart {
        /// Time without a listener.
        down: Duration,
        /// Time after that until the probes are well.
        warmup: Duration,
    },
    /// Refuse new connections and close idle ones, until cleared or its time is over. Requests under way go on.
    Refuse,
    /// Stop the engine: requests hang and probes stay well, until [`FaultKind::Unwedge`].
    Wedge {
        /// Also `/v1/loads` tells the last state for ever, as of a scheduler that is stuck; else it tells of those who wait.
        frozen: bool,
    },
    /// Let the engine go on.
    Unwedge,
}

impl FaultKind {
    /// As it is written down.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Status(..) => "status",
            Self::ErrorEvent(..) => "error_event",
            Self::Hang => "hang",
            Self::Stall(_) => "stall",
            Self::Cut(_) => "cut",
            Self::Reset(_) => "reset",
            Self::HalfClose(_) => "half_close",
            Self::Garbage(_) => "garbage",
            Self::Noise(_) => "noise",
            Self::WrongLength(_) => "wrong_length",
            Self::Delay(_) => "delay",
            Self::Slow(_) => "slow",
            Self::Crash => "crash",
            Self::Restart { .. } => "restart",
            Self::Refuse => "refuse",
            Self::Wedge { .. } => "wedge",
            Self::Unwedge => "unwedge",
        }
    }

    /// Concerns the worker as a whole, and needs no request.
    fn is_of_the_worker(&self) -> bool {
        matches!(self, Self::Crash | Self::Restart { .. } | Self::Refuse | Self::Wedge { .. } | Self::Unwedge)
    }
}

/// A fault, when it applies and how often.
///
/// Crashes, restarts and wedges without a path, a count and a probability happen by themselves when their time has come, like
/// refusals; everything else waits for a request that fits.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// What goes wrong.
    pub kind: FaultKind,
    /// Only requests whose path begins so; none is every inference route.
    pub path: Option<String>,
    /// How many requests it hits; none is all until cleared.
    pub count: Option<u32>,
    /// The share of the requests that it hits, from 0 to 1; none is all.
    pub probability: Option<f64>,
    /// Decides, with `probability`, which requests are hit.
    pub seed: u64,
    /// It begins so long after it was added.
    pub after: Duration,
    /// It ends so long after it began; none is never.
    pub lasts: Option<Duration>,
    /// It begins again so long after it began, with a new count.
    pub every: Option<Duration>,
    /// It happens before the body of the request is read.
    pub early: bool,
}

impl Fault {
    fn new(kind: FaultKind, count: Option<u32>) -> Self {
        Self {
            kind,
            path: None,
            count,
            probability: None,
            seed: 0,
            after: Duration::ZERO,
            lasts: None,
            every: None,
            early: false,
        }
    }

    /// A fault for the next inference request.
    pub fn once(kind: FaultKind) -> Self {
        Self::new(kind, Some(1))
    }

    /// A fault for the next inference requests.
    pub fn times(count: u32, kind: FaultKind) -> Self {
        Self::new(kind, Some(count))
    }

    /// A fault for every inference request until [`Faults::clear`].
    pub fn always(kind: FaultKind) -> Self {
        Self::new(kind, None)
    }

    /// The same, for paths that begin so.
    #[must_use]
    pub fn on(mut self, path: &str) -> Self {
        self.path = Some(path.to_owned());
        self
    }

    /// The same, for this share of the requests.
    #[must_use]
    pub fn with_probability(mut self, probability: f64, seed: u64) -> Self {
        (self.probability, self.seed) = (Some(probability), seed);
        self
    }

    /// The same, so much later.
    #[must_use]
    pub fn after(mut self, time: Duration) -> Self {
        self.after = time;
        self
    }

    /// The same, for so long.
    #[must_use]
    pub fn lasting(mut self, time: Duration) -> Self {
        self.lasts = Some(time);
        self
    }

    /// The same, again and again.
    #[must_use]
    pub fn every(mut self, time: Duration) -> Self {
        self.every = Some(time);
        self
    }

    /// The same, before the body of the request is read.
    #[must_use]
    pub fn early(mut self) -> Self {
        self.early = true;
        self
    }

    /// Happens when its time has come, without a request.
    fn acts_alone(&self) -> bool {
        let selects = self.path.is_some() || self.count.is_some() || self.probability.is_some();
        self.kind.is_of_the_worker() && (!selects || self.kind == FaultKind::Refuse)
    }
}

#[cfg(test)]
#[path = "../fault_tests.rs"]
mod tests;
