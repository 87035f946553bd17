//! The session table: beginnings and ends of turns.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::CloseResult;
use super::engine::{EngineState, Engines, Spot};
use super::plan::{Plan, PlanEngine, can_tag};
use super::waiting::WaitList;
use super::{
    Begin, BeginTurn, CloseCause, Degraded, EngineClose, Lease, ModeWish, NoSession, OpenResult, Outcome,
    SessionAction, SessionMode, SessionOptions, TurnEnd,
};
use crate::ids::SessionKey;

/// All sessions of a gateway. See the module above for the states and rules.
#[derive(Debug)]
pub struct Sessions {
    pub(super) options: SessionOptions,
    pub(super) slots: BTreeMap<SessionKey, Slot>,
    pub(super) engines: Engines,
    /// Sessions, without slots that only wait for a close.
    pub(super) len: usize,
    /// Leases out.
    pub(super) leases: u64,
    /// (deadline, key) of every session without a turn in flight.
    pub(super) deadlines: BTreeSet<(u64, SessionKey)>,
    /// (end of last turn, key) of the idle sessions that may be evicted: affinity, tag.
    pub(super) idle: [BTreeSet<(u64, SessionKey)>; 2],
    /// Turns that wait for a busy session.
    pub(super) waiting: WaitList,
}

/// What a client of a streaming session counts on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Context {
    /// Nothing yet: no turn was finished.
    Empty,
    /// An engine session has it.
    Kept,
    /// It went with an engine session, and no turn was finished since.
    Lost,
}

/// What is known under a key.
#[derive(Debug, Default)]
pub(super) struct Slot {
    pub session: Option<Session>,
    /// Engine sessions to be closed, of this session or earlier ones.
    pub leaving: Vec<u64>,
}

#[derive(Debug)]
pub(super) struct Session {
    pub generation: u64,
    pub mode: SessionMode,
    /// Set when it was opened, not only bound.
    pub wish: Option<ModeWish>,
    pub bound: Option<Spot>,
    pub engine: Option<u64>,
    /// What the next turn counts on.
    pub context: Context,
    /// The last turn in the engine session was cut, so that its input may be missing.
    pub gap: bool,
    pub ttl_ms: u64,
    pub created_ms: u64,
    pub last_end_ms: u64,
    pub in_flight: u32,
    pub turns: u32,
    pub last_tokens: u64,
    pub last_cached_tokens: u64,
}

// === impl Sessions ===

impl Sessions {
    /// An empty table. `nonce`: random, new for each process, so that engine ids can be neither guessed nor repeated.
    pub fn new(options: SessionOptions, nonce: u64) -> Self {
        Self {
            options,
            slots: BTreeMap::new(),
            engines: Engines::new(nonce),
            len: 0,
            leases: 0,
            deadlines: BTreeSet::new(),
            idle: [BTreeSet::new(), BTreeSet::new()],
            waiting: WaitList::default(),
        }
    }

    /// New options, from the next turn on.
    pub fn set_options(&mut self, options: SessionOptions) {
        self.options = options;
    }

    /// A turn is about to be sent.
    pub fn begin(&mut self, turn: &BeginTurn) -> Begin {
        let mut closes = Vec::new();
        self.expire_if_due(turn.key, turn.now_ms, &mut closes);
        let known = self.session(turn.key).is_some();
        let outcome = match turn.action {
            SessionAction::Release if known => {
                self.end_session(turn.key, CloseCause::Asked, &mut closes);
                Outcome::Ordinary(NoSession::Released)
            }
            _ if known => self.resume(turn, &mut closes),
            SessionAction::Bind | SessionAction::Open => self.create(turn, &mut closes),
            SessionAction::None | SessionAction::Close | SessionAction::Release => {
                Outcome::Ordinary(NoSession::Unknown)
            }
        };
        self.debug_check(turn.key);
        Begin { outcome, closes }
    }

