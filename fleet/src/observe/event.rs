//! What one event of a stream means, by protocol.
//!
//! Most events only carry the next few tokens. They are told from the others by a search for the few keys that matter; a key
//! with its quotes cannot stand inside a JSON string, where quotes are escaped. Only events that have one are parsed.

use std::sync::LazyLock;

use bytes::Bytes;
use memchr::memmem::Finder;

use super::shapes::{
    Anthropic, CachedDetails, Choice, ErrorShape, Finish, Generated, Message, OpenAi, Raw, Response, SglExt,
    UsageShape, read, text,
};
use super::sse::Event;
use super::{First, Verdict, Watch};
use crate::body::{Edits, rewrite, scan};
use crate::complaint::told_in;
use crate::route::{Protocol, Route};

/// The keys that make an event worth parsing.
struct Keys {
    finish_reason: Finder<'static>,
    usage: Finder<'static>,
    tool_calls: Finder<'static>,
    sglext: Finder<'static>,
    error: Finder<'static>,
    kind: Finder<'static>,
}

static KEYS: LazyLock<Keys> = LazyLock::new(|| Keys {
    finish_reason: Finder::new(b"\"finish_reason\""),
    usage: Finder::new(b"\"usage\""),
    tool_calls: Finder::new(b"\"tool_calls\""),
    sglext: Finder::new(b"\"sglext\""),
    error: Finder::new(b"\"error\""),
    kind: Finder::new(b"\"type\""),
});

/// Notes what the event says and tells whether it passes.
pub(super) fn observe(event: &Event<'_>, watch: &mut Watch) -> Verdict {
    let data = event.data.as_ref();
    if data.trim_ascii() == b"[DONE]" {
        watch.seen.done = true;
        watch.is_first(First::Data);
        return Verdict::Keep;
    }
    watch.seen.events += 1;
    let verdict = match (watch.route, watch.route.protocol()) {
        (Route::Generate, _) => {
            generate(data, watch);
            Verdict::Keep
        }
        (_, Protocol::Responses) => {
            if matches!(kind_of(event), b"response.created" | b"response.queued" | b"response.in_progress") {
                watch.opened = true;
                return Verdict::Keep;
            }
            responses(event, watch);
            Verdict::Keep
        }
        (_, Protocol::Anthropic) => {
            anthropic(event, watch);
            Verdict::Keep
        }
        _ => openai(data, watch),
    };
    watch.is_first(First::Data);
    verdict
}

/// Whether the key stands there with a value other than `null`.
fn has(data: &[u8], key: &Finder<'_>) -> bool {
    key.find_iter(data).any(|at| {
        let rest = data.get(at + key.needle().len()..).unwrap_or_default().trim_ascii_start();
        matches!(rest.strip_prefix(b":").map(<[u8]>::trim_ascii_start), Some([first, ..]) if *first != b'n')
    })
}

// === chat and completions ===

fn openai(data: &[u8], watch: &mut Watch) -> Verdict {
    let keys = &*KEYS;
    let matters = watch.reply.is_some()
        || watch.heard.awaits_token()
        || has(data, &keys.finish_reason)
        || has(data, &keys.usage)
        || has(data, &keys.tool_calls)
        || has(data, &keys.sglext)
        || has(data, &keys.error);
    if !matters {
        watch.seen.content_events += 1;
        return Verdict::Keep;
    }
    let Ok(chunk) = serde_json::from_slice::<OpenAi<'_>>(data) else {
        watch.seen.incomplete = true;
        return Verdict::Keep;
    };
    if openai_error(&chunk, watch) {
        return Verdict::Keep;
    }
    let choices = chunk.choices.as_deref().unwrap_or_default();
    if choices.iter().any(carries_tokens) {
        watch.seen.content_events += 1;
    }
    if choices.iter().any(speaks) {
        watch.heard.token();
    }
    for choice in choices {
        note_choice(choice, watch);
    }
    note_usage(chunk.usage, watch);
    note_details(chunk.sglext, watch);

    let is_extra = chunk.choices.is_some() && choices.is_empty();
    if !is_extra {
        return Verdict::Keep;
    }
    let usage_goes = chunk.usage.is_some() && watch.options.strip_usage;
    let Some(sglext) = chunk.sglext else {
        return if usage_goes { Verdict::Drop } else { Verdict::Keep };
    };
    let mut edits = Edits::new();
    if watch.options.strip_cached_details {
        match without_details(sglext.get().as_bytes()) {
            Remainder::Nothing if chunk.usage.is_none() || usage_goes => return Verdict::Drop,
            Remainder::Nothing => {
                edits.remove("sglext");
            }
            Remainder::Some(rest) => {
                edits.set("sglext", rest);
            }
            Remainder::Unchanged => {}
        }
    }
    if usage_goes {
        edits.set("usage", "null");
    }
    if edits.is_empty() {
        return Verdict::Keep;
    }
    match scan(&Bytes::copy_from_slice(data)) {
        Ok(members) => Verdict::Replace(rewrite(&members, &edits)),
        Err(_) => Verdict::Keep,
    }
}

