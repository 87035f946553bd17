//! The request headers as admit and route policies see them: read only, straight from the request, nothing copied.

use crate::policy::facts::RequestHead;
use http::header::HOST;
use std::borrow::Cow;
use turnstile_plugins::{HeaderPairs, Status};

/// A view of a request's head with its pseudo-headers.
pub struct PolicyHeaders(pub RequestHead);

impl PolicyHeaders {
    fn pseudo(&self, name: &[u8]) -> Option<&[u8]> {
        match name {
            b":method" => Some(self.0.method.as_str().as_bytes()),
            b":path" => Some(&self.0.path),
            b":authority" | b"host" => Some(&self.0.authority),
            b":scheme" => Some(b"http"),
            _ => None,
        }
    }
}

impl HeaderPairs for PolicyHeaders {
    fn len(&self) -> usize {
        let hosts = self.0.headers.get_all(HOST).iter().count();
        4 + self.0.headers.len() - hosts
    }

    fn for_each(&self, each: &mut dyn FnMut(&[u8], &[u8])) {
        for name in [&b":method"[..], b":path", b":authority", b":scheme"] {
            each(name, self.pseudo(name).unwrap_or_default());
        }
        for (name, value) in self.0.headers.iter().filter(|(name, _)| **name != HOST) {
            each(name.as_str().as_bytes(), value.as_bytes());
        }
    }

    fn get(&self, name: &[u8]) -> Option<Cow<'_, [u8]>> {
        let name = name.to_ascii_lowercase();
        if let Some(value) = self.pseudo(&name) {
            return Some(Cow::Borrowed(value));
        }
        let name = http::HeaderName::from_bytes(&name).ok()?;
        self.0.headers.get(name).map(|value| Cow::Borrowed(value.as_bytes()))
    }

    fn add(&mut self, _: &[u8], _: &[u8]) -> Result<(), Status> {
        Err(Status::BadArgument)
    }

    fn replace(&mut self, _: &[u8], _: &[u8]) -> Result<(), Status> {
        Err(Status::BadArgument)
    }

    fn remove(&mut self, _: &[u8]) -> Result<(), Status> {
        Err(Status::BadArgument)
    }

    fn replace_all(&mut self, _: &[(&[u8], &[u8])]) -> Result<(), Status> {
        Err(Status::BadArgument)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use bytes::Bytes;
    use http::{HeaderMap, HeaderValue, Method};
    use std::sync::Arc;
    use turnstile_plugins::RequestMap;

    #[test]
    fn policies_read_what_filters_read() {
        let mut fields = HeaderMap::new();
        for (name, value) in [("host", "h"), ("x-a", "1"), ("x-a", "2"), ("x-b", "3")] {
            fields.append(name, HeaderValue::from_static(value));
        }
        let head = RequestHead {
            method: Method::POST,
            path: Bytes::from_static(b"/v1/x?q=1"),
            authority: Bytes::from_static(b"h"),
            headers: Arc::new(fields.clone()),
            request_id: Arc::from("r"),
            peer: None,
            connection: 0,
            protocol: "HTTP/1.1",
            arrived: std::time::SystemTime::UNIX_EPOCH,
        };
        let ours = PolicyHeaders(head);
        let theirs = RequestMap::new(Method::POST, "/v1/x?q=1", "h", fields);
        let pairs = |map: &dyn HeaderPairs| {
            let mut pairs = Vec::new();
            map.for_each(&mut |n, v| pairs.push((n.to_vec(), v.to_vec())));
            assert_eq!(pairs.len(), map.len());
            // The order of names is the map's own affair, the order of one name's values is not.
            pairs.sort_by(|(a, _): &(Vec<u8>, Vec<u8>), (b, _)| a.cmp(b));
            pairs
        };
        assert_eq!(pairs(&ours), pairs(&theirs));
        for name in [&b"X-A"[..], b":path", b"Host", b"x-missing"] {
            assert_eq!(ours.get(name), theirs.get(name), "{}", String::from_utf8_lossy(name));
        }
    }
}
