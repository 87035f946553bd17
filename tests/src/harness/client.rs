//! An HTTP/1.1 client that shows what is on the wire: each chunk by itself, headers in order, broken answers as such.

use super::wait::DEADLINE;
use bytes::{Buf, Bytes, BytesMut};
use serde_json::Value;
use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use turnstile_fleet::route::Route;

/// A request to be written.
#[derive(Clone, Debug)]
pub struct Request {
    method: String,
    target: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    piece: Option<usize>,
}

/// Status line and headers of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// Status.
    pub status: u16,
    /// Headers in their order, names in lower case.
    pub headers: Vec<(String, String)>,
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Status.
    pub status: u16,
    /// Headers in their order, names in lower case.
    pub headers: Vec<(String, String)>,
    /// The body, framing removed.
    pub body: Bytes,
    /// Trailers in their order, names in lower case.
    pub trailers: Vec<(String, String)>,
    /// The body came to its proper end.
    pub complete: bool,
}

/// A connection, on which requests follow each other.
pub struct Connection {
    stream: TcpStream,
    buffer: BytesMut,
    body: Body,
    trailers: Vec<(String, String)>,
}

/// What is left of the answer being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Body {
    Length(usize),
    Chunked,
    ToEnd,
    Done,
    Broken,
}

/// Sends one request on a connection of its own.
pub async fn send(addr: SocketAddr, request: &Request) -> Answer {
    let mut connection = Connection::open(addr).await;
    connection.send(request).await;
    connection.answer().await
}

// === impl Request ===

impl Request {
    /// A request without a body.
    pub fn new(method: &str, target: &str) -> Self {
        Self { method: method.into(), target: target.into(), headers: Vec::new(), body: Vec::new(), piece: None }
    }

    /// A GET.
    pub fn get(target: &str) -> Self {
        Self::new("GET", target)
    }

    /// A POST of JSON text, byte for byte.
    pub fn post(target: &str, body: impl Into<Vec<u8>>) -> Self {
        let request = Self::new("POST", target).header("content-type", "application/json");
        Self { body: body.into(), ..request }
    }

    /// A POST of a JSON value.
    pub fn json(target: &str, body: &Value) -> Self {
        Self::post(target, body.to_string())
    }

    /// Gives it a body.
    #[must_use]
    pub fn with_body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        self
    }

    /// Adds a header.
    #[must_use]
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Sends the body in chunks of so many bytes instead of with a length.
    #[must_use]
    pub fn chunked(mut self, piece: usize) -> Self {
        self.piece = Some(piece);
        self
    }

    /// It is for an inference route: the gateway writes of it in its access log.
    pub(super) fn is_inference(&self) -> bool {
        let path = self.target.split('?').next().unwrap_or_default();
        self.method != "OPTIONS" && Route::from_path(path).is_some()
    }

    /// The head as it is written.
    pub fn head(&self) -> Vec<u8> {
        let mut head = format!("{} {} HTTP/1.1\r\nhost: gateway\r\n", self.method, self.target);
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        match self.piece {
            Some(_) => head.push_str("transfer-encoding: chunked\r\n"),
            None if !self.body.is_empty() => head.push_str(&format!("content-length: {}\r\n", self.body.len())),
            None => {}
        }
        head.push_str("\r\n");
        head.into_bytes()
    }

    /// The body as it is written.
    pub fn framed_body(&self) -> Vec<u8> {
        let Some(piece) = self.piece else { return self.body.clone() };
        let mut framed = Vec::with_capacity(self.body.len() + 64);
        for chunk in self.body.chunks(piece) {
            framed.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
            framed.extend_from_slice(chunk);
            framed.extend_from_slice(b"\r\n");
        }
        framed.extend_from_slice(b"0\r\n\r\n");
        framed
    }
}

// === impl Connection ===

impl Connection {
    /// Connects.
    pub async fn open(addr: SocketAddr) -> Self {
        let stream = TcpStream::connect(addr).await.expect("the listener accepts");
        stream.set_nodelay(true).unwrap();
        Self { stream, buffer: BytesMut::new(), body: Body::Done, trailers: Vec::new() }
    }

    /// Writes a request. A peer that has closed already is no error: it may have answered before.
    pub async fn send(&mut self, request: &Request) {
        self.write(&request.head()).await;
        self.write(&request.framed_body()).await;
    }

    /// Writes a request, all of which the peer has to take.
    pub async fn send_whole(&mut self, request: &Request) {
        for bytes in [request.head(), request.framed_body()] {
            let written = tokio::time::timeout(DEADLINE, self.stream.write_all(&bytes)).await.expect("the peer reads");
            written.expect("the peer takes all of it");
        }
    }

    /// Writes bytes as they are; a closed peer is no error.
    pub async fn write(&mut self, bytes: &[u8]) {
        let _ = tokio::time::timeout(DEADLINE, self.stream.write_all(bytes)).await.expect("the peer reads");
    }

    /// The next head, informational ones included.
    pub async fn head(&mut self) -> Head {
        self.try_head().await.expect("an answer before the end of the connection")
    }

