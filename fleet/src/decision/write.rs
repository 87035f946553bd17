//! What policies write, validated. A bad write is dropped and told to the caller, who counts and logs it; the policy gets no
//! error, since public SDKs panic on one.

use super::{Candidates, Decision, EnginePriority, SessionAction};
use crate::ids::WorkerId;
use crate::session::ModeWish;
use crate::worker::WorkerState;

/// Most entries that policies may add to the decision log of one turn.
pub const MAX_LOG_ENTRIES: usize = 16;
/// Longest text of one such entry, bytes.
pub const MAX_LOG_BYTES: usize = 1_024;

const MAX_LOG_NAME_BYTES: usize = 64;
const MAX_REASON_BYTES: usize = 256;
const MAX_FLOW_BYTES: usize = 256;
const MAX_KEY_BYTES: usize = 256;
const MAX_SCORES: usize = 4_096;
/// A head start beyond any that could make sense, seconds; about 31 years.
const MAX_HEAD_START_S: f64 = 1e9;
/// One day.
const MAX_DEADLINE_MS: u64 = 86_400_000;
/// 30 days.
const MAX_TTL_S: f64 = 2_592_000.0;

/// Why a write was dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum WriteError {
    /// No decision has this name.
    #[error("no such decision")]
    UnknownName,
    /// No candidate has this id or index.
    #[error("no such worker among the candidates")]
    UnknownWorker,
    /// The worker takes no turns.
    #[error("the worker is not ready")]
    NotReady,
    /// Not a number of the kind asked for.
    #[error("not a number of the kind asked for")]
    BadNumber,
    /// A number that nothing sensible can be done with.
    #[error("the number is out of range")]
    OutOfRange,
    /// None of the words that can stand here, not JSON of the shape asked for, or not UTF-8.
    #[error("none of the values that can stand here")]
    BadValue,
    /// Too long.
    #[error("too long")]
    TooLong,
    /// Too many log entries.
    #[error("too many")]
    TooMany,
}

// === impl WriteError ===

impl WriteError {
    /// Every cause.
    pub const ALL: [Self; 8] = [
        Self::UnknownName,
        Self::UnknownWorker,
        Self::NotReady,
        Self::BadNumber,
        Self::OutOfRange,
        Self::BadValue,
        Self::TooLong,
        Self::TooMany,
    ];

    /// The label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::UnknownName => "unknown_name",
            Self::UnknownWorker => "unknown_worker",
            Self::NotReady => "not_ready",
            Self::BadNumber => "bad_number",
            Self::OutOfRange => "out_of_range",
            Self::BadValue => "bad_value",
            Self::TooLong => "too_long",
            Self::TooMany => "too_many",
        }
    }
}

// === impl Decision ===

