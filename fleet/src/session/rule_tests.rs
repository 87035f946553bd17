//! Rules that the state tables do not show: timing, caps, bounds, ids, degradation.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;

const W: WorkerId = WorkerId(1);
const OTHER: WorkerId = WorkerId(2);

fn key(n: u128) -> SessionKey {
    SessionKey(n)
}

fn sessions() -> Sessions {
    Sessions::new(SessionOptions { max_sessions: 8, ..SessionOptions::default() }, 7)
}

/// An opening turn on `/generate` of a worker that can do everything.
fn open(n: u128, now_ms: u64) -> BeginTurn {
    BeginTurn {
        key: key(n),
        action: SessionAction::Open,
        wish: None,
        ttl_ms: Some(10_000),
        worker: W,
        rank: None,
        capabilities: Capabilities { tag: true, stream: true, priority: true, dp_size: 1 },
        accepts: Accepts { session_params: true, session_id: true },
        cap: StreamCap { rows: 2, tokens: 1_000 },
        ticket: None,
        now_ms,
    }
}

fn chat(turn: BeginTurn) -> BeginTurn {
    BeginTurn { accepts: Accepts { session_params: false, session_id: true }, ..turn }
}

fn with(turn: BeginTurn, action: SessionAction) -> BeginTurn {
    BeginTurn { action, ..turn }
}

fn lease(sessions: &mut Sessions, turn: &BeginTurn) -> Lease {
    match begin(sessions, turn) {
        (Outcome::Ready(lease), closes) => {
            assert!(closes.is_empty());
            lease
        }
        other => panic!("not ready: {other:?}"),
    }
}

fn begin(sessions: &mut Sessions, turn: &BeginTurn) -> (Outcome, Vec<EngineClose>) {
    let Begin { outcome, closes } = sessions.begin(turn);
    (outcome, closes)
}

fn used(prompt_tokens: u64) -> TurnEnd {
    TurnEnd::Finished(Some(Usage { prompt_tokens, completion_tokens: 10, cached_tokens: 3 }))
}

/// A whole turn; the closes that its end brought.
fn run(sessions: &mut Sessions, turn: &BeginTurn, tokens: u64) -> Vec<EngineClose> {
    let mut lease = lease(sessions, turn);
    assert!(sessions.opened(&mut lease, OpenResult::Opened, turn.now_ms).is_empty());
    sessions.end(lease, used(tokens), turn.now_ms)
}

#[test]
fn the_idle_timeout_slides_and_counts_from_the_end_of_a_turn() {
    let mut sessions = sessions();
    let turn = open(1, 0);
    let mut first = lease(&mut sessions, &turn);
    assert!(sessions.opened(&mut first, OpenResult::Opened, 0).is_empty());
    assert!(sessions.expire(1_000_000).is_empty(), "nothing expires while a turn runs");
    assert!(sessions.end(first, used(5), 1_000_000).is_empty());
    assert!(sessions.expire(1_009_999).is_empty());
    assert_eq!(sessions.view(key(1), 1_009_999).unwrap().idle_ms, 9_999);
    let again = lease(&mut sessions, &BeginTurn { now_ms: 1_009_999, ..with(turn, SessionAction::None) });
    assert!(sessions.end(again, used(5), 1_020_000).is_empty());
    assert_eq!(sessions.next_deadline_ms(), Some(1_030_000));
    let closes = sessions.expire(1_030_000);
    assert_eq!(closes.len(), 1);
    assert_eq!(closes[0].cause, CloseCause::Expired);
}

#[test]
fn an_overdue_session_is_expired_for_a_turn_that_comes_before_the_sweep() {
    let mut sessions = sessions();
    run(&mut sessions, &open(1, 0), 5);
    assert_eq!(sessions.view(key(1), 10_000), None);
    let (outcome, closes) = begin(&mut sessions, &with(open(1, 10_000), SessionAction::None));
    assert_eq!(outcome, Outcome::Ordinary(NoSession::Unknown));
    assert_eq!(closes.len(), 1);
    let (outcome, _) = begin(&mut sessions, &open(1, 10_001));
    assert_eq!(outcome, Outcome::Busy(Busy::Close), "the old one has to be closed first");
    sessions.close_result(&closes[0].engine_id, CloseResult::Closed, 10_002);
    let new = lease(&mut sessions, &open(1, 10_003));
    assert_ne!(new.engine_id.as_deref(), Some(&*closes[0].engine_id), "an engine id is used once");
    assert!(!new.context_lost, "it is another session");
    let id = new.engine_id.clone().unwrap();
    assert!(sessions.end(new, TurnEnd::NotServed, 10_004).is_empty(), "its close would overtake the open under way");
    let closes = sessions.opened_late(&id, OpenResult::Opened);
    assert_eq!(closes[0].cause, CloseCause::OpenUnknown);
    assert!(sessions.opened_late(&id, OpenResult::Opened).is_empty());
}

#[test]
fn the_engines_timeout_covers_the_longest_turn_and_a_margin_over_ours() {
    let mut sessions = Sessions::new(
        SessionOptions { max_turn_ms: 600_000, engine_timeout_margin_ms: 30_000, ..SessionOptions::default() },
        7,
    );
    assert_eq!(lease(&mut sessions, &open(1, 0)).open_timeout_ms, Some(640_000));
    let default = BeginTurn { ttl_ms: None, ..open(2, 0) };
    assert_eq!(lease(&mut sessions, &default).open_timeout_ms, Some(930_000));
}

