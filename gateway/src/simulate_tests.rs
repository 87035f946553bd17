#![allow(clippy::unwrap_used)]

use super::*;

#[test]
fn a_schedule_that_cannot_be_read_names_the_option_the_file_and_the_fault() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("faults.toml");
    let read = || read_faults(&path, 2);
    let name = path.display().to_string();
    assert!(read().unwrap_err().starts_with(&format!("--faults: {name}: ")));
    std::fs::write(&path, "[[fault]]\nkind = \"hang\"\n[[fault]]\nkind = \"crash\"\nworker = 2\n").unwrap();
    assert_eq!(read().unwrap_err(), format!("--faults: {name}: fault 2: there is no worker 2 of 2"));
    std::fs::write(&path, "[[fault]]\nkind = \"hang\"\nmany = 1\n").unwrap();
    assert_eq!(read().unwrap_err(), format!("--faults: {name}: fault 1: unknown key \"many\""));
    std::fs::write(&path, "[[fault]]\nkind = \"hang\"\nworker = 1\n").unwrap();
    assert_eq!(read().unwrap().len(), 1);
}
