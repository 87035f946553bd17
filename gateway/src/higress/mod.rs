//! What plugins made for Higress say about hosts, and what they are told of them. `docs/higress.md` describes it.

pub mod cluster;
pub mod hosts;
pub mod wanted;

pub use hosts::Hosts;
pub use wanted::{Kept, Wanted};
