//! One attempt on one worker, from the open of its session to the end of its answer.

use super::session_turn::{Sent, SessionTurn};
use super::turn::{TurnInProgress, left};
use super::{Connection, Exchange, give_up};
use crate::after;
use crate::errors::{Kind, Refusal};
use crate::filters::{FilterRun, FilterVerdict};
use crate::forward::forwarded::Origin;
use crate::forward::open::{Opened, Outgoing, Watch, open, streams};
use crate::forward::relay::{
    Ending, LateHeaders, Listener, RelayLimits, Relayed, ResponseFilter, Stop, is_bodiless, relay,
};
use crate::forward::request::{Framing, Onward, for_client, for_worker};
use crate::forward::writer::takes_trailers;
use crate::forward::{AttemptFault, client_gone};
use crate::placement::{self, Placed};
use crate::policy::Teller;
use crate::request_id::random_hex;
use crate::trailers;
use crate::upstream::{Head, Target};
use crate::workers::Worker;
use pingora_core::protocols::http::ServerSession;
use pingora_http::ResponseHeader;
use std::sync::Arc;
use std::time::{Duration, Instant};
use turnstile_fleet::decision::EnginePriority;
use turnstile_fleet::observe::{Asked, Observation, Observer};
use turnstile_fleet::route::Route;
use turnstile_fleet::session::{AttemptEnd, ContextNote, Refused, SessionMode, Usage};
use turnstile_fleet::turn::{Turn, UpstreamPlan};

/// What came of an attempt.
pub(super) enum Attempted {
    /// The client has its answer, or as much of it as there was.
    Answered(Connection),
    /// A filter ends it, or answers in the worker's place. Nothing reached the client.
    Filtered(FilterVerdict),
    /// Nothing reached the client.
    Again {
        /// What went wrong.
        fault: AttemptFault,
        /// The turn may be sent to another worker. One of a streaming session may not as long as its worker holds the
        /// conversation: the turn might come into it a second time.
        replayable: bool,
    },
    /// The worker does not know the turn's engine session, or still has another turn in it.
    SessionGone,
}

pub(super) struct Attempt<'a, 'b> {
    progress: &'a mut TurnInProgress<'b>,
    placed: Placed,
    number: u32,
    session: SessionTurn,
    note: Option<ContextNote>,
    /// The answer passes filters.
    filtered: bool,
}

impl<'a, 'b> Attempt<'a, 'b> {
    pub fn new(progress: &'a mut TurnInProgress<'b>, mut placed: Placed, number: u32) -> Self {
        let fleet = &progress.gateway.fleet;
        let timeout = fleet.settings().side_timeout;
        let lease = placed.lease.take();
        let session = SessionTurn::new(Arc::clone(&fleet.sessions), Arc::clone(&fleet.side), lease, timeout);
        Self { progress, placed, number, session, note: None, filtered: false }
    }

