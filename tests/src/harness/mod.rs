//! Fixtures: simulated workers, a gateway in this process in front of them, and clients that see every byte.
//!
//! ```no_run
//! use turnstile_tests::harness::{Setup, chat};
//!
//! # async fn test() {
//! let rig = Setup::new().workers(2).set("retry.attempts", "2").start().await;
//! let answer = rig.post("/v1/chat/completions", &chat("Hello")).await;
//! assert_eq!(answer.status, 200);
//! # }
//! ```
//!
//! Everything listens on ports that the system picks, so tests run side by side; dropping a [`Rig`] ends all of it.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod client;
mod faulty;
mod flood;
mod guest;
mod logs;
mod metrics;
mod modules;
mod process;
mod redis;
mod rig;
mod scripted;
mod scrub;
mod service;
mod setup;
mod tls;
mod wait;
mod worker;

pub use client::{Answer, Connection, Head, Request, send};
pub use faulty::{Break, FAULT, Faulty};
pub use flood::Flood;
pub use guest::Guest;
pub use logs::{Logs, logs};
pub use metrics::Samples;
pub use modules::{module, swap};
pub use process::{GatewayProcess, WorkerProcess};
pub use redis::RedisServer;
pub use rig::Rig;
pub use scripted::Scripted;
pub use scrub::scrub;
pub use service::{Called, Service};
pub use setup::{PluginText, Setup, built_in};
pub use tls::{Authority, Certified, TlsFront};
pub use wait::{DEADLINE, until, until_some};
pub use worker::WorkerExt;

use serde_json::{Value, json};

/// A chat request of one user message.
pub fn chat(text: &str) -> Value {
    json!({"model": "sim", "messages": [{"role": "user", "content": text}]})
}

/// A chat request of one user message, streamed.
pub fn chat_stream(text: &str) -> Value {
    let mut body = chat(text);
    body["stream"] = json!(true);
    body
}

/// A chat request with `nvext`.
pub fn chat_with(text: &str, nvext: Value) -> Value {
    let mut body = chat(text);
    body["nvext"] = nvext;
    body
}

/// The path of chat completions.
pub const CHAT: &str = "/v1/chat/completions";