/// Notes the error in an OpenAI answer or event: nested (`{"error":{…}}`), text (`{"error":"…"}`) or flat
/// (`{"object":"error",…}`).
pub(super) fn openai_error(chunk: &OpenAi<'_>, watch: &mut Watch) -> bool {
    if chunk.error.is_some() {
        note_error(chunk.error, watch);
        return true;
    }
    let flat = text(chunk.object).is_some_and(|object| object == "error");
    if flat {
        let status = read::<u16>(chunk.code).unwrap_or(500);
        watch.fail(status, &text(chunk.message).unwrap_or_default());
    }
    flat
}

/// Notes an `error` member of any protocol.
pub(super) fn note_error(raw: Raw<'_>, watch: &mut Watch) {
    if let Some(message) = text(raw) {
        return watch.fail(500, &message);
    }
    let error = read::<ErrorShape<'_>>(raw).unwrap_or_default();
    let message = text(error.message).unwrap_or_default();
    // Responses hides the scheduler's status in the text: code 400, "503: The request queue is full."
    let status = told_in(&message)
        .map(|(status, _)| status)
        .or_else(|| read::<u16>(error.code))
        .or_else(|| status_of(&text(error.kind)?))
        .unwrap_or(500);
    watch.fail(status, &message);
}

/// The status that a named error type stands for.
fn status_of(kind: &str) -> Option<u16> {
    Some(match kind {
        "invalid_request_error" | "BadRequestError" | "Bad Request" | "BAD_REQUEST" => 400,
        "authentication_error" => 401,
        "permission_error" => 403,
        "not_found_error" => 404,
        "request_too_large" => 413,
        "rate_limit_error" => 429,
        "overloaded_error" | "SERVICE_UNAVAILABLE" => 503,
        "timeout_error" | "GATEWAY_TIMEOUT" => 504,
        _ => return None,
    })
}

/// Whether a chunk's choice brings tokens, or is the empty one that only says why it ended.
fn carries_tokens(choice: &Choice<'_>) -> bool {
    choice.finish_reason.is_none() || speaks(choice)
}

/// Whether a chunk's choice says something. The first one only names the role.
fn speaks(choice: &Choice<'_>) -> bool {
    let some = |raw: Raw<'_>| text(raw).is_some_and(|t| !t.is_empty());
    let in_delta = choice.delta.as_ref().is_some_and(|d| {
        some(d.content) || some(d.reasoning_content) || d.tool_calls.as_ref().is_some_and(|c| !c.is_empty())
    });
    some(choice.text) || in_delta
}

/// Notes a choice of a chunk or of a whole answer.
pub(super) fn note_choice(choice: &Choice<'_>, watch: &mut Watch) {
    if let Some(message) = choice.delta.as_ref().or(choice.message.as_ref()) {
        note_message(choice, message, watch);
    }
    if let Some(reason) = text(choice.finish_reason) {
        watch.finished(&reason);
        if let Some(reply) = &mut watch.reply {
            reply.finished(&reason);
        }
    }
}

