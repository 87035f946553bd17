//! What outlives a process: sessions for the snapshot, engine sessions for the journal, and both taken over by the next one.
//!
//! A restored session is idle and bound where it was. A tag goes on with its engine session, for any number of turns may meet in
//! it. A streaming session does not: nobody knows whether its last turn ended before the process did, so its engine session is an
//! *orphan*, closed in the background, and the session is *lost*, to be opened anew by its next turn.

use std::ops::Bound;
use std::sync::Arc;

use super::engine::{Engine, EngineState, number_in};
use super::table::{Context, Session, remember_idle};
use super::{CloseCause, ModeWish, SessionMode, Sessions};
use crate::ids::{SessionKey, WorkerId};

/// A session as it is kept over a restart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedSession {
    /// Its key.
    pub key: SessionKey,
    /// Its mode.
    pub mode: SessionMode,
    /// The mode wished for, if it was opened and not only bound.
    pub wish: Option<ModeWish>,
    /// The worker it is bound to.
    pub worker: Option<WorkerId>,
    /// The rank it is bound to.
    pub rank: Option<u32>,
    /// The engine's id of its tag, if it has one.
    pub tag: Option<Arc<str>>,
    /// Turns were begun whose context the next one counts on, if it is a streaming session.
    pub has_context: bool,
    /// Idle timeout, ms.
    pub ttl_ms: u64,
    /// Since its first turn began, ms.
    pub age_ms: u64,
    /// Since its last turn ended, ms; 0 if one was running.
    pub idle_ms: u64,
    /// Turns that ended.
    pub turns: u32,
    /// Prompt and output tokens of its last turn.
    pub last_tokens: u64,
    /// Cached tokens of its last turn.
    pub last_cached_tokens: u64,
}

/// An engine session that some worker may hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldEngine {
    /// The engine's id.
    pub engine_id: Arc<str>,
    /// What it is.
    pub mode: SessionMode,
    /// Where it is.
    pub worker: WorkerId,
    /// On which rank.
    pub rank: Option<u32>,
    /// The longest that the engine keeps it without a turn, ms.
    pub timeout_ms: u64,
}

/// Engine sessions on a worker that was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Left {
    /// None.
    Nothing,
    /// Some that are closed, or given up, when their last turn has ended.
    Closes,
    /// Some of which the removal knows nothing yet.
    More,
}

/// What happened to the engine sessions since the last look.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineChange {
    /// It will be opened.
    Opened(HeldEngine),
    /// It is no more: closed, refused, timed out, or died with its worker.
    Gone(Arc<str>),
}

/// What became of a saved session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Restored {
    /// It lives.
    Live,
    /// Its idle timeout passed in the meantime.
    Expired,
    /// There is one under its key already, or no room.
    Refused,
}

impl Sessions {
    /// Sessions in the order of their keys: at most `limit`, after the key given. Page by page, so that nobody waits long
    /// for the table.
    pub fn saved(&self, after: Option<SessionKey>, limit: usize, now_ms: u64) -> Vec<SavedSession> {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        let slots = self.slots.range((start, Bound::Unbounded));
        let sessions = slots.filter_map(|(&key, slot)| slot.session.as_ref().map(|session| (key, session)));
        sessions.take(limit).map(|(key, session)| self.save(key, session, now_ms)).collect()
    }

    fn save(&self, key: SessionKey, session: &Session, now_ms: u64) -> SavedSession {
        let engine = session.engine.and_then(|number| self.engines.get(number));
        SavedSession {
            key,
            mode: session.mode,
            wish: session.wish,
            worker: session.bound.map(|spot| spot.0),
            rank: session.bound.and_then(|spot| spot.1),
            tag: engine.filter(|engine| engine.mode == SessionMode::Tag).map(|engine| Arc::clone(&engine.id)),
            has_context: session.context != Context::Empty || session.in_flight > 0,
            ttl_ms: session.ttl_ms,
            age_ms: now_ms.saturating_sub(session.created_ms),
            idle_ms: if session.in_flight > 0 { 0 } else { now_ms.saturating_sub(session.last_end_ms) },
            turns: session.turns,
            last_tokens: session.last_tokens,
            last_cached_tokens: session.last_cached_tokens,
        }
    }

