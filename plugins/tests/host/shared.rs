//! Shared data and metrics.

use turnstile_plugins::{MetricValue, PluginMetrics, SharedData, SharedState};

use crate::rig::{Guest, Rig, request, text};

const KEYS: &str = r#"(data (i32.const 100) "key") (data (i32.const 110) "value1value2")"#;

#[test]
fn shared_data_is_compared_before_it_is_set() {
    let rig = Guest::on_request_headers(
        r#"(call $put (call $get_shared (i32.const 100) (i32.const 3) (i32.const 0) (i32.const 4) (i32.const 8)))
           (call $put (call $set_shared (i32.const 100) (i32.const 3) (i32.const 110) (i32.const 6) (i32.const 0)))
           (call $put (call $get_shared (i32.const 100) (i32.const 3) (i32.const 0) (i32.const 4) (i32.const 8)))
           (call $put (call $set_shared (i32.const 100) (i32.const 3) (i32.const 116) (i32.const 6)
                        (i32.add (i32.load (i32.const 8)) (i32.const 1))))
           (call $put (call $set_shared (i32.const 100) (i32.const 3) (i32.const 116) (i32.const 6) (i32.load (i32.const 8))))
           (call $put (call $set_shared (i32.const 100) (i32.const 3) (i32.const 110) (i32.const 6) (i32.load (i32.const 8))))
           (call $put (call $get_shared (i32.const 100) (i32.const 3) (i32.const 0) (i32.const 4) (i32.const 8)))
           (call $text (i32.load (i32.const 0)) (i32.load (i32.const 4)))"#,
    )
    .also(KEYS)
    .start();
    let mut env = request();
    assert_eq!(rig.results(&mut env), [1, 0, 0, 8, 0, 8, 0]);
    assert_eq!(text(&env), "value2");
}

/// Adds 1 to a shared byte, with compare and set.
const COUNTER: &str = r#"
(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
  (local $cas i32) (local $status i32)
  (i32.store8 (i32.const 120) (i32.const 0))
  (if (i32.eqz (call $get_shared (i32.const 100) (i32.const 3) (i32.const 0) (i32.const 4) (i32.const 8)))
    (then
      (i32.store8 (i32.const 120) (i32.load8_u (i32.load (i32.const 0))))
      (local.set $cas (i32.load (i32.const 8)))))
  (i32.store8 (i32.const 120) (i32.add (i32.load8_u (i32.const 120)) (i32.const 1)))
  (call $put (call $set_shared (i32.const 100) (i32.const 3) (i32.const 120) (i32.const 1) (local.get $cas)))
  (call $put (i32.load8_u (i32.const 120)))
  (call $flush) (i32.const 0))
"#;

#[test]
fn shared_data_is_one_for_all_shards_plugins_of_a_vm_and_reloads() {
    let guest = Guest::new(COUNTER).also(KEYS);
    let shared = SharedState::default();
    let mut spec = guest.spec().with_shards(2);
    spec.vm_id = "vm".to_owned();
    let first = Rig::start_with(spec.clone(), shared.clone()).unwrap();
    spec.name = "another".into();
    let second = Rig::start_with(spec.clone(), shared.clone()).unwrap();
    let count = |rig: &Rig, shard| {
        let mut env = request();
        rig.plugin.open_stream(shard).on_request_headers(&mut env, true).unwrap();
        crate::rig::results(&env)
    };
    assert_eq!(count(&first, 0), [0, 1]);
    assert_eq!(count(&first, 1), [0, 2]);
    assert_eq!(count(&second, 0), [0, 3]);
    drop((first, second));
    let reloaded = Rig::start_with(spec.clone(), shared.clone()).unwrap();
    assert_eq!(count(&reloaded, 0), [0, 4]);
    spec.vm_id = "other".to_owned();
    let apart = Rig::start_with(spec, shared).unwrap();
    assert_eq!(count(&apart, 0), [0, 1]);
}

#[test]
fn a_full_store_drops_writes_of_lenient_plugins_and_tells_strict_ones() {
    let guest = Guest::on_request_headers(
        "(call $put (call $set_shared (i32.const 100) (i32.const 3) (i32.const 0) (i32.const 65536) (i32.const 0)))",
    )
    .also(KEYS);
    let full = || SharedState { data: SharedData::new(1_000), ..SharedState::default() };
    let rig = Rig::start_with(guest.spec(), full()).unwrap();
    assert_eq!(rig.results_of_request(), [0]);
    assert_eq!(rig.plugin.stats().tolerated, 1);
    assert_eq!(rig.gateway.shared.data.space("guest").bytes(), 0);
    let mut spec = guest.spec();
    spec.lenient = false;
    assert_eq!(Rig::start_with(spec, full()).unwrap().results_of_request(), [10]);
}

