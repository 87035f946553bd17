//! The work of a replay: turns as the fleet code knows them, when they come, and what they wait for.

use super::blocks::Blocks;
use super::log::{Entry, Log, Notes, hex};
use super::prompts::{Prompts, lay_out};
use bytes::Bytes;
use hashbrown::HashMap;
use std::sync::Arc;
use turnstile_fleet::body::{Members, scan};
use turnstile_fleet::hints::{Hints, SessionAction as Asked, SessionControl, UnknownKeys};
use turnstile_fleet::identity::{AgentKind, Identity, IdentitySource, SessionId};
use turnstile_fleet::ids::{SessionKey, TenantId};
use turnstile_fleet::prefix::PrefixHashes;
use turnstile_fleet::route::Route;
use turnstile_fleet::session::SessionAction;
use turnstile_fleet::steering::Steered;
use turnstile_fleet::turn::Turn;

/// Names are few; what is not among them is taken for the last.
const AGENTS: [AgentKind; 9] = [
    AgentKind::Dynamo,
    AgentKind::ClaudeCode,
    AgentKind::Codex,
    AgentKind::OpenCode,
    AgentKind::QwenCode,
    AgentKind::Cline,
    AgentKind::RooCode,
    AgentKind::Aider,
    AgentKind::Other,
];
const SOURCES: [IdentitySource; 9] = [
    IdentitySource::Explicit,
    IdentitySource::DynamoHeader,
    IdentitySource::ClaudeCode,
    IdentitySource::Codex,
    IdentitySource::OpenCode,
    IdentitySource::Header,
    IdentitySource::PromptCacheKey,
    IdentitySource::Metadata,
    IdentitySource::None,
];

/// When a turn comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// So many µs after the first turn.
    At(u64),
    /// So many µs after the end of another turn, by its number.
    After(usize, u64),
}

/// How urgent a turn is said to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// A priority above 0, a strict tier or a latency sensitivity.
    Raised,
    /// None of them.
    Ordinary,
    /// A priority below 0.
    Lowered,
}

/// The turns of a log, in the order of their recorded arrival.
pub struct Workload {
    entries: Vec<Entry>,
    /// What is to be computed for each.
    pub prompts: Prompts,
    blocks: Blocks,
    arrivals: Vec<Arrival>,
    /// Whom a turn's times depend on: its tree, else its session, else nobody but itself.
    clusters: Vec<u32>,
    /// Unix ms of the first turn.
    pub first_ms: u64,
    /// What is worth knowing about the reading.
    pub notes: Notes,
    members: Members,
    /// As many zero bytes as the largest body has; nothing reads them.
    body: Bytes,
}

/// How recorded times are used.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// A turn comes so long after the turn before it as its client took in the recording.
    pub closed: bool,
    /// Arrivals and pauses are so many times as fast.
    pub speed: f64,
}

impl Workload {
    /// Makes the work of a log.
    ///
    /// # Errors
    /// There is nothing to be done.
    pub fn new(log: Log, timing: Timing) -> Result<Self, String> {
        let Log { entries, mut blocks, notes, .. } = log;
        let first_ms = entries.first().map(|entry| entry.line.ts).ok_or_else(|| nothing(&notes))?;
        let prompts = lay_out(&entries, &mut blocks);
        let arrivals = arrivals(&entries, first_ms, timing);
        let clusters = clusters(&entries);
        let longest = entries.iter().map(|entry| entry.line.body_bytes).max().unwrap_or_default();
        let members = scan(&Bytes::from_static(b"{}")).map_err(|e| e.message)?;
        // Zeroed pages that nobody touches cost nothing.
        let body = Bytes::from(vec![0; usize::try_from(longest).unwrap_or_default()]);
        Ok(Self { entries, prompts, blocks, arrivals, clusters, first_ms, notes, members, body })
    }

    /// How many turns there are.
    pub fn turns(&self) -> usize {
        self.entries.len()
    }

    /// When a turn comes.
    pub fn arrival(&self, turn: usize) -> Option<Arrival> {
        self.arrivals.get(turn).copied()
    }

    /// Turns that wait for another's end.
    pub fn following(&self) -> usize {
        self.arrivals.iter().filter(|arrival| matches!(arrival, Arrival::After(..))).count()
    }

