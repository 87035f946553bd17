//! The workers: one object per worker for the life of the process, whatever generation names it.

mod ejection;
mod probe;
pub mod reports;

pub use probe::{ProbeOptions, WorkerEvents, run as probe};

use crate::side::SidePlaces;
use crate::upstream::{ConnectionLimits, Target, Tls};
use arc_swap::ArcSwapOption;
use hashbrown::HashMap;
use http::HeaderValue;
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio_util::sync::CancellationToken;
use turnstile_config::WorkerUrl;
use turnstile_fleet::ids::WorkerId;
use turnstile_fleet::session::release_after_ms;
use turnstile_fleet::worker::{Flight, Worker as Model, WorkerState, WorkerView};

/// What the configuration says about a worker.
#[derive(Debug, Clone)]
pub struct WorkerSettings {
    /// Its pool's name.
    pub pool: Arc<str>,
    /// Labels for policies.
    pub labels: Arc<BTreeMap<String, String>>,
    /// Turns of ours it may have at a time.
    pub max_in_flight: Option<u32>,
    /// `Authorization` for it.
    pub authorization: Option<HeaderValue>,
    /// HTTP/2 without TLS.
    pub h2c: bool,
    /// How TLS is spoken to it, if it is.
    pub tls: Arc<Tls>,
    /// Connection limits.
    pub connection: ConnectionLimits,
}

/// One SGLang server.
pub struct Worker {
    /// Index, stable for the process.
    pub index: WorkerId,
    /// Name.
    pub id: Arc<str>,
    /// Where it listens.
    pub url: WorkerUrl,
    settings: Mutex<WorkerSettings>,
    target: ArcSwapOption<Target>,
    model: Mutex<Model>,
    facts: Mutex<Option<reports::ServerInfo>>,
    /// Data-parallel rank that the next session gets.
    next_rank: AtomicU32,
    draining: AtomicBool,
    removed: AtomicBool,
    /// Uncached tokens it had prefilled when an earlier process of ours last looked; 0 unknown.
    expected_prefill: AtomicU64,
    /// Its first probe has ended, however it ended.
    probed: AtomicBool,
    /// Who waits for that.
    first_probe: CancellationToken,
    /// Told when nothing moves on it and its turns have somewhere else to go.
    stuck: Notify,
    /// Told when it is ejected, for its probe to look after it.
    ejected: Notify,
    /// Pieces of answers that came from it: movement that its load reports may not show.
    heard: AtomicU64,
    side_places: SidePlaces,
    abort_places: SidePlaces,
    stop: CancellationToken,
}

impl Worker {
    fn new(index: WorkerId, id: &str, url: WorkerUrl, settings: WorkerSettings) -> Self {
        let id: Arc<str> = Arc::from(id);
        let mut model = Model::new(Arc::clone(&id), index);
        model.state = WorkerState::Starting;
        let worker = Self {
            index,
            id,
            url,
            settings: Mutex::new(settings.clone()),
            target: ArcSwapOption::empty(),
            model: Mutex::new(model),
            facts: Mutex::new(None),
            next_rank: AtomicU32::new(0),
            draining: AtomicBool::new(false),
            removed: AtomicBool::new(false),
            expected_prefill: AtomicU64::new(0),
            probed: AtomicBool::new(false),
            first_probe: CancellationToken::new(),
            stuck: Notify::new(),
            ejected: Notify::new(),
            heard: AtomicU64::new(0),
            side_places: SidePlaces::default(),
            abort_places: SidePlaces::default(),
            stop: CancellationToken::new(),
        };
        worker.apply(settings);
        worker
    }

    fn apply(&self, settings: WorkerSettings) {
        {
            let mut model = self.model.lock();
            model.labels = Arc::clone(&settings.labels);
            model.limit = settings.max_in_flight;
        }
        let address = self.target.load().as_ref().map(|t| t.peer._address.clone());
        *self.settings.lock() = settings;
        if let Some(address) = address.and_then(|a| a.as_inet().copied()) {
            self.resolve_to(address);
        }
    }

    /// What the configuration says.
    pub fn settings(&self) -> WorkerSettings {
        self.settings.lock().clone()
    }

    /// How to reach it; nothing before its name was resolved.
    pub fn target(&self) -> Option<Arc<Target>> {
        self.target.load_full()
    }

    fn resolve_to(&self, address: SocketAddr) {
        let settings = self.settings();
        let mut target = Target::new(address, self.url.host(), self.url.tls(), settings.h2c, settings.connection);
        target.authorization = settings.authorization;
        if self.url.tls() {
            settings.tls.apply(&mut target);
        }
        self.target.store(Some(Arc::new(target)));
    }

