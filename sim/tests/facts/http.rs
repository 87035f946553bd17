//! HTTP: ids, fields, keys, connections, life and death.

use crate::{
    client::{Answer, Connection, get, parse, post, post_with, request_bytes, send},
    recorded::check,
    until, worker,
};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::Instant;
use turnstile_sim::{Release, SimFleet, SimWorker};

fn chat(tokens: usize) -> Value {
    json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "ignore_eos": true})
}

fn with(mut body: Value, key: &str, value: Value) -> Value {
    body[key] = value;
    body
}

async fn ask(worker: &SimWorker, body: Value) -> Answer {
    post(worker, "/v1/chat/completions", body).await
}

#[tokio::test]
async fn fact_39_a_live_rid_is_refused_and_a_finished_one_is_free_again() {
    // So slow that the running request, of 19 s, is still there when its rid is used again.
    let recorded = worker(|config| {
        config.speed = 1.0;
        config.enable_cache_report = true;
    })
    .await;
    let mut running = Connection::open(recorded.addr()).await;
    running.post("/v1/chat/completions", &with(with(chat(3000), "rid", json!("dup-1")), "stream", json!(true))).await;
    running.read_until("data: ").await;
    check(&recorded, "duplicate_rid", &[]).await;
    check(&recorded, "duplicate_rid_chat", &[]).await;
    drop(running);
    until("the rid is free", async || ask(&recorded, with(chat(3), "rid", json!("dup-1"))).await.status == 200).await;
    check(&recorded, "rid_reuse_after_finish", &["cached_tokens_details"]).await;
    let worker = worker(|config| config.speed = 1.0).await;
    let mut running = Connection::open(worker.addr()).await;
    running.post("/v1/chat/completions", &with(with(chat(3000), "rid", json!("dup-1")), "stream", json!(true))).await;
    running.read_until("data: ").await;
    let twice = ask(&worker, with(chat(3), "rid", json!("dup-1"))).await;
    assert_eq!((twice.status, twice.message().as_str()), (400, "Duplicate request ID detected: dup-1"));
    let native = json!({"text": "x", "rid": "dup-1", "sampling_params": {"max_new_tokens": 2}});
    let native = post(&worker, "/generate", native).await;
    assert_eq!(native.json(), json!({"error": {"message": "Duplicate request ID detected: dup-1"}}));
    drop(running);
    until("the rid is free", async || ask(&worker, with(chat(3), "rid", json!("dup-1"))).await.status == 200).await;
    // With several choices the rid is not used.
    let two = ask(&worker, with(with(chat(3), "rid", json!("base")), "n", json!(2))).await.json();
    assert_ne!(two["id"], "base");
    assert_eq!(two["choices"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn fact_40_no_header_comes_back_but_the_servers_own() {
    let worker = worker(|_| ()).await;
    check(&worker, "chat_headers_echo", &[]).await;
    let answer = post_with(&worker, "/v1/chat/completions", &[("x-request-id", "abc")], chat(2)).await;
    let mut names: Vec<&str> = answer.headers.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["connection", "content-length", "content-type", "date", "server", "vary"]);
    assert_eq!(answer.header("server"), Some("uvicorn"));
}

#[tokio::test]
async fn fact_41_an_idle_connection_is_closed() {
    let worker = worker(|config| config.keep_alive_s = 0.2).await;
    // A machine that stands still for a while does not do so every time.
    let mut shortest = Duration::MAX;
    for _ in 0..3 {
        let mut connection = Connection::open(worker.addr()).await;
        let before = Instant::now();
        connection.send(&request_bytes("GET", "/ready", &[], b"")).await;
        connection.read_until("200 OK").await;
        connection.read_to_end().await;
        shortest = shortest.min(before.elapsed());
    }
    assert!(shortest >= Duration::from_millis(200) && shortest < Duration::from_secs(5), "{shortest:?}");
}

#[tokio::test]
async fn a_connection_serves_one_request_after_another() {
    let worker = worker(|_| ()).await;
    let mut connection = Connection::open(worker.addr()).await;
    for rid in ["one", "two", "three"] {
        connection.post("/v1/chat/completions", &with(chat(2), "rid", json!(rid))).await;
        connection.read_until(&format!("\"id\":\"{rid}\"")).await;
    }
}

async fn long_stream(worker: &SimWorker) -> Connection {
    let mut connection = Connection::open(worker.addr()).await;
    connection.post("/v1/chat/completions", &with(chat(3000), "stream", json!(true))).await;
    connection.read_until("data: ").await;
    assert_eq!(worker.engine_requests(), 1);
    connection
}

#[tokio::test]
async fn fact_43_a_client_that_leaves_a_stream_ends_it() {
    // So slow that the stream would take longer than what is waited here.
    let worker = worker(|config| config.speed = 1.0).await;
    drop(long_stream(&worker).await);
    until("the engine is idle", async || worker.engine_requests() == 0).await;
}

#[tokio::test]
async fn fact_42_a_half_close_ends_a_stream() {
    let worker = worker(|config| config.speed = 1.0).await;
    let mut connection = long_stream(&worker).await;
    connection.half_close().await;
    until("the engine is idle", async || worker.engine_requests() == 0).await;
}

#[tokio::test]
async fn fact_43_a_client_that_leaves_a_whole_answer_is_noticed_by_a_poll() {
    // The answer would take 18 s, longer than what is waited here.
    let worker = worker(|config| (config.speed, config.decode_ms_base) = (10.0, 60.0)).await;
    let mut connection = Connection::open(worker.addr()).await;
    connection.post("/v1/chat/completions", &chat(3000)).await;
    until("it runs", async || worker.engine_requests() == 1).await;
    let left = Instant::now();
    drop(connection);
    until("the engine is idle", async || worker.engine_requests() == 0).await;
    // Four seconds of the worker's time.
    assert!(left.elapsed() >= Duration::from_millis(350), "{:?}", left.elapsed());
}

#[tokio::test]
async fn fact_47_a_health_probe_takes_a_second_and_ready_none() {
    let worker = worker(|config| config.speed = 0.5).await;
    let second = Duration::from_secs(2);
    // A machine that stands still for a while does not do so every time.
    let mut shortest = Duration::MAX;
    for _ in 0..5 {
        let before = Instant::now();
        assert_eq!(get(&worker, "/ready").await.status, 200);
        shortest = shortest.min(before.elapsed());
    }
    assert!(shortest < second, "{shortest:?}");
    let before = Instant::now();
    assert_eq!(get(&worker, "/health").await.status, 200);
    assert!(before.elapsed() >= second);
}

#[tokio::test]
async fn fact_49_a_worker_that_starts_refuses_and_then_answers_the_probes_with_503() {
    // Both count from the start: the 8 s of warm-up leave time to look, also on a busy machine.
    let worker = worker(|config| (config.boot_s, config.warmup_s) = (1000.0, 8000.0)).await;
    let refused = tokio::net::TcpStream::connect(worker.addr()).await;
    assert_eq!(refused.unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
    until("it listens", async || tokio::net::TcpStream::connect(worker.addr()).await.is_ok()).await;
    assert_eq!(get(&worker, "/ready").await.status, 503);
    assert_eq!(get(&worker, "/health").await.status, 503);
    assert_eq!(ask(&worker, chat(2)).await.status, 200);
    until("it is warm", async || get(&worker, "/ready").await.status == 200).await;
}

#[tokio::test]
async fn fact_48_a_draining_worker_still_serves_and_then_ends() {
    // The stream, of 9.5 s, is still running while the others are served, and is read to its end.
    let mut worker = worker(|config| config.speed = 2.0).await;
    let stream = long_stream(&worker).await;
    worker.drain();
    assert_eq!((get(&worker, "/ready").await.status, get(&worker, "/health").await.status), (503, 503));
    assert_eq!(ask(&worker, chat(2)).await.status, 200);
    let stream = parse(&stream.read_to_end_of_stream().await);
    assert!(stream.text().contains("[DONE]"));
    worker.died().await;
}

#[tokio::test]
async fn fact_51_the_keys_stand_in_the_server_info() {
    let worker = worker(|config| {
        config.api_key = Some("sk-user".to_owned());
        config.admin_api_key = Some("sk-admin".to_owned());
        config.enable_streaming_session = true;
    })
    .await;
    let info = post_with(&worker, "/ping", &[], json!({})).await;
    assert_eq!(info.status, 401);
    let headers = [("Authorization", "Bearer sk-user")];
    let info = send(worker.addr(), "GET", "/server_info", &headers, b"").await.json();
    assert_eq!((&info["api_key"], &info["admin_api_key"]), (&json!("sk-user"), &json!("sk-admin")));
    assert_eq!(
        (&info["version"], &info["frontend"], &info["dp_size"]),
        (&json!("0.5.23"), &json!("python"), &json!(1))
    );
    assert_eq!(
        (&info["enable_streaming_session"], &info["enable_session_radix_cache"], &info["enable_priority_scheduling"]),
        (&json!(true), &json!(false), &json!(false))
    );
}

#[tokio::test]
async fn fact_50_with_only_an_admin_key_the_ordinary_routes_are_open() {
    let worker = worker(|config| config.admin_api_key = Some("sk-admin".to_owned())).await;
    assert_eq!(ask(&worker, chat(2)).await.status, 200);
    assert_eq!(get(&worker, "/server_info").await.json()["admin_api_key"], "sk-admin");
    assert_eq!(get(&worker, "/flush_cache").await.status, 401);
}

#[tokio::test]
async fn fact_44_a_compressed_body_is_refused() {
    let worker = worker(|_| ()).await;
    let gzip = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0];
    let headers = [("Content-Type", "application/json"), ("Content-Encoding", "gzip")];
    let answer = send(worker.addr(), "POST", "/v1/chat/completions", &headers, &gzip).await;
    assert_eq!(answer.status, 400);
    assert!(answer.message().contains("str is not valid UTF-8: surrogates not allowed"));
}

#[tokio::test]
async fn fact_45_the_rank_header_is_for_the_openai_endpoints() {
    let reporting = worker(|config| config.enable_cache_report = true).await;
    check(&reporting, "chat_dp_rank_header", &[]).await;
    check(&reporting, "chat_dp_rank_header_bad", &[]).await;
    let worker = worker(|config| config.dp_size = 2).await;
    let headers = [("X-Data-Parallel-Rank", "1")];
    for _ in 0..2 {
        let body = with(chat(2), "return_meta_info", json!(true));
        let answer = post_with(&worker, "/v1/chat/completions", &headers, body).await.json();
        assert_eq!(answer["choices"][0]["meta_info"]["dp_rank"], 1);
    }
    let mut ranks = Vec::new();
    for _ in 0..2 {
        let body = json!({"text": "x", "sampling_params": {"max_new_tokens": 2}});
        let answer = post_with(&worker, "/generate", &headers, body).await.json();
        ranks.push(answer["meta_info"]["dp_rank"].as_u64().unwrap());
    }
    ranks.sort_unstable();
    assert_eq!(ranks, [0, 1], "there the ranks take turns");
}

#[tokio::test]
async fn http_2_without_tls_works_too() {
    let worker = worker(|_| ()).await;
    let client = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    let url = format!("{}/v1/chat/completions", worker.url());
    let answer = client.post(url).json(&chat(2)).send().await.unwrap();
    assert_eq!((answer.version(), answer.status().as_u16()), (reqwest::Version::HTTP_2, 200));
}

#[tokio::test]
async fn everything_received_is_recorded() {
    let worker = worker(|_| ()).await;
    post_with(&worker, "/v1/chat/completions?x=1", &[("x-mark", "m")], chat(2)).await;
    let requests = worker.requests();
    let request = requests.first().unwrap();
    assert_eq!((request.path.as_str(), request.query.as_deref()), ("/v1/chat/completions", Some("x=1")));
    assert_eq!(request.headers.get("x-mark").unwrap(), "m");
    assert_eq!(request.json(), chat(2));
}

#[tokio::test]
async fn the_record_is_bounded_and_can_be_cleared() {
    let worker = worker(|config| {
        config.record_limit = 2;
        config.record_bytes = 400;
    })
    .await;
    for rid in ["a", "b", "c"] {
        ask(&worker, with(chat(2), "rid", json!(rid))).await;
    }
    let rids: Vec<Value> = worker.requests().iter().map(|request| request.json()["rid"].clone()).collect();
    assert_eq!(rids, ["b", "c"]);
    ask(&worker, with(chat(2), "padding", json!("x".repeat(350)))).await;
    assert!(worker.requests().is_empty(), "one body alone is over the bound");
    get(&worker, "/ready").await;
    assert_eq!(worker.requests().len(), 1);
    worker.clear_requests();
    assert!(worker.requests().is_empty());
}

#[tokio::test]
async fn a_worker_comes_back_on_its_port_without_its_sessions() {
    let open = json!({"capacity_of_str_len": 1, "session_id": "s"});
    // In between the port is free, and another test may get it; not every time.
    for attempt in 1.. {
        let first = worker(|_| ()).await;
        let addr = first.addr();
        assert_eq!(post(&first, "/open_session", open.clone()).await.status, 200);
        first.kill();
        first.shutdown().await;
        let second = match SimWorker::start(addr, turnstile_sim::SimConfig::default()).await {
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse && attempt < 5 => continue,
            second => second.unwrap(),
        };
        assert_eq!(post(&second, "/open_session", open).await.status, 200);
        break;
    }
}

#[tokio::test]
async fn a_killed_worker_cuts_everything_at_once() {
    // So slow that the kill comes before the end of the stream.
    let worker = worker(|config| config.speed = 1.0).await;
    let stream = long_stream(&worker).await;
    worker.kill();
    assert!(!parse(&stream.read_to_end().await).complete);
    let addr = worker.addr();
    worker.shutdown().await;
    assert!(tokio::net::TcpStream::connect(addr).await.is_err());
}

#[tokio::test]
async fn a_paused_worker_is_not_ready() {
    let worker = worker(|_| ()).await;
    assert_eq!(post(&worker, "/pause_generation", json!({})).await.status, 200);
    assert_eq!((get(&worker, "/ready").await.status, get(&worker, "/ping").await.status), (503, 200));
    assert_eq!(get(&worker, "/health").await.status, 503);
    post(&worker, "/continue_generation", json!({})).await;
    assert_eq!(get(&worker, "/ready").await.status, 200);
}

#[tokio::test]
async fn a_fleet_answers_alike() {
    let fleet = SimFleet::start(3, 0, turnstile_sim::SimConfig { speed: 1000.0, ..Default::default() }).await.unwrap();
    let mut texts = Vec::new();
    for worker in fleet.workers() {
        texts.push(ask(worker, chat(30)).await.json()["choices"][0]["message"]["content"].clone());
    }
    texts.dedup();
    assert_eq!(texts.len(), 1);
    fleet.shutdown().await;
}

#[tokio::test]
async fn fact_36_an_unknown_model_is_served_and_echoed() {
    let worker = worker(|config| (config.reasoning, config.enable_cache_report) = (true, true)).await;
    check(&worker, "chat_unknown_model", &[]).await;
    assert_eq!(ask(&worker, with(chat(2), "model", json!("any/thing"))).await.json()["model"], "any/thing");
}

#[tokio::test]
async fn fact_37_unknown_fields_are_ignored() {
    let worker = worker(|config| (config.reasoning, config.enable_cache_report) = (true, true)).await;
    check(&worker, "chat_unknown_fields", &[]).await;
    let nvext = json!({"session_control": {"session_id": "s", "action": "open"}});
    assert_eq!(ask(&worker, with(chat(2), "nvext", nvext)).await.status, 200);
}

#[tokio::test]
async fn fact_38_a_bad_request_is_400_in_the_flat_envelope() {
    let worker = worker(|_| ()).await;
    for name in [
        "chat_bad_content_type",
        "chat_bad_json",
        "chat_truncated_json",
        "chat_array_body",
        "chat_empty_body",
        "chat_missing_messages",
        "chat_empty_messages",
        "chat_bad_messages_type",
        "chat_max_tokens_over",
        "completions_missing_prompt",
    ] {
        check(&worker, name, &[]).await;
    }
}

#[tokio::test]
async fn fact_41_the_wait_for_the_next_request_is_five_seconds() {
    assert!((turnstile_sim::SimConfig::default().keep_alive_s - 5.0).abs() < f64::EPSILON);
}

#[tokio::test]
async fn fact_50_keys_open_what_they_are_for() {
    let worker = worker(|config| {
        config.api_key = Some("sk-user".to_owned());
        config.admin_api_key = Some("sk-admin".to_owned());
        config.enable_streaming_session = true;
        config.enable_metrics = true;
    })
    .await;
    for name in [
        "adminkey_chat",
        "adminkey_flush",
        "adminkey_open_session",
        "badauth_chat",
        "noauth_chat",
        "noauth_health",
        "noauth_models",
        "noauth_options",
        "noauth_ping",
        "noauth_ready",
        "noauth_unknown",
        "noauth_v1_loads",
        "userkey_abort",
        "userkey_flush",
        "userkey_open_session",
    ] {
        check(&worker, &format!("auth_{name}"), &[]).await;
    }
    assert_eq!(get(&worker, "/metrics").await.status, 200);
    assert_eq!(get(&worker, "/v1/chat/completions").await.json(), json!({"error": "Unauthorized"}));
}

#[tokio::test]
async fn fact_52_loads_and_the_old_load() {
    let new = worker(|_| ()).await;
    for name in ["get_load", "v1_loads_bad_section", "v1_loads_bad_rank", "v1_loads_core"] {
        check(&new, name, &[]).await;
    }
    let old = worker(|config| {
        config.release = Release::V0_5_11;
        config.enable_session_radix_cache = true;
        config.dp_size = 2;
    })
    .await;
    let load = get(&old, "/get_load").await;
    let keys: Vec<String> = load.json()[0].as_object().unwrap().keys().cloned().collect();
    assert_eq!(keys, ["dp_rank", "num_reqs", "num_waiting_reqs", "num_tokens", "num_pending_tokens", "ts_tic"]);
    assert_eq!((load.status, load.json().as_array().map(Vec::len)), (200, Some(2)));
    assert_eq!(get(&old, "/ready").await.status, 404);
    assert_eq!(get(&old, "/server_info").await.json()["version"], "0.5.11");
    assert_eq!(ask(&old, with(chat(2), "session_id", json!("s"))).await.status, 200);
    assert_eq!(get(&old, "/_sim/state").await.json()["tags"], 0, "the field does not exist yet");
}

#[tokio::test]
async fn fact_53_an_abort_is_200_for_any_rid() {
    let worker = worker(|_| ()).await;
    check(&worker, "abort_unknown_rid", &[]).await;
    check(&worker, "abort_empty", &[]).await;
}

#[tokio::test]
async fn fact_54_metrics_are_off_unless_enabled_and_stale_between_batches() {
    let off = worker(|_| ()).await;
    check(&off, "metrics_disabled", &[]).await;
    let worker = worker(|config| {
        config.enable_metrics = true;
        config.enable_streaming_session = true;
    })
    .await;
    let gauge = async |name: &str| {
        let answer = get(&worker, "/metrics").await;
        assert_eq!(answer.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
        let text = answer.text();
        let line = text.lines().find(|line| line.starts_with(&format!("sglang:{name}{{")));
        let line = line.unwrap_or_else(|| panic!("{name}: {text}"));
        assert!(line.contains("model_name=\"tiny\"") && line.contains("priority=\"\""), "{line}");
        line.rsplit(' ').next().unwrap().to_owned()
    };
    assert_eq!(
        (gauge("max_total_num_tokens").await.as_str(), gauge("num_running_reqs").await.as_str()),
        ("20000.0", "0.0")
    );
    assert_eq!(ask(&worker, chat(5)).await.status, 200);
    assert_eq!(gauge("num_running_reqs").await, "1.0", "as it was when the batch began, though nothing runs now");
    let load = get(&worker, "/v1/loads").await.json()["loads"][0].clone();
    assert_eq!(load["num_running_reqs"], 0, "which the loads know");
    // A pool that is stuck looks empty here.
    post(&worker, "/_sim/fault", json!({"kind": "wedge"})).await;
    let mut stuck = Connection::open(worker.addr()).await;
    stuck.post("/v1/chat/completions", &chat(2)).await;
    until("it waits", async || worker.engine_requests() == 1).await;
    assert_eq!(gauge("num_queue_reqs").await, "0.0");
    assert_eq!(get(&worker, "/v1/loads").await.json()["loads"][0]["num_waiting_reqs"], 1);
    post(&worker, "/open_session", json!({"capacity_of_str_len": 1, "streaming": true})).await;
    assert_eq!(gauge("num_streaming_sessions").await, "0.0");
}
