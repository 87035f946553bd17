//! `/_sim/`: what a real worker does not have.

use super::reply::{self, Body};
use crate::{
    fault::{Fault, FaultKind},
    server::Shared,
};
use hyper::{Method, Response, StatusCode};
use serde_json::{Value, json};

/// `POST /_sim/fault` adds a fault, `DELETE` clears all; `GET /_sim/requests` lists what came in; `GET /_sim/state` tells
/// what the engine holds.
pub(super) fn respond(shared: &Shared, name: &str, method: &Method, body: &[u8]) -> Response<Body> {
    match (name, method) {
        ("fault", &Method::POST) => {
            let described = serde_json::from_slice::<Value>(body).map_err(|error| error.to_string());
            match described.and_then(|value| Fault::from_json(&value)) {
                Ok(fault) => {
                    apply(shared, fault);
                    reply::json_value(StatusCode::OK, &json!({"ok": true}))
                }
                Err(message) => reply::json_value(StatusCode::BAD_REQUEST, &json!({"error": message})),
            }
        }
        ("fault", &Method::DELETE) => {
            shared.faults.clear();
            shared.driver.each(|now_us, engine| engine.set_paused(now_us, false));
            reply::json_value(StatusCode::OK, &json!({"ok": true}))
        }
        ("requests", &Method::GET) => {
            let recorded = shared.recorded();
            let list: Vec<Value> = recorded
                .iter()
                .map(|request| {
                    json!({
                        "method": request.method.as_str(), "path": request.path, "query": request.query,
                        "at_ms": request.at_ms, "body": String::from_utf8_lossy(&request.body),
                        "headers": request.headers.iter().map(|(name, value)| {
                            json!([name.as_str(), String::from_utf8_lossy(value.as_bytes())])
                        }).collect::<Vec<_>>(),
                    })
                })
                .collect();
            reply::json_value(StatusCode::OK, &Value::Array(list))
        }
        ("state", &Method::GET) => {
            let body = json!({"requests": shared.driver.requests(), "hazards": shared.driver.hazards()});
            reply::json_value(StatusCode::OK, &body)
        }
        _ => reply::raw_json(StatusCode::NOT_FOUND, "{\"error\":\"no such control\"}"),
    }
}

/// Crashes and wedges asked for without a path happen at once; other faults wait for their request.
fn apply(shared: &Shared, fault: Fault) {
    match (&fault.kind, &fault.path) {
        (FaultKind::Crash, None) => shared.kill(),
        (FaultKind::Wedge, None) => {
            shared.driver.each(|now_us, engine| engine.set_paused(now_us, true));
        }
        (FaultKind::Unwedge, None) => {
            shared.driver.each(|now_us, engine| engine.set_paused(now_us, false));
        }
        _ => shared.faults.add(fault),
    }
}
