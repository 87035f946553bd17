//! The boundary between guests and the host: any calls in any order, with any arguments.

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use parking_lot::Mutex;
use turnstile_plugins::{
    Body, CallCommand, CallHandle, Callout, Dialect, FieldMap, GrpcEvent, HeaderPairs, HttpEnv, HttpReply, Lent,
    LogLine, Plugin, PluginServices, PluginSpec, RequestMap, ResponseMap, Runtime, RuntimeOptions, SharedState,
};

/// Imports by name, with their parameters: `i` for an i32, `I` for an i64.
const IMPORTS: [(&str, &str); 53] = [
    ("proxy_log", "iii"),
    ("proxy_get_log_level", "i"),
    ("proxy_get_current_time_nanoseconds", "i"),
    ("proxy_set_tick_period_milliseconds", "i"),
    ("proxy_get_buffer_bytes", "iiiii"),
    ("proxy_set_buffer_bytes", "iiiii"),
    ("proxy_get_buffer_status", "iii"),
    ("proxy_get_header_map_size", "ii"),
    ("proxy_get_header_map_pairs", "iii"),
    ("proxy_set_header_map_pairs", "iii"),
    ("proxy_get_header_map_value", "iiiii"),
    ("proxy_add_header_map_value", "iiiii"),
    ("proxy_replace_header_map_value", "iiiii"),
    ("proxy_remove_header_map_value", "iii"),
    ("proxy_get_property", "iiii"),
    ("proxy_set_property", "iiii"),
    ("proxy_continue_stream", "i"),
    ("proxy_close_stream", "i"),
    ("proxy_continue_request", ""),
    ("proxy_continue_response", ""),
    ("proxy_clear_route_cache", ""),
    ("proxy_get_configuration", "ii"),
    ("proxy_get_status", "iii"),
    ("proxy_send_local_response", "iiiiiiii"),
    ("proxy_http_call", "iiiiiiiiii"),
    ("proxy_grpc_call", "iiiiiiiiiiii"),
    ("proxy_grpc_stream", "iiiiiiiii"),
    ("proxy_grpc_send", "iiii"),
    ("proxy_grpc_cancel", "i"),
    ("proxy_grpc_close", "i"),
    ("proxy_get_shared_data", "iiiii"),
    ("proxy_set_shared_data", "iiiii"),
    ("proxy_register_shared_queue", "iii"),
    ("proxy_resolve_shared_queue", "iiiii"),
    ("proxy_dequeue_shared_queue", "iii"),
    ("proxy_enqueue_shared_queue", "iii"),
    ("proxy_define_metric", "iiii"),
    ("proxy_increment_metric", "iI"),
    ("proxy_record_metric", "iI"),
    ("proxy_get_metric", "ii"),
    ("proxy_set_effective_context", "i"),
    ("proxy_done", ""),
    ("proxy_call_foreign_function", "iiiiii"),
    ("fd_write", "iiii"),
    ("random_get", "ii"),
    ("environ_get", "ii"),
    ("environ_sizes_get", "ii"),
    ("clock_time_get", "iIi"),
    // Higress' dialect.
    ("proxy_redis_init", "iiiiiii"),
    ("proxy_redis_call", "iiiii"),
    ("proxy_get_upstream_hosts", "ii"),
    ("proxy_set_upstream_override_host", "ii"),
    ("proxy_inject_encoded_data_to_filter_chain", "iii"),
];

/// The guest's texts, from address 1024 on, 32 bytes each.
const TEXTS: [&[u8]; 14] = [
    b"x-a",
    b":path",
    b":status",
    b":authority",
    b"content-length",
    b"request\0path",
    b"/other?x=1",
    b"12",
    b"upstream",
    // A map of one pair, and one whose lengths lie.
    b"\x01\0\0\0\x01\0\0\0\x01\0\0\0a\0b\0",
    b"\xff\0\0\0\xff\xff\xff\xff\x01\0\0\0a\0b\0",
    // What a call needs at least.
    b"get_log_level",
    b"redis?db=1",
    b"*1\r\n$4\r\nPING\r\n",
];
/// The map of a call's headers, at address 1600.
const CALL_HEADERS: [(&str, &str); 3] = [(":method", "GET"), (":path", "/"), (":authority", "a")];

