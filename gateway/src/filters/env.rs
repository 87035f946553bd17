//! What filters see of one exchange.

use crate::higress::Hosts;
use crate::policy::RequestHead;
use crate::policy::facts::{MAX_PATH, dotted, split_path};
use bytes::Bytes;
use hashbrown::HashMap;
use http::HeaderMap;
use pingora_core::protocols::http::client::HttpSession;
use std::borrow::Cow;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::SystemTime;
use turnstile_plugins::{
    Body, BufferType, FieldMap, HeaderPairs, MapType, RequestMap, ResponseMap, Status, StreamEnv, pairs,
};

/// Properties that the plugins of one request may set together, and bytes of one.
const MAX_PROPERTIES: usize = 64;
const MAX_PROPERTY_BYTES: usize = 64 * 1024;

/// What filters see of one exchange.
pub struct FilterEnv {
    /// The request as it came.
    pub head: RequestHead,
    /// The request's head as the filters left it.
    pub request: RequestMap,
    /// The part of the request's body that the filter at work sees, or that one holds.
    pub body: Body,
    /// Bytes of the request's body that came so far.
    pub request_size: usize,
    /// The request's trailers.
    pub request_trailers: Option<FieldMap>,
    /// The answer's head.
    pub response: Option<ResponseMap>,
    /// The part of the answer's body that the filter at work sees, or that one holds.
    pub chunk: Body,
    /// Bytes of the answer's body that came so far.
    pub response_size: usize,
    /// The answer's trailers.
    pub response_trailers: Option<FieldMap>,
    /// The route asked for.
    pub route: &'static str,
    /// Where the client connected to.
    pub local: Option<SocketAddr>,
    /// Where the request goes.
    pub placed: Option<PlacedAt>,
    /// How often it was given to a worker.
    pub attempts: u64,
    /// Why a plugin answered, in its own words; who answered otherwise.
    pub code_details: Cow<'static, str>,
    /// Where the hosts that the request can go to are looked up.
    pub hosts: Option<Hosts>,
    /// The host that a plugin of Higress' dialect wants the request to go to.
    pub override_host: Option<String>,
    properties: HashMap<Vec<u8>, Vec<u8>>,
}

impl FilterEnv {
    /// An exchange of which nothing but the request's head is there.
    pub fn new(head: RequestHead) -> Self {
        Self {
            request: head.request_map(),
            head,
            body: Body::default(),
            request_size: 0,
            request_trailers: None,
            response: None,
            chunk: Body::default(),
            response_size: 0,
            response_trailers: None,
            route: "",
            local: None,
            placed: None,
            attempts: 0,
            code_details: Cow::Borrowed("via_upstream"),
            hosts: None,
            override_host: None,
            properties: HashMap::new(),
        }
    }

    /// The request's trailers, if it has any.
    pub fn set_request_trailers(&mut self, trailers: HeaderMap) {
        self.request_trailers = Some(FieldMap::new(trailers));
    }

    fn response_property(&self, name: &str) -> Option<Cow<'_, [u8]>> {
        let int = |n: usize| Some(Cow::Owned(i64::try_from(n).unwrap_or(i64::MAX).to_le_bytes().to_vec()));
        let response = self.response.as_ref()?;
        if let Some(field) = name.strip_prefix("headers.") {
            return joined(response, field.as_bytes());
        }
        if let Some(field) = name.strip_prefix("trailers.") {
            return self.response_trailers.as_ref()?.get(field.as_bytes());
        }
        match name {
            "grpc_status" => int(self.grpc_status(response)),
            "code" => int(usize::from(response.status.as_u16())),
            "code_details" => Some(Cow::Borrowed(self.code_details.as_bytes())),
            "size" => int(self.response_size),
            "total_size" => int(self.response_size + pairs::serialized_len(response)),
            "headers" => Some(serialized(response)),
            _ => None,
        }
    }

    /// What the answer says, or what its status means to gRPC.
    fn grpc_status(&self, response: &ResponseMap) -> usize {
        let said = self.response_trailers.as_ref().and_then(|map| map.get(b"grpc-status"));
        let said = said.or_else(|| response.get(b"grpc-status"));
        let said = said.and_then(|text| std::str::from_utf8(&text).ok()?.parse().ok());
        said.unwrap_or(match response.status.as_u16() {
            400 => 13,
            401 => 16,
            403 => 7,
            404 => 12,
            429 | 502..=504 => 14,
            _ => 2,
        })
    }

    fn upstream_property(&self, name: &str) -> Option<Cow<'_, [u8]>> {
        let int = |n: u64| Some(Cow::Owned(n.to_le_bytes().to_vec()));
        if name == "request_attempt_count" {
            return int(self.attempts);
        }
        let placed = self.placed.as_ref()?;
        let connection = placed.connection.as_ref();
        let text = |text: String| Some(Cow::Owned(text.into_bytes()));
        match name {
            "address" => Some(Cow::Borrowed(placed.address.as_bytes())),
            "port" => int(placed.address.rsplit(':').next()?.parse().ok()?),
            "local_address" => text(connection?.local?.to_string()),
            "transport_failure_reason" => connection.map(|_| Cow::Borrowed(&b""[..])),
            "tls_version" => text(connection?.tls_version.clone()?),
            "sha256_peer_certificate_digest" => text(connection?.certificate.clone()?),
            _ => None,
        }
    }
}

