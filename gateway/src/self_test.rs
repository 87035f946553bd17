//! The self-test of a plugin: a recorded request goes through it before it goes live.
//!
//! It runs on a start of its own, with state of its own, so that what goes live has not seen it. The workers are those of the
//! configuration, ready and idle, with nothing cached. A filter gets the request and an answer to it, in the environment that live
//! filters get. Calls that it may make are taken, and fail; a plugin that waits is waited for in time that is only counted.

mod answer;
mod port;

use crate::callouts::Destinations;
use crate::filters::{FilterEnv, PlacedAt};
use crate::gateway::STORE;
use crate::generation::{Foundation, decide_options, understand_options};
use crate::higress::Hosts;
use crate::module_file;
use crate::placement::{order_input, session_input};
use crate::policy::store::SharedStore;
use crate::policy::{PolicyEnv, RequestHead, RouteFacts, TurnFacts};
use crate::recorded_request::{RecordedRequest, pool_for};
use crate::workbench::filter::exchange_file::Message;
use crate::workbench::filter::message_of;
use crate::workbench::filter::passage::{End, Passage, Side};
use crate::workbench::filter::watched::Watched;
use crate::workbench::waiting::{Answers, Patience, Waiting};
use bytes::Bytes;
use http::header::HOST;
use http::{HeaderMap, HeaderValue, StatusCode};
use port::TestPort;
use serde_json::Value;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use turnstile_config::{Config, Phase, Plugin as PluginConfig, Pool};
use turnstile_fleet::decision::{Candidates, RouteInput, decide};
use turnstile_fleet::ids::WorkerId;
use turnstile_fleet::route::Route;
use turnstile_fleet::session::SessionAction;
use turnstile_fleet::turn::understand;
use turnstile_fleet::worker::WorkerView;
use turnstile_plugins::{
    Callback, Dialect, Effects, Lent, LocalResponse, Plugin, PluginServices, PluginSpec, ResponseMap,
};

/// Where the client of the recorded request is: nowhere, by an address that parses like any other.
const CLIENT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 40_000);

/// How much longer than without calls a plugin may pause that makes a failed call again and again, ms.
const RETRIES_MS: u64 = 60_000;

/// Times a plugin is tried whose calls are late: one that needs too long always does, and one that the machine kept waiting not.
const TRIES: usize = 3;

/// One plugin in its self-test.
struct Trial<'a> {
    tried: &'a Plugin,
    port: &'a TestPort,
    plugin: &'a PluginConfig,
    request: &'a RecordedRequest,
    config: &'a Config,
}

/// Runs the self-test of a plugin that may call `destinations`.
///
/// # Errors
/// Why it must not go live.
pub fn run(
    plugin: &PluginConfig,
    spec: &PluginSpec,
    destinations: &Destinations,
    file: &Path,
    config: &Config,
    foundation: &Foundation,
) -> Result<(), String> {
    let text = module_file::read(file).map_err(|e| format!("cannot be read: {e}"))?;
    let request = RecordedRequest::read(&text)?;
    for _ in 0..TRIES {
        if attempt(plugin, spec, destinations, &request, config, foundation)? == Pace::InTime {
            return Ok(());
        }
    }
    Err(format!("a call took longer than callback_timeout_ms, {}", plugin.callback_timeout_ms))
}

/// Whether all calls ended before their deadline.
#[derive(PartialEq, Eq)]
enum Pace {
    InTime,
    Late,
}

fn attempt(
    plugin: &PluginConfig,
    spec: &PluginSpec,
    destinations: &Destinations,
    request: &RecordedRequest,
    config: &Config,
    foundation: &Foundation,
) -> Result<Pace, String> {
    let port = Arc::new(TestPort::new(destinations.clone()));
    let services = Arc::clone(&port) as Arc<dyn PluginServices>;
    let tried = Plugin::start(&foundation.runtime, spec.clone().with_shards(1), services);
    let tried = tried.map_err(|error| error.to_string())?;
    // What it calls while it starts.
    port.serve(0);
    let trial = Trial { tried: &tried, port: &port, plugin, request, config };
    let result = match plugin.phase {
        Phase::Filter => trial.filter(),
        // It is told of no request.
        Phase::Background => Ok(()),
        Phase::Admit | Phase::Route => trial.policy(foundation.seed),
    };
    let late = tried.stats().late > 0;
    tried.shut_down(crate::clock::now_ms());
    // A fault in a reply takes the instance away, and that is all that the stream knows of it.
    port.fault().map_or(result, Err)?;
    Ok(if late { Pace::Late } else { Pace::InTime })
}

