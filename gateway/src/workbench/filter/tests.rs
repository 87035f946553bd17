#![allow(clippy::unwrap_used)]

use super::super::arguments::{GivenArgs, TriedPhase, TryArgs};
use super::super::expectation::differences;
use super::super::{Case, cases, run_cases, subject, trial, try_plugin};
use super::callees::Callees;
use super::exchange_file::Exchange;
use super::*;
use crate::workbench::subject::Subject;
use std::path::{Path, PathBuf};

/// A module as it is committed, or as it was rebuilt.
fn module(name: &str) -> PathBuf {
    match std::env::var_os(crate::builtin::DIR_VARIABLE) {
        Some(dir) => Path::new(&dir).join(name),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../policies/dist").join(name),
    }
}

fn options(json: Value) -> serde_json::Map<String, Value> {
    json.as_object().cloned().unwrap_or_default()
}

fn tried(wasm: &[u8], configuration: Value, exchange: &Value) -> Tried {
    let subject = Subject::new("guest.wasm".into(), "guest".to_owned(), wasm.into(), &options(configuration).into());
    let exchange = Exchange::parse(exchange.to_string().as_bytes()).unwrap();
    let started = subject.start_among(&subject::runtime(None).unwrap(), Callees::new(&exchange.calls)).unwrap();
    run(&started, &exchange)
}

fn report(name: &str, configuration: Value, exchange: Value) -> Value {
    tried(&std::fs::read(module(name)).unwrap(), configuration, &exchange).report
}

fn assert_has(report: &Value, expected: Value) {
    let wrong = differences(&expected, report);
    assert!(wrong.is_empty(), "{wrong:#?}\n{report:#}");
}

fn guest(body: &str) -> Vec<u8> {
    let wat = format!(
        r#"(module
             (import "env" "proxy_set_tick_period_milliseconds" (func $tick (param i32) (result i32)))
             (import "env" "proxy_set_effective_context" (func $enter (param i32) (result i32)))
             (import "env" "proxy_continue_stream" (func $continue (param i32) (result i32)))
             (import "env" "proxy_close_stream" (func $close (param i32) (result i32)))
             (memory (export "memory") 1)
             (func (export "malloc") (param i32) (result i32) (i32.const 4096))
             (func (export "proxy_abi_version_0_2_1"))
             {body})"#
    );
    wat::parse_str(wat).unwrap()
}

#[test]
fn what_a_filter_adds_and_edits_is_told_both_ways_and_callback_by_callback() {
    let found = report(
        "test/hello.wasm",
        json!({"greeting": "hi", "append_request": "!", "replace_response": "other"}),
        json!({"headers": {"content-length": "2", "x-kept": ["a", "b"]}, "body": 12,
            "response": {"status": 201, "headers": {"content-type": "text/plain"}, "pieces": ["one", "two"]}}),
    );
    assert_has(
        &found,
        json!({
            "phase": "filter",
            "request": {
                "added": {"x-hello": "hi"}, "removed": {"content-length": "2"}, "replaced": {},
                "body": "12!", "body_changed": true,
                "headers": {":method": "POST", ":path": "/v1/chat/completions", "x-kept": ["a", "b"]},
            },
            "response": {
                "added": {"x-hello-response": "1"}, "removed": {}, "body": "other", "body_changed": true, "broken_off": false,
                "headers": {":status": "201", "content-type": "text/plain"},
            },
            "answered": null, "waits": false, "closed": false, "fault": null,
            "steps": [
                {"callback": "proxy_on_request_headers", "end_of_stream": false, "returned": "continue",
                    "headers": {"added": {"x-hello": "hi"}}},
                {"callback": "proxy_on_request_body", "size": 2, "end_of_stream": true, "body": {"from": "12", "to": "12!"}},
                {"callback": "proxy_on_response_headers", "returned": "continue"},
                {"callback": "proxy_on_response_body", "size": 3, "end_of_stream": false, "returned": "pause"},
                {"callback": "proxy_on_response_body", "size": 6, "end_of_stream": true,
                    "body": {"from": "onetwo", "to": "other"}},
            ],
        }),
    );
    let last = &found["log"].as_array().unwrap().last().unwrap()["message"];
    assert_eq!(last, "hello: request 1 done");
    let page = text::page(&found);
    for line in [
        "  + x-hello: hi",
        "  - content-length: 2",
        "    body, changed: 12!",
        "    body: onetwo -> other",
        "  proxy_on_response_body, 3 bytes: pause",
        "  info: hello: request 1 done",
    ] {
        assert!(page.lines().any(|found| found == line), "{line}\n{page}");
    }
}

#[test]
fn a_filter_that_changes_nothing_changes_nothing() {
    let found = report("test/noop.wasm", json!({}), json!({"body": {}, "response": {"body": [1, 2]}}));
    for side in ["request", "response"] {
        assert_has(&found[side], json!({"added": {}, "removed": {}, "replaced": {}, "body_changed": false}));
    }
    assert_eq!((&found["request"]["body"], &found["response"]["body"]), (&json!("{}"), &json!("[1,2]")));
    let only_request = report("test/noop.wasm", json!({}), json!({"method": "GET", "path": "/v1/models?a=b"}));
    assert_has(
        &only_request,
        json!({"response": null, "request": {"body": "", "headers": {":path": "/v1/models?a=b"}}}),
    );
    assert_has(&only_request["steps"][0], json!({"end_of_stream": true}));
}

