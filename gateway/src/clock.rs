//! The one clock: milliseconds of this process, so that pure code gets plain numbers and tests can pause time.

use std::sync::LazyLock;
use tokio::time::Instant;

static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// What the clock shows at first: more than the longest timeout of a session, so that times before this process have a number.
const FIRST_MS: u64 = 1 << 33;

/// Milliseconds; never goes back.
pub fn now_ms() -> u64 {
    u64::try_from(START.elapsed().as_millis()).unwrap_or(u64::MAX).saturating_add(FIRST_MS)
}

/// Wall-clock milliseconds since 1970, for logs and files.
pub fn unix_ms() -> u64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map(|d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
        .unwrap_or(0)
}
