//! Measured inside this process, on the code that the gateway runs: understanding a body, deciding, and what index and
//! sessions weigh.

use crate::process::{own_cpu_ns, resident_bytes};
use crate::requests::{Shape, body};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method};
use std::fmt::Write as _;
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;
use turnstile::callouts::Callouts;
use turnstile::fleet_state::Fleet;
use turnstile::generation::{Foundation, Generation, fleet_settings, prepare};
use turnstile::metrics::Metrics;
use turnstile::placement::{self, NoPlace, Request};
use turnstile::plugin_start::Modules;
use turnstile::policy::{EndFacts, PolicyEnv, PolicyStore, RequestHead, TurnFacts, TurnPolicies, Verdict};
use turnstile_config::{Config, Phase};
use turnstile_fleet::decision::{Candidates, RouteInput, decide};
use turnstile_fleet::ids::{SessionKey, WorkerId};
use turnstile_fleet::index::PrefixIndex;
use turnstile_fleet::route::Route;
use turnstile_fleet::session::{
    Accepts, BeginTurn, Outcome, SessionAction, SessionOptions, Sessions, StreamCap, TurnEnd,
};
use turnstile_fleet::turn::{Turn, understand};
use turnstile_fleet::worker::{Capabilities, Load, WorkerState};
use turnstile_plugins::{Runtime, RuntimeOptions, SharedState};

/// Batches of which the median is taken.
const BATCHES: usize = 9;

/// CPU nanoseconds of one call, the median of some batches of `calls`.
fn per_call(calls: usize, mut call: impl FnMut(usize)) -> f64 {
    for at in 0..calls {
        call(at);
    }
    let mut batches: Vec<f64> = (0..BATCHES)
        .map(|batch| {
            let before = own_cpu_ns();
            for at in 0..calls {
                call(batch * calls + at);
            }
            (own_cpu_ns() - before) as f64 / calls as f64
        })
        .collect();
    crate::report::median(&mut batches)
}

/// A fleet of workers that do not exist, all of them ready and half of them busy, and a generation above it.
pub struct Rig {
    fleet: Arc<Fleet>,
    generation: Arc<Generation>,
    metrics: Arc<Metrics>,
    turns: Vec<Arc<Turn>>,
    head: RequestHead,
}

struct NoStore;

impl PolicyStore for NoStore {
    fn get(&self, _key: &[u8]) -> Option<(Vec<u8>, u64)> {
        None
    }

    fn compare_and_set(&self, _key: &[u8], _value: &[u8], _version: u64) -> bool {
        false
    }
}

