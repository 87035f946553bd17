//! How a turn is to be served: in which engine session, where, or why not now.

use super::engine::{Engine, EngineState, Spot};
use super::{BeginTurn, Busy, Degraded, EngineClose, SessionAction, SessionMode, Sessions};
use crate::ids::WorkerId;

/// How a turn is served.
pub(super) struct Plan {
    /// Mode that the session has from now on.
    pub mode: SessionMode,
    pub spot: Spot,
    pub engine: PlanEngine,
    pub degraded: Option<Degraded>,
}

pub(super) enum PlanEngine {
    /// In its engine session.
    Enter(u64),
    /// In a new one.
    Create,
    /// In none.
    Without,
}

enum Room {
    Enough,
    Soon,
    Never(Degraded),
}

// === impl Sessions ===

impl Sessions {
    /// A session that starts, or is opened after it was only bound.
    pub(super) fn plan_open(
        &mut self,
        turn: &BeginTurn,
        bound: Option<Spot>,
        closes: &mut Vec<EngineClose>,
    ) -> Result<Plan, Busy> {
        let (mode, degraded) = match turn.action {
            SessionAction::Open => {
                let wish = turn.wish.or_else(|| self.session(turn.key)?.wish).unwrap_or_default();
                wish.resolve(turn.capabilities, turn.accepts)
            }
            _ => (SessionMode::Affinity, None),
        };
        match mode {
            SessionMode::Affinity => Ok(self.plan_affinity(turn, bound, degraded)),
            SessionMode::Tag => Ok(self.plan_tag(turn, bound, None)),
            SessionMode::Stream => {
                let spot = self.spot(turn, bound);
                match self.room(turn, spot, closes)? {
                    None => Ok(Plan { mode: SessionMode::Stream, spot, engine: PlanEngine::Create, degraded: None }),
                    Some(why) => Ok(self.plan_affinity(turn, bound, Some(why))),
                }
            }
        }
    }

    pub(super) fn plan_affinity(&self, turn: &BeginTurn, bound: Option<Spot>, degraded: Option<Degraded>) -> Plan {
        let spot = self.spot(turn, bound);
        Plan { mode: SessionMode::Affinity, spot, engine: PlanEngine::Without, degraded }
    }

    pub(super) fn plan_tag(&self, turn: &BeginTurn, bound: Option<Spot>, engine: Option<(u64, &Engine)>) -> Plan {
        let spot = self.spot(turn, bound);
        let (engine, degraded) = match engine {
            _ if !turn.accepts.session_id => (PlanEngine::Without, Some(Degraded::Route)),
            Some((number, engine)) if engine.spot == spot => (PlanEngine::Enter(number), None),
            // A tag made for the last turn only would be closed at once.
            _ if turn.action == SessionAction::Close => (PlanEngine::Without, None),
            _ if can_tag(turn) => (PlanEngine::Create, None),
            _ => (PlanEngine::Without, Some(Degraded::Worker)),
        };
        Plan { mode: SessionMode::Tag, spot, engine, degraded }
    }

    /// A streaming session with its engine session open: pinned, and one turn at a time.
    pub(super) fn plan_in_stream(&self, turn: &BeginTurn, number: u64, engine: &Engine) -> Result<Plan, Busy> {
        let plan = |what, degraded| Plan { mode: SessionMode::Stream, spot: engine.spot, engine: what, degraded };
        if !turn.accepts.session_params {
            return Ok(plan(PlanEngine::Without, Some(Degraded::Route)));
        }
        if engine.in_flight > 0 || self.waiting.is_behind(turn.key, turn.ticket) {
            return Err(Busy::Turn);
        }
        if engine.awaiting_release {
            return Err(Busy::Abort);
        }
        Ok(plan(PlanEngine::Enter(number), None))
    }

