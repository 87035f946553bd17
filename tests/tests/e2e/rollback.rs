//! Going back on demand: the configuration and the plugins that served before, whatever the files hold by now.

use crate::reload::reload;
use serde_json::{Value, json};
use std::sync::Arc;
use turnstile::cli::{AdminArgs, RollbackArgs};
use turnstile::commands;
use turnstile::generation::prepare;
use turnstile::plugin_start::Modules;
use turnstile_tests::harness::{
    Answer, CHAT, Guest, PluginText, Request, Rig, Setup, built_in, chat, logs, send, swap, until,
};

/// A filter that answers every request with a header `x-version`.
fn version(letter: char) -> Vec<u8> {
    Guest::new(
        r#"(func (export "proxy_on_response_headers") (param i32 i32 i32) (result i32)
             (drop (call $add_header (i32.const 2) (i32.const 100) (i32.const 9) (i32.const 110) (i32.const 1)))
             (i32.const 0))"#,
    )
    .also(&format!(r#"(data (i32.const 100) "x-version") (data (i32.const 110) "{letter}")"#))
    .wasm()
}

fn chain(file: &str) -> Vec<PluginText> {
    let filter = PluginText::new("version", file, "filter").key("callback_timeout_ms = 60000");
    std::iter::once(filter).chain(built_in()).collect()
}

fn setup() -> Setup {
    Setup::new().plugins(&chain("a.wasm")).file("a.wasm", version('a')).file("b.wasm", version('b'))
}

async fn post(rig: &Rig, path: &str) -> Answer {
    send(rig.admin_addr(), &Request::new("POST", path)).await
}

async fn served_by(rig: &Rig) -> String {
    let answer = rig.post(CHAT, &chat("Hello")).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.header("x-version").unwrap().to_owned()
}

async fn plugins(rig: &Rig) -> Value {
    rig.admin("/plugins").await.json()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_generation_before_comes_back_and_the_files_do_not_undo_that() {
    let log = logs();
    let mut rig = setup().start().await;
    // The plugin, its file and a limit change, and then the old file is gone.
    rig.edit(|setup| {
        setup.set_plugins(&chain("b.wasm"));
        *setup = std::mem::take(setup).set("limits.body_bytes", "\"4KiB\"");
    });
    rig.generation(2).await;
    std::fs::remove_file(rig.dir().join("a.wasm")).unwrap();
    assert_eq!(served_by(&rig).await, "b");

    let answer = post(&rig, "/plugins/rollback").await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let done = answer.json();
    assert_eq!((&done["generation"], &done["restored_from"], &done["restored_as"]), (&json!(2), &json!(1), &json!(3)));
    assert_eq!(done["refused"], json!([]));
    assert_eq!(served_by(&rig).await, "a");
    assert_eq!(rig.post(CHAT, &chat(&"a".repeat(5000))).await.status, 200, "the limit of generation 1");
    assert_eq!(plugins(&rig).await["rolled_back"]["generation"], 2);
    assert_eq!(rig.admin("/config").await.json()["follows_file"], false);
    assert_eq!(rig.metric("turnstile_rollbacks_total", &[]).await, 1.0);
    assert!(log.has(&["generation rolled back", "taken_back=2", "restored=1"]));

    // As long as the files are as they were, nothing brings the other one back.
    rig.until_metric("turnstile_reloads_total", &[("result", "held")], 1.0).await;
    assert_eq!(rig.gateway().generation.load().number, 3);
    assert_eq!(served_by(&rig).await, "a");
    // There is nothing before it.
    let answer = post(&rig, "/plugins/rollback").await;
    assert_eq!(answer.status, 409);
    assert!(answer.text().contains("there is no earlier generation"), "{}", answer.text());

    // A change is followed.
    swap(&rig.dir().join("b.wasm"), version('c'));
    rig.generation(4).await;
    assert_eq!(served_by(&rig).await, "c");
    assert_eq!(rig.admin("/config").await.json()["follows_file"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reload_that_is_asked_for_brings_it_back() {
    let mut rig = setup().start().await;
    rig.edit(|setup| setup.set_plugins(&chain("b.wasm")));
    rig.generation(2).await;
    assert_eq!(post(&rig, "/plugins/rollback").await.status, 200);
    assert_eq!(served_by(&rig).await, "a");
    assert_eq!(reload(&rig).await.json()["generation"], 4);
    assert_eq!(served_by(&rig).await, "b");
    assert_eq!(post(&rig, "/plugins/rollback").await.json()["restored_from"], 3);
    assert_eq!(served_by(&rig).await, "a");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_that_was_about_to_end_serves_again() {
    let mut rig = setup().start().await;
    rig.edit(|setup| setup.set_plugins(&chain("b.wasm")));
    rig.generation(2).await;
    // Each time nothing but the probation of the other one keeps it.
    for _ in 0..40 {
        assert_eq!(post(&rig, "/plugins/rollback").await.status, 200);
        assert_eq!(served_by(&rig).await, "a");
        assert_eq!(reload(&rig).await.status, 200);
        assert_eq!(served_by(&rig).await, "b");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_comes_back_that_was_taken_over_while_its_last_generation_went() {
    let mut rig = setup().start().await;
    let first = rig.gateway().generation.load_full();
    let foundation = &rig.gateway().foundation;
    let prepared = {
        let (config, running) = ((*first.config).clone(), vec![Arc::clone(&first)]);
        tokio::task::block_in_place(|| prepare(config, foundation, &running, &Modules::Current)).unwrap()
    };
    let (plugin, alive) = (first.chain[0].plugin.clone(), Arc::downgrade(&first));
    drop(first);
    // Every plugin of it goes, and so does the generation, after the time in which it could come back.
    for file in ["b.wasm", "c.wasm"] {
        std::fs::write(rig.dir().join("c.wasm"), version('c')).unwrap();
        rig.edit(|setup| setup.set_plugins(&[PluginText::new("version", file, "filter")]));
        rig.generation(if file == "b.wasm" { 2 } else { 3 }).await;
    }
    rig.gateway().probation.end();
    assert!(alive.upgrade().is_some() && !plugin.is_shut_down(), "what was prepared keeps it");
    drop(prepared);
    until("it ends", async || plugin.is_shut_down()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_module_stays_away_until_it_is_reset() {
    let mut rig = setup().start().await;
    rig.edit(|setup| setup.set_plugins(&chain("b.wasm")));
    rig.generation(2).await;
    // By the command line this time.
    let admin = AdminArgs { admin: rig.admin_addr().to_string(), token: None };
    let asked = RollbackArgs { admin, refuse: true };
    let again = asked.clone();
    tokio::task::spawn_blocking(move || commands::rollback(&asked)).await.unwrap().unwrap();
    let error = tokio::task::spawn_blocking(move || commands::rollback(&again)).await.unwrap().unwrap_err();
    assert!(error.contains("answered 409") && error.contains("no earlier generation"), "{error}");
    assert_eq!(plugins(&rig).await["rolled_back"]["refused"], json!(["version"]));
    let answer = reload(&rig).await;
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("was refused in a rollback"), "{}", answer.text());
    assert_eq!(served_by(&rig).await, "a");
    assert_eq!(plugins(&rig).await["refused"][0]["why"], "was refused in a rollback");
    assert_eq!(post(&rig, "/plugins/version/reset").await.json()["allowed_again"], 1);
    assert_eq!(reload(&rig).await.status, 200);
    assert_eq!(served_by(&rig).await, "b");
}

#[tokio::test(flavor = "multi_thread")]
async fn rollbacks_go_further_back_each_time() {
    let mut rig = setup().start().await;
    for (generation, letter) in [(2, 'b'), (3, 'c'), (4, 'd')] {
        swap(&rig.dir().join("a.wasm"), version(letter));
        rig.generation(generation).await;
    }
    // Reloads that change nothing leave nothing to go back to.
    assert_eq!(reload(&rig).await.json()["changed"], false);
    for (restored, letter) in [(3, "c"), (2, "b"), (1, "a")] {
        let done = post(&rig, "/plugins/rollback").await.json();
        assert_eq!(done["restored_from"], restored);
        assert_eq!(served_by(&rig).await, letter);
    }
    assert_eq!(post(&rig, "/plugins/rollback").await.status, 409);
    let started = plugins(&rig).await["plugins"][1]["start"].clone();
    rig.edit_key("limits.body_bytes", "\"4KiB\"");
    rig.generation(8).await;
    assert_eq!(
        plugins(&rig).await["plugins"][1]["start"],
        started,
        "plugins that stay the same are taken over all along"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_asked_for_is_refused() {
    let rig = setup().start().await;
    assert_eq!(rig.admin("/plugins/rollback").await.status, 405);
    let answer = post(&rig, "/plugins/rollback?refused=true").await;
    assert_eq!((answer.status, answer.text().contains("refuse=true")), (400, true));
    assert_eq!(post(&rig, "/plugins/rollback?refuse=maybe").await.status, 400);
    let answer = post(&rig, "/plugins/rollback").await;
    assert_eq!(answer.status, 409);
}
