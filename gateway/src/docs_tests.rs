#![allow(clippy::unwrap_used, clippy::panic)]
//! The generated pages in docs/ are what the code says.

use crate::metrics::Metrics;
use std::path::Path;

#[test]
fn docs_are_fresh() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let pages = [
        ("metrics.md", Metrics::new().unwrap().document()),
        ("errors.md", crate::errors::page()),
        ("steering.md", turnstile_fleet::steering::page()),
        ("policy-reference.md", crate::policy::reference::page()),
    ];
    for (name, wanted) in pages {
        let path = docs.join(name);
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::write(&path, &wanted).unwrap();
        }
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(found == wanted, "docs/{name} is stale: run `make docs`");
    }
}