#[test]
fn opening_twice_is_one_session_with_the_new_timeout() {
    let mut sessions = sessions();
    run(&mut sessions, &open(1, 0), 5);
    let generation = sessions.view(key(1), 0).unwrap().generation;
    run(&mut sessions, &BeginTurn { ttl_ms: Some(99_000), ..open(1, 10) }, 20);
    let view = sessions.view(key(1), 10).unwrap();
    assert_eq!((view.generation, view.ttl_ms, view.turns, view.held_tokens), (generation, 99_000, 2, 30));
    run(&mut sessions, &BeginTurn { ttl_ms: None, action: SessionAction::Bind, ..open(1, 20) }, 20);
    let view = sessions.view(key(1), 20).unwrap();
    assert_eq!((view.ttl_ms, view.mode), (99_000, SessionMode::Stream), "a bare bind changes neither");
    assert_eq!(sessions.held(W).rows, 1);
}

#[test]
fn a_bound_session_that_is_opened_later_gets_its_engine_session() {
    let mut sessions = sessions();
    run(&mut sessions, &with(open(1, 0), SessionAction::Bind), 5);
    assert_eq!(sessions.view(key(1), 0).unwrap().mode, SessionMode::Affinity);
    let turn = lease(&mut sessions, &chat(open(1, 1)));
    assert_eq!(turn.mode, SessionMode::Tag);
    assert!(sessions.end(turn, used(5), 2).is_empty());
    assert_eq!(sessions.view(key(1), 2).unwrap().mode, SessionMode::Tag);
}

#[test]
fn the_mode_is_the_most_that_route_and_worker_can_do_and_a_lack_is_told() {
    use Degraded::{Route, Worker};
    use ModeWish::{Affinity, Auto, Stream, Tag};
    let can = |tag, stream| Capabilities { tag, stream, ..Capabilities::default() };
    let takes = |session_params, session_id| Accepts { session_params, session_id };
    let cases = [
        (Auto, can(true, true), takes(true, true), SessionMode::Stream, None),
        (Auto, can(true, true), takes(false, true), SessionMode::Tag, None),
        (Auto, can(true, false), takes(true, true), SessionMode::Tag, None),
        (Auto, can(false, true), takes(false, true), SessionMode::Affinity, Some(Worker)),
        (Auto, can(true, true), takes(false, false), SessionMode::Affinity, Some(Route)),
        (Affinity, can(true, true), takes(true, true), SessionMode::Affinity, None),
        (Tag, can(true, true), takes(true, true), SessionMode::Tag, None),
        (Tag, can(false, true), takes(true, true), SessionMode::Affinity, Some(Worker)),
        (Tag, can(true, true), takes(false, false), SessionMode::Affinity, Some(Route)),
        (Stream, can(true, true), takes(false, true), SessionMode::Affinity, Some(Route)),
        (Stream, can(true, false), takes(true, true), SessionMode::Affinity, Some(Worker)),
    ];
    for (wish, capabilities, accepts, mode, degraded) in cases {
        assert_eq!(wish.resolve(capabilities, accepts), (mode, degraded), "{wish:?} {capabilities:?} {accepts:?}");
    }
}

#[test]
fn a_session_starts_tagging_when_it_meets_a_worker_that_can() {
    let mut sessions = sessions();
    let poor = BeginTurn { capabilities: Capabilities::default(), ..chat(open(1, 0)) };
    let first = lease(&mut sessions, &poor);
    assert_eq!((first.mode, first.degraded), (SessionMode::Affinity, Some(Degraded::Worker)));
    assert!(sessions.end(first, used(5), 0).is_empty());
    let second = lease(&mut sessions, &BeginTurn { worker: OTHER, ..with(chat(open(1, 1)), SessionAction::None) });
    assert_eq!((second.mode, second.worker, second.turn), (SessionMode::Tag, OTHER, 2));
    assert!(second.engine_id.is_some());
    assert!(sessions.end(second, used(5), 1).is_empty());
}

#[test]
fn a_refused_open_serves_the_turn_with_affinity_and_leaves_nothing_behind() {
    let mut sessions = sessions();
    let mut turn = lease(&mut sessions, &open(1, 0));
    assert!(sessions.opened(&mut turn, OpenResult::Refused, 1).is_empty());
    assert_eq!((turn.mode, turn.degraded, &turn.engine_id), (SessionMode::Affinity, Some(Degraded::OpenFailed), &None));
    assert!(sessions.end(turn, used(5), 2).is_empty());
    assert_eq!(sessions.held(W).rows, 0);
    assert_eq!(sessions.view(key(1), 2).unwrap().mode, SessionMode::Affinity);
    assert!(sessions.open_engines().is_empty());
}

#[test]
fn an_open_without_an_answer_is_closed_because_it_may_be_open() {
    let mut sessions = sessions();
    let mut turn = lease(&mut sessions, &open(1, 0));
    let id = turn.engine_id.clone().unwrap();
    let closes = sessions.opened(&mut turn, OpenResult::Unknown, 1);
    assert_eq!((closes.len(), &closes[0].engine_id, closes[0].cause), (1, &id, CloseCause::OpenUnknown));
    assert!(sessions.end(turn, used(5), 2).is_empty());
    sessions.close_result(&id, CloseResult::Closed, 3);
    assert_eq!(sessions.counts().retrying, 1, "the open may be worked on after the close");
    assert_eq!(sessions.expire(5_003).len(), 1, "so it is closed once more");
    sessions.close_result(&id, CloseResult::Closed, 5_004);
    assert_eq!(sessions.counts().engine_sessions, 0);
}

