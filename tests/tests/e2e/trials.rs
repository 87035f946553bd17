//! Policies on trial: shadows, which change nothing, and canaries, which decide for some sessions until they do worse.

use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use turnstile_tests::harness::{
    Answer, CHAT, Guest, PluginText, Request, Rig, Setup, WorkerExt, built_in, chat, logs, send, until,
};

/// Writes decisions: name, value.
pub fn writing(decisions: &[(&str, &str)]) -> Guest {
    let (mut at, mut calls, mut data) = (100, String::new(), String::new());
    for (name, value) in decisions {
        let (n, v) = (name.len(), value.len());
        calls += &format!(
            "(drop (call $set_property (i32.const {at}) (i32.const {n}) (i32.const {}) (i32.const {v})))",
            at + n
        );
        data += &format!("(data (i32.const {at}) \"{name}{value}\")");
        at += n + v;
    }
    Guest::on_request(&calls).also(&data)
}

fn policy(name: &str, phase: &'static str, keys: &str) -> PluginText {
    PluginText::new(name, format!("{name}.wasm"), phase).key("callback_timeout_ms = 60000").key(keys)
}

/// The built-in chain, then these.
fn chain(more: &[PluginText]) -> Vec<PluginText> {
    built_in().into_iter().chain(more.iter().cloned()).collect()
}

async fn plugin(rig: &Rig, name: &str) -> Value {
    let list = rig.admin("/plugins").await.json();
    list["plugins"].as_array().unwrap().iter().find(|p| p["name"] == name).unwrap().clone()
}

