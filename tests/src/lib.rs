//! What the end-to-end tests, the demo, the journey, the benchmark and the soak share.

#![forbid(unsafe_code)]

pub mod conformance;
pub mod harness;
pub mod journey;
pub mod process;
pub mod session_sim;
pub mod soak;
