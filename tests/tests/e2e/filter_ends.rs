//! How filters see the end of a request: every answer, whoever gives it, and `on_log`, `on_done`, `on_delete` once.

use serde_json::{Value, json};
use turnstile_sim::{Fault, FaultKind, Place};
use turnstile_tests::harness::{
    Answer, CHAT, PluginText, Request, Rig, Setup, WorkerExt, built_in, chat, chat_stream, module, until,
};

/// A filter that does nothing but count its calls.
const COUNTING: &str = r#"(module
  (import "env" "proxy_define_metric" (func $define (param i32 i32 i32 i32) (result i32)))
  (import "env" "proxy_increment_metric" (func $add (param i32 i64) (result i32)))
  (memory (export "memory") 1)
  (data (i32.const 100) "request response body log done delete")
  (func $count (param $at i32) (param $length i32)
    (drop (call $define (i32.const 0) (local.get $at) (local.get $length) (i32.const 0)))
    (drop (call $add (i32.load (i32.const 0)) (i64.const 1))))
  (func (export "proxy_abi_version_0_2_1"))
  (func (export "proxy_on_memory_allocate") (param i32) (result i32) (i32.const 4096))
  (func (export "proxy_on_context_create") (param i32 i32))
  (func (export "proxy_on_vm_start") (param i32 i32) (result i32) (i32.const 1))
  (func (export "proxy_on_configure") (param i32 i32) (result i32) (i32.const 1))
  (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
    (call $count (i32.const 100) (i32.const 7)) (i32.const 0))
  (func (export "proxy_on_response_headers") (param i32 i32 i32) (result i32)
    (call $count (i32.const 108) (i32.const 8)) (i32.const 0))
  (func (export "proxy_on_response_body") (param i32 i32 i32) (result i32)
    (if (local.get 2) (then (call $count (i32.const 117) (i32.const 4)))) (i32.const 0))
  (func (export "proxy_on_log") (param i32) (call $count (i32.const 122) (i32.const 3)))
  (func (export "proxy_on_done") (param i32) (result i32)
    (call $count (i32.const 126) (i32.const 4)) (i32.const 1))
  (func (export "proxy_on_delete") (param i32) (call $count (i32.const 131) (i32.const 6))))"#;

fn counting(name: &str) -> PluginText {
    PluginText::new(name, "counting.wasm", "filter")
}

fn hello() -> PluginText {
    PluginText::new("hello", module("test/hello").display().to_string(), "filter")
}

fn with(filters: &[PluginText]) -> Setup {
    let all: Vec<PluginText> = filters.iter().cloned().chain(built_in()).collect();
    Setup::new().set("retry.attempts", "1").file("counting.wasm", wat::parse_str(COUNTING).unwrap()).plugins(&all)
}

async fn counted(rig: &Rig, plugin: &str, call: &str) -> f64 {
    rig.metric("turnstile_plugin_custom", &[("plugin", plugin), ("name", call)]).await
}

/// Waits for the end of a request for a filter, and tells how often it saw the head of an answer and the end of a body.
async fn assert_ended_once(rig: &Rig, plugin: &str) -> (f64, f64) {
    until("on_delete", async || counted(rig, plugin, "delete").await > 0.0).await;
    for call in ["request", "log", "done", "delete"] {
        assert_eq!(counted(rig, plugin, call).await, 1.0, "{call}");
    }
    (counted(rig, plugin, "response").await, counted(rig, plugin, "body").await)
}

