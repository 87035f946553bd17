//! Going back to an earlier generation because an administrator asks for it.
//!
//! Of the last generations that served and were not taken back, what is needed to build them again is kept: the
//! configuration and the modules' bytes, not the instances. A plugin that still runs as it did is taken over; any other one is
//! started from the kept bytes, whatever its file holds now. The files are not followed then until one of them changes.

use crate::gateway::Gateway;
use crate::generation::{Generation, prepare};
use crate::plugin_start::Modules;
use crate::policy::ChainPlugin;
use crate::reload::{Source, fingerprint, put_in_place, watched};
use crate::ticks::Ticks;
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use turnstile_config::{Config, restart_needed};

/// Generations kept. Plugins that they share have their module once.
const MAX_KEPT: usize = 8;

/// The generations to go back to, and what a rollback left behind.
#[derive(Default)]
pub struct History {
    /// The latest last.
    kept: Mutex<VecDeque<Kept>>,
    held: Mutex<Option<Held>>,
    last: Mutex<Option<RolledBack>>,
}

/// What is kept of a generation.
#[derive(Clone)]
struct Kept {
    number: u64,
    config: Arc<Config>,
    modules: Vec<(String, Arc<[u8]>)>,
}

/// Files that are not followed as long as they are as they were.
#[derive(Clone, Debug)]
pub struct Held {
    /// The files.
    pub files: BTreeSet<PathBuf>,
    /// What they held.
    pub fingerprint: Vec<u8>,
}

/// A rollback.
#[derive(Clone, Debug, Serialize)]
pub struct RolledBack {
    /// The generation that was taken back.
    pub generation: u64,
    /// The one that serves in its place, with the configuration and plugins of an earlier one.
    pub restored_as: u64,
    /// That earlier one.
    pub restored_from: u64,
    /// Plugins whose module is not loaded again, with the configuration that they had.
    pub refused: Vec<String>,
    /// Keys that differ and take effect only after a restart.
    pub restart_needed: Vec<String>,
    /// When, Unix ms.
    pub at: u64,
}

/// Why there was no rollback.
#[derive(Debug, thiserror::Error)]
pub enum RollbackError {
    /// Nothing to go back to.
    #[error("there is no earlier generation: none served before this one, or all of them were taken back")]
    NoneKept,
    /// The gateway is about to end.
    #[error("the gateway is stopping")]
    Stopping,
    /// The earlier one cannot be built again.
    #[error("generation {number} cannot be restored: {reason}")]
    Build {
        /// The earlier one.
        number: u64,
        /// Why.
        reason: String,
    },
}

/// Puts the last generation before the present one back in its place. `refuse`: modules that the present one brought are not
/// loaded again.
///
/// # Errors
/// Why nothing changed.
pub async fn roll_back(
    gateway: &Arc<Gateway>,
    ticks: &Arc<Ticks>,
    source: &Source,
    refuse: bool,
) -> Result<RolledBack, RollbackError> {
    let _one_at_a_time = gateway.reloading.lock().await;
    if gateway.is_stopping() {
        return Err(RollbackError::Stopping);
    }
    let kept = gateway.history.latest().ok_or(RollbackError::NoneKept)?;
    let current = gateway.generation.load_full();
    let mut running = vec![Arc::clone(&current)];
    running.extend(gateway.probation.kept());
    let (gateway_of_task, ticks_of_task) = (Arc::clone(gateway), Arc::clone(ticks));
    let (path, rolled_back) = (source.path.clone(), Arc::clone(&current.config));
    let number = kept.number;
    // Starting plugins blocks, and so does reading files.
    let built = tokio::task::spawn_blocking(move || {
        let modules = Modules::Kept(kept.modules.into_iter().collect::<HashMap<_, _>>());
        let prepared = prepare((*kept.config).clone(), &gateway_of_task.foundation, &running, &modules)?;
        prepared.revive(&ticks_of_task)?;
        let held = path.map(|path| {
            let mut files = watched(&path, &rolled_back);
            files.extend(watched(&path, &kept.config));
            Held { fingerprint: fingerprint(&files), files }
        });
        Ok::<_, crate::generation::BuildError>((prepared, held))
    });
    let fail = |reason: String| RollbackError::Build { number, reason };
    let (prepared, held) = built.await.map_err(|e| fail(e.to_string()))?.map_err(|e| fail(e.to_string()))?;

    let history = &gateway.history;
    history.hold(held);
    history.forget_since(number);
    gateway.probation.end();
    let restored = put_in_place(gateway, ticks, prepared, current.number + 1);
    let brought = current.chain.iter().filter(|plugin| refuse && !is_in(&restored, plugin));
    let refused = brought.map(|plugin| {
        gateway.foundation.refused.refuse(plugin, current.number, "was refused in a rollback");
        plugin.name.to_string()
    });
    let done = RolledBack {
        generation: current.number,
        restored_as: restored.number,
        restored_from: number,
        refused: refused.collect(),
        restart_needed: restart_needed(&current.config, &restored.config),
        at: crate::clock::unix_ms(),
    };
    tracing::warn!(
        taken_back = done.generation,
        restored = done.restored_from,
        generation = done.restored_as,
        refused = ?done.refused,
        "generation rolled back: an administrator asked for it"
    );
    gateway.metrics.rollbacks.inc();
    history.rolled_back(done.clone());
    Ok(done)
}

/// Whether a generation has the plugin with this module and what it was started with.
fn is_in(generation: &Generation, plugin: &ChainPlugin) -> bool {
    let same = |c: &ChainPlugin| c.name == plugin.name && c.digest == plugin.digest && c.given == plugin.given;
    generation.chain.iter().any(same)
}

// === impl History ===

impl History {
    /// A reload has put another generation in the place of this one.
    pub fn served(&self, generation: &Generation) {
        let modules = generation.chain.iter().map(|c| (c.name.to_string(), Arc::clone(&c.plugin.spec().wasm)));
        let (number, config) = (generation.number, Arc::clone(&generation.config));
        let mut kept = self.kept.lock();
        if kept.len() >= MAX_KEPT {
            kept.pop_front();
        }
        kept.push_back(Kept { number, config, modules: modules.collect() });
    }

    /// What served before.
    fn latest(&self) -> Option<Kept> {
        self.kept.lock().back().cloned()
    }

    /// The generation of this number serves again, under another: it and those after it are no earlier ones any more.
    pub fn forget_since(&self, number: u64) {
        self.kept.lock().retain(|kept| kept.number < number);
    }

    /// Numbers of the generations that can come back, the latest last.
    pub fn numbers(&self) -> Vec<u64> {
        self.kept.lock().iter().map(|kept| kept.number).collect()
    }

    /// Configurations of the generations that can come back.
    pub fn configs(&self) -> Vec<Arc<Config>> {
        self.kept.lock().iter().map(|kept| Arc::clone(&kept.config)).collect()
    }

    /// The last rollback.
    pub fn last(&self) -> Option<RolledBack> {
        self.last.lock().clone()
    }

    /// Files that are not followed.
    pub fn held(&self) -> Option<Held> {
        self.held.lock().clone()
    }

    /// The files are followed again.
    pub fn release(&self) {
        *self.held.lock() = None;
    }

    fn hold(&self, held: Option<Held>) {
        *self.held.lock() = held;
    }

    fn rolled_back(&self, done: RolledBack) {
        *self.last.lock() = Some(done);
    }
}
