//! gRPC calls, over HTTP/2.

use super::Callouts;
use super::destination::Destination;
use super::{Inputs, tell};
use crate::upstream::{Target, describe};
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, header};
use pingora_core::protocols::http::client::HttpSession;
use pingora_core::protocols::http::v2::client::Http2Session;
use pingora_http::RequestHeader;
use std::sync::atomic::Ordering;
use std::time::Duration;
use turnstile_plugins::{CallHandle, Fault, GRPC_UNAVAILABLE, GrpcCallout, GrpcEvent};

/// Statuses of gRPC.
pub(super) const CANCELLED: u32 = 1;
const UNKNOWN: u32 = 2;
const DEADLINE_EXCEEDED: u32 = 4;
const PERMISSION_DENIED: u32 = 7;
const RESOURCE_EXHAUSTED: u32 = 8;
const UNIMPLEMENTED: u32 = 12;
const INTERNAL: u32 = 13;
const UNAUTHENTICATED: u32 = 16;

/// A flag and a length stand before each message.
const FRAME_HEAD: usize = 5;

/// What a plugin sends on a stream.
pub(super) enum Input {
    Message { message: Bytes, end: bool },
    End,
}

impl Input {
    /// Bytes that it holds.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Message { message, .. } => message.len() + FRAME_HEAD,
            Self::End => 0,
        }
    }
}

/// A status and its message.
type Ended = (u32, String);

/// Makes a call. `None`: it has ended well and the plugin knows. Else how it ended.
///
/// # Errors
/// The plugin's fault when it was told something.
pub(super) async fn call(
    callouts: &Callouts,
    destination: &Destination,
    mut callout: GrpcCallout,
    inputs: Option<Inputs>,
    handle: &mut CallHandle,
) -> Result<Option<Ended>, Box<Fault>> {
    let most = destination.timeout();
    match (callout.message.take(), inputs) {
        (Some(message), _) => {
            let limit = callout.timeout.map_or(most, |asked| asked.min(most));
            let run = async {
                let mut session = open(callouts, destination, &callout, Some(limit)).await?;
                unary(&mut session, &message, callout.max_message).await
            };
            match tokio::time::timeout(limit, run).await {
                Ok(Ok(message)) => tell(handle, GrpcEvent::Message(message)).await.map(|_| None),
                Ok(Err(ended)) => Ok(Some(ended)),
                Err(_) => Ok(Some((DEADLINE_EXCEEDED, format!("no answer within {limit:?}")))),
            }
        }
        (None, Some(inputs)) => {
            let opened = tokio::time::timeout(most, open(callouts, destination, &callout, None)).await;
            let late = || Err((DEADLINE_EXCEEDED, format!("no connection within {most:?}")));
            let mut session = match opened.unwrap_or_else(|_| late()) {
                Ok(session) => session,
                Err(ended) => return Ok(Some(ended)),
            };
            session.write_timeout = Some(most);
            stream(&mut session, inputs, callout.max_message, handle).await
        }
        (None, None) => Ok(Some((INTERNAL, "a stream without its input".to_owned()))),
    }
}

fn unavailable(error: &pingora_core::Error) -> Ended {
    (GRPC_UNAVAILABLE, describe(error))
}

/// Connects and sends the head of the request.
async fn open(
    callouts: &Callouts,
    destination: &Destination,
    callout: &GrpcCallout,
    limit: Option<Duration>,
) -> Result<Http2Session, Ended> {
    let target = destination.target(callouts).await.map_err(|reason| (GRPC_UNAVAILABLE, reason))?;
    let connected = callouts.connectors.connect(&target).await;
    let (link, _) = connected.map_err(|error| unavailable(&error))?;
    let Some(HttpSession::H2(mut session)) = link.into_session() else {
        return Err((GRPC_UNAVAILABLE, format!("{} does not speak HTTP/2", destination.name())));
    };
    let head = head(&target, callout, limit).map_err(|error| (INTERNAL, describe(&error)))?;
    session.write_request_header(Box::new(head), false).map_err(|error| unavailable(&error))?;
    Ok(session)
}

