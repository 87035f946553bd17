//! Priority, queue, preemption.

use crate::{
    client::{Answer, Connection, get, parse, post, post_with},
    until, worker,
};
use serde_json::{Value, json};
use turnstile_sim::SimWorker;

/// A worker whose engine stands still, so that all wait; two may.
async fn standing() -> SimWorker {
    let worker = worker(|config| {
        config.max_queued_requests = Some(2);
        config.enable_priority_scheduling = true;
    })
    .await;
    post(&worker, "/_sim/fault", json!({"kind": "wedge"})).await;
    worker
}

fn chat(rid: &str, tokens: usize, priority: Value) -> Value {
    json!({
        "model": "tiny", "messages": [{"role": "user", "content": rid}], "max_tokens": tokens, "ignore_eos": true,
        "rid": rid, "priority": priority,
    })
}

/// Sends a chat request whose answer is read later.
async fn sent(worker: &SimWorker, body: Value) -> Connection {
    let before = worker.engine_requests();
    let mut connection = Connection::open(worker.addr()).await;
    let bytes = body.to_string();
    let headers = [("Content-Type", "application/json"), ("Connection", "close")];
    connection.send(&crate::client::request_bytes("POST", "/v1/chat/completions", &headers, bytes.as_bytes())).await;
    until("it is taken", async || worker.engine_requests() > before).await;
    connection
}

async fn answer(connection: Connection) -> Answer {
    parse(&connection.read_to_end().await)
}

#[tokio::test]
async fn a_full_queue_refuses_the_newcomer_on_every_endpoint() {
    let worker = standing().await;
    let _waiting = [sent(&worker, chat("w1", 5, json!(1))).await, sent(&worker, chat("w2", 5, json!(1))).await];
    let full = "The request queue is full.";
    let refused = post(&worker, "/v1/chat/completions", chat("new", 5, json!(1))).await;
    let body = json!({"object": "error", "message": full, "type": "503", "param": null, "code": 503});
    assert_eq!((refused.status, refused.json()), (503, body.clone()));
    assert_eq!(refused.header("retry-after"), None);
    let native =
        post(&worker, "/generate", json!({"text": "x", "sampling_params": {"max_new_tokens": 2}, "priority": 0}));
    let native = native.await;
    assert_eq!((native.status, native.json()), (503, body));
    let completion = json!({"model": "tiny", "prompt": "x", "max_tokens": 2, "priority": 0});
    assert_eq!(post(&worker, "/v1/completions", completion).await.status, 503);
    let messages = json!({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]});
    let messages = post(&worker, "/v1/messages", messages).await;
    let error = json!({"type": "error", "error": {"type": "overloaded_error", "message": "Internal server error"}});
    assert_eq!((messages.status, messages.json()), (503, error));
    let responses =
        post(&worker, "/v1/responses", json!({"model": "tiny", "input": "hi", "max_output_tokens": 2})).await;
    assert_eq!((responses.status, responses.message().as_str()), (400, "503: The request queue is full."));
    // A stream says so in its first event, under status 200.
    let mut body = chat("new", 5, json!(0));
    body["stream"] = json!(true);
    let stream = post(&worker, "/v1/chat/completions", body).await;
    let event = "{\"error\": {\"object\": \"error\", \"message\": \"The request queue is full.\", \"type\": \
                 \"SERVICE_UNAVAILABLE\", \"param\": null, \"code\": 503}}";
    assert_eq!((stream.status, stream.events()), (200, vec![event.to_owned(), "[DONE]".to_owned()]));
    let body = json!({"text": "x", "sampling_params": {"max_new_tokens": 2}, "priority": 0, "stream": true});
    let stream = post(&worker, "/generate", body).await;
    let reason = json!({"type": "abort", "status_code": 503, "message": full});
    assert_eq!(stream.json_events()[0]["meta_info"]["finish_reason"], reason);
    let load = get(&worker, "/v1/loads?include=core").await.json()["loads"][0].clone();
    assert_eq!(load["num_waiting_reqs"], 2);
}

#[tokio::test]
async fn a_better_newcomer_takes_the_worst_place_in_the_queue() {
    let worker = standing().await;
    let low = sent(&worker, chat("low", 5, json!(1))).await;
    let _mid = sent(&worker, chat("mid", 5, json!(5))).await;
    let mut high = Connection::open(worker.addr()).await;
    high.post("/v1/chat/completions", &chat("high", 5, json!(9))).await;
    let low = answer(low).await;
    let text = "The request is aborted by a higher priority request.";
    assert_eq!((low.status, low.message().as_str()), (503, text));
}

#[tokio::test]
async fn messages_and_responses_have_no_priority() {
    let worker = worker(|config| config.abort_on_priority_when_disabled = true).await;
    let messages =
        json!({"model": "tiny", "max_tokens": 2, "priority": 5, "messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(post(&worker, "/v1/messages", messages).await.status, 200);
    let responses = json!({"model": "tiny", "input": "hi", "priority": 5});
    assert_eq!(post(&worker, "/v1/responses", responses).await.status, 200);
}

#[tokio::test]
async fn the_override_headers_work_where_they_are_on() {
    let worker = worker(|config| {
        config.enable_header_overrides = true;
        config.dp_size = 2;
    })
    .await;
    let headers = [("x-override-rid", "mine"), ("x-override-routed-dp-rank", "1"), ("x-override-priority", "7")];
    let body = json!({"text": "x", "sampling_params": {"max_new_tokens": 2}});
    let answer = post_with(&worker, "/generate", &headers, body).await.json();
    assert_eq!((&answer["meta_info"]["id"], &answer["meta_info"]["dp_rank"]), (&json!("mine"), &json!(1)));
}

#[tokio::test]
async fn a_request_that_waits_can_be_aborted() {
    let worker = standing().await;
    let waiting = sent(&worker, chat("wait", 5, json!(0))).await;
    post(&worker, "/abort_request", json!({"rid": "wait"})).await;
    let answer = answer(waiting).await;
    assert_eq!((answer.status, &answer.json()["choices"][0]["finish_reason"]), (200, &json!("abort")));
}
