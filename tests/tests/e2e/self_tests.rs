//! Self-tests: what a plugin meets in one is what it meets live, and nothing of it stays.

use crate::reload::reload;
use std::sync::atomic::{AtomicU32, Ordering};
use turnstile_tests::harness::{CHAT, Guest, PluginText, Rig, Setup, built_in, chat};

const TURN: &str = r#"{"body": {"model": "m", "stream": true, "messages": [{"role": "user", "content": "Hi"}]}}"#;

const TRAPS_UNLESS_OK: &str = "(if (local.get $n) (then unreachable))";

/// The plugin `tried`, in front of the usual chain.
fn tried(file: &str, phase: &'static str) -> Vec<PluginText> {
    let text = PluginText::new("tried", file, phase)
        .key("self_test = \"turn.json\"")
        .key("upstreams = [\"service\"]")
        .key("pause_timeout_ms = 500")
        .key("callback_timeout_ms = 60000");
    std::iter::once(text).chain(built_in()).collect()
}

/// A gateway in which the plugin has not been started yet.
async fn rig() -> Rig {
    // Nobody listens there: a call that was made would fail, and one that is not allowed could not be made.
    Setup::new().upstream("service", "http://127.0.0.1:9", "").file("turn.json", TURN).start().await
}

/// Brings a module that is like no other: why it was refused, if it was.
async fn bring(rig: &mut Rig, phase: &'static str, guest: &Guest) -> Option<String> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let unique = NEXT.fetch_add(1, Ordering::Relaxed);
    let file = format!("tried-{unique}.wasm");
    let guest = guest.clone().data(1000, &unique.to_le_bytes());
    std::fs::write(rig.dir().join(&file), guest.wasm()).unwrap();
    let before = rig.gateway().generation.load().number;
    rig.edit(|setup| setup.set_plugins(&tried(&file, phase)));
    let answer = reload(rig).await;
    if answer.status == 200 {
        rig.generation(before + 1).await;
        return None;
    }
    assert_eq!((answer.status, rig.gateway().generation.load().number), (400, before), "{}", answer.text());
    let message = answer.error()["message"].as_str().unwrap().to_owned();
    assert!(message.contains("plugins.tried: self_test ") && message.contains("turn.json"), "{message}");
    Some(message)
}

/// A callback that traps unless it can read each of these.
fn reads(callback: &str, parameters: usize, properties: &[&str], from: usize) -> String {
    let (mut reading, mut data, mut at) = (String::new(), String::new(), from);
    for name in properties {
        let len = name.len();
        reading.push_str(&format!(
            "(if (call $get_property (i32.const {at}) (i32.const {len}) (i32.const 2000) (i32.const 2004)) (then unreachable))"
        ));
        data.push_str(&format!("(data (i32.const {at}) {name:?})"));
        at += len;
    }
    let parameters = "i32 ".repeat(parameters);
    format!("{data} (func (export {callback:?}) (param {parameters}) (result i32) {reading} (i32.const 0))")
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_filter_reads_live_it_reads_in_its_self_test_in_requests_and_answers() {
    let request = [
        "request.path",
        "request.method",
        "request.host",
        "request.id",
        "request.protocol",
        "request.size",
        "request.time",
        "source.address",
        "source.port",
        "connection.id",
        "connection.mtls",
        "destination.address",
        "route_name",
        "cluster_name",
    ];
    let response = ["response.code", "response.size", "response.headers", "upstream.address", "upstream.port"];
    let guest = Guest::new(&reads("proxy_on_request_headers", 3, &request, 4096))
        .also(&reads("proxy_on_request_body", 3, &request, 4500))
        .also(&reads("proxy_on_response_headers", 3, &response, 4900))
        .also(&reads("proxy_on_response_body", 3, &response, 5100));
    let mut rig = rig().await;
    assert_eq!(bring(&mut rig, "filter", &guest).await, None);
    assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200, "nor does it trap live");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_policy_reads_live_it_reads_in_its_self_test() {
    let properties = ["request.path", "request.id", "source.address", "connection.id"];
    let mut rig = rig().await;
    for phase in ["admit", "route"] {
        let guest = Guest::new(&reads("proxy_on_request_headers", 3, &properties, 4096));
        assert_eq!(bring(&mut rig, phase, &guest).await, None, "{phase}");
        assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200, "{phase}");
    }
}

