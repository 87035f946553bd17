//! What is true beside the gateway: what engines were given and finished, what clients were told. Invariants are held against
//! that.

use super::world::{Attempt, Stage, World};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use turnstile_fleet::ids::{SessionKey, WorkerId};
use turnstile_fleet::session::{AttemptEnd, CloseResult, ContextNote, Counts, Held, SessionMode};
use turnstile_sim::engine::Engine;

/// How a turn ended, for its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    Answered,
    Aborted,
    Busy,
    QueueFull,
    NoWorker,
    Failed,
    Left,
    Timeout,
}

/// An engine session, from its open or first use.
#[derive(Debug)]
struct EngineTruth {
    key: SessionKey,
    worker: WorkerId,
    mode: SessionMode,
    /// Turns finished in it, in order.
    turns: Vec<usize>,
    /// Tokens of its context.
    tokens: u64,
    /// A close failed, or was refused.
    failed: bool,
    refused: bool,
}

/// Everything that is known, and what was wrong.
#[derive(Debug, Default)]
pub struct Truth {
    owners: BTreeMap<SessionKey, (u64, String)>,
    engines: BTreeMap<Arc<str>, EngineTruth>,
    /// Turns that a client of deltas believes to be in its context.
    known: BTreeMap<SessionKey, Vec<usize>>,
    /// The attempt by which it was last told that its context begins anew.
    anew: BTreeMap<SessionKey, usize>,
    /// What it believed at the moment at which an attempt began: what was answered since came after it.
    expected: BTreeMap<usize, Vec<usize>>,
    /// Turns in the engine session up to that of an attempt.
    seen: BTreeMap<usize, usize>,
    arrived: BTreeSet<usize>,
    ended: BTreeMap<usize, Outcome>,
    removed: BTreeSet<WorkerId>,
    pub wrong: Vec<String>,
    pub checks: u64,
    /// How often something happened, for the summary.
    pub seen_often: BTreeMap<&'static str, u64>,
}

impl Truth {
    pub fn wrong(&mut self, what: &str) {
        self.wrong.push(what.to_owned());
    }

    pub fn count(&mut self, what: &'static str) {
        *self.seen_often.entry(what).or_insert(0) += 1;
    }

    fn check(&mut self, holds: bool, what: &str) {
        self.checks += 1;
        if !holds {
            self.wrong(what);
        }
    }

    pub fn owner(&mut self, key: SessionKey, tenant: u64, text: &str) {
        let owner = self.owners.entry(key).or_insert((tenant, text.to_owned()));
        let same = (owner.0, owner.1.as_str()) == (tenant, text);
        self.check(same, "two names share a session key");
    }

    pub fn arrived(&mut self, turn: usize) {
        let first = self.arrived.insert(turn);
        self.check(first, "a turn arrived twice");
    }

    pub fn outcome(&mut self, turn: usize, outcome: Outcome) {
        let first = self.ended.insert(turn, outcome).is_none();
        self.check(first, "a turn ended twice");
        self.count(match outcome {
            Outcome::Answered => "turns answered",
            Outcome::Aborted => "turns aborted by the engine",
            Outcome::Busy => "turns refused: session busy",
            Outcome::QueueFull => "turns refused: queue full",
            Outcome::NoWorker => "turns refused: no worker",
            Outcome::Failed => "turns failed after all attempts",
            Outcome::Left => "turns whose client left",
            Outcome::Timeout => "turns that took too long",
        });
    }

    pub fn removed(&mut self, worker: WorkerId) {
        self.count("workers removed");
        self.removed.insert(worker);
    }

    pub fn opened(&mut self, id: &Arc<str>, key: SessionKey, worker: WorkerId) {
        self.count("engine sessions opened");
        let new = EngineTruth {
            key,
            worker,
            mode: SessionMode::Stream,
            turns: Vec::new(),
            tokens: 0,
            failed: false,
            refused: false,
        };
        let first = self.engines.insert(Arc::clone(id), new).is_none();
        self.check(first, "an engine id is used for two engine sessions");
    }