    /// What a decision sees. `held_rows`: rows that idle streaming sessions hold there.
    pub fn view(&self, held_rows: u32) -> WorkerView {
        self.model.lock().view(held_rows)
    }

    /// Runs `f` on the worker's model.
    pub fn with_model<T>(&self, f: impl FnOnce(&mut Model) -> T) -> T {
        f(&mut self.model.lock())
    }

    /// Its state.
    pub fn state(&self) -> WorkerState {
        self.model.lock().state()
    }

    /// Whether its probes are well, ejected or not.
    pub fn answers_probes(&self) -> bool {
        self.model.lock().state == WorkerState::Ready
    }

    /// What `/server_info` told last.
    pub fn facts(&self) -> Option<reports::ServerInfo> {
        self.facts.lock().clone()
    }

    /// How long after an answered abort the turn may still be in its engine.
    pub fn lets_go_within(&self) -> Duration {
        let chunk = self.facts.lock().as_ref().and_then(|facts| facts.chunked_prefill_size);
        let rate = self.with_model(|model| model.rates.prefill_tokens_per_s());
        Duration::from_millis(release_after_ms(chunk, rate))
    }

    /// The rank for a new session: they take turns. Nothing when there is only one.
    pub fn pick_rank(&self) -> Option<u32> {
        let size = self.model.lock().capabilities.dp_size;
        (size > 1).then(|| self.next_rank.fetch_add(1, Ordering::Relaxed) % size)
    }

    /// Counts a turn as in flight from now until the guard is dropped.
    pub fn dispatch(self: &Arc<Self>, uncached_tokens: u64, osl: u64) -> InFlight {
        let flight = self.model.lock().flights.dispatch(uncached_tokens, osl);
        InFlight { worker: Arc::clone(self), flight: Some(flight) }
    }

    /// The same, unless the worker is such as `refuse` says at this very moment: decisions look at workers one by one, and
    /// two of them may have seen the same free place.
    pub fn dispatch_unless(
        self: &Arc<Self>,
        uncached_tokens: u64,
        osl: u64,
        held_rows: u32,
        refuse: impl FnOnce(&WorkerView) -> bool,
    ) -> Option<InFlight> {
        let mut model = self.model.lock();
        if refuse(&model.view(held_rows)) {
            return None;
        }
        let flight = model.flights.dispatch(uncached_tokens, osl);
        Some(InFlight { worker: Arc::clone(self), flight: Some(flight) })
    }

    /// Takes no new turns from now on.
    pub fn drain(&self) {
        let mut model = self.model.lock();
        self.draining.store(true, Ordering::Release);
        model.state = WorkerState::Draining;
    }

    /// Takes turns again, as soon as its next probe finds it well.
    pub fn undrain(&self) {
        let mut model = self.model.lock();
        if self.draining.swap(false, Ordering::AcqRel) && !self.is_removed() {
            model.state = WorkerState::Starting;
        }
    }

    /// A process that has prefilled fewer uncached tokens than these is another one than that of which we remember anything.
    pub fn expect_prefill_total(&self, uncached_tokens: u64) {
        self.expected_prefill.store(uncached_tokens, Ordering::Release);
    }

    /// True once [`Worker::drain`] was called.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// True once the configuration no longer names it.
    pub fn is_removed(&self) -> bool {
        self.removed.load(Ordering::Acquire)
    }

    /// True once it has been probed: before that its state says nothing.
    pub fn is_probed(&self) -> bool {
        self.probed.load(Ordering::Acquire)
    }

    /// Resolves when its first probe has ended, or never will.
    pub async fn first_probe(&self) {
        tokio::select! {
            () = self.first_probe.cancelled() => {}
            () = self.stop.cancelled() => {}
        }
    }

    /// Resolves when nothing moves on it from now on, and its turns have somewhere else to go.
    pub fn stuck(&self) -> Notified<'_> {
        self.stuck.notified()
    }

    /// An answer began: the worker does what it should.
    pub fn note_answer(&self) {
        self.note_heard();
        self.model.lock().ejections.success();
    }

    /// A piece of an answer came.
    pub fn note_heard(&self) {
        self.heard.fetch_add(1, Ordering::Relaxed);
    }

    /// How many pieces of answers have come so far.
    pub(super) fn heard(&self) -> u64 {
        self.heard.load(Ordering::Relaxed)
    }

    /// Places for side requests on this worker, aborts not among them.
    pub fn side_places(&self) -> &SidePlaces {
        &self.side_places
    }

    /// Places for aborts on this worker.
    pub fn abort_places(&self) -> &SidePlaces {
        &self.abort_places
    }

    fn note_probed(&self) {
        if !self.probed.swap(true, Ordering::AcqRel) {
            self.first_probe.cancel();
        }
    }

    /// Cancelled when the configuration no longer names it, or the gateway ends.
    pub fn gone(&self) -> &CancellationToken {
        &self.stop
    }

    /// Ends its probe, at shutdown.
    pub fn stop_probe(&self) {
        self.stop.cancel();
    }

    /// The configuration does not name it any more. Its pool must have its new workers by now: a turn that finds this one gone
    /// looks for them.
    pub fn remove(&self) {
        {
            let mut model = self.model.lock();
            self.removed.store(true, Ordering::Release);
            // Turns that waited through a reload must not go there.
            model.state = WorkerState::Draining;
            // Nobody asks it any more: all that is known of its load from now on is what we send it.
            model.forget_load();
        }
        self.stop.cancel();
    }
}

