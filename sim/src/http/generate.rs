//! `/generate`, the native endpoint.

use super::{
    fields::{self, Refused},
    frontend,
    pieces::StopGuard,
    reply::{self, Body},
    validate::{self, Endpoint, Flaw},
};
use crate::{
    driver::Live,
    engine::{EventKind, Finish, Reason, Request, SessionParams},
    output::Script,
    pytext::{repr, repr_str},
    server::{Shared, unix_us},
    tokenizer::{self, Decoder},
};
use bytes::Bytes;
use hyper::{Response, StatusCode, http::request::Parts};
use serde_json::{Map, Value, json};
use std::{sync::Arc, time::Instant};

const ENDPOINT: Endpoint = Endpoint { path: "/generate", function: "generate_request", line: 928 };

/// Output length when none is given.
const DEFAULT_MAX_NEW_TOKENS: i64 = 128;

const SAMPLING_FIELDS: [&str; 28] = [
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "n",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "stream_interval",
    "logit_bias",
    "sampling_seed",
    "custom_params",
    "beam_width",
    "watermark",
    "choice",
];

struct Call {
    shared: Arc<Shared>,
    live: Live,
    count: usize,
    list: bool,
    stops: Vec<String>,
    began: Instant,
}

pub(super) async fn respond(shared: &Arc<Shared>, parts: &Parts, body: &[u8]) -> Response<Body> {
    match accept(shared, parts, body) {
        Ok((call, true)) => stream(call),
        Ok((call, false)) => whole(call).await,
        Err(refused) => *refused,
    }
}

fn native(message: &str) -> Refused {
    Box::new(reply::native_error(message))
}

/// An error that is only a text, as the field decoder gives it.
fn decoder_error(message: &str) -> Refused {
    Box::new(reply::json_value(StatusCode::BAD_REQUEST, &json!({"error": message})))
}

