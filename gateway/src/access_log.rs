//! The access and decision log: one JSON line per request, written by a thread of its own so that a slow disk never
//! slows a request. When the thread falls behind, lines are dropped and counted in the next one.

use std::fs::OpenOptions;
use std::io::{BufWriter, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;
use turnstile_config::AccessLog as Destination;

/// Lines that may wait for the writer.
const BACKLOG: usize = 8192;

/// Where lines go. Dropping the last clone ends the writer once it has written what it holds.
#[derive(Clone)]
pub struct AccessLog {
    sender: Option<SyncSender<String>>,
    dropped: Arc<AtomicU64>,
}

impl AccessLog {
    /// Starts the writer.
    ///
    /// # Errors
    /// When the file cannot be opened for appending, or the thread cannot start.
    pub fn open(destination: &Destination) -> std::io::Result<Self> {
        let dropped = Arc::new(AtomicU64::new(0));
        let sink: Box<dyn Write + Send> = match destination {
            Destination::Off => return Ok(Self { sender: None, dropped }),
            Destination::Stdout => Box::new(std::io::stdout()),
            Destination::Stderr => Box::new(std::io::stderr()),
            Destination::File(path) => {
                Box::new(OpenOptions::new().create(true).append(true).open(path).map_err(|e| {
                    std::io::Error::new(e.kind(), format!("logging.access: cannot open {}: {e}", path.display()))
                })?)
            }
        };
        let (sender, receiver) = sync_channel(BACKLOG);
        let lost = Arc::clone(&dropped);
        std::thread::Builder::new().name("access-log".into()).spawn(move || write_lines(&receiver, sink, &lost))?;
        Ok(Self { sender: Some(sender), dropped })
    }

    /// True when lines go somewhere, so that making one is worth the while.
    pub fn is_on(&self) -> bool {
        self.sender.is_some()
    }

    /// Hands a line (without its newline) to the writer, or drops it.
    pub fn line(&self, line: String) {
        if let Some(sender) = &self.sender
            && sender.try_send(line).is_err()
        {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn write_lines(receiver: &Receiver<String>, sink: Box<dyn Write + Send>, dropped: &AtomicU64) {
    let mut out = BufWriter::new(sink);
    let mut dirty = false;
    loop {
        // Flush when nothing more is at hand, so that a quiet log is a current one.
        let wait = if dirty { Duration::ZERO } else { Duration::from_secs(3600) };
        match receiver.recv_timeout(wait) {
            Ok(line) => {
                let lost = dropped.swap(0, Ordering::Relaxed);
                let note = if lost > 0 {
                    format!("{{\"event\":\"log_lines_dropped\",\"count\":{lost}}}\n")
                } else {
                    String::new()
                };
                if writeln!(out, "{note}{line}").is_err() {
                    dropped.fetch_add(1, Ordering::Relaxed);
                }
                dirty = true;
            }
            Err(RecvTimeoutError::Timeout) => {
                let _ = out.flush();
                dirty = false;
            }
            Err(RecvTimeoutError::Disconnected) => {
                let _ = out.flush();
                return;
            }
        }
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
            log.line(format!("{{\"n\":{n}}}"));
        }
        let deadline = std::time::Instant::now() + Duration::from_secs(30);
        let text = loop {
            let text = std::fs::read_to_string(&path).unwrap();
            if text.lines().count() == 100 {
                break text;
            }
            assert!(std::time::Instant::now() < deadline, "the writer wrote {} lines", text.lines().count());
            std::thread::yield_now();
        };
        assert_eq!(text.lines().next(), Some("{\"n\":0}"));
        assert_eq!(text.lines().last(), Some("{\"n\":99}"));
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