impl Decision {
    /// Takes what a policy wrote under `name` (with or without the leading `turnstile.`). Later writes replace earlier ones.
    /// An empty value takes an earlier write back.
    ///
    /// Outside the route phase there are no candidates, so nothing under `route.` that names a worker can be written.
    ///
    /// # Errors
    /// The write is not valid; the decision is as it was.
    pub fn apply_write(&mut self, name: &str, value: &[u8], candidates: &Candidates<'_>) -> Result<(), WriteError> {
        let name = name.strip_prefix("turnstile.").unwrap_or(name);
        let value = std::str::from_utf8(value).map_err(|_| WriteError::BadValue)?;
        let text = value.trim();
        match name {
            "route.target" => self.route.target = optional(text, |text| takes_turns(candidates, text))?,
            "route.fallbacks" => {
                self.route.fallbacks = optional(text, |text| list(text, |n| takes_turns(candidates, n)))?
            }
            // A worker that is not there is as good as excluded, so an unknown name is not an error here.
            "route.exclude" => {
                self.route.exclude = optional(text, |text| {
                    Ok(split(text).filter_map(|n| candidates.find(n)).map(|w| w.index).collect())
                })?;
            }
            "route.scores" => self.route.scores = optional(text, |text| scores(text, candidates))?,
            "route.reason" => self.route.reason = optional(text, |text| bounded(text, MAX_REASON_BYTES))?,
            "queue.tier" => self.queue.tier = optional(text, number)?,
            "queue.priority" => self.queue.head_start_ms = optional(text, head_start_ms)?,
            "queue.deadline_ms" => {
                self.queue.deadline_ms = optional(text, |text| match number(text)? {
                    ms if ms <= MAX_DEADLINE_MS => Ok(ms),
                    _ => Err(WriteError::OutOfRange),
                })?;
            }
            "queue.flow" => self.queue.flow = optional(text, |text| bounded(text, MAX_FLOW_BYTES))?,
            "session.action" => {
                self.session.action = optional(text, |text| SessionAction::parse(text).ok_or(WriteError::BadValue))?;
            }
            "session.key" => self.session.key = optional(text, |text| bounded(text, MAX_KEY_BYTES))?,
            "session.ttl_s" => self.session.ttl_ms = optional(text, ttl_ms)?,
            "session.mode" => {
                self.session.mode = optional(text, |text| ModeWish::parse(text).ok_or(WriteError::BadValue))?;
            }
            "prefill" => {
                self.prefill = optional(text, |text| match text {
                    "on" | "true" => Ok(true),
                    "off" | "false" => Ok(false),
                    _ => Err(WriteError::BadValue),
                })?;
            }
            "engine.priority" => {
                self.engine_priority = optional(text, |text| match text {
                    "none" => Ok(EnginePriority::Omit),
                    text => number(text).map(EnginePriority::Send),
                })?;
            }
            _ => return self.write_log(name.strip_prefix("log.").ok_or(WriteError::UnknownName)?, value),
        }
        Ok(())
    }

    /// Whether a name is one that [`apply_write`](Self::apply_write) takes.
    pub fn is_name(name: &str) -> bool {
        let name = name.strip_prefix("turnstile.").unwrap_or(name);
        Self::NAMES.contains(&name) || name.starts_with("log.")
    }

    /// The names that [`apply_write`](Self::apply_write) takes, without those that begin with `log.`.
    pub const NAMES: [&'static str; 15] = [
        "route.target",
        "route.fallbacks",
        "route.scores",
        "route.exclude",
        "route.reason",
        "queue.tier",
        "queue.priority",
        "queue.deadline_ms",
        "queue.flow",
        "session.action",
        "session.key",
        "session.ttl_s",
        "session.mode",
        "prefill",
        "engine.priority",
    ];

    /// What was decided under a name, as a policy reads it back. Workers are told as `#INDEX`, however they were written.
    pub fn read(&self, name: &str) -> Option<String> {
        let name = name.strip_prefix("turnstile.").unwrap_or(name);
        match name {
            "route.target" => self.route.target.map(|worker| worker.to_string()),
            "route.fallbacks" => self.route.fallbacks.as_deref().map(joined),
            "route.exclude" => self.route.exclude.as_deref().map(joined),
            "route.scores" => self.route.scores.as_ref().map(|scores| {
                let object: serde_json::Map<String, serde_json::Value> =
                    scores.iter().map(|&(worker, cost_ms)| (worker.to_string(), cost_ms.into())).collect();
                serde_json::Value::Object(object).to_string()
            }),
            "route.reason" => self.route.reason.clone(),
            "queue.tier" => self.queue.tier.map(|tier| tier.to_string()),
            "queue.priority" => self.queue.head_start_ms.map(seconds),
            "queue.deadline_ms" => self.queue.deadline_ms.map(|ms| ms.to_string()),
            "queue.flow" => self.queue.flow.clone(),
            "session.action" => self.session.action.map(|action| action.name().to_owned()),
            "session.key" => self.session.key.clone(),
            "session.ttl_s" => self.session.ttl_ms.map(|ms| seconds(i64::try_from(ms).unwrap_or(i64::MAX))),
            "session.mode" => self.session.mode.map(|mode| mode.name().to_owned()),
            "prefill" => self.prefill.map(|on| if on { "on" } else { "off" }.to_owned()),
            "engine.priority" => self.engine_priority.map(|priority| match priority {
                EnginePriority::Send(priority) => priority.to_string(),
                EnginePriority::Omit => "none".to_owned(),
            }),
            _ => {
                let name = name.strip_prefix("log.")?;
                self.log.iter().find(|(known, _)| known == name).map(|(_, text)| text.clone())
            }
        }
    }

