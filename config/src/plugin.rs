//! The chain of Proxy-Wasm plugins.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Map;

use crate::{BuiltIn, ByteSize, Canary, PluginConfiguration, PluginSource};

/// One Proxy-Wasm plugin of the chain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Plugin {
    /// Name in logs, metrics and the decision log; unique.
    #[schemars(extend("format" = "name"))]
    pub name: String,
    /// `builtin:priority-queue`, `builtin:session-binding`, `builtin:kv-affinity`, the path of a WebAssembly module,
    /// relative to this file, or the `https://` or `http://` URL of one.
    pub wasm: PluginSource,
    /// SHA-256 that the module must have, as 64 hexadecimal digits. A module from a URL needs it; one with another is not
    /// loaded.
    #[schemars(extend("format" = "sha256"))]
    pub sha256: Option<String>,
    /// When it runs.
    pub phase: Phase,
    /// Which host the module was made for.
    #[serde(default)]
    pub dialect: Dialect,
    /// The plugin's own configuration: a string is handed to it byte for byte, a table or list as JSON, an empty table as
    /// nothing. Shown on the admin listener, so no place for secrets.
    #[serde(default = "default_config")]
    pub config: PluginConfiguration,
    /// What the plugin reads as `plugin_root_id`, by which modules made with the SDKs for C++ and AssemblyScript choose what to
    /// run: the name that theirs is registered with, in C++ often the empty one. 256 characters at most; entries may share one.
    /// Absent: the plugin's name.
    #[schemars(length(max = 256))]
    pub root_id: Option<String>,
    /// Configuration of the plugin's virtual machine, handed to it when that starts (`proxy_on_vm_start`), in the forms of
    /// `config`; 65536 characters at most. Shown on the admin listener, so no place for secrets.
    #[serde(default = "default_vm_configuration")]
    #[schemars(extend("maxLength" = MAX_VM_CONFIGURATION))]
    pub vm_configuration: PluginConfiguration,
    /// Name space of the plugin's shared data and queues, and what it reads as `plugin_vm_id`: plugins with the same one share
    /// them. Absent: the plugin's name.
    #[schemars(extend("format" = "name"))]
    pub vm_id: Option<String>,
    /// What the module sees as its environment by WASI: names without `=`, 128 bytes at most, with values of 4096 bytes at most;
    /// 64 of them at most. Shown on the admin listener, so no place for secrets.
    #[serde(default)]
    #[schemars(extend("maxProperties" = 64))]
    pub environment: BTreeMap<String, String>,
    /// What happens to a request when the plugin traps, times out or is quarantined. Absent: `fallback` in the phases
    /// `admit` and `route`, `closed` in the phase `filter`. Not for the phase `background`.
    pub on_error: Option<OnError>,
    /// Milliseconds one call into the plugin may take.
    #[serde(default = "default_callback_timeout_ms")]
    #[schemars(range(min = 1, max = 60_000))]
    pub callback_timeout_ms: u64,
    /// Milliseconds the plugin may take to start with its configuration.
    #[serde(default = "default_configure_timeout_ms")]
    #[schemars(range(min = 1, max = 600_000))]
    pub configure_timeout_ms: u64,
    /// MiB of linear memory that one instance may grow to. WebAssembly with 32-bit addresses ends at 4096.
    #[serde(default = "default_memory_mib")]
    #[schemars(range(min = 1, max = 4096))]
    pub memory_mib: u32,
    /// Instances that share the work; each has its own memory and runs one call at a time. Absent: one per thread; in the phase
    /// `background` one, since each has its own ticks.
    #[schemars(range(min = 1, max = 1024))]
    pub instances: Option<u32>,
    /// Log lines per second that are kept, over all instances; more are dropped and counted.
    #[serde(default = "default_log_per_s")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub log_per_s: u32,
    /// Largest body that is held for the plugin while it waits, or that it makes of one. A request over it is answered 413; a
    /// response over it 500, or it breaks off if the client has some of it.
    #[serde(default = "default_held_body_bytes")]
    #[schemars(extend("minimum" = 1_024, "maximum" = 4_294_967_296_u64))]
    pub held_body_bytes: ByteSize,
    /// Milliseconds the plugin may keep a request or response waiting while no call of it is under way; after that it has
    /// failed.
    #[serde(default = "default_pause_timeout_ms")]
    #[schemars(range(min = 1, max = 3_600_000))]
    pub pause_timeout_ms: u64,
    /// Names of the upstreams and pools that the plugin may call.
    #[serde(default)]
    #[schemars(inner(length(min = 1, max = 128)))]
    pub upstreams: Vec<String>,
    /// Calls to upstreams that one request may have under way in the plugin.
    #[serde(default = "default_calls_per_request")]
    #[schemars(range(min = 0, max = 1_024))]
    pub calls_per_request: u32,
    /// Calls to upstreams that the plugin may have under way in all.
    #[serde(default = "default_calls")]
    #[schemars(range(min = 0, max = 1_000_000))]
    pub calls: u32,
    /// Largest body or message that a call to an upstream may send or get.
    #[serde(default = "default_call_body_bytes")]
    #[schemars(extend("maximum" = 1_073_741_824_u64))]
    pub call_body_bytes: ByteSize,
    /// What the plugin is told of an answer while it comes, by `proxy_on_foreign_function`; its bytes are not shown for it.
    #[serde(default)]
    pub events: Vec<PluginEvent>,
    /// Calls the filter's callbacks for answers (`proxy_on_response_headers`, `_body`, `_trailers`). `false`: answers go past it,
    /// at no cost and with their length; for modules that export those callbacks and do nothing in them, as all of the Rust
    /// SDK's do. `events` come all the same.
    #[serde(default = "default_response")]
    pub response: bool,
    /// Headers that the plugin sees and may write although they let whoever reads them act for the client. Others of them are
    /// absent to it.
    #[serde(default)]
    pub secret_headers: Vec<SecretHeader>,
    /// Host functions that the plugin may use, by name, such as `proxy_http_call` or WASI's `fd_write`; any other answers that
    /// it is not allowed. Absent: all.
    #[schemars(inner(length(min = 1, max = 128)))]
    pub hostcalls: Option<Vec<String>>,
    /// Lets a module start whose imports this host does not have, such as `env.envoy_resolve_dns`, or has with another type, such
    /// as the `proxy_grpc_call` of ten arguments in AssemblyScript: each such function of the module `env` that returns a
    /// status answers 12, UNIMPLEMENTED. For modules that only may call them. `false`: the module is refused, and the error
    /// names them.
    #[serde(default)]
    pub stub_unknown_imports: bool,
    /// Crashes in a row of one instance that are a crash loop; a minute without one begins a new row. A generation that
    /// brought the plugin less than a minute before is then taken back for the one before it; otherwise the plugin is
    /// quarantined, and requests are treated as `on_error` says, until a reload or a reset. 0: never.
    #[serde(default = "default_crash_limit")]
    #[schemars(range(min = 0, max = 1000))]
    pub crash_limit: u32,
    /// A file with a request (`{"path", "headers", "body"}`, as for `POST /explain`) that the plugin has to get through
    /// before it goes live: without a trap, in time, and with decisions that can be followed.
    pub self_test: Option<PathBuf>,
    /// MiB of linear memory over which an instance is replaced by a fresh one, aside: streams that it holds go on. Below
    /// `memory_mib`. Absent: never.
    #[schemars(range(min = 1, max = 4096))]
    pub recycle_memory_mib: Option<u32>,
    /// What requests share.
    #[serde(default)]
    pub isolation: Isolation,
    /// Seconds after a swap in which streams of the old start of the plugin may go on; those left lose their instance, and
    /// `on_error` holds for them. Absent: as long as they take.
    #[schemars(range(min = 1, max = 86_400))]
    pub drain_s: Option<u64>,
    /// Decides beside the others without effect: what it would have done differently is counted and logged. For the phases
    /// `admit` and `route`.
    #[serde(default)]
    pub shadow: bool,
    /// Decides for part of the sessions in the place of another plugin. For the phases `admit` and `route`.
    pub canary: Option<Canary>,
}

