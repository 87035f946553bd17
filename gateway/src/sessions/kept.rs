//! What of the session table outlives the process.

use super::SessionTable;
use crate::clock::now_ms;
use crate::state::Journal;
use std::sync::Arc;
use turnstile_fleet::ids::{SessionKey, WorkerId};
use turnstile_fleet::journal::{OpenRecord, Record};
use turnstile_fleet::session::{EngineChange, HeldEngine, Left, Restored, SavedSession, SessionMode, Sessions};

impl SessionTable {
    /// From now on the journal is told of every engine session.
    pub fn keep_journal(&self, journal: Journal) {
        let mut table = self.table.lock();
        table.record_changes();
        // A second journal would be a second owner of its file; there is one a process.
        let _ = self.journal.set(journal);
    }

    /// The journal, if one is kept.
    pub fn journal(&self) -> Option<&Journal> {
        self.journal.get()
    }

    /// Tells the journal what `table` has changed, in the order in which it happened.
    pub(super) fn note_changes(&self, table: &mut Sessions) {
        let Some(journal) = self.journal.get() else { return };
        let records = table.take_changes().into_iter().filter_map(|change| match change {
            EngineChange::Opened(held) => self.open_record(held),
            EngineChange::Gone(id) => Some(Record::Gone(id)),
        });
        journal.append(&records.collect::<Vec<_>>());
    }

    /// What a journal says that begins now.
    pub fn open_records(&self) -> Vec<Record> {
        let held = self.table.lock().held_engines();
        held.into_iter().filter_map(|held| self.open_record(held)).collect()
    }

    /// What the journal says of an engine session; nothing of a worker that nobody knows.
    fn open_record(&self, held: HeldEngine) -> Option<Record> {
        let worker = self.workers.get(held.worker)?;
        Some(Record::Open(OpenRecord {
            id: held.engine_id,
            stream: held.mode == SessionMode::Stream,
            worker: Arc::clone(&worker.id),
            url: worker.url.to_string().into(),
            rank: held.rank,
            timeout_ms: held.timeout_ms,
        }))
    }

    /// Writes the journal anew from what the table knows.
    pub fn rewrite_journal(&self) {
        let Some(journal) = self.journal.get() else { return };
        // Under the lock, so that no change comes between.
        let table = self.table.lock();
        let records = table.held_engines().into_iter().filter_map(|held| self.open_record(held));
        journal.replace(&records.collect::<Vec<_>>());
    }

    /// Sessions in the order of their keys, at most `limit`, after the key given.
    pub fn saved(&self, after: Option<SessionKey>, limit: usize) -> Vec<SavedSession> {
        self.table.lock().saved(after, limit, now_ms())
    }

    /// Takes over a session of an earlier process.
    pub fn restore(&self, session: &SavedSession, away_ms: u64) -> Restored {
        self.table.lock().restore(session, away_ms, now_ms())
    }

    /// Takes over an engine session that nobody uses, to be closed.
    pub fn adopt_orphan(&self, held: &HeldEngine) -> bool {
        self.table.lock().adopt_orphan(held, now_ms())
    }

    /// Whether an engine session is in the table.
    pub fn knows_engine(&self, id: &str) -> bool {
        self.table.lock().knows_engine(id)
    }

    /// What is left on a worker that was removed.
    pub fn left_on(&self, worker: WorkerId) -> Left {
        self.table.lock().left_on(worker)
    }

    /// Engine sessions on a worker that are not known to be closed.
    pub fn engines_on(&self, worker: WorkerId) -> usize {
        self.table.lock().engines_on(worker)
    }

    /// Nothing stands against the close of an orphan any more.
    pub fn release_orphan(self: &Arc<Self>, id: &str) {
        let closes = self.with(|table| table.released_engine(id));
        self.send_closes(closes);
    }
}
