//! Guests that misbehave, and what becomes of the others.

use std::sync::Arc;
use std::time::{Duration, Instant};

use turnstile_plugins::{
    FaultKind, HttpEnv, Lent, LogLine, Plugin, PluginServices, SharedState, StartPhase, Stream, StreamEnv,
};

use crate::rig::{Guest, RUNTIME, Rig, request};

/// Does what the request's `x-do` header says: `t` traps, `l` loops, `m` eats memory, `r` recurses, `e` exits, anything
/// else is fine.
fn misbehaver() -> Guest {
    Guest::new(
        r#"
        (data (i32.const 100) "x-do")
        (func $recurse (param $n i32) (result i32)
          (i32.add (call $recurse (i32.add (local.get $n) (i32.const 1))) (call $recurse (local.get $n))))
        (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
          (local $what i32)
          (if (i32.eqz (call $get_header (i32.const 0) (i32.const 100) (i32.const 4) (i32.const 0) (i32.const 4)))
            (then (local.set $what (i32.load8_u (i32.load (i32.const 0))))))
          (if (i32.eq (local.get $what) (i32.const 116)) (then unreachable))
          (if (i32.eq (local.get $what) (i32.const 108)) (then (loop $forever (br $forever))))
          (if (i32.eq (local.get $what) (i32.const 109))
            (then (loop $eat
              (if (i32.eq (memory.grow (i32.const 64)) (i32.const -1)) (then unreachable))
              (br $eat))))
          (if (i32.eq (local.get $what) (i32.const 114)) (then (drop (call $recurse (i32.const 0)))))
          (if (i32.eq (local.get $what) (i32.const 101)) (then (call $exit (i32.const 3))))
          (i32.const 0))
        (func (export "proxy_on_log") (param i32) (call $note (i32.const 108)) (call $trace))
        "#,
    )
    .import(r#"(import "wasi_snapshot_preview1" "proc_exit" (func $exit (param i32)))"#)
}

fn asking(what: &'static str) -> Lent<HttpEnv> {
    let mut env = request();
    env.request.as_mut().unwrap().fields.fields_mut().insert("x-do", what.parse().unwrap());
    env
}

fn fault(stream: &mut Stream, env: &mut Lent<HttpEnv>) -> FaultKind {
    stream.on_request_headers(env, true).unwrap_err().kind
}

#[test]
fn each_way_to_misbehave_is_a_fault_of_its_own_kind() {
    for (what, kind) in [
        ("t", FaultKind::Trap),
        ("l", FaultKind::Deadline),
        ("m", FaultKind::Memory),
        ("r", FaultKind::Stack),
        ("e", FaultKind::Exit),
    ] {
        let mut spec = misbehaver().spec();
        // All but the loop end by themselves, and have the long deadline of all tests.
        if kind == FaultKind::Deadline {
            spec.limits.callback_deadline_ms = 1_000;
        }
        let rig = Rig::start(spec).unwrap();
        let fault = rig.stream().on_request_headers(&mut asking(what), true).unwrap_err();
        assert_eq!(fault.kind, kind, "{fault}");
        assert_eq!(&*fault.plugin, "guest");
        assert!(fault.message.contains("wasm backtrace"), "{}", fault.message);
        assert_eq!(rig.plugin.stats().faults_of(kind), 1);
        assert_eq!(rig.plugin.stats().healthy_shards, 0);
    }
}

#[test]
fn an_endless_loop_ends_within_the_deadline_and_its_grace() {
    let mut spec = misbehaver().spec();
    spec.limits.callback_deadline_ms = 30;
    let rig = Rig::start(spec).unwrap();
    let began = Instant::now();
    assert_eq!(fault(&mut rig.stream(), &mut asking("l")), FaultKind::Deadline);
    assert!(began.elapsed() >= Duration::from_millis(30));
    assert_eq!(rig.plugin.stats().late, 1);
}

/// Keeps the thread from running whenever a guest logs, as a busy machine does.
#[derive(Default)]
struct Busy(SharedState);

impl PluginServices for Busy {
    fn shared(&self) -> &SharedState {
        &self.0
    }

    fn log(&self, _: LogLine<'_>) {
        std::thread::sleep(Duration::from_millis(60));
    }
}

#[test]
fn a_guest_that_is_kept_waiting_by_the_machine_does_not_loop() {
    let guest = Guest::on_request_headers(
        "(local $times i32)
         (loop $again
           (drop (call $log (i32.const 2) (i32.const 0) (i32.const 1)))
           (local.set $times (i32.add (local.get $times) (i32.const 1)))
           (br_if $again (i32.lt_u (local.get $times) (i32.const 6))))",
    );
    let mut spec = guest.spec();
    spec.limits.callback_deadline_ms = 10;
    let plugin = Plugin::start(&RUNTIME, spec, Arc::new(Busy::default())).unwrap();
    plugin.open_stream(0).on_request_headers(&mut request(), true).unwrap();
    assert_eq!(plugin.stats().late, 1);
}

#[test]
fn an_endless_loop_in_configure_is_stopped_too() {
    let guest = Guest::new(
        r#"(func (export "proxy_on_configure") (param i32 i32) (result i32) (loop $forever (br $forever)) (i32.const 1))"#,
    );
    let mut spec = guest.spec();
    spec.limits.configure_deadline_ms = 50;
    let error = Rig::start(spec).err().unwrap();
    assert_eq!(error.phase, StartPhase::Configure);
    assert!(error.message.contains("interrupt"), "{}", error.message);
}

#[test]
fn memory_stays_under_its_limit_and_the_most_used_is_known() {
    let mut spec = misbehaver().spec();
    spec.limits.memory_bytes = 8 << 20;
    let rig = Rig::start(spec).unwrap();
    assert_eq!(fault(&mut rig.stream(), &mut asking("m")), FaultKind::Memory);
    let high_water = rig.plugin.stats().memory_high_water;
    assert!((4 << 20..=8 << 20).contains(&high_water), "{high_water}");
}

#[test]
fn a_module_that_starts_over_the_memory_limit_is_refused() {
    let mut spec = misbehaver().spec();
    spec.limits.memory_bytes = 65536;
    let error = Rig::start(spec).err().unwrap();
    assert_eq!(error.phase, StartPhase::Instantiate);
    assert!(error.message.contains("memory"), "{}", error.message);
}

#[test]
fn a_table_cannot_grow_over_its_limit() {
    let guest = Guest::on_request_headers("(call $put (table.grow $t (ref.null func) (i32.const 1000)))")
        .also("(table $t 1 funcref)");
    let mut spec = guest.spec();
    spec.limits.table_elements = 100;
    assert_eq!(Rig::start(spec).unwrap().results_of_request(), [-1]);
}

#[test]
fn a_fault_tells_the_other_streams_of_its_shard_and_of_no_other() {
    let rig = Rig::start(misbehaver().spec().with_shards(2)).unwrap();
    let mut same = rig.plugin.open_stream(0);
    let mut other = rig.plugin.open_stream(1);
    let mut env = request();
    same.on_request_headers(&mut env, true).unwrap();
    other.on_request_headers(&mut env, true).unwrap();

    assert_eq!(fault(&mut rig.plugin.open_stream(2), &mut asking("t")), FaultKind::Trap);
    assert_eq!(fault(&mut same, &mut env), FaultKind::Lost);
    assert_eq!(fault(&mut same, &mut env), FaultKind::Lost, "for good");
    same.finish(&mut env).unwrap();
    other.on_request_headers(&mut env, true).unwrap();
    rig.lines();
    other.finish(&mut env).unwrap();
    assert_eq!(rig.lines(), ["l"], "the other stream's end is told, the lost one's is not");
    assert_eq!(rig.plugin.stats().healthy_shards, 1);
}

#[test]
fn a_fresh_instance_serves_after_the_back_off_and_only_new_streams() {
    let rig = misbehaver().start();
    let mut old = rig.stream();
    old.on_request_headers(&mut request(), true).unwrap();
    fault(&mut rig.stream(), &mut asking("t"));

    assert_eq!(fault(&mut rig.stream(), &mut request()), FaultKind::Unavailable);
    let report = rig.plugin.tick(1_000);
    assert_eq!((report.restarted, report.unhealthy_shards), (0, 1), "the wait begins");
    assert_eq!(rig.plugin.tick(1_050).restarted, 0);
    assert_eq!(fault(&mut rig.stream(), &mut request()), FaultKind::Unavailable);
    let report = rig.plugin.tick(1_100);
    assert_eq!((report.restarted, report.unhealthy_shards), (1, 0));

    rig.stream().on_request_headers(&mut request(), true).unwrap();
    assert_eq!(fault(&mut old, &mut request()), FaultKind::Lost);
    let stats = rig.plugin.stats();
    assert_eq!((stats.restarts, stats.healthy_shards), (1, 1));
    assert_eq!(stats.faults_of(FaultKind::Trap), 1);
}

#[test]
fn an_instance_that_does_not_start_again_is_tried_less_and_less_often() {
    // Starts only while the shared key `k` is absent.
    let guest = Guest::new(
        r#"(data (i32.const 100) "k")
           (func (export "proxy_on_configure") (param i32 i32) (result i32)
             (i32.eq (call $get_shared (i32.const 100) (i32.const 1) (i32.const 0) (i32.const 4) (i32.const 8)) (i32.const 1)))
           (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
             (drop (call $set_shared (i32.const 100) (i32.const 1) (i32.const 100) (i32.const 1) (i32.const 0)))
             unreachable)"#,
    );
    let rig = guest.start();
    fault(&mut rig.stream(), &mut request());
    rig.plugin.tick(0);
    let report = rig.plugin.tick(100);
    assert_eq!((report.restarted, report.unhealthy_shards), (0, 1));
    assert!(report.faults[0].message.contains("configure"), "{}", report.faults[0]);
    assert!(rig.plugin.tick(200).faults.is_empty(), "the second wait is longer than 100 ms");
    assert_eq!(rig.plugin.tick(300).faults.len(), 1);
    rig.gateway.shared.data.retain(|_| false);
    assert_eq!(rig.plugin.stats().failed_restarts, 2);
}

#[test]
fn crashes_in_a_row_are_counted_until_a_minute_of_health() {
    let rig = Rig::start(misbehaver().spec().with_shards(2)).unwrap();
    assert_eq!(rig.plugin.crash_streak(), 0);
    let mut now = 0;
    for crashes in 1..=3 {
        fault(&mut rig.plugin.open_stream(0), &mut asking("t"));
        now += 10;
        assert_eq!(rig.plugin.tick(now).crash_streak, crashes);
        assert_eq!(rig.plugin.crash_streak(), crashes);
        now += 1_000;
        assert_eq!(rig.plugin.tick(now).restarted, 1);
    }
    // The other shard has a row of its own.
    fault(&mut rig.plugin.open_stream(1), &mut asking("t"));
    assert_eq!(rig.plugin.tick(now + 10).crash_streak, 3);
    rig.plugin.tick(now + 59_000);
    assert_eq!(rig.plugin.crash_streak(), 3);
    rig.plugin.tick(now + 60_000);
    assert_eq!(rig.plugin.crash_streak(), 1, "the second shard's");
}

#[test]
fn a_quarantined_plugin_takes_no_new_streams_until_it_is_released() {
    let rig = Rig::start(misbehaver().spec().with_shards(2)).unwrap();
    let mut running = rig.plugin.open_stream(1);
    running.on_request_headers(&mut request(), true).unwrap();
    fault(&mut rig.plugin.open_stream(0), &mut asking("t"));
    assert!(!rig.plugin.release(), "it is not quarantined");
    rig.plugin.quarantine();
    assert!(rig.plugin.is_quarantined() && rig.plugin.stats().quarantined);
    for shard in 0..2 {
        let fault = rig.plugin.open_stream(shard).on_request_headers(&mut request(), true).unwrap_err();
        assert_eq!(fault.kind, FaultKind::Unavailable);
        assert!(fault.message.contains("quarantined"), "{}", fault.message);
    }
    for now in [0, 100, 10_000, 100_000] {
        assert_eq!(rig.plugin.tick(now).restarted, 0, "lost instances are not replaced");
    }
    running.on_request_headers(&mut request(), true).unwrap();
    running.finish(&mut request()).unwrap();

    assert!(rig.plugin.release());
    assert_eq!(rig.plugin.crash_streak(), 0);
    rig.plugin.open_stream(1).on_request_headers(&mut request(), true).unwrap();
    rig.plugin.tick(200_000);
    assert_eq!(rig.plugin.tick(200_100).restarted, 1);
    rig.plugin.open_stream(0).on_request_headers(&mut request(), true).unwrap();
}

#[test]
fn a_panic_of_the_gateway_is_a_fault_and_the_environment_comes_back() {
    struct Bomb(u32);
    impl StreamEnv for Bomb {
        fn property(&mut self, _: &[u8]) -> Option<std::borrow::Cow<'_, [u8]>> {
            panic!("boom")
        }
    }
    let guest = Guest::on_request_headers(
        "(call $put (call $get_property (i32.const 0) (i32.const 1) (i32.const 8) (i32.const 12)))",
    );
    let rig = guest.start();
    let mut env = Lent::new(Bomb(7));
    let fault = rig.stream().on_request_headers(&mut env, true).unwrap_err();
    assert_eq!(fault.kind, FaultKind::Host);
    assert!(fault.message.contains("boom"), "{}", fault.message);
    assert_eq!(env.into_inner().0, 7);
}

#[test]
fn a_plugin_may_be_dropped_while_its_streams_live() {
    let rig = misbehaver().start();
    let mut stream = rig.stream();
    let Rig { plugin, gateway } = rig;
    drop(plugin);
    stream.on_request_headers(&mut request(), true).unwrap();
    stream.finish(&mut request()).unwrap();
    assert_eq!(gateway.lines.lock().len(), 1);
}

#[test]
fn shards_serve_from_many_threads_at_once() {
    let rig = Rig::start(misbehaver().spec().with_shards(2)).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let plugin = &rig.plugin;
            scope.spawn(move || {
                for _ in 0..200 {
                    let mut env = request();
                    let mut stream = plugin.open_stream(thread);
                    stream.on_request_headers(&mut env, true).unwrap();
                    stream.finish(&mut env).unwrap();
                }
            });
        }
    });
    assert_eq!(rig.plugin.stats().calls, 4 * 200 * 2);
}
