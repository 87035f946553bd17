//! Logs, and what the gateway keeps on disk.

use std::{borrow::Cow, convert::Infallible, path::PathBuf, str::FromStr};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::ByteSize;

/// Logs, and what a response tells about its decision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Logging {
    /// Least severe level that is written.
    #[schemars(extend("x-restart" = true))]
    pub level: Level,
    /// Form of the log lines.
    #[schemars(extend("x-restart" = true))]
    pub format: LogFormat,
    /// Where the access and decision log goes, one JSON object a line: `stdout`, `stderr`, `off`, or the path of a file,
    /// relative to this file.
    #[schemars(extend("x-restart" = true))]
    pub access: AccessLog,
    /// File, relative to this one, in which turns are recorded for `turnstile replay`: hashes, sizes and times, nothing of
    /// prompts, answers, credentials or headers. Absent: off.
    #[schemars(length(min = 1), extend("x-restart" = true))]
    pub record: Option<PathBuf>,
    /// Size at which a new file is begun; the full one becomes `FILE.1`, the one before it `FILE.2`.
    #[schemars(extend("minimum" = 65_536, "maximum" = 1_099_511_627_776_u64, "x-restart" = true))]
    pub record_bytes: ByteSize,
    /// Files of recorded turns that are kept, the present one included; the oldest go.
    #[schemars(range(min = 1, max = 1000), extend("x-restart" = true))]
    pub record_files: u32,
    /// Answer a request that has `x-turnstile-explain: 1` with headers that name worker, cached tokens, wait and reason.
    /// They tell clients about the fleet.
    pub explain_headers: bool,
    /// Keep the `x-request-id` that a client sends. Off: every request gets a new one.
    pub accept_request_id: bool,
}

/// Severity of a log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[schemars(inline)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Level {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

/// Form of the log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// One JSON object a line.
    Json,
    /// For people.
    Text,
}

/// Where the access and decision log goes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum AccessLog {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
    /// Nowhere.
    Off,
    /// Appended to a file.
    File(PathBuf),
}

/// What the gateway keeps on disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct State {
    /// Directory, relative to this file; compiled plugins go to `wasm` in it. Absent: `turnstile` in the user's cache
    /// directory.
    #[schemars(length(min = 1), extend("x-restart" = true))]
    pub dir: Option<PathBuf>,
    /// Seconds between two snapshots of sessions and prefix index in `dir`. With them a restarted gateway sends sessions back to
    /// their workers, and closes the engine sessions that a killed one left open. One gateway uses a directory at a time. 0: off.
    #[schemars(range(min = 0, max = 86_400), extend("x-restart" = true))]
    pub interval_s: u64,
    /// Largest snapshot. What was used longest ago is left out of a larger one.
    #[schemars(extend("minimum" = 65_536, "maximum" = 4_294_967_296_u64, "x-restart" = true))]
    pub snapshot_bytes: ByteSize,
}

// === impl State ===

impl Default for State {
    fn default() -> Self {
        Self { dir: None, interval_s: 0, snapshot_bytes: ByteSize::mib(256) }
    }
}

// === impl Logging ===

impl Default for Logging {
    fn default() -> Self {
        Self {
            level: Level::Info,
            format: LogFormat::Json,
            access: AccessLog::Stdout,
            record: None,
            record_bytes: ByteSize::mib(256),
            record_files: 4,
            explain_headers: false,
            accept_request_id: true,
        }
    }
}

// === impl Level ===

impl Level {
    /// The name in TOML and in filters of the log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }
}

// === impl AccessLog ===

impl FromStr for AccessLog {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "stdout" => Self::Stdout,
            "stderr" => Self::Stderr,
            "off" => Self::Off,
            path => Self::File(path.into()),
        })
    }
}

impl From<String> for AccessLog {
    fn from(text: String) -> Self {
        match text.parse() {
            Ok(log) => log,
            Err(never) => match never {},
        }
    }
}

impl From<AccessLog> for String {
    fn from(log: AccessLog) -> Self {
        match log {
            AccessLog::Stdout => "stdout".into(),
            AccessLog::Stderr => "stderr".into(),
            AccessLog::Off => "off".into(),
            AccessLog::File(path) => path.to_string_lossy().into_owned(),
        }
    }
}

impl JsonSchema for AccessLog {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "AccessLog".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "minLength": 1 })
    }
}
