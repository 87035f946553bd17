#![allow(clippy::unwrap_used, clippy::panic)]
//! The table says what the environment does.

use super::*;
use crate::policy::PolicyEnv;
use crate::policy::store::SharedStore;
use crate::workbench::situation::Situation;
use serde_json::Value;
use std::collections::BTreeSet;
use std::sync::Arc;
use turnstile_config::Phase;
use turnstile_fleet::decision::Decision;
use turnstile_plugins::{SharedState, Status, StreamEnv};

/// A turn of which everything is known.
const TURN: &str = r#"{
    "headers": {"x-dynamo-parent-session-id": "lead", "x-parent-session-id": "lead", "authorization": "Bearer x"},
    "body": {"model": "m", "stream": true, "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}], "nvext": {
        "session_control": {"session_id": "s", "action": "open", "timeout": 60},
        "agent_hints": {"priority": -1, "strict_priority": 2, "osl": 7, "latency_sensitivity": 0.5,
            "speculative_prefill": true}}}}"#;

const FLEET: &str = r#"{
    "workers": [{"id": "a"}, {"id": "b", "state": "draining", "labels": {"k": "v"}, "capabilities": ["tag", "priority"],
        "excluded": true, "in_flight": 3, "max_in_flight": 1, "running": 5, "waiting": 6, "max_running": 7,
        "waiting_uncached_tokens": 8, "kv_used_tokens": 9, "kv_capacity_tokens": 10, "cached_tokens": 1,
        "prefill_tokens_per_s": 11.5, "ttft_ms": 12.5, "itl_ms": 13.5, "pending_prefill_tokens": 14,
        "expected_decode_tokens": 15}],
    "session": {"worker": "b", "mode": "tag", "turns": 2}, "attempt": 1, "last_error": "refused",
    "end": {"worker": "a", "status": 200, "prompt_tokens": 3, "completion_tokens": 2, "cached_tokens": 1, "ttft_ms": 5.5,
        "finish_reason": "stop"}}"#;

fn situation(phase: Phase) -> Situation {
    Situation::new(("turn", TURN.as_bytes()), ("fleet", FLEET.as_bytes()), phase).unwrap()
}

fn env(phase: Phase) -> PolicyEnv {
    situation(phase).env(Arc::new(SharedStore(SharedState::default().data.space("turnstile"))))
}

fn ended() -> PolicyEnv {
    let situation = situation(Phase::Route);
    let mut env = situation.env(Arc::new(SharedStore(SharedState::default().data.space("turnstile"))));
    env.finish(situation.end());
    env
}

#[test]
fn facts_are_there_when_the_table_says() {
    let mut phases = [env(Phase::Admit), env(Phase::Route), ended()];
    for fact in FACTS {
        let path = format!("turnstile.{}", fact.name);
        let found = phases.each_mut().map(|env| env.property(path.as_bytes()).map(|value| value.into_owned()));
        let when = When { admit: found[0].is_some(), route: found[1].is_some(), end: found[2].is_some() };
        assert_eq!(when, fact.when, "{}", fact.name);
        let value = found.into_iter().flatten().next_back().unwrap();
        let text = || std::str::from_utf8(&value).unwrap();
        let json = || serde_json::from_str::<Value>(text()).unwrap();
        let fits = match fact.ty {
            "text" => !text().is_empty(),
            "boolean" => matches!(text(), "true" | "false"),
            "integer" => text().parse::<i128>().is_ok(),
            "number" => text().parse::<f64>().is_ok(),
            "JSON object" => json().is_object(),
            "JSON array" => json().is_array(),
            "bytes" => value.len() >= 16,
            other => panic!("{other} is no type"),
        };
        assert!(fits, "{} is no {}: {}", fact.name, fact.ty, String::from_utf8_lossy(&value));
    }
}

#[test]
fn the_table_has_every_fact_of_the_request() {
    let mut env = env(Phase::Route);
    let json: Value = serde_json::from_slice(&env.property(b"turnstile.request").unwrap()).unwrap();
    let members: BTreeSet<String> = json.as_object().unwrap().keys().map(|name| format!("request.{name}")).collect();
    let named = FACTS.iter().map(|fact| fact.name).filter(|name| *name != "request.affinity_hash");
    let named: BTreeSet<String> = named.filter(|name| name.starts_with("request.")).map(str::to_owned).collect();
    assert_eq!(members, named);
}

