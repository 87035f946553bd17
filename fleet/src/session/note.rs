//! What the client of a session is told about its context.
//!
//! A client that sends only what is new cannot see from an answer that the worker knew nothing of the turns before. So it is
//! told in each case in which that is so, or may be.

use std::fmt;

use super::{Degraded, Lease, NoSession, SessionMode};

/// Why the worker may lack some of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ContextNote {
    /// The context begins with this turn: none was finished in its engine session yet.
    New,
    /// The engine session is a new one, and turns were finished before it.
    Lost,
    /// A turn before this one was cut, or was not run in the engine session.
    Incomplete,
    /// No streaming session serves this turn: nothing but its body is its context.
    NotKept(SessionMode, Option<Degraded>),
    /// The turn has no session at all.
    NoSession(NoSession),
}

impl ContextNote {
    /// The note about a turn with a lease.
    pub fn of(lease: &Lease) -> Option<Self> {
        match lease.mode {
            SessionMode::Stream if lease.context_lost => Some(Self::Lost),
            SessionMode::Stream if lease.begins => Some(Self::New),
            SessionMode::Stream if lease.turn_cut => Some(Self::Incomplete),
            SessionMode::Stream => None,
            mode => Some(Self::NotKept(mode, lease.degraded)),
        }
    }
}

impl fmt::Display for ContextNote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::New => f.write_str("context begins: the engine session is a new one"),
            Self::Lost => f.write_str("context lost: the engine session is a new one"),
            Self::Incomplete => {
                f.write_str("context incomplete: a turn before this one was cut off or ran outside the engine session")
            }
            Self::NotKept(mode, Some(why)) => {
                write!(f, "degraded: {}: no context is kept, the session is {} only", why.name(), mode.name())
            }
            Self::NotKept(mode, None) => write!(f, "no context is kept: the session is {} only", mode.name()),
            Self::NoSession(why) => write!(f, "no context is kept: no session ({})", why.name()),
        }
    }
}