    /// The next head; none when the connection ends before one.
    pub async fn try_head(&mut self) -> Option<Head> {
        let end = loop {
            if let Some(at) = self.buffer.windows(4).position(|w| w == b"\r\n\r\n") {
                break at;
            }
            if !self.fill().await {
                assert!(self.buffer.is_empty(), "half a head: {:?}", self.buffer);
                return None;
            }
        };
        let text = String::from_utf8(self.buffer.split_to(end).to_vec()).unwrap();
        self.buffer.advance(4);
        let mut lines = text.split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers: Vec<(String, String)> = lines.map(field).collect();
        self.trailers.clear();
        let head = Head { status, headers };
        self.body = match (head.header("transfer-encoding"), head.header("content-length")) {
            (Some("chunked"), None) => Body::Chunked,
            (None, Some(length)) => Body::Length(length.parse().unwrap()),
            (None, None) if status < 200 || matches!(status, 204 | 304) => Body::Done,
            (None, None) => Body::ToEnd,
            both => panic!("framing {both:?}"),
        };
        Some(head)
    }

    /// The next piece of the body: one chunk, or what has arrived of a body with a length. None at its end.
    pub async fn piece(&mut self) -> Option<Bytes> {
        match self.body {
            Body::Done | Body::Broken => None,
            Body::Length(0) => self.end(Body::Done),
            Body::Length(left) => {
                if self.buffer.is_empty() && !self.fill().await {
                    return self.end(Body::Broken);
                }
                let size = self.buffer.len().min(left);
                self.body = Body::Length(left - size);
                Some(self.buffer.split_to(size).freeze())
            }
            Body::ToEnd => {
                if self.buffer.is_empty() && !self.fill().await {
                    return self.end(Body::Done);
                }
                Some(self.buffer.split().freeze())
            }
            Body::Chunked => self.chunk().await,
        }
    }

    /// Where the next line ends; nothing if it does not.
    async fn line(&mut self) -> Option<usize> {
        loop {
            match self.buffer.windows(2).position(|w| w == b"\r\n") {
                Some(at) => return Some(at),
                None if self.fill().await => {}
                None => return None,
            }
        }
    }

    async fn chunk(&mut self) -> Option<Bytes> {
        let Some(line) = self.line().await else { return self.end(Body::Broken) };
        let size = String::from_utf8(self.buffer.get(..line).unwrap().to_vec()).unwrap();
        let size = usize::from_str_radix(&size, 16).unwrap();
        if size == 0 {
            self.buffer.advance(line + 2);
            return self.last_chunk().await;
        }
        let whole = line + 2 + size + 2;
        while self.buffer.len() < whole {
            if !self.fill().await {
                return self.end(Body::Broken);
            }
        }
        self.buffer.advance(line + 2);
        let chunk = self.buffer.split_to(size).freeze();
        self.buffer.advance(2);
        Some(chunk)
    }

    /// Trailers, to the empty line behind them.
    async fn last_chunk(&mut self) -> Option<Bytes> {
        loop {
            let Some(line) = self.line().await else { return self.end(Body::Broken) };
            let text = String::from_utf8(self.buffer.split_to(line).to_vec()).unwrap();
            self.buffer.advance(2);
            if text.is_empty() {
                return self.end(Body::Done);
            }
            self.trailers.push(field(&text));
        }
    }

    /// The trailers of the body that was read to its end.
    pub fn trailers(&self) -> &[(String, String)] {
        &self.trailers
    }

    fn end(&mut self, body: Body) -> Option<Bytes> {
        self.body = body;
        None
    }

    /// The rest of the body, and whether it came to its proper end.
    pub async fn rest(&mut self) -> (Bytes, bool) {
        let mut whole = BytesMut::new();
        while let Some(piece) = self.piece().await {
            whole.extend_from_slice(&piece);
        }
        (whole.freeze(), self.body == Body::Done)
    }

    /// The whole next answer, informational heads skipped.
    pub async fn answer(&mut self) -> Answer {
        let head = loop {
            let head = self.head().await;
            if head.status >= 200 {
                break head;
            }
        };
        let (body, complete) = self.rest().await;
        Answer { status: head.status, headers: head.headers, body, trailers: self.trailers.clone(), complete }
    }

    /// Closes the writing side, and goes on reading.
    pub async fn half_close(&mut self) {
        self.stream.shutdown().await.unwrap();
    }

    /// All bytes up to the end of the connection.
    pub async fn everything(&mut self) -> Bytes {
        while self.fill().await {}
        self.buffer.split().freeze()
    }

    /// Waits until the peer has closed; what it still sends is dropped.
    pub async fn closed(&mut self) {
        while self.fill().await {
            self.buffer.clear();
        }
    }

    /// Reads more. False at the end of the connection, orderly or not.
    async fn fill(&mut self) -> bool {
        let read = tokio::time::timeout(DEADLINE, self.stream.read_buf(&mut self.buffer));
        read.await.expect("bytes within the deadline").unwrap_or(0) > 0
    }
}

// === impl Head, Answer ===

impl Head {
    /// The first header of a name.
    pub fn header(&self, name: &str) -> Option<&str> {
        find(&self.headers, name)
    }
}

impl Answer {
    /// The first header of a name.
    pub fn header(&self, name: &str) -> Option<&str> {
        find(&self.headers, name)
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The data of each event of a stream, the end mark included.
    pub fn events(&self) -> Vec<String> {
        let text = self.text();
        text.lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned).collect()
    }

    /// The message of an error in the OpenAI shape.
    pub fn error(&self) -> Value {
        self.json()["error"].clone()
    }
}

/// A line of a head.
fn field(line: &str) -> (String, String) {
    let (name, value) = line.split_once(':').unwrap();
    (name.to_ascii_lowercase(), value.trim().to_owned())
}

fn find<'a>(headers: &'a [(String, String)], name: &str) -> Option<&'a str> {
    headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
}
