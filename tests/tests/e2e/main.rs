//! End-to-end tests: real sockets, the gateway as a library, simulated workers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod bodies;
mod hints;
mod prefill;
mod queue;
mod retries;
mod serving;
mod sessions;
mod streaming_sessions;
mod streams;
mod structure;
