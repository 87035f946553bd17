//! The fleet that a policy is tried on, described in a file.
//!
//! Its members have the names of the facts that they become; what the gateway derives from others (a worker's index,
//! whether it is at its limit, whether it holds the session) cannot be given.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use turnstile_fleet::ids::{SessionKey, WorkerId};
use turnstile_fleet::session::{SessionMode, SessionView};
use turnstile_fleet::worker::{Capabilities, WorkerState, WorkerView};

/// Most workers in one file.
const MAX_WORKERS: usize = 4096;

/// The workers of a pool, and what is known of the turn beside its request.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FleetFile {
    /// The workers of the turn's pool, at most 4096. Their indexes are their places in this list, from 0.
    pub workers: Vec<WorkerEntry>,
    /// The turn's live session. The turn must name a session.
    #[serde(default)]
    pub session: Option<SessionEntry>,
    /// Bytes of a prompt that are one token.
    #[serde(default = "default_bytes_per_token")]
    pub bytes_per_token: f64,
    /// Attempts that were made before.
    #[serde(default)]
    pub attempt: u32,
    /// Why the last of them failed.
    #[serde(default)]
    pub last_error: Option<String>,
    /// Events that the policy is told of, in order, as under [Events](#events): `{"event": "finish", "at_ms": 5, "reason": "stop"}`.
    #[serde(default)]
    pub events: Vec<serde_json::Map<String, serde_json::Value>>,
    /// How the turn ends. Without it, the end is that of a turn that no worker answered.
    #[serde(default)]
    pub end: Option<EndEntry>,
}

/// One worker.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WorkerEntry {
    /// Its id; unique.
    pub id: String,
    /// Whether it takes turns.
    #[serde(default)]
    pub state: StateEntry,
    /// Its labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// What it can do.
    #[serde(default)]
    pub capabilities: BTreeSet<CapabilityEntry>,
    /// Whether it failed this turn before.
    #[serde(default)]
    pub excluded: bool,
    /// Requests of this gateway in flight.
    #[serde(default)]
    pub in_flight: u32,
    /// Most of them; absent: as many as it runs.
    #[serde(default)]
    pub max_in_flight: Option<u32>,
    /// Requests that it runs.
    #[serde(default)]
    pub running: u32,
    /// Requests that wait there.
    #[serde(default)]
    pub waiting: u32,
    /// Most requests that it runs; 0: not known.
    #[serde(default)]
    pub max_running: u32,
    /// Uncached prompt tokens of the requests that wait there.
    #[serde(default)]
    pub waiting_uncached_tokens: u64,
    /// KV tokens in use.
    #[serde(default)]
    pub kv_used_tokens: u64,
    /// KV tokens in all; 0: not known.
    #[serde(default)]
    pub kv_capacity_tokens: u64,
    /// Tokens of this turn's prompt that are probably cached there. More than the prompt has count as all of it.
    #[serde(default)]
    pub cached_tokens: u64,
    /// Prefill rate, tokens a second; absent: what the gateway takes for a worker that it does not know yet.
    #[serde(default)]
    pub prefill_tokens_per_s: Option<f64>,
    /// Average time to first token, ms; 0: not known.
    #[serde(default)]
    pub ttft_ms: f64,
    /// Average time between tokens, ms; 0: not known.
    #[serde(default)]
    pub itl_ms: f64,
    /// Uncached tokens of our turns there that have not answered yet.
    #[serde(default)]
    pub pending_prefill_tokens: u64,
    /// Output tokens expected of our turns in flight there.
    #[serde(default)]
    pub expected_decode_tokens: u64,
}

/// Whether a worker takes turns.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum StateEntry {
    /// Takes turns.
    #[default]
    Ready,
    /// Finishes what it has.
    Draining,
    /// Its probes fail.
    Unhealthy,
    /// Not probed yet.
    Starting,
}

/// What a worker can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CapabilityEntry {
    /// Sessions by tag.
    Tag,
    /// Streaming sessions.
    Stream,
    /// Takes a priority.
    Priority,
}

