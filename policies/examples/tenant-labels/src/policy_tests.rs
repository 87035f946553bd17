#![allow(clippy::unwrap_used)]

use turnstile_policy::testing::FakeHost;

use super::*;

const WORKERS: &str = r#"[
    {"id":"a:1","index":0,"state":"ready","labels":{"gpu":"l40s"}},
    {"id":"b:1","index":1,"state":"ready","labels":{"gpu":"h200"}},
    {"id":"c:1","index":2,"state":"unhealthy","labels":{"gpu":"h100"}}]"#;

fn route(host: &FakeHost, options: &str) {
    let mut policy: TenantLabels = host.configure(options).unwrap();
    host.route(&mut policy);
}

#[test]
fn a_tenants_turns_leave_out_the_workers_without_the_labels() {
    let host = FakeHost::new().fact("workers", WORKERS).fact("request.tenant", "00000000000000aa");
    route(&host, r#"{"rules":[{"tenant":"00000000000000aa","labels":{"gpu":"h200"}}]}"#);
    assert_eq!(host.decisions(), ["route.exclude=#0,#2"]);
    assert_eq!(host.counted("tenant_labels_kept_total"), 1);
}

#[test]
fn a_header_can_name_the_tenant() {
    let rules = r#"{"header":"X-Team","rules":[{"tenant":"research","labels":{"gpu":"h200"}}]}"#;
    let host = FakeHost::new().fact("workers", WORKERS).header("x-team", "research");
    route(&host, rules);
    assert_eq!(host.decided("route.exclude").as_deref(), Some("#0,#2"));
    let host = FakeHost::new().fact("workers", WORKERS).header("x-team", "sales");
    route(&host, rules);
    assert!(host.decisions().is_empty());
}

#[test]
fn without_a_ready_worker_the_turn_goes_anywhere_or_nowhere() {
    let host = || FakeHost::new().fact("workers", WORKERS).fact("request.tenant", "t");
    let loose = host();
    route(&loose, r#"{"rules":[{"tenant":"t","labels":{"gpu":"h100"}}]}"#);
    assert_eq!(loose.decided("route.exclude"), None);
    assert!(loose.decided("log.tenant-labels").is_some());
    assert_eq!(loose.counted("tenant_labels_nowhere_total"), 1);
    let strict = host();
    route(&strict, r#"{"strict":true,"rules":[{"tenant":"t","labels":{"gpu":"h100"}}]}"#);
    assert_eq!(strict.decided("route.exclude").as_deref(), Some("#0,#1"));
}

#[test]
fn a_turn_no_rule_fits_costs_one_read() {
    let host = FakeHost::new().fact("workers", WORKERS).fact("request.tenant", "t");
    route(&host, r#"{"rules":[{"tenant":"u","labels":{"gpu":"h100"}}]}"#);
    assert!(host.decisions().is_empty());
    assert_eq!(host.reads(), 1);
}
