//! Draining a worker: nothing new goes there, what runs there ends there, its sessions move at their next turn.

use crate::fleet_state::Fleet;
use crate::workers::Worker;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

/// How often it is looked whether a worker is empty.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What a worker still has of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Left {
    /// Turns.
    pub in_flight: u32,
    /// Sessions bound there.
    pub sessions: u32,
    /// Engine sessions not known to be closed.
    pub engine_sessions: usize,
}

impl Left {
    /// Of a worker.
    pub fn on(fleet: &Fleet, worker: &Worker) -> Self {
        let mut held = Vec::new();
        fleet.sessions.held(std::iter::once(worker.index), &mut held);
        Self {
            in_flight: worker.view(0).in_flight,
            sessions: held.first().map_or(0, |held| held.sessions),
            engine_sessions: fleet.sessions.engines_on(worker.index),
        }
    }

    /// It can be stopped without anybody noticing.
    pub fn is_empty(self) -> bool {
        self == Self { in_flight: 0, sessions: 0, engine_sessions: 0 }
    }

    /// For the admin listener.
    pub fn json(self, worker: &Worker) -> Value {
        json!({
            "id": &*worker.id,
            "state": worker.state().name(),
            "draining": worker.is_draining(),
            "in_flight": self.in_flight,
            "sessions": self.sessions,
            "engine_sessions": self.engine_sessions,
            "empty": self.is_empty(),
        })
    }
}

/// Drains a worker.
pub fn drain(fleet: &Arc<Fleet>, worker: &Arc<Worker>) {
    if !worker.is_draining() {
        tracing::info!(worker = %worker.id, "draining");
    }
    worker.drain();
    fleet.sessions.drain(worker.index);
    // Turns that wait for it alone look elsewhere.
    fleet.admission.dispatch();
}

/// Takes a worker into use again.
pub fn undrain(fleet: &Arc<Fleet>, worker: &Arc<Worker>) {
    if worker.is_draining() {
        tracing::info!(worker = %worker.id, "no longer draining");
    }
    worker.undrain();
    fleet.admission.dispatch();
}

/// Sends away the sessions of turns that were placed at the very moment in which their worker began to drain.
pub fn sweep(fleet: &Arc<Fleet>) {
    for worker in fleet.workers.current() {
        if worker.is_draining() && Left::on(fleet, &worker).sessions > 0 {
            fleet.sessions.drain(worker.index);
        }
    }
}

/// Waits until a worker is empty or no longer drains, `most` at the longest. What it has then.
pub async fn wait(fleet: &Fleet, worker: &Worker, most: Duration) -> Left {
    let empty = async {
        while worker.is_draining() && !Left::on(fleet, worker).is_empty() {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    // What is left is told either way.
    let _ = tokio::time::timeout(most, empty).await;
    Left::on(fleet, worker)
}
