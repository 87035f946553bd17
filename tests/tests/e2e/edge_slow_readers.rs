//! Clients that take their answers slowly or not at all: the worker is held back, and nothing piles up here.

use crate::edge_bodies::resident;
use bytes::Bytes;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use turnstile_tests::harness::{CHAT, DEADLINE, Flood, Request, Rig, Scripted, Setup, chat, chat_stream, until};

const STREAMS: usize = 1000;
/// What the kernel may keep of one stream in its four buffers between worker and client, with the gateway's own.
pub const MOST_OF_ONE: u64 = 16 << 20;
/// What the gateway may keep of one stream.
const MEMORY_OF_ONE: usize = 400 << 10;
/// The longest that the buffers of all streams take to fill on a busy machine: they hold gigabytes.
const FILLED: Duration = Duration::from_secs(120);

/// A client with a small receive buffer, which has read nothing but the beginning of its answer.
async fn slow_client(rig: &Rig) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(8 * 1024).unwrap();
    let mut stream = socket.connect(rig.addr()).await.unwrap();
    let request = Request::json(CHAT, &chat_stream("Hello"));
    stream.write_all(&[request.head(), request.framed_body()].concat()).await.unwrap();
    let mut beginning = [0; 100];
    stream.read_exact(&mut beginning).await.unwrap();
    assert!(beginning.starts_with(b"HTTP/1.1 200 "), "{:?}", String::from_utf8_lossy(&beginning));
    stream
}

/// Waits until the worker gets no byte further for many looks in a row, and says how far it got.
pub async fn held_back(worker: &Flood) -> u64 {
    let mut seen = (worker.sent(), 0);
    let looking = async {
        while seen.1 < 25 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let now = worker.sent();
            seen = if now == seen.0 { (now, seen.1 + 1) } else { (now, 0) };
        }
        seen.0
    };
    tokio::time::timeout(FILLED, looking).await.expect("the worker is held back")
}

fn setup(worker: &Flood) -> Setup {
    Setup::new()
        .workers(0)
        .external(worker.url())
        .set("threads", "2")
        .set("admission.max_in_flight_per_worker", "100000")
        .set("timeouts.client_write_s", "3600")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_streams_that_nobody_reads_hold_the_worker_back_and_memory_flat() {
    let worker = Flood::start().await;
    let rig = setup(&worker).start().await;
    drop(slow_client(&rig).await);
    until("the first is over", async || rig.in_flight() == 0).await;
    let before = resident();
    let mut clients = Vec::new();
    for _ in 0..STREAMS {
        clients.push(slow_client(&rig).await);
    }
    until("all streams have begun", async || worker.begun() == STREAMS + 1).await;
    let sent = held_back(&worker).await;
    assert!(worker.most_of_one() < MOST_OF_ONE, "one stream got {} bytes ahead", worker.most_of_one());
    let grown = resident().saturating_sub(before);
    println!("{STREAMS} streams: {sent} bytes sent and waiting, resident memory grew by {grown} bytes");
    assert!(grown < STREAMS * MEMORY_OF_ONE, "{STREAMS} slow readers cost {grown} bytes");

    // Some read on: the worker gets on again, and is held back again, at the same memory.
    let read_on = clients.iter_mut().take(8).map(async |client| {
        let mut some = vec![0; 4 << 20];
        client.read_exact(&mut some).await.unwrap();
    });
    futures::future::join_all(read_on).await;
    let later = held_back(&worker).await;
    assert!(later > sent, "the streams go on");
    let grown = resident().saturating_sub(before);
    assert!(grown < STREAMS * MEMORY_OF_ONE, "after reading on: {grown} bytes");

    assert_eq!(rig.in_flight() as usize, STREAMS);
    drop(clients);
    until("all turns are over", async || rig.in_flight() == 0).await;
    until("all streams are broken off", async || worker.ended() == STREAMS + 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn http2_streams_that_nobody_reads_hold_the_worker_back_each_by_itself() {
    let worker = Flood::start().await;
    let rig = setup(&worker).start().await;
    // Windows in which the streams that are not read leave room on their connection for the one that is.
    let client = reqwest::Client::builder()
        .http2_prior_knowledge()
        .http2_initial_stream_window_size(64 * 1024)
        .http2_initial_connection_window_size(64 << 20)
        .build()
        .unwrap();
    let ask = async || {
        let answer = client.post(format!("http://{}{CHAT}", rig.addr())).json(&chat_stream("Hello")).send().await;
        answer.unwrap()
    };
    let before = resident();
    let mut answers = Vec::new();
    for _ in 0..100 {
        answers.push(ask().await);
    }
    until("all streams have begun", async || worker.begun() == 100).await;
    let sent = held_back(&worker).await;
    assert!(worker.most_of_one() < MOST_OF_ONE, "one stream got {} bytes ahead", worker.most_of_one());
    let grown = resident().saturating_sub(before);
    assert!(grown < 100 * MEMORY_OF_ONE, "100 slow readers cost {grown} bytes");
    // One of them reads, whatever the others do.
    let mut reader = answers.pop().unwrap();
    let mut read = 0;
    while read < 32 << 20 {
        read += reader.chunk().await.unwrap().unwrap().len();
    }
    assert!(worker.sent() > sent + (16 << 20));
    drop((reader, answers));
    until("all turns are over", async || rig.in_flight() == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http2_client_that_takes_a_large_answer_little_by_little_gets_all_of_it() {
    let text = "a".repeat(256 * 1024);
    let body = serde_json::json!({"id": "1", "object": "chat.completion", "model": "sim", "choices": [
        {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    ]})
    .to_string();
    let length = body.len();
    let head = format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n");
    let worker = Scripted::start(format!("{head}{body}")).await;
    // Far more than one wait takes on a busy machine, and less than all of them together.
    let limit = Duration::from_secs(5);
    let seconds = limit.as_secs().to_string();
    let rig = Setup::new().external(worker.url()).set("timeouts.client_write_s", &seconds).start().await;
    let exchange = async {
        let stream = TcpStream::connect(rig.addr()).await.unwrap();
        let (send, connection) = h2::client::handshake(stream).await.unwrap();
        let mut driver = tokio::task::JoinSet::new();
        driver.spawn(connection);
        let mut send = send.ready().await.unwrap();
        let request = http::Request::post(format!("http://gateway{CHAT}")).header("content-type", "application/json");
        let (answer, mut out) = send.send_request(request.body(()).unwrap(), false).unwrap();
        out.send_data(Bytes::from(chat("Hello").to_string()), true).unwrap();
        let mut body = answer.await.unwrap().into_body();
        let (mut read, began) = (0, Instant::now());
        while let Some(piece) = body.data().await {
            let piece = piece.unwrap();
            read += piece.len();
            // What the client takes makes room for as much again, well within the limit of one wait.
            tokio::time::sleep(limit / 8 * u32::try_from(piece.len()).unwrap() / (16 * 1024)).await;
            body.flow_control().release_capacity(piece.len()).unwrap();
        }
        (read, began.elapsed())
    };
    let (read, took) = tokio::time::timeout(DEADLINE, exchange).await.expect("an end within the deadline");
    assert_eq!(read, length);
    assert!(took > limit, "the answer went out in {took:?}: no test of the limit");
}
