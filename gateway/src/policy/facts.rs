//! Facts about one turn, as policies read them. The names stand in [`reference`](crate::policy::reference), which the
//! documentation is made of.

use crate::policy::env::{PolicyStore, RouteFacts};
use bytes::Bytes;
use http::{HeaderMap, Method};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};
use std::time::{SystemTime, UNIX_EPOCH};
use turnstile_fleet::session::SessionAction;
use turnstile_fleet::turn::Turn;
use turnstile_plugins::{RequestMap, Status};

/// The machine's name.
static NODE: LazyLock<String> = LazyLock::new(|| {
    let name =
        std::fs::read_to_string("/proc/sys/kernel/hostname").or_else(|_| std::fs::read_to_string("/etc/hostname"));
    name.map_or_else(|_| "turnstile".to_owned(), |name| name.trim().to_owned())
});

/// The longest property path that is looked at, bytes.
pub const MAX_PATH: usize = 128;

/// What is known of a turn from its arrival on.
pub struct TurnFacts {
    /// The turn.
    pub turn: Arc<Turn>,
    /// Estimated prompt length, tokens.
    pub prompt_tokens: u64,
    /// What the turn asks of its session, `x-dynamo-session-final` included.
    pub action: SessionAction,
    /// Number of this turn in its session, from 1.
    pub number: u32,
    /// The request's head, for header maps and `request.*` properties.
    pub head: RequestHead,
}

/// The request's head.
#[derive(Clone)]
pub struct RequestHead {
    /// Method.
    pub method: Method,
    /// Path with query.
    pub path: Bytes,
    /// Authority.
    pub authority: Bytes,
    /// Headers.
    pub headers: Arc<HeaderMap>,
    /// The request id.
    pub request_id: Arc<str>,
    /// Where the client connects from.
    pub peer: Option<SocketAddr>,
    /// Number of the client's connection among all of this process; 0 for none.
    pub connection: u64,
    /// `HTTP/1.0`, `HTTP/1.1` or `HTTP/2`.
    pub protocol: &'static str,
    /// When it arrived.
    pub arrived: SystemTime,
}

/// What is known when a turn has ended.
#[derive(Debug, Clone, Default)]
pub struct EndFacts {
    /// The worker that served it.
    pub worker: Option<Arc<str>>,
    /// HTTP status for the client.
    pub status: u16,
    /// Prompt tokens, as the worker said.
    pub prompt_tokens: Option<u64>,
    /// Completion tokens, as the worker said.
    pub completion_tokens: Option<u64>,
    /// Cached tokens, as the worker said.
    pub cached_tokens: Option<u64>,
    /// Time to the first event, ms, queue included.
    pub ttft_ms: Option<f64>,
    /// Why generation ended.
    pub finish_reason: Option<String>,
}

/// A property path as dotted text: SDKs pass segments joined by NUL, some authors write dots.
pub fn dotted<'a>(path: &[u8], buffer: &'a mut [u8; MAX_PATH]) -> Option<&'a str> {
    let target = buffer.get_mut(..path.len())?;
    for (to, from) in target.iter_mut().zip(path) {
        *to = if *from == 0 { b'.' } else { *from };
    }
    std::str::from_utf8(target).ok()
}

// === impl TurnFacts ===

