//! Header maps and bodies as a report shows them, and what became of them.

use http::HeaderMap;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use turnstile_plugins::HeaderPairs;

/// Longest value that is shown, bytes.
const MAX_SHOWN: usize = 64 << 10;

/// A header map as it was at one time: all values by name, pseudo-headers included.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen(BTreeMap<String, Vec<Vec<u8>>>);

/// Text as it is; anything else by its length.
pub fn shown(value: &[u8]) -> Value {
    match std::str::from_utf8(value) {
        Ok(text) if text.len() <= MAX_SHOWN => Value::from(text),
        _ => json!({"bytes": value.len()}),
    }
}

/// The fields of a message.
pub fn fields(map: &HeaderMap) -> Value {
    let mut seen = Seen::default();
    map.iter().for_each(|(name, value)| seen.add(name.as_str().as_bytes(), value.as_bytes()));
    seen.json()
}

impl Seen {
    /// What a map has now.
    pub fn of(map: &dyn HeaderPairs) -> Self {
        let mut seen = Self::default();
        map.for_each(&mut |name, value| seen.add(name, value));
        seen
    }

    fn add(&mut self, name: &[u8], value: &[u8]) {
        self.0.entry(String::from_utf8_lossy(name).into_owned()).or_default().push(value.to_vec());
    }

    /// An object of values; several values of a name are a list.
    pub fn json(&self) -> Value {
        Value::Object(self.0.iter().map(|(name, values)| (name.clone(), one_or_more(values))).collect())
    }

    /// What is different in `later`: added, removed and replaced.
    pub fn until(&self, later: &Self) -> Value {
        let (mut added, mut removed, mut replaced) = (Map::new(), Map::new(), Map::new());
        for (name, values) in &later.0 {
            match self.0.get(name) {
                None => drop(added.insert(name.clone(), one_or_more(values))),
                Some(before) if before != values => {
                    replaced.insert(name.clone(), json!({"from": one_or_more(before), "to": one_or_more(values)}));
                }
                Some(_) => {}
            }
        }
        for (name, values) in self.0.iter().filter(|(name, _)| !later.0.contains_key(*name)) {
            removed.insert(name.clone(), one_or_more(values));
        }
        json!({"added": added, "removed": removed, "replaced": replaced})
    }
}

fn one_or_more(values: &[Vec<u8>]) -> Value {
    match values {
        [one] => shown(one),
        more => more.iter().map(|value| shown(value)).collect(),
    }
}