    /// How the open that a lease asked for went. A lease that failed goes on with affinity.
    pub fn opened(&mut self, lease: &mut Lease, result: OpenResult, now_ms: u64) -> Vec<EngineClose> {
        let mut closes = Vec::new();
        if lease.open_timeout_ms.take().is_none() {
            return closes;
        }
        let Some(number) = lease.engine else { return closes };
        if result == OpenResult::Opened {
            self.engines.update(number, |engine| engine.opening = false);
        } else {
            self.open_failed(lease.key, number, Some(result), now_ms, &mut closes);
            lease.engine = None;
            lease.engine_id = None;
            lease.mode = SessionMode::Affinity;
            lease.degraded = Some(Degraded::OpenFailed);
        }
        self.debug_check(lease.key);
        closes
    }

    /// How an open went whose lease was ended before: the engine session is closed, if there is one.
    #[must_use = "closes have to be sent"]
    pub fn opened_late(&mut self, engine_id: &str, result: OpenResult) -> Vec<EngineClose> {
        let Some(number) = self.engines.find(engine_id).filter(|&n| self.engines.get(n).is_some_and(|e| e.opening))
        else {
            return Vec::new();
        };
        let Some(key) = self.engines.get(number).map(|engine| engine.key) else { return Vec::new() };
        if result == OpenResult::Refused {
            self.forget_engine(number);
            return Vec::new();
        }
        self.engines.update(number, |engine| engine.opening = false);
        let closes = self.engines.close_if_free(number).into_iter().collect();
        self.debug_check(key);
        closes
    }

    /// A turn is over. A streaming turn that was [aborted](TurnEnd::Aborted) or met [another](TurnEnd::StillBusy) has to be
    /// followed by [`released_engine`](Self::released_engine) once the worker has let go; until then neither a turn nor a
    /// close gets through.
    #[must_use = "closes have to be sent"]
    pub fn end(&mut self, lease: Lease, end: TurnEnd, now_ms: u64) -> Vec<EngineClose> {
        let mut closes = Vec::new();
        let key = lease.key;
        self.leases = self.leases.saturating_sub(1);
        if let Some(number) = lease.engine {
            if lease.open_timeout_ms.is_some() {
                // Its close would overtake the open, which is still under way.
                self.open_failed(key, number, None, now_ms, &mut closes);
            } else {
                self.end_in_engine(&lease, number, end, now_ms, &mut closes);
            }
        }
        self.end_in_session(&lease, end, now_ms);
        if let Some(number) = lease.engine {
            self.shed_tokens(number, &mut closes);
        }
        self.debug_check(key);
        closes
    }

    /// The worker let go of the aborted turn of a streaming session.
    #[must_use = "closes have to be sent"]
    pub fn released(&mut self, key: SessionKey) -> Vec<EngineClose> {
        let mut closes = Vec::new();
        let Some(slot) = self.slots.get(&key) else { return closes };
        let numbers = slot.session.as_ref().and_then(|session| session.engine).into_iter().chain(slot.leaving.clone());
        for number in numbers {
            self.engines.update(number, |engine| engine.awaiting_release = false);
            closes.extend(self.engines.close_if_free(number));
        }
        self.debug_check(key);
        closes
    }

    /// The worker let go of the aborted turn of this engine session, whatever else its session has begun since.
    #[must_use = "closes have to be sent"]
    pub fn released_engine(&mut self, engine_id: &str) -> Vec<EngineClose> {
        let Some(number) = self.engines.find(engine_id) else { return Vec::new() };
        self.engines.update(number, |engine| engine.awaiting_release = false);
        let closes = self.engines.close_if_free(number).into_iter().collect();
        if let Some(key) = self.engines.get(number).map(|engine| engine.key) {
            self.debug_check(key);
        }
        closes
    }

    /// A request beside the turns that carried this tag is over; `cut`: not by its answer, so that the worker may still read
    /// it. True when the tag was closed meanwhile and has to be closed again, which is up to the caller: it is known no more.
    #[must_use = "the tag may be open again"]
    pub fn carried(&mut self, engine_id: &str, cut: bool) -> bool {
        let Some(number) = self.engines.find(engine_id) else { return true };
        if cut || self.engines.get(number).is_some_and(|engine| engine.state != EngineState::Live) {
            self.engines.unsure(number);
        }
        false
    }

