//! HTTP/1: one request after the other on a connection, pipelined ones in their order.

use super::{close, limits, stopped};
use crate::client_stream::{ClientStream, ReadFault};
use crate::errors::{Kind, Refusal};
use crate::exchange::{self, Connection};
use crate::gateway::Gateway;
use crate::request_id::random_hex;
use crate::respond::raw_refusal;
use bytes::BytesMut;
use http::{Version, header};
use pingora_core::protocols::Stream;
use pingora_core::protocols::http::ServerSession;
use pingora_core::protocols::http::v1::server::HttpSession;
use pingora_core::server::ShutdownWatch;
use pingora_core::{Error, ErrorType};
use std::sync::Arc;
use tokio::io::AsyncWriteExt as _;
use turnstile_config::Config;
use turnstile_fleet::route::Protocol;

/// Serves a connection to its end.
pub(super) async fn serve(gateway: &Arc<Gateway>, stream: Box<ClientStream>, shutdown: &ShutdownWatch) {
    // The limits of the first head run since the connection began.
    let mut next: Option<(Stream, Option<BytesMut>)> = Some((stream, None));
    while let Some((stream, ahead)) = next.take() {
        // Nothing is made for a request that has not begun.
        if ahead.is_none()
            && let Some(client) = (*stream).as_any().downcast_ref::<ClientStream>()
        {
            tokio::select! {
                biased;
                begun = client.head_begins() => if begun.is_err() { return },
                () = stopped(shutdown) => return,
            }
        }
        next = serve_one(gateway, begin(stream, ahead), shutdown).await;
        if let Some((stream, _)) = &next
            && let Some(client) = (**stream).as_any().downcast_ref::<ClientStream>()
        {
            client.read_head(limits(&gateway.generation.load().config, false));
        }
    }
}

/// A session for the next request.
fn begin(stream: Stream, ahead: Option<BytesMut>) -> HttpSession {
    let mut session = HttpSession::new(stream);
    // Both times are kept by the stream and by whoever reads the body.
    session.set_read_timeout(None);
    session.set_pipelining_enabled(true);
    if let Some(ahead) = ahead {
        session.set_pipelined_prefix(ahead);
    }
    session
}

/// Serves one request, and gives the connection back if it goes on.
async fn serve_one(
    gateway: &Arc<Gateway>,
    mut session: HttpSession,
    shutdown: &ShutdownWatch,
) -> Option<(Stream, Option<BytesMut>)> {
    let read = tokio::select! {
        biased;
        read = session.read_request() => read,
        () = stopped(shutdown) => return None,
    };
    match read {
        Ok(Some(_)) => {}
        Ok(None) => return None,
        Err(error) => {
            refuse(gateway, session, &error, shutdown).await;
            return None;
        }
    }
    if let Some(client) = ClientStream::of(&session) {
        // A body with a length is read to that length; the end of a chunked one is looked for here.
        if session.req_header().headers.contains_key(header::TRANSFER_ENCODING) {
            client.read_chunked();
        } else {
            client.read_freely();
        }
    }
    if *shutdown.borrow() {
        session.set_server_keepalive(None);
    }
    let mut session = ServerSession::H1(session);
    // On the heap: the state of a request is large, and an idle connection need not hold room for one.
    let connection = Box::pin(exchange::serve(gateway, &mut session)).await;
    let ServerSession::H1(mut session) = session else { return None };
    match connection {
        Connection::Keep | Connection::Close => {
            session.finish_body().await.ok()?;
            let read = session.is_body_done() && !ClientStream::of(&session).is_some_and(ClientStream::owes_body);
            if connection == Connection::Close || !read || !session.will_keepalive() {
                close(session.into_inner(), !read, shutdown).await;
                return None;
            }
            session.reuse().await.ok()?.map(|reusable| reusable.into_parts())
        }
        Connection::Cut => {
            // The end of the connection is the end of such an answer, so it must not look like one.
            if session.req_header().version != Version::HTTP_11
                && let Some(client) = ClientStream::of(&session)
            {
                client.reset_on_drop();
            }
            None
        }
    }
}

/// Answers a head that could not be read, if there is still somebody to answer.
async fn refuse(gateway: &Gateway, session: HttpSession, error: &Error, shutdown: &ShutdownWatch) {
    let fault = ClientStream::of(&session).and_then(ClientStream::fault);
    let generation = gateway.generation.load_full();
    let Some(refusal) = reason(error, fault, &generation.config) else { return };
    gateway.metrics.refusals.with_label_values(&[refusal.kind.row().code]).inc();
    tracing::debug!(peer = ?session.client_addr(), %refusal, "request head refused");
    let mut stream = session.into_inner();
    if stream.write_all(&raw_refusal(&refusal, Protocol::OpenAi, &random_hex())).await.is_ok() {
        close(stream, true, shutdown).await;
    }
}

fn reason(error: &Error, fault: Option<ReadFault>, config: &Config) -> Option<Refusal> {
    let limits = &config.limits;
    match fault {
        Some(ReadFault::Idle) => return None,
        Some(ReadFault::HeadTooSlow) => {
            let seconds = config.timeouts.client_head_s;
            let message = format!("the request head took longer than timeouts.client_head_s = {seconds}");
            return Some(Refusal::new(Kind::RequestTimeout, message));
        }
        Some(ReadFault::HeadTooLarge) => {
            let message = format!(
                "the request head is larger than limits.header_bytes = {} and limits.uri_bytes = {} bytes allow",
                limits.header_bytes.bytes(),
                limits.uri_bytes.bytes()
            );
            return Some(Refusal::new(Kind::HeaderTooLarge, message));
        }
        Some(ReadFault::BadChunk) | None => {}
    }
    // Anything else means that the client has left.
    if *error.etype() != ErrorType::InvalidHTTPHeader {
        return None;
    }
    let parse = error.cause.as_ref().and_then(|cause| cause.downcast_ref::<httparse::Error>());
    Some(match parse {
        Some(httparse::Error::TooManyHeaders) => {
            let message =
                format!("the request has more header fields than limits.header_count = {}", limits.header_count);
            Refusal::new(Kind::HeaderTooLarge, message)
        }
        Some(parse) => Refusal::new(Kind::BadRequest, format!("the request head is malformed: {parse}")),
        // pingora's words on what it checks itself; where there is a cause, they quote the client's bytes instead.
        None => {
            let why = error.context.as_ref().filter(|_| error.cause.is_none()).map_or("not HTTP/1", |c| c.as_str());
            Refusal::new(Kind::BadRequest, format!("the request head is malformed: {why}"))
        }
    })
}
