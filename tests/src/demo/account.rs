//! The account: what is printed, and every claim checked before it is.

use serde_json::Value;
use std::fmt::Write as _;

/// Lines so far, and the first claim that did not hold.
#[derive(Default)]
pub struct Account {
    text: String,
    claims: usize,
    broken: Vec<String>,
}

impl Account {
    /// A line.
    pub fn line(&mut self, line: impl AsRef<str>) {
        let _ = writeln!(self.text, "{}", line.as_ref().trim_end());
    }

    /// A claim: printed as true, or kept as broken with what was found.
    pub fn claim(&mut self, holds: bool, claim: impl AsRef<str>, found: impl FnOnce() -> String) {
        self.claims += 1;
        if holds {
            self.line(format!("   ok  {}", claim.as_ref()));
        } else {
            let found = found();
            self.line(format!("   NO  {}", claim.as_ref()));
            self.broken.push(format!("{}: {found}", claim.as_ref()));
        }
    }

    /// The text, the number of claims, and those that do not hold.
    pub fn close(self) -> (String, usize, Vec<String>) {
        (self.text, self.claims, self.broken)
    }

    /// The head of a table of decisions.
    pub fn decisions_head(&mut self) {
        self.line(format!(
            "   {:<11} {:<9} {:<22} {:<9} {:>8} {:>7} {:>10} {:>9} {:>8}",
            "turn", "worker", "why", "session", "queue ms", "prompt", "est cached", "cached", "prefill"
        ));
    }

    /// One decision, from the gateway's log.
    pub fn decision(&mut self, record: &Record) {
        let session = match (record.text("action"), record.text("session_mode")) {
            ("", "") => "-".to_owned(),
            ("", mode) => mode.to_owned(),
            (action, mode) => format!("{action}/{mode}"),
        };
        let prefill = match record.text("prefill") {
            "" => "-",
            other => other,
        };
        self.line(format!(
            "   {:<11} {:<9} {:<22} {:<9} {:>8} {:>7} {:>10} {:>9} {:>8}",
            record.text("request_id"),
            record.text("worker"),
            record.text("reason"),
            session,
            record.number("queue_ms"),
            record.number("prompt_tokens"),
            record.number("predicted_cached"),
            record.number("cached_tokens"),
            prefill
        ));
    }
}

/// One line of the gateway's access and decision log.
#[derive(Clone)]
pub struct Record(pub Value);

impl Record {
    /// A member as text; empty when it is not there.
    pub fn text(&self, key: &str) -> &str {
        self.0.get(key).and_then(Value::as_str).unwrap_or_default()
    }

    /// A member as a whole number; 0 when it is not there.
    pub fn number(&self, key: &str) -> u64 {
        self.0.get(key).and_then(Value::as_u64).unwrap_or(0)
    }

    /// When its answer had ended, Unix ms.
    pub fn ended_at(&self) -> f64 {
        self.number("ts") as f64 + self.0.get("total_ms").and_then(Value::as_f64).unwrap_or(0.0)
    }
}
