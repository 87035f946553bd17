//! What a module may do, told from the functions that it imports.

use std::fmt;

/// A group of host functions, as somebody who has to trust a module thinks of them.
///
/// A module may do what it imports; whether it does is its own affair. SDKs import functions that a plugin never calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Capability {
    /// Header maps and trailers, read.
    ReadHeaders,
    /// Header maps and trailers, written.
    ChangeHeaders,
    /// Buffers: bodies, its own configuration, replies to its calls.
    ReadBodies,
    /// Bodies, written.
    ChangeBodies,
    /// Properties, read: the facts.
    ReadFacts,
    /// Properties, written: the decisions.
    WriteDecisions,
    /// Functions of the gateway by name.
    CallFunctions,
    /// Answers in a worker's place.
    Answer,
    /// Pausing, resuming, closing, other contexts.
    ControlStreams,
    /// HTTP requests of its own.
    CallHttp,
    /// gRPC calls of its own.
    CallGrpc,
    /// Redis commands of its own.
    CallRedis,
    /// The choice of the worker.
    ChooseWorkers,
    /// Data shared by its instances, and queues.
    ShareData,
    /// Metrics.
    Metrics,
    /// Log lines.
    Log,
    /// Being called periodically.
    Tick,
    /// The clock.
    Clock,
    /// Random numbers.
    Random,
    /// Arguments and environment variables that the gateway gives to it.
    Environment,
    /// Ending its own instance.
    End,
    /// Files, which are always refused.
    Files,
    /// What a language's runtime asks of every host (to yield, to wait, to note its growth); nothing comes of it.
    Runtime,
}

// === impl Capability ===

impl Capability {
    /// Every group.
    pub const ALL: [Self; 23] = [
        Self::ReadHeaders,
        Self::ChangeHeaders,
        Self::ReadBodies,
        Self::ChangeBodies,
        Self::ReadFacts,
        Self::WriteDecisions,
        Self::CallFunctions,
        Self::Answer,
        Self::ControlStreams,
        Self::CallHttp,
        Self::CallGrpc,
        Self::CallRedis,
        Self::ChooseWorkers,
        Self::ShareData,
        Self::Metrics,
        Self::Log,
        Self::Tick,
        Self::Clock,
        Self::Random,
        Self::Environment,
        Self::End,
        Self::Files,
        Self::Runtime,
    ];

    /// The group of an import; nothing for a name that this host does not know.
    pub fn of(module: &str, name: &str) -> Option<Self> {
        match module {
            "env" if name == "abort" => Some(Self::End),
            "env" if matches!(name, "emscripten_notify_memory_growth" | "pthread_equal") => Some(Self::Runtime),
            "env" => Self::of_proxy(name),
            "wasi_snapshot_preview1" | "wasi_unstable" => Self::of_wasi(name),
            _ => None,
        }
    }

    fn of_proxy(name: &str) -> Option<Self> {
        Some(match name.strip_prefix("proxy_")? {
            "get_header_map_size" | "get_header_map_pairs" | "get_header_map_value" => Self::ReadHeaders,
            "set_header_map_pairs"
            | "add_header_map_value"
            | "replace_header_map_value"
            | "remove_header_map_value" => Self::ChangeHeaders,
            "get_buffer_bytes" | "get_buffer_status" | "get_configuration" => Self::ReadBodies,
            "set_buffer_bytes" => Self::ChangeBodies,
            "get_property" => Self::ReadFacts,
            "set_property" => Self::WriteDecisions,
            "call_foreign_function" => Self::CallFunctions,
            "send_local_response" => Self::Answer,
            "continue_stream"
            | "close_stream"
            | "continue_request"
            | "continue_response"
            | "clear_route_cache"
            | "set_effective_context"
            | "done" => Self::ControlStreams,
            "http_call" | "get_status" => Self::CallHttp,
            name if name.starts_with("grpc_") => Self::CallGrpc,
            name if name.starts_with("redis_") => Self::CallRedis,
            "get_upstream_hosts" | "set_upstream_override_host" => Self::ChooseWorkers,
            "inject_encoded_data_to_filter_chain" => Self::ChangeBodies,
            name if name.ends_with("_shared_data") || name.ends_with("_shared_queue") => Self::ShareData,
            name if name.ends_with("_metric") => Self::Metrics,
            "log" | "get_log_level" => Self::Log,
            "set_tick_period_milliseconds" => Self::Tick,
            "get_current_time_nanoseconds" => Self::Clock,
            _ => return None,
        })
    }

    fn of_wasi(name: &str) -> Option<Self> {
        Some(match name {
            "clock_time_get" | "clock_res_get" => Self::Clock,
            "random_get" => Self::Random,
            "args_get" | "args_sizes_get" | "environ_get" | "environ_sizes_get" => Self::Environment,
            // To standard output and standard error, which are log lines here.
            "fd_write" => Self::Log,
            "proc_exit" | "proc_raise" => Self::End,
            "sched_yield" | "poll_oneoff" => Self::Runtime,
            name if name.starts_with("fd_") || name.starts_with("path_") || name.starts_with("sock_") => Self::Files,
            _ => return None,
        })
    }

    /// A short name, the same in every version.
    pub fn name(self) -> &'static str {
        match self {
            Self::ReadHeaders => "read_headers",
            Self::ChangeHeaders => "change_headers",
            Self::ReadBodies => "read_bodies",
            Self::ChangeBodies => "change_bodies",
            Self::ReadFacts => "read_facts",
            Self::WriteDecisions => "write_decisions",
            Self::CallFunctions => "call_functions",
            Self::Answer => "answer",
            Self::ControlStreams => "control_streams",
            Self::CallHttp => "call_http",
            Self::CallGrpc => "call_grpc",
            Self::CallRedis => "call_redis",
            Self::ChooseWorkers => "choose_workers",
            Self::ShareData => "share_data",
            Self::Metrics => "metrics",
            Self::Log => "log",
            Self::Tick => "tick",
            Self::Clock => "clock",
            Self::Random => "random",
            Self::Environment => "environment",
            Self::End => "end",
            Self::Files => "files",
            Self::Runtime => "runtime",
        }
    }
}

/// In words, as the end of a sentence that begins with "may".
impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ReadHeaders => "read headers and trailers",
            Self::ChangeHeaders => "change headers and trailers",
            Self::ReadBodies => "read bodies, its configuration and replies to its calls",
            Self::ChangeBodies => "change bodies",
            Self::ReadFacts => "read facts (properties)",
            Self::WriteDecisions => "write decisions (properties)",
            Self::CallFunctions => "call functions of the gateway",
            Self::Answer => "answer requests in a worker's place",
            Self::ControlStreams => "resume and close streams, also others than the one it is called for",
            Self::CallHttp => "make HTTP calls",
            Self::CallGrpc => "make gRPC calls",
            Self::CallRedis => "run Redis commands",
            Self::ChooseWorkers => "see the workers of a request with their load, and choose among them",
            Self::ShareData => "share data and queues between its instances",
            Self::Metrics => "count metrics",
            Self::Log => "write log lines",
            Self::Tick => "be called periodically",
            Self::Clock => "read the clock",
            Self::Random => "read random numbers",
            Self::Environment => "read the environment that the gateway gives to it",
            Self::End => "end its own instance",
            Self::Files => "ask for files (always refused)",
            Self::Runtime => "do what its language's runtime does everywhere (nothing comes of it)",
        })
    }
}

#[cfg(test)]
#[path = "capability_tests.rs"]
mod tests;
