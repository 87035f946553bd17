#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;

fn module(engine: &Engine, number: usize) -> (Vec<u8>, Module) {
    let wasm = wat::parse_str(format!("(module (func (result i32) (i32.const {number})))")).unwrap();
    let module = Module::from_binary(engine, &wasm).unwrap();
    (wasm, module)
}

#[test]
fn the_oldest_modules_go_when_there_are_too_many() {
    let parent = tempfile::tempdir().unwrap();
    let engine = Engine::default();
    let cache = CompileCache::open(&parent.path().join("cache"), &engine).unwrap();
    let (first, compiled) = module(&engine, 0);
    cache.store(&compiled, &first).unwrap();
    let old = File::options().write(true).open(cache.path(&first)).unwrap();
    old.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    for number in 1..=MAX_MODULES {
        let (wasm, compiled) = module(&engine, number);
        cache.store(&compiled, &wasm).unwrap();
        assert!(cache.load(&engine, &wasm).is_some());
    }
    assert!(cache.load(&engine, &first).is_none());
    assert_eq!(fs::read_dir(cache.dir.path()).unwrap().count(), 2 * MAX_MODULES, "with their checksums, no leftovers");
}

#[test]
fn other_engine_settings_have_files_of_their_own() {
    let parent = tempfile::tempdir().unwrap();
    let dir = parent.path().join("cache");
    let plain = Engine::default();
    let fuel = Engine::new(wasmtime::Config::new().consume_fuel(true)).unwrap();
    let (wasm, compiled) = module(&plain, 1);
    let cache = CompileCache::open(&dir, &plain).unwrap();
    cache.store(&compiled, &wasm).unwrap();
    let other = CompileCache::open(&dir, &fuel).unwrap();
    assert!(other.load(&fuel, &wasm).is_none());
    assert!(CompileCache::open(&dir, &plain).unwrap().load(&plain, &wasm).is_some());
}

#[test]
fn a_file_of_another_engine_under_our_name_is_refused() {
    let parent = tempfile::tempdir().unwrap();
    let fuel = Engine::new(wasmtime::Config::new().consume_fuel(true)).unwrap();
    let plain = Engine::default();
    let (wasm, foreign) = module(&fuel, 1);
    let cache = CompileCache::open(&parent.path().join("cache"), &plain).unwrap();
    cache.store(&foreign, &wasm).unwrap();
    assert!(cache.load(&plain, &wasm).is_none());
    assert!(!cache.path(&wasm).exists());
}

#[test]
fn a_directory_that_is_a_file_is_refused() {
    let parent = tempfile::tempdir().unwrap();
    let file = parent.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(CompileCache::open(&file, &Engine::default()).is_err());
}
