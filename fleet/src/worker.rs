//! What is known about a worker: state, capabilities, load, learned rates, and the work we gave it.
//!
//! A [`Worker`] is kept by the gateway and fed with probes, `/v1/loads` reports and the beginnings and ends of turns.
//! Decisions see a [`WorkerView`], an immutable copy of it.

mod ejection;
mod flight;
mod load;
mod rates;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::ids::WorkerId;

pub use ejection::{Ejected, EjectionCause, EjectionOptions, Ejections, MotionChange, WorkerFault};
pub use flight::{Flight, Flights};
pub use load::{Load, LoadError, RankLoad};
pub use rates::{DEFAULT_PREFILL_TOKENS_PER_S, Rates};

/// Whether a worker may be given turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WorkerState {
    /// Takes turns.
    Ready,
    /// Finishes what it has and gets nothing new.
    Draining,
    /// Its probes fail, or it is ejected.
    Unhealthy,
    /// Not probed yet, or not ready since it started.
    Starting,
}

/// What a worker can do beyond serving a turn, as its `/server_info` tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Capabilities {
    /// Takes a top-level `session_id` and keeps the session's KV longer (`--enable-session-radix-cache`).
    pub tag: bool,
    /// Has `/open_session` with streaming sessions on `/generate` (`--enable-streaming-session`).
    pub stream: bool,
    /// Orders by `priority` (`--enable-priority-scheduling`).
    pub priority: bool,
    /// Number of data parallel ranks; 0 and 1 both mean that there is nothing to choose.
    pub dp_size: u32,
}

/// A worker as a decision sees it. Numbers that the worker reports are 0 while unknown.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerView {
    /// Its name in the configuration; default `host:port`.
    pub id: Arc<str>,
    /// Its index.
    pub index: WorkerId,
    /// Whether it takes turns.
    pub state: WorkerState,
    /// Why it is unhealthy although its probes are well.
    pub ejected: Option<Ejected>,
    /// What it can do.
    pub capabilities: Capabilities,
    /// Free labels from the configuration.
    pub labels: Arc<BTreeMap<String, String>>,
    /// Turns of ours that it runs or holds in its queue.
    pub in_flight: u32,
    /// Of these, turns that have not answered yet.
    pub unanswered: u32,
    /// `in_flight` at the moment when `running` and `waiting` were reported.
    pub in_flight_at_load: u32,
    /// Requests it runs, from any client, all ranks together.
    pub running: u32,
    /// Requests in its own queue.
    pub waiting: u32,
    /// `max_running_requests` of all ranks together; 0 unknown.
    pub max_running: u32,
    /// Rows of `max_running` that idle streaming sessions hold.
    pub held_rows: u32,
    /// Tokens in its own queue that it will have to prefill.
    pub waiting_uncached_tokens: u64,
    /// KV tokens in use.
    pub kv_used_tokens: u64,
    /// KV tokens in all; 0 unknown.
    pub kv_capacity_tokens: u64,
    /// Learned prefill speed, uncached tokens a second.
    pub prefill_tokens_per_s: f64,
    /// Learned time to first token, ms; 0 unknown.
    pub ttft_ms: f64,
    /// Learned time between tokens, ms; 0 unknown.
    pub itl_ms: f64,
    /// Uncached tokens of our turns that have not answered yet.
    pub pending_prefill_tokens: u64,
    /// Sum of `osl` over our turns in flight: what they are expected to add to its KV.
    pub expected_decode_tokens: u64,
    /// Turns of ours that it may have at a time, if the configuration says.
    pub limit: Option<u32>,
}

/// When a worker counts as full.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LimitOptions {
    /// Share of the KV pool (0 to 1) over which a worker that already queues gets nothing more.
    pub kv_high_watermark: f64,
    /// Limit of a worker that neither reports `max_running_requests` nor has one configured.
    pub default_limit: u32,
}

/// A worker as the gateway keeps it.
#[derive(Debug, Clone)]
pub struct Worker {
    /// Its name in the configuration.
    pub id: Arc<str>,
    /// Its index.
    pub index: WorkerId,
    /// What probes and operators say. An ejection comes on top of it: see [`Worker::state`].
    pub state: WorkerState,
    /// What turns met, and whether that took it out.
    pub ejections: Ejections,
    /// What it can do.
    pub capabilities: Capabilities,
    /// Free labels from the configuration.
    pub labels: Arc<BTreeMap<String, String>>,
    /// Turns of ours that it may have at a time, if the configuration says.
    pub limit: Option<u32>,
    /// Learned rates.
    pub rates: Rates,
    /// Our turns in flight.
    pub flights: Flights,
    load: Load,
    in_flight_at_load: u32,
}

