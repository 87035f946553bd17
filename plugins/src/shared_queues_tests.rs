#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;

#[test]
fn a_name_registered_twice_is_one_queue_of_the_last_consumer() {
    let queues = SharedQueues::default();
    let id = queues.register("vm", b"q", 1).unwrap();
    assert_ne!(id, 0);
    assert_eq!(queues.register("vm", b"q", 2), Ok(id));
    assert_ne!(queues.register("other", b"q", 3), Ok(id));
    queues.enqueue(id, b"x").unwrap();
    assert_eq!(queues.take_untold(id, 1), 0);
    assert_eq!(queues.take_untold(id, 2), 1);
    assert_eq!(queues.take_untold(id, 2), 0, "told once");
}

#[test]
fn items_come_out_in_order_and_then_the_queue_is_empty() {
    let queues = SharedQueues::default();
    let id = queues.register("vm", b"q", 1).unwrap();
    assert_eq!(queues.resolve("vm", b"q"), Some(id));
    assert_eq!(queues.resolve("vm", b"nobody"), None);
    queues.enqueue(id, b"1").unwrap();
    queues.enqueue(id, b"2").unwrap();
    assert_eq!(&queues.dequeue(id).unwrap()[..], b"1");
    assert_eq!(&queues.dequeue(id).unwrap()[..], b"2");
    assert_eq!(queues.dequeue(id), Err(QueueError::Empty));
    for unknown in [0, id + 1, u32::MAX] {
        assert_eq!(queues.dequeue(unknown), Err(QueueError::NotFound));
        assert_eq!(queues.enqueue(unknown, b""), Err(QueueError::NotFound));
    }
}

#[test]
fn queues_are_bounded_in_items_bytes_and_number() {
    let queues = SharedQueues::new(2, 10, 1);
    let id = queues.register("vm", b"q", 1).unwrap();
    assert_eq!(queues.register("vm", b"another", 1), Err(QueueError::Full));
    let queues = SharedQueues::new(2, 10, 1);
    assert_eq!(queues.register("vm", &[b'n'; MAX_NAME + 1], 1), Err(QueueError::Full));
    let id = queues.register("vm", b"q", 1).unwrap_or(id);
    assert_eq!(queues.enqueue(id, &[0; 11]), Err(QueueError::Full));
    queues.enqueue(id, b"1").unwrap();
    queues.enqueue(id, b"2").unwrap();
    assert_eq!(queues.enqueue(id, b"3"), Err(QueueError::Full));
}
