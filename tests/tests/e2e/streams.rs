//! Answers on their way to the client: the worker's bytes, at once, and nothing left running when the client is gone.

use serde_json::{Value, json};
use turnstile_sim::{SimConfig, SimWorker};
use turnstile_tests::harness::{CHAT, Request, Rig, Scripted, Setup, WorkerExt, chat, chat_stream, scrub, send, until};

/// A worker of its own, so that what it has cached is what the gateway's worker has.
async fn twin(rig: &Rig) -> SimWorker {
    SimWorker::start("127.0.0.1:0", rig.worker().config().clone()).await.unwrap()
}

fn requests() -> Vec<(&'static str, Value)> {
    let text = "Tell me about the parser. [[sim:tokens=30]]";
    let tools = json!([{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]);
    let call = "[[sim:text=Reading.]] [[sim:tool=read {\"path\":\"a b\"}]]";
    let mut with_tools = chat(call);
    with_tools["tools"] = tools;
    let mut many = chat(text);
    many["n"] = json!(3);
    let mut asks = chat(text);
    asks["return_cached_tokens_details"] = json!(true);
    vec![
        (CHAT, chat(text)),
        (CHAT, with_tools),
        (CHAT, many),
        (CHAT, asks),
        ("/v1/completions", json!({"model": "sim", "prompt": text, "max_tokens": 40})),
        ("/generate", json!({"text": text, "sampling_params": {"max_new_tokens": 40}})),
        ("/v1/responses", json!({"model": "sim", "input": text})),
        ("/v1/messages", json!({"model": "sim", "max_tokens": 40, "messages": [{"role": "user", "content": text}]})),
    ]
}

async fn assert_same_answers(setup: impl FnOnce(&mut SimConfig), change: impl Fn(&mut Value)) {
    let rig = Setup::new().sim(setup).start().await;
    let twin = twin(&rig).await;
    for (path, mut body) in requests() {
        change(&mut body);
        // The second time the prompt is cached, and the worker tells so: there is more to be taken out again.
        for round in 0..2 {
            let direct = send(twin.addr(), &Request::json(path, &body)).await;
            let through = rig.post(path, &body).await;
            assert_eq!(through.status, 200, "{path}: {}", through.text());
            assert!(through.complete && direct.complete);
            assert_eq!(scrub(&through.text()), scrub(&direct.text()), "{path} {round} {body}");
            assert_eq!(through.header("content-type"), direct.header("content-type"));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_are_the_workers_byte_for_byte() {
    assert_same_answers(|_| {}, |body| body["stream"] = json!(true)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_with_usage_are_the_workers_byte_for_byte() {
    let change = |body: &mut Value| {
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
    };
    assert_same_answers(|c| c.enable_cache_report = true, change).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_a_reasoning_worker_that_tells_usage_unasked_are_the_workers() {
    let setup = |c: &mut SimConfig| {
        c.reasoning = true;
        c.stream_response_default_include_usage = true;
    };
    assert_same_answers(setup, |body| body["stream"] = json!(true)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn whole_answers_are_the_workers_byte_for_byte() {
    assert_same_answers(|_| {}, |_| {}).await;
    assert_same_answers(|c| c.enable_cache_report = true, |_| {}).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_reaches_a_client_only_if_it_asked_and_us_always() {
    let rig = Setup::new().start().await;
    for (asked, wanted) in [(None, false), (Some(false), false), (Some(true), true)] {
        let mut body = chat_stream("Hello");
        if let Some(asked) = asked {
            body["stream_options"] = json!({"include_usage": asked});
        }
        let answer = rig.post(CHAT, &body).await;
        let told = answer.events().iter().any(|event| event.contains("\"prompt_tokens\":"));
        assert_eq!(told, wanted, "{asked:?}");
        assert_eq!(answer.events().last().unwrap(), "[DONE]");
        assert!(rig.record_of(&answer).await["prompt_tokens"].as_u64().unwrap() > 0);
    }
    let seen = rig.worker().on(CHAT);
    assert!(seen.iter().all(|request| request.json()["stream_options"]["include_usage"] == true));
}

/// A turn that runs until its client or the gateway ends it: minutes of engine time at real speed.
fn endless(path: &str, stream: bool) -> Value {
    let mut body = match path {
        "/generate" => json!({"text": "Hello", "sampling_params": {"max_new_tokens": 20_000, "ignore_eos": true}}),
        "/v1/responses" => json!({"model": "sim", "input": "[[sim:tokens=20000]]"}),
        "/v1/completions" => json!({"model": "sim", "prompt": "Hello", "max_tokens": 20_000, "ignore_eos": true}),
        _ => {
            let mut body = chat("[[sim:tokens=20000]]");
            body["max_tokens"] = json!(20_000);
            body
        }
    };
    if stream {
        body["stream"] = json!(true);
    }
    body
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_event_comes_while_the_worker_still_decodes() {
    let rig = Setup::new().sim(|c| c.speed = 1.0).start().await;
    for path in [CHAT, "/v1/completions", "/generate", "/v1/responses", "/v1/messages"] {
        let mut connection = rig.begin(&Request::json(path, &endless(path, true))).await;
        assert_eq!(connection.head().await.status, 200, "{path}");
        for _ in 0..3 {
            assert!(!connection.piece().await.unwrap().is_empty(), "{path}");
        }
        assert_eq!(rig.worker().engine_requests(), 1, "{path}");
        drop(connection);
        rig.idle().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_a_stream_takes_its_request_off_the_worker() {
    let rig = Setup::new().sim(|c| c.speed = 1.0).start().await;
    let mut connection = rig.begin(&Request::json(CHAT, &endless(CHAT, true)).header("x-request-id", "gone")).await;
    connection.head().await;
    drop(connection);
    rig.idle().await;
    let record = rig.record("gone").await;
    assert_eq!((&record["status"], &record["end"]), (&json!(499), &json!("client_gone")));
    assert_eq!(rig.metric("turnstile_requests_in_progress", &[]).await, 0.0);
    assert_eq!(rig.metric("turnstile_worker", &[("field", "in_flight")]).await, 0.0);
    assert_eq!(rig.metric("turnstile_requests_total", &[("status", "499")]).await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_before_an_answer_has_its_request_aborted_by_id() {
    let rig = Setup::new().sim(|c| c.speed = 1.0).start().await;
    for path in [CHAT, "/generate", "/v1/completions"] {
        rig.worker().clear_requests();
        let connection = rig.begin(&Request::json(path, &endless(path, false))).await;
        until("the engine has it", async || rig.worker().engine_requests() == 1).await;
        drop(connection);
        until("an abort", async || rig.worker().on("/abort_request").len() == 1).await;
        let (turn, abort) = (rig.worker().on(path)[0].json(), rig.worker().on("/abort_request")[0].json());
        assert_eq!(turn["rid"], abort["rid"], "{path}");
        rig.idle().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_http2_stream_takes_its_request_off_the_worker() {
    let rig = Setup::new().sim(|c| c.speed = 1.0).start().await;
    let client = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    let url = format!("http://{}{CHAT}", rig.addr());
    let mut cancelled = client.post(&url).json(&endless(CHAT, true)).send().await.unwrap();
    assert!(!cancelled.chunk().await.unwrap().unwrap().is_empty());
    let mut kept = client.post(&url).json(&endless(CHAT, true)).send().await.unwrap();
    drop(cancelled);
    until("one is left", async || rig.worker().engine_requests() == 1 && rig.in_flight() == 1).await;
    assert!(!kept.chunk().await.unwrap().unwrap().is_empty(), "the other stream of the connection goes on");
    drop(kept);
    rig.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_of_a_worker_pass_as_they_are() {
    let rig = Setup::new().start().await;
    let twin = twin(&rig).await;
    for body in [json!({"model": "sim"}), json!({"model": "sim", "messages": [], "max_tokens": 99_999_999})] {
        let direct = send(twin.addr(), &Request::json(CHAT, &body)).await;
        let through = rig.post(CHAT, &body).await;
        assert_eq!(through.status, direct.status);
        assert_eq!(through.status, 400);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_after_the_end_mark_had_its_turn() {
    // The end mark comes, the end of the framing does not: nobody but the client can end this exchange.
    let event = json!({"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]});
    let events = format!("data: {event}\n\ndata: [DONE]\n\n");
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let worker = Scripted::start(format!("{head}{:x}\r\n{events}\r\n", events.len())).await;
    let rig = Setup::new().workers(0).external(worker.url()).start().await;
    let mut connection = rig.begin(&Request::json(CHAT, &chat_stream("hello")).header("x-request-id", "done")).await;
    connection.head().await;
    let mut seen = Vec::new();
    while !seen.ends_with(b"data: [DONE]\n\n") {
        seen.extend_from_slice(&connection.piece().await.expect("the end mark"));
    }
    drop(connection);
    let record = rig.record("done").await;
    assert_eq!((&record["status"], &record["end"]), (&json!(200), &json!("finished")));
    assert_eq!(record["finish_reason"], "stop");
}
