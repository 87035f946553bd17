//! The decision about a turn: order, worker, session.
//!
//! [`decide`] is the native built-in, the same as the three built-in policies in one. It is what policies read as
//! `turnstile.default`, and what decides when they fail. What policies write is validated into a [`Decision`] by
//! [`Decision::apply_write`]; [`Decision::settle`] then fills what they left open and puts the safety rules above them.

mod route;
mod write;

use crate::cost::CostOptions;
use crate::ids::WorkerId;
use crate::session::{ModeWish, SessionAction, SessionMode};
use crate::worker::{LimitOptions, WorkerState, WorkerView};

pub use route::choose;
pub use write::{MAX_LOG_BYTES, MAX_LOG_ENTRIES, WriteError};

/// The workers of a turn's pool, in order of their index, with the tokens of the turn that each is believed to have cached.
#[derive(Debug, Clone, Copy)]
pub struct Candidates<'a> {
    workers: &'a [WorkerView],
    cached_tokens: &'a [u64],
}

/// The worker that a turn's session is bound to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bound {
    /// The worker.
    pub worker: WorkerId,
    /// How.
    pub mode: SessionMode,
}

/// What a turn's place depends on.
#[derive(Debug, Clone, Copy)]
pub struct RouteInput<'a> {
    /// The workers of its pool.
    pub candidates: Candidates<'a>,
    /// Estimated prompt length, tokens.
    pub prompt_tokens: u64,
    /// Seed that orders equal workers.
    pub affinity_hash: u64,
    /// Where its session lives, if it has one.
    pub bound: Option<Bound>,
    /// Workers that failed this turn before.
    pub excluded: &'a [WorkerId],
}

/// What a turn's order depends on.
#[derive(Debug, Clone, Copy, Default)]
pub struct OrderInput<'a> {
    /// Signed priority; larger is more urgent.
    pub priority: Option<i64>,
    /// Head start in seconds, the older form of the hint; counts without `priority` only.
    pub latency_sensitivity_s: Option<f64>,
    /// Strict tier.
    pub strict_priority: Option<u32>,
    /// Whose fair share it is charged to: its tree, else its session, else its tenant.
    pub flow: Option<&'a str>,
}

/// What a turn's session depends on.
#[derive(Debug, Clone, Copy, Default)]
pub struct SessionInput {
    /// The turn names a session.
    pub named: bool,
    /// What it asks for.
    pub action: Option<SessionAction>,
    /// The session lives.
    pub live: bool,
    /// The idle timeout it asks for, ms.
    pub ttl_ms: Option<u64>,
}

/// Options of the native built-in; the defaults are those of the built-in policies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecideOptions {
    /// Weights of the cost.
    pub cost: CostOptions,
    /// When a worker counts as full.
    pub limits: LimitOptions,
    /// Workers named besides the target.
    pub fallbacks: usize,
    /// Longest head start or setback, ms.
    pub max_head_start_ms: i64,
    /// Lowest and highest priority sent to a worker.
    pub engine_priority: (i64, i64),
    /// Bind turns that name a session without asking for anything.
    pub bind_identified: bool,
    /// Mode of opened sessions.
    pub open_mode: ModeWish,
}

/// A decision, or the part of one that was written. What is `None` is left to whoever decides next.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Decision {
    /// Worker.
    pub route: RouteDecision,
    /// Order.
    pub queue: QueueDecision,
    /// Session.
    pub session: SessionDecision,
    /// Whether to warm the next turn.
    pub prefill: Option<bool>,
    /// Priority to send to the worker.
    pub engine_priority: Option<EnginePriority>,
    /// Entries for the decision log: name, text.
    pub log: Vec<(String, String)>,
}

/// Where a turn goes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RouteDecision {
    /// The worker. `None` after [`Decision::settle`]: no worker can take the turn.
    pub target: Option<WorkerId>,
    /// Where to try next, in order.
    pub fallbacks: Option<Vec<WorkerId>>,
    /// Cost of workers, ms; lower is better.
    pub scores: Option<Vec<(WorkerId, f64)>>,
    /// Workers not to use.
    pub exclude: Option<Vec<WorkerId>>,
    /// Why, for the decision log.
    pub reason: Option<String>,
    /// Why, for metrics.
    pub why: Why,
}

/// When a turn goes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct QueueDecision {
    /// Strict tier, higher first.
    pub tier: Option<u32>,
    /// Head start against arrival, ms; negative is a setback.
    pub head_start_ms: Option<i64>,
    /// Longest wait, ms.
    pub deadline_ms: Option<u64>,
    /// Whose fair share it is charged to.
    pub flow: Option<String>,
}

/// What becomes of the session.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SessionDecision {
    /// The action.
    pub action: Option<SessionAction>,
    /// Session id to use instead of the client's.
    pub key: Option<String>,
    /// Idle timeout, ms.
    pub ttl_ms: Option<u64>,
    /// Mode of an opened session.
    pub mode: Option<ModeWish>,
}

/// The priority a worker is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EnginePriority {
    /// This one.
    Send(i64),
    /// None, whatever the client said.
    Omit,
}

/// Why a worker was chosen; a label of bounded number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Why {
    /// No worker was.
    #[default]
    NoWorker,
    /// The streaming session lives there.
    Pinned,
    /// The session is bound there.
    Bound,
    /// The session moves there, for it is cheaper by a margin.
    MovedCheaper,
    /// The session moves there, for its worker cannot take the turn.
    MovedLost,
    /// Cheapest, with part of the prompt cached.
    Cached,
    /// Cheapest.
    LeastCost,
    /// A policy said so.
    Policy,
}

