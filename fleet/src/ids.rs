//! Small ids shared by every module of this crate.
//!
//! They are plain newtypes: cheap to copy, ordered, usable as map keys. What hashes them into being (credential, session
//! text) lives in `identity`; here they are only numbers.

use std::fmt;

/// Index of a worker. Stable for the life of the process: a worker that leaves and comes back keeps its index, and an
/// index is never given to another worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct WorkerId(pub u32);

/// Who is asking: a keyed hash of the caller's credential.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(transparent)]
pub struct TenantId(pub u64);

/// A session, scoped by its tenant: a hash of (tenant, session id text). Two tenants that choose the same text have
/// different keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionKey(pub u128);

// === impl WorkerId ===

impl fmt::Display for WorkerId {
    /// `#INDEX`, the form in which policies may name a worker by index.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

// === impl TenantId ===

impl fmt::Display for TenantId {
    /// 16 hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

// === impl SessionKey ===

impl fmt::Display for SessionKey {
    /// 32 hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl serde::Serialize for SessionKey {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
