//! One turn: body, filters, understanding, admission, then attempts on workers until one answers.

use super::attempt::{Attempt, Attempted};
use super::filtering::{ended_by_filter, through_filters};
use super::reply::Reply;
use super::retries::Retries;
use super::{Connection, Exchange, give_up};
use crate::admission::{Permit, Refused, Wish};
use crate::client_stream::connection_number;
use crate::clock::now_ms;
use crate::deliberation::{self, Stop};
use crate::errors::{Kind, Refusal};
use crate::filters::{FilterEnv, FilterRun};
use crate::forward::{AttemptFault, client_gone};
use crate::gateway::Gateway;
use crate::generation::PoolRuntime;
use crate::higress::{Kept, Wanted};
use crate::placement::{self, NoPlace, Placed, Request};
use crate::policy::events::ms_since;
use crate::policy::{EndFacts, Ended, PolicyEnv, RequestHead, TurnFacts, TurnPolicies, Verdict};
use crate::recording::Draft;
use crate::request_body::{self, Held};
use crate::sessions::Waiter;
use bytes::Bytes;
use http::request::Parts as ReqParts;
use http::{HeaderMap, Version, header};
use pingora_core::protocols::http::ServerSession;
use pingora_http::RequestHeader;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use turnstile_config::Busy as BusyOption;
use turnstile_fleet::hints::SessionAction as AskedAction;
use turnstile_fleet::route::{Protocol, Route};
use turnstile_fleet::session::{Busy, SessionAction, SessionMode};
use turnstile_fleet::turn::{Turn, understand};
use turnstile_plugins::{Fault, LocalResponse};

/// How long a turn waits for one that runs with `sessions.busy = "refuse"`, ms.
const REFUSE_GRACE_MS: u64 = 100;

/// A turn on its way.
pub(super) struct TurnInProgress<'a> {
    pub gateway: &'a Arc<Gateway>,
    pub exchange: &'a mut Exchange,
    pub turn: Arc<Turn>,
    pub facts: Arc<TurnFacts>,
    pub policies: TurnPolicies,
    pub pool: usize,
    pub action: SessionAction,
    /// Where plugins of Higress' dialect want it to go.
    pub wanted: Option<Wanted>,
}

