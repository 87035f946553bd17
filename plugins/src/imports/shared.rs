//! Shared data, shared queues and metrics.

use std::sync::Arc;

use wasmtime::Linker;

use super::{mistake, run};
use crate::abi::{MetricType, Status};
use crate::guest_memory::{Call, Hostcall, bytes, check_writable, hand_over, split, store_u32, store_u64, text};
use crate::host::Host;
use crate::metrics::{MetricError, PluginMetrics};
use crate::shared_data::SharedDataError;
use crate::shared_queues::{QueueError, SharedQueues};

/// The metric that a plugin gets when it has defined too many, and the queue when it has registered too many: it takes values
/// and shows them to nobody.
const DISCARD: u32 = u32::MAX;

pub(super) fn link(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    link_data(linker)?;
    link_queues(linker)?;
    link_metrics(linker)
}

fn link_data(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    linker.func_wrap(
        "env",
        "proxy_get_shared_data",
        |call: Call<'_>, key: u32, key_len: u32, pp: u32, np: u32, cas_at: u32| {
            run(call, |call| {
                let (memory, host) = split(call)?;
                let found = host.plugin.name_space.get(bytes(memory, key, key_len)?);
                let (value, cas) = found.ok_or(Status::NotFound)?;
                check_writable(call, cas_at, 4)?;
                hand_over(call, &value, pp, np)?;
                store_u32(call, cas_at, cas)
            })
        },
    )?;
    linker.func_wrap(
        "env",
        "proxy_set_shared_data",
        |call: Call<'_>, key: u32, key_len: u32, value: u32, value_len: u32, cas: u32| {
            run(call, |call| {
                let (memory, host) = split(call)?;
                let (key, value) = (bytes(memory, key, key_len)?, bytes(memory, value, value_len)?);
                match host.plugin.name_space.set(key, value, cas) {
                    Ok(()) => Ok(()),
                    Err(SharedDataError::CasMismatch) => Err(Status::CasMismatch.into()),
                    Err(SharedDataError::Full) => {
                        mistake(host, Status::InternalFailure, format_args!("shared data is full; a write was dropped"))
                    }
                }
            })
        },
    )?;
    Ok(())
}

fn queues(host: &Host) -> &SharedQueues {
    &host.plugin.services.shared().queues
}

fn link_queues(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    linker.func_wrap("env", "proxy_register_shared_queue", |call: Call<'_>, name: u32, len: u32, id_at: u32| {
        run(call, |call| {
            let (memory, host) = split(call)?;
            let name = bytes(memory, name, len)?;
            let id = match queues(host).register(&host.plugin.spec.vm_id, name, host.consumer) {
                Ok(id) => {
                    host.plugin.stats.acts_apart();
                    if !host.queues.contains(&id) {
                        host.queues.push(id);
                    }
                    id
                }
                Err(error) => {
                    let words = format_args!("queue not registered: {error}; its items are dropped");
                    mistake(host, Status::InternalFailure, words)?;
                    DISCARD
                }
            };
            store_u32(call, id_at, id)
        })
    })?;
    linker.func_wrap(
        "env",
        "proxy_resolve_shared_queue",
        |call: Call<'_>, vm: u32, vm_len: u32, name: u32, name_len: u32, id_at: u32| {
            run(call, |call| {
                let vm_id = text(call, vm, vm_len)?;
                let (memory, host) = split(call)?;
                let id = queues(host).resolve(&vm_id, bytes(memory, name, name_len)?).ok_or(Status::NotFound)?;
                store_u32(call, id_at, id)
            })
        },
    )?;
    linker.func_wrap("env", "proxy_dequeue_shared_queue", |call: Call<'_>, id: u32, pp: u32, np: u32| {
        run(call, |call| {
            // Checked first: an item taken out must not get lost.
            check_writable(call, pp, 4)?;
            check_writable(call, np, 4)?;
            if id == DISCARD {
                return Err(Status::Empty.into());
            }
            let item = queues(call.data()).dequeue(id).map_err(|error| match error {
                QueueError::Empty => Status::Empty,
                _ => Status::NotFound,
            })?;
            hand_over(call, &item, pp, np)
        })
    })?;
    linker.func_wrap("env", "proxy_enqueue_shared_queue", |call: Call<'_>, id: u32, p: u32, n: u32| {
        run(call, |call| {
            let (memory, host) = split(call)?;
            let item = bytes(memory, p, n)?;
            if id == DISCARD {
                return Ok(());
            }
            match queues(host).enqueue(id, item) {
                Ok(()) => Ok(()),
                Err(QueueError::Full) => {
                    mistake(host, Status::InternalFailure, format_args!("queue {id} is full; an item was dropped"))
                }
                Err(_) => Err(Status::NotFound.into()),
            }
        })
    })?;
    Ok(())
}

fn metrics(host: &Host) -> &PluginMetrics {
    &host.plugin.services.shared().metrics
}

fn status(error: MetricError) -> Status {
    match error {
        MetricError::NotFound => Status::NotFound,
        MetricError::BadArgument => Status::BadArgument,
        MetricError::Full => Status::InternalFailure,
    }
}

fn link_metrics(linker: &mut Linker<Host>) -> wasmtime::Result<()> {
    linker.func_wrap("env", "proxy_define_metric", |call: Call<'_>, kind: u32, p: u32, n: u32, id_at: u32| {
        run(call, |call| define(call, kind, (p, n), id_at))
    })?;
    linker.func_wrap("env", "proxy_increment_metric", |call: Call<'_>, id: u32, by: i64| {
        run(call, |call| {
            let host = call.data();
            if id == DISCARD {
                return Ok(());
            }
            Ok(metrics(host).increment(&host.plugin.spec.name, id, by).map_err(status)?)
        })
    })?;
    linker.func_wrap("env", "proxy_record_metric", |call: Call<'_>, id: u32, value: u64| {
        run(call, |call| {
            let host = call.data();
            if id == DISCARD {
                return Ok(());
            }
            Ok(metrics(host).record(&host.plugin.spec.name, id, value).map_err(status)?)
        })
    })?;
    linker.func_wrap("env", "proxy_get_metric", |call: Call<'_>, id: u32, value_at: u32| {
        run(call, |call| {
            let host = call.data();
            let value = match id {
                DISCARD => 0,
                _ => metrics(host).get(&host.plugin.spec.name, id).map_err(status)?,
            };
            store_u64(call, value_at, value)
        })
    })?;
    Ok(())
}

fn define(call: &mut Call<'_>, kind: u32, name: (u32, u32), id_at: u32) -> Hostcall {
    let kind = MetricType::from_u32(kind).ok_or(Status::BadArgument)?;
    let name = text(call, name.0, name.1)?;
    let plugin = Arc::clone(&call.data().plugin);
    let id = match metrics(call.data()).define(&plugin.spec.name, kind, &name) {
        Ok(id) => id,
        Err(error) => {
            mistake(call.data(), status(error), format_args!("metric not defined: {error}; its values are dropped"))?;
            DISCARD
        }
    };
    store_u32(call, id_at, id)
}
