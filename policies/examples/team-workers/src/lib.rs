//! Keeps a team's turns on the workers that carry its label.

use std::collections::BTreeMap;
use turnstile_policy::{Decision, Policy, Route, Setup, Turn};

/// The plugin's `config` table.
#[derive(Default, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Value of the header `x-team` → value that the workers' label `team` must have.
    teams: BTreeMap<String, String>,
}

/// The policy. It lives as long as the plugin's instance.
pub struct TeamWorkers {
    options: Options,
}

impl Policy for TeamWorkers {
    type Options = Options;

    fn new(options: Options, _: &mut Setup<'_>) -> Result<Self, String> {
        if options.teams.is_empty() {
            return Err("option `teams`: at least one team is needed".to_owned());
        }
        Ok(TeamWorkers { options })
    }
}

impl Route for TeamWorkers {
    fn route(&mut self, turn: &Turn<'_>) -> Decision {
        let team = turn.header("x-team").unwrap_or_default();
        let Some(label) = self.options.teams.get(&team) else { return Decision::none() };
        let workers = turn.worker_facts().unwrap_or_default().into_iter();
        let others = workers.filter(|worker| worker.labels.get("team") != Some(label));
        Decision::none().exclude(others.map(|worker| worker.index)).note("team", team)
    }
}

turnstile_policy::route!(TeamWorkers);

#[cfg(test)]
mod tests;
