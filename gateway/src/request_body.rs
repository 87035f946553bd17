//! Reading the request body to its end, within its limits.

use crate::errors::{Kind, Refusal};
use crate::headers::expects_continue;
use bytes::{Bytes, BytesMut};
use http::header;
use pingora_core::protocols::http::ServerSession;
use std::time::Duration;

/// What a request body may be.
#[derive(Debug, Clone, Copy)]
pub struct BodyLimits {
    /// `limits.body_bytes`.
    pub bytes: usize,
    /// `timeouts.client_body_s`: the longest pause between two pieces.
    pub pause: Duration,
}

/// Reads the whole body. Answers `Expect: 100-continue` first, since nothing else would.
///
/// # Errors
/// 413 over the limit (without reading on), 408 when the client pauses too long, 499 when it left, 400 for a broken body.
pub async fn read(session: &mut ServerSession, limits: BodyLimits) -> Result<Bytes, Refusal> {
    let too_large = || {
        Refusal::new(
            Kind::TooLarge,
            format!("the request body is larger than limits.body_bytes = {} bytes", limits.bytes),
        )
    };
    let declared = session
        .req_header()
        .headers
        .get(header::CONTENT_LENGTH)
        .and_then(|v| v.to_str().ok())
        .and_then(|v| v.parse::<usize>().ok());
    if declared.is_some_and(|n| n > limits.bytes) {
        return Err(too_large());
    }
    if expects_continue(&session.req_header().headers) {
        session.write_continue_response().await.map_err(|e| gone(&e))?;
    }
    let mut first: Option<Bytes> = None;
    let mut joined = BytesMut::new();
    loop {
        let piece = match tokio::time::timeout(limits.pause, session.read_request_body()).await {
            Ok(Ok(Some(piece))) => piece,
            Ok(Ok(None)) => break,
            Ok(Err(error)) => return Err(gone(&error)),
            Err(_) => {
                return Err(Refusal::new(
                    Kind::RequestTimeout,
                    format!("the request body paused longer than timeouts.client_body_s = {}", limits.pause.as_secs()),
                ));
            }
        };
        let so_far = first.as_ref().map_or(joined.len(), Bytes::len);
        if so_far.saturating_add(piece.len()) > limits.bytes {
            return Err(too_large());
        }
        // One piece is kept as it came; only a body in several pieces is joined.
        match (first.take(), joined.is_empty()) {
            (None, true) => first = Some(piece),
            (Some(head), _) => {
                joined.reserve(declared.unwrap_or(0).max(head.len() + piece.len()));
                joined.extend_from_slice(&head);
                joined.extend_from_slice(&piece);
            }
            (None, false) => joined.extend_from_slice(&piece),
        }
    }
    Ok(first.unwrap_or_else(|| joined.freeze()))
}

fn gone(error: &pingora_core::Error) -> Refusal {
    use pingora_core::ErrorType::{ConnectionClosed, ReadError, WriteError};
    match error.etype() {
        ConnectionClosed | ReadError | WriteError => Refusal::new(Kind::ClientGone, "the client left"),
        _ => Refusal::new(Kind::BadRequest, format!("the request body is broken: {}", error.etype().as_str())),
    }
}