    /// How a close went. One that failed comes out of [`expire`](Self::expire) again, until the engine's own timeout has
    /// passed.
    pub fn close_result(&mut self, engine_id: &str, result: CloseResult, now_ms: u64) {
        let Some(number) = self.engines.find(engine_id) else { return };
        if self.engines.get(number).is_none_or(|engine| engine.state != EngineState::Closing) {
            return;
        }
        let kept = match result {
            CloseResult::Closed => self.engines.close_again(number, now_ms),
            CloseResult::Failed => self.engines.close_failed(number, true, now_ms),
            CloseResult::NoRoom => self.engines.close_later(number, now_ms),
            CloseResult::Refused => self.engines.close_failed(number, false, now_ms),
        };
        if !kept {
            self.forget_engine(number);
        }
    }

    // === a turn begins ===

    fn create(&mut self, turn: &BeginTurn, closes: &mut Vec<EngineClose>) -> Outcome {
        let plan = match self.plan_open(turn, None, closes) {
            Ok(plan) => plan,
            Err(busy) => return Outcome::Busy(busy),
        };
        if !self.make_slot(closes) {
            return Outcome::Ordinary(NoSession::TableFull);
        }
        let session = Session {
            generation: self.engines.number(),
            mode: plan.mode,
            wish: None,
            bound: None,
            engine: None,
            context: Context::Empty,
            gap: false,
            ttl_ms: self.options.default_ttl_ms,
            created_ms: turn.now_ms,
            last_end_ms: turn.now_ms,
            in_flight: 0,
            turns: 0,
            last_tokens: 0,
            last_cached_tokens: 0,
        };
        self.slots.entry(turn.key).or_default().session = Some(session);
        self.len += 1;
        self.enter(turn, plan, closes)
    }

    fn resume(&mut self, turn: &BeginTurn, closes: &mut Vec<EngineClose>) -> Outcome {
        let Some(session) = self.session(turn.key) else { return Outcome::Ordinary(NoSession::Unknown) };
        let (mode, engine, bound) = (session.mode, session.engine, session.bound);
        let tag_now = matches!(session.wish, Some(ModeWish::Auto | ModeWish::Tag));
        let plan = match (mode, engine.and_then(|number| self.engines.get(number).map(|engine| (number, engine)))) {
            (SessionMode::Stream, Some((number, engine))) => self.plan_in_stream(turn, number, engine),
            (SessionMode::Stream, None) => self.plan_lost(turn, bound, closes),
            (SessionMode::Tag, engine) => Ok(self.plan_tag(turn, bound, engine)),
            (SessionMode::Affinity, _) if turn.action == SessionAction::Open => self.plan_open(turn, bound, closes),
            (SessionMode::Affinity, _) if tag_now && can_tag(turn) && turn.action != SessionAction::Close => {
                Ok(self.plan_tag(turn, bound, None))
            }
            (SessionMode::Affinity, _) => Ok(self.plan_affinity(turn, bound, None)),
        };
        match plan {
            Ok(plan) => self.enter(turn, plan, closes),
            Err(busy) => Outcome::Busy(busy),
        }
    }

