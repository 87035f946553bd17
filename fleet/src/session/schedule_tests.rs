//! Random schedules against a fake fleet that dies of what kills a real one.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const TTL_MS: u64 = 500;

#[derive(Debug, Clone, Copy)]
enum Step {
    Begin { key: u8, action: u8, wish: u8, worker: u8, rank: u8, route: u8 },
    Opened { lease: u8, result: u8 },
    End { lease: u8, end: u8, tokens: u16 },
    Released { key: u8 },
    Confirm { close: u8, result: u8 },
    Wait { ms: u16 },
    Lost { worker: u8 },
    Drain { worker: u8 },
    Restarted { worker: u8 },
    Removed { worker: u8 },
    OpenedLate { open: u8, result: u8 },
    Unbind { key: u8 },
    Close { key: u8 },
    CloseAll,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0..6_u8, 0..5_u8, 0..5_u8, 0..3_u8, 0..3_u8, 0..3_u8)
            .prop_map(|(key, action, wish, worker, rank, route)| Step::Begin { key, action, wish, worker, rank, route }),
        4 => (any::<u8>(), 0..6_u8).prop_map(|(lease, result)| Step::Opened { lease, result }),
        8 => (any::<u8>(), 0..9_u8, 0..600_u16).prop_map(|(lease, end, tokens)| Step::End { lease, end, tokens }),
        3 => (0..6_u8).prop_map(|key| Step::Released { key }),
        6 => (any::<u8>(), 0..10_u8).prop_map(|(close, result)| Step::Confirm { close, result }),
        3 => (0..400_u16).prop_map(|ms| Step::Wait { ms }),
        1 => (0..3_u8).prop_map(|worker| Step::Lost { worker }),
        1 => (0..3_u8).prop_map(|worker| Step::Drain { worker }),
        1 => (0..3_u8).prop_map(|worker| Step::Restarted { worker }),
        1 => (0..3_u8).prop_map(|worker| Step::Removed { worker }),
        2 => (any::<u8>(), 0..4_u8).prop_map(|(open, result)| Step::OpenedLate { open, result }),
        1 => (0..6_u8).prop_map(|key| Step::Unbind { key }),
        1 => (0..6_u8).prop_map(|key| Step::Close { key }),
        1 => Just(Step::CloseAll),
    ];
    prop::collection::vec(step, 0..120)
}

/// An engine session as a worker has it.
#[derive(Debug, Default)]
struct Engine {
    in_flight: u32,
    letting_go: bool,
}

/// What workers hold. It checks each thing done to it, as the real scheduler asserts.
#[derive(Debug, Default)]
struct Fleet {
    sessions: BTreeMap<(WorkerId, String), Engine>,
    ever: BTreeSet<String>,
}

struct World {
    table: Sessions,
    fleet: Fleet,
    leases: Vec<Lease>,
    closes: Vec<EngineClose>,
    now_ms: u64,
    cap: StreamCap,
    /// Opens under way whose lease has ended.
    late: Vec<(WorkerId, Arc<str>)>,
    /// A close was given up, so a worker holds something until its own timeout.
    gave_up: bool,
}

impl World {
    fn new() -> Self {
        let options = SessionOptions {
            max_sessions: 4,
            default_ttl_ms: TTL_MS,
            max_turn_ms: 100,
            engine_timeout_margin_ms: 100,
            evict_after_idle_ms: 50,
        };
        Self {
            table: Sessions::new(options, 9),
            fleet: Fleet::default(),
            leases: Vec::new(),
            closes: Vec::new(),
            now_ms: 0,
            cap: StreamCap { rows: 2, tokens: 1_000 },
            late: Vec::new(),
            gave_up: false,
        }
    }

    fn begin(&mut self, turn: &BeginTurn) {
        let begin = self.table.begin(turn);
        self.send(begin.closes);
        if let Outcome::Ready(lease) = begin.outcome {
            self.start(&lease);
            self.leases.push(lease);
        }
    }

    /// The turn goes to the worker, unless its engine session has to be opened first.
    fn start(&mut self, lease: &Lease) {
        let Some(id) = &lease.engine_id else { return };
        assert_ne!(lease.mode, SessionMode::Affinity, "an engine id is for a session of the engine");
        if lease.open_timeout_ms.is_some() {
            return;
        }
        let at = (lease.worker, id.to_string());
        if lease.mode == SessionMode::Tag {
            self.fleet.ever.insert(id.to_string());
            self.fleet.sessions.entry(at).or_default().in_flight += 1;
        } else if let Some(engine) = self.fleet.sessions.get_mut(&at) {
            assert_eq!(engine.in_flight, 0, "a second turn in a streaming session");
            assert!(!engine.letting_go, "a turn before the worker let go of the aborted one");
            engine.in_flight += 1;
        }
    }

