//! The blocks of one worker as they outlive a process: in the order of use, each with the block before it in its chain.

use super::lru::{Blocks, Node};
use super::table::{NONE, Table};

/// A block, in a list that goes from the most to the least recently used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedBlock {
    /// Its hash.
    pub hash: u64,
    /// The position of the block before it in its chain, which is a lower one; none for the first of a chain.
    pub parent: Option<u32>,
}

/// A copy of one worker's blocks, quickly made; [`list`](Self::list) does the slow part, away from the index.
#[derive(Debug)]
pub struct CopiedBlocks {
    nodes: Vec<Node>,
    newest: u32,
    len: usize,
}

// === impl CopiedBlocks ===

impl CopiedBlocks {
    /// Blocks in it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The most recently used blocks, at most `most`. The block before a listed one is always listed.
    pub fn list(&self, most: usize) -> Vec<SavedBlock> {
        let mut positions = vec![NONE; self.nodes.len()];
        let mut list = Vec::with_capacity(self.len.min(most));
        let mut at = self.newest;
        while let Some(node) = self.nodes.get(at as usize)
            && list.len() < most.min(self.len)
        {
            let parent = positions.get(node.parent as usize).copied().filter(|&position| position != NONE);
            if let (Some(slot), Ok(position)) = (positions.get_mut(at as usize), u32::try_from(list.len())) {
                *slot = position;
            }
            list.push(SavedBlock { hash: node.hash, parent });
            at = node.older;
        }
        list
    }
}

impl Blocks {
    pub fn copy(&self) -> CopiedBlocks {
        CopiedBlocks { nodes: self.nodes.clone(), newest: self.newest, len: self.len() }
    }

    /// Blocks as listed, as many as fit. What follows a block that is missing, repeated or out of order is left out.
    pub fn restored(capacity: usize, list: &[SavedBlock]) -> Self {
        let mut blocks = Self::new(capacity);
        let mut places: Vec<u32> = Vec::with_capacity(list.len());
        let mut nodes: Vec<Node> = Vec::new();
        nodes.reserve_exact(list.len().min(blocks.capacity()));
        let mut table = Table::default();
        for block in list {
            let parent = match block.parent {
                None => Some(NONE),
                Some(position) => places.get(position as usize).copied().filter(|&place| place != NONE),
            };
            let known = table.find(block.hash, |place| nodes.get(place as usize).is_some_and(|n| n.hash == block.hash));
            let place = match (parent, u32::try_from(nodes.len())) {
                (Some(parent), Ok(place)) if known.is_none() && nodes.len() < blocks.capacity() => {
                    let newer = place.checked_sub(1).unwrap_or(NONE);
                    nodes.push(Node { hash: block.hash, older: NONE, newer, parent, children: 0 });
                    if let Some(node) = nodes.get_mut(newer as usize) {
                        node.older = place;
                    }
                    if let Some(node) = nodes.get_mut(parent as usize) {
                        node.children += 1;
                    }
                    table.insert(block.hash, place, |other| nodes.get(other as usize).map_or(0, |node| node.hash));
                    place
                }
                _ => NONE,
            };
            places.push(place);
        }
        table.shrink(|other| nodes.get(other as usize).map_or(0, |node| node.hash));
        blocks.take(nodes, table);
        blocks
    }
}
