//! Filters that pause, in every callback, and bodies that pass them in pieces.

use serde_json::json;
use turnstile_tests::harness::{
    Answer, CHAT, Guest, PluginText, Request, Rig, Service, Setup, WorkerExt, built_in, chat, chat_stream, until,
};

/// Notes the callbacks of a request: `$note` adds a letter, and one for the plugin (the first of its name), to a property that
/// all filters of the request share; the head of the answer tells it to the client.
const NOTES: &str = r#"
(data (i32.const 600) "tracex-trace")
(func $note (param $letter i32)
  (local $n i32)
  (if (i32.eqz (call $get_property (i32.const 600) (i32.const 5) (i32.const 4104) (i32.const 4108)))
    (then
      (local.set $n (i32.load (i32.const 4108)))
      (memory.copy (i32.const 7000) (i32.load (i32.const 4104)) (local.get $n))))
  (i32.store8 (i32.add (i32.const 7000) (local.get $n)) (call $named))
  (i32.store8 (i32.add (i32.const 7001) (local.get $n)) (local.get $letter))
  (drop (call $set_property (i32.const 600) (i32.const 5) (i32.const 7000) (i32.add (local.get $n) (i32.const 2)))))
(func $tell
  (drop (call $get_property (i32.const 600) (i32.const 5) (i32.const 4104) (i32.const 4108)))
  (drop (call $replace_header (i32.const 2) (i32.const 605) (i32.const 7)
    (i32.load (i32.const 4104)) (i32.load (i32.const 4108)))))
"#;

fn noting(request_body: &str) -> Guest {
    Guest::new(&format!(
        r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
             (call $note (i32.add (i32.const 104) (local.get 2))) (i32.const 0))
           (func (export "proxy_on_request_body") (param i32 i32 i32) (result i32)
             (call $note (i32.add (i32.const 98) (local.get 2))) {request_body})
           (func (export "proxy_on_request_trailers") (param i32 i32) (result i32)
             (call $note (i32.const 116)) (i32.const 0))
           (func (export "proxy_on_response_headers") (param i32 i32 i32) (result i32)
             (call $note (i32.const 72)) (call $tell) (i32.const 0))"#
    ))
    .also(NOTES)
}

fn filter(name: &str) -> PluginText {
    PluginText::new(name, "guest.wasm", "filter").key("callback_timeout_ms = 60000").key("instances = 1")
}

async fn start(guest: &Guest, filters: &[PluginText]) -> Rig {
    with(guest, filters).start().await
}

fn with(guest: &Guest, filters: &[PluginText]) -> Setup {
    let all: Vec<PluginText> = filters.iter().cloned().chain(built_in()).collect();
    Setup::new().file("guest.wasm", guest.wasm()).plugins(&all)
}

