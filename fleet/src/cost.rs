//! What it costs, in milliseconds, to send a turn to a worker.
//!
//! The built-in `kv-affinity` policy computes the same; the formula is part of the policy interface:
//!
//! ```text
//! rate     = max(prefill_tokens_per_s, 1)
//! uncached = max(prompt_tokens - cached_tokens, 0)
//! cost_ms  = 1000 * (uncached + waiting_uncached_tokens + pending_prefill_tokens) / rate
//!          + max(running + waiting, in_flight) * decode_ms_per_request
//!          + kv_pressure_ms * max(0, (kv_used + uncached + expected_decode_tokens) / kv_capacity - 0.8) / 0.2
//!          + queue_ms * waiting
//! ```
//!
//! The third term is 0 while the capacity is unknown.

use crate::ids::WorkerId;
use crate::worker::WorkerView;

/// Weights of the cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CostOptions {
    /// What one more request in the batch costs, ms.
    pub decode_ms_per_request: f64,
    /// What a full KV pool costs, ms.
    pub kv_pressure_ms: f64,
    /// What one request in the worker's own queue costs, ms.
    pub queue_ms: f64,
    /// A turn leaves the worker of its session only for one that is cheaper by this, ms,
    pub margin_ms: f64,
    /// and by this share of what staying costs.
    pub margin_share: f64,
}

/// Share of the KV pool from which pressure counts.
const KV_PRESSURE_FROM: f64 = 0.8;

/// What is left of it from there on.
const KV_PRESSURE_WIDTH: f64 = 0.2;

// === impl CostOptions ===

impl Default for CostOptions {
    fn default() -> Self {
        Self { decode_ms_per_request: 2.0, kv_pressure_ms: 200.0, queue_ms: 50.0, margin_ms: 50.0, margin_share: 0.1 }
    }
}

impl CostOptions {
    /// Cost in ms of a turn of `prompt_tokens`, of which the worker is believed to have `cached_tokens`. Never negative, and
    /// never NaN while the options are not.
    pub fn cost_ms(&self, worker: &WorkerView, prompt_tokens: u64, cached_tokens: u64) -> f64 {
        let rate = worker.prefill_tokens_per_s.max(1.0);
        let uncached = prompt_tokens.saturating_sub(cached_tokens) as f64;
        let prefill = uncached + worker.waiting_uncached_tokens as f64 + worker.pending_prefill_tokens as f64;
        let requests = worker.running.saturating_add(worker.waiting).max(worker.in_flight);
        let pressure = if worker.kv_capacity_tokens == 0 {
            0.0
        } else {
            let used = worker.kv_used_tokens as f64 + uncached + worker.expected_decode_tokens as f64;
            (used / worker.kv_capacity_tokens as f64 - KV_PRESSURE_FROM).max(0.0) / KV_PRESSURE_WIDTH
        };
        1_000.0 * prefill / rate
            + f64::from(requests) * self.decode_ms_per_request
            + self.kv_pressure_ms * pressure
            + self.queue_ms * f64::from(worker.waiting)
    }

    /// Whether to leave the worker of the session, which costs `bound_ms`, for another that costs `other_ms`.
    pub fn worth_moving(&self, bound_ms: f64, other_ms: f64) -> bool {
        other_ms + self.margin_ms.max(self.margin_share * bound_ms) < bound_ms
    }
}

/// One step of SplitMix64: every bit of the input reaches every bit of the output.
///
/// ```
/// assert_eq!(turnstile_fleet::cost::mix(0), 0xe220_a839_7b1d_cdaf);
/// ```
pub fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Rendezvous weight of a worker for a seed, the turn's affinity hash: among equals the highest wins, and a worker that comes
/// or goes changes only the turns that it wins or won. Part of the policy interface: `mix(seed ^ mix(index))`.
pub fn rendezvous(seed: u64, worker: WorkerId) -> u64 {
    mix(seed ^ mix(u64::from(worker.0)))
}

#[cfg(test)]
#[path = "cost_tests.rs"]
mod tests;