impl Rig {
    /// `plugins`: with the three built-in policies, or none.
    ///
    /// # Errors
    /// The configuration, or a plugin that does not start.
    pub fn new(workers: usize, plugins: bool, cache: &Path) -> Result<Self, String> {
        let mut text = String::from(if plugins { "" } else { "plugins = []\n" });
        let _ = writeln!(text, "threads = 1\n[state]\ndir = {:?}\n[[pools]]\nworkers = [", cache.display().to_string());
        for place in 0..workers {
            let _ = writeln!(text, "  \"http://127.0.0.1:{}\",", 20_000 + place);
        }
        text.push_str("]\n");
        let config = Config::parse(&text, "bench", Path::new("/")).map_err(|e| e.to_string())?;
        let metrics = Arc::new(Metrics::new().map_err(|e| e.to_string())?);
        let options = RuntimeOptions { cache_dir: Some(cache.join("wasm")), ..RuntimeOptions::default() };
        let runtime = Runtime::new(options).map_err(|e| e.to_string())?;
        let shared = Arc::new(SharedState::default());
        let (refused, modules) = Default::default();
        let callouts = Callouts::new();
        let foundation =
            Foundation { runtime, shared, callouts, services: None, seed: 7, threads: 1, refused, modules };
        let prepared = prepare(config, &foundation, &[], &Modules::Current).map_err(|e| e.to_string())?;
        let fleet = Arc::new(Fleet::new(Arc::clone(&metrics), fleet_settings(prepared.config(), &[]), 64));
        let generation = Arc::new(prepared.commit(1, &foundation, &fleet));
        for (place, worker) in fleet.workers.current().iter().enumerate() {
            worker.stop_probe();
            let busy = u32::try_from(place % 2).unwrap_or(0);
            worker.with_model(|model| {
                model.state = WorkerState::Ready;
                model.capabilities = Capabilities { tag: true, priority: true, ..Capabilities::default() };
                model.report(Load {
                    running: 6 * busy,
                    waiting: busy,
                    max_running: 64,
                    waiting_uncached_tokens: 900 * u64::from(busy),
                    kv_used_tokens: 200_000,
                    kv_capacity_tokens: 800_000,
                    ..Load::default()
                });
            });
        }
        let shape = Shape { sessions: 48, turns: 4, bytes: 30_000 };
        let mut headers = HeaderMap::new();
        headers.insert("authorization", HeaderValue::from_static("Bearer sk-0123456789abcdef0123456789abcdef"));
        headers.insert("content-type", HeaderValue::from_static("application/json"));
        headers.insert("user-agent", HeaderValue::from_static("OpenAI/Python 2.8.1"));
        let mut turns = Vec::new();
        for turn in 0..shape.turns {
            for session in 0..shape.sessions {
                let body = Bytes::from(body(shape, session, turn, true));
                let turn = understand(Route::Chat, &headers, body, &generation.understand).map_err(|e| e.message)?;
                turns.push(Arc::new(turn));
            }
        }
        let head = RequestHead {
            method: Method::POST,
            path: Bytes::from_static(b"/v1/chat/completions"),
            authority: Bytes::from_static(b"gateway.example:8080"),
            headers: Arc::new(headers),
            request_id: Arc::from("bench"),
            peer: None,
            connection: 0,
            protocol: "HTTP/1.1",
            arrived: SystemTime::now(),
        };
        Ok(Self { fleet, generation, metrics, turns, head })
    }

    /// µs of one full decision: admit phase, route phase, session, index, end of the turn.
    ///
    /// # Errors
    /// A turn got no place.
    pub fn decision_us(&self, calls: usize) -> Result<f64, String> {
        let mut failed = None;
        let ns = per_call(calls, |at| {
            if let Err(reason) = self.decide(at) {
                failed = Some(reason);
            }
        });
        failed.map_or(Ok(ns / 1e3), Err)
    }

    fn decide(&self, at: usize) -> Result<(), String> {
        let turn = self.turns.get(at % self.turns.len().max(1)).ok_or("no turns")?;
        let generation = &self.generation;
        let pool = generation.pools.first().ok_or("no pool")?;
        let action = turn.control.action.map_or(SessionAction::None, SessionAction::from);
        let session = turn.identity.session.as_ref().and_then(|s| self.fleet.sessions.view(s.key));
        let prompt_tokens = turn.prompt_tokens(self.fleet.bytes_per_token(&pool.name));
        let facts = Arc::new(TurnFacts {
            turn: Arc::clone(turn),
            prompt_tokens,
            action,
            number: session.as_ref().map_or(1, |s| s.turns + 1),
            head: self.head.clone(),
        });
        let env = PolicyEnv::new(facts, session, Arc::new(NoStore));
        let mut policies = TurnPolicies::new(Arc::clone(&generation.chain), env, 0, Arc::clone(&self.metrics));
        let nobody = RouteInput {
            candidates: Candidates::new(&[], &[]),
            prompt_tokens,
            affinity_hash: turn.prefix.affinity_hash,
            bound: None,
            excluded: &[],
        };
        let wanted = placement::session_input(turn, action, false, generation.max_ttl_ms);
        let builtin = Arc::new(decide(&nobody, &placement::order_input(turn), &wanted, &generation.decide));
        policies.env.set_builtin(Arc::clone(&builtin));
        if !matches!(policies.run(Phase::Admit, &builtin), Verdict::Go) {
            return Err("a policy refused the turn".into());
        }
        let request = Request {
            turn,
            prompt_tokens,
            action,
            excluded: &[],
            attempt: 0,
            last_error: None,
            ticket: None,
            wanted: None,
        };
        let mut placed = match placement::place(&self.fleet, generation, pool, &request, &mut policies) {
            Ok(placed) => placed,
            Err(NoPlace::NoWorker) => return Err("no worker".into()),
            Err(_) => return Err("no place".into()),
        };
        if let Some(lease) = placed.lease.take() {
            self.fleet.sessions.end(lease, TurnEnd::Finished(None));
        }
        policies.env.finish(EndFacts { status: 200, ..EndFacts::default() });
        policies.finish();
        if policies.failed.is_empty() { Ok(()) } else { Err("a policy failed".into()) }
    }