/// The native built-in: what the built-in policies decide, in one.
pub fn decide(
    route: &RouteInput<'_>,
    order: &OrderInput<'_>,
    session: &SessionInput,
    options: &DecideOptions,
) -> Decision {
    Decision {
        route: choose(route, options),
        queue: order_of(order, options),
        session: session_of(session, options),
        prefill: None,
        engine_priority: order.priority.map(|priority| EnginePriority::Send(options.clamp_engine(priority))),
        log: Vec::new(),
    }
}

/// Order in the queue.
pub fn order_of(order: &OrderInput<'_>, options: &DecideOptions) -> QueueDecision {
    let limit = options.max_head_start_ms.max(0);
    let head_start_ms = match (order.priority, order.latency_sensitivity_s) {
        (Some(priority), _) => priority.saturating_mul(1_000),
        // The older hint knows no setback. `as` saturates, and takes NaN for 0.
        (None, Some(seconds)) => (seconds.max(0.0) * 1_000.0) as i64,
        (None, None) => 0,
    };
    QueueDecision {
        tier: Some(order.strict_priority.unwrap_or(0)),
        head_start_ms: Some(head_start_ms.clamp(-limit, limit)),
        deadline_ms: None,
        flow: order.flow.map(str::to_owned),
    }
}

/// What becomes of the session. On a live one only what the turn asks for changes: opening twice is one session, and a bare
/// turn does not turn an open session into a bound one.
pub fn session_of(session: &SessionInput, options: &DecideOptions) -> SessionDecision {
    let action = match session.action {
        _ if !session.named => None,
        None if session.live || options.bind_identified => Some(SessionAction::Bind),
        action => action,
    };
    let fresh = !session.live;
    SessionDecision {
        action,
        key: None,
        ttl_ms: session.ttl_ms.filter(|_| matches!(action, Some(SessionAction::Bind | SessionAction::Open))),
        mode: match action {
            Some(SessionAction::Open) if fresh => Some(options.open_mode),
            Some(SessionAction::Bind) if fresh => Some(ModeWish::Affinity),
            _ => None,
        },
    }
}

// === impl DecideOptions ===

impl Default for DecideOptions {
    fn default() -> Self {
        Self {
            cost: CostOptions::default(),
            limits: LimitOptions::default(),
            fallbacks: 3,
            max_head_start_ms: 3_600_000,
            engine_priority: (-99, 100),
            bind_identified: true,
            open_mode: ModeWish::Auto,
        }
    }
}

impl DecideOptions {
    fn clamp_engine(&self, priority: i64) -> i64 {
        let (least, most) = self.engine_priority;
        priority.min(most).max(least)
    }
}

// === impl Candidates ===

impl<'a> Candidates<'a> {
    /// Workers in order of their index. `cached_tokens` belongs to them one by one; what it lacks is 0.
    pub fn new(workers: &'a [WorkerView], cached_tokens: &'a [u64]) -> Self {
        debug_assert!(workers.is_sorted_by_key(|worker| worker.index), "candidates are in order of their index");
        Self { workers, cached_tokens }
    }

    /// The workers.
    pub fn workers(&self) -> &'a [WorkerView] {
        self.workers
    }

    /// Workers with their cached tokens.
    pub fn iter(&self) -> impl Iterator<Item = (&'a WorkerView, u64)> {
        let cached = self.cached_tokens.iter().copied().chain(std::iter::repeat(0));
        self.workers.iter().zip(cached)
    }

    /// A worker by its index.
    pub fn get(&self, worker: WorkerId) -> Option<&'a WorkerView> {
        self.workers.get(self.workers.binary_search_by_key(&worker, |view| view.index).ok()?)
    }

    /// A worker as policies name it: its id, or `#INDEX`. An id that begins with `#` is found only if it is no such index.
    pub fn find(&self, name: &str) -> Option<&'a WorkerView> {
        let by_index = name.strip_prefix('#').and_then(|index| index.parse().ok()).and_then(|i| self.get(WorkerId(i)));
        by_index.or_else(|| self.workers.iter().find(|worker| &*worker.id == name))
    }

    /// Tokens of the turn that a worker is believed to have cached.
    pub fn cached_tokens(&self, worker: WorkerId) -> u64 {
        let place = self.workers.binary_search_by_key(&worker, |view| view.index);
        place.ok().and_then(|place| self.cached_tokens.get(place)).copied().unwrap_or(0)
    }
}

// === impl RouteInput ===

impl RouteInput<'_> {
    /// The worker that the turn must go to: that of its streaming session, as long as it answers at all. The engine holds
    /// the conversation, and the turn brings only what is new.
    pub fn pinned(&self) -> Option<WorkerId> {
        let bound = self.bound.filter(|bound| bound.mode == SessionMode::Stream)?;
        let view = self.candidates.get(bound.worker)?;
        // An ejected worker may be the only one that knows the conversation, so the turn itself finds out.
        let answers = matches!(view.state, WorkerState::Ready | WorkerState::Draining) || view.ejected.is_some();
        (answers && !self.excluded.contains(&bound.worker)).then_some(bound.worker)
    }
}

// === impl Why ===

impl Why {
    /// The label.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoWorker => "no_worker",
            Self::Pinned => "pinned",
            Self::Bound => "bound",
            Self::MovedCheaper => "moved_cheaper",
            Self::MovedLost => "moved_lost",
            Self::Cached => "cached",
            Self::LeastCost => "least_cost",
            Self::Policy => "policy",
        }
    }
}

#[cfg(test)]
#[path = "decision_tests.rs"]
mod tests;
