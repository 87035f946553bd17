//! Simulated workers behind a door that breaks answers byte by byte.
//!
//! What to break stands in the request's header [`FAULT`], which a gateway passes on: so faults of many requests at a time do
//! not get in each other's way. `once KIND` breaks the first attempt of a request id wherever it comes in, `always KIND` all.

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;
use turnstile_sim::{SimConfig, SimWorker};

/// The header that says what to break.
pub const FAULT: &str = "x-test-fault";
/// So many connects in a row get nothing before a queue counts as full: on a busy machine a single one may only be late.
const UNANSWERED: usize = 3;

/// A way to break an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Break {
    /// RST instead of an answer.
    ResetBefore,
    /// FIN instead of an answer.
    CloseBefore,
    /// FIN instead of an answer, with the other direction left open.
    HalfCloseBefore,
    /// Nothing comes.
    StallBefore,
    /// RST after the head.
    ResetAfterHead,
    /// FIN after the head.
    CloseAfterHead,
    /// Nothing comes after the head.
    StallAfterHead,
    /// RST in the middle of the body.
    ResetMidway,
    /// FIN in the middle of the body.
    CutMidway,
    /// Nothing comes after the middle of the body.
    StallMidway,
    /// This status, with SGLang's flat error.
    Status(u16),
    /// 200 and a stream whose first event is an error with this code; for a whole answer the status.
    ErrorEvent(u16),
    /// No HTTP.
    Garbage,
    /// A length longer than the body, and FIN.
    LengthTooLong,
    /// A length shorter than the body.
    LengthTooShort,
    /// A chunk size that is no number.
    BadChunk,
    /// A head of two megabytes.
    HugeHead,
    /// 100 and 103 before the answer.
    Informational,
    /// 103 for ever.
    EndlessInformational,
    /// 302 to somewhere.
    Redirect,
    /// 101.
    Switching,
    /// FIN when the request comes on a connection that was used before.
    CloseReused,
}

/// A simulated worker behind its door. Dropped, both end.
pub struct Faulty {
    addr: SocketAddr,
    /// The worker.
    pub sim: SimWorker,
    shared: Arc<Shared>,
    listener: Option<Arc<TcpListener>>,
    /// Bound while nobody listens, so that no other process gets the port.
    held: Option<TcpSocket>,
    door: JoinSet<()>,
}

struct Shared {
    worker: Mutex<SocketAddr>,
    number: usize,
    /// The door where each request came in first, and whether its answer was broken there.
    broken: Arc<Mutex<HashMap<String, (usize, bool)>>>,
    /// Requests whose clients have the beginning of their answers.
    begun: Arc<Mutex<HashSet<String>>>,
}

// === impl Faulty ===

impl Faulty {
    /// Starts so many.
    pub async fn start(count: usize, config: &SimConfig) -> Vec<Self> {
        let (broken, begun) = (Arc::default(), Arc::default());
        let mut all = Vec::new();
        for number in 0..count {
            let sim = SimWorker::start("127.0.0.1:0", config.clone()).await.unwrap();
            let (broken, begun) = (Arc::clone(&broken), Arc::clone(&begun));
            let shared = Arc::new(Shared { worker: Mutex::new(sim.addr()), number, broken, begun });
            let addr = "127.0.0.1:0".parse().unwrap();
            let mut worker = Self { addr, sim, shared, listener: None, held: None, door: JoinSet::new() };
            worker.accept().await;
            all.push(worker);
        }
        all
    }

    /// `http://host:port`.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// `host:port`, which is its id in a gateway.
    pub fn id(&self) -> String {
        self.addr.to_string()
    }

