//! `turnstile plugin run --phase filter`: one exchange through one filter, with all that it changed.
//!
//! The filter sees what the gateway's filters see ([`FilterEnv`](crate::filters::FilterEnv)), and the plugin host is the same;
//! the answers to its calls, and the worker's, stand in the file of the exchange.

pub mod callees;
mod changes;
pub mod exchange_file;
pub(crate) mod passage;
pub mod text;
pub(crate) mod watched;

use super::situation::arrived;
use super::subject::{Started, level_name};
use super::trace::{Access, Accesses};
use super::waiting::Waiting;
use crate::filters::FilterEnv;
use crate::policy::RequestHead;
use bytes::Bytes;
use changes::{Seen, fields, shown};
use exchange_file::{Exchange, Message};
use http::header::HOST;
use http::{HeaderMap, StatusCode};
use passage::{End, Passage, Side};
use serde_json::{Value, json};
use std::sync::Arc;
use turnstile_config::{Phase, PluginSource};
use turnstile_plugins::{FieldMap, HeaderPairs, LocalResponse, ResponseMap};
use watched::Watched;

/// What came of a trial.
pub struct Tried {
    /// All of it, the same for the same filter and exchange.
    pub report: Value,
    /// Why a gateway would have to do without the filter.
    pub failed: Option<String>,
}

/// What there is to tell at the end, beside the sides.
#[derive(Default)]
struct Verdict {
    answered: Option<Box<LocalResponse>>,
    waits: bool,
    closed: bool,
    too_large: bool,
    fault: Option<String>,
}

/// Takes an exchange through a filter.
pub fn run(started: &Started, exchange: &Exchange) -> Tried {
    let mut env = FilterEnv::new(head(exchange));
    env.route = "plugin-run";
    let request_before = Seen::of(&env.request);
    let watched = Watched { exchange: env, accesses: Some(Accesses::default()) };
    let waiting = Waiting::new(&started.plugin, started.services.callees(), pause_ms());
    let mut passage = Passage::new(waiting, watched);
    let mut verdict = Verdict::default();

    let passed = passage.half(Side::Request, &exchange.request);
    passage.env.exchange.request.seal();
    let request = passed.is_ok().then(|| {
        let exchange_now = &passage.env.exchange;
        let now = (&exchange_now.request as &dyn HeaderPairs, exchange_now.request_trailers.as_ref());
        side(&request_before, now, &exchange.request, &passage.out)
    });
    let answer = match passed {
        Ok(()) => exchange.response.clone(),
        Err(end) => verdict.end(end).map(|response| message_of(&response)),
    };
    let response = answer.and_then(|(status, message)| response(&mut passage, &mut verdict, status, &message));
    let (steps, left_out) = (std::mem::take(&mut passage.steps), passage.steps_left_out);
    let (env, ended) = passage.finish();
    if let (Err(fault), None) = (ended, &verdict.fault) {
        verdict.fault = Some(fault);
    }
    let log = started.services.take();
    let accesses = env.accesses.clone().unwrap_or_default();
    let log: Vec<Value> =
        log.iter().map(|(level, text)| json!({"level": level_name(*level), "message": text})).collect();
    let report = json!({
        "plugin": &**started.plugin.name(),
        "phase": Phase::Filter.as_str(),
        "steps": steps,
        "calls": started.services.callees().calls(),
        "request": request,
        "answered": verdict.answered.as_deref().map(answer_json),
        "response": response,
        "waits": verdict.waits,
        "closed": verdict.closed,
        "too_large": verdict.too_large,
        "fault": verdict.fault,
        "asked": accesses.list().iter().map(Access::to_json).collect::<Vec<_>>(),
        "not_shown": left_out + accesses.left_out(),
        "log": log,
    });
    let failed = verdict.fault.or_else(|| verdict.waits.then(|| "it paused, and nothing ended that".to_owned()));
    Tried { report, failed }
}

