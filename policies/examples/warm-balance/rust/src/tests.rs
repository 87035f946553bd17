use super::WarmBalance;
use turnstile_policy::Worker;
use turnstile_policy::testing::FakeHost;

fn workers() -> [Worker; 3] {
    [
        Worker { index: 0, running: 4, cached_tokens: 900, ..Worker::default() },
        Worker { index: 1, running: 2, cached_tokens: 850, ..Worker::default() },
        Worker { index: 2, running: 0, cached_tokens: 500, ..Worker::default() },
    ]
}

fn target(host: FakeHost, options: &str) -> Result<Option<String>, String> {
    let host = host.fact("request.prompt_tokens", 1000).workers(&workers());
    let mut policy: WarmBalance = host.configure(options)?;
    host.route(&mut policy);
    Ok(host.decided("route.target"))
}

#[test]
fn the_least_loaded_of_the_warm_workers_is_taken() -> Result<(), String> {
    assert_eq!(target(FakeHost::new(), "")?.as_deref(), Some("#1"));
    assert_eq!(target(FakeHost::new(), r#"{"tolerance_percent": 0}"#)?.as_deref(), Some("#0"));
    Ok(())
}

#[test]
fn an_urgent_turn_takes_a_colder_worker() -> Result<(), String> {
    assert_eq!(target(FakeHost::new().fact("request.priority", 1), "")?.as_deref(), Some("#2"));
    assert_eq!(target(FakeHost::new().fact("request.priority", -1), "")?.as_deref(), Some("#1"));
    Ok(())
}

#[test]
fn a_share_is_at_most_all() {
    let refused = target(FakeHost::new(), r#"{"urgent_tolerance_percent": 101}"#);
    assert_eq!(refused, Err("option `urgent_tolerance_percent`: must be 0 to 100".to_owned()));
}
