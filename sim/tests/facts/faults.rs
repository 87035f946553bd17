//! Trouble on demand, as a client sees it.

use crate::{
    client::{Answer, Connection, get, parse, post, request_bytes, send},
    until, worker,
};
use serde_json::{Value, json};
use std::{
    io::{ErrorKind, Write as _},
    os::unix::net::UnixStream,
    time::Duration,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::Instant,
};
use turnstile_sim::{Fault, FaultKind, Place, SimWorker};

const CHAT: &str = "/v1/chat/completions";

fn chat(tokens: usize) -> Value {
    json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "ignore_eos": true})
}

fn stream(tokens: usize) -> Value {
    let mut body = chat(tokens);
    body["stream"] = json!(true);
    body
}

async fn ask(worker: &SimWorker, body: Value) -> Answer {
    post(worker, CHAT, body).await
}

/// Sends a chat request on a connection of its own.
async fn sent(worker: &SimWorker, body: &Value) -> Connection {
    let mut connection = Connection::open(worker.addr()).await;
    connection.post(CHAT, body).await;
    connection
}

/// The answer to a chat request that meets this fault: its bytes, and whether the connection was reset at its end.
async fn broken(worker: &SimWorker, kind: FaultKind, body: &Value) -> (String, bool) {
    worker.faults().add(Fault::once(kind));
    let (bytes, reset) = sent(worker, body).await.read_to_close().await;
    assert_eq!(ask(worker, chat(2)).await.status, 200, "it hit once, and the worker is well");
    (String::from_utf8_lossy(&bytes).into_owned(), reset)
}

/// Head and body.
fn split(answer: &str) -> (&str, &str) {
    answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no whole head: {answer:?}"))
}

#[tokio::test]
async fn faults_happen_on_demand() {
    let worker = worker(|_| ()).await;
    worker.faults().add(Fault::once(FaultKind::Status(500, None)));
    assert_eq!(ask(&worker, chat(2)).await.status, 500);
    worker.faults().add(Fault::once(FaultKind::ErrorEvent(503, "busy".to_owned())));
    let event = ask(&worker, stream(2)).await;
    assert_eq!((event.status, &event.json_events()[0]["error"]["message"]), (200, &json!("busy")));
    // As the protocol has it.
    worker.faults().add(Fault::times(3, FaultKind::ErrorEvent(503, "busy".to_owned())));
    assert_eq!(ask(&worker, chat(2)).await.status, 503);
    let messages = post(&worker, "/v1/messages", stream(2)).await;
    assert!(messages.text().contains("event: error\n") && messages.text().contains("overloaded_error"));
    let responses = post(&worker, "/v1/responses", json!({"model": "tiny", "input": "x", "stream": true})).await;
    assert!(responses.text().contains("event: response.failed\n"));
    assert_eq!(ask(&worker, chat(2)).await.status, 200, "each fault hit once");
    // Over HTTP, and for one path.
    let fault = json!({"kind": "status", "status": 429, "path": "/v1/loads"});
    assert_eq!(post(&worker, "/_sim/fault", fault).await.status, 200);
    assert_eq!((get(&worker, "/v1/loads").await.status, ask(&worker, chat(2)).await.status), (429, 200));
    send(worker.addr(), "DELETE", "/_sim/fault", &[], b"").await;
    assert_eq!(get(&worker, "/v1/loads").await.status, 200);
    let refused = post(&worker, "/_sim/fault", json!({"kind": "nonsense"})).await;
    assert_eq!((refused.status, &refused.json()["error"]), (400, &json!("unknown fault kind \"nonsense\"")));
    post(&worker, "/_sim/fault", json!({"kind": "crash"})).await;
    worker.died().await;
}

