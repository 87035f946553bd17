//! What the release and the HTTP server change.

use super::{
    Route,
    reply::{self, Body},
};
use crate::config::{Frontend, Release, SimConfig};
use hyper::{
    Method, Response, StatusCode,
    header::{self, HeaderValue},
};
use serde_json::{Map, Value, json};

/// Whether this worker has the route.
pub(super) fn has(config: &SimConfig, route: Route) -> bool {
    let old = config.release == Release::V0_5_11;
    match route {
        Route::Metrics => config.enable_metrics,
        Route::GetLoad => old && config.frontend == Frontend::Python,
        Route::Ready if old => false,
        Route::Chat
        | Route::Completions
        | Route::Generate
        | Route::Models
        | Route::ModelById
        | Route::Tokenize
        | Route::Detokenize
        | Route::Health
        | Route::ModelInfo
        | Route::ServerInfo
        | Route::Loads
        | Route::Abort
        | Route::Flush => true,
        _ => config.frontend == Frontend::Python,
    }
}

/// The answer to an unknown path.
pub(super) fn not_found(config: &SimConfig) -> Response<Body> {
    match config.frontend {
        Frontend::Python => reply::raw_json(StatusCode::NOT_FOUND, "{\"detail\":\"Not Found\"}"),
        Frontend::Rust => reply::empty(StatusCode::NOT_FOUND),
    }
}

/// The answer to a method that the path does not have.
pub(super) fn wrong_method(config: &SimConfig, methods: &[Method]) -> Response<Body> {
    let response = reply::wrong_method(methods);
    match config.frontend {
        Frontend::Python => response,
        Frontend::Rust => {
            let mut bare = reply::empty(response.status());
            if let Some(allow) = response.headers().get(header::ALLOW) {
                bare.headers_mut().insert(header::ALLOW, allow.clone());
            }
            bare
        }
    }
}

/// The answer to a turn of a session, where the server knows none.
pub(super) fn no_sessions(config: &SimConfig, body: &Map<String, Value>) -> Option<Response<Body>> {
    let session = body.get("session_params").is_some_and(|params| !params.is_null());
    (session && config.frontend == Frontend::Rust).then(|| {
        let message = "validation failed: session_params is not supported by the Rust server";
        reply::json_value(StatusCode::BAD_REQUEST, &json!({"error": {"message": message, "code": 400}}))
    })
}

/// The answer to unknown sections of `/v1/loads`.
pub(super) fn bad_sections(config: &SimConfig, unknown: &[&str], known: &[&str]) -> Response<Body> {
    if config.frontend == Frontend::Python {
        return reply::internal();
    }
    let mut known = known.to_vec();
    known.sort_unstable();
    let list =
        |names: &[&str]| format!("[{}]", names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", "));
    let message = format!("Invalid include sections: {}. Valid options: {}", list(unknown), list(&known));
    reply::json_value(StatusCode::BAD_REQUEST, &json!({"error": {"message": message, "code": 400}}))
}

/// The headers of every answer; the Rust server has none of its own.
pub(super) fn stamp(config: &SimConfig, response: &mut Response<Body>, origin: Option<&HeaderValue>) {
    if config.frontend == Frontend::Python {
        reply::stamp(response, origin);
    }
}
