#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use super::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// What the scripted worker does with the second request on a connection.
#[derive(Clone, Copy)]
enum Second {
    /// Closes at once, as an idle timeout that crossed the request would.
    Close,
    /// Works on it for a while, then breaks off.
    BreakOff,
}

struct Scripted {
    target: Target,
    requests: Arc<AtomicUsize>,
    connections: Arc<AtomicUsize>,
}

async fn read_request(socket: &mut TcpStream) -> bool {
    let mut seen = Vec::new();
    let mut byte = [0];
    while !seen.ends_with(b"\r\n\r\n") {
        match socket.read(&mut byte).await {
            Ok(1) => seen.push(byte[0]),
            _ => return false,
        }
    }
    true
}

/// A worker that answers the first request of a connection and treats the second as told.
async fn scripted(second: Second) -> Scripted {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let limits = ConnectionLimits { connect: Duration::from_secs(5), idle: Duration::from_secs(60) };
    let target = Target::new(listener.local_addr().unwrap(), "127.0.0.1", false, false, limits);
    let (requests, connections) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (seen, opened) = (Arc::clone(&requests), Arc::clone(&connections));
    tokio::spawn(async move {
        loop {
            let (mut socket, _) = listener.accept().await.unwrap();
            opened.fetch_add(1, Ordering::SeqCst);
            let seen = Arc::clone(&seen);
            tokio::spawn(async move {
                for n in 0.. {
                    if !read_request(&mut socket).await {
                        return;
                    }
                    seen.fetch_add(1, Ordering::SeqCst);
                    if n == 0 {
                        socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
                        continue;
                    }
                    if let Second::BreakOff = second {
                        tokio::time::sleep(STALE_WITHIN + Duration::from_millis(150)).await;
                    }
                    return;
                }
            });
        }
    });
    Scripted { target, requests, connections }
}

async fn ask(upstream: &Upstream, target: &Target) -> Result<Reply, ExchangeError> {
    upstream.exchange(target, "GET", "/x", None, Duration::from_secs(10), 1024).await
}

#[tokio::test]
async fn a_pooled_connection_that_was_closed_is_replaced_once() {
    let worker = scripted(Second::Close).await;
    let upstream = Upstream::default();
    assert!(ask(&upstream, &worker.target).await.unwrap().is_success());
    assert!(ask(&upstream, &worker.target).await.unwrap().is_success());
    assert_eq!(worker.connections.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_request_that_was_being_worked_on_is_not_sent_again() {
    let worker = scripted(Second::BreakOff).await;
    let upstream = Upstream::default();
    assert!(ask(&upstream, &worker.target).await.unwrap().is_success());
    assert!(ask(&upstream, &worker.target).await.is_err());
    assert_eq!(worker.requests.load(Ordering::SeqCst), 2, "the second request was sent once");
}

#[tokio::test]
async fn a_fresh_target_takes_no_pooled_connection_and_leaves_none() {
    let worker = scripted(Second::Close).await;
    let upstream = Upstream::default();
    assert!(ask(&upstream, &worker.target).await.unwrap().is_success());
    for _ in 0..2 {
        assert!(ask(&upstream, &worker.target.fresh()).await.unwrap().is_success());
    }
    assert_eq!(worker.connections.load(Ordering::SeqCst), 3);
}
