//! The scan of a body: one pass that finds the top-level members and checks every byte as a JSON parser would.
//!
//! What is accepted is exactly what serde_json accepts, depth excepted, which has no limit. Nearly all bytes of a body lie in
//! strings, so these are passed 64 bytes at a time; everything else is looked at byte by byte.

use wide::u8x16;

/// Bytes of a string that are looked at together.
const BLOCK: usize = 64;

/// What is not right with a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// Not a JSON object, or nothing but white space may follow it and something does.
    Malformed,
    /// Whoever was told of a member wants no more of them.
    Stopped,
}

/// Where one member stands, as offsets into the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    /// Opening quote of the key.
    pub key: usize,
    /// Closing quote of the key.
    pub key_end: usize,
    /// First byte of the value.
    pub value: usize,
    /// Just behind the value.
    pub end: usize,
}

/// Tells `member` of each top-level member of the object that `text` is. Returns where the object opens: just behind its brace.
///
/// # Errors
/// See [`Fault`]. Keys are checked as strings, but whether their escapes make text is for `member` to see.
pub(super) fn members(text: &[u8], mut member: impl FnMut(Found) -> bool) -> Result<usize, Fault> {
    let mut cursor = Cursor { text, at: 0, open: Vec::new(), not_ascii: false };
    let open = cursor.object(&mut member).ok_or(Fault::Malformed).flatten();
    // Bytes beyond ASCII are right in strings only, and only as UTF-8.
    let seen = text.get(..cursor.at).unwrap_or(text);
    if cursor.not_ascii && std::str::from_utf8(seen).is_err() { Err(Fault::Malformed) } else { open }
}

struct Cursor<'a> {
    text: &'a [u8],
    at: usize,
    /// The brackets that are open within the top-level value at hand.
    open: Vec<u8>,
    /// Some string had bytes beyond ASCII.
    not_ascii: bool,
}

// === impl Cursor ===

