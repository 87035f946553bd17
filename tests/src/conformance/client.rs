//! Clients of the gateway.

use super::case::{Ask, Protocol, value_bytes};
use super::observed::{Fields, Reply};
use super::server::{fields, header_map};
use crate::harness::{Connection, DEADLINE};
use bytes::Bytes;
use std::net::SocketAddr;
use tokio::net::TcpStream;

/// Sends a request. Nothing when there was no answer to speak of.
pub async fn send(addr: SocketAddr, ask: &Ask) -> Option<Reply> {
    match ask.protocol {
        Protocol::Http1 => http1(addr, ask).await,
        Protocol::Http2 => http2(addr, ask).await,
    }
}

/// A request that was sent, and as much of its answer as was read.
pub struct Begun {
    connection: Connection,
    reply: Reply,
}

/// Sends a request over HTTP/1.1 and leaves it there.
pub async fn begin(addr: SocketAddr, ask: &Ask) -> Begun {
    let mut connection = Connection::open(addr).await;
    connection.write(&head(ask)).await;
    connection.write(&body(ask)).await;
    Begun { connection, reply: Reply::default() }
}

impl Begun {
    /// Reads the answer's head and the first piece of its body; nothing if there is none.
    pub async fn first(mut self) -> Option<Self> {
        let head = self.connection.try_head().await?;
        let first = self.connection.piece().await?;
        self.reply = reply(head.status, head.headers, first, false);
        Some(self)
    }

    /// Reads the rest.
    pub async fn rest(mut self) -> Option<Reply> {
        let (rest, complete) = self.connection.rest().await;
        self.reply.body.extend_from_slice(&rest);
        self.reply.complete = complete;
        self.reply.trailers = trailers(&self.connection);
        Some(self.reply)
    }
}

async fn http1(addr: SocketAddr, ask: &Ask) -> Option<Reply> {
    let mut connection = Connection::open(addr).await;
    connection.write(&head(ask)).await;
    if ask.expects_continue {
        let interim = connection.try_head().await?;
        if interim.status != 100 {
            let (body, complete) = connection.rest().await;
            return Some(reply(interim.status, interim.headers, body, complete));
        }
    }
    connection.write(&body(ask)).await;
    let head = loop {
        let head = connection.try_head().await?;
        if head.status >= 200 {
            break head;
        }
    };
    let (body, complete) = connection.rest().await;
    Some(Reply { trailers: trailers(&connection), ..reply(head.status, head.headers, body, complete) })
}

fn trailers(connection: &Connection) -> Fields {
    connection.trailers().iter().map(|(name, value)| (name.clone(), value.clone().into_bytes())).collect()
}

fn reply(status: u16, headers: Vec<(String, String)>, body: Bytes, complete: bool) -> Reply {
    let headers = headers.into_iter().map(|(name, value)| (name, value.into_bytes())).collect();
    Reply { status, headers, body: body.to_vec(), trailers: Vec::new(), complete }
}

fn head(ask: &Ask) -> Vec<u8> {
    let mut head = format!("{} {} HTTP/1.1\r\n", ask.method, ask.path).into_bytes();
    let mut line = |name: &str, value: &[u8]| {
        head.extend_from_slice(name.as_bytes());
        head.extend_from_slice(b": ");
        head.extend_from_slice(value);
        head.extend_from_slice(b"\r\n");
    };
    let has = |name: &str| ask.headers.iter().any(|(known, _)| known.eq_ignore_ascii_case(name));
    if !has("host") {
        line("host", b"kit.test");
    }
    if !has("content-type") {
        line("content-type", b"application/json");
    }
    for (name, value) in &ask.headers {
        line(name, &value_bytes(value));
    }
    if ask.expects_continue {
        line("expect", b"100-continue");
    }
    match ask.body.length().filter(|_| ask.trailers.is_empty()) {
        Some(length) => line("content-length", length.to_string().as_bytes()),
        None => line("transfer-encoding", b"chunked"),
    }
    head.extend_from_slice(b"\r\n");
    head
}

fn body(ask: &Ask) -> Vec<u8> {
    if ask.body.length().is_some() && ask.trailers.is_empty() {
        return ask.body.whole();
    }
    let mut framed = Vec::new();
    for piece in ask.body.pieces() {
        framed.extend_from_slice(format!("{:x}\r\n", piece.len()).as_bytes());
        framed.extend_from_slice(&piece);
        framed.extend_from_slice(b"\r\n");
    }
    framed.extend_from_slice(b"0\r\n");
    for (name, value) in &ask.trailers {
        framed.extend_from_slice(format!("{name}: {value}\r\n").as_bytes());
    }
    framed.extend_from_slice(b"\r\n");
    framed
}

async fn http2(addr: SocketAddr, ask: &Ask) -> Option<Reply> {
    tokio::time::timeout(DEADLINE, http2_exchange(addr, ask)).await.expect("an end within the deadline").ok().flatten()
}

async fn http2_exchange(addr: SocketAddr, ask: &Ask) -> Result<Option<Reply>, h2::Error> {
    let stream = TcpStream::connect(addr).await.expect("the listener accepts");
    let (send, connection) = h2::client::handshake(stream).await?;
    // It runs until the streams on it and this function are done with it.
    let mut driver = tokio::task::JoinSet::new();
    driver.spawn(async move {
        let _ = connection.await;
    });
    let mut send = send.ready().await?;
    let host = ask.headers.iter().find(|(name, _)| name.eq_ignore_ascii_case("host"));
    let host = host.map_or("kit.test", |(_, value)| value.as_str());
    let mut request = http::Request::builder()
        .method(ask.method.as_str())
        .uri(format!("http://{host}{}", ask.path))
        .body(())
        .expect("a request");
    *request.headers_mut() = header_map(&ask.headers);
    request.headers_mut().remove("host");
    request.headers_mut().entry("content-type").or_insert(http::HeaderValue::from_static("application/json"));
    let pieces = ask.body.pieces();
    let bodiless = pieces.is_empty() && ask.trailers.is_empty();
    let (response, mut body) = send.send_request(request, bodiless)?;
    let last = pieces.len();
    for (at, piece) in pieces.into_iter().enumerate() {
        let end = at + 1 == last && ask.trailers.is_empty();
        send_data(&mut body, Bytes::from(piece), end).await?;
    }
    if !ask.trailers.is_empty() {
        body.send_trailers(header_map(&ask.trailers))?;
    }
    let (head, mut body) = response.await?.into_parts();
    let mut reply = Reply { status: head.status.as_u16(), headers: fields(&head.headers), ..Reply::default() };
    while let Some(piece) = body.data().await {
        let Ok(piece) = piece else { return Ok(Some(reply)) };
        body.flow_control().release_capacity(piece.len())?;
        reply.body.extend_from_slice(&piece);
    }
    if let Ok(trailers) = body.trailers().await {
        reply.trailers = trailers.map(|map| fields(&map)).unwrap_or_default();
        reply.complete = true;
    }
    Ok(Some(reply))
}

async fn send_data(body: &mut h2::SendStream<Bytes>, mut piece: Bytes, end: bool) -> Result<(), h2::Error> {
    while !piece.is_empty() {
        body.reserve_capacity(piece.len());
        let Some(room) = std::future::poll_fn(|cx| body.poll_capacity(cx)).await.transpose()? else { return Ok(()) };
        let now = piece.split_to(room.min(piece.len()));
        body.send_data(now, end && piece.is_empty())?;
    }
    Ok(())
}
