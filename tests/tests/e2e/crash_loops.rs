//! Plugins that crash again and again: the generation that brought one is taken back, any other is quarantined, and both
//! can be undone.

use serde_json::{Value, json};
use std::time::Duration;
use turnstile_tests::harness::{
    Answer, CHAT, Guest, PluginText, Request, Rig, Setup, built_in, chat, logs, send, swap, until,
};

/// A filter that adds the header `x-seen` to requests.
fn good() -> Guest {
    Guest::on_request(
        "(drop (call $add_header (i32.const 0) (i32.const 100) (i32.const 6) (i32.const 110) (i32.const 3)))",
    )
    .also(r#"(data (i32.const 100) "x-seen") (data (i32.const 110) "yes")"#)
}

/// One that traps on every request.
fn bad() -> Guest {
    Guest::on_request("unreachable")
}

fn extra(on_error: &str) -> PluginText {
    let plugin = PluginText::new("extra", "extra.wasm", "filter").key("callback_timeout_ms = 60000");
    plugin.key(format!("on_error = {on_error:?}")).key("crash_limit = 2")
}

fn setup(on_error: &str, module: &Guest) -> Setup {
    let plugins: Vec<PluginText> = std::iter::once(extra(on_error)).chain(built_in()).collect();
    Setup::new().plugins(&plugins).file("extra.wasm", module.wasm())
}

async fn plugins(rig: &Rig) -> Value {
    rig.admin("/plugins").await.json()
}

async fn state(rig: &Rig) -> Value {
    let list = plugins(rig).await;
    list["plugins"].as_array().unwrap().iter().find(|p| p["name"] == "extra").unwrap()["state"].clone()
}

/// The generation that was restored serves before everything is told of that.
async fn until_told(rig: &Rig) {
    until("it is told", async || !plugins(rig).await["taken_back"].is_null()).await;
}

async fn post_admin(rig: &Rig, path: &str) -> Answer {
    send(rig.admin_addr(), &Request::new("POST", path)).await
}

/// Sends turns until something has happened; with `on_error = "open"` each is served.
async fn turns_until(rig: &Rig, what: &str, happened: impl AsyncFn() -> bool) {
    until(what, async || {
        assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200, "until {what}");
        happened().await
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_generation_whose_new_plugin_crashes_in_a_loop_is_taken_back() {
    let log = logs();
    let mut rig = setup("open", &good()).start().await;
    let old = plugins(&rig).await["plugins"][0]["sha256"].clone();
    // Another change comes with it, and goes with it.
    rig.edit_key("limits.body_bytes", "\"4KiB\"");
    rig.generation(2).await;
    swap(&rig.dir().join("extra.wasm"), bad().wasm());
    rig.generation(3).await;
    turns_until(&rig, "it is taken back", async || rig.gateway().generation.load().number == 4).await;
    until_told(&rig).await;

    // What serves is what served before the plugin came.
    let facts = plugins(&rig).await;
    assert_eq!(facts["plugins"][0]["sha256"], old);
    assert_eq!(facts["plugins"][0]["state"], "serving");
    let taken = &facts["taken_back"];
    assert_eq!(
        (&taken["generation"], &taken["restored_from"], &taken["restored_as"]),
        (&json!(3), &json!(2), &json!(4))
    );
    assert_eq!((&taken["plugin"], taken["crashes"].as_u64() >= Some(2)), (&json!("extra"), true));
    assert_eq!((facts["refused"].as_array().unwrap().len(), &facts["refused"][0]["plugin"]), (1, &json!("extra")));
    assert_eq!(rig.post(CHAT, &chat(&"a".repeat(5000))).await.status, 413, "the configuration of generation 2");
    assert_eq!(rig.metric("turnstile_plugin_rollbacks_total", &[("plugin", "extra")]).await, 1.0);
    assert!(rig.metric("turnstile_plugin_faults_total", &[("plugin", "extra"), ("kind", "trap")]).await >= 2.0);
    assert_eq!(rig.metric("turnstile_generation", &[]).await, 4.0);
    assert!(log.has(&["generation taken back", "plugin=extra", "taken_back=3", "restored=2"]));
    let error = rig.admin("/config").await.json()["last_reload_error"].as_str().unwrap().to_owned();
    assert!(error.contains("generation 3 was taken back") && error.contains("extra"), "{error}");

    // It stays away until it changes, whatever else is changed.
    for change in [None, Some("\"3KiB\"")] {
        if let Some(size) = change {
            rig.edit_key("limits.body_bytes", size);
        }
        let answer = post_admin(&rig, "/reload").await;
        assert_eq!(answer.status, 400, "{}", answer.text());
        assert!(
            answer.text().contains("crashed in a loop") && answer.text().contains("extra.wasm"),
            "{}",
            answer.text()
        );
        assert_eq!(rig.gateway().generation.load().number, 4);
    }
    assert_eq!(rig.metric("turnstile_plugin_rollbacks_total", &[]).await, 1.0, "no flapping");
    swap(&rig.dir().join("extra.wasm"), good().also("(global i32 (i32.const 1))").wasm());
    rig.generation(5).await;
    assert_eq!(state(&rig).await, "serving");
    assert_eq!(rig.post(CHAT, &chat(&"a".repeat(5000))).await.status, 413);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_module_may_come_again_after_a_reset_or_with_another_configuration() {
    let mut rig = setup("open", &good()).start().await;
    swap(&rig.dir().join("extra.wasm"), bad().wasm());
    rig.generation(2).await;
    turns_until(&rig, "it is taken back", async || rig.gateway().generation.load().number == 3).await;
    assert_eq!(post_admin(&rig, "/reload").await.status, 400);
    let reset = post_admin(&rig, "/plugins/extra/reset").await;
    assert_eq!((reset.status, reset.json()), (200, json!({"released": false, "allowed_again": 1})));
    assert_eq!(post_admin(&rig, "/reload").await.status, 200);
    rig.generation(4).await;
    turns_until(&rig, "it is taken back again", async || rig.gateway().generation.load().number == 5).await;
    // The same module with another configuration is another plugin.
    let changed = extra("open").key("config.mode = \"careful\"");
    rig.edit(|setup| setup.set_plugins(&std::iter::once(changed).chain(built_in()).collect::<Vec<_>>()));
    rig.generation(6).await;
    assert_eq!(plugins(&rig).await["plugins"][0]["config"], json!({"mode": "careful"}));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_that_traps_in_its_ticks_is_taken_back_without_a_request() {
    let ticking = Guest::new(
        r#"(func (export "proxy_on_configure") (param i32 i32) (result i32) (drop (call $set_tick (i32.const 1))) (i32.const 1))
           (func (export "proxy_on_tick") (param i32) unreachable)"#,
    );
    let rig = setup("closed", &good()).start().await;
    swap(&rig.dir().join("extra.wasm"), ticking.wasm());
    rig.generation(3).await;
    until_told(&rig).await;
    let taken = plugins(&rig).await["taken_back"].clone();
    assert_eq!((&taken["generation"], &taken["restored_from"]), (&json!(2), &json!(1)));
    assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_generation_to_go_back_to_the_plugin_is_quarantined_and_a_reset_ends_that() {
    let log = logs();
    for (on_error, status) in [("open", 200), ("closed", 500)] {
        let rig = setup(on_error, &bad()).start().await;
        until("it is quarantined", async || {
            rig.post(CHAT, &chat("Hello")).await;
            state(&rig).await == "quarantined"
        })
        .await;
        assert_eq!(rig.gateway().generation.load().number, 1);
        assert_eq!(rig.metric("turnstile_plugin_quarantined", &[("plugin", "extra")]).await, 1.0);
        let told = format!("on_error=\"{on_error}\"");
        until("it is told", async || log.has(&["plugin quarantined", "plugin=extra", &told])).await;
        let traps = async || rig.metric("turnstile_plugin_faults_total", &[("kind", "trap")]).await;
        let before = traps().await;
        for _ in 0..5 {
            assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, status, "{on_error}");
        }
        assert_eq!(traps().await, before, "it is not entered any more");
        assert!(rig.metric("turnstile_plugin_faults_total", &[("kind", "unavailable")]).await >= 5.0);

        let reset = post_admin(&rig, "/plugins/extra/reset").await;
        assert_eq!((reset.status, reset.json()), (200, json!({"released": true, "allowed_again": 0})));
        until("it is tried again", async || {
            rig.post(CHAT, &chat("Hello")).await;
            traps().await > before
        })
        .await;
        until("and quarantined again", async || {
            rig.post(CHAT, &chat("Hello")).await;
            state(&rig).await == "quarantined"
        })
        .await;
        // A reload is a new try for a module that is as it was, and a start for one that is not.
        assert_eq!(post_admin(&rig, "/reload").await.status, 200);
        assert_ne!(state(&rig).await, "quarantined");
        swap(&rig.dir().join("extra.wasm"), good().wasm());
        until("the mended one serves", async || {
            state(&rig).await == "serving" && rig.post(CHAT, &chat("Hello")).await.status == 200
        })
        .await;
        assert_eq!(rig.metric("turnstile_plugin_quarantined", &[]).await, 0.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_does_not_start_again_is_quarantined_and_the_built_in_decides() {
    // Configures itself once in the life of the process; traps on every request.
    let once = Guest::new(
        r#"(data (i32.const 100) "k")
           (func (export "proxy_on_configure") (param i32 i32) (result i32)
             (if (i32.eqz (call $get_shared (i32.const 100) (i32.const 1) (i32.const 200) (i32.const 204) (i32.const 208)))
               (then (return (i32.const 0))))
             (drop (call $set_shared (i32.const 100) (i32.const 1) (i32.const 100) (i32.const 1) (i32.const 0)))
             (i32.const 1))
           (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) unreachable)"#,
    );
    let policy =
        PluginText::new("once", "once.wasm", "route").key("callback_timeout_ms = 60000").key("crash_limit = 3");
    let plugins: Vec<PluginText> = std::iter::once(policy).chain(built_in()).collect();
    let rig = Setup::new().plugins(&plugins).file("once.wasm", once.wasm()).workers(2).start().await;
    let answer = rig.post(CHAT, &chat("Hello")).await;
    assert_eq!(answer.status, 200);
    assert_eq!(rig.record_of(&answer).await["failed_policies"], json!(["once"]));
    rig.until_metric("turnstile_plugin_quarantined", &[("plugin", "once")], 1.0).await;
    let facts = rig.admin("/plugins").await.json()["plugins"][0].clone();
    // Crash loops are looked for now and then: on a busy machine more restarts may have failed by then.
    assert!(facts["failed_restarts"].as_u64() >= Some(2), "{facts}");
    assert_eq!(facts["faults"]["trap"], 1);
    let answer = rig.post(CHAT, &chat("Hello")).await;
    assert_eq!(answer.status, 200);
    assert_eq!(rig.record_of(&answer).await["failed_policies"], json!(["once"]));
    // Long enough for more restarts, none of which is tried.
    let failed = async || rig.admin("/plugins").await.json()["plugins"][0]["failed_restarts"].clone();
    let before = failed().await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(failed().await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn resets_of_what_is_not_there_are_refused() {
    let rig = setup("open", &good()).start().await;
    assert_eq!(post_admin(&rig, "/plugins/nobody/reset").await.status, 404);
    assert_eq!(rig.admin("/plugins/extra/reset").await.status, 405);
    assert_eq!(post_admin(&rig, "/plugins//reset").await.status, 404);
    let healthy = post_admin(&rig, "/plugins/extra/reset").await.json();
    assert_eq!(healthy, json!({"released": false, "allowed_again": 0}));
}
