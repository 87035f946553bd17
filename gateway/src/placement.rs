//! Placement: when a turn is let through, its policies choose among the workers as they are at that moment, and its session
//! is looked up or begun.

use crate::fleet_state::Fleet;
use crate::generation::{Generation, PoolRuntime};
use crate::policy::{Applied, RouteFacts, TurnPolicies, Verdict};
use crate::workers::{InFlight, Worker};
use std::sync::Arc;
use turnstile_config::Phase;
use turnstile_fleet::decision::{Bound, Candidates, Decision, OrderInput, RouteInput, SessionInput, Why, decide};
use turnstile_fleet::identity::session_key;
use turnstile_fleet::ids::{SessionKey, WorkerId};
use turnstile_fleet::session::{
    Accepts, BeginTurn, Busy, Lease, NoSession, Outcome, SessionAction, SessionView, StreamCap, TurnEnd, WaitTicket,
};
use turnstile_fleet::turn::Turn;
use turnstile_fleet::worker::{WorkerView, fail_open};
use turnstile_plugins::{Fault, LocalResponse};

/// Times a turn is decided on when the place it was given is taken meanwhile.
const CHOICES: u32 = 4;

/// A turn with a place.
pub struct Placed {
    /// The room it takes; given back when dropped.
    pub flight: Flight,
    /// What was decided.
    pub decision: Decision,
    /// Leave to run it in its session.
    pub lease: Option<Lease>,
    /// Why there is none although one was asked for.
    pub no_session: Option<NoSession>,
    /// Tokens that the worker is believed to have cached.
    pub predicted_cached: u64,
    /// Blocks of that.
    pub matched_blocks: usize,
    /// Whether the policies' target was followed.
    pub followed: bool,
    /// The candidates with their cost, for the log.
    pub considered: Vec<(Arc<str>, Option<f64>)>,
}

/// A turn's room on a worker, and the wake-up of the queue when it is given back.
pub struct Flight {
    in_flight: Option<InFlight>,
    fleet: Arc<Fleet>,
}

impl Flight {
    /// The worker; nothing only while it is being dropped.
    pub fn worker(&self) -> Option<&Arc<Worker>> {
        self.in_flight.as_ref().map(InFlight::worker)
    }

    /// The first byte of the answer came.
    pub fn first_byte(&mut self) {
        if let Some(in_flight) = &mut self.in_flight {
            in_flight.first_byte();
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.in_flight = None;
        self.fleet.admission.dispatch();
    }
}

/// Why a turn got no place.
pub enum NoPlace {
    /// No worker can take it.
    NoWorker,
    /// Its streaming session is busy: wait for a change and try again.
    Busy(SessionKey, Busy),
    /// A policy answered.
    Answer(Arc<str>, Box<LocalResponse>),
    /// A policy with `on_error = "closed"` failed.
    Closed(Box<Fault>),
    /// A policy broke the exchange off.
    Close(Arc<str>),
    /// A policy has paused.
    Paused,
}

/// What placement needs to know of a turn.
pub struct Request<'a> {
    /// The turn.
    pub turn: &'a Turn,
    /// Estimated prompt length, tokens.
    pub prompt_tokens: u64,
    /// What it asks of its session.
    pub action: SessionAction,
    /// Workers that failed it before.
    pub excluded: &'a [WorkerId],
    /// Number of the attempt, 0 first.
    pub attempt: u32,
    /// What became of the one before.
    pub last_error: Option<String>,
    /// Its place among those that wait for its session.
    pub ticket: Option<WaitTicket>,
}

/// The order of a turn in the native built-in.
pub fn order_input(turn: &Turn) -> OrderInput<'_> {
    OrderInput {
        priority: turn.hints.priority.map(i64::from),
        latency_sensitivity_s: turn.hints.latency_sensitivity,
        strict_priority: turn.hints.strict_priority,
        flow: turn.identity.tree.as_ref().map(|t| t.text.as_str()),
    }
}