/// The turn's live session.
#[derive(Debug, Clone, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SessionEntry {
    /// Id of the worker that it is bound to; absent: that worker is gone.
    #[serde(default)]
    pub worker: Option<String>,
    /// Data-parallel rank that it is bound to.
    #[serde(default)]
    pub rank: Option<u32>,
    /// How the engine takes part.
    #[serde(default)]
    pub mode: ModeEntry,
    /// Time since its first turn began, ms.
    #[serde(default)]
    pub age_ms: u64,
    /// Time since its last turn ended, ms.
    #[serde(default)]
    pub idle_ms: u64,
    /// Turns that ended.
    #[serde(default)]
    pub turns: u32,
    /// Tokens that it holds on the worker.
    #[serde(default)]
    pub held_tokens: u64,
    /// Cached tokens of its last turn.
    #[serde(default)]
    pub last_cached_tokens: u64,
    /// Whether the engine holds a session for it.
    #[serde(default)]
    pub engine_open: bool,
}

/// How an engine takes part in a session.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ModeEntry {
    /// Not at all.
    #[default]
    Affinity,
    /// By a tag.
    Tag,
    /// With a streaming session.
    Stream,
}

/// How a turn ends.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EndEntry {
    /// Id of the worker that served it.
    #[serde(default)]
    pub worker: Option<String>,
    /// HTTP status for the client.
    pub status: u16,
    /// Prompt tokens, as the worker reports them.
    #[serde(default)]
    pub prompt_tokens: Option<u64>,
    /// Completion tokens, as the worker reports them.
    #[serde(default)]
    pub completion_tokens: Option<u64>,
    /// Cached tokens, as the worker reports them.
    #[serde(default)]
    pub cached_tokens: Option<u64>,
    /// Time to the first event, waiting included, ms.
    #[serde(default)]
    pub ttft_ms: Option<f64>,
    /// Why generation ended.
    #[serde(default)]
    pub finish_reason: Option<String>,
}

fn default_bytes_per_token() -> f64 {
    4.0
}

// === impl FleetFile ===

impl FleetFile {
    /// Reads and checks a file's text.
    ///
    /// # Errors
    /// The place and the member that is wrong, and why.
    pub fn parse(json: &[u8]) -> Result<Self, String> {
        let file: Self = serde_json::from_slice(json).map_err(|e| e.to_string())?;
        file.check()?;
        Ok(file)
    }

    fn check(&self) -> Result<(), String> {
        if self.workers.len() > MAX_WORKERS {
            return Err(format!("workers: {} are more than {MAX_WORKERS}", self.workers.len()));
        }
        let mut ids = BTreeSet::new();
        for (at, worker) in self.workers.iter().enumerate() {
            if worker.id.is_empty() {
                return Err(format!("workers[{at}].id: is empty"));
            }
            if !ids.insert(&worker.id) {
                return Err(format!("workers[{at}].id: there is another {:?}", worker.id));
            }
            let rate = worker.prefill_tokens_per_s.unwrap_or(1.0);
            if !(rate.is_finite() && rate > 0.0) {
                return Err(format!("workers[{at}].prefill_tokens_per_s: must be more than 0, found {rate}"));
            }
            for (name, ms) in [("ttft_ms", worker.ttft_ms), ("itl_ms", worker.itl_ms)] {
                if !(ms.is_finite() && ms >= 0.0) {
                    return Err(format!("workers[{at}].{name}: must be 0 or more, found {ms}"));
                }
            }
        }
        let known = |member: &str, id: &Option<String>| match id {
            Some(id) if !ids.contains(id) => Err(format!("{member}: there is no worker {id:?}")),
            _ => Ok(()),
        };
        known("session.worker", &self.session.as_ref().and_then(|s| s.worker.clone()))?;
        known("end.worker", &self.end.as_ref().and_then(|e| e.worker.clone()))?;
        if !(self.bytes_per_token.is_finite() && self.bytes_per_token > 0.0) {
            return Err(format!("bytes_per_token: must be more than 0, found {}", self.bytes_per_token));
        }
        match &self.end {
            Some(end) if !(100..=599).contains(&end.status) => {
                Err(format!("end.status: must be 100 to 599, found {}", end.status))
            }
            Some(EndEntry { ttft_ms: Some(ms), .. }) if !(ms.is_finite() && *ms >= 0.0) => {
                Err(format!("end.ttft_ms: must be 0 or more, found {ms}"))
            }
            _ => Ok(()),
        }
    }

