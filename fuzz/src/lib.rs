//! What each fuzz target does with its input. A target is a plain function that panics where a promise is broken.
//!
//! libFuzzer calls them from `fuzz_targets/`; `tests/tests/fuzz` compiles this same source to run the committed corpus, and
//! mutations of it, with the other tests. Inputs are text a person can write (but for snapshots and calls of guests): where a target needs more
//! than the bytes under test, it takes them from the first line.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod body;
mod config;
mod hostcalls;
mod identity;
mod input;
mod model;
mod observe;
mod snapshot;
mod understand;

pub use body::{body_rewrite, body_scan};
pub use config::config;
pub use hostcalls::hostcalls;
pub use identity::identity;
pub use observe::sse_observe;
pub use snapshot::snapshot;
pub use understand::understand;
