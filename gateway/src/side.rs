//! Side requests: requests of ours to workers, off the client's path. Their errors never reach a client.
//!
//! A bound on how many there are, a bound on how many one worker gets at a time (so that a hung worker holds up nobody
//! else's), retries with back-off for those that must arrive (a close), a cancellation for those that lose their sense (a
//! prefill).

use crate::metrics::Metrics;
use crate::upstream::{ExchangeError, Reply, Upstream};
use crate::workers::Worker;
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Tries in flight at a time on one worker. Aborts do not count: they make room, and a turn may be waiting for them.
pub const TRIES_PER_WORKER: usize = 8;
/// The most of an answer that is read.
const REPLY_LIMIT: usize = 1024 * 1024;
/// Pauses before the second, third… try.
const BACKOFF: [Duration; 4] =
    [Duration::from_millis(100), Duration::from_millis(500), Duration::from_secs(2), Duration::from_secs(5)];

/// What a side request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

    fn tries(self) -> usize {
        match self {
            SideKind::CloseSession => 1 + BACKOFF.len(),
            SideKind::Abort => 2,
            SideKind::Prefill => 1,
        }
    }
}

/// How a side request ended.
#[derive(Debug, Clone)]
pub enum SideResult {
    /// The worker answered 2xx.
    Ok(Reply),
    /// It answered something else, or nothing, on every try.
    Failed(String),
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

/// The queue: a bound on what waits or runs, and tasks that belong together.
pub struct SideRequests {
    room: Arc<Semaphore>,
    upstream: Arc<Upstream>,
    tracker: TaskTracker,
    metrics: Arc<Metrics>,
}

impl SideRequests {
    /// An empty queue of `capacity` (`limits.side_queue`).
    pub fn new(upstream: Arc<Upstream>, metrics: Arc<Metrics>, capacity: usize) -> Self {
        let room = Arc::new(Semaphore::new(capacity.clamp(1, Semaphore::MAX_PERMITS)));
        Self { room, upstream, tracker: TaskTracker::new(), metrics }
    }

    /// Sends a request as soon as its worker has a place for it. A full queue drops it, with its `done` told so.
    pub fn send(&self, request: SideRequest) {
        let Ok(room) = Arc::clone(&self.room).try_acquire_owned() else {
            self.metrics.side_requests.with_label_values(&[request.kind.label(), "dropped"]).inc();
            tracing::warn!(kind = request.kind.label(), worker = %request.worker.id, "side request dropped: queue full");
            (request.done)(SideResult::Failed("the side request queue is full".into()));
            return;
        };
        let (upstream, metrics) = (Arc::clone(&self.upstream), Arc::clone(&self.metrics));
        metrics.side_queue.inc();
        self.tracker.spawn(async move {
            run(request, &upstream, &metrics).await;
            metrics.side_queue.dec();
            drop(room);
        });
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

async fn run(request: SideRequest, upstream: &Upstream, metrics: &Metrics) {
    let kind = request.kind;
    let mut result = SideResult::Cancelled;
    for attempt in 0..kind.tries() {
        if attempt > 0 {
            metrics.side_requests.with_label_values(&[kind.label(), "retried"]).inc();
            let pause = BACKOFF.get(attempt - 1).copied().unwrap_or(Duration::from_secs(5));
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = request.cancel.cancelled() => { result = SideResult::Cancelled; break; }
            }
        }
        let outcome = tokio::select! {
            biased;
            () = request.cancel.cancelled() => { result = SideResult::Cancelled; break; }
            outcome = once(&request, upstream) => outcome,
        };
        match outcome {
            Ok(reply) if reply.is_success() => {
                result = SideResult::Ok(reply);
                break;
            }
            // The worker understood and refused; asking again changes nothing.
            Ok(reply) if reply.status < 500 => {
                result = SideResult::Failed(format!("status {}", reply.status));
                break;
            }
            Ok(reply) => result = SideResult::Failed(format!("status {}", reply.status)),
            Err(error) => result = SideResult::Failed(error.to_string()),
        }
        if request.worker.is_removed() {
            break;
        }
    }
    let label = match &result {
        SideResult::Ok(_) => "ok",
        SideResult::Failed(_) => "failed",
        SideResult::Cancelled => "cancelled",
    };
    metrics.side_requests.with_label_values(&[kind.label(), label]).inc();
    match &result {
        // An abort is belt and braces: a worker with an admin key refuses it, and drops the closed connection anyway.
        SideResult::Failed(reason) if kind != SideKind::Abort => {
            tracing::warn!(kind = kind.label(), worker = %request.worker.id, %reason, "side request failed");
        }
        _ => tracing::debug!(kind = kind.label(), worker = %request.worker.id, result = label, "side request"),
    }
    (request.done)(result);
}

/// One try, with a place on the worker held only as long as it runs.
async fn once(request: &SideRequest, upstream: &Upstream) -> Result<Reply, ExchangeError> {
    let _place = match request.kind {
        SideKind::Abort => None,
        // The semaphore of a worker is never closed; without a place nothing would be bounded.
        _ => Some(request.worker.side_places().acquire().await.map_err(|_| ExchangeError::Unresolved)?),
    };
    let target = request.worker.target().ok_or(ExchangeError::Unresolved)?;
    let body = Some(request.body.clone());
    upstream.exchange(&target, "POST", request.kind.path(), body, request.timeout, REPLY_LIMIT).await
}
