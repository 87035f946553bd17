//! The host library alone: plugins run over an exchange in memory, and time passes when the test says so.

mod calls;
mod chain;
mod exchange;

use super::case::{Case, Dialect, OnError, PluginCase, Restart, Start, Step};
use super::guests::Guests;
use super::lines::{guest_line, named};
use super::observed::{Observed, missing, same_lines};
use super::pattern::matches;
use calls::Calls;
use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};
use std::time::Instant;
use tempfile::TempDir;
use turnstile_plugins::{
    CallCommand, LogLevel, LogLine, MetricValue, Plugin, PluginServices, PluginSpec, Runtime, RuntimeOptions,
    SharedState,
};

/// How much time passes between two looks, and the most that passes in one wait, ms of the test's own clock.
const STEP_MS: u64 = 10;
const LONGEST_WAIT_MS: u64 = 90_000;
/// Deadlines where a test names none: far more than a busy machine needs.
const AMPLE_MS: u64 = 60_000;

static RUNTIME: LazyLock<Result<Runtime, String>> =
    LazyLock::new(|| Runtime::new(RuntimeOptions::default()).map_err(|error| error.to_string()));

/// What plugins of a test share, and what they logged.
struct Services {
    shared: SharedState,
    level: LogLevel,
    lines: Mutex<Vec<(String, String)>>,
    calls: Calls,
}

/// A plugin that runs.
struct Running {
    case: PluginCase,
    plugin: Plugin,
}

/// A chain of plugins that runs.
struct Rig {
    runtime: Runtime,
    services: Arc<Services>,
    plugins: Vec<Running>,
    names: bool,
    clock_ms: AtomicU64,
    /// Lines that steps before have accounted for, and those that steps before the last one have.
    seen: usize,
    before: usize,
    /// Several exchanges run at a time, and may wait for each other.
    crowded: bool,
    /// Held by the exchange whose guests run, in tests with calls: a reply finds the others where they wait.
    turns: Option<Mutex<()>>,
    /// Where compiled modules are kept, in tests that start anew.
    cache: Option<TempDir>,
}

impl PluginServices for Services {
    fn shared(&self) -> &SharedState {
        &self.shared
    }

    fn log(&self, line: LogLine<'_>) {
        self.lines.lock().push((line.plugin.to_owned(), line.message.to_owned()));
    }

    fn log_level(&self, _: &str) -> LogLevel {
        self.level
    }

    fn has_upstream(&self, _: &str, upstream: &str) -> bool {
        self.calls.knows(upstream)
    }

    fn has_redis(&self, _: &str, upstream: &str) -> bool {
        self.calls.knows_redis(upstream)
    }

    fn call_out(&self, _: &str, command: CallCommand) {
        self.calls.ask(command);
    }
}

/// Runs a test. What was measured, if anything.
///
/// # Errors
/// What differs from what it expects.
pub fn run(case: &Case, guests: &Guests) -> Result<Option<String>, String> {
    let cache = match case.steps.iter().any(|step| step.restart.is_some()) {
        true => Some(tempfile::tempdir().map_err(|error| error.to_string())?),
        false => None,
    };
    let runtime = match &cache {
        Some(dir) => cached(&modules(dir))?,
        None => RUNTIME.clone()?,
    };
    let level = level(case.plugins.iter().find_map(|plugin| plugin.log_level.as_deref()))?;
    let calls = Calls::new(case.callees.clone());
    let services = Arc::new(Services { shared: SharedState::default(), level, lines: Mutex::default(), calls });
    let names = case.names_plugins();
    let mut rig = Rig {
        runtime,
        services,
        plugins: Vec::new(),
        names,
        clock_ms: AtomicU64::new(0),
        seen: 0,
        before: 0,
        crowded: false,
        turns: (!case.callees.is_empty()).then(Mutex::default),
        cache,
    };
    match rig.start(&case.plugins, guests) {
        Ok(plugins) => rig.plugins = plugins,
        Err(refusal) => {
            return refused(case.start.refused.as_deref(), &refusal).and_then(|()| rig.lives(guests)).map(|()| None);
        }
    }
    if let Some(pattern) = &case.start.refused {
        return Err(format!("start: expected a refusal like {pattern:?}, got none"));
    }
    rig.started(&case.start)?;
    for (at, step) in case.steps.iter().enumerate() {
        rig.step(step, guests).map_err(|problem| format!("step {}: {problem}", at + 1))?;
    }
    if let Some(stop) = &case.stop {
        rig.shut_down();
        same_lines(&stop.log, &rig.new_lines()).map_err(|problem| format!("stop: {problem}"))?;
    }
    rig.lives(guests)?;
    Ok(case.measured_pieces.and_then(|pieces| rig.measure(pieces)))
}

