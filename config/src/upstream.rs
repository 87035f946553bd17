//! Times, sizes, retries, and workers taken out.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ByteSize;

/// How long everything may take.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Timeouts {
    /// Milliseconds to connect to a worker.
    #[schemars(range(min = 1, max = 600_000))]
    pub connect_ms: u64,
    /// Seconds from sending a request to the first byte of its response, for a stream to its first event. A worker sends
    /// nothing, not even a status, while a request waits in its queue.
    #[schemars(range(min = 1, max = 86_400))]
    pub first_byte_s: u64,
    /// Seconds between two pieces of a response.
    #[schemars(range(min = 1, max = 86_400))]
    pub between_bytes_s: u64,
    /// Seconds a request may take in all, waiting and retries included.
    #[schemars(range(min = 1, max = 604_800))]
    pub total_s: u64,
    /// Seconds from the first byte of a request to the end of its head, and from a new connection to its first byte; a
    /// slower client is answered 408.
    #[schemars(range(min = 1, max = 3_600))]
    pub client_head_s: u64,
    /// Seconds without a piece of the request body from the client; after that it is answered 408.
    #[schemars(range(min = 1, max = 86_400))]
    pub client_body_s: u64,
    /// Seconds the whole request body may take, however steadily it comes; after that it is answered 408.
    #[schemars(range(min = 1, max = 86_400))]
    pub client_body_total_s: u64,
    /// Seconds a client may take nothing of what is ready for it; after that its connection is cut.
    #[schemars(range(min = 1, max = 86_400))]
    pub client_write_s: u64,
    /// Seconds a client connection is kept between two requests, HTTP/2 connections without a stream included.
    #[schemars(range(min = 1, max = 86_400))]
    pub client_idle_s: u64,
    /// Milliseconds an idle connection to a worker is kept. It must stay below the worker's own limit, which is 5000 in
    /// SGLang (`SGLANG_TIMEOUT_KEEP_ALIVE`): otherwise a request can meet a connection that the worker is closing. 0
    /// keeps none.
    #[schemars(range(min = 0, max = 3_600_000))]
    pub upstream_idle_ms: u64,
    /// Seconds a side request (open or close of a session, load) may take.
    #[schemars(range(min = 1, max = 3_600))]
    pub side_request_s: u64,
}

/// How large everything may be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// Largest request body, after decoding where it has a content encoding; larger ones are answered 413.
    #[schemars(extend("minimum" = 1_024, "maximum" = 4_294_967_296_u64))]
    pub body_bytes: ByteSize,
    /// Bytes of one response that are kept to learn from it (usage, the assistant's message for a prefill). Longer
    /// responses pass unchanged and teach less.
    #[schemars(extend("maximum" = 4_294_967_296_u64))]
    pub response_observe_bytes: ByteSize,
    /// Bytes of request bodies held at a time, those being read and those of turns that wait or run; a body that finds no
    /// room is answered like one that finds the queue full (`admission.overload_status`).
    #[schemars(extend("minimum" = 1_024, "maximum" = 1_099_511_627_776_u64))]
    pub bodies_bytes: ByteSize,
    /// Decode request bodies of the content encodings gzip, deflate, br and zstd, which workers refuse. When false, every
    /// encoded body is answered 415.
    pub body_decoding: bool,
    /// Largest sum of names and values of the request headers; larger ones are answered 431.
    #[schemars(extend("minimum" = 1_024, "maximum" = 524_288_u64))]
    pub header_bytes: ByteSize,
    /// Most header fields of a request; more are answered 431.
    #[schemars(range(min = 8, max = 256))]
    pub header_count: u32,
    /// Longest request target (path and query); longer ones are answered 414.
    #[schemars(extend("minimum" = 256, "maximum" = 65_536_u64))]
    pub uri_bytes: ByteSize,
    /// Client connections that one listener keeps open at a time; further ones are answered 503 and closed.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub connections: u32,
    /// Requests at a time on one HTTP/2 connection; further ones are refused, which clients take as a sign to wait. Holds
    /// for connections opened after it was set.
    #[schemars(range(min = 1, max = 10_000))]
    pub http2_streams: u32,
    /// Side requests that wait or run at a time; one worker gets half of them. A prefill that finds no place is dropped, a
    /// close of a session is sent later. Aborts are counted apart, within the same bounds.
    #[schemars(range(min = 1, max = 1_000_000), extend("x-restart" = true))]
    pub side_queue: u64,
    /// Side requests that are sent to one worker at a time; as many aborts besides.
    #[schemars(range(min = 1, max = 1_000))]
    pub side_per_worker: u32,
}

