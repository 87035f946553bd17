//! The candidates of a turn, from the binary table the host offers.
//!
//! One read brings all workers. The table is little endian: a header of 16 bytes (version, record size, record count,
//! reserved), then the records. A later gateway may append fields to a record, so the record size is the header's, never
//! a constant; fields this crate does not know are skipped.

use std::fmt;

const VERSION: u32 = 1;
const HEADER_BYTES: usize = 16;
/// Size of the first edition of a record; a table with smaller records cannot be read.
const RECORD_BYTES: usize = 104;

const FLAG_BOUND: u32 = 1;
const FLAG_AT_LIMIT: u32 = 2;
const FLAG_EXCLUDED: u32 = 4;

const CAPABILITY_TAG: u32 = 1;
const CAPABILITY_STREAM: u32 = 2;
const CAPABILITY_PRIORITY: u32 = 4;

/// Whether a worker takes new turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WorkerState {
    /// Takes turns.
    #[default]
    Ready,
    /// Finishes what it has, takes nothing new.
    Draining,
    /// Failed its probes.
    Unhealthy,
    /// Not probed yet. States this crate does not know are read as this one.
    Starting,
}

/// One candidate, as the gateway saw it when the turn was dispatched.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Worker {
    /// The worker's index, stable for the life of the gateway process. Decisions may name a worker by it.
    pub index: u32,
    /// Whether it takes turns.
    pub state: WorkerState,
    /// Raw capability bits; see [`Worker::can_tag`] and its neighbours.
    pub capabilities: u32,
    /// Requests this gateway has in flight to it.
    pub in_flight: u32,
    /// Requests the engine reported running.
    pub running: u32,
    /// Requests the engine reported waiting.
    pub waiting: u32,
    /// The engine's `max_running_requests`; 0 when unknown.
    pub max_running: u32,
    /// Raw flag bits; see [`Worker::is_bound`] and its neighbours.
    pub flags: u32,
    /// Uncached prompt tokens of the requests the engine reported waiting.
    pub waiting_uncached_tokens: u64,
    /// KV tokens in use.
    pub kv_used_tokens: u64,
    /// KV pool size in tokens; 0 when unknown.
    pub kv_capacity_tokens: u64,
    /// Tokens of this turn's prompt that are probably in the worker's cache.
    pub cached_tokens: u64,
    /// Measured prefill rate, tokens per second.
    pub prefill_tokens_per_s: f64,
    /// Average time to first token, ms.
    pub ttft_ms: f64,
    /// Average inter-token latency, ms.
    pub itl_ms: f64,
    /// Uncached tokens this gateway sent that have not been prefilled yet.
    pub pending_prefill_tokens: u64,
    /// Output tokens expected of the requests in flight.
    pub expected_decode_tokens: u64,
}

/// The candidates of a turn, in order of their index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workers {
    table: Vec<u8>,
    record_bytes: usize,
    count: usize,
}

/// Why a table could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TableError {
    /// Shorter than its header, or than its header says.
    Truncated,
    /// A version this crate does not know.
    Version(u32),
    /// Records too small to hold the fields.
    RecordSize(u32),
}

// === impl Worker ===

impl Worker {
    /// Reads one record. `None` when it is shorter than the first edition.
    fn read(record: &[u8]) -> Option<Worker> {
        let record = record.first_chunk::<RECORD_BYTES>()?;
        Some(Worker {
            index: u32_at(record, 0),
            state: WorkerState::from_number(u32_at(record, 4)),
            capabilities: u32_at(record, 8),
            in_flight: u32_at(record, 12),
            running: u32_at(record, 16),
            waiting: u32_at(record, 20),
            max_running: u32_at(record, 24),
            flags: u32_at(record, 28),
            waiting_uncached_tokens: u64_at(record, 32),
            kv_used_tokens: u64_at(record, 40),
            kv_capacity_tokens: u64_at(record, 48),
            cached_tokens: u64_at(record, 56),
            prefill_tokens_per_s: f64::from_bits(u64_at(record, 64)),
            ttft_ms: f64::from_bits(u64_at(record, 72)),
            itl_ms: f64::from_bits(u64_at(record, 80)),
            pending_prefill_tokens: u64_at(record, 88),
            expected_decode_tokens: u64_at(record, 96),
        })
    }

    /// Writes the record, in the first edition's layout. The counterpart of reading, for tests.
    pub(crate) fn write(&self, table: &mut Vec<u8>) {
        let head = [
            self.index,
            self.state.number(),
            self.capabilities,
            self.in_flight,
            self.running,
            self.waiting,
            self.max_running,
            self.flags,
        ];
        let tail = [
            self.waiting_uncached_tokens,
            self.kv_used_tokens,
            self.kv_capacity_tokens,
            self.cached_tokens,
            self.prefill_tokens_per_s.to_bits(),
            self.ttft_ms.to_bits(),
            self.itl_ms.to_bits(),
            self.pending_prefill_tokens,
            self.expected_decode_tokens,
        ];
        table.extend(head.iter().flat_map(|value| value.to_le_bytes()));
        table.extend(tail.iter().flat_map(|value| value.to_le_bytes()));
    }

