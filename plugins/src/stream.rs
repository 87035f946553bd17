//! One request's life in one plugin.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;

use crate::abi::MapType;
use crate::berth::Berth;
use crate::callback::Callback;
use crate::callout::Outgoing;
use crate::env::{Lent, StreamEnv};
use crate::instance::{Instance, StreamCall, guarded};
use crate::outcome::{CallOutcome, CallResult, Effects, Fault, FaultKind};
use crate::plugin::PluginInner;
use crate::shard::ShardState;

/// Names a stream in a [`TickReport`](crate::TickReport).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamKey {
    pub(crate) shard: usize,
    pub(crate) sequence: u64,
    pub(crate) context: u32,
}

/// A request's context in one plugin, pinned to one shard.
///
/// Callbacks are synchronous and take the shard's lock: never call one while holding a lock that another stream's
/// environment needs. A callback that the module does not export costs nothing. After a fault every further call fails.
/// A stream that is dropped without [`Stream::finish`] is ended by the next [`Plugin::tick`](crate::Plugin::tick),
/// without an environment.
pub struct Stream {
    plugin: Arc<PluginInner>,
    shard: usize,
    state: State,
}

#[derive(Clone, Copy, Debug)]
enum State {
    /// The guest does not know of it yet.
    Fresh,
    /// A context of the instance with this number.
    Bound {
        sequence: u64,
        context: u32,
    },
    /// A call failed.
    Failed(FaultKind),
    Finished,
}

impl Stream {
    pub(crate) fn new(plugin: Arc<PluginInner>, shard: usize) -> Self {
        Self { plugin, shard, state: State::Fresh }
    }

    /// Request headers are there. `end_of_stream`: neither body nor trailers will follow.
    ///
    /// # Errors
    /// The fault; the caller applies the plugin's policy. So for all callbacks.
    pub fn on_request_headers<E: StreamEnv>(&mut self, env: &mut Lent<E>, end_of_stream: bool) -> CallResult {
        let pairs = self.count(env, MapType::RequestHeaders, Callback::RequestHeaders);
        self.call(env, StreamCall::RequestHeaders { pairs, end_of_stream })
    }

    /// `size` bytes of the request's body are in the buffer, what earlier pauses held included.
    ///
    /// # Errors
    /// As [`Stream::on_request_headers`].
    pub fn on_request_body<E: StreamEnv>(&mut self, env: &mut Lent<E>, size: usize, end_of_stream: bool) -> CallResult {
        self.call(env, StreamCall::RequestBody { size, end_of_stream })
    }

    /// Request trailers are there; the request has ended.
    ///
    /// # Errors
    /// As [`Stream::on_request_headers`].
    pub fn on_request_trailers<E: StreamEnv>(&mut self, env: &mut Lent<E>) -> CallResult {
        let pairs = self.count(env, MapType::RequestTrailers, Callback::RequestTrailers);
        self.call(env, StreamCall::RequestTrailers { pairs })
    }

    /// Response headers are there.
    ///
    /// # Errors
    /// As [`Stream::on_request_headers`].
    pub fn on_response_headers<E: StreamEnv>(&mut self, env: &mut Lent<E>, end_of_stream: bool) -> CallResult {
        let pairs = self.count(env, MapType::ResponseHeaders, Callback::ResponseHeaders);
        self.call(env, StreamCall::ResponseHeaders { pairs, end_of_stream })
    }

    /// `size` bytes of the response's body are in the buffer, what earlier pauses held included.
    ///
    /// # Errors
    /// As [`Stream::on_request_headers`].
    pub fn on_response_body<E: StreamEnv>(
        &mut self,
        env: &mut Lent<E>,
        size: usize,
        end_of_stream: bool,
    ) -> CallResult {
        self.call(env, StreamCall::ResponseBody { size, end_of_stream })
    }

    /// Response trailers are there; the response has ended.
    ///
    /// # Errors
    /// As [`Stream::on_request_headers`].
    pub fn on_response_trailers<E: StreamEnv>(&mut self, env: &mut Lent<E>) -> CallResult {
        let pairs = self.count(env, MapType::ResponseTrailers, Callback::ResponseTrailers);
        self.call(env, StreamCall::ResponseTrailers { pairs })
    }

    /// The gateway calls function `function` of the guest; the guest reads `arguments` from buffer 8.
    ///
    /// # Errors
    /// As [`Stream::on_request_headers`].
    pub fn on_foreign_function<E: StreamEnv>(
        &mut self,
        env: &mut Lent<E>,
        function: u32,
        arguments: Bytes,
    ) -> CallResult {
        let call = StreamCall::ForeignFunction { function, size: arguments.len() };
        if !self.exports(call) {
            return Ok(CallOutcome::default());
        }
        self.enter(env, |instance, context| {
            instance.set_foreign_arguments(arguments);
            let outcome = instance.call(context, call);
            instance.set_foreign_arguments(Bytes::new());
            outcome
        })
    }