// === impl Trial ===

impl Trial<'_> {
    fn filter(&self) -> Result<(), String> {
        let body: Value = serde_json::from_slice(&self.request.body).unwrap_or_default();
        let exchange = Watched { exchange: self.exchange(body["model"].as_str()), accesses: None };
        let mut passage = Passage::new(self.waiting(), exchange);
        let pieces = Some(self.request.body.clone()).filter(|body| !body.is_empty()).into_iter().collect();
        let asked = Message { headers: HeaderMap::new(), pieces, trailers: HeaderMap::new() };
        let passed = passage.half(Side::Request, &asked).and_then(|()| passage.answer_calls(Side::Request));
        let (status, message) = match passed {
            Ok(()) => {
                self.still_served(&passage.env.exchange)?;
                self.place(&mut passage.env.exchange, body["model"].as_str());
                (StatusCode::OK, answer::sample(self.request, &body))
            }
            // As live, its own answer passes it too.
            Err(End::Answer(response)) => {
                self.may_answer(&response)?;
                message_of(&response)
            }
            Err(end) => return self.ended(&end),
        };
        passage.env.exchange.request.seal();
        let mut head = ResponseMap::new(status, message.headers.clone());
        if !self.plugin.response {
            // Answers go past it, and are known at the end.
            head.seal();
            passage.env.exchange.response = Some(head);
            return passage.finish().1;
        }
        passage.env.exchange.response = Some(head);
        let passed = passage.half(Side::Response, &message).and_then(|()| passage.answer_calls(Side::Response));
        match passed {
            // The answer is made up, so a filter may have reasons to give another one.
            Ok(()) | Err(End::Answer(_)) => {}
            Err(end) => self.ended(&end)?,
        }
        passage.finish().1
    }

    fn policy(&self, seed: u64) -> Result<(), String> {
        let Self { tried, port, request, config, .. } = self;
        let phase = self.plugin.phase;
        let turn = understand(request.route, &request.headers, request.body.clone(), &understand_options(config, seed));
        let turn = Arc::new(turn.map_err(|e| e.message)?);
        let pool = pool_for(config, turn.model.as_deref()).and_then(|at| config.pools.get(at));
        let pool = pool.ok_or_else(|| format!("no pool serves the model {:?}", turn.model.as_deref().unwrap_or("")))?;
        let action = turn.control.action.map_or(SessionAction::None, SessionAction::from);
        let prompt_tokens = turn.prompt_tokens(config.routing.bytes_per_token);
        let facts = TurnFacts { turn: Arc::clone(&turn), prompt_tokens, action, number: 1, head: self.head() };
        let store = SharedStore(port.shared().data.space(STORE));
        let mut env = PolicyEnv::new(Arc::new(facts), None, Arc::new(store));
        env.hidden = tried.spec().hidden_headers;

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
        self.decides(&mut env)?;
        if let Some((name, error)) = env.dropped.first() {
            return Err(format!("wrote {name}: {error}"));
        }
        Ok(())
    }

    /// A policy's turn, from its decision, which it may pause for, to the end.
    fn decides(&self, env: &mut Lent<PolicyEnv>) -> Result<(), String> {
        let mut waiting = self.waiting();
        let mut stream = self.tried.open_stream(0);
        let outcome = stream.on_request_headers(env, true).map_err(|fault| fault.to_string())?;
        self.went_on(&outcome.effects)?;
        // Nobody waits for a shadow.
        let mut waits = outcome.paused_request() && !self.plugin.shadow;
        waits &= outcome.effects.local_response.is_none();
        let mut patience = Patience::new(&waiting);
        loop {
            let (asked, effects) = waiting.listen(&mut stream, env, waits)?;
            self.went_on(&effects)?;
            waits &= !effects.continue_request && effects.local_response.is_none();
            if !waits && !asked {
                break;
            }
            if !patience.lasts(&mut waiting, asked) {
                match waits {
                    true => return self.ended(&End::Waits(Callback::RequestHeaders)),
                    // One that has decided, and calls again and again.
                    false => break,
                }
            }
        }
        env.finish(Default::default());
        stream.finish(env).map_err(|fault| fault.to_string())
    }

    fn waiting(&self) -> Waiting<'_> {
        let pause_ms = self.plugin.pause_timeout_ms;
        let mut waiting = Waiting::new(self.tried, self.port, pause_ms);
        waiting.longest_ms = pause_ms.saturating_add(RETRIES_MS);
        waiting
    }

    /// What was asked for keeps neither the client from an answer nor the request from a worker.
    fn went_on(&self, effects: &Effects) -> Result<(), String> {
        if let Some(response) = &effects.local_response {
            return self.may_answer(response);
        }
        if effects.close_downstream || effects.close_upstream {
            return self.ended(&End::Close);
        }
        Ok(())
    }

    /// An answer in a worker's place. One that comes of a call that failed says nothing about the module: live the call might not
    /// have failed.
    fn may_answer(&self, response: &LocalResponse) -> Result<(), String> {
        if self.port.has_failed_calls() {
            let status = response.status;
            tracing::warn!(plugin = %self.plugin.name, status, "self-test: answered, which is let pass as its calls have failed");
            return Ok(());
        }
        Err(format!("the request was answered with {} instead of going on", response.status))
    }

    /// An end that is no answer.
    fn ended(&self, end: &End) -> Result<(), String> {
        Err(match end {
            End::Answer(response) => return self.may_answer(response),
            End::Close if self.port.has_failed_calls() => return Ok(()),
            End::Close => "the exchange was broken off instead of going on".to_owned(),
            End::Fault(fault) => fault.clone(),
            End::Waits(at) => {
                let (at, limit) = (at.export(), self.plugin.pause_timeout_ms);
                match self.port.has_failed_calls() {
                    true => format!("it paused in {at}, and did not go on when it was told that its calls have failed"),
                    false => format!(
                        "it paused in {at}, and with no call outstanding nothing made it go on within pause_timeout_ms, {limit}"
                    ),
                }
            }
            End::TooLarge => format!("it holds more of a body than held_body_bytes, {}", self.plugin.held_body_bytes),
        })
    }

    /// A filter may rewrite the path to another route, not to none.
    fn still_served(&self, exchange: &FilterEnv) -> Result<(), String> {
        let path = String::from_utf8_lossy(&exchange.request.path);
        match Route::from_path(path.split('?').next().unwrap_or_default()) {
            Some(_) => Ok(()),
            None => Err(format!("the path was rewritten to {path}, which is not served")),
        }
    }

    /// The request's head, as it comes from a client.
    fn head(&self) -> RequestHead {
        let named = self.request.headers.get(HOST).map(|host| Bytes::copy_from_slice(host.as_bytes()));
        let listener = || self.config.listeners.first().map(|listener| listener.address.to_string());
        RequestHead {
            authority: named.or_else(|| listener().map(Bytes::from)).unwrap_or_default(),
            peer: Some(CLIENT),
            connection: 1,
            ..self.request.head("self-test")
        }
    }

    fn pool(&self, model: Option<&str>) -> Option<&Pool> {
        pool_for(self.config, model).and_then(|at| self.config.pools.get(at)).or(self.config.pools.first())
    }

    /// What a filter sees before the request has been placed.
    fn exchange(&self, model: Option<&str>) -> FilterEnv {
        let mut env = FilterEnv::new(self.head());
        env.route = self.request.route.name();
        env.local = self.config.listeners.first().map(|listener| listener.address);
        env.hosts = self.pool(model).map(|pool| {
            let views = idle_workers(pool);
            let addresses = pool.workers.iter().map(|worker| worker.url.authority());
            let workers: Vec<_> = addresses.zip(views.iter().cloned()).collect();
            Hosts::idle(Arc::from(pool.name.as_str()), &workers, model)
        });
        if self.tried.spec().dialect == Dialect::Higress {
            env.request.fields.fields_mut().insert("x-request-id", HeaderValue::from_static("self-test"));
        }
        env
    }

    /// The request goes to a worker.
    fn place(&self, env: &mut FilterEnv, model: Option<&str>) {
        env.attempts = 1;
        env.placed = self.pool(model).map(|pool| PlacedAt {
            pool: Arc::from(pool.name.as_str()),
            address: pool.workers.first().map(|worker| worker.url.authority()).unwrap_or_default(),
            connection: None,
        });
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
