//! One decision of one policy, and what its host made of it.

use super::situation::Situation;
use super::subject::{Line, Services, Started, level_name};
use super::trace::{Access, Traced};
use crate::gateway::STORE;
use crate::policy::PolicyEnv;
use crate::policy::events::EVENT_FUNCTION;
use crate::policy::store::SharedStore;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};
use turnstile_config::Phase;
use turnstile_fleet::decision::{Decision, EnginePriority};
use turnstile_fleet::facts::{default_json, session_json};
use turnstile_plugins::{Lent, StreamEnv};

/// What came of a trial.
pub struct Trial {
    /// What the policy asked for while it decided, in order.
    pub accesses: Vec<Access>,
    /// What it asked for in events of the answer.
    pub in_events: Vec<Access>,
    /// What it asked for at the end of the turn.
    pub at_end: Vec<Access>,
    /// What it asked for beyond what is remembered.
    pub left_out: u64,
    /// What was written and taken.
    pub written: Decision,
    /// What holds: what was written, completed and kept to the safety rules.
    pub settled: Decision,
    /// Whether the policy's target is where the turn goes.
    pub followed: bool,
    /// Why it is not, if one was written.
    pub why_not: Option<String>,
    /// An answer of the policy's in a worker's place: its status.
    pub answered: Option<u16>,
    /// It paused. A gateway waits for it here; a trial waits for nobody, and settles what it had written.
    pub paused: bool,
    /// It broke the exchange off.
    pub closed: bool,
    /// Why a callback did not return.
    pub fault: Option<String>,
    /// Events for the decision log.
    pub events: Vec<String>,
    /// What the plugin logged, while it was started too.
    pub log: Vec<Line>,
    /// What the decision took.
    pub decide: Duration,
    /// What the end of the turn took.
    pub end: Duration,
}

/// Lets a plugin decide on a turn.
pub fn run(started: &Started, situation: &Situation) -> Trial {
    let Started { plugin, services, .. } = started;
    let mut env = Lent::new(Traced::new(environment(services, situation), situation.turn.head.clone()));
    let mut stream = plugin.open_stream(0);
    let began = Instant::now();
    let outcome = stream.on_request_headers(&mut env, true);
    let decide = began.elapsed();
    let accesses = env.accesses().list();

    let (mut answered, mut paused, mut closed, mut fault) = (None, false, false, None);
    match outcome {
        Ok(outcome) => {
            paused = outcome.paused_request();
            closed = outcome.effects.close_downstream || outcome.effects.close_upstream;
            answered = outcome.effects.local_response.map(|response| response.status);
        }
        Err(failure) => {
            fault = Some(failure.to_string());
            // As in the gateway: what was written before a fault is as suspect as the plugin.
            env.env.decision = Decision::default();
        }
    }
    let written = env.env.decision.clone();
    let mut settled = written.clone();
    let followed = situation.settle(&mut settled);
    let why_not = match written.route.target.filter(|_| !followed) {
        Some(target) => {
            let exclude = settled.route.exclude.as_deref().unwrap_or_default();
            let why = situation.why_not(target, exclude).unwrap_or_else(|| "it cannot take the turn".to_owned());
            Some(format!("{} was the target: {why}", situation.name(target)))
        }
        None => None,
    };

    for event in &situation.events {
        // A policy that failed before is told of nothing.
        if fault.is_some() {
            break;
        }
        fault =
            stream.on_foreign_function(&mut env, EVENT_FUNCTION, event.clone()).err().map(|fault| fault.to_string());
    }
    let until_end = env.accesses().list().len();
    env.env.finish(situation.end());
    let began = Instant::now();
    if let Err(failure) = stream.finish(&mut env)
        && fault.is_none()
    {
        fault = Some(failure.to_string());
    }
    let end = began.elapsed();
    let mut in_events = env.accesses().list().split_off(accesses.len());
    let at_end = in_events.split_off(until_end.saturating_sub(accesses.len()).min(in_events.len()));
    let left_out = env.accesses().left_out();
    let events = std::mem::take(&mut env.env.events);
    let log = services.take();
    Trial {
        accesses,
        in_events,
        at_end,
        left_out,
        written,
        settled,
        followed,
        why_not,
        answered,
        paused,
        closed,
        fault,
        events,
        log,
        decide,
        end,
    }
}

/// The environment that a policy gets, without a trace.
pub fn environment(services: &Services, situation: &Situation) -> PolicyEnv {
    use turnstile_plugins::PluginServices;
    situation.env(Arc::new(SharedStore(services.shared().data.space(STORE))))
}

