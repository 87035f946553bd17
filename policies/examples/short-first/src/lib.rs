//! Turns whose answers are expected to be short go first. What to expect of a tenant is learned from its answers, by the events
//! `usage`; tool calls are counted by the events `tool_call`.
#![forbid(unsafe_code)]

mod lengths;

use lengths::Lengths;
use turnstile_policy::{Admit, Counter, Decision, Event, Policy, Setup, Turn};

/// The plugin's `config` table.
#[derive(serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Expected output, tokens, that gets no head start. Less gets some.
    long_tokens: u32,
    /// Head start of a turn that is expected to say nothing at all, ms.
    most_ms: u32,
    /// Tenants that are remembered; one more, and the one that was quiet longest is forgotten.
    tenants: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { long_tokens: 1000, most_ms: 5000, tenants: 1000 }
    }
}

/// The policy.
pub struct ShortFirst {
    options: Options,
    lengths: Lengths,
    tool_calls: Counter,
}

impl Policy for ShortFirst {
    type Options = Options;

    fn new(options: Options, setup: &mut Setup<'_>) -> Result<Self, String> {
        for (name, is_zero) in [("long_tokens", options.long_tokens == 0), ("tenants", options.tenants == 0)] {
            if is_zero {
                return Err(format!("option `{name}`: must be above 0"));
            }
        }
        let lengths = Lengths::new(options.tenants);
        Ok(Self { options, lengths, tool_calls: setup.counter("short_first_tool_calls_total") })
    }

    fn on_event(&mut self, event: &Event, turn: &Turn<'_>) {
        match event {
            Event::ToolCall { .. } => turn.count(self.tool_calls),
            Event::Usage { usage, .. } => {
                if let (Some(tenant), Some(tokens)) = (turn.tenant(), usage.completion_tokens) {
                    self.lengths.learn(tenant, tokens as f64);
                }
            }
            _ => {}
        }
    }
}

impl Admit for ShortFirst {
    fn admit(&mut self, turn: &Turn<'_>) -> Decision {
        let Some(expected) = turn.tenant().and_then(|tenant| self.lengths.expected(&tenant)) else {
            return Decision::none();
        };
        let share = 1.0 - (expected / f64::from(self.options.long_tokens)).min(1.0);
        let head_start_s = share * f64::from(self.options.most_ms) / 1e3;
        Decision::none().queue_priority(head_start_s).note("expected_tokens", format!("{expected:.0}"))
    }
}

turnstile_policy::admit!(ShortFirst);

#[cfg(test)]
mod tests;
