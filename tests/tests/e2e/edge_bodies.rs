//! Encoded request bodies, and bodies too large, whichever way they come.

use serde_json::json;
use std::io::Write as _;
use turnstile_tests::harness::{Answer, CHAT, Connection, Request, Setup, WorkerExt, chat, until};

const CODINGS: [&str; 5] = ["gzip", "x-gzip", "deflate", "br", "zstd"];

fn encode(coding: &str, body: &[u8]) -> Vec<u8> {
    match coding {
        "gzip" | "x-gzip" => {
            let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(body).unwrap();
            encoder.finish().unwrap()
        }
        "deflate" => {
            let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(body).unwrap();
            encoder.finish().unwrap()
        }
        "br" => {
            let mut out = Vec::new();
            brotli::CompressorWriter::new(&mut out, 4096, 1, 22).write_all(body).unwrap();
            out
        }
        "zstd" => zstd::encode_all(body, 1).unwrap(),
        other => panic!("{other}"),
    }
}

fn assert_refused(answer: &Answer, status: u16, code: &str, word: &str) {
    assert_eq!(answer.status, status, "{}", answer.text());
    let error = answer.error();
    assert_eq!(error["code"], code);
    assert!(error["message"].as_str().unwrap().contains(word), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_encoded_body_reaches_the_worker_decoded() {
    let rig = Setup::new().sim(|c| c.context_length = 1 << 20).start().await;
    let http2 = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    for coding in CODINGS {
        for text in ["Hello".to_owned(), "Hello, you. ".repeat(8_000)] {
            rig.worker().clear_requests();
            let body = chat(&text);
            let encoded = encode(coding, body.to_string().as_bytes());
            let request = Request::post(CHAT, encoded.clone()).header("content-encoding", coding);
            for request in [request.clone(), request.chunked(1000)] {
                assert_eq!(rig.send(&request).await.status, 200, "{coding}");
            }
            let request = http2.post(format!("http://{}{CHAT}", rig.addr())).header("content-encoding", coding);
            let request = request.header("content-type", "application/json").body(encoded);
            assert_eq!(request.send().await.unwrap().status(), 200, "{coding}");
            let seen = rig.worker().on(CHAT);
            assert_eq!(seen.len(), 3);
            for seen in seen {
                assert!(!seen.headers.contains_key("content-encoding"), "{coding}");
                assert_eq!(seen.headers["content-length"], seen.body.len().to_string(), "{coding}");
                assert_eq!(seen.json()["messages"], body["messages"], "{coding}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_encoding_that_is_not_decoded_is_415_and_says_which_are() {
    let rig = Setup::new().start().await;
    for coding in ["compress", "gzip, br", "gzip,gzip", "lz4", "gzip;q=1"] {
        let answer = rig.send(&Request::json(CHAT, &chat("Hello")).header("content-encoding", coding)).await;
        assert_refused(&answer, 415, "unsupported_encoding", "Content-Encoding");
        assert_eq!(answer.header("accept-encoding"), Some("gzip, deflate, br, zstd"), "{coding}");
    }
    let identity = Request::json(CHAT, &chat("Hello")).header("content-encoding", "identity");
    assert_eq!(rig.send(&identity).await.status, 200);
    assert_eq!(rig.worker().turns().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn decoding_can_be_switched_off() {
    let rig = Setup::new().set("limits.body_decoding", "false").start().await;
    let encoded = encode("gzip", chat("Hello").to_string().as_bytes());
    let answer = rig.send(&Request::post(CHAT, encoded).header("content-encoding", "gzip")).await;
    assert_refused(&answer, 415, "unsupported_encoding", "limits.body_decoding");
    assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_not_what_its_encoding_says_is_400() {
    let rig = Setup::new().start().await;
    for coding in CODINGS {
        let whole = encode(coding, chat("Hello").to_string().as_bytes());
        let cut = whole[..whole.len() - 3].to_vec();
        let longer = [&whole[..], b"and more"].concat();
        for body in [cut, longer, b"{\"model\":\"sim\"}".to_vec(), Vec::new()] {
            let answer = rig.send(&Request::post(CHAT, body).header("content-encoding", coding)).await;
            assert_refused(&answer, 400, "bad_request", "Content-Encoding");
        }
    }
    assert!(rig.worker().turns().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_decodes_to_more_than_the_limit_is_413() {
    let rig = Setup::new().set("limits.body_bytes", "\"1MiB\"").start().await;
    let bomb = vec![b' '; 64 << 20];
    for coding in ["gzip", "deflate", "br", "zstd"] {
        let encoded = encode(coding, &bomb);
        assert!(encoded.len() < 1 << 20, "{coding}: {}", encoded.len());
        let answer = rig.send(&Request::post(CHAT, encoded).header("content-encoding", coding)).await;
        assert_refused(&answer, 413, "body_too_large", "limits.body_bytes");
    }
    assert!(rig.worker().turns().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn many_bombs_at_once_leave_memory_as_it_was() {
    let rig = Setup::new().set("limits.body_bytes", "\"1MiB\"").start().await;
    let bomb = encode("br", &vec![b' '; 64 << 20]);
    let request = Request::post(CHAT, bomb).header("content-encoding", "br");
    let send = async || {
        for _ in 0..20 {
            assert_eq!(rig.send(&request).await.status, 413);
        }
    };
    send().await;
    let before = resident();
    futures::future::join_all((0..16).map(|_| send())).await;
    let grown = resident().saturating_sub(before);
    assert!(grown < 64 << 20, "320 bombs of 64 MiB grew the process by {grown} bytes");
}

/// Resident bytes of this process.
pub fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").trim().parse::<usize>().unwrap() * 1024
}

// === 65 MB ===

const OVER: usize = 65 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn sixty_five_megabytes_are_413_even_for_a_client_that_sends_all_before_it_reads() {
    let rig = Setup::new().start().await;
    let body = vec![b' '; OVER];
    for request in [Request::post(CHAT, body.clone()), Request::post(CHAT, body).chunked(100_000)] {
        let mut connection = rig.connect().await;
        // Every byte is taken: none of these writes may fail.
        connection.send_whole(&request).await;
        let answer = connection.answer().await;
        assert_refused(&answer, 413, "body_too_large", "limits.body_bytes");
        assert_eq!(answer.header("connection"), Some("close"));
        connection.closed().await;
    }
    assert!(rig.worker().turns().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_five_megabytes_over_http2_are_413() {
    let rig = Setup::new().start().await;
    let client = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    let url = format!("http://{}{CHAT}", rig.addr());
    let declared = client.post(&url).body(vec![b' '; OVER]);
    let pieces = futures::stream::iter((0..OVER / (1 << 20)).map(|_| Ok::<_, std::io::Error>(vec![b' '; 1 << 20])));
    let streamed = client.post(&url).body(reqwest::Body::wrap_stream(pieces));
    for request in [declared, streamed] {
        let answer = request.send().await.unwrap();
        assert_eq!(answer.status(), 413);
        let error: serde_json::Value = answer.json().await.unwrap();
        assert!(error["error"]["message"].as_str().unwrap().contains("limits.body_bytes"), "{error}");
    }
    // The connection goes on.
    assert_eq!(client.post(&url).json(&chat("Hello")).send().await.unwrap().status(), 200);
    assert_eq!(rig.worker().turns().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_where_none_belongs_is_not_read_and_hides_no_request() {
    let rig = Setup::new().start().await;
    let hidden = Request::get("/v1/models").head();
    for method in ["GET", "HEAD", "POST", "OPTIONS"] {
        let mut connection = rig.connect().await;
        let head = format!("{method} /live HTTP/1.1\r\nhost: gateway\r\ncontent-length: {}\r\n\r\n", 100_000_000);
        connection.write(head.as_bytes()).await;
        for _ in 0..100 {
            connection.write(&hidden).await;
        }
        let answer = String::from_utf8_lossy(&connection.everything().await).to_ascii_lowercase();
        assert_eq!(answer.matches("http/1.1 ").count(), 1, "{method}: {answer}");
        assert!(answer.contains("\r\nconnection: close"), "{method}: {answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_writers_of_bodies_hold_nothing_but_what_they_sent() {
    let rig = Setup::new().start().await;
    let before = resident();
    let mut writers: Vec<Connection> = Vec::new();
    for _ in 0..500 {
        let mut connection = rig.connect().await;
        connection.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 67108864\r\n\r\n").await;
        connection.write(&[b' '; 1000]).await;
        connection.write(&[b' '; 1000]).await;
        writers.push(connection);
    }
    rig.until_metric("turnstile_requests_in_progress", &[("route", "chat")], 500.0).await;
    let grown = resident().saturating_sub(before);
    assert!(grown < 500 * (256 << 10), "500 slow bodies cost {grown} bytes");
    assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200, "others are served meanwhile");
    drop(writers);
    rig.until_metric("turnstile_requests_total", &[("status", "499")], 500.0).await;
    assert_eq!(rig.metric("turnstile_requests_in_progress", &[]).await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_that_are_too_many_bytes_together_are_refused_until_there_is_room() {
    let rig = Setup::new().set("limits.bodies_bytes", "\"1MiB\"").start().await;
    let half = vec![b' '; 600 << 10];
    let length = half.len() + 2;
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n");
    let mut first = rig.connect().await;
    first.write(&[head.as_bytes(), &half].concat()).await;
    let large = async || rig.send(&Request::post(CHAT, half.clone())).await;
    until("the first body takes its room", async || large().await.status == 503).await;
    let answer = large().await;
    assert_refused(&answer, 503, "queue_full", "limits.bodies_bytes");
    assert_eq!(answer.header("retry-after"), Some("1"));
    assert_eq!(rig.post(CHAT, &chat("small")).await.status, 200, "a small one finds room");
    first.write(b"{}").await;
    assert_eq!(first.answer().await.status, 400, "the first was read");
    // Its room is free again, and so is that of clients that leave, and of turns that have ended.
    for left in 1..=3 {
        let mut leaving = rig.connect().await;
        leaving.write(&[head.as_bytes(), &half].concat()).await;
        drop(leaving);
        rig.until_metric("turnstile_requests_total", &[("status", "499")], f64::from(left)).await;
    }
    let body = [chat("Hello").to_string().as_bytes(), &half].concat();
    for _ in 0..3 {
        // The answer may be here a moment before the turn is over.
        until("a large turn is served", async || rig.send(&Request::post(CHAT, body.clone())).await.status == 200)
            .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_may_come_byte_by_byte() {
    let rig = Setup::new().start().await;
    let body = json!({"model": "sim", "messages": [{"role": "user", "content": "Hello"}]}).to_string();
    let request = Request::post(CHAT, body.clone()).chunked(1);
    let mut connection = rig.connect().await;
    for byte in [request.head(), request.framed_body()].concat() {
        connection.write(&[byte]).await;
    }
    assert_eq!(connection.answer().await.status, 200);
    assert_eq!(rig.worker().on(CHAT)[0].json()["messages"][0]["content"], "Hello");
}
