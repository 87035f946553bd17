//! The chain of plugins of one generation, and how it runs for one turn.

use super::canary::{CanaryRun, PromptTokens, SetAside, Shown};
use super::env::{PolicyEnv, PolicyStore};
use super::events::EventSet;
use super::shadow::{Applied, Difference, Opinion};
use crate::callouts::Destinations;
use crate::metrics::Metrics;
use parking_lot::Mutex;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::{Duration, Instant};
use turnstile_config::{Given, OnError, Phase, Plugin as PluginConfig};
use turnstile_fleet::decision::Decision;
use turnstile_plugins::{
    CallResult, Callback, Effects, Fault, FaultKind, Lent, LocalResponse, Plugin, PluginStats, Stream,
};

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
    /// What it is told of answers.
    pub events: EventSet,
    /// Its callbacks of the response side are not called.
    pub ignores_answers: bool,
    /// How long its streams may go on once a newer generation is without it.
    pub drain: Option<Duration>,
    /// For a shadow: its own store.
    pub shadow: Option<Arc<dyn PolicyStore>>,
    /// For a canary: what is known of it.
    pub canary: Option<CanaryRun>,
    /// Place in the chain of the canary that decides for some sessions where this one is listed.
    pub canary_at: Option<usize>,
    /// The started plugin.
    pub plugin: Plugin,
    /// SHA-256 of its module, hexadecimal.
    pub digest: String,
    /// `builtin:NAME`, the file or the URL.
    pub source: String,
    /// What it was started with.
    pub given: Given,
    exported: Exported,
}

/// A started plugin's counters as they were last exported, for as long as it runs.
pub type Exported = Arc<Mutex<PluginStats>>;

impl ChainPlugin {
    /// A started plugin with its place in the chain.
    pub fn new(
        config: &PluginConfig,
        destinations: Destinations,
        plugin: Plugin,
        exported: Exported,
        digest: String,
    ) -> Self {
        Self {
            name: Arc::clone(plugin.name()),
            phase: config.phase,
            on_error: config.on_error(),
            crash_limit: config.crash_limit,
            pause: Duration::from_millis(config.pause_timeout_ms),
            destinations,
            events: EventSet::of(&config.events),
            ignores_answers: !config.response,
            shadow: None,
            canary: None,
            canary_at: None,
            drain: config.drain_s.map(Duration::from_secs),
            plugin,
            digest,
            source: config.wasm.to_string(),
            given: config.given(),
            exported,
        }
    }

    /// Whether answers are shown to it, as a filter, by a callback of its own.
    pub fn sees_answers(&self) -> bool {
        let callbacks = [Callback::ResponseHeaders, Callback::ResponseBody, Callback::ResponseTrailers];
        !self.ignores_answers && callbacks.iter().any(|callback| self.plugin.exports(*callback))
    }

    /// Whether it may do anything about an answer, as a filter: by a callback of its own, because of an event, or from a tick, a
    /// queue or a reply.
    pub fn takes_part_in_answers(&self) -> bool {
        let acts = !self.ignores_answers && self.plugin.acts_apart();
        self.sees_answers() || acts || !self.events.is_empty()
    }

