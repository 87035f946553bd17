//! Numbers that depend on nothing but a seed and whose they are, so that leaving one client out changes no other's.

use turnstile_fleet::cost::mix;

/// A stream of numbers.
#[derive(Debug, Clone)]
pub struct Dice {
    state: u64,
}

impl Dice {
    /// The stream of one owner under a seed.
    pub fn new(seed: u64, owner: u64) -> Self {
        Self { state: mix(seed ^ mix(owner.wrapping_add(0x9e37_79b9_7f4a_7c15))) }
    }

    /// Any number.
    pub fn number(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.state)
    }

    /// From 0 to below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.number() % end.max(1)
    }

    /// From `first` to `last`.
    pub fn within(&mut self, first: u64, last: u64) -> u64 {
        first + self.below(last.saturating_sub(first) + 1)
    }

    /// True so many times in a thousand.
    pub fn chance(&mut self, per_mille: u64) -> bool {
        self.below(1_000) < per_mille
    }
}
