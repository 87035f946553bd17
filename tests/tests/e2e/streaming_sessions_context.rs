//! What a client that sends only what is new is told of its context, who waits for whom, and where its turns run.

use crate::higress::probe;
use serde_json::{Value, json};
use turnstile_sim::{Fault, FaultKind, Place, SimConfig};
use turnstile_tests::harness::{
    Answer, CHAT, PluginText, Request, Rig, Setup, WorkerExt, built_in, chat_with, logs, send, until,
};

const GENERATE: &str = "/generate";
const NOTE: &str = "x-turnstile-session-note";

fn streaming(config: &mut SimConfig) {
    config.enable_streaming_session = true;
    config.crash_mode = true;
}

fn setup() -> Setup {
    Setup::new().sim(streaming)
}

fn body(session: &str, text: &str, action: Option<&str>) -> Value {
    let mut control = json!({"session_id": session});
    if let Some(action) = action {
        control["action"] = json!(action);
    }
    json!({
        "text": text, "sampling_params": {"max_new_tokens": 8, "ignore_eos": true},
        "nvext": {"session_control": control},
    })
}

fn turn(session: &str, text: &str, action: Option<&str>) -> Request {
    Request::json(GENERATE, &body(session, text, action)).header("x-turnstile-explain", "1")
}

fn long_turn(session: &str) -> Request {
    let mut body = body(session, " at length", None);
    body["stream"] = json!(true);
    body["sampling_params"]["max_new_tokens"] = json!(20_000);
    Request::json(GENERATE, &body)
}