fn level(name: Option<&str>) -> Result<LogLevel, String> {
    Ok(match name {
        None | Some("info") => LogLevel::Info,
        Some("trace") => LogLevel::Trace,
        Some("debug") => LogLevel::Debug,
        Some("warn") => LogLevel::Warn,
        Some("error") => LogLevel::Error,
        Some("critical") => LogLevel::Critical,
        Some(other) => return Err(format!("log_level: no level {other:?}")),
    })
}

/// Whether a refusal was expected, and is like what was expected.
fn refused(pattern: Option<&str>, refusal: &str) -> Result<(), String> {
    match pattern {
        Some(pattern) if matches(pattern, refusal) => Ok(()),
        Some(pattern) => Err(format!("expected a refusal like {pattern:?}, got {refusal:?}")),
        None => Err(format!("refused: {refusal}")),
    }
}

// === impl Rig ===

impl Rig {
    fn start(&self, cases: &[PluginCase], guests: &Guests) -> Result<Vec<Running>, String> {
        let start = |case: &PluginCase| {
            let spec = spec(case, guests.module(&case.module)?);
            let services: Arc<dyn PluginServices> = self.services.clone();
            let plugin = Plugin::start(&self.runtime, spec, services).map_err(|error| error.to_string())?;
            Ok(Running { case: case.clone(), plugin })
        };
        cases.iter().map(start).collect()
    }

    fn started(&mut self, start: &Start) -> Result<(), String> {
        let lines = self.new_lines();
        match &start.log {
            Some(expected) => same_lines(expected, &lines).map_err(|problem| format!("start: {problem}")),
            None => Ok(()),
        }
    }

    fn step(&mut self, step: &Step, guests: &Guests) -> Result<(), String> {
        if let Some(patterns) = &step.wait {
            return self.wait(patterns);
        }
        if let Some(cases) = &step.plugins {
            return match (self.start(cases, guests), step.refused.as_deref()) {
                (Ok(_), Some(pattern)) => Err(format!("expected a refusal like {pattern:?}, got none")),
                (Ok(plugins), None) => {
                    let before = std::mem::replace(&mut self.plugins, plugins);
                    before.iter().for_each(|running| running.plugin.shut_down(self.now()));
                    self.new_lines();
                    Ok(())
                }
                (Err(refusal), pattern) => {
                    self.new_lines();
                    refused(pattern, &refusal)
                }
            };
        }
        if let Some(restart) = step.restart {
            return self.restart(restart, step, guests);
        }
        if step.finish.is_some() || step.stays_open || step.again {
            return Err("finish, stays_open, again: there are no connections here".into());
        }
        let Some(ask) = &step.request else { return Err("nothing to do".into()) };
        self.crowded = step.clients > 1;
        let one = |at: usize| exchange::run(self, ask, &step.upstream, at);
        let outcomes: Vec<Result<exchange::Outcome, String>> = if step.clients == 1 {
            vec![one(0)]
        } else {
            std::thread::scope(|scope| {
                let threads: Vec<_> = (0..step.clients).map(|at| scope.spawn(move || one(at))).collect();
                let joined = threads.into_iter().map(|thread| thread.join());
                joined.map(|joined| joined.unwrap_or_else(|_| Err("the host library panicked".into()))).collect()
            })
        };
        let mut observed = Observed::default();
        for outcome in outcomes {
            let outcome = outcome?;
            observed.replies.push(outcome.reply);
            observed.upstream.extend(outcome.upstream);
        }
        if ask.leaves_at.is_some() {
            observed.replies.clear();
        }
        observed.callees = self.services.calls.take();
        observed.log = self.new_lines();
        let mut problems = step.expect.problems(&observed, step.clients);
        problems.extend(step.expect.metrics.iter().filter_map(|(name, value)| self.metric_differs(name, *value)));
        if problems.is_empty() { Ok(()) } else { Err(problems.join("\n  ")) }
    }

