#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;

use super::*;

fn worker() -> WorkerView {
    WorkerView::new("a:1", WorkerId(0))
}

const LIMITS: LimitOptions = LimitOptions { kv_high_watermark: 0.9, default_limit: 4 };

#[test]
fn a_configured_limit_counts_our_own_turns_and_nothing_else() {
    let full = WorkerView { limit: Some(2), in_flight: 2, ..worker() };
    assert!(full.at_limit(&LIMITS));
    let others = WorkerView { limit: Some(2), in_flight: 1, running: 50, waiting: 9, max_running: 8, ..worker() };
    assert!(!others.at_limit(&LIMITS));
}

#[test]
fn without_one_the_workers_rows_are_the_limit_less_those_held_by_idle_sessions() {
    let at = |running, waiting, held_rows| {
        WorkerView { running, waiting, held_rows, max_running: 8, ..worker() }.at_limit(&LIMITS)
    };
    assert!(!at(7, 0, 0));
    assert!(at(8, 0, 0));
    assert!(at(7, 1, 0));
    assert!(at(5, 0, 3));
    assert!(!at(4, 0, 3));
    assert!(at(0, 0, 8), "with all rows held it runs nothing");
    assert!(at(0, 0, 9));
}

#[test]
fn a_worker_that_tells_no_rows_has_the_default_limit() {
    assert!(!WorkerView { in_flight: 3, ..worker() }.at_limit(&LIMITS));
    assert!(WorkerView { in_flight: 4, ..worker() }.at_limit(&LIMITS));
}

#[test]
fn a_worker_that_queues_with_its_kv_pool_over_the_watermark_is_full() {
    let at = |waiting, kv_used_tokens| {
        let view = WorkerView { waiting, kv_used_tokens, kv_capacity_tokens: 100, max_running: 64, ..worker() };
        view.at_limit(&LIMITS)
    };
    assert!(at(1, 91));
    assert!(!at(1, 90));
    assert!(!at(0, 100), "a full cache alone is an ordinary thing");
    assert!(!WorkerView { waiting: 1, kv_used_tokens: 91, max_running: 64, ..worker() }.at_limit(&LIMITS));
}

#[test]
fn an_old_report_is_corrected_by_what_we_sent_and_got_back_since() {
    let view = |running, in_flight_at_load, in_flight| {
        WorkerView { running, in_flight_at_load, in_flight, ..worker() }.occupancy()
    };
    assert_eq!(view(10, 4, 4), 10, "six are of other clients");
    assert_eq!(view(10, 4, 7), 13);
    assert_eq!(view(10, 4, 0), 6);
    assert_eq!(view(0, 4, 3), 3, "never less than our own");
    assert_eq!(view(u32::MAX, 0, 5), u32::MAX);
}

#[test]
fn flights_pay_prefill_until_the_first_byte_and_output_until_the_end() {
    let mut flights = Flights::default();
    let mut first = flights.dispatch(1_000, 200);
    let second = flights.dispatch(50, 0);
    assert_eq!(
        (flights.in_flight(), flights.pending_prefill_tokens(), flights.expected_decode_tokens()),
        (2, 1_050, 200)
    );
    flights.first_byte(&mut first);
    flights.first_byte(&mut first);
    assert_eq!((flights.pending_prefill_tokens(), flights.expected_decode_tokens()), (50, 200));
    flights.finish(second);
    flights.finish(first);
    assert_eq!(flights, Flights::default());
}

proptest! {
    #[test]
    fn flights_return_to_zero_in_any_order(
        turns in prop::collection::vec((0..1_u64 << 40, 0..1_u64 << 40, any::<bool>(), any::<prop::sample::Index>()), 0..40),
    ) {
        let mut flights = Flights::default();
        let mut open = Vec::new();
        for (uncached, osl, answers, _) in &turns {
            let mut flight = flights.dispatch(*uncached, *osl);
            if *answers {
                flights.first_byte(&mut flight);
            }
            open.push(flight);
        }
        for (_, _, _, which) in &turns {
            flights.finish(open.swap_remove(which.index(open.len())));
        }
        prop_assert_eq!(flights, Flights::default());
    }
}

