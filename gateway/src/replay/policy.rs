//! What decides in a replay: a chain of plugins, the native built-in, or one of the rules that need to know nothing.

use super::virtual_time::VirtualServices;
use crate::callouts::Callouts;
use crate::generation::Foundation;
use crate::module_store::ModuleStore;
use crate::plugin_start::{Modules, Start};
use crate::policy::ChainPlugin;
use crate::probation::RefusedModules;
use crate::run::cache_base;
use std::path::Path;
use std::sync::Arc;
use turnstile_config::{Config, Phase, Plugin};
use turnstile_fleet::cost::mix;
use turnstile_fleet::ids::WorkerId;
use turnstile_fleet::worker::WorkerView;
use turnstile_plugins::{PluginServices, Runtime, SharedState};

/// A call that takes longer than this fails in a replay too. A slow machine must not change what comes out.
const CALLBACK_TIMEOUT_MS: u64 = 60_000;

/// A rule that knows nothing of prompts and sessions, to compare with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Baseline {
    /// Each worker in turn.
    RoundRobin,
    /// Any worker.
    Random,
    /// The worker that has the fewest turns in flight, in turn among equals.
    LeastLoad,
}

/// Who decides.
pub enum Rule {
    /// These plugins, and the native built-in where they are silent.
    Chain(Arc<[ChainPlugin]>),
    /// A baseline, in the order that the native built-in gives.
    Baseline(Baseline),
}

/// A policy, ready to decide.
pub struct Policy {
    /// What it was named on the command line.
    pub name: String,
    /// The configuration that it runs under.
    pub config: Config,
    /// Who decides.
    pub rule: Rule,
    /// Plugins of the phase `filter` in its file: there are no bodies for them to see.
    pub filters: Vec<String>,
    /// What its plugins share.
    pub shared: Arc<SharedState>,
    /// Time and chance, as its plugins get them.
    pub services: Arc<VirtualServices>,
}

/// A policy that was asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct Wanted {
    /// What it was named.
    pub name: String,
    config: Config,
    baseline: Option<Baseline>,
}

// === impl Wanted ===

impl Wanted {
    /// Reads what `--policy` names. `base`: the configuration of policies that bring none.
    ///
    /// # Errors
    /// There is no such policy, or its file is wrong.
    pub fn read(name: &str, base: &Config) -> Result<Self, String> {
        let with = |plugins: Vec<Plugin>, baseline| Self {
            name: name.to_owned(),
            config: Config { plugins, ..base.clone() },
            baseline,
        };
        Ok(match name {
            "builtin" => with(Plugin::built_in_chain(), None),
            "native" => with(Vec::new(), None),
            "round-robin" => with(Vec::new(), Some(Baseline::RoundRobin)),
            "random" => with(Vec::new(), Some(Baseline::Random)),
            "least-load" => with(Vec::new(), Some(Baseline::LeastLoad)),
            path if Path::new(path).extension().is_some_and(|extension| extension == "toml") => {
                let config = Config::load_without_pools(path).map_err(|e| format!("--policy: {e}"))?;
                Self { name: name.to_owned(), config, baseline: None }
            }
            _ => {
                return Err(format!(
                    "--policy: no policy {name:?}: expected builtin, native, round-robin, random, least-load, or a \
                     configuration file (.toml)"
                ));
            }
        })
    }

    /// Starts its plugins.
    ///
    /// # Errors
    /// A plugin that does not start.
    pub fn start(&self, runtime: &Runtime, seed: u64, first_ms: u64) -> Result<Policy, String> {
        let mut config = self.config.clone();
        let is_filter = |plugin: &Plugin| plugin.phase == Phase::Filter;
        let filters = config.plugins.iter().filter(|p| is_filter(p)).map(|p| p.name.clone()).collect();
        config.plugins.retain(|plugin| !is_filter(plugin));
        for plugin in &mut config.plugins {
            plugin.callback_timeout_ms = CALLBACK_TIMEOUT_MS;
            plugin.configure_timeout_ms = plugin.configure_timeout_ms.max(CALLBACK_TIMEOUT_MS);
            // Which of several instances sees a turn would be one more thing to choose.
            plugin.instances = Some(1);
        }
        let shared = Arc::new(SharedState::default());
        let services = Arc::new(VirtualServices::new(Arc::clone(&shared), seed, first_ms));
        let foundation = Foundation {
            runtime: runtime.clone(),
            shared: Arc::clone(&shared),
            callouts: Callouts::new(),
            services: Some(Arc::clone(&services) as Arc<dyn PluginServices>),
            seed,
            threads: 1,
            refused: RefusedModules::default(),
            modules: ModuleStore::open(cache_base(&config).map(|base| base.join("modules")).as_deref()),
        };
        let rule = match self.baseline {
            Some(baseline) => Rule::Baseline(baseline),
            None => {
                let start =
                    Start { config: &config, foundation: &foundation, running: &[], modules: &Modules::Current };
                Rule::Chain(start.chain().map_err(|e| format!("--policy {}: {e}", self.name))?.into())
            }
        };
        Ok(Policy { name: self.name.clone(), config, rule, filters, shared, services })
    }
}

