//! What one simulated worker is: its flags, its speed and its limits.

/// Which KV is dropped first when the pool is full (`--radix-eviction-policy`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eviction {
    /// The least recently used first.
    Lru,
    /// The lowest request priority first, then the least recently used.
    Priority,
}

/// Which release is simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// 0.5.11: `/get_load`, no `/ready`, no `session_id`.
    V0_5_11,
    /// 0.5.23.
    V0_5_23,
}

impl Release {
    /// As `/server_info` spells it.
    pub fn text(self) -> &'static str {
        match self {
            Self::V0_5_11 => "0.5.11",
            Self::V0_5_23 => "0.5.23",
        }
    }
}

/// Which HTTP server stands before the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frontend {
    /// The usual one.
    Python,
    /// `SGLANG_RUST_SERVER=1`: fewer routes, no sessions, no rank header.
    Rust,
}

/// The flags and the model of a simulated worker.
///
/// The names are those of SGLang's `/server_info` where it has one. [`Default`] is a stock server: no optional feature,
/// no keys, 64 running requests, a pool of 131072 tokens with pages of one token.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Served model name; any other name in a request is served and echoed all the same.
    pub model: String,
    /// Prompt tokens computed per second (more than 0).
    pub prefill_tokens_per_s: f64,
    /// Time of one decode step of an empty batch, in milliseconds.
    pub decode_ms_base: f64,
    /// Added time of one decode step for each running request, in milliseconds.
    pub decode_ms_per_running: f64,
    /// Tokens computed in one prefill batch at most (`--chunked-prefill-size`).
    pub chunked_prefill_size: usize,
    /// Requests in the batch at most; an idle streaming session with a turn behind it counts as one.
    pub max_running_requests: usize,
    /// Size of the KV pool in tokens.
    pub max_total_tokens: usize,
    /// KV page in tokens (1 or more); only whole pages are reused.
    pub page_size: usize,
    /// Waiting requests at most; none is unlimited.
    pub max_queued_requests: Option<usize>,
    /// Longest prompt plus output, in tokens.
    pub context_length: usize,
    /// Output length used when a request names none and has no directive, in tokens (1 or more).
    pub default_output_tokens: usize,
    /// Which release it is.
    pub release: Release,
    /// Its HTTP server.
    pub frontend: Frontend,
    /// `--enable-metrics`: `/metrics` answers.
    pub enable_metrics: bool,
    /// `--enable-session-radix-cache` (0.5.15 and later): a top-level `session_id` protects KV until `close_session`.
    pub enable_session_radix_cache: bool,
    /// `--enable-streaming-session`.
    pub enable_streaming_session: bool,
    /// `--enable-priority-scheduling` (preemption by more than 10 included).
    pub enable_priority_scheduling: bool,
    /// `--abort-on-priority-when-disabled`.
    pub abort_on_priority_when_disabled: bool,
    /// `--enable-cache-report`: usage tells cached tokens.
    pub enable_cache_report: bool,
    /// `--stream-response-default-include-usage`.
    pub stream_response_default_include_usage: bool,
    /// `--incremental-streaming-output`: `/generate` streams deltas instead of the text so far.
    pub incremental_streaming_output: bool,
    /// A model that thinks first, with `--reasoning-parser qwen3`: outputs begin with reasoning, and the chat template
    /// drops the reasoning of earlier assistant turns.
    pub reasoning: bool,
    /// `--tool-call-parser qwen`.
    pub tool_call_parser: bool,
    /// `--api-key`.
    pub api_key: Option<String>,
    /// `--admin-api-key`.
    pub admin_api_key: Option<String>,
    /// Data parallel ranks (1 or more); each has its own pool, queue and sessions.
    pub dp_size: usize,
    /// Order in which KV is dropped.
    pub eviction: Eviction,
    /// Idle keep-alive connections are closed after this many seconds.
    pub keep_alive_s: f64,
    /// How much faster than real time everything runs (more than 0): 1000 makes a millisecond of a second.
    pub speed: f64,
    /// True (stock behaviour): the known hazards of overlapping streaming-session turns end the whole worker.
    /// False: such turns are refused and [`crate::SimWorker::hazards`] counts what would have been a crash.
    pub crash_mode: bool,
    /// Seconds after the start during which connections are refused.
    pub boot_s: f64,
    /// Seconds after that during which the probes answer 503.
    pub warmup_s: f64,
    /// `SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES=1`: `x-override-*` headers are read.
    pub enable_header_overrides: bool,
    /// Seed of the outputs: workers with the same seed answer the same prompt alike.
    pub seed: u64,
    /// Recorded requests kept; older ones are dropped.
    pub record_limit: usize,
    /// Bytes of recorded bodies kept; the requests that hold the oldest are dropped.
    pub record_bytes: usize,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            model: "sim".to_owned(),
            prefill_tokens_per_s: 8000.0,
            decode_ms_base: 6.0,
            decode_ms_per_running: 0.35,
            chunked_prefill_size: 8192,
            max_running_requests: 64,
            max_total_tokens: 131_072,
            page_size: 1,
            max_queued_requests: None,
            context_length: 32_768,
            default_output_tokens: 64,
            release: Release::V0_5_23,
            frontend: Frontend::Python,
            enable_metrics: false,
            enable_session_radix_cache: false,
            enable_streaming_session: false,
            enable_priority_scheduling: false,
            abort_on_priority_when_disabled: false,
            enable_cache_report: false,
            stream_response_default_include_usage: false,
            incremental_streaming_output: false,
            reasoning: false,
            tool_call_parser: true,
            api_key: None,
            admin_api_key: None,
            dp_size: 1,
            eviction: Eviction::Lru,
            keep_alive_s: 5.0,
            speed: 1.0,
            crash_mode: true,
            boot_s: 0.0,
            warmup_s: 0.0,
            enable_header_overrides: false,
            seed: 0,
            record_limit: 10_000,
            record_bytes: 64 << 20,
        }
    }
}

impl SimConfig {
    /// Whether a top-level `session_id` means anything.
    pub(crate) fn has_tags(&self) -> bool {
        self.enable_session_radix_cache && self.release != Release::V0_5_11
    }

    /// The longest prompt accepted, in tokens: the context less what the engine keeps back.
    pub(crate) fn max_input_tokens(&self) -> usize {
        self.context_length.saturating_sub(6)
    }
}
