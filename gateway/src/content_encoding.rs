//! Decoding request bodies that came with a `Content-Encoding`, within the bound of a decoded body.

use crate::errors::{Kind, Refusal};
use brotli::enc::StandardAlloc;
use brotli::{BrotliDecompressStream, BrotliResult, BrotliState};
use bytes::Bytes;
use flate2::bufread::{DeflateDecoder, GzDecoder, ZlibDecoder};
use http::{HeaderMap, header};
use std::io::Read;
use std::sync::LazyLock;
use tokio::sync::Semaphore;

/// What is decoded, as `Accept-Encoding` says it.
pub const ACCEPTED: &str = "gzip, deflate, br, zstd";

/// The largest window of a zstd frame, as RFC 9659 bounds it for HTTP: 8 MiB.
const ZSTD_WINDOW_LOG: u32 = 23;
/// Room that is made at a time for what brotli decodes.
const PIECE: usize = 64 * 1024;

/// Bodies that are decoded at a time: as many as there are cores, since decoding only computes.
static DECODING: LazyLock<Semaphore> =
    LazyLock::new(|| Semaphore::new(std::thread::available_parallelism().map_or(1, usize::from)));

/// A content coding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Coding {
    /// gzip (RFC 1952).
    Gzip,
    /// deflate: zlib (RFC 1950), or the bare deflate (RFC 1951) that some clients send by that name.
    Deflate,
    /// Brotli (RFC 7932).
    Brotli,
    /// zstd (RFC 8878).
    Zstd,
}

/// Why a body could not be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Undecoded {
    /// It is larger than it may be.
    TooLarge,
    /// It is cut short, damaged, or followed by something else.
    Broken,
}

// === impl Coding ===

impl Coding {
    /// The coding of a request body; none when it came as it is.
    ///
    /// # Errors
    /// 415 for a coding that is not decoded, for several one upon the other, and for any when `enabled` is false.
    pub fn of(headers: &HeaderMap, enabled: bool) -> Result<Option<Self>, Refusal> {
        let values = headers.get_all(header::CONTENT_ENCODING).iter();
        let mut codings = values
            .flat_map(|value| value.as_bytes().split(|b| *b == b','))
            .map(|coding| String::from_utf8_lossy(coding.trim_ascii()).to_ascii_lowercase())
            .filter(|coding| !coding.is_empty() && coding != "identity");
        let Some(coding) = codings.next() else { return Ok(None) };
        let refuse = |why: String| Refusal::new(Kind::UnsupportedEncoding, why);
        if !enabled {
            return Err(refuse(
                "encoded request bodies are switched off (limits.body_decoding): Content-Encoding must be absent"
                    .into(),
            )
            .with_header("accept-encoding", "identity"));
        }
        let accepted = |refusal: Refusal| Err(refusal.with_header("accept-encoding", ACCEPTED));
        if codings.next().is_some() {
            return accepted(refuse(format!("Content-Encoding may name one coding ({ACCEPTED}), not several")));
        }
        Ok(Some(match coding.as_str() {
            "gzip" | "x-gzip" => Self::Gzip,
            "deflate" => Self::Deflate,
            "br" => Self::Brotli,
            "zstd" => Self::Zstd,
            other => {
                let shown: String = other.chars().take(32).collect();
                return accepted(refuse(format!("Content-Encoding {shown:?} is not one of {ACCEPTED}")));
            }
        }))
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Deflate => "deflate",
            Self::Brotli => "br",
            Self::Zstd => "zstd",
        }
    }

    /// Decodes a whole body of at most `limit` bytes. Stops as soon as there are more.
    ///
    /// # Errors
    /// See [`Undecoded`].
    pub fn decode(self, body: &[u8], limit: usize) -> Result<Vec<u8>, Undecoded> {
        match self {
            Self::Gzip => gzip(body, limit),
            Self::Deflate => deflate(body, limit),
            Self::Brotli => brotli(body, limit),
            Self::Zstd => {
                let mut decoder = zstd::stream::read::Decoder::with_buffer(body).map_err(|_| Undecoded::Broken)?;
                decoder.window_log_max(ZSTD_WINDOW_LOG).map_err(|_| Undecoded::Broken)?;
                let mut out = Vec::new();
                read_within(&mut decoder, &mut out, limit)?;
                Ok(out)
            }
        }
    }
}

