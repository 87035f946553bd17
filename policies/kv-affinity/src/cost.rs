//! What a turn costs on a worker, in milliseconds of waiting for everyone concerned.

use serde::Deserialize;
use turnstile_policy::Worker;

/// KV use below this share is free of pressure: the engine evicts little before it.
const KV_PRESSURE_FROM: f64 = 0.8;

/// A rate no engine is below. Keeps a worker that was never measured, or measured as standing still, comparable.
const LEAST_PREFILL_TOKENS_PER_S: f64 = 1.0;

/// The plugin's configuration table.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Cost of each request that already runs or waits on the worker, ms: what one more sequence takes from a batch.
    pub decode_ms_per_request: f64,
    /// Cost of a KV pool that would be full, ms. Grows from 0 at 80 % use.
    pub kv_pressure_ms: f64,
    /// Cost of each request that waits on the worker, ms.
    pub queue_ms: f64,
    /// A bound session moves only when that is cheaper by more than this, ms,
    pub margin_ms: f64,
    /// and by more than this share of what staying costs.
    pub margin_share: f64,
    /// How many next-cheapest workers to name as fallbacks.
    pub fallbacks: usize,
    /// How many workers' costs to write into the decision log, cheapest first.
    pub scores: usize,
}

/// The weights of the cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cost {
    decode_ms_per_request: f64,
    kv_pressure_ms: f64,
    queue_ms: f64,
}

// === impl Options ===

impl Default for Options {
    fn default() -> Self {
        Options {
            decode_ms_per_request: 2.0,
            kv_pressure_ms: 200.0,
            queue_ms: 50.0,
            margin_ms: 50.0,
            margin_share: 0.1,
            fallbacks: 3,
            scores: 8,
        }
    }
}

impl Options {
    /// The weights.
    pub fn cost(&self) -> Cost {
        Cost {
            decode_ms_per_request: self.decode_ms_per_request,
            kv_pressure_ms: self.kv_pressure_ms,
            queue_ms: self.queue_ms,
        }
    }

    /// Refuses what would turn the rule around.
    ///
    /// # Errors
    /// Names the option that is out of range.
    pub fn check(&self) -> Result<(), String> {
        let not_negative = [
            ("decode_ms_per_request", self.decode_ms_per_request),
            ("kv_pressure_ms", self.kv_pressure_ms),
            ("queue_ms", self.queue_ms),
            ("margin_ms", self.margin_ms),
            ("margin_share", self.margin_share),
        ];
        for (name, value) in not_negative {
            if !value.is_finite() || value < 0.0 {
                return Err(format!("option `{name}`: must be 0 or more"));
            }
        }
        Ok(())
    }
}

// === impl Cost ===

impl Cost {
    /// Milliseconds that a turn of `prompt_tokens` costs on `worker`.
    pub fn of(&self, worker: &Worker, prompt_tokens: u64) -> f64 {
        let rate = worker.prefill_tokens_per_s.max(LEAST_PREFILL_TOKENS_PER_S);
        let uncached = prompt_tokens.saturating_sub(worker.cached_tokens) as f64;
        let ahead = worker.waiting_uncached_tokens as f64 + worker.pending_prefill_tokens as f64;
        // The engine's report is late, our own count knows nothing of other gateways: the larger is nearer the truth.
        let sequences = (worker.running.saturating_add(worker.waiting)).max(worker.in_flight);
        1000.0 * (uncached + ahead) / rate
            + f64::from(sequences) * self.decode_ms_per_request
            + self.kv_pressure(worker, uncached)
            + f64::from(worker.waiting) * self.queue_ms
    }

    fn kv_pressure(&self, worker: &Worker, uncached: f64) -> f64 {
        if worker.kv_capacity_tokens == 0 {
            return 0.0;
        }
        let used = worker.kv_used_tokens as f64 + uncached + worker.expected_decode_tokens as f64;
        let above = (used / worker.kv_capacity_tokens as f64 - KV_PRESSURE_FROM).max(0.0);
        self.kv_pressure_ms * above / (1.0 - KV_PRESSURE_FROM)
    }
}

#[cfg(test)]
#[path = "cost_tests.rs"]
mod tests;
