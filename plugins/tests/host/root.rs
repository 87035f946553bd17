//! The root context: ticks, queues, and its end.

use turnstile_plugins::FaultKind;

use crate::rig::{Guest, Rig, request};

const TICKER: &str = r#"
(data (i32.const 100) "tick")
(func (export "proxy_on_configure") (param i32 i32) (result i32)
  (drop (call $set_tick (i32.const 100))) (i32.const 1))
(func (export "proxy_on_tick") (param $root i32)
  (if (i32.ne (local.get $root) (i32.const 1)) (then unreachable))
  (drop (call $log (i32.const 2) (i32.const 100) (i32.const 4))))
"#;

fn ticks(rig: &Rig, now_ms: u64) -> usize {
    let report = rig.plugin.tick(now_ms);
    assert!(report.faults.is_empty(), "{:?}", report.faults);
    rig.lines().len()
}

#[test]
fn ticks_come_with_their_period_and_missed_ones_are_not_made_up() {
    let rig = Guest::new(TICKER).start();
    let seen: Vec<_> = [0, 50, 99, 100, 150, 200, 900, 910, 999, 1_000].map(|now| ticks(&rig, now)).to_vec();
    assert_eq!(seen, [0, 0, 0, 1, 0, 1, 1, 0, 0, 1]);
    assert_eq!(rig.plugin.stats().ticks, 4);
}

#[test]
fn each_shard_ticks_by_itself() {
    let rig = Rig::start(Guest::new(TICKER).spec().with_shards(3)).unwrap();
    ticks(&rig, 0);
    assert_eq!(ticks(&rig, 100), 3);
}

#[test]
fn a_period_of_zero_never_starts_or_stops_ticking() {
    let rig = Guest::new(r#"(func (export "proxy_on_tick") (param i32) unreachable)"#).start();
    ticks(&rig, 0);
    ticks(&rig, 1_000_000);

    let rig = Guest::new(TICKER)
        .also(
            r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
                 (drop (call $set_tick (i32.const 0))) (i32.const 0))"#,
        )
        .start();
    ticks(&rig, 0);
    assert_eq!(ticks(&rig, 100), 1);
    rig.stream().on_request_headers(&mut request(), true).unwrap();
    assert_eq!(ticks(&rig, 1_000), 0);
}

#[test]
fn a_period_set_within_a_tick_counts_from_it() {
    let rig = Guest::new(
        r#"(func (export "proxy_on_configure") (param i32 i32) (result i32)
             (drop (call $set_tick (i32.const 10))) (i32.const 1))
           (func (export "proxy_on_tick") (param i32)
             (drop (call $set_tick (i32.const 500))) (call $note (i32.const 116)) (call $trace))"#,
    )
    .start();
    let seen: Vec<_> = [0, 10, 20, 509, 510, 1_009, 1_010].map(|now| ticks(&rig, now)).to_vec();
    assert_eq!(seen, [0, 1, 0, 0, 1, 0, 1]);
}

#[test]
fn a_trap_in_a_tick_is_reported_and_ticks_go_on_in_the_next_instance() {
    let rig = Guest::new(
        r#"(func (export "proxy_on_configure") (param i32 i32) (result i32)
             (drop (call $set_tick (i32.const 10))) (i32.const 1))
           (func (export "proxy_on_tick") (param i32) unreachable)"#,
    )
    .start();
    rig.plugin.tick(0);
    let report = rig.plugin.tick(10);
    assert_eq!(report.faults[0].kind, FaultKind::Trap);
    assert_eq!(report.unhealthy_shards, 1);
    rig.plugin.tick(20);
    assert_eq!(rig.plugin.tick(120).restarted, 1);
    assert_eq!(rig.plugin.tick(130).faults.len(), 1);
}

#[test]
fn a_tick_can_continue_a_paused_stream() {
    let rig = Guest::new(
        r#"(global $paused (mut i32) (i32.const 0))
           (func (export "proxy_on_configure") (param i32 i32) (result i32)
             (drop (call $set_tick (i32.const 10))) (i32.const 1))
           (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
             (global.set $paused (local.get 0)) (i32.const 1))
           (func (export "proxy_on_tick") (param i32)
             (if (global.get $paused) (then
               (if (call $effective (global.get $paused)) (then unreachable))
               (if (call $continue_stream (i32.const 0)) (then unreachable))
               (global.set $paused (i32.const 0)))))"#,
    )
    .start();
    rig.plugin.tick(0);
    let mut stream = rig.stream();
    assert!(stream.on_request_headers(&mut request(), true).unwrap().paused_request());
    assert!(stream.take_effects().is_empty());
    let report = rig.plugin.tick(10);
    assert_eq!(report.streams_with_effects, [stream.key().unwrap()]);
    assert!(stream.take_effects().continue_request);
    assert!(stream.take_effects().is_empty(), "taken once");
    assert!(rig.plugin.tick(11).streams_with_effects.is_empty());
}

