//! Checks the tree of a file against the schema, and drops what does not conform, so that the rest can still be checked.

use std::collections::HashSet;

use serde_json::Value;

use crate::{
    ByteSize,
    format::{self, Misfit},
    node::{Data, Entry, Node, join},
    problem::Problem,
    schema,
};

/// Returns what of the node conforms; adds a problem for everything that does not.
pub(crate) fn conform(node: Node, problems: &mut Vec<Problem>) -> Option<Node> {
    value(schema::schema(), node, problems)
}

fn value(schema: &'static Value, node: Node, problems: &mut Vec<Problem>) -> Option<Node> {
    let branches = schema::branches(schema);
    let Some(branch) = branches.iter().find(|branch| has_type(branch, &node.data)) else {
        let message = format!("expected {}, found {}", expected(&branches), node.kind());
        problems.push(Problem::new(node.place, node.key, message));
        return None;
    };
    // A property's own limits stand beside its `$ref`, those of its type behind it.
    if let Some(misfit) = limits(schema, &node).or_else(|| limits(branch, &node)) {
        problems.push(Problem::new(node.place, node.key, misfit.message).with_suggestion(misfit.suggestion));
        return None;
    }
    let Node { place, key, data } = node;
    let data = match data {
        Data::Table(entries) => {
            let names: HashSet<String> = entries.iter().map(|entry| entry.name.clone()).collect();
            let data = Data::Table(table(branch, entries, &key, problems));
            return complete(branch, Node { place, key, data }, &names, problems);
        }
        Data::Array(items) => match branch.get("items") {
            Some(schema) => Data::Array(items.into_iter().filter_map(|item| value(schema, item, problems)).collect()),
            None => Data::Array(items),
        },
        leaf => leaf,
    };
    Some(Node { place, key, data })
}

fn table(schema: &'static Value, entries: Vec<Entry>, key: &str, problems: &mut Vec<Problem>) -> Vec<Entry> {
    let mut kept = Vec::with_capacity(entries.len());
    for Entry { name, name_place, node } in entries {
        let known = schema::properties(schema).find(|(known, _)| *known == name).map(|(_, schema)| schema);
        let other = schema.get("additionalProperties");
        let node = match (known, other) {
            (Some(schema), _) => value(schema, node, problems),
            (None, Some(Value::Bool(false))) => {
                let problem = Problem::new(name_place, join(key, &name), "unknown key");
                problems.push(problem.with_suggestion(meant(schema, &name)));
                None
            }
            (None, Some(schema @ Value::Object(_))) => value(schema, node, problems),
            (None, _) => Some(node),
        };
        kept.extend(node.map(|node| Entry { name, name_place, node }));
    }
    kept
}

/// Drops a table that lacks what it needs. What stood in the file (`names`) and was dropped has its own problem.
fn complete(schema: &'static Value, table: Node, names: &HashSet<String>, problems: &mut Vec<Problem>) -> Option<Node> {
    let mut complete = limits(schema, &table).is_none();
    for name in schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str) {
        complete &= table.get(name).is_some();
        if !names.contains(name) {
            problems.push(Problem::new(table.place, join(&table.key, name), "missing; it has no default"));
        }
    }
    complete.then_some(table)
}

/// The place of a key of this very name elsewhere, or a key of this table that is spelled alike.
fn meant(schema: &'static Value, name: &str) -> Option<String> {
    let has_it = |section| {
        let table = schema::table(section);
        table.is_some_and(|table| schema::properties(table).any(|(known, _)| known == name))
    };
    let mut homes = schema::properties(schema::schema()).filter(|(_, section)| has_it(section));
    match (homes.next(), homes.next()) {
        (Some((section, _)), None) => Some(format!("{section}.{name}")),
        _ => format::closest(name, schema::properties(schema).map(|(known, _)| known)),
    }
}

fn has_type(schema: &'static Value, data: &Data) -> bool {
    let types = schema::types(schema);
    let fits = |name| {
        matches!(
            (name, data),
            ("object", Data::Table(_))
                | ("array", Data::Array(_))
                | ("string", Data::String(_))
                | ("integer", Data::Integer(_))
                | ("number", Data::Float(_) | Data::Integer(_))
                | ("boolean", Data::Boolean(_))
        )
    };
    types.is_empty() || types.into_iter().any(fits)
}

