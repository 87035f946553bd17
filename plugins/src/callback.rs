//! The guest's exports: which callbacks there are, and their typed handles in one instance.

use wasmtime::{ExternType, FuncType, Instance, Module, Store, TypedFunc, ValType};

use crate::abi::{AbiVersion, MARKER_PREFIX};
use crate::host::Host;

/// What a filter of TCP streams exports.
const TCP_EXPORTS: [&str; 5] = [
    "proxy_on_new_connection",
    "proxy_on_downstream_data",
    "proxy_on_upstream_data",
    "proxy_on_downstream_connection_close",
    "proxy_on_upstream_connection_close",
];

/// A callback that a plugin may export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Callback {
    /// A context begins.
    ContextCreate,
    /// The virtual machine starts.
    VmStart,
    /// The plugin reads its configuration.
    Configure,
    /// The period set by the guest has passed.
    Tick,
    /// The request's headers are there.
    RequestHeaders,
    /// More of the request's body is there.
    RequestBody,
    /// The request's trailers are there.
    RequestTrailers,
    /// The response's headers are there.
    ResponseHeaders,
    /// More of the response's body is there.
    ResponseBody,
    /// The response's trailers are there.
    ResponseTrailers,
    /// A queue that the guest consumes got an item.
    QueueReady,
    /// The gateway calls a function of the guest.
    ForeignFunction,
    /// An HTTP call has its answer, or has failed.
    HttpCallResponse,
    /// A gRPC call got its initial metadata.
    GrpcInitialMetadata,
    /// A gRPC call got a message.
    GrpcReceive,
    /// A gRPC call got its trailing metadata.
    GrpcTrailingMetadata,
    /// A gRPC call has ended.
    GrpcClose,
    /// A Redis call has its reply, or has failed.
    RedisCallResponse,
    /// A stream has ended and may be logged.
    Log,
    /// A context is about to end.
    Done,
    /// A context has ended.
    Delete,
}

impl Callback {
    /// Every callback.
    pub const ALL: [Callback; 21] = [
        Self::ContextCreate,
        Self::VmStart,
        Self::Configure,
        Self::Tick,
        Self::RequestHeaders,
        Self::RequestBody,
        Self::RequestTrailers,
        Self::ResponseHeaders,
        Self::ResponseBody,
        Self::ResponseTrailers,
        Self::QueueReady,
        Self::ForeignFunction,
        Self::HttpCallResponse,
        Self::GrpcInitialMetadata,
        Self::GrpcReceive,
        Self::GrpcTrailingMetadata,
        Self::GrpcClose,
        Self::RedisCallResponse,
        Self::Log,
        Self::Done,
        Self::Delete,
    ];

    /// Those that a filter of HTTP streams has.
    const OF_STREAMS: [Callback; 6] = [
        Self::RequestHeaders,
        Self::RequestBody,
        Self::RequestTrailers,
        Self::ResponseHeaders,
        Self::ResponseBody,
        Self::ResponseTrailers,
    ];

    /// The export's name.
    pub fn export(self) -> &'static str {
        match self {
            Self::ContextCreate => "proxy_on_context_create",
            Self::VmStart => "proxy_on_vm_start",
            Self::Configure => "proxy_on_configure",
            Self::Tick => "proxy_on_tick",
            Self::RequestHeaders => "proxy_on_request_headers",
            Self::RequestBody => "proxy_on_request_body",
            Self::RequestTrailers => "proxy_on_request_trailers",
            Self::ResponseHeaders => "proxy_on_response_headers",
            Self::ResponseBody => "proxy_on_response_body",
            Self::ResponseTrailers => "proxy_on_response_trailers",
            Self::QueueReady => "proxy_on_queue_ready",
            Self::ForeignFunction => "proxy_on_foreign_function",
            Self::HttpCallResponse => "proxy_on_http_call_response",
            Self::GrpcInitialMetadata => "proxy_on_grpc_receive_initial_metadata",
            Self::GrpcReceive => "proxy_on_grpc_receive",
            Self::GrpcTrailingMetadata => "proxy_on_grpc_receive_trailing_metadata",
            Self::GrpcClose => "proxy_on_grpc_close",
            Self::RedisCallResponse => "proxy_on_redis_call_response",
            Self::Log => "proxy_on_log",
            Self::Done => "proxy_on_done",
            Self::Delete => "proxy_on_delete",
        }
    }

    /// Another name that some SDKs export it by.
    fn other_export(self) -> Option<&'static str> {
        matches!(self, Self::GrpcTrailingMetadata).then_some("proxy_on_grpc_trailing_metadata")
    }

    /// Number of i32 parameters and of i32 results. Header callbacks may have one parameter less.
    fn arity(self) -> (usize, usize) {
        match self {
            Self::ContextCreate | Self::QueueReady => (2, 0),
            Self::VmStart | Self::Configure | Self::RequestTrailers | Self::ResponseTrailers => (2, 1),
            Self::Tick | Self::Log | Self::Delete => (1, 0),
            Self::RequestHeaders | Self::RequestBody | Self::ResponseHeaders | Self::ResponseBody => (3, 1),
            Self::HttpCallResponse => (5, 0),
            Self::RedisCallResponse => (4, 0),
            Self::ForeignFunction
            | Self::GrpcInitialMetadata
            | Self::GrpcReceive
            | Self::GrpcTrailingMetadata
            | Self::GrpcClose => (3, 0),
            Self::Done => (1, 1),
        }
    }

    fn fits(self, ty: &FuncType) -> bool {
        let (params, results) = self.arity();
        let two_arguments = matches!(self, Self::RequestHeaders | Self::ResponseHeaders) && ty.params().len() == 2;
        all_i32(ty) && (ty.params().len() == params || two_arguments) && ty.results().len() == results
    }
}

