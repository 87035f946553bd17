//! A worker dies under load: `kill -9` of a real process.

use serde_json::{Value, json};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};
use turnstile_fleet::session::SessionMode;
use turnstile_tests::harness::{CHAT, Connection, Request, Setup, chat, chat_with, send, until};

const CLIENTS: usize = 48;

/// A simulated worker in a process of its own.
struct Process {
    child: Child,
    url: String,
}

impl Process {
    async fn start() -> Self {
        let arguments = ["sim", "--workers", "1", "--port", "0", "--speed", "4", "--max-running", "64"];
        let arguments = arguments.into_iter().chain(["--streaming-session"]);
        let mut child = Command::new(env!("CARGO_BIN_EXE_turnstile-process"))
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut url = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).await.unwrap();
        Self { child, url: url.trim().to_owned() }
    }

    fn id(&self) -> &str {
        self.url.strip_prefix("http://").unwrap()
    }
}

/// How the turns of all clients ended.
#[derive(Default)]
struct Tally {
    whole: AtomicUsize,
    /// Broke off after their first byte.
    cut: AtomicUsize,
    /// Turns of streaming sessions whose client was told that what came before is lost.
    told_lost: AtomicUsize,
    /// Got no answer, or an error, without a first byte: none may.
    failed: parking_lot::Mutex<Vec<String>>,
}

impl Tally {
    fn turns(&self) -> usize {
        self.whole.load(Ordering::Relaxed) + self.cut.load(Ordering::Relaxed)
    }
}

/// What a turn of a session looks like: an affinity by header, a tag, or a streaming session that gets only what is new.
fn request(session: usize, turn: usize, history: &str, streamed: bool) -> Request {
    let name = format!("s{session}");
    let action = if turn == 0 { json!("open") } else { Value::Null };
    let control = json!({"session_control": {"session_id": name, "action": action}});
    let (path, mut body) = match session % 3 {
        0 => (CHAT, chat(&format!("{history}[[sim:tokens=60]]"))),
        1 => (CHAT, chat_with(&format!("{history}[[sim:tokens=60]]"), control)),
        _ => {
            let sampling = json!({"max_new_tokens": 60, "ignore_eos": true});
            ("/generate", json!({"text": format!(" Turn {turn}."), "sampling_params": sampling, "nvext": control}))
        }
    };
    body["stream"] = json!(streamed);
    let request = Request::json(path, &body);
    if session.is_multiple_of(3) { request.header("x-session-id", &name) } else { request }
}

