//! The end of a gateway: nothing that was accepted fails without need, nothing is left on workers, and it is over in time.

use futures::StreamExt;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use turnstile_sim::SimWorker;
use turnstile_tests::harness::{
    CHAT, Connection, GatewayProcess, Request, Rig, Setup, WorkerExt, WorkerProcess, chat, chat_stream, send, until,
};

const BINARY: &str = env!("CARGO_BIN_EXE_turnstile-process");

fn endless(text: &str) -> Value {
    let mut body = chat_stream(text);
    body["max_tokens"] = json!(100_000);
    body["ignore_eos"] = json!(true);
    body
}

/// A worker as slow as a real one.
fn slow() -> Setup {
    Setup::new().sim(|c| {
        c.speed = 1.0;
        c.context_length = 1 << 20;
    })
}

async fn begun(rig: &Rig, body: &Value) -> Connection {
    let mut connection = rig.begin(&Request::json(CHAT, body)).await;
    assert_eq!(connection.head().await.status, 200);
    assert!(connection.piece().await.is_some());
    connection
}

fn stop(rig: Rig) -> (CancellationToken, tokio::task::JoinHandle<Vec<SimWorker>>) {
    let hurry = CancellationToken::new();
    let token = hurry.clone();
    (hurry, tokio::spawn(async move { rig.stop_unless(&token).await }))
}

