//! The one registry of metrics, and the table that documents them.
//!
//! Label values come from closed sets: routes, pools, workers of the configuration, plugins of the configuration, error
//! codes, reasons. Nothing a client sends becomes a label.

use prometheus::core::{Collector, MetricVec, MetricVecBuilder};
use prometheus::{
    Encoder, GaugeVec, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
    TextEncoder,
};
use std::collections::HashMap;

/// Seconds, from a millisecond to ten minutes.
const LATENCY_BUCKETS: &[f64] =
    &[0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0];
const ITL_BUCKETS: &[f64] = &[0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];
const TOKEN_BUCKETS: &[f64] =
    &[0.0, 64.0, 256.0, 1024.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0, 262144.0, 1048576.0];

/// Values of `state` in `turnstile_worker_state`.
pub const WORKER_STATES: [&str; 5] = ["starting", "ready", "unhealthy", "draining", "ejected"];
/// Values of `field` in `turnstile_worker`.
pub const WORKER_FIELDS: [&str; 11] = [
    "in_flight",
    "running",
    "waiting",
    "max_running",
    "kv_used_tokens",
    "kv_capacity_tokens",
    "waiting_uncached_tokens",
    "prefill_tokens_per_s",
    "ttft_ms",
    "itl_ms",
    "index_blocks",
];

/// One metric's name, kind, labels and meaning, for the documentation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Described {
    /// Full name.
    pub name: String,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// Label names.
    pub labels: Vec<&'static str>,
    /// Meaning and unit.
    pub help: String,
}

/// All metrics of the gateway.
pub struct Metrics {
    registry: Registry,
    described: Vec<Described>,
    /// Tasks of the runtime.
    pub tasks: IntGauge,
    /// Requests ended, by route, pool and status.
    pub requests: IntCounterVec,
    /// Connections of clients.
    pub client_connections: IntGauge,
    /// Requests in progress by route.
    pub in_progress: IntGaugeVec,
    /// Refusals of our own by error code.
    pub refusals: IntCounterVec,
    /// Seconds from the end of the request body to the first byte of the answer.
    pub ttft: HistogramVec,
    /// Seconds between content events of a stream.
    pub itl: HistogramVec,
    /// Seconds a turn took in all.
    pub duration: HistogramVec,
    /// Waiting turns.
    pub queue_depth: IntGaugeVec,
    /// Seconds waited in the queue.
    pub queue_wait: HistogramVec,
    /// Turns that left the queue, by result.
    pub queue_left: IntCounterVec,
    /// Placements by worker and reason.
    pub decisions: IntCounterVec,
    /// Writes of policies that were dropped, by plugin and cause.
    pub decision_faults: IntCounterVec,
    /// Attempts on workers, by worker and result.
    pub attempts: IntCounterVec,
    /// Attempts after the first, by pool and what became of the wish for one.
    pub retries: IntCounterVec,
    /// Faults that count against workers.
    pub worker_faults: IntCounterVec,
    /// Ejections of workers, by cause.
    pub ejections: IntCounterVec,
    /// Live sessions by mode.
    pub sessions: IntGaugeVec,
    /// Sessions ended, by mode and cause.
    pub sessions_ended: IntCounterVec,
    /// Side requests by kind and result.
    pub side_requests: IntCounterVec,
    /// Side requests that wait or run, by kind.
    pub side_queue: IntGaugeVec,
    /// Closes of engine sessions on their way, by state.
    pub session_closes: IntGaugeVec,
    /// Turns that wait for a busy session.
    pub session_waiting: IntGauge,
    /// Prefills by what became of them, seen from the next turn of the session.
    pub prefill_outcomes: IntCounterVec,
    /// Cached tokens of turns after a prefill, beyond what their session had before it.
    pub prefill_tokens: IntCounter,
    /// Prompt tokens by source: predicted cached, reported cached, total.
    pub prompt_tokens: IntCounterVec,
    /// Absolute error of the cached-token prediction, tokens.
    pub prediction_error: HistogramVec,
    /// Completion tokens.
    pub completion_tokens: IntCounterVec,
    /// Calls into plugins.
    pub plugin_calls: IntCounterVec,
    /// Wall time spent in plugins, s.
    pub plugin_seconds: prometheus::CounterVec,
    /// Events of answers that plugins asked for and were not told.
    pub events_left_out: IntCounter,
    /// Faults of plugins by kind.
    pub plugin_faults: IntCounterVec,
    /// Calls of plugins to upstreams, by result.
    pub plugin_callouts: IntCounterVec,
    /// Hosts that plugins wanted requests to go to, by what came of it.
    pub wanted_hosts: IntCounterVec,
    /// Generations taken back, by the plugin that crashed.
    pub plugin_rollbacks: IntCounterVec,
    /// Decisions of shadows, by what they are about and whether they are those that were taken.
    pub shadow_decisions: IntCounterVec,
    /// Predicted cost of the workers that shadows would have chosen, beyond those chosen.
    pub shadow_cost_ms: prometheus::CounterVec,
    /// Turns counted for and against canaries.
    pub canary_turns: IntCounterVec,
    /// Canaries set aside, by cause.
    pub canaries_set_aside: IntCounterVec,
    /// Canaries that are set aside.
    pub canary_aside: IntGaugeVec,
    /// Plugins out of service.
    pub plugin_quarantined: IntGaugeVec,
    /// Instances of plugins in memory.
    pub plugin_instances: IntGaugeVec,
    /// Their linear memory.
    pub plugin_memory: IntGaugeVec,
    /// The generation that serves.
    pub generation: IntGauge,
    /// Generations that are not dropped yet.
    pub generations_alive: IntGauge,
    /// Rollbacks that were asked for.
    pub rollbacks: IntCounter,
    /// Reloads by result.
    pub reloads: IntCounterVec,
    /// State of workers, 1 for the present one.
    pub worker_state: IntGaugeVec,
    /// Numbers about workers by field.
    pub worker: GaugeVec,
    /// Ignored hints by cause.
    pub ignored_hints: IntCounterVec,
    /// Steering members met, by option and action.
    pub steered: IntCounterVec,
    /// Snapshots by result.
    pub snapshots: IntCounterVec,
    /// Size of the last snapshot.
    pub snapshot_bytes: IntGauge,
    /// Engine sessions of the last process that are not closed yet.
    pub orphans: IntGauge,
}

