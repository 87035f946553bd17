//! The Proxy-Wasm conformance kit: reads the tests of `conformance/tests` and runs them against the host library alone and
//! against the gateway. `conformance/README.md` describes them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod case;
mod client;
mod gateway;
mod guests;
mod host;
mod lines;
mod observed;
mod pattern;
mod run;
mod server;

pub use case::{BEHAVIOURS, Case, Mode, load};
pub use guests::Guests;
pub use run::{Kit, Outcome, Selection, Summary};
