//! Plugins are told what happens in an answer, in order, if they ask.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use turnstile_tests::harness::{
    Answer, CHAT, Guest, PluginText, Request, Rig, Scripted, Setup, WorkerExt, built_in, chat, chat_stream, logs,
    module, swap, until,
};

pub const ALL: &str = r#"events = ["first_token", "tool_call", "finish", "usage", "end"]"#;

/// A turn that calls two tools.
pub const CALLS: &str = "Say [[sim:text=Reading.]] [[sim:tool=read {\"path\":\"a\"}]] [[sim:tool=list {}]]";

/// A plugin that logs what it is told, after its mark, and the end of its streams.
pub fn teller(mark: &str) -> Guest {
    Guest::on_request("")
        .data(4096, format!("{mark}log{mark}delete").as_bytes())
        .also(&format!(
            r#"(func (export "proxy_on_foreign_function") (param $context i32) (param $function i32) (param $size i32)
                 (if (i32.ne (local.get $function) (i32.const 1)) (then (return)))
                 (drop (call $get_buffer (i32.const 8) (i32.const 0) (i32.const 1000) (i32.const 2000) (i32.const 2004)))
                 (if (i32.ne (local.get $size) (i32.load (i32.const 2004))) (then unreachable))
                 (drop (call $log (i32.const 2) (i32.const 4096) (i32.const {mark})))
                 (drop (call $log (i32.const 2) (i32.load (i32.const 2000)) (i32.load (i32.const 2004)))))
               (func (export "proxy_on_log") (param i32)
                 (drop (call $log (i32.const 2) (i32.const 4096) (i32.const {log}))))
               (func (export "proxy_on_delete") (param i32)
                 (if (i32.ne (local.get 0) (i32.const 1))
                   (then (drop (call $log (i32.const 2) (i32.const {at}) (i32.const {delete}))))))"#,
            mark = mark.len(),
            log = mark.len() + 3,
            at = 4096 + mark.len() + 3,
            delete = mark.len() + 6,
        ))
}

/// What a plugin has logged; of events without their times.
pub fn told(plugin: &str) -> Vec<String> {
    let lines = logs().plugin_lines().into_iter().filter(|(name, _)| name == plugin);
    lines
        .map(|(_, line)| match serde_json::from_str::<Value>(&line) {
            Ok(Value::Object(mut members)) => {
                assert!(members.remove("at_ms").is_some_and(|at| at.is_u64()), "{line}");
                event(Value::Object(members))
            }
            _ => line,
        })
        .collect()
}

/// The built-in chain with a plugin in it.
pub fn with(plugin: PluginText) -> Setup {
    let [queue, binding, affinity] = built_in();
    Setup::new().plugins(&[queue, binding, plugin.key("callback_timeout_ms = 60000"), affinity])
}

/// A turn that calls two tools, with the tools that it may call.
pub fn calling(stream: bool) -> Value {
    let mut body = if stream { chat_stream(CALLS) } else { chat(CALLS) };
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}});
    body["tools"] = json!([tool("read"), tool("list")]);
    body
}

/// An event as text, its members in alphabetical order.
fn event(event: Value) -> String {
    let members: BTreeMap<String, Value> = serde_json::from_value(event).unwrap();
    json!(members).to_string()
}

pub fn end(outcome: &str, status: u16) -> String {
    event(json!({"event": "end", "left_out": 0, "outcome": outcome, "status": status}))
}

/// The event of an answer's tokens, as the access log has them.
async fn usage(rig: &Rig, answer: &Answer) -> String {
    let record = rig.record_of(answer).await;
    let mut usage = json!({"event": "usage"});
    for name in ["prompt_tokens", "completion_tokens", "cached_tokens"] {
        if !record[name].is_null() {
            usage[name] = record[name].clone();
        }
    }
    assert!(usage["prompt_tokens"].is_u64() && usage["completion_tokens"].is_u64(), "{record}");
    event(usage)
}

