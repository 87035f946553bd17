//! What is known of the fleet, for the life of the process: workers, prefix index, sessions, queue. Generations come and
//! go above it.

use crate::admission::{Admission, Places, Room};
use crate::clock::now_ms;
use crate::generation::PoolRuntime;
use crate::metrics::Metrics;
use crate::sessions::SessionTable;
use crate::side::SideRequests;
use crate::upstream::Upstream;
use crate::workers::{ProbeOptions, Worker, WorkerEvents, Workers};
use arc_swap::ArcSwap;
use hashbrown::HashMap;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use turnstile_fleet::ids::WorkerId;
use turnstile_fleet::index::PrefixIndex;
use turnstile_fleet::prefix::BytesPerToken;
use turnstile_fleet::queue::QueueOptions;
use turnstile_fleet::retry::{BudgetOptions, RetryBudget};
use turnstile_fleet::session::{Held, Left, SessionOptions};
use turnstile_fleet::worker::{LimitOptions, WorkerState, WorkerView, fail_open, room};

/// Pools kept that the configuration does not name any more; the latest stay.
const MAX_GONE: usize = 16;

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
    /// Some worker has been ready.
    was_ready: AtomicBool,
    /// Numbers of pools, by name: what waits in the queue keeps its pool over a reload.
    pool_ids: Mutex<HashMap<String, u32>>,
}

/// The present configuration of the fleet, for code that runs between requests.
pub struct FleetView {
    workers: Arc<Workers>,
    sessions: Arc<SessionTable>,
    settings: ArcSwap<FleetSettings>,
}

/// A pool.
#[derive(Clone)]
pub struct FleetPool {
    /// Number, the same for the life of the process.
    pub index: u32,
    /// Name.
    pub name: Arc<str>,
    /// Workers, in order of their index.
    pub workers: Vec<Arc<Worker>>,
}

/// The workers that a turn may go to.
pub struct Candidates {
    /// The workers, in order of their index.
    pub workers: Vec<Arc<Worker>>,
    /// Each as it is now.
    pub views: Vec<WorkerView>,
    /// What became of their pool.
    pub standing: Standing,
}

/// What became of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// The configuration names it.
    Named,
    /// It named it before, and turns that came then are served still.
    Gone,
    /// Too many pools have gone since: nothing is known of its room.
    Forgotten,
}

/// What a generation says about the fleet.
#[derive(Clone)]
pub struct FleetSettings {
    /// The pools.
    pub pools: Vec<FleetPool>,
    /// Pools that the configuration named before, for the turns that came then. Filled in by [`Fleet::configure`].
    pub gone: Vec<FleetPool>,
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
    fn free(&self, pool: u32, pinned: Option<WorkerId>) -> Places {
        let settings = self.settings.load();
        // A turn of a session whose worker was removed goes wherever there is room.
        if let Some(worker) = pinned.and_then(|worker| self.workers.get(worker)).filter(|worker| !worker.is_removed()) {
            // Its row is held by its session already, so only the worker's own answer counts.
            return Places::OfWorker(worker.view(0).free_places(&settings.limits));
        }
        Places::OfPool(settings.find(pool).map_or(u32::MAX, |(pool, standing)| {
            let mut views = self.views(&pool.workers, standing);
            fail_open(&mut views, &[]);
            room(&views, &settings.limits)
        }))
    }
}

impl FleetPool {
    /// Its workers as they are now, sessions that hold rows aside. Those that are ejected count where there is no other.
    pub fn views(&self) -> Vec<WorkerView> {
        let mut views: Vec<WorkerView> = self.workers.iter().map(|worker| worker.view(0)).collect();
        fail_open(&mut views, &[]);
        views
    }
}

impl FleetSettings {
    /// A pool, and what became of it.
    fn find(&self, pool: u32) -> Option<(&FleetPool, Standing)> {
        let named = self.pools.iter().map(|pool| (pool, Standing::Named));
        named.chain(self.gone.iter().map(|pool| (pool, Standing::Gone))).find(|(found, _)| found.index == pool)
    }
}

