//! Sends a turn to the worker that will serve it soonest, and a session back to its worker unless another is cheaper.
#![forbid(unsafe_code)]

mod choose;
mod cost;

pub use choose::{Choice, Lost, Survey, Terms, Why};
pub use cost::{Cost, Options};
use turnstile_policy::{Counter, Decision, Policy, Route, SessionMode, Setup, Turn};

/// The policy.
pub struct KvAffinity {
    cost: Cost,
    margin_ms: f64,
    margin_share: f64,
    fallbacks: usize,
    scores: usize,
    counters: Counters,
}

/// One counter for each [`Why`], and one for turns without any candidate.
struct Counters {
    bound: Counter,
    moved_cheaper: Counter,
    moved_lost: Counter,
    cached: Counter,
    least_cost: Counter,
    no_candidate: Counter,
}

// === impl KvAffinity ===

impl KvAffinity {
    fn terms(&self, turn: &Turn<'_>) -> Terms {
        Terms {
            cost: self.cost,
            prompt_tokens: turn.prompt_tokens().unwrap_or(0),
            seed: turn.affinity_hash().unwrap_or(0),
            margin_ms: self.margin_ms,
            margin_share: self.margin_share,
            others: self.fallbacks.max(self.scores.saturating_sub(1)),
        }
    }

    fn counter(&self, why: &Why) -> Counter {
        match why {
            Why::Bound => self.counters.bound,
            Why::MovedCheaper { .. } => self.counters.moved_cheaper,
            Why::MovedLost(_) => self.counters.moved_lost,
            Why::Cached { .. } => self.counters.cached,
            Why::LeastCost => self.counters.least_cost,
        }
    }
}

impl Policy for KvAffinity {
    type Options = Options;

    fn new(options: Options, setup: &mut Setup<'_>) -> Result<Self, String> {
        options.check()?;
        Ok(KvAffinity {
            cost: options.cost(),
            margin_ms: options.margin_ms,
            margin_share: options.margin_share,
            fallbacks: options.fallbacks,
            scores: options.scores,
            counters: Counters {
                bound: setup.counter("kv_affinity_bound_total"),
                moved_cheaper: setup.counter("kv_affinity_moved_cheaper_total"),
                moved_lost: setup.counter("kv_affinity_moved_lost_total"),
                cached: setup.counter("kv_affinity_cached_total"),
                least_cost: setup.counter("kv_affinity_least_cost_total"),
                no_candidate: setup.counter("kv_affinity_no_candidate_total"),
            },
        })
    }
}

impl Route for KvAffinity {
    fn route(&mut self, turn: &Turn<'_>) -> Decision {
        turn.read_ahead(&["workers.table", "request.prompt_tokens", "request.affinity_hash", "session.mode"]);
        let Some(workers) = turn.workers() else { return Decision::none() };
        let survey = Survey::of(workers.iter(), self.terms(turn));
        // The mode is worth a read only when there is something to stay with.
        let pinned = survey.has_bound() && turn.session_mode() == Some(SessionMode::Stream);
        let Some(choice) = survey.choose(pinned) else {
            turn.count(self.counters.no_candidate);
            return Decision::none();
        };
        turn.count(self.counter(&choice.why));
        let scores = std::iter::once((choice.target, choice.cost_ms)).chain(choice.others.iter().copied());
        Decision::none()
            .target(choice.target)
            .fallbacks(choice.others.iter().take(self.fallbacks).map(|(index, _)| *index))
            .scores(scores.take(self.scores))
            .reason(choice.why.to_string())
    }
}

turnstile_policy::route!(KvAffinity);

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
