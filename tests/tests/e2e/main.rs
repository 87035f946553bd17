//! End-to-end tests: real sockets, the gateway as a library, simulated workers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod admin;
mod agreement;
mod bodies;
mod crash_loops;
mod drain;
mod edge_bodies;
mod edge_disconnects;
mod edge_framing;
mod edge_http2;
mod edge_json;
mod edge_limits;
mod edge_methods;
mod edge_slow_readers;
mod errors;
mod filter_ends;
mod filters;
mod hints;
mod plugin_faults;
mod policies;
mod prefill;
mod queue;
mod reload;
mod restart;
mod retries;
mod serving;
mod sessions;
mod shutdown;
mod steering;
mod streaming_sessions;
mod streams;
mod structure;
mod swap;
mod traffic;
