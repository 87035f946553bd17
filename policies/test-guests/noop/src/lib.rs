//! A filter that does nothing. The SDK exports every callback, so a host calls it for headers, bodies and the end of each
//! request, which is what the benchmark wants to know the price of.
#![cfg(target_arch = "wasm32")]
#![allow(missing_docs)]

use proxy_wasm::traits::{Context, HttpContext, RootContext};
use proxy_wasm::types::{ContextType, LogLevel};

proxy_wasm::main! {{
    proxy_wasm::set_log_level(LogLevel::Warn);
    proxy_wasm::set_root_context(|_| Box::new(Root));
}}

struct Root;

impl Context for Root {}

impl RootContext for Root {
    fn get_type(&self) -> Option<ContextType> {
        Some(ContextType::HttpContext)
    }

    fn create_http_context(&self, _context_id: u32) -> Option<Box<dyn HttpContext>> {
        Some(Box::new(Stream))
    }
}

struct Stream;

impl Context for Stream {}

impl HttpContext for Stream {}
