//! One request over HTTP/2, on the codec that pingora's own session uses. That one leaves the trailers of a request unread and
//! lets nobody else read them; this one reads them. It also makes the checks of a head that pingora's makes.

use crate::client_stream::ConnectionNumber;
use crate::trailers::{self, RequestTrailers};
use async_trait::async_trait;
use bytes::Bytes;
use futures::Stream as Messages;
use h2::server::{Connection, SendResponse};
use h2::{Reason, RecvStream, SendStream};
use http::header::{CONNECTION, CONTENT_LENGTH, DATE, HOST, HeaderName, TRANSFER_ENCODING, UPGRADE};
use http::{HeaderMap, Method, Response, StatusCode};
use pingora_core::protocols::http::HttpTask;
use pingora_core::protocols::http::authority::{RawTargetAuthority, raw_target_authority, validate_request_authority};
use pingora_core::protocols::http::custom::CustomMessageWrite;
use pingora_core::protocols::http::custom::server::Session;
use pingora_core::protocols::http::date::get_cached_date;
use pingora_core::protocols::http::v1::client::http_req_header_to_wire;
use pingora_core::protocols::http::v2::write_body;
use pingora_core::protocols::l4::socket::SocketAddr;
use pingora_core::protocols::{Digest, Stream};
use pingora_core::{Error, ErrorType, OrErr as _, Result};
use pingora_http::{RequestHeader, ResponseHeader};
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

/// Headers of HTTP/1.1 that HTTP/2 has no place for.
const OF_A_CONNECTION: [HeaderName; 5] = [
    TRANSFER_ENCODING,
    CONNECTION,
    UPGRADE,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
];

/// One request and its answer.
pub(super) struct Http2Session {
    head: RequestHeader,
    body: RecvStream,
    respond: SendResponse<Bytes>,
    /// Once the head of the answer was written.
    answer: Option<SendStream<Bytes>>,
    written: Option<Box<ResponseHeader>>,
    /// The end of the answer was sent.
    ended: bool,
    body_read: usize,
    body_sent: usize,
    digest: Arc<Digest>,
    write_timeout: Option<Duration>,
}

/// What a client has begun.
pub(super) enum Accepted {
    /// A request.
    Request(Box<Http2Session>),
    /// One that no two servers need understand alike. It has been answered.
    Rejected,
}

/// What is wrong with a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    /// Framing or a target that no HTTP/2 peer may send.
    Protocol,
    /// An authority that two servers may read differently.
    Authority,
}

/// The next request on a connection; nothing when it ends. Drives the connection, and may be given up at any time.
pub(super) async fn accept(
    connection: &mut Connection<Stream, Bytes>,
    digest: &Arc<Digest>,
    number: ConnectionNumber,
) -> Option<Accepted> {
    let (request, mut respond) = connection.accept().await?.ok()?;
    let (head, body) = request.into_parts();
    let mut head = RequestHeader::from(head);
    head.extensions_mut().insert(number);
    match flaw(&head) {
        None => {}
        Some(Flaw::Protocol) => {
            respond.send_reset(Reason::PROTOCOL_ERROR);
            return Some(Accepted::Rejected);
        }
        Some(Flaw::Authority) => {
            let mut refusal = Response::new(());
            *refusal.status_mut() = StatusCode::BAD_REQUEST;
            // A client that has reset the stream needs no answer.
            let _ = respond.send_response(refusal, true);
            return Some(Accepted::Rejected);
        }
    }
    Some(Accepted::Request(Box::new(Http2Session {
        head,
        body,
        respond,
        answer: None,
        written: None,
        ended: false,
        body_read: 0,
        body_sent: 0,
        digest: Arc::clone(digest),
        write_timeout: None,
    })))
}

/// What the codec lets pass and HTTP does not.
fn flaw(head: &RequestHeader) -> Option<Flaw> {
    let target = head.raw_path();
    let mut lengths = head.headers.get_all(CONTENT_LENGTH).iter();
    let length = lengths.next();
    if target.iter().any(|byte| *byte <= b' ' || *byte == 0x7f)
        || head.headers.contains_key(TRANSFER_ENCODING)
        || lengths.next().is_some()
        || length.is_some_and(|length| length.is_empty() || !length.as_bytes().iter().all(u8::is_ascii_digit))
    {
        return Some(Flaw::Protocol);
    }
    // No tunnel is opened, whatever its target.
    if head.method == Method::CONNECT {
        return None;
    }
    let named = head.uri.authority().is_some() || head.headers.contains_key(HOST);
    let is_path = matches!(raw_target_authority(target), RawTargetAuthority::None);
    (!named || !is_path || validate_request_authority(head).is_err()).then_some(Flaw::Authority)
}

// === impl Http2Session ===

impl Http2Session {
    /// Gives the stream up.
    pub fn reset(&mut self, reason: Reason) {
        if !self.ended {
            self.respond.send_reset(reason);
        }
    }

