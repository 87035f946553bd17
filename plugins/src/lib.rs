//! Runs Proxy-Wasm plugins on wasmtime.
//!
//! Any module made for ABI 0.1.0, 0.2.0 or 0.2.1 runs unchanged, and one for Higress' 0.2.100 where that is asked for. This crate knows nothing of sockets or of a proxy: the
//! gateway lends each callback a [`StreamEnv`], the guest reads and writes through it, and what the guest wants done
//! comes back as [`Effects`] after the callback has returned. No call blocks, waits or awaits.
#![deny(unsafe_code)]

mod abi;
mod apart;
mod artefact;
mod berth;
mod callback;
mod callout;
mod capability;
mod compile_cache;
mod delivery;
mod env;
mod grpc_service;
mod guest_memory;
mod host;
mod http_env;
mod imports;
mod inspection;
mod instance;
mod link_check;
mod live;
mod log_budget;
mod measure;
mod metrics;
mod outcome;
pub mod pairs;
mod plugin;
mod precompiled;
mod private_dir;
mod redis_command;
mod runtime;
mod secret_headers;
mod services;
mod shard;
mod shared_data;
mod shared_queues;
mod spec;
mod stats;
mod stream;

pub use abi::{AbiVersion, BufferType, Dialect, LogLevel, MapType, MetricType, Status};
pub use artefact::Artefact;
pub use berth::Berth;
pub use callback::Callback;
pub use callout::{
    CallCommand, CallId, Callout, GRPC_UNAVAILABLE, GrpcCallout, GrpcEvent, HttpCallout, HttpReply, RedisCallout,
    RedisLogin,
};
pub use capability::Capability;
pub use delivery::CallHandle;
pub use env::{HeaderPairs, Lent, NoEnv, Parked, StreamEnv};
pub use http_env::{Body, FieldMap, HttpEnv, RequestMap, ResponseMap};
pub use inspection::{Import, Inspection};
pub use live::LivePlugin;
pub use measure::CallbackRun;
pub use metrics::{HISTOGRAM_BOUNDS, MetricError, MetricSnapshot, MetricValue, PluginMetrics};
pub use outcome::{
    Action, CallOutcome, CallResult, Effects, Fault, FaultKind, Injected, LocalResponse, PluginError, StartPhase,
};
pub use plugin::{Plugin, TickReport};
pub use private_dir::PrivateDir;
pub use runtime::{Runtime, RuntimeError, RuntimeOptions};
pub use secret_headers::{SecretHeaders, TARGET_HEADERS};
pub use services::{LogLine, PluginServices, SharedState};
pub use shared_data::{NameSpace, SharedData, SharedDataError};
pub use shared_queues::{QueueError, SharedQueues};
pub use spec::{Limits, PluginSpec};
pub use stats::PluginStats;
pub use stream::{Stream, StreamKey};
