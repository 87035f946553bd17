//! The cache of compiled modules, as a restart sees it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use turnstile_plugins::{Plugin, Runtime, RuntimeOptions, SharedState};

use crate::rig::Guest;

fn runtime(dir: &Path) -> Runtime {
    Runtime::new(RuntimeOptions { cache_dir: Some(dir.to_owned()), ..RuntimeOptions::default() }).unwrap()
}

/// Starts a plugin on a new runtime and tells how many modules were compiled and how many loaded.
fn start(dir: &Path) -> (u64, u64) {
    let runtime = runtime(dir);
    Plugin::start(&runtime, Guest::new("").spec(), Arc::new(SharedState::default())).unwrap();
    runtime.module_counts()
}

#[test]
fn a_module_is_compiled_once_and_loaded_after() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("made/for/it");
    assert_eq!(start(&dir), (1, 0));
    assert_eq!(start(&dir), (0, 1));
    assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
    for entry in fs::read_dir(&dir).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(entry.metadata().unwrap().permissions().mode() & 0o077, 0, "{entry:?}");
    }
}

#[test]
fn a_file_that_changed_is_refused_and_compiled_again() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("cache");
    start(&dir);
    let compiled = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path());
    let compiled = compiled.filter(|path| path.extension().unwrap() == "cwasm").collect::<Vec<_>>();
    let [file] = compiled.as_slice() else { panic!("{compiled:?}") };
    let good = fs::read(file).unwrap();

    let mut flipped = good.clone();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 1;
    for bad in [flipped, good[..good.len() - 1].to_vec(), Vec::new()] {
        fs::write(file, bad).unwrap();
        assert_eq!(start(&dir), (1, 0));
        assert_eq!(fs::read(file).unwrap(), good, "whole again");
    }
    fs::set_permissions(file, fs::Permissions::from_mode(0o666)).unwrap();
    assert_eq!(start(&dir), (1, 0), "a file that others can write is not trusted");
    fs::remove_file(file.with_extension("sha256")).unwrap();
    assert_eq!(start(&dir), (1, 0), "nor one without a checksum");
    let elsewhere = parent.path().join("elsewhere");
    fs::rename(file, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, file).unwrap();
    assert_eq!(start(&dir), (1, 0), "nor a link");
    assert_eq!(start(&dir), (0, 1));
}

#[test]
fn a_directory_that_others_can_enter_is_not_used() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("cache");
    fs::create_dir(&dir).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(start(&dir), (1, 0));
    assert_eq!(start(&dir), (1, 0));
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
}
