//! Filters that fail on a body, or answer when they see one: nothing passes that a closed filter has not seen, and no worker
//! is blamed for it.

use serde_json::{Value, json};
use turnstile_tests::harness::{
    Answer, CHAT, Guest, PluginText, Request, Rig, Scripted, Setup, WorkerExt, built_in, chat, chat_stream, until,
};

/// Does what the request's `x-do` says: traps on the `r`equest's body, on the `f`irst chunk of an answer, on a later one (`s`),
/// answers on the first (`a`) or a later one (`b`), or `h`olds all it sees.
fn guest() -> Guest {
    Guest::new(
        r#"
        (global $seen (mut i32) (i32.const 0))
        (data (i32.const 100) "withheld")
        (func $answer
          (drop (call $send (i32.const 403) (i32.const 100) (i32.const 8) (i32.const 100) (i32.const 8) (i32.const 0)
            (i32.const 0) (i32.const -1))))
        (func $asks (param $what i32) (result i32) (i32.eq (call $asked) (local.get $what)))
        (func $later (result i32) (i32.gt_u (global.get $seen) (i32.const 1)))
        (func (export "proxy_on_request_body") (param i32 i32 i32) (result i32)
          (if (call $asks (i32.const 114)) (then unreachable))
          (i32.const 0))
        (func (export "proxy_on_response_headers") (param i32 i32 i32) (result i32)
          (global.set $seen (i32.const 0)) (i32.const 0))
        (func (export "proxy_on_response_body") (param i32 i32 i32) (result i32)
          (global.set $seen (i32.add (global.get $seen) (i32.const 1)))
          (if (call $asks (i32.const 102)) (then unreachable))
          (if (i32.and (call $asks (i32.const 115)) (call $later)) (then unreachable))
          (if (call $asks (i32.const 97)) (then (call $answer)))
          (if (i32.and (call $asks (i32.const 98)) (call $later)) (then (call $answer)))
          (call $asks (i32.const 104)))
        "#,
    )
    .import(
        r#"(import "env" "proxy_send_local_response" (func $send (param i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))"#,
    )
}

/// Two workers, and the guest between them and the client. One fault is enough to take a worker out.
fn with(on_error: &str) -> Setup {
    guarded(Setup::new(), on_error)
}

/// The same with workers so slow that chunks come one by one.
fn slow(on_error: &str) -> Setup {
    guarded(Setup::new().sim(|c| c.speed = 0.05), on_error)
}

fn guarded(setup: Setup, on_error: &str) -> Setup {
    let plugin = PluginText::new("guard", "guest.wasm", "filter").key(format!("on_error = {on_error:?}"));
    let plugin = plugin.key("callback_timeout_ms = 60000").key("crash_limit = 0");
    let all: Vec<PluginText> = [plugin].into_iter().chain(built_in()).collect();
    let setup = setup.file("guest.wasm", guest().wasm()).plugins(&all).workers(2);
    setup.set("ejection.consecutive_faults", "1").set("ejection.max_share", "1.0")
}

/// The generating routes, each with a body.
fn asked(stream: bool) -> Vec<(&'static str, Value)> {
    let messages = json!([{"role": "user", "content": "Hello [[sim:tokens=40]]"}]);
    vec![
        (CHAT, json!({"model": "sim", "messages": messages, "stream": stream})),
        ("/v1/completions", json!({"model": "sim", "prompt": "Hello", "max_tokens": 40, "stream": stream})),
        ("/v1/responses", json!({"model": "sim", "input": "Hello", "max_output_tokens": 40, "stream": stream})),
        ("/v1/messages", json!({"model": "sim", "max_tokens": 40, "messages": messages, "stream": stream})),
        ("/generate", json!({"text": "Hello", "sampling_params": {"max_new_tokens": 40}, "stream": stream})),
    ]
}

