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
    /// Answers it like the first.
    Answer,
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

fn target(address: SocketAddr, idle: Duration) -> Target {
    let limits = ConnectionLimits { connect: Duration::from_secs(5), idle };
    Target::new(address, "127.0.0.1", false, false, limits)
}

/// A worker that answers the first request of a connection and treats the second as told.
async fn scripted(second: Second) -> Scripted {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = target(listener.local_addr().unwrap(), Duration::from_secs(60));
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
                    if n == 0 || matches!(second, Second::Answer) {
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

#[tokio::test]
async fn a_connection_is_kept_for_so_long() {
    let worker = scripted(Second::Answer).await;
    let upstream = Upstream::default();
    for _ in 0..3 {
        assert!(ask(&upstream, &worker.target).await.unwrap().is_success());
    }
    assert_eq!((worker.connections.load(Ordering::SeqCst), upstream.idle.count()), (1, 1));
    upstream.sweep();
    assert_eq!(upstream.idle.count(), 1);
    let address = worker.target.plain_address().unwrap();
    assert!(ask(&upstream, &target(address, Duration::ZERO)).await.unwrap().is_success());
    assert_eq!(worker.connections.load(Ordering::SeqCst), 1, "it was taken once more");
    upstream.sweep();
    assert_eq!(upstream.idle.count(), 0, "its time is over");
    assert!(ask(&upstream, &worker.target).await.unwrap().is_success());
    assert_eq!(worker.connections.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_connection_that_the_worker_closes_is_not_kept() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = target(listener.local_addr().unwrap(), Duration::from_secs(60));
    let upstream = Upstream::default();
    let serving = async {
        let (mut socket, _) = listener.accept().await.unwrap();
        assert!(read_request(&mut socket).await);
        socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok").await.unwrap();
        socket
    };
    let (reply, socket) = tokio::join!(ask(&upstream, &target), serving);
    assert!(reply.unwrap().is_success());
    assert_eq!(upstream.idle.count(), 1);
    drop(socket);
    let swept = async {
        while upstream.idle.count() > 0 {
            tokio::task::yield_now().await;
            upstream.sweep();
        }
    };
    tokio::time::timeout(Duration::from_secs(30), swept).await.unwrap();
}

#[tokio::test]
async fn a_request_goes_out_with_its_body() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let target = target(listener.local_addr().unwrap(), Duration::from_secs(60));
    let upstream = Upstream::default();
    for body in [b"{}".to_vec(), vec![b'x'; 5000]] {
        let whole = Bytes::from(body.clone());
        let asking = upstream.exchange(&target, "POST", "/x", Some(whole), Duration::from_secs(10), 1024);
        let serving = async {
            let (mut socket, _) = listener.accept().await.unwrap();
            let mut seen = vec![0; 16 * 1024];
            let read = socket.read(&mut seen).await.unwrap();
            socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await.unwrap();
            seen.truncate(read);
            seen
        };
        let (reply, seen) = tokio::join!(asking, serving);
        assert!(reply.unwrap().is_success());
        let text = format!(
            "POST /x HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            listener.local_addr().unwrap(),
            body.len()
        );
        assert_eq!(seen, [text.as_bytes(), &body].concat(), "in one piece");
    }
}
