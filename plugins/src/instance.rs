//! One instance of a plugin's module: started, configured, and entered one callback at a time.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::Context;
use std::time::{Duration, Instant};

use bytes::Bytes;
use wasmtime::{InstancePre, Store, Trap, UpdateDeadline};

use crate::abi::Dialect;
use crate::berth::Berth;
use crate::callback::{Callback, GuestExports};
use crate::delivery::number;
use crate::env::StreamEnv;
use crate::guest_memory::GuestStop;
use crate::host::{Host, Loaded, Phase, ROOT_CONTEXT, RootEnd, StreamSlot};
use crate::live::Presence;
use crate::measure::measured;
use crate::outcome::{Action, CallOutcome, Effects, FaultKind, PluginError, StartPhase};
use crate::runtime::{Runtime, cpu_time, epochs};

/// CPU time that a callback gets after its deadline. The deadline is wall time: a thread that the system put aside may be past it
/// without having run, and may be put aside again. One that is merely late ends within this; one that loops does not.
const GRACE: Duration = Duration::from_millis(20);
/// The longest that it gets in wall time: it may wait in host functions, for whoever reads the log.
const LONGEST_GRACE: Duration = Duration::from_secs(2);

/// Longest message of a fault, bytes; backtraces of deep recursion are long.
const MAX_MESSAGE: usize = 4096;

/// Numbers instances over the whole process; 0 is none.
static NEXT_SEQUENCE: AtomicU64 = AtomicU64::new(1);

/// Why a callback did not return.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) kind: FaultKind,
    pub(crate) message: String,
}

/// A callback on a stream, with its arguments beside the context.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StreamCall {
    RequestHeaders { pairs: usize, end_of_stream: bool },
    RequestBody { size: usize, end_of_stream: bool },
    RequestTrailers { pairs: usize },
    ResponseHeaders { pairs: usize, end_of_stream: bool },
    ResponseBody { size: usize, end_of_stream: bool },
    ResponseTrailers { pairs: usize },
    ForeignFunction { function: u32, size: usize },
}

pub(crate) struct Instance {
    pub(crate) store: Store<Host>,
    pub(crate) exports: GuestExports,
    sequence: u64,
    next_context: u32,
    /// Memory when it had started, bytes.
    start_bytes: usize,
    presence: Presence,
}

// === starting ===

impl Instance {
    /// Builds, starts and configures an instance.
    ///
    /// # Errors
    /// The step that failed and why.
    pub(crate) fn start(runtime: &Runtime, plugin: &Arc<Loaded>, pre: &InstancePre<Host>) -> Result<Self, PluginError> {
        let mut phase = StartPhase::Instantiate;
        let started = catch_unwind(AssertUnwindSafe(|| Self::start_steps(runtime, plugin, pre, &mut phase)));
        let message = match started {
            Ok(Ok(instance)) => return Ok(instance),
            Ok(Err(error)) => describe(&error),
            Err(panic) => panic_message(&*panic),
        };
        Err(PluginError { plugin: Arc::clone(&plugin.spec.name), phase, message })
    }

