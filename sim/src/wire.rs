//! The socket of a connection, which a fault can reach around the HTTP server.

use parking_lot::Mutex;
use std::{
    future::poll_fn,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    sync::Notify,
};

struct Socket {
    stream: Mutex<TcpStream>,
    flushed: Notify,
}

/// One socket, shared by the HTTP server and the answers on it.
#[derive(Clone)]
pub(crate) struct Wire(Arc<Socket>);

impl Wire {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self(Arc::new(Socket { stream: Mutex::new(stream), flushed: Notify::new() }))
    }

    /// Waits until the server has handed over all that it had. To be awaited inside an answer, which the server polls before it
    /// flushes.
    pub(crate) async fn flushed(&self) {
        self.0.flushed.notified().await;
    }

    /// Writes bytes that are none of the server's.
    pub(crate) async fn write(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let written = poll_fn(|context| Pin::new(&mut *self.0.stream.lock()).poll_write(context, bytes)).await?;
            bytes = bytes.get(written..).unwrap_or_default();
        }
        Ok(())
    }

    /// Closes the sending side.
    pub(crate) async fn half_close(&self) -> io::Result<()> {
        poll_fn(|context| Pin::new(&mut *self.0.stream.lock()).poll_shutdown(context)).await
    }

    /// Lets the close, whenever it comes, be a reset.
    pub(crate) fn reset_at_close(&self) {
        if let Err(error) = self.0.stream.lock().set_zero_linger() {
            tracing::debug!(%error, "a reset becomes an ordinary close");
        }
    }
}

impl AsyncRead for Wire {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.stream.lock()).poll_read(context, buffer)
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0.stream.lock()).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut *self.0.stream.lock()).poll_write_vectored(context, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.stream.lock().is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut *self.0.stream.lock()).poll_flush(context);
        if flushed.is_ready() {
            self.0.flushed.notify_waiters();
        }
        flushed
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.stream.lock()).poll_shutdown(context)
    }
}
