//! What a rig is made of.

use super::rig::Rig;
use std::path::{Path, PathBuf};
use turnstile_sim::SimConfig;

/// A rig to be started: simulated workers, and the configuration of the gateway in front of them.
///
/// Without further words: one worker with every optional feature except sessions, a thousand times faster than real time;
/// the built-in policies; frequent probes; explanations and an access log.
pub struct Setup {
    pub(super) workers: Vec<SimConfig>,
    pub(super) keys: Vec<(String, String)>,
    pub(super) pools: Vec<PoolText>,
    pub(super) plugins: Option<String>,
    pub(super) files: Vec<(String, Vec<u8>)>,
    externals: Vec<String>,
    upstreams: String,
    shared: SimConfig,
    http2: bool,
}

/// A pool in the file: its name, more keys, and its workers as positions in the rig.
#[derive(Clone)]
pub(super) struct PoolText {
    name: String,
    keys: String,
    workers: Vec<(usize, String)>,
}

/// A plugin in the file.
#[derive(Clone)]
pub struct PluginText {
    name: String,
    wasm: String,
    phase: &'static str,
    keys: Vec<String>,
}

// === impl PluginText ===

impl PluginText {
    /// A plugin of a phase, from `builtin:NAME` or a file. Without `callback_timeout_ms` its calls have all the time they need:
    /// deadlines are on the wall clock, which a busy machine uses up for others.
    pub fn new(name: &str, wasm: impl Into<String>, phase: &'static str) -> Self {
        Self { name: name.to_owned(), wasm: wasm.into(), phase, keys: Vec::new() }
    }

    /// Adds a key, such as `config.greeting = "Hello"`.
    #[must_use]
    pub fn key(mut self, line: impl Into<String>) -> Self {
        self.keys.push(line.into());
        self
    }

    fn render(&self) -> String {
        let Self { name, wasm, phase, keys } = self;
        let timed = keys.iter().any(|key| key.starts_with("callback_timeout_ms"));
        let time = if timed { "" } else { "callback_timeout_ms = 60000\n" };
        format!("\n[[plugins]]\nname = {name:?}\nwasm = {wasm:?}\nphase = {phase:?}\n{time}{}\n", keys.join("\n"))
    }
}

/// The built-in chain, to be put together with other plugins.
pub fn built_in() -> [PluginText; 3] {
    [("priority-queue", "admit"), ("session-binding", "route"), ("kv-affinity", "route")]
        .map(|(name, phase)| PluginText::new(name, format!("builtin:{name}"), phase))
}

// === impl Setup ===

impl Default for Setup {
    fn default() -> Self {
        Self::new()
    }
}

impl Setup {
    /// The default described above.
    pub fn new() -> Self {
        let shared = SimConfig {
            speed: 1000.0,
            prefill_tokens_per_s: 8000.0,
            enable_priority_scheduling: true,
            enable_cache_report: false,
            ..SimConfig::default()
        };
        let keys = [
            ("threads", "1"),
            ("admin.address", "\"127.0.0.1:0\""),
            ("logging.access", "\"access.log\""),
            ("logging.explain_headers", "true"),
            ("routing.probe_interval_ms", "50"),
            ("routing.load_interval_ms", "20"),
            ("retry.backoff_ms", "1"),
        ];
        let keys = keys.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec();
        Self {
            workers: Vec::new(),
            keys,
            pools: Vec::new(),
            plugins: None,
            files: Vec::new(),
            externals: Vec::new(),
            upstreams: String::new(),
            shared,
            http2: true,
        }
    }

    /// Changes what all workers added from now on are.
    #[must_use]
    pub fn sim(mut self, change: impl FnOnce(&mut SimConfig)) -> Self {
        change(&mut self.shared);
        self
    }

    /// Adds workers.
    #[must_use]
    pub fn workers(mut self, count: usize) -> Self {
        self.workers.extend(std::iter::repeat_n(self.shared.clone(), count));
        self
    }

    /// Adds a worker that differs.
    #[must_use]
    pub fn worker(mut self, change: impl FnOnce(&mut SimConfig)) -> Self {
        let mut config = self.shared.clone();
        change(&mut config);
        self.workers.push(config);
        self
    }

    /// Adds a worker that runs elsewhere; its position is behind the simulated ones.
    #[must_use]
    pub fn external(mut self, url: String) -> Self {
        self.externals.push(url);
        self
    }

    /// Adds an upstream for plugins, with more keys, such as `h2c = true`.
    #[must_use]
    pub fn upstream(mut self, name: &str, url: &str, keys: &str) -> Self {
        self.upstreams.push_str(&format!("\n[[upstreams]]\nname = {name:?}\nurl = {url:?}\n{keys}\n"));
        self
    }

    /// Sets a key of the configuration, by its dotted name, to a TOML value.
    #[must_use]
    pub fn set(mut self, key: &str, value: &str) -> Self {
        self.put(key, value);
        self
    }

    /// Switches HTTP/2 off.
    #[must_use]
    pub fn without_http2(mut self) -> Self {
        self.http2 = false;
        self
    }

