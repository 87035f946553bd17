//! The edge: a client's connection from its first byte to its last. It tells HTTP/1 and HTTP/2 apart, reads one head after the
//! other within the limits, and hands each request to [`crate::exchange`].
//!
//! The protocols themselves are pingora's sessions. The loop around them is ours, because pingora's own limits a head read by
//! read only, waits for 24 bytes before it looks at a request, and answers what it refuses without a reason.

pub mod head;
mod http1;
mod http2;

use crate::client_stream::{ClientLimits, ClientStream};
use crate::errors::{Kind, Refusal};
use crate::gateway::Gateway;
use crate::request_id::random_hex;
use crate::respond::raw_refusal;
use async_trait::async_trait;
use pingora_core::apps::ServerApp;
use pingora_core::protocols::Stream;
use pingora_core::server::ShutdownWatch;
use prometheus::IntGauge;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt};
use turnstile_config::Config;
use turnstile_fleet::route::Protocol;

/// What an HTTP/2 client sends first.
const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A client that was refused may still be sending. Its bytes are read and dropped for so long, since closing on unread bytes
/// would take the answer away from it.
const LINGER: Duration = Duration::from_secs(30);
/// The longest pause in that.
const LINGER_PAUSE: Duration = Duration::from_secs(5);

/// Bytes of a request line and of header framing that the limits on headers and target do not count.
const HEAD_OVERHEAD: usize = 1024;

/// Connections over the limit that are told so at a time; more are closed without a word.
const REFUSED_AT_A_TIME: usize = 64;

/// The application of one client listener.
pub struct Edge {
    gateway: Arc<Gateway>,
    h2c: bool,
    open: AtomicUsize,
    refused: AtomicUsize,
}

/// Counts as long as it lives.
struct Counted<'a>(&'a AtomicUsize);

/// Is seen in the metrics as long as it lives.
struct Shown<'a>(&'a IntGauge);

impl Edge {
    /// Hands requests to `gateway`; `h2c`: HTTP/2 is spoken as well.
    pub fn new(gateway: Arc<Gateway>, h2c: bool) -> Self {
        Self { gateway, h2c, open: AtomicUsize::new(0), refused: AtomicUsize::new(0) }
    }

    /// Answers a connection that is one too many.
    async fn refuse(&self, mut stream: Stream, most: usize, shutdown: &ShutdownWatch) {
        let refusal = Refusal::new(
            Kind::TooManyConnections,
            format!("limits.connections = {most} connections are open on this listener"),
        );
        let refusal = refusal.with_retry_after(1);
        self.gateway.metrics.refusals.with_label_values(&[refusal.kind.row().code]).inc();
        let (_counted, refused) = Counted::new(&self.refused);
        if refused <= REFUSED_AT_A_TIME
            && stream.write_all(&raw_refusal(&refusal, Protocol::OpenAi, &random_hex())).await.is_ok()
        {
            close(stream, true, shutdown).await;
        }
    }
}

// === impl Counted ===

impl<'a> Counted<'a> {
    /// One more, and how many there are now.
    fn new(count: &'a AtomicUsize) -> (Self, usize) {
        let now = count.fetch_add(1, Ordering::Relaxed) + 1;
        (Self(count), now)
    }
}

impl<'a> Shown<'a> {
    fn new(gauge: &'a IntGauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[async_trait]
impl ServerApp for Edge {
    async fn process_new(self: &Arc<Self>, stream: Stream, shutdown: &ShutdownWatch) -> Option<Stream> {
        let Ok(mut stream) = stream.into_any().downcast::<ClientStream>() else {
            tracing::error!("a connection that is not a client's");
            return None;
        };
        let config = Arc::clone(&self.gateway.generation.load().config);
        stream.read_head(limits(&config, true));
        let (counted, open) = Counted::new(&self.open);
        let most = usize::try_from(config.limits.connections).unwrap_or(usize::MAX);
        if open > most {
            drop(counted);
            self.refuse(stream, most, shutdown).await;
            return None;
        }
        let _shown = Shown::new(&self.gateway.metrics.client_connections);
        let http2 = self.h2c
            && tokio::select! {
                // A request that is there already is served.
                biased;
                opens = stream.opens_with(HTTP2_PREFACE) => opens.ok()?,
                () = stopped(shutdown) => return None,
            };
        if http2 {
            stream.read_freely();
            Box::pin(http2::serve(&self.gateway, stream, shutdown)).await;
        } else {
            http1::serve(&self.gateway, stream, shutdown).await;
        }
        None
    }
}

/// The limits of a connection, as they are configured now. A new connection has to begin as soon as a head has to end.
fn limits(config: &Config, new: bool) -> ClientLimits {
    let (limits, timeouts) = (&config.limits, &config.timeouts);
    let fields = usize::try_from(limits.header_count).unwrap_or(usize::MAX);
    let head_time = Duration::from_secs(timeouts.client_head_s);
    ClientLimits {
        // A field is framed by a colon, a space and the end of its line.
        head_bytes: limits.header_bytes.as_usize() + limits.uri_bytes.as_usize() + 4 * fields + HEAD_OVERHEAD,
        head_time,
        idle: if new { head_time } else { Duration::from_secs(timeouts.client_idle_s) },
        patience: Duration::from_secs(timeouts.client_write_s),
    }
}

async fn stopped(shutdown: &ShutdownWatch) {
    // An error means that the sender is gone, which is a stop as well.
    let _ = shutdown.clone().wait_for(|stop| *stop).await;
}

/// Ends a connection after a whole answer. What the client is still sending is dropped, so that it gets to read the answer.
async fn close(mut stream: Stream, sending: bool, shutdown: &ShutdownWatch) {
    if stream.flush().await.is_err() || AsyncWriteExt::shutdown(&mut stream).await.is_err() {
        return;
    }
    let client = (*stream).as_any().downcast_ref::<ClientStream>();
    if !sending && !client.is_some_and(ClientStream::has_unread) {
        return;
    }
    if let Some(client) = client {
        client.read_freely();
    }
    let drop_all = async {
        let mut dropped = vec![0u8; 16 * 1024];
        while let Ok(Ok(1..)) = tokio::time::timeout(LINGER_PAUSE, stream.read(&mut dropped)).await {}
    };
    tokio::select! {
        _ = tokio::time::timeout(LINGER, drop_all) => {}
        () = stopped(shutdown) => {}
    }
}
