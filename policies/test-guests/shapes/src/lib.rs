//! Filters in the shapes that the public Rust SDK shows by its examples, in one module: the configuration, a JSON table,
//! names one as `shape`. Each is driven by requests alone, so that two hosts can be asked the same and compared.
//!
//! | shape | what it does |
//! | --- | --- |
//! | `greeting` | a root without streams: a line at start, and one at each of its ticks, of which the third is the last |
//! | `headers` | logs each header; `x-answer` → answers itself; adds, replaces and removes headers both ways; a line at the end |
//! | `look-back` | a request header, read when the response is there, as a response header |
//! | `request-body` | holds the request's body until it is whole, then `prepend`s, `append`s or replaces it (`x-edit`) |
//! | `response-body` | the same for the response's |
//! | `config` | its configuration's `value` as a response header |
//! | `callout` | asks the upstream `auth` over HTTP, and lets the request go on or answers 403 by the first byte of the reply |
//! | `callouts` | asks it three times at once, and answers with the replies in the order of their tokens |
//! | `grpc` | asks the upstream `grpc` for a verdict by a gRPC call |
//! | `properties` | what the properties named in `x-properties` are, as response headers, bytes in hexadecimal |
#![cfg(target_arch = "wasm32")]
#![allow(missing_docs)]

mod bodies;
mod callouts;
mod grpc;
mod headers;
mod properties;

use std::time::Duration;

use log::{error, info};
use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{ContextType, LogLevel};
use serde_json::Value;

proxy_wasm::main! {{
    proxy_wasm::set_log_level(LogLevel::Trace);
    proxy_wasm::set_root_context(|_| Box::new(Root::default()));
}}

const SHAPES: [&str; 10] = [
    "greeting",
    "headers",
    "look-back",
    "request-body",
    "response-body",
    "config",
    "callout",
    "callouts",
    "grpc",
    "properties",
];

#[derive(Default)]
struct Root {
    shape: String,
    value: String,
    ticks: u32,
}

impl Context for Root {}

impl RootContext for Root {
    fn on_vm_start(&mut self, size: usize) -> bool {
        info!("shape: vm start, {size} bytes of configuration");
        true
    }

    fn on_configure(&mut self, size: usize) -> bool {
        let text = self.get_plugin_configuration().unwrap_or_default();
        if text.len() != size {
            error!("shape: told {size} bytes of configuration, got {}", text.len());
            return false;
        }
        let table: Value = serde_json::from_slice(&text).unwrap_or(Value::Null);
        let member = |name: &str| table.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
        self.shape = member("shape");
        self.value = member("value");
        if !SHAPES.contains(&self.shape.as_str()) {
            error!("shape: there is none called {:?}", self.shape);
            return false;
        }
        if self.shape == "greeting" {
            self.set_tick_period(Duration::from_millis(20));
        }
        info!("shape: {} configured", self.shape);
        true
    }

    fn on_tick(&mut self) {
        self.ticks += 1;
        info!("shape: tick {}", self.ticks);
        if self.ticks == 3 {
            self.set_tick_period(Duration::ZERO);
        }
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }

    fn create_http_context(&self, _context_id: u32) -> Option<Box<dyn HttpContext>> {
        Some(match self.shape.as_str() {
            "headers" => Box::new(headers::Headers::default()),
            "request-body" => Box::new(bodies::RequestBody::default()),
            "response-body" => Box::new(bodies::ResponseBody::default()),
            "look-back" => Box::new(headers::LookBack),
            "config" => Box::new(headers::Configured { value: self.value.clone() }),
            "callout" => Box::new(callouts::One),
            "callouts" => Box::new(callouts::Three::default()),
            "grpc" => Box::new(grpc::Verdict),
            "properties" => Box::new(properties::Properties::default()),
            _ => Box::new(Nothing),
        })
    }
}

struct Nothing;

impl Context for Nothing {}

impl HttpContext for Nothing {}
