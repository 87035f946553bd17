//! The load: a bounded number of requests over keep-alive connections, each answer read to its end and checked.

use bytes::Bytes;
use futures::future::try_join_all;
use std::cell::Cell;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// The longest time one answer may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Connections to one server.
pub struct Connections {
    open: Vec<Connection>,
}

struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connections {
    /// Opens `count` of them.
    ///
    /// # Errors
    /// Refused.
    pub async fn open(address: SocketAddr, count: usize) -> Result<Self, String> {
        let mut open = Vec::with_capacity(count);
        for _ in 0..count {
            let stream = TcpStream::connect(address).await.map_err(|e| format!("{address}: {e}"))?;
            stream.set_nodelay(true).map_err(|e| e.to_string())?;
            open.push(Connection { stream, buffer: Vec::new() });
        }
        Ok(Self { open })
    }

    /// Sends `total` requests, taking them in turn from `requests`, beginning at `from`; one at a time on each connection.
    ///
    /// # Errors
    /// An answer that is not 200, or not whole.
    pub async fn send(&mut self, requests: &[Bytes], from: usize, total: usize) -> Result<(), String> {
        let next = Cell::new(from);
        let end = from + total;
        let all = self.open.iter_mut().map(async |connection| {
            while next.get() < end {
                let at = next.replace(next.get() + 1);
                let Some(request) = requests.get(at % requests.len().max(1)) else { return Err("no requests".into()) };
                let exchange = tokio::time::timeout(PATIENCE, connection.exchange(request));
                exchange.await.map_err(|_| "no answer in time".to_owned())??;
            }
            Ok::<(), String>(())
        });
        try_join_all(all).await.map(|_| ())
    }

    /// Sends the request once on every connection, a few at a time.
    ///
    /// # Errors
    /// As with [`Connections::send`].
    pub async fn each(&mut self, request: &Bytes) -> Result<(), String> {
        for few in self.open.chunks_mut(16) {
            try_join_all(few.iter_mut().map(async |connection| connection.exchange(request).await)).await?;
        }
        Ok(())
    }
}

impl Connection {
    async fn exchange(&mut self, request: &Bytes) -> Result<(), String> {
        self.stream.write_all(request).await.map_err(|e| format!("send: {e}"))?;
        self.buffer.clear();
        let mut framing = None;
        loop {
            let read = self.stream.read_buf(&mut self.buffer).await.map_err(|e| format!("receive: {e}"))?;
            if read == 0 {
                return Err("the connection was closed in an answer".into());
            }
            if framing.is_none() {
                framing = framing_of(&self.buffer)?;
            }
            match framing {
                Some(Framing::Length(end)) if self.buffer.len() >= end => return Ok(()),
                Some(Framing::Chunks) if self.buffer.ends_with(b"\r\n0\r\n\r\n") => {
                    let done = self.buffer.windows(6).rev().take(64).any(|window| window == b"[DONE]");
                    return if done { Ok(()) } else { Err("a stream without its end mark".into()) };
                }
                _ => {}
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Framing {
    /// Head and body have so many bytes.
    Length(usize),
    Chunks,
}

fn framing_of(buffer: &[u8]) -> Result<Option<Framing>, String> {
    let Some(end) = buffer.windows(4).position(|window| window == b"\r\n\r\n") else { return Ok(None) };
    let head = String::from_utf8_lossy(buffer.get(..end).unwrap_or_default()).to_ascii_lowercase();
    if !head.starts_with("http/1.1 200 ") {
        return Err(format!("an answer that is not 200: {}", String::from_utf8_lossy(buffer)));
    }
    if let Some(length) = head.lines().find_map(|line| line.strip_prefix("content-length:")) {
        let length: usize = length.trim().parse().map_err(|_| "a bad length".to_owned())?;
        return Ok(Some(Framing::Length(end + 4 + length)));
    }
    if head.lines().any(|line| line.starts_with("transfer-encoding:") && line.ends_with("chunked")) {
        return Ok(Some(Framing::Chunks));
    }
    Err("an answer without framing".into())
}
