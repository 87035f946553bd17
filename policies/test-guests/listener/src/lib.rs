//! Logs every event that it is told of. The same in every language of the SDKs.
#![forbid(unsafe_code)]

use turnstile_policy::{Decision, Event, NoOptions, Policy, Route, Setup, Turn, log};

struct Listener;

impl Policy for Listener {
    type Options = NoOptions;

    fn new(_: NoOptions, _: &mut Setup<'_>) -> Result<Self, String> {
        Ok(Listener)
    }

    fn on_event(&mut self, event: &Event, turn: &Turn<'_>) {
        let told = |tokens: Option<u64>| tokens.map_or("-1".to_owned(), |tokens| tokens.to_string());
        let what = match event {
            Event::FirstToken { .. } => "first_token".to_owned(),
            Event::ToolCall { number, name, .. } => format!("tool_call {number} {name}"),
            Event::Finish { reason, .. } => format!("finish {reason}"),
            Event::Usage { usage, .. } => {
                let tokens = [usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens].map(told);
                format!("usage {}", tokens.join(" "))
            }
            Event::End { outcome, status, left_out, .. } => format!("end {outcome} {status} {left_out}"),
            _ => "unknown".to_owned(),
        };
        log::info!("{} {what}", turn.model().unwrap_or_default());
    }
}

impl Route for Listener {
    fn route(&mut self, _: &Turn<'_>) -> Decision {
        Decision::none()
    }
}

turnstile_policy::route!(Listener);
