//! What a plugin has done so far, in numbers.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use crate::outcome::FaultKind;

/// Counters of one plugin, over all its shards. Relaxed: each is right, together they are of about one moment.
#[derive(Debug, Default)]
pub(crate) struct StatsCounters {
    pub(crate) calls: AtomicU64,
    pub(crate) nanoseconds: AtomicU64,
    pub(crate) faults: [AtomicU64; FaultKind::ALL.len()],
    pub(crate) late: AtomicU64,
    pub(crate) restarts: AtomicU64,
    pub(crate) failed_restarts: AtomicU64,
    pub(crate) ticks: AtomicU64,
    pub(crate) tolerated: AtomicU64,
    pub(crate) log_lines_dropped: AtomicU64,
    pub(crate) memory_high_water: AtomicU64,
    pub(crate) crash_streak: AtomicU32,
    pub(crate) recycled: AtomicU64,
    /// Streams in a row that took an instance of their own down.
    pub(crate) stream_streak: AtomicU32,
    /// Guests have acted, or asked for something that lets them act, for streams other than the one that they were called for:
    /// ticks, queues, calls to upstreams.
    pub(crate) acts_apart: AtomicBool,
}

/// Counters of one plugin at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PluginStats {
    /// Number of this start among all plugin starts of the process, from 1: a reloaded plugin has a higher one.
    pub generation: u64,
    /// Times the guest was entered for a stream or the root; a first callback and the context's creation are one.
    pub calls: u64,
    /// Wall time spent in those, ns.
    pub nanoseconds: u64,
    /// Calls that did not return, by [`FaultKind::index`].
    pub faults: [u64; FaultKind::ALL.len()],
    /// Calls that ran past their deadline, including those that ended within the grace.
    pub late: u64,
    /// Instances built in place of discarded ones.
    pub restarts: u64,
    /// Attempts to build such an instance that failed.
    pub failed_restarts: u64,
    /// Tick callbacks.
    pub ticks: u64,
    /// Mistakes of the guest's that were answered with OK.
    pub tolerated: u64,
    /// Log lines over the limit.
    pub log_lines_dropped: u64,
    /// Most linear memory that one instance has had, bytes.
    pub memory_high_water: u64,
    /// Crashes in a row, as [`Plugin::crash_streak`](crate::Plugin::crash_streak).
    pub crash_streak: u32,
    /// Instances replaced because their memory had grown over `recycle_bytes`.
    pub recycled: u64,
    /// Out of service, see [`Plugin::quarantine`](crate::Plugin::quarantine).
    pub quarantined: bool,
    /// Shards whose instance is healthy now.
    pub healthy_shards: usize,
    /// All shards.
    pub shards: usize,
    /// Calls to upstreams that are open.
    pub open_calls: usize,
}

impl PluginStats {
    /// Calls that ended in a fault of this kind.
    pub fn faults_of(&self, kind: FaultKind) -> u64 {
        self.faults.get(kind.index()).copied().unwrap_or(0)
    }
}

impl StatsCounters {
    pub(crate) fn count_fault(&self, kind: FaultKind) {
        if let Some(counter) = self.faults.get(kind.index()) {
            counter.fetch_add(1, Relaxed);
        }
    }

    pub(crate) fn count_call(&self, started: Instant) {
        self.calls.fetch_add(1, Relaxed);
        self.nanoseconds.fetch_add(u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }

    pub(crate) fn acts_apart(&self) {
        // Read for each piece of an answer: written only where it changes something.
        if !self.acts_apart.load(Relaxed) {
            self.acts_apart.store(true, Relaxed);
        }
    }

    pub(crate) fn saw_memory(&self, bytes: usize) {
        self.memory_high_water.fetch_max(bytes as u64, Relaxed);
    }

    pub(crate) fn snapshot(&self) -> PluginStats {
        let read = |counter: &AtomicU64| counter.load(Relaxed);
        PluginStats {
            generation: 0,
            calls: read(&self.calls),
            nanoseconds: read(&self.nanoseconds),
            faults: std::array::from_fn(|at| self.faults.get(at).map_or(0, read)),
            late: read(&self.late),
            restarts: read(&self.restarts),
            failed_restarts: read(&self.failed_restarts),
            ticks: read(&self.ticks),
            tolerated: read(&self.tolerated),
            log_lines_dropped: read(&self.log_lines_dropped),
            memory_high_water: read(&self.memory_high_water),
            crash_streak: self.crash_streak.load(Relaxed),
            recycled: read(&self.recycled),
            quarantined: false,
            healthy_shards: 0,
            shards: 0,
            open_calls: 0,
        }
    }
}
