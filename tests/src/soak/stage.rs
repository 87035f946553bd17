//! What the soak runs on: workers, the gateway, its configuration, and what changes meanwhile.

use super::fleet::{self, Worker};
use super::samples::Sample;
use super::trouble;
use super::verdict::ATTEMPTS;
use super::{Pace, Settings};
use crate::harness::{Samples, module, swap};
use crate::process::Gateway;
use reqwest::Client;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;

/// How many workers there are.
pub const WORKERS: usize = 4;

/// Everything that runs.
pub struct Stage {
    pub workers: Vec<Worker>,
    pub gateway: Gateway,
    pub client: Client,
    /// For the gateway's admin listener, which a busy machine makes wait.
    admin: Client,
    pub log: PathBuf,
    config: PathBuf,
    policy: PathBuf,
    modules: [Vec<u8>; 2],
    pool: String,
    state: PathBuf,
    pace: Pace,
    reloads: u64,
    // Last: removed when nothing writes to it any more.
    _dir: TempDir,
}

fn text(path: &Path) -> Value {
    // A JSON string is a TOML string.
    Value::from(path.display().to_string())
}

impl Stage {
    /// Starts it all.
    ///
    /// # Errors
    /// Something did not start.
    pub async fn set(settings: &Settings, period: Duration) -> Result<Self, String> {
        let (program, seed, pace) = (settings.program.as_path(), settings.seed, settings.pace);
        let dir = tempfile::Builder::new().prefix("turnstile-soak-").tempdir().map_err(|e| e.to_string())?;
        let mut workers = Vec::new();
        let mut pool = String::from("[[pools]]\n");
        for place in 0..WORKERS {
            let worker = Worker::start(program, dir.path(), place, trouble::file(place, period, seed)).await?;
            pool.push_str(&format!(
                "[[pools.workers]]\nid = \"worker-{place}\"\nurl = \"http://127.0.0.1:{}\"\n",
                worker.port
            ));
            workers.push(worker);
        }
        let read = |name: &str| std::fs::read(module(name)).map_err(|e| format!("{name}: {e}"));
        let modules = [read("tenant-labels")?, read("kv-affinity")?];
        let (config, policy) = (dir.path().join("turnstile.toml"), dir.path().join("extra.wasm"));
        // Workers close connections that are idle for 5 s, perhaps as a request comes.
        let client = |timeout_s| {
            let client = Client::builder().no_proxy().timeout(Duration::from_secs(timeout_s));
            client.pool_idle_timeout(Duration::from_secs(2)).build().map_err(|e| e.to_string())
        };
        let (client, admin) = (client(5)?, client(60)?);
        let state = dir.path().join("state");
        let log = dir.path().join("access.log");
        let [first, _] = &modules;
        swap(&policy, first);
        swap(&config, render(&pool, &log, &state, pace, 0));
        let gateway = Gateway::start_program(program, &config).await?;
        Ok(Self {
            workers,
            gateway,
            client,
            admin,
            log,
            config,
            policy,
            modules,
            pool,
            state,
            pace,
            reloads: 0,
            _dir: dir,
        })
    }

    /// Ids of the workers.
    pub fn ids(&self) -> Vec<String> {
        self.workers.iter().map(|worker| format!("worker-{}", worker.place)).collect()
    }

    /// Changes the configuration and the policy's module in turn, as an operator does.
    pub fn reload(&mut self) {
        self.reloads += 1;
        let [one, other] = &self.modules;
        match self.reloads % 4 {
            0 | 2 => swap(&self.config, render(&self.pool, &self.log, &self.state, self.pace, self.reloads)),
            1 => swap(&self.policy, other),
            _ => swap(&self.policy, one),
        }
    }

    /// Changes made so far.
    pub fn reloads(&self) -> u64 {
        self.reloads
    }

    /// The metrics.
    ///
    /// # Errors
    /// The gateway does not answer.
    pub async fn metrics(&self) -> Result<String, String> {
        let url = format!("http://{}/metrics", self.gateway.admin);
        let answer = self.admin.get(url).send().await.map_err(|e| format!("the admin listener: {e}"))?;
        answer.text().await.map_err(|e| format!("the admin listener: {e}"))
    }

    /// Whether the gateway sees every worker ready.
    pub async fn all_ready(&self) -> bool {
        let Ok(text) = self.metrics().await else { return false };
        let ready = Samples::new(text).sum("turnstile_worker_state", &[("state", "ready")]);
        ready >= WORKERS as f64
    }

    /// A look at everything; what workers that are away hold is not in it.
    ///
    /// # Errors
    /// The gateway is gone.
    pub async fn sample(&self) -> Result<Sample, String> {
        let pid = self.gateway.child.id().ok_or("the gateway has ended")?;
        let held = fleet::held(&self.workers, &self.client).await.unwrap_or_default();
        Sample::take(pid, &self.metrics().await?, held)
    }

    /// Waits until nothing is under way and no session is left, on the gateway or on a worker, and connections have gone.
    ///
    /// # Errors
    /// What is left after `patience`.
    pub async fn settle(&self, patience: Duration) -> Result<Sample, String> {
        let deadline = tokio::time::Instant::now() + patience;
        loop {
            let reached = fleet::held(&self.workers, &self.client).await.is_some();
            let left = self.sample().await?.unsettled();
            if reached && left.is_empty() {
                break;
            }
            if tokio::time::Instant::now() > deadline {
                return Err(format!("left after {patience:?}: {}", left.join(", ")));
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
        // The gateway keeps idle connections to workers for so long, and a little more.
        tokio::time::sleep(Duration::from_millis(2 * self.pace.idle_ms)).await;
        // What comes and goes, such as probes, is not what is left.
        let mut rest = self.sample().await?;
        for _ in 0..10 {
            tokio::time::sleep(Duration::from_millis(130)).await;
            rest.at_least(&self.sample().await?);
        }
        Ok(rest)
    }
}

fn render(pool: &str, log: &Path, state: &Path, pace: Pace, change: u64) -> String {
    let Pace { first_byte_s, between_bytes_s, idle_ms, session_s } = pace;
    let plugin = |name: &str, wasm: &str, phase: &str| {
        // On a busy machine the deadlines of a debug build would tell of the machine.
        format!("[[plugins]]\nname = \"{name}\"\nwasm = \"{wasm}\"\nphase = \"{phase}\"\ncallback_timeout_ms = 60000\n")
    };
    format!(
        "threads = 2\n[[listeners]]\naddress = \"127.0.0.1:0\"\n[admin]\naddress = \"127.0.0.1:0\"\n{pool}{}{}{}{}\
         [routing]\nprobe_interval_ms = 200\nload_interval_ms = 100\nindex_blocks_per_worker = 4096\n\
         [timeouts]\nfirst_byte_s = {first_byte_s}\nbetween_bytes_s = {between_bytes_s}\nupstream_idle_ms = {idle_ms}\n\
         [retry]\nattempts = {ATTEMPTS}\n[sessions]\ndefault_timeout_s = {session_s}\n[admission]\nmax_wait_ms = {}\n\
         [logging]\nlevel = \"info\"\naccess = {}\n[state]\ndir = {}\n",
        plugin("priority-queue", "builtin:priority-queue", "admit"),
        plugin("session-binding", "builtin:session-binding", "route"),
        plugin("extra", "extra.wasm", "route"),
        plugin("kv-affinity", "builtin:kv-affinity", "route"),
        20_000 + change,
        text(log),
        text(state)
    )
}