fn head(target: &Target, callout: &GrpcCallout, limit: Option<Duration>) -> pingora_core::Result<RequestHeader> {
    let path = format!("/{}/{}", callout.service, callout.method);
    let mut head = RequestHeader::build("POST", path.as_bytes(), Some(callout.metadata.len() + 5))?;
    for (name, value) in &callout.metadata {
        head.append_header(name.clone(), value.clone())?;
    }
    head.insert_header(header::HOST, target.authority.clone())?;
    head.insert_header(header::CONTENT_TYPE, "application/grpc")?;
    head.insert_header(header::TE, "trailers")?;
    if let Some(limit) = limit {
        head.insert_header("grpc-timeout", format!("{}m", limit.as_millis().clamp(1, 99_999_999)))?;
    }
    Ok(head)
}

fn framed(message: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(FRAME_HEAD + message.len());
    frame.put_u8(0);
    frame.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    frame.extend_from_slice(message);
    frame.freeze()
}

/// Messages taken out of the body.
struct Frames {
    buffer: BytesMut,
    max_message: usize,
}

impl Frames {
    fn new(max_message: usize) -> Self {
        Self { buffer: BytesMut::new(), max_message }
    }

    fn next(&mut self) -> Result<Option<Bytes>, Ended> {
        let Some((&[flag, a, b, c, d], _)) = self.buffer.split_first_chunk::<FRAME_HEAD>() else { return Ok(None) };
        if flag != 0 {
            return Err((INTERNAL, "the message is compressed, which was not agreed on".to_owned()));
        }
        let len = u32::from_be_bytes([a, b, c, d]) as usize;
        if len > self.max_message {
            return Err((RESOURCE_EXHAUSTED, format!("a message is larger than {} bytes", self.max_message)));
        }
        if self.buffer.len() < FRAME_HEAD + len {
            return Ok(None);
        }
        self.buffer.advance(FRAME_HEAD);
        Ok(Some(self.buffer.split_to(len).freeze()))
    }
}

async fn unary(session: &mut Http2Session, message: &[u8], max_message: usize) -> Result<Bytes, Ended> {
    session.write_request_body(framed(message), true).await.map_err(|error| unavailable(&error))?;
    session.read_response_header().await.map_err(|error| unavailable(&error))?;
    if let Some(ended) = ended_at_once(session) {
        return Err(if ended.0 == 0 { (INTERNAL, "the answer has no message".to_owned()) } else { ended });
    }
    let mut frames = Frames::new(max_message);
    let mut answer = None;
    while let Some(piece) = session.read_response_body().await.map_err(|error| unavailable(&error))? {
        frames.buffer.extend_from_slice(&piece);
        while let Some(message) = frames.next()? {
            if answer.replace(message).is_some() {
                return Err((INTERNAL, "the answer has more than one message".to_owned()));
            }
        }
    }
    let trailers = session.read_trailers().await.map_err(|error| unavailable(&error))?.unwrap_or_default();
    match status(&trailers) {
        Some((0, _)) => answer.ok_or_else(|| (INTERNAL, "the answer has no message".to_owned())),
        Some(ended) => Err(ended),
        None => Err((UNKNOWN, "the answer has no status".to_owned())),
    }
}

/// What comes on a stream.
enum Came {
    Head,
    Data(Option<Bytes>),
}

async fn next(session: &mut Http2Session, begun: bool) -> pingora_core::Result<Came> {
    if begun {
        session.read_response_body().await.map(Came::Data)
    } else {
        session.read_response_header().await.map(|()| Came::Head)
    }
}

