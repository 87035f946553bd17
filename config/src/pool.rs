//! The fleet: pools of workers.

use std::{borrow::Cow, collections::BTreeMap, fmt, path::PathBuf, str::FromStr};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use url::{Host, Url};

use crate::Secret;

/// The SGLang workers that serve some models.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Pool {
    /// Name in logs and metrics. Absent: `default` for the first pool, `pool-N` for the Nth.
    #[serde(default)]
    #[schemars(extend("format" = "name"))]
    pub name: String,
    /// Model names whose requests this pool takes. Empty: any model that no other pool names.
    #[serde(default)]
    #[schemars(inner(length(min = 1, max = 512)))]
    pub models: Vec<String>,
    /// The workers, each a URL or a table.
    #[schemars(length(min = 1, max = 4096))]
    pub workers: Vec<Worker>,
    /// API key sent to the workers as a bearer token. Absent: none.
    pub api_key: Option<Secret>,
    /// Speak HTTP/2 without TLS to the workers. SGLang itself speaks HTTP/1.1.
    #[serde(default)]
    pub h2c: bool,
    /// Name that workers with an `https` URL are asked for when TLS begins, and that their certificates must have. Absent: the
    /// host of each URL.
    #[schemars(length(min = 1, max = 253))]
    pub server_name: Option<String>,
    /// File, relative to this one, with the certificates (PEM) of the authorities that are trusted instead of the system's.
    /// For `https` URLs only; a change of the file takes effect by itself.
    #[schemars(length(min = 1))]
    pub ca_file: Option<PathBuf>,
    /// File, relative to this one, with a certificate (PEM) by which the gateway shows itself to the workers, followed by
    /// those it follows from. For `https` URLs only; a change of the file takes effect by itself.
    #[schemars(length(min = 1))]
    pub client_cert: Option<PathBuf>,
    /// File, relative to this one, with the private key (PEM, not encrypted) of `client_cert`.
    #[schemars(length(min = 1))]
    pub client_key: Option<PathBuf>,
    /// Requests that one worker is given at a time. Absent: `admission.max_in_flight_per_worker`, else what the worker
    /// reports.
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_in_flight: Option<u32>,
}

/// One SGLang server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "Form")]
pub struct Worker {
    /// Where it listens.
    pub url: WorkerUrl,
    /// Name in policies, logs and metrics; by default host and port. Unique over all pools.
    pub id: String,
    /// Facts for policies.
    pub labels: BTreeMap<String, String>,
    /// Requests that it is given at a time; overrides the pool's.
    pub max_in_flight: Option<u32>,
    /// API key sent to it; overrides the pool's.
    pub api_key: Option<Secret>,
}

/// The forms that a worker has in a file.
#[derive(Deserialize)]
#[serde(untagged)]
enum Form {
    Url(WorkerUrl),
    Table(WorkerTable),
}

/// A worker with more than its URL.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct WorkerTable {
    /// `http://host:port` or `https://host:port`, without a path.
    url: WorkerUrl,
    /// Name in policies, logs and metrics, unique over all pools. Absent: host and port.
    #[schemars(extend("format" = "worker-id"))]
    id: Option<String>,
    /// Facts about the worker that policies can read, such as a hardware type or a tenant.
    #[serde(default)]
    #[schemars(inner(length(max = 1024)))]
    labels: BTreeMap<String, String>,
    /// Requests that it is given at a time; overrides the pool's.
    #[schemars(range(min = 1, max = 1_000_000))]
    max_in_flight: Option<u32>,
    /// API key sent to it as a bearer token; overrides the pool's.
    api_key: Option<Secret>,
}

/// `http://host:port` or `https://host:port`: no path, no query, no credentials.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct WorkerUrl {
    tls: bool,
    host: String,
    port: u16,
}

