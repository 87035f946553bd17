#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;

use super::*;
use crate::cost::rendezvous;

fn worker(index: u32) -> WorkerView {
    WorkerView {
        prefill_tokens_per_s: 10_000.0,
        max_running: 100,
        ..WorkerView::new(format!("w{index}:1"), WorkerId(index))
    }
}

/// A worker whose only cost is `ms` of prefill ahead of the turn.
fn costing(index: u32, ms: u64) -> WorkerView {
    WorkerView { pending_prefill_tokens: ms * 10, ..worker(index) }
}

fn full(view: WorkerView) -> WorkerView {
    WorkerView { limit: Some(0), ..view }
}

fn ids(indices: &[u32]) -> Vec<WorkerId> {
    indices.iter().copied().map(WorkerId).collect()
}

fn input<'a>(workers: &'a [WorkerView], bound: Option<(u32, SessionMode)>, excluded: &'a [WorkerId]) -> RouteInput<'a> {
    RouteInput {
        candidates: Candidates::new(workers, &[]),
        prompt_tokens: 0,
        affinity_hash: 7,
        bound: bound.map(|(worker, mode)| Bound { worker: WorkerId(worker), mode }),
        excluded,
    }
}

fn chosen(input: &RouteInput<'_>) -> (Option<u32>, Why, Vec<u32>) {
    let route = choose(input, &DecideOptions::default());
    (route.target.map(|id| id.0), route.why, route.fallbacks.unwrap().iter().map(|id| id.0).collect())
}

const AFFINITY: SessionMode = SessionMode::Affinity;
const STREAM: SessionMode = SessionMode::Stream;

// === the built-in ===

#[test]
fn the_cheapest_is_chosen_and_the_next_three_follow() {
    let workers =
        [costing(0, 400), costing(1, 100), costing(2, 300), costing(3, 200), costing(4, 500), costing(5, 150)];
    assert_eq!(chosen(&input(&workers, None, &[])), (Some(1), Why::LeastCost, vec![5, 3, 2]));
    let scores = choose(&input(&workers, None, &[]), &DecideOptions::default()).scores.unwrap();
    assert_eq!(scores.first(), Some(&(WorkerId(1), 100.0)));
    assert_eq!(scores.len(), 6);
}

#[test]
fn a_cached_prompt_is_worth_its_prefill() {
    let workers = [costing(0, 10), costing(1, 500)];
    let input = RouteInput {
        candidates: Candidates::new(&workers, &[0, 9_000]),
        prompt_tokens: 10_000,
        ..input(&workers, None, &[])
    };
    let route = choose(&input, &DecideOptions::default());
    assert_eq!((route.target, route.why), (Some(WorkerId(1)), Why::Cached));
    assert_eq!(route.reason.as_deref(), Some("cached 9000 of 10000 tokens"));
}

#[test]
fn only_ready_workers_take_turns() {
    for state in [WorkerState::Draining, WorkerState::Unhealthy, WorkerState::Starting] {
        let workers = [WorkerView { state, ..worker(0) }, costing(1, 900)];
        assert_eq!(chosen(&input(&workers, None, &[])), (Some(1), Why::LeastCost, vec![]), "{state:?}");
        assert_eq!(chosen(&input(&workers[..1], None, &[])), (None, Why::NoWorker, vec![]));
    }
    assert_eq!(chosen(&input(&[worker(0)], None, &ids(&[0]))), (None, Why::NoWorker, vec![]));
    assert_eq!(chosen(&input(&[], None, &[])), (None, Why::NoWorker, vec![]));
}

#[test]
fn workers_below_their_limit_come_before_cheaper_ones_at_it() {
    let workers = [full(costing(0, 0)), costing(1, 300), full(costing(2, 5)), costing(3, 200)];
    assert_eq!(chosen(&input(&workers, None, &[])), (Some(3), Why::LeastCost, vec![1, 0, 2]));
    let all_full = workers.map(full);
    assert_eq!(chosen(&input(&all_full, None, &[])), (Some(0), Why::LeastCost, vec![2, 3, 1]));
}

