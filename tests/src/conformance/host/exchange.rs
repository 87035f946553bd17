//! One exchange: the request through the chain, an answer back through it, and the end of its contexts.

use super::chain::{Chain, End, Piece, Said};
use super::{LONGEST_WAIT_MS, Rig};
use crate::conformance::case::{Answer, Ask, Phase};
use crate::conformance::observed::{Fields, Recorded, Reply};
use crate::conformance::pattern::matches;
use crate::conformance::server::{fields, header_map};
use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode};
use parking_lot::{Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use turnstile_plugins::{
    Body, CallResult, Effects, FieldMap, HeaderPairs, HttpEnv, Injected, Lent, LocalResponse, RequestMap, ResponseMap,
    Stream,
};

/// The one host that requests can go to.
const HOST: &str = r#"{"health_status":"Healthy","metrics":"vllm:num_requests_waiting{model_name=\"m\"} 0\n"}"#;

/// What came of an exchange.
pub struct Outcome {
    /// What the client got; nothing if it left or the exchange broke.
    pub reply: Option<Reply>,
    /// What the upstream got.
    pub upstream: Option<Recorded>,
}

/// Which half of the exchange goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Request,
    Response,
}

struct Exchange<'a> {
    rig: &'a Rig,
    turn: Option<MutexGuard<'a, ()>>,
    env: Lent<HttpEnv>,
    streams: Vec<Option<Stream>>,
    /// Filters that have seen the request: those see the answer.
    entered: usize,
    leaves_at: Option<&'a str>,
    began: usize,
    left: bool,
    /// What filters have put into the answer's body, with their place.
    injected: Vec<(usize, Injected)>,
    /// What left the chain: headers that were sent cannot be changed any more.
    sent_request: Option<RequestMap>,
    sent_response: Option<ResponseMap>,
}

/// Why a half did not come to its end.
enum Broke {
    End(End),
    /// The client left.
    Left,
    /// Paused, and nothing happened.
    Stuck,
}

/// Runs one exchange. `hint`: which instance serves it.
///
/// # Errors
/// A pause that nothing ended.
pub fn run(rig: &Rig, ask: &Ask, answer: &Answer, hint: usize) -> Result<Outcome, String> {
    let in_background = |running: &super::Running| running.case.phase == Some(Phase::Background);
    let open = |running: &super::Running| (!in_background(running)).then(|| running.plugin.open_stream(hint));
    let streams = rig.plugins.iter().map(open).collect();
    let mut request = header_map(&ask.headers);
    request.entry("host").or_insert(http::HeaderValue::from_static("kit.test"));
    request.entry("content-type").or_insert(http::HeaderValue::from_static("application/json"));
    if let Some(length) = ask.body.length().filter(|_| ask.trailers.is_empty()) {
        request.insert("content-length", http::HeaderValue::from(length));
    }
    let method = Method::from_bytes(ask.method.as_bytes()).map_err(|error| error.to_string())?;
    let map = RequestMap::new(method, ask.path.clone(), Bytes::new(), request);
    let began = rig.services.lines.lock().len();
    let hosts = [("203.0.113.7:30000".to_owned(), HOST.to_owned())];
    let env = Lent::new(HttpEnv { hosts: Some(hosts.into()), ..HttpEnv::request(map) });
    let mut exchange = Exchange {
        rig,
        turn: rig.turns.as_ref().map(Mutex::lock),
        env,
        streams,
        entered: 0,
        leaves_at: ask.leaves_at.as_deref(),
        began,
        left: false,
        injected: Vec::new(),
        sent_request: None,
        sent_response: None,
    };
    let outcome = exchange.run(ask, answer);
    exchange.finish();
    outcome
}

