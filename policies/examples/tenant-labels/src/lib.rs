//! Keeps a tenant's turns on the workers that carry certain labels.
#![forbid(unsafe_code)]

mod rules;

pub use rules::{Options, Rule, matching};
use turnstile_policy::{Counter, Decision, Policy, Route, Setup, Turn};

/// The policy.
pub struct TenantLabels {
    options: Options,
    kept: Counter,
    nowhere: Counter,
}

impl Policy for TenantLabels {
    type Options = Options;

    fn new(options: Options, setup: &mut Setup<'_>) -> Result<Self, String> {
        options.check()?;
        Ok(TenantLabels {
            options,
            kept: setup.counter("tenant_labels_kept_total"),
            nowhere: setup.counter("tenant_labels_nowhere_total"),
        })
    }
}

impl Route for TenantLabels {
    fn route(&mut self, turn: &Turn<'_>) -> Decision {
        let who = match &self.options.header {
            Some(header) => turn.header(header),
            None => turn.tenant(),
        };
        let Some(selector) = self.options.selector(who.as_deref()) else { return Decision::none() };
        let Some(workers) = turn.worker_facts() else { return Decision::none() };
        let found = matching(&workers, selector);
        if found.allowed == 0 && !self.options.strict {
            turn.count(self.nowhere);
            return Decision::none().note("tenant-labels", "no ready worker has the labels: any worker will do");
        }
        turn.count(self.kept);
        // Excluding the others leaves the choice among the rest to the policies that follow.
        Decision::none().exclude(found.excluded)
    }
}

turnstile_policy::route!(TenantLabels);

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
