//! A connection to a worker for one exchange: what is sent on it, and the session that reads the answer.
//!
//! On HTTP/1.1 without TLS the request is written here, head and body in one call of the system: as pingora's session writes it,
//! head and body are two packets at least, and a packet costs more than all else that is done for it.

use super::Target;
use super::watched::Watched;
use crate::trailers;
use bytes::{BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderName, HeaderValue};
use pingora_core::protocols::Stream;
use pingora_core::protocols::http::client::HttpSession;
use pingora_core::protocols::http::v1::client::{HttpSession as Http1Session, http_req_header_to_wire};
use pingora_core::{Error, ErrorType, OkOrErr as _, OrErr as _};
use pingora_http::RequestHeader;
use std::io::IoSlice;
use std::time::Duration;
use tokio::io::AsyncWriteExt as _;
use tokio::time::timeout;
use turnstile_fleet::body::Pieces;

const BAD_PATH: &str = "a path that cannot stand in a request line";
const OTHER_KIND: &str = "a request for another kind of connection";
const USED: &str = "a connection that was used";

/// Room for the head of an agent's request.
const HEAD_ROOM: usize = 1024;

/// The head of a request to a worker.
#[derive(Debug)]
pub enum Head {
    /// As it goes over an HTTP/1.1 connection without TLS.
    Wire(Bytes),
    /// For pingora to write, which knows what is spoken.
    Fields(Box<RequestHeader>),
}

/// Puts a [`Head`] together, field by field.
pub enum HeadBuilder {
    /// See [`Head::Wire`].
    Wire(BytesMut),
    /// See [`Head::Fields`].
    Fields(Box<RequestHeader>),
}

/// A connection.
pub struct Link {
    /// Nothing was sent on it yet.
    open: Option<Stream>,
    /// Nothing while a request is being sent that is written here, and if that broke off.
    session: Option<HttpSession>,
}

// === impl Head ===

impl Head {
    /// As it goes over an HTTP/1.1 connection. `chunked`: the body will come in chunks.
    fn wire(&self, chunked: bool) -> pingora_core::Result<Bytes> {
        const CHUNKED: &[u8] = b"transfer-encoding: chunked\r\n\r\n";
        let wire = match self {
            Self::Wire(wire) => wire.clone(),
            Self::Fields(head) => {
                http_req_header_to_wire(head).or_err(ErrorType::InvalidHTTPHeader, BAD_PATH)?.freeze()
            }
        };
        let fields = wire.len().saturating_sub(2);
        Ok(if chunked { [wire.get(..fields).unwrap_or_default(), CHUNKED].concat().into() } else { wire })
    }
}

// === impl HeadBuilder ===

impl HeadBuilder {
    /// A head without fields. `fields`: how many there will be, roughly.
    ///
    /// # Errors
    /// When the path cannot stand in a request line.
    pub fn new(target: &Target, method: &str, path: &str, fields: usize) -> pingora_core::Result<Self> {
        if target.plain_address().is_none() {
            // Without pingora's map of header spellings, which is a second map to fill: names are the same in any case.
            return Ok(Self::Fields(Box::new(RequestHeader::build_no_case(method, path.as_bytes(), Some(fields))?)));
        }
        if path.is_empty() || path.bytes().any(|byte| byte <= b' ' || byte == 0x7f) {
            return Error::e_explain(ErrorType::InvalidHTTPHeader, BAD_PATH);
        }
        let mut wire = BytesMut::with_capacity(HEAD_ROOM);
        for part in [method, " ", path, " HTTP/1.1\r\n"] {
            wire.put_slice(part.as_bytes());
        }
        Ok(Self::Wire(wire))
    }

    /// Adds a field.
    ///
    /// # Errors
    /// When pingora has no room for it.
    pub fn field(&mut self, name: &HeaderName, value: &HeaderValue) -> pingora_core::Result<()> {
        match self {
            Self::Wire(wire) => {
                for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
                    wire.put_slice(part);
                }
                Ok(())
            }
            Self::Fields(head) => head.append_header(name.clone(), value.clone()).map(|_| ()),
        }
    }

    /// The head.
    pub fn finish(self) -> Head {
        match self {
            Self::Wire(mut wire) => {
                wire.put_slice(b"\r\n");
                Head::Wire(wire.freeze())
            }
            Self::Fields(head) => Head::Fields(head),
        }
    }
}

// === impl Link ===

impl Link {
    /// A connection to an HTTP/1.1 server, without TLS.
    pub(super) fn open(stream: Stream) -> Self {
        Self { open: Some(stream), session: None }
    }

    /// A connection of which pingora knows what is spoken on it.
    pub(super) fn session(session: HttpSession) -> Self {
        Self { open: None, session: Some(session) }
    }

    /// Has the answer of the next request watched for trailers. Over HTTP/1.1 they are read over otherwise.
    pub fn watch_trailers(&mut self) {
        self.write_here();
        if let Some(stream) = self.open.take().and_then(Watched::unwatched) {
            self.open = Some(Box::new(Watched::new(stream)));
        }
    }

