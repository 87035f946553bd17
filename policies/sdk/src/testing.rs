//! A host in memory, for tests of policies.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

use crate::bulk;
use crate::{Admit, Counter, Event, Host, Outcome, Policy, Route, Setup, Turn, Worker, parse_options};

/// Holds facts, collects decisions. Names are dotted: `request.model`, `route.target`, both without `turnstile.`.
///
/// As on the gateway, what was written is read back under the same name, so plugins can be chained on one host.
#[derive(Default)]
pub struct FakeHost {
    facts: RefCell<BTreeMap<String, Vec<u8>>>,
    decided: RefCell<BTreeMap<String, String>>,
    headers: BTreeMap<String, String>,
    counters: RefCell<Vec<(String, u64)>>,
    reads: Cell<usize>,
    has_no_functions: bool,
}

impl FakeHost {
    /// A host that knows nothing.
    pub fn new() -> Self {
        FakeHost::default()
    }

    /// Adds a fact.
    pub fn fact(self, name: &str, value: impl ToString) -> Self {
        self.facts.borrow_mut().insert(name.to_owned(), value.to_string().into_bytes());
        self
    }

    /// Adds a fact that is not text.
    pub fn raw_fact(self, name: &str, value: Vec<u8>) -> Self {
        self.facts.borrow_mut().insert(name.to_owned(), value);
        self
    }

    /// Adds a request header. Write the name in lower case.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Sets the candidates.
    pub fn workers(self, workers: &[Worker]) -> Self {
        let host = self.raw_fact("workers.table", table(workers));
        match workers.iter().find(|worker| worker.is_bound()) {
            Some(bound) => host.raw_fact("workers.bound", table(&[*bound])),
            None => host,
        }
    }

    /// Makes it a host without functions, as others than the gateway are.
    pub fn without_functions(mut self) -> Self {
        self.has_no_functions = true;
        self
    }

    /// What was decided under `name`, such as `route.target`.
    pub fn decided(&self, name: &str) -> Option<String> {
        self.decided.borrow().get(name).cloned()
    }

    /// All that was decided, sorted by name, one `name=value` per item.
    pub fn decisions(&self) -> Vec<String> {
        self.decided.borrow().iter().map(|(name, value)| format!("{name}={value}")).collect()
    }

    /// Value of a counter; 0 when it was never counted.
    pub fn counted(&self, name: &str) -> u64 {
        self.counters.borrow().iter().find(|(known, _)| known == name).map_or(0, |(_, value)| *value)
    }

    /// How often a policy read a property or a header. Several that are read by one call count once.
    pub fn reads(&self) -> usize {
        self.reads.get()
    }

    /// Makes a policy from its JSON options, as the gateway does.
    ///
    /// # Errors
    /// The text that the gateway would log when it refuses the plugin.
    pub fn configure<P: Policy>(&self, options: &str) -> Result<P, String> {
        let options = parse_options(options.as_bytes()).map_err(|error| error.to_string())?;
        P::new(options, &mut Setup::new(self))
    }

    /// Runs the admit phase.
    pub fn admit(&self, policy: &mut impl Admit) {
        policy.admit(&Turn::new(self)).write(self);
    }

    /// Runs the route phase.
    pub fn route(&self, policy: &mut impl Route) {
        policy.route(&Turn::new(self)).write(self);
    }

    /// Tells the policy of an event.
    pub fn tell(&self, policy: &mut impl Policy, event: &Event) {
        policy.on_event(event, &Turn::new(self));
    }

    /// Ends the turn.
    pub fn finish(&self, policy: &mut impl Policy) {
        policy.finished(&Outcome::new(self));
    }
}

impl FakeHost {
    fn value(&self, name: &str) -> Option<Vec<u8>> {
        let decided = self.decided.borrow().get(name).map(|text| text.clone().into_bytes());
        decided.or_else(|| self.facts.borrow().get(name).cloned())
    }

    fn decide(&self, name: String, value: &[u8]) {
        self.decided.borrow_mut().insert(name, String::from_utf8_lossy(value).into_owned());
    }
}

/// The name of a path, without the leading `turnstile`.
fn name(path: &[&str]) -> String {
    path.strip_prefix(&["turnstile"]).unwrap_or(path).join(".")
}

impl Host for FakeHost {
    fn get(&self, path: &[&str]) -> Option<Vec<u8>> {
        self.reads.set(self.reads.get() + 1);
        self.value(&name(path))
    }

    fn set(&self, path: &[&str], value: &[u8]) {
        self.decide(name(path), value);
    }

    fn header(&self, name: &str) -> Option<Vec<u8>> {
        self.reads.set(self.reads.get() + 1);
        self.headers.get(&name.to_ascii_lowercase()).map(|value| value.clone().into_bytes())
    }

    fn call(&self, function: &str, arguments: &[u8]) -> Option<Vec<u8>> {
        match function {
            _ if self.has_no_functions => None,
            "turnstile.read" => {
                self.reads.set(self.reads.get() + 1);
                let mut values = Vec::new();
                for name in String::from_utf8_lossy(arguments).split('\n') {
                    match self.value(name.strip_prefix("turnstile.").unwrap_or(name)) {
                        Some(value) => values.extend([&bulk::length(value.len())[..], &value].concat()),
                        None => values.extend(u32::MAX.to_le_bytes()),
                    }
                }
                Some(values)
            }
            "turnstile.write" => {
                let mut rest = arguments;
                let mut count = 0;
                while let (Some(Some(name)), Some(Some(value))) = (bulk::take(&mut rest), bulk::take(&mut rest)) {
                    let name = String::from_utf8_lossy(name).into_owned();
                    self.decide(name.strip_prefix("turnstile.").unwrap_or(&name).to_owned(), value);
                    count += 1;
                }
                Some(format!("{count}").into_bytes())
            }
            _ => None,
        }
    }

    fn define_counter(&self, name: &str) -> Counter {
        let mut counters = self.counters.borrow_mut();
        let at = counters.iter().position(|(known, _)| known == name).unwrap_or_else(|| {
            counters.push((name.to_owned(), 0));
            counters.len() - 1
        });
        Counter::from_id(u32::try_from(at).ok())
    }

    fn count(&self, counter: Counter, by: u32) {
        let Some(at) = counter.id().and_then(|id| usize::try_from(id).ok()) else { return };
        if let Some((_, value)) = self.counters.borrow_mut().get_mut(at) {
            *value += u64::from(by);
        }
    }
}

/// A `workers.table` of these workers.
pub fn table(workers: &[Worker]) -> Vec<u8> {
    let count = u32::try_from(workers.len()).unwrap_or(u32::MAX);
    let mut table: Vec<u8> = [1u32, 104, count, 0].iter().flat_map(|value| value.to_le_bytes()).collect();
    for worker in workers {
        worker.write(&mut table);
    }
    table
}
