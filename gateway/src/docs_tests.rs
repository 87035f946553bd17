#![allow(clippy::unwrap_used, clippy::panic)]
//! The generated pages in docs/ are what the code says.

use crate::metrics::Metrics;
use std::path::Path;

#[test]
fn docs_are_fresh() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
    let wanted = Metrics::new().unwrap().document();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &wanted).unwrap();
    }
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(found == wanted, "docs/metrics.md is stale: run `make docs`");
}
