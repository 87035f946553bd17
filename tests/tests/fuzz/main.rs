//! The fuzz targets, run over their committed corpus and over mutations of it. The mutations are the same in every run; the
//! long runs with libFuzzer, which find new inputs, are `make fuzz`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

#[path = "../../../fuzz/src/lib.rs"]
mod targets;

mod mutate;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use mutate::Mutations;

/// Mutations of one target's corpus. A run takes a few seconds.
const MUTATIONS: usize = 4_000;

/// Runs a target over its corpus and mutations of it. A failure names the input.
fn hold(name: &str, dictionary: &str, target: fn(&[u8])) {
    let fuzz = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz"));
    let mut paths: Vec<_> =
        fuzz.join("corpus").join(name).read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "{name} has no corpus");
    let corpus: Vec<Vec<u8>> = paths.iter().map(|path| std::fs::read(path).unwrap()).collect();
    let words = mutate::words(&std::fs::read_to_string(fuzz.join("dictionaries").join(dictionary)).unwrap());
    for (path, input) in paths.iter().zip(&corpus) {
        let held = catch_unwind(AssertUnwindSafe(|| target(input)));
        assert!(held.is_ok(), "{name} fails on {}", path.display());
    }
    for input in Mutations::new(&corpus, &words).take(MUTATIONS) {
        let held = catch_unwind(AssertUnwindSafe(|| target(&input)));
        assert!(held.is_ok(), "{name} fails on b\"{}\"", input.escape_ascii());
    }
}

#[test]
fn body_scan() {
    hold("body_scan", "body.dict", targets::body_scan);
}

#[test]
fn body_rewrite() {
    hold("body_rewrite", "body.dict", targets::body_rewrite);
}

#[test]
fn sse_observe() {
    hold("sse_observe", "sse.dict", targets::sse_observe);
}

#[test]
fn identity() {
    hold("identity", "body.dict", targets::identity);
}

#[test]
fn understand() {
    hold("understand", "body.dict", targets::understand);
}

#[test]
fn config() {
    hold("config", "config.dict", targets::config);
}

#[test]
fn hostcalls() {
    hold("hostcalls", "hostcalls.dict", targets::hostcalls);
}

#[test]
fn snapshot() {
    hold("snapshot", "body.dict", targets::snapshot);
}

/// `make fuzz` and the tests run the same targets, each with a corpus.
#[test]
fn every_target_is_tested() {
    let fuzz = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../fuzz"));
    let names = |dir: &str| {
        let entries = fuzz.join(dir).read_dir().unwrap();
        let mut names: Vec<String> =
            entries.map(|e| e.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned()).collect();
        names.sort();
        names
    };
    let targets = names("fuzz_targets");
    assert_eq!(targets, names("corpus"));
    let tests = include_str!("main.rs");
    for target in targets {
        assert!(tests.contains(&format!("hold(\"{target}\"")), "{target} is not tested");
    }
}
