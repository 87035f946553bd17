//! The least loaded of the workers that have nearly as much of the prompt cached as the best of them.

mod choose;

use choose::{Candidate, choose};
use turnstile_policy::{Decision, Policy, Route, Setup, Turn, Worker};

/// Workers named besides the target.
const MOST_FALLBACKS: usize = 3;

/// The plugin's `config` table.
#[derive(Debug, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Share of the prompt that a worker may have less than the best and still be taken, percent.
    tolerance_percent: u64,
    /// The same for turns with a priority above 0: a short queue matters more to them than a warm cache.
    urgent_tolerance_percent: u64,
}

/// The policy.
pub struct WarmBalance {
    options: Options,
}

impl Default for Options {
    fn default() -> Self {
        Options { tolerance_percent: 10, urgent_tolerance_percent: 50 }
    }
}

impl Policy for WarmBalance {
    type Options = Options;

    fn new(options: Options, _: &mut Setup<'_>) -> Result<Self, String> {
        let percents = [
            ("tolerance_percent", options.tolerance_percent),
            ("urgent_tolerance_percent", options.urgent_tolerance_percent),
        ];
        match percents.into_iter().find(|(_, percent)| *percent > 100) {
            Some((name, _)) => Err(format!("option `{name}`: must be 0 to 100")),
            None => Ok(WarmBalance { options }),
        }
    }
}

impl Route for WarmBalance {
    fn route(&mut self, turn: &Turn<'_>) -> Decision {
        let Some(workers) = turn.workers() else { return Decision::none() };
        let prompt_tokens = turn.prompt_tokens().unwrap_or(0);
        let urgent = turn.priority().unwrap_or(0) > 0;
        let percent = if urgent { self.options.urgent_tolerance_percent } else { self.options.tolerance_percent };
        let tolerance = prompt_tokens.saturating_mul(percent) / 100;
        let candidates = workers.iter().filter(Worker::is_candidate).map(|worker| Candidate {
            index: worker.index,
            load: (u64::from(worker.running) + u64::from(worker.waiting)).max(worker.in_flight.into()),
            hit: worker.cached_tokens.min(prompt_tokens),
            at_limit: worker.is_at_limit(),
        });
        let (best, warm) = choose(candidates.collect(), tolerance);
        let [target, others @ ..] = warm.as_slice() else { return Decision::none() };
        let count = warm.len();
        Decision::none()
            .target(target.index)
            .fallbacks(others.iter().take(MOST_FALLBACKS).map(|worker| worker.index))
            .reason(format!("least loaded of {count} within {tolerance} tokens of the best hit {best}"))
            .note("load", target.load.to_string())
    }
}

turnstile_policy::route!(WarmBalance);

#[cfg(test)]
mod tests;
