//! What plugins are told of an answer while it comes, if they ask (`events`): by a call of `proxy_on_foreign_function` on the
//! stream's context, with the event as JSON in buffer 8. Names and numbers only, nothing of prompt or answer.

use super::chain::{ChainPlugin, TurnPolicies};
use crate::forward::relay::{Listener, Stop};
use bytes::Bytes;
use serde::Serialize;
use std::sync::Arc;
use std::time::Instant;
use turnstile_config::PluginEvent;
use turnstile_fleet::observe::{Asked, Happening};
use turnstile_plugins::{CallResult, Fault};

/// The function id of these calls.
pub const EVENT_FUNCTION: u32 = 1;

/// A set of kinds of events.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EventSet(u8);

/// One event, written once for all who are told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: PluginEvent,
    /// The event as plugins read it.
    pub json: Bytes,
}

/// The members of an event: those that its kind has.
#[derive(Serialize, Default)]
struct Members<'a> {
    event: &'static str,
    at_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    number: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    completion_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cached_tokens: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    outcome: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    left_out: Option<u64>,
}

/// How a request ended, for its last events.
#[derive(Default)]
pub struct Ended<'a> {
    /// Since its arrival, ms.
    pub at_ms: u64,
    /// Tokens of the prompt, if the worker told them.
    pub prompt_tokens: Option<u64>,
    /// Tokens generated, likewise.
    pub completion_tokens: Option<u64>,
    /// Tokens of the prompt that were cached, likewise.
    pub cached_tokens: Option<u64>,
    /// The access log's word for how it ended.
    pub outcome: &'a str,
    /// The status that the client got.
    pub status: u16,
    /// Events that were left out, because there were too many of a kind.
    pub left_out: u64,
}

/// Hears what is read in an answer, and tells the policies once it has been written to the client.
pub struct Teller<'a> {
    policies: &'a mut TurnPolicies,
    arrived: Instant,
    waiting: Vec<Event>,
}

// === impl EventSet ===

impl EventSet {
    /// Those that are listed.
    pub fn of(events: &[PluginEvent]) -> Self {
        Self(events.iter().fold(0, |set, event| set | Self::bit(*event)))
    }

    const fn bit(event: PluginEvent) -> u8 {
        1 << event as u8
    }

    /// Those of either set.
    #[must_use]
    pub fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether it has this kind.
    pub fn contains(self, event: PluginEvent) -> bool {
        self.0 & Self::bit(event) != 0
    }

    /// The names of those that it has.
    pub fn names(self) -> Vec<&'static str> {
        PluginEvent::ALL.into_iter().filter(|event| self.contains(*event)).map(PluginEvent::as_str).collect()
    }

    /// Whether it has none.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// What is to be read in answers for it.
    pub fn asked(self) -> Asked {
        Asked {
            first_token: self.contains(PluginEvent::FirstToken),
            tool_call: self.contains(PluginEvent::ToolCall),
            finish: self.contains(PluginEvent::Finish),
        }
    }
}

// === impl Event ===

impl Event {
    fn new(kind: PluginEvent, members: Members<'_>) -> Self {
        let members = Members { event: kind.as_str(), ..members };
        // Texts and numbers never fail to be written.
        Self { kind, json: serde_json::to_vec(&members).unwrap_or_default().into() }
    }

    /// Something that happened in an answer.
    pub fn of(happening: &Happening, at_ms: u64) -> Self {
        let members = Members { at_ms, ..Members::default() };
        match happening {
            Happening::FirstToken => Self::new(PluginEvent::FirstToken, members),
            Happening::ToolCall { number, name } => {
                let members = Members { number: Some(*number), name: Some(name), ..members };
                Self::new(PluginEvent::ToolCall, members)
            }
            Happening::Finish { reason } => Self::new(PluginEvent::Finish, Members { reason: Some(reason), ..members }),
        }
    }

