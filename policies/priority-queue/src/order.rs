//! From hints to an order.

use serde::Deserialize;

/// The plugin's configuration table.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Longest head start or setback a client's priority can give, seconds.
    pub max_head_start_s: f64,
    /// Head start for one unit of priority, seconds.
    pub seconds_per_priority: f64,
    /// Highest strict tier a client can reach.
    pub max_tier: u32,
    /// Longest wait in the queue, ms. Absent: the gateway's own limit.
    pub deadline_ms: Option<u64>,
    /// Send the priority on to workers that take one.
    pub engine_priority: bool,
    /// Lowest priority sent to a worker.
    pub engine_priority_min: i64,
    /// Highest priority sent to a worker.
    pub engine_priority_max: i64,
    /// The only priorities sent to a worker; a client's goes to the nearest, of two equally near to the one closer to 0.
    /// Empty: any within the range.
    pub engine_levels: Vec<i64>,
}

/// What the client said.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Hints {
    /// Signed priority; larger is more urgent.
    pub priority: Option<i64>,
    /// Head start in seconds, the older form of the hint.
    pub latency_sensitivity_s: Option<f64>,
    /// Strict tier.
    pub strict_priority: Option<u32>,
}

/// The place in the queue.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Order {
    /// Strict tier, higher first.
    pub tier: u32,
    /// Head start against arrival, seconds; negative is a setback.
    pub head_start_s: f64,
    /// Priority for the worker; `None` leaves it out.
    pub engine_priority: Option<i64>,
}

// === impl Options ===

impl Default for Options {
    fn default() -> Self {
        Options {
            max_head_start_s: 3600.0,
            seconds_per_priority: 1.0,
            max_tier: u32::MAX,
            deadline_ms: None,
            engine_priority: true,
            // One above the -100 that the gateway's own warming requests carry by default: a client's turn is never
            // below them.
            engine_priority_min: -99,
            engine_priority_max: 100,
            engine_levels: Vec::new(),
        }
    }
}

impl Options {
    /// Refuses what would turn the order around.
    ///
    /// # Errors
    /// Names the option that is out of range.
    pub fn check(&self) -> Result<(), String> {
        for (name, value) in
            [("max_head_start_s", self.max_head_start_s), ("seconds_per_priority", self.seconds_per_priority)]
        {
            if !value.is_finite() || value < 0.0 {
                return Err(format!("option `{name}`: must be 0 or more"));
            }
        }
        if self.engine_priority_min > self.engine_priority_max {
            return Err(format!(
                "option `engine_priority_min`: {} is above engine_priority_max, {}",
                self.engine_priority_min, self.engine_priority_max
            ));
        }
        let range = self.engine_priority_min..=self.engine_priority_max;
        if let Some(level) = self.engine_levels.iter().find(|level| !range.contains(level)) {
            return Err(format!(
                "option `engine_levels`: {level} is not between engine_priority_min and engine_priority_max"
            ));
        }
        Ok(())
    }

    fn engine_priority(&self, priority: i64) -> i64 {
        let clamped = priority.clamp(self.engine_priority_min, self.engine_priority_max);
        let distance = |level: &i64| (level.abs_diff(clamped), level.unsigned_abs());
        self.engine_levels.iter().copied().min_by_key(distance).unwrap_or(clamped)
    }
}

/// Decides.
pub fn decide(hints: &Hints, options: &Options) -> Order {
    let limit = options.max_head_start_s;
    let seconds = match (hints.priority, hints.latency_sensitivity_s) {
        (Some(priority), _) => priority as f64 * options.seconds_per_priority,
        // Only ever a head start: the older hint knows no setback.
        (None, Some(seconds)) => seconds.max(0.0),
        (None, None) => 0.0,
    };
    Order {
        tier: hints.strict_priority.unwrap_or(0).min(options.max_tier),
        head_start_s: seconds.clamp(-limit, limit),
        engine_priority: hints
            .priority
            .filter(|_| options.engine_priority)
            .map(|priority| options.engine_priority(priority)),
    }
}

#[cfg(test)]
#[path = "order_tests.rs"]
mod tests;
