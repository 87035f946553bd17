//! What a gateway leaves to the next process in `state.dir`: a seed, a snapshot of sessions and index now and then, and a journal
//! of the engine sessions it has open on its workers.
//!
//! The two files are independent: without a snapshot nobody returns to their worker, but what was left open is closed all the
//! same. Nothing a request waits for waits for the disk, except an open of an engine session, for a second at most.

mod dir;
mod journal;
mod orphans;
mod snapshot;

pub use dir::StateError;
pub use journal::Journal;

use crate::fleet_state::Fleet;
use crate::workers::Worker;
use dir::{Content, StateDir};
use journal::{JOURNAL, MOST_BYTES};
use orphans::Orphan;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use turnstile_config::Config;
use turnstile_fleet::journal::{OpenRecord, Replay};
use turnstile_fleet::session::HeldEngine;
use turnstile_fleet::snapshot::{Snapshot, seed_mark};

/// How often it is looked whether the journal has to be made whole.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The longest that the end of the process waits for its last snapshot.
const LAST_WITHIN: Duration = Duration::from_secs(10);

/// What is kept, and where.
pub struct State {
    dir: Arc<StateDir>,
    seed: u64,
    every: Duration,
    snapshot_bytes: u64,
    /// Numbers snapshots.
    next: AtomicU64,
    /// The newest snapshot written. One is written at a time, and none over a newer one: the last of a process may meet one that
    /// was begun before it.
    newest: Arc<Mutex<u64>>,
}

/// What a start found.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// Sessions taken over.
    pub sessions: usize,
    /// Blocks of the index taken over.
    pub blocks: usize,
    /// Engine sessions to be closed.
    pub orphans: usize,
}

impl State {
    /// Takes `state.dir`, if the configuration says that anything is to be kept. Blocks.
    ///
    /// # Errors
    /// The directory is another gateway's, or cannot be used.
    pub fn open(config: &Config) -> Result<Option<Self>, StateError> {
        let (Some(path), every @ 1..) = (&config.state.dir, config.state.interval_s) else { return Ok(None) };
        let dir = StateDir::open(path)?;
        let seed = dir.seed()?;
        let every = Duration::from_secs(every);
        let snapshot_bytes = config.state.snapshot_bytes.bytes();
        Ok(Some(Self {
            dir: Arc::new(dir),
            seed,
            every,
            snapshot_bytes,
            next: AtomicU64::new(1),
            newest: Arc::default(),
        }))
    }

    /// The seed of all keys and hashes.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Takes over what the last process left, and begins a journal. Blocks.
    ///
    /// # Errors
    /// The journal cannot be begun.
    pub fn restore(&self, fleet: &Arc<Fleet>) -> Result<(Found, Orphans), StateError> {
        let mut open = self.read_journal();
        let mut found = Found::default();
        if let Some(snapshot) = self.read_snapshot() {
            snapshot::restore(snapshot, fleet, &open, &mut found);
        }
        open.retain(|id, _| !fleet.sessions.knows_engine(id));
        let mut orphans = Vec::new();
        let mut strays = 0_usize;
        for record in open.into_values() {
            let worker = known_worker(fleet, &record.worker, &record.url);
            let orphan = worker.filter(|worker| fleet.sessions.adopt_orphan(&held(&record, worker)));
            match orphan {
                Some(worker) => orphans.push(Orphan { id: record.id, stream: record.stream, worker }),
                None => strays += 1,
            }
        }
        if strays > 0 {
            tracing::warn!(
                engine_sessions = strays,
                "engine sessions of workers that are no longer configured are left to their timeout"
            );
        }
        found.orphans = orphans.len();
        if found != Found::default() {
            tracing::info!(
                sessions = found.sessions,
                index_blocks = found.blocks,
                orphans = found.orphans,
                "taken over from the last process"
            );
        }
        let records = fleet.sessions.open_records();
        let journal = Journal::begin(Arc::clone(&self.dir), &records).map_err(|error| {
            let path = self.dir.file(JOURNAL).display().to_string();
            StateError::Io { path, error }
        })?;
        fleet.sessions.keep_journal(journal);
        Ok((found, Orphans(orphans)))
    }

    fn read_journal(&self) -> BTreeMap<Arc<str>, OpenRecord> {
        match self.dir.read(JOURNAL, MOST_BYTES) {
            Content::Absent => BTreeMap::new(),
            Content::Unreadable(reason) => {
                self.dir.keep_aside(JOURNAL, &reason);
                BTreeMap::new()
            }
            Content::Bytes(bytes) => {
                let replay = Replay::of(&bytes);
                if replay.damaged > 0 {
                    self.dir.keep_aside(JOURNAL, &format!("{} damaged lines; the others count", replay.damaged));
                }
                replay.open
            }
        }
    }

