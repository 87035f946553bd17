//! What the client says about its turn: `nvext.agent_hints`, `nvext.session_control`, and the `x-dynamo-*` headers that
//! override them.
//!
//! The body form is that of Dynamo 1.1–1.3, where the wrong type of a known key is the client's error and an unknown key is
//! ignored. A header overrides its body field; a malformed header is ignored and counted.

use bytes::Bytes;
use http::HeaderMap;

use crate::body::{BodyError, BodyErrorKind, Members, scan, text_of};

/// Largest `nvext`, in bytes. It holds a handful of scalars; the bound keeps it from being a place to hide work.
pub const MAX_NVEXT_BYTES: usize = 64 * 1024;

/// Longest session timeout, in seconds (30 days). A longer one is taken as this.
pub const MAX_TIMEOUT_S: f64 = 30.0 * 86_400.0;

/// How many names of unknown keys are kept, and how long each may be.
const MAX_UNKNOWN_NAMES: usize = 8;
const MAX_UNKNOWN_NAME_BYTES: usize = 64;

/// `nvext.agent_hints`, with the headers applied.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Hints {
    /// Urgency: seconds of head start in our queue, and, signed as given, the engine's `priority`. Higher is sooner.
    pub priority: Option<i32>,
    /// Queue tier; a higher tier goes first. Never sent to the engine.
    pub strict_priority: Option<u32>,
    /// Expected output length in tokens.
    pub osl: Option<u32>,
    /// Whether the next turn's prompt shall be warmed when this one ends.
    pub speculative_prefill: bool,
    /// Older form of `priority`: seconds of head start, never negative. Counts only without `priority`.
    pub latency_sensitivity: Option<f64>,
}

/// What `nvext.session_control` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SessionAction {
    /// Keep the session's turns on one worker.
    Bind,
    /// Also hold the session's cache on that worker.
    Open,
    /// Release both when this turn has ended.
    Close,
}

/// `nvext.session_control`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SessionControl {
    /// The client's name of the session.
    pub session_id: Option<String>,
    /// What to do with it; none is an ordinary turn of it.
    pub action: Option<SessionAction>,
    /// Idle timeout in seconds, above 0 and at most [`MAX_TIMEOUT_S`]; none leaves it to the configuration.
    pub timeout_s: Option<f64>,
}

/// Keys under `nvext` that the gateway does not know. A number and a few names, for a metric and a log line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnknownKeys {
    /// How many there were.
    pub count: u32,
    /// The first few as paths, each cut to a bounded length.
    pub names: Vec<String>,
}

/// Everything read from `nvext` and its headers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Extension {
    /// The scheduling hints.
    pub hints: Hints,
    /// The session request.
    pub control: SessionControl,
    /// The cache namespace in `nvext.cache_salt`.
    pub cache_salt: Option<String>,
    /// Keys nobody knows.
    pub unknown: UnknownKeys,
    /// How many `x-dynamo-*` headers had a value that could not be read.
    pub malformed_headers: u32,
}

