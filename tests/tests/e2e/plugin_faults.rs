//! Plugins that misbehave: whatever they do, turns are served as `on_error` says, faults are counted by kind, and nothing
//! grows without bound. Modules that are no good are refused and change nothing.

use serde_json::{Value, json};
use std::os::unix::net::UnixListener;
use std::path::Path;
use turnstile_tests::harness::{
    CHAT, Guest, PluginText, Request, Rig, Setup, WorkerExt, built_in, chat, chat_stream, send, swap, until,
};

/// A plugin with a file of its own beside the configuration and time for its calls whatever the machine is doing.
fn plugin(name: &str, file: &str, phase: &'static str) -> PluginText {
    PluginText::new(name, file, phase).key("callback_timeout_ms = 60000")
}

fn with(plugins: &[PluginText]) -> Setup {
    let [queue, binding, affinity] = built_in();
    let mut all = plugins.to_vec();
    all.extend([queue, binding, affinity]);
    Setup::new().plugins(&all)
}

async fn facts_of(rig: &Rig, plugin: &str) -> Value {
    let list = rig.admin("/plugins").await.json();
    list["plugins"].as_array().unwrap().iter().find(|p| p["name"] == plugin).unwrap().clone()
}

fn asking(what: &str) -> Request {
    Request::json(CHAT, &chat("Hello")).header("x-do", what)
}

// === faults in a callback ===

