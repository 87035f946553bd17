//! A started plugin: its shards, its ticks, its end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use parking_lot::Mutex;
use wasmtime::{InstancePre, Store};

use crate::abi::{AbiVersion, Dialect};
use crate::apart::Apart;
use crate::callback::{Callback, CallbackSet, abi_version};
use crate::host::{Host, Loaded};
use crate::instance::{Failure, Instance, guarded};
use crate::link_check;
use crate::outcome::{Fault, FaultKind, PluginError, StartPhase};
use crate::runtime::Runtime;
use crate::services::PluginServices;
use crate::shard::{Respawn, Shard, ShardState};
use crate::spec::PluginSpec;
use crate::stats::PluginStats;
use crate::stream::{Stream, StreamKey};

/// How long a root that answered "not yet" to `proxy_on_done` may take, ms.
pub(crate) const ROOT_END_MS: u64 = 5_000;

/// Why a module of another dialect does not start.
const DIALECT_NEEDED: &str =
    "the module is written for Higress (ABI version 0.2.100); it needs `dialect = \"higress\"`";

static GENERATIONS: AtomicU64 = AtomicU64::new(0);

/// A plugin that was started, with all its instances. Cheap to clone; clones are the same plugin.
///
/// Streams hold the plugin: it may be dropped while they run, and its memory goes with the last of them. Dropping does
/// not enter the guest; call [`Plugin::shut_down`] first to let the guest end in order.
#[derive(Clone)]
pub struct Plugin {
    inner: Arc<PluginInner>,
}

pub(crate) struct PluginInner {
    pub(crate) loaded: Arc<Loaded>,
    pub(crate) shards: Box<[Shard]>,
    pub(crate) pre: InstancePre<Host>,
    generation: u64,
    ticking: Mutex<()>,
    closing: AtomicBool,
    quarantined: AtomicBool,
    retired: AtomicBool,
    pub(crate) apart: Apart,
    // Last: the clock must outlive the instances.
    pub(crate) runtime: Runtime,
}

/// What happened in a [`Plugin::tick`].
#[derive(Debug, Default)]
pub struct TickReport {
    /// Instances that were built in place of lost ones.
    pub restarted: usize,
    /// Instances that were replaced because their memory had grown.
    pub recycled: usize,
    /// Faults of tick and queue callbacks, and of instances that were built and did not start.
    pub faults: Vec<Fault>,
    /// Streams for which other callbacks asked for something: call [`Stream::take_effects`] on them.
    pub streams_with_effects: Vec<StreamKey>,
    /// Shards without an instance now.
    pub unhealthy_shards: usize,
    /// Crashes in a row of the shard that has most, as [`Plugin::crash_streak`].
    pub crash_streak: u32,
}

impl Plugin {
    /// Compiles, links, starts and configures a plugin. Blocks for the compilation (0.1 to 10 s, unless cached) and for
    /// the guest's own start: call it off the request path.
    ///
    /// The first instance is a canary: if it fails, nothing else is built.
    ///
    /// # Errors
    /// The step that failed and why.
    pub fn start(runtime: &Runtime, spec: PluginSpec, services: Arc<dyn PluginServices>) -> Result<Self, PluginError> {
        let name = Arc::clone(&spec.name);
        let error = |phase| {
            let plugin = Arc::clone(&name);
            move |message| PluginError { plugin, phase, message }
        };
        let module = runtime.module(&spec.wasm).map_err(error(StartPhase::Compile))?;
        let abi = abi_version(&module).map_err(error(StartPhase::Marker))?;
        if abi.dialect() != Dialect::Standard && spec.dialect == Dialect::Standard {
            return Err(error(StartPhase::Marker)(DIALECT_NEEDED.to_owned()));
        }
        let callbacks = CallbackSet::of(&module).map_err(error(StartPhase::Link))?;
        let generation = GENERATIONS.fetch_add(1, Relaxed) + 1;
        let live = runtime.live_plugins().add(&spec.name, generation);
        let loaded = Arc::new(Loaded::new(spec, abi, callbacks, services, live));
        let pre = {
            let mut store = Store::new(runtime.engine(), Host::new(Arc::clone(&loaded), 0));
            link_check::link(runtime.linker(loaded.spec.dialect), &module, &mut store, &loaded.spec)
                .map_err(error(StartPhase::Link))?
        };
        let shards = loaded.spec.shards.max(1);
        let mut built = Vec::with_capacity(shards);
        for _ in 0..shards {
            let instance = Instance::start(runtime, &loaded, &pre)?;
            if let Some(soft) = loaded.spec.recycle_bytes
                && instance.memory_bytes() > soft
            {
                let (has, may) = (instance.memory_bytes() >> 10, soft >> 10);
                let message = format!(
                    "has {has} KiB of memory when it has started, over the {may} KiB after which it is replaced"
                );
                return Err(error(StartPhase::Configure)(message));
            }
            let state = ShardState { instance: Some(Box::new(instance)), ..ShardState::default() };
            built.push(Shard { state: Mutex::new(state), ..Shard::default() });
        }
        let inner = Arc::new(PluginInner {
            loaded,
            shards: built.into_boxed_slice(),
            pre,
            generation,
            ticking: Mutex::new(()),
            closing: AtomicBool::new(false),
            quarantined: AtomicBool::new(false),
            retired: AtomicBool::new(false),
            apart: Apart::default(),
            runtime: runtime.clone(),
        });
        inner.send_all();
        Ok(Self { inner })
    }

