#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::{collections::BTreeSet, path::PathBuf};

use proptest::prelude::*;
use serde_json::Value;

use crate::{Config, node, reference, restart_needed, schema};

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn examples() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples")
}

/// Compares a generated file with what is committed; with `UPDATE_DOCS=1` writes it.
fn assert_fresh(path: &str, content: &str) {
    let file = repository().join(path);
    if std::env::var_os("UPDATE_DOCS").is_some_and(|value| value == "1") {
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, content).unwrap();
    }
    let committed = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(committed == content, "{path} is stale: run UPDATE_DOCS=1 cargo nextest run -p turnstile-config");
}

/// Calls `see` with the dotted key and the schema of every key, lists and tables included. A secret is one key.
fn every_key(table: &'static Value, path: &str, see: &mut impl FnMut(&str, &'static Value)) {
    for (name, property) in schema::properties(table) {
        let key = node::join(path, name);
        see(&key, property);
        let secret = property.get("$ref").is_some_and(|name| name == "#/$defs/Secret");
        if let Some(table) = schema::table(property).filter(|_| !secret) {
            every_key(table, &key, see);
        }
    }
}

// --- generated files

#[test]
fn the_reference_is_fresh() {
    assert_fresh("docs/configuration.md", &reference());
}

#[test]
fn the_schema_is_fresh() {
    let text = serde_json::to_string_pretty(schema::schema()).unwrap();
    assert_fresh("docs/config.schema.json", &format!("{text}\n"));
}

// --- the schema itself

#[test]
fn every_key_is_described() {
    every_key(schema::schema(), "", &mut |key, property| {
        let described = property.get("description").and_then(Value::as_str).is_some_and(|text| !text.is_empty());
        assert!(described, "{key} has no comment");
    });
}

#[test]
fn every_number_has_both_limits() {
    // A number within its limits always fits the type that holds it, so what conforms to the schema can be read.
    every_key(schema::schema(), "", &mut |key, property| {
        for branch in schema::branches(property) {
            let types = schema::types(branch);
            if (types.contains(&"integer") || types.contains(&"number")) && schema::choices(branch).is_none() {
                let limit = |name| property.get(name).or_else(|| branch.get(name)).and_then(Value::as_f64);
                assert!(limit("minimum").is_some() && limit("maximum").is_some(), "{key}");
            }
        }
    });
}

#[test]
fn nothing_in_the_schema_is_null() {
    fn visit(value: &Value) {
        match value {
            Value::Null => panic!("null"),
            Value::String(text) => assert_ne!(text, "null"),
            Value::Array(items) => items.iter().for_each(visit),
            Value::Object(members) => members.values().for_each(visit),
            _ => {}
        }
    }
    visit(schema::schema());
}

// --- restart

#[test]
fn what_needs_a_restart_is_named() {
    let old = Config::from_workers(&["http://a:1"]).unwrap();
    assert_eq!(restart_needed(&old, &old), Vec::<String>::new());

    let mut new = Config::from_workers(&["http://b:1"]).unwrap();
    new.plugins.clear();
    new.limits.body_bytes = crate::ByteSize(5000);
    new.sessions.busy_wait_ms = 1;
    assert_eq!(restart_needed(&old, &new), Vec::<String>::new());

    new.threads = Some(3);
    new.listeners[0].h2c = false;
    new.admin.address = None;
    new.logging.format = crate::LogFormat::Text;
    assert_eq!(restart_needed(&old, &new), ["threads", "listeners", "admin.address", "logging.format"]);
}

// --- examples

#[test]
fn every_example_is_valid() {
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(examples()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            let config = Config::load(&path).unwrap_or_else(|errors| panic!("{errors}"));
            assert!(config.warnings().is_empty(), "{}: {:?}", path.display(), config.warnings());
            names.insert(path.file_name().unwrap().to_string_lossy().into_owned());
        }
    }
    let named = ["full.toml", "minimal.toml", "trial.toml", "two-pools.toml", "user-policy.toml"];
    assert!(named.iter().all(|name| names.contains(*name)), "{names:?}");
}

#[test]
fn the_full_example_has_every_key_at_its_default() {
    let text = std::fs::read_to_string(examples().join("full.toml")).unwrap();
    let root = node::read(&text, "full.toml").unwrap().to_json();

    /// All values that a key has in the file.
    fn values<'a>(root: &'a Value, key: &str) -> Vec<&'a Value> {
        fn flat(value: &Value) -> Vec<&Value> {
            match value {
                Value::Array(items) => items.iter().collect(),
                other => vec![other],
            }
        }
        let (tables, name) = match key.rsplit_once('.') {
            Some((table, name)) => (values(root, table).into_iter().flat_map(flat).collect(), name),
            None => (vec![root], key),
        };
        tables.into_iter().filter_map(|table| table.get(name)).collect()
    }

    every_key(schema::schema(), "", &mut |key, property| {
        let found = values(&root, key);
        if key == "plugins.sha256" {
            // A digest that is right today would be wrong with the next build of the policies.
            assert!(found.is_empty() && text.contains("\n# sha256 = "));
            return;
        }
        assert!(!found.is_empty(), "{key} is missing");
        let table = schema::table(property).is_some();
        // A pool's default name depends on its position.
        if let Some(default) =
            property.get("default").filter(|_| !table && key != "pools.name" && key != "plugins.config")
        {
            let example = ["pools.workers.labels"];
            assert!(
                example.contains(&key) || found.iter().all(|value| *value == default),
                "{key}: {found:?}, not {default}"
            );
        }
    });
}

