//! A worker that answers every turn with a stream that does not end, as fast as it is taken.

use bytes::BytesMut;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// The size of one event.
const EVENT: usize = 8 * 1024;

/// A worker that floods. Dropped, it ends.
pub struct Flood {
    addr: SocketAddr,
    counts: Arc<Counts>,
    _tasks: JoinSet<()>,
}

#[derive(Default)]
struct Counts {
    sent: AtomicU64,
    most: AtomicU64,
    begun: AtomicUsize,
    ended: AtomicUsize,
}

// === impl Flood ===

impl Flood {
    /// Starts one.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let counts = Arc::<Counts>::default();
        let mut tasks = JoinSet::new();
        let shared = Arc::clone(&counts);
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, Arc::clone(&shared)));
            }
        });
        Self { addr, counts, _tasks: tasks }
    }

    /// `http://host:port`.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Bytes of answers that were taken, over all streams.
    pub fn sent(&self) -> u64 {
        self.counts.sent.load(Ordering::Relaxed)
    }

    /// Bytes that were taken of the stream of which most were.
    pub fn most_of_one(&self) -> u64 {
        self.counts.most.load(Ordering::Relaxed)
    }

    /// Streams begun.
    pub fn begun(&self) -> usize {
        self.counts.begun.load(Ordering::Relaxed)
    }

    /// Streams that the gateway has broken off.
    pub fn ended(&self) -> usize {
        self.counts.ended.load(Ordering::Relaxed)
    }
}

async fn serve(mut stream: TcpStream, counts: Arc<Counts>) {
    let mut buffer = BytesMut::new();
    loop {
        let end = loop {
            if let Some(at) = buffer.windows(4).position(|w| w == b"\r\n\r\n") {
                break at + 4;
            }
            if stream.read_buf(&mut buffer).await.unwrap_or(0) == 0 {
                return;
            }
        };
        let head = String::from_utf8_lossy(&buffer.split_to(end)).to_ascii_lowercase();
        let length: usize = head.lines().find_map(|l| l.strip_prefix("content-length: ")?.parse().ok()).unwrap_or(0);
        while buffer.len() < length {
            if stream.read_buf(&mut buffer).await.unwrap_or(0) == 0 {
                return;
            }
        }
        let _ = buffer.split_to(length);
        let answer: &[u8] = match head.split(' ').nth(1) {
            Some("/ready") => b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            Some("/server_info" | "/abort_request") => b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
            Some(path) if path.starts_with("/v1/loads") => b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
            _ => return flood(stream, &counts).await,
        };
        if stream.write_all(answer).await.is_err() {
            return;
        }
    }
}

async fn flood(mut stream: TcpStream, counts: &Counts) {
    counts.begun.fetch_add(1, Ordering::Relaxed);
    let text = "a".repeat(EVENT);
    let event = format!("data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}}}}]}}\n\n");
    let chunk = format!("{:x}\r\n{event}\r\n", event.len());
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let mut sent = 0;
    let mut written = stream.write_all(head.as_bytes()).await;
    while written.is_ok() {
        written = stream.write_all(chunk.as_bytes()).await;
        sent += chunk.len() as u64;
        counts.sent.fetch_add(chunk.len() as u64, Ordering::Relaxed);
        counts.most.fetch_max(sent, Ordering::Relaxed);
    }
    counts.ended.fetch_add(1, Ordering::Relaxed);
}