    fn start_steps(
        runtime: &Runtime,
        plugin: &Arc<Loaded>,
        pre: &InstancePre<Host>,
        phase: &mut StartPhase,
    ) -> wasmtime::Result<Self> {
        let sequence = NEXT_SEQUENCE.fetch_add(1, Relaxed);
        let limits = plugin.spec.limits;
        let deadline = epochs(limits.configure_deadline_ms);
        let mut store = Store::new(runtime.engine(), Host::new(Arc::clone(plugin), sequence));
        store.limiter(|host| &mut host.limiter);
        store.epoch_deadline_callback(|mut store| {
            let host = store.data_mut();
            let cpu = cpu_time();
            match host.late_at {
                Some((then, since)) if cpu.saturating_sub(then) >= GRACE || since.elapsed() >= LONGEST_GRACE => {
                    return Ok(UpdateDeadline::Interrupt);
                }
                Some(_) => {}
                None => {
                    host.late_at = Some((cpu, Instant::now()));
                    host.plugin.stats.late.fetch_add(1, Relaxed);
                }
            }
            Ok(UpdateDeadline::Continue(1))
        });

        store.set_epoch_deadline(deadline);
        let guest = pre.instantiate(&mut store)?;
        let memory = guest.get_memory(&mut store, "memory").ok_or(GuestStop::NoMemory)?;
        let allocate = ["malloc", "proxy_on_memory_allocate"]
            .iter()
            .find_map(|name| guest.get_typed_func::<u32, u32>(&mut store, name).ok());
        store.data_mut().memory = Some(memory);
        store.data_mut().allocate = allocate;

        *phase = StartPhase::Initialize;
        let arm = |store: &mut Store<Host>| {
            store.data_mut().late_at = None;
            store.set_epoch_deadline(deadline);
        };
        if let Ok(initialize) = guest.get_typed_func::<(), ()>(&mut store, "_initialize") {
            arm(&mut store);
            initialize.call(&mut store, ())?;
            if let Ok(main) = guest.get_typed_func::<(u32, u32), u32>(&mut store, "main") {
                arm(&mut store);
                main.call(&mut store, (0, 0))?;
            } else if let Ok(main) = guest.get_typed_func::<(), u32>(&mut store, "__main_void") {
                arm(&mut store);
                main.call(&mut store, ())?;
            }
        } else if let Ok(start) = guest.get_typed_func::<(), ()>(&mut store, "_start") {
            arm(&mut store);
            start.call(&mut store, ())?;
        }

        let exports = GuestExports::find(&guest, &mut store);
        let host = store.data_mut();
        host.phase = Phase::Running;
        *phase = StartPhase::ContextCreate;
        host.callback = Some(Callback::ContextCreate);
        if let Some(create) = &exports.context_create {
            arm(&mut store);
            measured(&mut store, |store| create.call(store, (ROOT_CONTEXT, 0)))?;
        }
        let sized = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
        *phase = StartPhase::VmStart;
        store.data_mut().callback = Some(Callback::VmStart);
        if let Some(vm_start) = &exports.vm_start {
            arm(&mut store);
            let size = sized(plugin.spec.vm_configuration.len());
            wasmtime::ensure!(
                measured(&mut store, |store| vm_start.call(store, (ROOT_CONTEXT, size)))? != 0,
                "proxy_on_vm_start returned false"
            );
        }
        *phase = StartPhase::Configure;
        store.data_mut().callback = Some(Callback::Configure);
        if let Some(configure) = &exports.configure {
            arm(&mut store);
            let size = sized(plugin.spec.configuration.len());
            wasmtime::ensure!(
                measured(&mut store, |store| configure.call(store, (ROOT_CONTEXT, size)))? != 0,
                "proxy_on_configure returned false: the plugin refuses its configuration"
            );
        }
        let start_bytes = memory.data_size(&store);
        let instance = Self {
            store,
            exports,
            sequence,
            next_context: ROOT_CONTEXT + 1,
            start_bytes,
            presence: plugin.live.enter(),
        };
        instance.note_memory();
        Ok(instance)
    }
}

// === entering ===