fn note_message(choice: &Choice<'_>, message: &Message<'_>, watch: &mut Watch) {
    if let Some(reply) = &mut watch.reply {
        if choice.index.unwrap_or(0) != 0 {
            reply.spoil();
        }
        if let Some(content) = text(message.content) {
            reply.content(&content);
        }
        if let Some(reasoning) = text(message.reasoning_content) {
            reply.reasoning(&reasoning);
        }
    }
    for (position, call) in message.tool_calls.iter().flatten().enumerate() {
        let function = call.function.as_ref();
        let name = function.and_then(|f| text(f.name)).unwrap_or_default();
        watch.tool_called(&name);
        if let Some(reply) = &mut watch.reply {
            let arguments = function.and_then(|f| text(f.arguments)).unwrap_or_default();
            let id = text(call.id).unwrap_or_default();
            reply.tool_call(call.index.unwrap_or(position as u64), &id, &name, &arguments);
        }
    }
}

/// Notes a `usage` member. Later numbers replace earlier ones; what is not told stays.
pub(super) fn note_usage(raw: Raw<'_>, watch: &mut Watch) {
    let Some(shape) = read::<UsageShape>(raw) else { return };
    let usage = &mut watch.seen.usage;
    let details = shape.prompt_tokens_details.or(shape.input_tokens_details);
    let cached = details.and_then(|d| d.cached_tokens).or(shape.cache_read_input_tokens);
    // Anthropic counts cached tokens beside the input, the others within.
    let prompt = shape.prompt_tokens.or_else(|| {
        let beside =
            shape.cache_read_input_tokens.unwrap_or(0).saturating_add(shape.cache_creation_input_tokens.unwrap_or(0));
        shape.input_tokens.map(|input| input.saturating_add(beside))
    });
    usage.prompt_tokens = prompt.or(usage.prompt_tokens);
    usage.completion_tokens = shape.completion_tokens.or(shape.output_tokens).or(usage.completion_tokens);
    usage.cached_tokens = cached.or(usage.cached_tokens);
}

/// Notes `sglext`. The details are there with or without `--enable-cache-report`, so they win over usage.
pub(super) fn note_details(raw: Raw<'_>, watch: &mut Watch) {
    let Some(SglExt { cached_tokens_details: Some(CachedDetails { device, host, storage }) }) = read(raw) else {
        return;
    };
    let sum = [device, host, storage].into_iter().flatten().fold(0_u64, u64::saturating_add);
    watch.seen.usage.cached_tokens = Some(sum);
}

/// What stays of an `sglext` without the cached-token details.
pub(super) enum Remainder {
    /// It has no details.
    Unchanged,
    /// Nothing that would be there without them.
    Nothing,
    /// These members.
    Some(String),
}

/// Takes the details out of an `sglext` object. With `n > 1` the engine puts an empty `spec_tokens_details` beside whatever
/// else is there, and none where nothing else is, so alone it does not count.
pub(super) fn without_details(sglext: &[u8]) -> Remainder {
    const DETAILS: &str = "cached_tokens_details";
    let Ok(members) = scan(&Bytes::copy_from_slice(sglext)) else { return Remainder::Unchanged };
    if !members.contains(DETAILS) {
        return Remainder::Unchanged;
    }
    let alone = members.keys().all(|key| {
        key == DETAILS || (key == "spec_tokens_details" && members.raw(key).is_some_and(|raw| raw == b"[]"))
    });
    if alone {
        return Remainder::Nothing;
    }
    match String::from_utf8(rewrite(&members, Edits::new().remove(DETAILS)).into()) {
        Ok(rest) => Remainder::Some(rest),
        Err(_) => Remainder::Unchanged,
    }
}

// === /generate ===

fn generate(data: &[u8], watch: &mut Watch) {
    let keys = &*KEYS;
    if !has(data, &keys.finish_reason) && !has(data, &keys.error) {
        watch.generated();
        return;
    }
    match serde_json::from_slice::<Generated<'_>>(data) {
        Ok(chunk) => note_generated(&chunk, watch),
        Err(_) => watch.seen.incomplete = true,
    }
}

