//! How two policies differ on the same turns, with confidence intervals from a paired bootstrap: whole conversations are drawn
//! anew, for the turns of one depend on each other, and each is compared with itself under the other policy.

use super::results::TurnResult;
use super::virtual_time::Dice;
use super::workload::Workload;
use hashbrown::HashMap;
use serde::Serialize;

/// Share of the resamples within an interval.
const CONFIDENCE: f64 = 0.95;

/// A difference, and the interval that it lies in for 95 % of the resamples.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Interval {
    /// As measured.
    pub difference: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// What one policy has more than another.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// The policy.
    pub policy: String,
    /// The one that it is compared with.
    pub against: String,
    /// Turns that both served.
    pub turns: u64,
    /// Conversations among which they are drawn.
    pub conversations: u64,
    /// Hit ratio.
    pub hit_ratio: Interval,
    /// TTFT, ms: mean and quantiles.
    pub ttft_ms: [(&'static str, Interval); 4],
}

/// One turn under both policies.
struct Pair {
    cluster: usize,
    prompt: [f64; 2],
    cached: [f64; 2],
    ttft: [f64; 2],
}

impl Interval {
    /// True when zero lies outside.
    pub fn is_clear(&self) -> bool {
        self.low > 0.0 || self.high < 0.0
    }
}

impl Difference {
    /// Compares `other` with `first` over the turns that count and both served.
    pub fn new(
        (name, other): (&str, &[TurnResult]),
        (against, first): (&str, &[TurnResult]),
        work: &Workload,
        counts: impl Fn(usize) -> bool,
        (resamples, seed): (u32, u64),
    ) -> Self {
        let mut clusters: HashMap<u32, usize> = HashMap::new();
        let mut pairs = Vec::new();
        for (number, (a, b)) in first.iter().zip(other).enumerate().filter(|(number, _)| counts(*number)) {
            let (Some(ttft_a), Some(ttft_b)) = (a.ttft_ms(), b.ttft_ms()) else { continue };
            let next = clusters.len();
            pairs.push(Pair {
                cluster: *clusters.entry(work.cluster(number)).or_insert(next),
                prompt: [a.prompt_tokens as f64, b.prompt_tokens as f64],
                cached: [a.cached_tokens as f64, b.cached_tokens as f64],
                ttft: [ttft_a, ttft_b],
            });
        }
        let orders = [sorted(&pairs, 0), sorted(&pairs, 1)];
        let measured = differences(&pairs, &orders, &vec![1; clusters.len()]);
        let mut dice = Dice::new(seed);
        let mut drawn: Vec<[f64; 5]> = Vec::with_capacity(resamples as usize);
        let mut weights = vec![0_u32; clusters.len()];
        for _ in 0..resamples {
            weights.fill(0);
            for _ in 0..clusters.len() {
                let one = usize::try_from(dice.below(clusters.len() as u64)).unwrap_or_default();
                if let Some(weight) = weights.get_mut(one) {
                    *weight += 1;
                }
            }
            drawn.push(differences(&pairs, &orders, &weights));
        }
        let interval = |of: usize| {
            let at = |values: &[f64; 5]| values.get(of).copied().unwrap_or_default();
            let mut values: Vec<f64> = drawn.iter().map(at).collect();
            values.sort_by(f64::total_cmp);
            let rank = |share: f64| {
                let rank = (share * values.len() as f64).ceil() as usize;
                values.get(rank.clamp(1, values.len().max(1)) - 1).copied().unwrap_or_default()
            };
            let tail = (1.0 - CONFIDENCE) / 2.0;
            Interval { difference: at(&measured), low: rank(tail), high: rank(1.0 - tail) }
        };
        Self {
            policy: name.to_owned(),
            against: against.to_owned(),
            turns: pairs.len() as u64,
            conversations: clusters.len() as u64,
            hit_ratio: interval(0),
            ttft_ms: [("mean", interval(1)), ("p50", interval(2)), ("p90", interval(3)), ("p99", interval(4))],
        }
    }
}

/// The pairs in order of one policy's TTFT.
fn sorted(pairs: &[Pair], policy: usize) -> Vec<usize> {
    let ttft = |place: &usize| pairs.get(*place).and_then(|pair| pair.ttft.get(policy)).copied().unwrap_or_default();
    let mut order: Vec<usize> = (0..pairs.len()).collect();
    order.sort_by(|a, b| ttft(a).total_cmp(&ttft(b)));
    order
}

/// Hit ratio, mean, p50, p90 and p99 of the second policy less those of the first, each conversation so many times.
fn differences(pairs: &[Pair], orders: &[Vec<usize>; 2], weights: &[u32]) -> [f64; 5] {
    let weight = |pair: &Pair| f64::from(weights.get(pair.cluster).copied().unwrap_or_default());
    let value = |policy: usize, order: &[usize]| {
        let of = |values: &[f64; 2]| values.get(policy).copied().unwrap_or_default();
        let sum = |of: &dyn Fn(&Pair) -> f64| pairs.iter().map(|pair| weight(pair) * of(pair)).sum::<f64>();
        let all = sum(&|_| 1.0);
        let prompt = sum(&|pair| of(&pair.prompt));
        let hit = if prompt > 0.0 { sum(&|pair| of(&pair.cached)) / prompt } else { 0.0 };
        let mean = if all > 0.0 { sum(&|pair| of(&pair.ttft)) / all } else { 0.0 };
        let mut ranks = [(0.5, 0.0), (0.9, 0.0), (0.99, 0.0)];
        let mut open = ranks.iter_mut().peekable();
        let mut seen = 0.0;
        for pair in order.iter().filter_map(|place| pairs.get(*place)) {
            seen += weight(pair);
            while let Some((_, value)) = open.next_if(|(share, _)| seen > 0.0 && seen >= *share * all) {
                *value = of(&pair.ttft);
            }
        }
        let [(_, p50), (_, p90), (_, p99)] = ranks;
        [hit, mean, p50, p90, p99]
    };
    let [first, second] = [(0, &orders[0]), (1, &orders[1])].map(|(policy, order)| value(policy, order));
    std::array::from_fn(|n| second.get(n).copied().unwrap_or_default() - first.get(n).copied().unwrap_or_default())
}

#[cfg(test)]
#[path = "compare_tests.rs"]
mod tests;
