//! State × event of one key, for each mode: every state that can be reached, every event in it. What comes of each is
//! written into `docs/sessions.md`; a change of the code that changes a cell fails until the page says so too
//! (`UPDATE_DOCS=1` writes it).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;

use super::engine::{Engine, EngineState};
use super::*;

const KEY: SessionKey = SessionKey(7);
const WORKER: WorkerId = WorkerId(1);
const OTHER: WorkerId = WorkerId(2);
const TTL_MS: u64 = 1_000;
/// Ways into a state from which its events are tried: what differs in nothing one can see must not differ in what follows.
const WAYS: usize = 12;
/// Longest way.
const DEPTH: usize = 9;

/// An event, and why it cannot happen where it cannot.
const EVENTS: [(&str, &str); 31] = [
    ("turn", ""),
    ("turn that binds", ""),
    ("turn that opens", ""),
    ("turn that closes", ""),
    ("turn that releases", ""),
    ("turn placed on another worker", ""),
    ("turn that opens, placed on another worker", ""),
    ("turn on a route without engine sessions", ""),
    ("closing turn on a route without engine sessions", ""),
    ("turn on a worker without engine sessions", ""),
    ("open: 200", "no open is under way"),
    ("open: refused", "no open is under way"),
    ("open: no answer", "no open is under way"),
    ("client leaves during the open", "no open is under way that a client waits for"),
    ("turn finished", "no turn runs: an end takes a lease"),
    ("turn cut", "no turn runs: an end takes a lease"),
    ("turn ended unfinished by the engine", "no turn runs: an end takes a lease"),
    ("turn not served", "no turn runs: an end takes a lease"),
    ("engine does not know the session", "no turn runs: an end takes a lease"),
    ("engine still has another turn", "no turn runs: an end takes a lease"),
    ("engine let go", ""),
    ("idle timeout passes", ""),
    ("engine's timeout passes", ""),
    ("session closed without a turn", ""),
    ("session unbound", ""),
    ("worker lost, or drains", ""),
    ("worker restarted", ""),
    ("worker removed", ""),
    ("close confirmed", "no close was sent"),
    ("close failed", "no close was sent"),
    ("close refused", "no close was sent"),
];

/// A table, one key, and what a gateway would hold for it.
struct Rig {
    mode: SessionMode,
    table: Sessions,
    leases: Vec<Lease>,
    /// Opens under way whose lease is gone.
    late: Vec<Arc<str>>,
    sent: Vec<Arc<str>>,
    now_ms: u64,
}

impl Rig {
    fn new(mode: SessionMode) -> Self {
        let options =
            SessionOptions { max_turn_ms: 60_000, engine_timeout_margin_ms: 5_000, ..SessionOptions::default() };
        let table = Sessions::new(options, 42);
        Self { mode, table, leases: Vec::new(), late: Vec::new(), sent: Vec::new(), now_ms: 1_000 }
    }

    fn turn(&self, action: SessionAction) -> BeginTurn {
        BeginTurn {
            key: KEY,
            action,
            wish: Some(match self.mode {
                SessionMode::Affinity => ModeWish::Affinity,
                SessionMode::Tag => ModeWish::Tag,
                SessionMode::Stream => ModeWish::Stream,
            }),
            ttl_ms: Some(TTL_MS),
            worker: WORKER,
            rank: None,
            capabilities: Capabilities { tag: true, stream: true, priority: false, dp_size: 1 },
            accepts: Accepts { session_params: true, session_id: true },
            cap: StreamCap { rows: 4, tokens: 10_000 },
            ticket: None,
            now_ms: self.now_ms,
        }
    }

