//! Probes: is the worker ready, what can it do, how loaded is it.
//!
//! `/ready` is an instant flag; workers that lack it are asked `/health`, which takes a second by design and passes even
//! when the KV pool is wedged. Load comes from `/v1/loads`, which tells the truth in both cases.

use super::Worker;
use super::reports::ServerInfo;
use crate::upstream::{ExchangeError, Reply, Upstream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::Instant;
use turnstile_fleet::worker::{EjectionOptions, Load, WorkerState};

/// The most of a report that is read. `/server_info` is the largest, some 30 KB.
const REPORT_LIMIT: usize = 4 * 1024 * 1024;
/// How often a healthy worker's facts are read again: it may have been replaced by one with other flags.
const FACTS_EVERY: Duration = Duration::from_secs(30);
/// How often a host name is resolved again.
const RESOLVE_EVERY: Duration = Duration::from_secs(30);

/// Probe timing, from `routing`.
#[derive(Debug, Clone, Copy)]
pub struct ProbeOptions {
    /// `routing.probe_interval_ms`.
    pub probe_every: Duration,
    /// `routing.load_interval_ms`.
    pub load_every: Duration,
    /// `routing.probe_timeout_ms`.
    pub timeout: Duration,
    /// `routing.unhealthy_after`.
    pub unhealthy_after: u32,
    /// `routing.healthy_after`.
    pub healthy_after: u32,
    /// `ejection`.
    pub ejection: EjectionOptions,
}

/// Told when a worker comes, goes, or turns out to be another process than before.
pub trait WorkerEvents: Send + Sync {
    /// It serves now.
    fn ready(&self, worker: &Arc<Worker>);
    /// It no longer answers.
    fn unhealthy(&self, worker: &Arc<Worker>, reason: &str);
    /// Another process answers at its address: its cache and sessions are gone.
    fn restarted(&self, worker: &Arc<Worker>);
    /// Nothing moves on it although it has work.
    fn wedged(&self, worker: &Arc<Worker>);
    /// What waits on it for the beginning of an answer waits in vain: it is wedged still, or gone without a word.
    fn stuck(&self, worker: &Arc<Worker>);
    /// It may have room now.
    fn room(&self, worker: &Arc<Worker>);
    /// The present timing; read before every round, so that a reload takes effect.
    fn options(&self) -> ProbeOptions;
}

/// Probes `worker` until it is removed.
pub async fn run(worker: Arc<Worker>, upstream: Arc<Upstream>, events: Arc<dyn WorkerEvents>) {
    let stop = worker.stop.clone();
    let mut prober = Prober {
        worker,
        upstream,
        events,
        good: 0,
        bad: 0,
        uses_health: false,
        resolved_at: None,
        facts_at: None,
        prefill_total: 0,
        answered: false,
        silent: 0,
        heard: 0,
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = prober.rounds() => {}
    }
}

struct Prober {
    worker: Arc<Worker>,
    upstream: Arc<Upstream>,
    events: Arc<dyn WorkerEvents>,
    good: u32,
    bad: u32,
    /// The worker has no `/ready` (before 0.5.23, or the Rust frontend).
    uses_health: bool,
    resolved_at: Option<Instant>,
    facts_at: Option<Instant>,
    /// `total_prefill_uncached_tokens` of the last report: it only falls when the process was replaced.
    prefill_total: u64,
    /// It has been ready before.
    answered: bool,
    /// Failed probes in a row in which nothing at all was heard of it.
    silent: u32,
    /// [`Worker::heard`] at the last probe.
    heard: u64,
}

impl Prober {
    async fn rounds(&mut self) {
        let mut next_probe = Instant::now();
        loop {
            let options = self.events.options();
            let now = Instant::now();
            let probes = now >= next_probe;
            if probes {
                self.probe(&options).await;
                self.worker.note_probed();
                next_probe = now + options.probe_every;
            }
            // A worker whose probes fail may be at work still, so its load is looked at too, though not as often.
            if self.said() != WorkerState::Starting && (self.bad == 0 || probes) {
                let told = self.read_load(&options).await;
                if probes {
                    self.listen(told, &options);
                }
            }
            self.worker.tick(&options, &*self.events);
            let pause = options.load_every.min(options.probe_every);
            let pause = self.worker.ejected_for().map_or(pause, |left| left.min(pause));
            tokio::select! {
                () = tokio::time::sleep(pause.max(Duration::from_millis(10))) => {}
                () = self.worker.ejection() => {}
            }
        }
    }

    async fn probe(&mut self, options: &ProbeOptions) {
        match self.ask_ready(options).await {
            Ok(()) => {
                self.bad = 0;
                self.good = self.good.saturating_add(1);
                if self.facts_at.is_none_or(|at| at.elapsed() >= FACTS_EVERY) {
                    self.read_facts(options).await;
                }
                self.worker.probed_well(&*self.events);
                let state = self.said();
                let waits = matches!(state, WorkerState::Starting | WorkerState::Unhealthy);
                if waits && (self.good >= options.healthy_after || state == WorkerState::Starting) {
                    self.read_load(options).await;
                    self.set_state(WorkerState::Ready);
                    if std::mem::replace(&mut self.answered, true) {
                        self.read_facts(options).await;
                    }
                    tracing::info!(worker = %self.worker.id, "worker ready");
                    self.events.ready(&self.worker);
                }
            }
            Err(reason) => {
                self.good = 0;
                self.bad = self.bad.saturating_add(1);
                self.facts_at = None;
                self.resolved_at = None;
                // One that has never been ready is starting, and turns wait for it, until it has had its chances.
                let lives = matches!(self.said(), WorkerState::Ready | WorkerState::Starting);
                if self.bad >= options.unhealthy_after && lives {
                    self.set_state(WorkerState::Unhealthy);
                    tracing::warn!(worker = %self.worker.id, %reason, "worker unhealthy");
                    self.events.unhealthy(&self.worker, &reason);
                } else {
                    tracing::debug!(worker = %self.worker.id, %reason, "probe failed");
                }
            }
        }
    }

    /// Finds out whether the worker is gone without a word: its probes fail, its load report does not come either, and no answer
    /// of it goes on. A slow probe alone says little (`/health` waits for the engine), so it takes twice as long as it takes to
    /// give the worker nothing new.
    fn listen(&mut self, told: bool, options: &ProbeOptions) {
        let heard = self.worker.heard();
        let silent = self.bad > 0 && !told && heard == std::mem::replace(&mut self.heard, heard);
        self.silent = if silent { self.silent.saturating_add(1) } else { 0 };
        let due = options.unhealthy_after.saturating_mul(2);
        if self.silent == due {
            tracing::warn!(worker = %self.worker.id, probes = due, "worker gone without a word: what waits on it goes elsewhere");
        }
        if self.silent >= due {
            self.events.stuck(&self.worker);
        }
    }

    /// What this probe said last, ejections aside.
    fn said(&self) -> WorkerState {
        self.worker.with_model(|m| m.state)
    }

    fn set_state(&self, state: WorkerState) {
        self.worker.with_model(|m| {
            m.ejections.forget();
            let leaves = self.worker.is_draining() || self.worker.is_removed();
            m.state = if leaves { WorkerState::Draining } else { state };
        });
    }

    async fn get(&self, path: &str, options: &ProbeOptions) -> Result<Reply, ExchangeError> {
        let target = self.worker.target().ok_or(ExchangeError::Unresolved)?;
        self.upstream.exchange(&target, "GET", path, None, options.timeout, REPORT_LIMIT).await
    }

    async fn ask_ready(&mut self, options: &ProbeOptions) -> Result<(), String> {
        self.resolve().await?;
        if !self.uses_health {
            match self.get("/ready", options).await.map_err(|e| e.to_string())? {
                reply if reply.is_success() => return Ok(()),
                reply if reply.status == 404 => self.uses_health = true,
                reply => return Err(format!("/ready answered {}", reply.status)),
            }
        }
        let reply = self.get("/health", options).await.map_err(|e| e.to_string())?;
        if reply.is_success() { Ok(()) } else { Err(format!("/health answered {}", reply.status)) }
    }

    async fn resolve(&mut self) -> Result<(), String> {
        if self.resolved_at.is_some_and(|at| at.elapsed() < RESOLVE_EVERY) {
            return Ok(());
        }
        let host = self.worker.url.host();
        let found = tokio::net::lookup_host((host, self.worker.url.port())).await;
        let address = found.map_err(|e| format!("{host}: {e}"))?.next().ok_or_else(|| format!("{host}: no address"))?;
        self.resolved_at = Some(Instant::now());
        let known = self.worker.target().and_then(|t| t.peer._address.as_inet().copied());
        if known != Some(address) {
            self.worker.resolve_to(address);
        }
        Ok(())
    }

    async fn read_facts(&mut self, options: &ProbeOptions) {
        let reply = match self.get("/server_info", options).await {
            Ok(reply) if reply.is_success() => reply,
            Ok(reply) => {
                tracing::warn!(worker = %self.worker.id, status = reply.status, "no /server_info: affinity only");
                self.facts_at = Some(Instant::now());
                return;
            }
            Err(error) => {
                tracing::debug!(worker = %self.worker.id, %error, "/server_info failed");
                return;
            }
        };
        let info: ServerInfo = match serde_json::from_slice(&reply.body) {
            Ok(info) => info,
            Err(error) => {
                tracing::warn!(worker = %self.worker.id, %error, "/server_info cannot be read: affinity only");
                self.facts_at = Some(Instant::now());
                return;
            }
        };
        self.facts_at = Some(Instant::now());
        self.worker.with_model(|m| {
            m.capabilities.tag = info.enable_session_radix_cache && info.has_sessions();
            m.capabilities.stream = info.enable_streaming_session && info.has_sessions();
            m.capabilities.priority = info.enable_priority_scheduling;
            m.capabilities.dp_size = info.dp_size.unwrap_or(1).max(1);
        });
        if info.schedule_low_priority_values_first {
            tracing::warn!(
                worker = %self.worker.id,
                "worker runs smaller priorities first (--schedule-low-priority-values-first): priorities are not sent"
            );
            self.worker.with_model(|m| m.capabilities.priority = false);
        }
        *self.worker.facts.lock() = Some(info);
    }

    /// True when the worker answered at all.
    async fn read_load(&mut self, options: &ProbeOptions) -> bool {
        let Ok(reply) = self.get("/v1/loads", options).await else { return false };
        if !reply.is_success() {
            return true;
        }
        match Load::parse(&reply.body) {
            Ok(load) => {
                let total = load.prefill_uncached_total;
                let expected = self.worker.expected_prefill.swap(0, Ordering::AcqRel);
                self.prefill_total = self.prefill_total.max(expected);
                if total < self.prefill_total {
                    tracing::warn!(worker = %self.worker.id, "worker was restarted");
                    self.worker.with_model(|m| m.restarted());
                    self.facts_at = None;
                    self.events.restarted(&self.worker);
                }
                self.prefill_total = total;
                self.worker.look_for_motion(&load, options, &*self.events);
                self.worker.with_model(|m| {
                    if !self.worker.is_removed() {
                        m.report(load);
                    }
                });
                self.events.room(&self.worker);
            }
            Err(error) => tracing::debug!(worker = %self.worker.id, %error, "/v1/loads cannot be read"),
        }
        true
    }
}
