//! A client's connection: the socket with a write buffer, and what holds below HTTP: where a request ends, how long and how
//! large its head may be, how long a client may take nothing, and whether it is still there.
//!
//! The HTTP/1 parser above limits each read, not the head as a whole; it reads on into the next request, takes more for a
//! chunk than the grammar does, and sees a client leave only when it has read all that came before. All of that is known here,
//! where every byte passes.

mod delegation;
mod last_chunk;

use crate::chunked::Chunks;
use bytes::{Buf, BufMut as _, Bytes, BytesMut};
use http::HeaderMap;
use parking_lot::Mutex;
use pingora_core::protocols::SocketDigest;
use pingora_core::protocols::http::ServerSession;
use pingora_core::protocols::http::v1::server::HttpSession;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, BufWriter, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep, sleep_until};

/// Room for a head and a small body, or for a piece of a stream. An idle connection holds it, so it is not larger.
const WRITE_BUFFER: usize = 4096;

/// What the kernel takes of an answer beyond what the client's own window lets it send. Without a limit it takes megabytes from
/// a worker for a client that reads none of it.
#[cfg(any(target_os = "linux", target_os = "android"))]
const UNSENT: u32 = 128 * 1024;

/// The number of the next connection.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

/// Holds where no configuration says otherwise: on the admin listener.
const DEFAULT_PATIENCE: Duration = Duration::from_secs(60);

/// What a client may do.
#[derive(Debug, Clone, Copy)]
pub struct ClientLimits {
    /// Bytes of a request head on the wire, request line included.
    pub head_bytes: usize,
    /// From the first byte of a head to its last.
    pub head_time: Duration,
    /// Until the first byte of a head.
    pub idle: Duration,
    /// How long it may take nothing of what is written.
    pub patience: Duration,
}

/// Why reading was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadFault {
    /// The head is larger than [`ClientLimits::head_bytes`].
    HeadTooLarge,
    /// The head began, but took longer than [`ClientLimits::head_time`].
    HeadTooSlow,
    /// Nothing came within [`ClientLimits::idle`].
    Idle,
    /// The body breaks its chunks.
    BadChunk,
}

/// A connection. Reads go straight to the socket, as the readers above have buffers of their own.
#[derive(Debug)]
pub struct ClientStream {
    inner: BufWriter<Socket>,
    digest: Arc<SocketDigest>,
    number: u64,
}

#[derive(Debug)]
struct Socket {
    tcp: TcpStream,
    watch: Mutex<Watch>,
    /// Runs while the client takes nothing.
    stalled: Option<Pin<Box<Sleep>>>,
}

#[derive(Debug)]
struct Watch {
    /// Taken from the socket already, to be read next: what stood behind the part of a request that was read.
    ahead: BytesMut,
    patience: Duration,
    reading: Reading,
    /// Heads are read one by one, so no byte behind a head has been given to the reader above.
    by_head: bool,
    fault: Option<ReadFault>,
    /// Bytes of a body that [`ClientStream::read_body`] has yet to read.
    body_left: usize,
    /// What is left to write of the last chunk of an answer that has trailers.
    last_chunk: Bytes,
    /// Kept from head to head.
    timer: Option<Pin<Box<Sleep>>>,
}

/// What is being read.
#[derive(Debug, Clone)]
enum Reading {
    /// Anything, to any length.
    Free,
    Head(Head),
    Chunked(Chunks),
}

/// The head that is being read.
#[derive(Debug, Clone, Copy)]
struct Head {
    left: usize,
    begun: bool,
    deadline: Instant,
    time: Duration,
    /// What was read last.
    last: [u8; 3],
}

/// The number of a request's connection; 0 if it has none.
pub fn connection_number(session: &ServerSession) -> u64 {
    match session {
        ServerSession::H1(session) => ClientStream::of(session).map_or(0, ClientStream::number),
        session => session.req_header().extensions.get::<ConnectionNumber>().map_or(0, |number| number.0),
    }
}

/// The number of the connection of a request over HTTP/2, in the extensions of its head.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionNumber(pub u64);

// === impl ClientStream ===

