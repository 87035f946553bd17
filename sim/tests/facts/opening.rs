//! Opening and closing sessions.

use crate::{
    client::{get, post, post_with, send},
    recorded::check,
    sessions::{long_turn, open, streaming},
    worker,
};
use serde_json::json;
use turnstile_sim::Frontend;

#[tokio::test]
async fn fact_01_an_open_answers_with_the_id_as_a_bare_text() {
    let worker = worker(|_| ()).await;
    check(&worker, "open_session_named", &[]).await;
    let body = json!({"capacity_of_str_len": 1, "session_id": "s \"1\""});
    assert_eq!(post(&worker, "/open_session", body).await.text(), "\"s \\\"1\\\"\"");
}

#[tokio::test]
async fn fact_02_an_id_is_made_up_of_32_hex_digits() {
    let worker = worker(|_| ()).await;
    check(&worker, "open_session_minimal", &[]).await;
    let open = async || post(&worker, "/open_session", json!({"capacity_of_str_len": 1})).await.json();
    let (one, other) = (open().await, open().await);
    assert!(
        one.as_str().is_some_and(|id| id.len() == 32 && id.chars().all(|digit| digit.is_ascii_hexdigit())),
        "{one}"
    );
    assert_ne!(one, other);
}

#[tokio::test]
async fn fact_03_an_open_without_a_capacity_is_refused() {
    let worker = worker(|_| ()).await;
    check(&worker, "open_session_missing_capacity", &[]).await;
    check(&worker, "open_session_bad_type", &[]).await;
}

#[tokio::test]
async fn fact_04_an_id_that_is_open_or_closing_is_refused() {
    let worker = worker(streaming).await;
    check(&worker, "open_session_named", &[]).await;
    check(&worker, "open_session_duplicate", &[]).await;
    open(&worker, "s1").await;
    let _turn = long_turn(&worker, "s1", "one", 3500).await;
    post(&worker, "/close_session", json!({"session_id": "s1"})).await;
    check(&worker, "open_session_while_closing", &[]).await;
    // Of several opens at once one is served.
    let body = || json!({"capacity_of_str_len": 1, "session_id": "same"});
    let (a, b, c) = tokio::join!(
        post(&worker, "/open_session", body()),
        post(&worker, "/open_session", body()),
        post(&worker, "/open_session", body())
    );
    let mut all = [a.status, b.status, c.status];
    all.sort_unstable();
    assert_eq!(all, [200, 400, 400]);
}

#[tokio::test]
async fn fact_05_a_streaming_session_needs_the_flag() {
    let worker = worker(|_| ()).await;
    check(&worker, "open_streaming_when_disabled", &[]).await;
    check(&worker, "open_plain_when_streaming_disabled", &[]).await;
}

#[tokio::test]
async fn fact_06_unknown_keys_are_ignored_and_an_empty_id_is_an_id() {
    let worker = worker(streaming).await;
    check(&worker, "open_session_unknown_field", &[]).await;
    check(&worker, "open_session_empty_id", &[]).await;
    let body = json!({"capacity_of_str_len": 1, "session_id": ""});
    assert_eq!(post(&worker, "/open_session", body).await.status, 400, "it is open");
}

#[tokio::test]
async fn fact_07_a_close_is_200_and_empty_for_any_id() {
    let worker = worker(|_| ()).await;
    check(&worker, "close_session_ok", &[]).await;
    check(&worker, "close_session_unknown", &[]).await;
}

#[tokio::test]
async fn fact_08_a_close_without_an_id_is_refused() {
    let worker = worker(|_| ()).await;
    check(&worker, "close_session_missing_id", &[]).await;
}

#[tokio::test]
async fn fact_09_a_get_with_a_body_opens_and_closes() {
    let worker = worker(streaming).await;
    check(&worker, "open_session_get_with_body", &[]).await;
    let open = json!({"capacity_of_str_len": 1, "session_id": "g"}).to_string();
    let close = json!({"session_id": "g"}).to_string();
    for _ in 0..2 {
        assert_eq!(send(worker.addr(), "GET", "/open_session", &[], open.as_bytes()).await.status, 200);
        assert_eq!(send(worker.addr(), "GET", "/close_session", &[], close.as_bytes()).await.status, 200);
    }
}

#[tokio::test]
async fn fact_25_the_rust_frontend_has_no_sessions_and_fewer_routes() {
    let worker = worker(|config| {
        config.frontend = Frontend::Rust;
        config.enable_streaming_session = true;
    })
    .await;
    for name in ["open", "open_dup", "close", "close_unknown", "gen_session_unknown", "chat_session_params_unknown"] {
        check(&worker, &format!("rust_{name}"), &[]).await;
    }
    for name in ["ready", "ping", "root", "responses", "messages", "embeddings", "rerank", "score", "pause", "get_load"]
    {
        check(&worker, &format!("rust_{name}"), &[]).await;
    }
    for name in ["chat", "chat_session_id", "chat_unknown_field", "chat_unknown_model", "dp_header_bad", "models"] {
        check(&worker, &format!("rust_{name}"), &[]).await;
    }
    for name in ["unknown", "wrong_method", "abort", "flush", "loads_bad"] {
        check(&worker, &format!("rust_{name}"), &[]).await;
    }
    assert_eq!(get(&worker, "/server_info").await.json()["frontend"], "rust");
    let headers = [("X-Data-Parallel-Rank", "7")];
    let chat = json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(post_with(&worker, "/v1/chat/completions", &headers, chat).await.status, 200);
}