    fn begin(&mut self, turn: &BeginTurn) -> (String, Vec<EngineClose>) {
        let begin = self.table.begin(turn);
        let text = match begin.outcome {
            Outcome::Ordinary(_) => "goes without a session".into(),
            Outcome::Busy(Busy::Turn) => "waits for the turn".into(),
            Outcome::Busy(Busy::Abort) => "waits until the engine let go".into(),
            Outcome::Busy(Busy::Close) => "waits for the close".into(),
            Outcome::Busy(Busy::Room) => "waits for room".into(),
            Outcome::Ready(lease) => {
                let mut text = match (lease.mode, lease.open_timeout_ms) {
                    (SessionMode::Stream, Some(_)) => "opens an engine session",
                    (SessionMode::Stream, None) => "runs in the engine session",
                    (SessionMode::Tag, _) => "runs with the tag",
                    (SessionMode::Affinity, _) => "runs without engine session",
                }
                .to_owned();
                let told = ContextNote::of(&lease).filter(|_| self.mode == SessionMode::Stream);
                match told {
                    Some(ContextNote::New) => text += ", told: context begins",
                    Some(ContextNote::Lost) => text += ", told: context lost",
                    Some(ContextNote::Incomplete) => text += ", told: context incomplete",
                    Some(_) => text += ", told: no context kept",
                    None => {}
                }
                self.leases.push(lease);
                text
            }
        };
        (text, begin.closes)
    }

    fn end(&mut self, end: TurnEnd) -> Option<Vec<EngineClose>> {
        if self.leases.last().is_none_or(|lease| lease.open_timeout_ms.is_some()) {
            return None;
        }
        Some(self.table.end(self.leases.pop()?, end, self.now_ms))
    }

    fn open(&mut self, result: OpenResult) -> Option<Vec<EngineClose>> {
        if let Some(lease) = self.leases.iter_mut().find(|lease| lease.open_timeout_ms.is_some()) {
            return Some(self.table.opened(lease, result, self.now_ms));
        }
        let id = self.late.pop()?;
        Some(self.table.opened_late(&id, result))
    }

    fn closed(&mut self, result: CloseResult) -> Option<Vec<EngineClose>> {
        let id = self.sent.pop()?;
        self.table.close_result(&id, result, self.now_ms);
        Some(Vec::new())
    }

