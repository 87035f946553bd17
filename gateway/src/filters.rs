//! Plugins of the phase `filter`: any Proxy-Wasm filter. Requests pass them first to last, responses last to first, as in
//! Envoy.
//!
//! The request is whole when they see it, so a request callback runs once for the headers and once for the body. A plugin
//! that pauses is asked again by its ticks; one that stays paused for [`PAUSE_LIMIT`] has failed.

use crate::errors::{Kind, Refusal};
use crate::forward::relay::{ResponseFilter, Stop};
use crate::gateway::Gateway;
use crate::generation::Generation;
use crate::policy::RequestHead;
use crate::policy::facts::{MAX_PATH, dotted};
use bytes::{Bytes, BytesMut};
use hashbrown::HashMap;
use http::header;
use pingora_http::ResponseHeader;
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use turnstile_config::{OnError, Phase};
use turnstile_plugins::{
    Body, BufferType, CallOutcome, CallResult, Callback, FaultKind, HeaderPairs, Lent, LocalResponse, MapType,
    RequestMap, ResponseMap, Status, Stream, StreamEnv,
};

/// How long a plugin may stay paused with nothing outstanding.
const PAUSE_LIMIT: Duration = Duration::from_secs(30);
/// How often a paused plugin is looked at.
const PAUSE_STEP: Duration = Duration::from_millis(10);
/// Properties that the plugins of one request may set together, and bytes of one.
const MAX_PROPERTIES: usize = 64;
const MAX_PROPERTY_BYTES: usize = 64 * 1024;

/// How a side of the exchange went through the filters.
pub enum FilterVerdict {
    /// It goes on.
    Go,
    /// A plugin answers.
    Answer(Box<LocalResponse>),
    /// A plugin with `on_error = "closed"` failed.
    Failed(Refusal),
}

/// What filters see of one exchange.
pub struct FilterEnv {
    head: RequestHead,
    request: RequestMap,
    body: Body,
    response: Option<ResponseMap>,
    chunk: Body,
    properties: HashMap<Vec<u8>, Vec<u8>>,
}

impl StreamEnv for FilterEnv {
    fn property(&mut self, path: &[u8]) -> Option<Cow<'_, [u8]>> {
        if let Some(value) = self.properties.get(path) {
            return Some(Cow::Borrowed(value));
        }
        let mut buffer = [0; MAX_PATH];
        let name = dotted(path, &mut buffer)?;
        if name == "response.code" {
            let code = i64::from(self.response.as_ref()?.status.as_u16());
            return Some(Cow::Owned(code.to_le_bytes().to_vec()));
        }
        if let Some(field) = name.strip_prefix("response.headers.") {
            return self.response.as_ref()?.get(field.as_bytes()).map(|v| Cow::Owned(v.into_owned()));
        }
        self.head.property(name, Some(self.body.bytes.len()))
    }

    fn set_property(&mut self, path: &[u8], value: &[u8]) -> Result<(), Status> {
        let known = self.properties.contains_key(path);
        if path.len() > MAX_PATH
            || value.len() > MAX_PROPERTY_BYTES
            || (!known && self.properties.len() >= MAX_PROPERTIES)
        {
            return Err(Status::BadArgument);
        }
        self.properties.insert(path.to_vec(), value.to_vec());
        Ok(())
    }

    fn header_map(&mut self, map: MapType) -> Option<&mut dyn HeaderPairs> {
        match map {
            MapType::RequestHeaders => Some(&mut self.request),
            MapType::ResponseHeaders => self.response.as_mut().map(|m| m as &mut dyn HeaderPairs),
            _ => None,
        }
    }

    fn buffer(&mut self, buffer: BufferType) -> Option<&[u8]> {
        match buffer {
            BufferType::RequestBody => Some(&self.body.bytes),
            BufferType::ResponseBody => Some(&self.chunk.bytes),
            _ => None,
        }
    }

    fn replace_buffer(&mut self, buffer: BufferType, range: Range<usize>, data: &[u8]) -> Result<(), Status> {
        match buffer {
            BufferType::RequestBody => self.body.replace(range, data),
            BufferType::ResponseBody => self.chunk.replace(range, data),
            _ => return Err(Status::NotFound),
        }
        Ok(())
    }
}

/// The filters of one exchange.
pub struct FilterRun {
    generation: Arc<Generation>,
    env: Lent<FilterEnv>,
    /// By position in the chain; nothing for plugins of other phases and for those that failed.
    streams: Vec<Option<Stream>>,
    /// How many of them, from the first, have seen the request and let it go on: those see the answer.
    entered: usize,
    /// They have seen the head of an answer.
    answered: bool,
}

