#![allow(clippy::unwrap_used)]

use super::*;
use turnstile_policy::parse_options;

fn options(json: &str) -> Options {
    parse_options(json.as_bytes()).unwrap()
}

fn worker(index: u32, state: &str, labels: &[(&str, &str)]) -> WorkerFacts {
    let labels = labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    WorkerFacts { index, state: state.into(), labels, ..WorkerFacts::default() }
}

#[test]
fn the_first_rule_that_fits_decides() {
    let options = options(
        r#"{"rules":[{"tenant":"a","labels":{"gpu":"h200"}},{"tenant":"*","labels":{"gpu":"l40s"}},{"tenant":"b","labels":{"gpu":"h100"}}]}"#,
    );
    let gpu = |tenant| options.selector(tenant).and_then(|labels| labels.get("gpu")).map(String::as_str);
    assert_eq!(gpu(Some("a")), Some("h200"));
    assert_eq!(gpu(Some("b")), Some("l40s"));
    assert_eq!(gpu(None), Some("l40s"));
}

#[test]
fn a_tenant_without_rule_goes_anywhere() {
    let options = options(r#"{"rules":[{"tenant":"a","labels":{"gpu":"h200"}}]}"#);
    assert_eq!(options.selector(Some("b")), None);
    assert_eq!(options.selector(None), None);
}

#[test]
fn all_labels_must_match_and_only_ready_workers_count() {
    let selector = BTreeMap::from([("gpu".to_owned(), "h200".to_owned()), ("zone".to_owned(), "a".to_owned())]);
    let workers = [
        worker(0, "ready", &[("gpu", "h200"), ("zone", "a"), ("rack", "7")]),
        worker(1, "ready", &[("gpu", "h200")]),
        worker(2, "draining", &[("gpu", "h200"), ("zone", "a")]),
        worker(3, "ready", &[]),
    ];
    assert_eq!(matching(&workers, &selector), Matching { allowed: 1, excluded: vec![1, 3] });
}

#[test]
fn rules_that_could_not_do_anything_are_refused_by_name() {
    let cases = [
        (r#"{"rules":[{"labels":{"a":"b"}}]}"#, "rules[0].tenant"),
        (r#"{"rules":[{"tenant":"a","labels":{"a":"b"}},{"tenant":"a"}]}"#, "rules[1].labels"),
        (r#"{"header":""}"#, "header"),
    ];
    for (json, name) in cases {
        assert!(options(json).check().unwrap_err().contains(name), "{name}");
    }
}
