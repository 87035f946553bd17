#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;

fn plugin(name: &str) -> Arc<str> {
    name.into()
}

#[test]
fn one_name_and_kind_is_one_metric_for_a_plugin() {
    let metrics = PluginMetrics::default();
    let a = metrics.define(&plugin("a"), MetricType::Counter, "n").unwrap();
    assert_eq!(metrics.define(&plugin("a"), MetricType::Counter, "n"), Ok(a));
    assert_ne!(metrics.define(&plugin("a"), MetricType::Gauge, "n"), Ok(a));
    assert_ne!(metrics.define(&plugin("b"), MetricType::Counter, "n"), Ok(a));
    assert_ne!(a, 0);
}

#[test]
fn counters_only_grow_and_gauges_stop_at_zero() {
    let metrics = PluginMetrics::default();
    let p = plugin("p");
    let counter = metrics.define(&p, MetricType::Counter, "c").unwrap();
    metrics.increment("p", counter, 2).unwrap();
    metrics.record("p", counter, 3).unwrap();
    assert_eq!(metrics.get("p", counter), Ok(5));
    for by in [0, -1, i64::MIN] {
        assert_eq!(metrics.increment("p", counter, by), Err(MetricError::BadArgument));
    }
    let gauge = metrics.define(&p, MetricType::Gauge, "g").unwrap();
    metrics.record("p", gauge, 10).unwrap();
    metrics.increment("p", gauge, -3).unwrap();
    assert_eq!(metrics.get("p", gauge), Ok(7));
    metrics.increment("p", gauge, i64::MIN).unwrap();
    assert_eq!(metrics.get("p", gauge), Ok(0));
}

#[test]
fn histograms_observe_and_cannot_be_read_or_incremented() {
    let metrics = PluginMetrics::default();
    let id = metrics.define(&plugin("p"), MetricType::Histogram, "h").unwrap();
    for value in [0, 1, 2, 3, u64::MAX / 2] {
        metrics.record("p", id, value).unwrap();
    }
    assert_eq!(metrics.increment("p", id, 1), Err(MetricError::BadArgument));
    assert_eq!(metrics.get("p", id), Err(MetricError::BadArgument));
    let snapshot = metrics.snapshot();
    let MetricValue::Histogram { sum, buckets } = &snapshot[0].value else { panic!("{snapshot:?}") };
    assert_eq!(*sum, 6 + u64::MAX / 2);
    assert_eq!(buckets[..3], [2, 1, 1]);
    assert_eq!(buckets[HISTOGRAM_BOUNDS.len()], 1);
}

#[test]
fn a_plugin_reaches_only_its_own_metrics() {
    let metrics = PluginMetrics::default();
    let id = metrics.define(&plugin("a"), MetricType::Counter, "n").unwrap();
    assert_eq!(metrics.get("b", id), Err(MetricError::NotFound));
    for unknown in [0, id + 1, u32::MAX] {
        assert_eq!(metrics.record("a", unknown, 1), Err(MetricError::NotFound));
    }
}

#[test]
fn metrics_are_bounded_in_number_and_name() {
    let metrics = PluginMetrics::new(1);
    metrics.define(&plugin("p"), MetricType::Counter, "n").unwrap();
    assert_eq!(metrics.define(&plugin("p"), MetricType::Counter, "m"), Err(MetricError::Full));
    assert!(metrics.define(&plugin("q"), MetricType::Counter, "m").is_ok());
    for name in ["", &"x".repeat(MAX_NAME + 1)] {
        assert_eq!(metrics.define(&plugin("r"), MetricType::Counter, name), Err(MetricError::BadArgument));
    }
}

#[test]
fn what_is_forgotten_makes_room_for_others() {
    let metrics = PluginMetrics::new(2);
    let gone = metrics.define(&plugin("gone"), MetricType::Counter, "n").unwrap();
    let stays = metrics.define(&plugin("stays"), MetricType::Counter, "n").unwrap();
    metrics.increment("stays", stays, 1).unwrap();
    metrics.retain(|name| name == "stays");
    assert_eq!(metrics.increment("gone", gone, 1), Err(MetricError::NotFound));
    assert_eq!((metrics.get("stays", stays), metrics.snapshot().len()), (Ok(1), 1));
    for round in 0..100 {
        let name = format!("new{round}");
        let id = metrics.define(&plugin(&name), MetricType::Gauge, "n").unwrap();
        assert_eq!(id, gone, "the place is used again");
        assert_eq!(metrics.get(&name, id), Ok(0));
        metrics.retain(|name| name == "stays");
    }
    assert_eq!(metrics.get("stays", stays), Ok(1));
}
