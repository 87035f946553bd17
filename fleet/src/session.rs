//! Sessions: which conversation is bound to which worker, and what the worker holds for it.
//!
//! A *session* is ours: a key, a worker, an idle timeout. An *engine session* is the worker's: a tag on its radix cache or a
//! streaming session in its scheduler. A session has at most one at a time, and may leave one behind that still has to be
//! closed (after a close, a move, an expiry, an eviction). The rules below keep a worker alive; no policy can break them:
//!
//! * One turn at a time in a streaming session. (A second one is refused by the engine, and the refusal clears the mark of the
//!   first; the next turn or close then ends the whole server.)
//! * No close while a turn runs in the engine session, none until the worker let go of an aborted turn, and none while the open
//!   is under way.
//! * Every engine session has an engine timeout, longer than ours, and is closed by us in the end.
//! * A streaming session never moves: its worker and data parallel rank are pinned.
//! * Streaming sessions hold a row and KV that the engine cannot evict; both are capped for each worker and rank.
//! * Engine ids are new for each generation, and made here, so that no client can name another's session and a late close
//!   never meets a new one.
//!
//! What a key is, seen from outside, and what each event does to it, is a table: `docs/sessions.md`, which
//! `session/state_tests.rs` writes from what this code does, in every state that can be reached.

mod engine;
mod hold;
mod inspect;
mod names;
mod note;
mod plan;
mod saved;
mod sweep;
mod table;
mod waiting;

use std::sync::Arc;

use crate::hints;
use crate::ids::{SessionKey, WorkerId};
use crate::route::Route;
use crate::worker::{Capabilities, WorkerView};

pub use hold::{AttemptEnd, Hold, Parting, RELEASE_AFTER_MS, RELEASE_UNTOLD_MS, Refused, release_after_ms};
pub use inspect::{Counts, SessionView};
pub use note::ContextNote;
pub use saved::{EngineChange, HeldEngine, Left, Restored, SavedSession};
pub use table::Sessions;
pub use waiting::WaitTicket;

/// What a turn wants of its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum SessionAction {
    /// An ordinary turn: it belongs to its session if there is one.
    #[default]
    None,
    /// Keep the session's turns on one worker from now on.
    Bind,
    /// Also have the worker hold the session's KV.
    Open,
    /// This turn is the last.
    Close,
    /// End the session before this turn, which is then an ordinary one.
    Release,
}

/// What a session means on its worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SessionMode {
    /// Our choice of worker only; nothing is said to the worker.
    Affinity,
    /// A `session_id` on each turn; full history, turns may overlap and move.
    Tag,
    /// A streaming session of the engine; token deltas, one turn at a time, pinned.
    Stream,
}

/// The mode a policy or client wants an opened session to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum ModeWish {
    /// The most that route and worker can do.
    #[default]
    Auto,
    /// Affinity only.
    Affinity,
    /// A tag, or affinity where there is none.
    Tag,
    /// A streaming session, or affinity where there is none.
    Stream,
}

/// Which session fields the turn's route takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Accepts {
    /// `session_params` works there (`/generate` only; the OpenAI routes declare and ignore it).
    pub session_params: bool,
    /// Top-level `session_id` works there.
    pub session_id: bool,
}

/// Bounds of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionOptions {
    /// Sessions kept. Beyond it the oldest idle affinity session goes, then the oldest idle tag session; with neither, the
    /// new turn is served without a session.
    pub max_sessions: usize,
    /// Idle timeout of a session that asks for none, ms.
    pub default_ttl_ms: u64,
    /// The longest that a turn may take, ms. The engine's idle timer starts when a turn is admitted, ours when it ends.
    pub max_turn_ms: u64,
    /// What the engine's timeout is longer than ours plus the longest turn, ms.
    pub engine_timeout_margin_ms: u64,
    /// A streaming session idle for less is not closed to make room for a new one, ms.
    pub evict_after_idle_ms: u64,
}

/// What streaming sessions may hold on one rank of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StreamCap {
    /// Open streaming sessions.
    pub rows: u32,
    /// KV tokens.
    pub tokens: u64,
}

/// A turn about to be sent. Worker and rank are the decision's; a streaming session that is open overrules them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BeginTurn {
    /// The session it names.
    pub key: SessionKey,
    /// What it wants of it.
    pub action: SessionAction,
    /// The mode wanted, for [`SessionAction::Open`]; none leaves it as it was, at first [`ModeWish::Auto`].
    pub wish: Option<ModeWish>,
    /// Idle timeout, ms, for bind and open; none leaves it as it was, at first [`SessionOptions::default_ttl_ms`].
    pub ttl_ms: Option<u64>,
    /// The worker decided on.
    pub worker: WorkerId,
    /// The rank decided on; with none the one that holds least is taken.
    pub rank: Option<u32>,
    /// What that worker can do.
    pub capabilities: Capabilities,
    /// What the turn's route can do.
    pub accepts: Accepts,
    /// What streaming sessions may hold on one rank of that worker.
    pub cap: StreamCap,
    /// Its place among those that wait for the session, once it [waits](Sessions::wait).
    pub ticket: Option<WaitTicket>,
    /// Now.
    pub now_ms: u64,
}

