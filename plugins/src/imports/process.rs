//! Logging, time, ticks, foreign functions, and the few extras that toolchains import.

use std::borrow::Cow;
use std::sync::Arc;

use wasmtime::Linker;

use super::{run, run_any_time};
use crate::abi::{LogLevel, Status};
use crate::guest_memory::{
    Call, GuestStop, Hostcall, Stop, bytes, hand_over, split, store_u32, store_u64, text, with_env,
};
use crate::host::{Host, Phase, RootEnd};

pub(super) fn link(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    linker.func_wrap("env", "proxy_log", |call: Call<'_>, level: u32, p: u32, n: u32| {
        run_any_time(call, |call| log(call, level, p, n))
    })?;
    linker.func_wrap("env", "proxy_get_log_level", |call: Call<'_>, level_at: u32| {
        run(call, |call| {
            let plugin = &call.data().plugin;
            let level = plugin.services.log_level(&plugin.spec.name);
            store_u32(call, level_at, level as u32)
        })
    })?;
    linker.func_wrap("env", "proxy_get_current_time_nanoseconds", |call: Call<'_>, at: u32| {
        run(call, |call| {
            let now = call.data().plugin.services.wall_clock_ns();
            store_u64(call, at, now)
        })
    })?;
    linker.func_wrap("env", "proxy_set_tick_period_milliseconds", |call: Call<'_>, ms: u32| {
        run(call, |call| {
            let host = call.data_mut();
            host.plugin.stats.acts_apart();
            host.tick_period_ms = ms;
            host.tick_changed = true;
            Ok(())
        })
    })?;
    linker.func_wrap(
        "env",
        "proxy_call_foreign_function",
        |call: Call<'_>, name: u32, name_len: u32, args: u32, args_len: u32, pp: u32, np: u32| {
            run(call, |call| call_foreign(call, (name, name_len), (args, args_len), pp, np))
        },
    )?;
    linker.func_wrap("env", "proxy_done", |call: Call<'_>| {
        run(call, |call| {
            let host = call.data_mut();
            if host.root_end != RootEnd::Pending {
                return Err(Status::NotFound.into());
            }
            host.root_end = RootEnd::Done;
            Ok(())
        })
    })?;
    linker.func_wrap("env", "proxy_set_effective_context", |call: Call<'_>, context: u32| {
        run(call, |call| {
            let host = call.data_mut();
            if context != crate::host::ROOT_CONTEXT && !host.streams.contains_key(&context) {
                return Err(Status::BadArgument.into());
            }
            host.act_for(context);
            Ok(())
        })
    })?;
    link_toolchain_extras(linker)
}

fn link_toolchain_extras(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    linker.func_wrap(
        "env",
        "abort",
        |_: Call<'_>, _: u32, _: u32, line: u32, column: u32| -> wasmtime::Result<()> {
            Err(wasmtime::Error::new(GuestStop::Abort(line, column)))
        },
    )?;
    linker.func_wrap("env", "pthread_equal", |_: Call<'_>, a: u32, b: u32| u32::from(a == b))?;
    linker.func_wrap("env", "emscripten_notify_memory_growth", |_: Call<'_>, _: u32| {})?;
    Ok(())
}

fn log(call: &mut Call<'_>, level: u32, p: u32, n: u32) -> Hostcall {
    let level = LogLevel::from_u32(level).ok_or(Status::BadArgument)?;
    let (memory, host) = split(call)?;
    host.plugin.log(level, bytes(memory, p, n)?);
    Ok(())
}

fn call_foreign(call: &mut Call<'_>, name: (u32, u32), args: (u32, u32), pp: u32, np: u32) -> Hostcall {
    let name = text(call, name.0, name.1)?;
    let arguments = bytes(split(call)?.0, args.0, args.1)?.to_vec();
    let in_stream = with_env(call, |call, env| {
        let result = env.call_foreign(&name, &arguments)?;
        give_result(call, &result, pp, np)
    });
    match in_stream {
        Some(Err(Stop::Answer(Status::NotFound))) => {}
        Some(answered) => return answered,
        None => {}
    }
    if let Some(answered) = call_common(call, &name, pp, np) {
        return answered;
    }
    let plugin = Arc::clone(&call.data().plugin);
    let result: Cow<'_, [u8]> = plugin.services.call_foreign(&plugin.spec.name, &name, &arguments)?;
    give_result(call, &result, pp, np)
}

/// Functions that plugins made for other hosts expect everywhere; nothing for an unknown name.
fn call_common(call: &mut Call<'_>, name: &str, pp: u32, np: u32) -> Option<Hostcall> {
    Some(match name {
        // Envoy's; what it asks for is what ABI 0.1.0 had an import for.
        "clear_route_cache" => {
            if let Some(effects) = call.data_mut().effects() {
                effects.clear_route_cache = true;
            }
            give_result(call, &[], pp, np)
        }
        // Envoy's: properties here need no declaration.
        "declare_property" => give_result(call, &[], pp, np),
        // Higress', for plugins older than `proxy_get_log_level`.
        "get_log_level" => {
            let plugin = &call.data().plugin;
            let level = plugin.services.log_level(&plugin.spec.name) as u32;
            give_result(call, &level.to_le_bytes(), pp, np)
        }
        _ => return None,
    })
}

/// Hands a result over, unless the guest does not want it: C++ code passes null for both addresses.
fn give_result(call: &mut Call<'_>, result: &[u8], pp: u32, np: u32) -> Hostcall {
    if pp == 0 && np == 0 {
        return Ok(());
    }
    hand_over(call, result, pp, np)
}

/// True while the guest's allocator runs on the host's behalf.
pub(super) fn is_allocating(call: &Call<'_>) -> bool {
    call.data().phase == Phase::Allocating
}
