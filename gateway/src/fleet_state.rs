//! What is known of the fleet, for the life of the process: workers, prefix index, sessions, queue. Generations come and
//! go above it.

use crate::admission::{Admission, Room};
use crate::clock::now_ms;
use crate::metrics::Metrics;
use crate::sessions::SessionTable;
use crate::side::SideRequests;
use crate::upstream::Upstream;
use crate::workers::{ProbeOptions, Worker, WorkerEvents, Workers};
use arc_swap::ArcSwap;
use hashbrown::HashMap;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use turnstile_fleet::ids::WorkerId;
use turnstile_fleet::index::PrefixIndex;
use turnstile_fleet::prefix::BytesPerToken;
use turnstile_fleet::queue::QueueOptions;
use turnstile_fleet::retry::{BudgetOptions, RetryBudget};
use turnstile_fleet::session::SessionOptions;
use turnstile_fleet::worker::{LimitOptions, WorkerView, fail_open, room};

/// The fleet.
pub struct Fleet {
    /// Workers.
    pub workers: Arc<Workers>,
    /// Who has which prompt blocks.
    pub index: Mutex<PrefixIndex>,
    /// Sessions.
    pub sessions: Arc<SessionTable>,
    /// The queue.
    pub admission: Arc<Admission>,
    /// Side requests.
    pub side: Arc<SideRequests>,
    /// Connections.
    pub upstream: Arc<Upstream>,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    view: Arc<FleetView>,
    /// Learned bytes of prompt per token, by pool name.
    bytes_per_token: Mutex<HashMap<Arc<str>, BytesPerToken>>,
    /// Retries of each pool.
    budgets: Mutex<HashMap<u32, RetryBudget>>,
    /// Held while a worker is judged.
    pub(crate) ejecting: Mutex<()>,
    /// Numbers of pools, by name: what waits in the queue keeps its pool over a reload.
    pool_ids: Mutex<HashMap<String, u32>>,
}

/// The present configuration of the fleet, for code that runs between requests.
pub struct FleetView {
    workers: Arc<Workers>,
    sessions: Arc<SessionTable>,
    settings: ArcSwap<FleetSettings>,
}

/// What a generation says about the fleet.
#[derive(Clone)]
pub struct FleetSettings {
    /// Number, name and workers of each pool.
    pub pools: Vec<(u32, Arc<str>, Vec<Arc<Worker>>)>,
    /// When a worker counts as full.
    pub limits: LimitOptions,
    /// Probe timing.
    pub probe: ProbeOptions,
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Most blocks of a worker.
    pub index_blocks: usize,
    /// First guess.
    pub bytes_per_token: f64,
    /// Queue bounds.
    pub queue: QueueOptions,
    /// Session bounds.
    pub sessions: SessionOptions,
    /// Time for a side request.
    pub side_timeout: Duration,
    /// Side requests at a time on one worker.
    pub side_per_worker: usize,
}

impl Room for FleetView {
    fn free(&self, pool: u32, pinned: Option<WorkerId>) -> u32 {
        let settings = self.settings.load();
        if let Some(worker) = pinned {
            // Its row is held by its session already, so only the worker's own answer counts.
            return match self.workers.get(worker).filter(|worker| !worker.is_removed()) {
                Some(worker) => worker.view(0).free_places(&settings.limits),
                None => u32::MAX,
            };
        }
        let Some((_, _, workers)) = settings.pools.iter().find(|(id, _, _)| *id == pool) else { return u32::MAX };
        let mut held = Vec::new();
        self.sessions.held(workers.iter().map(|w| w.index), &mut held);
        let mut views: Vec<WorkerView> =
            workers.iter().zip(&held).map(|(worker, held)| worker.view(held.idle_rows)).collect();
        fail_open(&mut views, &[]);
        room(&views, &settings.limits)
    }
}

impl Fleet {
    /// A fleet with nothing in it.
    pub fn new(metrics: Arc<Metrics>, settings: FleetSettings, side_queue: usize) -> Self {
        let workers = Arc::new(Workers::default());
        let upstream = Arc::new(Upstream::default());
        let side = SideRequests::new(Arc::clone(&upstream), Arc::clone(&metrics), side_queue, settings.side_per_worker);
        let side = Arc::new(side);
        let sessions = Arc::new(SessionTable::new(
            settings.sessions,
            Arc::clone(&workers),
            Arc::clone(&upstream),
            Arc::clone(&side),
            Arc::clone(&metrics),
        ));
        let index = Mutex::new(PrefixIndex::new(settings.index_blocks));
        let queue = settings.queue;
        let view = Arc::new(FleetView {
            workers: Arc::clone(&workers),
            sessions: Arc::clone(&sessions),
            settings: ArcSwap::from_pointee(settings),
        });
        let room: Arc<dyn Room> = view.clone();
        let admission = Arc::new(Admission::new(queue, room, Arc::clone(&metrics)));
        Self {
            workers,
            index,
            sessions,
            admission,
            side,
            upstream,
            metrics,
            view,
            bytes_per_token: Mutex::new(HashMap::new()),
            budgets: Mutex::new(HashMap::new()),
            ejecting: Mutex::new(()),
            pool_ids: Mutex::new(HashMap::new()),
        }
    }

