//! Waiting for conditions.

use std::time::Duration;

/// The longest that a test waits for anything. Far more than a busy machine needs: it only ends tests that fail.
pub const DEADLINE: Duration = Duration::from_secs(30);
/// How often a condition is looked at.
const LOOK: Duration = Duration::from_millis(2);

/// Waits until `condition` holds.
///
/// # Panics
/// It does not within [`DEADLINE`].
pub async fn until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    until_some(what, async || condition().await.then_some(())).await;
}

/// Waits until `look` finds something.
///
/// # Panics
/// It does not within [`DEADLINE`].
pub async fn until_some<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = tokio::time::Instant::now() + DEADLINE;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(tokio::time::Instant::now() < deadline, "waited in vain: {what}");
        tokio::time::sleep(LOOK).await;
    }
}
