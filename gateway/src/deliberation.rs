//! One decision about one turn: facts, policies, the native built-in, the safety rules. Knows the workers only as they were
//! seen, and no clock: placement asks it about the fleet, `turnstile replay` about a fleet that there never was.

use crate::higress::Wanted;
use crate::policy::{Applied, RouteFacts, TurnPolicies, Verdict};
use std::sync::Arc;
use turnstile_config::{Phase, Sessions as SessionsConfig};
use turnstile_fleet::decision::{
    Bound, Candidates, DecideOptions, Decision, OrderInput, RouteInput, SessionInput, Why, decide,
};
use turnstile_fleet::identity::session_key;
use turnstile_fleet::ids::{SessionKey, WorkerId};
use turnstile_fleet::session::{BeginTurn, SessionAction, SessionView, StreamCap, WaitTicket};
use turnstile_fleet::turn::Turn;
use turnstile_fleet::worker::{Capabilities, WorkerView};
use turnstile_plugins::{Fault, LocalResponse};
use xxhash_rust::xxh3::xxh3_64;

/// What a generation says about decisions.
#[derive(Clone, Copy)]
pub struct Rules<'a> {
    /// The native built-in's options.
    pub decide: &'a DecideOptions,
    /// `sessions.max_timeout_s`, ms.
    pub max_ttl_ms: u64,
}

/// The workers of a turn's pool and its session, as they were seen.
pub struct Scene {
    /// The workers, in order of their index.
    pub views: Arc<[WorkerView]>,
    /// Tokens of the turn that each is believed to have cached.
    pub cached: Arc<[u64]>,
    /// The turn's live session.
    pub session: Option<SessionView>,
}

/// What a decision needs to know of a turn.
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
    /// Where plugins of Higress' dialect want it to go.
    pub wanted: Option<&'a Wanted>,
}

/// Why a turn is not decided on.
pub enum Stop {
    /// A policy answered.
    Answer(Arc<str>, Box<LocalResponse>),
    /// A policy with `on_error = "closed"` failed.
    Closed(Box<Fault>),
    /// A policy broke the exchange off.
    Close(Arc<str>),
    /// A policy has paused: [`TurnPolicies::wait`], then ask again.
    Paused,
}

/// A turn's place in the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Order {
    /// Strict tier.
    pub tier: u32,
    /// Head start, ms.
    pub head_start_ms: i64,
    /// Whose fair share it is charged to.
    pub flow: u64,
    /// The longest wait that a policy allows, ms.
    pub deadline_ms: Option<u64>,
}

/// A decision that is being made.
pub struct Deliberation<'a> {
    request: &'a Request<'a>,
    scene: &'a Scene,
    rules: Rules<'a>,
    builtin: Arc<Decision>,
    /// Workers that come before those that the policies choose, the first one first.
    wanted: Vec<WorkerId>,
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

/// Where a session lives, as decisions take it.
pub fn bound_of(session: &SessionView) -> Option<Bound> {
    session.worker.map(|worker| Bound { worker, mode: session.mode })
}

/// Tokens of a turn that each worker is believed to have cached, by the blocks that it has.
pub fn cached_tokens(turn: &Turn, matched: &[usize], bytes_per_token: f64, prompt_tokens: u64) -> Arc<[u64]> {
    matched.iter().map(|&blocks| turn.prefix.tokens_of(blocks, bytes_per_token).min(prompt_tokens)).collect()
}

