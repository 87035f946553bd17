//! The gateway, in this process, with an upstream, callees and clients on real sockets.

use super::case::{Ask, Case, Dialect, OnError, Phase, PluginCase, Protocol, Step};
use super::client;
use super::guests::Guests;
use super::lines::{guest_line, named};
use super::observed::{Observed, Reply, missing, same_lines};
use super::pattern::matches;
use super::server::Server;
use crate::harness::{DEADLINE, PluginText, Request, Rig, Setup, logs, send, swap};
use futures::future::join_all;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Deadlines where a test names none: far more than a busy machine needs.
const AMPLE_MS: u64 = 60_000;
/// How often a condition is looked at.
const LOOK: Duration = Duration::from_millis(2);

/// Numbers tests of this process: plugins of different ones must not share a name, since they share the log.
static NEXT: AtomicU64 = AtomicU64::new(0);

struct Stage<'a> {
    rig: Rig,
    upstream: Server,
    callees: BTreeMap<String, Server>,
    guests: &'a Guests,
    prefix: String,
    names: bool,
    /// Lines that steps before have accounted for, and those that steps before the last one have.
    seen: usize,
    before: usize,
    /// Requests so far.
    requests: usize,
    /// Answers of which clients have read the first piece.
    open: Vec<client::Begun>,
}

/// Runs a test.
///
/// # Errors
/// What differs from what it expects.
pub async fn run(case: &Case, guests: &Guests) -> Result<(), String> {
    let prefix = format!("k{}-", NEXT.fetch_add(1, Relaxed));
    let first = case.steps.iter().find(|step| step.request.is_some());
    let upstream = Server::upstream(first.map(|step| step.upstream.clone()).unwrap_or_default()).await;
    let mut callees = BTreeMap::new();
    for (name, answer) in &case.callees {
        callees.insert(name.clone(), Server::callee(answer.clone()).await);
    }
    logs();
    let mut setup = Setup::new().external(upstream.url()).set("retry.attempts", "1");
    for (key, value) in &case.settings {
        setup = setup.set(key, &value.to_string());
    }
    for (name, server) in &callees {
        let Some(answer) = case.callees.get(name) else { continue };
        let mut keys = String::new();
        if answer.protocol == Protocol::Http2 {
            keys.push_str("h2c = true\n");
        }
        if let Some(server_name) = &answer.tls {
            keys.push_str(&format!("server_name = {server_name:?}\nverify = {}\n", answer.verify));
        }
        setup = setup.upstream(name, &server.url(), &keys);
    }
    if first.is_some_and(|step| step.upstream.protocol == Protocol::Http2) {
        setup = setup.pool("default", "h2c = true", &[0]);
    }
    let ChainText { texts, files } = chain_text(&case.plugins, &prefix, guests, &callees)?;
    setup.set_plugins(&texts);
    for (name, bytes) in files {
        setup = setup.file(&name, bytes);
    }
    let rig = match (setup.try_start().await, &case.start.refused) {
        (Ok(rig), None) => rig,
        (Err(refusal), Some(pattern)) if matches(pattern, &refusal) => return Ok(()),
        (Err(refusal), Some(pattern)) => {
            return Err(format!("start: expected a refusal like {pattern:?}, got {refusal:?}"));
        }
        (Err(refusal), None) => return Err(format!("start: {refusal}")),
        (Ok(_), Some(pattern)) => return Err(format!("start: expected a refusal like {pattern:?}, got none")),
    };
    rig.ready().await;
    let names = case.names_plugins();
    let mut stage =
        Stage { rig, upstream, callees, guests, prefix, names, seen: 0, before: 0, requests: 0, open: Vec::new() };
    let lines = stage.new_lines();
    if let Some(expected) = &case.start.log {
        same_lines(expected, &lines).map_err(|problem| format!("start: {problem}"))?;
    }
    for (at, step) in case.steps.iter().enumerate() {
        stage.step(step).await.map_err(|problem| format!("step {}: {problem}", at + 1))?;
    }
    stage.end(case).await
}

/// The plugins as the configuration names them, and their modules' files by name.
struct ChainText {
    texts: Vec<PluginText>,
    files: BTreeMap<String, Vec<u8>>,
}

