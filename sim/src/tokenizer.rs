//! A deterministic, reversible tokenizer.
//!
//! Text is cut into pieces (a word with the space before it, a run of blanks, a run of signs), and each piece into
//! tokens of one to four ASCII characters; other bytes are one token each. The id holds the characters themselves, so
//! there is no vocabulary, equal text gives equal ids everywhere, and every id can be turned back into text:
//!
//! | ids | token |
//! | --- | --- |
//! | 0 to 255 | one byte |
//! | 256 to 263 | the markers of [`Special`] |
//! | from 512 | 2, 3 or 4 ASCII characters, 7 bits each |
//!
//! English prose takes about one token for each 3.5 characters. A prefix of a token sequence is the token sequence of the
//! prefix text, and markers always end a piece, so a conversation that grows by messages grows by tokens too.

/// Token id, below 2^29.
pub type TokenId = u32;

/// The markers of the chat format, one token each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// `<|endoftext|>`
    EndOfText,
    /// `<|im_start|>`
    ImStart,
    /// `<|im_end|>`, the end of an output
    ImEnd,
    /// `<tool_call>`
    ToolStart,
    /// `</tool_call>`
    ToolEnd,
    /// `<think>`
    ThinkStart,
    /// `</think>`
    ThinkEnd,
}

const SPECIALS: [(Special, &str); 7] = [
    (Special::EndOfText, "<|endoftext|>"),
    (Special::ImStart, "<|im_start|>"),
    (Special::ImEnd, "<|im_end|>"),
    (Special::ToolStart, "<tool_call>"),
    (Special::ToolEnd, "</tool_call>"),
    (Special::ThinkStart, "<think>"),
    (Special::ThinkEnd, "</think>"),
];

const FIRST_SPECIAL: TokenId = 256;
const PAIRS: TokenId = 512;
const TRIPLES: TokenId = PAIRS + (1 << 14);
const QUADS: TokenId = TRIPLES + (1 << 21);
const END: TokenId = QUADS + (1 << 28);

impl Special {
    /// The token of this marker.
    pub fn id(self) -> TokenId {
        FIRST_SPECIAL + self as TokenId
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Word,
    Blank,
    Sign,
    Other,
}

fn class(byte: u8) -> Class {
    match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' => Class::Word,
        b' ' | b'\n' | b'\r' | b'\t' => Class::Blank,
        0..=127 => Class::Sign,
        _ => Class::Other,
    }
}

/// The tokens of `text`; markers in it become their single token.
pub fn encode(text: &str) -> Vec<TokenId> {
    let mut ids = Vec::with_capacity(text.len() / 3 + 1);
    let (mut plain_from, mut scan_from) = (0, 0);
    while let Some(found) = text.get(scan_from..).and_then(|rest| rest.find('<')) {
        let at = scan_from + found;
        let marker = SPECIALS.iter().find(|(_, marker)| text.get(at..).is_some_and(|rest| rest.starts_with(marker)));
        let Some((special, marker)) = marker else {
            scan_from = at + 1;
            continue;
        };
        encode_plain(text.as_bytes().get(plain_from..at).unwrap_or_default(), &mut ids);
        ids.push(special.id());
        plain_from = at + marker.len();
        scan_from = plain_from;
    }
    encode_plain(text.as_bytes().get(plain_from..).unwrap_or_default(), &mut ids);
    ids
}

fn encode_plain(bytes: &[u8], ids: &mut Vec<TokenId>) {
    let mut start = 0;
    while let Some(&first) = bytes.get(start) {
        let kind = class(first);
        let run =
            |from: usize, kind: Class| from + bytes.iter().skip(from).take_while(|byte| class(**byte) == kind).count();
        let mut end = run(start, kind);
        // The last space of a run belongs to the word after it.
        if kind == Class::Blank
            && bytes.get(end - 1) == Some(&b' ')
            && bytes.get(end).is_some_and(|byte| class(*byte) == Class::Word)
        {
            if end - 1 == start {
                end = run(end, Class::Word);
            } else {
                end -= 1;
            }
        }
        let width = if kind == Class::Other { 1 } else { 4 };
        for chunk in bytes.get(start..end).unwrap_or_default().chunks(width) {
            let packed = chunk.iter().fold(0, |packed, byte| (packed << 7) | TokenId::from(*byte));
            ids.push(match chunk.len() {
                1 => chunk.iter().copied().map(TokenId::from).sum(),
                2 => PAIRS + packed,
                3 => TRIPLES + packed,
                _ => QUADS + packed,
            });
        }
        start = end;
    }
}

/// Appends the bytes of one token. An id that no text has gives U+FFFD; markers give their text.
pub fn push_bytes(id: TokenId, out: &mut Vec<u8>) {
    let (packed, len) = match id {
        0..=255 => return out.push(u8::try_from(id).unwrap_or_default()),
        PAIRS..TRIPLES => (id - PAIRS, 2),
        TRIPLES..QUADS => (id - TRIPLES, 3),
        QUADS..END => (id - QUADS, 4),
        _ => {
            let marker = SPECIALS.iter().find(|(special, _)| special.id() == id).map(|(_, marker)| *marker);
            return out.extend_from_slice(marker.unwrap_or("\u{fffd}").as_bytes());
        }
    };
    out.extend((0..len).rev().map(|place| ((packed >> (7 * place)) & 127) as u8));
}

/// The text of `ids`, markers included; bytes that are not UTF-8 become U+FFFD.
pub fn decode(ids: &[TokenId]) -> String {
    let mut bytes = Vec::with_capacity(ids.len() * 4);
    for id in ids {
        push_bytes(*id, &mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Turns a stream of tokens into text, holding back the bytes of a character that is not complete yet.
/// End markers (`<|im_end|>`, `<|endoftext|>`) give no text, as with `skip_special_tokens`.
#[derive(Debug, Default)]
pub struct Decoder {
    pending: Vec<u8>,
}

impl Decoder {
    /// The text that `id` completes, empty if none.
    pub fn push(&mut self, id: TokenId) -> String {
        if [Special::EndOfText, Special::ImStart, Special::ImEnd].iter().any(|special| special.id() == id) {
            return String::new();
        }
        push_bytes(id, &mut self.pending);
        let complete = match std::str::from_utf8(&self.pending) {
            Ok(text) => text.len(),
            // A cut-off character at the end waits for its other bytes; a wrong byte is replaced at once.
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            Err(_) => self.pending.len(),
        };
        let rest = self.pending.split_off(complete);
        let text = String::from_utf8_lossy(&self.pending).into_owned();
        self.pending = rest;
        text
    }
}

#[cfg(test)]
#[path = "tokenizer_tests.rs"]
mod tests;
