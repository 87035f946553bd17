//! Side requests: requests of ours to workers, off the client's path. Their errors never reach a client.
//!
//! All of them together are bounded, and one worker has no more than its share of that, so that a hung worker leaves room for
//! the others. A close that fails or finds no room is not lost: the session table sends it again. Aborts have room and places of
//! their own, with the same bounds: they make places free, and a turn may be waiting for them. A prefill for a worker that the
//! configuration no longer names is cancelled; closes and aborts are tried.

use crate::metrics::Metrics;
use crate::upstream::{ExchangeError, Reply, Upstream};
use crate::workers::Worker;
use bytes::Bytes;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use turnstile_fleet::ids::WorkerId;

/// The most of an answer that is read.
const REPLY_LIMIT: usize = 1024 * 1024;
/// Pause before an abort is sent a second time. (A close is sent again by the session table, a prefill never.)
const ABORT_AGAIN: Duration = Duration::from_millis(100);
/// One worker's share of the room, as a divisor.
const WORKER_SHARE: usize = 2;

/// What a side request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SideKind {
    /// Frees an engine session.
    CloseSession,
    /// Warms the next turn.
    Prefill,
    /// Stops a request whose client left.
    Abort,
}

impl SideKind {
    /// The metric label.
    pub fn label(self) -> &'static str {
        match self {
            SideKind::CloseSession => "close_session",
            SideKind::Prefill => "prefill",
            SideKind::Abort => "abort",
        }
    }

    fn path(self) -> &'static str {
        match self {
            SideKind::CloseSession => "/close_session",
            SideKind::Prefill => "/v1/chat/completions",
            SideKind::Abort => "/abort_request",
        }
    }

    fn tries(self) -> u32 {
        match self {
            SideKind::Abort => 2,
            SideKind::CloseSession | SideKind::Prefill => 1,
        }
    }
}

/// How a side request ended.
#[derive(Debug, Clone)]
pub enum SideResult {
    /// The worker answered 2xx.
    Ok(Reply),
    /// The worker understood and refused; asking again changes nothing.
    Refused(u16),
    /// It answered 5xx, or nothing.
    Failed(String),
    /// It was not sent, for want of room.
    NoRoom,
    /// It was cancelled.
    Cancelled,
}

/// A side request, with what to do when it has ended.
pub struct SideRequest {
    /// What for.
    pub kind: SideKind,
    /// Where to.
    pub worker: Arc<Worker>,
    /// JSON.
    pub body: Bytes,
    /// Time for one try.
    pub timeout: Duration,
    /// Ends it early.
    pub cancel: CancellationToken,
    /// Called once with the result.
    pub done: Box<dyn FnOnce(SideResult) + Send + Sync>,
}

/// Side requests of one worker and kind that wait or run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pending {
    /// The worker.
    pub worker: Arc<str>,
    /// What for.
    pub kind: SideKind,
    /// How many, those being sent included.
    pub pending: usize,
    /// Why the last one failed, if one did while others were pending.
    pub last_error: Option<String>,
}

/// The queue: a bound on what waits or runs, and tasks that belong together.
pub struct SideRequests {
    room: Arc<Semaphore>,
    /// A room of their own for aborts.
    abort_room: Arc<Semaphore>,
    capacity: usize,
    per_worker: AtomicUsize,
    pending: Arc<Mutex<BTreeMap<(WorkerId, SideKind), Pending>>>,
    upstream: Arc<Upstream>,
    tracker: TaskTracker,
    metrics: Arc<Metrics>,
}

impl SideRequests {
    /// An empty queue of `capacity` (`limits.side_queue`), `per_worker` (`limits.side_per_worker`) tries at a time on one
    /// worker.
    pub fn new(upstream: Arc<Upstream>, metrics: Arc<Metrics>, capacity: usize, per_worker: usize) -> Self {
        let capacity = capacity.clamp(1, Semaphore::MAX_PERMITS);
        Self {
            room: Arc::new(Semaphore::new(capacity)),
            abort_room: Arc::new(Semaphore::new(capacity)),
            capacity,
            per_worker: AtomicUsize::new(per_worker),
            pending: Arc::default(),
            upstream,
            tracker: TaskTracker::new(),
            metrics,
        }
    }

