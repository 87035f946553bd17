//! Prints what callbacks cost, in nanoseconds. Run with `cargo bench -p turnstile-plugins`.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use http::{HeaderMap, HeaderName, HeaderValue, Method};
use turnstile_plugins::{Body, HttpEnv, Lent, Plugin, PluginSpec, RequestMap, Runtime, RuntimeOptions, SharedState};

/// Answers every callback and does nothing.
const EMPTY: &str = r#"(module
  (memory (export "memory") 1)
  (func (export "proxy_abi_version_0_2_1"))
  (func (export "proxy_on_context_create") (param i32 i32))
  (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (i32.const 0))
  (func (export "proxy_on_response_body") (param i32 i32 i32) (result i32) (i32.const 0))
  (func (export "proxy_on_log") (param i32))
  (func (export "proxy_on_done") (param i32) (result i32) (i32.const 1))
  (func (export "proxy_on_delete") (param i32)))"#;

fn main() {
    let runtime = Runtime::new(RuntimeOptions::default()).unwrap();
    let start = |name: &str, wasm: Vec<u8>| {
        let began = Instant::now();
        let plugin = Plugin::start(&runtime, PluginSpec::new(name, wasm), Arc::new(SharedState::default())).unwrap();
        println!("{name:<18} compile, link, start: {:.1} ms", began.elapsed().as_secs_f64() * 1e3);
        plugin
    };
    let mut plugins = vec![start("empty", wat::parse_str(EMPTY).unwrap())];
    let dist = Path::new(env!("CARGO_MANIFEST_DIR")).join("../policies/dist");
    for name in ["priority-queue", "session-binding", "kv-affinity", "test/hello"] {
        if let Ok(wasm) = std::fs::read(dist.join(format!("{name}.wasm"))) {
            plugins.push(start(name, wasm));
        }
    }
    for plugin in &plugins {
        let name = plugin.name();
        let mut env = request();
        report(name, "policy stream, 5 callbacks", 50_000, || {
            let mut stream = plugin.open_stream(0);
            black_box(stream.on_request_headers(&mut env, true)).unwrap();
            stream.finish(&mut env).unwrap();
        });
        let mut stream = plugin.open_stream(0);
        stream.on_request_headers(&mut env, false).unwrap();
        report(name, "one response chunk", 500_000, || {
            black_box(stream.on_response_body(&mut env, 100, false)).unwrap();
        });
        stream.finish(&mut env).unwrap();
    }
}

/// The best of five rounds: noise only ever adds.
fn report(name: &str, what: &str, rounds: u32, mut run: impl FnMut()) {
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let began = Instant::now();
        for _ in 0..rounds / 5 {
            run();
        }
        best = best.min(began.elapsed().as_secs_f64() * 1e9 / f64::from(rounds / 5));
    }
    println!("{name:<18} {what:<28} {best:>9.0} ns");
}

/// A request with the twelve headers of a usual client.
fn request() -> Lent<HttpEnv> {
    let mut fields = HeaderMap::new();
    for number in 0..8 {
        let name = HeaderName::from_bytes(format!("x-header-{number}").as_bytes()).unwrap();
        fields.insert(name, HeaderValue::from_static("a value of usual length"));
    }
    let mut env = HttpEnv::request(RequestMap::new(Method::POST, "/v1/chat/completions", "api.test", fields));
    env.response_body = Some(Body::new(vec![b'x'; 100]));
    Lent::new(env)
}