#[test]
fn equal_workers_are_ordered_by_in_flight_and_then_by_the_turns_own_hash() {
    let busy = WorkerView { in_flight: 1, running: 1, ..worker(0) };
    let same_cost = WorkerView { in_flight: 0, running: 1, ..worker(1) };
    assert_eq!(chosen(&input(&[busy, same_cost], None, &[])).0, Some(1));
    let workers = [worker(0), worker(1), worker(2), worker(3)];
    for seed in 0..50 {
        let input = RouteInput { affinity_hash: seed, ..input(&workers, None, &[]) };
        let best = (0..4).max_by_key(|&index| rendezvous(seed, WorkerId(index)));
        assert_eq!(chosen(&input).0, best);
    }
}

#[test]
fn a_session_stays_unless_another_is_cheaper_by_the_margin() {
    let stays = [costing(0, 50), costing(1, 100)];
    assert_eq!(chosen(&input(&stays, Some((1, AFFINITY)), &[])), (Some(1), Why::Bound, vec![0]));
    let moves = [costing(0, 49), costing(1, 100)];
    assert_eq!(chosen(&input(&moves, Some((1, AFFINITY)), &[])), (Some(0), Why::MovedCheaper, vec![1]));
    let reason = choose(&input(&moves, Some((1, SessionMode::Tag)), &[]), &DecideOptions::default()).reason;
    assert_eq!(reason.as_deref(), Some("moved: cheaper by 51 ms"));
}

#[test]
fn a_session_whose_worker_cannot_take_the_turn_moves_and_says_why() {
    let cases: [(WorkerView, &[WorkerId], &str); 4] = [
        (WorkerView { state: WorkerState::Unhealthy, ..worker(0) }, &[], "moved: bound worker unhealthy"),
        (WorkerView { state: WorkerState::Draining, ..worker(0) }, &[], "moved: bound worker draining"),
        (full(worker(0)), &[], "moved: bound worker at its limit"),
        (worker(0), &[WorkerId(0)], "moved: bound worker excluded"),
    ];
    for (bound, excluded, reason) in cases {
        let workers = [bound, costing(1, 900)];
        let route = choose(&input(&workers, Some((0, AFFINITY)), excluded), &DecideOptions::default());
        assert_eq!(
            (route.target, route.why, route.reason.as_deref()),
            (Some(WorkerId(1)), Why::MovedLost, Some(reason))
        );
    }
    let gone = choose(&input(&[worker(1)], Some((0, AFFINITY)), &[]), &DecideOptions::default());
    assert_eq!(gone.reason.as_deref(), Some("moved: bound worker gone"));
}

#[test]
fn where_all_are_full_a_session_has_no_reason_to_leave() {
    let workers = [full(costing(0, 0)), full(costing(1, 30))];
    assert_eq!(chosen(&input(&workers, Some((1, AFFINITY)), &[])), (Some(1), Why::Bound, vec![0]));
}

#[test]
fn a_streaming_session_stays_as_long_as_its_worker_answers_and_has_no_fallback() {
    let dear = costing(0, 9_000);
    for bound in [dear.clone(), full(dear.clone()), WorkerView { state: WorkerState::Draining, ..dear.clone() }] {
        let workers = [bound, worker(1)];
        assert_eq!(chosen(&input(&workers, Some((0, STREAM)), &[])), (Some(0), Why::Pinned, vec![]));
    }
    let workers = [WorkerView { state: WorkerState::Unhealthy, ..dear }, worker(1)];
    assert_eq!(chosen(&input(&workers, Some((0, STREAM)), &[])), (Some(1), Why::MovedLost, vec![]));
    let workers = [worker(0), worker(1)];
    assert_eq!(chosen(&input(&workers, Some((0, STREAM)), &ids(&[0]))).0, Some(1), "it failed this turn before");
}

