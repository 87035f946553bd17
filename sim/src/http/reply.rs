//! Answers: bodies, headers, the error shapes, server-sent events.

use crate::{life::Busy, pytext};
use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use http_body_util::{BodyExt as _, Full, StreamBody, combinators::UnsyncBoxBody};
use hyper::{
    Method, Response, StatusCode,
    body::{Frame, SizeHint},
    header::{self, HeaderValue},
};
use serde_json::{Value, json};
use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

/// The body of an answer.
pub(crate) type Body = UnsyncBoxBody<Bytes, io::Error>;

fn whole(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).map_err(|never| match never {}).boxed_unsync()
}

fn answer(status: StatusCode, content_type: Option<&'static str>, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    if let Some(content_type) = content_type {
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    }
    response
}

/// A body kept with something that lives until it has gone out. The size stays known.
struct Held {
    body: Body,
    _held: Busy,
}

impl hyper::body::Body for Held {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Keeps the connection busy until the body has gone out.
pub(crate) fn holding(body: Body, held: Busy) -> Body {
    Held { body, _held: held }.boxed_unsync()
}

/// JSON given as text.
pub(crate) fn raw_json(status: StatusCode, body: impl Into<Bytes>) -> Response<Body> {
    answer(status, Some("application/json"), whole(body))
}

/// JSON.
pub(crate) fn json_value(status: StatusCode, body: &Value) -> Response<Body> {
    raw_json(status, body.to_string())
}

/// Nothing, without a content type.
pub(crate) fn empty(status: StatusCode) -> Response<Body> {
    bare_text(status, "")
}

/// Text without a content type.
pub(crate) fn bare_text(status: StatusCode, text: &'static str) -> Response<Body> {
    answer(status, None, whole(text))
}

/// Text of a given type.
pub(crate) fn text(status: StatusCode, content_type: &'static str, text: impl Into<Bytes>) -> Response<Body> {
    answer(status, Some(content_type), whole(text))
}

/// What the server says when a handler broke before it began.
pub(crate) fn internal() -> Response<Body> {
    text(StatusCode::INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", "Internal Server Error")
}

/// The flat error body of the OpenAI endpoints.
pub(crate) fn flat_error(status: StatusCode, message: &str, kind: &str) -> Response<Body> {
    json_value(status, &flat_body(status, message, kind))
}

fn flat_body(status: StatusCode, message: &str, kind: &str) -> Value {
    json!({"object": "error", "message": message, "type": kind, "param": null, "code": status.as_u16()})
}

/// A request the handler refused.
pub(crate) fn bad_request(message: &str) -> Response<Body> {
    flat_error(StatusCode::BAD_REQUEST, message, "BadRequestError")
}

/// A request whose schema is wrong.
pub(crate) fn invalid(message: &str) -> Response<Body> {
    flat_error(StatusCode::BAD_REQUEST, message, "Bad Request")
}

/// A request the scheduler refused; the type is the status as text.
pub(crate) fn scheduler_error(status: u16, message: &str) -> Response<Body> {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    flat_error(status, message, &status.as_u16().to_string())
}

/// The error body of the native endpoints.
pub(crate) fn native_error(message: &str) -> Response<Body> {
    json_value(StatusCode::BAD_REQUEST, &json!({"error": {"message": message}}))
}

/// A stream of server-sent events whose frames come as they are made.
pub(crate) fn event_stream(frames: impl Stream<Item = Bytes> + Send + 'static) -> Response<Body> {
    let body = StreamBody::new(frames.map(|frame| Ok::<_, io::Error>(Frame::data(frame))));
    answer(StatusCode::OK, Some("text/event-stream; charset=utf-8"), body.boxed_unsync())
}

/// One event without a name.
pub(crate) fn data(value: &Value) -> Bytes {
    Bytes::from(format!("data: {value}\n\n"))
}

/// One event with a name.
pub(crate) fn named(name: &str, value: &Value) -> Bytes {
    Bytes::from(format!("event: {name}\ndata: {value}\n\n"))
}

/// The last event of the OpenAI and native streams.
pub(crate) fn done() -> Bytes {
    Bytes::from_static(b"data: [DONE]\n\n")
}

/// The error event of the OpenAI streams: the type is the status's name, and the spelling is Python's.
pub(crate) fn error_event(code: u16, message: &str) -> Bytes {
    let status = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let name = status.canonical_reason().unwrap_or("error").to_uppercase().replace([' ', '-'], "_");
    let body = json!({"error": flat_body(status, message, &name)});
    Bytes::from(format!("data: {}\n\n", pytext::json(&body)))
}

/// The answer to a cross-origin question.
pub(crate) fn preflight() -> Response<Body> {
    let mut response = text(StatusCode::OK, "text/plain; charset=utf-8", "OK");
    let headers = response.headers_mut();
    headers.insert(
        header::ACCESS_CONTROL_ALLOW_METHODS,
        HeaderValue::from_static("DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT, QUERY"),
    );
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    let vary = "Origin, Access-Control-Request-Method, Access-Control-Request-Headers, \
                Access-Control-Request-Private-Network";
    headers.insert(header::VARY, HeaderValue::from_static(vary));
    response
}

/// The answer to a method that the path does not have.
pub(crate) fn wrong_method(methods: &[Method]) -> Response<Body> {
    let mut response = raw_json(StatusCode::METHOD_NOT_ALLOWED, "{\"detail\":\"Method Not Allowed\"}");
    let allow = methods.iter().map(Method::as_str).collect::<Vec<_>>().join(", ");
    if let Ok(allow) = HeaderValue::from_str(&allow) {
        response.headers_mut().insert(header::ALLOW, allow);
    }
    response
}

/// The headers of every answer.
pub(crate) fn stamp(response: &mut Response<Body>, origin: Option<&HeaderValue>) {
    // What the key check or a broken handler says does not pass the cross-origin layer.
    let broken =
        || response.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"text/plain"));
    let status = response.status();
    let outside = status == StatusCode::UNAUTHORIZED || (status == StatusCode::INTERNAL_SERVER_ERROR && broken());
    let headers = response.headers_mut();
    headers.insert(header::SERVER, HeaderValue::from_static("uvicorn"));
    if outside {
        return;
    }
    headers.entry(header::VARY).or_insert(HeaderValue::from_static("Origin"));
    if let Some(origin) = origin {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
        headers.insert(header::ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
    }
}
