#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;

use super::*;

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Sample {
    margin_ms: f64,
    tier: u32,
    level: i64,
    deadline_ms: Option<u64>,
    mode: Mode,
    rules: Vec<Rule>,
}

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Mode {
    #[default]
    Auto,
    Fixed,
}

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    tenant: String,
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

fn error(text: &str) -> String {
    parse_options::<Sample>(text.as_bytes()).unwrap_err().to_string()
}

#[test]
fn no_text_and_an_empty_table_give_the_defaults() {
    for text in ["", "  \n", "{}"] {
        assert_eq!(parse_options::<Sample>(text.as_bytes()).unwrap(), Sample::default());
    }
}

#[test]
fn every_kind_of_option_is_read() {
    let text = r#"{"margin_ms":5,"tier":3,"level":-7,"deadline_ms":900,"mode":"fixed",
        "rules":[{"tenant":"a","labels":{"gpu":"h200"}},{"tenant":"b"}]}"#;
    let rule = |tenant: &str, labels: &[(&str, &str)]| Rule {
        tenant: tenant.into(),
        labels: labels.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect(),
    };
    let expected = Sample {
        margin_ms: 5.0,
        tier: 3,
        level: -7,
        deadline_ms: Some(900),
        mode: Mode::Fixed,
        rules: vec![rule("a", &[("gpu", "h200")]), rule("b", &[])],
    };
    assert_eq!(parse_options::<Sample>(text.as_bytes()).unwrap(), expected);
    assert_eq!(parse_options::<Sample>(br#"{"deadline_ms":null}"#).unwrap(), Sample::default());
}

#[test]
fn an_unknown_option_is_named_with_the_known_ones() {
    assert_eq!(
        error(r#"{"marginms":1}"#),
        "option `marginms`: unknown; known are margin_ms, tier, level, deadline_ms, mode, rules"
    );
    assert_eq!(
        error(r#"{"rules":[{"tenant":"a","label":{}}]}"#),
        "option `rules[0].label`: unknown; known are tenant, labels"
    );
    let error = parse_options::<NoOptions>(br#"{"a":1}"#).unwrap_err();
    assert_eq!(error.to_string(), "option `a`: unknown; there are no options");
}

#[test]
fn a_wrong_value_names_the_option_even_deep_inside() {
    let cases = [
        (r#"{"margin_ms":"much"}"#, "option `margin_ms`: expected f64, found a text"),
        (r#"{"tier":1.5}"#, "option `tier`: expected u32, found a number with a fraction"),
        (r#"{"tier":-1}"#, "option `tier`: expected u32, found -1"),
        (r#"{"tier":4294967296}"#, "option `tier`: expected u32, found 4294967296"),
        (r#"{"deadline_ms":true}"#, "option `deadline_ms`: expected u64, found a boolean"),
        (r#"{"mode":"free"}"#, "option `mode`: \"free\" is none of auto, fixed"),
        (r#"{"mode":7}"#, "option `mode`: expected one of auto, fixed, found a number"),
        (
            r#"{"rules":[{"tenant":"a"},{"tenant":7}]}"#,
            "option `rules[1].tenant`: expected a string, found a whole number",
        ),
        (r#"{"rules":[{}]}"#, "option `rules[0].tenant`: missing"),
        (
            r#"{"rules":[{"tenant":"a","labels":{"gpu":[]}}]}"#,
            "option `rules[0].labels.gpu`: expected a string, found a list",
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(error(text), expected);
    }
}

#[test]
fn text_that_is_no_table_is_refused() {
    assert_eq!(error("7"), "configuration: expected a table, found a number");
    assert_eq!(error("[]"), "configuration: expected a table, found a list");
    for text in ["{", "{} {}", "\u{0}", "{\"a\":}"] {
        assert!(error(text).starts_with("configuration: not JSON"), "{text}");
    }
    assert!(parse_options::<Sample>(&[0xff]).is_err());
}
