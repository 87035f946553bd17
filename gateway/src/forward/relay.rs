//! From the first byte to the last: chunks go to the client as they come, each flushed at once, those that are ready
//! together in one write.

use super::client_gone;
use super::open::{Opened, streams};
use super::writer::Writer;
use crate::policy::Event;
use crate::upstream::{describe, read_trailers};
use crate::workers::Worker;
use bytes::{Bytes, BytesMut};
use futures::FutureExt;
use futures::future::BoxFuture;
use http::{HeaderMap, Method, header};
use pingora_core::protocols::http::ServerSession;
use pingora_core::protocols::http::client::HttpSession;
use pingora_http::ResponseHeader;
use std::fmt;
use std::time::Duration;
use turnstile_fleet::observe::{Happening, Observer};
use turnstile_plugins::LocalResponse;

/// Chunks that are ready together are joined up to this size.
const JOIN_LIMIT: usize = 64 * 1024;

/// What may come after a stream's end mark comes within this time.
const DRAIN_LIMIT: Duration = Duration::from_millis(500);

/// How a relayed answer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// The worker's answer came whole.
    Finished,
    /// The worker's answer broke off.
    Cut(String),
    /// The client left.
    ClientGone,
    /// The worker was silent too long between two chunks, or the whole took too long.
    Timeout(String),
    /// A filter ended it. The worker did nothing wrong.
    Filter(Stop),
    /// A filter put the last piece into it before the worker had said its own: whole for the client.
    Shortened,
}

impl Ending {
    /// Its name in the log, and the label of `turnstile_attempts_total`.
    pub fn labels(&self) -> (&'static str, &'static str) {
        match self {
            Self::Finished => ("finished", "ok"),
            Self::Cut(_) => ("cut", "cut"),
            Self::ClientGone => ("client_gone", "client_gone"),
            Self::Timeout(_) => ("timeout", "timeout"),
            Self::Filter(Stop::Failed(_)) => ("plugin_failed", "plugin_failed"),
            Self::Filter(Stop::Answers(_)) => ("plugin_answer", "plugin_answer"),
            Self::Filter(Stop::Closes) => ("plugin_close", "plugin_close"),
            Self::Shortened => ("plugin_end", "plugin_end"),
        }
    }
}

/// How a response-side filter ends an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stop {
    /// It failed, and nothing may pass without it. In words for the client.
    Failed(String),
    /// It answers in the worker's place, which it can as long as nothing has reached the client.
    Answers(Box<LocalResponse>),
    /// It breaks the exchange off.
    Closes,
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(words) => f.write_str(words),
            Self::Answers(response) => write!(f, "a filter answered with {}", response.status),
            Self::Closes => f.write_str("a filter closed the stream"),
        }
    }
}

/// What filters do with the body of an answer.
pub trait ResponseFilter: Send {
    /// Sees and may change a chunk of the body; `end` marks the last. What comes out may be held back in part.
    ///
    /// # Errors
    /// The answer ends here. What comes after that is seen by the filters in front of the one that ended it only.
    fn chunk(&mut self, chunk: Bytes, end: bool) -> BoxFuture<'_, Result<Bytes, Stop>>;

    /// Resolves when something that was held back may go on, or something was put in. May be given up at any time.
    ///
    /// # Errors
    /// As [`ResponseFilter::chunk`].
    fn ready(&mut self) -> BoxFuture<'_, Result<(), Stop>>;

    /// What may go on once [`ResponseFilter::ready`] says so. What is given up half way is lost.
    ///
    /// # Errors
    /// As [`ResponseFilter::chunk`].
    fn release(&mut self) -> BoxFuture<'_, Result<Bytes, Stop>>;

    /// A filter has put the last piece into the answer: nothing of what follows passes.
    fn has_ended(&self) -> bool;

    /// Whether more of the answer is to be read: not while something is held back to its limit, under flow control.
    fn takes_more(&self) -> bool;

