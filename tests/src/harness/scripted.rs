//! A worker that answers every inference request with the same bytes, for answers that no SGLang would give.

use bytes::BytesMut;
use parking_lot::Mutex;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// A scripted worker. Dropped, it ends.
pub struct Scripted {
    addr: SocketAddr,
    script: Arc<Script>,
    _tasks: JoinSet<()>,
}

struct Script {
    answer: Vec<u8>,
    /// A second inference request on a connection closes it.
    closes: bool,
    heads: Mutex<Vec<String>>,
    closed: AtomicUsize,
}

// === impl Scripted ===

impl Scripted {
    /// Starts one that answers with `answer`, the whole of it from the status line on.
    pub async fn start(answer: impl Into<Vec<u8>>) -> Self {
        Self::run(answer.into(), false).await
    }

    /// Starts one that answers one inference request on a connection, and closes it when the next one comes.
    pub async fn closing(answer: impl Into<Vec<u8>>) -> Self {
        Self::run(answer.into(), true).await
    }

    async fn run(answer: Vec<u8>, closes: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let script = Script { answer, closes, heads: Mutex::default(), closed: AtomicUsize::new(0) };
        let script = Arc::new(script);
        let mut tasks = JoinSet::new();
        let shared = Arc::clone(&script);
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, Arc::clone(&shared)));
            }
        });
        Self { addr, script, _tasks: tasks }
    }

    /// `http://host:port`.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// The heads of the inference requests so far.
    pub fn heads(&self) -> Vec<String> {
        self.script.heads.lock().clone()
    }

    /// Connections closed instead of an answer.
    pub fn closed(&self) -> usize {
        self.script.closed.load(Ordering::Relaxed)
    }
}

async fn serve(mut stream: TcpStream, script: Arc<Script>) {
    let mut served = false;
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
        let head = String::from_utf8_lossy(&buffer.split_to(end)).into_owned();
        let length =
            head.lines().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok());
        let length: usize = length.unwrap_or(0);
        while buffer.len() < length {
            if stream.read_buf(&mut buffer).await.unwrap_or(0) == 0 {
                return;
            }
        }
        let _ = buffer.split_to(length);
        let bytes: &[u8] = match head.split(' ').nth(1) {
            Some("/ready") => b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            Some("/server_info") => b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
            Some(path) if path.starts_with("/v1/loads") => b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
            _ => {
                if script.closes && std::mem::replace(&mut served, true) {
                    script.closed.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                script.heads.lock().push(head);
                &script.answer
            }
        };
        if stream.write_all(bytes).await.is_err() {
            return;
        }
    }
}
