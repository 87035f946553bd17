//! The queue: who goes first when there is no room, who may wait, and for how long.

use serde_json::{Value, json};
use turnstile_tests::harness::{CHAT, Connection, Request, Rig, Setup, WorkerExt, chat, chat_with, until};

fn one_at_a_time() -> Setup {
    Setup::new().set("admission.max_in_flight_per_worker", "1")
}

/// Takes the only place with a turn that ends when the worker is released.
async fn occupy(rig: &Rig) -> Connection {
    rig.worker().hold().await;
    let first = rig.begin(&Request::json(CHAT, &chat("first"))).await;
    until("the place is taken", async || rig.in_flight() == 1).await;
    first
}

/// Sends turns one after the other, each when the one before waits.
async fn queue_up(rig: &Rig, turns: &[(&str, Value)]) -> Vec<Connection> {
    let mut waiting = Vec::new();
    for (text, hints) in turns {
        let body = chat_with(text, json!({"agent_hints": hints}));
        waiting.push(rig.begin(&Request::json(CHAT, &body)).await);
        rig.until_queued(waiting.len()).await;
    }
    waiting
}

/// The order in which the worker got the turns.
fn order(rig: &Rig) -> Vec<String> {
    let text = |body: Value| body["messages"][0]["content"].as_str().unwrap().to_owned();
    rig.worker().on(CHAT).iter().map(|request| text(request.json())).collect()
}

