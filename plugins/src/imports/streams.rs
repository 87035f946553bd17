//! What a guest asks to happen to a stream. Nothing happens here: effects are recorded and applied after the callback.

use bytes::Bytes;
use http::{HeaderName, HeaderValue};
use wasmtime::Linker;

use super::{mistake, run};
use crate::abi::Status;
use crate::callback::Callback;
use crate::guest_memory::{Call, Hostcall, bytes, hand_over, split, store_u32};
use crate::host::Host;
use crate::outcome::{Effects, LocalResponse};
use crate::pairs;

pub(super) fn link(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    linker.func_wrap("env", "proxy_continue_stream", |call: Call<'_>, stream: u32| {
        run(call, |call| continue_stream(call, stream))
    })?;
    linker.func_wrap("env", "proxy_continue_request", |call: Call<'_>| run(call, |call| continue_stream(call, 0)))?;
    linker.func_wrap("env", "proxy_continue_response", |call: Call<'_>| run(call, |call| continue_stream(call, 1)))?;
    linker.func_wrap("env", "proxy_clear_route_cache", |call: Call<'_>| {
        run(call, |call| effect(call.data_mut(), |effects| effects.clear_route_cache = true))
    })?;
    linker.func_wrap("env", "proxy_close_stream", |call: Call<'_>, stream: u32| {
        run(call, |call| match stream {
            0 | 2 => effect(call.data_mut(), |effects| effects.close_downstream = true),
            1 | 3 => effect(call.data_mut(), |effects| effects.close_upstream = true),
            _ => Err(Status::BadArgument.into()),
        })
    })?;
    linker.func_wrap("env", "proxy_get_status", |call: Call<'_>, code_at: u32, pp: u32, np: u32| {
        run(call, |call| {
            let (code, text) = call.data().status.clone();
            store_u32(call, code_at, code)?;
            hand_over(call, text.as_bytes(), pp, np)
        })
    })?;
    linker.func_wrap(
        "env",
        "proxy_send_local_response",
        |call: Call<'_>,
         status: u32,
         details: u32,
         details_len: u32,
         body: u32,
         body_len: u32,
         headers: u32,
         headers_len: u32,
         grpc_status: i32| {
            let grpc_status = (grpc_status >= 0).then_some(grpc_status);
            let parts = Parts {
                details: (details, details_len),
                body: (body, body_len),
                headers: (headers, headers_len),
                grpc_status,
            };
            run(call, |call| send_local_response(call, status, parts))
        },
    )?;
    Ok(())
}

fn effect(host: &mut Host, record: impl FnOnce(&mut Effects)) -> Hostcall {
    match host.effects() {
        Some(effects) => {
            record(effects);
            Ok(())
        }
        None => mistake(host, Status::BadArgument, format_args!("stream control outside of a stream")),
    }
}

fn continue_stream(call: &mut Call<'_>, stream: u32) -> Hostcall {
    match stream {
        0 => effect(call.data_mut(), |effects| effects.continue_request = true),
        1 => effect(call.data_mut(), |effects| effects.continue_response = true),
        _ => Err(Status::BadArgument.into()),
    }
}

struct Parts {
    details: (u32, u32),
    body: (u32, u32),
    headers: (u32, u32),
    grpc_status: Option<i32>,
}

fn send_local_response(call: &mut Call<'_>, status: u32, parts: Parts) -> Hostcall {
    let status = u16::try_from(status).ok().filter(|status| (200..600).contains(status)).ok_or(Status::BadArgument)?;
    let (memory, host) = split(call)?;
    let at = |(ptr, len): (u32, u32)| bytes(memory, ptr, len);
    let details = String::from_utf8_lossy(at(parts.details)?).into_owned();
    let body = at(parts.body)?;
    if body.len() > host.plugin.spec.limits.held_body_bytes {
        return Err(Status::BadArgument.into());
    }
    let pairs = pairs::parse(at(parts.headers)?).map_err(|_| Status::BadArgument)?;
    if matches!(host.callback, Some(Callback::Log | Callback::Done | Callback::Delete)) {
        return mistake(host, Status::BadArgument, format_args!("local response after the stream has ended"));
    }
    let mut headers = Vec::with_capacity(pairs.len());
    for (name, value) in pairs {
        match (HeaderName::from_bytes(name), HeaderValue::from_bytes(value)) {
            (Ok(name), Ok(_)) if host.plugin.spec.hidden_headers.contains(name.as_str().as_bytes()) => {
                mistake(
                    host,
                    Status::BadArgument,
                    format_args!("local response with a header that is not granted: {name}"),
                )?;
            }
            (Ok(name), Ok(value)) => headers.push((name, value)),
            // `:status` among them is the SDK user's mistake: the status is an argument.
            _ => mistake(host, Status::BadArgument, format_args!("local response with an invalid header"))?,
        }
    }
    // These statuses have no body (RFC 9110, 15.3.5 and 15.4.5), whatever the guest gives for one.
    let body = if matches!(status, 204 | 304) { Bytes::new() } else { Bytes::copy_from_slice(body) };
    let response = LocalResponse { status, details, body, headers, grpc_status: parts.grpc_status };
    match host.effects() {
        Some(effects) if effects.local_response.is_none() => {
            effects.local_response = Some(Box::new(response));
            Ok(())
        }
        Some(_) => mistake(host, Status::BadArgument, format_args!("second local response ignored")),
        None => mistake(host, Status::BadArgument, format_args!("local response outside of a stream")),
    }
}
