//! What a policy may know about a turn. Each method is one read of the host, made when it is called; [`Turn::read_ahead`] makes
//! one read of several.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use crate::bulk::Ahead;
use crate::options::read_json;
use crate::{Counter, Host, SessionAction, SessionMode, Worker, WorkerName, WorkerState, Workers};

/// The turn being decided.
pub struct Turn<'h> {
    host: &'h dyn Host,
    table: OnceCell<Option<Workers>>,
    ahead: OnceCell<Option<Ahead>>,
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
        Turn { host, table: OnceCell::new(), ahead: OnceCell::new() }
    }

    /// Reads several facts by one call of the host, which costs about as much as reading one of them. The names are those of the
    /// documentation, without `turnstile.`: `request.priority`. The methods below then give these facts without another
    /// call. Once in a turn: later calls read nothing.
    pub fn read_ahead(&self, names: &'static [&'static str]) {
        self.ahead.get_or_init(|| Ahead::read(self.host, names));
    }

    /// Model asked for.
    pub fn model(&self) -> Option<String> {
        self.text("request.model")
    }

    /// Kind of route: `chat`, `completions`, `generate`, `responses`, `messages` and so on.
    pub fn route(&self) -> Option<String> {
        self.text("request.route")
    }

    /// Session id as the client wrote it.
    pub fn session_id(&self) -> Option<String> {
        self.text("request.session")
    }

    /// Root session of the agent tree.
    pub fn tree(&self) -> Option<String> {
        self.text("request.tree")
    }

    /// Session of the parent agent.
    pub fn parent(&self) -> Option<String> {
        self.text("request.parent")
    }

    /// Tenant, 16 hexadecimal digits derived from the caller's credential.
    pub fn tenant(&self) -> Option<String> {
        self.text("request.tenant")
    }

    /// The agent client, when it was recognised.
    pub fn agent(&self) -> Option<String> {
        self.text("request.agent")
    }

    /// The client's priority, signed; larger is more urgent.
    pub fn priority(&self) -> Option<i64> {
        self.number("request.priority")
    }

    /// The client's strict tier; higher goes first.
    pub fn strict_priority(&self) -> Option<u32> {
        self.number("request.strict_priority")
    }

    /// The client's latency sensitivity, in seconds of head start.
    pub fn latency_sensitivity(&self) -> Option<f64> {
        self.decimal("request.latency_sensitivity")
    }

    /// Output length the client expects, tokens.
    pub fn osl(&self) -> Option<u64> {
        self.number("request.osl")
    }

    /// Estimated prompt length, tokens.
    pub fn prompt_tokens(&self) -> Option<u64> {
        self.number("request.prompt_tokens")
    }

    /// Whether the answer streams.
    pub fn stream(&self) -> Option<bool> {
        self.flag("request.stream")
    }

    /// Whether the client asked for the next turn to be warmed.
    pub fn speculative_prefill(&self) -> Option<bool> {
        self.flag("request.speculative_prefill")
    }

    /// Number of this turn in its session, from 1.
    pub fn number_in_session(&self) -> Option<u64> {
        self.number("request.turn")
    }

    /// What the client asked for its session: `Bind`, `Open` or `Close`.
    pub fn action(&self) -> Option<SessionAction> {
        match self.text("request.action")?.as_str() {
            "bind" => Some(SessionAction::Bind),
            "open" => Some(SessionAction::Open),
            "close" => Some(SessionAction::Close),
            _ => None,
        }
    }

    /// Idle timeout the client asked for its session, seconds.
    pub fn timeout_s(&self) -> Option<f64> {
        self.decimal("request.timeout_s")
    }

    /// Seed that breaks ties between equal workers the same way on every gateway.
    pub fn affinity_hash(&self) -> Option<u64> {
        self.number("request.affinity_hash")
    }

    /// 0 at first, then the number of the retry.
    pub fn attempt(&self) -> u32 {
        self.number("attempt").unwrap_or(0)
    }

    /// Why the last attempt failed.
    pub fn last_error(&self) -> Option<String> {
        self.text("last_error")
    }

    /// The live session, in full. To learn one value of it, the methods below are cheaper.
    pub fn session(&self) -> Option<Session> {
        self.json("session")
    }

    /// Id of the worker that holds the turn's live session. `None` without a live session.
    pub fn session_worker(&self) -> Option<String> {
        self.text("session.worker")
    }

    /// Mode of the session: what an earlier plugin of the chain wrote, else that of the live one.
    pub fn session_mode(&self) -> Option<SessionMode> {
        SessionMode::from_text(&self.text("session.mode")?)
    }

    /// Time since the session's last turn ended, ms.
    pub fn session_idle_ms(&self) -> Option<u64> {
        self.number("session.idle_ms")
    }

    /// Tokens the session holds on its worker.
    pub fn session_held_tokens(&self) -> Option<u64> {
        self.number("session.held_tokens")
    }

    /// The candidates. Read once, then kept. `None` (and a warning in the log) when the table is missing or unreadable.
    pub fn workers(&self) -> Option<&Workers> {
        let read = || {
            let table = self.get("workers.table")?.into_owned();
            Workers::parse(table).map_err(|error| log::warn!("{error}")).ok()
        };
        self.table.get_or_init(read).as_ref()
    }

    /// The worker that holds the turn's session, if it is among the candidates: the one record, not the table.
    pub fn bound_worker(&self) -> Option<Worker> {
        let record = self.get("workers.bound")?.into_owned();
        Workers::parse(record).map_err(|error| log::warn!("{error}")).ok()?.bound()
    }

    /// The candidates with ids and labels, from JSON: some microseconds for each worker, where [`Turn::workers`] costs a
    /// fraction of one. Use it for what the table lacks.
    pub fn worker_facts(&self) -> Option<Vec<WorkerFacts>> {
        self.json("workers")
    }

    /// What the built-in rule would decide: the id of its worker.
    pub fn default_target(&self) -> Option<String> {
        #[derive(Deserialize)]
        struct Default {
            target: Option<String>,
        }
        self.json::<Default>("default")?.target
    }

    /// The worker that an earlier plugin of the chain chose.
    pub fn chosen_target(&self) -> Option<WorkerName> {
        self.text("route.target").map(|text| WorkerName::from_text(&text))
    }

    /// The workers that earlier plugins of the chain excluded.
    pub fn excluded(&self) -> Vec<WorkerName> {
        let Some(list) = self.text("route.exclude") else { return Vec::new() };
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

    fn get(&self, name: &'static str) -> Option<Cow<'_, [u8]>> {
        if let Some(Some(ahead)) = self.ahead.get()
            && let Some(value) = ahead.find(name)
        {
            return value.map(Cow::Borrowed);
        }
        let path: Vec<&str> = std::iter::once("turnstile").chain(name.split('.')).collect();
        self.host.get(&path).map(Cow::Owned)
    }

    fn text(&self, name: &'static str) -> Option<String> {
        String::from_utf8(self.get(name)?.into_owned()).ok()
    }

    fn number<N: std::str::FromStr>(&self, name: &'static str) -> Option<N> {
        std::str::from_utf8(&self.get(name)?).ok()?.parse().ok()
    }

    /// A finite number that may have a fraction. Read as a JSON value, whose reader is in every module already.
    fn decimal(&self, name: &'static str) -> Option<f64> {
        serde_json::from_slice::<Value>(&self.get(name)?).ok()?.as_f64()
    }

    fn flag(&self, name: &'static str) -> Option<bool> {
        self.number(name)
    }

    fn json<T: serde::de::DeserializeOwned>(&self, name: &'static str) -> Option<T> {
        read_json(&self.get(name)?).map_err(|error| log::warn!("turnstile.{name}: {error}")).ok()
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
        self.turn.json("usage")
    }

    /// Prompt tokens that came from the cache, as the worker reported.
    pub fn cached_tokens(&self) -> Option<u64> {
        self.turn.number("cached_tokens")
    }

    /// Time to first token, ms.
    pub fn ttft_ms(&self) -> Option<f64> {
        self.turn.decimal("ttft_ms")
    }

    /// Id of the worker that served the turn.
    pub fn worker(&self) -> Option<String> {
        self.turn.text("worker")
    }

    /// HTTP status the client got.
    pub fn status(&self) -> Option<u16> {
        self.turn.number("status")
    }

    /// Why generation ended, such as `stop`, `length` or `tool_calls`. `None` when it never ended by itself.
    pub fn finish_reason(&self) -> Option<String> {
        self.turn.text("finish_reason")
    }
}

#[cfg(test)]
#[path = "facts_tests.rs"]
mod tests;
