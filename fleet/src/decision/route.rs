//! From costs to a worker: who may take the turn, whether the session stays, who comes next.

use std::cmp::Ordering;

use super::{DecideOptions, Decision, RouteDecision, RouteInput, Why};
use crate::cost::rendezvous;
use crate::ids::WorkerId;
use crate::worker::{WorkerState, WorkerView};

/// A worker that may take the turn, with what decides about it.
#[derive(Debug, Clone, Copy)]
struct Ranked {
    worker: WorkerId,
    cost_ms: f64,
    at_limit: bool,
    in_flight: u32,
    weight: u64,
    cached_tokens: u64,
}

/// Chooses the worker. Ready workers that are not excluded may take the turn, and among them those below their limit if there
/// are any. The cheapest wins; the session's worker stays unless another is cheaper by a margin; a streaming session stays as
/// long as its worker answers.
pub fn choose(input: &RouteInput<'_>, options: &DecideOptions) -> RouteDecision {
    let mut ranked = rank(input, options, &[]);
    decide_among(&mut ranked, input, options)
}

fn rank(input: &RouteInput<'_>, options: &DecideOptions, excluded: &[WorkerId]) -> Vec<Ranked> {
    let mut ranked: Vec<Ranked> = input
        .candidates
        .iter()
        .filter(|(worker, _)| worker.is_ready())
        .filter(|(worker, _)| !input.excluded.contains(&worker.index) && !excluded.contains(&worker.index))
        .map(|(worker, cached_tokens)| Ranked {
            worker: worker.index,
            cost_ms: options.cost.cost_ms(worker, input.prompt_tokens, cached_tokens),
            at_limit: worker.at_limit(&options.limits),
            in_flight: worker.in_flight,
            weight: rendezvous(input.affinity_hash, worker.index),
            cached_tokens: cached_tokens.min(input.prompt_tokens),
        })
        .collect();
    ranked.sort_unstable_by(Ranked::order);
    ranked
}

fn decide_among(ranked: &mut [Ranked], input: &RouteInput<'_>, options: &DecideOptions) -> RouteDecision {
    if let Some(pinned) = input.pinned() {
        let score = ranked.iter().find(|one| one.worker == pinned).map(|one| (pinned, one.cost_ms));
        // No fallback: elsewhere the turn's delta would be read as the whole conversation.
        return RouteDecision {
            target: Some(pinned),
            fallbacks: Some(Vec::new()),
            scores: Some(score.into_iter().collect()),
            exclude: None,
            reason: Some("bound".to_owned()),
            why: Why::Pinned,
        };
    }
    let Some(best) = ranked.first().copied() else {
        return RouteDecision { fallbacks: Some(Vec::new()), scores: Some(Vec::new()), ..RouteDecision::default() };
    };
    let usable = |one: &&Ranked| best.at_limit || !one.at_limit;
    let (target, why, reason) = match input.bound {
        None => best.alone(input.prompt_tokens),
        Some(bound) => match ranked.iter().find(|one| one.worker == bound.worker).filter(usable) {
            Some(bound) if options.cost.worth_moving(bound.cost_ms, best.cost_ms) => {
                let by_ms = (bound.cost_ms - best.cost_ms).round();
                (best, Why::MovedCheaper, format!("moved: cheaper by {by_ms} ms"))
            }
            Some(&bound) => (bound, Why::Bound, "bound".to_owned()),
            None => (best, Why::MovedLost, format!("moved: bound worker {}", lost(input, bound.worker))),
        },
    };
    let others = || ranked.iter().filter(|one| one.worker != target.worker);
    RouteDecision {
        target: Some(target.worker),
        fallbacks: Some(others().take(options.fallbacks).map(|one| one.worker).collect()),
        scores: Some(ranked.iter().map(|one| (one.worker, one.cost_ms)).collect()),
        exclude: None,
        reason: Some(reason),
        why,
    }
}

