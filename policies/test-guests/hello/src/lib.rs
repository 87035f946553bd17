//! A filter written with the public Proxy-Wasm SDK alone, for the tests of the gateway's plugin host.
//!
//! What it does by itself: adds `x-hello: request` to requests and `x-hello-response: <n>` to responses, counts requests
//! in the shared data `hello.requests` and the metric `hello_requests_total`, ticks every 100 ms into `hello.ticks`, logs.
//! What requests ask of it by a header: `x-block` → answers 403; `x-trap` → traps; `x-loop` → never returns.
//! What its configuration, a JSON table, asks of it:
//! `greeting` (text for the header), `append_request` and `append_response` (text added to a body's end),
//! `replace_request` and `replace_response` (text instead of a body), `tick_ms`, `refuse` (true: configure fails).
#![cfg(target_arch = "wasm32")]
#![allow(missing_docs)]

use std::time::Duration;

use log::{error, info};
use proxy_wasm::hostcalls;
use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{Action, ContextType, LogLevel, MetricType};
use serde_json::Value;

proxy_wasm::main! {{
    proxy_wasm::set_log_level(LogLevel::Trace);
    proxy_wasm::set_root_context(|_| Box::new(Root::default()));
}}

const SHARED_REQUESTS: &str = "hello.requests";
const SHARED_TICKS: &str = "hello.ticks";

#[derive(Default, Clone)]
struct Settings {
    greeting: Option<String>,
    append_request: Option<String>,
    append_response: Option<String>,
    replace_request: Option<String>,
    replace_response: Option<String>,
}

#[derive(Default)]
struct Root {
    settings: Settings,
    requests_metric: Option<u32>,
}

impl Context for Root {}

impl RootContext for Root {
    fn on_vm_start(&mut self, _size: usize) -> bool {
        info!("hello: vm started");
        true
    }

    fn on_configure(&mut self, _size: usize) -> bool {
        let text = self.get_plugin_configuration().unwrap_or_default();
        let table = if text.is_empty() { Value::Null } else { serde_json::from_slice(&text).unwrap_or(Value::Null) };
        if table.get("refuse").and_then(Value::as_bool) == Some(true) {
            error!("hello: refused by option `refuse`");
            return false;
        }
        let option = |name: &str| table.get(name).and_then(Value::as_str).map(str::to_owned);
        self.settings = Settings {
            greeting: option("greeting"),
            append_request: option("append_request"),
            append_response: option("append_response"),
            replace_request: option("replace_request"),
            replace_response: option("replace_response"),
        };
        self.requests_metric = hostcalls::define_metric(MetricType::Counter, "hello_requests_total").ok();
        self.set_tick_period(Duration::from_millis(table.get("tick_ms").and_then(Value::as_u64).unwrap_or(100)));
        info!("hello: configured");
        true
    }

    fn on_tick(&mut self) {
        add_one(self, SHARED_TICKS);
    }

    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }

    fn create_http_context(&self, _context_id: u32) -> Option<Box<dyn HttpContext>> {
        Some(Box::new(Stream { settings: self.settings.clone(), requests_metric: self.requests_metric, number: 0 }))
    }
}

struct Stream {
    settings: Settings,
    requests_metric: Option<u32>,
    /// The shared counter when this request came.
    number: u64,
}

impl Context for Stream {}

impl HttpContext for Stream {
    fn on_http_request_headers(&mut self, headers: usize, end_of_stream: bool) -> Action {
        info!("hello: request headers {headers} end {end_of_stream}");
        self.number = add_one(self, SHARED_REQUESTS);
        if let Some(metric) = self.requests_metric {
            let _ = hostcalls::increment_metric(metric, 1);
        }
        if self.get_http_request_header_bytes("x-block").is_some() {
            self.send_http_response(403, vec![("x-hello", "blocked")], Some(b"blocked by hello\n"));
            return Action::Pause;
        }
        if self.get_http_request_header_bytes("x-trap").is_some() {
            trap();
        }
        if self.get_http_request_header_bytes("x-loop").is_some() {
            spin();
        }
        self.add_http_request_header("x-hello", self.settings.greeting.as_deref().unwrap_or("request"));
        if changes(&self.settings.append_request, &self.settings.replace_request) {
            self.set_http_request_header("content-length", None);
        }
        Action::Continue
    }

    fn on_http_request_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        if let Some(text) = &self.settings.replace_request {
            if !end_of_stream {
                return Action::Pause;
            }
            self.set_http_request_body(0, size, text.as_bytes());
        }
        if let Some(text) = self.settings.append_request.as_ref().filter(|_| end_of_stream) {
            let end = self.settings.replace_request.as_ref().map_or(size, String::len);
            self.set_http_request_body(end, 0, text.as_bytes());
        }
        Action::Continue
    }

    fn on_http_response_headers(&mut self, headers: usize, end_of_stream: bool) -> Action {
        info!("hello: response headers {headers} end {end_of_stream}");
        self.add_http_response_header("x-hello-response", &self.number.to_string());
        if changes(&self.settings.append_response, &self.settings.replace_response) {
            self.set_http_response_header("content-length", None);
        }
        Action::Continue
    }

    fn on_http_response_body(&mut self, size: usize, end_of_stream: bool) -> Action {
        if let Some(text) = &self.settings.replace_response {
            if !end_of_stream {
                return Action::Pause;
            }
            self.set_http_response_body(0, size, text.as_bytes());
        }
        if let Some(text) = self.settings.append_response.as_ref().filter(|_| end_of_stream) {
            let end = self.settings.replace_response.as_ref().map_or(size, String::len);
            self.set_http_response_body(end, 0, text.as_bytes());
        }
        Action::Continue
    }

    fn on_log(&mut self) {
        info!("hello: request {} done", self.number);
    }
}

fn changes(append: &Option<String>, replace: &Option<String>) -> bool {
    append.is_some() || replace.is_some()
}

/// Adds 1 to a shared counter, decimal text, and gives the new value. Tries again when another instance was faster.
fn add_one(context: &dyn Context, key: &str) -> u64 {
    loop {
        let (value, cas) = context.get_shared_data(key);
        let count = value.and_then(|value| String::from_utf8(value).ok()?.parse::<u64>().ok()).unwrap_or(0) + 1;
        if context.set_shared_data(key, Some(count.to_string().as_bytes()), cas).is_ok() {
            return count;
        }
    }
}

#[allow(clippy::panic)]
fn trap() {
    panic!("hello was told to trap");
}

fn spin() -> ! {
    loop {
        std::hint::black_box(());
    }
}
