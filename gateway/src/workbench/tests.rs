#![allow(clippy::unwrap_used, clippy::panic)]

use super::arguments::{CompileArgs, GivenArgs, TriedPhase};
use super::*;
use std::fs;
use std::os::unix::fs::PermissionsExt;

const CASES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../policies/examples/warm-balance/cases");

/// A module as it is committed, or as it was rebuilt.
fn module(name: &str) -> PathBuf {
    match std::env::var_os(crate::builtin::DIR_VARIABLE) {
        Some(dir) => Path::new(&dir).join(name),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../policies/dist").join(name),
    }
}

/// A case with these texts, in a folder of its own.
fn case(dir: &Path, turn: &str, fleet: &str) -> Case {
    let write = |name: &str, text: &str| {
        let path = dir.join(name);
        fs::write(&path, text).unwrap();
        path
    };
    Case {
        turn: write("turn.json", turn),
        fleet: Some(write("fleet.json", fleet)),
        given: GivenArgs::default(),
        expect: None,
    }
}

fn report(wasm: &Path, case: &Case, phase: Phase) -> Value {
    let subject = Subject::read(wasm, &case.given).unwrap();
    trial(&subject, case, phase, &subject::runtime(None).unwrap()).unwrap().report
}

/// A guest that calls the host from `proxy_on_request_headers`: property paths and values as they stand in its data.
fn guest(dir: &Path, body: &str, data: &str) -> PathBuf {
    let wat = format!(
        r#"(module
             (import "env" "proxy_set_property" (func $set (param i32 i32 i32 i32) (result i32)))
             (import "env" "proxy_get_property" (func $get (param i32 i32 i32 i32) (result i32)))
             (memory (export "memory") 1)
             (data (i32.const 256) "{data}")
             (func (export "malloc") (param i32) (result i32) (i32.const 4096))
             (func (export "proxy_abi_version_0_2_1"))
             (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) {body} (i32.const 0)))"#
    );
    let path = dir.join("guest.wasm");
    fs::write(&path, wat::parse_str(wat).unwrap()).unwrap();
    path
}

const TURN: &str = r#"{"body": {"model": "m", "messages": [{"role": "user", "content": "hi"}]}}"#;
const FLEET: &str = r#"{"workers": [{"id": "a"}, {"id": "b", "state": "unhealthy"}]}"#;

#[test]
fn the_example_decides_the_same_in_every_language() {
    let runtime = subject::runtime(None).unwrap();
    for language in ["rust", "go", "as", "c"] {
        let wasm = module(&format!("examples/warm-balance-{language}.wasm"));
        let said = run_cases(&wasm, Path::new(CASES), &GivenArgs::default(), Phase::Route, &runtime).unwrap();
        assert!(said.failed.is_none(), "{language}:\n{}", said.out);
        assert!(said.out.ends_with("13 passed, 0 failed\n"), "{}", said.out);
    }
}

