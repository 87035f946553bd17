//! Faults as they are written down.

use super::{Fault, FaultKind, Place};
use serde_json::{Map, Value};
use std::time::Duration;

/// A fault of a schedule, and whose it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Scheduled {
    /// The worker by its place, from 0; none is every worker.
    pub worker: Option<usize>,
    /// The fault; its `after` counts from the start of the schedule.
    pub fault: Fault,
}

/// Reads a schedule: a JSON list of faults, or TOML with a `[[fault]]` table for each. On top of the keys of
/// [`Fault::from_json`], `worker` names one by its place.
///
/// # Errors
/// What is wrong, and with which fault, counted from 1.
pub fn schedule(text: &str) -> Result<Vec<Scheduled>, String> {
    let list = match serde_json::from_str::<Value>(text) {
        Ok(Value::Array(list)) => list,
        Ok(_) => return Err("a schedule in JSON is a list of faults".to_owned()),
        Err(json) => {
            let table: Map<String, Value> =
                toml::from_str(text).map_err(|toml| format!("neither JSON ({json}) nor TOML ({toml})"))?;
            if let Some(other) = table.keys().find(|key| *key != "fault") {
                return Err(format!("unknown key {other:?}: a schedule in TOML has [[fault]] tables only"));
            }
            match table.into_iter().next() {
                Some((_, Value::Array(list))) => list,
                None => Vec::new(),
                Some(_) => return Err("fault is not a list: write [[fault]]".to_owned()),
            }
        }
    };
    let read = |(place, value): (usize, Value)| {
        let named = |error: String| format!("fault {}: {error}", place + 1);
        let Value::Object(mut body) = value else { return Err(named("not an object".to_owned())) };
        let worker = body.remove("worker").map(|value| {
            let place = value.as_u64().and_then(|place| usize::try_from(place).ok());
            place.ok_or_else(|| named(format!("worker is {value}, not a place from 0")))
        });
        let fault = Fault::from_json(&Value::Object(body)).map_err(named)?;
        Ok(Scheduled { worker: worker.transpose()?, fault })
    };
    list.into_iter().enumerate().map(read).collect()
}

impl Fault {
    /// Reads `{"kind":"status","status":500,"count":1,"path":"/v1/"}`; the README of this crate has the table of kinds and keys.
    ///
    /// # Errors
    /// What is wrong with the description.
    pub fn from_json(value: &Value) -> Result<Self, String> {
        let Value::Object(body) = value else { return Err("a fault is an object".to_owned()) };
        let mut keys = Keys { left: body.clone() };
        let kind = keys.kind()?;
        let fault = Self {
            path: keys.text("path")?,
            count: keys.number("count")?.map(|count| u32::try_from(count).unwrap_or(u32::MAX)),
            probability: keys.share("probability")?,
            seed: keys.number("seed")?.unwrap_or(0),
            after: keys.time("after_ms")?.unwrap_or_default(),
            lasts: keys.time("for_ms")?,
            every: keys.time("every_ms")?,
            early: keys.flag("early")?,
            ..Self::always(kind)
        };
        if let Some(unknown) = keys.left.keys().next() {
            return Err(format!("unknown key {unknown:?}"));
        }
        fault.check()?;
        Ok(fault)
    }

    fn check(&self) -> Result<(), String> {
        let selects = self.path.is_some() || self.count.is_some() || self.probability.is_some();
        if self.kind == FaultKind::Refuse && selects {
            return Err("refuse takes no path, count or probability: no request is seen".to_owned());
        }
        let before_body = matches!(
            self.kind,
            FaultKind::Status(..)
                | FaultKind::Hang
                | FaultKind::Delay(_)
                | FaultKind::Cut(Place::Head)
                | FaultKind::Reset(Place::Head)
                | FaultKind::HalfClose(Place::Head)
                | FaultKind::Garbage(Place::Head)
                | FaultKind::Crash
                | FaultKind::Restart { .. }
        );
        if self.early && !before_body {
            return Err("early: this kind needs the answer to a whole request".to_owned());
        }
        match (self.every, self.lasts) {
            (Some(every), _) if every.is_zero() => Err("every_ms is 0".to_owned()),
            (Some(_), None) if matches!(self.kind, FaultKind::Refuse | FaultKind::Wedge { .. }) => {
                Err("every_ms needs for_ms, or it would never end".to_owned())
            }
            (Some(every), Some(lasts)) if lasts > every => Err("for_ms is longer than every_ms".to_owned()),
            _ => Ok(()),
        }
    }
}

