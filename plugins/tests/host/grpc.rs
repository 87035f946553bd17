//! gRPC calls of guests.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use turnstile_plugins::{CallCommand, CallHandle, Callout, GrpcCallout, GrpcEvent};

use crate::rig::{Guest, Rig, data, map};

/// A guest that makes a call (`$unary`, `$stream`) on request headers and notes each event as a letter with two numbers.
fn guest(service: &[u8], body: &str, trailing: &str) -> Guest {
    let metadata = map(&[("x-m", "1")]);
    Guest::on_request_headers(body).also(&format!(
        r#"{}{}{}
        (data (i32.const 400) "pkg.Servicemethodhello")
        (func $unary (result i32)
          (call $grpc_call (i32.const 100) (i32.const {len}) (i32.const 400) (i32.const 11) (i32.const 411) (i32.const 6)
            (i32.const 200) (i32.const {meta}) (i32.const 417) (i32.const 5) (i32.const 300) (i32.const 900)))
        (func $stream (result i32)
          (call $grpc_stream (i32.const 100) (i32.const {len}) (i32.const 400) (i32.const 11) (i32.const 411) (i32.const 6)
            (i32.const 200) (i32.const {meta}) (i32.const 900)))
        (func $token (result i32) (i32.load (i32.const 900)))
        (func $event (param $letter i32) (param $root i32) (param $token i32) (param $n i32)
          (if (i32.ne (local.get $root) (i32.const 1)) (then unreachable))
          (i32.store8 (i32.const 910) (local.get $letter))
          (i32.store8 (i32.const 911) (i32.add (i32.const 48) (local.get $token)))
          (i32.store8 (i32.const 912) (i32.add (i32.const 48) (local.get $n)))
          (drop (call $log (i32.const 2) (i32.const 910) (i32.const 3))))
        (func $show (param $buffer i32)
          (if (call $get_buffer (local.get $buffer) (i32.const 0) (i32.const 100) (i32.const 0) (i32.const 4)) (then unreachable))
          (drop (call $log (i32.const 2) (i32.load (i32.const 0)) (i32.load (i32.const 4)))))
        (data (i32.const 500) "x-e")
        (func $read (param $map i32)
          (if (call $get_header (local.get $map) (i32.const 500) (i32.const 3) (i32.const 0) (i32.const 4)) (then unreachable)))
        (func (export "proxy_on_grpc_receive_initial_metadata") (param i32 i32 i32)
          (call $event (i32.const 105) (local.get 0) (local.get 1) (local.get 2)) (call $read (i32.const 4)))
        (func (export "proxy_on_grpc_receive") (param i32 i32 i32)
          (call $event (i32.const 109) (local.get 0) (local.get 1) (local.get 2)) (call $show (i32.const 5)))
        (func (export "{trailing}") (param i32 i32 i32)
          (call $event (i32.const 116) (local.get 0) (local.get 1) (local.get 2)) (call $read (i32.const 5)))
        (func (export "proxy_on_grpc_close") (param i32 i32 i32)
          (call $event (i32.const 99) (local.get 0) (local.get 1) (local.get 2))
          (drop (call $get_status (i32.const 8) (i32.const 12) (i32.const 16)))
          (if (i32.ne (i32.load (i32.const 8)) (local.get 2)) (then unreachable))
          (drop (call $log (i32.const 2) (i32.load (i32.const 12)) (i32.load (i32.const 16)))))"#,
        data(100, service),
        data(200, &metadata),
        "",
        len = service.len(),
        meta = metadata.len(),
    ))
}

const LONG: &str = "proxy_on_grpc_receive_trailing_metadata";
const SHORT: &str = "proxy_on_grpc_trailing_metadata";

fn started(rig: &Rig) -> (CallHandle, GrpcCallout) {
    match rig.call() {
        (handle, Callout::Grpc(callout)) => (handle, callout),
        other => panic!("{other:?}"),
    }
}

fn metadata() -> HeaderMap {
    let mut map = HeaderMap::new();
    map.insert("x-e", HeaderValue::from_static("1"));
    map
}

fn close(status: u32, message: &str) -> GrpcEvent {
    GrpcEvent::Close { status, message: message.to_owned() }
}

#[test]
fn a_unary_call_ends_with_its_message() {
    let rig = guest(b"auth", "(call $put (call $unary))", LONG).start();
    assert_eq!(rig.results_of_request(), [0]);
    let (mut handle, callout) = started(&rig);
    assert_eq!(
        (callout.upstream.as_str(), callout.service.as_str(), callout.method.as_str()),
        ("auth", "pkg.Service", "method")
    );
    assert_eq!((callout.message, callout.timeout), (Some(Bytes::from("hello")), Some(Duration::from_millis(300))));
    assert_eq!(callout.metadata["x-m"], "1");
    assert!(!handle.grpc(GrpcEvent::Message("hi".into())).unwrap());
    assert_eq!(rig.lines(), ["m12", "hi"]);
    assert!(!handle.grpc(close(0, "late")).unwrap());
    drop(handle);
    assert!(rig.lines().is_empty());
    assert_eq!(rig.plugin.stats().open_calls, 0);
}

