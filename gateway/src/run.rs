//! Starting and stopping a gateway.

use crate::access_log::AccessLog;
use crate::admin::Admin;
use crate::callouts::Callouts;
use crate::edge::Edge;
use crate::fleet_state::Fleet;
use crate::gateway::Gateway;
use crate::generation::{BuildError, Foundation, fleet_settings, prepare};
use crate::listen::Bound;
use crate::metrics::Metrics;
use crate::module_store::ModuleStore;
use crate::plugin_start::Modules;
use crate::probation::{self, RefusedModules};
use crate::recording::Recording;
use crate::reload::{Source, watch};
use crate::state::{State, StateError};
use crate::ticks::Ticks;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch as signal_watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use turnstile_config::Config;
use turnstile_plugins::{Runtime, RuntimeOptions, SharedState};

/// How often overdue sessions are looked for.
const EXPIRE_EVERY: Duration = Duration::from_millis(500);
/// How often a stopping gateway tells what is left.
const PROGRESS_EVERY: Duration = Duration::from_secs(3);
/// Time for cut turns to say so to their clients.
const LAST_WORDS: Duration = Duration::from_secs(1);

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
    /// `state.dir`.
    #[error(transparent)]
    State(#[from] StateError),
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
    state: Option<Arc<State>>,
    /// Ends the connections that are left.
    cut: CancellationToken,
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
        let recording = Recording::open(&config.logging)?;
        let mut foundation = Foundation::new(&config)?;
        let keeping = config.clone();
        let state = spawn_blocking(move || State::open(&keeping)).await??.map(Arc::new);
        if let Some(state) = &state {
            foundation.seed = state.seed();
        }

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
            let prepared = prepare(config, &foundation, &[], &Modules::Current);
            (prepared, foundation)
        })
        .await?;
        let prepared = prepared?;
        let settings = fleet_settings(prepared.config(), &[]);
        let side_queue = usize::try_from(prepared.config().limits.side_queue).unwrap_or(usize::MAX);
        let fleet = Arc::new(Fleet::new(Arc::clone(&metrics), settings, side_queue));
        let generation = prepared.commit(1, &foundation, &fleet);
        foundation.callouts.attach(&fleet);
        let mut tasks = JoinSet::new();
        if let Some(state) = &state {
            let (found, orphans) = {
                let (state, fleet) = (Arc::clone(state), Arc::clone(&fleet));
                spawn_blocking(move || state.restore(&fleet)).await??
            };
            if found.sessions > 0 {
                // A worker that is not probed yet looks like one that is gone, and its sessions would move.
                until_probed(&fleet).await;
            }
            tasks.spawn(orphans.close(Arc::clone(&fleet)));
            tasks.spawn(Arc::clone(state).keep(Arc::clone(&fleet)));
        }
        let gateway = Arc::new(Gateway::new(fleet, metrics, generation, foundation, log, recording));
        let ticks = Ticks::start()?;
        ticks.adopt(&gateway.generation.load_full());

        let (stop_serving, serving) = signal_watch::channel(false);
        let (stop_admin, administering) = signal_watch::channel(false);
        let cut = CancellationToken::new();
        let mut listeners = JoinSet::new();
        let mut addresses = Vec::new();
        for (socket, h2c) in bound {
            addresses.push(socket.address());
            let app = Arc::new(Edge::new(Arc::clone(&gateway), h2c));
            listeners.spawn(socket.serve(app, serving.clone(), cut.clone()));
        }
        let mut admins = JoinSet::new();
        let admin_address = admin.as_ref().map(Bound::address);
        if let Some(socket) = admin {
            let app = Arc::new(Admin::new(Arc::clone(&gateway), Arc::clone(&ticks), source.clone()));
            admins.spawn(socket.serve(app, administering, cut.clone()));
        }
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
            state,
            cut,
        })
    }

    /// Reloads, as SIGHUP does.
    ///
    /// # Errors
    /// Why nothing changed.
    pub async fn reload(&self) -> Result<crate::reload::Reloaded, String> {
        crate::reload::reload(&self.gateway, &self.ticks, &self.source).await
    }

    /// Stops, with all the time that the configuration gives.
    pub async fn stop(self) {
        self.stop_unless(&CancellationToken::new()).await;
    }

    /// Stops: says so to load balancers, then takes nothing new and lets what is there finish, then closes engine sessions and
    /// writes the last snapshot. Each part is bounded; `hurry` cuts the first two short.
    pub async fn stop_unless(mut self, hurry: &CancellationToken) {
        let gateway = Arc::clone(&self.gateway);
        let options = gateway.generation.load().config.shutdown.clone();
        gateway.stopping.announce();
        self.progress("stopping");
        if options.delay_s > 0 {
            tokio::select! {
                () = tokio::time::sleep(Duration::from_secs(options.delay_s)) => {}
                () = hurry.cancelled() => {}
            }
        }
        let _ = self.stop_serving.send(true);
        let grace = tokio::time::sleep(Duration::from_secs(options.grace_s));
        tokio::pin!(grace);
        let mut said = tokio::time::interval(PROGRESS_EVERY);
        said.tick().await;
        while !self.listeners.is_empty() {
            tokio::select! {
                _ = self.listeners.join_next() => {}
                _ = said.tick() => self.progress("draining"),
                () = &mut grace => break,
                () = hurry.cancelled() => break,
            }
        }
        self.cut_turns().await;
        self.tasks.shutdown().await;
        gateway.foundation.callouts.stop().await;
        let last = match &self.state {
            Some(state) => Some(state.last(&gateway.fleet).await),
            None => None,
        };
        gateway.prefills.cancel_all();
        let open = gateway.fleet.sessions.close_within(Duration::from_secs(options.close_s)).await;
        if !open.is_empty() {
            tracing::warn!(engine_sessions = open.len(), "left open: their workers do not answer");
        }
        gateway.fleet.side.settle(LAST_WORDS).await;
        for worker in gateway.fleet.workers.current() {
            worker.stop_probe();
        }
        if let (Some(state), Some(last)) = (&self.state, last) {
            state.finish(last, &gateway.fleet).await;
        }
        let _ = self.stop_admin.send(true);
        self.cut.cancel();
        while self.admins.join_next().await.is_some() {}
        if !self.ticks.end().await {
            tracing::warn!("some plugins have not ended");
        }
        self.ticks.stop();
        tracing::info!("stopped");
    }

    /// One line on what is left.
    fn progress(&self, what: &'static str) {
        let fleet = &self.gateway.fleet;
        let sessions = fleet.sessions.counts();
        tracing::info!(
            turns = self.gateway.stopping.turns(),
            waiting = fleet.admission.depth(),
            engine_sessions = sessions.engine_sessions,
            "{what}"
        );
    }

    /// Ends what the grace time has not: whoever has got nothing yet is told to come back, other answers break off.
    async fn cut_turns(&mut self) {
        let turns = self.gateway.stopping.turns();
        if turns > 0 {
            tracing::warn!(turns, waiting = self.gateway.fleet.admission.depth(), "time is over: cutting turns");
        }
        self.gateway.stopping.cut();
        let ended = async {
            self.gateway.stopping.until_none().await;
            while self.listeners.join_next().await.is_some() {}
        };
        if tokio::time::timeout(LAST_WORDS, ended).await.is_err() {
            self.cut.cancel();
            while self.listeners.join_next().await.is_some() {}
        }
    }
}

