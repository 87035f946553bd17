//! A request body as the gateway sees it: one JSON object, known by its top-level members, otherwise left alone.
//!
//! [`scan`] finds the members without building values, [`rewrite`] puts the body together again with a few members removed
//! or set. Whatever is not named in the [`Edits`] keeps its bytes: number spelling, escapes, order, white space.

mod pieces;
mod scan;

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;

use bytes::Bytes;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

pub use pieces::Pieces;

/// Most top-level members a body may have. Real bodies have some thirty; the bound keeps a body made of tiny members from
/// costing many times its size in memory.
pub const MAX_MEMBERS: usize = 1024;

/// What is wrong with a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyErrorKind {
    /// Not JSON, or not UTF-8.
    NotJson,
    /// JSON, but not an object.
    NotObject,
    /// More than [`MAX_MEMBERS`] members.
    TooManyMembers,
    /// A member that the gateway reads has the wrong type or value.
    BadMember,
}

/// A refused body. The edge answers it with 400; `Display` is the message for the client and never quotes the body.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct BodyError {
    /// The offending member as a path (`nvext.agent_hints.priority`); empty when the body as a whole is at fault.
    pub field: String,
    /// What is wrong, naming the field.
    pub message: String,
    /// Which kind of fault it is.
    pub kind: BodyErrorKind,
}

/// The top-level members of a body, in the order of the body, duplicates included.
#[derive(Clone)]
pub struct Members {
    body: Bytes,
    list: Vec<Member>,
    /// Just behind the opening brace.
    open: usize,
}

/// Where one member stands. All offsets are bytes into the body.
#[derive(Clone, Debug)]
struct Member {
    /// The key with escapes resolved; none where the bytes between the quotes already are the key.
    decoded_key: Option<Box<str>>,
    /// Opening quote of the key.
    start: usize,
    /// Closing quote of the key, where the key has no escapes.
    key_end: usize,
    /// First byte of the value.
    value: usize,
    /// Just behind the value.
    end: usize,
}

/// Members to remove or to set.
#[derive(Clone, Debug, Default)]
pub struct Edits {
    list: Vec<Edit>,
}

#[derive(Clone, Debug)]
struct Edit {
    key: Cow<'static, str>,
    /// The new value as JSON text; none removes the member.
    value: Option<Cow<'static, str>>,
}

/// Finds the members of a body.
///
/// # Errors
/// The body is not UTF-8, not JSON, not an object, or has too many members. Depth is not limited: nothing recurses.
pub fn scan(body: &Bytes) -> Result<Members, BodyError> {
    let mut list = Vec::with_capacity(24);
    let mut bad_key = false;
    let scanned = scan::members(body, |found| {
        let decoded_key = match decode_key(body.get(found.key..=found.key_end).unwrap_or_default()) {
            Ok(key) => key,
            Err(NotText) => {
                bad_key = true;
                return false;
            }
        };
        list.push(Member { decoded_key, start: found.key, key_end: found.key_end, value: found.value, end: found.end });
        list.len() <= MAX_MEMBERS
    });
    match scanned {
        Ok(open) => Ok(Members { body: body.clone(), list, open }),
        Err(scan::Fault::Stopped) if !bad_key => Err(BodyError::whole(
            BodyErrorKind::TooManyMembers,
            format!("the request body has more than {MAX_MEMBERS} top-level members"),
        )),
        Err(_) => Err(explain(body)),
    }
}

/// A key whose escapes make no text.
struct NotText;

/// The key between these quotes, if it is another than the bytes there.
fn decode_key(quoted: &[u8]) -> Result<Option<Box<str>>, NotText> {
    match memchr::memchr(b'\\', quoted) {
        None => Ok(None),
        Some(_) => serde_json::from_slice(quoted).map(Some).map_err(|_| NotText),
    }
}

/// The body with the edits applied, in one piece. See [`rewrite_pieces`].
pub fn rewrite(members: &Members, edits: &Edits) -> Bytes {
    rewrite_pieces(members, edits).joined()
}