    /// A turn enters an engine session.
    pub fn entered(&mut self, id: &Arc<str>, key: SessionKey, worker: WorkerId, mode: SessionMode) {
        let one = self.engines.entry(Arc::clone(id)).or_insert_with(|| EngineTruth {
            key,
            worker,
            mode,
            turns: Vec::new(),
            tokens: 0,
            failed: false,
            refused: false,
        });
        let (owner, home) = (one.key, one.worker);
        self.check(owner == key, "a turn in an engine session of another session");
        self.check(home == worker, "a turn in an engine session of another worker");
    }

    /// An engine has ended the turn of an attempt.
    pub fn engine_ended(&mut self, number: usize, turn: usize, tokens: usize, attempt: &Attempt, how: &AttemptEnd) {
        let AttemptEnd::Answered { usage: Some(usage), whole: true } = how else { return };
        let Some(one) = attempt.engine_id.as_ref().and_then(|id| self.engines.get_mut(id)) else { return };
        if one.mode != SessionMode::Stream {
            return;
        }
        let expected = one.tokens + tokens as u64;
        one.tokens = usage.prompt_tokens + usage.completion_tokens;
        let once = !one.turns.contains(&turn);
        one.turns.push(turn);
        self.seen.insert(number, one.turns.len());
        self.check(once, "a turn stands twice in a context");
        self.check(usage.prompt_tokens == expected, "a context is not the turns that were finished in it");
    }

    /// An attempt begins.
    pub fn began(&mut self, attempt: usize, key: SessionKey) {
        self.expected.insert(attempt, self.known.get(&key).cloned().unwrap_or_default());
    }

    /// A client of deltas has its answer.
    pub fn answered(
        &mut self,
        key: SessionKey,
        turn: usize,
        attempt: usize,
        id: Option<&str>,
        note: Option<ContextNote>,
    ) {
        let seen = id.and_then(|id| self.engines.get(id)).and_then(|engine| {
            let length = *self.seen.get(&attempt)?;
            engine.turns.get(..length).map(<[usize]>::to_vec)
        });
        let expected = self.expected.remove(&attempt).unwrap_or_default();
        let known = self.known.entry(key).or_default();
        let mut holds = true;
        // A later turn was told meanwhile that its context begins anew: this one is not in it, and its client knows.
        let counts = self.anew.get(&key).is_none_or(|&anew| anew < attempt);
        if counts && matches!(note, Some(ContextNote::New | ContextNote::Lost)) {
            self.anew.insert(key, attempt);
            *known = vec![turn];
        }
        let counted = match note {
            None => {
                let seen = seen.unwrap_or_default();
                holds = expected.iter().all(|earlier| seen.contains(earlier)) && seen.last() == Some(&turn);
                if counts {
                    known.push(turn);
                }
                "answers with their context"
            }
            Some(ContextNote::New) => "answers told: context begins",
            Some(ContextNote::Lost) => "answers told: context lost",
            Some(ContextNote::Incomplete) => {
                if counts {
                    *known = seen.unwrap_or_default();
                }
                "answers told: context incomplete"
            }
            Some(ContextNote::NotKept(..)) => "answers told: no context kept",
            Some(ContextNote::NoSession(_)) => "answers told: no session",
        };
        self.check(holds, "an answer without its context, and the client was not told");
        self.count(counted);
    }

    pub fn close_result(&mut self, id: &Arc<str>, result: CloseResult) {
        self.count(match result {
            CloseResult::Closed => "closes confirmed",
            CloseResult::Failed => "closes failed",
            CloseResult::NoRoom => "closes put off for want of room",
            CloseResult::Refused => "closes refused",
        });
        if let Some(one) = self.engines.get_mut(id) {
            one.failed |= result == CloseResult::Failed;
            one.refused |= result == CloseResult::Refused;
        }
    }

    /// Whether an engine may keep a session after the end: its close was refused, or tried in vain at a worker taken out.
    fn excused(&self, id: &str) -> bool {
        self.engines.get(id).is_some_and(|one| one.refused || (one.failed && self.removed.contains(&one.worker)))
    }
}

