//! Turns session control and identity into a session decision, and sends a bound session to its worker.
#![forbid(unsafe_code)]

mod bind;

pub use bind::{Binding, OpenMode, Options, Request, decide};
use turnstile_policy::{Counter, Decision, Policy, Route, SessionAction, Setup, Turn, Worker};

/// The policy.
pub struct SessionBinding {
    options: Options,
    counters: Counters,
}

struct Counters {
    opened: Counter,
    bound: Counter,
    closed: Counter,
    to_bound_worker: Counter,
    bound_worker_lost: Counter,
}

// === impl SessionBinding ===

impl SessionBinding {
    fn request(turn: &Turn<'_>) -> Request {
        // Without an id there is no session to keep; nothing else needs to be known.
        if turn.session_id().is_none() {
            return Request::default();
        }
        Request {
            action: turn.action(),
            named: true,
            timeout_s: turn.timeout_s(),
            // A session whose worker is gone still lives, and has no worker to name.
            live: turn.session_idle_ms().is_some(),
        }
    }

    fn count(&self, turn: &Turn<'_>, action: SessionAction) {
        match action {
            SessionAction::Open => turn.count(self.counters.opened),
            SessionAction::Bind => turn.count(self.counters.bound),
            SessionAction::Close => turn.count(self.counters.closed),
            SessionAction::Release | SessionAction::Nothing => {}
        }
    }
}

impl Policy for SessionBinding {
    type Options = Options;

    fn new(options: Options, setup: &mut Setup<'_>) -> Result<Self, String> {
        options.check()?;
        Ok(SessionBinding {
            options,
            counters: Counters {
                opened: setup.counter("session_binding_open_total"),
                bound: setup.counter("session_binding_bind_total"),
                closed: setup.counter("session_binding_close_total"),
                to_bound_worker: setup.counter("session_binding_bound_worker_total"),
                bound_worker_lost: setup.counter("session_binding_bound_worker_lost_total"),
            },
        })
    }
}

impl Route for SessionBinding {
    fn route(&mut self, turn: &Turn<'_>) -> Decision {
        turn.read_ahead(&[
            "request.session",
            "request.action",
            "request.timeout_s",
            "session.idle_ms",
            "workers.bound",
        ]);
        let request = Self::request(turn);
        let Some(binding) = decide(&request, &self.options) else { return Decision::none() };
        self.count(turn, binding.action);
        let mut decision = Decision::none().session(binding.action);
        if let Some(seconds) = binding.ttl_s {
            decision = decision.session_ttl_s(seconds);
        }
        if let Some(mode) = binding.mode {
            decision = decision.session_mode(mode);
        }
        if request.live {
            match turn.bound_worker().filter(Worker::is_candidate) {
                Some(worker) => {
                    turn.count(self.counters.to_bound_worker);
                    decision = decision.target(worker.index).reason("bound");
                }
                None => turn.count(self.counters.bound_worker_lost),
            }
        }
        decision
    }
}

turnstile_policy::route!(SessionBinding);

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
