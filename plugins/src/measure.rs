//! What single callbacks cost, for those who want to know.

use std::time::{Duration, Instant};

use wasmtime::Store;

use crate::callback::Callback;
use crate::host::{Host, ROOT_CONTEXT};

/// One run of a callback.
#[derive(Clone, Copy, Debug)]
pub struct CallbackRun {
    /// The callback.
    pub callback: Callback,
    /// Whether it ran for the plugin itself and not for a stream. Replies to calls do.
    pub of_root: bool,
    /// How long the guest ran, the host functions that it called included.
    pub took: Duration,
    /// Linear memory before, bytes.
    pub memory_before: usize,
    /// Linear memory after, bytes.
    pub memory_after: usize,
}

/// Enters the guest by the callback that is set, and tells what it cost if somebody measures.
pub(crate) fn measured<R>(
    store: &mut Store<Host>,
    enter: impl FnOnce(&mut Store<Host>) -> wasmtime::Result<R>,
) -> wasmtime::Result<R> {
    let host = store.data();
    let (true, Some(callback)) = (host.plugin.measured, host.callback) else { return enter(store) };
    let of_root = host.effective == ROOT_CONTEXT;
    let memory_before = memory(store);
    let began = Instant::now();
    let result = enter(store);
    let took = began.elapsed();
    let run = CallbackRun { callback, of_root, took, memory_before, memory_after: memory(store) };
    store.data().plugin.services.ran(run);
    result
}

fn memory(store: &Store<Host>) -> usize {
    store.data().memory.map_or(0, |memory| memory.data_size(store))
}
