//! The chain of plugins of one generation, and how it runs for one turn.

use super::env::PolicyEnv;
use crate::metrics::Metrics;
use parking_lot::Mutex;
use std::sync::Arc;
use turnstile_config::{OnError, Phase};
use turnstile_fleet::decision::Decision;
use turnstile_plugins::{Fault, FaultKind, Lent, LocalResponse, Plugin, PluginStats, Stream};

/// One plugin of the chain.
#[derive(Clone)]
pub struct ChainPlugin {
    /// Its name.
    pub name: Arc<str>,
    /// When it runs.
    pub phase: Phase,
    /// What its failure means.
    pub on_error: OnError,
    /// Crashes in a row that are a crash loop; 0 for never.
    pub crash_limit: u32,
    /// The started plugin.
    pub plugin: Plugin,
    /// SHA-256 of its module, hexadecimal.
    pub digest: String,
    /// `builtin:NAME` or the file.
    pub source: String,
    /// Its configuration as given to it.
    pub configuration: String,
    exported: Exported,
}

/// A started plugin's counters as they were last exported, for as long as it runs.
pub type Exported = Arc<Mutex<PluginStats>>;

impl ChainPlugin {
    /// A started plugin with its place in the chain.
    pub fn new(
        (phase, on_error, crash_limit): (Phase, OnError, u32),
        plugin: Plugin,
        exported: Exported,
        digest: String,
        source: String,
        configuration: String,
    ) -> Self {
        let name = Arc::clone(plugin.name());
        Self { name, phase, on_error, crash_limit, plugin, digest, source, configuration, exported }
    }

    /// Its counters as they were last exported, shared with whatever exports them next.
    pub fn exported(&self) -> Exported {
        Arc::clone(&self.exported)
    }

    /// Adds what the plugin did since the last time to the metrics.
    pub fn export(&self, metrics: &Metrics) {
        let now = self.plugin.stats();
        let mut last = self.exported.lock();
        let name = [&*self.name];
        metrics.plugin_calls.with_label_values(&name).inc_by(now.calls.saturating_sub(last.calls));
        let nanoseconds = now.nanoseconds.saturating_sub(last.nanoseconds);
        metrics.plugin_seconds.with_label_values(&name).inc_by(nanoseconds as f64 / 1e9);
        for kind in FaultKind::ALL {
            let more = now.faults_of(kind).saturating_sub(last.faults_of(kind));
            if more > 0 {
                metrics.plugin_faults.with_label_values(&[&*self.name, kind.as_str()]).inc_by(more);
            }
        }
        *last = now;
    }
}

/// How a phase ended.
pub enum Verdict {
    /// The turn goes on.
    Go,
    /// A policy answered in a worker's place.
    Answer {
        /// Which.
        plugin: Arc<str>,
        /// With what.
        response: Box<LocalResponse>,
    },
    /// A policy with `on_error = "closed"` failed.
    Closed(Box<Fault>),
}

/// The policies of one turn: their contexts, from admission to the end.
pub struct TurnPolicies {
    chain: Arc<[ChainPlugin]>,
    streams: Vec<Option<Stream>>,
    shard: usize,
    metrics: Arc<Metrics>,
    /// What they see and wrote.
    pub env: Lent<PolicyEnv>,
    /// Names of policies that failed.
    pub failed: Vec<Arc<str>>,
}

impl TurnPolicies {
    /// No contexts yet. `shard` spreads turns over a plugin's instances.
    pub fn new(chain: Arc<[ChainPlugin]>, env: PolicyEnv, shard: usize, metrics: Arc<Metrics>) -> Self {
        let streams = chain.iter().map(|_| None).collect();
        Self { chain, streams, shard, metrics, env: Lent::new(env), failed: Vec::new() }
    }

    /// Runs the policies of a phase in order. Contexts of an earlier run of the phase end first: a retry is a new context.
    pub fn run(&mut self, phase: Phase, builtin: &Decision) -> Verdict {
        let chain = Arc::clone(&self.chain);
        for (plugin, slot) in chain.iter().zip(&mut self.streams) {
            if plugin.phase != phase {
                continue;
            }
            if let Some(old) = slot.take() {
                report(&plugin.name, old.finish(&mut self.env));
            }
            let before = self.env.decision.clone();
            let mut stream = plugin.plugin.open_stream(self.shard);
            let outcome = stream.on_request_headers(&mut self.env, true);
            *slot = Some(stream);
            for (name, error) in std::mem::take(&mut self.env.dropped) {
                self.metrics.decision_faults.with_label_values(&[&*plugin.name, error.label()]).inc();
                tracing::debug!(plugin = %plugin.name, decision = %name, %error, "decision dropped");
            }
            match outcome {
                Ok(outcome) => {
                    if let Some(response) = outcome.effects.local_response {
                        return Verdict::Answer { plugin: Arc::clone(&plugin.name), response };
                    }
                }
                Err(fault) => {
                    tracing::warn!(plugin = %plugin.name, kind = %fault.kind, message = %fault.message, "policy failed");
                    self.failed.push(Arc::clone(&plugin.name));
                    // What a policy wrote before it failed is as suspect as the policy.
                    self.env.decision = before;
                    match plugin.on_error {
                        OnError::Closed => return Verdict::Closed(fault),
                        OnError::Open => {}
                        OnError::Fallback => match phase {
                            Phase::Route => self.env.decision.route = builtin.route.clone(),
                            _ => self.env.decision.queue = builtin.queue.clone(),
                        },
                    }
                }
            }
        }
        Verdict::Go
    }

    /// Ends all contexts: log, done, delete. What the policies may read then has to be in the environment.
    pub fn finish(&mut self) {
        for (plugin, slot) in self.chain.iter().zip(&mut self.streams) {
            if let Some(stream) = slot.take() {
                report(&plugin.name, stream.finish(&mut self.env));
            }
        }
    }
}

fn report(plugin: &str, ended: Result<(), Box<Fault>>) {
    if let Err(fault) = ended {
        tracing::debug!(plugin, kind = %fault.kind, message = %fault.message, "policy failed at the end of a turn");
    }
}