impl Instance {
    /// This instance's number in the process, never 0.
    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Linear memory now, bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.store.data().memory.map_or(0, |memory| memory.data_size(&self.store))
    }

    /// Linear memory when it had started, bytes.
    pub(crate) fn start_bytes(&self) -> usize {
        self.start_bytes
    }

    /// True if no stream has a context in it.
    pub(crate) fn is_idle(&self) -> bool {
        self.store.data().streams.is_empty()
    }

    /// An id for a new stream context: not the root's and not one that is live.
    pub(crate) fn reserve_context(&mut self) -> u32 {
        loop {
            let id = self.next_context;
            self.next_context = self.next_context.checked_add(1).unwrap_or(ROOT_CONTEXT + 1);
            if !self.store.data().streams.contains_key(&id) {
                return id;
            }
        }
    }

    /// Lends an environment for calls on a stream's context.
    pub(crate) fn lend(&mut self, context: u32, env: Option<Box<dyn StreamEnv>>) {
        let host = self.store.data_mut();
        host.lender = context;
        host.env = env;
    }

    /// Ends [`Instance::lend`].
    pub(crate) fn give_back(&mut self) -> Option<Box<dyn StreamEnv>> {
        let host = self.store.data_mut();
        host.settle();
        host.lender = 0;
        host.env.take()
    }

    /// After a callback of the root: see [`Host::settle`].
    pub(crate) fn settle(&mut self) {
        self.store.data_mut().settle();
    }

    /// Arms the deadline and makes `context` the one the guest acts for.
    pub(crate) fn prepare(&mut self, context: u32, callback: Callback) {
        let deadline = epochs(self.store.data().plugin.spec.limits.callback_deadline_ms);
        let host = self.store.data_mut();
        host.met = false;
        // The context of the callback before may have been another stream's.
        host.act_for(context);
        host.callback = Some(callback);
        host.late_at = None;
        host.limiter.refused = false;
        self.store.set_epoch_deadline(deadline);
    }

    /// Begins a stream context.
    pub(crate) fn create(&mut self, context: u32) -> wasmtime::Result<()> {
        self.store.data_mut().streams.insert(context, StreamSlot::default());
        self.prepare(context, Callback::ContextCreate);
        match &self.exports.context_create {
            Some(create) => measured(&mut self.store, |store| create.call(store, (context, ROOT_CONTEXT))),
            None => Ok(()),
        }
    }

    /// Runs a callback on a stream and collects what it asked for.
    pub(crate) fn call(&mut self, context: u32, call: StreamCall) -> wasmtime::Result<CallOutcome> {
        let (callback, is_headers) = call.callback();
        self.prepare(context, callback);
        // An event comes beside the stream, which may be paused meanwhile and stays so.
        let beside = matches!(call, StreamCall::ForeignFunction { .. });
        // Whoever continued a stream that had not paused has not continued the pause that may come now.
        if let Some(slot) = self.store.data_mut().streams.get_mut(&context).filter(|_| !beside) {
            slot.effects.continue_request = false;
            slot.effects.continue_response = false;
        }
        let returned = measured(&mut self.store, |store| call.enter(store, &self.exports, context))?;
        let mut effects = std::mem::take(&mut self.store.data_mut().effects);
        let action = match returned {
            0 => Action::Continue,
            // Headers only: go on, and let nothing follow them.
            2 if is_headers => {
                effects.end_stream = true;
                Action::Continue
            }
            _ => Action::Pause,
        };
        match self.store.data_mut().streams.get_mut(&context) {
            Some(slot) if beside => {
                slot.effects.continue_request |= std::mem::take(&mut effects.continue_request);
                slot.effects.continue_response |= std::mem::take(&mut effects.continue_response);
            }
            Some(slot) => {
                let pauses = action == Action::Pause && !effects.resumes();
                slot.paused = pauses.then(Instant::now);
            }
            None => {}
        }
        let is_body = matches!(callback, Callback::RequestBody | Callback::ResponseBody);
        let (flow_control, drops_body) = (is_body && returned == 2, is_body && returned == 3);
        let dialect = self.store.data().plugin.spec.dialect;
        let body_goes_on = is_headers && returned == 1 && dialect == Dialect::Higress;
        Ok(CallOutcome { action, effects, body_goes_on, drops_body, flow_control })
    }

    /// Sets what a foreign function call of the host reads as its arguments.
    pub(crate) fn set_foreign_arguments(&mut self, arguments: Bytes) {
        self.store.data_mut().foreign_arguments = arguments;
    }

    /// Ends a stream context: log, done, delete. After this its id is free.
    pub(crate) fn finish(&mut self, context: u32) -> wasmtime::Result<()> {
        self.goes_on(context);
        if self.exports.log.is_some() {
            self.prepare(context, Callback::Log);
        }
        if let Some(log) = &self.exports.log {
            measured(&mut self.store, |store| log.call(store, context))?;
        }
        if self.exports.done.is_some() {
            self.prepare(context, Callback::Done);
        }
        if let Some(done) = &self.exports.done {
            // A stream ends whatever the guest says.
            measured(&mut self.store, |store| done.call(store, context))?;
        }
        if self.exports.delete.is_some() {
            self.prepare(context, Callback::Delete);
        }
        if let Some(delete) = &self.exports.delete {
            measured(&mut self.store, |store| delete.call(store, context))?;
        }
        let host = self.store.data_mut();
        host.streams.remove(&context);
        host.calls.adopt(context);
        host.effects = Effects::default();
        Ok(())
    }
}

// === the root context ===

impl Instance {
    /// Runs the tick callback.
    pub(crate) fn tick(&mut self) -> wasmtime::Result<()> {
        let Some(tick) = self.exports.tick.clone() else { return Ok(()) };
        self.prepare(ROOT_CONTEXT, Callback::Tick);
        self.store.data().plugin.stats.ticks.fetch_add(1, Relaxed);
        measured(&mut self.store, |store| tick.call(store, ROOT_CONTEXT))
    }

