//! From costs to a worker: who is eligible, whether the session stays, who comes next.

use std::cmp::Ordering;
use std::fmt;

use turnstile_policy::{Worker, WorkerState};

use crate::Cost;

/// What is asked.
#[derive(Debug, Clone, Copy)]
pub struct Question<'w> {
    /// The candidates, in order of their index.
    pub workers: &'w [Worker],
    /// Estimated prompt length, tokens.
    pub prompt_tokens: u64,
    /// Seed that orders equal workers, the same on every gateway.
    pub seed: u64,
    /// The session lives in its worker's memory and must not move while that worker lives.
    pub pinned: bool,
    /// Least advantage for which a bound session moves, ms.
    pub margin_ms: f64,
    /// Least advantage for which a bound session moves, as a share of the cost of staying.
    pub margin_ratio: f64,
    /// How many workers to rank after the chosen one.
    pub keep: usize,
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

/// A candidate with what decides about it.
#[derive(Clone, Copy)]
struct Ranked<'w> {
    worker: &'w Worker,
    cost_ms: f64,
    tie: u64,
}

/// Chooses a worker. `None` when no candidate may be used.
pub fn choose(question: &Question<'_>, cost: &Cost) -> Option<Choice> {
    let rank = |worker| Ranked {
        worker,
        cost_ms: cost.of(worker, question.prompt_tokens),
        tie: tie_break(question.seed, worker.index),
    };
    let bound = question.workers.iter().find(|worker| worker.is_bound());
    let usable = |worker: &&Worker| worker.is_candidate();
    let free = |worker: &&Worker| usable(worker) && !worker.is_at_limit();
    let mut ranked: Vec<Ranked<'_>> = question.workers.iter().filter(free).map(rank).collect();
    if ranked.is_empty() {
        ranked = question.workers.iter().filter(usable).map(rank).collect();
    }

    let pinned = bound.filter(|worker| question.pinned && worker.is_candidate());
    let (target, why) = if let Some(worker) = pinned {
        (rank(worker), Why::Bound)
    } else {
        let best = ranked.iter().copied().min_by(Ranked::order)?;
        let staying = bound.and_then(|bound| ranked.iter().copied().find(|ranked| ranked.worker.index == bound.index));
        match (staying, bound) {
            (Some(staying), _) => {
                let margin = question.margin_ms.max(question.margin_ratio * staying.cost_ms);
                if best.cost_ms + margin < staying.cost_ms {
                    (best, Why::MovedCheaper { by_ms: staying.cost_ms - best.cost_ms })
                } else {
                    (staying, Why::Bound)
                }
            }
            (None, Some(bound)) => (best, Why::MovedLost(Lost::of(bound))),
            (None, None) => (best, Why::of_unbound(best.worker, question.prompt_tokens)),
        }
    };

    ranked.retain(|ranked| ranked.worker.index != target.worker.index);
    keep_best(&mut ranked, question.keep);
    Some(Choice {
        target: target.worker.index,
        cost_ms: target.cost_ms,
        others: ranked.iter().map(|ranked| (ranked.worker.index, ranked.cost_ms)).collect(),
        why,
    })
}

/// Leaves the `count` best, in order. A full sort of a large fleet would cost more than everything else here.
fn keep_best(ranked: &mut Vec<Ranked<'_>>, count: usize) {
    if let Some(last) = count.checked_sub(1)
        && last < ranked.len()
    {
        ranked.select_nth_unstable_by(last, Ranked::order);
    }
    ranked.truncate(count);
    ranked.sort_unstable_by(Ranked::order);
}

/// Weight of a worker for a seed (rendezvous hashing): each gateway ranks equal workers alike without talking to the
/// others, and a worker that comes or goes moves only its own share.
fn tie_break(seed: u64, index: u32) -> u64 {
    scramble(seed ^ scramble(u64::from(index)))
}

/// SplitMix64's step: every bit of the input reaches every bit of the output.
fn scramble(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

// === impl Ranked ===

impl Ranked<'_> {
    /// Cheaper first, then fewer in flight, then the higher weight.
    fn order(left: &Ranked<'_>, right: &Ranked<'_>) -> Ordering {
        (left.cost_ms.total_cmp(&right.cost_ms))
            .then_with(|| left.worker.in_flight.cmp(&right.worker.in_flight))
            .then_with(|| right.tie.cmp(&left.tie))
            .then_with(|| left.worker.index.cmp(&right.worker.index))
    }
}

// === impl Why ===

impl Why {
    fn of_unbound(worker: &Worker, prompt: u64) -> Why {
        match worker.cached_tokens.min(prompt) {
            0 => Why::LeastCost,
            cached => Why::Cached { cached, prompt },
        }
    }
}

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
    fn of(worker: &Worker) -> Lost {
        if worker.is_excluded() {
            Lost::Excluded
        } else if worker.state != WorkerState::Ready {
            Lost::State(worker.state)
        } else {
            Lost::AtLimit
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
