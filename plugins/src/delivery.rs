//! What comes of calls, on its way back into the guest that made them.

use std::sync::{Arc, Weak};

use bytes::Bytes;

use crate::callback::Callback;
use crate::callout::{CallCommand, CallId, CallKind, GRPC_UNAVAILABLE, GrpcEvent, HttpReply, Outgoing, Shown};
use crate::host::ROOT_CONTEXT;
use crate::http_env::FieldMap;
use crate::instance::Instance;
use crate::measure::measured;
use crate::outcome::Fault;
use crate::plugin::PluginInner;
use crate::shard::ShardState;

/// Where the gateway tells what came of a call.
///
/// Each call ends exactly once. A handle that is dropped before that ends its call as failed. Telling enters the guest: do
/// it from a thread that may run guests, and never from within [`PluginServices::call_out`](crate::PluginServices::call_out).
pub struct CallHandle {
    plugin: Weak<PluginInner>,
    shard: usize,
    id: CallId,
    ended: bool,
}

/// What is told to a guest.
#[derive(Debug)]
pub(crate) enum Told {
    /// The answer, or why there is none.
    Http(Result<HttpReply, String>),
    Grpc(GrpcEvent),
    /// The reply as RESP, or why there is none.
    Redis(Result<Bytes, String>),
    /// Nothing will come, whatever kind of call it is.
    Failed(String),
}

impl Told {
    /// Whether the call is over with it, for a call that is unary.
    fn ends_unary(&self) -> bool {
        match self {
            Self::Grpc(event) => matches!(event, GrpcEvent::Message(_) | GrpcEvent::Close { .. }),
            _ => true,
        }
    }

    /// Whether the call is over with it, whatever kind of call it is.
    fn ends_any(&self) -> bool {
        !matches!(self, Self::Grpc(event) if !matches!(event, GrpcEvent::Close { .. }))
    }
}

impl CallHandle {
    /// The call's name, for commands about it.
    pub fn id(&self) -> CallId {
        self.id
    }

    /// Whether the stream that made the call has just paused, and whoever runs it has not parked its environment yet
    /// ([`Lent::park`](crate::Lent::park)): what is told now could not edit the stream. Ask again a little later, but not for ever.
    pub fn finds_owner_at_work(&self) -> bool {
        let Some(plugin) = self.plugin.upgrade() else { return false };
        let between = |state: &mut ShardState| state.instance.as_deref().is_some_and(|i| i.is_between(self.id.token));
        plugin.with_holder(self.shard, self.id.sequence, between).unwrap_or(false)
    }

    /// The answer to an HTTP call, or in a few words why there is none. Nothing happens if the guest's instance is gone or the
    /// call was cancelled.
    ///
    /// # Errors
    /// The guest's fault in the callback; its instance was thrown away.
    pub fn http(mut self, answer: Result<HttpReply, String>) -> Result<(), Box<Fault>> {
        self.tell(Told::Http(answer)).map(|_| ())
    }

    /// The reply to a Redis call, in RESP, or in a few words why there is none. An error that Redis answers is a reply.
    ///
    /// # Errors
    /// As [`CallHandle::http`].
    pub fn redis(mut self, reply: Result<Bytes, String>) -> Result<(), Box<Fault>> {
        self.tell(Told::Redis(reply)).map(|_| ())
    }

    /// Something happened on a gRPC call. True as long as the guest wants to hear more.
    ///
    /// # Errors
    /// As [`CallHandle::http`].
    pub fn grpc(&mut self, event: GrpcEvent) -> Result<bool, Box<Fault>> {
        self.tell(Told::Grpc(event))
    }

    fn tell(&mut self, told: Told) -> Result<bool, Box<Fault>> {
        if self.ended {
            return Ok(false);
        }
        self.ended = told.ends_any();
        let Some(plugin) = self.plugin.upgrade() else {
            self.ended = true;
            return Ok(false);
        };
        let wants_more = plugin.deliver(self.shard, self.id, told)?;
        self.ended |= !wants_more;
        Ok(wants_more)
    }
}

impl Drop for CallHandle {
    fn drop(&mut self) {
        if !self.ended
            && let Err(fault) = self.tell(Told::Failed("the call was given up".to_owned()))
        {
            tracing::warn!(plugin = %fault.plugin, kind = %fault.kind, message = %fault.message, "plugin failed in a reply");
        }
    }
}

impl std::fmt::Debug for CallHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CallHandle").field("id", &self.id).field("ended", &self.ended).finish_non_exhaustive()
    }
}

