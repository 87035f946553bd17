//! The snapshot: sessions and prefix index as bytes, for the next process.
//!
//! A file is a head (magic, version, length and hash of the rest) and the rest, all numbers little-endian. No prompt, credential
//! or id that a client chose is in it: sessions are keyed by salted hashes, prompts are salted hashes of blocks. Bytes are
//! judged, never trusted: [`Snapshot::decode`] ends with a value or an error for any input, and takes no more memory than a
//! small multiple of it.

mod wire;

use std::sync::Arc;

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::ids::{SessionKey, WorkerId};
use crate::index::SavedBlock;
use crate::session::{ModeWish, SavedSession, SessionMode};
use wire::{Reader, Writer};

/// First bytes of a file.
const MAGIC: [u8; 8] = *b"TURNSNAP";
/// Version of the form below. Another one is not read: a snapshot is worth less than code that reads old ones.
const VERSION: u32 = 1;
/// Magic, version, length, hash.
const HEAD_BYTES: usize = 8 + 4 + 8 + 8;
/// A session without its tag.
const SESSION_BYTES: usize = 16 + 3 + 4 + 5 + 3 * 8 + 4 + 2 * 8 + 1;
/// A block of the index.
const BLOCK_BYTES: usize = 8 + 4;
/// A worker with an empty name and URL.
const WORKER_BYTES: usize = 2 + 2 + 1 + 8;
/// No worker, no block before.
const NONE: u32 = u32::MAX;
/// Longest tag that is kept; ours have about 70 bytes.
const MAX_TAG_BYTES: usize = u8::MAX as usize;

/// What one process leaves to the next.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// When it was made, Unix ms.
    pub saved_at_ms: u64,
    /// [`seed_mark`] of the seed behind all hashes in it.
    pub seed_mark: u64,
    /// Bytes of a block of the index.
    pub block_bytes: u32,
    /// The workers. Sessions and blocks name them by their position here.
    pub workers: Vec<SavedWorker>,
    /// Sessions, whose worker is such a position.
    pub sessions: Vec<SavedSession>,
    /// Blocks by worker.
    pub index: Vec<SavedIndex>,
}

/// A worker of a snapshot.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SavedWorker {
    /// Its id.
    pub id: String,
    /// Its URL: another one is another worker.
    pub url: String,
    /// It was being drained.
    pub draining: bool,
    /// Uncached tokens it had prefilled since it started. Less than that later: another process.
    pub prefill_total: u64,
}

/// Blocks of one worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SavedIndex {
    /// Its position.
    pub worker: WorkerId,
    /// Most recently used first.
    pub blocks: Vec<SavedBlock>,
}

/// Why bytes are no snapshot of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// Another kind of file.
    #[error("it is not a snapshot")]
    Foreign,
    /// Another version.
    #[error("it has version {0}, this gateway reads version {VERSION}")]
    Version(u32),
    /// Cut short, or longer than it says.
    #[error("it should have {expected} bytes and has {found}")]
    Length {
        /// As its head says.
        expected: u64,
        /// As it is.
        found: u64,
    },
    /// Changed since it was written.
    #[error("its checksum is wrong")]
    Checksum,
    /// It makes no sense, although the checksum is right.
    #[error("{0} in it makes no sense")]
    Malformed(&'static str),
}

/// Tells seeds apart without telling them.
pub fn seed_mark(seed: u64) -> u64 {
    xxh3_64_with_seed(b"turnstile snapshot", seed)
}

// === impl Snapshot ===

