//! Facts about workers and sessions, encoded for policies.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::ser::{SerializeMap, SerializeSeq, Serializer};

use crate::decision::{Candidates, Decision};
use crate::ids::WorkerId;
use crate::session::SessionView;
use crate::worker::{LimitOptions, WorkerView};

/// Version in the header of `workers.table`.
pub const TABLE_VERSION: u32 = 1;
/// Bytes of the header of `workers.table`.
pub const TABLE_HEADER_BYTES: usize = 16;
/// Bytes of one record. Readers take the size from the header, for records may grow.
pub const TABLE_RECORD_BYTES: usize = 104;

/// The session's worker.
pub const FLAG_BOUND: u32 = 1;
/// A worker at its limit.
pub const FLAG_AT_LIMIT: u32 = 2;
/// A worker not to use: it failed this turn before, or an earlier policy excluded it.
pub const FLAG_EXCLUDED: u32 = 4;

/// What the facts about workers depend on.
#[derive(Debug, Clone, Copy)]
pub struct WorkerFacts<'a> {
    /// The workers of the turn's pool.
    pub candidates: Candidates<'a>,
    /// The worker of its session.
    pub bound: Option<WorkerId>,
    /// Workers that failed it before.
    pub excluded: &'a [WorkerId],
    /// Workers that earlier policies excluded.
    pub excluded_by_policy: &'a [WorkerId],
    /// When a worker counts as full.
    pub limits: &'a LimitOptions,
}

// === impl WorkerFacts ===

impl WorkerFacts<'_> {
    /// `turnstile.workers.table`: little-endian; a header of four `u32` (version, record size, count, 0), then one record for
    /// each worker in order of index:
    ///
    /// | offset | type | |
    /// | --- | --- | --- |
    /// | 0 | u32 | index |
    /// | 4 | u32 | state: 0 ready, 1 draining, 2 unhealthy, 3 starting |
    /// | 8 | u32 | capabilities: 1 tag, 2 stream, 4 priority |
    /// | 12 | u32 | in flight, ours |
    /// | 16 | u32 | running |
    /// | 20 | u32 | waiting |
    /// | 24 | u32 | most running; 0 unknown |
    /// | 28 | u32 | flags: 1 bound, 2 at its limit, 4 excluded |
    /// | 32 | u64 | uncached tokens waiting |
    /// | 40 | u64 | KV tokens used |
    /// | 48 | u64 | KV tokens in all; 0 unknown |
    /// | 56 | u64 | tokens of this turn believed to be cached |
    /// | 64 | f64 | prefill tokens a second |
    /// | 72 | f64 | TTFT, ms |
    /// | 80 | f64 | ITL, ms |
    /// | 88 | u64 | uncached tokens of our turns that have not answered |
    /// | 96 | u64 | expected output of our turns in flight |
    pub fn table(&self) -> Vec<u8> {
        let count = self.candidates.workers().len();
        let mut out = Vec::with_capacity(TABLE_HEADER_BYTES + count * TABLE_RECORD_BYTES);
        header(count, &mut out);
        for (worker, cached_tokens) in self.candidates.iter() {
            self.record(worker, cached_tokens, &mut out);
        }
        out
    }

    /// `turnstile.workers.bound`: a table of the session's worker alone, if it is a candidate.
    pub fn bound_table(&self) -> Option<Vec<u8>> {
        let worker = self.candidates.get(self.bound?)?;
        let mut out = Vec::with_capacity(TABLE_HEADER_BYTES + TABLE_RECORD_BYTES);
        header(1, &mut out);
        self.record(worker, self.candidates.cached_tokens(worker.index), &mut out);
        Some(out)
    }

    fn record(&self, worker: &WorkerView, cached_tokens: u64, out: &mut Vec<u8>) {
        let words = [
            worker.index.0,
            worker.state.code(),
            worker.capabilities.bits(),
            worker.in_flight,
            worker.running,
            worker.waiting,
            worker.max_running,
            self.flags(worker),
        ];
        let numbers = [
            worker.waiting_uncached_tokens,
            worker.kv_used_tokens,
            worker.kv_capacity_tokens,
            cached_tokens,
            worker.prefill_tokens_per_s.to_bits(),
            worker.ttft_ms.to_bits(),
            worker.itl_ms.to_bits(),
            worker.pending_prefill_tokens,
            worker.expected_decode_tokens,
        ];
        out.extend_from_slice(words.map(u32::to_le_bytes).as_flattened());
        out.extend_from_slice(numbers.map(u64::to_le_bytes).as_flattened());
    }

    /// `turnstile.workers`: the same as JSON, an array in order of index. Unknown numbers are 0, as in the table.
    pub fn json(&self) -> String {
        text(self)
    }

    fn flags(&self, worker: &WorkerView) -> u32 {
        let flag = |set: bool, flag: u32| if set { flag } else { 0 };
        flag(self.bound == Some(worker.index), FLAG_BOUND)
            | flag(worker.at_limit(self.limits), FLAG_AT_LIMIT)
            | flag(self.is_excluded(worker.index), FLAG_EXCLUDED)
    }

    fn is_excluded(&self, worker: WorkerId) -> bool {
        self.excluded.contains(&worker) || self.excluded_by_policy.contains(&worker)
    }
}

