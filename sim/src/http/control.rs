//! `/_sim/`: what a real worker does not have.

use super::reply::{self, Body};
use crate::{
    fault::{self, Fault},
    server::Shared,
};
use hyper::{Method, Response, StatusCode, http::request::Parts};
use serde_json::{Value, json};

/// `POST /_sim/fault` adds a fault or a schedule, `DELETE` clears all; `GET /_sim/requests` lists what came in;
/// `GET /_sim/hits?from=NUMBER` what was hit by a fault; `GET /_sim/state` tells what the engine holds.
pub(super) fn respond(shared: &Shared, name: &str, parts: &Parts, body: &[u8]) -> Response<Body> {
    match (name, &parts.method) {
        ("fault", &Method::POST) => match described(body) {
            Ok(faults) => {
                faults.into_iter().for_each(|fault| shared.faults.add(fault));
                shared.act();
                reply::json_value(StatusCode::OK, &json!({"ok": true}))
            }
            Err(message) => reply::json_value(StatusCode::BAD_REQUEST, &json!({"error": message})),
        },
        ("fault", &Method::DELETE) => {
            shared.faults.clear();
            shared.act();
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
        ("hits", &Method::GET) => {
            let from = parts.uri.query().and_then(|query| query.strip_prefix("from=")).map_or(Ok(0), str::parse);
            let Ok(from) = from else {
                return reply::json_value(StatusCode::BAD_REQUEST, &json!({"error": "from is not a number"}));
            };
            let hits = shared.hits(from);
            let list = hits.iter().map(|hit| {
                json!({
                    "number": hit.number, "kind": hit.kind, "path": hit.path, "request_id": hit.request_id,
                    "at_ms": hit.at_ms,
                })
            });
            reply::json_value(StatusCode::OK, &list.collect())
        }
        ("state", &Method::GET) => {
            let driver = shared.driver();
            let (sessions, tags) = driver.sessions();
            let body = json!({
                "requests": driver.requests(), "hazards": driver.hazards(), "sessions": sessions,
                "session_tokens": driver.held_tokens(), "tags": tags, "lives": shared.lives(),
                "faults": shared.faults.len(),
            });
            reply::json_value(StatusCode::OK, &body)
        }
        _ => reply::raw_json(StatusCode::NOT_FOUND, "{\"error\":\"no such control\"}"),
    }
}

/// One fault, or a schedule of them.
fn described(body: &[u8]) -> Result<Vec<Fault>, String> {
    let text = String::from_utf8_lossy(body);
    if text.trim_start().starts_with('{') {
        let value: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
        return Ok(vec![Fault::from_json(&value)?]);
    }
    let scheduled = fault::schedule(&text)?;
    if let Some(worker) = scheduled.iter().find_map(|scheduled| scheduled.worker) {
        return Err(format!("worker {worker}: this is the port of one worker, so leave that out"));
    }
    Ok(scheduled.into_iter().map(|scheduled| scheduled.fault).collect())
}