    /// Takes over a session of an earlier process. `away_ms`: how long ago it was saved; that time counts as idle. A tag is
    /// only gone on with if it is named, and the session is bound.
    pub fn restore(&mut self, saved: &SavedSession, away_ms: u64, now_ms: u64) -> Restored {
        let idle_ms = saved.idle_ms.saturating_add(away_ms);
        if idle_ms >= saved.ttl_ms {
            return Restored::Expired;
        }
        if self.session(saved.key).is_some() || self.len >= self.options.max_sessions {
            return Restored::Refused;
        }
        let bound = saved.worker.map(|worker| (worker, saved.rank));
        let generation = self.engines.number();
        let mut session = Session {
            generation,
            mode: saved.mode,
            wish: saved.wish,
            bound,
            engine: None,
            context: if saved.has_context { Context::Lost } else { Context::Empty },
            gap: false,
            ttl_ms: saved.ttl_ms,
            created_ms: now_ms.saturating_sub(saved.age_ms.saturating_add(away_ms)),
            last_end_ms: now_ms.saturating_sub(idle_ms),
            in_flight: 0,
            turns: saved.turns,
            last_tokens: saved.last_tokens,
            last_cached_tokens: saved.last_cached_tokens,
        };
        if let (SessionMode::Tag, Some(id), Some(spot)) = (saved.mode, &saved.tag, bound) {
            let timeout_ms = self.options.engine_timeout_ms(saved.ttl_ms);
            let held = HeldEngine {
                engine_id: Arc::clone(id),
                mode: SessionMode::Tag,
                worker: spot.0,
                rank: spot.1,
                timeout_ms,
            };
            session.engine = self.take_over(saved.key, &held, EngineState::Live, session.last_end_ms);
        }
        if let Some(spot) = bound {
            self.engines.bind(spot);
        }
        remember_idle(&mut self.deadlines, &mut self.idle, saved.key, &session);
        self.slots.entry(saved.key).or_default().session = Some(session);
        self.len += 1;
        self.debug_check(saved.key);
        Restored::Live
    }

    /// Takes over an engine session that nobody uses any more, to be closed: it counts where it is, and is in nobody's way.
    /// [`released_engine`](Self::released_engine) gives its close. False if the id is none of ours, or known already.
    pub fn adopt_orphan(&mut self, held: &HeldEngine, now_ms: u64) -> bool {
        let Some(key) = key_in(&held.engine_id) else { return false };
        let Some(number) = self.take_over(key, held, EngineState::Leaving, now_ms) else { return false };
        self.slots.entry(key).or_default().leaving.push(number);
        self.debug_check(key);
        true
    }

    fn take_over(&mut self, key: SessionKey, held: &HeldEngine, state: EngineState, used_ms: u64) -> Option<u64> {
        let number = number_in(&held.engine_id)?;
        let orphan = state == EngineState::Leaving;
        let engine = Engine {
            id: Arc::clone(&held.engine_id),
            key,
            spot: (held.worker, held.rank),
            mode: held.mode,
            state,
            opening: false,
            in_flight: 0,
            awaiting_release: orphan,
            refused: false,
            last_try: false,
            again: false,
            unsure: false,
            tries: 0,
            give_up_ms: 0,
            lost: orphan,
            cause: CloseCause::Orphaned,
            held_tokens: 0,
            timeout_ms: held.timeout_ms,
            last_used_ms: used_ms,
        };
        self.engines.take_over(number, engine).then_some(number)
    }

    /// Every engine session that some worker may hold, those included whose close failed.
    pub fn held_engines(&self) -> Vec<HeldEngine> {
        self.engines.iter().map(|(_, engine)| engine.to_held()).collect()
    }

    /// Engine sessions on a worker, of either kind, that are not known to be closed.
    pub fn engines_on(&self, worker: WorkerId) -> usize {
        self.engines.iter().filter(|(_, engine)| engine.spot.0 == worker).count()
    }

    /// What is left on a worker that was removed.
    pub fn left_on(&self, worker: WorkerId) -> Left {
        let on_it = self.engines.iter().filter(|(_, engine)| engine.spot.0 == worker);
        on_it.fold(Left::Nothing, |left, (_, engine)| left.max(if engine.last_try { Left::Closes } else { Left::More }))
    }

    /// Whether an engine session is known.
    pub fn knows_engine(&self, engine_id: &str) -> bool {
        self.engines.find(engine_id).is_some()
    }

    /// From now on [`take_changes`](Self::take_changes) has something to give.
    pub fn record_changes(&mut self) {
        self.engines.record_changes();
    }

    /// What happened to engine sessions since the last call.
    pub fn take_changes(&mut self) -> Vec<EngineChange> {
        self.engines.take_changes()
    }
}

/// The session key in an engine id of ours.
fn key_in(engine_id: &str) -> Option<SessionKey> {
    let hex = engine_id.strip_prefix("ts-")?.get(..32)?;
    u128::from_str_radix(hex, 16).ok().map(SessionKey)
}
