//! Turnstile: an edge gateway for fleets of SGLang workers that serve agents.
//!
//! A request goes through the modules in this order: [`listen`] and [`edge`], [`exchange`] with [`filters`], understanding
//! (in the fleet crate), [`admission`], [`placement`], [`forward`], and [`after`] with [`side`] for what follows the stream.

#![forbid(unsafe_code)]

pub mod access_log;
pub mod admin;
pub mod admin_client;
pub mod admission;
pub mod after;
pub mod builtin;
pub mod callouts;
pub mod chunked;
pub mod cli;
pub mod client_stream;
pub mod clock;
pub mod commands;
pub mod content_encoding;
pub mod deliberation;
pub mod drain;
pub mod edge;
pub mod errors;
pub mod exchange;
pub mod explain;
pub mod filters;
pub mod fleet_state;
pub mod forward;
pub mod gateway;
pub mod generation;
pub mod headers;
pub mod higress;
pub mod listen;
pub mod live_plugins;
pub mod metrics;
pub mod module_file;
pub mod module_store;
pub mod placement;
pub mod plugin_start;
pub mod policy;
pub mod prefills;
pub mod probation;
pub mod recorded_request;
pub mod recording;
pub mod reload;
pub mod replay;
pub mod request_body;
pub mod request_id;
pub mod respond;
pub mod rollback;
pub mod run;
pub mod self_test;
pub mod sessions;
pub mod side;
pub mod simulate;
pub mod state;
pub mod stopping;
pub mod ticks;
pub mod trailers;
pub mod upstream;
pub mod workbench;
pub mod workers;

#[cfg(test)]
mod docs_tests;
