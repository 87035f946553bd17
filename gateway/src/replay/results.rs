//! What a replay came to under one policy.

use super::workload::{Urgency, Workload};
use hashbrown::HashMap;
use serde::Serialize;
use std::collections::BTreeMap;

/// One turn. Times are µs after the first arrival.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TurnResult {
    /// Its worker, by place; none if it got none.
    pub worker: Option<u32>,
    /// When it came.
    pub arrived_us: u64,
    /// When it was sent to its worker.
    pub placed_us: u64,
    /// When its first token came.
    pub first_us: Option<u64>,
    /// When it ended.
    pub ended_us: u64,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Of these, cached.
    pub cached_tokens: u64,
    /// Of these, what the gateway expected.
    pub predicted_cached: u64,
    /// Output tokens.
    pub completion_tokens: u64,
    /// Why it was not served.
    pub refused: Option<&'static str>,
}

/// Mean and quantiles (nearest rank).
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Spread {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// Nine of ten are not above it.
    pub p90: f64,
    /// 99 of 100 are not above it.
    pub p99: f64,
}

/// How evenly something is spread over the workers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Balance {
    /// Standard deviation over mean.
    pub cov: f64,
    /// Largest over mean.
    pub max_over_mean: f64,
}

/// One worker's part of the turns that count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct WorkerShare {
    /// Turns.
    pub turns: u64,
    /// Prompt tokens that were not cached.
    pub prefilled_tokens: u64,
    /// Seconds that turns spent there, all together.
    pub turn_seconds: f64,
}

/// The sums of a replay, over the turns that count.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// The policy.
    pub policy: String,
    /// Turns that were served.
    pub served: u64,
    /// Turns that were not, by cause.
    pub refused: BTreeMap<&'static str, u64>,
    /// Prompt tokens.
    pub prompt_tokens: u64,
    /// Of these, cached.
    pub cached_tokens: u64,
    /// Cached over prompt tokens.
    pub hit_ratio: f64,
    /// The same of a cache without bound that all workers share.
    pub ideal_hit_ratio: f64,
    /// Prompt tokens that were computed.
    pub prefilled_tokens: u64,
    /// Output tokens.
    pub completion_tokens: u64,
    /// How far the gateway's expectation of cached tokens was off, tokens in the mean.
    pub prediction_error_tokens: f64,
    /// From arrival to first token, ms.
    pub ttft_ms: Spread,
    /// The same by urgency, of those that there are.
    pub ttft_ms_by_urgency: BTreeMap<&'static str, Spread>,
    /// In the gateway's queue, ms.
    pub queue_ms: Spread,
    /// Balance of computed prompt tokens.
    pub prefilled_balance: Balance,
    /// Balance of the time that turns spent on workers.
    pub time_balance: Balance,
    /// Sessions with more than one turn.
    pub sessions: u64,
    /// Of these, such as were on more than one worker.
    pub sessions_moved: u64,
    /// Turns on another worker than the one before in their session.
    pub moves: u64,
    /// From the first arrival to the last end, warm-up included, s.
    pub makespan_s: f64,
    /// The workers, in order.
    pub workers: Vec<WorkerShare>,
}

impl Urgency {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raised => "raised",
            Self::Ordinary => "ordinary",
            Self::Lowered => "lowered",
        }
    }
}

// === impl TurnResult ===

impl TurnResult {
    /// From arrival to first token, ms.
    pub fn ttft_ms(&self) -> Option<f64> {
        self.first_us.map(|first| first.saturating_sub(self.arrived_us) as f64 / 1e3)
    }
}

// === impl Spread ===

impl Spread {
    /// Of these values; zeros without any.
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let rank = |share: f64| {
            let rank = (share * values.len() as f64).ceil() as usize;
            values.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
        };
        let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
        Self { mean, p50: rank(0.5), p90: rank(0.9), p99: rank(0.99) }
    }
}

// === impl Balance ===

impl Balance {
    /// Of these values; zeros without any.
    pub fn of(values: &[f64]) -> Self {
        let count = values.len().max(1) as f64;
        let mean = values.iter().sum::<f64>() / count;
        if mean <= 0.0 {
            return Self::default();
        }
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
        let most = values.iter().copied().fold(0.0, f64::max);
        Self { cov: variance.sqrt() / mean, max_over_mean: most / mean }
    }
}

// === impl Summary ===

