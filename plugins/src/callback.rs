//! The guest's exports: which callbacks there are, and their typed handles in one instance.

use wasmtime::{ExternType, FuncType, Instance, Module, Store, TypedFunc, ValType};

use crate::abi::{AbiVersion, MARKER_PREFIX};
use crate::host::Host;

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
    /// A stream has ended and may be logged.
    Log,
    /// A context is about to end.
    Done,
    /// A context has ended.
    Delete,
}

impl Callback {
    const ALL: [Callback; 15] = [
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
        Self::Log,
        Self::Done,
        Self::Delete,
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
            Self::Log => "proxy_on_log",
            Self::Done => "proxy_on_done",
            Self::Delete => "proxy_on_delete",
        }
    }

    /// Number of i32 parameters and of i32 results. Header callbacks may have one parameter less.
    fn arity(self) -> (usize, usize) {
        match self {
            Self::ContextCreate | Self::QueueReady => (2, 0),
            Self::VmStart | Self::Configure | Self::RequestTrailers | Self::ResponseTrailers => (2, 1),
            Self::Tick | Self::Log | Self::Delete => (1, 0),
            Self::RequestHeaders | Self::RequestBody | Self::ResponseHeaders | Self::ResponseBody => (3, 1),
            Self::ForeignFunction => (3, 0),
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
        for callback in Callback::ALL {
            match module.get_export(callback.export()) {
                None => {}
                Some(ExternType::Func(ty)) if callback.fits(&ty) => set.0 |= 1 << callback as u32,
                Some(ty) => {
                    let (params, results) = callback.arity();
                    return Err(format!(
                        "export {} has type {}; the ABI wants {params} i32 parameters and {results} i32 results",
                        callback.export(),
                        describe(&ty),
                    ));
                }
            }
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
            .ok_or_else(|| format!("unknown ABI version {marker}; known are 0_1_0, 0_2_0 and 0_2_1")),
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
    pub(crate) foreign_function: Option<TypedFunc<(u32, u32, u32), ()>>,
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
            log: find!(Log),
            done: find!(Done),
            delete: find!(Delete),
        }
    }
}
