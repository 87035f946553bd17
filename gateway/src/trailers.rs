//! Trailers: fields that stand behind a body (RFC 9110, section 6.5). They come when a message has been routed, framed and
//! authorized already, so what would do any of that means nothing there, and never passes: a hop behind the gateway may merge
//! trailers into the headers.

use http::{HeaderMap, HeaderName, HeaderValue, header};
use pingora_http::RequestHeader;

/// Most fields of a trailer section; of one with more nothing passes.
pub const MAX_FIELDS: usize = 64;
/// The longest trailer section, in bytes of names and values; of a longer one nothing passes.
pub const MAX_BYTES: usize = 64 * 1024;

/// Fields that mean nothing in trailers: framing, routing, the connection, conditions, authentication, and how the body or the
/// answer is to be read.
const MEANINGLESS: [HeaderName; 50] = [
    header::ACCEPT_ENCODING,
    header::AGE,
    header::ALT_SVC,
    header::AUTHORIZATION,
    header::CACHE_CONTROL,
    header::CONNECTION,
    header::CONTENT_DISPOSITION,
    header::CONTENT_ENCODING,
    header::CONTENT_LENGTH,
    header::CONTENT_LOCATION,
    header::CONTENT_RANGE,
    header::CONTENT_SECURITY_POLICY,
    header::CONTENT_TYPE,
    header::COOKIE,
    header::DATE,
    header::EXPECT,
    header::EXPIRES,
    header::FORWARDED,
    header::HOST,
    header::IF_MATCH,
    header::IF_MODIFIED_SINCE,
    header::IF_NONE_MATCH,
    header::IF_RANGE,
    header::IF_UNMODIFIED_SINCE,
    header::LOCATION,
    header::MAX_FORWARDS,
    header::ORIGIN,
    header::PRAGMA,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::RANGE,
    header::RETRY_AFTER,
    header::SEC_WEBSOCKET_ACCEPT,
    header::SEC_WEBSOCKET_KEY,
    header::SET_COOKIE,
    header::STRICT_TRANSPORT_SECURITY,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::VARY,
    header::VIA,
    header::WARNING,
    header::WWW_AUTHENTICATE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("x-api-key"),
    HeaderName::from_static("x-http-method-override"),
    HeaderName::from_static("x-real-ip"),
    HeaderName::from_static("x-request-id"),
];
/// How the names of such fields begin: what a proxy says of a client, what browsers are allowed, what the gateway itself says.
const MEANINGLESS_PREFIXES: [&str; 3] = ["x-forwarded-", "access-control-", "x-turnstile-"];

/// The trailers of a request over HTTP/2, kept in the extensions of its head once the body was read to its end.
#[derive(Debug, Clone)]
pub struct RequestTrailers(pub HeaderMap);

impl RequestTrailers {
    /// Those of a request.
    pub fn of(head: &RequestHeader) -> Option<HeaderMap> {
        head.extensions.get::<Self>().map(|trailers| trailers.0.clone())
    }
}

fn is_meaningless(name: &HeaderName) -> bool {
    MEANINGLESS.contains(name) || MEANINGLESS_PREFIXES.iter().any(|prefix| name.as_str().starts_with(prefix))
}

/// What may pass of a trailer section: nothing if it is too large.
pub fn passing(trailers: HeaderMap) -> HeaderMap {
    let bytes: usize = trailers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    if trailers.len() > MAX_FIELDS || bytes > MAX_BYTES {
        tracing::debug!(fields = trailers.len(), bytes, "a trailer section is too large to pass, and was dropped");
        return HeaderMap::new();
    }
    if !trailers.keys().any(is_meaningless) {
        return trailers;
    }
    let mut passing = HeaderMap::with_capacity(trailers.len());
    for (name, value) in trailers.iter().filter(|(name, _)| !is_meaningless(name)) {
        passing.append(name.clone(), value.clone());
    }
    passing
}

/// Whether whoever sent these headers takes trailers: `TE: trailers`.
pub fn are_taken(headers: &HeaderMap) -> bool {
    let mut codings =
        headers.get_all(header::TE).iter().filter_map(|value| value.to_str().ok()).flat_map(|v| v.split(','));
    codings.any(|coding| coding.split(';').next().is_some_and(|name| name.trim().eq_ignore_ascii_case("trailers")))
}

/// As they stand behind the last chunk of an HTTP/1.1 body, less the empty line.
pub fn lines(trailers: &HeaderMap) -> Vec<u8> {
    let mut lines = Vec::new();
    for (name, value) in trailers {
        for part in [name.as_str().as_bytes(), b": ", HeaderValue::as_bytes(value), b"\r\n"] {
            lines.extend_from_slice(part);
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn map(fields: &[(&str, &str)]) -> HeaderMap {
        fields.iter().map(|(n, v)| (n.parse::<HeaderName>().unwrap(), v.parse::<HeaderValue>().unwrap())).collect()
    }

    #[test]
    fn what_frames_routes_or_authorizes_never_passes() {
        let all = map(&[
            ("x-checksum", "abc"),
            ("grpc-status", "0"),
            ("content-length", "5"),
            ("transfer-encoding", "chunked"),
            ("host", "other"),
            ("authorization", "Bearer x"),
            ("proxy-authorization", "Basic x"),
            ("x-api-key", "x"),
            ("cookie", "a=b"),
            ("set-cookie", "a=b"),
            ("te", "trailers"),
            ("trailer", "x-a"),
            ("connection", "close"),
            ("keep-alive", "5"),
            ("upgrade", "h2c"),
            ("content-type", "text/html"),
            ("content-encoding", "gzip"),
            ("location", "/other"),
            ("x-forwarded-for", "1.1.1.1"),
            ("x-forwarded-host", "other"),
            ("access-control-allow-origin", "*"),
            ("x-turnstile-worker", "a"),
            ("x-request-id", "1"),
        ]);
        assert_eq!(passing(all), map(&[("x-checksum", "abc"), ("grpc-status", "0")]));
    }

    #[test]
    fn all_values_of_a_field_pass() {
        let mut both = map(&[("x-a", "1"), ("host", "x")]);
        both.append("x-a", "2".parse().unwrap());
        let passed = passing(both);
        assert_eq!(passed.get_all("x-a").iter().collect::<Vec<_>>(), ["1", "2"]);
        assert_eq!(lines(&passed), b"x-a: 1\r\nx-a: 2\r\n");
    }

    #[test]
    fn a_section_that_is_too_large_does_not_pass() {
        let many: HeaderMap = (0..=MAX_FIELDS)
            .map(|n| (format!("x-{n}").parse::<HeaderName>().unwrap(), HeaderValue::from_static("a")))
            .collect();
        assert!(passing(many).is_empty());
        let long = "a".repeat(MAX_BYTES);
        assert!(passing(map(&[("x-a", &long)])).is_empty());
        let fits = "a".repeat(MAX_BYTES - 3);
        assert_eq!(passing(map(&[("x-a", &fits)])).len(), 1);
    }

    #[test]
    fn te_says_who_takes_them() {
        for taken in ["trailers", "Trailers", "deflate;q=0.5, trailers", "trailers;q=1"] {
            assert!(are_taken(&map(&[("te", taken)])), "{taken}");
        }
        for not in ["", "gzip", "trailersx", "x-trailers"] {
            assert!(!are_taken(&map(&[("te", not)])), "{not}");
        }
        assert!(!are_taken(&HeaderMap::new()));
    }
}
