//! From costs to a worker: who is eligible, whether the session stays, who comes next.

use std::cmp::Ordering;
use std::fmt;

use turnstile_policy::{Worker, WorkerState};

use crate::Cost;

/// What decides, apart from the workers.
#[derive(Debug, Clone, Copy)]
pub struct Terms {
    /// Weights of the cost.
    pub cost: Cost,
    /// Estimated prompt length, tokens.
    pub prompt_tokens: u64,
    /// Seed that orders equal workers, the same on every gateway.
    pub seed: u64,
    /// Least advantage for which a bound session moves, ms.
    pub margin_ms: f64,
    /// Least advantage for which a bound session moves, as a share of the cost of staying.
    pub margin_share: f64,
    /// How many workers to rank besides the chosen one.
    pub others: usize,
}

/// The answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// Index of the worker.
    pub target: u32,
    /// Its cost, ms.
    pub cost_ms: f64,
    /// The next best, cheapest first, with their costs in ms.
    pub others: Vec<(u32, f64)>,
    /// Why this worker.
    pub why: Why,
}

/// Why a worker was chosen.
#[derive(Debug, Clone, PartialEq)]
pub enum Why {
    /// The session is there and stays.
    Bound,
    /// The session moves, since this worker is cheaper by so many ms.
    MovedCheaper {
        /// Advantage, ms.
        by_ms: f64,
    },
    /// The session moves, since its worker cannot take the turn.
    MovedLost(Lost),
    /// Cheapest, with part of the prompt in its cache.
    Cached {
        /// Tokens probably cached there.
        cached: u64,
        /// Tokens of the prompt.
        prompt: u64,
    },
    /// Cheapest, with nothing cached.
    LeastCost,
}

/// Why a bound worker cannot take the turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lost {
    /// It failed this turn before, or a policy excluded it.
    Excluded,
    /// It is not ready.
    State(WorkerState),
    /// It would queue the turn while others would not.
    AtLimit,
}

/// The candidates of a turn, looked at once.
#[derive(Debug)]
pub struct Survey {
    terms: Terms,
    /// The best that may be used, in order. One more than the others asked for: the chosen one is among them, if it is not
    /// the bound one.
    best: Vec<Ranked>,
    bound: Option<Bound>,
}

/// The worker that holds the session.
#[derive(Debug, Clone, Copy)]
struct Bound {
    ranked: Ranked,
    lost: Option<Lost>,
}

/// A candidate with what decides about it.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Ranked {
    index: u32,
    at_limit: bool,
    cost_ms: f64,
    in_flight: u32,
    cached_tokens: u64,
}

// === impl Survey ===

impl Survey {
    /// Looks at the workers, in any order.
    pub fn of(workers: impl Iterator<Item = Worker>, terms: Terms) -> Survey {
        let mut survey = Survey { terms, best: Vec::with_capacity(terms.others.saturating_add(2)), bound: None };
        for worker in workers {
            survey.see(&worker);
        }
        survey
    }

    fn see(&mut self, worker: &Worker) {
        let ranked = Ranked {
            index: worker.index,
            at_limit: worker.is_at_limit(),
            cost_ms: self.terms.cost.of(worker, self.terms.prompt_tokens),
            in_flight: worker.in_flight,
            cached_tokens: worker.cached_tokens,
        };
        let lost = Lost::of(worker);
        if lost.is_none() {
            self.keep(ranked);
        }
        if worker.is_bound() {
            self.bound = Some(Bound { ranked, lost });
        }
    }

    /// Keeps a worker if it is among the best. Most of a large fleet is turned away by one comparison, so this is cheaper
    /// than sorting it.
    fn keep(&mut self, ranked: Ranked) {
        let most = self.terms.others.saturating_add(1);
        let seed = self.terms.seed;
        let after = |kept: &Ranked| kept.order(&ranked, seed) == Ordering::Greater;
        if self.best.len() == most && !self.best.last().is_some_and(after) {
            return;
        }
        let place = self.best.iter().position(after).unwrap_or(self.best.len());
        self.best.insert(place, ranked);
        self.best.truncate(most);
    }

    /// Whether one of the workers holds the turn's session.
    pub fn has_bound(&self) -> bool {
        self.bound.is_some()
    }