#[test]
fn wrong_options_are_refused_in_every_language_and_named() {
    let dir = tempfile::tempdir().unwrap();
    for language in ["rust", "go", "as", "c"] {
        let wasm = module(&format!("examples/warm-balance-{language}.wasm"));
        for (option, said) in [
            (r#"{"tolerance_percent": 101}"#, "option `tolerance_percent`: must be 0 to 100"),
            (r#"{"tolerance_percent": "much"}"#, "option `tolerance_percent`: "),
            (r#"{"urgent_tolerance_percent": 9, "tolerance": {"a": [1, "}"]}}"#, "option `tolerance`: unknown"),
        ] {
            let file = dir.path().join("config.json");
            fs::write(&file, option).unwrap();
            let subject = Subject::read(&wasm, &GivenArgs { config: Some(file), ..GivenArgs::default() }).unwrap();
            let report = check::check(&subject).unwrap();
            assert!(!report.good);
            let problem = report.json["problems"][0].as_str().unwrap();
            assert!(problem.contains(said), "{language}: {problem}");
        }
    }
}

#[test]
fn the_report_tells_what_was_read_written_and_refused() {
    let dir = tempfile::tempdir().unwrap();
    // Reads turnstile.request.model, writes the worker "b" as target and "a" as fallback, and a name that is none.
    let wasm = guest(
        dir.path(),
        "(drop (call $get (i32.const 256) (i32.const 23) (i32.const 0) (i32.const 4)))
         (drop (call $set (i32.const 280) (i32.const 12) (i32.const 292) (i32.const 1)))
         (drop (call $set (i32.const 293) (i32.const 15) (i32.const 308) (i32.const 1)))
         (drop (call $set (i32.const 309) (i32.const 11) (i32.const 308) (i32.const 1)))",
        r"turnstile\00request\00model_route.targetbroute.fallbacksaroute.where",
    );
    let found = report(&wasm, &case(dir.path(), TURN, FLEET), Phase::Route);
    let expected = serde_json::json!({
        "phase": "route",
        "asked": [
            {"read": "turnstile.request.model", "value": "m"},
            {"write": "route.target", "value": "b", "refused": "not_ready", "why": "the worker is not ready"},
            {"write": "route.fallbacks", "value": "a"},
            {"write": "route.where", "value": "a", "refused": "unknown_name"},
        ],
        "written": {"route.fallbacks": ["a"]},
        "refused": [{"write": "route.target"}, {"write": "route.where"}],
        "followed": false,
        "not_followed_because": null,
        "fault": null,
        "decision": {"route": {"target": "a", "why": "least_cost"}},
    });
    assert_eq!(expectation::differences(&expected, &found), Vec::<String>::new());
    let page = text::page(&found);
    assert!(page.contains("route.target = b: REFUSED, the worker is not ready (not_ready)"), "{page}");
}

#[test]
fn a_target_that_the_safety_rules_overrule_is_explained() {
    let dir = tempfile::tempdir().unwrap();
    let wasm = guest(
        dir.path(),
        "(drop (call $set (i32.const 256) (i32.const 12) (i32.const 268) (i32.const 1)))",
        "route.targeta",
    );
    let session = r#"{"body": {"model": "m", "messages": [], "nvext": {"session_control": {"session_id": "s"}}}}"#;
    for (turn, fleet, why) in [
        (
            session,
            r#"{"workers": [{"id": "a"}, {"id": "b"}], "session": {"worker": "b", "mode": "stream"}}"#,
            "a was the target: the turn's streaming session lives on b",
        ),
        (
            TURN,
            r#"{"workers": [{"id": "a", "excluded": true}, {"id": "b"}]}"#,
            "a was the target: it failed this turn before",
        ),
        (TURN, r#"{"workers": [{"id": "a", "state": "draining"}, {"id": "b"}]}"#, "a was the target: it is draining"),
    ] {
        let found = report(&wasm, &case(dir.path(), turn, fleet), Phase::Route);
        assert_eq!(found["not_followed_because"], why);
        assert_eq!(found["decision"]["route"]["target"], "b");
    }
    let error = trial(
        &Subject::read(&wasm, &GivenArgs::default()).unwrap(),
        &case(dir.path(), TURN, r#"{"workers": [], "session": {}}"#),
        Phase::Route,
        &subject::runtime(None).unwrap(),
    );
    let error = error.err().unwrap();
    assert!(error.contains("fleet.json: session: the turn of ") && error.ends_with("names no session"), "{error}");
}

#[test]
fn a_fault_is_told_and_the_built_in_decides() {
    let dir = tempfile::tempdir().unwrap();
    let wasm = guest(
        dir.path(),
        "(drop (call $set (i32.const 256) (i32.const 12) (i32.const 268) (i32.const 1))) (unreachable)",
        "route.targeta",
    );
    let found = report(&wasm, &case(dir.path(), TURN, FLEET), Phase::Route);
    assert!(found["fault"].as_str().unwrap().contains("unreachable"), "{}", found["fault"]);
    assert_eq!(found["written"], serde_json::json!({}));
    assert_eq!(found["decision"]["route"]["target"], "a");
}

#[test]
fn a_policy_that_pauses_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let wasm = guest(
        dir.path(),
        "(drop (call $set (i32.const 256) (i32.const 12) (i32.const 268) (i32.const 1))) (return (i32.const 1))",
        "route.targeta",
    );
    let found = report(&wasm, &case(dir.path(), TURN, FLEET), Phase::Route);
    assert_eq!((&found["paused"], &found["followed"]), (&Value::Bool(true), &Value::Bool(true)), "{found}");
    assert!(text::page(&found).contains("PAUSED: a gateway waits here"));
}

#[test]
fn a_policy_that_asks_without_end_is_remembered_in_part() {
    let dir = tempfile::tempdir().unwrap();
    let wasm = guest(
        dir.path(),
        "(local $i i32)
         (loop $again
           (drop (call $set (i32.const 256) (i32.const 10) (i32.const 266) (i32.const 1)))
           (local.set $i (i32.add (local.get $i) (i32.const 1)))
           (br_if $again (i32.lt_u (local.get $i) (i32.const 10007))))",
        "queue.tierx",
    );
    let found = report(&wasm, &case(dir.path(), TURN, FLEET), Phase::Route);
    // The deadline of a callback may come before the last of them.
    let shown = found["asked"].as_array().unwrap();
    assert!(shown.len() == 10_000 && found["not_shown"] == 7 || !found["fault"].is_null(), "{}", shown.len());
    assert!(shown.iter().all(|write| write["refused"] == "bad_number"));
}

#[test]
fn the_phase_says_what_can_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let wasm = guest(
        dir.path(),
        "(drop (call $set (i32.const 256) (i32.const 12) (i32.const 268) (i32.const 1)))
         (drop (call $set (i32.const 269) (i32.const 10) (i32.const 279) (i32.const 1)))",
        "route.targetaqueue.tier3",
    );
    let found = report(&wasm, &case(dir.path(), TURN, FLEET), Phase::Admit);
    let expected = serde_json::json!({
        "written": {"queue.tier": "3"},
        "refused": [{"write": "route.target", "refused": "unknown_worker"}],
        "decision": {"route": null, "queue": {"tier": 3}},
        "facts": {"request": {"model": "m"}},
    });
    assert_eq!(expectation::differences(&expected, &found), Vec::<String>::new());
    assert_eq!(found["facts"].get("workers"), None);
}

#[test]
fn the_same_turn_gives_the_same_report() {
    let dir = tempfile::tempdir().unwrap();
    let wasm = module("kv-affinity.wasm");
    let case = case(dir.path(), bench::SAMPLE.0, bench::SAMPLE.1);
    let first = report(&wasm, &case, Phase::Route);
    assert_eq!(first, report(&wasm, &case, Phase::Route));
    assert_eq!(first["decision"]["route"]["target"], "worker-3", "{first}");
}

#[test]
fn a_check_tells_what_a_module_may_do_and_what_keeps_it_from_running() {
    let dir = tempfile::tempdir().unwrap();
    let write = |wat: &str| {
        let path = dir.path().join("m.wasm");
        fs::write(&path, wat::parse_str(wat).unwrap()).unwrap();
        check::check(&Subject::read(&path, &GivenArgs::default()).unwrap()).unwrap()
    };
    let good = write(
        r#"(module (import "env" "proxy_http_call"
                (func (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))
             (memory (export "memory") 1 9) (func (export "proxy_abi_version_0_2_0")))"#,
    );
    assert!(good.good, "{}", good.json);
    let expected = serde_json::json!({
        "abi": "0.2.0",
        "may": [{"capability": "call_http", "words": "make HTTP calls", "imports": ["env.proxy_http_call"]}],
        "memory_pages": {"initial": 1, "maximum": 9},
        "problems": [],
    });
    assert_eq!(expectation::differences(&expected, &good.json), Vec::<String>::new());
    assert!(good.text().contains("    make HTTP calls: env.proxy_http_call"), "{}", good.text());
    assert!(good.text().contains("as a policy (phase admit or route) it is never asked"), "{}", good.text());

    let bad = write(
        r#"(module (import "env" "proxy_teleport" (func (param i32) (result i32)))
             (import "env" "proxy_done" (func (param i64) (result i32))))"#,
    );
    assert!(!bad.good);
    assert_eq!(
        bad.json["problems"],
        serde_json::json!([
            "no export proxy_abi_version_*: not a Proxy-Wasm module",
            "no export `memory`: nothing can be handed to it",
            "unknown import env.proxy_teleport: func(i32) -> (i32)",
            "import env.proxy_done has type func(i64) -> (i32), this host has func() -> (i32)",
        ])
    );
    fs::write(dir.path().join("m.wasm"), "no module").unwrap();
    let report = check::check(&Subject::read(&dir.path().join("m.wasm"), &GivenArgs::default()).unwrap()).unwrap();
    assert!(!report.good && report.text().contains("PROBLEM    does not compile"), "{}", report.text());
}

#[test]
fn a_check_starts_a_module_with_what_its_entry_would_say() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    };
    // It logs its root id, its configuration, and what an import answers that this host does not have.
    let wat = r#"(module
        (import "env" "proxy_log" (func $log (param i32 i32 i32) (result i32)))
        (import "env" "proxy_get_property" (func $get (param i32 i32 i32 i32) (result i32)))
        (import "env" "proxy_get_buffer_bytes" (func $buffer (param i32 i32 i32 i32 i32) (result i32)))
        (import "env" "envoy_resolve_dns" (func $resolve (param i32 i32 i32) (result i32)))
        (memory (export "memory") 1)
        (data (i32.const 16) "plugin_root_id")
        (func (export "malloc") (param i32) (result i32) (i32.const 4096))
        (func (export "proxy_abi_version_0_2_1"))
        (func $say (drop (call $log (i32.const 2) (i32.load (i32.const 0)) (i32.load (i32.const 4)))))
        (func (export "proxy_on_configure") (param i32 i32) (result i32)
          (drop (call $get (i32.const 16) (i32.const 14) (i32.const 0) (i32.const 4)))
          (call $say)
          (drop (call $buffer (i32.const 7) (i32.const 0) (local.get 1) (i32.const 0) (i32.const 4)))
          (call $say)
          (i32.eq (call $resolve (i32.const 0) (i32.const 0) (i32.const 0)) (i32.const 12))))"#;
    let wasm = write("dns.wasm", &wat::parse_str(wat).unwrap());
    let check = |given: &GivenArgs| check::check(&Subject::read(&wasm, given).unwrap()).unwrap();
    let log = |given: &GivenArgs| -> Vec<String> {
        let report = check(given);
        assert!(report.good, "{}", report.json);
        let said = report.json["start"]["log"].as_array().unwrap();
        let said = said.iter().map(|line| line["message"].as_str().unwrap().to_owned());
        said.filter(|line| !line.contains("UNIMPLEMENTED")).collect()
    };

    let refused = check(&GivenArgs::default());
    let unknown = "unknown import env.envoy_resolve_dns: func(i32 i32 i32) -> (i32)";
    assert_eq!((refused.good, &refused.json["problems"]), (false, &serde_json::json!([unknown])));
    assert!(refused.text().contains("with `stub_unknown_imports = true` it starts"), "{}", refused.text());

    let stubbed = GivenArgs { stub_unknown_imports: true, ..GivenArgs::default() };
    assert_eq!(log(&stubbed), ["dns", ""]);
    let text = "first: line\r\n\tsecond \u{e9}\n";
    let given = GivenArgs {
        config_text: Some(write("config.txt", text.as_bytes())),
        root_id: Some("my_root".to_owned()),
        ..stubbed.clone()
    };
    assert_eq!(log(&given), ["my_root", text]);
    let list = write("config.json", br#"[1, {"a": true}]"#);
    let given = GivenArgs { config: Some(list), root_id: Some(String::new()), ..stubbed };
    assert_eq!(log(&given), ["", r#"[1,{"a":true}]"#]);

    let error = |given: GivenArgs| Subject::read(&wasm, &given).err().unwrap();
    let wrong = write("wrong.json", b"mode: fast");
    let message = error(GivenArgs { config: Some(wrong), ..GivenArgs::default() });
    assert!(message.starts_with("--config: ") && message.contains("expected a JSON object or list"), "{message}");
    let wrong = write("wrong.txt", b"\xff");
    let message = error(GivenArgs { config_text: Some(wrong), ..GivenArgs::default() });
    assert!(message.starts_with("--config-text: ") && message.contains("utf-8"), "{message}");
}

#[test]
fn a_check_knows_modules_made_for_higress() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.wasm");
    let module = |marker: &str| {
        let wat = format!(
            r#"(module (import "env" "proxy_redis_call" (func (param i32 i32 i32 i32 i32) (result i32)))
                 (memory (export "memory") 1) (func (export "proxy_abi_version_{marker}")))"#
        );
        fs::write(&path, wat::parse_str(wat).unwrap()).unwrap();
        check::check(&Subject::read(&path, &GivenArgs::default()).unwrap()).unwrap()
    };
    let report = module("0_2_100");
    assert!(report.good && report.json["abi"] == "0.2.100", "{}", report.json);
    assert!(report.text().contains("dialect = \"higress\""), "{}", report.text());
    assert!(report.text().contains("    run Redis commands: env.proxy_redis_call"), "{}", report.text());
    let report = module("0_2_1");
    assert!(!report.good && report.text().contains("unknown import env.proxy_redis_call"), "{}", report.text());
}

