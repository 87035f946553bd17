//! How a request would be placed now: the policies run and nothing is sent, counted or bound.

use crate::gateway::Gateway;
use crate::placement::{NoPlace, Request, choose, order_input, own_key, session_input};
use crate::policy::{Applied, PolicyEnv, TurnFacts, TurnPolicies, Verdict};
use crate::recorded_request::RecordedRequest;
use serde_json::{Value, json};
use std::sync::Arc;
use turnstile_config::Phase;
use turnstile_fleet::decision::{Candidates, Decision, RouteInput, decide};
use turnstile_fleet::session::SessionAction;
use turnstile_fleet::turn::understand;

/// Explains one request.
///
/// # Errors
/// What is wrong with the question, or with the request in it.
pub fn explain(gateway: &Arc<Gateway>, question: &[u8]) -> Result<Value, String> {
    let question = RecordedRequest::read(question)?;
    let route = question.route;
    let generation = gateway.generation.load_full();
    let turn = understand(route, &question.headers, question.body.clone(), &generation.understand);
    let turn = Arc::new(turn.map_err(|e| e.message)?);
    let pool = generation
        .pool_for(turn.model.as_deref())
        .ok_or_else(|| format!("no pool serves the model {:?}", turn.model.as_deref().unwrap_or_default()))?;
    let action = turn.control.action.map_or(SessionAction::None, SessionAction::from);
    let prompt_tokens = turn.prompt_tokens(gateway.fleet.bytes_per_token(&pool.name));
    let head = question.head("explain");
    let session = own_key(pool, &turn).and_then(|key| gateway.fleet.sessions.view(key));
    let facts = Arc::new(TurnFacts { turn: Arc::clone(&turn), prompt_tokens, action, number: 1, head });
    let env = PolicyEnv::new(facts, session, Arc::clone(&gateway.store));
    let mut policies =
        TurnPolicies::new(Arc::clone(&generation.chain), env, 0, Arc::clone(&gateway.metrics)).uncounted();

    let empty = RouteInput {
        candidates: Candidates::new(&[], &[]),
        prompt_tokens,
        affinity_hash: turn.prefix.affinity_hash,
        bound: None,
        excluded: &[],
    };
    let wanted = session_input(&turn, action, false, generation.max_ttl_ms);
    let builtin: Decision = decide(&empty, &order_input(&turn), &wanted, &generation.decide);
    if let Verdict::Answer { plugin, response } = policies.run(Phase::Admit, &builtin) {
        return Ok(json!({"answered_by": &*plugin, "status": response.status}));
    }
    let admitted = policies.env.decision.clone();
    policies.compare(&Applied { phase: Phase::Admit, decision: &admitted, builtin: &builtin, route: None });
    let request = Request {
        turn: &turn,
        prompt_tokens,
        action,
        excluded: &[],
        attempt: 0,
        last_error: None,
        ticket: None,
        wanted: None,
    };
    let choice = match choose(&gateway.fleet, &generation, pool, &request, &mut policies) {
        Ok(choice) => choice,
        Err(NoPlace::Answer(plugin, response)) => {
            return Ok(json!({"answered_by": &*plugin, "status": response.status}));
        }
        Err(NoPlace::Closed(fault)) => return Ok(json!({"failed_closed": &*fault.plugin})),
        Err(NoPlace::Close(plugin)) => return Ok(json!({"closed_by": &*plugin})),
        Err(NoPlace::NoWorker | NoPlace::Awaited | NoPlace::Busy(..) | NoPlace::Paused) => {
            return Ok(json!({"worker": null}));
        }
    };
    policies.finish();
    let decision = &choice.decision;
    let name = |w| choice.views.iter().find(|v| v.index == w).map(|v| v.id.to_string());
    let candidates: Vec<Value> = choice
        .views
        .iter()
        .zip(choice.cached.iter())
        .map(|(view, cached)| {
            json!({
                "id": &*view.id, "state": view.state.name(), "cost_ms": choice.cost(view.index),
                "cached_tokens": cached, "at_limit": view.at_limit(&generation.decide.limits),
                "in_flight": view.in_flight, "running": view.running, "waiting": view.waiting,
            })
        })
        .collect();
    Ok(json!({
        "generation": generation.number,
        "pool": &*pool.name,
        "route": route.name(),
        "prompt_tokens": prompt_tokens,
        "identity": {
            "tenant": turn.identity.tenant.to_string(),
            "session": turn.identity.session.as_ref().map(|s| s.text.clone()),
            "source": turn.identity.source.name(),
            "agent": turn.identity.agent.name(),
        },
        "session": choice.session.as_ref().map(|s| json!({
            "mode": s.mode.name(), "worker": s.worker.and_then(name), "turns": s.turns, "idle_ms": s.idle_ms,
        })),
        "queue": {
            "depth": gateway.fleet.admission.depth(),
            "tier": decision.queue.tier, "head_start_ms": decision.queue.head_start_ms, "flow": decision.queue.flow,
        },
        "session_decision": {
            "action": decision.session.action.map(SessionAction::name),
            "mode": decision.session.mode.map(|m| m.name()),
            "ttl_ms": decision.session.ttl_ms,
        },
        "worker": decision.route.target.and_then(name),
        "reason": decision.route.reason.clone().unwrap_or_else(|| decision.route.why.name().into()),
        "fallbacks": decision.route.fallbacks.as_ref().map(|f| f.iter().copied().filter_map(name).collect::<Vec<_>>()),
        "policies_followed": choice.followed,
        "canaries": policies.canaries().iter().map(|p| p.to_string()).collect::<Vec<_>>(),
        "shadows": serde_json::to_value(&policies.differences).unwrap_or(Value::Null),
        "failed_policies": policies.failed.iter().map(|p| p.to_string()).collect::<Vec<_>>(),
        "candidates": candidates,
    }))
}