/// Notes the last chunk of a `/generate` answer, or the whole of one. A batch has one for each prompt; they add up.
pub(super) fn note_generated(chunk: &Generated<'_>, watch: &mut Watch) {
    if chunk.error.is_some() {
        return note_error(chunk.error, watch);
    }
    let Some(meta) = &chunk.meta_info else { return };
    let finish = read::<Finish<'_>>(meta.finish_reason).unwrap_or_default();
    // An abort with a status is the scheduler refusing the turn; one without is somebody asking for it.
    if let (Some("abort"), Some(status)) = (text(finish.kind).as_deref(), finish.status_code) {
        return watch.fail(status, &text(finish.message).unwrap_or_default());
    }
    watch.generated();
    if let Some(reason) = text(finish.kind) {
        watch.finished(&reason);
    }
    let usage = &mut watch.seen.usage;
    let add = |sum: &mut Option<u64>, more: Option<u64>| {
        if let Some(more) = more {
            *sum = Some(sum.unwrap_or(0).saturating_add(more));
        }
    };
    add(&mut usage.prompt_tokens, meta.prompt_tokens);
    add(&mut usage.completion_tokens, meta.completion_tokens);
    add(&mut usage.cached_tokens, meta.cached_tokens);
}

// === Responses ===

/// The event's kind: its name, else the `type` of its data.
fn kind_of<'a>(event: &'a Event<'_>) -> &'a [u8] {
    if let Some(name) = event.name {
        return name;
    }
    let data = event.data.as_ref();
    let Some(at) = KEYS.kind.find(data) else { return b"" };
    let rest = data.get(at + KEYS.kind.needle().len()..).unwrap_or_default().trim_ascii_start();
    let value = rest.strip_prefix(b":").unwrap_or_default().trim_ascii_start().strip_prefix(b"\"").unwrap_or_default();
    value.split(|b| *b == b'"').next().unwrap_or_default()
}

fn responses(event: &Event<'_>, watch: &mut Watch) {
    let kind = kind_of(event);
    if kind.ends_with(b".delta") {
        watch.generated();
        return;
    }
    let ends = matches!(kind, b"response.completed" | b"response.incomplete" | b"response.failed");
    if !ends && !matches!(kind, b"error" | b"response.output_item.added") {
        return;
    }
    let Ok(data) = serde_json::from_slice::<Response<'_>>(&event.data) else {
        watch.seen.incomplete = true;
        return;
    };
    if kind == b"error" {
        if data.error.is_some() {
            note_error(data.error, watch);
        } else {
            let status = read::<u16>(data.code).unwrap_or(500);
            watch.fail(status, &text(data.message).unwrap_or_default());
        }
    }
    if let Some(item) = &data.item
        && text(item.kind).is_some_and(|kind| kind == "function_call")
    {
        watch.tool_called(&text(item.name).unwrap_or_default());
    }
    if ends {
        watch.seen.done = true;
        if let Some(response) = &data.response {
            note_response(response, watch);
        }
    }
}

/// Notes a finished Responses object, apart from its output items.
pub(super) fn note_response(response: &Response<'_>, watch: &mut Watch) {
    note_usage(response.usage, watch);
    let status = text(response.status).unwrap_or_default();
    let reason = response.incomplete_details.as_ref().and_then(|d| text(d.reason));
    match (status.as_ref(), reason) {
        ("failed", _) => note_error(response.error, watch),
        (_, Some(reason)) => watch.finished(&reason),
        ("", None) => {}
        (status, None) => watch.finished(status),
    }
}

// === Messages ===

fn anthropic(event: &Event<'_>, watch: &mut Watch) {
    match kind_of(event) {
        b"content_block_delta" => watch.generated(),
        b"message_stop" => watch.seen.done = true,
        b"message_start" | b"message_delta" | b"content_block_start" | b"error" => {
            match serde_json::from_slice::<Anthropic<'_>>(&event.data) {
                Ok(data) => {
                    note_anthropic(&data, watch);
                    if let Some(message) = &data.message {
                        note_anthropic(message, watch);
                    }
                    if let Some(delta) = &data.delta {
                        note_anthropic(delta, watch);
                    }
                }
                Err(_) => watch.seen.incomplete = true,
            }
        }
        _ => {}
    }
}

/// Notes an Anthropic message or a part of one.
pub(super) fn note_anthropic(message: &Anthropic<'_>, watch: &mut Watch) {
    if message.error.is_some() {
        note_error(message.error, watch);
    }
    note_usage(message.usage, watch);
    if let Some(reason) = text(message.stop_reason) {
        watch.finished(&reason);
    }
    for block in message.content.iter().flatten().chain(&message.content_block) {
        if text(block.kind).is_some_and(|kind| kind == "tool_use") {
            watch.tool_called(&text(block.name).unwrap_or_default());
        }
    }
}
