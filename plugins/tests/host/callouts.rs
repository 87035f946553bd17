//! HTTP calls of guests: what may be asked, how the answer comes back, and who is told when nobody is left.

use std::time::Duration;

use http::{HeaderMap, HeaderValue, Method, StatusCode};
use turnstile_plugins::{CallCommand, Callout, HttpCallout, HttpReply};

use crate::rig::{Guest, Rig, data, map, request};

/// `$dispatch` calls what stands at 100 with the headers at 200 and puts the status; the token is at 900.
fn dispatcher(upstream: &str, headers: &[u8], timeout_ms: i32) -> String {
    format!(
        r#"{}{}{}
        (func $dispatch
          (call $put (call $http_call (i32.const 100) (i32.const {}) (i32.const 200) (i32.const {})
            (i32.const 600) (i32.const 4) (i32.const 0) (i32.const 0) (i32.const {timeout_ms}) (i32.const 900))))"#,
        data(100, upstream.as_bytes()),
        data(200, headers),
        data(600, b"ping"),
        upstream.len(),
        headers.len()
    )
}

const HEADERS: [(&str, &str); 5] =
    [(":method", "POST"), (":path", "/check?x=1"), (":authority", "auth.test"), ("x-a", "1"), ("content-length", "9")];

fn asking() -> Guest {
    Guest::on_request_headers("(call $dispatch)").also(&dispatcher("auth", &map(&HEADERS), 250))
}

/// Notes what it is told: the arguments, then the status of reading map 6 and buffer 4 and what `proxy_get_status` says.
const LISTENER: &str = r#"
(data (i32.const 700) "x-reply")
(func (export "proxy_on_http_call_response") (param $root i32) (param $token i32) (param $h i32) (param $b i32) (param $t i32)
  (call $put (local.get $root)) (call $put (local.get $token))
  (call $put (local.get $h)) (call $put (local.get $b)) (call $put (local.get $t))
  (call $put (call $get_header (i32.const 6) (i32.const 700) (i32.const 7) (i32.const 0) (i32.const 4)))
  (call $put (call $get_buffer (i32.const 4) (i32.const 0) (i32.const 100) (i32.const 0) (i32.const 4)))
  (if (i32.load (i32.const 4)) (then (drop (call $log (i32.const 2) (i32.load (i32.const 0)) (i32.load (i32.const 4))))))
  (call $put (call $get_status (i32.const 8) (i32.const 12) (i32.const 16)))
  (call $put (i32.load (i32.const 8)))
  (if (i32.load (i32.const 16)) (then (drop (call $log (i32.const 2) (i32.load (i32.const 12)) (i32.load (i32.const 16))))))
  (call $keep))
;; the results, to shared data: there is no stream here
(func $keep
  (drop (call $set_shared (i32.const 3072) (i32.const 7) (i32.const 1024) (global.get $results) (i32.const 0)))
  (global.set $results (i32.const 0)))
"#;

fn told(rig: &Rig) -> Option<Vec<i32>> {
    let (bytes, _) = rig.gateway.shared.data.space("guest").get(b"results")?;
    Some(bytes.chunks_exact(4).map(|chunk| i32::from_le_bytes(chunk.try_into().unwrap())).collect())
}

fn reply() -> HttpReply {
    let mut headers = HeaderMap::new();
    headers.insert("x-reply", HeaderValue::from_static("yes"));
    HttpReply { status: StatusCode::CREATED, headers, body: "pong".into(), trailers: HeaderMap::new() }
}

#[test]
fn a_call_goes_out_whole_after_the_guest_has_returned() {
    let rig = asking().start();
    assert_eq!(rig.results_of_request(), [0]);
    let (_handle, callout) = rig.call();
    let Callout::Http(HttpCallout { upstream, method, path, authority, headers, body, timeout, .. }) = callout else {
        panic!("{callout:?}")
    };
    assert_eq!((upstream.as_str(), method, path.as_str()), ("auth", Method::POST, "/check?x=1"));
    assert_eq!((authority.as_str(), &body[..], timeout), ("auth.test", &b"ping"[..], Some(Duration::from_millis(250))));
    assert_eq!(headers.len(), 1, "framing is not the guest's: {headers:?}");
    assert_eq!(headers["x-a"], "1");
    assert_eq!(rig.plugin.stats().open_calls, 1);
}