impl Summary {
    /// Sums up. `counts` says of a turn whether it counts.
    pub fn new(
        policy: &str,
        work: &Workload,
        results: &[TurnResult],
        workers: usize,
        counts: impl Fn(usize) -> bool,
    ) -> Self {
        let counted = || results.iter().enumerate().filter(|(number, _)| counts(*number));
        let served = || counted().filter(|(_, result)| result.first_us.is_some());
        let sum = |of: fn(&TurnResult) -> u64| served().map(|(_, result)| of(result)).sum::<u64>();
        let mut refused = BTreeMap::new();
        for why in counted().filter_map(|(_, result)| result.refused) {
            *refused.entry(why).or_insert(0) += 1;
        }
        let (prompt, cached) = (sum(|r| r.prompt_tokens), sum(|r| r.cached_tokens));
        let ideal: u64 =
            served().filter_map(|(number, _)| work.prompts.list.get(number)).map(|prompt| prompt.ideal_cached).sum();
        let ttft = |wanted: Option<Urgency>| {
            let of = served().filter(|(number, _)| wanted.is_none_or(|wanted| work.urgency(*number) == wanted));
            of.filter_map(|(_, result)| result.ttft_ms()).collect::<Vec<f64>>()
        };
        let by_urgency = [Urgency::Raised, Urgency::Ordinary, Urgency::Lowered]
            .into_iter()
            .map(|urgency| (urgency.name(), ttft(Some(urgency))))
            .filter(|(_, values)| !values.is_empty())
            .map(|(name, values)| (name, Spread::of(values)))
            .collect();
        let mut shares = vec![WorkerShare::default(); workers];
        for (_, result) in served() {
            let place = result.worker.and_then(|worker| usize::try_from(worker).ok());
            if let Some(share) = place.and_then(|place| shares.get_mut(place)) {
                share.turns += 1;
                share.prefilled_tokens += result.prompt_tokens.saturating_sub(result.cached_tokens);
                share.turn_seconds += result.ended_us.saturating_sub(result.placed_us) as f64 / 1e6;
            }
        }
        let balance = |of: fn(&WorkerShare) -> f64| Balance::of(&shares.iter().map(of).collect::<Vec<f64>>());
        let off: u64 = sum(|r| r.predicted_cached.min(r.prompt_tokens).abs_diff(r.cached_tokens));
        let count = served().count();
        let (sessions, sessions_moved, moves) = moves(work, results, &counts);
        let share = |part: u64| if prompt == 0 { 0.0 } else { part as f64 / prompt as f64 };
        let queued = served().map(|(_, r)| r.placed_us.saturating_sub(r.arrived_us) as f64 / 1e3).collect();
        Self {
            policy: policy.to_owned(),
            served: count as u64,
            refused,
            prompt_tokens: prompt,
            cached_tokens: cached,
            hit_ratio: share(cached),
            ideal_hit_ratio: share(ideal),
            prefilled_tokens: prompt - cached,
            completion_tokens: sum(|r| r.completion_tokens),
            prediction_error_tokens: off as f64 / count.max(1) as f64,
            ttft_ms: Spread::of(ttft(None)),
            ttft_ms_by_urgency: by_urgency,
            queue_ms: Spread::of(queued),
            prefilled_balance: balance(|share| share.prefilled_tokens as f64),
            time_balance: balance(|share| share.turn_seconds),
            sessions,
            sessions_moved,
            moves,
            makespan_s: results.iter().map(|result| result.ended_us).max().unwrap_or(0) as f64 / 1e6,
            workers: shares,
        }
    }
}

/// Sessions of several turns, those that moved, and moves.
fn moves(work: &Workload, results: &[TurnResult], counts: &impl Fn(usize) -> bool) -> (u64, u64, u64) {
    let mut last: HashMap<&str, (u32, u64, u64)> = HashMap::new();
    for (number, result) in results.iter().enumerate() {
        let session = work.entry(number).and_then(|entry| entry.line.session.as_deref());
        let (Some(session), Some(worker)) = (session, result.worker) else { continue };
        let (before, turns, moved) = last.entry(session).or_insert((worker, 0, 0));
        if counts(number) {
            *turns += 1;
            *moved += u64::from(*before != worker);
        }
        *before = worker;
    }
    let several = last.values().filter(|(_, turns, _)| *turns > 1);
    several.fold((0, 0, 0), |(sessions, moved, moves), (_, _, n)| (sessions + 1, moved + u64::from(*n > 0), moves + n))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_nearest_rank() {
        let spread = Spread::of((1..=100).rev().map(f64::from).collect());
        assert_eq!(spread, Spread { mean: 50.5, p50: 50.0, p90: 90.0, p99: 99.0 });
        assert_eq!(Spread::of(vec![7.0]), Spread { mean: 7.0, p50: 7.0, p90: 7.0, p99: 7.0 });
        assert_eq!(Spread::of(vec![]), Spread::default());
    }

    #[test]
    fn balance_is_nothing_when_all_are_alike() {
        assert_eq!(Balance::of(&[3.0, 3.0]), Balance { cov: 0.0, max_over_mean: 1.0 });
        assert_eq!(Balance::of(&[0.0, 2.0]), Balance { cov: 1.0, max_over_mean: 2.0 });
        assert_eq!(Balance::of(&[0.0, 0.0]), Balance::default());
        assert_eq!(Balance::of(&[]), Balance::default());
    }
}
