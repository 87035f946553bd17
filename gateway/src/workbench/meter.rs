//! What each callback of a plugin took, in time and memory.

use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use turnstile_plugins::{Callback, CallbackRun};

/// The runs of a plugin's callbacks.
#[derive(Default)]
pub struct Meter(Mutex<Readings>);

#[derive(Default)]
struct Readings {
    /// Callbacks of the start, until the first [`Meter::begin`].
    start: Vec<Row>,
    /// Callbacks since the last [`Meter::begin`], in the order in which they first ran.
    rows: Vec<Row>,
    begun: bool,
}

/// The runs of one callback.
struct Row {
    callback: Callback,
    /// How long each took, ns.
    times: Vec<u32>,
    /// What linear memory grew by in them, bytes.
    grown: usize,
    /// Linear memory after the last of them, bytes.
    memory: usize,
}

// === impl Meter ===

impl Meter {
    /// Forgets all runs but those of the start; the order of callbacks stays.
    pub fn begin(&self) {
        let readings = &mut *self.0.lock();
        readings.begun = true;
        for row in &mut readings.rows {
            (row.times, row.grown) = (Vec::new(), 0);
        }
    }

    /// Takes a run down.
    pub fn add(&self, run: CallbackRun) {
        let readings = &mut *self.0.lock();
        let rows = if readings.begun { &mut readings.rows } else { &mut readings.start };
        let row = match rows.iter_mut().position(|row| row.callback == run.callback) {
            Some(at) => rows.get_mut(at),
            None => {
                rows.push(Row { callback: run.callback, times: Vec::new(), grown: 0, memory: 0 });
                rows.last_mut()
            }
        };
        if let Some(row) = row {
            row.times.push(u32::try_from(run.took.as_nanos()).unwrap_or(u32::MAX));
            row.grown += run.memory_after.saturating_sub(run.memory_before);
            row.memory = run.memory_after;
        }
    }

    /// The callbacks of the start, and those since the last [`Meter::begin`]: objects by name, in the order in which they first ran.
    pub fn report(&self) -> (Value, Value) {
        let readings = &mut *self.0.lock();
        (shown(&mut readings.start), shown(&mut readings.rows))
    }
}

fn shown(rows: &mut [Row]) -> Value {
    let ran = rows.iter_mut().filter(|row| !row.times.is_empty());
    Value::Object(ran.map(|row| (row.callback.export().to_owned(), row.json())).collect::<Map<_, _>>())
}

// === impl Row ===

impl Row {
    /// Median, 99th percentile and longest, µs; memory in bytes.
    fn json(&mut self) -> Value {
        self.times.sort_unstable();
        let at = |share: f64| {
            let place = (self.times.len().saturating_sub(1) as f64 * share).round() as usize;
            self.times.get(place).map_or(0.0, |ns| f64::from(*ns) / 1e3)
        };
        json!({
            "calls": self.times.len(),
            "median_us": at(0.5),
            "p99_us": at(0.99),
            "max_us": at(1.0),
            "memory_grown_bytes": self.grown,
            "memory_bytes": self.memory,
        })
    }
}
