//! Reading the request body to its end, within its limits, and decoding it.

use crate::client_stream::{ClientStream, ReadFault};
use crate::content_encoding::{Coding, Undecoded, decode};
use crate::errors::{Kind, Refusal};
use crate::headers::expects_continue;
use crate::trailers::RequestTrailers;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Version, header};
use pingora_core::protocols::http::ServerSession;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// Room made for a body at first, at most. More comes as it is needed.
const FIRST_ROOM: usize = 1024 * 1024;
/// The longest piece of a body that is read piece by piece.
const PIECE: usize = 64 * 1024;

/// What a request body may be.
#[derive(Debug, Clone, Copy)]
pub struct BodyLimits {
    /// `limits.body_bytes`.
    pub bytes: usize,
    /// `limits.bodies_bytes`.
    pub all_bytes: usize,
    /// The status of a refusal for want of room: `admission.overload_status`.
    pub overload_status: u16,
    /// `limits.body_decoding`.
    pub decoding: bool,
    /// `timeouts.client_body_s`: the longest pause between two pieces.
    pub pause: Duration,
    /// `timeouts.client_body_total_s`.
    pub total: Duration,
}

/// Bytes of bodies that the gateway holds, all requests together.
#[derive(Debug, Default)]
pub struct HeldBodies(AtomicUsize);

/// What one request holds of them, as long as this lives.
#[derive(Debug)]
pub struct Held {
    all: Arc<HeldBodies>,
    bytes: usize,
}

// === impl Held ===

impl Held {
    /// Nothing yet.
    pub fn new(all: &Arc<HeldBodies>) -> Self {
        Self { all: Arc::clone(all), bytes: 0 }
    }

