//! Streams that follow each other without a pause, each compared with what a worker says directly.

use serde_json::Value;
use sha2::{Digest, Sha256};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use turnstile_sim::SimWorker;
use turnstile_tests::harness::{CHAT, Request, Rig, chat_stream, scrub, send, until};

/// Streams at a time.
pub const STREAMS: usize = 32;

/// The request of a stream.
pub fn prompt(n: usize) -> Value {
    chat_stream(&format!("Stream {n}. [[sim:tokens=60]]"))
}

/// The traffic. What is wrong with an answer ends it.
pub struct Traffic {
    stop: Arc<AtomicBool>,
    served: Arc<AtomicUsize>,
    tasks: tokio::task::JoinSet<()>,
}

/// Digest of an answer, without what is its own: ids and times.
fn digest(text: &str) -> [u8; 32] {
    Sha256::digest(scrub(text)).into()
}

impl Traffic {
    /// Starts it. It ends by itself after `turns`.
    pub async fn start(rig: &Rig, turns: usize) -> Self {
        let twin = SimWorker::start("127.0.0.1:0", rig.workers[0].config().clone()).await.unwrap();
        let (stop, served) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let next = Arc::new(AtomicUsize::new(0));
        let mut tasks = tokio::task::JoinSet::new();
        for n in 0..STREAMS {
            let request = Request::json(CHAT, &prompt(n));
            let direct = send(twin.addr(), &request).await.text();
            assert!(direct.ends_with("data: [DONE]\n\n"));
            let wanted = digest(&direct);
            let (addr, stop, served, next) = (rig.addr(), Arc::clone(&stop), Arc::clone(&served), Arc::clone(&next));
            tasks.spawn(async move {
                while !stop.load(Ordering::Relaxed) && next.fetch_add(1, Ordering::Relaxed) < turns {
                    let answer = send(addr, &request).await;
                    assert_eq!((answer.status, answer.complete), (200, true), "{}", answer.text());
                    assert!(digest(&answer.text()) == wanted, "altered: {}", answer.text());
                    served.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        Self { stop, served, tasks }
    }

    /// Turns served so far.
    pub fn served(&self) -> usize {
        self.served.load(Ordering::Relaxed)
    }

    /// Fails if a stream has failed.
    pub fn check(&mut self) {
        while let Some(ended) = self.tasks.try_join_next() {
            ended.unwrap();
        }
    }

    /// Waits until every stream that runs now has ended, and as many again.
    pub async fn goes_on(&mut self) {
        let goal = self.served() + 2 * STREAMS;
        until("streams go on", async || {
            self.check();
            self.served() >= goal
        })
        .await;
    }

    /// Ends it after the streams that run. Returns how many turns were served in all.
    pub async fn end(mut self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.tasks.join_next().await {
            ended.unwrap();
        }
        self.served()
    }
}