#[test]
fn its_own_answer_is_told_and_passes_it_too() {
    let found = report(
        "test/hello.wasm",
        json!({}),
        json!({"headers": {"x-block": "1"}, "body": {}, "response": {"body": "never asked for"}}),
    );
    assert_has(
        &found,
        json!({
            "request": null,
            "answered": {"status": 403, "headers": {"x-hello": "blocked"}, "body": "blocked by hello\n"},
            "response": {"body": "blocked by hello\n", "headers": {":status": "403"}, "added": {"x-hello-response": "1"}},
        }),
    );
    assert!(text::page(&found).contains("ANSWERED by the filter: 403"), "{}", text::page(&found));
}

#[test]
fn its_calls_are_answered_from_the_file_and_the_pause_ends() {
    let shape = json!({"shape": "callout"});
    let exchange = |reply: Value| json!({"body": {}, "calls": {"auth": [reply]}, "response": {"body": "fine"}});
    let reply = |body: &str| json!({"headers": {"x-origin": "here"}, "pieces": [body]});
    let through = report("test/shapes.wasm", shape.clone(), exchange(reply("yes")));
    assert_has(
        &through,
        json!({
            "calls": [{"upstream": "auth", "method": "GET", "path": "/yes", "headers": {"x-asked-by": "shapes"},
                "timeout_ms": 500, "reply": {"status": 200, "body": "yes"}}],
            "request": {"added": {"x-verdict": "yes"}},
            "response": {"body": "\"fine\""},
            "answered": null, "waits": false,
        }),
    );
    // The reply edits the request that waits, and lets it go on.
    let steps = &through["steps"];
    assert_has(&steps[0], json!({"callback": "proxy_on_request_headers", "returned": "pause"}));
    assert_has(&steps[1], json!({"continued_after_ms": 0, "headers": {"added": {"x-verdict": "yes"}}}));
    let refused = report("test/shapes.wasm", shape.clone(), exchange(reply("no")));
    assert_has(&refused, json!({"request": null, "answered": {"status": 403}, "response": {"body": "not allowed\n"}}));

    // One that fails, and one to an upstream that the file does not have.
    let failed = report("test/shapes.wasm", shape.clone(), exchange(Value::Null));
    assert_has(&failed, json!({"calls": [{"reply": null}], "answered": {"status": 503}}));
    let refused = report("test/shapes.wasm", shape, json!({"body": {}}));
    assert_has(&refused, json!({"calls": [], "answered": {"status": 500, "body": "no call\n"}}));
}

#[test]
fn a_pause_that_a_tick_ends_lasts_as_long_as_that_and_one_without_end_is_told() {
    let ticks = guest(
        r#"(func (export "proxy_on_configure") (param i32 i32) (result i32) (drop (call $tick (i32.const 200))) (i32.const 1))
           (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (i32.const 1))
           (func (export "proxy_on_tick") (param i32)
             (drop (call $enter (i32.const 2))) (drop (call $continue (i32.const 0))))"#,
    );
    let found = tried(&ticks, json!({}), &json!({}));
    assert!(found.failed.is_none(), "{:#}", found.report);
    let waited = found.report["steps"][1]["continued_after_ms"].as_u64().unwrap();
    assert!((200..=220).contains(&waited), "{:#}", found.report);

    let never = guest(r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (i32.const 1))"#);
    let found = tried(&never, json!({}), &json!({"response": {}}));
    assert_has(&found.report, json!({"waits": true, "request": null, "response": null}));
    assert_eq!(found.failed.as_deref(), Some("it paused, and nothing ended that"));
    assert!(text::page(&found.report).contains("WAITS: "));
}

#[test]
fn a_filter_that_asks_again_and_again_is_not_waited_for_for_ever() {
    // Each reply is answered with another call; each piece of the body is held.
    let call = r#"(drop (call $call (i32.const 100) (i32.const 4) (i32.const 200) (i32.const 61) (i32.const 0) (i32.const 0)
                   (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 300)))"#;
    let wat = format!(
        r#"(module
             (import "env" "proxy_http_call"
               (func $call (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))
             (memory (export "memory") 1)
             (data (i32.const 100) "auth")
             (data (i32.const 200) "\03\00\00\00\07\00\00\00\03\00\00\00\05\00\00\00\01\00\00\00\0a\00\00\00\01\00\00\00:method\00GET\00:path\00/\00:authority\00a\00")
             (func (export "malloc") (param i32) (result i32) (i32.const 4096))
             (func (export "proxy_abi_version_0_2_1"))
             (func (export "proxy_on_request_body") (param i32 i32 i32) (result i32) {call} (i32.const 1))
             (func (export "proxy_on_http_call_response") (param i32 i32 i32 i32 i32) {call}))"#
    );
    let wasm = wat::parse_str(wat).unwrap();
    let found = tried(&wasm, json!({}), &json!({"pieces": ["a", "b"], "calls": {"auth": []}}));
    assert_has(&found.report, json!({"waits": true, "request": null}));
    assert_eq!(found.report["calls"].as_array().unwrap().len(), 100, "{:#}", found.report);
    assert_has(&found.report["calls"][0], json!({"upstream": "auth", "method": "GET", "path": "/", "reply": null}));
}

