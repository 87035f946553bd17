//! The session table with its effects: closes become side requests, opens are sent, waiters are woken.

use crate::clock::now_ms;
use crate::metrics::Metrics;
use crate::side::{SideKind, SideRequest, SideRequests, SideResult};
use crate::upstream::Upstream;
use crate::workers::{Worker, Workers};
use bytes::Bytes;
use parking_lot::Mutex;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use turnstile_fleet::ids::{SessionKey, WorkerId};
use turnstile_fleet::session::{
    Begin, BeginTurn, CloseCause, Counts, EngineClose, Held, Lease, OpenResult, SessionOptions, SessionView, Sessions,
    TurnEnd,
};

/// What `/open_session` stores and never uses; Dynamo sends the same.
const CAPACITY_OF_STR_LEN: u32 = 65_536;
/// Answers to an open are a JSON string.
const OPEN_REPLY_LIMIT: usize = 64 * 1024;
/// After an abort the engine lets go within some 10 ms once `/abort_request` was answered; seen on 0.5.23.
const RELEASE_AFTER: Duration = Duration::from_millis(250);
/// Where the abort could not be delivered: the engine notices a gone client by a poll every 4 s.
const RELEASE_AFTER_UNKNOWN: Duration = Duration::from_secs(5);

/// The sessions of this gateway.
pub struct SessionTable {
    table: Mutex<Sessions>,
    changed: Notify,
    workers: Arc<Workers>,
    upstream: Arc<Upstream>,
    side: Arc<SideRequests>,
    metrics: Arc<Metrics>,
    side_timeout: Mutex<Duration>,
}

impl SessionTable {
    /// An empty table.
    pub fn new(
        options: SessionOptions,
        workers: Arc<Workers>,
        upstream: Arc<Upstream>,
        side: Arc<SideRequests>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let nonce = u64::try_from(crate::request_id::random_u128() >> 64).unwrap_or_default();
        Self {
            table: Mutex::new(Sessions::new(options, nonce)),
            changed: Notify::new(),
            workers,
            upstream,
            side,
            metrics,
            side_timeout: Mutex::new(Duration::from_secs(10)),
        }
    }

    /// New options, from a reload.
    pub fn configure(&self, options: SessionOptions, side_timeout: Duration) {
        self.table.lock().set_options(options);
        *self.side_timeout.lock() = side_timeout;
    }

    /// The session under a key.
    pub fn view(&self, key: SessionKey) -> Option<SessionView> {
        self.table.lock().view(key, now_ms())
    }

    /// All sessions, at most `limit`.
    pub fn list(&self, limit: usize) -> Vec<SessionView> {
        self.table.lock().iter(now_ms()).take(limit).collect()
    }

    /// Sums.
    pub fn counts(&self) -> Counts {
        self.table.lock().counts()
    }

    /// What streaming sessions hold on each of these workers, in order.
    pub fn held(&self, workers: impl Iterator<Item = WorkerId>, out: &mut Vec<Held>) {
        let table = self.table.lock();
        out.clear();
        out.extend(workers.map(|w| table.held(w)));
    }

    /// A turn is about to be sent.
    pub fn begin(self: &Arc<Self>, turn: &BeginTurn) -> Begin {
        let mut begin = self.table.lock().begin(turn);
        let closes = std::mem::take(&mut begin.closes);
        self.send_closes(closes);
        begin
    }

