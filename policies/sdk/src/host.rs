//! The few calls a policy makes into its host, behind a trait so that policies are tested without one.

/// A counter defined by [`Setup::counter`](crate::Setup::counter), counted with [`Turn::count`](crate::Turn::count).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counter(pub(crate) Option<u32>);

impl Counter {
    /// The counter with the host's metric number `id`; `None` counts nothing.
    pub fn from_id(id: Option<u32>) -> Self {
        Counter(id)
    }

    /// The host's metric number, or `None` when the host gave none.
    pub fn id(self) -> Option<u32> {
        self.0
    }
}

/// What the gateway offers to a policy.
pub trait Host {
    /// Reads a property. `path` is given in segments; `None` when the host knows no such value.
    fn get(&self, path: &[&str]) -> Option<Vec<u8>>;

    /// Writes a property.
    fn set(&self, path: &[&str], value: &[u8]);

    /// Reads a request header; the name is case-insensitive, of several values the first is given.
    fn header(&self, name: &str) -> Option<Vec<u8>>;

    /// Calls a function of the host by name; `None` when it has none of that name, refused, or had nothing to say.
    fn call(&self, function: &str, arguments: &[u8]) -> Option<Vec<u8>>;

    /// Defines a counter, or finds it again.
    fn define_counter(&self, name: &str) -> Counter;

    /// Adds to a counter.
    fn count(&self, counter: Counter, by: u32);
}
