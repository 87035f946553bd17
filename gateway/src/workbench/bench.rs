//! What a policy's callbacks cost, in time and memory.

use super::situation::Situation;
use super::subject::{Started, Subject};
use super::trial::environment;
use serde_json::{Value, json};
use std::fmt::Write;
use std::time::{Duration, Instant};
use turnstile_plugins::{Lent, Runtime};

/// Turns that are not counted: caches and the guest's own memory settle in them.
const WARM_UP: u32 = 100;

/// The turn and the fleet that are used when none is given.
pub const SAMPLE: (&str, &str) = (include_str!("sample/turn.json"), include_str!("sample/fleet.json"));

/// Runs a policy on the same turn again and again.
///
/// # Errors
/// The plugin does not start, or a callback did not return.
pub fn bench(subject: &Subject, situation: &Situation, runtime: &Runtime, turns: u32) -> Result<Value, String> {
    let began = Instant::now();
    let Started { plugin, services, took } = subject.start(runtime)?;
    let compile = began.elapsed().saturating_sub(took);
    let memory = || {
        // Memory is looked at in a tick.
        plugin.tick(0);
        plugin.stats().memory_high_water
    };
    let at_start = memory();
    let mut decide = Vec::with_capacity(turns as usize);
    let mut end = Vec::with_capacity(turns as usize);
    let mut after_warm_up = at_start;
    for turn in 0..turns.saturating_add(WARM_UP) {
        if turn == WARM_UP {
            after_warm_up = memory();
        }
        let mut env = Lent::new(environment(&services, situation));
        let mut stream = plugin.open_stream(0);
        let began = Instant::now();
        let decided = stream.on_request_headers(&mut env, true);
        let decided_in = began.elapsed();
        decided.map_err(|fault| format!("turn {turn}: {fault}"))?;
        env.finish(situation.end());
        let began = Instant::now();
        let ended = stream.finish(&mut env);
        let ended_in = began.elapsed();
        ended.map_err(|fault| format!("the end of turn {turn}: {fault}"))?;
        services.take();
        if turn >= WARM_UP {
            decide.push(decided_in);
            end.push(ended_in);
        }
    }
    let after = memory();
    Ok(json!({
        "plugin": subject.name,
        "turns": turns,
        "workers": situation.candidates().workers().len(),
        "callbacks": {
            "proxy_on_request_headers": quantiles(&mut decide),
            "proxy_on_log": quantiles(&mut end),
        },
        "memory_bytes": {"after_start": at_start, "after_warm_up": after_warm_up, "after_turns": after},
        "compile_ms": compile.as_secs_f64() * 1e3,
        "start_ms": took.as_secs_f64() * 1e3,
    }))
}

/// Median, 99th percentile and longest, µs.
fn quantiles(times: &mut [Duration]) -> Value {
    times.sort_unstable();
    let at = |share: f64| {
        let place = (times.len().saturating_sub(1) as f64 * share).round() as usize;
        times.get(place).map_or(0.0, |time| time.as_nanos() as f64 / 1e3)
    };
    json!({"median_us": at(0.5), "p99_us": at(0.99), "max_us": at(1.0)})
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
    let name = report["plugin"].as_str().unwrap_or_default();
    writeln!(page, "{name}: {} turns on {} workers", report["turns"], report["workers"])?;
    writeln!(page, "{:<52}  {:>10}  {:>10}  {:>10}", "", "median", "p99", "most")?;
    for (callback, what) in [
        ("proxy_on_request_headers", "decision (proxy_on_context_create and _request_headers)"),
        ("proxy_on_log", "end (proxy_on_log, _done and _delete)"),
    ] {
        let times = &report["callbacks"][callback];
        let us = |which: &str| format!("{:.1} µs", number(&times[which]));
        writeln!(page, "{what:<52}  {:>10}  {:>10}  {:>10}", us("median_us"), us("p99_us"), us("max_us"))?;
    }
    let memory = &report["memory_bytes"];
    let kib = |which: &str| number(&memory[which]) / 1024.0;
    let (start, warm, end) = (kib("after_start"), kib("after_warm_up"), kib("after_turns"));
    writeln!(
        page,
        "memory: {start:.0} KiB after the start, {warm:.0} KiB after {WARM_UP} turns, {end:.0} KiB at the end"
    )?;
    writeln!(page, "compile {:.1} ms, start {:.1} ms", number(&report["compile_ms"]), number(&report["start_ms"]))
}