#[test]
fn a_unary_call_that_fails_ends_with_its_status() {
    let rig = guest(b"auth", "(call $put (call $unary))", LONG).start();
    rig.results_of_request();
    let (mut handle, _) = started(&rig);
    assert!(!handle.grpc(close(7, "denied")).unwrap());
    assert_eq!(rig.lines(), ["c17", "denied"]);

    rig.results_of_request();
    drop(started(&rig));
    assert_eq!(rig.lines()[0], "c2>", "14, unavailable");
}

#[test]
fn a_stream_tells_everything_in_order_and_ends_with_its_close() {
    for trailing in [LONG, SHORT] {
        let rig = guest(
            b"auth",
            "(call $put (call $stream))
             (call $put (call $grpc_send (call $token) (i32.const 417) (i32.const 5) (i32.const 0)))
             (call $put (call $grpc_send (call $token) (i32.const 417) (i32.const 1) (i32.const 1)))
             (call $put (call $grpc_send (call $token) (i32.const 417) (i32.const 1) (i32.const 0)))",
            trailing,
        )
        .start();
        assert_eq!(rig.results_of_request(), [0, 0, 0, 2], "nothing after the end");
        let mut commands = rig.commands().into_iter();
        let Some(CallCommand::Start(mut handle, callout)) = commands.next() else { panic!() };
        let Callout::Grpc(callout) = *callout else { panic!() };
        assert_eq!(callout.message, None);
        let id = handle.id();
        assert!(
            matches!(commands.next(), Some(CallCommand::Send { id: to, message, end: false }) if to == id && message == "hello")
        );
        assert!(
            matches!(commands.next(), Some(CallCommand::Send { id: to, message, end: true }) if to == id && message == "h")
        );
        assert!(commands.next().is_none());
        for event in [
            GrpcEvent::InitialMetadata(metadata()),
            GrpcEvent::Message("a".into()),
            GrpcEvent::Message("".into()),
            GrpcEvent::TrailingMetadata(metadata()),
        ] {
            assert!(handle.grpc(event).unwrap());
        }
        assert!(!handle.grpc(close(0, "")).unwrap());
        assert_eq!(rig.lines(), ["i11", "m11", "a", "m10", "", "t11", "c10", ""]);
    }
}

#[test]
fn a_cancelled_call_is_heard_of_no_more() {
    for begin in ["$unary", "$stream"] {
        let rig = guest(
            b"auth",
            &format!(
                "(drop (call {begin})) (call $put (call $grpc_cancel (call $token)))
                 (call $put (call $grpc_cancel (call $token))) (call $put (call $grpc_close (call $token)))"
            ),
            LONG,
        )
        .start();
        assert_eq!(rig.results_of_request(), [0, 1, 1]);
        let mut commands = rig.commands();
        assert!(matches!(commands.pop(), Some(CallCommand::Cancel(_))));
        let Some(CallCommand::Start(mut handle, _)) = commands.pop() else { panic!() };
        assert!(!handle.grpc(GrpcEvent::Message("a".into())).unwrap());
        drop(handle);
        assert!(rig.lines().is_empty());
    }
}

#[test]
fn closing_a_stream_still_hears_and_closing_a_unary_call_breaks_it_off() {
    let close_twice = "(call $put (call $grpc_close (call $token))) (call $put (call $grpc_close (call $token)))";
    let rig = guest(b"auth", &format!("(drop (call $stream)) {close_twice}"), LONG).start();
    assert_eq!(rig.results_of_request(), [0, 0]);
    let mut commands = rig.commands();
    assert_eq!(commands.len(), 2);
    assert!(matches!(commands.pop(), Some(CallCommand::Close(_))));
    let Some(CallCommand::Start(mut handle, _)) = commands.pop() else { panic!() };
    assert!(handle.grpc(GrpcEvent::Message("a".into())).unwrap());

    let rig = guest(b"auth", &format!("(drop (call $unary)) {close_twice}"), LONG).start();
    assert_eq!(rig.results_of_request(), [0, 1]);
    assert!(matches!(rig.commands().last(), Some(CallCommand::Cancel(_))));
}

#[test]
fn a_service_is_a_name_or_envoys_description() {
    let known = b"\x0a\x06\x0a\x04auth";
    let unknown = b"\x0a\x06\x0a\x04else";
    for (service, status) in [(&known[..], 0), (b"auth", 0), (unknown, 10), (b"else", 10), (b"\xff\xff", 4)] {
        let rig = guest(service, "(call $put (call $unary))", LONG).start();
        assert_eq!(rig.results_of_request(), [status], "{service:?}");
    }
}