impl FleetView {
    fn views(&self, workers: &[Arc<Worker>], pool: Standing) -> Vec<WorkerView> {
        let mut held = Vec::new();
        self.sessions.held(workers.iter().map(|w| w.index), &mut held);
        let view = |(worker, held): (&Arc<Worker>, &Held)| {
            let mut view = worker.view(held.idle_rows);
            // Turns that came before the pool went have nowhere else to go.
            if pool != Standing::Named && worker.is_removed() && !worker.is_draining() {
                view.state = WorkerState::Ready;
            }
            view
        };
        workers.iter().zip(&held).map(view).collect()
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
            was_ready: AtomicBool::new(false),
            pool_ids: Mutex::new(HashMap::new()),
        }
    }

    /// Takes over what a new generation says.
    pub fn configure(self: &Arc<Self>, mut settings: FleetSettings) {
        {
            let before = self.view.settings.load();
            let is_gone = |pool: &&FleetPool| settings.pools.iter().all(|named| named.index != pool.index);
            settings.gone = before.pools.iter().chain(&before.gone).filter(is_gone).take(MAX_GONE).cloned().collect();
        }
        self.sessions.configure(settings.sessions, settings.side_timeout);
        self.side.configure(settings.side_per_worker);
        let pools = settings.pools.iter().chain(&settings.gone);
        let names = pools.map(|pool| (pool.index, Arc::clone(&pool.name))).collect();
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

    /// The workers that a turn of a pool may go to: those that the present configuration gives it, or, if it does not name the pool
    /// any more, those that the pool had last. `excluded` have failed the turn.
    pub fn candidates(&self, pool: &PoolRuntime, excluded: &[WorkerId]) -> Candidates {
        let settings = self.view.settings.load();
        let (workers, standing) = match settings.find(pool.index) {
            Some((pool, standing)) => (pool.workers.clone(), standing),
            None => (pool.workers.clone(), Standing::Forgotten),
        };
        let mut views = self.view.views(&workers, standing);
        fail_open(&mut views, excluded);
        Candidates { workers, views, standing }
    }

    /// A turn came to a pool.
    pub fn count_turn(&self, pool: u32) {
        self.budgets.lock().entry(pool).or_default().turn(now_ms());
    }

    /// Takes a retry out of a pool's budget, if there is one.
    pub fn take_retry(&self, pool: u32, options: &BudgetOptions) -> bool {
        let settings = self.view.settings.load();
        let workers = settings.find(pool).map(|(pool, _)| pool.workers.as_slice()).unwrap_or_default();
        let in_progress = workers.iter().map(|w| u64::from(w.with_model(|m| m.flights.in_flight()))).sum();
        self.budgets.lock().entry(pool).or_default().take(now_ms(), in_progress, options)
    }

    /// True once some worker has been ready.
    pub fn was_ready(&self) -> bool {
        self.was_ready.load(Ordering::Relaxed)
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
        // Without an earlier generation there are no turns of pools that are gone. One that is begun meanwhile has others.
        let before = self.view.settings.load();
        if !before.gone.is_empty() && self.metrics.generations_alive.get() <= 1 {
            let settings = FleetSettings { gone: Vec::new(), ..FleetSettings::clone(&before) };
            self.view.settings.compare_and_swap(&before, Arc::new(settings));
        }
        // In this order: the pools of one that leaves are those of settings that are there by then.
        let leaving = self.workers.leaving();
        let settings = self.settings();
        let may_serve = |worker: &Arc<Worker>| {
            settings.gone.iter().flat_map(|pool| &pool.workers).any(|other| Arc::ptr_eq(other, worker))
        };
        let mut held = Vec::new();
        self.sessions.held(leaving.iter().map(|w| w.index), &mut held);
        for (worker, held) in leaving.iter().zip(held) {
            let left = self.sessions.left_on(worker.index);
            // A turn that was placed there just before has begun a session since.
            if held.sessions > 0 || left == Left::More {
                self.sessions.worker_removed(worker.index);
            }
            if left != Left::Nothing || worker.view(0).in_flight > 0 || may_serve(worker) {
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
        self.was_ready.store(true, Ordering::Relaxed);
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