    fn enter(&mut self, turn: &BeginTurn, plan: Plan, closes: &mut Vec<EngineClose>) -> Outcome {
        let Some(slot) = self.slots.get_mut(&turn.key) else { return Outcome::Ordinary(NoSession::Unknown) };
        let Some(session) = slot.session.as_mut() else { return Outcome::Ordinary(NoSession::Unknown) };
        if session.in_flight == 0 {
            forget_idle(&mut self.deadlines, &mut self.idle, turn.key, session);
        }
        if let (SessionAction::Bind | SessionAction::Open, Some(ttl_ms)) = (turn.action, turn.ttl_ms) {
            session.ttl_ms = ttl_ms;
        }
        if turn.action == SessionAction::Open {
            session.wish = Some(turn.wish.or(session.wish).unwrap_or_default());
        }
        session.mode = plan.mode;
        if session.bound != Some(plan.spot) {
            if let Some(old) = session.bound.replace(plan.spot) {
                self.engines.unbind(old);
            }
            self.engines.bind(plan.spot);
        }
        let stale = session.engine.filter(|&number| self.engines.get(number).is_some_and(|e| e.spot != plan.spot));
        if let Some(number) = stale {
            session.engine = None;
            slot.leaving.push(number);
            self.engines.detach(number, CloseCause::Moved, false);
            closes.extend(self.engines.close_if_free(number));
        }
        let stream = session.mode == SessionMode::Stream;
        let opens = matches!(plan.engine, PlanEngine::Create);
        if stream && session.engine.is_none() && (session.context == Context::Kept || (opens && session.turns > 0)) {
            session.context = Context::Lost;
        }
        let mut lease = Lease {
            key: turn.key,
            turn: session.turns.saturating_add(session.in_flight).saturating_add(1),
            worker: plan.spot.0,
            rank: plan.spot.1,
            mode: SessionMode::Affinity,
            engine_id: None,
            open_timeout_ms: None,
            context_lost: stream && session.context == Context::Lost,
            begins: stream && session.context == Context::Empty,
            turn_cut: stream && session.gap,
            degraded: plan.degraded,
            generation: session.generation,
            engine: None,
        };
        match plan.engine {
            PlanEngine::Enter(number) => {
                self.engines.enter(number, turn.cap.tokens);
                lease.engine = Some(number);
                lease.mode = session.mode;
            }
            PlanEngine::Create => {
                let timeout_ms = self.options.engine_timeout_ms(session.ttl_ms);
                let number =
                    self.engines.create(turn.key, plan.spot, plan.mode, timeout_ms, turn.cap.tokens, turn.now_ms);
                session.engine = Some(number);
                session.gap = false;
                lease.turn_cut = false;
                lease.engine = Some(number);
                lease.mode = session.mode;
                lease.open_timeout_ms = (plan.mode == SessionMode::Stream).then_some(timeout_ms);
            }
            // The last turn, by a route that cannot enter: hold the engine session so that its close comes after the turn.
            PlanEngine::Without if turn.action == SessionAction::Close => {
                let free = |number: &u64| {
                    self.engines.get(*number).is_some_and(|e| e.mode == SessionMode::Tag || e.in_flight == 0)
                };
                if let Some(number) = session.engine.filter(free) {
                    lease.engine = Some(number);
                    self.engines.enter(number, turn.cap.tokens);
                }
            }
            PlanEngine::Without => {}
        }
        if lease.mode != SessionMode::Affinity {
            lease.engine_id = lease.engine.and_then(|number| self.engines.get(number)).map(|e| Arc::clone(&e.id));
        }
        session.in_flight += 1;
        self.leases += 1;
        if turn.action == SessionAction::Close {
            self.end_session(turn.key, CloseCause::Asked, closes);
        }
        Outcome::Ready(lease)
    }

    // === a turn ends ===

    fn end_in_engine(&mut self, lease: &Lease, number: u64, end: TurnEnd, now_ms: u64, closes: &mut Vec<EngineClose>) {
        self.engines.leave(number, now_ms);
        if lease.mode == SessionMode::Stream {
            match end {
                TurnEnd::Finished(Some(usage)) => self.engines.finished(number, usage),
                TurnEnd::Aborted => self.engines.aborted(number),
                TurnEnd::Unfinished => self.engines.unfinished(number),
                TurnEnd::EngineGone => self.forget_engine(number),
                TurnEnd::StillBusy => {
                    if self.engines.still_busy(number) {
                        self.evict(number, closes);
                    }
                }
                TurnEnd::Finished(None) | TurnEnd::NotServed => {}
            }
        }
        if lease.mode == SessionMode::Tag && end == TurnEnd::Aborted {
            // The worker may read the request after a close that follows at once, and would take the tag up again.
            self.engines.aborted(number);
            self.engines.unsure(number);
        }
        closes.extend(self.engines.close_if_free(number));
    }

