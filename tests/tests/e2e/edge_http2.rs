//! HTTP/2, frame by frame: requests that break the protocol, and what one connection may ask for.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use turnstile_tests::harness::{CHAT, DEADLINE, Rig, Setup, WorkerExt, chat, chat_stream, until};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;

struct Frame {
    kind: u8,
    flags: u8,
    stream: u32,
    payload: Vec<u8>,
}

/// A client that writes what frames it likes.
struct Client {
    tcp: TcpStream,
    buffer: Vec<u8>,
}

fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let size = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut bytes = size[1..].to_vec();
    bytes.extend_from_slice(&[kind, flags]);
    bytes.extend_from_slice(&stream.to_be_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

/// A header block of literals, each without an index and without Huffman code.
fn block<N: AsRef<[u8]>, V: AsRef<[u8]>>(fields: &[(N, V)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        for text in [name.as_ref(), value.as_ref()] {
            if text.len() < 127 {
                block.push(u8::try_from(text.len()).unwrap());
            } else {
                // A number of more than seven bits (RFC 7541, section 5.1).
                block.push(127);
                let mut rest = text.len() - 127;
                while rest >= 128 {
                    block.push(u8::try_from(rest % 128).unwrap() | 128);
                    rest /= 128;
                }
                block.push(u8::try_from(rest).unwrap());
            }
            block.extend_from_slice(text);
        }
    }
    block
}

fn head<'a>(length: &'a str, more: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let mut fields = vec![(":method", "POST"), (":scheme", "http"), (":authority", "gateway"), (":path", CHAT)];
    fields.push(("content-type", "application/json"));
    if !length.is_empty() {
        fields.push(("content-length", length));
    }
    fields.extend_from_slice(more);
    fields
}

impl Client {
    async fn open(rig: &Rig) -> Self {
        let mut client = Self { tcp: TcpStream::connect(rig.addr()).await.unwrap(), buffer: Vec::new() };
        client.write(&[PREFACE, &frame(SETTINGS, 0, 0, &[])].concat()).await;
        client
    }

    /// Writes. False when the peer has closed.
    async fn write(&mut self, bytes: &[u8]) -> bool {
        tokio::time::timeout(DEADLINE, self.tcp.write_all(bytes)).await.expect("the peer reads").is_ok()
    }

    async fn request(&mut self, stream: u32, fields: &[(&str, &str)], body: &[u8]) {
        let headers = frame(HEADERS, END_HEADERS, stream, &block(fields));
        self.write(&[headers, frame(DATA, END_STREAM, stream, body)].concat()).await;
    }

    /// The next frame; none at the end of the connection.
    async fn next(&mut self) -> Option<Frame> {
        loop {
            if let [a, b, c, kind, flags, stream @ ..] = self.buffer.as_slice()
                && let Some((stream, rest)) = stream.split_first_chunk::<4>()
                && let Some(payload) = rest.get(..u32::from_be_bytes([0, *a, *b, *c]) as usize)
            {
                let (payload, stream) = (payload.to_vec(), u32::from_be_bytes(*stream) & 0x7fff_ffff);
                let frame = Frame { kind: *kind, flags: *flags, stream, payload };
                self.buffer.drain(..9 + frame.payload.len());
                return Some(frame);
            }
            let read = tokio::time::timeout(DEADLINE, self.tcp.read_buf(&mut self.buffer));
            if read.await.expect("frames within the deadline").unwrap_or(0) == 0 {
                return None;
            }
        }
    }

    /// What becomes of a stream: its status, the code of its reset, or the end of the connection.
    async fn outcome(&mut self, stream: u32) -> Outcome {
        loop {
            let Some(frame) = self.next().await else { return Outcome::Closed };
            match frame.kind {
                HEADERS if frame.stream == stream => return Outcome::Status(status(&frame.payload)),
                RST_STREAM if frame.stream == stream => return Outcome::Reset(code(&frame.payload)),
                GOAWAY => return Outcome::GoAway(code(&frame.payload[4..])),
                SETTINGS if frame.flags & ACK == 0 => {
                    self.write(&frame_ack()).await;
                }
                _ => {}
            }
        }
    }

