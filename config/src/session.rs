//! Agent sessions.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::HeaderName;

/// Agent sessions: their identity, their life, what they may hold on a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Sessions {
    /// Seconds a session lives after the end of its last turn, when the client names no timeout.
    #[schemars(range(min = 1, max = 2_592_000))]
    pub default_timeout_s: u64,
    /// Longest timeout in seconds that a client can ask for; longer ones are cut to it.
    #[schemars(range(min = 1, max = 2_592_000))]
    pub max_timeout_s: u64,
    /// Sessions known at a time; the longest idle goes first.
    #[schemars(range(min = 1, max = 100_000_000))]
    pub max_sessions: u64,
    /// Longest session id in bytes. A longer one in the body (`nvext`) is answered 400, in a header it is ignored and
    /// counted.
    #[schemars(range(min = 16, max = 4096))]
    pub id_max_bytes: u64,
    /// Use streaming sessions on workers that have them (`--enable-streaming-session`) when a client opens a session on
    /// `/generate`. Off: such sessions get affinity only.
    pub stream: bool,
    /// Use radix-cache tags on workers that have them (`--enable-session-radix-cache`): a session's KV cache is
    /// protected until the session ends. Off: such sessions get affinity only.
    pub tag: bool,
    /// Share of a worker's `max_running_requests` that streaming sessions may hold. Each holds a row even while idle,
    /// and a worker whose rows are all held runs nothing more.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub stream_rows_fraction: f64,
    /// Share of a worker's KV cache that streaming sessions may hold. The worker cannot evict what they hold.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub stream_tokens_fraction: f64,
    /// What a second turn of a streaming session meets while one is running.
    pub busy: Busy,
    /// Milliseconds that such a turn waits before it is refused, with `busy = "wait"`; with both, that a turn waits for the
    /// worker to let go of a turn that was cut, or for an earlier session to be closed.
    #[schemars(range(min = 0, max = 3_600_000))]
    pub busy_wait_ms: u64,
    /// Seconds by which the timeout given to a worker is longer than ours, so that we close a session and not the
    /// worker under our feet. The worker counts from the start of a turn, we count from its end.
    #[schemars(range(min = 1, max = 86_400))]
    pub engine_timeout_margin_s: u64,
    /// Request headers that carry a session id, first match wins; each a header name or a table. Session ids in the body
    /// (`nvext`) come before them; parent, tree and last turn are then those of the first family without `agent` that has
    /// one of these headers. Giving the list replaces the defaults.
    pub id_headers: Vec<IdHeaders>,
}

/// What a second turn of a streaming session meets while one is running. (The engine takes one at a time, and can crash
/// on a second.)
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Busy {
    /// It waits up to `busy_wait_ms`, in order of arrival.
    Wait,
    /// It is answered 409, after a tenth of a second in which the running turn may turn out to have lost its client.
    Refuse,
}

/// The headers by which one family of clients names its sessions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Form")]
pub struct IdHeaders {
    /// Header with the session id; the family is matched when it, or `agent`, is there.
    pub session: HeaderName,
    /// Header with the id of a sub-agent, unique within the session of `session`. When it is there, both together name the
    /// session (`SESSION/AGENT`); the value of `session` is then the root of its tree, and its parent unless `parent` says
    /// another.
    pub agent: Option<HeaderName>,
    /// Header with the id of the parent session. In a family with `agent`: of the parent agent, looked at beside `agent` only.
    pub parent: Option<HeaderName>,
    /// Header with the id of the root of the tree. When no family is matched, it keeps the tree together without naming
    /// a session.
    pub tree: Option<HeaderName>,
    /// Header that is `true` or `1` on the last turn of a session.
    pub last: Option<HeaderName>,
    /// Header that must be there too, with any value: for ids in headers that mean something else elsewhere.
    pub with: Option<HeaderName>,
}

/// The forms that a family has in a file.
#[derive(Deserialize)]
#[serde(untagged)]
enum Form {
    Session(HeaderName),
    Table(IdHeadersTable),
}