    /// Takes connections, at the same port as before.
    pub async fn accept(&mut self) {
        let listener = Arc::new(self.listen(1024));
        self.addr = listener.local_addr().unwrap();
        self.listener = Some(Arc::clone(&listener));
        let shared = Arc::clone(&self.shared);
        self.door.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, Arc::clone(&shared)));
            }
        });
    }

    fn listen(&mut self, queue: u32) -> TcpListener {
        self.held.take().unwrap_or_else(|| bound(self.addr)).listen(queue).unwrap()
    }

    /// Cuts all connections; new ones are refused.
    pub async fn refuse(&mut self) {
        self.door.shutdown().await;
        // The listener has to go before its address can be bound again.
        self.listener = None;
        self.held.get_or_insert_with(|| bound(self.addr));
    }

    /// Cuts all connections; new ones are neither accepted nor refused, so that connecting takes for ever.
    pub async fn ignore(&mut self) {
        self.refuse().await;
        self.listener = Some(Arc::new(self.listen(1)));
        let addr = self.addr;
        // Fills the queue of connections to be accepted: what comes then is dropped by the system.
        let mut unanswered = 0;
        while unanswered < UNANSWERED {
            let filled = tokio::time::timeout(std::time::Duration::from_millis(300), TcpStream::connect(addr)).await;
            match filled {
                Ok(connection) => {
                    unanswered = 0;
                    let connection = connection.unwrap();
                    self.door.spawn(async move {
                        let _held = connection;
                        std::future::pending::<()>().await;
                    });
                }
                Err(_) => unanswered += 1,
            }
        }
    }

    /// The client of this request has the beginning of its answer: now it may break off midway.
    pub fn begun(&self, request_id: &str) {
        self.shared.begun.lock().insert(request_id.to_owned());
    }

    /// Puts a new process in the place of the worker: what it held is gone.
    pub async fn restart(&mut self) {
        let config = self.sim.config().clone();
        self.sim = SimWorker::start("127.0.0.1:0", config).await.unwrap();
        *self.shared.worker.lock() = self.sim.addr();
    }
}

/// A socket that has an address and does not listen.
fn bound(addr: SocketAddr) -> TcpSocket {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind(addr).unwrap();
    socket
}

// === the door ===

/// A request as it came.
struct Asked {
    head: String,
    bytes: Bytes,
}

impl Asked {
    fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (known, value) = line.split_once(':')?;
            known.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }

    /// What to break. `once` breaks at the door where the request came in first, and there only. On a connection that was used
    /// before (`reused`) a break before the head may be taken for a stale connection, so it is not yet the one asked for.
    fn fault(&self, shared: &Shared, reused: bool) -> Option<Break> {
        let (when, kind) = self.header(FAULT)?.split_once(' ')?;
        let kind = Break::ALL.iter().find(|(_, name)| *name == kind).unwrap_or_else(|| panic!("no fault {kind}")).0;
        let mut broken = shared.broken.lock();
        let (door, done) = broken.entry(self.id().to_owned()).or_insert((shared.number, false));
        let breaks = *door == shared.number && !*done;
        let before = matches!(kind, Break::ResetBefore | Break::CloseBefore | Break::HalfCloseBefore);
        *done |= breaks && !(reused && before);
        (when == "always" || breaks).then_some(kind)
    }

    fn id(&self) -> &str {
        self.header("x-request-id").unwrap_or_default()
    }
}

async fn serve(mut stream: TcpStream, shared: Arc<Shared>) {
    let mut buffer = BytesMut::new();
    for request in 0.. {
        let Some(asked) = read_request(&mut stream, &mut buffer).await else { return };
        match asked.fault(&shared, request > 0) {
            None => {
                let answer = ask(&shared, &asked).await;
                if answer.is_empty() || stream.write_all(&answer).await.is_err() {
                    return;
                }
            }
            Some(Break::CloseReused) => {
                if request > 0 {
                    return;
                }
                let answer = ask(&shared, &asked).await;
                if stream.write_all(&answer).await.is_err() {
                    return;
                }
            }
            Some(kind) => return break_answer(stream, kind, &asked, &shared).await,
        }
    }
}

async fn read_request(stream: &mut TcpStream, buffer: &mut BytesMut) -> Option<Asked> {
    let end = loop {
        if let Some(at) = buffer.windows(4).position(|w| w == b"\r\n\r\n") {
            break at + 4;
        }
        if stream.read_buf(buffer).await.unwrap_or(0) == 0 {
            return None;
        }
    };
    let head = String::from_utf8_lossy(buffer.get(..end)?).into_owned();
    let asked = Asked { head, bytes: Bytes::new() };
    let length: usize = asked.header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    while buffer.len() < end + length {
        if stream.read_buf(buffer).await.unwrap_or(0) == 0 {
            return None;
        }
    }
    Some(Asked { bytes: buffer.split_to(end + length).freeze(), ..asked })
}