    /// Reads the answers of these streams to their ends. Their statuses.
    async fn whole_answers(&mut self, streams: &[u32]) -> BTreeMap<u32, u16> {
        let (mut statuses, mut ended) = (BTreeMap::new(), BTreeSet::new());
        while !streams.iter().all(|stream| ended.contains(stream)) {
            let frame = self.next().await.expect("whole answers before the end of the connection");
            match frame.kind {
                HEADERS => {
                    // What follows the first are trailers.
                    statuses.entry(frame.stream).or_insert_with(|| status(&frame.payload));
                }
                // What still comes for a stream that was refused is answered with a reset of its own.
                RST_STREAM if streams.contains(&frame.stream) => {
                    panic!("stream {} is reset: {}", frame.stream, code(&frame.payload))
                }
                GOAWAY => panic!("the connection ends: {}", code(&frame.payload[4..])),
                _ => {}
            }
            if matches!(frame.kind, HEADERS | DATA) && frame.flags & END_STREAM != 0 {
                ended.insert(frame.stream);
            }
        }
        statuses
    }
}

fn frame_ack() -> Vec<u8> {
    frame(SETTINGS, ACK, 0, &[])
}

#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Status(u16),
    Reset(u32),
    GoAway(u32),
    Closed,
}

const NO_ERROR: u32 = 0;
const PROTOCOL_ERROR: u32 = 1;
const REFUSED_STREAM: u32 = 7;
const ENHANCE_YOUR_CALM: u32 = 11;

fn code(payload: &[u8]) -> u32 {
    u32::from_be_bytes(payload[..4].try_into().unwrap())
}

/// The status of a header block that begins with it: an entry of the static table, or a literal by name 8 of that table.
fn status(block: &[u8]) -> u16 {
    match block {
        [indexed @ 0x88..=0x8e, ..] => [200, 204, 206, 304, 400, 404, 500][usize::from(indexed - 0x88)],
        // In Huffman code the digits 0, 1 and 2 have five bits, the others six.
        [_, coded, rest @ ..] if coded & 0x80 != 0 => huffman_number(&rest[..usize::from(coded & 0x7f)]),
        [_, size, rest @ ..] => std::str::from_utf8(&rest[..usize::from(*size)]).unwrap().parse().unwrap(),
        _ => panic!("{block:?}"),
    }
}

