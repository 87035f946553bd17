//! Which instance serves which stream: one that has grown is replaced, one that is a stream's own ends with it, and a plugin
//! that has had its time gives all of them up.

use turnstile_plugins::{FaultKind, PluginSpec, StartPhase};

use crate::rig::{Guest, Rig, request, results};

/// Grows its memory by a MiB with each request, and tells how many requests its instance has seen.
fn growing() -> Guest {
    Guest::on_request_headers(
        "(drop (memory.grow (i32.const 16)))
         (global.set $seen (i32.add (global.get $seen) (i32.const 1))) (call $put (global.get $seen))",
    )
    .also(
        r#"(global $seen (mut i32) (i32.const 0))
           (func (export "proxy_on_log") (param i32) (call $note (i32.const 108)) (call $trace))
           (func (export "proxy_on_delete") (param $context i32)
             (call $note (i32.add (i32.const 48) (local.get $context))) (call $trace))"#,
    )
}

fn recycled_over(bytes: usize) -> PluginSpec {
    PluginSpec { recycle_bytes: Some(bytes), ..growing().spec() }
}

#[test]
fn an_instance_that_has_grown_is_replaced_and_its_streams_go_on_in_it() {
    let rig = Rig::start(recycled_over(1 << 20)).unwrap();
    rig.plugin.tick(0);
    let (mut first, mut env) = (rig.stream(), request());
    first.on_request_headers(&mut env, true).unwrap();
    let report = rig.plugin.tick(20);
    assert_eq!((report.recycled, report.restarted, report.unhealthy_shards), (1, 0, 0));
    assert!(report.faults.is_empty());
    // New streams come to the fresh one, the old stream is where it was.
    assert_eq!(rig.results_of_request(), [1]);
    first.on_request_headers(&mut env, true).unwrap();
    assert_eq!(results(&env), [2]);
    // One more is not built while the old one holds a stream, and then not before its time.
    for now in [40, 20_000] {
        assert_eq!(rig.plugin.tick(now).recycled, 0);
    }
    assert_eq!(rig.lines(), ["l", "2"], "of the stream in the fresh one");
    first.finish(&mut env).unwrap();
    // The stream was logged and deleted, then the root of the old instance, and there is room for the next.
    assert_eq!(rig.plugin.tick(20_020).recycled, 1);
    assert_eq!(rig.lines(), ["l", "2", "1"]);
    let stats = rig.plugin.stats();
    assert_eq!((stats.recycled, stats.restarts, stats.crash_streak), (2, 0, 0));
    assert_eq!(stats.faults, [0; FaultKind::ALL.len()]);
}

#[test]
fn a_stream_that_is_dropped_in_a_replaced_instance_is_ended_there() {
    let rig = Rig::start(recycled_over(1 << 20)).unwrap();
    let mut stream = rig.stream();
    stream.on_request_headers(&mut request(), true).unwrap();
    assert_eq!(rig.plugin.tick(0).recycled, 1);
    drop(stream);
    rig.plugin.tick(20);
    assert_eq!(rig.lines(), ["l", "2", "1"]);
}

#[test]
fn a_fault_in_a_replaced_instance_leaves_the_fresh_one_alone() {
    let trapping = Guest::new(
        r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
             (drop (memory.grow (i32.const 16))) (i32.const 0))
           (func (export "proxy_on_request_body") (param i32 i32 i32) (result i32) unreachable)"#,
    );
    let rig = Rig::start(PluginSpec { recycle_bytes: Some(1 << 20), ..trapping.spec() }).unwrap();
    let (mut old, mut other, mut env) = (rig.stream(), rig.stream(), request());
    old.on_request_headers(&mut env, false).unwrap();
    other.on_request_headers(&mut env, false).unwrap();
    assert_eq!(rig.plugin.tick(0).recycled, 1);
    assert_eq!(old.on_request_body(&mut env, 0, true).unwrap_err().kind, FaultKind::Trap);
    assert_eq!(other.on_request_body(&mut env, 0, true).unwrap_err().kind, FaultKind::Lost);
    assert_eq!(rig.plugin.stats().healthy_shards, 1);
    rig.stream().on_request_headers(&mut env, true).unwrap();
}

#[test]
fn an_instance_that_starts_with_more_than_it_may_grow_to_is_refused() {
    let error = Rig::start(recycled_over(100_000)).err().unwrap();
    assert_eq!(error.phase, StartPhase::Configure);
    assert!(error.message.contains("has 128 KiB of memory when it has started, over the 97 KiB"), "{error}");
}