    /// The tick period, ms (0: none), and whether the guest has set it since the last question.
    pub(crate) fn tick_period(&mut self) -> (u32, bool) {
        let host = self.store.data_mut();
        (host.tick_period_ms, std::mem::take(&mut host.tick_changed))
    }

    /// True if the guest has registered a queue and can be told of its items.
    pub(crate) fn consumes_queues(&self) -> bool {
        self.exports.queue_ready.is_some() && !self.store.data().queues.is_empty()
    }

    /// Tells the guest of items in the queues it consumes.
    pub(crate) fn deliver_queues(&mut self) -> wasmtime::Result<()> {
        let Some(ready) = self.exports.queue_ready.clone() else { return Ok(()) };
        for at in 0..self.store.data().queues.len() {
            let host = self.store.data();
            let Some(id) = host.queues.get(at).copied() else { break };
            let untold = host.plugin.services.shared().queues.take_untold(id, self.sequence);
            for _ in 0..untold {
                self.prepare(ROOT_CONTEXT, Callback::QueueReady);
                measured(&mut self.store, |store| ready.call(store, (ROOT_CONTEXT, id)))?;
            }
        }
        Ok(())
    }

    /// Asks the root to end. True if it has; else it will call `proxy_done` later.
    pub(crate) fn root_done(&mut self) -> wasmtime::Result<bool> {
        let Some(done) = self.exports.done.clone() else { return Ok(true) };
        // The guest may call `proxy_done` at once.
        self.store.data_mut().root_end = RootEnd::Pending;
        self.prepare(ROOT_CONTEXT, Callback::Done);
        let ended = measured(&mut self.store, |store| done.call(store, ROOT_CONTEXT))? != 0;
        Ok(ended || self.root_has_ended())
    }

    /// True once a pending root has called `proxy_done`.
    pub(crate) fn root_has_ended(&self) -> bool {
        self.store.data().root_end == RootEnd::Done
    }

    /// Deletes the root context; the instance is of no use after it.
    pub(crate) fn root_delete(&mut self) -> wasmtime::Result<()> {
        let Some(delete) = self.exports.delete.clone() else { return Ok(()) };
        self.prepare(ROOT_CONTEXT, Callback::Delete);
        measured(&mut self.store, |store| delete.call(store, ROOT_CONTEXT))
    }

    /// Live streams for which callbacks of other contexts asked for something.
    pub(crate) fn streams_with_effects(&self) -> impl Iterator<Item = u32> + '_ {
        self.store.data().streams.iter().filter(|(_, slot)| !slot.effects.is_empty()).map(|(context, _)| *context)
    }

    /// Takes what callbacks of other contexts asked for a stream.
    pub(crate) fn take_effects(&mut self, context: u32) -> Effects {
        self.store.data_mut().streams.get_mut(&context).map(StreamSlot::take_effects).unwrap_or_default()
    }

    /// Takes what was asked for a stream; if that is nothing, has its owner woken when there is something.
    pub(crate) fn await_effects(&mut self, context: u32, cx: &mut Context<'_>, berth: &Arc<Berth>) -> Option<Effects> {
        let slot = self.store.data_mut().streams.get_mut(&context)?;
        if !slot.effects.is_empty() {
            slot.waker = None;
            return Some(slot.take_effects());
        }
        slot.berth = Some(Arc::clone(berth));
        match &mut slot.waker {
            Some(waker) => waker.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        None
    }

    /// If a stream has paused, its environment will lie there soon.
    pub(crate) fn pauses_at(&mut self, context: u32, berth: &Arc<Berth>) {
        if let Some(slot) = self.store.data_mut().streams.get_mut(&context)
            && slot.paused.is_some()
            && !slot.berth.as_ref().is_some_and(|known| Arc::ptr_eq(known, berth))
        {
            slot.berth = Some(Arc::clone(berth));
        }
    }

    /// Nobody waits for this stream.
    pub(crate) fn goes_on(&mut self, context: u32) {
        if let Some(slot) = self.store.data_mut().streams.get_mut(&context) {
            slot.paused = None;
        }
    }

    /// Whether the stream that made a call has paused a moment ago, and its environment cannot be reached yet.
    pub(crate) fn is_between(&self, token: u32) -> bool {
        let host = self.store.data();
        let context = host.calls.context(token);
        context.and_then(|context| host.streams.get(&context)).is_some_and(StreamSlot::is_between)
    }

    /// Puts the memory's size into the statistics.
    pub(crate) fn note_memory(&self) {
        let host = self.store.data();
        host.plugin.stats.saw_memory(host.limiter.high_water);
        self.presence.saw_memory(self.memory_bytes());
    }

    /// Says what an error or a panic that came out of this instance is.
    pub(crate) fn diagnose(&self, failure: Failure) -> Broken {
        let error = match failure {
            Failure::Panic(panic) => return Broken { kind: FaultKind::Host, message: panic_message(&*panic) },
            Failure::Error(error) => error,
        };
        let kind = match (error.downcast_ref::<GuestStop>(), error.downcast_ref::<Trap>()) {
            (Some(GuestStop::Exit(_) | GuestStop::Abort(..)), _) => FaultKind::Exit,
            (Some(_), _) => FaultKind::Allocator,
            (_, Some(Trap::Interrupt)) => FaultKind::Deadline,
            (_, Some(Trap::StackOverflow)) => FaultKind::Stack,
            _ if self.store.data().limiter.refused => FaultKind::Memory,
            _ => FaultKind::Trap,
        };
        Broken { kind, message: describe(&error) }
    }
}