    /// Takes room for more, unless there is none.
    fn grow(&mut self, bytes: usize, limits: BodyLimits) -> Result<(), Refusal> {
        self.bytes += bytes;
        let all = self.all.0.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if all <= limits.all_bytes {
            return Ok(());
        }
        let most = limits.all_bytes;
        let message = format!("the request bodies held leave no room within limits.bodies_bytes = {most} bytes");
        Err(Refusal::new(Kind::QueueFull, message).with_status(limits.overload_status).with_retry_after(1))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.all.0.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Reads the whole body. Answers `Expect: 100-continue` first, since nothing else would. A body with a content encoding is
/// decoded, and the head then describes what came out.
///
/// # Errors
/// 413 over the limit (without reading on), 415 for an encoding that is not decoded, 408 when the client takes too long, 499
/// when it left, 400 for a broken body, 503 or 429 when all bodies together are too many bytes.
pub async fn read(session: &mut ServerSession, limits: BodyLimits, held: &mut Held) -> Result<Bytes, Refusal> {
    let head = session.req_header();
    let coding = Coding::of(&head.headers, limits.decoding)?;
    let declared = declared(session);
    if declared.is_some_and(|n| n > limits.bytes) {
        return Err(too_large(limits));
    }
    let waits = head.version != Version::HTTP_10 && expects_continue(&head.headers);
    let direct = take_over(session, declared);
    if waits && !is_read(session) {
        session.write_continue_response().await.map_err(|e| gone(&e))?;
    }
    let body = match direct {
        Some(length) => read_direct(session, limits, length, held).await?,
        None => Pieces::new(declared, limits).read_all(session, held).await?,
    };
    let Some(coding) = coding else { return Ok(body) };
    let body = decode(coding, body, limits.bytes).await.map_err(|why| match why {
        Undecoded::TooLarge => too_large(limits),
        Undecoded::Broken => {
            let name = coding.name();
            Refusal::new(
                Kind::BadRequest,
                format!("the request body is not whole {name}, as its Content-Encoding says"),
            )
        }
    })?;
    held.grow(body.len(), limits)?;
    let head = session.req_header_mut();
    head.remove_header(&header::CONTENT_ENCODING);
    if head.headers.contains_key(header::CONTENT_LENGTH) {
        // A number is always a header value.
        let _ = head.insert_header(header::CONTENT_LENGTH, HeaderValue::from(body.len()));
    }
    Ok(body)
}

/// Whether the whole body of the request has been read, so that another request may follow it.
pub fn is_read(session: &mut ServerSession) -> bool {
    let owes = match session {
        ServerSession::H1(session) => ClientStream::of(session).is_some_and(ClientStream::owes_body),
        _ => false,
    };
    !owes && session.is_body_done()
}

/// Takes the reading of an HTTP/1 body with a length out of pingora's hands, which would copy it twice through a buffer of 64 KB:
/// pingora is told that there is none. Returns the length where that is so.
fn take_over(session: &mut ServerSession, declared: Option<usize>) -> Option<usize> {
    let ServerSession::H1(session) = session else { return None };
    let length = declared.filter(|length| *length > 0)?;
    if !ClientStream::of(session)?.can_read_body() {
        return None;
    }
    let head = session.req_header_mut();
    if head.headers.contains_key(header::TRANSFER_ENCODING) {
        return None;
    }
    let told = head.remove_header(&header::CONTENT_LENGTH)?;
    // Looked up now, once for this request, and never again.
    let none = session.is_body_done();
    let restored = session.req_header_mut().insert_header(header::CONTENT_LENGTH, told);
    if restored.is_err() || !none {
        return None;
    }
    ClientStream::of(session)?.expect_body(length);
    Some(length)
}

/// Reads a body of a known length into one buffer.
async fn read_direct(
    session: &ServerSession,
    limits: BodyLimits,
    length: usize,
    held: &mut Held,
) -> Result<Bytes, Refusal> {
    let end = Instant::now() + limits.total;
    let mut body = BytesMut::with_capacity(length.min(FIRST_ROOM));
    while body.len() < length {
        if body.len() == body.capacity() {
            // What a client declares is believed as far as it has sent that much already.
            body.reserve(body.len().min(length - body.len()));
        }
        read_more(session, limits, end, held, &mut body).await?;
    }
    Ok(body.freeze())
}

/// Appends what there is of a body that was taken over, as far as there is room in `body`.
async fn read_more(
    session: &ServerSession,
    limits: BodyLimits,
    end: Instant,
    held: &mut Held,
    body: &mut BytesMut,
) -> Result<(), Refusal> {
    let left = || Refusal::new(Kind::ClientGone, "the client left");
    let ServerSession::H1(session) = session else { return Err(left()) };
    let client = ClientStream::of(session).ok_or_else(left)?;
    let pause = Instant::now() + limits.pause;
    match timeout_at(pause.min(end), client.read_body(body)).await {
        Ok(Ok(read)) => held.grow(read, limits),
        Ok(Err(_)) => Err(left()),
        Err(_) => Err(too_slow(limits, pause < end)),
    }
}

fn too_slow(limits: BodyLimits, paused: bool) -> Refusal {
    let why = if paused {
        format!("paused longer than timeouts.client_body_s = {}", limits.pause.as_secs())
    } else {
        format!("took longer than timeouts.client_body_total_s = {}", limits.total.as_secs())
    };
    Refusal::new(Kind::RequestTimeout, format!("the request body {why}"))
}

/// The refusal of a body over the limit.
pub fn too_large(limits: BodyLimits) -> Refusal {
    let most = limits.bytes;
    Refusal::new(Kind::TooLarge, format!("the request body is larger than limits.body_bytes = {most} bytes"))
}

/// The length that the head declares.
fn declared(session: &ServerSession) -> Option<usize> {
    let declared = session.req_header().headers.get(header::CONTENT_LENGTH);
    declared.and_then(|v| v.to_str().ok()).and_then(|v| v.parse::<usize>().ok())
}

/// Whether the head says that no body follows it.
pub fn is_empty(session: &mut ServerSession) -> bool {
    match session {
        // pingora is not asked: it would take the reading of the body into its hands.
        ServerSession::H1(h1) => {
            !h1.req_header().headers.contains_key(header::TRANSFER_ENCODING) && declared(session).unwrap_or(0) == 0
        }
        session => session.is_body_empty(),
    }
}

/// Reads a body piece by piece, within its limits.
pub struct Pieces {
    limits: BodyLimits,
    declared: Option<usize>,
    /// What is left of a body whose reading was taken over from pingora.
    left: Option<usize>,
    /// Room for it: pieces that are short share it.
    room: BytesMut,
    so_far: usize,
    end: Instant,
}

// === impl Pieces ===

impl Pieces {
    fn new(declared: Option<usize>, limits: BodyLimits) -> Self {
        Self { limits, declared, left: None, room: BytesMut::new(), so_far: 0, end: Instant::now() + limits.total }
    }

    /// Begins to read a body without an encoding. Answers `Expect: 100-continue`, since nothing else would.
    ///
    /// # Errors
    /// 413 for a body that is announced over the limit, 499 when the client left.
    pub async fn begin(session: &mut ServerSession, limits: BodyLimits) -> Result<Self, Refusal> {
        let declared = declared(session);
        if declared.is_some_and(|n| n > limits.bytes) {
            return Err(too_large(limits));
        }
        let head = session.req_header();
        let waits = head.version != Version::HTTP_10 && expects_continue(&head.headers);
        let left = take_over(session, declared);
        if waits && !is_read(session) {
            session.write_continue_response().await.map_err(|e| gone(&e))?;
        }
        Ok(Self { left, ..Self::new(declared, limits) })
    }

    /// The next piece as it came; nothing at the end.
    ///
    /// # Errors
    /// As [`read`], less what is about encodings.
    pub async fn next(&mut self, session: &mut ServerSession, held: &mut Held) -> Result<Option<Bytes>, Refusal> {
        let (limits, end) = (self.limits, self.end);
        let pause = Instant::now() + limits.pause;
        if let Some(left) = &mut self.left {
            if *left == 0 {
                return Ok(None);
            }
            if self.room.capacity() == 0 {
                self.room.reserve(PIECE.min(*left));
            }
            read_more(session, limits, end, held, &mut self.room).await?;
            let piece = self.room.split();
            *left = left.saturating_sub(piece.len());
            return Ok(Some(piece.freeze()));
        }
        let piece = match timeout_at(pause.min(end), session.read_request_body()).await {
            Ok(Ok(Some(piece))) => piece,
            Ok(Ok(None)) => return Ok(None),
            Ok(Err(_)) if breaks_chunks(session) => {
                return Err(Refusal::new(Kind::BadRequest, "the request body breaks its chunked coding").closing());
            }
            Ok(Err(error)) => return Err(gone(&error)),
            Err(_) => return Err(too_slow(limits, pause < end)),
        };
        self.so_far = self.so_far.saturating_add(piece.len());
        if self.so_far > limits.bytes {
            return Err(too_large(limits));
        }
        held.grow(piece.len(), limits)?;
        Ok(Some(piece))
    }

    async fn read_all(mut self, session: &mut ServerSession, held: &mut Held) -> Result<Bytes, Refusal> {
        let mut first: Option<Bytes> = None;
        let mut joined = BytesMut::new();
        while let Some(piece) = self.next(session, held).await? {
            // One piece is kept as it came; only a body in several pieces is joined.
            match (first.take(), joined.is_empty()) {
                (None, true) => first = Some(piece),
                (Some(head), _) => {
                    joined.reserve(self.declared.unwrap_or(0).max(head.len() + piece.len()));
                    joined.extend_from_slice(&head);
                    joined.extend_from_slice(&piece);
                }
                (None, false) => joined.extend_from_slice(&piece),
            }
        }
        Ok(first.unwrap_or_else(|| joined.freeze()))
    }
}

/// The most of a body that is read only to be thrown away, and the longest that it is waited for.
const DRAIN_BYTES: usize = 64 * 1024;
const DRAIN_TIME: Duration = Duration::from_secs(1);

/// Reads what is left of a body that nobody wants, if that is little, so that another request can follow on the connection.
/// Where it is more, or a client waits to be asked for it, the connection is of no more use.
pub async fn drain(session: &mut ServerSession) {
    let too_much = declared(session).is_some_and(|n| n > DRAIN_BYTES);
    if too_much || expects_continue(&session.req_header().headers) || is_read(session) {
        return;
    }
    let _ = tokio::time::timeout(DRAIN_TIME, read_away(session)).await;
}

async fn read_away(session: &mut ServerSession) {
    if let ServerSession::H1(session) = session
        && let Some(client) = ClientStream::of(session)
        && client.owes_body()
    {
        let mut rest = BytesMut::with_capacity(DRAIN_BYTES);
        while client.read_body(&mut rest).await.is_ok_and(|read| read > 0) {}
        return;
    }
    let mut left = DRAIN_BYTES;
    while let Ok(Some(piece)) = session.read_request_body().await {
        match left.checked_sub(piece.len()) {
            Some(rest) => left = rest,
            None => break,
        }
    }
}

/// The trailers of a body that was read to its end, if it has any.
pub fn trailers(session: &ServerSession) -> Option<HeaderMap> {
    let ServerSession::H1(session) = session else { return RequestTrailers::of(session.req_header()) };
    let trailers = ClientStream::of(session)?.trailers();
    (!trailers.is_empty()).then_some(trailers)
}

fn breaks_chunks(session: &ServerSession) -> bool {
    let ServerSession::H1(session) = session else { return false };
    ClientStream::of(session).and_then(ClientStream::fault) == Some(ReadFault::BadChunk)
}

fn gone(error: &pingora_core::Error) -> Refusal {
    use pingora_core::ErrorType::{ConnectionClosed, ReadError, WriteError};
    match error.etype() {
        ConnectionClosed | ReadError | WriteError => Refusal::new(Kind::ClientGone, "the client left"),
        _ => {
            Refusal::new(Kind::BadRequest, format!("the request body is broken: {}", error.etype().as_str())).closing()
        }
    }
}
