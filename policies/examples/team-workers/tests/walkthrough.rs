//! The walk-through shows the files of this folder as they are.

const PAGE: &str = include_str!("../../../../docs/writing-policies.md");

#[test]
fn the_page_shows_the_policy_and_its_test() {
    for file in [include_str!("../src/lib.rs"), include_str!("../src/tests.rs")] {
        assert!(PAGE.contains(&format!("```rust\n{file}```")), "docs/writing-policies.md does not show:\n{file}");
    }
}
