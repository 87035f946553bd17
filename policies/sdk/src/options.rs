//! A plugin's configuration table, read strictly and with errors that name the option.

use std::fmt;

use serde::Deserialize;
use serde::de::DeserializeOwned;

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
    let text = if configuration.trim_ascii().is_empty() { b"{}" } else { configuration };
    let mut json = serde_json::Deserializer::from_slice(text);
    let options = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        OptionError {
            // serde reports "the value as a whole" as a lone dot.
            option: if path == "." { String::new() } else { path },
            message: without_position(&error.into_inner()),
        }
    })?;
    json.end().map_err(|error| OptionError { option: String::new(), message: without_position(&error) })?;
    Ok(options)
}

/// The error without " at line 1 column 20": the JSON was made by the gateway, so positions in it help nobody.
fn without_position(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(end) => text.get(..end).unwrap_or_default().to_owned(),
        None => text,
    }
}

#[cfg(test)]
#[path = "options_tests.rs"]
mod tests;
