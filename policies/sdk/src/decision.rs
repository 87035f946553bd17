//! What a policy decides, and how it is written to the host.

use std::fmt::{self, Write as _};

use crate::Host;
use crate::bulk::Parts;

/// A worker in a decision: by index (cheapest: the table carries no ids) or by id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerName {
    /// By index, written `#7`.
    Index(u32),
    /// By the id of the configuration.
    Id(String),
}

/// What happens to the turn's session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionAction {
    /// Keep the session on one worker, in the gateway only. On a live session: refresh its idle timeout.
    Bind,
    /// Hold the session on the engine too, where the worker can. On a live session: refresh it.
    Open,
    /// End the session after this turn.
    Close,
    /// Forget the binding now; the turn is routed like one without session.
    Release,
    /// Nothing, even if an earlier plugin asked for something.
    Nothing,
}

/// How the engine takes part in a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionMode {
    /// Not at all: the gateway keeps the turns on one worker.
    Affinity,
    /// Full history, tagged with the session id.
    Tag,
    /// A streaming session that holds the history and takes deltas.
    Stream,
    /// The best of these that route and worker allow.
    Auto,
}

/// The priority sent to the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EnginePriority {
    /// This number, where the worker takes one.
    Value(i64),
    /// None, even if the client gave one.
    Absent,
}

/// A decision: what is left out stays as earlier plugins or the built-in rule have it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Decision {
    target: Option<WorkerName>,
    fallbacks: Vec<WorkerName>,
    exclude: Vec<WorkerName>,
    scores: Vec<(WorkerName, f64)>,
    reason: Option<String>,
    tier: Option<u32>,
    priority: Option<f64>,
    deadline_ms: Option<u64>,
    flow: Option<String>,
    session_action: Option<SessionAction>,
    session_key: Option<String>,
    session_ttl_s: Option<f64>,
    session_mode: Option<SessionMode>,
    prefill: Option<bool>,
    engine_priority: Option<EnginePriority>,
    notes: Vec<(String, String)>,
}

// === impl Decision ===

impl Decision {
    /// Decides nothing.
    pub fn none() -> Self {
        Decision::default()
    }

    /// The worker to send the turn to. One that is unknown or not ready is ignored by the gateway, and counted.
    pub fn target(mut self, worker: impl Into<WorkerName>) -> Self {
        self.target = Some(worker.into());
        self
    }

    /// Workers to try next, best first, if the target fails before it answered.
    pub fn fallbacks<W: Into<WorkerName>>(mut self, workers: impl IntoIterator<Item = W>) -> Self {
        self.fallbacks = workers.into_iter().map(Into::into).collect();
        self
    }

    /// Workers not to use for this turn. Replaces what earlier plugins excluded.
    pub fn exclude<W: Into<WorkerName>>(mut self, workers: impl IntoIterator<Item = W>) -> Self {
        self.exclude = workers.into_iter().map(Into::into).collect();
        self
    }

    /// Cost of each worker in ms, lower is better. For the decision log, and to break ties. Written to a tenth of a ms.
    pub fn scores<W: Into<WorkerName>>(mut self, scores: impl IntoIterator<Item = (W, f64)>) -> Self {
        self.scores = scores.into_iter().map(|(worker, cost)| (worker.into(), cost)).collect();
        self
    }

    /// Why, in a few words, for the decision log.
    pub fn reason(mut self, reason: impl Into<String>) -> Self {
        self.reason = Some(reason.into());
        self
    }

    /// Strict tier in the queue; higher goes first, always.
    pub fn tier(mut self, tier: u32) -> Self {
        self.tier = Some(tier);
        self
    }

    /// Head start in the queue, in seconds of arrival time; negative lets others pass. Written to a ms.
    pub fn queue_priority(mut self, seconds: f64) -> Self {
        self.priority = Some(seconds);
        self
    }

    /// Give up waiting in the queue after this many ms.
    pub fn deadline_ms(mut self, ms: u64) -> Self {
        self.deadline_ms = Some(ms);
        self
    }