#[tokio::test]
async fn a_cut_closes_and_a_reset_resets() {
    let worker = worker(|_| ()).await;
    for body in [chat(9), stream(9)] {
        assert_eq!(broken(&worker, FaultKind::Cut(Place::Head), &body).await, (String::new(), false));
        assert_eq!(broken(&worker, FaultKind::Reset(Place::Head), &body).await, (String::new(), true));
        for (kind, reset) in [(FaultKind::Cut as fn(Place) -> FaultKind, false), (FaultKind::Reset, true)] {
            let (answer, was_reset) = broken(&worker, kind(Place::Body(0)), &body).await;
            assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && split(&answer).1.is_empty(), "{answer:?}");
            assert_eq!(was_reset, reset);
            let (answer, was_reset) = broken(&worker, kind(Place::Body(200)), &body).await;
            let cut = parse(answer.as_bytes());
            assert!(!cut.complete && cut.body.len() == 200, "{} {}", cut.complete, cut.body.len());
            assert_eq!(was_reset, reset);
        }
    }
    // The framing is what it was.
    let (whole, _) = broken(&worker, FaultKind::Cut(Place::Body(9)), &chat(9)).await;
    assert!(split(&whole).0.contains("content-length: "), "{whole}");
    // An answer that is shorter lacks only its end.
    let (short, _) = broken(&worker, FaultKind::Cut(Place::Body(1 << 20)), &stream(3)).await;
    assert!(short.contains("[DONE]") && !short.ends_with("0\r\n\r\n"), "{short}");
}

#[tokio::test]
async fn a_stall_sends_no_more_and_keeps_the_connection() {
    let worker = worker(|_| ()).await;
    worker.faults().add(Fault::once(FaultKind::Stall(150)));
    let mut stalled = sent(&worker, &stream(9)).await;
    stalled.read_until("\r\n\r\n").await;
    until("150 bytes are there", async || parse(&stalled.read_for(Duration::from_millis(1)).await).body.len() == 150)
        .await;
    let before = stalled.read_for(Duration::ZERO).await;
    assert_eq!(stalled.read_for(Duration::from_millis(100)).await, before);
    assert!(!stalled.is_closed());
}

