//! The admin listener: metrics, workers, sessions, plugins, configuration, reload, explanation of a decision.
//!
//! Local by default; anywhere else it asks for a bearer token, which the configuration check enforces.

use crate::drain;
use crate::explain;
use crate::gateway::Gateway;
use crate::live_plugins;
use crate::metrics::{WORKER_FIELDS, WORKER_STATES};
use crate::policy::CanaryRun;
use crate::probation;
use crate::reload::{Source, reload};
use crate::request_body::{BodyLimits, Held, read};
use crate::rollback;
use crate::ticks::Ticks;
use async_trait::async_trait;
use http::{Method, Response, StatusCode, header};
use percent_encoding::percent_decode_str;
use pingora_core::apps::http_app::ServeHttp;
use pingora_core::protocols::http::ServerSession;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;
use subtle::ConstantTimeEq;
use turnstile_plugins::{FaultKind, MetricValue};
use url::form_urlencoded;

/// Sessions listed at a time.
const SESSIONS_LISTED: usize = 1000;
/// Largest body of `POST /explain`.
const EXPLAIN_LIMIT: usize = 64 * 1024 * 1024;

/// The longest wait for a worker to be empty.
const LONGEST_WAIT: Duration = Duration::from_secs(3600);

/// The application of the admin listener.
pub struct Admin {
    gateway: Arc<Gateway>,
    ticks: Arc<Ticks>,
    source: Source,
}

struct Answer {
    status: StatusCode,
    content_type: &'static str,
    body: Vec<u8>,
}

impl Answer {
    fn json(status: StatusCode, value: &Value) -> Self {
        let mut body = serde_json::to_vec_pretty(value).unwrap_or_default();
        body.push(b'\n');
        Self { status, content_type: "application/json", body }
    }

    fn error(status: StatusCode, message: &str) -> Self {
        Self::json(status, &json!({"error": {"message": message}}))
    }
}

impl Admin {
    /// Serves `gateway`.
    pub fn new(gateway: Arc<Gateway>, ticks: Arc<Ticks>, source: Source) -> Self {
        Self { gateway, ticks, source }
    }

    fn is_allowed(&self, session: &ServerSession) -> Result<bool, String> {
        let generation = self.gateway.generation.load();
        let Some(secret) = &generation.config.admin.token else { return Ok(true) };
        let token = secret.resolve().map_err(|e| e.to_string())?;
        let given = session.get_header(header::AUTHORIZATION).map(|v| v.as_bytes());
        let given = given.and_then(|v| v.strip_prefix(b"Bearer ")).unwrap_or_default();
        Ok(bool::from(given.ct_eq(token.as_bytes())))
    }

    async fn answer(&self, session: &mut ServerSession) -> Answer {
        let head = session.req_header();
        let (method, path) = (head.method.clone(), head.uri.path().to_owned());
        match self.is_allowed(session) {
            Ok(true) => {}
            Ok(false) => return Answer::error(StatusCode::UNAUTHORIZED, "a bearer token is needed (admin.token)"),
            Err(reason) => return Answer::error(StatusCode::INTERNAL_SERVER_ERROR, &format!("admin.token: {reason}")),
        }
        let reads = method == Method::GET || method == Method::HEAD;
        match path.as_str() {
            "/metrics" if reads => self.metrics(),
            "/workers" if reads => Answer::json(StatusCode::OK, &self.workers()),
            path if path.starts_with("/workers/") => self.worker(session, &method, path).await,
            "/sessions" if reads => Answer::json(StatusCode::OK, &self.sessions()),
            "/side" if reads => Answer::json(StatusCode::OK, &self.side()),
            "/plugins" if reads => Answer::json(StatusCode::OK, &self.plugins()),
            "/config" if reads => Answer::json(StatusCode::OK, &self.config()),
            "/health" | "/live" if reads => Answer::json(StatusCode::OK, &json!({"status": "live"})),
            "/reload" if method == Method::POST => self.reload().await,
            "/explain" if method == Method::POST => self.explain(session).await,
            "/plugins/rollback" if method == Method::POST => self.roll_back(session).await,
            path if plugin_of(path).is_some() && method == Method::POST => self.reset(path),
            path if plugin_of(path).is_some() => Answer::error(StatusCode::METHOD_NOT_ALLOWED, "POST only"),
            "/metrics" | "/workers" | "/sessions" | "/side" | "/plugins" | "/config" | "/health" | "/live" => {
                Answer::error(StatusCode::METHOD_NOT_ALLOWED, "GET only")
            }
            "/reload" | "/explain" | "/plugins/rollback" => Answer::error(StatusCode::METHOD_NOT_ALLOWED, "POST only"),
            _ => Answer::error(
                StatusCode::NOT_FOUND,
                "there are GET /metrics /workers /sessions /side /plugins /config /health, POST /reload /explain \
                 /plugins/rollback /plugins/NAME/reset /workers/ID/drain /workers/ID/undrain",
            ),
        }
    }