    /// Ready and not excluded for this turn.
    pub fn is_candidate(&self) -> bool {
        self.state == WorkerState::Ready && !self.is_excluded()
    }

    /// The worker that holds the turn's session.
    pub fn is_bound(&self) -> bool {
        self.flags & FLAG_BOUND != 0
    }

    /// The worker would queue another turn.
    pub fn is_at_limit(&self) -> bool {
        self.flags & FLAG_AT_LIMIT != 0
    }

    /// Not to be used for this turn: it failed an earlier attempt, or an earlier plugin excluded it.
    pub fn is_excluded(&self) -> bool {
        self.flags & FLAG_EXCLUDED != 0
    }

    /// Keeps sessions by a tag on full-history turns.
    pub fn can_tag(&self) -> bool {
        self.capabilities & CAPABILITY_TAG != 0
    }

    /// Keeps streaming sessions, fed with deltas.
    pub fn can_stream(&self) -> bool {
        self.capabilities & CAPABILITY_STREAM != 0
    }

    /// Schedules by the priority sent with the request.
    pub fn takes_priority(&self) -> bool {
        self.capabilities & CAPABILITY_PRIORITY != 0
    }

    /// The worker with the flags of [`Worker::is_bound`], [`Worker::is_at_limit`] and [`Worker::is_excluded`] set so.
    pub fn with_flags(self, bound: bool, at_limit: bool, excluded: bool) -> Worker {
        let flag = |on: bool, bit: u32| if on { bit } else { 0 };
        let flags = flag(bound, FLAG_BOUND) | flag(at_limit, FLAG_AT_LIMIT) | flag(excluded, FLAG_EXCLUDED);
        Worker { flags, ..self }
    }
}

fn u32_at(record: &[u8; RECORD_BYTES], offset: usize) -> u32 {
    let bytes = record.get(offset..).and_then(<[u8]>::first_chunk::<4>);
    bytes.copied().map_or(0, u32::from_le_bytes)
}

fn u64_at(record: &[u8; RECORD_BYTES], offset: usize) -> u64 {
    let bytes = record.get(offset..).and_then(<[u8]>::first_chunk::<8>);
    bytes.copied().map_or(0, u64::from_le_bytes)
}

// === impl WorkerState ===

impl WorkerState {
    fn from_number(number: u32) -> WorkerState {
        match number {
            0 => WorkerState::Ready,
            1 => WorkerState::Draining,
            2 => WorkerState::Unhealthy,
            _ => WorkerState::Starting,
        }
    }

    fn number(self) -> u32 {
        match self {
            WorkerState::Ready => 0,
            WorkerState::Draining => 1,
            WorkerState::Unhealthy => 2,
            WorkerState::Starting => 3,
        }
    }
}

// === impl Workers ===

impl Workers {
    /// Checks a table. Records are read as they are asked for.
    ///
    /// # Errors
    /// The table is cut short, of another version, or its records are too small.
    pub fn parse(table: Vec<u8>) -> Result<Workers, TableError> {
        let field = |at: usize| table.get(at..).and_then(<[u8]>::first_chunk::<4>).copied().map(u32::from_le_bytes);
        let version = field(0).ok_or(TableError::Truncated)?;
        if version != VERSION {
            return Err(TableError::Version(version));
        }
        let record_size = field(4).ok_or(TableError::Truncated)?;
        let count = field(8).ok_or(TableError::Truncated)?;
        let record_bytes = usize::try_from(record_size).map_err(|_| TableError::RecordSize(record_size))?;
        if record_bytes < RECORD_BYTES {
            return Err(TableError::RecordSize(record_size));
        }
        let count = usize::try_from(count).map_err(|_| TableError::Truncated)?;
        let needed = count.checked_mul(record_bytes).and_then(|bytes| bytes.checked_add(HEADER_BYTES));
        if needed.is_none_or(|needed| table.len() < needed) {
            return Err(TableError::Truncated);
        }
        Ok(Workers { table, record_bytes, count })
    }

    /// How many workers there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The workers, in order of their index.
    pub fn iter(&self) -> impl Iterator<Item = Worker> + '_ {
        let records = self.table.get(HEADER_BYTES..).unwrap_or_default();
        records.chunks_exact(self.record_bytes).take(self.count).filter_map(Worker::read)
    }

    /// The worker that holds the turn's session, if it is among the candidates.
    pub fn bound(&self) -> Option<Worker> {
        self.iter().find(Worker::is_bound)
    }
}

// === impl TableError ===

impl fmt::Display for TableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TableError::Truncated => write!(f, "workers.table is cut short"),
            TableError::Version(version) => write!(f, "workers.table has version {version}, not {VERSION}"),
            TableError::RecordSize(bytes) => {
                write!(f, "workers.table has records of {bytes} bytes, not {RECORD_BYTES} or more")
            }
        }
    }
}

impl std::error::Error for TableError {}

#[cfg(test)]
#[path = "workers_tests.rs"]
mod tests;
