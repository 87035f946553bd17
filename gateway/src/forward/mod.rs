//! The forwarding leg: our own, on pingora's connector.
//!
//! pingora's native path replays a body that was read early only from a 64 KiB buffer; agents send
//! megabytes. This leg takes a body of any size, retries while nothing has reached the client, and can wait between
//! chunks. What it must do itself: watch the client, frame the answer, strip hop-by-hop headers, keep the timeouts.

pub mod forwarded;
pub mod open;
pub mod relay;
pub mod request;
pub mod writer;

use crate::client_stream::ClientStream;
use bytes::Bytes;
use pingora_core::protocols::http::ServerSession;
use pingora_http::ResponseHeader;
use turnstile_fleet::worker::WorkerFault;

/// Why an attempt failed before anything reached the client.
#[derive(Debug)]
pub enum AttemptFault {
    /// No connection.
    Connect {
        /// What the system said.
        reason: String,
        /// It took longer than `timeouts.connect_ms`.
        timeout: bool,
        /// A connection that had been used before broke with the turn on it, at once, and there is no new one.
        sent: bool,
    },
    /// The worker was silent too long.
    Timeout(String),
    /// The connection broke.
    Broken {
        /// What the system said.
        reason: String,
        /// Some of an answer had arrived.
        answered: bool,
    },
    /// What came is not HTTP, or has a status that is no answer to a request.
    Protocol(String),
    /// Nothing moves on the worker, so the turn was taken off it.
    Stuck,
    /// A status of 4xx or 5xx.
    Status {
        /// The status.
        status: u16,
        /// The head.
        head: Box<ResponseHeader>,
        /// The body.
        body: Bytes,
    },
    /// A stream whose first event is an error.
    Event {
        /// The status the event tells, or 500.
        status: u16,
        /// Its text.
        message: String,
    },
    /// The client left.
    ClientGone,
}

impl AttemptFault {
    /// The label of `turnstile_attempts_total`.
    pub fn label(&self) -> &'static str {
        match self {
            AttemptFault::Connect { .. } => "connect",
            AttemptFault::Timeout(_) => "timeout",
            AttemptFault::Broken { .. } => "broken",
            AttemptFault::Protocol(_) => "protocol",
            AttemptFault::Stuck => "stuck",
            AttemptFault::Status { status: 429 | 503, .. } | AttemptFault::Event { status: 429 | 503, .. } => {
                "overloaded"
            }
            AttemptFault::Status { status: 500.., .. } => "status_5xx",
            AttemptFault::Status { .. } => "status_4xx",
            AttemptFault::Event { .. } => "error_event",
            AttemptFault::ClientGone => "client_gone",
        }
    }

    /// True when another worker may be tried: the worker failed or is full. A 4xx says something about the request and
    /// would be the same elsewhere; a timeout may still be running and is not repeated.
    pub fn retryable(&self) -> bool {
        match self {
            AttemptFault::Connect { .. }
            | AttemptFault::Broken { .. }
            | AttemptFault::Protocol(_)
            | AttemptFault::Stuck => true,
            AttemptFault::Status { status, .. } | AttemptFault::Event { status, .. } => {
                *status >= 500 || *status == 429
            }
            AttemptFault::Timeout(_) | AttemptFault::ClientGone => false,
        }
    }

    /// Whose fault it is, as far as one attempt tells. A full queue is backpressure, a 4xx the client's; silence may be the
    /// worker's queue, and a worker that is stuck is found out by its load.
    pub fn blame(&self) -> Blame {
        match self {
            AttemptFault::Connect { .. } => Blame::Worker(WorkerFault::Connect),
            AttemptFault::Broken { .. } | AttemptFault::Protocol(_) => Blame::Worker(WorkerFault::Answer),
            AttemptFault::Status { status, .. } | AttemptFault::Event { status, .. }
                if *status >= 500 && *status != 503 =>
            {
                Blame::WorkerOrTurn
            }
            _ => Blame::Nobody,
        }
    }

    /// True when the worker was lost with the turn: it may be dead, and nothing more is asked of it by trying another one.
    pub fn lost_worker(&self) -> bool {
        matches!(self, AttemptFault::Connect { .. } | AttemptFault::Broken { .. } | AttemptFault::Stuck)
    }

    /// True when the worker was lost after the turn had been given to it, which may be why.
    pub fn lost_with_the_turn(&self) -> bool {
        matches!(self, AttemptFault::Broken { .. } | AttemptFault::Stuck | AttemptFault::Connect { sent: true, .. })
    }

    /// A few words for logs and for the `last_error` fact.
    pub fn reason(&self) -> String {
        match self {
            AttemptFault::Connect { reason, .. } | AttemptFault::Broken { reason, .. } => reason.clone(),
            AttemptFault::Timeout(reason) | AttemptFault::Protocol(reason) => reason.clone(),
            AttemptFault::Stuck => "nothing moves on the worker".into(),
            AttemptFault::Status { status, .. } => format!("status {status}"),
            // The message may quote the prompt, which no log may hold.
            AttemptFault::Event { status, .. } => format!("error event {status}"),
            AttemptFault::ClientGone => "client gone".into(),
        }
    }
}

/// Whose fault a fault is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// Not the worker's.
    Nobody,
    /// The worker's.
    Worker(WorkerFault),
    /// The worker's, unless other workers answer this turn alike.
    WorkerOrTurn,
}

/// Resolves when the client has closed its side, or its stream. Bytes of a pipelined next request do not count.
pub async fn client_gone(client: &mut ServerSession) {
    if let ServerSession::H1(session) = client
        && let Some(stream) = ClientStream::of(session)
    {
        // pingora would read on here, and after the first byte of a next request never look again.
        return stream.closed().await;
    }
    // After the end of the request body this read yields only an error or, for HTTP/2, the end of the stream.
    let _ = client.read_body_or_idle(true).await;
}