    /// Bytes per nanosecond (GB/s) of understanding a body of 1 MB, hashes included; and of a JSON parser that only finds
    /// the top-level members of the same body.
    ///
    /// # Errors
    /// The body is not understood.
    pub fn understanding_gb_s(&self, calls: usize) -> Result<(f64, f64), String> {
        let shape = Shape { sessions: 4, turns: 1, bytes: 1_000_000 };
        let bodies: Vec<Bytes> =
            (0..shape.sessions).map(|session| Bytes::from(body(shape, session, 0, true))).collect();
        let bytes = bodies.iter().map(Bytes::len).sum::<usize>() as f64 / bodies.len() as f64;
        let of = |at: usize| bodies.get(at % bodies.len()).cloned().unwrap_or_default();
        let headers = HeaderMap::new();
        understand(Route::Chat, &headers, of(0), &self.generation.understand).map_err(|e| e.message)?;
        let ours = per_call(calls, |at| {
            let _ = black_box(understand(Route::Chat, &headers, of(at), &self.generation.understand));
        });
        let parser = per_call(calls, |at| {
            let body = of(at);
            let members: Result<std::collections::HashMap<&str, &serde_json::value::RawValue>, _> =
                serde_json::from_slice(&body);
            let _ = black_box(members.is_ok());
        });
        Ok((bytes / ours, bytes / parser))
    }
}

/// Bytes of index for one block: the bound, for a full index.
pub fn index_bytes_per_block(blocks: usize) -> f64 {
    const CHAIN: usize = 64;
    let mut index = PrefixIndex::new(blocks);
    let mut hash = 1u64;
    for _ in 0..2 * blocks / CHAIN {
        let chain: Vec<u64> = (0..CHAIN)
            .map(|_| {
                hash = turnstile_fleet::cost::mix(hash);
                hash
            })
            .collect();
        index.insert(WorkerId(0), &chain);
    }
    index.memory_bytes() as f64 / index.len().max(1) as f64
}

/// Resident bytes of one live session with an engine tag, from the growth of this process.
///
/// # Errors
/// The kernel does not tell.
pub fn session_bytes(sessions: usize) -> Result<f64, String> {
    let options = SessionOptions {
        max_sessions: sessions,
        default_ttl_ms: 300_000,
        max_turn_ms: 3_600_000,
        engine_timeout_margin_ms: 30_000,
        evict_after_idle_ms: 30_000,
    };
    let before = resident_bytes(std::process::id())?;
    let mut table = Sessions::new(options, 1);
    for number in 0..sessions {
        let begun = table.begin(&BeginTurn {
            key: SessionKey(u128::from(turnstile_fleet::cost::mix(number as u64)) << 64 | number as u128),
            action: SessionAction::Open,
            wish: None,
            ttl_ms: Some(300_000),
            worker: WorkerId(u32::try_from(number % 8).unwrap_or(0)),
            rank: None,
            capabilities: Capabilities { tag: true, priority: true, ..Capabilities::default() },
            accepts: Accepts { session_params: false, session_id: true },
            cap: StreamCap { rows: 0, tokens: 0 },
            ticket: None,
            now_ms: number as u64 / 100,
        });
        let Outcome::Ready(lease) = begun.outcome else { return Err("a session did not begin".into()) };
        let _ = table.end(lease, TurnEnd::Finished(None), number as u64 / 100 + 1);
    }
    let grown = resident_bytes(std::process::id())?.saturating_sub(before);
    black_box(&table);
    Ok(grown as f64 / sessions.max(1) as f64)
}