    /// The head of the answer, if filters have changed it since it was handed over.
    fn changed_head(&mut self) -> Option<ResponseHeader> {
        None
    }

    /// Sees and may change the trailers. What comes out of the body was held back until then.
    ///
    /// # Errors
    /// As [`ResponseFilter::chunk`].
    fn trailers(&mut self, trailers: HeaderMap) -> BoxFuture<'_, Result<(Bytes, HeaderMap), Stop>>;

    /// Hears of an event, if it asked for it.
    ///
    /// # Errors
    /// As [`ResponseFilter::chunk`].
    fn told(&mut self, event: &Event) -> Result<(), Stop>;
}

/// Who is told what happens in an answer.
pub trait Listener: Send {
    /// This was read in it.
    fn heard(&mut self, happenings: Vec<Happening>);

    /// What was heard and not yet told, since its bytes were on their way.
    fn due(&mut self) -> Vec<Event>;

    /// Tells it.
    ///
    /// # Errors
    /// The answer ends here.
    fn tell(&mut self, event: &Event) -> Result<(), Stop>;
}

/// Time limits of the relay.
#[derive(Debug, Clone, Copy)]
pub struct RelayLimits {
    /// `timeouts.between_bytes_s`.
    pub between: Duration,
    /// What is left of `timeouts.total_s`.
    pub total: Duration,
}

/// How the relay ended, and whether anything reached the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relayed {
    /// How it ended.
    pub ending: Ending,
    /// The head was written: it is too late for another answer.
    pub committed: bool,
    /// The client left. With [`Ending::Finished`]: after it had seen the stream's own end mark, as the OpenAI client does on
    /// every stream.
    pub left: bool,
    /// What the client has of a stream ends where an event does.
    pub between_events: bool,
    /// Bytes of the body that went to the client.
    pub body_bytes: usize,
    /// The worker's trailers.
    pub trailers: HeaderMap,
}

impl Relayed {
    /// A stream that the client has some of broke off, and another event can still be written to it.
    pub fn breaks_a_stream(&self) -> bool {
        let broken = matches!(self.ending, Ending::Cut(_) | Ending::Timeout(_) | Ending::Filter(_));
        self.committed && self.between_events && broken
    }
}

/// Adds headers that are known only when the head is about to be written.
pub type LateHeaders<'a> = dyn FnMut(&Observer, &mut ResponseHeader) + Send + 'a;

/// Whether nothing can follow the head of this answer, or nothing will by its own word.
pub fn is_bodiless(client: &ServerSession, head: &ResponseHeader) -> bool {
    client.req_header().method == Method::HEAD
        || matches!(head.status.as_u16(), 204 | 304)
        || head.headers.get(header::CONTENT_LENGTH).is_some_and(|length| length == "0")
}

/// Relays an answer of `worker`. `head` is what the client gets.
#[allow(clippy::too_many_arguments)]
pub async fn relay(
    client: &mut ServerSession,
    opened: &mut Opened,
    head: ResponseHeader,
    filter: &mut Option<Box<dyn ResponseFilter + '_>>,
    listener: &mut Option<Box<dyn Listener + '_>>,
    late: &mut LateHeaders<'_>,
    limits: RelayLimits,
    worker: &Worker,
) -> Relayed {
    let holds = opened.observer.is_some() && !streams(&opened.head);
    let measures = !streams(&opened.head) && !is_bodiless(client, &opened.head);
    let mut writer = Writer { head: Some(head), holds, measures, ..Writer::default() };
    let ending = {
        let run =
            std::pin::pin!(relay_inner(client, opened, &mut writer, filter, listener, late, limits.between, worker));
        tokio::time::timeout(limits.total, run).await
    };
    let ending = ending.unwrap_or_else(|_| Ending::Timeout("timeouts.total_s is over".into()));
    let left = ending == Ending::ClientGone;
    let complete = opened.observer.as_ref().is_some_and(|o| o.observation().done);
    let committed = writer.head.is_none();
    let between_events = !writer.writing && writer.between_events && !writer.bodiless;
    let (body_bytes, trailers) = (writer.body_bytes, writer.trailers);
    if left && complete && committed {
        // All that is missing is the framing's end; reading it keeps the worker's connection usable.
        hear(opened, listener);
        let _ = tell(listener, filter);
        opened.ended |= drain(&mut opened.session).await;
        return Relayed { ending: Ending::Finished, committed, left, between_events, body_bytes, trailers };
    }
    if complete && ending == Ending::Shortened {
        // The worker has said all: nothing but the framing's end is missing here, too.
        opened.ended |= drain(&mut opened.session).await;
        return Relayed { ending: Ending::Finished, committed, left, between_events, body_bytes, trailers };
    }
    Relayed { ending, committed, left, between_events, body_bytes, trailers }
}

