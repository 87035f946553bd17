//! Streaming and non-streaming sessions on `/generate`.

use crate::{
    client::{Answer, Connection, get, post},
    recorded::check,
    until, worker,
};
use serde_json::{Value, json};
use turnstile_sim::{SimConfig, SimWorker};

pub fn streaming(config: &mut SimConfig) {
    config.enable_streaming_session = true;
    config.max_running_requests = 8;
    // So slow that a turn of 3500 tokens, 22 s, is still running when the next request comes, whatever else this
    // machine does. Who waits for its end aborts it.
    config.speed = 1.0;
}

pub async fn open(worker: &SimWorker, id: &str) {
    open_for(worker, id, Value::Null).await;
}

async fn open_for(worker: &SimWorker, id: &str, timeout: Value) {
    let body = json!({"capacity_of_str_len": 1, "session_id": id, "streaming": true, "timeout": timeout});
    assert_eq!(post(worker, "/open_session", body).await.json(), json!(id));
}

fn turn(id: &str, text: &str, tokens: usize) -> Value {
    json!({"text": text, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": true}, "session_params": {"id": id}})
}

async fn generate(worker: &SimWorker, id: &str, text: &str, tokens: usize) -> Answer {
    post(worker, "/generate", turn(id, text, tokens)).await
}

fn number(answer: &Answer, field: &str) -> u64 {
    answer.json()["meta_info"][field].as_u64().unwrap_or_else(|| panic!("{field}: {}", answer.text()))
}

async fn load(worker: &SimWorker) -> Value {
    get(worker, "/v1/loads?include=core").await.json()["loads"][0].clone()
}

/// A turn that runs until it is aborted or its connection dropped.
pub async fn long_turn(worker: &SimWorker, id: &str, text: &str, tokens: usize) -> Connection {
    let mut connection = Connection::open(worker.addr()).await;
    let mut body = turn(id, text, tokens);
    body["stream"] = json!(true);
    connection.post("/generate", &body).await;
    connection.read_until("data: ").await;
    connection
}

/// Ends the turns that run.
async fn abort_all(worker: &SimWorker) {
    post(worker, "/abort_request", json!({"abort_all": true})).await;
}

const ACTIVE: &str = "Streaming session already has an active request.";

/// What a turn in session `s1` looks like depends on what was before it, like everything recorded about it.
#[tokio::test]
async fn fact_10_a_turn_counts_everything_before_it() {
    let worker = worker(streaming).await;
    open(&worker, "s1").await;
    for name in ["session_turn1", "session_turn2_delta"] {
        check(&worker, name, &["cached_tokens_details"]).await;
    }
    open(&worker, "s").await;
    let first = generate(&worker, "s", "You are a helpful assistant.", 6).await;
    let prompt = number(&first, "prompt_tokens");
    let used = load(&worker).await["num_used_tokens"].as_u64().unwrap();
    post(&worker, "/close_session", json!({"session_id": "s1"})).await;
    assert_eq!(load(&worker).await["num_used_tokens"], prompt + 5, "the idle session holds all but the last token");
    assert!(used > prompt + 5, "and the other one held its own");
    let delta = number(&generate_alone(&worker, " Now compare.", 6).await, "prompt_tokens");
    let second = generate(&worker, "s", " Now compare.", 6).await;
    assert_eq!(number(&second, "prompt_tokens"), prompt + 6 + delta);
    // Nothing new at all is allowed.
    let body = json!({"input_ids": [], "sampling_params": {"max_new_tokens": 2}, "session_params": {"id": "s"}});
    let third = post(&worker, "/generate", body).await;
    assert_eq!(number(&third, "prompt_tokens"), number(&second, "prompt_tokens") + 6);
}

async fn generate_alone(worker: &SimWorker, text: &str, tokens: usize) -> Answer {
    let body = json!({"text": text, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": true}});
    post(worker, "/generate", body).await
}

#[tokio::test]
async fn fact_11_all_but_the_last_token_of_the_context_is_cached() {
    let worker = worker(streaming).await;
    open(&worker, "s").await;
    let mut context = 0;
    for turn in 0..4 {
        let answer = generate(&worker, "s", " Now compare.", 6).await;
        if turn > 0 {
            assert_eq!(number(&answer, "cached_tokens"), context - 1);
        }
        context = number(&answer, "prompt_tokens") + 6;
    }
}

#[tokio::test]
async fn fact_12_a_full_history_is_appended() {
    let worker = worker(streaming).await;
    open(&worker, "s1").await;
    for name in ["session_turn1", "session_turn2_delta", "session_turn3_full_history"] {
        check(&worker, name, &["cached_tokens_details"]).await;
    }
    open(&worker, "s").await;
    let first = number(&generate(&worker, "s", "You are a helpful assistant.", 6).await, "prompt_tokens");
    let again = generate(&worker, "s", "You are a helpful assistant.", 6).await;
    assert_eq!(number(&again, "prompt_tokens"), 2 * first + 6);
}

#[tokio::test]
async fn fact_14_what_a_streaming_session_cannot_do_is_refused() {
    let worker = worker(streaming).await;
    open(&worker, "s").await;
    for (field, value, message) in [
        ("replace", json!(true), "Streaming sessions do not support replace."),
        ("offset", json!(3), "Streaming sessions do not support offset."),
        ("drop_previous_output", json!(true), "Streaming sessions do not support drop_previous_output."),
    ] {
        let mut body = turn("s", " x", 6);
        body["session_params"][field] = value;
        let answer = post(&worker, "/generate", body).await;
        assert_eq!((answer.status, answer.message().as_str()), (400, message));
    }
    for (field, value) in [("offset", json!(0)), ("rid", json!("whatever"))] {
        let mut body = turn("s", " x", 6);
        body["session_params"][field] = value;
        assert_eq!(post(&worker, "/generate", body).await.status, 200);
    }
    open(&worker, "s1").await;
    for name in [
        "session_streaming_replace",
        "session_streaming_offset",
        "session_streaming_drop",
        "session_streaming_offset0",
        "session_streaming_rid",
    ] {
        check(&worker, name, &["cached_tokens_details"]).await;
    }
}

#[tokio::test]
async fn fact_15_an_unknown_key_of_a_session_breaks_the_handler() {
    let worker = worker(streaming).await;
    open(&worker, "s1").await;
    check(&worker, "session_streaming_badfield", &[]).await;
    assert_eq!(generate(&worker, "s1", "x", 2).await.status, 200, "and does no harm");
}

#[tokio::test]
async fn fact_16_an_unknown_session_is_named() {
    let worker = worker(streaming).await;
    check(&worker, "session_unknown_id", &[]).await;
    check(&worker, "session_unknown_id_stream", &["cached_tokens_details"]).await;
    open(&worker, "s1").await;
    post(&worker, "/close_session", json!({"session_id": "s1"})).await;
    check(&worker, "session_turn_after_close", &[]).await;
}

#[tokio::test]
async fn fact_13_a_second_turn_in_flight_is_refused_and_does_no_harm_alone() {
    let recorded = worker(streaming).await;
    open(&recorded, "s1").await;
    let _running = long_turn(&recorded, "s1", "one", 3500).await;
    check(&recorded, "session_concurrent_turn", &[]).await;
    let worker = worker(streaming).await;
    open(&worker, "s").await;
    let first = long_turn(&worker, "s", "one", 3500).await;
    let second = generate(&worker, "s", " two", 6).await;
    assert_eq!((second.status, second.message().as_str()), (400, ACTIVE));
    drop(first);
    until("the first turn is given up", async || worker.engine_requests() == 0).await;
    assert_eq!(generate(&worker, "s", " three", 6).await.status, 200);
    assert!(worker.is_alive());
}

#[tokio::test]
async fn fact_13_a_third_turn_after_a_refused_one_ends_the_worker() {
    let worker = worker(streaming).await;
    open(&worker, "s").await;
    let other = Connection::open(worker.addr()).await;
    let first = long_turn(&worker, "s", "one", 3500).await;
    assert_eq!(generate(&worker, "s", " two", 6).await.status, 400);
    assert_eq!(generate(&worker, "s", " three", 6).await.status, 200, "it is let in");
    assert!(worker.is_alive(), "the damage shows when the first turn ends");
    abort_all(&worker).await;
    let cut = crate::client::parse(&first.read_to_end().await);
    assert!(!cut.complete && !cut.text().contains("[DONE]"));
    assert!(other.read_to_end().await.is_empty());
    worker.died().await;
    assert!(!worker.is_alive());
}

#[tokio::test]
async fn fact_13_a_close_after_a_refused_turn_ends_the_worker() {
    let worker = worker(streaming).await;
    open(&worker, "s").await;
    let first = long_turn(&worker, "s", "one", 3500).await;
    assert_eq!(generate(&worker, "s", " two", 6).await.status, 400);
    assert_eq!(post(&worker, "/close_session", json!({"session_id": "s"})).await.status, 200);
    assert!(worker.is_alive(), "the damage shows when the turn ends");
    abort_all(&worker).await;
    assert!(!crate::client::parse(&first.read_to_end().await).complete);
    worker.died().await;
}

#[tokio::test]
async fn without_crash_mode_the_hazards_are_counted_instead() {
    let worker = worker(|config| {
        streaming(config);
        config.crash_mode = false;
    })
    .await;
    open(&worker, "s").await;
    let first = long_turn(&worker, "s", "one", 3500).await;
    assert_eq!(generate(&worker, "s", " two", 6).await.message(), ACTIVE);
    assert_eq!(worker.hazards(), 0);
    assert_eq!(generate(&worker, "s", " three", 6).await.message(), ACTIVE);
    post(&worker, "/close_session", json!({"session_id": "s"})).await;
    abort_all(&worker).await;
    assert!(crate::client::parse(&first.read_to_end_of_stream().await).text().contains("[DONE]"));
    assert!(worker.is_alive());
}

#[tokio::test]
async fn fact_19_an_aborted_turn_is_forgotten_and_its_kv_no_longer_held() {
    let worker = worker(streaming).await;
    open(&worker, "s").await;
    let first = generate(&worker, "s", "You are a helpful assistant.", 6).await;
    let context = number(&first, "prompt_tokens") + 6;
    drop(long_turn(&worker, "s", " something long", 3500).await);
    until("the turn is given up", async || worker.engine_requests() == 0).await;
    assert_eq!(load(&worker).await["num_used_tokens"], 0);
    let next = generate(&worker, "s", " then", 6).await;
    assert!(number(&next, "prompt_tokens") < context + 4);
    assert_eq!(number(&next, "cached_tokens"), context, "what the tree still has is used");
}

#[tokio::test]
async fn abort_by_rid_answers_with_what_there_is() {
    let worker = worker(streaming).await;
    open(&worker, "s").await;
    let mut body = turn("s", "one", 3500);
    body["rid"] = json!("turn-1");
    let (answer, ()) = tokio::join!(post(&worker, "/generate", body), async {
        until("it runs", async || worker.engine_requests() == 1).await;
        post(&worker, "/abort_request", json!({"rid": "turn-1"})).await;
    });
    assert_eq!(answer.status, 200);
    let reason = &answer.json()["meta_info"]["finish_reason"];
    assert_eq!((&reason["type"], &reason["message"]), (&json!("abort"), &json!("Aborted")));
}

#[tokio::test]
async fn fact_18_a_close_in_flight_waits_for_the_turn() {
    let worker = worker(streaming).await;
    open(&worker, "s1").await;
    let other = long_turn(&worker, "s1", "one", 3500).await;
    post(&worker, "/close_session", json!({"session_id": "s1"})).await;
    check(&worker, "session_turn_after_deferred_close", &[]).await;
    drop(other);
    open(&worker, "s").await;
    let first = long_turn(&worker, "s", "one", 3500).await;
    assert_eq!(post(&worker, "/close_session", json!({"session_id": "s"})).await.status, 200);
    let refused = generate(&worker, "s", " two", 6).await;
    assert_eq!(refused.message(), "Invalid request: close was requested for session s");
    let open = json!({"capacity_of_str_len": 1, "session_id": "s", "streaming": true});
    assert_eq!(post(&worker, "/open_session", open.clone()).await.status, 400);
    abort_all(&worker).await;
    assert!(crate::client::parse(&first.read_to_end_of_stream().await).text().contains("[DONE]"));
    until("it is gone", async || post(&worker, "/open_session", open.clone()).await.status == 200).await;
}

#[tokio::test]
async fn fact_17_the_idle_timeout_counts_from_the_admission() {
    let worker = worker(streaming).await;
    open_for(&worker, "s", json!(6)).await;
    // 1200 tokens take about 7.6 seconds.
    assert_eq!(generate(&worker, "s", "one", 1200).await.status, 200);
    let next = generate(&worker, "s", " two", 6).await.message();
    assert!(
        ["close was requested for session s", "session id s does not exist"].iter().any(|end| next.ends_with(end)),
        "{next}"
    );
    open_for(&worker, "n", json!(-5)).await;
    until("the negative timeout has passed", async || {
        generate(&worker, "n", "x", 1).await.message() == "Invalid request: session id n does not exist"
    })
    .await;
}

#[tokio::test]
async fn fact_20_idle_sessions_hold_rows() {
    let worker = worker(|config| {
        streaming(config);
        config.max_running_requests = 2;
    })
    .await;
    for id in ["a", "b"] {
        open(&worker, id).await;
        assert_eq!(generate(&worker, id, "x", 2).await.status, 200);
    }
    let mut stuck = Connection::open(worker.addr()).await;
    stuck.post("/generate", &turn("a", " more", 2)).await;
    until("it waits", async || load(&worker).await["num_waiting_reqs"] == 1).await;
    assert_eq!(load(&worker).await["num_running_reqs"], 0);
    assert_eq!(get(&worker, "/health_generate").await.status, 200, "the probes see nothing");
    post(&worker, "/close_session", json!({"session_id": "b"})).await;
    stuck.read_until("output_ids").await;
}

#[tokio::test]
async fn fact_20_held_tokens_block_others_until_a_close() {
    let worker = worker(|config| {
        streaming(config);
        config.max_total_tokens = 2000;
    })
    .await;
    for id in ["a", "b", "c", "d"] {
        open(&worker, id).await;
        let ids: Vec<u32> = (0..440).map(|place| place % 50 + u32::from(id.as_bytes()[0])).collect();
        let body = json!({"input_ids": ids, "sampling_params": {"max_new_tokens": 10}, "session_params": {"id": id}});
        assert_eq!(post(&worker, "/generate", body).await.status, 200);
    }
    let ids: Vec<u32> = vec![7; 400];
    let mut stuck = Connection::open(worker.addr()).await;
    stuck.post("/generate", &json!({"input_ids": ids, "sampling_params": {"max_new_tokens": 2}})).await;
    until("it waits", async || load(&worker).await["num_waiting_reqs"] == 1).await;
    assert_eq!(load(&worker).await["num_running_reqs"], 0);
    post(&worker, "/close_session", json!({"session_id": "a"})).await;
    stuck.read_until("output_ids").await;
}

#[tokio::test]
async fn fact_72_a_session_cuts_its_output_to_the_window_and_refuses_a_longer_input() {
    let worker = worker(streaming).await;
    open(&worker, "s").await;
    let ids = |count: usize| vec![66; count];
    let body = |count| json!({"input_ids": ids(count), "sampling_params": {"max_new_tokens": 4}, "session_params": {"id": "s"}});
    assert_eq!(post(&worker, "/generate", body(3900)).await.status, 200);
    let refused = post(&worker, "/generate", body(500)).await;
    let text = "Input length (4404 tokens) exceeds the maximum allowed length (4090 tokens). Use a shorter input or enable \
                --allow-auto-truncate.";
    assert_eq!((refused.status, refused.message().as_str()), (400, text));
    assert_eq!(post(&worker, "/generate", body(10)).await.status, 200);
    // Inside a session the output is cut to what fits.
    let mut long = body(10);
    long["sampling_params"] = json!({"max_new_tokens": 2000, "ignore_eos": true});
    let cut = post(&worker, "/generate", long).await;
    assert!(number(&cut, "prompt_tokens") + number(&cut, "completion_tokens") <= 4096);
}

#[tokio::test]
async fn a_plain_session_is_a_tree_of_turns() {
    let worker = worker(|_| ()).await;
    post(&worker, "/open_session", json!({"capacity_of_str_len": 1, "session_id": "n"})).await;
    let ask = async |rid: &str, more: Value| {
        let mut body = turn("n", " Now compare", 6);
        body["rid"] = json!(rid);
        for (key, value) in more.as_object().unwrap() {
            body["session_params"][key] = value.clone();
        }
        post(&worker, "/generate", body).await
    };
    let first = number(&ask("t1", json!({})).await, "prompt_tokens");
    assert_eq!(number(&ask("t2", json!({})).await, "prompt_tokens"), first, "without a rid it begins anew");
    assert_eq!(number(&ask("t3", json!({"rid": "t1"})).await, "prompt_tokens"), 2 * first + 6);
    let dropped = ask("t4", json!({"rid": "t1", "drop_previous_output": true})).await;
    assert_eq!(number(&dropped, "prompt_tokens"), 2 * first);
    assert_eq!(number(&ask("t5", json!({"rid": "t1", "offset": 2})).await, "prompt_tokens"), first + 2);
    assert_eq!(number(&ask("t6", json!({"rid": "t1", "replace": true})).await, "prompt_tokens"), 2 * first + 6);
    for rid in ["nope", "t3"] {
        let refused = ask("t7", json!({"rid": rid})).await;
        assert_eq!((refused.status, refused.message().as_str()), (400, "Invalid request session id"));
    }
}

#[tokio::test]
async fn fact_24_each_rank_has_its_own_session() {
    let worker = worker(|config| {
        streaming(config);
        config.dp_size = 2;
    })
    .await;
    open(&worker, "s").await;
    let mut seen = Vec::new();
    for _ in 0..4 {
        let answer = generate(&worker, "s", " turn", 4).await;
        seen.push((number(&answer, "dp_rank"), number(&answer, "prompt_tokens")));
    }
    assert_ne!(seen[0].0, seen[1].0);
    assert_eq!(seen[0].1, seen[1].1, "two ranks, two histories");
    assert_eq!((seen[0].0, seen[1].0), (seen[2].0, seen[3].0));
    let mut pinned = turn("s", " turn", 4);
    pinned["routed_dp_rank"] = json!(1);
    assert_eq!(number(&post(&worker, "/generate", pinned).await, "dp_rank"), 1);
    post(&worker, "/close_session", json!({"session_id": "s"})).await;
    for _ in 0..2 {
        assert_eq!(generate(&worker, "s", " turn", 4).await.status, 400);
    }
}

#[tokio::test]
async fn fact_17_without_a_timeout_a_session_stays() {
    let worker = worker(|config| {
        streaming(config);
        config.speed = 10_000.0;
    })
    .await;
    open(&worker, "s").await;
    open_for(&worker, "clock", json!(3600)).await;
    until("an hour has passed", async || {
        generate(&worker, "clock", "x", 1).await;
        tokio::time::sleep(std::time::Duration::from_millis(400)).await;
        generate(&worker, "clock", "x", 1).await.status == 400
    })
    .await;
    assert_eq!(generate(&worker, "s", "x", 2).await.status, 200);
}
