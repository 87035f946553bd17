//! Faults on demand: from the test itself, or over `POST /_sim/fault`.

use parking_lot::Mutex;
use serde_json::Value;
use std::time::Duration;

/// What goes wrong.
#[derive(Clone, Debug, PartialEq)]
pub enum FaultKind {
    /// Answer this status with this JSON body instead of working; none gives SGLang's flat error body.
    Status(u16, Option<String>),
    /// Answer 200 with an SSE error event of this code and message, as a queue that is full does for streams.
    ErrorEvent(u16, String),
    /// Never answer; the connection stays open.
    Hang,
    /// Cut the connection after this many body bytes of the answer; 0 cuts before the status line.
    CutAfterBytes(usize),
    /// Wait so long before doing anything.
    Delay(Duration),
    /// End the whole worker as a crash does.
    Crash,
    /// Stop the engine: requests hang and probes stay well, until [`FaultKind::Unwedge`].
    Wedge,
    /// Let the engine go on.
    Unwedge,
}

/// A fault, when it applies and how often.
#[derive(Clone, Debug, PartialEq)]
pub struct Fault {
    /// What goes wrong.
    pub kind: FaultKind,
    /// Only requests whose path begins so; none is every inference route.
    pub path: Option<String>,
    /// How many requests it hits; none is until cleared.
    pub count: Option<u32>,
}

impl Fault {
    /// A fault for the next inference request.
    pub fn once(kind: FaultKind) -> Self {
        Self { kind, path: None, count: Some(1) }
    }

    /// A fault for every inference request until [`Faults::clear`].
    pub fn always(kind: FaultKind) -> Self {
        Self { kind, path: None, count: None }
    }

    /// The same, for paths that begin so.
    #[must_use]
    pub fn on(mut self, path: &str) -> Self {
        self.path = Some(path.to_owned());
        self
    }

    /// Reads `{"kind":"status","status":500,"count":1,"path":"/v1/"}`; kinds are `status` (`status`, `body`), `error_event`
    /// (`code`, `message`), `hang`, `cut` (`after_bytes`), `delay` (`ms`), `crash`, `wedge`, `unwedge`.
    ///
    /// # Errors
    /// What is wrong with the description.
    pub fn from_json(value: &Value) -> Result<Self, String> {
        let number = |key: &str| value.get(key).and_then(Value::as_u64);
        let text = |key: &str| value.get(key).and_then(Value::as_str).map(str::to_owned);
        let code = |key: &str, default: u16| number(key).and_then(|code| u16::try_from(code).ok()).unwrap_or(default);
        let kind = match text("kind").as_deref() {
            Some("status") => FaultKind::Status(code("status", 500), text("body")),
            Some("error_event") => FaultKind::ErrorEvent(
                code("code", 503),
                text("message").unwrap_or_else(|| "The request queue is full.".to_owned()),
            ),
            Some("hang") => FaultKind::Hang,
            Some("cut") => {
                FaultKind::CutAfterBytes(number("after_bytes").and_then(|at| usize::try_from(at).ok()).unwrap_or(0))
            }
            Some("delay") => FaultKind::Delay(Duration::from_millis(number("ms").unwrap_or(1000))),
            Some("crash") => FaultKind::Crash,
            Some("wedge") => FaultKind::Wedge,
            Some("unwedge") => FaultKind::Unwedge,
            Some(other) => return Err(format!("unknown fault kind {other:?}")),
            None => return Err("kind is missing".to_owned()),
        };
        let count = number("count").and_then(|count| u32::try_from(count).ok());
        Ok(Self { kind, path: text("path"), count })
    }
}

/// The faults in force.
#[derive(Debug, Default)]
pub struct Faults {
    list: Mutex<Vec<Fault>>,
}

impl Faults {
    /// Adds a fault; the oldest that fits a request is used first.
    pub fn add(&self, fault: Fault) {
        self.list.lock().push(fault);
    }

    /// Removes all.
    pub fn clear(&self) {
        self.list.lock().clear();
    }

    /// The fault for a request of this path, counted as used.
    pub(crate) fn take(&self, path: &str, inference: bool) -> Option<FaultKind> {
        let mut list = self.list.lock();
        let at = list.iter().position(|fault| match &fault.path {
            Some(prefix) => path.starts_with(prefix.as_str()),
            None => inference,
        })?;
        let fault = list.get_mut(at)?;
        let kind = fault.kind.clone();
        if let Some(count) = &mut fault.count {
            *count = count.saturating_sub(1);
            if *count == 0 {
                list.remove(at);
            }
        }
        Some(kind)
    }
}
