//! The blocks of one worker: a set of hashes with an order of use, in few bytes.
//!
//! Nodes live in one vector and name each other by place; a hash table of places finds them. Both grow by a quarter at most, the
//! vector never beyond the bound: 24 bytes a node and 8 × 5/3 of table, a quarter of that unused at worst.

use super::table::{NONE, Table};

/// Most bytes of memory for each block of the bound, for bounds of 64 blocks and more.
pub const MAX_BYTES_PER_BLOCK: usize = 48;

/// In `older` of a node that was removed in a walk that is not over.
const REMOVED: u32 = u32::MAX - 1;
/// Places have to fit below the marks.
const MOST_BLOCKS: usize = (u32::MAX - 2) as usize;
/// Fewest nodes by which the vector grows.
const LEAST_GROWTH: usize = 16;

#[derive(Debug)]
pub(super) struct Blocks {
    capacity: usize,
    pub(super) nodes: Vec<Node>,
    places: Table,
    pub(super) newest: u32,
    oldest: u32,
    /// Head of the list of unused places, linked by `older`.
    free: u32,
}

/// A block. While it is in use, `older` and `newer` link it in the order of use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Node {
    pub hash: u64,
    pub older: u32,
    pub newer: u32,
    /// The block before it in its chain; `NONE` for the first. Always in use, always more recently used.
    pub parent: u32,
    /// Blocks that have it as their parent.
    pub children: u32,
}

// === impl Blocks ===