    /// Takes an HTTP/1.1 connection out of pingora's hands for the request.
    fn write_here(&mut self) {
        match self.session.take() {
            Some(HttpSession::H1(session)) => self.open = Some(session.into_inner()),
            other => self.session = other,
        }
    }

    /// Sends a request. Returns the session that its answer comes from. `patience`: how long one write may block.
    ///
    /// # Errors
    /// The connection broke, or took nothing for too long.
    pub async fn send(
        &mut self,
        target: &Target,
        head: &Head,
        body: &Pieces,
        patience: Duration,
    ) -> pingora_core::Result<&mut HttpSession> {
        match (head, &mut self.session) {
            (head, None) => {
                let head = head.wire(false)?;
                let parts: Vec<&[u8]> = std::iter::once(&head).chain(body.iter()).map(|part| &part[..]).collect();
                self.write(target, &parts, patience).await?;
            }
            (Head::Fields(head), Some(session)) => {
                session.set_write_timeout(Some(patience));
                session.write_request_header(head.clone()).await?;
                let mut left = body.len();
                for piece in body.iter() {
                    left -= piece.len();
                    session.write_request_body(piece.clone(), left == 0).await?;
                }
                session.finish_request_body().await?;
            }
            (Head::Wire(_), Some(_)) => return Error::e_explain(ErrorType::InternalError, OTHER_KIND),
        }
        self.sent()
    }

    /// Sends a request whose body ends with trailers, over HTTP/1.1 in one chunk. Its head has no framing. Otherwise as
    /// [`Link::send`].
    ///
    /// # Errors
    /// As [`Link::send`].
    pub async fn send_with_trailers(
        &mut self,
        target: &Target,
        head: &Head,
        body: &Bytes,
        trailers: &HeaderMap,
        patience: Duration,
    ) -> pingora_core::Result<&mut HttpSession> {
        self.write_here();
        match (head, &mut self.session) {
            (head, None) => {
                let (head, lines) = (head.wire(true)?, trailers::lines(trailers));
                let size = format!("{:x}\r\n", body.len());
                let chunk: [&[u8]; 3] = [size.as_bytes(), body, b"\r\n"];
                let chunk: &[&[u8]] = if body.is_empty() { &[] } else { &chunk };
                let parts = [&[&head[..]], chunk, &[b"0\r\n", &lines, b"\r\n"]].concat();
                self.write(target, &parts, patience).await?;
            }
            (Head::Fields(head), Some(HttpSession::H2(session))) => {
                session.write_timeout = Some(patience);
                session.write_request_header(head.clone(), false)?;
                if !body.is_empty() {
                    session.write_request_body(body.clone(), false).await?;
                }
                let mut end = session.take_request_body_writer().or_err(ErrorType::InternalError, USED)?;
                end.send_trailers(trailers.clone()).or_err(ErrorType::WriteError, "sending trailers")?;
            }
            (_, Some(_)) => return Error::e_explain(ErrorType::InternalError, OTHER_KIND),
        }
        self.sent()
    }

    /// Writes a request over HTTP/1.1.
    async fn write(&mut self, target: &Target, parts: &[&[u8]], patience: Duration) -> pingora_core::Result<()> {
        if let Some(mut stream) = self.open.take() {
            write(&mut stream, parts, patience).await?;
            self.session = Some(HttpSession::H1(Http1Session::new_with_options(stream, &target.peer)));
        }
        Ok(())
    }

    fn sent(&mut self) -> pingora_core::Result<&mut HttpSession> {
        self.session.as_mut().ok_or_else(|| Error::explain(ErrorType::InternalError, USED))
    }

    /// The session of the request that was sent.
    pub fn into_session(self) -> Option<HttpSession> {
        self.session
    }

    /// Gives the exchange up, and with it, where the connection has no other, the connection.
    pub async fn shutdown(self) {
        if let Some(mut session) = self.session {
            session.shutdown().await;
        }
    }
}

/// Writes these parts, as much at a time as the system takes.
async fn write(stream: &mut Stream, parts: &[&[u8]], patience: Duration) -> pingora_core::Result<()> {
    const WHAT: &str = "sending the request";
    let late = |_| Error::explain(ErrorType::WriteTimedout, format!("{WHAT}, nothing taken for {patience:?}"));
    let mut parts: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
    let mut rest = parts.as_mut_slice();
    while !rest.is_empty() {
        let written = timeout(patience, stream.write_vectored(rest)).await.map_err(late)?;
        match written.or_err(ErrorType::WriteError, WHAT)? {
            0 => return Error::e_explain(ErrorType::WriteError, WHAT),
            written => IoSlice::advance_slices(&mut rest, written),
        }
    }
    // The stream has a small buffer of its own.
    timeout(patience, stream.flush()).await.map_err(late)?.or_err(ErrorType::WriteError, WHAT)
}
