//! The whole of a replay, as a table and as JSON.

use super::compare::{Difference, Interval};
use super::fleet::WorkerSpec;
use super::log::Notes;
use super::results::Summary;
use serde::Serialize;
use std::fmt::Write;

/// What was replayed, and how.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Setting {
    /// The files.
    pub logs: Vec<String>,
    /// The pool.
    pub pool: String,
    /// Reading the log.
    pub reading: Notes,
    /// Turns that were played.
    pub turns: u64,
    /// Of these, at the beginning, not counted.
    pub warmup_turns: u64,
    /// Turns that came after the end of another.
    pub following_turns: u64,
    /// Turns of streaming sessions that were played with their history.
    pub stream_turns: u64,
    /// Arrivals and pauses so many times as fast.
    pub speed: f64,
    /// The seed.
    pub seed: u64,
    /// Resamples of each difference.
    pub resamples: u32,
    /// The file that describes them, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fleet: Option<String>,
    /// The fleet.
    pub workers: Vec<WorkerSpec>,
    /// Plugins of the phase `filter` that policies have and that were not run.
    pub filters_not_run: Vec<String>,
}

/// The report.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// What was replayed.
    pub replay: Setting,
    /// Policy by policy.
    pub policies: Vec<Summary>,
    /// Each policy compared with the first.
    pub differences: Vec<Difference>,
}

/// A table: its head and its lines.
pub struct Table {
    /// Names of the columns.
    pub head: Vec<String>,
    /// Lines of as many cells.
    pub lines: Vec<Vec<String>>,
}

/// Milliseconds: as many digits as say something.
pub fn ms(value: f64) -> String {
    if value.abs() < 10.0 { format!("{value:.1}") } else { format!("{value:.0}") }
}

fn signed_ms(value: f64) -> String {
    format!("{}{}", if value < 0.0 { "-" } else { "+" }, ms(value.abs()))
}

fn interval(value: &Interval, number: impl Fn(f64) -> String) -> String {
    format!("{} [{}, {}]", number(value.difference), number(value.low), number(value.high))
}

impl Setting {
    /// One sentence or two on what was replayed.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let _ = write!(
            text,
            "{} turns of {} on {} workers{}, {} of them warm-up",
            self.turns,
            self.logs.join(", "),
            self.workers.len(),
            self.fleet.as_ref().map(|file| format!(" of {file}")).unwrap_or_default(),
            self.warmup_turns
        );
        if self.following_turns > 0 {
            let _ = write!(text, "; closed loop, {} turns follow another", self.following_turns);
        }
        if (self.speed - 1.0).abs() > f64::EPSILON {
            let _ = write!(text, "; {} times as fast", self.speed);
        }
        let _ = writeln!(text, "; seed {}", self.seed);
        let notes = [
            (self.reading.cut, "lines were cut"),
            (self.reading.lost, "turns were lost when they were recorded"),
            (self.reading.incomplete, "prompts began in lines that are missing"),
            (self.stream_turns, "turns of streaming sessions were played with their history"),
        ];
        for (count, what) in notes.into_iter().filter(|(count, _)| *count > 0) {
            let _ = writeln!(text, "note: {count} {what}");
        }
        for (cause, count) in &self.reading.left_out {
            let _ = writeln!(text, "note: {count} turns left out: {cause}");
        }
        for filter in &self.filters_not_run {
            let _ = writeln!(text, "note: the filter {filter} was not run: there are no bodies");
        }
        text
    }
}