/// The facts that a policy could read, those about the request, the session, the workers and the built-in's decision.
fn facts(services: &Services, situation: &Situation, phase: Phase) -> Value {
    let mut env = environment(services, situation);
    let mut read = |name: &str| -> Value {
        let value = env.property(format!("turnstile.{name}").as_bytes());
        value.and_then(|value| serde_json::from_slice(&value).ok()).unwrap_or(Value::Null)
    };
    let mut facts = Map::new();
    let names: &[&str] = match phase {
        Phase::Route => &["request", "session", "workers", "default", "attempt", "last_error"],
        _ => &["request", "session", "default"],
    };
    for name in names {
        facts.insert((*name).to_owned(), read(name));
    }
    Value::Object(facts)
}

// === impl Trial ===

impl Trial {
    /// The report: everything but times, so that the same plugin, turn and fleet give the same text.
    pub fn to_json(&self, started: &Started, situation: &Situation, phase: Phase) -> Value {
        let list = |accesses: &[Access]| accesses.iter().map(Access::to_json).collect::<Vec<_>>();
        json!({
            "plugin": &**started.plugin.name(),
            "phase": phase.as_str(),
            "facts": facts(&started.services, situation, phase),
            "asked": list(&self.accesses),
            "written": written(&self.written, situation),
            "refused": self.refused(),
            "followed": self.followed,
            "not_followed_because": self.why_not,
            "answered": self.answered,
            "paused": self.paused,
            "closed": self.closed,
            "fault": self.fault,
            "decision": settled(&self.settled, situation, phase),
            "events": self.events.iter().filter_map(|e| serde_json::from_str(e).ok()).collect::<Vec<Value>>(),
            "asked_in_events": list(&self.in_events),
            "asked_at_end": list(&self.at_end),
            "not_shown": self.left_out,
            "log": self.log.iter().map(|(l, t)| json!({"level": level_name(*l), "message": t})).collect::<Vec<_>>(),
        })
    }

    /// The writes that were dropped.
    fn refused(&self) -> Vec<Value> {
        let all = self.accesses.iter().chain(&self.in_events).chain(&self.at_end);
        all.filter(|access| matches!(access, Access::Write { refused: Some(_), .. })).map(Access::to_json).collect()
    }
}

/// What a policy wrote, by name, as it would read it back; workers by id.
fn written(decision: &Decision, situation: &Situation) -> Value {
    let mut map = Map::new();
    for name in Decision::NAMES {
        if let Some(value) = decision.read(name) {
            map.insert(name.to_owned(), named(name, &value, decision, situation));
        }
    }
    for (name, text) in &decision.log {
        map.insert(format!("log.{name}"), Value::from(text.as_str()));
    }
    Value::Object(map)
}

fn named(name: &str, value: &str, decision: &Decision, situation: &Situation) -> Value {
    let names = |workers: &Option<Vec<_>>| -> Value {
        workers.iter().flatten().map(|worker| Value::from(situation.name(*worker))).collect()
    };
    match name {
        "route.target" => decision.route.target.map_or(Value::Null, |worker| situation.name(worker).into()),
        "route.fallbacks" => names(&decision.route.fallbacks),
        "route.exclude" => names(&decision.route.exclude),
        "route.scores" => scores(decision, situation),
        _ => Value::from(value),
    }
}

fn scores(decision: &Decision, situation: &Situation) -> Value {
    let scores = decision.route.scores.iter().flatten();
    Value::Object(scores.map(|(worker, cost)| (situation.name(*worker), Value::from(*cost))).collect())
}

/// The decision that holds.
fn settled(decision: &Decision, situation: &Situation, phase: Phase) -> Value {
    let names = |workers: &Option<Vec<_>>| -> Vec<String> {
        workers.iter().flatten().map(|worker| situation.name(*worker)).collect()
    };
    let route = json!({
        "target": decision.route.target.map(|worker| situation.name(worker)),
        "fallbacks": names(&decision.route.fallbacks),
        "exclude": names(&decision.route.exclude),
        "scores": scores(decision, situation),
        "reason": decision.route.reason,
        "why": decision.route.why.name(),
    });
    json!({
        "route": if phase == Phase::Route { route } else { Value::Null },
        "queue": {
            "tier": decision.queue.tier,
            "head_start_ms": decision.queue.head_start_ms,
            "deadline_ms": decision.queue.deadline_ms,
            "flow": decision.queue.flow,
        },
        "session": {
            "action": decision.session.action.map(|action| action.name()),
            "key": decision.session.key,
            "ttl_ms": decision.session.ttl_ms,
            "mode": decision.session.mode.map(|mode| mode.name()),
        },
        "prefill": decision.prefill,
        "engine_priority": decision.engine_priority.map(|priority| match priority {
            EnginePriority::Send(priority) => Value::from(priority),
            EnginePriority::Omit => Value::from("none"),
        }),
    })
}

/// The facts about a session and the built-in's decision, for the text report.
pub fn summary(situation: &Situation) -> (Option<String>, String) {
    let candidates = situation.candidates();
    let session = situation.session.as_ref().map(|session| {
        let worker = session.worker.and_then(|worker| candidates.get(worker)).map(|view| &*view.id);
        session_json(session, worker)
    });
    (session, default_json(&situation.builtin, &candidates))
}
