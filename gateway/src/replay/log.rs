//! Reading what was recorded: the gateway's own lines, or a public trace. Every error names file and line.

use super::blocks::{Blocks, NONE};
use super::trace;
use crate::recording::decode_blocks;
use crate::recording::line::{FleetLine, Head, LostLine, TurnLine, VERSION};
use clap::ValueEnum;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Longest line, bytes.
const MAX_LINE: u64 = 64 << 20;
/// Most tokens of a prompt or an output: they are laid out one by one.
pub const MAX_TOKENS: u64 = 1 << 24;
/// The year 2100, Unix ms: nothing was recorded later.
const MAX_TS: u64 = 4_102_444_800_000;
/// Most blocks of a prompt.
const MAX_BLOCKS: u64 = 1 << 20;

/// What a file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Format {
    /// What the first line looks like.
    #[default]
    Auto,
    /// Turns that this gateway recorded.
    Turnstile,
    /// The Mooncake trace: timestamp, input_length, output_length, hash_ids.
    Mooncake,
}

/// A turn of the log.
#[derive(Debug, Clone)]
pub struct Entry {
    /// What the line says.
    pub line: TurnLine,
    /// Last whole block of its prompt, as the line names it; [`NONE`] without one.
    pub leaf: u32,
}

/// What was read.
#[derive(Debug, Default)]
pub struct Log {
    /// The turns, in the order of their arrival.
    pub entries: Vec<Entry>,
    /// The blocks of their prompts.
    pub blocks: Blocks,
    /// The last description of the fleet.
    pub fleet: Option<FleetLine>,
    /// What is worth knowing about the reading.
    pub notes: Notes,
}

/// What is worth knowing about the reading.
#[derive(Debug, Default, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Notes {
    /// Lines read.
    pub lines: u64,
    /// Lines that were cut when their writer died.
    pub cut: u64,
    /// Turns that the gateway says it could not record.
    pub lost: u64,
    /// Prompts of which the beginning stood in a line that is missing.
    pub incomplete: u64,
    /// Turns that are left out, by cause.
    pub left_out: BTreeMap<String, u64>,
}

/// One file while it is read.
struct Reader<'a> {
    path: &'a Path,
    number: u64,
    format: Format,
    /// A line that could not be read, unless the next one says that it was cut.
    doubtful: Option<String>,
}

// === impl Log ===

impl Log {
    /// Reads the files, one after the other.
    ///
    /// # Errors
    /// The file and line that is wrong, and why.
    pub fn read(paths: &[PathBuf], format: Format) -> Result<Self, String> {
        let mut log = Self::default();
        for path in paths {
            let file = File::open(path).map_err(|e| format!("{}: {e}", path.display()))?;
            Reader { path, number: 0, format, doubtful: None }.read(BufReader::new(file), &mut log)?;
        }
        // Lines are written when turns end. The sort is stable: turns of one millisecond stay in the order of their lines.
        log.entries.sort_by_key(|entry| entry.line.ts);
        Ok(log)
    }

    /// Leaves turns out.
    pub fn retain(&mut self, cause: &str, keep: impl Fn(&TurnLine) -> bool) {
        let before = self.entries.len();
        self.entries.retain(|entry| keep(&entry.line));
        let gone = (before - self.entries.len()) as u64;
        if gone > 0 {
            *self.notes.left_out.entry(cause.to_owned()).or_insert(0) += gone;
        }
    }
}

// === impl Reader ===

impl Reader<'_> {
    fn read(&mut self, mut file: impl BufRead, log: &mut Log) -> Result<(), String> {
        let mut line = Vec::new();
        loop {
            line.clear();
            let read = file.by_ref().take(MAX_LINE + 1).read_until(b'\n', &mut line);
            read.map_err(|e| format!("{}: {e}", self.path.display()))?;
            if line.is_empty() {
                break;
            }
            self.number += 1;
            if line.len() as u64 > MAX_LINE {
                return Err(self.wrong(&format!("is longer than {MAX_LINE} bytes")));
            }
            let ended = line.ends_with(b"\n");
            let text = line.trim_ascii();
            if text.is_empty() {
                continue;
            }
            log.notes.lines += 1;
            self.line(text, ended, log)?;
        }
        if let Some(error) = self.doubtful.take() {
            return Err(error);
        }
        Ok(())
    }

    fn wrong(&self, what: &str) -> String {
        format!("{}:{}: {what}", self.path.display(), self.number)
    }

    fn line(&mut self, text: &[u8], ended: bool, log: &mut Log) -> Result<(), String> {
        if self.format == Format::Auto {
            self.format = if serde_json::from_slice::<Head>(text).is_ok() {
                Format::Turnstile
            } else if trace::is_row(text) {
                Format::Mooncake
            } else if !ended {
                log.notes.cut += 1;
                return Ok(());
            } else {
                return Err(self.wrong("neither a turn that was recorded nor a row of a Mooncake trace"));
            };
        }
        let outcome = match self.format {
            Format::Mooncake => self.row(text, log),
            Format::Turnstile | Format::Auto => self.own(text, log),
        };
        match outcome {
            Ok(()) => Ok(()),
            // A gateway that was killed, or a copy of a file that is being written.
            Err(Wrong::Syntax(_)) if !ended => {
                log.notes.cut += 1;
                Ok(())
            }
            Err(Wrong::Syntax(error)) => match self.doubtful.replace(error) {
                Some(earlier) => Err(earlier),
                None => Ok(()),
            },
            Err(Wrong::Content(error)) => Err(self.doubtful.take().unwrap_or(error)),
        }
    }

    fn row(&self, text: &[u8], log: &mut Log) -> Result<(), Wrong> {
        let entry = trace::entry(text, &mut log.blocks).map_err(|wrong| wrong.at(|what| self.wrong(what)))?;
        log.entries.push(entry);
        Ok(())
    }

    fn own(&mut self, text: &[u8], log: &mut Log) -> Result<(), Wrong> {
        let syntax = |e: serde_json::Error| Wrong::Syntax(format!("not a line of a recording: {e}"));
        let head: Head = serde_json::from_slice(text).map_err(syntax).map_err(|w| w.at(|what| self.wrong(what)))?;
        if head.v != VERSION {
            return Err(Wrong::Content(self.wrong(&format!("version {} (this turnstile reads {VERSION})", head.v))));
        }
        if head.kind == "cut" && self.doubtful.take().is_some() {
            log.notes.cut += 1;
            return Ok(());
        }
        if let Some(error) = self.doubtful.take() {
            return Err(Wrong::Content(error));
        }
        let content = |e: serde_json::Error| Wrong::Content(self.wrong(&e.to_string()));
        match head.kind.as_str() {
            "turn" => {
                let line: TurnLine = serde_json::from_slice(text).map_err(content)?;
                let entry = own_entry(line, log).map_err(|what| Wrong::Content(self.wrong(&what)))?;
                log.entries.push(entry);
            }
            "fleet" => log.fleet = Some(serde_json::from_slice(text).map_err(content)?),
            "lost" => {
                let LostLine { lost } = serde_json::from_slice(text).map_err(content)?;
                log.notes.lost = log.notes.lost.saturating_add(lost);
            }
            _ => {}
        }
        Ok(())
    }
}

