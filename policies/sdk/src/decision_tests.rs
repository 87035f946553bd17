use super::*;
use crate::testing::FakeHost;

fn written(decision: Decision) -> Vec<String> {
    let host = FakeHost::new();
    decision.write(&host);
    host.decisions()
}

#[test]
fn nothing_decided_writes_nothing() {
    assert!(written(Decision::none()).is_empty());
}

#[test]
fn every_part_is_written_under_its_name() {
    let decision = Decision::none()
        .target(2)
        .fallbacks([WorkerName::from(1), WorkerName::from("a:1")])
        .exclude([7, 8])
        .scores([(2, 12.34), (1, 40.0)])
        .reason("least cost")
        .tier(3)
        .queue_priority(-2.5)
        .deadline_ms(900)
        .flow("tree-1")
        .session(SessionAction::Open)
        .session_key("s-1")
        .session_ttl_s(300.0)
        .session_mode(SessionMode::Auto)
        .prefill(false)
        .engine_priority(EnginePriority::Value(-4))
        .note("why", "because");
    assert_eq!(
        written(decision),
        [
            "engine.priority=-4",
            "log.why=because",
            "prefill=off",
            "queue.deadline_ms=900",
            "queue.flow=tree-1",
            "queue.priority=-2.5",
            "queue.tier=3",
            "route.exclude=#7,#8",
            "route.fallbacks=#1,a:1",
            "route.reason=least cost",
            "route.scores={\"#2\":12.3,\"#1\":40}",
            "route.target=#2",
            "session.action=open",
            "session.key=s-1",
            "session.mode=auto",
            "session.ttl_s=300",
        ]
    );
}

#[test]
fn scores_are_valid_json_whatever_they_are() {
    let scores = [("a", f64::NAN), ("b", -0.26), ("c", f64::MAX), ("d\"e", 0.04), ("f", f64::INFINITY)];
    let host = FakeHost::new();
    Decision::none().scores(scores).write(&host);
    let json = host.decided("route.scores").unwrap_or_default();
    assert_eq!(json, r#"{"b":-0.3,"c":100000000000000,"d\"e":0}"#);
    assert!(serde_json::from_str::<serde_json::Value>(&json).is_ok());
}

#[test]
fn a_priority_that_is_no_number_is_not_written() {
    assert!(written(Decision::none().queue_priority(f64::NAN)).is_empty());
}

#[test]
fn seconds_are_written_to_the_millisecond_without_idle_zeros() {
    let cases = [
        (10.0, "10"),
        (-0.5, "-0.5"),
        (1.25, "1.25"),
        (0.0004, "0"),
        (-0.0006, "-0.001"),
        (12.0305, "12.031"),
        (3600.0, "3600"),
    ];
    for (seconds, text) in cases {
        assert_eq!(written(Decision::none().queue_priority(seconds)), [format!("queue.priority={text}")], "{seconds}");
    }
}

#[test]
fn engine_priority_can_be_taken_away() {
    assert_eq!(written(Decision::none().engine_priority(EnginePriority::Absent)), ["engine.priority=none"]);
}
