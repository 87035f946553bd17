//! The host's side of one instance: what its imports read and write.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::task::Waker;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hashbrown::HashMap;
use wasmtime::{Memory, ResourceLimiter, TypedFunc};

use crate::abi::{AbiVersion, LogLevel};
use crate::berth::{Berth, Visit};
use crate::callback::{Callback, CallbackSet};
use crate::callout::{CallCount, Calls, Shown};
use crate::env::StreamEnv;
use crate::imports::RedisOptions;
use crate::live::Live;
use crate::log_budget::{LogBudget, Verdict};
use crate::outcome::Effects;
use crate::services::{LogLine, PluginServices};
use crate::shared_data::NameSpace;
use crate::spec::PluginSpec;
use crate::stats::StatsCounters;

/// The one root context of an instance. Stream contexts count up from the next number.
pub(crate) const ROOT_CONTEXT: u32 = 1;

/// Longest log line handed to the gateway, bytes.
const MAX_LOG_LINE: usize = 16 << 10;

/// What all instances of one plugin share.
pub(crate) struct Loaded {
    pub(crate) spec: PluginSpec,
    pub(crate) abi: AbiVersion,
    pub(crate) callbacks: CallbackSet,
    pub(crate) services: Arc<dyn PluginServices>,
    /// Somebody wants to know what each callback costs.
    pub(crate) measured: bool,
    pub(crate) name_space: NameSpace,
    pub(crate) stats: StatsCounters,
    /// Counts its instances.
    pub(crate) live: Arc<Live>,
    /// Calls that are open, over all instances.
    pub(crate) open_calls: CallCount,
    log_budget: LogBudget,
    started: Instant,
    told: AtomicU32,
}

/// Things said once in a plugin's life.
#[derive(Clone, Copy, Debug)]
#[repr(u32)]
pub(crate) enum Once {
    UnknownImport = 1,
    DisallowedImport = 2,
}

impl Loaded {
    pub(crate) fn new(
        spec: PluginSpec,
        abi: AbiVersion,
        callbacks: CallbackSet,
        services: Arc<dyn PluginServices>,
        live: Arc<Live>,
    ) -> Self {
        Self {
            name_space: services.shared().data.space(&spec.vm_id),
            log_budget: LogBudget::new(spec.limits.log_lines_per_s),
            stats: StatsCounters::default(),
            measured: services.measures(),
            live,
            open_calls: CallCount::default(),
            started: Instant::now(),
            told: AtomicU32::new(0),
            spec,
            abi,
            callbacks,
            services,
        }
    }

    /// A line of the guest's.
    pub(crate) fn log(&self, level: LogLevel, message: &[u8]) {
        if level < self.services.log_level(&self.spec.name) {
            return;
        }
        let now_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        let Verdict::Write { dropped_before } = self.log_budget.take(now_ms) else {
            self.stats.log_lines_dropped.fetch_add(1, Relaxed);
            return;
        };
        let plugin = &*self.spec.name;
        if dropped_before > 0 {
            let message = format!("{dropped_before} log lines dropped, limit is {} a second", self.log_budget.per_s());
            self.services.log(LogLine { plugin, level: LogLevel::Warn, message: &message });
        }
        let message = String::from_utf8_lossy(message.get(..MAX_LOG_LINE).unwrap_or(message));
        self.services.log(LogLine { plugin, level, message: &message });
    }

    /// A line of the host's about a mistake of the guest's that was answered with OK.
    pub(crate) fn tolerate(&self, mistake: std::fmt::Arguments<'_>) {
        self.stats.tolerated.fetch_add(1, Relaxed);
        self.log(LogLevel::Warn, mistake.to_string().as_bytes());
    }

    pub(crate) fn say_once(&self, what: Once, message: std::fmt::Arguments<'_>) {
        if self.told.fetch_or(what as u32, Relaxed) & what as u32 == 0 {
            let message = message.to_string();
            self.services.log(LogLine { plugin: &self.spec.name, level: LogLevel::Warn, message: &message });
        }
    }

    pub(crate) fn monotonic_ns(&self) -> u64 {
        self.services.monotonic_ns(self.started.elapsed())
    }
}

/// What the guest may call now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// The start functions run: logging and WASI only.
    Starting,
    /// A callback runs: everything.
    Running,
    /// The guest's allocator runs on the host's behalf: logging, clocks and `fd_write` only.
    Allocating,
}

