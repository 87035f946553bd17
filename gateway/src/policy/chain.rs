//! The chain of plugins of one generation, and how it runs for one turn.

use super::env::PolicyEnv;
use crate::callouts::Destinations;
use crate::metrics::Metrics;
use parking_lot::Mutex;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;
use turnstile_config::{OnError, Phase};
use turnstile_fleet::decision::Decision;
use turnstile_plugins::{Effects, Fault, FaultKind, Lent, LocalResponse, Plugin, PluginStats, Stream};

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
    /// How long it may keep a request waiting while none of its calls is under way.
    pub pause: Duration,
    /// What it may call.
    pub destinations: Destinations,
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
        (pause, destinations): (Duration, Destinations),
        plugin: Plugin,
        exported: Exported,
        digest: String,
        source: String,
        configuration: String,
    ) -> Self {
        let name = Arc::clone(plugin.name());
        Self {
            name,
            phase,
            on_error,
            crash_limit,
            pause,
            destinations,
            plugin,
            digest,
            source,
            configuration,
            exported,
        }
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
    /// A policy broke the exchange off.
    Close(Arc<str>),
    /// A policy has paused: [`TurnPolicies::wait`], then run the phase again.
    Paused,
}

/// A policy that has paused.
struct Pause {
    phase: Phase,
    at: usize,
    /// The decision before the policy ran.
    before: Decision,
}

/// Where a phase goes on after a pause, or begins.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Resume {
    phase: Phase,
    at: usize,
}

/// The policies of one turn: their contexts, from admission to the end.
pub struct TurnPolicies {
    chain: Arc<[ChainPlugin]>,
    streams: Vec<Option<Stream>>,
    shard: usize,
    metrics: Arc<Metrics>,
    /// A policy that pauses is waited for.
    waits: bool,
    paused: Option<Pause>,
    resume: Option<Resume>,
    /// What they see and wrote.
    pub env: Lent<PolicyEnv>,
    /// Names of policies that failed.
    pub failed: Vec<Arc<str>>,
}

impl TurnPolicies {
    /// No contexts yet. `shard` spreads turns over a plugin's instances.
    pub fn new(chain: Arc<[ChainPlugin]>, env: PolicyEnv, shard: usize, metrics: Arc<Metrics>) -> Self {
        let streams = chain.iter().map(|_| None).collect();
        let env = Lent::new(env);
        Self { chain, streams, shard, metrics, waits: false, paused: None, resume: None, env, failed: Vec::new() }
    }

    /// Policies that pause are waited for. Without this they go on, as where a turn is only thought through.
    #[must_use]
    pub fn waiting(mut self) -> Self {
        self.waits = true;
        self
    }

    /// Whether a run of this phase goes on after a pause.
    pub fn resumes(&self, phase: Phase) -> bool {
        self.resume.is_some_and(|resume| resume.phase == phase)
    }

    /// Runs the policies of a phase in order. Contexts of an earlier run of the phase end first: a retry is a new context.
    pub fn run(&mut self, phase: Phase, builtin: &Decision) -> Verdict {
        let chain = Arc::clone(&self.chain);
        let from = self.resume.take().filter(|resume| resume.phase == phase).map_or(0, |resume| resume.at);
        for (at, plugin) in chain.iter().enumerate().skip(from) {
            if plugin.phase != phase {
                continue;
            }
            let Some(slot) = self.streams.get_mut(at) else { continue };
            if let Some(old) = slot.take() {
                report(&plugin.name, old.finish(&mut self.env));
            }
            let before = self.env.decision.clone();
            self.env.hidden = plugin.plugin.spec().hidden_headers;
            let mut stream = plugin.plugin.open_stream(self.shard);
            let outcome = stream.on_request_headers(&mut self.env, true);
            *slot = Some(stream);
            self.report_dropped(plugin);
            match outcome {
                Ok(outcome) => {
                    let paused = outcome.paused_request();
                    if let Some(verdict) = ended_by(plugin, outcome.effects) {
                        return verdict;
                    }
                    if paused && self.waits {
                        self.paused = Some(Pause { phase, at, before });
                        return Verdict::Paused;
                    }
                }
                Err(fault) => {
                    if let Some(verdict) = self.fail(plugin, phase, before, fault, builtin) {
                        return verdict;
                    }
                }
            }
        }
        Verdict::Go
    }