impl Snapshot {
    /// The file, of `max_bytes` at most as long as the workers alone fit. Sessions come first, the last used before the
    /// others; the index gets what is left, every worker the same share of its own.
    pub fn encode(&self, max_bytes: usize) -> Vec<u8> {
        let workers: usize = self.workers.iter().map(|w| WORKER_BYTES + w.id.len() + w.url.len()).sum();
        let heads = self.index.len().saturating_mul(8);
        let left = max_bytes.saturating_sub(HEAD_BYTES + 8 + 8 + 4 + 3 * 4 + workers + heads);
        let mut sessions: Vec<&SavedSession> = self.sessions.iter().collect();
        let left = keep_sessions(&mut sessions, left);
        let mut out = Writer::with_capacity(max_bytes.min(1 << 20));
        out.bytes(&MAGIC);
        out.u32(VERSION);
        out.u64(0);
        out.u64(0);
        out.u64(self.saved_at_ms);
        out.u64(self.seed_mark);
        out.u32(self.block_bytes);
        out.len(self.workers.len());
        for worker in &self.workers {
            out.text(&worker.id);
            out.text(&worker.url);
            out.u8(u8::from(worker.draining));
            out.u64(worker.prefill_total);
        }
        out.len(sessions.len());
        for session in sessions {
            write_session(&mut out, session);
        }
        let blocks: usize = self.index.iter().map(|index| index.blocks.len()).sum();
        let room = left / BLOCK_BYTES;
        let share = if blocks <= room { 1.0 } else { room as f64 / blocks as f64 };
        out.len(self.index.len());
        for index in &self.index {
            // `as` cuts off, so the sum stays within the room.
            let kept = (index.blocks.len() as f64 * share) as usize;
            out.u32(index.worker.0);
            out.len(kept);
            for block in index.blocks.iter().take(kept) {
                out.u64(block.hash);
                out.u32(block.parent.unwrap_or(NONE));
            }
        }
        let mut file = out.finish();
        let body = file.get(HEAD_BYTES..).unwrap_or_default();
        let (length, hash) = (body.len() as u64, xxh3_64(body));
        put(&mut file, 12, length);
        put(&mut file, 20, hash);
        file
    }

    /// Reads a file.
    ///
    /// # Errors
    /// See [`SnapshotError`].
    pub fn decode(file: &[u8]) -> Result<Self, SnapshotError> {
        let mut head = Reader::new(file);
        if head.array() != Some(MAGIC) {
            return Err(SnapshotError::Foreign);
        }
        let version = head.u32().ok_or(SnapshotError::Foreign)?;
        if version != VERSION {
            return Err(SnapshotError::Version(version));
        }
        let cut = SnapshotError::Length { expected: HEAD_BYTES as u64, found: file.len() as u64 };
        let (length, hash) = (head.u64().ok_or(cut)?, head.u64().ok_or(cut)?);
        let body = file.get(HEAD_BYTES..).unwrap_or_default();
        if body.len() as u64 != length {
            let expected = length.saturating_add(HEAD_BYTES as u64);
            return Err(SnapshotError::Length { expected, found: file.len() as u64 });
        }
        if xxh3_64(body) != hash {
            return Err(SnapshotError::Checksum);
        }
        read_body(&mut Reader::new(body))
    }
}

fn put(file: &mut [u8], at: usize, value: u64) {
    if let Some(slot) = file.get_mut(at..at + 8) {
        slot.copy_from_slice(&value.to_le_bytes());
    }
}

/// Leaves out the longest idle sessions that do not fit. Returns what is left of the room.
fn keep_sessions(sessions: &mut Vec<&SavedSession>, mut left: usize) -> usize {
    let size = |session: &SavedSession| SESSION_BYTES + kept_tag(session).map_or(0, str::len);
    let all: usize = sessions.iter().map(|session| size(session)).sum();
    if all <= left {
        return left - all;
    }
    sessions.sort_by_key(|session| session.idle_ms);
    let fit = sessions.iter().map_while(|session| {
        left = left.checked_sub(size(session))?;
        Some(())
    });
    let kept = fit.count();
    sessions.truncate(kept);
    0
}

fn kept_tag(session: &SavedSession) -> Option<&str> {
    session.tag.as_deref().filter(|tag| (1..=MAX_TAG_BYTES).contains(&tag.len()))
}

fn write_session(out: &mut Writer, session: &SavedSession) {
    out.bytes(&session.key.0.to_le_bytes());
    out.u8(match session.mode {
        SessionMode::Affinity => 0,
        SessionMode::Tag => 1,
        SessionMode::Stream => 2,
    });
    out.u8(match session.wish {
        None => 0,
        Some(ModeWish::Auto) => 1,
        Some(ModeWish::Affinity) => 2,
        Some(ModeWish::Tag) => 3,
        Some(ModeWish::Stream) => 4,
    });
    out.u8(u8::from(session.has_context));
    out.u32(session.worker.map_or(NONE, |worker| worker.0));
    out.u8(u8::from(session.rank.is_some()));
    out.u32(session.rank.unwrap_or(0));
    out.u64(session.ttl_ms);
    out.u64(session.age_ms);
    out.u64(session.idle_ms);
    out.u32(session.turns);
    out.u64(session.last_tokens);
    out.u64(session.last_cached_tokens);
    let tag = kept_tag(session).unwrap_or_default();
    out.u8(u8::try_from(tag.len()).unwrap_or(0));
    out.bytes(tag.as_bytes());
}