#[test]
fn a_compiled_module_is_what_a_gateway_loads() {
    let dir = tempfile::tempdir().unwrap();
    let wasm = guest(dir.path(), "", "");
    let subject = Subject::read(&wasm, &GivenArgs::default()).unwrap();
    let cache = dir.path().join("cache");
    let said = compile::into_cache(&subject, Some(cache.clone())).unwrap();
    assert!(said.contains("compiled in"), "{said}");
    assert!(compile::into_cache(&subject, Some(cache.clone())).unwrap().contains("was there already"));
    let runtime = subject::runtime(Some(cache)).unwrap();
    subject.start(&runtime).unwrap();
    assert_eq!(runtime.module_counts(), (0, 1), "loaded, not compiled");

    // A file goes into the cache of another machine under the name that is told.
    let out = dir.path().join("guest.cwasm");
    let args = CompileArgs { file: wasm, out: Some(out.clone()), gateway_config: None };
    let said = compile_module(&args).unwrap().out;
    let name = said.split_whitespace().find(|word| word.ends_with(".cwasm") && !word.contains('/')).unwrap();
    let other = dir.path().join("other");
    fs::create_dir(&other).unwrap();
    fs::set_permissions(&other, fs::Permissions::from_mode(0o700)).unwrap();
    fs::copy(&out, other.join(name)).unwrap();
    fs::copy(out.with_extension("sha256"), other.join(name).with_extension("sha256")).unwrap();
    let runtime = subject::runtime(Some(other)).unwrap();
    subject.start(&runtime).unwrap();
    assert_eq!(runtime.module_counts(), (0, 1), "loaded, not compiled");

    let readable = dir.path().join("readable");
    fs::create_dir(&readable).unwrap();
    fs::set_permissions(&readable, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(compile::into_cache(&subject, Some(readable)).unwrap_err().contains("others have access to it"));
    assert!(compile::into_cache(&subject, None).unwrap_err().contains("use -o FILE"));
}

fn bench_args(file: PathBuf, phase: TriedPhase) -> BenchArgs {
    BenchArgs { file, turn: None, fleet: None, given: GivenArgs::default(), phase, turns: 20, json: true }
}

fn benched(args: &BenchArgs) -> Value {
    serde_json::from_str(&bench_plugin(args).unwrap().out).unwrap()
}

/// The callbacks of a report with how often each ran, in their order.
fn calls_of(callbacks: &Value) -> Vec<(&str, u64)> {
    callbacks.as_object().unwrap().iter().map(|(name, row)| (&**name, row["calls"].as_u64().unwrap())).collect()
}

#[test]
fn a_bench_shows_what_is_called_and_stops_at_a_fault() {
    let dir = tempfile::tempdir().unwrap();
    let wasm = guest(dir.path(), "", "");
    let report = benched(&bench_args(wasm, TriedPhase::Route));
    assert_eq!((&report["turns"], &report["workers"], &report["phase"]), (&20.into(), &8.into(), &"route".into()));
    // What the module does not export is not there.
    assert_eq!(calls_of(&report["callbacks"]), [("proxy_on_request_headers", 20)]);
    assert_eq!(calls_of(&report["start"]), []);
    let row = &report["callbacks"]["proxy_on_request_headers"];
    let time = |which: &str| row[which].as_f64().unwrap();
    assert!(time("median_us") <= time("p99_us") && time("p99_us") <= time("max_us"), "{row}");
    assert_eq!((&row["memory_grown_bytes"], &row["memory_bytes"]), (&0.into(), &65536.into()));
    assert_eq!(report["memory_bytes"]["after_turns"], 65536);
    assert!(bench::text(&report).contains("20 turns on 8 workers"));
    let wasm = guest(dir.path(), "(unreachable)", "");
    assert!(bench_plugin(&bench_args(wasm, TriedPhase::Route)).unwrap_err().starts_with("turn 0: "));
}

/// A module with these functions.
fn bare(dir: &Path, body: &str) -> PathBuf {
    let wat = format!(
        r#"(module
             (import "env" "proxy_set_tick_period_milliseconds" (func $tick (param i32) (result i32)))
             (import "env" "proxy_set_effective_context" (func $enter (param i32) (result i32)))
             (import "env" "proxy_continue_stream" (func $continue (param i32) (result i32)))
             (memory (export "memory") 1)
             (global $context (mut i32) (i32.const 0))
             (func (export "malloc") (param i32) (result i32) (i32.const 4096))
             (func (export "proxy_abi_version_0_2_1"))
             {body})"#
    );
    let path = dir.join("bare.wasm");
    fs::write(&path, wat::parse_str(wat).unwrap()).unwrap();
    path
}