    /// Begins a stream on the shard that `shard_hint` falls on; the index of the calling worker thread is a good hint.
    /// The guest hears of the stream with its first callback.
    pub fn open_stream(&self, shard_hint: usize) -> Stream {
        Stream::new(Arc::clone(&self.inner), shard_hint % self.inner.shards.len())
    }

    /// Does what time asks for: builds instances in place of lost ones, runs due tick callbacks, delivers queue items,
    /// ends streams that were dropped unfinished, replaces instances that have grown over `recycle_bytes`. Such an instance
    /// goes on for the streams it holds; while it does, its successor is not replaced. Call it every 10 to 50 ms from a
    /// thread that may block, with a clock that never goes back. A call while another runs does nothing.
    pub fn tick(&self, now_ms: u64) -> TickReport {
        let mut report = TickReport::default();
        let Some(_turn) = self.inner.ticking.try_lock() else { return report };
        for (at, shard) in self.inner.shards.iter().enumerate() {
            self.inner.tick_shard(at, shard, now_ms, &mut report);
            let outgoing = shard.state.lock().collect();
            self.inner.send(at, outgoing);
        }
        report.crash_streak = report.crash_streak.max(self.inner.loaded.stats.stream_streak.load(Relaxed));
        self.inner.loaded.stats.crash_streak.store(report.crash_streak, Relaxed);
        report
    }

    /// Crashes in a row, as of the last tick: how often the instance of one shard, of that which has most, was lost or did
    /// not start without a minute of health in between.
    pub fn crash_streak(&self) -> u32 {
        self.inner.loaded.stats.crash_streak.load(Relaxed)
    }

    /// Takes the plugin out of service: new streams find it unavailable, lost instances are not replaced. Streams that run
    /// go on.
    pub fn quarantine(&self) {
        self.inner.quarantined.store(true, Relaxed);
    }

    /// Whether the plugin is out of service.
    pub fn is_quarantined(&self) -> bool {
        self.inner.is_quarantined()
    }

    /// Puts a quarantined plugin back into service: its crashes are forgotten, lost instances are built anew by the next
    /// ticks. False if it was not quarantined.
    pub fn release(&self) -> bool {
        if !self.inner.quarantined.swap(false, Relaxed) {
            return false;
        }
        for shard in &self.inner.shards {
            shard.state.lock().respawn = Respawn::default();
        }
        self.inner.loaded.stats.crash_streak.store(0, Relaxed);
        self.inner.loaded.stats.stream_streak.store(0, Relaxed);
        true
    }

    /// Throws all instances away, and with them what runs in them: the streams' next calls fail with [`FaultKind::Lost`]. For
    /// a plugin whose streams have had their time. False if that was done before.
    pub fn retire(&self) -> bool {
        if self.inner.retired.swap(true, Relaxed) {
            return false;
        }
        for shard in &self.inner.shards {
            drop(shard.state.lock().take_instance());
        }
        self.inner.end_apart();
        self.inner.send_all();
        true
    }

    /// Whether [`Plugin::retire`] was called last.
    pub fn is_retired(&self) -> bool {
        self.inner.is_retired()
    }

    /// Takes [`Plugin::retire`] back, with fresh instances. Blocks for their start.
    ///
    /// # Errors
    /// An instance does not start; the plugin is as it was.
    pub fn revive(&self) -> Result<(), PluginError> {
        let inner = &self.inner;
        if !inner.retired.load(Relaxed) {
            return Ok(());
        }
        let start = |_: &Shard| Instance::start(&inner.runtime, &inner.loaded, &inner.pre);
        let started = inner.shards.iter().map(start).collect::<Result<Vec<_>, _>>()?;
        for (shard, instance) in inner.shards.iter().zip(started) {
            let mut state = shard.state.lock();
            state.instance = Some(Box::new(instance));
            (state.respawn, state.next_tick_ms, state.end_by_ms) = (Respawn::default(), None, None);
        }
        inner.send_all();
        inner.retired.store(false, Relaxed);
        Ok(())
    }