    /// Leaves a key out again.
    #[must_use]
    pub fn without(mut self, key: &str) -> Self {
        self.keys.retain(|(known, _)| known != key);
        self
    }

    pub(super) fn put(&mut self, key: &str, value: &str) {
        self.keys.retain(|(known, _)| known != key);
        self.keys.push((key.to_owned(), value.to_owned()));
    }

    /// Names a pool of workers (positions in the rig) with more keys, such as `models = ["a"]`. Without any there is one
    /// pool of all workers.
    #[must_use]
    pub fn pool(mut self, name: &str, keys: &str, workers: &[usize]) -> Self {
        let workers = workers.iter().map(|&at| (at, String::new())).collect();
        self.pools.push(PoolText { name: name.to_owned(), keys: keys.to_owned(), workers });
        self
    }

    /// Adds keys to a worker's table in the last pool named, such as `labels = { gpu = "h200" }`.
    #[must_use]
    pub fn worker_keys(mut self, worker: usize, keys: &str) -> Self {
        let pool = self.pools.last_mut().expect("a pool");
        let entry = pool.workers.iter_mut().find(|(at, _)| *at == worker).expect("a worker of the pool");
        entry.1 = keys.to_owned();
        self
    }

    /// The plugins, instead of the built-in chain.
    #[must_use]
    pub fn plugins(mut self, plugins: &[PluginText]) -> Self {
        self.set_plugins(plugins);
        self
    }

    /// The plugins from now on.
    pub fn set_plugins(&mut self, plugins: &[PluginText]) {
        self.plugins = Some(plugins.iter().map(PluginText::render).collect());
    }

    /// Puts a file beside the configuration.
    #[must_use]
    pub fn file(mut self, name: &str, bytes: impl Into<Vec<u8>>) -> Self {
        self.files.push((name.to_owned(), bytes.into()));
        self
    }

    /// The configuration file, for simulated workers at these URLs.
    pub(super) fn render(&self, simulated: &[String]) -> String {
        let urls = [simulated, self.externals.as_slice()].concat();
        let mut text = String::new();
        for (key, value) in &self.keys {
            text.push_str(&format!("{key} = {value}\n"));
        }
        let cache = cache_dir();
        text.push_str(&format!("state.dir = {:?}\n", cache.display().to_string()));
        text.push_str(&format!("\n[[listeners]]\naddress = \"127.0.0.1:0\"\nh2c = {}\n", self.http2));
        let all = PoolText {
            name: "default".into(),
            keys: String::new(),
            workers: (0..urls.len()).map(|at| (at, String::new())).collect(),
        };
        let pools = if self.pools.is_empty() { std::slice::from_ref(&all) } else { &self.pools };
        for pool in pools {
            text.push_str(&format!("\n[[pools]]\nname = {:?}\n{}\nworkers = [\n", pool.name, pool.keys));
            for (at, keys) in &pool.workers {
                let separator = if keys.is_empty() { "" } else { ", " };
                text.push_str(&format!("  {{ url = {:?}{separator}{keys} }},\n", urls[*at]));
            }
            text.push_str("]\n");
        }
        match &self.plugins {
            Some(plugins) => text.extend(["\n", plugins.as_str()]),
            // The gateway's own default, but for the deadlines.
            None => text.extend(built_in().iter().map(PluginText::render)),
        }
        text.push_str(&self.upstreams);
        text
    }

    /// Starts workers and gateway, and waits until every worker that a pool names is ready.
    pub async fn start(self) -> Rig {
        let rig = self.start_unready().await;
        rig.ready().await;
        rig
    }

    /// Starts workers and gateway, and waits for nothing.
    pub async fn start_unready(mut self) -> Rig {
        if self.workers.is_empty() && self.externals.is_empty() {
            self = self.workers(1);
        }
        Rig::start(self).await
    }

    /// Starts workers and gateway, and waits for nothing.
    ///
    /// # Errors
    /// Why the gateway does not start.
    pub async fn try_start(self) -> Result<Rig, String> {
        Rig::try_start(self).await
    }

    /// How many workers the pools name.
    pub(super) fn named_workers(&self) -> usize {
        if self.pools.is_empty() {
            return self.workers.len() + self.externals.len();
        }
        self.pools.iter().map(|pool| pool.workers.len()).sum()
    }

    /// Leaves a pool out from now on.
    pub fn drop_pool(&mut self, name: &str) {
        self.pools.retain(|pool| pool.name != name);
    }

    /// The workers of a pool from now on.
    pub fn set_pool_workers(&mut self, name: &str, workers: &[usize]) {
        if self.pools.is_empty() {
            let workers = (0..self.workers.len()).map(|at| (at, String::new())).collect();
            self.pools.push(PoolText { name: "default".into(), keys: String::new(), workers });
        }
        let pool = self.pools.iter_mut().find(|pool| pool.name == name).expect("the pool");
        pool.workers = workers.iter().map(|&at| (at, String::new())).collect();
    }
}

/// Compiled modules, kept from run to run beside the build's other products.
fn cache_dir() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    let profile = exe.parent().and_then(Path::parent).expect("a test binary lies in target/PROFILE/deps");
    profile.join("tmp/turnstile-state")
}
