//! What goes into the engine and what comes out.

use crate::{output::Script, tokenizer::TokenId};

/// Number of a request in its engine, unique for the engine's life.
pub type RequestKey = u64;

/// `session_params` of a native request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionParams {
    /// The session.
    pub id: String,
    /// The earlier turn to go on from (non-streaming sessions).
    pub rid: Option<String>,
    /// Tokens of the earlier turn to keep.
    pub offset: Option<i64>,
    /// Do the earlier turn again, without what followed it.
    pub replace: bool,
    /// Leave the earlier turn's output out.
    pub drop_previous_output: bool,
}

/// One request for one output.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The id the server gave or took over.
    pub rid: String,
    /// Prompt tokens; inside a session, only the new ones.
    pub prompt: Vec<TokenId>,
    /// Larger is sooner; none is the least.
    pub priority: Option<i64>,
    /// Most output tokens; none is up to the context's end.
    pub max_new_tokens: Option<usize>,
    /// Go on until `max_new_tokens`.
    pub ignore_eos: bool,
    /// Stop strings.
    pub stop: Vec<String>,
    /// Directives.
    pub script: Script,
    /// The exact output, whatever the script says; it ends by itself with the last token.
    pub output: Option<Vec<TokenId>>,
    /// Hash of `cache_salt` and `extra_key`: KV is shared only within one namespace.
    pub namespace: u64,
    /// Top-level `session_id`.
    pub tag: Option<String>,
    /// `session_params`.
    pub session: Option<SessionParams>,
}

/// Why an output ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The end marker (its id).
    StopToken(TokenId),
    /// A stop string.
    StopText(String),
    /// This many tokens were asked for.
    Length(usize),
    /// Given up while running, with the tokens so far.
    Aborted,
    /// Given up before it ran.
    AbortedInQueue,
    /// Refused by the scheduler before it ran: status and text.
    Rejected(u16, String),
    /// Refused with its session; such a request passes through the queue and computes one meaningless token.
    Refused(String),
}

/// The sums of an output that ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// Why.
    pub reason: Reason,
    /// Prompt tokens, the session's history included.
    pub prompt_tokens: usize,
    /// Of these, not computed anew.
    pub cached_tokens: usize,
    /// Output tokens.
    pub completion_tokens: usize,
    /// Of these, reasoning.
    pub reasoning_tokens: usize,
    /// How often it was put back into the queue.
    pub retractions: usize,
}

impl Finish {
    /// The end of a request that was not taken.
    pub fn rejected(status: u16, message: &str) -> Self {
        Self {
            reason: Reason::Rejected(status, message.to_owned()),
            prompt_tokens: 0,
            cached_tokens: 0,
            completion_tokens: 0,
            reasoning_tokens: 0,
            retractions: 0,
        }
    }
}

/// What happened to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// Its prompt is computed.
    Started {
        /// Prompt tokens, the session's history included.
        prompt_tokens: usize,
        /// Of these, not computed anew.
        cached_tokens: usize,
    },
    /// One output token.
    Token {
        /// The token.
        id: TokenId,
        /// True when the end follows at once.
        last: bool,
    },
    /// It ended; nothing follows.
    Finished(Finish),
}

/// One event, in the order of time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Whose.
    pub key: RequestKey,
    /// When, in engine microseconds.
    pub at_us: u64,
    /// What.
    pub kind: EventKind,
}

/// The engine's load as `/v1/loads` tells it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Load {
    /// Requests in the batch.
    pub running: usize,
    /// Requests in the queue.
    pub waiting: usize,
    /// Prompt tokens of the queue that were not cached when they came.
    pub waiting_uncached_tokens: usize,
    /// KV that cannot be dropped: running requests and streaming sessions.
    pub used_tokens: usize,
    /// Output tokens per second over the last decode steps; 0 when idle.
    pub gen_throughput: f64,
    /// Cached share of the last prefill batch.
    pub cache_hit_rate: f64,
    /// Prompt tokens computed since the start.
    pub prefill_uncached_tokens: u64,
    /// Time spent on that, in microseconds.
    pub prefill_busy_us: u64,
    /// Sums over decode steps: steps, batch sizes, microseconds, squared sizes, sizes times microseconds, tokens.
    pub decode_moments: [f64; 6],
}

/// What a batch leaves in the gauges of `/metrics`, where it stays until the next one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Logged {
    /// The load at that moment.
    pub load: Load,
    /// Open streaming sessions.
    pub sessions: usize,
    /// Tokens of KV that they hold between turns.
    pub held_tokens: usize,
}
