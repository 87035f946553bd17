//! The prefix index: which blocks of which prompts a worker is believed to have in its KV cache.
//!
//! A prompt is a chain of block hashes, each of which stands for everything up to its block. For each worker the index keeps a
//! bounded set of them, as large as the worker's KV cache, and ages it as the engine does: least recently used first, and in a
//! chain the tail before the head.
//!
//! Invariant: **a block is there only if the block before it in its chain is there**, for a block is always less recently used
//! than the one before it. So how much of a chain a worker has is found by binary search.

mod lru;
mod saved;
mod table;

use std::collections::BTreeMap;

use crate::ids::WorkerId;
use lru::Blocks;

pub use lru::MAX_BYTES_PER_BLOCK;
pub use saved::{CopiedBlocks, SavedBlock};

/// Blocks of all workers.
#[derive(Debug, Default)]
pub struct PrefixIndex {
    workers: BTreeMap<WorkerId, Blocks>,
    default_capacity: usize,
}

// === impl PrefixIndex ===

impl PrefixIndex {
    /// An empty index. `default_capacity`: blocks of a worker whose own bound is not set.
    pub fn new(default_capacity: usize) -> Self {
        Self { workers: BTreeMap::new(), default_capacity }
    }

    /// Blocks that fit a worker's KV cache: its tokens, at so many bytes of prompt each, in blocks of `block_bytes`; at most
    /// `most`. With the capacity unknown (0), `most`.
    pub fn capacity_for(kv_capacity_tokens: u64, bytes_per_token: f64, block_bytes: usize, most: usize) -> usize {
        if kv_capacity_tokens == 0 || block_bytes == 0 || bytes_per_token.is_nan() || bytes_per_token <= 0.0 {
            return most;
        }
        // `as` saturates.
        ((kv_capacity_tokens as f64 * bytes_per_token / block_bytes as f64) as usize).clamp(1, most.max(1))
    }

    /// Bounds the blocks of a worker; what is over goes, least recently used first.
    pub fn set_capacity(&mut self, worker: WorkerId, blocks: usize) {
        self.blocks(worker).set_capacity(blocks);
    }

    /// The worker gets this prompt, so it will have all of its blocks. Of a chain longer than the worker's bound, the head is kept.
    pub fn insert(&mut self, worker: WorkerId, chain: &[u64]) {
        self.blocks(worker).insert(chain);
    }

    /// Blocks at the head of the chain that the worker is believed to have.
    pub fn matched(&self, worker: WorkerId, chain: &[u64]) -> usize {
        self.workers.get(&worker).map_or(0, |blocks| blocks.matched(chain, 0))
    }

    /// The same for many workers; `out` is emptied first.
    pub fn matched_all(&self, workers: impl IntoIterator<Item = WorkerId>, chain: &[u64], out: &mut Vec<usize>) {
        out.clear();
        let mut hint = 0;
        for worker in workers {
            let matched = self.workers.get(&worker).map_or(0, |blocks| blocks.matched(chain, hint));
            // The one worker that has the whole conversation says nothing of the others.
            if matched < chain.len() {
                hint = matched;
            }
            out.push(matched);
        }
    }

    /// A worker has told how much of a turn's prompt was cached when it began: `reported_blocks` at the head of the chain. What
    /// the index believed beyond that is gone, with all that hung on it. Returns how many blocks were dropped.
    ///
    /// The prompt itself is in the worker's cache by then: [`insert`](Self::insert) it again if the turn was finished. What
    /// stays corrected are the other prompts that shared those blocks.
    pub fn correct(&mut self, worker: WorkerId, chain: &[u64], reported_blocks: usize) -> usize {
        let Some(blocks) = self.workers.get_mut(&worker) else { return 0 };
        let Some(&first_lost) = chain.get(reported_blocks) else { return 0 };
        blocks.remove_subtree(first_lost)
    }

    /// The worker has nothing: it restarted, flushed its cache, or is gone.
    pub fn forget(&mut self, worker: WorkerId) {
        self.workers.remove(&worker);
    }

    /// A copy of what a worker is believed to have, for the snapshot.
    pub fn copy_of(&self, worker: WorkerId) -> Option<CopiedBlocks> {
        self.workers.get(&worker).map(Blocks::copy)
    }

    /// Takes over a worker's blocks from a snapshot, in place of what is there.
    pub fn restore(&mut self, worker: WorkerId, list: &[SavedBlock]) {
        let capacity = self.workers.get(&worker).map_or(self.default_capacity, Blocks::capacity);
        self.workers.insert(worker, Blocks::restored(capacity, list));
    }

    /// Blocks of one worker.
    pub fn len_of(&self, worker: WorkerId) -> usize {
        self.workers.get(&worker).map_or(0, Blocks::len)
    }

    /// Blocks of all workers.
    pub fn len(&self) -> usize {
        self.workers.values().map(Blocks::len).sum()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.workers.values().all(|blocks| blocks.len() == 0)
    }

    /// Memory held by the blocks of all workers, bytes. At most [`MAX_BYTES_PER_BLOCK`] for each block of a worker's bound.
    pub fn memory_bytes(&self) -> usize {
        self.workers.values().map(Blocks::memory_bytes).sum()
    }

    fn blocks(&mut self, worker: WorkerId) -> &mut Blocks {
        let capacity = self.default_capacity;
        self.workers.entry(worker).or_insert_with(|| Blocks::new(capacity))
    }
}

#[cfg(test)]
#[path = "index_tests.rs"]
mod tests;
