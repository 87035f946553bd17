//! A trial's report for a terminal, written from the same values as its JSON.

use serde_json::Value;
use std::fmt::Write;

/// Longest value on one line, characters.
const MAX_VALUE: usize = 160;

/// The report as text.
pub fn page(report: &Value) -> String {
    let mut page = String::new();
    // Writing to a `String` cannot fail.
    let _ = write_page(&mut page, report);
    page
}

fn write_page(page: &mut String, report: &Value) -> std::fmt::Result {
    writeln!(page, "policy {} in phase {}", plain(&report["plugin"]), plain(&report["phase"]))?;
    let facts = &report["facts"];
    writeln!(page, "\nfacts")?;
    for (name, value) in facts.as_object().into_iter().flatten() {
        match value {
            Value::Null => {}
            Value::Array(workers) => write_workers(page, workers)?,
            value => writeln!(page, "  {name}: {}", members(value))?,
        }
    }
    write_accesses(page, "asked", &report["asked"])?;
    writeln!(page, "\nwritten")?;
    let written = report["written"].as_object();
    if written.is_none_or(serde_json::Map::is_empty) {
        writeln!(page, "  nothing")?;
    }
    for (name, value) in written.into_iter().flatten() {
        writeln!(page, "  {name} = {}", short(&plain(value)))?;
    }
    for write in report["refused"].as_array().into_iter().flatten() {
        let (name, value) = (plain(&write["write"]), short(&plain(&write["value"])));
        writeln!(page, "  {name} = {value}: REFUSED, {} ({})", plain(&write["why"]), plain(&write["refused"]))?;
    }
    if let Value::String(why) = &report["not_followed_because"] {
        writeln!(page, "  NOT FOLLOWED: {why}")?;
    }
    if let Value::String(fault) = &report["fault"] {
        writeln!(page, "  FAULT: {fault}\n  (with on_error = \"fallback\" the built-in decides)")?;
    }
    if let Value::Number(status) = &report["answered"] {
        writeln!(page, "  ANSWERED by the policy with status {status}: the turn goes to no worker")?;
    }
    if report["paused"] == true {
        writeln!(
            page,
            "  PAUSED: a gateway waits here until the policy continues the stream; this is what it had decided"
        )?;
    }
    if report["closed"] == true {
        writeln!(page, "  CLOSED by the policy: the client gets no answer")?;
    }
    writeln!(page, "\ndecision")?;
    for (part, value) in report["decision"].as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
        writeln!(page, "  {part}: {}", members(value))?;
    }
    write_accesses(page, "asked in events", &report["asked_in_events"])?;
    write_accesses(page, "asked at the end", &report["asked_at_end"])?;
    if report["not_shown"] != 0 {
        writeln!(page, "\n({} more accesses are not shown)", report["not_shown"])?;
    }
    for (title, list) in [("events", &report["events"]), ("log", &report["log"])] {
        let list = list.as_array().map(Vec::as_slice).unwrap_or_default();
        if !list.is_empty() {
            writeln!(page, "\n{title}")?;
        }
        for one in list {
            match (&one["level"], &one["message"]) {
                (Value::String(level), Value::String(message)) => writeln!(page, "  {level}: {message}")?,
                _ => writeln!(page, "  {one}")?,
            }
        }
    }
    Ok(())
}

pub(super) fn write_accesses(page: &mut String, title: &str, accesses: &Value) -> std::fmt::Result {
    let accesses = accesses.as_array().map(Vec::as_slice).unwrap_or_default();
    if accesses.is_empty() {
        return Ok(());
    }
    writeln!(page, "\n{title}")?;
    for access in accesses {
        let value = || match &access["value"] {
            Value::Null => "not there".to_owned(),
            value => short(&plain(value)),
        };
        if let Value::String(name) = &access["read"] {
            writeln!(page, "  read {name}: {}", value())?;
        } else if let Value::String(name) = &access["header"] {
            writeln!(page, "  read header {name}: {}", value())?;
        } else if let Value::String(name) = &access["write"] {
            writeln!(page, "  write {name} = {}", value())?;
        } else {
            let result = match &access["result"] {
                Value::Null => plain(&access["status"]),
                result => short(&plain(result)),
            };
            writeln!(page, "  call {}({}): {result}", plain(&access["call"]), short(&plain(&access["arguments"])))?;
        }
    }
    Ok(())
}

fn write_workers(page: &mut String, workers: &[Value]) -> std::fmt::Result {
    const COLUMNS: [(&str, &str); 8] = [
        ("id", "id"),
        ("state", "state"),
        ("in flight", "in_flight"),
        ("running", "running"),
        ("waiting", "waiting"),
        ("cached", "cached_tokens"),
        ("KV used", "kv_used_tokens"),
        ("KV", "kv_capacity_tokens"),
    ];
    let mut rows: Vec<Vec<String>> = vec![COLUMNS.iter().map(|(title, _)| (*title).to_owned()).collect()];
    for worker in workers {
        let mut row: Vec<String> = COLUMNS.iter().map(|(_, name)| plain(&worker[*name])).collect();
        let flags = ["bound", "at_limit", "excluded"].into_iter().filter(|flag| worker[*flag] == Value::Bool(true));
        row.push(flags.collect::<Vec<_>>().join(" "));
        rows.push(row);
    }
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(String::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..=COLUMNS.len()).map(width).collect();
    writeln!(page, "  workers:")?;
    for row in &rows {
        let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        writeln!(page, "    {}", cells.join("  ").trim_end())?;
    }
    Ok(())
}

/// The members of an object that are known, on one line.
fn members(value: &Value) -> String {
    let Value::Object(map) = value else { return plain(value) };
    let known = map.iter().filter(|(_, value)| !value.is_null());
    let known: Vec<String> = known.map(|(name, value)| format!("{name} {}", short(&plain(value)))).collect();
    if known.is_empty() { "as it is".to_owned() } else { known.join(", ") }
}

/// Text without its quotes.
pub(super) fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(list) if list.iter().all(Value::is_string) => {
            let texts: Vec<&str> = list.iter().filter_map(Value::as_str).collect();
            if texts.is_empty() { "none".to_owned() } else { texts.join(", ") }
        }
        Value::Object(map) => match map.get("bytes") {
            Some(bytes) if map.len() == 1 => format!("{bytes} bytes"),
            _ => value.to_string(),
        },
        value => value.to_string(),
    }
}

pub(super) fn short(text: &str) -> String {
    let line = text.replace('\n', "\\n");
    match line.char_indices().nth(MAX_VALUE) {
        Some((end, _)) => format!("{}…", line.get(..end).unwrap_or_default()),
        None => line,
    }
}
