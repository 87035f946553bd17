//! The reference page, written from the schema.

use std::fmt::Write;

use serde_json::Value;

use crate::{conform::range_text, schema};

/// What stands above the tables.
const INTRODUCTION: &str = "\
# Configuration

<!-- Generated from the types in config/src: UPDATE_DOCS=1 cargo nextest run -p turnstile-config -->

Turnstile reads one TOML file. Every key but the workers has a default, so this is enough:

```toml
[[pools]]
workers = [\"http://10.0.0.1:30000\", \"http://10.0.0.2:30000\"]
```

`turnstile check --config FILE` prints what will run, or every error with its line, column and key. Unknown keys are
errors. A running gateway reads the file again when it changes, on SIGHUP and on `POST /reload`; a file with errors
changes nothing. The last column says whether a changed key takes effect on that reload or after a restart.

Relative paths start at the directory of the file. Sizes are integers (bytes) or text with a unit: `\"64MiB\"`,
`\"512KiB\"`, `\"10MB\"`. Examples are in `config/examples`; `docs/config.schema.json` is the schema for editors.

## Secrets

Keys and tokens are given as text, or better as the place to read them from when the configuration is loaded:

```toml
api_key = \"text\"
api_key = { env = \"WORKER_API_KEY\" }
api_key = { file = \"secrets/worker-api-key\" }
```

White space at the end of a file is dropped. No log, answer or error shows the value.
";

/// The reference page of the configuration, in Markdown.
pub fn reference() -> String {
    let mut page = INTRODUCTION.to_owned();
    // Writing to a `String` cannot fail.
    let _ = write_sections(&mut page);
    page
}

fn write_sections(page: &mut String) -> std::fmt::Result {
    let root = schema::schema();
    let plain = schema::properties(root).filter(|(_, property)| schema::table(property).is_none());
    write!(page, "\n## Top level\n\nBefore the first table of the file.\n")?;
    write_table(page, plain, required(root), None)?;
    for (name, section) in schema::properties(root) {
        write_section(page, name, section, 2, schema::needs_restart(section))?;
    }
    Ok(())
}

/// A section for a key that holds a table or a list of them, and one for each such key in it.
fn write_section(
    page: &mut String,
    path: &str,
    section: &'static Value,
    level: usize,
    restart: bool,
) -> std::fmt::Result {
    // Secrets have their own section.
    let Some(table) = schema::table(section).filter(|_| !is_secret(section)) else { return Ok(()) };
    let list = schema::branches(section).iter().any(|branch| branch.get("items").is_some());
    let heading = if list { format!("[[{path}]]") } else { format!("[{path}]") };
    write!(page, "\n{} `{heading}`\n\n{}\n", "#".repeat(level), description(section))?;
    write_table(page, schema::properties(table), required(table), restart.then_some(true))?;
    for (name, property) in schema::properties(table) {
        let restart = restart || schema::needs_restart(property);
        write_section(page, &format!("{path}.{name}"), property, level + 1, restart)?;
    }
    Ok(())
}

fn write_table(
    page: &mut String,
    keys: impl Iterator<Item = (&'static str, &'static Value)>,
    required: Vec<&str>,
    restart: Option<bool>,
) -> std::fmt::Result {
    write!(page, "\n| key | type | default | range | meaning | change |\n| --- | --- | --- | --- | --- | --- |\n")?;
    for (name, property) in keys {
        let default = if required.contains(&name) { "required".to_owned() } else { default(name, property) };
        let change = if restart.unwrap_or_else(|| schema::needs_restart(property)) { "restart" } else { "reload" };
        writeln!(
            page,
            "| `{name}` | {} | {default} | {} | {} | {change} |",
            type_text(property),
            range(property),
            meaning(property)
        )?;
    }
    Ok(())
}

fn required(schema: &'static Value) -> Vec<&'static str> {
    schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect()
}

fn is_secret(schema: &Value) -> bool {
    schema.get("$ref").is_some_and(|name| name == "#/$defs/Secret")
}

fn description(schema: &'static Value) -> String {
    let own = schema.get("description").or_else(|| schema::resolve(schema).get("description"));
    own.and_then(Value::as_str).unwrap_or_default().to_owned()
}

/// The description, and what each choice means where the choices say so.
fn meaning(schema: &'static Value) -> String {
    let mut text = description(schema);
    let variants = schema::resolve(schema).get("oneOf").and_then(Value::as_array);
    for variant in variants.into_iter().flatten() {
        if let (Some(Value::String(value)), Some(Value::String(meaning))) =
            (variant.get("const"), variant.get("description"))
        {
            text = format!("{text} `{value}`: {meaning}");
        }
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

fn default(name: &str, schema: &'static Value) -> String {
    match schema.get("default") {
        None => "–".to_owned(),
        // The built-in plugins and the known clients' headers, named in the meaning, would fill the page.
        Some(Value::Array(items)) if items.len() > 1 => match name {
            "id_headers" => "the clients that are known".to_owned(),
            _ => "the built-in policies".to_owned(),
        },
        Some(Value::Array(items)) if items.is_empty() => "`[]`".to_owned(),
        Some(Value::Object(members)) if members.is_empty() => "`{}`".to_owned(),
        Some(Value::String(text)) if text.is_empty() => "–".to_owned(),
        Some(value) => format!("`{value}`"),
    }
}

fn range(schema: &'static Value) -> String {
    let own = range_text(schema);
    let text = if own.is_empty() { schema::branches(schema).into_iter().map(range_text).collect() } else { own };
    if text.is_empty() { "–".to_owned() } else { text }
}

fn type_text(schema: &'static Value) -> String {
    if is_secret(schema) {
        return "[secret](#secrets)".to_owned();
    }
    if let Some(choices) = schema::choices(schema) {
        return choices.iter().map(|choice| format!("`{choice}`")).collect::<Vec<_>>().join(", ");
    }
    let branches = schema::branches(schema);
    let mut names: Vec<String> = branches.into_iter().map(branch_type).collect();
    names.dedup();
    names.join(" or ")
}

fn branch_type(branch: &'static Value) -> String {
    match branch.get("format").and_then(Value::as_str) {
        Some("byte-size") => return "size".to_owned(),
        Some("socket-address") => return "address".to_owned(),
        Some("socket-address-or-off") => return "address or `\"off\"`".to_owned(),
        Some("worker-url" | "upstream-url") => return "URL".to_owned(),
        Some("network") => return "network".to_owned(),
        Some("header-name") => return "header name".to_owned(),
        Some("priority-or-none") => return "integer or `\"none\"`".to_owned(),
        _ => {}
    }
    match (schema::types(branch).as_slice(), branch.get("items"), branch.get("additionalProperties")) {
        (["array"], Some(items), _) => format!("list of {}", type_text(items)),
        (["object"], _, Some(values @ Value::Object(_))) => format!("table of {}", type_text(values)),
        (names, ..) => {
            let name = |name: &&'static str| match *name {
                "object" => "table",
                "array" => "list",
                other => other,
            };
            names.iter().map(name).collect::<Vec<_>>().join(" or ")
        }
    }
}
