#![allow(clippy::unwrap_used)]

use super::*;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

#[test]
fn a_head_is_read_to_its_empty_line_in_pieces_of_any_size() {
    let head = b"GET / HTTP/1.1\r\nx: \r\r\n\n\r\n\r\n";
    let bytes = [&head[..], b"\n\r\nGET /next HTTP/1.1\r\n\r\n"].concat();
    for size in 1..=bytes.len() {
        let now = Instant::now();
        let mut reading = Head { left: 1000, begun: true, deadline: now, time: Duration::ZERO, last: [0; 3] };
        let mut read = 0;
        for piece in bytes.chunks(size) {
            let part = reading.part_of(piece);
            read += part;
            if part < piece.len() {
                break;
            }
            if read == head.len() {
                break;
            }
        }
        assert_eq!(read, head.len(), "in pieces of {size}");
    }
}

async fn pair() -> (ClientStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let far = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (near, peer) = listener.accept().await.unwrap();
    (ClientStream::new(near, peer), far)
}

fn limits() -> ClientLimits {
    let long = Duration::from_secs(60);
    ClientLimits { head_bytes: 1000, head_time: long, idle: long, patience: long }
}

/// Reads a body to its end, with room for so many bytes at a time.
async fn read_body(stream: &ClientStream, room: usize) -> Vec<u8> {
    let mut all = Vec::new();
    while stream.owes_body() {
        let mut piece = BytesMut::with_capacity(room);
        assert!(stream.read_body(&mut piece).await.unwrap() > 0);
        all.extend_from_slice(&piece);
    }
    all
}

#[tokio::test]
async fn a_body_is_read_to_its_length_and_what_follows_stays() {
    const HEAD: &[u8] = b"POST / HTTP/1.1\r\n\r\n";
    const NEXT: &[u8] = b"GET /next HTTP/1.1\r\n\r\n";
    let body = vec![b'x'; 300_000];
    for room in [7, 4096, 1_000_000] {
        let (mut near, mut far) = pair().await;
        let sent = [HEAD, &body, NEXT].concat();
        let sending = tokio::spawn(async move {
            far.write_all(&sent).await.unwrap();
            far
        });
        near.read_head(limits());
        let mut head = vec![0; HEAD.len()];
        near.read_exact(&mut head).await.unwrap();
        assert_eq!(head, HEAD);
        near.expect_body(body.len());
        assert!(near.owes_body());
        assert_eq!(read_body(&near, room).await, body);
        assert_eq!(near.read_body(&mut BytesMut::with_capacity(10)).await.unwrap(), 0, "it has ended");
        near.read_head(limits());
        let mut next = vec![0; NEXT.len()];
        near.read_exact(&mut next).await.unwrap();
        assert_eq!(next, NEXT);
        drop(sending.await.unwrap());
    }
}

#[tokio::test]
async fn a_body_that_breaks_off_is_an_error_and_stays_owed() {
    let (near, mut far) = pair().await;
    near.expect_body(10);
    far.write_all(b"12345").await.unwrap();
    let mut body = BytesMut::with_capacity(10);
    while body.len() < 5 {
        near.read_body(&mut body).await.unwrap();
    }
    drop(far);
    assert!(near.read_body(&mut body).await.is_err());
    assert!(near.owes_body());
}