    /// The recorded line of a turn.
    pub fn entry(&self, turn: usize) -> Option<&Entry> {
        self.entries.get(turn)
    }

    /// Whom a turn's times depend on.
    pub fn cluster(&self, turn: usize) -> u32 {
        self.clusters.get(turn).copied().unwrap_or_default()
    }

    /// From the first recorded arrival to the last, µs as recorded.
    pub fn span_us(&self) -> u64 {
        let last = self.entries.last().map_or(self.first_ms, |entry| entry.line.ts);
        (last - self.first_ms).saturating_mul(1000)
    }

    /// How urgent a turn is.
    pub fn urgency(&self, turn: usize) -> Urgency {
        let Some(Entry { line, .. }) = self.entry(turn) else { return Urgency::Ordinary };
        let priority = line.priority.unwrap_or(0);
        if priority > 0
            || line.strict_priority.unwrap_or(0) > 0
            || (line.priority.is_none() && line.latency_sensitivity.unwrap_or(0.0) > 0.0)
        {
            Urgency::Raised
        } else if priority < 0 {
            Urgency::Lowered
        } else {
            Urgency::Ordinary
        }
    }

    /// A turn as the fleet code knows it.
    ///
    /// # Errors
    /// The line's member that cannot be used.
    pub fn turn(&self, number: usize) -> Result<(Turn, SessionAction), String> {
        let (Some(Entry { line, .. }), Some(prompt)) = (self.entry(number), self.prompts.list.get(number)) else {
            return Err("there is no such turn".into());
        };
        let route = route_of(&line.route)?;
        let asked = line.action.as_deref().map(action_of).transpose()?;
        let session = line.session.as_deref().map(|text| session_id("session", text)).transpose()?;
        let tree = line.tree.as_deref().map(|text| session_id("tree", text)).transpose()?;
        let parent = line.parent.as_deref().map(|text| session_id("parent", text)).transpose()?;
        let tree = tree.or_else(|| session.clone());
        let blocks = self.blocks.chain(prompt.leaf);
        let affinity_hash = match (session.as_ref().or(tree.as_ref()), blocks.first(), &line.affinity) {
            (Some(named), _, _) => (named.key.0 as u64) ^ ((named.key.0 >> 64) as u64),
            (None, _, Some(text)) => hex("affinity", text)?,
            (None, Some(first), None) => *first,
            (None, None, None) => 0,
        };
        let named = |name: &str| AGENTS.into_iter().find(|agent| agent.name() == name).unwrap_or_default();
        let found = |name: &str| SOURCES.into_iter().find(|source| source.name() == name).unwrap_or_default();
        let body_bytes = usize::try_from(line.body_bytes).unwrap_or_default().min(self.body.len());
        let turn = Turn {
            route,
            model: line.model.clone(),
            stream: line.stream,
            n: line.n.unwrap_or(1),
            max_tokens: line.max_tokens,
            body: self.body.slice(..body_bytes),
            members: self.members.clone(),
            hints: Hints {
                priority: line.priority,
                strict_priority: line.strict_priority,
                osl: line.osl,
                speculative_prefill: line.speculative_prefill,
                latency_sensitivity: line.latency_sensitivity,
            },
            control: SessionControl {
                session_id: asked.and(line.session.clone()),
                action: asked,
                timeout_s: line.timeout_s,
            },
            identity: Identity {
                tenant: TenantId(hex("tenant", &line.tenant)?),
                session,
                tree,
                parent,
                agent: named(&line.agent),
                source: found(&line.source),
                session_final: false,
                request_class: None,
                malformed_headers: 0,
            },
            prefix: PrefixHashes {
                blocks,
                block_bytes: line.block_bytes as usize,
                bytes: usize::try_from(prompt.bytes).unwrap_or(usize::MAX),
                affinity_hash,
            },
            asked_usage: true,
            asked_cached_details: true,
            unknown_hint_keys: UnknownKeys::default(),
            malformed_headers: 0,
            steered: Steered::default(),
        };
        Ok((turn, asked.map_or(SessionAction::None, SessionAction::from)))
    }

