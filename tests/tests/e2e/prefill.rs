//! Speculative prefill: the next turn is warmed where this one ran, and never in its way.

use serde_json::{Value, json};
use turnstile_sim::{Fault, FaultKind, Place, Recorded, SimConfig, SimWorker};
use turnstile_tests::harness::{Answer, CHAT, Request, Rig, Setup, WorkerExt, send, until};

fn thinking(config: &mut SimConfig) {
    config.enable_session_radix_cache = true;
    config.reasoning = true;
}

fn setup() -> Setup {
    // A load report from the moment at which a turn itself was waiting must not decide here.
    Setup::new().sim(thinking).set("prefill.skip_when_waiting", "1000")
}

/// A turn of a session that asks for a prefill.
fn turn(session: &str, messages: &Value) -> Value {
    json!({
        "model": "sim", "messages": messages, "max_tokens": 400,
        "nvext": {
            "agent_hints": {"speculative_prefill": true},
            "session_control": {"session_id": session, "action": "open"},
        },
    })
}

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

fn prefills(worker: &SimWorker) -> Vec<Recorded> {
    worker.on(CHAT).into_iter().filter(|request| request.json()["max_tokens"] == 1).collect()
}

async fn until_done(rig: &Rig, result: &str, count: f64) {
    rig.until_metric("turnstile_side_requests_total", &[("kind", "prefill"), ("result", result)], count).await;
}

