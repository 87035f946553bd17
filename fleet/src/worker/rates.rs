//! Rates of a worker, learned from its answers and its counters.

/// Prefill rate assumed until a worker has shown its own, uncached tokens a second. The middle of what one GPU does with a
/// model of ordinary size; a wrong guess lasts for a few turns.
pub const DEFAULT_PREFILL_TOKENS_PER_S: f64 = 8_000.0;

/// Share that one sample of TTFT or ITL has in the average.
const SAMPLE_WEIGHT: f64 = 0.2;

/// Uncached tokens after which a prefill sample counts for about two thirds (1 - 1/e). A short prompt says little of the
/// rate, for its time is mostly overhead; a long one says all.
const PREFILL_WEIGHT_TOKENS: f64 = 8_192.0;

/// Fewest uncached tokens that say anything of the rate.
const PREFILL_LEAST_TOKENS: u64 = 64;

/// Learned averages. All are exponential moving averages; what is 0 is unknown.
#[derive(Debug, Clone, PartialEq)]
pub struct Rates {
    prefill_tokens_per_s: f64,
    ttft_ms: f64,
    itl_ms: f64,
    /// Counters of the last report: (uncached tokens, busy µs).
    totals: Option<(u64, u64)>,
    /// The engine's own counters have moved, so TTFT (which contains queueing) no longer teaches the rate.
    from_totals: bool,
}

// === impl Rates ===

impl Default for Rates {
    fn default() -> Self {
        Self::new(DEFAULT_PREFILL_TOKENS_PER_S)
    }
}

impl Rates {
    /// Nothing learned; `prefill_tokens_per_s` is the first guess.
    pub fn new(prefill_tokens_per_s: f64) -> Self {
        Self { prefill_tokens_per_s, ttft_ms: 0.0, itl_ms: 0.0, totals: None, from_totals: false }
    }

    /// The first token of a turn came after `ttft_ms`; `uncached_tokens` of its prompt were not cached.
    pub fn observe_ttft(&mut self, uncached_tokens: u64, ttft_ms: f64) {
        if !ttft_ms.is_finite() || ttft_ms <= 0.0 {
            return;
        }
        blend(&mut self.ttft_ms, ttft_ms);
        if !self.from_totals {
            self.observe_prefill(uncached_tokens, ttft_ms / 1_000.0);
        }
    }

    /// The engine's counters now stand at `uncached_tokens` prefilled in `busy_us` microseconds. Counters that went back
    /// are those of a new process.
    pub fn observe_totals(&mut self, uncached_tokens: u64, busy_us: u64) {
        let last = self.totals.replace((uncached_tokens, busy_us));
        let Some((last_tokens, last_us)) = last else { return };
        let (Some(tokens), Some(us)) = (uncached_tokens.checked_sub(last_tokens), busy_us.checked_sub(last_us)) else {
            return;
        };
        if self.observe_prefill(tokens, us as f64 / 1_000_000.0) {
            self.from_totals = true;
        }
    }

    /// The next report starts the counters anew.
    pub fn forget_totals(&mut self) {
        self.totals = None;
    }

    /// `tokens` came in `ms` after the first token.
    pub fn observe_decode(&mut self, tokens: u64, ms: f64) {
        if tokens > 0 && ms.is_finite() && ms > 0.0 {
            blend(&mut self.itl_ms, ms / tokens as f64);
        }
    }

    /// Uncached tokens a second.
    pub fn prefill_tokens_per_s(&self) -> f64 {
        self.prefill_tokens_per_s
    }

    /// Time to first token, ms; 0 unknown.
    pub fn ttft_ms(&self) -> f64 {
        self.ttft_ms
    }

    /// Time between tokens, ms; 0 unknown.
    pub fn itl_ms(&self) -> f64 {
        self.itl_ms
    }

    fn observe_prefill(&mut self, tokens: u64, seconds: f64) -> bool {
        if tokens < PREFILL_LEAST_TOKENS || seconds <= 0.0 {
            return false;
        }
        let weight = 1.0 - (-(tokens as f64) / PREFILL_WEIGHT_TOKENS).exp();
        self.prefill_tokens_per_s += weight * (tokens as f64 / seconds - self.prefill_tokens_per_s);
        true
    }
}

fn blend(average: &mut f64, sample: f64) {
    if *average == 0.0 {
        *average = sample;
    } else {
        *average += SAMPLE_WEIGHT * (sample - *average);
    }
}
