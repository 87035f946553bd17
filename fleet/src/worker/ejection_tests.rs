#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;

use super::*;

const OPTIONS: EjectionOptions =
    EjectionOptions { consecutive_faults: 3, base_ms: 1_000, max_ms: 6_000, max_share: 0.5, wedged_after_ms: 500 };

fn faults(ejections: &mut Ejections, fault: WorkerFault, count: u32, now_ms: u64) -> bool {
    (0..count).fold(false, |_, _| ejections.fault(fault, now_ms, true, &OPTIONS))
}

fn load(running: u32, waiting: u32, prefilled: u64, used: u64) -> Load {
    Load { running, waiting, prefill_uncached_total: prefilled, kv_used_tokens: used, ..Load::default() }
}

#[test]
fn faults_in_a_row_take_a_worker_out_and_a_success_in_between_does_not() {
    let mut ejections = Ejections::default();
    assert!(!faults(&mut ejections, WorkerFault::Answer, 2, 0));
    ejections.success();
    assert!(!faults(&mut ejections, WorkerFault::Answer, 2, 0));
    assert_eq!(ejections.ejected(), None);
    assert!(faults(&mut ejections, WorkerFault::Answer, 1, 7));
    assert_eq!(ejections.ejected(), Some(Ejected { cause: EjectionCause::Answer, until_ms: 1_007 }));
}

#[test]
fn ejections_grow_with_repetition_up_to_their_bound_and_shrink_with_health() {
    let mut ejections = Ejections::default();
    let mut now_ms = 0;
    let mut lengths = Vec::new();
    for faults_needed in [3, 1, 1, 1, 1] {
        assert!(faults(&mut ejections, WorkerFault::Answer, faults_needed, now_ms), "on trial one fault is enough");
        let until_ms = ejections.ejected().unwrap().until_ms;
        lengths.push(until_ms - now_ms);
        assert!(!ejections.tick(until_ms - 1, &OPTIONS));
        assert!(ejections.tick(until_ms, &OPTIONS));
        now_ms = until_ms;
    }
    assert_eq!(lengths, [1_000, 2_000, 4_000, 6_000, 6_000]);
    ejections.success();
    assert!(faults(&mut ejections, WorkerFault::Answer, 3, now_ms + 60_000));
    assert_eq!(ejections.ejected().unwrap().until_ms - now_ms - 60_000, 1_000);
}

#[test]
fn a_good_probe_ends_what_failed_connections_began_and_nothing_else() {
    for (first, cause, back) in
        [(WorkerFault::Connect, EjectionCause::Connect, true), (WorkerFault::Answer, EjectionCause::Answer, false)]
    {
        let mut ejections = Ejections::default();
        faults(&mut ejections, first, 1, 0);
        faults(&mut ejections, WorkerFault::Connect, 2, 0);
        assert_eq!(ejections.ejected().unwrap().cause, cause);
        assert_eq!(ejections.probed(10), back);
        assert_eq!(ejections.ejected().is_none(), back);
    }
}

#[test]
fn without_room_or_with_the_option_off_nobody_is_taken_out() {
    let mut ejections = Ejections::default();
    assert!((0..9).all(|_| !ejections.fault(WorkerFault::Connect, 0, false, &OPTIONS)));
    assert!(ejections.fault(WorkerFault::Connect, 0, true, &OPTIONS), "as soon as there is room");
    let off = EjectionOptions { consecutive_faults: 0, ..OPTIONS };
    let mut ejections = Ejections::default();
    assert!((0..9).all(|_| !ejections.fault(WorkerFault::Connect, 0, true, &off)));
}

#[test]
fn the_share_that_may_be_out_leaves_a_pool_of_one_alone() {
    let most = |workers| OPTIONS.most_out(workers);
    assert_eq!([0, 1, 2, 3, 4, 9].map(most), [0, 0, 1, 1, 2, 4]);
    let tenth = EjectionOptions { max_share: 0.1, ..OPTIONS };
    assert_eq!([1, 2, 20].map(|workers| tenth.most_out(workers)), [0, 1, 2]);
    let none = EjectionOptions { max_share: 0.0, ..OPTIONS };
    assert_eq!([1, 2, 20].map(|workers| none.most_out(workers)), [0, 0, 0]);
}

