//! What is in memory of each start of a plugin, for as long as anything of it is: whether what a swap has replaced is gone shows
//! nowhere else.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

/// One start of a plugin of which something is in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LivePlugin {
    /// The plugin's name.
    pub name: Arc<str>,
    /// Number of this start, as [`PluginStats::generation`](crate::PluginStats::generation).
    pub start: u64,
    /// Instances, those that go on for streams only included.
    pub instances: usize,
    /// Their linear memory, bytes, as it was when they were last looked at.
    pub memory_bytes: usize,
}

/// All starts of a runtime's plugins.
#[derive(Default)]
pub(crate) struct LivePlugins(Mutex<Vec<Weak<Live>>>);

/// The numbers of one start.
#[derive(Default)]
pub(crate) struct Live {
    name: Arc<str>,
    start: u64,
    instances: AtomicUsize,
    memory_bytes: AtomicUsize,
}

/// Counts an instance, as long as it lives.
pub(crate) struct Presence {
    live: Arc<Live>,
    memory_bytes: AtomicUsize,
}

// === impl LivePlugins ===

impl LivePlugins {
    pub(crate) fn add(&self, name: &Arc<str>, start: u64) -> Arc<Live> {
        let (instances, memory_bytes) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let live = Arc::new(Live { name: Arc::clone(name), start, instances, memory_bytes });
        let mut all = self.0.lock();
        all.retain(|live| live.strong_count() > 0);
        all.push(Arc::downgrade(&live));
        live
    }

    pub(crate) fn list(&self) -> Vec<LivePlugin> {
        let shown = |live: Arc<Live>| LivePlugin {
            name: Arc::clone(&live.name),
            start: live.start,
            instances: live.instances.load(Relaxed),
            memory_bytes: live.memory_bytes.load(Relaxed),
        };
        self.0.lock().iter().filter_map(Weak::upgrade).map(shown).collect()
    }
}

// === impl Live ===

impl Live {
    pub(crate) fn enter(self: &Arc<Self>) -> Presence {
        self.instances.fetch_add(1, Relaxed);
        Presence { live: Arc::clone(self), memory_bytes: AtomicUsize::new(0) }
    }
}

// === impl Presence ===

impl Presence {
    /// The instance has so much linear memory now.
    pub(crate) fn saw_memory(&self, bytes: usize) {
        let before = self.memory_bytes.swap(bytes, Relaxed);
        // Wraps around on the way down, as atomics do.
        self.live.memory_bytes.fetch_add(bytes.wrapping_sub(before), Relaxed);
    }
}

impl Drop for Presence {
    fn drop(&mut self) {
        self.saw_memory(0);
        self.live.instances.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_is_listed_as_long_as_anything_of_it_is_there() {
        let all = LivePlugins::default();
        let name: Arc<str> = "one".into();
        let live = all.add(&name, 7);
        let shown =
            |instances, memory_bytes| vec![LivePlugin { name: "one".into(), start: 7, instances, memory_bytes }];
        assert_eq!(all.list(), shown(0, 0));
        let (first, second) = (live.enter(), live.enter());
        first.saw_memory(100);
        second.saw_memory(50);
        first.saw_memory(80);
        assert_eq!(all.list(), shown(2, 130));
        drop((first, live));
        assert_eq!(all.list(), shown(1, 50));
        drop(second);
        assert_eq!(all.list(), []);
    }
}
