//! Shadows: policies that decide beside the others without effect, and what they would have done differently.

use super::env::Spoken;
use crate::metrics::Metrics;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use turnstile_config::Phase;
use turnstile_fleet::decision::{DecideOptions, Decision, RouteInput};
use turnstile_fleet::ids::WorkerId;
use turnstile_fleet::session::SessionAction;
use turnstile_plugins::{Fault, LocalResponse};

/// Decisions that are compared as they were written.
const ALONE: [&str; 7] =
    ["queue.deadline_ms", "queue.flow", "session.key", "session.ttl_s", "session.mode", "prefill", "engine.priority"];

/// What a shadow decided when it was asked.
pub struct Opinion {
    /// The shadow.
    pub plugin: Arc<str>,
    /// What others had written by then, with what it wrote.
    pub after: Decision,
    /// What it wrote about: it may agree with what others had written.
    pub spoken: Spoken,
    /// What it answered in a worker's place.
    pub answer: Option<Box<LocalResponse>>,
    /// How it failed.
    pub fault: Option<Box<Fault>>,
}

/// What was done, and how it came to that.
pub struct Applied<'a> {
    /// The phase.
    pub phase: Phase,
    /// What was done.
    pub decision: &'a Decision,
    /// What the native built-in would have done.
    pub builtin: &'a Decision,
    /// In the phase `route`: what it was decided on.
    pub route: Option<(&'a RouteInput<'a>, &'a DecideOptions)>,
}

/// Where a shadow differs from what was done, for the decision log.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// The shadow.
    pub plugin: Arc<str>,
    /// When it was asked.
    #[serde(skip)]
    pub phase: Phase,
    /// The worker it would have chosen; `-` for none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker: Option<Arc<str>>,
    /// What that worker would have cost beyond the one chosen, ms, by the built-in's cost; below 0: less.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost_ms: Option<f64>,
    /// The tier and the head start in ms that it would have given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub order: Option<(u32, i64)>,
    /// The session action it would have taken.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<&'static str>,
    /// Of the decisions that stand for themselves, what it would have decided, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub decisions: BTreeMap<&'static str, String>,
    /// The status it would have answered with in a worker's place.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer: Option<u16>,
    /// How it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<&'static str>,
}

impl Opinion {
    /// Holds it against what was done, and counts. Nothing if there is no difference.
    pub fn compare(&self, applied: &Applied<'_>, metrics: Option<&Metrics>) -> Option<Difference> {
        let plugin = &*self.plugin;
        let count = |about: &str, result: &str| {
            if let Some(metrics) = metrics {
                metrics.shadow_decisions.with_label_values(&[plugin, about, result]).inc();
            }
        };
        let mut difference = Difference {
            plugin: Arc::clone(&self.plugin),
            phase: applied.phase,
            worker: None,
            cost_ms: None,
            order: None,
            session: None,
            decisions: BTreeMap::new(),
            answer: None,
            failed: None,
        };
        if let Some(fault) = &self.fault {
            count("fault", "other");
            difference.failed = Some(fault.kind.as_str());
            return Some(difference);
        }
        if let Some(answer) = &self.answer {
            count("answer", "other");
            difference.answer = Some(answer.status);
            return Some(difference);
        }
        if let Some((mine, done)) = self.workers(applied) {
            count("worker", result(mine == done));
            if mine != done {
                let candidates = applied.route.map(|(input, _)| input.candidates);
                let id = mine.and_then(|worker| candidates?.get(worker)).map(|view| Arc::clone(&view.id));
                difference.worker = Some(id.unwrap_or_else(|| "-".into()));
                difference.cost_ms = cost(applied.builtin, mine).zip(cost(applied.builtin, done)).map(|(a, b)| a - b);
            }
            if let (Some(metrics), Some(more)) = (metrics, difference.cost_ms) {
                let direction = if more < 0.0 { "cheaper" } else { "dearer" };
                metrics.shadow_cost_ms.with_label_values(&[plugin, direction]).inc_by(more.abs());
            }
        }
        if applied.phase == Phase::Admit && self.spoken.of_order() {
            let (mine, done) = (order(&self.after, applied.builtin), order(applied.decision, applied.builtin));
            count("order", result(mine == done));
            difference.order = (mine != done).then_some(mine);
        }
        if self.spoken.of_session() {
            let (mine, done) = (session(&self.after, applied.builtin), session(applied.decision, applied.builtin));
            count("session", result(mine == done));
            difference.session = (mine != done).then_some(mine);
        }
        for name in self.spoken.names().filter(|name| ALONE.contains(name)) {
            if (applied.phase == Phase::Admit) != name.starts_with("queue.") {
                // What the other phase decides may still come to the same.
                continue;
            }
            let mine = self.after.read(name).or_else(|| applied.builtin.read(name));
            let same = applied.decision.read(name).or_else(|| applied.builtin.read(name)) == mine;
            count(name, result(same));
            if !same {
                // These name clients: the log tells of them as hashes only.
                let names_clients = matches!(name, "session.key" | "queue.flow");
                let mine = if names_clients { Some("another".to_owned()) } else { mine };
                difference.decisions.insert(name, mine.unwrap_or_else(|| "-".to_owned()));
            }
        }
        let differs = difference.worker.is_some()
            || difference.order.is_some()
            || difference.session.is_some()
            || !difference.decisions.is_empty();
        differs.then_some(difference)
    }

    /// The worker it would have come to, and the one that was chosen. Nothing if it said nothing about workers.
    fn workers(&self, applied: &Applied<'_>) -> Option<(Option<WorkerId>, Option<WorkerId>)> {
        let (input, options) = applied.route?;
        if !self.spoken.of_workers() {
            return None;
        }
        let mut mine = self.after.clone();
        mine.settle(applied.builtin, input, options);
        Some((mine.route.target, applied.decision.route.target))
    }
}

fn result(same: bool) -> &'static str {
    if same { "same" } else { "other" }
}

fn cost(builtin: &Decision, worker: Option<WorkerId>) -> Option<f64> {
    let worker = worker?;
    builtin.route.scores.as_ref()?.iter().find(|(scored, _)| *scored == worker).map(|(_, cost)| *cost)
}

fn order(decision: &Decision, builtin: &Decision) -> (u32, i64) {
    let tier = decision.queue.tier.or(builtin.queue.tier).unwrap_or(0);
    (tier, decision.queue.head_start_ms.or(builtin.queue.head_start_ms).unwrap_or(0))
}

fn session(decision: &Decision, builtin: &Decision) -> &'static str {
    decision.session.action.or(builtin.session.action).unwrap_or(SessionAction::None).name()
}
