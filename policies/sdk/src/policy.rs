//! What a policy implements.

use serde::de::DeserializeOwned;

use crate::{Counter, Decision, Event, Host, Outcome, Turn};

/// A policy: made from its options when the plugin is configured, asked once per turn and phase.
///
/// One value lives as long as the plugin's instance, so a policy may keep what it learned in its fields. There is one
/// instance per shard of the gateway, and a swap makes a new one: state that must be shared or survive belongs into the
/// host's shared data.
pub trait Policy: Sized + 'static {
    /// The plugin's configuration table. Derive `serde::Deserialize` with `#[serde(default, deny_unknown_fields)]`.
    type Options: DeserializeOwned;

    /// Makes the policy. Runs again when the configuration changes.
    ///
    /// # Errors
    /// A text that says which option is wrong and why. The host logs it and refuses the plugin.
    fn new(options: Self::Options, setup: &mut Setup<'_>) -> Result<Self, String>;

    /// Told of something that happened in the answer, if the plugin's option `events` names its kind. The facts of the turn can
    /// be read; it is too late for decisions.
    fn on_event(&mut self, _event: &Event, _turn: &Turn<'_>) {}

    /// Called at the end of the turn, however it ended. The default reads nothing.
    fn finished(&mut self, _outcome: &Outcome<'_>) {}
}

/// A policy of the `admit` phase: runs when the turn arrives, decides its place in the queue.
pub trait Admit: Policy {
    /// Decides. [`Decision::none`] leaves everything to the next plugin or to the built-in rule.
    fn admit(&mut self, turn: &Turn<'_>) -> Decision;
}

/// A policy of the `route` phase: runs when the turn is dispatched, decides worker and session.
pub trait Route: Policy {
    /// Decides. [`Decision::none`] leaves everything to the next plugin or to the built-in rule.
    ///
    /// On a retry it is asked again, with [`Turn::attempt`] above 0.
    fn route(&mut self, turn: &Turn<'_>) -> Decision;
}

/// What a policy may use while it is being made.
pub struct Setup<'h> {
    host: &'h dyn Host,
}

impl<'h> Setup<'h> {
    /// Sets up on `host`.
    pub fn new(host: &'h dyn Host) -> Self {
        Setup { host }
    }

    /// Defines a counter. The same name gives the same counter. Use `snake_case`; the gateway adds the plugin's name.
    pub fn counter(&mut self, name: &str) -> Counter {
        self.host.define_counter(name)
    }
}
