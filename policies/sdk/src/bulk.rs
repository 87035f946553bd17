//! Several facts or decisions in one call of the host.

use crate::Host;

/// The length that stands for a value that is not there.
const ABSENT: u32 = u32::MAX;

/// Facts that were read together.
#[derive(Debug)]
pub(crate) struct Ahead {
    names: &'static [&'static str],
    values: Vec<u8>,
}

/// Decisions that are written together.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    bytes: Vec<u8>,
}

// === impl Ahead ===

impl Ahead {
    /// Nothing where the host has no such function: facts are then read one by one.
    pub fn read(host: &dyn Host, names: &'static [&'static str]) -> Option<Ahead> {
        let mut list = String::with_capacity(names.iter().map(|name| name.len() + 11).sum());
        for name in names {
            if !list.is_empty() {
                list.push('\n');
            }
            list.push_str("turnstile.");
            list.push_str(name);
        }
        let values = host.call("turnstile.read", list.as_bytes())?;
        Some(Ahead { names, values })
    }

    /// `None` for a fact that was not read ahead, `Some(None)` for one that is not there.
    pub fn find(&self, name: &str) -> Option<Option<&[u8]>> {
        let mut rest = self.values.as_slice();
        for known in self.names {
            let value = take(&mut rest)?;
            if *known == name {
                return Some(value);
            }
        }
        None
    }
}

// === impl Parts ===

impl Parts {
    /// Room for what policies usually decide.
    pub fn new() -> Parts {
        Parts { bytes: Vec::with_capacity(256) }
    }

    /// Adds what is decided under `turnstile.NAME`.
    pub fn add(&mut self, name: &str, value: &[u8]) {
        const PREFIX: &[u8] = b"turnstile.";
        self.bytes.extend_from_slice(&length(PREFIX.len() + name.len()));
        self.bytes.extend_from_slice(PREFIX);
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.extend_from_slice(&length(value.len()));
        self.bytes.extend_from_slice(value);
    }

    /// Writes them all. False where the host has no such function.
    pub fn write(&self, host: &dyn Host) -> bool {
        self.bytes.is_empty() || host.call("turnstile.write", &self.bytes).is_some()
    }
}

/// A text of more than 4 GiB fits in no guest.
pub(crate) fn length(len: usize) -> [u8; 4] {
    u32::try_from(len).unwrap_or(ABSENT).to_le_bytes()
}

/// The next value: `Some(None)` if it stands for one that is not there, `None` at the end.
pub(crate) fn take<'a>(rest: &mut &'a [u8]) -> Option<Option<&'a [u8]>> {
    let (len, behind) = rest.split_first_chunk::<4>()?;
    let len = u32::from_le_bytes(*len);
    if len == ABSENT {
        *rest = behind;
        return Some(None);
    }
    let (value, behind) = behind.split_at_checked(usize::try_from(len).ok()?)?;
    *rest = behind;
    Some(Some(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::FakeHost;

    #[test]
    fn facts_read_ahead_are_found_and_absent_ones_are_absent() {
        let host = FakeHost::new().fact("request.tree", "lead").fact("request.osl", "").fact("attempt", 1);
        let ahead = Ahead::read(&host, &["request.tree", "request.osl", "request.session"]).unwrap();
        assert_eq!(ahead.find("request.tree"), Some(Some(&b"lead"[..])));
        assert_eq!(ahead.find("request.osl"), Some(Some(&b""[..])));
        assert_eq!(ahead.find("request.session"), Some(None));
        assert_eq!(ahead.find("attempt"), None, "not asked for");
        assert_eq!(host.reads(), 1);
    }

    #[test]
    fn an_answer_that_is_cut_off_gives_nothing() {
        let values = [&length(3)[..], b"abc", &length(9), b"x"].concat();
        let ahead = Ahead { names: &["a", "b", "c"], values };
        assert_eq!(ahead.find("a"), Some(Some(&b"abc"[..])));
        assert_eq!((ahead.find("b"), ahead.find("c")), (None, None));
    }

    #[test]
    fn a_host_without_these_functions_says_so() {
        let host = FakeHost::new().without_functions().fact("request.tree", "lead");
        assert!(Ahead::read(&host, &["request.tree"]).is_none());
        let mut parts = Parts::new();
        assert!(parts.write(&host), "there is nothing to write");
        parts.add("queue.tier", b"1");
        assert!(!parts.write(&host));
        assert_eq!(host.decided("queue.tier"), None);
    }
}
