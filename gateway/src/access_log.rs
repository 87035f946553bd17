//! The access and decision log: one JSON line per request, written by a thread of its own so that a slow disk never
//! slows a request. When the thread falls behind, lines are dropped and counted in the next one.

use std::fs::OpenOptions;
use std::io::{BufWriter, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use turnstile_config::AccessLog as Destination;

/// Lines that may wait for the writer.
const BACKLOG: usize = 8192;
/// How long the writer lets lines gather. To wake a thread and to write costs as much as a tenth of a small request; a
/// twentieth of a second later nobody minds, and the backlog holds the lines of 400 000 requests a second for so long.
const GATHER: Duration = Duration::from_millis(20);
/// How long the end waits for the last lines to be written. A full pipe that nobody reads must not keep the process alive.
/// (Under test a busy machine may be slow to write them.)
const LAST_LINES: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 2 });
/// Bytes written at a time.
const BUFFER: usize = 64 * 1024;

/// Where lines go. Dropping the last clone ends the writer once it has written what it holds.
#[derive(Clone)]
pub struct AccessLog {
    writer: Option<Arc<Writer>>,
}

struct Writer {
    /// Nothing only while it ends.
    sender: Option<SyncSender<Vec<u8>>>,
    thread: JoinHandle<()>,
    dropped: Arc<AtomicU64>,
}

impl AccessLog {
    /// Starts the writer.
    ///
    /// # Errors
    /// When the file cannot be opened for appending, or the thread cannot start.
    pub fn open(destination: &Destination) -> std::io::Result<Self> {
        let sink: Box<dyn Write + Send> = match destination {
            Destination::Off => return Ok(Self { writer: None }),
            Destination::Stdout => Box::new(std::io::stdout()),
            Destination::Stderr => Box::new(std::io::stderr()),
            Destination::File(path) => {
                Box::new(OpenOptions::new().create(true).append(true).open(path).map_err(|e| {
                    std::io::Error::new(e.kind(), format!("logging.access: cannot open {}: {e}", path.display()))
                })?)
            }
        };
        let (sender, receiver) = sync_channel(BACKLOG);
        let dropped = Arc::new(AtomicU64::new(0));
        let lost = Arc::clone(&dropped);
        let thread =
            std::thread::Builder::new().name("access-log".into()).spawn(move || write_lines(&receiver, sink, &lost))?;
        Ok(Self { writer: Some(Arc::new(Writer { sender: Some(sender), thread, dropped })) })
    }

    /// True when lines go somewhere, so that making one is worth the while.
    pub fn is_on(&self) -> bool {
        self.writer.is_some()
    }

    /// Hands a line (without its newline) to the writer, or drops it.
    pub fn line(&self, line: Vec<u8>) {
        if let Some(writer) = &self.writer
            && let Some(sender) = &writer.sender
            && sender.try_send(line).is_err()
        {
            writer.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Writer {
    /// What was handed over is written before the process ends, unless nobody reads it.
    fn drop(&mut self) {
        self.sender = None;
        let until = Instant::now() + LAST_LINES;
        while !self.thread.is_finished() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn write_lines(receiver: &Receiver<Vec<u8>>, sink: Box<dyn Write + Send>, dropped: &AtomicU64) {
    let mut out = BufWriter::with_capacity(BUFFER, sink);
    // A sender has to wake this thread only when it waits here: once a gather time, however many lines come.
    while let Ok(first) = receiver.recv() {
        std::thread::sleep(GATHER);
        for line in std::iter::once(first).chain(receiver.try_iter()) {
            let lost = dropped.swap(0, Ordering::Relaxed);
            if lost > 0 {
                let _ = writeln!(out, "{{\"event\":\"log_lines_dropped\",\"count\":{lost}}}");
            }
            if out.write_all(&line).and_then(|()| out.write_all(b"\n")).is_err() {
                dropped.fetch_add(1, Ordering::Relaxed);
            }
        }
        let _ = out.flush();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn lines_reach_the_file_in_order() {
        let dir = std::env::temp_dir().join(format!("turnstile-log-{}", crate::request_id::random_hex()));
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("access.log");
        let log = AccessLog::open(&Destination::File(path.clone())).unwrap();
        for n in 0..100 {
            log.line(format!("{{\"n\":{n}}}").into_bytes());
        }
        drop(log);
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), 100, "the end waits until all is written");
        assert_eq!(text.lines().next(), Some("{\"n\":0}"));
        assert_eq!(text.lines().last(), Some("{\"n\":99}"));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
