//! Request bodies: any size, any framing, and nothing changed in them but what is ours.

use bytes::Bytes;
use serde_json::{Value, json};
use turnstile_tests::harness::{CHAT, Request, Rig, Setup, WorkerExt, chat};

/// A chat body of exactly `size` bytes, with spellings that a re-encoder would not keep.
fn body_of(size: usize) -> Vec<u8> {
    let head = r#"{ "model":"sim", "temperature": 1.50e0,  "seed":12345678901234567890, "x":"\u00e9\/", "nvext":{"agent_hints":{"osl":1}},"messages":[{"role":"user","content":""#;
    let tail = r#""}] ,"max_tokens":4}"#;
    let mut body = head.as_bytes().to_vec();
    body.resize(size - tail.len(), b'a');
    body.extend_from_slice(tail.as_bytes());
    assert_eq!(body.len(), size);
    body
}

/// What the worker must get: the client's bytes without `nvext`, with the members that the gateway sets behind them.
fn assert_only_our_members_differ(client: &[u8], worker: &Bytes) {
    let without = String::from_utf8(client.to_vec()).unwrap().replacen(r#" "nvext":{"agent_hints":{"osl":1}},"#, "", 1);
    let kept = without.strip_suffix('}').unwrap();
    let worker = std::str::from_utf8(worker).unwrap();
    let added = worker.strip_prefix(kept).unwrap_or_else(|| {
        let at = kept.bytes().zip(worker.bytes()).position(|(a, b)| a != b).unwrap_or(0);
        panic!("differs at {at}: {:?}", worker.get(at.saturating_sub(40)..(at + 80).min(worker.len())))
    });
    let added: Value = serde_json::from_str(&format!("{{{}", added.trim_start_matches(','))).unwrap();
    let names: Vec<_> = added.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(names, ["rid", "return_cached_tokens_details"]);
}

fn big_setup() -> Setup {
    // The prompt of 12 MB is of one letter, which the engine's model still reads as many tokens.
    Setup::new().sim(|c| {
        c.context_length = 64 << 20;
        c.max_total_tokens = 128 << 20;
        c.prefill_tokens_per_s = 1e9;
        c.record_bytes = 64 << 20;
    })
}

async fn assert_arrives(rig: &Rig, request: &Request, body: &[u8]) {
    rig.worker().clear_requests();
    let answer = rig.send(request).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_only_our_members_differ(body, &rig.worker().on(CHAT)[0].body);
}

const SIZES: [usize; 6] = [500, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 1 << 20, 12 << 20];

#[tokio::test(flavor = "multi_thread")]
async fn a_body_of_any_size_arrives_with_a_length() {
    let rig = big_setup().start().await;
    for size in SIZES {
        let body = body_of(size);
        assert_arrives(&rig, &Request::post(CHAT, body.clone()), &body).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_of_any_size_arrives_in_chunks() {
    let rig = big_setup().start().await;
    for (size, piece) in SIZES.into_iter().zip([7, 1000, 64 << 10, 100, 4096, 60_000]) {
        let body = body_of(size);
        assert_arrives(&rig, &Request::post(CHAT, body.clone()).chunked(piece), &body).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_of_any_size_arrives_over_http2() {
    let rig = big_setup().start().await;
    let client = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    for size in SIZES {
        rig.worker().clear_requests();
        let body = body_of(size);
        let url = format!("http://{}{CHAT}", rig.addr());
        let request = client.post(url).header("content-type", "application/json").body(body.clone());
        let answer = request.send().await.unwrap();
        assert_eq!((answer.version(), answer.status().as_u16()), (http::Version::HTTP_2, 200), "{size}");
        assert!(answer.headers().contains_key("x-request-id"));
        assert!(answer.json::<Value>().await.unwrap()["choices"].is_array());
        assert_only_our_members_differ(&body, &rig.worker().on(CHAT)[0].body);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_run_side_by_side_on_one_http2_connection() {
    let rig = Setup::new().start().await;
    let client = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    let body = turnstile_tests::harness::chat_stream("[[sim:tokens=40]]");
    let ask = async || {
        let answer = client.post(format!("http://{}{CHAT}", rig.addr())).json(&body).send().await.unwrap();
        answer.text().await.unwrap()
    };
    let answers = futures::future::join_all((0..16).map(|_| ask())).await;
    assert!(answers.iter().all(|text| text.ends_with("data: [DONE]\n\n")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_over_the_limit_is_413_and_names_the_option() {
    let rig = Setup::new().set("limits.body_bytes", "\"2KiB\"").start().await;
    assert_eq!(rig.send(&Request::post(CHAT, body_of(2048))).await.status, 200);
    let over = [Request::post(CHAT, body_of(2049)), Request::post(CHAT, body_of(9000)).chunked(500)];
    for request in over {
        let answer = rig.send(&request).await;
        assert_eq!(answer.status, 413);
        assert!(answer.error()["message"].as_str().unwrap().contains("limits.body_bytes"), "{}", answer.text());
    }
    // Refused by its head alone: no byte of the body is waited for.
    let mut connection = rig.connect().await;
    connection.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n").await;
    assert_eq!(connection.answer().await.status, 413);
    connection.closed().await;
    assert_eq!(rig.worker().turns().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_expects_100_continue_gets_it_at_once() {
    let rig = Setup::new().start().await;
    let request = Request::json(CHAT, &chat("Hello")).header("expect", "100-continue");
    let mut connection = rig.connect().await;
    connection.write(&request.head()).await;
    assert_eq!(connection.head().await.status, 100);
    connection.write(&request.framed_body()).await;
    assert_eq!(connection.head().await.status, 200);
    assert!(connection.rest().await.1);
    assert!(!rig.worker().on(CHAT)[0].headers.contains_key("expect"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_would_be_too_large_is_refused_instead_of_continued() {
    let rig = Setup::new().set("limits.body_bytes", "\"2KiB\"").start().await;
    let request = Request::post(CHAT, body_of(4096)).header("expect", "100-continue");
    let mut connection = rig.connect().await;
    connection.write(&request.head()).await;
    assert_eq!(connection.head().await.status, 413);
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_over_the_limit_are_431() {
    let rig = Setup::new().set("limits.header_bytes", "\"1KiB\"").start().await;
    let answer = rig.send(&Request::json(CHAT, &chat("Hello")).header("x-long", &"a".repeat(2000))).await;
    assert_eq!(answer.status, 431);
    assert!(answer.error()["message"].as_str().unwrap().contains("limits.header_bytes"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_no_json_object_is_400_in_the_protocols_shape() {
    let rig = Setup::new().start().await;
    for body in ["", "{", "[]", "null", "{\"model\":\"sim\",}", "\u{feff}{}"] {
        assert_eq!(rig.send(&Request::post(CHAT, body)).await.error()["code"], "bad_request", "{body:?}");
        let anthropic = rig.send(&Request::post("/v1/messages", body)).await;
        assert_eq!((anthropic.status, &anthropic.json()["type"]), (400, &json!("error")), "{body:?}");
    }
    assert!(rig.worker().turns().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_pauses_in_its_body_is_408() {
    let rig = Setup::new().set("timeouts.client_body_s", "1").start().await;
    let mut connection = rig.connect().await;
    connection.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{\"mod").await;
    let answer = connection.answer().await;
    assert_eq!(answer.status, 408);
    assert!(answer.error()["message"].as_str().unwrap().contains("timeouts.client_body_s"));
    connection.closed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn members_that_steer_the_engine_do_not_reach_it() {
    let rig = Setup::new().start().await;
    let mut body = chat("Hello");
    for key in ["session_id", "session_params", "routed_dp_rank", "data_parallel_rank", "bootstrap_host", "kv_hints"] {
        body[key] = json!("x");
    }
    assert_eq!(rig.post(CHAT, &body).await.status, 200);
    let seen = rig.worker().on(CHAT)[0].json();
    let names: Vec<_> = seen.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(names, ["model", "messages", "rid", "return_cached_tokens_details"]);
}