fn accept(shared: &Arc<Shared>, parts: &Parts, body: &[u8]) -> Result<(Call, bool), Refused> {
    let body = validate::object(ENDPOINT, body).map_err(|error| error.flat())?;
    if let Some(refused) = frontend::no_sessions(&shared.config, &body) {
        return Err(Box::new(refused));
    }
    let stream = fields::flag(&body, "stream");
    let session = session_params(&body)?;
    let session_id = fields::text(&body, "session_id");
    if session_id.is_some() && body.get("session_params").is_some_and(Value::is_object) {
        return Err(native("session_id and session_params cannot both be set."));
    }
    let (prompts, mut list) = prompts(&body, session.is_some())?;
    let sampling = body.get("sampling_params").and_then(Value::as_object).cloned().unwrap_or_default();
    if let Some(unknown) = sampling.keys().find(|key| !SAMPLING_FIELDS.contains(&key.as_str())) {
        let known: Vec<String> = SAMPLING_FIELDS.iter().map(|field| format!("`{field}`")).collect();
        return Err(decoder_error(&format!("unknown field `{unknown}`, expected one of {}", known.join(", "))));
    }
    let priority = match body.get("priority") {
        None | Some(Value::Null) => None,
        Some(Value::Number(number)) if number.as_i64().is_some() => number.as_i64(),
        Some(Value::Number(number)) => {
            let kind = if number.is_u64() { "integer" } else { "floating point" };
            return Err(decoder_error(&format!("invalid value: {kind} `{number}`, expected i64")));
        }
        Some(Value::String(text)) => {
            return Err(decoder_error(&format!("invalid type: string {}, expected i64", Value::from(text.as_str()))));
        }
        Some(other) => return Err(decoder_error(&format!("invalid type: {other}, expected i64"))),
    };
    let priority = fields::override_priority(shared, &parts.headers)?.or(priority);
    let rank = fields::override_header(shared, &parts.headers, "routed-dp-rank").and_then(|rank| rank.parse().ok());
    let rank = fields::rank(shared, rank.or_else(|| fields::body_rank(&body))).map_err(|message| native(&message))?;
    let n = fields::count(&sampling, "n").and_then(|n| usize::try_from(n).ok()).unwrap_or(1).clamp(1, 128);
    list |= n > 1;
    let given_rid = fields::override_header(shared, &parts.headers, "rid")
        .map(str::to_owned)
        .or_else(|| fields::text(&body, "rid"))
        .filter(|_| !list);
    let rids = body.get("rid").and_then(Value::as_array);
    let mut requests = Vec::with_capacity(prompts.len() * n);
    for (place, prompt) in prompts.into_iter().enumerate() {
        let asked = fields::count(&sampling, "max_new_tokens").unwrap_or(DEFAULT_MAX_NEW_TOKENS);
        let max_new_tokens = match (&session, fields::count(&sampling, "max_new_tokens")) {
            // Without a limit of its own an output is cut to what fits.
            (None, None) if prompt.len() < shared.config.context_length => usize::try_from(asked).ok(),
            _ => fields::check_length(shared, prompt.len(), Some(asked)).map_err(|message| native(&message))?,
        };
        let listed = rids.and_then(|rids| rids.get(place)).and_then(Value::as_str).filter(|_| n == 1);
        for _ in 0..n {
            requests.push(Request {
                rid: given_rid.clone().or_else(|| listed.map(str::to_owned)).unwrap_or_else(|| shared.new_id()),
                script: Script::parse(&tokenizer::decode(&prompt)),
                output: None,
                prompt: prompt.clone(),
                priority,
                max_new_tokens,
                ignore_eos: fields::flag(&sampling, "ignore_eos"),
                stop: fields::stops(sampling.get("stop")),
                namespace: fields::namespace(&body),
                tag: session_id.clone(),
                session: session.clone(),
            });
        }
    }
    let count = requests.len();
    let live = shared
        .driver()
        .submit(rank, requests, stream)
        .map_err(|rid| native(&format!("Duplicate request ID detected: {rid}")))?;
    let stops = fields::stops(sampling.get("stop"));
    Ok((Call { shared: Arc::clone(shared), live, count, list, stops, began: Instant::now() }, stream))
}

/// The prompts as tokens, and whether the answer is a list.
fn prompts(body: &Map<String, Value>, in_session: bool) -> Result<(Vec<Vec<u32>>, bool), Refused> {
    if let Some(ids) = body.get("input_ids").filter(|ids| !ids.is_null()) {
        let lists = ids.as_array().filter(|list| list.first().is_some_and(Value::is_array));
        let prompts: Option<Vec<Vec<u32>>> = match lists {
            Some(lists) => lists.iter().map(|list| fields::ids(Some(list))).collect(),
            None => fields::ids(Some(ids)).map(|ids| vec![ids]),
        };
        let Some(prompts) = prompts else { return Err(native("input_ids should be a list of token ids.")) };
        if !in_session && prompts.iter().any(Vec::is_empty) {
            return Err(native("input_ids cannot be empty."));
        }
        return Ok((prompts, lists.is_some()));
    }
    match body.get("text") {
        None | Some(Value::Null) => Err(native("Either text, input_ids or input_embeds should be provided.")),
        Some(Value::String(text)) => Ok((vec![tokenizer::encode(text)], false)),
        Some(Value::Array(texts)) if texts.iter().all(Value::is_string) => {
            Ok((texts.iter().filter_map(Value::as_str).map(tokenizer::encode).collect(), true))
        }
        Some(other) => {
            let flaw = |kind, branch: &str, message: &str| Flaw {
                kind,
                place: vec![repr_str("body"), repr_str("text"), repr_str(branch)],
                message: message.to_owned(),
                input: repr(other),
                context: None,
            };
            let flaws = [
                flaw("string_type", "str", "Input should be a valid string"),
                flaw("list_type", "list[str]", "Input should be a valid list"),
            ];
            Err(Box::new(reply::invalid(&validate::message(ENDPOINT, &flaws))))
        }
    }
}

