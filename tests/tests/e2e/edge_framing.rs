//! Requests whose end two parsers might see in different places: refused, all of them, with the end of the connection, and
//! nothing of them or behind them reaches a worker.

use turnstile_tests::harness::{CHAT, Request, Rig, Setup, WorkerExt, chat, send};

const START: &str = "POST /v1/chat/completions HTTP/1.1\r\n";
const HOST: &str = "Host: gateway\r\nContent-Type: application/json\r\n";
/// A chat request as a body of 66 bytes.
const BODY: &str = r#"{"model":"sim","messages":[{"role":"user","content":"Hello you"}]}"#;
/// What an attacker would have somebody take for a request of its own.
const SMUGGLED: &str = "POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nContent-Length: 66\r\n\r\n";

fn chunked(body: &str) -> String {
    format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len())
}

/// Heads that are refused whatever stands behind them.
fn heads() -> Vec<(&'static str, String)> {
    let with = |fields: &str| format!("{START}{HOST}{fields}\r\n");
    let length = format!("Content-Length: {}\r\n", BODY.len());
    let te = "Transfer-Encoding: chunked\r\n";
    vec![
        ("length and coding", with(&format!("{length}{te}"))),
        ("coding and length", with(&format!("{te}{length}"))),
        ("length 0 and coding", with(&format!("Content-Length: 0\r\n{te}"))),
        ("bad length and coding", with(&format!("Content-Length: x\r\n{te}"))),
        ("two lengths that differ", with(&format!("{length}Content-Length: 5\r\n"))),
        ("two lengths that agree", with(&format!("{length}{length}"))),
        ("a list of lengths", with("Content-Length: 66, 66\r\n")),
        ("a length with a sign", with("Content-Length: +66\r\n")),
        ("a negative length", with("Content-Length: -1\r\n")),
        ("a length in hexadecimal", with("Content-Length: 0x42\r\n")),
        ("a length in two words", with("Content-Length: 6 6\r\n")),
        ("an empty length", with("Content-Length:\r\n")),
        ("a length over 64 bits", with("Content-Length: 18446744073709551682\r\n")),
        ("a length with a dot", with("Content-Length: 66.0\r\n")),
        ("a name with a space", with("Content-Length : 66\r\n")),
        ("a coding's name with a space", with("Transfer-Encoding : chunked\r\n")),
        ("a coding's name with a tab", with("Transfer-Encoding\t: chunked\r\n")),
        ("two codings in two fields", with(&format!("{te}{te}"))),
        ("chunked twice in a list", with("Transfer-Encoding: chunked, chunked\r\n")),
        ("chunked not last", with("Transfer-Encoding: chunked, identity\r\n")),
        ("another coding below", with("Transfer-Encoding: gzip, chunked\r\n")),
        ("identity", with("Transfer-Encoding: identity\r\n")),
        ("identity before chunked", with("Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n")),
        ("an unknown coding", with("Transfer-Encoding: xchunked\r\n")),
        ("chunked with a parameter", with("Transfer-Encoding: chunked;q=1\r\n")),
        ("chunked in quotes", with("Transfer-Encoding: \"chunked\"\r\n")),
        ("chunked behind a control byte", with("Transfer-Encoding: \u{b}chunked\r\n")),
        ("chunked behind a comma", with("Transfer-Encoding: ,chunked\r\n")),
        ("an empty coding", with("Transfer-Encoding:\r\n")),
        ("a coding over two lines", with("Transfer-Encoding:\r\n chunked\r\n")),
        ("a folded field", with(&format!("X-A: b\r\n c: d\r\n{length}"))),
        ("a folded first field", format!("{START} {HOST}{length}\r\n")),
        ("a bare line feed", with(&format!("X-A: b\n{length}"))),
        ("a bare line feed behind the request line", format!("{}\n{HOST}{length}\r\n", START.trim_end())),
        ("bare line feeds only", with(&length).replace("\r\n", "\n")),
        ("a bare line feed at the end", format!("{START}{HOST}{length}\n")),
        ("a bare carriage return in a value", with(&format!("X-A: b\r{length}"))),
        ("a bare carriage return in a name", with(&format!("X\r-A: b\r\n{length}"))),
        ("NUL in a value", with(&format!("X-A: b\0c\r\n{length}"))),
        ("NUL in a name", with(&format!("X\0A: b\r\n{length}"))),
        ("a control byte in a value", with(&format!("X-A: b\u{1}c\r\n{length}"))),
        ("a name of two words", with(&format!("X A: b\r\n{length}"))),
        ("no name", with(&format!(": b\r\n{length}"))),
        ("no colon", with(&format!("X-A\r\n{length}"))),
        ("no host", format!("{START}{length}\r\n")),
        ("two hosts", with(&format!("Host: gateway\r\n{length}"))),
        ("two hosts that differ", with(&format!("Host: other\r\n{length}"))),
        ("a host with a user", format!("{START}Host: a@gateway\r\n{length}\r\n")),
        ("a target of another host", format!("POST http://other{CHAT} HTTP/1.1\r\n{HOST}{length}\r\n")),
        ("chunks in HTTP/1.0", format!("POST {CHAT} HTTP/1.0\r\n{HOST}{te}\r\n")),
        ("HTTP/2 in a line", format!("POST {CHAT} HTTP/2.0\r\n{HOST}{length}\r\n")),
        ("HTTP/1.2", format!("POST {CHAT} HTTP/1.2\r\n{HOST}{length}\r\n")),
        ("another protocol", format!("POST {CHAT} ICAP/1.0\r\n{HOST}{length}\r\n")),
        ("no version", format!("POST {CHAT}\r\n{HOST}{length}\r\n")),
        ("a space behind the version", format!("POST {CHAT} HTTP/1.1 \r\n{HOST}{length}\r\n")),
        ("a method with a colon", format!("PO:ST {CHAT} HTTP/1.1\r\n{HOST}{length}\r\n")),
        ("a target with a space", format!("POST /v1/chat/comple tions HTTP/1.1\r\n{HOST}{length}\r\n")),
        ("no target", format!("POST  HTTP/1.1\r\n{HOST}{length}\r\n")),
        ("a target without a slash", format!("POST v1/chat/completions HTTP/1.1\r\n{HOST}{length}\r\n")),
        ("noise", "\u{16}\u{3}\u{1}\u{2}\0\u{1}\0\u{1}\u{fc}\u{3}\u{3}\r\n\r\n".into()),
    ]
}

