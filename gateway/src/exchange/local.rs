//! Paths the gateway answers itself: health, and the models of all pools together; and what a path may be asked (OPTIONS).
//! Everything else is 404; the engine's administrative and session routes are not on any list, so none is reachable.

use super::Connection;
use crate::errors::{Kind, Refusal};
use crate::gateway::Gateway;
use crate::generation::PoolRuntime;
use crate::respond::{send, send_json, send_refusal};
use crate::upstream::Target;
use crate::workers::reports::Models;
use bytes::Bytes;
use futures::StreamExt;
use futures::future::join_all;
use futures::stream::FuturesUnordered;
use http::Method;
use pingora_core::protocols::http::ServerSession;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use turnstile_fleet::route::{Protocol, Route};

const MODELS_LIMIT: usize = 1024 * 1024;
const MODELS_TIMEOUT: Duration = Duration::from_secs(5);

/// Methods of the inference routes.
pub(super) const INFERENCE_METHODS: &str = "POST, OPTIONS";
/// Methods of the routes answered here.
const LOCAL_METHODS: &str = "GET, HEAD, OPTIONS";

/// `checked`: what the check of the head says.
pub(super) async fn serve(
    gateway: &Arc<Gateway>,
    client: &mut ServerSession,
    request_id: &str,
    checked: Result<(), Refusal>,
) -> Connection {
    let head = client.req_header();
    let reads = head.method == Method::GET || head.method == Method::HEAD;
    let path = head.uri.path().to_owned();
    let method = head.method.clone();
    let known = is_local(&path);
    if method == Method::OPTIONS && checked.is_ok() && (known || path == "*" || Route::from_path(&path).is_some()) {
        return options(client, &path, request_id).await;
    }
    let closes = checked.as_ref().is_err_and(|refusal| refusal.closes);
    let answer = match path.as_str() {
        _ if checked.is_err() => checked.map(|()| (200, Value::Null)),
        _ if known && !reads => {
            let refusal = Refusal::new(Kind::MethodNotAllowed, format!("{path} takes GET only"));
            Err(refusal.with_header("allow", LOCAL_METHODS))
        }
        "/live" => Ok((200, json!({"status": "live"}))),
        "/health" | "/ready" => Ok(health(gateway)),
        "/v1/models" => Ok((200, json!({"object": "list", "data": models(gateway).await}))),
        _ if known => model(gateway, path.trim_start_matches("/v1/models/")).await,
        _ => Err(Refusal::new(Kind::NotFound, format!("no route {method} {path}"))),
    };
    let close = closes || !client.is_body_done();
    let written = match answer {
        Ok((status, value)) if status == 200 && path != "/v1/models" && !path.starts_with("/v1/models/") => {
            let extra = [("x-request-id", request_id), ("cache-control", "no-store")];
            send(client, status, "application/json", Bytes::from(value.to_string()), &extra).await
        }
        Ok((status, value)) => send_json(client, status, &value, request_id).await,
        Err(refusal) => {
            gateway.metrics.refusals.with_label_values(&[refusal.kind.row().code]).inc();
            send_refusal(client, &refusal, Protocol::OpenAi, request_id, close).await
        }
    };
    match written {
        Ok(()) if !close => Connection::Keep,
        Ok(()) => Connection::Close,
        Err(_) => Connection::Cut,
    }
}

fn is_local(path: &str) -> bool {
    matches!(path, "/health" | "/ready" | "/live" | "/v1/models") || path.starts_with("/v1/models/")
}

