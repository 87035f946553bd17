//! The queue at work: turns wait here while every worker they could go to is at its limit.
//!
//! Order and bounds are `turnstile_fleet::queue`'s. Here are the waiters, and the room: a turn that is let through holds a
//! permit until it is placed on a worker, so that two turns never count on the same free place.

use crate::clock::now_ms;
use crate::metrics::Metrics;
use hashbrown::HashMap;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::oneshot;
use turnstile_fleet::ids::WorkerId;
use turnstile_fleet::queue::{Full, Queue, QueueOptions, Ticket};

/// Free places as the fleet stands now.
pub trait Room: Send + Sync {
    /// Turns that the pool's workers could take now; for a turn pinned to a worker that is there, that this one could take.
    fn free(&self, pool: u32, pinned: Option<WorkerId>) -> Places;
}

/// Places that are free.
#[derive(Debug, Clone, Copy)]
pub enum Places {
    /// On any worker of the pool.
    OfPool(u32),
    /// On the worker that the turn is pinned to.
    OfWorker(u32),
}

/// What a turn needs to be let through.
#[derive(Debug, Clone, Copy)]
pub struct Wish {
    /// Pool index.
    pub pool: u32,
    /// Strict tier.
    pub tier: u32,
    /// Head start, ms.
    pub head_start_ms: i64,
    /// Flow charged.
    pub flow: u64,
    /// Estimated uncached tokens.
    pub uncached_tokens: u64,
    /// Bytes held.
    pub bytes: u64,
    /// Longest wait, ms.
    pub max_wait_ms: u64,
    /// The only worker it can go to.
    pub pinned: Option<WorkerId>,
}

impl Wish {
    /// The wish of a turn that has waited in the queue for so many ms already.
    pub fn after(&self, spent_ms: u64) -> Self {
        Self {
            head_start_ms: self.head_start_ms.saturating_add(i64::try_from(spent_ms).unwrap_or(i64::MAX)),
            max_wait_ms: self.max_wait_ms.saturating_sub(spent_ms),
            ..*self
        }
    }
}

/// Why a turn was not let through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The queue is full; come back after so many seconds.
    Full {
        /// Which bound.
        why: Full,
        /// `Retry-After`.
        retry_after_s: u32,
    },
    /// It waited too long.
    Expired {
        /// `Retry-After`.
        retry_after_s: u32,
    },
}

/// Leave to be placed on a worker. Dropping it gives the place back.
pub struct Permit {
    admission: Arc<Admission>,
    pool: u32,
    pinned: Option<WorkerId>,
    /// Milliseconds waited; nothing when it did not have to.
    pub waited_ms: Option<u64>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.admission.give_back(self.pool, self.pinned);
    }
}

/// The queue, its waiters and the permits out.
pub struct Admission {
    inner: Mutex<Inner>,
    room: Arc<dyn Room>,
    metrics: Arc<Metrics>,
    next_id: AtomicU64,
}

struct Inner {
    queue: Queue,
    waiters: HashMap<u64, oneshot::Sender<Permit>>,
    permits: HashMap<u32, u32>,
    pinned: HashMap<WorkerId, u32>,
    /// Waiters by pool and pinned worker.
    waiting: HashMap<(u32, Option<WorkerId>), usize>,
    pool_names: HashMap<u32, Arc<str>>,
}

impl Inner {
    /// Whether a place is free beyond the permits that are out.
    fn admissible(&self, room: &dyn Room, pool: u32, pinned: Option<WorkerId>) -> bool {
        match room.free(pool, pinned) {
            Places::OfPool(free) => free > self.permits.get(&pool).copied().unwrap_or(0),
            Places::OfWorker(free) => free > pinned.and_then(|worker| self.pinned.get(&worker)).copied().unwrap_or(0),
        }
    }

    fn take(&mut self, pool: u32, pinned: Option<WorkerId>) {
        *self.permits.entry(pool).or_insert(0) += 1;
        if let Some(worker) = pinned {
            *self.pinned.entry(worker).or_insert(0) += 1;
        }
    }