    /// Tells the guest that its root contexts end. Call it when the plugin's streams have ended. A guest that asks for
    /// time gets up to 5 s of further [`Plugin::tick`]s; [`Plugin::is_shut_down`] says when all have ended.
    pub fn shut_down(&self, now_ms: u64) {
        if self.inner.closing.swap(true, Relaxed) {
            return;
        }
        self.inner.end_apart();
        for shard in &self.inner.shards {
            let state = &mut *shard.state.lock();
            let ended = self.inner.enter(state, Instance::root_done);
            match ended {
                Ok(false) => state.end_by_ms = Some(now_ms.saturating_add(ROOT_END_MS)),
                _ => self.inner.end(state),
            }
        }
        self.inner.send_all();
    }

    /// True after [`Plugin::shut_down`], once no instance is left.
    pub fn is_shut_down(&self) -> bool {
        self.inner.closing.load(Relaxed) && self.inner.shards.iter().all(|shard| shard.state.lock().instance.is_none())
    }

    /// The plugin's name.
    pub fn name(&self) -> &Arc<str> {
        &self.inner.loaded.spec.name
    }

    /// Whether two handles are of one start of a plugin.
    pub fn is_same_start(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Number of this start among all plugin starts of the process, from 1.
    pub fn start_number(&self) -> u64 {
        self.inner.generation
    }

    /// What was started.
    pub fn spec(&self) -> &PluginSpec {
        &self.inner.loaded.spec
    }

    /// The ABI version the module announces.
    pub fn abi(&self) -> AbiVersion {
        self.inner.loaded.abi
    }

    /// True if the module exports this callback. Modules of the Rust SDK export all.
    pub fn exports(&self, callback: Callback) -> bool {
        self.inner.loaded.callbacks.contains(callback)
    }

    /// True once its guests have had a reason to act for streams outside of the streams' own callbacks: a tick, a queue, a call to
    /// an upstream, or a callback of another stream.
    pub fn acts_apart(&self) -> bool {
        self.inner.loaded.stats.acts_apart.load(Relaxed)
    }

    /// The plugin's counters.
    pub fn stats(&self) -> PluginStats {
        let shards = self.inner.shards.len();
        let healthy_shards = self.inner.shards.iter().filter(|shard| shard.state.lock().instance.is_some()).count();
        PluginStats {
            generation: self.inner.generation,
            quarantined: self.is_quarantined(),
            shards,
            healthy_shards,
            open_calls: self.inner.loaded.open_calls.get(),
            ..self.inner.loaded.stats.snapshot()
        }
    }
}

impl std::fmt::Debug for Plugin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Plugin")
            .field("name", self.name())
            .field("generation", &self.inner.generation)
            .finish_non_exhaustive()
    }
}

// === impl PluginInner ===

impl PluginInner {
    pub(crate) fn fault(&self, kind: FaultKind, message: impl Into<String>) -> Fault {
        Fault { plugin: Arc::clone(&self.loaded.spec.name), kind, message: message.into() }
    }

    pub(crate) fn is_quarantined(&self) -> bool {
        self.quarantined.load(Relaxed)
    }