    fn end_in_session(&mut self, lease: &Lease, end: TurnEnd, now_ms: u64) {
        let Some(session) = self.slots.get_mut(&lease.key).and_then(|slot| slot.session.as_mut()) else { return };
        if session.generation != lease.generation {
            return;
        }
        session.in_flight = session.in_flight.saturating_sub(1);
        session.last_end_ms = session.last_end_ms.max(now_ms);
        let cut = matches!(end, TurnEnd::Aborted | TurnEnd::Unfinished);
        if cut || matches!(end, TurnEnd::Finished(_)) {
            session.turns = session.turns.saturating_add(1);
        }
        if session.mode == SessionMode::Stream {
            // Cut in the engine session, or finished beside it.
            let inside = lease.mode == SessionMode::Stream && session.engine == lease.engine;
            session.gap |= if inside { cut } else { matches!(end, TurnEnd::Finished(_)) };
        }
        if let TurnEnd::Finished(usage) = end {
            if lease.mode == SessionMode::Stream && session.engine == lease.engine {
                session.context = Context::Kept;
                session.gap = false;
            }
            if let Some(usage) = usage {
                session.last_tokens = usage.prompt_tokens.saturating_add(usage.completion_tokens);
                session.last_cached_tokens = usage.cached_tokens;
            }
        }
        if session.in_flight == 0 {
            remember_idle(&mut self.deadlines, &mut self.idle, lease.key, session);
        }
    }

    /// Closes the longest idle streaming sessions of a place while what they hold together is over its cap: the engine can
    /// evict none of it, and with its pool full of it runs nothing at all.
    fn shed_tokens(&mut self, number: u64, closes: &mut Vec<EngineClose>) {
        let Some(spot) = self.engines.get(number).filter(|e| e.mode == SessionMode::Stream).map(|e| e.spot) else {
            return;
        };
        while self.engines.place(spot).is_some_and(|place| place.live_tokens > place.cap_tokens) {
            let Some(victim) = self.engines.longest_idle(spot, u64::MAX) else { return };
            self.evict(victim, closes);
        }
    }

    /// Takes an engine session away from its session, which is lost then.
    pub(super) fn evict(&mut self, number: u64, closes: &mut Vec<EngineClose>) {
        let Some(key) = self.engines.get(number).map(|engine| engine.key) else { return };
        if let Some(slot) = self.slots.get_mut(&key) {
            if let Some(session) = slot.session.as_mut().filter(|session| session.engine == Some(number)) {
                session.engine = None;
            }
            if !slot.leaving.contains(&number) {
                slot.leaving.push(number);
            }
        }
        self.engines.detach(number, CloseCause::Evicted, false);
        closes.extend(self.engines.close_if_free(number));
    }

    /// The engine session of a lease is not open, may be (`Unknown`), or may become so (none).
    fn open_failed(
        &mut self,
        key: SessionKey,
        number: u64,
        result: Option<OpenResult>,
        now_ms: u64,
        closes: &mut Vec<EngineClose>,
    ) {
        self.engines.leave(number, now_ms);
        if let Some(slot) = self.slots.get_mut(&key)
            && let Some(session) = slot.session.as_mut().filter(|session| session.engine == Some(number))
        {
            session.engine = None;
            // A client that left says nothing about what the worker can do.
            if result.is_some() {
                session.mode = SessionMode::Affinity;
            }
            slot.leaving.push(number);
        }
        if result == Some(OpenResult::Refused) {
            self.forget_engine(number);
            return;
        }
        if result.is_some() {
            self.engines.update(number, |engine| engine.opening = false);
        }
        self.engines.detach(number, CloseCause::OpenUnknown, false);
        closes.extend(self.engines.close_if_free(number));
    }

    // === shared by all ===

