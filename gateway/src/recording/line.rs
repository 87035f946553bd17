//! The lines of a recording. Members that are absent are unknown, or have the value that is usual.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version of the lines. Members may be added without a new one; a reader refuses any other.
pub const VERSION: u32 = 1;

/// What every line begins with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// [`VERSION`].
    pub v: u32,
    /// `turn`, `fleet`, `lost`, or `cut`: the line before this one was cut when a gateway died. A reader passes over kinds
    /// that it does not know.
    pub kind: String,
}

/// A turn that has ended.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TurnLine {
    /// Arrival, Unix ms.
    pub ts: u64,
    /// Pool.
    pub pool: String,
    /// Model asked for, where the pool names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Route.
    pub route: String,
    /// A stream was asked for.
    pub stream: bool,
    /// Answers asked for, if more than one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub n: Option<u32>,
    /// Tenant: 16 hexadecimal digits.
    pub tenant: String,
    /// Session key: 32 hexadecimal digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// Key of the tree's root session, if it is another.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tree: Option<String>,
    /// Key of the session that started this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// Number in its session, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub turn: Option<u32>,
    /// The agent client.
    pub agent: String,
    /// What named the session.
    pub source: String,
    /// What it asked of its session: `bind`, `open`, `close`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub action: Option<String>,
    /// Idle timeout asked for, seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_s: Option<f64>,
    /// Hint: priority, signed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// Hint: strict tier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strict_priority: Option<u32>,
    /// Hint: head start, seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_sensitivity: Option<f64>,
    /// Hint: expected output, tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub osl: Option<u32>,
    /// Most output tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u64>,
    /// Hint: the next turn is to be warmed.
    #[serde(skip_serializing_if = "is_false")]
    pub speculative_prefill: bool,
    /// Bytes of the body.
    pub body_bytes: u64,
    /// Bytes of the prompt in it.
    pub prompt_bytes: u64,
    /// Bytes of a block.
    pub block_bytes: u32,
    /// What ties are broken by, where neither session, tree nor first block says it: 16 hexadecimal digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub affinity: Option<String>,
    /// Hash of the last block of the longest prefix that an earlier line of the file has: 16 hexadecimal digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// Blocks up to it.
    #[serde(skip_serializing_if = "is_zero")]
    pub base_blocks: u64,
    /// The hashes of the blocks behind it: base64 without padding of 8 bytes each, little-endian.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub blocks: String,
    /// Prompt tokens, as the worker reported; in a streaming session those of the whole context.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<u64>,
    /// Of these, cached.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u64>,
    /// Output tokens, as the worker reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens: Option<u64>,
    /// The worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker: Option<String>,
    /// Why this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Cached tokens that were expected there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_cached: Option<u64>,
    /// What its session was for this turn: `affinity`, `tag`, `stream`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// In the queue, ms.
    pub queue_ms: u64,
    /// Waiting for its session, ms.
    #[serde(skip_serializing_if = "is_zero")]
    pub session_wait_ms: u64,
    /// From arrival to the first event, ms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttft_ms: Option<f64>,
    /// From arrival to the end, ms.
    pub total_ms: f64,
    /// Attempts made.
    pub attempts: u32,
    /// Status that the client got; 499 when it left first.
    pub status: u16,
    /// How it ended, as in the access log.
    pub end: String,
    /// Why generation ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finish_reason: Option<String>,
    /// The gateway's error code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The workers, about once a minute and at the head of every file.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FleetLine {
    /// When, Unix ms.
    pub ts: u64,
    /// Generation that served.
    pub generation: u64,
    /// The workers that the configuration names.
    pub workers: Vec<WorkerEntry>,
}

/// A worker as the gateway knew it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerEntry {
    /// Its id.
    pub id: String,
    /// Its pool.
    pub pool: String,
    /// Its labels.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// `tag`, `stream`, `priority`.
    pub capabilities: Vec<String>,
    /// Data-parallel ranks.
    pub ranks: u32,
    /// Most requests that it runs, all ranks together; 0 unknown.
    pub max_running: u32,
    /// Most turns that it is given at a time, if configured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_in_flight: Option<u32>,
    /// KV tokens, all ranks together; 0 unknown.
    pub kv_capacity_tokens: u64,
    /// Learned prefill rate, tokens a second.
    pub prefill_tokens_per_s: f64,
    /// Learned time between tokens, ms; 0 unknown.
    pub itl_ms: f64,
}

/// Turns that could not be recorded: the disk was too slow or refused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostLine {
    /// How many.
    pub lost: u64,
}

fn is_false(value: &bool) -> bool {
    !*value
}

fn is_zero(value: &u64) -> bool {
    *value == 0
}

/// A line of a kind, without its newline.
pub fn text<T: Serialize>(kind: &str, body: &T) -> serde_json::Result<String> {
    #[derive(Serialize)]
    struct Whole<'a, T> {
        v: u32,
        kind: &'a str,
        #[serde(flatten)]
        body: &'a T,
    }
    serde_json::to_string(&Whole { v: VERSION, kind, body })
}