#[test]
fn an_engine_that_forgot_the_session_makes_the_next_turn_open_anew_and_say_so() {
    let mut sessions = sessions();
    run(&mut sessions, &open(1, 0), 5);
    let turn = with(open(1, 1), SessionAction::None);
    let second = lease(&mut sessions, &turn);
    assert!(sessions.end(second, TurnEnd::EngineGone, 1).is_empty(), "there is nothing to close");
    assert_eq!(sessions.held(W).rows, 0);
    let third = lease(&mut sessions, &turn);
    assert!(third.context_lost && third.open_timeout_ms.is_some());
    assert_eq!(third.turn, 2, "a turn that the engine refused is no turn");
}

#[test]
fn an_abort_frees_what_was_held_and_waits_for_the_worker() {
    let mut sessions = sessions();
    run(&mut sessions, &open(1, 0), 500);
    assert_eq!(sessions.held(W), Held { rows: 1, idle_rows: 1, tokens: 510, sessions: 1 });
    let turn = with(open(1, 1), SessionAction::None);
    let second = lease(&mut sessions, &turn);
    assert_eq!(sessions.held(W), Held { rows: 1, idle_rows: 0, tokens: 510, sessions: 1 });
    assert!(sessions.end(second, TurnEnd::Aborted, 2).is_empty());
    assert_eq!(sessions.held(W).tokens, 0, "the engine drops all KV of the session");
    assert!(sessions.view(key(1), 2).unwrap().awaiting_release);
    assert!(sessions.close(key(1)).is_empty(), "not before it let go");
    assert_eq!(sessions.released(key(1)).len(), 1);
    assert!(sessions.released(key(1)).is_empty());
}

#[test]
fn after_an_aborted_tag_turn_the_close_waits_and_turns_do_not() {
    let mut sessions = sessions();
    let first = lease(&mut sessions, &chat(open(1, 0)));
    let id = first.engine_id.clone().unwrap();
    assert!(sessions.end(first, TurnEnd::Aborted, 1).is_empty());
    let second = lease(&mut sessions, &with(chat(open(1, 2)), SessionAction::Close));
    assert_eq!(second.engine_id.as_ref(), Some(&id));
    assert!(sessions.end(second, used(5), 3).is_empty(), "the worker may not have read the first one yet");
    assert_eq!(sessions.released_engine(&id).len(), 1);
}

#[test]
fn over_the_cap_of_rows_the_longest_idle_makes_room_and_its_session_is_told() {
    let mut sessions = sessions();
    run(&mut sessions, &open(1, 0), 5);
    run(&mut sessions, &open(2, 10), 5);
    let late = BeginTurn { ttl_ms: Some(100_000), ..open(3, 40_000) };
    // Both overdue ones are kept alive for this.
    let (outcome, closes) = begin(&mut sessions, &late);
    assert_eq!(outcome, Outcome::Busy(Busy::Room));
    assert_eq!((closes.len(), closes[0].cause), (1, CloseCause::Evicted));
    assert_eq!(sessions.len(), 2, "a turn that waits has no session yet");
    assert_eq!(begin(&mut sessions, &late), (Outcome::Busy(Busy::Room), vec![]), "one close is enough");
    sessions.close_result(&closes[0].engine_id, CloseResult::Closed, 40_001);
    assert_eq!(lease(&mut sessions, &late).mode, SessionMode::Stream);
    assert_eq!(sessions.held(W).rows, 2);
}

#[test]
fn a_session_that_lost_its_place_opens_anew_without_its_context() {
    let mut sessions = sessions();
    for (n, now_ms) in [(1, 0), (2, 10)] {
        run(&mut sessions, &BeginTurn { ttl_ms: Some(1_000_000), ..open(n, now_ms) }, 5);
    }
    let (_, closes) = begin(&mut sessions, &open(3, 40_000));
    let again = with(open(1, 40_001), SessionAction::None);
    assert_eq!(begin(&mut sessions, &again).0, Outcome::Busy(Busy::Close), "its old one is still closing");
    sessions.close_result(&closes[0].engine_id, CloseResult::Closed, 40_002);
    let turn = lease(&mut sessions, &again);
    assert!(turn.context_lost && turn.open_timeout_ms.is_some());
}

#[test]
fn sessions_that_were_just_used_make_no_room_and_the_newcomer_gets_affinity() {
    let mut sessions = sessions();
    run(&mut sessions, &open(1, 0), 5);
    run(&mut sessions, &open(2, 0), 5);
    let turn = lease(&mut sessions, &open(3, 100));
    assert_eq!((turn.mode, turn.degraded), (SessionMode::Affinity, Some(Degraded::Rows)));
    assert!(sessions.end(turn, used(5), 101).is_empty());
    let none = BeginTurn { cap: StreamCap { rows: 0, tokens: 1_000 }, worker: OTHER, ..open(4, 100) };
    assert_eq!(lease(&mut sessions, &none).degraded, Some(Degraded::Rows), "a cap of nothing is a cap");
}