fn all_i32(ty: &FuncType) -> bool {
    ty.params().chain(ty.results()).all(|ty| matches!(ty, ValType::I32))
}

/// A set of callbacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CallbackSet(u32);

impl CallbackSet {
    /// True if the set has this callback.
    pub(crate) fn contains(self, callback: Callback) -> bool {
        self.0 & (1 << callback as u32) != 0
    }

    /// The callbacks that a module exports.
    ///
    /// # Errors
    /// Text naming an export of another type than the ABI gives it.
    pub(crate) fn of(module: &Module) -> Result<Self, String> {
        let mut set = Self::default();
        let names = |callback: Callback| std::iter::once(callback.export()).chain(callback.other_export());
        for (callback, name) in Callback::ALL.into_iter().flat_map(|c| names(c).map(move |name| (c, name))) {
            match module.get_export(name) {
                None => {}
                Some(ExternType::Func(ty)) if callback.fits(&ty) => set.0 |= 1 << callback as u32,
                Some(ty) => {
                    let (params, results) = callback.arity();
                    return Err(format!(
                        "export {name} has type {}; the ABI wants {params} i32 parameters and {results} i32 results",
                        describe(&ty),
                    ));
                }
            }
        }
        if let Some(export) = TCP_EXPORTS.into_iter().find(|name| module.get_export(name).is_some())
            && !Callback::OF_STREAMS.into_iter().any(|callback| set.contains(callback))
        {
            return Err(format!("export {export} and no callback for HTTP: filters of TCP streams do not run here"));
        }
        Ok(set)
    }
}

/// The ABI version of a module.
///
/// # Errors
/// Text that names the markers found, if there is not exactly one that is known.
pub(crate) fn abi_version(module: &Module) -> Result<AbiVersion, String> {
    let markers: Vec<_> =
        module.exports().map(|export| export.name()).filter(|name| name.starts_with(MARKER_PREFIX)).collect();
    match markers.as_slice() {
        [] => Err(format!("no export {MARKER_PREFIX}*: not a Proxy-Wasm module")),
        [marker] => AbiVersion::from_marker(marker)
            .ok_or_else(|| format!("unknown ABI version {marker}; known are 0_1_0, 0_2_0, 0_2_1 and 0_2_100")),
        several => Err(format!("more than one ABI version: {}", several.join(", "))),
    }
}

/// An import's or export's type as a reader of WebAssembly text knows it.
pub(crate) fn describe(ty: &ExternType) -> String {
    match ty {
        ExternType::Func(ty) => {
            let join = |types: Vec<String>| types.join(" ");
            let params = join(ty.params().map(|ty| ty.to_string()).collect());
            let results = join(ty.results().map(|ty| ty.to_string()).collect());
            format!("func({params}) -> ({results})")
        }
        ExternType::Memory(_) => "memory".to_owned(),
        ExternType::Table(_) => "table".to_owned(),
        ExternType::Global(_) => "global".to_owned(),
        ExternType::Tag(_) => "tag".to_owned(),
    }
}