pub(super) async fn serve(
    gateway: &Arc<Gateway>,
    client: &mut ServerSession,
    route: Route,
    exchange: &mut Exchange,
) -> Result<Connection, Refusal> {
    let generation = Arc::clone(&exchange.generation);
    // The body is there, in one form or another, until the turn is over.
    let mut held = Held::new(&gateway.bodies);
    let mut route = route;
    let mut wanted = None;
    let (head, body) = if generation.has_filters {
        // The body is read by what the head says, so that stays where it is.
        let headers = client.req_header().headers.clone();
        let mut env = FilterEnv::new(request_head(client, headers, &exchange.record.request_id));
        env.route = route.name();
        env.local = client.server_addr().and_then(|address| address.as_inet().copied());
        let run = exchange.filters.insert(FilterRun::new(gateway, &generation, env));
        match through_filters(run, client, generation.body, &mut held).await {
            Ok(body) => {
                wanted = run.wanted();
                let head = run.changed_head();
                let path = String::from_utf8_lossy(&head.path).into_owned();
                route = Route::from_path(path.split('?').next().unwrap_or_default()).ok_or_else(|| {
                    Refusal::new(Kind::NotFound, "a filter rewrote the path to one that is not served")
                })?;
                (head, body)
            }
            Err(verdict) => return ended_by_filter(client, exchange, verdict, route.protocol()).await,
        }
    } else {
        let body = request_body::read(client, generation.body, &mut held).await?;
        let headers = take_headers(client.req_header_mut());
        (request_head(client, headers, &exchange.record.request_id), body)
    };
    let turn = match understand(route, &head.headers, body, &generation.understand) {
        Ok(turn) => Arc::new(turn),
        Err(error) => {
            let refusal = Refusal::new(Kind::BadRequest, error.message);
            return Err(if error.field.is_empty() { refusal } else { refusal.with_param(error.field) });
        }
    };
    note_turn(gateway, exchange, &turn);
    let usual = generation.pool_for(turn.model.as_deref());
    let wished = wanted.as_ref().and_then(|wanted| wanted.pool(usual, &generation.pools));
    let found = wished.filter(|_| !usual.is_some_and(|usual| lives_in(gateway, usual, &turn))).or(usual);
    let found = found.and_then(|found| generation.pools.iter().position(|pool| pool.index == found.index));
    let Some(pool) = found else {
        let model = turn.model.as_deref().unwrap_or_default();
        let shown: String = model.chars().take(128).collect();
        return Err(
            Refusal::new(Kind::ModelNotFound, format!("the model {shown:?} does not exist")).with_param("model")
        );
    };
    let Some(runtime) = generation.pools.get(pool) else {
        return Err(Refusal::new(Kind::Internal, "the pool is gone"));
    };
    exchange.record.pool = Some(Arc::clone(&runtime.name));

    let action = match turn.control.action {
        Some(AskedAction::Bind) => SessionAction::Bind,
        Some(AskedAction::Open) => SessionAction::Open,
        Some(AskedAction::Close) => SessionAction::Close,
        None if turn.identity.session_final => SessionAction::Close,
        None => SessionAction::None,
    };
    if gateway.recording.is_some() && turn.route.generates() {
        exchange.draft = Some(Box::new(Draft::new(exchange.record.ts, &turn, action, runtime)));
    }
    let key = placement::own_key(runtime, &turn);
    let session = key.and_then(|key| gateway.fleet.sessions.view(key));
    exchange.record.session = key.map(|key| key.to_string());
    // The real turn is here: warming it any longer only gets in its way.
    let _arrived = key.map(|key| gateway.prefills.arrive(key));
    let prompt_tokens = turn.prompt_tokens(gateway.fleet.bytes_per_token(&runtime.name));
    exchange.record.prompt_estimate = Some(prompt_tokens);
    let number = session.as_ref().map_or(1, |s| s.turns.saturating_add(s.in_flight).saturating_add(1));
    if turn.identity.session.is_some() {
        exchange.record.turn = Some(number);
    }
    if action != SessionAction::None {
        exchange.record.action = Some(action.name());
    }
    let facts = Arc::new(TurnFacts { turn: Arc::clone(&turn), prompt_tokens, action, number, head });
    let env = PolicyEnv::new(Arc::clone(&facts), session, Arc::clone(&gateway.store));
    let policies =
        TurnPolicies::new(Arc::clone(&generation.chain), env, gateway.next_shard(), Arc::clone(&gateway.metrics))
            .waiting();
    let mut progress = TurnInProgress { gateway, exchange, turn, facts, policies, pool, action, wanted };
    let served = progress.run(client).await;
    progress.finish(&served);
    served
}

/// Whether the turn's session is in the memory of one of a pool's workers: it can be gone on with nowhere else.
fn lives_in(gateway: &Gateway, pool: &PoolRuntime, turn: &Turn) -> bool {
    let session = placement::own_key(pool, turn).and_then(|key| gateway.fleet.sessions.view(key));
    session.is_some_and(|session| session.mode == SessionMode::Stream && session.engine_open)
}

fn request_head(client: &ServerSession, headers: HeaderMap, request_id: &str) -> RequestHead {
    let peer = client.client_addr().and_then(|a| a.as_inet().copied());
    let head = client.req_header();
    let protocol = match head.version {
        Version::HTTP_2 => "HTTP/2",
        Version::HTTP_10 => "HTTP/1.0",
        _ => "HTTP/1.1",
    };
    let path = head.uri.path_and_query().map_or("/", |p| p.as_str());
    let path = Bytes::copy_from_slice(path.as_bytes());
    let authority = headers.get(header::HOST).map(|h| Bytes::copy_from_slice(h.as_bytes()));
    let authority = authority.or_else(|| head.uri.authority().map(|a| Bytes::copy_from_slice(a.as_str().as_bytes())));
    RequestHead {
        method: head.method.clone(),
        path,
        authority: authority.unwrap_or_default(),
        headers: Arc::new(headers),
        request_id: Arc::from(request_id),
        peer,
        connection: connection_number(client),
        protocol,
        arrived: SystemTime::now(),
    }
}

