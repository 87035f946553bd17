//! The fleet of a replay: what the log tells of its workers, and what the command line or a file says instead.

use super::args::FleetArgs;
use super::fleet_file;
use super::log::Log;
use crate::recording::line::WorkerEntry;
use serde::Serialize;
use std::collections::BTreeMap;

/// Workers where neither log nor command line says how many.
const WORKERS: u32 = 8;
/// Most workers.
pub const MAX_WORKERS: u32 = 1024;
/// KV tokens of a worker of which nothing is known.
const KV_TOKENS: u64 = 1_000_000;
/// Requests that it runs at a time.
const MAX_RUNNING: u32 = 64;
/// Its prefill rate, tokens a second.
const PREFILL_TOKENS_PER_S: f64 = 8_000.0;
/// Its decode step of an empty batch, ms, and what each request adds.
const DECODE_MS: f64 = 6.0;
const DECODE_MS_PER_RUNNING: f64 = 0.35;

/// One worker.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct WorkerSpec {
    /// Its id.
    pub id: String,
    /// Its labels.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// KV tokens.
    pub kv_tokens: u64,
    /// Requests that it runs at a time.
    pub max_running: u32,
    /// Turns that it is given at a time, if bounded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_in_flight: Option<u32>,
    /// Prefill rate, tokens a second.
    pub prefill_tokens_per_s: f64,
    /// A decode step of an empty batch, ms.
    pub decode_ms: f64,
    /// What each request of the batch adds, ms.
    pub decode_ms_per_running: f64,
    /// Whether it keeps tagged sessions longer.
    pub tag: bool,
    /// Whether it orders by priority.
    pub priority: bool,
}

/// What is known of the workers without a file: by the log, and by the command line, which comes first.
pub struct Recorded<'a> {
    workers: Vec<&'a WorkerEntry>,
    args: &'a FleetArgs,
    /// Between the tokens of the recorded streams that ran nearly alone, ms.
    gap_ms: Option<f64>,
}

/// The workers of a replay.
///
/// # Errors
/// There are too many, or what is wrong in the file with the fleet.
pub fn workers(log: &Log, pool: &str, args: &FleetArgs) -> Result<Vec<WorkerSpec>, String> {
    let recorded = Recorded::new(log, pool, args);
    if let Some(path) = &args.fleet {
        return fleet_file::read(path, &recorded);
    }
    let told = u32::try_from(recorded.workers.len()).ok().filter(|count| *count > 0);
    let count = args.workers.or(told).unwrap_or(WORKERS);
    if count > MAX_WORKERS {
        return Err(format!("the log has {count} workers, and a replay at most {MAX_WORKERS}: give it --workers"));
    }
    Ok((0..count).map(|place| recorded.worker(place)).collect())
}

// === impl Recorded ===

impl<'a> Recorded<'a> {
    /// Of a pool of a log.
    pub fn new(log: &'a Log, pool: &str, args: &'a FleetArgs) -> Self {
        let all = log.fleet.iter().flat_map(|fleet| &fleet.workers);
        Self { workers: all.filter(|worker| worker.pool == pool).collect(), args, gap_ms: gap_ms(log) }
    }

    /// The recorded worker of this id.
    pub fn named(&self, id: &str) -> Option<&'a WorkerEntry> {
        self.workers.iter().find(|worker| worker.id == id).copied()
    }

    /// The worker at a place: the recorded one, and behind the last of them one like the first, and so on.
    pub fn worker(&self, place: u32) -> WorkerSpec {
        let count = self.workers.len();
        let at = usize::try_from(place).unwrap_or_default();
        let entry = at.checked_rem(count).and_then(|at| self.workers.get(at)).copied();
        let id = match entry {
            Some(entry) if at < count => entry.id.clone(),
            _ => format!("worker-{place}"),
        };
        self.spec(id, entry)
    }

    /// A worker like a recorded one, or one of which nothing is known.
    pub fn spec(&self, id: String, entry: Option<&WorkerEntry>) -> WorkerSpec {
        let args = self.args;
        let has = |name: &str| entry.is_none_or(|entry| entry.capabilities.iter().any(|c| c == name));
        let some = |value: u64| (value > 0).then_some(value);
        let decode_ms_per_running = self.decode_ms_per_running();
        WorkerSpec {
            id,
            labels: entry.map(|entry| entry.labels.clone()).unwrap_or_default(),
            kv_tokens: args
                .kv_tokens
                .or_else(|| some(entry?.kv_capacity_tokens))
                .unwrap_or(KV_TOKENS)
                .clamp(1_000, 1 << 40),
            max_running: args
                .max_running
                .or_else(|| some(u64::from(entry?.max_running)).and_then(|n| u32::try_from(n).ok()))
                .unwrap_or(MAX_RUNNING),
            max_in_flight: args.max_in_flight.or_else(|| entry?.max_in_flight.filter(|limit| *limit > 0)),
            prefill_tokens_per_s: args
                .prefill_rate
                .or_else(|| entry.map(|e| e.prefill_tokens_per_s).filter(|rate| *rate >= 1.0 && rate.is_finite()))
                .unwrap_or(PREFILL_TOKENS_PER_S),
            decode_ms: self.decode_ms(decode_ms_per_running),
            decode_ms_per_running,
            tag: has("tag"),
            priority: has("priority"),
        }
    }

    /// A decode step of an empty batch, ms, of workers on which each request of a batch adds so much.
    pub fn decode_ms(&self, per_running: f64) -> f64 {
        let recorded = || self.gap_ms.map(|gap| ((gap - per_running).max(0.1) * 1e3).round() / 1e3);
        self.args.decode_ms.or_else(recorded).unwrap_or(DECODE_MS)
    }

    /// What each request of a batch adds to a step, ms.
    pub fn decode_ms_per_running(&self) -> f64 {
        self.args.decode_ms_per_running.unwrap_or(DECODE_MS_PER_RUNNING)
    }
}

/// Between the tokens of the quickest tenth of the recorded streams, ms: those ran nearly alone.
fn gap_ms(log: &Log) -> Option<f64> {
    let mut gaps: Vec<f64> = log
        .entries
        .iter()
        .filter(|entry| entry.line.stream && entry.line.end == "finished")
        .filter_map(|entry| {
            let tokens = entry.line.completion_tokens.filter(|tokens| *tokens >= 8)?;
            Some((entry.line.total_ms - entry.line.ttft_ms?) / (tokens - 1) as f64)
        })
        .filter(|gap| *gap > 0.0)
        .collect();
    gaps.sort_by(f64::total_cmp);
    gaps.get(gaps.len() / 10).copied()
}
