//! One exchange on its way through one filter, callback by callback, as the gateway takes it: the head, the body in the pieces
//! that come, the trailers. A filter that pauses is waited for in time that is only counted.

use super::changes::{Seen, shown};
use super::exchange_file::Message;
use super::watched::Watched;
use crate::workbench::waiting::{Patience, Waiting};
use bytes::{Bytes, BytesMut};
use serde_json::{Map, Value, json};
use turnstile_plugins::{Body, CallOutcome, CallResult, Callback, Effects, FieldMap, Lent, LocalResponse, Stream};

/// Calls that are answered one after the other between two pieces of a body.
const MAX_CALLS_BETWEEN: u32 = 1_000;
/// Callbacks that are told of, and the size of what is told, bytes; what is beyond is only counted.
const MAX_STEPS: usize = 10_000;
const MAX_STEP_BYTES: usize = 16 << 20;

/// A side of the exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// To the worker.
    Request,
    /// To the client.
    Response,
}

/// Why a side did not come through.
#[derive(Debug)]
pub enum End {
    /// The filter answers.
    Answer(Box<LocalResponse>),
    /// It broke the exchange off.
    Close,
    /// A callback did not return.
    Fault(String),
    /// It paused in this callback, and nothing ended that.
    Waits(Callback),
    /// It holds more of a body than it may.
    TooLarge,
}

impl End {
    /// In words.
    pub fn why(&self) -> String {
        match self {
            Self::Answer(response) => format!("it was answered with {}", response.status),
            Self::Close => "it was broken off".to_owned(),
            Self::Fault(fault) => fault.clone(),
            Self::Waits(at) => format!("the filter paused in {}, and nothing ended that", at.export()),
            Self::TooLarge => "the filter holds more of a body than held_body_bytes".to_owned(),
        }
    }
}

/// The exchange on its way.
pub struct Passage<'a> {
    waiting: Waiting<'a>,
    stream: Stream,
    pub env: Lent<Watched>,
    ended: [bool; 2],
    /// What of a side has come out.
    pub out: BytesMut,
    /// What each callback did, if the environment is watched.
    pub steps: Vec<Value>,
    step_bytes: usize,
    pub steps_left_out: u64,
}

/// A side as it is at one time.
struct Shot {
    head: Seen,
    trailers: Seen,
    body: Bytes,
}

impl<'a> Passage<'a> {
    /// Of an exchange that has not begun.
    pub fn new(waiting: Waiting<'a>, env: Watched) -> Self {
        let stream = waiting.plugin.open_stream(0);
        Self {
            waiting,
            stream,
            env: Lent::new(env),
            ended: [false; 2],
            out: BytesMut::new(),
            steps: Vec::new(),
            step_bytes: 0,
            steps_left_out: 0,
        }
    }

    /// Takes one side through. What comes out of its body is in `out`.
    ///
    /// # Errors
    /// Why it did not come through.
    pub fn half(&mut self, side: Side, message: &Message) -> Result<(), End> {
        self.out.clear();
        let last = message.trailers.is_empty();
        let ends = message.pieces.is_empty() && last;
        let head = match side {
            Side::Request => Callback::RequestHeaders,
            Side::Response => Callback::ResponseHeaders,
        };
        let outcome = self.call(side, head, json!({"end_of_stream": ends}), |stream, env| match side {
            Side::Request => stream.on_request_headers(env, ends),
            Side::Response => stream.on_response_headers(env, ends),
        })?;
        if paused(side, &outcome) {
            self.stopped(side, head, &outcome, ends)?;
        }
        if self.ended[side as usize] {
            return Ok(());
        }
        let held = self.body(side, &message.pieces, last)?;
        if last || self.ended[side as usize] { Ok(()) } else { self.trailers(side, message, held) }
    }

    /// The filter has stopped at the head. In Higress' dialect that may be until the body comes.
    fn stopped(&mut self, side: Side, head: Callback, outcome: &CallOutcome, ends: bool) -> Result<(), End> {
        let callback = match side {
            Side::Request => Callback::RequestBody,
            Side::Response => Callback::ResponseBody,
        };
        if !outcome.body_goes_on || (ends && (self.stream.has_calls() || !self.waiting.plugin.exports(callback))) {
            return self.wait(side, head);
        }
        if !ends {
            return Ok(());
        }
        self.put(side, Bytes::new());
        let facts = json!({"size": 0, "end_of_stream": true});
        let outcome = self.call(side, callback, facts, |stream, env| match side {
            Side::Request => stream.on_request_body(env, 0, true),
            Side::Response => stream.on_response_body(env, 0, true),
        })?;
        if paused(side, &outcome) { self.wait(side, callback) } else { Ok(()) }
    }

