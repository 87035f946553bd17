#![allow(clippy::unwrap_used)]

use turnstile_policy::WorkerState;
use turnstile_policy::testing::FakeHost;

use super::*;

fn route(host: &FakeHost) {
    let mut policy: SessionBinding = host.configure("").unwrap();
    host.route(&mut policy);
}

fn bound(state: WorkerState) -> Worker {
    Worker { index: 3, state, ..Worker::default() }.with_flags(true, false, false)
}

#[test]
fn a_new_session_is_opened_and_left_to_be_placed() {
    let host = FakeHost::new()
        .fact("request.action", "open")
        .fact("request.session", "s-1")
        .fact("request.timeout_s", 120)
        .workers(&[Worker::default()]);
    route(&host);
    assert_eq!(host.decisions(), ["session.action=open", "session.mode=auto", "session.ttl_s=120"]);
    assert_eq!(host.reads(), 1);
    assert_eq!(host.counted("session_binding_open_total"), 1);
}

#[test]
fn a_live_session_goes_to_its_worker() {
    let host = FakeHost::new()
        .fact("request.session", "s-1")
        .fact("session.idle_ms", 40)
        .fact("session.mode", "tag")
        .workers(&[Worker::default(), bound(WorkerState::Ready)]);
    route(&host);
    assert_eq!(
        host.decisions(),
        ["route.reason=bound", "route.target=#3", "session.action=bind"],
        "the mode is the session's own"
    );
    assert_eq!(host.counted("session_binding_bound_worker_total"), 1);
}

#[test]
fn a_worker_that_takes_no_turns_is_not_asked_for() {
    let excluded = bound(WorkerState::Ready).with_flags(true, false, true);
    for worker in [bound(WorkerState::Unhealthy), bound(WorkerState::Draining), excluded] {
        let host = FakeHost::new().fact("request.session", "s-1").fact("session.idle_ms", 40).workers(&[worker]);
        route(&host);
        assert_eq!(host.decisions(), ["session.action=bind"]);
        assert_eq!(host.counted("session_binding_bound_worker_lost_total"), 1);
    }
}

#[test]
fn a_closing_turn_still_goes_to_its_worker() {
    let host = FakeHost::new()
        .fact("request.action", "close")
        .fact("request.session", "s-1")
        .fact("session.idle_ms", 40)
        .workers(&[bound(WorkerState::Ready)]);
    route(&host);
    assert_eq!(host.decisions(), ["route.reason=bound", "route.target=#3", "session.action=close"]);
    assert_eq!(host.counted("session_binding_close_total"), 1);
}

#[test]
fn a_turn_without_identity_costs_one_read_and_decides_nothing() {
    let host = FakeHost::new().workers(&[Worker::default()]);
    route(&host);
    assert!(host.decisions().is_empty());
    assert_eq!(host.reads(), 1);
}

#[test]
fn an_unknown_option_is_refused_with_those_known() {
    let error = FakeHost::new().configure::<SessionBinding>(r#"{"ttl":5}"#).err().unwrap();
    assert_eq!(error, "option `ttl`: unknown; known are bind_identified, default_ttl_s, max_ttl_s, open_mode");
}
