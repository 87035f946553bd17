//! Closing what a killed process left open on workers.
//!
//! A worker drops a turn when the connection of its client is gone, which it may notice only after some seconds; and an engine
//! session is not closed while a turn runs in it. So streaming sessions are given that time. A close that fails is sent again by
//! the session table, as any other.

use crate::fleet_state::Fleet;
use crate::workers::Worker;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use turnstile_fleet::session::RELEASE_UNTOLD_MS;
use turnstile_fleet::worker::WorkerState;

/// How often it is looked what can be closed and what is closed.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Closes under way at a time, so that there is room for others.
const AT_A_TIME: usize = 128;
/// How often it is told that some cannot be closed.
const TELL_EVERY: Duration = Duration::from_secs(60);

/// An engine session that nobody uses.
pub struct Orphan {
    /// The engine's id.
    pub id: Arc<str>,
    /// It is a streaming session.
    pub stream: bool,
    /// Where it is.
    pub worker: Arc<Worker>,
}

/// Closes all of them, however long their workers take.
pub async fn close(mut waiting: Vec<Orphan>, fleet: Arc<Fleet>) {
    let all = waiting.len();
    if all == 0 {
        return;
    }
    let let_go = Instant::now() + Duration::from_millis(RELEASE_UNTOLD_MS);
    let mut told = Instant::now();
    let mut sent: Vec<Orphan> = Vec::new();
    let mut look = tokio::time::interval(LOOK_EVERY);
    loop {
        let left = waiting.len() + sent.len();
        fleet.metrics.orphans.set(i64::try_from(left).unwrap_or(i64::MAX));
        if left == 0 {
            tracing::info!(engine_sessions = all, "engine sessions of the last process are closed");
            return;
        }
        if told.elapsed() >= TELL_EVERY {
            told = Instant::now();
            tracing::warn!(engine_sessions = left, "engine sessions of the last process are not closed yet");
        }
        look.tick().await;
        sent.retain(|orphan| fleet.sessions.knows_engine(&orphan.id));
        let room = AT_A_TIME.saturating_sub(sent.len());
        let due = |orphan: &Orphan| is_there(&orphan.worker) && (!orphan.stream || Instant::now() >= let_go);
        let (due, later): (Vec<Orphan>, Vec<Orphan>) = waiting.into_iter().partition(due);
        let mut due = due.into_iter();
        for orphan in due.by_ref().take(room) {
            fleet.sessions.release_orphan(&orphan.id);
            sent.push(orphan);
        }
        waiting = due.chain(later).collect();
    }
}

/// It can be asked, or will never be better than now.
fn is_there(worker: &Worker) -> bool {
    match worker.state() {
        WorkerState::Ready => true,
        WorkerState::Draining => worker.is_probed() || worker.is_removed(),
        WorkerState::Starting | WorkerState::Unhealthy => false,
    }
}