    /// The body, piece by piece. What is held at its end, before trailers.
    fn body(&mut self, side: Side, pieces: &[Bytes], last: bool) -> Result<Option<Bytes>, End> {
        let callback = match side {
            Side::Request => Callback::RequestBody,
            Side::Response => Callback::ResponseBody,
        };
        let most = self.waiting.plugin.spec().limits.held_body_bytes;
        let mut held: Option<Bytes> = None;
        for (at, piece) in pieces.iter().enumerate() {
            // It has put a last piece of its own into the answer.
            if self.ended[side as usize] {
                return Ok(None);
            }
            let end = at + 1 == pieces.len() && last;
            self.came(side, piece.len());
            if !self.waiting.plugin.exports(callback) {
                self.out.extend_from_slice(piece);
                continue;
            }
            let piece = match held.take() {
                Some(held) => Bytes::from([held, piece.clone()].concat()),
                None => piece.clone(),
            };
            let size = piece.len();
            self.put(side, piece);
            let facts = json!({"size": size, "end_of_stream": end});
            let outcome = self.call(side, callback, facts, |stream, env| match side {
                Side::Request => stream.on_request_body(env, size, end),
                Side::Response => stream.on_response_body(env, size, end),
            })?;
            if paused(side, &outcome) {
                if outcome.drops_body {
                    self.put(side, Bytes::new());
                }
                if self.seen(side).len() > most {
                    return Err(End::TooLarge);
                }
                match end {
                    true => self.wait(side, callback)?,
                    false if !self.released(side)? => {
                        held = Some(self.take(side));
                        continue;
                    }
                    false => {}
                }
            }
            let piece = self.take(side);
            if !self.ended[side as usize] {
                self.out.extend_from_slice(&piece);
            }
        }
        Ok(held)
    }

    /// What is held goes on before the trailers do.
    fn trailers(&mut self, side: Side, message: &Message, held: Option<Bytes>) -> Result<(), End> {
        let map = Some(FieldMap::new(message.trailers.clone()));
        let exchange = &mut self.env.exchange;
        match side {
            Side::Request => exchange.request_trailers = map,
            Side::Response => exchange.response_trailers = map,
        }
        self.put(side, held.unwrap_or_default());
        let callback = match side {
            Side::Request => Callback::RequestTrailers,
            Side::Response => Callback::ResponseTrailers,
        };
        let outcome = self.call(side, callback, json!({}), |stream, env| match side {
            Side::Request => stream.on_request_trailers(env),
            Side::Response => stream.on_response_trailers(env),
        })?;
        if paused(side, &outcome) {
            self.wait(side, callback)?;
        }
        let piece = self.take(side);
        self.out.extend_from_slice(&piece);
        Ok(())
    }

    /// The time that it is now, ms.
    pub fn now_ms(&self) -> u64 {
        self.waiting.now_ms
    }

    /// Answers calls that nothing waits for, and those that their replies lead to.
    ///
    /// # Errors
    /// Why a side ends by that.
    pub fn answer_calls(&mut self, side: Side) -> Result<(), End> {
        for _ in 0..MAX_CALLS_BETWEEN {
            let (asked, effects) = self.waiting.listen(&mut self.stream, &mut self.env, false).map_err(End::Fault)?;
            self.apply(side, &effects)?;
            if !asked {
                break;
            }
        }
        Ok(())
    }

    /// The end of the stream: the environment, and why a callback did not return.
    pub fn finish(self) -> (Lent<Watched>, Result<(), String>) {
        let Self { stream, mut env, .. } = self;
        let ended = stream.finish(&mut env).map_err(|fault| fault.to_string());
        (env, ended)
    }

    /// One callback, told of if the filter has it.
    fn call(
        &mut self,
        side: Side,
        callback: Callback,
        facts: Value,
        run: impl FnOnce(&mut Stream, &mut Lent<Watched>) -> CallResult,
    ) -> Result<CallOutcome, End> {
        if !self.waiting.plugin.exports(callback) {
            return Ok(CallOutcome::default());
        }
        let before = self.shot(side);
        let result = run(&mut self.stream, &mut self.env);
        let mut step = Map::from_iter([("callback".to_owned(), Value::from(callback.export()))]);
        step.extend(facts.as_object().cloned().unwrap_or_default());
        let returned = match &result {
            Ok(outcome) if outcome.drops_body => "pause, and nothing is held",
            Ok(outcome) if paused(side, outcome) => "pause",
            Ok(outcome) if outcome.effects.end_stream => "continue, and nothing follows",
            Ok(_) => "continue",
            Err(_) => "nothing",
        };
        step.insert("returned".to_owned(), returned.into());
        self.tell(step, side, before);
        let outcome = result.map_err(|fault| End::Fault(fault.to_string()))?;
        self.apply(side, &outcome.effects)?;
        Ok(outcome)
    }