/// What a module is started with: one that failed with it may do well with another.
#[derive(Clone, Debug, PartialEq)]
pub struct Given {
    /// Its configuration.
    pub configuration: PluginConfiguration,
    /// That of its virtual machine.
    pub vm_configuration: PluginConfiguration,
    /// Its root id.
    pub root_id: String,
    /// Whether imports that the host does not have are stubbed.
    pub stub_unknown_imports: bool,
    /// The name space of its shared data.
    pub vm_id: Option<String>,
    /// What it sees by WASI.
    pub environment: BTreeMap<String, String>,
    /// Which host it was made for.
    pub dialect: Dialect,
    /// MiB of memory.
    pub memory_mib: u32,
    /// Times that it has for a callback and for a step of its start, ms.
    pub timeouts_ms: (u64, u64),
    /// Host functions that it may use.
    pub hostcalls: Option<Vec<String>>,
    /// Headers that it sees all the same.
    pub secret_headers: Vec<SecretHeader>,
    /// Which callbacks of answers come.
    pub response: bool,
    /// Which events it is told.
    pub events: Vec<PluginEvent>,
    /// What requests share.
    pub isolation: Isolation,
}

/// Which host a plugin was made for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Dialect {
    /// Proxy-Wasm 0.1.0, 0.2.0 or 0.2.1.
    #[default]
    Standard,
    /// Higress' Proxy-Wasm 0.2.100. For the phase `filter`; `docs/higress.md` says what differs.
    Higress,
}