async fn order_of(turns: &[(&str, Value)]) -> Vec<String> {
    let rig = one_at_a_time().start().await;
    let first = occupy(&rig).await;
    let waiting = queue_up(&rig, turns).await;
    assert_eq!(order(&rig), ["first"]);
    rig.worker().release().await;
    for mut connection in std::iter::once(first).chain(waiting) {
        assert_eq!(connection.answer().await.status, 200);
    }
    order(&rig).split_off(1)
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_of_equal_rank_go_in_order_of_arrival() {
    let turns = ["a", "b", "c", "d"].map(|text| (text, json!({})));
    assert_eq!(order_of(&turns).await, ["a", "b", "c", "d"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_higher_tier_goes_first_whatever_its_priority() {
    let turns = [
        ("urgent", json!({"priority": 1000})),
        ("tier 1", json!({"strict_priority": 1, "priority": -1000})),
        ("tier 3", json!({"strict_priority": 3})),
        ("tier 2", json!({"strict_priority": 2})),
    ];
    assert_eq!(order_of(&turns).await, ["tier 3", "tier 2", "tier 1", "urgent"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_priority_is_a_head_start_and_a_negative_one_a_setback() {
    let turns = [
        ("late", json!({"priority": -20})),
        ("plain", json!({})),
        ("ten", json!({"priority": 10})),
        ("sensitive", json!({"latency_sensitivity": 30})),
        ("twenty", json!({"priority": 20})),
    ];
    assert_eq!(order_of(&turns).await, ["sensitive", "twenty", "ten", "plain", "late"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_of_priority_10_overtakes_those_that_wait() {
    let turns = [("a", json!({})), ("b", json!({})), ("ten", json!({"priority": 10}))];
    assert_eq!(order_of(&turns).await, ["ten", "a", "b"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_the_queue_is_taken_out_of_it() {
    let rig = one_at_a_time().start().await;
    let mut first = occupy(&rig).await;
    let mut waiting = queue_up(&rig, &[("stays", json!({})), ("leaves", json!({"priority": 10}))]).await;
    drop(waiting.pop());
    rig.until_queued(1).await;
    rig.worker().release().await;
    assert_eq!(first.answer().await.status, 200);
    assert_eq!(waiting.pop().unwrap().answer().await.status, 200);
    assert_eq!(order(&rig), ["first", "stays"]);
    rig.until_metric("turnstile_queue_left_total", &[("result", "client_gone")], 1.0).await;
    rig.until_metric("turnstile_queue_left_total", &[("result", "dispatched")], 1.0).await;
    assert_eq!(rig.metric("turnstile_queue_left_total", &[]).await, 2.0);
    assert_eq!(rig.metric("turnstile_queue_depth", &[]).await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_refuses_with_a_time_to_come_back() {
    let rig = one_at_a_time().set("admission.max_queue", "1").start().await;
    let _first = occupy(&rig).await;
    let _waiting = queue_up(&rig, &[("waits", json!({}))]).await;
    let refused = rig.post(CHAT, &chat("refused")).await;
    assert_eq!((refused.status, &refused.error()["code"]), (503, &json!("queue_full")));
    assert!(refused.header("retry-after").unwrap().parse::<u32>().unwrap() >= 1);
    let anthropic = json!({"model": "sim", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]});
    let refused = rig.post("/v1/messages", &anthropic).await;
    assert_eq!((refused.status, &refused.json()["error"]["type"]), (503, &json!("overloaded_error")));
    assert_eq!(rig.metric("turnstile_queue_left_total", &[("result", "full")]).await, 2.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_for_overload_can_be_429() {
    let rig = one_at_a_time().set("admission.max_queue", "0").set("admission.overload_status", "429").start().await;
    let _first = occupy(&rig).await;
    let refused = rig.post(CHAT, &chat("refused")).await;
    assert_eq!(refused.status, 429);
    assert!(refused.header("retry-after").is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_queue_is_bounded_in_bytes_too() {
    let rig = one_at_a_time().set("admission.max_queue_bytes", "\"4KiB\"").start().await;
    let _first = occupy(&rig).await;
    let _waiting = queue_up(&rig, &[(&"a".repeat(3000), json!({}))]).await;
    assert_eq!(rig.post(CHAT, &chat(&"b".repeat(3000))).await.status, 503);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_waits_too_long_is_refused_and_never_sent() {
    let rig = one_at_a_time().set("admission.max_wait_ms", "50").start().await;
    let mut first = occupy(&rig).await;
    let expired = rig.post(CHAT, &chat("expires")).await;
    assert_eq!((expired.status, &expired.error()["code"]), (503, &json!("queue_timeout")));
    assert!(expired.header("retry-after").is_some());
    rig.worker().release().await;
    assert_eq!(first.answer().await.status, 200);
    rig.idle().await;
    assert_eq!(order(&rig), ["first"]);
    assert_eq!(rig.metric("turnstile_queue_left_total", &[("result", "expired")]).await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_wait_is_told_in_log_and_headers() {
    let rig = one_at_a_time().start().await;
    let mut first = occupy(&rig).await;
    let request = Request::json(CHAT, &chat("waits")).header("x-turnstile-explain", "1");
    let mut second = rig.begin(&request).await;
    rig.until_queued(1).await;
    // Long enough to be seen in whole milliseconds.
    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    rig.worker().release().await;
    first.answer().await;
    let answer = second.answer().await;
    let told: u64 = answer.header("x-turnstile-queue-wait-ms").unwrap().parse().unwrap();
    assert!(told >= 20, "{told}");
    assert_eq!(rig.record_of(&answer).await["queue_ms"], told);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_queue_engages_at_what_the_workers_report() {
    let rig = Setup::new().sim(|c| c.max_running_requests = 1).workers(2).start().await;
    for worker in &rig.workers {
        worker.hold().await;
    }
    let mut running = Vec::new();
    for text in ["one", "two"] {
        running.push(rig.begin(&Request::json(CHAT, &chat(text))).await);
        until("it runs", async || rig.in_flight() as usize == running.len()).await;
    }
    until("one on each", async || rig.workers.iter().all(|worker| worker.turns().len() == 1)).await;
    running.push(rig.begin(&Request::json(CHAT, &chat("three"))).await);
    rig.until_queued(1).await;
    rig.workers[1].release().await;
    rig.until_queued(0).await;
    until("the freed place is used", async || rig.workers[1].turns().len() == 2).await;
    rig.workers[0].release().await;
    for mut connection in running {
        assert_eq!(connection.answer().await.status, 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_pool_does_not_hold_up_another() {
    let rig = one_at_a_time()
        .workers(2)
        .pool("one", "models = [\"alpha\"]", &[0])
        .pool("two", "models = [\"beta\"]", &[1])
        .start()
        .await;
    rig.workers[0].hold().await;
    let ask = |model: &str| {
        let mut body = chat("Hello");
        body["model"] = json!(model);
        Request::json(CHAT, &body)
    };
    let mut held = vec![rig.begin(&ask("alpha")).await];
    until("the place is taken", async || rig.in_flight() == 1).await;
    held.push(rig.begin(&ask("alpha")).await);
    rig.until_queued(1).await;
    assert_eq!(rig.send(&ask("beta")).await.status, 200);
    rig.workers[0].release().await;
    for mut connection in held {
        assert_eq!(connection.answer().await.status, 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_turns_through_one_place_are_all_served() {
    let rig = one_at_a_time().start().await;
    let answers = futures::future::join_all((0..100).map(|n| {
        let body = chat_with(&format!("turn {n}"), json!({"agent_hints": {"priority": n % 7}}));
        let rig = &rig;
        async move { rig.post(CHAT, &body).await.status }
    }))
    .await;
    assert!(answers.iter().all(|status| *status == 200), "{answers:?}");
    assert_eq!(rig.worker().on(CHAT).len(), 100);
    rig.idle().await;
}
