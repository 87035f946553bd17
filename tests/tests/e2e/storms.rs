//! Storms: overlapping turns, clients that leave, closes and expiries, on one session and on many, over real sockets.
//!
//! What each client does follows from a seed, which a failure names. The simulated workers end as a stock server does where a
//! plain proxy would end it, so a worker that lives is half of the proof.

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use turnstile_fleet::cost::mix;
use turnstile_sim::{Fault, FaultKind, Recorded};
use turnstile_tests::harness::{CHAT, Request, Rig, Setup, WorkerExt, until};

/// Turns to which the queue of a worker is full, where workers fail.
const FULL: u32 = 10;

/// Numbers that follow from a seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0) % end
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Stream,
    Tag,
}

struct Storm {
    seed: u64,
    mode: Mode,
    busy: &'static str,
    sessions: u64,
    turns: u64,
    at_once: usize,
    faults: bool,
}

/// What the clients saw, by status; 0 for those that left.
type Seen = BTreeMap<u16, u64>;

impl Storm {
    async fn rig(&self) -> Rig {
        let setup = Setup::new().sim(|c| {
            c.enable_streaming_session = true;
            c.enable_session_radix_cache = true;
            c.crash_mode = true;
            c.speed = 300.0;
            c.record_limit = 100_000;
        });
        let busy = format!("{:?}", self.busy);
        setup.workers(2).set("sessions.busy", &busy).set("sessions.stream_rows_fraction", "0.9").start().await
    }

    fn request(&self, dice: &mut Dice, number: u64) -> Request {
        let session = format!("s{}", dice.below(self.sessions));
        let action = ["open", "open", "open", "none", "none", "bind", "close"][dice.below(7) as usize];
        let mut control = json!({"session_id": session, "timeout": 0.2 + dice.below(5) as f64 / 10.0});
        if action != "none" {
            control["action"] = json!(action);
        }
        let tenant = format!("tenant-{}", dice.below(2));
        let (text, tokens) = (format!("turn <{number}> of ({tenant}) in a storm"), 1 + dice.below(60));
        let stream = dice.below(3) > 0;
        let nvext = json!({"session_control": control});
        let request = match self.mode {
            Mode::Stream => Request::json(
                "/generate",
                &json!({
                    "text": text, "stream": stream, "nvext": nvext,
                    "sampling_params": {"max_new_tokens": tokens, "ignore_eos": true},
                }),
            ),
            Mode::Tag => Request::json(
                CHAT,
                &json!({
                    "model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": tokens,
                    "stream": stream, "nvext": nvext,
                }),
            ),
        };
        request.header("authorization", &format!("Bearer {tenant}"))
    }

    /// One client: some turns, each to its end or left at any moment.
    async fn client(&self, rig: &Rig, client: u64) -> Seen {
        let mut dice = Dice(self.seed ^ mix(client));
        let mut seen = Seen::new();
        for turn in 0..self.turns {
            let request = self.request(&mut dice, client * self.turns + turn);
            let leaves = (dice.below(4) == 0).then(|| Duration::from_micros(dice.below(20_000)));
            let mut connection = rig.begin(&request).await;
            let status = match leaves {
                Some(after) => match tokio::time::timeout(after, connection.answer()).await {
                    Ok(answer) => answer.status,
                    Err(_) => 0,
                },
                None => connection.answer().await.status,
            };
            *seen.entry(status).or_insert(0) += 1;
            tokio::time::sleep(Duration::from_micros(dice.below(3_000))).await;
        }
        seen
    }

    async fn run(&self) -> Seen {
        let rig = self.rig().await;
        if self.faults {
            for worker in &rig.workers {
                let slow = FaultKind::Delay(Duration::from_millis(20));
                let full_queue = FaultKind::ErrorEvent(503, "The request queue is full.".into());
                worker.faults().add(Fault::times(20, FaultKind::Status(500, None)).on("/close_session"));
                worker.faults().add(Fault::times(5, FaultKind::Status(400, None)).on("/open_session"));
                worker.faults().add(Fault::times(20, slow).on("/open_session"));
                worker.faults().add(Fault::times(FULL, full_queue));
            }
        }
        let clients = self.sessions.max(self.at_once as u64);
        let work = futures::stream::iter((0..clients).map(|client| self.client(&rig, client)));
        let all: Vec<Seen> =
            futures::StreamExt::collect(futures::StreamExt::buffer_unordered(work, self.at_once)).await;
        let mut seen = Seen::new();
        for (status, count) in all.into_iter().flatten() {
            *seen.entry(status).or_insert(0) += count;
        }
        self.settled(&rig).await;
        seen
    }