/// Reads `nvext` from a scanned body, then applies the headers. A session id may have `id_max_bytes` bytes. With
/// `takes_priority` a top-level `priority` is the hint of that name.
///
/// # Errors
/// A known key has the wrong type or range; the error names it.
pub fn parse(
    members: &Members,
    headers: &HeaderMap,
    id_max_bytes: usize,
    takes_priority: bool,
) -> Result<Extension, BodyError> {
    let mut extension = Extension::default();
    if let Some(nvext) = members.value("nvext") {
        if nvext.len() > MAX_NVEXT_BYTES {
            return Err(BodyError::bad_member("nvext", &format!("must be at most {MAX_NVEXT_BYTES} bytes")));
        }
        let nvext = object(&nvext, "nvext")?;
        extension.unknown.note(&nvext, "nvext", &["agent_hints", "session_control", "cache_salt"]);
        if let Some(raw) = nvext.value("agent_hints") {
            extension.hints = agent_hints(&raw, &mut extension.unknown)?;
        }
        if let Some(raw) = nvext.value("session_control") {
            extension.control = session_control(&raw, &mut extension.unknown, id_max_bytes)?;
        }
        if let Some(raw) = present(&nvext, "cache_salt") {
            let salt = text_of(raw).ok_or_else(|| BodyError::bad_member("nvext.cache_salt", "must be a string"))?;
            extension.cache_salt = Some(salt.into_owned());
        }
    }
    if takes_priority
        && let Some(priority) = integer::<i32>(members, "priority", "priority", "an integer", true)?
        && extension.hints.priority.is_none()
    {
        // A client that speaks SGLang's own field means the same thing by it.
        extension.hints.priority = Some(priority);
    }
    if let Some(priority) = header(headers, "x-dynamo-request-priority", &mut extension.malformed_headers) {
        extension.hints.priority = Some(priority);
    }
    if let Some(tier) = header(headers, "x-dynamo-request-strict-priority", &mut extension.malformed_headers) {
        extension.hints.strict_priority = Some(tier);
    }
    Ok(extension)
}

fn agent_hints(raw: &Bytes, unknown: &mut UnknownKeys) -> Result<Hints, BodyError> {
    const AT: &str = "nvext.agent_hints";
    const KNOWN: [&str; 5] = ["priority", "strict_priority", "osl", "speculative_prefill", "latency_sensitivity"];
    let hints = object(raw, AT)?;
    unknown.note(&hints, AT, &KNOWN);
    Ok(Hints {
        priority: integer(&hints, "priority", "nvext.agent_hints.priority", "an integer", false)?,
        strict_priority: integer(
            &hints,
            "strict_priority",
            "nvext.agent_hints.strict_priority",
            "a non-negative integer",
            false,
        )?,
        osl: integer(&hints, "osl", "nvext.agent_hints.osl", "a non-negative integer", false)?,
        speculative_prefill: match present(&hints, "speculative_prefill") {
            None | Some(b"false") => false,
            Some(b"true") => true,
            Some(_) => {
                return Err(BodyError::bad_member("nvext.agent_hints.speculative_prefill", "must be true or false"));
            }
        },
        latency_sensitivity: match present(&hints, "latency_sensitivity") {
            None => None,
            Some(raw) => Some(
                number(raw)
                    .ok_or_else(|| BodyError::bad_member("nvext.agent_hints.latency_sensitivity", "must be a number"))?
                    .max(0.0),
            ),
        },
    })
}

fn session_control(raw: &Bytes, unknown: &mut UnknownKeys, id_max_bytes: usize) -> Result<SessionControl, BodyError> {
    const AT: &str = "nvext.session_control";
    let control = object(raw, AT)?;
    unknown.note(&control, AT, &["session_id", "action", "timeout"]);
    let bad = |key: &str, problem: &str| BodyError::bad_member(format!("{AT}.{key}"), problem);

    let session_id = match present(&control, "session_id") {
        None => None,
        Some(raw) => {
            let id = text_of(raw).ok_or_else(|| bad("session_id", "must be a string"))?;
            if id.trim().is_empty() {
                return Err(bad("session_id", "must not be empty"));
            }
            if id.len() > id_max_bytes {
                return Err(bad("session_id", &format!("must be at most {id_max_bytes} bytes")));
            }
            Some(id.into_owned())
        }
    };
    let action = match present(&control, "action") {
        None => None,
        Some(raw) => Some(
            text_of(raw)
                .and_then(|word| SessionAction::from_name(&word))
                .ok_or_else(|| bad("action", "must be \"bind\", \"open\" or \"close\""))?,
        ),
    };
    let timeout_s = match present(&control, "timeout") {
        None => None,
        Some(raw) => match number(raw) {
            Some(seconds) if seconds > 0.0 => Some(seconds.min(MAX_TIMEOUT_S)),
            _ => return Err(bad("timeout", "must be a number of seconds above 0")),
        },
    };
    Ok(SessionControl { session_id, action, timeout_s })
}

