//! After the stream: what a turn taught, and the speculative prefill of the next one.

use crate::exchange::Record;
use crate::gateway::Gateway;
use crate::generation::Generation;
use crate::placement::Placed;
use crate::request_id::random_hex;
use crate::side::{SideKind, SideRequest, SideResult};
use crate::workers::Worker;
use bytes::Bytes;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use turnstile_fleet::decision::Decision;
use turnstile_fleet::ids::SessionKey;
use turnstile_fleet::observe::Observation;
use turnstile_fleet::prefill::next_turn_body;
use turnstile_fleet::reply::Reply;
use turnstile_fleet::route::Route;
use turnstile_fleet::session::SessionAction;
use turnstile_fleet::steering::SteeringOptions;
use turnstile_fleet::turn::{Turn, UnderstandOptions, UpstreamPlan, understand};
use turnstile_fleet::worker::WorkerState;

/// Finish reasons after which a next turn is to be expected. Not after an abort, a filter or an error.
const FINISHED: [&str; 4] = ["stop", "tool_calls", "function_call", "length"];

/// Whether the reply has to be gathered: the turn asked for a prefill, or a policy wants one, and it could be made.
pub fn wants_prefill(generation: &Generation, turn: &Turn, decision: &Decision) -> bool {
    generation.config.prefill.enabled
        && turn.route == Route::Chat
        && decision.prefill.unwrap_or(turn.hints.speculative_prefill)
        && decision.session.action != Some(SessionAction::Close)
}

/// A finished turn.
pub struct Finished<'a> {
    /// The turn.
    pub turn: &'a Turn,
    /// What was decided.
    pub decision: &'a Decision,
    /// The assistant message.
    pub reply: Option<&'a Reply>,
    /// Who served it.
    pub worker: &'a Arc<Worker>,
    /// Its session.
    pub key: Option<SessionKey>,
    /// The session is a streaming one: its KV is kept by the engine, there is nothing to warm.
    pub streaming: bool,
    /// What was set in its body.
    pub plan: &'a UpstreamPlan<'a>,
    /// Its prompt tokens, as the worker reported them.
    pub prompt_tokens: Option<u64>,
}

