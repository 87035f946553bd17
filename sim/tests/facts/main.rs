//! What a real SGLang 0.5.23 was seen to do, checked over real sockets. `fixtures/` holds raw exchanges with one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

mod client;
mod faults;
mod fixture;
mod http;
mod list;
mod opening;
mod overload;
mod recorded;
mod sessions;
mod streams;
mod tags;

use turnstile_sim::{SimConfig, SimWorker};

/// A worker so fast that a second of its time is a millisecond of ours.
async fn worker(change: impl FnOnce(&mut SimConfig)) -> SimWorker {
    let mut config =
        SimConfig { model: "tiny".to_owned(), speed: 1000.0, context_length: 4096, ..SimConfig::default() };
    config.max_total_tokens = 20_000;
    change(&mut config);
    SimWorker::start("127.0.0.1:0", config).await.unwrap()
}

/// Waits until `condition` holds; a wait of 10 seconds is a failure.
async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(10);
    while !condition().await {
        assert!(tokio::time::Instant::now() < deadline, "waited in vain until {what}");
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
}