/// Answer to [`Sessions::begin`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "closes have to be sent"]
pub struct Begin {
    /// How the turn goes on.
    pub outcome: Outcome,
    /// Closes to send now.
    pub closes: Vec<EngineClose>,
}

/// How a turn goes on.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Send it without a session, to the worker decided on.
    Ordinary(NoSession),
    /// Send it as the lease says, and give the lease to [`Sessions::end`] whatever happens.
    Ready(Lease),
    /// Not now: [wait](Sessions::wait), and ask again when it is the first and something has changed.
    Busy(Busy),
}

/// Why a turn has no session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NoSession {
    /// There is none under its key, and it did not ask for one.
    Unknown,
    /// It ended the session.
    Released,
    /// The table is full of sessions that may not go.
    TableFull,
    /// The configuration names neither its pool nor its worker any more.
    PoolGone,
}

/// Why a turn has to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Busy {
    /// Another turn runs in its streaming session, or came before.
    Turn,
    /// The worker has not let go of the aborted turn before it.
    Abort,
    /// An earlier streaming session under this key is not closed yet.
    Close,
    /// Closes are under way that make room for its streaming session.
    Room,
}

/// Why a turn got less than its session asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Degraded {
    /// The worker cannot do it.
    Worker,
    /// The route cannot do it.
    Route,
    /// The worker's cap of streaming sessions is reached.
    Rows,
    /// The worker's cap of tokens held by streaming sessions is reached.
    Tokens,
    /// The worker did not open the engine session.
    OpenFailed,
}

/// Leave to run one turn of a session.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a lease that is not ended keeps its session busy for ever"]
pub struct Lease {
    /// The session.
    pub key: SessionKey,
    /// Number of this turn in its session, from 1.
    pub turn: u32,
    /// Send the turn to this worker,
    pub worker: WorkerId,
    /// and this rank, if any.
    pub rank: Option<u32>,
    /// What the session is for this turn. `Tag`: set `session_id`; `Stream`: set `session_params.id`; to `engine_id`.
    pub mode: SessionMode,
    /// The engine's id of the session; none with affinity.
    pub engine_id: Option<Arc<str>>,
    /// Open the engine session first, with this timeout in ms, and report to [`Sessions::opened`].
    pub open_timeout_ms: Option<u64>,
    /// The engine session that held the conversation so far is gone: a delta alone will not do.
    pub context_lost: bool,
    /// No turn was finished in its engine session yet: its context begins with this one.
    pub begins: bool,
    /// A turn before this one was cut, so that the engine session may lack it.
    pub turn_cut: bool,
    /// The session asks for more than this turn gets.
    pub degraded: Option<Degraded>,
    generation: u64,
    engine: Option<u64>,
}

/// How `/open_session` went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OpenResult {
    /// It is open.
    Opened,
    /// The worker refused; nothing is open.
    Refused,
    /// No answer: it may be open, so it is closed.
    Unknown,
}

/// How a turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TurnEnd {
    /// The worker finished it; with its usage, if told.
    Finished(Option<Usage>),
    /// It was cut while the worker had it: client gone, timeout, broken connection.
    Aborted,
    /// The worker ended it unfinished and has let go of it.
    Unfinished,
    /// The worker never ran it: no connection, refused, queue full.
    NotServed,
    /// The worker said that it does not know the engine session, or is closing it.
    EngineGone,
    /// The worker refused it, for it still has another turn of the engine session, which is over for us. The refusal has
    /// cleared the engine's mark of that turn: one more turn or a close now would end the server.
    StillBusy,
}

/// How a `/close_session` went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CloseResult {
    /// The worker took it.
    Closed,
    /// It did not arrive, or the worker failed: to be sent again.
    Failed,
    /// It was not sent for want of room among our side requests: to be sent soon.
    NoRoom,
    /// The worker refused it, and would do so again.
    Refused,
}

/// Tokens of a finished turn, as the worker reported them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Prompt, whole context.
    pub prompt_tokens: u64,
    /// Output.
    pub completion_tokens: u64,
    /// Part of the prompt that was cached.
    pub cached_tokens: u64,
}

