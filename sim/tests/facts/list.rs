//! The page that lists the facts, against the tests that there are.

use std::collections::BTreeSet;

const PAGE: &str = include_str!("../../FACTS.md");

/// The facts that a test must hold the worker to.
fn wanted() -> impl Iterator<Item = usize> {
    (1..=64).chain([70, 72])
}

fn number(test: &str) -> usize {
    let digits = test.strip_prefix("fact_").and_then(|rest| rest.get(..2)).unwrap();
    digits.parse().unwrap_or_else(|_| panic!("{test} names no fact"))
}

/// The tests of this crate that are named for a fact.
fn tests() -> BTreeSet<String> {
    let dir = format!("{}/tests/facts", env!("CARGO_MANIFEST_DIR"));
    let mut tests = BTreeSet::new();
    for file in std::fs::read_dir(dir).unwrap() {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        for pair in lines.windows(2) {
            let name = pair[1].strip_prefix("async fn ").and_then(|rest| rest.split_once('(')).map(|(name, _)| name);
            if let Some(name) = name.filter(|name| name.starts_with("fact_")) {
                assert_eq!(pair[0], "#[tokio::test]", "{name} is no test");
                tests.insert(name.to_owned());
            }
        }
    }
    tests
}

#[test]
fn every_fact_has_a_test_and_stands_on_the_page() {
    let tests = tests();
    let covered: BTreeSet<usize> = tests.iter().map(|test| number(test)).collect();
    let missing: Vec<usize> = wanted().filter(|fact| !covered.contains(fact)).collect();
    assert!(missing.is_empty(), "facts without a test: {missing:?}");
    let mut listed = BTreeSet::new();
    for row in PAGE.lines().filter(|line| line.starts_with("| ") && line.contains("`fact_")) {
        let columns: Vec<&str> = row.trim_matches('|').split(" | ").map(str::trim).collect();
        let fact: usize = columns[0].parse().unwrap();
        for test in columns[2].split(", ").map(|test| test.trim_matches('`')) {
            assert_eq!(number(test), fact, "{test} stands in another fact's row");
            assert!(listed.insert(test.to_owned()), "{test} stands there twice");
        }
    }
    assert_eq!(listed, tests);
}