    pub async fn run(&mut self, client: &mut ServerSession) -> Result<Attempted, Refusal> {
        let Some(worker) = self.placed.flight.worker().cloned() else {
            return Err(Refusal::new(Kind::Internal, "the worker is gone"));
        };
        let Some(target) = worker.target() else {
            let reason = "the worker's address is not known".into();
            let fault = AttemptFault::Connect { reason, timeout: false, sent: false };
            return Ok(Attempted::Again { fault, replayable: true });
        };
        if let Some(filters) = &mut self.progress.exchange.filters {
            filters.placed(&worker.settings().pool, target.peer._address.to_string());
        }
        self.session.open(&worker).await;
        self.note(&worker);

        let turn = Arc::clone(&self.progress.turn);
        let config = Arc::clone(&self.progress.exchange.generation.config);
        let rid = engine_rid(&turn);
        let facts = worker.facts();
        let usage_unasked = facts.is_some_and(|f| f.stream_response_default_include_usage);
        let lease = self.session.lease();
        let tag = lease.filter(|l| l.mode == SessionMode::Tag).and_then(|l| l.engine_id.clone());
        let stream_id = lease.filter(|l| l.mode == SessionMode::Stream).and_then(|l| l.engine_id.clone());
        let rank = lease.and_then(|l| l.rank);
        let priority = match self.placed.decision.engine_priority {
            Some(EnginePriority::Send(p)) if worker.with_model(|m| m.capabilities.priority) => Some(p),
            _ => None,
        };
        self.progress.exchange.record.engine_priority = priority.filter(|_| turn.route.takes_priority());
        let plan = UpstreamPlan {
            rid: rid.as_deref(),
            priority,
            session_id: tag.as_deref(),
            session_params_id: stream_id.as_deref(),
            dp_rank: rank,
            ask_usage: turn.route.generates() && !usage_unasked,
        };
        let body = turn.upstream_body(&plan);
        let wants_prefill = after::wants_prefill(&self.progress.exchange.generation, &turn, &self.placed.decision);
        let watch = turn.route.generates().then(|| {
            let mut options = turn.observe_options(&plan, wants_prefill);
            options.asked = self.progress.exchange.generation.events.asked();
            options.max_body_bytes = config.limits.response_observe_bytes.as_usize();
            options.max_reply_bytes = options.max_reply_bytes.min(config.prefill.max_body_bytes.as_usize());
            Watch { route: turn.route, options }
        });
        // A turn of a streaming session must never be sent twice, so it gets a connection that cannot be stale.
        let target = if stream_id.is_some() { Arc::new(target.fresh()) } else { target };
        let filters_want = self.progress.exchange.filters.as_ref().is_some_and(FilterRun::want_trailers);
        let head = self.head(&target, &turn, body.len(), plan.dp_rank.is_some(), filters_want)?;
        self.progress.exchange.record.rid.clone_from(&rid);
        self.session.sent(Sent { worker: Arc::clone(&worker), rid: rid.clone() });
        let started = Instant::now();
        let left =
            Duration::from_secs(config.timeouts.total_s).saturating_sub(self.progress.exchange.arrived.elapsed());
        let outgoing = Outgoing {
            target: &target,
            head,
            body,
            first_byte: Duration::from_secs(config.timeouts.first_byte_s).min(left),
            write: Duration::from_secs(config.timeouts.first_byte_s.min(60)),
            trailers: filters_want || takes_trailers(client),
        };
        // A streaming session stays with the worker that knows its conversation.
        let stays = stream_id.is_some();
        let stuck = async { if stays { std::future::pending().await } else { worker.stuck().await } };
        let opened = match open(&self.progress.gateway.fleet.upstream, client, outgoing, watch.as_ref(), stuck).await {
            Ok(opened) => opened,
            Err(fault) => return self.failed(&worker, fault),
        };
        self.placed.flight.first_byte();
        // Any other answer is only one when it is whole.
        if streams(&opened.head) {
            worker.note_answer();
        }
        self.answered(client, &worker, &target, opened, started, &plan).await
    }

    fn head(
        &self,
        target: &Target,
        turn: &Turn,
        len: usize,
        pins_rank: bool,
        filters_want_trailers: bool,
    ) -> Result<Head, Refusal> {
        let exchange = &self.progress.exchange;
        let head = &self.progress.facts.head;
        let onward = Onward {
            steering: &exchange.generation.understand.steering,
            forwarded: &exchange.generation.config.forwarded,
            origin: Origin { peer: head.peer.map(|p| p.ip()), host: &head.authority },
            pins_rank,
            trailers: filters_want_trailers || trailers::are_taken(&head.headers),
        };
        let internal = |e: Box<pingora_core::Error>| Refusal::new(Kind::Internal, crate::upstream::describe(&e));
        for_worker(&head.headers, target, turn.route.worker_path(), len, &exchange.record.request_id, onward)
            .map_err(internal)
    }

    fn note(&mut self, worker: &Worker) {
        let record = &mut self.progress.exchange.record;
        let decision = &self.placed.decision;
        record.worker = Some(Arc::clone(&worker.id));
        record.predicted_cached = Some(self.placed.predicted_cached);
        let why = placement::reason_label(decision, self.number);
        record.reason = Some(decision.route.reason.clone().unwrap_or_else(|| why.to_owned()));
        record.candidates = std::mem::take(&mut self.placed.considered);
        record.canaries = self.progress.policies.canaries();
        record.shadows.clone_from(&self.progress.policies.differences);
        self.progress.gateway.metrics.decisions.with_label_values(&[&*worker.id, why]).inc();
        match self.session.lease() {
            Some(lease) => {
                record.session_mode = Some(lease.mode.name());
                record.rank = lease.rank;
                self.note = ContextNote::of(lease);
            }
            None => {
                record.session_mode = None;
                self.note = self.placed.no_session.map(ContextNote::NoSession);
            }
        }
        record.session_note = self.note.as_ref().map(ToString::to_string);
    }

