//! What a plugin's callbacks cost, in time and memory: one turn or exchange again and again.

use super::filter;
use super::filter::callees::Callees;
use super::filter::exchange_file::Exchange;
use super::situation::Situation;
use super::subject::{Started, Subject};
use super::trial::environment;
use crate::policy::events::EVENT_FUNCTION;
use serde_json::{Value, json};
use std::fmt::Write;
use std::time::Instant;
use turnstile_config::Phase;
use turnstile_plugins::{Fault, Lent, Runtime};

/// Turns that are not counted: caches and the guest's own memory settle in them.
const WARM_UP: u32 = 100;
/// Turns from one tick to the next, if the plugin has asked for ticks.
const TURNS_A_TICK: u32 = 10;
/// The longest period that a plugin can ask for, and one more, ms: after that its tick is due.
const A_PERIOD_MS: u64 = 1 << 32;

/// The turn and the fleet that are used when none is given.
pub const SAMPLE: (&str, &str) = (include_str!("sample/turn.json"), include_str!("sample/fleet.json"));
/// The exchange that is used when none is given.
pub const SAMPLE_EXCHANGE: &str = include_str!("sample/exchange.json");

/// What is done again and again.
#[derive(Clone, Copy)]
pub enum Load<'a> {
    /// A policy decides on a turn.
    Turn(&'a Situation, Phase),
    /// An exchange goes through a filter.
    Exchange(&'a Exchange),
}

/// Runs a plugin on the same turn or exchange again and again.
///
/// # Errors
/// The plugin does not start, a callback did not return, or a filter does not go on.
pub fn bench(subject: &Subject, load: Load<'_>, runtime: &Runtime, turns: u32) -> Result<Value, String> {
    let began = Instant::now();
    let callees = match load {
        Load::Turn(..) => Callees::default(),
        Load::Exchange(exchange) => Callees::new(&exchange.calls),
    };
    let started = subject.start_measured(runtime, callees)?;
    let Started { plugin, services, took } = &started;
    let compile = began.elapsed().saturating_sub(*took);
    services.meter().begin();
    let mut now_ms = 0;
    // Memory is looked at in a tick.
    let tick = |now_ms: u64| match plugin.tick(now_ms).faults.first() {
        Some(fault) => Err(fault.to_string()),
        None => Ok(plugin.stats().memory_high_water),
    };
    let at_start = tick(now_ms)?;
    let mut after_warm_up = at_start;
    for turn in 0..turns.saturating_add(WARM_UP) {
        if turn == WARM_UP {
            after_warm_up = tick(now_ms)?;
            services.meter().begin();
        }
        let gone = match load {
            Load::Turn(situation, _) => decide(&started, situation).map_err(|fault| fault.to_string()),
            Load::Exchange(exchange) => {
                services.callees().renew(&exchange.calls);
                filter::pass(&started, exchange, &mut now_ms)
            }
        };
        // A fault in a reply takes the instance away, and that is all that the stream knows of it.
        let gone = services.callees().fault().map_or(gone, Err);
        let name = if matches!(load, Load::Turn(..)) { "turn" } else { "exchange" };
        gone.map_err(|fault| format!("{name} {turn}: {fault}"))?;
        services.take();
        if (turn + 1).is_multiple_of(TURNS_A_TICK) {
            now_ms += A_PERIOD_MS;
            tick(now_ms).map_err(|fault| format!("the tick after {name} {turn}: {fault}"))?;
        }
    }
    let after = tick(now_ms)?;
    let (start, callbacks) = services.meter().report();
    let mut report = json!({"plugin": subject.name, "phase": load.phase().as_str(), "turns": turns});
    if let Load::Turn(situation, _) = load {
        report["workers"] = situation.candidates().workers().len().into();
    }
    report["start"] = start;
    report["callbacks"] = callbacks;
    report["memory_bytes"] = json!({"after_start": at_start, "after_warm_up": after_warm_up, "after_turns": after});
    report["compile_ms"] = (compile.as_secs_f64() * 1e3).into();
    report["start_ms"] = (took.as_secs_f64() * 1e3).into();
    Ok(report)
}

/// One turn of a policy: its decision, the events of the answer, its end.
fn decide(started: &Started, situation: &Situation) -> Result<(), Box<Fault>> {
    let mut env = Lent::new(environment(&started.services, situation));
    let mut stream = started.plugin.open_stream(0);
    stream.on_request_headers(&mut env, true)?;
    for event in &situation.events {
        stream.on_foreign_function(&mut env, EVENT_FUNCTION, event.clone())?;
    }
    env.finish(situation.end());
    stream.finish(&mut env)
}

/// The report for a terminal.
pub fn text(report: &Value) -> String {
    let mut page = String::new();
    // Writing to a `String` cannot fail.
    let _ = write_text(&mut page, report);
    page
}

fn write_text(page: &mut String, report: &Value) -> std::fmt::Result {
    let number = |value: &Value| value.as_f64().unwrap_or(0.0);
    let kib = |bytes: &Value| number(bytes) / 1024.0;
    let name = report["plugin"].as_str().unwrap_or_default();
    match &report["workers"] {
        Value::Null => writeln!(page, "{name}: {} exchanges", report["turns"])?,
        workers => writeln!(page, "{name}: {} turns on {workers} workers", report["turns"])?,
    }
    let callbacks = |which: &str| report[which].as_object().into_iter().flatten();
    let width = callbacks("start").chain(callbacks("callbacks")).map(|(name, _)| name.len()).max().unwrap_or(0);
    for (which, title) in [("start", "the start"), ("callbacks", "each")] {
        if callbacks(which).next().is_none() {
            continue;
        }
        let heads = ["calls", "median", "p99", "most", "grown", "memory"].map(|head| format!("{head:>10}"));
        writeln!(page, "{title:<width$}  {}", heads.join("  "))?;
        for (callback, row) in callbacks(which) {
            let us = |which: &str| format!("{:.1} µs", number(&row[which]));
            let memory = |which: &str| format!("{:.0} KiB", kib(&row[which]));
            let (median, p99, most) = (us("median_us"), us("p99_us"), us("max_us"));
            let (calls, grown, now) = (&row["calls"], memory("memory_grown_bytes"), memory("memory_bytes"));
            let cells = [calls.to_string(), median, p99, most, grown, now].map(|cell| format!("{cell:>10}"));
            writeln!(page, "{callback:<width$}  {}", cells.join("  "))?;
        }
    }
    let memory = &report["memory_bytes"];
    let (start, warm, end) = (kib(&memory["after_start"]), kib(&memory["after_warm_up"]), kib(&memory["after_turns"]));
    let what = if report["workers"].is_null() { "exchanges" } else { "turns" };
    writeln!(
        page,
        "memory: {start:.0} KiB after the start, {warm:.0} KiB after {WARM_UP} {what}, {end:.0} KiB at the end"
    )?;
    writeln!(page, "compile {:.1} ms, start {:.1} ms", number(&report["compile_ms"]), number(&report["start_ms"]))
}

// === impl Load ===

impl Load<'_> {
    fn phase(self) -> Phase {
        match self {
            Self::Turn(_, phase) => phase,
            Self::Exchange(_) => Phase::Filter,
        }
    }
}