    /// Turns of one flow share one fair part of the fleet.
    pub fn flow(mut self, flow: impl Into<String>) -> Self {
        self.flow = Some(flow.into());
        self
    }

    /// What happens to the session.
    pub fn session(mut self, action: SessionAction) -> Self {
        self.session_action = Some(action);
        self
    }

    /// The session's id, instead of the client's.
    pub fn session_key(mut self, key: impl Into<String>) -> Self {
        self.session_key = Some(key.into());
        self
    }

    /// The session's idle timeout, seconds from the end of a turn. Written to a ms.
    pub fn session_ttl_s(mut self, seconds: f64) -> Self {
        self.session_ttl_s = Some(seconds);
        self
    }

    /// How the engine takes part in the session.
    pub fn session_mode(mut self, mode: SessionMode) -> Self {
        self.session_mode = Some(mode);
        self
    }

    /// Whether the next turn is warmed after this one.
    pub fn prefill(mut self, on: bool) -> Self {
        self.prefill = Some(on);
        self
    }

    /// The priority sent to the worker.
    pub fn engine_priority(mut self, priority: EnginePriority) -> Self {
        self.engine_priority = Some(priority);
        self
    }

    /// A note in the decision log, under `name`. At most 1 KiB each and 16 per turn are kept.
    pub fn note(mut self, name: impl Into<String>, text: impl Into<String>) -> Self {
        self.notes.push((name.into(), text.into()));
        self
    }

    /// Writes what was decided, by one call of the host, or one for each part where the host knows no better.
    pub fn write(&self, host: &dyn Host) {
        let mut parts = Parts::new();
        self.each(&mut |name, value| parts.add(name, value));
        if !parts.write(host) {
            self.each(&mut |name, value| {
                // Names of notes may have dots of their own; no other name has more than one.
                let path: Vec<&str> = std::iter::once("turnstile").chain(name.splitn(2, '.')).collect();
                host.set(&path, value);
            });
        }
    }

    fn each(&self, put: &mut dyn FnMut(&str, &[u8])) {
        let mut set = |name: &str, value: &str| put(name, value.as_bytes());
        if let Some(worker) = &self.target {
            set("route.target", &worker.to_string());
        }
        if !self.fallbacks.is_empty() {
            set("route.fallbacks", &join(&self.fallbacks));
        }
        if !self.exclude.is_empty() {
            set("route.exclude", &join(&self.exclude));
        }
        if !self.scores.is_empty() {
            set("route.scores", &scores_json(&self.scores));
        }
        if let Some(reason) = &self.reason {
            set("route.reason", reason);
        }
        if let Some(tier) = self.tier {
            set("queue.tier", &tier.to_string());
        }
        if let Some(seconds) = self.priority.filter(|seconds| seconds.is_finite()) {
            set("queue.priority", &decimal(seconds, 3));
        }
        if let Some(ms) = self.deadline_ms {
            set("queue.deadline_ms", &ms.to_string());
        }
        if let Some(flow) = &self.flow {
            set("queue.flow", flow);
        }
        if let Some(action) = self.session_action {
            set("session.action", action.text());
        }
        if let Some(key) = &self.session_key {
            set("session.key", key);
        }
        if let Some(seconds) = self.session_ttl_s.filter(|seconds| seconds.is_finite()) {
            set("session.ttl_s", &decimal(seconds, 3));
        }
        if let Some(mode) = self.session_mode {
            set("session.mode", mode.text());
        }
        if let Some(on) = self.prefill {
            set("prefill", if on { "on" } else { "off" });
        }
        match self.engine_priority {
            Some(EnginePriority::Value(value)) => set("engine.priority", &value.to_string()),
            Some(EnginePriority::Absent) => set("engine.priority", "none"),
            None => {}
        }
        for (name, text) in &self.notes {
            set(&format!("log.{name}"), text);
        }
    }
}

