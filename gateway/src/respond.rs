//! Answers the gateway gives itself: refusals in the shape of the protocol, JSON documents, plain text.

use crate::errors::Refusal;
use bytes::Bytes;
use http::StatusCode;
use http::header;
use pingora_core::protocols::http::ServerSession;
use pingora_http::ResponseHeader;
use turnstile_fleet::route::Protocol;

/// Writes a whole answer.
///
/// # Errors
/// When the client cannot be written to.
pub async fn send(
    session: &mut ServerSession,
    status: u16,
    content_type: &'static str,
    body: Bytes,
    extra: &[(&'static str, &str)],
) -> pingora_core::Result<()> {
    let mut head = ResponseHeader::build(status, Some(4 + extra.len()))?;
    head.insert_header(header::CONTENT_TYPE, content_type)?;
    head.insert_header(header::CONTENT_LENGTH, body.len().to_string())?;
    for (name, value) in extra {
        head.insert_header(*name, *value)?;
    }
    let bodiless = session.req_header().method == http::Method::HEAD;
    session.write_response_header(Box::new(head)).await?;
    if bodiless {
        session.write_response_body(Bytes::new(), true).await
    } else {
        session.write_response_body(body, true).await
    }
}

/// Writes a JSON document.
///
/// # Errors
/// When the client cannot be written to.
pub async fn send_json(
    session: &mut ServerSession,
    status: u16,
    value: &serde_json::Value,
    request_id: &str,
) -> pingora_core::Result<()> {
    let body = Bytes::from(value.to_string());
    send(session, status, "application/json", body, &[("x-request-id", request_id)]).await
}

/// Writes a refusal in the shape of `protocol`. With `close` the connection ends after it: for requests whose body was
/// not read, so that a client still sending is not drained for minutes.
///
/// # Errors
/// When the client cannot be written to.
pub async fn send_refusal(
    session: &mut ServerSession,
    refusal: &Refusal,
    protocol: Protocol,
    request_id: &str,
    close: bool,
) -> pingora_core::Result<()> {
    let retry_after = refusal.retry_after_s.map(|s| s.to_string());
    let mut extra = vec![("x-request-id", request_id)];
    if let Some(seconds) = &retry_after {
        extra.push(("retry-after", seconds));
    }
    extra.extend(refusal.header);
    if close {
        session.set_keepalive(None);
        session.set_close_on_response_before_downstream_finish(true);
    }
    send(session, refusal.status(), "application/json", refusal.body(protocol), &extra).await
}

/// A refusal as HTTP/1.1 bytes, for connections on which no request was read; they end with it.
pub fn raw_refusal(refusal: &Refusal, protocol: Protocol, request_id: &str) -> Vec<u8> {
    let body = refusal.body(protocol);
    let status = refusal.status();
    let words = StatusCode::from_u16(status).ok().and_then(|s| s.canonical_reason()).unwrap_or_default();
    let retry_after = refusal.retry_after_s.map(|s| format!("retry-after: {s}\r\n")).unwrap_or_default();
    let head = format!(
        "HTTP/1.1 {status} {words}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n{retry_after}\
         x-request-id: {request_id}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), &body].concat()
}
