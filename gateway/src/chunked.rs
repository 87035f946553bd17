//! The framing of a chunked body (RFC 9112, section 7.1), followed byte by byte.
//!
//! The parser above is more lenient than the grammar: it takes a line without a size for the last chunk, and a line feed for
//! part of an extension. Whoever stands before the gateway may read such a body otherwise, and see the next request in a
//! different place; so nothing but the grammar passes here.

use crate::trailers;
use http::{HeaderMap, HeaderName, HeaderValue};

/// The longest extension of one chunk that is skipped.
const EXTENSION_LIMIT: usize = 4096;
/// The longest trailer section.
const TRAILERS_LIMIT: usize = trailers::MAX_BYTES;
/// Digits of a size: what they can say stays below 2^60.
const SIZE_DIGITS: u32 = 15;

/// The body breaks its framing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BadChunk;

/// Where in a body the next byte stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    Size {
        digits: u32,
        value: u64,
    },
    /// White space behind a size, before an extension or the end of the line.
    Space {
        value: u64,
    },
    Extension {
        value: u64,
        length: usize,
    },
    SizeEnd {
        value: u64,
    },
    Data {
        left: u64,
    },
    DataReturn,
    DataEnd,
    TrailerStart,
    Trailer,
    TrailerEnd,
    LastEnd,
    Done,
}

/// Follows one body.
#[derive(Debug, Clone)]
pub struct Chunks {
    at: At,
    /// What stood behind the last chunk, to the end of the empty line.
    trailers: Vec<u8>,
}

impl Default for Chunks {
    fn default() -> Self {
        Self { at: At::Size { digits: 0, value: 0 }, trailers: Vec::new() }
    }
}

impl Chunks {
    /// How many of these bytes belong to the body; what follows them is the next request.
    ///
    /// # Errors
    /// When they break the framing.
    pub fn follow(&mut self, bytes: &[u8]) -> Result<usize, BadChunk> {
        let mut used = 0;
        while let Some(byte) = bytes.get(used) {
            match self.at {
                At::Done => break,
                At::Data { left } => {
                    let here = u64::try_from(bytes.len() - used).unwrap_or(u64::MAX).min(left);
                    used += usize::try_from(here).unwrap_or(usize::MAX);
                    self.at = if here == left { At::DataReturn } else { At::Data { left: left - here } };
                }
                at => {
                    self.at = next(at, *byte)?;
                    used += 1;
                    if matches!(at, At::TrailerStart | At::Trailer | At::TrailerEnd | At::LastEnd) {
                        if self.trailers.len() >= TRAILERS_LIMIT {
                            return Err(BadChunk);
                        }
                        self.trailers.push(*byte);
                    }
                }
            }
        }
        Ok(used)
    }
}

impl Chunks {
    /// Whether the body was followed to its end.
    pub fn is_done(&self) -> bool {
        self.at == At::Done
    }

    /// The fields of the trailer section that may pass, once the body was followed to its end.
    pub fn trailers(&self) -> HeaderMap {
        let mut fields = [httparse::EMPTY_HEADER; trailers::MAX_FIELDS];
        let mut map = HeaderMap::new();
        if self.at != At::Done {
            return map;
        }
        let Ok(httparse::Status::Complete((_, fields))) = httparse::parse_headers(&self.trailers, &mut fields) else {
            return map;
        };
        for field in fields {
            if let (Ok(name), Ok(value)) =
                (HeaderName::from_bytes(field.name.as_bytes()), HeaderValue::from_bytes(field.value))
            {
                map.append(name, value);
            }
        }
        trailers::passing(map)
    }
}

fn next(at: At, byte: u8) -> Result<At, BadChunk> {
    Ok(match (at, byte) {
        (At::Size { digits: 1.., value }, b'\r') | (At::Space { value } | At::Extension { value, .. }, b'\r') => {
            At::SizeEnd { value }
        }
        (At::Size { digits: 1.., value } | At::Space { value }, b';') => At::Extension { value, length: 0 },
        (At::Size { digits: 1.., value } | At::Space { value }, b' ' | b'\t') => At::Space { value },
        (At::Size { digits, value }, _) if digits < SIZE_DIGITS => {
            let digit = char::from(byte).to_digit(16).ok_or(BadChunk)?;
            At::Size { digits: digits + 1, value: value * 16 + u64::from(digit) }
        }
        (At::Extension { value, length }, _) if is_text(byte) && length < EXTENSION_LIMIT => {
            At::Extension { value, length: length + 1 }
        }
        (At::SizeEnd { value: 0 }, b'\n') => At::TrailerStart,
        (At::SizeEnd { value }, b'\n') => At::Data { left: value },
        (At::DataReturn, b'\r') => At::DataEnd,
        (At::DataEnd, b'\n') => At::Size { digits: 0, value: 0 },
        (At::TrailerStart, b'\r') => At::LastEnd,
        (At::Trailer, b'\r') => At::TrailerEnd,
        (At::TrailerStart | At::Trailer, _) if is_text(byte) => At::Trailer,
        (At::TrailerEnd, b'\n') => At::TrailerStart,
        (At::LastEnd, b'\n') => At::Done,
        _ => return Err(BadChunk),
    })
}

