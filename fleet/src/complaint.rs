//! What a worker says when it refuses or fails a turn, in words that are fit for the client.
//!
//! SGLang's messages name its own files, repeat the whole request, or carry Python's words for a fault of its own. What helps
//! a client is kept (which field, and why); the rest is not. The forms are those of 0.5.23: the flat envelope, the nested one,
//! a bare text, FastAPI's `detail`, the scheduler's abort, and anything else as a body that says nothing.

mod clean;
mod validation;

use std::borrow::Cow;

use bytes::Bytes;
use serde::Deserialize;

use crate::body::{Edits, Members, rewrite, scan, text_of};
use crate::observe::shapes::{Raw, read, text};

pub use clean::{MAX_MESSAGE_BYTES, clean};

/// Most of an error body that is looked at, in bytes.
pub const MAX_BODY_BYTES: usize = 64 * 1024;

/// A worker's error.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Complaint {
    /// The status that it means. Responses says 400 for everything and the real one in the text.
    pub status: u16,
    /// Why, cleaned. Nothing where the worker gave no reason that a client could use.
    pub message: Option<String>,
    /// The request field at fault.
    pub param: Option<String>,
    /// What kind of complaint it is.
    pub cause: Cause,
}

/// What a complaint is about, as far as its words tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// The prompt, or prompt and output together, do not fit into the model's context.
    ContextLength,
    /// Anything else; the status has to do.
    Other,
}

/// The forms of an error body.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Envelope<'a> {
    #[serde(borrow)]
    error: Raw<'a>,
    #[serde(borrow)]
    message: Raw<'a>,
    #[serde(borrow)]
    detail: Raw<'a>,
    #[serde(borrow)]
    param: Raw<'a>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Nested<'a> {
    #[serde(borrow)]
    message: Raw<'a>,
    #[serde(borrow)]
    param: Raw<'a>,
}

/// Reads an answer with an error status. `secrets` are texts that must not come out: the engine's name of the request, the
/// worker's address.
pub fn from_answer(status: u16, body: &[u8], secrets: &[&str]) -> Complaint {
    let body = body.get(..MAX_BODY_BYTES).unwrap_or(body);
    let (told, param) = match serde_json::from_slice::<Envelope<'_>>(body) {
        Ok(envelope) => words(&envelope),
        // A body that is no JSON, or was cut: nothing in it is meant for a client.
        Err(_) => (None, None),
    };
    from_words(status, told.as_deref(), param.as_deref(), secrets)
}

/// Reads an error that came as an event, from its status and message.
pub fn from_event(status: u16, message: &str, secrets: &[&str]) -> Complaint {
    from_words(status, Some(message).filter(|m| !m.is_empty()), None, secrets)
}

/// The status that an answer means: what its text says where the text begins with one, as Responses does.
pub fn status_of(status: u16, body: &[u8]) -> u16 {
    if !(400..500).contains(&status) {
        return status;
    }
    let body = body.get(..MAX_BODY_BYTES).unwrap_or(body);
    let envelope = serde_json::from_slice::<Envelope<'_>>(body).unwrap_or_default();
    words(&envelope).0.and_then(|message| told_in(&message).map(|(status, _)| status)).unwrap_or(status)
}

fn words<'a>(envelope: &Envelope<'a>) -> (Option<Cow<'a, str>>, Option<Cow<'a, str>>) {
    if let Some(message) = text(envelope.error) {
        return (Some(message), None);
    }
    if let Some(nested) = read::<Nested<'_>>(envelope.error) {
        return (text(nested.message), text(nested.param));
    }
    if let Some(detail) = text(envelope.detail) {
        return (Some(detail), None);
    }
    if let Some((message, param)) = envelope.detail.and_then(|detail| validation::from_json(detail.get())) {
        return (Some(message.into()), param.map(Into::into));
    }
    (text(envelope.message), text(envelope.param))
}

fn from_words(status: u16, told: Option<&str>, param: Option<&str>, secrets: &[&str]) -> Complaint {
    let (status, told) = match told.and_then(told_in) {
        Some((meant, rest)) if (400..500).contains(&status) || meant == status => (meant, Some(rest)),
        _ => (status, told),
    };
    let (message, found) = match told.map(|text| (validation::from_text(text), text)) {
        Some((Some((message, param)), _)) => (Some(message), param),
        Some((None, text)) => (Some(text.to_owned()), None),
        None => (None, None),
    };
    let message = message.map(|text| clean(&text, secrets)).filter(|text| !text.is_empty());
    // A fault of the worker's own is told in the words of its language; only overload says something for others.
    let message = message.filter(|_| status < 500 || status == 503).filter(|text| !is_general(text));
    let too_long = message.as_deref().is_some_and(is_context_length);
    Complaint {
        status,
        cause: if too_long && (400..500).contains(&status) { Cause::ContextLength } else { Cause::Other },
        message,
        param: param.map(|text| clean(text, secrets)).or(found).filter(|text| !text.is_empty()),
    }
}

/// A status at the front of a message, and what follows it.
pub(crate) fn told_in(message: &str) -> Option<(u16, &str)> {
    let (status, rest) = message.split_once(": ")?;
    status.parse().ok().filter(|status| (400..600).contains(status)).map(|status| (status, rest))
}

/// Texts that say no more than their status.
fn is_general(text: &str) -> bool {
    ["Internal server error", "Internal Server Error", "Not Found", "Method Not Allowed", "Unauthorized", "Forbidden"]
        .contains(&text)
}

/// The ways in which 0.5.23 says that a prompt is too long.
fn is_context_length(text: &str) -> bool {
    let says = |words: &[&str]| words.iter().all(|word| text.contains(word));
    says(&["longer than the model's context length"])
        || says(&["exceeds the model's maximum context length"])
        || says(&["exceeds the maximum allowed length"])
        || says(&["maximum context length"])
        || says(&["Requested token count exceeds"])
}

/// The data of an error event with its message cleaned, whatever its form; nothing when there is nothing to clean.
pub fn clean_event(data: &[u8], secrets: &[&str]) -> Option<Bytes> {
    const PLACES: [&[&str]; 5] = [
        &["error", "message"],
        &["error"],
        &["response", "error", "message"],
        &["meta_info", "finish_reason", "message"],
        &["message"],
    ];
    let members = scan(&Bytes::copy_from_slice(data)).ok()?;
    PLACES.into_iter().find_map(|path| replace(&members, path, secrets))
}

fn replace(members: &Members, path: &[&str], secrets: &[&str]) -> Option<Bytes> {
    let (key, rest) = path.split_first()?;
    let raw = members.value(key)?;
    let new = if rest.is_empty() {
        let told = text_of(&raw)?;
        let shown = match validation::from_text(&told) {
            Some((message, _)) => clean(&message, secrets),
            None => clean(&told, secrets),
        };
        if shown == told {
            return None;
        }
        serde_json::to_string(&shown).ok()?
    } else {
        String::from_utf8(replace(&scan(&raw).ok()?, rest, secrets)?.into()).ok()?
    };
    Some(rewrite(members, Edits::new().set((*key).to_owned(), new)))
}

#[cfg(test)]
#[path = "complaint_tests.rs"]
mod tests;