/// What the requests of a plugin share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Isolation {
    /// The memory of one of `instances`.
    #[default]
    Shared,
    /// Nothing: each gets an instance of its own, started and configured for it. Ticks run in instances that serve nobody.
    Stream,
}

/// A header that lets whoever reads it act for the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SecretHeader {
    /// `authorization`
    Authorization,
    /// `proxy-authorization`
    ProxyAuthorization,
    /// `x-api-key`
    XApiKey,
    /// `cookie`
    Cookie,
    /// `set-cookie`
    SetCookie,
}

/// What a plugin may be told of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PluginEvent {
    /// A stream has brought its first token.
    FirstToken,
    /// A tool is called: its name.
    ToolCall,
    /// Generation has ended: why.
    Finish,
    /// Once, when the answer has ended: its tokens, as far as the worker told them.
    Usage,
    /// Once, at the end of the request, however it ended: how.
    End,
}

/// When a plugin runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Sees, and may change, headers and bodies of request and response.
    Filter,
    /// When a request has arrived: sets its place in the queue.
    Admit,
    /// When a request is dispatched: chooses worker and session.
    Route,
    /// Never for a request: it has ticks, calls, queues and shared data of its own, and no streams.
    Background,
}

/// What happens to a request when a plugin fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum OnError {
    /// The request is answered with an error. A response of which the client has some already is cut.
    Closed,
    /// The request goes on as if the plugin were not there.
    Open,
    /// The native defaults decide in the plugin's place. For the phases `admit` and `route`.
    Fallback,
}

/// Most characters of `vm_configuration`, as the plugin is handed it.
pub(crate) const MAX_VM_CONFIGURATION: usize = 65_536;

fn default_config() -> PluginConfiguration {
    PluginConfiguration::Table(Map::new())
}

fn default_vm_configuration() -> PluginConfiguration {
    PluginConfiguration::Text(String::new())
}

fn default_callback_timeout_ms() -> u64 {
    50
}

fn default_configure_timeout_ms() -> u64 {
    5_000
}

fn default_memory_mib() -> u32 {
    128
}

fn default_log_per_s() -> u32 {
    1_000
}

fn default_held_body_bytes() -> ByteSize {
    ByteSize::mib(64)
}

fn default_pause_timeout_ms() -> u64 {
    30_000
}

fn default_calls_per_request() -> u32 {
    16
}

fn default_calls() -> u32 {
    1_024
}

fn default_call_body_bytes() -> ByteSize {
    ByteSize::mib(4)
}

fn default_response() -> bool {
    true
}

fn default_crash_limit() -> u32 {
    5
}

// === impl Plugin ===