impl Report {
    /// Policies with their numbers.
    pub fn summary_table(&self) -> Table {
        let head = [
            "policy",
            "hit",
            "of ideal",
            "TTFT mean",
            "p50",
            "p90",
            "p99 ms",
            "queue p99",
            "prefilled",
            "CoV",
            "max/mean",
            "moved",
            "refused",
            "makespan s",
        ];
        let line = |summary: &Summary| {
            let of_ideal =
                if summary.ideal_hit_ratio > 0.0 { summary.hit_ratio / summary.ideal_hit_ratio } else { 1.0 };
            vec![
                summary.policy.clone(),
                format!("{:.3}", summary.hit_ratio),
                format!("{of_ideal:.3}"),
                ms(summary.ttft_ms.mean),
                ms(summary.ttft_ms.p50),
                ms(summary.ttft_ms.p90),
                ms(summary.ttft_ms.p99),
                ms(summary.queue_ms.p99),
                summary.prefilled_tokens.to_string(),
                format!("{:.3}", summary.prefilled_balance.cov),
                format!("{:.2}", summary.prefilled_balance.max_over_mean),
                format!("{}/{}", summary.sessions_moved, summary.sessions),
                summary.refused.values().sum::<u64>().to_string(),
                format!("{:.1}", summary.makespan_s),
            ]
        };
        Table { head: head.map(str::to_owned).to_vec(), lines: self.policies.iter().map(line).collect() }
    }

    /// TTFT by urgency, if there is more than one.
    pub fn urgency_table(&self) -> Option<Table> {
        let several = self.policies.iter().any(|summary| summary.ttft_ms_by_urgency.len() > 1);
        let head = ["policy", "urgency", "TTFT mean", "p50", "p90", "p99 ms"].map(str::to_owned).to_vec();
        let lines = self.policies.iter().flat_map(|summary| {
            summary.ttft_ms_by_urgency.iter().map(|(urgency, spread)| {
                let numbers = [spread.mean, spread.p50, spread.p90, spread.p99].map(ms);
                [vec![summary.policy.clone(), (*urgency).to_owned()], numbers.to_vec()].concat()
            })
        });
        several.then(|| Table { head, lines: lines.collect() })
    }

    /// Differences from the first policy, if there is another.
    pub fn difference_table(&self) -> Option<Table> {
        let first = self.differences.first()?;
        let head = [
            format!("against {}", first.against),
            "hit".into(),
            "TTFT mean".into(),
            "p50".into(),
            "p90".into(),
            "p99 ms".into(),
        ];
        let line = |difference: &Difference| {
            let hit = interval(&difference.hit_ratio, |value| format!("{value:+.3}"));
            let ttft = difference.ttft_ms.iter().map(|(_, value)| interval(value, signed_ms));
            [difference.policy.clone(), hit].into_iter().chain(ttft).collect()
        };
        Some(Table { head: head.to_vec(), lines: self.differences.iter().map(line).collect() })
    }

    /// The text for a terminal.
    pub fn text(&self) -> String {
        let mut text = format!("{}\n{}", self.replay.text(), self.summary_table().text());
        if let Some(table) = self.urgency_table() {
            text.push_str(&format!("\n{}", table.text()));
        }
        if let (Some(table), Some(first)) = (self.difference_table(), self.differences.first()) {
            text.push_str(&format!(
                "\n{}\n95 % intervals: paired bootstrap, {} resamples of {} conversations\n",
                table.text().trim_end(),
                self.replay.resamples,
                first.conversations
            ));
        }
        text
    }

    /// The report as JSON.
    ///
    /// # Errors
    /// A number that JSON does not have.
    pub fn json(&self) -> Result<String, String> {
        serde_json::to_string_pretty(self).map(|text| text + "\n").map_err(|e| e.to_string())
    }
}

impl Table {
    /// In columns: the first to the left, the others to the right.
    pub fn text(&self) -> String {
        let lines = || std::iter::once(&self.head).chain(&self.lines);
        let width = |column: usize| lines().filter_map(|line| line.get(column)).map(|c| c.chars().count()).max();
        let mut text = String::new();
        for line in lines() {
            let mut written = String::new();
            for (column, cell) in line.iter().enumerate() {
                let width = width(column).unwrap_or_default();
                let _ = match column {
                    0 => write!(written, "{cell:width$}"),
                    _ => write!(written, "  {cell:>width$}"),
                };
            }
            let _ = writeln!(text, "{}", written.trim_end());
        }
        text
    }
}
