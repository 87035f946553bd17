//! The file of a recording: bounded, replaced when it is full, each one complete in itself.

use super::encode_blocks;
use super::line::{FleetLine, LostLine, TurnLine, text};
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use turnstile_fleet::ids::WorkerId;
use turnstile_fleet::index::PrefixIndex;

/// Blocks that a file is known to have. Forgotten ones are written once more, so the bound costs bytes and nothing else.
const KNOWN_BLOCKS: usize = 1 << 20;
/// Bytes written at a time.
const BUFFER: usize = 64 * 1024;
/// Says that the line before it was cut.
#[derive(serde::Serialize)]
struct Cut {}

/// The index is of workers; what stands in the file is that of one.
const FILE: WorkerId = WorkerId(0);

/// The file that is written, and those before it (`PATH.1` is the newest of them).
pub struct RecordFile {
    path: PathBuf,
    /// Most bytes of one file.
    most: u64,
    /// Files kept, this one included.
    keep: u32,
    out: BufWriter<File>,
    written: u64,
    /// Blocks of which this file has the hashes.
    known: PrefixIndex,
    /// The last line about the fleet.
    fleet: Option<String>,
    /// What failed was told.
    told: bool,
}

impl RecordFile {
    /// Opens the file for appending, readable by its owner only.
    ///
    /// # Errors
    /// It cannot be opened.
    pub fn open(path: PathBuf, most: u64, keep: u32) -> std::io::Result<Self> {
        let (out, written) = append(&path)?;
        let known = PrefixIndex::new(KNOWN_BLOCKS);
        Ok(Self { path, most, keep, out, written, known, fleet: None, told: false })
    }

    /// Writes a turn. False if that failed.
    pub fn turn(&mut self, mut line: TurnLine, blocks: &[u64]) -> bool {
        self.shorten(&mut line, blocks);
        let Ok(mut written) = text("turn", &line) else { return false };
        if self.is_full(written.len()) {
            if !self.replace() {
                return false;
            }
            // The new file knows nothing of the old one's blocks.
            self.shorten(&mut line, blocks);
            match text("turn", &line) {
                Ok(again) => written = again,
                Err(_) => return false,
            }
        }
        let done = self.write(&written);
        if done {
            self.known.insert(FILE, blocks);
        }
        done
    }

    /// Leaves out what the file has already.
    fn shorten(&self, line: &mut TurnLine, blocks: &[u64]) {
        let known = self.known.matched(FILE, blocks);
        line.base = known.checked_sub(1).and_then(|last| blocks.get(last)).map(|hash| format!("{hash:016x}"));
        line.base_blocks = known as u64;
        line.blocks = encode_blocks(blocks.get(known..).unwrap_or_default());
    }

    /// Writes what the fleet is.
    pub fn fleet(&mut self, line: &FleetLine) {
        let Ok(written) = text("fleet", line) else { return };
        self.fleet = Some(written.clone());
        if !self.is_full(written.len()) {
            self.write(&written);
        } else {
            // It stands at the head of the next one.
            self.replace();
        }
    }

    /// Writes how many turns were lost. False if that failed.
    pub fn lost(&mut self, line: &LostLine) -> bool {
        text("lost", line).is_ok_and(|written| self.write(&written))
    }

    /// Everything so far reaches the file.
    pub fn flush(&mut self) {
        if let Err(error) = self.out.flush() {
            self.failed(&error);
        }
    }

    fn is_full(&self, more: usize) -> bool {
        self.written > 0 && self.written.saturating_add(more as u64 + 1) > self.most
    }

    fn write(&mut self, line: &str) -> bool {
        match writeln!(self.out, "{line}") {
            Ok(()) => {
                self.written = self.written.saturating_add(line.len() as u64 + 1);
                true
            }
            Err(error) => {
                self.failed(&error);
                false
            }
        }
    }

    /// Begins a new file. False if it cannot; turns are lost then, rather than the bound.
    fn replace(&mut self) -> bool {
        self.flush();
        let older = |n: u32| {
            let mut name = self.path.clone().into_os_string();
            name.push(format!(".{n}"));
            PathBuf::from(name)
        };
        let moved = if self.keep <= 1 {
            std::fs::remove_file(&self.path)
        } else {
            for n in (1..self.keep - 1).rev() {
                // One that is not there yet leaves no gap.
                let _ = std::fs::rename(older(n), older(n + 1));
            }
            std::fs::rename(&self.path, older(1))
        };
        match moved.and_then(|()| append(&self.path)) {
            Ok((out, written)) => {
                (self.out, self.written) = (out, written);
                self.known.forget(FILE);
                self.told = false;
                if let Some(fleet) = self.fleet.clone() {
                    self.write(&fleet);
                }
                true
            }
            Err(error) => {
                self.failed(&error);
                false
            }
        }
    }

    fn failed(&mut self, error: &std::io::Error) {
        // What of the buffer has reached the file nobody knows: nothing later may lean on it.
        self.known.forget(FILE);
        if !std::mem::replace(&mut self.told, true) {
            tracing::error!(path = %self.path.display(), %error, "logging.record: turns are not recorded");
        }
    }
}

/// The file and its length. A last line that was cut when a process died is ended and marked, for the reader not to take it
/// for damage.
fn append(path: &PathBuf) -> std::io::Result<(BufWriter<File>, u64)> {
    let mut file = OpenOptions::new().create(true).read(true).append(true).mode(0o600).open(path)?;
    let mut len = file.seek(SeekFrom::End(0))?;
    if len > 0 {
        let mut last = [0];
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
        if last != *b"\n" {
            let mark = format!("\n{}\n", text("cut", &Cut {})?);
            file.write_all(mark.as_bytes())?;
            len += mark.len() as u64;
        }
    }
    Ok((BufWriter::with_capacity(BUFFER, file), len))
}