/// As SGLang 0.5.23 with two ranks answers, less the keys that nobody reads.
const TWO_RANKS: &str = r#"{"timestamp":"2026-11-29T17:46:21.957078+00:00","version":"0.5.23","accelerator":null,"loads":[
 {"dp_rank":0,"num_running_reqs":1,"num_waiting_reqs":2,"num_waiting_uncached_tokens":30,"num_used_tokens":19,
  "max_total_num_tokens":20000,"max_running_requests":2500,"token_usage":0.0009,"cache_hit_rate":0.5625,
  "total_prefill_uncached_tokens":27,"total_prefill_busy_us":379900,"decode_moments":[20.0,20.0]},
 {"dp_rank":1,"num_running_reqs":3,"num_waiting_reqs":0,"num_waiting_uncached_tokens":0,"num_used_tokens":49,
  "max_total_num_tokens":20000,"max_running_requests":2500,"token_usage":0.0024,
  "total_prefill_uncached_tokens":61,"total_prefill_busy_us":355139}]}"#;

#[test]
fn a_load_report_is_summed_over_ranks() {
    let load = Load::parse(TWO_RANKS.as_bytes()).unwrap();
    assert_eq!((load.running, load.waiting, load.max_running), (4, 2, 5_000));
    assert_eq!((load.waiting_uncached_tokens, load.kv_used_tokens, load.kv_capacity_tokens), (30, 68, 40_000));
    assert_eq!((load.prefill_uncached_total, load.prefill_busy_us_total), (88, 735_039));
    let ranks: Vec<_> = load.ranks.iter().map(|rank| (rank.rank, rank.running, rank.kv_used_tokens)).collect();
    assert_eq!(ranks, [(0, 1, 19), (1, 3, 49)]);
}

