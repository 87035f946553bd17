//! Connections to workers that wait for their next request: HTTP/1.1 without TLS, by the worker's address.
//!
//! pingora's pool watches each idle connection with a task and a timer of its own, hands it over from task to task and asks the
//! system whose it is. That costs as much as sending a request. Here a connection that was closed meanwhile is found out when it is
//! taken, and by [`IdleConnections::sweep`].

use futures::FutureExt as _;
use hashbrown::HashMap;
use parking_lot::Mutex;
use pingora_core::protocols::Stream;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::AsyncReadExt as _;

/// Connections kept for one worker. More are only there when as many turns ran on it at a time.
const MOST_FOR_ONE: usize = 1024;

/// The connections.
#[derive(Default)]
pub(super) struct IdleConnections {
    /// The last one released is the first one taken, so that those beyond what is needed grow old.
    by_address: Mutex<HashMap<SocketAddr, Vec<Idle>>>,
}

struct Idle {
    stream: Stream,
    until: Instant,
}

// === impl IdleConnections ===

impl IdleConnections {
    /// A connection that the worker has not closed, as far as this machine knows.
    pub fn take(&self, address: SocketAddr) -> Option<Stream> {
        let now = Instant::now();
        loop {
            let mut idle = self.by_address.lock().get_mut(&address)?.pop()?;
            if idle.until > now && is_quiet(&mut idle.stream) {
                return Some(idle.stream);
            }
        }
    }

    /// Keeps a connection whose last answer was read to its end, for at most so long.
    pub fn put(&self, address: SocketAddr, mut stream: Stream, keep: Duration) {
        if !is_quiet(&mut stream) {
            return;
        }
        let idle = Idle { stream, until: Instant::now() + keep };
        let mut all = self.by_address.lock();
        let kept = all.entry(address).or_default();
        if kept.len() < MOST_FOR_ONE {
            kept.push(idle);
        }
    }

    /// Closes what has waited too long, and what workers have closed. To be called every second or so.
    pub fn sweep(&self) {
        let now = Instant::now();
        let mut all = self.by_address.lock();
        all.retain(|_, kept| {
            kept.retain_mut(|idle| idle.until > now && is_quiet(&mut idle.stream));
            !kept.is_empty()
        });
    }

    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.by_address.lock().values().map(Vec::len).sum()
    }
}

/// Nothing has come: neither an end nor bytes that nobody asked for.
fn is_quiet(stream: &mut Stream) -> bool {
    // Without a budget of the task, which could make what is there look as if it were not.
    tokio::task::unconstrained(stream.read(&mut [0])).now_or_never().is_none()
}
