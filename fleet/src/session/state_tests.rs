//! State × event, for each mode, against the tables written out here: the same as in the documentation of the module.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;

const KEY: SessionKey = SessionKey(7);
const WORKER: WorkerId = WorkerId(1);
const OTHER: WorkerId = WorkerId(2);
const TTL_MS: u64 = 1_000;

/// A table, one key, and what a gateway would hold for it.
struct Rig {
    mode: SessionMode,
    table: Sessions,
    leases: Vec<Lease>,
    sent: Vec<EngineClose>,
    now_ms: u64,
}

impl Rig {
    fn new(mode: SessionMode) -> Self {
        let options =
            SessionOptions { max_turn_ms: 60_000, engine_timeout_margin_ms: 5_000, ..SessionOptions::default() };
        Self { mode, table: Sessions::new(options, 42), leases: Vec::new(), sent: Vec::new(), now_ms: 1_000 }
    }

    fn turn(&self, action: SessionAction, worker: WorkerId) -> BeginTurn {
        BeginTurn {
            key: KEY,
            action,
            wish: Some(match self.mode {
                SessionMode::Affinity => ModeWish::Affinity,
                SessionMode::Tag => ModeWish::Tag,
                SessionMode::Stream => ModeWish::Stream,
            }),
            ttl_ms: Some(TTL_MS),
            worker,
            rank: None,
            capabilities: Capabilities { tag: true, stream: true, priority: false, dp_size: 1 },
            accepts: Accepts { session_params: true, session_id: true },
            cap: StreamCap { rows: 4, tokens: 10_000 },
            now_ms: self.now_ms,
        }
    }

    fn begin(&mut self, action: SessionAction, worker: WorkerId) -> String {
        let begin = self.table.begin(&self.turn(action, worker));
        self.sent.extend(begin.closes);
        match begin.outcome {
            Outcome::Ordinary(_) => "ordinary".into(),
            Outcome::Busy(busy) => format!("busy({})", busy.name()),
            Outcome::Ready(mut lease) => {
                let mut text = "ready".to_owned();
                if lease.open_timeout_ms.is_some() {
                    text += " opens";
                    let closes = self.table.opened(&mut lease, OpenResult::Opened, self.now_ms);
                    assert!(closes.is_empty());
                }
                if lease.context_lost {
                    text += " without-context";
                }
                self.leases.push(lease);
                text
            }
        }
    }

    fn end(&mut self, end: TurnEnd) {
        let lease = self.leases.pop().unwrap();
        let closes = self.table.end(lease, end, self.now_ms);
        self.sent.extend(closes);
    }

    fn finished() -> TurnEnd {
        TurnEnd::Finished(Some(Usage { prompt_tokens: 90, completion_tokens: 10, cached_tokens: 50 }))
    }

    /// Brings a fresh rig into a state.
    fn enter(&mut self, state: &str) {
        let first = [SessionAction::Bind, SessionAction::Open][usize::from(self.mode != SessionMode::Affinity)];
        match state {
            "absent" => {}
            "idle" => {
                self.begin(first, WORKER);
                self.end(Self::finished());
            }
            "running" => {
                self.enter("idle");
                self.begin(SessionAction::None, WORKER);
            }
            "lost" => {
                self.enter("idle");
                let loss = self.table.worker_lost(WORKER);
                for close in loss.closes {
                    self.table.close_result(&close.engine_id, true, self.now_ms);
                }
            }
            "aborted" => {
                self.enter("running");
                self.end(TurnEnd::Aborted);
            }
            "closing" => {
                self.enter("idle");
                self.begin(SessionAction::Close, WORKER);
            }
            "closing-aborted" => {
                self.enter("closing");
                self.end(TurnEnd::Aborted);
            }
            "closed" => {
                self.enter("closing");
                self.end(Self::finished());
            }
            "given-up" => {
                self.enter("closed");
                let id = self.sent.pop().unwrap().engine_id;
                self.table.close_result(&id, false, self.now_ms);
            }
            other => panic!("no state {other}"),
        }
        assert_eq!(self.state(), state, "the rig is in the state it was brought into");
    }

