//! Waiting, placing, warming: what the gateway does before and after a turn.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::ByteSize;

/// When requests wait, how many, and when they are refused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Admission {
    /// Requests that wait at a time. More are refused.
    #[schemars(range(min = 0, max = 10_000_000))]
    pub max_queue: u64,
    /// Bytes of request bodies that waiting requests hold at a time. More are refused.
    #[schemars(extend("maximum" = 1_099_511_627_776_u64))]
    pub max_queue_bytes: ByteSize,
    /// Milliseconds a request waits before it is refused.
    #[schemars(range(min = 0, max = 86_400_000))]
    pub max_wait_ms: u64,
    /// Share of a worker's KV cache in use above which it is given no more requests while others wait.
    #[schemars(range(min = 0.05, max = 1.0))]
    pub kv_high_watermark: f64,
    /// Requests that one worker is given at a time; pools and workers may override it. Absent: what the worker reports
    /// (`max_running_requests`).
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_in_flight_per_worker: Option<u32>,
    /// Status of a refusal for overload: 503, or 429 for clients that only back off on that.
    pub overload_status: OverloadStatus,
    /// Largest head start in seconds, either way, that a priority can give in the queue.
    #[schemars(range(min = 0, max = 86_400))]
    pub max_head_start_s: u64,
}

/// Status of a refusal for overload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "u16", into = "u16")]
pub enum OverloadStatus {
    /// 429
    TooManyRequests,
    /// 503
    ServiceUnavailable,
}

/// What is known about workers: prefix index, probes, load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Routing {
    /// Bytes of prompt in one block of the prefix index. Smaller is finer and needs more memory.
    #[schemars(range(min = 64, max = 65_536), extend("x-restart" = true))]
    pub block_bytes: u64,
    /// Most blocks remembered for one worker, at up to 48 bytes of memory each; less where the worker's KV cache is
    /// smaller.
    #[schemars(range(min = 1_024, max = 67_108_864), extend("x-restart" = true))]
    pub index_blocks_per_worker: u64,
    /// Bytes of prompt per token until a worker's own answers teach better.
    #[schemars(range(min = 0.5, max = 64.0))]
    pub bytes_per_token: f64,
    /// Milliseconds between probes of a worker.
    #[schemars(range(min = 50, max = 3_600_000))]
    pub probe_interval_ms: u64,
    /// Milliseconds between reads of a worker's load.
    #[schemars(range(min = 20, max = 3_600_000))]
    pub load_interval_ms: u64,
    /// Milliseconds a probe may take. SGLang's own `/health` never answers in less than 1000.
    #[schemars(range(min = 50, max = 600_000))]
    pub probe_timeout_ms: u64,
    /// Probes in a row that must fail before a worker gets no more requests.
    #[schemars(range(min = 1, max = 1_000))]
    pub unhealthy_after: u32,
    /// Probes in a row that must succeed before it gets some again.
    #[schemars(range(min = 1, max = 1_000))]
    pub healthy_after: u32,
}

/// Speculative prefill: warming a worker for the turn that is about to come, when the client asked for it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Prefill {
    /// Off: the hint is accepted and does nothing.
    pub enabled: bool,
    /// Prefills that run on one worker at a time.
    #[schemars(range(min = 1, max = 1_000))]
    pub per_worker: u32,
    /// Seconds a prefill may take.
    #[schemars(range(min = 1, max = 3_600))]
    pub timeout_s: u64,
    /// Priority sent to workers that take one, where a larger number runs earlier; `"none"` sends none.
    #[serde(with = "priority_or_none")]
    #[schemars(
        schema_with = "priority_schema",
        extend("minimum" = -2_147_483_648_i64, "maximum" = 2_147_483_647_i64)
    )]
    pub engine_priority: Option<i64>,
    /// Largest body that a prefill may have.
    #[schemars(extend("maximum" = 1_073_741_824_u64))]
    pub max_body_bytes: ByteSize,
    /// No prefill goes to a worker on which so many requests are waiting, or more.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub skip_when_waiting: u32,
}

// === impl Admission ===

impl Default for Admission {
    fn default() -> Self {
        Self {
            max_queue: 1_024,
            // A full queue of agent turns of half a megabyte each.
            max_queue_bytes: ByteSize::mib(512),
            max_wait_ms: 120_000,
            kv_high_watermark: 0.95,
            max_in_flight_per_worker: None,
            overload_status: OverloadStatus::ServiceUnavailable,
            max_head_start_s: 3_600,
        }
    }
}

// === impl OverloadStatus ===

impl OverloadStatus {
    /// The HTTP status.
    pub fn code(self) -> u16 {
        match self {
            Self::TooManyRequests => 429,
            Self::ServiceUnavailable => 503,
        }
    }
}

impl TryFrom<u16> for OverloadStatus {
    type Error = &'static str;

    fn try_from(code: u16) -> Result<Self, Self::Error> {
        match code {
            429 => Ok(Self::TooManyRequests),
            503 => Ok(Self::ServiceUnavailable),
            _ => Err("expected 429 or 503"),
        }
    }
}

impl From<OverloadStatus> for u16 {
    fn from(status: OverloadStatus) -> Self {
        status.code()
    }
}

impl JsonSchema for OverloadStatus {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "OverloadStatus".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "integer", "enum": [503, 429] })
    }
}

// === impl Routing ===

impl Default for Routing {
    fn default() -> Self {
        Self {
            block_bytes: 512,
            index_blocks_per_worker: 262_144,
            // English prose and code in the tokenizers of current models.
            bytes_per_token: 4.0,
            probe_interval_ms: 1_000,
            load_interval_ms: 250,
            probe_timeout_ms: 3_000,
            unhealthy_after: 2,
            healthy_after: 1,
        }
    }
}

// === impl Prefill ===

impl Default for Prefill {
    fn default() -> Self {
        Self {
            enabled: true,
            per_worker: 1,
            timeout_s: 60,
            engine_priority: Some(-100),
            max_body_bytes: ByteSize::mib(4),
            skip_when_waiting: 1,
        }
    }
}

pub(crate) const NONE: &str = "none";

fn priority_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": ["integer", "string"], "format": "priority-or-none" })
}

mod priority_or_none {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use super::NONE;

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Form {
        Priority(i64),
        Word(String),
    }

    pub(super) fn serialize<S: Serializer>(priority: &Option<i64>, serializer: S) -> Result<S::Ok, S::Error> {
        match priority {
            Some(priority) => serializer.serialize_i64(*priority),
            None => serializer.serialize_str(NONE),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<i64>, D::Error> {
        match Form::deserialize(deserializer)? {
            Form::Priority(priority) => Ok(Some(priority)),
            Form::Word(word) if word == NONE => Ok(None),
            Form::Word(_) => Err(D::Error::custom("expected an integer or \"none\"")),
        }
    }
}
