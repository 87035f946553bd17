//! Turns that wait for a busy session: in order of arrival, each session for itself.

use std::collections::{BTreeMap, VecDeque};

use super::{Busy, Sessions};
use crate::ids::SessionKey;

/// Number of a turn that waits.
pub type WaitTicket = u64;

/// Those that wait, by session.
#[derive(Debug, Default)]
pub(super) struct WaitList {
    last: WaitTicket,
    by_key: BTreeMap<SessionKey, VecDeque<(WaitTicket, Busy)>>,
    len: usize,
}

// === impl WaitList ===

impl WaitList {
    fn front(&self, key: SessionKey) -> Option<WaitTicket> {
        self.by_key.get(&key).and_then(|turns| turns.front()).map(|&(ticket, _)| ticket)
    }

    /// Whether another turn came before.
    pub fn is_behind(&self, key: SessionKey, ticket: Option<WaitTicket>) -> bool {
        self.front(key).is_some_and(|front| Some(front) != ticket)
    }
}

// === impl Sessions ===

impl Sessions {
    /// A turn begins to wait, behind those that wait for the same session already. From now on it begins with its ticket.
    pub fn wait(&mut self, key: SessionKey, why: Busy) -> WaitTicket {
        let list = &mut self.waiting;
        list.last += 1;
        list.len += 1;
        list.by_key.entry(key).or_default().push_back((list.last, why));
        list.last
    }

    /// The turn waits on, for this reason. True when it is another one than before: what changed for it until now woke nobody.
    pub fn waits_for(&mut self, key: SessionKey, ticket: WaitTicket, why: Busy) -> bool {
        let turns = self.waiting.by_key.get_mut(&key);
        let turn = turns.and_then(|turns| turns.iter_mut().find(|(other, _)| *other == ticket));
        turn.is_some_and(|turn| std::mem::replace(&mut turn.1, why) != why)
    }

    /// The turn has begun, or its client left.
    pub fn waits_no_more(&mut self, key: SessionKey, ticket: WaitTicket) {
        let Some(turns) = self.waiting.by_key.get_mut(&key) else { return };
        if let Some(place) = turns.iter().position(|(other, _)| *other == ticket) {
            turns.remove(place);
            self.waiting.len -= 1;
        }
        if turns.is_empty() {
            self.waiting.by_key.remove(&key);
        }
    }

    /// The first turn that waits for this session: the one to ask again after a change.
    pub fn first_waiting(&self, key: SessionKey) -> Option<WaitTicket> {
        self.waiting.front(key)
    }

    /// The first of each session, with what it waits for.
    pub fn first_waiting_of_all(&self) -> impl Iterator<Item = (WaitTicket, Busy)> {
        self.waiting.by_key.values().filter_map(|turns| turns.front().copied())
    }

    /// Turns that wait.
    pub fn waiting(&self) -> usize {
        self.waiting.len
    }
}
