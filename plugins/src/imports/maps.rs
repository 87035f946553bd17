//! Header and trailer maps.

use std::sync::Arc;

use wasmtime::Linker;

use super::{mistake, run};
use crate::abi::{AbiVersion, MapType, Status};
use crate::env::HeaderPairs;
use crate::guest_memory::{Call, Hostcall, bytes, hand_over, split, store_u32, with_env};
use crate::host::Host;
use crate::pairs;
use crate::secret_headers::Veiled;

pub(super) fn link(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    linker.func_wrap("env", "proxy_get_header_map_size", |call: Call<'_>, map: u32, size_at: u32| {
        run(call, |call| size(call, map, size_at))
    })?;
    linker.func_wrap("env", "proxy_get_header_map_pairs", |call: Call<'_>, map: u32, pp: u32, np: u32| {
        run(call, |call| get_pairs(call, map, pp, np))
    })?;
    linker.func_wrap("env", "proxy_set_header_map_pairs", |call: Call<'_>, map: u32, p: u32, n: u32| {
        run(call, |call| set_pairs(call, map, p, n))
    })?;
    linker.func_wrap(
        "env",
        "proxy_get_header_map_value",
        |call: Call<'_>, map: u32, key: u32, key_len: u32, pp: u32, np: u32| {
            run(call, |call| get_value(call, map, (key, key_len), pp, np))
        },
    )?;
    linker.func_wrap(
        "env",
        "proxy_add_header_map_value",
        |call: Call<'_>, map: u32, key: u32, key_len: u32, value: u32, value_len: u32| {
            run(call, |call| {
                write(call, map, (key, key_len), (value, value_len), |map, key, value| map.add(key, value))
            })
        },
    )?;
    linker.func_wrap(
        "env",
        "proxy_replace_header_map_value",
        |call: Call<'_>, map: u32, key: u32, key_len: u32, value: u32, value_len: u32| {
            run(call, |call| {
                write(call, map, (key, key_len), (value, value_len), |map, key, value| map.replace(key, value))
            })
        },
    )?;
    linker.func_wrap("env", "proxy_remove_header_map_value", |call: Call<'_>, map: u32, key: u32, key_len: u32| {
        run(call, |call| write(call, map, (key, key_len), (0, 0), |map, key, _| map.remove(key)))
    })?;
    Ok(())
}

fn map_type(map: u32) -> Hostcall<MapType> {
    Ok(MapType::from_u32(map).ok_or(Status::BadArgument)?)
}

/// Runs `read` on a map as the guest may see it. Nothing if there is no such map now.
fn with_map<'c, R>(
    call: &mut Call<'c>,
    map: MapType,
    read: impl FnOnce(&mut Call<'c>, &dyn HeaderPairs) -> R,
) -> Option<R> {
    if is_calls(map) {
        let shown = Arc::clone(&call.data().shown);
        return shown.map(map).map(|map| read(call, map));
    }
    let hidden = call.data().plugin.spec.veiled_headers().of_map(map);
    with_env(call, |call, env| env.header_map(map).map(|map| read(call, &Veiled { map, hidden }))).flatten()
}

/// Whether a map tells of the answer to a call.
fn is_calls(map: MapType) -> bool {
    matches!(
        map,
        MapType::GrpcInitialMetadata
            | MapType::GrpcTrailingMetadata
            | MapType::HttpCallResponseHeaders
            | MapType::HttpCallResponseTrailers
    )
}

fn size(call: &mut Call<'_>, map: u32, size_at: u32) -> Hostcall {
    let map = map_type(map)?;
    let len = with_map(call, map, |_, map| pairs::serialized_len(map)).unwrap_or(0);
    store_u32(call, size_at, u32::try_from(len).unwrap_or(u32::MAX))
}

