#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

use crate::{
    Admission, Busy, ByteSize, Config, Ejection, Errors, OnError, OverloadStatus, Phase, Plugin, Prefill, Routing,
    Sessions, Timeouts,
};

const MINIMAL: &str = "[[pools]]\nworkers = [\"http://10.0.0.1:30000\"]\n";

fn parse(text: &str) -> Result<Config, Errors> {
    Config::parse(text, "t.toml", Path::new("."))
}

// --- defaults

#[test]
fn one_pool_with_one_worker_is_enough() {
    let config = parse(MINIMAL).unwrap();
    assert_eq!(Config { pools: config.pools.clone(), ..Config::default() }, config);
    let [pool] = config.pools.as_slice() else { panic!("one pool") };
    assert_eq!(pool.name, "default");
    assert!(pool.takes_any_model());
    let [worker] = pool.workers.as_slice() else { panic!("one worker") };
    assert_eq!((worker.id.as_str(), worker.url.host(), worker.url.port()), ("10.0.0.1:30000", "10.0.0.1", 30000));
}

#[test]
fn defaults_are_the_documented_ones() {
    let config = parse(MINIMAL).unwrap();
    assert_eq!(config.threads, None);
    let [listener] = config.listeners.as_slice() else { panic!("one listener") };
    assert_eq!((listener.address.to_string().as_str(), listener.h2c), ("0.0.0.0:8080", true));
    assert_eq!(config.admin.address.map(|a| a.to_string()).as_deref(), Some("127.0.0.1:9180"));
    assert!(config.admin.token.is_none());
    assert_eq!(
        config.admission,
        Admission {
            max_queue: 1024,
            max_queue_bytes: ByteSize(512 << 20),
            max_wait_ms: 120_000,
            kv_high_watermark: 0.95,
            max_in_flight_per_worker: None,
            overload_status: OverloadStatus::ServiceUnavailable,
            max_head_start_s: 3600,
        }
    );
    assert_eq!(
        config.routing,
        Routing {
            block_bytes: 512,
            index_blocks_per_worker: 262_144,
            bytes_per_token: 4.0,
            probe_interval_ms: 1000,
            load_interval_ms: 250,
            probe_timeout_ms: 3000,
            unhealthy_after: 2,
            healthy_after: 1,
        }
    );
    assert_eq!(
        Sessions { id_headers: vec![], ..config.sessions.clone() },
        Sessions {
            default_timeout_s: 300,
            max_timeout_s: 86_400,
            max_sessions: 100_000,
            id_max_bytes: 256,
            stream: true,
            tag: true,
            stream_rows_fraction: 0.5,
            stream_tokens_fraction: 0.5,
            busy: Busy::Wait,
            busy_wait_ms: 30_000,
            engine_timeout_margin_s: 30,
            id_headers: vec![],
        }
    );
    assert_eq!(
        config.prefill,
        Prefill {
            enabled: true,
            per_worker: 1,
            timeout_s: 60,
            engine_priority: Some(-100),
            max_body_bytes: ByteSize(4 << 20),
            skip_when_waiting: 1,
        }
    );
    assert_eq!(
        config.timeouts,
        Timeouts {
            connect_ms: 2000,
            first_byte_s: 600,
            between_bytes_s: 300,
            total_s: 3600,
            client_head_s: 30,
            client_body_s: 60,
            client_body_total_s: 600,
            client_write_s: 60,
            client_idle_s: 75,
            upstream_idle_ms: 4000,
            side_request_s: 10,
        }
    );
    assert_eq!(config.limits.body_bytes.bytes(), 67_108_864);
    assert_eq!(config.retry.lost_workers, 2);
    assert_eq!((config.retry.attempts, config.retry.backoff_ms, config.retry.max_backoff_ms), (3, 50, 2_000));
    assert_eq!((config.retry.budget_ratio, config.retry.budget_floor_per_s), (0.2, 10));
    let ejection =
        Ejection { consecutive_faults: 5, base_ms: 10_000, max_ms: 300_000, max_share: 0.5, wedged_after_ms: 60_000 };
    assert_eq!(config.ejection, ejection);
    assert_eq!(config.warnings(), Vec::<String>::new());
}

#[test]
fn known_clients_name_their_sessions_in_known_headers() {
    let families = parse(MINIMAL).unwrap().sessions.id_headers;
    let first: Vec<_> = families.iter().take(4).map(|family| family.session.as_str()).collect();
    assert_eq!(first, ["x-dynamo-session-id", "x-claude-code-session-id", "thread-id", "x-session-id"]);
    let headers = families.iter().flat_map(|family| {
        let others = [&family.agent, &family.parent, &family.tree, &family.last, &family.with];
        others.into_iter().flatten().chain([&family.session])
    });
    for header in headers {
        assert_eq!(header.as_str().parse(), Ok(header.clone()), "the fixed names are header names");
    }
    let mut sessions: Vec<_> = families.iter().map(|family| family.session.as_str()).collect();
    sessions.sort_unstable();
    sessions.dedup();
    assert_eq!(sessions.len(), families.len(), "no header is there twice");
}

