//! Headers that a plugin sees only if it was granted them: they let whoever reads them act for the client.

use std::borrow::Cow;

use crate::abi::{MapType, Status};
use crate::env::HeaderPairs;

/// A set of secret headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SecretHeaders(u8);

/// The secrets first, then those with which plugins of Higress choose a host.
const NAMES: [&str; 8] = [
    "authorization",
    "proxy-authorization",
    "x-api-key",
    "cookie",
    "set-cookie",
    TARGET_HEADERS[0],
    TARGET_HEADERS[1],
    TARGET_HEADERS[2],
];
/// Lengths of the names, as bits.
const LENGTHS: u32 = {
    let (mut lengths, mut at) = (0, 0);
    while at < NAMES.len() {
        lengths |= 1 << NAMES[at].len();
        at += 1;
    }
    lengths
};
const SECRETS: usize = NAMES.len() - TARGET_HEADERS.len();

/// Headers of a request that name the host it is to go to: plugins of Higress' dialect write them for the gateway, and to
/// all others they do not exist.
pub const TARGET_HEADERS: [&str; 3] =
    ["x-gateway-destination-endpoint", "x-envoy-original-dst-host", "x-higress-target-cluster"];

impl SecretHeaders {
    /// All of them.
    pub const ALL: Self = Self((1 << SECRETS) - 1);
    /// None of them.
    pub const NONE: Self = Self(0);

    /// Their names.
    pub fn names() -> &'static [&'static str] {
        NAMES.get(..SECRETS).unwrap_or_default()
    }

    /// The set without the header of this name; the same for a name that is none of them.
    #[must_use]
    pub fn without(self, name: &str) -> Self {
        match Self::names().iter().position(|secret| secret.eq_ignore_ascii_case(name)) {
            Some(at) => Self(self.0 & !(1 << at)),
            None => self,
        }
    }

    /// The set with [`TARGET_HEADERS`].
    #[must_use]
    pub(crate) fn with_targets(self) -> Self {
        Self(self.0 | !Self::ALL.0)
    }

    /// Whether the header of this name is in the set.
    pub fn contains(self, name: &[u8]) -> bool {
        self.0 != 0
            && name.len() < 32
            && LENGTHS & (1 << name.len()) != 0
            && NAMES.iter().enumerate().any(|(at, secret)| {
                self.0 & (1 << at) != 0 && secret.len() == name.len() && secret.as_bytes().eq_ignore_ascii_case(name)
            })
    }

    /// Whether a property of this path shows the value of a header in the set. Segments end with a dot or a NUL.
    pub fn contains_property(self, path: &[u8]) -> bool {
        let end = |b: &u8| matches!(b, b'.' | 0);
        let mut segments = path.splitn(3, end);
        let side = segments.next();
        matches!(side, Some(b"request" | b"response"))
            && matches!(segments.next(), Some(b"headers" | b"trailers"))
            && segments.next().is_some_and(|name| self.contains(name))
    }

    /// Pairs of a map that are in the set.
    pub(crate) fn count(self, map: &dyn HeaderPairs) -> usize {
        let mut count = 0;
        if self.0 != 0 {
            map.for_each(&mut |name, _| count += usize::from(self.contains(name)));
        }
        count
    }

    /// The set as it applies to a map: answers to a plugin's own calls are its own.
    pub(crate) fn of_map(self, map: MapType) -> Self {
        match map {
            MapType::RequestHeaders
            | MapType::RequestTrailers
            | MapType::ResponseHeaders
            | MapType::ResponseTrailers => self,
            _ => Self::NONE,
        }
    }
}

/// A map without the headers of a set.
pub(crate) struct Veiled<'a> {
    pub(crate) map: &'a mut dyn HeaderPairs,
    pub(crate) hidden: SecretHeaders,
}

impl Veiled<'_> {
    fn check(&self, name: &[u8]) -> Result<(), Status> {
        if self.hidden.contains(name) { Err(Status::BadArgument) } else { Ok(()) }
    }
}

impl HeaderPairs for Veiled<'_> {
    fn len(&self) -> usize {
        self.map.len() - self.hidden.count(self.map)
    }

    fn for_each(&self, each: &mut dyn FnMut(&[u8], &[u8])) {
        self.map.for_each(&mut |name, value| {
            if !self.hidden.contains(name) {
                each(name, value);
            }
        });
    }

    fn get(&self, name: &[u8]) -> Option<Cow<'_, [u8]>> {
        if self.hidden.contains(name) { None } else { self.map.get(name) }
    }

    fn add(&mut self, name: &[u8], value: &[u8]) -> Result<(), Status> {
        self.check(name)?;
        self.map.add(name, value)
    }

    fn replace(&mut self, name: &[u8], value: &[u8]) -> Result<(), Status> {
        self.check(name)?;
        self.map.replace(name, value)
    }

    fn remove(&mut self, name: &[u8]) -> Result<(), Status> {
        self.check(name)?;
        self.map.remove(name)
    }

    /// What the guest does not see stays.
    fn replace_all(&mut self, pairs: &[(&[u8], &[u8])]) -> Result<(), Status> {
        if pairs.iter().any(|(name, _)| self.hidden.contains(name)) {
            return Err(Status::BadArgument);
        }
        let mut kept: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        self.map.for_each(&mut |name, value| {
            if self.hidden.contains(name) {
                kept.push((name.to_vec(), value.to_vec()));
            }
        });
        let kept = kept.iter().map(|(name, value)| (name.as_slice(), value.as_slice()));
        let all: Vec<(&[u8], &[u8])> = pairs.iter().copied().chain(kept).collect();
        self.map.replace_all(&all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_properties_are_found_in_any_spelling() {
        let all = SecretHeaders::ALL;
        assert!(all.contains(b"Authorization") && all.contains(b"set-cookie") && !all.contains(b"accept"));
        assert!(!all.without("Cookie").contains(b"cookie") && all.without("accept") == all);
        assert!(!SecretHeaders::NONE.contains(b"cookie"));
        for path in ["request.headers.cookie", "request\0headers\0Cookie", "response\0headers.set-cookie"] {
            assert!(all.contains_property(path.as_bytes()), "{path}");
            assert!(!SecretHeaders::NONE.contains_property(path.as_bytes()));
        }
        for path in ["request.headers.cookie2", "request.cookie", "x.headers.cookie", "request.headers"] {
            assert!(!all.contains_property(path.as_bytes()), "{path}");
        }
    }
}