// === impl Baseline ===

impl Baseline {
    /// The worker for a turn, by its number among those placed: those below their limit come first.
    pub fn choose(
        self,
        views: &[WorkerView],
        full: impl Fn(&WorkerView) -> bool,
        number: u64,
        seed: u64,
    ) -> Option<WorkerId> {
        let free: Vec<&WorkerView> = views.iter().filter(|view| view.is_ready() && !full(view)).collect();
        let ready = || views.iter().filter(|view| view.is_ready()).collect();
        let candidates: Vec<&WorkerView> = if free.is_empty() { ready() } else { free };
        let count = candidates.len().max(1);
        let nth = |n: u64| candidates.get(usize::try_from(n % count as u64).unwrap_or_default());
        let chosen = match self {
            // In turn over all workers: one that is full passes its turn on to the next.
            Self::RoundRobin => {
                let turn = number % (views.len().max(1) as u64);
                let from = |view: &&&WorkerView| u64::from(view.index.0) >= turn;
                candidates.iter().find(from).or_else(|| candidates.first())
            }
            Self::Random => nth(mix(seed ^ mix(number))),
            Self::LeastLoad => {
                let workers = views.len().max(1) as u64;
                let order = |view: &WorkerView| (u64::from(view.index.0) + workers - number % workers) % workers;
                candidates.iter().min_by_key(|view| (view.in_flight, order(view)))
            }
        };
        chosen.map(|view| view.index)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn views(in_flight: &[u32]) -> Vec<WorkerView> {
        let view = |(index, in_flight): (u32, &u32)| WorkerView {
            in_flight: *in_flight,
            limit: Some(4),
            ..WorkerView::new("w", WorkerId(index))
        };
        (0..).zip(in_flight).map(view).collect()
    }

    fn chosen(baseline: Baseline, in_flight: &[u32], turns: std::ops::Range<u64>) -> Vec<u32> {
        let views = views(in_flight);
        turns.map(|n| baseline.choose(&views, |v| v.in_flight >= 4, n, 7).unwrap().0).collect()
    }

    #[test]
    fn baselines_pass_over_full_workers() {
        assert_eq!(chosen(Baseline::RoundRobin, &[0, 0, 0], 0..5), [0, 1, 2, 0, 1]);
        assert_eq!(chosen(Baseline::RoundRobin, &[0, 4, 0], 0..4), [0, 2, 2, 0]);
        assert_eq!(chosen(Baseline::LeastLoad, &[2, 1, 1], 0..4), [1, 1, 2, 1]);
        assert_eq!(chosen(Baseline::LeastLoad, &[0, 0, 0], 0..4), [0, 1, 2, 0]);
        let random = chosen(Baseline::Random, &[0, 4, 0], 0..100);
        assert!(random.contains(&0) && random.contains(&2) && !random.contains(&1));
        assert_eq!(random, chosen(Baseline::Random, &[0, 4, 0], 0..100));
        assert_eq!(chosen(Baseline::LeastLoad, &[4, 4], 1..2), [1], "all are full");
        assert_eq!(Baseline::Random.choose(&[], |_| false, 0, 0), None);
    }

    #[test]
    fn a_policy_that_is_not_there_is_refused() {
        let base = Config::default();
        assert!(Wanted::read("bultin", &base).unwrap_err().contains("no policy \"bultin\""));
        assert!(Wanted::read("none/such.toml", &base).unwrap_err().contains("none/such.toml"));
        assert_eq!(Wanted::read("builtin", &base).unwrap().config.plugins.len(), 3);
        assert!(Wanted::read("native", &base).unwrap().config.plugins.is_empty());
    }
}