async fn ask(rig: &Rig, session: &str, text: &str, action: Option<&str>) -> Answer {
    let answer = rig.send(&turn(session, text, action)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    // A turn beside the engine session that ends while the next one runs makes a gap of its own.
    rig.settled().await;
    answer
}

fn note(answer: &Answer) -> &str {
    answer.header(NOTE).unwrap_or("")
}

fn context(answer: &Answer) -> u64 {
    answer.json()["meta_info"]["prompt_tokens"].as_u64().unwrap()
}

async fn cut_a_turn(rig: &Rig, session: &str, request_id: &str) {
    let mut cut = rig.begin(&long_turn(session).header("x-request-id", request_id)).await;
    cut.head().await;
    assert!(cut.piece().await.is_some());
}

// === what the client is told ===

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_goes_on_is_told_nothing_but_where_its_context_begins() {
    let rig = setup().start().await;
    assert!(note(&ask(&rig, "s", "one", Some("open")).await).starts_with("context begins"));
    for action in [None, Some("open"), Some("bind"), None, Some("close")] {
        assert_eq!(note(&ask(&rig, "s", " more", action).await), "", "{action:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_could_not_be_opened_is_told_on_every_turn() {
    let rig = setup().start().await;
    rig.worker().faults().add(Fault::once(FaultKind::Status(400, None)).on("/open_session"));
    let first = ask(&rig, "s", "one", Some("open")).await;
    assert!(note(&first).starts_with("degraded: open_failed"), "{}", note(&first));
    for _ in 0..2 {
        let later = ask(&rig, "s", " more", None).await;
        assert!(note(&later).starts_with("no context is kept"), "{}", note(&later));
    }
    // Opened at last: the turns before are not in it.
    let opened = ask(&rig, "s", " again", Some("open")).await;
    assert!(note(&opened).starts_with("context lost"), "{}", note(&opened));
    assert_eq!(note(&ask(&rig, "s", " and on", None).await), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_over_the_cap_of_rows_is_told_on_every_turn() {
    let rig = setup().sim(|c| c.max_running_requests = 2).start().await;
    ask(&rig, "first", "one", Some("open")).await;
    let second = ask(&rig, "second", "one", Some("open")).await;
    assert!(note(&second).starts_with("degraded: rows"), "{}", note(&second));
    let later = ask(&rig, "second", " more", None).await;
    assert!(note(&later).starts_with("no context is kept"), "{}", note(&later));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_on_a_worker_without_streaming_sessions_is_told_on_every_turn() {
    for (tags, mode) in [(true, "tag"), (false, "affinity")] {
        let rig = Setup::new().sim(|c| c.enable_session_radix_cache = tags).start().await;
        for action in [Some("open"), None, None] {
            let answer = ask(&rig, "s", "one", action).await;
            assert!(note(&answer).contains(&format!("is {mode} only")), "{action:?}: {}", note(&answer));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_expired_or_never_was_is_told() {
    let rig = setup().start().await;
    let never = ask(&rig, "never opened", "one", None).await;
    assert!(note(&never).starts_with("no context is kept"), "{}", note(&never));
    let mut first = body("s", "one", Some("open"));
    first["nvext"]["session_control"]["timeout"] = json!(0.1);
    assert_eq!(rig.post(GENERATE, &first).await.status, 200);
    until("it expired", async || !rig.worker().on("/close_session").is_empty()).await;
    for action in [None, Some("close")] {
        let late = ask(&rig, "s", " two", action).await;
        assert!(note(&late).starts_with("no context is kept"), "{action:?}: {}", note(&late));
    }
    let anew = ask(&rig, "s", "one", Some("open")).await;
    assert!(note(&anew).starts_with("context"), "{}", note(&anew));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_turn_after_a_cut_one_is_told_that_its_context_may_lack_it() {
    let rig = setup().sim(|c| c.speed = 1.0).start().await;
    let first = context(&ask(&rig, "s", "one", Some("open")).await);
    cut_a_turn(&rig, "s", "cut").await;
    let next = ask(&rig, "s", " two", None).await;
    assert!(note(&next).starts_with("context incomplete"), "{}", note(&next));
    assert!(context(&next) < first + 40, "the cut turn is not in it");
    assert_eq!(note(&ask(&rig, "s", " three", None).await), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_turn_after_one_that_a_filter_ended_is_told_that_its_context_is_lost() {
    let ends =
        "on response_headers\n  get_header_map_value request_headers x-short\n  if $status == 0\n    return 2\n  end\n";
    logs();
    let all: Vec<PluginText> = std::iter::once(probe("ends", ends)).chain(built_in()).collect();
    let rig = setup().plugins(&all).start().await;
    ask(&rig, "s", "one", Some("open")).await;
    let short = rig.send(&long_turn("s").header("x-short", "1")).await;
    assert_eq!((short.status, short.complete, short.body.len()), (200, true, 0));
    let next = ask(&rig, "s", " three", None).await;
    assert!(note(&next).starts_with("context lost") || note(&next).starts_with("no context"), "{}", note(&next));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_loss_is_told_by_the_turn_that_is_answered_not_by_the_one_that_finds_it() {
    let rig = setup().set("retry.attempts", "2").start().await;
    ask(&rig, "s", "one", Some("open")).await;
    let id = rig.worker().on(GENERATE)[0].json()["session_params"]["id"].clone();
    send(rig.worker().addr(), &Request::json("/close_session", &json!({"session_id": id}))).await;
    // The turn finds out, opens anew, and is then refused.
    rig.worker().faults().add(Fault::once(FaultKind::Status(400, None)).on("/open_session"));
    ask(&rig, "s", " two", None).await;
    let told = ask(&rig, "s", " three", None).await;
    assert_ne!(note(&told), "");
    let opened = ask(&rig, "s", " four", Some("open")).await;
    assert!(note(&opened).starts_with("context lost"), "{}", note(&opened));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_whose_connection_broke_is_not_put_twice_into_one_context() {
    let rig = setup().workers(2).start().await;
    let first = ask(&rig, "s", "one", Some("open")).await;
    let worker = rig.worker_by_id(first.header("x-turnstile-worker").unwrap());
    worker.faults().add(Fault::once(FaultKind::Cut(Place::Head)).on(GENERATE));
    let answer = ask(&rig, "s", " two", None).await;
    // The engine may have finished it, so it goes to a new engine session.
    assert_ne!(answer.header("x-turnstile-worker"), first.header("x-turnstile-worker"));
    assert!(note(&answer).starts_with("context lost"), "{}", note(&answer));
    let old = worker.on(GENERATE)[0].json()["session_params"]["id"].clone();
    until("the old one is closed", async || {
        worker.on("/close_session").iter().any(|close| close.json()["session_id"] == old)
    })
    .await;
    assert!(worker.is_alive());
}

#[tokio::test(flavor = "multi_thread")]
async fn chat_clients_send_everything_and_are_told_nothing() {
    let rig = Setup::new().sim(|c| c.enable_session_radix_cache = true).start().await;
    for action in ["open", "bind", "close", "close"] {
        let nvext = json!({"session_control": {"session_id": "s", "action": action}});
        assert_eq!(rig.post(CHAT, &chat_with("hello", nvext)).await.header(NOTE), None, "{action}");
    }
}

// === who waits for whom ===

#[tokio::test(flavor = "multi_thread")]
async fn where_busy_turns_are_refused_a_turn_after_ones_own_cut_turn_is_not() {
    let rig = setup().sim(|c| c.speed = 1.0).set("sessions.busy", "\"refuse\"").start().await;
    ask(&rig, "s", "one", Some("open")).await;
    for n in 0..3 {
        let cut = format!("cut-{n}");
        cut_a_turn(&rig, "s", &cut).await;
        let over = rig.access_log().iter().any(|line| line["request_id"] == *cut);
        let next = rig.send(&turn("s", " two", None)).await;
        if next.status == 409 && !over {
            // The gateway had not seen yet that the client left: for it the turn went on.
            rig.record(&cut).await;
            ask(&rig, "s", " two", None).await;
            continue;
        }
        assert_eq!(next.status, 200, "{}", next.text());
        rig.settled().await;
    }
    assert!(rig.worker().is_alive());
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_that_wait_go_in_order_of_arrival() {
    let rig = setup().start().await;
    ask(&rig, "s", "first", Some("open")).await;
    rig.worker().hold().await;
    let mut turns = vec![rig.begin(&turn("s", " running", None)).await];
    until("it runs", async || rig.worker().on(GENERATE).len() == 2).await;
    for n in 0..6 {
        turns.push(rig.begin(&turn("s", &format!(" {n}"), None)).await);
        until("it waits", async || rig.gateway().fleet.sessions.counts().waiting == n + 1).await;
    }
    // One of them loses patience: those behind move up.
    drop(turns.remove(3));
    until("it is gone", async || rig.gateway().fleet.sessions.counts().waiting == 5).await;
    rig.worker().release().await;
    for mut connection in turns {
        assert_eq!(connection.answer().await.status, 200);
    }
    let texts: Vec<Value> = rig.worker().on(GENERATE).iter().map(|r| r.json()["text"].clone()).collect();
    assert_eq!(texts, ["first", " running", " 0", " 1", " 3", " 4", " 5"]);
    assert_eq!(rig.gateway().fleet.sessions.counts().waiting, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_the_engine_refuses_for_another_one_waits_and_the_worker_lives() {
    let rig = setup().sim(|c| c.speed = 20.0).start().await;
    ask(&rig, "s", "one", Some("open")).await;
    let id = rig.worker().on(GENERATE)[0].json()["session_params"]["id"].clone();
    // A turn that is over for the gateway and not for the engine.
    let stuck = json!({
        "text": " stuck", "stream": true, "session_params": {"id": id},
        "sampling_params": {"max_new_tokens": 8_000, "ignore_eos": true},
    });
    let worker = rig.worker().addr();
    let stuck = tokio::spawn(async move { send(worker, &Request::json(GENERATE, &stuck)).await.status });
    until("it runs", async || rig.worker().engine_requests() == 1).await;
    // Refused once; the next one at once, or a close, would end the server.
    let answer = ask(&rig, "s", " two", None).await;
    assert!(rig.worker().is_alive());
    assert_eq!(stuck.await.unwrap(), 200);
    assert!(rig.record_of(&answer).await["session_wait_ms"].as_u64().unwrap() > 0);
    ask(&rig, "s", " three", Some("close")).await;
    until("closed", async || !rig.worker().on("/close_session").is_empty()).await;
    assert!(rig.worker().is_alive());
}

// === where turns run ===

#[tokio::test(flavor = "multi_thread")]
async fn with_data_parallel_ranks_a_session_stays_on_one_and_sessions_are_spread() {
    let rig = setup().sim(|c| c.dp_size = 2).start().await;
    for n in 0..4 {
        ask(&rig, &format!("s{n}"), "The first words of it.", Some("open")).await;
    }
    for round in 0..3 {
        for n in 0..4 {
            let answer = ask(&rig, &format!("s{n}"), " and more", None).await;
            assert_eq!(note(&answer), "");
            assert!(context(&answer) > 10 + 8 * round, "it goes on from its own context: {}", answer.text());
        }
    }
    let mut ranks: std::collections::BTreeMap<String, Vec<Value>> = Default::default();
    for request in rig.worker().on(GENERATE) {
        let body = request.json();
        let id = body["session_params"]["id"].as_str().unwrap().to_owned();
        ranks.entry(id).or_default().push(body["routed_dp_rank"].clone());
    }
    assert_eq!(ranks.len(), 4);
    assert!(ranks.values().all(|ranks| ranks.len() == 4 && ranks.iter().all(|rank| *rank == ranks[0])), "{ranks:?}");
    let first: std::collections::BTreeSet<u64> = ranks.values().map(|ranks| ranks[0].as_u64().unwrap()).collect();
    assert_eq!(first, [0, 1].into(), "both ranks are used");
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_that_streaming_sessions_hold_are_capped_and_who_makes_room_is_told() {
    let rig = setup().sim(|c| c.max_total_tokens = 8_000).start().await;
    let text = "some words that fill the cache ".repeat(250);
    let one = context(&ask(&rig, "a", &text, Some("open")).await);
    for n in 1..=4_000 / one {
        ask(&rig, &format!("s{n}"), &text, Some("open")).await;
    }
    until("the longest idle one is closed", async || !rig.worker().on("/close_session").is_empty()).await;
    let held = rig.admin("/workers").await.json()["workers"][0]["streaming_held_tokens"].as_u64().unwrap();
    assert!(held <= 4_000, "{held}");
    let again = ask(&rig, "a", " more", None).await;
    assert!(note(&again).starts_with("context lost"), "{}", note(&again));
}
