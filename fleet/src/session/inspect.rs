//! Looking at the session table: facts, admin listing, sums, invariants.

use super::engine::{EngineState, Place};
use super::table::Session;
use super::{Busy, Held, SessionMode, Sessions, WaitTicket};
use crate::ids::{SessionKey, WorkerId};

/// A session, as facts and the admin listing show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionView {
    /// Its key.
    pub key: SessionKey,
    /// Number of this session; a later session under the same key has a higher one.
    pub generation: u64,
    /// Its mode.
    pub mode: SessionMode,
    /// The worker it is bound to; none after the worker was lost.
    pub worker: Option<WorkerId>,
    /// The rank it is bound to.
    pub rank: Option<u32>,
    /// Its worker holds an engine session for it.
    pub engine_open: bool,
    /// The worker has not let go of its aborted turn.
    pub awaiting_release: bool,
    /// Since its first turn began, ms.
    pub age_ms: u64,
    /// Since its last turn ended, ms; 0 while one runs.
    pub idle_ms: u64,
    /// Idle timeout, ms.
    pub ttl_ms: u64,
    /// Turns that ended.
    pub turns: u32,
    /// Turns in flight.
    pub in_flight: u32,
    /// Tokens of its context that its worker holds for it: prompt and output of its last turn; 0 with affinity.
    pub held_tokens: u64,
    /// Cached tokens of its last turn.
    pub last_cached_tokens: u64,
}

/// Sums over the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Affinity sessions.
    pub affinity: usize,
    /// Tag sessions.
    pub tag: usize,
    /// Streaming sessions.
    pub stream: usize,
    /// Leases out.
    pub in_flight: u64,
    /// Engine sessions not yet closed, of either kind.
    pub engine_sessions: usize,
    /// Of those, closes that wait for a turn or a release.
    pub leaving: usize,
    /// Of those, closes sent and not confirmed.
    pub closing: usize,
    /// Of those, closes that failed and are sent again.
    pub retrying: usize,
    /// Of those, closes given up; they count until the worker's own timeout.
    pub abandoned: usize,
    /// Turns that wait for a busy session.
    pub waiting: usize,
}

impl Sessions {
    /// Sessions in the table.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The session under a key, unless it is overdue.
    pub fn view(&self, key: SessionKey, now_ms: u64) -> Option<SessionView> {
        let session = self.session(key)?;
        (session.in_flight > 0 || session.deadline_ms() > now_ms).then(|| self.view_of(key, session, now_ms))
    }

    /// The worker that a turn of deltas is pinned to, and what it would have to wait for there.
    pub fn pin(
        &self,
        key: SessionKey,
        ticket: Option<WaitTicket>,
        now_ms: u64,
    ) -> Option<(Option<WorkerId>, Option<Busy>)> {
        let session = self.session(key).filter(|session| session.mode == SessionMode::Stream)?;
        if session.in_flight == 0 && session.deadline_ms() <= now_ms {
            return None;
        }
        let engine = session.engine.and_then(|number| self.engines.get(number));
        let busy = engine.and_then(|engine| match engine.awaiting_release {
            _ if engine.in_flight > 0 => Some(Busy::Turn),
            true => Some(Busy::Abort),
            false => self.waiting.is_behind(key, ticket).then_some(Busy::Turn),
        });
        Some((session.bound.map(|spot| spot.0), busy))
    }

    /// All sessions, by key.
    pub fn iter(&self, now_ms: u64) -> impl Iterator<Item = SessionView> {
        self.slots
            .iter()
            .filter_map(move |(&key, slot)| slot.session.as_ref().map(|session| self.view_of(key, session, now_ms)))
    }

    /// What streaming sessions hold on one rank.
    pub fn held_on_rank(&self, worker: WorkerId, rank: Option<u32>) -> Held {
        self.engines.place((worker, rank)).map(Place::held).unwrap_or_default()
    }

    /// What streaming sessions hold on all ranks of a worker.
    pub fn held(&self, worker: WorkerId) -> Held {
        self.engines.places_of(worker).fold(Held::default(), |sum, (_, place)| {
            let held = place.held();
            Held {
                rows: sum.rows + held.rows,
                idle_rows: sum.idle_rows + held.idle_rows,
                tokens: sum.tokens.saturating_add(held.tokens),
                sessions: sum.sessions + held.sessions,
            }
        })
    }

    /// Places where streaming sessions hold more tokens than their cap although one of them is idle and could go: none, as long
    /// as the caps stay as they are.
    pub fn over_cap(&self) -> impl Iterator<Item = (WorkerId, Option<u32>)> {
        let over = self.engines.places().filter(|(_, p)| p.live_tokens > p.cap_tokens && !p.idle.is_empty());
        over.map(|(spot, _)| spot)
    }