fn read_body(body: &mut Reader<'_>) -> Result<Snapshot, SnapshotError> {
    let bad = SnapshotError::Malformed;
    let head = |value: Option<u64>| value.ok_or(bad("the head"));
    let mut snapshot = Snapshot {
        saved_at_ms: head(body.u64())?,
        seed_mark: head(body.u64())?,
        block_bytes: body.u32().ok_or(bad("the head"))?,
        ..Snapshot::default()
    };
    let workers = body.count(WORKER_BYTES).ok_or(bad("the number of workers"))?;
    for _ in 0..workers {
        snapshot.workers.push(read_worker(body).ok_or(bad("a worker"))?);
    }
    let sessions = body.count(SESSION_BYTES).ok_or(bad("the number of sessions"))?;
    snapshot.sessions.reserve_exact(sessions);
    for _ in 0..sessions {
        snapshot.sessions.push(read_session(body, workers).ok_or(bad("a session"))?);
    }
    let indexes = body.count(8).ok_or(bad("the number of indexes"))?;
    for _ in 0..indexes {
        snapshot.index.push(read_index(body, workers).ok_or(bad("an index"))?);
    }
    if body.is_empty() { Ok(snapshot) } else { Err(bad("what follows the index")) }
}

fn read_worker(body: &mut Reader<'_>) -> Option<SavedWorker> {
    Some(SavedWorker { id: body.text()?, url: body.text()?, draining: body.flag()?, prefill_total: body.u64()? })
}

fn read_session(body: &mut Reader<'_>, workers: usize) -> Option<SavedSession> {
    let key = SessionKey(u128::from_le_bytes(body.array()?));
    let mode = match body.u8()? {
        0 => SessionMode::Affinity,
        1 => SessionMode::Tag,
        2 => SessionMode::Stream,
        _ => return None,
    };
    let wish = match body.u8()? {
        0 => None,
        1 => Some(ModeWish::Auto),
        2 => Some(ModeWish::Affinity),
        3 => Some(ModeWish::Tag),
        4 => Some(ModeWish::Stream),
        _ => return None,
    };
    let has_context = body.flag()?;
    let worker = match body.u32()? {
        NONE => None,
        position => Some(worker_at(position, workers)?),
    };
    let (ranked, rank) = (body.flag()?, body.u32()?);
    let (ttl_ms, age_ms, idle_ms) = (body.u64()?, body.u64()?, body.u64()?);
    let (turns, last_tokens, last_cached_tokens) = (body.u32()?, body.u64()?, body.u64()?);
    let length = usize::from(body.u8()?);
    let tag = std::str::from_utf8(body.take(length)?).ok()?;
    Some(SavedSession {
        key,
        mode,
        wish,
        worker,
        rank: ranked.then_some(rank),
        tag: (!tag.is_empty()).then(|| Arc::from(tag)),
        has_context,
        ttl_ms,
        age_ms,
        idle_ms,
        turns,
        last_tokens,
        last_cached_tokens,
    })
}

fn read_index(body: &mut Reader<'_>, workers: usize) -> Option<SavedIndex> {
    let worker = worker_at(body.u32()?, workers)?;
    let count = body.count(BLOCK_BYTES)?;
    let mut blocks = Vec::with_capacity(count);
    for position in 0..count {
        let (hash, parent) = (body.u64()?, body.u32()?);
        let parent = (parent != NONE).then_some(parent);
        if parent.is_some_and(|parent| parent as usize >= position) {
            return None;
        }
        blocks.push(SavedBlock { hash, parent });
    }
    Some(SavedIndex { worker, blocks })
}

fn worker_at(position: u32, workers: usize) -> Option<WorkerId> {
    ((position as usize) < workers).then_some(WorkerId(position))
}

#[cfg(test)]
#[path = "snapshot/tests.rs"]
mod tests;