/// Chunked bodies that break their coding.
fn chunks() -> Vec<(&'static str, String)> {
    let size = format!("{:x}", BODY.len());
    vec![
        ("a size with a prefix", format!("0x{size}\r\n{BODY}\r\n0\r\n\r\n")),
        ("a size with a sign", format!("+{size}\r\n{BODY}\r\n0\r\n\r\n")),
        ("a negative size", format!("-{size}\r\n{BODY}\r\n0\r\n\r\n")),
        ("no size", format!("\r\n{BODY}\r\n0\r\n\r\n")),
        ("a size over 64 bits", format!("1{}\r\n{BODY}\r\n0\r\n\r\n", "0".repeat(16))),
        ("a size near 64 bits", format!("fffffffffffffffe\r\n{BODY}\r\n0\r\n\r\n")),
        ("a size no digit", format!("zz\r\n{BODY}\r\n0\r\n\r\n")),
        ("a size too small", format!("{:x}\r\n{BODY}\r\n0\r\n\r\n", BODY.len() - 1)),
        ("a size too large", format!("{:x}\r\n{BODY}\r\n0\r\n\r\n", BODY.len() + 1)),
        ("a bare line feed behind the size", format!("{size}\n{BODY}\r\n0\r\n\r\n")),
        ("a bare line feed behind the data", format!("{size}\r\n{BODY}\n0\r\n\r\n")),
        ("a bare carriage return behind the size", format!("{size}\r{BODY}\r\n0\r\n\r\n")),
        ("a bare line feed in an extension", format!("{size};a\n{BODY}\r\n0\r\n\r\n")),
        ("bare line feeds at the end", format!("{size}\r\n{BODY}\r\n0\n\n")),
        ("a bare line feed behind a trailer", format!("{size}\r\n{BODY}\r\n0\r\nX-A: b\n\r\n")),
    ]
}

/// Sends bytes, then what would be a second request, and gives what comes back up to the end.
async fn outcome(rig: &Rig, bytes: &str) -> String {
    let mut connection = rig.connect().await;
    connection.write(&[bytes.as_bytes(), SMUGGLED.as_bytes(), BODY.as_bytes()].concat()).await;
    String::from_utf8_lossy(&connection.everything().await).into_owned()
}

