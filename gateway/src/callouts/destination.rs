//! Where calls go: an upstream of the configuration, or a ready worker of a pool.

use super::Callouts;
use crate::generation::{BuildError, load_tls};
use crate::higress::cluster;
use crate::upstream::{ConnectionLimits, Target, Tls};
use crate::workers::Worker;
use hashbrown::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use turnstile_config::{Config, Dialect, NamedUpstream};
use turnstile_fleet::worker::{WorkerView, awaited};

/// How long an idle connection to an upstream is kept.
pub(super) const IDLE: Duration = Duration::from_secs(30);
/// How often a pool is looked at whose workers are still to come up.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// What a call to a worker may take, since workers have no limit of their own for it.
const WORKER_TIMEOUT: Duration = Duration::from_secs(60);

/// Where one plugin may call, by name.
#[derive(Clone, Default, PartialEq)]
pub struct Destinations {
    by_name: HashMap<String, Destination>,
    /// It may call them by what Higress would call their clusters.
    clusters: bool,
}

/// One of them.
#[derive(Clone, PartialEq)]
pub enum Destination {
    /// An upstream of the configuration.
    Named(Arc<NamedUpstream>, Tls),
    /// A pool, by name.
    Pool(Arc<str>),
}

impl Destinations {
    /// What a configuration lets a plugin call, with the files for TLS as they are now.
    ///
    /// # Errors
    /// A file for TLS cannot be used.
    pub fn of(config: &Config, plugin: &turnstile_config::Plugin) -> Result<Self, BuildError> {
        let mut found = HashMap::with_capacity(plugin.upstreams.len());
        for name in &plugin.upstreams {
            let destination = if let Some(upstream) = config.upstreams.iter().find(|u| u.name == *name) {
                let tls = load_tls("upstreams", name, upstream.tls_options())?;
                Destination::Named(Arc::new(upstream.clone()), tls)
            } else if config.pools.iter().any(|pool| pool.name == *name) {
                Destination::Pool(Arc::from(name.as_str()))
            } else {
                continue;
            };
            found.insert(name.clone(), destination);
        }
        Ok(Self { by_name: found, clusters: plugin.dialect == Dialect::Higress })
    }

    /// Whether there is one of this name that is called by HTTP or gRPC.
    pub fn has(&self, name: &str) -> bool {
        self.get(name).is_some_and(|destination| !destination.is_redis())
    }

    /// Whether there is one of this name that is a Redis server.
    pub fn has_redis(&self, name: &str) -> bool {
        self.get(name).is_some_and(Destination::is_redis)
    }

    pub(super) fn get(&self, name: &str) -> Option<&Destination> {
        if self.clusters {
            return cluster::names(name).find_map(|name| self.by_name.get(name));
        }
        self.by_name.get(name)
    }
}

impl Destination {
    /// Whether it is a Redis server.
    pub(super) fn is_redis(&self) -> bool {
        matches!(self, Self::Named(upstream, _) if upstream.url.is_redis())
    }

    /// Its name.
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Named(upstream, _) => &upstream.name,
            Self::Pool(name) => name,
        }
    }

    /// The longest that a call may take.
    pub(super) fn timeout(&self) -> Duration {
        match self {
            Self::Named(upstream, _) => Duration::from_millis(upstream.timeout_ms),
            Self::Pool(_) => WORKER_TIMEOUT,
        }
    }

    /// How to reach it now. Waits for the name server, or for the fleet while the gateway starts.
    ///
    /// # Errors
    /// Why it cannot be reached.
    pub(super) async fn target(&self, callouts: &Callouts) -> Result<Arc<Target>, String> {
        match self {
            Self::Named(upstream, tls) => named(upstream, tls).await.map(Arc::new),
            Self::Pool(name) => worker(callouts, name).await,
        }
    }
}

/// Where an upstream is now.
///
/// # Errors
/// Why that is not known.
pub(super) async fn resolve(upstream: &NamedUpstream) -> Result<SocketAddr, String> {
    let url = &upstream.url;
    if let Ok(ip) = url.host().parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, url.port()));
    }
    let found = tokio::net::lookup_host((url.host(), url.port())).await;
    let mut found = found.map_err(|error| format!("{} cannot be resolved: {error}", url.host()))?;
    found.next().ok_or_else(|| format!("{} has no address", url.host()))
}

async fn named(upstream: &NamedUpstream, tls: &Tls) -> Result<Target, String> {
    let url = &upstream.url;
    let address = resolve(upstream).await?;
    let limits = ConnectionLimits { connect: Duration::from_millis(upstream.connect_ms), idle: IDLE };
    let mut target = Target::new(address, url.host(), url.tls(), upstream.h2c, limits);
    if url.tls() {
        tls.apply(&mut target);
    }
    Ok(target)
}

async fn worker(callouts: &Callouts, pool: &str) -> Result<Arc<Target>, String> {
    let mut fleet = callouts.fleet.subscribe();
    let fleet = fleet.wait_for(|fleet| fleet.strong_count() > 0).await;
    let fleet = fleet.ok().and_then(|fleet| fleet.upgrade()).ok_or("the gateway has no workers yet")?;
    let ready = loop {
        let settings = fleet.settings();
        let found = settings.pools.iter().find(|found| &*found.name == pool);
        let found = found.ok_or_else(|| format!("the pool {pool} is gone"))?;
        let (workers, views) = (&found.workers, found.views());
        let reached = |(worker, view): (&Arc<Worker>, &WorkerView)| view.is_ready().then(|| worker.target()).flatten();
        let ready: Vec<Arc<Target>> = workers.iter().zip(&views).filter_map(reached).collect();
        // A reload takes workers away once their pool has others, and those are waited for as turns do.
        let went = workers.iter().any(|worker| worker.is_removed());
        if !ready.is_empty() || !(awaited(&views) || went) {
            break ready;
        }
        tokio::time::sleep(LOOK_EVERY).await;
    };
    let turn = callouts.turn.fetch_add(1, Ordering::Relaxed);
    let at = turn.checked_rem(ready.len()).ok_or_else(|| format!("no worker of the pool {pool} is ready"))?;
    ready.into_iter().nth(at).ok_or_else(|| format!("no worker of the pool {pool} is ready"))
}
