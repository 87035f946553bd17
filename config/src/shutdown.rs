//! The end of a gateway.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// From the signal to stop (SIGTERM, SIGINT) to the end. All parts together bound it; a second signal cuts the first two short, a
/// third ends the process at once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Shutdown {
    /// Seconds in which everything is still accepted and served while `/ready` says 503, for load balancers that take time to
    /// notice. Answers say `connection: close`.
    #[schemars(range(min = 0, max = 3_600))]
    pub delay_s: u64,
    /// Seconds that requests in flight and waiting have to finish, with nothing new accepted. What is left then is cut.
    #[schemars(range(min = 0, max = 86_400))]
    pub grace_s: u64,
    /// Seconds for closing the engine sessions that this gateway opened on workers.
    #[schemars(range(min = 0, max = 600))]
    pub close_s: u64,
}

// === impl Shutdown ===

impl Default for Shutdown {
    fn default() -> Self {
        Self { delay_s: 0, grace_s: 30, close_s: 10 }
    }
}