    fn metrics(&self) -> Answer {
        let gateway = &self.gateway;
        let generation = gateway.generation.load();
        gateway.metrics.plugin_quarantined.reset();
        gateway.metrics.canary_aside.reset();
        for plugin in generation.chain.iter() {
            plugin.export(&gateway.metrics);
            let quarantined = i64::from(plugin.plugin.is_quarantined());
            gateway.metrics.plugin_quarantined.with_label_values(&[&*plugin.name]).set(quarantined);
            if let Some(canary) = &plugin.canary {
                let aside = i64::from(canary.aside().is_some());
                gateway.metrics.canary_aside.with_label_values(&[&*plugin.name]).set(aside);
            }
        }
        live_plugins::export(&gateway.foundation.runtime, &generation, &gateway.metrics);
        gateway.fleet.sessions.count();
        for worker in gateway.fleet.workers.current() {
            let view = worker.view(0);
            for state in WORKER_STATES {
                let is = i64::from(view.shown_state() == state);
                gateway.metrics.worker_state.with_label_values(&[&*worker.id, state]).set(is);
            }
            let blocks = gateway.fleet.index.lock().len_of(worker.index);
            let values = [
                f64::from(view.in_flight),
                f64::from(view.running),
                f64::from(view.waiting),
                f64::from(view.max_running),
                view.kv_used_tokens as f64,
                view.kv_capacity_tokens as f64,
                view.waiting_uncached_tokens as f64,
                view.prefill_tokens_per_s,
                view.ttft_ms,
                view.itl_ms,
                blocks as f64,
            ];
            for (field, value) in WORKER_FIELDS.into_iter().zip(values) {
                gateway.metrics.worker.with_label_values(&[&*worker.id, field]).set(value);
            }
        }
        let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
        gateway.metrics.tasks.set(i64::try_from(tasks).unwrap_or(i64::MAX));
        let mut body = gateway.metrics.render();
        body.extend_from_slice(self.plugin_metrics().as_bytes());
        Answer { status: StatusCode::OK, content_type: "text/plain; version=0.0.4", body }
    }

    /// Metrics that plugins define. Their names are the plugins', so they are values of a label and not names of ours.
    fn plugin_metrics(&self) -> String {
        let mut text = String::from(
            "# HELP turnstile_plugin_custom Metrics that plugins define (histograms as their count)\n\
             # TYPE turnstile_plugin_custom untyped\n",
        );
        for metric in self.gateway.foundation.shared.metrics.snapshot() {
            let value = match &metric.value {
                MetricValue::Counter(n) | MetricValue::Gauge(n) => *n,
                MetricValue::Histogram { buckets, .. } => buckets.iter().sum(),
            };
            let (plugin, name) = (escape(&metric.plugin), escape(&metric.name));
            let _ = writeln!(text, "turnstile_plugin_custom{{plugin=\"{plugin}\",name=\"{name}\"}} {value}");
        }
        text
    }

