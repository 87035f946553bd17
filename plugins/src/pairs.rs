//! The wire form of header maps.
//!
//! Little-endian: u32 count; for each pair u32 name length and u32 value length; then for each pair the name, a NUL,
//! the value, a NUL.

use crate::env::HeaderPairs;

/// Most pairs a guest may hand over at once; the bound other hosts have.
pub const MAX_PAIRS: usize = 1024;
/// Most bytes of a serialized map a guest may hand over.
pub const MAX_BYTES: usize = 1 << 20;

/// A name and a value.
pub type Pair<'a> = (&'a [u8], &'a [u8]);

/// Why bytes are not a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PairsError {
    /// More than [`MAX_BYTES`] bytes or [`MAX_PAIRS`] pairs.
    #[error("header map over {MAX_PAIRS} pairs or {MAX_BYTES} bytes")]
    TooLarge,
    /// Lengths that do not fit the bytes.
    #[error("header map is cut short or its lengths do not fit")]
    Malformed,
}

/// Reads a serialized map. Zero bytes, a single zero byte and a count of zero all mean an empty map.
///
/// # Errors
/// [`PairsError`] for maps that are too large or do not fit their lengths.
pub fn parse(bytes: &[u8]) -> Result<Vec<Pair<'_>>, PairsError> {
    if bytes.is_empty() || bytes == [0] {
        return Ok(Vec::new());
    }
    if bytes.len() > MAX_BYTES {
        return Err(PairsError::TooLarge);
    }
    let (count, mut lengths) = take_u32(bytes)?;
    if count > MAX_PAIRS {
        return Err(PairsError::TooLarge);
    }
    let mut content = lengths.get(count * 8..).ok_or(PairsError::Malformed)?;
    let mut pairs = Vec::with_capacity(count);
    for _ in 0..count {
        let (name_len, rest) = take_u32(lengths)?;
        let (value_len, rest) = take_u32(rest)?;
        lengths = rest;
        let (name, rest) = take_text(content, name_len)?;
        let (value, rest) = take_text(rest, value_len)?;
        content = rest;
        pairs.push((name, value));
    }
    Ok(pairs)
}

fn take_u32(bytes: &[u8]) -> Result<(usize, &[u8]), PairsError> {
    let (head, rest) = bytes.split_first_chunk::<4>().ok_or(PairsError::Malformed)?;
    Ok((u32::from_le_bytes(*head) as usize, rest))
}

fn take_text(bytes: &[u8], len: usize) -> Result<(&[u8], &[u8]), PairsError> {
    let (text, rest) = bytes.split_at_checked(len).ok_or(PairsError::Malformed)?;
    let rest = rest.strip_prefix(&[0]).ok_or(PairsError::Malformed)?;
    Ok((text, rest))
}

/// Writes texts as a map is written: names and values that no header could have.
pub(crate) fn write_texts(texts: &[(String, String)], out: &mut Vec<u8>) {
    out.extend(u32::try_from(texts.len()).unwrap_or(u32::MAX).to_le_bytes());
    for (name, value) in texts {
        out.extend(length(name.as_bytes()));
        out.extend(length(value.as_bytes()));
    }
    for text in texts.iter().flat_map(|(name, value)| [name, value]) {
        out.extend_from_slice(text.as_bytes());
        out.push(0);
    }
}

/// Bytes that [`write`] appends for this map.
pub fn serialized_len(map: &dyn HeaderPairs) -> usize {
    let mut len = 4;
    map.for_each(&mut |name, value| len += 8 + name.len() + 1 + value.len() + 1);
    len
}

/// Appends the wire form of a map.
pub fn write(map: &dyn HeaderPairs, out: &mut Vec<u8>) {
    let mut count = 0_u32;
    let start = out.len();
    out.extend_from_slice(&[0; 4]);
    map.for_each(&mut |name, value| {
        count += 1;
        out.extend_from_slice(&length(name));
        out.extend_from_slice(&length(value));
    });
    if let Some(head) = out.get_mut(start..start + 4) {
        head.copy_from_slice(&count.to_le_bytes());
    }
    map.for_each(&mut |name, value| {
        out.extend_from_slice(name);
        out.push(0);
        out.extend_from_slice(value);
        out.push(0);
    });
}

fn length(text: &[u8]) -> [u8; 4] {
    u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes()
}

/// True if a guest may use this as a header name: a pseudo-header or an HTTP token.
pub fn is_valid_name(name: &[u8]) -> bool {
    let token = name.strip_prefix(b":").unwrap_or(name);
    !token.is_empty() && http::HeaderName::from_bytes(token).is_ok()
}

/// True if a guest may use this as a header value: no CR, LF or NUL, so one value cannot become two headers.
pub fn is_valid_value(value: &[u8]) -> bool {
    !value.iter().any(|byte| matches!(byte, b'\r' | b'\n' | 0))
}

#[cfg(test)]
#[path = "pairs_tests.rs"]
mod tests;