/// A family with more than one header.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct IdHeadersTable {
    /// Header with the session id; the family is matched when it, or `agent`, is there.
    session: HeaderName,
    /// Header with the id of a sub-agent, unique within the session of `session`. When it is there, both together name the
    /// session (`SESSION/AGENT`); the value of `session` is then the root of its tree, and its parent unless `parent` says
    /// another.
    agent: Option<HeaderName>,
    /// Header with the id of the parent session. In a family with `agent`: of the parent agent, looked at beside `agent` only.
    parent: Option<HeaderName>,
    /// Header with the id of the root of the tree. When no family is matched, it keeps the tree together without naming
    /// a session.
    tree: Option<HeaderName>,
    /// Header that is `true` or `1` on the last turn of a session.
    last: Option<HeaderName>,
    /// Header that must be there too, with any value: for ids in headers that mean something else elsewhere.
    with: Option<HeaderName>,
}

// === impl Sessions ===

impl Default for Sessions {
    fn default() -> Self {
        Self {
            default_timeout_s: 300,
            max_timeout_s: 86_400,
            max_sessions: 100_000,
            id_max_bytes: 256,
            stream: true,
            tag: true,
            stream_rows_fraction: 0.5,
            stream_tokens_fraction: 0.5,
            busy: Busy::Wait,
            busy_wait_ms: 30_000,
            engine_timeout_margin_s: 30,
            id_headers: IdHeaders::known_clients(),
        }
    }
}

// === impl Busy ===

impl Busy {
    /// The name in TOML.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Wait => "wait",
            Self::Refuse => "refuse",
        }
    }
}

// === impl IdHeaders ===

/// Headers of clients and proxies that name a session and nothing else, in order of precedence.
const PLAIN_SESSION_HEADERS: [&str; 15] = [
    "x-session-affinity",
    "x-litellm-session-id",
    "x-task-id",     // Cline
    "x-roo-task-id", // Roo Code
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

impl IdHeaders {
    /// A family with a session header only.
    pub fn session(session: HeaderName) -> Self {
        Self { session, agent: None, parent: None, tree: None, last: None, with: None }
    }

    /// The families of the clients we know, in order of precedence: Dynamo's own, Claude Code, Codex, OpenCode, others.
    pub fn known_clients() -> Vec<Self> {
        let name = HeaderName::fixed;
        let mut families = vec![
            Self {
                parent: Some(name("x-dynamo-parent-session-id")),
                last: Some(name("x-dynamo-session-final")),
                ..Self::session(name("x-dynamo-session-id"))
            },
            Self {
                agent: Some(name("x-claude-code-agent-id")),
                parent: Some(name("x-claude-code-parent-agent-id")),
                ..Self::session(name("x-claude-code-session-id"))
            },
            // Codex shares its session id among the threads of a tree: the thread is what has a conversation, and a session
            // id without a thread names the tree only.
            Self {
                parent: Some(name("x-codex-parent-thread-id")),
                tree: Some(name("session-id")),
                ..Self::session(name("thread-id"))
            },
            Self { parent: Some(name("x-parent-session-id")), ..Self::session(name("x-session-id")) },
            // Codex before it had threads, and clients made after it.
            Self { with: Some(name("originator")), ..Self::session(name("conversation_id")) },
            Self { with: Some(name("originator")), ..Self::session(name("session_id")) },
        ];
        families.extend(PLAIN_SESSION_HEADERS.into_iter().map(|header| Self::session(name(header))));
        families
    }
}

impl From<Form> for IdHeaders {
    fn from(form: Form) -> Self {
        match form {
            Form::Session(session) => Self::session(session),
            Form::Table(table) => Self {
                session: table.session,
                agent: table.agent,
                parent: table.parent,
                tree: table.tree,
                last: table.last,
                with: table.with,
            },
        }
    }
}

impl JsonSchema for IdHeaders {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "IdHeaders".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "anyOf": [generator.subschema_for::<HeaderName>(), generator.subschema_for::<IdHeadersTable>()],
        })
    }
}
