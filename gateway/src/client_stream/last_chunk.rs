//! The end of a chunked answer with trailers. The writer above knows of none, so its last chunk is completed here.

use super::ClientStream;
use crate::trailers;
use bytes::{Buf as _, Bytes};
use http::HeaderMap;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::AsyncWrite as _;

/// The last chunk without trailers, as the writer above writes it.
const LAST_CHUNK: &[u8] = b"0\r\n\r\n";
/// How much of it stands before the trailers.
const SIZE_LINE: usize = 3;

impl ClientStream {
    /// The last chunk of the answer, which has to be the next that is written, shall have these trailers.
    pub fn end_with(&self, trailers: &HeaderMap) {
        let (size, end) = LAST_CHUNK.split_at(SIZE_LINE);
        self.inner.get_ref().watch.lock().last_chunk = Bytes::from([size, &trailers::lines(trailers), end].concat());
    }

    /// These bytes are the last chunk of an answer with trailers.
    pub(super) fn is_last_chunk(&mut self, bytes: &[u8]) -> bool {
        !self.inner.get_mut().watch.get_mut().last_chunk.is_empty() && bytes == LAST_CHUNK
    }

    /// Writes the last chunk, trailers included, from where it was left.
    pub(super) fn poll_write_last_chunk(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            let left = self.inner.get_mut().watch.get_mut().last_chunk.clone();
            if left.is_empty() {
                return Poll::Ready(Ok(()));
            }
            match ready!(Pin::new(&mut self.inner).poll_write(cx, &left))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => self.inner.get_mut().watch.get_mut().last_chunk.advance(written),
            }
        }
    }
}
