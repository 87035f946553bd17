#![allow(clippy::unwrap_used)]

use super::*;
use crate::Options;

const BOUND: (bool, bool, bool) = (true, false, false);
const AT_LIMIT: (bool, bool, bool) = (false, true, false);
const EXCLUDED: (bool, bool, bool) = (false, false, true);

fn worker(index: u32) -> Worker {
    Worker { index, prefill_tokens_per_s: 10_000.0, ..Worker::default() }
}

fn flags(worker: Worker, (bound, at_limit, excluded): (bool, bool, bool)) -> Worker {
    worker.with_flags(bound, at_limit, excluded)
}

/// A worker whose only cost is `ms` of prefill ahead of the turn.
fn costing(index: u32, ms: u64) -> Worker {
    Worker { pending_prefill_tokens: ms * 10, ..worker(index) }
}

fn terms(prompt_tokens: u64) -> Terms {
    Terms { cost: Options::default().cost(), prompt_tokens, seed: 7, margin_ms: 50.0, margin_share: 0.1, others: 3 }
}

fn choose(workers: &[Worker], prompt_tokens: u64, pinned: bool) -> Option<Choice> {
    Survey::of(workers.iter().copied(), terms(prompt_tokens)).choose(pinned)
}

fn why(workers: &[Worker], pinned: bool) -> (u32, String) {
    let choice = choose(workers, 0, pinned).unwrap();
    (choice.target, choice.why.to_string())
}

#[test]
fn the_cheapest_is_chosen_and_the_next_three_follow_in_order() {
    let workers =
        [costing(0, 400), costing(1, 100), costing(2, 300), costing(3, 200), costing(4, 500), costing(5, 150)];
    let choice = choose(&workers, 0, false).unwrap();
    assert_eq!((choice.target, choice.cost_ms), (1, 100.0));
    assert_eq!(choice.others, [(5, 150.0), (3, 200.0), (2, 300.0)]);
    assert_eq!(choice.why, Why::LeastCost);
}

#[test]
fn a_cached_prompt_is_worth_its_prefill() {
    let workers = [costing(0, 10), Worker { cached_tokens: 9_000, ..costing(1, 500) }];
    let choice = choose(&workers, 10_000, false).unwrap();
    assert_eq!(choice.target, 1);
    assert_eq!(choice.why.to_string(), "cached 9000 of 10000 tokens");
}

#[test]
fn more_cached_than_the_prompt_is_reported_as_all_of_it() {
    let choice = choose(&[Worker { cached_tokens: 900, ..worker(0) }], 500, false).unwrap();
    assert_eq!(choice.why, Why::Cached { cached: 500, prompt: 500 });
}

#[test]
fn only_ready_workers_that_are_not_excluded_are_used() {
    let not_ready = [WorkerState::Draining, WorkerState::Unhealthy, WorkerState::Starting];
    for state in not_ready {
        assert_eq!(choose(&[Worker { state, ..worker(0) }], 0, false), None, "{state:?}");
    }
    assert_eq!(choose(&[flags(worker(0), EXCLUDED)], 0, false), None);
    let workers =
        [flags(costing(0, 1), EXCLUDED), Worker { state: WorkerState::Draining, ..costing(1, 1) }, costing(2, 900)];
    let choice = choose(&workers, 0, false).unwrap();
    assert_eq!((choice.target, choice.others.len()), (2, 0));
}

#[test]
fn a_free_worker_is_preferred_to_a_cheaper_one_at_its_limit() {
    let workers = [flags(costing(0, 1), AT_LIMIT), costing(1, 900)];
    assert_eq!(choose(&workers, 0, false).unwrap().target, 1);
    assert_eq!(choose(&workers, 0, false).unwrap().others, [(0, 1.0)], "but it comes before nothing");
    let all_full = [flags(costing(0, 900), AT_LIMIT), flags(costing(1, 1), AT_LIMIT)];
    assert_eq!(choose(&all_full, 0, false).unwrap().target, 1);
}

#[test]
fn no_workers_no_choice() {
    assert_eq!(choose(&[], 0, false), None);
    assert_eq!(choose(&[], 0, true), None);
}

#[test]
fn a_bound_session_stays_within_the_absolute_margin() {
    assert_eq!(why(&[flags(costing(0, 150), BOUND), costing(1, 100)], false), (0, "bound".into()));
    assert_eq!(why(&[flags(costing(0, 152), BOUND), costing(1, 100)], false), (1, "moved: cheaper by 52 ms".into()));
}

#[test]
fn a_bound_session_stays_within_a_tenth_of_its_cost() {
    assert_eq!(why(&[flags(costing(0, 1_000), BOUND), costing(1, 900)], false), (0, "bound".into()));
    assert_eq!(why(&[flags(costing(0, 1_000), BOUND), costing(1, 890)], false), (1, "moved: cheaper by 110 ms".into()));
}

#[test]
fn a_session_that_stays_has_the_cheapest_of_the_others_behind_it() {
    let workers = [flags(costing(0, 120), BOUND), costing(1, 100), costing(2, 110), costing(3, 115), costing(4, 119)];
    let choice = choose(&workers, 0, false).unwrap();
    assert_eq!(choice.target, 0);
    assert_eq!(choice.others, [(1, 100.0), (2, 110.0), (3, 115.0)]);
}

