#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use super::*;
use std::sync::atomic::AtomicU32;

/// A set number of places in pool 0; any other pool is idle.
struct Free(AtomicU32);

impl Room for Free {
    fn free(&self, pool: u32, pinned: Option<WorkerId>) -> Places {
        let free = if pool == 0 { self.0.load(Ordering::SeqCst) } else { 1 };
        if pinned.is_some() { Places::OfWorker(free) } else { Places::OfPool(free) }
    }
}

fn admission(free: u32, max: usize) -> (Arc<Admission>, Arc<Free>) {
    let places = Arc::new(Free(AtomicU32::new(free)));
    let options = QueueOptions { max_tickets: max, max_bytes: 1 << 20, fairness: None };
    let admission = Arc::new(Admission::new(options, places.clone(), Arc::new(Metrics::new().unwrap())));
    admission.configure(options, HashMap::from_iter([(0, "p".into())]));
    (admission, places)
}

fn wish() -> Wish {
    Wish {
        pool: 0,
        tier: 0,
        head_start_ms: 0,
        flow: 0,
        uncached_tokens: 10,
        bytes: 10,
        max_wait_ms: 60_000,
        pinned: None,
    }
}

async fn until(condition: impl Fn() -> bool) {
    while !condition() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_turn_with_room_does_not_wait() {
    let (admission, _) = admission(1, 10);
    let permit = admission.enter(wish()).await.unwrap();
    assert_eq!(permit.waited_ms, None);
}

#[tokio::test(start_paused = true)]
async fn a_permit_counts_as_taken_until_it_is_dropped() {
    let (admission, _) = admission(1, 10);
    let first = admission.enter(wish()).await.unwrap();
    let second = tokio::spawn({
        let admission = Arc::clone(&admission);
        async move { admission.enter(wish()).await }
    });
    until(|| admission.depth() == 1).await;
    drop(first);
    let second = second.await.unwrap().unwrap();
    assert!(second.waited_ms.is_some());
    assert_eq!(admission.depth(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_higher_tier_then_a_head_start_goes_first() {
    let (admission, places) = admission(0, 10);
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = Vec::new();
    for (name, tier, head_start_ms) in [("plain", 0, 0), ("urgent", 0, 10_000), ("strict", 1, 0)] {
        let (admission_of_task, order) = (Arc::clone(&admission), Arc::clone(&order));
        tasks.push(tokio::spawn(async move {
            let permit = admission_of_task.enter(Wish { tier, head_start_ms, ..wish() }).await.unwrap();
            order.lock().push(name);
            drop(permit);
        }));
        let waiting = tasks.len();
        until(|| admission.depth() == waiting).await;
    }
    places.0.store(1, Ordering::SeqCst);
    admission.dispatch();
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(*order.lock(), ["strict", "urgent", "plain"]);
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_refuses_with_a_time_to_come_back() {
    let (admission, _) = admission(0, 1);
    let waiting = tokio::spawn({
        let admission = Arc::clone(&admission);
        async move { admission.enter(wish()).await.map(|_| ()) }
    });
    until(|| admission.depth() == 1).await;
    match admission.enter(wish()).await {
        Err(Refused::Full { why: Full::Tickets, retry_after_s }) => assert!(retry_after_s >= 1),
        _ => panic!("the second turn had to be refused"),
    }
    waiting.abort();
}

#[tokio::test(start_paused = true)]
async fn a_turn_that_waited_too_long_is_refused_and_gone() {
    let (admission, _) = admission(0, 10);
    let refused = admission.enter(Wish { max_wait_ms: 500, ..wish() }).await;
    assert!(matches!(refused, Err(Refused::Expired { .. })));
    assert_eq!(admission.depth(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_takes_its_turn_out_of_the_queue() {
    let (admission, places) = admission(0, 10);
    let waiting = tokio::spawn({
        let admission = Arc::clone(&admission);
        async move { admission.enter(wish()).await.map(|_| ()) }
    });
    until(|| admission.depth() == 1).await;
    waiting.abort();
    until(|| admission.depth() == 0).await;
    places.0.store(1, Ordering::SeqCst);
    assert!(admission.enter(wish()).await.is_ok(), "nothing of the lost turn holds the place");
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_leaves_as_it_is_let_through_gives_the_place_back() {
    let (admission, places) = admission(0, 10);
    let mut waiting = Box::pin(admission.enter(wish()));
    assert!(futures::poll!(&mut waiting).is_pending());
    places.0.store(1, Ordering::SeqCst);
    admission.dispatch();
    drop(waiting);
    let next = admission.enter(wish()).await.unwrap();
    assert_eq!(next.waited_ms, None);
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_of_one_pool_is_in_no_other_pools_way() {
    let (admission, _) = admission(0, 1);
    let mut waiting = Box::pin(admission.enter(wish()));
    assert!(futures::poll!(&mut waiting).is_pending());
    let other = admission.enter(Wish { pool: 1, ..wish() }).await;
    assert_eq!(other.ok().and_then(|p| p.waited_ms), None);
    assert_eq!(admission.depth(), 1);
}

#[test]
fn what_was_waited_already_counts_in_place_and_time() {
    let wish = wish().after(200);
    assert_eq!((wish.head_start_ms, wish.max_wait_ms), (200, 59_800));
    assert_eq!(wish.after(100_000).max_wait_ms, 0);
}
