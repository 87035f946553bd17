//! Instances that stand apart from their shard: one that was replaced because its memory had grown, for the streams it holds,
//! and one that is a stream's own.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::instance::Instance;
use crate::outcome::{FaultKind, PluginError};
use crate::plugin::{PluginInner, ROOT_END_MS, TickReport};
use crate::shard::{Shard, ShardState};

/// Least time between two replacements of a shard's instance for its memory, ms: a start may take long.
const RECYCLE_EVERY_MS: u64 = 10_000;

/// The instances of one plugin that stand apart, by their number.
#[derive(Default)]
pub(crate) struct Apart(Mutex<HashMap<u64, Arc<Mutex<ShardState>>>>);

impl Apart {
    fn add(&self, state: ShardState) -> Option<Arc<Mutex<ShardState>>> {
        let sequence = state.instance.as_deref()?.sequence();
        let state = Arc::new(Mutex::new(state));
        self.0.lock().insert(sequence, Arc::clone(&state));
        Some(state)
    }

    fn get(&self, sequence: u64) -> Option<Arc<Mutex<ShardState>>> {
        self.0.lock().get(&sequence).cloned()
    }

    fn remove(&self, sequence: u64) {
        // Dropped outside of the lock: an instance may be large.
        let _gone = self.0.lock().remove(&sequence);
    }

    fn take_all(&self) -> Vec<Arc<Mutex<ShardState>>> {
        std::mem::take(&mut *self.0.lock()).into_values().collect()
    }
}

impl PluginInner {
    /// Runs something on the state that holds an instance, wherever it stands. None if the instance is gone.
    pub(crate) fn with_holder<R>(&self, at: usize, sequence: u64, run: impl FnOnce(&mut ShardState) -> R) -> Option<R> {
        let shard = self.shards.get(at)?;
        {
            let mut state = shard.state.lock();
            if state.holds(sequence) {
                return Some(run(&mut state));
            }
        }
        let apart = self.apart.get(sequence)?;
        let mut state = apart.lock();
        state.holds(sequence).then(|| run(&mut state))
    }

    /// Starts an instance for one stream alone.
    pub(crate) fn start_own(&self) -> Result<Arc<Mutex<ShardState>>, PluginError> {
        let instance = Instance::start(&self.runtime, &self.loaded, &self.pre)?;
        let state = ShardState { instance: Some(Box::new(instance)), ..ShardState::default() };
        // It has an instance, so it was added.
        Ok(self.apart.add(state).unwrap_or_default())
    }

    /// A stream that had an instance of its own has ended, well or not.
    pub(crate) fn end_own(self: &Arc<Self>, shard: usize, sequence: u64, well: bool) {
        let streak = &self.loaded.stats.stream_streak;
        if well {
            streak.store(0, Relaxed);
        } else {
            streak.fetch_add(1, Relaxed);
        }
        let Some(own) = self.apart.get(sequence) else { return };
        self.apart.remove(sequence);
        let outgoing = {
            let mut state = own.lock();
            if let Some(instance) = state.take_instance() {
                instance.note_memory();
            }
            state.collect()
        };
        self.send(shard, outgoing);
    }

    /// Ends streams with instances of their own that were dropped unfinished.
    pub(crate) fn end_owned_orphans(self: &Arc<Self>, at: usize, orphans: &[(u64, u32)], report: &mut TickReport) {
        for (sequence, context) in orphans {
            let Some(own) = self.apart.get(*sequence) else { continue };
            let ended = self.enter(&mut own.lock(), |instance| instance.finish(*context));
            self.end_own(at, *sequence, ended.is_ok());
            report.faults.extend(ended.err());
        }
    }

    /// Throws all instances that stand apart away.
    pub(crate) fn end_apart(self: &Arc<Self>) {
        for state in self.apart.take_all() {
            let outgoing = {
                let mut state = state.lock();
                drop(state.take_instance());
                state.collect()
            };
            self.send(0, outgoing);
        }
        for shard in &self.shards {
            *shard.leaving.lock() = None;
        }
    }

    /// An instance that was replaced: it ends with its last stream.
    pub(crate) fn tick_leaving(
        self: &Arc<Self>,
        at: usize,
        shard: &Shard,
        orphans: &[(u64, u32)],
        now_ms: u64,
        report: &mut TickReport,
    ) {
        let Some((sequence, leaving)) = shard.leaving.lock().clone() else { return };
        let (outgoing, ended) = {
            let state = &mut *leaving.lock();
            self.tick_instance(at, state, orphans, now_ms, report);
            if state.end_by_ms.is_none() && state.instance.as_deref().is_some_and(Instance::is_idle) {
                match self.enter(state, Instance::root_done) {
                    Ok(false) => state.end_by_ms = Some(now_ms.saturating_add(ROOT_END_MS)),
                    _ => self.end(state),
                }
            }
            (state.collect(), state.instance.is_none())
        };
        self.send(at, outgoing);
        if ended {
            self.apart.remove(sequence);
            *shard.leaving.lock() = None;
        }
    }

    /// Whether an instance has grown too much, and may be replaced now.
    pub(crate) fn is_to_be_recycled(&self, shard: &Shard, state: &ShardState, now_ms: u64) -> bool {
        let Some(soft) = self.loaded.spec.recycle_bytes else { return false };
        let lately = state.recycled_ms.is_some_and(|then| now_ms.saturating_sub(then) < RECYCLE_EVERY_MS);
        // One that has not grown since its start would be followed by one like it.
        let grown = |instance: &Instance| instance.memory_bytes() > soft.max(instance.start_bytes());
        !lately && !self.is_closing() && state.instance.as_deref().is_some_and(grown) && shard.leaving.lock().is_none()
    }

    /// Puts a fresh instance in the place of one that has grown, which goes on for its streams.
    pub(crate) fn recycle(&self, shard: &Shard, now_ms: u64, report: &mut TickReport) {
        let started = Instance::start(&self.runtime, &self.loaded, &self.pre);
        let mut state = shard.state.lock();
        match started {
            Ok(_) if self.is_closing() || self.is_retired() => {}
            Ok(instance) => {
                let fresh = ShardState {
                    instance: Some(Box::new(instance)),
                    respawn: state.respawn,
                    recycled_ms: Some(now_ms),
                    cancelled: std::mem::take(&mut state.cancelled),
                    ..ShardState::default()
                };
                let old = std::mem::replace(&mut *state, fresh);
                // It may have crashed meanwhile. Added under the shard's lock, so that no stream finds it in neither place.
                if let Some(sequence) = old.instance.as_deref().map(Instance::sequence)
                    && let Some(old) = self.apart.add(old)
                {
                    *shard.leaving.lock() = Some((sequence, old));
                }
                self.loaded.stats.recycled.fetch_add(1, Relaxed);
                report.recycled += 1;
            }
            Err(error) => report.faults.push(self.fault(FaultKind::Unavailable, error.to_string())),
        }
    }
}