    /// What the key is, seen from outside.
    fn state(&self) -> &'static str {
        let Some(view) = self.table.view(KEY, self.now_ms) else {
            let counts = self.table.counts();
            return match (counts.leaving, counts.closing, counts.abandoned) {
                (0, 0, 0) => "absent",
                (1.., _, _) if self.leases.is_empty() => "closing-aborted",
                (1.., _, _) => "closing",
                (_, 1.., _) => "closed",
                (_, _, 1..) => "given-up",
            };
        };
        let bare = view.mode == SessionMode::Stream && !view.engine_open;
        match (view.in_flight, view.awaiting_release, view.mode == self.mode) {
            (0, true, _) => "aborted",
            (0, false, _) if bare || view.worker.is_none() => "lost",
            (0, false, _) => "idle",
            (_, _, _) if bare => "running-lost",
            (_, _, false) => "running-affinity",
            (_, _, true) => "running",
        }
    }

    /// Applies an event; what came of it in words.
    fn apply(&mut self, event: &str) -> String {
        self.sent.clear();
        let outcome = match event {
            "none" => self.begin(SessionAction::None, WORKER),
            "bind" => self.begin(SessionAction::Bind, WORKER),
            "open" => self.begin(SessionAction::Open, WORKER),
            "close" => self.begin(SessionAction::Close, WORKER),
            "release" => self.begin(SessionAction::Release, WORKER),
            "none elsewhere" => self.begin(SessionAction::None, OTHER),
            "finished" | "aborted" if self.leases.is_empty() => return "-".into(),
            "finished" => {
                self.end(Self::finished());
                String::new()
            }
            "aborted" => {
                self.end(TurnEnd::Aborted);
                String::new()
            }
            "released" => {
                self.sent = self.table.released(KEY);
                String::new()
            }
            "expire" => {
                self.now_ms += TTL_MS;
                self.sent = self.table.expire(self.now_ms);
                String::new()
            }
            "lost" => {
                self.sent = self.table.worker_lost(WORKER).closes;
                String::new()
            }
            "drain" => {
                self.sent = self.table.drain(WORKER);
                String::new()
            }
            "confirmed" | "failed" => {
                for engine in self.table.open_engines() {
                    self.table.close_result(&engine.engine_id, event == "confirmed", self.now_ms);
                }
                String::new()
            }
            other => panic!("no event {other}"),
        };
        self.table.check_invariants();
        let arrow = if outcome.is_empty() { "" } else { " " };
        let sent = if self.sent.is_empty() { "" } else { " !" };
        format!("{outcome}{arrow}> {}{sent}", self.state())
    }
}