/// The session of a turn in the native built-in.
pub fn session_input(turn: &Turn, action: SessionAction, live: bool, max_ttl_ms: u64) -> SessionInput {
    SessionInput {
        named: turn.identity.session.is_some(),
        action: (action != SessionAction::None).then_some(action),
        live,
        // `as` saturates; the value was checked to be positive and finite.
        ttl_ms: turn.control.timeout_s.map(|s| ((s * 1000.0) as u64).min(max_ttl_ms)),
    }
}

/// The key of the session that the decision names: the policy's, else the client's.
fn key_of(generation: &Generation, pool: &PoolRuntime, turn: &Turn, decision: &Decision) -> Option<SessionKey> {
    match &decision.session.key {
        Some(text) => Some(pool.session_key(session_key(generation.seed, turn.identity.tenant, text))),
        None => own_key(pool, turn),
    }
}

/// The key of the session that the client names, in this pool.
pub fn own_key(pool: &PoolRuntime, turn: &Turn) -> Option<SessionKey> {
    turn.identity.session.as_ref().map(|s| pool.session_key(s.key))
}

/// What was chosen for a turn, before anything is changed by it.
pub struct Choice {
    /// What was decided.
    pub decision: Decision,
    /// The workers, in order of their index.
    workers: Vec<Arc<Worker>>,
    /// The workers as they were seen.
    pub views: Arc<[WorkerView]>,
    /// Tokens of the turn that each is believed to have cached.
    pub cached: Arc<[u64]>,
    /// Blocks of that.
    matched: Vec<usize>,
    /// Whether the policies' target was followed.
    pub followed: bool,
    /// The turn's live session.
    pub session: Option<SessionView>,
}

impl Choice {
    fn at(&self, worker: WorkerId) -> Option<usize> {
        self.views.binary_search_by_key(&worker, |v| v.index).ok()
    }

    /// Cost of a worker in ms, if it was computed.
    pub fn cost(&self, worker: WorkerId) -> Option<f64> {
        let scores = self.decision.route.scores.as_ref()?;
        scores.iter().find(|(w, _)| *w == worker).map(|(_, cost)| *cost)
    }
}

/// Runs the route-phase policies for a turn and settles their decision. Changes nothing in the fleet.
///
/// # Errors
/// A policy answered or failed closed.
pub fn choose(
    fleet: &Arc<Fleet>,
    generation: &Arc<Generation>,
    pool: &PoolRuntime,
    request: &Request<'_>,
    policies: &mut TurnPolicies,
) -> Result<Choice, NoPlace> {
    let turn = request.turn;
    // A turn that waited through a reload goes to the workers there are now.
    let workers = fleet.workers_of(pool.index).unwrap_or_else(|| pool.workers.clone());
    let mut held = Vec::new();
    fleet.sessions.held(workers.iter().map(|w| w.index), &mut held);
    let mut views: Vec<WorkerView> =
        workers.iter().zip(&held).map(|(worker, held)| worker.view(held.idle_rows)).collect();
    fail_open(&mut views, request.excluded);
    let views: Arc<[WorkerView]> = views.into();
    let bytes_per_token = fleet.bytes_per_token(&pool.name);
    let mut matched = Vec::new();
    fleet.index.lock().matched_all(views.iter().map(|v| v.index), &turn.prefix.blocks, &mut matched);
    let tokens_of = |blocks: usize| {
        let bytes = (blocks * turn.prefix.block_bytes) as f64;
        ((bytes / bytes_per_token) as u64).min(request.prompt_tokens)
    };
    let cached: Arc<[u64]> = matched.iter().map(|&blocks| tokens_of(blocks)).collect();

    let session = own_key(pool, turn).and_then(|key| fleet.sessions.view(key));
    let bound = session.as_ref().and_then(bound_of);
    let input = RouteInput {
        candidates: Candidates::new(&views, &cached),
        prompt_tokens: request.prompt_tokens,
        affinity_hash: turn.prefix.affinity_hash,
        bound,
        excluded: request.excluded,
    };
    let wanted = session_input(turn, request.action, session.is_some(), generation.max_ttl_ms);
    let builtin = Arc::new(decide(&input, &order_input(turn), &wanted, &generation.decide));

    policies.env.place(
        RouteFacts {
            workers: Arc::clone(&views),
            cached_tokens: Arc::clone(&cached),
            excluded: request.excluded.into(),
            bound: bound.map(|b| b.worker),
            limits: generation.decide.limits,
            attempt: request.attempt,
            last_error: request.last_error.clone(),
        },
        session.clone(),
        Arc::clone(&builtin),
    );
    // A retry decides anew; what the admit phase wrote stays.
    if !policies.resumes(Phase::Route) {
        policies.env.decision.route = Default::default();
    }
    match policies.run(Phase::Route, &builtin) {
        Verdict::Go => {}
        Verdict::Answer { plugin, response } => return Err(NoPlace::Answer(plugin, response)),
        Verdict::Closed(fault) => return Err(NoPlace::Closed(fault)),
        Verdict::Close(plugin) => return Err(NoPlace::Close(plugin)),
        Verdict::Paused => return Err(NoPlace::Paused),
    }
    let mut decision = policies.env.decision.clone();
    let followed = decision.settle(&builtin, &input, &generation.decide);
    policies.compare(&Applied {
        phase: Phase::Route,
        decision: &decision,
        builtin: &builtin,
        route: Some((&input, &generation.decide)),
    });
    if decision.route.why == Why::Policy && decision.route.target == builtin.route.target {
        // The policies agree with the built-in, so its word says more in the metrics than that a policy decided.
        decision.route.why = builtin.route.why;
    }
    Ok(Choice { decision, workers, views, cached, matched, followed, session })
}

