//! What a fault makes of an answer.

use super::{
    frontend, is_inference,
    reply::{self, Body},
    route,
};
use crate::{
    fault::{FaultKind, Moment, Place},
    server::Shared,
    wire::Wire,
};
use bytes::Bytes;
use futures::stream;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::{
    HeaderMap, Response, StatusCode,
    body::{Body as _, Frame},
    header::{self, HeaderValue},
    http::request::Parts,
};
use std::{io, time::Duration};

/// Bytes that are no HTTP, no chunk, no JSON and no text.
const GARBAGE: &[u8] = b"\x00\xff\xfe\x13\x37 nothing that HTTP knows \x80\r\n\r\n\x01";

/// What becomes of a request.
pub(crate) enum Trouble {
    /// This, and no work.
    Answer(Response<Body>),
    /// Work, and then this happens to the answer.
    Work(Option<Change>),
}

/// What happens to an answer.
pub(crate) enum Change {
    /// The engine refuses it.
    Reject(u16, String),
    Break(usize, Breakage),
    Slow(Duration),
    WrongLength(i64),
}

/// How an answer breaks.
#[derive(Clone, Copy)]
pub(crate) enum Breakage {
    Stall,
    Cut,
    Reset,
    HalfClose,
    Garbage,
    Noise,
}

/// Takes the fault for a request, if there is one. An error closes the connection.
pub(crate) async fn trouble(shared: &Shared, parts: &Parts, wire: &Wire, moment: Moment) -> io::Result<Trouble> {
    let path = parts.uri.path();
    if path.starts_with("/_sim/") {
        return Ok(Trouble::Work(None));
    }
    let inference = is_inference(route(path).map(|(route, ..)| route));
    let Some(kind) = shared.faults.take(moment, path, inference) else { return Ok(Trouble::Work(None)) };
    shared.hit(kind.name(), path, request_id(&parts.headers));
    let change = match kind {
        FaultKind::Status(status, body) => {
            let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            let mut response = match body {
                Some(body) => reply::raw_json(status, body),
                None => reply::flat_error(status, "Injected fault.", &status.as_u16().to_string()),
            };
            frontend::stamp(&shared.config, &mut response, parts.headers.get(header::ORIGIN));
            return Ok(Trouble::Answer(response));
        }
        FaultKind::ErrorEvent(code, message) => Change::Reject(code, message),
        FaultKind::Hang => std::future::pending().await,
        FaultKind::Cut(Place::Head) => return Err(broken()),
        FaultKind::Reset(Place::Head) => {
            wire.reset_at_close();
            return Err(broken());
        }
        FaultKind::HalfClose(Place::Head) => {
            wire.half_close().await?;
            std::future::pending().await
        }
        FaultKind::Garbage(Place::Head) => {
            wire.write(GARBAGE).await?;
            return Err(broken());
        }
        FaultKind::Stall(after) => Change::Break(after, Breakage::Stall),
        FaultKind::Cut(Place::Body(after)) => Change::Break(after, Breakage::Cut),
        FaultKind::Reset(Place::Body(after)) => Change::Break(after, Breakage::Reset),
        FaultKind::HalfClose(Place::Body(after)) => Change::Break(after, Breakage::HalfClose),
        FaultKind::Garbage(Place::Body(after)) => Change::Break(after, Breakage::Garbage),
        FaultKind::Noise(after) => Change::Break(after, Breakage::Noise),
        FaultKind::Slow(time) => Change::Slow(time),
        FaultKind::WrongLength(by) => Change::WrongLength(by),
        FaultKind::Delay(time) => {
            tokio::time::sleep(time).await;
            return Ok(Trouble::Work(None));
        }
        FaultKind::Crash | FaultKind::Restart { .. } => {
            shared.suffer(&kind);
            // The end of the connection comes before any answer.
            std::future::pending().await
        }
        FaultKind::Refuse | FaultKind::Wedge { .. } | FaultKind::Unwedge => {
            shared.suffer(&kind);
            return Ok(Trouble::Work(None));
        }
    };
    Ok(Trouble::Work(Some(change)))
}