/// A `/close_session` to send, once. How it went goes to [`Sessions::close_result`], which sees to another try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineClose {
    /// Where to.
    pub worker: WorkerId,
    /// The rank it lived on. (The engine takes a close on all ranks.)
    pub rank: Option<u32>,
    /// What to close.
    pub engine_id: Arc<str>,
    /// What it is.
    pub mode: SessionMode,
    /// Why.
    pub cause: CloseCause,
    /// Closes of it that failed before.
    pub tries: u8,
}

/// Why an engine session is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CloseCause {
    /// The client or a policy ended the session.
    Asked,
    /// Idle timeout.
    Expired,
    /// The session moved to another worker.
    Moved,
    /// Made room under a cap.
    Evicted,
    /// The worker drains or is lost.
    Worker,
    /// It may be open although nobody said so.
    OpenUnknown,
    /// The gateway ends.
    Shutdown,
    /// An earlier process left it open.
    Orphaned,
}

/// What a lost worker changed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use = "closes have to be sent"]
pub struct WorkerLoss {
    /// Sessions that are bound to no worker now.
    pub unbound: Vec<SessionKey>,
    /// Closes to try: the process may still live behind a broken path.
    pub closes: Vec<EngineClose>,
}

/// What streaming sessions hold in one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Held {
    /// Rows, including those of sessions whose close is not confirmed.
    pub rows: u32,
    /// Rows without a turn in flight.
    pub idle_rows: u32,
    /// KV tokens, as of the last turns.
    pub tokens: u64,
    /// Sessions of any mode that are bound there.
    pub sessions: u32,
}

// === impl ModeWish ===

impl ModeWish {
    /// The mode that an opened session gets, and why it is less than wished.
    pub fn resolve(self, capabilities: Capabilities, accepts: Accepts) -> (SessionMode, Option<Degraded>) {
        let stream = capabilities.stream && accepts.session_params;
        let tag = capabilities.tag && accepts.session_id;
        let short = |route: bool| Some(if route { Degraded::Worker } else { Degraded::Route });
        match self {
            Self::Affinity => (SessionMode::Affinity, None),
            Self::Auto | Self::Stream if stream => (SessionMode::Stream, None),
            Self::Auto | Self::Tag if tag => (SessionMode::Tag, None),
            Self::Auto => (SessionMode::Affinity, short(accepts.session_params || accepts.session_id)),
            Self::Stream => (SessionMode::Affinity, short(accepts.session_params)),
            Self::Tag => (SessionMode::Affinity, short(accepts.session_id)),
        }
    }
}

// === impl SessionOptions ===

impl SessionOptions {
    /// The timeout that the engine gets for a session with an idle timeout of ours.
    pub fn engine_timeout_ms(&self, ttl_ms: u64) -> u64 {
        ttl_ms.saturating_add(self.max_turn_ms).saturating_add(self.engine_timeout_margin_ms)
    }
}

impl Default for SessionOptions {
    fn default() -> Self {
        Self {
            max_sessions: 100_000,
            default_ttl_ms: 300_000,
            max_turn_ms: 600_000,
            engine_timeout_margin_ms: 30_000,
            evict_after_idle_ms: 30_000,
        }
    }
}

// === impl StreamCap ===

impl StreamCap {
    /// Shares (0 to 1) of one rank's rows and KV pool. A worker that does not tell its `max_running_requests` or its KV
    /// capacity gets none of it: with all rows held it would run nothing more.
    pub fn share_of(worker: &WorkerView, rows: f64, tokens: f64) -> Self {
        let ranks = f64::from(worker.capabilities.dp_size.max(1));
        // `as` saturates, and takes NaN for 0.
        Self {
            rows: (f64::from(worker.max_running) / ranks * rows.clamp(0.0, 1.0)) as u32,
            tokens: (worker.kv_capacity_tokens as f64 / ranks * tokens.clamp(0.0, 1.0)) as u64,
        }
    }
}

// === conversions from what the client sent ===

impl From<Route> for Accepts {
    fn from(route: Route) -> Self {
        Self { session_params: route.takes_session_params(), session_id: route.takes_session_id() }
    }
}

impl From<hints::SessionAction> for SessionAction {
    fn from(action: hints::SessionAction) -> Self {
        match action {
            hints::SessionAction::Bind => Self::Bind,
            hints::SessionAction::Open => Self::Open,
            hints::SessionAction::Close => Self::Close,
        }
    }
}

#[cfg(test)]
#[path = "session/state_tests.rs"]
mod state_tests;

#[cfg(test)]
#[path = "session/rule_tests.rs"]
mod rule_tests;

#[cfg(test)]
#[path = "session/schedule_tests.rs"]
mod schedule_tests;

#[cfg(test)]
#[path = "session/saved_tests.rs"]
mod saved_tests;
