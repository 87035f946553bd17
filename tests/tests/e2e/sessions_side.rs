//! Requests of the gateway to workers: closes that must not be lost, bounds, and what an administrator sees.

use serde_json::{Value, json};
use turnstile_sim::{Fault, FaultKind, Place, SimWorker};
use turnstile_tests::harness::{CHAT, Request, Rig, Setup, WorkerExt, chat, chat_with, until};

fn tagged() -> Setup {
    Setup::new().sim(|c| c.enable_session_radix_cache = true)
}

async fn ask(rig: &Rig, id: &str, action: &str) -> String {
    let body = chat_with("hello", json!({"session_control": {"session_id": id, "action": action}}));
    let answer = rig.explain(CHAT, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.header("x-turnstile-worker").unwrap().to_owned()
}

/// Opens sessions and closes them again.
async fn open_and_close(rig: &Rig, count: usize) {
    for n in 0..count {
        ask(rig, &format!("s{n}"), "open").await;
    }
    for n in 0..count {
        ask(rig, &format!("s{n}"), "close").await;
    }
}

fn closes(worker: &SimWorker) -> Vec<Value> {
    worker.on("/close_session").iter().map(|request| request.json()["session_id"].clone()).collect()
}

async fn until_nothing_is_open(rig: &Rig, worker: &SimWorker) {
    until("nothing is open in the engine", async || worker.open_sessions() == (0, 0)).await;
    until("nothing is to be closed", async || rig.gateway().fleet.sessions.counts().engine_sessions == 0).await;
}

async fn side(rig: &Rig) -> Value {
    rig.admin("/side").await.json()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_close_that_a_worker_does_not_take_for_a_while_is_not_lost() {
    for fault in [FaultKind::Status(503, None), FaultKind::Cut(Place::Head)] {
        let rig = tagged().start().await;
        rig.worker().faults().add(Fault::always(fault).on("/close_session"));
        open_and_close(&rig, 3).await;
        until("tried more than once", async || closes(rig.worker()).len() > 6).await;
        until("it is seen", async || side(&rig).await["closes"]["retrying"] == 3).await;
        let retrying = [("state", "retrying")];
        until("its metric tells of it", async || rig.metric("turnstile_session_closes", &retrying).await == 3.0).await;
        let failed = [("kind", "close_session"), ("result", "failed")];
        rig.until_metric("turnstile_side_requests_total", &failed, 4.0).await;
        rig.worker().faults().clear();
        until_nothing_is_open(&rig, rig.worker()).await;
        assert_eq!(rig.metric("turnstile_session_closes", &[]).await, 0.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_close_that_is_refused_is_not_repeated() {
    let rig = tagged().start().await;
    rig.worker().faults().add(Fault::once(FaultKind::Status(404, None)).on("/close_session"));
    open_and_close(&rig, 1).await;
    rig.until_metric("turnstile_side_requests_total", &[("kind", "close_session"), ("result", "refused")], 1.0).await;
    until("forgotten", async || rig.gateway().fleet.sessions.counts().engine_sessions == 0).await;
    assert_eq!(closes(rig.worker()).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_worker_gets_so_many_side_requests_at_a_time() {
    let rig = tagged().set("limits.side_per_worker", "2").start().await;
    rig.worker().faults().add(Fault::always(FaultKind::Hang).on("/close_session"));
    open_and_close(&rig, 5).await;
    until("all are pending", async || side(&rig).await["pending"][0]["pending"] == 5).await;
    until("two are sent", async || closes(rig.worker()).len() == 2).await;
    let pending = side(&rig).await["pending"].clone();
    let worker = rig.worker().id();
    assert_eq!(pending, json!([{"worker": worker, "kind": "close_session", "pending": 5, "last_error": null}]));
    assert_eq!(rig.metric("turnstile_side_queue_depth", &[("kind", "close_session")]).await, 5.0);
    assert_eq!(closes(rig.worker()).len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_delays_closes_and_loses_none() {
    let rig = tagged().set("limits.side_queue", "2").set("timeouts.side_request_s", "1").start().await;
    rig.worker().faults().add(Fault::always(FaultKind::Hang).on("/close_session"));
    open_and_close(&rig, 6).await;
    let dropped = [("kind", "close_session"), ("result", "dropped")];
    rig.until_metric("turnstile_side_requests_total", &dropped, 5.0).await;
    assert!(
        side(&rig).await["pending"][0]["pending"].as_u64().unwrap_or(0) <= 1,
        "half of the queue is one worker's share"
    );
    // Turns go on meanwhile.
    ask(&rig, "another", "bind").await;
    rig.worker().faults().clear();
    until_nothing_is_open(&rig, rig.worker()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_hangs_leaves_room_for_the_side_requests_of_others() {
    let rig = tagged().workers(2).set("limits.side_queue", "4").start().await;
    let hanging = rig.worker_by_id(&ask(&rig, "first", "open").await);
    hanging.faults().add(Fault::always(FaultKind::Hang).on("/close_session"));
    let other = rig.workers.iter().find(|worker| worker.id() != hanging.id()).unwrap();
    let mut opened = [0, 0];
    for n in 0..40 {
        let at = ask(&rig, &format!("s{n}"), "open").await;
        opened[usize::from(at == other.id())] += 1;
    }
    assert!(opened[0] > 2 && opened[1] > 0, "{opened:?}");
    rig.gateway().fleet.sessions.close_all();
    until("the other one's are closed", async || other.open_sessions() == (0, 0)).await;
    assert!(hanging.open_sessions().1 > 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn aborts_that_hang_at_one_worker_leave_room_for_those_of_others() {
    let rig = Setup::new().workers(2).set("limits.side_queue", "4").set("ejection.wedged_after_ms", "0").start().await;
    for worker in &rig.workers {
        worker.hold().await;
    }
    let [hanging, other] = rig.workers.as_slice() else { panic!("two workers") };
    hanging.faults().add(Fault::always(FaultKind::Hang).on("/abort_request"));
    let mut waiting = [Vec::new(), Vec::new()];
    while waiting[0].len() < 5 || waiting[1].len() < 3 {
        let (before, all) = (hanging.turns().len(), waiting[0].len() + waiting[1].len());
        let text = format!("turn {all}, which is like no other");
        let connection = rig.begin(&Request::json(CHAT, &chat(&text))).await;
        until("it is on a worker", async || hanging.turns().len() + other.turns().len() > all).await;
        waiting[usize::from(hanging.turns().len() == before)].push(connection);
    }
    let [at_hanging, at_other] = waiting;
    let dropped = at_hanging.len() - 2;
    drop(at_hanging);
    let labels = [("kind", "abort"), ("result", "dropped")];
    rig.until_metric("turnstile_side_requests_total", &labels, dropped as f64).await;
    let pending = json!([{"worker": hanging.id(), "kind": "abort", "pending": 2, "last_error": null}]);
    assert_eq!(side(&rig).await["pending"], pending, "half of the room is one worker's share");
    for (n, connection) in at_other.into_iter().enumerate() {
        drop(connection);
        until("the other one is told at once", async || other.on("/abort_request").len() == n + 1).await;
        until("and has said so", async || side(&rig).await["pending"].as_array().unwrap().len() == 1).await;
    }
    assert_eq!(rig.metric("turnstile_side_requests_total", &labels).await, dropped as f64);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_a_reload_removes_is_told_once_and_its_prefills_are_cancelled() {
    let mut rig = tagged().workers(2).pool("default", "", &[0, 1]).start().await;
    let mut n = 0;
    // At least one session on each.
    let at = |rig: &Rig, place: usize| closes_open(&rig.workers[place]);
    while at(&rig, 0) == 0 || at(&rig, 1) == 0 {
        ask(&rig, &format!("s{n}"), "open").await;
        n += 1;
    }
    let (kept, gone) = (at(&rig, 0), at(&rig, 1));
    rig.workers[1].faults().add(Fault::once(FaultKind::Status(500, None)).on("/close_session"));
    rig.edit(|setup| setup.set_pool_workers("default", &[0]));
    rig.generation(2).await;
    until("each is closed, once", async || closes(&rig.workers[1]).len() == gone).await;
    until("and none is waited for", async || rig.gateway().fleet.sessions.counts().engine_sessions == kept).await;
    assert_eq!(side(&rig).await["closes"], json!({"leaving": 0, "closing": 0, "retrying": 0, "given_up": 0}));
}

fn closes_open(worker: &SimWorker) -> usize {
    worker.open_sessions().1
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_is_closed_within_a_time_and_what_is_left_is_told() {
    let rig = tagged().workers(2).start().await;
    let first = ask(&rig, "s0", "open").await;
    let mut n = 1;
    while rig.workers.iter().any(|worker| worker.open_sessions().1 == 0) {
        ask(&rig, &format!("s{n}"), "open").await;
        n += 1;
    }
    // One fails at first, the other all the time.
    let stubborn = rig.worker_by_id(&first);
    let other = rig.workers.iter().find(|worker| worker.id() != first).unwrap();
    stubborn.faults().add(Fault::always(FaultKind::Status(500, None)).on("/close_session"));
    other.faults().add(Fault::once(FaultKind::Status(500, None)).on("/close_session"));
    let left = rig.gateway().fleet.sessions.close_within(std::time::Duration::from_secs(10)).await;
    assert_eq!(other.open_sessions(), (0, 0));
    assert_eq!(left.len(), stubborn.open_sessions().1);
    stubborn.faults().clear();
    let left = rig.gateway().fleet.sessions.close_within(std::time::Duration::from_secs(30)).await;
    assert_eq!((left.len(), stubborn.open_sessions()), (0, (0, 0)));
}
