//! Priority, queue, preemption.

use crate::{
    client::{Answer, Connection, get, parse, post, post_with},
    recorded::check,
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
async fn fact_31_a_full_queue_refuses_the_newcomer() {
    let worker = standing().await;
    let _waiting = [sent(&worker, chat("w1", 5, json!(1))).await, sent(&worker, chat("w2", 5, json!(1))).await];
    for name in ["503_chat", "503_generate", "503_stream", "completions", "generate_stream"] {
        check(&worker, &format!("queue_full_{name}"), &[]).await;
    }
    let full = "The request queue is full.";
    let refused = post(&worker, "/v1/chat/completions", chat("new", 5, json!(1))).await;
    let body = json!({"object": "error", "message": full, "type": "503", "param": null, "code": 503});
    assert_eq!((refused.status, refused.json()), (503, body.clone()));
    let native =
        post(&worker, "/generate", json!({"text": "x", "sampling_params": {"max_new_tokens": 2}, "priority": 0}));
    let native = native.await;
    assert_eq!((native.status, native.json()), (503, body));
    let completion = json!({"model": "tiny", "prompt": "x", "max_tokens": 2, "priority": 0});
    assert_eq!(post(&worker, "/v1/completions", completion).await.status, 503);
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
async fn fact_31_a_better_newcomer_takes_the_worst_place_in_the_queue() {
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
async fn fact_33_messages_and_responses_have_no_priority() {
    let reporting = worker(|config| config.enable_cache_report = true).await;
    crate::recorded::check_cached(&reporting, "messages_priority_ignored", &[]).await;
    let worker = worker(|config| config.abort_on_priority_when_disabled = true).await;
    let messages =
        json!({"model": "tiny", "max_tokens": 2, "priority": 5, "messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(post(&worker, "/v1/messages", messages).await.status, 200);
    let responses = json!({"model": "tiny", "input": "hi", "priority": 5});
    assert_eq!(post(&worker, "/v1/responses", responses).await.status, 200);
}

#[tokio::test]
async fn fact_46_the_override_headers_work_only_where_they_are_on() {
    let off = worker(|config| {
        config.enable_cache_report = true;
        config.abort_on_priority_when_disabled = true;
    })
    .await;
    check(&off, "x_override_priority_ignored", &[]).await;
    let keyed = worker(|config| {
        config.api_key = Some("sk-user".to_owned());
        config.enable_header_overrides = true;
        config.dp_size = 2;
    })
    .await;
    for name in ["dp_override_header_bad", "dp_override_header_bad_chat"] {
        check(&keyed, name, &[]).await;
    }
    check(&keyed, "dp_override_header", &["cached_tokens_details"]).await;
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

#[tokio::test]
async fn fact_34_a_full_queue_is_400_on_responses_and_overloaded_on_messages() {
    let worker = standing().await;
    let _waiting = [sent(&worker, chat("w1", 5, json!(1))).await, sent(&worker, chat("w2", 5, json!(1))).await];
    check(&worker, "queue_full_messages", &[]).await;
    check(&worker, "queue_full_responses", &[]).await;
    let messages = json!({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]});
    let messages = post(&worker, "/v1/messages", messages).await;
    let error = json!({"type": "error", "error": {"type": "overloaded_error", "message": "Internal server error"}});
    assert_eq!((messages.status, messages.json()), (503, error));
    let responses =
        post(&worker, "/v1/responses", json!({"model": "tiny", "input": "hi", "max_output_tokens": 2})).await;
    assert_eq!((responses.status, responses.message().as_str()), (400, "503: The request queue is full."));
}

#[tokio::test]
async fn fact_35_no_refusal_says_when_to_come_back() {
    let worker = standing().await;
    let _waiting = [sent(&worker, chat("w1", 5, json!(1))).await, sent(&worker, chat("w2", 5, json!(1))).await];
    for (path, body) in [
        ("/v1/chat/completions", chat("new", 5, json!(1))),
        ("/generate", json!({"text": "x"})),
        ("/v1/messages", json!({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]})),
        ("/v1/responses", json!({"model": "tiny", "input": "hi"})),
    ] {
        let refused = post(&worker, path, body).await;
        assert!(refused.status >= 400 && refused.header("retry-after").is_none(), "{path}: {refused:?}");
    }
}

#[tokio::test]
async fn fact_26_any_signed_64_bit_priority_is_taken() {
    let worker = worker(|config| {
        config.enable_priority_scheduling = true;
        config.enable_cache_report = true;
    })
    .await;
    for name in ["-5", "0", "10", "4611686018427387904", "7", "None", "True"] {
        check(&worker, &format!("priority_enabled_{name}"), &[]).await;
    }
    for priority in [json!(i64::MIN), json!(i64::MAX), json!("7"), json!(true)] {
        assert_eq!(post(&worker, "/v1/chat/completions", chat("a", 2, priority)).await.status, 200);
    }
    check(&worker, "generate_priority_str", &[]).await;
}

#[tokio::test]
async fn fact_27_a_larger_priority_is_refused_with_the_range() {
    let worker = worker(|_| ()).await;
    for name in ["9223372036854775808", "1_5", "x"] {
        check(&worker, &format!("priority_enabled_{name}"), &[]).await;
    }
    let refused = post(&worker, "/v1/chat/completions", chat("a", 2, json!(1_u64 << 63))).await;
    let range = "priority must be a signed 64-bit integer between -9223372036854775808 and 9223372036854775807";
    assert_eq!((refused.status, refused.message().as_str()), (400, range));
}

#[tokio::test]
async fn fact_28_without_scheduling_a_priority_is_ignored() {
    let worker = worker(|config| (config.max_running_requests, config.speed) = (1, APART)).await;
    check(&worker, "chat_priority_when_disabled_default", &[]).await;
    check(&worker, "chat_priority_when_disabled_out_of_range", &[]).await;
    assert_eq!(order(&worker, &[0, 9, 5]).await, [0, 1, 2], "by arrival");
}

#[tokio::test]
async fn fact_29_with_the_abort_flag_a_priority_is_503() {
    let worker = worker(|config| {
        config.abort_on_priority_when_disabled = true;
        config.stream_response_default_include_usage = true;
    })
    .await;
    for name in [
        "chat_priority_abort_when_disabled",
        "chat_priority_abort_when_disabled_stream",
        "generate_priority_abort_when_disabled",
        "chat_no_priority_ok",
    ] {
        check(&worker, name, &[]).await;
    }
}

/// A request of [`order`] takes more than 100 ms, so that answers cannot overtake each other on the way.
const APART: f64 = 1.0;

/// Lets requests of these priorities wait behind a standing engine that runs one at a time; the order in which they end.
async fn order(worker: &SimWorker, priorities: &[i64]) -> Vec<usize> {
    post(worker, "/_sim/fault", json!({"kind": "wedge"})).await;
    let mut waiting = tokio::task::JoinSet::new();
    for (place, priority) in priorities.iter().enumerate() {
        let connection = sent(worker, chat(&format!("o{place}"), 20, json!(priority))).await;
        waiting.spawn(async move {
            assert_eq!(answer(connection).await.status, 200);
            place
        });
    }
    let ended = async {
        let mut order = Vec::new();
        while let Some(place) = waiting.join_next().await {
            order.push(place.unwrap());
        }
        order
    };
    let (_, order) = tokio::join!(post(worker, "/_sim/fault", json!({"kind": "unwedge"})), ended);
    order
}

#[tokio::test]
async fn fact_30_the_larger_goes_first_and_ties_by_arrival() {
    let worker = worker(|config| {
        config.enable_priority_scheduling = true;
        config.max_running_requests = 1;
        config.speed = APART;
    })
    .await;
    assert_eq!(order(&worker, &[1, 5, 5, 9, -3]).await, [3, 1, 2, 0, 4]);
}

#[tokio::test]
async fn fact_32_more_than_ten_better_pushes_out_and_the_victim_resumes() {
    for (priority, pushes) in [(10, false), (11, true)] {
        let worker = worker(|config| {
            config.enable_priority_scheduling = true;
            config.max_running_requests = 1;
            // The low one takes 4.8 s, so it is still running when the high one comes, also on a busy machine.
            config.speed = 4.0;
        })
        .await;
        let with_meta = |rid: &str, tokens, priority: i64| {
            let mut body = chat(rid, tokens, json!(priority));
            body["return_meta_info"] = json!(true);
            body
        };
        let low = sent(&worker, with_meta("low", 3000, 0)).await;
        let low = tokio::spawn(answer(low));
        until("it runs", async || {
            get(&worker, "/v1/loads?include=core").await.json()["loads"][0]["num_running_reqs"] == 1
        })
        .await;
        let high = post(&worker, "/v1/chat/completions", with_meta("high", 5, priority)).await;
        assert_eq!(high.status, 200);
        let low = low.await.unwrap().json();
        let meta = &low["choices"][0]["meta_info"];
        assert_eq!(meta["num_retractions"], u64::from(pushes));
        assert_eq!(low["usage"]["completion_tokens"], 3000, "all of it");
    }
}