    /// Resolves after the next change that a busy session may be waiting for. Created before the table is asked, so that
    /// no change is missed.
    pub fn changed(&self) -> tokio::sync::futures::Notified<'_> {
        self.changed.notified()
    }

    /// Sends the open that a lease asks for, and tells the table. Synchronous: the first turn needs it.
    pub async fn open(self: &Arc<Self>, lease: &mut Lease, worker: &Worker) {
        let (Some(timeout_ms), Some(engine_id)) = (lease.open_timeout_ms, lease.engine_id.clone()) else { return };
        let body = json!({
            "capacity_of_str_len": CAPACITY_OF_STR_LEN,
            "session_id": &*engine_id,
            "streaming": true,
            "timeout": timeout_ms as f64 / 1000.0,
        });
        let timeout = *self.side_timeout.lock();
        // Held across the await: a client that leaves now must not leave an engine session that nobody closes.
        let mut guard = OpenGuard { table: self, lease, settled: false };
        let reply = match worker.target() {
            Some(target) => {
                let body = Some(Bytes::from(body.to_string()));
                // Sent twice it would be refused the second time, and the session left open.
                let target = target.fresh();
                self.upstream.exchange(&target, "POST", "/open_session", body, timeout, OPEN_REPLY_LIMIT).await
            }
            None => Err(crate::upstream::ExchangeError::Unresolved),
        };
        let (result, label) = match &reply {
            Ok(reply) if reply.is_success() => (OpenResult::Opened, "ok"),
            Ok(_) => (OpenResult::Refused, "failed"),
            Err(_) => (OpenResult::Unknown, "failed"),
        };
        self.metrics.side_requests.with_label_values(&["open_session", label]).inc();
        match &reply {
            Ok(reply) if !reply.is_success() => {
                tracing::warn!(worker = %worker.id, status = reply.status, "open_session refused: affinity only");
            }
            Err(error) => tracing::warn!(worker = %worker.id, %error, "open_session failed: affinity only"),
            Ok(_) => tracing::debug!(worker = %worker.id, engine_id = &*engine_id, "open_session"),
        }
        guard.settle(result);
    }

    /// A turn is over. `rid` is the engine's id of it, to be aborted when it was cut.
    pub fn end(self: &Arc<Self>, lease: Lease, end: TurnEnd) {
        let closes = self.table.lock().end(lease, end, now_ms());
        self.send_closes(closes);
        self.changed.notify_waiters();
    }

    /// A turn of a streaming session was cut: tells the table when the worker has let go. `aborted` says whether the
    /// abort reached the worker.
    pub fn release_later(self: &Arc<Self>, engine_id: Arc<str>, aborted: bool) {
        let this = Arc::clone(self);
        let pause = if aborted { RELEASE_AFTER } else { RELEASE_AFTER_UNKNOWN };
        self.side.spawn(async move {
            tokio::time::sleep(pause).await;
            let closes = this.table.lock().released_engine(&engine_id);
            this.send_closes(closes);
            this.changed.notify_waiters();
        });
    }

    /// Closes what is overdue.
    pub fn expire(self: &Arc<Self>) {
        let closes = self.table.lock().expire(now_ms());
        self.send_closes(closes);
        self.count();
    }

    /// A worker is gone or another process: its sessions are unbound.
    pub fn worker_lost(self: &Arc<Self>, worker: WorkerId) {
        let loss = self.table.lock().worker_lost(worker);
        if !loss.unbound.is_empty() {
            tracing::info!(worker = %worker, sessions = loss.unbound.len(), "sessions unbound");
        }
        self.send_closes(loss.closes);
        self.changed.notify_waiters();
    }

    /// Another process answers at a worker's address: its engine sessions are gone, so nothing is left to close there.
    pub fn worker_restarted(self: &Arc<Self>, worker: WorkerId) {
        let unbound = self.table.lock().worker_restarted(worker);
        if !unbound.is_empty() {
            tracing::info!(worker = %worker, sessions = unbound.len(), "engine sessions lost in a restart");
        }
        self.changed.notify_waiters();
    }

    /// The worker of a session cannot be reached: the next attempt binds it anew.
    pub fn unbind(self: &Arc<Self>, key: SessionKey) {
        let closes = self.table.lock().unbind(key);
        self.send_closes(closes);
        self.changed.notify_waiters();
    }

    /// A worker drains: its sessions move when their next turn comes.
    pub fn drain(self: &Arc<Self>, worker: WorkerId) {
        let closes = self.table.lock().drain(worker);
        self.send_closes(closes);
        self.changed.notify_waiters();
    }

    /// Closes every engine session, at shutdown.
    pub fn close_all(self: &Arc<Self>) {
        let closes = self.table.lock().close_all();
        self.send_closes(closes);
    }

    fn send_closes(self: &Arc<Self>, closes: Vec<EngineClose>) {
        for close in closes {
            self.metrics.sessions_ended.with_label_values(&[close.mode.name(), cause_label(close.cause)]).inc();
            let Some(worker) = self.workers.get(close.worker) else { continue };
            let body = Bytes::from(json!({ "session_id": &*close.engine_id }).to_string());
            let this = Arc::clone(self);
            let engine_id = Arc::clone(&close.engine_id);
            self.side.send(SideRequest {
                kind: SideKind::CloseSession,
                worker,
                body,
                timeout: *self.side_timeout.lock(),
                cancel: CancellationToken::new(),
                done: Box::new(move |result| {
                    let confirmed = matches!(result, SideResult::Ok(_));
                    this.table.lock().close_result(&engine_id, confirmed, now_ms());
                    this.changed.notify_waiters();
                }),
            });
        }
    }

    /// Sets the gauges.
    pub fn count(&self) {
        let counts = self.counts();
        let set = |mode: &str, n: usize| {
            self.metrics.sessions.with_label_values(&[mode]).set(i64::try_from(n).unwrap_or(i64::MAX));
        };
        set("affinity", counts.affinity);
        set("tag", counts.tag);
        set("stream", counts.stream);
    }
}

/// Settles an open even when the future that waits for it is dropped.
struct OpenGuard<'a> {
    table: &'a Arc<SessionTable>,
    lease: &'a mut Lease,
    settled: bool,
}

impl OpenGuard<'_> {
    fn settle(&mut self, result: OpenResult) {
        self.settled = true;
        let closes = self.table.table.lock().opened(self.lease, result, now_ms());
        self.table.send_closes(closes);
    }
}

impl Drop for OpenGuard<'_> {
    fn drop(&mut self) {
        if !self.settled {
            self.settle(OpenResult::Unknown);
        }
    }
}

fn cause_label(cause: CloseCause) -> &'static str {
    match cause {
        CloseCause::Asked => "asked",
        CloseCause::Expired => "expired",
        CloseCause::Moved => "moved",
        CloseCause::Evicted => "evicted",
        CloseCause::Worker => "worker",
        CloseCause::OpenUnknown => "open_unknown",
        CloseCause::Shutdown => "shutdown",
    }
}
