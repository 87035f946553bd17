//! Where the modules of plugins come from.

use std::{borrow::Cow, fmt, path::PathBuf, str::FromStr};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use url::Url;

use crate::Phase;

/// Where a plugin's module comes from.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum PluginSource {
    /// Compiled into the gateway.
    BuiltIn(BuiltIn),
    /// A file.
    File(PathBuf),
    /// A file on a server.
    Url(ModuleUrl),
}

/// `http://…` or `https://…`, without credentials or fragment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ModuleUrl(Url);

/// A policy that comes with the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BuiltIn {
    /// Order in the queue from the hints of a request; phase `admit`.
    PriorityQueue,
    /// Session actions from the hints of a request; phase `route`.
    SessionBinding,
    /// The worker with the least cost; phase `route`.
    KvAffinity,
}

/// A `builtin:` that does not exist, or an empty path.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAPluginSource {
    /// No policy of this name comes with the gateway.
    #[error("no built-in policy is called `{0}`; there are priority-queue, session-binding and kv-affinity")]
    UnknownBuiltIn(String),
    /// Nothing is named.
    #[error("expected `builtin:NAME`, the path of a module, or its URL")]
    Empty,
    /// No URL.
    #[error("not a URL ({0}); expected one such as https://example.com/policy.wasm")]
    Url(#[from] url::ParseError),
    /// User and password.
    #[error("credentials do not belong in a URL: it is shown and logged")]
    Credentials,
    /// A fragment.
    #[error("a URL with a fragment names no file")]
    Fragment,
}

const BUILT_IN_PREFIX: &str = "builtin:";

// === impl BuiltIn ===

impl BuiltIn {
    /// All of them, in the order of the default chain.
    pub const ALL: [Self; 3] = [Self::PriorityQueue, Self::SessionBinding, Self::KvAffinity];

    /// The name after `builtin:`, and the plugin's name in the default chain.
    pub fn name(self) -> &'static str {
        match self {
            Self::PriorityQueue => "priority-queue",
            Self::SessionBinding => "session-binding",
            Self::KvAffinity => "kv-affinity",
        }
    }

    /// The only phase it is made for.
    pub fn phase(self) -> Phase {
        match self {
            Self::PriorityQueue => Phase::Admit,
            Self::SessionBinding | Self::KvAffinity => Phase::Route,
        }
    }
}

// === impl ModuleUrl ===

fn is_url(text: &str) -> bool {
    let starts = |scheme: &str| text.get(..scheme.len()).is_some_and(|head| head.eq_ignore_ascii_case(scheme));
    starts("http://") || starts("https://")
}

impl ModuleUrl {
    /// The URL.
    pub fn url(&self) -> &Url {
        &self.0
    }
}

impl FromStr for ModuleUrl {
    type Err = NotAPluginSource;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let url: Url = text.parse()?;
        if !url.username().is_empty() || url.password().is_some() {
            return Err(NotAPluginSource::Credentials);
        }
        if url.fragment().is_some() {
            return Err(NotAPluginSource::Fragment);
        }
        Ok(Self(url))
    }
}

// === impl PluginSource ===

impl FromStr for PluginSource {
    type Err = NotAPluginSource;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.strip_prefix(BUILT_IN_PREFIX) {
            Some(name) => BuiltIn::ALL
                .into_iter()
                .find(|policy| policy.name() == name)
                .map(Self::BuiltIn)
                .ok_or_else(|| NotAPluginSource::UnknownBuiltIn(name.to_owned())),
            None if text.is_empty() => Err(NotAPluginSource::Empty),
            None if is_url(text) => text.parse().map(Self::Url),
            None => Ok(Self::File(text.into())),
        }
    }
}

impl fmt::Display for PluginSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BuiltIn(policy) => write!(f, "{BUILT_IN_PREFIX}{}", policy.name()),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Url(url) => write!(f, "{}", url.url()),
        }
    }
}

impl TryFrom<String> for PluginSource {
    type Error = NotAPluginSource;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<PluginSource> for String {
    fn from(source: PluginSource) -> Self {
        source.to_string()
    }
}

impl JsonSchema for PluginSource {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "PluginSource".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "format": "plugin-source" })
    }
}
