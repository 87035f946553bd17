#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use serde_json::{Value, json};

use super::*;
use crate::body::{rewrite, scan};

fn headers(list: &[(&str, &str)]) -> HeaderMap {
    let pair = |(name, value): &(&str, &str)| {
        (HeaderName::from_bytes(name.as_bytes()).unwrap(), HeaderValue::from_str(value).unwrap())
    };
    let mut headers = HeaderMap::new();
    for (name, value) in list.iter().map(pair) {
        headers.append(name, value);
    }
    headers
}

/// Options with one line set, past what the configuration allows.
fn with(rule: Rule, action: Action) -> SteeringOptions {
    let mut options = SteeringOptions::default();
    options.actions[rule as usize] = action;
    options.refuses_headers = true;
    options
}

/// What the worker gets of a body, or the field at fault.
fn sent(route: Route, body: &str, list: &[(&str, &str)], options: &SteeringOptions) -> Result<String, String> {
    let members = scan(&Bytes::copy_from_slice(body.as_bytes())).unwrap();
    let steered = steer(route, &headers(list), &members, None, options).map_err(|error| error.field)?;
    Ok(String::from_utf8(rewrite(&members, &steered.edits).to_vec()).unwrap())
}

fn reading(rule: Rule) -> Route {
    Route::ALL.into_iter().find(|route| rule.is_read(*route)).unwrap()
}

#[test]
fn the_table_has_a_line_for_each_rule_in_order_and_no_field_twice() {
    assert_eq!(ROWS.len(), Rule::COUNT);
    let mut seen = std::collections::HashSet::new();
    for (at, row) in ROWS.iter().enumerate() {
        assert_eq!(row.rule as usize, at, "{:?}", row.rule);
        for field in row.members.iter().chain(row.headers) {
            assert!(seen.insert(*field), "{field} twice");
        }
        for member in row.members {
            assert_eq!(of_member(member), Some((*member, row.rule)));
        }
        for header in row.headers {
            assert_eq!(of_header(&header.replace('*', "rid")), Some(row.rule), "{header}");
        }
    }
}

#[test]
fn the_defaults_of_the_configuration_are_the_first_choices_of_the_table() {
    let options = SteeringOptions::default();
    let config = serde_json::to_value(Steering::default()).unwrap();
    for row in ROWS {
        let first = row.rule.choices()[0];
        assert_eq!(options.action(row.rule), first, "{:?}", row.rule);
        if !row.key.is_empty() {
            assert_eq!(config[row.key], first.name(), "{}", row.key);
        }
    }
    let keys = ROWS.iter().filter(|row| !row.key.is_empty()).count();
    assert_eq!(config.as_object().unwrap().len(), keys + 1, "each option is in the table, but `credentials`");
}

#[test]
fn each_choice_can_be_configured_and_no_other() {
    for row in ROWS.iter().filter(|row| !row.key.is_empty()) {
        for action in [Action::Pass, Action::Drop, Action::Refuse, Action::Scope, Action::Isolate, Action::Take] {
            let config = serde_json::from_value::<Steering>(json!({ row.key: action.name() }));
            let allowed = row.rule.choices().contains(&action);
            assert_eq!(config.is_ok(), allowed, "{} = {}", row.key, action.name());
            if let Ok(config) = config {
                assert_eq!(SteeringOptions::from_config(&config).action(row.rule), action);
            }
        }
    }
}

#[test]
fn a_dropped_member_does_not_reach_the_worker_whatever_its_type() {
    for row in ROWS.iter().filter(|row| row.rule.choices().contains(&Action::Drop)) {
        let options = with(row.rule, Action::Drop);
        for member in row.members {
            let route = if *member == "request_id" { Route::Responses } else { reading(row.rule) };
            for value in ["\"x\"", "1", "null", "[\"x\",null]", "{\"a\":[1]}", "true"] {
                let body = format!("{{\"keep\": 1.0e0 ,\"{member}\":{value},\"too\":[ ]}}");
                assert_eq!(sent(route, &body, &[], &options).unwrap(), "{\"keep\": 1.0e0,\"too\":[ ]}", "{member}");
            }
        }
    }
}

