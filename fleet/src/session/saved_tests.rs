//! Over a restart: what is taken over, and what is only closed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;

const W: WorkerId = WorkerId(1);

fn options() -> SessionOptions {
    SessionOptions { max_sessions: 8, ..SessionOptions::default() }
}

fn turn(n: u128, accepts: Accepts, now_ms: u64) -> BeginTurn {
    BeginTurn {
        key: SessionKey(n),
        action: SessionAction::Open,
        wish: None,
        ttl_ms: Some(10_000),
        worker: W,
        rank: None,
        capabilities: Capabilities { tag: true, stream: true, priority: true, dp_size: 2 },
        accepts,
        cap: StreamCap { rows: 2, tokens: 1_000 },
        ticket: None,
        now_ms,
    }
}

fn chat(n: u128, now_ms: u64) -> BeginTurn {
    turn(n, Accepts { session_params: false, session_id: true }, now_ms)
}

fn generate(n: u128, now_ms: u64) -> BeginTurn {
    turn(n, Accepts { session_params: true, session_id: true }, now_ms)
}

fn begin(sessions: &mut Sessions, turn: &BeginTurn) -> Lease {
    match sessions.begin(turn).outcome {
        Outcome::Ready(mut lease) => {
            assert!(sessions.opened(&mut lease, OpenResult::Opened, turn.now_ms).is_empty());
            lease
        }
        other => panic!("not ready: {other:?}"),
    }
}

fn run(sessions: &mut Sessions, turn: &BeginTurn) -> Option<Arc<str>> {
    let lease = begin(sessions, turn);
    let id = lease.engine_id.clone();
    let usage = Usage { prompt_tokens: 40, completion_tokens: 2, cached_tokens: 30 };
    assert!(sessions.end(lease, TurnEnd::Finished(Some(usage)), turn.now_ms).is_empty());
    id
}

/// The next process, some time later on its own clock.
fn next(old: &Sessions, saved_at: u64, away_ms: u64, now_ms: u64) -> Sessions {
    let mut new = Sessions::new(options(), 99);
    for saved in old.saved(None, usize::MAX, saved_at) {
        assert_eq!(new.restore(&saved, away_ms, now_ms), Restored::Live);
    }
    new.check_invariants();
    new
}

#[test]
fn a_tag_goes_on_where_it_was_with_its_engine_session() {
    let mut old = Sessions::new(options(), 7);
    let id = run(&mut old, &chat(1, 100)).unwrap();
    let mut new = next(&old, 1_100, 3_000, 50_000);
    let view = new.view(SessionKey(1), 50_000).unwrap();
    assert_eq!((view.worker, view.rank, view.mode), (Some(W), Some(0), SessionMode::Tag));
    assert_eq!((view.idle_ms, view.age_ms, view.turns, view.held_tokens), (4_000, 4_000, 1, 42));
    let lease = begin(&mut new, &BeginTurn { action: SessionAction::None, ..chat(1, 50_000) });
    assert_eq!((lease.engine_id.clone(), lease.turn), (Some(id), 2));
    assert!(new.end(lease, TurnEnd::Finished(None), 50_001).is_empty());
    // New ids do not meet the old ones.
    let other = run(&mut new, &chat(2, 50_002)).unwrap();
    assert!(!old.held_engines().iter().any(|held| held.engine_id == other));
}

#[test]
fn the_time_away_counts_as_idle() {
    let mut old = Sessions::new(options(), 7);
    run(&mut old, &chat(1, 0));
    let mut new = next(&old, 1_000, 5_000, 50_000);
    assert_eq!(new.next_deadline_ms(), Some(54_000));
    assert_eq!(new.expire(54_000).len(), 1);
    let saved = &old.saved(None, 1, 1_000)[0];
    assert_eq!(Sessions::new(options(), 8).restore(saved, 9_000, 50_000), Restored::Expired);
    // A running turn is not idle.
    let _running = begin(&mut old, &chat(1, 2_000));
    assert_eq!(old.saved(None, 1, 9_000)[0].idle_ms, 0);
}

