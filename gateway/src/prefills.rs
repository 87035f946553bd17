//! The speculative prefills that run, the turns they must not get in the way of, and what became of them.

use crate::metrics::Metrics;
use hashbrown::HashMap;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use turnstile_fleet::ids::{SessionKey, WorkerId};

/// Prefills remembered until the next turn of their session.
const REMEMBERED: usize = 65_536;
/// A turn that comes later than this says nothing about a prefill.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// The prefills of a gateway.
pub struct Prefills {
    inner: Mutex<Inner>,
    metrics: Arc<Metrics>,
}

#[derive(Default)]
struct Inner {
    running: HashMap<SessionKey, (u64, CancellationToken)>,
    by_worker: HashMap<WorkerId, u32>,
    /// Turns that are here, by session.
    turns: HashMap<SessionKey, u32>,
    done: HashMap<SessionKey, Done>,
    last: u64,
}

/// A prefill that was run.
struct Done {
    worker: WorkerId,
    /// Prompt tokens of the turn before it.
    prompt_tokens: u64,
    at: Instant,
}

impl Prefills {
    /// None yet.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self { inner: Mutex::default(), metrics }
    }

    /// A turn of a session is here, until the answer is dropped: a prefill for it comes too late from now on.
    pub fn arrive(self: &Arc<Self>, key: SessionKey) -> Arrived {
        let mut inner = self.inner.lock();
        *inner.turns.entry(key).or_insert(0) += 1;
        if let Some((_, token)) = inner.running.remove(&key) {
            token.cancel();
        }
        Arrived { prefills: Arc::clone(self), key }
    }

    /// Takes a place, unless another turn of the session is here already, the session has a prefill, or the worker has enough
    /// of them.
    ///
    /// # Errors
    /// Why not, for the log.
    pub fn reserve(
        self: &Arc<Self>,
        key: Option<SessionKey>,
        worker: WorkerId,
        per_worker: u32,
    ) -> Result<Place, &'static str> {
        let mut inner = self.inner.lock();
        if let Some(key) = key {
            if inner.turns.get(&key).is_some_and(|&turns| turns > 1) {
                return Err("skipped: the next turn is here");
            }
            if inner.running.contains_key(&key) {
                return Err("skipped: one runs for the session");
            }
        }
        let running = inner.by_worker.entry(worker).or_insert(0);
        if *running >= per_worker {
            return Err("skipped: worker budget");
        }
        *running += 1;
        inner.last += 1;
        let number = inner.last;
        let cancel = CancellationToken::new();
        if let Some(key) = key {
            inner.running.insert(key, (number, cancel.clone()));
        }
        Ok(Place { prefills: Arc::clone(self), key, worker, number, cancel })
    }

    /// The gateway stops: nothing is warmed for anybody.
    pub fn cancel_all(&self) {
        self.inner.lock().running.drain().for_each(|(_, (_, token))| token.cancel());
    }

    /// A turn of a session was served: what its prefill was good for.
    pub fn followed(&self, key: SessionKey, worker: WorkerId, cached_tokens: Option<u64>) {
        let Some(done) = self.inner.lock().done.remove(&key) else { return };
        if done.worker != worker || done.at.elapsed() > FORGOTTEN_AFTER {
            self.count("unused");
            return;
        }
        let Some(cached) = cached_tokens else { return };
        let gained = cached.saturating_sub(done.prompt_tokens);
        self.count(if gained > 0 { "used" } else { "useless" });
        self.metrics.prefill_tokens.inc_by(gained);
    }

    /// Prefills that run.
    pub fn running(&self) -> u32 {
        self.inner.lock().by_worker.values().sum()
    }

    fn count(&self, outcome: &str) {
        self.metrics.prefill_outcomes.with_label_values(&[outcome]).inc();
    }
}

/// A turn that is here.
pub struct Arrived {
    prefills: Arc<Prefills>,
    key: SessionKey,
}

impl Drop for Arrived {
    fn drop(&mut self) {
        let mut inner = self.prefills.inner.lock();
        if let Some(turns) = inner.turns.get_mut(&self.key) {
            *turns = turns.saturating_sub(1);
            if *turns == 0 {
                inner.turns.remove(&self.key);
            }
        }
    }
}

/// A place for a prefill; dropping it gives it back.
pub struct Place {
    prefills: Arc<Prefills>,
    key: Option<SessionKey>,
    worker: WorkerId,
    number: u64,
    cancel: CancellationToken,
}

impl Place {
    /// Cancelled when the real turn arrives.
    pub fn cancel(&self) -> CancellationToken {
        self.cancel.clone()
    }

    /// The prefill was run, after a turn of so many prompt tokens.
    pub fn done(&self, prompt_tokens: Option<u64>) {
        let (Some(key), Some(prompt_tokens)) = (self.key, prompt_tokens) else { return };
        let mut forgotten = 0;
        {
            let mut inner = self.prefills.inner.lock();
            if inner.done.len() >= REMEMBERED {
                let before = inner.done.len();
                inner.done.retain(|_, done| done.at.elapsed() < FORGOTTEN_AFTER);
                forgotten = before - inner.done.len();
            }
            if inner.done.len() < REMEMBERED {
                let done = Done { worker: self.worker, prompt_tokens, at: Instant::now() };
                forgotten += usize::from(inner.done.insert(key, done).is_some());
            }
        }
        (0..forgotten).for_each(|_| self.prefills.count("unused"));
    }

    /// The prefill was not run to its end.
    pub fn lost(&self, outcome: &'static str) {
        self.prefills.count(outcome);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut inner = self.prefills.inner.lock();
        if let Some(running) = inner.by_worker.get_mut(&self.worker) {
            *running = running.saturating_sub(1);
            if *running == 0 {
                inner.by_worker.remove(&self.worker);
            }
        }
        // A newer prefill of the same session keeps its place.
        if let Some(key) = self.key
            && inner.running.get(&key).is_some_and(|(number, _)| *number == self.number)
        {
            inner.running.remove(&key);
        }
    }
}
