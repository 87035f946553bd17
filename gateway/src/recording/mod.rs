//! The recording of turns for `turnstile replay`: one JSON line for each turn, hashes and sizes only, written by a thread of
//! its own. `docs/replay.md` documents the lines; [`line`] has their types, for writer and reader.

mod chain;
mod file;
pub mod line;

pub use chain::{decode_blocks, encode_blocks};

use crate::exchange::Record;
use crate::generation::{Generation, PoolRuntime};
use crate::workers::Worker;
use file::RecordFile;
use line::{FleetLine, LostLine, TurnLine, WorkerEntry};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use turnstile_config::Logging;
use turnstile_fleet::session::SessionAction;
use turnstile_fleet::turn::Turn;

/// Turns that may wait for the writer.
const BACKLOG: usize = 8192;
/// Bytes of block hashes that may wait with them.
const BACKLOG_BYTES: usize = 64 << 20;
/// How long the writer lets turns gather.
const GATHER: Duration = Duration::from_millis(20);
/// How long the end waits for the last lines to be written. (Under test a busy machine may be slow to write them.)
const LAST_LINES: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 2 });
/// How often the fleet is described, ms, while there are turns.
const FLEET_EVERY_MS: u64 = 60_000;

/// A turn as it was understood, until it has ended.
pub struct Draft {
    line: TurnLine,
    blocks: Vec<u64>,
}

enum Message {
    Turn(Box<Draft>),
    Fleet(FleetLine),
}

/// Where turns are recorded. Dropping the last clone ends the writer once it has written what it holds.
pub struct Recording {
    /// Nothing only while it ends.
    sender: Option<SyncSender<Message>>,
    thread: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
    /// When the fleet is described next, Unix ms.
    fleet_due_ms: AtomicU64,
}

/// What turns and the writer both count.
#[derive(Default)]
struct Shared {
    lost: AtomicU64,
    held_bytes: AtomicUsize,
}

// === impl Draft ===

impl Draft {
    /// What is known once a turn was understood.
    pub fn new(ts: u64, turn: &Turn, action: SessionAction, pool: &PoolRuntime) -> Self {
        let identity = &turn.identity;
        let key = |id: &Option<turnstile_fleet::identity::SessionId>| id.as_ref().map(|id| id.key.to_string());
        let session = key(&identity.session);
        // Only a name that the configuration has: what else a client writes there is its own.
        let model = turn.model.clone().filter(|model| pool.models.contains(model));
        let named = identity.session.is_some() || identity.tree.is_some() || !turn.prefix.blocks.is_empty();
        let line = TurnLine {
            ts,
            pool: pool.name.to_string(),
            model,
            route: turn.route.name().to_owned(),
            stream: turn.stream,
            n: (turn.n > 1).then_some(turn.n),
            tenant: identity.tenant.to_string(),
            tree: key(&identity.tree).filter(|tree| Some(tree) != session.as_ref()),
            parent: key(&identity.parent),
            session,
            agent: identity.agent.name().to_owned(),
            source: identity.source.name().to_owned(),
            action: (action != SessionAction::None).then(|| action.name().to_owned()),
            timeout_s: turn.control.timeout_s,
            priority: turn.hints.priority,
            strict_priority: turn.hints.strict_priority,
            latency_sensitivity: turn.hints.latency_sensitivity,
            osl: turn.hints.osl,
            max_tokens: turn.max_tokens,
            speculative_prefill: turn.hints.speculative_prefill,
            body_bytes: turn.body.len() as u64,
            prompt_bytes: turn.prefix.bytes as u64,
            block_bytes: u32::try_from(turn.prefix.block_bytes).unwrap_or(u32::MAX),
            affinity: (!named).then(|| format!("{:016x}", turn.prefix.affinity_hash)),
            ..TurnLine::default()
        };
        Self { line, blocks: turn.prefix.blocks.clone() }
    }

    fn bytes(&self) -> usize {
        self.blocks.len() * size_of::<u64>()
    }

    /// Adds how it ended.
    fn end(&mut self, record: &Record) {
        let ms = |value: f64| (value * 1e3).round() / 1e3;
        let line = &mut self.line;
        line.turn = record.turn;
        line.worker = record.worker.as_ref().map(|worker| worker.to_string());
        line.reason = record.reason.clone();
        line.mode = record.session_mode.map(str::to_owned);
        line.predicted_cached = record.predicted_cached;
        line.prompt_tokens = record.prompt_tokens;
        line.cached_tokens = record.cached_tokens;
        line.completion_tokens = record.completion_tokens;
        line.queue_ms = record.queue_ms;
        line.session_wait_ms = record.session_wait_ms;
        line.ttft_ms = record.ttft_ms.map(ms);
        line.total_ms = ms(record.total_ms);
        line.attempts = record.attempts;
        line.status = record.status;
        line.end = record.end.to_owned();
        line.finish_reason = record.finish_reason.clone();
        line.error = record.error.map(str::to_owned);
    }
}

