//! Plugins of the phase `filter`: any Proxy-Wasm filter. Requests pass them first to last, responses last to first, as in
//! Envoy: heads, then bodies piece by piece, then trailers.
//!
//! A filter that pauses stops what passes it until one of its callbacks continues it: the reply to a call, a tick, a queue. Its
//! owner is woken then. One that stays paused for its `pause_timeout_ms` with none of its calls under way has failed.

mod env;
mod events;
mod held;
mod injected;
mod request;
mod response;
mod response_head;

use env::UpstreamConnection;
pub use env::{FilterEnv, PlacedAt};
use held::{HeldPart, joined};
pub use response::ChunkFilter;

use crate::errors::{Kind, Refusal};
use crate::gateway::Gateway;
use crate::generation::Generation;
use crate::higress::{Hosts, Wanted};
use crate::policy::{ChainPlugin, RequestHead};
use http::{HeaderMap, HeaderValue, header};
use pingora_core::protocols::http::client::HttpSession;
use std::borrow::Cow;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use turnstile_config::{OnError, Phase};
use turnstile_plugins::{
    CallOutcome, CallResult, Callback, Dialect, Effects, Fault, FaultKind, FieldMap, Injected, Lent, LocalResponse,
    ResponseMap, Stream,
};

/// How a side of the exchange went through the filters.
#[derive(Debug)]
pub enum FilterVerdict {
    /// It goes on.
    Go,
    /// A plugin answers.
    Answer(Box<LocalResponse>),
    /// A plugin with `on_error = "closed"` failed, or the client is gone, or a body is too large.
    Failed(Refusal),
    /// A plugin broke the exchange off.
    Close,
}

/// The filters of one exchange.
pub struct FilterRun {
    generation: Arc<Generation>,
    env: Lent<FilterEnv>,
    /// By position in the chain; nothing for plugins of other phases and for those that failed.
    streams: Vec<Option<Stream>>,
    /// How many of them, from the first, have seen the request: those see the answer.
    entered: usize,
    /// The filter whose headers callback has stopped what lies behind it, while its body callbacks go on.
    request_stopped: Option<usize>,
    /// The same of the answer, on its way back.
    response_stopped: Option<Stopped>,
    /// What filters have put into the answer's body, with their position, and whether one of them has ended it.
    injected: Vec<(usize, Injected)>,
    /// They have seen the head of an answer.
    answered: bool,
    /// The request has no body behind its head any more: a filter ended it there.
    request_ended: bool,
    /// The same of the answer.
    response_ended: bool,
    /// Nothing follows the head of the answer, and they were told.
    ends_with_head: bool,
    /// Those that failed in an event, by position in the chain: they hear of no more.
    deaf: Vec<bool>,
    /// Those with calls under way when the answer began, by position in the chain.
    asking: Vec<bool>,
    /// How the answer is framed for the client.
    framing: Option<HeaderValue>,
    /// Filters have changed the head of the answer since [`FilterRun::response_headers`].
    late_head: bool,
}

/// A filter at which the head of an answer waits.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Stopped {
    at: usize,
    /// Its body callbacks wait as well.
    all: bool,
}

/// What one callback came to.
enum Step {
    Go,
    Paused(BodyPause),
    End(FilterVerdict),
}

/// What becomes of the body when a filter pauses.
#[derive(Clone, Copy, PartialEq, Eq)]
enum BodyPause {
    /// Held, and shown again with what comes; too much of it is an error.
    Hold,
    /// Held, and not shown again; when it is too much, nothing more is read.
    FlowControl,
    /// It goes nowhere.
    Drop,
    /// The filter has paused at the head, and gets the body all the same.
    GoesOn,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Request,
    Response,
}

impl FilterRun {
    /// Contexts for all filters, not yet entered.
    pub fn new(gateway: &Gateway, generation: &Arc<Generation>, mut env: FilterEnv) -> Self {
        env.hosts = Some(Hosts::new(Arc::clone(&gateway.fleet), Arc::clone(generation)));
        let higress = |c: &ChainPlugin| c.plugin.spec().dialect == Dialect::Higress;
        if generation.chain.iter().any(higress)
            && let Ok(id) = HeaderValue::from_str(&env.head.request_id)
        {
            // There every request has its id in this header.
            env.request.fields.fields_mut().insert("x-request-id", id);
        }
        let shard = gateway.next_shard();
        let open = |c: &ChainPlugin| (c.phase == Phase::Filter).then(|| c.plugin.open_stream(shard));
        let streams: Vec<_> = generation.chain.iter().map(open).collect();
        Self {
            deaf: vec![false; streams.len()],
            asking: Vec::new(),
            generation: Arc::clone(generation),
            env: Lent::new(env),
            streams,
            entered: 0,
            request_stopped: None,
            response_stopped: None,
            injected: Vec::new(),
            framing: None,
            late_head: false,
            answered: false,
            request_ended: false,
            response_ended: false,
            ends_with_head: false,
        }
    }