/// Where a request goes.
pub struct PlacedAt {
    /// The pool.
    pub pool: Arc<str>,
    /// The worker's address.
    pub address: String,
    /// The connection to it, once there is one.
    pub connection: Option<UpstreamConnection>,
}

/// A connection to a worker.
#[derive(Debug, Clone, Default)]
pub struct UpstreamConnection {
    /// Our end of it.
    pub local: Option<SocketAddr>,
    /// As Envoy writes it: `TLSv1.3`.
    pub tls_version: Option<String>,
    /// SHA-256 of the worker's certificate, hexadecimal.
    pub certificate: Option<String>,
}

impl UpstreamConnection {
    /// What is known of the connection under a session.
    pub fn of(session: &HttpSession) -> Self {
        let tls = session.digest().and_then(|digest| digest.ssl_digest.as_ref());
        Self {
            local: session.client_addr().and_then(|address| address.as_inet().copied()),
            tls_version: tls.map(|tls| tls.version.replace('_', ".")),
            certificate: tls.map(|tls| tls.cert_digest.iter().map(|byte| format!("{byte:02x}")).collect()),
        }
    }
}

/// A map in the form that guests read.
fn serialized(map: &dyn HeaderPairs) -> Cow<'static, [u8]> {
    let mut bytes = Vec::with_capacity(pairs::serialized_len(map));
    pairs::write(map, &mut bytes);
    Cow::Owned(bytes)
}

