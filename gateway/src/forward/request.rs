//! The request a worker gets, and the head of the answer a client gets.

use crate::forward::forwarded::{Origin, tell, tells_origin};
use crate::headers::{connection_listed, is_hop_by_hop, response_head};
use crate::upstream::{Head, HeadBuilder, Target};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use pingora_core::{ErrorType, OrErr as _};
use pingora_http::ResponseHeader;
use turnstile_config::Forwarded;
use turnstile_fleet::steering::SteeringOptions;
use turnstile_plugins::TARGET_HEADERS;

/// Headers that are set anew or make no sense to a worker.
fn replaced(name: &HeaderName) -> bool {
    *name == header::HOST
        || *name == header::CONTENT_LENGTH
        || *name == header::EXPECT
        || *name == header::ACCEPT_ENCODING
        || *name == header::CONTENT_ENCODING
        || *name == REQUEST_ID
        || TARGET_HEADERS.contains(&name.as_str())
}

/// What decides which headers go on.
#[derive(Debug, Clone, Copy)]
pub struct Onward<'a> {
    /// The steering table.
    pub steering: &'a SteeringOptions,
    /// What the worker is told of its client.
    pub forwarded: &'a Forwarded,
    /// Where the request came from.
    pub origin: Origin<'a>,
    /// The gateway has picked the data-parallel rank, which a header would overrule.
    pub pins_rank: bool,
    /// Trailers of the answer are wanted.
    pub trailers: bool,
}

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The request head for a worker: the client's, less what belongs to its hop or would steer the engine, with the
/// worker's own authorization when it has one, and then without the client's.
///
/// `accept-encoding` is dropped: the stream is observed, so it must not be compressed.
///
/// # Errors
/// When the path cannot stand in a request line.
pub fn for_worker(
    client: &HeaderMap,
    target: &Target,
    path: &str,
    body_len: usize,
    request_id: &str,
    onward: Onward<'_>,
) -> pingora_core::Result<Head> {
    let mut head = HeadBuilder::new(target, "POST", path, client.len() + 8)?;
    head.field(&header::HOST, &target.authority)?;
    let listed = connection_listed(client);
    let own_credentials = target.authorization.is_some() || !onward.steering.passes_credentials();
    for (name, value) in client {
        if is_hop_by_hop(name, &listed)
            || replaced(name)
            || tells_origin(name)
            || onward.steering.stops(name.as_str())
            || (onward.pins_rank && name.as_str() == "x-data-parallel-rank")
            || (own_credentials && (*name == header::AUTHORIZATION || name.as_str() == "x-api-key"))
        {
            continue;
        }
        head.field(name, value)?;
    }
    if let Some(authorization) = &target.authorization {
        head.field(&header::AUTHORIZATION, authorization)?;
    }
    head.field(&header::CONTENT_LENGTH, &HeaderValue::from(body_len))?;
    // Ids are checked or made of digits: always a header value.
    if let Ok(id) = HeaderValue::from_str(request_id) {
        head.field(&REQUEST_ID, &id)?;
    }
    // Over HTTP/1.1 this would need a `Connection` header, which means more to some servers than it says.
    if onward.trailers && target.is_http2() {
        head.field(&header::TE, &HeaderValue::from_static("trailers"))?;
    }
    tell(client, onward.origin, onward.forwarded, &mut |name, value| head.field(name, value))?;
    Ok(head.finish())
}

/// How the client's connection frames a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framing {
    /// HTTP/2: frames.
    Http2,
    /// HTTP/1.1: a length or chunks.
    Http11,
    /// HTTP/1.0: a length or the end of the connection.
    Http10,
}

impl Framing {
    /// What a client of this version understands.
    pub fn of(version: http::Version) -> Self {
        match version {
            http::Version::HTTP_2 => Framing::Http2,
            http::Version::HTTP_10 | http::Version::HTTP_09 => Framing::Http10,
            _ => Framing::Http11,
        }
    }
}

/// The head for the client: the worker's, less what belongs to its hop, with the request id, framed for the client.
/// `exact` says that the body goes through unchanged, so that a length of the worker's holds.
///
/// # Errors
/// When a header cannot be set.
pub fn for_client(
    worker: &ResponseHeader,
    request_id: &str,
    framing: Framing,
    exact: bool,
) -> pingora_core::Result<ResponseHeader> {
    let mut head = HeaderMap::with_capacity(worker.headers.len() + 2);
    let listed = connection_listed(&worker.headers);
    let mut has_length = false;
    for (name, value) in &worker.headers {
        if is_hop_by_hop(name, &listed) || (*name == header::CONTENT_LENGTH && !exact) {
            continue;
        }
        has_length |= *name == header::CONTENT_LENGTH;
        head.try_append(name.clone(), value.clone()).or_err(ErrorType::InvalidHTTPHeader, "too many headers")?;
    }
    let bodiless = worker.status == http::StatusCode::NO_CONTENT || worker.status == http::StatusCode::NOT_MODIFIED;
    if !has_length && !bodiless && framing == Framing::Http11 {
        head.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
    let id = HeaderValue::from_str(request_id).or_err(ErrorType::InvalidHTTPHeader, "a request id")?;
    head.insert(REQUEST_ID, id);
    Ok(response_head(worker.status, head))
}
