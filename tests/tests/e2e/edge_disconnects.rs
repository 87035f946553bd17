//! Clients that leave, at every point at which a turn can wait, with and without bytes behind their request; and clients that
//! stay and have simply sent their next request early.

use serde_json::json;
use turnstile_tests::harness::{CHAT, Connection, Request, Rig, Setup, WorkerExt, chat, chat_stream, until};

/// What may stand behind a request.
const BEHIND: [&[u8]; 4] = [b"", b"\n", b"x", b"GET /live HTTP/1.1\r\nhost: gateway\r\n\r\n"];

/// How a client leaves.
#[derive(Clone, Copy, Debug)]
enum Leaving {
    /// It closes. What it has not read makes that a reset.
    Closes,
    /// It says that it will send no more, and goes on listening.
    HalfCloses,
}

const LEAVINGS: [Leaving; 2] = [Leaving::Closes, Leaving::HalfCloses];

impl Leaving {
    async fn leave(self, mut connection: Connection) -> Option<Connection> {
        match self {
            Self::Closes => None,
            Self::HalfCloses => {
                connection.half_close().await;
                Some(connection)
            }
        }
    }
}

/// Writes a request with bytes behind it, in the same packet or in one of their own.
async fn begin(rig: &Rig, request: &Request, behind: &[u8], together: bool) -> Connection {
    let mut connection = rig.connect().await;
    let whole = [request.head(), request.framed_body()].concat();
    if together {
        connection.write(&[&whole, behind].concat()).await;
    } else {
        connection.write(&whole).await;
    }
    connection
}

/// Every way of leaving, with everything that may stand behind the request.
async fn in_every_way(mut case: impl AsyncFnMut(&[u8], bool, Leaving)) {
    for behind in BEHIND {
        for together in [true, false] {
            for leaving in LEAVINGS {
                case(behind, together, leaving).await;
            }
        }
    }
}

fn endless() -> Request {
    let mut body = chat_stream("[[sim:tokens=20000]]");
    body["max_tokens"] = json!(20_000);
    Request::json(CHAT, &body)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_during_a_stream_is_seen() {
    let rig = Setup::new().sim(|c| c.speed = 1.0).start().await;
    in_every_way(async |behind, together, leaving| {
        let mut connection = begin(&rig, &endless(), behind, together).await;
        assert_eq!(connection.head().await.status, 200);
        connection.piece().await.unwrap();
        if !together {
            connection.write(behind).await;
            // The gateway has had every chance to read those bytes when it has passed on more of the stream.
            connection.piece().await.unwrap();
            connection.piece().await.unwrap();
        }
        let kept = leaving.leave(connection).await;
        rig.idle().await;
        if let Some(mut kept) = kept {
            kept.closed().await;
        }
    })
    .await;
    rig.until_metric("turnstile_requests_total", &[("status", "499")], 16.0).await;
    assert_eq!(rig.metric("turnstile_requests_total", &[("status", "499")]).await, 16.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_before_the_first_byte_is_seen() {
    let rig = Setup::new().sim(|c| c.speed = 1.0).start().await;
    let mut body = chat("[[sim:tokens=20000]]");
    body["max_tokens"] = json!(20_000);
    in_every_way(async |behind, together, leaving| {
        rig.worker().clear_requests();
        let mut connection = begin(&rig, &Request::json(CHAT, &body), behind, together).await;
        until("the engine has it", async || rig.worker().engine_requests() == 1).await;
        if !together {
            connection.write(behind).await;
        }
        let _kept = leaving.leave(connection).await;
        until("an abort", async || rig.worker().on("/abort_request").len() == 1).await;
        rig.idle().await;
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_the_queue_is_seen() {
    let rig = Setup::new().set("admission.max_in_flight_per_worker", "1").start().await;
    rig.worker().hold().await;
    let mut first = rig.begin(&Request::json(CHAT, &chat("first"))).await;
    until("the place is taken", async || rig.in_flight() == 1).await;
    in_every_way(async |behind, together, leaving| {
        let mut connection = begin(&rig, &Request::json(CHAT, &chat("second")), behind, together).await;
        rig.until_queued(1).await;
        if !together {
            connection.write(behind).await;
        }
        let _kept = leaving.leave(connection).await;
        rig.until_queued(0).await;
    })
    .await;
    rig.worker().release().await;
    assert_eq!(first.answer().await.status, 200);
    assert_eq!(rig.worker().on(CHAT).len(), 1, "none of those who left was served");
}

#[tokio::test(flavor = "multi_thread")]
async fn pipelined_requests_are_answered_in_their_order() {
    let rig = Setup::new().start().await;
    let say = |text: &str| Request::json(CHAT, &chat(&format!("[[sim:text={text}]]")));
    let chunked = Request::json(CHAT, &chat_stream("[[sim:text=three]]")).chunked(5);
    let requests = [say("one"), Request::get("/live"), chunked, Request::get("/v1/models"), say("five")];
    let bytes: Vec<u8> = requests.iter().flat_map(|r| [r.head(), r.framed_body()].concat()).collect();
    // Whole, in halves that cut anywhere, and in single bytes.
    for piece in [bytes.len(), bytes.len() / 2 + 1, 100, 1] {
        let mut connection = rig.connect().await;
        for part in bytes.chunks(piece) {
            connection.write(part).await;
        }
        let mut texts = Vec::new();
        for _ in &requests {
            let answer = connection.answer().await;
            assert_eq!((answer.status, answer.complete), (200, true));
            texts.push(answer.text());
        }
        for (text, part) in texts.iter().zip(["one", "live", "thr", "list", "five"]) {
            assert!(text.contains(part), "{part} in pieces of {piece}: {text}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_comes_while_another_is_served_waits_its_turn() {
    let rig = Setup::new().start().await;
    rig.worker().hold().await;
    let mut connection = rig.begin(&Request::json(CHAT, &chat("[[sim:text=first]]"))).await;
    until("the turn is on its way", async || rig.in_flight() == 1).await;
    connection.send(&Request::json(CHAT, &chat("[[sim:text=second]]"))).await;
    connection.send(&Request::get("/live")).await;
    rig.worker().release().await;
    assert!(connection.answer().await.text().contains("first"));
    assert!(connection.answer().await.text().contains("second"));
    assert!(connection.answer().await.text().contains("live"));
}

#[tokio::test(flavor = "multi_thread")]
async fn pipelined_requests_behind_one_that_closes_are_not_served() {
    let rig = Setup::new().start().await;
    let mut connection = rig.connect().await;
    let last = Request::json(CHAT, &chat("[[sim:text=last]]")).header("connection", "close");
    let more = Request::json(CHAT, &chat("[[sim:text=more]]"));
    connection.write(&[last.head(), last.framed_body(), more.head(), more.framed_body()].concat()).await;
    let answer = connection.answer().await;
    assert_eq!((answer.status, answer.header("connection")), (200, Some("close")));
    connection.closed().await;
    assert_eq!(rig.worker().turns().len(), 1);
}
