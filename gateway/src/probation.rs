//! Plugins that crash again and again.
//!
//! A plugin that a reload has started is on probation for a while, and as long as one is, the generation before it is kept.
//! If such a plugin crashes `crash_limit` times in a row, that generation comes back as a whole, and the module with its
//! configuration is refused until one of them changes or an administrator resets the plugin. A plugin with no generation
//! to go back to is quarantined: requests are treated as its `on_error` says, until a reload or a reset.

use crate::clock::now_ms;
use crate::gateway::Gateway;
use crate::generation::{Generation, Prepared};
use crate::policy::{CanaryRun, ChainPlugin};
use crate::reload::put_in_place;
use crate::ticks::Ticks;
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use turnstile_config::Given;

/// How long a plugin is on probation, ms: long enough for the crashes of a row, with their back-off, under little traffic.
const PROBATION_MS: u64 = 60_000;
/// How often crashes are looked for.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Modules remembered as refused.
const MAX_REFUSED: usize = 64;

/// The generation that can come back, and what happened so far.
#[derive(Default)]
pub struct Probation {
    /// The last generation without the plugins that are on probation, and when their probation ends.
    before: Mutex<Option<(Arc<Generation>, u64)>>,
    last: Mutex<Option<TakenBack>>,
}

/// A generation that was taken back.
#[derive(Clone, Debug, Serialize)]
pub struct TakenBack {
    /// The generation that was taken back.
    pub generation: u64,
    /// The one that serves in its place, with the configuration and plugins of an earlier one.
    pub restored_as: u64,
    /// That earlier one.
    pub restored_from: u64,
    /// The plugin that crashed.
    pub plugin: String,
    /// SHA-256 of its module.
    pub sha256: String,
    /// Its crashes in a row.
    pub crashes: u32,
    /// When, Unix ms.
    pub at: u64,
}

/// Modules that crashed their way out of a generation, each with the configuration it had.
#[derive(Debug, Default)]
pub struct RefusedModules(Mutex<VecDeque<RefusedModule>>);

/// One of them.
#[derive(Clone, Debug, Serialize)]
pub struct RefusedModule {
    /// The plugin.
    pub plugin: String,
    /// SHA-256 of its module.
    pub sha256: String,
    /// The generation that was taken back.
    pub generation: u64,
    /// What speaks against it.
    pub why: &'static str,
    #[serde(skip)]
    given: Given,
}

/// What a reset did.
#[derive(Debug, Serialize)]
pub struct Reset {
    /// The plugin was quarantined, or a canary that was set aside, and is in service again.
    pub released: bool,
    /// Refused modules of the plugin that a reload may load again.
    pub allowed_again: usize,
}

/// Looks for crash loops until it is dropped.
pub async fn watch(gateway: Arc<Gateway>, ticks: Arc<Ticks>) {
    let mut every = tokio::time::interval(LOOK_EVERY);
    loop {
        every.tick().await;
        gateway.probation.expire(now_ms());
        if looping(&gateway.generation.load()).is_some() {
            stop_looping(&gateway, &ticks).await;
        }
    }
}

/// The first plugin of a generation that crashes in a loop and is still in service.
fn looping(generation: &Generation) -> Option<&ChainPlugin> {
    let loops =
        |c: &&ChainPlugin| c.crash_limit > 0 && c.plugin.crash_streak() >= c.crash_limit && !c.plugin.is_quarantined();
    generation.chain.iter().find(loops)
}

async fn stop_looping(gateway: &Arc<Gateway>, ticks: &Arc<Ticks>) {
    let _one_at_a_time = gateway.reloading.lock().await;
    // A reload may have come first.
    let current = gateway.generation.load_full();
    let Some(plugin) = looping(&current) else { return };
    if gateway.is_stopping() {
        return;
    }
    if plugin.is_on_trial() {
        return quarantine(plugin, "it is on trial");
    }
    match gateway.probation.before(plugin) {
        Some(before) => take_back(gateway, ticks, &current, plugin, &before).await,
        None => quarantine(plugin, "no generation to go back to"),
    }
}

fn quarantine(plugin: &ChainPlugin, why: &str) {
    plugin.plugin.quarantine();
    let (name, crashes) = (&plugin.name, plugin.plugin.crash_streak());
    tracing::error!(plugin = %name, crashes, on_error = plugin.on_error.as_str(), why, "plugin quarantined: it crashes in a loop");
}

