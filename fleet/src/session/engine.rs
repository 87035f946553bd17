//! Engine sessions: what workers hold for us, from before it is opened until its close is confirmed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{CloseCause, EngineChange, EngineClose, Held, HeldEngine, SessionMode, Usage};
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
    /// (end, number) of those given up.
    abandoned: BTreeSet<(u64, u64)>,
    /// (next try, number) of those whose close failed so far.
    retries: BTreeSet<(u64, u64)>,
    /// For the journal, if there is one.
    changes: Option<Vec<EngineChange>>,
}

/// Pauses after the first, second… failed close, ms; then the last one again and again.
const RETRY_MS: [u64; 6] = [100, 500, 2_000, 5_000, 10_000, 30_000];
/// Pause of a close for which there was no room among the side requests.
const NO_ROOM_MS: u64 = 250;
/// How long the close of a tag is tried: the engine has no timeout for it, and nothing that it could not evict.
const TAG_TIMEOUT_MS: u64 = 600_000;
/// Tags that wait for another try; beyond, those whose close fails are given up at once.
const TAG_RETRIES: usize = 65_536;
/// An open without an answer may be worked on after the close that follows it, so that close is repeated once.
const SECOND_CLOSE_MS: u64 = 5_000;

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
    /// The worker refused a turn because it still had one that was over for us.
    pub refused: bool,
    /// Its worker is configured no more: its close is tried once.
    pub last_try: bool,
    /// Its close was confirmed, and is repeated all the same.
    pub again: bool,
    /// A request that carries this tag was cut: the worker may still read it after a close, and takes the tag up again.
    pub unsure: bool,
    /// Closes that failed.
    pub tries: u8,
    /// When its close is given up; 0 before the first failure.
    pub give_up_ms: u64,
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
    /// The close failed, and is sent again at this time.
    Retrying { at_ms: u64 },
    /// No close gets through; the worker's own timeout ends it no later than this.
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
        Self {
            nonce,
            last: 0,
            all: BTreeMap::new(),
            places: BTreeMap::new(),
            abandoned: BTreeSet::new(),
            retries: BTreeSet::new(),
            changes: None,
        }
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
            refused: false,
            last_try: false,
            again: false,
            unsure: false,
            tries: 0,
            give_up_ms: 0,
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
        if let Some(changes) = &mut self.changes {
            changes.push(EngineChange::Opened(engine.to_held()));
        }
        self.all.insert(number, engine);
        number
    }

    /// An engine session of an earlier process. False if its number is taken.
    pub fn take_over(&mut self, number: u64, engine: Engine) -> bool {
        if self.all.contains_key(&number) {
            return false;
        }
        self.last = self.last.max(number);
        if engine.mode == SessionMode::Stream {
            self.places.entry(engine.spot).or_default().add(number, &engine);
        }
        self.all.insert(number, engine);
        true
    }

    pub fn record_changes(&mut self) {
        self.changes.get_or_insert_default();
    }

    pub fn take_changes(&mut self) -> Vec<EngineChange> {
        self.changes.as_mut().map(std::mem::take).unwrap_or_default()
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
            engine.refused = false;
        });
    }

    /// A turn in it was ended unfinished by the worker, which has dropped all of its KV.
    pub fn unfinished(&mut self, number: u64) {
        self.update(number, |engine| engine.held_tokens = 0);
    }

    /// The worker refused a turn for another one that it still has. True when it did so before: it will not let go.
    pub fn still_busy(&mut self, number: u64) -> bool {
        let before = self.get(number).is_some_and(|engine| engine.refused);
        self.update(number, |engine| {
            engine.refused = true;
            engine.awaiting_release = true;
        });
        before
    }

    /// A turn in a streaming session was cut: the engine drops all of its KV, but not at once.
    pub fn aborted(&mut self, number: u64) {
        self.update(number, |engine| {
            engine.held_tokens = 0;
            engine.awaiting_release = true;
        });
    }

    /// A request that carries its tag was cut, or went out beside the turns and outlives the close.
    pub fn unsure(&mut self, number: u64) {
        self.update(number, |engine| engine.unsure = true);
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
        if engine.state != EngineState::Leaving || engine.in_flight > 0 || engine.awaiting_release || engine.opening {
            return None;
        }
        let close = engine.to_close();
        self.update(number, |engine| engine.state = EngineState::Closing);
        Some(close)
    }

    /// Its close did not get through. False: there is no use in remembering it any longer.
    pub fn close_failed(&mut self, number: u64, again: bool, now_ms: u64) -> bool {
        let Some(engine) = self.all.get(&number) else { return false };
        let tag = engine.mode == SessionMode::Tag;
        if engine.last_try || (tag && (!again || self.retries.len() >= TAG_RETRIES)) {
            return false;
        }
        let timeout_ms = if tag { TAG_TIMEOUT_MS } else { engine.timeout_ms };
        let give_up_ms = if engine.give_up_ms == 0 { now_ms.saturating_add(timeout_ms) } else { engine.give_up_ms };
        let pause = RETRY_MS.get(usize::from(engine.tries)).or(RETRY_MS.last()).copied().unwrap_or(0);
        let at_ms = now_ms.saturating_add(pause);
        let state = if !again || at_ms >= give_up_ms {
            if tag {
                return false;
            }
            self.abandoned.insert((give_up_ms, number));
            EngineState::Abandoned { until_ms: give_up_ms }
        } else {
            self.retries.insert((at_ms, number));
            EngineState::Retrying { at_ms }
        };
        self.update(number, |engine| {
            engine.tries = engine.tries.saturating_add(1);
            engine.give_up_ms = give_up_ms;
            engine.state = state;
        });
        true
    }

    /// Its close could not be sent yet. False: there is no use in remembering it any longer.
    pub fn close_later(&mut self, number: u64, now_ms: u64) -> bool {
        let Some(engine) = self.all.get(&number) else { return false };
        if engine.mode == SessionMode::Tag && self.retries.len() >= TAG_RETRIES {
            return false;
        }
        let at_ms = now_ms.saturating_add(NO_ROOM_MS);
        self.retries.insert((at_ms, number));
        self.update(number, |engine| {
            engine.tries = engine.tries.max(1);
            engine.state = EngineState::Retrying { at_ms };
        });
        true
    }

    /// Its close was confirmed. True when that is not enough, and it will be sent a second time.
    pub fn close_again(&mut self, number: u64, now_ms: u64) -> bool {
        let Some(engine) = self.all.get(&number) else { return false };
        let unsure = engine.cause == CloseCause::OpenUnknown || engine.unsure;
        if !unsure || engine.again || engine.last_try {
            return false;
        }
        let at_ms = now_ms.saturating_add(SECOND_CLOSE_MS);
        self.retries.insert((at_ms, number));
        self.update(number, |engine| {
            engine.again = true;
            engine.state = EngineState::Retrying { at_ms };
        });
        true
    }

    /// Closes to be sent again by now.
    pub fn retry_due(&mut self, now_ms: u64) -> Vec<EngineClose> {
        let due: Vec<u64> = self.retries.range(..=(now_ms, u64::MAX)).map(|&(_, number)| number).collect();
        due.into_iter().filter_map(|number| self.retry(number)).collect()
    }

    /// Closes at one worker that wait for another try, now. Those that are closed to be sure wait on.
    pub fn retry_at(&mut self, worker: WorkerId) -> Vec<EngineClose> {
        let due: Vec<u64> = self
            .retries
            .iter()
            .map(|&(_, number)| number)
            .filter(|&number| self.get(number).is_some_and(|e| e.spot.0 == worker && !e.again))
            .collect();
        due.into_iter().filter_map(|number| self.retry(number)).collect()
    }

    fn retry(&mut self, number: u64) -> Option<EngineClose> {
        let engine = self.all.get(&number)?;
        let EngineState::Retrying { at_ms } = engine.state else { return None };
        let close = engine.to_close();
        self.retries.remove(&(at_ms, number));
        self.update(number, |engine| engine.state = EngineState::Closing);
        Some(close)
    }

    /// When a close is to be sent again next.
    pub fn next_retry_ms(&self) -> Option<u64> {
        self.retries.first().map(|&(at_ms, _)| at_ms)
    }

    /// Abandoned ones whose worker has timed them out by now.
    pub fn timed_out(&self, now_ms: u64) -> Vec<u64> {
        self.abandoned.range(..=(now_ms, u64::MAX)).map(|&(_, number)| number).collect()
    }

    pub fn remove(&mut self, number: u64) -> Option<Engine> {
        let engine = self.all.remove(&number)?;
        match engine.state {
            EngineState::Abandoned { until_ms } => {
                self.abandoned.remove(&(until_ms, number));
            }
            EngineState::Retrying { at_ms } => {
                self.retries.remove(&(at_ms, number));
            }
            EngineState::Live | EngineState::Leaving | EngineState::Closing => {}
        }
        if let Some(place) = self.places.get_mut(&engine.spot) {
            place.remove(number, &engine);
        }
        self.prune(engine.spot);
        if let Some(changes) = &mut self.changes {
            changes.push(EngineChange::Gone(Arc::clone(&engine.id)));
        }
        Some(engine)
    }

    /// The number in an engine id of ours, if that engine session is still known.
    pub fn find(&self, id: &str) -> Option<u64> {
        let number = number_in(id)?;
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
            tries: self.tries,
        }
    }

    pub fn to_held(&self) -> HeldEngine {
        HeldEngine {
            engine_id: Arc::clone(&self.id),
            mode: self.mode,
            worker: self.spot.0,
            rank: self.spot.1,
            timeout_ms: self.timeout_ms,
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

/// The number in an engine id of ours.
pub(super) fn number_in(id: &str) -> Option<u64> {
    u64::from_str_radix(id.rsplit('-').next()?, 16).ok()
}
