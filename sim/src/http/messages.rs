//! `/v1/messages` and `/v1/messages/count_tokens`, the Anthropic shape.

use super::{
    chat::{self, Turn, call_id, duplicate},
    fields::{self, Refused},
    pieces::{Answer, Piece, Pieces},
    reply::{self, Body},
    validate::{self, BodyError, Endpoint},
};
use crate::{
    driver::Live,
    engine::{EventKind, Finish, Reason, Request},
    server::Shared,
};
use bytes::Bytes;
use hyper::{Response, StatusCode, http::request::Parts};
use serde_json::{Map, Value, json};
use std::{collections::VecDeque, sync::Arc};

const ENDPOINT: Endpoint = Endpoint { path: "/v1/messages", function: "anthropic_v1_messages", line: 2110 };

fn error(status: StatusCode, kind: &str, message: &str) -> Response<Body> {
    reply::json_value(status, &error_body(kind, message))
}

fn error_body(kind: &str, message: &str) -> Value {
    json!({"type": "error", "error": {"type": kind, "message": message}})
}

fn invalid(message: &str) -> Refused {
    Box::new(error(StatusCode::BAD_REQUEST, "invalid_request_error", message))
}

/// The body, with the fields it must have.
fn read(body: &[u8], required: &[&str]) -> Result<Map<String, Value>, Refused> {
    let body = validate::object(ENDPOINT, body).map_err(|error| match error {
        BodyError::Syntax(place, _) => invalid(&format!("{place}: JSON decode error")),
        BodyError::Broken => Box::new(reply::internal()),
        BodyError::Schema(_) | BodyError::Type(_) => invalid("Field required"),
    })?;
    match required.iter().find(|field| !body.contains_key(**field)) {
        Some(field) => Err(invalid(&format!("{field}: Field required"))),
        None => Ok(body),
    }
}

/// The conversation as chat messages, tools and tool choice.
fn turn(shared: &Shared, body: &Map<String, Value>) -> Result<Turn, Refused> {
    let messages = chat_messages(body);
    let tools: Vec<Value> = body
        .get("tools")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .map(|tool| {
            let mut function = Map::new();
            for (from, to) in [("name", "name"), ("description", "description"), ("input_schema", "parameters")] {
                if let Some(value) = tool.get(from) {
                    function.insert(to.to_owned(), value.clone());
                }
            }
            json!({"type": "function", "function": function})
        })
        .collect();
    let choice = body.get("tool_choice").and_then(|choice| choice.get("type")).and_then(Value::as_str);
    let choice = match choice {
        Some("any") => Some(json!("required")),
        Some("none") => Some(json!("none")),
        Some("tool") => body
            .get("tool_choice")
            .and_then(|choice| choice.get("name"))
            .map(|name| json!({"type": "function", "function": {"name": name}})),
        _ => None,
    };
    chat::turn(shared, &messages, &tools, choice.as_ref()).map_err(|message| invalid(&message))
}

fn chat_messages(body: &Map<String, Value>) -> Vec<Value> {
    let mut out = Vec::new();
    if let Some(system) = body.get("system") {
        out.push(json!({"role": "system", "content": system}));
    }
    for message in body.get("messages").and_then(Value::as_array).into_iter().flatten() {
        let role = message.get("role").and_then(Value::as_str).unwrap_or("user");
        let Some(blocks) = message.get("content").and_then(Value::as_array) else {
            out.push(message.clone());
            continue;
        };
        let (mut texts, mut calls, mut thought) = (Vec::new(), Vec::new(), None);
        for block in blocks {
            let field = |name: &str| block.get(name).cloned().unwrap_or_default();
            match block.get("type").and_then(Value::as_str) {
                Some("tool_use") => calls.push(json!({"id": field("id"), "type": "function",
                    "function": {"name": field("name"), "arguments": field("input")}})),
                Some("tool_result") => out.push(json!({"role": "tool", "tool_call_id": field("tool_use_id"),
                    "content": field("content")})),
                Some("thinking") => thought = Some(field("thinking")),
                _ => texts.push(block.clone()),
            }
        }
        if texts.is_empty() && calls.is_empty() {
            continue;
        }
        let mut message = json!({"role": role, "content": texts});
        if let Some(message) = message.as_object_mut() {
            if !calls.is_empty() {
                message.insert("tool_calls".to_owned(), Value::Array(calls));
            }
            if let Some(thought) = thought {
                message.insert("reasoning_content".to_owned(), thought);
            }
        }
        out.push(message);
    }
    out
}

