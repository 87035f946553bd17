//! The self-test of a plugin: a recorded request goes through it before it goes live.
//!
//! It runs on a start of its own, with shared data of its own, so that what goes live has not seen it. The workers are those
//! of the configuration, ready and idle, with nothing cached. A filter gets the request's headers and body; what it would do
//! with the answers to calls is not tried.

use crate::generation::{Foundation, decide_options, understand_options};
use crate::module_file;
use crate::placement::{order_input, session_input};
use crate::policy::{PolicyEnv, PolicyStore, RouteFacts, TurnFacts};
use crate::recorded_request::{RecordedRequest, pool_for};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use turnstile_config::{Config, Phase, Plugin as PluginConfig, Pool};
use turnstile_fleet::decision::{Candidates, RouteInput, decide};
use turnstile_fleet::ids::WorkerId;
use turnstile_fleet::session::SessionAction;
use turnstile_fleet::turn::understand;
use turnstile_fleet::worker::WorkerView;
use turnstile_plugins::{Body, CallResult, HttpEnv, Lent, Plugin, PluginSpec, RequestMap};

/// Runs the self-test of a plugin.
///
/// # Errors
/// Why it must not go live.
pub fn run(
    plugin: &PluginConfig,
    spec: &PluginSpec,
    file: &Path,
    config: &Config,
    foundation: &Foundation,
) -> Result<(), String> {
    let text = module_file::read(file).map_err(|e| format!("cannot be read: {e}"))?;
    let request = RecordedRequest::read(&text)?;
    let mut spec = spec.clone().with_shards(1);
    spec.vm_id.push_str("/self-test");
    let tried =
        Plugin::start(&foundation.runtime, spec, foundation.shared.clone()).map_err(|error| error.to_string())?;
    let result = match plugin.phase {
        Phase::Filter => filter(&tried, &request),
        // It is told of no request.
        Phase::Background => Ok(()),
        Phase::Admit | Phase::Route => policy(&tried, plugin.phase, &request, config, foundation.seed),
    };
    let late = tried.stats().late > 0;
    tried.shut_down(crate::clock::now_ms());
    result?;
    if late {
        return Err(format!("a call took longer than callback_timeout_ms, {}", plugin.callback_timeout_ms));
    }
    Ok(())
}

fn filter(plugin: &Plugin, request: &RecordedRequest) -> Result<(), String> {
    let head = request.head("self-test");
    let map = RequestMap::new(head.method.clone(), head.path.clone(), "self-test", Arc::clone(&head.headers));
    let size = request.body.len();
    let mut env = Lent::new(HttpEnv::request(map));
    env.request_body = Some(Body::new(request.body.clone()));
    let mut stream = plugin.open_stream(0);
    went_on(stream.on_request_headers(&mut env, size == 0))?;
    if size > 0 {
        went_on(stream.on_request_body(&mut env, size, true))?;
    }
    stream.finish(&mut env).map_err(|fault| fault.to_string())
}

fn policy(plugin: &Plugin, phase: Phase, request: &RecordedRequest, config: &Config, seed: u64) -> Result<(), String> {
    let turn = understand(request.route, &request.headers, request.body.clone(), &understand_options(config, seed));
    let turn = Arc::new(turn.map_err(|e| e.message)?);
    let pool = pool_for(config, turn.model.as_deref()).and_then(|at| config.pools.get(at));
    let pool = pool.ok_or_else(|| format!("no pool serves the model {:?}", turn.model.as_deref().unwrap_or("")))?;
    let action = turn.control.action.map_or(SessionAction::None, SessionAction::from);
    let prompt_tokens = turn.prompt_tokens(config.routing.bytes_per_token);
    let head = request.head("self-test");
    let facts = Arc::new(TurnFacts { turn: Arc::clone(&turn), prompt_tokens, action, number: 1, head });
    let mut env = PolicyEnv::new(facts, None, Arc::new(Scratch::default()));

    let options = decide_options(config);
    let views: Arc<[WorkerView]> = if phase == Phase::Route { idle_workers(pool) } else { Arc::default() };
    let input = RouteInput {
        candidates: Candidates::new(&views, &[]),
        prompt_tokens,
        affinity_hash: turn.prefix.affinity_hash,
        bound: None,
        excluded: &[],
    };
    let max_ttl_ms = config.sessions.max_timeout_s.saturating_mul(1000);
    let wanted = session_input(&turn, action, false, max_ttl_ms);
    let builtin = Arc::new(decide(&input, &order_input(&turn), &wanted, &options));
    match phase {
        Phase::Route => {
            let route = RouteFacts { workers: Arc::clone(&views), limits: options.limits, ..RouteFacts::default() };
            env.place(route, None, builtin);
        }
        _ => env.set_builtin(builtin),
    }
    let mut env = Lent::new(env);
    let mut stream = plugin.open_stream(0);
    went_on(stream.on_request_headers(&mut env, true))?;
    if let Some((name, error)) = env.dropped.first() {
        return Err(format!("wrote {name}: {error}"));
    }
    env.finish(Default::default());
    stream.finish(&mut env).map_err(|fault| fault.to_string())
}

fn went_on(outcome: CallResult) -> Result<(), String> {
    let outcome = outcome.map_err(|fault| fault.to_string())?;
    match outcome.effects.local_response {
        Some(response) => Err(format!("the request was answered with {} instead of going on", response.status)),
        None => Ok(()),
    }
}

/// The workers of a pool, as they are when nothing runs.
fn idle_workers(pool: &Pool) -> Arc<[WorkerView]> {
    let view = |(at, worker): (usize, &turnstile_config::Worker)| {
        let index = WorkerId(u32::try_from(at).unwrap_or(u32::MAX));
        WorkerView { labels: Arc::new(worker.labels.clone()), ..WorkerView::new(worker.id.as_str(), index) }
    };
    pool.workers.iter().enumerate().map(view).collect()
}

/// A store for `turnstile.kv_get` and `turnstile.kv_cas` that is gone afterwards.
#[derive(Default)]
struct Scratch(Mutex<HashMap<Vec<u8>, Versioned>>);

/// A value and its version.
type Versioned = (Vec<u8>, u64);

impl PolicyStore for Scratch {
    fn get(&self, key: &[u8]) -> Option<(Vec<u8>, u64)> {
        self.0.lock().get(key).cloned()
    }

    fn compare_and_set(&self, key: &[u8], value: &[u8], version: u64) -> bool {
        let mut values = self.0.lock();
        let now = values.get(key).map_or(0, |(_, version)| *version);
        if version != 0 && version != now {
            return false;
        }
        values.insert(key.to_vec(), (value.to_vec(), now + 1));
        true
    }
}