#[test]
fn a_refused_member_is_named_where_the_worker_reads_it_and_null_asks_for_nothing() {
    for row in ROWS.iter().filter(|row| row.rule.choices().contains(&Action::Refuse)) {
        let options = with(row.rule, Action::Refuse);
        for member in row.members.iter().filter(|member| **member != "request_id") {
            for route in Route::ALL {
                let found = sent(route, &format!("{{\"{member}\":\"x\"}}"), &[], &options);
                if row.rule.is_read(route) {
                    assert_eq!(found, Err((*member).to_owned()), "{route}");
                } else {
                    assert_eq!(found, Ok("{}".to_owned()), "{member} on {route}");
                }
                assert_eq!(sent(route, &format!("{{\"{member}\":null}}"), &[], &options), Ok("{}".to_owned()));
            }
        }
        for header in row.headers {
            let name = header.replace('*', "any");
            assert_eq!(sent(Route::Messages, "{}", &[(&name, "1")], &options), Err(name.clone()));
        }
    }
}

#[test]
fn a_passed_field_is_left_as_it_came() {
    for row in ROWS.iter().filter(|row| row.rule.choices().contains(&Action::Pass)) {
        let options = with(row.rule, Action::Pass);
        for member in row.members {
            let body = format!("{{ \"{member}\":\"\\u0061\" }}");
            assert_eq!(sent(Route::Chat, &body, &[], &options).unwrap(), body);
        }
        for header in row.headers.iter().filter(|header| **header != TENANT_ID) {
            assert!(!options.stops(&header.replace('*', "any")), "{header}");
        }
    }
}

#[test]
fn headers_end_here_unless_passed() {
    let options = SteeringOptions::default();
    for name in [
        "x-override-rid",
        "x-override-",
        "x-turnstile-worker",
        "x-data-parallel-rank",
        "x-smg-routing-key",
        "x-dynamo-worker-instance-id",
        "x-tenant-id",
    ] {
        assert!(options.stops(name), "{name}");
    }
    for name in ["x-custom-labels", "x-session-id", "traceparent", "content-type", "x-sglext-ids-framed", "x-smgx"] {
        assert!(!options.stops(name), "{name}");
    }
}

