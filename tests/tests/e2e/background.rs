//! Plugins without streams, and what plugins of one virtual machine share.

use crate::events::told;
use serde_json::json;
use turnstile_tests::harness::{CHAT, Guest, PluginText, Setup, built_in, chat, logs, swap, until};

/// A plugin that writes a value into its shared data with every tick, and logs whatever it hears of requests.
fn writer(value: &str) -> Guest {
    let text = format!("key{value}stream context{value} ends");
    let [stream, ends] = [100 + 3 + value.len(), 100 + 3 + value.len() + 14];
    let (len, ends_len) = (value.len(), value.len() + 5);
    Guest::on_request("unreachable").data(100, text.as_bytes()).also(&format!(
        r#"(func (export "proxy_on_context_create") (param i32 i32)
             (if (local.get 1) (then (drop (call $log (i32.const 2) (i32.const {stream}) (i32.const 14))))))
           (func (export "proxy_on_configure") (param i32 i32) (result i32)
             (drop (call $set_tick (i32.const 20))) (i32.const 1))
           (func (export "proxy_on_tick") (param i32)
             (drop (call $log (i32.const 2) (i32.const 103) (i32.const {len})))
             (drop (call $set_shared (i32.const 100) (i32.const 3) (i32.const 103) (i32.const {len}) (i32.const 0))))
           (func (export "proxy_on_log") (param i32) unreachable)
           (func (export "proxy_on_delete") (param i32)
             (drop (call $log (i32.const 2) (i32.const {ends}) (i32.const {ends_len}))))"#
    ))
}

/// A policy that notes what it finds in its shared data.
fn reader() -> Guest {
    let name = "turnstile.log.found";
    Guest::on_request(&format!(
        "(if (i32.eqz (call $get_shared (i32.const 100) (i32.const 3) (i32.const 200) (i32.const 204) (i32.const 208)))
           (then (drop (call $set_property (i32.const 300) (i32.const {}) (i32.load (i32.const 200)) (i32.load (i32.const 204))))))",
        name.len()
    ))
    .data(100, b"key")
    .data(300, name.as_bytes())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_of_the_background_has_ticks_and_no_streams_and_is_swapped_like_any() {
    logs();
    let [queue, binding, affinity] = built_in();
    let writes = PluginText::new("writes-aside", "writer.wasm", "background").key("vm_id = \"board\"");
    let reads = PluginText::new("reads-board", "reader.wasm", "route").key("vm_id = \"board\"");
    let other = PluginText::new("reads-own", "reader.wasm", "route");
    let rig = Setup::new()
        .set("threads", "2")
        .file("writer.wasm", writer("one").wasm())
        .file("reader.wasm", reader().wasm())
        .plugins(&[queue, writes, binding, reads, other, affinity])
        .start()
        .await;
    let found = async |value: &str| {
        let answer = rig.post(CHAT, &chat("Hello")).await;
        assert_eq!(answer.status, 200);
        rig.record_of(&answer).await["notes"] == json!([["found", value]])
    };
    // Only who shares the name space finds what was written.
    until("it has ticked", async || found("one").await).await;
    let plugins = rig.admin("/plugins").await.json();
    let shown = plugins["plugins"].as_array().unwrap().iter().find(|shown| shown["name"] == "writes-aside").unwrap();
    assert_eq!((&shown["phase"], &shown["instances"]), (&json!("background"), &json!(1)), "{shown}");

    swap(&rig.dir().join("writer.wasm"), writer("two").wasm());
    rig.generation(2).await;
    until("the new one has ticked", async || found("two").await).await;
    // The generation before is kept for a rollback, and its plugin for the background is at rest meanwhile.
    let since_swap = || told("writes-aside").into_iter().skip_while(|line| line != "two").collect::<Vec<_>>();
    until("the new one goes on", async || since_swap().len() >= 5).await;
    assert!(since_swap().iter().all(|line| line == "two"), "{:?}", since_swap());
    assert!(told("writes-aside").iter().all(|line| line == "one" || line == "two"), "{:?}", told("writes-aside"));
    assert_eq!(rig.metric("turnstile_plugin_faults_total", &[("plugin", "writes-aside")]).await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_of_the_environment_or_the_virtual_machine_starts_the_plugin_anew() {
    logs();
    // It logs how many variables there are, and the size of its configuration, when it starts.
    let guest = Guest::on_request("")
        .import(r#"(import "wasi_snapshot_preview1" "environ_sizes_get" (func $environ (param i32 i32) (result i32)))"#)
        .also(
            r#"(func (export "proxy_on_vm_start") (param i32 i32) (result i32)
                 (drop (call $environ (i32.const 4096) (i32.const 4100)))
                 (call $digits (i32.add (i32.mul (i32.load (i32.const 4096)) (i32.const 100)) (local.get 1)))
                 (drop (call $log (i32.const 2) (i32.const 1024) (i32.const 8)))
                 (i32.const 1))"#,
        );
    let [queue, binding, affinity] = built_in();
    let chain = |keys: &str| {
        let plugin = PluginText::new("environs", "guest.wasm", "route").key("instances = 1").key(keys);
        [queue.clone(), binding.clone(), plugin, affinity.clone()]
    };
    let mut rig = Setup::new().file("guest.wasm", guest.wasm()).plugins(&chain("")).start().await;
    let changes = [
        ("environment = { A = \"1\" }", "00000100"),
        ("environment = { A = \"1\", B = \"\" }", "00000200"),
        ("environment = { A = \"2\", B = \"\" }", "00000200"),
        ("vm_configuration = \"hello\"", "00000005"),
        ("vm_configuration = \"hello\"\nvm_id = \"another\"", "00000005"),
    ];
    let mut expected = vec!["00000000".to_owned()];
    for (at, (keys, line)) in changes.into_iter().enumerate() {
        rig.edit(|setup| setup.set_plugins(&chain(keys)));
        rig.generation(at as u64 + 2).await;
        expected.push(line.to_owned());
        assert_eq!(told("environs"), expected, "{keys}");
    }
}
