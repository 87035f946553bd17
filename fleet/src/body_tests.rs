#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;

use super::*;

fn members(text: &str) -> Members {
    scan(&Bytes::copy_from_slice(text.as_bytes())).unwrap()
}

fn refused(body: &[u8]) -> BodyError {
    scan(&Bytes::copy_from_slice(body)).unwrap_err()
}

fn edited(text: &str, edits: &Edits) -> String {
    String::from_utf8(rewrite(&members(text), edits).to_vec()).unwrap()
}

#[test]
fn members_are_found_with_their_bytes() {
    let found = members(" {\"a\" : 1.50e+3 ,\n \"b\":[1,{\"a\":2}], \"c\":\"x\\\"y\"} ");
    assert_eq!(found.keys().collect::<Vec<_>>(), ["a", "b", "c"]);
    assert_eq!(found.raw("a").unwrap(), b"1.50e+3");
    assert_eq!(found.raw("b").unwrap(), b"[1,{\"a\":2}]");
    assert_eq!(found.string("c").unwrap(), "x\"y");
    assert_eq!(found.raw("d"), None);
}

#[test]
fn a_key_written_with_escapes_is_the_same_key() {
    let text = r#"{"n\u0076ext":{"a":1},"\u006dodel":"m"}"#;
    assert!(members(text).contains("nvext"));
    assert_eq!(members(text).string("model").unwrap(), "m");
    assert_eq!(edited(text, Edits::new().remove("nvext")), r#"{"\u006dodel":"m"}"#);
}

#[test]
fn of_equal_keys_the_last_is_read_and_all_are_removed() {
    let text = r#"{"a":1,"b":2,"a":3,"\u0061":4}"#;
    assert_eq!(members(text).raw("a").unwrap(), b"4");
    assert_eq!(edited(text, Edits::new().remove("a")), r#"{"b":2}"#);
    assert_eq!(edited(text, Edits::new().set("a", "9")), r#"{"b":2,"\u0061":9}"#);
}

#[test]
fn removal_takes_one_comma_wherever_the_member_stands() {
    let text = "{ \"a\":1 , \"b\":2 , \"c\":3 }";
    assert_eq!(edited(text, Edits::new().remove("a")), "{ \"b\":2 , \"c\":3 }");
    assert_eq!(edited(text, Edits::new().remove("b")), "{ \"a\":1 , \"c\":3 }");
    assert_eq!(edited(text, Edits::new().remove("c")), "{ \"a\":1 , \"b\":2 }");
    assert_eq!(edited(text, Edits::new().remove("a").remove("b")), "{ \"c\":3 }");
    assert_eq!(edited(text, Edits::new().remove("b").remove("c")), "{ \"a\":1 }");
    assert_eq!(edited(text, Edits::new().remove("a").remove("b").remove("c")), "{  }");
}

#[test]
fn set_replaces_in_place_or_appends() {
    assert_eq!(edited(r#"{"a": 1,"b":2}"#, Edits::new().set("a", "[]")), r#"{"a": [],"b":2}"#);
    assert_eq!(edited(r#"{"a":1}"#, Edits::new().set("b", "2").set("c", "3")), r#"{"a":1,"b":2,"c":3}"#);
    assert_eq!(edited("{}", Edits::new().set("b", "2").set_string("c", "x\"")), r#"{"b":2,"c":"x\""}"#);
    assert_eq!(edited("{ }", Edits::new().set("b", "2")), r#"{"b":2 }"#);
    assert_eq!(edited(r#"{"a":1}"#, Edits::new().remove("a").set("b", "2")), r#"{"b":2}"#);
    assert_eq!(edited(r#"{"a":1}"#, Edits::new().set("a", "2").remove("a")), "{}");
}

#[test]
fn a_body_without_applicable_edits_is_the_same_buffer() {
    let body = Bytes::from_static(b"{\"a\":1}");
    let out = rewrite(&scan(&body).unwrap(), Edits::new().remove("nvext"));
    assert_eq!(out.as_ptr(), body.as_ptr());
}

#[test]
fn numbers_of_any_size_keep_their_spelling() {
    let number = "9".repeat(5000);
    let text = format!("{{\"seed\":{number},\"t\":1e999999,\"u\":-0.0,\"nvext\":{{}}}}");
    let out = edited(&text, Edits::new().remove("nvext"));
    assert_eq!(out, format!("{{\"seed\":{number},\"t\":1e999999,\"u\":-0.0}}"));
    assert_eq!(members(&text).unsigned("seed"), None);
}

#[test]
fn depth_has_no_limit() {
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let text = format!("{{\"messages\":{deep},\"nvext\":{deep}}}");
    assert_eq!(edited(&text, Edits::new().remove("nvext")), format!("{{\"messages\":{deep}}}"));
    let unclosed = format!("{{\"messages\":{}", "[{\"a\":".repeat(100_000));
    assert_eq!(refused(unclosed.as_bytes()).kind, BodyErrorKind::NotJson);
}

#[test]
fn what_is_no_object_is_refused_in_plain_words() {
    for (body, kind, words) in [
        (&b""[..], BodyErrorKind::NotJson, "empty"),
        (b" \n", BodyErrorKind::NotJson, "empty"),
        (b"[1]", BodyErrorKind::NotObject, "not an object"),
        (b"null", BodyErrorKind::NotObject, "not an object"),
        (b"\"x\"", BodyErrorKind::NotObject, "not an object"),
        (b"{\"a\":1", BodyErrorKind::NotJson, "not valid JSON"),
        (b"{\"a\":1}x", BodyErrorKind::NotJson, "not valid JSON"),
        (b"{\"a\":1}{}", BodyErrorKind::NotJson, "not valid JSON"),
        (b"{'a':1}", BodyErrorKind::NotJson, "not valid JSON"),
        (b"{\"a\":01}", BodyErrorKind::NotJson, "not valid JSON"),
        (b"{\"a\":NaN}", BodyErrorKind::NotJson, "not valid JSON"),
        (b"{\"a\":1,}", BodyErrorKind::NotJson, "not valid JSON"),
        (b"{\"a\":\"x\0\"}", BodyErrorKind::NotJson, "not valid JSON"),
        (b"{\"a\":1}\0", BodyErrorKind::NotJson, "not valid JSON"),
        (b"{\"\\ud800\":1}", BodyErrorKind::NotJson, "not valid JSON"),
        (b"\xEF\xBB\xBF{}", BodyErrorKind::NotJson, "byte order mark"),
        (b"{\"a\":\"\xff\"}", BodyErrorKind::NotJson, "not valid UTF-8 (at byte 6)"),
        (b"{\"\xc3\":1}", BodyErrorKind::NotJson, "not valid UTF-8"),
        (b"\xff\xfe{\0}\0", BodyErrorKind::NotJson, "not valid UTF-8"),
    ] {
        let error = refused(body);
        assert_eq!(error.kind, kind, "{body:?}");
        assert!(error.message.contains(words), "{body:?}: {}", error.message);
        assert_eq!(error.field, "");
    }
}

#[test]
fn a_refusal_never_quotes_the_body() {
    let secret = "secret ".repeat(1000);
    for text in [
        format!("\"{secret}\" x"),
        format!("\"{secret}"),
        format!("[\"{secret}\"] x"),
        format!("{{\"{secret}\":1"),
        format!("{{\"{secret}\":x}}"),
        format!("{{\"a\":\"{secret}\"x}}"),
        format!("{{\"a\":1}}{secret}"),
    ] {
        let message = refused(text.as_bytes()).message;
        assert!(!message.contains("secret") && message.len() < 200, "{message}");
    }
}

#[test]
fn a_body_of_too_many_members_is_refused() {
    let many = |count: usize| format!("{{{}}}", vec!["\"a\":1"; count].join(","));
    assert_eq!(members(&many(MAX_MEMBERS)).len(), MAX_MEMBERS);
    assert_eq!(refused(many(MAX_MEMBERS + 1).as_bytes()).kind, BodyErrorKind::TooManyMembers);
}

#[test]
fn booleans_are_read_as_the_engine_reads_them() {
    for (value, truth) in [
        ("true", true),
        ("false", false),
        ("1", true),
        ("0", false),
        ("\"yes\"", true),
        ("\"TRUE\"", true),
        ("\"no\"", false),
        ("null", false),
        ("[]", false),
        ("2", false),
    ] {
        assert_eq!(members(&format!("{{\"stream\":{value}}}")).truthy("stream"), truth, "{value}");
    }
}

fn key() -> impl Strategy<Value = String> {
    // As written between the quotes; several spell the same key.
    prop::sample::select(vec!["a", "b", "nvext", "n\\u0076ext", "\\u0061", "model", "é", "", "x\\\"y", "rid"])
        .prop_map(String::from)
}

fn value() -> impl Strategy<Value = String> {
    prop::sample::select(vec![
        "1",
        "-0.0",
        "1e400",
        "null",
        "true",
        "\"\"",
        "\"a,b\"",
        "\"\\\"},{\\\"\"",
        "[]",
        "[ 1 , {\"nvext\":2} ]",
        "{\"a\":{\"b\":\"}\"}}",
        "{ }",
        "\"\\ud83d\\ude00\"",
        "\"ü\"",
    ])
    .prop_map(String::from)
}

fn space() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["", "", " ", "\n\t", "\r\n  "]).prop_map(String::from)
}

fn decoded(key: &str) -> String {
    serde_json::from_str(&format!("\"{key}\"")).unwrap()
}

proptest! {
    #[test]
    fn rewriting_changes_the_named_members_and_no_other_byte(
        parts in prop::collection::vec((key(), value(), space(), space(), space(), space()), 0..8),
        outside in (space(), space(), space()),
        edits in prop::collection::vec((prop::sample::select(vec!["a", "nvext", "é", "rid", "new"]), prop::option::of(value())), 0..4),
    ) {
        let written: Vec<String> =
            parts.iter().map(|(k, v, w, x, y, z)| format!("{w}\"{k}\"{x}:{y}{v}{z}")).collect();
        let body = format!("{}{{{}{}}}{}", outside.0, outside.1, written.join(","), outside.2);
        let scanned = members(&body);
        prop_assert_eq!(scanned.len(), parts.len());

        let mut asked = Edits::new();
        let mut wanted: Vec<(&str, Option<&str>)> = Vec::new();
        for (key, value) in &edits {
            match value {
                Some(value) => asked.set(*key, value.clone()),
                None => asked.remove(*key),
            };
            wanted.retain(|(k, _)| k != key);
            wanted.push((key, value.as_deref()));
        }
        // The model: members as (key, raw) pairs. Kept ones stay in order; a set key stands where its last one stood.
        let mut model: Vec<(String, String)> = Vec::new();
        let keys: Vec<String> = parts.iter().map(|p| decoded(&p.0)).collect();
        for (index, part) in parts.iter().enumerate() {
            let key = &keys[index];
            let is_last = !keys[index + 1..].contains(key);
            match wanted.iter().find(|(k, _)| k == key) {
                None => model.push((key.clone(), part.1.clone())),
                Some((_, Some(value))) if is_last => model.push((key.clone(), (*value).to_owned())),
                Some(_) => {}
            }
        }
        for (key, _) in &edits {
            if !keys.iter().any(|k| k == key)
                && let Some((_, Some(value))) = wanted.iter().find(|(k, _)| k == key)
                && !model.iter().any(|(k, _)| k == key)
            {
                model.push(((*key).to_owned(), (*value).to_owned()));
            }
        }
        let out = rewrite(&scanned, &asked);
        let rescanned = scan(&out).unwrap();
        let got: Vec<(String, String)> = (0..rescanned.len())
            .map(|i| {
                let m = &rescanned.list[i];
                (rescanned.keys().nth(i).unwrap().to_owned(), String::from_utf8(out[m.value..m.end].to_vec()).unwrap())
            })
            .collect();
        // Appended members come in the order of the edits; the model lists them so too, up to repeats.
        let kept = model.iter().filter(|(k, _)| keys.contains(k)).count();
        prop_assert_eq!(&got[..kept], &model[..kept]);
        let (mut got_new, mut model_new) = (got[kept..].to_vec(), model[kept..].to_vec());
        got_new.sort();
        model_new.sort();
        prop_assert_eq!(got_new, model_new);

        // Byte for byte: what is not touched is a copy.
        let touched = keys.iter().any(|k| wanted.iter().any(|(w, _)| w == k)) || model.len() > kept;
        if !touched {
            prop_assert_eq!(&out[..], body.as_bytes());
        }
        let pieces: Vec<String> = parts
            .iter()
            .enumerate()
            .filter(|(i, _)| !wanted.iter().any(|(w, _)| *w == keys[*i]))
            .map(|(_, (k, v, _, x, y, _))| format!("\"{k}\"{x}:{y}{v}"))
            .collect();
        let text = String::from_utf8(out.to_vec()).unwrap();
        let mut at = 0;
        for piece in pieces {
            at += text[at..].find(&piece).unwrap() + piece.len();
        }
        // And a parser agrees.
        let parsed: serde_json::Map<String, serde_json::Value> = match serde_json::from_slice(&out) {
            Ok(parsed) => parsed,
            // Numbers outside f64 are JSON, but no value of the model.
            Err(error) => {
                prop_assert!(error.to_string().contains("number out of range"));
                return Ok(());
            }
        };
        for (key, raw) in &model {
            prop_assert!(parsed.contains_key(key), "{} is lost", key);
            if let (Ok(value), true) = (serde_json::from_str::<serde_json::Value>(raw), model.iter().filter(|(k, _)| k == key).count() == 1) {
                prop_assert_eq!(&parsed[key], &value);
            }
        }
        prop_assert!(parsed.keys().all(|k| model.iter().any(|(m, _)| m == k)));
    }

    #[test]
    fn scanning_agrees_with_a_parser_on_any_bytes(body in prop::collection::vec(prop::sample::select(b"{}[]\",:\\u0a1e-. \n\xc3\xa9\xff".to_vec()), 0..24)) {
        let body = [&b"{"[..], &body].concat();
        let scanned = scan(&Bytes::copy_from_slice(&body));
        match serde_json::from_slice::<serde_json::Value>(&body) {
            Ok(value) => prop_assert_eq!(scanned.is_ok(), value.is_object()),
            Err(_) => {
                // The scan is laxer only inside values: lone surrogates and numbers without a value.
                if let Ok(members) = scanned {
                    let text = std::str::from_utf8(members.body()).unwrap();
                    prop_assert!(text.contains("\\u") || text.contains(['e', 'E']));
                }
            }
        }
    }
}
