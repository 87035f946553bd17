//! A client that shows the bytes.

use serde_json::Value;
use std::{io::Write as _, net::SocketAddr};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use turnstile_sim::SimWorker;

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// False when the connection was cut before the end of the body.
    pub complete: bool,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// The `data:` lines of an event stream.
    pub fn events(&self) -> Vec<String> {
        self.text().lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned).collect()
    }

    /// The events that are JSON.
    pub fn json_events(&self) -> Vec<Value> {
        self.events().iter().filter_map(|event| serde_json::from_str(event).ok()).collect()
    }

    pub fn message(&self) -> String {
        let body = self.json();
        let message = body.get("message").or_else(|| body.get("error").and_then(|error| error.get("message")));
        message.and_then(Value::as_str).unwrap_or_default().to_owned()
    }
}

/// The request as bytes. `headers` come on top of Host and Content-Length.
pub fn request_bytes(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut head = format!("{method} {path} HTTP/1.1\r\nHost: worker\r\nContent-Length: {}\r\n", body.len());
    for (name, value) in headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    [head.as_bytes(), b"\r\n", body].concat()
}

/// One connection that is read as it comes.
pub struct Connection {
    stream: TcpStream,
    read: Vec<u8>,
    closed: bool,
    reset: bool,
}

impl Connection {
    pub async fn open(addr: SocketAddr) -> Self {
        Self { stream: TcpStream::connect(addr).await.unwrap(), read: Vec::new(), closed: false, reset: false }
    }

    /// One on which this has been sent, before any other task on this thread could do anything.
    pub fn with_sent(addr: SocketAddr, bytes: &[u8]) -> Self {
        let mut stream = std::net::TcpStream::connect(addr).unwrap();
        stream.write_all(bytes).unwrap();
        stream.set_nonblocking(true).unwrap();
        let stream = TcpStream::from_std(stream).unwrap();
        Self { stream, read: Vec::new(), closed: false, reset: false }
    }

    pub async fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    pub async fn post(&mut self, path: &str, body: &Value) {
        let body = body.to_string();
        self.send(&request_bytes("POST", path, &[("Content-Type", "application/json")], body.as_bytes())).await;
    }

    /// Closes the sending side only.
    pub async fn half_close(&mut self) {
        self.stream.shutdown().await.unwrap();
    }

    /// Reads until the answer so far contains `text`.
    pub async fn read_until(&mut self, text: &str) -> String {
        while !String::from_utf8_lossy(&self.read).contains(text) {
            assert!(self.read_more().await, "closed before {text:?}: {}", String::from_utf8_lossy(&self.read));
        }
        String::from_utf8_lossy(&self.read).into_owned()
    }

    async fn read_more(&mut self) -> bool {
        let mut buffer = [0; 16 * 1024];
        match self.stream.read(&mut buffer).await {
            Ok(0) => {
                self.closed = true;
                false
            }
            Err(error) => {
                self.closed = true;
                self.reset = error.kind() == std::io::ErrorKind::ConnectionReset;
                false
            }
            Ok(count) => {
                self.read.extend_from_slice(&buffer[..count]);
                true
            }
        }
    }

    /// Reads to the end of the answer, on a connection that stays open.
    pub async fn read_to_end_of_stream(mut self) -> Vec<u8> {
        while !self.read.ends_with(b"\r\n0\r\n\r\n") && self.read_more().await {}
        self.read
    }

    /// Reads for so long; returns all of the answer so far.
    pub async fn read_for(&mut self, time: std::time::Duration) -> Vec<u8> {
        let _ = tokio::time::timeout(time, async { while self.read_more().await {} }).await;
        self.read.clone()
    }

    /// Whether the peer was seen to close.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// Reads until the peer closes, and stays open itself.
    pub async fn read_to_eof(&mut self) -> Vec<u8> {
        while self.read_more().await {}
        assert!(!self.reset);
        std::mem::take(&mut self.read)
    }

    /// Reads to the end of the connection, and tells whether that was a reset.
    pub async fn read_to_close(mut self) -> (Vec<u8>, bool) {
        while self.read_more().await {}
        (self.read, self.reset)
    }

    /// Reads to the end of the connection.
    pub async fn read_to_end(mut self) -> Vec<u8> {
        while self.read_more().await {}
        self.read
    }
}

/// Sends a request on a connection of its own and reads the whole answer.
pub async fn send(addr: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
    let headers = [headers, &[("Connection", "close")]].concat();
    let mut connection = Connection::open(addr).await;
    connection.send(&request_bytes(method, path, &headers, body)).await;
    parse(&connection.read_to_end().await)
}

/// Posts JSON.
pub async fn post(worker: &SimWorker, path: &str, body: Value) -> Answer {
    post_with(worker, path, &[], body).await
}

/// Posts JSON with more headers.
pub async fn post_with(worker: &SimWorker, path: &str, headers: &[(&str, &str)], body: Value) -> Answer {
    let headers = [headers, &[("Content-Type", "application/json")]].concat();
    send(worker.addr(), "POST", path, &headers, body.to_string().as_bytes()).await
}

pub async fn get(worker: &SimWorker, path: &str) -> Answer {
    send(worker.addr(), "GET", path, &[], b"").await
}

/// Takes the bytes of one answer apart. Nothing at all is status 0.
pub fn parse(bytes: &[u8]) -> Answer {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").unwrap_or(bytes.len());
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).and_then(|code| code.parse().ok()).unwrap_or(0);
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let raw = bytes.get(end + 4..).unwrap_or_default();
    let mut answer = Answer { status, headers, body: Vec::new(), complete: false };
    if answer.header("transfer-encoding") == Some("chunked") {
        let mut rest = raw;
        while let Some(line) = rest.windows(2).position(|window| window == b"\r\n") {
            let size = usize::from_str_radix(&String::from_utf8_lossy(&rest[..line]), 16).unwrap();
            let chunk = rest.get(line + 2..line + 2 + size).unwrap_or_else(|| &rest[line + 2..]);
            answer.body.extend_from_slice(chunk);
            answer.complete = size == 0;
            rest = rest.get(line + 4 + size..).unwrap_or_default();
        }
    } else {
        let length: usize = answer.header("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
        answer.complete = status != 0 && raw.len() == length;
        answer.body = raw.to_vec();
    }
    answer
}
