//! `/v1/responses`.

use super::{
    chat::{self, call_id},
    fields::{self, Refused},
    pieces::{Answer, Piece, Pieces},
    reply::{self, Body},
    validate::{self, BodyError, Endpoint, Flaw},
};
use crate::{
    driver::Live,
    engine::{EventKind, Finish, Reason, Request},
    server::{Shared, unix_us},
};
use bytes::Bytes;
use hyper::{
    Response, StatusCode,
    header::{CACHE_CONTROL, HeaderValue},
    http::request::Parts,
};
use serde_json::{Map, Value, json};
use std::{collections::VecDeque, sync::Arc};

const ENDPOINT: Endpoint = Endpoint { path: "/v1/responses", function: "v1_responses_request", line: 2066 };

/// The real server gives two tokens fewer than `max_output_tokens`.
const WITHHELD_TOKENS: i64 = 2;

fn error(message: &str, kind: &str, param: Value) -> Refused {
    let body = json!({"error": {"message": message, "type": kind, "param": param, "code": 400}});
    Box::new(reply::json_value(StatusCode::BAD_REQUEST, &body))
}

fn invalid(message: &str) -> Refused {
    error(message, "Bad Request", Value::Null)
}

/// Retrieval and cancelling need a store, which a stock server does not have.
pub(super) fn by_id() -> Response<Body> {
    let message = "Response store is disabled. Stateful Responses require --enable-response-store on a standalone server; \
                   response storage is unavailable in PD mode.";
    *error(message, "invalid_request_error", Value::from("response_id"))
}

struct Context {
    shared: Arc<Shared>,
    body: Map<String, Value>,
    id: String,
    model: String,
    created: u64,
    tools: bool,
}

pub(super) async fn respond(shared: &Arc<Shared>, parts: &Parts, body: &[u8]) -> Response<Body> {
    match accept(shared, parts, body) {
        Ok((context, live, true)) => stream(context, live),
        Ok((context, live, false)) => whole(context, live).await,
        Err(refused) => *refused,
    }
}

fn accept(shared: &Arc<Shared>, parts: &Parts, body: &[u8]) -> Result<(Context, Live, bool), Refused> {
    let body = validate::typed_object(ENDPOINT, &parts.headers, body).map_err(|error| match error {
        BodyError::Schema(message) | BodyError::Type(message) | BodyError::Syntax(_, message) => invalid(&message),
        BodyError::Broken => Box::new(reply::internal()),
    })?;
    let flawed = |flaw: Flaw| invalid(&validate::message(ENDPOINT, &[flaw]));
    let Some(input) = body.get("input") else { return Err(flawed(Flaw::missing("input", &body))) };
    // The field is checked and then goes nowhere.
    if let Some(priority) = body.get("priority").filter(|priority| !priority.is_null()) {
        validate::integer("priority", priority).map_err(flawed)?;
    }
    let refuse = |message: &str| error(message, "invalid_request_error", Value::Null);
    let messages = chat_messages(&body, input);
    let tools: Vec<Value> = body
        .get("tools")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .map(|tool| {
            let mut function = tool.as_object().cloned().unwrap_or_default();
            function.remove("type");
            json!({"type": "function", "function": function})
        })
        .collect();
    let choice = body.get("tool_choice");
    let turn = chat::turn(shared, &messages, &tools, choice).map_err(|message| refuse(&message))?;
    let asked = fields::count(&body, "max_output_tokens").map(|asked| (asked - WITHHELD_TOKENS).max(0));
    let max_new_tokens = fields::check_length(shared, turn.prompt.len(), asked).map_err(|message| refuse(&message))?;
    let header = parts.headers.get("x-data-parallel-rank").and_then(|rank| rank.to_str().ok());
    let rank = header.and_then(|rank| rank.trim().parse().ok()).or_else(|| fields::body_rank(&body));
    let rank = fields::rank(shared, rank).map_err(|message| refuse(&message))?;
    let id = fields::text(&body, "request_id").unwrap_or_else(|| format!("resp_{}", shared.new_id()));
    let stream = fields::flag(&body, "stream");
    let request = Request {
        rid: id.clone(),
        prompt: turn.prompt,
        max_new_tokens,
        script: turn.script,
        namespace: fields::namespace(&body),
        tag: fields::text(&body, "session_id"),
        ..Request::default()
    };
    let live = shared
        .driver()
        .submit(rank, vec![request], stream)
        .map_err(|rid| refuse(&format!("Duplicate request ID detected: {rid}")))?;
    let context = Context {
        shared: Arc::clone(shared),
        id,
        model: fields::text(&body, "model").unwrap_or_default(),
        created: unix_us() / 1_000_000,
        tools: turn.tools,
        body,
    };
    Ok((context, live, stream))
}