// --- summary

#[test]
fn the_summary_says_what_will_run() {
    let mut config = Config::load(examples().join("two-pools.toml")).unwrap();
    config.timeouts.upstream_idle_ms = 6_000;
    assert_eq!(
        config.summary(),
        "\
listener  0.0.0.0:8080 (HTTP/1.1, h2c)
admin     127.0.0.1:9180 (no token)
pool      small (Qwen/Qwen3-8B, small; HTTP/1.1)
  worker  10.0.0.1:30000 (http://10.0.0.1:30000, in flight as it reports)
  worker  10.0.0.2:30000 (http://10.0.0.2:30000, in flight as it reports)
  worker  10.0.0.3:30000 (http://10.0.0.3:30000, in flight as it reports)
pool      large (Qwen/Qwen3-235B-A22B, large; HTTP/1.1)
  worker  large-0 (http://10.0.1.1:30000, in flight 64, API key, rack=a)
  worker  large-1 (http://10.0.1.2:30000, in flight 32, API key, rack=b)
plugin    priority-queue (builtin:priority-queue, phase admit, on error fallback, 50 ms a call, 128 MiB)
plugin    session-binding (builtin:session-binding, phase route, on error fallback, 50 ms a call, 128 MiB)
plugin    kv-affinity (builtin:kv-affinity, phase route, on error fallback, 50 ms a call, 128 MiB)
queue     1024 requests, 512MiB of bodies, 300000 ms; then 503
sessions  100000 at a time, 300 s idle, at most 86400 s; tag on, stream on
prefill   1 at a time on a worker, bodies to 4MiB
bodies    to 64MiB
logs      info, access log to stdout
warning   timeouts.upstream_idle_ms is 6000, and SGLang closes idle connections after 5000 ms unless \
SGLANG_TIMEOUT_KEEP_ALIVE says more: requests will meet connections that are closing
"
    );
}

// --- hostile input

/// Whatever the text is, the answer is a configuration or problems with a place in the text.
fn assert_sane(text: &str) {
    if let Err(errors) = Config::parse(text, "t.toml", &examples()) {
        assert!(!errors.problems.is_empty());
        let lines = text.split('\n').count();
        for problem in &errors.problems {
            let placed = (1..=lines).contains(&problem.line) && problem.column >= 1;
            // The parser gives up on deep nesting without saying where.
            assert!(placed || problem.message == "recursion limit", "{problem}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_text_has_an_answer(text in "(\\PC|[\\[\\]={}\",.'\n0-9a-c]){0,200}") {
        assert_sane(&text);
    }

    #[test]
    fn any_change_of_a_file_has_an_answer(
        at in 0.0..1.0f64,
        cut in 0usize..40,
        put in prop_oneof![
            Just(String::new()),
            Just("-1".to_owned()),
            Just("nan".to_owned()),
            Just("\"\"".to_owned()),
            Just("[]".to_owned()),
            Just("{}".to_owned()),
            Just("9223372036854775807".to_owned()),
            Just("\n[pools]\n".to_owned()),
            "\\PC{0,8}",
        ],
    ) {
        let text = std::fs::read_to_string(examples().join("full.toml")).unwrap();
        let chars: Vec<char> = text.chars().collect();
        let start = (at * chars.len() as f64) as usize;
        let end = (start + cut).min(chars.len());
        let changed: String = chars[..start].iter().chain(put.chars().collect::<Vec<_>>().iter()).chain(&chars[end..]).collect();
        assert_sane(&changed);
    }

    #[test]
    fn any_value_of_any_key_has_an_answer(
        key in 0usize..200,
        value in prop::sample::select(vec![
            "-1", "0", "9223372036854775807", "1e308", "-0.0", "\"\"", "\"off\"", "\"x\"", "[]", "[[]]", "[{}]", "{}", "true",
            "1979-05-27", "\"999999999999GiB\"", "{ env = \"\" }", "{ file = \"\" }", "[\"http://a:1\"]", "[1, \"x\", {}]",
        ]),
    ) {
        let mut keys = Vec::new();
        every_key(schema::schema(), "", &mut |key, _| keys.push(key.to_owned()));
        assert_sane(&format!("{} = {value}\n", keys[key % keys.len()]));
    }
}

#[test]
fn deep_nesting_is_an_error() {
    for text in [
        format!("x = {}", "[".repeat(100_000)),
        format!("x = {}1{}", "[".repeat(10_000), "]".repeat(10_000)),
        format!("[{}a]", "a.".repeat(100_000)),
        format!("{}a = 1", "a.".repeat(100_000)),
        "[[plugins]]\n[plugins.config]\n".to_owned() + &"a.".repeat(79) + "a = " + &"[".repeat(79) + &"]".repeat(79),
    ] {
        assert_sane(&text);
        assert!(Config::parse(&text, "t.toml", &examples()).is_err());
    }
}