/// The keys not yet read.
struct Keys {
    left: Map<String, Value>,
}

impl Keys {
    fn kind(&mut self) -> Result<FaultKind, String> {
        let name = self.text("kind")?.ok_or("kind is missing")?;
        let second = Duration::from_secs(1);
        Ok(match name.as_str() {
            "status" => FaultKind::Status(self.status("status", 500)?, self.text("body")?),
            "error_event" => {
                let message = self.text("message")?.unwrap_or_else(|| "The request queue is full.".to_owned());
                FaultKind::ErrorEvent(self.status("code", 503)?, message)
            }
            "hang" => FaultKind::Hang,
            "stall" => FaultKind::Stall(self.bytes("after_bytes")?.unwrap_or(0)),
            "cut" => FaultKind::Cut(self.place()?),
            "reset" => FaultKind::Reset(self.place()?),
            "half_close" => FaultKind::HalfClose(self.place()?),
            "garbage" => FaultKind::Garbage(self.place()?),
            "noise" => FaultKind::Noise(self.bytes("after_bytes")?.unwrap_or(0)),
            "wrong_length" => match self.left.remove("by") {
                None => FaultKind::WrongLength(1),
                Some(by) => match by.as_i64().filter(|by| *by != 0) {
                    Some(by) => FaultKind::WrongLength(by),
                    None => return Err(format!("by is {by}, not a number of bytes other than 0")),
                },
            },
            "delay" => FaultKind::Delay(self.time("ms")?.unwrap_or(second)),
            "slow" => FaultKind::Slow(self.time("ms")?.unwrap_or(second)),
            "crash" => FaultKind::Crash,
            "restart" => FaultKind::Restart {
                down: self.time("down_ms")?.unwrap_or_default(),
                warmup: self.time("warmup_ms")?.unwrap_or_default(),
            },
            "refuse" => FaultKind::Refuse,
            "wedge" => FaultKind::Wedge { frozen: self.flag("frozen")? },
            "unwedge" => FaultKind::Unwedge,
            other => return Err(format!("unknown fault kind {other:?}")),
        })
    }

    fn place(&mut self) -> Result<Place, String> {
        Ok(self.bytes("after_bytes")?.map_or(Place::Head, Place::Body))
    }

    fn text(&mut self, key: &str) -> Result<Option<String>, String> {
        match self.left.remove(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(format!("{key} is {other}, not a text")),
        }
    }

    fn number(&mut self, key: &str) -> Result<Option<u64>, String> {
        match self.left.remove(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                value.as_u64().map(Some).ok_or_else(|| format!("{key} is {value}, not a whole number from 0"))
            }
        }
    }

    fn bytes(&mut self, key: &str) -> Result<Option<usize>, String> {
        Ok(self.number(key)?.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX)))
    }

    fn time(&mut self, key: &str) -> Result<Option<Duration>, String> {
        Ok(self.number(key)?.map(Duration::from_millis))
    }

    fn share(&mut self, key: &str) -> Result<Option<f64>, String> {
        match self.left.remove(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_f64().filter(|share| (0.0..=1.0).contains(share)) {
                Some(share) => Ok(Some(share)),
                None => Err(format!("{key} is {value}, not a share from 0 to 1")),
            },
        }
    }

    fn flag(&mut self, key: &str) -> Result<bool, String> {
        match self.left.remove(key) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(flag),
            Some(other) => Err(format!("{key} is {other}, not true or false")),
        }
    }

    fn status(&mut self, key: &str, default: u16) -> Result<u16, String> {
        match self.number(key)? {
            None => Ok(default),
            Some(code) if (200..=599).contains(&code) => Ok(u16::try_from(code).unwrap_or(default)),
            Some(code) => Err(format!("{key} is {code}, not a status from 200 to 599")),
        }
    }
}
