//! Hash to place, for [`lru`](super::lru): open addressing with linear probing, 8 bytes a slot, at most 3 of 5 slots in use.
//!
//! Own because of two needs at once: a size that follows the number of blocks closely, also under churn (removal shifts back and
//! leaves no mark behind, so the table never grows to get rid of marks), and a look-up that touches one cache line.

/// No place.
pub(super) const NONE: u32 = u32::MAX;

/// Fewest slots of a table that holds anything.
const LEAST_SLOTS: usize = 16;

#[derive(Debug, Default)]
pub(super) struct Table {
    slots: Vec<Slot>,
    len: usize,
}

/// The low half of a hash says where its search begins; the high half is kept here. Together that is all of the hash, but the
/// low half is known only as well as there are slots, so equal bits are not yet the same hash.
#[derive(Debug, Clone, Copy)]
struct Slot {
    bits: u32,
    place: u32,
}

const EMPTY: Slot = Slot { bits: 0, place: NONE };

// === impl Table ===

impl Table {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn memory_bytes(&self) -> usize {
        self.slots.capacity() * size_of::<Slot>()
    }

    /// Whether some hash with the same bits is near. A wrong yes is one in billions, and only spoils an estimate; in exchange no
    /// node is touched.
    pub fn has_bits(&self, hash: u64) -> bool {
        self.find(hash, |_| true).is_some()
    }

    /// The place of a hash. `is`: whether that place has it.
    pub fn find(&self, hash: u64, is: impl Fn(u32) -> bool) -> Option<u32> {
        let at = self.slot_of(hash, is)?;
        self.slots.get(at).map(|slot| slot.place)
    }

    /// Adds a hash that is not there. `hash_at`: the hash at a place.
    pub fn insert(&mut self, hash: u64, place: u32, hash_at: impl Fn(u32) -> u64) {
        if self.slots.len() * 3 < (self.len + 1) * 5 {
            self.resize((self.len + self.len / 4 + 1).saturating_mul(5).div_ceil(3).max(LEAST_SLOTS), &hash_at);
        }
        self.put(hash, place);
    }

    /// Removes a hash from its place, and closes the gap.
    pub fn remove(&mut self, hash: u64, place: u32, hash_at: impl Fn(u32) -> u64) {
        let Some(mut gap) = self.slot_of(hash, |other| other == place) else { return };
        self.len -= 1;
        let mut at = gap;
        loop {
            at = self.after(at);
            let Some(&slot) = self.slots.get(at).filter(|slot| slot.place != NONE) else { break };
            // A slot may move into the gap if its search begins there or before.
            let home = self.home(hash_at(slot.place));
            let (to_gap, to_home) = (self.distance(gap, at), self.distance(home, at));
            if to_home >= to_gap {
                self.set(gap, slot);
                gap = at;
            }
        }
        self.set(gap, EMPTY);
    }

    /// Makes it as small as its content allows.
    pub fn shrink(&mut self, hash_at: impl Fn(u32) -> u64) {
        self.resize(self.len.saturating_mul(5).div_ceil(3).max(LEAST_SLOTS), &hash_at);
    }

    fn resize(&mut self, slots: usize, hash_at: &impl Fn(u32) -> u64) {
        // One more than 3 of 5, so that a search always ends at an empty slot.
        let old = std::mem::replace(&mut self.slots, vec![EMPTY; slots + 1]);
        self.len = 0;
        for slot in old.into_iter().filter(|slot| slot.place != NONE) {
            self.put(hash_at(slot.place), slot.place);
        }
    }

    fn put(&mut self, hash: u64, place: u32) {
        let mut at = self.home(hash);
        while self.slots.get(at).is_some_and(|slot| slot.place != NONE) {
            at = self.after(at);
        }
        self.set(at, Slot { bits: bits_of(hash), place });
        self.len += 1;
    }

    fn slot_of(&self, hash: u64, is: impl Fn(u32) -> bool) -> Option<usize> {
        let bits = bits_of(hash);
        let mut at = self.home(hash);
        loop {
            let slot = self.slots.get(at).filter(|slot| slot.place != NONE)?;
            if slot.bits == bits && is(slot.place) {
                return Some(at);
            }
            at = self.after(at);
        }
    }

    fn set(&mut self, at: usize, slot: Slot) {
        if let Some(old) = self.slots.get_mut(at) {
            *old = slot;
        }
    }

    /// The low half of the hash as a fraction of the slots. Slots are fewer than 2^33, so this does not overflow.
    fn home(&self, hash: u64) -> usize {
        (((hash & 0xffff_ffff) * self.slots.len() as u64) >> 32) as usize
    }

    fn after(&self, at: usize) -> usize {
        if at + 1 < self.slots.len() { at + 1 } else { 0 }
    }

    /// Steps from one slot on to another.
    fn distance(&self, from: usize, to: usize) -> usize {
        if to >= from { to - from } else { to + self.slots.len() - from }
    }
}

fn bits_of(hash: u64) -> u32 {
    (hash >> 32) as u32
}