    /// The last events of a request: its usage, if anything is known of it, and its end.
    pub fn last(ended: &Ended<'_>) -> impl Iterator<Item = Self> {
        let Ended { at_ms, prompt_tokens, completion_tokens, cached_tokens, .. } = *ended;
        let known = [prompt_tokens, completion_tokens, cached_tokens].iter().any(Option::is_some);
        let usage = known.then(|| {
            let members = Members { at_ms, prompt_tokens, completion_tokens, cached_tokens, ..Members::default() };
            Self::new(PluginEvent::Usage, members)
        });
        let (outcome, status, left_out) = (Some(ended.outcome), Some(ended.status), Some(ended.left_out));
        let end = Self::new(PluginEvent::End, Members { at_ms, outcome, status, left_out, ..Members::default() });
        usage.into_iter().chain([end])
    }
}

// === impl Teller ===

impl<'a> Teller<'a> {
    /// For a request that came then.
    pub fn new(policies: &'a mut TurnPolicies, arrived: Instant) -> Self {
        Self { policies, arrived, waiting: Vec::new() }
    }
}

impl Listener for Teller<'_> {
    fn heard(&mut self, happenings: Vec<Happening>) {
        if !happenings.is_empty() {
            let at_ms = ms_since(self.arrived);
            self.waiting.extend(happenings.iter().map(|happening| Event::of(happening, at_ms)));
        }
    }

    fn due(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.waiting)
    }

    fn tell(&mut self, event: &Event) -> Result<(), Stop> {
        self.policies.tell(event)
    }
}

/// Whole milliseconds since then.
pub fn ms_since(then: Instant) -> u64 {
    u64::try_from(then.elapsed().as_millis()).unwrap_or(u64::MAX)
}

// === impl TurnPolicies ===

impl TurnPolicies {
    /// Tells those that asked for it of an event. One that fails hears of no more, and of nothing else is there a consequence:
    /// the turn is decided.
    ///
    /// # Errors
    /// One of them ends the answer.
    pub fn tell(&mut self, event: &Event) -> Result<(), Stop> {
        let chain = Arc::clone(&self.chain);
        let mut stopped = Ok(());
        for (at, plugin) in chain.iter().enumerate() {
            if !plugin.events.contains(event.kind) {
                continue;
            }
            match self.told(at, plugin, event) {
                Some(Ok(outcome)) if plugin.shadow.is_none() && stopped.is_ok() => {
                    stopped = stops(outcome.effects);
                }
                Some(Ok(_)) | None => {}
                Some(Err(fault)) => self.failed_in_event(at, plugin, &fault),
            }
        }
        stopped
    }

    /// Tells those that asked for it of the last events.
    pub fn tell_last(&mut self, ended: &Ended<'_>) {
        for event in Event::last(ended) {
            // The turn has ended already.
            let _ = self.tell(&event);
        }
    }

    /// One event for one plugin; nothing if it has no context in this turn.
    fn told(&mut self, at: usize, plugin: &ChainPlugin, event: &Event) -> Option<CallResult> {
        let stream = self.streams.get_mut(at)?.as_mut()?;
        // One that failed when it was asked has none either.
        stream.key()?;
        self.env.hidden = plugin.plugin.spec().hidden_headers;
        let before = plugin.shadow.as_ref().map(|own| self.env.begin_shadow(own));
        let outcome = stream.on_foreign_function(&mut self.env, EVENT_FUNCTION, event.json.clone());
        if let Some(before) = before {
            self.env.end_shadow(before);
        }
        self.report_dropped(plugin);
        Some(outcome)
    }

    fn failed_in_event(&mut self, at: usize, plugin: &ChainPlugin, fault: &Fault) {
        tracing::warn!(plugin = %plugin.name, kind = %fault.kind, message = %fault.message, "policy failed in an event");
        // Its context is gone with its instance.
        if let Some(slot) = self.streams.get_mut(at) {
            *slot = None;
        }
        if plugin.shadow.is_none() {
            self.failed.push(Arc::clone(&plugin.name));
        }
        if let Some(canary) = &plugin.canary {
            self.judge(plugin, |_| canary.failed());
        }
    }
}

/// What a plugin's wishes in an event come to: an answer of which the client has some cannot be replaced, it can only break off.
pub fn stops(effects: turnstile_plugins::Effects) -> Result<(), Stop> {
    match effects.local_response {
        Some(response) => Err(Stop::Answers(response)),
        None if effects.close_downstream || effects.close_upstream => Err(Stop::Closes),
        None => Ok(()),
    }
}

#[cfg(test)]
#[path = "events_tests.rs"]
mod tests;