    fn workers(&self) -> Value {
        let fleet = &self.gateway.fleet;
        let mut held = Vec::new();
        let workers = fleet.workers.current();
        fleet.sessions.held(workers.iter().map(|w| w.index), &mut held);
        let list: Vec<Value> = workers
            .iter()
            .zip(held)
            .map(|(worker, held)| {
                let view = worker.view(held.idle_rows);
                let facts = worker.facts();
                json!({
                    "id": &*worker.id,
                    "url": worker.url.to_string(),
                    "pool": &*worker.settings().pool,
                    "index": worker.index.0,
                    "state": view.shown_state(),
                    "ejected": view.ejected.map(|ejected| json!({
                        "cause": ejected.cause.name(),
                        "for_ms": ejected.until_ms.saturating_sub(crate::clock::now_ms()),
                    })),
                    "faults_in_a_row": worker.with_model(|m| m.ejections.faults_in_a_row()),
                    "draining": worker.is_draining(),
                    "sglang": facts.as_ref().and_then(|f| f.version.clone()),
                    "capabilities": view.capabilities.names().collect::<Vec<_>>(),
                    "dp_size": view.capabilities.dp_size,
                    "labels": *view.labels,
                    "in_flight": view.in_flight,
                    "running": view.running,
                    "waiting": view.waiting,
                    "max_running": view.max_running,
                    "limit": view.limit,
                    "kv_used_tokens": view.kv_used_tokens,
                    "kv_capacity_tokens": view.kv_capacity_tokens,
                    "prefill_tokens_per_s": view.prefill_tokens_per_s,
                    "ttft_ms": view.ttft_ms,
                    "itl_ms": view.itl_ms,
                    "index_blocks": fleet.index.lock().len_of(worker.index),
                    "sessions": held.sessions,
                    "streaming_sessions": held.rows,
                    "streaming_held_tokens": held.tokens,
                })
            })
            .collect();
        json!({ "workers": list, "queue_depth": fleet.admission.depth() })
    }

    /// Requests of ours to workers: what is pending, and closes that wait for their next try.
    fn side(&self) -> Value {
        let fleet = &self.gateway.fleet;
        let counts = fleet.sessions.counts();
        let pending: Vec<Value> = fleet
            .side
            .pending()
            .into_iter()
            .map(|p| {
                json!({
                    "worker": &*p.worker, "kind": p.kind.label(), "pending": p.pending, "last_error": p.last_error,
                })
            })
            .collect();
        json!({
            "capacity": fleet.side.capacity(),
            "pending": pending,
            "prefills": self.gateway.prefills.running(),
            "closes": {
                "leaving": counts.leaving, "closing": counts.closing, "retrying": counts.retrying,
                "given_up": counts.abandoned,
            },
        })
    }

    /// `POST /workers/ID/drain[?wait=SECONDS]`, `POST /workers/ID/undrain`; `GET /workers/ID` tells what is left there.
    async fn worker(&self, session: &ServerSession, method: &Method, path: &str) -> Answer {
        let (id, action) = match path.trim_start_matches("/workers/").split_once('/') {
            Some((id, action)) => (id, Some(action)),
            None => (path.trim_start_matches("/workers/"), None),
        };
        let wanted = match action {
            None => Method::GET,
            Some("drain" | "undrain") => Method::POST,
            Some(_) => return Answer::error(StatusCode::NOT_FOUND, "there are POST drain and undrain of a worker"),
        };
        if *method != wanted {
            return Answer::error(StatusCode::METHOD_NOT_ALLOWED, &format!("{wanted} only"));
        }
        let id = percent_decode_str(id).decode_utf8_lossy();
        let fleet = &self.gateway.fleet;
        let Some(worker) = fleet.workers.by_id(&id) else {
            return Answer::error(StatusCode::NOT_FOUND, &format!("no worker {id:?}"));
        };
        let wait = match wait_of(session.req_header().uri.query()) {
            Ok(wait) => wait,
            Err(reason) => return Answer::error(StatusCode::BAD_REQUEST, &reason),
        };
        match action {
            Some("drain") => drain::drain(fleet, &worker),
            Some("undrain") => drain::undrain(fleet, &worker),
            _ => {}
        }
        let left = drain::wait(fleet, &worker, wait).await;
        Answer::json(StatusCode::OK, &left.json(&worker))
    }

