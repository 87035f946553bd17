//! What a policy may know about a turn. Each method is one read of the host, made when it is called.

use std::cell::OnceCell;
use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use crate::options::read_json;
use crate::{Counter, Host, SessionAction, SessionMode, Worker, WorkerName, WorkerState, Workers};

/// The turn being decided.
pub struct Turn<'h> {
    host: &'h dyn Host,
    table: OnceCell<Option<Workers>>,
}

/// The live session of a turn, from one read of `turnstile.session`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Session {
    /// Id of the worker that holds it.
    pub worker: Option<String>,
    /// Data-parallel rank on that worker.
    pub rank: Option<u32>,
    /// `affinity`, `tag` or `stream`.
    pub mode: Option<String>,
    /// Time since it was made, ms.
    pub age_ms: Option<u64>,
    /// Time since its last turn ended, ms.
    pub idle_ms: Option<u64>,
    /// Turns served so far.
    pub turns: Option<u64>,
    /// Tokens it holds on the worker.
    pub held_tokens: Option<u64>,
    /// Cached tokens the worker reported for the last turn.
    pub last_cached_tokens: Option<u64>,
    /// Whether the engine holds a session of ours.
    pub engine_open: Option<bool>,
}

/// A candidate from `turnstile.workers`: the names and labels that the table does not carry.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct WorkerFacts {
    /// Id in the configuration.
    pub id: String,
    /// Index, the one in the table.
    pub index: u32,
    /// `ready`, `draining`, `unhealthy` or `starting`.
    pub state: String,
    /// Labels from the configuration.
    pub labels: BTreeMap<String, String>,
    /// Whether another turn would queue there.
    pub at_limit: bool,
    /// Whether it holds the turn's session.
    pub bound: bool,
    /// Whether it is not to be used for this turn.
    pub excluded: bool,
}

/// Token counts of a finished turn.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Usage {
    /// Prompt tokens, cached ones included.
    pub prompt_tokens: Option<u64>,
    /// Tokens generated.
    pub completion_tokens: Option<u64>,
    /// Prompt tokens that came from the cache.
    pub cached_tokens: Option<u64>,
}

/// How a turn ended. Given to [`Policy::finished`](crate::Policy::finished).
pub struct Outcome<'h> {
    turn: Turn<'h>,
}

// === impl Turn ===

impl<'h> Turn<'h> {
    /// The turn that `host` is asking about.
    pub fn new(host: &'h dyn Host) -> Self {
        Turn { host, table: OnceCell::new() }
    }

    /// Model asked for.
    pub fn model(&self) -> Option<String> {
        self.text(&["turnstile", "request", "model"])
    }

    /// Kind of route: `chat`, `completions`, `generate`, `responses`, `messages` and so on.
    pub fn route(&self) -> Option<String> {
        self.text(&["turnstile", "request", "route"])
    }

    /// Session id as the client wrote it.
    pub fn session_id(&self) -> Option<String> {
        self.text(&["turnstile", "request", "session"])
    }

    /// Root session of the agent tree.
    pub fn tree(&self) -> Option<String> {
        self.text(&["turnstile", "request", "tree"])
    }

    /// Session of the parent agent.
    pub fn parent(&self) -> Option<String> {
        self.text(&["turnstile", "request", "parent"])
    }

    /// Tenant, 16 hexadecimal digits derived from the caller's credential.
    pub fn tenant(&self) -> Option<String> {
        self.text(&["turnstile", "request", "tenant"])
    }

    /// The agent client, when it was recognised.
    pub fn agent(&self) -> Option<String> {
        self.text(&["turnstile", "request", "agent"])
    }

    /// The client's priority, signed; larger is more urgent.
    pub fn priority(&self) -> Option<i64> {
        self.number(&["turnstile", "request", "priority"])
    }

    /// The client's strict tier; higher goes first.
    pub fn strict_priority(&self) -> Option<u32> {
        self.number(&["turnstile", "request", "strict_priority"])
    }

    /// The client's latency sensitivity, in seconds of head start.
    pub fn latency_sensitivity(&self) -> Option<f64> {
        self.decimal(&["turnstile", "request", "latency_sensitivity"])
    }