/// Waits for the first probe of every worker, a bounded time.
async fn until_probed(fleet: &Fleet) {
    // A worker without `/ready` is asked twice.
    let most = fleet.settings().probe.timeout * 2;
    let workers = fleet.workers.current();
    let probed = futures::future::join_all(workers.iter().map(|worker| worker.first_probe()));
    if tokio::time::timeout(most, probed).await.is_err() {
        tracing::warn!("some workers have not answered yet: their sessions may move");
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
        crate::drain::sweep(&gateway.fleet);
        gateway.fleet.sweep();
        gateway.foundation.callouts.sweep();
    }
}

impl Foundation {
    /// What all generations of a process share, as its first configuration says.
    ///
    /// # Errors
    /// The plugin engine does not start.
    pub fn new(config: &Config) -> Result<Self, turnstile_plugins::RuntimeError> {
        let base = cache_base(config);
        let cache_dir = base.as_ref().map(|base| base.join("wasm"));
        let runtime = Runtime::new(RuntimeOptions { cache_dir, ..RuntimeOptions::default() })?;
        let modules = ModuleStore::open(base.map(|base| base.join("modules")).as_deref());
        let seed = u64::try_from(crate::request_id::random_u128() >> 64).unwrap_or_default();
        let shared = Arc::new(SharedState::default());
        let (threads, callouts) = (thread_count(config), Callouts::new());
        let refused = RefusedModules::default();
        Ok(Self { runtime, shared, callouts, services: None, seed, threads, refused, modules })
    }
}

/// Threads that serve requests.
pub fn thread_count(config: &Config) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    config.threads.map_or_else(cores, |n| n as usize)
}

/// Where compiled plugins are kept; nowhere without a home.
pub fn cache_dir(config: &Config) -> Option<PathBuf> {
    Some(cache_base(config)?.join("wasm"))
}

/// Below which compiled and fetched plugins are kept: `state.dir`, else the user's cache directory; nowhere without a home.
pub fn cache_base(config: &Config) -> Option<PathBuf> {
    Some(match &config.state.dir {
        Some(dir) => dir.clone(),
        None => {
            let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
            absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|h| h.join(".cache")))?.join("turnstile")
        }
    })
}
