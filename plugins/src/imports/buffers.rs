//! Body and configuration buffers.

use std::sync::Arc;

use wasmtime::Linker;

use super::{mistake, run};
use crate::abi::{BufferType, Dialect, Status};
use crate::guest_memory::{Call, Hostcall, bytes, check_writable, hand_over, split, store_u32, with_env};
use crate::host::Host;

pub(super) fn link(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    linker.func_wrap(
        "env",
        "proxy_get_buffer_bytes",
        |call: Call<'_>, buffer: u32, start: u32, max: u32, pp: u32, np: u32| {
            run(call, |call| get(call, buffer, start, max, pp, np))
        },
    )?;
    linker.func_wrap(
        "env",
        "proxy_set_buffer_bytes",
        |call: Call<'_>, buffer: u32, start: u32, size: u32, p: u32, n: u32| {
            run(call, |call| set(call, buffer, start, size, p, n))
        },
    )?;
    linker.func_wrap("env", "proxy_get_buffer_status", |call: Call<'_>, buffer: u32, len_at: u32, flags_at: u32| {
        run(call, |call| status(call, buffer, len_at, flags_at))
    })?;
    // ABI 0.1.0 had a call of its own for what is buffer 7 today.
    linker.func_wrap("env", "proxy_get_configuration", |call: Call<'_>, pp: u32, np: u32| {
        run(call, |call| get(call, BufferType::PluginConfiguration as u32, 0, u32::MAX, pp, np))
    })?;
    Ok(())
}

/// Runs `use_bytes` on a buffer's bytes.
fn with_buffer<'c, R>(
    call: &mut Call<'c>,
    buffer: BufferType,
    use_bytes: impl FnOnce(&mut Call<'c>, &[u8]) -> Hostcall<R>,
) -> Hostcall<R> {
    match buffer {
        BufferType::VmConfiguration => {
            let plugin = Arc::clone(&call.data().plugin);
            use_bytes(call, &plugin.spec.vm_configuration)
        }
        BufferType::PluginConfiguration => {
            let plugin = Arc::clone(&call.data().plugin);
            use_bytes(call, &plugin.spec.configuration)
        }
        BufferType::ForeignFunctionArguments => {
            let arguments = call.data().foreign_arguments.clone();
            use_bytes(call, &arguments)
        }
        BufferType::HttpCallResponseBody | BufferType::GrpcMessage | BufferType::RedisReply => {
            let shown = Arc::clone(&call.data().shown);
            use_bytes(call, shown.buffer(buffer).ok_or(Status::NotFound)?)
        }
        _ => with_env(call, |call, env| {
            let bytes = env.buffer(buffer).ok_or(Status::NotFound)?;
            use_bytes(call, bytes)
        })
        .ok_or(Status::NotFound)?,
    }
}

/// The buffer with a number, of those in the plugin's dialect.
fn known(call: &mut Call<'_>, buffer: u32) -> Hostcall<BufferType> {
    let buffer = BufferType::from_u32(buffer).ok_or(Status::BadArgument)?;
    if buffer == BufferType::RedisReply && call.data().plugin.spec.dialect != Dialect::Higress {
        return Err(Status::BadArgument.into());
    }
    Ok(buffer)
}

fn get(call: &mut Call<'_>, buffer: u32, start: u32, max: u32, pp: u32, np: u32) -> Hostcall {
    let buffer = known(call, buffer)?;
    // Other hosts refuse a range that overflows, which makes the Rust SDK panic; it can only mean "up to the end".
    if start.checked_add(max).is_none() && !call.data().lenient() {
        return Err(Status::BadArgument.into());
    }
    with_buffer(call, buffer, |call, bytes| {
        let start = (start as usize).min(bytes.len());
        let end = start.saturating_add(max as usize).min(bytes.len());
        hand_over(call, bytes.get(start..end).unwrap_or_default(), pp, np)
    })
}

fn set(call: &mut Call<'_>, buffer: u32, start: u32, size: u32, p: u32, n: u32) -> Hostcall {
    let buffer = match BufferType::from_u32(buffer) {
        Some(buffer @ (BufferType::RequestBody | BufferType::ResponseBody)) => buffer,
        _ => return Err(Status::BadArgument.into()),
    };
    let (memory, host) = split(call)?;
    let data = bytes(memory, p, n)?;
    let most = host.plugin.spec.limits.held_body_bytes;
    let Some(env) = host.env() else {
        return mistake(host, Status::NotFound, format_args!("{buffer:?} written outside of a stream"));
    };
    let Some(len) = env.buffer(buffer).map(<[u8]>::len) else {
        return mistake(host, Status::NotFound, format_args!("{buffer:?} written where there is none"));
    };
    let start = (start as usize).min(len);
    let end = start.saturating_add(size as usize).min(len);
    if len - (end - start) + data.len() > most {
        // Not tolerated: the guest must not believe that a body was replaced when it was not.
        return Err(Status::BadArgument.into());
    }
    match env.replace_buffer(buffer, start..end, data) {
        Ok(()) => Ok(()),
        Err(status) => mistake(host, status, format_args!("{buffer:?} cannot be written now")),
    }
}

fn status(call: &mut Call<'_>, buffer: u32, len_at: u32, flags_at: u32) -> Hostcall {
    let buffer = known(call, buffer)?;
    check_writable(call, flags_at, 4)?;
    with_buffer(call, buffer, |call, bytes| {
        store_u32(call, len_at, u32::try_from(bytes.len()).unwrap_or(u32::MAX))?;
        store_u32(call, flags_at, 0)
    })
}
