//! gRPC calls. Nothing is sent here: calls and messages are recorded and go out once the guest has returned.

use bytes::Bytes;
use wasmtime::Linker;

use super::callouts::{fields, name, start, timeout};
use super::run;
use crate::abi::Status;
use crate::callout::{CallKind, Callout, GrpcCallout, Outgoing};
use crate::grpc_service;
use crate::guest_memory::{Call, Hostcall, bytes, check_writable, split};
use crate::host::Host;

pub(super) fn link(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    linker.func_wrap(
        "env",
        "proxy_grpc_call",
        |call: Call<'_>,
         upstream: u32,
         upstream_len: u32,
         service: u32,
         service_len: u32,
         method: u32,
         method_len: u32,
         metadata: u32,
         metadata_len: u32,
         message: u32,
         message_len: u32,
         timeout_ms: i32,
         token_at: u32| {
            let parts = Parts {
                upstream: (upstream, upstream_len),
                service: (service, service_len),
                method: (method, method_len),
                metadata: (metadata, metadata_len),
                message: Some((message, message_len)),
                timeout_ms,
            };
            run(call, |call| begin(call, &parts, token_at))
        },
    )?;
    linker.func_wrap(
        "env",
        "proxy_grpc_stream",
        |call: Call<'_>,
         upstream: u32,
         upstream_len: u32,
         service: u32,
         service_len: u32,
         method: u32,
         method_len: u32,
         metadata: u32,
         metadata_len: u32,
         token_at: u32| {
            let parts = Parts {
                upstream: (upstream, upstream_len),
                service: (service, service_len),
                method: (method, method_len),
                metadata: (metadata, metadata_len),
                message: None,
                timeout_ms: 0,
            };
            run(call, |call| begin(call, &parts, token_at))
        },
    )?;
    linker.func_wrap("env", "proxy_grpc_send", |call: Call<'_>, token: u32, p: u32, n: u32, end: u32| {
        run(call, |call| send(call, token, (p, n), end != 0))
    })?;
    linker.func_wrap("env", "proxy_grpc_cancel", |call: Call<'_>, token: u32| run(call, |call| cancel(call, token)))?;
    linker.func_wrap("env", "proxy_grpc_close", |call: Call<'_>, token: u32| run(call, |call| close(call, token)))?;
    Ok(())
}

struct Parts {
    upstream: (u32, u32),
    service: (u32, u32),
    method: (u32, u32),
    metadata: (u32, u32),
    message: Option<(u32, u32)>,
    timeout_ms: i32,
}

/// SDKs take INTERNAL_FAILURE for a call that cannot be made and PARSE_FAILURE for a service that cannot be read.
fn begin(call: &mut Call<'_>, parts: &Parts, token_at: u32) -> Hostcall {
    check_writable(call, token_at, 4)?;
    let (memory, host) = split(call)?;
    let at = |(ptr, len): (u32, u32)| bytes(memory, ptr, len);
    let refused = |_| Status::InternalFailure;
    let upstream = upstream(host, at(parts.upstream)?)?;
    let service = name(at(parts.service)?).map_err(refused)?;
    let method = name(at(parts.method)?).map_err(refused)?;
    if !is_path_segment(&service) || !is_path_segment(&method) {
        return Err(Status::InternalFailure.into());
    }
    let metadata = fields(at(parts.metadata)?).map_err(refused)?;
    let timeout = timeout(parts.timeout_ms).map_err(refused)?;
    let most = host.plugin.spec.limits.callout_body_bytes;
    let message = match parts.message {
        None => None,
        Some(message) => {
            let message = at(message)?;
            if message.len() > most {
                return Err(Status::InternalFailure.into());
            }
            Some(Bytes::copy_from_slice(message))
        }
    };
    let kind = if message.is_some() { CallKind::GrpcUnary } else { CallKind::GrpcStream { closed: false } };
    let callout = GrpcCallout { upstream, service, method, metadata, message, timeout, max_message: most };
    start(call, kind, Callout::Grpc(callout), token_at)
}

/// The upstream that a service stands for: its name, or Envoy's description of it.
fn upstream(host: &Host, service: &[u8]) -> Result<String, Status> {
    let plugin = &host.plugin;
    let known = |name: &str| plugin.services.has_upstream(&plugin.spec.name, name);
    if let Ok(text) = std::str::from_utf8(service)
        && known(text)
    {
        return Ok(text.to_owned());
    }
    match grpc_service::cluster_name(service) {
        Some(name) if known(name) => Ok(name.to_owned()),
        Some(_) => Err(Status::InternalFailure),
        // A name that is none of ours can be read and not be called.
        None if std::str::from_utf8(service).is_ok_and(is_path_segment) => Err(Status::InternalFailure),
        None => Err(Status::ParseFailure),
    }
}

fn is_path_segment(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_graphic() && !matches!(b, b'/' | b'?' | b'#'))
}

fn send(call: &mut Call<'_>, token: u32, message: (u32, u32), end: bool) -> Hostcall {
    let (memory, host) = split(call)?;
    let message = bytes(memory, message.0, message.1)?;
    if message.len() > host.plugin.spec.limits.callout_body_bytes {
        return Err(Status::BadArgument.into());
    }
    match host.calls.get_mut(token).map(|call| &mut call.kind) {
        Some(CallKind::GrpcStream { closed }) if !*closed => *closed = end,
        // Another kind of call, or one that the guest has closed.
        Some(_) => return Err(Status::BadArgument.into()),
        None => return Err(Status::NotFound.into()),
    }
    host.calls.outbox.push(Outgoing::Send { token, message: Bytes::copy_from_slice(message), end });
    Ok(())
}

/// Breaks the call off. The guest hears nothing more of it.
fn cancel(call: &mut Call<'_>, token: u32) -> Hostcall {
    let calls = &mut call.data_mut().calls;
    match calls.get_mut(token).map(|call| call.kind) {
        Some(CallKind::GrpcUnary | CallKind::GrpcStream { .. }) => {
            calls.end(token);
            calls.outbox.push(Outgoing::Cancel(token));
            Ok(())
        }
        Some(CallKind::Http | CallKind::Redis) | None => Err(Status::NotFound.into()),
    }
}

/// Ends the guest's side of a stream; a unary call, which has no other side to it, is broken off.
fn close(call: &mut Call<'_>, token: u32) -> Hostcall {
    let calls = &mut call.data_mut().calls;
    match calls.get_mut(token).map(|call| &mut call.kind) {
        Some(CallKind::GrpcStream { closed }) => {
            if !std::mem::replace(closed, true) {
                calls.outbox.push(Outgoing::Close(token));
            }
            Ok(())
        }
        Some(CallKind::GrpcUnary) => cancel(call, token),
        Some(CallKind::Http | CallKind::Redis) | None => Err(Status::NotFound.into()),
    }
}