// === impl Recording ===

impl Recording {
    /// Starts the writer, if the configuration asks for one.
    ///
    /// # Errors
    /// When the file cannot be opened for appending, or the thread cannot start.
    pub fn open(logging: &Logging) -> std::io::Result<Option<Self>> {
        let Some(path) = &logging.record else { return Ok(None) };
        let file = RecordFile::open(path.clone(), logging.record_bytes.bytes(), logging.record_files).map_err(|e| {
            std::io::Error::new(e.kind(), format!("logging.record: cannot open {}: {e}", path.display()))
        })?;
        let (sender, receiver) = sync_channel(BACKLOG);
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        let thread =
            std::thread::Builder::new().name("recording".into()).spawn(move || write(&receiver, file, &theirs))?;
        Ok(Some(Self { sender: Some(sender), thread: Some(thread), shared, fleet_due_ms: AtomicU64::new(0) }))
    }

    /// A turn has ended.
    pub fn turn(&self, mut draft: Box<Draft>, record: &Record) {
        draft.end(record);
        let bytes = draft.bytes();
        if self.shared.held_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > BACKLOG_BYTES {
            self.shared.held_bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.shared.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        if !self.send(Message::Turn(draft)) {
            self.shared.held_bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.shared.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Describes the fleet, if that is due.
    pub fn fleet(&self, now_unix_ms: u64, generation: &Generation, workers: impl FnOnce() -> Vec<Arc<Worker>>) {
        let due = self.fleet_due_ms.load(Ordering::Relaxed);
        let next = now_unix_ms.saturating_add(FLEET_EVERY_MS);
        let takes = |due| self.fleet_due_ms.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if now_unix_ms >= due && takes(due) {
            let workers = workers().iter().map(|worker| entry(worker)).collect();
            // One that is lost comes again with the next.
            let _ = self.send(Message::Fleet(FleetLine { ts: now_unix_ms, generation: generation.number, workers }));
        }
    }

    fn send(&self, message: Message) -> bool {
        self.sender.as_ref().is_some_and(|sender| sender.try_send(message).is_ok())
    }
}

impl Drop for Recording {
    /// What was handed over is written before the process ends, unless the disk stands still.
    fn drop(&mut self) {
        self.sender = None;
        let until = Instant::now() + LAST_LINES;
        while self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn entry(worker: &Worker) -> WorkerEntry {
    let view = worker.view(0);
    let round = |value: f64| (value * 1e3).round() / 1e3;
    WorkerEntry {
        id: view.id.to_string(),
        pool: worker.settings().pool.to_string(),
        labels: (*view.labels).clone(),
        capabilities: view.capabilities.names().map(str::to_owned).collect(),
        ranks: view.capabilities.dp_size.max(1),
        max_running: view.max_running,
        max_in_flight: view.limit,
        kv_capacity_tokens: view.kv_capacity_tokens,
        prefill_tokens_per_s: round(view.prefill_tokens_per_s),
        itl_ms: round(view.itl_ms),
    }
}

fn write(receiver: &Receiver<Message>, mut file: RecordFile, shared: &Shared) {
    while let Ok(first) = receiver.recv() {
        std::thread::sleep(GATHER);
        for message in std::iter::once(first).chain(receiver.try_iter()) {
            let lost = shared.lost.swap(0, Ordering::Relaxed);
            if lost > 0 && !file.lost(&LostLine { lost }) {
                shared.lost.fetch_add(lost, Ordering::Relaxed);
            }
            match message {
                Message::Fleet(fleet) => file.fleet(&fleet),
                Message::Turn(draft) => {
                    shared.held_bytes.fetch_sub(draft.bytes(), Ordering::Relaxed);
                    let Draft { line, blocks } = *draft;
                    if !file.turn(line, &blocks) {
                        shared.lost.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
        }
        file.flush();
    }
    let lost = shared.lost.swap(0, Ordering::Relaxed);
    if lost > 0 {
        file.lost(&LostLine { lost });
        file.flush();
    }
}

#[cfg(test)]
#[path = "recording_tests.rs"]
mod tests;