    /// Nothing reached the client.
    fn failed(&mut self, worker: &Worker, fault: AttemptFault) -> Result<Attempted, Refusal> {
        let label = fault.label();
        self.progress.gateway.metrics.attempts.with_label_values(&[&*worker.id, label]).inc();
        tracing::debug!(worker = %worker.id, label, reason = %fault.reason(), "attempt failed");
        let streaming = self.session.is_streaming();
        let begins = self.session.begins_engine_session();
        let how = match &fault {
            AttemptFault::ClientGone | AttemptFault::Timeout(_) | AttemptFault::Stuck => AttemptEnd::Cut,
            AttemptFault::Broken { .. } | AttemptFault::Protocol(_) => AttemptEnd::Broken,
            AttemptFault::Connect { .. } => AttemptEnd::Unreachable,
            // The conversation is where it was. One that this turn began can begin elsewhere.
            AttemptFault::Status { .. } | AttemptFault::Event { .. } if begins && fault.retryable() => {
                AttemptEnd::Unreachable
            }
            AttemptFault::Status { status: 400, body, .. } => AttemptEnd::Refused(Refused::of(body)),
            AttemptFault::Event { message, .. } => AttemptEnd::Refused(Refused::of(message.as_bytes())),
            AttemptFault::Status { .. } => AttemptEnd::Refused(Refused::Other),
        };
        // What was taken off its engine session begins a new one, elsewhere; what is still in it may not come twice.
        let unbound = matches!(how, AttemptEnd::Unreachable | AttemptEnd::Broken);
        let replayable = !streaming || begins || unbound;
        let again = self.session.end(how);
        match fault {
            AttemptFault::ClientGone => Err(left()),
            _ if again => Ok(Attempted::SessionGone),
            fault => Ok(Attempted::Again { fault, replayable }),
        }
    }