impl Cursor<'_> {
    fn object(&mut self, member: &mut impl FnMut(Found) -> bool) -> Option<Result<usize, Fault>> {
        self.take(b'{')?;
        let open = self.at;
        if self.token()? == b'}' {
            self.at += 1;
        } else {
            loop {
                let (key, key_end) = self.key()?;
                self.token()?;
                let value = self.at;
                self.value()?;
                if !member(Found { key, key_end, value, end: self.at }) {
                    return Some(Err(Fault::Stopped));
                }
                match self.token()? {
                    b',' => self.at += 1,
                    b'}' => break,
                    _ => return None,
                }
            }
            self.at += 1;
        }
        // Nothing may follow but white space.
        if self.token().is_none() { Some(Ok(open)) } else { None }
    }

    /// The next byte that is not white space, which is where the cursor stands then; none at the end.
    fn token(&mut self) -> Option<u8> {
        loop {
            let byte = *self.text.get(self.at)?;
            if !matches!(byte, b' ' | b'\n' | b'\t' | b'\r') {
                return Some(byte);
            }
            self.at += 1;
        }
    }

    fn take(&mut self, wanted: u8) -> Option<()> {
        (self.token()? == wanted).then(|| self.at += 1)
    }

    /// A key with its colon. Returns where its quotes are.
    fn key(&mut self) -> Option<(usize, usize)> {
        self.take(b'"')?;
        let key = self.at - 1;
        self.string()?;
        let key_end = self.at - 1;
        self.take(b':')?;
        Some((key, key_end))
    }

    /// One value with all that is in it.
    fn value(&mut self) -> Option<()> {
        self.open.clear();
        loop {
            match self.token()? {
                b'"' => {
                    self.at += 1;
                    self.string()?;
                }
                b'{' => {
                    self.at += 1;
                    if self.token()? != b'}' {
                        self.open.push(b'}');
                        self.key()?;
                        continue;
                    }
                    self.at += 1;
                }
                b'[' => {
                    self.at += 1;
                    if self.token()? != b']' {
                        self.open.push(b']');
                        continue;
                    }
                    self.at += 1;
                }
                b'-' | b'0'..=b'9' => self.number()?,
                b't' => self.word(b"true")?,
                b'f' => self.word(b"false")?,
                b'n' => self.word(b"null")?,
                _ => return None,
            }
            // A value has ended, and with it perhaps what it was the last of.
            loop {
                let Some(&close) = self.open.last() else { return Some(()) };
                match self.token()? {
                    b',' => {
                        self.at += 1;
                        if close == b'}' {
                            self.key()?;
                        }
                        break;
                    }
                    byte if byte == close => {
                        self.at += 1;
                        self.open.pop();
                    }
                    _ => return None,
                }
            }
        }
    }

    fn word(&mut self, word: &[u8]) -> Option<()> {
        self.text.get(self.at..)?.starts_with(word).then(|| self.at += word.len())
    }

    fn number(&mut self) -> Option<()> {
        if self.text.get(self.at) == Some(&b'-') {
            self.at += 1;
        }
        if self.text.get(self.at) == Some(&b'0') {
            self.at += 1;
        } else {
            self.digits()?;
        }
        if self.text.get(self.at) == Some(&b'.') {
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.text.get(self.at), Some(b'e' | b'E')) {
            self.at += 1;
            if matches!(self.text.get(self.at), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        Some(())
    }

    /// One digit or more.
    fn digits(&mut self) -> Option<()> {
        let rest = self.text.get(self.at..)?;
        let count = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        self.at += count;
        (count > 0).then_some(())
    }

    /// The rest of a string, behind its opening quote, with the closing one.
    fn string(&mut self) -> Option<()> {
        let mut base = self.at;
        'block: loop {
            let rest = self.text.get(base..)?;
            let mut marks = match rest.first_chunk::<BLOCK>() {
                Some(block) => Marks::of(block),
                None => {
                    // A zero is no part of a string, so the end of the text is a mark.
                    let mut block = [0; BLOCK];
                    block.get_mut(..rest.len())?.copy_from_slice(rest);
                    Marks::of(&block)
                }
            };
            self.not_ascii |= marks.not_ascii;
            while marks.special != 0 {
                let here = base + marks.special.trailing_zeros() as usize;
                match self.text.get(here)? {
                    b'"' => {
                        self.at = here + 1;
                        return Some(());
                    }
                    b'\\' => {
                        let behind = here + self.escape(here + 1)?;
                        let passed = behind - base;
                        if passed >= BLOCK {
                            base = behind;
                            continue 'block;
                        }
                        marks.special &= u64::MAX << passed;
                    }
                    // A control character.
                    _ => return None,
                }
            }
            base += BLOCK;
        }
    }

    /// Length of an escape, its backslash counted; `at` is just behind that.
    fn escape(&self, at: usize) -> Option<usize> {
        match self.text.get(at)? {
            b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => Some(2),
            b'u' => self.text.get(at + 1..at + 5)?.iter().all(u8::is_ascii_hexdigit).then_some(6),
            _ => None,
        }
    }
}

/// What there is in a block of a string.
struct Marks {
    /// A bit for each byte that a string cannot just contain: quote, backslash, control character.
    special: u64,
    /// A byte has its highest bit set.
    not_ascii: bool,
}

impl Marks {
    fn of(block: &[u8; BLOCK]) -> Self {
        let (quote, backslash, last_control) = (u8x16::splat(b'"'), u8x16::splat(b'\\'), u8x16::splat(0x1f));
        let mut special = 0;
        let mut all = u8x16::ZERO;
        let (parts, _) = block.as_chunks::<16>();
        for (at, part) in parts.iter().enumerate() {
            let part = u8x16::new(*part);
            let is_control = part.min(last_control).simd_eq(part);
            let marks = part.simd_eq(quote) | part.simd_eq(backslash) | is_control;
            special |= u64::from(marks.to_bitmask()) << (16 * at);
            all |= part;
        }
        Self { special, not_ascii: all.to_bitmask() != 0 }
    }
}

#[cfg(test)]
#[path = "scan_tests.rs"]
mod tests;
