//! The blocks of all prompts of a log, each once, with the block before it.

use hashbrown::HashMap;
use turnstile_fleet::cost::mix;

/// No block.
pub const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Block {
    hash: u64,
    parent: u32,
    /// Blocks up to this one.
    depth: u32,
}

/// The blocks.
#[derive(Debug, Default)]
pub struct Blocks {
    list: Vec<Block>,
    by_hash: HashMap<u64, u32>,
}

impl Blocks {
    /// The block with a hash.
    pub fn find(&self, hash: u64) -> Option<u32> {
        self.by_hash.get(&hash).copied()
    }

    /// A block that is known to have `depth - 1` others before it, and nothing more.
    pub fn unknown(&mut self, hash: u64, depth: u32) -> u32 {
        self.add(Block { hash, parent: NONE, depth })
    }

    /// The block with this hash behind another; a new one if there is none.
    pub fn child(&mut self, parent: u32, hash: u64) -> u32 {
        // A hash is of the whole chain, so whoever has it has the same blocks before it.
        match self.find(hash) {
            Some(known) => known,
            None => self.add(Block { hash, parent, depth: self.depth(parent) + 1 }),
        }
    }

    fn add(&mut self, block: Block) -> u32 {
        let place = u32::try_from(self.list.len()).unwrap_or(NONE);
        self.list.push(block);
        self.by_hash.insert(block.hash, place);
        place
    }

    /// Blocks up to this one.
    pub fn depth(&self, block: u32) -> u32 {
        self.get(block).map_or(0, |block| block.depth)
    }

    /// Its hash; 0 for none.
    pub fn hash(&self, block: u32) -> u64 {
        self.get(block).map_or(0, |block| block.hash)
    }

    fn get(&self, block: u32) -> Option<Block> {
        self.list.get(block as usize).copied()
    }

    /// This block and those before it, the last first, as far as they are known.
    pub fn path(&self, block: u32) -> impl Iterator<Item = u32> {
        let known = |block: u32| (block != NONE).then_some(block);
        std::iter::successors(known(block), move |block| self.get(*block).and_then(|block| known(block.parent)))
    }

    /// The hashes from the first block to this one. Those that are not known are made up, alike for every prompt that has them.
    pub fn chain(&self, block: u32) -> Vec<u64> {
        let mut chain: Vec<u64> = self.path(block).map(|block| self.hash(block)).collect();
        let missing = (self.depth(block) as usize).saturating_sub(chain.len());
        let first = chain.last().copied().unwrap_or_default();
        chain.extend((1..=missing as u64).map(|n| mix(first ^ mix(n))));
        chain.reverse();
        chain
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_stands_once_and_knows_what_is_before_it() {
        let mut blocks = Blocks::default();
        let a = blocks.child(NONE, 1);
        let b = blocks.child(a, 2);
        let c = blocks.child(b, 3);
        assert_eq!(blocks.child(a, 2), b);
        assert_eq!(blocks.list.len(), 3);
        assert_eq!(blocks.chain(c), [1, 2, 3]);
        assert_eq!(blocks.chain(NONE), [0; 0]);
        assert_eq!((blocks.depth(c), blocks.depth(NONE)), (3, 0));
        assert_eq!(blocks.path(c).collect::<Vec<_>>(), [c, b, a]);
    }

    #[test]
    fn what_is_missing_is_made_up_alike_for_all() {
        let mut blocks = Blocks::default();
        let base = blocks.unknown(9, 4);
        let x = blocks.child(base, 10);
        let y = blocks.child(base, 11);
        let (x, y) = (blocks.chain(x), blocks.chain(y));
        assert_eq!((x.len(), y.len()), (5, 5));
        assert_eq!(x.get(..4), y.get(..4));
        assert_eq!(x.get(3), Some(&9));
    }
}
