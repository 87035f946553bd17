//! How a request would be placed now: the policies run and nothing is sent, counted or bound.

use crate::gateway::Gateway;
use crate::placement::{NoPlace, Request, choose, order_input, own_key, session_input};
use crate::policy::{PolicyEnv, RequestHead, TurnFacts, TurnPolicies, Verdict};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::SystemTime;
use turnstile_config::Phase;
use turnstile_fleet::decision::{Candidates, Decision, RouteInput, decide};
use turnstile_fleet::route::Route;
use turnstile_fleet::session::SessionAction;
use turnstile_fleet::turn::understand;

/// The body of `POST /explain`.
#[derive(Deserialize)]
struct Question {
    #[serde(default = "chat")]
    path: String,
    #[serde(default)]
    headers: std::collections::BTreeMap<String, String>,
    body: Box<serde_json::value::RawValue>,
}

fn chat() -> String {
    "/v1/chat/completions".into()
}

/// Explains one request.
///
/// # Errors
/// What is wrong with the question, or with the request in it.
pub fn explain(gateway: &Arc<Gateway>, question: &[u8]) -> Result<Value, String> {
    let question: Question =
        serde_json::from_slice(question).map_err(|e| format!("expected {{path, headers, body}}: {e}"))?;
    let route = Route::from_path(&question.path).ok_or_else(|| format!("path: no route {}", question.path))?;
    let mut headers = HeaderMap::new();
    for (name, value) in &question.headers {
        let name = HeaderName::try_from(name.as_str()).map_err(|_| format!("headers: bad name {name:?}"))?;
        let value = HeaderValue::try_from(value.as_str()).map_err(|_| format!("headers.{name}: bad value"))?;
        headers.append(name, value);
    }
    let generation = gateway.generation.load_full();
    let body = Bytes::copy_from_slice(question.body.get().as_bytes());
    let turn = Arc::new(understand(route, &headers, body, &generation.understand).map_err(|e| e.message)?);
    let pool = generation
        .pool_for(turn.model.as_deref())
        .ok_or_else(|| format!("no pool serves the model {:?}", turn.model.as_deref().unwrap_or_default()))?;
    let action = turn.control.action.map_or(SessionAction::None, SessionAction::from);
    let prompt_tokens = turn.prompt_tokens(gateway.fleet.bytes_per_token(&pool.name));
    let head = RequestHead {
        method: Method::POST,
        path: Bytes::from(question.path.clone()),
        authority: Bytes::new(),
        headers: Arc::new(headers),
        request_id: Arc::from("explain"),
        peer: None,
        protocol: "HTTP/1.1",
        arrived: SystemTime::now(),
    };
    let session = own_key(pool, &turn).and_then(|key| gateway.fleet.sessions.view(key));
    let facts = Arc::new(TurnFacts { turn: Arc::clone(&turn), prompt_tokens, action, number: 1, head });
    let env = PolicyEnv::new(facts, session, Arc::clone(&gateway.store));
    let mut policies = TurnPolicies::new(Arc::clone(&generation.chain), env, 0, Arc::clone(&gateway.metrics));

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
    let request =
        Request { turn: &turn, prompt_tokens, action, excluded: &[], attempt: 0, last_error: None, ticket: None };
    let choice = match choose(&gateway.fleet, &generation, pool, &request, &mut policies) {
        Ok(choice) => choice,
        Err(NoPlace::Answer(plugin, response)) => {
            return Ok(json!({"answered_by": &*plugin, "status": response.status}));
        }
        Err(NoPlace::Closed(fault)) => return Ok(json!({"failed_closed": &*fault.plugin})),
        Err(NoPlace::Close(plugin)) => return Ok(json!({"closed_by": &*plugin})),
        Err(NoPlace::NoWorker | NoPlace::Busy(..) | NoPlace::Paused) => return Ok(json!({"worker": null})),
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
        "failed_policies": policies.failed.iter().map(|p| p.to_string()).collect::<Vec<_>>(),
        "candidates": candidates,
    }))
}