fn header(count: usize, out: &mut Vec<u8>) {
    let count = u32::try_from(count).unwrap_or(u32::MAX);
    out.extend_from_slice([TABLE_VERSION, TABLE_RECORD_BYTES as u32, count, 0].map(u32::to_le_bytes).as_flattened());
}

impl Serialize for WorkerFacts<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut seq = serializer.serialize_seq(Some(self.candidates.workers().len()))?;
        for (worker, cached_tokens) in self.candidates.iter() {
            seq.serialize_element(&WorkerJson {
                id: &worker.id,
                index: worker.index,
                state: worker.state.name(),
                in_flight: worker.in_flight,
                running: worker.running,
                waiting: worker.waiting,
                max_running: worker.max_running,
                waiting_uncached_tokens: worker.waiting_uncached_tokens,
                kv_used_tokens: worker.kv_used_tokens,
                kv_capacity_tokens: worker.kv_capacity_tokens,
                cached_tokens,
                prefill_tokens_per_s: worker.prefill_tokens_per_s,
                ttft_ms: worker.ttft_ms,
                itl_ms: worker.itl_ms,
                pending_prefill_tokens: worker.pending_prefill_tokens,
                expected_decode_tokens: worker.expected_decode_tokens,
                capabilities: worker.capabilities.names().collect(),
                labels: &worker.labels,
                at_limit: worker.at_limit(self.limits),
                bound: self.bound == Some(worker.index),
                excluded: self.is_excluded(worker.index),
            })?;
        }
        seq.end()
    }
}

#[derive(Serialize)]
struct WorkerJson<'a> {
    id: &'a str,
    index: WorkerId,
    state: &'static str,
    in_flight: u32,
    running: u32,
    waiting: u32,
    max_running: u32,
    waiting_uncached_tokens: u64,
    kv_used_tokens: u64,
    kv_capacity_tokens: u64,
    cached_tokens: u64,
    prefill_tokens_per_s: f64,
    ttft_ms: f64,
    itl_ms: f64,
    pending_prefill_tokens: u64,
    expected_decode_tokens: u64,
    capabilities: Vec<&'static str>,
    labels: &'a BTreeMap<String, String>,
    at_limit: bool,
    bound: bool,
    excluded: bool,
}

/// `turnstile.session`: the turn's live session. `worker`: the id of the worker it is bound to, if that is still known.
pub fn session_json(session: &SessionView, worker: Option<&str>) -> String {
    #[derive(Serialize)]
    struct SessionJson<'a> {
        worker: Option<&'a str>,
        rank: Option<u32>,
        mode: &'static str,
        age_ms: u64,
        idle_ms: u64,
        turns: u32,
        held_tokens: u64,
        last_cached_tokens: u64,
        engine_open: bool,
    }
    text(&SessionJson {
        worker,
        rank: session.rank,
        mode: session.mode.name(),
        age_ms: session.age_ms,
        idle_ms: session.idle_ms,
        turns: session.turns,
        held_tokens: session.held_tokens,
        last_cached_tokens: session.last_cached_tokens,
        engine_open: session.engine_open,
    })
}

/// `turnstile.default`: what the built-in decides. Workers are named by id; priority is in seconds.
pub fn default_json(decision: &Decision, candidates: &Candidates<'_>) -> String {
    #[derive(Serialize)]
    struct DefaultJson<'a> {
        target: Option<&'a str>,
        scores: Scores<'a>,
        reason: Option<&'a str>,
        queue: QueueJson,
        session: SessionJson,
    }
    #[derive(Serialize)]
    struct QueueJson {
        tier: u32,
        priority: f64,
    }
    #[derive(Serialize)]
    struct SessionJson {
        action: Option<&'static str>,
        mode: Option<&'static str>,
    }
    text(&DefaultJson {
        target: decision.route.target.and_then(|worker| candidates.get(worker)).map(|worker| &*worker.id),
        scores: Scores { scores: decision.route.scores.as_deref().unwrap_or_default(), candidates },
        reason: decision.route.reason.as_deref(),
        queue: QueueJson {
            tier: decision.queue.tier.unwrap_or(0),
            priority: decision.queue.head_start_ms.unwrap_or(0) as f64 / 1_000.0,
        },
        session: SessionJson {
            action: decision.session.action.map(|action| action.name()),
            mode: decision.session.mode.map(|mode| mode.name()),
        },
    })
}

/// Costs by worker id.
struct Scores<'a> {
    scores: &'a [(WorkerId, f64)],
    candidates: &'a Candidates<'a>,
}

impl Serialize for Scores<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for &(worker, cost_ms) in self.scores {
            if let Some(worker) = self.candidates.get(worker) {
                map.serialize_entry(&*worker.id, &cost_ms)?;
            }
        }
        map.end()
    }
}

/// None of the values here can fail to be written: keys are text, numbers are numbers (a NaN becomes null).
fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_else(|_| "null".to_owned())
}

#[cfg(test)]
#[path = "facts_tests.rs"]
mod tests;