/// The body with the edits applied. Without an edit that applies it is the same buffer; what is long and stays is not copied.
///
/// A removed member takes one neighbouring comma along; a set member is replaced where it stands (the last one, if the key
/// is there more than once; the others go) or appended before the closing brace.
pub fn rewrite_pieces(members: &Members, edits: &Edits) -> Pieces {
    let body = &members.body;
    let mut changed = false;
    let mut added = 0;
    // What becomes of each member: kept as it is, replaced by an edit, or dropped.
    let mut kept: Vec<(usize, Option<&str>)> = Vec::with_capacity(members.list.len());
    let mut seen = vec![false; edits.list.len()];
    for index in (0..members.list.len()).rev() {
        let Some(member) = members.list.get(index) else { continue };
        let key = members.key_bytes(member);
        match edits.list.iter().position(|e| e.key.as_bytes() == key) {
            None => kept.push((index, None)),
            Some(edit) => {
                changed = true;
                let first = !seen.get(edit).copied().unwrap_or(true);
                if let Some(seen) = seen.get_mut(edit) {
                    *seen = true;
                }
                if let (true, Some(value)) = (first, edits.list.get(edit).and_then(|e| e.value.as_deref())) {
                    added += value.len();
                    kept.push((index, Some(value)));
                }
            }
        }
    }
    kept.reverse();
    let appended: Vec<(&str, &str)> = edits
        .list
        .iter()
        .zip(&seen)
        .filter(|(_, seen)| !**seen)
        .filter_map(|(e, _)| e.value.as_deref().map(|value| (e.key.as_ref(), value)))
        .collect();
    if !changed && appended.is_empty() {
        return Pieces::from(body.clone());
    }
    let mut out =
        pieces::Builder::new(body, added + appended.iter().map(|(k, v)| k.len() + v.len() + 4).sum::<usize>());
    let first_start = members.list.first().map_or(members.open, |m| m.start);
    out.keep(0, first_start);
    // Neighbours that both stay are kept as one run, with the comma between them.
    let mut run: Option<(usize, usize)> = None;
    let mut previous: Option<usize> = None;
    for (index, replacement) in &kept {
        let Some(member) = members.list.get(*index) else { continue };
        if let Some(previous) = previous {
            let separator =
                index.checked_sub(1).and_then(|before| members.list.get(before)).map_or(member.start, |m| m.end);
            match run {
                Some((from, to)) if previous + 1 == *index => run = Some((from, to.max(member.start))),
                _ => {
                    if let Some((from, to)) = run.take() {
                        out.keep(from, to);
                    }
                    run = Some((separator, member.start));
                }
            }
        } else {
            run = Some((member.start, member.start));
        }
        let (from, _) = run.unwrap_or((member.start, member.start));
        match replacement {
            None => run = Some((from, member.end)),
            Some(value) => {
                out.keep(from, member.value);
                out.put(value.as_bytes());
                run = Some((member.end, member.end));
            }
        }
        previous = Some(*index);
    }
    if let Some((from, to)) = run {
        out.keep(from, to);
    }
    for (position, (key, value)) in appended.iter().enumerate() {
        if position > 0 || !kept.is_empty() {
            out.put(b",");
        }
        out.put(serde_json::to_string(key).unwrap_or_default().as_bytes());
        out.put(b":");
        out.put(value.as_bytes());
    }
    let tail = members.list.last().map_or(members.open, |m| m.end);
    out.keep(tail, body.len());
    out.finish()
}

// === impl Members ===

impl Members {
    /// The body that was scanned.
    pub fn body(&self) -> &Bytes {
        &self.body
    }

    /// How many members there are, duplicates counted.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether the object is empty.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The keys in the order of the body, escapes resolved, duplicates included.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        // Keys were checked to be UTF-8 when they were found.
        self.list.iter().filter_map(|member| std::str::from_utf8(self.key_bytes(member)).ok())
    }

    /// Whether the key is present.
    pub fn contains(&self, key: &str) -> bool {
        self.find(key).is_some()
    }

    /// The value of a key as JSON text, without the white space around it. Of several the last counts, as in SGLang.
    pub fn raw(&self, key: &str) -> Option<&[u8]> {
        let member = self.find(key)?;
        self.body.get(member.value..member.end)
    }

    /// Like [`Members::raw`], as a shared slice of the body, and with JSON's `null` taken as absent.
    pub fn value(&self, key: &str) -> Option<Bytes> {
        let member = self.find(key)?;
        match self.body.get(member.value..member.end)? {
            b"null" => None,
            _ => Some(self.body.slice(member.value..member.end)),
        }
    }

    /// The value of a key if it is a JSON string; `null`, another type and absence are none.
    pub fn string(&self, key: &str) -> Option<Cow<'_, str>> {
        self.raw(key).and_then(text_of)
    }

    /// The value of a key if it is a whole number that fits.
    pub fn unsigned(&self, key: &str) -> Option<u64> {
        std::str::from_utf8(self.raw(key)?).ok()?.parse().ok()
    }

    /// The value of a key read the way SGLang reads booleans: `true`, 1 and the words `true`, `t`, `yes`, `y`, `on`, `1`.
    pub fn truthy(&self, key: &str) -> bool {
        match self.raw(key) {
            Some(b"true" | b"1" | b"1.0") => true,
            Some(raw) if raw.first() == Some(&b'"') => text_of(raw).is_some_and(|word| {
                matches!(word.to_ascii_lowercase().as_str(), "true" | "t" | "yes" | "y" | "on" | "1")
            }),
            _ => false,
        }
    }

    fn find(&self, key: &str) -> Option<&Member> {
        self.list.iter().rev().find(|member| self.key_bytes(member) == key.as_bytes())
    }

    fn key_bytes<'a>(&'a self, member: &'a Member) -> &'a [u8] {
        match &member.decoded_key {
            Some(key) => key.as_bytes(),
            None => self.body.get(member.start + 1..member.key_end).unwrap_or_default(),
        }
    }
}