/// The session of a turn; an unknown key breaks the handler.
fn session_params(body: &Map<String, Value>) -> Result<Option<SessionParams>, Refused> {
    let Some(params) = body.get("session_params").and_then(Value::as_object) else { return Ok(None) };
    let known = ["id", "rid", "offset", "replace", "drop_previous_output"];
    if params.keys().any(|key| !known.contains(&key.as_str())) {
        return Err(Box::new(reply::internal()));
    }
    Ok(fields::text(params, "id").map(|id| SessionParams {
        id,
        rid: fields::text(params, "rid"),
        offset: fields::count(params, "offset"),
        replace: fields::flag(params, "replace"),
        drop_previous_output: fields::flag(params, "drop_previous_output"),
    }))
}

#[expect(clippy::cast_precision_loss, reason = "seconds need no more")]
fn now_s() -> f64 {
    unix_us() as f64 / 1e6
}

fn finish_reason(reason: &Reason) -> Value {
    match reason {
        Reason::StopToken(id) => json!({"type": "stop", "matched": id}),
        Reason::StopText(text) => json!({"type": "stop", "matched": text}),
        Reason::Length(tokens) => json!({"type": "length", "length": tokens}),
        Reason::Aborted => json!({"type": "abort", "message": "Aborted", "status_code": null, "err_type": null}),
        Reason::AbortedInQueue => json!({"type": "abort", "message": "Abort in waiting queue"}),
        Reason::Rejected(status, message) => json!({"type": "abort", "status_code": status, "message": message}),
        Reason::Refused(message) => {
            json!({"type": "abort", "message": message, "status_code": 400, "err_type": "BadRequestError"})
        }
    }
}

/// `dp_rank`: none without data parallelism.
fn dp_rank(shared: &Shared, rank: usize) -> Option<usize> {
    (shared.config.dp_size > 1).then_some(rank)
}

/// `meta_info` of an output that ended. `latency_s`: how long it took; none leaves it out.
pub(super) fn meta_info(shared: &Shared, rid: &str, rank: usize, end: &Finish, latency_s: Option<f64>) -> Value {
    let versions = json!([{"version": "default", "start": 0, "end": end.completion_tokens}]);
    let latency = latency_s.unwrap_or_default();
    if matches!(end.reason, Reason::AbortedInQueue | Reason::Rejected(..)) {
        return json!({
            "id": rid, "finish_reason": finish_reason(&end.reason), "weight_version": "default", "e2e_latency": latency,
            "weight_versions": versions, "completion_tokens": 0, "response_sent_to_client_ts": now_s(),
        });
    }
    json!({
        "id": rid,
        "finish_reason": finish_reason(&end.reason),
        "prompt_tokens": end.prompt_tokens,
        "weight_version": "default",
        "num_retractions": end.retractions,
        "reasoning_tokens": if shared.config.reasoning { end.reasoning_tokens } else { 0 },
        "completion_tokens": end.completion_tokens,
        "cached_tokens": end.cached_tokens,
        "weight_versions": versions,
        "cached_tokens_details": super::chat::cached_details(end.cached_tokens),
        "dp_rank": dp_rank(shared, rank),
        "e2e_latency": latency,
        "response_sent_to_client_ts": now_s(),
    })
}

/// One output as it grows.
#[derive(Default)]
struct Output {
    decoder: Decoder,
    guard: StopGuard,
    text: String,
    ids: Vec<u32>,
    prompt: usize,
    cached: usize,
    started: bool,
    /// How much of text and ids went out already, when only what is new is sent.
    sent: (usize, usize),
}

impl Output {
    fn all(call: &Call) -> Vec<Self> {
        (0..call.count).map(|_| Self { guard: StopGuard::new(&call.stops), ..Self::default() }).collect()
    }