    fn opened(&mut self, place: usize, result: OpenResult) {
        let Some(lease) = self.leases.get_mut(place) else { return };
        if lease.open_timeout_ms.is_none() {
            return;
        }
        let at = (lease.worker, lease.engine_id.clone().unwrap().to_string());
        // Without an answer it may be open or not: here it is.
        if result != OpenResult::Refused {
            assert!(self.fleet.ever.insert(at.1.clone()), "an engine id is used once");
            self.fleet
                .sessions
                .insert(at, Engine { in_flight: u32::from(result == OpenResult::Opened), ..Engine::default() });
        }
        let closes = self.table.opened(lease, result, self.now_ms);
        assert_eq!(lease.engine_id.is_some(), result == OpenResult::Opened);
        self.send(closes);
    }

    fn end(&mut self, place: usize, end: TurnEnd) {
        let lease = self.leases.remove(place);
        let mut end = end;
        if lease.open_timeout_ms.is_some() {
            self.late.push((lease.worker, lease.engine_id.clone().unwrap()));
        }
        if let Some(id) = &lease.engine_id {
            let at = (lease.worker, id.to_string());
            match self.fleet.sessions.get_mut(&at) {
                // Its process restarted, or it was never opened.
                None => end = if lease.open_timeout_ms.is_some() { TurnEnd::NotServed } else { TurnEnd::EngineGone },
                Some(engine) => {
                    engine.in_flight -= 1;
                    engine.letting_go =
                        lease.mode == SessionMode::Stream && matches!(end, TurnEnd::Aborted | TurnEnd::StillBusy);
                    if lease.mode == SessionMode::Stream && end == TurnEnd::EngineGone {
                        self.fleet.sessions.remove(&at);
                    }
                }
            }
        }
        let closes = self.table.end(lease, end, self.now_ms);
        self.send(closes);
    }

    fn send(&mut self, closes: Vec<EngineClose>) {
        for close in closes {
            if let Some(engine) = self.fleet.sessions.get(&(close.worker, close.engine_id.to_string())) {
                assert_eq!(engine.in_flight, 0, "a close during a turn: {close:?}");
                assert!(!engine.letting_go, "a close before the worker let go: {close:?}");
            }
            assert!(!self.closes.iter().any(|other| other.engine_id == close.engine_id), "one close at a time");
            assert!(!self.late.iter().any(|(_, id)| *id == close.engine_id), "a close may overtake its open");
            self.closes.push(close);
        }
    }

    fn released(&mut self, key: SessionKey) {
        for ((_, id), engine) in &mut self.fleet.sessions {
            if id.contains(&key.to_string()) {
                engine.letting_go = false;
            }
        }
        let closes = self.table.released(key);
        self.send(closes);
    }

    fn confirm(&mut self, place: usize, result: CloseResult) {
        let close = self.closes.remove(place);
        if result == CloseResult::Closed {
            self.fleet.sessions.remove(&(close.worker, close.engine_id.to_string()));
        }
        self.table.close_result(&close.engine_id, result, self.now_ms);
        let refused_tag = close.mode == SessionMode::Tag && result == CloseResult::Refused;
        self.gave_up |= refused_tag || self.table.counts().abandoned > 0;
    }

    fn opened_late(&mut self, place: usize, result: OpenResult) {
        let (worker, id) = self.late.remove(place);
        if result != OpenResult::Refused {
            assert!(self.fleet.ever.insert(id.to_string()), "an engine id is used once");
            self.fleet.sessions.insert((worker, id.to_string()), Engine::default());
        }
        let closes = self.table.opened_late(&id, result);
        self.send(closes);
    }