#[test]
fn a_streaming_session_is_bound_and_lost_and_its_engine_session_an_orphan() {
    let mut old = Sessions::new(options(), 7);
    let id = run(&mut old, &generate(1, 100)).unwrap();
    let mut new = next(&old, 200, 0, 50_000);
    let held = &old.held_engines()[0];
    assert!(new.adopt_orphan(held, 50_000));
    assert!(!new.adopt_orphan(held, 50_000), "once");
    new.check_invariants();
    assert_eq!(
        new.held(W),
        Held { rows: 1, idle_rows: 1, tokens: 0, sessions: 1 },
        "its row counts until it is closed"
    );

    let lease = begin(&mut new, &BeginTurn { action: SessionAction::None, ..generate(1, 50_001) });
    assert!(lease.context_lost && lease.mode == SessionMode::Stream && lease.worker == W);
    assert_ne!(lease.engine_id.as_ref(), Some(&id));

    let closes = new.released_engine(&id);
    assert_eq!((closes.len(), &closes[0].engine_id, closes[0].cause), (1, &id, CloseCause::Orphaned));
    new.close_result(&id, CloseResult::Failed, 50_002);
    assert!(new.knows_engine(&id), "it is tried again");
    let again = new.worker_back(W);
    assert_eq!(again.iter().map(|close| &close.engine_id).collect::<Vec<_>>(), [&id]);
    new.close_result(&id, CloseResult::Closed, 50_003);
    assert_eq!((new.knows_engine(&id), new.engines_on(W)), (false, 1));
    assert!(new.end(lease, TurnEnd::Finished(None), 50_004).is_empty());
}

#[test]
fn what_cannot_be_taken_over_is_refused() {
    let mut old = Sessions::new(options(), 7);
    run(&mut old, &chat(1, 0));
    let saved = &old.saved(None, 1, 0)[0];
    assert_eq!(old.restore(saved, 0, 0), Restored::Refused, "it is there already");
    let mut full = Sessions::new(SessionOptions { max_sessions: 0, ..options() }, 7);
    assert_eq!(full.restore(saved, 0, 0), Restored::Refused);
    let held =
        HeldEngine { engine_id: "somebody-elses".into(), mode: SessionMode::Tag, worker: W, rank: None, timeout_ms: 1 };
    assert!(!old.adopt_orphan(&held, 0));
    // A tag that is no id of ours is left out; the session is not.
    let strange = SavedSession { key: SessionKey(5), tag: Some("x".into()), ..saved.clone() };
    assert_eq!(old.restore(&strange, 0, 0), Restored::Live);
    assert!(!old.view(SessionKey(5), 0).unwrap().engine_open);
}

#[test]
fn pages_of_sessions_make_up_the_whole() {
    let mut old = Sessions::new(options(), 7);
    for n in 1..=7 {
        run(&mut old, &chat(n, 0));
    }
    let mut paged = Vec::new();
    loop {
        let page = old.saved(paged.last().map(|saved: &SavedSession| saved.key), 3, 5);
        if page.is_empty() {
            break;
        }
        paged.extend(page);
    }
    assert_eq!(paged, old.saved(None, usize::MAX, 5));
    assert_eq!(paged.len(), 7);
}

#[test]
fn every_engine_session_is_told_when_it_comes_and_when_it_goes() {
    let mut sessions = Sessions::new(options(), 7);
    run(&mut sessions, &chat(1, 0));
    assert!(sessions.take_changes().is_empty(), "nobody asked");
    sessions.record_changes();
    let tag = run(&mut sessions, &chat(2, 0)).unwrap();
    let stream = run(&mut sessions, &generate(3, 0)).unwrap();
    let opened = sessions.take_changes();
    let ids = |changes: &[EngineChange]| -> Vec<(bool, Arc<str>)> {
        let told = changes.iter().map(|change| match change {
            EngineChange::Opened(held) => (true, Arc::clone(&held.engine_id)),
            EngineChange::Gone(id) => (false, Arc::clone(id)),
        });
        told.collect()
    };
    assert_eq!(ids(&opened), [(true, tag.clone()), (true, stream.clone())]);
    let EngineChange::Opened(held) = &opened[1] else { panic!() };
    assert_eq!((held.mode, held.worker, held.timeout_ms), (SessionMode::Stream, W, 640_000));

    assert_eq!(sessions.close(SessionKey(2)).len(), 1);
    assert!(sessions.take_changes().is_empty(), "not before it is confirmed");
    sessions.close_result(&tag, CloseResult::Closed, 1);
    for close in sessions.worker_restarted(W).closes {
        sessions.close_result(&close.engine_id, CloseResult::Closed, 2);
    }
    let gone = ids(&sessions.take_changes());
    assert!(gone.contains(&(false, tag)) && gone.contains(&(false, stream)), "{gone:?}");
}
