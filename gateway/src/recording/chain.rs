//! Block hashes as text.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;

/// Hashes as base64 without padding, 8 bytes each, little-endian.
pub fn encode_blocks(blocks: &[u64]) -> String {
    let bytes: Vec<u8> = blocks.iter().flat_map(|block| block.to_le_bytes()).collect();
    STANDARD_NO_PAD.encode(bytes)
}

/// The hashes in such a text.
///
/// # Errors
/// What is wrong with it.
pub fn decode_blocks(text: &str) -> Result<Vec<u64>, &'static str> {
    let bytes = STANDARD_NO_PAD.decode(text).map_err(|_| "not base64 without padding")?;
    let (whole, rest) = bytes.as_chunks::<8>();
    if !rest.is_empty() {
        return Err("not a whole number of 8-byte hashes");
    }
    Ok(whole.iter().map(|hash| u64::from_le_bytes(*hash)).collect())
}
