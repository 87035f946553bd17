//! Draining a worker: nothing new goes there, nothing there is lost.

use serde_json::{Value, json};
use turnstile_tests::harness::{Answer, CHAT, Request, Rig, Setup, WorkerExt, chat, send, until};

const GENERATE: &str = "/generate";

fn setup() -> Setup {
    Setup::new()
        .sim(|c| {
            c.enable_session_radix_cache = true;
            c.enable_streaming_session = true;
            c.crash_mode = true;
        })
        .workers(2)
}

async fn post(rig: &Rig, path: &str) -> Answer {
    send(rig.admin_addr(), &Request::new("POST", path)).await
}

async fn drain(rig: &Rig, id: &str, query: &str) -> Value {
    let answer = post(rig, &format!("/workers/{id}/drain{query}")).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

async fn turn(rig: &Rig, path: &str, session: &str, action: Option<&str>) -> Answer {
    let mut body = if path == GENERATE { json!({"text": " hello"}) } else { chat("hello") };
    body["nvext"] = json!({"session_control": {"session_id": session, "action": action}});
    let answer = rig.explain(path, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer
}

fn served_by(answer: &Answer) -> String {
    answer.header("x-turnstile-worker").unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn new_turns_and_sessions_go_elsewhere_and_bound_ones_move_at_their_next_turn() {
    let rig = setup().start().await;
    let drained = served_by(&turn(&rig, CHAT, "s", Some("open")).await);
    let left = drain(&rig, &drained, "?wait=30").await;
    let empty = json!({
        "id": drained, "state": "draining", "draining": true, "in_flight": 0, "sessions": 0, "engine_sessions": 0,
        "empty": true,
    });
    assert_eq!(left, empty);
    let worker = rig.worker_by_id(&drained);
    assert_eq!(worker.on("/close_session")[0].json()["session_id"], worker.on(CHAT)[0].json()["session_id"]);
    for session in ["s", "new", "s", "another"] {
        assert_ne!(served_by(&turn(&rig, CHAT, session, Some("open")).await), drained);
    }
    assert_eq!(worker.on(CHAT).len(), 1);
    let shown = rig.admin("/workers").await.json();
    let shown = shown["workers"].as_array().unwrap().iter().find(|shown| shown["id"] == drained.as_str()).unwrap();
    assert_eq!((&shown["state"], &shown["draining"]), (&json!("draining"), &json!(true)));
    let state = [("worker", drained.as_str()), ("state", "draining")];
    assert_eq!(rig.metric("turnstile_worker_state", &state).await, 1.0);

    let answer = post(&rig, &format!("/workers/{drained}/undrain")).await;
    assert_eq!((answer.status, &answer.json()["draining"]), (200, &json!(false)));
    rig.ready().await;
    let other = rig.workers.iter().find(|worker| worker.id() != drained).unwrap().id();
    drain(&rig, &other, "?wait=30").await;
    assert_eq!(served_by(&turn(&rig, CHAT, "s", None).await), drained);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_runs_there_finishes_and_only_then_it_is_empty() {
    let rig = setup().start().await;
    let drained = served_by(&turn(&rig, GENERATE, "s", Some("open")).await);
    let worker = rig.worker_by_id(&drained);
    worker.hold().await;
    let body = json!({"text": " more", "nvext": {"session_control": {"session_id": "s"}}});
    let mut running = rig.begin(&Request::json(GENERATE, &body)).await;
    until("it runs", async || worker.on(GENERATE).len() == 2).await;
    let left = drain(&rig, &drained, "").await;
    assert_eq!((&left["in_flight"], &left["engine_sessions"], &left["empty"]), (&json!(1), &json!(1), &json!(false)));
    assert!(worker.on("/close_session").is_empty(), "no close during a turn");
    worker.release().await;
    let answer = running.answer().await;
    assert_eq!((answer.status, answer.complete), (200, true));
    assert_eq!(drain(&rig, &drained, "?wait=30").await["empty"], true);
    assert_eq!(worker.on("/close_session").len(), 1);
    // Its deltas have lost what they add to, and the client is told.
    let next = turn(&rig, GENERATE, "s", None).await;
    assert_ne!(served_by(&next), drained);
    assert!(next.header("x-turnstile-session-note").unwrap().contains("context lost"));
    assert!(rig.workers.iter().all(turnstile_sim::SimWorker::is_alive));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_survives_reloads() {
    let mut rig = setup().start().await;
    let id = rig.workers[0].id();
    drain(&rig, &id, "").await;
    rig.edit_key("retry.attempts", "2");
    rig.generation(2).await;
    assert_eq!(rig.admin(&format!("/workers/{id}")).await.json()["state"], "draining");
    for _ in 0..4 {
        assert_ne!(served_by(&rig.explain(CHAT, &chat("hello")).await), id);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn with_every_worker_draining_turns_are_told_to_come_back() {
    let rig = setup().start().await;
    for worker in &rig.workers {
        drain(&rig, &worker.id(), "").await;
    }
    let answer = rig.post(CHAT, &chat("hello")).await;
    assert_eq!((answer.status, &answer.error()["code"]), (503, &json!("no_worker")));
    assert!(answer.header("retry-after").is_some());
    assert_eq!(rig.get("/ready").await.status, 503);
    post(&rig, &format!("/workers/{}/undrain", rig.workers[0].id())).await;
    until("one is back", async || rig.gateway().ready_workers() == 1).await;
    assert_eq!(served_by(&rig.explain(CHAT, &chat("hello")).await), rig.workers[0].id());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_drained_is_told() {
    let rig = setup().start().await;
    let id = rig.workers[0].id();
    let status = async |method: &str, path: &str| {
        let answer = send(rig.admin_addr(), &Request::new(method, path)).await;
        (answer.status, answer.error()["message"].as_str().unwrap().to_owned())
    };
    assert_eq!(status("POST", "/workers/nobody/drain").await, (404, "no worker \"nobody\"".into()));
    assert_eq!(status("GET", &format!("/workers/{id}/drain")).await, (405, "POST only".into()));
    assert_eq!(status("POST", &format!("/workers/{id}")).await.0, 405);
    assert_eq!(status("POST", &format!("/workers/{id}/close")).await.0, 404);
    let soon = status("POST", &format!("/workers/{id}/drain?wait=soon")).await;
    assert_eq!(soon, (400, "wait: expected seconds, found \"soon\"".into()));
    assert_eq!(status("POST", &format!("/workers/{id}/drain?wait=3601")).await.0, 400);
    assert_eq!(status("POST", &format!("/workers/{id}/drain?until=now")).await.0, 400);
    assert_eq!(rig.gateway().ready_workers(), 2, "none of these drained anything");
    // An id is named as any path segment is.
    let answer = post(&rig, &format!("/workers/{}/drain", id.replace(':', "%3A"))).await;
    assert_eq!(answer.json()["id"], id);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_taken_off_the_list_finishes_what_runs_there() {
    let mut rig = setup().pool("default", "", &[0]).start().await;
    turn(&rig, GENERATE, "s", Some("open")).await;
    rig.workers[0].hold().await;
    let body = json!({"text": " more", "stream": true, "nvext": {"session_control": {"session_id": "s"}}});
    let mut running = rig.begin(&Request::json(GENERATE, &body)).await;
    until("it runs", async || rig.workers[0].on(GENERATE).len() == 2).await;
    rig.edit(|setup| setup.set_pool_workers("default", &[1]));
    rig.generation(2).await;
    assert!(rig.workers[0].on("/close_session").is_empty());
    rig.workers[0].release().await;
    let answer = running.answer().await;
    assert!(answer.complete && answer.events().last().unwrap() == "[DONE]", "{}", answer.text());
    until("its session is closed", async || rig.workers[0].on("/close_session").len() == 1).await;
    rig.ready().await;
    assert_eq!(served_by(&turn(&rig, GENERATE, "s", None).await), rig.workers[1].id());
    assert!(rig.workers[0].is_alive());
}
