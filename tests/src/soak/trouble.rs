//! The faults: a schedule for each worker, and when it makes what go wrong.

use std::time::{Duration, Instant};
use turnstile_sim::{Fault, FaultKind, Scheduled, schedule};

/// Faults that every worker has now and then: what a request meets, one in how many thousand, and more keys.
const NOW_AND_THEN: [(&str, f64, &str); 15] = [
    ("cut", 6.0, ""),
    ("cut", 6.0, "after_bytes = 300\n"),
    ("reset", 4.0, ""),
    ("reset", 4.0, "after_bytes = 500\n"),
    ("status", 8.0, "status = 500\n"),
    ("status", 8.0, "status = 503\n"),
    ("error_event", 6.0, ""),
    ("garbage", 3.0, ""),
    ("garbage", 2.0, "after_bytes = 400\n"),
    ("half_close", 3.0, ""),
    ("half_close", 2.0, "after_bytes = 350\n"),
    ("wrong_length", 2.0, "by = 20\n"),
    ("hang", 1.0, ""),
    ("stall", 1.0, "after_bytes = 450\n"),
    ("slow", 15.0, "ms = 15\n"),
];

/// Faults of a worker as a whole that return in every period: worker, kind, when in the period, for how long (both in parts of
/// it), more keys.
const IN_TURN: [(usize, &str, f64, f64, &str); 4] = [
    (0, "restart", 0.10, 0.05, ""),
    (1, "wedge", 0.30, 0.04, ""),
    (1, "wedge", 0.80, 0.04, "frozen = true\n"),
    (2, "refuse", 0.50, 0.05, ""),
];

/// The worker that is killed, and when in the period.
pub const KILLED: (usize, f64) = (3, 0.70);
/// How long it is away, in parts of the period.
pub const AWAY: f64 = 0.05;
/// How long after a fault of a worker its traces may be seen.
const TRACE: Duration = Duration::from_secs(2);

/// A time in which a worker was away.
#[derive(Clone, Debug)]
pub struct Window {
    /// Which worker.
    pub worker: usize,
    /// Why.
    pub kind: &'static str,
    /// From when.
    pub from: Instant,
    /// Until when.
    pub to: Instant,
}

/// The schedule of one worker as a file, beginning anew after each period.
pub fn file(worker: usize, period: Duration, seed: u64) -> String {
    let ms = |part: f64| (period.as_secs_f64() * part * 1000.0) as u64;
    let mut text = String::new();
    for (place, (kind, share, more)) in NOW_AND_THEN.iter().enumerate() {
        let seed = seed.wrapping_mul(31).wrapping_add((worker * 100 + place) as u64) % 1_000_000;
        let probability = share / 1000.0;
        text.push_str(&format!("[[fault]]\nkind = \"{kind}\"\nprobability = {probability:?}\nseed = {seed}\n{more}\n"));
    }
    for path in ["/close_session", "/open_session", "/abort_request"] {
        text.push_str(&format!(
            "[[fault]]\nkind = \"status\"\nstatus = 500\npath = \"{path}\"\nprobability = 0.03\nseed = {seed}\n\n"
        ));
    }
    for (_, kind, at, lasts, more) in IN_TURN.iter().filter(|(whose, ..)| *whose == worker) {
        let time = match *kind {
            "restart" => format!("down_ms = {}\nwarmup_ms = {}\n", ms(lasts / 2.0), ms(lasts / 2.0)),
            _ => format!("for_ms = {}\n", ms(*lasts)),
        };
        text.push_str(&format!(
            "[[fault]]\nkind = \"{kind}\"\nafter_ms = {}\nevery_ms = {}\n{time}{more}\n",
            ms(*at),
            ms(1.0)
        ));
    }
    text
}

/// When a schedule that began at `began` had the worker away, up to `now`.
///
/// # Errors
/// The file is no schedule.
pub fn windows(worker: usize, file: &str, began: Instant, now: Instant) -> Result<Vec<Window>, String> {
    let mut windows = Vec::new();
    for Scheduled { fault, .. } in schedule(file)? {
        let Some((kind, lasts)) = away(&fault) else { continue };
        let mut from = began + fault.after;
        while from < now {
            windows.push(Window { worker, kind, from, to: from + lasts + TRACE });
            match fault.every {
                Some(every) => from += every,
                None => break,
            }
        }
    }
    Ok(windows)
}

/// How long a fault has the worker away.
fn away(fault: &Fault) -> Option<(&'static str, Duration)> {
    match &fault.kind {
        FaultKind::Restart { down, warmup } => Some(("restart", *down + *warmup)),
        FaultKind::Refuse | FaultKind::Wedge { .. } => Some((fault.kind.name(), fault.lasts.unwrap_or_default())),
        _ => None,
    }
}

/// The time in which a killed worker was away.
pub fn killed(worker: usize, from: Instant, to: Instant) -> Window {
    Window { worker, kind: "kill", from, to: to + TRACE }
}
