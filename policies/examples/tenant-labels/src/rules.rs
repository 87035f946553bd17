//! Which workers a tenant may use.

use std::collections::BTreeMap;

use serde::Deserialize;
use turnstile_policy::{WorkerFacts, WorkerState};

/// The plugin's configuration table.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Header whose value names the tenant. Absent: the tenant that the gateway derives from the credential.
    pub header: Option<String>,
    /// The rules; the first that fits decides.
    pub rules: Vec<Rule>,
    /// When no ready worker has the labels: true refuses the turn, false lets it go anywhere.
    pub strict: bool,
}

/// One rule.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rule {
    /// Tenant or header value; `*` fits every turn.
    pub tenant: String,
    /// Labels a worker must have, all of them.
    pub labels: BTreeMap<String, String>,
}

/// The workers on either side of a rule.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Matching {
    /// How many ready workers have the labels.
    pub allowed: usize,
    /// Indices of the workers that lack a label.
    pub excluded: Vec<u32>,
}

// === impl Options ===

impl Options {
    /// Refuses rules that could not do anything.
    ///
    /// # Errors
    /// Names the option that is wrong.
    pub fn check(&self) -> Result<(), String> {
        for (number, rule) in self.rules.iter().enumerate() {
            if rule.tenant.is_empty() {
                return Err(format!("option `rules[{number}].tenant`: missing"));
            }
            if rule.labels.is_empty() {
                return Err(format!("option `rules[{number}].labels`: at least one label is needed"));
            }
        }
        if self.header.as_ref().is_some_and(String::is_empty) {
            return Err("option `header`: empty".to_owned());
        }
        Ok(())
    }

    /// The labels that a tenant's workers must have; `None` when no rule fits.
    pub fn selector(&self, tenant: Option<&str>) -> Option<&BTreeMap<String, String>> {
        let fits = |rule: &&Rule| rule.tenant == "*" || Some(rule.tenant.as_str()) == tenant;
        self.rules.iter().find(fits).map(|rule| &rule.labels)
    }
}

/// Splits the workers by a selector.
pub fn matching(workers: &[WorkerFacts], selector: &BTreeMap<String, String>) -> Matching {
    let mut result = Matching::default();
    for worker in workers {
        if selector.iter().all(|(name, value)| worker.labels.get(name) == Some(value)) {
            result.allowed += usize::from(worker.worker_state() == WorkerState::Ready);
        } else {
            result.excluded.push(worker.index);
        }
    }
    result
}

#[cfg(test)]
#[path = "rules_tests.rs"]
mod tests;
