//! The public Mooncake trace: one JSON object a line, `timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids`:
//! numbers of blocks of 512 tokens, equal where block and everything before it are equal.

use super::blocks::{Blocks, NONE};
use super::log::{Entry, MAX_TOKENS, Wrong};
use crate::recording::line::TurnLine;
use serde::Deserialize;
use turnstile_fleet::cost::mix;

/// Tokens of a block of the trace.
pub const BLOCK_TOKENS: u64 = 512;
/// Bytes that stand for a token: the trace knows none.
pub const BYTES_PER_TOKEN: u64 = 4;

#[derive(Deserialize)]
struct Row {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

/// Whether a line is a row of such a trace.
pub fn is_row(text: &[u8]) -> bool {
    serde_json::from_slice::<Row>(text).is_ok()
}

/// Reads a row.
pub fn entry(text: &[u8], blocks: &mut Blocks) -> Result<Entry, Wrong> {
    let row: Row =
        serde_json::from_slice(text).map_err(|e| Wrong::Syntax(format!("not a row of a Mooncake trace: {e}")))?;
    let wrong = |what: String| Err(Wrong::Content(what));
    // A hundred years.
    if !(row.timestamp.is_finite() && (0.0..=3.2e12).contains(&row.timestamp)) {
        return wrong("timestamp: not a time in ms".into());
    }
    if row.input_length == 0 || row.input_length > MAX_TOKENS || row.output_length > MAX_TOKENS {
        return wrong(format!("input_length or output_length: expected 1 to {MAX_TOKENS} tokens"));
    }
    if row.hash_ids.len() as u64 != row.input_length.div_ceil(BLOCK_TOKENS) {
        return wrong(format!(
            "hash_ids: {} blocks of {BLOCK_TOKENS} tokens cannot be {} tokens",
            row.hash_ids.len(),
            row.input_length
        ));
    }
    // The last block may be a part of one; as in prompts of our own, a part has no hash.
    let whole = usize::try_from(row.input_length / BLOCK_TOKENS).unwrap_or(usize::MAX);
    let ids = row.hash_ids.iter().take(whole);
    let (leaf, _) = ids.fold((NONE, 0), |(parent, hash), id| {
        let hash = mix(hash ^ mix(*id));
        (blocks.child(parent, hash), hash)
    });
    let line = TurnLine {
        // `as` saturates, and the value was checked.
        ts: row.timestamp as u64,
        route: "completions".into(),
        stream: true,
        tenant: "0000000000000000".into(),
        agent: "other".into(),
        source: "none".into(),
        body_bytes: row.input_length * BYTES_PER_TOKEN,
        prompt_bytes: row.input_length * BYTES_PER_TOKEN,
        block_bytes: u32::try_from(BLOCK_TOKENS * BYTES_PER_TOKEN).unwrap_or(u32::MAX),
        affinity: row.hash_ids.first().map(|id| format!("{:016x}", mix(*id))),
        prompt_tokens: Some(row.input_length),
        completion_tokens: Some(row.output_length.max(1)),
        status: 200,
        end: "finished".into(),
        ..TurnLine::default()
    };
    Ok(Entry { line, leaf })
}
