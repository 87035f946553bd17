//! A turn's hold on its session: whatever becomes of the request, the lease is ended exactly once, and what has to follow is
//! sent.

use crate::sessions::SessionTable;
use crate::side::{SideKind, SideRequest, SideRequests, SideResult};
use crate::workers::Worker;
use bytes::Bytes;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use turnstile_fleet::session::{AttemptEnd, Hold, Lease, RELEASE_UNTOLD_MS, SessionMode};

/// What a worker was asked and may still be doing.
pub struct Sent {
    /// The worker.
    pub worker: Arc<Worker>,
    /// The engine's id of the request, if the route takes one.
    pub rid: Option<String>,
}

/// One attempt's hold on session and worker.
pub struct SessionTurn {
    table: Arc<SessionTable>,
    side: Arc<SideRequests>,
    hold: Hold,
    sent: Option<Sent>,
    timeout: Duration,
    /// Its engine session was opened for this turn.
    begins: bool,
}

impl SessionTurn {
    /// Holds a lease, if there is one.
    pub fn new(table: Arc<SessionTable>, side: Arc<SideRequests>, lease: Option<Lease>, timeout: Duration) -> Self {
        Self { table, side, hold: Hold::new(lease), sent: None, timeout, begins: false }
    }

    /// The lease.
    pub fn lease(&self) -> Option<&Lease> {
        self.hold.lease()
    }

    /// Whether the turn runs in a streaming session.
    pub fn is_streaming(&self) -> bool {
        self.lease().is_some_and(|lease| lease.mode == SessionMode::Stream)
    }

    /// Opens the engine session that the lease asks for.
    pub async fn open(&mut self, worker: &Arc<Worker>) {
        if let Some(lease) = self.hold.lease_mut() {
            let opens = lease.open_timeout_ms.is_some();
            self.table.open(lease, worker).await;
            self.begins = opens && lease.mode == SessionMode::Stream;
        }
    }

    /// Whether the engine session begins with this turn, so that it may as well begin elsewhere.
    pub fn begins_engine_session(&self) -> bool {
        self.begins
    }

    /// The request is about to reach the worker.
    pub fn sent(&mut self, sent: Sent) {
        self.hold.sent();
        self.sent = Some(sent);
    }

    /// The attempt is over. True when the turn never ran and may be placed again in its session.
    pub fn end(&mut self, how: AttemptEnd) -> bool {
        let parting = self.table.end_attempt(&mut self.hold, how);
        let sent = self.sent.take().filter(|_| parting.abort);
        let table = Arc::clone(&self.table);
        let untold = Duration::from_millis(RELEASE_UNTOLD_MS);
        match (sent, parting.release) {
            (Some(Sent { worker, rid: Some(rid) }), release) => self.side.send(SideRequest {
                kind: SideKind::Abort,
                worker: Arc::clone(&worker),
                body: Bytes::from(json!({ "rid": rid }).to_string()),
                timeout: self.timeout,
                cancel: CancellationToken::new(),
                done: Box::new(move |result| {
                    if let Some(engine_id) = release {
                        let told = matches!(result, SideResult::Ok(_));
                        table.release_later(engine_id, if told { worker.lets_go_within() } else { untold });
                    }
                }),
            }),
            (_, Some(engine_id)) => table.release_later(engine_id, untold),
            (_, None) => {}
        }
        parting.again
    }
}

impl Drop for SessionTurn {
    fn drop(&mut self) {
        self.end(AttemptEnd::Cut);
    }
}