#[test]
fn order_is_tier_and_bounded_signed_head_start() {
    let order = |priority, latency_sensitivity_s| {
        let order = OrderInput { priority, latency_sensitivity_s, ..OrderInput::default() };
        order_of(&order, &DecideOptions::default()).head_start_ms.unwrap()
    };
    assert_eq!(order(None, None), 0);
    assert_eq!(order(Some(10), Some(99.0)), 10_000);
    assert_eq!(order(Some(-10), None), -10_000);
    assert_eq!(order(Some(i64::MAX), None), 3_600_000);
    assert_eq!(order(Some(i64::MIN), None), -3_600_000);
    assert_eq!(order(None, Some(1.5)), 1_500);
    assert_eq!(order(None, Some(-5.0)), 0, "the older hint knows no setback");
    assert_eq!(order(None, Some(f64::NAN)), 0);
    assert_eq!(order(None, Some(f64::INFINITY)), 3_600_000);
    let tiered = OrderInput { strict_priority: Some(3), flow: Some("tree"), ..OrderInput::default() };
    let queue = order_of(&tiered, &DecideOptions::default());
    assert_eq!((queue.tier, queue.flow.as_deref()), (Some(3), Some("tree")));
}

#[test]
fn the_engine_gets_the_priority_as_given_within_its_range() {
    let sent = |priority| {
        let order = OrderInput { priority, ..OrderInput::default() };
        let decision = decide(&input(&[], None, &[]), &order, &SessionInput::default(), &DecideOptions::default());
        decision.engine_priority
    };
    assert_eq!(sent(None), None);
    assert_eq!(sent(Some(-7)), Some(EnginePriority::Send(-7)));
    assert_eq!(sent(Some(1 << 40)), Some(EnginePriority::Send(100)));
    assert_eq!(sent(Some(-100)), Some(EnginePriority::Send(-99)), "never below our own warming requests");
}

#[test]
fn a_session_is_made_as_asked_and_a_live_one_is_left_as_it_is() {
    use SessionAction::{Bind, Close, Open};
    let of = |action, live| {
        let session = SessionInput { named: true, action, live, ttl_ms: None };
        let decided = session_of(&session, &DecideOptions::default());
        (decided.action, decided.mode)
    };
    assert_eq!(of(Some(Open), false), (Some(Open), Some(ModeWish::Auto)));
    assert_eq!(of(Some(Open), true), (Some(Open), None), "opening twice is one session");
    assert_eq!(of(Some(Bind), false), (Some(Bind), Some(ModeWish::Affinity)));
    assert_eq!(of(Some(Close), true), (Some(Close), None));
    assert_eq!(of(None, false), (Some(Bind), Some(ModeWish::Affinity)));
    assert_eq!(of(None, true), (Some(Bind), None));
    let off = DecideOptions { bind_identified: false, ..DecideOptions::default() };
    let bare = |live| session_of(&SessionInput { named: true, live, ..SessionInput::default() }, &off).action;
    assert_eq!((bare(false), bare(true)), (None, Some(Bind)));
    assert_eq!(
        session_of(&SessionInput { action: Some(Open), ..SessionInput::default() }, &off),
        SessionDecision::default()
    );
}

#[test]
fn candidates_are_found_by_index_and_by_id() {
    let workers = [
        worker(2),
        worker(5),
        WorkerView { id: "#7".into(), ..worker(9) },
        WorkerView { id: "#2".into(), ..worker(11) },
    ];
    let candidates = Candidates::new(&workers, &[10, 20]);
    let find = |name: &str| candidates.find(name).map(|worker| worker.index.0);
    assert_eq!([find("w5:1"), find("#5"), find("#7"), find("#2")], [Some(5), Some(5), Some(9), Some(2)]);
    assert_eq!([find(""), find("#"), find("#-1"), find("5"), find("w6:1")], [None; 5]);
    assert_eq!(candidates.cached_tokens(WorkerId(5)), 20);
    assert_eq!(candidates.cached_tokens(WorkerId(9)), 0, "what the list lacks is nothing");
    assert_eq!(candidates.cached_tokens(WorkerId(6)), 0);
}

// === what policies write ===

fn three() -> [WorkerView; 4] {
    [
        worker(0),
        WorkerView { state: WorkerState::Draining, ..worker(1) },
        WorkerView { state: WorkerState::Unhealthy, ..worker(2) },
        worker(3),
    ]
}