    /// Applies an event; what came of it. None: it cannot happen.
    fn apply(&mut self, event: &str) -> Option<Cell> {
        let mut what = String::new();
        let plain = self.turn(SessionAction::None);
        let elsewhere = BeginTurn { worker: OTHER, ..plain };
        let beside = Accepts::default();
        let mut begin = |rig: &mut Self, turn: &BeginTurn| {
            let closes;
            (what, closes) = rig.begin(turn);
            Some(closes)
        };
        let closes = match event {
            "turn" => begin(self, &plain),
            "turn that binds" => begin(self, &BeginTurn { action: SessionAction::Bind, ..plain }),
            "turn that opens" => begin(self, &BeginTurn { action: SessionAction::Open, ..plain }),
            "turn that closes" => begin(self, &BeginTurn { action: SessionAction::Close, ..plain }),
            "turn that releases" => begin(self, &BeginTurn { action: SessionAction::Release, ..plain }),
            "turn placed on another worker" => begin(self, &elsewhere),
            "turn that opens, placed on another worker" => {
                begin(self, &BeginTurn { action: SessionAction::Open, ..elsewhere })
            }
            "turn on a route without engine sessions" => begin(self, &BeginTurn { accepts: beside, ..plain }),
            "closing turn on a route without engine sessions" => {
                begin(self, &BeginTurn { accepts: beside, action: SessionAction::Close, ..plain })
            }
            "turn on a worker without engine sessions" => {
                begin(self, &BeginTurn { capabilities: Capabilities::default(), ..plain })
            }
            "open: 200" => self.open(OpenResult::Opened),
            "open: refused" => self.open(OpenResult::Refused),
            "open: no answer" => self.open(OpenResult::Unknown),
            "client leaves during the open" => {
                let place = self.leases.iter().position(|lease| lease.open_timeout_ms.is_some())?;
                let lease = self.leases.remove(place);
                self.late.push(lease.engine_id.clone().unwrap());
                Some(self.table.end(lease, TurnEnd::NotServed, self.now_ms))
            }
            "turn finished" => {
                self.end(TurnEnd::Finished(Some(Usage { prompt_tokens: 90, completion_tokens: 10, cached_tokens: 50 })))
            }
            "turn cut" => self.end(TurnEnd::Aborted),
            "turn ended unfinished by the engine" => self.end(TurnEnd::Unfinished),
            "turn not served" => self.end(TurnEnd::NotServed),
            "engine does not know the session" => self.end(TurnEnd::EngineGone),
            "engine still has another turn" => self.end(TurnEnd::StillBusy),
            "engine let go" => Some(self.table.released(KEY)),
            "idle timeout passes" => {
                self.now_ms += TTL_MS;
                Some(self.table.expire(self.now_ms))
            }
            "engine's timeout passes" => {
                self.now_ms += TTL_MS + 60_000 + 5_000;
                Some(self.table.expire(self.now_ms))
            }
            "session closed without a turn" => Some(self.table.close(KEY)),
            "session unbound" => Some(self.table.unbind(KEY)),
            "worker lost, or drains" => Some(self.both(Sessions::worker_lost)),
            "worker restarted" => Some(self.both(Sessions::worker_restarted)),
            "worker removed" => Some(self.both(Sessions::worker_removed)),
            "close confirmed" => self.closed(CloseResult::Closed),
            "close failed" => self.closed(CloseResult::Failed),
            "close refused" => self.closed(CloseResult::Refused),
            other => panic!("no event {other}"),
        }?;
        self.table.check_invariants();
        for close in &closes {
            let held = |lease: &&Lease| lease.engine_id.as_ref() == Some(&close.engine_id);
            assert!(!self.leases.iter().any(|lease| held(&lease)), "a close while a turn runs: {event}");
            assert!(!self.late.contains(&close.engine_id), "a close that may overtake its open: {event}");
            assert!(!self.sent.contains(&close.engine_id), "a close that is under way already: {event}");
        }
        let close = !closes.is_empty();
        self.sent.extend(closes.into_iter().map(|close| close.engine_id));
        Some(Cell { what, next: self.state(), close })
    }

    fn both(&mut self, change: fn(&mut Sessions, WorkerId) -> WorkerLoss) -> Vec<EngineClose> {
        [WORKER, OTHER].into_iter().flat_map(|worker| change(&mut self.table, worker).closes).collect()
    }

    /// What the key is: its session, then what it left behind.
    fn state(&self) -> String {
        let slot = self.table.slots.get(&KEY);
        let session = slot.and_then(|slot| slot.session.as_ref());
        let engine = session.and_then(|session| session.engine).and_then(|number| self.table.engines.get(number));
        let inside = |engine: &Engine| self.leases.iter().any(|lease| lease.engine_id.as_ref() == Some(&engine.id));
        let mut state = match (session, engine) {
            (None, _) => "absent".to_owned(),
            (Some(session), _) if session.mode != self.mode => {
                ["affinity only, idle", "affinity only, running"][usize::from(session.in_flight > 0)].to_owned()
            }
            (Some(_), Some(engine)) if engine.opening => "opening".to_owned(),
            (Some(_), Some(engine)) if engine.awaiting_release && engine.mode == SessionMode::Stream => {
                "cut".to_owned()
            }
            (Some(session), Some(engine)) => match session.in_flight {
                0 => "idle".to_owned(),
                _ if inside(engine) => "running".to_owned(),
                _ => "running beside".to_owned(),
            },
            (Some(session), None) if self.mode == SessionMode::Affinity && session.bound.is_some() => {
                ["idle", "running"][usize::from(session.in_flight > 0)].to_owned()
            }
            (Some(session), None) => ["lost", "lost, running"][usize::from(session.in_flight > 0)].to_owned(),
        };
        if engine.is_some_and(|engine| engine.awaiting_release && engine.mode == SessionMode::Tag) {
            state += ", a turn was cut";
        }
        if session.is_none() && !self.leases.is_empty() {
            state += ", a last turn running";
        }
        if self.leases.len() > 1 {
            let _ = write!(state, " ×{}", self.leases.len());
        }
        let mut left: Vec<&str> = slot
            .into_iter()
            .flat_map(|slot| &slot.leaving)
            .filter_map(|&number| self.table.engines.get(number))
            .map(|engine| match engine.state {
                EngineState::Closing => "close sent",
                EngineState::Retrying { .. } => "close to be repeated",
                EngineState::Abandoned { .. } => "close given up",
                EngineState::Live | EngineState::Leaving if engine.opening => "close waits for its open",
                EngineState::Live | EngineState::Leaving if engine.in_flight > 0 => "close waits for its turn",
                EngineState::Live | EngineState::Leaving => "close waits until the engine let go",
            })
            .collect();
        left.sort_unstable();
        if !left.is_empty() {
            let _ = write!(state, "; {}", left.join(", "));
        }
        state
    }
}