    /// Whether no request depends on it alone: a shadow, or a canary.
    pub fn is_on_trial(&self) -> bool {
        self.shadow.is_some() || self.canary.is_some()
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
    /// Place of the one that runs after it.
    next: usize,
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
    pub(super) chain: Arc<[ChainPlugin]>,
    pub(super) streams: Vec<Option<Stream>>,
    shard: usize,
    metrics: Arc<Metrics>,
    /// A policy that pauses is waited for.
    waits: bool,
    paused: Option<Pause>,
    resume: Option<Resume>,
    counts: bool,
    /// For each canary, by its place in the chain: whether it decided in the place of the other.
    sides: Vec<(usize, bool)>,
    /// What shadows decided in the last run of a phase.
    opinions: Vec<Opinion>,
    /// What they see and wrote.
    pub env: Lent<PolicyEnv>,
    /// Names of policies that failed.
    pub failed: Vec<Arc<str>>,
    /// Where shadows differ from what was done.
    pub differences: Vec<Difference>,
}

impl TurnPolicies {
    /// No contexts yet. `shard` spreads turns over a plugin's instances.
    pub fn new(chain: Arc<[ChainPlugin]>, env: PolicyEnv, shard: usize, metrics: Arc<Metrics>) -> Self {
        let streams = chain.iter().map(|_| None).collect();
        let env = Lent::new(env);
        Self {
            chain,
            streams,
            shard,
            metrics,
            waits: false,
            paused: None,
            resume: None,
            counts: true,
            sides: Vec::new(),
            opinions: Vec::new(),
            env,
            failed: Vec::new(),
            differences: Vec::new(),
        }
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

    /// Nothing of what these policies do is counted: for a request that is not served.
    #[must_use]
    pub fn uncounted(mut self) -> Self {
        self.counts = false;
        self
    }

    /// Runs the policies of a phase in order. Contexts of an earlier run of the phase end first: a retry is a new context.
    pub fn run(&mut self, phase: Phase, builtin: &Decision) -> Verdict {
        let chain = Arc::clone(&self.chain);
        let from = self.resume.take().filter(|resume| resume.phase == phase).map_or(0, |resume| resume.at);
        if from == 0 {
            self.opinions.clear();
        }
        for (listed_at, listed) in chain.iter().enumerate().skip(from) {
            // A canary runs in the place of the other.
            if listed.phase != phase || listed.canary.is_some() {
                continue;
            }
            let (at, plugin) = self.deciding(&chain, listed_at, listed);
            if let Some(own) = &plugin.shadow {
                self.ask_shadow(at, plugin, own);
                continue;
            }
            let before = self.env.decision.clone();
            let began = plugin.canary.as_ref().map(|_| Instant::now());
            let outcome = self.enter(at, plugin);
            if let (Some(began), Some(canary), Ok(_)) = (began, &plugin.canary, &outcome) {
                self.judge(plugin, |_| canary.decided(began.elapsed()));
            }
            match outcome {
                Ok(outcome) => {
                    let paused = outcome.paused_request();
                    if let Some(verdict) = ended_by(plugin, outcome.effects) {
                        return verdict;
                    }
                    if let (true, false, Some(Some(stream))) = (paused, self.waits, self.streams.get_mut(at)) {
                        stream.goes_on();
                    }
                    if paused && self.waits {
                        self.paused = Some(Pause { phase, at, next: listed_at + 1, before });
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

    pub(super) fn report_dropped(&mut self, plugin: &ChainPlugin) {
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
        if let Some(canary) = &plugin.canary {
            self.judge(plugin, |_| canary.failed());
        }
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
        let Some(Pause { phase, at, next, before }) = self.paused.take() else { return Some(Verdict::Go) };
        let chain = Arc::clone(&self.chain);
        let (Some(plugin), Some(Some(stream))) = (chain.get(at), self.streams.get_mut(at)) else {
            return Some(Verdict::Go);
        };
        self.resume = Some(Resume { phase, at: next });
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

    /// Holds what shadows decided in the last run of a phase against what was done.
    pub fn compare(&mut self, applied: &Applied<'_>) {
        let opinions = std::mem::take(&mut self.opinions);
        if opinions.is_empty() {
            return;
        }
        let metrics = self.counts.then_some(&*self.metrics);
        self.differences.retain(|difference| difference.phase != applied.phase);
        self.differences.extend(opinions.iter().filter_map(|opinion| opinion.compare(applied, metrics)));
    }

    /// Ends all contexts: log, done, delete. What the policies may read then has to be in the environment.
    pub fn finish(&mut self) {
        self.account();
        for (plugin, slot) in self.chain.iter().zip(&mut self.streams) {
            if let Some(stream) = slot.take() {
                self.env.hidden = plugin.plugin.spec().hidden_headers;
                report(&plugin.name, stream.finish(&mut self.env));
            }
        }
    }

    /// The canaries that have decided for this turn.
    pub fn canaries(&self) -> Vec<Arc<str>> {
        let decided = self.sides.iter().filter(|(_, by_canary)| *by_canary);
        decided.filter_map(|(at, _)| self.chain.get(*at)).map(|canary| Arc::clone(&canary.name)).collect()
    }

    /// Who decides where a plugin is listed: its canary, if it has one and that takes this session.
    fn deciding<'a>(
        &mut self,
        chain: &'a [ChainPlugin],
        at: usize,
        listed: &'a ChainPlugin,
    ) -> (usize, &'a ChainPlugin) {
        let Some(canary_at) = listed.canary_at else { return (at, listed) };
        let Some(canary) = chain.get(canary_at) else { return (at, listed) };
        let takes = canary.canary.as_ref().is_some_and(|c| c.takes(self.env.side()));
        let by_canary = takes && !canary.plugin.is_quarantined();
        self.sides.retain(|(known, _)| *known != canary_at);
        self.sides.push((canary_at, by_canary));
        if by_canary { (canary_at, canary) } else { (at, listed) }
    }

    /// Enters a policy in a context of its own.
    fn enter(&mut self, at: usize, plugin: &ChainPlugin) -> CallResult {
        if let Some(old) = self.streams.get_mut(at).and_then(Option::take) {
            report(&plugin.name, old.finish(&mut self.env));
        }
        self.env.hidden = plugin.plugin.spec().hidden_headers;
        let mut stream = plugin.plugin.open_stream(self.shard);
        let outcome = stream.on_request_headers(&mut self.env, true);
        if let Some(slot) = self.streams.get_mut(at) {
            *slot = Some(stream);
        }
        self.report_dropped(plugin);
        outcome
    }

    /// Lets a shadow decide, and takes all of it back.
    fn ask_shadow(&mut self, at: usize, plugin: &ChainPlugin, own: &Arc<dyn PolicyStore>) {
        let before = self.env.begin_shadow(own);
        let outcome = self.enter(at, plugin);
        if let Some(Some(stream)) = self.streams.get_mut(at) {
            // A shadow that pauses is not waited for.
            stream.goes_on();
        }
        let (after, spoken) = self.env.end_shadow(before);
        let (answer, fault) = match outcome {
            Ok(outcome) => (outcome.effects.local_response, None),
            Err(fault) => {
                tracing::debug!(plugin = %plugin.name, kind = %fault.kind, message = %fault.message, "shadow failed");
                (None, Some(fault))
            }
        };
        self.opinions.push(Opinion { plugin: Arc::clone(&plugin.name), after, spoken, answer, fault });
    }

    /// What the turn's end says about canaries, and about those that they stand in for.
    fn account(&mut self) {
        let Some(end) = self.env.end() else { return };
        // One that failed or broke off has no tokens to tell of.
        let Some(ttft_ms) = end.ttft_ms.filter(|_| end.status < 400 && end.completion_tokens.is_some()) else { return };
        let prompt = end.prompt_tokens.zip(end.cached_tokens).map(|(all, cached)| PromptTokens { all, cached });
        let shown = Shown { prompt, ttft_ms };
        for (at, by_canary) in self.sides.clone() {
            // A turn that a canary was not able to decide says nothing about its decisions.
            let Some(plugin) = self.chain.get(at).filter(|c| !self.failed.contains(&c.name)) else { continue };
            let Some(canary) = &plugin.canary else { continue };
            self.judge(plugin, |metrics| {
                let side = if by_canary { "canary" } else { "rest" };
                metrics.canary_turns.with_label_values(&[&*plugin.name, side]).inc();
                canary.ended(by_canary, shown)
            });
        }
    }

    /// Notes something about a canary, which may set it aside.
    pub(super) fn judge(&self, plugin: &ChainPlugin, note: impl FnOnce(&Metrics) -> Option<SetAside>) {
        if !self.counts {
            return;
        }
        let Some(aside) = note(&self.metrics) else { return };
        self.metrics.canaries_set_aside.with_label_values(&[&*plugin.name, aside.cause]).inc();
        tracing::error!(plugin = %plugin.name, cause = aside.cause, reason = %aside.reason, "canary set aside");
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
