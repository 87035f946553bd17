//! Which modules are let in.

use turnstile_plugins::{PluginSpec, StartPhase};

use crate::rig::{Guest, Rig};

fn refusal(wat: &str) -> (StartPhase, String) {
    let wasm = wat::parse_str(wat).unwrap();
    let error = Rig::start(PluginSpec::new("p", wasm)).err().expect("refused");
    (error.phase, error.message)
}

#[test]
fn a_module_without_exactly_one_known_marker_is_refused() {
    let (phase, message) = refusal(r#"(module (memory (export "memory") 1))"#);
    assert_eq!(phase, StartPhase::Marker);
    assert!(message.contains("not a Proxy-Wasm module"), "{message}");
    let (_, message) = refusal(
        r#"(module (memory (export "memory") 1)
             (func (export "proxy_abi_version_0_2_0")) (func (export "proxy_abi_version_0_2_1")))"#,
    );
    assert!(message.contains("0_2_0") && message.contains("0_2_1"), "{message}");
    let (_, message) = refusal(r#"(module (func (export "proxy_abi_version_0_9_9")))"#);
    assert!(message.contains("0_9_9"), "{message}");
}

#[test]
fn all_known_markers_are_accepted() {
    for marker in ["proxy_abi_version_0_1_0", "proxy_abi_version_0_2_0", "proxy_abi_version_0_2_1"] {
        Guest::new("").marker(marker).start();
    }
}

#[test]
fn every_missing_import_is_named_with_its_type() {
    let guest = Guest::new("")
        .import(r#"(import "env" "proxy_teleport" (func (param i32 i64) (result i32)))"#)
        .import(r#"(import "moon" "phase" (func))"#);
    let error = Rig::start(guest.spec()).err().unwrap();
    assert_eq!(error.phase, StartPhase::Link);
    assert!(error.message.contains("unknown import env.proxy_teleport: func(i32 i64) -> (i32)"), "{}", error.message);
    assert!(error.message.contains("moon.phase"), "{}", error.message);
    assert!(!error.message.contains("stub_unknown_imports"), "no stub stands in for moon.phase: {}", error.message);
}

#[test]
fn an_import_of_another_type_is_named_with_both_types() {
    let guest = Guest::new("").import(r#"(import "env" "proxy_done" (func (param i64) (result i32)))"#);
    let error = Rig::start(guest.spec()).err().unwrap();
    assert!(
        error.message.contains("env.proxy_done has type func(i64) -> (i32), this host has func() -> (i32)"),
        "{}",
        error.message
    );
}

#[test]
fn unknown_imports_answer_unimplemented_if_the_plugin_asks_for_it() {
    let guest = Guest::on_request_headers(
        "(call $put (call $teleport (i32.const 1))) (call $put (call $odd_clear (i64.const 1)))",
    )
    .import(r#"(import "env" "proxy_teleport" (func $teleport (param i32) (result i32)))"#)
    .import(r#"(import "env" "proxy_clear_route_cache" (func $odd_clear (param i64) (result i32)))"#);
    let mut spec = guest.spec();
    let error = Rig::start(spec.clone()).err().unwrap();
    for named in ["unknown import env.proxy_teleport", "env.proxy_clear_route_cache has type", "stub_unknown_imports"] {
        assert!(error.message.contains(named), "{}", error.message);
    }
    let unstubbed = spec.clone();
    spec.stub_unknown_imports = true;
    assert!(!spec.runs_as(&unstubbed), "a reload starts the plugin anew");
    let rig = Rig::start(spec.clone()).unwrap();
    assert_eq!(rig.results_of_request(), [12, 12]);
    rig.results_of_request();
    assert_eq!(rig.lines().iter().filter(|line| line.contains("UNIMPLEMENTED")).count(), 1, "said once");

    let no_status = Guest::new("").import(r#"(import "env" "emit" (func (param i32)))"#);
    spec.wasm = no_status.wasm().into();
    assert!(Rig::start(spec).is_err(), "a function without a status cannot say that it is unimplemented");
}

#[test]
fn an_export_of_another_type_is_refused_by_name() {
    let guest = Guest::new(r#"(func (export "proxy_on_log") (param i64))"#);
    let error = Rig::start(guest.spec()).err().unwrap();
    assert_eq!(error.phase, StartPhase::Link);
    assert!(error.message.contains("proxy_on_log") && error.message.contains("i64"), "{}", error.message);
}

#[test]
fn bytes_that_are_no_module_are_refused() {
    for wasm in [b"".to_vec(), b"not wasm".to_vec(), b"\0asm\x01\0\0\0\xff\xff".to_vec(), b"(module)".to_vec()] {
        let error = Rig::start(PluginSpec::new("p", wasm)).err().unwrap();
        assert_eq!(error.phase, StartPhase::Compile);
    }
}

#[test]
fn a_module_without_memory_is_refused() {
    let (phase, message) = refusal(r#"(module (func (export "proxy_abi_version_0_2_1")))"#);
    assert_eq!(phase, StartPhase::Instantiate);
    assert!(message.contains("no memory"), "{message}");
}

#[test]
fn host_functions_work_from_the_start_section_but_only_logging() {
    let guest = Guest::new(
        r#"(data (i32.const 0) "early")
           (func $early
             (drop (call $log (i32.const 2) (i32.const 0) (i32.const 5)))
             (global.set $status (call $set_shared (i32.const 0) (i32.const 5) (i32.const 0) (i32.const 5) (i32.const 0))))
           (global $status (mut i32) (i32.const -1))
           (start $early)
           (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
             (call $put (global.get $status)) (call $flush) (i32.const 0))"#,
    );
    let rig = guest.start();
    assert_eq!(rig.lines(), ["early"]);
    assert_eq!(rig.results_of_request(), [10]);
}

#[test]
fn a_filter_of_tcp_streams_alone_is_refused() {
    let tcp = r#"(func (export "proxy_on_downstream_data") (param i32 i32 i32) (result i32) (i32.const 0))"#;
    let error = Rig::start(Guest::new(tcp).spec()).err().unwrap();
    assert_eq!(error.phase, StartPhase::Link);
    assert!(error.message.contains("proxy_on_downstream_data") && error.message.contains("TCP"), "{error}");

    // The Rust SDK exports everything.
    let http = r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (i32.const 0))"#;
    Rig::start(Guest::new(tcp).also(http).spec()).unwrap();
}
