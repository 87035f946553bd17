//! Engine sessions: what workers hold for us, from before it is opened until its close is confirmed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{CloseCause, EngineClose, Held, SessionMode, Usage};
use crate::ids::{SessionKey, WorkerId};

/// Where an engine session lives. Sessions are per data parallel rank: opens and closes reach all ranks, turns only one.
pub(super) type Spot = (WorkerId, Option<u32>);

/// All engine sessions, and what they hold in each place.
#[derive(Debug)]
pub(super) struct Engines {
    nonce: u64,
    last: u64,
    all: BTreeMap<u64, Engine>,
    places: BTreeMap<Spot, Place>,
    abandoned: BTreeSet<(u64, u64)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Engine {
    pub id: Arc<str>,
    pub key: SessionKey,
    pub spot: Spot,
    pub mode: SessionMode,
    pub state: EngineState,
    /// `/open_session` is under way.
    pub opening: bool,
    /// Leases that keep it from being closed.
    pub in_flight: u32,
    /// An aborted turn of which the worker has not let go.
    pub awaiting_release: bool,
    /// It is in nobody's way: its worker is lost or drains.
    pub lost: bool,
    pub cause: CloseCause,
    pub held_tokens: u64,
    pub timeout_ms: u64,
    pub last_used_ms: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EngineState {
    /// It belongs to its session.
    Live,
    /// To be closed when no turn and no release is outstanding.
    Leaving,
    /// The close went out.
    Closing,
    /// The close failed for good; the worker's own timeout ends it no later than this.
    Abandoned { until_ms: u64 },
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Place {
    pub rows: u32,
    pub busy_rows: u32,
    pub closing_rows: u32,
    pub tokens: u64,
    /// Tokens of those whose close went out.
    pub closing_tokens: u64,
    /// Tokens of those that nobody has asked to close.
    pub live_tokens: u64,
    /// Streaming sessions that may be closed at once, longest idle first.
    pub idle: BTreeSet<(u64, u64)>,
    /// Token cap as of the last turn begun there.
    pub cap_tokens: u64,
    /// Sessions of any mode bound there.
    pub sessions: u32,
}

// === impl Engines ===

impl Engines {
    pub fn new(nonce: u64) -> Self {
        Self { nonce, last: 0, all: BTreeMap::new(), places: BTreeMap::new(), abandoned: BTreeSet::new() }
    }

    pub fn get(&self, number: u64) -> Option<&Engine> {
        self.all.get(&number)
    }

    pub fn iter(&self) -> impl Iterator<Item = (u64, &Engine)> {
        self.all.iter().map(|(&number, engine)| (number, engine))
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// The next number; generations of sessions and engine sessions draw from the same sequence.
    pub fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// A new engine session, in the hands of one lease.
    pub fn create(
        &mut self,
        key: SessionKey,
        spot: Spot,
        mode: SessionMode,
        timeout_ms: u64,
        cap_tokens: u64,
        now_ms: u64,
    ) -> u64 {
        let number = self.number();
        let engine = Engine {
            id: engine_id(key, self.nonce, number),
            key,
            spot,
            mode,
            state: EngineState::Live,
            opening: mode == SessionMode::Stream,
            in_flight: 1,
            awaiting_release: false,
            lost: false,
            cause: CloseCause::Asked,
            held_tokens: 0,
            timeout_ms,
            last_used_ms: now_ms,
        };
        if mode == SessionMode::Stream {
            let place = self.places.entry(spot).or_default();
            place.add(number, &engine);
            place.cap_tokens = cap_tokens;
        }
        self.all.insert(number, engine);
        number
    }

    /// Changes an engine session and keeps the sums true. Nothing if it is gone already.
    pub fn update(&mut self, number: u64, change: impl FnOnce(&mut Engine)) {
        let Some(engine) = self.all.get_mut(&number) else { return };
        if engine.mode != SessionMode::Stream {
            change(engine);
            return;
        }
        let place = self.places.entry(engine.spot).or_default();
        place.remove(number, engine);
        change(engine);
        place.add(number, engine);
    }

    /// A turn takes hold of it. `cap_tokens`: what may be held in its place from now on.
    pub fn enter(&mut self, number: u64, cap_tokens: u64) {
        self.update(number, |engine| engine.in_flight += 1);
        if let Some(engine) = self.all.get(&number).filter(|engine| engine.mode == SessionMode::Stream)
            && let Some(place) = self.places.get_mut(&engine.spot)
        {
            place.cap_tokens = cap_tokens;
        }
    }

    /// A turn lets go of it.
    pub fn leave(&mut self, number: u64, now_ms: u64) {
        self.update(number, |engine| {
            engine.in_flight = engine.in_flight.saturating_sub(1);
            engine.last_used_ms = now_ms;
        });
    }

    /// A turn in it was finished: its whole context stays in the worker's KV.
    pub fn finished(&mut self, number: u64, usage: Usage) {
        self.update(number, |engine| {
            engine.held_tokens = usage.prompt_tokens.saturating_add(usage.completion_tokens);
        });
    }

    /// A turn in a streaming session was cut: the engine drops all of its KV, but not at once.
    pub fn aborted(&mut self, number: u64) {
        self.update(number, |engine| {
            engine.held_tokens = 0;
            engine.awaiting_release = true;
        });
    }

    /// The session no longer wants it.
    pub fn detach(&mut self, number: u64, cause: CloseCause, lost: bool) {
        self.update(number, |engine| {
            engine.state = EngineState::Leaving;
            engine.cause = cause;
            engine.lost |= lost;
        });
    }

    /// Its close, if it is wanted and nothing stands against it any more.
    pub fn close_if_free(&mut self, number: u64) -> Option<EngineClose> {
        let engine = self.all.get(&number)?;
        if engine.state != EngineState::Leaving || engine.in_flight > 0 || engine.awaiting_release {
            return None;
        }
        let close = engine.to_close();
        self.update(number, |engine| engine.state = EngineState::Closing);
        Some(close)
    }

    /// The close failed for good: what it holds counts until the worker's own timeout.
    pub fn abandon(&mut self, number: u64, now_ms: u64) {
        let Some(engine) = self.all.get(&number) else { return };
        let until_ms = now_ms.saturating_add(engine.timeout_ms);
        self.abandoned.insert((until_ms, number));
        self.update(number, |engine| engine.state = EngineState::Abandoned { until_ms });
    }

    /// Abandoned ones whose worker has timed them out by now.
    pub fn timed_out(&self, now_ms: u64) -> Vec<u64> {
        self.abandoned.range(..=(now_ms, u64::MAX)).map(|&(_, number)| number).collect()
    }

    pub fn remove(&mut self, number: u64) -> Option<Engine> {
        let engine = self.all.remove(&number)?;
        if let EngineState::Abandoned { until_ms } = engine.state {
            self.abandoned.remove(&(until_ms, number));
        }
        if let Some(place) = self.places.get_mut(&engine.spot) {
            place.remove(number, &engine);
        }
        self.prune(engine.spot);
        Some(engine)
    }

    /// The number in an engine id of ours, if that engine session is still known.
    pub fn find(&self, id: &str) -> Option<u64> {
        let number = u64::from_str_radix(id.rsplit('-').next()?, 16).ok()?;
        self.all.get(&number).filter(|engine| &*engine.id == id).map(|_| number)
    }

    pub fn place(&self, spot: Spot) -> Option<&Place> {
        self.places.get(&spot)
    }

    pub fn places(&self) -> impl Iterator<Item = (Spot, &Place)> {
        self.places.iter().map(|(&spot, place)| (spot, place))
    }

    /// The ranks of one worker on which anything is.
    pub fn places_of(&self, worker: WorkerId) -> impl Iterator<Item = (Option<u32>, &Place)> {
        self.places.range((worker, None)..=(worker, Some(u32::MAX))).map(|(&(_, rank), place)| (rank, place))
    }

    /// The streaming session in a place that has been idle longest, if idle since `since_ms` or before.
    pub fn longest_idle(&self, spot: Spot, since_ms: u64) -> Option<u64> {
        let &(last_used_ms, number) = self.places.get(&spot)?.idle.first()?;
        (last_used_ms <= since_ms).then_some(number)
    }

    /// A session is bound there from now on.
    pub fn bind(&mut self, spot: Spot) {
        self.places.entry(spot).or_default().sessions += 1;
    }

    /// A session is bound there no more.
    pub fn unbind(&mut self, spot: Spot) {
        if let Some(place) = self.places.get_mut(&spot) {
            place.sessions = place.sessions.saturating_sub(1);
        }
        self.prune(spot);
    }

    fn prune(&mut self, spot: Spot) {
        if self.places.get(&spot).is_some_and(|place| place.rows == 0 && place.sessions == 0) {
            self.places.remove(&spot);
        }
    }
}

// === impl Engine ===

impl Engine {
    pub fn to_close(&self) -> EngineClose {
        EngineClose {
            worker: self.spot.0,
            rank: self.spot.1,
            engine_id: Arc::clone(&self.id),
            mode: self.mode,
            cause: self.cause,
        }
    }

    fn is_idle(&self) -> bool {
        self.state == EngineState::Live && self.in_flight == 0 && !self.awaiting_release
    }
}

// === impl Place ===

impl Place {
    /// Tags hold no row and nothing that the engine cannot evict, so only streaming sessions count.
    pub fn add(&mut self, number: u64, engine: &Engine) {
        if engine.mode != SessionMode::Stream {
            return;
        }
        self.rows += 1;
        self.busy_rows += u32::from(engine.in_flight > 0);
        self.tokens = self.tokens.saturating_add(engine.held_tokens);
        if engine.state == EngineState::Closing {
            self.closing_rows += 1;
            self.closing_tokens = self.closing_tokens.saturating_add(engine.held_tokens);
        }
        if engine.state == EngineState::Live {
            self.live_tokens = self.live_tokens.saturating_add(engine.held_tokens);
        }
        if engine.is_idle() {
            self.idle.insert((engine.last_used_ms, number));
        }
    }

    fn remove(&mut self, number: u64, engine: &Engine) {
        if engine.mode != SessionMode::Stream {
            return;
        }
        self.rows = self.rows.saturating_sub(1);
        self.busy_rows = self.busy_rows.saturating_sub(u32::from(engine.in_flight > 0));
        self.tokens = self.tokens.saturating_sub(engine.held_tokens);
        if engine.state == EngineState::Closing {
            self.closing_rows = self.closing_rows.saturating_sub(1);
            self.closing_tokens = self.closing_tokens.saturating_sub(engine.held_tokens);
        }
        if engine.state == EngineState::Live {
            self.live_tokens = self.live_tokens.saturating_sub(engine.held_tokens);
        }
        self.idle.remove(&(engine.last_used_ms, number));
    }

    pub fn held(&self) -> Held {
        Held {
            rows: self.rows,
            idle_rows: self.rows.saturating_sub(self.busy_rows),
            tokens: self.tokens,
            sessions: self.sessions,
        }
    }
}

/// `ts-<key>-<mark>-<number>`: the key keeps tenants apart, the mark (secret nonce and number, mixed) keeps processes apart and
/// cannot be guessed, the number finds the engine session again.
fn engine_id(key: SessionKey, nonce: u64, number: u64) -> Arc<str> {
    let mark = crate::cost::mix(nonce ^ crate::cost::mix(number));
    format!("ts-{key}-{mark:016x}-{number:x}").into()
}