#[test]
fn held_tokens_are_capped_when_a_session_opens_and_when_a_turn_ends() {
    let mut sessions = sessions();
    run(&mut sessions, &open(1, 0), 990);
    let turn = lease(&mut sessions, &open(2, 1));
    assert_eq!(turn.degraded, Some(Degraded::Tokens));
    assert!(sessions.end(turn, used(5), 1).is_empty());

    let mut sessions = self::sessions();
    run(&mut sessions, &open(1, 0), 600);
    let closes = run(&mut sessions, &open(2, 1), 600);
    assert_eq!(closes.len(), 1, "610 + 610 are over 1000: the one idle longest goes, however short that is");
    assert!(closes[0].engine_id.contains(&key(1).to_string()));
    sessions.close_result(&closes[0].engine_id, CloseResult::Closed, 2);
    assert_eq!(sessions.held(W).tokens, 610);
    let closes = run(&mut sessions, &with(open(2, 3), SessionAction::None), 2_000);
    assert_eq!(closes.len(), 1, "a session that outgrows the cap alone goes too");
}

#[test]
fn rows_and_ranks_are_counted_by_rank_and_a_session_keeps_its_own() {
    let mut sessions = sessions();
    let dp = Capabilities { stream: true, dp_size: 2, ..Capabilities::default() };
    let on = |n| BeginTurn { capabilities: dp, cap: StreamCap { rows: 1, tokens: 1_000 }, ..open(n, 0) };
    run(&mut sessions, &on(1), 5);
    run(&mut sessions, &on(2), 5);
    assert_eq!(sessions.view(key(1), 0).unwrap().rank, Some(0));
    assert_eq!(sessions.view(key(2), 0).unwrap().rank, Some(1), "the rank that holds least");
    assert_eq!(sessions.held_on_rank(W, Some(1)).rows, 1);
    assert_eq!(sessions.held(W).rows, 2);
    assert_eq!(lease(&mut sessions, &on(3)).degraded, Some(Degraded::Rows));
    let asked = BeginTurn { rank: Some(0), ..with(on(2), SessionAction::None) };
    assert_eq!(lease(&mut sessions, &asked).rank, Some(1), "a streaming session is pinned to its rank");
}

#[test]
fn the_table_is_bounded_and_what_holds_nothing_goes_first() {
    let mut sessions = Sessions::new(SessionOptions { max_sessions: 3, ..SessionOptions::default() }, 7);
    run(&mut sessions, &chat(open(1, 0)), 5);
    run(&mut sessions, &with(open(2, 1), SessionAction::Bind), 5);
    run(&mut sessions, &with(open(3, 2), SessionAction::Bind), 5);
    run(&mut sessions, &with(open(4, 3), SessionAction::Bind), 5);
    let left = |sessions: &Sessions| sessions.iter(3).map(|view| view.key.0).collect::<Vec<_>>();
    assert_eq!(left(&sessions), [1, 3, 4], "the oldest idle affinity session went");
    let busy = [3, 4].map(|n| lease(&mut sessions, &with(open(n, 3), SessionAction::None)));
    let (outcome, closes) = begin(&mut sessions, &with(open(5, 3), SessionAction::Bind));
    assert!(matches!(outcome, Outcome::Ready(_)));
    assert_eq!((closes.len(), closes[0].cause), (1, CloseCause::Evicted), "then the oldest idle tag");
    let (outcome, _) = begin(&mut sessions, &with(open(6, 3), SessionAction::Bind));
    assert_eq!(outcome, Outcome::Ordinary(NoSession::TableFull), "never one with a turn in flight");
    for lease in busy {
        assert!(sessions.end(lease, used(5), 4).is_empty());
    }
}

#[test]
fn a_close_by_a_route_that_cannot_enter_still_comes_after_its_turn() {
    let mut sessions = sessions();
    run(&mut sessions, &open(1, 0), 5);
    let last = lease(&mut sessions, &with(chat(open(1, 1)), SessionAction::Close));
    assert_eq!((last.mode, &last.engine_id), (SessionMode::Affinity, &None));
    assert_eq!(sessions.end(last, TurnEnd::Aborted, 2).len(), 1, "its turn was not in the engine session");
}

#[test]
fn a_chat_turn_of_a_streaming_session_goes_beside_it() {
    let mut sessions = sessions();
    run(&mut sessions, &open(1, 0), 5);
    let inside = lease(&mut sessions, &with(open(1, 1), SessionAction::None));
    let beside = lease(&mut sessions, &with(chat(open(1, 1)), SessionAction::None));
    assert_eq!((beside.mode, beside.degraded, beside.worker), (SessionMode::Affinity, Some(Degraded::Route), W));
    assert!(sessions.end(beside, used(5), 2).is_empty());
    assert!(sessions.end(inside, used(5), 2).is_empty());
    assert_eq!(sessions.view(key(1), 2).unwrap().turns, 3);
}

#[test]
fn a_refused_close_counts_until_the_workers_own_timeout() {
    let mut sessions = sessions();
    run(&mut sessions, &open(1, 0), 5);
    let close = sessions.close(key(1)).remove(0);
    sessions.close_result(&close.engine_id, CloseResult::Refused, 100);
    assert_eq!((sessions.counts().abandoned, sessions.held(W).rows), (1, 1));
    assert!(sessions.open_engines().is_empty(), "the next process need not try again");
    let timeout_ms = 10_000 + 600_000 + 30_000;
    assert!(sessions.expire(99 + timeout_ms).is_empty());
    assert_eq!(sessions.held(W).rows, 1);
    assert!(sessions.expire(100 + timeout_ms).is_empty());
    assert_eq!(sessions.held(W), Held::default());
    assert_eq!(sessions.counts(), Counts::default());
}