/// Places a turn.
///
/// # Errors
/// See [`NoPlace`].
pub fn place(
    fleet: &Arc<Fleet>,
    generation: &Arc<Generation>,
    pool: &PoolRuntime,
    request: &Request<'_>,
    policies: &mut TurnPolicies,
) -> Result<Placed, NoPlace> {
    let turn = request.turn;
    let osl = u64::from(turn.hints.osl.unwrap_or(0));
    let mut again = CHOICES;
    let (choice, reserved) = loop {
        again -= 1;
        let choice = choose(fleet, generation, pool, request, policies)?;
        let Some(at) = choice.decision.route.target.and_then(|target| choice.at(target)) else {
            return Err(NoPlace::NoWorker);
        };
        let (Some(worker), Some(seen)) = (choice.workers.get(at), choice.views.get(at)) else {
            return Err(NoPlace::NoWorker);
        };
        // Another turn may have taken the place that this one saw; a full worker that was chosen as such stays chosen.
        let limits = &generation.decide.limits;
        let filled = |now: &WorkerView| {
            again > 0 && (now.at_limit(limits) && !seen.at_limit(limits) || seen.is_ready() && !now.is_ready())
        };
        let uncached = request.prompt_tokens.saturating_sub(choice.cached.get(at).copied().unwrap_or(0));
        if let Some(reserved) = worker.dispatch_unless(uncached, osl, seen.held_rows, filled) {
            break (choice, reserved);
        }
    };
    let decision = &choice.decision;
    let worker_of = |id: WorkerId| choice.at(id).and_then(|at| choice.workers.get(at));
    let worker = &Arc::clone(reserved.worker());

    let (lease, no_session) = match key_of(generation, pool, turn, decision) {
        Some(key) if turn.route.generates() => {
            let first = begin(fleet, generation, request, key, decision, worker)?;
            match first {
                // Its worker is none of this pool's any more: the session begins anew on the one decided on.
                (Some(lease), _) if worker_of(lease.worker).is_none() => {
                    fleet.sessions.end(lease, TurnEnd::NotServed);
                    fleet.sessions.unbind(key);
                    begin(fleet, generation, request, key, decision, worker)?
                }
                first => first,
            }
        }
        _ => (None, None),
    };
    // A streaming session that is open overrules the decision.
    let sent_to = lease.as_ref().map_or(Some(worker), |lease| worker_of(lease.worker));
    let Some(worker) = sent_to else {
        if let Some(lease) = lease {
            fleet.sessions.end(lease, TurnEnd::NotServed);
        }
        return Err(NoPlace::NoWorker);
    };
    let at = choice.at(worker.index);
    let predicted_cached = at.and_then(|at| choice.cached.get(at)).copied().unwrap_or(0);
    let matched_blocks = at.and_then(|at| choice.matched.get(at)).copied().unwrap_or(0);
    let in_flight = if worker.index == reserved.worker().index {
        reserved
    } else {
        worker.dispatch(request.prompt_tokens.saturating_sub(predicted_cached), osl)
    };
    fleet.remember(worker, &turn.prefix.blocks);
    let listed = choice.views.iter().take(generation.log_candidates);
    let considered = listed.map(|v| (Arc::clone(&v.id), choice.cost(v.index))).collect();
    Ok(Placed {
        flight: Flight { in_flight: Some(in_flight), fleet: Arc::clone(fleet) },
        lease,
        no_session,
        predicted_cached,
        matched_blocks,
        followed: choice.followed,
        considered,
        decision: choice.decision,
    })
}