fn chat_messages(body: &Map<String, Value>, input: &Value) -> Vec<Value> {
    let mut out = Vec::new();
    if let Some(instructions) = body.get("instructions").filter(|instructions| instructions.is_string()) {
        out.push(json!({"role": "system", "content": instructions}));
    }
    let Some(items) = input.as_array() else {
        out.push(json!({"role": "user", "content": input}));
        return out;
    };
    for item in items {
        let field = |name: &str| item.get(name).cloned().unwrap_or_default();
        match item.get("type").and_then(Value::as_str) {
            Some("function_call") => out.push(json!({"role": "assistant", "content": "", "tool_calls": [
                {"id": field("call_id"), "type": "function",
                 "function": {"name": field("name"), "arguments": field("arguments")}}]})),
            Some("function_call_output") => {
                out.push(json!({"role": "tool", "tool_call_id": field("call_id"), "content": field("output")}));
            }
            Some("reasoning") => {}
            _ => out.push(json!({"role": field("role"), "content": field("content")})),
        }
    }
    out
}

impl Context {
    fn given(&self, field: &str) -> Value {
        self.body.get(field).cloned().unwrap_or_default()
    }

    /// The response object.
    fn response(&self, output: Vec<Value>, end: Option<&Finish>) -> Value {
        let cut = end.is_some_and(|end| matches!(end.reason, Reason::Length(_)));
        let status = match end {
            None => "in_progress",
            Some(_) if cut => "incomplete",
            Some(_) => "completed",
        };
        let usage = end.map(|end| {
            let reasoning = if self.shared.config.reasoning { end.reasoning_tokens } else { 0 };
            json!({
                "input_tokens": end.prompt_tokens,
                "input_tokens_details": {"cached_tokens": end.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": end.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": reasoning},
                "total_tokens": end.prompt_tokens + end.completion_tokens,
            })
        });
        let or = |value: Value, default: Value| if value.is_null() { default } else { value };
        let has_text = output.iter().any(|item| item.get("type").and_then(Value::as_str) == Some("message"));
        let temperature = self.body.get("temperature").and_then(Value::as_f64);
        json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "output": output,
            "status": status,
            "usage": usage,
            "parallel_tool_calls": or(self.given("parallel_tool_calls"), json!(true)),
            "tool_choice": or(self.given("tool_choice"), json!("auto")),
            "tools": or(self.given("tools"), json!([])),
            "error": null,
            "incomplete_details": cut.then(|| json!({"reason": "max_output_tokens"})),
            "instructions": self.given("instructions"),
            "max_output_tokens": self.given("max_output_tokens"),
            "previous_response_id": null,
            "reasoning": {"effort": null, "summary": null},
            "store": or(self.given("store"), json!(true)),
            "temperature": temperature,
            "text": has_text.then(|| json!({"format": {"type": "text"}})),
            "top_p": self.body.get("top_p").and_then(Value::as_f64),
            "truncation": "disabled",
            "user": null,
            "metadata": {},
        })
    }
}

fn reasoning_item(id: &str, text: &str, status: &str) -> Value {
    json!({"id": id, "summary": [], "type": "reasoning", "content": [{"text": text, "type": "reasoning_text"}],
        "encrypted_content": null, "status": status})
}

fn text_part(text: &str) -> Value {
    json!({"annotations": [], "text": text, "type": "output_text", "logprobs": null})
}