/// Sends one request through a counting filter: what came, and what the filter saw of it.
async fn through(setup: Setup, request: &Request, prepare: impl AsyncFnOnce(&Rig)) -> (Answer, (f64, f64)) {
    let rig = setup.start().await;
    prepare(&rig).await;
    let answer = rig.send(request).await;
    let seen = assert_ended_once(&rig, "counting").await;
    (answer, seen)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_of_a_worker_ends_once() {
    for body in [chat("Hello"), chat_stream("Hello")] {
        let (answer, seen) = through(with(&[counting("counting")]), &Request::json(CHAT, &body), async |_| {}).await;
        assert_eq!((answer.status, seen), (200, (1.0, 1.0)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_refused_before_it_is_a_turn_ends_once_and_its_answer_is_seen() {
    let unknown = json!({"model": "nope", "messages": []});
    let refused = json!({"text": "x", "session_params": {"id": "s"}});
    for (request, status) in [
        (Request::post(CHAT, "{"), 400),
        (Request::json(CHAT, &unknown), 404),
        (Request::json("/generate", &refused), 400),
    ] {
        let setup = with(&[counting("counting"), hello()]).pool("one", "models = [\"sim\"]", &[0]).workers(1);
        let (answer, seen) = through(setup, &request, async |_| {}).await;
        assert_eq!((answer.status, answer.complete, seen), (status, true, (1.0, 1.0)));
        assert_eq!(answer.header("x-hello-response"), Some("1"), "{}", answer.text());
        assert!(answer.json()["error"].is_object());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_can_be_changed_by_a_filter() {
    let hello = hello().key("config.append_response = \"<end>\"");
    let rig = with(&[hello]).start().await;
    let mut connection = rig.connect().await;
    for _ in 0..2 {
        connection.send(&Request::post(CHAT, "{")).await;
        let answer = connection.answer().await;
        assert_eq!((answer.status, answer.complete), (400, true));
        assert!(answer.text().ends_with("}}<end>"), "{}", answer.text());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workers_error_is_seen_as_the_client_gets_it() {
    for fault in [
        FaultKind::Status(400, Some("{\"message\":\"no\"}".into())),
        FaultKind::Status(500, None),
        FaultKind::ErrorEvent(503, "full".into()),
        FaultKind::Cut(Place::Head),
    ] {
        let request = Request::json(CHAT, &chat_stream("Hello"));
        let prepare = async |rig: &Rig| rig.worker().faults().add(Fault::always(fault.clone()));
        let (answer, seen) = through(with(&[counting("counting"), hello()]), &request, prepare).await;
        assert!(answer.status >= 400, "{}", answer.text());
        assert_eq!((seen, answer.header("x-hello-response")), ((1.0, 1.0), Some("1")), "{fault:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_stream_ends_once_and_the_filters_see_its_last_event() {
    let request = Request::json(CHAT, &chat_stream("Hello"));
    let prepare = async |rig: &Rig| rig.worker().faults().add(Fault::once(FaultKind::Cut(Place::Body(800))));
    let (answer, seen) = through(with(&[counting("counting")]), &request, prepare).await;
    assert_eq!((answer.complete, seen), (false, (1.0, 1.0)));
    assert!(answer.text().contains("broken_off"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_broke_off_while_it_was_held_is_shown_once() {
    let request = Request::json(CHAT, &chat("Hello"));
    let prepare = async |rig: &Rig| rig.worker().faults().add(Fault::once(FaultKind::Cut(Place::Body(50))));
    let (answer, seen) = through(with(&[counting("counting")]), &request, prepare).await;
    assert_eq!((answer.status, seen), (502, (1.0, 0.0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_ends_its_request_once_without_an_answer() {
    let rig = with(&[counting("counting")]).start().await;
    rig.worker().hold().await;
    let connection = rig.begin(&Request::json(CHAT, &chat("Hello"))).await;
    until("it is on the worker", async || rig.worker().on(CHAT).len() == 1).await;
    drop(connection);
    assert_eq!(assert_ended_once(&rig, "counting").await, (0.0, 0.0));
    rig.worker().release().await;
    rig.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filters_own_answer_is_seen_by_itself_and_by_those_before_it() {
    let rig = with(&[counting("before"), hello(), counting("behind")]).start().await;
    let answer = rig.send(&Request::json(CHAT, &chat("Hello")).header("x-block", "1")).await;
    assert_eq!((answer.status, answer.header("x-hello-response")), (403, Some("1")), "as in Envoy");
    assert_eq!(assert_ended_once(&rig, "before").await, (1.0, 1.0));
    for call in ["request", "response", "log", "done"] {
        assert_eq!(counted(&rig, "behind", call).await, 0.0, "{call}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_filter_closes_for_those_before_it_too() {
    let rig = with(&[counting("before"), hello()]).start().await;
    let answer = rig.send(&Request::json(CHAT, &chat("Hello")).header("x-trap", "1")).await;
    assert_eq!((answer.status, &answer.error()["code"]), (500, &Value::from("plugin_failed")));
    assert_eq!(assert_ended_once(&rig, "before").await, (1.0, 1.0));
}
