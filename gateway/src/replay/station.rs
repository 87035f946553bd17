//! A worker of a replay: the engine model, and what the gateway knows of it.

use super::fleet::WorkerSpec;
use std::sync::Arc;
use turnstile_fleet::ids::WorkerId;
use turnstile_fleet::worker::{Capabilities, Load, RankLoad, Worker, WorkerState};
use turnstile_sim::SimConfig;
use turnstile_sim::engine::Engine;

/// A worker.
pub struct Station {
    /// What the gateway knows of it.
    pub model: Worker,
    /// What it does.
    pub engine: Engine,
    max_running: u32,
    kv_tokens: u64,
}

impl Station {
    /// A worker that has just started. `limit`: turns that it is given at a time if it has no limit of its own. `longest`: tokens
    /// of the longest prompt with its answer.
    pub fn new(index: u32, spec: &WorkerSpec, limit: Option<u32>, longest: u64) -> Self {
        let size = |tokens: u64| usize::try_from(tokens).unwrap_or(usize::MAX);
        let config = SimConfig {
            prefill_tokens_per_s: spec.prefill_tokens_per_s,
            decode_ms_base: spec.decode_ms,
            decode_ms_per_running: spec.decode_ms_per_running,
            max_running_requests: spec.max_running as usize,
            max_total_tokens: size(spec.kv_tokens),
            context_length: size(longest.saturating_add(16)),
            enable_session_radix_cache: spec.tag,
            enable_priority_scheduling: spec.priority,
            enable_cache_report: true,
            ..SimConfig::default()
        };
        let mut model = Worker::new(spec.id.as_str(), WorkerId(index));
        model.state = WorkerState::Ready;
        // Streaming sessions are played as turns with their history.
        model.capabilities = Capabilities { tag: spec.tag, stream: false, priority: spec.priority, dp_size: 1 };
        model.labels = Arc::new(spec.labels.clone());
        model.limit = spec.max_in_flight.or(limit);
        let mut this = Self {
            model,
            engine: Engine::new(Arc::new(config)),
            max_running: spec.max_running,
            kv_tokens: spec.kv_tokens,
        };
        this.report();
        this
    }

    /// The gateway reads its load.
    pub fn report(&mut self) {
        let load = self.engine.load();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let rank = RankLoad {
            rank: 0,
            running: count(load.running),
            waiting: count(load.waiting),
            kv_used_tokens: load.used_tokens as u64,
        };
        let report = Load {
            running: rank.running,
            waiting: rank.waiting,
            max_running: self.max_running,
            waiting_uncached_tokens: load.waiting_uncached_tokens as u64,
            kv_used_tokens: rank.kv_used_tokens,
            kv_capacity_tokens: self.kv_tokens,
            prefill_uncached_total: load.prefill_uncached_tokens,
            prefill_busy_us_total: load.prefill_busy_us,
            ranks: vec![rank],
        };
        self.model.report(report);
    }

    /// Whether nothing runs there, and the gateway has seen that.
    pub fn is_seen_idle(&self) -> bool {
        let load = self.model.load();
        self.engine.requests() == 0
            && load.running == 0
            && load.waiting == 0
            && load.prefill_uncached_total == self.engine.load().prefill_uncached_tokens
    }
}