impl FilterRun {
    /// Contexts for all filters, not yet entered.
    pub fn new(gateway: &Gateway, generation: &Arc<Generation>, head: RequestHead, body: Bytes) -> Self {
        let shard = gateway.next_shard();
        let open = |c: &crate::policy::ChainPlugin| (c.phase == Phase::Filter).then(|| c.plugin.open_stream(shard));
        let streams = generation.chain.iter().map(open).collect();
        let env = FilterEnv {
            request: head.request_map(),
            head,
            body: Body::new(body),
            response: None,
            chunk: Body::default(),
            properties: HashMap::new(),
        };
        Self { generation: Arc::clone(generation), env: Lent::new(env), streams, entered: 0, answered: false }
    }

    /// The request side.
    pub async fn request(&mut self) -> FilterVerdict {
        for at in 0..self.streams.len() {
            let eos = self.env.body.bytes.is_empty();
            if let Some(verdict) = self.step(at, Side::Request, |s, env| s.on_request_headers(env, eos)).await {
                return verdict;
            }
            let size = self.env.body.bytes.len();
            if size > 0
                && let Some(verdict) = self.step(at, Side::Request, |s, env| s.on_request_body(env, size, true)).await
            {
                return verdict;
            }
            self.entered = at + 1;
        }
        FilterVerdict::Go
    }

    /// The response head. What the filters changed is written back to `head`.
    pub async fn response_headers(&mut self, head: &mut ResponseHeader) -> FilterVerdict {
        self.answered = true;
        self.env.response = Some(ResponseMap::new(head.status, head.headers.clone()));
        for at in (0..self.entered).rev() {
            if let Some(verdict) = self.step(at, Side::Response, |s, env| s.on_response_headers(env, false)).await {
                return verdict;
            }
        }
        let Some(map) = self.env.response.clone() else { return FilterVerdict::Go };
        let framing = head.headers.get(header::TRANSFER_ENCODING).cloned();
        let Ok(mut changed) = ResponseHeader::build(map.status, Some(map.fields.fields.len() + 1)) else {
            return FilterVerdict::Go;
        };
        for (name, value) in &map.fields.fields {
            // The body may still change, so no length holds; framing is the gateway's.
            if *name != header::CONTENT_LENGTH && *name != header::TRANSFER_ENCODING {
                let _ = changed.append_header(name.clone(), value.clone());
            }
        }
        if let Some(framing) = framing {
            let _ = changed.insert_header(header::TRANSFER_ENCODING, framing);
        }
        *head = changed;
        FilterVerdict::Go
    }

    /// Whether an answer may still be shown to them: the first one only.
    pub fn takes_answer(&self) -> bool {
        !self.answered && self.entered > 0
    }

    /// What the client gets, for their logs.
    pub fn answered(&mut self, head: &ResponseHeader) {
        self.answered = true;
        self.env.response = Some(ResponseMap::new(head.status, head.headers.clone()));
    }

    /// The response body, chunk by chunk.
    pub fn response_body(&mut self) -> ChunkFilter<'_> {
        let held = self.streams.iter().map(|_| BytesMut::new()).collect();
        let reach = self.entered;
        ChunkFilter { run: self, held, reach }
    }

    /// The request as the filters left it.
    pub fn changed_request(&mut self) -> (RequestHead, Bytes) {
        let mut head = self.env.head.clone();
        let mut headers = self.env.request.fields.fields.clone();
        if let Ok(host) = http::HeaderValue::from_bytes(&self.env.request.authority) {
            headers.insert(header::HOST, host);
        }
        head.headers = Arc::new(headers);
        head.path = self.env.request.path.clone();
        head.method = self.env.request.method.clone();
        (head, self.env.body.bytes.clone())
    }

    /// Ends all contexts, once.
    pub fn finish(&mut self) {
        for slot in &mut self.streams {
            if let Some(stream) = slot.take() {
                let name = Arc::clone(stream.plugin_name());
                if let Err(fault) = stream.finish(&mut self.env) {
                    tracing::debug!(plugin = %name, kind = %fault.kind, "filter failed at the end");
                }
            }
        }
    }

    /// One callback of one filter, pauses included. Nothing means: go on.
    async fn step(
        &mut self,
        at: usize,
        side: Side,
        call: impl FnOnce(&mut Stream, &mut Lent<FilterEnv>) -> CallResult,
    ) -> Option<FilterVerdict> {
        let stream = self.streams.get_mut(at)?.as_mut()?;
        let outcome = match call(stream, &mut self.env) {
            Ok(outcome) => outcome,
            Err(fault) => return self.failed(at, fault.kind, &fault.message),
        };
        if let Some(response) = outcome.effects.local_response {
            return Some(FilterVerdict::Answer(response));
        }
        if side.paused(&outcome) { self.wait(at, side).await } else { None }
    }

    async fn wait(&mut self, at: usize, side: Side) -> Option<FilterVerdict> {
        let until = tokio::time::Instant::now() + PAUSE_LIMIT;
        loop {
            tokio::time::sleep(PAUSE_STEP).await;
            let effects = self.streams.get_mut(at)?.as_mut()?.take_effects();
            if let Some(response) = effects.local_response {
                return Some(FilterVerdict::Answer(response));
            }
            if side.continues(effects.continue_request, effects.continue_response) {
                return None;
            }
            if tokio::time::Instant::now() >= until {
                return self.failed(at, FaultKind::Deadline, "paused with nothing outstanding");
            }
        }
    }

    fn failed(&mut self, at: usize, kind: FaultKind, message: &str) -> Option<FilterVerdict> {
        self.given_up(at, kind, message).map(|words| FilterVerdict::Failed(Refusal::new(Kind::Plugin, words)))
    }

    /// Takes a filter that failed out of the exchange. What to tell the client, if nothing may pass without it.
    fn given_up(&mut self, at: usize, kind: FaultKind, message: &str) -> Option<String> {
        let plugin = self.generation.chain.get(at)?;
        tracing::warn!(plugin = %plugin.name, %kind, message, "filter failed");
        if let Some(slot) = self.streams.get_mut(at) {
            *slot = None;
        }
        match plugin.on_error {
            OnError::Open => None,
            OnError::Closed | OnError::Fallback => Some(format!("the filter {} failed", plugin.name)),
        }
    }
}

