#![allow(clippy::unwrap_used)]

use super::*;

fn error(json: &str) -> String {
    FleetFile::parse(json.as_bytes()).unwrap_err()
}

#[test]
fn errors_name_the_place_and_the_member() {
    for (json, wanted) in [
        ("{}", "missing field `workers` at line 1 column 2"),
        (r#"{"workers": [{}]}"#, "missing field `id`"),
        (r#"{"workers": [{"id": "a", "load": 1}]}"#, "unknown field `load`, expected one of `id`, `state`"),
        (r#"{"workers": [{"id": "a", "state": "up"}]}"#, "unknown variant `up`, expected one of `ready`"),
        (r#"{"workers": [{"id": "a", "running": -1}]}"#, "invalid value: integer `-1`"),
        (r#"{"workers": [{"id": ""}]}"#, "workers[0].id: is empty"),
        (r#"{"workers": [{"id": "a"}, {"id": "a"}]}"#, r#"workers[1].id: there is another "a""#),
        (
            r#"{"workers": [{"id": "a", "prefill_tokens_per_s": 0}]}"#,
            "workers[0].prefill_tokens_per_s: must be more than 0, found 0",
        ),
        (r#"{"workers": [{"id": "a", "ttft_ms": -2}]}"#, "workers[0].ttft_ms: must be 0 or more, found -2"),
        (r#"{"workers": [], "session": {"worker": "b"}}"#, r#"session.worker: there is no worker "b""#),
        (r#"{"workers": [], "end": {"status": 200, "worker": "b"}}"#, r#"end.worker: there is no worker "b""#),
        (r#"{"workers": [], "end": {"status": 20}}"#, "end.status: must be 100 to 599, found 20"),
        (r#"{"workers": [], "bytes_per_token": 0}"#, "bytes_per_token: must be more than 0, found 0"),
    ] {
        let found = error(json);
        assert!(found.contains(wanted), "{json}: {found}");
    }
    let many: Vec<String> = (0..4097).map(|n| format!(r#"{{"id": "{n}"}}"#)).collect();
    assert_eq!(error(&format!(r#"{{"workers": [{}]}}"#, many.join(","))), "workers: 4097 are more than 4096");
}

#[test]
fn a_worker_is_what_its_entry_says() {
    let file = r#"{"workers": [{"id": "a"}, {"id": "b", "state": "draining", "labels": {"team": "x"},
        "capabilities": ["tag", "priority"], "excluded": true, "in_flight": 1, "max_in_flight": 2, "running": 3,
        "waiting": 4, "max_running": 5, "waiting_uncached_tokens": 6, "kv_used_tokens": 7, "kv_capacity_tokens": 8,
        "prefill_tokens_per_s": 9.5, "ttft_ms": 10.5, "itl_ms": 11.5, "pending_prefill_tokens": 12,
        "expected_decode_tokens": 13}]}"#;
    let file = FleetFile::parse(file.as_bytes()).unwrap();
    let views = file.views();
    assert_eq!(views[0], WorkerView::new("a", WorkerId(0)));
    let wanted = WorkerView {
        state: WorkerState::Draining,
        capabilities: Capabilities { tag: true, stream: false, priority: true, dp_size: 0 },
        labels: Arc::new(BTreeMap::from([("team".to_owned(), "x".to_owned())])),
        in_flight: 1,
        in_flight_at_load: 1,
        running: 3,
        waiting: 4,
        max_running: 5,
        waiting_uncached_tokens: 6,
        kv_used_tokens: 7,
        kv_capacity_tokens: 8,
        prefill_tokens_per_s: 9.5,
        ttft_ms: 10.5,
        itl_ms: 11.5,
        pending_prefill_tokens: 12,
        expected_decode_tokens: 13,
        limit: Some(2),
        ..WorkerView::new("b", WorkerId(1))
    };
    assert_eq!(views[1], wanted);
    assert_eq!(file.excluded(), [WorkerId(1)]);
}