/// What is wrong with a line.
pub enum Wrong {
    /// It cannot be read at all, as if it had been cut.
    Syntax(String),
    /// It says something that makes no sense.
    Content(String),
}

impl Wrong {
    fn at(self, place: impl Fn(&str) -> String) -> Self {
        match self {
            Self::Syntax(what) => Self::Syntax(place(&what)),
            Self::Content(what) => Self::Content(place(&what)),
        }
    }
}

fn own_entry(line: TurnLine, log: &mut Log) -> Result<Entry, String> {
    check(&line)?;
    let base = match &line.base {
        None if line.base_blocks > 0 => return Err("base_blocks without base".into()),
        None => NONE,
        Some(hash) => {
            let hash = hex("base", hash)?;
            let depth = u32::try_from(line.base_blocks).ok().filter(|blocks| *blocks > 0);
            let depth = depth.ok_or("base without base_blocks")?;
            match log.blocks.find(hash) {
                Some(known) => known,
                None => {
                    log.notes.incomplete += 1;
                    log.blocks.unknown(hash, depth)
                }
            }
        }
    };
    let new = decode_blocks(&line.blocks).map_err(|what| format!("blocks: {what}"))?;
    if new.len() as u64 + line.base_blocks > MAX_BLOCKS {
        return Err(format!("blocks: more than {MAX_BLOCKS}"));
    }
    let leaf = new.into_iter().fold(base, |parent, hash| log.blocks.child(parent, hash));
    Ok(Entry { line, leaf })
}

/// Sixteen hexadecimal digits.
pub fn hex(member: &str, text: &str) -> Result<u64, String> {
    u64::from_str_radix(text, 16)
        .ok()
        .filter(|_| text.len() == 16)
        .ok_or_else(|| format!("{member}: expected 16 hexadecimal digits, found {text:?}"))
}

fn check(line: &TurnLine) -> Result<(), String> {
    for (member, tokens) in [
        ("prompt_tokens", line.prompt_tokens),
        ("cached_tokens", line.cached_tokens),
        ("completion_tokens", line.completion_tokens),
    ] {
        if tokens.is_some_and(|tokens| tokens > MAX_TOKENS) {
            return Err(format!("{member}: more than {MAX_TOKENS}"));
        }
    }
    if line.ts > MAX_TS {
        return Err(format!("ts: {} is no Unix time in ms", line.ts));
    }
    if line.body_bytes > 1 << 32 || line.prompt_bytes > 1 << 32 {
        return Err("body_bytes or prompt_bytes: more than 4 GiB".into());
    }
    if !(64..=1 << 20).contains(&line.block_bytes) {
        return Err(format!("block_bytes: expected 64 to 1048576, found {}", line.block_bytes));
    }
    if line.base_blocks > MAX_BLOCKS {
        return Err(format!("base_blocks: more than {MAX_BLOCKS}"));
    }
    // A year.
    let ms = |value: f64| value.is_finite() && (0.0..=3.2e10).contains(&value);
    if !ms(line.total_ms) || !line.ttft_ms.is_none_or(ms) {
        return Err("total_ms or ttft_ms: not a time in ms".into());
    }
    if !line.timeout_s.is_none_or(|s| s.is_finite() && s > 0.0) || !line.latency_sensitivity.is_none_or(f64::is_finite)
    {
        return Err("timeout_s or latency_sensitivity: not a number of seconds".into());
    }
    Ok(())
}

#[cfg(test)]
#[path = "log_tests.rs"]
mod tests;
