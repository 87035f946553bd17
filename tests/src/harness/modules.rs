//! The policies' modules, and how a running gateway's is replaced.

use std::path::{Path, PathBuf};

/// A module by its name below `policies/dist`, such as `tenant-labels` or `test/hello`; from `TURNSTILE_POLICIES_DIR` when
/// that is set.
pub fn module(name: &str) -> PathBuf {
    let committed = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../policies/dist");
    let dir = std::env::var_os("TURNSTILE_POLICIES_DIR").map_or_else(committed, PathBuf::from);
    let path = dir.join(format!("{name}.wasm"));
    assert!(path.is_file(), "no module {}", path.display());
    path
}

/// Replaces a file as an editor or a deployment does: written beside it, then renamed over it.
pub fn swap(path: &Path, bytes: impl AsRef<[u8]>) {
    let beside = path.with_extension("new");
    std::fs::write(&beside, bytes).unwrap();
    std::fs::rename(&beside, path).unwrap();
}