    /// Whether an answer may still be shown to them: the first one only.
    pub fn takes_answer(&self) -> bool {
        !self.answered && self.entered > 0
    }

    /// What the client gets, for their logs.
    pub fn answered(&mut self, head: &pingora_http::ResponseHeader) {
        self.answered = true;
        let mut map = ResponseMap::new(head.status, head.headers.clone());
        map.seal();
        self.env.response = Some(map);
    }

    /// The status of the answer as the filters left it.
    pub fn status(&self) -> Option<u16> {
        self.env.response.as_ref().map(|map| map.status.as_u16())
    }

    /// Why the gateway or a plugin answers in a worker's place.
    pub fn answers_locally(&mut self, details: impl Into<Cow<'static, str>>) {
        self.env.code_details = details.into();
    }

    /// The request goes to a worker of a pool.
    pub fn placed(&mut self, pool: &Arc<str>, address: String) {
        self.env.placed = Some(PlacedAt { pool: Arc::clone(pool), address, connection: None });
        self.env.attempts += 1;
    }

    /// The worker's answer comes by this connection.
    pub fn connected(&mut self, session: &HttpSession) {
        if let Some(placed) = &mut self.env.placed {
            placed.connection = Some(UpstreamConnection::of(session));
        }
    }

    /// Where plugins of Higress' dialect want the request to go. What they wrote for that into its head is taken out.
    pub fn wanted(&mut self) -> Option<Wanted> {
        let host = self.env.override_host.take();
        Wanted::take(host, &mut self.env.request.fields)
    }

