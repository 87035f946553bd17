//! What of an answer has reached the client, and writing more of it.

use super::relay::{Ending, LateHeaders, ResponseFilter};
use super::request::Framing;
use crate::client_stream::ClientStream;
use crate::trailers;
use crate::upstream::describe;
use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use pingora_core::protocols::http::ServerSession;
use pingora_http::ResponseHeader;
use turnstile_fleet::observe::Observer;

/// Writes to the client: the head with the first piece of the body.
#[derive(Default)]
pub(super) struct Writer {
    /// Not yet sent.
    pub(super) head: Option<ResponseHeader>,
    /// The body is held to its end (JSON that is observed).
    pub(super) holds: bool,
    /// A body that is whole when the head is written gets its exact length.
    pub(super) measures: bool,
    /// A write has begun and not ended.
    pub(super) writing: bool,
    /// What was written ends where an event does.
    pub(super) between_events: bool,
    /// Bytes of the body that were written.
    pub(super) body_bytes: usize,
    /// The head says that there is no body (204 and 304, as a filter may have made of it): none is written.
    pub(super) bodiless: bool,
    /// The worker's trailers, where no filter sees them.
    pub(super) trailers: HeaderMap,
}

impl Writer {
    /// Brings a head that was not sent yet up to what is known now. Whether a filter has made it one that no body follows.
    pub(super) fn complete_head(
        &mut self,
        filter: &mut Option<Box<dyn ResponseFilter + '_>>,
        observer: &Option<Observer>,
        late: &mut LateHeaders<'_>,
    ) -> bool {
        let Some(head) = &mut self.head else { return false };
        if let Some(changed) = filter.as_mut().and_then(|filter| filter.changed_head()) {
            *head = changed;
        }
        if let Some(observer) = observer {
            late(observer, head);
        }
        filter.is_some() && matches!(head.status.as_u16(), 204 | 304)
    }

    /// Writes a chunk; `trailers` stand behind the last.
    pub(super) async fn write(
        &mut self,
        client: &mut ServerSession,
        chunk: Bytes,
        end: bool,
        trailers: HeaderMap,
    ) -> Result<(), Ending> {
        let mut chunk = chunk;
        let passes = !trailers.is_empty() && takes_trailers(client);
        let mut trailers = if passes { trailers } else { HeaderMap::new() };
        if let Some(mut head) = self.head.take() {
            self.bodiless = matches!(head.status.as_u16(), 204 | 304);
            if self.bodiless {
                head.remove_header(&header::TRANSFER_ENCODING);
                if self.measures || head.status == StatusCode::NO_CONTENT {
                    // It would be that of a body which does not come.
                    head.remove_header(&header::CONTENT_LENGTH);
                }
            } else if !trailers.is_empty() && Framing::of(client.req_header().version) == Framing::Http11 {
                // Only chunks have room for them.
                head.remove_header(&header::CONTENT_LENGTH);
                head.insert_header(header::TRANSFER_ENCODING, "chunked").map_err(|e| Ending::Cut(describe(&e)))?;
            } else if self.measures && end {
                head.remove_header(&header::TRANSFER_ENCODING);
                head.insert_header(header::CONTENT_LENGTH, chunk.len().to_string())
                    .map_err(|e| Ending::Cut(describe(&e)))?;
            }
            if Framing::of(client.req_header().version) == Framing::Http10
                && !head.headers.contains_key(header::CONTENT_LENGTH)
            {
                // The end of the connection is the only end that this client can see.
                client.set_keepalive(None);
            }
            self.writing = true;
            client.write_response_header(Box::new(head)).await.map_err(|_| Ending::ClientGone)?;
        }
        self.writing = true;
        if self.bodiless {
            (chunk, trailers) = (Bytes::new(), HeaderMap::new());
        }
        self.body_bytes += chunk.len();
        let gone = |_| Ending::ClientGone;
        if trailers.is_empty() {
            client.write_response_body(chunk, end).await.map_err(gone)?;
        } else {
            if !chunk.is_empty() {
                client.write_response_body(chunk, false).await.map_err(gone)?;
            }
            end_with(client, trailers).await.map_err(gone)?;
        }
        self.writing = false;
        Ok(())
    }
}

/// Ends an answer with trailers.
async fn end_with(client: &mut ServerSession, trailers: HeaderMap) -> pingora_core::Result<()> {
    if let ServerSession::H1(session) = client {
        let head = session.response_written();
        let chunked = head.is_some_and(|head| head.headers.contains_key(header::TRANSFER_ENCODING));
        // An answer with a length, of which the client has the head already, ends without them.
        if chunked && let Some(stream) = ClientStream::of(session) {
            stream.end_with(&trailers);
        }
        return client.finish_body().await;
    }
    client.write_response_trailers(trailers).await
}

/// Whether the client takes trailers: over HTTP/2 always, over HTTP/1.1 if it says so.
pub fn takes_trailers(client: &ServerSession) -> bool {
    let head = client.req_header();
    match Framing::of(head.version) {
        Framing::Http2 => true,
        Framing::Http11 => trailers::are_taken(&head.headers),
        Framing::Http10 => false,
    }
}
