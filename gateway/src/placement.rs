//! Placement: when a turn is let through, its policies choose among the workers as they are at that moment, and its session
//! is looked up or begun.

use crate::deliberation::{Deliberation, Host, Scene, Stop, cached_tokens, decided_key, session_plan};
use crate::fleet_state::{Candidates, Fleet, Standing};
use crate::generation::{Generation, PoolRuntime};
use crate::higress::Kept;
use crate::policy::TurnPolicies;
use crate::workers::{InFlight, Worker};
use std::sync::Arc;
use turnstile_fleet::decision::{Decision, Why};
use turnstile_fleet::ids::{SessionKey, WorkerId};
use turnstile_fleet::session::{Busy, Lease, NoSession, Outcome, SessionView, TurnEnd, WaitTicket};
use turnstile_fleet::turn::Turn;
use turnstile_fleet::worker::{WorkerView, awaited};
use turnstile_plugins::{Fault, LocalResponse};

pub use crate::deliberation::{Request, bound_of, order_input, session_input};

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
    /// What came of where plugins wanted it to go.
    pub wanted: Option<Kept>,
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
    /// No worker can take it yet: those that its pool has now are still to come up.
    Awaited,
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

impl From<Stop> for NoPlace {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Answer(plugin, response) => Self::Answer(plugin, response),
            Stop::Closed(fault) => Self::Closed(fault),
            Stop::Close(plugin) => Self::Close(plugin),
            Stop::Paused => Self::Paused,
        }
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
    /// What became of their pool.
    standing: Standing,
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
    /// What came of where plugins wanted it to go.
    pub wanted: Option<Kept>,
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
/// A policy answered, failed, broke off or has paused.
pub fn choose(
    fleet: &Arc<Fleet>,
    generation: &Arc<Generation>,
    pool: &PoolRuntime,
    request: &Request<'_>,
    policies: &mut TurnPolicies,
) -> Result<Choice, NoPlace> {
    let turn = request.turn;
    // A turn that waited through a reload goes to the workers there are now.
    let Candidates { workers, views, standing } = fleet.candidates(pool, request.excluded);
    let views: Arc<[WorkerView]> = views.into();
    let bytes_per_token = fleet.bytes_per_token(&pool.name);
    let mut matched = Vec::new();
    fleet.index.lock().matched_all(views.iter().map(|v| v.index), &turn.prefix.blocks, &mut matched);
    let cached = cached_tokens(turn, &matched, bytes_per_token, request.prompt_tokens);
    let session = own_key(pool, turn).and_then(|key| fleet.sessions.view(key));
    let scene = Scene { views, cached, session };
    let wanted = request.wanted.map(|wanted| wanted.workers(&workers));
    let named = wanted.as_deref().unwrap_or_default();
    let deliberation = Deliberation::new(request, &scene, generation.rules()).wanting(named);
    let (decision, followed) = deliberation.decide(policies)?;
    let kept = wanted.is_some().then(|| match decision.route.target {
        Some(target) if named.contains(&target) => Kept::Followed,
        _ if named.is_empty() => match request.wanted.and_then(|wanted| wanted.pool(Some(pool), &generation.pools)) {
            Some(meant) if meant.index == pool.index => Kept::Followed,
            Some(_) => Kept::Barred,
            None => Kept::Unknown,
        },
        _ if named.iter().any(|worker| deliberation.is_free(*worker)) => Kept::Barred,
        _ => Kept::Unavailable,
    });
    let Scene { views, cached, session } = scene;
    Ok(Choice { decision, workers, standing, views, cached, matched, followed, session, wanted: kept })
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
            // A reload took them away as they were looked at: by now the pool has others.
            if again > 0
                && choice.standing == Standing::Named
                && choice.workers.iter().any(|worker| worker.is_removed())
            {
                continue;
            }
            let awaited = choice.standing != Standing::Forgotten && awaited(&choice.views);
            return Err(if awaited { NoPlace::Awaited } else { NoPlace::NoWorker });
        };
        let (Some(worker), Some(seen)) = (choice.workers.get(at), choice.views.get(at)) else {
            return Err(NoPlace::NoWorker);
        };
        // Another turn may have taken the place that this one saw; a full worker that was chosen as such stays chosen.
        let limits = &generation.decide.limits;
        let filled = |now: &WorkerView| {
            let lost = seen.is_ready() && !now.is_ready() && choice.standing == Standing::Named;
            again > 0 && (now.at_limit(limits) && !seen.at_limit(limits) || lost)
        };
        let uncached = request.prompt_tokens.saturating_sub(choice.cached.get(at).copied().unwrap_or(0));
        if let Some(reserved) = worker.dispatch_unless(uncached, osl, seen.held_rows, filled) {
            break (choice, reserved);
        }
    };
    let decision = &choice.decision;
    let worker_of = |id: WorkerId| choice.at(id).and_then(|at| choice.workers.get(at));
    let worker = &Arc::clone(reserved.worker());

    let (lease, no_session) = match decided_key(generation.seed, turn, decision).map(|key| pool.session_key(key)) {
        // No session begins on a worker that nobody will find again.
        Some(_) if turn.route.generates() && choice.standing != Standing::Named && worker.is_removed() => {
            (None, Some(NoSession::PoolGone))
        }
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
    let decided = Arc::clone(worker);
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
        // A streaming session that is open overrules whatever was decided.
        wanted: choice.wanted.map(|kept| if worker.index == decided.index { kept } else { Kept::Barred }),
        considered,
        decision: choice.decision,
    })
}

fn begin(
    fleet: &Arc<Fleet>,
    generation: &Generation,
    request: &Request<'_>,
    key: SessionKey,
    decision: &Decision,
    worker: &Arc<Worker>,
) -> Result<(Option<Lease>, Option<NoSession>), NoPlace> {
    let host = worker.with_model(|m| Host {
        worker: worker.index,
        capabilities: m.capabilities,
        max_running: m.load().max_running,
        kv_capacity_tokens: m.load().kv_capacity_tokens,
    });
    let sessions = &generation.config.sessions;
    let begin = fleet.sessions.begin(&session_plan(request, key, decision, host, sessions, crate::clock::now_ms()));
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