    fn pool_name(&self, pool: u32) -> &str {
        self.pool_names.get(&pool).map_or("?", |n| n)
    }
}

impl Admission {
    /// An empty queue.
    pub fn new(options: QueueOptions, room: Arc<dyn Room>, metrics: Arc<Metrics>) -> Self {
        Self {
            inner: Mutex::new(Inner {
                queue: Queue::new(options),
                waiters: HashMap::new(),
                permits: HashMap::new(),
                pinned: HashMap::new(),
                waiting: HashMap::new(),
                pool_names: HashMap::new(),
            }),
            room,
            metrics,
            next_id: AtomicU64::new(1),
        }
    }

    /// New bounds and pool names, from a reload. Turns that wait stay.
    pub fn configure(&self, options: QueueOptions, pool_names: HashMap<u32, Arc<str>>) {
        let mut inner = self.inner.lock();
        inner.queue.set_options(options);
        for name in pool_names.values() {
            self.metrics.queue_depth.with_label_values(&[&**name]).set(0);
        }
        inner.pool_names = pool_names;
        drop(inner);
        self.count_depth();
    }

    /// Turns that wait.
    pub fn depth(&self) -> usize {
        self.inner.lock().queue.len()
    }

    /// When the queue, as it stands, will have drained, in seconds: an honest `Retry-After` for whoever comes back.
    pub fn retry_after_s(&self, now_ms: u64) -> u32 {
        retry_after(&self.inner.lock().queue, now_ms)
    }

    /// Waits for a place. Dropping the future takes the turn out of the queue.
    ///
    /// # Errors
    /// The queue is full, or the turn waited too long.
    pub async fn enter(self: &Arc<Self>, wish: Wish) -> Result<Permit, Refused> {
        let arrival_ms = now_ms();
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let receiver = {
            let mut inner = self.inner.lock();
            // Whoever waits for the same place goes first; whoever waits for another one is in nobody's way.
            let others = inner.waiting.get(&(wish.pool, wish.pinned)).copied().unwrap_or(0);
            if others == 0 && inner.admissible(&*self.room, wish.pool, wish.pinned) {
                inner.take(wish.pool, wish.pinned);
                return Ok(self.permit(wish.pool, wish.pinned, None));
            }
            let ticket = Ticket {
                id,
                tier: wish.tier,
                head_start_ms: wish.head_start_ms,
                arrival_ms,
                flow: wish.flow,
                uncached_tokens: wish.uncached_tokens,
                bytes: wish.bytes,
                deadline_ms: Some(arrival_ms.saturating_add(wish.max_wait_ms)),
                pool: wish.pool,
                pinned: wish.pinned,
            };
            if let Err(why) = inner.queue.push(ticket) {
                let pool = inner.pool_name(wish.pool).to_owned();
                let retry_after_s = retry_after(&inner.queue, arrival_ms);
                drop(inner);
                self.metrics.queue_left.with_label_values(&[pool.as_str(), "full"]).inc();
                return Err(Refused::Full { why, retry_after_s });
            }
            let (sender, receiver) = oneshot::channel();
            inner.waiters.insert(id, sender);
            *inner.waiting.entry((wish.pool, wish.pinned)).or_insert(0) += 1;
            receiver
        };
        self.count_depth();
        // Another pool's head, or room that came just now, may let this one through at once.
        self.dispatch();
        let guard = Waiting { admission: Arc::clone(self), id, pool: wish.pool, pinned: wish.pinned, done: false };
        match tokio::time::timeout(Duration::from_millis(wish.max_wait_ms), receiver).await {
            Ok(Ok(mut permit)) => {
                guard.finish("dispatched");
                let waited = now_ms().saturating_sub(arrival_ms);
                permit.waited_ms = Some(waited);
                Ok(permit)
            }
            _ => {
                guard.finish("expired");
                let inner = self.inner.lock();
                Err(Refused::Expired { retry_after_s: retry_after(&inner.queue, now_ms()) })
            }
        }
    }

