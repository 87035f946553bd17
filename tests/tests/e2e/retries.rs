//! Trying another worker while nothing has reached the client, and never after.

use serde_json::json;
use turnstile_sim::{Fault, FaultKind, Place, SimWorker};
use turnstile_tests::harness::{CHAT, Request, Rig, Scripted, Setup, WorkerExt, chat, chat_stream};

/// Two workers whose health is known once and not looked at again, so that only the turn itself finds the fault.
fn setup() -> Setup {
    known(Setup::new().workers(2))
}

/// The same at a twentieth of real time.
fn slow() -> Setup {
    known(Setup::new().sim(|c| c.speed = 0.05).workers(2))
}

fn known(setup: Setup) -> Setup {
    let setup = setup.set("routing.unhealthy_after", "1000");
    setup.set("routing.probe_interval_ms", "3600000").set("routing.load_interval_ms", "3600000")
}

/// A session's worker, so that it is known where the next turn goes first.
async fn bind(rig: &Rig) -> (&SimWorker, &SimWorker) {
    let answer = rig.send(&turn(false).header("x-turnstile-explain", "1")).await;
    let bound = rig.worker_by_id(answer.header("x-turnstile-worker").unwrap());
    let other = rig.workers.iter().find(|worker| worker.id() != bound.id()).unwrap();
    rig.settled().await;
    for worker in &rig.workers {
        worker.clear_requests();
    }
    (bound, other)
}

fn turn(stream: bool) -> Request {
    let body = if stream { chat_stream("Hello") } else { chat("Hello") };
    Request::json(CHAT, &body).header("x-session-id", "s")
}

