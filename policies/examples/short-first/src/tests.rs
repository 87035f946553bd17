//! What it learns, and what it makes of it.

use super::ShortFirst;
use turnstile_policy::testing::FakeHost;
use turnstile_policy::{Event, Usage};

fn answer(host: &FakeHost, policy: &mut ShortFirst, tokens: u64) {
    let usage = Usage { completion_tokens: Some(tokens), ..Usage::default() };
    host.tell(policy, &Event::Usage { at_ms: 1, usage });
}

fn host(tenant: &str) -> FakeHost {
    FakeHost::new().fact("request.tenant", tenant)
}

#[test]
fn a_tenant_with_short_answers_gets_a_head_start() -> Result<(), String> {
    let (brief, wordy) = (host("brief"), host("wordy"));
    let mut policy: ShortFirst = brief.configure(r#"{"long_tokens": 100, "most_ms": 2000}"#)?;
    brief.admit(&mut policy);
    assert_eq!(brief.decided("queue.priority"), None, "nothing is known yet");
    answer(&brief, &mut policy, 25);
    answer(&wordy, &mut policy, 400);
    brief.admit(&mut policy);
    wordy.admit(&mut policy);
    assert_eq!(brief.decided("queue.priority").as_deref(), Some("1.5"));
    assert_eq!(wordy.decided("queue.priority").as_deref(), Some("0"));
    assert_eq!(brief.decided("log.expected_tokens").as_deref(), Some("25"));
    // It changes its mind, slowly.
    answer(&brief, &mut policy, 75);
    brief.admit(&mut policy);
    assert_eq!(brief.decided("log.expected_tokens").as_deref(), Some("35"));
    Ok(())
}

#[test]
fn tool_calls_are_counted() -> Result<(), String> {
    let host = host("t");
    let mut policy: ShortFirst = host.configure("{}")?;
    for number in 0..3 {
        host.tell(&mut policy, &Event::ToolCall { at_ms: 1, number, name: "read".to_owned() });
    }
    host.tell(&mut policy, &Event::FirstToken { at_ms: 1 });
    assert_eq!(host.counted("short_first_tool_calls_total"), 3);
    Ok(())
}

#[test]
fn the_tenant_that_was_quiet_longest_is_forgotten() -> Result<(), String> {
    let [a, b, c] = ["a", "b", "c"].map(host);
    let mut policy: ShortFirst = host("a").configure(r#"{"tenants": 2}"#)?;
    for host in [&a, &b, &a, &c] {
        answer(host, &mut policy, 10);
    }
    let knows = [a, b, c].map(|host| {
        host.admit(&mut policy);
        host.decided("queue.priority").is_some()
    });
    assert_eq!(knows, [true, false, true]);
    Ok(())
}

#[test]
fn options_that_are_wrong_are_named() {
    for (options, wanted) in [
        (r#"{"long_tokens": 0}"#, "option `long_tokens`: must be above 0"),
        (r#"{"tenants": 0}"#, "option `tenants`: must be above 0"),
    ] {
        assert_eq!(FakeHost::new().configure::<ShortFirst>(options).err().as_deref(), Some(wanted));
    }
}
