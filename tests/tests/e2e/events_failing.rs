//! What plugins do in events, and what becomes of those that fail there.

use crate::events::{ALL, CALLS, all_told, calling, end, teller, told, with};
use serde_json::{Value, json};
use turnstile_tests::harness::{CHAT, Guest, PluginText, Setup, built_in, logs, until};

/// A plugin that does this when it is told of an event.
fn acts(body: &str) -> Guest {
    Guest::on_request("").also(&format!(
        r#"(func (export "proxy_on_foreign_function") (param $context i32) (param $function i32) (param $size i32) {body})"#
    ))
}

/// A turn that calls two tools, the second one with arguments that take six seconds: what is done at the first call is done
/// before the answer is over.
fn calling_at_length() -> Value {
    let mut body = calling(true);
    let arguments = json!({"text": "a".repeat(4000)});
    body["messages"][0]["content"] = json!(CALLS.replace("list {}", &format!("list {arguments}")));
    body
}

/// A chain in which one plugin acts and another one is told as well.
fn beside(acting: PluginText, name: &str) -> Setup {
    let [queue, binding, affinity] = built_in();
    let told = PluginText::new(name, "teller.wasm", "route").key(ALL).key("callback_timeout_ms = 60000");
    Setup::new().plugins(&[queue, binding, acting, told, affinity]).file("teller.wasm", teller("").wasm())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_fails_in_an_event_hurts_no_stream_whatever_its_on_error() {
    logs();
    for (at, on_error) in ["closed", "open", "fallback"].into_iter().enumerate() {
        for (body, kind) in [("unreachable", "trap"), ("(loop $on (br $on))", "deadline")] {
            let names = [format!("fails-{at}-{kind}"), format!("goes-on-{at}-{kind}")];
            let timeout_ms = if kind == "deadline" { 300 } else { 60_000 };
            let acting = PluginText::new(&names[0], "acts.wasm", "route")
                .key(format!("callback_timeout_ms = {timeout_ms}"))
                .key(r#"events = ["tool_call", "finish", "usage", "end"]"#)
                .key(format!("on_error = {on_error:?}"));
            let rig = beside(acting, &names[1]).file("acts.wasm", acts(body).wasm()).start().await;
            let answer = rig.post(CHAT, &calling(true)).await;
            assert_eq!((answer.status, answer.complete), (200, true), "{on_error} {kind}");
            assert!(answer.text().ends_with("data: [DONE]\n\n"), "{on_error} {kind}");
            let record = rig.record_of(&answer).await;
            assert_eq!(record["failed_policies"], json!([names[0]]), "{on_error} {kind}");
            // It fails once, and hears of no more.
            let faults = [("plugin", names[0].as_str()), ("kind", kind)];
            rig.until_metric("turnstile_plugin_faults_total", &faults, 1.0).await;
            assert_eq!(rig.metric("turnstile_plugin_faults_total", &faults[..1]).await, 1.0, "{on_error} {kind}");
            let others = all_told(&names[1]).await;
            assert_eq!(others.iter().filter(|line| line.starts_with('{')).count(), 6, "{others:?}");
            // A fresh instance serves the next turn.
            until("it is back", async || {
                let answer = rig.post(CHAT, &calling(false)).await;
                rig.record_of(&answer).await["failed_policies"] == json!([names[0]])
            })
            .await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_closes_the_stream_or_answers_in_an_event_breaks_it_off() {
    logs();
    let answers =
        "(drop (call $respond (i32.const 403) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)
        (i32.const 0) (i32.const -1)))";
    for (name, body, outcome) in
        [("closes", "(drop (call $close_stream (i32.const 1)))", "plugin_close"), ("answers", answers, "plugin_answer")]
    {
        let other = format!("{name}-other");
        let acting = PluginText::new(name, "acts.wasm", "route").key(r#"events = ["tool_call"]"#);
        let setup = beside(acting, &other).sim(|c| c.speed = 1.0).workers(1);
        let rig = setup.file("acts.wasm", acts(body).wasm()).start().await;
        let answer = rig.post(CHAT, &calling_at_length()).await;
        assert_eq!((answer.status, answer.complete), (200, false), "{name}");
        assert!(!answer.text().contains("[DONE]"), "{name}: {}", answer.text());
        assert_eq!(rig.record_of(&answer).await["end"], outcome);
        let found = all_told(&other).await;
        assert!(found.contains(&end(outcome, 200)), "{found:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_that_fails_in_an_event_is_passed_over_if_it_may_be() {
    logs();
    let passes = r#"(func (export "proxy_on_response_body") (param i32 i32 i32) (result i32) (i32.const 0))"#;
    for (name, on_error, whole) in [("filter-open", "open", true), ("filter-closed", "closed", false)] {
        let plugin = PluginText::new(name, "acts.wasm", "filter").key(ALL).key(format!("on_error = {on_error:?}"));
        let (speed, body) = if whole { (20.0, calling(true)) } else { (1.0, calling_at_length()) };
        let setup = with(plugin).sim(|c| c.speed = speed).workers(1);
        let rig = setup.file("acts.wasm", acts("unreachable").also(passes).wasm()).start().await;
        let answer = rig.post(CHAT, &body).await;
        assert_eq!((answer.status, answer.complete), (200, whole), "{name}");
        assert_eq!(rig.record_of(&answer).await["end"], if whole { "finished" } else { "plugin_failed" });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn notes_of_events_are_logged_decisions_are_not_and_a_shadow_leaves_none() {
    logs();
    let name = "turnstile.log.heard";
    let body = format!(
        "(drop (call $set_property (i32.const 100) (i32.const {}) (i32.const 200) (i32.const 3)))
         (drop (call $set_property (i32.const 300) (i32.const 12) (i32.const 320) (i32.const 2)))",
        name.len()
    );
    let guest = acts(&body).data(100, name.as_bytes()).data(200, b"yes").data(300, b"route.target").data(320, b"#9");
    for (plugin, keys, notes) in [("noted", "", json!([["heard", "yes"]])), ("shadow", "shadow = true", Value::Null)] {
        let plugin = PluginText::new(plugin, "acts.wasm", "route").key(r#"events = ["usage"]"#).key(keys);
        let rig = with(plugin).file("acts.wasm", guest.wasm()).start().await;
        let answer = rig.post(CHAT, &calling(true)).await;
        let record = rig.record_of(&answer).await;
        assert_eq!((answer.status, &record["notes"]), (200, &notes), "{record}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn facts_of_the_end_are_there_with_the_last_events() {
    logs();
    let status = "turnstile.status";
    let body = format!(
        "(if (i32.eqz (call $get_property (i32.const 100) (i32.const {}) (i32.const 2000) (i32.const 2004)))
           (then (drop (call $log (i32.const 2) (i32.load (i32.const 2000)) (i32.load (i32.const 2004)))))
           (else (drop (call $log (i32.const 2) (i32.const 200) (i32.const 4)))))",
        status.len()
    );
    let guest = acts(&body).data(100, status.as_bytes()).data(200, b"none");
    let plugin = PluginText::new("facts", "acts.wasm", "route").key(r#"events = ["first_token", "usage", "end"]"#);
    let rig = with(plugin).file("acts.wasm", guest.wasm()).start().await;
    let answer = rig.post(CHAT, &calling(true)).await;
    rig.record_of(&answer).await;
    assert_eq!(told("facts"), ["none", "200", "200"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_module_that_cannot_be_told_is_refused() {
    let mut rig = Setup::new().file("deaf.wasm", Guest::on_request("").wasm()).start().await;
    let before = rig.gateway().generation.load().number;
    let [queue, binding, affinity] = built_in();
    let deaf = PluginText::new("deaf", "deaf.wasm", "route").key(ALL);
    rig.edit(|setup| setup.set_plugins(&[queue, binding, deaf, affinity]));
    let answer = crate::reload::reload(&rig).await;
    let text = answer.text();
    assert!(text.contains("plugins.deaf: events") && text.contains("proxy_on_foreign_function"), "{text}");
    assert_eq!(rig.gateway().generation.load().number, before);
}
