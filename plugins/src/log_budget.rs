//! How many log lines a plugin may still write.

use parking_lot::Mutex;

/// A token bucket over log lines: `per_s` lines a second, as many in one burst.
#[derive(Debug)]
pub(crate) struct LogBudget {
    per_s: u32,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    // Thousandths of a line.
    tokens: u64,
    last_ms: u64,
    dropped: u64,
}

/// What to do with a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Write it. So many lines were dropped since the last one that was written.
    Write {
        /// Lines dropped since the last written one.
        dropped_before: u64,
    },
    /// Drop it.
    Drop,
}

impl LogBudget {
    pub(crate) fn new(per_s: u32) -> Self {
        Self { per_s, state: Mutex::new(State { tokens: u64::from(per_s) * 1000, last_ms: 0, dropped: 0 }) }
    }

    pub(crate) fn per_s(&self) -> u32 {
        self.per_s
    }

    pub(crate) fn take(&self, now_ms: u64) -> Verdict {
        let mut state = self.state.lock();
        let elapsed = now_ms.saturating_sub(state.last_ms);
        state.last_ms = state.last_ms.max(now_ms);
        let per_s = u64::from(self.per_s);
        state.tokens = state.tokens.saturating_add(elapsed.saturating_mul(per_s)).min(per_s * 1000);
        if state.tokens < 1000 {
            state.dropped += 1;
            return Verdict::Drop;
        }
        state.tokens -= 1000;
        Verdict::Write { dropped_before: std::mem::take(&mut state.dropped) }
    }
}

#[cfg(test)]
#[path = "log_budget_tests.rs"]
mod tests;
