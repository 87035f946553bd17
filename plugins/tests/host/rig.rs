//! Guests in WebAssembly text, a gateway that records, and short ways to run one on the other.

use std::sync::{Arc, LazyLock};

use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use parking_lot::Mutex;
use turnstile_plugins::{
    Body, CallCommand, CallHandle, Callout, HttpEnv, Lent, LogLevel, LogLine, Plugin, PluginError, PluginServices,
    PluginSpec, RequestMap, ResponseMap, Runtime, RuntimeOptions, SharedState, Stream,
};

/// One runtime for all tests: an engine and its clock.
pub static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new(RuntimeOptions::default()).unwrap());

/// A guest in the making. Its body may call every import below by its `$name`, and these:
/// `$put` appends an i32 to the results, `$flush` writes all results to property `results`, `$text` writes bytes to
/// property `text`, `$note` appends a byte to the trace that `proxy_log` shows on `$trace`.
pub struct Guest {
    marker: &'static str,
    allocator: String,
    imports: String,
    body: String,
}

/// Hands out memory upward from 64 KiB, growing it.
const BUMP_ALLOCATOR: &str = r#"
(func (export "proxy_on_memory_allocate") (param $n i32) (result i32)
  (local $p i32)
  (local.set $p (global.get $heap))
  (global.set $heap (i32.add (local.get $p) (i32.and (i32.add (local.get $n) (i32.const 15)) (i32.const -16))))
  (block $enough
    (loop $grow
      (br_if $enough (i32.le_u (global.get $heap) (i32.mul (memory.size) (i32.const 65536))))
      (br_if $enough (i32.eq (memory.grow (i32.const 16)) (i32.const -1)))
      (br $grow)))
  (local.get $p))
"#;