    /// What was asked for beyond going on.
    fn apply(&mut self, side: Side, effects: &Effects) -> Result<(), End> {
        if let Some(response) = &effects.local_response {
            return Err(End::Answer(response.clone()));
        }
        if effects.close_downstream || effects.close_upstream {
            return Err(End::Close);
        }
        self.ended[side as usize] |= effects.end_stream;
        if side == Side::Response {
            for piece in &effects.injected {
                self.out.extend_from_slice(&piece.data);
                self.ended[side as usize] |= piece.end;
            }
        }
        Ok(())
    }

    /// Waits until the filter goes on, which has paused in a callback.
    fn wait(&mut self, side: Side, at: Callback) -> Result<(), End> {
        let before = self.shot(side);
        let mut patience = Patience::new(&self.waiting);
        loop {
            let (asked, effects) = self.waiting.listen(&mut self.stream, &mut self.env, true).map_err(End::Fault)?;
            let ended = self.apply(side, &effects);
            if ended.is_err() || continues(side, &effects) {
                let waited_ms = patience.waited_ms(&self.waiting);
                self.tell(Map::from_iter([("continued_after_ms".to_owned(), waited_ms.into())]), side, before);
                return ended;
            }
            if !patience.lasts(&mut self.waiting, asked) {
                return Err(End::Waits(at));
            }
        }
    }

    /// Whether calls that are answered between two pieces let go of what is held.
    fn released(&mut self, side: Side) -> Result<bool, End> {
        let before = self.shot(side);
        for _ in 0..MAX_CALLS_BETWEEN {
            let (asked, effects) = self.waiting.listen(&mut self.stream, &mut self.env, false).map_err(End::Fault)?;
            self.apply(side, &effects)?;
            if continues(side, &effects) {
                self.tell(Map::from_iter([("continued_after_ms".to_owned(), 0.into())]), side, before);
                return Ok(true);
            }
            if !asked {
                break;
            }
        }
        Ok(false)
    }

    fn tell(&mut self, step: Map<String, Value>, side: Side, before: Option<Shot>) {
        let (Some(before), Some(after)) = (before, self.shot(side)) else { return };
        let mut step = step;
        for (name, before, after) in
            [("headers", &before.head, &after.head), ("trailers", &before.trailers, &after.trailers)]
        {
            if before != after {
                step.insert(name.to_owned(), before.until(after));
            }
        }
        if before.body != after.body {
            step.insert("body".to_owned(), json!({"from": shown(&before.body), "to": shown(&after.body)}));
        }
        let step = Value::Object(step);
        let bytes = self.step_bytes.saturating_add(step.to_string().len());
        if self.steps.len() >= MAX_STEPS || bytes > MAX_STEP_BYTES {
            self.steps_left_out += 1;
            return;
        }
        self.step_bytes = bytes;
        self.steps.push(step);
    }

    /// The side as it is now, if that is told of.
    fn shot(&self, side: Side) -> Option<Shot> {
        self.env.accesses.as_ref()?;
        let exchange = &self.env.exchange;
        let trailers = |map: &Option<FieldMap>| map.as_ref().map(|map| Seen::of(map)).unwrap_or_default();
        Some(match side {
            Side::Request => Shot {
                head: Seen::of(&exchange.request),
                trailers: trailers(&exchange.request_trailers),
                body: exchange.body.bytes.clone(),
            },
            Side::Response => Shot {
                head: exchange.response.as_ref().map(|map| Seen::of(map)).unwrap_or_default(),
                trailers: trailers(&exchange.response_trailers),
                body: exchange.chunk.bytes.clone(),
            },
        })
    }

    fn came(&mut self, side: Side, bytes: usize) {
        match side {
            Side::Request => self.env.exchange.request_size += bytes,
            Side::Response => self.env.exchange.response_size += bytes,
        }
    }

    fn seen(&self, side: Side) -> &Bytes {
        match side {
            Side::Request => &self.env.exchange.body.bytes,
            Side::Response => &self.env.exchange.chunk.bytes,
        }
    }

    fn put(&mut self, side: Side, bytes: Bytes) {
        match side {
            Side::Request => self.env.exchange.body = Body::new(bytes),
            Side::Response => self.env.exchange.chunk = Body::new(bytes),
        }
    }

    fn take(&mut self, side: Side) -> Bytes {
        match side {
            Side::Request => self.env.exchange.take_body(),
            Side::Response => self.env.exchange.take_chunk(),
        }
    }
}

fn paused(side: Side, outcome: &CallOutcome) -> bool {
    match side {
        Side::Request => outcome.paused_request(),
        Side::Response => outcome.paused_response(),
    }
}

fn continues(side: Side, effects: &Effects) -> bool {
    match side {
        Side::Request => effects.continue_request,
        Side::Response => effects.continue_response || effects.injected.iter().any(|piece| piece.end),
    }
}