fn chain_text(
    cases: &[PluginCase],
    prefix: &str,
    guests: &Guests,
    callees: &BTreeMap<String, Server>,
) -> Result<ChainText, String> {
    let mut files = BTreeMap::new();
    let mut texts = Vec::new();
    for case in cases {
        if case.log_level.is_some() {
            return Err(format!("plugins.{}.log_level: the gateway has no such option", case.name));
        }
        let file = format!("{}.wasm", case.module);
        files.insert(file.clone(), guests.module(&case.module)?);
        let phase = match case.phase {
            None | Some(Phase::Filter) => "filter",
            Some(Phase::Admit) => "admit",
            Some(Phase::Route) => "route",
            Some(Phase::Background) => "background",
        };
        let quoted = |text: &str| toml::Value::from(text).to_string();
        let mut text = PluginText::new(&format!("{prefix}{}", case.name), file, phase)
            .key(format!("callback_timeout_ms = {}", case.callback_ms.unwrap_or(AMPLE_MS)))
            .key(format!("configure_timeout_ms = {}", case.start_ms.unwrap_or(AMPLE_MS)))
            .key(format!("instances = {}", case.instances))
            .key(match case.on_error {
                _ if phase == "background" => "",
                OnError::Closed => "on_error = \"closed\"",
                OnError::Open => "on_error = \"open\"",
                OnError::Fallback => "on_error = \"fallback\"",
            });
        if !case.vm_config.is_empty() {
            text = text.key(format!("vm_configuration = {}", quoted(&case.vm_config)));
        }
        if let Some(vm_id) = &case.vm_id {
            // As the plugin's name, so that tests do not meet.
            text = text.key(format!("vm_id = {}", quoted(&format!("{prefix}{vm_id}"))));
        }
        for (name, value) in &case.environment {
            text = text.key(format!("environment.{} = {}", quoted(name), quoted(value)));
        }
        if case.isolated {
            text = text.key("isolation = \"stream\"");
        }
        if case.dialect == Dialect::Higress {
            text = text.key("dialect = \"higress\"");
        }
        if let Some(mib) = case.memory_mib {
            text = text.key(format!("memory_mib = {mib}"));
        }
        if let Some(bytes) = case.held_body {
            text = text.key(format!("held_body_bytes = {bytes}"));
        }
        if !callees.is_empty() {
            text = text.key(format!("upstreams = {:?}", callees.keys().collect::<Vec<_>>()));
        }
        for (key, value) in case.configuration() {
            let value = toml::Value::try_from(value).map_err(|error| format!("config.{key}: {error}"))?;
            text = text.key(format!("config.{key:?} = {value}"));
        }
        for (key, value) in &case.options {
            text = text.key(format!("{key} = {}", with_addresses(value, callees)));
        }
        texts.push(text);
    }
    Ok(ChainText { texts, files })
}

/// `callee:NAME` in an option is where the callee listens.
fn with_addresses(value: &toml::Value, callees: &BTreeMap<String, Server>) -> String {
    callees.iter().fold(value.to_string(), |text, (name, server)| {
        text.replace(&format!("callee:{name}"), &server.addr().to_string())
    })
}