    /// Chooses. With `pinned` the session lives in its worker's memory: its turns bring only what is new, so it stays as
    /// long as that worker answers at all, and has no other place to go. `None` when no worker may be used.
    pub fn choose(self, pinned: bool) -> Option<Choice> {
        if let Some(bound) = self.bound.filter(|bound| pinned && bound.answers()) {
            let Ranked { index, cost_ms, .. } = bound.ranked;
            return Some(Choice { target: index, cost_ms, others: Vec::new(), why: Why::Bound });
        }
        let best = self.best.first().copied()?;
        let (target, why) = match self.bound {
            None => (best, best.why(self.terms.prompt_tokens)),
            Some(Bound { lost: Some(lost), .. }) => (best, Why::MovedLost(lost)),
            // Where every worker would queue the turn, that is no reason to leave one of them.
            Some(Bound { ranked, .. }) if ranked.at_limit && !best.at_limit => (best, Why::MovedLost(Lost::AtLimit)),
            Some(Bound { ranked, .. }) => self.terms.stay_or_move(ranked, best),
        };
        let others = self.best.iter().filter(|ranked| ranked.index != target.index).take(self.terms.others);
        Some(Choice {
            target: target.index,
            cost_ms: target.cost_ms,
            others: others.map(|ranked| (ranked.index, ranked.cost_ms)).collect(),
            why,
        })
    }
}

// === impl Bound ===

impl Bound {
    /// Whether the worker can go on with what lives there.
    fn answers(&self) -> bool {
        matches!(self.lost, None | Some(Lost::State(WorkerState::Draining)))
    }
}

// === impl Terms ===

impl Terms {
    fn stay_or_move(&self, bound: Ranked, cheapest: Ranked) -> (Ranked, Why) {
        let margin = self.margin_ms.max(self.margin_share * bound.cost_ms);
        if cheapest.cost_ms + margin < bound.cost_ms {
            (cheapest, Why::MovedCheaper { by_ms: bound.cost_ms - cheapest.cost_ms })
        } else {
            (bound, Why::Bound)
        }
    }
}

// === impl Ranked ===

impl Ranked {
    /// Below the limit first, then cheaper, then fewer in flight, then the higher weight.
    fn order(&self, other: &Ranked, seed: u64) -> Ordering {
        (self.at_limit.cmp(&other.at_limit))
            .then_with(|| self.cost_ms.total_cmp(&other.cost_ms))
            .then_with(|| self.in_flight.cmp(&other.in_flight))
            .then_with(|| weight(seed, other.index).cmp(&weight(seed, self.index)))
            .then_with(|| self.index.cmp(&other.index))
    }

    fn why(&self, prompt: u64) -> Why {
        match self.cached_tokens.min(prompt) {
            0 => Why::LeastCost,
            cached => Why::Cached { cached, prompt },
        }
    }
}

/// Weight of a worker for a seed (rendezvous hashing): each gateway ranks equal workers alike without talking to the
/// others, and a worker that comes or goes moves only its own share.
fn weight(seed: u64, index: u32) -> u64 {
    scramble(seed ^ scramble(u64::from(index)))
}

/// SplitMix64's step: every bit of the input reaches every bit of the output.
fn scramble(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

// === impl Why ===

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Bound => f.write_str("bound"),
            Why::MovedCheaper { by_ms } => write!(f, "moved: cheaper by {} ms", by_ms.round() as i64),
            Why::MovedLost(lost) => write!(f, "moved: bound worker {lost}"),
            Why::Cached { cached, prompt } => write!(f, "cached {cached} of {prompt} tokens"),
            Why::LeastCost => f.write_str("least cost"),
        }
    }
}

// === impl Lost ===

impl Lost {
    /// Why a worker may not be used at all.
    fn of(worker: &Worker) -> Option<Lost> {
        if worker.is_excluded() {
            Some(Lost::Excluded)
        } else if worker.state != WorkerState::Ready {
            Some(Lost::State(worker.state))
        } else {
            None
        }
    }
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Lost::Excluded => "excluded",
            Lost::State(WorkerState::Draining) => "draining",
            Lost::State(WorkerState::Unhealthy) => "unhealthy",
            Lost::State(WorkerState::Starting | WorkerState::Ready) => "starting",
            Lost::AtLimit => "at its limit",
        })
    }
}

#[cfg(test)]
#[path = "choose_tests.rs"]
mod tests;
