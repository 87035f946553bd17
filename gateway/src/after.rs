//! After the stream: what a turn taught, and the speculative prefill of the next one.

use crate::exchange::Record;
use crate::gateway::Gateway;
use crate::generation::Generation;
use crate::placement::Placed;
use crate::request_id::random_hex;
use crate::side::{SideKind, SideRequest, SideResult};
use crate::workers::Worker;
use bytes::Bytes;
use hashbrown::HashMap;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;
use turnstile_fleet::decision::Decision;
use turnstile_fleet::ids::{SessionKey, WorkerId};
use turnstile_fleet::observe::Observation;
use turnstile_fleet::prefill::next_turn_body;
use turnstile_fleet::reply::Reply;
use turnstile_fleet::route::Route;
use turnstile_fleet::session::SessionAction;
use turnstile_fleet::turn::{Turn, UpstreamPlan, understand};
use turnstile_fleet::worker::WorkerState;

/// Prefills that run, by session and by worker.
#[derive(Default)]
pub struct Prefills {
    inner: Mutex<Running>,
}

#[derive(Default)]
struct Running {
    by_session: HashMap<SessionKey, CancellationToken>,
    by_worker: HashMap<WorkerId, u32>,
}

impl Prefills {
    /// The real turn of a session came, or the session ended.
    pub fn cancel(&self, key: SessionKey) {
        if let Some(token) = self.inner.lock().by_session.remove(&key) {
            token.cancel();
        }
    }

    /// Reserves a place, unless the worker has enough of them or the session has one already.
    fn reserve(
        &self,
        key: Option<SessionKey>,
        worker: WorkerId,
        per_worker: u32,
    ) -> Result<CancellationToken, &'static str> {
        let mut inner = self.inner.lock();
        if key.is_some_and(|key| inner.by_session.contains_key(&key)) {
            return Err("skipped: one runs for the session");
        }
        let running = inner.by_worker.entry(worker).or_insert(0);
        if *running >= per_worker {
            return Err("skipped: worker budget");
        }
        *running += 1;
        let token = CancellationToken::new();
        if let Some(key) = key {
            inner.by_session.insert(key, token.clone());
        }
        Ok(token)
    }

    fn release(&self, key: Option<SessionKey>, worker: WorkerId, token: &CancellationToken) {
        let mut inner = self.inner.lock();
        if let Some(running) = inner.by_worker.get_mut(&worker) {
            *running = running.saturating_sub(1);
        }
        // A newer prefill of the same session keeps its place.
        if let Some(key) = key
            && !token.is_cancelled()
        {
            inner.by_session.remove(&key);
        }
    }
}

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
    let worker = turn.worker;
    let (state, waiting, takes_priority) = worker.with_model(|m| (m.state, m.load().waiting, m.capabilities.priority));
    if state != WorkerState::Ready {
        return Err("skipped: worker not ready");
    }
    if waiting >= options.skip_when_waiting || gateway.fleet.admission.depth() > 0 {
        return Err("skipped: load");
    }
    let rid = random_hex();
    let plan = UpstreamPlan {
        rid: Some(&rid),
        priority: options.engine_priority.filter(|_| takes_priority),
        ask_usage: false,
        ..*turn.plan
    };
    let body = next_turn_body(turn.turn, reply, &plan).ok_or("skipped: cannot be rendered")?;
    if body.len() > options.max_body_bytes.as_usize() {
        return Err("skipped: too large");
    }
    let token = gateway.prefills.reserve(turn.key, worker.index, options.per_worker)?;
    // What the worker will have once it is done; hashed as the real turn will be.
    let blocks = understand(Route::Chat, &http::HeaderMap::new(), body.clone(), &generation.understand)
        .map(|t| t.prefix.blocks)
        .unwrap_or_default();
    let gateway_of_task = Arc::clone(gateway);
    let (key, index, done_token) = (turn.key, worker.index, token.clone());
    let (worker_of_task, timeout) = (Arc::clone(worker), gateway.fleet.settings().side_timeout);
    gateway.fleet.side.send(SideRequest {
        kind: SideKind::Prefill,
        worker: Arc::clone(worker),
        body,
        timeout: Duration::from_secs(options.timeout_s),
        cancel: token,
        done: Box::new(move |result| {
            gateway_of_task.prefills.release(key, index, &done_token);
            match result {
                SideResult::Ok(_) => gateway_of_task.fleet.index.lock().insert(index, &blocks),
                // The engine notices a gone client of a non-streaming request only by a poll; the real turn is waiting.
                SideResult::Cancelled => gateway_of_task.fleet.side.send(SideRequest {
                    kind: SideKind::Abort,
                    worker: worker_of_task,
                    body: Bytes::from(serde_json::json!({ "rid": rid }).to_string()),
                    timeout,
                    cancel: CancellationToken::new(),
                    done: Box::new(|_| {}),
                }),
                SideResult::Failed(_) => {}
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
    if prompt == 0 || turn.prefix.block_bytes == 0 {
        return;
    }
    let bytes = turn.prefix.bytes as f64 * cached as f64 / prompt as f64;
    // A block is only known to be missing when the whole of it lies beyond what was cached.
    let reported = (bytes / turn.prefix.block_bytes as f64).ceil() as usize;
    if placed.matched_blocks > reported {
        let mut index = gateway.fleet.index.lock();
        index.correct(worker.index, &turn.prefix.blocks, reported);
        index.insert(worker.index, &turn.prefix.blocks);
    }
}
