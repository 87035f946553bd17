//! The names that policies read, write and call, in one table: `docs/policy-reference.md` is written from it, and tests hold
//! it against what the environment really answers.

mod page;
mod table;

pub use page::page;
pub use table::{DECISIONS, EVENTS, FACTS, FUNCTIONS, WORKER_MEMBERS};
use turnstile_config::PluginEvent;

/// A fact under `turnstile.`.
#[derive(Debug, Clone, Copy)]
pub struct Fact {
    /// Its name.
    pub name: &'static str,
    /// How its value is written.
    pub ty: &'static str,
    /// Its unit; empty where there is none.
    pub unit: &'static str,
    /// When it can be read.
    pub when: When,
    /// What it is.
    pub meaning: &'static str,
}

/// When something can be read or written: in the phase `admit`, in the phase `route`, at the end of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct When {
    /// In the phase `admit`.
    pub admit: bool,
    /// In the phase `route`.
    pub route: bool,
    /// In `proxy_on_log`.
    pub end: bool,
}

/// A decision.
#[derive(Debug, Clone, Copy)]
pub struct DecisionName {
    /// Its name.
    pub name: &'static str,
    /// What can be written.
    pub value: &'static str,
    /// When.
    pub when: When,
    /// A value that can be written, for the check of this table.
    pub sample: &'static str,
    /// What it decides.
    pub meaning: &'static str,
}

/// A function that is called by name.
#[derive(Debug, Clone, Copy)]
pub struct Function {
    /// Its name.
    pub name: &'static str,
    /// What it is called with.
    pub argument: &'static str,
    /// What it gives.
    pub result: &'static str,
    /// An argument that it takes, for the check of this table.
    pub sample: &'static [u8],
}

/// An event that plugins may be told of.
#[derive(Debug, Clone, Copy)]
pub struct EventRow {
    /// Which.
    pub kind: PluginEvent,
    /// Its members beside `event` and `at_ms`, with what they are. One that is not always there ends with `?`.
    pub members: &'static [(&'static str, &'static str)],
    /// How often it comes, and when.
    pub when: &'static str,
}

/// A member of a worker in `workers` and `workers.table`.
#[derive(Debug, Clone, Copy)]
pub struct WorkerMember {
    /// Name in the JSON.
    pub name: &'static str,
    /// Offset in the record and type there; nothing if it is only in the JSON.
    pub place: Option<(usize, &'static str)>,
    /// Its unit; empty where there is none.
    pub unit: &'static str,
    /// What it is.
    pub meaning: &'static str,
}

// === impl When ===

impl When {
    /// Always.
    pub const ALWAYS: Self = Self { admit: true, route: true, end: true };
    /// From placement on.
    pub const ROUTE: Self = Self { admit: false, route: true, end: true };
    /// While something is decided.
    pub const DECIDING: Self = Self { admit: true, route: true, end: false };
    /// In the phase `route` only.
    pub const ROUTING: Self = Self { admit: false, route: true, end: false };
    /// At the end only.
    pub const END: Self = Self { admit: false, route: false, end: true };

    fn text(self) -> String {
        let all = [(self.admit, "admit"), (self.route, "route"), (self.end, "end")];
        if all.iter().all(|(is, _)| *is) {
            return "always".to_owned();
        }
        all.iter().filter(|(is, _)| *is).map(|(_, name)| *name).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
#[path = "reference_tests.rs"]
mod tests;
