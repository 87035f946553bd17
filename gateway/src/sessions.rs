//! The session table with its effects: closes become side requests, opens are sent, those that wait are woken.
//!
//! What may happen when is decided in `turnstile_fleet::session`; here it is carried out.

mod kept;

use crate::clock::now_ms;
use crate::metrics::Metrics;
use crate::side::{SideKind, SideRequest, SideRequests, SideResult};
use crate::state::Journal;
use crate::upstream::{ExchangeError, Upstream};
use crate::workers::{Worker, Workers};
use bytes::Bytes;
use hashbrown::HashMap;
use parking_lot::Mutex;
use serde_json::json;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, oneshot};
use tokio_util::sync::CancellationToken;
use turnstile_fleet::ids::{SessionKey, WorkerId};
use turnstile_fleet::session::{
    AttemptEnd, Begin, BeginTurn, Busy, CloseResult, Counts, EngineClose, Held, Hold, Lease, OpenResult, Parting,
    SessionOptions, SessionView, Sessions, TurnEnd, WaitTicket, WorkerLoss,
};

/// What `/open_session` stores and never uses; Dynamo sends the same.
const CAPACITY_OF_STR_LEN: u32 = 65_536;
/// Answers to an open are a JSON string.
const OPEN_REPLY_LIMIT: usize = 64 * 1024;
/// How often the end of closes is looked for at shutdown.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// The sessions of this gateway.
pub struct SessionTable {
    table: Mutex<Sessions>,
    waiters: Mutex<HashMap<WaitTicket, Arc<Notify>>>,
    workers: Arc<Workers>,
    upstream: Arc<Upstream>,
    side: Arc<SideRequests>,
    metrics: Arc<Metrics>,
    side_timeout: Mutex<Duration>,
    /// Told of every engine session, under the table's lock.
    journal: OnceLock<Journal>,
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
            waiters: Mutex::new(HashMap::new()),
            workers,
            upstream,
            side,
            metrics,
            side_timeout: Mutex::new(Duration::from_secs(10)),
            journal: OnceLock::new(),
        }
    }

    /// New options, from a reload.
    pub fn configure(&self, options: SessionOptions, side_timeout: Duration) {
        self.table.lock().set_options(options);
        *self.side_timeout.lock() = side_timeout;
    }

    /// Changes the table, and tells the journal.
    fn with<T>(&self, change: impl FnOnce(&mut Sessions) -> T) -> T {
        let mut table = self.table.lock();
        let outcome = change(&mut table);
        self.note_changes(&mut table);
        outcome
    }

    // === looking ===

    /// The session under a key.
    pub fn view(&self, key: SessionKey) -> Option<SessionView> {
        self.table.lock().view(key, now_ms())
    }

    /// The worker that a turn of deltas is pinned to, and what it would have to wait for there.
    pub fn pin(&self, key: SessionKey, ticket: Option<WaitTicket>) -> Option<(Option<WorkerId>, Option<Busy>)> {
        self.table.lock().pin(key, ticket, now_ms())
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

    // === a turn ===

    /// A turn is about to be sent.
    pub fn begin(self: &Arc<Self>, turn: &BeginTurn) -> Begin {
        let mut begin = self.with(|table| table.begin(turn));
        self.send_closes(std::mem::take(&mut begin.closes));
        begin
    }

    /// A turn begins to wait for its session.
    pub fn wait(self: &Arc<Self>, key: SessionKey, why: Busy) -> Waiter {
        let ticket = self.table.lock().wait(key, why);
        let notify = Arc::new(Notify::new());
        self.waiters.lock().insert(ticket, Arc::clone(&notify));
        Waiter { table: Arc::clone(self), key, ticket, notify }
    }

    /// Sends the open that a lease asks for, and tells the table. Synchronous: the first turn needs it. A client that leaves
    /// meanwhile does not stop the open: its close would overtake it.
    pub async fn open(self: &Arc<Self>, lease: &mut Lease, worker: &Arc<Worker>) {
        let (Some(timeout_ms), Some(engine_id)) = (lease.open_timeout_ms, lease.engine_id.clone()) else { return };
        let (sender, receiver) = oneshot::channel();
        let (this, worker) = (Arc::clone(self), Arc::clone(worker));
        self.side.spawn(async move {
            if let Some(journal) = this.journal() {
                // A process that dies from here on leaves an engine session behind that the next one knows of.
                journal.written().await;
            }
            let result = this.send_open(&worker, &engine_id, timeout_ms).await;
            // Dropped unread, it settles the open by itself.
            let _ = sender.send(OpenAnswer { table: this, engine_id, result: Some(result) });
        });
        let result = match receiver.await {
            Ok(mut answer) => answer.result.take(),
            Err(_) => None,
        };
        let closes = self.with(|table| table.opened(lease, result.unwrap_or(OpenResult::Unknown), now_ms()));
        self.after(closes, lease.key);
    }

    async fn send_open(&self, worker: &Worker, engine_id: &str, timeout_ms: u64) -> OpenResult {
        let body = json!({
            "capacity_of_str_len": CAPACITY_OF_STR_LEN,
            "session_id": engine_id,
            "streaming": true,
            "timeout": timeout_ms as f64 / 1000.0,
        });
        let timeout = *self.side_timeout.lock();
        let reply = match worker.target() {
            Some(target) => {
                let body = Some(Bytes::from(body.to_string()));
                // Sent twice it would be refused the second time, and the session left open.
                let target = target.fresh();
                self.upstream.exchange(&target, "POST", "/open_session", body, timeout, OPEN_REPLY_LIMIT).await
            }
            None => Err(ExchangeError::Unresolved),
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
            Ok(_) => tracing::debug!(worker = %worker.id, engine_id, "open_session"),
        }
        result
    }

    /// An attempt is over.
    pub fn end_attempt(self: &Arc<Self>, hold: &mut Hold, how: AttemptEnd) -> Parting {
        let key = hold.lease().map(|lease| lease.key);
        let mut parting = self.with(|table| hold.end(table, how, now_ms()));
        let closes = std::mem::take(&mut parting.closes);
        match key {
            Some(key) => self.after(closes, key),
            None => self.send_closes(closes),
        }
        parting
    }

    /// A lease is given back unused.
    pub fn end(self: &Arc<Self>, lease: Lease, end: TurnEnd) {
        let key = lease.key;
        let closes = self.with(|table| table.end(lease, end, now_ms()));
        self.after(closes, key);
    }

    /// Nothing enters an engine session until the worker has let go of the turn that was cut there, which takes so long.
    pub fn release_later(self: &Arc<Self>, engine_id: Arc<str>, pause: Duration) {
        let this = Arc::clone(self);
        self.side.spawn(async move {
            tokio::time::sleep(pause).await;
            let closes = this.with(|table| table.released_engine(&engine_id));
            this.send_closes(closes);
            this.wake_all();
        });
    }

    /// A request beside the turns that carried a tag is over; `cut`: not by its answer. A tag that was closed meanwhile is
    /// closed once more, or the worker would keep it for nobody.
    pub fn carried(&self, worker: &Arc<Worker>, engine_id: &str, cut: bool) {
        if self.with(|table| table.carried(engine_id, cut)) {
            self.side.send(SideRequest {
                kind: SideKind::CloseSession,
                worker: Arc::clone(worker),
                body: close_body(engine_id),
                timeout: *self.side_timeout.lock(),
                cancel: CancellationToken::new(),
                done: Box::new(|_| {}),
            });
        }
    }

    // === sweeps ===

    /// Closes what is overdue, and sends closes again that failed.
    pub fn expire(self: &Arc<Self>) {
        let closes = self.with(|table| table.expire(now_ms()));
        self.send_closes(closes);
        self.count();
    }

    /// A worker is gone: its sessions are unbound.
    pub fn worker_lost(self: &Arc<Self>, worker: WorkerId) {
        let loss = self.with(|table| table.worker_lost(worker));
        self.lost(worker, loss, "sessions unbound");
    }

    /// Another process answers at a worker's address: its engine sessions are gone.
    pub fn worker_restarted(self: &Arc<Self>, worker: WorkerId) {
        let loss = self.with(|table| table.worker_restarted(worker));
        self.lost(worker, loss, "engine sessions lost in a restart");
    }

    /// The configuration names a worker no longer.
    pub fn worker_removed(self: &Arc<Self>, worker: WorkerId) {
        let loss = self.with(|table| table.worker_removed(worker));
        self.lost(worker, loss, "sessions unbound from a worker that was removed");
    }

    /// A worker answers again: closes that it missed are sent to it now.
    pub fn worker_back(self: &Arc<Self>, worker: WorkerId) {
        let closes = self.with(|table| table.worker_back(worker));
        self.send_closes(closes);
    }

    fn lost(self: &Arc<Self>, worker: WorkerId, loss: WorkerLoss, what: &'static str) {
        if !loss.unbound.is_empty() {
            tracing::info!(worker = %worker, sessions = loss.unbound.len(), "{what}");
        }
        self.send_closes(loss.closes);
        self.wake_all();
    }

    /// The worker of a session cannot be reached: the next attempt binds it anew.
    pub fn unbind(self: &Arc<Self>, key: SessionKey) {
        let closes = self.with(|table| table.unbind(key));
        self.after(closes, key);
    }

    /// A worker drains: its sessions move when their next turn comes.
    pub fn drain(self: &Arc<Self>, worker: WorkerId) {
        let closes = self.with(|table| table.drain(worker));
        self.send_closes(closes);
        self.wake_all();
    }

    /// Ends every session; their closes go out as far as no turn stands against it.
    pub fn close_all(self: &Arc<Self>) {
        let closes = self.with(|table| table.close_all());
        self.send_closes(closes);
    }

    /// Ends every session and sees to it that workers hold nothing of ours any more, within a time. Closes that fail are sent
    /// again. Returns what may still be open then.
    pub async fn close_within(self: &Arc<Self>, within: Duration) -> Vec<EngineClose> {
        let deadline = Instant::now() + within;
        self.close_all();
        loop {
            // Sessions that turns began meanwhile, and closes that are due again.
            let closes = self.with(|table| {
                let mut closes = table.close_all();
                closes.extend(table.expire(now_ms()));
                closes
            });
            self.send_closes(closes);
            let open = self.table.lock().open_engines();
            if open.is_empty() || Instant::now() >= deadline {
                return open;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    // === effects ===

    fn after(self: &Arc<Self>, closes: Vec<EngineClose>, key: SessionKey) {
        self.send_closes(closes);
        self.wake(key);
    }

    fn send_closes(self: &Arc<Self>, closes: Vec<EngineClose>) {
        for close in closes {
            if close.tries == 0 {
                self.metrics.sessions_ended.with_label_values(&[close.mode.name(), close.cause.name()]).inc();
            } else {
                self.metrics.side_requests.with_label_values(&[SideKind::CloseSession.label(), "retried"]).inc();
            }
            let Some(worker) = self.workers.get(close.worker) else {
                self.with(|table| table.close_result(&close.engine_id, CloseResult::Refused, now_ms()));
                self.wake_for_room();
                continue;
            };
            let body = close_body(&close.engine_id);
            let this = Arc::clone(self);
            self.side.send(SideRequest {
                kind: SideKind::CloseSession,
                worker,
                body,
                timeout: *self.side_timeout.lock(),
                cancel: CancellationToken::new(),
                done: Box::new(move |result| {
                    let result = match result {
                        SideResult::Ok(_) => CloseResult::Closed,
                        SideResult::Refused(_) => CloseResult::Refused,
                        SideResult::NoRoom => CloseResult::NoRoom,
                        SideResult::Failed(_) | SideResult::Cancelled => CloseResult::Failed,
                    };
                    this.with(|table| table.close_result(&close.engine_id, result, now_ms()));
                    this.wake_for_room();
                }),
            });
        }
    }

    /// Wakes the turn that is first to wait for a session.
    fn wake(&self, key: SessionKey) {
        let first = self.table.lock().first_waiting(key);
        if let Some(first) = first {
            self.notify(first);
        }
    }

    /// Wakes the first of each session.
    fn wake_all(&self) {
        let first: Vec<WaitTicket> = self.table.lock().first_waiting_of_all().map(|(ticket, _)| ticket).collect();
        first.into_iter().for_each(|ticket| self.notify(ticket));
    }

    /// Wakes those that wait for a close.
    fn wake_for_room(&self) {
        let waits = |&(_, why): &(WaitTicket, Busy)| matches!(why, Busy::Close | Busy::Room);
        let first: Vec<WaitTicket> =
            self.table.lock().first_waiting_of_all().filter(waits).map(|(ticket, _)| ticket).collect();
        first.into_iter().for_each(|ticket| self.notify(ticket));
    }

    fn notify(&self, ticket: WaitTicket) {
        if let Some(waiter) = self.waiters.lock().get(&ticket) {
            waiter.notify_one();
        }
    }

    /// Sets the gauges.
    pub fn count(&self) {
        let counts = self.counts();
        let number = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        for (mode, n) in [("affinity", counts.affinity), ("tag", counts.tag), ("stream", counts.stream)] {
            self.metrics.sessions.with_label_values(&[mode]).set(number(n));
        }
        let engines = [
            ("leaving", counts.leaving),
            ("closing", counts.closing),
            ("retrying", counts.retrying),
            ("given_up", counts.abandoned),
        ];
        for (state, n) in engines {
            self.metrics.session_closes.with_label_values(&[state]).set(number(n));
        }
        self.metrics.session_waiting.set(number(counts.waiting));
    }
}

/// A turn that waits for its session, in order of arrival. Dropped, it makes way for the next.
pub struct Waiter {
    table: Arc<SessionTable>,
    key: SessionKey,
    ticket: WaitTicket,
    notify: Arc<Notify>,
}

impl Waiter {
    /// The session.
    pub fn key(&self) -> SessionKey {
        self.key
    }

    /// Its place.
    pub fn ticket(&self) -> WaitTicket {
        self.ticket
    }

    /// It waits on, for this reason. True when it is another one than before: it has to ask once more, for what changed until now
    /// woke nobody.
    pub fn waits_for(&self, why: Busy) -> bool {
        self.table.table.lock().waits_for(self.key, self.ticket, why)
    }

    /// Resolves when it is first and something has changed since it last asked.
    pub async fn changed(&self) {
        self.notify.notified().await;
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.table.table.lock().waits_no_more(self.key, self.ticket);
        self.table.waiters.lock().remove(&self.ticket);
        self.table.wake(self.key);
    }
}

/// What `/open_session` brought. Whoever takes it reports it with the lease; untaken, it is reported without.
struct OpenAnswer {
    table: Arc<SessionTable>,
    engine_id: Arc<str>,
    result: Option<OpenResult>,
}

impl Drop for OpenAnswer {
    fn drop(&mut self) {
        if let Some(result) = self.result.take() {
            let closes = self.table.with(|table| table.opened_late(&self.engine_id, result));
            self.table.send_closes(closes);
            self.table.wake_for_room();
        }
    }
}

fn close_body(engine_id: &str) -> Bytes {
    Bytes::from(json!({ "session_id": engine_id }).to_string())
}