    /// Checks that every turn can be made.
    ///
    /// # Errors
    /// Which cannot, and why.
    pub fn check(&self) -> Result<(), String> {
        for (number, entry) in self.entries.iter().enumerate() {
            self.turn(number).map_err(|why| format!("the turn recorded at {} ms: {why}", entry.line.ts))?;
        }
        Ok(())
    }
}

fn nothing(notes: &Notes) -> String {
    let out: Vec<String> = notes.left_out.iter().map(|(cause, turns)| format!("{turns} {cause}")).collect();
    let out = if out.is_empty() { String::new() } else { format!(" (left out: {})", out.join(", ")) };
    format!("there is no turn to replay in {} lines{out}", notes.lines)
}

/// The route of a name.
pub fn route_of(name: &str) -> Result<Route, String> {
    let route = Route::ALL.into_iter().find(|route| route.name() == name && route.generates());
    route.ok_or_else(|| format!("route: no route {name:?} that generates"))
}

fn action_of(name: &str) -> Result<Asked, String> {
    Asked::from_name(name).ok_or_else(|| format!("action: expected bind, open or close, found {name:?}"))
}

fn session_id(member: &str, text: &str) -> Result<SessionId, String> {
    let key = u128::from_str_radix(text, 16).ok().filter(|_| text.len() == 32);
    let key = key.ok_or_else(|| format!("{member}: expected 32 hexadecimal digits, found {text:?}"))?;
    Ok(SessionId { key: SessionKey(key), text: text.to_owned() })
}

fn arrivals(entries: &[Entry], first_ms: u64, timing: Timing) -> Vec<Arrival> {
    let scaled = |ms: f64| (ms * 1000.0 / timing.speed).max(0.0).round() as u64;
    let end_ms = |entry: &Entry| entry.line.ts as f64 + entry.line.total_ms;
    // The turn of each session that ended last, among those that ended before a given time: turns of a session are few, and
    // looked through from the last.
    let mut of_session: HashMap<&str, Vec<usize>> = HashMap::new();
    let mut children: HashMap<&str, Vec<usize>> = HashMap::new();
    let mut arrivals = Vec::with_capacity(entries.len());
    for (number, entry) in entries.iter().enumerate() {
        let open = Arrival::At(scaled((entry.line.ts - first_ms) as f64));
        let Some(session) = entry.line.session.as_deref().filter(|_| timing.closed) else {
            arrivals.push(open);
            continue;
        };
        let own = of_session.get(session).map(Vec::as_slice).unwrap_or_default();
        let parent = entry.line.parent.as_deref();
        // A first turn follows its parent's; a later one its session's and those of the sub-agents that it waited for.
        let more = match (own.is_empty(), parent) {
            (true, Some(parent)) => of_session.get(parent),
            (true, None) => None,
            (false, _) => children.get(session),
        };
        let candidates = own.iter().chain(more.map(Vec::as_slice).unwrap_or_default());
        let before = candidates
            .filter_map(|&other| entries.get(other).map(|entry| (other, end_ms(entry))))
            // Arrivals are recorded in whole ms: what came in the ms in which another ended may have followed it.
            .filter(|(_, end)| *end < entry.line.ts as f64 + 1.0)
            .max_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)));
        arrivals.push(match before {
            Some((other, end)) => Arrival::After(other, scaled(entry.line.ts as f64 - end)),
            None => open,
        });
        of_session.entry(session).or_default().push(number);
        if let Some(parent) = parent {
            children.entry(parent).or_default().push(number);
        }
    }
    arrivals
}

fn clusters(entries: &[Entry]) -> Vec<u32> {
    let mut names: HashMap<&str, u32> = HashMap::new();
    let mut next = 0_u32;
    let mut fresh = || {
        next += 1;
        next - 1
    };
    entries
        .iter()
        .map(|entry| match entry.line.tree.as_deref().or(entry.line.session.as_deref()) {
            Some(name) => *names.entry(name).or_insert_with(&mut fresh),
            None => fresh(),
        })
        .collect()
}

/// Shared by all policies of a replay.
pub type Shared = Arc<Workload>;

#[cfg(test)]
#[path = "workload_tests.rs"]
mod tests;
