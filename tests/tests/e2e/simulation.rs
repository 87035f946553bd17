//! A short run of the session simulation; `make session-sim` is a long one.

use turnstile_tests::session_sim::run;

fn check(first: u64, seeds: u64) {
    let summary = run(first, seeds);
    assert!(summary.violations.is_empty(), "{summary}");
    assert!(summary.checks > 100 * summary.turns, "{summary}");
    println!("{summary}");
}

#[test]
fn nothing_goes_wrong_in_forty_schedules() {
    check(0, 40);
}

#[test]
fn nothing_goes_wrong_in_those_up_to_the_large_one() {
    check(40, 59);
}

#[test]
fn nothing_goes_wrong_in_another_forty() {
    check(100, 40);
}

#[test]
fn nothing_goes_wrong_in_the_forty_after_those() {
    check(140, 40);
}

#[test]
fn nothing_goes_wrong_in_the_last_forty() {
    check(200, 40);
}

#[test]
fn nothing_goes_wrong_with_hundreds_of_sessions_at_once() {
    let summary = run(99, 1);
    assert!(summary.clients >= 400 && summary.violations.is_empty(), "{summary}");
}