/// All callbacks of a stream; the body's grow the memory by a page.
const OF_STREAMS: &str = r#"
    (func (export "proxy_on_context_create") (param i32 i32))
    (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (i32.const 0))
    (func (export "proxy_on_request_body") (param i32 i32 i32) (result i32) (drop (memory.grow (i32.const 1))) (i32.const 0))
    (func (export "proxy_on_request_trailers") (param i32 i32) (result i32) (i32.const 0))
    (func (export "proxy_on_response_headers") (param i32 i32 i32) (result i32) (i32.const 0))
    (func (export "proxy_on_response_body") (param i32 i32 i32) (result i32) (i32.const 0))
    (func (export "proxy_on_response_trailers") (param i32 i32) (result i32) (i32.const 0))
    (func (export "proxy_on_log") (param i32))
    (func (export "proxy_on_done") (param i32) (result i32) (i32.const 1))
    (func (export "proxy_on_delete") (param i32))"#;

#[test]
fn a_bench_of_a_filter_has_a_row_for_each_callback_in_its_order() {
    let dir = tempfile::tempdir().unwrap();
    let start = r#"
        (func (export "proxy_on_vm_start") (param i32 i32) (result i32) (i32.const 1))
        (func (export "proxy_on_configure") (param i32 i32) (result i32)
          (drop (memory.grow (i32.const 2))) (drop (call $tick (i32.const 60000))) (i32.const 1))
        (func (export "proxy_on_tick") (param i32))"#;
    let wasm = bare(dir.path(), &format!("{OF_STREAMS}{start}"));
    let report = benched(&bench_args(wasm.clone(), TriedPhase::Filter));
    let once = ["proxy_on_context_create", "proxy_on_vm_start", "proxy_on_configure"].map(|name| (name, 1));
    assert_eq!(calls_of(&report["start"]), once);
    // The sample's body comes in two pieces, its answer's in five; a tick comes every ten exchanges.
    assert_eq!(
        calls_of(&report["callbacks"]),
        [
            ("proxy_on_context_create", 20),
            ("proxy_on_request_headers", 20),
            ("proxy_on_request_body", 40),
            ("proxy_on_request_trailers", 20),
            ("proxy_on_response_headers", 20),
            ("proxy_on_response_body", 100),
            ("proxy_on_response_trailers", 20),
            ("proxy_on_log", 20),
            ("proxy_on_done", 20),
            ("proxy_on_delete", 20),
            ("proxy_on_tick", 2),
        ]
    );
    let page = 65536;
    assert_eq!(report["start"]["proxy_on_configure"]["memory_grown_bytes"], 2 * page);
    assert_eq!(report["callbacks"]["proxy_on_request_body"]["memory_grown_bytes"], 40 * page);
    assert_eq!(report["callbacks"]["proxy_on_response_body"]["memory_grown_bytes"], 0);
    // One page and two of the start, and those of all exchanges, the first hundred included.
    assert_eq!(report["callbacks"]["proxy_on_delete"]["memory_bytes"], (3 + 240) * page);
    assert_eq!(report["memory_bytes"]["after_turns"], (3 + 240) * page);
    assert_eq!((&report["phase"], report.get("workers")), (&"filter".into(), None));
    let text = bench_plugin(&BenchArgs { json: false, ..bench_args(wasm, TriedPhase::Filter) }).unwrap().out;
    let row = text.lines().find(|line| line.starts_with("proxy_on_request_body ")).unwrap();
    let cells: Vec<&str> = row.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
    assert_eq!((cells[1], cells[5], cells[6]), ("40", "2560 KiB", "15552 KiB"), "{text}");
    assert!(text.starts_with("bare: 20 exchanges\nthe start "), "{text}");
}

