//! Passive ejection: a worker whose answers fail gets nothing for a while, and so does one on which nothing moves.
//!
//! Probes ask whether a process is there. What turns meet tells more: connections that are refused or reset, answers that are
//! no HTTP, 5xx. A number of such faults in a row takes the worker out; the time grows with each repetition and shrinks again
//! with health. When the time is over the worker is on trial: its next fault takes it out again at once.
//!
//! Only what happened before the first byte counts, and only what is the worker's doing: no 4xx, no full queue, no client that
//! left, no silence (a worker says nothing while a turn waits in its queue; [`Motion`] finds out when it is stuck).

use super::Load;

/// When a worker is taken out, and for how long.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EjectionOptions {
    /// Faults in a row; 0: never.
    pub consecutive_faults: u32,
    /// The first ejection, ms; doubled for each repetition.
    pub base_ms: u64,
    /// The longest, ms.
    pub max_ms: u64,
    /// Share of a pool (0 to 1) that may be out because of faults at a time.
    pub max_share: f64,
    /// Nothing moves for so long while something waits or runs, ms; 0: not looked at.
    pub wedged_after_ms: u64,
}

/// Why a worker is out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum EjectionCause {
    /// It could not be connected to.
    Connect,
    /// Its answers failed.
    Answer,
    /// Nothing moves on it although it has work.
    Wedge,
}

/// What failed, as far as a worker is to blame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerFault {
    /// No connection.
    Connect,
    /// A reset, no HTTP, a 5xx that is no backpressure.
    Answer,
}

/// What a load report changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MotionChange {
    /// The worker is stuck from now on.
    Wedged,
    /// It moves again.
    Moving,
}

/// A worker's record of faults.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Ejections {
    in_a_row: u32,
    /// Only connections failed in that row.
    connect_only: bool,
    now: Option<Ejected>,
    /// Ejections that still count.
    repeated: u32,
    /// When the last one ended.
    ended_ms: u64,
    motion: Motion,
}

/// A worker that is out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ejected {
    /// Why.
    pub cause: EjectionCause,
    /// Until when, unless it shows health before.
    pub until_ms: u64,
}

/// What is known of a worker's movement.
#[derive(Debug, Clone, Default, PartialEq)]
struct Motion {
    seen: (u64, u64, u32),
    heard: u64,
    /// Since when nothing has moved although there is work.
    still_since_ms: Option<u64>,
}

// === impl EjectionOptions ===

impl Default for EjectionOptions {
    fn default() -> Self {
        Self { consecutive_faults: 5, base_ms: 10_000, max_ms: 300_000, max_share: 0.5, wedged_after_ms: 60_000 }
    }
}

impl EjectionOptions {
    /// How many of so many workers may be out because of faults: the share, and of two or more at least one.
    pub fn most_out(&self, workers: usize) -> usize {
        // `as` saturates, and takes NaN for 0.
        let share = (workers as f64 * self.max_share.clamp(0.0, 1.0)) as usize;
        if workers > 1 && self.max_share > 0.0 { share.max(1) } else { share }
    }
}

// === impl EjectionCause ===

impl EjectionCause {
    /// The name in metrics and on the admin listener.
    pub fn name(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Answer => "answer",
            Self::Wedge => "wedge",
        }
    }
}

// === impl Ejections ===

impl Ejections {
    /// Whether the worker is out, and why.
    pub fn ejected(&self) -> Option<Ejected> {
        self.now
    }

    /// Whether it is out because nothing moves on it.
    pub fn is_wedged(&self) -> bool {
        self.now.is_some_and(|out| out.cause == EjectionCause::Wedge)
    }

    /// Faults since the last success.
    pub fn faults_in_a_row(&self) -> u32 {
        self.in_a_row
    }