#[test]
fn escapes_and_repeated_keys_do_not_get_around_the_table() {
    let options = SteeringOptions::default();
    let drop = |body: &str| sent(Route::Chat, body, &[], &options).unwrap();
    assert_eq!(drop(r#"{"r\u0069d":"x","a":1,"rid":"y","\u0072id":[]}"#), r#"{"a":1}"#);
    let refuse = |body: &str| sent(Route::Generate, body, &[], &options);
    assert_eq!(refuse(r#"{"session\u005fparams":{"id":"s"}}"#), Err("session_params".into()));
    // The last one counts, for the worker too; all of them go.
    assert_eq!(refuse(r#"{"session_params":null,"session_params":{}}"#), Err("session_params".into()));
    assert_eq!(refuse(r#"{"session_params":{},"session_params":null,"a":1}"#), Ok(r#"{"a":1}"#.into()));
    let scoped: Value = serde_json::from_str(&drop(r#"{"cache_s\u0061lt":"x","cache_salt":"y","a":1}"#)).unwrap();
    assert_eq!(scoped.as_object().unwrap().len(), 2);
    assert_eq!(scoped["cache_salt"], salt_of(r#"{"cache_salt":"y"}"#, &[])["cache_salt"]);
}

fn salt_of(body: &str, list: &[(&str, &str)]) -> Value {
    serde_json::from_str(&sent(Route::Chat, body, list, &SteeringOptions::default()).unwrap()).unwrap()
}

#[test]
fn a_namespace_is_one_of_its_credential() {
    let (a, b) = (("authorization", "Bearer a"), ("authorization", "Bearer b"));
    for key in ["cache_salt", "extra_key"] {
        let body = format!("{{\"{key}\":\"x\"}}");
        let mine = salt_of(&body, &[a])[key].clone();
        assert_eq!(mine.as_str().unwrap().len(), 32);
        assert_eq!(salt_of(&body, &[("x-api-key", "a")])[key], mine, "the same credential by another header");
        for other in [salt_of(&body, &[b]), salt_of(&body, &[]), salt_of(&format!("{{\"{key}\":\"y\"}}"), &[a])] {
            assert_ne!(other[key], mine);
        }
        // Whoever sends another's digest gets a digest of it.
        let forged = format!("{{\"{key}\":{mine}}}");
        assert_ne!(salt_of(&forged, &[b])[key], mine);
        assert_ne!(salt_of(&forged, &[])[key], mine);
    }
    assert_ne!(salt_of(r#"{"cache_salt":"x"}"#, &[])["cache_salt"], salt_of(r#"{"extra_key":"x"}"#, &[])["extra_key"]);
}

#[test]
fn a_namespace_stays_the_same_from_one_start_to_the_next() {
    let salt = salt_of(r#"{"cache_salt":"x"}"#, &[("authorization", "Bearer a")]);
    assert_eq!(salt["cache_salt"], "ea02f6f6b1db1ff63b2ed39bb1558d80");
}

#[test]
fn a_batch_has_a_namespace_for_each_prompt() {
    let one = salt_of(r#"{"cache_salt":"x"}"#, &[])["cache_salt"].clone();
    let list = salt_of(r#"{"cache_salt":["x","",null,"y","x"]}"#, &[])["cache_salt"].clone();
    assert_eq!((&list[0], &list[1], &list[2], &list[4]), (&one, &json!(""), &json!(""), &one));
    assert_ne!(list[3], one);
    assert_eq!(salt_of(r#"{"cache_salt":"","a":1}"#, &[]), json!({"cache_salt": "", "a": 1}));
    for wrong in ["1", "{}", "[1]", "true", "[[\"x\"]]"] {
        let found = sent(Route::Chat, &format!("{{\"cache_salt\":{wrong}}}"), &[], &SteeringOptions::default());
        assert_eq!(found, Err("cache_salt".into()), "{wrong}");
    }
}

#[test]
fn dynamos_names_for_a_namespace_come_in_its_order_and_are_scoped_too() {
    let body = scan(&Bytes::from_static(br#"{"cache_salt":"c"}"#)).unwrap();
    let salt = |route, list: &[(&str, &str)], nvext| {
        let steered = steer(route, &headers(list), &body, nvext, &SteeringOptions::default()).unwrap();
        String::from_utf8(steered.cache_salt.unwrap()).unwrap()
    };
    let plain = |text: &str| format!("\"{}\"", digest("cache_salt", None, text));
    assert_eq!(salt(Route::Chat, &[("x-tenant-id", "a")], Some("b")), plain("a"));
    assert_eq!(salt(Route::Chat, &[("x-tenant-id", "z"), ("x-tenant-id", " a ")], Some("b")), plain("a"));
    assert_eq!(salt(Route::Chat, &[("x-tenant-id", "")], Some("b")), plain("b"));
    assert_eq!(salt(Route::Chat, &[], Some("")), plain("c"));
    // Messages takes no namespace, so a name from elsewhere is not put into its body.
    assert_eq!(salt(Route::Messages, &[("x-tenant-id", "a")], Some("b")), plain("c"));
}

#[test]
fn isolation_gives_each_credential_a_namespace_without_being_asked() {
    let options = with(Rule::CacheSalt, Action::Isolate);
    let salt = |body: &str, list: &[(&str, &str)]| -> Value {
        serde_json::from_str::<Value>(&sent(Route::Chat, body, list, &options).unwrap()).unwrap()["cache_salt"].clone()
    };
    let (a, b) = ([("authorization", "Bearer a")], [("authorization", "Bearer b")]);
    assert_ne!(salt("{}", &a), salt("{}", &b));
    assert_eq!(salt("{}", &a), salt(r#"{"cache_salt":null}"#, &a));
    assert_eq!(salt("{}", &a), salt(r#"{"cache_salt":["",null]}"#, &a)[1]);
    assert_ne!(salt("{}", &a), salt(r#"{"cache_salt":"x"}"#, &a));
    assert_eq!(salt("{}", &[]), Value::Null);
    assert_eq!(sent(Route::Messages, "{}", &a, &options).unwrap(), "{}");
}

#[test]
fn what_was_met_is_told_once() {
    let body = scan(&Bytes::from_static(br#"{"rid":"a","rid":"b","cache_salt":"x","lora_path":"l","kv_hints":null}"#))
        .unwrap();
    let steered = steer(Route::Chat, &HeaderMap::new(), &body, None, &SteeringOptions::default()).unwrap();
    assert_eq!(steered.met, [(Rule::Rid, Action::Drop), (Rule::CacheSalt, Action::Scope)]);
}

#[test]
fn a_trusting_table_changes_nothing() {
    let body = r#"{"rid":"a","session_params":{},"cache_salt":[1],"priority":"x"}"#;
    assert_eq!(sent(Route::Generate, body, &[], &SteeringOptions::trusting()).unwrap(), body);
}