    fn report_dropped(&mut self, plugin: &ChainPlugin) {
        for (name, error) in std::mem::take(&mut self.env.dropped) {
            self.metrics.decision_faults.with_label_values(&[&*plugin.name, error.label()]).inc();
            tracing::debug!(plugin = %plugin.name, decision = %name, %error, "decision dropped");
        }
    }

    /// What a policy's fault comes to.
    fn fail(
        &mut self,
        plugin: &ChainPlugin,
        phase: Phase,
        before: Decision,
        fault: Box<Fault>,
        builtin: &Decision,
    ) -> Option<Verdict> {
        tracing::warn!(plugin = %plugin.name, kind = %fault.kind, message = %fault.message, "policy failed");
        self.failed.push(Arc::clone(&plugin.name));
        // What a policy wrote before it failed is as suspect as the policy.
        self.env.decision = before;
        match plugin.on_error {
            OnError::Closed => return Some(Verdict::Closed(fault)),
            OnError::Open => {}
            OnError::Fallback => match phase {
                Phase::Route => self.env.decision.route = builtin.route.clone(),
                _ => self.env.decision.queue = builtin.queue.clone(),
            },
        }
        None
    }

    /// Waits until the policy that has paused goes on; then the phase is to be run again, which goes on behind it. `builtin`
    /// decides in the place of one that fails meanwhile. Given up when the client is `gone`: then it is told so by `None`.
    pub async fn wait(&mut self, builtin: &Decision, gone: impl Future<Output = ()>) -> Option<Verdict> {
        let Some(Pause { phase, at, before }) = self.paused.take() else { return Some(Verdict::Go) };
        let chain = Arc::clone(&self.chain);
        let (Some(plugin), Some(Some(stream))) = (chain.get(at), self.streams.get_mut(at)) else {
            return Some(Verdict::Go);
        };
        self.resume = Some(Resume { phase, at: at + 1 });
        tokio::pin!(gone);
        let fault = loop {
            let effects = {
                let parked = self.env.park();
                tokio::select! {
                    effects = poll_fn(|cx| stream.poll_effects(cx, parked.berth())) => Some(effects),
                    () = tokio::time::sleep(plugin.pause) => None,
                    () = &mut gone => {
                        drop(parked);
                        stream.cancel_calls();
                        return None;
                    }
                }
            };
            match effects {
                Some(Ok(effects)) => {
                    let continues = effects.continue_request;
                    if let Some(verdict) = ended_by(plugin, effects) {
                        return Some(verdict);
                    }
                    if continues {
                        self.report_dropped(plugin);
                        return Some(Verdict::Go);
                    }
                }
                Some(Err(fault)) => break fault,
                None if stream.has_calls() => {}
                None => {
                    let message = "paused too long with none of its calls under way".to_owned();
                    let plugin = Arc::clone(&plugin.name);
                    break Box::new(Fault { plugin, kind: FaultKind::Deadline, message });
                }
            }
        };
        Some(self.fail(plugin, phase, before, fault, builtin).unwrap_or(Verdict::Go))
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

/// How effects end a turn, if they do.
fn ended_by(plugin: &ChainPlugin, effects: Effects) -> Option<Verdict> {
    let plugin = || Arc::clone(&plugin.name);
    match effects.local_response {
        Some(response) => Some(Verdict::Answer { plugin: plugin(), response }),
        None if effects.close_downstream || effects.close_upstream => Some(Verdict::Close(plugin())),
        None => None,
    }
}

fn report(plugin: &str, ended: Result<(), Box<Fault>>) {
    if let Err(fault) = ended {
        tracing::debug!(plugin, kind = %fault.kind, message = %fault.message, "policy failed at the end of a turn");
    }
}
