//! What a module is, what it may do, and whether it starts.

use super::subject::{Subject, level_name, runtime};
use serde_json::{Value, json};
use std::fmt::Write;
use turnstile_plugins::{Callback, Dialect, Inspection, PluginServices};

/// The report about a module.
pub struct CheckReport {
    /// Everything, for programs.
    pub json: Value,
    /// Whether a gateway could use it with this configuration.
    pub good: bool,
}

/// Looks at a module and starts it once.
///
/// # Errors
/// The engine does not start.
pub fn check(subject: &Subject) -> Result<CheckReport, String> {
    // Without a cache: the time to compile is part of the answer.
    let runtime = runtime(None)?;
    let mut json = json!({
        "file": subject.path.display().to_string(),
        "size_bytes": subject.wasm.len(),
        "sha256": subject.digest(),
    });
    let inspection = match runtime.inspect(&subject.wasm) {
        Ok(inspection) => inspection,
        Err(reason) => {
            json["problems"] = json!([format!("does not compile: {reason}")]);
            return Ok(CheckReport { json, good: false });
        }
    };
    describe(&inspection, &mut json);
    let mut problems = inspection.problems(subject.stub_unknown_imports);
    if problems.is_empty() {
        match subject.start(&runtime) {
            Ok(started) => {
                started.plugin.tick(0);
                json["start"] = json!({
                    "memory_bytes": started.plugin.stats().memory_high_water,
                    "ms": started.took.as_secs_f64() * 1e3,
                    "metrics": started.services.shared().metrics.snapshot().len(),
                    "log": log(&started.services.take()),
                });
            }
            Err(reason) => problems.push(reason),
        }
    }
    let good = problems.is_empty();
    json["problems"] = json!(problems);
    Ok(CheckReport { json, good })
}

fn log(lines: &[super::subject::Line]) -> Vec<Value> {
    lines.iter().map(|(level, text)| json!({"level": level_name(*level), "message": text})).collect()
}

fn describe(inspection: &Inspection, json: &mut Value) {
    let callbacks = inspection.callbacks.as_deref().unwrap_or_default();
    let may: Vec<Value> = inspection
        .capabilities()
        .into_iter()
        .map(|capability| {
            let through = inspection.imports.iter().filter(|import| import.capability == Some(capability));
            json!({
                "capability": capability.name(),
                "words": capability.to_string(),
                "imports": through.map(|import| import.name.as_str()).collect::<Vec<_>>(),
            })
        })
        .collect();
    let imports = inspection.imports.iter().map(|import| {
        json!({
            "name": import.name,
            "type": import.ty,
            "capability": import.capability.map(|capability| capability.name()),
            "problem": import.problem,
        })
    });
    json["abi"] = inspection.abi.as_ref().map_or(Value::Null, |abi| abi.as_str().into());
    json["compile"] = json!({"ms": inspection.compile.as_secs_f64() * 1e3});
    json["memory_pages"] = json!({
        "initial": inspection.memory_pages.map(|(initial, _)| initial),
        "maximum": inspection.memory_pages.and_then(|(_, maximum)| maximum),
    });
    json["callbacks"] = callbacks.iter().map(|callback| callback.export()).collect();
    json["other_exports"] = inspection.other_exports().collect();
    json["may"] = may.into();
    json["imports"] = imports.collect();
    let mut warnings = Vec::new();
    if inspection.callbacks.is_ok() && !callbacks.contains(&Callback::RequestHeaders) {
        warnings.push("exports no proxy_on_request_headers: as a policy (phase admit or route) it is never asked");
    }
    if inspection.abi.as_ref().is_ok_and(|abi| abi.dialect() == Dialect::Higress) {
        warnings.push("is made for Higress: in a configuration it needs `dialect = \"higress\"`, and it runs in the phase filter only");
    }
    if inspection.imports.iter().any(|import| import.can_be_stubbed) {
        warnings.push(
            "imports functions that the gateway does not have: with `stub_unknown_imports = true` it starts, and they answer \
             UNIMPLEMENTED",
        );
    }
    json["warnings"] = json!(warnings);
}

// === impl CheckReport ===

impl CheckReport {
    /// The report for a terminal.
    pub fn text(&self) -> String {
        let mut page = String::new();
        // Writing to a `String` cannot fail.
        let _ = self.write(&mut page);
        page
    }

    fn write(&self, page: &mut String) -> std::fmt::Result {
        let json = &self.json;
        let text = |value: &Value| value.as_str().unwrap_or("none").to_owned();
        let list = |value: &Value| {
            let names = value.as_array().into_iter().flatten().filter_map(Value::as_str).collect::<Vec<_>>();
            if names.is_empty() { "none".to_owned() } else { names.join(" ") }
        };
        let ms = |value: &Value| format!("{:.1} ms", value.as_f64().unwrap_or(0.0));
        writeln!(page, "{}", text(&json["file"]))?;
        writeln!(page, "  size       {} bytes, sha256 {}", json["size_bytes"], text(&json["sha256"]))?;
        if !json["may"].is_null() {
            writeln!(page, "  ABI        {}", text(&json["abi"]))?;
            writeln!(page, "  compile    {}", ms(&json["compile"]["ms"]))?;
            let most = json["memory_pages"]["maximum"].as_u64().map(|most| format!(", {most} at most"));
            let initial = json["memory_pages"]["initial"].as_u64().unwrap_or(0);
            writeln!(page, "  memory     {initial} pages of 64 KiB at the start{}", most.unwrap_or_default())?;
            writeln!(page, "  callbacks  {}", list(&json["callbacks"]))?;
            writeln!(page, "  others     {}", list(&json["other_exports"]))?;
            writeln!(page, "  may")?;
            for one in json["may"].as_array().into_iter().flatten() {
                writeln!(page, "    {}: {}", text(&one["words"]), list(&one["imports"]))?;
            }
            if json["may"].as_array().is_none_or(Vec::is_empty) {
                writeln!(page, "    do nothing: it imports no function")?;
            }
        }
        if let Value::Object(start) = &json["start"] {
            let mib = start["memory_bytes"].as_f64().unwrap_or(0.0) / f64::from(1 << 20);
            writeln!(page, "  start      {}, {mib:.1} MiB of memory, configuration accepted", ms(&start["ms"]))?;
            for line in start["log"].as_array().into_iter().flatten() {
                writeln!(page, "  log        {}: {}", text(&line["level"]), text(&line["message"]))?;
            }
        }
        for warning in json["warnings"].as_array().into_iter().flatten() {
            writeln!(page, "  warning    {}", text(warning))?;
        }
        for problem in json["problems"].as_array().into_iter().flatten() {
            writeln!(page, "  PROBLEM    {}", text(problem))?;
        }
        Ok(())
    }
}
