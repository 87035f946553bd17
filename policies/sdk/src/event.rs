//! What a policy is told of an answer while it comes.

use serde::Deserialize;

use crate::Usage;

/// Something that happened in the answer to a turn. Given to [`Policy::on_event`](crate::Policy::on_event), of the kinds that
/// the plugin's option `events` names. `at_ms` counts from the arrival of the request.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A stream has brought its first token. Comes before everything else.
    FirstToken {
        /// When, ms.
        at_ms: u64,
    },
    /// A tool is called.
    ToolCall {
        /// When, ms.
        at_ms: u64,
        /// Place among the calls of the answer, from 0.
        number: u32,
        /// The tool's name.
        name: String,
    },
    /// Generation has ended.
    Finish {
        /// When, ms.
        at_ms: u64,
        /// Why, such as `stop`, `length` or `tool_calls`.
        reason: String,
    },
    /// The answer's tokens, once it has ended.
    Usage {
        /// When, ms.
        at_ms: u64,
        /// Token counts, as far as the worker told them.
        usage: Usage,
    },
    /// The turn has ended. Comes last.
    End {
        /// When, ms.
        at_ms: u64,
        /// How, as in the access log: `finished`, `client_gone`, `cut`, `timeout`, `refused` and others.
        outcome: String,
        /// HTTP status the client got.
        status: u16,
        /// Events that were not told because there were too many of their kind.
        left_out: u64,
    },
}

/// The members of all events. One flat table is a fraction of the code that reading a tagged enum takes, and every policy
/// carries it.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Members {
    event: String,
    at_ms: Option<u64>,
    number: Option<u32>,
    name: Option<String>,
    reason: Option<String>,
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    cached_tokens: Option<u64>,
    outcome: Option<String>,
    status: Option<u16>,
    left_out: Option<u64>,
}

// === impl Event ===

impl Event {
    /// The id of the host's function call that brings events.
    pub const FUNCTION: u32 = 1;

    /// An event as the host writes it. `None` for one that this version of the SDK does not know.
    pub fn read(json: &[u8]) -> Option<Event> {
        let members: Members = serde_json::from_slice(json).ok()?;
        let at_ms = members.at_ms?;
        Some(match members.event.as_str() {
            "first_token" => Event::FirstToken { at_ms },
            "tool_call" => Event::ToolCall { at_ms, number: members.number?, name: members.name? },
            "finish" => Event::Finish { at_ms, reason: members.reason? },
            "usage" => {
                let Members { prompt_tokens, completion_tokens, cached_tokens, .. } = members;
                Event::Usage { at_ms, usage: Usage { prompt_tokens, completion_tokens, cached_tokens } }
            }
            "end" => {
                Event::End { at_ms, outcome: members.outcome?, status: members.status?, left_out: members.left_out? }
            }
            _ => return None,
        })
    }
}

#[cfg(test)]
#[path = "event_tests.rs"]
mod tests;
