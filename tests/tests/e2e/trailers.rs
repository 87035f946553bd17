//! Trailers: from workers to clients that can take them, and what never passes.

use bytes::Bytes;
use http::HeaderMap;
use serde_json::Value;
use std::net::SocketAddr;
use tokio::net::TcpStream;
use turnstile_tests::harness::{
    Answer, CHAT, Connection, DEADLINE, PluginText, Request, Rig, Scripted, Setup, WorkerExt, built_in, chat,
    chat_stream,
};

const JSON: &str = r#"{"id":"1","object":"chat.completion","model":"sim","choices":[{"index":0,"message":{"role":"assistant","content":"Hi"},"finish_reason":"stop"}]}"#;
const EVENTS: &str = "data: {\"id\":\"1\",\"object\":\"chat.completion.chunk\",\"model\":\"sim\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"Hi\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";

/// A worker that answers over HTTP/1.1, in one chunk, with these trailers.
async fn worker(kind: &str, body: &str, trailers: &str) -> Scripted {
    let head = format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n");
    Scripted::start(format!("{head}{:x}\r\n{body}\r\n0\r\n{trailers}\r\n", body.len())).await
}

async fn rig(worker: &Scripted) -> Rig {
    Setup::new().external(worker.url()).start().await
}

fn asking(body: &Value) -> Request {
    Request::json(CHAT, body).header("te", "trailers")
}

fn field(name: &str, value: &str) -> (String, String) {
    (name.to_owned(), value.to_owned())
}

/// A request over HTTP/2, with what it gets.
async fn http2(addr: SocketAddr, body: &Value, trailers: Option<HeaderMap>) -> (u16, String, HeaderMap) {
    let exchange = async {
        let stream = TcpStream::connect(addr).await.unwrap();
        let (send, connection) = h2::client::handshake(stream).await.unwrap();
        let mut driver = tokio::task::JoinSet::new();
        driver.spawn(async move {
            let _ = connection.await;
        });
        let request = http::Request::post(format!("http://gateway{CHAT}")).header("content-type", "application/json");
        let mut send = send.ready().await.unwrap();
        let (answer, mut out) = send.send_request(request.body(()).unwrap(), false).unwrap();
        out.send_data(Bytes::from(body.to_string()), trailers.is_none()).unwrap();
        if let Some(trailers) = trailers {
            out.send_trailers(trailers).unwrap();
        }
        let (head, mut body) = answer.await.unwrap().into_parts();
        let mut whole = Vec::new();
        while let Some(piece) = body.data().await {
            whole.extend_from_slice(&piece.unwrap());
        }
        let trailers = body.trailers().await.unwrap().unwrap_or_default();
        (head.status.as_u16(), String::from_utf8(whole).unwrap(), trailers)
    };
    tokio::time::timeout(DEADLINE, exchange).await.expect("an end within the deadline")
}

