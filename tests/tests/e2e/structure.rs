//! The crates' arrows: config ← fleet ← plugins ← gateway; sim is a leaf; tests may use all.

use std::collections::BTreeMap;
use std::process::Command;

#[test]
fn crates_depend_only_along_the_arrows() {
    let allowed: BTreeMap<&str, &[&str]> = BTreeMap::from([
        ("turnstile-config", &[][..]),
        ("turnstile-fleet", &["turnstile-config"][..]),
        ("turnstile-plugins", &["turnstile-config", "turnstile-fleet"][..]),
        ("turnstile-sim", &[][..]),
        ("turnstile", &["turnstile-config", "turnstile-fleet", "turnstile-plugins", "turnstile-sim"][..]),
        (
            "turnstile-tests",
            &["turnstile", "turnstile-config", "turnstile-fleet", "turnstile-plugins", "turnstile-sim"][..],
        ),
    ]);
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline", "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    assert_eq!(packages.len(), allowed.len(), "a crate without a place in the picture");
    for package in packages {
        let name = package["name"].as_str().unwrap();
        let may = allowed.get(name).unwrap_or_else(|| panic!("{name} has no place in the picture"));
        for dependency in package["dependencies"].as_array().unwrap() {
            let on = dependency["name"].as_str().unwrap();
            if on.starts_with("turnstile") {
                assert!(may.contains(&on), "{name} must not depend on {on}");
            }
        }
    }
}