/// The headers, moved out rather than copied. What is left is what answers are made by.
fn take_headers(head: &mut RequestHeader) -> HeaderMap {
    let kept = [header::ORIGIN, header::TE].map(|name| (head.headers.get(&name).cloned(), name));
    let Ok(mut left) = RequestHeader::build_no_case(head.method.clone(), head.raw_path(), Some(2)) else {
        return head.headers.clone();
    };
    left.set_version(head.version);
    for (value, name) in kept {
        if let Some(value) = value {
            // So few always fit.
            let _ = left.insert_header(name, value);
        }
    }
    let whole = ReqParts::from(std::mem::replace(head, left));
    *head.extensions_mut() = whole.extensions;
    whole.headers
}

fn note_turn(gateway: &Gateway, exchange: &mut Exchange, turn: &Turn) {
    let record = &mut exchange.record;
    record.model = turn.model.as_deref().map(|m| m.chars().take(128).collect());
    record.stream = turn.stream;
    record.body_bytes = turn.body.len();
    record.tenant = Some(turn.identity.tenant.to_string());
    record.tree = turn.identity.tree.as_ref().map(|s| s.key.to_string());
    record.agent = Some(turn.identity.agent.name());
    record.identity = Some(turn.identity.source.name());
    record.priority = turn.hints.priority.map(i64::from);
    if turn.unknown_hint_keys.count > 0 {
        let count = u64::from(turn.unknown_hint_keys.count);
        gateway.metrics.ignored_hints.with_label_values(&["unknown_key"]).inc_by(count);
    }
    for (rule, action) in &turn.steered.met {
        gateway.metrics.steered.with_label_values(&[rule.row().key, action.name()]).inc();
    }
    if turn.malformed_headers > 0 {
        let count = u64::from(turn.malformed_headers);
        gateway.metrics.ignored_hints.with_label_values(&["bad_header"]).inc_by(count);
    }
}

/// Writes what a plugin answered.
pub(super) async fn answer(
    client: &mut ServerSession,
    exchange: &mut Exchange,
    response: &LocalResponse,
    protocol: Protocol,
) -> Result<Connection, Refusal> {
    exchange.record.end = "plugin_answer";
    exchange.record.reason = Some(response.details.clone());
    if let Some(filters) = &mut exchange.filters {
        filters.answers_locally(response.details.clone());
    }
    let reply = Reply::plugin(response).map_err(|_| left())?;
    // A body that was not read to its end makes the connection useless.
    let close = !request_body::is_read(client);
    reply.send(client, exchange, protocol, close).await.map_err(|_| left())
}