impl Drop for FilterRun {
    /// A request that is given up in between, as when the gateway stops, ends for its filters too.
    fn drop(&mut self) {
        self.finish();
    }
}

#[derive(Clone, Copy)]
enum Side {
    Request,
    Response,
}

impl Side {
    fn paused(self, outcome: &CallOutcome) -> bool {
        match self {
            Side::Request => outcome.paused_request(),
            Side::Response => outcome.paused_response(),
        }
    }

    fn continues(self, request: bool, response: bool) -> bool {
        match self {
            Side::Request => request,
            Side::Response => response,
        }
    }
}

/// The response-body side of the filters. A filter that pauses holds what it has seen until it goes on or the body ends.
pub struct ChunkFilter<'a> {
    run: &'a mut FilterRun,
    held: Vec<BytesMut>,
    /// How many of them, from the first, see what comes: once one has ended the answer, those in front of it.
    reach: usize,
}

impl ResponseFilter for ChunkFilter<'_> {
    fn chunk(&mut self, chunk: Bytes, end: bool) -> Result<Bytes, Stop> {
        let mut chunk = chunk;
        for at in (0..self.reach).rev() {
            let plugin = self.run.generation.chain.get(at).map(|c| &c.plugin);
            let wants = plugin.is_some_and(|plugin| plugin.exports(Callback::ResponseBody));
            let most = plugin.map_or(0, |plugin| plugin.spec().limits.held_body_bytes);
            let (Some(Some(stream)), Some(held)) = (self.run.streams.get_mut(at), self.held.get_mut(at)) else {
                continue;
            };
            if !wants || (chunk.is_empty() && !end) {
                continue;
            }
            if !held.is_empty() {
                held.extend_from_slice(&chunk);
                chunk = std::mem::take(held).freeze();
            }
            let size = chunk.len();
            self.run.env.chunk = Body::new(chunk);
            let outcome = stream.on_response_body(&mut self.run.env, size, end);
            chunk = std::mem::take(&mut self.run.env.chunk).bytes;
            let failed = match outcome {
                Ok(mut outcome) => {
                    if let Some(response) = outcome.effects.local_response.take() {
                        self.reach = at;
                        return Err(Stop::Answers(response));
                    }
                    let holds = outcome.paused_response() && !end;
                    if holds && chunk.len() <= most {
                        // Nobody else holds it, so that what is held is not copied with every chunk.
                        *held = BytesMut::from(std::mem::take(&mut chunk));
                    }
                    // Nothing is left of a chunk that is held.
                    (holds && !chunk.is_empty())
                        .then(|| (FaultKind::Memory, format!("it holds more than {most} bytes of a response body")))
                }
                Err(fault) => Some((fault.kind, fault.message)),
            };
            if let Some((kind, message)) = failed
                && let Some(words) = self.run.given_up(at, kind, &message)
            {
                self.reach = at;
                return Err(Stop::Failed(words));
            }
        }
        Ok(chunk)
    }
}
