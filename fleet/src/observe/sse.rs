//! Cuts a byte stream into server-sent events. Lines may end in LF or CRLF; data may have several lines.

use std::borrow::Cow;

use bytes::{BufMut, Bytes, BytesMut};

use super::event::observe;
use super::{Verdict, Watch};
use crate::complaint::clean_event;

/// The state between two chunks.
#[derive(Default)]
pub(super) struct Stream {
    line: Line,
    /// The begun event, copied. Empty between events.
    pending: BytesMut,
    /// The begun event is too large to look at; it passes.
    skipping: bool,
}

/// Where in a line the stream stands. An event ends at an empty line.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Line {
    #[default]
    Start,
    /// Only a carriage return so far.
    StartReturn,
    Inside,
}

/// One event, parsed.
pub(super) struct Event<'a> {
    /// The `event:` name, if any.
    pub(super) name: Option<&'a [u8]>,
    /// The data, its lines joined.
    pub(super) data: Cow<'a, [u8]>,
    /// Where the data stands in the event, if it is one line.
    span: Option<(usize, usize)>,
}

impl Stream {
    pub(super) fn push(&mut self, chunk: Bytes, watch: &mut Watch, out: &mut Vec<Bytes>) {
        let holding = watch.holds();
        if !holding {
            out.push(chunk.clone());
        }
        // `sent` is how far the chunk has gone out (when holding), `at` how far it has been looked at.
        let (mut sent, mut at) = (0, 0);
        while at < chunk.len() {
            let rest = chunk.get(at..).unwrap_or_default();
            let Some(length) = self.line.event_end(rest) else {
                if self.skipping {
                    break;
                }
                if self.pending.len() + rest.len() > watch.options.max_event_bytes {
                    self.skipping = true;
                    pass_over(watch);
                    let begun = self.pending.split().freeze();
                    if holding && !begun.is_empty() {
                        out.push(begun);
                    }
                    break;
                }
                self.pending.put_slice(rest);
                if holding {
                    forward(&chunk, sent, at, out);
                }
                return;
            };
            let end = at + length;
            if self.skipping {
                self.skipping = false;
            } else if self.pending.len() + length > watch.options.max_event_bytes {
                // What is too large does not depend on how it was split.
                pass_over(watch);
                let begun = self.pending.split().freeze();
                if holding && !begun.is_empty() {
                    out.push(begun);
                }
            } else if self.pending.is_empty() {
                match judge(chunk.get(at..end).unwrap_or_default(), watch) {
                    Verdict::Keep => {}
                    Verdict::Drop => {
                        forward(&chunk, sent, at, out);
                        sent = end;
                    }
                    Verdict::Replace(event) => {
                        forward(&chunk, sent, at, out);
                        out.push(event);
                        sent = end;
                    }
                }
            } else {
                self.pending.put_slice(rest.get(..length).unwrap_or_default());
                let event = self.pending.split().freeze();
                let verdict = judge(&event, watch);
                if holding {
                    match verdict {
                        Verdict::Keep => out.push(event),
                        Verdict::Drop => {}
                        Verdict::Replace(event) => out.push(event),
                    }
                }
                sent = end;
            }
            at = end;
        }
        if holding {
            forward(&chunk, sent, chunk.len(), out);
        }
    }

    pub(super) fn finish(&mut self, watch: &mut Watch, out: &mut Vec<Bytes>) {
        let rest = self.pending.split().freeze();
        if rest.is_empty() {
            return;
        }
        // A stream that ends without the last empty line has still said its last event; a line cut short has not.
        let verdict = if rest.ends_with(b"\n") { judge(&rest, watch) } else { Verdict::Keep };
        if watch.holds() {
            match verdict {
                Verdict::Keep => out.push(rest),
                Verdict::Drop => {}
                Verdict::Replace(event) => out.push(event),
            }
        }
    }

    /// Nothing of a begun event has gone out. That is only so while events are held.
    pub(super) fn is_between_events(&self) -> bool {
        !self.skipping
    }
}

/// Notes an event that is too large to look at.
fn pass_over(watch: &mut Watch) {
    watch.seen.incomplete = true;
    watch.is_first(super::First::Data);
}

fn forward(chunk: &Bytes, from: usize, to: usize, out: &mut Vec<Bytes>) {
    if from < to {
        out.push(chunk.slice(from..to));
    }
}

/// Looks at one whole event. A replacement comes back as the whole event.
fn judge(raw: &[u8], watch: &mut Watch) -> Verdict {
    let Some(event) = parse(raw) else { return Verdict::Keep };
    watch.failing = false;
    let mut verdict = observe(&event, watch);
    if watch.failing
        && watch.options.clean_errors
        && matches!(verdict, Verdict::Keep)
        && let Some(cleaned) = clean_event(&event.data, &[])
    {
        verdict = Verdict::Replace(cleaned);
    }
    match (verdict, event.span) {
        (Verdict::Replace(data), Some((from, to))) => {
            let mut whole = BytesMut::with_capacity(raw.len());
            whole.put_slice(raw.get(..from).unwrap_or_default());
            whole.put_slice(&data);
            whole.put_slice(raw.get(to..).unwrap_or_default());
            Verdict::Replace(whole.freeze())
        }
        (Verdict::Replace(_), None) => Verdict::Keep,
        (verdict, _) => verdict,
    }
}

/// The event's name and data; none if it has no data (a comment, a bare field, an empty line).
fn parse(raw: &[u8]) -> Option<Event<'_>> {
    let mut name = None;
    let mut data: Option<Cow<'_, [u8]>> = None;
    let mut span = None;
    let mut at = 0;
    while at < raw.len() {
        let rest = raw.get(at..)?;
        let length = memchr::memchr(b'\n', rest).unwrap_or(rest.len());
        let line = rest.get(..length)?;
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if let Some(value) = field(line, b"data") {
            match &mut data {
                None => {
                    let from = at + (line.len() - value.len());
                    span = Some((from, from + value.len()));
                    data = Some(Cow::Borrowed(value));
                }
                Some(data) => {
                    span = None;
                    let joined = data.to_mut();
                    joined.push(b'\n');
                    joined.extend_from_slice(value);
                }
            }
        } else if let Some(value) = field(line, b"event") {
            name = Some(value);
        }
        at += length + 1;
    }
    data.map(|data| Event { name, data, span })
}

fn field<'a>(line: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let rest = line.strip_prefix(name)?;
    match rest.split_first() {
        None => Some(rest),
        Some((b':', value)) => Some(value.strip_prefix(b" ").unwrap_or(value)),
        Some(_) => None,
    }
}

// === impl Line ===

impl Line {
    /// Reads on in `bytes`. The length up to the end of the event, if it ends there.
    fn event_end(&mut self, bytes: &[u8]) -> Option<usize> {
        let mut at = 0;
        loop {
            if *self == Self::Inside {
                let rest = bytes.get(at..)?;
                at += memchr::memchr(b'\n', rest)? + 1;
                *self = Self::Start;
            }
            match bytes.get(at)? {
                b'\n' => {
                    *self = Self::Start;
                    return Some(at + 1);
                }
                b'\r' if *self == Self::Start => {
                    *self = Self::StartReturn;
                    at += 1;
                }
                _ => *self = Self::Inside,
            }
        }
    }
}
