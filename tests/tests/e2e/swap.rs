//! Policies and configuration are swapped all the time, and no turn notices.

use crate::reload::{chain, reload};
use crate::traffic::{STREAMS, Traffic};
use sha2::{Digest, Sha256};
use std::time::{Duration, Instant};
use tokio::time::{MissedTickBehavior, interval};
use turnstile_tests::harness::{
    CHAT, Guest, PluginText, Request, Setup, WorkerExt, built_in, chat_stream, module, swap, until,
};
use turnstile_tests::process::{open_files, resident_bytes};

const TURNS: usize = 1000;

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_streaming_turns_through_a_reload_every_200_ms_are_neither_failed_nor_altered() {
    let modules = ["kv-affinity", "tenant-labels"].map(|name| std::fs::read(module(name)).unwrap());
    let mut rig = Setup::new()
        .sim(|c| c.speed = 20.0)
        .workers(3)
        .pool("default", "", &[0, 1, 2])
        .file("extra.wasm", modules[1].clone())
        .plugins(&chain(50))
        .start()
        .await;
    let mut traffic = Traffic::start(&rig, TURNS).await;
    let mut ticks = interval(Duration::from_millis(200));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut configurations, mut policies) = (0, 0);
    while traffic.served() < TURNS {
        ticks.tick().await;
        traffic.check();
        if configurations <= policies {
            configurations += 1;
            rig.edit(|setup| setup.set_plugins(&chain(50 + configurations)));
        } else {
            swap(&rig.dir().join("extra.wasm"), &modules[policies as usize % 2]);
            policies += 1;
        }
        // The watch may have been faster; either way the change serves when this is answered.
        let answer = reload(&rig).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    let turns = traffic.end().await;
    let changes = f64::from(configurations + policies);
    assert_eq!(rig.metric("turnstile_reloads_total", &[("result", "ok")]).await, changes);
    assert_eq!(rig.metric("turnstile_reloads_total", &[("result", "failed")]).await, 0.0);
    assert!(configurations > 2 && policies > 2, "{configurations} {policies}");
    let log = rig.access_log_of(turns).await;
    assert_eq!(log.len(), turns);
    assert!(log.iter().all(|line| line["status"] == 200 && line["attempts"] == 1 && line["end"] == "finished"));
    let generations: std::collections::BTreeSet<u64> =
        log.iter().filter_map(|line| line["generation"].as_u64()).collect();
    println!(
        "{TURNS} streaming turns at {STREAMS} at once, {changes} reloads ({configurations} of the configuration, {policies} of a \
         policy's module), served by {} generations: 0 failed, 0 altered",
        generations.len()
    );
}

/// Swaps of a module, where `SWAPS` does not say otherwise.
const SWAPS: usize = 300;
/// From so many on, what the process holds at the end is compared with what it held after three tenths of them.
const SWAPS_FOR_MEMORY: usize = 1000;
/// How much more memory that may be.
const GROWTH: u64 = 24 << 20;

/// A policy that does what policies do outside of turns: ticks, shared data, a queue, a metric. Each has a digest of its own.
fn good(number: usize) -> Vec<u8> {
    Guest::on_request(
        "(drop (call $get_shared (i32.const 100) (i32.const 1) (i32.const 200) (i32.const 204) (i32.const 208)))",
    )
    .also(&format!(
        r#"(data (i32.const 100) "kqm{number:03}")
               (func (export "proxy_on_configure") (param i32 i32) (result i32)
                 (drop (call $set_tick (i32.const 20)))
                 (drop (call $set_shared (i32.const 100) (i32.const 1) (i32.const 103) (i32.const 3) (i32.const 0)))
                 (drop (call $register_queue (i32.const 101) (i32.const 1) (i32.const 200)))
                 (drop (call $define_metric (i32.const 0) (i32.const 102) (i32.const 1) (i32.const 200)))
                 (i32.const 1))
               (func (export "proxy_on_tick") (param i32)
                 (drop (call $enqueue (i32.const 1) (i32.const 103) (i32.const 3))))"#
    ))
    .wasm()
}

