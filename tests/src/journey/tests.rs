use super::steps::commands;
use super::{configuration, language::Language};
use std::path::Path;

/// The guide, read from this repository.
fn guide() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/writing-policies.md");
    std::fs::read_to_string(path).unwrap_or_default()
}

#[test]
fn the_guide_has_every_command_of_the_journey() {
    let guide = guide();
    let new = format!("{} {}", commands::NEW, Language::Go.name());
    for command in [
        &new,
        commands::BUILD,
        commands::TEST,
        commands::CHECK,
        commands::CASES,
        commands::BENCH,
        commands::DEPLOY,
        commands::SELF_TEST,
        commands::CHECK_CONFIG,
        commands::EXPLAIN,
        commands::ROLLBACK,
    ] {
        let there = guide.lines().any(|line| line.split("  #").next().unwrap_or_default().trim() == command);
        assert!(there, "docs/writing-policies.md has no line {command:?}");
    }
    for language in Language::ALL {
        assert!(guide.contains(&format!("| `{}` |", language.name())), "{}", language.name());
    }
}

#[test]
fn the_guide_has_every_table_of_the_journey() {
    let guide = guide();
    for table in [configuration::BUILT_IN, configuration::FORMER, configuration::NEW] {
        assert!(guide.contains(table), "docs/writing-policies.md has no {table}");
    }
    for line in [configuration::SHADOW, configuration::CANARY] {
        assert!(guide.contains(&format!("\n{line}")), "docs/writing-policies.md has no {line}");
    }
}