/// What a plugin does when it is told to, and the kind of fault that it is.
fn misdeeds() -> Vec<(&'static str, Guest, &'static str)> {
    let told = |deed: &str| Guest::on_request(&format!("(if (call $told) (then {deed}))"));
    let recursion = r#"(func $recurse (param i32) (result i32)
        (i32.add (call $recurse (i32.add (local.get 0) (i32.const 1))) (call $recurse (local.get 0))))"#;
    let spoilt = r#"(global $spoilt (mut i32) (i32.const 0))
        (func (export "proxy_on_memory_allocate") (param i32) (result i32)
          (select (i32.const 0x7fffff00) (call $allocate (local.get 0)) (global.get $spoilt)))"#;
    vec![
        ("a trap", told("unreachable"), "trap"),
        ("an endless loop", told("(loop $forever (br $forever))"), "deadline"),
        (
            "memory without end",
            told("(loop $eat (if (i32.eq (memory.grow (i32.const 8)) (i32.const -1)) (then unreachable)) (br $eat))"),
            "memory",
        ),
        ("recursion without end", told("(drop (call $recurse (i32.const 0)))").also(recursion), "stack"),
        ("an exit", told("(call $exit (i32.const 3))"), "exit"),
        (
            "an allocator that hands out what is not there",
            told("(global.set $spoilt (i32.const 1)) (drop (call $asked))").allocator(spoilt),
            "allocator",
        ),
        ("a division by zero", told("(drop (i32.div_u (i32.const 1) (i32.const 0)))"), "trap"),
        ("a read outside of its memory", told("(drop (i32.load (i32.const -4)))"), "trap"),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn whatever_a_plugin_does_its_turn_ends_as_on_error_says_and_the_next_is_served() {
    let chain = [
        ("a", "filter", "closed", 500),
        ("b", "filter", "open", 200),
        ("c", "admit", "closed", 500),
        ("d", "admit", "fallback", 200),
        ("e", "route", "closed", 500),
        ("f", "route", "open", 200),
        ("g", "route", "fallback", 200),
    ];
    for (deed, guest, kind) in misdeeds() {
        let plugins = chain.map(|(name, phase, on_error, _)| {
            let plugin = PluginText::new(name, "guest.wasm", phase).key(format!("on_error = {on_error:?}"));
            let timeout = if kind == "deadline" { 300 } else { 60_000 };
            plugin.key("memory_mib = 4").key(format!("callback_timeout_ms = {timeout}"))
        });
        let rig = with(&plugins).file("guest.wasm", guest.wasm()).start().await;
        for (name, phase, on_error, status) in chain {
            let what = format!("{deed} in {name}, {phase}, {on_error}");
            let answer = rig.send(&asking(name)).await;
            assert_eq!(answer.status, status, "{what}: {}", answer.text());
            if status == 500 {
                assert_eq!(answer.error()["code"], "plugin_failed", "{what}");
                assert!(!answer.text().contains("wasm"), "the plugin's words are for the log: {}", answer.text());
            } else if phase != "filter" {
                assert_eq!(rig.record_of(&answer).await["failed_policies"], json!([name]), "{what}");
            }
            until(&format!("{what}: a fresh instance"), async || {
                rig.post(CHAT, &chat("Hello")).await.status == 200
                    && facts_of(&rig, name).await["healthy_instances"] == 1
            })
            .await;
            let faults = facts_of(&rig, name).await["faults"].clone();
            assert_eq!(faults[kind], 1, "{what}: {faults}");
            let labels = [("plugin", name), ("kind", kind)];
            assert_eq!(rig.metric("turnstile_plugin_faults_total", &labels).await, 1.0, "{what}");
        }
        for (name, ..) in chain {
            let facts = facts_of(&rig, name).await;
            assert_eq!((&facts["state"], &facts["restarts"]), (&json!("serving"), &json!(1)), "{deed}: {name}");
            let most = facts["memory_high_water_bytes"].as_u64().unwrap();
            assert!(most <= 4 << 20, "{deed}: {name} had {most} bytes");
        }
        rig.idle().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tick_that_traps_hurts_no_turn() {
    let guest = Guest::new(
        r#"(func (export "proxy_on_configure") (param i32 i32) (result i32) (drop (call $set_tick (i32.const 1))) (i32.const 1))
           (func (export "proxy_on_tick") (param i32) unreachable)
           (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (i32.const 0))"#,
    );
    let plugin = plugin("ticker", "guest.wasm", "filter").key("on_error = \"open\"").key("crash_limit = 0");
    let rig = with(&[plugin]).file("guest.wasm", guest.wasm()).start().await;
    until("it has trapped again and again", async || {
        assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200);
        facts_of(&rig, "ticker").await["faults"]["trap"].as_u64().is_some_and(|traps| traps >= 3)
    })
    .await;
    assert!(facts_of(&rig, "ticker").await["crashes_in_a_row"].as_u64().unwrap() >= 2);
    assert_eq!(
        rig.metric("turnstile_plugin_quarantined", &[("plugin", "ticker")]).await,
        0.0,
        "it may, with a limit of 0"
    );
}

// === modules that are no good ===

/// Files that are no plugin, and what the refusal must say.
fn bad_modules() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let whole = Guest::on_request("").wasm();
    let guest = |body: &str| Guest::new(body).wasm();
    let configure =
        |body: &str| guest(&format!(r#"(func (export "proxy_on_configure") (param i32 i32) (result i32) {body})"#));
    vec![
        ("empty", Vec::new(), "compile"),
        ("cut short", whole[..whole.len() - 7].to_vec(), "compile"),
        ("only its head", whole[..8].to_vec(), "not a Proxy-Wasm module"),
        ("text", b"(module)".to_vec(), "compile"),
        ("random bytes", (0..4096_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect(), "compile"),
        ("a native program", std::fs::read(std::env::current_exe().unwrap()).unwrap()[..4096].to_vec(), "compile"),
        ("no version", wat::parse_str(r#"(module (memory (export "memory") 1))"#).unwrap(), "not a Proxy-Wasm module"),
        ("a version to come", Guest::on_request("").marker("proxy_abi_version_9_9_9").wasm(), "9_9_9"),
        ("no memory", Guest::on_request("").without_memory().wasm(), "no memory"),
        (
            "an unknown import",
            Guest::new("").import(r#"(import "env" "proxy_teleport" (func (param i32)))"#).wasm(),
            "unknown import env.proxy_teleport",
        ),
        (
            "an import of another type",
            Guest::new("").import(r#"(import "env" "proxy_done" (func (param i64)))"#).wasm(),
            "env.proxy_done has type",
        ),
        ("an export of another type", guest(r#"(func (export "proxy_on_log") (param i64))"#), "proxy_on_log"),
        ("it refuses its configuration", configure("(i32.const 0)"), "refuses its configuration"),
        ("it traps in its configuration", configure("unreachable"), "configure"),
        ("it never ends its configuration", configure("(loop $l (br $l)) (i32.const 1)"), "interrupt"),
        ("its start function traps", guest("(func $s unreachable) (start $s)"), "instantiate"),
        ("it exits at once", guest("(func $s (call $exit (i32.const 0))) (start $s)"), "proc_exit(0)"),
        ("it wants too much at once", guest(r#"(table 1000000 funcref)"#), "table"),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_module_that_is_no_good_is_named_and_changes_nothing() {
    let extra = |file: &str| plugin("extra", file, "route").key("configure_timeout_ms = 1000").key("memory_mib = 4");
    let chain = |file: &str| built_in().into_iter().chain([extra(file)]).collect::<Vec<_>>();
    let mut rig =
        Setup::new().file("good.wasm", Guest::on_request("").wasm()).plugins(&chain("good.wasm")).start().await;
    let mut refused = Vec::new();
    for (n, (case, bytes, words)) in bad_modules().into_iter().enumerate() {
        let file = format!("bad-{n}.wasm");
        std::fs::write(rig.dir().join(&file), bytes).unwrap();
        refused.push((case, file, words));
    }
    for (case, file, words) in [
        ("it is not there", "missing.wasm", "cannot read"),
        ("a directory", "directory.wasm", "is not a"),
        ("a socket", "socket.wasm", "is not a"),
        ("a device without end", "device.wasm", "is not a"),
        ("larger than any module", "large.wasm", "larger than"),
    ] {
        refused.push((case, file.to_owned(), words));
    }
    std::fs::create_dir(rig.dir().join("directory.wasm")).unwrap();
    let _socket = UnixListener::bind(rig.dir().join("socket.wasm")).unwrap();
    std::os::unix::fs::symlink(Path::new("/dev/zero"), rig.dir().join("device.wasm")).unwrap();
    std::fs::File::create(rig.dir().join("large.wasm")).unwrap().set_len(1 << 40).unwrap();

    for (case, file, words) in &refused {
        rig.edit(|setup| setup.set_plugins(&chain(file)));
        let answer = send(rig.admin_addr(), &Request::new("POST", "/reload")).await;
        let message = answer.error()["message"].as_str().unwrap_or_default().to_owned();
        assert_eq!(answer.status, 400, "{case}");
        assert!(message.contains("extra") || message.contains("plugins[3].wasm"), "{case}: {message}");
        assert!(message.contains(file.as_str()), "{case}: {message}");
        assert!(message.contains(words), "{case}: {message}");
        assert_eq!(rig.gateway().generation.load().number, 1, "{case}");
        assert_eq!(rig.post(CHAT, &chat("still there")).await.status, 200, "{case}");
    }
    assert!(rig.metric("turnstile_reloads_total", &[("result", "failed")]).await >= refused.len() as f64);
    rig.edit(|setup| setup.set_plugins(&chain("good.wasm")));
    assert_eq!(send(rig.admin_addr(), &Request::new("POST", "/reload")).await.status, 200);
    assert_eq!(facts_of(&rig, "extra").await["state"], "serving");
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_are_served_while_a_plugin_takes_long_to_start_and_its_file_changes_meanwhile() {
    // Counts to two hundred million: a good while, the longer the busier the machine.
    let slow = Guest::new(
        r#"(func (export "proxy_on_configure") (param i32 i32) (result i32) (local $n i32)
             (loop $count
               (local.set $n (i32.add (local.get $n) (i32.const 1)))
               (br_if $count (i32.lt_u (local.get $n) (i32.const 200000000))))
             (i32.const 1))
           (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (i32.const 0))"#,
    );
    let extra = plugin("extra", "extra.wasm", "route").key("configure_timeout_ms = 600000");
    let first = Guest::on_request("").wasm();
    let rig = with(&[extra]).file("extra.wasm", first).start().await;
    let path = rig.dir().join("extra.wasm");
    let digest = async || facts_of(&rig, "extra").await["sha256"].clone();
    let before = digest().await;
    swap(&path, slow.wasm());
    let turns = async {
        for _ in 0..20 {
            assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200);
        }
        swap(&path, Guest::on_request("(drop (i32.const 1))").wasm());
    };
    let (reloaded, ()) = tokio::join!(rig.running().reload(), turns);
    reloaded.unwrap();
    let last = async || {
        let now = digest().await;
        now != before && rig.running().reload().await.is_ok_and(|done| !done.changed)
    };
    until("what the file holds now serves", last).await;
    let calls = facts_of(&rig, "extra").await;
    assert_eq!(calls["state"], "serving");
}

// === floods ===

#[tokio::test(flavor = "multi_thread")]
async fn what_a_plugin_pours_out_is_bounded() {
    // Each counts upward and gives every step a name of its own.
    let each = |limit: u32, step: &str| {
        format!(
            "(loop $more (call $digits (local.get $n)) {step}
               (local.set $n (i32.add (local.get $n) (i32.const 1)))
               (br_if $more (i32.lt_u (local.get $n) (i32.const {limit}))))"
        )
    };
    let name = "(i32.const 1024) (i32.const 8)";
    let large = "(i32.const 4096) (i32.const 60000)";
    let floods = [
        ("logs", each(20_000, &format!("(drop (call $log (i32.const 2) {name}))"))),
        ("metrics", each(5_000, &format!("(drop (call $define_metric (i32.const 0) {name} (i32.const 2000)))"))),
        ("properties", each(5_000, &format!("(drop (call $set_property {name} {large}))"))),
        ("shared", each(5_000, &format!("(drop (call $set_shared {name} {large} (i32.const 0)))"))),
        ("queues", each(5_000, &format!("(drop (call $register_queue {name} (i32.const 2000)))"))),
        (
            "items",
            each(
                5_000,
                &format!(
                    "(drop (call $register_queue (i32.const 3000) (i32.const 4) (i32.const 2000)))
                     (drop (call $enqueue (i32.load (i32.const 2000)) {large}))"
                ),
            ),
        ),
    ];
    for phase in ["filter", "route"] {
        let plugins = floods
            .each_ref()
            .map(|(name, _)| plugin(name, &format!("{name}.wasm"), phase).key("log_per_s = 50").key("crash_limit = 0"));
        let mut setup = with(&plugins);
        for (name, body) in &floods {
            setup = setup.file(&format!("{name}.wasm"), Guest::on_request(body).wasm());
        }
        let rig = setup.start().await;
        for _ in 0..2 {
            assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200);
        }
        let shared = &rig.gateway().foundation.shared;
        let own = "turnstile_plugin_custom{plugin=\"metrics\"";
        let custom = rig.metrics().await.text().lines().filter(|line| line.starts_with(own)).count();
        assert_eq!(custom, 512, "{phase}: metrics of the plugin's own");
        for (space, bytes) in shared.data.usage() {
            assert!(bytes <= 64 << 20, "{phase}: {space} holds {bytes} bytes");
        }
        assert!(facts_of(&rig, "logs").await["log_lines_dropped"].as_u64().unwrap() > 30_000);
        for (name, _) in &floods {
            assert_eq!(facts_of(&rig, name).await["faults"], json!({}), "{phase}: {name} is no fault");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_without_end_are_bounded_and_the_next_turn_is_untouched() {
    // One header more on every step. What is over the bound is dropped; the worker takes or refuses the rest.
    let flood = Guest::on_request(
        "(if (call $told) (then (loop $more (call $digits (local.get $n))
           (drop (call $add_header (i32.const 0) (i32.const 1024) (i32.const 8) (i32.const 4096) (i32.const 0)))
           (local.set $n (i32.add (local.get $n) (i32.const 1)))
           (br_if $more (i32.lt_u (local.get $n) (i32.const 3000))))))",
    );
    let rig = with(&[plugin("flood", "guest.wasm", "filter")]).file("guest.wasm", flood.wasm()).start().await;
    let answer = rig.send(&asking("flood")).await;
    assert!([200, 400, 431, 500, 502].contains(&answer.status), "{}: {}", answer.status, answer.text());
    rig.worker().clear_requests();
    assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200);
    assert!(rig.worker().on(CHAT)[0].headers.keys().all(|name| !name.as_str().starts_with('0')));
    assert_eq!(facts_of(&rig, "flood").await["state"], "serving");
}

#[tokio::test(flavor = "multi_thread")]
async fn decisions_without_sense_are_dropped_by_cause_and_the_built_in_decides() {
    let cases: &[(&str, &str, &str)] = &[
        ("route.target", "nobody:1", "unknown_worker"),
        ("route.target", "#4294967295", "unknown_worker"),
        ("route.fallbacks", "a,,b,#", "unknown_worker"),
        ("route.scores", "{\\22nobody\\22: NaN}", "bad_value"),
        ("route.scores", "[[[[[[[[[[[[[[[[[[[[", "bad_value"),
        ("queue.priority", "NaN", "bad_number"),
        ("queue.priority", "inf", "bad_number"),
        ("queue.tier", "-1", "bad_number"),
        ("queue.deadline_ms", "99999999999", "out_of_range"),
        ("session.ttl_s", "-5", "out_of_range"),
        ("session.action", "explode", "bad_value"),
        ("session.mode", "\\ff\\fe", "bad_value"),
        ("prefill", "maybe", "bad_value"),
        ("engine.priority", "1e400", "bad_number"),
        ("no.such.thing", "1", "unknown_name"),
        ("request.model", "mine", "unknown_name"),
    ];
    let mut body = String::new();
    let mut data = String::new();
    let mut at = 4096;
    for (name, value, _) in cases {
        let value_len = wat_len(value);
        data.push_str(&format!("(data (i32.const {at}) \"turnstile.{name}{value}\")\n"));
        let name_len = "turnstile.".len() + name.len();
        let value_at = at + name_len;
        body.push_str(&format!(
            "(drop (call $set_property (i32.const {at}) (i32.const {name_len}) (i32.const {value_at}) (i32.const {value_len})))\n"
        ));
        at = value_at + value_len + 8;
    }
    let guest = Guest::on_request(&body).also(&data);
    let rig = with(&[plugin("senseless", "guest.wasm", "route")]).workers(2).file("guest.wasm", guest.wasm());
    let rig = rig.start().await;
    let answer = rig.post(CHAT, &chat("Hello")).await;
    assert_eq!(answer.status, 200);
    assert!(rig.record_of(&answer).await.get("failed_policies").is_none(), "a bad decision is no fault");
    let metrics = rig.metrics().await;
    let mut causes: Vec<&str> = cases.iter().map(|(.., cause)| *cause).collect();
    causes.sort_unstable();
    causes.dedup();
    let mut counted = 0.0;
    for cause in causes {
        let wanted = cases.iter().filter(|(.., c)| *c == cause).count() as f64;
        let labels = [("plugin", "senseless"), ("cause", cause)];
        assert_eq!(metrics.sum("turnstile_decision_faults_total", &labels), wanted, "{cause}");
        counted += wanted;
    }
    assert_eq!(metrics.sum("turnstile_decision_faults_total", &[("plugin", "senseless")]), counted);
}

/// Bytes of a text as the WebAssembly text format writes it.
fn wat_len(text: &str) -> usize {
    text.len() - 2 * text.matches('\\').count()
}

// === nothing of one request is visible to another ===

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_one_request_is_seen_by_the_next() {
    // `r` remembers: copies the secret into its memory, sets it as a property and header; `t` does so and traps. Every other
    // request tells what it finds in the property and in the memory.
    let guest = Guest::new(
        r#"
        (data (i32.const 100) "x-secret")
        (data (i32.const 110) "note")
        (data (i32.const 120) "x-found")
        (data (i32.const 130) "x-memory")
        (data (i32.const 140) "nothing")
        (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
          (local $asked i32)
          (local.set $asked (call $asked))
          (if (i32.or (i32.eq (local.get $asked) (i32.const 114)) (i32.eq (local.get $asked) (i32.const 116)))
            (then
              (drop (call $get_header (i32.const 0) (i32.const 100) (i32.const 8) (i32.const 2000) (i32.const 2004)))
              (i64.store (i32.const 8192) (i64.load (i32.load (i32.const 2000))))
              (drop (call $set_property (i32.const 110) (i32.const 4) (i32.const 8192) (i32.const 8)))
              (drop (call $add_header (i32.const 0) (i32.const 120) (i32.const 7) (i32.const 8192) (i32.const 8)))))
          (if (i32.eq (local.get $asked) (i32.const 116)) (then unreachable))
          (if (i32.eqz (local.get $asked))
            (then
              (if (call $get_property (i32.const 110) (i32.const 4) (i32.const 2000) (i32.const 2004))
                (then (drop (call $add_header (i32.const 0) (i32.const 120) (i32.const 7) (i32.const 140) (i32.const 7))))
                (else (drop (call $add_header (i32.const 0) (i32.const 120) (i32.const 7)
                  (i32.load (i32.const 2000)) (i32.load (i32.const 2004))))))
              (if (i64.eqz (i64.load (i32.const 8192)))
                (then (drop (call $add_header (i32.const 0) (i32.const 130) (i32.const 8) (i32.const 140) (i32.const 7))))
                (else (drop (call $add_header (i32.const 0) (i32.const 130) (i32.const 8) (i32.const 8192) (i32.const 8)))))))
          (i32.const 0))
        "#,
    );
    let rig = with(&[plugin("keeper", "guest.wasm", "filter")]).file("guest.wasm", guest.wasm()).start().await;
    let seen = async || {
        rig.worker().clear_requests();
        until("a healthy instance", async || rig.post(CHAT, &chat_stream("Hello")).await.status == 200).await;
        rig.worker().on(CHAT).last().unwrap().headers.clone()
    };
    let found = |headers: &http::HeaderMap| headers["x-found"].to_str().unwrap().to_owned();
    let kept = |headers: &http::HeaderMap| headers["x-memory"].to_str().unwrap().to_owned();
    let clean = seen().await;
    assert_eq!((found(&clean), kept(&clean)), ("nothing".to_owned(), "nothing".to_owned()));

    let secret = |what: &str| asking(what).header("x-secret", "alphabet");
    assert_eq!(rig.send(&secret("r")).await.status, 200);
    assert_eq!(rig.worker().on(CHAT).last().unwrap().headers["x-found"], "alphabet");
    let after = seen().await;
    assert_eq!(after["x-found"], "nothing", "a property ends with its request");
    assert_eq!(after["x-memory"], "alphabet", "what a plugin keeps in its own memory is its own affair");
    assert!(!after.contains_key("x-secret"));

    assert_eq!(rig.send(&secret("t")).await.status, 500);
    let fresh = seen().await;
    assert_eq!(
        (found(&fresh), kept(&fresh)),
        ("nothing".to_owned(), "nothing".to_owned()),
        "a new instance knows nothing"
    );
    assert!(!fresh.contains_key("x-secret"));
    assert_eq!(facts_of(&rig, "keeper").await["restarts"], 1);
}
