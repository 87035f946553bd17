//! What one process of the gateway leaves to the next.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use turnstile_fleet::journal::Replay;
use turnstile_fleet::snapshot::Snapshot;
use turnstile_tests::harness::{Answer, CHAT, Connection, GatewayProcess, Request, WorkerProcess, chat, send, until};

const BINARY: &str = env!("CARGO_BIN_EXE_turnstile-process");
const GENERATE: &str = "/generate";

async fn workers(count: usize) -> Vec<WorkerProcess> {
    let sim = ["--streaming-session", "--speed", "50", "--max-running", "64"];
    let mut workers = Vec::new();
    for _ in 0..count {
        workers.push(WorkerProcess::start(BINARY, &sim).await);
    }
    workers
}

/// A configuration with a state directory of its own.
fn config(dir: &Path, workers: &[WorkerProcess], keys: &str) -> PathBuf {
    let urls: Vec<String> = workers.iter().map(|worker| format!("\"http://{}\"", worker.addr)).collect();
    let text = format!(
        "plugins = []\nthreads = 2\nadmin.address = \"127.0.0.1:0\"\nlogging.access = \"off\"\n\
         logging.explain_headers = true\nrouting.probe_interval_ms = 50\nrouting.load_interval_ms = 20\n\
         state = {{ dir = \"state\", interval_s = 1 }}\n{keys}\n\
         [[listeners]]\naddress = \"127.0.0.1:0\"\n[[pools]]\nworkers = [{}]\n",
        urls.join(", ")
    );
    let path = dir.join("turnstile.toml");
    std::fs::write(&path, text).unwrap();
    path
}

fn turn(path: &str, session: &str, action: Option<&str>) -> Request {
    let mut body = if path == GENERATE {
        json!({"text": " hello", "sampling_params": {"max_new_tokens": 8, "ignore_eos": true}})
    } else {
        chat(&format!("I am {session}"))
    };
    body["nvext"] = json!({"session_control": {"session_id": session, "action": action, "timeout": 600}});
    Request::json(path, &body).header("x-turnstile-explain", "1").header("authorization", "Bearer secret-of-a-client")
}

async fn ask(gateway: &GatewayProcess, path: &str, session: &str, action: Option<&str>) -> Answer {
    let answer = send(gateway.addr, &turn(path, session, action)).await;
    assert_eq!(answer.status, 200, "{}\n{}", answer.text(), gateway.log());
    answer
}

fn worker_of(answer: &Answer) -> String {
    answer.header("x-turnstile-worker").unwrap().to_owned()
}

/// Waits until a snapshot was begun and written after this call.
async fn snapshot(gateway: &GatewayProcess) {
    let written = async || gateway.metric("turnstile_snapshots_total", &[("result", "ok")]).await;
    let before = written().await;
    until("two more snapshots", async || written().await >= before + 2.0).await;
}

/// The sessions of a test: session, route, and how it begins.
fn sessions() -> Vec<(String, &'static str, &'static str)> {
    let kinds = [(CHAT, "open"), (GENERATE, "open"), (CHAT, "bind")];
    (0..12).map(|n| (format!("s{n}"), kinds[n % 3].0, kinds[n % 3].1)).collect()
}

async fn all_open(workers: &[WorkerProcess]) -> usize {
    let mut open = 0;
    for worker in workers {
        open += worker.open().await.len();
    }
    open
}