/// Registers queue `q` and logs each item it is told of; requests push their own item.
const CONSUMER: &str = r#"
(data (i32.const 100) "q") (data (i32.const 110) "item") (data (i32.const 120) "guest")
(func (export "proxy_on_vm_start") (param i32 i32) (result i32)
  (if (call $register_queue (i32.const 100) (i32.const 1) (i32.const 0)) (then unreachable))
  (i32.const 1))
(func (export "proxy_on_queue_ready") (param $root i32) (param $queue i32)
  (if (i32.ne (local.get $queue) (i32.load (i32.const 0))) (then unreachable))
  (if (call $dequeue (local.get $queue) (i32.const 4) (i32.const 8)) (then unreachable))
  (drop (call $log (i32.const 2) (i32.load (i32.const 4)) (i32.load (i32.const 8)))))
(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
  (call $put (call $resolve_queue (i32.const 120) (i32.const 5) (i32.const 100) (i32.const 1) (i32.const 12)))
  (call $put (call $enqueue (i32.load (i32.const 12)) (i32.const 110) (i32.const 4)))
  (call $put (call $enqueue (i32.const 77) (i32.const 110) (i32.const 4)))
  (call $put (call $dequeue (i32.const 77) (i32.const 4) (i32.const 8)))
  (call $put (call $resolve_queue (i32.const 120) (i32.const 5) (i32.const 110) (i32.const 4) (i32.const 12)))
  (call $flush) (i32.const 0))
"#;

#[test]
fn queue_items_are_told_to_the_consumer_once_each() {
    let rig = Rig::start(Guest::new(CONSUMER).spec().with_shards(2)).unwrap();
    for shard in 0..2 {
        let mut env = request();
        rig.plugin.open_stream(shard).on_request_headers(&mut env, true).unwrap();
        assert_eq!(crate::rig::results(&env), [0, 0, 1, 1, 1]);
    }
    assert_eq!(ticks(&rig, 0), 2);
    assert_eq!(ticks(&rig, 10), 0);
}

#[test]
fn a_root_ends_with_done_and_delete() {
    let rig = Guest::new(
        r#"(func (export "proxy_on_done") (param i32) (result i32) (call $note (i32.const 100)) (i32.const 1))
           (func (export "proxy_on_delete") (param i32) (call $note (i32.const 120)) (call $trace))"#,
    )
    .start();
    assert!(!rig.plugin.is_shut_down());
    rig.plugin.shut_down(0);
    assert_eq!(rig.lines(), ["dx"]);
    assert!(rig.plugin.is_shut_down());
    rig.plugin.shut_down(1);
    rig.plugin.tick(1_000_000);
    assert!(rig.lines().is_empty(), "once, and nothing is built again");
}

/// Asks for time, and calls done on the tick after.
const SLOW_END: &str = r#"
(global $ending (mut i32) (i32.const 0))
(func (export "proxy_on_configure") (param i32 i32) (result i32)
  (drop (call $set_tick (i32.const 10))) (i32.const 1))
(func (export "proxy_on_done") (param i32) (result i32) (global.set $ending (i32.const 1)) (i32.const 0))
(func (export "proxy_on_delete") (param i32) (call $note (i32.const 120)) (call $trace))
"#;

#[test]
fn a_root_that_asks_for_time_is_deleted_when_it_is_done() {
    let rig = Guest::new(SLOW_END)
        .also(
            r#"(func (export "proxy_on_tick") (param i32)
                 (if (global.get $ending) (then (if (call $done) (then unreachable)))))"#,
        )
        .start();
    rig.plugin.tick(0);
    rig.plugin.shut_down(5);
    assert!(!rig.plugin.is_shut_down() && rig.lines().is_empty());
    rig.plugin.tick(10);
    assert!(rig.plugin.is_shut_down());
    assert_eq!(rig.lines(), ["x"]);
}

#[test]
fn a_root_that_is_never_done_gets_five_seconds() {
    let rig = Guest::new(SLOW_END).start();
    rig.plugin.shut_down(1_000);
    rig.plugin.tick(5_999);
    assert!(!rig.plugin.is_shut_down());
    rig.plugin.tick(6_000);
    assert!(rig.plugin.is_shut_down());
    assert_eq!(rig.lines(), ["x"]);
}