/// Why the bound worker cannot take the turn.
fn lost(input: &RouteInput<'_>, worker: WorkerId) -> &'static str {
    match input.candidates.get(worker) {
        None => "gone",
        Some(_) if input.excluded.contains(&worker) => "excluded",
        Some(view) if view.state != WorkerState::Ready => view.state.name(),
        Some(_) => "at its limit",
    }
}

// === impl Ranked ===

impl Ranked {
    /// Below the limit first, then cheaper, then fewer in flight, then the higher weight.
    fn order(&self, other: &Self) -> Ordering {
        (self.at_limit.cmp(&other.at_limit))
            .then_with(|| self.cost_ms.total_cmp(&other.cost_ms))
            .then_with(|| self.in_flight.cmp(&other.in_flight))
            .then_with(|| other.weight.cmp(&self.weight))
            .then_with(|| self.worker.cmp(&other.worker))
    }

    fn alone(self, prompt_tokens: u64) -> (Self, Why, String) {
        match self.cached_tokens {
            0 => (self, Why::LeastCost, "least cost".to_owned()),
            cached => (self, Why::Cached, format!("cached {cached} of {prompt_tokens} tokens")),
        }
    }
}

// === impl Decision ===

impl Decision {
    /// Completes what policies wrote, with the built-in's decision where they said nothing, and keeps the rules that no policy
    /// can break: a streaming session stays on its worker, and a turn goes to nothing but a ready worker that was not
    /// excluded. Returns whether the policies' target was followed.
    pub fn settle(&mut self, builtin: &Decision, input: &RouteInput<'_>, options: &DecideOptions) -> bool {
        let wanted = self.route.target;
        self.settle_route(builtin, input, options);
        self.fill(builtin);
        wanted.is_some() && wanted == self.route.target
    }

    fn settle_route(&mut self, builtin: &Decision, input: &RouteInput<'_>, options: &DecideOptions) {
        let excluded = self.route.exclude.take().unwrap_or_default();
        let again;
        let native = if excluded.is_empty() {
            &builtin.route
        } else {
            again = decide_among(&mut rank(input, options, &excluded), input, options);
            &again
        };
        let usable = |worker: &WorkerView| {
            worker.is_ready() && !excluded.contains(&worker.index) && !input.excluded.contains(&worker.index)
        };
        let pinned = input.pinned();
        let target = match (pinned, self.route.target) {
            (Some(_), wanted) => wanted.filter(|_| wanted == pinned),
            (None, wanted) => wanted.filter(|&wanted| input.candidates.get(wanted).is_some_and(usable)),
        };
        if target.is_some() {
            self.route.why = if pinned.is_some() { Why::Pinned } else { Why::Policy };
        } else {
            self.route.target = native.target;
            self.route.why = native.why;
            self.route.reason.clone_from(&native.reason);
        }
        let mut fallbacks = Vec::new();
        if pinned.is_none() {
            // What a policy listed comes first; where it listed nothing, or nothing usable, the built-in's order.
            let wanted = self.route.fallbacks.take().unwrap_or_default();
            let natives = native.target.into_iter().chain(native.fallbacks.iter().flatten().copied());
            for worker in wanted.into_iter().chain(natives) {
                let fit = input.candidates.get(worker).is_some_and(usable);
                if fit && Some(worker) != self.route.target && !fallbacks.contains(&worker) {
                    fallbacks.push(worker);
                }
            }
        }
        self.route.fallbacks = Some(fallbacks);
        if self.route.scores.is_none() {
            self.route.scores.clone_from(&native.scores);
        }
        self.route.exclude = Some(excluded);
    }

    fn fill(&mut self, builtin: &Decision) {
        fn or<T: Clone>(mine: &mut Option<T>, other: &Option<T>) {
            if mine.is_none() {
                mine.clone_from(other);
            }
        }
        or(&mut self.route.reason, &builtin.route.reason);
        or(&mut self.queue.tier, &builtin.queue.tier);
        or(&mut self.queue.head_start_ms, &builtin.queue.head_start_ms);
        or(&mut self.queue.deadline_ms, &builtin.queue.deadline_ms);
        or(&mut self.queue.flow, &builtin.queue.flow);
        or(&mut self.session.action, &builtin.session.action);
        or(&mut self.session.ttl_ms, &builtin.session.ttl_ms);
        or(&mut self.session.mode, &builtin.session.mode);
        or(&mut self.prefill, &builtin.prefill);
        or(&mut self.engine_priority, &builtin.engine_priority);
    }
}
