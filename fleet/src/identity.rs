//! Who is asking: tenant, session, tree of sessions, agent.
//!
//! One ladder, from what was said outright to what can only be guessed: `nvext.session_control`, the header families of the
//! configuration in their order, headers of these that name a tree but not a session, and last the members of the body that
//! do so. Request ids, trace ids, install ids and `user` name no conversation and are never used.

use std::borrow::Cow;

use http::header::{AUTHORIZATION, HeaderName, USER_AGENT};
use http::{HeaderMap, HeaderValue};
use turnstile_config::{IdHeaders, Sessions};
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128_with_seed};

use crate::body::{Members, scan, text_of};
use crate::hints::SessionControl;
use crate::ids::{SessionKey, TenantId};
use crate::route::{Protocol, Route};

/// The tenant of requests without a credential.
pub const ANONYMOUS: TenantId = TenantId(0);

/// Longest `metadata.user_id` looked into, in bytes: two ids of the greatest length, and what is around them.
const MAX_USER_ID_BYTES: usize = 16 * 1024;

/// How to hash credentials and ids, and which headers to read.
#[derive(Clone)]
pub struct IdentityOptions {
    /// Seed of the tenant and session hashes. Gateways that share sessions share it; nobody else knows it.
    pub seed: u64,
    /// Longest session id, in bytes.
    pub id_max_bytes: usize,
    /// The header families, in order of precedence.
    families: Vec<Family>,
}

/// A configured family, ready for lookups.
#[derive(Clone, Debug)]
struct Family {
    session: HeaderName,
    agent: Option<HeaderName>,
    parent: Option<HeaderName>,
    tree: Option<HeaderName>,
    last: Option<HeaderName>,
    with: Option<HeaderName>,
    source: IdentitySource,
}

/// A session (or tree) as the client names it and as the gateway keys it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionId {
    /// The name with its tenant, hashed.
    pub key: SessionKey,
    /// The client's name.
    pub text: String,
}

/// The agent client, as far as its headers tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AgentKind {
    /// A client that speaks the `nvext` or `x-dynamo-*` forms.
    Dynamo,
    /// Claude Code.
    ClaudeCode,
    /// Codex CLI.
    Codex,
    /// OpenCode.
    OpenCode,
    /// Qwen Code.
    QwenCode,
    /// Cline.
    Cline,
    /// Roo Code.
    RooCode,
    /// Aider.
    Aider,
    /// Any other.
    #[default]
    Other,
}

/// Which rung of the ladder named the session or, failing that, the tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum IdentitySource {
    /// `nvext.session_control.session_id`
    Explicit,
    /// The family of `x-dynamo-session-id`.
    DynamoHeader,
    /// The family of Claude Code's session header.
    ClaudeCode,
    /// A family of Codex's thread or, in older releases, session header.
    Codex,
    /// The family of OpenCode's session header.
    OpenCode,
    /// Any other family.
    Header,
    /// `prompt_cache_key` in the body: a tree only.
    PromptCacheKey,
    /// `metadata.user_id` in an Anthropic body: a tree only.
    Metadata,
    /// Nothing named one; the prefix has to do.
    #[default]
    None,
}

/// What kind of work the client says the request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestClass {
    /// The conversation a person waits for.
    Main,
    /// A sub-agent's turn.
    Subagent,
    /// A step of a scripted workflow.
    Workflow,
    /// A summary that will replace the history.
    Compaction,
    /// Titles, memory and the like: nobody waits.
    Auxiliary,
}

/// Who is asking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The holder of the credential.
    pub tenant: TenantId,
    /// The conversation this turn belongs to.
    pub session: Option<SessionId>,
    /// The root session and its sub-agents together. Set whenever a session is.
    pub tree: Option<SessionId>,
    /// The session that started this one.
    pub parent: Option<SessionId>,
    /// The client.
    pub agent: AgentKind,
    /// What named the session or tree.
    pub source: IdentitySource,
    /// The client says that this is the session's last turn.
    pub session_final: bool,
    /// The kind of work, if said.
    pub request_class: Option<RequestClass>,
    /// How many identity headers had to be ignored: not text, or longer than [`IdentityOptions::id_max_bytes`].
    pub malformed_headers: u32,
}

/// Names found on one rung of the ladder.
#[derive(Default)]
struct Found {
    session: Option<String>,
    tree: Option<String>,
    parent: Option<String>,
    last: bool,
    source: IdentitySource,
}