    /// Sums, by walking the table.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts {
            in_flight: self.leases,
            engine_sessions: self.engines.len(),
            waiting: self.waiting(),
            ..Counts::default()
        };
        for session in self.slots.values().filter_map(|slot| slot.session.as_ref()) {
            match session.mode {
                SessionMode::Affinity => counts.affinity += 1,
                SessionMode::Tag => counts.tag += 1,
                SessionMode::Stream => counts.stream += 1,
            }
        }
        for (_, engine) in self.engines.iter() {
            match engine.state {
                EngineState::Live => {}
                EngineState::Leaving => counts.leaving += 1,
                EngineState::Closing => counts.closing += 1,
                EngineState::Retrying { .. } => counts.retrying += 1,
                EngineState::Abandoned { .. } => counts.abandoned += 1,
            }
        }
        counts
    }

    fn view_of(&self, key: SessionKey, session: &Session, now_ms: u64) -> SessionView {
        let engine = session.engine.and_then(|number| self.engines.get(number));
        SessionView {
            key,
            generation: session.generation,
            mode: session.mode,
            worker: session.bound.map(|spot| spot.0),
            rank: session.bound.and_then(|spot| spot.1),
            engine_open: engine.is_some_and(|engine| !engine.opening),
            awaiting_release: engine.is_some_and(|engine| engine.awaiting_release),
            age_ms: now_ms.saturating_sub(session.created_ms),
            idle_ms: if session.in_flight > 0 { 0 } else { now_ms.saturating_sub(session.last_end_ms) },
            ttl_ms: session.ttl_ms,
            turns: session.turns,
            in_flight: session.in_flight,
            held_tokens: match engine {
                Some(engine) if engine.mode == SessionMode::Stream => engine.held_tokens,
                Some(_) => session.last_tokens,
                None => 0,
            },
            last_cached_tokens: session.last_cached_tokens,
        }
    }

    /// Checked at every entry of a debug build: the whole table while it is small, then only the key at hand.
    pub(super) fn debug_check(&self, key: SessionKey) {
        const SMALL: usize = 64;
        if cfg!(debug_assertions) {
            if self.slots.len() + self.engines.len() <= SMALL {
                self.check_invariants();
            } else {
                self.check_key(key);
            }
        }
    }

    /// Asserts what must always hold, by walking the table.
    ///
    /// # Panics
    /// In debug builds, when something does not hold: a defect of this module.
    pub fn check_invariants(&self) {
        for &key in self.slots.keys() {
            self.check_key(key);
        }
        let sessions = self.slots.values().filter_map(|slot| slot.session.as_ref());
        debug_assert_eq!(self.len, sessions.clone().count(), "number of sessions");
        debug_assert_eq!(
            self.deadlines.len(),
            sessions.clone().filter(|session| session.in_flight == 0).count(),
            "every session without a turn has a deadline, and no other"
        );
        let mut places = std::collections::BTreeMap::<_, Place>::new();
        for session in sessions {
            if let Some(spot) = session.bound {
                places.entry(spot).or_default().sessions += 1;
            }
        }
        for (number, engine) in self.engines.iter() {
            places.entry(engine.spot).or_default().add(number, engine);
            debug_assert!(
                self.slots.get(&engine.key).is_some_and(|slot| {
                    slot.leaving.contains(&number)
                        || slot.session.as_ref().is_some_and(|session| session.engine == Some(number))
                }),
                "an engine session belongs to its key"
            );
        }
        for (spot, place) in self.engines.places() {
            let mut expected = places.remove(&spot).unwrap_or_default();
            expected.cap_tokens = place.cap_tokens;
            debug_assert_eq!(*place, expected, "sums of {spot:?}");
        }
        debug_assert!(
            places.values().all(|place| *place == Place::default()),
            "every place that holds something is counted"
        );
    }

    fn check_key(&self, key: SessionKey) {
        let Some(slot) = self.slots.get(&key) else { return };
        debug_assert!(slot.session.is_some() || !slot.leaving.is_empty(), "an empty slot is dropped");
        if let Some(session) = &slot.session {
            if let Some(number) = session.engine {
                debug_assert!(!slot.leaving.contains(&number), "an engine session stays or leaves");
                let engine = self.engines.get(number);
                debug_assert!(
                    engine.is_some_and(|e| e.state == EngineState::Live),
                    "a session's engine session is live"
                );
                debug_assert!(
                    engine.is_some_and(|e| Some(e.spot) == session.bound),
                    "it lives where the session is bound"
                );
                debug_assert!(engine.is_some_and(|e| e.mode == session.mode), "it is of the session's mode");
            }
            debug_assert_eq!(
                self.deadlines.contains(&(session.deadline_ms(), key)),
                session.in_flight == 0,
                "a deadline while no turn runs"
            );
        }
        let current = slot.session.as_ref().and_then(|session| session.engine);
        for number in slot.leaving.iter().copied().chain(current) {
            let Some(engine) = self.engines.get(number) else {
                debug_assert!(false, "a slot names an engine session that is gone");
                return;
            };
            debug_assert!(
                engine.mode != SessionMode::Stream || engine.in_flight <= 1,
                "one turn at a time in a streaming session"
            );
            debug_assert!(
                matches!(engine.state, EngineState::Live | EngineState::Leaving)
                    || (engine.in_flight == 0 && !engine.awaiting_release && !engine.opening),
                "no close during a turn"
            );
            debug_assert!(
                engine.state != EngineState::Leaving
                    || engine.in_flight > 0
                    || engine.awaiting_release
                    || engine.opening,
                "a close that can go out has gone out"
            );
        }
    }
}