/// Numbers that arguments are taken from: a byte of the input picks one.
fn numbers() -> Vec<u32> {
    let texts = (0..TEXTS.len() as u32).flat_map(|at| [1024 + 32 * at, TEXTS[at as usize].len() as u32]);
    let small = 0..=16;
    let odd = [
        1600,
        call_headers().len() as u32,
        // Where results go, aligned and not.
        2048,
        2052,
        2056,
        2061,
        200,
        404,
        599,
        1000,
        65_535,
        65_536,
        131_068,
        131_070,
        131_072,
        1 << 20,
        0x7fff_ffff,
        0x8000_0000,
        0xffff_0000,
        0xffff_fff0,
        0xffff_fffc,
        0xffff_fffe,
        u32::MAX,
    ];
    small.chain(texts).chain(odd).collect()
}

fn call_headers() -> Vec<u8> {
    let mut bytes = (CALL_HEADERS.len() as u32).to_le_bytes().to_vec();
    for (name, value) in CALL_HEADERS {
        bytes.extend((name.len() as u32).to_le_bytes());
        bytes.extend((value.len() as u32).to_le_bytes());
    }
    for (name, value) in CALL_HEADERS {
        bytes.extend([name.as_bytes(), b"\0", value.as_bytes(), b"\0"].concat());
    }
    bytes
}

/// The guest: each callback reads its calls from the script until a byte 255. The script is the plugin's configuration.
fn guest() -> String {
    let mut text = String::from("(module\n");
    for (name, params) in IMPORTS {
        let module = if name.starts_with("proxy_") { "env" } else { "wasi_snapshot_preview1" };
        let types: String = params.chars().map(|c| if c == 'I' { " i64" } else { " i32" }).collect();
        let params = if types.is_empty() { String::new() } else { format!("(param{types})") };
        text += &format!("(import {module:?} {name:?} (func ${name} {params} (result i32)))\n");
    }
    let data = |at: usize, bytes: &[u8]| {
        let bytes: String = bytes.iter().map(|b| format!("\\{b:02x}")).collect();
        format!("(data (i32.const {at}) \"{bytes}\")\n")
    };
    text += "(memory (export \"memory\") 2)\n";
    for (at, bytes) in TEXTS.iter().enumerate() {
        text += &data(1024 + 32 * at, bytes);
    }
    text += &data(1600, &call_headers());
    let numbers = numbers();
    text += &data(4096, &numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>());
    text += &format!(
        r#"
(global $heap (mut i32) (i32.const 65536))
(global $at (mut i32) (i32.const 0))
(global $end (mut i32) (i32.const 0))
(global $mode (mut i32) (i32.const 0))
(func (export "proxy_abi_version_0_2_100"))
(func $allocate (export "proxy_on_memory_allocate") (param $n i32) (result i32) (local $p i32)
  (if (i32.eq (global.get $mode) (i32.const 1)) (then (return (i32.const 0))))
  (if (i32.eq (global.get $mode) (i32.const 2)) (then (return (i32.const -16))))
  (if (i32.eq (global.get $mode) (i32.const 3)) (then (global.set $mode (i32.const 0)) (drop (call $run))))
  (local.set $p (global.get $heap))
  (global.set $heap (i32.add (local.get $p) (i32.and (i32.add (local.get $n) (i32.const 15)) (i32.const -16))))
  (block $enough
    (loop $grow
      (br_if $enough (i32.le_u (global.get $heap) (i32.mul (memory.size) (i32.const 65536))))
      (br_if $enough (i32.eq (memory.grow (i32.const 16)) (i32.const -1)))
      (br $grow)))
  (local.get $p))
(func $byte (result i32) (local $value i32)
  (if (i32.ge_u (global.get $at) (global.get $end)) (then (return (i32.const 255))))
  (local.set $value (i32.load8_u (global.get $at)))
  (global.set $at (i32.add (global.get $at) (i32.const 1)))
  (local.get $value))
(func $number (result i32)
  (i32.load (i32.add (i32.const 4096) (i32.mul (i32.const 4) (i32.rem_u (call $byte) (i32.const {count}))))))
(func $run (result i32) (local $call i32)
  (loop $next
    (local.set $call (call $byte))
    (if (i32.ne (local.get $call) (i32.const 255))
      (then
        (if (i32.eq (local.get $call) (i32.const 254)) (then (global.set $mode (i32.and (call $byte) (i32.const 3)))))
        (call $one (i32.rem_u (local.get $call) (i32.const {calls})))
        (br $next))))
  (i32.and (call $byte) (i32.const 3)))
(func (export "proxy_on_configure") (param i32 i32) (result i32)
  (drop (call $proxy_get_buffer_bytes (i32.const 7) (i32.const 0) (i32.const 65536) (i32.const 0) (i32.const 4)))
  (global.set $at (i32.load (i32.const 0)))
  (global.set $end (i32.add (i32.load (i32.const 0)) (i32.load (i32.const 4))))
  (drop (call $run))
  (i32.const 1))
"#,
        count = numbers.len(),
        calls = IMPORTS.len(),
    );
    text += "(func $one (param $call i32)\n";
    for (at, (name, params)) in IMPORTS.iter().enumerate() {
        let arguments: String = params
            .chars()
            .map(|c| if c == 'I' { "(i64.extend_i32_s (call $number))" } else { "(call $number)" })
            .collect();
        text += &format!(
            "(if (i32.eq (local.get $call) (i32.const {at})) (then (drop (call ${name} {arguments})) (return)))\n"
        );
    }
    text += ")\n";
    for (name, params, result) in [
        ("proxy_on_context_create", 2, false),
        ("proxy_on_request_headers", 3, true),
        ("proxy_on_request_body", 3, true),
        ("proxy_on_request_trailers", 2, true),
        ("proxy_on_response_headers", 3, true),
        ("proxy_on_response_body", 3, true),
        ("proxy_on_response_trailers", 2, true),
        ("proxy_on_tick", 1, false),
        ("proxy_on_queue_ready", 2, false),
        ("proxy_on_http_call_response", 5, false),
        ("proxy_on_grpc_receive_initial_metadata", 3, false),
        ("proxy_on_grpc_receive", 3, false),
        ("proxy_on_grpc_receive_trailing_metadata", 3, false),
        ("proxy_on_grpc_close", 3, false),
        ("proxy_on_foreign_function", 3, false),
        ("proxy_on_redis_call_response", 4, false),
        ("proxy_on_done", 1, true),
        ("proxy_on_log", 1, false),
        ("proxy_on_delete", 1, false),
    ] {
        let params = " i32".repeat(params);
        let (result, run) = if result { ("(result i32)", "(call $run)") } else { ("", "(drop (call $run))") };
        text += &format!("(func (export {name:?}) (param{params}) {result} {run})\n");
    }
    text + ")"
}

