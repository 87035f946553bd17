//! Message queues between plugins: named within a VM id, bounded, one consumer each.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use hashbrown::HashMap;
use parking_lot::Mutex;

/// Longest queue name, bytes.
const MAX_NAME: usize = 1024;

/// All queues of the process. Cheap to clone; clones are the same queues.
#[derive(Clone, Debug)]
pub struct SharedQueues {
    inner: Arc<Mutex<Queues>>,
    items_per_queue: usize,
    bytes_per_queue: usize,
    queues_per_vm: usize,
}

#[derive(Debug, Default)]
struct Queues {
    by_name: HashMap<String, HashMap<Vec<u8>, u32>>,
    queues: HashMap<u32, Queue>,
    /// 0 is never a valid id.
    last_id: u32,
}

#[derive(Debug, Default)]
struct Queue {
    items: VecDeque<Bytes>,
    bytes: usize,
    consumer: u64,
    // Pushes that the consumer has not been told of.
    untold: u32,
}

/// Why a queue refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// No queue has this id.
    #[error("no such queue")]
    NotFound,
    /// The queue holds nothing.
    #[error("queue is empty")]
    Empty,
    /// The queue holds as much as it may.
    #[error("queue is full")]
    Full,
    /// The VM id has as many queues as it may.
    #[error("too many queues")]
    TooMany,
    /// The name is over 1 KiB.
    #[error("name is too long")]
    LongName,
}

impl Default for SharedQueues {
    fn default() -> Self {
        Self::new(1024, 1 << 20, 256)
    }
}

impl SharedQueues {
    /// Queues that hold at most so many items and bytes each, and at most so many queues for each VM id.
    pub fn new(items_per_queue: usize, bytes_per_queue: usize, queues_per_vm: usize) -> Self {
        Self { inner: Arc::default(), items_per_queue, bytes_per_queue, queues_per_vm }
    }

    /// The queue of this name, made if it is new; `consumer` is told of pushes from now on.
    ///
    /// # Errors
    /// [`QueueError::TooMany`], [`QueueError::LongName`].
    pub fn register(&self, vm_id: &str, name: &[u8], consumer: u64) -> Result<u32, QueueError> {
        if name.len() > MAX_NAME {
            return Err(QueueError::LongName);
        }
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        let names = inner.by_name.entry_ref(vm_id).or_default();
        let id = match names.get(name) {
            Some(id) => *id,
            None if names.len() >= self.queues_per_vm => return Err(QueueError::TooMany),
            None => {
                // The highest id is for callers to give a meaning of their own.
                let mut id = inner.last_id;
                loop {
                    id = if id >= u32::MAX - 1 { 1 } else { id + 1 };
                    if !inner.queues.contains_key(&id) {
                        break;
                    }
                }
                inner.last_id = id;
                names.insert(name.to_vec(), id);
                id
            }
        };
        inner.queues.entry(id).or_default().consumer = consumer;
        Ok(id)
    }

    /// Forgets the queues of VM ids that are not wanted any more, and what they hold.
    pub fn retain(&self, mut wanted: impl FnMut(&str) -> bool) {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        inner.by_name.retain(|vm_id, names| {
            let stays = wanted(vm_id);
            if !stays {
                names.values().for_each(|id| drop(inner.queues.remove(id)));
            }
            stays
        });
    }

    /// The queue of this name, if somebody registered it.
    pub fn resolve(&self, vm_id: &str, name: &[u8]) -> Option<u32> {
        self.inner.lock().by_name.get(vm_id)?.get(name).copied()
    }

    /// Puts an item at the end.
    ///
    /// # Errors
    /// [`QueueError::NotFound`], [`QueueError::Full`].
    pub fn enqueue(&self, id: u32, item: &[u8]) -> Result<(), QueueError> {
        let mut inner = self.inner.lock();
        let queue = inner.queue(id).ok_or(QueueError::NotFound)?;
        if queue.items.len() >= self.items_per_queue || queue.bytes + item.len() > self.bytes_per_queue {
            return Err(QueueError::Full);
        }
        queue.bytes += item.len();
        queue.items.push_back(Bytes::copy_from_slice(item));
        queue.untold = queue.untold.saturating_add(1);
        Ok(())
    }

    /// Takes the item at the front.
    ///
    /// # Errors
    /// [`QueueError::NotFound`], [`QueueError::Empty`].
    pub fn dequeue(&self, id: u32) -> Result<Bytes, QueueError> {
        let mut inner = self.inner.lock();
        let queue = inner.queue(id).ok_or(QueueError::NotFound)?;
        let item = queue.items.pop_front().ok_or(QueueError::Empty)?;
        queue.bytes -= item.len();
        Ok(item)
    }

    /// How many pushes `consumer` has yet to be told of; they count as told after this. 0 for anybody else.
    pub(crate) fn take_untold(&self, id: u32, consumer: u64) -> u32 {
        let mut inner = self.inner.lock();
        match inner.queue(id) {
            Some(queue) if queue.consumer == consumer => std::mem::take(&mut queue.untold),
            _ => 0,
        }
    }
}

impl Queues {
    fn queue(&mut self, id: u32) -> Option<&mut Queue> {
        self.queues.get_mut(&id)
    }
}

#[cfg(test)]
#[path = "shared_queues_tests.rs"]
mod tests;
