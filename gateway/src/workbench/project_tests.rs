#![allow(clippy::unwrap_used)]

use super::*;
use std::collections::BTreeSet;

const LANGUAGES: [Language; 4] = [Language::Rust, Language::Go, Language::As, Language::C];

fn args(name: &str, dir: &Path) -> NewArgs {
    NewArgs { name: name.to_owned(), lang: Language::C, dir: dir.to_owned() }
}

#[test]
fn names_that_would_not_do_are_refused_and_nothing_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let long = "a".repeat(65);
    for name in ["", "-", "a-", "-a", "a--b", "A", "a_b", "a.b", "../a", "/a", "a/b", "1a", "a-1", "ä", "a b", &long] {
        let error = create(&args(name, dir.path())).unwrap_err();
        assert!(error.starts_with("NAME: expected lower-case words"), "{name}: {error}");
    }
    for name in ["match", "std", "serde", "turnstile-policy"] {
        assert!(create(&args(name, dir.path())).unwrap_err().contains("choose another"), "{name}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn nothing_is_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    create(&args("mine", dir.path())).unwrap();
    let file = dir.path().join("mine/mine.c");
    fs::write(&file, "changed").unwrap();
    assert!(create(&args("mine", dir.path())).unwrap_err().contains("is there already; nothing was changed"));
    assert_eq!(fs::read_to_string(&file).unwrap(), "changed");
    fs::write(dir.path().join("other"), "a file").unwrap();
    assert!(create(&args("other", dir.path())).unwrap_err().contains("is there already"));
    assert!(create(&args("x", &dir.path().join("nowhere"))).unwrap_err().contains("nowhere/x"));
}

#[test]
fn a_project_has_its_own_name_everywhere() {
    for language in LANGUAGES {
        for (path, content) in project("tight-fit2", language) {
            for text in [path.to_str().unwrap(), content.as_str()] {
                for name in [TEMPLATE.0, TEMPLATE.1, TEMPLATE.2] {
                    assert!(!text.contains(name), "{}: {name}", path.display());
                }
            }
        }
    }
    let rust = project("tight-fit2", Language::Rust);
    let find = |name: &str| &rust.iter().find(|(path, _)| path == Path::new(name)).unwrap().1;
    assert!(find("src/lib.rs").contains("turnstile_policy::route!(TightFit2);"));
    assert!(find("Cargo.toml").contains("name = \"tight-fit2\""));
    assert!(find("Makefile").contains("/tight_fit2.wasm"));
}

/// What a folder of the repository has, by path.
fn listed(folder: &str, extension: &str) -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../policies").join(folder);
    let mut paths = BTreeSet::new();
    let mut folders = vec![folder.clone()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|found| found == extension) {
                paths.insert(path.strip_prefix(&folder).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    assert!(!paths.is_empty());
    paths
}

#[test]
fn no_file_of_an_sdk_or_case_is_forgotten() {
    let cases = [
        (files::RUST, "sdk/src", "rs", "turnstile-policy/src/"),
        (files::RUST, "examples/warm-balance/rust/src", "rs", "src/"),
        (files::GO, "sdk-go", "go", "turnstile/"),
        (files::GO, "examples/warm-balance/go", "go", ""),
        (files::ASSEMBLY_SCRIPT, "sdk-as", "ts", "turnstile/"),
        (files::C, "sdk-c", "h", "turnstile/"),
        (files::COMMON, "examples/warm-balance/cases", "json", "cases/"),
    ];
    for (table, folder, extension, prefix) in cases {
        let own = |path: &&str| path.ends_with(extension) && (!prefix.is_empty() || !path.contains('/'));
        let in_table = table.iter().map(|(path, _)| *path).filter(own);
        let in_table: BTreeSet<String> =
            in_table.filter_map(|path| path.strip_prefix(prefix)).map(str::to_owned).collect();
        assert_eq!(in_table, listed(folder, extension), "{folder}");
    }
}
