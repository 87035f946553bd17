use super::TeamWorkers;
use turnstile_policy::testing::FakeHost;

const WORKERS: &str = r#"[
    {"id": "a", "index": 0, "state": "ready", "labels": {"team": "shared"}},
    {"id": "b", "index": 1, "state": "ready", "labels": {"team": "search"}}]"#;

fn excluded(team: &str) -> Result<Option<String>, String> {
    let host = FakeHost::new().header("x-team", team).fact("workers", WORKERS);
    let mut policy: TeamWorkers = host.configure(r#"{"teams": {"search": "search"}}"#)?;
    host.route(&mut policy);
    Ok(host.decided("route.exclude"))
}

#[test]
fn a_team_stays_on_its_own_workers() -> Result<(), String> {
    assert_eq!(excluded("search")?.as_deref(), Some("#0"));
    assert_eq!(excluded("sales")?, None);
    Ok(())
}