    fn push(&mut self, id: u32) {
        let text = self.decoder.push(id);
        self.text.push_str(&self.guard.push(&text));
        self.ids.push(id);
    }

    /// An output that ended, as its answer or last chunk.
    fn ended(&mut self, call: &Call, choice: usize, end: &Finish) -> Value {
        self.text.push_str(&self.guard.finish());
        if matches!(end.reason, Reason::Refused(_)) {
            self.text.clear();
        }
        let latency = call.began.elapsed().as_secs_f64();
        let meta = meta_info(&call.shared, call.live.rid(choice), call.live.rank(choice), end, Some(latency));
        self.body(meta)
    }

    fn body(&mut self, meta: Value) -> Value {
        let text = self.text.get(self.sent.0..).unwrap_or_default();
        let ids = self.ids.get(self.sent.1..).unwrap_or_default();
        json!({"text": text, "output_ids": ids, "meta_info": meta})
    }
}

async fn whole(mut call: Call) -> Response<Body> {
    let mut outputs = Output::all(&call);
    let mut answers = vec![Value::Null; call.count];
    while let Some((choice, event)) = call.live.next().await {
        let Some(output) = outputs.get_mut(choice) else { continue };
        match event {
            EventKind::Started { .. } => {}
            EventKind::Token { id, .. } => output.push(id),
            EventKind::Finished(end) => match &end.reason {
                Reason::Rejected(status, message) => return reply::scheduler_error(*status, message),
                Reason::Refused(message) => return reply::native_error(message),
                _ => {
                    let answer = output.ended(&call, choice, &end);
                    if let Some(slot) = answers.get_mut(choice) {
                        *slot = answer;
                    }
                }
            },
        }
    }
    let body = if call.list { Value::Array(answers) } else { answers.into_iter().next().unwrap_or_default() };
    reply::json_value(StatusCode::OK, &body)
}

/// Status and headers go out at once; each token gives a chunk.
fn stream(call: Call) -> Response<Body> {
    let outputs = Output::all(&call);
    let frames = futures::stream::unfold(Some((call, outputs)), |state| async move {
        let (mut call, mut outputs) = state?;
        loop {
            let Some((choice, event)) = call.live.next().await else { return Some((reply::done(), None)) };
            if let Some(frame) = outputs.get_mut(choice).and_then(|output| chunk(&call, choice, output, event)) {
                return Some((frame, Some((call, outputs))));
            }
        }
    });
    reply::event_stream(frames)
}

fn chunk(call: &Call, choice: usize, output: &mut Output, event: EventKind) -> Option<Bytes> {
    let mut body = match event {
        EventKind::Started { prompt_tokens, cached_tokens } => {
            (output.prompt, output.cached) = (prompt_tokens, cached_tokens);
            return None;
        }
        EventKind::Token { id, last } => {
            output.push(id);
            if last {
                return None;
            }
            let mut meta = json!({
                "id": call.live.rid(choice),
                "finish_reason": null,
                "prompt_tokens": output.prompt,
                "weight_version": "default",
                "num_retractions": 0,
                "reasoning_tokens": 0,
                "completion_tokens": output.ids.len(),
                "cached_tokens": output.cached,
                "cached_tokens_details": super::chat::cached_details(output.cached),
                "dp_rank": dp_rank(&call.shared, call.live.rank(choice)),
            });
            if let (false, Some(meta)) = (std::mem::replace(&mut output.started, true), meta.as_object_mut()) {
                meta.insert("response_sent_to_client_ts".to_owned(), json!(now_s()));
            }
            output.body(meta)
        }
        EventKind::Finished(end) => output.ended(call, choice, &end),
    };
    if call.shared.config.incremental_streaming_output {
        output.sent = (output.text.len(), output.ids.len());
    }
    if let (true, Some(body)) = (call.list, body.as_object_mut()) {
        body.insert("index".to_owned(), json!(choice));
    }
    Some(reply::data(&body))
}
