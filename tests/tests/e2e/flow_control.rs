//! Filters that hold bodies under flow control: what is too much waits where it comes from.

use crate::edge_slow_readers::{MOST_OF_ONE, held_back};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use turnstile_tests::harness::{
    CHAT, Flood, Guest, PluginText, Request, Rig, Scripted, Setup, built_in, chat, chat_stream, until, until_some,
};

/// Larger than what the sockets on the way take.
const BODY: usize = 48 << 20;

const ANSWER: &str = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";

/// Holds bodies of the side that `x-do` names (`q`: request, `a`: answer) until a request with `x-do: g` has come.
fn guest() -> Guest {
    Guest::on_request("(if (i32.eq (call $asked) (i32.const 103)) (then (global.set $open (i32.const 1))))").also(
        r#"
        (global $open (mut i32) (i32.const 0))
        (global $context (mut i32) (i32.const 0))
        (global $side (mut i32) (i32.const 0))
        (func $hold (param $context i32) (param $side i32) (param $letter i32) (result i32)
          (if (i32.or (global.get $open) (i32.ne (call $asked) (local.get $letter))) (then (return (i32.const 0))))
          (global.set $context (local.get $context))
          (global.set $side (local.get $side))
          (i32.const 2))
        (func (export "proxy_on_configure") (param i32 i32) (result i32) (drop (call $set_tick (i32.const 20))) (i32.const 1))
        (func (export "proxy_on_request_body") (param i32 i32 i32) (result i32)
          (call $hold (local.get 0) (i32.const 0) (i32.const 113)))
        (func (export "proxy_on_response_body") (param i32 i32 i32) (result i32)
          (call $hold (local.get 0) (i32.const 1) (i32.const 97)))
        (func (export "proxy_on_log") (param i32)
          (if (i32.eq (local.get 0) (global.get $context)) (then (global.set $context (i32.const 0)))))
        (func (export "proxy_on_tick") (param i32)
          (if (i32.and (global.get $open) (i32.ne (global.get $context) (i32.const 0))) (then
            (drop (call $effective (global.get $context)))
            (drop (call $continue_stream (global.get $side)))
            (global.set $context (i32.const 0)))))"#,
    )
}

fn setup(keys: &[&str]) -> Setup {
    let plugin = PluginText::new("holds", "guest.wasm", "filter").key("held_body_bytes = 65536").key("instances = 1");
    let plugin = keys.iter().fold(plugin.key("callback_timeout_ms = 60000"), |plugin, key| plugin.key(*key));
    let all: Vec<PluginText> = [plugin].into_iter().chain(built_in()).collect();
    Setup::new().file("guest.wasm", guest().wasm()).plugins(&all).workers(0)
}

/// A client that sends a large body as far as it is taken.
struct Upload {
    sent: Arc<AtomicUsize>,
    answer: JoinHandle<String>,
}

impl Upload {
    async fn begin(rig: &Rig) -> Self {
        let body = json!({"model": "sim", "prompt": "x".repeat(BODY)});
        let request = Request::json("/v1/completions", &body).header("x-do", "q").header("connection", "close");
        let mut stream = TcpStream::connect(rig.addr()).await.unwrap();
        let sent = Arc::new(AtomicUsize::new(0));
        let counts = Arc::clone(&sent);
        let answer = tokio::spawn(async move {
            for piece in [request.head(), request.framed_body()].concat().chunks(16 << 10) {
                if stream.write_all(piece).await.is_err() {
                    break;
                }
                counts.fetch_add(piece.len(), Ordering::SeqCst);
            }
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
            String::from_utf8_lossy(&answer).into_owned()
        });
        Self { sent, answer }
    }

    /// Waits until nothing more is taken, and says how much was.
    async fn held_back(&self) -> usize {
        let mut seen = (0, 0);
        until_some("the client is held back", async || {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let now = self.sent.load(Ordering::SeqCst);
            seen = if now == seen.0 && now > 0 { (now, seen.1 + 1) } else { (now, 0) };
            (seen.1 >= 25).then_some(now)
        })
        .await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_body_waits_at_the_client_until_the_filter_goes_on() {
    let worker = Scripted::start(ANSWER).await;
    let rig = setup(&[]).external(worker.url()).start().await;
    let upload = Upload::begin(&rig).await;
    let sent = upload.held_back().await;
    assert!(sent < BODY / 2, "{sent} bytes were taken");
    assert!(worker.heads().is_empty());
    assert_eq!(rig.send(&Request::json(CHAT, &chat("Go on")).header("x-do", "g")).await.status, 200);
    let answer = upload.answer.await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    // With what the gateway adds.
    let length = |head: &String| {
        let length =
            head.lines().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
        length.unwrap_or(0)
    };
    until("the worker has it all", async || worker.heads().iter().any(|head| length(head) > BODY)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_waits_at_the_worker_until_the_filter_goes_on() {
    let worker = Flood::start().await;
    let rig = setup(&[]).external(worker.url()).set("threads", "2").start().await;
    let held = rig.begin(&Request::json(CHAT, &chat_stream("Hello")).header("x-do", "a")).await;
    let sent = held_back(&worker).await;
    assert!(sent < MOST_OF_ONE, "{sent} bytes");
    let mut other = rig.begin(&Request::json(CHAT, &chat_stream("Go on")).header("x-do", "g")).await;
    assert_eq!(other.head().await.status, 200);
    drop(other);
    let mut held = held;
    assert_eq!(held.head().await.status, 200);
    let mut read = 0;
    while (read as u64) < 2 * MOST_OF_ONE {
        read += held.piece().await.expect("the answer goes on").len();
    }
    drop(held);
    until("all turns are over", async || rig.in_flight() == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_that_never_goes_on_has_failed() {
    for (keys, status) in [("on_error = \"closed\"", "500"), ("on_error = \"open\"", "200")] {
        let worker = Scripted::start(ANSWER).await;
        let rig = setup(&["pause_timeout_ms = 200", keys]).external(worker.url()).start().await;
        let answer = Upload::begin(&rig).await.answer.await.unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{keys}: {answer}");
    }
}
