#![allow(clippy::unwrap_used)]

use super::*;
use turnstile_policy::parse_options;

fn with_priority(priority: i64) -> Order {
    decide(&Hints { priority: Some(priority), ..Hints::default() }, &Options::default())
}

#[test]
fn without_hints_a_turn_waits_by_arrival() {
    let order = decide(&Hints::default(), &Options::default());
    assert_eq!(order, Order { tier: 0, head_start_s: 0.0, engine_priority: None });
}

#[test]
fn priority_is_seconds_of_head_start_signed_and_bounded() {
    for (priority, seconds) in
        [(10, 10.0), (-5, -5.0), (0, 0.0), (3_601, 3_600.0), (i64::MAX, 3_600.0), (i64::MIN, -3_600.0)]
    {
        assert_eq!(with_priority(priority).head_start_s, seconds, "{priority}");
    }
}

#[test]
fn latency_sensitivity_counts_only_without_priority_and_only_forward() {
    let hints = |priority, seconds| Hints { priority, latency_sensitivity_s: Some(seconds), ..Hints::default() };
    let head_start = |hints| decide(&hints, &Options::default()).head_start_s;
    assert_eq!(head_start(hints(None, 2.5)), 2.5);
    assert_eq!(head_start(hints(None, -2.5)), 0.0);
    assert_eq!(head_start(hints(None, 1e9)), 3_600.0);
    assert_eq!(head_start(hints(Some(1), 2.5)), 1.0);
    assert_eq!(decide(&hints(None, 2.5), &Options::default()).engine_priority, None);
}

#[test]
fn strict_priority_is_the_tier_up_to_the_highest_allowed() {
    let hints = Hints { strict_priority: Some(7), ..Hints::default() };
    assert_eq!(decide(&hints, &Options::default()).tier, 7);
    assert_eq!(decide(&hints, &Options { max_tier: 2, ..Options::default() }).tier, 2);
}

#[test]
fn the_engine_gets_the_clients_number_within_the_range() {
    for (priority, sent) in [(10, 10), (-3, -3), (0, 0), (5_000, 100), (i64::MAX, 100), (i64::MIN, -99)] {
        assert_eq!(with_priority(priority).engine_priority, Some(sent), "{priority}");
    }
    let hints = Hints { priority: Some(10), ..Hints::default() };
    assert_eq!(decide(&hints, &Options { engine_priority: false, ..Options::default() }).engine_priority, None);
}

#[test]
fn levels_take_the_nearest_and_of_two_the_one_closer_to_zero() {
    let options: Options = parse_options(br#"{"engine_levels":[10,-10,0]}"#).unwrap();
    assert_eq!(options.check(), Ok(()));
    for (priority, sent) in [(0, 0), (4, 0), (5, 0), (6, 10), (99, 10), (-5, 0), (-6, -10), (i64::MIN, -10)] {
        let hints = Hints { priority: Some(priority), ..Hints::default() };
        assert_eq!(decide(&hints, &options).engine_priority, Some(sent), "{priority}");
    }
}

#[test]
fn options_that_turn_the_order_around_are_refused_by_name() {
    let cases = [
        (Options { max_head_start_s: -1.0, ..Options::default() }, "max_head_start_s"),
        (Options { seconds_per_priority: f64::NAN, ..Options::default() }, "seconds_per_priority"),
        (Options { engine_priority_min: 101, ..Options::default() }, "engine_priority_min"),
        (Options { engine_levels: vec![0, 101], ..Options::default() }, "engine_levels"),
    ];
    for (options, name) in cases {
        assert!(options.check().unwrap_err().contains(name), "{name}");
    }
    assert_eq!(Options::default().check(), Ok(()));
}
