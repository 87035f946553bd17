//! Trying a policy on part of the sessions.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A policy that decides for part of the sessions in the place of another, and is set aside by itself when it does worse.
///
/// It is held against the turns that the other one decides meanwhile. Both sides are judged once they have `min_turns` turns
/// of which the worker told what it had cached, and again after each turn; older turns weigh less.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Canary {
    /// The plugin in whose place it decides: one of the same phase, which is no canary and no shadow itself.
    #[schemars(extend("format" = "name"))]
    pub of: String,
    /// Share of the sessions it decides for, in percent. A session stays on its side, also when the share grows; a turn
    /// without a session counts as one of its own.
    #[schemars(range(min = 1, max = 100))]
    pub percent: u32,
    /// Turns that each side needs before hits and latency are compared.
    #[serde(default = "default_min_turns")]
    #[schemars(range(min = 10, max = 1_000_000))]
    pub min_turns: u32,
    /// Faults (traps, deadlines and the like) after which it is set aside, however many turns there were.
    #[serde(default = "default_max_faults")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_faults: u32,
    /// How much less of the prompts may come from the workers' caches than on the other side, as a share of all prompt
    /// tokens: 0.05 stands for five points of a hundred.
    #[serde(default = "default_max_cached_loss")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub max_cached_loss: f64,
    /// How many times the other side's time to the first event its own may be (geometric means).
    #[serde(default = "default_max_ttft_ratio")]
    #[schemars(range(min = 1.0, max = 1000.0))]
    pub max_ttft_ratio: f64,
    /// Milliseconds its decisions may take on average. Judged from a tenth of `min_turns` on.
    #[serde(default = "default_max_decision_ms")]
    #[schemars(range(min = 0.001, max = 60_000.0))]
    pub max_decision_ms: f64,
}

fn default_min_turns() -> u32 {
    200
}

fn default_max_faults() -> u32 {
    3
}

fn default_max_cached_loss() -> f64 {
    0.05
}

fn default_max_ttft_ratio() -> f64 {
    1.25
}

fn default_max_decision_ms() -> f64 {
    5.0
}