/// Says what a path may be asked. A browser asks it before it sends a request of another origin; it is told what SGLang tells,
/// since the answers it asks for are SGLang's.
async fn options(client: &mut ServerSession, path: &str, request_id: &str) -> Connection {
    let methods = match path {
        "*" => "GET, HEAD, POST, OPTIONS",
        _ if is_local(path) => LOCAL_METHODS,
        _ => INFERENCE_METHODS,
    };
    let told = |name: &str| client.get_header(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
    let (origin, headers) = (told("origin"), told("access-control-request-headers"));
    let mut extra = vec![("x-request-id", request_id), ("allow", methods)];
    if let Some(origin) = origin.as_deref().filter(|_| client.get_header("access-control-request-method").is_some()) {
        extra.extend([
            ("access-control-allow-origin", origin),
            ("access-control-allow-credentials", "true"),
            ("access-control-allow-methods", methods),
            ("access-control-max-age", "600"),
            ("vary", "Origin, Access-Control-Request-Method, Access-Control-Request-Headers"),
        ]);
        extra.extend(headers.as_deref().map(|headers| ("access-control-allow-headers", headers)));
    }
    match send(client, 200, "text/plain; charset=utf-8", Bytes::from_static(b"OK"), &extra).await {
        Ok(()) if client.is_body_done() => Connection::Keep,
        Ok(()) => Connection::Close,
        Err(_) => Connection::Cut,
    }
}

fn health(gateway: &Gateway) -> (u16, Value) {
    let (code, status) = match () {
        () if gateway.is_stopping() => (503, "stopping"),
        () if gateway.takes_turns() => (200, "ready"),
        () => (503, "no_worker"),
    };
    (code, json!({"status": status, "ready_workers": gateway.ready_workers()}))
}

/// The cards of all pools, each model once: what the pools' workers tell, and models that only the configuration names.
async fn models(gateway: &Arc<Gateway>) -> Vec<Value> {
    let generation = gateway.generation.load_full();
    let mut cards: Vec<Value> = Vec::new();
    let known = |cards: &[Value], id: &str| cards.iter().any(|c| c["id"] == id);
    let told = join_all(generation.pools.iter().map(|pool| told_by(gateway, pool))).await;
    for (pool, told) in generation.pools.iter().zip(told) {
        for card in told.data {
            let Some(id) = card["id"].as_str() else { continue };
            if (pool.models.is_empty() || pool.models.iter().any(|m| m == id)) && !known(&cards, id) {
                cards.push(card);
            }
        }
        for name in &pool.models {
            if !known(&cards, name) {
                cards.push(json!({"id": name, "object": "model", "created": generation.loaded_at / 1000, "owned_by": "sglang"}));
            }
        }
    }
    cards
}

/// What a worker of a pool tells of its models.
async fn told_by(gateway: &Gateway, pool: &PoolRuntime) -> Models {
    let Some(target) = one_that_answers(gateway, pool).await else { return Models::default() };
    let reply = gateway.fleet.upstream.exchange(&target, "GET", "/v1/models", None, MODELS_TIMEOUT, MODELS_LIMIT);
    match reply.await {
        Ok(reply) if reply.is_success() => return serde_json::from_slice(&reply.body).unwrap_or_default(),
        Ok(reply) => tracing::warn!(pool = %pool.name, status = reply.status, "/v1/models failed"),
        Err(error) => tracing::warn!(pool = %pool.name, %error, "/v1/models failed"),
    }
    Models::default()
}

/// A worker of a pool that answers; those that a start or a reload has brought are waited for until one was probed well.
async fn one_that_answers(gateway: &Gateway, pool: &PoolRuntime) -> Option<Arc<Target>> {
    let workers = gateway.fleet.candidates(pool, &[]).workers;
    let answers = || workers.iter().find(|worker| worker.answers_probes()).and_then(|worker| worker.target());
    let unprobed = workers.iter().filter(|worker| !worker.is_probed());
    let mut probes: FuturesUnordered<_> = unprobed.map(|worker| worker.first_probe()).collect();
    let probed = async { while answers().is_none() && probes.next().await.is_some() {} };
    let _ = tokio::time::timeout(MODELS_TIMEOUT, probed).await;
    answers()
}

async fn model(gateway: &Arc<Gateway>, id: &str) -> Result<(u16, Value), Refusal> {
    let found = models(gateway).await.into_iter().find(|c| c["id"] == id);
    found.map(|card| (200, card)).ok_or_else(|| {
        Refusal::new(Kind::ModelNotFound, format!("the model {id:?} does not exist")).with_param("model")
    })
}
