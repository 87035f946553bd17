#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use serde_json::{Value, json};

use super::*;
use crate::decision::{DecideOptions, OrderInput, RouteInput, SessionInput, decide};
use crate::ids::SessionKey;
use crate::session::{SessionAction, SessionMode};
use crate::worker::{Capabilities, WorkerState};

fn workers() -> [WorkerView; 2] {
    let first = WorkerView {
        state: WorkerState::Draining,
        capabilities: Capabilities { tag: true, stream: false, priority: true, dp_size: 1 },
        labels: Arc::new([("zone".to_owned(), "a".to_owned())].into()),
        in_flight: 1,
        running: 2,
        waiting: 3,
        max_running: 4,
        waiting_uncached_tokens: 5,
        kv_used_tokens: 6,
        kv_capacity_tokens: 7,
        prefill_tokens_per_s: 8.5,
        ttft_ms: 9.5,
        itl_ms: 10.5,
        pending_prefill_tokens: 11,
        expected_decode_tokens: 12,
        ..WorkerView::new("a:1", WorkerId(3))
    };
    [first, WorkerView::new("b:1", WorkerId(1 << 20))]
}

fn facts<'a>(workers: &'a [WorkerView], limits: &'a LimitOptions) -> WorkerFacts<'a> {
    WorkerFacts {
        candidates: Candidates::new(workers, &[13]),
        bound: Some(WorkerId(3)),
        excluded: &[],
        excluded_by_policy: &[WorkerId(1 << 20)],
        limits,
    }
}

#[test]
fn the_bound_worker_has_a_table_of_its_own() {
    let (workers, limits) = (workers(), LimitOptions::default());
    let bound = facts(&workers, &limits).bound_table().unwrap();
    let alone = WorkerFacts { candidates: Candidates::new(&workers[..1], &[13]), ..facts(&workers, &limits) };
    assert_eq!(bound, alone.table());
    for nobody in [None, Some(WorkerId(2))] {
        assert_eq!(WorkerFacts { bound: nobody, ..facts(&workers, &limits) }.bound_table(), None);
    }
}

#[test]
fn the_table_has_the_documented_layout() {
    let (workers, limits) = (workers(), LimitOptions::default());
    let table = facts(&workers, &limits).table();
    assert_eq!(table.len(), TABLE_HEADER_BYTES + 2 * TABLE_RECORD_BYTES);
    let u32_at = |at: usize| u32::from_le_bytes(table[at..at + 4].try_into().unwrap());
    let u64_at = |at: usize| u64::from_le_bytes(table[at..at + 8].try_into().unwrap());
    let f64_at = |at: usize| f64::from_le_bytes(table[at..at + 8].try_into().unwrap());
    assert_eq!([0, 4, 8, 12].map(u32_at), [1, 104, 2, 0]);
    let record = TABLE_HEADER_BYTES;
    assert_eq!([0, 4, 8, 12, 16, 20, 24].map(|at| u32_at(record + at)), [3, 1, 5, 1, 2, 3, 4]);
    assert_eq!(u32_at(record + 28), FLAG_BOUND | FLAG_AT_LIMIT);
    assert_eq!([32, 40, 48, 56].map(|at| u64_at(record + at)), [5, 6, 7, 13]);
    assert_eq!([64, 72, 80].map(|at| f64_at(record + at)), [8.5, 9.5, 10.5]);
    assert_eq!([88, 96].map(|at| u64_at(record + at)), [11, 12]);
    let second = record + TABLE_RECORD_BYTES;
    assert_eq!((u32_at(second), u32_at(second + 28), u64_at(second + 56)), (1 << 20, FLAG_EXCLUDED, 0));
}

#[test]
fn the_json_says_the_same() {
    let (workers, limits) = (workers(), LimitOptions::default());
    let value: Value = serde_json::from_str(&facts(&workers, &limits).json()).unwrap();
    assert_eq!(
        value[0],
        json!({
            "id": "a:1", "index": 3, "state": "draining", "in_flight": 1, "running": 2, "waiting": 3, "max_running": 4,
            "waiting_uncached_tokens": 5, "kv_used_tokens": 6, "kv_capacity_tokens": 7, "cached_tokens": 13,
            "prefill_tokens_per_s": 8.5, "ttft_ms": 9.5, "itl_ms": 10.5, "pending_prefill_tokens": 11,
            "expected_decode_tokens": 12, "capabilities": ["tag", "priority"], "labels": {"zone": "a"},
            "at_limit": true, "bound": true, "excluded": false,
        })
    );
    assert_eq!(value[1]["excluded"], true);
    assert_eq!(value.as_array().map(Vec::len), Some(2));
}

#[test]
fn no_workers_are_an_empty_table_and_an_empty_list() {
    let limits = LimitOptions::default();
    let facts = facts(&[], &limits);
    assert_eq!(facts.table().len(), TABLE_HEADER_BYTES);
    assert_eq!(facts.json(), "[]");
}

#[test]
fn a_session_is_told_with_nulls_for_the_unknown() {
    let session = SessionView {
        key: SessionKey(1),
        generation: 1,
        mode: SessionMode::Tag,
        worker: Some(WorkerId(3)),
        rank: None,
        engine_open: true,
        awaiting_release: false,
        age_ms: 10,
        idle_ms: 5,
        ttl_ms: 300_000,
        turns: 2,
        in_flight: 0,
        held_tokens: 100,
        last_cached_tokens: 60,
    };
    let value: Value = serde_json::from_str(&session_json(&session, Some("a:1"))).unwrap();
    assert_eq!(
        value,
        json!({
            "worker": "a:1", "rank": null, "mode": "tag", "age_ms": 10, "idle_ms": 5, "turns": 2, "held_tokens": 100,
            "last_cached_tokens": 60, "engine_open": true,
        })
    );
}

#[test]
fn the_default_names_workers_by_id() {
    let workers = [WorkerView::new("a:1", WorkerId(0)), WorkerView::new("b\"1", WorkerId(1))];
    let candidates = Candidates::new(&workers, &[]);
    let route =
        RouteInput { candidates, prompt_tokens: 8_000, affinity_hash: 1, bound: None, excluded: &[WorkerId(0)] };
    let order = OrderInput { priority: Some(-2), ..OrderInput::default() };
    let session = SessionInput { named: true, action: Some(SessionAction::Open), ..SessionInput::default() };
    let decision = decide(&route, &order, &session, &DecideOptions::default());
    let value: Value = serde_json::from_str(&default_json(&decision, &candidates)).unwrap();
    assert_eq!(
        value,
        json!({
            "target": "b\"1", "scores": {"b\"1": 1000.0}, "reason": "least cost", "queue": {"tier": 0, "priority": -2.0},
            "session": {"action": "open", "mode": "auto"},
        })
    );
    let nothing: Value = serde_json::from_str(&default_json(&Decision::default(), &candidates)).unwrap();
    assert_eq!(nothing["target"], Value::Null);
}