#[tokio::test(flavor = "multi_thread")]
async fn readiness_goes_first_and_everything_is_served_during_the_delay() {
    let rig = Setup::new().set("shutdown.delay_s", "3600").start().await;
    let addr = rig.addr();
    let mut kept = rig.connect().await;
    kept.send(&Request::get("/live")).await;
    assert_ne!(kept.answer().await.header("connection"), Some("close"));
    let (hurry, stopping) = stop(rig);
    until("it is not ready", async || send(addr, &Request::get("/ready")).await.status == 503).await;
    let ready = send(addr, &Request::get("/ready")).await.json();
    assert_eq!(ready["status"], "stopping");
    let answer = send(addr, &Request::json(CHAT, &chat("hello"))).await;
    assert_eq!((answer.status, answer.header("connection")), (200, Some("close")));
    // An old connection has one more answer, which says that it is the last.
    kept.send(&Request::json(CHAT, &chat("hello"))).await;
    let answer = kept.answer().await;
    assert_eq!((answer.status, answer.header("connection")), (200, Some("close")));
    kept.closed().await;
    hurry.cancel();
    stopping.await.unwrap();
    assert!(tokio::net::TcpStream::connect(addr).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_on_which_nothing_runs_end_at_once() {
    let rig = Setup::new().set("shutdown.grace_s", "3600").start().await;
    let mut silent = rig.connect().await;
    let mut idle = rig.connect().await;
    idle.send(&Request::get("/live")).await;
    assert_eq!(idle.answer().await.status, 200);
    rig.stop().await;
    silent.closed().await;
    idle.closed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_is_served_within_the_grace_time() {
    let rig = Setup::new().set("admission.max_in_flight_per_worker", "1").start().await;
    rig.worker().hold().await;
    let mut turns = Vec::new();
    for n in 0..3 {
        turns.push(rig.begin(&Request::json(CHAT, &chat(&format!("turn {n}")))).await);
        until("it is there", async || rig.in_flight() as usize + rig.gateway().fleet.admission.depth() == n + 1).await;
    }
    rig.until_queued(2).await;
    let (addr, worker) = (rig.addr(), rig.worker().addr());
    let (_, stopping) = stop(rig);
    until("no new connections", async || tokio::net::TcpStream::connect(addr).await.is_err()).await;
    send(worker, &Request::json("/_sim/fault", &json!({"kind": "unwedge"}))).await;
    for mut turn in turns {
        let answer = turn.answer().await;
        assert_eq!((answer.status, answer.header("connection")), (200, Some("close")), "{}", answer.text());
    }
    assert_eq!(stopping.await.unwrap()[0].on(CHAT).len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn at_the_end_of_the_grace_time_streams_are_cut_and_who_has_nothing_is_told_to_come_back() {
    let setup = slow().sim(|c| c.enable_session_radix_cache = true).set("shutdown.grace_s", "0");
    let rig = setup.set("admission.max_in_flight_per_worker", "1").start().await;
    let mut body = endless("long");
    body["nvext"] = json!({"session_control": {"session_id": "s", "action": "open"}});
    let mut stream = begun(&rig, &body).await;
    let mut chat_waits = rig.begin(&Request::json(CHAT, &chat("one"))).await;
    let mut messages = chat("two");
    messages["max_tokens"] = json!(8);
    let mut messages_wait = rig.begin(&Request::json("/v1/messages", &messages)).await;
    rig.until_queued(2).await;
    let workers = rig.stop().await;
    assert!(!stream.rest().await.1, "it broke off");
    let refused = chat_waits.answer().await;
    assert_eq!((refused.status, &refused.error()["code"]), (503, &json!("draining")), "{}", refused.text());
    assert!(refused.header("retry-after").is_some());
    let refused = messages_wait.answer().await;
    assert_eq!((refused.status, &refused.json()["type"]), (503, &json!("error")), "{}", refused.text());
    let tag = workers[0].on(CHAT)[0].json()["session_id"].clone();
    assert_eq!(workers[0].on("/close_session")[0].json()["session_id"], tag);
    assert_eq!(workers[0].on(CHAT).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn http2_streams_finish_within_the_grace_time_and_are_cut_after_it() {
    for (grace, whole) in [("3600", true), ("0", false)] {
        let rig = slow().set("shutdown.grace_s", grace).start().await;
        let client = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
        let mut body = endless("long");
        body["max_tokens"] = json!(if whole { 40 } else { 100_000 });
        let sent = client.post(format!("http://{}{CHAT}", rig.addr())).json(&body).send().await.unwrap();
        let mut pieces = sent.bytes_stream();
        assert!(pieces.next().await.unwrap().is_ok());
        let gateway = std::sync::Arc::clone(rig.gateway());
        let workers = rig.stop().await;
        assert_eq!(gateway.stopping.turns(), 0);
        let (mut done, mut broken) = (false, false);
        // A broken stream says so again and again.
        while let Some(piece) = pieces.next().await.filter(|_| !broken) {
            match piece {
                Ok(piece) => done |= String::from_utf8_lossy(&piece).contains("[DONE]"),
                Err(_) => broken = true,
            }
        }
        assert_eq!((done, broken), (whole, !whole));
        until("the worker let go", async || workers[0].engine_requests() == 0).await;
    }
}

/// A configuration for a process, without plugins.
fn config(dir: &std::path::Path, workers: &[WorkerProcess], keys: &str) -> std::path::PathBuf {
    let urls: Vec<String> = workers.iter().map(|worker| format!("\"http://{}\"", worker.addr)).collect();
    let text = format!(
        "plugins = []\nthreads = 2\nadmin.address = \"127.0.0.1:0\"\nlogging.access = \"off\"\n\
         logging.explain_headers = true\nrouting.probe_interval_ms = 50\nrouting.load_interval_ms = 20\n{keys}\n\
         [[listeners]]\naddress = \"127.0.0.1:0\"\n[[pools]]\nworkers = [{}]\n",
        urls.join(", ")
    );
    let path = dir.join("turnstile.toml");
    std::fs::write(&path, text).unwrap();
    path
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_under_load_fails_no_response_and_leaves_no_engine_session() {
    let dir = tempfile::tempdir().unwrap();
    let sim = ["--streaming-session", "--speed", "4", "--max-running", "64"];
    let workers = [WorkerProcess::start(BINARY, &sim).await, WorkerProcess::start(BINARY, &sim).await];
    let gateway = GatewayProcess::start(BINARY, &config(dir.path(), &workers, "")).await;
    let mut streams = Vec::new();
    for n in 0..32 {
        let session = json!({"session_control": {"session_id": format!("s{n}"), "action": "open"}});
        let (path, mut body) = if n % 4 == 0 {
            let sampling = json!({"max_new_tokens": 150, "ignore_eos": true});
            ("/generate", json!({"text": "hello", "stream": true, "sampling_params": sampling}))
        } else {
            let mut body = chat_stream(&format!("stream {n}"));
            (body["max_tokens"], body["ignore_eos"]) = (json!(150), json!(true));
            (CHAT, body)
        };
        body["nvext"] = session;
        let mut connection = Connection::open(gateway.addr).await;
        connection.send(&Request::json(path, &body)).await;
        assert_eq!(connection.head().await.status, 200);
        assert!(connection.piece().await.is_some());
        streams.push(connection);
    }
    let open: usize = workers[0].open().await.len() + workers[1].open().await.len();
    assert_eq!(open, 32);
    gateway.signal("TERM").await;
    for mut stream in streams {
        let (body, whole) = stream.rest().await;
        assert!(whole && body.ends_with(b"data: [DONE]\n\n"), "{}", String::from_utf8_lossy(&body));
    }
    let (status, log) = gateway.ended().await;
    assert!(status.success(), "{log}");
    for worker in &workers {
        assert!(worker.open().await.is_empty());
        assert_eq!(worker.state().await["requests"], 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_cuts_the_grace_time_short_and_still_closes_sessions() {
    let dir = tempfile::tempdir().unwrap();
    let workers = [WorkerProcess::start(BINARY, &["--streaming-session"]).await];
    let gateway = GatewayProcess::start(BINARY, &config(dir.path(), &workers, "shutdown.grace_s = 3600")).await;
    let body = json!({
        "text": "hello", "stream": true, "sampling_params": {"max_new_tokens": 20_000, "ignore_eos": true},
        "nvext": {"session_control": {"session_id": "s", "action": "open"}},
    });
    let mut stream = Connection::open(gateway.addr).await;
    stream.send(&Request::json("/generate", &body)).await;
    assert_eq!(stream.head().await.status, 200);
    assert!(stream.piece().await.is_some());
    gateway.signal("INT").await;
    until("it tells of what is left", async || {
        gateway.log().lines().any(|line| line.contains("\"draining\"") && line.contains("\"turns\":1"))
    })
    .await;
    gateway.signal("TERM").await;
    assert!(!stream.rest().await.1);
    let (status, log) = gateway.ended().await;
    assert!(status.success() && log.contains("second signal"), "{log}");
    assert_eq!(workers[0].on("/close_session").await.len(), 1);
    assert!(workers[0].open().await.is_empty());
}