/// Reads what is left of an answer that has said its last. True when it came to its end.
async fn drain(session: &mut HttpSession) -> bool {
    let rest = async {
        loop {
            match session.read_response_body().await {
                Ok(Some(_)) => {}
                Ok(None) => return true,
                Err(_) => return false,
            }
        }
    };
    tokio::time::timeout(DRAIN_LIMIT, rest).await.unwrap_or(false)
}

/// What happened in what was read is waiting to be told.
fn hear(opened: &mut Opened, listener: &mut Option<Box<dyn Listener + '_>>) {
    if let (Some(listener), Some(observer)) = (listener, &mut opened.observer) {
        listener.heard(observer.take_happenings());
    }
}

/// Tells what happened in what has been written: policies first, then filters.
fn tell(
    listener: &mut Option<Box<dyn Listener + '_>>,
    filter: &mut Option<Box<dyn ResponseFilter + '_>>,
) -> Result<(), Ending> {
    let Some(listener) = listener else { return Ok(()) };
    for event in listener.due() {
        listener.tell(&event).map_err(Ending::Filter)?;
        if let Some(filter) = filter {
            filter.told(&event).map_err(Ending::Filter)?;
        }
    }
    Ok(())
}

#[allow(clippy::too_many_arguments)]
async fn relay_inner(
    client: &mut ServerSession,
    opened: &mut Opened,
    writer: &mut Writer,
    filter: &mut Option<Box<dyn ResponseFilter + '_>>,
    listener: &mut Option<Box<dyn Listener + '_>>,
    late: &mut LateHeaders<'_>,
    between: Duration,
    worker: &Worker,
) -> Ending {
    let mut out = std::mem::take(&mut opened.pending);
    opened.session.set_read_timeout(Some(between));
    loop {
        let mut broken = None;
        if writer.head.is_some() && has_ended(filter) {
            // Nothing of what the worker says is waited for.
            writer.complete_head(filter, &opened.observer, late);
            return match writer.write(client, Bytes::new(), true, HeaderMap::new()).await {
                Ok(()) => Ending::Shortened,
                Err(ending) => ending,
            };
        }
        if !opened.ended {
            // The first event is in hand already when a stream begins: take what is ready beside it, but do not wait.
            let wait = writer.holds || writer.head.is_none() || out.is_empty();
            match read_ready(client, &mut opened.session, &mut opened.observer, &mut out, wait, filter).await {
                Ok(Ready::Chunks { ended }) => {
                    opened.ended = ended;
                    worker.note_heard();
                }
                Ok(Ready::Released(chunk)) => {
                    let mut last = has_ended(filter);
                    if !chunk.is_empty() || last {
                        last |= writer.complete_head(filter, &opened.observer, late);
                        if let Err(ending) = writer.write(client, chunk, last, HeaderMap::new()).await {
                            return ending;
                        }
                        if let (Err(ending), false) = (tell(listener, filter), last) {
                            return ending;
                        }
                    }
                    if last {
                        return Ending::Shortened;
                    }
                    continue;
                }
                Err(ending @ (Ending::ClientGone | Ending::Filter(_))) => return ending,
                Err(ending) => broken = Some(ending),
            }
        }
        hear(opened, listener);
        let mut trailers = HeaderMap::new();
        if opened.ended && broken.is_none() {
            match trailers_of(client, opened).await {
                Ok(read) => {
                    if filter.is_none() && !read.is_empty() {
                        writer.trailers = read.clone();
                    }
                    trailers = read;
                }
                Err(Ending::ClientGone) => return Ending::ClientGone,
                Err(ending) => broken = Some(ending),
            }
        }
        if opened.ended && broken.is_none() {
            broken = unfinished(opened, writer, &out).map(|reason| Ending::Cut(reason.into()));
        }
        // Nothing of a whole answer has reached the client yet: another worker may still give one.
        if writer.holds
            && writer.head.is_some()
            && let Some(ending) = broken
        {
            return ending;
        }
        // A held body comes out at its end, or as soon as it is too large to be held.
        let releases = opened.ended || !writer.holds || !out.is_empty();
        if releases && !(broken.is_some() && out.is_empty()) {
            let end = opened.ended && broken.is_none();
            let joined = join(&mut out);
            let (chunk, trailers) = match filtered(client, filter, joined, end, trailers).await {
                Ok(passed) => passed,
                Err(ending) => return ending,
            };
            let last = end || has_ended(filter);
            // As long as a filter holds what there is, the head waits with it: the filter may still answer in its place.
            if chunk.is_empty() && !last {
                match broken {
                    Some(ending) => return ending,
                    None => continue,
                }
            }
            let last = writer.complete_head(filter, &opened.observer, late) || last;
            if let Err(ending) = writer.write(client, chunk, last, trailers).await {
                return ending;
            }
            writer.between_events = opened.observer.as_ref().is_some_and(Observer::between_events);
            // Nobody can end what has ended already.
            if let (Err(ending), false) = (tell(listener, filter), last) {
                return ending;
            }
            if last && !end {
                return Ending::Shortened;
            }
        }
        if let Some(ending) = broken {
            return ending;
        }
        if opened.ended {
            return Ending::Finished;
        }
    }
}

