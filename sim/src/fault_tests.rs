#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use super::*;
use serde_json::json;

const MS: Duration = Duration::from_millis(1);

fn taken(faults: &Faults, path: &str) -> Option<FaultKind> {
    faults.take(Moment::Whole, path, path == "/v1/chat/completions")
}

fn chat(faults: &Faults) -> bool {
    taken(faults, "/v1/chat/completions").is_some()
}

#[tokio::test(start_paused = true)]
async fn a_fault_hits_its_count_of_requests_on_its_path() {
    let faults = Faults::default();
    faults.add(Fault::times(2, FaultKind::Hang));
    faults.add(Fault::once(FaultKind::Cut(Place::Head)).on("/open"));
    assert!(taken(&faults, "/v1/models").is_none(), "no inference");
    assert_eq!([chat(&faults), chat(&faults), chat(&faults)], [true, true, false]);
    assert_eq!(taken(&faults, "/open_session"), Some(FaultKind::Cut(Place::Head)));
    assert!(faults.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_window_opens_closes_and_opens_again_with_a_new_count() {
    let faults = Faults::default();
    faults.add(Fault::once(FaultKind::Hang).after(100 * MS).lasting(50 * MS).every(200 * MS));
    let mut hits = Vec::new();
    for at in 0..50 {
        if chat(&faults) {
            hits.push(at * 10);
        }
        tokio::time::advance(10 * MS).await;
    }
    assert_eq!(hits, [100, 300]);
}

#[tokio::test(start_paused = true)]
async fn a_fault_that_lasts_is_forgotten_when_its_time_is_over() {
    let faults = Faults::default();
    faults.add(Fault::always(FaultKind::Hang).lasting(50 * MS));
    assert!(chat(&faults) && chat(&faults));
    tokio::time::advance(50 * MS).await;
    assert!(!chat(&faults));
    assert!(faults.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_share_of_the_requests_is_the_same_for_the_same_seed() {
    let draw = |seed| {
        let faults = Faults::default();
        faults.add(Fault::always(FaultKind::Hang).with_probability(0.3, seed));
        (0..1000).map(|_| chat(&faults)).collect::<Vec<bool>>()
    };
    let hits = draw(7).iter().filter(|hit| **hit).count();
    assert!((250..350).contains(&hits), "{hits}");
    assert_eq!(draw(7), draw(7));
    assert_ne!(draw(7), draw(8));
    let never = Faults::default();
    never.add(Fault::always(FaultKind::Hang).with_probability(0.0, 1));
    assert!(!chat(&never));
}

#[tokio::test(start_paused = true)]
async fn early_faults_are_taken_early_only() {
    let faults = Faults::default();
    faults.add(Fault::once(FaultKind::Hang).early());
    assert!(!chat(&faults));
    assert!(faults.take(Moment::Early, "/v1/chat/completions", true).is_some());
}

#[tokio::test(start_paused = true)]
async fn what_concerns_the_worker_happens_by_itself_and_ends() {
    let faults = Faults::default();
    faults.add(Fault::always(FaultKind::Refuse).after(100 * MS).lasting(50 * MS).every(200 * MS));
    faults.add(Fault::always(FaultKind::Crash).after(120 * MS));
    assert!(!chat(&faults), "no request is needed");
    let began = tokio::time::Instant::now();
    let mut seen = Vec::new();
    while began.elapsed() < 400 * MS {
        faults.until_due().await;
        let at = began.elapsed().as_millis() as u64;
        seen.extend(faults.due().into_iter().map(|action| (at, action)));
    }
    let (begin, end) = (Action::Begin(FaultKind::Refuse), Action::End(FaultKind::Refuse));
    let crash = Action::Begin(FaultKind::Crash);
    let wanted = [(100, begin.clone()), (120, crash), (150, end.clone()), (300, begin), (350, end)];
    // The clock of a paused runtime is exact to a millisecond.
    let near = |(seen, wanted): (&(u64, Action), &(u64, Action))| seen.0.abs_diff(wanted.0) <= 2 && seen.1 == wanted.1;
    assert!(seen.len() >= 5 && seen.iter().zip(&wanted).all(near), "{seen:?}");
}

#[tokio::test(start_paused = true)]
async fn clearing_undoes_what_lasts() {
    let faults = Faults::default();
    faults.add(Fault::always(FaultKind::Wedge { frozen: false }));
    faults.add(Fault::always(FaultKind::Refuse));
    assert_eq!(faults.due().len(), 2);
    faults.clear();
    assert!(!*faults.refusing().borrow());
    assert_eq!(faults.due(), [Action::Begin(FaultKind::Unwedge)]);
    assert!(faults.is_empty());
}

#[test]
fn every_kind_can_be_written_down() {
    for (text, kind) in [
        (json!({"kind": "status", "status": 429, "body": "{}"}), FaultKind::Status(429, Some("{}".into()))),
        (json!({"kind": "error_event", "code": 500, "message": "m"}), FaultKind::ErrorEvent(500, "m".into())),
        (json!({"kind": "hang"}), FaultKind::Hang),
        (json!({"kind": "stall", "after_bytes": 9}), FaultKind::Stall(9)),
        (json!({"kind": "cut"}), FaultKind::Cut(Place::Head)),
        (json!({"kind": "cut", "after_bytes": 0}), FaultKind::Cut(Place::Body(0))),
        (json!({"kind": "reset", "after_bytes": 5}), FaultKind::Reset(Place::Body(5))),
        (json!({"kind": "half_close"}), FaultKind::HalfClose(Place::Head)),
        (json!({"kind": "garbage", "after_bytes": 7}), FaultKind::Garbage(Place::Body(7))),
        (json!({"kind": "noise", "after_bytes": 7}), FaultKind::Noise(7)),
        (json!({"kind": "wrong_length", "by": -3}), FaultKind::WrongLength(-3)),
        (json!({"kind": "delay", "ms": 5}), FaultKind::Delay(5 * MS)),
        (json!({"kind": "slow", "ms": 5}), FaultKind::Slow(5 * MS)),
        (json!({"kind": "crash"}), FaultKind::Crash),
        (json!({"kind": "restart", "down_ms": 1, "warmup_ms": 2}), FaultKind::Restart { down: MS, warmup: 2 * MS }),
        (json!({"kind": "refuse"}), FaultKind::Refuse),
        (json!({"kind": "wedge", "frozen": true}), FaultKind::Wedge { frozen: true }),
        (json!({"kind": "unwedge"}), FaultKind::Unwedge),
    ] {
        assert_eq!(Fault::from_json(&text), Ok(Fault::always(kind)), "{text}");
    }
    let all = json!({"kind": "hang", "path": "/v1/", "count": 2, "probability": 0.5, "seed": 3, "after_ms": 1, "for_ms": 2,
        "every_ms": 4, "early": true});
    let wanted = Fault::times(2, FaultKind::Hang).on("/v1/").with_probability(0.5, 3).after(MS).lasting(2 * MS);
    assert_eq!(Fault::from_json(&all), Ok(wanted.every(4 * MS).early()));
}

#[test]
fn a_bad_description_names_the_key() {
    for (text, wanted) in [
        (json!([]), "a fault is an object"),
        (json!({}), "kind is missing"),
        (json!({"kind": "nonsense"}), "unknown fault kind \"nonsense\""),
        (json!({"kind": "hang", "cuont": 1}), "unknown key \"cuont\""),
        (json!({"kind": "hang", "after_bytes": 1}), "unknown key \"after_bytes\""),
        (json!({"kind": "hang", "count": -1}), "count is -1, not a whole number from 0"),
        (json!({"kind": "hang", "probability": 2}), "probability is 2, not a share from 0 to 1"),
        (json!({"kind": "status", "status": 20}), "status is 20, not a status from 200 to 599"),
        (json!({"kind": "wrong_length", "by": 0}), "by is 0, not a number of bytes other than 0"),
        (json!({"kind": "refuse", "count": 1}), "refuse takes no path, count or probability: no request is seen"),
        (json!({"kind": "stall", "early": true}), "early: this kind needs the answer to a whole request"),
        (json!({"kind": "hang", "every_ms": 0}), "every_ms is 0"),
        (json!({"kind": "hang", "every_ms": 1, "for_ms": 2}), "for_ms is longer than every_ms"),
        (json!({"kind": "refuse", "every_ms": 9}), "every_ms needs for_ms, or it would never end"),
        (json!({"kind": "hang", "path": 1}), "path is 1, not a text"),
        (json!({"kind": "hang", "early": 1}), "early is 1, not true or false"),
    ] {
        assert_eq!(Fault::from_json(&text), Err(wanted.to_owned()), "{text}");
    }
}

#[test]
fn a_schedule_is_json_or_toml() {
    let wanted = vec![
        Scheduled { worker: Some(1), fault: Fault::always(FaultKind::Refuse).after(5 * MS).lasting(2 * MS) },
        Scheduled { worker: None, fault: Fault::once(FaultKind::Cut(Place::Body(10))) },
    ];
    let json = r#"[{"worker": 1, "kind": "refuse", "after_ms": 5, "for_ms": 2}, {"kind": "cut", "after_bytes": 10, "count": 1}]"#;
    assert_eq!(schedule(json), Ok(wanted.clone()));
    let toml = "[[fault]]\nworker = 1\nkind = \"refuse\"\nafter_ms = 5\nfor_ms = 2\n\n[[fault]]\nkind = \"cut\"\n\
                after_bytes = 10\ncount = 1\n";
    assert_eq!(schedule(toml), Ok(wanted));
    assert_eq!(schedule(""), Ok(Vec::new()));
    for (text, wanted) in [
        ("[{\"kind\": \"hang\"}, {\"kind\": \"hagn\"}]", "fault 2: unknown fault kind \"hagn\""),
        ("[1]", "fault 1: not an object"),
        ("[{\"worker\": -1, \"kind\": \"hang\"}]", "fault 1: worker is -1, not a place from 0"),
        ("{}", "a schedule in JSON is a list of faults"),
        ("[[falut]]\nkind = \"hang\"", "unknown key \"falut\": a schedule in TOML has [[fault]] tables only"),
        ("fault = 1", "fault is not a list: write [[fault]]"),
    ] {
        assert_eq!(schedule(text), Err(wanted.to_owned()), "{text}");
    }
    assert!(schedule("nonsense").unwrap_err().starts_with("neither JSON"));
}
