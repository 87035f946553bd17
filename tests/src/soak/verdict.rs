//! Whether each failed turn has a fault that explains it.

use super::trouble::Window;
use super::turn::{Ended, Outcome};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{BufRead as _, BufReader};
use std::path::Path;

/// Attempts that the gateway makes for one request.
pub const ATTEMPTS: usize = 3;

/// Faults that a request meets before anything of the answer has reached the client, and that another worker makes good.
const MADE_GOOD: [&str; 8] = ["cut", "reset", "status", "error_event", "garbage", "half_close", "restart", "crash"];
/// Those of them that may have been the request's doing, so that it is tried on so many workers at the most
/// (`retry.lost_workers`).
const LOSING: [&str; 5] = ["cut", "reset", "half_close", "restart", "crash"];
const LOST_WORKERS: usize = 2;
/// Faults that break an answer.
const BREAKING: [&str; 6] = ["hang", "stall", "noise", "wrong_length", "wedge", "refuse"];

/// What is known about the faults.
pub struct Faults {
    /// What hit a request, by its id.
    pub hits: HashMap<String, Vec<String>>,
    /// When a worker was away.
    pub windows: Vec<Window>,
    /// Ids of the workers, by place.
    pub workers: Vec<String>,
}

/// The account of all turns.
#[derive(Default)]
pub struct Account {
    /// Turns with the right answer.
    pub right: u64,
    /// Turns left by the client.
    pub left: u64,
    /// Explained failures: what failed, why, how often, and one of them.
    pub explained: BTreeMap<(String, String), (u64, String)>,
    /// Failures that nothing explains.
    pub unexplained: Vec<String>,
}

impl Account {
    /// Turns in all.
    pub fn turns(&self) -> u64 {
        self.right
            + self.left
            + self.explained.values().map(|(count, _)| count).sum::<u64>()
            + self.unexplained.len() as u64
    }
}

/// The lines of the access log about some requests.
///
/// # Errors
/// The log cannot be read.
fn log_lines(path: &Path, wanted: &HashSet<&str>) -> Result<HashMap<String, Value>, String> {
    let file = std::fs::File::open(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let mut lines = HashMap::new();
    for line in BufReader::new(file).lines() {
        let line = line.map_err(|e| format!("{}: {e}", path.display()))?;
        // The last line may be half written.
        let Ok(value) = serde_json::from_str::<Value>(&line) else { continue };
        if let Some(id) = value["request_id"].as_str().filter(|id| wanted.contains(id)) {
            lines.insert(id.to_owned(), value.clone());
        }
    }
    Ok(lines)
}

/// Judges all turns.
///
/// # Errors
/// The log cannot be read.
pub fn judge(ended: &[Ended], faults: &Faults, log: &Path) -> Result<Account, String> {
    let mut account = Account::default();
    let failed = |turn: &&Ended| matches!(turn.outcome, Outcome::Failed(_));
    let wanted: HashSet<&str> = ended.iter().filter(failed).map(|turn| turn.id.as_str()).collect();
    let lines = log_lines(log, &wanted)?;
    for turn in ended {
        let failure = match &turn.outcome {
            Outcome::Right => {
                account.right += 1;
                continue;
            }
            Outcome::Left => {
                account.left += 1;
                continue;
            }
            Outcome::Failed(failure) => failure,
        };
        let line = lines.get(&turn.id).unwrap_or(&Value::Null);
        // What the gateway had begun to answer may have been lost on its way.
        let begun = failure.begun || line["status"] == 200;
        let told = format!(
            "{} ({} ms): {}: {}\n    log: {line}",
            turn.id,
            turn.ended.duration_since(turn.began).as_millis(),
            failure.what,
            failure.detail
        );
        match faults.explain(turn, begun, line) {
            Ok(why) => account.explained.entry((failure.what.clone(), why)).or_insert((0, told)).0 += 1,
            Err(why) => account.unexplained.push(format!("{told}\n    {why}")),
        }
    }
    Ok(account)
}

impl Faults {
    /// What explains a failure, or why nothing does.
    fn explain(&self, turn: &Ended, begun: bool, line: &Value) -> Result<String, String> {
        let hits: Vec<&str> = self.hits.get(&turn.id).into_iter().flatten().map(String::as_str).collect();
        let away: Vec<&Window> = self
            .windows
            .iter()
            .filter(|window| window.from <= turn.ended && turn.began <= window.to)
            .filter(|window| self.concerns(window, line))
            .collect();
        let attempts = line["attempts"].as_u64().and_then(|attempts| usize::try_from(attempts).ok()).unwrap_or(0);
        let breaking = hits.iter().find(|kind| BREAKING.contains(kind));
        let made_good = hits.iter().filter(|kind| MADE_GOOD.contains(kind)).count();
        if let Some(kind) = breaking {
            return Ok((*kind).to_owned());
        }
        if begun && made_good > 0 {
            return Ok(hits.join("+"));
        }
        // What another worker makes good is no excuse unless all attempts met something, or there must not be a second one.
        if made_good > 0 && (turn.once || attempts >= ATTEMPTS || made_good >= ATTEMPTS) {
            return Ok(format!("{} in {attempts} attempts", hits.join("+")));
        }
        let lost = hits.iter().filter(|kind| LOSING.contains(kind)).count();
        if lost >= LOST_WORKERS || (lost > 0 && !away.is_empty()) {
            return Ok(format!("{}, two workers lost", hits.join("+")));
        }
        if let Some(window) = away.first().filter(|_| begun || turn.once || attempts >= ATTEMPTS) {
            return Ok(window.kind.to_owned());
        }
        // A wedged worker holds what it was given until it is given up.
        if let Some(window) = away.iter().find(|window| window.kind == "wedge") {
            return Ok(window.kind.to_owned());
        }
        Err(format!("hit by {hits:?} in {attempts} attempts; away meanwhile: {:?}", self.away(turn)))
    }

    /// Whether the log says that the request had to do with the worker that was away.
    fn concerns(&self, window: &Window, line: &Value) -> bool {
        let Some(id) = self.workers.get(window.worker) else { return false };
        let faults = line["faults"].as_array().into_iter().flatten().filter_map(Value::as_str);
        line["worker"] == id.as_str() || faults.into_iter().any(|fault| fault.contains(id.as_str()))
    }

    fn away(&self, turn: &Ended) -> Vec<(usize, &'static str)> {
        let during = self.windows.iter().filter(|window| window.from <= turn.ended && turn.began <= window.to);
        during.map(|window| (window.worker, window.kind)).collect()
    }
}