#[tokio::test]
async fn a_half_closed_worker_says_no_more_and_reads_on() {
    // A stream takes 4.8 s: still running when it is counted, and over by itself in the time that is waited.
    let worker = worker(|config| config.speed = 4.0).await;
    for place in [Place::Head, Place::Body(0), Place::Body(150)] {
        worker.faults().add(Fault::once(FaultKind::HalfClose(place)));
        let mut connection = sent(&worker, &stream(3000)).await;
        let so_far = connection.read_to_eof().await;
        match place {
            Place::Head => assert!(so_far.is_empty()),
            Place::Body(bytes) => assert_eq!(parse(&so_far).body.len(), bytes),
        }
        // It would answer a write with a reset if it did not read.
        for _ in 0..3 {
            connection.send(b"more").await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        if place != Place::Head {
            assert_eq!(worker.engine_requests(), 1);
        }
        drop(connection);
        until("the engine is idle", async || worker.engine_requests() == 0).await;
    }
}

#[tokio::test]
async fn garbage_is_no_http_and_noise_is_no_event() {
    let worker = worker(|_| ()).await;
    let (answer, _) = broken(&worker, FaultKind::Garbage(Place::Head), &chat(9)).await;
    assert!(!answer.is_empty() && !answer.starts_with("HTTP"), "{answer:?}");
    let (answer, _) = broken(&worker, FaultKind::Garbage(Place::Body(150)), &stream(9)).await;
    let (head, body) = split(&answer);
    assert!(head.contains("transfer-encoding: chunked") && body.contains("nothing that HTTP knows"), "{answer:?}");
    assert!(!answer.ends_with("0\r\n\r\n"));
    for body in [chat(9), stream(9)] {
        worker.faults().add(Fault::once(FaultKind::Noise(150)));
        let noisy = ask(&worker, body.clone()).await;
        assert!(noisy.complete && noisy.text().contains("nothing that HTTP knows"));
        // Where there is a length, the noise takes the place of the end.
        assert_eq!(noisy.text().ends_with("data: [DONE]\n\n"), body["stream"] == true);
    }
}

#[tokio::test]
async fn a_length_can_be_a_lie() {
    let worker = worker(|_| ()).await;
    let (answer, _) = broken(&worker, FaultKind::WrongLength(10), &chat(9)).await;
    let short = parse(answer.as_bytes());
    assert!(!short.complete && short.header("content-length") == Some(&(short.body.len() + 10).to_string()));
    worker.faults().add(Fault::once(FaultKind::WrongLength(-10)));
    let mut connection = sent(&worker, &chat(9)).await;
    connection.read_until("weight_versions").await;
    let long = parse(&connection.read_for(Duration::from_millis(50)).await);
    assert_eq!(long.header("content-length"), Some((long.body.len() - 10).to_string().as_str()));
    assert!(!connection.is_closed());
}

#[tokio::test]
async fn slow_answers_and_delays_take_their_time() {
    let worker = worker(|_| ()).await;
    for fault in [FaultKind::Slow(Duration::from_millis(20)), FaultKind::Delay(Duration::from_millis(200))] {
        worker.faults().add(Fault::once(fault));
        let before = Instant::now();
        let answer = ask(&worker, stream(12)).await;
        assert!(answer.complete && answer.text().contains("[DONE]"));
        assert!(before.elapsed() >= Duration::from_millis(200), "{:?}", before.elapsed());
    }
}

#[tokio::test]
async fn a_hanging_worker_answers_nothing() {
    let worker = worker(|_| ()).await;
    worker.faults().add(Fault::once(FaultKind::Hang));
    let hung = tokio::time::timeout(Duration::from_millis(200), ask(&worker, chat(2))).await;
    assert!(hung.is_err());
}

#[tokio::test]
async fn a_worker_that_refuses_goes_on_with_what_it_has_and_comes_back() {
    // So slow that the stream, of 19 s, outlasts the refusal whatever else this machine does.
    let worker = worker(|config| config.speed = 1.0).await;
    let mut idle = Connection::open(worker.addr()).await;
    idle.send(&request_bytes("GET", "/ready", &[], b"")).await;
    idle.read_until("200 OK").await;
    let mut running = sent(&worker, &stream(3000)).await;
    running.read_until("data: ").await;
    post(&worker, "/_sim/fault", json!({"kind": "refuse", "for_ms": 3000})).await;
    until("it refuses", async || {
        TcpStream::connect(worker.addr()).await.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
    })
    .await;
    assert!(!String::from_utf8_lossy(&idle.read_to_end().await).contains("503"), "the idle one is closed");
    let so_far = running.read_for(Duration::ZERO).await.len();
    until("the stream goes on", async || running.read_for(Duration::from_millis(1)).await.len() > so_far).await;
    until("it listens again", async || TcpStream::connect(worker.addr()).await.is_ok()).await;
    assert_eq!(get(&worker, "/ready").await.status, 200);
    assert_eq!(worker.engine_requests(), 1, "all that time");
    // Until cleared, when it has no end.
    worker.faults().add(Fault::always(FaultKind::Refuse));
    until("it refuses again", async || TcpStream::connect(worker.addr()).await.is_err()).await;
    worker.faults().clear();
    until("it listens again", async || TcpStream::connect(worker.addr()).await.is_ok()).await;
}

#[tokio::test]
async fn a_restart_loses_sessions_cache_and_requests_and_starts_as_a_worker_starts() {
    // So slow that the restart comes before the end of the stream.
    let worker = worker(|config| config.speed = 1.0).await;
    let open = json!({"capacity_of_str_len": 1, "session_id": "s"});
    assert_eq!(post(&worker, "/open_session", open.clone()).await.status, 200);
    let mut running = sent(&worker, &stream(3000)).await;
    running.read_until("data: ").await;
    let addr = worker.addr();
    // Both count from the restart, so each leaves time to look, also on a busy machine.
    post(&worker, "/_sim/fault", json!({"kind": "restart", "down_ms": 3000, "warmup_ms": 8000})).await;
    let (cut, reset) = running.read_to_close().await;
    assert!(!parse(&cut).complete && reset);
    until("it refuses", async || {
        TcpStream::connect(addr).await.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
    })
    .await;
    assert!(worker.is_alive());
    until("it listens", async || TcpStream::connect(addr).await.is_ok()).await;
    assert_eq!((get(&worker, "/ready").await.status, get(&worker, "/health").await.status), (503, 503));
    assert_eq!(worker.engine_requests(), 0);
    let state = get(&worker, "/_sim/state").await.json();
    assert_eq!((&state["lives"], &state["sessions"]), (&json!(2), &json!(0)));
    until("it is well", async || get(&worker, "/ready").await.status == 200).await;
    assert_eq!(post(&worker, "/open_session", open).await.status, 200, "the session is unknown");
    // A restart and then the end.
    worker.restart(Duration::from_secs(3600), Duration::ZERO);
    until("it is down", async || TcpStream::connect(addr).await.is_err()).await;
    worker.shutdown().await;
}

#[tokio::test]
async fn a_wedged_worker_looks_healthy() {
    let worker = worker(|_| ()).await;
    for frozen in [false, true] {
        post(&worker, "/_sim/fault", json!({"kind": "wedge", "frozen": frozen})).await;
        let before = get(&worker, "/v1/loads").await.json()["loads"][0].clone();
        let mut stuck = sent(&worker, &chat(2)).await;
        until("it waits", async || worker.engine_requests() == 1).await;
        assert_eq!((get(&worker, "/health").await.status, get(&worker, "/ready").await.status), (200, 200));
        let load = get(&worker, "/v1/loads").await.json()["loads"][0].clone();
        if frozen {
            assert_eq!(load, before, "its time included");
        } else {
            assert_eq!((&load["num_running_reqs"], &load["num_waiting_reqs"]), (&json!(0), &json!(1)));
            assert_ne!(load["timestamp"], before["timestamp"]);
        }
        post(&worker, "/_sim/fault", json!({"kind": "unwedge"})).await;
        stuck.read_until("chat.completion").await;
        until("it is idle", async || worker.engine_requests() == 0).await;
    }
    let waited = Instant::now();
    post(&worker, "/_sim/fault", json!({"kind": "wedge", "for_ms": 50})).await;
    assert_eq!(ask(&worker, chat(2)).await.status, 200, "it goes on by itself");
    assert!(waited.elapsed() >= Duration::from_millis(50), "{:?}", waited.elapsed());
}

#[tokio::test]
async fn a_crash_can_wait_for_its_request() {
    let worker = worker(|_| ()).await;
    worker.faults().add(Fault::once(FaultKind::Crash).on("/v1/completions"));
    assert_eq!(ask(&worker, chat(2)).await.status, 200);
    let mut connection = Connection::open(worker.addr()).await;
    connection.post("/v1/completions", &json!({"model": "tiny", "prompt": "x"})).await;
    let (answer, reset) = connection.read_to_close().await;
    assert!(answer.is_empty() && reset);
    worker.died().await;
}

#[tokio::test]
async fn after_its_crash_a_worker_answers_nothing_more() {
    let probe = request_bytes("GET", "/ready", &[], b"");
    for _ in 0..40 {
        let worker = worker(|_| ()).await;
        let (mut open, mut idle) = (Connection::open(worker.addr()).await, Connection::open(worker.addr()).await);
        idle.send(&request_bytes("GET", "/model_info", &[], b"")).await;
        let before = idle.read_until("}").await;
        // The worker shares this thread. It is about to read the requests, as this test is told at the same moment, which goes
        // first.
        let (mut told, tells) = UnixStream::pair().unwrap();
        tells.set_nonblocking(true).unwrap();
        let mut tells = tokio::net::UnixStream::from_std(tells).unwrap();
        open.send(&probe).await;
        idle.send(&probe).await;
        let fresh = Connection::with_sent(worker.addr(), &probe);
        told.write_all(b"x").unwrap();
        tells.read_u8().await.unwrap();
        worker.kill();
        assert!(open.read_to_end().await.is_empty(), "a connection that nobody used");
        assert_eq!(idle.read_to_end().await, before.as_bytes(), "one that was used before");
        assert!(fresh.read_to_end().await.is_empty(), "one that nobody accepted");
        worker.died().await;
        assert_eq!(worker.requests().len(), 1, "nor does it take them");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whom_a_crash_cut_off_may_ask_again_at_once_and_gets_no_answer() {
    for _ in 0..20 {
        let worker = worker(|_| ()).await;
        worker.faults().add(Fault::once(FaultKind::Crash));
        let (answer, reset) = sent(&worker, &chat(2)).await.read_to_close().await;
        assert!(answer.is_empty() && reset);
        if let Ok(mut again) = TcpStream::connect(worker.addr()).await {
            // Both may fail, since it is going.
            let _ = again.write_all(&request_bytes("GET", "/ready", &[], b"")).await;
            let mut answer = Vec::new();
            let _ = again.read_to_end(&mut answer).await;
            assert!(answer.is_empty(), "{}", String::from_utf8_lossy(&answer));
        }
        worker.died().await;
        assert_eq!(worker.requests().len(), 1);
    }
}

#[tokio::test]
async fn an_early_fault_leaves_the_body_unread() {
    let worker = worker(|_| ()).await;
    worker.faults().add(Fault::once(FaultKind::Status(413, None)).early());
    let mut connection = Connection::open(worker.addr()).await;
    connection.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: w\r\nContent-Length: 1000000\r\n\r\n{").await;
    connection.read_until("413").await;
    worker.faults().add(Fault::once(FaultKind::Reset(Place::Head)).early());
    let mut connection = Connection::open(worker.addr()).await;
    connection.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: w\r\nContent-Length: 1000000\r\n\r\n{").await;
    assert_eq!(connection.read_to_close().await, (Vec::new(), true));
}

#[tokio::test]
async fn a_share_of_the_requests_is_hit() {
    let worker = worker(|_| ()).await;
    worker.faults().add(Fault::always(FaultKind::Status(500, None)).with_probability(0.5, 1));
    let mut failed = 0;
    for _ in 0..40 {
        failed += u32::from(ask(&worker, chat(1)).await.status == 500);
    }
    assert!((8..=32).contains(&failed), "{failed}");
}

#[tokio::test]
async fn a_schedule_runs_by_itself() {
    let worker = worker(|_| ()).await;
    // The status waits for a request, however late that comes, if need be in the next life.
    let schedule = "[[fault]]\nkind = \"status\"\nstatus = 502\nafter_ms = 500\ncount = 1\n\n\
                    [[fault]]\nkind = \"restart\"\nafter_ms = 1500\n";
    let (client, mut seen) = (reqwest::Client::new(), Vec::<u16>::new());
    let answer = send(worker.addr(), "POST", "/_sim/fault", &[], schedule.as_bytes()).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    // Some of its requests may meet the restart.
    until("both have happened and it is well", async || {
        let url = format!("{}{CHAT}", worker.url());
        seen.extend(client.post(url).json(&chat(1)).send().await.map(|answer| answer.status().as_u16()));
        let state = client.get(format!("{}/_sim/state", worker.url())).send().await;
        let state = async { state?.json::<Value>().await }.await;
        let restarted = state.is_ok_and(|state| state["lives"] == 2);
        restarted && seen.contains(&502) && seen.last() == Some(&200)
    })
    .await;
    let hits = worker.hits();
    let at_ms: Vec<u64> = hits.iter().filter(|hit| hit.kind == "status").map(|hit| hit.at_ms).collect();
    assert!(at_ms.len() == 1 && at_ms[0] >= 500, "{hits:?}");
    let wrong = json!([{"kind": "hang", "worker": 1}]);
    let refused = send(worker.addr(), "POST", "/_sim/fault", &[], wrong.to_string().as_bytes()).await;
    assert_eq!(refused.status, 400);
}

#[tokio::test]
async fn hits_tell_which_request_met_which_fault() {
    // So slow that the restart comes before the end of the stream.
    let worker = worker(|config| config.speed = 1.0).await;
    worker.faults().add(Fault::once(FaultKind::Status(500, None)));
    let headers = [("x-request-id", "one"), ("Content-Type", "application/json")];
    send(worker.addr(), "POST", CHAT, &headers, chat(2).to_string().as_bytes()).await;
    let mut running = Connection::open(worker.addr()).await;
    let headers = [("x-request-id", "two"), ("Content-Type", "application/json")];
    running.send(&request_bytes("POST", CHAT, &headers, stream(3000).to_string().as_bytes())).await;
    running.read_until("data: ").await;
    worker.restart(Duration::ZERO, Duration::ZERO);
    running.read_to_close().await;
    until("it is back", async || TcpStream::connect(worker.addr()).await.is_ok()).await;
    let hits = get(&worker, "/_sim/hits").await.json();
    let seen: Vec<(&Value, &Value)> =
        hits.as_array().unwrap().iter().map(|hit| (&hit["kind"], &hit["request_id"])).collect();
    assert_eq!(seen, [(&json!("status"), &json!("one")), (&json!("restart"), &json!("two"))]);
    assert_eq!(get(&worker, "/_sim/hits?from=1").await.json().as_array().unwrap().len(), 1);
    assert_eq!(get(&worker, "/_sim/hits?from=x").await.status, 400);
}