    /// Output length the client expects, tokens.
    pub fn osl(&self) -> Option<u64> {
        self.number(&["turnstile", "request", "osl"])
    }

    /// Estimated prompt length, tokens.
    pub fn prompt_tokens(&self) -> Option<u64> {
        self.number(&["turnstile", "request", "prompt_tokens"])
    }

    /// Whether the answer streams.
    pub fn stream(&self) -> Option<bool> {
        self.flag(&["turnstile", "request", "stream"])
    }

    /// Whether the client asked for the next turn to be warmed.
    pub fn speculative_prefill(&self) -> Option<bool> {
        self.flag(&["turnstile", "request", "speculative_prefill"])
    }

    /// Number of this turn in its session, from 1.
    pub fn number_in_session(&self) -> Option<u64> {
        self.number(&["turnstile", "request", "turn"])
    }

    /// What the client asked for its session: `Bind`, `Open` or `Close`.
    pub fn action(&self) -> Option<SessionAction> {
        match self.text(&["turnstile", "request", "action"])?.as_str() {
            "bind" => Some(SessionAction::Bind),
            "open" => Some(SessionAction::Open),
            "close" => Some(SessionAction::Close),
            _ => None,
        }
    }

    /// Idle timeout the client asked for its session, seconds.
    pub fn timeout_s(&self) -> Option<f64> {
        self.decimal(&["turnstile", "request", "timeout_s"])
    }

    /// Seed that breaks ties between equal workers the same way on every gateway.
    pub fn affinity_hash(&self) -> Option<u64> {
        self.number(&["turnstile", "request", "affinity_hash"])
    }

    /// 0 at first, then the number of the retry.
    pub fn attempt(&self) -> u32 {
        self.number(&["turnstile", "attempt"]).unwrap_or(0)
    }

    /// Why the last attempt failed.
    pub fn last_error(&self) -> Option<String> {
        self.text(&["turnstile", "last_error"])
    }

    /// The live session, in full. To learn one value of it, the methods below are cheaper.
    pub fn session(&self) -> Option<Session> {
        self.json(&["turnstile", "session"])
    }

    /// Id of the worker that holds the turn's live session. `None` without a live session.
    pub fn session_worker(&self) -> Option<String> {
        self.text(&["turnstile", "session", "worker"])
    }

    /// Mode of the session: what an earlier plugin of the chain wrote, else that of the live one.
    pub fn session_mode(&self) -> Option<SessionMode> {
        SessionMode::from_text(&self.text(&["turnstile", "session", "mode"])?)
    }

    /// Time since the session's last turn ended, ms.
    pub fn session_idle_ms(&self) -> Option<u64> {
        self.number(&["turnstile", "session", "idle_ms"])
    }

    /// Tokens the session holds on its worker.
    pub fn session_held_tokens(&self) -> Option<u64> {
        self.number(&["turnstile", "session", "held_tokens"])
    }

    /// The candidates. Read once, then kept. `None` (and a warning in the log) when the table is missing or unreadable.
    pub fn workers(&self) -> Option<&Workers> {
        let read = || {
            let table = self.host.get(&["turnstile", "workers", "table"])?;
            Workers::parse(table).map_err(|error| log::warn!("{error}")).ok()
        };
        self.table.get_or_init(read).as_ref()
    }

    /// The worker that holds the turn's session, from the table.
    pub fn bound_worker(&self) -> Option<Worker> {
        self.workers()?.bound()
    }

    /// The candidates with ids and labels, from JSON: some microseconds for each worker, where [`Turn::workers`] costs a
    /// fraction of one. Use it for what the table lacks.
    pub fn worker_facts(&self) -> Option<Vec<WorkerFacts>> {
        self.json(&["turnstile", "workers"])
    }

    /// What the built-in rule would decide: the id of its worker.
    pub fn default_target(&self) -> Option<String> {
        #[derive(Deserialize)]
        struct Default {
            target: Option<String>,
        }
        self.json::<Default>(&["turnstile", "default"])?.target
    }

    /// The worker that an earlier plugin of the chain chose.
    pub fn chosen_target(&self) -> Option<WorkerName> {
        self.text(&["turnstile", "route", "target"]).map(|text| WorkerName::from_text(&text))
    }

