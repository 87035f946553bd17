//! A filter's report for a terminal, written from the same values as its JSON.

use crate::workbench::text::{plain, short, write_accesses};
use serde_json::Value;
use std::fmt::Write;

/// The report as text.
pub fn page(report: &Value) -> String {
    let mut page = String::new();
    // Writing to a `String` cannot fail.
    let _ = write_page(&mut page, report);
    page
}

fn write_page(page: &mut String, report: &Value) -> std::fmt::Result {
    writeln!(page, "filter {}", plain(&report["plugin"]))?;
    writeln!(page, "\ncallbacks")?;
    for step in list(&report["steps"]) {
        write_step(page, step)?;
    }
    if !list(&report["calls"]).is_empty() {
        writeln!(page, "\ncalls")?;
    }
    for call in list(&report["calls"]) {
        let what = match &call["grpc"] {
            Value::Null => format!("{} {}", plain(&call["method"]), plain(&call["path"])),
            method => plain(method),
        };
        let reply = if call["reply"].is_null() { "FAILED".to_owned() } else { plain(&call["reply"]["status"]) };
        writeln!(page, "  {}: {what}: {reply}", plain(&call["upstream"]))?;
    }
    write_accesses(page, "asked", &report["asked"])?;
    write_side(page, "request, as it goes on", &report["request"])?;
    if let answer @ Value::Object(_) = &report["answered"] {
        writeln!(page, "\nANSWERED by the filter: {} {}", plain(&answer["status"]), plain(&answer["details"]))?;
    }
    write_side(page, "response, as the client gets it", &report["response"])?;
    for (member, words) in [
        ("waits", "WAITS: it paused, and nothing ended that; a gateway takes it for failed after pause_timeout_ms"),
        ("closed", "CLOSED by the filter: the exchange breaks off"),
        ("too_large", "TOO LARGE: it holds more of a body than held_body_bytes"),
    ] {
        if report[member] == true {
            writeln!(page, "\n{words}")?;
        }
    }
    if report["response"]["broken_off"] == true {
        writeln!(page, "\nBROKEN OFF: the client has a part of an answer")?;
    }
    if let Value::String(fault) = &report["fault"] {
        writeln!(page, "\nFAULT: {fault}")?;
    }
    if !list(&report["log"]).is_empty() {
        writeln!(page, "\nlog")?;
    }
    for line in list(&report["log"]) {
        writeln!(page, "  {}: {}", plain(&line["level"]), plain(&line["message"]))?;
    }
    Ok(())
}

fn write_step(page: &mut String, step: &Value) -> std::fmt::Result {
    if let Value::Number(ms) = &step["continued_after_ms"] {
        writeln!(page, "  continued after {ms} ms")?;
    } else {
        let mut facts = String::new();
        if let Value::Number(size) = &step["size"] {
            facts = format!(", {size} bytes");
        }
        if step["end_of_stream"] == true {
            facts.push_str(", the end");
        }
        writeln!(page, "  {}{facts}: {}", plain(&step["callback"]), plain(&step["returned"]))?;
    }
    write_changes(page, &step["headers"], "    ")?;
    write_changes(page, &step["trailers"], "    trailer ")?;
    if let body @ Value::Object(_) = &step["body"] {
        writeln!(page, "    body: {} -> {}", short(&plain(&body["from"])), short(&plain(&body["to"])))?;
    }
    Ok(())
}

fn write_changes(page: &mut String, changes: &Value, before: &str) -> std::fmt::Result {
    for (sign, kind) in [("+", "added"), ("-", "removed")] {
        for (name, value) in changes[kind].as_object().into_iter().flatten() {
            writeln!(page, "{before}{sign} {name}: {}", short(&plain(value)))?;
        }
    }
    for (name, change) in changes["replaced"].as_object().into_iter().flatten() {
        writeln!(page, "{before}~ {name}: {} -> {}", short(&plain(&change["from"])), short(&plain(&change["to"])))?;
    }
    Ok(())
}

fn write_side(page: &mut String, title: &str, side: &Value) -> std::fmt::Result {
    let Some(headers) = side["headers"].as_object() else { return Ok(()) };
    writeln!(page, "\n{title}")?;
    let added = side["added"].as_object();
    for (name, value) in headers {
        let sign = if added.is_some_and(|added| added.contains_key(name)) {
            '+'
        } else if side["replaced"].get(name).is_some() {
            '~'
        } else {
            ' '
        };
        writeln!(page, "  {sign} {name}: {}", short(&plain(value)))?;
    }
    for (name, value) in side["removed"].as_object().into_iter().flatten() {
        writeln!(page, "  - {name}: {}", short(&plain(value)))?;
    }
    let changed = if side["body_changed"] == true { "changed" } else { "as it came" };
    writeln!(page, "    body, {changed}: {}", short(&plain(&side["body"])))?;
    for (name, value) in side["trailers"].as_object().into_iter().flatten() {
        writeln!(page, "    trailer {name}: {}", short(&plain(value)))?;
    }
    Ok(())
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}
