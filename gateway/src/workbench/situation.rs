//! A turn before a fleet, as the gateway would see it: the request is understood, the facts are made and the decision is
//! settled by the code that serves requests.

use super::fleet_file::{EndEntry, FleetFile};
use crate::generation::{decide_options, understand_options};
use crate::placement::{bound_of, order_input, session_input};
use crate::policy::{EndFacts, PolicyEnv, PolicyStore, RequestHead, RouteFacts, TurnFacts};
use crate::recorded_request::RecordedRequest;
use bytes::Bytes;
use http::header::HOST;
use serde_json::{Map, Value};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use turnstile_config::{Config, Phase, PluginEvent};
use turnstile_fleet::decision::{Bound, Candidates, DecideOptions, Decision, RouteInput, decide};
use turnstile_fleet::ids::WorkerId;
use turnstile_fleet::session::{SessionAction, SessionView};
use turnstile_fleet::turn::understand;
use turnstile_fleet::worker::{WorkerView, fail_open};

/// Tenants and session keys are the same in every run. A gateway draws its own seed.
const SEED: u64 = 0;
/// When the request arrives, seconds of Unix time: 2026-01-01.
const ARRIVED_S: u64 = 1_767_225_600;

/// When every request that is tried arrives.
pub fn arrived() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(ARRIVED_S)
}

/// A turn, a fleet, and what the native built-in would decide.
pub struct Situation {
    /// What is known of the turn.
    pub turn: Arc<TurnFacts>,
    /// The workers, in order of their index.
    pub workers: Arc<[WorkerView]>,
    /// The turn's session.
    pub session: Option<SessionView>,
    /// What the native built-in would decide.
    pub builtin: Arc<Decision>,
    cached_tokens: Arc<[u64]>,
    excluded: Vec<WorkerId>,
    attempt: u32,
    last_error: Option<String>,
    end: EndFacts,
    /// What the policy is told between its decision and the end: JSON texts.
    pub events: Vec<Bytes>,
    options: DecideOptions,
    phase: Phase,
}

/// An event of the file as a plugin is told it.
fn event((at, members): (usize, &Map<String, Value>)) -> Result<Bytes, String> {
    let name = members.get("event").and_then(Value::as_str).unwrap_or_default();
    if !PluginEvent::ALL.iter().any(|known| known.as_str() == name) {
        let known = PluginEvent::ALL.map(PluginEvent::as_str).join(", ");
        return Err(format!("events[{at}].event: expected one of {known}"));
    }
    Ok(Value::Object(members.clone()).to_string().into())
}

impl Situation {
    /// Puts a request (`{path, headers, body}`) before a fleet.
    ///
    /// # Errors
    /// What is wrong with either, named with the file's name.
    pub fn new(turn: (&str, &[u8]), fleet: (&str, &[u8]), phase: Phase) -> Result<Self, String> {
        let question = RecordedRequest::read(turn.1).map_err(|e| format!("{}: {e}", turn.0))?;
        let file = FleetFile::parse(fleet.1).map_err(|e| format!("{}: {e}", fleet.0))?;
        let config = Config::default();
        let options = decide_options(&config);
        let understanding = understand_options(&config, SEED);
        let understood = understand(question.route, &question.headers, question.body.clone(), &understanding)
            .map_err(|e| format!("{}: {}", turn.0, e.message))?;
        let own_key = understood.identity.session.as_ref().map(|session| session.key);
        let ttl_ms = config.sessions.default_timeout_s.saturating_mul(1000);
        let session = match (own_key, &file.session) {
            (None, Some(_)) => {
                return Err(format!("{}: session: the turn of {} names no session", fleet.0, turn.0));
            }
            (Some(key), _) => file.session_view(key, ttl_ms),
            (None, None) => None,
        };

        let events = file.events.iter().enumerate().map(event).collect::<Result<_, _>>();
        let events = events.map_err(|e| format!("{}: {e}", fleet.0))?;
        let prompt_tokens = understood.prompt_tokens(file.bytes_per_token);
        let mut workers = file.views().to_vec();
        let excluded = file.excluded();
        fail_open(&mut workers, &excluded);
        let cached_tokens = file.workers.iter().map(|worker| worker.cached_tokens.min(prompt_tokens)).collect();
        let action = understood.control.action.map_or(SessionAction::None, SessionAction::from);
        let header = |name| question.headers.get(name).map(|v| Bytes::copy_from_slice(v.as_bytes()));
        let facts = TurnFacts {
            prompt_tokens,
            action,
            number: session.as_ref().map_or(1, |s| s.turns.saturating_add(1)),
            head: RequestHead {
                authority: header(HOST).unwrap_or_default(),
                arrived: arrived(),
                ..question.head("plugin-run")
            },
            turn: Arc::new(understood),
        };
        let mut situation = Self {
            turn: Arc::new(facts),
            workers: workers.into(),
            session,
            builtin: Arc::default(),
            cached_tokens,
            excluded,
            attempt: file.attempt,
            last_error: file.last_error.clone(),
            end: file.end.map(EndFacts::from).unwrap_or_default(),
            events,
            options,
            phase,
        };
        let max_ttl_ms = config.sessions.max_timeout_s.saturating_mul(1000);
        let turn = &situation.turn.turn;
        let wanted = session_input(turn, action, situation.session.is_some(), max_ttl_ms);
        let builtin = decide(&situation.input(), &order_input(turn), &wanted, &situation.options);
        situation.builtin = Arc::new(builtin);
        Ok(situation)
    }

