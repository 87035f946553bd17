//! Watching an answer on its way to the client.
//!
//! The bytes pass untouched and at once; what is learned (usage, cached tokens, finish reason, tool calls, errors) is read
//! beside them. Events and members that are there only because the gateway asked for them are taken out, the message of an
//! error event is cleaned, and nothing else changes: only then are the bytes of an unfinished event held back, which no
//! client could use yet anyway. Everything held is bounded; what exceeds a bound passes unobserved.

mod event;
mod happening;
mod json;
pub(crate) mod shapes;
mod sse;

use happening::Heard;
pub use happening::{Asked, Happening, MOST_OF_A_KIND};

use bytes::Bytes;

use crate::reply::{Reply, ReplyBuilder};
use crate::route::Route;

/// How to watch an answer.
#[derive(Clone, Debug)]
pub struct ObserveOptions {
    /// The usage event of the stream is ours: take it out.
    pub strip_usage: bool,
    /// `sglext.cached_tokens_details` is ours: take it out.
    pub strip_cached_details: bool,
    /// Somebody asked for the details. The engine leaves them out when nothing was cached, so their absence means zero.
    pub cached_details_asked: bool,
    /// Clean the messages of error events as [`crate::complaint`] does.
    pub clean_errors: bool,
    /// Gather the assistant message (chat only).
    pub collect_reply: bool,
    /// What is kept for [`Observer::take_happenings`].
    pub asked: Asked,
    /// Largest message gathered, in bytes of text. A longer one is given up.
    pub max_reply_bytes: usize,
    /// Largest event looked at, in bytes. A larger one passes unobserved.
    pub max_event_bytes: usize,
    /// Largest JSON answer looked at, in bytes. A larger one passes unobserved.
    pub max_body_bytes: usize,
}

/// Token counts as far as the worker told them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt, cached ones included, on every protocol.
    pub prompt_tokens: Option<u64>,
    /// Tokens generated.
    pub completion_tokens: Option<u64>,
    /// Tokens of the prompt that were cached.
    pub cached_tokens: Option<u64>,
}

/// An error that the worker reported in a body or stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerError {
    /// The HTTP status that the error stands for; 500 if it does not say.
    pub status: u16,
    /// The worker's words, cut to a bounded length. They may quote the request: not for logs that leave the machine.
    pub message: String,
}

/// What the first event of a stream was. Until it is known, the answer can still be given up for a retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstEvent<'a> {
    /// It has not arrived, or what has arrived only says that the worker took the request ([`Observer::has_opened`]).
    None,
    /// An ordinary event.
    Data,
    /// An error: the worker did not serve the turn, although its status was 200.
    Error(&'a WorkerError),
}

/// Everything learned about an answer so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    /// Token counts.
    pub usage: Usage,
    /// Why generation ended, in the protocol's own word; of several answers the last.
    pub finish_reason: Option<String>,
    /// Names of the tools called, in order, bounded in number and length.
    pub tool_calls: Vec<String>,
    /// An error the worker reported.
    pub error: Option<WorkerError>,
    /// The stream said that it is complete.
    pub done: bool,
    /// Events with data, the end mark not counted.
    pub events: u64,
    /// Events that carried generated tokens.
    pub content_events: u64,
    /// Something was too large to be looked at, or not in a shape we know.
    pub incomplete: bool,
    /// Happenings that were asked for and left out, because there were too many of their kind.
    pub left_out: u64,
}

/// Watches one answer.
pub struct Observer {
    framing: Framing,
    watch: Watch,
}

enum Framing {
    Sse(sse::Stream),
    Json(json::Body),
}

/// What the framings share: options and what is known so far.
struct Watch {
    route: Route,
    options: ObserveOptions,
    seen: Observation,
    first: First,
    /// The event at hand is an error.
    failing: bool,
    /// An event came that says no more than that the worker took the request.
    opened: bool,
    reply: Option<ReplyBuilder>,
    heard: Heard,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum First {
    Unknown,
    Data,
    Error,
}

/// What becomes of an event.
enum Verdict {
    Keep,
    Drop,
    /// Its data is replaced by this text.
    Replace(Bytes),
}

// === impl Observer ===

impl Observer {
    /// Watches an answer of `route`. `stream` tells whether the answer is an event stream, by its content type.
    pub fn new(route: Route, stream: bool, options: ObserveOptions) -> Self {
        let heard = Heard::new(options.asked, stream);
        let reply = (options.collect_reply && route == Route::Chat).then(|| ReplyBuilder::new(options.max_reply_bytes));
        Self {
            framing: if stream { Framing::Sse(sse::Stream::default()) } else { Framing::Json(json::Body::default()) },
            watch: Watch {
                route,
                options,
                seen: Observation::default(),
                first: First::Unknown,
                failing: false,
                opened: false,
                reply,
                heard,
            },
        }
    }

    /// Takes the next bytes of the answer and appends to `out` what is to be sent now, as slices of the input where
    /// possible. The input may be split anywhere.
    pub fn push(&mut self, chunk: Bytes, out: &mut Vec<Bytes>) {
        match &mut self.framing {
            Framing::Sse(stream) => stream.push(chunk, &mut self.watch, out),
            Framing::Json(body) => body.push(chunk, &mut self.watch, out),
        }
    }