/// Sends the prefill of the next turn, or says why not. Nothing when none was asked for.
pub fn prefill(gateway: &Arc<Gateway>, generation: &Arc<Generation>, turn: &Finished<'_>) -> Option<&'static str> {
    if !wants_prefill(generation, turn.turn, turn.decision) {
        return None;
    }
    let outcome = try_prefill(gateway, generation, turn);
    let label = match outcome {
        Ok(()) => return Some("sent"),
        Err(label) => label,
    };
    gateway.metrics.side_requests.with_label_values(&[SideKind::Prefill.label(), "skipped"]).inc();
    tracing::debug!(worker = %turn.worker.id, label, "prefill skipped");
    Some(label)
}

fn try_prefill(gateway: &Arc<Gateway>, generation: &Arc<Generation>, turn: &Finished<'_>) -> Result<(), &'static str> {
    let options = &generation.config.prefill;
    if turn.streaming {
        return Err("skipped: streaming session");
    }
    let reply = turn.reply.ok_or("skipped: no whole reply")?;
    if !FINISHED.contains(&reply.finish_reason.as_str()) {
        return Err("skipped: finish reason");
    }
    let worker = turn.worker;
    let mut held = Vec::new();
    gateway.fleet.sessions.held(std::iter::once(worker.index), &mut held);
    let mut view = worker.view(held.first().map_or(0, |held| held.idle_rows));
    if view.state != WorkerState::Ready {
        return Err("skipped: worker not ready");
    }
    // This turn counts as in flight until its request has ended, but the worker is done with it.
    view.in_flight = view.in_flight.saturating_sub(1);
    let waiting = view.waiting_now().max(view.unanswered);
    let full = view.at_limit(&generation.decide.limits);
    if waiting >= options.skip_when_waiting || full || gateway.fleet.admission.depth() > 0 {
        return Err("skipped: load");
    }
    let rid = random_hex();
    let plan = UpstreamPlan {
        rid: Some(&rid),
        priority: options.engine_priority.filter(|_| view.capabilities.priority),
        ask_usage: false,
        ..*turn.plan
    };
    let body = next_turn_body(turn.turn, reply, &plan).ok_or("skipped: cannot be rendered")?;
    if body.len() > options.max_body_bytes.as_usize() {
        return Err("skipped: too large");
    }
    let place = gateway.prefills.reserve(turn.key, worker.index, options.per_worker)?;
    // What the worker will have once it is done; hashed as the real turn will be. This body is ours and steered already.
    let own = UnderstandOptions { steering: SteeringOptions::trusting(), ..generation.understand.clone() };
    let blocks = understand(Route::Chat, &http::HeaderMap::new(), body.clone(), &own)
        .map(|t| t.prefix.blocks)
        .unwrap_or_default();
    let gateway_of_task = Arc::clone(gateway);
    let prompt_tokens = turn.prompt_tokens;
    let (worker_of_task, timeout) = (Arc::clone(worker), gateway.fleet.settings().side_timeout);
    let tag: Option<Arc<str>> = turn.plan.session_id.map(Arc::from);
    gateway.fleet.side.send(SideRequest {
        kind: SideKind::Prefill,
        worker: Arc::clone(worker),
        body,
        timeout: Duration::from_secs(options.timeout_s),
        cancel: place.cancel(),
        done: Box::new(move |result| {
            if let Some(tag) = &tag
                && !matches!(result, SideResult::NoRoom)
            {
                let cut = matches!(result, SideResult::Cancelled | SideResult::Failed(_));
                gateway_of_task.fleet.sessions.carried(&worker_of_task, tag, cut);
            }
            match result {
                SideResult::Ok(_) => {
                    place.done(prompt_tokens);
                    gateway_of_task.fleet.remember(&worker_of_task, &blocks);
                }
                // The engine notices a gone client of a non-streaming request only by a poll; the real turn is waiting.
                SideResult::Cancelled => {
                    place.lost("cancelled");
                    gateway_of_task.fleet.side.send(SideRequest {
                        kind: SideKind::Abort,
                        worker: worker_of_task,
                        body: Bytes::from(serde_json::json!({ "rid": rid }).to_string()),
                        timeout,
                        cancel: CancellationToken::new(),
                        done: Box::new(|_| {}),
                    });
                }
                SideResult::Refused(_) | SideResult::Failed(_) | SideResult::NoRoom => place.lost("failed"),
            }
        }),
    });
    Ok(())
}

/// Learns from a finished turn: rates, bytes per token, and how true the prefix index was.
#[allow(clippy::too_many_arguments)]
pub fn learn(
    gateway: &Gateway,
    turn: &Turn,
    worker: &Arc<Worker>,
    placed: &Placed,
    observation: &Observation,
    ttft_ms: f64,
    started: Instant,
    record: &Record,
) {
    let usage = &observation.usage;
    let metrics = &gateway.metrics;
    let id = &*worker.id;
    let decode_ms = (started.elapsed().as_secs_f64() * 1e3 - ttft_ms).max(0.0);
    if let Some(completion) = usage.completion_tokens {
        metrics.completion_tokens.with_label_values(&[id]).inc_by(completion);
        if turn.stream && completion > 1 {
            worker.with_model(|m| m.rates.observe_decode(completion - 1, decode_ms));
            let itl = decode_ms / 1e3 / (completion - 1) as f64;
            let pool = record.pool.as_deref().unwrap_or("");
            metrics.itl.with_label_values(&[record.route, pool]).observe(itl);
        }
    }
    let Some(prompt) = usage.prompt_tokens else { return };
    metrics.prompt_tokens.with_label_values(&[id, "prompt"]).inc_by(prompt);
    gateway.fleet.learn_bytes_per_token(&worker.settings().pool, turn.prefix.bytes, prompt);
    let Some(cached) = usage.cached_tokens else { return };
    if turn.stream {
        worker.with_model(|m| m.rates.observe_ttft(prompt.saturating_sub(cached), ttft_ms));
    }
    let predicted = placed.predicted_cached.min(prompt);
    metrics.prompt_tokens.with_label_values(&[id, "cached_reported"]).inc_by(cached);
    metrics.prompt_tokens.with_label_values(&[id, "cached_predicted"]).inc_by(predicted);
    metrics.prediction_error.with_label_values(&[id]).observe(predicted.abs_diff(cached) as f64);
    correct(gateway, turn, worker, placed, cached, prompt);
}

/// The worker had less than the index believed: what hangs on the missing blocks is dropped. The prompt itself is there now.
fn correct(gateway: &Gateway, turn: &Turn, worker: &Worker, placed: &Placed, cached: u64, prompt: u64) {
    let Some(reported) = turn.prefix.blocks_of(cached, prompt) else { return };
    if placed.matched_blocks > reported {
        gateway.fleet.index.lock().correct(worker.index, &turn.prefix.blocks, reported);
        gateway.fleet.remember(worker, &turn.prefix.blocks);
    }
}