/// Climbs the ladder for one request.
pub fn identify(
    route: Route,
    headers: &HeaderMap,
    members: &Members,
    control: &SessionControl,
    options: &IdentityOptions,
) -> Identity {
    let tenant = tenant_of(headers, options.seed);
    let mut names = Names { headers, max_bytes: options.id_max_bytes, malformed: 0 };
    let found = explicit(&mut names, &options.families, control)
        .or_else(|| options.families.iter().find_map(|family| family.session(&mut names)))
        .or_else(|| options.families.iter().find_map(|family| family.tree(&mut names)))
        .or_else(|| from_body(route, members, options.id_max_bytes))
        .unwrap_or_default();
    let parent = found.parent.filter(|parent| Some(parent) != found.session.as_ref());
    let tree = found.tree.or_else(|| parent.clone()).or_else(|| found.session.clone());
    let agent = found.session.as_ref().and_then(|_| found.source.agent()).unwrap_or_else(|| agent_of(headers));
    let keyed = |text: String| SessionId { key: session_key(options.seed, tenant, &text), text };
    Identity {
        tenant,
        session: found.session.map(keyed),
        tree: tree.map(keyed),
        parent: parent.map(keyed),
        agent,
        source: found.source,
        session_final: found.last,
        request_class: request_class(headers),
        malformed_headers: names.malformed,
    }
}

/// The tenant of a request: a hash of its credential, [`ANONYMOUS`] without one. The same key is the same tenant whether it
/// comes as a bearer token or as `x-api-key`.
pub fn tenant_of(headers: &HeaderMap, seed: u64) -> TenantId {
    match credential(headers) {
        // Zero is taken by those without a credential.
        Some(credential) => TenantId(xxh3_64_with_seed(credential, seed).max(1)),
        None => ANONYMOUS,
    }
}

/// The credential of a request: its bearer token, else its `x-api-key`.
pub fn credential(headers: &HeaderMap) -> Option<&[u8]> {
    headers
        .get(AUTHORIZATION)
        .map(HeaderValue::as_bytes)
        .map(|value| match value.get(..7) {
            Some(scheme) if scheme.eq_ignore_ascii_case(b"bearer ") => value.get(7..).unwrap_or_default(),
            _ => value,
        })
        .or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes))
        .map(<[u8]>::trim_ascii)
        .filter(|credential| !credential.is_empty())
}

/// The key of a session name within a tenant. Two tenants with the same name have different keys.
pub fn session_key(seed: u64, tenant: TenantId, text: &str) -> SessionKey {
    let mut scoped = Vec::with_capacity(8 + text.len());
    scoped.extend_from_slice(&tenant.0.to_le_bytes());
    scoped.extend_from_slice(text.as_bytes());
    SessionKey(xxh3_128_with_seed(&scoped, seed))
}

// === the rungs ===

/// The id in the body stands in for a session header. What else there is to say about the session comes in the headers of
/// whichever family the client also speaks; agent ids are left out, as they only mean something within their own session.
fn explicit(names: &mut Names<'_>, families: &[Family], control: &SessionControl) -> Option<Found> {
    let session = control.session_id.clone()?;
    let mut spoken = families.iter().filter(|family| family.agent.is_none() && family.counts(names.headers));
    let beside = spoken.find_map(|family| {
        let (parent, tree) = (names.any(&family.parent), names.any(&family.tree));
        let last = names.says_yes(&family.last);
        (parent.is_some() || tree.is_some() || last).then_some((parent, tree, last))
    });
    let (parent, tree, last) = beside.unwrap_or_default();
    Some(Found { session: Some(session), tree, parent, last, source: IdentitySource::Explicit })
}

/// These name a conversation or a whole family of them, nobody can say which: good for keeping them near each other, not
/// for one-turn-at-a-time rules.
fn from_body(route: Route, members: &Members, id_max_bytes: usize) -> Option<Found> {
    let key = members.string("prompt_cache_key").filter(|key| is_usable(key, id_max_bytes));
    let (tree, source) = if let Some(key) = key {
        (key.into_owned(), IdentitySource::PromptCacheKey)
    } else if route.protocol() == Protocol::Anthropic {
        let (session, parent) = metadata_session(members, id_max_bytes)?;
        (parent.unwrap_or(session), IdentitySource::Metadata)
    } else {
        return None;
    };
    Some(Found { tree: Some(tree), source, ..Found::default() })
}

