#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use http::HeaderValue;

use super::*;

fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in list {
        map.append(*name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
    }
    map
}

fn parsed_with(body: &str, list: &[(&'static str, &str)]) -> Result<Extension, BodyError> {
    parse(&scan(&Bytes::copy_from_slice(body.as_bytes())).unwrap(), &headers(list), 256, true)
}

fn parsed(body: &str) -> Extension {
    parsed_with(body, &[]).unwrap()
}

fn refused(body: &str) -> BodyError {
    parsed_with(body, &[]).unwrap_err()
}

#[test]
fn every_hint_is_read() {
    let extension = parsed(
        r#"{"nvext":{"agent_hints":{"priority":-3,"strict_priority":2,"osl":512,"speculative_prefill":true,
            "latency_sensitivity":2.5},"session_control":{"session_id":"s-1","action":"open","timeout":60}}}"#,
    );
    assert_eq!(
        extension.hints,
        Hints {
            priority: Some(-3),
            strict_priority: Some(2),
            osl: Some(512),
            speculative_prefill: true,
            latency_sensitivity: Some(2.5)
        }
    );
    assert_eq!(
        extension.control,
        SessionControl { session_id: Some("s-1".into()), action: Some(SessionAction::Open), timeout_s: Some(60.0) }
    );
    assert_eq!(extension.unknown, UnknownKeys::default());
}

#[test]
fn absent_and_null_are_the_same_everywhere() {
    for body in [
        "{}",
        r#"{"nvext":null}"#,
        r#"{"nvext":{}}"#,
        r#"{"nvext":{"agent_hints":null,"session_control":null}}"#,
        r#"{"nvext":{"agent_hints":{"priority":null,"strict_priority":null,"osl":null,"speculative_prefill":null,
            "latency_sensitivity":null},"session_control":{"session_id":null,"action":null,"timeout":null}}}"#,
    ] {
        assert_eq!(parsed(body), Extension::default(), "{body}");
    }
}

