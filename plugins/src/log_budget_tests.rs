use super::*;

#[test]
fn a_burst_is_as_large_as_a_second_and_refills_with_time() {
    let budget = LogBudget::new(3);
    for _ in 0..3 {
        assert_eq!(budget.take(10), Verdict::Write { dropped_before: 0 });
    }
    assert_eq!(budget.take(10), Verdict::Drop);
    assert_eq!(budget.take(300), Verdict::Drop, "0.87 lines are not one");
    assert_eq!(budget.take(400), Verdict::Write { dropped_before: 2 });
    for _ in 0..3 {
        assert_ne!(budget.take(1_000_000), Verdict::Drop);
    }
    assert_eq!(budget.take(1_000_000), Verdict::Drop);
}

#[test]
fn a_budget_of_zero_drops_everything() {
    let budget = LogBudget::new(0);
    assert_eq!(budget.take(0), Verdict::Drop);
    assert_eq!(budget.take(u64::MAX), Verdict::Drop);
}

#[test]
fn time_that_steps_back_gives_nothing() {
    let budget = LogBudget::new(1);
    assert_ne!(budget.take(1_000), Verdict::Drop);
    assert_eq!(budget.take(500), Verdict::Drop);
    assert_eq!(budget.take(1_500), Verdict::Drop);
}
