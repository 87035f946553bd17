//! Order and arguments of callbacks.

use turnstile_plugins::{AbiVersion, Callback, StartPhase};

use crate::rig::{Guest, Rig, request, request_with_body, with_response};

/// Notes a letter on every callback and shows the trace on log's end.
const TRACER: &str = r#"
(func (export "_initialize") (call $note (i32.const 73)))                                              ;; I
(func (export "_start") (call $note (i32.const 83)))                                                   ;; S
(func (export "main") (param i32 i32) (result i32) (call $note (i32.const 109)) (i32.const 0))         ;; m
(func (export "proxy_on_context_create") (param $c i32) (param $parent i32)
  (call $note (select (i32.const 99) (i32.const 82) (local.get $parent))))                             ;; R or c
(func (export "proxy_on_vm_start") (param i32 i32) (result i32) (call $note (i32.const 118)) (i32.const 1))   ;; v
(func (export "proxy_on_configure") (param i32 i32) (result i32) (call $note (i32.const 67)) (i32.const 1))   ;; C
(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (call $note (i32.const 104)) (i32.const 0))
(func (export "proxy_on_request_body") (param i32 i32 i32) (result i32) (call $note (i32.const 98)) (i32.const 0))
(func (export "proxy_on_request_trailers") (param i32 i32) (result i32) (call $note (i32.const 116)) (i32.const 0))
(func (export "proxy_on_response_headers") (param i32 i32 i32) (result i32) (call $note (i32.const 72)) (i32.const 0))
(func (export "proxy_on_response_body") (param i32 i32 i32) (result i32) (call $note (i32.const 66)) (i32.const 0))
(func (export "proxy_on_response_trailers") (param i32 i32) (result i32) (call $note (i32.const 84)) (i32.const 0))
(func (export "proxy_on_log") (param i32) (call $note (i32.const 108)))                                ;; l
(func (export "proxy_on_done") (param i32) (result i32) (call $note (i32.const 100)) (i32.const 0))    ;; d
(func (export "proxy_on_delete") (param i32) (call $note (i32.const 120)) (call $trace))               ;; x
"#;

#[test]
fn callbacks_come_in_the_order_of_the_abi() {
    let rig = Guest::new(TRACER).start();
    let mut env = with_response(request_with_body("hello"), "world");
    env.request_trailers = Some(Default::default());
    env.response_trailers = Some(Default::default());
    let mut stream = rig.stream();
    stream.on_request_headers(&mut env, false).unwrap();
    stream.on_request_body(&mut env, 5, false).unwrap();
    stream.on_request_trailers(&mut env).unwrap();
    stream.on_response_headers(&mut env, false).unwrap();
    stream.on_response_body(&mut env, 5, false).unwrap();
    stream.on_response_trailers(&mut env).unwrap();
    stream.finish(&mut env).unwrap();
    assert_eq!(rig.lines(), ["ImRvCchbtHBTldx"], "_initialize and main, not _start; log, done, delete, once");
}

#[test]
fn a_stream_that_no_callback_ran_for_is_never_heard_of() {
    let rig = Guest::new(TRACER).start();
    rig.stream().finish(&mut request()).unwrap();
    let mut stream = rig.stream();
    stream.on_request_headers(&mut request(), true).unwrap();
    stream.finish(&mut request()).unwrap();
    assert_eq!(rig.lines(), ["ImRvCchldx"]);
}

#[test]
fn start_runs_when_there_is_no_initialize() {
    let guest = Guest::new(
        r#"(func (export "_start") (call $note (i32.const 83)))
           (func (export "proxy_on_configure") (param i32 i32) (result i32) (call $trace) (i32.const 1))"#,
    );
    assert_eq!(guest.start().lines(), ["S"]);
}

#[test]
fn a_dropped_stream_is_ended_by_the_next_tick() {
    let rig = Guest::new(TRACER).start();
    let mut stream = rig.stream();
    stream.on_request_headers(&mut request(), true).unwrap();
    drop(stream);
    assert!(rig.lines().is_empty());
    assert!(rig.plugin.tick(0).faults.is_empty());
    assert_eq!(rig.lines(), ["ImRvCchldx"]);
    rig.plugin.tick(10);
    assert!(rig.lines().is_empty(), "once");
}

#[test]
fn streams_have_ids_of_their_own_and_know_their_root() {
    let guest = Guest::on_request_headers("(call $put (local.get $context)) (call $put (global.get $parent))").also(
        r#"(global $parent (mut i32) (i32.const -1))
           (func (export "proxy_on_context_create") (param $c i32) (param $p i32) (global.set $parent (local.get $p)))"#,
    );
    let rig = guest.start();
    let mut seen = Vec::new();
    for _ in 0..3 {
        let results = rig.results_of_request();
        assert_eq!(results[1], 1, "the parent is the root");
        assert!(!seen.contains(&results[0]) && results[0] > 1);
        seen.push(results[0]);
    }
}

