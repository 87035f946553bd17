//! The JSON schema of the file, made from the types, and ways to read it.

use std::sync::LazyLock;

use schemars::generate::SchemaSettings;
use serde_json::{Map, Value};

use crate::Config;

static SCHEMA: LazyLock<Value> = LazyLock::new(make);

/// The JSON schema of the configuration file, for editors and other tools.
///
/// Beyond the standard keywords, `x-restart` marks keys whose change takes effect only after a restart.
pub fn schema() -> &'static Value {
    &SCHEMA
}

fn make() -> Value {
    let mut schema = SchemaSettings::draft2020_12().into_generator().into_root_schema_for::<Config>().to_value();
    tidy(&mut schema);
    if let Some(root) = schema.as_object_mut() {
        root.insert("title".into(), "Turnstile configuration".into());
    }
    schema
}

/// Removes what speaks of JSON or Rust only: TOML has no null, and a range says more than the name of an integer type.
fn tidy(schema: &mut Value) {
    match schema {
        Value::Object(members) => {
            drop_null_type(members);
            if let Some(default) = members.get_mut("default") {
                drop_nulls(default);
            }
            if members.get("default").is_some_and(Value::is_null) {
                members.shift_remove("default");
            }
            let rust_format = |format: &str| {
                format == "double" || format.trim_start_matches('u').trim_end_matches(char::is_numeric) == "int"
            };
            if members.get("format").and_then(Value::as_str).is_some_and(rust_format) {
                members.shift_remove("format");
            }
            for (name, member) in members.iter_mut() {
                if name != "default" {
                    tidy(member);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(tidy),
        _ => {}
    }
}

fn drop_null_type(members: &mut Map<String, Value>) {
    if let Some(Value::Array(types)) = members.get_mut("type") {
        types.retain(|name| name != "null");
        if let [only] = types.as_slice() {
            let only = only.clone();
            members.insert("type".into(), only);
        }
    }
    if let Some(Value::Array(branches)) = members.get_mut("anyOf") {
        branches.retain(|branch| branch.get("type").is_none_or(|name| name != "null"));
        if let [Value::Object(only)] = branches.as_slice() {
            let only = only.clone();
            members.shift_remove("anyOf");
            for (name, member) in only {
                members.entry(name).or_insert(member);
            }
        }
    }
}

fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(members) => {
            members.retain(|_, member| !member.is_null());
            members.values_mut().for_each(drop_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

/// The schema behind `$ref`, or the schema itself.
pub(crate) fn resolve(schema: &'static Value) -> &'static Value {
    let name = schema.get("$ref").and_then(Value::as_str).and_then(|text| text.strip_prefix("#/$defs/"));
    match name {
        Some(name) => self::schema().get("$defs").and_then(|defs| defs.get(name)).unwrap_or(schema),
        None => schema,
    }
}

/// The schemas of which a value must match one: the branches of `anyOf`, or the schema itself.
pub(crate) fn branches(schema: &'static Value) -> Vec<&'static Value> {
    let schema = resolve(schema);
    match schema.get("anyOf").and_then(Value::as_array) {
        Some(branches) => branches.iter().flat_map(branches_of).collect(),
        None => vec![schema],
    }
}

fn branches_of(schema: &'static Value) -> Vec<&'static Value> {
    branches(schema)
}

/// The only values that are allowed, where the schema lists them.
pub(crate) fn choices(schema: &'static Value) -> Option<Vec<&'static Value>> {
    let schema = resolve(schema);
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        return Some(values.iter().collect());
    }
    // Variants with a comment of their own are a `oneOf` of constants, next to an `enum` of those without.
    let variants = schema.get("oneOf").and_then(Value::as_array)?;
    let values = variants.iter().flat_map(|variant| match (variant.get("const"), variant.get("enum")) {
        (Some(value), _) => vec![value],
        (None, Some(Value::Array(values))) => values.iter().collect(),
        _ => Vec::new(),
    });
    Some(values.collect())
}

/// The JSON types that a schema allows; empty when it allows all.
pub(crate) fn types(schema: &'static Value) -> Vec<&'static str> {
    let schema = resolve(schema);
    match schema.get("type") {
        Some(Value::String(name)) => vec![name],
        Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
        _ => match choices(schema) {
            Some(_) => vec!["string"],
            None => Vec::new(),
        },
    }
}

/// The keys of a table and their schemas, in the order in which they are documented.
pub(crate) fn properties(schema: &'static Value) -> impl Iterator<Item = (&'static str, &'static Value)> {
    resolve(schema)
        .get("properties")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
        .map(|(name, schema)| (name.as_str(), schema))
}

/// The schema of the table that a key holds, alone or in a list; none when it holds something else.
pub(crate) fn table(schema: &'static Value) -> Option<&'static Value> {
    branches(schema).into_iter().find_map(|branch| match branch.get("items") {
        Some(items) => table(items),
        None => branch.get("properties").map(|_| branch),
    })
}

/// Whether a change of this key takes effect only after a restart.
pub(crate) fn needs_restart(schema: &Value) -> bool {
    schema.get("x-restart") == Some(&Value::Bool(true))
}

#[cfg(test)]
#[path = "schema_tests.rs"]
mod tests;