/// The worker's whole answer, on a connection of its own, as if that stayed open.
async fn ask(shared: &Shared, asked: &Asked) -> Vec<u8> {
    let worker = *shared.worker.lock();
    let Ok(mut stream) = TcpStream::connect(worker).await else { return Vec::new() };
    let line = asked.head.find("\r\n").unwrap() + 2;
    let (first, rest) = asked.bytes.split_at(line);
    let request = [first, b"connection: close\r\n", rest].concat();
    let mut answer = Vec::new();
    if stream.write_all(&request).await.is_err() || stream.read_to_end(&mut answer).await.is_err() {
        return Vec::new();
    }
    let end = head_end(&answer);
    let head = String::from_utf8_lossy(answer.get(..end).unwrap_or_default()).replace("connection: close\r\n", "");
    [head.as_bytes(), answer.get(end..).unwrap_or_default()].concat()
}

fn head_end(answer: &[u8]) -> usize {
    answer.windows(4).position(|w| w == b"\r\n\r\n").map_or(0, |at| at + 4)
}

/// The body without its chunks.
fn plain_body(answer: &[u8]) -> Vec<u8> {
    let end = head_end(answer);
    let (head, mut rest) = answer.split_at(end);
    if !String::from_utf8_lossy(head).to_ascii_lowercase().contains("transfer-encoding: chunked") {
        return rest.to_vec();
    }
    let mut body = Vec::new();
    while let Some(line) = rest.windows(2).position(|w| w == b"\r\n") {
        let size = std::str::from_utf8(rest.get(..line).unwrap()).unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        body.extend_from_slice(rest.get(line + 2..line + 2 + size).unwrap());
        rest = rest.get(line + 4 + size..).unwrap();
        if size == 0 {
            break;
        }
    }
    body
}

async fn break_answer(mut stream: TcpStream, kind: Break, asked: &Asked, shared: &Shared) {
    let streams = asked.bytes.windows(13).any(|w| w == b"\"stream\":true");
    let content_type = if streams { "text/event-stream; charset=utf-8" } else { "application/json" };
    let head = |framing: &str| format!("HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\n{framing}\r\n\r\n");
    let flat = |code: u16| {
        format!(
            "{{\"object\":\"error\",\"message\":\"The request queue is full.\",\"type\":\"{code}\",\"param\":null,\"code\":{code}}}"
        )
    };
    let whole = |status: &str, body: &str| {
        format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len())
    };
    match kind {
        Break::ResetBefore => reset(stream),
        Break::CloseBefore => {}
        Break::HalfCloseBefore => {
            let _ = stream.shutdown().await;
            until_closed(stream).await;
        }
        Break::StallBefore => until_closed(stream).await,
        Break::ResetAfterHead | Break::CloseAfterHead | Break::StallAfterHead => {
            send(&mut stream, head("transfer-encoding: chunked").as_bytes()).await;
            end_like(stream, kind).await;
        }
        Break::ResetMidway | Break::CutMidway | Break::StallMidway => {
            let answer = ask(shared, asked).await;
            let body = plain_body(&answer);
            let half = body.get(..body.len() / 2).unwrap();
            let text = format!("{}{:x}\r\n", head("transfer-encoding: chunked"), half.len());
            send(&mut stream, &[text.as_bytes(), half, b"\r\n"].concat()).await;
            until_begun(streams, asked, shared).await;
            end_like(stream, kind).await;
        }
        Break::Status(code) => send(&mut stream, whole(&format!("{code} Broken"), &flat(code)).as_bytes()).await,
        Break::ErrorEvent(code) if !streams => {
            send(&mut stream, whole(&format!("{code} Broken"), &flat(code)).as_bytes()).await;
        }
        Break::ErrorEvent(code) => {
            let events = format!("data: {{\"error\":{}}}\n\ndata: [DONE]\n\n", flat(code));
            send(&mut stream, format!("{}{events}", head(&format!("content-length: {}", events.len()))).as_bytes())
                .await;
        }
        Break::Garbage => send(&mut stream, b"\x16\x03\x01 no such protocol \x00\xff\r\n\r\n").await,
        Break::LengthTooLong => {
            let body = plain_body(&ask(shared, asked).await);
            let text = head(&format!("content-length: {}", body.len() + 100));
            send(&mut stream, &[text.as_bytes(), &body].concat()).await;
            until_begun(streams, asked, shared).await;
        }
        Break::LengthTooShort => {
            let body = plain_body(&ask(shared, asked).await);
            let (begin, end) = body.split_at(body.len() / 2);
            let text = head(&format!("content-length: {}", body.len() - 5));
            send(&mut stream, &[text.as_bytes(), begin].concat()).await;
            until_begun(streams, asked, shared).await;
            send(&mut stream, end).await;
            until_closed(stream).await;
        }
        Break::BadChunk => {
            let body = plain_body(&ask(shared, asked).await);
            let half = body.get(..body.len() / 2).unwrap();
            let text = format!("{}{:x}\r\n", head("transfer-encoding: chunked"), half.len());
            send(&mut stream, &[text.as_bytes(), half, b"\r\n"].concat()).await;
            until_begun(streams, asked, shared).await;
            send(&mut stream, b"no size\r\n").await;
            until_closed(stream).await;
        }
        Break::HugeHead => {
            let line = format!("x-filler: {}\r\n", "f".repeat(2000));
            send(&mut stream, format!("HTTP/1.1 200 OK\r\n{}\r\n", line.repeat(1100)).as_bytes()).await;
            until_closed(stream).await;
        }
        Break::Informational => {
            let answer = ask(shared, asked).await;
            let before = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n";
            send(&mut stream, &[before, answer.as_slice()].concat()).await;
        }
        Break::EndlessInformational => {
            let mut every = tokio::time::interval(std::time::Duration::from_millis(20));
            while stream.write_all(b"HTTP/1.1 103 Early Hints\r\n\r\n").await.is_ok() {
                every.tick().await;
            }
        }
        Break::Redirect => {
            let text = "HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:9/\r\ncontent-length: 0\r\n\r\n";
            send(&mut stream, text.as_bytes()).await;
        }
        Break::Switching => {
            let text = "HTTP/1.1 101 Switching Protocols\r\nupgrade: echo\r\nconnection: upgrade\r\n\r\n";
            send(&mut stream, text.as_bytes()).await;
            until_closed(stream).await;
        }
        Break::CloseReused => unreachable!("handled where connections are counted"),
    }
}

