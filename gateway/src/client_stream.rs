//! A client's connection with a write buffer.
//!
//! A stream that is made from a socket outside pingora's own listeners has no buffers. Without one, head and body of an answer
//! are two packets, and each piece of a chunked body three writes; a packet costs more than all else that is done for it.

use async_trait::async_trait;
use pingora_core::protocols::l4::stream::Stream as L4Stream;
use pingora_core::protocols::{
    GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, TimingDigest, UniqueID,
    UniqueIDType, raw_connect::ProxyDigest,
};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, BufWriter, ReadBuf};

/// Room for a head and a small body, or for a piece of a stream. An idle connection holds it, so it is not larger.
const WRITE_BUFFER: usize = 4096;

/// A connection. Reads go straight to the socket, as the readers above have buffers of their own.
#[derive(Debug)]
pub struct ClientStream {
    inner: BufWriter<L4Stream>,
}

impl ClientStream {
    /// Buffers what is written to `stream`.
    pub fn new(stream: L4Stream) -> Self {
        Self { inner: BufWriter::with_capacity(WRITE_BUFFER, stream) }
    }
}

// === delegation ===

impl AsyncRead for ClientStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(self.inner.get_mut()).poll_read(cx, buf)
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

#[async_trait]
impl Shutdown for ClientStream {
    async fn shutdown(&mut self) {
        // Whoever is gone does not get the rest.
        let _ = self.inner.flush().await;
        Shutdown::shutdown(self.inner.get_mut()).await;
    }
}

impl UniqueID for ClientStream {
    fn id(&self) -> UniqueIDType {
        self.inner.get_ref().id()
    }
}

impl Ssl for ClientStream {}

#[async_trait]
impl Peek for ClientStream {
    async fn try_peek(&mut self, buf: &mut [u8]) -> io::Result<bool> {
        self.inner.get_mut().try_peek(buf).await
    }
}

impl GetTimingDigest for ClientStream {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        self.inner.get_ref().get_timing_digest()
    }

    fn get_read_pending_time(&self) -> Duration {
        self.inner.get_ref().get_read_pending_time()
    }

    fn get_write_pending_time(&self) -> Duration {
        self.inner.get_ref().get_write_pending_time()
    }
}

impl GetProxyDigest for ClientStream {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        self.inner.get_ref().get_proxy_digest()
    }

    fn set_proxy_digest(&mut self, digest: ProxyDigest) {
        self.inner.get_mut().set_proxy_digest(digest);
    }
}

impl GetSocketDigest for ClientStream {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        self.inner.get_ref().get_socket_digest()
    }

    fn set_socket_digest(&mut self, digest: SocketDigest) {
        self.inner.get_mut().set_socket_digest(digest);
    }
}