/// The id that a gateway gave a request.
pub(crate) fn request_id(headers: &HeaderMap) -> Option<String> {
    headers.get("x-request-id").map(|id| String::from_utf8_lossy(id.as_bytes()).into_owned())
}

fn broken() -> io::Error {
    io::Error::other("broken off by a fault")
}

/// Changes an answer.
pub(super) async fn change(response: Response<Body>, change: Change, wire: &Wire) -> io::Result<Response<Body>> {
    match change {
        Change::Reject(..) => Ok(response),
        Change::Break(after, how) => Ok(keeping_length(response, |body| break_off(body, after, how, wire.clone()))),
        Change::Slow(time) => Ok(keeping_length(response, |body| slow(body, time))),
        Change::WrongLength(by) => lie(response, by, wire).await,
    }
}

/// Changes the body, and leaves its framing what it was.
fn keeping_length(mut response: Response<Body>, change: impl FnOnce(Body) -> Body) -> Response<Body> {
    if let Some(length) = response.body().size_hint().exact() {
        response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    }
    response.map(change)
}

fn slow(body: Body, time: Duration) -> Body {
    let frames = stream::unfold(body, move |mut body| async move {
        let frame = body.frame().await?;
        tokio::time::sleep(time).await;
        Some((frame, body))
    });
    StreamBody::new(frames).boxed_unsync()
}

/// The body up to `after` bytes, and then what is to happen.
fn break_off(body: Body, after: usize, how: Breakage, wire: Wire) -> Body {
    struct State {
        body: Body,
        left: usize,
        /// What is left of the piece in which it breaks.
        rest: Option<Bytes>,
        done: bool,
        wire: Wire,
    }
    let state = State { body, left: after, rest: None, done: false, wire };
    let frames = stream::unfold(Some(state), move |state| async move {
        let mut state = state?;
        if state.left > 0 && !state.done {
            match state.body.frame().await.map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(mut data))) => {
                    if data.len() > state.left {
                        state.rest = Some(data.split_off(state.left));
                    }
                    state.left -= data.len();
                    return Some((Ok(Frame::data(data)), Some(state)));
                }
                Some(Ok(Err(_))) => return Some((Ok(Frame::data(Bytes::new())), Some(state))),
                Some(Err(error)) => return Some((Err(error), None)),
                None => {}
            }
        }
        if state.done {
            let frame = match state.rest.take() {
                Some(rest) => Ok(Frame::data(rest)),
                None => state.body.frame().await?,
            };
            return Some((frame, Some(state)));
        }
        if matches!(how, Breakage::Noise) {
            state.done = true;
            return Some((Ok(Frame::data(Bytes::from_static(GARBAGE))), Some(state)));
        }
        state.wire.flushed().await;
        match how {
            Breakage::Stall => std::future::pending().await,
            Breakage::HalfClose => match state.wire.half_close().await {
                Ok(()) => std::future::pending().await,
                Err(error) => Some((Err(error), None)),
            },
            Breakage::Garbage => {
                let written = state.wire.write(GARBAGE).await;
                Some((Err(written.err().unwrap_or_else(broken)), None))
            }
            Breakage::Reset => {
                state.wire.reset_at_close();
                Some((Err(broken()), None))
            }
            Breakage::Cut | Breakage::Noise => Some((Err(broken()), None)),
        }
    });
    StreamBody::new(frames).boxed_unsync()
}

/// Sends the whole answer around the server, under a length that is not its own.
async fn lie(response: Response<Body>, by: i64, wire: &Wire) -> io::Result<Response<Body>> {
    let (parts, body) = response.into_parts();
    let body = body.collect().await?.to_bytes();
    let real = i64::try_from(body.len()).unwrap_or(i64::MAX);
    let mut head = format!("HTTP/1.1 {}\r\ncontent-length: {}\r\n", parts.status, real.saturating_add(by).max(0));
    for (name, value) in &parts.headers {
        head.push_str(&format!("{name}: {}\r\n", String::from_utf8_lossy(value.as_bytes())));
    }
    head.push_str("\r\n");
    wire.write(head.as_bytes()).await?;
    wire.write(&body).await?;
    if by > 0 {
        return Err(broken());
    }
    // The client has more than it was told of, and may close when it sees that.
    std::future::pending().await
}
