//! Policies of the phases `admit` and `route`: what they decide is done, and their faults hurt nobody.

use serde_json::json;
use turnstile_tests::harness::{CHAT, PluginText, Request, Setup, WorkerExt, built_in, chat, chat_with, module, until};

fn file(name: &str, phase: &'static str) -> PluginText {
    let short = name.rsplit('/').next().unwrap();
    PluginText::new(short, module(name).display().to_string(), phase)
}

/// The built-in chain with more policies before the one that chooses a worker.
fn with(more: &[PluginText]) -> Setup {
    let [queue, binding, affinity] = built_in();
    let mut all = vec![queue, binding];
    all.extend_from_slice(more);
    all.push(affinity);
    Setup::new().plugins(&all)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_users_policy_sends_a_tenants_turns_to_labelled_workers() {
    let rules = r#"config = { header = "x-team", strict = true, rules = [
        { tenant = "research", labels = { gpu = "h200" } }, { tenant = "ghosts", labels = { gpu = "none" } } ] }"#;
    let rig = with(&[file("tenant-labels", "route").key(rules)])
        .workers(3)
        .pool("default", "", &[0, 1, 2])
        .worker_keys(0, "labels = { gpu = \"l40s\" }")
        .worker_keys(1, "labels = { gpu = \"h200\" }")
        .worker_keys(2, "labels = { gpu = \"l40s\" }")
        .start()
        .await;
    for n in 0..6 {
        let request = Request::json(CHAT, &chat(&format!("turn {n}"))).header("x-team", "research");
        assert_eq!(rig.send(&request).await.status, 200);
    }
    assert_eq!(rig.workers[1].on(CHAT).len(), 6);
    let strict = rig.send(&Request::json(CHAT, &chat("Hello")).header("x-team", "ghosts")).await;
    assert_eq!((strict.status, &strict.error()["code"]), (503, &json!("no_worker")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_route_policy_that_traps_falls_back_to_the_native_decision() {
    let rig = with(&[file("test/hello", "route")]).workers(2).start().await;
    for _ in 0..3 {
        let answer = rig.send(&Request::json(CHAT, &chat("Hello")).header("x-trap", "1")).await;
        assert_eq!(answer.status, 200);
        assert_eq!(rig.record_of(&answer).await["failed_policies"], json!(["hello"]));
    }
    until("a fresh instance", async || {
        let answer = rig.post(CHAT, &chat("Hello")).await;
        rig.record_of(&answer).await.get("failed_policies").is_none()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_route_policy_that_never_returns_falls_back_too() {
    let rig = with(&[file("test/hello", "route").key("callback_timeout_ms = 300")]).start().await;
    let answer = rig.send(&Request::json(CHAT, &chat("Hello")).header("x-loop", "1")).await;
    assert_eq!(answer.status, 200);
    assert_eq!(rig.record_of(&answer).await["failed_policies"], json!(["hello"]));
    rig.until_metric("turnstile_plugin_faults_total", &[("plugin", "hello"), ("kind", "deadline")], 1.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_traps_refuses_the_turn_when_closed() {
    for phase in ["admit", "route"] {
        let rig = with(&[file("test/hello", phase).key("on_error = \"closed\"")]).start().await;
        let answer = rig.send(&Request::json(CHAT, &chat("Hello")).header("x-trap", "1")).await;
        assert_eq!((answer.status, &answer.error()["code"]), (500, &json!("plugin_failed")), "{phase}");
        rig.idle().await;
        assert!(rig.worker().turns().is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_answers_in_a_workers_place() {
    for phase in ["admit", "route"] {
        let rig = with(&[file("test/hello", phase)]).start().await;
        let answer = rig.send(&Request::json(CHAT, &chat("Hello")).header("x-block", "1")).await;
        assert_eq!((answer.status, answer.text().as_str()), (403, "blocked by hello\n"), "{phase}");
        rig.idle().await;
        assert!(rig.worker().turns().is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_any_policy_the_native_decisions_serve() {
    let rig = Setup::new().sim(|c| c.enable_session_radix_cache = true).workers(2).plugins(&[]).set("plugins", "[]");
    let rig = rig.start().await;
    let nvext = json!({"session_control": {"session_id": "s", "action": "open"}, "agent_hints": {"priority": 4}});
    let first = rig.explain(CHAT, &chat_with("Hello", nvext)).await;
    assert_eq!(first.header("x-turnstile-session"), Some("tag"));
    let worker = rig.worker_by_id(first.header("x-turnstile-worker").unwrap());
    assert_eq!(worker.on(CHAT)[0].json()["priority"], 4);
    for n in 0..4 {
        let nvext = json!({"session_control": {"session_id": "s"}});
        let answer = rig.explain(CHAT, &chat_with(&format!("turn {n}"), nvext)).await;
        assert_eq!(answer.header("x-turnstile-worker"), first.header("x-turnstile-worker"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policys_configuration_reaches_it() {
    let [queue, binding, affinity] = built_in();
    let queue = queue.key("config = { engine_levels = [-10, 0, 10], max_tier = 1 }");
    let rig = Setup::new().plugins(&[queue, binding, affinity]).start().await;
    for (asked, sent) in [(3, 0), (7, 10), (-90, -10)] {
        rig.worker().clear_requests();
        rig.post(CHAT, &chat_with("Hello", json!({"agent_hints": {"priority": asked}}))).await;
        assert_eq!(rig.worker().on(CHAT)[0].json()["priority"], sent, "{asked}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_that_share_a_prefix_gather_where_it_is_cached() {
    let rig = Setup::new().workers(4).start().await;
    let shared = "the same long system prompt. ".repeat(400);
    let mut body = chat("Hello");
    let mut places = std::collections::BTreeSet::new();
    for n in 0..6 {
        body["messages"] = json!([{"role": "system", "content": shared}, {"role": "user", "content": format!("{n}")}]);
        let answer = rig.explain(CHAT, &body).await;
        places.insert(answer.header("x-turnstile-worker").unwrap().to_owned());
        let reported: u64 = answer.header("x-turnstile-cached-tokens").unwrap().parse().unwrap();
        let estimated: u64 = answer.header("x-turnstile-cached-estimate").unwrap().parse().unwrap();
        assert_eq!((estimated > 500, reported > 500), (n > 0, n > 0), "{n}: {estimated} {reported}");
        // What is cached there is known once the turn has ended.
        rig.settled().await;
    }
    assert_eq!(places.len(), 1);
    let worker = places.first().unwrap();
    assert!(rig.metric("turnstile_decisions_total", &[("worker", worker), ("reason", "cached")]).await >= 5.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn load_goes_where_there_is_room() {
    // Our own counts decide alone: reports of the two workers come at different times.
    let never = "3600000";
    let setup = Setup::new().workers(2).set("routing.load_interval_ms", never).set("routing.probe_interval_ms", never);
    let rig = setup.start().await;
    for worker in &rig.workers {
        worker.hold().await;
    }
    let mut held = Vec::new();
    for n in 0..8 {
        held.push(rig.begin(&Request::json(CHAT, &chat(&format!("{n} unlike the others")))).await);
        until("placed", async || rig.in_flight() == n + 1).await;
    }
    until("all there", async || rig.workers.iter().map(|w| w.turns().len()).sum::<usize>() == 8).await;
    assert!(rig.workers.iter().all(|worker| worker.turns().len() == 4), "an even share for each");
    for worker in &rig.workers {
        worker.release().await;
    }
    for mut connection in held {
        assert_eq!(connection.answer().await.status, 200);
    }
}