    fn sessions(&self) -> Value {
        let fleet = &self.gateway.fleet;
        let counts = fleet.sessions.counts();
        let list: Vec<Value> = fleet
            .sessions
            .list(SESSIONS_LISTED)
            .into_iter()
            .map(|s| {
                json!({
                    "key": s.key.to_string(),
                    "mode": s.mode.name(),
                    "worker": s.worker.and_then(|w| fleet.workers.get(w)).map(|w| w.id.to_string()),
                    "rank": s.rank,
                    "engine_open": s.engine_open,
                    "age_ms": s.age_ms,
                    "idle_ms": s.idle_ms,
                    "ttl_ms": s.ttl_ms,
                    "turns": s.turns,
                    "in_flight": s.in_flight,
                    "held_tokens": s.held_tokens,
                    "last_cached_tokens": s.last_cached_tokens,
                })
            })
            .collect();
        json!({
            "counts": {
                "affinity": counts.affinity, "tag": counts.tag, "stream": counts.stream,
                "in_flight": counts.in_flight, "engine_sessions": counts.engine_sessions,
                "leaving": counts.leaving, "closing": counts.closing, "retrying": counts.retrying,
                "abandoned": counts.abandoned, "waiting": counts.waiting,
            },
            "listed": list.len(),
            "sessions": list,
        })
    }

    fn plugins(&self) -> Value {
        let generation = self.gateway.generation.load();
        let list: Vec<Value> = generation
            .chain
            .iter()
            .map(|c| {
                let stats = c.plugin.stats();
                let faults: serde_json::Map<String, Value> = FaultKind::ALL
                    .into_iter()
                    .filter(|k| stats.faults_of(*k) > 0)
                    .map(|k| (k.as_str().to_owned(), Value::from(stats.faults_of(k))))
                    .collect();
                json!({
                    "name": &*c.name,
                    "phase": c.phase.as_str(),
                    "wasm": c.source,
                    "sha256": c.digest,
                    "abi": format!("{:?}", c.plugin.abi()),
                    "on_error": c.on_error.as_str(),
                    "events": c.events.names(),
                    "shadow": c.shadow.is_some(),
                    "canary": c.canary.as_ref().map(CanaryRun::json),
                    "isolation": if c.plugin.spec().stream_isolation { "stream" } else { "shared" },
                    "config": if c.given.configuration.text().is_empty() { Value::Null } else { json!(c.given.configuration) },
                    "instances": stats.shards,
                    "healthy_instances": stats.healthy_shards,
                    "open_calls": stats.open_calls,
                    "start": stats.generation,
                    "calls": stats.calls,
                    "mean_us": if stats.calls == 0 { 0.0 } else { stats.nanoseconds as f64 / stats.calls as f64 / 1e3 },
                    "faults": faults,
                    "state": match (stats.quarantined, stats.healthy_shards < stats.shards) {
                        (true, _) => "quarantined",
                        (false, true) => "degraded",
                        (false, false) => "serving",
                    },
                    "crashes_in_a_row": stats.crash_streak,
                    "crash_limit": c.crash_limit,
                    "restarts": stats.restarts,
                    "failed_restarts": stats.failed_restarts,
                    "recycled": stats.recycled,
                    "memory_high_water_bytes": stats.memory_high_water,
                    "log_lines_dropped": stats.log_lines_dropped,
                })
            })
            .collect();
        json!({
            "generation": generation.number,
            "plugins": list,
            "old": live_plugins::old(&self.gateway.foundation.runtime, &generation),
            "taken_back": self.gateway.probation.last(),
            "rolled_back": self.gateway.history.last(),
            "can_roll_back_to": self.gateway.history.numbers().last(),
            "refused": self.gateway.foundation.refused.list(),
        })
    }

    fn config(&self) -> Value {
        let generation = self.gateway.generation.load();
        json!({
            "generation": generation.number,
            "loaded_at": generation.loaded_at,
            "file": self.source.path.as_ref().map(|p| p.display().to_string()),
            "last_reload_error": *self.gateway.last_error.lock(),
            "follows_file": self.source.path.is_some() && self.gateway.history.held().is_none(),
            "config": serde_json::to_value(&*generation.config).unwrap_or(Value::Null),
        })
    }

