//! Modules of the public Rust SDK, as `policies/` builds them.

use std::path::Path;

use turnstile_plugins::{Action, FaultKind, LogLevel, MetricValue, PluginSpec, StartPhase};

use crate::rig::{Rig, header, request, request_with_body, spec, with_response};

fn built(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../policies/dist").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn hello(configuration: &str) -> PluginSpec {
    spec("hello", built("test/hello.wasm")).with_configuration(configuration)
}

#[test]
fn an_sdk_filter_runs_through_a_whole_exchange() {
    let rig = Rig::start(hello(r#"{"greeting": "hi", "append_request": "!", "replace_response": "new"}"#)).unwrap();
    let mut env = with_response(request_with_body("question"), "old answer");
    let mut stream = rig.stream();
    assert_eq!(stream.on_request_headers(&mut env, false).unwrap().action, Action::Continue);
    assert_eq!(header(&env, "x-hello").unwrap(), b"hi");
    assert_eq!(stream.on_request_body(&mut env, 8, true).unwrap().action, Action::Continue);
    assert_eq!(&env.request_body.as_ref().unwrap().bytes[..], b"question!");
    stream.on_response_headers(&mut env, false).unwrap();
    assert_eq!(env.response.as_ref().unwrap().fields.fields.get("x-hello-response").unwrap(), "1");
    assert!(stream.on_response_body(&mut env, 3, false).unwrap().paused_response());
    stream.on_response_body(&mut env, 10, true).unwrap();
    assert_eq!(&env.response_body.as_ref().unwrap().bytes[..], b"new");
    stream.finish(&mut env).unwrap();
    let lines = rig.lines();
    assert_eq!(lines.first().unwrap(), "hello: vm started");
    assert_eq!(lines.last().unwrap(), "hello: request 1 done");
    assert_eq!(rig.gateway.shared.metrics.snapshot()[0].value, MetricValue::Counter(1));
    assert_eq!(rig.plugin.stats().tolerated, 0);
}

#[test]
fn an_sdk_filter_answers_by_itself_and_ticks() {
    let rig = Rig::start(hello(r#"{"tick_ms": 20}"#)).unwrap();
    let mut env = request();
    env.request.as_mut().unwrap().fields.fields_mut().insert("x-block", "1".parse().unwrap());
    let outcome = rig.stream().on_request_headers(&mut env, true).unwrap();
    let response = outcome.effects.local_response.unwrap();
    assert_eq!((response.status, &response.body[..]), (403, b"blocked by hello\n".as_slice()));
    assert_eq!(response.headers[0].1, "blocked");
    for now in [0, 20, 40] {
        assert!(rig.plugin.tick(now).faults.is_empty());
    }
    assert_eq!(&rig.gateway.shared.data.space("hello").get(b"hello.ticks").unwrap().0[..], b"2");
}

#[test]
fn an_sdk_filter_that_panics_or_loops_is_replaced() {
    for (name, kind) in [("x-trap", FaultKind::Trap), ("x-loop", FaultKind::Deadline)] {
        let mut spec = hello("");
        // The panic ends by itself, and has the long deadline of all tests.
        if kind == FaultKind::Deadline {
            spec.limits.callback_deadline_ms = 1_000;
        }
        let rig = Rig::start(spec).unwrap();
        let mut env = request();
        env.request.as_mut().unwrap().fields.fields_mut().insert(name, "1".parse().unwrap());
        let fault = rig.stream().on_request_headers(&mut env, true).unwrap_err();
        assert_eq!(fault.kind, kind, "{fault}");
        rig.plugin.tick(0);
        assert_eq!(rig.plugin.tick(60_000).restarted, 1);
        rig.stream().on_request_headers(&mut request(), true).unwrap();
        if kind == FaultKind::Trap {
            let lines = std::mem::take(&mut *rig.gateway.lines.lock());
            assert!(
                lines.iter().any(|(level, line)| *level == LogLevel::Critical && line.contains("told to trap")),
                "the panic's message is in the log: {lines:?}"
            );
        }
    }
}

#[test]
fn an_sdk_filter_that_refuses_its_configuration_is_not_started() {
    let error = Rig::start(hello(r#"{"refuse": true}"#)).err().unwrap();
    assert_eq!(error.phase, StartPhase::Configure);
}

#[test]
fn the_built_in_policies_run_with_no_facts_at_all() {
    for name in ["session-binding", "priority-queue", "kv-affinity"] {
        let rig = Rig::start(spec(name, built(&format!("{name}.wasm")))).unwrap();
        for _ in 0..3 {
            let mut env = request();
            let mut stream = rig.stream();
            stream.on_request_headers(&mut env, true).unwrap();
            stream.finish(&mut env).unwrap();
        }
        assert_eq!(rig.plugin.stats().calls, 6);
    }
}
