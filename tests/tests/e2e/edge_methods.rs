//! Methods, request targets, protocol versions and expectations.

use bytes::Bytes;
use serde_json::json;
use turnstile_tests::harness::{CHAT, Connection, Request, Rig, Setup, WorkerExt, chat, chat_stream};

const INFERENCE: [&str; 13] = [
    CHAT,
    "/v1/completions",
    "/generate",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/tokenize",
    "/v1/tokenize",
    "/detokenize",
    "/v1/detokenize",
];
const LOCAL: [&str; 5] = ["/live", "/ready", "/health", "/v1/models", "/v1/models/sim"];

/// Head and body of an answer to bytes after which the connection ends.
async fn last_answer(rig: &Rig, bytes: &[u8]) -> (String, Bytes) {
    let mut connection = rig.connect().await;
    connection.write(bytes).await;
    let all = connection.everything().await;
    let end = all.windows(4).position(|w| w == b"\r\n\r\n").unwrap_or_else(|| panic!("no head in {all:?}"));
    (String::from_utf8_lossy(&all.slice(..end)).to_ascii_lowercase(), all.slice(end + 4..))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_method_that_a_route_does_not_take_is_405_and_says_which_it_takes() {
    let rig = Setup::new().start().await;
    for (paths, methods, allow) in [
        (&INFERENCE[..], &["GET", "PUT", "PATCH", "DELETE", "TRACE", "BREW", "get"][..], "POST, OPTIONS"),
        (&LOCAL, &["POST", "PUT", "PATCH", "DELETE", "TRACE", "BREW"], "GET, HEAD, OPTIONS"),
    ] {
        for path in paths {
            // All on one connection: such an answer does not end it.
            let mut connection = rig.connect().await;
            for method in methods {
                connection.send(&Request::new(method, path)).await;
                let answer = connection.answer().await;
                assert_eq!((answer.status, answer.header("allow")), (405, Some(allow)), "{method} {path}");
            }
        }
    }
    assert!(rig.worker().turns().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn head_gets_the_headers_of_get_and_no_body() {
    let rig = Setup::new().start().await;
    for path in LOCAL {
        let whole = rig.get(path).await;
        let request = format!("HEAD {path} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n");
        let (head, body) = last_answer(&rig, request.as_bytes()).await;
        assert!(head.starts_with("http/1.1 200 "), "{path}: {head}");
        assert!(head.contains(&format!("\r\ncontent-length: {}", whole.body.len())), "{path}: {head}");
        assert!(body.is_empty(), "{path}: {body:?}");
    }
    for path in INFERENCE {
        let request = format!("HEAD {path} HTTP/1.1\r\nhost: gateway\r\nconnection: close\r\n\r\n");
        let (head, body) = last_answer(&rig, request.as_bytes()).await;
        assert!(head.starts_with("http/1.1 405 ") && head.contains("\r\nallow: post, options"), "{path}: {head}");
        assert!(body.is_empty(), "{path}: {body:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn options_says_what_a_path_may_be_asked() {
    let rig = Setup::new().start().await;
    let mut connection = rig.connect().await;
    for (paths, allow) in
        [(&INFERENCE[..], "POST, OPTIONS"), (&LOCAL, "GET, HEAD, OPTIONS"), (&["*"], "GET, HEAD, POST, OPTIONS")]
    {
        for path in paths {
            connection.send(&Request::new("OPTIONS", path)).await;
            let answer = connection.answer().await;
            assert_eq!((answer.status, answer.header("allow")), (200, Some(allow)), "{path}");
            assert_eq!(answer.header("access-control-allow-origin"), None);
        }
    }
    for path in ["/flush_cache", "/nonsense"] {
        assert_eq!(rig.send(&Request::new("OPTIONS", path)).await.status, 404, "{path}");
    }
    assert_eq!(rig.send(&Request::new("GET", "*")).await.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_browser_that_asks_first_is_told_what_the_worker_would_tell() {
    let rig = Setup::new().start().await;
    let request = Request::new("OPTIONS", CHAT)
        .header("origin", "http://app.example")
        .header("access-control-request-method", "POST")
        .header("access-control-request-headers", "authorization, content-type");
    let answer = rig.send(&request).await;
    assert_eq!(answer.status, 200);
    for (name, value) in [
        ("access-control-allow-origin", "http://app.example"),
        ("access-control-allow-credentials", "true"),
        ("access-control-allow-methods", "POST, OPTIONS"),
        ("access-control-allow-headers", "authorization, content-type"),
        ("access-control-max-age", "600"),
    ] {
        assert_eq!(answer.header(name), Some(value), "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connect_opens_no_tunnel() {
    let rig = Setup::new().start().await;
    for target in ["gateway:443", "gateway"] {
        let request = format!("CONNECT {target} HTTP/1.1\r\nhost: {target}\r\n\r\nhello");
        let (head, body) = last_answer(&rig, request.as_bytes()).await;
        assert!(head.starts_with("http/1.1 4") && head.contains("\r\nconnection: close"), "{head}");
        assert!(!body.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_in_absolute_form_is_its_path() {
    let rig = Setup::new().start().await;
    assert_eq!(rig.send(&Request::json("http://gateway/v1/chat/completions", &chat("Hello"))).await.status, 200);
    assert_eq!(rig.send(&Request::get("http://gateway/live?x=1")).await.status, 200);
    assert_eq!(rig.send(&Request::get("http://gateway")).await.status, 404);
    assert_eq!(rig.send(&Request::get("http://gateway/flush_cache")).await.status, 404);
    assert_eq!(rig.worker().turns().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn paths_are_taken_as_they_are_written() {
    let rig = Setup::new().start().await;
    for path in [
        "//v1/chat/completions",
        "/v1/chat/completions/",
        "/v1//chat/completions",
        "/v1/./chat/completions",
        "/x/../v1/chat/completions",
        "/v1/chat%2Fcompletions",
        "/v1/chat/completion%73",
        "/V1/CHAT/COMPLETIONS",
        "/v1/chat/completions;a=b",
        "/v1/chat/completions%00",
        "/v1/chat/completions\u{e9}",
    ] {
        assert_eq!(rig.send(&Request::json(path, &chat("Hello"))).await.status, 404, "{path}");
    }
    assert!(rig.worker().turns().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_is_not_made() {
    let rig = Setup::new().start().await;
    let websocket = |method: &str, path: &str| {
        Request::new(method, path)
            .header("connection", "Upgrade")
            .header("upgrade", "websocket")
            .header("sec-websocket-version", "13")
            .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
    };
    assert_eq!(rig.send(&websocket("GET", CHAT)).await.status, 405);
    assert_eq!(rig.send(&websocket("GET", "/live")).await.status, 200);
    assert_eq!(rig.send(&websocket("GET", "/v1/realtime")).await.status, 404);
    for upgrade in ["h2c", "websocket", "TLS/1.0, HTTP/2.0"] {
        rig.worker().clear_requests();
        let request = Request::json(CHAT, &chat("Hello"))
            .header("connection", "Upgrade, HTTP2-Settings")
            .header("upgrade", upgrade)
            .header("http2-settings", "AAMAAABkAAQAAP__");
        let mut connection = rig.connect().await;
        for _ in 0..2 {
            connection.send(&request).await;
            let answer = connection.answer().await;
            assert_eq!((answer.status, answer.header("upgrade")), (200, None), "{upgrade}");
        }
        for name in ["upgrade", "http2-settings"] {
            assert!(!rig.worker().on(CHAT)[0].headers.contains_key(name), "{name}");
        }
    }
}

// === HTTP/1.0 ===

fn http10(request: &str, body: &str) -> Vec<u8> {
    format!("{request}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http10_client_gets_a_stream_that_ends_with_the_connection() {
    let rig = Setup::new().start().await;
    for fields in ["", "\r\nconnection: keep-alive"] {
        let body = chat_stream("[[sim:text=hello]]").to_string();
        let (head, answer) = last_answer(&rig, &http10(&format!("POST {CHAT} HTTP/1.0{fields}"), &body)).await;
        assert!(head.starts_with("http/1.1 200 "), "{head}");
        assert!(head.contains("\r\nconnection: close"), "{head}");
        assert!(!head.contains("transfer-encoding") && !head.contains("content-length"), "{head}");
        let answer = String::from_utf8(answer.to_vec()).unwrap();
        assert!(answer.starts_with("data: ") && answer.ends_with("data: [DONE]\n\n"), "{answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_http10_client_keeps_its_connection_only_if_it_asks() {
    let rig = Setup::new().start().await;
    let body = chat("[[sim:text=hello]]").to_string();
    let (head, answer) = last_answer(&rig, &http10(&format!("POST {CHAT} HTTP/1.0"), &body)).await;
    assert!(head.contains("\r\nconnection: close") && head.contains("\r\ncontent-length: "), "{head}");
    assert!(serde_json::from_slice::<serde_json::Value>(&answer).unwrap()["choices"].is_array());

    let mut connection = rig.connect().await;
    for _ in 0..3 {
        connection.write(&http10(&format!("POST {CHAT} HTTP/1.0\r\nconnection: keep-alive"), &body)).await;
        let answer = connection.answer().await;
        assert_eq!((answer.status, answer.header("connection")), (200, Some("keep-alive")));
        assert!(answer.header("content-length").is_some());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_shortest_request_is_answered_at_once() {
    let rig = Setup::new().start().await;
    // Shorter than what an HTTP/2 client opens with.
    let (head, _) = last_answer(&rig, b"GET / HTTP/1.0\r\n\r\n").await;
    assert!(head.starts_with("http/1.1 404 "), "{head}");
    // And one that begins like it.
    let (head, _) = last_answer(&rig, b"PRI /live HTTP/1.0\r\n\r\n").await;
    assert!(head.starts_with("http/1.1 405 "), "{head}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_stream_is_an_error_for_an_http10_client() {
    let event = r#"data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}"#;
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    // The worker's answer breaks its own framing behind the first event.
    let worker = turnstile_tests::harness::Scripted::start(format!("{head}{:x}\r\n{event}\n\n\r\nzz", event.len() + 2));
    let worker = worker.await;
    let rig = Setup::new().workers(0).external(worker.url()).start().await;
    let mut stream = tokio::net::TcpStream::connect(rig.addr()).await.unwrap();
    let request = http10(&format!("POST {CHAT} HTTP/1.0"), &chat_stream("hello").to_string());
    tokio::io::AsyncWriteExt::write_all(&mut stream, &request).await.unwrap();
    let mut answer = Vec::new();
    let end = tokio::io::AsyncReadExt::read_to_end(&mut stream, &mut answer).await;
    assert_eq!(end.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
}

// === Expect ===

#[tokio::test(flavor = "multi_thread")]
async fn an_expectation_that_nobody_meets_is_417() {
    let rig = Setup::new().start().await;
    for expect in ["200-ok", "100-continue, 200-ok", "100-continue;q=1", ""] {
        let answer = rig.send(&Request::json(CHAT, &chat("Hello")).header("expect", expect)).await;
        assert_eq!(answer.status, 417, "{expect:?}");
        assert_eq!(answer.error()["code"], "expectation_failed");
        assert!(answer.error()["message"].as_str().unwrap().contains("100-continue"));
        assert_eq!(rig.send(&Request::get("/live").header("expect", expect)).await.status, 417);
    }
    let answer = rig.send(&Request::json("/v1/messages", &json!({})).header("expect", "x")).await;
    assert_eq!((answer.status, &answer.json()["type"]), (417, &json!("error")));
    assert!(rig.worker().turns().is_empty());
}

/// The status of the first head that comes back.
async fn first_status(rig: &Rig, bytes: &[u8]) -> u16 {
    let mut connection = Connection::open(rig.addr()).await;
    connection.write(bytes).await;
    connection.head().await.status
}

#[tokio::test(flavor = "multi_thread")]
async fn only_who_waits_is_told_to_go_on() {
    let rig = Setup::new().start().await;
    let body = chat("Hello").to_string();
    let request = |version: &str, expect: &str, body: &str| {
        http10(&format!("POST {CHAT} {version}\r\nhost: gateway\r\nexpect: {expect}"), body)
    };
    assert_eq!(first_status(&rig, &request("HTTP/1.1", "100-Continue", &body)).await, 100);
    assert_eq!(first_status(&rig, &request("HTTP/1.0", "100-continue", &body)).await, 200, "HTTP/1.0 knows no 100");
    assert_eq!(first_status(&rig, &request("HTTP/1.0", "anything", &body)).await, 200);
    assert_eq!(first_status(&rig, &request("HTTP/1.1", "100-continue", "")).await, 400, "no body is waited for");
}