impl Blocks {
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity: capacity.clamp(1, MOST_BLOCKS),
            nodes: Vec::new(),
            places: Table::default(),
            newest: NONE,
            oldest: NONE,
            free: NONE,
        }
    }

    pub fn len(&self) -> usize {
        self.places.len()
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Takes over nodes that are all in use, from the most to the least recently used, and the table that finds them.
    pub(super) fn take(&mut self, nodes: Vec<Node>, places: Table) {
        self.newest = if nodes.is_empty() { NONE } else { 0 };
        self.oldest = nodes.len().checked_sub(1).and_then(|last| u32::try_from(last).ok()).unwrap_or(NONE);
        self.free = NONE;
        self.nodes = nodes;
        self.places = places;
    }

    pub fn memory_bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<Node>() + self.places.memory_bytes()
    }

    pub fn set_capacity(&mut self, capacity: usize) {
        let capacity = capacity.clamp(1, MOST_BLOCKS);
        if capacity < self.nodes.len() {
            while self.len() > capacity {
                self.evict_oldest();
            }
            self.compact();
        }
        self.capacity = capacity;
    }

    pub fn insert(&mut self, chain: &[u64]) {
        let chain = chain.get(..self.capacity).unwrap_or(chain);
        // Tail first, head last, so that the head is the most recently used. While this runs, blocks of the chain that are
        // more recent than the one at hand are fewer than the bound, so none of them is evicted. A block that was moved ahead of
        // its parent has none until the parent is moved too: so every parent stays more recent than its children, even
        // where hashes collide.
        let mut child = NONE;
        let mut first_known = true;
        for (at, &hash) in chain.iter().enumerate().rev() {
            let place = match self.find(hash) {
                Some(place) if std::mem::take(&mut first_known) && self.hangs_as(place, chain, at, child) => {
                    if child != NONE {
                        self.set_parent(child, place);
                    }
                    self.renew(place);
                    return;
                }
                Some(place) => {
                    self.set_parent(place, NONE);
                    self.unlink(place);
                    self.link_newest(place);
                    place
                }
                None => match self.add(hash) {
                    Some(place) => place,
                    None => return,
                },
            };
            if child != NONE && child != place {
                self.set_parent(child, place);
            }
            child = place;
        }
    }

    /// Whether a block and all before it hang on each other as in the chain, where it is the block `at`. `child`, which is to hang
    /// on it, is none of them: where hashes collide it could be.
    fn hangs_as(&self, place: u32, chain: &[u64], at: usize, child: u32) -> bool {
        let mut place = place;
        for hash in chain.iter().take(at + 1).rev() {
            match self.node(place) {
                Some(node) if node.hash == *hash && place != child => place = node.parent,
                _ => return false,
            }
        }
        place == NONE
    }

    /// Makes a block and all before it the most recently used, in their order. Those that stand beside each other already, as a
    /// conversation's blocks do since its last turn, are moved together.
    fn renew(&mut self, place: u32) {
        let (mut tail, mut head) = (place, place);
        while let Some(&Node { parent, newer, .. }) = self.node(head) {
            if parent != NONE && parent == newer {
                head = parent;
                continue;
            }
            self.move_to_newest(tail, head);
            (tail, head) = (parent, parent);
        }
    }

    /// Moves what stands from `tail` on up to `head`.
    fn move_to_newest(&mut self, tail: u32, head: u32) {
        let (Some(&Node { older, .. }), Some(&Node { newer, .. })) = (self.node(tail), self.node(head)) else { return };
        let Some(next) = self.node_mut(newer) else { return };
        next.older = older;
        match self.node_mut(older) {
            Some(node) => node.newer = newer,
            None => self.oldest = newer,
        }
        let newest = std::mem::replace(&mut self.newest, head);
        if let Some(node) = self.node_mut(newest) {
            node.newer = tail;
        }
        if let Some(node) = self.node_mut(tail) {
            node.older = newest;
        }
        if let Some(node) = self.node_mut(head) {
            node.newer = NONE;
        }
    }

    /// How many blocks at the head of the chain are there. `hint`: a first guess, such as what another worker has: most
    /// workers have the same short head of a chain, or nothing, and that is then seen in two steps.
    pub fn matched(&self, chain: &[u64], hint: usize) -> usize {
        let has = |at: usize| chain.get(at).is_some_and(|&hash| self.places.has_bits(hash));
        // Blocks before `known` are there; block `missing` is not, if the chain has it.
        let (mut known, mut missing) = (0, chain.len());
        let hint = hint.min(chain.len());
        if hint > 0 && has(hint - 1) {
            known = hint;
        } else if hint > 0 {
            missing = hint - 1;
        }
        // What the guess left is looked into at its beginning first, then in two halves.
        let mut middle = known;
        while known < missing {
            if has(middle) {
                known = middle + 1;
            } else {
                missing = middle;
            }
            middle = known + (missing - known) / 2;
        }
        known
    }

    /// Removes a block and all that follow it in any chain. Returns how many.
    pub fn remove_subtree(&mut self, hash: u64) -> usize {
        let Some(root) = self.find(hash) else { return 0 };
        let mut removed = Vec::new();
        // All that follow a block are less recently used than it, and parents come before children in that order.
        let mut at = root;
        let mut left = 1_u64;
        while at != NONE && left > 0 {
            let Some(node) = self.node(at).copied() else { break };
            let goes = at == root || self.node(node.parent).is_some_and(|parent| parent.older == REMOVED);
            if goes {
                left = left - 1 + u64::from(node.children);
                if at == root && node.parent != NONE {
                    self.lose_child(node.parent);
                }
                self.unlink(at);
                self.unindex(at);
                if let Some(node) = self.node_mut(at) {
                    node.older = REMOVED;
                }
                removed.push(at);
            }
            at = node.older;
        }
        for &place in &removed {
            self.release(place);
        }
        removed.len()
    }

    // === nodes ===

    fn node(&self, place: u32) -> Option<&Node> {
        self.nodes.get(place as usize)
    }

    fn node_mut(&mut self, place: u32) -> Option<&mut Node> {
        self.nodes.get_mut(place as usize)
    }

    fn find(&self, hash: u64) -> Option<u32> {
        self.places.find(hash, |place| self.node(place).is_some_and(|node| node.hash == hash))
    }

    /// A new block, the most recently used, without parent or children.
    fn add(&mut self, hash: u64) -> Option<u32> {
        if self.len() >= self.capacity {
            self.evict_oldest();
        }
        let node = Node { hash, older: NONE, newer: NONE, parent: NONE, children: 0 };
        let place = if self.free == NONE {
            if self.nodes.len() >= self.capacity {
                return None;
            }
            if self.nodes.len() == self.nodes.capacity() {
                let growth = (self.nodes.len() / 4).max(LEAST_GROWTH).min(self.capacity - self.nodes.len());
                self.nodes.reserve_exact(growth);
            }
            self.nodes.push(node);
            u32::try_from(self.nodes.len() - 1).ok()?
        } else {
            let place = self.free;
            self.free = self.node(place)?.older;
            *self.node_mut(place)? = node;
            place
        };
        let nodes = &self.nodes;
        self.places.insert(hash, place, |other| hash_in(nodes, other));
        self.link_newest(place);
        Some(place)
    }

    /// The least recently used block: nothing follows it.
    fn evict_oldest(&mut self) {
        let place = self.oldest;
        let Some(node) = self.node(place).copied() else { return };
        debug_assert_eq!(node.children, 0, "the oldest block is a tail");
        if node.parent != NONE {
            self.lose_child(node.parent);
        }
        self.unlink(place);
        self.unindex(place);
        self.release(place);
    }

    fn unindex(&mut self, place: u32) {
        let Some(hash) = self.node(place).map(|node| node.hash) else { return };
        let nodes = &self.nodes;
        self.places.remove(hash, place, |other| hash_in(nodes, other));
    }

    fn release(&mut self, place: u32) {
        let free = self.free;
        if let Some(node) = self.node_mut(place) {
            node.older = free;
            self.free = place;
        }
    }

    fn set_parent(&mut self, child: u32, parent: u32) {
        let Some(node) = self.node_mut(child) else { return };
        if node.parent == parent {
            return;
        }
        let old = std::mem::replace(&mut node.parent, parent);
        if old != NONE {
            self.lose_child(old);
        }
        if let Some(node) = self.node_mut(parent) {
            node.children += 1;
        }
    }

    fn lose_child(&mut self, parent: u32) {
        if let Some(node) = self.node_mut(parent) {
            node.children = node.children.saturating_sub(1);
        }
    }

    // === order of use ===

    fn link_newest(&mut self, place: u32) {
        let newest = std::mem::replace(&mut self.newest, place);
        if let Some(node) = self.node_mut(place) {
            node.older = newest;
            node.newer = NONE;
        }
        match self.node_mut(newest) {
            Some(node) => node.newer = place,
            None => self.oldest = place,
        }
    }

    fn unlink(&mut self, place: u32) {
        let Some(&Node { older, newer, .. }) = self.node(place) else { return };
        match self.node_mut(newer) {
            Some(node) => node.older = older,
            None => self.newest = older,
        }
        match self.node_mut(older) {
            Some(node) => node.newer = newer,
            None => self.oldest = newer,
        }
    }

    /// Rebuilds with the nodes in use only, so that memory follows the bound.
    fn compact(&mut self) {
        let mut order = Vec::with_capacity(self.len());
        let mut at = self.oldest;
        while let Some(node) = self.node(at) {
            order.push(at);
            at = node.newer;
        }
        let mut renamed = vec![NONE; self.nodes.len()];
        for (new, &old) in order.iter().enumerate() {
            if let (Some(slot), Ok(new)) = (renamed.get_mut(old as usize), u32::try_from(new)) {
                *slot = new;
            }
        }
        let rename = |place: u32| renamed.get(place as usize).copied().unwrap_or(NONE);
        let nodes: Vec<Node> = order
            .iter()
            .filter_map(|&old| self.node(old))
            .map(|node| Node {
                older: rename(node.older),
                newer: rename(node.newer),
                parent: rename(node.parent),
                ..*node
            })
            .collect();
        let mut places = Table::default();
        for (place, node) in (0_u32..).zip(&nodes) {
            places.insert(node.hash, place, |other| hash_in(&nodes, other));
        }
        places.shrink(|other| hash_in(&nodes, other));
        self.newest = rename(self.newest);
        self.oldest = rename(self.oldest);
        self.free = NONE;
        self.places = places;
        self.nodes = nodes;
    }

    /// Asserts what must always hold.
    #[cfg(test)]
    pub fn check(&self) {
        let mut seen = 0;
        let mut children = vec![0_u32; self.nodes.len()];
        let mut newer = NONE;
        let mut at = self.newest;
        let mut in_use = vec![false; self.nodes.len()];
        while at != NONE {
            let node = self.nodes[at as usize];
            assert_eq!(node.newer, newer, "links agree");
            if node.parent != NONE {
                assert!(in_use[node.parent as usize], "the parent is there and more recently used");
                children[node.parent as usize] += 1;
            }
            assert_eq!(self.find(node.hash), Some(at), "the table finds it");
            in_use[at as usize] = true;
            seen += 1;
            newer = at;
            at = node.older;
        }
        assert_eq!(self.oldest, newer);
        assert_eq!(seen, self.len());
        for (place, node) in self.nodes.iter().enumerate().filter(|(place, _)| in_use[*place]) {
            assert_eq!(node.children, children[place], "children are counted");
        }
        assert!(self.len() <= self.capacity, "the bound holds");
    }
}

fn hash_in(nodes: &[Node], place: u32) -> u64 {
    nodes.get(place as usize).map_or(0, |node| node.hash)
}