#[tokio::test(flavor = "multi_thread")]
async fn trailers_of_a_worker_reach_clients_that_take_them() {
    for (kind, body, ask) in
        [("application/json", JSON, chat("Hello")), ("text/event-stream", EVENTS, chat_stream("Hello"))]
    {
        let worker = worker(kind, body, "X-Checksum: abc\r\nx-checksum: def\r\nServer-Timing: total;dur=5\r\n").await;
        let rig = rig(&worker).await;
        let expected = [field("x-checksum", "abc"), field("x-checksum", "def"), field("server-timing", "total;dur=5")];
        // Twice on a connection: what follows the trailers is the next answer.
        let mut connection = rig.connect().await;
        for _ in 0..2 {
            connection.send(&asking(&ask)).await;
            let answer: Answer = connection.answer().await;
            assert_eq!((answer.status, answer.complete), (200, true));
            assert_eq!(answer.text(), body, "{kind}");
            assert_eq!(answer.trailers, expected, "{kind}");
        }
        // One that does not say so gets none, and then one that does.
        connection.send(&Request::json(CHAT, &ask)).await;
        let answer = connection.answer().await;
        assert_eq!((answer.text().as_str(), answer.trailers.len()), (body, 0), "{kind}");
        connection.send(&asking(&ask)).await;
        assert_eq!(connection.answer().await.trailers, expected, "{kind}");
        let (status, text, trailers) = http2(rig.addr(), &ask, None).await;
        assert_eq!((status, text.as_str()), (200, body));
        assert_eq!(trailers.get_all("x-checksum").iter().collect::<Vec<_>>(), ["abc", "def"]);
        assert_eq!((trailers.len(), &trailers["server-timing"]), (3, &"total;dur=5".parse().unwrap()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_would_frame_route_or_authorize_never_passes() {
    let bad = "content-length: 1\r\ntransfer-encoding: chunked\r\nhost: other\r\nauthorization: Bearer x\r\nset-cookie: a=b\r\n\
               cookie: a=b\r\nte: trailers\r\ntrailer: x\r\nconnection: close\r\nkeep-alive: 1\r\nx-turnstile-worker: w\r\n";
    for bad in [bad.to_owned(), format!("{bad}x-fine: yes\r\n")] {
        let worker = worker("application/json", JSON, &bad).await;
        let rig = rig(&worker).await;
        let fine: Vec<_> = bad.contains("x-fine").then(|| field("x-fine", "yes")).into_iter().collect();
        let mut connection = rig.connect().await;
        for _ in 0..2 {
            connection.send(&asking(&chat("Hello"))).await;
            let answer = connection.answer().await;
            assert_eq!((answer.status, answer.text().as_str(), &answer.trailers), (200, JSON, &fine));
        }
        let (_, text, trailers) = http2(rig.addr(), &chat("Hello"), None).await;
        assert_eq!((text.as_str(), trailers.len()), (JSON, fine.len()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_or_too_large_trailers_are_left_out_of_a_whole_answer() {
    let many: String = (0..65).map(|n| format!("x-{n}: a\r\n")).collect();
    let large = format!("x-large: {}\r\n", "a".repeat(60_000));
    for (trailers, passes) in [(many.as_str(), 0), (large.as_str(), 1)] {
        let worker = worker("application/json", JSON, trailers).await;
        let rig = rig(&worker).await;
        let answer = rig.send(&asking(&chat("Hello"))).await;
        assert_eq!((answer.status, answer.text().as_str(), answer.complete), (200, JSON, true));
        assert_eq!(answer.trailers.len(), passes);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_breaks_off_in_its_trailers_is_broken() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let half = EVENTS.split("data: [DONE]").next().unwrap();
    let worker = Scripted::start(format!("{head}{:x}\r\n{half}\r\n0\r\nx-checksum abc\r\n\r\n", half.len())).await;
    let rig = rig(&worker).await;
    let answer = rig.send(&asking(&chat_stream("Hello"))).await;
    assert!(!answer.complete && answer.trailers.is_empty(), "{answer:?}");
}

/// Adds a trailer of each sort.
fn adding() -> PluginText {
    const PROGRAM: &str = "on response_trailers\\n  - add_header_map_value response_trailers x-added yes\\n  \
        - add_header_map_value response_trailers set-cookie a=b\\n  - remove_header_map_value response_trailers x-gone\\n";
    let plugin = PluginText::new("adding", "probe.wasm", "filter").key("callback_timeout_ms = 60000");
    plugin.key(format!("config = {{ program = \"{PROGRAM}\" }}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn filters_change_trailers_of_an_http11_worker() {
    let worker = worker("text/event-stream", EVENTS, "x-checksum: abc\r\nx-gone: 1\r\n").await;
    let probe = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../conformance/guests/probe.wasm")).unwrap();
    let all: Vec<PluginText> = std::iter::once(adding()).chain(built_in()).collect();
    let rig = Setup::new().external(worker.url()).file("probe.wasm", probe).plugins(&all).start().await;
    let answer = rig.send(&asking(&chat_stream("Hello"))).await;
    assert_eq!(answer.text(), EVENTS);
    assert_eq!(answer.trailers, [field("x-checksum", "abc"), field("x-added", "yes")]);
    let plain = rig.send(&Request::json(CHAT, &chat_stream("Hello"))).await;
    assert_eq!((plain.text().as_str(), plain.trailers.len(), plain.complete), (EVENTS, 0, true));
}

#[tokio::test(flavor = "multi_thread")]
async fn trailers_of_a_request_end_at_the_gateway() {
    let rig = Setup::new().start().await;
    let trailers: HeaderMap = [("x-checksum", "abc"), ("authorization", "Bearer x")]
        .into_iter()
        .map(|(name, value)| (name.parse::<http::HeaderName>().unwrap(), value.parse().unwrap()))
        .collect();
    assert_eq!(http2(rig.addr(), &chat("Hello"), Some(trailers)).await.0, 200);
    let mut connection: Connection = rig.connect().await;
    let body = chat("Hello").to_string();
    for _ in 0..2 {
        connection
            .write(&Request::new("POST", CHAT).header("content-type", "application/json").chunked(1).head())
            .await;
        connection.write(format!("{:x}\r\n{body}\r\n0\r\nx-checksum: abc\r\n\r\n", body.len()).as_bytes()).await;
        assert_eq!(connection.answer().await.status, 200);
    }
    let turns = rig.worker().on(CHAT);
    assert_eq!(turns.len(), 3);
    for turn in turns {
        assert!(!turn.headers.contains_key("x-checksum") && !turn.headers.contains_key("authorization"));
    }
}
