//! HTTP and gRPC callouts. This host makes none: it answers with the status that SDKs take as "failed at once".

use wasmtime::Linker;

use super::run;
use crate::abi::Status;
use crate::guest_memory::{Call, Hostcall};
use crate::host::{Host, Once};

pub(super) fn link(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    linker.func_wrap(
        "env",
        "proxy_http_call",
        |call: Call<'_>, _: u32, _: u32, _: u32, _: u32, _: u32, _: u32, _: u32, _: u32, _: u32, _: u32| {
            run(call, |call| refuse(call, Once::HttpCall, "HTTP"))
        },
    )?;
    linker.func_wrap(
        "env",
        "proxy_grpc_call",
        |call: Call<'_>,
         _: u32,
         _: u32,
         _: u32,
         _: u32,
         _: u32,
         _: u32,
         _: u32,
         _: u32,
         _: u32,
         _: u32,
         _: u32,
         _: u32| { run(call, |call| refuse(call, Once::GrpcCall, "gRPC")) },
    )?;
    linker.func_wrap(
        "env",
        "proxy_grpc_stream",
        |call: Call<'_>, _: u32, _: u32, _: u32, _: u32, _: u32, _: u32, _: u32, _: u32, _: u32| {
            run(call, |call| refuse(call, Once::GrpcCall, "gRPC"))
        },
    )?;
    // No call is ever open, so no token is known.
    linker.func_wrap("env", "proxy_grpc_send", |call: Call<'_>, _: u32, _: u32, _: u32, _: u32| {
        run(call, |_| Err(Status::NotFound.into()))
    })?;
    for name in ["proxy_grpc_cancel", "proxy_grpc_close"] {
        linker.func_wrap("env", name, |call: Call<'_>, _: u32| run(call, |_| Err(Status::NotFound.into())))?;
    }
    Ok(())
}

fn refuse(call: &mut Call<'_>, once: Once, what: &str) -> Hostcall {
    call.data()
        .plugin
        .say_once(once, format_args!("{what} callouts are not available; the plugin is told they failed"));
    Err(Status::InternalFailure.into())
}