impl TurnFacts {
    /// A single fact under `turnstile.request.`.
    pub fn field(&self, name: &str) -> Option<Cow<'_, str>> {
        let turn = &*self.turn;
        let identity = &turn.identity;
        let text = |t: &'static str| Some(Cow::Borrowed(t));
        let number = |n: Option<String>| n.map(Cow::Owned);
        match name {
            "model" => turn.model.as_deref().map(Cow::Borrowed),
            "route" => text(turn.route.name()),
            "protocol" => text(turn.route.protocol().name()),
            "stream" => text(if turn.stream { "true" } else { "false" }),
            "session" => identity.session.as_ref().map(|s| Cow::Borrowed(s.text.as_str())),
            "tree" => identity.tree.as_ref().map(|s| Cow::Borrowed(s.text.as_str())),
            "parent" => identity.parent.as_ref().map(|s| Cow::Borrowed(s.text.as_str())),
            "tenant" => Some(Cow::Owned(identity.tenant.to_string())),
            "agent" => text(identity.agent.name()),
            "source" => text(identity.source.name()),
            "priority" => number(turn.hints.priority.map(|v| v.to_string())),
            "strict_priority" => number(turn.hints.strict_priority.map(|v| v.to_string())),
            "osl" => number(turn.hints.osl.map(|v| v.to_string())),
            "latency_sensitivity" => number(turn.hints.latency_sensitivity.map(|v| v.to_string())),
            "speculative_prefill" => text(if turn.hints.speculative_prefill { "true" } else { "false" }),
            "prompt_tokens" => Some(Cow::Owned(self.prompt_tokens.to_string())),
            "body_bytes" => Some(Cow::Owned(turn.body.len().to_string())),
            "max_tokens" => number(turn.max_tokens.map(|v| v.to_string())),
            "turn" => Some(Cow::Owned(self.number.to_string())),
            "action" => (self.action != SessionAction::None).then(|| Cow::Borrowed(self.action.name())),
            "timeout_s" => number(turn.control.timeout_s.map(|v| v.to_string())),
            "affinity_hash" => Some(Cow::Owned(turn.prefix.affinity_hash.to_string())),
            _ => None,
        }
    }

    /// `turnstile.request`.
    pub fn json(&self) -> String {
        const TEXT: [&str; 10] =
            ["model", "route", "protocol", "tenant", "session", "tree", "parent", "agent", "source", "action"];
        const NUMBERS: [&str; 9] = [
            "priority",
            "strict_priority",
            "osl",
            "latency_sensitivity",
            "prompt_tokens",
            "body_bytes",
            "max_tokens",
            "timeout_s",
            "turn",
        ];
        let mut map = Map::new();
        for name in TEXT {
            map.insert(name.into(), self.field(name).map_or(Value::Null, |v| Value::String(v.into_owned())));
        }
        for name in NUMBERS {
            let value = self.field(name).and_then(|v| serde_json::from_str(&v).ok()).unwrap_or(Value::Null);
            map.insert(name.into(), value);
        }
        map.insert("stream".into(), Value::Bool(self.turn.stream));
        map.insert("speculative_prefill".into(), Value::Bool(self.turn.hints.speculative_prefill));
        Value::Object(map).to_string()
    }

    /// The properties that every Proxy-Wasm host has, in Envoy's encoding.
    pub fn standard_property(&self, name: &str) -> Option<Cow<'_, [u8]>> {
        self.head.property(name, Some(self.turn.body.len()))
    }
}

/// A path without its query, and the query if there is one.
pub fn split_path(path: &[u8]) -> (&[u8], Option<&[u8]>) {
    match path.iter().position(|byte| *byte == b'?') {
        Some(at) => (path.get(..at).unwrap_or_default(), path.get(at + 1..)),
        None => (path, None),
    }
}

// === impl RequestHead ===

impl RequestHead {
    /// The headers with their pseudo-headers.
    pub fn request_map(&self) -> RequestMap {
        RequestMap::new(self.method.clone(), self.path.clone(), self.authority.clone(), Arc::clone(&self.headers))
    }

    /// `request.*` and `source.*` in Envoy's encoding: numbers and times as 8 bytes little-endian, times in nanoseconds.
    pub fn property(&self, name: &str, size: Option<usize>) -> Option<Cow<'_, [u8]>> {
        if let Some(header) = name.strip_prefix("request.headers.") {
            return self.headers.get(header).map(|v| Cow::Borrowed(v.as_bytes()));
        }
        let int = |n: i64| Some(Cow::Owned(n.to_le_bytes().to_vec()));
        let header = |name: &str| self.headers.get(name).map(|v| Cow::Borrowed(v.as_bytes()));
        match name {
            "request.path" => Some(Cow::Borrowed(&self.path)),
            "request.url_path" => Some(Cow::Borrowed(split_path(&self.path).0)),
            "request.query" => split_path(&self.path).1.map(Cow::Borrowed),
            "request.method" => Some(Cow::Borrowed(self.method.as_str().as_bytes())),
            "request.host" => Some(Cow::Borrowed(&self.authority)),
            "request.scheme" => Some(Cow::Borrowed(b"http")),
            "request.protocol" => Some(Cow::Borrowed(self.protocol.as_bytes())),
            "request.id" => Some(Cow::Borrowed(self.request_id.as_bytes())),
            "request.useragent" => header("user-agent"),
            "request.referer" => header("referer"),
            "request.size" => int(i64::try_from(size?).unwrap_or(i64::MAX)),
            "request.time" => {
                let since = self.arrived.duration_since(UNIX_EPOCH).ok()?;
                int(i64::try_from(since.as_nanos()).unwrap_or(i64::MAX))
            }
            // To Envoy, a listener for clients is an inbound one.
            "listener_direction" | "xds.listener_direction" => int(1),
            // Listeners have no TLS, so these are all that there is of it.
            "connection.mtls" => Some(Cow::Borrowed(&[0])),
            "connection.requested_server_name" => Some(Cow::Borrowed(b"")),
            "connection.id" | "connection_id" => int(i64::try_from(self.connection).unwrap_or(i64::MAX)),
            // Filters leave none behind: what they write are properties. An empty message, and an empty map.
            "metadata" => Some(Cow::Borrowed(b"")),
            "metadata.filter_metadata" => Some(Cow::Borrowed(&[0; 4])),
            "node.id" | "xds.node.id" => Some(Cow::Borrowed(NODE.as_bytes())),
            "source.address" => Some(Cow::Owned(self.peer?.to_string().into_bytes())),
            "source.port" => int(i64::from(self.peer?.port())),
            _ => None,
        }
    }
}