#[test]
fn header_callbacks_get_the_number_of_pairs_and_the_end_of_stream() {
    let rig = Guest::on_request_headers("(call $put (local.get $n)) (call $put (local.get $eos))").start();
    let mut env = request();
    assert_eq!(rig.results(&mut env), [7, 1], "four pseudo-headers and three fields");
    rig.stream().on_request_headers(&mut env, false).unwrap();
    assert_eq!(crate::rig::results(&env), [7, 0]);
}

#[test]
fn a_0_1_0_module_gets_header_callbacks_with_two_arguments() {
    let guest = Guest::new(
        r#"(func (export "proxy_on_request_headers") (param $c i32) (param $n i32) (result i32)
             (call $put (local.get $n))
             ;; a missing header reads as empty
             (call $put (call $get_header (i32.const 0) (i32.const 100) (i32.const 1) (i32.const 0) (i32.const 4)))
             (call $put (i32.load (i32.const 4)))
             (call $flush)
             (i32.const 1))
           (data (i32.const 100) "x")"#,
    )
    .marker("proxy_abi_version_0_1_0");
    let rig = guest.start();
    assert_eq!(rig.plugin.abi(), AbiVersion::V0_1_0);
    let mut env = request();
    assert!(rig.stream().on_request_headers(&mut env, true).unwrap().paused_request());
    assert_eq!(crate::rig::results(&env), [7, 0, 0]);
}

#[test]
fn callbacks_that_are_not_exported_continue_without_entering() {
    let rig = Guest::new(r#"(func (export "proxy_on_log") (param i32))"#).start();
    assert!(rig.plugin.exports(Callback::Log) && !rig.plugin.exports(Callback::RequestHeaders));
    let mut env = with_response(request_with_body(""), "");
    let mut stream = rig.stream();
    assert!(!stream.on_request_headers(&mut env, false).unwrap().paused_request());
    assert!(!stream.on_request_body(&mut env, 0, true).unwrap().paused_request());
    assert!(!stream.on_response_headers(&mut env, true).unwrap().paused_response());
    assert_eq!(rig.plugin.stats().calls, 0);
}

#[test]
fn a_plugin_that_refuses_its_start_or_configuration_is_not_started() {
    let refuses = |export: &str| {
        let guest = Guest::new(&format!(r#"(func (export "{export}") (param i32 i32) (result i32) (i32.const 0))"#));
        let error = Rig::start(guest.spec()).err().unwrap();
        (error.phase, error.message)
    };
    assert_eq!(refuses("proxy_on_vm_start").0, StartPhase::VmStart);
    let (phase, message) = refuses("proxy_on_configure");
    assert_eq!(phase, StartPhase::Configure);
    assert!(message.contains("refuses its configuration"), "{message}");
}

#[test]
fn a_trap_during_the_start_names_the_step_and_the_function() {
    for (export, params, phase) in [
        ("_initialize", "", StartPhase::Initialize),
        ("proxy_on_context_create", "(param i32 i32)", StartPhase::ContextCreate),
        ("proxy_on_vm_start", "(param i32 i32) (result i32)", StartPhase::VmStart),
        ("proxy_on_configure", "(param i32 i32) (result i32)", StartPhase::Configure),
    ] {
        let guest = Guest::new(&format!(
            r#"(func $culprit unreachable) (func (export "{export}") {params} (call $culprit) unreachable)"#
        ));
        let error = Rig::start(guest.spec()).err().unwrap();
        assert_eq!(error.phase, phase);
        assert!(error.message.contains("unreachable") && error.message.contains("culprit"), "{}", error.message);
        assert!(error.to_string().contains("guest"));
    }
}

#[test]
fn the_configuration_is_read_with_its_size_and_content() {
    let guest = Guest::on_request_headers(
        r#"(call $put (call $get_buffer (i32.const 7) (i32.const 2) (i32.const 100) (i32.const 0) (i32.const 4)))
           (call $text (i32.load (i32.const 0)) (i32.load (i32.const 4)))
           (call $put (global.get $vm)) (call $put (global.get $plugin))"#,
    )
    .also(
        r#"(global $vm (mut i32) (i32.const -1)) (global $plugin (mut i32) (i32.const -1))
           (func (export "proxy_on_vm_start") (param i32 i32) (result i32)
             (global.set $vm (local.get 1)) (local.get 0))
           (func (export "proxy_on_configure") (param i32 i32) (result i32)
             (global.set $plugin (local.get 1)) (local.get 0))"#,
    );
    let mut spec = guest.spec().with_configuration("0123456789");
    spec.vm_configuration = b"vm".to_vec();
    let rig = Rig::start(spec).unwrap();
    let mut env = request();
    assert_eq!(rig.results(&mut env), [0, 2, 10]);
    assert_eq!(crate::rig::text(&env), "23456789");
}