impl Stage<'_> {
    async fn step(&mut self, step: &Step) -> Result<(), String> {
        if let Some(patterns) = &step.wait {
            return self.wait(patterns).await;
        }
        if let Some(cases) = &step.plugins {
            return self.replace(cases, step.refused.as_deref()).await;
        }
        if step.restart.is_some() {
            return Err("restart: only the host library is started anew".into());
        }
        if step.finish.is_some() {
            return self.finish(step).await;
        }
        let Some(ask) = &step.request else { return Err("nothing to do".into()) };
        self.upstream.answer(step.upstream.clone());
        if step.stays_open {
            let begun = join_all((0..step.clients).map(|_| client::begin(self.rig.addr(), ask))).await;
            self.open = join_all(begun.into_iter().map(client::Begun::first)).await.into_iter().flatten().collect();
            let all = self.open.len() == step.clients;
            return if all { Ok(()) } else { Err(format!("{} answers began", self.open.len())) };
        }
        let deadline = tokio::time::Instant::now() + DEADLINE;
        loop {
            match self.ask(step, ask).await {
                Err(problem) if step.again && tokio::time::Instant::now() < deadline => drop(problem),
                asked => return asked,
            }
        }
    }

    async fn ask(&mut self, step: &Step, ask: &Ask) -> Result<(), String> {
        let addr = self.rig.addr();
        let mut replies = Vec::new();
        if let Some(pattern) = &ask.leaves_at {
            let begun = client::begin(addr, ask).await;
            self.until(&format!("a line like {pattern:?}"), |stage| {
                stage.lines_since(stage.seen).iter().any(|line| matches(pattern, line))
            })
            .await?;
            drop(begun);
        } else {
            replies = join_all((0..step.clients).map(|_| client::send(addr, ask))).await;
        }
        self.check(step, replies, step.clients).await
    }

    /// Answers that were held back go to their clients.
    async fn finish(&mut self, step: &Step) -> Result<(), String> {
        self.upstream.release();
        let open = std::mem::take(&mut self.open);
        let requests = open.len();
        let replies = join_all(open.into_iter().map(client::Begun::rest)).await;
        self.check(step, replies, requests).await
    }

    /// Waits for the ends of requests, and looks at what came of them.
    async fn check(&mut self, step: &Step, replies: Vec<Option<Reply>>, requests: usize) -> Result<(), String> {
        let mut observed = Observed { replies, ..Observed::default() };
        self.requests += requests;
        let all = self.requests;
        self.until("the requests' ends", |stage| stage.rig.access_log().len() >= all).await?;
        observed.upstream = self.upstream.take();
        observed.callees = self.callees.iter().map(|(name, server)| (name.clone(), server.take())).collect();
        observed.log = self.new_lines();
        let mut problems = step.expect.problems(&observed, requests);
        for (name, value) in &step.expect.metrics {
            problems.extend(self.metric_differs(name, *value).await);
        }
        if problems.is_empty() { Ok(()) } else { Err(problems.join("\n  ")) }
    }

    async fn wait(&mut self, patterns: &[String]) -> Result<(), String> {
        let waited = self.until("lines", |stage| missing(patterns, &stage.lines_since(stage.before)).is_empty()).await;
        let lines = self.lines_since(self.before);
        self.new_lines();
        waited.map_err(|_| format!("waited in vain for {:?}; got {lines:?}", missing(patterns, &lines)))
    }

    /// Replaces the chain, as an operator does.
    async fn replace(&mut self, cases: &[PluginCase], refused: Option<&str>) -> Result<(), String> {
        let ChainText { texts, files } = chain_text(cases, &self.prefix, self.guests, &self.callees)?;
        for (name, bytes) in files {
            swap(&self.rig.dir().join(name), bytes);
        }
        self.rig.edit(|setup| setup.set_plugins(&texts));
        let reloaded = self.rig.running().reload().await;
        self.new_lines();
        match (reloaded, refused) {
            (Ok(_), None) => Ok(()),
            (Ok(_), Some(pattern)) => Err(format!("expected a refusal like {pattern:?}, got none")),
            (Err(error), None) => Err(format!("refused: {error}")),
            (Err(error), Some(pattern)) if !matches(pattern, &error) => {
                Err(format!("expected a refusal like {pattern:?}, got {error:?}"))
            }
            (Err(error), Some(_)) => {
                // Who looks at the gateway sees it, too.
                let shown = self.rig.admin("/config").await.json();
                if shown["last_reload_error"].as_str() == Some(error.as_str()) {
                    Ok(())
                } else {
                    Err(format!("the admin listener shows {}", shown["last_reload_error"]))
                }
            }
        }
    }

    /// Whatever the guests did: the gateway serves, and ends in good order.
    async fn end(mut self, case: &Case) -> Result<(), String> {
        let live = send(self.rig.addr(), &Request::get("/live")).await;
        if live.status != 200 {
            return Err(format!("afterwards: /live answers {}", live.status));
        }
        if let Some(stop) = &case.stop {
            self.seen = self.lines_count();
            let (prefix, names, seen) = (self.prefix.clone(), self.names, self.seen);
            self.rig.stop().await;
            let lines = lines(&prefix, names, seen..usize::MAX);
            return same_lines(&stop.log, &lines).map_err(|problem| format!("stop: {problem}"));
        }
        Ok(())
    }

    async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) -> Result<(), String> {
        let deadline = tokio::time::Instant::now() + DEADLINE;
        while !holds(self) {
            if tokio::time::Instant::now() >= deadline {
                return Err(format!("waited in vain: {what}; log so far {:?}", self.lines_since(self.seen)));
            }
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    async fn metric_differs(&self, name: &str, expected: f64) -> Option<String> {
        let samples = self.rig.metrics().await;
        let of_chain = |metric: &str, extra: &str| -> f64 {
            let mut sum = 0.0;
            for plugin in self.chain() {
                sum += samples.sum(metric, &[("plugin", plugin.as_str()), ("name", extra)]);
            }
            sum
        };
        let got = of_chain("turnstile_plugin_custom", name) + of_chain("turnstile_plugin_custom_histogram_count", name);
        ((got - expected).abs() > 1e-9).then(|| format!("metric {name}: expected {expected}, got {got}"))
    }

    fn chain(&self) -> Vec<String> {
        let generation = self.rig.gateway().generation.load();
        generation.chain.iter().map(|c| c.plugin.name().to_string()).collect()
    }

    fn lines_count(&self) -> usize {
        logs().plugin_lines().len()
    }

    fn lines_since(&self, at: usize) -> Vec<String> {
        lines(&self.prefix, self.names, at..usize::MAX)
    }

    fn new_lines(&mut self) -> Vec<String> {
        let count = self.lines_count();
        let lines = lines(&self.prefix, self.names, self.seen..count);
        self.before = std::mem::replace(&mut self.seen, count);
        lines
    }
}

/// Lines that guests of one test have logged, of a range of all lines.
fn lines(prefix: &str, names: bool, range: Range<usize>) -> Vec<String> {
    let all = logs().plugin_lines();
    let mine = all
        .iter()
        .take(range.end)
        .skip(range.start)
        .filter_map(|(plugin, line)| Some((plugin.strip_prefix(prefix)?, line)));
    mine.filter_map(|(plugin, line)| Some(named(plugin, guest_line(line)?, names))).collect()
}
