//! Connections to workers: pingora's connector, the target of one worker, and small whole exchanges for probes and side
//! requests. The forwarding leg uses the same connector, so all share one pool of connections.

mod idle;
mod link;
mod tls;
mod watched;

pub use link::{Head, HeadBuilder, Link};
pub use tls::{Tls, TlsFault};

use crate::trailers;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, header};
use idle::IdleConnections;
use pingora_core::connectors::TransportConnector;
use pingora_core::connectors::http::Connector;
use pingora_core::protocols::http::client::HttpSession;
use pingora_core::protocols::{ALPN, TcpKeepalive};
use pingora_core::upstreams::peer::HttpPeer;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use turnstile_fleet::body::Pieces;
use watched::Watched;

/// A pooled connection that the worker had closed shows it within a round trip. What breaks later was being worked on, and
/// may not be sent again. (Under test a busy machine may be slow to show it.)
pub const STALE_WITHIN: Duration = Duration::from_millis(if cfg!(test) { 5_000 } else { 250 });

/// A worker says nothing while a turn waits, so a machine that vanished is found out by the system: after some 30 s.
const KEEPALIVE: TcpKeepalive = TcpKeepalive {
    idle: Duration::from_secs(15),
    interval: Duration::from_secs(5),
    count: 3,
    #[cfg(target_os = "linux")]
    user_timeout: Duration::from_secs(30),
};

/// Where and how one worker is reached.
#[derive(Debug, Clone)]
pub struct Target {
    /// pingora's description of the connection.
    pub peer: HttpPeer,
    /// `host:port`, for the `Host` header.
    pub authority: HeaderValue,
    /// `Authorization` for the worker, when the pool or worker has an API key.
    pub authorization: Option<HeaderValue>,
    /// How long an idle connection is kept.
    idle: Duration,
    /// Use a connection of its own, never a pooled one: for what must not be sent twice.
    fresh: bool,
}

/// Time limits of one connection.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionLimits {
    /// Time to connect, TLS included.
    pub connect: Duration,
    /// How long an idle connection is kept. Below the 5 s after which SGLang closes it.
    pub idle: Duration,
}

impl Target {
    /// A target at a resolved address.
    pub fn new(address: SocketAddr, host: &str, tls: bool, h2c: bool, limits: ConnectionLimits) -> Self {
        let mut peer = HttpPeer::new(address, tls, if tls { host.to_owned() } else { String::new() });
        peer.options.connection_timeout = Some(limits.connect);
        peer.options.total_connection_timeout = Some(limits.connect);
        peer.options.idle_timeout = Some(limits.idle);
        peer.options.tcp_keepalive = Some(KEEPALIVE);
        peer.options.alpn = match (tls, h2c) {
            (false, false) => ALPN::H1,
            (false, true) => ALPN::H2,
            (true, _) => ALPN::H2H1,
        };
        peer.options.max_h2_streams = 100;
        let shown = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.to_owned() };
        let authority = HeaderValue::try_from(format!("{shown}:{}", address.port()))
            .unwrap_or_else(|_| HeaderValue::from_static("worker"));
        Self { peer, authority, authorization: None, idle: limits.idle, fresh: false }
    }

    /// The same worker, by a connection of its own.
    pub fn fresh(&self) -> Self {
        let mut target = self.clone();
        // Connections are pooled by group; nobody else has this one.
        target.peer.group_key = u64::try_from(crate::request_id::random_u128() >> 64).unwrap_or_default() | 1;
        target.fresh = true;
        target
    }

    /// The address, where HTTP/1.1 without TLS is spoken there.
    fn plain_address(&self) -> Option<SocketAddr> {
        self.peer._address.as_inet().filter(|_| self.peer.options.alpn == ALPN::H1).copied()
    }

    /// Whether HTTP/2 is spoken there, as far as that is known before a connection is made.
    pub fn is_http2(&self) -> bool {
        self.peer.options.alpn == ALPN::H2
    }

    /// The head of a request of ours to this worker, with `Host`, authorization and framing.
    ///
    /// # Errors
    /// When the path cannot stand in a request line.
    fn head(&self, method: &str, path: &str, body_len: Option<usize>) -> Result<Head, ExchangeError> {
        let mut head = HeadBuilder::new(self, method, path, 4)?;
        head.field(&header::HOST, &self.authority)?;
        if let Some(authorization) = &self.authorization {
            head.field(&header::AUTHORIZATION, authorization)?;
        }
        if let Some(len) = body_len {
            head.field(&header::CONTENT_TYPE, &HeaderValue::from_static("application/json"))?;
            head.field(&header::CONTENT_LENGTH, &HeaderValue::from(len))?;
        }
        Ok(head.finish())
    }
}

/// The trailers of an answer whose body was read to its end, as far as they may pass. Over HTTP/1.1 only those that were watched
/// for.
///
/// # Errors
/// The connection broke before the end of the answer.
pub async fn read_trailers(session: &mut HttpSession) -> pingora_core::Result<HeaderMap> {
    match session {
        HttpSession::H2(session) => Ok(trailers::passing(session.read_trailers().await?.unwrap_or_default())),
        HttpSession::H1(session) => Ok(Watched::trailers_on(session.stream())),
        HttpSession::Custom(_) => Ok(HeaderMap::new()),
    }
}

/// What a whole exchange brought.
#[derive(Debug, Clone)]
pub struct Reply {
    /// HTTP status.
    pub status: u16,
    /// Body, at most the limit given.
    pub body: Bytes,
}

impl Reply {
    /// 2xx.
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }
}

