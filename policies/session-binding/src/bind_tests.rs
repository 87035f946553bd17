#![allow(clippy::unwrap_used)]

use super::*;
use turnstile_policy::parse_options;

fn request(action: Option<SessionAction>) -> Request {
    Request { action, named: true, ..Request::default() }
}

fn decided(request: &Request) -> Option<(SessionAction, Option<f64>, Option<SessionMode>)> {
    decide(request, &Options::default()).map(|binding| (binding.action, binding.ttl_s, binding.mode))
}

#[test]
fn open_lets_the_gateway_pick_the_mode() {
    let open = request(Some(SessionAction::Open));
    assert_eq!(decided(&open), Some((SessionAction::Open, None, Some(SessionMode::Auto))));
}

#[test]
fn bind_is_affinity_alone() {
    let bind = Request { timeout_s: Some(60.0), ..request(Some(SessionAction::Bind)) };
    assert_eq!(decided(&bind), Some((SessionAction::Bind, Some(60.0), Some(SessionMode::Affinity))));
}

#[test]
fn close_closes_and_changes_nothing_else() {
    for live in [false, true] {
        let close = Request { live, timeout_s: Some(9.0), ..request(Some(SessionAction::Close)) };
        assert_eq!(decided(&close), Some((SessionAction::Close, None, None)));
    }
}

#[test]
fn a_turn_that_only_names_its_session_is_bound_unless_that_is_off() {
    assert_eq!(decided(&request(None)), Some((SessionAction::Bind, None, Some(SessionMode::Affinity))));
    let off = Options { bind_identified: false, ..Options::default() };
    assert_eq!(decide(&request(None), &off), None);
}

#[test]
fn a_live_session_is_refreshed_and_keeps_mode_and_timeout() {
    let live = Request { live: true, ..request(None) };
    let refreshed = Some((SessionAction::Bind, None, None));
    assert_eq!(decided(&live), refreshed);
    let off = Options { bind_identified: false, ..Options::default() };
    assert_eq!(
        decide(&live, &off).map(|binding| binding.action),
        Some(SessionAction::Bind),
        "it was opened on purpose"
    );
    let with_timeout = Request { timeout_s: Some(900.0), ..live };
    assert_eq!(decided(&with_timeout), Some((SessionAction::Bind, Some(900.0), None)));
}

#[test]
fn opening_a_live_session_is_the_same_session() {
    let again = Request { live: true, ..request(Some(SessionAction::Open)) };
    assert_eq!(decided(&again), Some((SessionAction::Open, None, None)));
}

#[test]
fn without_a_session_id_nothing_is_decided() {
    for action in [None, Some(SessionAction::Open), Some(SessionAction::Bind), Some(SessionAction::Close)] {
        assert_eq!(decided(&Request { named: false, ..request(action) }), None);
    }
}

#[test]
fn a_default_timeout_is_for_new_sessions_whose_client_gave_none() {
    let options = Options { default_ttl_s: Some(60.0), ..Options::default() };
    let ttl = |request| decide(&request, &options).and_then(|binding| binding.ttl_s);
    assert_eq!(ttl(request(None)), Some(60.0));
    assert_eq!(ttl(Request { timeout_s: Some(7.0), ..request(None) }), Some(7.0));
    assert_eq!(ttl(Request { live: true, ..request(None) }), None);
}

#[test]
fn a_clients_timeout_is_bounded() {
    let options = Options { max_ttl_s: Some(600.0), ..Options::default() };
    for (asked, given) in [(-3.0, 0.001), (0.0, 0.001), (0.5, 0.5), (600.0, 600.0), (1e300, 600.0)] {
        let open = Request { timeout_s: Some(asked), ..request(Some(SessionAction::Open)) };
        assert_eq!(decide(&open, &options).unwrap().ttl_s, Some(given), "{asked}");
    }
}

#[test]
fn open_mode_can_be_fixed() {
    let options: Options = parse_options(br#"{"open_mode":"affinity"}"#).unwrap();
    assert_eq!(options.check(), Ok(()));
    let binding = decide(&request(Some(SessionAction::Open)), &options).unwrap();
    assert_eq!(binding.mode, Some(SessionMode::Affinity));
}

#[test]
fn options_no_session_could_be_kept_with_are_refused_by_name() {
    let cases = [
        (Options { default_ttl_s: Some(0.0), ..Options::default() }, "default_ttl_s"),
        (Options { default_ttl_s: Some(20.0), max_ttl_s: Some(10.0), ..Options::default() }, "max_ttl_s"),
    ];
    for (options, name) in cases {
        assert!(options.check().unwrap_err().contains(name), "{name}");
    }
    assert_eq!(Options::default().check(), Ok(()));
}