    fn read_snapshot(&self) -> Option<Snapshot> {
        let reason = match self.dir.read(snapshot::SNAPSHOT, self.snapshot_bytes) {
            Content::Absent => return None,
            Content::Unreadable(reason) => reason,
            Content::Bytes(bytes) => match Snapshot::decode(&bytes) {
                Ok(snapshot) if snapshot.seed_mark == seed_mark(self.seed) => return Some(snapshot),
                Ok(_) => "it was made with another seed".into(),
                Err(error) => error.to_string(),
            },
        };
        self.dir.keep_aside(snapshot::SNAPSHOT, &reason);
        None
    }

    /// Writes snapshots, and keeps the journal whole. Runs until it is dropped.
    pub async fn keep(self: Arc<Self>, fleet: Arc<Fleet>) {
        let mut look = tokio::time::interval(LOOK_EVERY);
        let mut next = tokio::time::Instant::now() + self.every;
        loop {
            look.tick().await;
            if fleet.sessions.journal().is_some_and(Journal::take_broken) {
                fleet.sessions.rewrite_journal();
            }
            if tokio::time::Instant::now() >= next {
                let snapshot = snapshot::collect(&fleet, self.seed).await;
                self.write(snapshot, &fleet).await;
                next = tokio::time::Instant::now() + self.every;
            }
        }
    }

    /// What is to be written last, made before the engine sessions are closed: the sessions themselves go on.
    pub async fn last(&self, fleet: &Arc<Fleet>) -> Snapshot {
        let mut last = snapshot::collect(fleet, self.seed).await;
        for session in &mut last.sessions {
            session.tag = None;
        }
        last
    }

    /// Writes the last snapshot and ends the journal, within a bounded time.
    pub async fn finish(&self, last: Snapshot, fleet: &Arc<Fleet>) {
        if tokio::time::timeout(LAST_WITHIN, self.write(last, fleet)).await.is_err() {
            tracing::error!("the last snapshot could not be written in time");
        }
        if let Some(journal) = fleet.sessions.journal() {
            journal.close().await;
        }
    }

    async fn write(&self, snapshot: Snapshot, fleet: &Arc<Fleet>) {
        let metrics = &fleet.metrics;
        let (dir, most) = (Arc::clone(&self.dir), usize::try_from(self.snapshot_bytes).unwrap_or(usize::MAX));
        let sessions = snapshot.sessions.len();
        let started = std::time::Instant::now();
        let (number, newest) = (self.next.fetch_add(1, Ordering::Relaxed), Arc::clone(&self.newest));
        let written = tokio::task::spawn_blocking(move || {
            let mut newest = newest.lock();
            if number < *newest {
                return Ok(0);
            }
            *newest = number;
            let bytes = snapshot.encode(most);
            dir.write(snapshot::SNAPSHOT, &bytes).map(|()| bytes.len())
        });
        match written.await.map_err(std::io::Error::other).flatten() {
            Ok(bytes) => {
                metrics.snapshots.with_label_values(&["ok"]).inc();
                metrics.snapshot_bytes.set(i64::try_from(bytes).unwrap_or(i64::MAX));
                tracing::debug!(bytes, sessions, ms = started.elapsed().as_secs_f64() * 1e3, "snapshot written");
            }
            Err(error) => {
                metrics.snapshots.with_label_values(&["failed"]).inc();
                tracing::error!(%error, file = %self.dir.file(snapshot::SNAPSHOT).display(), "snapshot not written");
            }
        }
    }
}

/// Engine sessions that the last process left open.
pub struct Orphans(Vec<Orphan>);

impl Orphans {
    /// Closes them, however long their workers take.
    pub async fn close(self, fleet: Arc<Fleet>) {
        orphans::close(self.0, fleet).await;
    }
}

/// A worker of the configuration, known by id and URL together.
fn known_worker(fleet: &Fleet, id: &str, url: &str) -> Option<Arc<Worker>> {
    fleet.workers.by_id(id).filter(|worker| worker.url.to_string() == url)
}

fn held(record: &OpenRecord, worker: &Worker) -> HeldEngine {
    HeldEngine {
        engine_id: Arc::clone(&record.id),
        mode: record.mode(),
        worker: worker.index,
        rank: record.rank,
        timeout_ms: record.timeout_ms,
    }
}
