//! Streaming sessions on `/generate`: opened first, one turn at a time, and never the end of the worker.
//!
//! The simulated workers crash where a stock server does, so that a worker that lives is the proof.

use serde_json::{Value, json};
use turnstile_sim::{Fault, FaultKind, SimWorker};
use turnstile_tests::harness::{Answer, CHAT, Connection, Request, Rig, Setup, WorkerExt, chat_with, send, until};

const GENERATE: &str = "/generate";

fn setup() -> Setup {
    Setup::new().sim(|c| {
        c.enable_streaming_session = true;
        c.crash_mode = true;
    })
}

fn body(text: &str, action: Option<&str>) -> Value {
    let mut control = json!({"session_id": "s"});
    if let Some(action) = action {
        control["action"] = json!(action);
    }
    json!({
        "text": text, "sampling_params": {"max_new_tokens": 8, "ignore_eos": true},
        "nvext": {"session_control": control},
    })
}

fn turn(text: &str, action: Option<&str>) -> Request {
    Request::json(GENERATE, &body(text, action)).header("x-turnstile-explain", "1")
}

fn long_turn(text: &str, action: Option<&str>) -> Request {
    let mut body = body(text, action);
    body["stream"] = json!(true);
    body["sampling_params"]["max_new_tokens"] = json!(20_000);
    Request::json(GENERATE, &body)
}

