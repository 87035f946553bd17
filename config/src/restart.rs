//! Which changes a reload cannot make.

use serde::Serialize;
use serde_json::Value;

use crate::{Config, schema};

/// The keys that differ between two configurations and take effect only after a restart, in the order of the reference.
/// Everything else takes effect on reload.
pub fn restart_needed(old: &Config, new: &Config) -> Vec<String> {
    let mut keys = Vec::new();
    compare(schema::schema(), &json(old), &json(new), "", &mut keys);
    keys
}

fn json(config: &impl Serialize) -> Value {
    // No value in the types fails to serialize; were one to, the two sides would be equal and nothing reported.
    serde_json::to_value(config).unwrap_or_default()
}

fn compare(schema: &'static Value, old: &Value, new: &Value, table: &str, keys: &mut Vec<String>) {
    for (name, property) in schema::properties(schema) {
        let (old, new) = (old.get(name), new.get(name));
        if old == new {
            continue;
        }
        let key = crate::node::join(table, name);
        if schema::needs_restart(property) {
            keys.push(key);
        } else if let (Some(old), Some(new)) = (old, new) {
            compare(property, old, new, &key, keys);
        }
    }
}