#[test]
fn faults_and_broken_exchanges_are_told() {
    let trap = report("test/hello.wasm", json!({}), json!({"headers": {"x-trap": "1"}}));
    assert!(trap["fault"].as_str().unwrap().contains("unreachable"), "{trap:#}");
    assert!(trap["log"].to_string().contains("told to trap"), "{trap:#}");
    assert_eq!(trap["request"], Value::Null);
    let late = guest(
        r#"(func (export "proxy_on_response_body") (param i32 i32 i32) (result i32)
             (if (local.get 2) (then (unreachable))) (i32.const 0))"#,
    );
    let found = tried(&late, json!({}), &json!({"response": {"pieces": ["one", "two"]}}));
    assert_has(&found.report, json!({"response": {"broken_off": true, "body": "one"}}));
    assert!(found.failed.is_some());
    let closes = guest(
        r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
             (drop (call $close (i32.const 2))) (i32.const 1))"#,
    );
    let found = tried(&closes, json!({}), &json!({"response": {}}));
    assert_has(&found.report, json!({"closed": true, "request": null, "response": null, "fault": null}));
}

#[test]
fn what_is_held_goes_on_with_the_trailers_and_secrets_are_hidden() {
    let found = report(
        "test/hello.wasm",
        json!({"replace_request": "never"}),
        json!({"headers": {"authorization": "Bearer x"}, "pieces": ["a", "b"], "trailers": {"x-sum": "1"}}),
    );
    // Its body callback never sees the end, so what it held goes on as it came.
    assert_has(
        &found,
        json!({"request": {"body": "ab", "trailers": {"x-sum": "1"}, "headers": {"authorization": "Bearer x"}}}),
    );
    let said = found["log"].to_string();
    assert!(!said.contains("Bearer x"), "{said}");
}

#[test]
fn the_same_exchange_gives_the_same_report() {
    let exchange = json!({"body": {}, "calls": {"auth": [{"pieces": ["x"]}]}, "response": {"pieces": ["a", "b"]}});
    let once = || report("test/shapes.wasm", json!({"shape": "callout"}), exchange.clone());
    assert_eq!(once().to_string(), once().to_string());
}

#[test]
fn cases_of_filters_have_no_fleet_and_the_command_line_says_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let case = dir.path().join("cases/greets");
    std::fs::create_dir_all(&case).unwrap();
    let write = |name: &str, json: Value| {
        let path = case.join(name);
        std::fs::write(&path, json.to_string()).unwrap();
        path
    };
    let turn = write("turn.json", json!({"body": {}}));
    write("config.json", json!({"greeting": "hi"}));
    let expect = write("expect.json", json!({"request": {"added": {"x-hello": "hi"}}, "answered": null}));
    let (wasm, runtime) = (module("test/hello.wasm"), subject::runtime(None).unwrap());
    let said = run_cases(&wasm, &dir.path().join("cases"), &GivenArgs::default(), Phase::Filter, &runtime).unwrap();
    assert_eq!((said.out.as_str(), said.failed), ("ok greets\n1 passed, 0 failed\n", None));
    write("expect.json", json!({"request": {"added": {"x-hello": "ho"}}}));
    let said = run_cases(&wasm, &dir.path().join("cases"), &GivenArgs::default(), Phase::Filter, &runtime).unwrap();
    assert!(said.out.contains(r#"request.added.x-hello: expected "ho", found "hi""#), "{}", said.out);
    let listed = |phase| cases(&dir.path().join("cases"), &GivenArgs::default(), phase);
    assert!(listed(Phase::Route).unwrap_err().ends_with("fleet.json: is missing"));
    write("config.txt", json!("a text"));
    assert!(
        listed(Phase::Filter).unwrap_err().ends_with("greets: has config.json and config.txt; expected one of them")
    );

    let args = |phase, fleet: Option<&Path>| TryArgs {
        file: wasm.clone(),
        turn: Some(turn.clone()),
        fleet: fleet.map(Path::to_owned),
        given: GivenArgs::default(),
        expect: None,
        cases: None,
        phase,
        json: false,
    };
    assert!(try_plugin(&args(TriedPhase::Filter, Some(&expect))).unwrap_err().contains("a filter sees no fleet"));
    assert!(try_plugin(&args(TriedPhase::Route, None)).unwrap_err().starts_with("--fleet must be given"));
    let wrong = write("wrong.json", json!({"response": {"status": 99}}));
    let bad = Case { turn: wrong, fleet: None, given: GivenArgs::default(), expect: None };
    let error =
        trial(&Subject::read(&wasm, &GivenArgs::default()).unwrap(), &bad, Phase::Filter, &runtime).err().unwrap();
    assert!(error.contains("wrong.json: response.status: must be 200 to 599, found 99"), "{error}");
}
