//! Upstreams that plugins call.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Secret, UpstreamUrl};

/// An upstream that plugins may call, besides the pools' workers. A plugin reaches it if its own `upstreams` names it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NamedUpstream {
    /// Name by which plugins call it; unique, also among the pools.
    #[schemars(extend("format" = "name"))]
    pub name: String,
    /// `http://host:port` or `https://host:port`, without a path; or `redis://host:port/database` for a Redis server, which
    /// plugins with `dialect = "higress"` can call.
    pub url: UpstreamUrl,
    /// Speak HTTP/2 without TLS. With TLS it is agreed on. gRPC needs HTTP/2.
    #[serde(default)]
    pub h2c: bool,
    /// Refuse a certificate that is not valid for `server_name`. For `https` only. When false, anybody on the way can answer
    /// in its place; `ca_file` is the way to trust a certificate of one's own.
    #[serde(default = "default_verify")]
    pub verify: bool,
    /// Name that is asked for when TLS begins, and that the certificate must have. Absent: the host of `url`.
    #[schemars(length(min = 1, max = 253))]
    pub server_name: Option<String>,
    /// File, relative to this one, with the certificates (PEM) of the authorities that are trusted instead of the system's.
    /// For `https` only; a change of the file takes effect by itself.
    #[schemars(length(min = 1))]
    pub ca_file: Option<PathBuf>,
    /// File, relative to this one, with a certificate (PEM) by which the gateway shows itself, followed by those it follows
    /// from. For `https` only; a change of the file takes effect by itself.
    #[schemars(length(min = 1))]
    pub client_cert: Option<PathBuf>,
    /// File, relative to this one, with the private key (PEM, not encrypted) of `client_cert`.
    #[schemars(length(min = 1))]
    pub client_key: Option<PathBuf>,
    /// User name at a Redis server. Absent: the one that the plugin states, else the default user.
    #[schemars(length(min = 1, max = 1024))]
    pub username: Option<String>,
    /// Password at a Redis server. Absent: the one that the plugin states, else none.
    pub password: Option<Secret>,
    /// Milliseconds to connect, TLS included.
    #[serde(default = "default_connect_ms")]
    #[schemars(range(min = 1, max = 600_000))]
    pub connect_ms: u64,
    /// Milliseconds that one call may take in all; a plugin can ask for less. gRPC streams may last longer.
    #[serde(default = "default_timeout_ms")]
    #[schemars(range(min = 1, max = 3_600_000))]
    pub timeout_ms: u64,
}

fn default_verify() -> bool {
    true
}

fn default_connect_ms() -> u64 {
    1_000
}

fn default_timeout_ms() -> u64 {
    10_000
}

// === impl NamedUpstream ===

impl NamedUpstream {
    /// An upstream with the defaults of every optional key.
    pub fn new(name: impl Into<String>, url: impl Into<UpstreamUrl>) -> Self {
        Self {
            name: name.into(),
            url: url.into(),
            h2c: false,
            verify: default_verify(),
            server_name: None,
            ca_file: None,
            client_cert: None,
            client_key: None,
            username: None,
            password: None,
            connect_ms: default_connect_ms(),
            timeout_ms: default_timeout_ms(),
        }
    }
}