    /// Ends everything and starts it anew, with what the host has kept for itself.
    fn restart(&mut self, restart: Restart, step: &Step, guests: &Guests) -> Result<(), String> {
        let Some(cache) = &self.cache else { return Err("restart: nothing is kept".into()) };
        let cases: Vec<PluginCase> = self.plugins.iter().map(|running| running.case.clone()).collect();
        self.shut_down();
        self.plugins.clear();
        if restart != Restart::Kept {
            spoil(&modules(cache), restart).map_err(|error| format!("restart: {error}"))?;
        }
        self.runtime = cached(&modules(cache))?;
        self.plugins = self.start(&cases, guests)?;
        let counts = self.runtime.module_counts();
        self.new_lines();
        match step.expect.modules {
            Some(expected) if expected != counts => {
                Err(format!("modules compiled and read: expected {expected:?}, got {counts:?}"))
            }
            _ => Ok(()),
        }
    }

    /// Lets time pass until the guests have logged this.
    fn wait(&mut self, patterns: &[String]) -> Result<(), String> {
        let until = self.now() + LONGEST_WAIT_MS;
        loop {
            let lines = self.lines_since(self.before);
            let missing = missing(patterns, &lines);
            if missing.is_empty() {
                self.new_lines();
                return Ok(());
            }
            if self.now() >= until {
                return Err(format!("waited in vain for {missing:?}; got {lines:?}"));
            }
            self.pass();
        }
    }

    /// Lets a little time pass.
    fn pass(&self) {
        let now = self.clock_ms.fetch_add(STEP_MS, Relaxed) + STEP_MS;
        for running in &self.plugins {
            // What failed in a tick is seen in what it does not do.
            running.plugin.tick(now);
        }
        self.services.calls.serve(now);
    }

    fn now(&self) -> u64 {
        self.clock_ms.load(Relaxed)
    }

    fn shut_down(&self) {
        for running in &self.plugins {
            running.plugin.shut_down(self.now());
        }
        for _ in 0..LONGEST_WAIT_MS / STEP_MS {
            if self.plugins.iter().all(|running| running.plugin.is_shut_down()) {
                return;
            }
            self.pass();
        }
    }

    fn lines_since(&self, at: usize) -> Vec<String> {
        let lines = self.services.lines.lock();
        let guests = lines.get(at..).unwrap_or_default().iter();
        guests.filter_map(|(plugin, line)| Some(named(plugin, guest_line(line)?, self.names))).collect()
    }

    fn new_lines(&mut self) -> Vec<String> {
        let lines = self.lines_since(self.seen);
        self.before = std::mem::replace(&mut self.seen, self.services.lines.lock().len());
        lines
    }

    fn metric_differs(&self, name: &str, expected: f64) -> Option<String> {
        let snapshot = self.services.shared.metrics.snapshot();
        let found: Vec<f64> = snapshot
            .iter()
            .filter(|metric| &*metric.name == name)
            .map(|metric| match &metric.value {
                MetricValue::Counter(value) => *value as f64,
                MetricValue::Gauge(value) => *value as f64,
                MetricValue::Histogram { buckets, .. } => buckets.iter().sum::<u64>() as f64,
            })
            .collect();
        let sum: f64 = found.iter().sum();
        (found.is_empty() || (sum - expected).abs() > 1e-9)
            .then(|| format!("metric {name}: expected {expected}, got {found:?}"))
    }

