#![allow(clippy::unwrap_used)]

use super::*;
use turnstile_policy::parse_options;

fn idle() -> Worker {
    Worker { prefill_tokens_per_s: 10_000.0, kv_capacity_tokens: 100_000, ..Worker::default() }
}

fn cost(worker: &Worker, prompt_tokens: u64) -> f64 {
    Options::default().cost().of(worker, prompt_tokens)
}

#[test]
fn an_idle_worker_costs_the_prefill_of_what_it_does_not_have() {
    assert_eq!(cost(&idle(), 5_000), 500.0);
    assert_eq!(cost(&Worker { cached_tokens: 4_000, ..idle() }, 5_000), 100.0);
    assert_eq!(cost(&Worker { cached_tokens: 9_000, ..idle() }, 5_000), 0.0, "more cached than asked costs nothing");
}

#[test]
fn tokens_ahead_of_the_turn_are_prefilled_first() {
    let worker = Worker { waiting_uncached_tokens: 1_000, pending_prefill_tokens: 500, ..idle() };
    assert_eq!(cost(&worker, 0), 150.0);
}

#[test]
fn sequences_are_the_larger_of_reported_and_own_and_waiting_ones_cost_more() {
    assert_eq!(cost(&Worker { running: 4, in_flight: 3, ..idle() }, 0), 8.0);
    assert_eq!(cost(&Worker { running: 4, in_flight: 9, ..idle() }, 0), 18.0);
    assert_eq!(cost(&Worker { running: 4, waiting: 2, ..idle() }, 0), 6.0 * 2.0 + 2.0 * 50.0);
}

#[test]
fn kv_pressure_begins_at_four_fifths_and_counts_what_is_coming() {
    assert_eq!(cost(&Worker { kv_used_tokens: 80_000, ..idle() }, 0), 0.0);
    let near = |left: f64, right: f64| (left - right).abs() < 1e-6;
    assert!(near(cost(&Worker { kv_used_tokens: 90_000, ..idle() }, 0), 100.0));
    assert!(near(cost(&Worker { kv_used_tokens: 80_000, expected_decode_tokens: 10_000, ..idle() }, 0), 100.0));
    assert!(near(cost(&Worker { kv_used_tokens: 80_000, ..idle() }, 10_000), 1_000.0 + 100.0));
    let unknown = Worker { kv_used_tokens: 90_000, kv_capacity_tokens: 0, ..idle() };
    assert_eq!(cost(&unknown, 0), 0.0, "no pressure where the capacity is not known");
}

#[test]
fn whatever_the_table_says_the_cost_is_a_number() {
    for rate in [0.0, -5.0, f64::NAN, f64::NEG_INFINITY] {
        let worker = Worker { prefill_tokens_per_s: rate, ..idle() };
        assert_eq!(cost(&worker, 3), 3_000.0, "a rate of {rate} counts as one token per second");
    }
    let full = Worker {
        running: u32::MAX,
        waiting: u32::MAX,
        waiting_uncached_tokens: u64::MAX,
        pending_prefill_tokens: u64::MAX,
        kv_used_tokens: u64::MAX,
        kv_capacity_tokens: 1,
        expected_decode_tokens: u64::MAX,
        ..Worker::default()
    };
    assert!(cost(&full, u64::MAX).is_finite());
}

#[test]
fn options_that_turn_the_rule_around_are_refused_by_name() {
    for option in ["decode_ms_per_request", "kv_pressure_ms", "queue_ms", "margin_ms", "margin_share"] {
        let options: Options = parse_options(format!("{{\"{option}\":-1}}").as_bytes()).unwrap();
        let error = options.check().unwrap_err();
        assert!(error.contains(option), "{error}");
    }
    assert_eq!(Options::default().check(), Ok(()));
}