fn message_item(id: &str, content: Value, status: &str) -> Value {
    json!({"id": id, "content": content, "role": "assistant", "status": status, "type": "message",
        "phase": "final_answer"})
}

fn call_item(id: &str, call_id: &str, name: &str, arguments: &str, status: &str) -> Value {
    json!({"arguments": arguments, "call_id": call_id, "name": name, "type": "function_call", "id": id, "status": status})
}

async fn whole(context: Context, mut live: Live) -> Response<Body> {
    let shared = &context.shared;
    let mut parser = Pieces::new(&shared.config, context.tools, &[]);
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
        return *error(&format!("{status}: {message}"), "invalid_request_error", Value::Null);
    }
    answer.add(parser.finish());
    let mut output = Vec::new();
    if !answer.reasoning.is_empty() {
        output.push(reasoning_item(&format!("rs_{}", shared.new_id()), &answer.reasoning, "completed"));
    }
    if !answer.text.is_empty() {
        let content = json!([text_part(&answer.text)]);
        output.push(message_item(&format!("msg_{}", shared.new_id()), content, "completed"));
    }
    for (name, arguments) in &answer.calls {
        let id = format!("fc_{}", shared.new_id());
        output.push(call_item(&id, &call_id(shared), name, arguments, "completed"));
    }
    reply::json_value(StatusCode::OK, &context.response(output, Some(&end)))
}

/// The output item that is open.
enum Open {
    Reasoning,
    Text,
    Call { call_id: String, name: String },
}

struct Writer {
    context: Context,
    parser: Pieces,
    sequence: u64,
    output: Vec<Value>,
    open: Option<(Open, String, String)>,
}