#[test]
fn a_report_with_holes_is_taken_and_what_is_not_told_is_unknown() {
    let load = Load::parse(br#"{"loads":[{"num_running_reqs":2,"max_running_requests":8},{"num_running_reqs":null}]}"#)
        .unwrap();
    assert_eq!((load.running, load.max_running, load.kv_capacity_tokens), (2, 0, 0), "half a capacity is none");
}

#[test]
fn what_is_no_report_is_refused() {
    assert!(matches!(Load::parse(br#"{"loads":[]}"#), Err(LoadError::NoRank)));
    for body in ["", "Internal Server Error", "[]", r#"{"loads":7}"#, r#"{"loads":[{"num_running_reqs":-1}]}"#] {
        assert!(matches!(Load::parse(body.as_bytes()), Err(LoadError::Malformed(_))), "{body}");
    }
}

#[test]
fn the_engines_counters_teach_the_rate_and_then_ttft_does_not() {
    let mut rates = Rates::new(1_000.0);
    rates.observe_totals(1_000_000, 100_000_000);
    assert_eq!(rates.prefill_tokens_per_s(), 1_000.0, "a first report is no difference");
    rates.observe_totals(1_400_000, 120_000_000);
    assert!((rates.prefill_tokens_per_s() - 20_000.0).abs() < 1.0, "400k tokens in 20 s say all");
    rates.observe_ttft(8_192, 60_000.0);
    assert!((rates.prefill_tokens_per_s() - 20_000.0).abs() < 1.0, "it waited, that is all");
    assert_eq!(rates.ttft_ms(), 60_000.0);
}

#[test]
fn counters_that_went_back_belong_to_a_new_process() {
    let mut rates = Rates::new(1_000.0);
    rates.observe_totals(1_000_000, 100_000_000);
    rates.observe_totals(100, 10);
    assert_eq!(rates.prefill_tokens_per_s(), 1_000.0);
    rates.observe_totals(100_100, 10_000_010);
    assert!((rates.prefill_tokens_per_s() - 10_000.0).abs() < 1.0);
}

#[test]
fn a_short_prompt_says_little_of_the_rate_and_a_cached_one_nothing() {
    let mut rates = Rates::new(1_000.0);
    rates.observe_ttft(63, 1.0);
    assert_eq!(rates.prefill_tokens_per_s(), 1_000.0);
    rates.observe_ttft(100, 10.0);
    assert!(rates.prefill_tokens_per_s() < 1_200.0);
    rates.observe_ttft(100_000, 10_000.0);
    assert!((rates.prefill_tokens_per_s() - 10_000.0).abs() < 1.0);
}

#[test]
fn averages_follow_and_take_no_nonsense() {
    let mut rates = Rates::default();
    assert_eq!((rates.ttft_ms(), rates.itl_ms()), (0.0, 0.0));
    for ms in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
        rates.observe_ttft(1_000, ms);
        rates.observe_decode(10, ms);
    }
    rates.observe_decode(0, 10.0);
    assert_eq!(rates, Rates::default());
    rates.observe_decode(10, 200.0);
    assert_eq!(rates.itl_ms(), 20.0);
    rates.observe_decode(10, 400.0);
    assert!((rates.itl_ms() - 24.0).abs() < 1e-9);
}

#[test]
fn a_view_shows_the_last_report_and_a_restart_forgets_it() {
    let mut worker = Worker::new("a:1", WorkerId(3));
    let flight = worker.flights.dispatch(100, 50);
    worker.report(Load::parse(TWO_RANKS.as_bytes()).unwrap());
    let other = worker.flights.dispatch(10, 0);
    let view = worker.view(2);
    assert_eq!(
        (&*view.id, view.index, view.running, view.max_running, view.held_rows),
        ("a:1", WorkerId(3), 4, 5_000, 2)
    );
    assert_eq!((view.in_flight, view.in_flight_at_load), (2, 1));
    assert_eq!((view.pending_prefill_tokens, view.expected_decode_tokens), (110, 50));
    assert_eq!(view.occupancy(), 7);
    let mut removed = Worker::new("a:1", WorkerId(3));
    let _flight = removed.flights.dispatch(100, 50);
    removed.report(Load::parse(TWO_RANKS.as_bytes()).unwrap());
    removed.forget_load();
    let alone = removed.view(2);
    assert_eq!((alone.occupancy(), alone.waiting, alone.kv_used_tokens), (1, 0, 0), "nothing but what we send it");
    assert_eq!((alone.max_running, alone.kv_capacity_tokens), (view.max_running, view.kv_capacity_tokens));
    worker.restarted();
    assert_eq!((worker.view(0).running, worker.view(0).max_running, worker.view(0).occupancy()), (0, 0, 2));
    worker.flights.finish(flight);
    worker.flights.finish(other);
}

#[test]
fn an_ejected_worker_is_unhealthy_and_all_of_them_ejected_are_used_all_the_same() {
    let options = EjectionOptions { consecutive_faults: 1, ..EjectionOptions::default() };
    let workers: Vec<Worker> = (0..3)
        .map(|n| {
            let mut worker = Worker::new("a", WorkerId(n));
            if n > 0 {
                worker.ejections.fault(WorkerFault::Answer, 0, true, &options);
            }
            worker
        })
        .collect();
    let states = |views: &[WorkerView]| views.iter().map(|view| view.state).collect::<Vec<_>>();
    let mut views: Vec<WorkerView> = workers.iter().map(|worker| worker.view(0)).collect();
    fail_open(&mut views, &[]);
    use WorkerState::{Draining, Ready, Unhealthy};
    assert_eq!(states(&views), [Ready, Unhealthy, Unhealthy]);
    assert_eq!((views[0].shown_state(), views[1].shown_state()), ("ready", "ejected"));
    let mut views: Vec<WorkerView> = workers.iter().map(|worker| worker.view(0)).collect();
    views[0].state = Draining;
    fail_open(&mut views, &[]);
    assert_eq!(states(&views), [Draining, Ready, Ready]);
    let mut views: Vec<WorkerView> = workers.iter().map(|worker| worker.view(0)).collect();
    fail_open(&mut views, &[WorkerId(0)]);
    assert_eq!(states(&views), [Ready, Ready, Ready], "the only ready one has failed the turn");
    let mut drained = workers[1].clone();
    drained.state = Draining;
    assert_eq!((drained.state(), drained.ejected()), (Draining, None), "an operator's word stands above");
}

#[test]
fn room_is_what_ready_workers_have_free() {
    let options = LimitOptions { default_limit: 4, ..LimitOptions::default() };
    let view = |index: u32| WorkerView::new("w", WorkerId(index));
    let limited = WorkerView { limit: Some(3), in_flight: 1, ..view(0) };
    let reported = WorkerView { max_running: 8, running: 2, held_rows: 1, ..view(1) };
    let full = WorkerView { max_running: 2, running: 2, ..view(2) };
    let down = WorkerView { state: WorkerState::Unhealthy, ..view(3) };
    let starting = WorkerView { state: WorkerState::Starting, ..view(4) };
    assert_eq!(room(&[limited.clone(), reported, full, down.clone(), starting.clone()], &options), 2 + 5);
    assert_eq!(view(5).free_places(&options), 4, "of a worker that tells no limit");
    assert_eq!(room(&[down.clone(), starting], &options), 0, "a starting worker is waited for");
    assert_eq!(room(&[down], &options), u32::MAX, "nothing to wait for");
    assert_eq!(room(&[WorkerView { in_flight: 3, ..limited }], &options), 0);
}
