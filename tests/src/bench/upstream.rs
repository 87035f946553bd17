//! An upstream that answers at once with fixed bytes: chat JSON or SSE, and what the gateway's probes ask.

use crate::process::wait_for_parent;
use bytes::Bytes;
use futures::{Stream, StreamExt as _, stream};
use http_body_util::{BodyExt as _, Either, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Request, Response, StatusCode, service::service_fn};
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};

/// The request header that says how to stream: chunks, chunks written back to back, ms between such groups.
pub const SCRIPT: &str = "x-bench-stream";

const READY: &str = r#"{"status":"ready"}"#;
const INFO: &str = r#"{"version":"0.5.23","enable_session_radix_cache":true,"enable_streaming_session":false,"enable_priority_scheduling":true,"enable_cache_report":true,"stream_response_default_include_usage":false,"dp_size":1,"max_running_requests":512,"max_total_num_tokens":4000000,"page_size":1}"#;
const LOADS: &str = r#"{"loads":[{"dp_rank":0,"num_running_reqs":0,"num_waiting_reqs":0,"num_waiting_uncached_tokens":0,"num_used_tokens":1000,"max_total_num_tokens":4000000,"max_running_requests":512,"total_prefill_uncached_tokens":100000,"total_prefill_busy_us":1000000}]}"#;
const MODELS: &str = r#"{"object":"list","data":[{"id":"bench","object":"model","created":1,"owned_by":"sglang"}]}"#;
const HEAD: &str = r#"{"id":"3682e225bce94ba491ef7f47334e699d","object":"chat.completion","created":1795973694,"model":"bench","choices":[{"index":0,"message":{"role":"assistant","content":"The parser returns an error when the header is empty. The next step is to read the module that calls it, and to check that the test covers that case.","reasoning_content":null,"tool_calls":null},"logprobs":null,"finish_reason":"stop","matched_stop":151645}],"metadata":{"weight_version":"default"},"usage":"#;
const CHUNK: &str = concat!(
    r#"data: {"id":"3682e225bce94ba491ef7f47334e699d","object":"chat.completion.chunk","created":1795973694,"model":"bench","choices":[{"index":0,"delta":{"role":null,"content":" header","reasoning_content":null,"tool_calls":null},"logprobs":null,"finish_reason":null,"matched_stop":null}],"usage":null}"#,
    "\n\n"
);
const LAST: &str = concat!(
    r#"data: {"id":"3682e225bce94ba491ef7f47334e699d","object":"chat.completion.chunk","created":1795973694,"model":"bench","choices":[{"index":0,"delta":{"role":null,"content":null,"reasoning_content":null,"tool_calls":null},"logprobs":null,"finish_reason":"stop","matched_stop":151645}],"usage":null}"#,
    "\n\n"
);
const USAGE: &str = r#"data: {"id":"3682e225bce94ba491ef7f47334e699d","object":"chat.completion.chunk","created":1795973694,"model":"bench","choices":[],"usage":"#;
const DONE: &str = "data: [DONE]\n\n";

/// Serves on `ports` ports of 127.0.0.1 until the parent is gone. Prints the addresses on one line, with spaces between.
///
/// # Errors
/// A socket.
pub fn run(ports: usize) -> Result<(), String> {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let served = serve(ports, &sender);
        let _ = sender.send(served.map(|()| String::new()));
    });
    println!("{}", receiver.recv().map_err(|e| e.to_string())??);
    wait_for_parent();
    Ok(())
}

fn serve(ports: usize, said: &std::sync::mpsc::Sender<Result<String, String>>) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
    runtime.block_on(async {
        let mut accepting = tokio::task::JoinSet::new();
        let mut addresses = Vec::new();
        for _ in 0..ports {
            let listener = TcpListener::bind("127.0.0.1:0").await.map_err(|e| e.to_string())?;
            let address: SocketAddr = listener.local_addr().map_err(|e| e.to_string())?;
            addresses.push(address.to_string());
            accepting.spawn(accept(listener));
        }
        let _ = said.send(Ok(addresses.join(" ")));
        while accepting.join_next().await.is_some() {}
        Ok(())
    })
}

async fn accept(listener: TcpListener) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((socket, _)) => {
                    connections.spawn(connection(socket));
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connection(socket: TcpStream) {
    let _ = socket.set_nodelay(true);
    // A client that is gone is no news here.
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(socket), service_fn(answer)).await;
}

