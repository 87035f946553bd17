//! What is checked of every request head before anything is done for it.
//!
//! pingora refuses what no HTTP parser can read. The rest of what two parsers might read differently is refused here, since a
//! gateway shares connections with workers and must never disagree with anybody about where a request ends.

use crate::errors::{Kind, Refusal};
use http::{Method, Version, header};
use pingora_core::protocols::http::ServerSession;
use pingora_core::protocols::http::authority::{RawTargetAuthority, raw_target_authority};
use pingora_http::RequestHeader;
use turnstile_config::Limits;

/// Checks a head. Refusals that concern framing end the connection.
///
/// # Errors
/// What is wrong with it, naming the header or the option.
pub fn check(client: &ServerSession, limits: &Limits) -> Result<(), Refusal> {
    let head = client.req_header();
    if let ServerSession::H1(session) = client {
        check_framing(head, &session.get_headers_raw_bytes())?;
    }
    check_size(head, limits)?;
    if head.method == Method::CONNECT {
        return Err(Refusal::new(Kind::MethodNotAllowed, "this gateway opens no tunnels (CONNECT)").closing());
    }
    check_expectation(head)
}

/// Framing of an HTTP/1 message. `raw` is the head as it came.
fn check_framing(head: &RequestHeader, raw: &[u8]) -> Result<(), Refusal> {
    let ambiguous = |why: &str| Err(Refusal::new(Kind::BadRequest, why).closing());
    let target = head.raw_path();
    let absolute = matches!(raw_target_authority(target), RawTargetAuthority::Absolute { .. });
    if !target.starts_with(b"/") && target != b"*" && !absolute && head.method != Method::CONNECT {
        return ambiguous("the request target is neither a path nor a URL");
    }
    if memchr::memchr_iter(b'\n', raw).any(|at| at.checked_sub(1).and_then(|before| raw.get(before)) != Some(&b'\r')) {
        return ambiguous("a line of the request head ends without a carriage return");
    }
    if head.version == Version::HTTP_11 && !head.headers.contains_key(header::HOST) {
        return ambiguous("the request has no Host header");
    }
    let mut lengths = head.headers.get_all(header::CONTENT_LENGTH).iter();
    if let Some(length) = lengths.next()
        && (lengths.next().is_some() || !length.as_bytes().iter().all(u8::is_ascii_digit))
    {
        return ambiguous("the request has more than one Content-Length");
    }
    let mut codings = head.headers.get_all(header::TRANSFER_ENCODING).iter();
    if let Some(coding) = codings.next() {
        if codings.next().is_some() || !coding.as_bytes().eq_ignore_ascii_case(b"chunked") {
            return ambiguous("the only Transfer-Encoding taken is chunked, once");
        }
        // pingora has dropped the length, so the head is looked at as it came.
        if has_field(raw, b"content-length") {
            return ambiguous("the request has both Content-Length and Transfer-Encoding");
        }
    }
    Ok(())
}

fn has_field(raw: &[u8], name: &[u8]) -> bool {
    raw.split(|b| *b == b'\n').any(|line| {
        let (field, rest) = line.split_at_checked(name.len()).unwrap_or_default();
        field.eq_ignore_ascii_case(name) && rest.first() == Some(&b':')
    })
}

fn check_size(head: &RequestHeader, limits: &Limits) -> Result<(), Refusal> {
    let most = limits.uri_bytes.as_usize();
    if head.raw_path().len() > most {
        let message = format!("the request target is longer than limits.uri_bytes = {most} bytes");
        return Err(Refusal::new(Kind::UriTooLong, message));
    }
    let most = usize::try_from(limits.header_count).unwrap_or(usize::MAX);
    if head.headers.len() > most {
        let message = format!("the request has more header fields than limits.header_count = {most}");
        return Err(Refusal::new(Kind::HeaderTooLarge, message));
    }
    let most = limits.header_bytes.as_usize();
    let size: usize = head.headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    if size > most {
        let message = format!("the request headers are larger than limits.header_bytes = {most} bytes");
        return Err(Refusal::new(Kind::HeaderTooLarge, message));
    }
    Ok(())
}

/// The only expectation there is. HTTP/1.0 knows none, so its clients are not held to one.
fn check_expectation(head: &RequestHeader) -> Result<(), Refusal> {
    let met = |value: &http::HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"100-continue");
    if head.version == Version::HTTP_10 || head.headers.get_all(header::EXPECT).iter().all(met) {
        return Ok(());
    }
    Err(Refusal::new(Kind::ExpectationFailed, "the only Expect that is met is 100-continue"))
}
