//! What a plugin may use in its self-test: state of its own, calls that all fail, and a clock that goes as fast as it is waited for.

use crate::callouts::Destinations;
use crate::workbench::filter::callees::Callees;
use crate::workbench::waiting::Answers;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use turnstile_plugins::{CallCommand, PluginServices, SharedState};

/// What one self-test's plugin may use. Nothing of it outlives the self-test, and nothing of it is the live plugins'.
pub struct TestPort {
    shared: SharedState,
    destinations: Destinations,
    callees: Callees,
    /// Calls that were answered.
    answered: AtomicUsize,
    /// How far waiting has put the clock forward, ms.
    ahead_ms: AtomicU64,
}

// === impl TestPort ===

impl TestPort {
    /// For a plugin that may call these.
    pub fn new(destinations: Destinations) -> Self {
        Self {
            shared: SharedState::default(),
            destinations,
            callees: Callees::unreachable(),
            answered: AtomicUsize::new(0),
            ahead_ms: AtomicU64::new(0),
        }
    }

    /// Whether a call has failed, as all do here.
    pub fn has_failed_calls(&self) -> bool {
        self.answered.load(Relaxed) > 0
    }

    /// Why a callback that was told of a failed call did not return, if one did not.
    pub fn fault(&self) -> Option<String> {
        self.callees.fault()
    }

    fn ahead(&self) -> Duration {
        Duration::from_millis(self.ahead_ms.load(Relaxed))
    }
}

impl Answers for TestPort {
    fn serve(&self, now_ms: u64) -> bool {
        self.ahead_ms.store(now_ms, Relaxed);
        let any = self.callees.serve(now_ms);
        self.answered.fetch_add(usize::from(any), Relaxed);
        any
    }
}

impl PluginServices for TestPort {
    fn shared(&self) -> &SharedState {
        &self.shared
    }

    fn wall_clock_ns(&self) -> u64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default() + self.ahead();
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    }

    fn monotonic_ns(&self, running: Duration) -> u64 {
        u64::try_from((running + self.ahead()).as_nanos()).unwrap_or(u64::MAX)
    }

    fn has_upstream(&self, _: &str, upstream: &str) -> bool {
        self.destinations.has(upstream)
    }

    fn has_redis(&self, _: &str, upstream: &str) -> bool {
        self.destinations.has_redis(upstream)
    }

    fn call_out(&self, _: &str, command: CallCommand) {
        self.callees.ask(command);
    }
}
