//! The part of WASI that Proxy-Wasm modules import: clocks, randomness, the environment, and writing to the log. There
//! are no files, no sockets and no arguments; what asks for them gets the errno that other Proxy-Wasm hosts give.

use wasmtime::Linker;

use super::process::is_allocating;
use crate::abi::LogLevel;
use crate::guest_memory::{Call, GuestStop, Hostcall, Stop, bytes, split, store_bytes, store_u32, store_u64};
use crate::host::Host;

const SUCCESS: i32 = 0;
const BADF: i32 = 8;
const FAULT: i32 = 21;
const INVAL: i32 = 28;
const NOENT: i32 = 44;
const NOSYS: i32 = 52;
const NOTSUP: i32 = 58;
const NOTCAPABLE: i32 = 76;

/// Most bytes of randomness in one call.
const MAX_RANDOM: u32 = 64 << 10;
/// Most pieces of one `fd_write`.
const MAX_PIECES: u32 = 1024;
/// Most bytes that one `fd_write` puts into the log.
const MAX_WRITE: usize = 64 << 10;

/// Both names under which modules import WASI.
const MODULES: [&str; 2] = ["wasi_snapshot_preview1", "wasi_unstable"];

pub(super) fn link(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    for module in MODULES {
        link_process(linker, module)?;
        link_output(linker, module)?;
        link_absent(linker, module)?;
    }
    Ok(())
}

/// Turns a host access that failed into an errno.
fn errno(mut call: Call<'_>, run: impl FnOnce(&mut Call<'_>) -> Hostcall<i32>) -> wasmtime::Result<i32> {
    match run(&mut call) {
        Ok(errno) => Ok(errno),
        Err(Stop::Answer(_)) => Ok(FAULT),
        Err(Stop::Trap(error)) => Err(error),
    }
}

/// As [`errno`], for functions that the guest's allocator must not call.
fn errno_unless_allocating(call: Call<'_>, run: impl FnOnce(&mut Call<'_>) -> Hostcall<i32>) -> wasmtime::Result<i32> {
    if is_allocating(&call) {
        return Ok(NOTCAPABLE);
    }
    errno(call, run)
}

fn link_process(linker: &mut Linker<Host>, module: &str) -> wasmtime::Result<()> {
    linker.func_wrap(module, "proc_exit", |_: Call<'_>, code: u32| -> wasmtime::Result<()> {
        Err(wasmtime::Error::new(GuestStop::Exit(code)))
    })?;
    linker.func_wrap(module, "sched_yield", |_: Call<'_>| SUCCESS)?;
    linker.func_wrap(module, "args_get", |_: Call<'_>, _: u32, _: u32| SUCCESS)?;
    linker.func_wrap(module, "args_sizes_get", |call: Call<'_>, count_at: u32, bytes_at: u32| {
        errno_unless_allocating(call, |call| {
            store_u32(call, count_at, 0)?;
            store_u32(call, bytes_at, 0)?;
            Ok(SUCCESS)
        })
    })?;
    linker.func_wrap(module, "environ_sizes_get", |call: Call<'_>, count_at: u32, bytes_at: u32| {
        errno_unless_allocating(call, |call| {
            let environment = environment(call.data());
            let len: usize = environment.iter().map(Vec::len).sum();
            store_u32(call, count_at, size(environment.len()))?;
            store_u32(call, bytes_at, size(len))?;
            Ok(SUCCESS)
        })
    })?;
    linker.func_wrap(module, "environ_get", |call: Call<'_>, list: u32, text: u32| {
        errno_unless_allocating(call, |call| {
            let (mut list, mut text) = (list, text);
            for line in environment(call.data()) {
                store_u32(call, list, text)?;
                store_bytes(call, text, &line)?;
                list = list.wrapping_add(4);
                text = text.wrapping_add(size(line.len()));
            }
            Ok(SUCCESS)
        })
    })?;
    linker.func_wrap(module, "clock_res_get", |call: Call<'_>, clock: u32, at: u32| {
        errno(call, |call| match clock {
            0 | 1 => store_u64(call, at, 1).map(|()| SUCCESS),
            _ => Ok(NOTSUP),
        })
    })?;
    linker.func_wrap(module, "clock_time_get", |call: Call<'_>, clock: u32, _precision: u64, at: u32| {
        errno(call, |call| {
            let now = match clock {
                0 => call.data().plugin.services.wall_clock_ns(),
                1 => call.data().plugin.monotonic_ns(),
                _ => return Ok(NOTSUP),
            };
            store_u64(call, at, now).map(|()| SUCCESS)
        })
    })?;
    linker.func_wrap(module, "random_get", |call: Call<'_>, p: u32, n: u32| {
        errno_unless_allocating(call, |call| random(call, p, n))
    })?;
    // Nothing ever becomes ready: the guest may not wait.
    linker.func_wrap(module, "poll_oneoff", |call: Call<'_>, _: u32, _: u32, _: u32, events_at: u32| {
        errno(call, |call| store_u32(call, events_at, 0).map(|()| SUCCESS))
    })?;
    Ok(())
}

