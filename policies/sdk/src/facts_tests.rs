use super::*;
use crate::testing::FakeHost;

#[test]
fn numbers_flags_and_actions_are_parsed_and_nonsense_is_absent() {
    let host = FakeHost::new()
        .fact("request.priority", "-3")
        .fact("request.strict_priority", "2")
        .fact("request.latency_sensitivity", "1.5")
        .fact("request.stream", "true")
        .fact("request.action", "open")
        .fact("request.osl", "lots")
        .raw_fact("request.model", vec![0xff, 0xfe]);
    let turn = Turn::new(&host);
    assert_eq!(turn.priority(), Some(-3));
    assert_eq!(turn.strict_priority(), Some(2));
    assert_eq!(turn.latency_sensitivity(), Some(1.5));
    assert_eq!(turn.stream(), Some(true));
    assert_eq!(turn.action(), Some(SessionAction::Open));
    assert_eq!(turn.osl(), None);
    assert_eq!(turn.model(), None);
    assert_eq!(turn.tenant(), None);
    assert_eq!(turn.attempt(), 0);
}

#[test]
fn a_latency_sensitivity_that_is_no_number_is_absent() {
    for text in ["NaN", "inf", "-inf", "1e999", ""] {
        let host = FakeHost::new().fact("request.latency_sensitivity", text);
        assert_eq!(Turn::new(&host).latency_sensitivity(), None, "{text}");
    }
}

#[test]
fn the_table_is_read_once() {
    let host = FakeHost::new().workers(&[Worker::default().with_flags(true, false, false)]);
    let turn = Turn::new(&host);
    assert_eq!(turn.workers().map(Workers::len), Some(1));
    assert_eq!(turn.workers().map(Workers::len), Some(1));
    assert_eq!(host.reads(), 1);
}

#[test]
fn the_bound_worker_is_read_without_the_others() {
    let bound = Worker { index: 4, ..Worker::default() }.with_flags(true, false, false);
    let host = FakeHost::new().workers(&[Worker::default(), bound]);
    assert_eq!(Turn::new(&host).bound_worker(), Some(bound));
    let host = FakeHost::new().workers(&[Worker::default()]);
    assert_eq!(Turn::new(&host).bound_worker(), None);
}

#[test]
fn facts_are_the_same_read_ahead_or_one_by_one() {
    for functions in [true, false] {
        let mut host = FakeHost::new().fact("request.tree", "lead").fact("request.osl", 64).fact("attempt", 2);
        if !functions {
            host = host.without_functions();
        }
        let turn = Turn::new(&host);
        turn.read_ahead(&["request.tree", "request.osl", "request.session"]);
        assert_eq!(turn.tree().as_deref(), Some("lead"));
        assert_eq!(turn.osl(), Some(64));
        assert_eq!(turn.session_id(), None);
        assert_eq!(turn.attempt(), 2, "read by itself");
        assert_eq!(host.reads(), if functions { 2 } else { 4 });
    }
}

#[test]
fn an_unreadable_table_is_no_table() {
    let host = FakeHost::new().raw_fact("workers.table", vec![1, 2, 3]);
    assert!(Turn::new(&host).workers().is_none());
}

#[test]
fn session_and_worker_facts_tolerate_nulls_and_new_fields() {
    let host = FakeHost::new()
        .fact("session", r#"{"worker":"a:1","rank":null,"mode":"tag","idle_ms":12,"colour":"red"}"#)
        .fact("workers", r#"[{"id":"a:1","index":3,"state":"ready","labels":{"gpu":"h200"},"in_flight":2}]"#);
    let turn = Turn::new(&host);
    let session = turn.session().unwrap_or_default();
    assert_eq!((session.worker.as_deref(), session.rank, session.idle_ms), (Some("a:1"), None, Some(12)));
    let workers = turn.worker_facts().unwrap_or_default();
    assert_eq!(workers.first().map(|worker| (worker.index, worker.worker_state())), Some((3, WorkerState::Ready)));
    assert_eq!(workers.first().and_then(|worker| worker.labels.get("gpu")).map(String::as_str), Some("h200"));
}

#[test]
fn a_null_session_is_no_session() {
    let host = FakeHost::new().fact("session", "null").fact("session.mode", "sideways");
    let turn = Turn::new(&host);
    assert_eq!(turn.session(), None);
    assert_eq!(turn.session_mode(), None);
}

#[test]
fn excluded_workers_are_read_by_index_and_id() {
    let host = FakeHost::new().fact("route.exclude", " #3, a:1,,#x");
    let expected = [WorkerName::Index(3), WorkerName::Id("a:1".into()), WorkerName::Id("#x".into())];
    assert_eq!(Turn::new(&host).excluded(), expected);
}

#[test]
fn the_outcome_gives_usage_and_the_request() {
    let host = FakeHost::new()
        .fact("usage", r#"{"prompt_tokens":100,"completion_tokens":7,"cached_tokens":null}"#)
        .fact("ttft_ms", "12.5")
        .fact("status", 200)
        .fact("request.tenant", "00000000000000aa");
    let outcome = Outcome::new(&host);
    let usage = outcome.usage().unwrap_or_default();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens), (Some(100), Some(7), None));
    assert_eq!(outcome.ttft_ms(), Some(12.5));
    assert_eq!(outcome.status(), Some(200));
    assert_eq!(outcome.turn().tenant().as_deref(), Some("00000000000000aa"));
}