/// Why a text is not the URL of a worker. Does not repeat the text, which may hold credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotAWorkerUrl {
    /// No URL at all.
    #[error("not a URL ({0}); expected one such as http://10.0.0.1:30000")]
    Syntax(#[from] url::ParseError),
    /// Another scheme.
    #[error("the scheme must be http or https")]
    Scheme,
    /// No host.
    #[error("the host is missing")]
    Host,
    /// A host that no worker's id could hold, and no name server knows.
    #[error(
        "the host must be an IP address or a name of letters, digits and - _ . only, at most {MAX_HOST_BYTES} of them"
    )]
    HostName,
    /// User and password.
    #[error("credentials do not belong in a URL; use api_key")]
    Credentials,
    /// A path, a query or a fragment.
    #[error("expected scheme, host and port only, without a path, query or fragment")]
    Path,
}

/// Longest host name of a worker, bytes: with its port it is the worker's id, unless that is given.
const MAX_HOST_BYTES: usize = 120;

fn is_host_name(name: &str) -> bool {
    name.len() <= MAX_HOST_BYTES && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

// === impl Pool ===

impl Pool {
    /// Whether this pool takes requests for any model that no other pool names.
    pub fn takes_any_model(&self) -> bool {
        self.models.is_empty()
    }

    /// The API key for one of its workers: the worker's own, else the pool's.
    pub fn api_key_for<'a>(&'a self, worker: &'a Worker) -> Option<&'a Secret> {
        worker.api_key.as_ref().or(self.api_key.as_ref())
    }
}

// === impl Worker ===

impl From<Form> for Worker {
    fn from(form: Form) -> Self {
        match form {
            Form::Url(url) => Self::from(url),
            Form::Table(table) => Self {
                id: table.id.unwrap_or_else(|| table.url.authority()),
                url: table.url,
                labels: table.labels,
                max_in_flight: table.max_in_flight,
                api_key: table.api_key,
            },
        }
    }
}

impl From<WorkerUrl> for Worker {
    fn from(url: WorkerUrl) -> Self {
        Self { id: url.authority(), url, labels: BTreeMap::new(), max_in_flight: None, api_key: None }
    }
}

impl JsonSchema for Worker {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "Worker".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "anyOf": [generator.subschema_for::<WorkerUrl>(), generator.subschema_for::<WorkerTable>()],
        })
    }
}

// === impl WorkerUrl ===

impl WorkerUrl {
    /// Whether the worker is reached over TLS.
    pub fn tls(&self) -> bool {
        self.tls
    }

    /// Host name or IP address; an IPv6 address is without its brackets.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Port, the scheme's own where the URL names none.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// `host:port`, as it stands in a `Host` header and in a worker's default id.
    pub fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

impl FromStr for WorkerUrl {
    type Err = NotAWorkerUrl;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let url = Url::parse(text)?;
        let tls = match url.scheme() {
            "http" => false,
            "https" => true,
            _ => return Err(NotAWorkerUrl::Scheme),
        };
        if !url.username().is_empty() || url.password().is_some() {
            return Err(NotAWorkerUrl::Credentials);
        }
        if !matches!(url.path(), "" | "/") || url.query().is_some() || url.fragment().is_some() {
            return Err(NotAWorkerUrl::Path);
        }
        let host = match url.host().ok_or(NotAWorkerUrl::Host)? {
            Host::Domain(name) if is_host_name(name) => name.to_owned(),
            Host::Domain(_) => return Err(NotAWorkerUrl::HostName),
            Host::Ipv4(address) => address.to_string(),
            Host::Ipv6(address) => address.to_string(),
        };
        let port = url.port_or_known_default().ok_or(NotAWorkerUrl::Host)?;
        Ok(Self { tls, host, port })
    }
}

impl fmt::Display for WorkerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.tls { "https" } else { "http" };
        write!(f, "{scheme}://{}", self.authority())
    }
}

impl TryFrom<String> for WorkerUrl {
    type Error = NotAWorkerUrl;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<WorkerUrl> for String {
    fn from(url: WorkerUrl) -> Self {
        url.to_string()
    }
}

impl JsonSchema for WorkerUrl {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "WorkerUrl".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "format": "worker-url" })
    }
}
