//! Configuration and policies change under running streams, and bad ones change nothing.

use crate::higress::probe;
use crate::traffic::{Traffic, prompt};
use serde_json::json;
use std::sync::Arc;
use turnstile_tests::harness::{
    Answer, CHAT, PluginText, Request, Rig, Setup, WorkerExt, built_in, chat, logs, module, send, swap, until,
};

pub fn policy_file() -> PluginText {
    PluginText::new("extra", "extra.wasm", "route")
}

pub fn chain(margin_ms: u32) -> Vec<PluginText> {
    let [queue, binding, affinity] = built_in();
    vec![queue, binding, policy_file(), affinity.key(format!("config.margin_ms = {margin_ms}"))]
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_and_policies_change_while_32_streams_run_and_none_is_hurt() {
    let log = logs();
    let mut rig = Setup::new()
        .sim(|c| c.speed = 20.0)
        .workers(3)
        .pool("default", "", &[0, 1])
        .file("extra.wasm", std::fs::read(module("tenant-labels")).unwrap())
        .plugins(&chain(50))
        .start()
        .await;
    let mut traffic = Traffic::start(&rig, usize::MAX).await;
    traffic.goes_on().await;

    rig.edit(|setup| setup.set_pool_workers("default", &[1, 2]));
    rig.generation(2).await;
    traffic.goes_on().await;

    rig.edit(|setup| setup.set_plugins(&chain(75)));
    rig.generation(3).await;
    traffic.goes_on().await;

    swap(&rig.dir().join("extra.wasm"), std::fs::read(module("kv-affinity")).unwrap());
    rig.generation(4).await;
    traffic.goes_on().await;

    // A module that does not start, and a file that does not parse: nothing changes.
    swap(&rig.dir().join("extra.wasm"), b"no module");
    rig.until_metric("turnstile_reloads_total", &[("result", "failed")], 1.0).await;
    traffic.goes_on().await;
    swap(&rig.dir().join("extra.wasm"), std::fs::read(module("tenant-labels")).unwrap());
    rig.generation(5).await;
    traffic.goes_on().await;
    let turns = traffic.end().await;

    assert!(!rig.workers[2].on(CHAT).is_empty(), "the new worker serves");
    let served = rig.access_log_of(turns).await;
    assert!(served.iter().all(|line| line["status"] == 200 && line["attempts"] == 1));
    for generation in 1..=5 {
        assert!(served.iter().any(|line| line["generation"] == generation), "generation {generation}");
    }
    assert_eq!(rig.metric("turnstile_generation", &[]).await, 5.0);
    assert_eq!(rig.metric("turnstile_reloads_total", &[("result", "ok")]).await, 4.0);
    for generation in ["generation=2", "generation=3", "generation=4", "generation=5"] {
        assert!(log.has(&["new generation serves", generation]), "{generation}");
    }
    let label = rig.workers[0].id();
    until("the old worker is gone", async || !rig.admin("/workers").await.text().contains(&label)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_ends_on_the_generation_and_worker_it_began_with() {
    let mut rig = Setup::new().workers(2).pool("default", "", &[0]).start().await;
    rig.workers[0].hold().await;
    let mut connection = rig.begin(&Request::json(CHAT, &prompt(1))).await;
    until("it is on its worker", async || rig.workers[0].on(CHAT).len() == 1).await;
    rig.edit(|setup| setup.set_pool_workers("default", &[1]));
    rig.generation(2).await;
    assert_eq!(rig.post(CHAT, &chat("new")).await.status, 200);
    assert_eq!(rig.workers[1].on(CHAT).len(), 1);
    rig.workers[0].release().await;
    let answer = connection.answer().await;
    assert!(answer.complete && answer.events().last().unwrap() == "[DONE]");
    assert_eq!(rig.record_of(&answer).await["generation"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_plugins_that_are_gone_have_left_is_forgotten_once_no_rollback_can_bring_them_back() {
    let program = |name: &str| {
        probe(
            name,
            "on configure\n  - set_shared_data k v 0\n  - register_shared_queue q\n  - define_metric counter kept\n",
        )
    };
    let chain = |n: usize| -> Vec<PluginText> {
        let own = program(&format!("own-{n}")).key(format!("vm_id = \"own-{n}\""));
        std::iter::once(own).chain(built_in()).collect()
    };
    let mut rig = Setup::new().plugins(&chain(0)).start().await;
    let shared = Arc::clone(&rig.gateway().foundation.shared);
    let spaces = || -> Vec<String> {
        let all = shared.data.usage().into_iter().map(|(space, _)| space).filter(|space| space.starts_with("own-"));
        all.collect()
    };
    for n in 1..=20 {
        rig.edit(|setup| setup.set_plugins(&chain(n)));
        rig.generation(n as u64 + 1).await;
        // Those to go back to, what serves and served last, and what a plugin on probation would go back to.
        until("no more is kept", async || spaces().len() <= 11).await;
    }
    let kept = spaces();
    assert!(kept.contains(&"own-20".to_owned()) && kept.contains(&"own-12".to_owned()), "{kept:?}");
    assert!(!kept.contains(&"own-5".to_owned()), "{kept:?}");
    assert_eq!((shared.queues.resolve("own-5", b"q"), shared.queues.resolve("own-20", b"q").is_some()), (None, true));
    let metrics = shared.metrics.snapshot();
    assert!(metrics.iter().all(|metric| *metric.plugin != *"own-5") && metrics.iter().any(|m| *m.plugin == *"own-20"));
}

pub async fn reload(rig: &Rig) -> Answer {
    send(rig.admin_addr(), &Request::new("POST", "/reload")).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_file_changes_nothing_and_is_reported_everywhere() {
    let log = logs();
    let mut rig = Setup::new().start().await;
    rig.edit_key("retry.atempts_of_this_test", "3");
    rig.until_metric("turnstile_reloads_total", &[("result", "failed")], 1.0).await;
    let answer = reload(&rig).await;
    let message = answer.error()["message"].as_str().unwrap().to_owned();
    assert_eq!(answer.status, 400);
    assert!(
        message.contains("turnstile.toml:") && message.contains("retry.atempts_of_this_test: unknown key"),
        "{message}"
    );
    assert!(log.has(&["reload failed", "retry.atempts_of_this_test"]));
    let config = rig.admin("/config").await.json();
    assert_eq!((&config["generation"], config["last_reload_error"].as_str()), (&json!(1), Some(message.as_str())));
    assert_eq!(rig.metric("turnstile_generation", &[]).await, 1.0);
    assert_eq!(rig.post(CHAT, &chat("still there")).await.status, 200);
    // Mended, the error is forgotten.
    rig.edit(|setup| *setup = std::mem::take(setup).without("retry.atempts_of_this_test").set("retry.attempts", "2"));
    rig.generation(2).await;
    until("no error", async || rig.admin("/config").await.json()["last_reload_error"].is_null()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_refuses_its_configuration_keeps_the_old_one() {
    let [queue, binding, affinity] = built_in();
    let with = |key: &str| [queue.clone(), binding.clone(), affinity.clone().key(key)];
    let mut rig = Setup::new().plugins(&with("config.margin_ms = 1")).start().await;
    for bad in ["config.margin_ms = -1", "config.margin = 1"] {
        rig.edit(|setup| setup.set_plugins(&with(bad)));
        let answer = reload(&rig).await;
        assert_eq!(answer.status, 400, "{}", answer.text());
        assert!(answer.text().contains("kv-affinity"), "{}", answer.text());
    }
    assert_eq!(rig.gateway().generation.load().number, 1);
    assert_eq!(rig.post(CHAT, &chat("still there")).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn sighup_and_the_admin_listener_reload_at_once() {
    let mut rig = Setup::new().start().await;
    assert!(!rig.running().reload().await.unwrap().changed, "nothing changed");
    let same = reload(&rig).await.json();
    assert_eq!((&same["changed"], &same["generation"]), (&json!(false), &json!(1)));
    // The watch may be faster; either way the new generation serves when the answer is there.
    rig.edit_key("limits.body_bytes", "\"4KiB\"");
    assert_eq!(rig.running().reload().await.unwrap().generation, 2);
    assert_eq!(rig.post(CHAT, &chat(&"a".repeat(5000))).await.status, 413);
    rig.edit_key("limits.body_bytes", "\"8KiB\"");
    assert_eq!(reload(&rig).await.json()["generation"], 3);
    assert_eq!(rig.post(CHAT, &chat(&"a".repeat(5000))).await.status, 200);
    rig.edit_key("no.such.table", "1");
    assert!(rig.running().reload().await.unwrap_err().contains("no: unknown key"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_key_for_the_workers_is_used_after_a_reload() {
    let rig = Setup::new()
        .workers(1)
        .pool("default", "api_key = { file = \"key\" }", &[0])
        .file("key", "old-key\n")
        .start()
        .await;
    let used = async || {
        assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200);
        rig.worker().on(CHAT).last().unwrap().headers["authorization"].clone()
    };
    assert_eq!(used().await, "Bearer old-key");
    swap(&rig.dir().join("key"), "new-key\n");
    assert_eq!(rig.running().reload().await.unwrap().generation, 2);
    assert_eq!(used().await, "Bearer new-key");
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_that_need_a_restart_are_named() {
    let log = logs();
    let mut rig = Setup::new().start().await;
    rig.edit_key("limits.side_queue", "7");
    let answer = reload(&rig).await.json();
    // The watch may have been faster: then the answer tells of no change, and the log has the key all the same.
    assert!(answer["changed"] == false || answer["restart_needed"] == json!(["limits.side_queue"]), "{answer}");
    assert!(log.has(&["takes effect after a restart only", "limits.side_queue"]));
    assert_eq!(rig.gateway().generation.load().number, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_of_a_worker_taken_off_the_list_are_closed_and_go_on_elsewhere() {
    let mut rig =
        Setup::new().sim(|c| c.enable_session_radix_cache = true).workers(2).pool("default", "", &[0]).start().await;
    let mut body = chat("Hello");
    body["nvext"] = json!({"session_control": {"session_id": "s", "action": "open"}});
    assert_eq!(rig.post(CHAT, &body).await.status, 200);
    rig.edit(|setup| setup.set_pool_workers("default", &[1]));
    rig.generation(2).await;
    until("the close", async || rig.workers[0].on("/close_session").len() == 1).await;
    rig.ready().await;
    body["nvext"] = json!({"session_control": {"session_id": "s"}});
    assert_eq!(rig.post(CHAT, &body).await.status, 200);
    assert!(rig.workers[1].on(CHAT)[0].json()["session_id"].is_string());
}

#[tokio::test(flavor = "multi_thread")]
async fn no_turn_is_refused_while_all_workers_are_exchanged_for_new_ones() {
    const CLIENTS: usize = 4;
    let mut rig = Setup::new().workers(4).pool("default", "", &[0, 1]).start().await;
    for generation in 2..22 {
        let workers = if generation % 2 == 0 { [2, 3] } else { [0, 1] };
        rig.edit(|setup| setup.set_pool_workers("default", &workers));
        let turns = async || {
            until("the generation", async || {
                let answer = rig.post(CHAT, &chat("Hello")).await;
                assert_eq!(answer.status, 200, "while {generation} comes: {}", answer.text());
                rig.gateway().generation.load().number >= generation
            })
            .await;
        };
        futures::future::join_all((0..CLIENTS).map(|_| turns())).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_that_wait_stay_in_the_queue_over_a_reload() {
    let mut rig = Setup::new().set("admission.max_in_flight_per_worker", "1").start().await;
    rig.worker().hold().await;
    let mut first = rig.begin(&Request::json(CHAT, &chat("first"))).await;
    until("in flight", async || rig.in_flight() == 1).await;
    let mut second = rig.begin(&Request::json(CHAT, &chat("second"))).await;
    rig.until_queued(1).await;
    // The reload brings the room that the turn waits for.
    rig.edit_key("admission.max_in_flight_per_worker", "2");
    rig.generation(2).await;
    until("it is let through", async || rig.worker().on(CHAT).len() == 2).await;
    rig.worker().release().await;
    assert_eq!((first.answer().await.status, second.answer().await.status), (200, 200));
}
