//! Starting and stopping a gateway.

use crate::access_log::AccessLog;
use crate::admin::Admin;
use crate::edge::Edge;
use crate::fleet_state::Fleet;
use crate::gateway::Gateway;
use crate::generation::{BuildError, Foundation, fleet_settings, prepare};
use crate::listen::Bound;
use crate::metrics::Metrics;
use crate::probation::{self, RefusedModules};
use crate::reload::{Source, watch};
use crate::ticks::Ticks;
use parking_lot::Mutex;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::watch as signal_watch;
use tokio::task::JoinSet;
use turnstile_config::Config;
use turnstile_plugins::{Runtime, RuntimeOptions, SharedState};

/// How often overdue sessions are looked for.
const EXPIRE_EVERY: Duration = Duration::from_millis(500);

/// Why a gateway did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The configuration is no good: everything that is wrong with it.
    #[error("{0}")]
    Config(String),
    /// A plugin or secret is no good.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The plugin engine does not start.
    #[error(transparent)]
    Runtime(#[from] turnstile_plugins::RuntimeError),
    /// A socket, file or thread.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// Metrics that collide, which a test excludes.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
}

/// A gateway that runs.
pub struct Running {
    /// Where clients connect.
    pub addresses: Vec<SocketAddr>,
    /// Where the admin listener is.
    pub admin: Option<SocketAddr>,
    /// The gateway.
    pub gateway: Arc<Gateway>,
    /// For reloads.
    pub ticks: Arc<Ticks>,
    source: Source,
    stop_serving: signal_watch::Sender<bool>,
    stop_admin: signal_watch::Sender<bool>,
    listeners: JoinSet<()>,
    admins: JoinSet<()>,
    tasks: JoinSet<()>,
    grace: Duration,
}

impl Running {
    /// Starts a gateway on the current runtime.
    ///
    /// # Errors
    /// See [`StartError`]; nothing is left running then.
    pub async fn start(source: Source) -> Result<Self, StartError> {
        let reading = source.clone();
        let config = spawn_blocking(move || reading.read()).await?.map_err(StartError::Config)?;
        let metrics = Arc::new(Metrics::new()?);
        let log = AccessLog::open(&config.logging.access)?;
        let foundation = Foundation::new(&config)?;

        // Everything that can fail comes before anything is served.
        let mut bound = Vec::new();
        for listener in &config.listeners {
            bound.push((Bound::bind(&listener.address.to_string()).await?, listener.h2c));
        }
        let admin = match config.admin.address {
            Some(address) => Some(Bound::bind(&address.to_string()).await?),
            None => None,
        };
        let (prepared, foundation) = spawn_blocking(move || {
            let prepared = prepare(config, &foundation, None);
            (prepared, foundation)
        })
        .await?;
        let prepared = prepared?;
        let settings = fleet_settings(prepared.config(), &[]);
        let side_queue = usize::try_from(prepared.config().limits.side_queue).unwrap_or(usize::MAX);
        let grace = Duration::from_secs(prepared.config().timeouts.shutdown_grace_s);
        let fleet = Arc::new(Fleet::new(Arc::clone(&metrics), settings, side_queue));
        let generation = prepared.commit(1, &foundation, &fleet);
        let gateway = Arc::new(Gateway::new(fleet, metrics, generation, foundation, log));
        let ticks = Ticks::start()?;
        ticks.adopt(&gateway.generation.load_full());

        let (stop_serving, serving) = signal_watch::channel(false);
        let (stop_admin, administering) = signal_watch::channel(false);
        let grace_left = Arc::new(Mutex::new(grace));
        let mut listeners = JoinSet::new();
        let mut addresses = Vec::new();
        for (socket, h2c) in bound {
            addresses.push(socket.address());
            let app = Arc::new(Edge::new(Arc::clone(&gateway), h2c));
            listeners.spawn(socket.serve(app, serving.clone(), Arc::clone(&grace_left)));
        }
        let mut admins = JoinSet::new();
        let admin_address = admin.as_ref().map(Bound::address);
        if let Some(socket) = admin {
            let app = Arc::new(Admin::new(Arc::clone(&gateway), Arc::clone(&ticks), source.clone()));
            admins.spawn(socket.serve(app, administering, Arc::new(Mutex::new(Duration::from_secs(1)))));
        }
        let mut tasks = JoinSet::new();
        tasks.spawn(watch(Arc::clone(&gateway), Arc::clone(&ticks), source.clone()));
        tasks.spawn(expire(Arc::clone(&gateway)));
        tasks.spawn(probation::watch(Arc::clone(&gateway), Arc::clone(&ticks)));
        for address in &addresses {
            tracing::info!(listener = %address, "listening");
        }
        if let Some(address) = admin_address {
            tracing::info!(admin = %address, "admin listening");
        }
        Ok(Self {
            addresses,
            admin: admin_address,
            gateway,
            ticks,
            source,
            stop_serving,
            stop_admin,
            listeners,
            admins,
            tasks,
            grace,
        })
    }