    /// The end of the body: what trailers it has are there now.
    async fn read_trailers(&mut self) -> Result<()> {
        let read = poll_fn(|cx| self.body.poll_trailers(cx)).await;
        let read = read.or_err(ErrorType::ReadError, "while reading the trailers of a request")?;
        let passing = trailers::passing(read.unwrap_or_default());
        if !passing.is_empty() {
            self.head.extensions_mut().insert(RequestTrailers(passing));
        }
        Ok(())
    }

    /// Resolves when the client has reset the stream.
    async fn reset_by_client(&mut self) -> Box<Error> {
        let reset = match &mut self.answer {
            Some(answer) => poll_fn(|cx| answer.poll_reset(cx)).await,
            None => poll_fn(|cx| self.respond.poll_reset(cx)).await,
        };
        match reset {
            Ok(reason) => Error::explain(ErrorType::H2Error, format!("the client reset the stream: {reason}")),
            Err(error) => Error::because(ErrorType::H2Error, "the client's connection ended", error),
        }
    }

    fn answer(&mut self) -> Result<&mut SendStream<Bytes>> {
        self.answer.as_mut().ok_or_else(|| Error::explain(ErrorType::H2Error, "a body before the head of its answer"))
    }
}

#[async_trait]
impl Session for Http2Session {
    fn req_header(&self) -> &RequestHeader {
        &self.head
    }

    fn req_header_mut(&mut self) -> &mut RequestHeader {
        &mut self.head
    }

    async fn read_body_bytes(&mut self) -> Result<Option<Bytes>> {
        let Some(data) = self.body.data().await else {
            self.read_trailers().await?;
            return Ok(None);
        };
        let data = data.or_err(ErrorType::ReadError, "while reading the body of a request")?;
        self.body_read += data.len();
        // Refused only for a stream that is gone, as the next read tells.
        let _ = self.body.flow_control().release_capacity(data.len());
        Ok(Some(data))
    }

    async fn drain_request_body(&mut self) -> Result<()> {
        while self.read_body_bytes().await?.is_some() {}
        Ok(())
    }

    async fn write_response_header(&mut self, mut head: Box<ResponseHeader>, end: bool) -> Result<()> {
        // The codec takes one head of an answer, so there are no informational ones.
        if self.ended || self.written.is_some() || head.status.is_informational() {
            return Ok(());
        }
        head.insert_header(DATE, get_cached_date())?;
        for name in &OF_A_CONNECTION {
            head.remove_header(name);
        }
        let sent = self.respond.send_response(Response::from_parts(head.as_owned_parts(), ()), end);
        self.answer = Some(sent.or_err(ErrorType::WriteError, "while writing the head of an answer")?);
        self.written = Some(head);
        self.ended = end;
        Ok(())
    }

    async fn write_response_header_ref(&mut self, head: &ResponseHeader, end: bool) -> Result<()> {
        self.write_response_header(Box::new(head.clone()), end).await
    }

    async fn write_body(&mut self, data: Bytes, end: bool) -> Result<()> {
        if self.ended {
            return Ok(());
        }
        let (size, limit) = (data.len(), self.write_timeout);
        // The limit begins anew with whatever part of it the client takes.
        write_body(self.answer()?, data, end, limit).await?;
        self.body_sent += size;
        self.ended = end;
        Ok(())
    }

    async fn write_trailers(&mut self, trailers: HeaderMap) -> Result<()> {
        if self.ended {
            return Ok(());
        }
        let sent = self.answer()?.send_trailers(trailers);
        sent.or_err(ErrorType::WriteError, "while writing the trailers of an answer")?;
        self.ended = true;
        Ok(())
    }

    async fn response_duplex_vec(&mut self, tasks: Vec<HttpTask>) -> Result<bool> {
        let mut ended = false;
        for task in tasks {
            ended |= match task {
                HttpTask::Header(head, end) => {
                    self.write_response_header(head, end).await?;
                    end
                }
                HttpTask::Body(data, end) => {
                    if let Some(data) = data.filter(|data| !data.is_empty()) {
                        self.write_body(data, end).await?;
                    }
                    end
                }
                HttpTask::Trailer(Some(trailers)) => {
                    self.write_trailers(*trailers).await?;
                    true
                }
                HttpTask::Trailer(None) | HttpTask::Done => true,
                HttpTask::UpgradedBody(..) => {
                    return Error::e_explain(ErrorType::InternalError, "HTTP/2 has no upgrades");
                }
                HttpTask::Failed(error) => return Err(error),
            };
        }
        if ended {
            self.finish().await?;
        }
        Ok(ended)
    }

    // Reads have no limit of their own here: whoever reads a body keeps its times.
    fn set_read_timeout(&mut self, _: Option<Duration>) {}

    fn get_read_timeout(&self) -> Option<Duration> {
        None
    }

    fn set_write_timeout(&mut self, timeout: Option<Duration>) {
        self.write_timeout = timeout;
    }