const METRICS: &str = r#"
(data (i32.const 100) "hits") (data (i32.const 110) "size")
(func (export "proxy_on_configure") (param i32 i32) (result i32)
  (if (call $define_metric (i32.const 0) (i32.const 100) (i32.const 4) (i32.const 200)) (then unreachable))
  (if (call $define_metric (i32.const 1) (i32.const 110) (i32.const 4) (i32.const 204)) (then unreachable))
  (if (call $define_metric (i32.const 2) (i32.const 110) (i32.const 4) (i32.const 208)) (then unreachable))
  (i32.const 1))
"#;

#[test]
fn metrics_follow_the_rules_of_their_kind() {
    let rig = Guest::on_request_headers(
        r#"(call $put (call $increment_metric (i32.load (i32.const 200)) (i64.const 2)))
           (call $put (call $increment_metric (i32.load (i32.const 200)) (i64.const -1)))
           (call $put (call $record_metric (i32.load (i32.const 200)) (i64.const 3)))
           (call $put (call $get_metric (i32.load (i32.const 200)) (i32.const 0)))
           (call $put (i32.load (i32.const 0)))
           (call $put (call $record_metric (i32.load (i32.const 204)) (i64.const 9)))
           (call $put (call $increment_metric (i32.load (i32.const 204)) (i64.const -4)))
           (call $put (call $record_metric (i32.load (i32.const 208)) (i64.const 7)))
           (call $put (call $increment_metric (i32.load (i32.const 208)) (i64.const 7)))
           (call $put (call $get_metric (i32.load (i32.const 208)) (i32.const 0)))
           (call $put (call $get_metric (i32.const 12345) (i32.const 0)))
           (call $put (call $define_metric (i32.const 3) (i32.const 100) (i32.const 4) (i32.const 0)))"#,
    )
    .also(METRICS)
    .start();
    assert_eq!(rig.results_of_request(), [0, 2, 0, 0, 5, 0, 0, 0, 2, 2, 1, 2]);
    let snapshot = rig.gateway.shared.metrics.snapshot();
    assert_eq!(snapshot.len(), 3);
    assert_eq!((&*snapshot[0].plugin, &*snapshot[0].name), ("guest", "hits"));
    assert_eq!(snapshot[0].value, MetricValue::Counter(5));
    assert_eq!(snapshot[1].value, MetricValue::Gauge(5));
    assert!(matches!(snapshot[2].value, MetricValue::Histogram { sum: 7, .. }));
}

#[test]
fn metrics_add_up_over_shards_and_reloads() {
    let guest =
        Guest::on_request_headers("(call $put (call $increment_metric (i32.load (i32.const 200)) (i64.const 1)))")
            .also(METRICS);
    let shared = SharedState::default();
    for _ in 0..2 {
        let rig = Rig::start_with(guest.spec().with_shards(2), shared.clone()).unwrap();
        for shard in 0..2 {
            rig.plugin.open_stream(shard).on_request_headers(&mut request(), true).unwrap();
        }
    }
    assert_eq!(shared.metrics.snapshot()[0].value, MetricValue::Counter(4));
}

#[test]
fn a_metric_too_many_takes_values_and_shows_them_to_nobody() {
    let guest = Guest::on_request_headers(
        r#"(call $put (call $define_metric (i32.const 0) (i32.const 100) (i32.const 4) (i32.const 0)))
           (call $put (call $increment_metric (i32.load (i32.const 0)) (i64.const 1)))
           (call $put (call $record_metric (i32.load (i32.const 0)) (i64.const 1)))
           (call $put (call $get_metric (i32.load (i32.const 0)) (i32.const 8)))"#,
    )
    .also(r#"(data (i32.const 100) "hits")"#);
    let full = || SharedState { metrics: PluginMetrics::new(0), ..SharedState::default() };
    let rig = Rig::start_with(guest.spec(), full()).unwrap();
    assert_eq!(rig.results_of_request(), [0, 0, 0, 0]);
    assert!(rig.gateway.shared.metrics.snapshot().is_empty());
    let mut spec = guest.spec();
    spec.lenient = false;
    assert_eq!(Rig::start_with(spec, full()).unwrap().results_of_request(), [10, 1, 1, 1]);
}
