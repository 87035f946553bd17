//! A value that must not be shown: an API key, a token.

use std::{
    borrow::Cow,
    fmt,
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize, Serializer, ser::SerializeMap};

/// A secret, or the place to read it from. In TOML `"text"`, `{ env = "NAME" }` or `{ file = "path" }`.
///
/// `Debug` and `Serialize` show the place, never the value. Comparing two compares the places (or the literal values):
/// a file whose content has changed is still the same secret until it is resolved again.
#[derive(Clone, PartialEq, Eq, Deserialize)]
#[serde(from = "Form")]
pub struct Secret(Source);

/// Why a secret could not be read. Never holds the value.
#[derive(Debug, thiserror::Error)]
pub enum SecretError {
    /// The environment variable is not set.
    #[error("the environment variable {0} is not set")]
    EnvNotSet(String),
    /// The environment variable does not hold UTF-8.
    #[error("the environment variable {0} is not UTF-8")]
    EnvNotText(String),
    /// The file cannot be read, or does not hold UTF-8.
    #[error("cannot read {path}: {error}")]
    File {
        /// The file named in the configuration.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The file is larger than any key.
    #[error("{0} is larger than {MAX_FILE_BYTES} bytes")]
    FileTooLarge(PathBuf),
    /// The value is empty, or holds a control character and so cannot travel in a header.
    #[error("the secret is empty or holds control characters")]
    Unusable,
}

#[derive(Clone, PartialEq, Eq)]
enum Source {
    Literal(String),
    Env(String),
    File(PathBuf),
}

/// The forms that a secret has in a file.
#[derive(Deserialize)]
#[serde(untagged)]
enum Form {
    Literal(String),
    Env { env: String },
    File { file: PathBuf },
}

/// Keys and tokens are short; a larger file is a mistake, and must not be read into memory.
const MAX_FILE_BYTES: u64 = 64 * 1024;

/// What stands for a literal value wherever a secret is shown.
const HIDDEN: &str = "***";

// === impl Secret ===

impl Secret {
    /// A secret given as it is.
    pub fn literal(value: impl Into<String>) -> Self {
        Self(Source::Literal(value.into()))
    }

    /// A secret in an environment variable.
    pub fn env(name: impl Into<String>) -> Self {
        Self(Source::Env(name.into()))
    }

    /// A secret in a file; white space at its end is not part of it.
    pub fn file(path: impl Into<PathBuf>) -> Self {
        Self(Source::File(path.into()))
    }

    /// Reads the value now.
    ///
    /// # Errors
    /// When the variable or file cannot be read, or the value is empty or holds control characters.
    pub fn resolve(&self) -> Result<String, SecretError> {
        let value = match &self.0 {
            Source::Literal(value) => value.clone(),
            Source::Env(name) => read_env(name)?,
            Source::File(path) => read_file(path)?,
        };
        if value.is_empty() || value.chars().any(char::is_control) {
            return Err(SecretError::Unusable);
        }
        Ok(value)
    }

    pub(crate) fn resolve_path(&mut self, base_dir: &Path) {
        if let Source::File(path) = &mut self.0 {
            *path = base_dir.join(&*path);
        }
    }
}

fn read_env(name: &str) -> Result<String, SecretError> {
    // `std::env::var_os` panics on none of these, but they can name no variable.
    if name.is_empty() || name.contains(['=', '\0']) {
        return Err(SecretError::EnvNotSet(name.to_owned()));
    }
    let value = std::env::var_os(name).ok_or_else(|| SecretError::EnvNotSet(name.to_owned()))?;
    value.into_string().map_err(|_| SecretError::EnvNotText(name.to_owned()))
}

fn read_file(path: &Path) -> Result<String, SecretError> {
    let wrap = |error| SecretError::File { path: path.to_owned(), error };
    let mut value = String::new();
    let read = File::open(path).map_err(wrap)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut value).map_err(wrap)?;
    if read as u64 > MAX_FILE_BYTES {
        return Err(SecretError::FileTooLarge(path.to_owned()));
    }
    value.truncate(value.trim_end().len());
    Ok(value)
}

impl From<Form> for Secret {
    fn from(form: Form) -> Self {
        Self(match form {
            Form::Literal(value) => Source::Literal(value),
            Form::Env { env } => Source::Env(env),
            Form::File { file } => Source::File(file),
        })
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Source::Literal(_) => f.write_str(HIDDEN),
            Source::Env(name) => write!(f, "{{ env = {name:?} }}"),
            Source::File(path) => write!(f, "{{ file = {path:?} }}"),
        }
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (key, place) = match &self.0 {
            Source::Literal(_) => return serializer.serialize_str(HIDDEN),
            Source::Env(name) => ("env", Cow::Borrowed(name.as_str())),
            Source::File(path) => ("file", path.to_string_lossy()),
        };
        let mut map = serializer.serialize_map(Some(1))?;
        map.serialize_entry(key, &place)?;
        map.end()
    }
}

impl JsonSchema for Secret {
    fn schema_name() -> Cow<'static, str> {
        "Secret".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "A secret, or the place to read it from: `\"text\"`, `{ env = \"NAME\" }` or `{ file = \"path\" }`. A \
                relative path starts at the configuration file; white space at the end of a file is dropped.",
            "anyOf": [
                { "type": "string", "minLength": 1 },
                {
                    "type": "object",
                    "properties": {
                        "env": { "description": "Name of an environment variable.", "type": "string", "minLength": 1 },
                        "file": { "description": "Path of a file.", "type": "string", "minLength": 1 },
                    },
                    "additionalProperties": false,
                    "minProperties": 1,
                    "maxProperties": 1,
                },
            ],
        })
    }
}

#[cfg(test)]
#[path = "secret_tests.rs"]
mod tests;