/// The text of a JSON string, borrowed where it has no escapes; none for any other value.
pub(crate) fn text_of(raw: &[u8]) -> Option<Cow<'_, str>> {
    let inner = raw.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    if memchr::memchr(b'\\', inner).is_none() {
        return std::str::from_utf8(inner).ok().map(Cow::Borrowed);
    }
    serde_json::from_slice::<String>(raw).ok().map(Cow::Owned)
}

impl fmt::Debug for Members {
    /// Only the keys: a body may be megabytes, and private.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.keys()).finish()
    }
}

// === impl Edits ===

impl Edits {
    /// No edits.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Removes every member of that key.
    pub fn remove(&mut self, key: impl Into<Cow<'static, str>>) -> &mut Self {
        self.put(key.into(), None)
    }

    /// Sets a member to a JSON text. The caller vouches for the JSON.
    pub fn set(&mut self, key: impl Into<Cow<'static, str>>, raw_json: impl Into<Cow<'static, str>>) -> &mut Self {
        self.put(key.into(), Some(raw_json.into()))
    }

    /// Sets a member to a string.
    pub fn set_string(&mut self, key: impl Into<Cow<'static, str>>, text: &str) -> &mut Self {
        let quoted = serde_json::to_string(text).unwrap_or_else(|_| String::from("\"\""));
        self.put(key.into(), Some(Cow::Owned(quoted)))
    }

    /// The last word on a key counts.
    fn put(&mut self, key: Cow<'static, str>, value: Option<Cow<'static, str>>) -> &mut Self {
        match self.list.iter_mut().find(|e| e.key == key) {
            Some(edit) => edit.value = value,
            None => self.list.push(Edit { key, value }),
        }
        self
    }
}

// === impl BodyError ===

impl BodyError {
    /// A member of the wrong type or value. The message reads "`field` `problem`".
    pub fn bad_member(field: impl Into<String>, problem: &str) -> Self {
        let field = field.into();
        Self { message: format!("{field} {problem}"), field, kind: BodyErrorKind::BadMember }
    }

    fn whole(kind: BodyErrorKind, message: String) -> Self {
        Self { field: String::new(), message, kind }
    }
}

/// Says what is wrong with a body that is no JSON object: short, in words of the request, never quoting it.
fn explain(body: &[u8]) -> BodyError {
    let not_json = |message: String| BodyError::whole(BodyErrorKind::NotJson, message);
    let Some(first) = body.iter().copied().find(|b| !b.is_ascii_whitespace()) else {
        return not_json("the request body is empty; a JSON object is expected".into());
    };
    if body.starts_with(&[0xEF, 0xBB, 0xBF]) {
        return not_json("the request body begins with a byte order mark; JSON is sent without one".into());
    }
    if let Err(bad) = std::str::from_utf8(body) {
        return not_json(format!("the request body is not valid UTF-8 (at byte {})", bad.valid_up_to()));
    }
    if first != b'{' {
        if serde_json::from_slice::<&RawValue>(body).is_ok() {
            let message = "the request body is JSON but not an object; a JSON object is expected";
            return BodyError::whole(BodyErrorKind::NotObject, message.into());
        }
        // The parser would quote the value that it met.
        return not_json("the request body is not valid JSON; a JSON object is expected".into());
    }
    // A parser says where. It meets as few members as the scan did.
    match serde_json::from_slice::<HashMap<String, IgnoredAny>>(body) {
        Ok(_) => not_json("the request body is not valid JSON".into()),
        Err(error) => not_json(format!("the request body is not valid JSON: {error}")),
    }
}

#[cfg(test)]
#[path = "body_tests.rs"]
mod tests;
