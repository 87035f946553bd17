//! Properties: facts read and decisions written by path.

use std::sync::Arc;

use wasmtime::Linker;

use super::{mistake, run};
use crate::abi::{Dialect, MapType, Status};
use crate::guest_memory::{Call, Hostcall, bytes, hand_over, split, with_env};
use crate::host::Host;
use crate::pairs;
use crate::secret_headers::Veiled;

/// Longest property path, bytes.
const MAX_PATH: usize = 4096;

pub(super) fn link(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    linker.func_wrap("env", "proxy_get_property", |call: Call<'_>, path: u32, len: u32, pp: u32, np: u32| {
        run(call, |call| get(call, (path, len), pp, np))
    })?;
    linker.func_wrap(
        "env",
        "proxy_set_property",
        |call: Call<'_>, path: u32, path_len: u32, value: u32, value_len: u32| {
            run(call, |call| set(call, (path, path_len), (value, value_len)))
        },
    )?;
    Ok(())
}

/// The path without the trailing NUL that some SDKs keep.
fn clean(path: &[u8]) -> Result<&[u8], Status> {
    let path = path.strip_suffix(&[0]).unwrap_or(path);
    if path.len() > MAX_PATH { Err(Status::NotFound) } else { Ok(path) }
}

fn get(call: &mut Call<'_>, path: (u32, u32), pp: u32, np: u32) -> Hostcall {
    let mut path_room = std::mem::take(&mut call.data_mut().scratch);
    path_room.clear();
    let found = find(call, path, &mut path_room, pp, np);
    call.data_mut().scratch = path_room;
    found
}

fn find(call: &mut Call<'_>, path: (u32, u32), path_room: &mut Vec<u8>, pp: u32, np: u32) -> Hostcall {
    path_room.extend_from_slice(clean(bytes(split(call)?.0, path.0, path.1)?)?);
    let path = path_room.as_slice();
    if call.data().plugin.spec.veiled_headers().contains_property(path) {
        return Err(Status::NotFound.into());
    }
    if let Some(map) = whole_map(path) {
        let hidden = call.data().plugin.spec.veiled_headers();
        let veiled = with_env(call, |call, env| {
            let map = env.header_map(map).filter(|map| hidden.count(*map) > 0)?;
            let mut shown = Vec::new();
            pairs::write(&Veiled { map, hidden }, &mut shown);
            Some(hand_over(call, &shown, pp, np))
        });
        if let Some(Some(handed)) = veiled {
            return handed;
        }
    }
    let as_higress = path == b"cluster_name" && call.data().plugin.spec.dialect == Dialect::Higress;
    let in_stream = with_env(call, |call, env| {
        let value = env.property(path)?;
        if as_higress {
            let name = String::from_utf8_lossy(&value);
            return Some(hand_over(call, format!("outbound|80||{name}.static").as_bytes(), pp, np));
        }
        Some(hand_over(call, &value, pp, np))
    });
    if let Some(Some(handed)) = in_stream {
        return handed;
    }
    let plugin = Arc::clone(&call.data().plugin);
    let spec = &plugin.spec;
    match path {
        b"plugin_name" => return hand_over(call, spec.name.as_bytes(), pp, np),
        b"plugin_root_id" => return hand_over(call, spec.root_id.as_bytes(), pp, np),
        b"plugin_vm_id" => return hand_over(call, spec.vm_id.as_bytes(), pp, np),
        _ => {}
    }
    let value = plugin.services.property(&spec.name, path).ok_or(Status::NotFound)?;
    hand_over(call, &value, pp, np)
}

/// The map that a property shows as a whole, hidden headers and all, if it does.
fn whole_map(path: &[u8]) -> Option<MapType> {
    let at = path.iter().position(|b| matches!(b, b'.' | 0))?;
    match (path.get(..at)?, path.get(at + 1..)?) {
        (b"request", b"headers") => Some(MapType::RequestHeaders),
        (b"request", b"trailers") => Some(MapType::RequestTrailers),
        (b"response", b"headers") => Some(MapType::ResponseHeaders),
        (b"response", b"trailers") => Some(MapType::ResponseTrailers),
        _ => None,
    }
}

fn set(call: &mut Call<'_>, path: (u32, u32), value: (u32, u32)) -> Hostcall {
    let (memory, host) = split(call)?;
    let path = clean(bytes(memory, path.0, path.1)?)?;
    let value = bytes(memory, value.0, value.1)?;
    let written = match host.env() {
        Some(env) => env.set_property(path, value),
        None => Err(Status::NotFound),
    };
    match written {
        Ok(()) => Ok(()),
        Err(status) => {
            let path = String::from_utf8_lossy(path).replace('\0', ".");
            mistake(host, status, format_args!("property {path} cannot be written here: {status:?}"))
        }
    }
}