// === impl EndFacts ===

impl EndFacts {
    /// A fact that exists once the turn has ended.
    pub fn field(&self, name: &str) -> Option<Cow<'_, str>> {
        match name {
            "usage" => Some(Cow::Owned(
                json!({
                    "prompt_tokens": self.prompt_tokens,
                    "completion_tokens": self.completion_tokens,
                    "cached_tokens": self.cached_tokens,
                })
                .to_string(),
            )),
            "cached_tokens" => self.cached_tokens.map(|n| Cow::Owned(n.to_string())),
            "ttft_ms" => self.ttft_ms.map(|n| Cow::Owned(format!("{n:.3}"))),
            "worker" => self.worker.as_deref().map(Cow::Borrowed),
            "status" => Some(Cow::Owned(self.status.to_string())),
            "finish_reason" => self.finish_reason.as_deref().map(Cow::Borrowed),
            _ => None,
        }
    }
}

// === foreign functions ===

/// `turnstile.prefix_match`: `{id: cached_tokens}`, for all candidates or the one named.
pub fn prefix_match(route: &RouteFacts, arguments: &[u8]) -> Result<String, Status> {
    #[derive(Deserialize)]
    struct Arguments {
        worker: Option<String>,
    }
    let wanted = if arguments.is_empty() {
        None
    } else {
        serde_json::from_slice::<Arguments>(arguments).map_err(|_| Status::SerializationFailure)?.worker
    };
    let candidates = route.candidates();
    if let Some(name) = &wanted
        && candidates.find(name).is_none()
    {
        return Err(Status::BadArgument);
    }
    let only = wanted.and_then(|name| candidates.find(&name)).map(|w| w.index);
    let map: Map<String, Value> = candidates
        .iter()
        .filter(|(worker, _)| only.is_none_or(|index| worker.index == index))
        .map(|(worker, cached)| (worker.id.to_string(), Value::from(cached)))
        .collect();
    Ok(Value::Object(map).to_string())
}

/// `turnstile.kv_entry`: the value of a key with the number that `turnstile.kv_cas` wants.
pub fn entry(store: &dyn PolicyStore, key: &[u8]) -> Result<String, Status> {
    let (value, cas) = store.get(key).ok_or(Status::NotFound)?;
    Ok(json!({ "value": String::from_utf8_lossy(&value), "cas": cas }).to_string())
}

/// `turnstile.kv_cas`: `{"key", "value", "cas"}` → `{"stored": bool}`.
pub fn compare_and_set(store: &dyn PolicyStore, arguments: &[u8]) -> Result<String, Status> {
    #[derive(Deserialize)]
    struct Arguments {
        key: String,
        value: String,
        #[serde(default)]
        cas: u64,
    }
    let wanted: Arguments = serde_json::from_slice(arguments).map_err(|_| Status::SerializationFailure)?;
    let stored = store.compare_and_set(wanted.key.as_bytes(), wanted.value.as_bytes(), wanted.cas);
    Ok(json!({ "stored": stored }).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_and_dots_name_the_same_property() {
        let mut buffer = [0; MAX_PATH];
        assert_eq!(dotted(b"turnstile\0request\0model", &mut buffer), Some("turnstile.request.model"));
        assert_eq!(dotted(b"turnstile.request.model", &mut buffer), Some("turnstile.request.model"));
        assert_eq!(dotted(&[b'a'; MAX_PATH + 1], &mut buffer), None);
        assert_eq!(dotted(b"\xff", &mut buffer), None);
    }
}