#[test]
fn workers_have_these_members_in_these_places() {
    let mut env = env(Phase::Route);
    let json: Value = serde_json::from_slice(&env.property(b"turnstile.workers").unwrap()).unwrap();
    let table = env.property(b"turnstile.workers.table").unwrap().into_owned();
    let record = &table[16 + 104..];
    let worker = json[1].as_object().unwrap();
    let members: BTreeSet<&str> = worker.keys().map(String::as_str).collect();
    assert_eq!(members, WORKER_MEMBERS.iter().map(|member| member.name).collect());
    for member in WORKER_MEMBERS {
        let Some((at, ty)) = member.place else { continue };
        let u32_at = || u32::from_le_bytes(*record[at..].first_chunk().unwrap());
        let in_table = match ty.split_once(" bit ") {
            Some(("u32", bit)) => Value::from(u32_at() & bit.parse::<u32>().unwrap() != 0),
            _ => match ty {
                "u32" => Value::from(u32_at()),
                "u64" => Value::from(u64::from_le_bytes(*record[at..].first_chunk().unwrap())),
                "f64" => Value::from(f64::from_le_bytes(*record[at..].first_chunk().unwrap())),
                other => panic!("{other} is no type"),
            },
        };
        let in_json = match (&worker[member.name], member.name) {
            (_, "state") => Value::from(1),
            (_, "capabilities") => Value::from(1 | 4),
            (value, _) => value.clone(),
        };
        assert_eq!(in_table, in_json, "{}", member.name);
    }
}

#[test]
fn decisions_are_taken_when_the_table_says() {
    let names: BTreeSet<&str> = DECISIONS.iter().map(|decision| decision.name).collect();
    assert_eq!(names, Decision::NAMES.into_iter().chain(["log.NAME"]).collect());
    for decision in DECISIONS {
        let taken = [Phase::Admit, Phase::Route].map(|phase| {
            let mut env = env(phase);
            env.set_property(decision.name.as_bytes(), decision.sample.as_bytes()).unwrap();
            env.dropped.is_empty()
        });
        assert_eq!(taken, [decision.when.admit, decision.when.route], "{}", decision.name);
        assert!(!decision.when.end);
    }
}

#[test]
fn a_value_is_replaced_only_if_nobody_has_written_since_it_was_read() {
    let mut env = env(Phase::Route);
    let mut call = |name: &str, arguments: String| -> Result<serde_json::Value, Status> {
        let answer = env.call_foreign(name, arguments.as_bytes())?.into_owned();
        Ok(serde_json::from_slice(&answer).unwrap())
    };
    let set = |value: &str, cas: u64| format!(r#"{{"key": "k", "value": "{value}", "cas": {cas}}}"#);
    let stored = |yes: bool| Ok(serde_json::json!({ "stored": yes }));
    assert_eq!(call("turnstile.kv_entry", "k".into()), Err(Status::NotFound));
    assert_eq!(call("turnstile.kv_cas", set("first", 0)), stored(true));
    let entry = call("turnstile.kv_entry", "k".into()).unwrap();
    let cas = entry["cas"].as_u64().unwrap();
    assert_eq!((&entry["value"], cas > 0), (&"first".into(), true));
    assert_eq!(call("turnstile.kv_cas", set("second", cas)), stored(true));
    assert_eq!(call("turnstile.kv_cas", set("third", cas)), stored(false));
    assert_eq!(call("turnstile.kv_entry", "k".into()).unwrap()["value"], "second");
}

#[test]
fn functions_answer() {
    for function in FUNCTIONS {
        let answer = env(Phase::Route).call_foreign(function.name, function.sample).map(|_| ());
        let reads = matches!(function.name, "turnstile.kv_get" | "turnstile.kv_entry");
        let wanted = if reads { Err(Status::NotFound) } else { Ok(()) };
        assert_eq!(answer, wanted, "{}", function.name);
    }
    assert_eq!(env(Phase::Route).call_foreign("turnstile.other", b"").map(|_| ()), Err(Status::NotFound));
}
