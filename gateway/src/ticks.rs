//! The clock of the plugins: ticks, rebuilt instances, and the end of plugins that no generation uses any more.

use crate::clock::now_ms;
use crate::generation::Generation;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use turnstile_plugins::Plugin;

/// Between two rounds.
const EVERY: Duration = Duration::from_millis(20);

/// The plugins that live, by the generations that use them.
#[derive(Default)]
pub struct Ticks {
    live: Mutex<Vec<(Weak<Generation>, Vec<Plugin>)>>,
    leaving: Mutex<Vec<Plugin>>,
    stop: AtomicBool,
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
        let plugins = generation.chain.iter().map(|c| c.plugin.clone()).collect();
        self.live.lock().push((Arc::downgrade(generation), plugins));
    }

    /// Ends the thread.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    fn round(&self) {
        let now = now_ms();
        let mut plugins: Vec<Plugin> = Vec::new();
        {
            let mut live = self.live.lock();
            let (alive, ended): (Vec<_>, Vec<_>) =
                std::mem::take(&mut *live).into_iter().partition(|(g, _)| g.strong_count() > 0);
            for (_, used) in &alive {
                for plugin in used {
                    if !plugins.iter().any(|p| p.is_same_start(plugin)) {
                        plugins.push(plugin.clone());
                    }
                }
            }
            let mut leaving = self.leaving.lock();
            for plugin in ended.into_iter().flat_map(|(_, used)| used) {
                if !plugins.iter().chain(leaving.iter()).any(|p| p.is_same_start(&plugin)) {
                    tracing::info!(plugin = %plugin.name(), "plugin ends: no generation uses it");
                    plugin.shut_down(now);
                    leaving.push(plugin);
                }
            }
            *live = alive;
            plugins.extend(leaving.iter().cloned());
        }
        for plugin in &plugins {
            let report = plugin.tick(now);
            for fault in report.faults {
                tracing::warn!(plugin = %fault.plugin, kind = %fault.kind, message = %fault.message, "plugin failed in a tick");
            }
            if report.restarted > 0 {
                tracing::info!(plugin = %plugin.name(), instances = report.restarted, "plugin instances replaced");
            }
        }
        self.leaving.lock().retain(|p| !p.is_shut_down());
    }
}
