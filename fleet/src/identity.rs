//! Who is asking: tenant, session, tree of sessions, agent.
//!
//! One ladder, from what was said outright to what can only be guessed: `nvext.session_control`, the `x-dynamo-*` headers,
//! the headers of the agent clients, configured session headers, and last the members of the body that name a tree but not
//! a session. Request ids, trace ids, install ids and `user` name no conversation and are never used.

use std::borrow::Cow;

use http::header::{AUTHORIZATION, HeaderName, USER_AGENT};
use http::{HeaderMap, HeaderValue};
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128_with_seed};

use crate::body::{Members, scan, text_of};
use crate::hints::{MAX_SESSION_ID_BYTES, SessionControl};
use crate::ids::{SessionKey, TenantId};
use crate::route::{Protocol, Route};

/// The tenant of requests without a credential.
pub const ANONYMOUS: TenantId = TenantId(0);

/// Session headers looked at after the known clients' own, in this order, unless configured otherwise. Each is sent by some
/// client or proxy with one value per conversation.
pub const DEFAULT_SESSION_HEADERS: [&str; 15] = [
    "x-session-affinity",
    "x-litellm-session-id",
    "x-task-id",
    "x-roo-task-id",
    "x-qwen-code-session-id",
    "x-opencode-session",
    "x-openclaw-session-key",
    "x-clawdbot-session-key",
    "x-moltbot-session-key",
    "x-agent-session",
    "agent-session-id",
    "x-grok-conv-id",
    "x-affinity",
    "helicone-session-id",
    "x-deepseek-harness-session-id",
];

/// How to hash credentials and ids, and which headers to read.
#[derive(Clone)]
pub struct IdentityOptions {
    /// Seed of the tenant and session hashes. Gateways that share sessions share it; nobody else knows it.
    pub seed: u64,
    /// Headers that name a session when no known client's do, in order.
    pub session_headers: Vec<HeaderName>,
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
    /// `x-dynamo-session-id`
    DynamoHeader,
    /// Claude Code's headers.
    ClaudeCode,
    /// Codex's headers.
    Codex,
    /// OpenCode's headers.
    OpenCode,
    /// A configured session header.
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
    /// The client says that this is the session's last turn (`x-dynamo-session-final`).
    pub session_final: bool,
    /// The kind of work, if said.
    pub request_class: Option<RequestClass>,
    /// How many identity headers had to be ignored: not text, or longer than [`MAX_SESSION_ID_BYTES`].
    pub malformed_headers: u32,
}

/// Names found on one rung of the ladder.
struct Found {
    session: Option<String>,
    tree: Option<String>,
    parent: Option<String>,
    source: IdentitySource,
    agent: Option<AgentKind>,
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
    let mut names = Names { headers, malformed: 0 };
    let mut found = explicit(&mut names, control)
        .or_else(|| dynamo(&mut names))
        .or_else(|| claude_code(&mut names))
        .or_else(|| codex(&mut names))
        .or_else(|| open_code(&mut names))
        .or_else(|| configured(&mut names, &options.session_headers))
        .or_else(|| codex_tree(&mut names))
        .unwrap_or(Found { session: None, tree: None, parent: None, source: IdentitySource::None, agent: None });
    if found.session.is_none() && found.tree.is_none() {
        from_body(route, members, &mut found);
    }
    if found.parent == found.session {
        found.parent = None;
    }
    let tree = found.tree.or_else(|| found.parent.clone()).or_else(|| found.session.clone());
    let keyed = |text: String| SessionId { key: session_key(options.seed, tenant, &text), text };
    Identity {
        tenant,
        session: found.session.map(keyed),
        tree: tree.map(keyed),
        parent: found.parent.map(keyed),
        agent: found.agent.unwrap_or_else(|| agent_of(headers)),
        source: found.source,
        session_final: headers
            .get("x-dynamo-session-final")
            .and_then(|v| v.to_str().ok())
            .is_some_and(|v| matches!(v.trim(), "1") || v.trim().eq_ignore_ascii_case("true")),
        request_class: request_class(headers),
        malformed_headers: names.malformed,
    }
}

/// The tenant of a request: a hash of its credential, [`ANONYMOUS`] without one. The same key is the same tenant whether it
/// comes as a bearer token or as `x-api-key`.
pub fn tenant_of(headers: &HeaderMap, seed: u64) -> TenantId {
    let credential = headers
        .get(AUTHORIZATION)
        .map(HeaderValue::as_bytes)
        .map(|value| match value.get(..7) {
            Some(scheme) if scheme.eq_ignore_ascii_case(b"bearer ") => value.get(7..).unwrap_or_default(),
            _ => value,
        })
        .or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes))
        .map(<[u8]>::trim_ascii)
        .filter(|credential| !credential.is_empty());
    match credential {
        // Zero is taken by those without a credential.
        Some(credential) => TenantId(xxh3_64_with_seed(credential, seed).max(1)),
        None => ANONYMOUS,
    }
}

/// The key of a session name within a tenant. Two tenants with the same name have different keys.
pub fn session_key(seed: u64, tenant: TenantId, text: &str) -> SessionKey {
    let mut scoped = Vec::with_capacity(8 + text.len());
    scoped.extend_from_slice(&tenant.0.to_le_bytes());
    scoped.extend_from_slice(text.as_bytes());
    SessionKey(xxh3_128_with_seed(&scoped, seed))
}

// === the rungs ===

