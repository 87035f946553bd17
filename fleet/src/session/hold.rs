//! An attempt's hold on its session: whatever becomes of the attempt, the lease is ended exactly once, and what has to follow
//! is told.

use std::sync::Arc;

use super::{EngineClose, Lease, SessionMode, Sessions, TurnEnd, Usage};

/// After an answered `/abort_request` the engine lets go at the end of the step that runs; some 10 ms on 0.5.23 while it
/// decodes. A step that prefills takes longer: see [`release_after_ms`].
pub const RELEASE_AFTER_MS: u64 = 250;
/// Where nothing was answered: the engine notices by itself that a client is gone, by a poll every 4 s.
pub const RELEASE_UNTOLD_MS: u64 = 5_000;

/// Tokens of a step of prefill where the worker does not tell: the largest of SGLang's own defaults.
const CHUNK_TOKENS: i64 = 16_384;
/// A step may be so much slower than the measured rate says: attention over a long context costs more.
const SLOWER: f64 = 2.0;

/// How long after an answered `/abort_request` the engine may still have the turn, ms: a close before that takes the worker
/// down. From [`RELEASE_AFTER_MS`], when prefilling a whole chunk takes no time, to [`RELEASE_UNTOLD_MS`]. `chunk_tokens`:
/// `chunked_prefill_size` of `/server_info`, of which -1 means that a step may be a whole prompt.
pub fn release_after_ms(chunk_tokens: Option<i64>, prefill_tokens_per_s: f64) -> u64 {
    let chunk = chunk_tokens.unwrap_or(CHUNK_TOKENS);
    if chunk <= 0 {
        return RELEASE_UNTOLD_MS;
    }
    let step_ms = chunk as f64 / prefill_tokens_per_s.max(1.0) * 1e3 * SLOWER;
    // A float that is too large becomes the largest integer.
    RELEASE_AFTER_MS.saturating_add(step_ms as u64).min(RELEASE_UNTOLD_MS)
}

/// One attempt's lease, if it has one, from [`Sessions::begin`] to the end of the attempt.
#[derive(Debug, Default)]
pub struct Hold {
    lease: Option<Lease>,
    sent: bool,
}

/// How an attempt ended, as seen on its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptEnd {
    /// The answer came to its end. `whole`: the worker finished the turn, and did not abort it.
    Answered {
        /// As the worker reported it.
        usage: Option<Usage>,
        /// See above.
        whole: bool,
    },
    /// It was cut while the worker may be running it: the client left, or has part of the answer.
    Cut,
    /// The connection broke while the worker may be running it. The worker may have finished it, so nobody can tell whether the
    /// turn is part of a streaming session's context: what comes next goes to a new engine session instead.
    Broken,
    /// No connection to the worker came about.
    Unreachable,
    /// The worker answered with an error before it ran the turn.
    Refused(Refused),
}

/// What an error of a worker says about the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The engine session is not there (any more).
    SessionGone,
    /// The engine session still has a turn.
    SessionBusy,
    /// Nothing.
    Other,
}

/// What has to follow the end of an attempt.
#[derive(Debug, Default, PartialEq, Eq)]
#[must_use = "closes have to be sent, and a release has to follow"]
pub struct Parting {
    /// Closes to send now.
    pub closes: Vec<EngineClose>,
    /// The worker is to be told to stop.
    pub abort: bool,
    /// The engine session that nothing may enter before [`Sessions::released_engine`] is called: [`release_after_ms`] after an
    /// answered abort, else [`RELEASE_UNTOLD_MS`] from now.
    pub release: Option<Arc<str>>,
    /// The turn never ran, and may be placed again in its session.
    pub again: bool,
}

// === impl Hold ===

impl Hold {
    /// Holds a lease.
    pub fn new(lease: Option<Lease>) -> Self {
        Self { lease, sent: false }
    }

    /// The lease.
    pub fn lease(&self) -> Option<&Lease> {
        self.lease.as_ref()
    }

    /// The lease, for its open.
    pub fn lease_mut(&mut self) -> Option<&mut Lease> {
        self.lease.as_mut()
    }

    /// The request is about to reach the worker.
    pub fn sent(&mut self) {
        self.sent = true;
    }

    /// The attempt is over. Of several calls only the first one counts.
    pub fn end(&mut self, table: &mut Sessions, how: AttemptEnd, now_ms: u64) -> Parting {
        let sent = std::mem::take(&mut self.sent);
        let abort = sent && matches!(how, AttemptEnd::Cut | AttemptEnd::Broken);
        let Some(lease) = self.lease.take() else { return Parting { abort, ..Parting::default() } };
        let stream = lease.mode == SessionMode::Stream;
        let (key, engine_id) = (lease.key, lease.engine_id.clone());
        let end = match how {
            AttemptEnd::Answered { usage, whole } if whole || !stream => TurnEnd::Finished(usage),
            AttemptEnd::Answered { .. } => TurnEnd::Unfinished,
            AttemptEnd::Cut | AttemptEnd::Broken if sent => TurnEnd::Aborted,
            AttemptEnd::Refused(Refused::SessionGone) if stream => TurnEnd::EngineGone,
            AttemptEnd::Refused(Refused::SessionBusy) if stream => TurnEnd::StillBusy,
            AttemptEnd::Cut | AttemptEnd::Broken | AttemptEnd::Unreachable | AttemptEnd::Refused(_) => {
                TurnEnd::NotServed
            }
        };
        let mut closes = table.end(lease, end, now_ms);
        if stream && (how == AttemptEnd::Unreachable || (how == AttemptEnd::Broken && sent)) {
            // A streaming session overrules the decision, so every further attempt would go to the same worker.
            closes.extend(table.unbind(key));
        }
        let waits = engine_id.is_some() && matches!(end, TurnEnd::Aborted | TurnEnd::StillBusy);
        Parting {
            closes,
            abort,
            release: engine_id.filter(|_| waits),
            again: matches!(end, TurnEnd::EngineGone | TurnEnd::StillBusy),
        }
    }
}

// === impl Refused ===

impl Refused {
    /// Reads the texts of 0.5.23.
    pub fn of(body: &[u8]) -> Self {
        let text = String::from_utf8_lossy(body);
        if text.contains("does not exist") && text.contains("session")
            || text.contains("close was requested for session")
        {
            Self::SessionGone
        } else if text.contains("Streaming session already has an active request") {
            Self::SessionBusy
        } else {
            Self::Other
        }
    }
}