/// Store data of one instance.
pub(crate) struct Host {
    pub(crate) plugin: Arc<Loaded>,
    pub(crate) memory: Option<Memory>,
    pub(crate) allocate: Option<TypedFunc<u32, u32>>,
    pub(crate) phase: Phase,
    /// The callback that runs now.
    pub(crate) callback: Option<Callback>,
    /// The context whose things the guest reads and writes now.
    pub(crate) effective: u32,
    /// The context whose environment is lent; 0 for none.
    pub(crate) lender: u32,
    pub(crate) env: Option<Box<dyn StreamEnv>>,
    /// Effects on the lender.
    pub(crate) effects: Effects,
    /// The environment of another stream, while the guest acts for that.
    visiting: Option<Visit>,
    /// Live stream contexts.
    pub(crate) streams: HashMap<u32, StreamSlot>,
    /// Streams for which another context's callback asked for something, since [`Host::settle`].
    touched: Vec<u32>,
    pub(crate) calls: Calls,
    /// How the guest wants to call its Redis servers, by the upstream's name.
    pub(crate) redis: HashMap<String, RedisOptions>,
    /// What the answer that the guest is told of looks like; nothing outside of such a callback.
    pub(crate) shown: Arc<Shown>,
    /// What `proxy_get_status` says.
    pub(crate) status: (u32, String),
    pub(crate) foreign_arguments: Bytes,
    pub(crate) tick_period_ms: u32,
    pub(crate) tick_changed: bool,
    /// Queues that this instance registered, and its name as their consumer.
    pub(crate) queues: Vec<u32>,
    pub(crate) consumer: u64,
    pub(crate) root_end: RootEnd,
    pub(crate) limiter: MemoryLimiter,
    /// The callback is past its deadline and in its grace: CPU time of the thread when it was found to be, and when that was.
    pub(crate) late_at: Option<(Duration, Instant)>,
    /// The callback has waited once for the owner of a stream.
    pub(crate) met: bool,
    /// Kept for its capacity.
    pub(crate) scratch: Vec<u8>,
}

/// The longest from a stream's pause that a callback waits for its owner: within the deadline of callbacks.
const MEET_LIMIT: Duration = Duration::from_millis(100);

/// A live stream context.
#[derive(Default)]
pub(crate) struct StreamSlot {
    /// What callbacks of other contexts asked for it.
    pub(crate) effects: Effects,
    /// Where its environment lies while its owner waits.
    pub(crate) berth: Option<Arc<Berth>>,
    /// Its owner, if it waits.
    pub(crate) waker: Option<Waker>,
    /// When its last callback paused, if nothing has made it go on since.
    pub(crate) paused: Option<Instant>,
}

impl StreamSlot {
    /// Its owner waits, or is about to, and its environment is with the owner still.
    pub(crate) fn is_between(&self) -> bool {
        self.paused.is_some() && !self.berth.as_ref().is_some_and(|berth| berth.is_taken())
    }

    /// How much longer its owner may take to come where it waits, with this limit from the pause on. One that is at other work is
    /// not waited for.
    fn patience(&self, limit: Duration) -> Duration {
        let paused = self.paused.filter(|_| self.is_between());
        paused.map_or(Duration::ZERO, |paused| limit.saturating_sub(paused.elapsed()))
    }

    /// Takes what callbacks of other contexts asked for.
    pub(crate) fn take_effects(&mut self) -> Effects {
        let effects = std::mem::take(&mut self.effects);
        self.paused = self.paused.filter(|_| !effects.resumes());
        effects
    }
}

impl Drop for StreamSlot {
    /// Whoever waits learns that there is nothing to wait for.
    fn drop(&mut self) {
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// How far the root context has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RootEnd {
    No,
    /// `proxy_on_done` asked for time.
    Pending,
    /// `proxy_done` was called since.
    Done,
}

impl Host {
    pub(crate) fn new(plugin: Arc<Loaded>, consumer: u64) -> Self {
        let limits = plugin.spec.limits;
        Self {
            limiter: MemoryLimiter::new(limits.memory_bytes, limits.table_elements),
            plugin,
            memory: None,
            allocate: None,
            phase: Phase::Starting,
            callback: None,
            effective: ROOT_CONTEXT,
            lender: 0,
            env: None,
            effects: Effects::default(),
            visiting: None,
            streams: HashMap::new(),
            touched: Vec::new(),
            calls: Calls::default(),
            redis: HashMap::new(),
            shown: Arc::default(),
            status: (0, String::new()),
            foreign_arguments: Bytes::new(),
            tick_period_ms: 0,
            tick_changed: false,
            queues: Vec::new(),
            consumer,
            root_end: RootEnd::No,
            late_at: None,
            met: false,
            scratch: Vec::new(),
        }
    }