/// Runs the admit-phase policies for a turn: its place in the queue.
///
/// # Errors
/// A policy answered, failed, broke off or has paused.
pub fn order(request: &Request<'_>, rules: Rules<'_>, policies: &mut TurnPolicies) -> Result<Order, Stop> {
    let turn = request.turn;
    let input = RouteInput {
        candidates: Candidates::new(&[], &[]),
        prompt_tokens: request.prompt_tokens,
        affinity_hash: turn.prefix.affinity_hash,
        bound: None,
        excluded: &[],
    };
    let session = session_input(turn, request.action, false, rules.max_ttl_ms);
    let builtin = Arc::new(decide(&input, &order_input(turn), &session, rules.decide));
    policies.env.set_builtin(Arc::clone(&builtin));
    run(policies, Phase::Admit, &builtin)?;
    let decision = policies.env.decision.clone();
    policies.compare(&Applied { phase: Phase::Admit, decision: &decision, builtin: &builtin, route: None });
    let queue = &decision.queue;
    let limit = rules.decide.max_head_start_ms;
    let flow = match queue.flow.as_deref().or(builtin.queue.flow.as_deref()) {
        Some(text) => xxh3_64(text.as_bytes()) ^ turn.identity.tenant.0,
        None => turn.identity.tenant.0,
    };
    Ok(Order {
        tier: queue.tier.or(builtin.queue.tier).unwrap_or(0),
        head_start_ms: queue.head_start_ms.or(builtin.queue.head_start_ms).unwrap_or(0).clamp(-limit, limit),
        flow,
        deadline_ms: queue.deadline_ms,
    })
}

fn run(policies: &mut TurnPolicies, phase: Phase, builtin: &Decision) -> Result<(), Stop> {
    match policies.run(phase, builtin) {
        Verdict::Go => Ok(()),
        Verdict::Answer { plugin, response } => Err(Stop::Answer(plugin, response)),
        Verdict::Closed(fault) => Err(Stop::Closed(fault)),
        Verdict::Close(plugin) => Err(Stop::Close(plugin)),
        Verdict::Paused => Err(Stop::Paused),
    }
}

/// The key of the session that the decision names: the policy's, else the client's.
pub fn decided_key(seed: u64, turn: &Turn, decision: &Decision) -> Option<SessionKey> {
    match &decision.session.key {
        Some(text) => Some(session_key(seed, turn.identity.tenant, text)),
        None => turn.identity.session.as_ref().map(|session| session.key),
    }
}

/// What the worker that was decided on can hold.
#[derive(Debug, Clone, Copy)]
pub struct Host {
    /// The worker.
    pub worker: WorkerId,
    /// What it can do.
    pub capabilities: Capabilities,
    /// Rows of all its ranks.
    pub max_running: u32,
    /// KV tokens of all its ranks.
    pub kv_capacity_tokens: u64,
}

/// How a turn enters its session on a worker, as the decision says.
pub fn session_plan(
    request: &Request<'_>,
    key: SessionKey,
    decision: &Decision,
    host: Host,
    sessions: &SessionsConfig,
    now_ms: u64,
) -> BeginTurn {
    let mut capabilities = host.capabilities;
    capabilities.tag &= sessions.tag;
    capabilities.stream &= sessions.stream;
    let ranks = capabilities.dp_size.max(1);
    let share = |total: u64, fraction: f64| (total as f64 * fraction) as u64;
    let rows = share(u64::from(host.max_running / ranks), sessions.stream_rows_fraction);
    let max_ttl_ms = sessions.max_timeout_s.saturating_mul(1000);
    BeginTurn {
        key,
        action: decision.session.action.unwrap_or(SessionAction::None),
        wish: decision.session.mode,
        ttl_ms: decision.session.ttl_ms.map(|ttl| ttl.min(max_ttl_ms)),
        worker: host.worker,
        rank: None,
        capabilities,
        accepts: request.turn.route.into(),
        cap: StreamCap {
            rows: u32::try_from(rows).unwrap_or(u32::MAX),
            tokens: share(host.kv_capacity_tokens / u64::from(ranks), sessions.stream_tokens_fraction),
        },
        ticket: request.ticket,
        now_ms,
    }
}

// === impl Deliberation ===

