//! Servers that answer what a test says and remember what they got: the gateway's upstream, and what plugins call.

use super::case::{Answer, Instead, value_bytes};
use super::observed::{Fields, Recorded};
use bytes::Bytes;
use futures::{StreamExt as _, stream};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use parking_lot::Mutex;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};

/// A server. Dropped, it ends.
pub struct Server {
    addr: SocketAddr,
    script: Arc<Script>,
    _tasks: JoinSet<()>,
}

struct Script {
    answer: Mutex<Answer>,
    /// What answers hold back may go.
    released: watch::Sender<bool>,
    got: Mutex<Vec<Recorded>>,
    /// Health and load questions of the gateway are answered and not remembered.
    probed: bool,
}

type Body = UnsyncBoxBody<Bytes, Infallible>;

// === impl Server ===

impl Server {
    /// The gateway's upstream.
    pub async fn upstream(answer: Answer) -> Self {
        Self::start(answer, true).await
    }

    /// A server that plugins call.
    pub async fn callee(answer: Answer) -> Self {
        Self::start(answer, false).await
    }

    async fn start(answer: Answer, probed: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("a bound port");
        let refuses = answer.instead == Some(Instead::Refuse);
        let script = Arc::new(Script {
            answer: Mutex::new(answer),
            released: watch::Sender::new(false),
            got: Mutex::default(),
            probed,
        });
        let mut tasks = JoinSet::new();
        if !refuses {
            tasks.spawn(accept(listener, Arc::clone(&script)));
        }
        Self { addr, script, _tasks: tasks }
    }

    /// `host:port`.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// `http://host:port`, `https://host:port` or `redis://host:port`.
    pub fn url(&self) -> String {
        let answer = self.script.answer.lock();
        let scheme = match (&answer.redis, &answer.tls) {
            (Some(_), _) => "redis",
            (None, Some(_)) => "https",
            (None, None) => "http",
        };
        drop(answer);
        format!("{scheme}://{}", self.addr)
    }

    /// What it answers from now on.
    pub fn answer(&self, answer: Answer) {
        *self.script.answer.lock() = answer;
    }

    /// Lets answers go on that hold something back.
    pub fn release(&self) {
        self.script.released.send_replace(true);
    }

    /// What it got since the last question.
    pub fn take(&self) -> Vec<Recorded> {
        std::mem::take(&mut *self.script.got.lock())
    }
}

async fn accept(listener: TcpListener, script: Arc<Script>) {
    let mut connections = JoinSet::new();
    let tls = script.answer.lock().tls.is_some().then(acceptor);
    while let Ok((stream, _)) = listener.accept().await {
        let script = Arc::clone(&script);
        match tls.clone() {
            None => drop(connections.spawn(serve(stream, script, None))),
            Some(tls) => drop(connections.spawn(async move {
                // Whoever does not like the certificate goes away.
                if let Ok(stream) = tls.accept(stream).await {
                    let name = stream.get_ref().1.server_name().unwrap_or_default().to_owned();
                    serve(stream, script, Some(name)).await;
                }
            })),
        }
        while connections.try_join_next().is_some() {}
    }
}

/// A certificate for `callee.test` that nobody trusts.
fn acceptor() -> TlsAcceptor {
    let certificate = CertificateDer::from(include_bytes!("../../../conformance/certificates/callee.der").to_vec());
    let key = PrivatePkcs8KeyDer::from(include_bytes!("../../../conformance/certificates/callee.key.der").to_vec());
    let config = ServerConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions of TLS")
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key.into())
        .expect("a certificate and its key");
    TlsAcceptor::from(Arc::new(config))
}

/// A Redis server that has one reply for every command. A command is remembered as the body of what it got.
async fn redis(mut stream: impl AsyncRead + AsyncWrite + Unpin, script: Arc<Script>) {
    let mut read = Vec::new();
    loop {
        let mut piece = [0; 4096];
        match stream.read(&mut piece).await {
            Ok(0) | Err(_) => return,
            Ok(n) => read.extend_from_slice(&piece[..n]),
        }
        while let Some(end) = end_of_command(&read) {
            let command = read.drain(..end).collect();
            script.got.lock().push(Recorded { body: command, ..Recorded::default() });
            let (reply, instead) = {
                let answer = script.answer.lock();
                (answer.redis.clone().unwrap_or_default(), answer.instead)
            };
            match instead {
                None => drop(stream.write_all(&value_bytes(&reply)).await),
                Some(Instead::Garbage) => drop(stream.write_all(b"no RESP at all\r\n").await),
                Some(Instead::Close) => return,
                Some(Instead::Silence | Instead::Refuse) => {}
            }
        }
    }
}

/// Where the first command ends, an array of bulk strings, if all of it is there.
fn end_of_command(bytes: &[u8]) -> Option<usize> {
    let number = |from: usize| {
        let end = from + bytes.get(from..)?.windows(2).position(|pair| pair == b"\r\n")?;
        let number: usize = std::str::from_utf8(bytes.get(from + 1..end)?).ok()?.parse().ok()?;
        Some((number, end + 2))
    };
    let (words, mut end) = number(0)?;
    for _ in 0..words {
        let (length, after) = number(end)?;
        end = after + length + 2;
    }
    (bytes.len() >= end).then_some(end)
}