#[test]
fn without_plugins_the_built_in_chain_runs() {
    let chain: Vec<_> =
        parse(MINIMAL).unwrap().plugins.into_iter().map(|p| (p.name.clone(), p.phase, p.on_error())).collect();
    assert_eq!(
        chain,
        [
            ("priority-queue".to_owned(), Phase::Admit, OnError::Fallback),
            ("session-binding".to_owned(), Phase::Route, OnError::Fallback),
            ("kv-affinity".to_owned(), Phase::Route, OnError::Fallback),
        ]
    );
    assert_eq!(parse(&format!("plugins = []\n{MINIMAL}")).unwrap().plugins, Vec::<Plugin>::new());
}

#[test]
fn the_failure_of_a_filter_closes_by_default() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("f.wasm"), b"\0asm").unwrap();
    let text = format!("{MINIMAL}[[plugins]]\nname = \"f\"\nwasm = \"f.wasm\"\nphase = \"filter\"\n");
    let config = Config::parse(&text, "t.toml", dir.path()).unwrap();
    let [plugin] = config.plugins.as_slice() else { panic!("one plugin") };
    assert_eq!(plugin.on_error(), OnError::Closed);
    assert_eq!(plugin.wasm.to_string(), dir.path().join("f.wasm").display().to_string(), "paths start at the file");
    assert_eq!(plugin.config.text(), "");
}

#[test]
fn urls_alone_make_a_configuration() {
    assert_eq!(Config::from_workers(&["http://10.0.0.1:30000"]).unwrap(), parse(MINIMAL).unwrap());
    let errors = Config::from_workers(&["http://a:1", "b", "http://a:1"]).unwrap_err();
    assert_eq!(
        errors.to_string(),
        "command line: worker[1]: not a URL (relative URL without a base); expected one such as http://10.0.0.1:30000\n\
         command line: worker[2]: the worker's address a:1 is already used by worker[0]"
    );
    assert_eq!(Config::from_workers::<&str>(&[]).unwrap_err().to_string(), "command line: worker: must not be empty");
}

// --- forms

#[test]
fn a_worker_is_a_url_or_a_table() {
    let text = r#"
[[pools]]
api_key = "pool-key"
workers = [
    "https://[::1]",
    { url = "http://w:1/", id = "w", labels = { a = "b" }, max_in_flight = 3, api_key = "own-key" },
]
"#;
    let config = parse(text).unwrap();
    let pool = &config.pools[0];
    let [first, second] = pool.workers.as_slice() else { panic!("two workers") };
    assert_eq!((first.id.as_str(), first.url.to_string().as_str()), ("[::1]:443", "https://[::1]:443"));
    assert!(first.url.tls());
    assert_eq!((second.id.as_str(), second.url.authority().as_str(), second.max_in_flight), ("w", "w:1", Some(3)));
    assert_eq!(second.labels["a"], "b");
    let key = |worker| pool.api_key_for(worker).unwrap().resolve().unwrap();
    assert_eq!((key(first), key(second)), ("pool-key".to_owned(), "own-key".to_owned()));
}

#[test]
fn sizes_are_bytes_or_have_a_unit() {
    for (text, bytes) in
        [("4096", 4096), ("\"4096\"", 4096), ("\"4KiB\"", 4096), ("\"2 mib\"", 2 << 20), ("\"1GB\"", 1_000_000_000)]
    {
        let config = parse(&format!("limits.body_bytes = {text}\n{MINIMAL}")).unwrap();
        assert_eq!(config.limits.body_bytes.bytes(), bytes, "{text}");
    }
    for (bytes, text) in
        [(0, "0B"), (1023, "1023B"), (1536, "1536B"), (2048, "2KiB"), (64 << 20, "64MiB"), (5 << 30, "5GiB")]
    {
        assert_eq!(ByteSize(bytes).to_string(), text);
        assert_eq!(text.parse(), Ok(ByteSize(bytes)));
    }
}

#[test]
fn plugin_tables_become_json() {
    let text = r#"
[[pools]]
workers = ["http://a:1"]
[[plugins]]
name = "p"
wasm = "builtin:kv-affinity"
phase = "route"
[plugins.config]
number = 3
real = 1.5
list = [1, "two", { three = true }]
when = 2026-11-29T10:00:00Z
"#;
    let config = parse(text).unwrap();
    let json: serde_json::Value = serde_json::from_str(&config.plugins[0].config.text()).unwrap();
    let expected = serde_json::json!({
        "number": 3, "real": 1.5, "list": [1, "two", { "three": true }], "when": "2026-11-29T10:00:00Z",
    });
    assert_eq!(json, expected);
}