/// What may stand in a line.
fn is_text(byte: u8) -> bool {
    byte == b'\t' || (byte >= b' ' && byte != 0x7f)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// Follows the bytes in pieces of every size; all have to agree.
    fn follow(bytes: &[u8]) -> Result<usize, BadChunk> {
        let whole = Chunks::default().follow(bytes);
        for size in 1..bytes.len() {
            let mut chunks = Chunks::default();
            let parts: Result<Vec<usize>, BadChunk> = bytes.chunks(size).map(|part| chunks.follow(part)).collect();
            assert_eq!(parts.map(|parts| parts.iter().sum()), whole, "in pieces of {size}");
        }
        whole
    }

    #[test]
    fn a_body_ends_where_its_last_chunk_ends() {
        for body in [
            "0\r\n\r\n",
            "5\r\nhello\r\n0\r\n\r\n",
            "5\r\nhello\r\n6\r\n world\r\n000\r\n\r\n",
            "00005;a=b;c=\"d e\"\r\nhello\r\n0;last\r\n\r\n",
            "5 ;a\r\nhello\r\n0\t\r\n\r\n",
            "A\r\n0\r\n\r\n0\r\n\r\n\r\n0\r\n\r\n",
            "0\r\nX-A: b\r\nX-C:\td\u{e9}\r\n\r\n",
        ] {
            assert_eq!(follow(format!("{body}GET / HTTP/1.1\r\n").as_bytes()), Ok(body.len()), "{body:?}");
        }
    }

    #[test]
    fn trailers_are_kept_less_those_that_mean_nothing() {
        let body = b"2\r\nhi\r\n0\r\nX-A: b\r\nx-a: c\r\nContent-Length: 5\r\nX-Raw: \xff\r\n\r\n";
        for size in 1..=body.len() {
            let mut chunks = Chunks::default();
            for part in body.chunks(size) {
                assert!(chunks.trailers().is_empty(), "not before the end");
                chunks.follow(part).unwrap();
            }
            let trailers = chunks.trailers();
            let all: Vec<_> = trailers.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
            assert_eq!(all, [("x-a", &b"b"[..]), ("x-a", b"c"), ("x-raw", b"\xff")]);
        }
        let mut endless = Chunks::default();
        endless.follow(b"0\r\n").unwrap();
        let line = format!("x: {}\r\n", "a".repeat(1000));
        assert_eq!((0..100).find_map(|_| endless.follow(line.as_bytes()).err()), Some(BadChunk));
    }

    #[test]
    fn what_two_parsers_may_read_differently_is_broken() {
        for body in [
            "\r\n\r\n",
            ";a\r\n\r\n",
            " 5\r\nhello\r\n0\r\n\r\n",
            " \r\n\r\n",
            "0x5\r\nhello\r\n0\r\n\r\n",
            "+5\r\nhello\r\n0\r\n\r\n",
            "5 5\r\nhello\r\n0\r\n\r\n",
            "5\nhello\r\n0\r\n\r\n",
            "5\rhello\r\n0\r\n\r\n",
            "5;a\nhello\r\n0\r\n\r\n",
            "5;a\0\r\nhello\r\n0\r\n\r\n",
            "5\r\nhello\n0\r\n\r\n",
            "5\r\nhello0\r\n\r\n",
            "4\r\nhello\r\n0\r\n\r\n",
            "0\n\r\n",
            "0\r\n\n",
            "0\r\nX-A: b\n\r\n",
            "0\r\nX-A: b\rc\r\n\r\n",
            "1000000000000000\r\n",
            "0000000000000005\r\nhello",
        ] {
            assert_eq!(follow(body.as_bytes()), Err(BadChunk), "{body:?}");
        }
        assert_eq!(follow(format!("5;{}\r\n", "a".repeat(EXTENSION_LIMIT + 1)).as_bytes()), Err(BadChunk));
    }
}