    fn permit(self: &Arc<Self>, pool: u32, pinned: Option<WorkerId>, waited_ms: Option<u64>) -> Permit {
        Permit { admission: Arc::clone(self), pool, pinned, waited_ms }
    }

    /// Lets through whoever can go now. To be called whenever room may have come.
    pub fn dispatch(self: &Arc<Self>) {
        loop {
            let mut inner = self.inner.lock();
            if inner.queue.is_empty() {
                return;
            }
            // The room of each pool and pinned worker is asked once a round.
            let mut known: HashMap<(u32, Option<WorkerId>), bool> = HashMap::new();
            let mut queue = std::mem::replace(&mut inner.queue, Queue::new(empty()));
            let ticket = queue.pop_next(now_ms(), |t| {
                *known.entry((t.pool, t.pinned)).or_insert_with(|| inner.admissible(&*self.room, t.pool, t.pinned))
            });
            inner.queue = queue;
            let Some(ticket) = ticket else { return };
            let waiter = inner.waiters.remove(&ticket.id);
            inner.take(ticket.pool, ticket.pinned);
            drop(inner);
            let permit = self.permit(ticket.pool, ticket.pinned, Some(0));
            if let Some(waiter) = waiter {
                // A waiter that has just left drops the permit, which gives the place back.
                let _ = waiter.send(permit);
            }
            self.count_depth();
        }
    }

    fn give_back(self: &Arc<Self>, pool: u32, pinned: Option<WorkerId>) {
        {
            let mut inner = self.inner.lock();
            if let Some(out) = inner.permits.get_mut(&pool) {
                *out = out.saturating_sub(1);
            }
            if let Some(worker) = pinned
                && let Some(out) = inner.pinned.get_mut(&worker)
            {
                *out = out.saturating_sub(1);
                if *out == 0 {
                    inner.pinned.remove(&worker);
                }
            }
        }
        self.dispatch();
    }

    fn count_depth(&self) {
        let inner = self.inner.lock();
        let mut depth: HashMap<u32, i64> = HashMap::new();
        for ((pool, _), waiting) in &inner.waiting {
            *depth.entry(*pool).or_insert(0) += i64::try_from(*waiting).unwrap_or(i64::MAX);
        }
        for (pool, name) in &inner.pool_names {
            self.metrics.queue_depth.with_label_values(&[&**name]).set(depth.get(pool).copied().unwrap_or(0));
        }
    }
}

fn empty() -> QueueOptions {
    QueueOptions { max_tickets: 0, max_bytes: 0, fairness: None }
}

fn retry_after(queue: &Queue, now: u64) -> u32 {
    u32::try_from(queue.retry_after_s(now, 1, 60)).unwrap_or(60)
}

/// Takes a turn out of the queue when its future is dropped.
struct Waiting {
    admission: Arc<Admission>,
    id: u64,
    pool: u32,
    pinned: Option<WorkerId>,
    done: bool,
}

impl Waiting {
    fn finish(mut self, result: &'static str) {
        self.done = true;
        self.leave(result);
    }

    fn leave(&self, result: &'static str) {
        let pool = {
            let mut inner = self.admission.inner.lock();
            inner.queue.remove(self.id);
            inner.waiters.remove(&self.id);
            let place = (self.pool, self.pinned);
            if let Some(waiting) = inner.waiting.get_mut(&place) {
                *waiting = waiting.saturating_sub(1);
                if *waiting == 0 {
                    inner.waiting.remove(&place);
                }
            }
            inner.pool_name(self.pool).to_owned()
        };
        self.admission.metrics.queue_left.with_label_values(&[pool.as_str(), result]).inc();
        self.admission.count_depth();
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.done {
            self.leave("client_gone");
            self.admission.dispatch();
        }
    }
}

#[cfg(test)]
#[path = "admission_tests.rs"]
mod tests;
