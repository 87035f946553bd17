//! A fleet other than the recorded one, described in a file: `turnstile replay --fleet FILE`.
//!
//! The members are those of a worker in the JSON report (`replay.workers`), so that a fleet of a report is a fleet file.

use super::fleet::{MAX_WORKERS, Recorded, WorkerSpec};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FleetFile {
    workers: Vec<Entry>,
}

/// One worker, or several that are alike.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    #[serde(default = "one")]
    count: u32,
    id: Option<String>,
    like: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    kv_tokens: Option<u64>,
    max_running: Option<u32>,
    max_in_flight: Option<u32>,
    prefill_tokens_per_s: Option<f64>,
    decode_ms: Option<f64>,
    decode_ms_per_running: Option<f64>,
    tag: Option<bool>,
    priority: Option<bool>,
}

fn one() -> u32 {
    1
}

/// The workers of a file. What it does not say of one is as recorded, or as the command line says.
///
/// # Errors
/// The file cannot be read, or what is wrong in it, by its place.
pub fn read(path: &Path, recorded: &Recorded<'_>) -> Result<Vec<WorkerSpec>, String> {
    let fail = |reason: String| format!("--fleet: {}: {reason}", path.display());
    let text = crate::workbench::subject::read_text(path).map_err(|e| fail(e.to_string()))?;
    parse(&text, recorded).map_err(fail)
}

fn parse(text: &[u8], recorded: &Recorded<'_>) -> Result<Vec<WorkerSpec>, String> {
    let file: FleetFile = serde_json::from_slice(text).map_err(|e| e.to_string())?;
    let mut specs: Vec<WorkerSpec> = Vec::new();
    for (at, entry) in file.workers.iter().enumerate() {
        let here = |reason: String| format!("workers[{at}].{reason}");
        entry.check().map_err(here)?;
        if specs.len() + entry.count as usize > MAX_WORKERS as usize {
            return Err(here(format!("count: a replay has at most {MAX_WORKERS} workers")));
        }
        let like = match &entry.like {
            Some(id) => Some(recorded.named(id).ok_or_else(|| here(format!("like: the log has no worker {id:?}")))?),
            None => None,
        };
        for copy in 0..entry.count {
            let place = u32::try_from(specs.len()).unwrap_or(u32::MAX);
            specs.push(entry.spec(copy, place, like, recorded));
        }
    }
    if specs.is_empty() {
        return Err("workers: there is none".to_owned());
    }
    let mut ids = BTreeSet::new();
    match specs.iter().find(|spec| !ids.insert(spec.id.as_str())) {
        Some(spec) => Err(format!("workers: there are two of the id {:?}", spec.id)),
        None => Ok(specs),
    }
}

// === impl Entry ===

impl Entry {
    fn check(&self) -> Result<(), String> {
        within("count", Some(self.count), 1, MAX_WORKERS)?;
        within("kv_tokens", self.kv_tokens, 1_000, 1 << 40)?;
        within("max_running", self.max_running, 1, 100_000)?;
        within("max_in_flight", self.max_in_flight, 1, 1_000_000)?;
        within("prefill_tokens_per_s", self.prefill_tokens_per_s, 1.0, 1e9)?;
        within("decode_ms", self.decode_ms, 0.001, 1e4)?;
        within("decode_ms_per_running", self.decode_ms_per_running, 0.0, 1e3)?;
        match &self.id {
            Some(id) if id.is_empty() => Err("id: is empty".to_owned()),
            _ => Ok(()),
        }
    }

    fn spec(
        &self,
        copy: u32,
        place: u32,
        like: Option<&crate::recording::line::WorkerEntry>,
        recorded: &Recorded<'_>,
    ) -> WorkerSpec {
        let per_running = self.decode_ms_per_running.unwrap_or_else(|| recorded.decode_ms_per_running());
        let known = match like {
            Some(entry) => recorded.spec(format!("worker-{place}"), Some(entry)),
            None => recorded.worker(place),
        };
        WorkerSpec {
            id: match &self.id {
                Some(id) if self.count > 1 => format!("{id}-{copy}"),
                Some(id) => id.clone(),
                None => known.id,
            },
            labels: self.labels.clone().unwrap_or(known.labels),
            kv_tokens: self.kv_tokens.unwrap_or(known.kv_tokens),
            max_running: self.max_running.unwrap_or(known.max_running),
            max_in_flight: self.max_in_flight.or(known.max_in_flight),
            prefill_tokens_per_s: self.prefill_tokens_per_s.unwrap_or(known.prefill_tokens_per_s),
            decode_ms: self.decode_ms.unwrap_or_else(|| recorded.decode_ms(per_running)),
            decode_ms_per_running: per_running,
            tag: self.tag.unwrap_or(known.tag),
            priority: self.priority.unwrap_or(known.priority),
        }
    }
}

fn within<T: PartialOrd + std::fmt::Display>(name: &str, value: Option<T>, least: T, most: T) -> Result<(), String> {
    match value {
        Some(value) if !(least <= value && value <= most) => {
            Err(format!("{name}: must be {least} to {most}, found {value}"))
        }
        _ => Ok(()),
    }
}
