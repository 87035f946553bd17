//! Sessions of clients that send the whole history: binding, tags, and their end.

use serde_json::{Value, json};
use turnstile_sim::{Fault, FaultKind, Place, SimWorker};
use turnstile_tests::harness::{Answer, CHAT, Request, Rig, Setup, WorkerExt, chat, chat_with, until};

fn control(id: &str, action: Option<&str>) -> Value {
    match action {
        Some(action) => json!({"session_control": {"session_id": id, "action": action}}),
        None => json!({"session_control": {"session_id": id}}),
    }
}

fn turn(text: &str, id: &str, action: Option<&str>) -> Request {
    Request::json(CHAT, &chat_with(text, control(id, action))).header("x-turnstile-explain", "1")
}

async fn ask(rig: &Rig, text: &str, id: &str, action: Option<&str>) -> Answer {
    let answer = rig.send(&turn(text, id, action)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer
}

fn worker_of(answer: &Answer) -> String {
    answer.header("x-turnstile-worker").unwrap().to_owned()
}

fn tagged() -> Setup {
    Setup::new().sim(|c| c.enable_session_radix_cache = true)
}

/// The tags that a worker's chat turns carried, in order.
fn tags(worker: &SimWorker) -> Vec<Value> {
    worker.on(CHAT).iter().map(|request| request.json()["session_id"].clone()).collect()
}

/// The sessions that a worker was told to close, in order.
fn closes(worker: &SimWorker) -> Vec<Value> {
    worker.on("/close_session").iter().map(|request| request.json()["session_id"].clone()).collect()
}

async fn until_closed(worker: &SimWorker, count: usize) {
    until(&format!("{count} closes"), async || closes(worker).len() >= count).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bound_session_stays_on_its_worker() {
    let rig = Setup::new().workers(4).start().await;
    for id in ["a", "b", "c"] {
        let first = worker_of(&ask(&rig, &format!("{id} begins"), id, Some("bind")).await);
        for n in 0..4 {
            // Prompts that share nothing, so that only the session holds them together.
            let answer = ask(&rig, &format!("{n} {id} other words"), id, None).await;
            assert_eq!(worker_of(&answer), first, "{id} {n}");
            assert_eq!(answer.header("x-turnstile-session"), Some("affinity"));
        }
    }
    let all = rig.workers.iter().flat_map(tags).all(|tag| tag.is_null());
    assert!(all, "an affinity session says nothing to the worker");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_session_has_one_tag_on_every_turn_and_is_closed_after_the_last() {
    let rig = tagged().workers(2).start().await;
    let worker = rig.worker_by_id(&worker_of(&ask(&rig, "one", "s", Some("open")).await));
    for _ in 0..2 {
        let answer = ask(&rig, "two", "s", None).await;
        assert_eq!(answer.header("x-turnstile-session"), Some("tag"));
    }
    ask(&rig, "three", "s", Some("close")).await;
    until_closed(worker, 1).await;
    let tags = tags(worker);
    assert_eq!(tags.len(), 4);
    assert!(tags[0].as_str().unwrap().starts_with("ts-") && tags.iter().all(|tag| *tag == tags[0]), "{tags:?}");
    assert_eq!(closes(worker), [tags[0].clone()]);
    assert!(worker.on("/open_session").is_empty(), "a tag needs no open");
    // The session is over: the next turn of that id is an ordinary one.
    ask(&rig, "four", "s", None).await;
    assert_eq!(rig.workers.iter().flat_map(self::tags).filter(Value::is_null).count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_close_waits_for_the_end_of_the_stream() {
    let rig = tagged().start().await;
    ask(&rig, "one", "s", Some("open")).await;
    rig.worker().hold().await;
    let mut body = chat_with("two", control("s", Some("close")));
    body["stream"] = json!(true);
    let mut connection = rig.begin(&Request::json(CHAT, &body)).await;
    until("the turn is on the worker", async || rig.worker().on(CHAT).len() == 2).await;
    assert!(closes(rig.worker()).is_empty());
    rig.worker().release().await;
    let answer = connection.answer().await;
    assert!(answer.complete && answer.events().last().unwrap() == "[DONE]");
    until_closed(rig.worker(), 1).await;
    let paths: Vec<_> = rig.worker().requests().into_iter().map(|r| r.path).filter(|p| p != "/ready").collect();
    let at = |path: &str| paths.iter().rposition(|p| p == path).unwrap();
    assert!(at("/close_session") > at(CHAT));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_close_is_sent_however_the_last_turn_ended() {
    let rig = tagged().sim(|c| c.speed = 1.0).start().await;
    let last = |n: usize| {
        let mut body = chat_with("[[sim:tokens=20000]]", control(&format!("s{n}"), Some("close")));
        body["max_tokens"] = json!(20_000);
        body["stream"] = json!(true);
        Request::json(CHAT, &body)
    };
    ask(&rig, "[[sim:tokens=2]]", "s1", Some("open")).await;
    let mut connection = rig.begin(&last(1)).await;
    connection.head().await;
    drop(connection);
    until_closed(rig.worker(), 1).await;
    rig.idle().await;
    ask(&rig, "[[sim:tokens=2]]", "s2", Some("open")).await;
    rig.worker().faults().add(Fault::once(FaultKind::Status(400, None)));
    assert_eq!(rig.send(&last(2)).await.status, 400);
    until_closed(rig.worker(), 2).await;
    ask(&rig, "[[sim:tokens=2]]", "s3", Some("open")).await;
    rig.worker().faults().add(Fault::once(FaultKind::Cut(Place::Body(300))));
    assert!(!rig.send(&last(3)).await.complete);
    until_closed(rig.worker(), 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn opening_twice_is_one_session() {
    let rig = tagged().start().await;
    for _ in 0..3 {
        ask(&rig, "open", "s", Some("open")).await;
    }
    ask(&rig, "bye", "s", Some("close")).await;
    until_closed(rig.worker(), 1).await;
    let tags = tags(rig.worker());
    assert!(tags.iter().all(|tag| *tag == tags[0]), "{tags:?}");
    // The worker has the close before the gateway has its answer.
    until("nothing is held", async || rig.admin("/sessions").await.json()["counts"]["engine_sessions"] == 0).await;
    assert_eq!(closes(rig.worker()).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn closing_a_session_that_nobody_knows_is_an_ordinary_turn() {
    let rig = tagged().start().await;
    ask(&rig, "hello", "never opened", Some("close")).await;
    assert_eq!(tags(rig.worker()), [Value::Null]);
    rig.gateway().fleet.side.settle(std::time::Duration::from_secs(5)).await;
    assert!(closes(rig.worker()).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_with_the_same_session_id_share_nothing() {
    let rig = tagged().start().await;
    for key in ["Bearer alice", "Bearer bob", "Bearer alice"] {
        let request = turn("hello", "s", Some("open")).header("authorization", key);
        assert_eq!(rig.send(&request).await.status, 200);
    }
    let tags = tags(rig.worker());
    assert!(tags[0] == tags[2] && tags[0] != tags[1], "{tags:?}");
    // One closes hers; the other's stays open.
    rig.send(&turn("bye", "s", Some("close")).header("authorization", "Bearer alice")).await;
    until_closed(rig.worker(), 1).await;
    assert_eq!(closes(rig.worker()), [tags[0].clone()]);
    assert_eq!(rig.admin("/sessions").await.json()["counts"]["tag"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_session_expires_and_is_closed() {
    let rig = tagged().start().await;
    let mut body = chat_with("hello", control("s", Some("open")));
    body["nvext"]["session_control"]["timeout"] = json!(0.2);
    assert_eq!(rig.post(CHAT, &body).await.status, 200);
    until_closed(rig.worker(), 1).await;
    assert_eq!(closes(rig.worker()), tags(rig.worker()));
    let ended = [("mode", "tag"), ("cause", "expired")];
    assert_eq!(rig.metric("turnstile_sessions_ended_total", &ended).await, 1.0);
    assert_eq!(rig.admin("/sessions").await.json()["listed"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_idle_timeout_counts_from_the_end_of_a_turn() {
    let rig = tagged().start().await;
    rig.worker().hold().await;
    let mut body = chat_with("hello", control("s", Some("open")));
    body["nvext"]["session_control"]["timeout"] = json!(0.1);
    let mut connection = rig.begin(&Request::json(CHAT, &body)).await;
    until("the turn is on the worker", async || rig.worker().on(CHAT).len() == 1).await;
    // Several times the timeout, and more than one look for overdue sessions.
    tokio::time::sleep(std::time::Duration::from_millis(1200)).await;
    assert!(closes(rig.worker()).is_empty());
    assert_eq!(rig.admin("/sessions").await.json()["counts"]["tag"], 1);
    rig.worker().release().await;
    assert_eq!(connection.answer().await.status, 200);
    until_closed(rig.worker(), 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_of_a_dead_worker_is_bound_anew() {
    for action in ["bind", "open"] {
        let rig = tagged().workers(2).start().await;
        let first = worker_of(&ask(&rig, "one", "s", Some(action)).await);
        rig.worker_by_id(&first).die().await;
        let second = worker_of(&ask(&rig, "two", "s", None).await);
        assert_ne!(first, second);
        for _ in 0..3 {
            assert_eq!(worker_of(&ask(&rig, "three", "s", None).await), second, "{action}");
        }
        if action == "open" {
            let tags = tags(rig.worker_by_id(&second));
            assert!(tags[1].is_string() && tags.iter().skip(1).all(|tag| *tag == tags[1]), "{tags:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_without_tags_still_serves_an_open_session() {
    let rig = Setup::new().start().await;
    let answer = ask(&rig, "hello", "s", Some("open")).await;
    assert_eq!(answer.header("x-turnstile-session"), Some("affinity"));
    let note = rig.record_of(&answer).await["session_note"].clone();
    assert!(note.as_str().unwrap().contains("degraded"), "{note}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_close_is_tried_again_and_its_failure_is_nobodys_business() {
    let rig = tagged().start().await;
    rig.worker().faults().add(Fault::once(FaultKind::Status(500, None)).on("/close_session"));
    ask(&rig, "one", "s", Some("open")).await;
    ask(&rig, "two", "s", Some("close")).await;
    until_closed(rig.worker(), 2).await;
    let closes = closes(rig.worker());
    assert_eq!(closes[0], closes[1]);
    rig.until_metric("turnstile_side_requests_total", &[("kind", "close_session"), ("result", "ok")], 1.0).await;
    let retried = [("kind", "close_session"), ("result", "retried")];
    assert_eq!(rig.metric("turnstile_side_requests_total", &retried).await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_name_a_session_and_end_it() {
    let rig = tagged().start().await;
    let named = |request: Request| request.header("x-dynamo-session-id", "h").header("x-turnstile-explain", "1");
    let body = chat_with("one", json!({"session_control": {"session_id": "h", "action": "open"}}));
    assert_eq!(rig.send(&Request::json(CHAT, &body)).await.status, 200);
    let answer = rig.send(&named(Request::json(CHAT, &chat("two")))).await;
    assert_eq!(answer.header("x-turnstile-session"), Some("tag"));
    let last = named(Request::json(CHAT, &chat("three"))).header("x-dynamo-session-final", "true");
    assert_eq!(rig.send(&last).await.status, 200);
    until_closed(rig.worker(), 1).await;
    let tags = tags(rig.worker());
    assert_eq!(tags.iter().filter(|tag| **tag == tags[0]).count(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn responses_and_completions_carry_the_tag_too() {
    let rig = tagged().start().await;
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "Hello"})),
        ("/generate", json!({"text": "Hello"})),
        ("/v1/responses", json!({"input": "Hello"})),
    ] {
        let mut body = body;
        body["model"] = json!("sim");
        body["nvext"] = control(path, Some("open"));
        assert_eq!(rig.post(path, &body).await.status, 200, "{path}");
        assert!(rig.worker().on(path)[0].json()["session_id"].is_string(), "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_of_a_tagged_session_may_overlap() {
    let rig = tagged().start().await;
    ask(&rig, "open", "s", Some("open")).await;
    rig.worker().hold().await;
    let mut turns = Vec::new();
    for n in 0..3 {
        turns.push(rig.begin(&turn(&format!("turn {n}"), "s", None)).await);
    }
    until("all three run", async || rig.worker().on(CHAT).len() == 4).await;
    // The last turn closes, while the others still run: the close comes after all of them.
    turns.push(rig.begin(&turn("last", "s", Some("close"))).await);
    until("the last one runs", async || rig.worker().on(CHAT).len() == 5).await;
    assert!(closes(rig.worker()).is_empty());
    rig.worker().release().await;
    for mut connection in turns {
        assert_eq!(connection.answer().await.status, 200);
    }
    until_closed(rig.worker(), 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_closes_what_is_open() {
    let rig = tagged().sim(|c| c.enable_streaming_session = true).start().await;
    for id in ["a", "b"] {
        ask(&rig, "hello", id, Some("open")).await;
    }
    let generate = json!({"text": "Hello", "nvext": control("c", Some("open"))});
    assert_eq!(rig.post("/generate", &generate).await.status, 200);
    let mut open: Vec<String> = tags(rig.worker()).iter().map(|tag| tag.as_str().unwrap().to_owned()).collect();
    let stream = rig.worker().on("/generate")[0].json()["session_params"]["id"].clone();
    open.push(stream.as_str().unwrap().to_owned());
    let workers = rig.stop().await;
    let mut closed: Vec<String> = closes(&workers[0]).iter().map(|id| id.as_str().unwrap().to_owned()).collect();
    open.sort();
    closed.sort();
    assert_eq!(open, closed);
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_lets_streams_finish_and_refuses_new_turns() {
    let rig = tagged().start().await;
    rig.worker().hold().await;
    let mut body = chat_with("hello", control("s", Some("open")));
    body["stream"] = json!(true);
    let mut running = rig.begin(&Request::json(CHAT, &body)).await;
    let mut idle = rig.connect().await;
    idle.send(&Request::get("/live")).await;
    assert_eq!(idle.answer().await.status, 200);
    until("it runs", async || rig.worker().on(CHAT).len() == 1).await;
    let (addr, url) = (rig.addr(), rig.worker().addr());
    let stopping = tokio::spawn(rig.stop());
    until("no new connections", async || tokio::net::TcpStream::connect(addr).await.is_err()).await;
    let release = Request::json("/_sim/fault", &json!({"kind": "unwedge"}));
    turnstile_tests::harness::send(url, &release).await;
    let answer = running.answer().await;
    assert!(answer.complete && answer.events().last().unwrap() == "[DONE]");
    let workers = stopping.await.unwrap();
    assert_eq!(closes(&workers[0]), tags(&workers[0]));
}