    /// A new number of tries at a time, from a reload.
    pub fn configure(&self, per_worker: usize) {
        self.per_worker.store(per_worker, Ordering::Relaxed);
    }

    /// Sends a request as soon as its worker has a place for it. Without room for it, its `done` is told so.
    pub fn send(&self, request: SideRequest) {
        let Some(entry) = self.enter(&request) else {
            self.metrics.side_requests.with_label_values(&[request.kind.label(), "dropped"]).inc();
            // A close comes again; of the others nobody else would say a word.
            if request.kind != SideKind::CloseSession {
                let (kind, worker) = (request.kind.label(), &request.worker.id);
                tracing::warn!(kind, worker = %worker, "side request dropped: queue full");
            }
            (request.done)(SideResult::NoRoom);
            return;
        };
        let (upstream, metrics) = (Arc::clone(&self.upstream), Arc::clone(&self.metrics));
        let per_worker = self.per_worker.load(Ordering::Relaxed);
        self.tracker.spawn(async move {
            let result = run(&request, &upstream, &metrics, per_worker).await;
            entry.leave(&result);
            (request.done)(result);
        });
    }

    fn enter(&self, request: &SideRequest) -> Option<Entry> {
        let room = if request.kind == SideKind::Abort { &self.abort_room } else { &self.room };
        let room = Arc::clone(room).try_acquire_owned().ok()?;
        let key = (request.worker.index, request.kind);
        let mut pending = self.pending.lock();
        // Those that share the room.
        let kinds = match request.kind {
            SideKind::CloseSession | SideKind::Prefill => SideKind::CloseSession..=SideKind::Prefill,
            SideKind::Abort => SideKind::Abort..=SideKind::Abort,
        };
        let of_worker = pending.range((key.0, *kinds.start())..=(key.0, *kinds.end()));
        if of_worker.map(|(_, pending)| pending.pending).sum::<usize>() >= (self.capacity / WORKER_SHARE).max(1) {
            return None;
        }
        let one = pending.entry(key).or_insert_with(|| Pending {
            worker: Arc::clone(&request.worker.id),
            kind: request.kind,
            pending: 0,
            last_error: None,
        });
        one.pending += 1;
        drop(pending);
        let depth = self.metrics.side_queue.with_label_values(&[request.kind.label()]);
        depth.inc();
        Some(Entry { key, pending: Arc::clone(&self.pending), depth, _room: room })
    }

    /// What waits or runs.
    pub fn pending(&self) -> Vec<Pending> {
        self.pending.lock().values().cloned().collect()
    }

    /// Most of them at a time, aborts not counted.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Runs a task that belongs to the side requests, so that [`SideRequests::settle`] waits for it.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.tracker.spawn(task);
    }

    /// Waits until everything has ended, what it brought about included, at most `grace`.
    pub async fn settle(&self, grace: Duration) {
        let all = async {
            while !self.tracker.is_empty() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        if tokio::time::timeout(grace, all).await.is_err() {
            tracing::warn!(left = self.tracker.len(), "side requests left behind");
        }
    }
}

/// The room that a request takes, and its place in the listing.
struct Entry {
    key: (WorkerId, SideKind),
    pending: Arc<Mutex<BTreeMap<(WorkerId, SideKind), Pending>>>,
    depth: prometheus::IntGauge,
    _room: OwnedSemaphorePermit,
}

impl Entry {
    fn leave(self, result: &SideResult) {
        if let SideResult::Failed(reason) = result
            && let Some(one) = self.pending.lock().get_mut(&self.key)
        {
            one.last_error = Some(reason.clone());
        }
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.depth.dec();
        let mut pending = self.pending.lock();
        if let Some(one) = pending.get_mut(&self.key) {
            one.pending = one.pending.saturating_sub(1);
            if one.pending == 0 {
                pending.remove(&self.key);
            }
        }
    }
}