impl World {
    /// Checks what holds after every event.
    pub(super) fn check(&mut self, number: u64) {
        // The table checks itself at every entry, too; all of it only while it is small.
        if number.is_multiple_of(64) {
            self.table.check_invariants();
            self.truth.checks += 1;
        }
        if self.turns.len() < 400 || number.is_multiple_of(32) {
            let (rows, over) = (self.rows_within_caps(), self.table.over_cap().count());
            self.truth.check(rows, "streaming sessions hold more rows than their cap");
            self.truth.check(over == 0, "idle streaming sessions hold more tokens than their cap");
            let leases = self.open.iter().filter(|&&open| self.attempts[open].hold.lease().is_some()).count() as u64;
            let counts = self.table.counts();
            self.truth.check(counts.in_flight == leases, "leases out are not the attempts that run");
            self.truth.check(counts.waiting == self.waiting.len(), "turns that wait are not those in the list");
            let held = self.held_is_there();
            self.truth.check(held, "more tokens are counted as held than an engine holds");
        }
        let bounded = self.table.len() <= self.plan.max_sessions && self.side.len() <= self.plan.side_queue;
        self.truth.check(bounded, "sessions or side requests are over their bound");
    }

    fn rows_within_caps(&self) -> bool {
        let cap = u32::try_from(self.plan.rows / 2).unwrap_or(u32::MAX);
        let ranks = || [None].into_iter().chain((0..self.plan.ranks).map(Some));
        self.members
            .iter()
            .all(|member| ranks().all(|rank| self.table.held_on_rank(member.model.index, rank).rows <= cap))
    }

    /// Where nothing is under way: what the table takes for held is held. (The engine may hold more: a turn whose abort was lost
    /// is finished there.)
    fn held_is_there(&self) -> bool {
        let counts = self.table.counts();
        let closing = counts.leaving + counts.closing + counts.retrying + counts.abandoned + self.side.len();
        closing > 0
            || self.members.iter().enumerate().all(|(place, member)| {
                let process = &self.processes[member.process];
                let busy = self.open.iter().any(|&open| self.attempts[open].member == place);
                let known = member.configured && member.knows(process);
                let held = self.table.held(member.model.index);
                let holds: usize = process.engines.iter().map(Engine::held_tokens).sum();
                // The engine has not computed the last token of an answer.
                busy || !known || held.tokens <= holds as u64 + u64::from(held.rows)
            })
    }

    /// Checks what holds once every client is gone and every session over.
    pub(super) fn check_end(&mut self) {
        let all = self.turns.iter().all(|turn| turn.stage == Stage::Done);
        self.truth.check(all, "a turn never ended");
        let lost = self.truth.arrived.len() != self.turns.len() || self.truth.ended.len() != self.turns.len();
        self.truth.check(!lost, "a turn was lost");
        let counts = self.table.counts();
        let zero = Counts { abandoned: counts.abandoned, engine_sessions: counts.abandoned, ..Counts::default() };
        self.truth.check(counts == zero, &format!("counts have not returned to zero: {counts:?}"));
        let idle = self.queue.is_empty() && self.waiting.is_empty() && self.side.is_empty() && self.running.is_empty();
        self.truth.check(idle, "something still waits or runs");
        let flights =
            self.members.iter().all(|m| m.model.flights.in_flight() == 0 && m.model.flights.unanswered() == 0);
        self.truth.check(flights, "turns in flight have not returned to zero");
        let left: Vec<Arc<str>> =
            self.truth.engines.keys().filter(|id| self.engine_has(id) && !self.truth.excused(id)).cloned().collect();
        self.truth.check(left.is_empty(), &format!("engine sessions are left: {left:?}"));
    }

    /// Checks what holds once the engines' own timeouts have passed, too.
    pub(super) fn check_very_end(&mut self) {
        let counts = self.table.counts();
        self.truth.check(counts == Counts::default(), &format!("counts are not zero after all timeouts: {counts:?}"));
        let held = self.members.iter().all(|m| self.table.held(m.model.index) == Held::default());
        self.truth.check(held, "something is still held after all timeouts");
        let streams: usize = self.processes.iter().flat_map(|p| &p.engines).map(|engine| engine.sessions().0).sum();
        self.truth.check(streams == 0, "streaming sessions are left after their own timeout");
    }

    fn engine_has(&self, id: &str) -> bool {
        self.processes.iter().flat_map(|process| &process.engines).any(|engine| engine.has_session(id))
    }
}
