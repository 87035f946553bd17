//! Calls that guests ask the gateway to make: what is asked, what comes back, and how many are open.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use hashbrown::HashMap;
use http::{HeaderMap, Method, StatusCode};

use crate::abi::{BufferType, MapType};
use crate::delivery::CallHandle;
use crate::env::HeaderPairs;
use crate::host::{Loaded, ROOT_CONTEXT};
use crate::http_env::{FieldMap, ResponseMap};

/// Names one call among all of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CallId {
    pub(crate) sequence: u64,
    pub(crate) token: u32,
}

/// An HTTP request to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpCallout {
    /// Where to: a name that [`PluginServices::has_upstream`](crate::PluginServices::has_upstream) knows.
    pub upstream: String,
    /// `:method`
    pub method: Method,
    /// `:path`, with the query.
    pub path: String,
    /// `:authority`
    pub authority: String,
    /// Everything else, without `host` and without what frames a message.
    pub headers: HeaderMap,
    /// The body; empty for none.
    pub body: Bytes,
    /// Trailers; for connections that can send them.
    pub trailers: HeaderMap,
    /// How long the whole call may take; nothing: as long as the upstream allows.
    pub timeout: Option<Duration>,
    /// Largest body of an answer, bytes; a larger one fails the call.
    pub max_body: usize,
}

/// The answer to an [`HttpCallout`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpReply {
    /// `:status`
    pub status: StatusCode,
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Bytes,
    /// Its trailers.
    pub trailers: HeaderMap,
}

/// A gRPC call to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrpcCallout {
    /// Where to: a name that [`PluginServices::has_upstream`](crate::PluginServices::has_upstream) knows.
    pub upstream: String,
    /// The service's full name.
    pub service: String,
    /// The method's name.
    pub method: String,
    /// Initial metadata.
    pub metadata: HeaderMap,
    /// The one message of a unary call; nothing for a stream, whose messages come later.
    pub message: Option<Bytes>,
    /// How long a unary call may take; nothing: as long as the upstream allows. Streams have no limit.
    pub timeout: Option<Duration>,
    /// Largest message of an answer, bytes; a larger one fails the call.
    pub max_message: usize,
}

/// A Redis command to run; Higress' dialect only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisCallout {
    /// Where to: a name that [`PluginServices::has_redis`](crate::PluginServices::has_redis) knows.
    pub upstream: String,
    /// How the guest wants the connection, where the upstream leaves it open.
    pub login: RedisLogin,
    /// The command and its arguments: at least one, none of them empty of meaning to the host.
    pub command: Vec<Bytes>,
    /// How long the call may take; nothing: as long as the upstream allows.
    pub timeout: Option<Duration>,
    /// Largest reply, bytes; a larger one fails the call.
    pub max_reply: usize,
}

/// Who a Redis connection is for.
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct RedisLogin {
    /// User name; nothing for the default user.
    pub username: Option<String>,
    /// Password; nothing for none.
    pub password: Option<String>,
    /// Number of the database.
    pub database: Option<u32>,
}

impl std::fmt::Debug for RedisLogin {
    /// The password is nobody's to read in a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RedisLogin")
            .field("username", &self.username)
            .field("password", &self.password.as_ref().map(|_| "***"))
            .field("database", &self.database)
            .finish()
    }
}

/// What a guest asked to be called.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Callout {
    /// An HTTP request.
    Http(HttpCallout),
    /// A gRPC call.
    Grpc(GrpcCallout),
    /// A Redis command.
    Redis(RedisCallout),
}

/// What the gateway has to do about calls; see [`PluginServices::call_out`](crate::PluginServices::call_out).
#[derive(Debug)]
pub enum CallCommand {
    /// Make a call and tell the handle what comes of it.
    Start(CallHandle, Box<Callout>),
    /// Send a message on a gRPC stream; `end`: it is the last.
    Send {
        /// The call.
        id: CallId,
        /// The message.
        message: Bytes,
        /// Nothing more will be sent.
        end: bool,
    },
    /// Nothing more will be sent on a gRPC stream; answers may still come.
    Close(CallId),
    /// Break a call off; nobody waits for it any more.
    Cancel(CallId),
}

/// What happened on a gRPC call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrpcEvent {
    /// Initial metadata came.
    InitialMetadata(HeaderMap),
    /// A message came. The one of a unary call is also its good end.
    Message(Bytes),
    /// Trailing metadata came.
    TrailingMetadata(HeaderMap),
    /// The call has ended. For a unary call: it failed.
    Close {
        /// The gRPC status, 0 for OK.
        status: u32,
        /// Its message.
        message: String,
    },
}

/// `status` of a call that could not be made or was broken off.
pub const GRPC_UNAVAILABLE: u32 = 14;

/// What a call in a guest is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CallKind {
    Http,
    Redis,
    GrpcUnary,
    /// Whether the guest has said that it sends nothing more.
    GrpcStream {
        closed: bool,
    },
}

/// A call that has not ended.
pub(crate) struct OpenCall {
    /// The context that made it.
    pub(crate) context: u32,
    pub(crate) kind: CallKind,
    _place: CallPlace,
}

/// What is asked of the gateway once the guest has returned.
#[derive(Debug)]
pub(crate) enum Outgoing {
    Start(u32, Box<Callout>),
    Send { token: u32, message: Bytes, end: bool },
    Close(u32),
    Cancel(u32),
}