/// Status, headers and the first two events go out at once.
fn stream(context: Context, live: Live) -> Response<Body> {
    let parser = Pieces::new(&context.shared.config, context.tools, &[]);
    let mut writer = Writer { context, parser, sequence: 0, output: Vec::new(), open: None };
    let mut ready = VecDeque::new();
    for kind in ["response.created", "response.in_progress"] {
        let response = writer.context.response(Vec::new(), None);
        ready.push_back(writer.state(kind, response));
    }
    let frames = futures::stream::unfold((live, writer, ready), |(mut live, mut writer, mut ready)| async move {
        while ready.is_empty() {
            let (_, event) = live.next().await?;
            ready.extend(writer.event(event));
        }
        ready.pop_front().map(|frame| (frame, (live, writer, ready)))
    });
    let mut response = reply::event_stream(frames);
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

impl Writer {
    fn next_sequence(&mut self) -> u64 {
        self.sequence += 1;
        self.sequence - 1
    }

    /// An event that carries the whole response.
    fn state(&mut self, kind: &str, response: Value) -> Bytes {
        let event = json!({"type": kind, "response": response, "sequence_number": self.next_sequence()});
        reply::named(kind, &event)
    }

    /// An event about one item; its keys are in the order of the alphabet.
    fn item(&mut self, kind: &str, fields: Value) -> Bytes {
        let mut event: Vec<(String, Value)> = match fields {
            Value::Object(fields) => fields.into_iter().collect(),
            _ => Vec::new(),
        };
        event.push(("output_index".to_owned(), json!(self.output.len())));
        event.push(("sequence_number".to_owned(), json!(self.next_sequence())));
        event.sort_by(|a, b| a.0.cmp(&b.0));
        event.push(("type".to_owned(), json!(kind)));
        reply::named(kind, &Value::Object(event.into_iter().collect()))
    }

    fn event(&mut self, event: EventKind) -> Vec<Bytes> {
        let mut frames = Vec::new();
        match event {
            EventKind::Started { .. } => {}
            EventKind::Token { id, .. } => {
                let pieces = self.parser.push(id);
                self.pieces(pieces, &mut frames);
            }
            EventKind::Finished(end) => {
                if let Reason::Rejected(_, message) = &end.reason {
                    let mut response = self.context.response(Vec::new(), None);
                    if let Some(response) = response.as_object_mut() {
                        response.insert("status".to_owned(), json!("failed"));
                        response.insert("error".to_owned(), json!({"code": "server_error", "message": message}));
                    }
                    frames.push(self.state("response.failed", response));
                    return frames;
                }
                let rest = self.parser.finish();
                self.pieces(rest, &mut frames);
                self.close(&mut frames);
                let kind =
                    if matches!(end.reason, Reason::Length(_)) { "response.incomplete" } else { "response.completed" };
                let response = self.context.response(self.output.clone(), Some(&end));
                frames.push(self.state(kind, response));
            }
        }
        frames
    }

    fn pieces(&mut self, pieces: Vec<Piece>, frames: &mut Vec<Bytes>) {
        for piece in pieces {
            match piece {
                Piece::Reasoning(text) => {
                    if !matches!(self.open, Some((Open::Reasoning, ..))) {
                        self.close(frames);
                        let id = format!("rs_{}", self.context.shared.new_id());
                        let mut item = reasoning_item(&id, "", "in_progress");
                        if let Some(item) = item.as_object_mut() {
                            item.insert("content".to_owned(), json!([]));
                        }
                        frames.push(self.item("response.output_item.added", json!({"item": item})));
                        self.open = Some((Open::Reasoning, id, String::new()));
                    }
                    self.delta("response.reasoning_text.delta", &text, frames);
                }
                Piece::Text(text) => {
                    if !matches!(self.open, Some((Open::Text, ..))) {
                        self.close(frames);
                        let id = format!("msg_{}", self.context.shared.new_id());
                        let item = message_item(&id, json!([]), "in_progress");
                        frames.push(self.item("response.output_item.added", json!({"item": item})));
                        let part = json!({"content_index": 0, "item_id": id, "part": text_part("")});
                        frames.push(self.item("response.content_part.added", part));
                        self.open = Some((Open::Text, id, String::new()));
                    }
                    self.delta("response.output_text.delta", &text, frames);
                }
                Piece::Call(_, name) => {
                    self.close(frames);
                    let id = format!("fc_{}", self.context.shared.new_id());
                    let call_id = call_id(&self.context.shared);
                    let item = call_item(&id, &call_id, &name, "", "in_progress");
                    frames.push(self.item("response.output_item.added", json!({"item": item})));
                    self.open = Some((Open::Call { call_id, name }, id, String::new()));
                }
                Piece::Arguments(_, text) => self.delta("response.function_call_arguments.delta", &text, frames),
            }
        }
    }

    fn delta(&mut self, kind: &str, text: &str, frames: &mut Vec<Bytes>) {
        let Some((open, id, so_far)) = &mut self.open else { return };
        so_far.push_str(text);
        let mut fields = json!({"item_id": id, "delta": text});
        if let Some(fields) = fields.as_object_mut() {
            if !matches!(open, Open::Call { .. }) {
                fields.insert("content_index".to_owned(), json!(0));
            }
            if matches!(open, Open::Text) {
                fields.insert("logprobs".to_owned(), json!([]));
            }
        }
        frames.push(self.item(kind, fields));
    }

    /// Ends the open item.
    fn close(&mut self, frames: &mut Vec<Bytes>) {
        let Some((open, id, text)) = self.open.take() else { return };
        let item = match open {
            Open::Reasoning => {
                let done = json!({"content_index": 0, "item_id": id, "text": text});
                frames.push(self.item("response.reasoning_text.done", done));
                reasoning_item(&id, &text, "completed")
            }
            Open::Text => {
                let done = json!({"content_index": 0, "item_id": id, "logprobs": [], "text": text});
                frames.push(self.item("response.output_text.done", done));
                let part = json!({"content_index": 0, "item_id": id, "part": text_part(&text)});
                frames.push(self.item("response.content_part.done", part));
                message_item(&id, json!([text_part(&text)]), "completed")
            }
            Open::Call { call_id, name } => {
                let done = json!({"arguments": text, "item_id": id, "name": name});
                frames.push(self.item("response.function_call_arguments.done", done));
                call_item(&id, &call_id, &name, &text, "completed")
            }
        };
        frames.push(self.item("response.output_item.done", json!({"item": item})));
        self.output.push(item);
    }
}