fn check(mode: SessionMode, events: &[&str], table: &[(&str, &[&str])]) {
    let mut wrong = Vec::new();
    for (state, expected) in table {
        assert_eq!(events.len(), expected.len(), "row {state} has a cell for each event");
        for (event, expected) in events.iter().zip(*expected) {
            let mut rig = Rig::new(mode);
            rig.enter(state);
            let actual = rig.apply(event);
            if actual != *expected {
                wrong.push(format!("{state} × {event}: {actual}, not {expected}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

const EVENTS: [&str; 13] = [
    "none",
    "bind",
    "open",
    "close",
    "release",
    "finished",
    "aborted",
    "released",
    "expire",
    "lost",
    "drain",
    "confirmed",
    "failed",
];

#[test]
fn streaming_sessions_follow_their_table() {
    #[rustfmt::skip]
    let table: [(&str, &[&str]); 9] = [
        ("absent", &[
            "ordinary > absent", "ready > running-affinity", "ready opens > running", "ordinary > absent", "ordinary > absent",
            "-", "-", "> absent", "> absent", "> absent", "> absent", "> absent", "> absent",
        ]),
        ("idle", &[
            "ready > running", "ready > running", "ready > running", "ready > closing", "ordinary > closed !",
            "-", "-", "> idle", "> closed !", "> lost !", "> lost !", "> idle", "> idle",
        ]),
        ("running", &[
            "busy(turn) > running", "busy(turn) > running", "busy(turn) > running", "busy(turn) > running", "ordinary > closing",
            "> idle", "> aborted", "> running", "> running", "> running-lost", "> running-lost", "> running", "> running",
        ]),
        ("lost", &[
            "ready opens without-context > running", "ready opens without-context > running",
            "ready opens without-context > running", "ready without-context > absent", "ordinary > absent",
            "-", "-", "> lost", "> absent", "> lost", "> lost", "> lost", "> lost",
        ]),
        ("aborted", &[
            "busy(abort) > aborted", "busy(abort) > aborted", "busy(abort) > aborted", "busy(abort) > aborted",
            "ordinary > closing-aborted",
            "-", "-", "> idle", "> closing-aborted", "> lost", "> lost", "> aborted", "> aborted",
        ]),
        ("closing", &[
            "ordinary > closing", "ready > running-affinity", "busy(close) > closing", "ordinary > closing", "ordinary > closing",
            "> closed !", "> closing-aborted", "> closing", "> closing", "> closing", "> closing", "> closing", "> closing",
        ]),
        ("closing-aborted", &[
            "ordinary > closing-aborted", "ready > running-affinity", "busy(close) > closing-aborted",
            "ordinary > closing-aborted", "ordinary > closing-aborted",
            "-", "-", "> closed !", "> closing-aborted", "> closing-aborted", "> closing-aborted", "> closing-aborted",
            "> closing-aborted",
        ]),
        ("closed", &[
            "ordinary > closed", "ready > running-affinity", "busy(close) > closed", "ordinary > closed", "ordinary > closed",
            "-", "-", "> closed", "> closed", "> closed", "> closed", "> absent", "> given-up",
        ]),
        ("given-up", &[
            "ordinary > given-up", "ready > running-affinity", "ready opens > running", "ordinary > given-up",
            "ordinary > given-up",
            "-", "-", "> given-up", "> given-up", "> given-up", "> given-up", "> given-up", "> given-up",
        ]),
    ];
    check(SessionMode::Stream, &EVENTS, &table);
}

#[test]
fn tag_sessions_follow_their_table() {
    #[rustfmt::skip]
    let table: [(&str, &[&str]); 7] = [
        ("absent", &[
            "ordinary > absent", "ready > running-affinity", "ready > running", "ordinary > absent", "ordinary > absent",
            "-", "-", "> absent", "> absent", "> absent", "> absent", "> absent", "> absent",
        ]),
        ("idle", &[
            "ready > running", "ready > running", "ready > running", "ready > closing", "ordinary > closed !",
            "-", "-", "> idle", "> closed !", "> lost !", "> lost !", "> idle", "> idle",
        ]),
        ("running", &[
            "ready > running", "ready > running", "ready > running", "ready > closing", "ordinary > closing",
            "> idle", "> idle", "> running", "> running", "> running", "> running", "> running", "> running",
        ]),
        ("lost", &[
            "ready > running", "ready > running", "ready > running", "ready > absent", "ordinary > absent",
            "-", "-", "> lost", "> absent", "> lost", "> lost", "> lost", "> lost",
        ]),
        ("closing", &[
            "ordinary > closing", "ready > running-affinity", "ready > running", "ordinary > closing", "ordinary > closing",
            "> closed !", "> closed !", "> closing", "> closing", "> closing", "> closing", "> closing", "> closing",
        ]),
        ("closed", &[
            "ordinary > closed", "ready > running-affinity", "ready > running", "ordinary > closed", "ordinary > closed",
            "-", "-", "> closed", "> closed", "> closed", "> closed", "> absent", "> given-up",
        ]),
        ("given-up", &[
            "ordinary > given-up", "ready > running-affinity", "ready > running", "ordinary > given-up", "ordinary > given-up",
            "-", "-", "> given-up", "> given-up", "> given-up", "> given-up", "> given-up", "> given-up",
        ]),
    ];
    check(SessionMode::Tag, &EVENTS, &table);
}

#[test]
fn affinity_sessions_follow_their_table() {
    #[rustfmt::skip]
    let table: [(&str, &[&str]); 4] = [
        ("absent", &[
            "ordinary > absent", "ready > running", "ready > running", "ordinary > absent", "ordinary > absent",
            "-", "-", "> absent", "> absent", "> absent", "> absent", "> absent", "> absent",
        ]),
        ("idle", &[
            "ready > running", "ready > running", "ready > running", "ready > absent", "ordinary > absent",
            "-", "-", "> idle", "> absent", "> lost", "> lost", "> idle", "> idle",
        ]),
        ("running", &[
            "ready > running", "ready > running", "ready > running", "ready > absent", "ordinary > absent",
            "> idle", "> idle", "> running", "> running", "> running", "> running", "> running", "> running",
        ]),
        ("lost", &[
            "ready > running", "ready > running", "ready > running", "ready > absent", "ordinary > absent",
            "-", "-", "> lost", "> absent", "> lost", "> lost", "> lost", "> lost",
        ]),
    ];
    check(SessionMode::Affinity, &EVENTS, &table);
}

#[test]
fn moving_closes_the_old_tag_after_its_last_turn_and_never_moves_a_stream() {
    let mut tag = Rig::new(SessionMode::Tag);
    tag.enter("running");
    assert_eq!(tag.apply("none elsewhere"), "ready > running", "the old tag has a turn in flight");
    assert_eq!(tag.leases.last().unwrap().worker, OTHER);
    assert_eq!(tag.apply("finished"), "> running");
    assert_eq!(tag.apply("finished"), "> idle !");
    assert_eq!((tag.sent[0].worker, tag.sent[0].cause), (WORKER, CloseCause::Moved));

    let mut stream = Rig::new(SessionMode::Stream);
    stream.enter("idle");
    assert_eq!(stream.apply("none elsewhere"), "ready > running");
    assert_eq!(stream.leases.last().unwrap().worker, WORKER, "it is pinned whatever was decided");
}