/// What an event does in a state.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Cell {
    what: String,
    next: String,
    close: bool,
}

/// Cells of each state by event; none where the event cannot happen.
type Table = BTreeMap<String, Vec<Option<BTreeSet<Cell>>>>;

/// Goes every way, up to states with several turns or several engine sessions left behind: those are products of the others.
fn explore(mode: SessionMode) -> Table {
    let mut table = Table::new();
    let mut ways: BTreeMap<String, usize> = BTreeMap::new();
    let mut next: VecDeque<Vec<&str>> = VecDeque::from([Vec::new()]);
    while let Some(way) = next.pop_front() {
        let replay = || {
            let mut rig = Rig::new(mode);
            for event in &way {
                rig.apply(event).unwrap();
            }
            rig
        };
        let state = replay().state();
        let first = !table.contains_key(&state);
        let cells = table.entry(state.clone()).or_insert_with(|| vec![None; EVENTS.len()]);
        for (cell, (event, _)) in cells.iter_mut().zip(EVENTS) {
            let result = replay().apply(event);
            assert!(
                first || cell.is_some() == result.is_some(),
                "{state} × {event}: possible or not depends on the way {way:?}"
            );
            let Some(result) = result else { continue };
            let product = result.next.contains('×') || result.next.split_once("; ").is_some_and(|l| l.1.contains(", "));
            let known = ways.entry(result.next.clone()).or_insert(0);
            if !product && *known < WAYS && way.len() < DEPTH {
                *known += 1;
                next.push_back(way.iter().copied().chain([event]).collect());
            }
            cell.get_or_insert_default().insert(result);
        }
    }
    table
}

fn describe(mode: &str, intro: &str, table: &Table) -> String {
    let mut text = format!("## {mode}\n\n{intro}\n");
    for (state, cells) in table {
        let _ = write!(text, "\n### {mode}: {state}\n\n| event | what happens | then |\n| --- | --- | --- |\n");
        let mut rows: Vec<(Vec<&str>, String)> = Vec::new();
        for (cell, (event, impossible)) in cells.iter().zip(EVENTS) {
            let result = match cell {
                None => {
                    assert!(!impossible.is_empty(), "{state} × {event} is never reached and no reason is known");
                    format!("cannot happen: {impossible} | –")
                }
                Some(results) => {
                    let parts = |part: fn(&Cell) -> String| {
                        let parts: BTreeSet<String> = results.iter().map(part).collect();
                        Vec::from_iter(parts).join(" *or* ")
                    };
                    let what = parts(|cell| match (cell.what.as_str(), cell.close) {
                        ("", false) => "nothing to send".into(),
                        ("", true) => "**close sent**".into(),
                        (what, false) => what.into(),
                        (what, true) => format!("{what}, **close sent**"),
                    });
                    let next = parts(|cell| cell.next.clone());
                    format!("{what} | {}", if next == *state { "stays" } else { &next })
                }
            };
            match rows.iter_mut().find(|(_, known)| *known == result) {
                Some((events, _)) => events.push(event),
                None => rows.push((vec![event], result)),
            }
        }
        for (events, result) in rows {
            let _ = writeln!(text, "| {} | {result} |", events.join("; "));
        }
    }
    text
}

