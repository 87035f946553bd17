//! What became of a turn's attempts, and whether there is another one. The one place that decides about retries.

use super::turn::left;
use crate::errors::Refusal;
use crate::fleet_state::Fleet;
use crate::forward::{AttemptFault, Blame, client_gone};
use crate::workers::Worker;
use pingora_core::protocols::http::ServerSession;
use std::sync::Arc;
use std::time::Duration;
use turnstile_config::Retry;
use turnstile_fleet::ids::WorkerId;
use turnstile_fleet::retry::{BudgetOptions, pause_ms};
use turnstile_fleet::worker::WorkerFault;
use xxhash_rust::xxh3::xxh3_64;

/// The attempts of one turn.
pub(super) struct Retries {
    fleet: Arc<Fleet>,
    options: Retry,
    pool: u32,
    pool_name: Arc<str>,
    /// Chooses the pauses, the same for the same request id.
    seed: u64,
    made: u32,
    /// Workers that failed it.
    excluded: Vec<WorkerId>,
    last: Option<AttemptFault>,
    /// Workers that answered it with a 5xx. If several do, it is the turn that they cannot digest.
    suspects: Vec<Arc<Worker>>,
    /// A first retry after a lost worker was granted already.
    had_free: bool,
    /// Workers that were lost with the turn in their hands.
    lost: u32,
}

// === impl Retries ===

impl Retries {
    pub fn new(fleet: &Arc<Fleet>, options: &Retry, pool: (u32, &Arc<str>), request_id: &str) -> Self {
        fleet.count_turn(pool.0);
        Self {
            fleet: Arc::clone(fleet),
            options: options.clone(),
            pool: pool.0,
            pool_name: Arc::clone(pool.1),
            seed: xxh3_64(request_id.as_bytes()),
            made: 0,
            excluded: Vec::new(),
            last: None,
            suspects: Vec::new(),
            had_free: false,
            lost: 0,
        }
    }

    /// Attempts that were made.
    pub fn made(&self) -> u32 {
        self.made
    }

    /// Workers that failed the turn.
    pub fn excluded(&self) -> &[WorkerId] {
        &self.excluded
    }

    /// What became of the last attempt.
    pub fn last(&self) -> Option<&AttemptFault> {
        self.last.as_ref()
    }

    /// The turn found a place.
    pub fn placed(&self) {
        if self.made > 0 {
            self.count("retried");
        }
    }

    /// No worker is left for it.
    pub fn no_worker(&self) {
        if self.made > 0 {
            self.count("no_worker");
        }
    }

    /// An attempt failed, and nothing reached the client.
    pub fn failed(&mut self, worker: Option<&Arc<Worker>>, fault: AttemptFault) {
        self.lost += u32::from(fault.lost_with_the_turn());
        if let Some(worker) = worker {
            self.excluded.push(worker.index);
            match fault.blame() {
                Blame::Worker(fault) => self.fleet.blame(worker, fault),
                Blame::WorkerOrTurn => self.suspects.push(Arc::clone(worker)),
                Blame::Nobody => {}
            }
        }
        self.last = Some(fault);
    }

    /// Whether there may be another attempt after a failed one, with the pause before it over. `replayable`: the turn may be
    /// sent a second time.
    pub async fn again(&mut self, client: &mut ServerSession, replayable: bool) -> Result<bool, Refusal> {
        self.made += 1;
        if let Some(fault) = &self.last {
            if !replayable || !fault.retryable() {
                return Ok(false);
            }
            if self.made >= self.options.attempts {
                self.count("attempts");
                return Ok(false);
            }
            if self.lost >= self.options.lost_workers {
                self.count("lost_workers");
                return Ok(false);
            }
            // A worker that is lost does no work any more, so giving its turns to others once adds none.
            let free = fault.lost_worker() && !std::mem::replace(&mut self.had_free, true);
            let budget =
                BudgetOptions { ratio: self.options.budget_ratio, floor_per_s: self.options.budget_floor_per_s };
            if !free && !self.fleet.take_retry(self.pool, &budget) {
                self.count("budget");
                return Ok(false);
            }
        } else if self.made >= self.options.attempts {
            return Ok(false);
        }
        let pause = pause_ms(self.options.backoff_ms, self.options.max_backoff_ms, self.made, self.seed);
        tokio::select! {
            () = tokio::time::sleep(Duration::from_millis(pause)) => Ok(true),
            () = client_gone(client) => Err(left()),
        }
    }

    /// What the last attempt ended with, to be told to the client.
    pub fn into_last(mut self) -> Option<AttemptFault> {
        self.last.take()
    }

    fn count(&self, result: &str) {
        self.fleet.metrics.retries.with_label_values(&[&*self.pool_name, result]).inc();
    }
}

impl Drop for Retries {
    fn drop(&mut self) {
        if let [worker] = self.suspects.as_slice() {
            self.fleet.blame(worker, WorkerFault::Answer);
        }
    }
}
