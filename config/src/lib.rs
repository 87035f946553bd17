//! Configuration of Turnstile: the TOML file, its types and defaults, validation with exact places, JSON schema and
//! the generated reference.
//!
//! The types are the only source of truth. Their documentation comments, defaults and range attributes become the JSON
//! schema; the schema is what a file is checked against, what the reference page is written from, and what says whether
//! a key takes effect on reload.
//!
//! ```
//! let text = "[[pools]]\nworkers = [\"http://127.0.0.1:30000\"]\n";
//! let config = turnstile_config::Config::parse(text, "turnstile.toml", std::path::Path::new("."))?;
//! assert_eq!(config.pools[0].workers[0].id, "127.0.0.1:30000");
//!
//! let text = "[retry]\natempts = 3\n[[pools]]\nworkers = [\"http://127.0.0.1:30000\"]\n";
//! let errors = turnstile_config::Config::parse(text, "turnstile.toml", std::path::Path::new(".")).unwrap_err();
//! assert_eq!(errors.to_string(), "turnstile.toml:2:1: retry.atempts: unknown key, did you mean `attempts`?");
//! # Ok::<(), turnstile_config::Errors>(())
//! ```
#![forbid(unsafe_code)]

mod admission;
mod byte_size;
mod canary;
mod check;
mod conform;
mod format;
mod header_name;
mod listener;
mod load;
mod logging;
mod named_upstream;
mod node;
mod plugin;
mod plugin_configuration;
mod plugin_source;
mod pool;
mod problem;
mod reference;
mod restart;
mod schema;
mod secret;
mod session;
mod shutdown;
mod steering;
mod summary;
mod tls;
mod upstream;
mod upstream_url;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use admission::{Admission, OverloadStatus, Prefill, Routing};
pub use byte_size::ByteSize;
pub use canary::Canary;
pub use header_name::HeaderName;
pub use listener::{Admin, Listener};
pub use logging::{AccessLog, Level, LogFormat, Logging, State};
pub use named_upstream::NamedUpstream;
pub use plugin::{Dialect, Given, Isolation, OnError, Phase, Plugin, PluginEvent, SecretHeader};
pub use plugin_configuration::PluginConfiguration;
pub use plugin_source::{BuiltIn, ModuleUrl, PluginSource};
pub use pool::{Pool, Worker, WorkerUrl};
pub use problem::{Errors, Problem};
pub use reference::reference;
pub use restart::restart_needed;
pub use schema::schema;
pub use secret::{Secret, SecretError};
pub use session::{Busy, IdHeaders, Sessions};
pub use shutdown::Shutdown;
pub use steering::{
    Barred, Forwarded, ForwardedSend, Guarded, Namespace, Network, NotANetwork, Onward, PriorityMember, Steering,
};
pub use tls::TlsOptions;
pub use upstream::{Ejection, Limits, Retry, Timeouts};
pub use upstream_url::{RedisUrl, UpstreamUrl};

/// The whole configuration of one gateway.
///
/// A value made by `Config::parse`, `Config::load` or `Config::from_workers` is valid: names are filled in and unique,
/// paths are absolute or relative to the working directory, numbers are within their ranges. The one from `Default` has
/// no pools and serves nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Threads that serve requests. Absent: one per CPU core.
    #[schemars(range(min = 1, max = 1024), extend("x-restart" = true))]
    pub threads: Option<u32>,
    /// Addresses that clients connect to. Absent: one listener with the defaults below.
    #[schemars(length(min = 1), extend("x-restart" = true))]
    pub listeners: Vec<Listener>,
    /// The administrative listener: metrics, workers, sessions, plugins, configuration, reload.
    pub admin: Admin,
    /// Groups of SGLang workers, each serving some models. At least one is needed.
    #[schemars(length(min = 1))]
    pub pools: Vec<Pool>,
    /// The plugins in the order in which they run. Absent: the built-in policies `priority-queue`, `session-binding`
    /// and `kv-affinity`; an empty list: none, the native defaults decide.
    pub plugins: Vec<Plugin>,
    /// Upstreams that plugins may call, besides the pools.
    pub upstreams: Vec<NamedUpstream>,
    /// When requests wait, how many, and when they are refused.
    pub admission: Admission,
    /// What is known about workers: prefix index, probes, load.
    pub routing: Routing,
    /// Agent sessions: their identity, their life, what they may hold on a worker.
    pub sessions: Sessions,
    /// Request members and headers that would steer a worker or forge what the gateway says. `docs/steering.md` lists them
    /// all.
    pub steering: Steering,
    /// The headers that tell a worker who its client is.
    pub forwarded: Forwarded,
    /// Speculative prefill: warming a worker for the turn that is about to come.
    pub prefill: Prefill,
    /// How long everything may take.
    pub timeouts: Timeouts,
    /// How large everything may be.
    pub limits: Limits,
    /// Trying another worker while nothing has reached the client.
    pub retry: Retry,
    /// Taking workers out that fail.
    pub ejection: Ejection,
    /// Logs, and what a response tells about its decision.
    pub logging: Logging,
    /// From the signal to stop to the end.
    pub shutdown: Shutdown,
    /// What the gateway keeps on disk.
    pub state: State,
}

// === impl Config ===

impl Default for Config {
    fn default() -> Self {
        Self {
            threads: None,
            listeners: vec![Listener::default()],
            admin: Admin::default(),
            pools: Vec::new(),
            plugins: Plugin::built_in_chain(),
            upstreams: Vec::new(),
            admission: Admission::default(),
            routing: Routing::default(),
            sessions: Sessions::default(),
            steering: Steering::default(),
            forwarded: Forwarded::default(),
            prefill: Prefill::default(),
            timeouts: Timeouts::default(),
            limits: Limits::default(),
            retry: Retry::default(),
            ejection: Ejection::default(),
            logging: Logging::default(),
            shutdown: Shutdown::default(),
            state: State::default(),
        }
    }
}