async fn ask(rig: &Rig, text: &str, action: Option<&str>) -> Answer {
    let answer = rig.send(&turn(text, action)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer
}

/// Paths of what the worker got about the session, in order.
fn story(worker: &SimWorker) -> Vec<String> {
    let about = [GENERATE, "/open_session", "/close_session"];
    worker.requests().into_iter().map(|r| r.path).filter(|path| about.contains(&path.as_str())).collect()
}

fn ids(worker: &SimWorker) -> Vec<Value> {
    worker.on(GENERATE).iter().map(|request| request.json()["session_params"]["id"].clone()).collect()
}

async fn until_closed(worker: &SimWorker) {
    until("a close", async || !worker.on("/close_session").is_empty()).await;
}

/// Two turns in progress in the gateway, of which the worker has one.
async fn second_waits(rig: &Rig, second: &Request, had: usize) -> Connection {
    let connection = rig.begin(second).await;
    let progress = [("route", "generate")];
    until("both in progress", async || rig.metric("turnstile_requests_in_progress", &progress).await == 2.0).await;
    assert_eq!(rig.worker().on(GENERATE).len(), had);
    connection
}

#[tokio::test(flavor = "multi_thread")]
async fn the_session_is_opened_before_its_first_turn_and_closed_after_its_last() {
    let rig = setup().start().await;
    let mut first = body("You are a helpful assistant.", Some("open"));
    first["nvext"]["session_control"]["timeout"] = json!(60);
    assert_eq!(rig.post(GENERATE, &first).await.status, 200);
    ask(&rig, " And then?", None).await;
    let last = ask(&rig, " Thanks.", Some("close")).await;
    assert_eq!(last.header("x-turnstile-session"), Some("stream"));
    until_closed(rig.worker()).await;
    assert_eq!(story(rig.worker()), ["/open_session", GENERATE, GENERATE, GENERATE, "/close_session"]);
    let open = rig.worker().on("/open_session")[0].json();
    assert_eq!((&open["capacity_of_str_len"], &open["streaming"]), (&json!(65_536), &json!(true)));
    assert!(open["timeout"].as_f64().unwrap() > 60.0, "longer than ours: {open}");
    let ids = ids(rig.worker());
    assert!(ids.iter().all(|id| *id == open["session_id"]), "{ids:?}");
    assert_eq!(rig.worker().on("/close_session")[0].json()["session_id"], open["session_id"]);
    // Deltas append: the last turn saw everything before it.
    assert!(last.json()["meta_info"]["cached_tokens"].as_u64().unwrap() > 10, "{}", last.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_turn_waits_for_the_first() {
    let rig = setup().start().await;
    ask(&rig, "one", Some("open")).await;
    rig.worker().hold().await;
    let mut first = rig.begin(&turn(" two", None)).await;
    until("it runs", async || rig.worker().on(GENERATE).len() == 2).await;
    let mut second = second_waits(&rig, &turn(" three", None), 2).await;
    rig.worker().release().await;
    assert_eq!(first.answer().await.status, 200);
    let answer = second.answer().await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(rig.worker().is_alive());
    let texts: Vec<Value> = rig.worker().on(GENERATE).iter().map(|r| r.json()["text"].clone()).collect();
    assert_eq!(texts, ["one", " two", " three"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_turns_at_once_are_served_one_by_one() {
    let rig = setup().start().await;
    ask(&rig, "zero", Some("open")).await;
    let turns = (0..8).map(|n| {
        let rig = &rig;
        async move { rig.send(&turn(&format!(" {n}"), None)).await.status }
    });
    let statuses = futures::future::join_all(turns).await;
    assert_eq!(statuses, [200; 8]);
    assert!(rig.worker().is_alive());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_turn_can_be_refused_instead() {
    let rig = setup().set("sessions.busy", "\"refuse\"").start().await;
    ask(&rig, "one", Some("open")).await;
    rig.worker().hold().await;
    let mut first = rig.begin(&turn(" two", None)).await;
    until("it runs", async || rig.worker().on(GENERATE).len() == 2).await;
    let refused = rig.send(&turn(" three", None)).await;
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (409, &json!("session_busy")));
    rig.worker().release().await;
    assert_eq!(first.answer().await.status, 200);
    ask(&rig, " four", None).await;
    assert_eq!(rig.worker().on(GENERATE).len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_for_the_session_is_bounded() {
    let rig = setup().set("sessions.busy_wait_ms", "50").start().await;
    ask(&rig, "one", Some("open")).await;
    rig.worker().hold().await;
    let mut first = rig.begin(&turn(" two", None)).await;
    until("it runs", async || rig.worker().on(GENERATE).len() == 2).await;
    assert_eq!(rig.send(&turn(" three", None)).await.status, 409);
    rig.worker().release().await;
    assert_eq!(first.answer().await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn after_an_aborted_turn_the_next_one_waits_until_the_worker_let_go() {
    let rig = setup().sim(|c| c.speed = 1.0).start().await;
    ask(&rig, "one", Some("open")).await;
    for n in 0..3 {
        let mut aborted = rig.begin(&long_turn(" two", None)).await;
        aborted.head().await;
        assert!(aborted.piece().await.is_some());
        drop(aborted);
        ask(&rig, &format!(" three {n}"), None).await;
        assert!(rig.worker().is_alive());
    }
    // Before the answer has begun, too.
    rig.worker().hold().await;
    let aborted = rig.begin(&turn(" four", None)).await;
    until("it is there", async || rig.worker().on(GENERATE).len() == 8).await;
    drop(aborted);
    rig.worker().release().await;
    ask(&rig, " five", Some("close")).await;
    until_closed(rig.worker()).await;
    assert!(rig.worker().is_alive());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_close_never_meets_a_turn() {
    let rig = setup().sim(|c| c.speed = 1.0).start().await;
    ask(&rig, "one", Some("open")).await;
    let mut last = rig.begin(&long_turn(" last", Some("close"))).await;
    last.head().await;
    assert!(last.piece().await.is_some());
    assert!(rig.worker().on("/close_session").is_empty());
    // The client leaves the closing turn: the close waits until the worker let go.
    drop(last);
    until_closed(rig.worker()).await;
    assert_eq!(rig.worker().engine_requests(), 0);
    assert!(rig.worker().is_alive());
    rig.until_metric("turnstile_side_requests_total", &[("kind", "close_session"), ("result", "ok")], 1.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_in_a_streaming_session_is_never_moved() {
    let rig = setup().workers(3).start().await;
    let first = ask(&rig, "one", Some("open")).await;
    let worker = first.header("x-turnstile-worker").unwrap();
    for n in 0..6 {
        let answer = ask(&rig, &format!(" {n}"), None).await;
        assert_eq!(answer.header("x-turnstile-worker"), Some(worker));
    }
    assert_eq!(rig.workers.iter().map(|w| w.on("/open_session").len()).sum::<usize>(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_streaming_session_expires_and_is_closed() {
    let rig = setup().start().await;
    let mut first = body("one", Some("open"));
    first["nvext"]["session_control"]["timeout"] = json!(0.2);
    assert_eq!(rig.post(GENERATE, &first).await.status, 200);
    until_closed(rig.worker()).await;
    assert_eq!(rig.worker().on("/close_session")[0].json()["session_id"], ids(rig.worker())[0]);
    // An expired id is ordinary routing, not an error.
    let answer = ask(&rig, "again", None).await;
    assert_eq!(answer.header("x-turnstile-session"), Some("affinity"));
    assert_eq!(ids(rig.worker())[1], Value::Null);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_the_engine_lost_is_opened_anew_and_the_client_is_told() {
    let rig = setup().start().await;
    ask(&rig, "one", Some("open")).await;
    let id = ids(rig.worker())[0].clone();
    send(rig.worker().addr(), &Request::json("/close_session", &json!({"session_id": id}))).await;
    let answer = ask(&rig, " two", None).await;
    assert!(answer.header("x-turnstile-session-note").unwrap().contains("context lost"));
    let ids = ids(rig.worker());
    assert_eq!(ids.len(), 3, "tried in the old one, served in a new one");
    assert_ne!(ids[1], ids[2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_on_a_dead_worker_goes_on_elsewhere() {
    let rig = setup().workers(2).start().await;
    let first = ask(&rig, "one", Some("open")).await;
    let dead = rig.worker_by_id(first.header("x-turnstile-worker").unwrap());
    dead.die().await;
    let answer = ask(&rig, " two", None).await;
    assert_ne!(answer.header("x-turnstile-worker"), Some(dead.id().as_str()));
    ask(&rig, " three", Some("close")).await;
    let alive = rig.workers.iter().find(|worker| worker.is_alive()).unwrap();
    until_closed(alive).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_that_fails_still_serves_the_turn() {
    let rig = setup().start().await;
    rig.worker().faults().add(Fault::always(FaultKind::Status(500, None)).on("/open_session"));
    let answer = ask(&rig, "one", Some("open")).await;
    assert_eq!(ids(rig.worker()), [Value::Null]);
    assert!(answer.json()["text"].is_string());
    assert_eq!(
        rig.metric("turnstile_side_requests_total", &[("kind", "open_session"), ("result", "failed")]).await,
        1.0
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn streaming_sessions_hold_no_more_than_their_share_of_rows() {
    let rig = setup().sim(|c| c.max_running_requests = 4).start().await;
    for (n, mode) in ["stream", "stream", "affinity"].into_iter().enumerate() {
        let mut body = body("hello", Some("open"));
        body["nvext"]["session_control"]["session_id"] = json!(format!("s{n}"));
        let answer = rig.send(&Request::json(GENERATE, &body).header("x-turnstile-explain", "1")).await;
        assert_eq!((answer.status, answer.header("x-turnstile-session")), (200, Some(mode)), "{n}");
    }
    assert_eq!(rig.worker().on("/open_session").len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn chat_never_enters_a_streaming_session() {
    let rig = setup().sim(|c| c.enable_session_radix_cache = true).start().await;
    let nvext = json!({"session_control": {"session_id": "s", "action": "open"}});
    assert_eq!(rig.post(CHAT, &chat_with("hello", nvext)).await.status, 200);
    let seen = rig.worker().on(CHAT)[0].json();
    assert!(seen["session_id"].is_string() && seen.get("session_params").is_none(), "{seen}");
    assert!(rig.worker().on("/open_session").is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_while_its_session_opens_leaves_no_session_behind() {
    let rig = setup().start().await;
    rig.worker().faults().add(Fault::once(FaultKind::Delay(std::time::Duration::from_millis(300))).on("/open_session"));
    let connection = rig.begin(&turn("one", Some("open"))).await;
    until("the open is under way", async || rig.worker().on("/open_session").len() == 1).await;
    drop(connection);
    rig.idle().await;
    ask(&rig, "two", None).await;
    ask(&rig, " three", Some("close")).await;
    until_closed(rig.worker()).await;
    assert!(rig.worker().is_alive());
    until("nothing held", async || rig.admin("/sessions").await.json()["counts"]["engine_sessions"] == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_id_in_another_pool_is_another_session() {
    let rig = setup().workers(2).pool("a", "models = [\"a\"]", &[0]).pool("b", "models = [\"b\"]", &[1]).start().await;
    for _ in 0..3 {
        for model in ["a", "b"] {
            let mut body = body(" more", Some("open"));
            body["model"] = json!(model);
            let answer = rig.post(GENERATE, &body).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
        }
    }
    for worker in &rig.workers {
        assert_eq!(worker.on("/open_session").len(), 1, "one session a pool");
        let opened = worker.on("/open_session")[0].json()["session_id"].clone();
        assert_eq!(ids(worker), vec![opened; 3]);
        assert!(worker.on("/close_session").is_empty());
    }
}