/// `name`: what a TLS client has asked for.
async fn serve(
    mut stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    script: Arc<Script>,
    name: Option<String>,
) {
    if script.answer.lock().redis.is_some() {
        return redis(stream, script).await;
    }
    if !script.probed && script.answer.lock().instead == Some(Instead::Garbage) {
        // Whoever called may be gone already.
        let _ = stream.write_all(b"no HTTP\r\n\r\n").await;
        return;
    }
    let answering = service_fn(move |request| answer(request, Arc::clone(&script), name.clone()));
    // A connection that ends in an error was cut by its peer, or by the script.
    let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), answering).await;
}

/// The connection is closed without an answer.
#[derive(Debug, thiserror::Error)]
#[error("the script closes the connection")]
struct Closes;

async fn answer(
    request: hyper::Request<Incoming>,
    script: Arc<Script>,
    name: Option<String>,
) -> Result<hyper::Response<Body>, Closes> {
    let path = request.uri().path_and_query().map_or_else(|| "/".to_owned(), ToString::to_string);
    if script.probed {
        match request.uri().path() {
            "/ready" | "/health" => return Ok(plain(200, "")),
            "/server_info" | "/get_server_info" => return Ok(plain(200, "{}")),
            other if other.starts_with("/v1/loads") || other == "/v1/models" || other == "/get_load" => {
                return Ok(plain(404, ""));
            }
            // What a gateway asks an engine beside the requests of its clients.
            "/abort_request" | "/open_session" | "/close_session" => return Ok(plain(200, "")),
            _ => {}
        }
    }
    let (head, body) = request.into_parts();
    let mut headers = fields(&head.headers);
    if let Some(authority) = head.uri.authority()
        && !head.headers.contains_key("host")
    {
        headers.push(("host".into(), authority.as_str().as_bytes().to_vec()));
    }
    if let Some(name) = name {
        headers.push((":server-name".into(), name.into_bytes()));
    }
    let mut recorded = Recorded { method: head.method.to_string(), path, headers, ..Recorded::default() };
    let collected = body.collect().await;
    if let Ok(collected) = collected {
        recorded.trailers = collected.trailers().map(fields).unwrap_or_default();
        recorded.body = collected.to_bytes().to_vec();
        if head.headers.get("content-type").is_some_and(|v| v.as_bytes().starts_with(b"application/grpc")) {
            recorded.body = messages(&recorded.body).concat();
        }
    }
    script.got.lock().push(recorded);
    let answer = script.answer.lock().clone();
    match answer.instead {
        Some(Instead::Silence) => std::future::pending().await,
        Some(_) => Err(Closes),
        None => Ok(response(&answer, &script)),
    }
}

fn plain(status: u16, text: &'static str) -> hyper::Response<Body> {
    let mut response = hyper::Response::new(Full::new(Bytes::from_static(text.as_bytes())).boxed_unsync());
    *response.status_mut() = http::StatusCode::from_u16(status).unwrap_or_default();
    response
}

fn response(answer: &Answer, script: &Script) -> hyper::Response<Body> {
    let pieces = match &answer.grpc {
        Some(messages) => messages.iter().map(|message| framed(message.as_bytes())).collect(),
        None => answer.body.pieces(),
    };
    let body = match answer.body.length() {
        Some(_) if answer.trailers.is_empty() => Full::new(Bytes::from(pieces.concat())).boxed_unsync(),
        _ => {
            let mut frames: Vec<Result<Frame<Bytes>, Infallible>> =
                pieces.into_iter().map(|piece| Ok(Frame::data(Bytes::from(piece)))).collect();
            if !answer.trailers.is_empty() {
                frames.push(Ok(Frame::trailers(header_map(&answer.trailers))));
            }
            let rest = frames.split_off(frames.len().min(1));
            let mut released = script.released.subscribe();
            let held = answer.held;
            let rest = stream::once(async move {
                if held {
                    // The script outlives its answers, or nobody waits for them.
                    let _ = released.wait_for(|released| *released).await;
                }
                stream::iter(rest)
            });
            StreamBody::new(stream::iter(frames).chain(rest.flatten())).boxed_unsync()
        }
    };
    let mut response = hyper::Response::new(body);
    *response.status_mut() = http::StatusCode::from_u16(answer.status).unwrap_or_default();
    *response.headers_mut() = header_map(&answer.headers);
    if answer.grpc.is_some() {
        response.headers_mut().insert("content-type", http::HeaderValue::from_static("application/grpc"));
    }
    response
}

/// A message as gRPC frames it: not compressed, four bytes of length.
fn framed(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX).to_be_bytes();
    [&[0], &length[..], message].concat()
}

/// The messages of a gRPC body.
fn messages(mut body: &[u8]) -> Vec<Vec<u8>> {
    let mut messages = Vec::new();
    while let Some(([_, a, b, c, d], rest)) = body.split_first_chunk::<5>() {
        let length = u32::from_be_bytes([*a, *b, *c, *d]) as usize;
        messages.push(rest.get(..length).unwrap_or(rest).to_vec());
        body = rest.get(length..).unwrap_or_default();
    }
    messages
}

/// Headers of a test. One that HTTP does not have is a mistake in the test.
pub fn header_map(pairs: &[(String, String)]) -> http::HeaderMap {
    let mut map = http::HeaderMap::new();
    for (name, value) in pairs {
        let name = http::HeaderName::from_bytes(name.as_bytes()).expect("a header's name");
        map.append(name, http::HeaderValue::from_bytes(&value_bytes(value)).expect("a header's value"));
    }
    map
}

/// Headers as they are compared.
pub fn fields(map: &http::HeaderMap) -> Fields {
    map.iter().map(|(name, value)| (name.as_str().to_owned(), value.as_bytes().to_vec())).collect()
}