static WASM: LazyLock<Arc<[u8]>> = LazyLock::new(|| wat::parse_str(guest()).expect("the guest is a module").into());

/// Compiled once, and kept beside the build's other products.
static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    let exe = std::env::current_exe().expect("this program");
    let dir: Option<PathBuf> = exe.parent().map(|dir| dir.join("fuzz-hostcalls-cache"));
    Runtime::new(RuntimeOptions { cache_dir: dir, ..RuntimeOptions::default() }).expect("a runtime")
});

/// A gateway that keeps what it is asked, to be done when no guest runs.
#[derive(Default)]
struct Services {
    shared: SharedState,
    asked: Mutex<Vec<CallCommand>>,
}

impl PluginServices for Services {
    fn shared(&self) -> &SharedState {
        &self.shared
    }

    fn log(&self, line: LogLine<'_>) {
        assert!(line.message.len() <= 64 << 10, "a log line of {} bytes", line.message.len());
    }

    fn has_upstream(&self, _: &str, upstream: &str) -> bool {
        upstream == "upstream"
    }

    fn has_redis(&self, _: &str, upstream: &str) -> bool {
        upstream == "redis"
    }

    fn call_out(&self, _: &str, command: CallCommand) {
        self.asked.lock().push(command);
    }
}

const MEMORY: usize = 16 << 20;
const HELD: usize = 1 << 20;
const CALLS: usize = 16;