/// Modules that must not go live, with a part of the reason.
fn bad() -> Vec<(Vec<u8>, &'static str)> {
    let configure = |body: &str| {
        Guest::new(&format!(r#"(func (export "proxy_on_configure") (param i32 i32) (result i32) {body})"#)).wasm()
    };
    let whole = good(0);
    vec![
        (whole[..whole.len() / 2].to_vec(), "unexpected end-of-file"),
        (Vec::new(), "(compile)"),
        (b"no module at all".to_vec(), "magic header"),
        (Guest::new("").marker("proxy_abi_version_9_9_9").wasm(), "(ABI version)"),
        (Guest::new("").import(r#"(import "env" "proxy_make_coffee" (func))"#).wasm(), "proxy_make_coffee"),
        (Guest::new("").import(r#"(import "env" "proxy_done" (func (param i64)))"#).wasm(), "proxy_done"),
        (Guest::new("").without_memory().wasm(), "(instantiate)"),
        (Guest::new(r#"(func (export "_initialize") unreachable)"#).wasm(), "(initialize)"),
        (
            Guest::new(r#"(func (export "proxy_on_vm_start") (param i32 i32) (result i32) (i32.const 0))"#).wasm(),
            "proxy_on_vm_start returned false",
        ),
        (configure("(i32.const 0)"), "proxy_on_configure returned false"),
        (configure("unreachable"), "(configure): "),
        (configure("(loop $on (br $on)) (i32.const 1)"), "(configure): "),
        (
            configure(
                "(loop $on (if (i32.eq (memory.grow (i32.const 64)) (i32.const -1)) (then unreachable)) (br $on)) (i32.const 1)",
            ),
            "(configure): ",
        ),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn swaps_under_load_with_a_bad_module_in_ten_fail_no_stream_and_leave_nothing_behind() {
    let swaps = std::env::var("SWAPS").map_or(SWAPS, |text| text.parse().expect("SWAPS is a number"));
    let mut modules: Vec<Vec<u8>> = (0..12).map(good).collect();
    modules.extend(["tenant-labels", "kv-affinity"].map(|name| std::fs::read(module(name)).unwrap()));
    let bad = bad();
    let [queue, binding, affinity] = built_in();
    let extra = crate::reload::policy_file().key("callback_timeout_ms = 60000").key("configure_timeout_ms = 1000");
    let rig = Setup::new()
        .sim(|c| {
            c.speed = 20.0;
            // What the workers remember of their requests is no memory of the gateway's.
            c.record_limit = 100;
        })
        .workers(3)
        .file("extra.wasm", modules[0].clone())
        .plugins(&[queue, binding, extra, affinity])
        .start()
        .await;
    let digest = |wasm: &[u8]| Sha256::digest(wasm).iter().map(|b| format!("{b:02x}")).collect::<String>();
    let serves = || {
        let generation = rig.gateway().generation.load();
        generation.chain.iter().find(|c| &*c.name == "extra").unwrap().digest.clone()
    };
    let (file, own) = (rig.dir().join("extra.wasm"), std::process::id());
    let held = || (resident_bytes(own).unwrap(), open_files(own).unwrap());
    let mut traffic = Traffic::start(&rig, usize::MAX).await;
    traffic.goes_on().await;
    let (began, mut current, mut refused) = (Instant::now(), digest(&modules[0]), 0);
    let mut seen = Vec::new();
    for number in 1..=swaps {
        if number % 10 == 0 {
            let (wasm, reason) = &bad[refused % bad.len()];
            refused += 1;
            swap(&file, wasm);
            let answer = reload(&rig).await;
            assert_eq!(answer.status, 400, "{reason}: {}", answer.text());
            let message = answer.error()["message"].as_str().unwrap().to_owned();
            assert!(message.contains("extra.wasm") && message.contains(reason), "{reason}: {message}");
        } else {
            let wasm = &modules[number % modules.len()];
            current = digest(wasm);
            swap(&file, wasm);
            let answer = reload(&rig).await;
            assert_eq!(answer.status, 200, "{number}: {}", answer.text());
        }
        assert_eq!(serves(), current, "swap {number}");
        traffic.check();
        if number % (swaps / 10).max(1) == 0 {
            seen.push(held());
        }
    }
    let took = began.elapsed();
    let served = traffic.served();
    traffic.end().await;
    assert!(served > 2 * STREAMS);
    rig.idle().await;
    // The one that serves, and the one that could come back.
    until("old generations are gone", async || rig.metric("turnstile_generations_alive", &[]).await <= 2.0).await;
    assert_eq!(rig.metric("turnstile_plugin_faults_total", &[]).await, 0.0);
    assert_eq!(rig.metric("turnstile_plugin_rollbacks_total", &[]).await, 0.0);
    println!(
        "{swaps} swaps in {:.1} s, {refused} of them refused, {served} streaming turns at {STREAMS} at once meanwhile: 0 failed, 0 \
         altered; tenth by tenth {:?} MiB of memory, {:?} open files",
        took.as_secs_f64(),
        seen.iter().map(|(bytes, _)| bytes >> 20).collect::<Vec<_>>(),
        seen.iter().map(|(_, files)| files).collect::<Vec<_>>(),
    );
    if swaps >= SWAPS_FOR_MEMORY {
        // Pools and caches fill in the first third.
        let (early, late) = (seen[2], seen[seen.len() - 1]);
        assert!(late.0 <= early.0 + GROWTH, "memory grew from {} to {} bytes", early.0, late.0);
        assert!(late.1 <= early.1 + 16, "open files grew from {} to {}", early.1, late.1);
    }
}

/// A filter that takes four MiB at its start.
fn heavy(number: u8) -> Vec<u8> {
    Guest::on_request("")
        .also(&format!(
            r#"(data (i32.const 100) "{number}")
               (func (export "proxy_on_configure") (param i32 i32) (result i32)
                 (drop (memory.grow (i32.const 64))) (i32.const 1))"#
        ))
        .wasm()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_plugin_lives_as_long_as_its_last_stream_and_no_longer() {
    const MEMORY: f64 = (64 << 16) as f64;
    let plugin = PluginText::new("heavy", "heavy.wasm", "filter").key("callback_timeout_ms = 60000");
    let all: Vec<PluginText> = std::iter::once(plugin).chain(built_in()).collect();
    let rig = Setup::new().file("heavy.wasm", heavy(1)).plugins(&all).start().await;
    let swapped = async |number| {
        swap(&rig.dir().join("heavy.wasm"), heavy(number));
        assert_eq!(reload(&rig).await.status, 200);
    };
    let start = async || {
        let page = rig.admin("/plugins").await.json();
        page["plugins"].as_array().unwrap().iter().find(|p| p["name"] == "heavy").unwrap()["start"].clone()
    };
    let old = async |start: &serde_json::Value| {
        let page = rig.admin("/plugins").await.json();
        page["old"].as_array().unwrap().iter().find(|p| p["start"] == *start).cloned()
    };
    let gauge = async |name: &str, age: &str| rig.metric(name, &[("plugin", "heavy"), ("age", age)]).await;
    // The first is kept to come back, so it is the second that has to go.
    let first = start().await;
    swapped(2).await;
    let second = start().await;
    rig.worker().hold().await;
    let mut stream = rig.begin(&Request::json(CHAT, &chat_stream("Hello"))).await;
    until("the stream is on its way", async || rig.in_flight() == 1).await;
    swapped(3).await;
    let third = start().await;
    assert!(first != second && second != third);
    let shown = old(&second).await.expect("its stream runs");
    assert_eq!(shown["instances"], 1, "{shown}");
    assert!(shown["memory_bytes"].as_f64().unwrap() > MEMORY, "{shown}");
    assert!(old(&first).await.is_some() && old(&third).await.is_none());
    assert_eq!(gauge("turnstile_plugin_instances", "current").await, 1.0);
    assert_eq!(gauge("turnstile_plugin_instances", "old").await, 2.0);
    assert!(gauge("turnstile_plugin_memory_bytes", "old").await > 2.0 * MEMORY);
    rig.worker().release().await;
    let answer = stream.answer().await;
    assert!(answer.complete && answer.status == 200);
    until("the second has gone", async || old(&second).await.is_none()).await;
    assert_eq!(gauge("turnstile_plugin_instances", "old").await, 1.0);
    assert!(gauge("turnstile_plugin_memory_bytes", "old").await < 2.0 * MEMORY);
    assert_eq!(gauge("turnstile_plugin_instances", "current").await, 1.0);
}