    /// A streaming session whose engine session is gone.
    pub(super) fn plan_lost(
        &mut self,
        turn: &BeginTurn,
        bound: Option<Spot>,
        closes: &mut Vec<EngineClose>,
    ) -> Result<Plan, Busy> {
        let spot = self.spot(turn, bound);
        let without = |degraded| Plan { mode: SessionMode::Stream, spot, engine: PlanEngine::Without, degraded };
        if turn.action == SessionAction::Close {
            return Ok(without(None));
        }
        if !turn.accepts.session_params {
            return Ok(without(Some(Degraded::Route)));
        }
        if !turn.capabilities.stream {
            return Ok(without(Some(Degraded::Worker)));
        }
        match self.room(turn, spot, closes)? {
            None => Ok(Plan { mode: SessionMode::Stream, spot, engine: PlanEngine::Create, degraded: None }),
            Some(why) => Ok(without(Some(why))),
        }
    }

    /// Where the turn goes: the rank stays while the worker does.
    fn spot(&self, turn: &BeginTurn, bound: Option<Spot>) -> Spot {
        match bound {
            Some(spot) if spot.0 == turn.worker && (turn.rank.is_none() || turn.rank == spot.1) => spot,
            _ => (turn.worker, turn.rank.or_else(|| self.least_held_rank(turn.worker, turn.capabilities.dp_size))),
        }
    }

    /// Whether one more streaming session may be opened in a place; `Some`: no, and why. Closes what has been idle long
    /// enough to make room.
    fn room(&mut self, turn: &BeginTurn, spot: Spot, closes: &mut Vec<EngineClose>) -> Result<Option<Degraded>, Busy> {
        let in_the_way = |number: &u64| {
            self.engines.get(*number).is_some_and(|engine| {
                engine.mode == SessionMode::Stream
                    && !engine.lost
                    && matches!(engine.state, EngineState::Leaving | EngineState::Closing)
            })
        };
        if self.waiting.is_behind(turn.key, turn.ticket) {
            return Err(Busy::Turn);
        }
        if self.slots.get(&turn.key).is_some_and(|slot| slot.leaving.iter().any(in_the_way)) {
            return Err(Busy::Close);
        }
        if turn.cap.rows == 0 {
            return Ok(Some(Degraded::Rows));
        }
        if turn.cap.tokens == 0 {
            return Ok(Some(Degraded::Tokens));
        }
        let since_ms = turn.now_ms.checked_sub(self.options.evict_after_idle_ms);
        loop {
            match self.room_in(turn, spot) {
                Room::Enough => return Ok(None),
                Room::Soon => return Err(Busy::Room),
                Room::Never(why) => match since_ms.and_then(|since_ms| self.engines.longest_idle(spot, since_ms)) {
                    Some(number) => self.evict(number, closes),
                    None => return Ok(Some(why)),
                },
            }
        }
    }

    fn room_in(&self, turn: &BeginTurn, spot: Spot) -> Room {
        let Some(place) = self.engines.place(spot) else { return Room::Enough };
        let rows_after = place.rows.saturating_sub(place.closing_rows);
        let tokens_after = place.tokens.saturating_sub(place.closing_tokens);
        if rows_after >= turn.cap.rows {
            Room::Never(Degraded::Rows)
        } else if tokens_after >= turn.cap.tokens {
            Room::Never(Degraded::Tokens)
        } else if place.rows >= turn.cap.rows || place.tokens >= turn.cap.tokens {
            Room::Soon
        } else {
            Room::Enough
        }
    }

    /// The rank of a worker that holds least: rows, then sessions, then the lowest number. None without ranks to choose from.
    pub fn least_held_rank(&self, worker: WorkerId, dp_size: u32) -> Option<u32> {
        if dp_size < 2 {
            return None;
        }
        (0..dp_size).min_by_key(|&rank| {
            self.engines.place((worker, Some(rank))).map_or((0, 0), |place| (place.rows, place.sessions))
        })
    }
}

pub(super) fn can_tag(turn: &BeginTurn) -> bool {
    turn.capabilities.tag && turn.accepts.session_id
}
