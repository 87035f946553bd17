//! Retries: how many there may be, and how long they wait.
//!
//! A turn that failed may go to another worker, but if all that fail do so, a fleet in trouble gets several times its load. The
//! budget allows retries as a share of the turns there are, and a few in any case.

/// Seconds that the budget looks back.
pub const WINDOW_S: u64 = 10;
/// One place more than the window has seconds: the present second is not over.
const SECONDS: usize = WINDOW_S as usize + 1;

/// Bounds of the budget.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BudgetOptions {
    /// Retries for each turn (0 or more).
    pub ratio: f64,
    /// Retries a second that are allowed in any case.
    pub floor_per_s: u32,
}

/// Turns and retries of the last seconds.
#[derive(Debug, Clone, Default)]
pub struct RetryBudget {
    seconds: [Second; SECONDS],
}

#[derive(Debug, Clone, Copy, Default)]
struct Second {
    number: u64,
    turns: u64,
    retries: u64,
}

// === impl RetryBudget ===

impl RetryBudget {
    /// A turn came.
    pub fn turn(&mut self, now_ms: u64) {
        self.at(now_ms).turns += 1;
    }

    /// Takes one retry out of the budget, if there is one. `in_progress`: turns that are being served; where turns are long
    /// these say more than those that came lately.
    pub fn take(&mut self, now_ms: u64, in_progress: u64, options: &BudgetOptions) -> bool {
        let now_s = now_ms / 1_000;
        let recent = self.seconds.iter().filter(|second| second.number + WINDOW_S >= now_s);
        let (turns, retries) = recent.fold((0u64, 0u64), |(turns, retries), second| {
            (turns.saturating_add(second.turns), retries.saturating_add(second.retries))
        });
        let floor = u64::from(options.floor_per_s) * WINDOW_S;
        // `as` saturates, and takes NaN for 0.
        let share = (turns.max(in_progress) as f64 * options.ratio) as u64;
        if retries >= floor.saturating_add(share) {
            return false;
        }
        self.at(now_ms).retries += 1;
        true
    }

    fn at(&mut self, now_ms: u64) -> &mut Second {
        let number = now_ms / 1_000;
        // The remainder is below the length.
        let at = usize::try_from(number % SECONDS as u64).unwrap_or(0);
        let second = &mut self.seconds[at.min(SECONDS - 1)];
        if second.number != number {
            *second = Second { number, ..Second::default() };
        }
        second
    }
}

/// Milliseconds before retry number `retry` (from 1): `base_ms` doubled for each one after the first, at most `max_ms`, of which
/// `seed` chooses the upper half's point, so that turns that failed together do not come back together.
pub fn pause_ms(base_ms: u64, max_ms: u64, retry: u32, seed: u64) -> u64 {
    let doublings = retry.saturating_sub(1).min(32);
    let whole = base_ms.saturating_mul(1 << doublings).min(max_ms);
    let half = whole / 2;
    let jitter = crate::cost::mix(seed ^ u64::from(retry)) % (whole - half + 1);
    half + jitter
}

#[cfg(test)]
#[path = "retry_tests.rs"]
mod tests;