/// Waits for the last line of a plugin's stream, and gives all of them.
pub async fn all_told(plugin: &str) -> Vec<String> {
    until("the stream has ended", async || told(plugin).last().is_some_and(|line| line.ends_with("delete"))).await;
    told(plugin)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_streaming_tool_call_turn_is_told_event_by_event() {
    logs();
    for phase in ["admit", "route", "filter"] {
        let name = format!("turn-{phase}");
        let plugin = PluginText::new(&name, "teller.wasm", phase).key(ALL);
        let rig = with(plugin).file("teller.wasm", teller("").wasm()).start().await;
        let answer = rig.post(CHAT, &calling(true)).await;
        assert_eq!((answer.status, answer.complete), (200, true));
        let expected = [
            event(json!({"event": "first_token"})),
            event(json!({"event": "tool_call", "name": "read", "number": 0})),
            event(json!({"event": "tool_call", "name": "list", "number": 1})),
            event(json!({"event": "finish", "reason": "tool_calls"})),
            usage(&rig, &answer).await,
            end("finished", 200),
            "log".to_owned(),
            "delete".to_owned(),
        ];
        let found: Vec<String> = all_told(&name).await.into_iter().filter(|line| !line.is_empty()).collect();
        assert_eq!(found, expected, "{phase}");
        assert!(!found.concat().contains("Reading"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_that_generates_is_told_streaming_or_not() {
    logs();
    let say = "Say [[sim:text=some words]]";
    let messages = json!([{"role": "user", "content": say}]);
    let bodies = [
        (CHAT, json!({"model": "sim", "messages": messages}), "stop"),
        ("/v1/completions", json!({"model": "sim", "prompt": say}), "stop"),
        ("/v1/messages", json!({"model": "sim", "max_tokens": 99, "messages": messages}), "end_turn"),
        ("/v1/responses", json!({"model": "sim", "input": say}), "completed"),
        ("/generate", json!({"text": say}), "stop"),
    ];
    let plugin = PluginText::new("routes", "teller.wasm", "route").key(ALL);
    let rig = with(plugin).file("teller.wasm", teller("").wasm()).start().await;
    let mut before = 0;
    for (path, body, reason) in bodies {
        for stream in [false, true] {
            let mut body = body.clone();
            body["stream"] = json!(stream);
            let answer = rig.post(path, &body).await;
            assert_eq!(answer.status, 200, "{path}: {}", answer.text());
            let mut expected = vec![
                event(json!({"event": "finish", "reason": reason})),
                usage(&rig, &answer).await,
                end("finished", 200),
                "log".to_owned(),
                "delete".to_owned(),
            ];
            if stream {
                expected.insert(0, event(json!({"event": "first_token"})));
            }
            let now = || told("routes").into_iter().filter(|line| !line.is_empty()).skip(before).collect::<Vec<_>>();
            until("the stream has ended", async || now().last().is_some_and(|line| line == "delete")).await;
            assert_eq!(now(), expected, "{path}, stream: {stream}");
            before += expected.len();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_is_called_for_what_it_asks_for_and_no_more() {
    logs();
    // The request's headers, and its end.
    let without = 2.0;
    let cases = [
        ("", 0.0),
        (r#"events = []"#, 0.0),
        (r#"events = ["tool_call"]"#, 2.0),
        (r#"events = ["finish", "usage"]"#, 2.0),
        (r#"events = ["end", "end"]"#, 1.0),
        (ALL, 6.0),
    ];
    let [queue, binding, affinity] = built_in();
    let mut plugins = vec![queue, binding];
    for (at, (events, _)) in cases.iter().enumerate() {
        plugins.push(PluginText::new(&format!("asks-{at}"), "teller.wasm", "route").key(*events));
    }
    plugins.push(affinity);
    let rig = Setup::new().plugins(&plugins).file("teller.wasm", teller("").wasm()).start().await;
    let answer = rig.post(CHAT, &calling(true)).await;
    rig.record_of(&answer).await;
    for (at, (events, more)) in cases.iter().enumerate() {
        let calls = rig.metric("turnstile_plugin_calls_total", &[("plugin", &format!("asks-{at}"))]).await;
        assert_eq!(calls, without + more, "{events}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_that_is_swapped_under_a_stream_hears_the_rest_of_it() {
    logs();
    let plugin = PluginText::new("swapped", "teller.wasm", "route").key(ALL);
    let rig = with(plugin).sim(|c| c.speed = 1.0).workers(1).file("teller.wasm", teller("old ").wasm()).start().await;
    // The text before the tool calls takes five seconds, in which the engine is held.
    let mut body = calling(true);
    body["messages"][0]["content"] = json!(CALLS.replace("Reading.", &["words"; 400].join(" ")));
    let mut running = rig.begin(&Request::json(CHAT, &body)).await;
    until("it runs", async || told("swapped").len() >= 2).await;
    rig.worker().hold().await;
    swap(&rig.dir().join("teller.wasm"), teller("new ").wasm());
    rig.generation(2).await;
    assert_eq!(told("swapped").len(), 2, "the stream is still at its first token");
    rig.worker().release().await;
    assert_eq!(running.answer().await.status, 200);
    let first = all_told("swapped").await;
    assert!(first.iter().all(|line| !line.starts_with("new ")), "{first:?}");
    assert_eq!(first.iter().filter(|line| line.starts_with('{')).count(), 6, "{first:?}");
    assert_eq!(first.iter().filter(|line| *line == "old ").count(), 6);

    assert_eq!(rig.post(CHAT, &calling(true)).await.status, 200);
    until("the new one ends", async || told("swapped").iter().any(|line| line == "new delete")).await;
    let second = told("swapped").split_off(first.len());
    assert!(second.iter().all(|line| !line.starts_with("old ")), "{second:?}");
    assert_eq!(second.iter().filter(|line| line.starts_with('{')).count(), 6, "{second:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_is_told_as_the_end_and_nothing_after_it() {
    logs();
    let plugin = PluginText::new("left", "teller.wasm", "admit").key(ALL);
    let rig = with(plugin).sim(|c| c.speed = 1.0).workers(1).file("teller.wasm", teller("").wasm()).start().await;
    let mut running = rig.begin(&Request::json(CHAT, &chat_stream("Say [[sim:tokens=5000]]"))).await;
    running.head().await;
    until("the first token", async || told("left").len() == 2).await;
    drop(running);
    let found: Vec<String> = all_told("left").await.into_iter().filter(|line| !line.is_empty()).collect();
    let expected =
        [event(json!({"event": "first_token"})), end("client_gone", 499), "log".to_owned(), "delete".to_owned()];
    assert_eq!(found, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_without_an_answer_has_an_end_only() {
    logs();
    let plugin = PluginText::new("refused", "teller.wasm", "admit").key(ALL);
    let rig = with(plugin).file("teller.wasm", teller("").wasm()).start().await;
    rig.worker().die().await;
    let answer = rig.post(CHAT, &calling(true)).await;
    assert!(answer.status >= 500, "{}", answer.status);
    let found: Vec<String> = all_told("refused").await.into_iter().filter(|line| !line.is_empty()).collect();
    assert_eq!(found, [end("refused", answer.status), "log".to_owned(), "delete".to_owned()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_tool_calls_are_left_out_and_counted() {
    logs();
    let mut body = String::new();
    for n in 0..100 {
        let call = json!({"index": n, "function": {"name": format!("tool-{n}"), "arguments": "{}"}});
        let chunk = json!({"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": null}]});
        body.push_str(&format!("data: {chunk}\n\n"));
    }
    body.push_str(
        "data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"tool_calls\"}]}\n\ndata: [DONE]\n\n",
    );
    let head = format!("content-type: text/event-stream\r\ncontent-length: {}\r\n\r\n", body.len());
    let worker = Scripted::start(format!("HTTP/1.1 200 OK\r\n{head}{body}")).await;
    let plugin = PluginText::new("many", "teller.wasm", "route").key(ALL);
    let rig = with(plugin).external(worker.url()).file("teller.wasm", teller("").wasm()).start().await;
    let answer = rig.post(CHAT, &calling(true)).await;
    assert_eq!((answer.status, answer.text()), (200, body));
    let found: Vec<String> = all_told("many").await.into_iter().filter(|line| !line.is_empty()).collect();
    assert_eq!(found.iter().filter(|line| line.contains("tool_call\"")).count(), 64);
    let last = event(json!({"event": "end", "left_out": 36, "outcome": "finished", "status": 200}));
    assert_eq!(found[found.len() - 3..], [last, "log".to_owned(), "delete".to_owned()]);
    assert_eq!(rig.record_of(&answer).await["left_out_events"], 36);
    assert_eq!(rig.metric("turnstile_events_left_out_total", &[]).await, 36.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sdks_of_all_languages_hear_the_same() {
    logs();
    let languages = ["rust", "go", "as", "c"];
    let [queue, binding, affinity] = built_in();
    let mut plugins = vec![queue, binding];
    for language in languages {
        let file = module(&format!("test/listener-{language}")).display().to_string();
        let plugin = PluginText::new(&format!("sdk-{language}"), file, "route").key(ALL);
        plugins.push(plugin.key("callback_timeout_ms = 60000"));
    }
    plugins.push(affinity);
    let rig = Setup::new().plugins(&plugins).start().await;
    let answer = rig.post(CHAT, &calling(true)).await;
    assert_eq!(answer.status, 200);
    let record = rig.record_of(&answer).await;
    assert!(record.get("failed_policies").is_none(), "{record}");
    let cached = record["cached_tokens"].as_i64().unwrap_or(-1);
    let expected = [
        "sim first_token".to_owned(),
        "sim tool_call 0 read".to_owned(),
        "sim tool_call 1 list".to_owned(),
        "sim finish tool_calls".to_owned(),
        format!("sim usage {} {} {cached}", record["prompt_tokens"], record["completion_tokens"]),
        "sim end finished 200 0".to_owned(),
    ];
    for language in languages {
        let name = format!("sdk-{language}");
        until("all is told", async || told(&name).len() == expected.len()).await;
        assert_eq!(told(&name), expected, "{language}");
    }
}