/// Decodes off the threads that serve requests.
///
/// # Errors
/// See [`Undecoded`].
pub async fn decode(coding: Coding, body: Bytes, limit: usize) -> Result<Bytes, Undecoded> {
    let _turn = DECODING.acquire().await.map_err(|_| Undecoded::Broken)?;
    let decoded = tokio::task::spawn_blocking(move || coding.decode(&body, limit)).await;
    decoded.unwrap_or(Err(Undecoded::Broken)).map(Bytes::from)
}

/// Reads to the end, as long as `out` stays within `limit`.
fn read_within(reader: &mut impl Read, out: &mut Vec<u8>, limit: usize) -> Result<(), Undecoded> {
    let room = (limit - out.len()) as u64;
    // One byte more tells whether there is more.
    reader.take(room + 1).read_to_end(out).map_err(|_| Undecoded::Broken)?;
    if out.len() > limit { Err(Undecoded::TooLarge) } else { Ok(()) }
}

/// A gzip body may be several members in a row.
fn gzip(body: &[u8], limit: usize) -> Result<Vec<u8>, Undecoded> {
    let mut out = Vec::new();
    let mut rest = body;
    loop {
        let mut member = GzDecoder::new(rest);
        read_within(&mut member, &mut out, limit)?;
        rest = member.into_inner();
        if rest.is_empty() {
            return Ok(out);
        }
    }
}

fn deflate(body: &[u8], limit: usize) -> Result<Vec<u8>, Undecoded> {
    let mut out = Vec::new();
    // The two bytes before a zlib stream: method 8, and a number of which 31 is a divisor.
    let zlib = matches!(body, [first, second, ..]
        if first & 0x0f == 8 && u16::from_be_bytes([*first, *second]).is_multiple_of(31));
    let rest = if zlib {
        let mut decoder = ZlibDecoder::new(body);
        read_within(&mut decoder, &mut out, limit)?;
        decoder.into_inner()
    } else {
        let mut decoder = DeflateDecoder::new(body);
        read_within(&mut decoder, &mut out, limit)?;
        decoder.into_inner()
    };
    if rest.is_empty() { Ok(out) } else { Err(Undecoded::Broken) }
}

/// The reader of the brotli crate does not tell what it left, so its stream is driven here.
fn brotli(body: &[u8], limit: usize) -> Result<Vec<u8>, Undecoded> {
    let (u8s, u32s, codes) = (StandardAlloc::default(), StandardAlloc::default(), StandardAlloc::default());
    // Strict: without the large windows that are no part of the content coding.
    let mut state = BrotliState::new_strict(u8s, u32s, codes);
    let mut out = Vec::new();
    let mut piece = vec![0u8; PIECE];
    let (mut left, mut at, mut total) = (body.len(), 0, 0);
    loop {
        let (mut room, mut filled) = (piece.len(), 0);
        let result = BrotliDecompressStream(
            &mut left,
            &mut at,
            body,
            &mut room,
            &mut filled,
            &mut piece,
            &mut total,
            &mut state,
        );
        out.extend_from_slice(piece.get(..filled).unwrap_or_default());
        if out.len() > limit {
            return Err(Undecoded::TooLarge);
        }
        match result {
            BrotliResult::ResultSuccess if left == 0 => return Ok(out),
            BrotliResult::NeedsMoreOutput => {}
            _ => return Err(Undecoded::Broken),
        }
    }
}

#[cfg(test)]
#[path = "content_encoding_tests.rs"]
mod tests;
