//! Workers that are taken out because turns fail on them or nothing moves, and how they come back.

use serde_json::{Value, json};
use turnstile_sim::{Fault, FaultKind, Place, SimConfig, SimWorker};
use turnstile_tests::harness::{CHAT, Faulty, Request, Rig, Setup, WorkerExt, chat, chat_stream, send, until};

/// Only turns find faults, and nothing brings a worker back but its time.
fn setup() -> Setup {
    judged_by_turns(Setup::new().workers(2))
}

fn judged_by_turns(setup: Setup) -> Setup {
    let setup = setup.set("routing.unhealthy_after", "1000");
    let setup = setup.set("routing.probe_interval_ms", "3600000").set("routing.load_interval_ms", "3600000");
    setup.set("ejection.base_ms", "3600000").set("ejection.max_ms", "3600000").set("ejection.consecutive_faults", "3")
}

fn turn(session: &str) -> Request {
    let text = "The same beginning of every prompt, so that all go where it is cached. ".repeat(40);
    Request::json(CHAT, &chat(&text)).header("x-session-id", session).header("x-turnstile-explain", "1")
}

/// Binds so many sessions to one worker; that one, and the other.
async fn bind(rig: &Rig, sessions: usize) -> (&SimWorker, &SimWorker) {
    let mut bound = None;
    for session in 0..sessions {
        let answer = rig.send(&turn(&session.to_string())).await;
        assert_eq!(answer.status, 200);
        let worker = answer.header("x-turnstile-worker").unwrap().to_owned();
        assert_eq!(*bound.get_or_insert(worker.clone()), worker, "all begin alike");
        // What is cached there is known once the turn has ended.
        rig.settled().await;
    }
    let bound = rig.worker_by_id(&bound.unwrap());
    (bound, rig.workers.iter().find(|worker| worker.id() != bound.id()).unwrap())
}

/// What the admin listener says of a worker.
async fn seen(rig: &Rig, id: &str) -> Value {
    let workers = rig.admin("/workers").await.json();
    workers["workers"].as_array().unwrap().iter().find(|worker| worker["id"] == id).unwrap().clone()
}