#[test]
fn an_answer_comes_to_the_root_and_can_be_read_only_then() {
    let read = "(call $put (call $get_header (i32.const 6) (i32.const 700) (i32.const 7) (i32.const 0) (i32.const 4)))
                (call $put (call $get_buffer (i32.const 4) (i32.const 0) (i32.const 9) (i32.const 0) (i32.const 4)))";
    let rig = Guest::on_request_headers(&format!("(call $dispatch) {read}"))
        .also(&dispatcher("auth", &map(&HEADERS), 0))
        .also(LISTENER)
        .start();
    assert_eq!(rig.results_of_request(), [0, 1, 1], "no answer, nothing to read");
    let (handle, _) = rig.call();
    handle.http(Ok(reply())).unwrap();
    assert_eq!(told(&rig).unwrap(), [1, 1, 2, 4, 0, 0, 0, 0, 0]);
    assert_eq!(rig.lines(), ["pong"]);
    assert_eq!(rig.plugin.stats().open_calls, 0);
    assert_eq!(rig.results_of_request(), [0, 1, 1], "the answer is gone");
}

#[test]
fn a_failed_call_is_told_with_zeros_and_its_reason() {
    let rig = asking().also(LISTENER).start();
    rig.results_of_request();
    rig.call().0.http(Err("connection refused".into())).unwrap();
    assert_eq!(told(&rig).unwrap(), [1, 1, 0, 0, 0, 1, 1, 0, 11]);
    assert_eq!(rig.lines(), ["connection refused"]);
}

#[test]
fn a_call_that_the_gateway_drops_has_failed() {
    let rig = asking().also(LISTENER).start();
    rig.results_of_request();
    drop(rig.call());
    assert_eq!(told(&rig).unwrap(), [1, 1, 0, 0, 0, 1, 1, 0, 11]);
    assert_eq!(rig.plugin.stats().open_calls, 0);
}

#[test]
fn what_cannot_be_called_is_a_bad_argument() {
    let without = |name: &str| map(&HEADERS.into_iter().filter(|(n, _)| *n != name).collect::<Vec<_>>());
    let with = |name: &'static str, value: &'static str| {
        map(&HEADERS.map(|(n, v)| if n == name { (n, value) } else { (n, v) }))
    };
    let cases = [
        ("nowhere", map(&HEADERS), 0),
        ("", map(&HEADERS), 0),
        ("auth", without(":method"), 0),
        ("auth", without(":path"), 0),
        ("auth", without(":authority"), 0),
        ("auth", with(":path", "check"), 0),
        ("auth", with(":path", "/a b"), 0),
        ("auth", with(":method", "PO ST"), 0),
        ("auth", with("x-a", "1\r\nx-b: 2"), 0),
        ("auth", map(&HEADERS), -1),
        ("auth", b"\x09\0\0\0".to_vec(), 0),
    ];
    for (upstream, headers, timeout) in cases {
        let rig = Guest::on_request_headers("(call $dispatch)").also(&dispatcher(upstream, &headers, timeout)).start();
        assert_eq!(rig.results_of_request(), [2], "{upstream} {headers:?} {timeout}");
        assert!(rig.commands().is_empty());
    }
}

#[test]
fn calls_are_bounded_per_stream_and_per_plugin() {
    let twice = "(call $dispatch) (call $dispatch) (call $dispatch)";
    let guest = Guest::on_request_headers(twice).also(&dispatcher("auth", &map(&HEADERS), 0));
    let mut spec = guest.spec();
    spec.limits.callouts_per_stream = 2;
    spec.limits.callouts = 3;
    let rig = Rig::start(spec).unwrap();
    let (mut first, mut second) = (rig.stream(), rig.stream());
    let mut env = request();
    first.on_request_headers(&mut env, true).unwrap();
    assert_eq!(crate::rig::results(&env), [0, 0, 10]);
    second.on_request_headers(&mut env, true).unwrap();
    assert_eq!(crate::rig::results(&env), [0, 10, 10]);
    let commands = rig.commands();
    assert_eq!(commands.len(), 3);
    drop(commands);
    assert_eq!(rig.plugin.stats().open_calls, 0);
    second.on_request_headers(&mut env, true).unwrap();
    assert_eq!(crate::rig::results(&env), [0, 0, 10], "ended calls make room");
}

