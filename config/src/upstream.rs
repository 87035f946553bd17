//! Times, sizes and retries.

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
    /// Seconds from sending a request to the first byte of its response. A worker sends nothing, not even a status,
    /// while a request waits in its queue.
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
    /// close of a session is sent later. Aborts are counted apart, up to the same number.
    #[schemars(range(min = 1, max = 1_000_000), extend("x-restart" = true))]
    pub side_queue: u64,
    /// Side requests that are sent to one worker at a time, aborts not counted.
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
    /// Milliseconds before the second attempt; doubled for each one after it.
    #[schemars(range(min = 0, max = 60_000))]
    pub backoff_ms: u64,
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
        Self { attempts: 3, backoff_ms: 50 }
    }
}