/// What came out of an instance instead of a result.
pub(crate) enum Failure {
    Error(wasmtime::Error),
    Panic(Box<dyn Any + Send>),
}

/// Runs something on a guest and catches whatever goes wrong, host code included.
pub(crate) fn guarded<R>(run: impl FnOnce() -> wasmtime::Result<R>) -> Result<R, Failure> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(error)) => Err(Failure::Error(error)),
        Err(panic) => Err(Failure::Panic(panic)),
    }
}

impl StreamCall {
    /// The callback, and whether it is about headers.
    pub(crate) fn callback(self) -> (Callback, bool) {
        match self {
            Self::RequestHeaders { .. } => (Callback::RequestHeaders, true),
            Self::RequestBody { .. } => (Callback::RequestBody, false),
            Self::RequestTrailers { .. } => (Callback::RequestTrailers, false),
            Self::ResponseHeaders { .. } => (Callback::ResponseHeaders, true),
            Self::ResponseBody { .. } => (Callback::ResponseBody, false),
            Self::ResponseTrailers { .. } => (Callback::ResponseTrailers, false),
            Self::ForeignFunction { .. } => (Callback::ForeignFunction, false),
        }
    }

    fn enter(self, store: &mut Store<Host>, exports: &GuestExports, context: u32) -> wasmtime::Result<u32> {
        match self {
            Self::RequestHeaders { pairs, end_of_stream } => match &exports.request_headers {
                Some(call) => call.call(store, context, number(pairs), end_of_stream.into()),
                None => Ok(0),
            },
            Self::ResponseHeaders { pairs, end_of_stream } => match &exports.response_headers {
                Some(call) => call.call(store, context, number(pairs), end_of_stream.into()),
                None => Ok(0),
            },
            Self::RequestBody { size, end_of_stream } => match &exports.request_body {
                Some(call) => call.call(store, (context, number(size), end_of_stream.into())),
                None => Ok(0),
            },
            Self::ResponseBody { size, end_of_stream } => match &exports.response_body {
                Some(call) => call.call(store, (context, number(size), end_of_stream.into())),
                None => Ok(0),
            },
            Self::RequestTrailers { pairs } => match &exports.request_trailers {
                Some(call) => call.call(store, (context, number(pairs))),
                None => Ok(0),
            },
            Self::ResponseTrailers { pairs } => match &exports.response_trailers {
                Some(call) => call.call(store, (context, number(pairs))),
                None => Ok(0),
            },
            Self::ForeignFunction { function, size } => match &exports.foreign_function {
                Some(call) => call.call(store, (context, function, number(size))).map(|()| 0),
                None => Ok(0),
            },
        }
    }
}

fn describe(error: &wasmtime::Error) -> String {
    let mut message = format!("{error:?}");
    if message.len() > MAX_MESSAGE {
        message.truncate(message.floor_char_boundary(MAX_MESSAGE));
        message.push('…');
    }
    message
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("host panicked: {}", text.unwrap_or("no message"))
}
