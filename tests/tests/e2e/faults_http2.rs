//! What a client of HTTP/2 sees of a stream that breaks off: a reset, where on HTTP/1.1 the connection ends.

use turnstile_sim::SimConfig;
use turnstile_tests::harness::{Break, CHAT, FAULT, Faulty, Setup, chat_stream, until};

/// The ways to break a stream after its first byte.
const MIDWAY: [Break; 6] = [
    Break::ResetMidway,
    Break::CutMidway,
    Break::StallMidway,
    Break::LengthTooLong,
    Break::LengthTooShort,
    Break::BadChunk,
];

/// How often each way is tried at the most, until a client gets the last event: on a busy machine the reset overtakes it.
const ROUNDS: usize = 10;

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_breaks_off_is_reset_and_its_connection_goes_on() {
    let workers = Faulty::start(1, &SimConfig { speed: 1000.0, ..SimConfig::default() }).await;
    let setup = Setup::new().workers(0).external(workers[0].url());
    let rig = setup.set("timeouts.between_bytes_s", "1").set("ejection.consecutive_faults", "0").start().await;
    let client = reqwest::Client::builder().http2_prior_knowledge().build().unwrap();
    let url = format!("http://{}{CHAT}", rig.addr());
    let body = chat_stream("Hello [[sim:tokens=40]]");
    let mut told = 0;
    for (round, kind) in (0..ROUNDS).flat_map(|round| MIDWAY.map(|kind| (round, kind))) {
        if round > 0 && told > 0 {
            break;
        }
        let id = format!("{kind:?}-{round}");
        let request = client.post(&url).header(FAULT, format!("always {}", kind.name())).header("x-request-id", &id);
        let mut answer = request.json(&body).send().await.unwrap();
        assert_eq!((answer.version(), answer.status().as_u16()), (http::Version::HTTP_2, 200), "{id}");
        let mut text = answer.chunk().await.unwrap().expect("the beginning of a stream").to_vec();
        workers[0].begun(&id);
        let error = loop {
            match answer.chunk().await {
                Ok(Some(piece)) => text.extend_from_slice(&piece),
                Ok(None) => panic!("{id}: it ended as if it were whole"),
                Err(error) => break error,
            }
        };
        let text = String::from_utf8(text).unwrap();
        told += usize::from(text.contains("broken_off"));
        assert!(format!("{error:?}").contains("Reset"), "{id}: {error:?}");
        let record = rig.record(&id).await;
        assert_eq!((&record["status"], &record["attempts"]), (&200.into(), &1.into()), "{id}");
        // Others on the same connection are none the worse for it.
        let whole = client.post(&url).json(&body).send().await.unwrap().text().await.unwrap();
        assert!(whole.ends_with("data: [DONE]\n\n"), "{id}: {whole}");
    }
    assert!(told > 0, "the last event comes before the reset");
    until("nothing in flight", async || rig.in_flight() == 0).await;
}
