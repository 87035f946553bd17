//! A worker's load as `GET /v1/loads` tells it, summed over its data parallel ranks.
//!
//! That endpoint is read from shared memory and stays truthful when the scheduler is stuck; the Prometheus gauges of the
//! engine do not (they move only when a batch is logged).

use serde::Deserialize;

/// Sums over all ranks. A number that some rank does not tell is 0, which means unknown for the two capacities.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests running.
    pub running: u32,
    /// Requests in the engine's queue.
    pub waiting: u32,
    /// `max_running_requests`; 0 unknown.
    pub max_running: u32,
    /// Tokens in the engine's queue that are not cached.
    pub waiting_uncached_tokens: u64,
    /// KV tokens in use.
    pub kv_used_tokens: u64,
    /// KV tokens in all; 0 unknown.
    pub kv_capacity_tokens: u64,
    /// Uncached tokens prefilled since the engine started.
    pub prefill_uncached_total: u64,
    /// Microseconds spent on them.
    pub prefill_busy_us_total: u64,
    /// The ranks, in the order of the report.
    pub ranks: Vec<RankLoad>,
}

/// One rank of a worker.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RankLoad {
    /// Its number.
    pub rank: u32,
    /// Requests running.
    pub running: u32,
    /// Requests in its queue.
    pub waiting: u32,
    /// KV tokens in use.
    pub kv_used_tokens: u64,
}

/// Why a report is of no use. The last known load stays in force.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Not the JSON of `/v1/loads`.
    #[error("not a load report: {0}")]
    Malformed(#[from] serde_json::Error),
    /// The engine answers 200 with an empty list for a rank that it does not have.
    #[error("the load report has no rank")]
    NoRank,
}

#[derive(Deserialize)]
struct Report {
    loads: Vec<Rank>,
}

/// Keys of one entry. Every one may be missing or null: sections can be left out of a report, and versions differ.
#[derive(Deserialize)]
struct Rank {
    #[serde(default)]
    dp_rank: Option<u32>,
    #[serde(default)]
    num_running_reqs: Option<u32>,
    #[serde(default)]
    num_waiting_reqs: Option<u32>,
    #[serde(default)]
    num_waiting_uncached_tokens: Option<u64>,
    #[serde(default)]
    num_used_tokens: Option<u64>,
    #[serde(default)]
    max_total_num_tokens: Option<u64>,
    #[serde(default)]
    max_running_requests: Option<u32>,
    #[serde(default)]
    total_prefill_uncached_tokens: Option<u64>,
    #[serde(default)]
    total_prefill_busy_us: Option<u64>,
}

// === impl Load ===

impl Load {
    /// Reads the body of `GET /v1/loads`.
    ///
    /// # Errors
    /// The body is not such a report, or lists no rank.
    pub fn parse(body: &[u8]) -> Result<Self, LoadError> {
        let report: Report = serde_json::from_slice(body)?;
        if report.loads.is_empty() {
            return Err(LoadError::NoRank);
        }
        let mut load = Self::default();
        for rank in &report.loads {
            load.add(rank);
        }
        // A sum with a hole in it is not a capacity.
        if report.loads.iter().any(|rank| rank.max_running_requests.unwrap_or(0) == 0) {
            load.max_running = 0;
        }
        if report.loads.iter().any(|rank| rank.max_total_num_tokens.unwrap_or(0) == 0) {
            load.kv_capacity_tokens = 0;
        }
        Ok(load)
    }

    fn add(&mut self, rank: &Rank) {
        let number = u32::try_from(self.ranks.len()).unwrap_or(u32::MAX);
        let one = RankLoad {
            rank: rank.dp_rank.unwrap_or(number),
            running: rank.num_running_reqs.unwrap_or(0),
            waiting: rank.num_waiting_reqs.unwrap_or(0),
            kv_used_tokens: rank.num_used_tokens.unwrap_or(0),
        };
        self.running = self.running.saturating_add(one.running);
        self.waiting = self.waiting.saturating_add(one.waiting);
        self.kv_used_tokens = self.kv_used_tokens.saturating_add(one.kv_used_tokens);
        self.max_running = self.max_running.saturating_add(rank.max_running_requests.unwrap_or(0));
        self.waiting_uncached_tokens =
            self.waiting_uncached_tokens.saturating_add(rank.num_waiting_uncached_tokens.unwrap_or(0));
        self.kv_capacity_tokens = self.kv_capacity_tokens.saturating_add(rank.max_total_num_tokens.unwrap_or(0));
        self.prefill_uncached_total =
            self.prefill_uncached_total.saturating_add(rank.total_prefill_uncached_tokens.unwrap_or(0));
        self.prefill_busy_us_total = self.prefill_busy_us_total.saturating_add(rank.total_prefill_busy_us.unwrap_or(0));
        self.ranks.push(one);
    }
}
