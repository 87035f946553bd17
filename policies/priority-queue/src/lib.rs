//! A turn's place in the queue, from the agent hints: strict tier, head start, flow, and the engine's priority.
#![forbid(unsafe_code)]

mod order;

pub use order::{Hints, Options, Order, decide};
use turnstile_policy::{Admit, Counter, Decision, EnginePriority, Policy, Setup, Turn};

/// The policy.
pub struct PriorityQueue {
    options: Options,
    counters: Counters,
}

struct Counters {
    ahead: Counter,
    behind: Counter,
    tiered: Counter,
}

// === impl PriorityQueue ===

impl PriorityQueue {
    fn hints(turn: &Turn<'_>) -> Hints {
        let priority = turn.priority();
        Hints {
            priority,
            // The older hint counts only where the newer is absent.
            latency_sensitivity_s: if priority.is_none() { turn.latency_sensitivity() } else { None },
            strict_priority: turn.strict_priority(),
        }
    }

    /// Whose fair share the turn is charged to: its agent tree, else its session, else its tenant.
    fn flow(turn: &Turn<'_>) -> Option<String> {
        turn.tree().or_else(|| turn.session_id()).or_else(|| turn.tenant())
    }
}

impl Policy for PriorityQueue {
    type Options = Options;

    fn new(options: Options, setup: &mut Setup<'_>) -> Result<Self, String> {
        options.check()?;
        Ok(PriorityQueue {
            options,
            counters: Counters {
                ahead: setup.counter("priority_queue_ahead_total"),
                behind: setup.counter("priority_queue_behind_total"),
                tiered: setup.counter("priority_queue_tiered_total"),
            },
        })
    }
}

impl Admit for PriorityQueue {
    fn admit(&mut self, turn: &Turn<'_>) -> Decision {
        turn.read_ahead(&[
            "request.priority",
            "request.latency_sensitivity",
            "request.strict_priority",
            "request.tree",
            "request.session",
            "request.tenant",
        ]);
        let order = decide(&Self::hints(turn), &self.options);
        if order.head_start_s > 0.0 {
            turn.count(self.counters.ahead);
        } else if order.head_start_s < 0.0 {
            turn.count(self.counters.behind);
        }
        if order.tier > 0 {
            turn.count(self.counters.tiered);
        }
        let mut decision = Decision::none().tier(order.tier).queue_priority(order.head_start_s);
        if let Some(flow) = Self::flow(turn) {
            decision = decision.flow(flow);
        }
        if let Some(ms) = self.options.deadline_ms {
            decision = decision.deadline_ms(ms);
        }
        if let Some(priority) = order.engine_priority {
            decision = decision.engine_priority(EnginePriority::Value(priority));
        }
        decision
    }
}

turnstile_policy::admit!(PriorityQueue);

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