    /// Ends the stream: `proxy_on_log`, `proxy_on_done`, `proxy_on_delete`, in this order and once. Headers of both
    /// sides should be readable still. A stream whose instance is gone, or that the guest never heard of, just ends.
    ///
    /// # Errors
    /// The fault of one of the three, [`FaultKind::Lost`] if the instance went away since the last call.
    pub fn finish<E: StreamEnv>(mut self, env: &mut Lent<E>) -> Result<(), Box<Fault>> {
        let ended = match self.state {
            State::Bound { .. } => self.enter(env, Instance::finish),
            _ => Ok(()),
        };
        if let (State::Bound { sequence, .. }, true) = (self.state, self.plugin.loaded.spec.stream_isolation) {
            self.plugin.end_own(self.shard, sequence, true);
        }
        self.state = State::Finished;
        ended
    }

    /// This stream's name in tick reports, once the guest knows of it.
    pub fn key(&self) -> Option<StreamKey> {
        match self.state {
            State::Bound { sequence, context } => Some(StreamKey { shard: self.shard, sequence, context }),
            _ => None,
        }
    }

    /// Waits for callbacks of other contexts (replies to calls, ticks, queues) to ask something for this stream; `berth` is
    /// where its environment lies meanwhile, see [`Lent::park`]. A stream that the guest never heard of waits for ever.
    ///
    /// # Errors
    /// The instance that held the stream is gone.
    pub fn poll_effects(&mut self, cx: &mut Context<'_>, berth: &Arc<Berth>) -> Poll<Result<Effects, Box<Fault>>> {
        let (sequence, context) = match self.state {
            State::Bound { sequence, context } => (sequence, context),
            State::Failed(kind) => return Poll::Ready(Err(self.fail(kind))),
            State::Fresh | State::Finished => return Poll::Pending,
        };
        let plugin = Arc::clone(&self.plugin);
        let asked = plugin.with_holder(self.shard, sequence, |state| {
            state.instance.as_deref_mut().and_then(|instance| instance.await_effects(context, cx, berth))
        });
        match asked {
            Some(Some(effects)) => Poll::Ready(Ok(effects)),
            Some(None) => Poll::Pending,
            None => Poll::Ready(Err(self.fail(FaultKind::Lost))),
        }
    }

    /// Whether calls that this stream made are open.
    pub fn has_calls(&self) -> bool {
        let State::Bound { sequence, context } = self.state else { return false };
        let open = |state: &mut ShardState| state.instance.as_deref().is_some_and(|i| i.open_calls(context) > 0);
        self.plugin.with_holder(self.shard, sequence, open).unwrap_or(false)
    }

    /// Breaks off the calls that this stream made: whoever waited for them is gone. The guest hears that they failed.
    pub fn cancel_calls(&mut self) {
        let State::Bound { sequence, context } = self.state else { return };
        let plugin = Arc::clone(&self.plugin);
        let cancelled = plugin.with_holder(self.shard, sequence, |state| {
            let instance = state.instance.as_deref_mut().filter(|instance| instance.open_calls(context) > 0)?;
            // The owner is here, and does not come where it would wait.
            instance.goes_on(context);
            Some((plugin.enter(state, |instance| instance.cancel_calls(context)), state.collect()))
        });
        let Some((cancelled, outgoing)) = cancelled.flatten() else { return };
        plugin.send(self.shard, outgoing);
        if let Err(fault) = cancelled {
            tracing::warn!(plugin = %fault.plugin, kind = %fault.kind, message = %fault.message, "plugin failed in a reply");
        }
    }

    /// Nobody waits for this stream, though its last callback paused: callbacks of other contexts need not look out for it.
    pub fn goes_on(&mut self) {
        let State::Bound { sequence, context } = self.state else { return };
        let go = |state: &mut ShardState| state.instance.as_deref_mut().map(|instance| instance.goes_on(context));
        self.plugin.with_holder(self.shard, sequence, go);
    }

    /// Takes what callbacks of other contexts (ticks, mostly) asked for this stream.
    pub fn take_effects(&mut self) -> Effects {
        let State::Bound { sequence, context } = self.state else { return Effects::default() };
        let take =
            |state: &mut ShardState| state.instance.as_deref_mut().map(|instance| instance.take_effects(context));
        self.plugin.with_holder(self.shard, sequence, take).flatten().unwrap_or_default()
    }

    /// The plugin's name.
    pub fn plugin_name(&self) -> &Arc<str> {
        &self.plugin.loaded.spec.name
    }

    /// Pairs of a map that the guest may see, if it has the callback that tells how many there are.
    fn count<E: StreamEnv>(&self, env: &mut Lent<E>, map: MapType, told: Callback) -> usize {
        if !self.plugin.loaded.callbacks.contains(told) {
            return 0;
        }
        let hidden = self.plugin.loaded.spec.veiled_headers().of_map(map);
        env.header_map(map).map_or(0, |map| map.len() - hidden.count(map))
    }