/// Trying another worker while nothing has reached the client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Retry {
    /// Attempts for one request, the first included.
    #[schemars(range(min = 1, max = 100))]
    pub attempts: u32,
    /// Workers that one request may be tried on when each of them is lost before its first byte: the connection broke, or nothing
    /// moved any more. The request may be what they do not survive, so it must not go through all of them. Workers that could
    /// not be connected to do not count: they have seen nothing of it.
    #[schemars(range(min = 1, max = 100))]
    pub lost_workers: u32,
    /// Milliseconds before the second attempt, of which up to a half is taken off at random; doubled for each one after it.
    #[schemars(range(min = 0, max = 60_000))]
    pub backoff_ms: u64,
    /// Most milliseconds before an attempt.
    #[schemars(range(min = 0, max = 600_000))]
    pub max_backoff_ms: u64,
    /// Retries of a pool within ten seconds, as a share of the requests that came in that time or are in progress. The first
    /// retry of a request whose worker could not be reached, or broke the connection, is not counted: it adds no load.
    #[schemars(range(min = 0.0, max = 100.0))]
    pub budget_ratio: f64,
    /// Retries a second that a pool may have besides.
    #[schemars(range(min = 0, max = 1_000_000))]
    pub budget_floor_per_s: u32,
}

/// Taking workers out whose answers fail, or on which nothing moves, although their probes are well. What counts happens before
/// the first byte of an answer: failed connections, resets, broken HTTP, 5xx. A 4xx, a full queue (429, 503), a client that left
/// and silence do not count. When every worker of a pool is out, all are used.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Ejection {
    /// Faults in a row that take a worker out; 0: none do.
    #[schemars(range(min = 0, max = 1_000))]
    pub consecutive_faults: u32,
    /// Milliseconds a worker is out; doubled when it fails again, halved for each such time that it was well.
    #[schemars(range(min = 100, max = 3_600_000))]
    pub base_ms: u64,
    /// Most milliseconds a worker is out.
    #[schemars(range(min = 100, max = 86_400_000))]
    pub max_ms: u64,
    /// Share of a pool's workers that may be out because of faults at a time. A pool of two or more may always miss one, unless
    /// this is 0.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub max_share: f64,
    /// Milliseconds after which a worker is taken out on which requests wait or run while nothing moves in its load report:
    /// no tokens computed, no KV taken or given back, no request begun or ended. Requests that it has not begun to answer
    /// go to another worker then. 0: not looked at.
    #[schemars(range(min = 0, max = 86_400_000))]
    pub wedged_after_ms: u64,
}

// === impl Timeouts ===

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect_ms: 2_000,
            first_byte_s: 600,
            between_bytes_s: 300,
            total_s: 3_600,
            client_head_s: 30,
            client_body_s: 60,
            client_body_total_s: 600,
            client_write_s: 60,
            client_idle_s: 75,
            upstream_idle_ms: 4_000,
            side_request_s: 10,
        }
    }
}

// === impl Limits ===

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: ByteSize::mib(64),
            response_observe_bytes: ByteSize::mib(16),
            bodies_bytes: ByteSize::mib(4096),
            body_decoding: true,
            header_bytes: ByteSize::kib(64),
            header_count: 100,
            uri_bytes: ByteSize::kib(8),
            connections: 10_000,
            http2_streams: 128,
            side_queue: 4_096,
            side_per_worker: 8,
        }
    }
}

// === impl Retry ===

impl Default for Retry {
    fn default() -> Self {
        Self {
            attempts: 3,
            lost_workers: 2,
            backoff_ms: 50,
            max_backoff_ms: 2_000,
            budget_ratio: 0.2,
            budget_floor_per_s: 10,
        }
    }
}

// === impl Ejection ===

impl Default for Ejection {
    fn default() -> Self {
        Self { consecutive_faults: 5, base_ms: 10_000, max_ms: 300_000, max_share: 0.5, wedged_after_ms: 60_000 }
    }
}
