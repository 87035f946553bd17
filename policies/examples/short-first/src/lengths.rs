//! How long the answers to a tenant are, on average.

use std::collections::HashMap;

/// Weight of a new answer in the average.
const WEIGHT: f64 = 0.2;

/// Averages of so many tenants at most.
pub struct Lengths {
    most: usize,
    now: u64,
    tenants: HashMap<String, Average>,
}

struct Average {
    tokens: f64,
    last: u64,
}

impl Lengths {
    /// Of no tenant yet.
    pub fn new(most: usize) -> Self {
        Self { most, now: 0, tenants: HashMap::new() }
    }

    /// What to expect of a tenant, tokens, if it has had an answer.
    pub fn expected(&self, tenant: &str) -> Option<f64> {
        self.tenants.get(tenant).map(|average| average.tokens)
    }

    /// An answer to a tenant had so many tokens.
    pub fn learn(&mut self, tenant: String, tokens: f64) {
        self.now += 1;
        if !self.tenants.contains_key(&tenant) && self.tenants.len() >= self.most {
            let quiet = self.tenants.iter().min_by_key(|(_, average)| average.last).map(|(name, _)| name.clone());
            if let Some(quiet) = quiet {
                self.tenants.remove(&quiet);
            }
        }
        let average = self.tenants.entry(tenant).or_insert(Average { tokens, last: self.now });
        average.tokens += WEIGHT * (tokens - average.tokens);
        average.last = self.now;
    }
}
