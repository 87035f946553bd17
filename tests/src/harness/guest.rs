//! Plugins in WebAssembly text, for what no SDK would write.

const IMPORTS: &str = r#"
(import "env" "proxy_log" (func $log (param i32 i32 i32) (result i32)))
(import "env" "proxy_set_tick_period_milliseconds" (func $set_tick (param i32) (result i32)))
(import "env" "proxy_get_header_map_value" (func $get_header (param i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_add_header_map_value" (func $add_header (param i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_get_property" (func $get_property (param i32 i32 i32 i32) (result i32)))
(import "env" "proxy_set_property" (func $set_property (param i32 i32 i32 i32) (result i32)))
(import "env" "proxy_get_shared_data" (func $get_shared (param i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_set_shared_data" (func $set_shared (param i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_register_shared_queue" (func $register_queue (param i32 i32 i32) (result i32)))
(import "env" "proxy_enqueue_shared_queue" (func $enqueue (param i32 i32 i32) (result i32)))
(import "env" "proxy_define_metric" (func $define_metric (param i32 i32 i32 i32) (result i32)))
(import "env" "proxy_replace_header_map_value" (func $replace_header (param i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_get_buffer_bytes" (func $get_buffer (param i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_set_buffer_bytes" (func $set_buffer (param i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_continue_stream" (func $continue_stream (param i32) (result i32)))
(import "env" "proxy_close_stream" (func $close_stream (param i32) (result i32)))
(import "env" "proxy_set_effective_context" (func $effective (param i32) (result i32)))
(import "env" "proxy_get_status" (func $get_status (param i32 i32 i32) (result i32)))
(import "env" "proxy_send_local_response" (func $respond (param i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_http_call" (func $http_call (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_grpc_call"
  (func $grpc_call (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_grpc_stream" (func $grpc_stream (param i32 i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))
(import "env" "proxy_grpc_send" (func $grpc_send (param i32 i32 i32 i32) (result i32)))
(import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))
"#;

/// Memory: 0–1023 the test's data, 1024 numbers as text, 2000 what the host hands over, 3000 names, from 4096 the test's,
/// from 64 KiB the allocator's.
const HELPERS: &str = r#"
(memory (export "memory") 2)
(global $heap (mut i32) (i32.const 65536))
(data (i32.const 3000) "x-doplugin_name")
(func $allocate (param $n i32) (result i32)
  (local $p i32)
  (local.set $p (global.get $heap))
  (global.set $heap (i32.add (local.get $p) (i32.and (i32.add (local.get $n) (i32.const 15)) (i32.const -16))))
  (block $enough
    (loop $grow
      (br_if $enough (i32.le_u (global.get $heap) (i32.mul (memory.size) (i32.const 65536))))
      (br_if $enough (i32.eq (memory.grow (i32.const 16)) (i32.const -1)))
      (br $grow)))
  (local.get $p))
(func $asked (result i32)
  (if (i32.eqz (call $get_header (i32.const 0) (i32.const 3000) (i32.const 4) (i32.const 2000) (i32.const 2004)))
    (then (return (i32.load8_u (i32.load (i32.const 2000))))))
  (i32.const 0))
(func $named (result i32)
  (if (i32.eqz (call $get_property (i32.const 3004) (i32.const 11) (i32.const 2000) (i32.const 2004)))
    (then (return (i32.load8_u (i32.load (i32.const 2000))))))
  (i32.const -1))
(func $told (result i32) (i32.eq (call $asked) (call $named)))
(func $digits (param $n i32)
  (local $at i32)
  (local.set $at (i32.const 1031))
  (loop $next
    (i32.store8 (local.get $at) (i32.add (i32.const 48) (i32.rem_u (local.get $n) (i32.const 10))))
    (local.set $n (i32.div_u (local.get $n) (i32.const 10)))
    (local.set $at (i32.sub (local.get $at) (i32.const 1)))
    (br_if $next (i32.ge_u (local.get $at) (i32.const 1024)))))
"#;

/// A map as guests and hosts hand it to each other.
fn serialized(pairs: &[(&str, &str)]) -> Vec<u8> {
    let size = |n: usize| u32::try_from(n).unwrap().to_le_bytes();
    let mut bytes = size(pairs.len()).to_vec();
    for (name, value) in pairs {
        bytes.extend(size(name.len()).into_iter().chain(size(value.len())));
    }
    for (name, value) in pairs {
        bytes.extend(name.bytes().chain([0]).chain(value.bytes()).chain([0]));
    }
    bytes
}

/// A plugin in the making. Its text may call the imports above by their `$name`, and these:
///
/// - `$asked`: the first byte of the request's header `x-do`, 0 without one;
/// - `$told`: whether that is the first letter of the plugin's own name;
/// - `$digits`: writes a number as eight digits at 1024.
#[derive(Clone)]
pub struct Guest {
    marker: &'static str,
    memory: bool,
    allocator: &'static str,
    imports: String,
    body: String,
}

// === impl Guest ===

impl Guest {
    /// A plugin with these functions.
    pub fn new(body: &str) -> Self {
        let allocator =
            r#"(func (export "proxy_on_memory_allocate") (param i32) (result i32) (call $allocate (local.get 0)))"#;
        Self {
            marker: "proxy_abi_version_0_2_1",
            memory: true,
            allocator,
            imports: String::new(),
            body: body.to_owned(),
        }
    }

    /// A plugin that does this when request headers come, and then lets the request go on.
    pub fn on_request(body: &str) -> Self {
        Self::new(&format!(
            r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (local $n i32) {body} (i32.const 0))"#
        ))
    }

    /// Announces another ABI version.
    #[must_use]
    pub fn marker(mut self, marker: &'static str) -> Self {
        self.marker = marker;
        self
    }

    /// Keeps the memory to itself.
    #[must_use]
    pub fn without_memory(mut self) -> Self {
        self.memory = false;
        self
    }

    /// Another allocator.
    #[must_use]
    pub fn allocator(mut self, allocator: &'static str) -> Self {
        self.allocator = allocator;
        self
    }

    /// One more import.
    #[must_use]
    pub fn import(mut self, import: &str) -> Self {
        self.imports.push_str(import);
        self
    }

    /// More functions or data.
    #[must_use]
    pub fn also(mut self, body: &str) -> Self {
        self.body.push_str(body);
        self
    }

    /// Bytes at an address.
    #[must_use]
    pub fn data(self, at: usize, bytes: &[u8]) -> Self {
        let text: String = bytes.iter().map(|byte| format!("\\{byte:02x}")).collect();
        self.also(&format!("(data (i32.const {at}) \"{text}\")"))
    }

    /// `$call`: calls the upstream `name` at `path`, with the request's body `ping`, for at most `timeout_ms`, and gives the
    /// status. Uses the memory from 5000 to 5999; the token is at 5996.
    #[must_use]
    pub fn calls(self, name: &str, path: &str, timeout_ms: u32) -> Self {
        let headers =
            serialized(&[(":method", "POST"), (":path", path), (":authority", "service.test"), ("x-from", "guest")]);
        let call = format!(
            "(func $call (result i32) (call $http_call (i32.const 5000) (i32.const {}) (i32.const 5200) (i32.const {})
               (i32.const 5100) (i32.const 4) (i32.const 0) (i32.const 0) (i32.const {timeout_ms}) (i32.const 5996)))",
            name.len(),
            headers.len()
        );
        self.data(5000, name.as_bytes()).data(5100, b"ping").data(5200, &headers).also(&call)
    }

    /// The module.
    pub fn wasm(&self) -> Vec<u8> {
        let Self { marker, memory, allocator, imports, body } = self;
        let helpers = if *memory { HELPERS.to_owned() } else { HELPERS.replace("(export \"memory\")", "") };
        let text = format!("(module {IMPORTS} {imports} {helpers} {allocator} (func (export {marker:?})) {body})");
        wat::parse_str(&text).unwrap_or_else(|error| panic!("{error}\n{body}"))
    }
}
