//! HTTP/2 without TLS: the streams of one connection, each a request with a task of its own.

mod session;

use super::stopped;
use crate::client_stream::{ClientStream, ConnectionNumber};
use crate::exchange::{self, Connection};
use crate::gateway::Gateway;
use h2::Reason;
use pingora_core::protocols::http::ServerSession;
use pingora_core::protocols::http::custom::server::Session as _;
use pingora_core::protocols::http::v2::server::{H2Options, handshake};
use pingora_core::protocols::{Digest, GetSocketDigest};
use pingora_core::server::ShutdownWatch;
use session::{Accepted, Http2Session, accept};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};
use turnstile_config::Config;

/// What one stream of a client may send before its body is read.
const STREAM_WINDOW: u32 = 256 * 1024;
/// What all streams of a connection may.
const CONNECTION_WINDOW: u32 = 1024 * 1024;
/// What is held of an answer for a stream that the client does not read.
const SEND_BUFFER: usize = 64 * 1024;

/// Requests that break the protocol are answered one by one up to this number, then the connection ends.
const MALFORMED_LIMIT: usize = 32;
/// A connection ends when so many of its streams have broken off and they are more than half of all.
const BROKEN_LIMIT: usize = 200;
/// The client's time to take leave in good order.
const FAREWELL: Duration = Duration::from_secs(1);

/// Serves a connection to its end.
pub(super) async fn serve(gateway: &Arc<Gateway>, stream: Box<ClientStream>, shutdown: &ShutdownWatch) {
    let config = Arc::clone(&gateway.generation.load().config);
    let number = ConnectionNumber(stream.number());
    let digest = Arc::new(Digest { socket_digest: stream.get_socket_digest(), ..Digest::default() });
    let begin = Duration::from_secs(config.timeouts.client_head_s);
    let Ok(Ok(mut connection)) = timeout(begin, handshake(stream, Some(options(&config)))).await else { return };
    // Its own streams at their most, and as many that the client has reset and that are coming to their end.
    let most = 2 * usize::try_from(config.limits.http2_streams).unwrap_or(usize::MAX / 2);
    let mut streams = JoinSet::new();
    let (mut served, mut broken, mut malformed) = (0usize, 0usize, 0usize);
    let mut idle_since = Instant::now();
    let mut stopping = false;
    loop {
        let idle = Duration::from_secs(gateway.generation.load().config.timeouts.client_idle_s);
        tokio::select! {
            biased;
            () = stopped(shutdown), if !stopping => {
                connection.graceful_shutdown();
                stopping = true;
            }
            Some(ended) = streams.join_next(), if !streams.is_empty() => {
                served += 1;
                broken += usize::from(!matches!(ended, Ok(true)));
                if broken >= BROKEN_LIMIT && broken * 2 > served {
                    tracing::info!(peer = ?digest.socket_digest.as_ref().and_then(|d| d.peer_addr()), "too many streams broken off");
                    connection.abrupt_shutdown(Reason::ENHANCE_YOUR_CALM);
                    let last = async { while accept(&mut connection, &digest, number).await.is_some() {} };
                    let _ = timeout(FAREWELL, last).await;
                    break;
                }
                idle_since = Instant::now();
            }
            accepted = accept(&mut connection, &digest, number) => match accepted {
                Some(Accepted::Request(mut session)) if streams.len() < most => {
                    session.set_write_timeout(Some(Duration::from_secs(config.timeouts.client_write_s)));
                    let gateway = Arc::clone(gateway);
                    streams.spawn(async move { serve_one(&gateway, session).await });
                }
                Some(Accepted::Request(mut session)) => session.reset(Reason::REFUSED_STREAM),
                Some(Accepted::Rejected) => {
                    malformed += 1;
                    if malformed >= MALFORMED_LIMIT {
                        break;
                    }
                }
                None => break,
            },
            () = sleep_until(idle_since + idle), if streams.is_empty() && !stopping => {
                connection.graceful_shutdown();
                let last = async { while accept(&mut connection, &digest, number).await.is_some() {} };
                let _ = timeout(FAREWELL, last).await;
                break;
            }
        }
    }
    drop(connection);
    // Each sees that its client is gone, and puts its things in order.
    while streams.join_next().await.is_some() {}
}

/// Serves one request. False when it broke off.
async fn serve_one(gateway: &Arc<Gateway>, session: Box<Http2Session>) -> bool {
    let mut session = ServerSession::new_custom(session);
    let connection = exchange::serve(gateway, &mut session).await;
    match connection {
        Connection::Keep | Connection::Close => session.finish_body().await.is_ok(),
        Connection::Cut => {
            session.shutdown().await;
            false
        }
    }
}

fn options(config: &Config) -> H2Options {
    let limits = &config.limits;
    // The header list is measured with 32 bytes a field, and what is over this limit is refused without a word of ours: room
    // for `limits.header_bytes` to be the limit that a client meets first.
    let list = 2 * limits.header_bytes.as_usize() + limits.uri_bytes.as_usize() + 32 * 256;
    let mut options = H2Options::default();
    options
        .max_concurrent_streams(limits.http2_streams)
        .max_header_list_size(u32::try_from(list).unwrap_or(u32::MAX))
        .initial_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buffer_size(SEND_BUFFER);
    options
}