// === impl WorkerState ===

impl WorkerState {
    /// The name in facts, logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Unhealthy => "unhealthy",
            Self::Starting => "starting",
        }
    }

    /// The number in `workers.table`.
    pub fn code(self) -> u32 {
        match self {
            Self::Ready => 0,
            Self::Draining => 1,
            Self::Unhealthy => 2,
            Self::Starting => 3,
        }
    }
}

// === impl Capabilities ===

impl Capabilities {
    /// The bits in `workers.table`: 1 tag, 2 stream, 4 priority.
    pub fn bits(self) -> u32 {
        u32::from(self.tag) | u32::from(self.stream) << 1 | u32::from(self.priority) << 2
    }

    /// The names in `workers`.
    pub fn names(self) -> impl Iterator<Item = &'static str> {
        [(self.tag, "tag"), (self.stream, "stream"), (self.priority, "priority")]
            .into_iter()
            .filter_map(|(has, name)| has.then_some(name))
    }
}

// === impl LimitOptions ===

impl Default for LimitOptions {
    fn default() -> Self {
        Self { kv_high_watermark: 0.9, default_limit: 64 }
    }
}

// === impl WorkerView ===

impl WorkerView {
    /// A worker of which nothing is known but its name, ready and idle.
    pub fn new(id: impl Into<Arc<str>>, index: WorkerId) -> Self {
        Worker::new(id, index).view(0)
    }

    /// Whether it takes turns.
    pub fn is_ready(&self) -> bool {
        self.state == WorkerState::Ready
    }

    /// The state as metrics and the admin listener show it: an ejected worker is told from one whose probes fail.
    pub fn shown_state(&self) -> &'static str {
        if self.ejected.is_some() { "ejected" } else { self.state.name() }
    }

    /// Requests it has, running or queued: its last report, corrected by what we sent and got back since then; never less
    /// than our own.
    pub fn occupancy(&self) -> u32 {
        let reported = i64::from(self.running) + i64::from(self.waiting);
        let since = i64::from(self.in_flight) - i64::from(self.in_flight_at_load);
        u32::try_from((reported + since).max(0)).unwrap_or(u32::MAX).max(self.in_flight)
    }

    /// Requests in its own queue, as far as the last report is still true: what ended since has made room for some.
    pub fn waiting_now(&self) -> u32 {
        self.waiting.min(self.occupancy().saturating_sub(self.running))
    }

    /// Share of its KV pool in use; 0 while the capacity is unknown.
    pub fn kv_usage(&self) -> f64 {
        if self.kv_capacity_tokens == 0 { 0.0 } else { self.kv_used_tokens as f64 / self.kv_capacity_tokens as f64 }
    }

    /// Whether one more turn would only wait there.
    ///
    /// A configured limit is about our own turns and is the only thing that counts. Without one, a worker is full when its
    /// rows are taken, less those that idle streaming sessions hold (the engine counts those against
    /// `max_running_requests`, and with all rows held it runs nothing at all), or when it queues already and its KV pool is
    /// over the watermark.
    pub fn at_limit(&self, options: &LimitOptions) -> bool {
        if let Some(limit) = self.limit {
            return self.in_flight >= limit;
        }
        let rows = if self.max_running == 0 { options.default_limit } else { self.max_running };
        self.occupancy() >= rows.saturating_sub(self.held_rows)
            || (self.waiting > 0 && self.kv_usage() > options.kv_high_watermark)
    }

    /// Turns that it could take now without queueing them.
    pub fn free_places(&self, options: &LimitOptions) -> u32 {
        if self.at_limit(options) {
            return 0;
        }
        match self.limit {
            Some(limit) => limit.saturating_sub(self.in_flight),
            None => {
                let rows = if self.max_running == 0 { options.default_limit } else { self.max_running };
                rows.saturating_sub(self.held_rows).saturating_sub(self.occupancy())
            }
        }
    }
}

