//! Time and chance for plugins in a replay: the clock is the replay's, random numbers follow from the seed.

use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use turnstile_fleet::cost::mix;
use turnstile_plugins::{LogLine, PluginServices, SharedState};

/// Numbers that follow from a seed.
#[derive(Debug, Clone)]
pub struct Dice(u64);

/// What plugins are offered.
pub struct VirtualServices {
    shared: Arc<SharedState>,
    /// Unix µs of the replay's beginning.
    first_us: u64,
    now_us: AtomicU64,
    dice: Mutex<Dice>,
}

// === impl Dice ===

impl Dice {
    /// The numbers of a seed.
    pub fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    /// The next one.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// From 0 to below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.number() % end.max(1)
    }
}

// === impl VirtualServices ===

impl VirtualServices {
    /// Services whose clock stands at the beginning, `first_ms` of Unix time.
    pub fn new(shared: Arc<SharedState>, seed: u64, first_ms: u64) -> Self {
        let first_us = first_ms.saturating_mul(1000);
        Self { shared, first_us, now_us: AtomicU64::new(0), dice: Mutex::new(Dice::new(seed)) }
    }

    /// It is so many µs later than the beginning.
    pub fn set(&self, now_us: u64) {
        self.now_us.store(now_us, Ordering::Relaxed);
    }

    fn now_us(&self) -> u64 {
        self.now_us.load(Ordering::Relaxed)
    }
}

impl PluginServices for VirtualServices {
    fn shared(&self) -> &SharedState {
        &self.shared
    }

    /// What plugins log would drown what the replay says.
    fn log(&self, _: LogLine<'_>) {}

    fn wall_clock_ns(&self) -> u64 {
        self.first_us.saturating_add(self.now_us()).saturating_mul(1000)
    }

    fn monotonic_ns(&self, _: Duration) -> u64 {
        self.now_us().saturating_mul(1000)
    }

    fn fill_random(&self, target: &mut [u8]) -> bool {
        let mut dice = self.dice.lock();
        for chunk in target.chunks_mut(8) {
            let number = dice.number().to_le_bytes();
            chunk.copy_from_slice(number.get(..chunk.len()).unwrap_or_default());
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_and_chance_are_the_replays() {
        let services = || VirtualServices::new(Arc::default(), 5, 1_700_000_000_000);
        let (one, two) = (services(), services());
        one.set(2_500);
        assert_eq!(one.wall_clock_ns(), 1_700_000_000_002_500_000);
        assert_eq!(one.monotonic_ns(Duration::from_secs(9)), 2_500_000);
        let (mut a, mut b) = ([0; 13], [0; 13]);
        assert!(one.fill_random(&mut a) && two.fill_random(&mut b));
        assert_eq!(a, b);
        assert!(a.iter().any(|byte| *byte != 0));
        assert!(one.fill_random(&mut b));
        assert_ne!(a, b);
    }
}