impl Plugin {
    /// A plugin with the defaults of every optional key.
    pub fn new(name: impl Into<String>, wasm: PluginSource, phase: Phase) -> Self {
        Self {
            name: name.into(),
            wasm,
            phase,
            dialect: Dialect::default(),
            config: default_config(),
            root_id: None,
            vm_configuration: default_vm_configuration(),
            vm_id: None,
            environment: BTreeMap::new(),
            on_error: None,
            callback_timeout_ms: default_callback_timeout_ms(),
            configure_timeout_ms: default_configure_timeout_ms(),
            memory_mib: default_memory_mib(),
            instances: None,
            log_per_s: default_log_per_s(),
            held_body_bytes: default_held_body_bytes(),
            pause_timeout_ms: default_pause_timeout_ms(),
            upstreams: Vec::new(),
            calls_per_request: default_calls_per_request(),
            calls: default_calls(),
            call_body_bytes: default_call_body_bytes(),
            events: Vec::new(),
            response: default_response(),
            secret_headers: Vec::new(),
            hostcalls: None,
            stub_unknown_imports: false,
            crash_limit: default_crash_limit(),
            sha256: None,
            self_test: None,
            recycle_memory_mib: None,
            isolation: Isolation::Shared,
            drain_s: None,
            shadow: false,
            canary: None,
        }
    }

    /// The chain that runs when a configuration names no plugins: `priority-queue`, `session-binding`, `kv-affinity`.
    pub fn built_in_chain() -> Vec<Self> {
        BuiltIn::ALL
            .into_iter()
            .map(|policy| Self::new(policy.name(), PluginSource::BuiltIn(policy), policy.phase()))
            .collect()
    }

    /// What happens to a request when the plugin fails: `on_error`, or the default of its phase.
    pub fn on_error(&self) -> OnError {
        self.on_error.unwrap_or(match self.phase {
            Phase::Filter => OnError::Closed,
            Phase::Admit | Phase::Route => OnError::Fallback,
            // No request depends on it.
            Phase::Background => OnError::Open,
        })
    }

    /// What the plugin reads as `plugin_root_id`: `root_id`, or its name.
    pub fn root_id(&self) -> &str {
        self.root_id.as_deref().unwrap_or(&self.name)
    }

    /// What the plugin is started with.
    pub fn given(&self) -> Given {
        Given {
            configuration: self.config.clone(),
            vm_configuration: self.vm_configuration.clone(),
            root_id: self.root_id().to_owned(),
            stub_unknown_imports: self.stub_unknown_imports,
            vm_id: self.vm_id.clone(),
            environment: self.environment.clone(),
            dialect: self.dialect,
            memory_mib: self.memory_mib,
            timeouts_ms: (self.callback_timeout_ms, self.configure_timeout_ms),
            hostcalls: self.hostcalls.clone(),
            secret_headers: self.secret_headers.clone(),
            response: self.response,
            events: self.events.clone(),
            isolation: self.isolation,
        }
    }
}

// === impl SecretHeader ===

impl SecretHeader {
    /// The header's name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Authorization => "authorization",
            Self::ProxyAuthorization => "proxy-authorization",
            Self::XApiKey => "x-api-key",
            Self::Cookie => "cookie",
            Self::SetCookie => "set-cookie",
        }
    }
}

// === impl PluginEvent ===

impl PluginEvent {
    /// All of them, in the order in which they come.
    pub const ALL: [Self; 5] = [Self::FirstToken, Self::ToolCall, Self::Finish, Self::Usage, Self::End];

    /// The name in TOML, and in the event itself.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::FirstToken => "first_token",
            Self::ToolCall => "tool_call",
            Self::Finish => "finish",
            Self::Usage => "usage",
            Self::End => "end",
        }
    }
}

// === impl Phase ===

impl Phase {
    /// The name in TOML, logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Filter => "filter",
            Self::Admit => "admit",
            Self::Route => "route",
            Self::Background => "background",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

// === impl OnError ===

impl OnError {
    /// The name in TOML, logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::Fallback => "fallback",
        }
    }
}

impl fmt::Display for OnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

// === impl Isolation ===

impl Isolation {
    /// The name in TOML and on the admin listener.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Shared => "shared",
            Self::Stream => "stream",
        }
    }
}