impl Exchange<'_> {
    fn run(&mut self, ask: &Ask, answer: &Answer) -> Result<Outcome, String> {
        if !ask.trailers.is_empty() {
            self.env.request_trailers = Some(FieldMap::new(header_map(&ask.trailers)));
        }
        let pieces = pieces(&ask.body.pieces(), !ask.trailers.is_empty());
        let passed = self.half(Side::Request, pieces);
        let passed = match passed {
            Ok(passed) => passed,
            Err(broke) => return self.broken(broke).map(|reply| Outcome { reply, upstream: None }),
        };
        let upstream = Some(self.recorded(&passed));
        let reply = self.answered(answer)?;
        Ok(Outcome { reply, upstream })
    }

    /// The upstream's answer, on its way back.
    fn answered(&mut self, answer: &Answer) -> Result<Option<Reply>, String> {
        if answer.instead.is_some() {
            let none = Bytes::from_static(b"no answer from upstream");
            return self.reply(StatusCode::BAD_GATEWAY, HeaderMap::new(), none).map_err(stuck);
        }
        let mut headers = header_map(&answer.headers);
        if let Some(length) = answer.body.length().filter(|_| answer.trailers.is_empty()) {
            headers.insert("content-length", http::HeaderValue::from(length));
        }
        let status = StatusCode::from_u16(answer.status).map_err(|error| error.to_string())?;
        self.env.response = Some(ResponseMap::new(status, headers));
        if !answer.trailers.is_empty() {
            self.env.response_trailers = Some(FieldMap::new(header_map(&answer.trailers)));
        }
        let pieces = pieces(&answer.body.pieces(), !answer.trailers.is_empty());
        let passed = match self.half(Side::Response, pieces) {
            Ok(passed) => passed,
            Err(broke) => return self.broken(broke),
        };
        Ok(Some(self.sent(&passed)))
    }

    /// A half that broke, as the client sees it.
    fn broken(&mut self, broke: Broke) -> Result<Option<Reply>, String> {
        let local = match broke {
            Broke::Stuck => return Err("paused, and nothing ended it".into()),
            Broke::Left => {
                self.left = true;
                return Ok(None);
            }
            Broke::End(End::Closed) => return Ok(None),
            Broke::End(End::Answer(local)) => local,
            Broke::End(End::Failed) => Box::new(error(StatusCode::INTERNAL_SERVER_ERROR)),
            Broke::End(End::TooLarge) if self.env.response.is_none() => Box::new(error(StatusCode::PAYLOAD_TOO_LARGE)),
            Broke::End(End::TooLarge) => Box::new(error(StatusCode::INTERNAL_SERVER_ERROR)),
        };
        let mut headers = HeaderMap::new();
        for (name, value) in local.headers.clone() {
            headers.append(name, value);
        }
        let status = StatusCode::from_u16(local.status).map_err(|error| error.to_string())?;
        if self.env.response.is_some() {
            // They have seen the head of an answer already.
            headers.insert("content-length", http::HeaderValue::from(local.body.len()));
            self.sent_response = Some(ResponseMap::new(status, headers));
            let whole = [Piece::Headers(false), Piece::Data(local.body.clone(), true)];
            return Ok(Some(self.sent(&whole)));
        }
        self.reply(status, headers, local.body).map_err(stuck)
    }

    /// An answer that does not come from the upstream.
    fn reply(&mut self, status: StatusCode, mut headers: HeaderMap, body: Bytes) -> Result<Option<Reply>, Broke> {
        if !bodiless(status) {
            headers.insert("content-length", http::HeaderValue::from(body.len()));
        }
        self.env.response = Some(ResponseMap::new(status, headers));
        self.env.response_body = None;
        let pieces = pieces(&[body.to_vec()].into_iter().filter(|b| !b.is_empty()).collect::<Vec<_>>(), false);
        match self.half(Side::Response, pieces) {
            Ok(passed) => Ok(Some(self.sent(&passed))),
            // An answer to the answer: one is enough.
            Err(Broke::End(End::Answer(local))) => {
                let mut headers = HeaderMap::new();
                for (name, value) in local.headers.clone() {
                    headers.append(name, value);
                }
                let status = StatusCode::from_u16(local.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
                self.sent_response = Some(ResponseMap::new(status, headers));
                Ok(Some(self.sent(&[Piece::Headers(false), Piece::Data(local.body.clone(), true)])))
            }
            Err(Broke::Stuck) => Err(Broke::Stuck),
            Err(_) => Ok(None),
        }
    }

    /// One half of the exchange.
    fn half(&mut self, side: Side, pieces: Vec<Piece>) -> Result<Vec<Piece>, Broke> {
        // Requests go first to last, answers last to first.
        let order: Vec<usize> = match side {
            Side::Request => (0..self.streams.len()).collect(),
            Side::Response => (0..self.entered).rev().collect(),
        };
        let most = self.rig.plugins.iter().map(|running| running.plugin.spec().limits.held_body_bytes).min();
        // The last place is the other side's.
        let mut chain = Chain::new(order.len() + 1, most.unwrap_or(usize::MAX));
        let mut pieces = pieces.into_iter();
        let until = self.rig.now() + LONGEST_WAIT_MS;
        loop {
            while !chain.is_full()
                && let Some(piece) = pieces.next()
            {
                chain.push(piece, &mut |at, piece| self.ask(side, &order, at, piece)).map_err(Broke::End)?;
                self.inject(side, &order, &mut chain)?;
            }
            if chain.is_through() {
                break;
            }
            if self.client_left() {
                return Err(Broke::Left);
            }
            if self.rig.now() >= until {
                return Err(Broke::Stuck);
            }
            for (at, effects) in self.wait(&order)? {
                if let Some(local) = effects.local_response {
                    return Err(Broke::End(End::Answer(local)));
                }
                if effects.close_downstream || effects.close_upstream {
                    return Err(Broke::End(End::Closed));
                }
                if side == Side::Response {
                    self.injected.extend(effects.injected.into_iter().map(|piece| (at, piece)));
                    self.inject(side, &order, &mut chain)?;
                }
                let continues = match side {
                    Side::Request => effects.continue_request,
                    Side::Response => effects.continue_response,
                };
                if continues {
                    chain.resume(at, &mut |at, piece| self.ask(side, &order, at, piece)).map_err(Broke::End)?;
                }
            }
        }
        Ok(chain.out)
    }

    /// Lets a little time pass, with the exchange where callbacks of other contexts can reach it. What was asked for it since
    /// the last time, by place in the chain.
    fn wait(&mut self, order: &[usize]) -> Result<Vec<(usize, Effects)>, Broke> {
        let Self { rig, turn, env, streams, .. } = self;
        let mut asked = Vec::new();
        {
            let parked = env.park();
            for (at, plugin) in order.iter().enumerate() {
                let Some(slot) = streams.get_mut(*plugin) else { continue };
                let Some(stream) = slot else { continue };
                match stream.poll_effects(&mut Context::from_waker(Waker::noop()), parked.berth()) {
                    Poll::Ready(Ok(effects)) => asked.push((at, effects)),
                    Poll::Ready(Err(_)) => {
                        // Its instance is gone, through whatever took it.
                        *slot = None;
                        if !rig.plugins.get(*plugin).is_some_and(super::Running::is_open) {
                            return Err(Broke::End(End::Failed));
                        }
                        asked.push((
                            at,
                            Effects { continue_request: true, continue_response: true, ..Effects::default() },
                        ));
                    }
                    Poll::Pending => {}
                }
            }
            if rig.crowded {
                // Others have their turn.
                *turn = None;
                std::thread::sleep(Duration::from_millis(1));
                *turn = rig.turns.as_ref().map(Mutex::lock);
            }
            rig.pass();
        }
        for (at, plugin) in order.iter().enumerate() {
            if let Some(Some(stream)) = streams.get_mut(*plugin) {
                asked.push((at, stream.take_effects()));
            }
        }
        Ok(asked)
    }

    /// Asks a filter about a piece.
    fn ask(&mut self, side: Side, order: &[usize], at: usize, piece: &Piece) -> Said {
        let bytes = match piece {
            Piece::Data(bytes, _) => bytes.clone(),
            _ => Bytes::new(),
        };
        let Some(plugin) = order.get(at).copied() else {
            match side {
                _ if !matches!(piece, Piece::Headers(_)) => {}
                Side::Request => self.sent_request.clone_from(&self.env.request),
                Side::Response => self.sent_response.clone_from(&self.env.response),
            }
            return Said::Continue(bytes);
        };
        let Some(Some(stream)) = self.streams.get_mut(plugin) else { return Said::Continue(bytes) };
        if side == Side::Request && matches!(piece, Piece::Headers(_)) {
            self.entered = self.entered.max(plugin + 1);
        }
        let env = &mut self.env;
        let size = bytes.len();
        let result: CallResult = match (side, piece) {
            (Side::Request, Piece::Headers(end)) => stream.on_request_headers(env, *end),
            (Side::Response, Piece::Headers(end)) => stream.on_response_headers(env, *end),
            (Side::Request, Piece::Trailers) => stream.on_request_trailers(env),
            (Side::Response, Piece::Trailers) => stream.on_response_trailers(env),
            (Side::Request, Piece::Data(_, end)) => {
                env.request_body = Some(Body::new(bytes.clone()));
                stream.on_request_body(env, size, *end)
            }
            (Side::Response, Piece::Data(_, end)) => {
                env.response_body = Some(Body::new(bytes.clone()));
                stream.on_response_body(env, size, *end)
            }
        };
        let body = match side {
            Side::Request => env.request_body.take(),
            Side::Response => env.response_body.take(),
        };
        let bytes = body.map_or(bytes, |body| body.bytes);
        let outcome = match result {
            Ok(outcome) => outcome,
            Err(_) => {
                if let Some(slot) = self.streams.get_mut(plugin) {
                    *slot = None;
                }
                let is_open = self.rig.plugins.get(plugin).is_some_and(super::Running::is_open);
                return if is_open { Said::Continue(bytes) } else { Said::Stop(End::Failed) };
            }
        };
        let effects = &outcome.effects;
        if let Some(local) = &effects.local_response {
            return Said::Stop(End::Answer(local.clone()));
        }
        if effects.close_downstream || effects.close_upstream {
            return Said::Stop(End::Closed);
        }
        let injected = if side == Side::Response { outcome.effects.injected.as_slice() } else { &[] };
        let ends = injected.iter().any(|piece| piece.end);
        let goes_on = !outcome.paused_response() && matches!(piece, Piece::Data(..));
        if goes_on && !ends && !injected.is_empty() {
            // In front of what goes on.
            let pieces = injected.iter().map(|piece| &piece.data[..]).chain([&bytes[..]]);
            return Said::Continue(pieces.collect::<Vec<_>>().concat().into());
        }
        self.injected.extend(injected.iter().cloned().map(|piece| (at, piece)));
        if goes_on && ends {
            // What goes on comes too late.
            return Said::Pause(Bytes::new());
        }
        let paused = match side {
            Side::Request => outcome.paused_request(),
            Side::Response => outcome.paused_response(),
        };
        if paused
            && outcome.body_goes_on
            && (!matches!(piece, Piece::Headers(true)) || !stream_calls(&self.streams, plugin))
        {
            return Said::PauseHeaders;
        }
        if paused {
            return if outcome.flow_control { Said::Keep(bytes) } else { Said::Pause(bytes) };
        }
        if effects.end_stream {
            return Said::EndStream;
        }
        Said::Continue(bytes)
    }

    /// What filters have put into the answer's body goes on.
    fn inject(&mut self, side: Side, order: &[usize], chain: &mut Chain) -> Result<(), Broke> {
        while !self.injected.is_empty() {
            let (at, piece) = self.injected.remove(0);
            chain
                .inject(at, piece.data, piece.end, &mut |at, piece| self.ask(side, order, at, piece))
                .map_err(Broke::End)?;
        }
        Ok(())
    }

    fn client_left(&self) -> bool {
        let Some(pattern) = self.leaves_at else { return false };
        self.rig.lines_since(self.began).iter().any(|line| matches(pattern, line))
    }

    fn recorded(&self, passed: &[Piece]) -> Recorded {
        let Some(request) = &self.sent_request else { return Recorded::default() };
        let mut headers = fields(&request.fields.fields);
        headers.retain(|(name, _)| name != "host");
        headers.push(("host".into(), request.authority.to_vec()));
        Recorded {
            method: request.method.to_string(),
            path: String::from_utf8_lossy(&request.path).into_owned(),
            headers: with_length(headers, passed),
            body: body_of(passed),
            trailers: trailers_of(self.env.request_trailers.as_ref(), passed),
        }
    }

    fn sent(&self, passed: &[Piece]) -> Reply {
        let Some(response) = self.sent_response.as_ref().or(self.env.response.as_ref()) else {
            return Reply::default();
        };
        Reply {
            status: response.status.as_u16(),
            headers: match bodiless(response.status) {
                true => fields(&response.fields.fields),
                false => with_length(fields(&response.fields.fields), passed),
            },
            body: body_of(passed),
            trailers: trailers_of(self.env.response_trailers.as_ref(), passed),
            complete: true,
        }
    }

    fn finish(&mut self) {
        for slot in &mut self.streams {
            if let Some(mut stream) = slot.take() {
                if self.left {
                    stream.cancel_calls();
                }
                // A fault at the end is for the log; the exchange is over.
                let _ = stream.finish(&mut self.env);
            }
        }
    }
}