/// Where a session lives, as decisions take it.
pub fn bound_of(session: &SessionView) -> Option<Bound> {
    session.worker.map(|worker| Bound { worker, mode: session.mode })
}

fn begin(
    fleet: &Arc<Fleet>,
    generation: &Generation,
    request: &Request<'_>,
    key: SessionKey,
    decision: &Decision,
    worker: &Arc<Worker>,
) -> Result<(Option<Lease>, Option<NoSession>), NoPlace> {
    let turn = request.turn;
    let (mut capabilities, max_running, kv_capacity) =
        worker.with_model(|m| (m.capabilities, m.load().max_running, m.load().kv_capacity_tokens));
    capabilities.tag &= generation.config.sessions.tag;
    capabilities.stream &= generation.config.sessions.stream;
    let ranks = capabilities.dp_size.max(1);
    let sessions = &generation.config.sessions;
    let share = |total: u64, fraction: f64| (total as f64 * fraction) as u64;
    let rows = share(u64::from(max_running / ranks), sessions.stream_rows_fraction);
    let begin = fleet.sessions.begin(&BeginTurn {
        key,
        action: decision.session.action.unwrap_or(SessionAction::None),
        wish: decision.session.mode,
        ttl_ms: decision.session.ttl_ms.map(|ttl| ttl.min(generation.max_ttl_ms)),
        worker: worker.index,
        rank: None,
        capabilities,
        accepts: Accepts {
            session_params: turn.route.takes_session_params(),
            session_id: turn.route.takes_session_id(),
        },
        cap: StreamCap {
            rows: u32::try_from(rows).unwrap_or(u32::MAX),
            tokens: share(kv_capacity / u64::from(ranks), sessions.stream_tokens_fraction),
        },
        ticket: request.ticket,
        now_ms: crate::clock::now_ms(),
    });
    match begin.outcome {
        Outcome::Ready(lease) => Ok((Some(lease), None)),
        Outcome::Ordinary(why) => Ok((None, Some(why))),
        Outcome::Busy(why) => Err(NoPlace::Busy(key, why)),
    }
}

/// The metric label of a decision, from a closed set.
pub fn reason_label(decision: &Decision, attempt: u32) -> &'static str {
    if attempt > 0 && decision.route.why != Why::Pinned { "retry" } else { decision.route.why.name() }
}

/// The only worker a turn can go to, and what it must wait for first: known before it is let through.
pub fn pinned(
    fleet: &Fleet,
    pool: &PoolRuntime,
    turn: &Turn,
    ticket: Option<WaitTicket>,
) -> (Option<WorkerId>, Option<(SessionKey, Busy)>) {
    if !turn.route.takes_session_params() {
        return (None, None);
    }
    let Some(key) = own_key(pool, turn) else { return (None, None) };
    let (worker, busy) = fleet.sessions.pin(key, ticket).unwrap_or_default();
    (worker, busy.map(|why| (key, why)))
}
