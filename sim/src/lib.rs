//! A faithful SGLang 0.5.23 worker without a GPU.
//!
//! [`SimWorker`] is a whole server on a socket: the OpenAI, Anthropic and native endpoints, sessions, priority, queue,
//! probes and error texts as the real one has them, over an engine model with prefill and decode rates, a KV pool, a radix
//! cache and streaming sessions. [`SimFleet`] starts several. The engine alone ([`engine::Engine`]) is a state machine
//! that is told the time, so it runs in virtual time as well.
//!
//! What a model says is scripted by directives in the last user message; see [`output`].
#![forbid(unsafe_code)]

pub mod config;
mod driver;
pub mod engine;
pub mod fault;
mod http;
mod life;
pub mod output;
mod port;
mod pytext;
mod server;
mod template;
pub mod tokenizer;
mod wire;

pub use config::{Eviction, Frontend, Release, SimConfig};
pub use fault::{Fault, FaultKind, Faults, Place, Scheduled, schedule};
pub use server::{Hit, Recorded, SimFleet, SimWorker};