#[test]
fn plugin_strings_stay_as_they_are_and_lists_become_json() {
    let given = |config: &str| {
        let plugin = "[[plugins]]\nname = \"p\"\nwasm = \"builtin:kv-affinity\"\nphase = \"route\"\n";
        let config = parse(&format!("{MINIMAL}{plugin}config = {config}\nvm_configuration = {config}\n")).unwrap();
        let plugin = &config.plugins[0];
        assert_eq!(plugin.config.text(), plugin.vm_configuration.text());
        // Shown as it was given, and the same when it is read again.
        let shown = serde_json::to_value(plugin).unwrap();
        assert_eq!(serde_json::from_value::<Plugin>(shown.clone()).unwrap(), *plugin);
        (plugin.config.text().into_owned(), shown["config"].clone())
    };
    let text = "{ \"a\": 1 ,\r\n\t\u{1}caf\u{e9}\u{0}}\n";
    for (config, handed, shown) in [
        (r#""{ \"a\": 1 ,\r\n\t\u0001caf\u00e9\u0000}\n""#, text, serde_json::json!(text)),
        ("'''\n%YAML\n- '\\n' \n'''", "%YAML\n- '\\n' \n", serde_json::json!("%YAML\n- '\\n' \n")),
        ("\"\"", "", serde_json::json!("")),
        ("\"{}\"", "{}", serde_json::json!("{}")),
        ("[1, 'two', { three = [] }]", r#"[1,"two",{"three":[]}]"#, serde_json::json!([1, "two", { "three": [] }])),
        ("[]", "[]", serde_json::json!([])),
        ("{}", "", serde_json::json!({})),
        ("{ a = 2.5, z = 1 }", r#"{"a":2.5,"z":1}"#, serde_json::json!({ "a": 2.5, "z": 1 })),
    ] {
        assert_eq!(given(config), (handed.to_owned(), shown), "{config}");
    }
}

#[test]
fn words_stand_for_nothing() {
    let config = parse(&format!("admin.address = \"off\"\nprefill.engine_priority = \"none\"\n{MINIMAL}")).unwrap();
    assert_eq!((config.admin.address, config.prefill.engine_priority), (None, None));
}

#[test]
fn later_pools_are_numbered() {
    let text = "[[pools]]\nmodels = [\"m\"]\nworkers = [\"http://a:1\"]\n[[pools]]\nworkers = [\"http://b:1\"]\n";
    let names: Vec<_> = parse(text).unwrap().pools.into_iter().map(|pool| pool.name).collect();
    assert_eq!(names, ["default", "pool-2"]);
}

// --- files

#[test]
fn a_file_is_read_with_paths_from_its_directory() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("turnstile.toml");
    std::fs::write(dir.path().join("key"), "k3y\n").unwrap();
    std::fs::write(&path, format!("state.dir = \"state\"\n{MINIMAL}api_key = {{ file = \"key\" }}\n")).unwrap();
    let config = Config::load(&path).unwrap();
    assert_eq!(config.pools[0].api_key.as_ref().unwrap().resolve().unwrap(), "k3y");
    assert_eq!(config.state.dir, Some(dir.path().join("state")));
}

#[test]
fn a_file_that_cannot_be_read_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("none.toml");
    let message = Config::load(&missing).unwrap_err().to_string();
    assert!(message.starts_with(&format!("{}: cannot be read: ", missing.display())), "{message}");

    let binary = dir.path().join("binary.toml");
    std::fs::write(&binary, b"threads = 1\n# \xff\n").unwrap();
    let message = Config::load(&binary).unwrap_err().to_string();
    assert_eq!(message, format!("{}:2:3: the file is not UTF-8 text", binary.display()));

    let large = dir.path().join("large.toml");
    std::fs::File::create(&large).unwrap().set_len((16 << 20) + 1).unwrap();
    let message = Config::load(&large).unwrap_err().to_string();
    assert_eq!(message, format!("{}: is larger than 16777216 bytes", large.display()));
}

#[test]
fn a_file_of_policies_needs_no_pools() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("policy.toml");
    std::fs::write(&path, "plugins = []\n[routing]\nblock_bytes = 1024\n").unwrap();
    assert!(Config::load(&path).unwrap_err().to_string().contains("pools"));
    let config = Config::load_without_pools(&path).unwrap();
    assert_eq!((config.pools.len(), config.plugins.len(), config.routing.block_bytes), (0, 0, 1024));
    std::fs::write(&path, "plugin = []\n").unwrap();
    assert!(Config::load_without_pools(&path).unwrap_err().to_string().contains("plugin: unknown key"));
}