async fn run(request: &SideRequest, upstream: &Upstream, metrics: &Metrics, per_worker: usize) -> SideResult {
    let kind = request.kind;
    // Closes and aborts are tried also at a worker that is no longer named: it may serve others, and the last turns of ours.
    let unwanted = async {
        match kind {
            SideKind::CloseSession | SideKind::Abort => std::future::pending::<()>().await,
            SideKind::Prefill => request.worker.gone().cancelled().await,
        }
    };
    let result = tokio::select! {
        biased;
        () = request.cancel.cancelled() => SideResult::Cancelled,
        () = unwanted => SideResult::Cancelled,
        result = tries(request, upstream, metrics, per_worker) => result,
    };
    let label = match &result {
        SideResult::Ok(_) => "ok",
        SideResult::Refused(_) => "refused",
        SideResult::Failed(_) => "failed",
        SideResult::NoRoom => "dropped",
        SideResult::Cancelled => "cancelled",
    };
    metrics.side_requests.with_label_values(&[kind.label(), label]).inc();
    let worker = &request.worker.id;
    match &result {
        SideResult::Refused(status) if kind != SideKind::Abort => {
            tracing::warn!(kind = kind.label(), worker = %worker, status, "side request refused");
        }
        // An abort is belt and braces: a worker with an admin key refuses it, and drops the closed connection anyway.
        SideResult::Failed(reason) if kind != SideKind::Abort => {
            tracing::warn!(kind = kind.label(), worker = %worker, %reason, "side request failed");
        }
        _ => tracing::debug!(kind = kind.label(), worker = %worker, result = label, "side request"),
    }
    result
}

async fn tries(request: &SideRequest, upstream: &Upstream, metrics: &Metrics, per_worker: usize) -> SideResult {
    let mut tried = 0;
    loop {
        tried += 1;
        let reason = match once(request, upstream, per_worker).await {
            Ok(reply) if reply.is_success() => return SideResult::Ok(reply),
            Ok(reply) if reply.status < 500 => return SideResult::Refused(reply.status),
            Ok(reply) => format!("status {}", reply.status),
            Err(error) => error.to_string(),
        };
        if tried >= request.kind.tries() {
            return SideResult::Failed(reason);
        }
        metrics.side_requests.with_label_values(&[request.kind.label(), "retried"]).inc();
        tokio::time::sleep(ABORT_AGAIN).await;
    }
}

/// One try, with a place on the worker held only as long as it runs.
async fn once(request: &SideRequest, upstream: &Upstream, per_worker: usize) -> Result<Reply, ExchangeError> {
    let places = match request.kind {
        SideKind::Abort => request.worker.abort_places(),
        SideKind::CloseSession | SideKind::Prefill => request.worker.side_places(),
    };
    let _place = places.enter(per_worker).await;
    let target = request.worker.target().ok_or(ExchangeError::Unresolved)?;
    let body = Some(request.body.clone());
    upstream.exchange(&target, "POST", request.kind.path(), body, request.timeout, REPLY_LIMIT).await
}

/// The places for tries on one worker.
#[derive(Debug, Default)]
pub struct SidePlaces {
    taken: Mutex<usize>,
    freed: tokio::sync::Notify,
}

/// A place; dropping it gives it back.
#[derive(Debug)]
pub struct SidePlace<'a>(&'a SidePlaces);

impl SidePlaces {
    /// A place as soon as fewer than `most` are taken.
    pub async fn enter(&self, most: usize) -> SidePlace<'_> {
        loop {
            let freed = self.freed.notified();
            {
                let mut taken = self.taken.lock();
                if *taken < most.max(1) {
                    *taken += 1;
                    return SidePlace(self);
                }
            }
            freed.await;
        }
    }
}

impl Drop for SidePlace<'_> {
    fn drop(&mut self) {
        *self.0.taken.lock() -= 1;
        self.0.freed.notify_one();
    }
}
