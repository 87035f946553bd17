//! End-to-end tests: real sockets, the gateway as a library, simulated workers.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod admin;
mod agreement;
mod bodies;
mod errors;
mod filter_ends;
mod filters;
mod hints;
mod policies;
mod prefill;
mod queue;
mod reload;
mod retries;
mod serving;
mod sessions;
mod steering;
mod streaming_sessions;
mod streams;
mod structure;
mod swap;
mod traffic;
