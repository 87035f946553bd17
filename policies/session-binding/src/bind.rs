//! What happens to the session of a turn, from what the client said and whether the session lives.

use serde::Deserialize;
use turnstile_policy::{SessionAction, SessionMode};

/// Shortest idle timeout that is passed on: the gateway counts in ms.
const LEAST_TTL_S: f64 = 0.001;

/// The plugin's configuration table.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Bind turns that name a session (in a header, say) without asking for anything.
    pub bind_identified: bool,
    /// Idle timeout of a new session whose client gave none, seconds. Absent: the gateway's `sessions.default_timeout_s`.
    pub default_ttl_s: Option<f64>,
    /// Longest idle timeout a client may ask for, seconds. Absent: the gateway's `sessions.max_timeout_s`.
    pub max_ttl_s: Option<f64>,
    /// How `open` takes part in the engine: `auto`, `affinity`, `tag` or `stream`.
    pub open_mode: OpenMode,
}

/// How an opened session takes part in the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OpenMode {
    /// The best that route and worker allow.
    #[default]
    Auto,
    /// Not at all.
    Affinity,
    /// By a tag on full-history turns.
    Tag,
    /// As a streaming session.
    Stream,
}

/// What is known about a turn.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Request {
    /// What the client asked for.
    pub action: Option<SessionAction>,
    /// The turn names a session.
    pub named: bool,
    /// The idle timeout the client asked for, seconds.
    pub timeout_s: Option<f64>,
    /// The session lives already.
    pub live: bool,
}

/// What becomes of the session.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Binding {
    /// The action.
    pub action: SessionAction,
    /// The idle timeout to set, seconds; `None` leaves a live session's as it is, and a new one's to the gateway.
    pub ttl_s: Option<f64>,
    /// The mode to set; `None` leaves a live session's as it is.
    pub mode: Option<SessionMode>,
}

// === impl Options ===

impl Default for Options {
    fn default() -> Self {
        Options { bind_identified: true, default_ttl_s: None, max_ttl_s: None, open_mode: OpenMode::Auto }
    }
}

impl Options {
    /// Refuses what no session could be kept with.
    ///
    /// # Errors
    /// Names the option that is wrong.
    pub fn check(&self) -> Result<(), String> {
        for (name, seconds) in [("default_ttl_s", self.default_ttl_s), ("max_ttl_s", self.max_ttl_s)] {
            if seconds.is_some_and(|seconds| !(LEAST_TTL_S..f64::INFINITY).contains(&seconds)) {
                return Err(format!("option `{name}`: a session needs at least a millisecond"));
            }
        }
        if let (Some(default), Some(max)) = (self.default_ttl_s, self.max_ttl_s)
            && max < default
        {
            return Err("option `max_ttl_s`: below default_ttl_s".to_owned());
        }
        Ok(())
    }
}

// === impl OpenMode ===

impl OpenMode {
    fn mode(self) -> SessionMode {
        match self {
            OpenMode::Auto => SessionMode::Auto,
            OpenMode::Affinity => SessionMode::Affinity,
            OpenMode::Tag => SessionMode::Tag,
            OpenMode::Stream => SessionMode::Stream,
        }
    }
}

/// Decides. `None`: the turn has no session, or none that is to be kept.
///
/// Mode and timeout are set when a session is made. On a live one a client's new timeout is taken, and nothing else
/// changes: opening twice is one session, and a bare turn must not turn an open session into a bound one.
pub fn decide(request: &Request, options: &Options) -> Option<Binding> {
    if !request.named {
        return None;
    }
    let asked = request.timeout_s.map(|seconds| seconds.min(options.max_ttl_s.unwrap_or(f64::MAX)).max(LEAST_TTL_S));
    let ttl_s = asked.or(options.default_ttl_s.filter(|_| !request.live));
    let kept = |action, new_mode| Binding { action, ttl_s, mode: if request.live { None } else { Some(new_mode) } };
    match request.action {
        Some(SessionAction::Open) => Some(kept(SessionAction::Open, options.open_mode.mode())),
        Some(SessionAction::Bind) => Some(kept(SessionAction::Bind, SessionMode::Affinity)),
        Some(SessionAction::Close) => Some(Binding { action: SessionAction::Close, ttl_s: None, mode: None }),
        Some(SessionAction::Release | SessionAction::Nothing) => None,
        None if request.live || options.bind_identified => Some(kept(SessionAction::Bind, SessionMode::Affinity)),
        None => None,
    }
}

#[cfg(test)]
#[path = "bind_tests.rs"]
mod tests;
