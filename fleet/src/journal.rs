//! The journal of engine sessions: what a gateway has opened on its workers and not yet closed, line by line, so that the next
//! process can close what a killed one left behind.
//!
//! A line is a hash of the rest, a space, and a JSON object: `{"open":{…}}` or `{"gone":"ENGINE-ID"}`. Lines stand alone: one that is
//! cut or changed is skipped and counted, and the others still count.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::session::SessionMode;

/// An engine session that was opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenRecord {
    /// The engine's id.
    pub id: Arc<str>,
    /// It is a streaming session, else a tag.
    pub stream: bool,
    /// The worker's id.
    pub worker: Arc<str>,
    /// The worker's URL.
    pub url: Arc<str>,
    /// The rank.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<u32>,
    /// The engine's timeout, ms.
    pub timeout_ms: u64,
}

/// One line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Record {
    /// It will be opened.
    Open(OpenRecord),
    /// It is no more.
    Gone(Arc<str>),
}

/// What a journal says in the end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Replay {
    /// What was opened and is not known to be gone, by id.
    pub open: BTreeMap<Arc<str>, OpenRecord>,
    /// Lines that say nothing any more. A cut last line, which a killed process leaves behind, is not among them.
    pub damaged: usize,
}

// === impl OpenRecord ===

impl OpenRecord {
    /// What it is.
    pub fn mode(&self) -> SessionMode {
        if self.stream { SessionMode::Stream } else { SessionMode::Tag }
    }
}

// === impl Record ===

impl Record {
    /// Appends its line.
    pub fn write(&self, out: &mut Vec<u8>) {
        // Neither form can fail to serialize.
        let json = serde_json::to_string(self).unwrap_or_default();
        out.extend_from_slice(format!("{:016x} {json}\n", xxh3_64(json.as_bytes())).as_bytes());
    }

    fn read(line: &[u8]) -> Option<Self> {
        let (hash, rest) = line.split_at_checked(16)?;
        let json = rest.strip_prefix(b" ")?;
        let hash = u64::from_str_radix(std::str::from_utf8(hash).ok()?, 16).ok()?;
        (hash == xxh3_64(json)).then(|| serde_json::from_slice(json).ok())?
    }
}

// === impl Replay ===

impl Replay {
    /// Reads a journal. Any bytes have an answer.
    pub fn of(journal: &[u8]) -> Self {
        let mut replay = Self::default();
        let whole = journal.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        let lines = journal.get(..whole).unwrap_or_default().split(|&byte| byte == b'\n');
        for line in lines.filter(|line| !line.is_empty()) {
            match Record::read(line) {
                Some(Record::Open(open)) => {
                    replay.open.insert(Arc::clone(&open.id), open);
                }
                Some(Record::Gone(id)) => {
                    replay.open.remove(&id);
                }
                None => replay.damaged += 1,
            }
        }
        replay
    }
}

#[cfg(test)]
#[path = "journal_tests.rs"]
mod tests;