    pub(crate) fn is_retired(&self) -> bool {
        self.retired.load(Relaxed)
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Relaxed)
    }

    /// Throws a shard's instance away for what came out of it.
    pub(crate) fn discard(&self, state: &mut ShardState, failure: Failure) -> Fault {
        let Some(instance) = state.take_instance() else {
            return self.fault(FaultKind::Unavailable, "the plugin has no healthy instance");
        };
        instance.note_memory();
        let broken = instance.diagnose(failure);
        self.loaded.stats.count_fault(broken.kind);
        self.fault(broken.kind, broken.message)
    }

    /// Enters the root of a shard's instance, if there is one.
    pub(crate) fn enter<R: Default>(
        &self,
        state: &mut ShardState,
        run: impl FnOnce(&mut Instance) -> wasmtime::Result<R>,
    ) -> Result<R, Fault> {
        let Some(instance) = state.instance.as_deref_mut() else { return Ok(R::default()) };
        let started = Instant::now();
        let ran = guarded(|| run(instance));
        instance.settle();
        self.loaded.stats.count_call(started);
        ran.map_err(|failure| self.discard(state, failure))
    }

    fn jitter(&self) -> u64 {
        let mut bytes = [0; 8];
        // Without randomness shards come back in step, which does no harm.
        self.loaded.services.fill_random(&mut bytes);
        u64::from_le_bytes(bytes)
    }

    pub(crate) fn end(&self, state: &mut ShardState) {
        // Whatever the guest does in its last callback, it is gone after it.
        let _ = self.enter(state, Instance::root_delete);
        drop(state.take_instance());
        state.end_by_ms = None;
    }

    fn tick_shard(self: &Arc<Self>, at: usize, shard: &Shard, now_ms: u64, report: &mut TickReport) {
        let orphans = std::mem::take(&mut *shard.orphans.lock());
        self.tick_leaving(at, shard, &orphans, now_ms, report);
        if self.loaded.spec.stream_isolation {
            self.end_owned_orphans(at, &orphans, report);
        }
        let mut state = shard.state.lock();
        if state.instance.is_none() {
            if self.closing.load(Relaxed) {
                return;
            }
            // Nothing is planned in quarantine, so that release begins anew.
            let due = !self.is_quarantined() && !self.is_retired() && state.respawn.missing(now_ms, self.jitter());
            report.saw_streak(state.respawn);
            if !due {
                report.unhealthy_shards += 1;
                return;
            }
            // Starting takes long: requests must find the shard unlocked and be told that it is unavailable.
            drop(state);
            let started = Instance::start(&self.runtime, &self.loaded, &self.pre);
            state = shard.state.lock();
            match started {
                // Shut down meanwhile: nobody would end this instance.
                Ok(_) if self.closing.load(Relaxed) || self.is_retired() => return,
                Ok(instance) => {
                    self.loaded.stats.restarts.fetch_add(1, Relaxed);
                    report.restarted += 1;
                    state.instance = Some(Box::new(instance));
                    state.next_tick_ms = None;
                }
                Err(error) => {
                    self.loaded.stats.failed_restarts.fetch_add(1, Relaxed);
                    state.respawn.failed(now_ms, self.jitter());
                    report.saw_streak(state.respawn);
                    report.unhealthy_shards += 1;
                    report.faults.push(self.fault(FaultKind::Unavailable, error.to_string()));
                    return;
                }
            }
        }
        state.respawn.alive(now_ms);
        report.saw_streak(state.respawn);
        self.tick_instance(at, &mut state, &orphans, now_ms, report);
        if state.instance.is_none() {
            report.unhealthy_shards += 1;
        } else if self.is_to_be_recycled(shard, &state, now_ms) {
            state.recycled_ms = Some(now_ms);
            drop(state);
            self.recycle(shard, now_ms, report);
        }
    }

    pub(crate) fn tick_instance(
        &self,
        at: usize,
        state: &mut ShardState,
        orphans: &[(u64, u32)],
        now_ms: u64,
        report: &mut TickReport,
    ) {
        let run = self
            .end_orphans(state, orphans)
            .and_then(|()| self.run_due_tick(state, now_ms))
            .and_then(|()| self.deliver_queues(state));
        if let Err(fault) = run {
            report.faults.push(fault);
        }
        if state.end_by_ms.is_some_and(|end| now_ms >= end)
            || state.instance.as_ref().is_some_and(|instance| instance.root_has_ended())
        {
            self.end(state);
        }
        if let Some(instance) = &state.instance {
            instance.note_memory();
            let sequence = instance.sequence();
            let keys = instance.streams_with_effects().map(|context| StreamKey { shard: at, sequence, context });
            report.streams_with_effects.extend(keys);
        }
    }

    fn end_orphans(&self, state: &mut ShardState, orphans: &[(u64, u32)]) -> Result<(), Fault> {
        let Some(sequence) = state.instance.as_deref().map(Instance::sequence) else { return Ok(()) };
        let mut ours = orphans.iter().filter(|(of, _)| *of == sequence);
        ours.try_for_each(|(_, context)| self.enter(state, |instance| instance.finish(*context)))
    }

    fn deliver_queues(&self, state: &mut ShardState) -> Result<(), Fault> {
        match &state.instance {
            Some(instance) if instance.consumes_queues() => self.enter(state, Instance::deliver_queues),
            _ => Ok(()),
        }
    }

    fn run_due_tick(&self, state: &mut ShardState, now_ms: u64) -> Result<(), Fault> {
        let Some(instance) = state.instance.as_deref_mut() else { return Ok(()) };
        let (period_ms, changed) = instance.tick_period();
        if period_ms == 0 {
            state.next_tick_ms = None;
            return Ok(());
        }
        let period_ms = u64::from(period_ms);
        let due = match state.next_tick_ms {
            Some(due) if !changed => due,
            // A period counts from when it was set, as well as we know.
            _ => *state.next_tick_ms.insert(now_ms.saturating_add(period_ms)),
        };
        if now_ms < due {
            return Ok(());
        }
        // Ticks that were missed are not made up for.
        state.next_tick_ms = Some(now_ms.saturating_add(period_ms));
        let ran = self.enter(state, Instance::tick);
        if let Some(instance) = state.instance.as_deref_mut()
            && let (period_ms, true) = instance.tick_period()
        {
            state.next_tick_ms = (period_ms != 0).then(|| now_ms.saturating_add(u64::from(period_ms)));
        }
        ran
    }
}

impl TickReport {
    fn saw_streak(&mut self, respawn: Respawn) {
        self.crash_streak = self.crash_streak.max(respawn.failures());
    }
}