/// The calls of one instance.
#[derive(Default)]
pub(crate) struct Calls {
    open: HashMap<u32, OpenCall>,
    last: u32,
    pub(crate) outbox: Vec<Outgoing>,
}

/// One place among the calls that a plugin may have open, over all its instances.
struct CallPlace(Arc<Loaded>);

/// Counts the open calls of a plugin.
#[derive(Debug, Default)]
pub(crate) struct CallCount(AtomicUsize);

/// What maps 4 to 7 and buffers 4, 5 and 9 hold while a callback about a call runs.
#[derive(Debug, Default)]
pub(crate) struct Shown {
    pub(crate) headers: Option<ResponseMap>,
    pub(crate) trailers: Option<FieldMap>,
    pub(crate) initial: Option<FieldMap>,
    pub(crate) trailing: Option<FieldMap>,
    pub(crate) body: Option<Bytes>,
    pub(crate) message: Option<Bytes>,
    pub(crate) redis: Option<Bytes>,
}

// === impl CallPlace ===

impl CallPlace {
    fn take(plugin: &Arc<Loaded>) -> Option<Self> {
        let most = plugin.spec.limits.callouts;
        let taken = plugin.open_calls.0.fetch_update(Relaxed, Relaxed, |open| (open < most).then_some(open + 1));
        taken.is_ok().then(|| Self(Arc::clone(plugin)))
    }
}

impl Drop for CallPlace {
    fn drop(&mut self) {
        self.0.open_calls.0.fetch_sub(1, Relaxed);
    }
}

// === impl CallCount ===

impl CallCount {
    pub(crate) fn get(&self) -> usize {
        self.0.load(Relaxed)
    }
}

// === impl Calls ===

impl Calls {
    /// A token for a new call of a context, unless it or its plugin has too many.
    pub(crate) fn open(&mut self, plugin: &Arc<Loaded>, context: u32, kind: CallKind) -> Option<u32> {
        let most = plugin.spec.limits.callouts_per_stream;
        // The root has no bound but the plugin's: it works for all.
        if context != ROOT_CONTEXT && self.count(context) >= most {
            return None;
        }
        let place = CallPlace::take(plugin)?;
        plugin.stats.acts_apart();
        let mut token = self.last;
        loop {
            token = token.checked_add(1).unwrap_or(1);
            if !self.open.contains_key(&token) {
                break;
            }
        }
        self.last = token;
        self.open.insert(token, OpenCall { context, kind, _place: place });
        Some(token)
    }

    /// The context that made a call.
    pub(crate) fn context(&self, token: u32) -> Option<u32> {
        self.open.get(&token).map(|call| call.context)
    }

    pub(crate) fn contains(&self, token: u32) -> bool {
        self.open.contains_key(&token)
    }

    /// Calls that a context has open.
    pub(crate) fn count(&self, context: u32) -> usize {
        self.open.values().filter(|call| call.context == context).count()
    }

    pub(crate) fn get_mut(&mut self, token: u32) -> Option<&mut OpenCall> {
        self.open.get_mut(&token)
    }

    /// The call has ended: its token is free.
    pub(crate) fn end(&mut self, token: u32) -> Option<OpenCall> {
        self.open.remove(&token)
    }

    /// The calls of a context, in the order of their tokens.
    pub(crate) fn of(&self, context: u32) -> Vec<u32> {
        let mut tokens: Vec<u32> =
            self.open.iter().filter(|(_, call)| call.context == context).map(|(token, _)| *token).collect();
        tokens.sort_unstable();
        tokens
    }

    /// Gives the calls of a stream that ends to the root, which is told what comes of them.
    pub(crate) fn adopt(&mut self, context: u32) {
        self.open.values_mut().filter(|call| call.context == context).for_each(|call| call.context = ROOT_CONTEXT);
    }

    /// Ends all calls, for an instance that goes away.
    pub(crate) fn end_all(&mut self) -> Vec<u32> {
        self.outbox.clear();
        self.open.drain().map(|(token, _)| token).collect()
    }
}

// === impl Shown ===

impl Shown {
    /// What a callback about this answer sees.
    pub(crate) fn reply(reply: HttpReply) -> Self {
        Self {
            headers: Some(ResponseMap::new(reply.status, reply.headers)),
            trailers: Some(FieldMap::new(reply.trailers)),
            body: Some(reply.body),
            ..Self::default()
        }
    }

    pub(crate) fn map(&self, map: MapType) -> Option<&dyn HeaderPairs> {
        match map {
            MapType::HttpCallResponseHeaders => self.headers.as_ref().map(|map| map as &dyn HeaderPairs),
            MapType::HttpCallResponseTrailers => self.trailers.as_ref().map(|map| map as &dyn HeaderPairs),
            MapType::GrpcInitialMetadata => self.initial.as_ref().map(|map| map as &dyn HeaderPairs),
            MapType::GrpcTrailingMetadata => self.trailing.as_ref().map(|map| map as &dyn HeaderPairs),
            _ => None,
        }
    }

    pub(crate) fn buffer(&self, buffer: BufferType) -> Option<&Bytes> {
        match buffer {
            BufferType::HttpCallResponseBody => self.body.as_ref(),
            BufferType::GrpcMessage => self.message.as_ref(),
            BufferType::RedisReply => self.redis.as_ref(),
            _ => None,
        }
    }
}