    fn exports(&self, call: StreamCall) -> bool {
        self.plugin.loaded.callbacks.contains(call.callback().0)
    }

    fn call<E: StreamEnv>(&mut self, env: &mut Lent<E>, call: StreamCall) -> CallResult {
        if !self.exports(call) {
            return Ok(CallOutcome::default());
        }
        self.enter(env, |instance, context| instance.call(context, call))
    }

    /// Runs something in this stream's context, which is created first if the guest does not know it yet.
    fn enter<E: StreamEnv, R>(
        &mut self,
        env: &mut Lent<E>,
        run: impl FnOnce(&mut Instance, u32) -> wasmtime::Result<R>,
    ) -> Result<R, Box<Fault>> {
        let plugin = Arc::clone(&self.plugin);
        let isolated = plugin.loaded.spec.stream_isolation;
        let (before, mut mine) = (self.state, self.state);
        let ran = match before {
            State::Failed(kind) => return Err(self.fail(kind)),
            State::Fresh if plugin.is_quarantined() || plugin.is_retired() => None,
            State::Fresh if isolated => match plugin.start_own() {
                Ok(own) => run_in(&plugin, &mut own.lock(), &mut mine, env, run),
                Err(error) => {
                    plugin.loaded.stats.stream_streak.fetch_add(1, Relaxed);
                    let refusal = self.fail(FaultKind::Unavailable);
                    return Err(Box::new(Fault { message: error.to_string(), ..*refusal }));
                }
            },
            State::Fresh => {
                let shard = plugin.shards.get(self.shard);
                shard.and_then(|shard| run_in(&plugin, &mut shard.state.lock(), &mut mine, env, run))
            }
            State::Bound { sequence, .. } => {
                plugin.with_holder(self.shard, sequence, |state| run_in(&plugin, state, &mut mine, env, run)).flatten()
            }
            State::Finished => None,
        };
        let Some((result, outgoing)) = ran else {
            return Err(self.fail(if matches!(before, State::Fresh) {
                FaultKind::Unavailable
            } else {
                FaultKind::Lost
            }));
        };
        self.state = mine;
        plugin.send(self.shard, outgoing);
        result.map_err(|(fault, sequence)| {
            self.state = State::Failed(FaultKind::Lost);
            if isolated {
                plugin.end_own(self.shard, sequence, false);
            }
            Box::new(fault)
        })
    }

    /// Refuses a call, and all after it.
    fn fail(&mut self, kind: FaultKind) -> Box<Fault> {
        // What retiring took away did not crash.
        if let (State::Bound { sequence, .. }, true) = (self.state, self.plugin.loaded.spec.stream_isolation)
            && !self.plugin.is_retired()
        {
            self.plugin.end_own(self.shard, sequence, false);
        }
        self.plugin.loaded.stats.count_fault(kind);
        self.state = State::Failed(kind);
        let message = match kind {
            FaultKind::Lost => "the instance that held this stream is gone",
            _ if self.plugin.is_quarantined() => "the plugin is quarantined: it crashed again and again",
            _ => "the plugin has no healthy instance",
        };
        Box::new(self.plugin.fault(kind, message))
    }
}

/// What came of entering an instance: the result, or the fault and the number of the instance that is gone by it; and what is
/// to be sent.
type Ran<R> = (Result<R, (Fault, u64)>, Vec<(u64, Outgoing)>);

/// Enters the instance of a state for a stream, whose context is created first if the guest does not know it yet. None if there
/// is no instance.
fn run_in<E: StreamEnv, R>(
    plugin: &PluginInner,
    state: &mut ShardState,
    stream: &mut State,
    env: &mut Lent<E>,
    run: impl FnOnce(&mut Instance, u32) -> wasmtime::Result<R>,
) -> Option<Ran<R>> {
    let instance = state.instance.as_deref_mut()?;
    let started = Instant::now();
    let sequence = instance.sequence();
    let (context, is_new) = match *stream {
        State::Bound { context, .. } => (context, false),
        _ => (instance.reserve_context(), true),
    };
    *stream = State::Bound { sequence, context };
    instance.lend(context, env.lend());
    let result = guarded(|| {
        if is_new {
            instance.create(context)?;
        }
        run(instance, context)
    });
    env.give_back(instance.give_back());
    instance.pauses_at(context, env.berth());
    plugin.loaded.stats.count_call(started);
    let result = result.map_err(|failure| (plugin.discard(state, failure), sequence));
    Some((result, state.collect()))
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let State::Bound { sequence, context } = self.state
            && let Some(shard) = self.plugin.shards.get(self.shard)
        {
            shard.orphans.lock().push((sequence, context));
        }
    }
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream")
            .field("plugin", self.plugin_name())
            .field("shard", &self.shard)
            .field("state", &self.state)
            .finish()
    }
}