    /// The worker's answer has begun.
    async fn answered(
        &mut self,
        client: &mut ServerSession,
        worker: &Arc<Worker>,
        target: &Target,
        mut opened: Box<Opened>,
        started: Instant,
        plan: &UpstreamPlan<'_>,
    ) -> Result<Attempted, Refusal> {
        let exchange = &mut *self.progress.exchange;
        let ttft_ms = exchange.arrived.elapsed().as_secs_f64() * 1e3;
        let worker_ttft_ms = started.elapsed().as_secs_f64() * 1e3;
        exchange.record.ttft_ms = Some(ttft_ms);
        // A stream gets no length: when it breaks off, the client has to see that its end is missing.
        self.filtered = exchange.filters.as_mut().is_some_and(FilterRun::take_part_in_answer);
        let filtered = self.filtered;
        let exact =
            !streams(&opened.head) && opened.observer.as_ref().is_none_or(|o| !o.may_change_length()) && !filtered;
        let framing = Framing::of(client.req_header().version);
        let internal = |e: Box<pingora_core::Error>| Refusal::new(Kind::Internal, crate::upstream::describe(&e));
        let mut head = for_client(&opened.head, &exchange.record.request_id, framing, exact).map_err(internal)?;
        // A client that sends only what is new has to know when there is nothing to add it to.
        let deltas = self.progress.turn.route.takes_session_params();
        let told = |note: &ContextNote| deltas || *note == ContextNote::Lost;
        if let Some(note) = self.note.filter(told) {
            head.insert_header("x-turnstile-session-note", note.to_string()).map_err(internal)?;
        }
        if exchange.explain {
            explain(&mut head, exchange).map_err(internal)?;
        }
        let protocol = self.progress.turn.route.protocol();
        if let Some(filters) = &mut self.progress.exchange.filters {
            filters.connected(&opened.session);
            if !filtered {
                filters.passed_by(&head);
            }
            let bodiless = is_bodiless(client, &opened.head) || (opened.ended && opened.pending.is_empty());
            let verdict = match filtered {
                true => filters.response_headers(&mut head, bodiless, client_gone(client)).await,
                false => FilterVerdict::Go,
            };
            if !matches!(verdict, FilterVerdict::Go) {
                self.session.end(AttemptEnd::Cut);
                return Ok(Attempted::Filtered(verdict));
            }
        }
        let exchange = &mut *self.progress.exchange;
        exchange.record.status = head.status.as_u16();
        let explains = exchange.explain;
        let mut late = move |observer: &Observer, head: &mut ResponseHeader| {
            if explains && let Some(cached) = observer.observation().usage.cached_tokens {
                // The value is a number, which always fits a header.
                let _ = head.insert_header("x-turnstile-cached-tokens", cached.to_string());
            }
        };
        let late: &mut LateHeaders<'_> = &mut late;
        let config = &exchange.generation.config;
        let total = Duration::from_secs(config.timeouts.total_s);
        let limits = RelayLimits {
            between: Duration::from_secs(config.timeouts.between_bytes_s),
            total: total.saturating_sub(exchange.arrived.elapsed()),
        };
        let mut filter: Option<Box<dyn ResponseFilter + '_>> = match &mut exchange.filters {
            Some(filters) if filtered => Some(Box::new(filters.response_body())),
            _ => None,
        };
        let listens = exchange.generation.events.asked() != Asked::default();
        let mut listener: Option<Box<dyn Listener + '_>> = match &mut self.progress.policies {
            policies if listens => Some(Box::new(Teller::new(policies, exchange.arrived))),
            _ => None,
        };
        super::last_answer_if_stopping(self.progress.gateway, client);
        let relayed = relay(client, &mut opened, head, &mut filter, &mut listener, late, limits, worker).await;
        drop(listener);
        if relayed.breaks_a_stream() {
            give_up::tell_broken(client, protocol, &relayed.ending, &mut filter).await;
        }
        drop(filter);
        if let (Some(filters), false) = (&mut self.progress.exchange.filters, filtered) {
            match relayed.committed {
                true => filters.body_passed_by(relayed.body_bytes, &relayed.trailers),
                false => filters.loses_answer(),
            }
        }
        if relayed.committed
            && let Some(status) = self.progress.exchange.filters.as_ref().and_then(FilterRun::status)
        {
            self.progress.exchange.record.status = status;
        }
        self.ended(worker, target, opened, &relayed, worker_ttft_ms, started, plan).await
    }

    #[allow(clippy::too_many_arguments)]
    async fn ended(
        &mut self,
        worker: &Arc<Worker>,
        target: &Target,
        mut opened: Box<Opened>,
        relayed: &Relayed,
        worker_ttft_ms: f64,
        started: Instant,
        plan: &UpstreamPlan<'_>,
    ) -> Result<Attempted, Refusal> {
        let observation = opened.observer.as_ref().map(|o| o.observation().clone()).unwrap_or_default();
        let gateway = Arc::clone(self.progress.gateway);
        let record = &mut self.progress.exchange.record;
        let (end, label) = relayed.ending.labels();
        record.end = end;
        if relayed.committed || matches!(relayed.ending, Ending::Finished | Ending::Filter(_) | Ending::Shortened) {
            worker.note_answer();
        }
        if relayed.committed || !matches!(relayed.ending, Ending::Cut(_) | Ending::Timeout(_)) {
            gateway.metrics.attempts.with_label_values(&[&*worker.id, label]).inc();
        }
        record.prompt_tokens = observation.usage.prompt_tokens;
        record.completion_tokens = observation.usage.completion_tokens;
        record.cached_tokens = observation.usage.cached_tokens;
        record.finish_reason.clone_from(&observation.finish_reason);
        record.tools.clone_from(&observation.tool_calls);
        record.left_out_events = observation.left_out;
        gateway.metrics.events_left_out.inc_by(observation.left_out);
        match &relayed.ending {
            Ending::Finished => {
                let whole = observation.error.is_none() && observation.finish_reason.as_deref() != Some("abort");
                if opened.ended {
                    gateway.fleet.upstream.release(target, opened.session).await;
                }
                let usage = usage_of(&observation);
                after::learn(
                    &gateway,
                    &self.progress.turn,
                    worker,
                    &self.placed,
                    &observation,
                    worker_ttft_ms,
                    started,
                    record,
                );
                // The decision to warm is taken before the session may be closed by this very turn.
                let reply = opened.observer.as_mut().and_then(Observer::take_reply);
                if whole {
                    self.session_finished(usage, reply, worker, plan);
                } else {
                    self.session.end(AttemptEnd::Answered { usage, whole });
                }
                Ok(Attempted::Answered(if relayed.left { Connection::Cut } else { Connection::Keep }))
            }
            Ending::ClientGone => {
                record.status = 499;
                opened.session.shutdown().await;
                self.session.end(AttemptEnd::Cut);
                Ok(Attempted::Answered(Connection::Cut))
            }
            Ending::Filter(_) | Ending::Shortened => {
                let finished = opened.ended || observation.done;
                if opened.ended {
                    gateway.fleet.upstream.release(target, opened.session).await;
                } else {
                    opened.session.shutdown().await;
                }
                let Ending::Filter(stop) = &relayed.ending else {
                    // To the client this looks like an answer that went into a streaming session's context.
                    self.session.end(AttemptEnd::Broken);
                    return Ok(Attempted::Answered(Connection::Keep));
                };
                // What the worker finished is part of a streaming session's context, of which the client knows nothing.
                self.session.end(if finished { AttemptEnd::Broken } else { AttemptEnd::Cut });
                record.faults.push(stop.to_string());
                if relayed.committed {
                    record.error = Some(Kind::Plugin.row().code).filter(|_| matches!(stop, Stop::Failed(_)));
                    return Ok(Attempted::Answered(Connection::Cut));
                }
                Ok(Attempted::Filtered(stop.clone().into()))
            }
            Ending::Cut(reason) | Ending::Timeout(reason) => {
                opened.session.shutdown().await;
                if relayed.committed {
                    // An abort by id takes the turn out of the conversation.
                    let timeout = matches!(relayed.ending, Ending::Timeout(_));
                    self.session.end(if timeout { AttemptEnd::Cut } else { AttemptEnd::Broken });
                    tracing::warn!(worker = %worker.id, %reason, "answer broke off");
                    record.faults.push(reason.clone());
                    return Ok(Attempted::Answered(Connection::Cut));
                }
                let reason = reason.clone();
                let fault = match &relayed.ending {
                    Ending::Timeout(_) => AttemptFault::Timeout(reason),
                    _ => AttemptFault::Broken { reason, answered: true },
                };
                if self.filtered {
                    // The filters have seen part of this answer; a second one would be a stranger to them.
                    self.session.end(AttemptEnd::Cut);
                    record.faults.push(fault.reason());
                    return Err(Refusal::new(Kind::Upstream, "the worker's answer broke off"));
                }
                self.failed(worker, fault)
            }
        }
    }

    fn session_finished(
        &mut self,
        usage: Option<Usage>,
        reply: Option<turnstile_fleet::reply::Reply>,
        worker: &Arc<Worker>,
        plan: &UpstreamPlan<'_>,
    ) {
        let progress = &mut *self.progress;
        let key = self.session.lease().map(|l| l.key);
        let streaming = self.session.is_streaming();
        self.session.end(AttemptEnd::Answered { usage, whole: true });
        if let Some(key) = key {
            progress.gateway.prefills.followed(key, worker.index, usage.map(|usage| usage.cached_tokens));
        }
        let generation = &progress.exchange.generation;
        let outcome = after::prefill(
            progress.gateway,
            generation,
            &after::Finished {
                turn: &progress.turn,
                decision: &self.placed.decision,
                reply: reply.as_ref(),
                worker,
                key,
                streaming,
                plan,
                prompt_tokens: usage.map(|usage| usage.prompt_tokens),
            },
        );
        progress.exchange.record.prefill = outcome;
    }
}