/// `/v1/messages/count_tokens`
pub(super) fn count(shared: &Shared, body: &[u8]) -> Response<Body> {
    match read(body, &["messages"]).and_then(|body| turn(shared, &body)) {
        Ok(turn) => reply::json_value(StatusCode::OK, &json!({"input_tokens": turn.prompt.len()})),
        Err(refused) => *refused,
    }
}

struct Context {
    shared: Arc<Shared>,
    id: String,
    model: String,
    tools: bool,
    stops: Vec<String>,
}

/// `/v1/messages`. Priority, rid, session and salt are not fields of this endpoint and have no effect.
pub(super) async fn respond(shared: &Arc<Shared>, parts: &Parts, body: &[u8]) -> Response<Body> {
    match accept(shared, parts, body) {
        Ok((context, live, true)) => stream(context, live),
        Ok((context, live, false)) => whole(context, live).await,
        Err(refused) => *refused,
    }
}

fn accept(shared: &Arc<Shared>, parts: &Parts, body: &[u8]) -> Result<(Context, Live, bool), Refused> {
    let body = read(body, &["messages", "max_tokens"])?;
    if body.get("messages").and_then(Value::as_array).is_none_or(Vec::is_empty) {
        return Err(invalid("Messages cannot be empty."));
    }
    let turn = turn(shared, &body)?;
    let stream = fields::flag(&body, "stream");
    let asked = fields::count(&body, "max_tokens");
    let max_new_tokens = fields::check_length(shared, turn.prompt.len(), asked).map_err(|message| invalid(&message))?;
    let header = parts.headers.get("x-data-parallel-rank").and_then(|rank| rank.to_str().ok());
    let asked = header.and_then(|rank| rank.trim().parse().ok()).or_else(|| fields::body_rank(&body));
    let rank = fields::rank(shared, asked).map_err(|message| invalid(&message))?;
    let rid = fields::override_header(shared, &parts.headers, "rid").map_or_else(|| shared.new_id(), str::to_owned);
    let request = Request {
        rid,
        prompt: turn.prompt,
        priority: fields::override_priority(shared, &parts.headers)?,
        max_new_tokens,
        stop: fields::stops(body.get("stop_sequences")),
        script: turn.script,
        ..Request::default()
    };
    let live = shared.driver().submit(rank, vec![request], stream).map_err(|rid| duplicate(&rid))?;
    let context = Context {
        shared: Arc::clone(shared),
        id: format!("msg_{}", shared.new_id()),
        model: fields::text(&body, "model").unwrap_or_default(),
        tools: turn.tools,
        stops: fields::stops(body.get("stop_sequences")),
    };
    Ok((context, live, stream))
}

/// `usage`: with the cache report, the cached tokens are told apart from the input.
fn usage(shared: &Shared, prompt: usize, cached: usize, output: usize) -> Value {
    if shared.config.enable_cache_report {
        json!({"input_tokens": prompt.saturating_sub(cached), "output_tokens": output, "cache_read_input_tokens": cached})
    } else {
        json!({"input_tokens": prompt, "output_tokens": output})
    }
}

fn stop_reason(reason: &Reason, called: bool) -> &'static str {
    match reason {
        Reason::StopToken(_) | Reason::StopText(_) if called => "tool_use",
        Reason::StopText(_) => "stop_sequence",
        Reason::Length(_) => "max_tokens",
        _ => "end_turn",
    }
}

/// The error of a request that the scheduler refused: what is behind a 5xx is not told.
fn rejected(status: u16, message: &str) -> (StatusCode, Value) {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let kind = match status.as_u16() {
        503 => "overloaded_error",
        400..=499 => "invalid_request_error",
        _ => "api_error",
    };
    (status, error_body(kind, if status.is_server_error() { "Internal server error" } else { message }))
}

async fn whole(context: Context, mut live: Live) -> Response<Body> {
    let mut parser = Pieces::new(&context.shared.config, context.tools, &context.stops);
    let mut answer = Answer::default();
    let mut end = None;
    while let Some((_, event)) = live.next().await {
        match event {
            EventKind::Started { .. } => {}
            EventKind::Token { id, .. } => answer.add(parser.push(id)),
            EventKind::Finished(finish) => end = Some(finish),
        }
    }
    let Some(end) = end else { return reply::internal() };
    if let Reason::Rejected(status, message) = &end.reason {
        let (status, body) = rejected(*status, message);
        return reply::json_value(status, &body);
    }
    answer.add(parser.finish());
    let mut content = Vec::new();
    if !answer.reasoning.is_empty() {
        content.push(json!({"type": "thinking", "thinking": answer.reasoning}));
    }
    if !answer.text.is_empty() || (content.is_empty() && answer.calls.is_empty()) {
        content.push(json!({"type": "text", "text": answer.text}));
    }
    for (name, arguments) in &answer.calls {
        let input: Value = serde_json::from_str(arguments).unwrap_or_default();
        content.push(json!({"type": "tool_use", "id": call_id(&context.shared), "name": name, "input": input}));
    }
    let body = json!({
        "id": context.id, "type": "message", "role": "assistant", "content": content, "model": context.model,
        "stop_reason": stop_reason(&end.reason, parser.called()),
        "usage": usage(&context.shared, end.prompt_tokens, end.cached_tokens, end.completion_tokens),
    });
    reply::json_value(StatusCode::OK, &body)
}