/// Waits until the client has the beginning of a stream. A whole answer has no beginning: it is held until its end.
async fn until_begun(streams: bool, asked: &Asked, shared: &Shared) {
    while streams && !shared.begun.lock().contains(asked.id()) {
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
}

async fn end_like(stream: TcpStream, kind: Break) {
    match kind {
        Break::ResetAfterHead | Break::ResetMidway => reset(stream),
        Break::StallAfterHead | Break::StallMidway => until_closed(stream).await,
        _ => {}
    }
}

async fn send(stream: &mut TcpStream, bytes: &[u8]) {
    // The gateway may have seen enough and closed.
    let _ = stream.write_all(bytes).await;
}

async fn until_closed(mut stream: TcpStream) {
    let mut rest = [0; 1024];
    while stream.read(&mut rest).await.unwrap_or(0) > 0 {}
}

fn reset(stream: TcpStream) {
    // With no time to linger, a close is a reset.
    stream.set_zero_linger().unwrap();
}

// === impl Break ===

impl Break {
    /// Every way, with its name in the header and in the table.
    pub const ALL: [(Self, &str); 27] = [
        (Self::ResetBefore, "reset before the head"),
        (Self::CloseBefore, "closed before the head"),
        (Self::HalfCloseBefore, "half-closed before the head"),
        (Self::StallBefore, "stalled before the head"),
        (Self::ResetAfterHead, "reset after the head"),
        (Self::CloseAfterHead, "closed after the head"),
        (Self::StallAfterHead, "stalled after the head"),
        (Self::ResetMidway, "reset midway"),
        (Self::CutMidway, "closed midway"),
        (Self::StallMidway, "stalled midway"),
        (Self::Status(400), "status 400"),
        (Self::Status(429), "status 429"),
        (Self::Status(500), "status 500"),
        (Self::Status(502), "status 502"),
        (Self::Status(503), "status 503 (queue full)"),
        (Self::ErrorEvent(500), "error event 500"),
        (Self::ErrorEvent(503), "error event 503 (queue full)"),
        (Self::Garbage, "no HTTP"),
        (Self::LengthTooLong, "length too long"),
        (Self::LengthTooShort, "length too short"),
        (Self::BadChunk, "bad chunk"),
        (Self::HugeHead, "head of 2 MB"),
        (Self::Informational, "100 and 103 first"),
        (Self::EndlessInformational, "103 for ever"),
        (Self::Redirect, "status 302"),
        (Self::Switching, "status 101"),
        (Self::CloseReused, "pooled connection closed"),
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(kind, _)| *kind == self).map(|(_, name)| *name).expect("every way is listed")
    }
}