    /// A turn failed before its first byte, and the worker is to blame. True when that takes the worker out; `room` says
    /// whether the pool can do without it.
    pub fn fault(&mut self, fault: WorkerFault, now_ms: u64, room: bool, options: &EjectionOptions) -> bool {
        let connect = fault == WorkerFault::Connect;
        self.connect_only = connect && (self.in_a_row == 0 || self.connect_only);
        self.in_a_row = self.in_a_row.saturating_add(1);
        let due = options.consecutive_faults > 0 && self.in_a_row >= options.consecutive_faults;
        if !due || !room || self.now.is_some() {
            return false;
        }
        let cause = if self.connect_only { EjectionCause::Connect } else { EjectionCause::Answer };
        self.eject(cause, now_ms, options);
        true
    }

    /// An answer began.
    pub fn success(&mut self) {
        self.in_a_row = 0;
    }

    /// A probe went well. It shows that the worker can be connected to, and nothing else; true when that brings it back.
    pub fn probed(&mut self, now_ms: u64) -> bool {
        if self.now.is_some_and(|out| out.cause == EjectionCause::Connect) {
            self.end(now_ms);
            self.in_a_row = 0;
            return true;
        }
        false
    }

    /// Time passes. True when it brings the worker back, on trial.
    pub fn tick(&mut self, now_ms: u64, options: &EjectionOptions) -> bool {
        if self.now.is_none_or(|out| out.until_ms > now_ms) {
            return false;
        }
        self.end(now_ms);
        self.in_a_row = options.consecutive_faults.saturating_sub(1);
        // A worker that was stuck has its time again to show that it moves.
        self.motion.still_since_ms = None;
        true
    }

    /// Another process answers, or the old one after its probes had failed: nothing of this is about it.
    pub fn forget(&mut self) {
        *self = Self::default();
    }

    /// A load report. `heard` counts what the worker has sent to our turns, which is movement too.
    pub fn report(&mut self, load: &Load, heard: u64, now_ms: u64, options: &EjectionOptions) -> Option<MotionChange> {
        let moved = self.motion.look(load, heard, now_ms);
        if self.is_wedged() && moved {
            self.end(now_ms);
            return Some(MotionChange::Moving);
        }
        let still =
            self.motion.still_since_ms.is_some_and(|since| now_ms.saturating_sub(since) >= options.wedged_after_ms);
        if options.wedged_after_ms == 0 || !still || self.now.is_some() {
            return None;
        }
        self.eject(EjectionCause::Wedge, now_ms, options);
        Some(MotionChange::Wedged)
    }

    fn eject(&mut self, cause: EjectionCause, now_ms: u64, options: &EjectionOptions) {
        // Each stretch of health as long as the first ejection makes up for one repetition.
        let healthy = now_ms.saturating_sub(self.ended_ms) / options.base_ms.max(1);
        self.repeated = self.repeated.saturating_sub(u32::try_from(healthy).unwrap_or(u32::MAX));
        let length =
            options.base_ms.saturating_mul(1 << self.repeated.min(32)).min(options.max_ms.max(options.base_ms));
        self.repeated = self.repeated.saturating_add(1);
        self.now = Some(Ejected { cause, until_ms: now_ms.saturating_add(length) });
    }

    fn end(&mut self, now_ms: u64) {
        self.now = None;
        self.ended_ms = now_ms;
    }
}

// === impl Motion ===

impl Motion {
    /// True when something moved since the last look: tokens were prefilled, KV was taken or given back, a request began or
    /// ended. A longer or shorter queue is no movement: that is what clients do.
    fn look(&mut self, load: &Load, heard: u64, now_ms: u64) -> bool {
        let seen = (load.prefill_uncached_total, load.kv_used_tokens, load.running);
        let moved = seen != self.seen || heard != self.heard;
        (self.seen, self.heard) = (seen, heard);
        let has_work = load.running > 0 || load.waiting > 0;
        if moved || !has_work {
            self.still_since_ms = None;
        }
        if has_work {
            self.still_since_ms.get_or_insert(now_ms);
        }
        moved
    }
}

#[cfg(test)]
#[path = "ejection_tests.rs"]
mod tests;