fn explicit(names: &mut Names<'_>, control: &SessionControl) -> Option<Found> {
    let session = control.session_id.clone()?;
    let parent = names.get("x-dynamo-parent-session-id");
    Some(Found { session: Some(session), tree: None, parent, source: IdentitySource::Explicit, agent: None })
}

fn dynamo(names: &mut Names<'_>) -> Option<Found> {
    let session = names.get("x-dynamo-session-id")?;
    let parent = names.get("x-dynamo-parent-session-id");
    Some(Found {
        session: Some(session),
        tree: None,
        parent,
        source: IdentitySource::DynamoHeader,
        agent: Some(AgentKind::Dynamo),
    })
}

/// The session id is the root's and shared by its sub-agents; an agent id is only unique within it (team mates keep
/// theirs from run to run), so a sub-agent's session is named by both.
fn claude_code(names: &mut Names<'_>) -> Option<Found> {
    let root = names.get("x-claude-code-session-id");
    let agent = names.get("x-claude-code-agent-id");
    let scoped = |agent: String| match &root {
        Some(root) => format!("{root}/{agent}"),
        None => agent,
    };
    let (session, parent) = match agent {
        Some(agent) => {
            let parent = names.get("x-claude-code-parent-agent-id").map(scoped).or_else(|| root.clone());
            (scoped(agent), parent)
        }
        None => (root.clone()?, None),
    };
    Some(Found {
        session: Some(session),
        tree: root,
        parent,
        source: IdentitySource::ClaudeCode,
        agent: Some(AgentKind::ClaudeCode),
    })
}

/// The thread is the session; the session id is shared by a root thread and its children. Releases before threads sent one
/// id, with underscores.
fn codex(names: &mut Names<'_>) -> Option<Found> {
    let session = match names.get("thread-id") {
        Some(thread) => thread,
        None if names.headers.contains_key("originator") => {
            names.get("conversation_id").or_else(|| names.get("session_id"))?
        }
        None => return None,
    };
    Some(Found {
        session: Some(session),
        tree: names.get("session-id"),
        parent: names.get("x-codex-parent-thread-id"),
        source: IdentitySource::Codex,
        agent: Some(AgentKind::Codex),
    })
}

/// A session id without a thread: a root and its children share it, so it is no session.
fn codex_tree(names: &mut Names<'_>) -> Option<Found> {
    let tree = names.get("session-id")?;
    Some(Found { session: None, tree: Some(tree), parent: None, source: IdentitySource::Codex, agent: None })
}

fn open_code(names: &mut Names<'_>) -> Option<Found> {
    let session = names.get("x-session-id")?;
    let parent = names.get("x-parent-session-id");
    Some(Found { session: Some(session), tree: None, parent, source: IdentitySource::OpenCode, agent: None })
}

fn configured(names: &mut Names<'_>, list: &[HeaderName]) -> Option<Found> {
    let session = list.iter().find_map(|name| names.get(name.as_str()))?;
    Some(Found { session: Some(session), tree: None, parent: None, source: IdentitySource::Header, agent: None })
}

/// These name a conversation or a whole family of them, nobody can say which: good for keeping them near each other, not
/// for one-turn-at-a-time rules.
fn from_body(route: Route, members: &Members, found: &mut Found) {
    if let Some(key) = members.string("prompt_cache_key").filter(|key| is_usable(key)) {
        found.tree = Some(key.into_owned());
        found.source = IdentitySource::PromptCacheKey;
    } else if route.protocol() == Protocol::Anthropic
        && let Some((session, parent)) = metadata_session(members)
    {
        found.tree = Some(parent.unwrap_or(session));
        found.source = IdentitySource::Metadata;
    }
}

/// `metadata.user_id` of an Anthropic body: a JSON object in a string, or the older `user_…_session_ID`.
fn metadata_session(members: &Members) -> Option<(String, Option<String>)> {
    let metadata = scan(&members.value("metadata")?).ok()?;
    let user_id = metadata.string("user_id").filter(|id| id.len() <= 4096)?;
    if user_id.trim_start().starts_with('{') {
        let inner = scan(&bytes::Bytes::copy_from_slice(user_id.as_bytes())).ok()?;
        let id = |key: &str| inner.raw(key).and_then(text_of).filter(|id| is_usable(id)).map(Cow::into_owned);
        return id("session_id").map(|session| (session, id("parent_session_id")));
    }
    let (_, session) = user_id.rsplit_once("_session_")?;
    is_usable(session).then(|| (session.to_owned(), None))
}

fn is_usable(id: &str) -> bool {
    !id.trim().is_empty() && id.len() <= MAX_SESSION_ID_BYTES
}

/// Reads id headers: trimmed, empty ones absent, unreadable and overlong ones ignored and counted.
struct Names<'a> {
    headers: &'a HeaderMap,
    malformed: u32,
}

impl Names<'_> {
    fn get(&mut self, name: &str) -> Option<String> {
        let value = self.headers.get(name)?;
        match std::str::from_utf8(value.as_bytes()).map(str::trim) {
            Ok("") => None,
            Ok(text) if text.len() <= MAX_SESSION_ID_BYTES => Some(text.to_owned()),
            _ => {
                self.malformed = self.malformed.saturating_add(1);
                None
            }
        }
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
    /// The default headers with the given seed.
    pub fn new(seed: u64) -> Self {
        Self { seed, session_headers: DEFAULT_SESSION_HEADERS.into_iter().map(HeaderName::from_static).collect() }
    }
}

impl std::fmt::Debug for IdentityOptions {
    /// Without the seed.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IdentityOptions").field("session_headers", &self.session_headers).finish_non_exhaustive()
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