/// A turn in flight on a worker; dropping it gives its room back.
pub struct InFlight {
    worker: Arc<Worker>,
    flight: Option<Flight>,
}

impl InFlight {
    /// The worker.
    pub fn worker(&self) -> &Arc<Worker> {
        &self.worker
    }

    /// The first byte of the answer came.
    pub fn first_byte(&mut self) {
        if let Some(flight) = &mut self.flight {
            self.worker.model.lock().flights.first_byte(flight);
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if let Some(flight) = self.flight.take() {
            self.worker.model.lock().flights.finish(flight);
        }
    }
}

/// One worker as a configuration names it.
pub struct Named<'a> {
    /// Its id.
    pub id: &'a str,
    /// Where it listens.
    pub url: &'a WorkerUrl,
    /// The rest.
    pub settings: WorkerSettings,
}

/// All workers this process has known.
#[derive(Default)]
pub struct Workers {
    inner: RwLock<Inner>,
}

#[derive(Default)]
struct Inner {
    /// By index. Removed ones stay until nothing of them is left.
    all: BTreeMap<WorkerId, Arc<Worker>>,
    by_id: HashMap<String, WorkerId>,
    /// An index is never used twice.
    next: u32,
}

/// What [`Workers::adopt`] changed.
#[derive(Default)]
pub struct Adopted {
    /// Workers in the order named.
    pub named: Vec<Arc<Worker>>,
    /// Those that are new and need a probe.
    pub added: Vec<Arc<Worker>>,
    /// Those no longer named, which take turns until [`Worker::remove`].
    pub leaving: Vec<Arc<Worker>>,
}

impl Workers {
    /// Takes over the workers of a configuration: known ones keep their state and get the new settings, new ones are
    /// made. Those not named go on until the caller has seen to it that turns find the others. A worker is known by its id and
    /// URL together.
    pub fn adopt(&self, named: Vec<Named<'_>>) -> Adopted {
        let mut inner = self.inner.write();
        let mut adopted = Adopted::default();
        let mut kept = HashMap::new();
        for one in named {
            let known = inner
                .by_id
                .get(one.id)
                .and_then(|index| inner.all.get(index))
                .filter(|w| w.url == *one.url && !w.is_removed())
                .cloned();
            let worker = match known {
                Some(worker) => {
                    worker.apply(one.settings);
                    worker
                }
                None => {
                    let index = WorkerId(inner.next);
                    inner.next = inner.next.saturating_add(1);
                    let worker = Arc::new(Worker::new(index, one.id, one.url.clone(), one.settings));
                    inner.all.insert(index, Arc::clone(&worker));
                    adopted.added.push(Arc::clone(&worker));
                    worker
                }
            };
            kept.insert(one.id.to_owned(), worker.index);
            adopted.named.push(worker);
        }
        let leaves = |worker: &&Arc<Worker>| !worker.is_removed() && kept.get(&*worker.id) != Some(&worker.index);
        adopted.leaving = inner.all.values().filter(leaves).cloned().collect();
        inner.by_id = kept;
        adopted
    }

    /// The worker with this index.
    pub fn get(&self, index: WorkerId) -> Option<Arc<Worker>> {
        self.inner.read().all.get(&index).cloned()
    }

    /// The worker with this id.
    pub fn by_id(&self, id: &str) -> Option<Arc<Worker>> {
        let inner = self.inner.read();
        inner.by_id.get(id).and_then(|index| inner.all.get(index)).cloned()
    }

    /// Every worker that the configuration names.
    pub fn current(&self) -> Vec<Arc<Worker>> {
        self.inner.read().all.values().filter(|w| !w.is_removed()).cloned().collect()
    }

    /// Workers that are no longer named and of which something is left.
    pub fn leaving(&self) -> Vec<Arc<Worker>> {
        self.inner.read().all.values().filter(|w| w.is_removed()).cloned().collect()
    }

    /// Nothing of a removed worker is left.
    pub fn forget(&self, index: WorkerId) {
        self.inner.write().all.remove(&index);
    }
}