async fn asking(rig: &Rig, path: &str, body: &Value, what: &str) -> Answer {
    // An instance that trapped is replaced after a moment.
    until("a healthy instance", async || {
        let list = rig.admin("/plugins").await.json();
        list["plugins"].as_array().unwrap().iter().any(|p| p["name"] == "guard" && p["healthy_instances"] == 1)
    })
    .await;
    rig.workers.iter().for_each(turnstile_sim::SimWorker::clear_requests);
    rig.send(&Request::json(path, body).header("x-do", what)).await
}

/// The error of an answer in the shape of its protocol.
fn assert_plugin_failed(path: &str, answer: &Answer) {
    assert_eq!((answer.status, answer.complete), (500, true), "{path}: {}", answer.text());
    let error = answer.json()["error"].clone();
    match path {
        "/v1/messages" => assert_eq!(error["type"], "api_error", "{error}"),
        _ => assert_eq!(error["code"], "plugin_failed", "{path}: {error}"),
    }
    assert!(!answer.text().contains("wasm"), "the plugin's words are for the log: {}", answer.text());
}

/// No worker is blamed or asked twice, what runs is aborted, and what was taken is given back.
async fn assert_nobody_blamed(rig: &Rig, path: &str, result: &str, so_many: f64) {
    let metrics = rig.metrics().await;
    assert_eq!(metrics.sum("turnstile_attempts_total", &[("result", result)]), so_many, "{path}");
    for blames in ["turnstile_worker_faults_total", "turnstile_ejections_total", "turnstile_retries_total"] {
        assert_eq!(metrics.sum(blames, &[]), 0.0, "{path}: {blames}");
    }
    let turns = || rig.workers.iter().flat_map(WorkerExt::turns).collect::<Vec<_>>();
    assert_eq!(turns().len(), 1, "{path}: one attempt");
    let rid = turns()[0].json()["rid"].clone();
    // Not every route takes an id by which it can be told; there the end of the connection tells.
    until("the worker is told to stop", async || {
        rid.is_null() || rig.workers.iter().flat_map(|w| w.on("/abort_request")).any(|abort| abort.json()["rid"] == rid)
    })
    .await;
    rig.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_filter_that_fails_on_the_body_of_a_request_lets_none_of_it_pass() {
    let (closed, open) = (with("closed").start().await, with("open").start().await);
    for (path, body) in asked(false).into_iter().chain(asked(true)) {
        assert_plugin_failed(path, &asking(&closed, path, &body, "r").await);
        assert!(closed.workers.iter().all(|worker| worker.turns().is_empty()), "{path}");
        let answer = asking(&open, path, &body, "r").await;
        assert_eq!((answer.status, answer.complete), (200, true), "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_filter_that_fails_before_anything_is_sent_takes_the_answers_place() {
    let rig = with("closed").start().await;
    let mut failed = 0.0;
    for (path, body) in asked(false).into_iter().chain(asked(true)) {
        let answer = asking(&rig, path, &body, "f").await;
        assert_plugin_failed(path, &answer);
        let record = rig.record_of(&answer).await;
        assert_eq!((&record["status"], &record["end"]), (&json!(500), &json!("plugin_failed")), "{path}");
        assert_eq!((&record["error"], &record["attempts"]), (&json!("plugin_failed"), &json!(1)), "{path}");
        failed += 1.0;
        assert_nobody_blamed(&rig, path, "plugin_failed", failed).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_filter_that_fails_in_a_stream_cuts_it() {
    let rig = slow("closed").start().await;
    let mut failed = 0.0;
    for (path, body) in asked(true) {
        let answer = asking(&rig, path, &body, "s").await;
        assert_eq!((answer.status, answer.complete), (200, false), "{path}: {}", answer.text());
        let text = answer.text();
        assert!(text.ends_with("\n\n") && !text.contains("[DONE]"), "{path}: {text}");
        let last = text.trim_end().rsplit("\n\n").next().unwrap().to_owned();
        let data: Value = serde_json::from_str(last.split_once("data: ").unwrap().1).unwrap();
        let told = match path {
            "/v1/messages" => {
                data["error"]["message"].as_str() == Some("the answer broke off: the filter guard failed")
            }
            "/v1/responses" => data["code"] == "plugin_failed",
            _ => data["error"]["code"] == "plugin_failed",
        };
        assert!(told, "{path}: {last}");
        let record = rig.record_of(&answer).await;
        assert_eq!((&record["status"], &record["end"]), (&json!(200), &json!("plugin_failed")), "{path}");
        assert_eq!(record["error"], "plugin_failed", "{path}");
        assert_eq!(record["faults"], json!(["the filter guard failed"]), "{path}");
        failed += 1.0;
        assert_nobody_blamed(&rig, path, "plugin_failed", failed).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_filter_that_fails_in_a_stream_of_http2_resets_it() {
    let rig = slow("closed").start().await;
    let client = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    let url = format!("http://{}{CHAT}", rig.addr());
    let body = chat_stream("Hello [[sim:tokens=40]]");
    let mut answer = client.post(url).header("x-do", "s").json(&body).send().await.unwrap();
    assert_eq!(answer.status().as_u16(), 200);
    let mut text = Vec::new();
    let cut = loop {
        match answer.chunk().await {
            Ok(Some(piece)) => text.extend_from_slice(&piece),
            Ok(None) => break false,
            Err(_) => break true,
        }
    };
    let text = String::from_utf8(text).unwrap();
    assert!(cut && !text.contains("[DONE]"), "{text}");
    assert_nobody_blamed(&rig, "HTTP/2", "plugin_failed", 1.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_filter_that_fails_on_a_body_lets_it_pass() {
    let rig = with("open").start().await;
    for (what, body) in [("f", chat("Hello")), ("f", chat_stream("Hello")), ("s", chat_stream("Hello"))] {
        let answer = asking(&rig, CHAT, &body, what).await;
        assert_eq!((answer.status, answer.complete), (200, true), "{what}");
        assert!(answer.text().contains("chat.completion"), "{what}: {}", answer.text());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_answers_when_it_sees_the_body_while_it_still_can() {
    let rig = slow("closed").start().await;
    for body in [chat("Hello"), chat_stream("Hello")] {
        let answer = asking(&rig, CHAT, &body, "a").await;
        assert_eq!((answer.status, answer.complete, answer.text().as_str()), (403, true, "withheld"));
        let record = rig.record_of(&answer).await;
        assert_eq!((&record["status"], &record["end"]), (&json!(403), &json!("plugin_answer")));
    }
    let answer = asking(&rig, CHAT, &chat_stream("Hello [[sim:tokens=40]]"), "b").await;
    assert_eq!((answer.status, answer.complete), (200, false), "{}", answer.text());
    assert!(!answer.text().contains("withheld") && answer.text().contains("a filter ended it"), "{}", answer.text());
    assert_eq!(rig.record_of(&answer).await["end"], "plugin_answer");
    assert_nobody_blamed(&rig, CHAT, "plugin_answer", 3.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_that_holds_more_than_it_may_has_failed() {
    let size = 66 << 20;
    let head = format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {size}\r\n\r\n");
    let worker = Scripted::start([head.into_bytes(), vec![b' '; size]].concat()).await;
    for (on_error, status) in [("closed", 500), ("open", 200)] {
        let rig = with(on_error).external(worker.url()).pool("one", "", &[2]).start().await;
        let request = Request::json("/tokenize", &json!({"prompt": "Hello"})).header("x-do", "h");
        let answer = rig.send(&request).await;
        assert_eq!((answer.status, answer.complete), (status, true));
        assert_eq!(answer.body.len() == size, status == 200);
        rig.until_metric("turnstile_attempts_total", &[], 1.0).await;
        assert_eq!(rig.metric("turnstile_worker_faults_total", &[]).await, 0.0);
    }
}
