//! The gateway: what all listeners and tasks share.

use crate::access_log::AccessLog;
use crate::fleet_state::{Fleet, FleetPool};
use crate::generation::{Foundation, Generation};
use crate::metrics::Metrics;
use crate::policy::PolicyStore;
use crate::policy::store::SharedStore;
use crate::prefills::Prefills;
use crate::probation::Probation;
use crate::recording::Recording;
use crate::request_body::HeldBodies;
use crate::rollback::History;
use crate::stopping::Stopping;
use arc_swap::ArcSwap;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use turnstile_fleet::worker::{WorkerView, awaited};

/// What all listeners and tasks share.
pub struct Gateway {
    /// The fleet.
    pub fleet: Arc<Fleet>,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// What serves new requests.
    pub generation: ArcSwap<Generation>,
    /// What generations share.
    pub foundation: Foundation,
    /// Access and decision log.
    pub log: AccessLog,
    /// Turns, for replay; nothing unless configured.
    pub recording: Option<Recording>,
    /// Speculative prefills that run.
    pub prefills: Arc<Prefills>,
    /// Request bodies held.
    pub bodies: Arc<HeldBodies>,
    /// Policies' shared store.
    pub store: Arc<dyn PolicyStore>,
    /// The end, from the first signal to stop.
    pub stopping: Stopping,
    /// One reload at a time.
    pub reloading: tokio::sync::Mutex<()>,
    /// The last failed reload, for the admin listener.
    pub last_error: Mutex<Option<String>>,
    /// The generation to go back to while new plugins have to prove themselves.
    pub probation: Probation,
    /// The generations to go back to when an administrator asks for it.
    pub history: History,
    shard: AtomicUsize,
}

impl Gateway {
    /// Puts the parts together.
    pub fn new(
        fleet: Arc<Fleet>,
        metrics: Arc<Metrics>,
        generation: Generation,
        foundation: Foundation,
        log: AccessLog,
        recording: Option<Recording>,
    ) -> Self {
        let store: Arc<dyn PolicyStore> = Arc::new(SharedStore(foundation.shared.data.space(STORE)));
        metrics.generation.set(i64::try_from(generation.number).unwrap_or(i64::MAX));
        Self {
            fleet,
            generation: ArcSwap::from_pointee(generation),
            foundation,
            log,
            recording,
            prefills: Arc::new(Prefills::new(Arc::clone(&metrics))),
            metrics,
            bodies: Arc::default(),
            store,
            stopping: Stopping::default(),
            reloading: tokio::sync::Mutex::new(()),
            last_error: Mutex::new(None),
            probation: Probation::default(),
            history: History::default(),
            shard: AtomicUsize::new(0),
        }
    }

    /// Spreads turns over a plugin's instances.
    pub fn next_shard(&self) -> usize {
        self.shard.fetch_add(1, Ordering::Relaxed)
    }

    /// True once the gateway has been told to stop.
    pub fn is_stopping(&self) -> bool {
        self.stopping.is_announced()
    }

    /// Workers that take turns: the ready ones, and in a pool without any those that are ejected, which then serve all the same.
    pub fn ready_workers(&self) -> usize {
        let ready = |pool: &FleetPool| pool.views().iter().filter(|view| view.is_ready()).count();
        self.fleet.settings().pools.iter().map(ready).sum()
    }

    /// Whether turns are served: at once, or, once the gateway has had a worker, when one is up that a reload has brought.
    pub fn takes_turns(&self) -> bool {
        let takes = |pool: &FleetPool| {
            let views = pool.views();
            views.iter().any(WorkerView::is_ready) || self.fleet.was_ready() && awaited(&views)
        };
        self.fleet.settings().pools.iter().any(takes)
    }
}

/// Name space of the functions `turnstile.kv_*`, a name of its own so that any policy can reach it.
pub const STORE: &str = "turnstile";