#[test]
fn with_stream_isolation_no_request_sees_what_another_left() {
    let rig = Rig::start(PluginSpec { stream_isolation: true, ..growing().spec() }).unwrap();
    let (mut one, mut env_of_one) = (rig.stream(), request());
    one.on_request_headers(&mut env_of_one, true).unwrap();
    one.on_request_headers(&mut env_of_one, true).unwrap();
    assert_eq!(results(&env_of_one), [2], "one stream stays in its instance");
    assert_eq!(rig.results_of_request(), [1], "another has its own");
    one.finish(&mut env_of_one).unwrap();
    // Dropped without an end, it is ended by the next tick.
    assert_eq!(rig.lines(), ["l", "2"]);
    rig.plugin.tick(0);
    assert_eq!(rig.lines(), ["l", "2"]);
}

#[test]
fn with_stream_isolation_a_fault_hurts_one_request_and_a_row_of_them_is_a_crash_loop() {
    let guest = Guest::new(
        r#"(data (i32.const 100) "x-raw")
           (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
             (if (i32.eqz (call $get_header (i32.const 0) (i32.const 100) (i32.const 5) (i32.const 0) (i32.const 4)))
               (then unreachable))
             (i32.const 0))
           (func (export "proxy_on_response_headers") (param i32 i32 i32) (result i32) (i32.const 0))"#,
    );
    let rig = Rig::start(PluginSpec { stream_isolation: true, ..guest.spec() }).unwrap();
    let mut sound = request();
    sound.request.as_mut().unwrap().fields.fields_mut().remove("x-raw");
    let mut other = rig.stream();
    other.on_request_headers(&mut sound, true).unwrap();
    for streak in 1..=3 {
        let mut stream = rig.stream();
        assert_eq!(stream.on_request_headers(&mut request(), true).unwrap_err().kind, FaultKind::Trap);
        assert_eq!(stream.on_response_headers(&mut request(), true).unwrap_err().kind, FaultKind::Lost);
        let report = rig.plugin.tick(streak.into());
        assert_eq!((report.crash_streak, report.unhealthy_shards), (streak, 0));
    }
    // A stream that ends well ends the row.
    other.finish(&mut sound).unwrap();
    assert_eq!(rig.plugin.tick(10).crash_streak, 0);
    rig.plugin.quarantine();
    assert_eq!(rig.stream().on_request_headers(&mut sound, true).unwrap_err().kind, FaultKind::Unavailable);
}

#[test]
fn with_stream_isolation_ticks_run_in_the_shards_instance() {
    let guest = Guest::new(
        r#"(data (i32.const 100) "tick")
           (func (export "proxy_on_configure") (param i32 i32) (result i32)
             (drop (call $set_tick (i32.const 10))) (i32.const 1))
           (func (export "proxy_on_tick") (param i32) (drop (call $log (i32.const 2) (i32.const 100) (i32.const 4))))
           (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (i32.const 0))"#,
    );
    let rig = Rig::start(PluginSpec { stream_isolation: true, ..guest.spec() }).unwrap();
    let (mut stream, mut env) = (rig.stream(), request());
    stream.on_request_headers(&mut env, true).unwrap();
    for now in [0, 10, 20] {
        rig.plugin.tick(now);
    }
    assert_eq!(rig.lines(), ["tick", "tick"], "of the one root that ticks");
    stream.finish(&mut env).unwrap();
}

#[test]
fn a_retired_plugin_gives_its_streams_up_and_can_come_back() {
    for stream_isolation in [false, true] {
        let rig = Rig::start(PluginSpec { stream_isolation, ..growing().spec() }).unwrap();
        let (mut stream, mut env) = (rig.stream(), request());
        stream.on_request_headers(&mut env, true).unwrap();
        assert!(rig.plugin.retire());
        assert!(!rig.plugin.retire(), "once");
        assert_eq!(stream.on_request_headers(&mut env, true).unwrap_err().kind, FaultKind::Lost);
        assert_eq!(rig.stream().on_request_headers(&mut env, true).unwrap_err().kind, FaultKind::Unavailable);
        for now in [0, 1_000, 100_000] {
            let report = rig.plugin.tick(now);
            assert_eq!((report.restarted, report.crash_streak, report.unhealthy_shards), (0, 0, 1));
        }
        rig.plugin.revive().unwrap();
        assert_eq!(rig.results_of_request(), [1]);
        rig.plugin.shut_down(100_000);
        assert!(rig.plugin.is_shut_down());
    }
}
