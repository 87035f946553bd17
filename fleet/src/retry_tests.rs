#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;

use super::*;

const OPTIONS: BudgetOptions = BudgetOptions { ratio: 0.2, floor_per_s: 0 };

fn taken(budget: &mut RetryBudget, now_ms: u64, in_progress: u64, options: &BudgetOptions) -> usize {
    (0..10_000).take_while(|_| budget.take(now_ms, in_progress, options)).count()
}

#[test]
fn retries_are_a_share_of_the_turns_that_came() {
    let mut budget = RetryBudget::default();
    (0..100).for_each(|n| budget.turn(n * 50));
    assert_eq!(taken(&mut budget, 5_000, 0, &OPTIONS), 20);
    (0..10).for_each(|_| budget.turn(5_000));
    assert_eq!(taken(&mut budget, 5_000, 0, &OPTIONS), 2);
}

#[test]
fn long_turns_count_while_they_are_served() {
    let mut budget = RetryBudget::default();
    assert_eq!(taken(&mut budget, 90_000, 50, &OPTIONS), 10);
}

#[test]
fn a_few_are_allowed_in_any_case() {
    let mut budget = RetryBudget::default();
    assert_eq!(taken(&mut budget, 0, 0, &BudgetOptions { floor_per_s: 3, ..OPTIONS }), 30);
    assert_eq!(taken(&mut budget, 0, 0, &BudgetOptions { ratio: 0.0, floor_per_s: 0 }), 0);
}

#[test]
fn what_was_used_comes_back_with_time() {
    let options = BudgetOptions { ratio: 0.0, floor_per_s: 1 };
    let mut budget = RetryBudget::default();
    assert_eq!(taken(&mut budget, 0, 0, &options), 10);
    assert_eq!(taken(&mut budget, 10_999, 0, &options), 0);
    assert_eq!(taken(&mut budget, 11_000, 0, &options), 10);
    assert_eq!(taken(&mut budget, 3_600_000, 0, &options), 10);
}

#[test]
fn pauses_double_up_to_their_bound_and_differ_from_turn_to_turn() {
    let spread = |retry| {
        let all: Vec<u64> = (0..1_000).map(|seed| pause_ms(100, 350, retry, seed)).collect();
        (*all.iter().min().unwrap(), *all.iter().max().unwrap())
    };
    assert_eq!([1, 2, 3, 40].map(spread), [(50, 100), (100, 200), (175, 350), (175, 350)]);
    assert_eq!(pause_ms(100, 350, 2, 7), pause_ms(100, 350, 2, 7), "the same turn waits the same time");
    assert_eq!(pause_ms(0, 350, 2, 7), 0);
}

proptest! {
    #[test]
    fn a_pause_is_never_over_its_bound(base in 0..100_000u64, max in 0..100_000u64, retry: u32, seed: u64) {
        prop_assert!(pause_ms(base, max, retry, seed) <= max);
    }
}
