//! Policies: what plugins see, in which order they run, what happens when one fails.

pub mod bulk;
pub mod canary;
pub mod chain;
pub mod env;
pub mod events;
pub mod facts;
pub mod headers;
pub mod reference;
pub mod shadow;
pub mod store;

pub use canary::CanaryRun;
pub use chain::{ChainPlugin, TurnPolicies, Verdict};
pub use env::{PolicyEnv, PolicyStore, RouteFacts};
pub use events::{Ended, Event, EventSet, Teller};
pub use facts::{EndFacts, RequestHead, TurnFacts};
pub use shadow::{Applied, Difference};
