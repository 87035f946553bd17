//! The decision itself: plain numbers in, plain numbers out.

use std::cmp::Reverse;

/// A worker that may take the turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// Its index.
    pub index: u32,
    /// Requests there.
    pub load: u64,
    /// Tokens of the prompt that are cached there.
    pub hit: u64,
    /// Whether another turn would queue there.
    pub at_limit: bool,
}

/// The best hit, and the workers within `tolerance` tokens of it, the least loaded first. Full workers count only where all
/// are full.
pub fn choose(mut candidates: Vec<Candidate>, tolerance: u64) -> (u64, Vec<Candidate>) {
    if candidates.iter().any(|worker| !worker.at_limit) {
        candidates.retain(|worker| !worker.at_limit);
    }
    let best = candidates.iter().map(|worker| worker.hit).max().unwrap_or(0);
    candidates.retain(|worker| worker.hit.saturating_add(tolerance) >= best);
    candidates.sort_by_key(|worker| (worker.load, Reverse(worker.hit), worker.index));
    (best, candidates)
}
