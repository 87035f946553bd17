//! The words for all this in facts, decisions, logs and metrics.

use super::{Busy, CloseCause, Degraded, ModeWish, NoSession, SessionAction, SessionMode};

impl SessionAction {
    /// The word in facts and decisions.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Bind => "bind",
            Self::Open => "open",
            Self::Close => "close",
            Self::Release => "release",
        }
    }

    /// Reads the word.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::None, Self::Bind, Self::Open, Self::Close, Self::Release].into_iter().find(|a| a.name() == text)
    }
}

impl SessionMode {
    /// The word in facts, logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Affinity => "affinity",
            Self::Tag => "tag",
            Self::Stream => "stream",
        }
    }
}

impl ModeWish {
    /// The word in decisions.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Affinity => "affinity",
            Self::Tag => "tag",
            Self::Stream => "stream",
        }
    }

    /// Reads the word.
    pub fn parse(text: &str) -> Option<Self> {
        [Self::Auto, Self::Affinity, Self::Tag, Self::Stream].into_iter().find(|w| w.name() == text)
    }
}

impl NoSession {
    /// The word in logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Released => "released",
            Self::TableFull => "table_full",
            Self::PoolGone => "pool_gone",
        }
    }
}

impl Busy {
    /// The word in logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Turn => "turn",
            Self::Abort => "abort",
            Self::Close => "close",
            Self::Room => "room",
        }
    }
}

impl Degraded {
    /// The word in logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Worker => "worker",
            Self::Route => "route",
            Self::Rows => "rows",
            Self::Tokens => "tokens",
            Self::OpenFailed => "open_failed",
        }
    }
}

impl CloseCause {
    /// The word in logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Asked => "asked",
            Self::Expired => "expired",
            Self::Moved => "moved",
            Self::Evicted => "evicted",
            Self::Worker => "worker",
            Self::OpenUnknown => "open_unknown",
            Self::Shutdown => "shutdown",
            Self::Orphaned => "orphaned",
        }
    }
}
