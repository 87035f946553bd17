//! What a policy is told of an answer while it comes.

use serde::Deserialize;

use crate::Usage;

/// Something that happened in the answer to a turn. Given to [`Policy::on_event`](crate::Policy::on_event), of the kinds that
/// the plugin's option `events` names. `at_ms` counts from the arrival of the request.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
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
        #[serde(flatten)]
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

impl Event {
    /// The id of the host's function call that brings events.
    pub const FUNCTION: u32 = 1;

    /// An event as the host writes it. `None` for one that this version of the SDK does not know.
    pub fn read(json: &[u8]) -> Option<Event> {
        serde_json::from_slice(json).ok()
    }
}

#[cfg(test)]
#[path = "event_tests.rs"]
mod tests;