type Chunks = std::pin::Pin<Box<dyn Stream<Item = Result<Frame<Bytes>, Infallible>> + Send>>;
type Body = Either<Full<Bytes>, StreamBody<Chunks>>;

async fn answer(request: Request<Incoming>) -> Result<Response<Body>, hyper::Error> {
    let (parts, body) = request.into_parts();
    // Read as a server reads it: to the end, in one piece.
    let body = body.collect().await?.to_bytes();
    let fixed = |text: &'static str| json(Bytes::from_static(text.as_bytes()));
    Ok(match parts.uri.path() {
        "/v1/chat/completions" => match parts.headers.get(SCRIPT).map(script) {
            Some(script) if asks(&body, b"\"include_usage\":true") => {
                streamed(script, Some(format!("{USAGE}{}}}\n\n", usage(body.len(), asks(&body, ASK_DETAILS)))))
            }
            Some(script) => streamed(script, None),
            None => json(Bytes::from(format!("{HEAD}{}}}", usage(body.len(), asks(&body, ASK_DETAILS))))),
        },
        "/ready" | "/health" => fixed(READY),
        "/server_info" => fixed(INFO),
        "/v1/loads" => fixed(LOADS),
        "/v1/models" => fixed(MODELS),
        _ => {
            let mut response = fixed("{}");
            *response.status_mut() = StatusCode::NOT_FOUND;
            response
        }
    })
}

const ASK_DETAILS: &[u8] = b"\"return_cached_tokens_details\":true";

/// What follows `"usage":`. The worker claims to have had everything but the last token, as one that served the prompt before.
fn usage(body_bytes: usize, details: bool) -> String {
    let prompt = body_bytes / 4;
    let cached = prompt.saturating_sub(1);
    let total = prompt + 32;
    let details = if details {
        format!(",\"sglext\":{{\"cached_tokens_details\":{{\"device\":{cached},\"host\":0}}}}")
    } else {
        String::new()
    };
    format!(
        "{{\"prompt_tokens\":{prompt},\"total_tokens\":{total},\"completion_tokens\":32,\
         \"prompt_tokens_details\":{{\"cached_tokens\":{cached}}},\"reasoning_tokens\":0}}{details}"
    )
}

fn json(body: Bytes) -> Response<Body> {
    let mut response = Response::new(Either::Left(Full::new(body)));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Whether the member is near one end of the body, which is where members other than the messages stand.
fn asks(body: &[u8], member: &[u8]) -> bool {
    const NEAR: usize = 1024;
    let head = body.get(..NEAR.min(body.len())).unwrap_or_default();
    let tail = body.get(body.len().saturating_sub(NEAR)..).unwrap_or_default();
    [head, tail].into_iter().any(|part| part.windows(member.len()).any(|window| window == member))
}

#[derive(Clone, Copy)]
struct Script {
    chunks: usize,
    group: usize,
    pause: Duration,
}

fn script(value: &HeaderValue) -> Script {
    let text = value.to_str().unwrap_or_default();
    let mut numbers = text.split(' ').map(|word| word.parse::<usize>().unwrap_or(1));
    let mut next = || numbers.next().unwrap_or(1);
    Script { chunks: next(), group: next().max(1), pause: Duration::from_millis(next() as u64) }
}

fn streamed(script: Script, usage: Option<String>) -> Response<Body> {
    let fixed = |text: &'static str| Bytes::from_static(text.as_bytes());
    let body = std::iter::repeat_n(fixed(CHUNK), script.chunks.saturating_sub(1));
    let pieces = body.chain([fixed(LAST)]).chain(usage.map(Bytes::from)).chain([fixed(DONE)]);
    let chunks = stream::iter(pieces.enumerate()).then(move |(place, piece)| async move {
        if place > 0 && place < script.chunks && place % script.group == 0 {
            tokio::time::sleep(script.pause).await;
        } else {
            // Lets the connection write what it has, so that every chunk is a write of its own.
            tokio::task::yield_now().await;
        }
        Ok(Frame::data(piece))
    });
    let chunks: Chunks = Box::pin(chunks);
    let mut response = Response::new(Either::Right(StreamBody::new(chunks)));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    response
}