fn expected(branches: &[&'static Value]) -> String {
    let names = branches.iter().flat_map(|branch| schema::types(branch)).map(|name| match name {
        "object" => "a table",
        "array" => "a list",
        "integer" => "an integer",
        "number" => "a number",
        "boolean" => "true or false",
        _ => "a string",
    });
    names.collect::<Vec<_>>().join(" or ")
}

/// What is wrong with the value itself, not with what is in it.
fn limits(schema: &'static Value, node: &Node) -> Option<Misfit> {
    match &node.data {
        Data::String(text) => text_limits(schema, text),
        Data::Integer(number) => match schema::choices(schema) {
            Some(choices) if !choices.iter().any(|choice| choice.as_i64() == Some(*number)) => {
                Some(Misfit::new(format!("expected {}", one_of(choices.iter().map(ToString::to_string)))))
            }
            _ => range(schema, *number as f64),
        },
        Data::Float(number) => range(schema, *number),
        Data::Array(items) => length(schema, "Items", items.len(), "elements"),
        Data::Table(entries) => length(schema, "Properties", entries.len(), "keys"),
        Data::Boolean(_) | Data::Datetime(_) => None,
    }
}

fn text_limits(schema: &'static Value, text: &str) -> Option<Misfit> {
    if let Some(choices) = schema::choices(schema) {
        let choices: Vec<_> = choices.into_iter().filter_map(Value::as_str).collect();
        if choices.contains(&text) {
            return None;
        }
        let message = format!("expected {}", one_of(choices.iter().map(|choice| format!("\"{choice}\""))));
        return Some(Misfit { message, suggestion: format::closest(text, choices) });
    }
    let format = schema.get("format").and_then(Value::as_str).unwrap_or_default();
    if let Err(misfit) = format::check(format, text) {
        return Some(misfit);
    }
    match text.parse::<ByteSize>() {
        Ok(size) if format == "byte-size" => range(schema, size.bytes() as f64),
        _ => length(schema, "Length", text.chars().count(), "characters"),
    }
}

/// What is wrong with a number that is out of the schema's range. All limits are far below 2^53, so that `f64` is exact.
fn range(schema: &Value, number: f64) -> Option<Misfit> {
    let limit = |name| schema.get(name).and_then(Value::as_f64);
    let (least, most) = (limit("minimum"), limit("maximum"));
    if least.is_none_or(|least| number >= least) && most.is_none_or(|most| number <= most) {
        return None;
    }
    Some(Misfit::new(format!("must be {}", range_text(schema))))
}

/// The range of a schema in words, such as `from 1 to 64`; empty when it has none.
pub(crate) fn range_text(schema: &Value) -> String {
    let bytes = schema.get("format").is_some_and(|format| format == "byte-size");
    let limit = |name: &str| {
        let limit = schema.get(name)?;
        Some(match limit.as_u64() {
            Some(size) if bytes => ByteSize(size).to_string(),
            _ => limit.to_string(),
        })
    };
    match (limit("minimum"), limit("maximum")) {
        (Some(least), Some(most)) => format!("from {least} to {most}"),
        (Some(least), None) => format!("{least} or more"),
        (None, Some(most)) => format!("{most} or less"),
        (None, None) => String::new(),
    }
}

fn length(schema: &Value, what: &str, length: usize, unit: &str) -> Option<Misfit> {
    let limit = |prefix: &str| schema.get(format!("{prefix}{what}")).and_then(Value::as_u64);
    let (least, most) = (limit("min"), limit("max"));
    let length = length as u64;
    let message = match (least, most) {
        (Some(least), Some(most)) if least == most && length != least => {
            format!("expected exactly {least} of its {unit}, found {length}")
        }
        (Some(1), _) if length == 0 => "must not be empty".to_owned(),
        (Some(least), _) if length < least => format!("must have at least {least} {unit}"),
        (_, Some(most)) if length > most => format!("must have at most {most} {unit}"),
        _ => return None,
    };
    Some(Misfit::new(message))
}

fn one_of(choices: impl Iterator<Item = String>) -> String {
    choices.collect::<Vec<_>>().join(" or ")
}
