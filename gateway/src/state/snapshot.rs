//! Making a snapshot beside a running fleet, and taking one over before it runs.

use super::{Found, known_worker};
use crate::clock::unix_ms;
use crate::fleet_state::Fleet;
use crate::workers::Worker;
use std::collections::BTreeMap;
use std::sync::Arc;
use turnstile_fleet::ids::WorkerId;
use turnstile_fleet::journal::OpenRecord;
use turnstile_fleet::session::Restored;
use turnstile_fleet::snapshot::{SavedIndex, SavedWorker, Snapshot, seed_mark};

/// Its name in `state.dir`.
pub const SNAPSHOT: &str = "sessions.snapshot";
/// Sessions taken from the table at a time; turns wait for the table no longer than these take.
const PAGE: usize = 512;

/// Makes one. No lock is held for longer than a page of sessions or the copy of one worker's blocks takes.
pub async fn collect(fleet: &Arc<Fleet>, seed: u64) -> Snapshot {
    let workers = fleet.workers.current();
    let position = |id: WorkerId| workers.iter().position(|w| w.index == id).and_then(|at| u32::try_from(at).ok());
    let mut snapshot = Snapshot {
        saved_at_ms: unix_ms(),
        seed_mark: seed_mark(seed),
        block_bytes: u32::try_from(fleet.settings().block_bytes).unwrap_or(0),
        workers: workers.iter().map(|worker| saved_worker(worker)).collect(),
        ..Snapshot::default()
    };
    let mut after = None;
    loop {
        let page = fleet.sessions.saved(after, PAGE);
        let Some(last) = page.last() else { break };
        after = Some(last.key);
        snapshot.sessions.extend(page.into_iter().map(|mut session| {
            session.worker = session.worker.and_then(position).map(WorkerId);
            session
        }));
        tokio::task::yield_now().await;
    }
    let mut copies = Vec::new();
    for (at, worker) in (0_u32..).zip(&workers) {
        let copy = fleet.index.lock().copy_of(worker.index);
        copies.extend(copy.map(|copy| (WorkerId(at), copy)));
        tokio::task::yield_now().await;
    }
    let listed = tokio::task::spawn_blocking(move || {
        let listed = copies.into_iter().map(|(worker, copy)| SavedIndex { worker, blocks: copy.list(usize::MAX) });
        listed.collect()
    });
    // The task cannot fail, short of the end of the process.
    snapshot.index = listed.await.unwrap_or_default();
    snapshot
}

fn saved_worker(worker: &Worker) -> SavedWorker {
    SavedWorker {
        id: worker.id.to_string(),
        url: worker.url.to_string(),
        draining: worker.is_draining(),
        prefill_total: worker.with_model(|model| model.load().prefill_uncached_total),
    }
}

/// Takes one over. `open`: the engine sessions that the journal knows to be open; a tag that is not among them is not gone on
/// with.
pub fn restore(snapshot: Snapshot, fleet: &Arc<Fleet>, open: &BTreeMap<Arc<str>, OpenRecord>, found: &mut Found) {
    // A clock that went back says nothing of the time away.
    let away_ms = unix_ms().saturating_sub(snapshot.saved_at_ms);
    let workers: Vec<Option<Arc<Worker>>> =
        snapshot.workers.iter().map(|saved| known_worker(fleet, &saved.id, &saved.url)).collect();
    let worker_at = |at: WorkerId| workers.get(at.0 as usize).and_then(Option::as_ref);
    for (saved, worker) in snapshot.workers.iter().zip(&workers) {
        let Some(worker) = worker else {
            tracing::info!(worker = saved.id, "no longer configured: its sessions and blocks are dropped");
            continue;
        };
        worker.expect_prefill_total(saved.prefill_total);
        if saved.draining {
            worker.drain();
        }
    }
    let (mut expired, mut dropped) = (0_usize, 0_usize);
    for mut session in snapshot.sessions {
        let worker = session.worker.take();
        let known = worker.and_then(worker_at);
        if worker.is_some() && known.is_none() {
            dropped += 1;
            continue;
        }
        // What drains is left at the next turn, so there is nowhere to return to.
        let bound = known.filter(|worker| !worker.is_draining());
        session.worker = bound.map(|worker| worker.index);
        let is_open = |id: &Arc<str>| {
            let record = open.get(id);
            record.is_some_and(|record| bound.is_some_and(|worker| *record.worker == *worker.id))
        };
        session.tag = session.tag.filter(is_open);
        match fleet.sessions.restore(&session, away_ms) {
            Restored::Live => found.sessions += 1,
            Restored::Expired => expired += 1,
            Restored::Refused => dropped += 1,
        }
    }
    if expired + dropped > 0 {
        tracing::info!(expired, dropped, away_ms, "sessions of the last process that are over");
    }
    if snapshot.block_bytes as usize != fleet.settings().block_bytes {
        tracing::info!("routing.block_bytes has changed: the index begins empty");
        return;
    }
    let mut index = fleet.index.lock();
    for saved in &snapshot.index {
        if let Some(worker) = worker_at(saved.worker) {
            index.restore(worker.index, &saved.blocks);
            found.blocks += index.len_of(worker.index);
        }
    }
}
