//! `docs/policy-reference.md`, written from the table.

use super::{DECISIONS, EVENTS, FACTS, FUNCTIONS, WORKER_MEMBERS};
use crate::policy::events::EVENT_FUNCTION;
use crate::workbench::filter::exchange_file::ExchangeFile;
use crate::workbench::fleet_file::FleetFile;
use serde_json::Value;
use std::fmt::Write;
use turnstile_fleet::decision::WriteError;
use turnstile_fleet::facts::{TABLE_HEADER_BYTES, TABLE_RECORD_BYTES, TABLE_VERSION};

const INTRODUCTION: &str = include_str!("introduction.md");
const DECIDING: &str = include_str!("deciding.md");
const CALLING: &str = include_str!("calling.md");
const LISTENING: &str = include_str!("listening.md");
const TRYING: &str = include_str!("trying.md");
const EXCHANGING: &str = include_str!("exchanging.md");
const QUESTIONS: &str = include_str!("questions.md");

/// The page.
pub fn page() -> String {
    let mut page = INTRODUCTION.to_owned();
    // Writing to a `String` cannot fail.
    let _ = write_page(&mut page);
    page
}

fn write_page(page: &mut String) -> std::fmt::Result {
    writeln!(page, "\n## Facts\n\nAll under `turnstile.`.\n")?;
    writeln!(page, "| name | type | unit | readable | |\n| --- | --- | --- | --- | --- |")?;
    for fact in FACTS {
        writeln!(page, "| `{}` | {} | {} | {} | {} |", fact.name, fact.ty, fact.unit, fact.when.text(), fact.meaning)?;
    }
    writeln!(page, "\n### Workers\n")?;
    writeln!(page, "| JSON member | table: offset, type | unit | |\n| --- | --- | --- | --- |")?;
    for member in WORKER_MEMBERS {
        let place = member.place.map_or_else(|| "–".to_owned(), |(at, ty)| format!("{at}, {ty}"));
        writeln!(page, "| `{}` | {place} | {} | {} |", member.name, member.unit, member.meaning)?;
    }
    writeln!(
        page,
        "\nThe table is little endian. Its header has {TABLE_HEADER_BYTES} bytes: u32 version ({TABLE_VERSION}), u32 record \
         size ({TABLE_RECORD_BYTES}), u32 number of records, u32 zero. **Step by the record size of the header**: records may \
         grow at their end without a new version."
    )?;
    writeln!(page, "\n## Decisions\n")?;
    writeln!(page, "| name | value | writable | |\n| --- | --- | --- | --- |")?;
    for decision in DECISIONS {
        writeln!(
            page,
            "| `{}` | {} | {} | {} |",
            decision.name,
            decision.value,
            decision.when.text(),
            decision.meaning
        )?;
    }
    page.push_str(DECIDING);
    writeln!(page, "| cause | |\n| --- | --- |")?;
    for cause in WriteError::ALL {
        writeln!(page, "| `{}` | {cause} |", cause.label())?;
    }
    writeln!(page, "\n## Functions\n\n| name | argument | result |\n| --- | --- | --- |")?;
    for function in FUNCTIONS {
        writeln!(page, "| `{}` | {} | {} |", function.name, function.argument, function.result)?;
    }
    page.push_str(CALLING);
    write_events(page)?;
    page.push_str(TRYING);
    let schema = schemars::schema_for!(FleetFile).to_value();
    write_members(page, "The file", &schema, &schema)?;
    for (title, name) in
        [("A worker in `workers`", "WorkerEntry"), ("`session`", "SessionEntry"), ("`end`", "EndEntry")]
    {
        write_members(page, title, &schema["$defs"][name], &schema)?;
    }
    page.push_str(EXCHANGING);
    let schema = schemars::schema_for!(ExchangeFile).to_value();
    write_members(page, "The exchange", &schema, &schema)?;
    let title = "`response`, and each answer in `calls`";
    write_members(page, title, &schema["$defs"]["ResponseEntry"], &schema)?;
    page.push_str(QUESTIONS);
    Ok(())
}

/// What plugins may be told of an answer.
fn write_events(page: &mut String) -> std::fmt::Result {
    writeln!(
        page,
        "\n## Events\n\nA plugin whose option `events` names them is told what happens in an answer: by \
         `proxy_on_foreign_function(context, {EVENT_FUNCTION}, size)` on the stream's context, with the event as JSON of `size` \
         bytes in buffer 8. Each has the members `event`, its name, and `at_ms`, whole milliseconds from the arrival of the \
         request to when it was read (for `usage` and `end`: told).\n"
    )?;
    writeln!(page, "| event | more members | |\n| --- | --- | --- |")?;
    for event in EVENTS {
        let members: Vec<String> = event
            .members
            .iter()
            .map(|(name, meaning)| match name.strip_suffix('?') {
                Some(name) => format!("`{name}` (if known): {meaning}"),
                None => format!("`{name}`: {meaning}"),
            })
            .collect();
        writeln!(page, "| `{}` | {} | {} |", event.kind.as_str(), members.join("; "), event.when)?;
    }
    page.push_str(LISTENING);
    Ok(())
}

/// The members of an object in a JSON schema.
fn write_members(page: &mut String, title: &str, object: &Value, schema: &Value) -> std::fmt::Result {
    writeln!(page, "\n{title}:\n\n| member | value | default | |\n| --- | --- | --- | --- |")?;
    let required = object["required"].as_array().map(Vec::as_slice).unwrap_or_default();
    for (name, member) in object["properties"].as_object().into_iter().flatten() {
        let default = match &member["default"] {
            _ if required.iter().any(|one| one == name) => "must be given".to_owned(),
            Value::Null => "–".to_owned(),
            Value::Array(list) if list.is_empty() => "none".to_owned(),
            Value::Object(map) if map.is_empty() => "none".to_owned(),
            Value::String(word) => format!("`{word}`"),
            value => format!("`{value}`"),
        };
        let meaning = member["description"].as_str().unwrap_or_default().replace('\n', " ");
        writeln!(page, "| `{name}` | {} | {default} | {meaning} |", kind(member, schema))?;
    }
    Ok(())
}

/// What can stand for a member.
fn kind(member: &Value, schema: &Value) -> String {
    let referred = |value: &Value| {
        let name = value["$ref"].as_str().and_then(|path| path.rsplit('/').next());
        name.map(|name| schema["$defs"][name].clone())
    };
    if let Some(definition) = referred(member) {
        return kind(&definition, schema);
    }
    if let Some(words) = member["oneOf"].as_array() {
        let words = words.iter().filter_map(|word| word["const"].as_str());
        return words.map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ");
    }
    if let Some(either) = member["anyOf"].as_array() {
        return either.iter().find(|one| one["type"] != "null").map_or_else(String::new, |one| kind(one, schema));
    }
    let ty = match &member["type"] {
        Value::Array(types) => types.iter().find(|ty| **ty != "null").and_then(Value::as_str).unwrap_or_default(),
        ty => ty.as_str().unwrap_or_default(),
    };
    match ty {
        "string" => "text".to_owned(),
        "object" if member["additionalProperties"].is_object() => match kind(&member["additionalProperties"], schema) {
            text if text == "text" => "object of texts".to_owned(),
            other => format!("object of {}", other.replacen("list", "lists", 1)),
        },
        "object" => "object, see below".to_owned(),
        "array" => match kind(&member["items"], schema).as_str() {
            "object, see below" => "list of objects, see below".to_owned(),
            items => format!("list of {items}"),
        },
        "" => "JSON".to_owned(),
        other => other.to_owned(),
    }
}
