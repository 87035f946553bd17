//! Sessions and the engine's controls.

use super::{
    reply::{self, Body},
    validate::{self, Endpoint, Flaw},
};
use crate::{
    pytext::{repr, repr_str},
    server::Shared,
};
use hyper::{Response, StatusCode};
use serde_json::{Map, Value, json};
use std::sync::{Arc, atomic::Ordering};

const OPEN: Endpoint = Endpoint { path: "/open_session", function: "open_session", line: 1687 };
const CLOSE: Endpoint = Endpoint { path: "/close_session", function: "close_session", line: 1701 };
const ABORT: Endpoint = Endpoint { path: "/abort_request", function: "abort_request", line: 1721 };

/// The answer when fields of a control message are wrong: its class is named first.
fn wrong(
    endpoint: Endpoint,
    class: &str,
    body: &Map<String, Value>,
    flaws: Vec<(&'static str, &str, &str)>,
) -> Response<Body> {
    let whole = Value::Object(body.clone());
    let instance = Flaw {
        kind: "is_instance_of",
        place: vec![repr_str("body"), repr_str(&format!("is-instance[{class}]"))],
        message: format!("Input should be an instance of {class}"),
        input: repr(&whole),
        context: Some(format!("{{'class': '{class}'}}")),
    };
    let others = flaws.into_iter().map(|(kind, field, message)| Flaw {
        kind,
        place: vec![repr_str("body"), repr_str(&format!("function-after[build_struct(), {class}]")), repr_str(field)],
        message: message.to_owned(),
        input: repr(body.get(field).unwrap_or(&whole)),
        context: None,
    });
    let flaws: Vec<Flaw> = std::iter::once(instance).chain(others).collect();
    reply::invalid(&validate::message(endpoint, &flaws))
}

/// A flaw of a text field, if it has one.
fn text_flaw(
    body: &Map<String, Value>,
    field: &'static str,
    required: bool,
) -> Option<(&'static str, &'static str, &'static str)> {
    match body.get(field) {
        Some(Value::String(_)) => None,
        None if required => Some(("missing", field, "Field required")),
        None | Some(Value::Null) if !required => None,
        _ => Some(("string_type", field, "Input should be a valid string")),
    }
}

pub(super) fn open(shared: &Shared, body: &[u8]) -> Response<Body> {
    let body = match validate::object(OPEN, body) {
        Ok(body) => body,
        Err(error) => return error.flat(),
    };
    let mut flaws = Vec::new();
    match body.get("capacity_of_str_len") {
        None => flaws.push(("missing", "capacity_of_str_len", "Field required")),
        Some(value) => {
            if validate::integer("capacity_of_str_len", value).is_err() {
                let (kind, message) = if value.is_string() {
                    ("int_parsing", "Input should be a valid integer, unable to parse string as an integer")
                } else {
                    ("int_type", "Input should be a valid integer")
                };
                flaws.push((kind, "capacity_of_str_len", message));
            }
        }
    }
    flaws.extend(text_flaw(&body, "session_id", false));
    if !flaws.is_empty() {
        return wrong(OPEN, "OpenSessionReqInput", &body, flaws);
    }
    let streaming = body.get("streaming").and_then(Value::as_bool).unwrap_or_default();
    if streaming && !shared.config.enable_streaming_session {
        let message = "Streaming sessions are disabled. Please relaunch with --enable-streaming-session.";
        return reply::native_error(message);
    }
    let id = body.get("session_id").and_then(Value::as_str).map_or_else(|| shared.new_id(), str::to_owned);
    let timeout_s = body.get("timeout").and_then(Value::as_f64);
    // Every rank opens its own; the first answer is the one that counts.
    let opened = shared.driver().each(|now_us, engine| engine.open_session(now_us, &id, streaming, timeout_s));
    if opened == Some(true) {
        reply::json_value(StatusCode::OK, &Value::from(id))
    } else {
        reply::native_error("Failed to open the session. Check if a session with the same id is still open.")
    }
}

pub(super) fn close(shared: &Shared, body: &[u8]) -> Response<Body> {
    let body = match validate::object(CLOSE, body) {
        Ok(body) => body,
        Err(error) => return error.flat(),
    };
    if let Some(flaw) = text_flaw(&body, "session_id", true) {
        return wrong(CLOSE, "CloseSessionReqInput", &body, vec![flaw]);
    }
    let id = body.get("session_id").and_then(Value::as_str).unwrap_or_default();
    shared.driver().each(|now_us, engine| engine.close_session(now_us, id));
    reply::empty(StatusCode::OK)
}

pub(super) fn abort(shared: &Shared, body: &[u8]) -> Response<Body> {
    let body = match validate::object(ABORT, body) {
        Ok(body) => body,
        Err(error) => return error.flat(),
    };
    if let Some(flaw) = text_flaw(&body, "rid", false) {
        return wrong(ABORT, "AbortReq", &body, vec![flaw]);
    }
    let rid = body.get("rid").and_then(Value::as_str).unwrap_or_default();
    let all = body.get("abort_all").and_then(Value::as_bool).unwrap_or_default();
    shared.driver().abort(|live| all || (!rid.is_empty() && live == rid));
    reply::empty(StatusCode::OK)
}

pub(super) fn flush(shared: &Shared) -> Response<Body> {
    let flushed = shared.driver().each(|now_us, engine| engine.flush(now_us)).unwrap_or_default();
    if flushed {
        let text = "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting \
                    requests, the operation will not be performed.)\n";
        reply::bare_text(StatusCode::OK, text)
    } else {
        reply::bare_text(StatusCode::BAD_REQUEST, "Flush cache failed.\n")
    }
}

pub(super) fn pause(shared: &Arc<Shared>, paused: bool) -> Response<Body> {
    shared.life().paused.store(paused, Ordering::Relaxed);
    shared.driver().each(|now_us, engine| engine.set_paused(now_us, paused));
    let what = if paused { "paused" } else { "continued" };
    let body = json!({"message": format!("Generation {what} successfully."), "status": "ok"});
    reply::json_value(StatusCode::OK, &body)
}