impl<'a> Deliberation<'a> {
    /// Begins with what the native built-in would decide.
    pub fn new(request: &'a Request<'a>, scene: &'a Scene, rules: Rules<'a>) -> Self {
        let turn = request.turn;
        let mut this = Self { request, scene, rules, builtin: Arc::default(), wanted: Vec::new() };
        let wanted = session_input(turn, request.action, scene.session.is_some(), rules.max_ttl_ms);
        this.builtin = Arc::new(decide(&this.input(), &order_input(turn), &wanted, rules.decide));
        this
    }

    /// Wants the turn to go to one of these workers, the first one first, whatever the policies choose.
    #[must_use]
    pub fn wanting(mut self, workers: &[WorkerId]) -> Self {
        self.wanted = workers.iter().copied().filter(|worker| self.is_free(*worker)).collect();
        self
    }

    /// Whether a worker is ready and has not failed the turn.
    pub fn is_free(&self, worker: WorkerId) -> bool {
        let candidates = Candidates::new(&self.scene.views, &self.scene.cached);
        candidates.get(worker).is_some_and(WorkerView::is_ready) && !self.request.excluded.contains(&worker)
    }

    fn bound(&self) -> Option<Bound> {
        self.scene.session.as_ref().and_then(bound_of)
    }

    fn input(&self) -> RouteInput<'_> {
        RouteInput {
            candidates: Candidates::new(&self.scene.views, &self.scene.cached),
            prompt_tokens: self.request.prompt_tokens,
            affinity_hash: self.request.turn.prefix.affinity_hash,
            bound: self.bound(),
            excluded: self.request.excluded,
        }
    }

    /// Runs the route-phase policies and settles what they wrote. Returns also whether their target was followed.
    ///
    /// # Errors
    /// A policy answered, failed, broke off or has paused.
    pub fn decide(&self, policies: &mut TurnPolicies) -> Result<(Decision, bool), Stop> {
        let mut decision = self.ask(policies)?;
        let barred = decision.route.exclude.as_deref().unwrap_or_default();
        let mut wanted = self.wanted.iter().copied().filter(|worker| !barred.contains(worker));
        if let Some(first) = wanted.next() {
            let rest: Vec<WorkerId> = wanted.collect();
            let others = decision.route.fallbacks.take().unwrap_or_default();
            let behind = rest.into_iter().chain(decision.route.target).chain(others);
            decision.route.fallbacks = Some(behind.filter(|worker| *worker != first).collect());
            decision.route.target = Some(first);
            decision.route.reason = Some("wanted by a filter".to_owned());
        }
        let input = self.input();
        let followed = decision.settle(&self.builtin, &input, self.rules.decide);
        policies.compare(&Applied {
            phase: Phase::Route,
            decision: &decision,
            builtin: &self.builtin,
            route: Some((&input, self.rules.decide)),
        });
        if decision.route.why == Why::Policy && decision.route.target == self.builtin.route.target {
            // The policies agree with the built-in, so its word says more in the metrics than that a policy decided.
            decision.route.why = self.builtin.route.why;
        }
        Ok((decision, followed))
    }

    /// What the route-phase policies write.
    fn ask(&self, policies: &mut TurnPolicies) -> Result<Decision, Stop> {
        policies.env.place(
            RouteFacts {
                workers: Arc::clone(&self.scene.views),
                cached_tokens: Arc::clone(&self.scene.cached),
                excluded: self.request.excluded.into(),
                bound: self.bound().map(|b| b.worker),
                limits: self.rules.decide.limits,
                attempt: self.request.attempt,
                last_error: self.request.last_error.clone(),
            },
            self.scene.session.clone(),
            Arc::clone(&self.builtin),
        );
        // A retry decides anew; what the admit phase wrote stays.
        if !policies.resumes(Phase::Route) {
            policies.env.decision.route = Default::default();
        }
        run(policies, Phase::Route, &self.builtin)?;
        Ok(policies.env.decision.clone())
    }

    /// Fills in what a decision leaves open, and puts the safety rules above it.
    pub fn settle(&self, decision: &mut Decision) {
        decision.settle(&self.builtin, &self.input(), self.rules.decide);
    }
}
