#![allow(clippy::unwrap_used)]

use super::*;

fn options(percent: u32) -> Canary {
    let text = format!(r#"{{"of": "stable", "percent": {percent}, "min_turns": 20}}"#);
    serde_json::from_str(&text).unwrap()
}

fn canary(percent: u32) -> CanaryRun {
    CanaryRun::new("next", options(percent), None)
}

fn turn(cached_tokens: u64, ttft_ms: f64) -> Shown {
    Shown { prompt: Some(PromptTokens { all: 1000, cached: cached_tokens }), ttft_ms }
}

/// So many turns on each side, in turn; the first verdict.
fn run(canary: &CanaryRun, turns: usize, by_canary: Shown, by_rest: Shown) -> Option<SetAside> {
    let pair = |_| canary.ended(true, by_canary).or_else(|| canary.ended(false, by_rest));
    (0..turns).find_map(pair)
}

#[test]
fn a_share_of_the_sessions_and_more_of_them_without_giving_any_back() {
    let taken = |percent: u32| -> Vec<bool> {
        let canary = canary(percent);
        (0..10_000).map(|session| canary.takes(session)).collect()
    };
    let (five, twenty) = (taken(5), taken(20));
    let count = |taken: &[bool]| taken.iter().filter(|t| **t).count();
    assert!((400..600).contains(&count(&five)), "{}", count(&five));
    assert!((1800..2200).contains(&count(&twenty)), "{}", count(&twenty));
    assert!(five.iter().zip(&twenty).all(|(five, twenty)| !five || *twenty));
    assert_eq!(count(&taken(100)), 10_000);
    let other = CanaryRun::new("another", options(20), None);
    let both = (0..10_000).filter(|session| other.takes(*session)).filter(|s| twenty[*s as usize]).count();
    assert!((300..500).contains(&both), "two canaries are independent: {both}");
}

#[test]
fn one_that_does_as_well_goes_on() {
    let canary = canary(50);
    assert_eq!(run(&canary, 1000, turn(760, 110.0), turn(800, 100.0)), None);
    assert!(canary.aside().is_none() && (0..100).any(|session| canary.takes(session)));
    let facts = canary.json();
    assert_eq!(facts["canary"]["cached_ratio"], 0.76);
    assert!(facts["canary"]["turns"].as_f64().unwrap() < 80.0, "old turns are forgotten: {facts}");
}

#[test]
fn a_loss_of_hits_sets_it_aside_once_both_sides_have_their_turns() {
    let canary = canary(50);
    assert_eq!(run(&canary, 19, turn(0, 100.0), turn(900, 100.0)), None);
    for _ in 0..1000 {
        assert_eq!(canary.ended(true, turn(0, 100.0)), None, "the other side has too few");
    }
    let aside = canary.ended(false, turn(900, 100.0)).unwrap();
    assert_eq!(aside.cause, "cached_loss");
    assert_eq!(aside.reason, "0.000 of its prompt tokens were cached, 0.900 of the others', max_cached_loss is 0.05");
    assert_eq!(canary.aside(), Some(aside));
    assert!(!(0..1000).any(|session| canary.takes(session)));
    // It says so once.
    assert_eq!(run(&canary, 100, turn(0, 100.0), turn(900, 100.0)), None);
}

#[test]
fn slower_first_events_set_it_aside_and_a_few_very_slow_ones_do_not() {
    let slow = canary(50);
    assert_eq!(run(&slow, 1000, turn(800, 126.0), turn(800, 100.0)).unwrap().cause, "ttft");
    let canary = canary(50);
    for n in 0..1000 {
        let ttft_ms = if n % 50 == 49 { 60_000.0 } else { 100.0 };
        assert_eq!(canary.ended(true, turn(800, ttft_ms)), None, "{n}");
        assert_eq!(canary.ended(false, turn(800, 100.0)), None, "{n}");
    }
}

#[test]
fn workers_that_tell_nothing_of_their_caches_are_compared_by_time() {
    let silent = |ttft_ms| Shown { prompt: None, ttft_ms };
    let slow = canary(50);
    assert_eq!(run(&slow, 19, silent(126.0), silent(100.0)), None, "too few turns");
    assert_eq!(run(&slow, 1, silent(126.0), silent(100.0)).unwrap().cause, "ttft");
    // A few that tell are too few to be compared by.
    let canary = canary(50);
    assert_eq!(run(&canary, 1000, silent(100.0), silent(100.0)), None);
    assert_eq!(run(&canary, 19, turn(0, 100.0), turn(900, 100.0)), None);
    assert_eq!(run(&canary, 1, turn(0, 100.0), turn(900, 100.0)).unwrap().cause, "cached_loss");
}

#[test]
fn it_may_get_worse_later() {
    let canary = canary(50);
    assert_eq!(run(&canary, 10_000, turn(800, 100.0), turn(800, 100.0)), None);
    let turns = (0..).find(|_| run(&canary, 1, turn(0, 100.0), turn(800, 100.0)).is_some());
    assert!(turns.unwrap() < 20, "what was long ago weighs little: {turns:?}");
}

#[test]
fn faults_and_slow_decisions_need_no_comparison() {
    let failing = canary(50);
    assert_eq!((failing.failed(), failing.failed()), (None, None));
    let aside = failing.failed().unwrap();
    assert_eq!((aside.cause, aside.reason.as_str()), ("faults", "3 faults, max_faults is 3"));

    let slow = canary(50);
    assert_eq!(slow.decided(Duration::from_millis(50)), None, "one is not enough");
    assert_eq!(slow.decided(Duration::from_millis(50)).unwrap().cause, "decision_ms");
    let quick = canary(50);
    for _ in 0..1000 {
        assert_eq!(quick.decided(Duration::from_micros(50)), None);
    }
}

#[test]
fn a_reset_is_a_new_try_and_a_reload_is_none() {
    let canary = canary(100);
    (0..3).for_each(|_| drop(canary.failed()));
    assert!(!canary.takes(1));
    // The same start of the plugin, in another generation and with another share.
    let again = CanaryRun::new("next", options(30), Some(&canary));
    assert_eq!(again.aside(), canary.aside());
    assert!(again.reset() && !again.reset());
    assert!(canary.takes(1), "they are one");
    assert_eq!(again.failed(), None, "faults are counted anew");
    let other = Canary { of: "another".into(), ..options(100) };
    (0..3).for_each(|_| drop(canary.failed()));
    assert!(CanaryRun::new("next", other, Some(&canary)).takes(1), "held against another plugin");
}
