//! The journal's file: one thread appends, so that no request waits for a disk longer than it wants to.
//!
//! What is appended survives the end of this process at once, for it is in the kernel then; it survives the end of the machine
//! after the next sync, within about a second.

use super::dir::StateDir;
use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use turnstile_fleet::journal::{Record, Replay};

/// Its name in `state.dir`.
pub const JOURNAL: &str = "engines.journal";
/// The most of it that is read. A journal is rewritten long before, unless a million engine sessions are open.
pub const MOST_BYTES: u64 = 512 << 20;
/// Messages that may wait. What does not fit is made up for by writing the journal anew.
const QUEUE: usize = 8192;
/// Between two syncs.
const SYNC_EVERY: Duration = Duration::from_secs(1);
/// A journal is rewritten when it has more than this, and twice what it had after the last time.
const REWRITE_BYTES: u64 = 1 << 20;
/// The longest that an open waits for its line.
const WRITTEN_WITHIN: Duration = Duration::from_secs(1);
/// The longest that the end of the process waits for the last lines.
const CLOSED_WITHIN: Duration = Duration::from_secs(2);

enum Message {
    Append(Vec<u8>),
    Replace(Vec<u8>),
    Barrier(oneshot::Sender<()>),
    Close(oneshot::Sender<()>),
}

/// The way to the journal.
pub struct Journal {
    sender: SyncSender<Message>,
    /// Lines were lost: it has to be written anew from what is known.
    broken: Arc<AtomicBool>,
    _threads: [JoinHandle<()>; 2],
}

impl Journal {
    /// Begins a journal with these records, in place of the one there is.
    ///
    /// # Errors
    /// The file or the threads cannot be made.
    pub fn begin(dir: Arc<StateDir>, records: &[Record]) -> std::io::Result<Self> {
        let bytes = lines(records);
        let size = bytes.len() as u64;
        let file = Arc::new(dir.replace(JOURNAL, &bytes)?);
        let (sender, receiver) = sync_channel(QUEUE);
        // One sync at a time; the next one syncs all that came meanwhile.
        let (sync, syncs) = sync_channel::<Arc<File>>(1);
        let broken = Arc::new(AtomicBool::new(false));
        let syncer = std::thread::Builder::new().name("journal-sync".into()).spawn(move || {
            while let Ok(file) = syncs.recv() {
                if let Err(error) = file.sync_data() {
                    tracing::warn!(%error, "the journal of engine sessions cannot be synced");
                }
            }
        })?;
        let appender = Appender { dir, file, size, settled: size, broken: Arc::clone(&broken), sync, unsynced: false };
        let thread = std::thread::Builder::new().name("journal".into()).spawn(move || appender.run(&receiver))?;
        Ok(Self { sender, broken, _threads: [thread, syncer] })
    }

    /// Appends records, soon.
    pub fn append(&self, records: &[Record]) {
        if !records.is_empty() && self.sender.try_send(Message::Append(lines(records))).is_err() {
            self.broken.store(true, Ordering::Release);
        }
    }

    /// Resolves when what was appended before is written, or after a second: a slow disk costs safety, not service.
    pub async fn written(&self) {
        let (done, wait) = oneshot::channel();
        if self.sender.try_send(Message::Barrier(done)).is_err()
            || tokio::time::timeout(WRITTEN_WITHIN, wait).await.is_err()
        {
            tracing::warn!("an engine session is opened before the journal says so: the disk is slow");
        }
    }

    /// True once after lines were lost.
    pub fn take_broken(&self) -> bool {
        self.broken.swap(false, Ordering::AcqRel)
    }

    /// Writes the journal anew.
    pub fn replace(&self, records: &[Record]) {
        if self.sender.try_send(Message::Replace(lines(records))).is_err() {
            self.broken.store(true, Ordering::Release);
        }
    }

    /// Waits until all is on disk, a moment at most. Nothing is written after that.
    pub async fn close(&self) {
        let (done, wait) = oneshot::channel();
        if self.sender.try_send(Message::Close(done)).is_err()
            || tokio::time::timeout(CLOSED_WITHIN, wait).await.is_err()
        {
            tracing::warn!("the journal of engine sessions could not be closed in time");
        }
    }
}

fn lines(records: &[Record]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(records.len().saturating_mul(256));
    records.iter().for_each(|record| record.write(&mut bytes));
    bytes
}

struct Appender {
    dir: Arc<StateDir>,
    file: Arc<File>,
    size: u64,
    /// Its size when it was last written anew.
    settled: u64,
    broken: Arc<AtomicBool>,
    sync: SyncSender<Arc<File>>,
    unsynced: bool,
}

impl Appender {
    fn run(mut self, messages: &Receiver<Message>) {
        let mut next_sync = Instant::now() + SYNC_EVERY;
        loop {
            let message = if self.unsynced {
                messages.recv_timeout(next_sync.saturating_duration_since(Instant::now()))
            } else {
                messages.recv().map_err(|_| RecvTimeoutError::Disconnected)
            };
            match message {
                Ok(Message::Append(lines)) => self.append(&lines),
                Ok(Message::Replace(lines)) => self.replace(&lines),
                Ok(Message::Barrier(done)) => {
                    // Whoever waited has gone on by now, if nobody is there.
                    let _ = done.send(());
                }
                Ok(Message::Close(done)) => {
                    self.report(self.file.sync_data());
                    let _ = done.send(());
                    return;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if self.unsynced && Instant::now() >= next_sync {
                next_sync = Instant::now() + SYNC_EVERY;
                self.unsynced = self.sync.try_send(Arc::clone(&self.file)).is_err();
            }
        }
    }

    fn append(&mut self, lines: &[u8]) {
        match (&*self.file).write_all(lines) {
            Ok(()) => {
                self.size += lines.len() as u64;
                self.unsynced = true;
                if self.size > REWRITE_BYTES && self.size > self.settled.saturating_mul(2) {
                    self.rewrite();
                }
            }
            failed => self.report(failed),
        }
    }

    /// Drops what says nothing any more: sessions opened and gone.
    fn rewrite(&mut self) {
        let super::dir::Content::Bytes(bytes) = self.dir.read(JOURNAL, MOST_BYTES) else {
            self.broken.store(true, Ordering::Release);
            return;
        };
        let open: Vec<Record> = Replay::of(&bytes).open.into_values().map(Record::Open).collect();
        self.replace(&lines(&open));
    }

    fn replace(&mut self, lines: &[u8]) {
        match self.dir.replace(JOURNAL, lines) {
            Ok(file) => {
                self.file = Arc::new(file);
                self.size = lines.len() as u64;
                self.settled = self.size;
                self.unsynced = false;
            }
            Err(error) => {
                // What is there goes on; it is tried again when it has doubled, or when lines are lost.
                self.settled = self.size;
                self.report(Err(error));
            }
        }
    }

    fn report(&self, result: std::io::Result<()>) {
        if let Err(error) = result
            && !self.broken.swap(true, Ordering::AcqRel)
        {
            tracing::error!(%error, file = %self.dir.file(JOURNAL).display(), "cannot write the journal of engine sessions");
        }
    }
}
