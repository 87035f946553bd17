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
    max_queues: usize,
}

#[derive(Debug, Default)]
struct Queues {
    by_name: HashMap<(String, Vec<u8>), u32>,
    // Queue `id` is at `id - 1`: 0 is never a valid id.
    queues: Vec<Queue>,
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
    /// The queue, or the table of queues, holds as much as it may.
    #[error("queue is full")]
    Full,
}

impl Default for SharedQueues {
    fn default() -> Self {
        Self::new(1024, 1 << 20, 256)
    }
}

impl SharedQueues {
    /// Queues that hold at most so many items and bytes each, and at most so many queues.
    pub fn new(items_per_queue: usize, bytes_per_queue: usize, max_queues: usize) -> Self {
        Self { inner: Arc::default(), items_per_queue, bytes_per_queue, max_queues }
    }

    /// The queue of this name, made if it is new; `consumer` is told of pushes from now on.
    ///
    /// # Errors
    /// [`QueueError::Full`] if there are too many queues or the name is over 1 KiB.
    pub fn register(&self, vm_id: &str, name: &[u8], consumer: u64) -> Result<u32, QueueError> {
        if name.len() > MAX_NAME {
            return Err(QueueError::Full);
        }
        let mut inner = self.inner.lock();
        let key = (vm_id.to_owned(), name.to_vec());
        let id = match inner.by_name.get(&key) {
            Some(id) => *id,
            None => {
                if inner.queues.len() >= self.max_queues {
                    return Err(QueueError::Full);
                }
                inner.queues.push(Queue::default());
                let id = u32::try_from(inner.queues.len()).map_err(|_| QueueError::Full)?;
                inner.by_name.insert(key, id);
                id
            }
        };
        if let Some(queue) = inner.queue(id) {
            queue.consumer = consumer;
        }
        Ok(id)
    }

    /// The queue of this name, if somebody registered it.
    pub fn resolve(&self, vm_id: &str, name: &[u8]) -> Option<u32> {
        self.inner.lock().by_name.get(&(vm_id.to_owned(), name.to_vec())).copied()
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
        self.queues.get_mut((id as usize).checked_sub(1)?)
    }
}

#[cfg(test)]
#[path = "shared_queues_tests.rs"]
mod tests;