    /// The workers that earlier plugins of the chain excluded.
    pub fn excluded(&self) -> Vec<WorkerName> {
        let Some(list) = self.text(&["turnstile", "route", "exclude"]) else { return Vec::new() };
        list.split(',').map(str::trim).filter(|name| !name.is_empty()).map(WorkerName::from_text).collect()
    }

    /// A request header as the client, or an earlier filter, wrote it.
    pub fn header(&self, name: &str) -> Option<String> {
        self.host.header(name).and_then(|value| String::from_utf8(value).ok())
    }

    /// Any fact by its path below `turnstile.`, for those without a method here.
    pub fn fact(&self, path: &[&str]) -> Option<Vec<u8>> {
        let full: Vec<&str> = std::iter::once("turnstile").chain(path.iter().copied()).collect();
        self.host.get(&full)
    }

    /// Calls a function of the host, such as `turnstile.kv_get`.
    pub fn call(&self, function: &str, arguments: &[u8]) -> Option<Vec<u8>> {
        self.host.call(function, arguments)
    }

    /// Adds 1 to a counter.
    pub fn count(&self, counter: Counter) {
        self.host.count(counter, 1);
    }

    fn text(&self, path: &[&str]) -> Option<String> {
        String::from_utf8(self.host.get(path)?).ok()
    }

    fn number<N: std::str::FromStr>(&self, path: &[&str]) -> Option<N> {
        let value = self.host.get(path)?;
        std::str::from_utf8(&value).ok()?.parse().ok()
    }

    /// A finite number that may have a fraction. Read as a JSON value, whose reader is in every module already.
    fn decimal(&self, path: &[&str]) -> Option<f64> {
        serde_json::from_slice::<Value>(&self.host.get(path)?).ok()?.as_f64()
    }

    fn flag(&self, path: &[&str]) -> Option<bool> {
        self.number(path)
    }

    fn json<T: serde::de::DeserializeOwned>(&self, path: &[&str]) -> Option<T> {
        let value = self.host.get(path)?;
        read_json(&value).map_err(|error| log::warn!("{}: {error}", path.join("."))).ok()
    }
}

// === impl WorkerFacts ===

impl WorkerFacts {
    /// [`WorkerFacts::state`] as a value; what is not known is read as starting.
    pub fn worker_state(&self) -> WorkerState {
        match self.state.as_str() {
            "ready" => WorkerState::Ready,
            "draining" => WorkerState::Draining,
            "unhealthy" => WorkerState::Unhealthy,
            _ => WorkerState::Starting,
        }
    }
}

// === impl Outcome ===

impl<'h> Outcome<'h> {
    /// The end of the turn that `host` is asking about.
    pub fn new(host: &'h dyn Host) -> Self {
        Outcome { turn: Turn::new(host) }
    }

    /// The turn itself: its request facts are still readable.
    pub fn turn(&self) -> &Turn<'h> {
        &self.turn
    }

    /// Token counts. `None` when the worker reported none.
    pub fn usage(&self) -> Option<Usage> {
        self.turn.json(&["turnstile", "usage"])
    }

    /// Prompt tokens that came from the cache, as the worker reported.
    pub fn cached_tokens(&self) -> Option<u64> {
        self.turn.number(&["turnstile", "cached_tokens"])
    }

    /// Time to first token, ms.
    pub fn ttft_ms(&self) -> Option<f64> {
        self.turn.decimal(&["turnstile", "ttft_ms"])
    }

    /// Id of the worker that served the turn.
    pub fn worker(&self) -> Option<String> {
        self.turn.text(&["turnstile", "worker"])
    }

    /// HTTP status the client got.
    pub fn status(&self) -> Option<u16> {
        self.turn.number(&["turnstile", "status"])
    }

    /// Why generation ended, such as `stop`, `length` or `tool_calls`. `None` when it never ended by itself.
    pub fn finish_reason(&self) -> Option<String> {
        self.turn.text(&["turnstile", "finish_reason"])
    }
}

#[cfg(test)]
#[path = "facts_tests.rs"]
mod tests;