impl PluginInner {
    /// Tells a guest what came of a call. False if nobody waits for it any more.
    fn deliver(self: &Arc<Self>, at: usize, id: CallId, told: Told) -> Result<bool, Box<Fault>> {
        let delivered = self.with_holder(at, id.sequence, |state| {
            let kind = state.instance.as_deref_mut()?.call_kind(id.token)?;
            let unary = !matches!(kind, CallKind::GrpcStream { .. });
            let ends = if unary { told.ends_unary() } else { told.ends_any() };
            let told = self.enter(state, |instance| instance.tell(id.token, kind, told, ends));
            let wants_more = !ends && state.instance.as_deref().is_some_and(|instance| instance.has_call(id.token));
            Some((told, wants_more, state.collect()))
        });
        let Some((told, wants_more, outgoing)) = delivered.flatten() else { return Ok(false) };
        self.send(at, outgoing);
        told.map_err(Box::new)?;
        Ok(wants_more)
    }

    /// Hands to the gateway what guests asked for. Call it without a shard's lock.
    pub(crate) fn send(self: &Arc<Self>, shard: usize, outgoing: Vec<(u64, Outgoing)>) {
        for (sequence, outgoing) in outgoing {
            let id = |token| CallId { sequence, token };
            let command = match outgoing {
                Outgoing::Start(token, callout) => {
                    let handle = CallHandle { plugin: Arc::downgrade(self), shard, id: id(token), ended: false };
                    CallCommand::Start(handle, callout)
                }
                Outgoing::Send { token, message, end } => CallCommand::Send { id: id(token), message, end },
                Outgoing::Close(token) => CallCommand::Close(id(token)),
                Outgoing::Cancel(token) => CallCommand::Cancel(id(token)),
            };
            self.loaded.services.call_out(&self.loaded.spec.name, command);
        }
    }

    /// Sends what the instances have asked for while they started.
    pub(crate) fn send_all(self: &Arc<Self>) {
        for (at, shard) in self.shards.iter().enumerate() {
            let outgoing = shard.state.lock().collect();
            self.send(at, outgoing);
        }
    }
}

impl ShardState {
    /// What is asked of the gateway since the last question, with the number of the instance that asks.
    pub(crate) fn collect(&mut self) -> Vec<(u64, Outgoing)> {
        let mut all = std::mem::take(&mut self.cancelled);
        if let Some(instance) = self.instance.as_deref_mut() {
            let sequence = instance.sequence();
            all.extend(instance.take_outbox().into_iter().map(|outgoing| (sequence, outgoing)));
        }
        all
    }

    /// Takes the instance away; its calls are for nobody any more.
    pub(crate) fn take_instance(&mut self) -> Option<Box<Instance>> {
        let mut instance = self.instance.take()?;
        let sequence = instance.sequence();
        self.cancelled.extend(instance.end_calls().into_iter().map(|token| (sequence, Outgoing::Cancel(token))));
        Some(instance)
    }
}

/// The words for a call that failed, as a gRPC close.
fn close_of(reason: String) -> GrpcEvent {
    GrpcEvent::Close { status: GRPC_UNAVAILABLE, message: reason }
}

// === impl Instance ===

impl Instance {
    /// What the guest asked of the gateway since the last question.
    pub(crate) fn take_outbox(&mut self) -> Vec<Outgoing> {
        std::mem::take(&mut self.store.data_mut().calls.outbox)
    }

    /// Ends all calls, since the instance goes away.
    pub(crate) fn end_calls(&mut self) -> Vec<u32> {
        self.store.data_mut().calls.end_all()
    }

    /// What kind of call this is, if it is open.
    pub(crate) fn call_kind(&mut self, token: u32) -> Option<CallKind> {
        self.store.data_mut().calls.get_mut(token).map(|call| call.kind)
    }

    pub(crate) fn has_call(&self, token: u32) -> bool {
        self.store.data().calls.contains(token)
    }

    /// Calls that a context has open.
    pub(crate) fn open_calls(&self, context: u32) -> usize {
        self.store.data().calls.count(context)
    }

    /// Breaks the calls of a context off and tells the guest that they failed.
    pub(crate) fn cancel_calls(&mut self, context: u32) -> wasmtime::Result<()> {
        for token in self.store.data().calls.of(context) {
            let Some(kind) = self.call_kind(token) else { continue };
            self.store.data_mut().calls.outbox.push(Outgoing::Cancel(token));
            self.tell(token, kind, Told::Failed("the stream that made the call is gone".to_owned()), true)?;
        }
        Ok(())
    }

