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
    assert_eq!(queues.register("vm", &[b'n'; MAX_NAME + 1], 1), Err(QueueError::LongName));
    let id = queues.register("vm", b"q", 1).unwrap();
    assert_eq!(queues.register("vm", b"another", 1), Err(QueueError::TooMany));
    queues.register("other", b"another", 1).expect("each VM id has its own");
    assert_eq!(queues.enqueue(id, &[0; 11]), Err(QueueError::Full));
    queues.enqueue(id, b"1").unwrap();
    queues.enqueue(id, b"2").unwrap();
    assert_eq!(queues.enqueue(id, b"3"), Err(QueueError::Full));
}

#[test]
fn what_is_forgotten_makes_room_and_its_id_stands_for_nothing_else() {
    let queues = SharedQueues::new(2, 10, 1);
    let (stays, gone) = (queues.register("stays", b"q", 1).unwrap(), queues.register("gone", b"q", 1).unwrap());
    for id in [gone, stays] {
        queues.enqueue(id, b"1").unwrap();
    }
    queues.retain(|vm_id| vm_id == "stays");
    assert_eq!((queues.resolve("gone", b"q"), queues.dequeue(gone)), (None, Err(QueueError::NotFound)));
    assert_eq!(queues.resolve("stays", b"q"), Some(stays));
    assert_eq!(&queues.dequeue(stays).unwrap()[..], b"1");
    let new = queues.register("gone", b"another", 1).unwrap();
    assert!(![gone, stays].contains(&new));
    assert_eq!(queues.dequeue(new), Err(QueueError::Empty));
}