fn stream_calls(streams: &[Option<Stream>], at: usize) -> bool {
    streams.get(at).and_then(Option::as_ref).is_some_and(Stream::has_calls)
}

/// RFC 9110, 15.3.5 and 15.4.5: these never have a body.
fn bodiless(status: StatusCode) -> bool {
    status == StatusCode::NO_CONTENT || status == StatusCode::NOT_MODIFIED
}

fn stuck(_: Broke) -> String {
    "paused, and nothing ended it".into()
}

fn error(status: StatusCode) -> LocalResponse {
    let body = Bytes::from(format!("{status}"));
    LocalResponse { status: status.as_u16(), details: String::new(), body, headers: Vec::new(), grpc_status: None }
}

fn pieces(body: &[Vec<u8>], trailers: bool) -> Vec<Piece> {
    let mut pieces = vec![Piece::Headers(body.is_empty() && !trailers)];
    for (at, bytes) in body.iter().enumerate() {
        pieces.push(Piece::Data(Bytes::from(bytes.clone()), at + 1 == body.len() && !trailers));
    }
    if trailers {
        pieces.push(Piece::Trailers);
    }
    pieces
}

fn body_of(passed: &[Piece]) -> Vec<u8> {
    let pieces = passed.iter().filter_map(|piece| match piece {
        Piece::Data(bytes, _) => Some(bytes.as_ref()),
        _ => None,
    });
    pieces.collect::<Vec<_>>().concat()
}

fn trailers_of(map: Option<&FieldMap>, passed: &[Piece]) -> Fields {
    let passed = passed.contains(&Piece::Trailers);
    map.filter(|map| passed && !map.is_empty()).map(|map| fields(&map.fields)).unwrap_or_default()
}

/// Whoever sends a message frames it: the length is that of what is sent.
fn with_length(mut headers: Fields, passed: &[Piece]) -> Fields {
    let has = headers.iter().any(|(name, _)| name == "content-length");
    headers.retain(|(name, _)| name != "content-length" && name != "transfer-encoding");
    if has {
        headers.push(("content-length".into(), body_of(passed).len().to_string().into_bytes()));
    }
    headers
}
