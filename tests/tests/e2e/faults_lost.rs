//! Workers that are lost with turns in their hands: what waits on a silent one goes elsewhere, and no turn takes them all down.

use serde_json::json;
use turnstile_sim::{Fault, FaultKind, Place, SimWorker};
use turnstile_tests::harness::{CHAT, Request, Rig, Setup, WorkerExt, chat, chat_stream, until};

fn turn(session: &str, stream: bool) -> Request {
    let body = if stream { chat_stream("Hello") } else { chat("Hello") };
    Request::json(CHAT, &body).header("x-session-id", session).header("x-turnstile-explain", "1")
}

/// The worker that a session is bound to, and the other one.
async fn bind<'a>(rig: &'a Rig, session: &str) -> (&'a SimWorker, &'a SimWorker) {
    let answer = rig.send(&turn(session, false)).await;
    let bound = rig.worker_by_id(answer.header("x-turnstile-worker").unwrap());
    let other = rig.workers.iter().find(|worker| worker.id() != bound.id()).unwrap();
    rig.settled().await;
    rig.workers.iter().for_each(SimWorker::clear_requests);
    (bound, other)
}

/// Fast probes, and nothing but them to find a worker out.
fn probed() -> Setup {
    silent(Setup::new().workers(2))
}

fn silent(setup: Setup) -> Setup {
    setup
        .set("routing.probe_timeout_ms", "1000")
        .set("routing.unhealthy_after", "2")
        .set("ejection.wedged_after_ms", "0")
}

/// A host that is gone: connections stay, and nothing comes on any of them.
fn vanish(worker: &SimWorker) {
    for path in [CHAT, "/ready", "/health", "/v1/loads", "/server_info"] {
        worker.faults().add(Fault::always(FaultKind::Hang).on(path));
    }
}

// === silent workers ===