    /// Ends the answer, however it ended, and appends what is still to be sent. Bytes that never made a whole event or
    /// body go out as they are.
    pub fn finish(&mut self, out: &mut Vec<Bytes>) {
        match &mut self.framing {
            Framing::Sse(stream) => stream.finish(&mut self.watch, out),
            Framing::Json(body) => body.finish(&mut self.watch, out),
        }
        self.watch.settle();
    }

    /// Whether the answer may come out shorter than it went in, so that its Content-Length cannot be passed on before
    /// [`Observer::finish`].
    pub fn may_change_length(&self) -> bool {
        self.watch.strips() || (self.watch.options.clean_errors && matches!(self.framing, Framing::Sse(_)))
    }

    /// Whether what has come out of a stream so far ends where an event does, so that another one may follow.
    pub fn between_events(&self) -> bool {
        match &self.framing {
            Framing::Sse(stream) => self.watch.holds() && stream.is_between_events(),
            Framing::Json(_) => false,
        }
    }

    /// What the first event of the stream was; for a JSON answer, what the whole of it is, known at its end.
    pub fn first_event(&self) -> FirstEvent<'_> {
        match (self.watch.first, &self.watch.seen.error) {
            (First::Unknown, _) => FirstEvent::None,
            (First::Error, Some(error)) => FirstEvent::Error(error),
            _ => FirstEvent::Data,
        }
    }

    /// Whether the stream has begun with events that say no more than that the worker took the request: the worker of a
    /// Responses stream sends them at once, and may refuse the request after them.
    pub fn has_opened(&self) -> bool {
        self.watch.opened
    }

    /// What is known so far.
    pub fn observation(&self) -> &Observation {
        &self.watch.seen
    }

    /// What has happened since the last question, in order, of what [`ObserveOptions::asked`] names.
    pub fn take_happenings(&mut self) -> Vec<Happening> {
        self.watch.heard.take()
    }

    /// The assistant message, if it was gathered and is whole: one answer, finished for a reason that is not an abort,
    /// within the bound, with no event passed over. Call it after [`Observer::finish`].
    pub fn take_reply(&mut self) -> Option<Reply> {
        if self.watch.seen.error.is_some() || self.watch.seen.incomplete {
            return None;
        }
        self.watch.reply.take().and_then(ReplyBuilder::build)
    }
}

// === impl Watch ===

impl Watch {
    fn strips(&self) -> bool {
        self.options.strip_usage || self.options.strip_cached_details
    }

    /// Whether an event goes out only when it is whole.
    fn holds(&self) -> bool {
        self.strips() || self.options.clean_errors
    }

    fn is_first(&mut self, first: First) {
        if self.first == First::Unknown {
            self.first = first;
        }
    }

    fn fail(&mut self, status: u16, message: &str) {
        const MAX_MESSAGE_BYTES: usize = 512;
        if self.seen.error.is_none() {
            let message = cut(message, MAX_MESSAGE_BYTES).to_owned();
            self.seen.error = Some(WorkerError { status, message });
        }
        self.failing = true;
        self.is_first(First::Error);
    }

    /// An event carries generated tokens.
    fn generated(&mut self) {
        self.seen.content_events += 1;
        self.heard.token();
    }

    fn tool_called(&mut self, name: &str) {
        const MAX_TOOL_NAME_BYTES: usize = 128;
        if name.is_empty() {
            return;
        }
        let name = cut(name, MAX_TOOL_NAME_BYTES);
        self.seen.left_out += u64::from(!self.heard.tool_call(name));
        if self.seen.tool_calls.len() < MOST_OF_A_KIND {
            self.seen.tool_calls.push(name.to_owned());
        }
    }

    fn finished(&mut self, reason: &str) {
        let reason = cut(reason, 64);
        self.seen.left_out += u64::from(!self.heard.finish(reason));
        self.seen.finish_reason = Some(reason.to_owned());
    }

    /// Draws the conclusions that need the whole answer.
    fn settle(&mut self) {
        let served = self.seen.finish_reason.is_some() && self.seen.error.is_none();
        if served && self.options.cached_details_asked && !self.seen.incomplete {
            self.seen.usage.cached_tokens.get_or_insert(0);
        }
    }
}

fn cut(text: &str, max: usize) -> &str {
    let mut end = text.len().min(max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default()
}

impl Default for ObserveOptions {
    /// Strips and gathers nothing; bounds that fit any answer of an agent's turn.
    fn default() -> Self {
        Self {
            strip_usage: false,
            strip_cached_details: false,
            cached_details_asked: false,
            clean_errors: false,
            collect_reply: false,
            asked: Asked::default(),
            max_reply_bytes: 1 << 20,
            max_event_bytes: 4 << 20,
            max_body_bytes: 16 << 20,
        }
    }
}

#[cfg(test)]
#[path = "observe_tests.rs"]
mod tests;
