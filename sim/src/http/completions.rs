//! `/v1/completions`.

use super::{
    chat::{cached_details, duplicate, finish_of, metadata, usage},
    fields::{self, Common},
    pieces::StopGuard,
    reply::{self, Body},
    validate::{self, Endpoint, Flaw},
};
use crate::{
    driver::Live,
    engine::{EventKind, Finish, Reason, Request},
    output::Script,
    server::{Shared, unix_us},
    tokenizer::{self, Decoder},
};
use bytes::Bytes;
use hyper::{Response, StatusCode, http::request::Parts};
use serde_json::{Map, Value, json};
use std::{collections::VecDeque, sync::Arc};

const ENDPOINT: Endpoint = Endpoint { path: "/v1/completions", function: "openai_v1_completions", line: 1860 };

/// Output length when none is given.
const DEFAULT_MAX_TOKENS: i64 = 16;

struct Context {
    shared: Arc<Shared>,
    common: Common,
    created: u64,
    stops: Vec<String>,
    count: usize,
    prompts: usize,
}

pub(super) async fn respond(shared: &Arc<Shared>, parts: &Parts, body: &[u8]) -> Response<Body> {
    match accept(shared, parts, body) {
        Ok((context, live)) if context.common.stream => stream(context, live).await,
        Ok((context, live)) => whole(context, live).await,
        Err(refused) => *refused,
    }
}

fn accept(shared: &Arc<Shared>, parts: &Parts, body: &[u8]) -> Result<(Context, Live), Box<Response<Body>>> {
    let body = validate::typed_object(ENDPOINT, &parts.headers, body).map_err(|error| error.flat())?;
    let prompts = prompts(&body).map_err(|flaw| fields::invalid(ENDPOINT, flaw))?;
    let common = fields::common(shared, ENDPOINT, &parts.headers, &body)?;
    let asked = fields::count(&body, "max_tokens").unwrap_or(DEFAULT_MAX_TOKENS);
    let mut max_new_tokens = None;
    for prompt in &prompts {
        max_new_tokens = fields::check_length(shared, prompt.len(), Some(asked))
            .map_err(|message| Box::new(reply::bad_request(&message)))?;
    }
    let base = Request {
        max_new_tokens,
        ignore_eos: fields::flag(&body, "ignore_eos"),
        stop: fields::stops(body.get("stop")),
        ..Request::default()
    };
    let mut requests = fields::choices(shared, &common, &prompts, &base);
    for request in &mut requests {
        request.script = Script::parse(&tokenizer::decode(&request.prompt));
    }
    let count = requests.len();
    let live = shared.driver().submit(common.rank, requests, common.stream).map_err(|rid| duplicate(&rid))?;
    let created = unix_us() / 1_000_000;
    let (stops, prompts) = (base.stop, prompts.len());
    Ok((Context { shared: Arc::clone(shared), common, created, stops, count, prompts }, live))
}

fn prompts(body: &Map<String, Value>) -> Result<Vec<Vec<u32>>, Flaw> {
    match body.get("prompt") {
        None => Err(Flaw::missing("prompt", body)),
        Some(Value::String(text)) => Ok(vec![tokenizer::encode(text)]),
        Some(value) => {
            let list = value.as_array().map(Vec::as_slice).unwrap_or_default();
            let texts: Option<Vec<Vec<u32>>> = list.iter().map(|text| text.as_str().map(tokenizer::encode)).collect();
            let lists = || list.iter().map(|ids| fields::ids(Some(ids))).collect::<Option<Vec<Vec<u32>>>>();
            let prompts = fields::ids(Some(value)).map(|ids| vec![ids]).or(texts).or_else(lists);
            prompts
                .filter(|prompts| prompts.iter().all(|prompt| !prompt.is_empty()))
                .ok_or_else(|| Flaw::at("string_type", "prompt", "Input should be a valid string", value))
        }
    }
}

impl Context {
    fn chunk(&self, id: &str, choices: Value) -> Map<String, Value> {
        let chunk = json!({
            "id": id, "object": "text_completion", "created": self.created, "model": self.common.model, "choices": choices,
        });
        match chunk {
            Value::Object(chunk) => chunk,
            _ => Map::new(),
        }
    }

    /// Usage over all choices; prompts count once each.
    fn usage(&self, prompts: &[(usize, usize)], completion: usize) -> Value {
        let firsts = || prompts.iter().step_by(self.common.n).take(self.prompts);
        let prompt = firsts().map(|(prompt, _)| prompt).sum();
        let cached = firsts().map(|(_, cached)| cached).sum();
        usage(&self.shared, prompt, cached, completion, 0)
    }
}

fn choice(index: usize, text: &str, reason: Value, matched: Value) -> Value {
    json!([{"index": index, "text": text, "logprobs": null, "finish_reason": reason, "matched_stop": matched}])
}