fn huffman_number(bytes: &[u8]) -> u16 {
    let mut bits = bytes.iter().flat_map(|byte| (0..8).rev().map(move |bit| u16::from(byte >> bit & 1)));
    let mut number = 0;
    for _ in 0..3 {
        let five = (0..5).fold(0, |bits_so_far, _| bits_so_far << 1 | bits.next().unwrap());
        let digit = if five < 3 { five } else { (five << 1 | bits.next().unwrap()) - 0x19 + 3 };
        number = number * 10 + digit;
    }
    number
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_break_the_protocol_reach_nobody() {
    let rig = Setup::new().start().await;
    let body = chat("Hello").to_string();
    let length = body.len().to_string();
    let without = |name: &str| head(&length, &[]).into_iter().filter(|(n, _)| *n != name).collect::<Vec<_>>();
    let with = |name, value| head(&length, &[(name, value)]);
    let instead = |name: &str, value| {
        head(&length, &[]).into_iter().map(|(n, v)| (n, if n == name { value } else { v })).collect()
    };
    let mut late = head(&length, &[]);
    late.rotate_left(1);
    let cases: Vec<(&str, Vec<(&str, &str)>)> = vec![
        ("no method", without(":method")),
        ("no path", without(":path")),
        ("no scheme", without(":scheme")),
        ("no authority", without(":authority")),
        ("an empty path", instead(":path", "")),
        ("a path without a slash", instead(":path", "v1/chat/completions")),
        ("a path with a host", instead(":path", "http://gateway/v1/chat/completions")),
        ("a path with a line end", instead(":path", "/v1/chat/completions HTTP/1.1\r\nx: y")),
        ("a method with a space", instead(":method", "POST /x")),
        ("a second path", with(":path", CHAT)),
        ("a second method", with(":method", "POST")),
        ("a pseudo header of a response", with(":status", "200")),
        ("an unknown pseudo header", with(":proto", "x")),
        ("a pseudo header behind the others", late),
        ("another host", with("host", "other")),
        ("a name in capitals", with("X-Capital", "a")),
        ("connection", with("connection", "close")),
        ("keep-alive", with("keep-alive", "5")),
        ("transfer-encoding", with("transfer-encoding", "chunked")),
        ("upgrade", with("upgrade", "h2c")),
        ("te other than trailers", with("te", "gzip")),
        ("a name with a space", with("x y", "a")),
        ("an empty name", with("", "a")),
        ("a value with a line end", with("x-a", "b\r\ncontent-length: 0")),
        ("a value with NUL", with("x-a", "b\0c")),
        ("a second length that differs", with("content-length", "5")),
        ("a length too short", instead("content-length", "5")),
        ("a length too long", instead("content-length", "5000")),
        ("a length of words", instead("content-length", "many")),
        ("a negative length", instead("content-length", "-1")),
    ];
    for (name, fields) in cases {
        let mut client = Client::open(&rig).await;
        client.request(1, &fields, body.as_bytes()).await;
        let outcome = client.outcome(1).await;
        let refused = [
            Outcome::Reset(PROTOCOL_ERROR),
            Outcome::GoAway(PROTOCOL_ERROR),
            Outcome::Status(400),
            Outcome::Status(404),
            Outcome::Status(405),
        ];
        assert!(refused.contains(&outcome), "{name}: {outcome:?}");
    }
    assert!(rig.worker().turns().is_empty(), "{:?}", rig.worker().turns());
    let mut client = Client::open(&rig).await;
    client.request(1, &head(&length, &[]), body.as_bytes()).await;
    assert_eq!(client.outcome(1).await, Outcome::Status(200), "the same request without a fault");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_checks_of_http1_hold() {
    let rig = Setup::new().set("limits.uri_bytes", "256").set("limits.header_count", "12").start().await;
    let body = chat("Hello").to_string();
    let long = format!("/live?{}", "a".repeat(300));
    let many: Vec<(String, String)> = (0..20).map(|n| (format!("x-{n}"), "a".into())).collect();
    let many: Vec<(&str, &str)> = many.iter().map(|(n, v)| (n.as_str(), v.as_str())).collect();
    let instead =
        |name: &str, value| head("", &[]).into_iter().map(|(n, v)| (n, if n == name { value } else { v })).collect();
    let big = "a".repeat(70_000);
    let cases: Vec<(u16, Vec<(&str, &str)>)> = vec![
        (414, instead(":path", &long)),
        (431, head("", &many)),
        (417, head("", &[("expect", "200-ok")])),
        (415, head("", &[("content-encoding", "compress")])),
        (405, instead(":method", "GET")),
        (404, instead(":path", "/open_session")),
        (413, head("999999999", &[])),
        (431, head("", &[("x-big", &big)])),
    ];
    for (expected, fields) in cases {
        let mut client = Client::open(&rig).await;
        let block = block(&fields);
        // Frames may be 16 KiB.
        for (n, part) in block.chunks(16_000).enumerate() {
            let last = (n + 1) * 16_000 >= block.len();
            let kind = if n == 0 { HEADERS } else { CONTINUATION };
            client.write(&frame(kind, if last { END_HEADERS } else { 0 }, 1, part)).await;
        }
        if expected != 413 {
            client.write(&frame(DATA, END_STREAM, 1, body.as_bytes())).await;
        }
        assert_eq!(client.outcome(1).await, Outcome::Status(expected));
    }
    assert!(rig.worker().turns().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_without_end_end_the_connection() {
    let rig = Setup::new().start().await;
    let mut client = Client::open(&rig).await;
    client.write(&frame(HEADERS, 0, 1, &block(&head("", &[])))).await;
    let more = block(&[("x-more", "a".repeat(10_000))]);
    while client.write(&frame(CONTINUATION, 0, 1, &more)).await {}
    nobody_is_connected(&rig).await;
}

async fn nobody_is_connected(rig: &Rig) {
    until("nobody is connected", async || rig.metric("turnstile_client_connections", &[]).await == 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_over_the_limit_are_refused() {
    let rig = Setup::new().set("limits.http2_streams", "2").start().await;
    rig.worker().hold().await;
    let body = chat("Hello").to_string();
    let mut client = Client::open(&rig).await;
    let settings = client.next().await.unwrap();
    assert_eq!(settings.kind, SETTINGS);
    let told = settings.payload.chunks(6).find(|entry| entry[..2] == [0, 3]).map(|entry| code(&entry[2..]));
    assert_eq!(told, Some(2), "the limit is announced");
    client.write(&frame_ack()).await;
    for stream in [1, 3] {
        client.request(stream, &head("", &[]), body.as_bytes()).await;
    }
    until("both are on their way", async || rig.in_flight() == 2).await;
    client.request(5, &head("", &[]), body.as_bytes()).await;
    assert_eq!(client.outcome(5).await, Outcome::Reset(REFUSED_STREAM));
    rig.worker().release().await;
    // To their ends: until then they count.
    assert_eq!(client.whole_answers(&[1, 3]).await, [(1, 200), (3, 200)].into());
    rig.idle().await;
    client.request(7, &head("", &[]), body.as_bytes()).await;
    assert_eq!(client.outcome(7).await, Outcome::Status(200));
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_opened_to_be_reset_cost_the_connection_and_leave_nothing() {
    let rig = Setup::new().start().await;
    let body = chat("Hello").to_string();
    for with_body in [false, true] {
        let mut client = Client::open(&rig).await;
        let mut stream = 1;
        let mut frames = Vec::new();
        while client.write(&frames).await {
            frames.clear();
            for _ in 0..100 {
                frames.extend(frame(HEADERS, END_HEADERS, stream, &block(&head("", &[]))));
                if with_body {
                    frames.extend(frame(DATA, END_STREAM, stream, body.as_bytes()));
                }
                frames.extend(frame(RST_STREAM, 0, stream, &8u32.to_be_bytes()));
                stream += 2;
            }
        }
        while let Some(frame) = client.next().await {
            if frame.kind == GOAWAY {
                assert_eq!(code(&frame.payload[4..]), ENHANCE_YOUR_CALM);
            }
        }
    }
    rig.idle().await;
    until("no request is left", async || rig.metric("turnstile_requests_in_progress", &[]).await == 0.0).await;
    let mut client = Client::open(&rig).await;
    client.request(1, &head("", &[]), body.as_bytes()).await;
    assert_eq!(client.outcome(1).await, Outcome::Status(200));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_without_streams_takes_its_leave() {
    let rig = Setup::new().set("timeouts.client_idle_s", "1").start().await;
    let body = chat("Hello").to_string();
    let mut client = Client::open(&rig).await;
    client.request(1, &head("", &[]), body.as_bytes()).await;
    assert_eq!(client.outcome(1).await, Outcome::Status(200));
    assert_eq!(client.outcome(3).await, Outcome::GoAway(NO_ERROR));
    nobody_is_connected(&rig).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_half_open_stream_does_not_hold_its_connection_for_ever() {
    let rig = Setup::new().set("timeouts.client_idle_s", "1").set("timeouts.client_body_s", "1").start().await;
    let mut client = Client::open(&rig).await;
    client.write(&frame(HEADERS, END_HEADERS, 1, &block(&head("", &[])))).await;
    assert_eq!(client.outcome(1).await, Outcome::Status(408));
    // Neither does one whose headers do not end.
    client.write(&frame(HEADERS, 0, 3, &block(&head("", &[])))).await;
    while client.next().await.is_some() {}
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_takes_all_its_streams_along() {
    let rig = Setup::new().sim(|c| c.speed = 1.0).start().await;
    let mut body = chat_stream("[[sim:tokens=20000]]");
    body["max_tokens"] = 20_000.into();
    let body = body.to_string();
    let mut client = Client::open(&rig).await;
    for stream in [1, 3, 5, 7] {
        client.request(stream, &head("", &[]), body.as_bytes()).await;
    }
    until("all are on the worker", async || rig.worker().engine_requests() == 4).await;
    drop(client);
    rig.idle().await;
    nobody_is_connected(&rig).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn http2_is_not_spoken_where_it_is_switched_off() {
    let rig = Setup::new().without_http2().start().await;
    let mut client = Client::open(&rig).await;
    let mut answer = Vec::new();
    let read = tokio::time::timeout(Duration::from_secs(30), client.tcp.read_to_end(&mut answer)).await;
    read.expect("the end of the connection").unwrap();
    assert!(answer.starts_with(b"HTTP/1.1 400 "), "{:?}", String::from_utf8_lossy(&answer));
}
