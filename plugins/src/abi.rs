//! The numbers and names of the Proxy-Wasm ABI.

/// What a host function tells the guest.
///
/// The set is that of ABI 0.2.1 without the values that only the C++ host uses. The public Rust SDK panics on a status
/// it does not expect, so which function may return which value is part of the contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// The thing asked for does not exist here.
    NotFound = 1,
    /// An argument has no meaning.
    BadArgument = 2,
    /// A value could not be written in the wire form.
    SerializationFailure = 3,
    /// A value could not be read from the wire form.
    ParseFailure = 4,
    /// A pointer or length leaves the guest's memory.
    InvalidMemoryAccess = 6,
    /// A queue holds nothing.
    Empty = 7,
    /// The value was changed by somebody else since it was read.
    CasMismatch = 8,
    /// The host cannot do it now.
    InternalFailure = 10,
    /// The host does not know how.
    Unimplemented = 12,
}

/// Severity of a guest's log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u32)]
pub enum LogLevel {
    /// Finest detail.
    Trace = 0,
    /// For the plugin's author.
    Debug = 1,
    /// Normal events.
    Info = 2,
    /// Something odd that was coped with.
    Warn = 3,
    /// Something failed.
    Error = 4,
    /// The plugin cannot go on.
    Critical = 5,
}

impl LogLevel {
    /// The level with this number.
    pub fn from_u32(value: u32) -> Option<Self> {
        Some(match value {
            0 => Self::Trace,
            1 => Self::Debug,
            2 => Self::Info,
            3 => Self::Warn,
            4 => Self::Error,
            5 => Self::Critical,
            _ => return None,
        })
    }
}

/// A byte buffer that a guest may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum BufferType {
    /// Body of the request, as much as is held now.
    RequestBody = 0,
    /// Body of the response, as much as is held now.
    ResponseBody = 1,
    /// TCP bytes from the client; never present here.
    DownstreamData = 2,
    /// TCP bytes from the upstream; never present here.
    UpstreamData = 3,
    /// Body of an HTTP callout's answer.
    HttpCallResponseBody = 4,
    /// A gRPC callout's message.
    GrpcMessage = 5,
    /// Configuration of the virtual machine.
    VmConfiguration = 6,
    /// Configuration of the plugin.
    PluginConfiguration = 7,
    /// Arguments of the foreign function call the guest is in.
    ForeignFunctionArguments = 8,
    /// A Redis reply, in RESP; Higress' dialect only.
    RedisReply = 9,
}

impl BufferType {
    /// The buffer with this number.
    pub fn from_u32(value: u32) -> Option<Self> {
        Some(match value {
            0 => Self::RequestBody,
            1 => Self::ResponseBody,
            2 => Self::DownstreamData,
            3 => Self::UpstreamData,
            4 => Self::HttpCallResponseBody,
            5 => Self::GrpcMessage,
            6 => Self::VmConfiguration,
            7 => Self::PluginConfiguration,
            8 => Self::ForeignFunctionArguments,
            9 => Self::RedisReply,
            _ => return None,
        })
    }
}

/// A map of names and values that a guest may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum MapType {
    /// Headers of the request, with `:method`, `:path`, `:authority` and `:scheme`.
    RequestHeaders = 0,
    /// Trailers of the request.
    RequestTrailers = 1,
    /// Headers of the response, with `:status`.
    ResponseHeaders = 2,
    /// Trailers of the response.
    ResponseTrailers = 3,
    /// Initial metadata of a gRPC callout.
    GrpcInitialMetadata = 4,
    /// Trailing metadata of a gRPC callout.
    GrpcTrailingMetadata = 5,
    /// Headers of an HTTP callout's answer.
    HttpCallResponseHeaders = 6,
    /// Trailers of an HTTP callout's answer.
    HttpCallResponseTrailers = 7,
}

impl MapType {
    /// The map with this number.
    pub fn from_u32(value: u32) -> Option<Self> {
        Some(match value {
            0 => Self::RequestHeaders,
            1 => Self::RequestTrailers,
            2 => Self::ResponseHeaders,
            3 => Self::ResponseTrailers,
            4 => Self::GrpcInitialMetadata,
            5 => Self::GrpcTrailingMetadata,
            6 => Self::HttpCallResponseHeaders,
            7 => Self::HttpCallResponseTrailers,
            _ => return None,
        })
    }
}

/// Kind of a plugin's metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum MetricType {
    /// Only grows.
    Counter = 0,
    /// Goes up and down.
    Gauge = 1,
    /// Distribution of observed values.
    Histogram = 2,
}

impl MetricType {
    /// The kind with this number.
    pub fn from_u32(value: u32) -> Option<Self> {
        Some(match value {
            0 => Self::Counter,
            1 => Self::Gauge,
            2 => Self::Histogram,
            _ => return None,
        })
    }
}

/// The ABI version a module announces by the name of one of its exports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AbiVersion {
    /// `proxy_abi_version_0_1_0`: header callbacks have two arguments, a missing header reads as empty.
    V0_1_0,
    /// `proxy_abi_version_0_2_0`.
    V0_2_0,
    /// `proxy_abi_version_0_2_1`.
    V0_2_1,
    /// `proxy_abi_version_0_2_100`: Higress' dialect, see [`Dialect::Higress`].
    V0_2_100,
}

/// What every version marker starts with.
pub(crate) const MARKER_PREFIX: &str = "proxy_abi_version_";

impl AbiVersion {
    /// The version whose marker has this export name.
    pub fn from_marker(export: &str) -> Option<Self> {
        match export.strip_prefix(MARKER_PREFIX)? {
            "0_1_0" => Some(Self::V0_1_0),
            "0_2_0" => Some(Self::V0_2_0),
            "0_2_1" => Some(Self::V0_2_1),
            "0_2_100" => Some(Self::V0_2_100),
            _ => None,
        }
    }

    /// The version as text, for example `0.2.1`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V0_1_0 => "0.1.0",
            Self::V0_2_0 => "0.2.0",
            Self::V0_2_1 => "0.2.1",
            Self::V0_2_100 => "0.2.100",
        }
    }

    /// The dialect that modules of this version are written for.
    pub fn dialect(self) -> Dialect {
        match self {
            Self::V0_2_100 => Dialect::Higress,
            Self::V0_1_0 | Self::V0_2_0 | Self::V0_2_1 => Dialect::Standard,
        }
    }
}

/// Which host a plugin was made for, where hosts differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// Proxy-Wasm as specified, with Envoy's behaviour where that is silent.
    #[default]
    Standard,
    /// Higress: imports for Redis, for the hosts of an upstream and for the choice among them; and a headers callback that
    /// returns 1 stops what lies behind the plugin, but not the plugin's own body callbacks.
    Higress,
}