#[test]
fn a_worker_with_work_on_which_nothing_moves_is_wedged_until_it_moves() {
    let mut ejections = Ejections::default();
    let mut report = |load: &Load, heard, now| ejections.report(load, heard, now, &OPTIONS);
    assert_eq!(report(&load(0, 0, 100, 50), 0, 0), None);
    assert_eq!(report(&load(0, 2, 100, 50), 0, 1_000), None, "the time counts from when the work was there");
    assert_eq!(report(&load(0, 5, 100, 50), 0, 1_499), None);
    assert_eq!(report(&load(0, 9, 100, 50), 0, 1_500), Some(MotionChange::Wedged), "a longer queue is no movement");
    assert_eq!(report(&load(0, 9, 100, 50), 0, 1_600), None, "said once");
    assert_eq!(report(&load(0, 0, 100, 50), 0, 1_700), None, "an empty queue neither");
    assert_eq!(report(&load(1, 8, 130, 60), 0, 1_800), Some(MotionChange::Moving));
    assert_eq!(ejections.ejected(), None);
}

#[test]
fn a_long_decode_an_idle_worker_and_one_that_sends_to_us_are_not_wedged() {
    let mut ejections = Ejections::default();
    for n in 0..100 {
        assert_eq!(ejections.report(&load(1, 3, 100, 50 + n), 0, n * 400, &OPTIONS), None, "KV grows");
    }
    for n in 100..200 {
        assert_eq!(ejections.report(&load(1, 3, 100, 50), n, n * 400, &OPTIONS), None, "bytes come");
    }
    for n in 200..300 {
        assert_eq!(ejections.report(&load(0, 0, 100, 50), 199, n * 400, &OPTIONS), None, "nothing to do");
    }
}

#[test]
fn a_wedged_worker_gets_a_trial_after_its_time_and_is_out_again_for_longer_if_still_stuck() {
    let mut ejections = Ejections::default();
    let stuck = load(0, 1, 100, 50);
    assert_eq!(ejections.report(&stuck, 0, 0, &OPTIONS), None);
    assert_eq!(ejections.report(&stuck, 0, 500, &OPTIONS), Some(MotionChange::Wedged));
    assert!(!ejections.probed(600), "its probes were always well");
    assert!(ejections.tick(1_500, &OPTIONS));
    assert_eq!(ejections.report(&stuck, 0, 1_600, &OPTIONS), None);
    assert_eq!(ejections.report(&stuck, 0, 2_100, &OPTIONS), Some(MotionChange::Wedged));
    assert_eq!(ejections.ejected().unwrap().until_ms, 4_100);
}

proptest! {
    #[test]
    fn whatever_happens_an_ejection_is_bounded_and_ends(steps in prop::collection::vec((0..5u8, 0..2_000u64), 0..200)) {
        let mut ejections = Ejections::default();
        let mut now_ms = 0;
        for (what, pause) in steps {
            now_ms += pause;
            match what {
                0 => { ejections.fault(WorkerFault::Connect, now_ms, true, &OPTIONS); }
                1 => { ejections.fault(WorkerFault::Answer, now_ms, true, &OPTIONS); }
                2 => ejections.success(),
                3 => { ejections.report(&load(0, 1, 0, 0), 0, now_ms, &OPTIONS); }
                _ => { ejections.tick(now_ms, &OPTIONS); }
            }
            if let Some(out) = ejections.ejected() {
                prop_assert!(out.until_ms <= now_ms + OPTIONS.max_ms);
            }
        }
        ejections.tick(now_ms + OPTIONS.max_ms, &OPTIONS);
        prop_assert_eq!(ejections.ejected(), None);
    }
}