fn trace(answer: &Answer) -> &str {
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.header("x-trace").unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn heads_pass_all_filters_before_bodies_do() {
    let rig = start(&noting("(i32.const 0)"), &[filter("A"), filter("B")]).await;
    // A body with a length ends with its last piece.
    assert_eq!(trace(&rig.post(CHAT, &chat("Hello")).await), "AhBhAcBcBHAH");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_passes_in_the_pieces_it_comes_in_and_trailers_follow() {
    let rig = start(&noting("(i32.const 0)"), &[filter("A")]).await;
    let body = chat("Hello").to_string();
    let (first, second) = body.split_at(10);
    let chunk = |text: &str| format!("{:x}\r\n{text}\r\n", text.len());
    for (end, expected) in [("0\r\n\r\n", "AhAbAbAcAH"), ("0\r\nx-t: 1\r\n\r\n", "AhAbAbAtAH")] {
        let mut connection = rig.connect().await;
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        );
        connection.write(format!("{head}{}", chunk(first)).as_bytes()).await;
        until("the first piece", async || rig.metrics().await.text().contains("turnstile_plugin_calls_total")).await;
        tokio::task::yield_now().await;
        connection.write(chunk(second).as_bytes()).await;
        connection.write(end.as_bytes()).await;
        let answer = connection.answer().await;
        // Pieces may arrive together.
        let seen = trace(&answer).replace("AbAb", "Ab");
        assert_eq!(seen, expected.replace("AbAb", "Ab"));
        assert_eq!(rig.worker().on(CHAT).last().unwrap().json()["messages"][0]["content"], "Hello");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_that_pauses_on_a_body_gets_all_of_it_at_the_end() {
    // Pauses until the end, then has the body's size in the trace as one letter more.
    let whole = "(if (result i32) (local.get 2) (then (if (i32.gt_u (local.get 1) (i32.const 100000))
                   (then (call $note (i32.const 87)))) (i32.const 0)) (else (i32.const 1)))";
    let rig = start(&noting(whole), &[filter("A"), filter("B")]).await;
    let big = chat(&"a".repeat(120_000));
    let answer = rig.send(&Request::json(CHAT, &big).chunked(10_000)).await;
    assert!(trace(&answer).ends_with("AcAWBcBWBHAH"), "{}", trace(&answer));
    assert_eq!(rig.worker().on(CHAT)[0].json()["messages"][0]["content"].as_str().unwrap().len(), 120_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_over_what_is_held_for_a_filter_is_413() {
    let rig = start(&noting("(i32.eqz (local.get 2))"), &[filter("A").key("held_body_bytes = \"64KiB\"")]).await;
    assert_eq!(rig.send(&Request::json(CHAT, &chat("Hello")).chunked(20)).await.status, 200);
    let answer = rig.send(&Request::json(CHAT, &chat(&"a".repeat(200_000))).chunked(10_000)).await;
    assert_eq!(answer.status, 413);
    assert!(answer.text().contains("filter A"), "{}", answer.text());
}

/// Pauses in `callback` and calls; the reply runs `reply` for the context that waits.
fn calling(callback: &str, reply: &str) -> Guest {
    let arguments = if callback.ends_with("trailers") { "i32 i32" } else { "i32 i32 i32" };
    Guest::new(&format!(
        r#"(data (i32.const 600) "x-afterwards1") (data (i32.const 640) "instead")
        (func (export "proxy_on_{callback}") (param {arguments}) (result i32)
          (i32.store (i32.const 4096) (local.get 0))
          (if (i32.eqz (i32.load (i32.const 4200))) (then (drop (call $call))))
          (i32.store (i32.const 4200) (i32.const 1))
          (i32.const 1))
        (func $mark (param $map i32)
          (if (call $replace_header (local.get $map) (i32.const 600) (i32.const 12) (i32.const 612) (i32.const 1))
            (then unreachable)))
        (func $instead
          (drop (call $respond (i32.const 418) (i32.const 640) (i32.const 7) (i32.const 640) (i32.const 7)
            (i32.const 0) (i32.const 0) (i32.const -1))))
        (func (export "proxy_on_http_call_response") (param i32 i32 i32 i32 i32)
          (i32.store (i32.const 4200) (i32.const 0))
          (drop (call $effective (i32.load (i32.const 4096))))
          {reply})"#
    ))
    .calls("service", "/hold", 0)
}

async fn called(service: &Service, guest: &Guest, keys: &str) -> Rig {
    let plugin = filter("caller").key("upstreams = [\"service\"]").key(keys);
    with(guest, &[plugin]).upstream("service", &service.url(), "").start().await
}

/// Sends a request that has to wait for the call, and lets it go.
async fn held_and_released(rig: &Rig, service: &Service, request: &Request, before: usize) -> Answer {
    let mut waiting = rig.begin(request).await;
    until("the call", async || service.open() == 1).await;
    assert_eq!(rig.worker().on(CHAT).len(), before);
    service.release();
    waiting.answer().await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_waits_for_a_reply_at_its_head_and_at_its_body() {
    for callback in ["request_headers", "request_body"] {
        let service = Service::start().await;
        let guest = calling(callback, "(call $mark (i32.const 0)) (drop (call $continue_stream (i32.const 0)))");
        let rig = called(&service, &guest, "").await;
        let answer = held_and_released(&rig, &service, &Request::json(CHAT, &chat("Hello")), 0).await;
        assert_eq!(answer.status, 200, "{callback}");
        assert_eq!(rig.worker().on(CHAT)[0].headers["x-afterwards"], "1", "{callback}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_waits_for_a_reply_at_its_head() {
    let service = Service::start().await;
    let guest = calling("response_headers", "(call $mark (i32.const 2)) (drop (call $continue_stream (i32.const 1)))");
    let rig = called(&service, &guest, "").await;
    for (n, body) in [chat("Hello"), chat_stream("Hello")].iter().enumerate() {
        let answer = if n == 0 {
            held_and_released(&rig, &service, &Request::json(CHAT, body), 1).await
        } else {
            rig.post(CHAT, body).await
        };
        assert_eq!((answer.status, answer.complete, answer.header("x-afterwards")), (200, true, Some("1")));
        assert!(answer.text().contains("chat.completion"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answers_body_waits_for_a_reply_and_comes_whole() {
    for body in [chat("Hello"), chat_stream("Hello [[sim:tokens=30]]")] {
        let service = Service::start().await;
        let guest = calling("response_body", "(drop (call $continue_stream (i32.const 1)))");
        let rig = called(&service, &guest, "").await;
        let answer = held_and_released(&rig, &service, &Request::json(CHAT, &body), 1).await;
        assert_eq!((answer.status, answer.complete), (200, true), "{}", answer.text());
        let plain = Setup::new().start().await.post(CHAT, &body).await;
        assert_eq!(answer.body.len(), plain.body.len(), "{}", answer.text());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reply_answers_in_place_of_what_waits() {
    for callback in ["request_headers", "request_body", "response_headers", "response_body"] {
        for body in [chat("Hello"), chat_stream("Hello")] {
            let service = Service::start().await;
            let rig = called(&service, &calling(callback, "(call $instead)"), "").await;
            let before = usize::from(callback.starts_with("response"));
            let answer = held_and_released(&rig, &service, &Request::json(CHAT, &body), before).await;
            assert_eq!((answer.status, answer.text().as_str(), answer.complete), (418, "instead", true), "{callback}");
            let record = rig.record_of(&answer).await;
            assert_eq!((&record["end"], &record["reason"]), (&json!("plugin_answer"), &json!("instead")));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_closed_breaks_off() {
    for callback in ["request_headers", "request_body", "response_headers", "response_body"] {
        for stream in [0, 1] {
            let arguments = "(param i32 i32 i32) (result i32)";
            let guest = Guest::new(&format!(
                r#"(func (export "proxy_on_{callback}") {arguments}
                     (drop (call $close_stream (i32.const {stream}))) (i32.const 0))"#
            ));
            let rig = start(&guest, &[filter("A")]).await;
            let mut connection = rig.begin(&Request::json(CHAT, &chat("Hello"))).await;
            assert!(connection.try_head().await.is_none(), "{callback}");
            until("the record", async || rig.access_log().iter().any(|r| r["end"] == "plugin_close")).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_that_waits_for_nothing_has_failed_after_its_time() {
    for callback in ["request_headers", "request_body", "response_headers", "response_body"] {
        for (on_error, status) in [("closed", 500), ("open", 200)] {
            let guest = Guest::new(&format!(
                r#"(func (export "proxy_on_{callback}") (param i32 i32 i32) (result i32) (i32.const 1))"#
            ));
            let plugin = filter("A").key("pause_timeout_ms = 50").key(format!("on_error = {on_error:?}"));
            let rig = start(&guest, &[plugin]).await;
            let answer = rig.post(CHAT, &chat("Hello")).await;
            assert_eq!((answer.status, answer.complete), (status, true), "{callback} {on_error}: {}", answer.text());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_under_way_is_worth_waiting_for() {
    let service = Service::start().await;
    let guest = calling("request_headers", "(drop (call $continue_stream (i32.const 0)))");
    let rig = called(&service, &guest, "pause_timeout_ms = 1").await;
    let answer = held_and_released(&rig, &service, &Request::json(CHAT, &chat("Hello")), 0).await;
    assert_eq!(answer.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tick_lets_go_what_waits() {
    let guest = Guest::new(
        r#"(func (export "proxy_on_configure") (param i32 i32) (result i32)
             (drop (call $set_tick (i32.const 10))) (i32.const 1))
           (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
             (i32.store (i32.const 4096) (local.get 0)) (i32.const 1))
           (func (export "proxy_on_tick") (param i32)
             (if (i32.load (i32.const 4096)) (then
               (if (i32.eqz (call $effective (i32.load (i32.const 4096)))) (then
                 (drop (call $continue_stream (i32.const 0))))))))"#,
    );
    let rig = start(&guest, &[filter("A")]).await;
    assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_is_held_beyond_all_bounds_is_500() {
    let guest = Guest::new(
        r#"(func (export "proxy_on_response_body") (param i32 i32 i32) (result i32) (i32.eqz (local.get 2)))"#,
    );
    let rig = start(&guest, &[filter("A").key("held_body_bytes = \"1KiB\"")]).await;
    assert_eq!(rig.post(CHAT, &chat_stream("Hello [[sim:tokens=1]]")).await.status, 200);
    let answer = rig.post(CHAT, &chat_stream("Hello [[sim:tokens=200]]")).await;
    assert_eq!((answer.status, answer.complete), (500, true), "{}", answer.text());
    rig.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_answers_before_the_body_has_come() {
    let guest = Guest::new(
        r#"(data (i32.const 640) "no")
           (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
             (drop (call $respond (i32.const 403) (i32.const 0) (i32.const 0) (i32.const 640) (i32.const 2)
               (i32.const 0) (i32.const 0) (i32.const -1))) (i32.const 0))"#,
    );
    let rig = start(&guest, &[filter("A")]).await;
    let mut connection = rig.connect().await;
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: t\r\ncontent-length: 100000\r\n\r\nhalf");
    connection.write(head.as_bytes()).await;
    let answer = connection.answer().await;
    assert_eq!((answer.status, answer.text().as_str()), (403, "no"));
    connection.closed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_local_answer_without_a_body_has_none() {
    for status in [204, 304] {
        let guest = Guest::new(&format!(
            r#"(data (i32.const 640) "no")
               (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
                 (drop (call $respond (i32.const {status}) (i32.const 0) (i32.const 0) (i32.const 640) (i32.const 2)
                   (i32.const 0) (i32.const 0) (i32.const -1))) (i32.const 0))"#
        ));
        let rig = start(&guest, &[filter("A")]).await;
        let mut connection = rig.connect().await;
        for _ in 0..2 {
            connection.send(&Request::json(CHAT, &chat("Hello"))).await;
            let head = connection.head().await;
            assert_eq!((head.status, head.header("content-length")), (status, None));
        }
        drop(connection);
    }
}