    /// Reloads, as SIGHUP does.
    ///
    /// # Errors
    /// Why nothing changed.
    pub async fn reload(&self) -> Result<crate::reload::Reloaded, String> {
        crate::reload::reload(&self.gateway, &self.ticks, &self.source).await
    }

    /// Stops: no new connections and requests, streams finish within the grace time, then engine sessions are closed.
    pub async fn stop(mut self) {
        let started = std::time::Instant::now();
        self.gateway.stopping.store(true, Ordering::Release);
        let _ = self.stop_serving.send(true);
        let mut said = tokio::time::interval(Duration::from_secs(5));
        said.tick().await;
        loop {
            tokio::select! {
                joined = self.listeners.join_next() => if joined.is_none() { break },
                _ = said.tick() => {
                    let workers = self.gateway.fleet.workers.current();
                    let open: u32 = workers.iter().map(|w| w.view(0).in_flight).sum();
                    tracing::info!(in_flight = open, waiting = self.gateway.fleet.admission.depth(), "draining");
                }
            }
        }
        self.tasks.shutdown().await;
        // An abort that did not arrive holds a session back for five seconds; its close comes after that.
        let left = self.grace.saturating_sub(started.elapsed()).max(Duration::from_secs(8));
        let closing = std::time::Instant::now();
        let open = self.gateway.fleet.sessions.close_within(left).await;
        if !open.is_empty() {
            tracing::warn!(sessions = open.len(), "engine sessions left open: their workers do not answer");
        }
        self.gateway.fleet.side.settle(left.saturating_sub(closing.elapsed()).max(Duration::from_secs(1))).await;
        for worker in self.gateway.fleet.workers.current() {
            worker.stop_probe();
        }
        let _ = self.stop_admin.send(true);
        while self.admins.join_next().await.is_some() {}
        self.ticks.stop();
        tracing::info!("stopped");
    }
}

async fn spawn_blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> std::io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(std::io::Error::other)
}

async fn expire(gateway: Arc<Gateway>) {
    let mut every = tokio::time::interval(EXPIRE_EVERY);
    loop {
        every.tick().await;
        gateway.fleet.sessions.expire();
    }
}

impl Foundation {
    /// What all generations of a process share, as its first configuration says.
    ///
    /// # Errors
    /// The plugin engine does not start.
    pub fn new(config: &Config) -> Result<Self, turnstile_plugins::RuntimeError> {
        let runtime = Runtime::new(RuntimeOptions { cache_dir: cache_dir(config), ..RuntimeOptions::default() })?;
        let seed = u64::try_from(crate::request_id::random_u128() >> 64).unwrap_or_default();
        let shared = Arc::new(SharedState::default());
        Ok(Self { runtime, shared, seed, threads: thread_count(config), refused: RefusedModules::default() })
    }
}

/// Threads that serve requests.
pub fn thread_count(config: &Config) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    config.threads.map_or_else(cores, |n| n as usize)
}

/// Where compiled plugins are kept: `state.dir`, else the user's cache directory; nowhere without a home.
fn cache_dir(config: &Config) -> Option<PathBuf> {
    let base = match &config.state.dir {
        Some(dir) => dir.clone(),
        None => {
            let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
            absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|h| h.join(".cache")))?.join("turnstile")
        }
    };
    Some(base.join("wasm"))
}