/// One session: turns one after another, streamed and whole in turn.
async fn client(addr: std::net::SocketAddr, session: usize, stop: Arc<AtomicBool>, tally: Arc<Tally>) {
    let mut history = format!("Session {session} begins. ");
    for turn in 0.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        history.push_str(&format!("Turn {turn}. "));
        let streamed = (session / 3 + turn).is_multiple_of(2);
        let mut connection = Connection::open(addr).await;
        connection.send(&request(session, turn, &history, streamed)).await;
        let Some(head) = connection.try_head().await else {
            tally.failed.lock().push(format!("session {session} turn {turn}: no answer"));
            continue;
        };
        let lost = head.header("x-turnstile-session-note").is_some_and(|note| note.starts_with("context lost"));
        tally.told_lost.fetch_add(usize::from(lost), Ordering::Relaxed);
        let (body, complete) = connection.rest().await;
        match (head.status, complete, body.is_empty()) {
            (200, true, _) => tally.whole.fetch_add(1, Ordering::Relaxed),
            (200, false, false) if streamed => tally.cut.fetch_add(1, Ordering::Relaxed),
            (status, ..) => {
                let text = String::from_utf8_lossy(&body).into_owned();
                tally.failed.lock().push(format!("session {session} turn {turn}: {status} {text}"));
                continue;
            }
        };
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_worker_costs_no_turn_without_a_first_byte_and_its_sessions_go_on_elsewhere() {
    let mut processes = Vec::new();
    for _ in 0..3 {
        processes.push(Process::start().await);
    }
    let setup = processes.iter().fold(Setup::new(), |setup, process| setup.external(process.url.clone()));
    let rig = setup.set("threads", "2").start().await;
    let (stop, tally) = (Arc::new(AtomicBool::new(false)), Arc::new(Tally::default()));
    let mut clients = tokio::task::JoinSet::new();
    for session in 0..CLIENTS {
        clients.spawn(client(rig.addr(), session, Arc::clone(&stop), Arc::clone(&tally)));
    }
    until("two turns of each session", async || tally.turns() >= 2 * CLIENTS).await;

    let worker_of = |id: &str| rig.gateway().fleet.workers.by_id(id).unwrap();
    let victim = processes
        .iter()
        .position(|process| {
            let sessions = rig.gateway().fleet.sessions.list(usize::MAX);
            sessions.iter().any(|session| session.worker == Some(worker_of(process.id()).index))
        })
        .expect("sessions are bound");
    let id = processes[victim].id().to_owned();
    let index = worker_of(&id).index;
    let bound = || rig.gateway().fleet.sessions.list(usize::MAX).iter().filter(|s| s.worker == Some(index)).count();
    until("it is busy", async || worker_of(&id).view(0).in_flight >= 4).await;
    let (had, hit, before) = (bound(), worker_of(&id).view(0).in_flight, tally.turns());
    let known = rig.gateway().fleet.sessions.list(usize::MAX);
    let known =
        known.iter().filter(|s| s.worker == Some(index) && s.mode == SessionMode::Stream && s.turns > 0).count();
    processes[victim].child.kill().await.unwrap();

    until("no session is bound there", async || bound() == 0).await;
    until("two more turns of each session", async || tally.turns() >= before + 2 * CLIENTS).await;
    stop.store(true, Ordering::Relaxed);
    while let Some(ended) = clients.join_next().await {
        ended.unwrap();
    }
    until("all counts back at zero", async || {
        let metrics = rig.metrics().await;
        let under_way = ["turnstile_requests_in_progress", "turnstile_queue_depth"];
        rig.in_flight() == 0
            && under_way.iter().all(|name| metrics.sum(name, &[]) == 0.0)
            && rig.admin("/sessions").await.json()["counts"]["in_flight"] == 0
    })
    .await;
    let metrics = rig.metrics().await;
    let retried = metrics.sum("turnstile_retries_total", &[("result", "retried")]);
    println!(
        "kill -9 of one of 3 workers, {CLIENTS} sessions: {} turns whole, {} cut after their first byte, {} without a first byte \
         failed; {had} sessions were bound there and {hit} turns in flight, {retried} attempts were made again",
        tally.whole.load(Ordering::Relaxed),
        tally.cut.load(Ordering::Relaxed),
        tally.failed.lock().len(),
    );
    assert_eq!(*tally.failed.lock(), Vec::<String>::new());
    assert!(tally.cut.load(Ordering::Relaxed) <= CLIENTS, "a client's turns break off once at most");
    let told = tally.told_lost.load(Ordering::Relaxed);
    assert!(told >= known && told <= CLIENTS / 3, "{known} streaming sessions were lost, {told} clients were told");
    // Nothing is left of any session on those that live.
    rig.gateway().fleet.sessions.close_all();
    for (_, process) in processes.iter().enumerate().filter(|(at, _)| *at != victim) {
        let addr = process.id().parse().unwrap();
        until("its engine sessions are closed", async || {
            let state = send(addr, &Request::get("/_sim/state")).await.json();
            (&state["sessions"], &state["tags"]) == (&json!(0), &json!(0))
        })
        .await;
    }
    assert!(retried > 0.0, "the kill met turns in flight");
    for (at, process) in processes.iter().enumerate() {
        let state = worker_of(process.id()).view(0).shown_state();
        assert_eq!(state == "ready", at != victim, "{}: {state}", process.id());
    }
}