/// Checks that a request was refused once, for good, and in words.
fn assert_refused(name: &str, answer: &str) {
    assert!(answer.starts_with("HTTP/1.1 400 "), "{name}: {answer:?}");
    assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{name}: more than one answer: {answer:?}");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.to_ascii_lowercase().contains("\r\nconnection: close"), "{name}: {head:?}");
    let body: serde_json::Value = serde_json::from_str(body).unwrap_or_else(|e| panic!("{name}: {e}: {body:?}"));
    assert_eq!(body["error"]["code"], "bad_request", "{name}");
    assert!(body["error"]["message"].as_str().unwrap().len() > 10, "{name}: {body}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_that_two_parsers_may_read_differently_is_400_and_the_end() {
    let rig = Setup::new().start().await;
    for (name, head) in heads() {
        for body in [BODY.to_owned(), chunked(BODY)] {
            assert_refused(name, &outcome(&rig, &format!("{head}{body}")).await);
        }
    }
    assert!(rig.worker().turns().is_empty(), "{:?}", rig.worker().turns());
    let refused = rig.metric("turnstile_refusals_total", &[("code", "bad_request")]).await;
    assert_eq!(refused, 2.0 * heads().len() as f64);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_breaks_its_chunks_is_400_and_the_end() {
    let rig = Setup::new().start().await;
    for (name, body) in chunks() {
        let head = format!("{START}{HOST}Transfer-Encoding: chunked\r\n\r\n");
        assert_refused(name, &outcome(&rig, &format!("{head}{body}")).await);
    }
    assert!(rig.worker().turns().is_empty(), "{:?}", rig.worker().turns());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_ends_early_is_no_turn() {
    let rig = Setup::new().start().await;
    let length = format!("{START}{HOST}Content-Length: {}\r\n\r\n{BODY}", BODY.len() + 1);
    let chunks = format!("{START}{HOST}Transfer-Encoding: chunked\r\n\r\n{}", chunked(BODY).trim_end());
    for bytes in [length, chunks] {
        let mut connection = rig.connect().await;
        connection.write(bytes.as_bytes()).await;
        connection.half_close().await;
        assert!(connection.everything().await.is_empty());
    }
    assert!(rig.worker().turns().is_empty());
    rig.until_metric("turnstile_requests_total", &[("status", "499")], 2.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn chunk_extensions_and_trailers_are_dropped() {
    let rig = Setup::new().start().await;
    let size = BODY.len();
    for body in [
        format!("{size:x};name=value\r\n{BODY}\r\n0\r\n\r\n"),
        format!("{size:X}\r\n{BODY}\r\n000\r\n\r\n"),
        format!("{size:x}\r\n{BODY}\r\n0\r\nX-Trailer: a\r\nContent-Length: 5\r\nX-Data-Parallel-Rank: 1\r\n\r\n"),
    ] {
        rig.worker().clear_requests();
        let mut connection = rig.connect().await;
        let head = format!("{START}{HOST}Transfer-Encoding: chunked\r\nTrailer: X-Trailer\r\n\r\n");
        connection.write(format!("{head}{body}").as_bytes()).await;
        assert_eq!(connection.answer().await.status, 200, "{body}");
        connection.send(&Request::get("/live")).await;
        assert_eq!(connection.answer().await.status, 200, "the connection is in step");
        let seen = &rig.worker().on(CHAT)[0];
        assert_eq!(seen.json()["messages"][0]["content"], "Hello you");
        for name in ["x-trailer", "trailer", "x-data-parallel-rank", "transfer-encoding"] {
            assert!(!seen.headers.contains_key(name), "{name}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn endless_trailers_end_with_the_connection() {
    let rig = Setup::new().start().await;
    let mut connection = rig.connect().await;
    let head = format!("{START}{HOST}Transfer-Encoding: chunked\r\n\r\n{:x}\r\n{BODY}\r\n0\r\n", BODY.len());
    connection.write(head.as_bytes()).await;
    connection.write("X-Trailer: a\r\n".repeat(10_000).as_bytes()).await;
    let answer = String::from_utf8_lossy(&connection.everything().await).into_owned();
    assert_refused("endless trailers", &answer);
    assert!(rig.worker().turns().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_request_may_have_is_not_refused() {
    let rig = Setup::new().start().await;
    let length = format!("Content-Length: {}\r\n", BODY.len());
    for head in [
        format!("{START}{HOST}{length}\r\n"),
        format!("\r\n{START}{HOST}{length}\r\n"),
        format!("{START}{HOST}content-LENGTH:\t {}  \r\n\r\n", BODY.len()),
        format!("{START}Host:\r\nContent-Type: application/json\r\n{length}\r\n"),
        format!("{START}{HOST}{length}X-Bytes: caf\u{e9}\r\nX-Empty:\r\n\r\n"),
        format!("POST http://gateway{CHAT} HTTP/1.1\r\n{HOST}{length}\r\n"),
        format!("POST {CHAT}?a=b%20c HTTP/1.1\r\n{HOST}{length}\r\n"),
    ] {
        let mut connection = rig.connect().await;
        connection.write(format!("{head}{BODY}").as_bytes()).await;
        assert_eq!(connection.answer().await.status, 200, "{head:?}");
    }
    let plain = send(rig.addr(), &Request::json(CHAT, &chat("Hello"))).await;
    assert_eq!(plain.status, 200);
}
