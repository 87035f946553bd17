//! What a plugin is configured with.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A configuration in one of the forms that it has in the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum PluginConfiguration {
    /// Handed over byte for byte.
    Text(String),
    /// Handed over as JSON.
    List(Vec<Value>),
    /// Handed over as JSON, or as nothing when it is empty.
    Table(Map<String, Value>),
}

// === impl PluginConfiguration ===

impl PluginConfiguration {
    /// The text that the plugin is handed.
    pub fn text(&self) -> Cow<'_, str> {
        match self {
            Self::Text(text) => Cow::Borrowed(text),
            Self::List(items) => Cow::Owned(Value::from(items.as_slice()).to_string()),
            Self::Table(members) if members.is_empty() => Cow::Borrowed(""),
            Self::Table(members) => Cow::Owned(Value::Object(members.clone()).to_string()),
        }
    }
}

impl From<Map<String, Value>> for PluginConfiguration {
    fn from(members: Map<String, Value>) -> Self {
        Self::Table(members)
    }
}

impl From<&str> for PluginConfiguration {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl JsonSchema for PluginConfiguration {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "PluginConfiguration".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": ["object", "array", "string"] })
    }
}