async fn post_admin(rig: &Rig, path: &str) -> Answer {
    send(rig.admin_addr(), &Request::new("POST", path)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shadow_changes_nothing_and_is_told_apart_everywhere() {
    let stable = writing(&[("route.target", "#0"), ("session.action", "bind")]);
    let idea = writing(&[("route.target", "#1"), ("session.action", "open"), ("log.idea", "mine"), ("nonsense", "1")]);
    let queue = writing(&[("queue.tier", "7"), ("queue.priority", "2.5")]);
    let plugins = chain(&[
        policy("stable", "route", ""),
        policy("idea", "route", "shadow = true"),
        policy("queue", "admit", "shadow = true"),
    ]);
    let rig = Setup::new()
        .workers(2)
        .plugins(&plugins)
        .file("stable.wasm", stable.wasm())
        .file("idea.wasm", idea.wasm())
        .file("queue.wasm", queue.wasm())
        .start()
        .await;
    let mut body = chat("Hello");
    body["nvext"] = json!({"session_control": {"session_id": "s"}});
    let answer = rig.explain(CHAT, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.header("x-turnstile-worker"), Some(rig.workers[0].id().as_str()));
    assert!(rig.workers[1].on(CHAT).is_empty());
    let record = rig.record_of(&answer).await;
    let shadows = record["shadows"].as_array().unwrap();
    let of = |name: &str| shadows.iter().find(|s| s["plugin"] == name).unwrap();
    assert_eq!(of("queue"), &json!({"plugin": "queue", "order": [7, 2500]}));
    assert_eq!((&of("idea")["worker"], &of("idea")["session"]), (&json!(rig.workers[1].id()), &json!("open")));
    assert!(of("idea")["cost_ms"].is_number(), "{record}");
    assert!(record["failed_policies"].is_null() && record["notes"].is_null(), "{record}");
    let explained = answer.headers.iter().filter(|(name, _)| name == "x-turnstile-shadow");
    let explained: Vec<Value> = explained.map(|(_, text)| serde_json::from_str(text).unwrap()).collect();
    assert_eq!(&json!(explained), &record["shadows"]);
    for (about, plugin) in [("worker", "idea"), ("session", "idea"), ("order", "queue")] {
        let count = async |result: &str| {
            let labels = [("plugin", plugin), ("about", about), ("result", result)];
            rig.metric("turnstile_shadow_decisions_total", &labels).await
        };
        assert_eq!((count("other").await, count("same").await), (1.0, 0.0), "{about}");
    }
    assert_eq!(plugin(&rig, "idea").await["shadow"], true);

    // Asked about a request that is not sent, it answers too, and that counts nothing.
    let asked = send(rig.admin_addr(), &Request::json("/explain", &json!({"body": body}))).await.json();
    assert!(asked["shadows"].as_array().unwrap().iter().any(|s| s["worker"] == json!(rig.workers[1].id())), "{asked}");
    assert_eq!(rig.metric("turnstile_shadow_decisions_total", &[("about", "worker")]).await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_else_a_shadow_decides_is_compared_name_by_name() {
    let stable = writing(&[("session.action", "bind"), ("session.mode", "affinity"), ("engine.priority", "3")]);
    let idea = writing(&[
        ("session.action", "bind"),
        ("session.mode", "affinity"),
        ("session.key", "of a client"),
        ("engine.priority", "7"),
        ("prefill", "on"),
    ]);
    let queue = writing(&[("queue.flow", "of a client"), ("queue.deadline_ms", "1500")]);
    let plugins = chain(&[
        policy("stable", "route", ""),
        policy("idea", "route", "shadow = true"),
        policy("queue", "admit", "shadow = true"),
    ]);
    let setup = Setup::new().plugins(&plugins).file("stable.wasm", stable.wasm());
    let rig = setup.file("idea.wasm", idea.wasm()).file("queue.wasm", queue.wasm()).start().await;
    let mut body = chat("Hello");
    body["nvext"] = json!({"session_control": {"session_id": "s"}});
    let answer = rig.explain(CHAT, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let record = rig.record_of(&answer).await;
    let of = |name: &str| {
        let shadows = record["shadows"].as_array().unwrap();
        shadows.iter().find(|s| s["plugin"] == name).unwrap()["decisions"].clone()
    };
    assert_eq!(of("idea"), json!({"session.key": "another", "engine.priority": "7", "prefill": "on"}));
    assert_eq!(of("queue"), json!({"queue.flow": "another", "queue.deadline_ms": "1500"}));
    for (about, result) in [("session.mode", "same"), ("engine.priority", "other"), ("queue.flow", "other")] {
        let labels = [("about", about), ("result", result)];
        assert_eq!(rig.metric("turnstile_shadow_decisions_total", &labels).await, 1.0, "{about}");
    }
    assert!(!record.to_string().contains("of a client"), "{record}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shadow_that_agrees_is_counted_and_not_logged() {
    let same = writing(&[("route.target", "#1")]);
    let plugins = chain(&[
        policy("stable", "route", ""),
        policy("idea", "route", "shadow = true"),
        policy("echo", "route", "shadow = true"),
        policy("silent", "route", "shadow = true"),
    ]);
    let rig = Setup::new()
        .workers(2)
        .plugins(&plugins)
        .file("stable.wasm", same.wasm())
        // It comes to the same by excluding the other one.
        .file("idea.wasm", writing(&[("route.target", ""), ("route.exclude", "#0")]).wasm())
        // It writes what stands there already.
        .file("echo.wasm", same.wasm())
        .file("silent.wasm", writing(&[("log.a", "b")]).wasm())
        .start()
        .await;
    let answer = rig.post(CHAT, &chat("Hello")).await;
    assert!(rig.record_of(&answer).await["shadows"].is_null());
    for (plugin, same) in [("idea", 1.0), ("echo", 1.0), ("silent", 0.0)] {
        let labels = [("plugin", plugin), ("about", "worker"), ("result", "same")];
        assert_eq!(rig.metric("turnstile_shadow_decisions_total", &labels).await, same, "{plugin}");
    }
    assert_eq!(rig.metric("turnstile_shadow_cost_ms_total", &[]).await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_shadow_breaks_is_its_own_affair() {
    let answers = Guest::on_request(
        "(drop (call $local_response (i32.const 403) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)
           (i32.const 0) (i32.const 0) (i32.const -1)))",
    )
    .import(
        r#"(import "env" "proxy_send_local_response"
             (func $local_response (param i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))"#,
    );
    let plugins = chain(&[
        policy("traps", "route", "shadow = true\non_error = \"closed\"\ncrash_limit = 2"),
        policy("answers", "admit", "shadow = true"),
    ]);
    let rig = Setup::new()
        .plugins(&plugins)
        .file("traps.wasm", Guest::on_request("unreachable").wasm())
        .file("answers.wasm", answers.wasm())
        .start()
        .await;
    let answer = rig.post(CHAT, &chat("Hello")).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let record = rig.record_of(&answer).await;
    assert_eq!(record["shadows"], json!([{"plugin": "answers", "answer": 403}, {"plugin": "traps", "failed": "trap"}]));
    assert!(record["failed_policies"].is_null());
    assert_eq!(rig.metric("turnstile_plugin_faults_total", &[("plugin", "traps"), ("kind", "trap")]).await, 1.0);
    until("it is quarantined", async || {
        assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200);
        plugin(&rig, "traps").await["state"] == "quarantined"
    })
    .await;
    assert_eq!(rig.gateway().generation.load().number, 1);
}

fn canary(of: &str, percent: u32, more: &str) -> String {
    format!("canary = {{ of = {of:?}, percent = {percent}, max_decision_ms = 60000.0{more} }}")
}

/// The turn of a session whose conversation has grown so far.
fn turn(session: usize, number: usize) -> Value {
    let said = |n: usize| format!("Session {session}, turn {n}. {}", "All of this is said again. ".repeat(150));
    let mut body = chat("");
    body["messages"] = (0..=number).map(|n| json!({"role": "user", "content": said(n)})).collect();
    body["nvext"] = json!({"session_control": {"session_id": format!("session-{session}")}});
    body
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_stays_on_its_side_of_a_canary() {
    let plugins = chain(&[policy("stable", "route", ""), policy("next", "route", &canary("stable", 50, ""))]);
    let mut rig = Setup::new()
        .workers(2)
        .plugins(&plugins)
        .file("stable.wasm", writing(&[("route.target", "#0")]).wasm())
        .file("next.wasm", writing(&[("route.target", "#1")]).wasm())
        .start()
        .await;
    let sides = async |rig: &Rig| {
        let mut sides = BTreeMap::new();
        for session in 0..30 {
            let answer = rig.explain(CHAT, &turn(session, 0)).await;
            let by_canary = answer.header("x-turnstile-canary") == Some("next");
            // Who decides can be seen by where it goes.
            let worker = &rig.workers[usize::from(by_canary)];
            assert_eq!(answer.header("x-turnstile-worker"), Some(worker.id().as_str()));
            assert_eq!(rig.record_of(&answer).await["canaries"], if by_canary { json!(["next"]) } else { Value::Null });
            sides.insert(session, by_canary);
        }
        sides
    };
    let first = sides(&rig).await;
    assert_eq!(first.values().collect::<BTreeSet<_>>().len(), 2, "{first:?}");
    assert_eq!(sides(&rig).await, first);
    // With a larger share, those that were on it stay there.
    let more = policy("next", "route", &canary("stable", 90, ""));
    rig.edit(|setup| setup.set_plugins(&chain(&[policy("stable", "route", ""), more])));
    rig.generation(2).await;
    let then = sides(&rig).await;
    assert!(first.iter().all(|(session, by_canary)| !by_canary || then[session]), "{first:?} {then:?}");
    // Without the key the new one decides for all: it is promoted.
    rig.edit(|setup| setup.set_plugins(&chain(&[policy("next", "route", "")])));
    rig.generation(3).await;
    let answer = rig.explain(CHAT, &turn(0, 0)).await;
    assert_eq!(answer.header("x-turnstile-worker"), Some(rig.workers[1].id().as_str()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_canary_that_fails_is_set_aside_and_a_reset_is_a_new_try() {
    let log = logs();
    let plugins = chain(&[policy("next", "route", &canary("kv-affinity", 100, ""))]);
    let mut rig =
        Setup::new().plugins(&plugins).file("next.wasm", Guest::on_request("unreachable").wasm()).start().await;
    for _ in 0..2 {
        until("it is set aside", async || {
            let answer = rig.post(CHAT, &chat("Hello")).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            !plugin(&rig, "next").await["canary"]["aside"].is_null()
        })
        .await;
        let facts = plugin(&rig, "next").await;
        assert_eq!((&facts["canary"]["aside"]["cause"], &facts["canary"]["faults"]), (&json!("faults"), &json!(3)));
        assert_eq!(rig.metric("turnstile_canary_aside", &[("plugin", "next")]).await, 1.0);
        assert!(log.has(&["canary set aside", "plugin=next", "3 faults, max_faults is 3"]));
        // The other one decides, and the canary is not entered.
        let calls = plugin(&rig, "next").await["calls"].clone();
        let answer = rig.post(CHAT, &chat("Hello")).await;
        let record = rig.record_of(&answer).await;
        assert!(record["failed_policies"].is_null() && record["canaries"].is_null(), "{record}");
        assert_eq!(plugin(&rig, "next").await["calls"], calls);
        // A reload that leaves it as it was leaves it aside.
        let bytes = format!("\"{}KiB\"", 64 + rig.gateway().generation.load().number);
        let next = rig.gateway().generation.load().number + 1;
        rig.edit_key("limits.body_bytes", &bytes);
        rig.generation(next).await;
        assert_eq!(rig.metric("turnstile_canary_aside", &[("plugin", "next")]).await, 1.0);
        let reset = post_admin(&rig, "/plugins/next/reset").await.json();
        assert_eq!(reset["released"], true);
        assert_eq!(rig.metric("turnstile_canary_aside", &[("plugin", "next")]).await, 0.0);
    }
    let labels = [("plugin", "next"), ("cause", "faults")];
    assert_eq!(rig.metric("turnstile_canaries_set_aside_total", &labels).await, 2.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_canary_in_a_crash_loop_takes_no_generation_with_it() {
    let text = policy("next", "route", &canary("kv-affinity", 100, ", max_faults = 1000000"));
    let mut rig = Setup::new().file("next.wasm", Guest::on_request("unreachable").wasm()).start().await;
    rig.edit(|setup| setup.set_plugins(&chain(&[text.clone().key("crash_limit = 2")])));
    rig.generation(2).await;
    until("it is quarantined", async || {
        assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200);
        plugin(&rig, "next").await["state"] == "quarantined"
    })
    .await;
    assert_eq!(rig.gateway().generation.load().number, 2);
    let answer = rig.post(CHAT, &chat("Hello")).await;
    assert!(rig.record_of(&answer).await["failed_policies"].is_null(), "the other one decides");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_canary_that_loses_cache_hits_is_set_aside() {
    // Every other turn goes to the other worker, whatever is cached where.
    let losing = Guest::on_request(
        "(global.set $turn (i32.add (global.get $turn) (i32.const 1)))
         (drop (call $set_property (i32.const 100) (i32.const 12)
           (i32.add (i32.const 120) (i32.mul (i32.const 2) (i32.and (global.get $turn) (i32.const 1)))) (i32.const 2)))",
    )
    .also(
        r##"(global $turn (mut i32) (i32.const 0))
            (data (i32.const 100) "route.target") (data (i32.const 120) "#0#1")"##,
    );
    let keys = canary("kv-affinity", 50, ", min_turns = 12, max_ttft_ratio = 1000.0");
    let rig = Setup::new()
        .sim(|c| c.enable_cache_report = true)
        .workers(2)
        .plugins(&chain(&[policy("next", "route", &(keys + "\ninstances = 1"))]))
        .file("next.wasm", losing.wasm())
        .start()
        .await;
    let mut sessions = 0;
    until("it is set aside", async || {
        sessions += 1;
        for number in 0..4 {
            assert_eq!(rig.post(CHAT, &turn(sessions, number)).await.status, 200);
        }
        !plugin(&rig, "next").await["canary"]["aside"].is_null()
    })
    .await;
    let facts = plugin(&rig, "next").await["canary"].clone();
    assert_eq!(facts["aside"]["cause"], "cached_loss", "{facts}");
    assert!(facts["rest"]["cached_ratio"].as_f64() > facts["canary"]["cached_ratio"].as_f64(), "{facts}");
    assert!(facts["rest"]["turns"].as_f64() >= Some(12.0) && facts["canary"]["turns"].as_f64() >= Some(12.0));
    for side in ["canary", "rest"] {
        let turns = rig.metric("turnstile_canary_turns_total", &[("plugin", "next"), ("side", side)]).await;
        assert!(turns >= 12.0, "{side}: {turns}");
    }
}