    fn get_write_timeout(&self) -> Option<Duration> {
        self.write_timeout
    }

    fn set_total_drain_timeout(&mut self, _: Option<Duration>) {}

    fn get_total_drain_timeout(&self) -> Option<Duration> {
        None
    }

    fn request_summary(&self) -> String {
        format!("{} {}", self.head.method, self.head.uri.path())
    }

    fn response_written(&self) -> Option<&ResponseHeader> {
        self.written.as_deref()
    }

    async fn shutdown(&mut self, code: u32, _: &str) {
        self.reset(Reason::from(code));
    }

    async fn abandon(&mut self, _: &str) {
        self.reset(Reason::INTERNAL_ERROR);
    }

    fn is_body_done(&mut self) -> bool {
        self.body.is_end_stream()
    }

    async fn finish(&mut self) -> Result<()> {
        // Without a head there is nothing to end: the stream is reset when it is dropped.
        if let Some(answer) = self.answer.as_mut().filter(|_| !self.ended) {
            answer.send_data(Bytes::new(), true).or_err(ErrorType::WriteError, "while ending an answer")?;
            self.ended = true;
        }
        Ok(())
    }

    fn is_body_empty(&mut self) -> bool {
        self.body_read == 0 && self.body.is_end_stream()
    }

    async fn read_body_or_idle(&mut self, no_body_expected: bool) -> Result<Option<Bytes>> {
        if no_body_expected || self.is_body_done() {
            return Err(self.reset_by_client().await);
        }
        self.read_body_bytes().await
    }

    fn body_bytes_sent(&self) -> usize {
        self.body_sent
    }

    fn body_bytes_read(&self) -> usize {
        self.body_read
    }

    fn digest(&self) -> Option<&Digest> {
        Some(&self.digest)
    }

    fn digest_mut(&mut self) -> Option<&mut Digest> {
        Arc::get_mut(&mut self.digest)
    }

    fn client_addr(&self) -> Option<&SocketAddr> {
        self.digest.socket_digest.as_ref()?.peer_addr()
    }

    fn server_addr(&self) -> Option<&SocketAddr> {
        self.digest.socket_digest.as_ref()?.local_addr()
    }

    fn pseudo_raw_h1_request_header(&self) -> Bytes {
        http_req_header_to_wire(&self.head).map(|head| head.freeze()).unwrap_or_default()
    }

    // Nothing here is sent twice, so nothing is kept for that.
    fn enable_retry_buffering(&mut self) {}

    fn retry_buffer_truncated(&self) -> bool {
        false
    }

    fn get_retry_buffer(&self) -> Option<Bytes> {
        None
    }

    async fn finish_custom(&mut self) -> Result<()> {
        Ok(())
    }

    // HTTP/2 has no messages beside requests and answers.
    fn take_custom_message_reader(&mut self) -> Option<Box<dyn Messages<Item = Result<Bytes>> + Unpin + Send + Sync>> {
        None
    }

    fn restore_custom_message_reader(
        &mut self,
        _: Box<dyn Messages<Item = Result<Bytes>> + Unpin + Send + Sync>,
    ) -> Result<()> {
        Ok(())
    }

    fn take_custom_message_writer(&mut self) -> Option<Box<dyn CustomMessageWrite>> {
        None
    }

    fn restore_custom_message_writer(&mut self, _: Box<dyn CustomMessageWrite>) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn head(uri: &str, fields: &[(&str, &str)]) -> RequestHeader {
        let mut request = http::Request::builder().method("POST").uri(uri).version(http::Version::HTTP_2);
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        RequestHeader::from(request.body(()).unwrap().into_parts().0)
    }

    #[test]
    fn a_head_has_one_authority_and_one_length() {
        let path = "http://gateway.example/v1/models";
        for (uri, fields, expected) in [
            (path, &[][..], None),
            (path, &[("host", "gateway.example")][..], None),
            ("/v1/models", &[("host", "gateway.example")][..], None),
            (path, &[("content-length", "5")][..], None),
            ("/v1/models", &[][..], Some(Flaw::Authority)),
            (path, &[("host", "other.example")][..], Some(Flaw::Authority)),
            ("/v1/models", &[("host", "a"), ("host", "b")][..], Some(Flaw::Authority)),
            ("http://user@gateway.example/v1/models", &[][..], Some(Flaw::Authority)),
            (path, &[("content-length", "5"), ("content-length", "5")][..], Some(Flaw::Protocol)),
            (path, &[("content-length", "5, 5")][..], Some(Flaw::Protocol)),
            (path, &[("content-length", "+5")][..], Some(Flaw::Protocol)),
            (path, &[("content-length", "")][..], Some(Flaw::Protocol)),
            (path, &[("transfer-encoding", "chunked")][..], Some(Flaw::Protocol)),
        ] {
            assert_eq!(flaw(&head(uri, fields)), expected, "{uri} {fields:?}");
        }
    }
}
