//! HTTP calls. Nothing is sent here: a call is recorded and made once the guest has returned.

use std::time::Duration;

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_LENGTH, HOST, TRANSFER_ENCODING};
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use wasmtime::Linker;

use super::run;
use crate::abi::Status;
use crate::callout::{CallKind, Callout, HttpCallout, Outgoing};
use crate::guest_memory::{Call, Hostcall, bytes, check_writable, split, store_u32};
use crate::host::Host;
use crate::pairs;

/// Longest name of an upstream, path or authority in a call, bytes.
const MAX_TEXT: usize = 8192;

pub(super) fn link(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    linker.func_wrap(
        "env",
        "proxy_http_call",
        |call: Call<'_>,
         upstream: u32,
         upstream_len: u32,
         headers: u32,
         headers_len: u32,
         body: u32,
         body_len: u32,
         trailers: u32,
         trailers_len: u32,
         timeout_ms: i32,
         token_at: u32| {
            let parts = Parts {
                upstream: (upstream, upstream_len),
                headers: (headers, headers_len),
                body: (body, body_len),
                trailers: (trailers, trailers_len),
                timeout_ms,
            };
            run(call, |call| http_call(call, &parts, token_at))
        },
    )?;
    Ok(())
}

struct Parts {
    upstream: (u32, u32),
    headers: (u32, u32),
    body: (u32, u32),
    trailers: (u32, u32),
    timeout_ms: i32,
}

fn http_call(call: &mut Call<'_>, parts: &Parts, token_at: u32) -> Hostcall {
    check_writable(call, token_at, 4)?;
    let (memory, host) = split(call)?;
    let at = |(ptr, len): (u32, u32)| bytes(memory, ptr, len);
    let upstream = name(at(parts.upstream)?)?;
    let timeout = timeout(parts.timeout_ms)?;
    let request = Request::parse(at(parts.headers)?)?;
    let trailers = fields(at(parts.trailers)?)?;
    let body = at(parts.body)?;
    let most = host.plugin.spec.limits.callout_body_bytes;
    if !host.plugin.services.has_upstream(&host.plugin.spec.name, &upstream) {
        return Err(Status::BadArgument.into());
    }
    if body.len() > most {
        return Err(Status::InternalFailure.into());
    }
    let callout = HttpCallout {
        upstream,
        method: request.method,
        path: request.path,
        authority: request.authority,
        headers: request.fields,
        body: Bytes::copy_from_slice(body),
        trailers,
        timeout,
        max_body: most,
    };
    start(call, CallKind::Http, Callout::Http(callout), token_at)
}

/// Records a call for the effective context.
pub(super) fn start(call: &mut Call<'_>, kind: CallKind, callout: Callout, token_at: u32) -> Hostcall {
    let host = call.data_mut();
    let Some(token) = host.calls.open(&host.plugin, host.effective, kind) else {
        return Err(Status::InternalFailure.into());
    };
    host.calls.outbox.push(Outgoing::Start(token, Box::new(callout)));
    store_u32(call, token_at, token)
}

/// A name that the guest gives, if it can be one.
pub(super) fn name(name: &[u8]) -> Result<String, Status> {
    match std::str::from_utf8(name) {
        Ok(name) if !name.is_empty() && name.len() <= MAX_TEXT => Ok(name.to_owned()),
        _ => Err(Status::BadArgument),
    }
}

/// A time limit; 0 is none.
pub(super) fn timeout(ms: i32) -> Result<Option<Duration>, Status> {
    let ms = u64::try_from(ms).map_err(|_| Status::BadArgument)?;
    Ok((ms > 0).then(|| Duration::from_millis(ms)))
}

/// A map without pseudo-headers, less what frames a message or belongs to a connection.
pub(super) fn fields(serialized: &[u8]) -> Result<HeaderMap, Status> {
    let mut map = HeaderMap::new();
    for (name, value) in pairs::parse(serialized).map_err(|_| Status::BadArgument)? {
        add(&mut map, name, value)?;
    }
    Ok(map)
}

fn add(map: &mut HeaderMap, name: &[u8], value: &[u8]) -> Result<(), Status> {
    let name = HeaderName::from_bytes(name).map_err(|_| Status::BadArgument)?;
    let value = HeaderValue::from_bytes(value).map_err(|_| Status::BadArgument)?;
    const FRAMING: [HeaderName; 4] = [CONTENT_LENGTH, TRANSFER_ENCODING, CONNECTION, HOST];
    if !FRAMING.contains(&name) {
        map.try_append(name, value).map_err(|_| Status::BadArgument)?;
    }
    Ok(())
}

struct Request {
    method: Method,
    path: String,
    authority: String,
    fields: HeaderMap,
}

impl Request {
    fn parse(serialized: &[u8]) -> Result<Self, Status> {
        let (mut method, mut path, mut authority) = (None, None, None);
        let mut map = HeaderMap::new();
        for (name, value) in pairs::parse(serialized).map_err(|_| Status::BadArgument)? {
            match name {
                b":method" => method = Some(Method::from_bytes(value).map_err(|_| Status::BadArgument)?),
                b":path" => path = Some(target(value, |value| matches!(value.first(), Some(b'/' | b'*')))?),
                b":authority" => authority = Some(target(value, |_| true)?),
                // The upstream's own: whether it is reached over TLS.
                b":scheme" => {}
                _ => add(&mut map, name, value)?,
            }
        }
        match (method, path, authority) {
            (Some(method), Some(path), Some(authority)) => Ok(Self { method, path, authority, fields: map }),
            _ => Err(Status::BadArgument),
        }
    }
}

/// What may stand in a request line.
fn target(value: &[u8], fits: impl Fn(&[u8]) -> bool) -> Result<String, Status> {
    let clean = !value.is_empty() && value.len() <= MAX_TEXT && value.iter().all(u8::is_ascii_graphic) && fits(value);
    match std::str::from_utf8(value) {
        Ok(text) if clean => Ok(text.to_owned()),
        _ => Err(Status::BadArgument),
    }
}