    /// Takes over what a new generation says.
    pub fn configure(self: &Arc<Self>, settings: FleetSettings) {
        self.sessions.configure(settings.sessions, settings.side_timeout);
        self.side.configure(settings.side_per_worker);
        let names = settings.pools.iter().map(|(id, name, _)| (*id, Arc::clone(name))).collect();
        let queue = settings.queue;
        self.view.settings.store(Arc::new(settings));
        self.admission.configure(queue, names);
        self.admission.dispatch();
    }

    /// The number of a pool, the same for the life of the process.
    pub fn pool_id(&self, name: &str) -> u32 {
        let mut ids = self.pool_ids.lock();
        let next = u32::try_from(ids.len()).unwrap_or(u32::MAX);
        *ids.entry(name.to_owned()).or_insert(next)
    }

    /// The workers of a pool as the present configuration names them; nothing when it names no such pool.
    pub fn workers_of(&self, pool: u32) -> Option<Vec<Arc<Worker>>> {
        let settings = self.view.settings.load();
        settings.pools.iter().find(|(id, _, _)| *id == pool).map(|(_, _, workers)| workers.clone())
    }

    /// A turn came to a pool.
    pub fn count_turn(&self, pool: u32) {
        self.budgets.lock().entry(pool).or_default().turn(now_ms());
    }

    /// Takes a retry out of a pool's budget, if there is one.
    pub fn take_retry(&self, pool: u32, options: &BudgetOptions) -> bool {
        let workers = self.workers_of(pool).unwrap_or_default();
        let in_progress = workers.iter().map(|w| u64::from(w.with_model(|m| m.flights.in_flight()))).sum();
        self.budgets.lock().entry(pool).or_default().take(now_ms(), in_progress, options)
    }

    /// The present settings.
    pub fn settings(&self) -> Arc<FleetSettings> {
        self.view.settings.load_full()
    }

    /// Starts the probe of a new worker.
    pub fn watch(self: &Arc<Self>, worker: Arc<Worker>) {
        let events: Arc<dyn WorkerEvents> = Arc::clone(self) as Arc<dyn WorkerEvents>;
        let upstream = Arc::clone(&self.upstream);
        tokio::spawn(crate::workers::probe(worker, upstream, events));
    }

    /// A worker that is no longer configured.
    pub fn forget(&self, worker: &Arc<Worker>) {
        self.sessions.worker_removed(worker.index);
        self.index.lock().forget(worker.index);
        self.metrics.forget_worker(&worker.id);
    }

    /// Forgets removed workers for good once their last turn and engine session have ended: those may have counted and
    /// learned after the worker was removed. Closes connections that have waited too long.
    pub fn sweep(&self) {
        self.upstream.sweep();
        let leaving = self.workers.leaving();
        let mut held = Vec::new();
        self.sessions.held(leaving.iter().map(|w| w.index), &mut held);
        for (worker, held) in leaving.iter().zip(held) {
            if held.rows > 0 || worker.view(0).in_flight > 0 {
                continue;
            }
            self.index.lock().forget(worker.index);
            // Another worker may have its name by now.
            if self.workers.by_id(&worker.id).is_none() {
                self.metrics.forget_worker(&worker.id);
            }
            self.workers.forget(worker.index);
        }
    }

    /// Notes that a worker has these blocks of a prompt. A worker that is being forgotten is not remembered again.
    pub fn remember(&self, worker: &Worker, blocks: &[u64]) {
        let mut index = self.index.lock();
        if !worker.is_removed() {
            index.insert(worker.index, blocks);
        }
    }

    /// Bytes of prompt per token in a pool, as learned.
    pub fn bytes_per_token(&self, pool: &Arc<str>) -> f64 {
        let learned = self.bytes_per_token.lock().get(pool).copied();
        learned.map_or_else(|| self.settings().bytes_per_token, BytesPerToken::get)
    }

    /// A worker told how many tokens a prompt of so many bytes has.
    pub fn learn_bytes_per_token(&self, pool: &Arc<str>, bytes: usize, tokens: u64) {
        let first = self.settings().bytes_per_token;
        let mut map = self.bytes_per_token.lock();
        map.entry(Arc::clone(pool)).or_insert(BytesPerToken::new(first)).learn(bytes, tokens);
    }

    fn set_index_capacity(&self, worker: &Arc<Worker>) {
        let settings = self.settings();
        let pool = worker.settings().pool;
        let capacity = worker.with_model(|m| m.load().kv_capacity_tokens);
        let blocks = PrefixIndex::capacity_for(
            capacity,
            self.bytes_per_token(&pool),
            settings.block_bytes,
            settings.index_blocks,
        );
        self.index.lock().set_capacity(worker.index, blocks);
    }
}

impl WorkerEvents for Fleet {
    fn ready(&self, worker: &Arc<Worker>) {
        self.set_index_capacity(worker);
        self.sessions.worker_back(worker.index);
        self.admission.dispatch();
    }

    fn unhealthy(&self, worker: &Arc<Worker>, _reason: &str) {
        self.sessions.worker_lost(worker.index);
        self.admission.dispatch();
    }

    fn restarted(&self, worker: &Arc<Worker>) {
        self.index.lock().forget(worker.index);
        self.set_index_capacity(worker);
        self.sessions.worker_restarted(worker.index);
    }

    fn wedged(&self, worker: &Arc<Worker>) {
        self.take_off_wedged(worker);
    }

    fn stuck(&self, worker: &Arc<Worker>) {
        self.take_turns_off(worker);
    }

    fn room(&self, worker: &Arc<Worker>) {
        let _ = worker;
        self.admission.dispatch();
    }

    fn options(&self) -> ProbeOptions {
        self.settings().probe
    }
}
