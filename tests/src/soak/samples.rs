//! What is measured: of the gateway's process, in its metrics, on the workers.

use super::fleet::Held;
use crate::harness::Samples;
use crate::process::{open_files, resident_bytes};
use std::fmt::Write as _;

/// One look at everything.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// In the order of [`ROWS`].
    values: [f64; ROWS.len()],
}

/// A row of the table: its name, and by how much the end may be over the start.
struct Row {
    name: &'static str,
    /// A share of the start.
    share: f64,
    /// And so much more.
    more: f64,
}

const fn row(name: &'static str, share: f64, more: f64) -> Row {
    Row { name, share, more }
}

/// The row of the gateway's memory.
pub const MEMORY: &str = "memory (RSS), MiB";

const ROWS: [Row; 12] = [
    row(MEMORY, 0.2, 24.0),
    row("open files", 0.0, 8.0),
    // Probes come and go, each with a connection.
    row("tasks", 0.0, 8.0),
    row("sessions", 0.0, 0.0),
    row("turns in the queue", 0.0, 0.0),
    row("requests in progress", 0.0, 0.0),
    row("turns in flight", 0.0, 0.0),
    row("side requests waiting", 0.0, 0.0),
    row("requests on the workers", 0.0, 0.0),
    row("sessions on the workers", 0.0, 0.0),
    row("session tags on the workers", 0.0, 0.0),
    row("session hazards on the workers", 0.0, 0.0),
];

impl Sample {
    /// Takes one.
    ///
    /// # Errors
    /// The gateway is gone.
    pub fn take(pid: u32, metrics: &str, held: Held) -> Result<Self, String> {
        let samples = Samples::new(metrics.to_owned());
        let sum = |name: &str| samples.sum(name, &[]);
        #[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
        let values = [
            resident_bytes(pid)? as f64 / 1048576.0,
            open_files(pid)? as f64,
            sum("turnstile_tasks"),
            sum("turnstile_sessions"),
            sum("turnstile_queue_depth"),
            sum("turnstile_requests_in_progress"),
            samples.sum("turnstile_worker", &[("field", "in_flight")]),
            sum("turnstile_side_queue_depth"),
            held.requests as f64,
            held.sessions as f64,
            held.tags as f64,
            held.hazards as f64,
        ];
        Ok(Self { values })
    }

    /// What counts that should be nothing, and is not; that is: what is left to wait for.
    pub fn unsettled(&self) -> Vec<String> {
        let busy = ROWS.iter().zip(self.values).skip(3).filter(|(_, value)| *value != 0.0);
        busy.map(|(row, value)| format!("{}: {value}", row.name)).collect()
    }

    /// The smaller of two, row by row.
    pub fn at_least(&mut self, other: &Self) {
        for (value, other) in self.values.iter_mut().zip(other.values) {
            *value = value.min(other);
        }
    }

    /// The larger of two, row by row.
    pub fn at_most(&mut self, other: &Self) {
        for (value, other) in self.values.iter_mut().zip(other.values) {
            *value = value.max(other);
        }
    }
}

/// The table of start, peak and end, and the rows whose end is too far from their start.
pub fn table(start: &Sample, peak: &Sample, end: &Sample) -> (String, Vec<String>) {
    let mut text = String::new();
    let mut grown = Vec::new();
    let _ = writeln!(text, "{:<32} {:>10} {:>10} {:>10} {:>10}", "", "start", "peak", "end", "at most");
    for (place, row) in ROWS.iter().enumerate() {
        let of = |sample: &Sample| sample.values.get(place).copied().unwrap_or_default();
        let most = of(start) * (1.0 + row.share) + row.more;
        let verdict = if of(end) > most { "  GROWN" } else { "" };
        let _ = writeln!(
            text,
            "{:<32} {:>10.1} {:>10.1} {:>10.1} {:>10.1}{verdict}",
            row.name,
            of(start),
            of(peak),
            of(end),
            most
        );
        if of(end) > most {
            grown.push(format!("{}: {:.1} at the start, {:.1} at the end", row.name, of(start), of(end)));
        }
    }
    (text, grown)
}
