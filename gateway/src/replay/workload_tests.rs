#![allow(clippy::unwrap_used)]

use super::*;
use crate::recording::line::TurnLine;
use crate::replay::blocks::NONE;

const OPEN: Timing = Timing { closed: false, speed: 1.0 };
const CLOSED: Timing = Timing { closed: true, speed: 1.0 };

fn key(n: u64) -> String {
    format!("{n:032x}")
}

fn line(ts: u64, total_ms: f64, session: u64, parent: Option<u64>) -> TurnLine {
    TurnLine {
        ts,
        total_ms,
        route: "chat".into(),
        tenant: "00000000000000ff".into(),
        session: Some(key(session)),
        parent: parent.map(key),
        tree: parent.map(key),
        block_bytes: 512,
        prompt_bytes: 100,
        body_bytes: 120,
        prompt_tokens: Some(25),
        ..TurnLine::default()
    }
}

fn work(lines: Vec<TurnLine>, timing: Timing) -> Workload {
    let entries = lines.into_iter().map(|line| Entry { line, leaf: NONE }).collect();
    Workload::new(Log { entries, ..Log::default() }, timing).unwrap()
}

#[test]
fn turns_follow_their_sessions_and_the_sub_agents_they_waited_for() {
    let lines = || {
        vec![
            line(1_000, 500.0, 1, None),
            // A sub-agent begins after its parent's turn, and has two turns.
            line(1_600, 300.0, 2, Some(1)),
            line(2_000, 400.0, 2, Some(1)),
            // Another session, in between.
            line(2_100, 9_000.0, 3, None),
            // The parent goes on when the sub-agent is done.
            line(2_450, 100.0, 1, None),
        ]
    };
    let closed = work(lines(), CLOSED);
    let arrivals: Vec<Arrival> = (0..5).filter_map(|n| closed.arrival(n)).collect();
    assert_eq!(
        arrivals,
        [
            Arrival::At(0),
            Arrival::After(0, 100_000),
            Arrival::After(1, 100_000),
            Arrival::At(1_100_000),
            Arrival::After(2, 50_000),
        ]
    );
    assert_eq!(closed.following(), 3);
    // Arrivals are in whole ms, ends are not.
    let next = work(vec![line(1_000, 500.7, 1, None), line(1_500, 1.0, 1, None), line(1_500, 1.0, 1, None)], CLOSED);
    let arrivals: Vec<Arrival> = (0..3).filter_map(|n| next.arrival(n)).collect();
    assert_eq!(arrivals, [Arrival::At(0), Arrival::After(0, 0), Arrival::After(0, 0)]);
    let open = work(lines(), Timing { speed: 2.0, ..OPEN });
    assert_eq!(open.arrival(4), Some(Arrival::At(725_000)));
    let clusters: Vec<u32> = (0..5).map(|n| closed.cluster(n)).collect();
    assert_eq!(clusters, [0, 0, 0, 1, 0], "a tree is one conversation");
}

#[test]
fn turns_that_overlap_do_not_wait_for_each_other() {
    let closed = work(vec![line(0, 900.0, 1, None), line(100, 900.0, 1, None), line(950, 9.0, 1, None)], CLOSED);
    assert_eq!(closed.arrival(1), Some(Arrival::At(100_000)));
    assert_eq!(closed.arrival(2), Some(Arrival::After(0, 50_000)));
}

#[test]
fn a_turn_is_what_its_line_says() {
    let mut asked = line(5, 1.0, 7, Some(6));
    asked.priority = Some(-3);
    asked.osl = Some(50);
    asked.action = Some("open".into());
    asked.timeout_s = Some(2.5);
    asked.agent = "codex".into();
    asked.source = "header".into();
    asked.stream = true;
    let work = work(vec![asked], OPEN);
    let (turn, action) = work.turn(0).unwrap();
    assert_eq!(action, SessionAction::Open);
    assert_eq!((turn.hints.priority, turn.hints.osl, turn.control.timeout_s), (Some(-3), Some(50), Some(2.5)));
    assert_eq!((turn.identity.agent, turn.identity.source), (AgentKind::Codex, IdentitySource::Header));
    assert_eq!((turn.identity.tenant.0, turn.route, turn.stream), (255, Route::Chat, true));
    assert_eq!(turn.identity.session.as_ref().unwrap().key, SessionKey(7));
    assert_eq!(turn.identity.parent, turn.identity.tree);
    assert_eq!((turn.body.len(), turn.prefix.bytes, turn.prefix.affinity_hash), (120, 100, 7));
    assert_eq!(work.urgency(0), Urgency::Lowered);
}

#[test]
fn lines_that_cannot_be_turns_are_named() {
    let wrong = |change: fn(&mut TurnLine)| {
        let mut line = line(42, 1.0, 1, None);
        change(&mut line);
        work(vec![line], OPEN).check().unwrap_err()
    };
    assert_eq!(
        wrong(|l| l.route = "embeddings".into()),
        "the turn recorded at 42 ms: route: no route \"embeddings\" that generates"
    );
    assert!(wrong(|l| l.session = Some("x".into())).contains("session: expected 32 hexadecimal digits"));
    assert!(wrong(|l| l.tenant = "x".into()).contains("tenant: expected 16 hexadecimal digits"));
    assert!(wrong(|l| l.action = Some("x".into())).contains("action: expected bind, open or close"));
    assert!(wrong(|l| l.parent = Some(String::new())).contains("parent: expected 32"));
    let nobody = |l: &mut TurnLine| {
        l.session = None;
        l.affinity = Some("?".into());
    };
    assert!(wrong(nobody).contains("affinity: expected 16"));
}

#[test]
fn urgency_is_told_by_any_of_the_hints() {
    let of = |change: fn(&mut TurnLine)| {
        let mut line = line(0, 1.0, 1, None);
        change(&mut line);
        work(vec![line], OPEN).urgency(0)
    };
    assert_eq!(of(|_| {}), Urgency::Ordinary);
    assert_eq!(of(|l| l.priority = Some(1)), Urgency::Raised);
    assert_eq!(of(|l| l.strict_priority = Some(1)), Urgency::Raised);
    assert_eq!(of(|l| l.latency_sensitivity = Some(2.0)), Urgency::Raised);
    assert_eq!(of(|l| (l.priority, l.latency_sensitivity) = (Some(-1), Some(2.0))), Urgency::Lowered);
}
