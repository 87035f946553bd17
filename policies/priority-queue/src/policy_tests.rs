#![allow(clippy::unwrap_used)]

use turnstile_policy::testing::FakeHost;

use super::*;

fn admit(host: &FakeHost, options: &str) {
    let mut policy: PriorityQueue = host.configure(options).unwrap();
    host.admit(&mut policy);
}

#[test]
fn hints_become_tier_head_start_flow_and_engine_priority() {
    let host = FakeHost::new()
        .fact("request.priority", 10)
        .fact("request.strict_priority", 1)
        .fact("request.tree", "lead")
        .fact("request.session", "sub");
    admit(&host, "");
    assert_eq!(host.decisions(), ["engine.priority=10", "queue.flow=lead", "queue.priority=10", "queue.tier=1"]);
    assert_eq!((host.counted("priority_queue_ahead_total"), host.counted("priority_queue_tiered_total")), (1, 1));
}

#[test]
fn the_flow_is_the_tree_else_the_session_else_the_tenant() {
    let flow = |host: FakeHost| {
        admit(&host, "");
        host.decided("queue.flow")
    };
    assert_eq!(flow(FakeHost::new().fact("request.tenant", "00ff").fact("request.session", "s")).as_deref(), Some("s"));
    assert_eq!(flow(FakeHost::new().fact("request.tenant", "00ff")).as_deref(), Some("00ff"));
    assert_eq!(flow(FakeHost::new()), None);
}

#[test]
fn an_unhinted_turn_is_put_at_its_arrival() {
    let host = FakeHost::new();
    admit(&host, "");
    assert_eq!(host.decisions(), ["queue.priority=0", "queue.tier=0"]);
}

#[test]
fn a_setback_is_counted_and_a_deadline_written() {
    let host = FakeHost::new().fact("request.priority", -4);
    admit(&host, r#"{"deadline_ms":2500}"#);
    assert_eq!(host.decisions(), ["engine.priority=-4", "queue.deadline_ms=2500", "queue.priority=-4", "queue.tier=0"]);
    assert_eq!(host.counted("priority_queue_behind_total"), 1);
}

#[test]
fn an_unknown_option_is_refused_with_those_known() {
    let error = FakeHost::new().configure::<PriorityQueue>(r#"{"tiers":5}"#).err().unwrap();
    assert!(error.starts_with("option `tiers`: unknown; known are max_head_start_s, "), "{error}");
}