#[test]
fn a_lost_worker_names_its_sessions_and_a_restarted_one_is_told_to_close_them_all_the_same() {
    let mut sessions = sessions();
    run(&mut sessions, &open(1, 0), 5);
    run(&mut sessions, &with(open(2, 0), SessionAction::Bind), 5);
    run(&mut sessions, &BeginTurn { worker: OTHER, ..open(3, 0) }, 5);
    let loss = sessions.worker_lost(W);
    assert_eq!(loss.unbound, [key(1), key(2)]);
    assert_eq!(loss.closes.len(), 1);
    let elsewhere = BeginTurn { worker: OTHER, ..with(open(1, 1), SessionAction::None) };
    let mut turn = lease(&mut sessions, &elsewhere);
    assert!(sessions.opened(&mut turn, OpenResult::Opened, 1).is_empty());
    assert!(turn.context_lost, "it opens on the other worker without waiting for the close");
    let loss = sessions.worker_restarted(OTHER);
    assert_eq!((loss.unbound, loss.closes.len()), (vec![key(1), key(3)], 1));
    assert_eq!(sessions.held(OTHER).rows, 2, "the new process may have one of them");
    assert_eq!(sessions.end(turn, used(5), 2).len(), 1, "after its turn");
}

#[test]
fn nobody_waits_for_a_close_at_a_worker_that_is_lost() {
    let mut sessions = sessions();
    run(&mut sessions, &open(1, 0), 5);
    assert_eq!(sessions.close(key(1)).len(), 1);
    assert_eq!(begin(&mut sessions, &open(1, 1)).0, Outcome::Busy(Busy::Close));
    assert_eq!(sessions.worker_lost(W), WorkerLoss::default());
    assert_eq!(lease(&mut sessions, &BeginTurn { worker: OTHER, ..open(1, 1) }).mode, SessionMode::Stream);
}

#[test]
fn a_route_takes_what_the_engine_takes_there() {
    let of = |route| Accepts::from(route);
    assert_eq!(of(Route::Generate), Accepts { session_params: true, session_id: true });
    assert_eq!(of(Route::Chat), Accepts { session_params: false, session_id: true });
    assert_eq!(of(Route::Messages), Accepts::default());
    assert_eq!(SessionAction::from(hints::SessionAction::Close), SessionAction::Close);
}

#[test]
fn an_open_under_way_while_the_worker_restarts_may_reach_the_new_process() {
    let mut sessions = sessions();
    let mut turn = lease(&mut sessions, &open(1, 0));
    assert_eq!(sessions.worker_restarted(W), WorkerLoss { unbound: vec![key(1)], closes: vec![] });
    assert_eq!(sessions.opened(&mut turn, OpenResult::Unknown, 1).len(), 1);
    assert!(sessions.end(turn, used(5), 2).is_empty());
}

#[test]
fn what_is_open_can_be_listed_for_the_next_process() {
    let mut sessions = sessions();
    run(&mut sessions, &open(1, 0), 5);
    run(&mut sessions, &chat(open(2, 0)), 5);
    run(&mut sessions, &with(open(3, 0), SessionAction::Bind), 5);
    let open: Vec<_> = sessions.open_engines().into_iter().map(|close| (close.worker, close.mode)).collect();
    assert_eq!(open, [(W, SessionMode::Stream), (W, SessionMode::Tag)]);
    assert_eq!(sessions.close_all().len(), 2);
    assert!(sessions.is_empty());
}

#[test]
fn engine_ids_name_the_key_differ_by_process_and_are_only_found_whole() {
    let id = |nonce| {
        let mut sessions = Sessions::new(SessionOptions::default(), nonce);
        lease(&mut sessions, &open(0xabc, 0)).engine_id.unwrap()
    };
    assert_ne!(id(1), id(2));
    assert!(id(1).starts_with("ts-00000000000000000000000000000abc-"));
    let mut sessions = sessions();
    run(&mut sessions, &open(1, 0), 5);
    let close = sessions.close(key(1)).remove(0);
    for wrong in ["", "-", "ts-1-1-2", "2", &close.engine_id[1..]] {
        sessions.close_result(wrong, CloseResult::Closed, 0);
        assert_eq!(sessions.counts().closing, 1, "{wrong}");
    }
    sessions.close_result(&close.engine_id, CloseResult::Closed, 0);
    assert_eq!(sessions.counts().closing, 0);
}

#[test]
fn a_share_of_a_worker_is_a_share_of_one_rank_and_nothing_of_the_unknown() {
    let mut worker = WorkerView::new("a:1", W);
    assert_eq!(StreamCap::share_of(&worker, 0.5, 0.5), StreamCap { rows: 0, tokens: 0 });
    worker.max_running = 40;
    worker.kv_capacity_tokens = 10_000;
    assert_eq!(StreamCap::share_of(&worker, 0.5, 0.25), StreamCap { rows: 20, tokens: 2_500 });
    worker.capabilities.dp_size = 2;
    assert_eq!(StreamCap::share_of(&worker, 0.5, f64::NAN), StreamCap { rows: 10, tokens: 0 });
}

#[test]
fn a_session_fits_into_a_kilobyte() {
    // Slot and engine session with their keys, the id, an entry in each of three sets; maps are at worst half full.
    let entries = size_of::<table::Slot>() + 16 + size_of::<engine::Engine>() + 8 + 3 * size_of::<(u64, SessionKey)>();
    let heap = "ts-".len() + 32 + 1 + 16 + 1 + 16 + 16 + size_of::<[u64; 4]>();
    assert!(2 * entries + heap <= 1_024, "{} bytes", 2 * entries + heap);
}