/// The engine's id of this attempt. A batch or several answers get none: the engine wants a list there, or ignores it.
fn engine_rid(turn: &Turn) -> Option<String> {
    turn.route.takes_rid()?;
    let batch = ["text", "prompt", "input_ids", "input"].iter().any(|key| {
        turn.members.raw(key).is_some_and(|raw| {
            let mut after = raw.iter().filter(|b| !b.is_ascii_whitespace());
            let (first, second) = (after.next(), after.next());
            first == Some(&b'[') && !second.is_some_and(u8::is_ascii_digit) && *key != "input"
        })
    });
    if batch || turn.n > 1 {
        return None;
    }
    let prefix = if turn.route == Route::Responses { "resp_" } else { "" };
    Some(format!("{prefix}{}", random_hex()))
}

fn usage_of(observation: &Observation) -> Option<Usage> {
    let usage = &observation.usage;
    Some(Usage {
        prompt_tokens: usage.prompt_tokens?,
        completion_tokens: usage.completion_tokens.unwrap_or(0),
        cached_tokens: usage.cached_tokens.unwrap_or(0),
    })
}

fn explain(head: &mut ResponseHeader, exchange: &Exchange) -> pingora_core::Result<()> {
    let record = &exchange.record;
    if let Some(worker) = &record.worker {
        head.insert_header("x-turnstile-worker", &**worker)?;
    }
    if let Some(reason) = &record.reason {
        let shown: String = reason.chars().filter(|c| (' '..='~').contains(c)).collect();
        head.insert_header("x-turnstile-reason", shown)?;
    }
    head.insert_header("x-turnstile-queue-wait-ms", record.queue_ms.to_string())?;
    if let Some(predicted) = record.predicted_cached {
        head.insert_header("x-turnstile-cached-estimate", predicted.to_string())?;
    }
    head.insert_header("x-turnstile-session", record.session_mode.unwrap_or("none"))?;
    head.insert_header("x-turnstile-generation", record.generation.to_string())?;
    for canary in &record.canaries {
        head.append_header("x-turnstile-canary", &**canary)?;
    }
    for difference in &record.shadows {
        head.append_header("x-turnstile-shadow", serde_json::to_string(difference).unwrap_or_default())?;
    }
    Ok(())
}
