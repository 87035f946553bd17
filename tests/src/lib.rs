//! What the end-to-end tests, the demo and the benchmark share.

#![forbid(unsafe_code)]

pub mod harness;