#[test]
fn a_close_that_fails_is_sent_again_until_the_engines_own_timeout() {
    let mut sessions = sessions();
    run(&mut sessions, &open(1, 0), 5);
    let mut close = sessions.close(key(1)).remove(0);
    let give_up_ms = 10_000 + 600_000 + 30_000;
    let mut tries = Vec::new();
    loop {
        let now_ms = tries.last().copied().unwrap_or(0);
        sessions.close_result(&close.engine_id, CloseResult::Failed, now_ms);
        if sessions.counts().abandoned > 0 {
            break;
        }
        assert!(sessions.open_engines().len() == 1 && sessions.held(W).rows == 1, "it is not forgotten");
        let at_ms = sessions.next_deadline_ms().unwrap();
        assert!(sessions.expire(at_ms - 1).is_empty());
        close = sessions.expire(at_ms).remove(0);
        tries.push(at_ms);
        assert_eq!(usize::from(close.tries), tries.len());
    }
    assert_eq!(tries[..6], [100, 600, 2_600, 7_600, 17_600, 47_600]);
    assert!(tries.last().unwrap() + 30_000 >= give_up_ms, "{tries:?}");
    assert!(sessions.expire(give_up_ms).is_empty());
    assert_eq!(sessions.counts(), Counts::default());
}

#[test]
fn a_worker_that_is_back_gets_the_closes_that_it_missed_at_once() {
    let mut sessions = sessions();
    run(&mut sessions, &open(1, 0), 5);
    run(&mut sessions, &BeginTurn { worker: OTHER, ..open(2, 0) }, 5);
    for n in [1, 2] {
        let close = sessions.close(key(n)).remove(0);
        sessions.close_result(&close.engine_id, CloseResult::Failed, 0);
    }
    let closes = sessions.worker_back(W);
    assert_eq!(closes.iter().map(|close| close.worker).collect::<Vec<_>>(), [W]);
    sessions.close_result(&closes[0].engine_id, CloseResult::Closed, 1);
    assert_eq!(sessions.expire(100).len(), 1, "the other worker's comes in its time");
}

#[test]
fn at_a_worker_that_is_removed_each_close_is_tried_once() {
    let mut sessions = sessions();
    for n in [1, 2] {
        run(&mut sessions, &open(n, 0), 5);
    }
    let failed = sessions.close(key(1)).remove(0);
    sessions.close_result(&failed.engine_id, CloseResult::Failed, 0);
    assert_eq!(sessions.left_on(W), Left::More);
    let loss = sessions.worker_removed(W);
    assert_eq!((loss.unbound, loss.closes.len()), (vec![key(2)], 2), "the one that waits for another try as well");
    assert_eq!(sessions.left_on(W), Left::Closes);
    for close in loss.closes {
        sessions.close_result(&close.engine_id, CloseResult::Failed, 1);
    }
    assert_eq!(sessions.left_on(W), Left::Nothing);
    let left = sessions.counts();
    assert_eq!((left.engine_sessions, left.retrying, left.abandoned), (0, 0, 0));
    assert_eq!(sessions.held(W), Held::default());
}

#[test]
fn a_tag_whose_close_is_refused_is_forgotten_for_the_engine_can_evict_what_it_held() {
    let mut sessions = sessions();
    run(&mut sessions, &chat(open(1, 0)), 5);
    let close = sessions.close(key(1)).remove(0);
    sessions.close_result(&close.engine_id, CloseResult::Refused, 1);
    assert_eq!(sessions.counts(), Counts::default());
}

#[test]
fn an_engine_that_will_not_let_go_is_waited_for_once_and_then_left() {
    let mut sessions = sessions();
    run(&mut sessions, &open(1, 0), 5);
    let turn = with(open(1, 1), SessionAction::None);
    let refused = lease(&mut sessions, &turn);
    let id = refused.engine_id.clone().unwrap();
    assert!(sessions.end(refused, TurnEnd::StillBusy, 1).is_empty(), "a close now would end the server");
    assert_eq!(begin(&mut sessions, &turn).0, Outcome::Busy(Busy::Abort), "and so would a turn");
    assert!(sessions.released_engine(&id).is_empty());
    let again = lease(&mut sessions, &turn);
    assert!(sessions.end(again, TurnEnd::StillBusy, 2).is_empty());
    assert_eq!(begin(&mut sessions, &turn).0, Outcome::Busy(Busy::Close));
    let closes = sessions.released_engine(&id);
    assert_eq!((closes.len(), closes[0].cause), (1, CloseCause::Evicted));
    sessions.close_result(&id, CloseResult::Closed, 3);
    let fresh = lease(&mut sessions, &turn);
    assert!(fresh.context_lost && fresh.open_timeout_ms.is_some() && fresh.engine_id != Some(id));
}