/// Why an exchange with a worker failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ExchangeError {
    /// The worker's name is not resolved.
    #[error("the worker's address is not known yet")]
    Unresolved,
    /// No connection, or it broke.
    #[error("{0}")]
    Connection(String),
    /// Over the time given.
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// The answer is larger than it may be.
    #[error("the answer is larger than {0} bytes")]
    TooLarge(usize),
}

impl From<Box<pingora_core::Error>> for ExchangeError {
    fn from(error: Box<pingora_core::Error>) -> Self {
        ExchangeError::Connection(describe(&error))
    }
}

/// A pingora error in a few words, without its back trace of contexts.
pub fn describe(error: &pingora_core::Error) -> String {
    // The context quotes what was read, up to a megabyte of it, which no log may hold.
    if *error.etype() == pingora_core::ErrorType::InvalidHTTPHeader {
        return error.etype().as_str().to_owned();
    }
    match (&error.context, &error.cause) {
        (Some(context), Some(cause)) => format!("{} ({}): {cause}", error.etype().as_str(), context.as_str()),
        (Some(context), None) => format!("{} ({})", error.etype().as_str(), context.as_str()),
        (None, Some(cause)) => format!("{}: {cause}", error.etype().as_str()),
        (None, None) => error.etype().as_str().to_owned(),
    }
}

/// The connectors shared by everything that talks to workers.
pub struct Upstream {
    /// For workers that may speak HTTP/2.
    connector: Connector,
    /// For HTTP/1.1 without TLS, where the pool is ours.
    transport: TransportConnector,
    idle: IdleConnections,
}

impl Default for Upstream {
    fn default() -> Self {
        Self {
            connector: Connector::new(None),
            transport: TransportConnector::new(None),
            idle: IdleConnections::default(),
        }
    }
}

impl Upstream {
    /// A connection to the worker: pooled (`true`) or new.
    ///
    /// # Errors
    /// What pingora says when it cannot connect.
    pub async fn connect(&self, target: &Target) -> pingora_core::Result<(Link, bool)> {
        let peer = &target.peer;
        let Some(address) = target.plain_address() else {
            let (session, reused) = Box::pin(self.connector.get_http_session(peer)).await?;
            return Ok((Link::session(session), reused));
        };
        let idle = if target.fresh { None } else { self.idle.take(address) };
        Ok(match idle {
            Some(stream) => (Link::open(stream), true),
            // On the heap: making a connection takes much room, which every turn would hold and copy for the few that need it.
            None => (Link::open(Box::pin(self.transport.new_stream(peer)).await?), false),
        })
    }

    /// Gives a connection back after its response was read to the end.
    pub async fn release(&self, target: &Target, session: HttpSession) {
        // The connector knows of an HTTP/2 connection until it is given back, whatever becomes of it then.
        if target.fresh && !matches!(session, HttpSession::H2(_)) {
            return;
        }
        let peer = &target.peer;
        match (session, target.plain_address()) {
            (HttpSession::H1(mut session), Some(address)) => {
                session.respect_keepalive();
                if let Some(stream) = session.reuse().await.and_then(Watched::unwatched) {
                    self.idle.put(address, stream, target.idle);
                }
            }
            (session, _) => {
                Box::pin(self.connector.release_http_session(session, peer, peer.options.idle_timeout)).await;
            }
        }
    }

    /// Closes connections that have waited too long for a request. To be called every second or so.
    pub fn sweep(&self) {
        self.idle.sweep();
    }

    /// One whole exchange. A pooled connection that turns out dead at once is replaced, once.
    ///
    /// # Errors
    /// See [`ExchangeError`].
    pub async fn exchange(
        &self,
        target: &Target,
        method: &str,
        path: &str,
        body: Option<Bytes>,
        timeout: Duration,
        max_body: usize,
    ) -> Result<Reply, ExchangeError> {
        let run = async {
            let mut second;
            let mut target = target;
            loop {
                let head = target.head(method, path, body.as_ref().map(Bytes::len))?;
                let body = Pieces::from(body.clone().unwrap_or_default());
                let (mut link, reused) = self.connect(target).await?;
                let started = Instant::now();
                match Self::once(&mut link, target, (&head, &body, timeout), max_body).await {
                    Ok(reply) => {
                        if let Some(session) = link.into_session() {
                            self.release(target, session).await;
                        }
                        return Ok(reply);
                    }
                    Err((_, false)) if reused && started.elapsed() < STALE_WITHIN => {
                        second = target.fresh();
                        target = &second;
                    }
                    Err((error, _)) => return Err(error),
                }
            }
        };
        match tokio::time::timeout(timeout, run).await {
            Ok(result) => result,
            Err(_) => Err(ExchangeError::Timeout(timeout)),
        }
    }

    /// The flag in the error tells whether any byte of an answer arrived.
    async fn once(
        link: &mut Link,
        target: &Target,
        (head, body, patience): (&Head, &Pieces, Duration),
        max_body: usize,
    ) -> Result<Reply, (ExchangeError, bool)> {
        let silent = |e: Box<pingora_core::Error>| (ExchangeError::from(e), false);
        let session = link.send(target, head, body, patience).await.map_err(silent)?;
        let status = loop {
            session.read_response_header().await.map_err(silent)?;
            let status = session.response_header().map_or(0, |h| h.status.as_u16());
            if !(100..200).contains(&status) || status == 101 {
                break status;
            }
        };
        let mut collected = BytesMut::new();
        while let Some(chunk) = session.read_response_body().await.map_err(|e| (ExchangeError::from(e), true))? {
            if collected.len().saturating_add(chunk.len()) > max_body {
                session.shutdown().await;
                return Err((ExchangeError::TooLarge(max_body), true));
            }
            collected.extend_from_slice(&chunk);
        }
        Ok(Reply { status, body: collected.freeze() })
    }
}

#[cfg(test)]
#[path = "upstream_tests.rs"]
mod tests;