/// A headers callback; ABI 0.1.0 has no end-of-stream argument.
pub(crate) enum HeadersCallback {
    Two(TypedFunc<(u32, u32), u32>),
    Three(TypedFunc<(u32, u32, u32), u32>),
}

impl HeadersCallback {
    fn find(instance: &Instance, store: &mut Store<Host>, name: &str) -> Option<Self> {
        if let Ok(call) = instance.get_typed_func(&mut *store, name) {
            return Some(Self::Three(call));
        }
        instance.get_typed_func(store, name).ok().map(Self::Two)
    }

    pub(crate) fn call(&self, store: &mut Store<Host>, context: u32, n: u32, eos: u32) -> wasmtime::Result<u32> {
        match self {
            Self::Two(call) => call.call(store, (context, n)),
            Self::Three(call) => call.call(store, (context, n, eos)),
        }
    }
}

/// The callback about an HTTP call: context, token, three sizes.
pub(crate) type ReplyCallback = TypedFunc<(u32, u32, u32, u32, u32), ()>;
/// Callbacks with a context, a number and a size.
pub(crate) type EventCallback = TypedFunc<(u32, u32, u32), ()>;
/// Callbacks that take a context and nothing else, or one more number.
pub(crate) type Notify = Option<TypedFunc<u32, ()>>;
/// Callbacks with a context, a size and an answer.
pub(crate) type Sized = Option<TypedFunc<(u32, u32), u32>>;

/// Typed handles of one instance's callbacks.
pub(crate) struct GuestExports {
    pub(crate) context_create: Option<TypedFunc<(u32, u32), ()>>,
    pub(crate) vm_start: Sized,
    pub(crate) configure: Sized,
    pub(crate) tick: Notify,
    pub(crate) request_headers: Option<HeadersCallback>,
    pub(crate) request_body: Option<TypedFunc<(u32, u32, u32), u32>>,
    pub(crate) request_trailers: Sized,
    pub(crate) response_headers: Option<HeadersCallback>,
    pub(crate) response_body: Option<TypedFunc<(u32, u32, u32), u32>>,
    pub(crate) response_trailers: Sized,
    pub(crate) queue_ready: Option<TypedFunc<(u32, u32), ()>>,
    pub(crate) foreign_function: Option<EventCallback>,
    pub(crate) http_call_response: Option<ReplyCallback>,
    pub(crate) grpc_initial_metadata: Option<EventCallback>,
    pub(crate) grpc_receive: Option<EventCallback>,
    pub(crate) grpc_trailing_metadata: Option<EventCallback>,
    pub(crate) grpc_close: Option<EventCallback>,
    pub(crate) redis_call_response: Option<TypedFunc<(u32, u32, u32, u32), ()>>,
    pub(crate) log: Notify,
    pub(crate) done: Option<TypedFunc<u32, u32>>,
    pub(crate) delete: Notify,
}

impl GuestExports {
    /// Looks up every callback; types were checked when the module was loaded.
    pub(crate) fn find(instance: &Instance, store: &mut Store<Host>) -> Self {
        macro_rules! find {
            ($callback:ident) => {
                instance.get_typed_func(&mut *store, Callback::$callback.export()).ok()
            };
        }
        Self {
            context_create: find!(ContextCreate),
            vm_start: find!(VmStart),
            configure: find!(Configure),
            tick: find!(Tick),
            request_headers: HeadersCallback::find(instance, store, Callback::RequestHeaders.export()),
            request_body: find!(RequestBody),
            request_trailers: find!(RequestTrailers),
            response_headers: HeadersCallback::find(instance, store, Callback::ResponseHeaders.export()),
            response_body: find!(ResponseBody),
            response_trailers: find!(ResponseTrailers),
            queue_ready: find!(QueueReady),
            foreign_function: find!(ForeignFunction),
            http_call_response: find!(HttpCallResponse),
            grpc_initial_metadata: find!(GrpcInitialMetadata),
            grpc_receive: find!(GrpcReceive),
            grpc_trailing_metadata: find!(GrpcTrailingMetadata).or_else(|| {
                let other = Callback::GrpcTrailingMetadata.other_export()?;
                instance.get_typed_func(&mut *store, other).ok()
            }),
            grpc_close: find!(GrpcClose),
            redis_call_response: find!(RedisCallResponse),
            log: find!(Log),
            done: find!(Done),
            delete: find!(Delete),
        }
    }
}
