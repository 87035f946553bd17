#![allow(clippy::unwrap_used)]

use super::*;
use crate::recording::line::TurnLine;
use crate::replay::blocks::NONE;
use crate::replay::log::{Entry, Log};
use crate::replay::workload::Timing;

fn work(turns: usize, per_session: usize) -> Workload {
    let line = |n: usize| TurnLine {
        ts: n as u64,
        route: "chat".into(),
        tenant: "0000000000000000".into(),
        session: Some(format!("{:032x}", n / per_session)),
        block_bytes: 512,
        ..TurnLine::default()
    };
    let entries = (0..turns).map(|n| Entry { line: line(n), leaf: NONE }).collect();
    Workload::new(Log { entries, ..Log::default() }, Timing { closed: false, speed: 1.0 }).unwrap()
}

fn result(ttft_ms: u64, cached: u64) -> TurnResult {
    TurnResult { first_us: Some(ttft_ms * 1000), prompt_tokens: 100, cached_tokens: cached, ..TurnResult::default() }
}

fn compare(other: &[TurnResult], first: &[TurnResult], work: &Workload) -> Difference {
    Difference::new(("b", other), ("a", first), work, |_| true, (400, 7))
}

#[test]
fn equal_results_do_not_differ() {
    let work = work(50, 5);
    let results: Vec<TurnResult> = (0..50).map(|n| result(n + 1, n)).collect();
    let difference = compare(&results, &results, &work);
    assert_eq!(difference.hit_ratio, Interval::default());
    assert!(difference.ttft_ms.iter().all(|(_, interval)| *interval == Interval::default()));
    assert_eq!((difference.turns, difference.conversations), (50, 10));
    assert!(!difference.hit_ratio.is_clear());
}

#[test]
fn what_every_turn_has_more_is_certain() {
    let work = work(60, 3);
    let first: Vec<TurnResult> = (0..60).map(|n| result(10 + n, 20)).collect();
    let other: Vec<TurnResult> = (0..60).map(|n| result(15 + n, 30)).collect();
    let difference = compare(&other, &first, &work);
    let five = Interval { difference: 5.0, low: 5.0, high: 5.0 };
    assert!(difference.ttft_ms.iter().all(|(_, interval)| {
        (interval.low - 5.0).abs() < 1e-9 && (interval.high - 5.0).abs() < 1e-9 && interval.is_clear()
    }));
    assert_eq!(difference.ttft_ms[1].1, five);
    assert!((difference.hit_ratio.difference - 0.1).abs() < 1e-12);
}

#[test]
fn noise_is_not_clear_and_conversations_are_drawn_as_wholes() {
    let mut dice = Dice::new(3);
    let turns = 400;
    let noisy: Vec<TurnResult> = (0..turns).map(|_| result(50 + dice.below(100), 50)).collect();
    let again: Vec<TurnResult> = (0..turns).map(|_| result(50 + dice.below(100), 50)).collect();
    let difference = compare(&again, &noisy, &work(turns, 1));
    let (_, mean) = difference.ttft_ms[0];
    assert!(mean.low < mean.difference && mean.difference < mean.high);
    assert!(!mean.is_clear(), "{mean:?}");
    // With all turns in one conversation there is nothing to draw, and no width.
    let one = compare(&again, &noisy, &work(turns, turns));
    assert_eq!(one.conversations, 1);
    assert_eq!((one.ttft_ms[0].1.low, one.ttft_ms[0].1.high), (mean.difference, mean.difference));
    // Turns that come in groups say less than as many alone.
    let grouped: Vec<TurnResult> = (0..turns).map(|n| result(50 + 100 * u64::from(n / 40 % 2 == 0), 50)).collect();
    let flat: Vec<TurnResult> = (0..turns).map(|_| result(100, 50)).collect();
    let width = |per: usize| {
        let (_, mean) = compare(&grouped, &flat, &work(turns, per)).ttft_ms[0];
        mean.high - mean.low
    };
    assert!(width(40) > 2.0 * width(1), "{} {}", width(40), width(1));
}

#[test]
fn only_turns_that_both_served_and_that_count_are_compared() {
    let work = work(10, 1);
    let first: Vec<TurnResult> = (0..10).map(|n| result(n + 1, 0)).collect();
    let mut other = first.clone();
    other[9] = TurnResult { refused: Some("x"), ..TurnResult::default() };
    let difference = Difference::new(("b", &other), ("a", &first), &work, |n| n >= 4, (10, 1));
    assert_eq!(difference.turns, 5);
    let none = Difference::new(("b", &other), ("a", &first), &work, |_| false, (10, 1));
    assert_eq!((none.turns, none.hit_ratio), (0, Interval::default()));
}
