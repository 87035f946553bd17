//! `/v1/chat/completions`.

use super::{
    fields::{self, Common},
    pieces::{Answer, Piece, Pieces},
    reply::{self, Body},
    validate::{self, Endpoint, Flaw},
};
use crate::{
    driver::Live,
    engine::{EventKind, Finish, Reason, Request},
    output::Script,
    server::{Shared, unix_us},
    tokenizer,
};
use bytes::Bytes;
use hyper::{Response, StatusCode, http::request::Parts};
use serde_json::{Map, Value, json};
use std::{collections::VecDeque, sync::Arc};

const ENDPOINT: Endpoint =
    Endpoint { path: "/v1/chat/completions", function: "openai_v1_chat_completions", line: 1870 };

/// A conversation ready for the engine, however it was asked for.
pub(super) struct Turn {
    pub prompt: Vec<u32>,
    pub script: Script,
    /// The answer may call tools.
    pub tools: bool,
}

/// Everything that writing an answer needs.
struct Context {
    shared: Arc<Shared>,
    common: Common,
    tools: bool,
    stops: Vec<String>,
    created: u64,
    return_meta_info: bool,
    input_ids: Option<Vec<u32>>,
    output_ids: bool,
    framed_ids: bool,
}

/// Renders messages and tools; the message if the tool choice is wrong.
pub(super) fn turn(
    shared: &Shared,
    messages: &[Value],
    tools: &[Value],
    choice: Option<&Value>,
) -> Result<Turn, String> {
    let none = choice.and_then(Value::as_str) == Some("none");
    let tools = if none { &[] } else { tools };
    let (prompt, mut script) = fields::conversation(shared, messages, tools);
    let name_of = |tool: &Value| {
        let function = tool.get("function").unwrap_or(tool);
        function.get("name").and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    let named = choice.filter(|choice| choice.is_object()).map(name_of);
    let forced = match named {
        Some(name) if tools.iter().any(|tool| name_of(tool) == name) => Some(name),
        Some(name) => return Err(format!("Tool '{name}' not found in tools list.")),
        None if choice.and_then(Value::as_str) == Some("required") => tools.first().map(name_of),
        None => None,
    };
    if let (Some(name), true) = (forced, script.tools.is_empty()) {
        script.tools.push((name, json!({})));
    }
    Ok(Turn { prompt, script, tools: !tools.is_empty() })
}

pub(super) async fn respond(shared: &Arc<Shared>, parts: &Parts, body: &[u8]) -> Response<Body> {
    match accept(shared, parts, body) {
        Ok((context, live)) if context.common.stream => stream(context, live).await,
        Ok((context, live)) => whole(context, live).await,
        Err(refused) => *refused,
    }
}

/// Checks the request and gives it to the engine.
fn accept(shared: &Arc<Shared>, parts: &Parts, body: &[u8]) -> Result<(Context, Live), Box<Response<Body>>> {
    let body = validate::typed_object(ENDPOINT, &parts.headers, body).map_err(|error| error.flat())?;
    let messages = messages(&body).map_err(|flaw| fields::invalid(ENDPOINT, flaw))?;
    let common = fields::common(shared, ENDPOINT, &parts.headers, &body)?;
    if messages.is_empty() {
        return Err(Box::new(reply::bad_request("Messages cannot be empty.")));
    }
    let return_meta_info = fields::flag(&body, "return_meta_info");
    if common.stream && return_meta_info {
        let message = "return_meta_info is not supported with streaming. Please set stream=false when using \
                       return_meta_info=true.";
        return Err(Box::new(reply::flat_error(StatusCode::BAD_REQUEST, message, "BadRequest")));
    }
    let tools = body.get("tools").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let mut turn = turn(shared, messages, tools, body.get("tool_choice"))
        .map_err(|message| Box::new(reply::bad_request(&message)))?;
    if let Some(ids) = fields::ids(body.get("input_ids")) {
        turn.script = Script::parse(&tokenizer::decode(&ids));
        turn.prompt = ids;
    }
    let max_tokens = ["max_tokens", "max_completion_tokens"]
        .iter()
        .filter_map(|field| fields::count(&body, field))
        .reduce(|first, second| if first == 0 { second } else { first });
    let context_length = shared.config.context_length;
    if let Some(asked) = max_tokens.filter(|asked| usize::try_from(*asked).is_ok_and(|asked| asked > context_length)) {
        let message = format!(
            "max_completion_tokens is too large: {asked}.This model supports at most {context_length} completion tokens."
        );
        return Err(Box::new(reply::bad_request(&message)));
    }
    let max_new_tokens = fields::check_length(shared, turn.prompt.len(), max_tokens)
        .map_err(|message| Box::new(reply::bad_request(&message)))?;
    let base = Request {
        max_new_tokens,
        ignore_eos: fields::flag(&body, "ignore_eos"),
        stop: fields::stops(body.get("stop")),
        script: turn.script,
        ..Request::default()
    };
    let input_ids = fields::flag(&body, "return_input_ids_in_sglext").then(|| turn.prompt.clone());
    let requests = fields::choices(shared, &common, &[turn.prompt], &base);
    let live = shared.driver().submit(common.rank, requests, common.stream).map_err(|rid| duplicate(&rid))?;
    let context = Context {
        shared: Arc::clone(shared),
        common,
        tools: turn.tools,
        stops: base.stop,
        created: unix_us() / 1_000_000,
        return_meta_info,
        input_ids,
        output_ids: fields::flag(&body, "return_output_ids_in_sglext"),
        framed_ids: parts.headers.get("x-sglext-ids-framed").is_some_and(|value| value == "1"),
    };
    Ok((context, live))
}

/// The answer to an rid that is live already.
pub(super) fn duplicate(rid: &str) -> Box<Response<Body>> {
    Box::new(reply::bad_request(&format!("Duplicate request ID detected: {rid}")))
}

fn messages(body: &Map<String, Value>) -> Result<&[Value], Flaw> {
    match body.get("messages") {
        Some(Value::Array(messages)) => Ok(messages),
        Some(other) => Err(Flaw::at("list_type", "messages", "Input should be a valid list", other)),
        None => {
            let mut seen = body.clone();
            // A validator that runs first settles the tool choice.
            if !seen.contains_key("tool_choice") {
                let choice = if seen.contains_key("tools") { "auto" } else { "none" };
                seen.insert("tool_choice".to_owned(), Value::from(choice));
            }
            Err(Flaw::missing("messages", &seen))
        }
    }
}

/// `usage` of the OpenAI shapes.
pub(super) fn usage(shared: &Shared, prompt: usize, cached: usize, completion: usize, reasoning: usize) -> Value {
    let reasoning = if shared.config.reasoning { reasoning } else { 0 };
    json!({
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
        "prompt_tokens_details": shared.config.enable_cache_report.then(|| json!({"cached_tokens": cached})),
        "reasoning_tokens": reasoning,
        "completion_tokens_details": (reasoning > 0).then(|| json!({"reasoning_tokens": reasoning})),
    })
}

/// `sglext.cached_tokens_details`; null when nothing was cached.
pub(super) fn cached_details(cached: usize) -> Value {
    if cached > 0 { json!({"device": cached, "host": 0}) } else { Value::Null }
}

/// The finish reason and what matched, as the OpenAI shapes tell them.
pub(super) fn finish_of(reason: &Reason, called: bool) -> (&'static str, Value) {
    match reason {
        Reason::StopToken(id) if !called => ("stop", Value::from(*id)),
        Reason::StopText(text) if !called => ("stop", Value::from(text.as_str())),
        Reason::StopToken(_) | Reason::StopText(_) => ("tool_calls", Value::Null),
        Reason::Length(_) => ("length", Value::Null),
        _ => ("abort", Value::Null),
    }
}

/// A new tool-call id.
pub(super) fn call_id(shared: &Shared) -> String {
    format!("call_{}", shared.new_id().get(..24).unwrap_or_default())
}

/// The `metadata` of an answer.
pub(super) fn metadata(tokens: usize) -> Value {
    json!({"weight_version": "default", "weight_versions": [{"version": "default", "start": 0, "end": tokens}]})
}

async fn whole(context: Context, mut live: Live) -> Response<Body> {
    let shared = &context.shared;
    let count = context.common.n;
    let mut parsers: Vec<Pieces> =
        (0..count).map(|_| Pieces::new(&shared.config, context.tools, &context.stops)).collect();
    let mut answers = vec![Answer::default(); count];
    let mut outputs: Vec<Vec<u32>> = vec![Vec::new(); count];
    let mut ends: Vec<Option<Finish>> = vec![None; count];
    while let Some((choice, event)) = live.next().await {
        let (Some(parser), Some(answer)) = (parsers.get_mut(choice), answers.get_mut(choice)) else { continue };
        match event {
            EventKind::Started { .. } => {}
            EventKind::Token { id, .. } => {
                answer.add(parser.push(id));
                if let Some(output) = outputs.get_mut(choice) {
                    output.push(id);
                }
            }
            EventKind::Finished(finish) => {
                if let Reason::Rejected(status, message) = &finish.reason {
                    return reply::scheduler_error(*status, message);
                }
                answer.add(parser.finish());
                if let Some(end) = ends.get_mut(choice) {
                    *end = Some(finish);
                }
            }
        }
    }
    let ends: Vec<Finish> = ends.into_iter().flatten().collect();
    let Some(first) = ends.first() else { return reply::internal() };
    let mut choices = Vec::with_capacity(count);
    for (index, ((answer, end), parser)) in answers.iter().zip(&ends).zip(&parsers).enumerate() {
        let (reason, matched) = finish_of(&end.reason, parser.called());
        let mut message = json!({"role": "assistant", "content": answer.text, "reasoning_content": null});
        if !answer.reasoning.is_empty()
            && let Some(slot) = message.get_mut("reasoning_content")
        {
            *slot = Value::from(answer.reasoning.as_str());
        }
        if let (false, Some(message)) = (answer.calls.is_empty(), message.as_object_mut()) {
            let calls = answer.calls.iter().enumerate();
            let calls = calls.map(|(index, (name, arguments))| call_json(call_id(shared), index, name, arguments));
            message.insert("tool_calls".to_owned(), calls.collect());
        }
        let mut choice = json!({
            "index": index, "message": message, "logprobs": null, "finish_reason": reason, "matched_stop": matched,
        });
        if let (true, Some(choice)) = (context.return_meta_info, choice.as_object_mut()) {
            let meta = super::generate::meta_info(shared, live.rid(index), live.rank(index), end, None);
            choice.insert("meta_info".to_owned(), meta);
        }
        choices.push(choice);
    }
    let completion = ends.iter().map(|end| end.completion_tokens).sum();
    let reasoning = ends.iter().map(|end| end.reasoning_tokens).sum();
    let mut body = json!({
        "id": live.rid(0),
        "object": "chat.completion",
        "created": context.created,
        "model": context.common.model,
        "choices": choices,
        "usage": usage(shared, first.prompt_tokens, first.cached_tokens, completion, reasoning),
        "metadata": metadata(first.completion_tokens),
    });
    if let (Some(sglext), Some(body)) = (context.sglext(first.cached_tokens, &outputs), body.as_object_mut()) {
        body.insert("sglext".to_owned(), sglext);
    }
    reply::json_value(StatusCode::OK, &body)
}

fn call_json(id: String, index: usize, name: &str, arguments: &str) -> Value {
    json!({"id": id, "index": index, "type": "function", "function": {"name": name, "arguments": arguments}})
}

impl Context {
    /// What was asked for beside the answer.
    fn sglext(&self, cached: usize, outputs: &[Vec<u32>]) -> Option<Value> {
        let mut sglext = Map::new();
        if self.common.cached_tokens_details && cached > 0 {
            sglext.insert("cached_tokens_details".to_owned(), cached_details(cached));
        }
        if let Some(ids) = &self.input_ids {
            sglext.insert("input_ids".to_owned(), json!(ids));
        }
        if self.output_ids {
            sglext.insert("output_ids".to_owned(), json!(outputs));
        }
        (!sglext.is_empty()).then_some(Value::Object(sglext))
    }

    fn chunk(&self, id: &str, choices: Value) -> Map<String, Value> {
        let chunk = json!({
            "id": id, "object": "chat.completion.chunk", "created": self.created, "model": self.common.model,
            "choices": choices,
        });
        match chunk {
            Value::Object(chunk) => chunk,
            _ => Map::new(),
        }
    }
}

/// One choice of a stream.
struct Choice {
    parser: Pieces,
    begun: bool,
    prompt: usize,
    cached: usize,
    output: Vec<u32>,
    reasoning: usize,
}

/// Writes the events of a chat stream.
struct Writer {
    context: Context,
    choices: Vec<Choice>,
    open: usize,
    last_id: String,
    failed: bool,
}

async fn stream(context: Context, mut live: Live) -> Response<Body> {
    let choices: Vec<Choice> = (0..context.common.n)
        .map(|_| Choice {
            parser: Pieces::new(&context.shared.config, context.tools, &context.stops),
            begun: false,
            prompt: 0,
            cached: 0,
            output: Vec::new(),
            reasoning: 0,
        })
        .collect();
    let mut writer = Writer { open: choices.len(), choices, context, last_id: String::new(), failed: false };
    // Not even the status line goes out before there is something to say.
    let mut ready = VecDeque::new();
    while ready.is_empty() {
        match live.next().await {
            Some((choice, event)) => ready.extend(writer.event(&live, choice, event)),
            None => break,
        }
    }
    let frames = futures::stream::unfold((live, writer, ready), |(mut live, mut writer, mut ready)| async move {
        while ready.is_empty() {
            let (choice, event) = live.next().await?;
            ready.extend(writer.event(&live, choice, event));
        }
        ready.pop_front().map(|frame| (frame, (live, writer, ready)))
    });
    reply::event_stream(frames)
}

impl Writer {
    fn event(&mut self, live: &Live, index: usize, event: EventKind) -> Vec<Bytes> {
        let id = live.rid(index).to_owned();
        let mut frames = Vec::new();
        let Some(choice) = self.choices.get_mut(index) else { return frames };
        match event {
            EventKind::Started { prompt_tokens, cached_tokens } => {
                (choice.prompt, choice.cached) = (prompt_tokens, cached_tokens);
            }
            EventKind::Token { id: token, .. } => {
                choice.output.push(token);
                let pieces = choice.parser.push(token);
                if self.context.shared.config.reasoning
                    && pieces.iter().any(|piece| matches!(piece, Piece::Reasoning(_)))
                {
                    choice.reasoning = choice.output.len();
                }
                self.begin(index, &id, &mut frames);
                self.pieces(index, &id, pieces, &mut frames);
            }
            EventKind::Finished(finish) => {
                self.open -= 1;
                if let Reason::Rejected(code, message) = &finish.reason {
                    frames.push(reply::error_event(*code, message));
                    self.failed = true;
                } else {
                    let rest = choice.parser.finish();
                    let called = choice.parser.called();
                    self.begin(index, &id, &mut frames);
                    self.pieces(index, &id, rest, &mut frames);
                    let (reason, matched) = finish_of(&finish.reason, called);
                    let choices = json!([{
                        "index": index, "delta": {"reasoning_content": null}, "logprobs": null,
                        "finish_reason": reason, "matched_stop": matched,
                    }]);
                    frames.push(reply::data(&Value::Object(self.context.chunk(&id, choices))));
                }
                self.last_id = id;
                if let Some(choice) = self.choices.get_mut(index) {
                    choice.reasoning = finish.reasoning_tokens;
                }
                if self.open == 0 {
                    self.end(&mut frames);
                }
            }
        }
        frames
    }

    /// The first chunk of a choice: its role.
    fn begin(&mut self, index: usize, id: &str, frames: &mut Vec<Bytes>) {
        let Some(choice) = self.choices.get_mut(index) else { return };
        if !std::mem::replace(&mut choice.begun, true) {
            let delta = json!({"reasoning_content": null, "role": "assistant", "content": ""});
            let choices = json!([delta_choice(index, delta)]);
            frames.push(reply::data(&Value::Object(self.context.chunk(id, choices))));
        }
    }

    fn pieces(&self, index: usize, id: &str, pieces: Vec<Piece>, frames: &mut Vec<Bytes>) {
        let Some(choice) = self.choices.get(index) else { return };
        for piece in pieces {
            let call = matches!(piece, Piece::Call(..) | Piece::Arguments(..));
            let delta = match piece {
                Piece::Reasoning(text) => json!({"reasoning_content": text}),
                Piece::Text(text) => json!({"reasoning_content": null, "content": text}),
                Piece::Call(place, name) => {
                    let id = Value::from(call_id(&self.context.shared));
                    call_delta(json!({"id": id, "index": place, "type": "function",
                        "function": {"name": name, "arguments": ""}}))
                }
                Piece::Arguments(place, text) => call_delta(json!({"id": null, "index": place, "type": "function",
                    "function": {"name": null, "arguments": text}})),
            };
            let mut chunk = self.context.chunk(id, json!([delta_choice(index, delta)]));
            if self.context.common.continuous_usage {
                let (output, reasoning) = (choice.output.len(), choice.reasoning);
                chunk.insert(
                    "usage".to_owned(),
                    usage(&self.context.shared, choice.prompt, choice.cached, output, reasoning),
                );
            } else if call {
                chunk.insert("usage".to_owned(), Value::Null);
            }
            frames.push(reply::data(&Value::Object(chunk)));
        }
    }

    /// The chunks after the last choice.
    fn end(&self, frames: &mut Vec<Bytes>) {
        let context = &self.context;
        let (prompt, cached) = self.choices.first().map(|choice| (choice.prompt, choice.cached)).unwrap_or_default();
        let outputs: Vec<Vec<u32>> = self.choices.iter().map(|choice| choice.output.clone()).collect();
        if let (false, Some(sglext)) = (self.failed, context.sglext(cached, &outputs)) {
            let mut chunk = context.chunk(&self.last_id, json!([]));
            chunk.insert("usage".to_owned(), Value::Null);
            chunk.insert("sglext".to_owned(), sglext);
            let ids = context.input_ids.is_some() || context.output_ids;
            let chunk = Value::Object(chunk);
            let framed = context.framed_ids && ids;
            frames.push(if framed { reply::named("sglext_ids", &chunk) } else { reply::data(&chunk) });
        }
        if context.common.include_usage {
            let completion = outputs.iter().map(Vec::len).sum();
            let reasoning = self.choices.iter().map(|choice| choice.reasoning).sum();
            let mut chunk = context.chunk(&self.last_id, json!([]));
            chunk.insert("usage".to_owned(), usage(&context.shared, prompt, cached, completion, reasoning));
            frames.push(reply::data(&Value::Object(chunk)));
        }
        frames.push(reply::done());
    }
}

fn delta_choice(index: usize, delta: Value) -> Value {
    json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null, "matched_stop": null})
}

fn call_delta(call: Value) -> Value {
    json!({"role": null, "content": null, "reasoning_content": null, "tool_calls": [call]})
}