    async fn reload(&self) -> Answer {
        match reload(&self.gateway, &self.ticks, &self.source).await {
            Ok(done) => Answer::json(StatusCode::OK, &serde_json::to_value(&done).unwrap_or(Value::Null)),
            Err(reason) => Answer::error(StatusCode::BAD_REQUEST, &reason),
        }
    }

    /// `POST /plugins/rollback[?refuse=true]`.
    async fn roll_back(&self, session: &ServerSession) -> Answer {
        let refuse = match refuse_of(session.req_header().uri.query()) {
            Ok(refuse) => refuse,
            Err(reason) => return Answer::error(StatusCode::BAD_REQUEST, &reason),
        };
        match rollback::roll_back(&self.gateway, &self.ticks, &self.source, refuse).await {
            Ok(done) => Answer::json(StatusCode::OK, &serde_json::to_value(&done).unwrap_or(Value::Null)),
            Err(reason) => Answer::error(StatusCode::CONFLICT, &reason.to_string()),
        }
    }

    fn reset(&self, path: &str) -> Answer {
        let name = plugin_of(path).unwrap_or_default();
        match probation::reset(&self.gateway, name) {
            Some(done) => Answer::json(StatusCode::OK, &serde_json::to_value(&done).unwrap_or(Value::Null)),
            None => Answer::error(StatusCode::NOT_FOUND, &format!("there is no plugin {name}")),
        }
    }

    async fn explain(&self, session: &mut ServerSession) -> Answer {
        let limits = BodyLimits {
            bytes: EXPLAIN_LIMIT,
            decoding: true,
            pause: Duration::from_secs(30),
            total: Duration::from_secs(600),
            ..self.gateway.generation.load().body
        };
        let mut held = Held::new(&self.gateway.bodies);
        let body = match read(session, limits, &mut held).await {
            Ok(body) => body,
            Err(refusal) => return Answer::error(StatusCode::BAD_REQUEST, &refusal.message),
        };
        match explain::explain(&self.gateway, &body) {
            Ok(value) => Answer::json(StatusCode::OK, &value),
            Err(reason) => Answer::error(StatusCode::BAD_REQUEST, &reason),
        }
    }
}

/// The plugin in `/plugins/NAME/reset`.
fn plugin_of(path: &str) -> Option<&str> {
    path.strip_prefix("/plugins/")?.strip_suffix("/reset").filter(|name| !name.is_empty())
}

/// `refuse=true` of a query.
fn refuse_of(query: Option<&str>) -> Result<bool, String> {
    let mut refuse = false;
    for (key, value) in form_urlencoded::parse(query.unwrap_or_default().as_bytes()) {
        if key != "refuse" {
            return Err(format!("unknown parameter {key:?}: there is refuse=true"));
        }
        refuse = value.parse().map_err(|_| format!("refuse: expected true or false, found {value:?}"))?;
    }
    Ok(refuse)
}

/// `wait=SECONDS` of a query.
fn wait_of(query: Option<&str>) -> Result<Duration, String> {
    let mut wait = Duration::ZERO;
    for (key, value) in form_urlencoded::parse(query.unwrap_or_default().as_bytes()) {
        if key != "wait" {
            return Err(format!("unknown parameter {key:?}: there is wait=SECONDS"));
        }
        let seconds: u64 = value.parse().map_err(|_| format!("wait: expected seconds, found {value:?}"))?;
        wait = Duration::from_secs(seconds);
        if wait > LONGEST_WAIT {
            return Err(format!("wait: at most {} seconds", LONGEST_WAIT.as_secs()));
        }
    }
    Ok(wait)
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[async_trait]
impl ServeHttp for Admin {
    async fn response(&self, session: &mut ServerSession) -> Response<Vec<u8>> {
        let answer = self.answer(session).await;
        let mut response = Response::new(answer.body);
        *response.status_mut() = answer.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, http::HeaderValue::from_static(answer.content_type));
        let length = response.body().len();
        response.headers_mut().insert(header::CONTENT_LENGTH, http::HeaderValue::from(length));
        response
    }
}
