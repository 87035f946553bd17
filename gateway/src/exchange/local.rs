//! Paths the gateway answers itself: health, and the models of all pools together. Everything else is 404; the engine's
//! administrative and session routes are not on any list, so none is reachable.

use super::Connection;
use crate::errors::{Kind, Refusal};
use crate::gateway::Gateway;
use crate::respond::{send, send_json, send_refusal};
use crate::workers::reports::Models;
use bytes::Bytes;
use http::Method;
use pingora_core::protocols::http::ServerSession;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use turnstile_fleet::route::Protocol;
use turnstile_fleet::worker::WorkerState;

const MODELS_LIMIT: usize = 1024 * 1024;
const MODELS_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) async fn serve(gateway: &Arc<Gateway>, client: &mut ServerSession, request_id: &str) -> Connection {
    let head = client.req_header();
    let reads = head.method == Method::GET || head.method == Method::HEAD;
    let path = head.uri.path().to_owned();
    let method = head.method.clone();
    let known =
        matches!(path.as_str(), "/health" | "/ready" | "/live" | "/v1/models") || path.starts_with("/v1/models/");
    let answer = match path.as_str() {
        _ if known && !reads => Err(Refusal::new(Kind::MethodNotAllowed, format!("{path} takes GET only"))),
        "/live" => Ok((200, json!({"status": "live"}))),
        "/health" | "/ready" => Ok(health(gateway)),
        "/v1/models" => Ok((200, json!({"object": "list", "data": models(gateway).await}))),
        _ if known => model(gateway, path.trim_start_matches("/v1/models/")).await,
        _ => Err(Refusal::new(Kind::NotFound, format!("no route {method} {path}"))),
    };
    let close = !client.is_body_done() && !reads;
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
    if written.is_err() || close { Connection::Cut } else { Connection::Keep }
}

fn health(gateway: &Gateway) -> (u16, Value) {
    let ready = gateway.ready_workers();
    let stopping = gateway.is_stopping();
    let status = if stopping {
        "stopping"
    } else if ready == 0 {
        "no_worker"
    } else {
        "ready"
    };
    let code = if status == "ready" { 200 } else { 503 };
    (code, json!({"status": status, "ready_workers": ready}))
}

/// The cards of all pools, each model once: what the pools' workers tell, and models that only the configuration names.
async fn models(gateway: &Arc<Gateway>) -> Vec<Value> {
    let generation = gateway.generation.load_full();
    let mut cards: Vec<Value> = Vec::new();
    let known = |cards: &[Value], id: &str| cards.iter().any(|c| c["id"] == id);
    for pool in &generation.pools {
        let worker = pool.workers.iter().find(|w| w.state() == WorkerState::Ready).and_then(|w| w.target());
        let mut told = Models::default();
        if let Some(target) = worker {
            let reply =
                gateway.fleet.upstream.exchange(&target, "GET", "/v1/models", None, MODELS_TIMEOUT, MODELS_LIMIT);
            match reply.await {
                Ok(reply) if reply.is_success() => told = serde_json::from_slice(&reply.body).unwrap_or_default(),
                Ok(reply) => tracing::warn!(pool = %pool.name, status = reply.status, "/v1/models failed"),
                Err(error) => tracing::warn!(pool = %pool.name, %error, "/v1/models failed"),
            }
        }
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

async fn model(gateway: &Arc<Gateway>, id: &str) -> Result<(u16, Value), Refusal> {
    let found = models(gateway).await.into_iter().find(|c| c["id"] == id);
    found.map(|card| (200, card)).ok_or_else(|| {
        Refusal::new(Kind::ModelNotFound, format!("the model {id:?} does not exist")).with_param("model")
    })
}
