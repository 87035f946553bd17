//! What happens to sessions without a turn: expiry, workers that go, the end of the gateway.

use super::engine::EngineState;
use super::{CloseCause, EngineClose, Sessions, WorkerLoss};
use crate::ids::{SessionKey, WorkerId};

impl Sessions {
    /// Ends the sessions whose idle timeout has passed. To be called now and then; a turn that comes for an overdue session
    /// before the next call finds it expired all the same.
    #[must_use = "closes have to be sent"]
    pub fn expire(&mut self, now_ms: u64) -> Vec<EngineClose> {
        let mut closes = Vec::new();
        while let Some(&(deadline_ms, key)) = self.deadlines.first() {
            if deadline_ms > now_ms {
                break;
            }
            self.end_session(key, CloseCause::Expired, &mut closes);
            self.debug_check(key);
        }
        for number in self.engines.timed_out(now_ms) {
            self.forget_engine(number);
        }
        closes.extend(self.engines.retry_due(now_ms));
        closes
    }

    /// When [`expire`](Self::expire) has something to do next, as far as is known now.
    pub fn next_deadline_ms(&self) -> Option<u64> {
        let session = self.deadlines.first().map(|&(deadline_ms, _)| deadline_ms);
        session.into_iter().chain(self.engines.next_retry_ms()).min()
    }

    /// The worker answers again: closes that it missed are sent to it now.
    #[must_use = "closes have to be sent"]
    pub fn worker_back(&mut self, worker: WorkerId) -> Vec<EngineClose> {
        self.engines.retry_at(worker)
    }

    pub(super) fn expire_if_due(&mut self, key: SessionKey, now_ms: u64, closes: &mut Vec<EngineClose>) {
        if self.session(key).is_some_and(|session| session.in_flight == 0 && session.deadline_ms() <= now_ms) {
            self.end_session(key, CloseCause::Expired, closes);
        }
    }

    /// Ends a session without a turn. With turns in flight, its close comes out of the end of the last.
    #[must_use = "closes have to be sent"]
    pub fn close(&mut self, key: SessionKey) -> Vec<EngineClose> {
        let mut closes = Vec::new();
        self.end_session(key, CloseCause::Asked, &mut closes);
        self.debug_check(key);
        closes
    }

    /// Takes a session off its worker, to which a turn could not be sent. The next turn binds it anew.
    #[must_use = "closes have to be sent"]
    pub fn unbind(&mut self, key: SessionKey) -> Vec<EngineClose> {
        let mut closes = Vec::new();
        self.unbind_session(key, CloseCause::Worker, &mut closes);
        self.debug_check(key);
        closes
    }

    /// The worker gets nothing new: its sessions are unbound and closed there, those with a turn in flight when it has ended.
    #[must_use = "closes have to be sent"]
    pub fn drain(&mut self, worker: WorkerId) -> Vec<EngineClose> {
        self.worker_lost(worker).closes
    }

    /// The worker cannot be reached: its sessions are unbound, streaming ones have lost their context.
    pub fn worker_lost(&mut self, worker: WorkerId) -> WorkerLoss {
        let mut loss = WorkerLoss::default();
        for (&key, slot) in &self.slots {
            if slot.session.as_ref().is_some_and(|session| session.bound.is_some_and(|spot| spot.0 == worker)) {
                loss.unbound.push(key);
            }
        }
        for &key in &loss.unbound {
            self.unbind_session(key, CloseCause::Worker, &mut loss.closes);
            self.debug_check(key);
        }
        // Closes that an open waits for are not worth the wait any more.
        let waiting: Vec<u64> =
            self.engines.iter().filter(|(_, e)| e.spot.0 == worker).map(|(number, _)| number).collect();
        for number in waiting {
            self.engines.update(number, |engine| engine.lost = true);
        }
        loss
    }

    /// The process behind the worker is another one than before: what it held of ours is gone. Closes are sent all the same:
    /// a turn may have opened its session in the new process before anyone noticed, and for others a close is nothing.
    pub fn worker_restarted(&mut self, worker: WorkerId) -> WorkerLoss {
        let mut loss = self.worker_lost(worker);
        loss.closes.extend(self.engines.retry_at(worker));
        loss
    }

    /// The worker is configured no more: its sessions are unbound, and each close is tried once.
    pub fn worker_removed(&mut self, worker: WorkerId) -> WorkerLoss {
        let mut loss = self.worker_lost(worker);
        let all: Vec<u64> = self.engines.iter().filter(|(_, e)| e.spot.0 == worker).map(|(number, _)| number).collect();
        for number in all {
            self.engines.update(number, |engine| engine.last_try = true);
            if self.engines.get(number).is_some_and(|e| matches!(e.state, EngineState::Abandoned { .. })) {
                self.forget_engine(number);
            }
        }
        loss.closes.extend(self.engines.retry_at(worker));
        loss
    }

    /// The gateway ends: every session is over. Those with turns in flight give their closes when these end.
    #[must_use = "closes have to be sent"]
    pub fn close_all(&mut self) -> Vec<EngineClose> {
        let mut closes = Vec::new();
        let keys: Vec<SessionKey> =
            self.slots.iter().filter(|(_, slot)| slot.session.is_some()).map(|(&key, _)| key).collect();
        for key in keys {
            self.end_session(key, CloseCause::Shutdown, &mut closes);
        }
        closes
    }

    /// What workers hold, as closes not yet due: to be kept on disk, and sent by the next process if this one dies.
    pub fn open_engines(&self) -> Vec<EngineClose> {
        self.engines
            .iter()
            .filter(|(_, engine)| !matches!(engine.state, EngineState::Abandoned { .. }))
            .map(|(_, engine)| engine.to_close())
            .collect()
    }
}
