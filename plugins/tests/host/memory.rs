//! Pointers and allocators that lie.

use turnstile_plugins::FaultKind;

use crate::rig::{Guest, Rig, request, results, text};

/// INVALID_MEMORY_ACCESS
const INVALID: i32 = 6;

#[test]
fn pointers_out_of_bounds_are_refused_and_the_guest_lives() {
    let rig = Guest::on_request_headers(
        r#"
        ;; key, then return addresses, then data, then all of it huge
        (call $put (call $get_header (i32.const 0) (i32.const -1) (i32.const 4) (i32.const 0) (i32.const 4)))
        (call $put (call $get_header (i32.const 0) (i32.const 100) (i32.const 6) (i32.const -4) (i32.const 4)))
        (call $put (call $get_header (i32.const 0) (i32.const 100) (i32.const 6) (i32.const 0) (i32.const 0x7fffffff)))
        (call $put (call $get_property (i32.const 100) (i32.const -1) (i32.const 0) (i32.const 4)))
        (call $put (call $set_property (i32.const 100) (i32.const 1) (i32.const 131071) (i32.const 2)))
        (call $put (call $log (i32.const 2) (i32.const 131072) (i32.const 1)))
        (call $put (call $time (i32.const 131068)))
        (call $put (call $set_pairs (i32.const 0) (i32.const -8) (i32.const 16)))
        (call $put (call $add_header (i32.const 0) (i32.const 100) (i32.const 6) (i32.const -1) (i32.const -1)))
        (call $put (call $define_metric (i32.const 0) (i32.const 100) (i32.const 6) (i32.const -2)))
        (call $put (call $local_response (i32.const 200) (i32.const 0) (i32.const 0) (i32.const -1) (i32.const 9)
                      (i32.const 0) (i32.const 0) (i32.const -1)))
        (call $put (call $register_queue (i32.const 100) (i32.const 6) (i32.const -1)))
        (call $put (call $get_shared (i32.const -1) (i32.const 6) (i32.const 0) (i32.const 4) (i32.const 8)))
        (call $put (call $set_shared (i32.const 100) (i32.const 6) (i32.const 131072) (i32.const 1) (i32.const 0)))
        "#,
    )
    .also(r#"(data (i32.const 100) "accept")"#)
    .start();
    assert_eq!(rig.results_of_request(), [INVALID; 14]);
    assert_eq!(rig.results_of_request(), [INVALID; 14], "the instance lives");
}

#[test]
fn the_last_byte_of_memory_can_be_used() {
    let rig = Guest::on_request_headers(
        r#"(i32.store8 (i32.const 131071) (i32.const 122))
           (call $put (call $set_property (i32.const 131071) (i32.const 1) (i32.const 131071) (i32.const 1)))
           (call $put (call $set_property (i32.const 131072) (i32.const 0) (i32.const 131072) (i32.const 0)))"#,
    )
    .start();
    let mut env = request();
    assert_eq!(rig.results(&mut env), [0, 0]);
    assert_eq!(env.properties.get(b"z".as_slice()).unwrap(), b"z");
}

#[test]
fn misaligned_and_tiny_return_addresses_work() {
    let rig = Guest::on_request_headers(
        r#"(call $put (call $get_header (i32.const 0) (i32.const 100) (i32.const 6) (i32.const 1) (i32.const 7)))
           (call $text (i32.load (i32.const 1)) (i32.load (i32.const 7)))
           (call $put (call $time (i32.const 13)))
           (call $put (i64.ne (i64.load (i32.const 13)) (i64.const 0)))
           (call $put (call $get_header (i32.const 0) (i32.const 100) (i32.const 6) (i32.const 0) (i32.const 4)))"#,
    )
    .also(r#"(data (i32.const 100) "accept")"#)
    .start();
    let mut env = request();
    assert_eq!(rig.results(&mut env), [0, 0, 1, 0]);
    assert_eq!(text(&env), "first");
}

#[test]
fn nothing_is_allocated_for_an_empty_result() {
    let rig = Guest::on_request_headers(
        r#"(i32.store (i32.const 0) (i32.const 77)) (i32.store (i32.const 4) (i32.const 77))
           (call $put (call $get_header (i32.const 0) (i32.const 100) (i32.const 7) (i32.const 0) (i32.const 4)))
           (call $put (i32.load (i32.const 0))) (call $put (i32.load (i32.const 4)))
           (call $put (call $get_buffer (i32.const 7) (i32.const 0) (i32.const 9) (i32.const 0) (i32.const 4)))"#,
    )
    .also(r#"(data (i32.const 100) "x-empty")"#)
    .allocator(r#"(func (export "malloc") (param i32) (result i32) unreachable)"#)
    .start();
    let mut env = request();
    env.request.as_mut().unwrap().fields.fields_mut().insert("x-empty", "".parse().unwrap());
    assert_eq!(rig.results(&mut env), [0, 0, 0, 0]);
}

fn fault_with_allocator(allocator: &str) -> (FaultKind, String) {
    let guest = Guest::on_request_headers(
        "(call $put (call $get_header (i32.const 0) (i32.const 100) (i32.const 6) (i32.const 0) (i32.const 4)))",
    )
    .also(r#"(data (i32.const 100) "accept")"#)
    .allocator(allocator);
    let mut spec = guest.spec();
    spec.limits.callback_deadline_ms = 1_000;
    let rig = Rig::start(spec).unwrap();
    let mut env = request();
    let fault = rig.stream().on_request_headers(&mut env, true).unwrap_err();
    assert!(env.request.is_some(), "the environment comes back");
    (fault.kind, fault.message)
}

#[test]
fn an_allocator_that_gives_nothing_or_memory_that_is_not_there_is_a_fault() {
    for answer in ["0", "131072", "131069", "-1"] {
        let allocator = format!(r#"(func (export "malloc") (param i32) (result i32) (i32.const {answer}))"#);
        let (kind, message) = fault_with_allocator(&allocator);
        assert_eq!(kind, FaultKind::Allocator, "{answer}: {message}");
    }
    let (kind, message) = fault_with_allocator("");
    assert_eq!(kind, FaultKind::Allocator);
    assert!(message.contains("malloc"), "{message}");
}

#[test]
fn an_allocator_that_traps_or_loops_is_a_fault() {
    let trap = r#"(func (export "malloc") (param i32) (result i32) unreachable)"#;
    assert_eq!(fault_with_allocator(trap).0, FaultKind::Trap);
    let spin = r#"(func (export "malloc") (param i32) (result i32) (loop $l (br $l)) (i32.const 0))"#;
    assert_eq!(fault_with_allocator(spin).0, FaultKind::Deadline, "inside the callback's own deadline");
}

#[test]
fn the_allocator_may_log_and_nothing_else() {
    let rig = Guest::on_request_headers(
        r#"(call $put (call $get_header (i32.const 0) (i32.const 100) (i32.const 6) (i32.const 0) (i32.const 4)))
           (call $put (global.get $property)) (call $put (global.get $header)) (call $put (global.get $random))
           (call $put (global.get $log_status))
           (call $put (call $set_property (i32.const 100) (i32.const 6) (i32.const 100) (i32.const 6)))"#,
    )
    .import(r#"(import "wasi_snapshot_preview1" "random_get" (func $random_get (param i32 i32) (result i32)))"#)
    .also(
        r#"(data (i32.const 100) "accept")
           (global $property (mut i32) (i32.const -1)) (global $header (mut i32) (i32.const -1))
           (global $random (mut i32) (i32.const -1)) (global $log_status (mut i32) (i32.const -1))"#,
    )
    .allocator(
        r#"(func (export "malloc") (param i32) (result i32)
             (global.set $property (call $set_property (i32.const 100) (i32.const 1) (i32.const 100) (i32.const 1)))
             (global.set $header (call $get_header (i32.const 0) (i32.const 100) (i32.const 6) (i32.const 8) (i32.const 12)))
             (global.set $random (call $random_get (i32.const 8) (i32.const 4)))
             (global.set $log_status (call $log (i32.const 2) (i32.const 100) (i32.const 6)))
             (i32.const 4096))"#,
    )
    .start();
    let mut env = request();
    assert_eq!(rig.results(&mut env), [0, 10, 10, 76, 0, 0]);
    assert_eq!(rig.lines(), ["accept"]);
    assert!(!env.properties.contains_key(b"a".as_slice()));
}

#[test]
fn memory_that_the_allocator_moved_is_found_again() {
    // Grows the memory by 64 pages on every allocation and gives out the new end.
    let rig = Guest::on_request_headers(
        r#"(call $put (call $get_header (i32.const 0) (i32.const 100) (i32.const 6) (i32.const 0) (i32.const 4)))
           (call $text (i32.load (i32.const 0)) (i32.load (i32.const 4)))"#,
    )
    .also(r#"(data (i32.const 100) "accept")"#)
    .allocator(
        r#"(func (export "malloc") (param i32) (result i32) (i32.mul (memory.grow (i32.const 64)) (i32.const 65536)))"#,
    )
    .start();
    let mut env = request();
    rig.stream().on_request_headers(&mut env, true).unwrap();
    assert_eq!((results(&env), text(&env).as_str()), (vec![0], "first"));
}