struct Builder {
    registry: Registry,
    described: Vec<Described>,
}

impl Builder {
    fn note(&mut self, name: &str, kind: &'static str, labels: &[&'static str], help: &str) {
        self.described.push(Described { name: name.into(), kind, labels: labels.to_vec(), help: help.into() });
    }

    fn keep<C: Collector + Clone + 'static>(&self, made: prometheus::Result<C>) -> prometheus::Result<C> {
        let collector = made?;
        self.registry.register(Box::new(collector.clone()))?;
        Ok(collector)
    }

    fn counter(&mut self, name: &str, help: &str, labels: &[&'static str]) -> prometheus::Result<IntCounterVec> {
        self.note(name, "counter", labels, help);
        self.keep(IntCounterVec::new(Opts::new(name, help), labels))
    }

    fn gauges(&mut self, name: &str, help: &str, labels: &[&'static str]) -> prometheus::Result<IntGaugeVec> {
        self.note(name, "gauge", labels, help);
        self.keep(IntGaugeVec::new(Opts::new(name, help), labels))
    }

    fn gauge(&mut self, name: &str, help: &str) -> prometheus::Result<IntGauge> {
        self.note(name, "gauge", &[], help);
        self.keep(IntGauge::new(name, help))
    }

    fn count(&mut self, name: &str, help: &str) -> prometheus::Result<IntCounter> {
        self.note(name, "counter", &[], help);
        self.keep(IntCounter::new(name, help))
    }

    fn histogram(
        &mut self,
        name: &str,
        help: &str,
        labels: &[&'static str],
        buckets: &[f64],
    ) -> prometheus::Result<HistogramVec> {
        self.note(name, "histogram", labels, help);
        self.keep(HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets.to_vec()), labels))
    }
}