#[test]
fn a_bound_worker_that_cannot_take_the_turn_is_left() {
    let other = costing(1, 5_000);
    let bound = flags(worker(0), BOUND);
    assert_eq!(why(&[bound.with_flags(true, false, true), other], false), (1, "moved: bound worker excluded".into()));
    assert_eq!(
        why(&[bound.with_flags(true, true, false), other], false),
        (1, "moved: bound worker at its limit".into())
    );
    for (state, text) in [
        (WorkerState::Draining, "draining"),
        (WorkerState::Unhealthy, "unhealthy"),
        (WorkerState::Starting, "starting"),
    ] {
        let workers = [Worker { state, ..bound }, other];
        assert_eq!(why(&workers, false), (1, format!("moved: bound worker {text}")));
    }
}

#[test]
fn where_all_are_at_their_limit_the_session_stays() {
    let workers = [costing(0, 120).with_flags(true, true, false), flags(costing(1, 100), AT_LIMIT)];
    assert_eq!(why(&workers, false), (0, "bound".into()));
}

#[test]
fn a_pinned_session_never_leaves_a_worker_that_answers() {
    let cheap = costing(1, 1);
    let bound = flags(costing(0, 60_000), BOUND);
    assert_eq!(why(&[bound, cheap], true), (0, "bound".into()));
    assert_eq!(why(&[bound.with_flags(true, true, false), cheap], true), (0, "bound".into()));
    assert_eq!(why(&[Worker { state: WorkerState::Draining, ..bound }, cheap], true), (0, "bound".into()));
    assert_eq!(why(&[Worker { state: WorkerState::Draining, ..bound }], true), (0, "bound".into()));
    assert!(choose(&[bound, cheap], 0, true).unwrap().others.is_empty(), "its turns mean nothing elsewhere");
}

#[test]
fn a_pinned_session_leaves_a_worker_that_is_gone() {
    let cheap = costing(1, 1);
    let bound = flags(costing(0, 60_000), BOUND);
    assert_eq!(why(&[Worker { state: WorkerState::Unhealthy, ..bound }, cheap], true).0, 1);
    assert_eq!(why(&[bound.with_flags(true, false, true), cheap], true).0, 1);
}

#[test]
fn equal_costs_go_to_fewer_in_flight() {
    // Reported sequences hide the difference from the cost.
    let busy = Worker { running: 9, in_flight: 3, ..worker(0) };
    let less = Worker { running: 9, in_flight: 2, ..worker(1) };
    assert_eq!(choose(&[busy, less], 0, false).unwrap().target, 1);
}

#[test]
fn equal_workers_are_shared_out_by_the_seed_whatever_their_order() {
    let workers: Vec<Worker> = (0..4).map(worker).collect();
    let reversed: Vec<Worker> = workers.iter().rev().copied().collect();
    let mut chosen = [0u32; 4];
    for seed in 0..4_000u64 {
        let terms = Terms { seed: scramble(seed), ..terms(0) };
        let target = Survey::of(workers.iter().copied(), terms).choose(false).unwrap().target;
        assert_eq!(Survey::of(reversed.iter().copied(), terms).choose(false).unwrap().target, target);
        *chosen.get_mut(target as usize).unwrap() += 1;
    }
    assert!(chosen.iter().all(|count| (850..1_150).contains(count)), "{chosen:?}");
}

#[test]
fn a_worker_that_leaves_moves_only_its_own_share() {
    for seed in 0..500u64 {
        let terms = Terms { seed: scramble(seed), ..terms(0) };
        let before = Survey::of((0..5).map(worker), terms).choose(false).unwrap().target;
        let after = Survey::of((0..4).map(worker), terms).choose(false).unwrap().target;
        assert!(before == 4 || before == after, "seed {seed}: {before} became {after}");
    }
}

/// The ranking against the plain way: sort everything.
#[test]
fn the_best_few_are_those_a_full_sort_would_give() {
    let mut state = 1u64;
    let mut random = |below: u64| {
        state = scramble(state);
        state % below
    };
    for _ in 0..500 {
        let count = random(40);
        let workers: Vec<Worker> = (0..count)
            .map(|index| {
                let in_flight = random(3) as u32;
                let worker = Worker { in_flight, running: 5, cached_tokens: random(3) * 100, ..worker(index as u32) };
                worker.with_flags(false, random(3) == 0, random(4) == 0)
            })
            .collect();
        let terms = terms(1_000);
        let mut sorted: Vec<&Worker> = workers.iter().filter(|worker| !worker.is_excluded()).collect();
        sorted.sort_by(|left, right| {
            let cost = |worker: &Worker| terms.cost.of(worker, terms.prompt_tokens);
            (left.is_at_limit().cmp(&right.is_at_limit()))
                .then(cost(left).total_cmp(&cost(right)))
                .then(left.in_flight.cmp(&right.in_flight))
                .then(weight(terms.seed, right.index).cmp(&weight(terms.seed, left.index)))
        });
        let expected: Vec<u32> = sorted.iter().take(4).map(|worker| worker.index).collect();
        let choice = Survey::of(workers.iter().copied(), terms).choose(false);
        let ranked =
            |choice: Choice| std::iter::once(choice.target).chain(choice.others.into_iter().map(|(index, _)| index));
        let got: Vec<u32> = choice.into_iter().flat_map(ranked).collect();
        assert_eq!(got, expected);
    }
}
