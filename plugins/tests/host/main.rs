//! The host's contract with its guests, tested with guests written in WebAssembly text and with modules of the public
//! Rust SDK.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bodies;
mod cache;
mod callouts;
mod faults;
mod grants;
mod grpc;
mod instances;
mod lifecycle;
mod link;
mod maps;
mod memory;
mod pauses;
mod properties;
mod rig;
mod root;
mod sdk;
mod shared;
mod streams;
mod wasi;