/// Whatever a guest calls: the host neither panics nor hangs, and what guests leave behind stays within its bounds.
pub fn hostcalls(data: &[u8]) {
    let services = Arc::new(Services::default());
    let mut spec = PluginSpec::new("fuzz", Arc::clone(&WASM)).with_configuration(data);
    spec.dialect = Dialect::Higress;
    // Nothing in the guest loops, so that only the host could take so long.
    spec.limits.callback_deadline_ms = 10_000;
    spec.limits.memory_bytes = MEMORY;
    spec.limits.held_body_bytes = HELD;
    spec.limits.callouts_per_stream = CALLS;
    spec.limits.callouts = CALLS;
    spec.lenient = data.len().is_multiple_of(2);
    let started = Plugin::start(&RUNTIME, spec, Arc::<Services>::clone(&services));
    let plugin = match started {
        Ok(plugin) => plugin,
        Err(error) => {
            assert!(!error.message.contains("host panicked"), "{error}");
            return;
        }
    };
    let mut env = exchange();
    let mut stream = plugin.open_stream(0);
    let mut now_ms = 0;
    for step in 0..6 {
        let result = match step {
            0 => stream.on_request_headers(&mut env, false),
            1 => stream.on_request_body(&mut env, 5, true),
            2 => stream.on_request_trailers(&mut env),
            3 => stream.on_response_headers(&mut env, false),
            4 => stream.on_response_body(&mut env, 5, true),
            _ => stream.on_response_trailers(&mut env),
        };
        if let Err(fault) = &result {
            assert!(!matches!(fault.kind.as_str(), "host" | "deadline"), "{fault}");
        }
        now_ms += 1_000;
        plugin.tick(now_ms);
        serve(&services, step);
        bounded(&env, &plugin);
    }
    if let Err(fault) = stream.finish(&mut env) {
        assert!(!matches!(fault.kind.as_str(), "host" | "deadline"), "{fault}");
    }
    plugin.shut_down(now_ms);
    plugin.tick(now_ms + 60_000);
    assert!(plugin.is_shut_down());
    let stats = plugin.stats();
    for fault in turnstile_plugins::FaultKind::ALL {
        assert!(!matches!(fault.as_str(), "host" | "deadline") || stats.faults_of(fault) == 0, "{fault}");
    }
}

fn exchange() -> Lent<HttpEnv> {
    let mut fields = HeaderMap::new();
    fields.insert("x-a", HeaderValue::from_static("1"));
    let mut env = HttpEnv::request(RequestMap::new(Method::POST, "/path?q", "a.test", fields.clone()));
    env.hosts = Some(vec![("10.0.0.1:80".into(), "{}".into())]);
    env.request_body = Some(Body::new("hello"));
    env.request_trailers = Some(FieldMap::new(fields.clone()));
    env.response = Some(ResponseMap::new(StatusCode::OK, fields.clone()));
    env.response_body = Some(Body::new("world"));
    env.response_trailers = Some(FieldMap::new(fields));
    Lent::new(env)
}

/// Answers calls, each in another way.
fn serve(services: &Services, step: usize) {
    let commands = std::mem::take(&mut *services.asked.lock());
    for (at, command) in commands.into_iter().enumerate() {
        let CallCommand::Start(handle, callout) = command else { continue };
        match *callout {
            Callout::Http(_) => answer(handle, at + step),
            Callout::Grpc(_) => talk(handle, at + step),
            Callout::Redis(_) => reply(handle, at + step),
        }
    }
}

fn answer(handle: CallHandle, how: usize) {
    let reply = HttpReply {
        status: StatusCode::OK,
        headers: HeaderMap::new(),
        body: Bytes::from_static(b"a reply"),
        trailers: HeaderMap::new(),
    };
    // A guest that fails on it is seen in the plugin's counters.
    let _ = match how % 3 {
        0 => handle.http(Ok(reply)),
        1 => handle.http(Err("no answer".into())),
        _ => {
            drop(handle);
            Ok(())
        }
    };
}

fn reply(handle: CallHandle, how: usize) {
    let _ = match how % 3 {
        0 => handle.redis(Ok(Bytes::from_static(b"+PONG\r\n"))),
        1 => handle.redis(Err("no reply".into())),
        _ => {
            drop(handle);
            Ok(())
        }
    };
}

fn talk(mut handle: CallHandle, how: usize) {
    let close = GrpcEvent::Close { status: (how % 3) as u32, message: "the end".into() };
    let events =
        [GrpcEvent::InitialMetadata(HeaderMap::new()), GrpcEvent::Message(Bytes::from_static(b"a message")), close];
    for event in events.into_iter().skip(how % 2) {
        if !handle.grpc(event).unwrap_or(false) {
            return;
        }
    }
}

/// What a guest leaves in an exchange stays within its bounds.
fn bounded(env: &HttpEnv, plugin: &Plugin) {
    let maps: [Option<usize>; 4] = [
        env.request.as_ref().map(HeaderPairs::len),
        env.response.as_ref().map(HeaderPairs::len),
        env.request_trailers.as_ref().map(HeaderPairs::len),
        env.response_trailers.as_ref().map(HeaderPairs::len),
    ];
    assert!(maps.into_iter().flatten().all(|pairs| pairs <= 1024 + 8), "{maps:?}");
    for body in [&env.request_body, &env.response_body].into_iter().flatten() {
        assert!(body.bytes.len() <= HELD, "a body of {} bytes", body.bytes.len());
    }
    assert!(plugin.stats().memory_high_water <= MEMORY as u64);
}