    /// The workers that the turn could go to: in the phase `admit` they are not known yet.
    pub fn candidates(&self) -> Candidates<'_> {
        match self.phase {
            Phase::Route => Candidates::new(&self.workers, &self.cached_tokens),
            _ => Candidates::new(&[], &[]),
        }
    }

    fn bound(&self) -> Option<Bound> {
        self.session.as_ref().filter(|_| self.phase == Phase::Route).and_then(bound_of)
    }

    fn input(&self) -> RouteInput<'_> {
        RouteInput {
            candidates: self.candidates(),
            prompt_tokens: self.turn.prompt_tokens,
            affinity_hash: self.turn.turn.prefix.affinity_hash,
            bound: self.bound(),
            excluded: if self.phase == Phase::Route { &self.excluded } else { &[] },
        }
    }

    /// The environment that a policy gets.
    pub fn env(&self, store: Arc<dyn PolicyStore>) -> PolicyEnv {
        let mut env = PolicyEnv::new(Arc::clone(&self.turn), self.session.clone(), store);
        match self.phase {
            Phase::Route => env.place(
                RouteFacts {
                    workers: Arc::clone(&self.workers),
                    cached_tokens: Arc::clone(&self.cached_tokens),
                    excluded: self.excluded.as_slice().into(),
                    bound: self.bound().map(|bound| bound.worker),
                    limits: self.options.limits,
                    attempt: self.attempt,
                    last_error: self.last_error.clone(),
                },
                self.session.clone(),
                Arc::clone(&self.builtin),
            ),
            _ => env.set_builtin(Arc::clone(&self.builtin)),
        }
        env
    }

    /// What is known when the turn has ended.
    pub fn end(&self) -> EndFacts {
        self.end.clone()
    }

    /// Completes a policy's decision as the gateway does. Returns whether its target was followed.
    pub fn settle(&self, decision: &mut Decision) -> bool {
        decision.settle(&self.builtin, &self.input(), &self.options)
    }

    /// Why a target that was written without a mistake is not where the turn goes.
    pub fn why_not(&self, target: WorkerId, exclude: &[WorkerId]) -> Option<String> {
        let input = self.input();
        if let Some(pinned) = input.pinned().filter(|pinned| *pinned != target) {
            return Some(format!("the turn's streaming session lives on {}", self.name(pinned)));
        }
        let view = input.candidates.get(target)?;
        if input.excluded.contains(&target) {
            return Some("it failed this turn before".to_owned());
        }
        if exclude.contains(&target) {
            return Some("it is excluded".to_owned());
        }
        (!view.is_ready()).then(|| format!("it is {}", view.state.name()))
    }

    /// A worker's id.
    pub fn name(&self, worker: WorkerId) -> String {
        self.candidates().get(worker).map_or_else(|| worker.to_string(), |view| view.id.to_string())
    }
}

impl From<EndEntry> for EndFacts {
    fn from(end: EndEntry) -> Self {
        Self {
            worker: end.worker.map(Arc::from),
            status: end.status,
            prompt_tokens: end.prompt_tokens,
            completion_tokens: end.completion_tokens,
            cached_tokens: end.cached_tokens,
            ttft_ms: end.ttft_ms,
            finish_reason: end.finish_reason,
        }
    }
}