const INTRO: &str = "\
# Sessions: state × event

A *session* is the gateway's: a key, a worker, an idle timeout. An *engine session* is the worker's: a tag on its radix cache
(`session_id`), or a streaming session in its scheduler (`/open_session`). This page is written by
`fleet/src/session/state_tests.rs`, which drives the code through every state that one key can reach and every event in it, and
fails when the code does something else than stands here. Rules that hold in all of it:

- In a streaming session one turn runs at a time; those that wait go in order of arrival.
- No close is sent while a turn runs in the engine session, while the worker has not let go of a turn that was cut, or while its
  open is under way. A close that fails is sent again (after 0.1, 0.5, 2, 5, 10, then every 30 s, and when the worker is back) until
  the engine's own timeout has passed.
- An engine id is used once, and made from a secret: nobody else can name it, and a late close never meets a new session.
- A client of a streaming session is told, in `x-turnstile-session-note`, of every turn that does not run in the engine session
  that has its context.

States are named by the session, then, after a semicolon, by the engine session that it left behind. Where two results stand
beside each other, *or* says that they depend on what cannot be seen from outside: whether a context was there to be lost, whether
the worker was given up as lost, and how often the engine refused. States in which several turns run (`×2`) or several engine
sessions are left are not listed on their own: each of those goes on as if it were alone. Their products are checked by the
schedules of `session/schedule_tests.rs` and by the simulation (`make session-sim`).

";

#[test]
fn every_reachable_state_does_with_every_event_what_the_documentation_says() {
    let stream = explore(SessionMode::Stream);
    let tag = explore(SessionMode::Tag);
    let affinity = explore(SessionMode::Affinity);
    let page = [
        INTRO.to_owned(),
        describe(
            "Streaming",
            "Opened on `/generate`; deltas; one turn at a time; pinned to worker and rank. *Cut*: the last turn was cut, and the \
             worker has not let go of it yet. *Lost*: its engine session is gone; the next turn opens a new one.",
            &stream,
        ),
        describe(
            "Tag",
            "Opened on a route that takes `session_id`; full history; turns overlap and move. A tag needs no open.",
            &tag,
        ),
        describe("Affinity", "A choice of worker only; the worker is told nothing.", &affinity),
    ]
    .join("\n");
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/sessions.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(path, &page).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap_or_default();
    let differs = page.lines().zip(written.lines().chain(std::iter::repeat(""))).find(|(new, old)| new != old);
    assert!(page == written, "docs/sessions.md is not what the code does (UPDATE_DOCS=1 rewrites it): {differs:?}");
}

#[test]
fn moving_closes_the_old_tag_after_its_last_turn_and_never_moves_a_stream() {
    let mut tag = Rig::new(SessionMode::Tag);
    for event in ["turn that opens", "turn placed on another worker"] {
        tag.apply(event).unwrap();
    }
    assert_eq!(tag.leases.last().unwrap().worker, OTHER);
    tag.apply("turn finished").unwrap();
    assert!(tag.sent.is_empty(), "the old tag has a turn in flight");
    assert!(tag.apply("turn finished").unwrap().close);

    let mut stream = Rig::new(SessionMode::Stream);
    for event in ["turn that opens", "open: 200", "turn finished", "turn placed on another worker"] {
        stream.apply(event).unwrap();
    }
    assert_eq!(stream.leases.last().unwrap().worker, WORKER, "it is pinned whatever was decided");
}