#[test]
fn a_wrong_type_is_refused_by_name() {
    for (body, field, words) in [
        (r#"{"nvext":1}"#, "nvext", "must be an object"),
        (r#"{"nvext":[]}"#, "nvext", "must be an object"),
        (r#"{"nvext":{"agent_hints":"x"}}"#, "nvext.agent_hints", "must be an object"),
        (r#"{"nvext":{"agent_hints":{"priority":"5"}}}"#, "nvext.agent_hints.priority", "must be an integer"),
        (r#"{"nvext":{"agent_hints":{"priority":1.5}}}"#, "nvext.agent_hints.priority", "must be an integer"),
        (r#"{"nvext":{"agent_hints":{"priority":1e2}}}"#, "nvext.agent_hints.priority", "must be an integer"),
        (r#"{"nvext":{"agent_hints":{"priority":true}}}"#, "nvext.agent_hints.priority", "must be an integer"),
        (
            r#"{"nvext":{"agent_hints":{"priority":2147483648}}}"#,
            "nvext.agent_hints.priority",
            "must be an integer from -2147483648 to 2147483647",
        ),
        (
            r#"{"nvext":{"agent_hints":{"strict_priority":-1}}}"#,
            "nvext.agent_hints.strict_priority",
            "from 0 to 4294967295",
        ),
        (r#"{"nvext":{"agent_hints":{"osl":-1}}}"#, "nvext.agent_hints.osl", "from 0"),
        (r#"{"nvext":{"agent_hints":{"osl":{}}}}"#, "nvext.agent_hints.osl", "must be a non-negative integer"),
        (
            r#"{"nvext":{"agent_hints":{"speculative_prefill":1}}}"#,
            "nvext.agent_hints.speculative_prefill",
            "must be true or false",
        ),
        (
            r#"{"nvext":{"agent_hints":{"latency_sensitivity":"low"}}}"#,
            "nvext.agent_hints.latency_sensitivity",
            "must be a number",
        ),
        (
            r#"{"nvext":{"agent_hints":{"latency_sensitivity":1e999}}}"#,
            "nvext.agent_hints.latency_sensitivity",
            "must be a number",
        ),
        (r#"{"nvext":{"session_control":"s"}}"#, "nvext.session_control", "must be an object"),
        (r#"{"nvext":{"session_control":{"session_id":7}}}"#, "nvext.session_control.session_id", "must be a string"),
        (
            r#"{"nvext":{"session_control":{"session_id":" "}}}"#,
            "nvext.session_control.session_id",
            "must not be empty",
        ),
        (
            r#"{"nvext":{"session_control":{"session_id":"s","action":"opened"}}}"#,
            "nvext.session_control.action",
            "must be \"bind\", \"open\" or \"close\"",
        ),
        (r#"{"nvext":{"session_control":{"session_id":"s","timeout":0}}}"#, "nvext.session_control.timeout", "above 0"),
        (
            r#"{"nvext":{"session_control":{"session_id":"s","timeout":"1"}}}"#,
            "nvext.session_control.timeout",
            "above 0",
        ),
        (r#"{"priority":"urgent"}"#, "priority", "must be an integer"),
        (r#"{"priority":99999999999}"#, "priority", "must be an integer from"),
    ] {
        let error = refused(body);
        assert_eq!(error.field, field, "{body}");
        assert_eq!(error.kind, BodyErrorKind::BadMember);
        assert!(error.message.starts_with(field) && error.message.contains(words), "{body}: {}", error.message);
    }
}

#[test]
fn a_session_id_may_be_as_long_as_configured() {
    let body = |n: usize| format!(r#"{{"nvext":{{"session_control":{{"session_id":"{}"}}}}}}"#, "x".repeat(n));
    for most in [16, 256, 4096] {
        let read = |n: usize| parse(&scan(&Bytes::from(body(n))).unwrap(), &HeaderMap::new(), most, true);
        assert_eq!(read(most).unwrap().control.session_id.unwrap().len(), most);
        let error = read(most + 1).unwrap_err();
        assert_eq!(error.field, "nvext.session_control.session_id");
        assert!(error.message.contains(&format!("at most {most} bytes")), "{}", error.message);
    }
}

#[test]
fn an_endless_timeout_is_cut_to_the_longest() {
    let extension = parsed(r#"{"nvext":{"session_control":{"session_id":"s","timeout":1e300}}}"#);
    assert_eq!(extension.control.timeout_s, Some(MAX_TIMEOUT_S));
}

#[test]
fn a_negative_latency_sensitivity_counts_as_none_to_speak_of() {
    let extension = parsed(r#"{"nvext":{"agent_hints":{"latency_sensitivity":-2}}}"#);
    assert_eq!(extension.hints.latency_sensitivity, Some(0.0));
}

#[test]
fn unknown_keys_are_counted_and_named_within_bounds() {
    let extension =
        parsed(r#"{"nvext":{"cache_control":{},"agent_hints":{"priorty":5},"session_control":{"id":"s"}}}"#);
    assert_eq!(extension.hints.priority, None);
    assert_eq!(
        extension.unknown.names,
        ["nvext.cache_control", "nvext.agent_hints.priorty", "nvext.session_control.id"]
    );
    let many: Vec<String> = (0..100).map(|i| format!("\"{}{i}\":0", "é".repeat(60))).collect();
    let extension = parsed(&format!("{{\"nvext\":{{{}}}}}", many.join(",")));
    assert_eq!(extension.unknown.count, 100);
    assert_eq!(extension.unknown.names.len(), 8);
    assert!(extension.unknown.names.iter().all(|name| name.len() <= 80));
}

#[test]
fn headers_override_the_body_and_malformed_ones_are_ignored_and_counted() {
    let body = r#"{"nvext":{"agent_hints":{"priority":1,"strict_priority":1}}}"#;
    let extension =
        parsed_with(body, &[("x-dynamo-request-priority", " 9 "), ("x-dynamo-request-strict-priority", "-1")]).unwrap();
    assert_eq!(extension.hints.priority, Some(9));
    assert_eq!(extension.hints.strict_priority, Some(1));
    assert_eq!(extension.malformed_headers, 1);
    let extension = parsed_with("{}", &[("x-dynamo-request-priority", "-4")]).unwrap();
    assert_eq!(extension.hints.priority, Some(-4));
    let extension = parsed_with("{}", &[("x-dynamo-request-priority", "hoch ü")]).unwrap();
    assert_eq!((extension.hints.priority, extension.malformed_headers), (None, 1));
}

#[test]
fn the_engines_own_priority_counts_where_the_hint_is_absent() {
    assert_eq!(parsed(r#"{"priority":4}"#).hints.priority, Some(4));
    assert_eq!(parsed(r#"{"priority":"7"}"#).hints.priority, Some(7));
    assert_eq!(parsed(r#"{"priority":4,"nvext":{"agent_hints":{"priority":5}}}"#).hints.priority, Some(5));
}

#[test]
fn nvext_is_found_wherever_it_stands_and_the_last_one_counts() {
    let extension = parsed(r#"{"nvext":{"agent_hints":{"osl":1}},"a":1,"n\u0076ext":{"agent_hints":{"osl":2}}}"#);
    assert_eq!(extension.hints.osl, Some(2));
}

#[test]
fn a_huge_or_deep_nvext_is_refused_or_skipped_without_harm() {
    let deep = format!("{}{}", "[".repeat(20_000), "]".repeat(20_000));
    assert_eq!(parsed(&format!("{{\"nvext\":{{\"x\":{deep}}}}}")).unknown.count, 1);
    let huge = "x".repeat(MAX_NVEXT_BYTES);
    assert_eq!(refused(&format!("{{\"nvext\":{{\"x\":\"{huge}\"}}}}")).field, "nvext");
}