/// Calls in the request's headers and waits for the reply, in which it does this.
fn caller(reply: &str) -> Guest {
    Guest::new(&format!(
        r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (local $n i32)
             (local.set $n (call $call)) {TRAPS_UNLESS_OK} (i32.const 1))
           (func (export "proxy_on_http_call_response") (param i32 i32 i32 i32 i32) {reply})"#
    ))
    .calls("service", "/check", 0)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_is_taken_in_a_self_test_and_fails_by_the_callback_of_replies() {
    // The context of a request is 2 or more; the only one here is that which waits.
    let goes_on = caller("(drop (call $effective (i32.const 2))) (drop (call $continue_stream (i32.const 0)))");
    // A failed call has no headers.
    let only_failed = caller(
        "(if (local.get 2) (then unreachable))
         (drop (call $effective (i32.const 2))) (drop (call $continue_stream (i32.const 0)))",
    );
    let answers = caller(
        "(drop (call $effective (i32.const 2)))
         (drop (call $respond (i32.const 503) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)
           (i32.const 0) (i32.const -1)))",
    );
    let mut rig = rig().await;
    for phase in ["filter", "route", "admit"] {
        assert_eq!(bring(&mut rig, phase, &goes_on).await, None, "{phase}");
        assert_eq!(bring(&mut rig, phase, &only_failed).await, None, "{phase}");
        assert_eq!(bring(&mut rig, phase, &answers).await, None, "{phase}: it fails closed");
        let message = bring(&mut rig, phase, &caller("unreachable")).await.unwrap();
        assert!(message.contains("unreachable"), "{phase}: {message}");
        let message = bring(&mut rig, phase, &caller("")).await.unwrap();
        let wanted = "paused in proxy_on_request_headers, and did not go on when it was told";
        assert!(message.contains(wanted), "{phase}: {message}");
        // Each reply makes another call.
        let message = bring(&mut rig, phase, &caller("(drop (call $call))")).await.unwrap();
        assert!(message.contains(wanted), "{phase}: {message}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_the_plugin_may_not_make_is_not_taken() {
    let guest = Guest::new(&format!(
        r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (local $n i32)
             (local.set $n (call $call)) {TRAPS_UNLESS_OK} (i32.const 0))"#
    ))
    .calls("elsewhere", "/check", 0);
    let message = bring(&mut rig().await, "filter", &guest).await.unwrap();
    assert!(message.contains("unreachable"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_that_stays_paused_is_refused_by_the_callback_it_paused_in() {
    let pauses = |callback: &str| {
        Guest::new(&format!("(func (export {callback:?}) (param i32 i32 i32) (result i32) (i32.const 1))"))
    };
    let mut rig = rig().await;
    for callback in
        ["proxy_on_request_headers", "proxy_on_request_body", "proxy_on_response_headers", "proxy_on_response_body"]
    {
        let message = bring(&mut rig, "filter", &pauses(callback)).await.unwrap();
        assert!(message.contains(&format!("paused in {callback}, and with no call outstanding")), "{message}");
    }
    for phase in ["admit", "route"] {
        let message = bring(&mut rig, phase, &pauses("proxy_on_request_headers")).await.unwrap();
        assert!(message.contains("paused in proxy_on_request_headers"), "{message}");
    }
    // A tick ends this one.
    let ticks = pauses("proxy_on_request_headers").also(
        r#"(func (export "proxy_on_configure") (param i32 i32) (result i32) (drop (call $set_tick (i32.const 100))) (i32.const 1))
           (func (export "proxy_on_tick") (param i32)
             (drop (call $effective (i32.const 2))) (drop (call $continue_stream (i32.const 0))))"#,
    );
    assert_eq!(bring(&mut rig, "filter", &ticks).await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_that_traps_in_the_answer_is_refused() {
    let mut rig = rig().await;
    for callback in ["proxy_on_response_headers", "proxy_on_response_body"] {
        let guest = Guest::new(&format!("(func (export {callback:?}) (param i32 i32 i32) (result i32) unreachable)"));
        let message = bring(&mut rig, "filter", &guest).await.unwrap();
        assert!(message.contains("unreachable"), "{callback}: {message}");
    }
    let log = Guest::new(r#"(func (export "proxy_on_log") (param i32) unreachable)"#)
        .also(r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (i32.const 0))"#);
    assert!(bring(&mut rig, "filter", &log).await.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_and_shared_data_of_a_self_test_are_nobodys_afterwards() {
    // Counts requests, and traps where one was counted in its shared data before.
    let guest = Guest::on_request(
            "(drop (call $define_metric (i32.const 0) (i32.const 4096) (i32.const 5) (i32.const 2000)))
             (drop (call $increment (i32.load (i32.const 2000)) (i64.const 1)))
             (if (i32.eqz (call $get_shared (i32.const 4096) (i32.const 5) (i32.const 2000) (i32.const 2004) (i32.const 2008)))
               (then unreachable))
             (drop (call $set_shared (i32.const 4096) (i32.const 5) (i32.const 4096) (i32.const 5) (i32.const 0)))",
        )
        .import(r#"(import "env" "proxy_increment_metric" (func $increment (param i32 i64) (result i32)))"#)
        .data(4096, b"tests");
    let counted = async |rig: &Rig| {
        let text = rig.admin("/metrics").await.text();
        let series = "turnstile_plugin_custom{plugin=\"tried\",name=\"tests\"} ";
        text.lines().find_map(|line| line.strip_prefix(series)).map(str::to_owned)
    };
    let mut rig = rig().await;
    for phase in ["filter", "route"] {
        for _ in 0..2 {
            assert_eq!(bring(&mut rig, phase, &guest).await, None, "{phase}");
        }
    }
    assert_eq!(counted(&rig).await, None);
    // What is live counts, and a self-test neither adds to that nor finds what was written.
    assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200);
    assert_eq!(counted(&rig).await, Some("1".to_owned()));
    assert_eq!(bring(&mut rig, "route", &guest).await, None);
    assert_eq!(counted(&rig).await, Some("1".to_owned()));
}