/// A map that is not there reads as empty.
fn get_pairs(call: &mut Call<'_>, map: u32, pp: u32, np: u32) -> Hostcall {
    let map = map_type(map)?;
    let mut scratch = std::mem::take(&mut call.data_mut().scratch);
    scratch.clear();
    with_map(call, map, |_, map| pairs::write(map, &mut scratch));
    let handed = hand_over(call, &scratch, pp, np);
    call.data_mut().scratch = scratch;
    handed
}

fn get_value(call: &mut Call<'_>, map: u32, key: (u32, u32), pp: u32, np: u32) -> Hostcall {
    let map = map_type(map)?;
    let mut name = [0_u8; 64];
    let name = short_copy(call, key, &mut name)?;
    let handed = with_map(call, map, |call, map| match map.get(&name) {
        Some(value) => hand_over(call, &value, pp, np).map(|()| Found::Value),
        None => Ok(Found::NoValue),
    });
    match handed.unwrap_or(Ok(Found::NoMap))? {
        Found::Value => Ok(()),
        Found::NoValue if call.data().plugin.abi == AbiVersion::V0_1_0 => hand_over(call, &[], pp, np),
        // The Rust SDK panics on BAD_ARGUMENT here.
        Found::NoMap if !call.data().lenient() => Err(Status::BadArgument.into()),
        Found::NoValue | Found::NoMap => Err(Status::NotFound.into()),
    }
}

enum Found {
    Value,
    NoValue,
    NoMap,
}

/// A copy of a guest's text, on the stack if it is short. Header names nearly always are.
fn short_copy<'a>(call: &mut Call<'_>, at: (u32, u32), room: &'a mut [u8]) -> Hostcall<std::borrow::Cow<'a, [u8]>> {
    let (memory, _) = split(call)?;
    let text = bytes(memory, at.0, at.1)?;
    match room.get_mut(..text.len()) {
        Some(room) => {
            room.copy_from_slice(text);
            Ok(std::borrow::Cow::Borrowed(room))
        }
        None => Ok(std::borrow::Cow::Owned(text.to_vec())),
    }
}

/// Runs a change on a map, with the guest's memory and the map both borrowed.
fn change(
    call: &mut Call<'_>,
    map: MapType,
    apply: impl FnOnce(&[u8], &mut dyn HeaderPairs) -> Result<(), Status>,
) -> Hostcall {
    let (memory, host) = split(call)?;
    let hidden = host.plugin.spec.veiled_headers().of_map(map);
    let target = if is_calls(map) { None } else { host.env().and_then(|env| env.header_map(map)) };
    let Some(target) = target else {
        return mistake(host, Status::BadArgument, format_args!("{map:?} written where there are none"));
    };
    match apply(memory, &mut Veiled { map: target, hidden }) {
        Ok(()) => Ok(()),
        Err(Status::InvalidMemoryAccess) => Err(Status::InvalidMemoryAccess.into()),
        Err(status) => mistake(host, status, format_args!("refused a write to {map:?}: {status:?}")),
    }
}

fn write(
    call: &mut Call<'_>,
    map: u32,
    key: (u32, u32),
    value: (u32, u32),
    apply: impl FnOnce(&mut dyn HeaderPairs, &[u8], &[u8]) -> Result<(), Status>,
) -> Hostcall {
    let map = map_type(map)?;
    change(call, map, |memory, target| {
        let key = bytes(memory, key.0, key.1)?;
        let value = bytes(memory, value.0, value.1)?;
        if !pairs::is_valid_name(key) || !pairs::is_valid_value(value) || value.len() > pairs::MAX_BYTES {
            return Err(Status::BadArgument);
        }
        apply(target, key, value)
    })
}

fn set_pairs(call: &mut Call<'_>, map: u32, p: u32, n: u32) -> Hostcall {
    let map = map_type(map)?;
    change(call, map, |memory, target| {
        let pairs = pairs::parse(bytes(memory, p, n)?).map_err(|_| Status::BadArgument)?;
        if !pairs.iter().all(|(name, value)| pairs::is_valid_name(name) && pairs::is_valid_value(value)) {
            return Err(Status::BadArgument);
        }
        target.replace_all(&pairs)
    })
}