/// `metadata.user_id` of an Anthropic body: a JSON object in a string, or the older `user_…_session_ID`.
fn metadata_session(members: &Members, id_max_bytes: usize) -> Option<(String, Option<String>)> {
    let metadata = scan(&members.value("metadata")?).ok()?;
    let user_id = metadata.string("user_id").filter(|id| id.len() <= MAX_USER_ID_BYTES)?;
    if user_id.trim_start().starts_with('{') {
        let inner = scan(&bytes::Bytes::copy_from_slice(user_id.as_bytes())).ok()?;
        let usable = |id: &Cow<'_, str>| is_usable(id, id_max_bytes);
        let id = |key: &str| inner.raw(key).and_then(text_of).filter(usable).map(Cow::into_owned);
        return id("session_id").map(|session| (session, id("parent_session_id")));
    }
    let (_, session) = user_id.rsplit_once("_session_")?;
    is_usable(session, id_max_bytes).then(|| (session.to_owned(), None))
}

fn is_usable(id: &str, id_max_bytes: usize) -> bool {
    !id.trim().is_empty() && id.len() <= id_max_bytes
}

/// Reads id headers: trimmed, empty ones absent, unreadable and overlong ones ignored and counted.
struct Names<'a> {
    headers: &'a HeaderMap,
    max_bytes: usize,
    malformed: u32,
}

impl Names<'_> {
    fn get(&mut self, name: &HeaderName) -> Option<String> {
        let value = self.headers.get(name)?;
        match std::str::from_utf8(value.as_bytes()).map(str::trim) {
            Ok("") => None,
            Ok(text) if text.len() <= self.max_bytes => Some(text.to_owned()),
            _ => {
                self.malformed = self.malformed.saturating_add(1);
                None
            }
        }
    }

    fn any(&mut self, name: &Option<HeaderName>) -> Option<String> {
        name.as_ref().and_then(|name| self.get(name))
    }

    fn says_yes(&self, name: &Option<HeaderName>) -> bool {
        let word = name.as_ref().and_then(|name| self.headers.get(name)).map(|v| v.as_bytes().trim_ascii());
        word.is_some_and(|word| word == b"1" || word.eq_ignore_ascii_case(b"true"))
    }
}

// === the agent and the class ===

fn agent_of(headers: &HeaderMap) -> AgentKind {
    let agent = headers.get(USER_AGENT).map(HeaderValue::as_bytes).unwrap_or_default();
    let begins = |name: &str| agent.get(..name.len()).is_some_and(|a| a.eq_ignore_ascii_case(name.as_bytes()));
    if begins("claude-cli") || begins("claude-code") {
        AgentKind::ClaudeCode
    } else if begins("codex") || headers.contains_key("x-codex-turn-metadata") {
        AgentKind::Codex
    } else if begins("opencode") || headers.contains_key("x-parent-session-id") {
        AgentKind::OpenCode
    } else if begins("qwencode") || headers.contains_key("x-qwen-code-session-id") {
        AgentKind::QwenCode
    } else if begins("roo") || headers.contains_key("x-roo-task-id") {
        AgentKind::RooCode
    } else if begins("cline") || headers.contains_key("x-task-id") {
        AgentKind::Cline
    } else if begins("aider") {
        AgentKind::Aider
    } else {
        AgentKind::Other
    }
}

fn request_class(headers: &HeaderMap) -> Option<RequestClass> {
    let word = |name: &str| headers.get(name).and_then(|v| v.to_str().ok()).map(str::trim);
    if let Some(class) = word("x-claude-code-request-class").and_then(RequestClass::from_name) {
        return Some(class);
    }
    match word("x-openai-subagent")? {
        "compact" => Some(RequestClass::Compaction),
        "memory_consolidation" => Some(RequestClass::Auxiliary),
        "" => None,
        _ => Some(RequestClass::Subagent),
    }
}

// === impl IdentityOptions ===

impl IdentityOptions {
    /// What the configuration says about session ids.
    pub fn from_config(sessions: &Sessions, seed: u64) -> Self {
        Self {
            seed,
            id_max_bytes: usize::try_from(sessions.id_max_bytes).unwrap_or(usize::MAX),
            families: sessions.id_headers.iter().filter_map(Family::new).collect(),
        }
    }

    /// The default configuration.
    pub fn new(seed: u64) -> Self {
        Self::from_config(&Sessions::default(), seed)
    }
}

impl std::fmt::Debug for IdentityOptions {
    /// Without the seed.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IdentityOptions")
            .field("id_max_bytes", &self.id_max_bytes)
            .field("families", &self.families)
            .finish_non_exhaustive()
    }
}

// === impl Family ===

