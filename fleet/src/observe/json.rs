//! An answer that is one JSON document. It is gathered before it goes to the client, so that one that breaks off can be asked for
//! elsewhere; a document over the bound passes unobserved.

use bytes::{BufMut, Bytes, BytesMut};

use super::event::{
    Remainder, note_anthropic, note_choice, note_details, note_error, note_generated, note_response, note_usage,
    openai_error, without_details,
};
use super::shapes::{Anthropic, Generated, OpenAi, Response, text};
use super::{First, Watch};
use crate::body::{Edits, rewrite, scan};
use crate::route::{Protocol, Route};

/// What has arrived.
#[derive(Default)]
pub(super) struct Body {
    parts: Vec<Bytes>,
    length: usize,
    /// Too long: the rest passes.
    over: bool,
}

impl Body {
    pub(super) fn push(&mut self, chunk: Bytes, watch: &mut Watch, out: &mut Vec<Bytes>) {
        if self.over {
            return out.push(chunk);
        }
        self.length = self.length.saturating_add(chunk.len());
        if self.length <= watch.options.max_body_bytes {
            return self.parts.push(chunk);
        }
        self.over = true;
        watch.seen.incomplete = true;
        watch.is_first(First::Data);
        out.append(&mut self.parts);
        out.push(chunk);
    }

    pub(super) fn finish(&mut self, watch: &mut Watch, out: &mut Vec<Bytes>) {
        if self.over {
            return;
        }
        let body = joined(std::mem::take(&mut self.parts));
        self.length = 0;
        let rest = observe(&body, watch);
        if !body.is_empty() {
            out.push(rest.unwrap_or(body));
        }
    }
}

/// The parts as one buffer; a single one is not copied.
fn joined(mut parts: Vec<Bytes>) -> Bytes {
    match (parts.pop(), parts.is_empty()) {
        (None, _) => Bytes::new(),
        (Some(only), true) => only,
        (Some(last), false) => {
            let mut whole = BytesMut::with_capacity(parts.iter().map(Bytes::len).sum::<usize>() + last.len());
            for part in parts {
                whole.put_slice(&part);
            }
            whole.put_slice(&last);
            whole.freeze()
        }
    }
}

/// Notes what the document says. The document without what is ours, if that makes a difference.
fn observe(body: &Bytes, watch: &mut Watch) -> Option<Bytes> {
    let known = match (watch.route, watch.route.protocol()) {
        (Route::Generate, _) => generate(body, watch),
        (_, Protocol::Responses) => responses(body, watch),
        (_, Protocol::Anthropic) => anthropic(body, watch),
        _ => openai(body, watch),
    };
    match known {
        Some(()) => {
            watch.seen.done = true;
            watch.is_first(First::Data);
            strip(body, watch)
        }
        None => {
            watch.seen.incomplete = true;
            None
        }
    }
}

fn openai(body: &[u8], watch: &mut Watch) -> Option<()> {
    // Rerank answers a list, which says nothing that we read.
    let answer: OpenAi<'_> = match serde_json::from_slice(body) {
        Ok(answer) => answer,
        Err(_) if body.trim_ascii_start().starts_with(b"[") => return Some(()),
        Err(_) => return None,
    };
    if !openai_error(&answer, watch) {
        for choice in answer.choices.iter().flatten() {
            note_choice(choice, watch);
        }
        note_usage(answer.usage, watch);
        note_details(answer.sglext, watch);
    }
    Some(())
}

fn generate(body: &[u8], watch: &mut Watch) -> Option<()> {
    if body.trim_ascii_start().starts_with(b"[") {
        for answer in serde_json::from_slice::<Vec<Generated<'_>>>(body).ok()? {
            note_generated(&answer, watch);
        }
    } else {
        note_generated(&serde_json::from_slice(body).ok()?, watch);
    }
    Some(())
}

fn responses(body: &[u8], watch: &mut Watch) -> Option<()> {
    let response: Response<'_> = serde_json::from_slice(body).ok()?;
    if response.error.is_some() {
        note_error(response.error, watch);
        return Some(());
    }
    for item in response.output.iter().flatten() {
        if text(item.kind).is_some_and(|kind| kind == "function_call") {
            watch.tool_called(&text(item.name).unwrap_or_default());
        }
    }
    note_response(&response, watch);
    Some(())
}

fn anthropic(body: &[u8], watch: &mut Watch) -> Option<()> {
    note_anthropic(&serde_json::from_slice::<Anthropic<'_>>(body).ok()?, watch);
    Some(())
}

fn strip(body: &Bytes, watch: &Watch) -> Option<Bytes> {
    if !watch.options.strip_cached_details || !watch.route.takes_cached_details() {
        return None;
    }
    let members = scan(body).ok()?;
    let mut edits = Edits::new();
    match without_details(members.raw("sglext")?) {
        Remainder::Unchanged => return None,
        Remainder::Nothing => edits.remove("sglext"),
        Remainder::Some(rest) => edits.set("sglext", rest),
    };
    Some(rewrite(&members, &edits))
}