impl Metrics {
    /// A fresh registry.
    ///
    /// # Errors
    /// Only when two metrics share a name, which a test excludes.
    pub fn new() -> prometheus::Result<Self> {
        let mut b = Builder { registry: Registry::new(), described: Vec::new() };
        let plugin_seconds_help =
            "Seconds of wall time spent inside a plugin's callbacks, waits for a busy instance left out";
        b.note("turnstile_plugin_seconds_total", "counter", &["plugin"], plugin_seconds_help);
        let plugin_seconds = b.keep(prometheus::CounterVec::new(
            Opts::new("turnstile_plugin_seconds_total", plugin_seconds_help),
            &["plugin"],
        ))?;
        let shadow_help = "Milliseconds by which the workers that a shadow would have chosen instead are predicted to be dearer, \
             or cheaper (direction)";
        b.note("turnstile_shadow_cost_ms_total", "counter", &["plugin", "direction"], shadow_help);
        let shadow_cost_ms = b.keep(prometheus::CounterVec::new(
            Opts::new("turnstile_shadow_cost_ms_total", shadow_help),
            &["plugin", "direction"],
        ))?;
        let worker_help = "A number about a worker; field is in_flight, running, waiting, max_running, kv_used_tokens, \
             kv_capacity_tokens, waiting_uncached_tokens, prefill_tokens_per_s, ttft_ms, itl_ms, index_blocks";
        b.note("turnstile_worker", "gauge", &["worker", "field"], worker_help);
        let worker = b.keep(GaugeVec::new(Opts::new("turnstile_worker", worker_help), &["worker", "field"]))?;
        Ok(Self {
            tasks: b.gauge("turnstile_tasks", "Asynchronous tasks that are alive: connections, requests, and the gateway's own")?,
            requests: b.counter(
                "turnstile_requests_total",
                "Requests ended, by route, pool and HTTP status (499: the client left first)",
                &["route", "pool", "status"],
            )?,
            client_connections: b.gauge(
                "turnstile_client_connections",
                "Connections that clients have open, over all listeners (limits.connections is for each)",
            )?,
            in_progress: b.gauges("turnstile_requests_in_progress", "Requests being served", &["route"])?,
            refusals: b.counter(
                "turnstile_refusals_total",
                "Answers the gateway gave on its own account, by error code",
                &["code"],
            )?,
            ttft: b.histogram(
                "turnstile_ttft_seconds",
                "Seconds from the end of the request body to the first event of the answer, queue included",
                &["route", "pool"],
                LATENCY_BUCKETS,
            )?,
            itl: b.histogram(
                "turnstile_itl_seconds",
                "Mean seconds between content events of one stream",
                &["route", "pool"],
                ITL_BUCKETS,
            )?,
            duration: b.histogram(
                "turnstile_request_seconds",
                "Seconds from the request's head to the last byte of the answer",
                &["route", "pool"],
                LATENCY_BUCKETS,
            )?,
            queue_depth: b.gauges("turnstile_queue_depth", "Turns waiting for a worker", &["pool"])?,
            queue_wait: b.histogram(
                "turnstile_queue_wait_seconds",
                "Seconds a turn waited in the queue (turns that did not wait are not counted)",
                &["pool"],
                LATENCY_BUCKETS,
            )?,
            queue_left: b.counter(
                "turnstile_queue_left_total",
                "Turns that left the queue: dispatched, expired, client_gone, or were refused: full",
                &["pool", "result"],
            )?,
            decisions: b.counter(
                "turnstile_decisions_total",
                "Placements, by worker and reason: bound, moved_cheaper, moved_lost, cached, least_cost, pinned (by a streaming \
                 session), retry, policy (a policy chose otherwise than the built-in would)",
                &["worker", "reason"],
            )?,
            decision_faults: b.counter(
                "turnstile_decision_faults_total",
                "Decisions of policies that were dropped, by plugin and cause",
                &["plugin", "cause"],
            )?,
            attempts: b.counter(
                "turnstile_attempts_total",
                "Attempts on workers, by worker and result: ok, client_gone, connect, timeout, broken, protocol (no HTTP, \
                 1xx or 3xx), stuck (taken off a worker on which nothing moves), status_4xx, status_5xx, overloaded, \
                 error_event, cut, plugin_failed, plugin_answer, plugin_close and plugin_end (ended by a filter that saw the \
                 answer's body)",
                &["worker", "result"],
            )?,
            retries: b.counter(
                "turnstile_retries_total",
                "Retries of failed attempts, by pool and result: retried, or not for want of attempts (retry.attempts), \
                 budget (retry.budget_ratio) or another worker (no_worker), or because it lost too many workers already \
                 (retry.lost_workers)",
                &["pool", "result"],
            )?,
            worker_faults: b.counter(
                "turnstile_worker_faults_total",
                "Failed attempts that count against the worker (see ejection.consecutive_faults), by worker and fault: connect, \
                 answer",
                &["worker", "fault"],
            )?,
            ejections: b.counter(
                "turnstile_ejections_total",
                "Workers taken out although their probes are well, by worker and cause: connect, answer (resets, broken \
                 HTTP, 5xx), wedge (nothing moves)",
                &["worker", "cause"],
            )?,
            sessions: b.gauges("turnstile_sessions", "Live sessions, by mode", &["mode"])?,
            sessions_ended: b.counter(
                "turnstile_sessions_ended_total",
                "Engine sessions closed and sessions dropped, by mode and cause",
                &["mode", "cause"],
            )?,
            side_requests: b.counter(
                "turnstile_side_requests_total",
                "Requests of the gateway to workers, by kind (open_session, close_session, prefill, abort) and result \
                 (ok; refused: answered 4xx; failed: answered 5xx or nothing; retried; skipped; cancelled; dropped: no room in \
                 limits.side_queue, a close comes again)",
                &["kind", "result"],
            )?,
            side_queue: b.gauges("turnstile_side_queue_depth", "Side requests that wait or run, by kind", &["kind"])?,
            session_closes: b.gauges(
                "turnstile_session_closes",
                "Engine sessions to be closed, by state: leaving (a turn still runs, or the worker has not let go), closing (sent), \
                 retrying (failed, to be sent again), given_up (counts until the engine's own timeout)",
                &["state"],
            )?,
            session_waiting: b.gauge("turnstile_session_waiting", "Turns waiting for a busy streaming session")?,
            prefill_outcomes: b.counter(
                "turnstile_prefill_outcomes_total",
                "Prefills that were sent, by outcome: used (the next turn of the session found more cached than the turn before \
                 had left), useless (it did not), cancelled (the next turn came first), failed, unused (no turn came on that \
                 worker)",
                &["outcome"],
            )?,
            prefill_tokens: b.count(
                "turnstile_prefill_used_tokens_total",
                "Cached tokens that turns after a prefill found beyond the context of the turn before",
            )?,
            prompt_tokens: b.counter(
                "turnstile_prompt_tokens_total",
                "Prompt tokens of turns whose worker reported usage: kind is prompt, cached_predicted or cached_reported",
                &["worker", "kind"],
            )?,
            prediction_error: b.histogram(
                "turnstile_cached_prediction_error_tokens",
                "Absolute difference between predicted and reported cached tokens of a turn",
                &["worker"],
                TOKEN_BUCKETS,
            )?,
            completion_tokens: b.counter(
                "turnstile_completion_tokens_total",
                "Completion tokens reported by workers",
                &["worker"],
            )?,
            plugin_calls: b.counter("turnstile_plugin_calls_total", "Callbacks run", &["plugin"])?,
            plugin_seconds,
            plugin_callouts: b.counter(
                "turnstile_plugin_callouts_total",
                "Calls that plugins made to upstreams and pools, by result: ok (any status) or failed",
                &["plugin", "upstream", "result"],
            )?,
            events_left_out: b.count(
                "turnstile_events_left_out_total",
                "Events of answers that plugins asked for and were not told, because there were too many of their kind",
            )?,
            wanted_hosts: b.counter(
                "turnstile_wanted_hosts_total",
                "Hosts that plugins of Higress' dialect wanted requests to go to, by result: followed, unknown (no worker of the \
                 pool), unavailable (not ready, or it failed the request), barred (by the session or a policy)",
                &["result"],
            )?,
            plugin_faults: b.counter(
                "turnstile_plugin_faults_total",
                "Calls into plugins that failed, by kind: trap, deadline, memory, stack, exit, allocator, host (a fault of the \
                 gateway's), lost (the instance went down with another request), unavailable (no instance, or quarantined)",
                &["plugin", "kind"],
            )?,
            plugin_rollbacks: b.counter(
                "turnstile_plugin_rollbacks_total",
                "Generations taken back because a plugin that they brought crashed in a loop, by plugin",
                &["plugin"],
            )?,
            shadow_decisions: b.counter(
                "turnstile_shadow_decisions_total",
                "Decisions of shadows, by what they are about (worker, order, session, or the name of one that stands for \
                 itself, such as prefill; answer: in a worker's place; fault: it failed) and result: same as what was done, or \
                 other",
                &["plugin", "about", "result"],
            )?,
            shadow_cost_ms,
            canary_turns: b.counter(
                "turnstile_canary_turns_total",
                "Turns counted in the comparison of a canary (plugin), by who decided: canary, rest",
                &["plugin", "side"],
            )?,
            canaries_set_aside: b.counter(
                "turnstile_canaries_set_aside_total",
                "Canaries set aside, by cause: faults, decision_ms, cached_loss, ttft",
                &["plugin", "cause"],
            )?,
            canary_aside: b.gauges("turnstile_canary_aside", "1 for a canary that is set aside", &["plugin"])?,
            plugin_instances: b.gauges(
                "turnstile_plugin_instances",
                "Instances of a plugin in memory, by age: current (of the generation that serves new requests), or old (of one \
                 before, for its last requests and as long as it may come back)",
                &["plugin", "age"],
            )?,
            plugin_memory: b.gauges(
                "turnstile_plugin_memory_bytes",
                "Linear memory of a plugin's instances in bytes, by age as in turnstile_plugin_instances",
                &["plugin", "age"],
            )?,
            plugin_quarantined: b.gauges(
                "turnstile_plugin_quarantined",
                "1 for a plugin that is out of service because it crashed in a loop",
                &["plugin"],
            )?,
            generation: b.gauge("turnstile_generation", "Number of the generation that serves new requests")?,
            generations_alive: b.gauge(
                "turnstile_generations_alive",
                "Generations in memory: the one that serves, those that requests still run on, and the one that may come back \
                 while new plugins are on probation",
            )?,
            rollbacks: b.count(
                "turnstile_rollbacks_total",
                "Generations taken back because an administrator asked for it (POST /plugins/rollback)",
            )?,
            reloads: b.counter("turnstile_reloads_total", "Reloads, by result: ok, failed, unchanged, held (not done: the files are as they were at a rollback)", &["result"])?,
            worker_state: b.gauges(
                "turnstile_worker_state",
                "1 for the state a worker is in: starting, ready, unhealthy, draining, ejected",
                &["worker", "state"],
            )?,
            worker,
            ignored_hints: b.counter(
                "turnstile_ignored_hints_total",
                "Hints ignored, by cause: unknown_key, bad_header, unsupported",
                &["cause"],
            )?,
            steered: b.counter(
                "turnstile_steering_total",
                "Requests with a member that would steer a worker, by its option under [steering] and what became of it: \
                 drop, scope, isolate, take",
                &["option", "action"],
            )?,
            snapshots: b.counter("turnstile_snapshots_total", "Snapshots of the state, by result: ok, failed", &["result"])?,
            snapshot_bytes: b.gauge("turnstile_snapshot_bytes", "Size of the last snapshot")?,
            orphans: b.gauge(
                "turnstile_orphaned_engine_sessions",
                "Engine sessions that the last process left open and that are not closed yet",
            )?,
            registry: b.registry,
            described: b.described,
        })
    }

