//! One instance of a plugin behind a lock, and its replacement after a fault.
//!
//! A fault throws the instance away: its memory is suspect. The streams it held are lost, each to be treated by the
//! plugin's `on_error` policy. A fresh instance is built by [`Plugin::tick`](crate::Plugin::tick), never by a request:
//! after 100 ms first, then twice as long each time it fails again, up to 30 s, with jitter.
//!
//! An instance whose memory has grown too much is replaced as well, but goes on for the streams it holds until they end.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::callout::Outgoing;
use crate::instance::Instance;

/// First and longest wait before a fresh instance is built, ms.
const FIRST_BACK_OFF_MS: u64 = 100;
const LONGEST_BACK_OFF_MS: u64 = 30_000;

/// An instance that has lived so long starts the back-off anew, ms.
const STABLE_MS: u64 = 60_000;

#[derive(Default)]
pub(crate) struct Shard {
    pub(crate) state: Mutex<ShardState>,
    /// An instance that was replaced while streams ran in it, by its number. Locked after `state`, if both are.
    pub(crate) leaving: Mutex<Option<(u64, Arc<Mutex<ShardState>>)>>,
    /// Streams whose owner went away without finishing them: instance number and context.
    pub(crate) orphans: Mutex<Vec<(u64, u32)>>,
}

#[derive(Default)]
pub(crate) struct ShardState {
    pub(crate) instance: Option<Box<Instance>>,
    pub(crate) respawn: Respawn,
    /// When the next tick callback is due; none until the guest asks for ticks.
    pub(crate) next_tick_ms: Option<u64>,
    /// When a root that asked for time is deleted anyway.
    pub(crate) end_by_ms: Option<u64>,
    /// Calls of instances that are gone, to be broken off.
    pub(crate) cancelled: Vec<(u64, Outgoing)>,
    /// When the instance was last replaced, or was to be, because of its memory.
    pub(crate) recycled_ms: Option<u64>,
}

impl ShardState {
    /// Whether the instance with this number is here.
    pub(crate) fn holds(&self, sequence: u64) -> bool {
        self.instance.as_deref().is_some_and(|instance| instance.sequence() == sequence)
    }
}

/// When to build an instance in place of a lost one. Knows no clock: all times are the caller's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Respawn {
    failures: u32,
    due_ms: Option<u64>,
    healthy_since_ms: Option<u64>,
}

impl Respawn {
    /// The instance was seen alive.
    pub(crate) fn alive(&mut self, now_ms: u64) {
        let since = *self.healthy_since_ms.get_or_insert(now_ms);
        self.due_ms = None;
        if now_ms.saturating_sub(since) >= STABLE_MS {
            self.failures = 0;
        }
    }

    /// There is no instance. True if one should be built now. `jitter` is any random number.
    pub(crate) fn missing(&mut self, now_ms: u64, jitter: u64) -> bool {
        self.healthy_since_ms = None;
        match self.due_ms {
            Some(due) => now_ms >= due,
            None => {
                self.plan(now_ms, jitter);
                false
            }
        }
    }

    /// The instance that was built did not start.
    pub(crate) fn failed(&mut self, now_ms: u64, jitter: u64) {
        self.plan(now_ms, jitter);
    }

    /// How often in a row the instance was lost or did not start.
    pub(crate) fn failures(self) -> u32 {
        self.failures
    }

    fn plan(&mut self, now_ms: u64, jitter: u64) {
        let whole = (FIRST_BACK_OFF_MS << self.failures.min(16)).min(LONGEST_BACK_OFF_MS);
        // Between three quarters and the whole, so that shards do not come back in step.
        let wait = whole - jitter % (whole / 4);
        self.failures = self.failures.saturating_add(1);
        self.due_ms = Some(now_ms.saturating_add(wait));
    }
}

#[cfg(test)]
#[path = "shard_tests.rs"]
mod tests;