impl TurnInProgress<'_> {
    fn pool(&self) -> Result<&PoolRuntime, Refusal> {
        self.exchange.generation.pools.get(self.pool).ok_or_else(|| Refusal::new(Kind::Internal, "the pool is gone"))
    }

    async fn run(&mut self, client: &mut ServerSession) -> Result<Connection, Refusal> {
        let generation = Arc::clone(&self.exchange.generation);
        let wish = match self.admit(client, &generation).await? {
            Ok(wish) => wish,
            Err(response) => return answer(client, self.exchange, &response, self.turn.route.protocol()).await,
        };
        let pool = self.pool()?;
        let (fleet, retry) = (&self.gateway.fleet, &generation.config.retry);
        let mut retries = Retries::new(fleet, retry, (pool.index, &pool.name), &self.exchange.record.request_id);
        let mut permit: Option<Permit> = None;
        let total = Duration::from_secs(generation.config.timeouts.total_s);
        loop {
            self.exchange.record.attempts = retries.made() + 1;
            let left = total.saturating_sub(self.exchange.arrived.elapsed());
            // Pinned where it is: a future that is handed on is copied.
            let placed = {
                let placing = std::pin::pin!(self.place(client, &wish, &retries, &mut permit));
                tokio::time::timeout(left, placing).await
            };
            let Ok(placed) = placed else {
                let total_s = generation.config.timeouts.total_s;
                return Err(Refusal::new(Kind::UpstreamTimeout, format!("timeouts.total_s = {total_s} is over")));
            };
            let placed = match placed? {
                Ok(placed) => placed,
                Err(NoPlace::NoWorker | NoPlace::Awaited) => {
                    retries.no_worker();
                    break;
                }
                Err(NoPlace::Answer(_, response)) => {
                    return answer(client, self.exchange, &response, self.turn.route.protocol()).await;
                }
                Err(NoPlace::Closed(fault)) => return Err(failed_closed(&fault)),
                Err(NoPlace::Close(plugin)) => return Err(closed_by(&plugin)),
                Err(NoPlace::Paused) => return Err(Refusal::new(Kind::Internal, "a policy has paused")),
                Err(NoPlace::Busy(_, why)) => return Err(session_busy(why)),
            };
            // From here the worker's own count holds the place.
            permit = None;
            retries.placed();
            let worker = placed.flight.worker().cloned();
            let attempted = {
                let mut attempt = Attempt::new(self, placed, retries.made());
                attempt.run(client).await?
            };
            let replayable = match attempted {
                Attempted::Answered(connection) => return Ok(connection),
                Attempted::Filtered(verdict) => {
                    return ended_by_filter(client, self.exchange, verdict, self.turn.route.protocol()).await;
                }
                Attempted::Again { fault, replayable } => {
                    self.exchange.record.faults.push(fault.reason());
                    retries.failed(worker.as_ref(), fault);
                    replayable
                }
                Attempted::SessionGone => {
                    // The engine does not know the session, which begins anew on whichever worker is best; or it has not let
                    // go of an earlier turn, for which this one waits.
                    self.exchange.record.faults.push("engine session gone or busy".into());
                    true
                }
            };
            if !retries.again(client, replayable).await? {
                break;
            }
        }
        match retries.into_last() {
            Some(fault) => Err(give_up::refusal(self.gateway, self.exchange, fault)),
            None => Err(give_up::no_worker(self.exchange)),
        }
    }

    /// Runs the admit-phase policies and makes the wish for the queue.
    async fn admit(
        &mut self,
        client: &mut ServerSession,
        generation: &Arc<crate::generation::Generation>,
    ) -> Result<Result<Wish, Box<LocalResponse>>, Refusal> {
        let request = Request {
            turn: &self.turn,
            prompt_tokens: self.facts.prompt_tokens,
            action: self.action,
            excluded: &[],
            attempt: 0,
            last_error: None,
            ticket: None,
            wanted: None,
        };
        let order = loop {
            match deliberation::order(&request, generation.rules(), &mut self.policies) {
                Ok(order) => break order,
                Err(Stop::Paused) => {
                    let builtin = self.policies.env.builtin().unwrap_or_default();
                    match self.policies.wait(&builtin, client_gone(client)).await.ok_or_else(left)? {
                        // The policies behind the one that has paused.
                        Verdict::Go | Verdict::Paused => {}
                        Verdict::Answer { response, .. } => return Ok(Err(response)),
                        Verdict::Closed(fault) => return Err(failed_closed(&fault)),
                        Verdict::Close(plugin) => return Err(closed_by(&plugin)),
                    }
                }
                Err(Stop::Answer(_, response)) => return Ok(Err(response)),
                Err(Stop::Closed(fault)) => return Err(failed_closed(&fault)),
                Err(Stop::Close(plugin)) => return Err(closed_by(&plugin)),
            }
        };
        let max_wait = generation.config.admission.max_wait_ms;
        Ok(Ok(Wish {
            pool: self.pool()?.index,
            tier: order.tier,
            head_start_ms: order.head_start_ms,
            flow: order.flow,
            uncached_tokens: self.facts.prompt_tokens,
            bytes: self.turn.body.len() as u64,
            max_wait_ms: order.deadline_ms.map_or(max_wait, |d| d.min(max_wait)),
            pinned: None,
        }))
    }

    /// Waits for the session and for room, then places the turn.
    async fn place(
        &mut self,
        client: &mut ServerSession,
        wish: &Wish,
        retries: &Retries,
        permit: &mut Option<Permit>,
    ) -> Result<Result<Placed, NoPlace>, Refusal> {
        let generation = Arc::clone(&self.exchange.generation);
        let sessions = &generation.config.sessions;
        let began = now_ms();
        let wait_until = began.saturating_add(sessions.busy_wait_ms);
        // Another turn that runs may turn out to be cut: the news that its client left and the turn that this client sends
        // next arrive side by side.
        let refuse_at = match sessions.busy {
            BusyOption::Wait => wait_until,
            BusyOption::Refuse => wait_until.min(began.saturating_add(REFUSE_GRACE_MS)),
        };
        let mut waiter: Option<Waiter> = None;
        let queued_before = self.exchange.record.queue_ms;
        let mut let_through = false;
        loop {
            let ticket = waiter.as_ref().map(Waiter::ticket);
            let (pinned, busy) = placement::pinned(&self.gateway.fleet, self.pool()?, &self.turn, ticket);
            let (key, why) = if let Some(busy) = busy {
                busy
            } else {
                if permit.is_none() {
                    // One that was let through to no avail may go to any worker. Its time in the queue goes on.
                    let wish = Wish { pinned: pinned.filter(|_| !let_through), ..*wish };
                    let spent = self.exchange.record.queue_ms.saturating_sub(queued_before);
                    *permit = Some(self.enter(client, wish, spent).await?);
                }
                let request = Request {
                    turn: &self.turn,
                    prompt_tokens: self.facts.prompt_tokens,
                    action: self.action,
                    excluded: retries.excluded(),
                    attempt: retries.made(),
                    last_error: retries.last().map(AttemptFault::reason),
                    ticket,
                    wanted: self.wanted.as_ref(),
                };
                let Some(pool) = generation.pools.get(self.pool) else {
                    return Err(Refusal::new(Kind::Internal, "the pool is gone"));
                };
                match placement::place(&self.gateway.fleet, &generation, pool, &request, &mut self.policies) {
                    Err(NoPlace::Busy(key, why)) => {
                        // Somebody else may use the place while this turn waits for its session.
                        *permit = None;
                        (key, why)
                    }
                    // The room that it was let through for went in a reload, and the workers that came were not up yet.
                    Err(NoPlace::Awaited) => {
                        *permit = None;
                        let_through = true;
                        continue;
                    }
                    Err(NoPlace::Paused) => {
                        let builtin = self.policies.env.builtin().unwrap_or_default();
                        match self.policies.wait(&builtin, client_gone(client)).await.ok_or_else(left)? {
                            Verdict::Go | Verdict::Paused => continue,
                            Verdict::Answer { plugin, response } => return Ok(Err(NoPlace::Answer(plugin, response))),
                            Verdict::Closed(fault) => return Ok(Err(NoPlace::Closed(fault))),
                            Verdict::Close(plugin) => return Ok(Err(NoPlace::Close(plugin))),
                        }
                    }
                    placed => {
                        self.note_wanted(&placed);
                        return Ok(placed);
                    }
                }
            };
            let now = now_ms();
            let until = if why == Busy::Turn { refuse_at } else { wait_until };
            if now >= until {
                return Err(session_busy(why));
            }
            let Some(waiting) = waiter.as_ref().filter(|waiter| waiter.key() == key) else {
                // Asked once more before it waits: what changed before it had its place woke nobody.
                waiter = Some(self.gateway.fleet.sessions.wait(key, why));
                continue;
            };
            if waiting.waits_for(why) {
                continue;
            }
            tokio::select! {
                () = waiting.changed() => {}
                () = tokio::time::sleep(Duration::from_millis(until - now)) => {}
                () = client_gone(client) => return Err(left()),
            }
            self.exchange.record.session_wait_ms += now_ms().saturating_sub(now);
        }
    }

    /// What came of where plugins wanted the turn to go.
    fn note_wanted(&mut self, placed: &Result<Placed, NoPlace>) {
        let (Ok(Placed { wanted: Some(kept), .. }), Some(wanted)) = (placed, &self.wanted) else { return };
        self.gateway.metrics.wanted_hosts.with_label_values(&[kept.name()]).inc();
        self.exchange.record.wanted = Some(kept.name());
        if *kept != Kept::Followed {
            tracing::debug!(request_id = self.exchange.record.request_id, %wanted, kept = kept.name(), "host not followed");
        }
    }

    /// `spent_ms`: what the turn has waited in the queue already.
    async fn enter(&mut self, client: &mut ServerSession, wish: Wish, spent_ms: u64) -> Result<Permit, Refusal> {
        let admission = Arc::clone(&self.gateway.fleet.admission);
        let rest = wish.after(spent_ms);
        let entered = tokio::select! {
            biased;
            entered = admission.enter(rest) => entered,
            () = client_gone(client) => return Err(Refusal::new(Kind::ClientGone, "the client left")),
        };
        let status = self.exchange.generation.config.admission.overload_status.code();
        match entered {
            Ok(permit) => {
                if let Some(waited) = permit.waited_ms {
                    self.exchange.record.queue_ms += waited;
                    let pool = self.pool()?.name.clone();
                    self.gateway.metrics.queue_wait.with_label_values(&[&*pool]).observe(waited as f64 / 1e3);
                }
                Ok(permit)
            }
            Err(Refused::Full { why, retry_after_s }) => {
                Err(Refusal::new(Kind::QueueFull, format!("the queue is full: {why}"))
                    .with_status(status)
                    .with_retry_after(retry_after_s))
            }
            Err(Refused::Expired { retry_after_s }) => {
                self.exchange.record.queue_ms += rest.max_wait_ms;
                Err(Refusal::new(Kind::QueueTimeout, format!("no worker had room within {} ms", wish.max_wait_ms))
                    .with_status(status)
                    .with_retry_after(retry_after_s))
            }
        }
    }

    /// Tells the policies how it ended, and the log what they said.
    fn finish(&mut self, served: &Result<Connection, Refusal>) {
        let record = &mut self.exchange.record;
        let (status, outcome) = match served {
            Ok(_) => (record.status, record.end),
            Err(refusal) if refusal.kind == Kind::ClientGone => (refusal.status(), "client_gone"),
            Err(refusal) => (refusal.status(), record.end),
        };
        self.policies.env.finish(EndFacts {
            worker: record.worker.clone(),
            status,
            prompt_tokens: record.prompt_tokens,
            completion_tokens: record.completion_tokens,
            cached_tokens: record.cached_tokens,
            ttft_ms: record.ttft_ms,
            finish_reason: record.finish_reason.clone(),
        });
        if !self.exchange.generation.events.is_empty() {
            let at_ms = ms_since(self.exchange.arrived);
            self.policies.tell_last(&Ended { status, outcome, ..record.ended(at_ms) });
        }
        self.policies.finish();
        record.canaries = self.policies.canaries();
        record.shadows = std::mem::take(&mut self.policies.differences);
        record.failed_policies = std::mem::take(&mut self.policies.failed);
        record.notes = std::mem::take(&mut self.policies.env.decision.log);
        record.events = std::mem::take(&mut self.policies.env.events);
    }
}

fn session_busy(why: Busy) -> Refusal {
    let cause = match why {
        Busy::Turn => "another turn of it is running",
        Busy::Abort => "the worker has not let go of a turn that was cut",
        Busy::Close => "the one before it is not closed yet",
        Busy::Room => "sessions that make room for it are not closed yet",
    };
    Refusal::new(Kind::SessionBusy, format!("the session is busy: {cause}")).with_retry_after(1)
}

fn failed_closed(fault: &Fault) -> Refusal {
    Refusal::new(Kind::Plugin, format!("the policy {} failed", fault.plugin))
}

/// The connection ends without an answer, as when the client leaves.
fn closed_by(plugin: &str) -> Refusal {
    Refusal::new(Kind::ClientGone, format!("the policy {plugin} closed the stream"))
}

/// A refusal that says the client left, for callers that only know that.
pub(super) fn left() -> Refusal {
    Refusal::new(Kind::ClientGone, "the client left")
}