async fn take_back(
    gateway: &Arc<Gateway>,
    ticks: &Arc<Ticks>,
    current: &Arc<Generation>,
    plugin: &ChainPlugin,
    before: &Arc<Generation>,
) {
    let (again, ticks_of_task) = (Arc::clone(before), Arc::clone(ticks));
    // Secrets are read again, and plugins started.
    let built = tokio::task::spawn_blocking(move || {
        let prepared = Prepared::again(&again)?;
        prepared.revive(&ticks_of_task).map(|()| prepared)
    });
    let prepared = match built.await {
        Ok(Ok(prepared)) => prepared,
        Ok(Err(reason)) => return quarantine(plugin, &reason.to_string()),
        Err(reason) => return quarantine(plugin, &reason.to_string()),
    };
    gateway.foundation.refused.refuse(plugin, current.number, "crashed in a loop");
    let restored = put_in_place(gateway, ticks, prepared, current.number + 1);
    let taken_back = TakenBack {
        generation: current.number,
        restored_as: restored.number,
        restored_from: before.number,
        plugin: plugin.name.to_string(),
        sha256: plugin.digest.clone(),
        crashes: plugin.plugin.crash_streak(),
        at: crate::clock::unix_ms(),
    };
    tracing::error!(
        plugin = %plugin.name,
        crashes = taken_back.crashes,
        taken_back = current.number,
        restored = before.number,
        generation = restored.number,
        "generation taken back: a plugin that it brought crashes in a loop"
    );
    gateway.metrics.plugin_rollbacks.with_label_values(&[&*plugin.name]).inc();
    *gateway.last_error.lock() = Some(format!(
        "generation {} was taken back: plugin {} crashed {} times in a row",
        current.number, plugin.name, taken_back.crashes
    ));
    gateway.probation.took_back(taken_back);
    gateway.history.forget_since(before.number);
}

/// Puts a plugin back into service, and lets its refused modules be loaded again. None if there is neither a plugin of that
/// name nor a module of one.
pub fn reset(gateway: &Gateway, plugin: &str) -> Option<Reset> {
    let generation = gateway.generation.load();
    let running = generation.chain.iter().find(|c| *c.name == *plugin);
    let allowed_again = gateway.foundation.refused.forget(plugin);
    if running.is_none() && allowed_again == 0 {
        return None;
    }
    let tried_again = running.and_then(|c| c.canary.as_ref()).is_some_and(CanaryRun::reset);
    let released = running.is_some_and(|c| c.plugin.release()) || tried_again;
    tracing::info!(plugin, released, allowed_again, "plugin reset");
    Some(Reset { released, allowed_again })
}

/// A reload is a new try for what is quarantined.
pub fn release_all(generation: &Generation) {
    for plugin in generation.chain.iter().filter(|c| c.plugin.release()) {
        tracing::info!(plugin = %plugin.name, "plugin in service again after a reload");
    }
}

// === impl Probation ===

impl Probation {
    /// A reload put `next` in the place of `previous`.
    pub fn begin(&self, previous: &Arc<Generation>, next: &Generation, now_ms: u64) {
        let is_new = |c: &&ChainPlugin| !has(previous, c);
        if next.chain.iter().find(is_new).is_none() {
            return;
        }
        let mut before = self.before.lock();
        let until = now_ms.saturating_add(PROBATION_MS);
        match &mut *before {
            // `previous` has plugins on probation itself.
            Some((_, ends)) if now_ms < *ends => *ends = until,
            slot => *slot = Some((Arc::clone(previous), until)),
        }
    }

    /// The generation to go back to because of a plugin: one that does not have it.
    fn before(&self, plugin: &ChainPlugin) -> Option<Arc<Generation>> {
        let before = self.before.lock();
        before.as_ref().map(|(generation, _)| generation).filter(|generation| !has(generation, plugin)).cloned()
    }

    fn expire(&self, now_ms: u64) {
        // Dropped outside of the lock: it may be the last of its generation.
        let _ended = self.before.lock().take_if(|(_, ends)| now_ms >= *ends);
    }

    fn took_back(&self, taken_back: TakenBack) {
        let _ended = self.before.lock().take();
        *self.last.lock() = Some(taken_back);
    }

    /// The generation that the plugins on probation may be taken back for, if any is.
    pub fn kept(&self) -> Option<Arc<Generation>> {
        self.before.lock().as_ref().map(|(generation, _)| Arc::clone(generation))
    }

    /// Nothing is on probation any more.
    pub fn end(&self) {
        let _ended = self.before.lock().take();
    }

    /// The last generation that was taken back.
    pub fn last(&self) -> Option<TakenBack> {
        self.last.lock().clone()
    }
}

/// Whether a generation has this very start of a plugin.
pub(crate) fn has(generation: &Generation, plugin: &ChainPlugin) -> bool {
    generation.chain.iter().any(|c| c.plugin.is_same_start(&plugin.plugin))
}

// === impl RefusedModules ===

impl RefusedModules {
    /// The entry of a module with what it would be started with, if it is refused.
    pub fn find(&self, plugin: &str, sha256: &str, given: &Given) -> Option<RefusedModule> {
        let is = |m: &&RefusedModule| m.plugin == plugin && m.sha256 == sha256 && m.given == *given;
        self.0.lock().iter().find(is).cloned()
    }

    /// All of them.
    pub fn list(&self) -> Vec<RefusedModule> {
        self.0.lock().iter().cloned().collect()
    }

    /// Refuses a plugin's module with its configuration from now on, for what it did in a generation.
    pub fn refuse(&self, plugin: &ChainPlugin, generation: u64, why: &'static str) {
        let module = RefusedModule {
            plugin: plugin.name.to_string(),
            sha256: plugin.digest.clone(),
            generation,
            why,
            given: plugin.given.clone(),
        };
        let mut list = self.0.lock();
        if list.len() >= MAX_REFUSED {
            list.pop_front();
        }
        list.push_back(module);
    }

    fn forget(&self, plugin: &str) -> usize {
        let mut list = self.0.lock();
        let before = list.len();
        list.retain(|module| module.plugin != plugin);
        before - list.len()
    }
}
