//! What guests ask to happen to streams, log lines, time, and what is not available.

use turnstile_plugins::{Action, HttpEnv, Lent, Stream};

use crate::rig::{Guest, Rig, request, with_response};

const RESPONSE: &str = r#"
(data (i32.const 100) "details")
(data (i32.const 110) "blocked")
(data (i32.const 120) "\02\00\00\00\03\00\00\00\01\00\00\00\01\00\00\00\02\00\00\00x-a\001\00b\00\0d\0a\00")
(func $respond (param $status i32) (result i32)
  (call $local_response (local.get $status) (i32.const 100) (i32.const 7) (i32.const 110) (i32.const 7)
    (i32.const 120) (i32.const 31) (i32.const 7)))
"#;

#[test]
fn a_local_response_is_recorded_whole_and_the_first_one_counts() {
    let rig = Guest::on_request_headers(
        "(call $put (call $respond (i32.const 403))) (call $put (call $respond (i32.const 500)))",
    )
    .also(RESPONSE)
    .start();
    let mut env = request();
    let outcome = rig.stream().on_request_headers(&mut env, true).unwrap();
    assert_eq!(crate::rig::results(&env), [0, 0]);
    let response = outcome.effects.local_response.unwrap();
    assert_eq!(
        (response.status, response.details.as_str(), &response.body[..]),
        (403, "details", b"blocked".as_slice())
    );
    assert_eq!(response.grpc_status, Some(7));
    assert_eq!(response.headers.len(), 1, "a header with a line break is dropped");
    assert_eq!(response.headers[0].0, "x-a");
    assert_eq!(rig.plugin.stats().tolerated, 3, "the bad header twice, the second response once");
}

#[test]
fn a_local_response_needs_a_status_that_can_be_final() {
    for status in [0, 100, 199, 600, 65_536 + 200] {
        let rig = Guest::on_request_headers(&format!("(call $put (call $respond (i32.const {status})))"))
            .also(RESPONSE)
            .start();
        let mut env = request();
        let outcome = rig.stream().on_request_headers(&mut env, true).unwrap();
        assert_eq!(crate::rig::results(&env), [2]);
        assert!(outcome.effects.is_empty());
    }
}

#[test]
fn a_local_response_after_the_end_is_refused() {
    let rig = Guest::new(
        r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (i32.const 0))
           (func (export "proxy_on_log") (param i32)
             (call $put (call $respond (i32.const 403))) (call $flush))"#,
    )
    .also(RESPONSE);
    let mut spec = rig.spec();
    spec.lenient = false;
    let rig = Rig::start(spec).unwrap();
    let mut env = request();
    let mut stream = rig.stream();
    stream.on_request_headers(&mut env, true).unwrap();
    stream.finish(&mut env).unwrap();
    assert_eq!(crate::rig::results(&env), [2]);
}

fn outcome(
    body: &str,
    returned: i32,
    run: fn(&mut Stream, &mut Lent<HttpEnv>) -> turnstile_plugins::CallOutcome,
) -> turnstile_plugins::CallOutcome {
    let exports = ["request_headers", "response_headers", "request_body"].map(|callback| {
        format!(
            r#"(func (export "proxy_on_{callback}") (param i32 i32 i32) (result i32) {body} (i32.const {returned}))"#
        )
    });
    let rig = Guest::new(&exports.join("\n")).start();
    run(&mut rig.stream(), &mut with_response(request(), ""))
}

#[test]
fn actions_are_read_as_envoy_reads_them() {
    let headers = |returned| outcome("", returned, |stream, env| stream.on_request_headers(env, false).unwrap());
    assert_eq!((headers(0).action, headers(0).effects.end_stream), (Action::Continue, false));
    assert_eq!((headers(2).action, headers(2).effects.end_stream), (Action::Continue, true));
    for returned in [1, 3, 4, 99, -1] {
        assert_eq!(headers(returned).action, Action::Pause, "{returned}");
    }
    let body = |returned| outcome("", returned, |stream, env| stream.on_request_body(env, 0, true).unwrap());
    assert_eq!(body(2).action, Action::Pause);
}

#[test]
fn continue_and_close_are_recorded_and_bad_stream_types_refused() {
    let control = r#"
        (drop (call $continue_stream (i32.const 0))) (drop (call $close_stream (i32.const 1)))
        (if (i32.ne (call $continue_stream (i32.const 7)) (i32.const 2)) (then unreachable))
        (if (i32.ne (call $close_stream (i32.const 4)) (i32.const 2)) (then unreachable))"#;
    let outcome = outcome(control, 1, |stream, env| stream.on_request_headers(env, true).unwrap());
    assert!(outcome.effects.continue_request && outcome.effects.close_upstream);
    assert!(!outcome.effects.continue_response && !outcome.effects.close_downstream);
    assert!(!outcome.paused_request(), "paused and continued in one callback");
}