/// The kind of the content block that is open.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    Call,
}

struct Writer {
    context: Context,
    parser: Pieces,
    open: Option<Block>,
    index: usize,
}

/// Status and headers go out at once.
fn stream(context: Context, live: Live) -> Response<Body> {
    let parser = Pieces::new(&context.shared.config, context.tools, &context.stops);
    let writer = Writer { context, parser, open: None, index: 0 };
    let ready = VecDeque::new();
    let frames = futures::stream::unfold((live, writer, ready), |(mut live, mut writer, mut ready)| async move {
        while ready.is_empty() {
            let (_, event) = live.next().await?;
            ready.extend(writer.event(event));
        }
        ready.pop_front().map(|frame| (frame, (live, writer, ready)))
    });
    reply::event_stream(frames)
}

fn named(kind: &str, fields: Value) -> Bytes {
    let mut event = json!({"type": kind});
    if let (Some(event), Value::Object(fields)) = (event.as_object_mut(), fields) {
        event.extend(fields);
    }
    reply::named(kind, &event)
}

impl Writer {
    fn event(&mut self, event: EventKind) -> Vec<Bytes> {
        let mut frames = Vec::new();
        match event {
            EventKind::Started { prompt_tokens, cached_tokens } => {
                let context = &self.context;
                frames.push(named(
                    "message_start",
                    json!({"message": {
                        "id": context.id, "type": "message", "role": "assistant", "content": [], "model": context.model,
                        "usage": usage(&context.shared, prompt_tokens, cached_tokens, 0),
                    }}),
                ));
            }
            EventKind::Token { id, .. } => {
                let pieces = self.parser.push(id);
                self.pieces(pieces, &mut frames);
            }
            EventKind::Finished(end) => self.end(&end, &mut frames),
        }
        frames
    }

    fn end(&mut self, end: &Finish, frames: &mut Vec<Bytes>) {
        if let Reason::Rejected(status, message) = &end.reason {
            return frames.push(reply::named("error", &rejected(*status, message).1));
        }
        let rest = self.parser.finish();
        self.pieces(rest, frames);
        self.close(frames);
        let reason = stop_reason(&end.reason, self.parser.called());
        let usage = json!({"output_tokens": end.completion_tokens});
        frames.push(named("message_delta", json!({"delta": {"stop_reason": reason}, "usage": usage})));
        frames.push(named("message_stop", json!({})));
    }

    fn pieces(&mut self, pieces: Vec<Piece>, frames: &mut Vec<Bytes>) {
        for piece in pieces {
            let delta = match piece {
                Piece::Reasoning(text) => {
                    self.begin(Block::Thinking, || json!({"type": "thinking", "thinking": ""}), frames);
                    json!({"type": "thinking_delta", "thinking": text})
                }
                Piece::Text(text) => {
                    self.begin(Block::Text, || json!({"type": "text", "text": ""}), frames);
                    json!({"type": "text_delta", "text": text})
                }
                Piece::Call(_, name) => {
                    self.close(frames);
                    let id = call_id(&self.context.shared);
                    self.begin(
                        Block::Call,
                        || json!({"type": "tool_use", "id": id, "name": name, "input": {}}),
                        frames,
                    );
                    continue;
                }
                Piece::Arguments(_, text) => json!({"type": "input_json_delta", "partial_json": text}),
            };
            frames.push(named("content_block_delta", json!({"index": self.index, "delta": delta})));
        }
    }

    fn begin(&mut self, block: Block, start: impl FnOnce() -> Value, frames: &mut Vec<Bytes>) {
        if self.open == Some(block) {
            return;
        }
        self.close(frames);
        self.open = Some(block);
        frames.push(named("content_block_start", json!({"index": self.index, "content_block": start()})));
    }

    fn close(&mut self, frames: &mut Vec<Bytes>) {
        if self.open.take().is_some() {
            frames.push(named("content_block_stop", json!({"index": self.index})));
            self.index += 1;
        }
    }
}
