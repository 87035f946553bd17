//! `/metrics`: the gauges that a router would read, as stale as in the real server.

use super::reply::{self, Body};
use crate::{engine::Logged, server::Shared};
use hyper::{Response, StatusCode};
use std::fmt::Write as _;

/// Name, what it is, and its value.
type Gauge = (&'static str, &'static str, fn(&Shared, &Logged) -> f64);

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
fn float(count: usize) -> f64 {
    count as f64
}

fn used(shared: &Shared, logged: &Logged) -> usize {
    logged.load.used_tokens.min(shared.config.max_total_tokens)
}

const GAUGES: [Gauge; 8] = [
    ("max_total_num_tokens", "Maximum total number of tokens in the KV cache pool.", |shared, _| {
        float(shared.config.max_total_tokens)
    }),
    ("num_running_reqs", "The number of running requests.", |_, logged| float(logged.load.running)),
    ("num_queue_reqs", "The number of requests in the waiting queue.", |_, logged| float(logged.load.waiting)),
    ("gen_throughput", "The generation throughput (token/s).", |_, logged| logged.load.gen_throughput),
    ("cache_hit_rate", "The prefix cache hit rate.", |_, logged| logged.load.cache_hit_rate),
    ("token_usage", "The token usage.", |shared, logged| {
        float(used(shared, logged)) / float(shared.config.max_total_tokens.max(1))
    }),
    ("num_used_tokens", "The number of used tokens.", |shared, logged| float(used(shared, logged))),
    ("kv_available_tokens", "Number of free token slots in the KV cache pool.", |shared, logged| {
        float(shared.config.max_total_tokens - used(shared, logged))
    }),
];

const SESSION_GAUGES: [Gauge; 2] = [
    ("num_streaming_sessions", "The number of streaming sessions.", |_, logged| float(logged.sessions)),
    (
        "streaming_session_held_tokens",
        "The number of KV tokens currently held by streaming session slots.",
        |_, logged| float(logged.held_tokens),
    ),
];

pub(super) fn respond(shared: &Shared) -> Response<Body> {
    let ranks = shared.driver().logged();
    let sessions = if shared.config.enable_streaming_session { SESSION_GAUGES.as_slice() } else { &[] };
    let mut text = String::new();
    for (name, help, value) in GAUGES.iter().chain(sessions) {
        // Writing to a text cannot fail.
        let _ = writeln!(text, "# HELP sglang:{name} {help}\n# TYPE sglang:{name} gauge");
        for (rank, logged) in ranks.iter().enumerate() {
            let of_rank = if ranks.len() > 1 { format!("dp_rank=\"{rank}\",") } else { String::new() };
            let value = value(shared, logged);
            let _ = writeln!(
                text,
                "sglang:{name}{{{of_rank}engine_type=\"unified\",model_name=\"{}\",moe_ep_rank=\"0\",pp_rank=\"0\",\
                 priority=\"\",tp_rank=\"0\"}} {value:?}",
                shared.config.model
            );
        }
    }
    reply::text(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", text)
}