const IMPORTS: &str = r#"
(import "env" "proxy_log" (func $log (param i32 i32 i32) (result i32)))
(import "env" "proxy_get_log_level" (func $get_log_level (param i32) (result i32)))
(import "env" "proxy_get_current_time_nanoseconds" (func $time (param i32) (result i32)))
(import "env" "proxy_set_tick_period_milliseconds" (func $set_tick (param i32) (result i32)))
(import "env" "proxy_get_buffer_bytes" (func $get_buffer (param i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_set_buffer_bytes" (func $set_buffer (param i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_get_buffer_status" (func $buffer_status (param i32 i32 i32) (result i32)))
(import "env" "proxy_get_header_map_size" (func $map_size (param i32 i32) (result i32)))
(import "env" "proxy_get_header_map_pairs" (func $get_pairs (param i32 i32 i32) (result i32)))
(import "env" "proxy_set_header_map_pairs" (func $set_pairs (param i32 i32 i32) (result i32)))
(import "env" "proxy_get_header_map_value" (func $get_header (param i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_add_header_map_value" (func $add_header (param i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_replace_header_map_value" (func $replace_header (param i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_remove_header_map_value" (func $remove_header (param i32 i32 i32) (result i32)))
(import "env" "proxy_get_property" (func $get_property (param i32 i32 i32 i32) (result i32)))
(import "env" "proxy_set_property" (func $set_property (param i32 i32 i32 i32) (result i32)))
(import "env" "proxy_continue_stream" (func $continue_stream (param i32) (result i32)))
(import "env" "proxy_close_stream" (func $close_stream (param i32) (result i32)))
(import "env" "proxy_get_status" (func $get_status (param i32 i32 i32) (result i32)))
(import "env" "proxy_send_local_response"
  (func $local_response (param i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_http_call" (func $http_call (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_grpc_call"
  (func $grpc_call (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_grpc_stream" (func $grpc_stream (param i32 i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_grpc_send" (func $grpc_send (param i32 i32 i32 i32) (result i32)))
(import "env" "proxy_grpc_cancel" (func $grpc_cancel (param i32) (result i32)))
(import "env" "proxy_grpc_close" (func $grpc_close (param i32) (result i32)))
(import "env" "proxy_get_shared_data" (func $get_shared (param i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_set_shared_data" (func $set_shared (param i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_register_shared_queue" (func $register_queue (param i32 i32 i32) (result i32)))
(import "env" "proxy_resolve_shared_queue" (func $resolve_queue (param i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_dequeue_shared_queue" (func $dequeue (param i32 i32 i32) (result i32)))
(import "env" "proxy_enqueue_shared_queue" (func $enqueue (param i32 i32 i32) (result i32)))
(import "env" "proxy_define_metric" (func $define_metric (param i32 i32 i32 i32) (result i32)))
(import "env" "proxy_increment_metric" (func $increment_metric (param i32 i64) (result i32)))
(import "env" "proxy_record_metric" (func $record_metric (param i32 i64) (result i32)))
(import "env" "proxy_get_metric" (func $get_metric (param i32 i32) (result i32)))
(import "env" "proxy_set_effective_context" (func $effective (param i32) (result i32)))
(import "env" "proxy_done" (func $done (result i32)))
(import "env" "proxy_call_foreign_function" (func $foreign (param i32 i32 i32 i32 i32 i32) (result i32)))
"#;

/// Memory: 0–1023 scratch and data of the test, 1024 results, 2048 trace, 3072 names of the helpers.
const HELPERS: &str = r#"
(memory (export "memory") 2)
(global $heap (mut i32) (i32.const 65536))
(global $results (mut i32) (i32.const 0))
(global $trace_len (mut i32) (i32.const 0))
(data (i32.const 3072) "resultstext")
(func $put (param $value i32)
  (i32.store (i32.add (i32.const 1024) (global.get $results)) (local.get $value))
  (global.set $results (i32.add (global.get $results) (i32.const 4))))
(func $flush
  (drop (call $set_property (i32.const 3072) (i32.const 7) (i32.const 1024) (global.get $results)))
  (global.set $results (i32.const 0)))
(func $text (param $p i32) (param $n i32)
  (drop (call $set_property (i32.const 3079) (i32.const 4) (local.get $p) (local.get $n))))
(func $note (param $letter i32)
  (i32.store8 (i32.add (i32.const 2048) (global.get $trace_len)) (local.get $letter))
  (global.set $trace_len (i32.add (global.get $trace_len) (i32.const 1))))
(func $trace
  (drop (call $log (i32.const 2) (i32.const 2048) (global.get $trace_len)))
  (global.set $trace_len (i32.const 0)))
"#;

impl Guest {
    pub fn new(body: &str) -> Self {
        Self {
            marker: "proxy_abi_version_0_2_1",
            allocator: BUMP_ALLOCATOR.to_owned(),
            imports: String::new(),
            body: body.to_owned(),
        }
    }

    /// A guest that does this on request headers and then continues.
    pub fn on_request_headers(body: &str) -> Self {
        Self::new(&format!(
            r#"(func (export "proxy_on_request_headers") (param $context i32) (param $n i32) (param $eos i32) (result i32)
                 {body} (call $flush) (i32.const 0))"#
        ))
    }

    pub fn marker(mut self, marker: &'static str) -> Self {
        self.marker = marker;
        self
    }

    pub fn allocator(mut self, allocator: &str) -> Self {
        self.allocator = allocator.to_owned();
        self
    }

    pub fn import(mut self, import: &str) -> Self {
        self.imports.push_str(import);
        self
    }

    pub fn also(mut self, body: &str) -> Self {
        self.body.push_str(body);
        self
    }

    pub fn wasm(&self) -> Vec<u8> {
        let Self { marker, allocator, imports, body } = self;
        let text = format!(r#"(module {IMPORTS} {imports} {HELPERS} {allocator} (func (export "{marker}")) {body})"#);
        wat::parse_str(&text).unwrap_or_else(|error| panic!("{error}\n{body}"))
    }

    pub fn spec(&self) -> PluginSpec {
        spec("guest", self.wasm())
    }

    /// Starts the guest with default settings.
    pub fn start(&self) -> Rig {
        Rig::start(self.spec()).unwrap()
    }
}

/// A plugin with default settings, but for the deadline of its callbacks: on a busy machine it would tell of the machine.
pub fn spec(name: &str, wasm: Vec<u8>) -> PluginSpec {
    let mut spec = PluginSpec::new(name, wasm);
    spec.limits.callback_deadline_ms = 10_000;
    spec
}

/// A gateway that remembers what plugins logged.
#[derive(Default)]
pub struct Gateway {
    pub shared: SharedState,
    pub lines: Mutex<Vec<(LogLevel, String)>>,
    pub commands: Mutex<Vec<CallCommand>>,
}

impl PluginServices for Gateway {
    fn shared(&self) -> &SharedState {
        &self.shared
    }

    fn log(&self, line: LogLine<'_>) {
        self.lines.lock().push((line.level, line.message.to_owned()));
    }

    fn log_level(&self, _: &str) -> LogLevel {
        LogLevel::Debug
    }

    fn has_upstream(&self, _: &str, upstream: &str) -> bool {
        upstream == "auth"
    }

    fn call_out(&self, _: &str, command: CallCommand) {
        self.commands.lock().push(command);
    }

    fn property(&self, plugin: &str, path: &[u8]) -> Option<Vec<u8>> {
        (path == b"asked_by").then(|| plugin.as_bytes().to_vec())
    }
}

/// A started plugin and its gateway.
pub struct Rig {
    pub plugin: Plugin,
    pub gateway: Arc<Gateway>,
}

impl Rig {
    pub fn start(spec: PluginSpec) -> Result<Self, PluginError> {
        Self::start_with(spec, SharedState::default())
    }

    pub fn start_with(spec: PluginSpec, shared: SharedState) -> Result<Self, PluginError> {
        let gateway = Arc::new(Gateway { shared, ..Gateway::default() });
        let services: Arc<dyn PluginServices> = gateway.clone();
        Ok(Self { plugin: Plugin::start(&RUNTIME, spec, services)?, gateway })
    }

    pub fn stream(&self) -> Stream {
        self.plugin.open_stream(0)
    }

    /// Lines the guest logged, and the host about the guest, since the last question.
    pub fn lines(&self) -> Vec<String> {
        std::mem::take(&mut *self.gateway.lines.lock()).into_iter().map(|(_, line)| line).collect()
    }

    /// What the guest asked about calls since the last question.
    pub fn commands(&self) -> Vec<CallCommand> {
        std::mem::take(&mut *self.gateway.commands.lock())
    }

    /// The one call that the guest began.
    pub fn call(&self) -> (CallHandle, Callout) {
        let mut commands = self.commands();
        assert_eq!(commands.len(), 1, "{commands:?}");
        match commands.remove(0) {
            CallCommand::Start(handle, callout) => (handle, *callout),
            other => panic!("{other:?}"),
        }
    }

    /// Runs the request headers callback on `env` and gives the results that the guest put.
    pub fn results(&self, env: &mut Lent<HttpEnv>) -> Vec<i32> {
        self.stream().on_request_headers(env, true).unwrap();
        results(env)
    }

    /// As [`Rig::results`], on a fresh request.
    pub fn results_of_request(&self) -> Vec<i32> {
        self.results(&mut request())
    }
}

/// A data segment.
pub fn data(at: usize, bytes: &[u8]) -> String {
    let text: String = bytes.iter().map(|byte| format!("\\{byte:02x}")).collect();
    format!("(data (i32.const {at}) \"{text}\")")
}

/// A serialized map.
pub fn map(pairs: &[(&str, &str)]) -> Vec<u8> {
    let mut bytes = u32::try_from(pairs.len()).unwrap().to_le_bytes().to_vec();
    for (name, value) in pairs {
        bytes.extend(u32::try_from(name.len()).unwrap().to_le_bytes());
        bytes.extend(u32::try_from(value.len()).unwrap().to_le_bytes());
    }
    for (name, value) in pairs {
        bytes.extend(name.bytes().chain([0]).chain(value.bytes()).chain([0]));
    }
    bytes
}

/// The results a guest flushed.
pub fn results(env: &HttpEnv) -> Vec<i32> {
    let bytes = env.properties.get(b"results".as_slice()).expect("the guest flushed results");
    bytes.chunks_exact(4).map(|chunk| i32::from_le_bytes(chunk.try_into().unwrap())).collect()
}

/// The text a guest noted.
pub fn text(env: &HttpEnv) -> String {
    String::from_utf8(env.properties.get(b"text".as_slice()).expect("the guest noted text").clone()).unwrap()
}

pub fn headers(pairs: &[(&str, &[u8])]) -> HeaderMap {
    let pairs = pairs.iter().map(|(name, value)| {
        (HeaderName::from_bytes(name.as_bytes()).unwrap(), HeaderValue::from_bytes(value).unwrap())
    });
    let mut map = HeaderMap::new();
    pairs.for_each(|(name, value)| {
        map.append(name, value);
    });
    map
}

/// `POST /v1/chat/completions?x=1` at `api.test` with two `accept` headers and a raw one; no body.
pub fn request() -> Lent<HttpEnv> {
    let fields = headers(&[("accept", b"first"), ("accept", b"second"), ("x-raw", b"\xff\xfe")]);
    Lent::new(HttpEnv::request(RequestMap::new(Method::POST, "/v1/chat/completions?x=1", "api.test", fields)))
}

/// The same with a body.
pub fn request_with_body(body: &'static str) -> Lent<HttpEnv> {
    let mut env = request();
    env.request_body = Some(Body::new(body));
    env
}

/// Adds a response with one header and a body.
pub fn with_response(mut env: Lent<HttpEnv>, body: &'static str) -> Lent<HttpEnv> {
    env.response = Some(ResponseMap::new(StatusCode::OK, headers(&[("content-type", b"text/plain")])));
    env.response_body = Some(Body::new(body));
    env
}

/// The value of a request header after the guest ran.
pub fn header(env: &HttpEnv, name: &str) -> Option<Vec<u8>> {
    use turnstile_plugins::HeaderPairs;
    env.request.as_ref().unwrap().get(name.as_bytes()).map(|value| value.into_owned())
}
