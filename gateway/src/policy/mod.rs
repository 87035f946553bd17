//! Policies: what plugins see, in which order they run, what happens when one fails.

mod bulk;
pub mod chain;
pub mod env;
pub mod facts;
pub mod headers;

pub use chain::{ChainPlugin, TurnPolicies, Verdict};
pub use env::{PolicyEnv, PolicyStore, RouteFacts};
pub use facts::{EndFacts, RequestHead, TurnFacts};
