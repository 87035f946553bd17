//! A connection to an HTTP/1.1 worker that is watched for the trailers of an answer: the parser above reads over them. Nothing is
//! changed or held back here, and what is not understood is left to the parser.

use crate::chunked::Chunks;
use async_trait::async_trait;
use http::HeaderMap;
use httparse::ParserConfig;
use memchr::memmem::Finder;
use pingora_core::protocols::raw_connect::ProxyDigest;
use pingora_core::protocols::tls::SslDigest;
use pingora_core::protocols::{
    ALPN, GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, Stream, TimingDigest,
    UniqueID, UniqueIDType,
};
use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

static END_OF_HEAD: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\r\n\r\n"));

/// The longest head, and most fields of one, that is looked into.
const HEAD_LIMIT: usize = 64 * 1024;
const FIELDS: usize = 128;

/// A connection on which one answer is read.
#[derive(Debug)]
pub(super) struct Watched {
    stream: Stream,
    watch: Watch,
}

/// What comes next.
#[derive(Debug)]
enum Watch {
    /// The head, of which so much is there.
    Head(Vec<u8>),
    Chunked(Chunks),
    /// An answer without trailers.
    Nothing,
}

// === impl Watched ===

impl Watched {
    /// Begins before the first byte of an answer.
    pub fn new(stream: Stream) -> Self {
        Self { stream, watch: Watch::Head(Vec::new()) }
    }

    /// The trailers of an answer that was read to its end, if `stream` is watched.
    pub fn trailers_on(stream: &Stream) -> HeaderMap {
        match (**stream).as_any().downcast_ref::<Self>() {
            Some(Self { watch: Watch::Chunked(chunks), .. }) => chunks.trailers(),
            _ => HeaderMap::new(),
        }
    }

    /// The connection as it was before it was watched.
    pub fn unwatched(stream: Stream) -> Option<Stream> {
        if !(*stream).as_any().is::<Self>() {
            return Some(stream);
        }
        stream.into_any().downcast::<Self>().ok().map(|watched| watched.stream)
    }
}

impl Watch {
    fn see(&mut self, bytes: &[u8]) {
        match self {
            Self::Nothing => {}
            // The connection is used again: this is the next answer.
            Self::Chunked(chunks) if chunks.is_done() && !bytes.is_empty() => {
                *self = Self::Head(Vec::new());
                self.see(bytes);
            }
            Self::Chunked(chunks) => {
                if chunks.follow(bytes).is_err() {
                    *self = Self::Nothing;
                }
            }
            // Most heads come in one piece.
            Self::Head(head)
                if head.is_empty()
                    && let Some(end) = END_OF_HEAD.find(bytes) =>
            {
                let (head, rest) = bytes.split_at(end + 4);
                *self = if head.len() <= HEAD_LIMIT { Self::behind(head) } else { Self::Nothing };
                self.see(rest);
            }
            Self::Head(head) => {
                let room = HEAD_LIMIT.saturating_sub(head.len());
                let seen = head.len();
                head.extend_from_slice(bytes.get(..room).unwrap_or(bytes));
                // The empty line may have begun in what was there.
                let Some(end) = END_OF_HEAD.find(head.get(seen.saturating_sub(3)..).unwrap_or_default()) else {
                    if head.len() >= HEAD_LIMIT {
                        *self = Self::Nothing;
                    }
                    return;
                };
                let end = seen.saturating_sub(3) + end + 4;
                let follows = Self::behind(head.get(..end).unwrap_or_default());
                let rest = bytes.get(end - seen..).unwrap_or_default();
                *self = follows;
                self.see(rest);
            }
        }
    }