/// Turns that a pool's workers could take now; without bound where nothing could be waited for, so that placement refuses
/// the turn at once.
pub fn room(views: &[WorkerView], limits: &LimitOptions) -> u32 {
    let ready = views.iter().filter(|view| view.is_ready());
    if ready.clone().next().is_some() {
        return ready.fold(0, |free, view| free.saturating_add(view.free_places(limits)));
    }
    if awaited(views) { 0 } else { u32::MAX }
}

/// Whether turns wait for a worker of these, none of which takes any: one that a start or a reload has just brought is not known
/// to be well before its first probes.
pub fn awaited(views: &[WorkerView]) -> bool {
    !views.iter().any(WorkerView::is_ready) && views.iter().any(|view| view.state == WorkerState::Starting)
}

/// When every worker of a pool that its probes find well is ejected, they are used all the same: a fault of all is more
/// likely one of the judgement, and a turn that may fail is better than one that must. Workers that failed the turn already
/// (`excluded`) are no alternative.
pub fn fail_open(views: &mut [WorkerView], excluded: &[WorkerId]) {
    if views.iter().any(|view| view.is_ready() && !excluded.contains(&view.index)) {
        return;
    }
    for view in views.iter_mut().filter(|view| view.ejected.is_some()) {
        view.state = WorkerState::Ready;
    }
}

// === impl Worker ===

impl Worker {
    /// A ready worker of which nothing is known yet.
    pub fn new(id: impl Into<Arc<str>>, index: WorkerId) -> Self {
        Self {
            id: id.into(),
            index,
            state: WorkerState::Ready,
            ejections: Ejections::default(),
            capabilities: Capabilities::default(),
            labels: Arc::default(),
            limit: None,
            rates: Rates::default(),
            flights: Flights::default(),
            load: Load::default(),
            in_flight_at_load: 0,
        }
    }

    /// Takes a load report, and learns the prefill rate from its counters.
    pub fn report(&mut self, load: Load) {
        self.rates.observe_totals(load.prefill_uncached_total, load.prefill_busy_us_total);
        self.in_flight_at_load = self.flights.in_flight();
        self.load = load;
    }

    /// Nobody asks it any more: of its load nothing is known but the turns in flight.
    pub fn forget_load(&mut self) {
        self.in_flight_at_load = 0;
        self.load = Load {
            max_running: self.load.max_running,
            kv_capacity_tokens: self.load.kv_capacity_tokens,
            ..Load::default()
        };
    }

    /// Whether it takes turns: what its probes say, unless it is ejected.
    pub fn state(&self) -> WorkerState {
        if self.ejected().is_some() { WorkerState::Unhealthy } else { self.state }
    }

    /// Why it is out although its probes are well.
    pub fn ejected(&self) -> Option<Ejected> {
        self.ejections.ejected().filter(|_| self.state == WorkerState::Ready)
    }

    /// The last load report.
    pub fn load(&self) -> &Load {
        &self.load
    }

    /// Forgets the load and the counters behind the rates, not the rates: the process behind the address is another.
    pub fn restarted(&mut self) {
        self.load = Load::default();
        self.in_flight_at_load = self.flights.in_flight();
        self.rates.forget_totals();
        self.ejections.forget();
    }

    /// What a decision sees. `held_rows`: rows that idle streaming sessions hold there
    /// ([`Sessions::held`](crate::session::Sessions::held)).
    pub fn view(&self, held_rows: u32) -> WorkerView {
        WorkerView {
            id: Arc::clone(&self.id),
            index: self.index,
            state: self.state(),
            ejected: self.ejected(),
            capabilities: self.capabilities,
            labels: Arc::clone(&self.labels),
            in_flight: self.flights.in_flight(),
            unanswered: self.flights.unanswered(),
            in_flight_at_load: self.in_flight_at_load,
            running: self.load.running,
            waiting: self.load.waiting,
            max_running: self.load.max_running,
            held_rows,
            waiting_uncached_tokens: self.load.waiting_uncached_tokens,
            kv_used_tokens: self.load.kv_used_tokens,
            kv_capacity_tokens: self.load.kv_capacity_tokens,
            prefill_tokens_per_s: self.rates.prefill_tokens_per_s(),
            ttft_ms: self.rates.ttft_ms(),
            itl_ms: self.rates.itl_ms(),
            pending_prefill_tokens: self.flights.pending_prefill_tokens(),
            expected_decode_tokens: self.flights.expected_decode_tokens(),
            limit: self.limit,
        }
    }
}

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;