#[tokio::test(flavor = "multi_thread")]
async fn after_kill_9_sessions_return_to_their_workers_and_no_engine_session_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let workers = workers(3).await;
    let config = config(dir.path(), &workers, "");
    let gateway = GatewayProcess::start(BINARY, &config).await;
    let mut homes = BTreeMap::new();
    for (session, path, action) in sessions() {
        homes.insert(session.clone(), worker_of(&ask(&gateway, path, &session, Some(action)).await));
    }
    assert_eq!(all_open(&workers).await, 8, "four tags and four streaming sessions");
    snapshot(&gateway).await;
    // Two more that no snapshot knows, one of them in the middle of a turn.
    ask(&gateway, CHAT, "late", Some("open")).await;
    let mut body =
        json!({"text": "long", "stream": true, "sampling_params": {"max_new_tokens": 20_000, "ignore_eos": true}});
    body["nvext"] = json!({"session_control": {"session_id": "running", "action": "open"}});
    let mut running = Connection::open(gateway.addr).await;
    running.send(&Request::json(GENERATE, &body)).await;
    assert_eq!(running.head().await.status, 200);
    assert!(running.piece().await.is_some());
    gateway.kill().await;
    assert_eq!(all_open(&workers).await, 10);

    let gateway = GatewayProcess::start(BINARY, &config).await;
    let mut before = BTreeMap::new();
    for worker in &workers {
        before.insert(worker.addr.to_string(), worker.open().await);
    }
    for (session, path, _) in sessions() {
        let answer = ask(&gateway, path, &session, None).await;
        assert_eq!(worker_of(&answer), homes[&session], "{session} returns\n{}", gateway.log());
        let note = answer.header("x-turnstile-session-note").unwrap_or_default();
        assert_eq!(note.contains("context lost"), path == GENERATE, "{session}: {note}");
    }
    until("orphans are closed", async || {
        gateway.metric("turnstile_orphaned_engine_sessions", &[]).await == 0.0
            && gateway.log().contains("engine sessions of the last process are closed")
    })
    .await;
    // Left are the four tags, gone on with as they were, and the four streaming sessions opened anew.
    assert_eq!(all_open(&workers).await, 8, "{}", gateway.log());
    let mut kept = 0;
    for worker in &workers {
        let before = &before[&worker.addr.to_string()];
        kept += worker.open().await.intersection(before).count();
        assert_eq!(worker.state().await["hazards"], 0);
    }
    assert_eq!(kept, 4, "the tags");

    for (session, path, _) in sessions() {
        ask(&gateway, path, &session, Some("close")).await;
    }
    until("all is closed", async || all_open(&workers).await == 0).await;
    gateway.signal("TERM").await;
    assert!(gateway.ended().await.0.success());
    let files = ["sessions.snapshot", "engines.journal", "seed"]
        .map(|name| std::fs::read(dir.path().join("state").join(name)).unwrap());
    for file in &files {
        let text = String::from_utf8_lossy(file);
        assert!(!text.contains("secret-of-a-client") && !text.contains("I am"), "nothing of a client is in the clear");
    }
    assert!(Replay::of(&files[1]).open.is_empty(), "nothing is open: {}", String::from_utf8_lossy(&files[1]));
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_stop_in_good_order_sessions_return_too() {
    let dir = tempfile::tempdir().unwrap();
    let workers = workers(3).await;
    let config = config(dir.path(), &workers, "");
    let gateway = GatewayProcess::start(BINARY, &config).await;
    let mut homes = BTreeMap::new();
    for (session, path, action) in sessions() {
        homes.insert(session.clone(), worker_of(&ask(&gateway, path, &session, Some(action)).await));
    }
    let drained = workers[0].addr.to_string();
    let moved: Vec<&String> = homes.iter().filter(|(_, home)| **home == drained).map(|(session, _)| session).collect();
    assert_eq!(gateway.admin("POST", &format!("/workers/{drained}/drain?wait=30")).await.json()["empty"], true);
    gateway.signal("TERM").await;
    assert!(gateway.ended().await.0.success());
    assert_eq!(all_open(&workers).await, 0);

    let gateway = GatewayProcess::start(BINARY, &config).await;
    let shown = gateway.admin("GET", &format!("/workers/{drained}")).await.json();
    assert_eq!(shown["state"], "draining", "a drain outlives the process");
    for (session, path, action) in sessions() {
        let answer = ask(&gateway, path, &session, None).await;
        if moved.contains(&&session) {
            assert_ne!(worker_of(&answer), drained);
        } else {
            assert_eq!(worker_of(&answer), homes[&session], "{session}");
        }
        let mode = answer.header("x-turnstile-session").unwrap();
        let wanted = if action == "bind" {
            "affinity"
        } else if path == CHAT {
            "tag"
        } else {
            "stream"
        };
        assert_eq!(mode, wanted, "{session}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_cannot_be_used_are_kept_aside_and_the_gateway_starts_empty() {
    let dir = tempfile::tempdir().unwrap();
    let workers = workers(1).await;
    let config = config(dir.path(), &workers, "");
    let state = |name: &str| dir.path().join("state").join(name);
    let gateway = GatewayProcess::start(BINARY, &config).await;
    ask(&gateway, CHAT, "s", Some("open")).await;
    snapshot(&gateway).await;
    gateway.kill().await;
    let good = std::fs::read(state("sessions.snapshot")).unwrap();
    let mut flipped = good.clone();
    *flipped.last_mut().unwrap() ^= 1;
    let mut newer = good.clone();
    newer[8] = 9;
    let cases: [(&str, Vec<u8>, &str); 5] = [
        ("sessions.snapshot", flipped, "its checksum is wrong"),
        ("sessions.snapshot", good[..good.len() / 2].to_vec(), "it should have"),
        ("sessions.snapshot", newer, "it has version 9"),
        ("sessions.snapshot", b"#!/bin/sh\n".to_vec(), "it is not a snapshot"),
        ("seed", b"not a seed\n".to_vec(), "it is not 16 hexadecimal digits"),
    ];
    for (name, bytes, reason) in cases {
        std::fs::write(state(name), &bytes).unwrap();
        let gateway = GatewayProcess::start(BINARY, &config).await;
        let log = gateway.log();
        assert!(log.lines().any(|line| line.contains("WARN") && line.contains(reason)), "{reason}: {log}");
        assert_eq!(std::fs::read(state(&format!("{name}.bad"))).unwrap(), bytes, "{reason}");
        let listed: Value = gateway.admin("GET", "/sessions").await.json();
        assert_eq!(listed["listed"], 0, "{reason}");
        gateway.kill().await;
    }
    // Larger than it may be.
    std::fs::File::create(state("sessions.snapshot")).unwrap().set_len((256 << 20) + 1).unwrap();
    let gateway = GatewayProcess::start(BINARY, &config).await;
    assert!(gateway.log().contains("it is larger than"), "{}", gateway.log());
    // The engine session is closed all the same: the journal was never touched.
    until("the tag is closed", async || all_open(&workers).await == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_directory_has_one_gateway_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let workers = workers(1).await;
    let config = config(dir.path(), &workers, "");
    let gateway = GatewayProcess::start(BINARY, &config).await;
    let said = GatewayProcess::refused(BINARY, &config).await;
    assert!(said.contains("state.dir") && said.contains("is used by another gateway (process "), "{said}");
    assert_eq!(ask(&gateway, CHAT, "s", None).await.status, 200);
    // A killed one holds nothing.
    gateway.kill().await;
    GatewayProcess::start(BINARY, &config).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_ran_out_meanwhile_and_those_of_workers_taken_off_are_not_taken_over() {
    let dir = tempfile::tempdir().unwrap();
    let mut workers = workers(2).await;
    let path = config(dir.path(), &workers, "");
    let gateway = GatewayProcess::start(BINARY, &path).await;
    let mut short = chat("short");
    short["nvext"] = json!({"session_control": {"session_id": "short", "action": "open", "timeout": 60}});
    let mut homes = BTreeMap::new();
    for n in 0..6 {
        let session = format!("s{n}");
        homes.insert(session.clone(), worker_of(&ask(&gateway, CHAT, &session, Some("open")).await));
    }
    assert_eq!(send(gateway.addr, &Request::json(CHAT, &short)).await.status, 200);
    snapshot(&gateway).await;
    let listed = gateway.admin("GET", "/sessions").await.json()["listed"].clone();
    gateway.kill().await;
    assert_eq!(all_open(&workers).await, usize::try_from(listed.as_u64().unwrap()).unwrap());
    let off = workers.pop().unwrap();
    let path = config(dir.path(), &workers, "");
    // Two minutes later, as the snapshot tells time.
    let file = dir.path().join("state/sessions.snapshot");
    let mut snapshot = Snapshot::decode(&std::fs::read(&file).unwrap()).unwrap();
    snapshot.saved_at_ms -= 120_000;
    std::fs::write(&file, snapshot.encode(usize::MAX)).unwrap();
    let gateway = GatewayProcess::start(BINARY, &path).await;
    let kept = homes.values().filter(|home| **home == workers[0].addr.to_string()).count();
    assert_eq!(gateway.admin("GET", "/sessions").await.json()["listed"], kept);
    until("the expired one's tag is closed", async || workers[0].open().await.len() == kept).await;
    assert!(gateway.log().contains("no longer configured"), "{}", gateway.log());
    drop(off);
}