impl StreamEnv for FilterEnv {
    fn property(&mut self, path: &[u8]) -> Option<Cow<'_, [u8]>> {
        // Envoy keeps what plugins write under `wasm.`, and finds it without that, too.
        let state = path.strip_prefix(b"filter_state\0").or_else(|| path.strip_prefix(b"filter_state."));
        let written = state.unwrap_or(path);
        let own = written.strip_prefix(b"wasm\0").or_else(|| written.strip_prefix(b"wasm."));
        // What plugins write is all the state that filters have.
        let own = if state.is_some() { own? } else { own.unwrap_or(path) };
        if self.properties.contains_key(own) {
            return self.properties.get(own).map(|value| Cow::Borrowed(value.as_slice()));
        }
        let mut buffer = [0; MAX_PATH];
        let name = dotted(path, &mut buffer)?;
        match name {
            // As on Envoy these are there from the beginning.
            "response.flags" => return Some(Cow::Borrowed(&[0; 8])),
            "response.trailers" => {
                return Some(self.response_trailers.as_ref().map_or(Cow::Borrowed(&[0; 4]), |map| serialized(map)));
            }
            _ => {}
        }
        if let Some(name) = name.strip_prefix("response.") {
            return self.response_property(name);
        }
        if let Some(name) = name.strip_prefix("upstream.") {
            return self.upstream_property(name);
        }
        let int = |n: i64| Some(Cow::Owned(n.to_le_bytes().to_vec()));
        match name {
            "route_name" | "xds.route_name" => return Some(Cow::Borrowed(self.route.as_bytes())),
            "cluster_name" | "xds.cluster_name" => {
                return match &self.placed {
                    Some(placed) => Some(Cow::Borrowed(placed.pool.as_bytes())),
                    // Where it will go, as far as that is known.
                    None => self.hosts.as_ref()?.pool_name(&self.body.bytes).map(|name| Cow::Borrowed(name.as_bytes())),
                };
            }
            "destination.address" => return Some(Cow::Owned(self.local?.to_string().into_bytes())),
            "destination.port" => return int(self.local?.port().into()),
            "request.headers" => return Some(serialized(&self.request)),
            // What is seen is what the request is now, not what it was.
            "request.path" => return Some(Cow::Borrowed(&self.request.path)),
            "request.method" => return Some(Cow::Borrowed(self.request.method.as_str().as_bytes())),
            "request.host" => return Some(Cow::Borrowed(&self.request.authority)),
            "request.url_path" => return Some(Cow::Borrowed(split_path(&self.request.path).0)),
            "request.query" => return split_path(&self.request.path).1.map(Cow::Borrowed),
            "request.useragent" => return self.request.get(b"user-agent"),
            "request.referer" => return self.request.get(b"referer"),
            // As on Envoy, what the client says it will be, if it does.
            "request.size" => {
                let said = self.request.get(b"content-length");
                let said = said.and_then(|text| std::str::from_utf8(&text).ok()?.parse().ok());
                return int(said.unwrap_or_else(|| i64::try_from(self.request_size).unwrap_or(i64::MAX)));
            }
            "request.total_size" => {
                let size = self.request_size + pairs::serialized_len(&self.request);
                return int(i64::try_from(size).unwrap_or(i64::MAX));
            }
            "request.duration" => {
                let since = SystemTime::now().duration_since(self.head.arrived).ok()?;
                return int(i64::try_from(since.as_nanos()).unwrap_or(i64::MAX));
            }
            _ => {}
        }
        if let Some(field) = name.strip_prefix("request.headers.") {
            return joined(&self.request, field.as_bytes());
        }
        self.head.property(name, Some(self.request_size))
    }

    fn set_property(&mut self, path: &[u8], value: &[u8]) -> Result<(), Status> {
        let known = self.properties.contains_key(path);
        if path.len() > MAX_PATH
            || value.len() > MAX_PROPERTY_BYTES
            || (!known && self.properties.len() >= MAX_PROPERTIES)
        {
            return Err(Status::BadArgument);
        }
        self.properties.insert(path.to_vec(), value.to_vec());
        Ok(())
    }

    fn header_map(&mut self, map: MapType) -> Option<&mut dyn HeaderPairs> {
        match map {
            MapType::RequestHeaders => Some(&mut self.request),
            MapType::RequestTrailers => self.request_trailers.as_mut().map(|m| m as &mut dyn HeaderPairs),
            MapType::ResponseHeaders => self.response.as_mut().map(|m| m as &mut dyn HeaderPairs),
            MapType::ResponseTrailers => self.response_trailers.as_mut().map(|m| m as &mut dyn HeaderPairs),
            _ => None,
        }
    }

    fn buffer(&mut self, buffer: BufferType) -> Option<&[u8]> {
        match buffer {
            BufferType::RequestBody => Some(&self.body.bytes),
            BufferType::ResponseBody => Some(&self.chunk.bytes),
            _ => None,
        }
    }

    fn replace_buffer(&mut self, buffer: BufferType, range: Range<usize>, data: &[u8]) -> Result<(), Status> {
        match buffer {
            BufferType::RequestBody => self.body.replace(range, data),
            BufferType::ResponseBody => self.chunk.replace(range, data),
            _ => return Err(Status::NotFound),
        }
        Ok(())
    }

    fn upstream_hosts(&mut self) -> Option<Vec<(String, String)>> {
        self.hosts.as_ref().map(|hosts| hosts.list(&self.body.bytes))
    }

    fn override_host(&mut self, address: &[u8]) -> Result<(), Status> {
        match std::str::from_utf8(address) {
            Ok(address) if !address.is_empty() && address.bytes().all(|b| b.is_ascii_graphic()) => {
                self.override_host = Some(address.to_owned());
                Ok(())
            }
            _ => Err(Status::BadArgument),
        }
    }
}

/// All values of a header as one text with commas between, which is what a property shows; a map shows the first.
fn joined<'a>(map: &'a dyn HeaderPairs, name: &[u8]) -> Option<Cow<'a, [u8]>> {
    let first = map.get(name)?;
    let mut all = Vec::new();
    let mut count = 0;
    map.for_each(&mut |other, value| {
        if other.eq_ignore_ascii_case(name) {
            if count > 0 {
                all.push(b',');
            }
            count += 1;
            all.extend_from_slice(value);
        }
    });
    Some(if count > 1 { Cow::Owned(all) } else { first })
}

impl FilterEnv {
    /// Takes the part of the request's body that is seen now.
    pub fn take_body(&mut self) -> Bytes {
        std::mem::take(&mut self.body).bytes
    }

    /// Takes the part of the answer's body that is seen now.
    pub fn take_chunk(&mut self) -> Bytes {
        std::mem::take(&mut self.chunk).bytes
    }
}

#[cfg(test)]
#[path = "env_tests.rs"]
mod tests;
