#![allow(clippy::unwrap_used)]

use super::*;

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Sample {
    margin_ms: f64,
    rules: Vec<Rule>,
}

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Rule {
    tenant: String,
}

#[test]
fn no_text_and_an_empty_table_give_the_defaults() {
    for text in ["", "  \n", "{}"] {
        assert_eq!(parse_options::<Sample>(text.as_bytes()).unwrap(), Sample::default());
    }
}

#[test]
fn an_unknown_option_is_named_with_the_known_ones() {
    let error = parse_options::<Sample>(br#"{"marginms":1}"#).unwrap_err();
    assert_eq!(error.option, "marginms");
    assert_eq!(error.to_string(), "option `marginms`: unknown field `marginms`, expected `margin_ms` or `rules`");
}

#[test]
fn a_wrong_type_names_the_option_even_deep_inside() {
    let error = parse_options::<Sample>(br#"{"margin_ms":"much"}"#).unwrap_err();
    assert_eq!(error.to_string(), "option `margin_ms`: invalid type: string \"much\", expected f64");
    let error = parse_options::<Sample>(br#"{"rules":[{"tenant":"a"},{"tenant":7}]}"#).unwrap_err();
    assert_eq!(error.option, "rules[1].tenant");
}

#[test]
fn text_that_is_no_table_is_refused() {
    for text in ["7", "[1,2", "{} {}", "\u{0}"] {
        assert!(parse_options::<Sample>(text.as_bytes()).is_err(), "{text}");
    }
}
