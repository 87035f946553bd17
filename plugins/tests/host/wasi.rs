//! The part of WASI that modules import.

use std::sync::Arc;
use std::time::Duration;

use turnstile_plugins::{LogLevel, Plugin, PluginServices, Runtime, RuntimeOptions, SharedState};

use crate::rig::{Guest, Rig, request, results, text};

fn guest(imports: &str, body: &str) -> Guest {
    Guest::on_request_headers(body).import(imports)
}

fn import(name: &str, params: &str) -> String {
    format!(r#"(import "wasi_snapshot_preview1" "{name}" (func ${name} (param {params}) (result i32)))"#)
}

#[test]
fn standard_output_and_error_go_to_the_log() {
    let rig = guest(
        &import("fd_write", "i32 i32 i32 i32"),
        r#"(i32.store (i32.const 0) (i32.const 100)) (i32.store (i32.const 4) (i32.const 4))
           (i32.store (i32.const 8) (i32.const 104)) (i32.store (i32.const 12) (i32.const 5))
           (call $put (call $fd_write (i32.const 1) (i32.const 0) (i32.const 2) (i32.const 16)))
           (call $put (i32.load (i32.const 16)))
           (call $put (call $fd_write (i32.const 2) (i32.const 0) (i32.const 1) (i32.const 16)))
           (call $put (call $fd_write (i32.const 3) (i32.const 0) (i32.const 1) (i32.const 16)))
           (call $put (call $fd_write (i32.const 1) (i32.const -8) (i32.const 1) (i32.const 16)))
           (call $put (call $fd_write (i32.const 1) (i32.const 0) (i32.const -1) (i32.const 16)))"#,
    )
    .also(r#"(data (i32.const 100) "one two\0a\0a")"#)
    .start();
    assert_eq!(rig.results_of_request(), [0, 9, 0, 8, 21, 28]);
    let lines = std::mem::take(&mut *rig.gateway.lines.lock());
    assert_eq!(lines, [(LogLevel::Info, "one two\n".to_owned()), (LogLevel::Error, "one ".to_owned())]);
}

#[test]
fn the_environment_is_what_the_configuration_gives() {
    let imports = import("environ_sizes_get", "i32 i32") + &import("environ_get", "i32 i32");
    let guest = guest(
        &imports,
        r#"(call $put (call $environ_sizes_get (i32.const 0) (i32.const 4)))
           (call $put (i32.load (i32.const 0))) (call $put (i32.load (i32.const 4)))
           (call $put (call $environ_get (i32.const 8) (i32.const 200)))
           (call $text (i32.const 200) (i32.load (i32.const 4)))
           (call $put (i32.sub (i32.load (i32.const 12)) (i32.load (i32.const 8))))"#,
    );
    let mut spec = guest.spec();
    spec.environment = vec![("A".to_owned(), "1".to_owned()), ("LONG".to_owned(), "2".to_owned())];
    let rig = Rig::start(spec).unwrap();
    let mut env = request();
    assert_eq!(rig.results(&mut env), [0, 2, 11, 0, 4]);
    assert_eq!(text(&env), "A=1\0LONG=2\0");
    assert_eq!(guest.start().results(&mut request())[..4], [0, 0, 0, 0], "nothing of the process's own");
}

#[test]
fn random_bytes_are_given_up_to_64_kib() {
    let rig = guest(
        &import("random_get", "i32 i32"),
        r#"(call $put (call $random_get (i32.const 0) (i32.const 16)))
           (call $put (i64.ne (i64.load (i32.const 0)) (i64.load (i32.const 8))))
           (call $put (call $random_get (i32.const 0) (i32.const 0)))
           (call $put (call $random_get (i32.const 65536) (i32.const 65536)))
           (call $put (call $random_get (i32.const 0) (i32.const 65537)))
           (call $put (call $random_get (i32.const -8) (i32.const 16)))"#,
    )
    .start();
    assert_eq!(rig.results_of_request(), [0, 1, 0, 0, 28, 21]);
}

#[test]
fn clocks_are_wall_and_monotonic() {
    let imports = import("clock_time_get", "i32 i64 i32") + &import("clock_res_get", "i32 i32");
    let rig = guest(
        &imports,
        r#"(call $put (call $clock_time_get (i32.const 0) (i64.const 0) (i32.const 0)))
           (call $put (call $clock_time_get (i32.const 1) (i64.const 0) (i32.const 8)))
           (call $put (call $clock_time_get (i32.const 1) (i64.const 0) (i32.const 16)))
           (call $put (i64.gt_u (i64.load (i32.const 0)) (i64.const 1600000000000000000)))
           (call $put (i64.le_u (i64.load (i32.const 8)) (i64.load (i32.const 16))))
           (call $put (call $clock_time_get (i32.const 2) (i64.const 0) (i32.const 0)))
           (call $put (call $clock_res_get (i32.const 0) (i32.const 0)))
           (call $put (i32.load (i32.const 0)))"#,
    )
    .start();
    assert_eq!(rig.results_of_request(), [0, 0, 0, 1, 1, 58, 0, 1]);
}

/// A process with a clock and chance of its own.
struct Replayed(SharedState);

impl PluginServices for Replayed {
    fn shared(&self) -> &SharedState {
        &self.0
    }

    fn wall_clock_ns(&self) -> u64 {
        1_234_000_000_005
    }

    fn monotonic_ns(&self, _: Duration) -> u64 {
        77
    }

    fn fill_random(&self, target: &mut [u8]) -> bool {
        target.fill(9);
        target.len() < 100
    }
}

#[test]
fn time_and_chance_are_what_the_process_says() {
    let imports = import("clock_time_get", "i32 i64 i32") + &import("random_get", "i32 i32");
    let spec = guest(
        &imports,
        r#"(drop (call $clock_time_get (i32.const 0) (i64.const 0) (i32.const 0)))
           (drop (call $clock_time_get (i32.const 1) (i64.const 0) (i32.const 8)))
           (drop (call $time (i32.const 16)))
           (call $put (i64.eq (i64.load (i32.const 0)) (i64.const 1234000000005)))
           (call $put (i64.eq (i64.load (i32.const 8)) (i64.const 77)))
           (call $put (i64.eq (i64.load (i32.const 16)) (i64.const 1234000000005)))
           (call $put (call $random_get (i32.const 0) (i32.const 4)))
           (call $put (i32.load (i32.const 0)))
           (call $put (call $random_get (i32.const 0) (i32.const 200)))"#,
    )
    .spec();
    let services = Arc::new(Replayed(SharedState::default()));
    let runtime = Runtime::new(RuntimeOptions::default()).unwrap();
    let plugin = Plugin::start(&runtime, spec, services).unwrap();
    let mut env = request();
    plugin.open_stream(0).on_request_headers(&mut env, true).unwrap();
    assert_eq!(results(&env), [1, 1, 1, 0, 0x0909_0909, 52]);
}

#[test]
fn there_are_no_files_and_no_waiting() {
    let imports = [
        import("path_open", "i32 i32 i32 i32 i32 i64 i64 i32 i32"),
        import("fd_prestat_get", "i32 i32"),
        import("fd_prestat_dir_name", "i32 i32 i32"),
        import("fd_read", "i32 i32 i32 i32"),
        import("fd_seek", "i32 i64 i32 i32"),
        import("fd_close", "i32"),
        import("fd_fdstat_get", "i32 i32"),
        import("fd_fdstat_set_flags", "i32 i32"),
        import("path_filestat_get", "i32 i32 i32 i32 i32"),
        import("poll_oneoff", "i32 i32 i32 i32"),
        import("args_sizes_get", "i32 i32"),
        r#"(import "wasi_snapshot_preview1" "sched_yield" (func $sched_yield (result i32)))"#.to_owned(),
    ]
    .concat();
    let rig = guest(
        &imports,
        r#"(call $put (call $path_open (i32.const 3) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)
                        (i64.const 0) (i64.const 0) (i32.const 0) (i32.const 0)))
           (call $put (call $fd_prestat_get (i32.const 3) (i32.const 0)))
           (call $put (call $fd_prestat_dir_name (i32.const 3) (i32.const 0) (i32.const 0)))
           (call $put (call $fd_read (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)))
           (call $put (call $fd_seek (i32.const 0) (i64.const 0) (i32.const 0) (i32.const 0)))
           (call $put (call $fd_close (i32.const 0)))
           (call $put (call $fd_fdstat_get (i32.const 0) (i32.const 0)))
           (call $put (call $fd_fdstat_get (i32.const 1) (i32.const 0)))
           (call $put (call $fd_fdstat_set_flags (i32.const 1) (i32.const 0)))
           (call $put (call $path_filestat_get (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)))
           (i32.store (i32.const 40) (i32.const 7))
           (call $put (call $poll_oneoff (i32.const 0) (i32.const 0) (i32.const 1) (i32.const 40)))
           (call $put (i32.load (i32.const 40)))
           (call $put (call $args_sizes_get (i32.const 0) (i32.const 4)))
           (call $put (call $sched_yield))"#,
    )
    .start();
    assert_eq!(rig.results_of_request(), [44, 8, 52, 52, 52, 52, 8, 0, 52, 52, 0, 0, 0, 0]);
}

#[test]
fn the_old_module_name_is_bound_too_and_exit_stops_the_start() {
    let guest = Guest::new(r#"(func (export "_initialize") (call $exit (i32.const 3)))"#)
        .import(r#"(import "wasi_unstable" "proc_exit" (func $exit (param i32)))"#);
    let error = Rig::start(guest.spec()).err().unwrap();
    assert!(error.message.contains("proc_exit(3)"), "{}", error.message);
}