    /// Nothing is left, anywhere, once every session is closed or has expired.
    async fn settled(&self, rig: &Rig) {
        let seed = self.seed;
        rig.idle().await;
        let sessions = &rig.gateway().fleet.sessions;
        until(&format!("seed {seed}: all counts are zero"), async || {
            sessions.counts() == turnstile_fleet::session::Counts::default()
        })
        .await;
        for worker in &rig.workers {
            assert!(worker.is_alive(), "seed {seed}: a worker was ended");
            assert_eq!(worker.open_sessions(), (0, 0), "seed {seed}: sessions left in an engine");
        }
        until(&format!("seed {seed}: no side request is pending"), async || {
            rig.admin("/side").await.json()["pending"] == json!([])
        })
        .await;
        assert_eq!(rig.metric("turnstile_session_waiting", &[]).await, 0.0);
        self.nothing_twice(rig).await;
        self.apart(rig);
    }

    /// Each turn reached a worker once, unless it was refused before it ran.
    async fn nothing_twice(&self, rig: &Rig) {
        let mut sent: BTreeMap<String, u64> = BTreeMap::new();
        for request in rig.workers.iter().flat_map(WorkerExt::turns) {
            *sent.entry(between(&request, '<', '>')).or_insert(0) += 1;
        }
        let again: u64 = sent.values().map(|count| count - 1).sum();
        // A client that left in between is not served again.
        until(&format!("seed {}: {again} turns sent again, and as many refused", self.seed), async || {
            let log = rig.access_log();
            let refused: usize = log.iter().map(|line| line["faults"].as_array().map_or(0, Vec::len)).sum();
            again <= refused as u64 || self.faults
        })
        .await;
        assert!(sent.values().all(|count| *count <= 3), "seed {}: more than retry.attempts", self.seed);
    }

    /// No engine session served two tenants.
    fn apart(&self, rig: &Rig) {
        let mut owners: BTreeMap<String, String> = BTreeMap::new();
        for request in rig.workers.iter().flat_map(WorkerExt::turns) {
            let body = request.json();
            let ids = [&body["session_id"], &body["session_params"]["id"]];
            let Some(id) = ids.into_iter().find_map(Value::as_str) else { continue };
            let tenant = between(&request, '(', ')');
            let owner = owners.entry(id.to_owned()).or_insert_with(|| tenant.clone());
            assert_eq!(*owner, tenant, "seed {}: {id}", self.seed);
        }
    }
}

/// The part of a turn's text between two marks.
fn between(request: &Recorded, first: char, last: char) -> String {
    let text = String::from_utf8_lossy(&request.body).into_owned();
    text.split_once(first).and_then(|(_, rest)| rest.split_once(last)).unwrap().0.to_owned()
}

fn on_one(seed: u64, mode: Mode, busy: &'static str) -> Storm {
    Storm { seed, mode, busy, sessions: 1, turns: 12, at_once: 16, faults: false }
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_aborts_and_closes_on_one_streaming_session() {
    for seed in 0..3 {
        let seen = on_one(seed, Mode::Stream, "wait").run().await;
        assert!(seen.keys().all(|status| [0, 200].contains(status)), "seed {seed}: {seen:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_aborts_and_closes_on_one_streaming_session_that_refuses_busy_turns() {
    for seed in 10..13 {
        let seen = on_one(seed, Mode::Stream, "refuse").run().await;
        assert!(seen.keys().all(|status| [0, 200, 409].contains(status)), "seed {seed}: {seen:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_aborts_and_closes_on_one_tagged_session() {
    let seen = on_one(20, Mode::Tag, "wait").run().await;
    assert!(seen.keys().all(|status| [0, 200].contains(status)), "{seen:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_aborts_closes_and_expiries_on_a_thousand_sessions() {
    for (seed, mode, busy) in [(30, Mode::Stream, "wait"), (31, Mode::Stream, "refuse"), (32, Mode::Tag, "wait")] {
        let storm = Storm { seed, mode, busy, sessions: 1_000, turns: 2, at_once: 48, faults: false };
        let seen = storm.run().await;
        assert!(seen.keys().all(|status| [0, 200, 409].contains(status)), "seed {seed}: {seen:?}");
        assert!(seen[&200] > 1_000, "seed {seed}: {seen:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_with_refused_opens_failing_closes_and_full_queues() {
    for (seed, busy) in [(40, "wait"), (41, "refuse")] {
        let storm = Storm { seed, mode: Mode::Stream, busy, sessions: 24, turns: 20, at_once: 24, faults: true };
        let seen = storm.run().await;
        if busy == "wait" {
            assert!(seen[&200] > 200, "seed {seed}: {seen:?}");
            continue;
        }
        // How many turns meet another one depends on how slow the machine is. Whoever stays is served or told that the session
        // is busy, but for those to whom a queue was full.
        assert!(seen.keys().all(|status| [0, 200, 409, 503].contains(status)), "seed {seed}: {seen:?}");
        let full = seen.get(&503).copied().unwrap_or(0);
        assert!(seen[&200] > 0 && full <= 2 * u64::from(FULL), "seed {seed}: {seen:?}");
    }
}