    pub(super) fn session(&self, key: SessionKey) -> Option<&Session> {
        self.slots.get(&key)?.session.as_ref()
    }

    /// The session is no more. What its engine session still holds is closed as soon as nothing stands against it.
    pub(super) fn end_session(&mut self, key: SessionKey, cause: CloseCause, closes: &mut Vec<EngineClose>) {
        let Some(slot) = self.slots.get_mut(&key) else { return };
        let Some(session) = slot.session.take() else { return };
        self.len = self.len.saturating_sub(1);
        forget_idle(&mut self.deadlines, &mut self.idle, key, &session);
        if let Some(spot) = session.bound {
            self.engines.unbind(spot);
        }
        if let Some(number) = session.engine {
            slot.leaving.push(number);
            self.engines.detach(number, cause, false);
            closes.extend(self.engines.close_if_free(number));
        }
        self.drop_empty_slot(key);
    }

    /// The session is bound to nothing; its engine session, if any, is to be closed and in nobody's way.
    pub(super) fn unbind_session(&mut self, key: SessionKey, cause: CloseCause, closes: &mut Vec<EngineClose>) {
        let Some(slot) = self.slots.get_mut(&key) else { return };
        let Some(session) = slot.session.as_mut() else { return };
        if let Some(spot) = session.bound.take() {
            self.engines.unbind(spot);
        }
        if let Some(number) = session.engine.take() {
            slot.leaving.push(number);
            self.engines.detach(number, cause, true);
            closes.extend(self.engines.close_if_free(number));
        }
    }

    /// The engine session is no more.
    pub(super) fn forget_engine(&mut self, number: u64) {
        let Some(engine) = self.engines.remove(number) else { return };
        let Some(slot) = self.slots.get_mut(&engine.key) else { return };
        slot.leaving.retain(|&other| other != number);
        if let Some(session) = slot.session.as_mut().filter(|session| session.engine == Some(number)) {
            session.engine = None;
        }
        self.drop_empty_slot(engine.key);
    }

    fn drop_empty_slot(&mut self, key: SessionKey) {
        if self.slots.get(&key).is_some_and(|slot| slot.session.is_none() && slot.leaving.is_empty()) {
            self.slots.remove(&key);
        }
    }

    /// Room for one more session, if need be at the cost of the longest idle one that holds nothing, or only a tag.
    fn make_slot(&mut self, closes: &mut Vec<EngineClose>) -> bool {
        while self.len >= self.options.max_sessions {
            let Some(&(_, key)) = self.idle.iter().find_map(|idle| idle.first()) else { return false };
            self.end_session(key, CloseCause::Evicted, closes);
        }
        true
    }
}

fn idle_class(mode: SessionMode) -> Option<usize> {
    match mode {
        SessionMode::Affinity => Some(0),
        SessionMode::Tag => Some(1),
        SessionMode::Stream => None,
    }
}

pub(super) fn remember_idle(
    deadlines: &mut BTreeSet<(u64, SessionKey)>,
    idle: &mut [BTreeSet<(u64, SessionKey)>; 2],
    key: SessionKey,
    session: &Session,
) {
    deadlines.insert((session.deadline_ms(), key));
    if let Some(class) = idle_class(session.mode).and_then(|class| idle.get_mut(class)) {
        class.insert((session.last_end_ms, key));
    }
}

fn forget_idle(
    deadlines: &mut BTreeSet<(u64, SessionKey)>,
    idle: &mut [BTreeSet<(u64, SessionKey)>; 2],
    key: SessionKey,
    session: &Session,
) {
    deadlines.remove(&(session.deadline_ms(), key));
    if let Some(class) = idle_class(session.mode).and_then(|class| idle.get_mut(class)) {
        class.remove(&(session.last_end_ms, key));
    }
}

// === impl Session ===

impl Session {
    /// When it expires if no turn begins.
    pub fn deadline_ms(&self) -> u64 {
        self.last_end_ms.saturating_add(self.ttl_ms)
    }
}
