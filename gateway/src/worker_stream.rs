//! A connection to a worker with a write buffer.
//!
//! The streams of pingora's connectors have none, and a request's head is flushed before its body is written. Head and body are
//! then two packets, and a packet costs more than all else that is done for it.

use async_trait::async_trait;
use pingora_core::protocols::{
    ALPN, GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, Stream, TimingDigest,
    UniqueID, UniqueIDType, raw_connect::ProxyDigest, tls::SslDigest,
};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, BufWriter, ReadBuf};

/// Room for a head and a small body. An idle connection holds it, so it is not larger.
const WRITE_BUFFER: usize = 4096;

/// A connection. Reads go straight to the socket, as the reader above has a buffer of its own.
///
/// The first flush after the stream was read from waits for the next one, or for the wish to read the answer.
#[derive(Debug)]
pub struct WorkerStream {
    inner: BufWriter<Stream>,
    flush: Flush,
}

/// What a flush does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flush {
    /// Nothing: a request's head goes out with the body behind it. The next one sends.
    Waits,
    /// Sends, for one has waited. So does a read: without it there would be nothing to read.
    Waited,
}

impl WorkerStream {
    /// Buffers what is written to a worker.
    pub fn new(stream: Stream) -> Self {
        Self { inner: BufWriter::with_capacity(WRITE_BUFFER, stream), flush: Flush::Waits }
    }
}

// === delegation ===

impl AsyncRead for WorkerStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.flush == Flush::Waited {
            std::task::ready!(Pin::new(&mut self.inner).poll_flush(cx))?;
            self.flush = Flush::Waits;
        }
        Pin::new(self.inner.get_mut()).poll_read(cx, buf)
    }
}

impl AsyncWrite for WorkerStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.flush == Flush::Waits {
            self.flush = Flush::Waited;
            return Poll::Ready(Ok(()));
        }
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
impl Shutdown for WorkerStream {
    async fn shutdown(&mut self) {
        // Whoever is gone does not get the rest.
        let _ = self.inner.flush().await;
        Shutdown::shutdown(&mut **self.inner.get_mut()).await;
    }
}

impl UniqueID for WorkerStream {
    fn id(&self) -> UniqueIDType {
        self.inner.get_ref().id()
    }
}

impl Ssl for WorkerStream {
    fn get_ssl_digest(&self) -> Option<Arc<SslDigest>> {
        self.inner.get_ref().get_ssl_digest()
    }

    fn selected_alpn_proto(&self) -> Option<ALPN> {
        self.inner.get_ref().selected_alpn_proto()
    }
}

#[async_trait]
impl Peek for WorkerStream {
    async fn try_peek(&mut self, buf: &mut [u8]) -> io::Result<bool> {
        self.inner.get_mut().try_peek(buf).await
    }
}

impl GetTimingDigest for WorkerStream {
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

impl GetProxyDigest for WorkerStream {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        self.inner.get_ref().get_proxy_digest()
    }

    fn set_proxy_digest(&mut self, digest: ProxyDigest) {
        self.inner.get_mut().set_proxy_digest(digest);
    }
}

impl GetSocketDigest for WorkerStream {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        self.inner.get_ref().get_socket_digest()
    }

    fn set_socket_digest(&mut self, digest: SocketDigest) {
        self.inner.get_mut().set_socket_digest(digest);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use pingora_core::protocols::l4::stream::Stream as L4Stream;
    use tokio::io::AsyncReadExt as _;
    use tokio::net::{TcpListener, TcpStream};

    async fn pair() -> (Stream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        (Box::new(L4Stream::from(near)), listener.accept().await.unwrap().0)
    }

    /// What has arrived, once anything has.
    async fn arrived(far: &mut TcpStream) -> String {
        let mut buf = [0; 64];
        let read = far.read(&mut buf).await.unwrap();
        String::from_utf8_lossy(&buf[..read]).into_owned()
    }

    #[tokio::test]
    async fn a_request_goes_out_with_its_body_each_time() {
        let (near, mut far) = pair().await;
        let mut near = WorkerStream::new(near);
        for _ in 0..3 {
            near.write_all(b"head").await.unwrap();
            near.flush().await.unwrap();
            near.write_all(b"body").await.unwrap();
            near.flush().await.unwrap();
            assert_eq!(arrived(&mut far).await, "headbody");
            near.write_all(b"more").await.unwrap();
            near.flush().await.unwrap();
            assert_eq!(arrived(&mut far).await, "more", "only the first flush waits");
            far.write_all(b"answer").await.unwrap();
            let mut answer = [0; 6];
            near.read_exact(&mut answer).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_request_without_a_body_goes_out_when_its_answer_is_read() {
        let (near, mut far) = pair().await;
        let mut near = WorkerStream::new(near);
        near.write_all(b"head").await.unwrap();
        near.flush().await.unwrap();
        let mut answer = [0; 6];
        let worker = async {
            assert_eq!(arrived(&mut far).await, "head");
            far.write_all(b"answer").await.unwrap();
        };
        let (read, ()) = tokio::join!(near.read_exact(&mut answer), worker);
        read.unwrap();
        assert_eq!(&answer, b"answer");
    }
}
