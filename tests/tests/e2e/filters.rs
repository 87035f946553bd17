//! Plugins of the phase `filter`: an ordinary Proxy-Wasm module, written with the public SDK alone.

use crate::higress::{probe, said};
use serde_json::{Value, json};
use turnstile_sim::{Fault, FaultKind, Place};
use turnstile_tests::harness::{
    Answer, CHAT, Flood, Guest, PluginText, Request, Rig, Setup, WorkerExt, built_in, chat, chat_stream, logs, module,
    send, until, until_some,
};

fn hello() -> PluginText {
    PluginText::new("hello", module("test/hello").display().to_string(), "filter")
}

fn with(filters: &[PluginText]) -> Setup {
    let all: Vec<PluginText> = filters.iter().cloned().chain(built_in()).collect();
    Setup::new().plugins(&all)
}

async fn facts_of(rig: &Rig, plugin: &str) -> Value {
    let list = rig.admin("/plugins").await.json();
    list["plugins"].as_array().unwrap().iter().find(|p| p["name"] == plugin).unwrap().clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_changes_headers_both_ways() {
    let rig = with(&[hello().key("config.greeting = \"good day\"")]).start().await;
    for (n, body) in [chat("Hello"), chat_stream("Hello")].iter().enumerate() {
        let answer = rig.post(CHAT, body).await;
        assert_eq!((answer.status, answer.complete), (200, true));
        assert_eq!(answer.header("x-hello-response"), Some((n + 1).to_string().as_str()));
        assert_eq!(rig.worker().on(CHAT)[n].headers["x-hello"], "good day");
    }
    assert!(
        rig.metrics()
            .await
            .text()
            .contains("turnstile_plugin_custom{plugin=\"hello\",name=\"hello_requests_total\"} 2")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_replaces_the_request_before_it_is_understood() {
    let instead = json!({
        "model": "sim", "messages": [{"role": "user", "content": "Filtered."}], "nvext": {"agent_hints": {"priority": 9}},
    });
    let rig = with(&[hello().key(format!("config.replace_request = {:?}", instead.to_string()))]).start().await;
    for size in [10, 300_000] {
        rig.worker().clear_requests();
        assert_eq!(rig.post(CHAT, &chat(&"a".repeat(size))).await.status, 200);
        let seen = rig.worker().on(CHAT)[0].json();
        assert_eq!((&seen["messages"][0]["content"], &seen["priority"]), (&json!("Filtered."), &json!(9)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_adds_to_bodies() {
    let rig = with(&[hello().key("config.append_request = \"  \"").key("config.append_response = \"<end>\"")]);
    let rig = rig.start().await;
    for body in [chat("Hello"), chat_stream("Hello")] {
        let answer = rig.post(CHAT, &body).await;
        assert!(answer.complete, "{}", answer.text());
        assert!(answer.text().ends_with("<end>"), "{}", answer.text());
        assert!(answer.text().contains("chat.completion"));
    }
    assert!(rig.worker().on(CHAT)[0].body.ends_with(b"}  "));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_replaces_the_whole_answer() {
    let rig = with(&[hello().key("config.replace_response = \"nothing to see\"")]).start().await;
    for body in [chat("Hello"), chat_stream("Hello [[sim:tokens=50]]")] {
        let answer = rig.post(CHAT, &body).await;
        assert_eq!((answer.status, answer.complete, answer.text().as_str()), (200, true, "nothing to see"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn filters_see_requests_first_to_last_and_answers_last_to_first() {
    let named = |name: &str| {
        PluginText::new(name, module("test/hello").display().to_string(), "filter")
            .key(format!("config.greeting = {name:?}"))
            .key(format!("config.append_response = {:?}", format!("<{name}>")))
    };
    let rig = with(&[named("first"), named("second")]).start().await;
    let answer = rig.post(CHAT, &chat("Hello")).await;
    assert!(answer.text().ends_with("<second><first>"), "{}", answer.text());
    let seen = rig.worker().on(CHAT)[0].headers.clone();
    let greetings: Vec<_> = seen.get_all("x-hello").iter().map(|v| v.to_str().unwrap().to_owned()).collect();
    assert_eq!(greetings.join(","), "first,second");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_short_answer_behind_filters_has_its_length() {
    let rig = with(&[hello().key("config.append_response = \"<end>\"")]).start().await;
    let answer = rig.post("/tokenize", &json!({"model": "default", "prompt": "a few words"})).await;
    assert_eq!((answer.status, answer.complete), (200, true), "{}", answer.text());
    assert!(answer.text().ends_with("<end>"), "{}", answer.text());
    assert_eq!(answer.header("content-length"), Some(answer.body.len().to_string().as_str()));
    assert_eq!(answer.header("transfer-encoding"), None);
}

/// A JSON answer of several pieces on a route whose answers are not read.
async fn long_answer(filter: PluginText) -> (Rig, Answer) {
    let guest = Guest::on_request(
        "(drop (call $get_shared (i32.const 100) (i32.const 1) (i32.const 200) (i32.const 204) \
                                   (i32.const 208)))",
    );
    let rig = with(&[filter]).file("request-only.wasm", guest.wasm()).start().await;
    let body = json!({"model": "sim", "prompt": "long ".repeat(100_000)});
    let answer = rig.post("/tokenize", &body).await;
    assert_eq!((answer.status, answer.complete), (200, true));
    assert!(answer.body.len() > 300_000, "{}", answer.body.len());
    (rig, answer)
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_go_past_filters_that_do_nothing_about_them() {
    let past = [
        PluginText::new("request-only", "request-only.wasm", "filter"),
        hello().key("config.append_response = \"<end>\"").key("response = false"),
    ];
    for filter in past {
        let (rig, answer) = long_answer(filter).await;
        let length = answer.body.len().to_string();
        assert_eq!(answer.header("content-length"), Some(length.as_str()), "as the worker has sent it");
        assert_eq!(answer.header("x-hello-response"), None);
        assert!(!answer.text().ends_with("<end>"));
        // The request went through it all the same.
        let stream = rig.post(CHAT, &chat_stream("Hello")).await;
        assert_eq!((stream.status, stream.complete), (200, true));
        let calls = rig.admin("/plugins").await.json();
        assert!(calls["plugins"][0]["calls"].as_u64().unwrap() >= 2, "{calls}");
    }
    let (_rig, answer) = long_answer(hello().key("config.append_response = \"<end>\"")).await;
    assert_eq!(answer.header("content-length"), None, "what a filter sees may change");
    assert!(answer.text().ends_with("<end>"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_went_past_a_filter_is_known_at_its_end() {
    logs();
    let program = "on response_headers\n  note seen\non log\n  get_property response.code\n  get_property response.size\n  \
                   get_header_map_value response_headers content-type\n";
    let rig = with(&[probe("past", program).key("response = false")]).start().await;
    let answer = rig.post(CHAT, &chat("Hello")).await;
    until("the log callback", async || said("past").len() >= 3).await;
    let size = answer.body.len().to_le_bytes();
    let [code, told, kind] = said("past").try_into().unwrap();
    assert!(code.starts_with("> get_property response.code = OK "), "{code}");
    assert!(told.starts_with("> get_property response.size = OK "), "{told}");
    let shown: String = size
        .iter()
        .map(|byte| if byte.is_ascii_graphic() { char::from(*byte).to_string() } else { format!("\\x{byte:02x}") })
        .collect();
    assert!(told.ends_with(&shown), "{told}, not {shown}");
    assert!(kind.ends_with("= OK application/json"), "{kind}");
}

/// A filter without callbacks for answers, which acts for other streams: it has ticks. The header `x-trap` makes it trap.
fn request_side() -> Guest {
    Guest::new(
        r#"(data (i32.const 100) "x-trap")
           (func (export "proxy_on_configure") (param i32 i32) (result i32) (drop (call $set_tick (i32.const 1000))) (i32.const 1))
           (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
             (if (i32.eqz (call $get_header (i32.const 0) (i32.const 100) (i32.const 6) (i32.const 200) (i32.const 204)))
               (then (unreachable)))
             (i32.const 0))
           (func (export "proxy_on_foreign_function") (param i32 i32 i32))"#,
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_does_not_need_filters_that_would_not_be_shown_it() {
    // One that is told of events may judge by them.
    for (events, complete) in [("", true), ("events = [\"tool_call\"]", false)] {
        let filter = PluginText::new("request-side", "request-side.wasm", "filter").key("instances = 1").key(events);
        let setup = with(&[filter]).file("request-side.wasm", request_side().wasm());
        // Five seconds, in which it is held: it does not end before the trap.
        let rig = setup.sim(|c| c.speed = 1.0).start().await;
        let mut body = chat_stream("[[sim:tokens=800]]");
        body["max_tokens"] = json!(800);
        let mut running = rig.begin(&Request::json(CHAT, &body)).await;
        assert_eq!(running.head().await.status, 200);
        rig.worker().hold().await;
        assert_eq!(rig.worker().engine_requests(), 1, "the answer has begun and not ended");
        let trapped = rig.send(&Request::json(CHAT, &chat("Hello")).header("x-trap", "1")).await;
        assert_eq!(trapped.status, 500);
        rig.worker().release().await;
        let (rest, _) = running.rest().await;
        assert_eq!(rest.ends_with(b"data: [DONE]\n\n"), complete, "{events}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_filters_have_not_seen_is_replaced_by_another_workers() {
    let guest = Guest::on_request(
        "(drop (call $get_shared (i32.const 100) (i32.const 1) (i32.const 200) (i32.const 204) \
                                   (i32.const 208)))",
    );
    let filter = PluginText::new("request-only", "request-only.wasm", "filter");
    let setup = with(&[filter]).file("request-only.wasm", guest.wasm()).workers(2).pool("default", "", &[0, 1]);
    let rig = setup.start().await;
    let ask = async |session: u32| {
        let answer = rig.send(&Request::json(CHAT, &chat("Hello")).header("x-session-id", &session.to_string())).await;
        assert_eq!((answer.status, answer.complete), (200, true), "{}", answer.text());
        rig.record_of(&answer).await
    };
    // The worker that has a session fails. A session leaves one that seems slow by itself: then another is asked.
    let mut session = 0;
    let (bound, record) = until_some("a turn goes to the failing worker first", async || {
        session += 1;
        rig.workers.iter().for_each(|worker| worker.faults().clear());
        let bound = ask(session).await["worker"].clone();
        let failing = rig.worker_by_id(bound.as_str().unwrap());
        failing.faults().add(Fault::always(FaultKind::Cut(Place::Body(10))));
        let record = ask(session).await;
        (record["attempts"] != 1).then_some((bound, record))
    })
    .await;
    assert_eq!(record["attempts"], 2, "{record}");
    assert_ne!(record["worker"], bound);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_a_filter_has_made_bodiless_ends_at_once() {
    logs();
    let worker = Flood::start().await;
    for (status, name) in [(204, "none-204"), (304, "none-304")] {
        let program = format!("on response_headers\n  - replace_header_map_value response_headers :status {status}\n");
        let rig = with(&[probe(name, &program)]).workers(0).external(worker.url()).start().await;
        let mut connection = rig.connect().await;
        for _ in 0..2 {
            connection.send(&Request::json(CHAT, &chat_stream("Hello"))).await;
            let answer = connection.answer().await;
            assert_eq!((answer.status, answer.complete, answer.body.len()), (status, true, 0));
            assert_eq!((answer.header("content-length"), answer.header("transfer-encoding")), (None, None));
            assert_eq!(rig.record_of(&answer).await["end"], "plugin_end");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn filters_read_who_has_answered() {
    logs();
    let program = "on log\n  get_property response.code_details\n";
    let rig = with(&[probe("details", program)]).pool("default", "models = [\"sim\"]", &[0]).start().await;
    assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200);
    let answer = rig.post(CHAT, &json!({"model": "other", "messages": [{"role": "user", "content": "Hello"}]})).await;
    assert_eq!((answer.status, &answer.error()["code"]), (404, &json!("model_not_found")));
    until("two log callbacks", async || said("details").len() == 2).await;
    let wanted =
        ["via_upstream", "model_not_found"].map(|code| format!("> get_property response.code_details = OK {code}"));
    assert_eq!(said("details"), wanted);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_without_callbacks_for_answers_still_acts_on_them_from_a_tick() {
    // Its request callback has the context kept, and a tick closes the stream.
    let guest = Guest::new(
        r#"(func (export "proxy_on_configure") (param i32 i32) (result i32) (drop (call $set_tick (i32.const 20))) (i32.const 1))
           (func (export "proxy_on_request_headers") (param $context i32) (param i32 i32) (result i32)
             (i32.store (i32.const 4096) (local.get $context)) (i32.const 0))
           (func (export "proxy_on_tick") (param i32)
             (if (i32.load (i32.const 4096)) (then
               (drop (call $effective (i32.load (i32.const 4096))))
               (drop (call $close_stream (i32.const 1))))))"#,
    );
    let worker = Flood::start().await;
    let setup = with(&[PluginText::new("closer", "closer.wasm", "filter")]).file("closer.wasm", guest.wasm());
    let rig = setup.workers(0).external(worker.url()).start().await;
    // A tick that comes before the answer closes the connection without a head.
    let mut closed = until_some("a tick closes an answer that has begun", async || {
        let mut connection = rig.begin(&Request::json(CHAT, &chat_stream("Hello"))).await;
        let head = connection.try_head().await?;
        assert_eq!(head.status, 200);
        Some(connection)
    })
    .await;
    assert!(!closed.rest().await.1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_answers_by_itself() {
    let rig = with(&[hello()]).start().await;
    let mut connection = rig.connect().await;
    for _ in 0..2 {
        connection.send(&Request::json(CHAT, &chat("Hello")).header("x-block", "1")).await;
        let answer = connection.answer().await;
        assert_eq!((answer.status, answer.text().as_str()), (403, "blocked by hello\n"));
        assert_eq!(answer.header("x-hello"), Some("blocked"));
        assert_eq!(answer.header("content-type"), Some("text/plain"), "a body that the plugin gives no type");
        assert!(answer.header("x-request-id").is_some());
    }
    assert!(rig.worker().turns().is_empty());
    let record = rig.record_of(&rig.send(&Request::json(CHAT, &chat("Hello")).header("x-block", "1")).await).await;
    assert_eq!((&record["status"], &record["end"]), (&json!(403), &json!("plugin_answer")));
}

async fn trapped(rig: &Rig) -> Answer {
    rig.send(&Request::json(CHAT, &chat("Hello")).header("x-trap", "1")).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_that_traps_is_500_when_closed_and_lives_again() {
    let rig = with(&[hello()]).start().await;
    let answer = trapped(&rig).await;
    assert_eq!((answer.status, &answer.error()["code"]), (500, &json!("plugin_failed")));
    assert!(!answer.text().contains("told to trap"), "the plugin's words are for the log");
    assert!(rig.worker().turns().is_empty());
    until("a fresh instance", async || rig.post(CHAT, &chat("Hello")).await.status == 200).await;
    assert_eq!(rig.worker().on(CHAT)[0].headers["x-hello"], "request");
    let facts = facts_of(&rig, "hello").await;
    assert_eq!((&facts["faults"]["trap"], &facts["healthy_instances"]), (&json!(1), &json!(1)));
    assert_eq!(rig.metric("turnstile_plugin_faults_total", &[("plugin", "hello"), ("kind", "trap")]).await, 1.0);
    let others = rig.metric("turnstile_plugin_faults_total", &[("kind", "unavailable")]).await;
    assert_eq!(rig.metric("turnstile_plugin_faults_total", &[]).await, 1.0 + others, "each is counted once");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_that_traps_is_left_out_when_open() {
    let rig = with(&[hello().key("on_error = \"open\"")]).start().await;
    let answer = trapped(&rig).await;
    assert_eq!((answer.status, answer.header("x-hello-response")), (200, None));
    assert!(!rig.worker().on(CHAT)[0].headers.contains_key("x-hello"));
    until("a fresh instance", async || rig.post(CHAT, &chat("Hello")).await.header("x-hello-response").is_some()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_that_never_returns_is_stopped() {
    let rig = with(&[hello().key("callback_timeout_ms = 300").key("on_error = \"open\"")]).start().await;
    let answer = rig.send(&Request::json(CHAT, &chat("Hello")).header("x-loop", "1")).await;
    assert_eq!(answer.status, 200);
    assert_eq!(facts_of(&rig, "hello").await["faults"]["deadline"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_that_a_trap_took_along_end_as_on_error_says() {
    for (on_error, status) in [("closed", 500), ("open", 200)] {
        let rig = with(&[hello().key(format!("on_error = {on_error:?}"))]).start().await;
        rig.worker().hold().await;
        let mut running = rig.begin(&Request::json(CHAT, &chat_stream("Hello"))).await;
        until("it is on the worker", async || rig.worker().on(CHAT).len() == 1).await;
        // With `open` this one goes on to the worker, so it is not waited for.
        let trapping = rig.begin(&Request::json(CHAT, &chat("Hello")).header("x-trap", "1")).await;
        until("the trap", async || facts_of(&rig, "hello").await["faults"]["trap"] == 1).await;
        rig.worker().release().await;
        let answer = running.answer().await;
        assert_eq!((answer.status, answer.header("x-hello-response")), (status, None), "{on_error}");
        drop(trapping);
        rig.idle().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_ticks() {
    let rig = with(&[hello().key("config.tick_ms = 10")]).start().await;
    let ticks = async || {
        let body = json!({"body": chat("Hello")});
        assert_eq!(send(rig.admin_addr(), &Request::json("/explain", &body)).await.status, 200);
        facts_of(&rig, "hello").await["calls"].as_u64().unwrap()
    };
    let before = ticks().await;
    until("more calls without a request", async || ticks().await > before + 3).await;
}