    fn step(&mut self, step: Step) {
        let leases = self.leases.len();
        match step {
            Step::Begin { key, action, wish, worker, rank, route } => {
                use SessionAction::{Bind, Close, None as Nothing, Open, Release};
                let turn = BeginTurn {
                    key: SessionKey(u128::from(key) + 0x1000),
                    action: [Nothing, Bind, Open, Close, Release][usize::from(action)],
                    wish: [
                        None,
                        Some(ModeWish::Auto),
                        Some(ModeWish::Affinity),
                        Some(ModeWish::Tag),
                        Some(ModeWish::Stream),
                    ][usize::from(wish)],
                    ttl_ms: (action == 1).then_some(TTL_MS / 2),
                    worker: WorkerId(u32::from(worker)),
                    rank: [None, Some(0), Some(1)][usize::from(rank)],
                    // The last worker can do nothing, the middle one has no tags.
                    capabilities: Capabilities { tag: worker == 0, stream: worker < 2, priority: false, dp_size: 2 },
                    accepts: Accepts { session_params: route == 0, session_id: route < 2 },
                    cap: self.cap,
                    ticket: None,
                    now_ms: self.now_ms,
                };
                self.begin(&turn);
            }
            Step::Opened { lease, result } if leases > 0 => {
                let result = match result {
                    0 => OpenResult::Refused,
                    1 => OpenResult::Unknown,
                    _ => OpenResult::Opened,
                };
                self.opened(usize::from(lease) % leases, result);
            }
            Step::End { lease, end, tokens } if leases > 0 => {
                let usage = Usage { prompt_tokens: u64::from(tokens), completion_tokens: 10, cached_tokens: 5 };
                let end = match end {
                    0 => TurnEnd::Aborted,
                    1 => TurnEnd::NotServed,
                    2 => TurnEnd::EngineGone,
                    3 => TurnEnd::Finished(None),
                    4 => TurnEnd::StillBusy,
                    5 => TurnEnd::Unfinished,
                    _ => TurnEnd::Finished(Some(usage)),
                };
                self.end(usize::from(lease) % leases, end);
            }
            Step::Opened { .. } | Step::End { .. } => {}
            Step::Released { key } => self.released(SessionKey(u128::from(key) + 0x1000)),
            Step::Confirm { close, result } => {
                if !self.closes.is_empty() {
                    let result = match result {
                        0 => CloseResult::Refused,
                        1 => CloseResult::Failed,
                        2 => CloseResult::NoRoom,
                        _ => CloseResult::Closed,
                    };
                    self.confirm(usize::from(close) % self.closes.len(), result);
                }
            }
            Step::OpenedLate { open, result } => {
                if !self.late.is_empty() {
                    let result = match result {
                        0 => OpenResult::Refused,
                        1 => OpenResult::Unknown,
                        _ => OpenResult::Opened,
                    };
                    self.opened_late(usize::from(open) % self.late.len(), result);
                }
            }
            Step::Removed { worker } => {
                let loss = self.table.worker_removed(WorkerId(u32::from(worker)));
                // A close that fails there is not tried again.
                self.gave_up = true;
                self.send(loss.closes);
            }
            Step::Wait { ms } => {
                self.now_ms += u64::from(ms);
                let closes = self.table.expire(self.now_ms);
                self.send(closes);
            }
            Step::Lost { worker } => {
                let loss = self.table.worker_lost(WorkerId(u32::from(worker)));
                self.send(loss.closes);
            }
            Step::Drain { worker } => {
                let closes = self.table.drain(WorkerId(u32::from(worker)));
                self.send(closes);
            }
            Step::Restarted { worker } => {
                let worker = WorkerId(u32::from(worker));
                self.fleet.sessions.retain(|at, _| at.0 != worker);
                let loss = self.table.worker_restarted(worker);
                self.send(loss.closes);
            }
            Step::Unbind { key } => {
                let closes = self.table.unbind(SessionKey(u128::from(key) + 0x1000));
                self.send(closes);
            }
            Step::Close { key } => {
                let closes = self.table.close(SessionKey(u128::from(key) + 0x1000));
                self.send(closes);
            }
            Step::CloseAll => {
                let closes = self.table.close_all();
                self.send(closes);
                assert!(self.table.is_empty());
            }
        }
        self.check();
    }

    fn check(&self) {
        self.table.check_invariants();
        let counts = self.table.counts();
        assert_eq!(counts.in_flight, self.leases.len() as u64, "a lease for each turn in flight");
        assert!(self.table.len() <= 4, "the table is bounded");
        assert_eq!(counts.closing, self.closes.len(), "each close sent is awaited");
        for worker in (0..3).map(WorkerId) {
            for rank in [None, Some(0), Some(1)] {
                assert!(self.table.held_on_rank(worker, rank).rows <= self.cap.rows, "rows are capped on each rank");
            }
        }
        if !self.gave_up {
            let known: BTreeSet<String> =
                self.table.open_engines().iter().map(|engine| engine.engine_id.to_string()).collect();
            for (_, id) in self.fleet.sessions.keys() {
                assert!(known.contains(id), "a worker holds {id}, and the table forgot it");
            }
        }
    }

    /// The gateway ends in order: turns end, workers let go, all is closed.
    fn shut_down(&mut self) {
        let closes = self.table.close_all();
        self.send(closes);
        while !self.leases.is_empty() {
            self.end(0, TurnEnd::Aborted);
        }
        for key in 0..6_u8 {
            self.released(SessionKey(u128::from(key) + 0x1000));
        }
        while !self.late.is_empty() {
            self.opened_late(0, OpenResult::Opened);
        }
        // What was given up ends by the engine's own timeout; what failed, and what is closed twice to be sure, comes again.
        for _ in 0..4 {
            while !self.closes.is_empty() {
                self.confirm(0, CloseResult::Closed);
            }
            self.now_ms += 700_000;
            let closes = self.table.expire(self.now_ms);
            self.send(closes);
        }
        self.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_schedule_harms_a_worker_and_everything_returns_to_zero(steps in steps()) {
        let mut world = World::new();
        for step in steps {
            world.step(step);
        }
        world.shut_down();
        prop_assert_eq!(world.table.counts(), Counts::default());
        prop_assert!(world.table.open_engines().is_empty());
        for worker in (0..3).map(WorkerId) {
            prop_assert_eq!(world.table.held(worker), Held::default());
        }
        prop_assert!(world.gave_up || world.fleet.sessions.is_empty(), "opened and not closed: {:?}", world.fleet.sessions);
    }
}