impl Family {
    /// None when the session header's name cannot be one. The configuration has no such names.
    fn new(config: &IdHeaders) -> Option<Self> {
        let name = |name: &turnstile_config::HeaderName| HeaderName::from_bytes(name.as_str().as_bytes()).ok();
        let optional = |other: &Option<turnstile_config::HeaderName>| other.as_ref().and_then(name);
        Some(Self {
            session: name(&config.session)?,
            agent: optional(&config.agent),
            parent: optional(&config.parent),
            tree: optional(&config.tree),
            last: optional(&config.last),
            with: optional(&config.with),
            source: IdentitySource::of_family(config),
        })
    }

    fn counts(&self, headers: &HeaderMap) -> bool {
        self.with.as_ref().is_none_or(|with| headers.contains_key(with))
    }

    /// A session and what is said about it.
    fn session(&self, names: &mut Names<'_>) -> Option<Found> {
        if !self.counts(names.headers) {
            return None;
        }
        let named = names.get(&self.session);
        let (session, root, parent) = match (&self.agent, names.any(&self.agent)) {
            (None, _) => (named?, None, names.any(&self.parent)),
            (Some(_), None) => (named?, None, None),
            (Some(_), Some(agent)) => {
                // Agent ids are only unique within their session: team mates keep theirs from run to run.
                let within = |agent: String| match &named {
                    Some(root) => format!("{root}/{agent}"),
                    None => agent,
                };
                let parent = names.any(&self.parent).map(within).or_else(|| named.clone());
                (within(agent), named, parent)
            }
        };
        Some(Found {
            session: Some(session),
            tree: names.any(&self.tree).or(root),
            parent,
            last: names.says_yes(&self.last),
            source: self.source,
        })
    }

    /// The tree alone: its root and its children share the id, so it is no session.
    fn tree(&self, names: &mut Names<'_>) -> Option<Found> {
        let tree = self.tree.as_ref().filter(|_| self.counts(names.headers)).and_then(|tree| names.get(tree))?;
        Some(Found { tree: Some(tree), source: self.source, ..Found::default() })
    }
}

// === impl AgentKind ===

impl AgentKind {
    /// The name used in facts and as a metric label.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dynamo => "dynamo",
            Self::ClaudeCode => "claude-code",
            Self::Codex => "codex",
            Self::OpenCode => "opencode",
            Self::QwenCode => "qwen-code",
            Self::Cline => "cline",
            Self::RooCode => "roo-code",
            Self::Aider => "aider",
            Self::Other => "other",
        }
    }
}

// === impl IdentitySource ===

impl IdentitySource {
    /// The source that a family is, by its session header: few enough for a metric label whatever is configured.
    fn of_family(config: &IdHeaders) -> Self {
        match (config.session.as_str(), config.with.as_ref().map(|with| with.as_str())) {
            ("x-dynamo-session-id", _) => Self::DynamoHeader,
            ("x-claude-code-session-id", _) => Self::ClaudeCode,
            ("thread-id", _) | ("session_id" | "conversation_id", Some("originator")) => Self::Codex,
            ("x-session-id", _) => Self::OpenCode,
            _ => Self::Header,
        }
    }

    /// The client whose session could have no other source. The rest share their headers with others.
    fn agent(self) -> Option<AgentKind> {
        match self {
            Self::DynamoHeader => Some(AgentKind::Dynamo),
            Self::ClaudeCode => Some(AgentKind::ClaudeCode),
            Self::Codex => Some(AgentKind::Codex),
            _ => None,
        }
    }

    /// The name used in facts, logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Explicit => "nvext",
            Self::DynamoHeader => "dynamo-header",
            Self::ClaudeCode => "claude-code",
            Self::Codex => "codex",
            Self::OpenCode => "opencode",
            Self::Header => "header",
            Self::PromptCacheKey => "prompt-cache-key",
            Self::Metadata => "metadata",
            Self::None => "none",
        }
    }
}

// === impl RequestClass ===

impl RequestClass {
    /// The name used in facts, logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::Subagent => "subagent",
            Self::Workflow => "workflow",
            Self::Compaction => "compaction",
            Self::Auxiliary => "auxiliary",
        }
    }

    fn from_name(name: &str) -> Option<Self> {
        match name {
            "main" => Some(Self::Main),
            "subagent" => Some(Self::Subagent),
            "workflow" => Some(Self::Workflow),
            "compaction" => Some(Self::Compaction),
            "auxiliary" => Some(Self::Auxiliary),
            _ => None,
        }
    }
}

#[cfg(test)]
#[path = "identity_tests.rs"]
mod tests;