#[test]
fn a_bench_of_a_filter_takes_the_file_of_an_exchange_and_waits_for_ticks() {
    let dir = tempfile::tempdir().unwrap();
    let exchange = dir.path().join("exchange.json");
    fs::write(&exchange, r#"{"method": "GET", "path": "/v1/models"}"#).unwrap();
    let ticks = r#"
        (func (export "proxy_on_configure") (param i32 i32) (result i32) (drop (call $tick (i32.const 200))) (i32.const 1))
        (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
          (global.set $context (local.get 0)) (i32.const 1))
        (func (export "proxy_on_request_body") (param i32 i32 i32) (result i32) (i32.const 0))
        (func (export "proxy_on_tick") (param i32)
          (drop (call $enter (global.get $context))) (drop (call $continue (i32.const 0))))"#;
    let args = |body: &str| BenchArgs {
        turn: Some(exchange.clone()),
        ..bench_args(bare(dir.path(), body), TriedPhase::Filter)
    };
    let report = benched(&args(ticks));
    let called = calls_of(&report["callbacks"]);
    // Nothing but a head goes through.
    assert_eq!(called[0], ("proxy_on_request_headers", 20));
    assert!(called[1].0 == "proxy_on_tick" && called[1].1 >= 20 && called.len() == 2, "{called:?}");
    let never = r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (i32.const 1))"#;
    assert_eq!(
        bench_plugin(&args(never)).unwrap_err(),
        "exchange 0: the filter paused in proxy_on_request_headers, and nothing ended that"
    );
    fs::write(&exchange, r#"{"workers": []}"#).unwrap();
    assert!(bench_plugin(&args(never)).unwrap_err().contains("exchange.json: unknown field `workers`"));
    let with_fleet = BenchArgs { fleet: Some(exchange.clone()), ..args(never) };
    assert!(bench_plugin(&with_fleet).unwrap_err().contains("a filter sees no fleet"));
}

#[test]
fn a_bench_of_a_policy_tells_it_of_events() {
    let dir = tempfile::tempdir().unwrap();
    let told = r#"(func (export "proxy_on_foreign_function") (param i32 i32 i32))"#;
    let wasm = bare(dir.path(), &format!("{OF_STREAMS}{told}"));
    for phase in [TriedPhase::Admit, TriedPhase::Route] {
        let report = benched(&bench_args(wasm.clone(), phase));
        assert_eq!(
            calls_of(&report["callbacks"]),
            [
                ("proxy_on_context_create", 20),
                ("proxy_on_request_headers", 20),
                ("proxy_on_foreign_function", 80),
                ("proxy_on_log", 20),
                ("proxy_on_done", 20),
                ("proxy_on_delete", 20),
            ]
        );
    }
}

#[test]
fn cases_that_fail_and_folders_that_are_none_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let wasm = guest(dir.path(), "", "");
    let runtime = subject::runtime(None).unwrap();
    let cases = dir.path().join("cases");
    let run = || run_cases(&wasm, &cases, &GivenArgs::default(), Phase::Route, &runtime);
    assert!(run().unwrap_err().contains("cases: "));
    fs::create_dir_all(cases.join("one")).unwrap();
    assert!(run().unwrap_err().ends_with("one/turn.json: is missing"));
    case(&cases.join("one"), TURN, FLEET);
    assert!(run().unwrap_err().ends_with("one/expect.json: is missing"));
    fs::write(cases.join("one/expect.json"), r#"{"written": {}, "decision": {"route": {"target": "b"}}}"#).unwrap();
    let said = run().unwrap();
    assert!(said.out.contains("FAILED one") && said.out.contains(r#"decision.route.target: expected "b", found "a""#));
    assert!(said.out.ends_with("0 passed, 1 failed\n"));
    assert_eq!(said.failed.as_deref(), Some("1 of 1 cases failed"));
    fs::write(cases.join("one/expect.json"), "[]").unwrap();
    assert!(run().unwrap().out.contains("expected a JSON object with members of the report"));
}

#[test]
fn the_events_of_the_fleets_file_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("guest.wasm");
    // Writes what it is told of as a note.
    let wat = r#"(module
        (import "env" "proxy_get_buffer_bytes" (func $get (param i32 i32 i32 i32 i32) (result i32)))
        (import "env" "proxy_set_property" (func $set (param i32 i32 i32 i32) (result i32)))
        (memory (export "memory") 2)
        (data (i32.const 100) "log.heard")
        (func (export "proxy_abi_version_0_2_1"))
        (func (export "malloc") (param i32) (result i32) (i32.const 65536))
        (func (export "proxy_on_foreign_function") (param i32 i32 i32)
          (drop (call $get (i32.const 8) (i32.const 0) (local.get 2) (i32.const 0) (i32.const 4)))
          (drop (call $set (i32.const 100) (i32.const 9) (i32.load (i32.const 0)) (i32.load (i32.const 4))))))"#;
    fs::write(&file, wat::parse_str(wat).unwrap()).unwrap();
    let usage = r#"{"event":"usage","at_ms":9,"completion_tokens":4}"#;
    let fleet =
        format!(r#"{{"workers": [{{"id": "a"}}], "events": [{{"event": "first_token", "at_ms": 1}}, {usage}]}}"#);
    let found = report(&file, &case(dir.path(), TURN, &fleet), Phase::Route);
    assert_eq!(found["asked"], serde_json::json!([]));
    let asked = &found["asked_in_events"];
    assert_eq!(asked[1], serde_json::json!({"write": "log.heard", "value": usage}), "{asked}");
    assert_eq!(asked.as_array().unwrap().len(), 2);

    let bad = r#"{"workers": [{"id": "a"}], "events": [{"event": "end"}, {"at_ms": 1}]}"#;
    let error = Situation::new(("turn.json", TURN.as_bytes()), ("fleet.json", bad.as_bytes()), Phase::Route).err();
    assert_eq!(
        error.as_deref(),
        Some("fleet.json: events[1].event: expected one of first_token, tool_call, finish, usage, end")
    );
}