#[test]
fn turns_that_wait_go_in_order_of_arrival() {
    let mut sessions = sessions();
    run(&mut sessions, &open(1, 0), 5);
    let turn = with(open(1, 1), SessionAction::None);
    let first = lease(&mut sessions, &turn);
    let [second, third, fourth] = [(); 3].map(|()| sessions.wait(key(1), Busy::Turn));
    assert!(sessions.end(first, used(5), 1).is_empty());
    let of = |ticket| BeginTurn { ticket, ..turn };
    assert_eq!(begin(&mut sessions, &of(None)).0, Outcome::Busy(Busy::Turn), "a newcomer is behind them");
    assert_eq!(begin(&mut sessions, &of(Some(third))).0, Outcome::Busy(Busy::Turn));
    assert_eq!(sessions.first_waiting(key(1)), Some(second));
    sessions.waits_no_more(key(1), second);
    assert_eq!(sessions.first_waiting(key(1)), Some(third), "whose client left, is passed over");
    // Until then only news of turns woke it: it has to look whether the close is over already.
    assert!(sessions.waits_for(key(1), third, Busy::Close) && !sessions.waits_for(key(1), third, Busy::Close));
    assert!(sessions.waits_for(key(1), third, Busy::Turn) && !sessions.waits_for(key(1), second, Busy::Turn));
    let next = lease(&mut sessions, &of(Some(third)));
    sessions.waits_no_more(key(1), third);
    sessions.waits_no_more(key(1), third);
    assert_eq!(sessions.waiting(), 1);
    assert!(sessions.end(next, used(5), 2).is_empty());
    let last = lease(&mut sessions, &of(Some(fourth)));
    sessions.waits_no_more(key(1), fourth);
    assert!(sessions.end(last, used(5), 3).is_empty());
    assert_eq!((sessions.waiting(), sessions.first_waiting(key(1))), (0, None));
    let tag = chat(open(2, 4));
    sessions.wait(key(2), Busy::Turn);
    assert_eq!(lease(&mut sessions, &tag).mode, SessionMode::Tag, "nobody waits for a tag");
}

#[test]
fn a_client_of_deltas_is_told_whenever_its_context_is_not_there() {
    let note = |lease: &Lease| ContextNote::of(lease);
    let none = |now_ms| with(open(1, now_ms), SessionAction::None);
    let opened = |sessions: &mut Sessions, turn: &BeginTurn| {
        let mut lease = lease(sessions, turn);
        assert!(sessions.opened(&mut lease, OpenResult::Opened, turn.now_ms).is_empty());
        lease
    };

    // The engine lost it; and the turn that finds out is not the one that is answered.
    let mut table = sessions();
    run(&mut table, &open(1, 0), 5);
    let gone = lease(&mut table, &none(1));
    assert_eq!(note(&gone), None);
    assert!(table.end(gone, TurnEnd::EngineGone, 1).is_empty());
    for end in [TurnEnd::NotServed, TurnEnd::Aborted] {
        let again = opened(&mut table, &none(2));
        assert_eq!(note(&again), Some(ContextNote::Lost), "{end:?}");
        assert!(table.end(again, end, 2).is_empty());
        let _ = table.released(key(1));
    }
    let told = lease(&mut table, &none(3));
    assert_eq!(note(&told), Some(ContextNote::Lost));
    assert!(table.end(told, used(5), 3).is_empty());
    let after = lease(&mut table, &none(4));
    assert_eq!(note(&after), None, "from now on the engine has what the client knows it has");

    // The open failed: on this turn and on those after it.
    let mut table = sessions();
    let no_tags = |turn| BeginTurn { capabilities: Capabilities { stream: true, ..Capabilities::default() }, ..turn };
    let mut first = lease(&mut table, &no_tags(open(1, 0)));
    assert!(table.opened(&mut first, OpenResult::Refused, 0).is_empty());
    assert_eq!(note(&first), Some(ContextNote::NotKept(SessionMode::Affinity, Some(Degraded::OpenFailed))));
    assert!(table.end(first, used(5), 0).is_empty());
    let second = lease(&mut table, &no_tags(none(1)));
    assert_eq!(note(&second), Some(ContextNote::NotKept(SessionMode::Affinity, None)));
    assert!(table.end(second, used(5), 1).is_empty());
    let third = opened(&mut table, &no_tags(open(1, 2)));
    assert_eq!(note(&third), Some(ContextNote::Lost), "opened at last, without the first two");

    // Caps, a worker that cannot, a tag instead.
    let mut table = sessions();
    let full = BeginTurn { cap: StreamCap { rows: 0, tokens: 0 }, ..open(1, 0) };
    assert!(matches!(note(&lease(&mut table, &full)), Some(ContextNote::NotKept(_, Some(Degraded::Rows)))));
    let tags = BeginTurn { capabilities: Capabilities { tag: true, ..Capabilities::default() }, ..open(2, 0) };
    assert_eq!(note(&lease(&mut table, &tags)), Some(ContextNote::NotKept(SessionMode::Tag, None)));

    // A turn was cut, or ended unfinished, or ran beside.
    for end in [TurnEnd::Aborted, TurnEnd::Unfinished] {
        let mut table = sessions();
        run(&mut table, &open(1, 0), 5);
        let cut = lease(&mut table, &none(1));
        assert!(table.end(cut, end, 1).is_empty());
        let _ = table.released(key(1));
        let next = lease(&mut table, &none(2));
        assert_eq!(note(&next), Some(ContextNote::Incomplete));
        assert!(table.end(next, used(5), 2).is_empty());
        assert_eq!(note(&lease(&mut table, &none(3))), None);
    }
    let mut table = sessions();
    run(&mut table, &open(1, 0), 5);
    let beside = lease(&mut table, &chat(none(1)));
    assert!(table.end(beside, used(5), 1).is_empty());
    assert_eq!(note(&lease(&mut table, &none(2))), Some(ContextNote::Incomplete));
}

