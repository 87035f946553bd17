//! A plugin's configuration table, read strictly and with errors that name the option.

use std::fmt;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// For policies without options: any key is an error.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoOptions {}

/// Why a configuration was refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptionError {
    /// Path of the option within the plugin's table, such as `margin_ms` or `rules[2].labels`; empty for the whole table.
    pub option: String,
    /// What is wrong with it.
    pub message: String,
}

impl fmt::Display for OptionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.option.is_empty() {
            write!(f, "configuration: {}", self.message)
        } else {
            write!(f, "option `{}`: {}", self.option, self.message)
        }
    }
}

impl std::error::Error for OptionError {}

/// Reads options from the JSON the host passes at configure time. No text at all is the same as `{}`.
///
/// # Errors
/// Names the first option that is unknown or has a wrong value. For an unknown one the message lists those known.
pub fn parse_options<T: DeserializeOwned>(configuration: &[u8]) -> Result<T, OptionError> {
    let whole = |message: String| OptionError { option: String::new(), message };
    let text = if configuration.trim_ascii().is_empty() { b"{}" } else { configuration };
    // By way of a value: errors then carry no positions in a text that its author never saw, and the module needs one
    // JSON reader instead of one for each type.
    let table: Value = serde_json::from_slice(text).map_err(|error| whole(error.to_string()))?;
    serde_path_to_error::deserialize(table).map_err(|error| {
        let path = error.path().to_string();
        // The value as a whole is reported as a lone dot.
        OptionError { option: if path == "." { String::new() } else { path }, message: error.into_inner().to_string() }
    })
}

#[cfg(test)]
#[path = "options_tests.rs"]
mod tests;
