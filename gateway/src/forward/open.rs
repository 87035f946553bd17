//! One attempt on one worker: connect, send, and wait until the answer has really begun.
//!
//! SGLang reports errors inside 200 streams, so a stream counts as begun only with its first event; up to then the
//! attempt can still be given to another worker. Responses opens its streams before the engine has seen the request; those
//! events are held back for a while, since what follows them may be an error.

use super::{AttemptFault, client_gone};
use crate::upstream::{Head, Link, STALE_WITHIN, Target, Upstream, describe};
use bytes::{Bytes, BytesMut};
use pingora_core::ErrorType;
use pingora_core::protocols::http::ServerSession;
use pingora_core::protocols::http::client::HttpSession;
use pingora_http::ResponseHeader;
use std::time::{Duration, Instant};
use turnstile_fleet::body::Pieces;
use turnstile_fleet::complaint::status_of;
use turnstile_fleet::observe::{FirstEvent, ObserveOptions, Observer};
use turnstile_fleet::route::Route;

/// The most of an error answer that is read.
const ERROR_BODY_LIMIT: usize = 256 * 1024;
/// The longest that an error answer is waited for: workers write them in one piece.
const ERROR_BODY_WAIT: Duration = Duration::from_secs(5);

/// How long the events are held that only open a stream. A full queue or an engine that is gone shows at once; a client that
/// wants to know whether its request was taken waits no longer than that. (Chat streams say nothing at all in that time.)
const OPENING_WAIT: Duration = Duration::from_secs(5);
/// How much of them is held. They repeat instructions and tools of the request.
const OPENING_LIMIT: usize = 4 * 1024 * 1024;

/// What goes to the worker.
pub struct Outgoing<'a> {
    /// Where to.
    pub target: &'a Target,
    /// Request line and headers, framing included.
    pub head: Head,
    /// The body.
    pub body: Pieces,
    /// The longest wait for the first byte, for a stream for the first event.
    pub first_byte: Duration,
    /// The longest time one write may block.
    pub write: Duration,
    /// Somebody wants to see the trailers of the answer.
    pub trailers: bool,
}

/// An answer that has begun.
pub struct Opened {
    /// The connection it comes from.
    pub session: HttpSession,
    /// Its head.
    pub head: ResponseHeader,
    /// What watches it.
    pub observer: Option<Observer>,
    /// What has been read and observed so far, ready for the client.
    pub pending: Vec<Bytes>,
    /// The answer has been read to its end.
    pub ended: bool,
}

/// How to watch the answer, once it is known whether it is a stream.
pub struct Watch {
    /// The route asked.
    pub route: Route,
    /// What to take out and what to gather.
    pub options: ObserveOptions,
}

struct Begun {
    head: ResponseHeader,
    observer: Option<Observer>,
    pending: Vec<Bytes>,
    ended: bool,
}

/// Sends the request and waits for the answer to begin.
///
/// A pooled connection that turns out dead at once is replaced by a new one, once, which is no fault. `stuck` resolves when it
/// makes no sense to wait for this worker any longer.
///
/// # Errors
/// See [`AttemptFault`]; nothing has reached the client then.
pub async fn open(
    upstream: &Upstream,
    client: &mut ServerSession,
    outgoing: Outgoing<'_>,
    watch: Option<&Watch>,
    stuck: impl Future<Output = ()>,
) -> Result<Box<Opened>, AttemptFault> {
    tokio::pin!(stuck);
    let mut second;
    let mut target = outgoing.target;
    let mut sent = false;
    loop {
        let (mut link, reused) = tokio::select! {
            biased;
            connected = upstream.connect(target) => connected.map_err(|e| connect_fault(&e, sent))?,
            () = client_gone(client) => return Err(AttemptFault::ClientGone),
        };
        if outgoing.trailers {
            link.watch_trailers();
        }
        let started = Instant::now();
        let begun = {
            let begins = std::pin::pin!(begin(&mut link, target, &outgoing, watch));
            tokio::select! {
                biased;
                begun = tokio::time::timeout(outgoing.first_byte, begins) => begun
                    .unwrap_or_else(|_| Err(AttemptFault::Timeout("no answer within timeouts.first_byte_s".into()))),
                () = client_gone(client) => Err(AttemptFault::ClientGone),
                () = &mut stuck => Err(AttemptFault::Stuck),
            }
        };
        match begun {
            Ok(begun) => {
                let Begun { head, observer, pending, ended } = begun;
                let Some(session) = link.into_session() else { return Err(AttemptFault::ClientGone) };
                return Ok(Box::new(Opened { session, head, observer, pending, ended }));
            }
            Err(AttemptFault::Broken { answered: false, .. }) if reused && started.elapsed() < STALE_WITHIN => {
                link.shutdown().await;
                second = target.fresh();
                target = &second;
                sent = true;
            }
            Err(fault) => {
                link.shutdown().await;
                return Err(fault);
            }
        }
    }
}

