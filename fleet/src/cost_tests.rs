#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;

use super::*;

fn worker() -> WorkerView {
    WorkerView { prefill_tokens_per_s: 10_000.0, ..WorkerView::new("a:1", WorkerId(0)) }
}

fn cost(worker: &WorkerView, prompt: u64, cached: u64) -> f64 {
    CostOptions::default().cost_ms(worker, prompt, cached)
}

#[test]
fn uncached_waiting_and_pending_tokens_cost_their_prefill() {
    assert_eq!(cost(&worker(), 10_000, 4_000), 600.0);
    assert_eq!(cost(&worker(), 100, 4_000), 0.0, "more cached than asked for is no gain");
    let loaded = WorkerView { waiting_uncached_tokens: 1_000, pending_prefill_tokens: 500, ..worker() };
    assert_eq!(cost(&loaded, 500, 0), 200.0);
}

#[test]
fn a_rate_below_one_counts_as_one() {
    assert_eq!(cost(&WorkerView { prefill_tokens_per_s: 0.0, ..worker() }, 2, 0), 2_000.0);
}

#[test]
fn each_request_costs_decode_and_each_waiting_one_the_queue() {
    assert_eq!(cost(&WorkerView { running: 3, waiting: 1, in_flight: 2, ..worker() }, 0, 0), 4.0 * 2.0 + 50.0);
    assert_eq!(cost(&WorkerView { running: 1, in_flight: 9, ..worker() }, 0, 0), 18.0, "our own count may be fresher");
}

#[test]
fn kv_pressure_counts_from_four_fifths_with_what_the_turn_brings() {
    let at = |kv_used_tokens, expected_decode_tokens, prompt| {
        let view = WorkerView {
            kv_used_tokens,
            expected_decode_tokens,
            kv_capacity_tokens: 1_000,
            prefill_tokens_per_s: f64::INFINITY,
            ..worker()
        };
        cost(&view, prompt, 0)
    };
    assert_eq!(at(800, 0, 0), 0.0);
    assert!((at(900, 0, 0) - 100.0).abs() < 1e-9);
    assert!((at(700, 100, 100) - 100.0).abs() < 1e-9);
    assert!((at(1_000, 0, 200) - 400.0).abs() < 1e-9, "it goes on beyond the pool");
    assert_eq!(cost(&WorkerView { kv_used_tokens: 999, ..worker() }, 0, 0), 0.0, "unknown capacity, no pressure");
}

#[test]
fn moving_has_to_pay_by_the_larger_margin() {
    let options = CostOptions::default();
    assert!(!options.worth_moving(100.0, 50.0));
    assert!(options.worth_moving(100.0, 49.9));
    assert!(!options.worth_moving(1_000.0, 900.0));
    assert!(options.worth_moving(1_000.0, 899.9));
}

#[test]
fn mixing_and_weights_are_fixed_for_other_languages_to_follow() {
    assert_eq!(mix(0), 0xe220_a839_7b1d_cdaf);
    assert_eq!(rendezvous(7, WorkerId(0)), mix(7 ^ 0xe220_a839_7b1d_cdaf));
}

#[test]
fn rendezvous_spreads_evenly_and_a_worker_that_goes_moves_only_its_own() {
    let winner = |seed: u64, workers: &[u32]| {
        workers.iter().copied().max_by_key(|&index| rendezvous(seed, WorkerId(index))).unwrap()
    };
    let mut wins = [0; 4];
    for seed in 0..4_000 {
        let all = winner(seed, &[0, 1, 2, 3]);
        wins[all as usize] += 1;
        let fewer = winner(seed, &[0, 1, 3]);
        assert!(all == 2 || fewer == all, "seed {seed}");
    }
    assert!(wins.iter().all(|wins| (850..1_150).contains(wins)), "{wins:?}");
}

proptest! {
    #[test]
    fn a_cost_is_never_negative_and_never_nan(
        (running, waiting, in_flight) in any::<(u32, u32, u32)>(),
        (queued, used, capacity, pending, expected) in any::<(u64, u64, u64, u64, u64)>(),
        rate in prop_oneof![Just(0.0), Just(f64::NAN), Just(-1.0), 0.0..1e9],
        (prompt, cached) in any::<(u64, u64)>(),
    ) {
        let view = WorkerView {
            running, waiting, in_flight,
            waiting_uncached_tokens: queued, kv_used_tokens: used, kv_capacity_tokens: capacity,
            pending_prefill_tokens: pending, expected_decode_tokens: expected, prefill_tokens_per_s: rate,
            ..worker()
        };
        let cost = cost(&view, prompt, cached);
        prop_assert!(cost >= 0.0 && cost.is_finite(), "{}", cost);
    }

    #[test]
    fn more_cached_never_costs_more(prompt in 0..1_000_000_u64, a in 0..1_000_000_u64, b in 0..1_000_000_u64) {
        let view = WorkerView { kv_used_tokens: 900, kv_capacity_tokens: 1_000, ..worker() };
        prop_assert!(cost(&view, prompt, a.max(b)) <= cost(&view, prompt, a.min(b)));
    }
}
