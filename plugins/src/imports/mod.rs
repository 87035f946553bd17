//! The functions that guests import.

mod buffers;
mod callouts;
mod grpc;
mod higress;
mod maps;
mod process;
mod properties;
mod shared;
mod streams;
mod wasi;

use wasmtime::Linker;

pub(crate) use higress::RedisOptions;

use crate::abi::Status;
use crate::guest_memory::{Call, Hostcall, Stop};
use crate::host::{Host, Phase};

/// Binds every import of every known ABI version: SDKs mix them, and one too many costs nothing.
pub(crate) fn link(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    process::link(linker)?;
    buffers::link(linker)?;
    maps::link(linker)?;
    properties::link(linker)?;
    shared::link(linker)?;
    streams::link(linker)?;
    callouts::link(linker)?;
    grpc::link(linker)?;
    wasi::link(linker)
}

/// Binds what Higress' dialect has beyond that.
pub(crate) fn link_higress(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    higress::link(linker)
}

/// Runs a hostcall that needs a callback to be running.
fn run<'c>(mut call: Call<'c>, hostcall: impl FnOnce(&mut Call<'c>) -> Hostcall) -> wasmtime::Result<i32> {
    if call.data().phase != Phase::Running {
        return Ok(Status::InternalFailure as i32);
    }
    answer(hostcall(&mut call))
}

/// Runs a hostcall that is always allowed.
fn run_any_time<'c>(mut call: Call<'c>, hostcall: impl FnOnce(&mut Call<'c>) -> Hostcall) -> wasmtime::Result<i32> {
    answer(hostcall(&mut call))
}

fn answer(hostcall: Hostcall) -> wasmtime::Result<i32> {
    match hostcall {
        Ok(()) => Ok(Status::Ok as i32),
        Err(Stop::Answer(status)) => Ok(status as i32),
        Err(Stop::Trap(error)) => Err(error),
    }
}

/// A mistake that SDKs do not expect to hear of: OK and a log line for lenient plugins, else the status.
fn mistake(host: &Host, status: Status, what: std::fmt::Arguments<'_>) -> Hostcall {
    if host.lenient() {
        host.plugin.tolerate(what);
        Ok(())
    } else {
        Err(status.into())
    }
}
