//! Write a Turnstile policy in twenty lines.
//!
//! A policy is an ordinary Proxy-Wasm plugin: it reads facts and writes decisions with `get_property` and
//! `set_property`. This crate gives the names types. It reads a fact only when the policy asks for it, since every read
//! crosses into the host, and it never panics on what the host sends: a fact that is missing or unreadable is `None`.
//!
//! ```
//! use turnstile_policy::{Decision, Policy, Route, Setup, Turn};
//!
//! /// Sends every turn to the ready worker with the fewest requests in flight.
//! struct LeastBusy;
//!
//! impl Policy for LeastBusy {
//!     type Options = turnstile_policy::NoOptions;
//!     fn new(_: Self::Options, _: &mut Setup<'_>) -> Result<Self, String> {
//!         Ok(LeastBusy)
//!     }
//! }
//!
//! impl Route for LeastBusy {
//!     fn route(&mut self, turn: &Turn<'_>) -> Decision {
//!         let Some(workers) = turn.workers() else { return Decision::none() };
//!         match workers.iter().filter(|worker| worker.is_candidate()).min_by_key(|worker| worker.in_flight) {
//!             Some(worker) => Decision::none().target(worker.index).reason("fewest in flight"),
//!             None => Decision::none(),
//!         }
//!     }
//! }
//!
//! turnstile_policy::route!(LeastBusy);
//! ```
//!
//! Implement [`Route`] for a policy of the `route` phase, [`Admit`] for one of the `admit` phase, and name it in
//! [`route!`] or [`admit!`]. Options come from the plugin's table in the configuration ([`Policy::Options`]); a key that
//! the options do not know, or a value of the wrong type, refuses the plugin with the option's name in the log.
//!
//! A policy that wants to know what happens in the answer, while it comes, implements [`Policy::on_event`] and names the events
//! in the plugin's option `events`.
//!
//! Logic is tested natively: [`testing::FakeHost`] holds facts and collects decisions.
#![forbid(unsafe_code)]

mod bulk;
mod decision;
mod event;
mod facts;
#[cfg(target_arch = "wasm32")]
pub mod guest;
mod host;
mod options;
mod policy;
pub mod testing;
mod workers;

pub use decision::{Decision, EnginePriority, SessionAction, SessionMode, WorkerName};
pub use event::Event;
pub use facts::{Outcome, Session, Turn, Usage, WorkerFacts};
pub use host::{Counter, Host};
pub use options::{NoOptions, OptionError, parse_options};
pub use policy::{Admit, Policy, Route, Setup};
pub use workers::{TableError, Worker, WorkerState, Workers};

pub use log;
#[cfg(target_arch = "wasm32")]
pub use proxy_wasm;

/// Makes the module's entry point for a policy of the `route` phase. Use it once, at the top level of the crate.
///
/// On other targets than WebAssembly it only checks that the type is a [`Route`] policy, so the crate's tests build.
#[macro_export]
macro_rules! route {
    ($policy:ty) => {
        // In a block of its own: the entry point is the module's, not part of the crate's interface.
        #[cfg(target_arch = "wasm32")]
        const _: () = {
            $crate::proxy_wasm::main! {{ $crate::guest::start::<$crate::guest::Routing, $policy>(); }}
        };

        const _: fn(&mut $policy, &$crate::Turn<'_>) -> $crate::Decision = <$policy as $crate::Route>::route;
    };
}

/// Makes the module's entry point for a policy of the `admit` phase. Use it once, at the top level of the crate.
///
/// On other targets than WebAssembly it only checks that the type is an [`Admit`] policy, so the crate's tests build.
#[macro_export]
macro_rules! admit {
    ($policy:ty) => {
        // In a block of its own: the entry point is the module's, not part of the crate's interface.
        #[cfg(target_arch = "wasm32")]
        const _: () = {
            $crate::proxy_wasm::main! {{ $crate::guest::start::<$crate::guest::Admitting, $policy>(); }}
        };

        const _: fn(&mut $policy, &$crate::Turn<'_>) -> $crate::Decision = <$policy as $crate::Admit>::admit;
    };
}
