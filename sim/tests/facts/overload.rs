//! Priority, queue, preemption.

use crate::{
    client::{Answer, Connection, get, parse, post, post_with},
    until, worker,
};
use serde_json::{Value, json};
use tokio::time::Instant;
use turnstile_sim::{SimConfig, SimWorker};

/// One request runs, two may wait, and no second is too short to see.
fn narrow(config: &mut SimConfig) {
    config.max_running_requests = 1;
    config.max_queued_requests = Some(2);
    config.enable_priority_scheduling = true;
    config.speed = 20.0;
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
    let worker = worker(narrow).await;
    let _running = sent(&worker, chat("run", 4000, json!(0))).await;
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
    assert_eq!(load["max_running_requests"], 1);
}

#[tokio::test]
async fn a_better_newcomer_takes_the_worst_place_in_the_queue() {
    let worker = worker(narrow).await;
    let _running = sent(&worker, chat("run", 4000, json!(0))).await;
    let low = sent(&worker, chat("low", 5, json!(1))).await;
    let _mid = sent(&worker, chat("mid", 5, json!(5))).await;
    let mut high = Connection::open(worker.addr()).await;
    high.post("/v1/chat/completions", &chat("high", 5, json!(9))).await;
    let low = answer(low).await;
    let text = "The request is aborted by a higher priority request.";
    assert_eq!((low.status, low.message().as_str()), (503, text));
}

#[tokio::test]
async fn larger_priorities_run_first_and_ties_by_arrival() {
    let worker = worker(|config| {
        narrow(config);
        config.max_queued_requests = None;
    })
    .await;
    let running = sent(&worker, chat("run", 100, json!(9))).await;
    let mut waiting = Vec::new();
    for (rid, priority) in [("a", 1), ("b", 5), ("c", 5), ("d", -3), ("e", 9)] {
        waiting.push((rid, sent(&worker, chat(rid, 30, json!(priority))).await));
    }
    drop(answer(running).await);
    let mut finished: Vec<(Instant, &str)> =
        futures::future::join_all(waiting.into_iter().map(|(rid, connection)| async move {
            assert_eq!(answer(connection).await.status, 200);
            (Instant::now(), rid)
        }))
        .await;
    finished.sort_unstable();
    assert_eq!(finished.iter().map(|(_, rid)| *rid).collect::<Vec<_>>(), ["e", "b", "c", "a", "d"]);
}

#[tokio::test]
async fn without_priority_scheduling_arrival_alone_counts() {
    let worker = worker(|config| {
        narrow(config);
        config.max_queued_requests = None;
        config.enable_priority_scheduling = false;
    })
    .await;
    let _running = sent(&worker, chat("run", 60, json!(0))).await;
    let first = sent(&worker, chat("first", 60, json!(0))).await;
    let second = sent(&worker, chat("second", 5, json!(99))).await;
    let (first, second) = tokio::join!(
        async {
            let answer = answer(first).await;
            (answer.status, Instant::now())
        },
        async {
            let answer = answer(second).await;
            (answer.status, Instant::now())
        }
    );
    assert_eq!((first.0, second.0), (200, 200));
    assert!(first.1 < second.1);
}

#[tokio::test]
async fn more_than_ten_better_pushes_out_and_the_victim_goes_on() {
    for (priority, retractions) in [(10, 0), (11, 1)] {
        let worker = worker(narrow).await;
        let mut low = chat("low", 400, json!(0));
        low["return_meta_info"] = json!(true);
        let low = sent(&worker, low).await;
        let high = post(&worker, "/v1/chat/completions", chat("high", 5, json!(priority))).await;
        assert_eq!(high.status, 200);
        let low = answer(low).await.json();
        let meta = &low["choices"][0]["meta_info"];
        assert_eq!((&meta["num_retractions"], &meta["completion_tokens"]), (&json!(retractions), &json!(400)));
    }
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
    let worker = worker(narrow).await;
    let _running = sent(&worker, chat("run", 4000, json!(0))).await;
    let waiting = sent(&worker, chat("wait", 5, json!(0))).await;
    post(&worker, "/abort_request", json!({"rid": "wait"})).await;
    let answer = answer(waiting).await;
    assert_eq!((answer.status, &answer.json()["choices"][0]["finish_reason"]), (200, &json!("abort")));
}