impl ClientStream {
    /// A new connection from `peer`, without limits until [`Self::read_head`] sets them.
    pub fn new(tcp: TcpStream, peer: SocketAddr) -> Self {
        // A system without the option keeps its own bounds.
        #[cfg(any(target_os = "linux", target_os = "android"))]
        let _ = socket2::SockRef::from(&tcp).set_tcp_notsent_lowat(UNSENT);
        let digest = SocketDigest::from_raw_fd(tcp.as_raw_fd());
        let _ = digest.peer_addr.set(Some(peer.into()));
        let watch = Watch {
            ahead: BytesMut::new(),
            patience: DEFAULT_PATIENCE,
            reading: Reading::Free,
            by_head: false,
            fault: None,
            body_left: 0,
            last_chunk: Bytes::new(),
            timer: None,
        };
        let socket = Socket { tcp, watch: Mutex::new(watch), stalled: None };
        Self {
            inner: BufWriter::with_capacity(WRITE_BUFFER, socket),
            digest: Arc::new(digest),
            number: NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// The connection under an HTTP/1 session.
    pub fn of(session: &HttpSession) -> Option<&Self> {
        (**session.stream()).as_any().downcast_ref()
    }

    /// Its number among all connections of clients, from 1.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// From now on a request head is read, and no byte behind it.
    pub fn read_head(&self, limits: ClientLimits) {
        let mut watch = self.inner.get_ref().watch.lock();
        let begun = !watch.ahead.is_empty();
        let wait = if begun { limits.head_time } else { limits.idle };
        let (deadline, time) = (Instant::now() + wait, limits.head_time);
        watch.reading = Reading::Head(Head { left: limits.head_bytes, begun, deadline, time, last: [0; 3] });
        watch.by_head = true;
        watch.patience = limits.patience;
        watch.fault = None;
        watch.last_chunk = Bytes::new();
    }

    /// Resolves when there is something to read of the next head.
    ///
    /// # Errors
    /// The connection broke, or nothing came within [`ClientLimits::idle`].
    pub async fn head_begins(&self) -> io::Result<()> {
        let socket = self.inner.get_ref();
        poll_fn(|cx| socket.poll_begun(cx)).await
    }

    /// From now on a chunked body is read, and no byte behind it.
    pub fn read_chunked(&self) {
        self.inner.get_ref().watch.lock().reading = Reading::Chunked(Chunks::default());
    }

    /// The trailers of a chunked body that was read to its end.
    pub fn trailers(&self) -> HeaderMap {
        match &self.inner.get_ref().watch.lock().reading {
            Reading::Chunked(chunks) => chunks.trailers(),
            Reading::Free | Reading::Head(_) => HeaderMap::new(),
        }
    }

    /// From now on anything is read.
    pub fn read_freely(&self) {
        self.inner.get_ref().watch.lock().reading = Reading::Free;
    }

    /// Whether a body can be read by [`Self::read_body`]: the reader above has none of it yet, since heads are read by
    /// [`Self::read_head`] here.
    pub fn can_read_body(&self) -> bool {
        self.inner.get_ref().watch.lock().by_head
    }

    /// From now on a body of so many bytes is read, by [`Self::read_body`] alone: without the buffers and copies of the reader
    /// above.
    pub fn expect_body(&self, length: usize) {
        let mut watch = self.inner.get_ref().watch.lock();
        watch.reading = Reading::Free;
        watch.body_left = length;
    }

    /// Whether some of the body that was told by [`Self::expect_body`] has not been read.
    pub fn owes_body(&self) -> bool {
        self.inner.get_ref().watch.lock().body_left > 0
    }

    /// Appends what there is of the body, but nothing that stands behind it and not more than there is room for in `into`.
    /// Returns how much that was: nothing at the end of the body, or without room. Dropping the future loses nothing.
    ///
    /// # Errors
    /// When the connection ends first.
    pub async fn read_body(&self, into: &mut BytesMut) -> io::Result<usize> {
        let socket = self.inner.get_ref();
        let most = {
            let mut watch = socket.watch.lock();
            let most = watch.body_left.min(into.capacity() - into.len());
            let here = most.min(watch.ahead.len());
            if here > 0 {
                into.extend_from_slice(watch.ahead.get(..here).unwrap_or_default());
                watch.take_ahead(here);
                watch.body_left -= here;
                return Ok(here);
            }
            most
        };
        if most == 0 {
            return Ok(0);
        }
        // A client that is as fast as this loop leaves room for others.
        tokio::task::consume_budget().await;
        loop {
            match socket.tcp.try_read_buf(&mut (&mut *into).limit(most)) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => {
                    socket.watch.lock().body_left -= read;
                    return Ok(read);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => socket.tcp.readable().await?,
                Err(error) => return Err(error),
            }
        }
    }

    /// Why reading failed, when that was not for the connection.
    pub fn fault(&self) -> Option<ReadFault> {
        self.inner.get_ref().watch.lock().fault
    }

    /// True when the connection opens with these bytes. They stay to be read.
    ///
    /// # Errors
    /// When the connection ends or a limit of the head is met first.
    pub async fn opens_with(&mut self, preface: &[u8]) -> io::Result<bool> {
        let socket = self.inner.get_mut();
        let mut piece = [0u8; 32];
        loop {
            let ahead = &socket.watch.get_mut().ahead;
            if !preface.starts_with(ahead) {
                return Ok(false);
            }
            let missing = preface.len() - ahead.len();
            if missing == 0 {
                return Ok(true);
            }
            let room = missing.min(piece.len());
            let mut buf = ReadBuf::new(piece.get_mut(..room).unwrap_or_default());
            poll_fn(|cx| socket.poll_socket(cx, &mut buf)).await?;
            if buf.filled().is_empty() {
                return Ok(false);
            }
            socket.watch.get_mut().ahead.extend_from_slice(buf.filled());
        }
    }

    /// Resolves when the client has closed its side, however much it sent before that is still unread.
    ///
    /// A client that has only closed its writing side looks the same and counts as gone, as it does for nginx, Envoy and
    /// SGLang's own server.
    pub async fn closed(&self) {
        let tcp = &self.inner.get_ref().tcp;
        // The end of the client's bytes is an event of its own, which a wait for urgent data includes and unread bytes do not
        // hide. An error means that the connection is no more.
        #[cfg(any(target_os = "linux", target_os = "android"))]
        while tcp.ready(Interest::PRIORITY).await.is_ok_and(|ready| !ready.is_read_closed()) {}
        // Elsewhere unread bytes make the wait return at once, so it is repeated.
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        while tcp.ready(Interest::READABLE).await.is_ok_and(|ready| !ready.is_read_closed()) {
            sleep(Duration::from_millis(100)).await;
        }
    }

    /// True when bytes of the client wait to be read.
    pub fn has_unread(&self) -> bool {
        let socket = self.inner.get_ref();
        !socket.watch.lock().ahead.is_empty() || socket.tcp.try_read(&mut [0]).is_ok_and(|read| read > 0)
    }

    /// Makes the end of the connection an error for the client: what it has got is not all.
    pub fn reset_on_drop(&self) {
        let _ = self.inner.get_ref().tcp.set_zero_linger();
    }
}

// === impl Socket ===

impl Socket {
    /// Reads what has been taken already, else from the socket; not beyond the part of a request that is being read.
    fn poll_part(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.watch.get_mut().ahead.is_empty() {
            let before = buf.filled().len();
            ready!(self.poll_socket(cx, buf))?;
            let read = buf.filled().get(before..).unwrap_or_default();
            let watch = self.watch.get_mut();
            let part = watch.part_of(read)?;
            watch.ahead.extend_from_slice(read.get(part..).unwrap_or_default());
            buf.set_filled(before + part);
            return Poll::Ready(Ok(()));
        }
        let watch = self.watch.get_mut();
        let size = watch.ahead.len().min(buf.remaining());
        // Taken out so that the part can be looked for in it.
        let ahead = std::mem::take(&mut watch.ahead);
        let part = watch.part_of(ahead.get(..size).unwrap_or_default());
        watch.ahead = ahead;
        let part = part?;
        buf.put_slice(watch.ahead.get(..part).unwrap_or_default());
        watch.take_ahead(part);
        Poll::Ready(Ok(()))
    }

    /// Reads from the socket, within the limits of the head that is being read.
    fn poll_socket(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let watch = self.watch.get_mut();
        let Reading::Head(head) = &mut watch.reading else { return Pin::new(&mut self.tcp).poll_read(cx, buf) };
        if head.left == 0 {
            watch.fault = Some(ReadFault::HeadTooLarge);
            return Poll::Ready(Err(io::ErrorKind::InvalidData.into()));
        }
        let before = buf.filled().len();
        if Pin::new(&mut self.tcp).poll_read(cx, buf)?.is_ready() {
            if buf.filled().len() > before && !head.begun {
                head.begun = true;
                head.deadline = Instant::now() + head.time;
            }
            return Poll::Ready(Ok(()));
        }
        watch.poll_deadline(cx)
    }

    /// Whether something of the next head is there, within the limits of the head that is being read.
    fn poll_begun(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut watch = self.watch.lock();
        if !watch.ahead.is_empty() {
            return Poll::Ready(Ok(()));
        }
        match self.tcp.poll_read_ready(cx) {
            Poll::Pending => watch.poll_deadline(cx),
            ready => ready,
        }
    }

    /// Gives up on a client that takes nothing.
    fn patient<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let patience = self.watch.get_mut().patience;
        let timer = self.stalled.get_or_insert_with(|| Box::pin(sleep(patience)));
        ready!(timer.as_mut().poll(cx));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

// === impl Watch ===

impl Watch {
    /// An error once the time for the head is over.
    fn poll_deadline(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Reading::Head(head) = &self.reading else { return Poll::Pending };
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep_until(head.deadline)));
        if timer.deadline() != head.deadline {
            timer.as_mut().reset(head.deadline);
        }
        ready!(timer.as_mut().poll(cx));
        self.fault = Some(if head.begun { ReadFault::HeadTooSlow } else { ReadFault::Idle });
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }

    /// So much of what was taken ahead has been read.
    fn take_ahead(&mut self, bytes: usize) {
        self.ahead.advance(bytes);
        if self.ahead.is_empty() {
            // An idle connection holds no buffer.
            self.ahead = BytesMut::new();
        }
    }

    /// How many of these bytes belong to what is being read.
    fn part_of(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.reading {
            Reading::Free => Ok(bytes.len()),
            Reading::Head(head) => {
                let part = head.part_of(bytes);
                head.left = head.left.saturating_sub(part);
                Ok(part)
            }
            Reading::Chunked(chunks) => chunks.follow(bytes).map_err(|_| {
                self.fault = Some(ReadFault::BadChunk);
                io::ErrorKind::InvalidData.into()
            }),
        }
    }
}

impl Head {
    /// The bytes up to an empty line. Should the head not end with it, as when one stands before the head, it is read on.
    fn part_of(&mut self, bytes: &[u8]) -> usize {
        let last = self.last;
        // The byte so far before a place; the first ones stand in what was read before.
        let before = |at: usize, back: usize| match at.checked_sub(back) {
            Some(at) => bytes.get(at).copied(),
            None => (last.len() + at).checked_sub(back).and_then(|at| last.get(at).copied()),
        };
        let ends = |at: &usize| [1, 2, 3].map(|back| before(*at, back)) == [Some(b'\r'), Some(b'\n'), Some(b'\r')];
        let part = memchr::memchr_iter(b'\n', bytes).find(ends).map_or(bytes.len(), |at| at + 1);
        self.last = [3, 2, 1].map(|back| before(part, back).unwrap_or_default());
        part
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.poll_part(cx, buf)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.tcp).poll_write(cx, buf);
        self.patient(cx, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.tcp).poll_flush(cx);
        self.patient(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.tcp).poll_write_vectored(cx, bufs);
        self.patient(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.tcp.is_write_vectored()
    }
}

#[cfg(test)]
#[path = "client_stream_tests.rs"]
mod tests;
