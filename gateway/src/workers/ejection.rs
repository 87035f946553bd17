//! Ejection at work: what turns meet is counted against workers, what their probes and loads tell brings them back.

use super::probe::ProbeOptions;
use super::{Worker, WorkerEvents};
use crate::clock::now_ms;
use crate::fleet_state::Fleet;
use std::sync::Arc;
use std::time::Duration;
use turnstile_fleet::worker::{EjectionCause, Load, MotionChange, WorkerFault, WorkerState};

impl Worker {
    /// Resolves when it is ejected from now on.
    pub(super) async fn ejection(&self) {
        self.ejected.notified().await;
    }

    /// How long it is still ejected.
    pub(super) fn ejected_for(&self) -> Option<Duration> {
        let until_ms = self.with_model(|m| m.ejections.ejected())?.until_ms;
        Some(Duration::from_millis(until_ms.saturating_sub(now_ms())))
    }

    /// Brings it back when its time is over.
    pub(super) fn tick(self: &Arc<Self>, options: &ProbeOptions, events: &dyn WorkerEvents) {
        if self.with_model(|m| m.ejections.tick(now_ms(), &options.ejection)) {
            tracing::info!(worker = %self.id, "worker back on trial: its ejection is over");
            events.room(self);
        }
    }

    /// Its probe went well.
    pub(super) fn probed_well(self: &Arc<Self>, events: &dyn WorkerEvents) {
        if self.with_model(|m| m.ejections.probed(now_ms())) {
            tracing::info!(worker = %self.id, "worker back: it can be reached");
            events.room(self);
        }
    }

    /// A load report came: is it stuck, or does it move again?
    pub(super) fn look_for_motion(self: &Arc<Self>, load: &Load, options: &ProbeOptions, events: &dyn WorkerEvents) {
        let heard = self.heard();
        match self.with_model(|m| m.ejections.report(load, heard, now_ms(), &options.ejection)) {
            Some(MotionChange::Wedged) => {
                tracing::warn!(
                    worker = %self.id, running = load.running, waiting = load.waiting,
                    "worker ejected: nothing moves on it although it has work"
                );
                events.wedged(self);
            }
            Some(MotionChange::Moving) => {
                tracing::info!(worker = %self.id, "worker back: it moves again");
                events.room(self);
            }
            // Another worker may have become ready meanwhile.
            None if self.with_model(|m| m.ejections.is_wedged()) => events.stuck(self),
            None => {}
        }
    }
}

impl Fleet {
    /// A turn failed before its first byte, and the worker is to blame.
    pub fn blame(&self, worker: &Arc<Worker>, fault: WorkerFault) {
        let name = if fault == WorkerFault::Connect { EjectionCause::Connect } else { EjectionCause::Answer }.name();
        self.metrics.worker_faults.with_label_values(&[&*worker.id, name]).inc();
        let settings = self.settings();
        let options = &settings.probe.ejection;
        let pool = settings.pools.iter().map(|pool| &pool.workers).find(|workers| holds(workers, worker));
        let Some(workers) = pool else { return };
        // One at a time, so that two workers that fail together do not both take the last place.
        let _one = self.ejecting.lock();
        let out = |w: &&Arc<Worker>| {
            w.index != worker.index
                && w.with_model(|m| m.ejected().is_some_and(|ejected| ejected.cause != EjectionCause::Wedge))
        };
        let room = workers.iter().filter(out).count() < options.most_out(workers.len());
        let ejected = worker.with_model(|m| {
            // A worker whose probes fail is out already, and one that drains gets nothing new.
            let taken_out = m.ejections.fault(fault, now_ms(), room && m.state == WorkerState::Ready, options);
            taken_out.then(|| (m.ejections.ejected(), m.ejections.faults_in_a_row()))
        });
        let Some((Some(ejected), faults)) = ejected else { return };
        let cause = ejected.cause.name();
        let for_ms = ejected.until_ms.saturating_sub(now_ms());
        tracing::warn!(worker = %worker.id, cause, faults, for_ms, "worker ejected");
        self.metrics.ejections.with_label_values(&[&*worker.id, cause]).inc();
        worker.ejected.notify_one();
    }

    /// Nothing moves on a worker.
    pub(crate) fn take_off_wedged(&self, worker: &Arc<Worker>) {
        self.metrics.ejections.with_label_values(&[&*worker.id, EjectionCause::Wedge.name()]).inc();
        // Its sessions begin anew elsewhere. What idle streaming sessions hold may be what it is stuck on, and is closed.
        self.sessions.worker_lost(worker.index);
        self.take_turns_off(worker);
        worker.ejected.notify_one();
        self.admission.dispatch();
    }

    /// Turns that wait on a worker for the beginning of an answer go elsewhere, if there is somewhere else.
    pub(crate) fn take_turns_off(&self, worker: &Arc<Worker>) {
        let settings = self.settings();
        let pool = settings.pools.iter().map(|pool| &pool.workers).find(|workers| holds(workers, worker));
        let elsewhere = |w: &Arc<Worker>| w.index != worker.index && w.state() == WorkerState::Ready;
        if pool.is_some_and(|workers| workers.iter().any(elsewhere)) {
            worker.stuck.notify_waiters();
        }
    }
}

fn holds(workers: &[Arc<Worker>], worker: &Arc<Worker>) -> bool {
    workers.iter().any(|w| w.index == worker.index)
}