/// What stands behind the body.
async fn trailers_of(client: &mut ServerSession, opened: &mut Opened) -> Result<HeaderMap, Ending> {
    tokio::select! {
        biased;
        read = read_trailers(&mut opened.session) => read.map_err(|error| Ending::Cut(describe(&error))),
        () = client_gone(client) => Err(Ending::ClientGone),
    }
}

/// A chunk, and trailers, as the filters leave them.
async fn filtered(
    client: &mut ServerSession,
    filter: &mut Option<Box<dyn ResponseFilter + '_>>,
    chunk: Bytes,
    end: bool,
    trailers: HeaderMap,
) -> Result<(Bytes, HeaderMap), Ending> {
    let Some(filter) = filter else { return Ok((chunk, trailers)) };
    let run = async {
        if trailers.is_empty() {
            return Ok((filter.chunk(chunk, end).await?, trailers));
        }
        let chunk = filter.chunk(chunk, false).await?;
        let (held, trailers) = filter.trailers(trailers).await?;
        Ok((if held.is_empty() { chunk } else { Bytes::from([chunk, held].concat()) }, trailers))
    };
    tokio::select! {
        biased;
        passed = run => passed.map_err(Ending::Filter),
        () = client_gone(client) => Err(Ending::ClientGone),
    }
}

/// What is wrong with an answer that came to its end in good order: a stream without its end mark, JSON that is none. Nobody
/// who reads it could tell that something is missing.
fn unfinished(opened: &Opened, writer: &Writer, out: &[Bytes]) -> Option<&'static str> {
    opened.observer.as_ref().filter(|o| !o.observation().done && o.observation().error.is_none())?;
    if streams(&opened.head) {
        return Some("the stream ended without its end mark");
    }
    // What is known to be whole is done; what is of an unknown shape is looked at once more. Only a body in hand can still be
    // replaced.
    let whole = writer.head.is_some() && is_json(&opened.head);
    let is_none = || serde_json::from_slice::<serde::de::IgnoredAny>(&out.concat()).is_err();
    (whole && is_none()).then_some("the answer is no JSON")
}

