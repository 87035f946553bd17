//! A turn's hold on its session: whatever becomes of the request, the lease is ended exactly once.

use crate::sessions::SessionTable;
use crate::side::{SideKind, SideRequest, SideRequests, SideResult};
use crate::workers::Worker;
use bytes::Bytes;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use turnstile_fleet::session::{Lease, SessionMode, TurnEnd};

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
    lease: Option<Lease>,
    sent: Option<Sent>,
    timeout: Duration,
}

impl SessionTurn {
    /// Holds a lease, if there is one.
    pub fn new(table: Arc<SessionTable>, side: Arc<SideRequests>, lease: Option<Lease>, timeout: Duration) -> Self {
        Self { table, side, lease, sent: None, timeout }
    }

    /// The lease.
    pub fn lease(&self) -> Option<&Lease> {
        self.lease.as_ref()
    }

    /// Opens the engine session that the lease asks for.
    pub async fn open(&mut self, worker: &Worker) {
        if let Some(lease) = &mut self.lease {
            self.table.open(lease, worker).await;
        }
    }

    /// The request is about to reach the worker.
    pub fn sent(&mut self, sent: Sent) {
        self.sent = Some(sent);
    }

    /// The attempt is over and the worker is done with it.
    pub fn end(&mut self, end: TurnEnd) {
        self.sent = None;
        if let Some(lease) = self.lease.take() {
            self.table.end(lease, end);
        }
    }

    /// The worker could not be reached. A streaming session overrules the decision, so it is taken off that worker: otherwise
    /// every further attempt would go to the same place.
    pub fn unreachable(&mut self) {
        let streaming = self.lease.as_ref().filter(|l| l.mode == SessionMode::Stream).map(|l| l.key);
        self.end(TurnEnd::NotServed);
        if let Some(key) = streaming {
            self.table.unbind(key);
        }
    }

    /// The attempt was cut while the worker may be running it: the worker is told to stop, and a streaming session waits
    /// until it has.
    pub fn abort(&mut self) {
        let streaming: Option<Arc<str>> =
            self.lease.as_ref().filter(|l| l.mode == SessionMode::Stream).and_then(|l| l.engine_id.clone());
        if let Some(lease) = self.lease.take() {
            self.table.end(lease, TurnEnd::Aborted);
        }
        let table = Arc::clone(&self.table);
        let Some(Sent { worker, rid: Some(rid) }) = self.sent.take() else {
            if let Some(engine_id) = streaming {
                table.release_later(engine_id, false);
            }
            return;
        };
        self.side.send(SideRequest {
            kind: SideKind::Abort,
            worker,
            body: Bytes::from(json!({ "rid": rid }).to_string()),
            timeout: self.timeout,
            cancel: CancellationToken::new(),
            done: Box::new(move |result| {
                if let Some(engine_id) = streaming {
                    table.release_later(engine_id, matches!(result, SideResult::Ok(_)));
                }
            }),
        });
    }
}

impl Drop for SessionTurn {
    fn drop(&mut self) {
        if self.sent.is_some() {
            self.abort();
        } else {
            self.end(TurnEnd::NotServed);
        }
    }
}
