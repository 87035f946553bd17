#![allow(clippy::unwrap_used)]

use turnstile_policy::Worker;
use turnstile_policy::testing::FakeHost;

use super::*;

fn worker(index: u32, pending_ms: u64) -> Worker {
    Worker { index, prefill_tokens_per_s: 10_000.0, pending_prefill_tokens: pending_ms * 10, ..Worker::default() }
}

fn route(host: &FakeHost, options: &str) {
    let mut policy: KvAffinity = host.configure(options).unwrap();
    host.route(&mut policy);
}

#[test]
fn writes_target_fallbacks_scores_and_reason() {
    let host = FakeHost::new()
        .workers(&[worker(0, 30), worker(1, 10), worker(2, 20)])
        .fact("request.prompt_tokens", 100)
        .fact("request.affinity_hash", 42);
    route(&host, "");
    assert_eq!(
        host.decisions(),
        [
            "route.fallbacks=#2,#0",
            "route.reason=least cost",
            "route.scores={\"#1\":20,\"#2\":30,\"#0\":40}",
            "route.target=#1",
        ]
    );
    assert_eq!(host.counted("kv_affinity_least_cost_total"), 1);
    assert_eq!(host.reads(), 1);
}

#[test]
fn a_streaming_session_is_left_where_it_is() {
    let workers = [worker(0, 9_000).with_flags(true, false, false), worker(1, 0)];
    let host = FakeHost::new().workers(&workers).fact("session.mode", "stream");
    route(&host, "");
    assert_eq!(host.decided("route.target").as_deref(), Some("#0"));
    let host = FakeHost::new().workers(&workers).fact("session.mode", "tag");
    route(&host, "");
    assert_eq!(host.decided("route.target").as_deref(), Some("#1"));
    assert_eq!(host.decided("route.reason").as_deref(), Some("moved: cheaper by 9000 ms"));
    assert_eq!(host.counted("kv_affinity_moved_cheaper_total"), 1);
}

#[test]
fn without_a_candidate_or_a_table_nothing_is_decided() {
    let host = FakeHost::new().workers(&[worker(0, 0).with_flags(false, false, true)]);
    route(&host, "");
    assert!(host.decisions().is_empty());
    assert_eq!(host.counted("kv_affinity_no_candidate_total"), 1);
    let host = FakeHost::new();
    route(&host, "");
    assert!(host.decisions().is_empty());
}

#[test]
fn options_bound_what_is_written() {
    let workers: Vec<Worker> = (0..5).map(|index| worker(index, u64::from(index) * 10)).collect();
    let host = FakeHost::new().workers(&workers);
    route(&host, r#"{"fallbacks":1,"scores":0}"#);
    assert_eq!(host.decided("route.fallbacks").as_deref(), Some("#1"));
    assert_eq!(host.decided("route.scores"), None);
    let host = FakeHost::new().workers(&workers);
    route(&host, r#"{"fallbacks":0,"scores":2}"#);
    assert_eq!(host.decided("route.fallbacks"), None);
    assert_eq!(host.decided("route.scores").as_deref(), Some("{\"#0\":0,\"#1\":10}"));
}

#[test]
fn an_unknown_option_is_refused_with_those_known() {
    let error = FakeHost::new().configure::<KvAffinity>(r#"{"margin":5}"#).err().unwrap();
    assert!(error.starts_with("option `margin`: unknown; known are decode_ms_per_request, "), "{error}");
}
