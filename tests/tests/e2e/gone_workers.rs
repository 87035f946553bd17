//! Workers and pools that a reload takes out of the configuration, and the turns that came before it.

use serde_json::{Value, json};
use std::time::Duration;
use turnstile_fleet::worker::WorkerView;
use turnstile_sim::{Fault, FaultKind};
use turnstile_tests::harness::{CHAT, Connection, Request, Rig, Setup, WorkerExt, chat, chat_with, until};

const GENERATE: &str = "/generate";

/// A pool `old` with the first worker, and `default` with the second.
fn two_pools(setup: Setup) -> Setup {
    setup.workers(2).pool("old", "models = [\"old\"]", &[0]).pool("default", "", &[1])
}

fn of_old(text: &str, action: &str) -> Value {
    let mut body = chat_with(text, json!({"session_control": {"session_id": "s", "action": action}}));
    body["model"] = json!("old");
    body
}

/// A request whose head has come, and with it the generation that serves now.
async fn on_its_way(rig: &Rig, request: &Request) -> Connection {
    let mut connection = rig.connect().await;
    connection.write(&request.clone().header("expect", "100-continue").head()).await;
    assert_eq!(connection.head().await.status, 100);
    connection
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_came_before_its_pool_went_is_served_by_the_workers_it_had() {
    let mut rig = two_pools(Setup::new()).start().await;
    let request = Request::json(CHAT, &of_old("Hello", "bind"));
    let mut connection = on_its_way(&rig, &request).await;
    rig.edit(|setup| setup.drop_pool("old"));
    rig.generation(2).await;
    until("the pool's worker is gone", async || rig.gateway().fleet.workers.current().len() == 1).await;
    connection.write(&request.framed_body()).await;
    let answer = connection.answer().await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(rig.workers[0].on(CHAT).len(), 1);
    let record = rig.record_of(&answer).await;
    assert_eq!((&record["generation"], &record["pool"]), (&json!(1), &json!("old")));
    // Nothing is left of it, a session least of all.
    until("the worker is forgotten", async || rig.gateway().fleet.workers.leaving().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_that_wait_for_a_pool_that_goes_do_not_rush_to_its_workers() {
    let setup = two_pools(Setup::new().set("admission.max_in_flight_per_worker", "1"));
    let mut rig = setup.start().await;
    rig.workers[0].hold().await;
    let mut body = chat("Hello");
    body["model"] = json!("old");
    let request = Request::json(CHAT, &body);
    let mut turns = vec![rig.begin(&request).await];
    until("one is on the worker", async || rig.workers[0].on(CHAT).len() == 1).await;
    for waiting in 1..=2 {
        turns.push(rig.begin(&request).await);
        rig.until_queued(waiting).await;
    }
    rig.edit(|setup| setup.drop_pool("old"));
    rig.generation(2).await;
    until("the pool's worker is gone", async || rig.gateway().fleet.workers.current().len() == 1).await;
    assert_eq!((rig.gateway().fleet.admission.depth(), rig.workers[0].on(CHAT).len()), (2, 1));
    rig.workers[0].release().await;
    for turn in &mut turns {
        assert_eq!(turn.answer().await.status, 200);
    }
    assert_eq!(rig.workers[0].on(CHAT).len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_removed_worker_reported_last_keeps_no_turn_waiting() {
    let setup = Setup::new().sim(|c| {
        c.max_running_requests = 2;
        c.speed = 1.0;
    });
    let mut rig = two_pools(setup).start().await;
    // Full with what others send it.
    let mut long = chat_with("[[sim:tokens=20000]]", json!({}));
    long["max_tokens"] = json!(20_000);
    long["stream"] = json!(true);
    let mut others = Vec::new();
    for _ in 0..2 {
        let mut connection = Connection::open(rig.workers[0].addr()).await;
        connection.send(&Request::json(CHAT, &long)).await;
        others.push(connection);
    }
    let id = rig.workers[0].id();
    let is_full = |view: WorkerView| view.occupancy() >= 2;
    until("it reports that", async || is_full(rig.gateway().fleet.workers.by_id(&id).unwrap().view(0))).await;
    let mut waiting = rig.begin(&Request::json(CHAT, &of_old("[[sim:tokens=2]]", "bind"))).await;
    rig.until_queued(1).await;
    rig.edit(|setup| setup.drop_pool("old"));
    rig.generation(2).await;
    drop(others);
    assert_eq!(waiting.answer().await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_sends_what_is_new_is_told_that_its_context_went_with_the_pool() {
    let streaming = Setup::new().sim(|c| {
        c.enable_streaming_session = true;
        c.crash_mode = true;
    });
    let mut rig = streaming.workers(2).pool("old", "", &[0]).start().await;
    let turn = |text: &str, control: Value| {
        let parameters = json!({"max_new_tokens": 8, "ignore_eos": true});
        let control = json!({"session_control": control});
        Request::json(GENERATE, &json!({"text": text, "sampling_params": parameters, "nvext": control}))
    };
    let opened = rig.send(&turn("one", json!({"session_id": "s", "action": "open"}))).await;
    assert_eq!(opened.status, 200, "{}", opened.text());
    let more = turn(" more", json!({"session_id": "s"}));
    let mut connection = on_its_way(&rig, &more).await;
    rig.edit(|setup| {
        setup.drop_pool("old");
        *setup = std::mem::take(setup).pool("new", "", &[1]);
    });
    rig.generation(2).await;
    until("its session is closed", async || rig.workers[0].on("/close_session").len() == 1).await;
    connection.write(&more.framed_body()).await;
    let answer = connection.answer().await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let note = answer.header("x-turnstile-session-note").unwrap();
    assert_eq!(note, "no context is kept: no session (pool_gone)");
    assert_eq!(rig.workers[0].on(GENERATE).len(), 2);
    assert!(rig.workers[0].is_alive());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_of_a_session_does_not_wait_for_a_worker_that_was_removed() {
    let setup = Setup::new().set("admission.max_in_flight_per_worker", "1").sim(|c| c.enable_streaming_session = true);
    let mut rig = setup.workers(2).pool("default", "", &[0]).start().await;
    let control = |action: Option<&str>| match action {
        Some(action) => json!({"session_control": {"session_id": "s", "action": action}}),
        None => json!({"session_control": {"session_id": "s"}}),
    };
    let turn = |text: &str, action| {
        let parameters = json!({"max_new_tokens": 8, "ignore_eos": true});
        Request::json(GENERATE, &json!({"text": text, "sampling_params": parameters, "nvext": control(action)}))
    };
    assert_eq!(rig.send(&turn("one", Some("open"))).await.status, 200);
    rig.workers[0].hold().await;
    let mut other = rig.begin(&Request::json(CHAT, &chat("another"))).await;
    until("the worker is full", async || rig.workers[0].on(CHAT).len() == 1).await;
    let mut waiting = rig.begin(&turn(" two", None)).await;
    rig.until_queued(1).await;
    rig.edit(|setup| setup.set_pool_workers("default", &[1]));
    // The worker that it waited for still has no room.
    let answer = waiting.answer().await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(rig.workers[1].on(GENERATE).len(), 1);
    rig.workers[0].release().await;
    assert_eq!(other.answer().await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tag_of_a_turn_that_was_left_on_a_removed_worker_is_closed() {
    let setup = Setup::new().sim(|c| c.enable_session_radix_cache = true);
    let mut rig = setup.workers(2).pool("default", "", &[0]).start().await;
    let body = |action: &str| chat_with("Hello", json!({"session_control": {"session_id": "s", "action": action}}));
    assert_eq!(rig.post(CHAT, &body("open")).await.status, 200);
    rig.workers[0].hold().await;
    let left = rig.begin(&Request::json(CHAT, &body("bind"))).await;
    until("the turn is on the worker", async || rig.workers[0].on(CHAT).len() == 2).await;
    rig.edit(|setup| setup.set_pool_workers("default", &[1]));
    rig.generation(2).await;
    drop(left);
    until("the abort", async || !rig.workers[0].on("/abort_request").is_empty()).await;
    rig.workers[0].release().await;
    let tag = rig.workers[0].on(CHAT)[0].json()["session_id"].clone();
    until("the close", async || rig.workers[0].on("/close_session").len() == 1).await;
    assert_eq!(rig.workers[0].on("/close_session")[0].json()["session_id"], tag);
    until("the worker is forgotten", async || rig.gateway().fleet.workers.leaving().is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_gateway_is_ready_and_knows_its_models_while_all_workers_are_exchanged() {
    let setup = Setup::new().set("routing.probe_timeout_ms", "20000").workers(2).pool("default", "", &[0]);
    let mut rig = setup.start().await;
    let models = rig.get("/v1/models").await.json()["data"].clone();
    assert_eq!(models.as_array().unwrap().len(), 1);
    rig.workers[1].faults().add(Fault::once(FaultKind::Delay(Duration::from_millis(500))).on("/ready"));
    rig.edit(|setup| setup.set_pool_workers("default", &[1]));
    rig.generation(2).await;
    for path in ["/ready", "/health"] {
        let answer = rig.get(path).await;
        assert_eq!((answer.status, &answer.json()["status"]), (200, &json!("ready")));
    }
    // The first probe is waited for.
    assert_eq!(rig.get("/v1/models").await.json()["data"][0]["id"], models[0]["id"]);
}