async fn stream(
    session: &mut Http2Session,
    (mut inputs, queued): Inputs,
    max_message: usize,
    handle: &mut CallHandle,
) -> Result<Option<Ended>, Box<Fault>> {
    let mut frames = Frames::new(max_message);
    let (mut open, mut begun) = (true, false);
    let broken = |error: Box<pingora_core::Error>| Ok(Some(unavailable(&error)));
    loop {
        let came = tokio::select! {
            input = inputs.recv(), if open => {
                let written = match input {
                    Some(Input::Message { message, end }) => {
                        open = !end;
                        let written = session.write_request_body(framed(&message), end).await;
                        queued.fetch_sub(message.len() + FRAME_HEAD, Ordering::Relaxed);
                        written
                    }
                    Some(Input::End) | None => {
                        open = false;
                        session.finish_request_body()
                    }
                };
                match written {
                    Ok(()) => continue,
                    // The other side may have ended the call: it says so itself.
                    Err(_) => {
                        open = false;
                        continue;
                    }
                }
            }
            came = next(session, begun) => came,
        };
        match came {
            Err(error) => return broken(error),
            Ok(Came::Head) => {
                begun = true;
                if let Some(ended) = ended_at_once(session) {
                    return Ok(Some(ended));
                }
                let metadata = session.response_header().map(|head| head.headers.clone()).unwrap_or_default();
                if !tell(handle, GrpcEvent::InitialMetadata(metadata)).await? {
                    return Ok(None);
                }
            }
            Ok(Came::Data(Some(piece))) => {
                frames.buffer.extend_from_slice(&piece);
                loop {
                    match frames.next() {
                        Ok(Some(message)) => {
                            if !tell(handle, GrpcEvent::Message(message)).await? {
                                return Ok(None);
                            }
                        }
                        Ok(None) => break,
                        Err(ended) => return Ok(Some(ended)),
                    }
                }
            }
            Ok(Came::Data(None)) => {
                let trailers = match session.read_trailers().await {
                    Ok(trailers) => trailers.unwrap_or_default(),
                    Err(error) => return broken(error),
                };
                let ended = status(&trailers).unwrap_or_else(|| (UNKNOWN, "the answer has no status".to_owned()));
                if !tell(handle, GrpcEvent::TrailingMetadata(trailers)).await? {
                    return Ok(None);
                }
                return Ok(Some(ended));
            }
        }
    }
}

/// The end of a call whose answer is nothing but a head, or no gRPC at all.
fn ended_at_once(session: &Http2Session) -> Option<Ended> {
    let head = session.response_header()?;
    if head.status != http::StatusCode::OK {
        let code = match head.status.as_u16() {
            400 => INTERNAL,
            401 => UNAUTHENTICATED,
            403 => PERMISSION_DENIED,
            404 => UNIMPLEMENTED,
            429 | 502 | 503 | 504 => GRPC_UNAVAILABLE,
            _ => UNKNOWN,
        };
        return Some((code, format!("the answer has status {}", head.status.as_u16())));
    }
    if let Some(ended) = status(&head.headers) {
        return Some(ended);
    }
    let kind = head.headers.get(header::CONTENT_TYPE).map(|kind| kind.as_bytes()).unwrap_or_default();
    (!kind.starts_with(b"application/grpc")).then(|| (UNKNOWN, "the answer is not gRPC".to_owned()))
}

/// What trailers say about the end.
fn status(trailers: &HeaderMap) -> Option<Ended> {
    let code = trailers.get("grpc-status")?.to_str().ok().and_then(|code| code.parse().ok()).unwrap_or(UNKNOWN);
    let message = trailers.get("grpc-message").map(|message| message.as_bytes()).unwrap_or_default();
    Some((code, percent_encoding::percent_decode(message).decode_utf8_lossy().into_owned()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn messages_are_found_in_pieces_of_any_size() {
        let whole: Vec<u8> = [framed(b"one"), framed(b""), framed(b"three")].concat();
        for size in 1..=whole.len() {
            let mut frames = Frames::new(5);
            let mut found = Vec::new();
            for piece in whole.chunks(size) {
                frames.buffer.extend_from_slice(piece);
                while let Some(message) = frames.next().unwrap() {
                    found.push(message);
                }
            }
            assert_eq!(found, [&b"one"[..], b"", b"three"]);
        }
        let mut frames = Frames::new(4);
        frames.buffer.extend_from_slice(&framed(b"three"));
        assert_eq!(frames.next().unwrap_err().0, RESOURCE_EXHAUSTED);
        let mut frames = Frames::new(4);
        frames.buffer.extend_from_slice(b"\x01\0\0\0\0");
        assert_eq!(frames.next().unwrap_err().0, INTERNAL);
    }

    #[test]
    fn a_status_is_a_number_and_a_decoded_text() {
        let mut trailers = HeaderMap::new();
        assert_eq!(status(&trailers), None);
        trailers.insert("grpc-status", "7".parse().unwrap());
        trailers.insert("grpc-message", "not%20allowed".parse().unwrap());
        assert_eq!(status(&trailers), Some((7, "not allowed".to_owned())));
        trailers.insert("grpc-status", "x".parse().unwrap());
        assert_eq!(status(&trailers).unwrap().0, UNKNOWN);
    }
}