fn is_json(head: &ResponseHeader) -> bool {
    let kind = head.headers.get(header::CONTENT_TYPE).map(|v| v.as_bytes()).unwrap_or_default();
    kind.get(..16).is_some_and(|v| v.eq_ignore_ascii_case(b"application/json"))
}

/// What there is to go on with.
enum Ready {
    /// Chunks of the answer; `ended`: it has come to its end.
    Chunks { ended: bool },
    /// What filters held back.
    Released(Bytes),
}

/// Takes what is ready, after waiting for the first chunk if `wait`, or for filters to release what they hold.
async fn read_ready(
    client: &mut ServerSession,
    upstream: &mut HttpSession,
    observer: &mut Option<Observer>,
    out: &mut Vec<Bytes>,
    wait: bool,
    filter: &mut Option<Box<dyn ResponseFilter + '_>>,
) -> Result<Ready, Ending> {
    let mut size = 0;
    if filter.as_ref().is_some_and(|filter| !filter.takes_more()) {
        return released(client, filter).await;
    }
    loop {
        let read = if !wait || size > 0 {
            match upstream.read_response_body().now_or_never() {
                Some(read) => read,
                None => return Ok(Ready::Chunks { ended: false }),
            }
        } else {
            tokio::select! {
                biased;
                read = upstream.read_response_body() => read,
                () = client_gone(client) => return Err(Ending::ClientGone),
                ready = ready(filter) => {
                    ready.map_err(Ending::Filter)?;
                    return released(client, filter).await;
                }
            }
        };
        match read {
            Ok(Some(chunk)) => {
                size += chunk.len();
                match observer {
                    Some(observer) => observer.push(chunk, out),
                    None => out.push(chunk),
                }
                if size >= JOIN_LIMIT {
                    return Ok(Ready::Chunks { ended: false });
                }
            }
            Ok(None) => {
                if let Some(observer) = observer {
                    observer.finish(out);
                }
                return Ok(Ready::Chunks { ended: true });
            }
            Err(error) => {
                use pingora_core::ErrorType::ReadTimedout;
                return Err(match error.etype() {
                    ReadTimedout => Ending::Timeout("timeouts.between_bytes_s is over".into()),
                    _ => Ending::Cut(describe(&error)),
                });
            }
        }
    }
}

fn has_ended(filter: &Option<Box<dyn ResponseFilter + '_>>) -> bool {
    filter.as_ref().is_some_and(|filter| filter.has_ended())
}

async fn ready(filter: &mut Option<Box<dyn ResponseFilter + '_>>) -> Result<(), Stop> {
    match filter {
        Some(filter) => filter.ready().await,
        None => std::future::pending().await,
    }
}

/// Waits for what filters release, and for nothing else but the client.
async fn released(
    client: &mut ServerSession,
    filter: &mut Option<Box<dyn ResponseFilter + '_>>,
) -> Result<Ready, Ending> {
    let Some(filter) = filter else { return Ok(Ready::Released(Bytes::new())) };
    let run = async {
        filter.ready().await?;
        filter.release().await
    };
    tokio::select! {
        biased;
        () = client_gone(client) => Err(Ending::ClientGone),
        released = run => released.map(Ready::Released).map_err(Ending::Filter),
    }
}

fn join(out: &mut Vec<Bytes>) -> Bytes {
    match out.len() {
        0 => Bytes::new(),
        1 => out.pop().unwrap_or_default(),
        _ => {
            let mut joined = BytesMut::with_capacity(out.iter().map(Bytes::len).sum());
            for piece in out.drain(..) {
                joined.extend_from_slice(&piece);
            }
            joined.freeze()
        }
    }
}