/// A value that is there and not `null`.
fn present<'a>(members: &'a Members, key: &str) -> Option<&'a [u8]> {
    members.raw(key).filter(|raw| *raw != b"null")
}

fn object(raw: &Bytes, field: &str) -> Result<Members, BodyError> {
    scan(raw).map_err(|error| match error.kind {
        BodyErrorKind::TooManyMembers => BodyError::bad_member(field, "has too many members"),
        _ => BodyError::bad_member(field, "must be an object"),
    })
}

/// A whole number that fits. `lax` also takes the number in a string, as SGLang's own field does.
fn integer<T: TryFrom<i128> + Bounds>(
    members: &Members,
    key: &str,
    field: &str,
    what: &str,
    lax: bool,
) -> Result<Option<T>, BodyError> {
    let Some(raw) = present(members, key) else { return Ok(None) };
    let wrong = || BodyError::bad_member(field, &format!("must be {what}"));
    let text = if lax && raw.first() == Some(&b'"') {
        text_of(raw).ok_or_else(wrong)?
    } else {
        std::str::from_utf8(raw).map_err(|_| wrong())?.into()
    };
    // JSON already ruled out "+5" and "05" outside of strings.
    let is_whole = text.strip_prefix('-').unwrap_or(&text).bytes().all(|b| b.is_ascii_digit()) && !text.is_empty();
    if !is_whole {
        return Err(wrong());
    }
    let range = || BodyError::bad_member(field, &format!("must be {what} from {} to {}", T::LOW, T::HIGH));
    let value: i128 = text.parse().map_err(|_| range())?;
    T::try_from(value).map(Some).map_err(|_| range())
}

/// The range of an integer, for the message that refuses one outside it.
trait Bounds {
    const LOW: i128;
    const HIGH: i128;
}

impl Bounds for i32 {
    const LOW: i128 = i32::MIN as i128;
    const HIGH: i128 = i32::MAX as i128;
}

impl Bounds for u32 {
    const LOW: i128 = 0;
    const HIGH: i128 = u32::MAX as i128;
}

/// A finite JSON number.
fn number(raw: &[u8]) -> Option<f64> {
    let starts_like_one = raw.first().is_some_and(|b| *b == b'-' || b.is_ascii_digit());
    if !starts_like_one {
        return None;
    }
    std::str::from_utf8(raw).ok()?.parse::<f64>().ok().filter(|n| n.is_finite())
}

fn header<T: std::str::FromStr>(headers: &HeaderMap, name: &str, malformed: &mut u32) -> Option<T> {
    let value = headers.get(name)?;
    let parsed = value.to_str().ok().and_then(|text| text.trim().parse().ok());
    if parsed.is_none() {
        *malformed = malformed.saturating_add(1);
    }
    parsed
}

// === impl SessionAction ===

impl SessionAction {
    /// The word of the API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bind => "bind",
            Self::Open => "open",
            Self::Close => "close",
        }
    }

    /// The action of a word of the API.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "bind" => Some(Self::Bind),
            "open" => Some(Self::Open),
            "close" => Some(Self::Close),
            _ => None,
        }
    }
}

// === impl UnknownKeys ===

impl UnknownKeys {
    fn note(&mut self, members: &Members, at: &str, known: &[&str]) {
        for key in members.keys().filter(|key| !known.contains(key)) {
            self.count = self.count.saturating_add(1);
            if self.names.len() < MAX_UNKNOWN_NAMES {
                let mut cut = key.len().min(MAX_UNKNOWN_NAME_BYTES);
                while !key.is_char_boundary(cut) {
                    cut -= 1;
                }
                self.names.push(format!("{at}.{}", key.get(..cut).unwrap_or_default()));
            }
        }
    }
}

#[cfg(test)]
#[path = "hints_tests.rs"]
mod tests;