async fn ejections(rig: &Rig) -> f64 {
    rig.metric("turnstile_ejections_total", &[]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_answers_fail_is_taken_out_and_comes_back_after_its_time() {
    let rig = setup().set("ejection.base_ms", "100").start().await;
    let (bound, other) = bind(&rig, 6).await;
    bound.faults().add(Fault::always(FaultKind::Status(500, None)));
    for session in 0..3 {
        assert_eq!(seen(&rig, &bound.id()).await["faults_in_a_row"], session);
        let answer = rig.send(&turn(&session.to_string())).await;
        assert_eq!((answer.status, answer.header("x-turnstile-worker")), (200, Some(other.id().as_str())));
    }
    let labels = [("worker", bound.id()), ("cause", "answer".to_owned())];
    let labels = labels.each_ref().map(|(name, value)| (*name, value.as_str()));
    assert_eq!(rig.metric("turnstile_ejections_total", &labels).await, 1.0);
    until("it is back", async || seen(&rig, &bound.id()).await["state"] == "ready").await;
    // On trial: one fault is enough, and the time is longer.
    let answer = rig.send(&turn("3")).await;
    assert_eq!(answer.status, 200);
    assert_eq!(rig.metric("turnstile_ejections_total", &labels).await, 2.0);
    bound.faults().clear();
    until("it is back", async || seen(&rig, &bound.id()).await["state"] == "ready").await;
    let answer = rig.send(&turn("4")).await;
    assert_eq!((answer.status, answer.header("x-turnstile-worker")), (200, Some(bound.id().as_str())));
    assert_eq!(seen(&rig, &bound.id()).await["faults_in_a_row"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ejected_worker_gets_nothing_and_is_shown_as_such() {
    let rig = setup().start().await;
    let (bound, other) = bind(&rig, 6).await;
    bound.faults().add(Fault::always(FaultKind::Cut(Place::Head)));
    for session in 0..3 {
        assert_eq!(rig.send(&turn(&session.to_string())).await.status, 200);
    }
    let worker = seen(&rig, &bound.id()).await;
    assert_eq!((&worker["state"], &worker["ejected"]["cause"]), (&json!("ejected"), &json!("answer")));
    assert!(worker["ejected"]["for_ms"].as_u64().unwrap() > 3_000_000);
    let state =
        async |state: &str| rig.metric("turnstile_worker_state", &[("worker", &bound.id()), ("state", state)]).await;
    assert_eq!((state("ejected").await, state("ready").await), (1.0, 0.0));
    bound.clear_requests();
    for session in 3..6 {
        let answer = rig.send(&turn(&session.to_string())).await;
        let record = rig.record_of(&answer).await;
        assert_eq!((answer.status, &record["attempts"], &record["worker"]), (200, &json!(1), &json!(other.id())));
    }
    assert!(bound.turns().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_the_workers_fault_takes_nobody_out() {
    let rig = setup().set("ejection.consecutive_faults", "1").set("ejection.max_share", "1.0").start().await;
    let (bound, _) = bind(&rig, 4).await;
    let queue_full = FaultKind::ErrorEvent(503, "The request queue is full.".into());
    for kind in [FaultKind::Status(503, None), FaultKind::Status(429, None), FaultKind::Status(400, None), queue_full] {
        bound.faults().add(Fault::once(kind));
        rig.send(&turn("0")).await;
        bound.faults().clear();
    }
    // A client that leaves.
    bound.hold().await;
    let connection = rig.begin(&turn("1")).await;
    until("the turn is there", async || rig.in_flight() == 1).await;
    drop(connection);
    until("the gateway has let go", async || rig.in_flight() == 0).await;
    bound.release().await;
    // A turn that every worker answers with a 5xx: it is the turn that they cannot digest.
    for worker in &rig.workers {
        worker.faults().add(Fault::once(FaultKind::Status(500, None)));
    }
    assert_eq!(rig.send(&turn("2")).await.status, 500);
    assert_eq!((ejections(&rig).await, rig.metric("turnstile_worker_faults_total", &[]).await), (0.0, 0.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn with_every_worker_taken_out_all_are_used() {
    let rig = setup().set("ejection.consecutive_faults", "1").set("ejection.max_share", "1.0").start().await;
    for _ in 0..2 {
        // Whichever is asked first fails.
        let (asked, _) = bind(&rig, 1).await;
        asked.faults().add(Fault::once(FaultKind::Status(500, None)));
        assert_eq!(rig.send(&turn("0")).await.status, 200);
    }
    for worker in &rig.workers {
        assert_eq!(seen(&rig, &worker.id()).await["state"], "ejected");
    }
    assert_eq!(rig.get("/health").await.status, 200);
    for session in ["1", "2", "3"] {
        assert_eq!(rig.send(&turn(session)).await.status, 200, "fails open");
    }
    rig.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_more_than_the_share_of_a_pool_is_taken_out() {
    let rig = setup().set("ejection.consecutive_faults", "1").start().await;
    for _ in 0..4 {
        let (asked, _) = bind(&rig, 1).await;
        asked.faults().add(Fault::always(FaultKind::Cut(Place::Head)));
        assert_eq!(rig.send(&turn("0")).await.status, 200);
        asked.faults().clear();
    }
    assert_eq!(ejections(&rig).await, 1.0, "half of two");
    assert_eq!(rig.gateway().ready_workers(), 1);
    let rig = setup().set("ejection.consecutive_faults", "0").start().await;
    for _ in 0..4 {
        let (asked, _) = bind(&rig, 1).await;
        asked.faults().add(Fault::always(FaultKind::Cut(Place::Head)));
        assert_eq!(rig.send(&turn("0")).await.status, 200);
        asked.faults().clear();
    }
    assert_eq!(ejections(&rig).await, 0.0, "off");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_refused_connections_is_back_with_its_first_good_probe() {
    let mut workers = Faulty::start(2, &SimConfig { speed: 1000.0, ..Default::default() }).await;
    let setup = judged_by_turns(Setup::new()).set("routing.probe_interval_ms", "50");
    let setup = workers.iter().fold(setup, |setup, worker| setup.external(worker.url()));
    let rig = setup.set("ejection.consecutive_faults", "1").start().await;
    let answer = rig.send(&turn("0")).await;
    let bound = answer.header("x-turnstile-worker").unwrap().to_owned();
    let worker = workers.iter_mut().find(|worker| worker.id() == bound).unwrap();
    worker.refuse().await;
    assert_eq!(rig.send(&turn("0")).await.status, 200);
    let state = seen(&rig, &bound).await;
    assert_eq!((&state["state"], &state["ejected"]["cause"]), (&json!("ejected"), &json!("connect")));
    worker.accept().await;
    until("it is back", async || seen(&rig, &bound).await["state"] == "ready").await;
}

fn wedging(speed: f64) -> Setup {
    Setup::new()
        .sim(|c| c.speed = speed)
        .workers(2)
        .set("ejection.wedged_after_ms", "200")
        .set("ejection.base_ms", "3600000")
        .set("ejection.max_ms", "3600000")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wedged_worker_loses_the_turns_that_wait_there_and_is_back_when_it_moves() {
    let rig = wedging(1000.0).start().await;
    let (bound, other) = bind(&rig, 2).await;
    bound.hold().await;
    let before = bound.turns().len();
    let mut waiting = rig.begin(&turn("0")).await;
    // First of all, for no turn goes to a worker on which somebody waits already too long.
    until("our turn is there", async || bound.turns().len() == before + 1).await;
    let ours = bound.turns()[before].json()["rid"].clone();
    // Somebody else's request, which stays when ours are taken off.
    let addr = bound.addr();
    let direct = tokio::spawn(async move { send(addr, &Request::json(CHAT, &chat("direct"))).await });
    until("it is there", async || bound.turns().len() == before + 2).await;
    let answer = waiting.answer().await;
    assert_eq!((answer.status, answer.header("x-turnstile-worker")), (200, Some(other.id().as_str())));
    let record = rig.record_of(&answer).await;
    assert_eq!((&record["attempts"], &record["faults"]), (&json!(2), &json!(["nothing moves on the worker"])));
    assert_eq!(bound.on("/ready").last().map(|probe| probe.path.as_str()), Some("/ready"), "probes stayed well");
    until("the turn is aborted there", async || bound.on("/abort_request").len() == 1).await;
    assert!(ours.is_string(), "{ours}");
    assert_eq!(bound.on("/abort_request")[0].json()["rid"], ours);
    assert_eq!(seen(&rig, &bound.id()).await["ejected"]["cause"], "wedge");
    assert_eq!(rig.metric("turnstile_ejections_total", &[("cause", "wedge")]).await, 1.0);
    // What comes now does not go there at all.
    let answer = rig.send(&turn("1")).await;
    assert_eq!((answer.status, &rig.record_of(&answer).await["attempts"]), (200, &json!(1)));
    bound.release().await;
    assert_eq!(direct.await.unwrap().status, 200);
    until("it is back", async || seen(&rig, &bound.id()).await["state"] == "ready").await;
    rig.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wedged_worker_without_another_keeps_its_turns() {
    let rig = wedging(1000.0).start().await;
    for worker in &rig.workers {
        worker.hold().await;
        let addr = worker.addr();
        tokio::spawn(async move { send(addr, &Request::json(CHAT, &chat("direct"))).await });
    }
    until("both are out", async || ejections(&rig).await == 2.0).await;
    let mut waiting = rig.begin(&turn("0")).await;
    until("it waits on a worker", async || rig.in_flight() == 1).await;
    rig.workers.iter().for_each(|worker| assert!(worker.is_alive()));
    for worker in &rig.workers {
        worker.release().await;
    }
    assert_eq!(waiting.answer().await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_stream_on_a_busy_worker_is_no_wedge() {
    let rig = wedging(1.0).start().await;
    let mut body = chat_stream("[[sim:tokens=20000]]");
    body["max_tokens"] = json!(20_000);
    let mut connection = rig.begin(&Request::json(CHAT, &body)).await;
    connection.head().await;
    let started = tokio::time::Instant::now();
    while started.elapsed() < std::time::Duration::from_millis(1_000) {
        connection.piece().await.unwrap();
    }
    assert_eq!(ejections(&rig).await, 0.0);
}

// === budget ===

#[tokio::test(flavor = "multi_thread")]
async fn retries_end_with_their_budget_and_a_lost_workers_first_is_free() {
    let budget =
        |ratio: &str, floor: &str| setup().set("retry.budget_ratio", ratio).set("retry.budget_floor_per_s", floor);
    let rig = budget("0.0", "0").start().await;
    let (bound, other) = bind(&rig, 1).await;
    bound.faults().add(Fault::once(FaultKind::Status(500, None)));
    let answer = rig.send(&turn("0")).await;
    assert_eq!((answer.status, other.turns().len()), (500, 0));
    assert_eq!(rig.metric("turnstile_retries_total", &[("result", "budget")]).await, 1.0);
    bound.faults().add(Fault::always(FaultKind::Cut(Place::Head)));
    assert_eq!(rig.send(&turn("0")).await.status, 200);
    assert_eq!(rig.metric("turnstile_retries_total", &[("result", "retried")]).await, 1.0);

    // Six turns so far, of which a half may be tried again.
    let rig = budget("0.5", "0").start().await;
    let (bound, _) = bind(&rig, 5).await;
    bound.faults().add(Fault::always(FaultKind::Status(503, None)));
    let mut statuses = Vec::new();
    for session in 0..5 {
        statuses.push(rig.send(&turn(&session.to_string())).await.status);
    }
    assert!(statuses.starts_with(&[200, 200, 200]), "{statuses:?}");
    let floor = budget("0.0", "1").start().await;
    let (bound, _) = bind(&floor, 1).await;
    bound.faults().add(Fault::once(FaultKind::Status(503, None)));
    assert_eq!(floor.send(&turn("0")).await.status, 200);
}

// === starting and removed workers ===

#[tokio::test(flavor = "multi_thread")]
async fn turns_wait_for_a_worker_that_a_reload_brings_before_it_is_up() {
    let mut workers = Faulty::start(1, &SimConfig { speed: 1000.0, ..Default::default() }).await;
    workers[0].refuse().await;
    let setup = Setup::new().workers(1).external(workers[0].url()).pool("default", "", &[0]);
    let mut rig = setup.set("routing.unhealthy_after", "1000").start().await;
    rig.edit(|setup| setup.set_pool_workers("default", &[1]));
    rig.generation(2).await;
    let mut waiting = rig.begin(&turn("0")).await;
    rig.until_queued(1).await;
    workers[0].accept().await;
    let answer = waiting.answer().await;
    assert_eq!((answer.status, answer.header("x-turnstile-worker")), (200, Some(workers[0].id().as_str())));
}

#[tokio::test(flavor = "multi_thread")]
async fn they_do_not_wait_for_one_that_had_its_chances() {
    let mut workers = Faulty::start(1, &SimConfig::default()).await;
    workers[0].refuse().await;
    let setup = Setup::new().workers(1).external(workers[0].url()).pool("default", "", &[0]);
    let mut rig = setup.set("routing.unhealthy_after", "3").start().await;
    rig.edit(|setup| setup.set_pool_workers("default", &[1]));
    rig.generation(2).await;
    let answer = rig.send(&turn("0")).await;
    assert_eq!((answer.status, &answer.error()["code"]), (503, &json!("no_worker")));
    assert_eq!(seen(&rig, &workers[0].id()).await["state"], "unhealthy");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_of_a_removed_worker_once_its_last_turn_has_ended() {
    let mut rig = Setup::new().sim(|c| c.speed = 1.0).workers(2).start().await;
    // Two and a half seconds, in which the reload comes.
    let mut body = chat_stream("[[sim:tokens=400]]");
    body["max_tokens"] = json!(400);
    let mut stream = rig.begin(&Request::json(CHAT, &body).header("x-request-id", "last")).await;
    stream.head().await;
    let at = rig.workers.iter().position(|worker| worker.engine_requests() == 1).unwrap();
    let id = rig.workers[at].id();
    rig.edit(|setup| setup.set_pool_workers("default", &[1 - at]));
    rig.generation(2).await;
    let (_, complete) = stream.rest().await;
    assert!(complete, "a stream of a removed worker goes on to its end");
    assert_eq!(rig.record("last").await["worker"], json!(id));
    until("no series of it", async || !rig.metrics().await.text().contains(&id)).await;
    until("nothing of it", async || rig.gateway().fleet.workers.leaving().is_empty()).await;
    assert_eq!(rig.gateway().fleet.index.lock().len_of(turnstile_fleet::ids::WorkerId(at as u32)), 0);
}
