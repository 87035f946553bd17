//! The clock of the plugins: ticks, rebuilt instances, and the end of plugins that no generation uses any more.

use crate::clock::now_ms;
use crate::generation::Generation;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use turnstile_config::Phase;
use turnstile_plugins::Plugin;

/// Between two rounds.
const EVERY: Duration = Duration::from_millis(20);
/// How long plugins may take to end with the gateway: more than the host gives one that asks for time.
const END_LIMIT: Duration = Duration::from_secs(6);

/// A plugin, and until when its streams may go on.
pub type Draining = (Plugin, u64);

/// The plugins that live, by the generations that use them.
#[derive(Default)]
pub struct Ticks {
    live: Mutex<Vec<Live>>,
    leaving: Mutex<Vec<Plugin>>,
    /// Plugins that the newest generation is without.
    draining: Mutex<Vec<Draining>>,
    ending: AtomicBool,
    stop: AtomicBool,
}

/// A generation that lives, and its plugins.
struct Live {
    generation: Weak<Generation>,
    plugins: Vec<Plugin>,
    /// Those of them that run without streams: for none of an old generation there is anything left to do.
    background: Vec<Plugin>,
}

impl Ticks {
    /// Starts the thread. It ends after [`Ticks::stop`].
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start() -> std::io::Result<Arc<Self>> {
        let ticks = Arc::new(Self::default());
        let this = Arc::clone(&ticks);
        std::thread::Builder::new().name("plugin-ticks".into()).stack_size(4 << 20).spawn(move || {
            while !this.stop.load(Ordering::Acquire) {
                this.round();
                std::thread::sleep(EVERY);
            }
        })?;
        Ok(ticks)
    }

    /// A new generation serves.
    pub fn adopt(&self, generation: &Arc<Generation>) {
        let plugins: Vec<Plugin> = generation.chain.iter().map(|c| c.plugin.clone()).collect();
        let in_background = generation.chain.iter().filter(|c| c.phase == Phase::Background);
        let background = in_background.map(|c| c.plugin.clone()).collect();
        let _spared = self.spare(plugins.iter());
        let mut live = self.live.lock();
        let mut draining = self.draining.lock();
        if let Some(previous) = live.last().and_then(|previous| previous.generation.upgrade()) {
            let now = now_ms();
            for old in previous.chain.iter().filter(|old| !plugins.iter().any(|new| new.is_same_start(&old.plugin))) {
                let ms = |drain: Duration| u64::try_from(drain.as_millis()).unwrap_or(u64::MAX);
                draining.extend(old.drain.map(|drain| (old.plugin.clone(), now.saturating_add(ms(drain)))));
            }
        }
        live.push(Live { generation: Arc::downgrade(generation), plugins, background });
    }

    /// These are about to serve again: their time to drain does not end any more. Those whose time it was, for [`Ticks::drain`].
    pub fn spare<'a>(&self, plugins: impl Iterator<Item = &'a Plugin> + Clone) -> Vec<Draining> {
        let is_spared = |(old, _): &mut Draining| plugins.clone().any(|new| new.is_same_start(old));
        self.draining.lock().extract_if(.., is_spared).collect()
    }

    /// They do not serve again after all.
    pub fn drain(&self, spared: Vec<Draining>) {
        self.draining.lock().extend(spared);
    }

    /// Ends all plugins, which need not wait for a generation any more, and gives each the time that it asks for. True once
    /// all have ended.
    pub async fn end(&self) -> bool {
        self.ending.store(true, Ordering::Release);
        let ended = async {
            while !(self.live.lock().is_empty() && self.leaving.lock().is_empty()) {
                tokio::time::sleep(EVERY).await;
            }
        };
        tokio::time::timeout(END_LIMIT, ended).await.is_ok()
    }

    /// Ends the thread.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    fn round(&self) {
        let now = now_ms();
        let ending = self.ending.load(Ordering::Acquire);
        let mut plugins: Vec<Plugin> = Vec::new();
        {
            let mut live = self.live.lock();
            let (alive, ended): (Vec<_>, Vec<_>) =
                std::mem::take(&mut *live).into_iter().partition(|live| live.generation.strong_count() > 0 && !ending);
            let newest = alive.last().map(|newest| newest.plugins.clone()).unwrap_or_default();
            let is_in = |plugins: &[Plugin], plugin: &Plugin| plugins.iter().any(|p| p.is_same_start(plugin));
            let mut used: Vec<Plugin> = Vec::new();
            for old in &alive {
                for plugin in &old.plugins {
                    if is_in(&used, plugin) {
                        continue;
                    }
                    used.push(plugin.clone());
                    if is_in(&newest, plugin) || !is_in(&old.background, plugin) {
                        plugins.push(plugin.clone());
                    }
                }
            }
            let mut leaving = self.leaving.lock();
            for plugin in ended.into_iter().flat_map(|old| old.plugins) {
                if !used.iter().chain(leaving.iter()).any(|p| p.is_same_start(&plugin)) {
                    if !ending {
                        tracing::info!(plugin = %plugin.name(), "plugin ends: no generation uses it");
                    }
                    plugin.shut_down(now);
                    leaving.push(plugin);
                }
            }
            *live = alive;
            plugins.extend(leaving.iter().cloned());
        }
        self.end_drained(now, &plugins);
        for plugin in &plugins {
            let report = plugin.tick(now);
            for fault in report.faults {
                tracing::warn!(plugin = %fault.plugin, kind = %fault.kind, message = %fault.message, "plugin failed in a tick");
            }
            if report.recycled > 0 {
                tracing::info!(plugin = %plugin.name(), instances = report.recycled, "plugin instances replaced: memory had grown");
            }
            if report.restarted > 0 {
                tracing::info!(plugin = %plugin.name(), instances = report.restarted, "plugin instances replaced");
            }
        }
        self.leaving.lock().retain(|p| !p.is_shut_down());
    }

    /// Streams of old plugins that have had their time lose their instance.
    fn end_drained(&self, now: u64, live: &[Plugin]) {
        self.draining.lock().retain(|(plugin, until)| {
            let lives = live.iter().any(|p| p.is_same_start(plugin)) && !plugin.is_shut_down();
            if lives && now >= *until && plugin.retire() {
                tracing::warn!(plugin = %plugin.name(), "drain_s is over: streams of the old plugin are ended");
            }
            lives && now < *until
        });
    }
}
