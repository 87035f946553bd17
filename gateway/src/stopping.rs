//! The end of a gateway, as the requests in it see it: announced, then nothing new, then cut.

use crate::errors::{Kind, Refusal};
use futures::future::{AbortHandle, Abortable};
use hashbrown::HashMap;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Turns are spread over so many maps, so that threads seldom meet.
const SHARDS: usize = 8;
/// How often it is looked whether all turns have ended.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// The state of the end, and the turns that it meets.
#[derive(Default)]
pub struct Stopping {
    announced: AtomicBool,
    next: AtomicU64,
    shards: [Mutex<Shard>; SHARDS],
}

#[derive(Default)]
struct Shard {
    cut: bool,
    turns: HashMap<u64, AbortHandle>,
}

/// A turn was cut, or came too late.
#[derive(Debug)]
pub struct Cut;

impl Cut {
    /// What a client is told to which nothing was sent yet.
    pub fn refusal(self) -> Refusal {
        Refusal::new(Kind::Draining, "this gateway is shutting down").with_retry_after(1)
    }
}

impl Stopping {
    /// From now on load balancers are told to go elsewhere, and connections end after their answer.
    pub fn announce(&self) {
        self.announced.store(true, Ordering::Release);
    }

    /// True from the first signal on.
    pub fn is_announced(&self) -> bool {
        self.announced.load(Ordering::Acquire)
    }

    /// Runs a turn that the end of the grace time may cut. A connection's task may be anybody's (HTTP/2 streams have their own),
    /// so turns are known here.
    ///
    /// # Errors
    /// It was cut.
    pub async fn run<T>(&self, turn: impl Future<Output = T>) -> Result<T, Cut> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let (handle, registration) = AbortHandle::new_pair();
        {
            let mut shard = self.shard(number).lock();
            if shard.cut {
                return Err(Cut);
            }
            shard.turns.insert(number, handle);
        }
        let _known = Known { stopping: self, number };
        Abortable::new(turn, registration).await.map_err(|_| Cut)
    }

    /// Turns that run or wait.
    pub fn turns(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().turns.len()).sum()
    }

    /// Cuts every turn, and refuses those to come.
    pub fn cut(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock();
            shard.cut = true;
            shard.turns.values().for_each(AbortHandle::abort);
        }
    }

    /// Resolves when no turn is left.
    pub async fn until_none(&self) {
        while self.turns() > 0 {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    fn shard(&self, number: u64) -> &Mutex<Shard> {
        // The remainder is below the length of the array.
        &self.shards[number as usize % SHARDS]
    }
}

/// A turn that is known, until it is dropped.
struct Known<'a> {
    stopping: &'a Stopping,
    number: u64,
}

impl Drop for Known<'_> {
    fn drop(&mut self) {
        self.stopping.shard(self.number).lock().turns.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn turns_are_known_while_they_run_and_cut_in_the_end() {
        let stopping = Stopping::default();
        assert_eq!(stopping.run(async { stopping.turns() }).await.ok(), Some(1));
        assert_eq!(stopping.turns(), 0);
        let waiting = stopping.run(std::future::pending::<()>());
        let cutting = async {
            assert_eq!(stopping.turns(), 1);
            stopping.cut();
        };
        assert!(tokio::join!(waiting, cutting).0.is_err());
        stopping.until_none().await;
        assert!(stopping.run(async {}).await.is_err(), "it came too late");
        assert_eq!(stopping.turns(), 0);
    }
}