async fn whole(context: Context, mut live: Live) -> Response<Body> {
    let mut outputs: Vec<(Decoder, StopGuard, String)> =
        (0..context.count).map(|_| (Decoder::default(), StopGuard::new(&context.stops), String::new())).collect();
    let mut ends: Vec<Option<Finish>> = vec![None; context.count];
    while let Some((index, event)) = live.next().await {
        let Some((decoder, guard, text)) = outputs.get_mut(index) else { continue };
        match event {
            EventKind::Started { .. } => {}
            EventKind::Token { id, .. } => text.push_str(&guard.push(&decoder.push(id))),
            EventKind::Finished(finish) => {
                if let Reason::Rejected(status, message) = &finish.reason {
                    return reply::scheduler_error(*status, message);
                }
                text.push_str(&guard.finish());
                if let Some(end) = ends.get_mut(index) {
                    *end = Some(finish);
                }
            }
        }
    }
    let ends: Vec<Finish> = ends.into_iter().flatten().collect();
    let Some(first) = ends.first() else { return reply::internal() };
    let choices: Vec<Value> = outputs
        .iter()
        .zip(&ends)
        .enumerate()
        .filter_map(|(index, ((.., text), end))| {
            let (reason, matched) = finish_of(&end.reason, false);
            choice(index, text, Value::from(reason), matched).get_mut(0).map(Value::take)
        })
        .collect();
    let prompts: Vec<(usize, usize)> = ends.iter().map(|end| (end.prompt_tokens, end.cached_tokens)).collect();
    let mut body = context.chunk(live.rid(0), Value::Array(choices));
    body.insert("usage".to_owned(), context.usage(&prompts, ends.iter().map(|end| end.completion_tokens).sum()));
    body.insert("metadata".to_owned(), metadata(first.completion_tokens));
    if context.common.cached_tokens_details && first.cached_tokens > 0 {
        body.insert("sglext".to_owned(), json!({"cached_tokens_details": cached_details(first.cached_tokens)}));
    }
    reply::json_value(StatusCode::OK, &Value::Object(body))
}

#[derive(Default)]
struct Output {
    decoder: Decoder,
    guard: StopGuard,
    prompt: (usize, usize),
    tokens: usize,
}

struct Writer {
    context: Context,
    outputs: Vec<Output>,
    open: usize,
    failed: bool,
}

async fn stream(context: Context, mut live: Live) -> Response<Body> {
    let outputs: Vec<Output> =
        (0..context.count).map(|_| Output { guard: StopGuard::new(&context.stops), ..Output::default() }).collect();
    let mut writer = Writer { open: outputs.len(), outputs, context, failed: false };
    // As for chat, nothing goes out before there is something to say.
    let mut ready = VecDeque::new();
    while ready.is_empty() {
        match live.next().await {
            Some((index, event)) => ready.extend(writer.event(&live, index, event)),
            None => break,
        }
    }
    let frames = futures::stream::unfold((live, writer, ready), |(mut live, mut writer, mut ready)| async move {
        while ready.is_empty() {
            let (index, event) = live.next().await?;
            ready.extend(writer.event(&live, index, event));
        }
        ready.pop_front().map(|frame| (frame, (live, writer, ready)))
    });
    reply::event_stream(frames)
}

impl Writer {
    fn event(&mut self, live: &Live, index: usize, event: EventKind) -> Vec<Bytes> {
        let Some(output) = self.outputs.get_mut(index) else { return Vec::new() };
        let (text, reason, matched) = match event {
            EventKind::Started { prompt_tokens, cached_tokens } => {
                output.prompt = (prompt_tokens, cached_tokens);
                return Vec::new();
            }
            EventKind::Token { id, .. } => {
                output.tokens += 1;
                let text = output.decoder.push(id);
                (output.guard.push(&text), Value::Null, Value::Null)
            }
            EventKind::Finished(Finish { reason: Reason::Rejected(code, message), .. }) => {
                self.open -= 1;
                self.failed = true;
                return self.end(live, index, vec![reply::error_event(code, &message)]);
            }
            EventKind::Finished(end) => {
                self.open -= 1;
                let rest = output.guard.finish();
                let (reason, matched) = finish_of(&end.reason, false);
                (rest, Value::from(reason), matched)
            }
        };
        let mut chunk = self.context.chunk(live.rid(index), choice(index, &text, reason, matched));
        let completion = self.outputs.iter().map(|output| output.tokens).sum();
        let usage = if self.context.common.continuous_usage {
            let prompts: Vec<(usize, usize)> = self.outputs.iter().map(|output| output.prompt).collect();
            self.context.usage(&prompts, completion)
        } else {
            Value::Null
        };
        chunk.insert("usage".to_owned(), usage);
        self.end(live, index, vec![reply::data(&Value::Object(chunk))])
    }

    /// The frames of an event, and those after the last one.
    fn end(&self, live: &Live, index: usize, mut frames: Vec<Bytes>) -> Vec<Bytes> {
        if self.open > 0 {
            return frames;
        }
        let prompts: Vec<(usize, usize)> = self.outputs.iter().map(|output| output.prompt).collect();
        let cached = prompts.first().map(|(_, cached)| *cached).unwrap_or_default();
        if self.context.common.cached_tokens_details && cached > 0 && !self.failed {
            let mut chunk = self.context.chunk(live.rid(index), json!([]));
            chunk.insert("usage".to_owned(), Value::Null);
            chunk.insert("sglext".to_owned(), json!({"cached_tokens_details": cached_details(cached)}));
            frames.push(reply::data(&Value::Object(chunk)));
        }
        if self.context.common.include_usage {
            let mut chunk = self.context.chunk(live.rid(index), json!([]));
            let mut usage = self.context.usage(&prompts, self.outputs.iter().map(|output| output.tokens).sum());
            // The last chunk leaves null keys out.
            if let Some(usage) = usage.as_object_mut() {
                usage.retain(|_, value| !value.is_null());
            }
            chunk.insert("usage".to_owned(), usage);
            frames.push(reply::data(&Value::Object(chunk)));
        }
        frames.push(reply::done());
        frames
    }
}