    /// The workers as decisions see them.
    pub fn views(&self) -> Arc<[WorkerView]> {
        self.workers.iter().enumerate().map(|(at, worker)| worker.view(index(at))).collect()
    }

    /// Workers that failed the turn before.
    pub fn excluded(&self) -> Vec<WorkerId> {
        let failed = self.workers.iter().enumerate().filter(|(_, worker)| worker.excluded);
        failed.map(|(at, _)| index(at)).collect()
    }

    /// The turn's session under its key.
    pub fn session_view(&self, key: SessionKey, ttl_ms: u64) -> Option<SessionView> {
        let session = self.session.as_ref()?;
        let worker = session.worker.as_ref().and_then(|id| self.workers.iter().position(|w| w.id == *id));
        Some(SessionView {
            key,
            generation: 1,
            mode: session.mode.into(),
            worker: worker.map(index),
            rank: session.rank,
            engine_open: session.engine_open,
            awaiting_release: false,
            age_ms: session.age_ms,
            idle_ms: session.idle_ms,
            ttl_ms,
            turns: session.turns,
            in_flight: 0,
            held_tokens: session.held_tokens,
            last_cached_tokens: session.last_cached_tokens,
        })
    }
}

/// Places in a file fit: their number is bounded.
fn index(at: usize) -> WorkerId {
    WorkerId(u32::try_from(at).unwrap_or(u32::MAX))
}

// === impl WorkerEntry ===

impl WorkerEntry {
    fn view(&self, index: WorkerId) -> WorkerView {
        let fresh = WorkerView::new(self.id.as_str(), index);
        WorkerView {
            state: self.state.into(),
            capabilities: Capabilities {
                tag: self.capabilities.contains(&CapabilityEntry::Tag),
                stream: self.capabilities.contains(&CapabilityEntry::Stream),
                priority: self.capabilities.contains(&CapabilityEntry::Priority),
                dp_size: 0,
            },
            labels: Arc::new(self.labels.clone()),
            in_flight: self.in_flight,
            in_flight_at_load: self.in_flight,
            running: self.running,
            waiting: self.waiting,
            max_running: self.max_running,
            waiting_uncached_tokens: self.waiting_uncached_tokens,
            kv_used_tokens: self.kv_used_tokens,
            kv_capacity_tokens: self.kv_capacity_tokens,
            prefill_tokens_per_s: self.prefill_tokens_per_s.unwrap_or(fresh.prefill_tokens_per_s),
            ttft_ms: self.ttft_ms,
            itl_ms: self.itl_ms,
            pending_prefill_tokens: self.pending_prefill_tokens,
            expected_decode_tokens: self.expected_decode_tokens,
            limit: self.max_in_flight,
            ..fresh
        }
    }
}

impl From<StateEntry> for WorkerState {
    fn from(state: StateEntry) -> Self {
        match state {
            StateEntry::Ready => Self::Ready,
            StateEntry::Draining => Self::Draining,
            StateEntry::Unhealthy => Self::Unhealthy,
            StateEntry::Starting => Self::Starting,
        }
    }
}

impl From<ModeEntry> for SessionMode {
    fn from(mode: ModeEntry) -> Self {
        match mode {
            ModeEntry::Affinity => Self::Affinity,
            ModeEntry::Tag => Self::Tag,
            ModeEntry::Stream => Self::Stream,
        }
    }
}

#[cfg(test)]
#[path = "fleet_file_tests.rs"]
mod tests;
