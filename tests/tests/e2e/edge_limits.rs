//! The limits on a client, each with the refusal that names it.

use std::time::Duration;
use turnstile_tests::harness::{Answer, CHAT, Connection, Flood, Request, Setup, WorkerExt, chat, chat_stream, until};

fn assert_names(answer: &Answer, status: u16, code: &str, option: &str) {
    assert_eq!(answer.status, status, "{}", answer.text());
    let error = answer.error();
    assert_eq!(error["code"], code);
    assert!(error["message"].as_str().unwrap().contains(option), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_over_their_size_are_431() {
    let rig = Setup::new().set("limits.header_bytes", "\"2KiB\"").start().await;
    let with = |size: usize| Request::json(CHAT, &chat("Hello")).header("x-long", &"a".repeat(size));
    assert_eq!(rig.send(&with(1500)).await.status, 200);
    let long_list = (0..50).fold(Request::get("/live"), |r, n| r.header(&format!("x-{n}"), &"a".repeat(50)));
    // Just over, far over, by many, on a local route, and more than is ever held.
    for request in [with(2100), with(9000), long_list, with(3 << 20)] {
        assert_names(&rig.send(&request).await, 431, "header_too_large", "limits.header_bytes");
    }
    assert_eq!(rig.worker().turns().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn more_headers_than_allowed_are_431() {
    let rig = Setup::new().set("limits.header_count", "8").start().await;
    // The client adds Host.
    let with = |count: usize| (1..count).fold(Request::get("/live"), |r, n| r.header(&format!("x-{n}"), "a"));
    assert_eq!(rig.send(&with(8)).await.status, 200);
    for count in [9, 100, 256, 257, 1000] {
        assert_names(&rig.send(&with(count)).await, 431, "header_too_large", "limits.header_count");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_over_its_size_is_414() {
    let rig = Setup::new().set("limits.uri_bytes", "256").start().await;
    let target = |size: usize| format!("/live?{}", "a".repeat(size - 6));
    assert_eq!(rig.get(&target(256)).await.status, 200);
    for size in [257, 8000] {
        assert_names(&rig.get(&target(size)).await, 414, "uri_too_long", "limits.uri_bytes");
    }
    // More than heads may be in all.
    assert_names(&rig.get(&target(200_000)).await, 431, "header_too_large", "limits.uri_bytes");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_that_does_not_end_is_408() {
    let rig = Setup::new().set("timeouts.client_head_s", "1").start().await;
    let mut silent = rig.connect().await;
    silent.write(b"GET /live HTTP/1.1\r\nhost: ga").await;
    let mut dripping = rig.connect().await;
    dripping.write(b"GET /live HTTP/1.1\r\nhost: gateway\r\n").await;
    let drip = async {
        // A byte now and then does not earn more time.
        loop {
            dripping.write(b"x").await;
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let answer = tokio::select! {
        answer = silent.answer() => answer,
        () = drip => unreachable!("drips for ever"),
    };
    assert_names(&answer, 408, "request_timeout", "timeouts.client_head_s");
    silent.closed().await;
    assert_names(&dripping.answer().await, 408, "request_timeout", "timeouts.client_head_s");
    dripping.closed().await;
    // A second request on a connection is held to it as well.
    let mut second = rig.connect().await;
    second.send(&Request::get("/live")).await;
    assert_eq!(second.answer().await.status, 200);
    second.write(b"GET /li").await;
    assert_names(&second.answer().await, 408, "request_timeout", "timeouts.client_head_s");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_never_asks_is_closed() {
    let rig = Setup::new().set("timeouts.client_head_s", "1").set("timeouts.client_idle_s", "1").start().await;
    for opening in [&b""[..], b"PRI * HTTP/2.0\r\n\r\nSM\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"] {
        let mut connection = rig.connect().await;
        connection.write(opening).await;
        connection.closed().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_connection_is_closed_after_its_time_which_a_reload_changes() {
    let mut rig = Setup::new().set("timeouts.client_idle_s", "3600").start().await;
    let client = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    let live = format!("http://{}/live", rig.addr());
    assert_eq!(client.get(&live).send().await.unwrap().status(), 200);
    let mut connection = rig.connect().await;
    connection.send(&Request::get("/live")).await;
    assert_eq!(connection.answer().await.status, 200);
    rig.edit_key("timeouts.client_idle_s", "1");
    rig.generation(2).await;
    // From the next request on.
    connection.send(&Request::get("/live")).await;
    assert_eq!(connection.answer().await.status, 200);
    assert_eq!(client.get(&live).send().await.unwrap().status(), 200);
    connection.closed().await;
    until("no connection is open", async || rig.metric("turnstile_client_connections", &[]).await == 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_turn_is_not_an_idle_connection() {
    let rig = Setup::new().set("timeouts.client_idle_s", "1").set("timeouts.client_head_s", "1").start().await;
    rig.worker().hold().await;
    let mut connection = rig.begin(&Request::json(CHAT, &chat("Hello"))).await;
    until("the turn is on its way", async || rig.in_flight() == 1).await;
    // Both times pass while the turn waits: another connection that came later has been idle for longer than either.
    let mut other = rig.connect().await;
    other.send(&Request::get("/live")).await;
    assert_eq!(other.answer().await.status, 200);
    other.closed().await;
    rig.worker().release().await;
    assert_eq!(connection.answer().await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_over_the_limit_are_told_so_and_closed() {
    let mut rig = Setup::new().set("limits.connections", "2").start().await;
    let open = async |rig: &turnstile_tests::harness::Rig| {
        let mut connection = rig.connect().await;
        connection.send(&Request::get("/live")).await;
        let answer = connection.answer().await;
        (connection, answer)
    };
    let (first, answer) = open(&rig).await;
    assert_eq!(answer.status, 200);
    let (_second, answer) = open(&rig).await;
    assert_eq!(answer.status, 200);
    let (mut third, answer) = open(&rig).await;
    assert_names(&answer, 503, "too_many_connections", "limits.connections");
    assert!(answer.header("retry-after").is_some());
    third.closed().await;
    until("it is counted no more", async || rig.metric("turnstile_client_connections", &[]).await == 2.0).await;
    drop(first);
    until("there is room again", async || open(&rig).await.1.status == 200).await;
    // A reload makes more room.
    rig.edit_key("limits.connections", "4");
    rig.generation(2).await;
    let (_third, answer) = open(&rig).await;
    assert_eq!(answer.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_takes_too_long_in_all_is_408() {
    let rig = Setup::new().set("timeouts.client_body_total_s", "1").start().await;
    let mut connection = rig.connect().await;
    connection.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n").await;
    // It never pauses for long, and never ends.
    let mut refused = false;
    while !refused {
        connection.write(b"{").await;
        refused =
            tokio::time::timeout(Duration::from_millis(20), connection.head()).await.is_ok_and(|h| h.status == 408);
    }
    let (body, _) = connection.rest().await;
    assert!(String::from_utf8_lossy(&body).contains("timeouts.client_body_total_s"), "{body:?}");
    connection.closed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_takes_nothing_is_cut_off() {
    let worker = Flood::start().await;
    let rig = Setup::new().workers(0).external(worker.url()).set("timeouts.client_write_s", "1").start().await;
    let mut connection = rig.begin(&Request::json(CHAT, &chat_stream("Hello"))).await;
    assert_eq!(connection.head().await.status, 200);
    until("the stream is broken off", async || worker.ended() == 1).await;
    until("the turn is over", async || rig.in_flight() == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_pipelines_and_takes_no_answer_is_cut_off() {
    let rig = Setup::new().set("timeouts.client_write_s", "1").start().await;
    let mut connection = Connection::open(rig.addr()).await;
    let requests = Request::get("/v1/models").head().repeat(100);
    // Writes until the gateway reads no more, and then until it has closed.
    let flood = async {
        loop {
            connection.write(&requests).await;
        }
    };
    tokio::select! {
        () = flood => unreachable!("writes for ever"),
        () = async {
            until("the connection is open", async || rig.metric("turnstile_client_connections", &[]).await == 1.0).await;
            until("the connection is closed", async || rig.metric("turnstile_client_connections", &[]).await == 0.0).await;
        } => {}
    }
}
