//! Filters that are told what happens in the answer, beside its bytes.

use super::{FilterRun, FilterVerdict, Side};
use crate::policy::events::{EVENT_FUNCTION, Ended, Event};
use turnstile_config::OnError;
use turnstile_plugins::Fault;

impl FilterRun {
    /// Tells the filters that see the answer and asked for it of an event.
    ///
    /// # Errors
    /// The place of the filter that ends the exchange, and how.
    pub fn tell(&mut self, event: &Event) -> Result<(), (usize, FilterVerdict)> {
        for at in (0..self.entered).rev() {
            let asks = self.generation.chain.get(at).is_some_and(|c| c.events.contains(event.kind));
            if !asks || self.deaf.get(at).is_none_or(|deaf| *deaf) {
                continue;
            }
            let Some(stream) = self.streams.get_mut(at).and_then(Option::as_mut) else { continue };
            match stream.on_foreign_function(&mut self.env, EVENT_FUNCTION, event.json.clone()) {
                Ok(outcome) => {
                    if let Some(verdict) = self.ends(at, outcome.effects, Side::Response) {
                        return Err((at, verdict));
                    }
                }
                Err(fault) => self.failed_in_event(at, &fault),
            }
        }
        Ok(())
    }

    /// The last events, when all is over: nothing can be ended any more.
    pub fn end(&mut self, ended: &Ended<'_>) {
        for event in Event::last(ended) {
            let _ = self.tell(&event);
        }
    }

    /// A filter that is not needed is passed over from here on. One that is needed ends the answer with the next piece that it
    /// would have to see.
    fn failed_in_event(&mut self, at: usize, fault: &Fault) {
        let Some(plugin) = self.generation.chain.get(at) else { return };
        tracing::warn!(plugin = %plugin.name, kind = %fault.kind, message = %fault.message, "filter failed in an event");
        if let Some(deaf) = self.deaf.get_mut(at) {
            *deaf = true;
        }
        if plugin.on_error == OnError::Open
            && let Some(slot) = self.streams.get_mut(at)
        {
            *slot = None;
        }
    }
}
