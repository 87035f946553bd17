//! Refusals that need a moment of their own: a client that is too slow, a gateway that stops.

use super::errors::{INVALID, asked, assert_told, wanted};
use turnstile_tests::harness::{Request, Setup, WorkerExt, until};

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_send_its_body_is_told_in_every_protocol() {
    let rig = Setup::new().set("timeouts.client_body_s", "1").start().await;
    let told = wanted(
        408,
        "request_timeout",
        INVALID,
        INVALID,
        "the request body paused longer than timeouts.client_body_s = 1",
    );
    let mut slow = Vec::new();
    for (path, body) in asked(false) {
        let request = Request::json(path, &body);
        let mut connection = rig.connect().await;
        connection.write(&request.head()).await;
        connection.write(&request.framed_body()[..5]).await;
        slow.push((path, connection));
    }
    for (path, mut connection) in slow {
        assert_told(path, &connection.answer().await, &told);
    }
    assert!(rig.worker().turns().is_empty());
    assert_eq!(rig.metric("turnstile_refusals_total", &[("code", "request_timeout")]).await, 5.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_nothing_when_the_gateway_stops_is_told_in_every_protocol() {
    let rig = Setup::new().set("shutdown.grace_s", "0").start().await;
    rig.worker().hold().await;
    let mut waiting = Vec::new();
    for (path, body) in asked(false).into_iter().chain(asked(true)) {
        waiting.push((path, rig.begin(&Request::json(path, &body)).await));
    }
    until("all wait on the worker", async || rig.worker().turns().len() == waiting.len()).await;
    let _workers = rig.stop().await;
    let told = wanted(503, "draining", "server_error", "overloaded_error", "this gateway is shutting down");
    for (path, mut connection) in waiting {
        let answer = connection.answer().await;
        assert_told(path, &answer, &told);
        assert_eq!(answer.header("retry-after"), Some("1"), "{path}");
        assert_eq!(answer.header("connection"), Some("close"), "{path}");
    }
}