    /// What follows a head.
    fn behind(head: &[u8]) -> Self {
        let mut fields = [const { MaybeUninit::uninit() }; FIELDS];
        let mut response = httparse::Response::new(&mut []);
        let parsed = ParserConfig::default().parse_response_with_uninit_headers(&mut response, head, &mut fields);
        if !matches!(parsed, Ok(httparse::Status::Complete(_))) {
            return Self::Nothing;
        }
        if response.code.is_some_and(|code| (100..200).contains(&code) && code != 101) {
            return Self::Head(Vec::new());
        }
        let is_chunked = response.headers.iter().any(|field| {
            field.name.eq_ignore_ascii_case("transfer-encoding") && field.value.eq_ignore_ascii_case(b"chunked")
        });
        if is_chunked { Self::Chunked(Chunks::default()) } else { Self::Nothing }
    }
}

impl AsyncRead for Watched {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        self.watch.see(buf.filled().get(before..).unwrap_or_default());
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[async_trait]
impl Shutdown for Watched {
    async fn shutdown(&mut self) {
        self.stream.shutdown().await;
    }
}

impl UniqueID for Watched {
    fn id(&self) -> UniqueIDType {
        self.stream.id()
    }
}

impl Ssl for Watched {
    fn get_ssl_digest(&self) -> Option<Arc<SslDigest>> {
        self.stream.get_ssl_digest()
    }

    fn selected_alpn_proto(&self) -> Option<ALPN> {
        self.stream.selected_alpn_proto()
    }
}

impl Peek for Watched {}

impl GetTimingDigest for Watched {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        self.stream.get_timing_digest()
    }
}

impl GetProxyDigest for Watched {
    fn get_proxy_digest(&self) -> Option<Arc<ProxyDigest>> {
        self.stream.get_proxy_digest()
    }
}

impl GetSocketDigest for Watched {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        self.stream.get_socket_digest()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// What is seen of an answer that comes in pieces of a size.
    fn seen(answer: &[u8], size: usize) -> HeaderMap {
        let mut watch = Watch::Head(Vec::new());
        answer.chunks(size).for_each(|piece| watch.see(piece));
        match watch {
            Watch::Chunked(chunks) => chunks.trailers(),
            Watch::Head(_) | Watch::Nothing => HeaderMap::new(),
        }
    }

    #[test]
    fn trailers_are_seen_in_pieces_of_any_size() {
        let answer =
            b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n\
                       2\r\nhi\r\n0\r\nx-checksum: abc\r\nset-cookie: a=b\r\n\r\n";
        for size in 1..=answer.len() {
            let trailers = seen(answer, size);
            assert_eq!(trailers.len(), 1, "in pieces of {size}: {trailers:?}");
            assert_eq!(trailers.get("x-checksum").unwrap(), "abc");
        }
    }

    #[test]
    fn an_answer_has_not_the_trailers_of_the_one_before_it() {
        let first = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-a: b\r\n\r\n";
        for (second, trailers) in [
            ("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi", 0),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 0),
            ("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-c: d\r\nx-e: f\r\n\r\n", 2),
        ] {
            let mut watch = Watch::Head(Vec::new());
            watch.see(first.as_bytes());
            watch.see(second.as_bytes());
            let seen = if let Watch::Chunked(chunks) = watch { chunks.trailers() } else { HeaderMap::new() };
            assert_eq!((seen.len(), seen.contains_key("x-a")), (trailers, false), "{second:?}");
        }
    }

    #[test]
    fn other_answers_have_none() {
        for answer in [
            "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi0\r\nx-a: b\r\n\r\n",
            "HTTP/1.1 200 OK\r\n\r\n0\r\nx-a: b\r\n\r\n",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-a: b\r\n",
            "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nwhat?\r\n0\r\nx-a: b\r\n\r\n",
            "no HTTP\r\n\r\n0\r\nx-a: b\r\n\r\n",
        ] {
            for size in 1..=answer.len() {
                assert!(seen(answer.as_bytes(), size).is_empty(), "{answer:?}");
            }
        }
        let long = format!("HTTP/1.1 200 OK\r\nx: {}\r\n\r\n", "a".repeat(2 * HEAD_LIMIT));
        assert!(seen(long.as_bytes(), 1000).is_empty());
    }
}
