//! How inputs are read.

use http::{HeaderMap, HeaderName, HeaderValue};
use turnstile_fleet::route::Route;

/// The first line, as text, and what follows it.
pub(crate) fn first_line(data: &[u8]) -> (String, &[u8]) {
    let (line, rest) = match data.iter().position(|b| *b == b'\n') {
        Some(at) => (&data[..at], &data[at + 1..]),
        None => (data, &data[..0]),
    };
    (String::from_utf8_lossy(line).into_owned(), rest)
}

/// A request as text: the route's name, header lines, an empty line, the body. Lines that are no header are left out.
pub(crate) fn request(data: &[u8]) -> (Route, HeaderMap, &[u8]) {
    let (line, mut rest) = first_line(data);
    let mut headers = HeaderMap::new();
    while !rest.is_empty() {
        let end = rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len());
        let line = &rest[..end];
        rest = rest.get(end + 1..).unwrap_or_default();
        if line.is_empty() {
            break;
        }
        let Some(colon) = line.iter().position(|b| *b == b':') else { continue };
        let value = line[colon + 1..].trim_ascii();
        if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(&line[..colon]), HeaderValue::from_bytes(value)) {
            headers.append(name, value);
        }
    }
    (route(&line), headers, rest)
}

/// The route that a line names; chat if it names none.
pub(crate) fn route(line: &str) -> Route {
    line.split_ascii_whitespace()
        .find_map(|word| Route::ALL.into_iter().find(|r| r.name() == word))
        .unwrap_or(Route::Chat)
}

/// Numbers that depend on the input and nothing else (xorshift64*).
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn of(data: &[u8]) -> Self {
        let hash = data
            .iter()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, b| (hash ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3));
        Self(hash | 1)
    }

    /// A number below `limit`, which is not 0.
    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % limit
    }
}