fn size(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

/// The environment's lines, each with its NUL.
fn environment(host: &Host) -> Vec<Vec<u8>> {
    let line = |(name, value): &(String, String)| format!("{name}={value}\0").into_bytes();
    host.plugin.spec.environment.iter().map(line).collect()
}

fn random(call: &mut Call<'_>, p: u32, n: u32) -> Hostcall<i32> {
    if n > MAX_RANDOM {
        return Ok(INVAL);
    }
    let plugin = std::sync::Arc::clone(&call.data().plugin);
    let (memory, _) = split(call)?;
    let start = p as usize;
    let Some(target) = memory.get_mut(start..start.saturating_add(n as usize)) else { return Ok(FAULT) };
    Ok(if plugin.services.fill_random(target) { SUCCESS } else { NOSYS })
}

fn link_output(linker: &mut Linker<Host>, module: &str) -> wasmtime::Result<()> {
    linker.func_wrap(module, "fd_write", |call: Call<'_>, fd: u32, pieces: u32, count: u32, written_at: u32| {
        errno(call, |call| fd_write(call, fd, pieces, count, written_at))
    })?;
    linker.func_wrap(module, "fd_fdstat_get", |call: Call<'_>, fd: u32, at: u32| {
        errno_unless_allocating(call, |call| {
            if !matches!(fd, 1 | 2) {
                return Ok(BADF);
            }
            // A character device that can be written and nothing else.
            let mut stat = [0_u8; 24];
            stat[0] = 2;
            stat[8] = 64;
            store_bytes(call, at, &stat).map(|()| SUCCESS)
        })
    })?;
    // Go looks for pre-opened directories until it hears "bad descriptor".
    linker.func_wrap(module, "fd_prestat_get", |_: Call<'_>, _: u32, _: u32| BADF)?;
    Ok(())
}

/// Standard output is logged as info, standard error as error; one line break at the end is cut.
fn fd_write(call: &mut Call<'_>, fd: u32, pieces: u32, count: u32, written_at: u32) -> Hostcall<i32> {
    let level = match fd {
        1 => LogLevel::Info,
        2 => LogLevel::Error,
        _ => return Ok(BADF),
    };
    if count > MAX_PIECES {
        return Ok(INVAL);
    }
    let (memory, host) = split(call)?;
    let (list, _) = bytes(memory, pieces, count * 8)?.as_chunks::<8>();
    let mut line = Vec::new();
    let mut written = 0_u32;
    for [p0, p1, p2, p3, n0, n1, n2, n3] in list {
        let piece = bytes(memory, u32::from_le_bytes([*p0, *p1, *p2, *p3]), u32::from_le_bytes([*n0, *n1, *n2, *n3]))?;
        written = written.saturating_add(size(piece.len()));
        let room = MAX_WRITE - line.len();
        line.extend_from_slice(piece.get(..room).unwrap_or(piece));
    }
    let line = line.strip_suffix(b"\n").unwrap_or(&line);
    if !line.is_empty() {
        host.plugin.log(level, line);
    }
    store_u32(call, written_at, written).map(|()| SUCCESS)
}

/// What this host does not have.
fn link_absent(linker: &mut Linker<Host>, module: &str) -> wasmtime::Result<()> {
    linker.func_wrap(
        module,
        "path_open",
        |_: Call<'_>, _: u32, _: u32, _: u32, _: u32, _: u32, _: u64, _: u64, _: u32, _: u32| NOENT,
    )?;
    macro_rules! absent {
        ($($name:literal ($($arg:ty),*);)*) => {
            $(linker.func_wrap(module, $name, |_: Call<'_>, $(_: $arg),*| NOSYS)?;)*
        };
    }
    absent! {
        "fd_advise"(u32, u64, u64, u32);
        "fd_allocate"(u32, u64, u64);
        "fd_close"(u32);
        "fd_datasync"(u32);
        "fd_fdstat_set_flags"(u32, u32);
        "fd_fdstat_set_rights"(u32, u64, u64);
        "fd_filestat_get"(u32, u32);
        "fd_filestat_set_size"(u32, u64);
        "fd_filestat_set_times"(u32, u64, u64, u32);
        "fd_pread"(u32, u32, u32, u64, u32);
        "fd_prestat_dir_name"(u32, u32, u32);
        "fd_pwrite"(u32, u32, u32, u64, u32);
        "fd_read"(u32, u32, u32, u32);
        "fd_readdir"(u32, u32, u32, u64, u32);
        "fd_renumber"(u32, u32);
        "fd_seek"(u32, u64, u32, u32);
        "fd_sync"(u32);
        "fd_tell"(u32, u32);
        "path_create_directory"(u32, u32, u32);
        "path_filestat_get"(u32, u32, u32, u32, u32);
        "path_filestat_set_times"(u32, u32, u32, u32, u64, u64, u32);
        "path_link"(u32, u32, u32, u32, u32, u32, u32);
        "path_readlink"(u32, u32, u32, u32, u32, u32);
        "path_remove_directory"(u32, u32, u32);
        "path_rename"(u32, u32, u32, u32, u32, u32);
        "path_symlink"(u32, u32, u32, u32, u32);
        "path_unlink_file"(u32, u32, u32);
        "proc_raise"(u32);
        "sock_accept"(u32, u32, u32);
        "sock_recv"(u32, u32, u32, u32, u32, u32);
        "sock_send"(u32, u32, u32, u32, u32);
        "sock_shutdown"(u32, u32);
    }
    Ok(())
}