    /// The request's head as the filters left it.
    pub fn changed_head(&mut self) -> RequestHead {
        let mut head = self.env.head.clone();
        let request = &mut self.env.request;
        let named = request.fields.fields.get(header::HOST).map(HeaderValue::as_bytes);
        if named != Some(&request.authority[..])
            && let Ok(host) = HeaderValue::from_bytes(&request.authority)
        {
            request.fields.fields_mut().insert(header::HOST, host);
        }
        head.headers = Arc::clone(&request.fields.fields);
        head.path = request.path.clone();
        head.method = request.method.clone();
        request.seal();
        head
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

    /// Whether a filter is there and has this callback.
    fn wants(&self, at: usize, callback: Callback) -> bool {
        use Callback::{ResponseBody, ResponseHeaders, ResponseTrailers};
        let of_answers = matches!(callback, ResponseHeaders | ResponseBody | ResponseTrailers);
        let has = |c: &ChainPlugin| c.plugin.exports(callback) && !(of_answers && c.ignores_answers);
        self.streams.get(at).is_some_and(Option::is_some) && self.generation.chain.get(at).is_some_and(has)
    }

    /// Whether a filter may still have a say about an answer: in a callback for it, in an event, or in a reply that it waited
    /// for when the answer began.
    fn may_judge(&self, at: usize) -> bool {
        let asks = self.asking.get(at).is_some_and(|asking| *asking);
        asks || self.generation.chain.get(at).is_some_and(|c| c.sees_answers() || !c.events.is_empty())
    }

    /// Whether the worker's answer, which begins now, has to pass them. It goes past those that could do nothing about it, at no
    /// cost.
    pub fn take_part_in_answer(&mut self) -> bool {
        let (streams, chain) = (&self.streams, &self.generation.chain);
        let asks = |(slot, c): (&Option<Stream>, &ChainPlugin)| {
            c.plugin.acts_apart() && slot.as_ref().is_some_and(Stream::has_calls)
        };
        self.asking = streams.iter().zip(chain.iter()).map(asks).collect();
        let mut entered = streams.iter().zip(chain.iter()).take(self.entered);
        entered.any(|(slot, c)| slot.is_some() && c.takes_part_in_answers())
    }

    /// The answer that has begun does not reach the client.
    pub fn loses_answer(&mut self) {
        self.answered = false;
        self.env.response = None;
        self.env.response_size = 0;
    }

    /// The answer goes past them: what is to be known of it at the end.
    pub fn passed_by(&mut self, head: &pingora_http::ResponseHeader) {
        self.answered = true;
        let last = [Callback::Log, Callback::Done, Callback::Delete];
        if (0..self.entered).any(|at| last.into_iter().any(|callback| self.wants(at, callback))) {
            self.answered(head);
        }
    }

    /// So many bytes of a body went past them, and these trailers.
    pub fn body_passed_by(&mut self, size: usize, trailers: &HeaderMap) {
        self.env.response_size += size;
        if !trailers.is_empty() {
            self.env.response_trailers = Some(FieldMap::new(trailers.clone()));
        }
    }

    /// Whether a filter has a callback for the trailers of an answer.
    pub fn want_trailers(&self) -> bool {
        (0..self.entered).any(|at| self.wants(at, Callback::ResponseTrailers))
    }

    /// Most bytes of a body that are held for a filter.
    fn most_held(&self, at: usize) -> usize {
        self.generation.chain.get(at).map_or(0, |c| c.plugin.spec().limits.held_body_bytes)
    }

    /// One callback of one filter.
    fn call(
        &mut self,
        at: usize,
        side: Side,
        call: impl FnOnce(&mut Stream, &mut Lent<FilterEnv>) -> CallResult,
    ) -> Step {
        if side == Side::Response && self.generation.chain.get(at).is_some_and(|c| c.ignores_answers) {
            return Step::Go;
        }
        let Some(stream) = self.streams.get_mut(at).and_then(Option::as_mut) else { return Step::Go };
        match call(stream, &mut self.env) {
            Ok(outcome) => self.outcome(at, side, outcome),
            Err(fault) => match self.failed(at, fault.kind, &fault.message) {
                Some(verdict) => Step::End(verdict),
                None => Step::Go,
            },
        }
    }

    fn outcome(&mut self, at: usize, side: Side, outcome: CallOutcome) -> Step {
        let paused = match side {
            Side::Request => outcome.paused_request(),
            Side::Response => outcome.paused_response(),
        };
        let pause = match &outcome {
            CallOutcome { body_goes_on: true, .. } => BodyPause::GoesOn,
            CallOutcome { drops_body: true, .. } => BodyPause::Drop,
            CallOutcome { flow_control: true, .. } => BodyPause::FlowControl,
            _ => BodyPause::Hold,
        };
        match self.ends(at, outcome.effects, side) {
            Some(verdict) => Step::End(verdict),
            None if paused => Step::Paused(pause),
            None => Step::Go,
        }
    }

    /// What effects come to, beyond going on.
    fn ends(&mut self, at: usize, effects: Effects, side: Side) -> Option<FilterVerdict> {
        if !effects.injected.is_empty()
            && let Some(verdict) = self.inject(at, side, effects.injected)
        {
            return Some(verdict);
        }
        if let Some(response) = effects.local_response {
            return Some(FilterVerdict::Answer(response));
        }
        if effects.close_downstream || effects.close_upstream {
            return Some(FilterVerdict::Close);
        }
        if effects.end_stream {
            match side {
                Side::Request => self.request_ended = true,
                Side::Response => self.response_ended = true,
            }
        }
        None
    }

    /// Whether callbacks of other contexts may ever ask something of a filter that is there.
    fn may_be_asked(&self) -> bool {
        let acts = |(slot, c): (&Option<Stream>, &ChainPlugin)| slot.is_some() && c.plugin.acts_apart();
        self.streams.iter().zip(self.generation.chain.iter()).any(acts)
    }

    /// What callbacks of other contexts have asked of a filter since, if anything.
    fn asked_apart(&mut self, at: usize) -> Option<Effects> {
        let stream = self.streams.get_mut(at)?.as_mut()?;
        if !self.generation.chain.get(at)?.plugin.acts_apart() {
            return None;
        }
        Some(stream.take_effects()).filter(|effects| !effects.is_empty())
    }

    /// Waits until any filter is asked for something by another context. May be given up at any time.
    async fn effects(&mut self) -> (usize, Result<Effects, Box<Fault>>) {
        let parked = self.env.park();
        poll_fn(|cx| {
            for (at, slot) in self.streams.iter_mut().enumerate() {
                if let Some(stream) = slot
                    && let Poll::Ready(effects) = stream.poll_effects(cx, parked.berth())
                {
                    return Poll::Ready((at, effects));
                }
            }
            Poll::Pending
        })
        .await
    }

    /// What was asked of a filter, which may be one that waits: whether it goes on, or how all ends.
    fn asked(&mut self, side: Side, waits: bool, at: usize, effects: Result<Effects, Box<Fault>>) -> Asked {
        let effects = match effects {
            Ok(effects) => effects,
            // One that could not have said any more is not missed.
            Err(fault) if side == Side::Response && !waits && !self.may_judge(at) => {
                let plugin = self.generation.chain.get(at).map_or("", |c| &*c.name);
                tracing::info!(plugin, kind = %fault.kind, message = %fault.message, "filter lost beside an answer");
                if let Some(slot) = self.streams.get_mut(at) {
                    *slot = None;
                }
                return Asked::Nothing;
            }
            Err(fault) => {
                return match self.failed(at, fault.kind, &fault.message) {
                    Some(verdict) => Asked::End(verdict),
                    // Whoever waits for nobody goes on.
                    None if waits => Asked::Go,
                    None => Asked::Nothing,
                };
            }
        };
        let continues = match side {
            Side::Request => effects.continue_request,
            Side::Response => effects.continue_response || effects.injected.iter().any(|piece| piece.end),
        };
        match self.ends(at, effects, side) {
            Some(verdict) => Asked::End(verdict),
            None if continues && waits => Asked::Go,
            None => Asked::Nothing,
        }
    }

    /// Waits until a paused filter goes on. Nothing means: go on.
    async fn wait(&mut self, at: usize, side: Side, gone: impl Future<Output = ()>) -> Option<FilterVerdict> {
        tokio::pin!(gone);
        loop {
            let asked = tokio::select! {
                (from, effects) = self.patiently(at) => match effects {
                    Some(effects) => self.asked(side, from == at, from, effects),
                    None => return self.too_long(at),
                },
                () = &mut gone => {
                    return Some(self.client_left());
                }
            };
            match asked {
                Asked::Go => return None,
                Asked::Nothing => {}
                Asked::End(verdict) => return Some(verdict),
            }
        }
    }

    /// Whether calls of a filter are under way.
    fn has_calls(&self, at: usize) -> bool {
        self.streams.get(at).and_then(Option::as_ref).is_some_and(Stream::has_calls)
    }

    /// As [`FilterRun::effects`]; nothing when the filter has paused too long with none of its calls under way.
    async fn patiently(&mut self, at: usize) -> (usize, Option<Result<Effects, Box<Fault>>>) {
        let Some(limit) = self.generation.chain.get(at).map(|c| c.pause) else { return (at, None) };
        loop {
            if let Ok((from, effects)) = tokio::time::timeout(limit, self.effects()).await {
                return (from, Some(effects));
            }
            if !self.has_calls(at) {
                return (at, None);
            }
        }
    }

    fn too_long(&mut self, at: usize) -> Option<FilterVerdict> {
        self.failed(at, FaultKind::Deadline, "paused too long with none of its calls under way")
    }

    /// Nobody waits for what the filters have asked for.
    fn client_left(&mut self) -> FilterVerdict {
        self.streams.iter_mut().flatten().for_each(Stream::cancel_calls);
        FilterVerdict::Failed(Refusal::new(Kind::ClientGone, "the client left"))
    }

    fn failed(&mut self, at: usize, kind: FaultKind, message: &str) -> Option<FilterVerdict> {
        let plugin = self.generation.chain.get(at)?;
        tracing::warn!(plugin = %plugin.name, %kind, message, "filter failed");
        if let Some(slot) = self.streams.get_mut(at) {
            *slot = None;
        }
        match plugin.on_error {
            OnError::Open => None,
            OnError::Closed | OnError::Fallback => {
                Some(FilterVerdict::Failed(Refusal::new(Kind::Plugin, format!("the filter {} failed", plugin.name))))
            }
        }
    }
}

/// What a wake-up comes to for a filter that waits.
enum Asked {
    Go,
    Nothing,
    End(FilterVerdict),
}

impl Drop for FilterRun {
    /// A request that is given up in between, as when the gateway stops, ends for its filters too.
    fn drop(&mut self) {
        self.finish();
    }
}