async fn begin(
    link: &mut Link,
    target: &Target,
    outgoing: &Outgoing<'_>,
    watch: Option<&Watch>,
) -> Result<Begun, AttemptFault> {
    let silent = |e: Box<pingora_core::Error>| read_fault(&e, false);
    let session = link.send(target, &outgoing.head, &outgoing.body, outgoing.write).await.map_err(silent)?;
    let head = loop {
        session.read_response_header().await.map_err(silent)?;
        match session.response_header() {
            Some(head) if head.status.is_informational() && head.status != http::StatusCode::SWITCHING_PROTOCOLS => {}
            Some(head) => break head.clone(),
            None => return Err(AttemptFault::Broken { reason: "no response head".into(), answered: true }),
        }
    };
    if !head.status.is_success() {
        // What is no answer to a request has no body to wait for: a protocol that was switched never ends.
        if !head.status.is_client_error() && !head.status.is_server_error() {
            let status = head.status.as_u16();
            return Err(AttemptFault::Protocol(format!("status {status}, which is no answer to a request")));
        }
        let body = whole_body(session, ERROR_BODY_LIMIT).await?;
        // What it means, which Responses says in the text only: a full queue is retried whatever the route calls it.
        let status = status_of(head.status.as_u16(), &body);
        return Err(AttemptFault::Status { status, head: Box::new(head), body });
    }
    let mut pending = Vec::new();
    let Some(watch) = watch else {
        return Ok(Begun { head, observer: None, pending, ended: false });
    };
    let mut observer = Observer::new(watch.route, streams(&head), watch.options.clone());
    // A stream is judged by its first event. Other answers are judged by their status alone.
    let mut opened = None;
    while streams(&head) && observer.first_event() == FirstEvent::None {
        let read = session.read_response_body();
        let read = match opened {
            Some(_) if pending.iter().map(Bytes::len).sum::<usize>() > OPENING_LIMIT => break,
            Some(at) => match tokio::time::timeout_at(at + OPENING_WAIT, read).await {
                Ok(read) => read,
                Err(_) => break,
            },
            None => read.await,
        };
        match read.map_err(|e| read_fault(&e, true))? {
            Some(chunk) => observer.push(chunk, &mut pending),
            None => {
                let reason = "the stream ended before its first event".into();
                return Err(AttemptFault::Broken { reason, answered: true });
            }
        }
        if opened.is_none() && observer.has_opened() {
            opened = Some(tokio::time::Instant::now());
        }
    }
    if let FirstEvent::Error(error) = observer.first_event() {
        return Err(AttemptFault::Event { status: error.status, message: error.message.clone() });
    }
    Ok(Begun { head, observer: Some(observer), pending, ended: false })
}

/// True for an event stream, by its content type.
pub fn streams(head: &ResponseHeader) -> bool {
    head.headers
        .get(http::header::CONTENT_TYPE)
        .and_then(|v| v.as_bytes().get(..17))
        .is_some_and(|v| v.eq_ignore_ascii_case(b"text/event-stream"))
}

/// Reads the rest of an error, at most `limit` bytes of it.
async fn whole_body(session: &mut HttpSession, limit: usize) -> Result<Bytes, AttemptFault> {
    let mut body = BytesMut::new();
    let read = async {
        while let Some(chunk) = session.read_response_body().await.map_err(|e| read_fault(&e, true))? {
            let room = limit.saturating_sub(body.len());
            body.extend_from_slice(chunk.get(..room).unwrap_or(&chunk));
            if room == 0 {
                break;
            }
        }
        Ok(())
    };
    match tokio::time::timeout(ERROR_BODY_WAIT, read).await {
        Ok(Ok(())) => Ok(body.freeze()),
        Ok(Err(fault)) => Err(fault),
        Err(_) => Err(AttemptFault::Broken { reason: "an error answer that does not end".into(), answered: true }),
    }
}

fn connect_fault(error: &pingora_core::Error, sent: bool) -> AttemptFault {
    let timeout = matches!(error.etype(), ErrorType::ConnectTimedout | ErrorType::TLSHandshakeTimedout);
    AttemptFault::Connect { reason: describe(error), timeout, sent }
}

fn read_fault(error: &pingora_core::Error, answered: bool) -> AttemptFault {
    match error.etype() {
        ErrorType::ReadTimedout | ErrorType::WriteTimedout => AttemptFault::Timeout(describe(error)),
        ErrorType::InvalidHTTPHeader | ErrorType::Custom("InvalidChunk") => AttemptFault::Protocol(describe(error)),
        _ => AttemptFault::Broken { reason: describe(error), answered },
    }
}