    fn write_log(&mut self, name: &str, text: &str) -> Result<(), WriteError> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
        if name.is_empty() || !name.bytes().all(plain) {
            return Err(WriteError::UnknownName);
        }
        if name.len() > MAX_LOG_NAME_BYTES || text.len() > MAX_LOG_BYTES {
            return Err(WriteError::TooLong);
        }
        if let Some((_, known)) = self.log.iter_mut().find(|(known, _)| known == name) {
            text.clone_into(known);
            return Ok(());
        }
        if self.log.len() >= MAX_LOG_ENTRIES {
            return Err(WriteError::TooMany);
        }
        self.log.push((name.to_owned(), text.to_owned()));
        Ok(())
    }
}

fn optional<T>(text: &str, read: impl FnOnce(&str) -> Result<T, WriteError>) -> Result<Option<T>, WriteError> {
    if text.is_empty() { Ok(None) } else { read(text).map(Some) }
}

/// A worker that may be a target. A draining one may: the streaming session that lives there stays to its end. Whether the turn
/// has one is seen when the decision is settled.
fn takes_turns(candidates: &Candidates<'_>, name: &str) -> Result<WorkerId, WriteError> {
    let worker = candidates.find(name).ok_or(WriteError::UnknownWorker)?;
    match worker.state {
        WorkerState::Ready | WorkerState::Draining => Ok(worker.index),
        WorkerState::Unhealthy | WorkerState::Starting => Err(WriteError::NotReady),
    }
}

fn split(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|name| !name.is_empty())
}

fn list(text: &str, worker: impl Fn(&str) -> Result<WorkerId, WriteError>) -> Result<Vec<WorkerId>, WriteError> {
    split(text).map(worker).collect()
}

fn scores(text: &str, candidates: &Candidates<'_>) -> Result<Vec<(WorkerId, f64)>, WriteError> {
    // A cost that is not a number is a BadNumber, not a wrong shape: it is what a policy gets wrong by dividing by zero.
    let object: serde_json::Map<String, serde_json::Value> =
        serde_json::from_str(text).map_err(|_| WriteError::BadValue)?;
    if object.len() > MAX_SCORES {
        return Err(WriteError::TooMany);
    }
    object
        .iter()
        .map(|(name, cost)| {
            let worker = candidates.find(name).ok_or(WriteError::UnknownWorker)?;
            let cost_ms = cost.as_f64().filter(|cost| cost.is_finite()).ok_or(WriteError::BadNumber)?;
            Ok((worker.index, cost_ms))
        })
        .collect()
}

fn bounded(text: &str, most: usize) -> Result<String, WriteError> {
    if text.len() > most { Err(WriteError::TooLong) } else { Ok(text.to_owned()) }
}

fn number<T: std::str::FromStr>(text: &str) -> Result<T, WriteError> {
    text.parse().map_err(|_| WriteError::BadNumber)
}

fn finite(text: &str) -> Result<f64, WriteError> {
    number(text).and_then(|value: f64| if value.is_finite() { Ok(value) } else { Err(WriteError::BadNumber) })
}

fn head_start_ms(text: &str) -> Result<i64, WriteError> {
    let seconds = finite(text)?;
    if seconds.abs() > MAX_HEAD_START_S { Err(WriteError::OutOfRange) } else { Ok((seconds * 1_000.0).round() as i64) }
}

fn ttl_ms(text: &str) -> Result<u64, WriteError> {
    let seconds = finite(text)?;
    let ms = (seconds * 1_000.0).round();
    if ms >= 1.0 && seconds <= MAX_TTL_S { Ok(ms as u64) } else { Err(WriteError::OutOfRange) }
}

/// Milliseconds as seconds, without a fraction where there is none.
fn seconds(ms: i64) -> String {
    (ms as f64 / 1_000.0).to_string()
}

fn joined(workers: &[WorkerId]) -> String {
    let names: Vec<String> = workers.iter().map(WorkerId::to_string).collect();
    names.join(",")
}