    /// What one piece of an answer costs with the first plugin.
    fn measure(&self, pieces: usize) -> Option<String> {
        use turnstile_plugins::{Body, HttpEnv, Lent};
        let plugin = &self.plugins.first()?.plugin;
        let mut env = Lent::new(HttpEnv { response_body: Some(Body::new(vec![b'x'; 100])), ..HttpEnv::default() });
        let mut stream = plugin.open_stream(0);
        let began = Instant::now();
        for _ in 0..pieces {
            stream.on_response_body(&mut env, 100, false).ok()?;
        }
        let each = began.elapsed().as_nanos() / u128::try_from(pieces.max(1)).ok()?;
        stream.finish(&mut env).ok()?;
        Some(format!("one piece of an answer: {each} ns (this build, this machine)"))
    }

    /// Whatever a guest did: the host can start and run another.
    fn lives(&self, guests: &Guests) -> Result<(), String> {
        let case = PluginCase { name: "another".into(), ..PluginCase::default() };
        let plugin = self.start(std::slice::from_ref(&case), guests).map_err(|error| format!("afterwards: {error}"))?;
        let rig = Rig {
            runtime: self.runtime.clone(),
            services: Arc::clone(&self.services),
            plugins: plugin,
            names: false,
            clock_ms: AtomicU64::new(0),
            seen: 0,
            before: 0,
            crowded: false,
            turns: None,
            cache: None,
        };
        let outcome = exchange::run(&rig, &super::case::Ask::default(), &super::case::Answer::default(), 0)?;
        match outcome.reply {
            Some(reply) if reply.status == 200 => Ok(()),
            other => Err(format!("afterwards: another plugin gives {other:?}")),
        }
    }
}

/// A directory that the runtime makes for itself.
fn modules(dir: &TempDir) -> PathBuf {
    dir.path().join("modules")
}

/// A runtime that keeps compiled modules.
fn cached(dir: &Path) -> Result<Runtime, String> {
    let options = RuntimeOptions { cache_dir: Some(dir.to_owned()), ..RuntimeOptions::default() };
    Runtime::new(options).map_err(|error| error.to_string())
}

/// Makes the files of a directory what they must not be.
fn spoil(dir: &Path, how: Restart) -> std::io::Result<()> {
    for entry in dir.read_dir()? {
        let path = entry?.path();
        let mut bytes = std::fs::read(&path)?;
        let middle = bytes.len() / 2;
        match how {
            Restart::Damaged => bytes.truncate(middle),
            // What says which version of the engine wrote it, and for what machine, stands in front.
            _ => bytes.iter_mut().take(4096).for_each(|byte| *byte = byte.wrapping_add(1)),
        }
        std::fs::write(&path, bytes)?;
    }
    Ok(())
}

fn spec(case: &PluginCase, wasm: Vec<u8>) -> PluginSpec {
    let config = case.configuration();
    let config = if config.is_empty() { String::new() } else { serde_json::Value::Object(config).to_string() };
    let mut spec = PluginSpec::new(case.name.as_str(), wasm).with_configuration(config).with_shards(case.instances);
    spec.vm_configuration = case.vm_config.clone().into_bytes();
    spec.environment = case.environment.clone().into_iter().collect();
    spec.stream_isolation = case.isolated;
    spec.dialect = match case.dialect {
        Dialect::Standard => turnstile_plugins::Dialect::Standard,
        Dialect::Higress => turnstile_plugins::Dialect::Higress,
    };
    spec.limits.callback_deadline_ms = case.callback_ms.unwrap_or(AMPLE_MS);
    spec.limits.configure_deadline_ms = case.start_ms.unwrap_or(AMPLE_MS);
    if let Some(vm_id) = &case.vm_id {
        spec.vm_id.clone_from(vm_id);
    }
    if let Some(mib) = case.memory_mib {
        spec.limits.memory_bytes = (mib as usize) << 20;
    }
    if let Some(bytes) = case.held_body {
        spec.limits.held_body_bytes = bytes;
    }
    spec
}

impl Running {
    fn is_open(&self) -> bool {
        self.case.on_error == OnError::Open
    }
}