async fn assert_other_serves(kind: FaultKind, label: &str) {
    for stream in [true, false] {
        let rig = setup().start().await;
        let (bound, other) = bind(&rig).await;
        bound.faults().add(Fault::always(kind.clone()));
        let answer = rig.send(&turn(stream)).await;
        assert_eq!(answer.status, 200, "{kind:?}: {}", answer.text());
        assert!(answer.complete && !answer.text().contains("error"));
        assert!(!bound.turns().is_empty() && other.turns().len() == 1, "{kind:?}");
        let failed = rig.metric("turnstile_attempts_total", &[("result", label), ("worker", &bound.id())]).await;
        assert_eq!(failed, 1.0, "{kind:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_fails_before_the_first_byte_is_replaced() {
    assert_other_serves(FaultKind::Status(500, None), "status_5xx").await;
    assert_other_serves(FaultKind::Status(503, None), "overloaded").await;
    assert_other_serves(FaultKind::Status(429, None), "overloaded").await;
    assert_other_serves(FaultKind::Cut(Place::Head), "broken").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_that_comes_first_in_a_stream_is_retried() {
    for (code, label) in [(503, "overloaded"), (500, "error_event")] {
        let rig = setup().start().await;
        let (bound, other) = bind(&rig).await;
        bound.faults().add(Fault::once(FaultKind::ErrorEvent(code, "The request queue is full.".into())));
        let answer = rig.send(&turn(true)).await;
        assert_eq!((answer.status, bound.turns().len(), other.turns().len()), (200, 1, 1));
        assert_eq!(answer.events().last().unwrap(), "[DONE]");
        assert!(!answer.text().contains("error"), "{}", answer.text());
        assert_eq!(rig.metric("turnstile_attempts_total", &[("result", label)]).await, 1.0);
    }
}

fn responses() -> Request {
    let body = json!({"model": "sim", "input": "Hello", "max_output_tokens": 8, "stream": true});
    Request::json("/v1/responses", &body).header("x-session-id", "s")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_after_the_events_that_only_open_a_stream_of_responses_is_retried() {
    for kind in [FaultKind::ErrorEvent(503, "The request queue is full.".into()), FaultKind::Cut(Place::Body(100))] {
        let rig = setup().start().await;
        let (bound, other) = bind(&rig).await;
        bound.faults().add(Fault::once(kind.clone()));
        let answer = rig.send(&responses()).await;
        assert_eq!((answer.status, bound.turns().len(), other.turns().len()), (200, 1, 1), "{kind:?}");
        let text = answer.text();
        assert_eq!((text.matches("event: response.created\n").count(), answer.complete), (1, true), "{text}");
        assert!(!text.contains("failed"), "{kind:?}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_of_responses_learns_that_its_request_was_taken_while_it_waits() {
    let rig = setup().start().await;
    let (bound, other) = bind(&rig).await;
    bound.hold().await;
    let mut connection = rig.begin(&responses()).await;
    assert_eq!(connection.head().await.status, 200);
    let begin = connection.piece().await.unwrap();
    assert!(begin.starts_with(b"event: response.created\n"), "{begin:?}");
    bound.release().await;
    let (rest, complete) = connection.rest().await;
    assert!(complete && String::from_utf8_lossy(&rest).contains("event: response.incomplete"), "{rest:?}");
    assert!(other.turns().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_cannot_be_reached_is_replaced() {
    let rig = setup().start().await;
    let (bound, other) = bind(&rig).await;
    bound.die().await;
    for _ in 0..3 {
        assert_eq!(rig.send(&turn(true)).await.status, 200);
    }
    assert_eq!(other.turns().len(), 3);
    rig.until_metric("turnstile_attempts_total", &[("result", "ok"), ("worker", &other.id())], 3.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_attempt_has_an_id_of_its_own_for_the_engine() {
    let rig = setup().start().await;
    let (bound, other) = bind(&rig).await;
    bound.faults().add(Fault::once(FaultKind::Status(500, None)));
    let answer = rig.send(&turn(false)).await;
    let (first, second) = (bound.turns()[0].json(), other.turns()[0].json());
    assert_ne!(first["rid"], second["rid"]);
    let record = rig.record_of(&answer).await;
    assert_eq!((&record["attempts"], &record["rid"]), (&json!(2), &second["rid"]));
    assert_eq!(record["faults"], json!(["status 500"]));
    assert_eq!(bound.turns()[0].headers["x-request-id"], other.turns()[0].headers["x-request-id"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_the_request_is_not_tried_elsewhere() {
    for status in [400, 401, 403, 404, 422] {
        let rig = setup().start().await;
        let (bound, other) = bind(&rig).await;
        bound.faults().add(Fault::once(FaultKind::Status(status, Some("{\"message\":\"why\"}".into()))));
        let answer = rig.send(&turn(true)).await;
        assert_eq!(answer.status, status, "{}", answer.text());
        assert!(other.turns().is_empty(), "{status}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_tried_again_once_a_byte_has_reached_the_client() {
    // Slow, so that the first event has gone out before the cut.
    let rig = slow().start().await;
    let (bound, other) = bind(&rig).await;
    bound.faults().add(Fault::once(FaultKind::Cut(Place::Body(600))));
    let answer = rig.send(&turn(true).header("x-request-id", "cut")).await;
    assert_eq!((answer.status, answer.complete), (200, false), "{}", answer.text());
    assert!(answer.text().starts_with("data: "));
    assert!(other.turns().is_empty());
    let record = rig.record("cut").await;
    assert_eq!((&record["end"], &record["attempts"]), (&json!("cut"), &json!(1)));
    rig.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_whole_answer_that_breaks_off_is_tried_again() {
    let rig = setup().start().await;
    let (bound, other) = bind(&rig).await;
    bound.faults().add(Fault::once(FaultKind::Cut(Place::Body(50))));
    let answer = rig.send(&turn(false)).await;
    assert_eq!((answer.status, answer.complete), (200, true), "{}", answer.text());
    assert_eq!(other.turns().len(), 1);
    assert!(answer.json()["choices"].is_array());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_silent_is_not_given_the_turn_twice() {
    let rig = setup().set("timeouts.first_byte_s", "1").start().await;
    let (bound, other) = bind(&rig).await;
    bound.faults().add(Fault::once(FaultKind::Hang));
    let answer = rig.send(&turn(false)).await;
    assert_eq!((answer.status, &answer.error()["code"]), (504, &json!("worker_timeout")));
    assert!(other.turns().is_empty());
    rig.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn when_all_fail_the_client_gets_the_last_workers_reason() {
    let rig = setup().start().await;
    for worker in &rig.workers {
        worker.faults().add(Fault::always(FaultKind::Status(503, Some("{\"message\":\"full\"}".into()))));
    }
    let answer = rig.send(&turn(true)).await;
    assert_eq!((answer.status, &answer.error()["message"]), (503, &json!("full")));
    assert!(answer.header("retry-after").is_some());
    for worker in &rig.workers {
        assert_eq!(worker.turns().len(), 1);
        worker.die().await;
    }
    let answer = rig.send(&turn(true)).await;
    assert_eq!(answer.status, 502, "{}", answer.text());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_event_that_every_worker_gives_becomes_a_status() {
    let rig = setup().start().await;
    for worker in &rig.workers {
        worker.faults().add(Fault::always(FaultKind::ErrorEvent(503, "The request queue is full.".into())));
    }
    let answer = rig.send(&turn(true)).await;
    assert_eq!((answer.status, &answer.error()["message"]), (503, &json!("The request queue is full.")));
    assert!(answer.header("retry-after").is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn attempts_are_bounded_by_the_configuration() {
    let rig = setup().workers(2).set("retry.attempts", "2").start().await;
    for worker in &rig.workers {
        worker.faults().add(Fault::always(FaultKind::Status(500, None)));
    }
    assert_eq!(rig.send(&turn(false)).await.status, 500);
    assert_eq!(rig.workers.iter().map(|worker| worker.turns().len()).sum::<usize>(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pooled_connection_that_is_dead_is_replaced_without_a_word() {
    let body = r#"{"tokens":[1]}"#;
    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    // Closes when a second turn comes on a connection: the moment at which a keep-alive limit strikes.
    let worker = Scripted::closing(answer).await;
    let rig = setup().external(worker.url());
    let rig = rig.pool("one", "", &[2]).start().await;
    for _ in 0..5 {
        let answer = rig.post("/tokenize", &json!({"prompt": "Hello"})).await;
        assert_eq!((answer.status, answer.text().as_str()), (200, body));
    }
    assert!(worker.closed() > 0, "a pooled connection was tried");
    rig.until_metric("turnstile_attempts_total", &[("result", "ok")], 5.0).await;
    assert_eq!(rig.metric("turnstile_attempts_total", &[("result", "broken")]).await, 0.0);
}