    /// Tells the guest what came of a call: with the root's id, as SDKs want it.
    pub(crate) fn tell(&mut self, token: u32, kind: CallKind, told: Told, ends: bool) -> wasmtime::Result<()> {
        if ends {
            self.store.data_mut().calls.end(token);
        }
        let told = match (told, kind) {
            (Told::Failed(reason), CallKind::Http) => Told::Http(Err(reason)),
            (Told::Failed(reason), CallKind::Redis) => Told::Redis(Err(reason)),
            (Told::Failed(reason), _) => Told::Grpc(close_of(reason)),
            (told, _) => told,
        };
        let ran = match told {
            Told::Http(answer) => self.tell_http(token, answer),
            Told::Grpc(event) => self.tell_grpc(token, event),
            Told::Redis(reply) => self.tell_redis(token, reply),
            Told::Failed(_) => Ok(()),
        };
        let host = self.store.data_mut();
        host.shown = Arc::default();
        host.status = (0, String::new());
        ran
    }

    fn tell_http(&mut self, token: u32, answer: Result<HttpReply, String>) -> wasmtime::Result<()> {
        let Some(call) = self.exports.http_call_response.clone() else { return Ok(()) };
        self.prepare(ROOT_CONTEXT, Callback::HttpCallResponse);
        let mut sizes = (0, 0, 0);
        let host = self.store.data_mut();
        match answer {
            Ok(reply) => {
                // The status is a pair of its own.
                sizes = (1 + reply.headers.len(), reply.body.len(), reply.trailers.len());
                host.shown = Arc::new(Shown::reply(reply));
            }
            Err(reason) => host.status = (BROKEN_CONNECTION, reason),
        }
        let (headers, body, trailers) = (number(sizes.0), number(sizes.1), number(sizes.2));
        measured(&mut self.store, |store| call.call(store, (ROOT_CONTEXT, token, headers, body, trailers)))
    }

    fn tell_redis(&mut self, token: u32, reply: Result<Bytes, String>) -> wasmtime::Result<()> {
        let Some(call) = self.exports.redis_call_response.clone() else { return Ok(()) };
        self.prepare(ROOT_CONTEXT, Callback::RedisCallResponse);
        let host = self.store.data_mut();
        let (status, size) = match reply {
            Ok(reply) => {
                let size = reply.len();
                host.shown = Arc::new(Shown { redis: Some(reply), ..Shown::default() });
                (0, size)
            }
            Err(reason) => {
                host.status = (BROKEN_CONNECTION, reason);
                (REDIS_FAILED, 0)
            }
        };
        measured(&mut self.store, |store| call.call(store, (ROOT_CONTEXT, token, status, number(size))))
    }

    fn tell_grpc(&mut self, token: u32, event: GrpcEvent) -> wasmtime::Result<()> {
        let (callback, export, size, shown) = match event {
            GrpcEvent::InitialMetadata(map) => {
                let size = map.len();
                let shown = Shown { initial: Some(FieldMap::new(map)), ..Shown::default() };
                (Callback::GrpcInitialMetadata, &self.exports.grpc_initial_metadata, number(size), shown)
            }
            GrpcEvent::Message(message) => {
                let size = message.len();
                let shown = Shown { message: Some(message), ..Shown::default() };
                (Callback::GrpcReceive, &self.exports.grpc_receive, number(size), shown)
            }
            GrpcEvent::TrailingMetadata(map) => {
                let size = map.len();
                let shown = Shown { trailing: Some(FieldMap::new(map)), ..Shown::default() };
                (Callback::GrpcTrailingMetadata, &self.exports.grpc_trailing_metadata, number(size), shown)
            }
            GrpcEvent::Close { status, message } => {
                self.store.data_mut().status = (status, message);
                (Callback::GrpcClose, &self.exports.grpc_close, status, Shown::default())
            }
        };
        let Some(call) = export.clone() else { return Ok(()) };
        self.prepare(ROOT_CONTEXT, callback);
        self.store.data_mut().shown = Arc::new(shown);
        measured(&mut self.store, |store| call.call(store, (ROOT_CONTEXT, token, size)))
    }
}

/// What `proxy_on_redis_call_response` says of a call without a reply; 0 is one with.
const REDIS_FAILED: u32 = 1;

/// What `proxy_get_status` says of an HTTP or Redis call without an answer: Envoy's "broken connection".
const BROKEN_CONNECTION: u32 = 11;

pub(crate) fn number(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