/// Takes an exchange through a filter and tells nothing of it, for those who measure. `now_ms` is the time of its ticks, which goes on
/// while it waits.
///
/// # Errors
/// Why it does not go on: a callback did not return, a pause that nothing ends, too much of a body held.
pub fn pass(started: &Started, exchange: &Exchange, now_ms: &mut u64) -> Result<(), String> {
    let mut env = FilterEnv::new(head(exchange));
    env.route = "plugin-bench";
    let waiting = Waiting::new(&started.plugin, started.services.callees(), pause_ms()).at(*now_ms);
    let mut passage = Passage::new(waiting, Watched { exchange: env, accesses: None });
    let passed = passage.half(Side::Request, &exchange.request).and_then(|()| passage.answer_calls(Side::Request));
    passage.env.exchange.request.seal();
    let answer = match passed {
        Ok(()) => exchange.response.clone(),
        Err(End::Answer(response)) => Some(message_of(&response)),
        Err(End::Close) => None,
        Err(end) => return Err(end.why()),
    };
    if let Some((status, message)) = answer {
        passage.env.exchange.response = Some(ResponseMap::new(status, message.headers.clone()));
        match passage.half(Side::Response, &message).and_then(|()| passage.answer_calls(Side::Response)) {
            Ok(()) | Err(End::Answer(_) | End::Close) => {}
            Err(end) => return Err(end.why()),
        }
    }
    *now_ms = passage.now_ms();
    passage.finish().1
}

/// The answer's way to the client. Nothing if there is none any more.
fn response(passage: &mut Passage<'_>, verdict: &mut Verdict, status: StatusCode, message: &Message) -> Option<Value> {
    let map = ResponseMap::new(status, message.headers.clone());
    let before = Seen::of(&map);
    passage.env.exchange.response = Some(map);
    let passed = passage.half(Side::Response, message);
    let begun = !passage.out.is_empty();
    let own = match passed {
        Ok(()) => None,
        // In the place of an answer that has not begun; it is not shown to them again.
        Err(end) => match verdict.end(end) {
            Some(own) if !begun => Some(message_of(&own)),
            _ => return begun.then(|| json!({"broken_off": true, "body": shown(&passage.out)})),
        },
    };
    let exchange = &passage.env.exchange;
    let mut told = match &own {
        Some((status, own)) => {
            let map = ResponseMap::new(*status, own.headers.clone());
            side(&before, (&map, None), message, &own.pieces.concat())
        }
        None => {
            let map = exchange.response.as_ref()?;
            side(&before, (map, exchange.response_trailers.as_ref()), message, &passage.out)
        }
    };
    told["broken_off"] = false.into();
    Some(told)
}

/// A side as it came out, beside what came in.
fn side(before: &Seen, now: (&dyn HeaderPairs, Option<&FieldMap>), came: &Message, out: &[u8]) -> Value {
    let after = Seen::of(now.0);
    let mut told = before.until(&after);
    told["headers"] = after.json();
    told["body"] = shown(out);
    told["body_changed"] = (came.pieces.concat() != out).into();
    told["trailers"] = now.1.map_or_else(|| fields(&HeaderMap::new()), |map| Seen::of(map).json());
    told
}

fn head(exchange: &Exchange) -> RequestHead {
    let authority = exchange.request.headers.get(HOST);
    RequestHead {
        method: exchange.method.clone(),
        path: Bytes::from(exchange.path.clone()),
        authority: authority.map(|host| Bytes::copy_from_slice(host.as_bytes())).unwrap_or_default(),
        headers: Arc::new(exchange.request.headers.clone()),
        request_id: Arc::from("plugin-run"),
        peer: None,
        connection: 0,
        protocol: "HTTP/1.1",
        arrived: arrived(),
    }
}

/// How long a filter may pause with no call under way, where its configuration does not say.
fn pause_ms() -> u64 {
    turnstile_config::Plugin::new("", PluginSource::File(Default::default()), Phase::Filter).pause_timeout_ms
}

/// An answer of the filter's own as it comes from a worker.
pub fn message_of(response: &LocalResponse) -> (StatusCode, Message) {
    let headers = response.headers.iter().cloned().collect();
    let pieces = (!response.body.is_empty()).then(|| response.body.clone()).into_iter().collect();
    let status = StatusCode::from_u16(response.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    (status, Message { headers, pieces, trailers: HeaderMap::new() })
}

fn answer_json(response: &LocalResponse) -> Value {
    let (status, message) = message_of(response);
    json!({
        "status": status.as_u16(),
        "headers": fields(&message.headers),
        "body": shown(&response.body),
        "details": response.details,
        "grpc_status": response.grpc_status,
    })
}

impl Verdict {
    /// Keeps why a side did not come through; the answer, if the filter gives one.
    fn end(&mut self, end: End) -> Option<Box<LocalResponse>> {
        match end {
            End::Answer(response) => {
                self.answered = Some(response.clone());
                return Some(response);
            }
            End::Close => self.closed = true,
            End::Fault(fault) => self.fault = Some(fault),
            End::Waits(_) => self.waits = true,
            End::TooLarge => self.too_large = true,
        }
        None
    }
}

#[cfg(test)]
mod tests;
