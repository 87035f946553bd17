//! Headers that describe one connection, and stay on it.

use http::{HeaderMap, HeaderName, Response, StatusCode, header};
use pingora_http::ResponseHeader;

/// Headers that describe one connection (RFC 9110, section 7.6.1), whatever `Connection` says.
const HOP_BY_HOP: [HeaderName; 7] = [
    header::CONNECTION,
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];
const HOP_BY_HOP_NAMES: [&str; 2] = ["keep-alive", "proxy-connection"];

/// True for a header that belongs to one hop. `connection` is the list from [`connection_listed`].
pub fn is_hop_by_hop(name: &HeaderName, connection: &[HeaderName]) -> bool {
    HOP_BY_HOP.contains(name) || HOP_BY_HOP_NAMES.contains(&name.as_str()) || connection.contains(name)
}

/// Takes the headers that belong to one hop out of a message.
pub fn remove_hop_by_hop(headers: &mut HeaderMap, connection: &[HeaderName]) {
    HOP_BY_HOP.iter().chain(connection).for_each(|name| drop(headers.remove(name)));
    HOP_BY_HOP_NAMES.iter().for_each(|name| drop(headers.remove(*name)));
}

/// The head of an answer, as pingora has it. Its own ways to add a field read the name anew each time.
pub fn response_head(status: StatusCode, headers: HeaderMap) -> ResponseHeader {
    let mut parts = Response::new(()).into_parts().0;
    (parts.status, parts.headers) = (status, headers);
    ResponseHeader::from(parts)
}

/// The header names that `Connection` lists, beyond the fixed ones.
pub fn connection_listed(headers: &HeaderMap) -> Vec<HeaderName> {
    headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(str::trim)
        .filter(|name| !name.eq_ignore_ascii_case("close") && !name.eq_ignore_ascii_case("keep-alive"))
        .filter_map(|name| HeaderName::try_from(name).ok())
        .collect()
}

/// True when the client waits for `100 Continue` before it sends its body.
pub fn expects_continue(headers: &HeaderMap) -> bool {
    headers.get(header::EXPECT).is_some_and(|v| v.as_bytes().eq_ignore_ascii_case(b"100-continue"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use http::HeaderValue;

    #[test]
    fn headers_named_by_connection_belong_to_the_hop() {
        let mut headers = HeaderMap::new();
        headers.append("connection", HeaderValue::from_static("keep-alive, X-Private"));
        headers.append("connection", HeaderValue::from_static("close"));
        let listed = connection_listed(&headers);
        assert_eq!(listed, vec![HeaderName::from_static("x-private")]);
        assert!(is_hop_by_hop(&HeaderName::from_static("x-private"), &listed));
        assert!(is_hop_by_hop(&HeaderName::from_static("keep-alive"), &[]));
        assert!(!is_hop_by_hop(&HeaderName::from_static("content-type"), &listed));
    }
}