#[test]
fn a_body_over_the_limit_is_refused() {
    let mut spec = asking().spec();
    spec.limits.callout_body_bytes = 3;
    assert_eq!(Rig::start(spec).unwrap().results_of_request(), [10]);
}

#[test]
fn root_contexts_call_too_from_configure_ticks_and_replies() {
    let rig = Guest::new(
        r#"(func (export "proxy_on_configure") (param i32 i32) (result i32)
             (call $dispatch) (drop (call $set_tick (i32.const 10))) (i32.const 1))
           (func (export "proxy_on_tick") (param i32) (call $dispatch) (drop (call $set_tick (i32.const 0))))
           (func (export "proxy_on_http_call_response") (param i32 i32 i32 i32 i32)
             (drop (call $log (i32.const 2) (i32.const 100) (i32.const 4)))
             (if (i32.eq (local.get 1) (i32.const 1)) (then (call $dispatch))))"#,
    )
    .also(&dispatcher("auth", &map(&HEADERS), 0))
    .start();
    let (configured, _) = rig.call();
    configured.http(Ok(reply())).unwrap();
    let (from_reply, _) = rig.call();
    from_reply.http(Ok(reply())).unwrap();
    for now in [0, 10, 20, 30] {
        assert!(rig.plugin.tick(now).faults.is_empty());
    }
    rig.call().0.http(Ok(reply())).unwrap();
    assert_eq!(rig.lines().len(), 3);
}

#[test]
fn an_answer_for_a_stream_that_is_gone_comes_to_the_root() {
    let rig = asking().also(LISTENER).start();
    let mut env = request();
    let mut stream = rig.stream();
    stream.on_request_headers(&mut env, true).unwrap();
    stream.finish(&mut env).unwrap();
    rig.call().0.http(Ok(reply())).unwrap();
    assert_eq!(told(&rig).unwrap(), [1, 1, 2, 4, 0, 0, 0, 0, 0]);
}

#[test]
fn calls_of_a_client_that_left_are_broken_off() {
    let rig = asking().also(LISTENER).start();
    let mut env = request();
    let mut stream = rig.stream();
    stream.on_request_headers(&mut env, true).unwrap();
    assert!(stream.has_calls());
    let (handle, _) = rig.call();
    stream.cancel_calls();
    assert!(!stream.has_calls());
    assert_eq!(told(&rig).unwrap(), [1, 1, 0, 0, 0, 1, 1, 0, 11]);
    assert!(matches!(rig.commands()[..], [CallCommand::Cancel(id)] if id == handle.id()));
    stream.finish(&mut env).unwrap();
    rig.gateway.shared.data.space("guest").set(b"results", b"", 0).unwrap();
    handle.http(Ok(reply())).unwrap();
    assert_eq!(told(&rig).unwrap(), [], "nobody waits for it");
}

#[test]
fn a_trap_in_the_reply_costs_the_instance_and_breaks_its_other_calls_off() {
    let rig = Guest::on_request_headers("(call $dispatch) (call $dispatch)")
        .also(&dispatcher("auth", &map(&HEADERS), 0))
        .also(r#"(func (export "proxy_on_http_call_response") (param i32 i32 i32 i32 i32) unreachable)"#)
        .start();
    let mut env = request();
    let mut stream = rig.stream();
    stream.on_request_headers(&mut env, true).unwrap();
    let mut handles = rig.commands().into_iter().map(|command| match command {
        CallCommand::Start(handle, _) => handle,
        other => panic!("{other:?}"),
    });
    let (first, second) = (handles.next().unwrap(), handles.next().unwrap());
    let fault = first.http(Ok(reply())).unwrap_err();
    assert!(fault.message.contains("proxy_on_http_call_response") || fault.message.contains("backtrace"), "{fault}");
    assert!(matches!(rig.commands()[..], [CallCommand::Cancel(id)] if id == second.id()));
    second.http(Ok(reply())).unwrap();
    assert_eq!(rig.plugin.stats().open_calls, 0);
    assert!(stream.on_request_headers(&mut env, true).is_err(), "its stream is lost");
    assert_eq!(crate::rig::header(&env, "accept").unwrap(), b"first", "its environment is not");
}