async fn ask(rig: &Rig, body: &Value) -> Answer {
    let answer = rig.explain(CHAT, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer
}

/// The prefill that one finished turn caused, checked for what all prefills have in common.
async fn one_prefill(rig: &Rig, answer: &Answer) -> Value {
    until_done(rig, "ok", 1.0).await;
    let worker = rig.worker_by_id(answer.header("x-turnstile-worker").unwrap());
    let all: usize = rig.workers.iter().map(|worker| prefills(worker).len()).sum();
    assert_eq!((all, prefills(worker).len()), (1, 1), "one, and to the worker of the turn");
    let (turn, prefill) = (worker.on(CHAT)[0].json(), prefills(worker)[0].json());
    assert_eq!((&prefill["stream"], &prefill["priority"]), (&json!(false), &json!(-100)));
    assert!(prefill["session_id"].is_string() && prefill["session_id"] == turn["session_id"]);
    assert_eq!(prefill["model"], turn["model"]);
    assert!(prefill.get("nvext").is_none() && prefill["rid"] != turn["rid"]);
    assert_eq!(rig.record_of(answer).await["prefill"], "sent");
    prefill["messages"].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_finished_stream_is_followed_by_a_prefill_of_the_next_turn() {
    let rig = setup().workers(2).start().await;
    let mut body = turn("s", &user("Hello [[sim:text=It works.]]"));
    body["stream"] = json!(true);
    let messages = one_prefill(&rig, &ask(&rig, &body).await).await;
    assert_eq!(messages[0], body["messages"][0]);
    assert_eq!(messages[1]["role"], "assistant");
    assert!(messages[1]["content"].as_str().unwrap().trim() == "It works.", "{messages}");
    assert_eq!(messages[2], json!({"role": "user", "content": ""}));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_whole_answer_is_followed_by_one_too() {
    let rig = setup().workers(2).start().await;
    let body = turn("s", &user("Hello [[sim:text=It works.]]"));
    let messages = one_prefill(&rig, &ask(&rig, &body).await).await;
    assert!(messages[1]["content"].as_str().unwrap().trim() == "It works.", "{messages}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_calls_tools_is_warmed_up_to_their_results() {
    for stream in [true, false] {
        let rig = setup().start().await;
        let mut body = turn("s", &user("Hello [[sim:tool=read {\"path\":\"a\"}]] [[sim:tool=list {}]]"));
        body["stream"] = json!(stream);
        body["tools"] = json!([
            {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}},
            {"type": "function", "function": {"name": "list", "parameters": {"type": "object"}}},
        ]);
        let messages = one_prefill(&rig, &ask(&rig, &body).await).await;
        let calls = messages[1]["tool_calls"].as_array().unwrap();
        let named: Vec<_> = calls.iter().map(|call| call["function"]["name"].as_str().unwrap()).collect();
        assert_eq!(named, ["read", "list"], "{messages}");
        let arguments: Value = serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
        assert_eq!(arguments, json!({"path": "a"}));
        for (result, call) in messages.as_array().unwrap().iter().skip(2).zip(calls) {
            assert_eq!((&result["role"], &result["tool_call_id"]), (&json!("tool"), &call["id"]));
        }
        assert_eq!(messages.as_array().unwrap().len(), 4);
        assert!(prefills(rig.worker())[0].json()["tools"].is_array());
    }
}

/// Cached tokens of the second turn of a conversation.
async fn cached_in_second_turn(prefill: bool) -> u64 {
    let rig = setup().start().await;
    let mut first = turn("s", &user("Please summarise the parser. [[sim:tokens=200]]"));
    first["nvext"]["agent_hints"]["speculative_prefill"] = json!(prefill);
    let answer = ask(&rig, &first).await.json();
    if prefill {
        until_done(&rig, "ok", 1.0).await;
    }
    let mut messages = first["messages"].clone();
    let list = messages.as_array_mut().unwrap();
    list.push(json!({"role": "assistant", "content": answer["choices"][0]["message"]["content"]}));
    list.push(json!({"role": "user", "content": "And the lexer?"}));
    let second = ask(&rig, &turn("s", &messages)).await;
    second.header("x-turnstile-cached-tokens").unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_turn_finds_more_in_the_cache_than_without() {
    let (with, without) = (cached_in_second_turn(true).await, cached_in_second_turn(false).await);
    assert!(with >= without + 150, "{with} with, {without} without");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_hint_there_is_none() {
    let rig = setup().start().await;
    let mut body = turn("s", &user("Hello"));
    body["nvext"]["agent_hints"] = json!({});
    let answer = ask(&rig, &body).await;
    assert!(rig.record_of(&answer).await.get("prefill").is_none());
    rig.idle().await;
    assert_eq!(rig.worker().on(CHAT).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn switched_off_the_hint_does_nothing() {
    let rig = setup().set("prefill.enabled", "false").start().await;
    ask(&rig, &turn("s", &user("Hello"))).await;
    rig.gateway().fleet.side.settle(std::time::Duration::from_secs(5)).await;
    assert_eq!(rig.worker().on(CHAT).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_aborted_turn_is_not_followed_by_one() {
    let rig = setup().sim(|c| c.speed = 1.0).start().await;
    let mut body = turn("s", &user("[[sim:tokens=20000]]"));
    body["stream"] = json!(true);
    body["max_tokens"] = json!(20_000);
    let mut connection = rig.begin(&Request::json(CHAT, &body).header("x-request-id", "left")).await;
    connection.head().await;
    assert!(connection.piece().await.is_some());
    drop(connection);
    assert!(rig.record("left").await.get("prefill").is_none());
    rig.idle().await;
    rig.gateway().fleet.side.settle(std::time::Duration::from_secs(5)).await;
    assert!(prefills(rig.worker()).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_broke_off_is_not_followed_by_one() {
    let rig = setup().start().await;
    rig.worker().faults().add(Fault::once(FaultKind::Cut(Place::Body(700))));
    let mut body = turn("s", &user("Hello"));
    body["stream"] = json!(true);
    let answer = rig.post(CHAT, &body).await;
    assert!(!answer.complete);
    rig.gateway().fleet.side.settle(std::time::Duration::from_secs(5)).await;
    assert!(prefills(rig.worker()).is_empty());
}

/// Serves a turn whose prefill then hangs on the worker.
async fn turn_with_hanging_prefill(rig: &Rig, session: &str) -> Answer {
    rig.worker().hold().await;
    let before = rig.worker().on(CHAT).len();
    let request = Request::json(CHAT, &turn(session, &user("Hello")));
    let mut connection = rig.begin(&request).await;
    until("the turn is there", async || rig.worker().on(CHAT).len() == before + 1).await;
    rig.worker().faults().add(Fault::once(FaultKind::Hang).on(CHAT));
    rig.worker().release().await;
    let answer = connection.answer().await;
    assert_eq!(answer.status, 200);
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn the_real_turn_cancels_a_prefill_that_still_runs() {
    let rig = setup().start().await;
    turn_with_hanging_prefill(&rig, "s").await;
    until("the prefill is there", async || prefills(rig.worker()).len() == 1).await;
    let mut body = turn("s", &user("Hello again"));
    body["nvext"]["agent_hints"] = json!({});
    ask(&rig, &body).await;
    until_done(&rig, "cancelled", 1.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_has_a_budget_for_prefills() {
    let rig = setup().start().await;
    turn_with_hanging_prefill(&rig, "one").await;
    until("the prefill is there", async || prefills(rig.worker()).len() == 1).await;
    let second = ask(&rig, &turn("two", &user("Hello"))).await;
    assert_eq!(rig.record_of(&second).await["prefill"], "skipped: worker budget");
    assert_eq!(prefills(rig.worker()).len(), 1);
    assert_eq!(rig.metric("turnstile_side_requests_total", &[("kind", "prefill"), ("result", "skipped")]).await, 1.0);
    // The place is free again once the first is cancelled.
    let mut body = turn("one", &user("Hello again"));
    body["nvext"]["agent_hints"] = json!({});
    ask(&rig, &body).await;
    until_done(&rig, "cancelled", 1.0).await;
    ask(&rig, &turn("two", &user("Once more"))).await;
    until_done(&rig, "ok", 1.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_prefill_is_sent_while_turns_wait() {
    let rig = setup().set("admission.max_in_flight_per_worker", "1").start().await;
    rig.worker().hold().await;
    let mut first = rig.begin(&Request::json(CHAT, &turn("one", &user("Hello")))).await;
    until("it runs", async || rig.in_flight() == 1).await;
    let mut others = Vec::new();
    for n in 0..3 {
        let mut body = turn(&format!("s{n}"), &user("Hello"));
        body["nvext"]["agent_hints"] = json!({});
        others.push(rig.begin(&Request::json(CHAT, &body)).await);
    }
    rig.until_queued(3).await;
    rig.worker().release().await;
    let answer = first.answer().await;
    assert_eq!(rig.record_of(&answer).await["prefill"], "skipped: load");
    for mut connection in others {
        assert_eq!(connection.answer().await.status, 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_that_fails_is_nobodys_business() {
    let rig = setup().start().await;
    rig.worker().hold().await;
    let mut connection = rig.begin(&Request::json(CHAT, &turn("s", &user("Hello")))).await;
    until("the turn is there", async || rig.worker().on(CHAT).len() == 1).await;
    rig.worker().faults().add(Fault::once(FaultKind::Status(500, None)).on(CHAT));
    rig.worker().release().await;
    assert_eq!(connection.answer().await.status, 200);
    until_done(&rig, "failed", 1.0).await;
    ask(&rig, &turn("s", &user("Hello again"))).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_closing_turn_of_a_session_is_not_followed_by_one() {
    let rig = setup().start().await;
    ask(&rig, &turn("s", &user("Hello"))).await;
    until_done(&rig, "ok", 1.0).await;
    let mut body = turn("s", &user("Bye"));
    body["nvext"]["session_control"]["action"] = json!("close");
    ask(&rig, &body).await;
    until("the close", async || rig.worker().on("/close_session").len() == 1).await;
    assert_eq!(prefills(rig.worker()).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_next_turn_that_is_here_already_is_not_warmed() {
    let rig = setup().start().await;
    ask(&rig, &turn("s", &user("Hello"))).await;
    until_done(&rig, "ok", 1.0).await;
    rig.worker().hold().await;
    let mut both = Vec::new();
    for n in 0..2 {
        both.push(rig.begin(&Request::json(CHAT, &turn("s", &user(&format!("Hello {n}"))))).await);
    }
    until("both are there", async || rig.worker().on(CHAT).len() == 4).await;
    rig.worker().release().await;
    let mut told = Vec::new();
    for mut connection in both {
        let answer = connection.answer().await;
        told.push(rig.record_of(&answer).await["prefill"].as_str().unwrap().to_owned());
    }
    told.sort();
    // Both end in one step of the engine, so the first may be gone when the second looks; the first sees the second.
    assert!(told.iter().any(|told| told == "skipped: the next turn is here"), "{told:?}");
    assert!(prefills(rig.worker()).len() <= 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_the_engine_aborted_is_not_followed_by_one() {
    let rig = setup().sim(|c| c.speed = 1.0).start().await;
    let mut body = turn("s", &user("[[sim:tokens=20000]]"));
    body["stream"] = json!(true);
    body["max_tokens"] = json!(20_000);
    let mut connection = rig.begin(&Request::json(CHAT, &body)).await;
    connection.head().await;
    assert!(connection.piece().await.is_some());
    let rid = rig.worker().on(CHAT)[0].json()["rid"].clone();
    send(rig.worker().addr(), &Request::json("/abort_request", &json!({"rid": rid}))).await;
    let (rest, complete) = connection.rest().await;
    assert!(complete && String::from_utf8_lossy(&rest).contains("\"abort\""));
    rig.idle().await;
    rig.gateway().fleet.side.settle(std::time::Duration::from_secs(5)).await;
    assert!(prefills(rig.worker()).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_ran_into_its_limit_is_followed_by_one() {
    let rig = setup().start().await;
    let mut body = turn("s", &user("[[sim:tokens=200]]"));
    body["max_tokens"] = json!(20);
    let answer = ask(&rig, &body).await;
    assert_eq!(answer.json()["choices"][0]["finish_reason"], "length");
    until_done(&rig, "ok", 1.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_of_ours_that_wait_for_an_answer_are_load_before_any_report_says_so() {
    // Load reports come so seldom that none falls into the test.
    let rig = Setup::new()
        .sim(thinking)
        .set("prefill.skip_when_waiting", "1")
        .set("routing.load_interval_ms", "3600000")
        .start()
        .await;
    rig.worker().faults().add(Fault::once(FaultKind::Hang).on(CHAT));
    let hanging = rig.begin(&Request::json(CHAT, &turn("other", &user("Hello")))).await;
    until("it is there", async || rig.worker().on(CHAT).len() == 1).await;
    let answer = ask(&rig, &turn("s", &user("Hello"))).await;
    assert_eq!(rig.record_of(&answer).await["prefill"], "skipped: load");
    drop(hanging);
    until("it is gone", async || rig.in_flight() == 0).await;
    let answer = ask(&rig, &turn("s", &user("Hello again"))).await;
    assert_eq!(rig.record_of(&answer).await["prefill"], "sent");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_prefill_was_good_for_is_counted_by_the_next_turn() {
    let rig = setup().start().await;
    let first = turn("s", &user("Please summarise the parser. [[sim:tokens=200]]"));
    let answer = ask(&rig, &first).await.json();
    until_done(&rig, "ok", 1.0).await;
    let mut messages = first["messages"].clone();
    let list = messages.as_array_mut().unwrap();
    list.push(json!({"role": "assistant", "content": answer["choices"][0]["message"]["content"]}));
    list.push(json!({"role": "user", "content": "And the lexer?"}));
    let mut second = turn("s", &messages);
    second["nvext"]["agent_hints"] = json!({});
    ask(&rig, &second).await;
    assert_eq!(rig.metric("turnstile_prefill_outcomes_total", &[("outcome", "used")]).await, 1.0);
    assert!(rig.metric("turnstile_prefill_used_tokens_total", &[]).await > 100.0);
    // Cancelled ones count as such.
    turn_with_hanging_prefill(&rig, "other").await;
    until("the prefill is there", async || prefills(rig.worker()).len() == 2).await;
    let mut next = turn("other", &user("Hello again"));
    next["nvext"]["agent_hints"] = json!({});
    ask(&rig, &next).await;
    rig.until_metric("turnstile_prefill_outcomes_total", &[("outcome", "cancelled")], 1.0).await;
}
