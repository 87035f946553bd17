//! A service that plugins call: HTTP/1.1 and HTTP/2 without TLS on one port, with gRPC.
//!
//! | Path | Answer |
//! |---|---|
//! | `/status/NNN` | that status |
//! | `/large/N` | N bytes, in pieces |
//! | `/hold` | `pong`, once [`Service::release`] was called |
//! | `/cut` | a body that breaks off |
//! | any other | `pong` with `x-reply: yes`, over HTTP/2 with the trailer `x-trailer: end` |
//! | `/test.Echo/Unary`, `/test.Echo/Stream` | each message, then status 0 |
//! | `/test.Echo/Denied` | status 7, `not allowed` |
//! | `/test.Echo/Silent` | nothing |

use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use parking_lot::Mutex;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;

/// A service. Dropped, it ends.
pub struct Service {
    addr: SocketAddr,
    shared: Arc<Shared>,
    _tasks: JoinSet<()>,
}

/// A call as it arrived.
#[derive(Clone, Debug)]
pub struct Called {
    /// Method and path.
    pub target: String,
    /// The host asked for.
    pub authority: String,
    /// Headers.
    pub headers: HeaderMap,
    /// The body; empty for gRPC.
    pub body: Bytes,
}

struct Shared {
    calls: Mutex<Vec<Called>>,
    released: watch::Sender<bool>,
    /// Calls under way.
    open: watch::Sender<usize>,
}

/// Counts a call as long as it lives.
struct Open(Arc<Shared>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.send_modify(|open| *open -= 1);
    }
}

type Body = StreamBody<BoxStream<'static, Result<Frame<Bytes>, io::Error>>>;

// === impl Service ===

impl Service {
    /// Starts one.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let shared =
            Shared { calls: Mutex::default(), released: watch::Sender::new(false), open: watch::Sender::new(0) };
        let shared = Arc::new(shared);
        let mut tasks = JoinSet::new();
        let serving = Arc::clone(&shared);
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let shared = Arc::clone(&serving);
                connections.spawn(async move {
                    let service = service_fn(move |request| answer(Arc::clone(&shared), request));
                    let _ =
                        auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { addr, shared, _tasks: tasks }
    }

    /// `http://host:port`.
    pub fn url(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// The calls so far.
    pub fn calls(&self) -> Vec<Called> {
        self.shared.calls.lock().clone()
    }

    /// Lets `/hold` answer from now on.
    pub fn release(&self) {
        self.shared.released.send_replace(true);
    }

    /// Calls that are being answered.
    pub fn open(&self) -> usize {
        *self.shared.open.borrow()
    }
}

async fn answer(shared: Arc<Shared>, request: Request<Incoming>) -> Result<Response<Body>, io::Error> {
    shared.open.send_modify(|open| *open += 1);
    let open = Open(Arc::clone(&shared));
    let (head, incoming) = request.into_parts();
    let path = head.uri.path().to_owned();
    let host = head.headers.get("host").map(|host| host.to_str().unwrap().to_owned());
    let mut called = Called {
        target: format!("{} {path}", head.method),
        authority: host.or_else(|| head.uri.authority().map(ToString::to_string)).unwrap_or_default(),
        headers: head.headers.clone(),
        body: Bytes::new(),
    };
    if let Some(method) = path.strip_prefix("/test.Echo/") {
        shared.calls.lock().push(called);
        return grpc(method, incoming, open).await;
    }
    called.body = incoming.collect().await.map_err(io::Error::other)?.to_bytes();
    shared.calls.lock().push(called);
    let number = |prefix| path.strip_prefix(prefix).and_then(|rest: &str| rest.parse::<usize>().ok());
    if path == "/hold" {
        let mut released = shared.released.subscribe();
        released.wait_for(|released| *released).await.map_err(io::Error::other)?;
    }
    let mut frames: Vec<Result<Frame<Bytes>, io::Error>> = Vec::new();
    let mut response = Response::builder().header("x-reply", "yes");
    if let Some(status) = number("/status/") {
        response = response.status(u16::try_from(status).unwrap());
    } else if let Some(size) = number("/large/") {
        frames.extend(vec![b'x'; size].chunks(50_000).map(|piece| Ok(Frame::data(Bytes::copy_from_slice(piece)))));
    } else if path == "/cut" {
        frames.push(Ok(Frame::data("half".into())));
        frames.push(Err(io::Error::other("cut")));
    } else {
        frames.push(Ok(Frame::data("pong".into())));
        if head.version == http::Version::HTTP_2 {
            frames.push(Ok(Frame::trailers(trailers(&[("x-trailer", "end")]))));
        }
    }
    let body = stream::iter(frames).map(move |frame| {
        let _ = &open;
        frame
    });
    Ok(response.body(StreamBody::new(body.boxed())).unwrap())
}

fn trailers(fields: &[(&'static str, &'static str)]) -> HeaderMap {
    fields.iter().map(|(name, value)| ((*name).parse().unwrap(), HeaderValue::from_static(value))).collect()
}

async fn grpc(method: &str, incoming: Incoming, open: Open) -> Result<Response<Body>, io::Error> {
    let response = Response::builder().header("content-type", "application/grpc").header("x-initial", "begin");
    if method == "Silent" {
        std::future::pending::<Infallible>().await;
    }
    let (response, body) = match method {
        "Denied" => {
            (response.header("grpc-status", "7").header("grpc-message", "not%20allowed"), stream::empty().boxed())
        }
        _ => {
            let end = trailers(&[("grpc-status", "0"), ("x-trailer", "end")]);
            (response, echo(incoming, open).chain(stream::iter([Ok(Frame::trailers(end))])).boxed())
        }
    };
    Ok(response.body(StreamBody::new(body)).unwrap())
}

/// The messages of a stream, each in a piece of its own.
fn echo(incoming: Incoming, open: Open) -> impl futures::Stream<Item = Result<Frame<Bytes>, io::Error>> {
    stream::unfold((incoming, BytesMut::new(), open), |(mut incoming, mut buffer, open)| async move {
        loop {
            if let Some((head, _)) = buffer.split_first_chunk::<5>() {
                let len = u32::from_be_bytes([head[1], head[2], head[3], head[4]]) as usize;
                if buffer.len() >= 5 + len {
                    let message = buffer.split_to(5 + len).freeze();
                    return Some((Ok(Frame::data(message)), (incoming, buffer, open)));
                }
            }
            match incoming.frame().await {
                Some(Ok(frame)) => buffer.extend_from_slice(&frame.into_data().unwrap_or_default()),
                Some(Err(error)) => return Some((Err(io::Error::other(error)), (incoming, buffer, open))),
                None => return None,
            }
        }
    })
}
