//! Where a stream's environment lies while its owner waits, so that callbacks of other contexts can reach it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::env::StreamEnv;

/// The place of one environment. Empty while its owner has it, or while a callback uses it.
#[derive(Default)]
pub struct Berth {
    env: Mutex<Option<Box<dyn StreamEnv>>>,
    /// Told when an environment is laid there, or is back from a callback.
    home: Condvar,
}

/// An environment that a callback of another context uses. Goes back when this is dropped, come what may.
pub(crate) struct Visit {
    pub(crate) context: u32,
    pub(crate) env: Option<Box<dyn StreamEnv>>,
    berth: Arc<Berth>,
}

impl Berth {
    /// Lays an environment there.
    pub(crate) fn park(&self, env: Option<Box<dyn StreamEnv>>) {
        *self.env.lock() = env;
        self.home.notify_all();
    }

    /// Takes what lies there, or comes to lie there within this time.
    fn borrow_within(&self, patience: Duration) -> Option<Box<dyn StreamEnv>> {
        let mut place = self.env.lock();
        if place.is_none() && !patience.is_zero() {
            let until = Instant::now() + patience;
            while place.is_none() && !self.home.wait_until(&mut place, until).timed_out() {}
        }
        place.take()
    }

    /// Whether something lies there now.
    pub(crate) fn is_taken(&self) -> bool {
        self.env.lock().is_some()
    }

    /// Takes it back. Waits for a callback that uses it, whose time is bounded.
    pub(crate) fn unpark(&self) -> Option<Box<dyn StreamEnv>> {
        let mut place = self.env.lock();
        loop {
            if let Some(env) = place.take() {
                return Some(env);
            }
            self.home.wait(&mut place);
        }
    }
}

impl std::fmt::Debug for Berth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Berth").finish_non_exhaustive()
    }
}

impl Visit {
    /// Borrows what lies there for a context, or comes to lie there within this time, if anything does.
    pub(crate) fn new(berth: &Arc<Berth>, context: u32, patience: Duration) -> Option<Self> {
        let env = berth.borrow_within(patience)?;
        Some(Self { context, env: Some(env), berth: Arc::clone(berth) })
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        // Put back even if it got lost on the way: its owner waits for it.
        let env = self.env.take().unwrap_or_else(|| Box::new(crate::env::NoEnv));
        *self.berth.env.lock() = Some(env);
        self.berth.home.notify_all();
    }
}