    /// A worker is no longer configured: its series go, so that a fleet that changes does not leave them behind.
    pub fn forget_worker(&self, id: &str) {
        forget_series(&self.worker_state, id);
        forget_series(&self.worker, id);
        forget_series(&self.prediction_error, id);
        for counter in [&self.decisions, &self.attempts, &self.ejections, &self.prompt_tokens, &self.completion_tokens]
        {
            forget_series(counter, id);
        }
    }

    /// The table of all metrics, sorted by name.
    pub fn described(&self) -> Vec<Described> {
        let mut all = self.described.clone();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// The text exposition format.
    pub fn render(&self) -> Vec<u8> {
        let mut out = Vec::new();
        if let Err(error) = TextEncoder::new().encode(&self.registry.gather(), &mut out) {
            tracing::error!(%error, "metrics could not be encoded");
        }
        out
    }

    /// `docs/metrics.md`.
    pub fn document(&self) -> String {
        let mut text = String::from(
            "# Metrics\n\nServed in the Prometheus text format at `GET /metrics` of the admin listener. Label values come \
             from closed sets (routes, pools, workers and plugins of the configuration, codes of this page); nothing a \
             client sends becomes a label. Plugins may define metrics of their own; those appear as \
             `turnstile_plugin_custom{plugin,name}`.\n\n| metric | kind | labels | meaning |\n|---|---|---|---|\n",
        );
        for m in self.described() {
            text.push_str(&format!("| `{}` | {} | {} | {} |\n", m.name, m.kind, m.labels.join(", "), m.help));
        }
        text
    }
}

/// Removes the series whose label `worker` is this.
fn forget_series<T: MetricVecBuilder>(metric: &MetricVec<T>, worker: &str) {
    for family in metric.collect() {
        for series in family.get_metric() {
            let labels: HashMap<&str, &str> = series.get_label().iter().map(|l| (l.name(), l.value())).collect();
            if labels.get("worker") == Some(&worker) {
                // Absent is as good as removed.
                let _ = metric.remove(&labels);
            }
        }
    }
}