    /// Where effects on the effective context go: to the callback's outcome or, for another live stream, to its later
    /// callers. Nothing if the effective context is the root.
    pub(crate) fn effects(&mut self) -> Option<&mut Effects> {
        if self.effective == self.lender {
            return Some(&mut self.effects);
        }
        let slot = self.streams.get_mut(&self.effective)?;
        if !self.touched.contains(&self.effective) {
            self.touched.push(self.effective);
        }
        Some(&mut slot.effects)
    }

    /// Where the environment of the effective context is, if it can be used now.
    pub(crate) fn env_slot(&mut self) -> Option<&mut Option<Box<dyn StreamEnv>>> {
        if self.effective == self.lender {
            return Some(&mut self.env);
        }
        match &mut self.visiting {
            Some(visit) if visit.context == self.effective => Some(&mut visit.env),
            _ => None,
        }
    }

    /// The environment of the effective context.
    pub(crate) fn env(&mut self) -> Option<&mut dyn StreamEnv> {
        self.env_slot()?.as_deref_mut()
    }

    /// Makes another context the effective one, and borrows its environment if its owner waits.
    pub(crate) fn act_for(&mut self, context: u32) {
        self.visiting = None;
        self.effective = context;
        if context == self.lender {
            return;
        }
        self.plugin.stats.acts_apart();
        let Some(slot) = self.streams.get(&context) else { return };
        let Some(berth) = &slot.berth else { return };
        // Between its callback that paused and the place where it waits an owner runs straight on and needs no lock of ours, so it
        // is there at once, unless its thread was put aside. One that is at other work is not waited for twice.
        let mut patience = Duration::ZERO;
        if !self.met {
            let limit = MEET_LIMIT.min(Duration::from_millis(self.plugin.spec.limits.callback_deadline_ms / 2));
            patience = slot.patience(limit);
            self.met = !patience.is_zero();
        }
        self.visiting = Visit::new(berth, context, patience);
    }

    /// After a callback: gives a borrowed environment back and wakes the owners of streams for which something was asked.
    pub(crate) fn settle(&mut self) {
        self.visiting = None;
        for context in self.touched.drain(..) {
            let waker = self.streams.get_mut(&context).and_then(|slot| slot.waker.take());
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    pub(crate) fn lenient(&self) -> bool {
        self.plugin.spec.lenient
    }
}

/// Bounds the memory and tables of one instance and remembers if it refused.
#[derive(Debug)]
pub(crate) struct MemoryLimiter {
    memory_bytes: usize,
    table_elements: usize,
    pub(crate) high_water: usize,
    pub(crate) refused: bool,
}

impl MemoryLimiter {
    fn new(memory_bytes: usize, table_elements: usize) -> Self {
        Self { memory_bytes, table_elements, high_water: 0, refused: false }
    }
}

impl ResourceLimiter for MemoryLimiter {
    fn memory_growing(&mut self, _: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        let allowed = desired <= self.memory_bytes;
        if allowed {
            self.high_water = self.high_water.max(desired);
        } else {
            self.refused = true;
        }
        Ok(allowed)
    }

    fn table_growing(&mut self, _: usize, desired: usize, _: Option<usize>) -> wasmtime::Result<bool> {
        let allowed = desired <= self.table_elements;
        self.refused |= !allowed;
        Ok(allowed)
    }

    fn instances(&self) -> usize {
        1
    }

    fn memories(&self) -> usize {
        1
    }

    fn tables(&self) -> usize {
        16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_waited_for_only_right_after_its_stream_has_paused() {
        let limit = Duration::from_secs(3600);
        let paused = |ago: Duration| {
            let mut slot = StreamSlot::default();
            slot.paused = Instant::now().checked_sub(ago);
            slot
        };
        assert_eq!(StreamSlot::default().patience(limit), Duration::ZERO, "it has not paused");
        assert!(!paused(Duration::ZERO).patience(limit).is_zero());
        assert_eq!(
            paused(Duration::from_secs(2)).patience(Duration::from_secs(1)),
            Duration::ZERO,
            "it is at other work"
        );
    }
}