fn join(workers: &[WorkerName]) -> String {
    let mut list = String::with_capacity(workers.len() * 4);
    for worker in workers {
        if !list.is_empty() {
            list.push(',');
        }
        // Writing to a String cannot fail.
        let _ = write!(list, "{worker}");
    }
    list
}

/// `{"#0":12.5,…}`. What is not finite is left out, since JSON has no number for it.
fn scores_json(scores: &[(WorkerName, f64)]) -> String {
    let mut json = String::with_capacity(scores.len() * 16 + 2);
    json.push('{');
    for (worker, cost) in scores.iter().filter(|(_, cost)| cost.is_finite()) {
        if json.len() > 1 {
            json.push(',');
        }
        match worker {
            WorkerName::Index(index) => {
                let _ = write!(json, "\"#{index}\"");
            }
            // A string can always be written as JSON.
            WorkerName::Id(id) => json.push_str(&serde_json::to_string(id).unwrap_or_default()),
        }
        json.push(':');
        json.push_str(&decimal(*cost, 1));
    }
    json.push('}');
    json
}

/// A finite number with at most `places` decimal places, by integer arithmetic: printing floats exactly costs more than
/// the rest of a decision. Trailing zeros are left out; what is too large for this is written as the largest.
fn decimal(value: f64, places: u32) -> String {
    const LARGEST: f64 = 1e15;
    let unit = 10u64.pow(places);
    let scaled = (value * unit as f64).round().clamp(-LARGEST, LARGEST) as i64;
    let sign = if scaled < 0 { "-" } else { "" };
    let (whole, mut fraction) = (scaled.unsigned_abs() / unit, scaled.unsigned_abs() % unit);
    if fraction == 0 {
        return format!("{sign}{whole}");
    }
    let mut width = places as usize;
    while fraction.is_multiple_of(10) {
        fraction /= 10;
        width -= 1;
    }
    format!("{sign}{whole}.{fraction:0width$}")
}

// === impl WorkerName ===

impl WorkerName {
    /// The index, if it is named by that.
    pub fn index(&self) -> Option<u32> {
        match self {
            WorkerName::Index(index) => Some(*index),
            WorkerName::Id(_) => None,
        }
    }

    /// Reads `#7` or an id.
    pub fn from_text(text: &str) -> WorkerName {
        match text.strip_prefix('#').and_then(|index| index.parse().ok()) {
            Some(index) => WorkerName::Index(index),
            None => WorkerName::Id(text.to_owned()),
        }
    }
}

impl fmt::Display for WorkerName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WorkerName::Index(index) => write!(f, "#{index}"),
            WorkerName::Id(id) => f.write_str(id),
        }
    }
}

impl From<u32> for WorkerName {
    fn from(index: u32) -> Self {
        WorkerName::Index(index)
    }
}

impl From<String> for WorkerName {
    fn from(id: String) -> Self {
        WorkerName::Id(id)
    }
}

impl From<&str> for WorkerName {
    fn from(id: &str) -> Self {
        WorkerName::Id(id.to_owned())
    }
}

// === impl SessionAction ===

impl SessionAction {
    /// The value in the property.
    pub fn text(self) -> &'static str {
        match self {
            SessionAction::Bind => "bind",
            SessionAction::Open => "open",
            SessionAction::Close => "close",
            SessionAction::Release => "release",
            SessionAction::Nothing => "none",
        }
    }
}

// === impl SessionMode ===

impl SessionMode {
    /// The value in the property.
    pub fn text(self) -> &'static str {
        match self {
            SessionMode::Affinity => "affinity",
            SessionMode::Tag => "tag",
            SessionMode::Stream => "stream",
            SessionMode::Auto => "auto",
        }
    }

    /// Reads the property's value.
    pub fn from_text(text: &str) -> Option<SessionMode> {
        match text {
            "affinity" => Some(SessionMode::Affinity),
            "tag" => Some(SessionMode::Tag),
            "stream" => Some(SessionMode::Stream),
            "auto" => Some(SessionMode::Auto),
            _ => None,
        }
    }
}

#[cfg(test)]
#[path = "decision_tests.rs"]
mod tests;