fn write(name: &str, value: &str) -> Result<Decision, WriteError> {
    let workers = three();
    let mut decision = Decision::default();
    decision.apply_write(name, value.as_bytes(), &Candidates::new(&workers, &[])).map(|()| decision)
}

#[test]
fn what_is_written_is_read_back_with_or_without_the_prefix() {
    let cases = [
        ("route.target", "w3:1", "#3"),
        ("route.target", " #0 ", "#0"),
        ("route.fallbacks", "w3:1, #0,", "#3,#0"),
        ("route.exclude", "w3:1,nobody,#2", "#3,#2"),
        ("route.scores", r##"{"w0:1":1.5,"#3":2}"##, r##"{"#0":1.5,"#3":2.0}"##),
        ("route.reason", "because", "because"),
        ("queue.tier", "4294967295", "4294967295"),
        ("queue.priority", "-2.5", "-2.5"),
        ("queue.priority", "10", "10"),
        ("queue.deadline_ms", "1500", "1500"),
        ("queue.flow", "tree-1", "tree-1"),
        ("session.action", "open", "open"),
        ("session.action", "none", "none"),
        ("session.key", "abc", "abc"),
        ("session.ttl_s", "300", "300"),
        ("session.ttl_s", "0.25", "0.25"),
        ("session.mode", "auto", "auto"),
        ("prefill", "off", "off"),
        ("engine.priority", "-9223372036854775808", "-9223372036854775808"),
        ("engine.priority", "none", "none"),
        ("log.why", "free text, \u{1f980}", "free text, \u{1f980}"),
    ];
    for (name, value, read) in cases {
        let decision = write(name, value).unwrap();
        assert_eq!(decision.read(name).as_deref(), Some(read), "{name}={value}");
        let prefixed = format!("turnstile.{name}");
        assert_eq!(write(&prefixed, value).unwrap(), decision);
        assert_eq!(decision.read(&prefixed).as_deref(), Some(read));
        assert!(Decision::is_name(name) && Decision::is_name(&prefixed));
    }
    assert_eq!(Decision::default().read("route.target"), None);
    assert_eq!(Decision::default().read("nothing"), None);
}

#[test]
fn bad_writes_are_dropped_and_named() {
    use WriteError::{BadNumber, BadValue, NotReady, OutOfRange, TooLong, UnknownName, UnknownWorker};
    let long = "x".repeat(1_025);
    let cases = [
        ("route.target", "w9:1", UnknownWorker),
        ("route.target", "#9", UnknownWorker),
        ("route.target", "#2", NotReady),
        ("route.fallbacks", "#0,#9", UnknownWorker),
        ("route.fallbacks", "#0,#2", NotReady),
        ("route.scores", "{", BadValue),
        ("route.scores", "[1]", BadValue),
        ("route.scores", r##"{"#0":"1"}"##, BadNumber),
        ("route.scores", r##"{"#0":1e999}"##, BadValue),
        ("route.scores", r##"{"#9":1}"##, UnknownWorker),
        ("route.reason", &long, TooLong),
        ("queue.tier", "-1", BadNumber),
        ("queue.tier", "4294967296", BadNumber),
        ("queue.tier", "1.5", BadNumber),
        ("queue.priority", "NaN", BadNumber),
        ("queue.priority", "inf", BadNumber),
        ("queue.priority", "high", BadNumber),
        ("queue.priority", "1e10", OutOfRange),
        ("queue.deadline_ms", "86400001", OutOfRange),
        ("queue.deadline_ms", "-5", BadNumber),
        ("queue.flow", &long, TooLong),
        ("session.action", "OPEN", BadValue),
        ("session.key", &long, TooLong),
        ("session.ttl_s", "0", OutOfRange),
        ("session.ttl_s", "-1", OutOfRange),
        ("session.ttl_s", "2592001", OutOfRange),
        ("session.ttl_s", "soon", BadNumber),
        ("session.mode", "engine", BadValue),
        ("prefill", "maybe", BadValue),
        ("engine.priority", "9223372036854775808", BadNumber),
        ("log.", "x", UnknownName),
        ("log.a b", "x", UnknownName),
        ("log.long", &long, TooLong),
        ("route", "x", UnknownName),
        ("route.targets", "x", UnknownName),
        ("", "x", UnknownName),
    ];
    for (name, value, error) in cases {
        assert_eq!(write(name, value), Err(error), "{name}={value}");
        assert!(!error.label().is_empty());
    }
    let workers = three();
    let mut decision = write("route.target", "#3").unwrap();
    let before = decision.clone();
    let bad = decision.apply_write("route.target", b"\xff", &Candidates::new(&workers, &[]));
    assert_eq!(bad, Err(BadValue));
    assert_eq!(decision, before, "an earlier write stays");
}

#[test]
fn an_empty_value_takes_a_write_back() {
    let workers = three();
    let candidates = Candidates::new(&workers, &[]);
    let mut decision = write("route.target", "#3").unwrap();
    decision.apply_write("route.target", b"", &candidates).unwrap();
    assert_eq!(decision, Decision::default());
}

#[test]
fn log_entries_are_bounded_and_replaced_by_name() {
    let mut decision = Decision::default();
    let none = Candidates::new(&[], &[]);
    for entry in 0..MAX_LOG_ENTRIES {
        decision.apply_write(&format!("log.n{entry}"), b"x", &none).unwrap();
    }
    assert_eq!(decision.apply_write("log.more", b"x", &none), Err(WriteError::TooMany));
    assert_eq!(decision.apply_write("log.n3", b"new", &none), Ok(()));
    assert_eq!(decision.log.len(), MAX_LOG_ENTRIES);
    assert_eq!(decision.read("log.n3").as_deref(), Some("new"));
}

// === settling ===

fn settled(writes: &[(&str, &str)], input: &RouteInput<'_>) -> (Decision, bool) {
    let options = DecideOptions::default();
    let builtin = decide(input, &OrderInput::default(), &SessionInput::default(), &options);
    let mut decision = Decision::default();
    for (name, value) in writes {
        decision.apply_write(name, value.as_bytes(), &input.candidates).unwrap();
    }
    let followed = decision.settle(&builtin, input, &options);
    (decision, followed)
}

fn targets(decision: &Decision) -> (Option<u32>, Why, Vec<u32>) {
    let fallbacks = decision.route.fallbacks.as_ref().unwrap().iter().map(|id| id.0).collect();
    (decision.route.target.map(|id| id.0), decision.route.why, fallbacks)
}

#[test]
fn without_writes_the_builtin_decides() {
    let workers = [costing(0, 200), costing(1, 100)];
    let (decision, followed) = settled(&[], &input(&workers, None, &[]));
    assert_eq!(targets(&decision), (Some(1), Why::LeastCost, vec![0]));
    assert!(!followed);
    assert_eq!(decision.queue.tier, Some(0));
    assert_eq!(decision.route.reason.as_deref(), Some("least cost"));
}

#[test]
fn a_written_target_is_followed_and_the_builtins_order_comes_after_the_written_one() {
    let workers = [costing(0, 300), costing(1, 100), costing(2, 200), costing(3, 400)];
    let writes = [("route.target", "#3"), ("route.fallbacks", "#0"), ("route.reason", "labels"), ("queue.tier", "2")];
    let (decision, followed) = settled(&writes, &input(&workers, None, &[]));
    assert_eq!(targets(&decision), (Some(3), Why::Policy, vec![0, 1, 2]));
    assert!(followed);
    assert_eq!((decision.route.reason.as_deref(), decision.queue.tier), (Some("labels"), Some(2)));
}

#[test]
fn excluding_moves_the_builtins_choice_too() {
    let workers = [costing(0, 300), costing(1, 100), costing(2, 200)];
    let (decision, _) = settled(&[("route.exclude", "#1")], &input(&workers, None, &[]));
    assert_eq!(targets(&decision), (Some(2), Why::LeastCost, vec![0]));
    let (decision, followed) = settled(&[("route.target", "#1"), ("route.exclude", "#1")], &input(&workers, None, &[]));
    assert_eq!((targets(&decision).0, followed), (Some(2), false));
    let (decision, _) = settled(&[("route.exclude", "#0,#1,#2")], &input(&workers, None, &[]));
    assert_eq!(targets(&decision), (None, Why::NoWorker, vec![]));
}

#[test]
fn a_target_that_cannot_take_the_turn_is_not_followed() {
    let workers = [costing(0, 300), WorkerView { state: WorkerState::Draining, ..worker(1) }];
    let (decision, followed) = settled(&[("route.target", "#1")], &input(&workers, None, &[]));
    assert_eq!((targets(&decision), followed), ((Some(0), Why::LeastCost, vec![]), false));
    let workers = [worker(0), worker(1)];
    let failed = ids(&[1]);
    let (decision, followed) = settled(&[("route.target", "#1")], &input(&workers, None, &failed));
    assert_eq!((targets(&decision), followed), ((Some(0), Why::LeastCost, vec![]), false));
}

#[test]
fn no_policy_moves_a_streaming_session() {
    let workers = [WorkerView { state: WorkerState::Draining, ..costing(0, 9_000) }, worker(1)];
    for writes in [
        vec![("route.target", "#1"), ("route.fallbacks", "#1")],
        vec![("route.exclude", "#0")],
        vec![("route.target", "#0")],
    ] {
        let (decision, _) = settled(&writes, &input(&workers, Some((0, STREAM)), &[]));
        assert_eq!(targets(&decision), (Some(0), Why::Pinned, vec![]), "{writes:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_write_is_taken_or_dropped_and_the_settled_decision_is_safe(
        writes in prop::collection::vec((prop::sample::select(vec![
            "route.target", "route.fallbacks", "route.exclude", "route.scores", "queue.priority", "session.ttl_s", "prefill",
        ]), prop_oneof![
            "[#0-9,w:1-]{0,9}",
            prop::collection::vec(0..6_u32, 0..5).prop_map(|ids| {
                ids.iter().map(|id| format!("#{id}")).collect::<Vec<_>>().join(",")
            }),
            any::<String>(),
        ]), 0..8),
        states in prop::collection::vec(0..4_u8, 0..5),
        bound in prop::option::of((0..5_u32, any::<bool>())),
        failed in prop::collection::vec(0..5_u32, 0..2),
    ) {
        let workers: Vec<WorkerView> = states.iter().zip(0..).map(|(state, index)| {
            use WorkerState::{Draining, Ready, Starting, Unhealthy};
            WorkerView { state: [Ready, Draining, Unhealthy, Starting][usize::from(*state)], ..worker(index) }
        }).collect();
        let failed = ids(&failed);
        let input = input(&workers, bound.map(|(worker, stream)| (worker, if stream { STREAM } else { AFFINITY })), &failed);
        let options = DecideOptions::default();
        let builtin = decide(&input, &OrderInput::default(), &SessionInput::default(), &options);
        let mut decision = Decision::default();
        for (name, value) in &writes {
            let before = decision.clone();
            if decision.apply_write(name, value.as_bytes(), &input.candidates).is_err() {
                prop_assert_eq!(&decision, &before);
            }
        }
        decision.settle(&builtin, &input, &options);
        let excluded = decision.route.exclude.clone().unwrap();
        let usable = |id: &WorkerId| {
            input.candidates.get(*id).is_some_and(WorkerView::is_ready) && !excluded.contains(id) && !failed.contains(id)
        };
        match (input.pinned(), decision.route.target) {
            (Some(pinned), target) => prop_assert_eq!(target, Some(pinned)),
            (None, Some(target)) => prop_assert!(usable(&target)),
            (None, None) => prop_assert!(!workers.iter().any(|worker| usable(&worker.index))),
        }
        let fallbacks = decision.route.fallbacks.unwrap();
        prop_assert!(fallbacks.iter().all(usable));
        prop_assert!(fallbacks.iter().all(|id| Some(*id) != decision.route.target));
    }
}