#[test]
fn an_attempt_ends_its_lease_once_and_says_what_has_to_follow() {
    let cases = [
        (AttemptEnd::Answered { usage: None, whole: true }, (false, false, false)),
        (AttemptEnd::Answered { usage: None, whole: false }, (false, false, false)),
        (AttemptEnd::Cut, (true, true, false)),
        (AttemptEnd::Broken, (true, true, false)),
        (AttemptEnd::Unreachable, (false, false, false)),
        (AttemptEnd::Refused(Refused::SessionGone), (false, false, true)),
        (AttemptEnd::Refused(Refused::SessionBusy), (false, true, true)),
        (AttemptEnd::Refused(Refused::Other), (false, false, false)),
    ];
    for (how, (abort, release, again)) in cases {
        let mut sessions = sessions();
        run(&mut sessions, &open(1, 0), 5);
        let mut hold = Hold::new(Some(lease(&mut sessions, &with(open(1, 1), SessionAction::None))));
        hold.sent();
        let parting = hold.end(&mut sessions, how, 1);
        assert_eq!((parting.abort, parting.release.is_some(), parting.again), (abort, release, again), "{how:?}");
        assert_eq!(sessions.counts().in_flight, 0);
        assert_eq!(hold.end(&mut sessions, AttemptEnd::Cut, 2), Parting::default(), "only the first end counts");
        let unbound = sessions.view(key(1), 1).unwrap().worker.is_none();
        assert_eq!(unbound, matches!(how, AttemptEnd::Unreachable | AttemptEnd::Broken), "{how:?}");
    }
    let mut sessions = sessions();
    run(&mut sessions, &open(1, 0), 5);
    let mut unsent = Hold::new(Some(lease(&mut sessions, &with(open(1, 1), SessionAction::None))));
    assert_eq!(unsent.end(&mut sessions, AttemptEnd::Cut, 1), Parting::default(), "the worker never had it");
}

#[test]
fn what_a_worker_says_of_a_session_is_read_from_its_texts() {
    for (text, means) in [
        ("Invalid request: session id ts-1 does not exist", Refused::SessionGone),
        ("Invalid request: close was requested for session ts-1", Refused::SessionGone),
        ("Streaming session already has an active request.", Refused::SessionBusy),
        ("the model does not exist", Refused::Other),
        ("The request queue is full.", Refused::Other),
    ] {
        assert_eq!(Refused::of(text.as_bytes()), means, "{text}");
    }
}

#[test]
fn a_tag_that_a_cut_request_may_take_up_again_is_closed_once_more() {
    let tagged = |now_ms| BeginTurn { wish: Some(ModeWish::Tag), ..open(1, now_ms) };
    for how in ["turn", "prefill", "prefill outlives the close"] {
        let mut sessions = sessions();
        let first = lease(&mut sessions, &tagged(0));
        let id = first.engine_id.clone().unwrap();
        let closes = match how {
            "turn" => {
                assert!(sessions.end(first, TurnEnd::Aborted, 1).is_empty());
                assert!(sessions.close(key(1)).is_empty(), "not before the worker let go");
                sessions.released_engine(&id)
            }
            _ => {
                assert!(sessions.end(first, used(5), 1).is_empty());
                assert!(how != "prefill" || !sessions.carried(&id, true));
                sessions.close(key(1))
            }
        };
        assert_eq!(closes.len(), 1, "{how}");
        if how == "prefill outlives the close" {
            assert!(!sessions.carried(&id, false), "the table sees to it");
        }
        sessions.close_result(&id, CloseResult::Closed, 3);
        assert_eq!(sessions.expire(5_003).len(), 1, "{how}: the request may have been read after the close");
        sessions.close_result(&id, CloseResult::Closed, 5_004);
        assert_eq!(sessions.counts().engine_sessions, 0, "{how}");
        assert!(sessions.carried(&id, false), "a tag that is known no more is up to the caller");
    }
}

#[test]
fn a_tag_is_closed_once_when_all_its_requests_were_answered() {
    let mut sessions = sessions();
    let first = lease(&mut sessions, &BeginTurn { wish: Some(ModeWish::Tag), ..open(1, 0) });
    let id = first.engine_id.clone().unwrap();
    assert!(sessions.end(first, used(5), 1).is_empty());
    assert!(!sessions.carried(&id, false));
    assert_eq!(sessions.close(key(1)).len(), 1);
    sessions.close_result(&id, CloseResult::Closed, 3);
    assert_eq!((sessions.counts().engine_sessions, sessions.counts().retrying), (0, 0));
}

#[test]
fn the_longer_a_step_may_take_the_longer_nothing_enters_after_an_abort() {
    assert_eq!(release_after_ms(Some(8_192), 8_192_000.0), RELEASE_AFTER_MS + 2);
    assert_eq!(release_after_ms(Some(8_192), 16_384.0), RELEASE_AFTER_MS + 1_000, "twice the half second of a chunk");
    assert_eq!(release_after_ms(None, 32_768.0), RELEASE_AFTER_MS + 1_000, "a chunk is not larger unless told");
    assert_eq!(release_after_ms(Some(8_192), 0.0), RELEASE_UNTOLD_MS, "never longer than without an answer");
    assert_eq!(release_after_ms(Some(-1), 1e9), RELEASE_UNTOLD_MS, "a step may be a whole prompt");
}
