//! The access and decision log's record of one request.

use crate::policy::{Difference, Ended};
use serde::Serialize;
use std::sync::Arc;

/// Room for most lines.
const LINE_ROOM: usize = 1536;

/// One line of the log. Nothing of a prompt or an answer is in it.
#[derive(Debug, Default, Serialize)]
pub struct Record {
    /// Wall clock at arrival, Unix ms.
    pub ts: u64,
    /// `x-request-id`.
    pub request_id: String,
    /// The engine's id of the attempt that served it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rid: Option<String>,
    /// Generation that served it.
    pub generation: u64,
    /// Route name.
    pub route: &'static str,
    /// Pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<Arc<str>>,
    /// Model asked for, at most 128 bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// A stream was asked for.
    pub stream: bool,
    /// Tenant hash.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Session key (hash).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// Tree key (hash).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tree: Option<String>,
    /// The agent client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<&'static str>,
    /// What named the session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub identity: Option<&'static str>,
    /// What the turn asked of its session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub action: Option<&'static str>,
    /// What its session was for this turn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_mode: Option<&'static str>,
    /// Number of the turn in its session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub turn: Option<u32>,
    /// Why it got less of a session than asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session_note: Option<String>,
    /// Bytes of the body.
    pub body_bytes: usize,
    /// Estimated prompt tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_estimate: Option<u64>,
    /// Priority hint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i64>,
    /// Priority sent to the worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub engine_priority: Option<i64>,
    /// Milliseconds in the queue.
    pub queue_ms: u64,
    /// Milliseconds spent waiting for the session.
    pub session_wait_ms: u64,
    /// The worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker: Option<Arc<str>>,
    /// Data-parallel rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// Why this worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What came of the host that a plugin of Higress' dialect wanted: followed, unknown, unavailable, barred.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wanted: Option<&'static str>,
    /// Candidates with their cost in ms.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub candidates: Vec<(Arc<str>, Option<f64>)>,
    /// Policies that failed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub failed_policies: Vec<Arc<str>>,
    /// Canaries that decided.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub canaries: Vec<Arc<str>>,
    /// What shadows would have done differently.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub shadows: Vec<Difference>,
    /// Attempts made.
    pub attempts: u32,
    /// What went wrong on the way, attempt by attempt.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub faults: Vec<String>,
    /// Predicted cached tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_cached: Option<u64>,
    /// Reported cached tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u64>,
    /// Reported prompt tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u64>,
    /// Reported completion tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens: Option<u64>,
    /// Why generation ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finish_reason: Option<String>,
    /// Tools called.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<String>,
    /// Events that plugins asked for and were not told, because there were too many of a kind.
    #[serde(skip_serializing_if = "is_none")]
    pub left_out_events: u64,
    /// Milliseconds to the first event, queue included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<f64>,
    /// Milliseconds in all.
    pub total_ms: f64,
    /// Status the client got; 499 when it left first.
    pub status: u16,
    /// How the exchange ended: finished, refused, cut, client_gone, timeout, plugin_answer, plugin_close, plugin_end,
    /// plugin_failed, worker_error, shutdown.
    pub end: &'static str,
    /// Our error code, when the answer was ours.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<&'static str>,
    /// What became of the speculative prefill: sent, or why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill: Option<&'static str>,
    /// Notes of policies (`log.NAME`).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<(String, String)>,
    /// Events of policies (`turnstile.emit`), JSON texts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<String>,
}

#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_none(number: &u64) -> bool {
    *number == 0
}

impl Record {
    /// How it ended, for plugins, as of now: `at_ms` after its arrival.
    pub fn ended(&self, at_ms: u64) -> Ended<'_> {
        Ended {
            at_ms,
            prompt_tokens: self.prompt_tokens,
            completion_tokens: self.completion_tokens,
            cached_tokens: self.cached_tokens,
            outcome: self.end,
            status: self.status,
            left_out: self.left_out_events,
        }
    }

    /// The line.
    pub fn line(&self) -> Vec<u8> {
        let mut line = Vec::with_capacity(LINE_ROOM);
        // Nothing in a record fails to be written.
        let _ = serde_json::to_writer(&mut line, self);
        line
    }
}