#[test]
fn the_0_1_0_spelling_of_stream_control_works_too() {
    let rig = Guest::on_request_headers("(drop (call $cr)) (drop (call $cs)) (drop (call $clear))")
        .import(r#"(import "env" "proxy_continue_request" (func $cr (result i32)))"#)
        .import(r#"(import "env" "proxy_continue_response" (func $cs (result i32)))"#)
        .import(r#"(import "env" "proxy_clear_route_cache" (func $clear (result i32)))"#)
        .start();
    let effects = rig.stream().on_request_headers(&mut request(), true).unwrap().effects;
    assert!(effects.continue_request && effects.continue_response && effects.clear_route_cache);
}

#[test]
fn calls_to_nowhere_fail_at_once_with_what_sdks_expect() {
    let zeros = |n: usize| "(i32.const 0) ".repeat(n);
    let rig = Guest::on_request_headers(&format!(
        "(call $put (call $http_call {})) (call $put (call $grpc_call {})) (call $put (call $grpc_stream {}))
         (call $put (call $grpc_send {})) (call $put (call $grpc_cancel {})) (call $put (call $grpc_close {}))
         (call $put (call $get_status (i32.const 0) (i32.const 4) (i32.const 8)))
         (call $put (call $done))",
        zeros(10),
        zeros(12),
        zeros(9),
        zeros(4),
        zeros(1),
        zeros(1),
    ))
    .start();
    for _ in 0..2 {
        assert_eq!(rig.results_of_request(), [2, 4, 4, 1, 1, 1, 0, 1]);
    }
    assert!(rig.commands().is_empty());
}

#[test]
fn effective_context_must_be_live() {
    let rig = Guest::on_request_headers(
        r#"(call $put (call $effective (i32.const 999))) (call $put (call $effective (i32.const 0)))
           (call $put (call $effective (i32.const 1)))
           ;; the root has no headers
           (call $put (call $get_header (i32.const 0) (i32.const 100) (i32.const 6) (i32.const 0) (i32.const 4)))
           (call $put (call $effective (local.get $context)))
           (call $put (call $get_header (i32.const 0) (i32.const 100) (i32.const 6) (i32.const 0) (i32.const 4)))"#,
    )
    .also(r#"(data (i32.const 100) "accept")"#)
    .start();
    assert_eq!(rig.results_of_request(), [2, 2, 0, 1, 0, 0]);
}

#[test]
fn log_lines_have_a_level_and_a_bound() {
    let rig = Guest::on_request_headers(
        r#"(call $put (call $log (i32.const 0) (i32.const 100) (i32.const 4)))
           (call $put (call $log (i32.const 5) (i32.const 100) (i32.const 4)))
           (call $put (call $log (i32.const 6) (i32.const 100) (i32.const 4)))
           (call $put (call $get_log_level (i32.const 0))) (call $put (i32.load (i32.const 0)))
           (call $put (call $log (i32.const 4) (i32.const 0) (i32.const 131072)))"#,
    )
    .also(r#"(data (i32.const 100) "line")"#)
    .start();
    assert_eq!(rig.results_of_request(), [0, 0, 2, 0, 1, 0]);
    let lines = rig.lines();
    assert_eq!(lines.len(), 2, "trace is under the gateway's level");
    assert_eq!(lines[0], "line");
    assert!(lines[1].len() <= 64 << 10, "{} bytes", lines[1].len());
}

#[test]
fn a_plugin_that_logs_too_much_is_cut_and_goes_on() {
    let guest = Guest::on_request_headers(
        r#"(local $i i32)
           (loop $again
             (drop (call $log (i32.const 2) (i32.const 100) (i32.const 4)))
             (br_if $again (i32.lt_u (local.tee $i (i32.add (local.get $i) (i32.const 1))) (i32.const 50))))"#,
    )
    .also(r#"(data (i32.const 100) "line")"#);
    let mut spec = guest.spec();
    spec.limits.log_lines_per_s = 2;
    let rig = Rig::start(spec).unwrap();
    rig.results_of_request();
    // The host adds lines of its own about what it dropped.
    let written = rig.lines().iter().filter(|line| line.as_str() == "line").count() as u64;
    let dropped = rig.plugin.stats().log_lines_dropped;
    assert_eq!(written + dropped, 50);
    assert!(dropped >= 40, "{dropped}");
}

#[test]
fn the_clock_is_the_wall_clock() {
    let rig = Guest::on_request_headers(
        r#"(call $put (call $time (i32.const 0)))
           (call $put (i32.wrap_i64 (i64.div_u (i64.load (i32.const 0)) (i64.const 1000000000))))"#,
    )
    .start();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() as i32;
    let results = rig.results_of_request();
    assert!((now..now + 60).contains(&results[1]));
}
