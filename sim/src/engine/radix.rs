//! The prefix tree of KV pages: what is cached, what is in use, what goes first when room is needed.

use crate::{config::Eviction, tokenizer::TokenId};
use hashbrown::{HashMap, HashSet};
use std::{cmp::Reverse, collections::BinaryHeap};

/// A node of the tree.
pub(crate) type NodeId = usize;

#[derive(Debug, Default)]
struct Node {
    /// Tokens of this node, whole pages; none in a root.
    tokens: Vec<TokenId>,
    parent: Option<NodeId>,
    children: HashMap<Box<[TokenId]>, NodeId>,
    /// Requests that use this node or one below it.
    locks: usize,
    last_use: u64,
    priority: i64,
    /// Tags (session generations) that used it, ended ones included.
    tags: Vec<u64>,
}

/// A prefix found in the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Match {
    /// The last node of the prefix.
    pub node: NodeId,
    /// Its length in tokens, whole pages.
    pub tokens: usize,
}

/// The tree. Sizes are in tokens.
#[derive(Debug)]
pub(crate) struct Radix {
    page: usize,
    eviction: Eviction,
    nodes: Vec<Option<Node>>,
    unused: Vec<NodeId>,
    roots: HashMap<u64, NodeId>,
    size: usize,
    locked: usize,
    clock: u64,
    live_tags: HashSet<u64>,
}

impl Radix {
    pub(crate) fn new(page: usize, eviction: Eviction) -> Self {
        Self {
            page: page.max(1),
            eviction,
            nodes: Vec::new(),
            unused: Vec::new(),
            roots: HashMap::new(),
            size: 0,
            locked: 0,
            clock: 0,
            live_tags: HashSet::new(),
        }
    }

    /// Tokens held.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Tokens that could be dropped.
    pub(crate) fn evictable(&self) -> usize {
        self.size - self.locked
    }

    /// KV of this tag is kept until after all untagged KV is gone.
    pub(crate) fn protect(&mut self, tag: u64) {
        self.live_tags.insert(tag);
    }

    /// Ends the protection; the KV stays usable until room is needed.
    pub(crate) fn unprotect(&mut self, tag: u64) {
        self.live_tags.remove(&tag);
    }

    fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id).and_then(Option::as_ref)
    }

    fn node_mut(&mut self, id: NodeId) -> Option<&mut Node> {
        self.nodes.get_mut(id).and_then(Option::as_mut)
    }

    fn create(&mut self, node: Node) -> NodeId {
        match self.unused.pop() {
            Some(id) => {
                if let Some(place) = self.nodes.get_mut(id) {
                    *place = Some(node);
                }
                id
            }
            None => {
                self.nodes.push(Some(node));
                self.nodes.len() - 1
            }
        }
    }

    fn root(&mut self, namespace: u64) -> NodeId {
        if let Some(root) = self.roots.get(&namespace) {
            return *root;
        }
        let root = self.create(Node::default());
        self.roots.insert(namespace, root);
        root
    }

    /// Tokens of the longest known prefix of `tokens` in whole pages, without touching anything.
    pub(crate) fn peek(&self, namespace: u64, tokens: &[TokenId]) -> usize {
        let Some(mut at) = self.roots.get(&namespace).copied() else { return 0 };
        let mut matched = 0;
        while let Some((child, common)) = self.step(at, tokens.get(matched..).unwrap_or_default()) {
            matched += common;
            if self.node(child).is_none_or(|node| common < node.tokens.len()) {
                break;
            }
            at = child;
        }
        matched
    }

    /// The child that `rest` goes on with and how many tokens they share, whole pages.
    fn step(&self, at: NodeId, rest: &[TokenId]) -> Option<(NodeId, usize)> {
        let first = rest.get(..self.page)?;
        let child = *self.node(at)?.children.get(first)?;
        let key = &self.node(child)?.tokens;
        let common = key.iter().zip(rest).take_while(|(a, b)| a == b).count();
        Some((child, common - common % self.page))
    }

    /// Finds the longest known prefix of `tokens` and marks it as used now by a request of this priority.
    pub(crate) fn find(&mut self, namespace: u64, tokens: &[TokenId], priority: i64) -> Match {
        self.clock += 1;
        let (mut at, mut matched) = (self.root(namespace), 0);
        while let Some((mut child, common)) = self.step(at, tokens.get(matched..).unwrap_or_default()) {
            let whole = self.node(child).is_some_and(|node| common == node.tokens.len());
            if !whole {
                child = self.split(child, common);
            }
            self.touch(child, priority, None);
            matched += common;
            at = child;
            if !whole {
                break;
            }
        }
        Match { node: at, tokens: matched }
    }

    /// Puts the whole pages of `tokens` into the tree. Returns the last node and the tokens that were there already.
    pub(crate) fn insert(
        &mut self,
        namespace: u64,
        tokens: &[TokenId],
        priority: i64,
        tag: Option<u64>,
    ) -> (Match, usize) {
        let whole = tokens.len() - tokens.len() % self.page;
        let tokens = tokens.get(..whole).unwrap_or_default();
        let found = self.find(namespace, tokens, priority);
        let mut node = found.node;
        let rest = tokens.get(found.tokens..).unwrap_or_default();
        if let Some(first) = rest.get(..self.page) {
            let last_use = self.clock;
            let new =
                self.create(Node { tokens: rest.to_vec(), parent: Some(node), last_use, priority, ..Node::default() });
            if let Some(parent) = self.node_mut(node) {
                parent.children.insert(first.into(), new);
            }
            self.size += rest.len();
            node = new;
        }
        if tag.is_some() {
            let mut at = Some(node);
            while let Some(id) = at {
                self.touch(id, priority, tag);
                at = self.node(id).and_then(|node| node.parent);
            }
        }
        (Match { node, tokens: whole }, found.tokens)
    }

    fn touch(&mut self, id: NodeId, priority: i64, tag: Option<u64>) {
        let clock = self.clock;
        if let Some(node) = self.node_mut(id) {
            node.last_use = clock;
            node.priority = node.priority.max(priority);
            if let Some(tag) = tag
                && !node.tags.contains(&tag)
            {
                node.tags.push(tag);
            }
        }
    }

    /// Cuts a node after `keep` tokens; returns the upper part.
    fn split(&mut self, id: NodeId, keep: usize) -> NodeId {
        let page = self.page;
        let Some(node) = self.node_mut(id) else { return id };
        let lower = node.tokens.split_off(keep);
        let upper_tokens = std::mem::replace(&mut node.tokens, lower);
        let lower_key: Box<[TokenId]> = node.tokens.get(..page).unwrap_or_default().into();
        let upper_key: Box<[TokenId]> = upper_tokens.get(..page).unwrap_or_default().into();
        let upper = Node {
            tokens: upper_tokens,
            parent: node.parent,
            children: HashMap::from_iter([(lower_key, id)]),
            locks: node.locks,
            last_use: node.last_use,
            priority: node.priority,
            tags: node.tags.clone(),
        };
        let parent = node.parent;
        let upper = self.create(upper);
        if let Some(node) = self.node_mut(id) {
            node.parent = Some(upper);
        }
        if let Some(parent) = parent.and_then(|parent| self.node_mut(parent)) {
            parent.children.insert(upper_key, upper);
        }
        upper
    }

    /// Holds `node` and all above it.
    pub(crate) fn lock(&mut self, node: NodeId) {
        self.walk_up(node, |locks| {
            *locks += 1;
            *locks == 1
        });
    }

    /// Gives back one [`Radix::lock`].
    pub(crate) fn unlock(&mut self, node: NodeId) {
        self.walk_up(node, |locks| {
            *locks = locks.saturating_sub(1);
            *locks == 0
        });
    }

    fn walk_up(&mut self, from: NodeId, mut change: impl FnMut(&mut usize) -> bool) {
        let mut at = Some(from);
        while let Some(node) = at.and_then(|id| self.nodes.get_mut(id)).and_then(Option::as_mut) {
            if change(&mut node.locks) {
                let tokens = node.tokens.len();
                if node.locks > 0 {
                    self.locked += tokens;
                } else {
                    self.locked = self.locked.saturating_sub(tokens);
                }
            }
            at = node.parent;
        }
    }

    /// Drops unused leaves until at least `tokens` are free again. Returns how many were dropped.
    pub(crate) fn evict(&mut self, tokens: usize) -> usize {
        let mut leaves: BinaryHeap<Reverse<(bool, i64, u64, NodeId)>> = self
            .nodes
            .iter()
            .enumerate()
            .filter_map(|(id, node)| node.as_ref().and_then(|node| self.candidate(id, node)))
            .collect();
        let mut dropped = 0;
        while dropped < tokens {
            let Some(Reverse((.., id))) = leaves.pop() else { break };
            let Some(node) = self.nodes.get_mut(id).and_then(Option::take) else { continue };
            self.unused.push(id);
            dropped += node.tokens.len();
            self.size -= node.tokens.len();
            let Some(parent_id) = node.parent else { continue };
            let page = self.page;
            if let Some(parent) = self.node_mut(parent_id) {
                parent.children.remove(node.tokens.get(..page).unwrap_or_default());
            }
            if let Some(parent) = self.node(parent_id).and_then(|parent| self.candidate(parent_id, parent)) {
                leaves.push(parent);
            }
        }
        dropped
    }

    /// The eviction order of a leaf in no use.
    fn candidate(&self, id: NodeId, node: &Node) -> Option<Reverse<(bool, i64, u64, NodeId)>> {
        let leaf = node.children.is_empty() && node.locks == 0 && node.parent.is_some();
        let tagged = node.tags.iter().any(|tag| self.live_tags.contains(tag));
        let priority = match self.eviction {
            Eviction::Lru => 0,
            Eviction::Priority => node.priority,
        };
        leaf.then_some(Reverse((tagged, priority, node.last_use, id)))
    }

    /// Forgets everything. Only when nothing is locked.
    pub(crate) fn clear(&mut self) {
        self.nodes.clear();
        self.unused.clear();
        self.roots.clear();
        self.size = 0;
        self.locked = 0;
    }

    /// The sums that must hold between any two calls.
    #[cfg(test)]
    pub(crate) fn check_invariants(&self) {
        let nodes = || self.nodes.iter().flatten();
        assert_eq!(self.size, nodes().map(|node| node.tokens.len()).sum::<usize>());
        assert_eq!(self.locked, nodes().filter(|node| node.locks > 0).map(|node| node.tokens.len()).sum::<usize>());
        for node in nodes() {
            assert_eq!(node.tokens.len() % self.page, 0);
            for (key, child) in &node.children {
                let child = self.node(*child).expect("a child is in the tree");
                assert_eq!(&child.tokens[..self.page], &key[..]);
                assert!(child.locks <= node.locks || node.parent.is_none());
            }
        }
    }
}

#[cfg(test)]
#[path = "radix_tests.rs"]
mod tests;