#[tokio::test(flavor = "multi_thread")]
async fn turns_that_wait_on_a_worker_that_is_gone_without_a_word_go_elsewhere() {
    for stream in [false, true] {
        let rig = probed().start().await;
        let (bound, other) = bind(&rig, "s").await;
        vanish(bound);
        let answer = rig.send(&turn("s", stream)).await;
        assert_eq!((answer.status, answer.complete), (200, true), "{}", answer.text());
        assert_eq!((bound.turns().len(), other.turns().len()), (1, 1));
        let record = rig.record_of(&answer).await;
        assert_eq!((&record["attempts"], &record["worker"]), (&json!(2), &json!(other.id())));
        assert_eq!(record["faults"], json!(["nothing moves on the worker"]));
        assert_eq!(rig.metric("turnstile_worker_faults_total", &[]).await, 0.0);
        until("nothing in flight", async || rig.in_flight() == 0).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn with_nowhere_else_to_go_they_wait_until_there_is() {
    let rig = probed().start().await;
    let (bound, other) = bind(&rig, "s").await;
    other.faults().add(Fault::always(FaultKind::Status(503, None)).on("/ready"));
    until("the other one is out", async || rig.gateway().ready_workers() == 1).await;
    vanish(bound);
    let mut waiting = rig.begin(&turn("s", false)).await;
    until("it is there", async || bound.turns().len() == 1).await;
    until("both are out", async || rig.gateway().ready_workers() == 0).await;
    let probes = bound.on("/ready").len();
    until("many more probes", async || bound.on("/ready").len() >= probes + 8).await;
    assert_eq!((rig.in_flight(), other.turns().len()), (1, 0));
    other.faults().clear();
    let answer = waiting.answer().await;
    assert_eq!((answer.status, other.turns().len()), (200, 1), "{}", answer.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_stay_with_a_worker_whose_probes_fail_but_which_can_be_heard() {
    // One turn at a time, so slow that probes fail many times before the first has ended.
    let setup = Setup::new().sim(|c| (c.speed, c.max_running_requests) = (1.0, 1)).workers(2);
    let setup = silent(setup).pool("default", "", &[0]).set("admission.max_in_flight_per_worker", "8");
    let mut rig = setup.start().await;
    let mut body = chat("[[sim:tokens=200]]");
    body["max_tokens"] = json!(200);
    let mut first = rig.begin(&Request::json(CHAT, &body)).await;
    until("it runs", async || rig.workers[0].engine_requests() == 1).await;
    let mut waiting = rig.begin(&turn("s", false)).await;
    until("the turn waits behind it", async || rig.workers[0].engine_requests() == 2).await;
    rig.edit(|setup| setup.set_pool_workers("default", &[0, 1]));
    until("there is another worker", async || rig.gateway().ready_workers() == 2).await;
    let (bound, other) = (&rig.workers[0], &rig.workers[1]);
    bound.faults().add(Fault::always(FaultKind::Status(503, None)).on("/ready"));
    until("the worker is out", async || rig.gateway().ready_workers() == 1).await;
    let probes = bound.on("/ready").len();
    until("many more probes", async || bound.on("/ready").len() >= probes + 8).await;
    assert_eq!(first.answer().await.status, 200);
    let answer = waiting.answer().await;
    assert_eq!((answer.status, answer.header("x-turnstile-worker")), (200, Some(bound.id().as_str())));
    assert!(other.turns().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_probes_fail_and_on_which_nothing_moves_is_wedged() {
    let rig = probed().set("ejection.wedged_after_ms", "200").start().await;
    let (bound, other) = bind(&rig, "s").await;
    bound.hold().await;
    let mut waiting = rig.begin(&turn("s", true)).await;
    until("it is there", async || bound.turns().len() == 1).await;
    // Not before: no turn goes to a worker whose probes fail.
    bound.faults().add(Fault::always(FaultKind::Status(503, None)).on("/ready"));
    let answer = waiting.answer().await;
    assert_eq!((answer.status, bound.turns().len(), other.turns().len()), (200, 1, 1), "{}", answer.text());
    assert_eq!(rig.metric("turnstile_ejections_total", &[("cause", "wedge")]).await, 1.0);
    until("the turn is aborted there", async || bound.on("/abort_request").len() == 1).await;
}

// === a turn that no worker survives ===

/// Only turns find faults.
fn unprobed(workers: usize) -> Setup {
    let setup = Setup::new().workers(workers).set("retry.attempts", "10").set("routing.unhealthy_after", "1000");
    setup.set("routing.probe_interval_ms", "3600000").set("routing.load_interval_ms", "3600000")
}

fn asked(rig: &Rig) -> usize {
    rig.workers.iter().filter(|worker| !worker.turns().is_empty()).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_workers_do_not_survive_takes_two_of_them_at_the_most() {
    for stream in [false, true] {
        let rig = unprobed(4).start().await;
        for worker in &rig.workers {
            worker.faults().add(Fault::always(FaultKind::Crash).on(CHAT));
        }
        let answer = rig.send(&turn("s", stream)).await;
        assert_eq!((answer.status, &answer.error()["code"]), (502, &json!("worker_unreachable")));
        assert_eq!(rig.record_of(&answer).await["attempts"], 2);
        assert_eq!(asked(&rig), 2);
        until("they are dead", async || rig.workers.iter().filter(|worker| worker.is_alive()).count() == 2).await;
        assert_eq!(rig.metric("turnstile_retries_total", &[("result", "lost_workers")]).await, 1.0);
        // Who cannot be connected to does not count.
        rig.workers.iter().for_each(|worker| worker.faults().clear());
        for session in 0..8 {
            assert_eq!(rig.send(&turn(&session.to_string(), stream)).await.status, 200);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn how_many_is_an_option() {
    for most in 1..=4 {
        let rig = unprobed(4).set("retry.lost_workers", &most.to_string()).start().await;
        for worker in &rig.workers {
            worker.faults().add(Fault::always(FaultKind::Cut(Place::Head)));
        }
        assert_eq!(rig.send(&turn("s", false)).await.status, 502);
        assert_eq!(asked(&rig), most);
    }
}
