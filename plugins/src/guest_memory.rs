//! Reading and writing guest memory. Every access is checked; nothing a guest hands over is believed.

use wasmtime::{AsContextMut, Caller, Memory};

use crate::abi::Status;
use crate::env::StreamEnv;
use crate::host::{Host, Phase};

/// A hostcall in progress.
pub(crate) type Call<'a> = Caller<'a, Host>;

/// Why a hostcall ended early.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The guest gets this status.
    Answer(Status),
    /// The guest is stopped.
    Trap(wasmtime::Error),
}

/// What a hostcall comes to; `Ok` is status OK.
pub(crate) type Hostcall<T = ()> = Result<T, Stop>;

impl From<Status> for Stop {
    fn from(status: Status) -> Self {
        Self::Answer(status)
    }
}

/// A guest that cannot go on, for a reason that is not a wasm trap.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum GuestStop {
    #[error("guest called proc_exit({0})")]
    Exit(u32),
    #[error("guest called abort at line {0}, column {1}")]
    Abort(u32, u32),
    #[error("guest exports neither malloc nor proxy_on_memory_allocate")]
    NoAllocator,
    #[error("guest exports no memory")]
    NoMemory,
    #[error("guest allocator returned 0 for {0} bytes")]
    AllocatedNothing(usize),
    #[error("guest allocator returned {ptr} for {len} bytes, beyond its memory")]
    AllocatedOutside {
        /// Where.
        ptr: u32,
        /// How much was asked for.
        len: usize,
    },
}

impl From<GuestStop> for Stop {
    fn from(stop: GuestStop) -> Self {
        Self::Trap(wasmtime::Error::new(stop))
    }
}

fn memory(call: &mut Call<'_>) -> Hostcall<Memory> {
    if let Some(memory) = call.data().memory {
        return Ok(memory);
    }
    // During the module's start function the host does not know its memory yet.
    let memory = call.get_export("memory").and_then(wasmtime::Extern::into_memory).ok_or(GuestStop::NoMemory)?;
    Ok(memory)
}

/// The guest's memory and the host's data, both borrowed.
pub(crate) fn split<'a>(call: &'a mut Call<'_>) -> Hostcall<(&'a mut [u8], &'a mut Host)> {
    let memory = memory(call)?;
    Ok(memory.data_and_store_mut(call.as_context_mut()))
}

/// Bytes that the guest points to.
pub(crate) fn bytes(memory: &[u8], ptr: u32, len: u32) -> Result<&[u8], Status> {
    let start = ptr as usize;
    let end = start.checked_add(len as usize).ok_or(Status::InvalidMemoryAccess)?;
    memory.get(start..end).ok_or(Status::InvalidMemoryAccess)
}

/// Longest name of a metric, a function or a virtual machine, bytes.
const MAX_NAME: u32 = 4096;

/// A copy of a name that the guest points to; invalid UTF-8 is replaced.
pub(crate) fn text(call: &mut Call<'_>, ptr: u32, len: u32) -> Hostcall<String> {
    let (memory, _) = split(call)?;
    if len > MAX_NAME {
        return Err(Status::BadArgument.into());
    }
    Ok(String::from_utf8_lossy(bytes(memory, ptr, len)?).into_owned())
}

fn write_at(memory: &mut [u8], ptr: u32, value: &[u8]) -> Result<(), Status> {
    let start = ptr as usize;
    let end = start.checked_add(value.len()).ok_or(Status::InvalidMemoryAccess)?;
    memory.get_mut(start..end).ok_or(Status::InvalidMemoryAccess)?.copy_from_slice(value);
    Ok(())
}

/// Stores a u32 where the guest points; any alignment will do.
pub(crate) fn store_u32(call: &mut Call<'_>, ptr: u32, value: u32) -> Hostcall {
    Ok(write_at(split(call)?.0, ptr, &value.to_le_bytes())?)
}

/// Stores a u64 where the guest points; any alignment will do.
pub(crate) fn store_u64(call: &mut Call<'_>, ptr: u32, value: u64) -> Hostcall {
    Ok(write_at(split(call)?.0, ptr, &value.to_le_bytes())?)
}

/// Copies bytes to where the guest points.
pub(crate) fn store_bytes(call: &mut Call<'_>, ptr: u32, value: &[u8]) -> Hostcall {
    Ok(write_at(split(call)?.0, ptr, value)?)
}

/// Fails unless a u32 (or, with 8, a u64) can be stored at `ptr`: checked before anything is allocated or changed.
pub(crate) fn check_writable(call: &mut Call<'_>, ptr: u32, size: u32) -> Hostcall {
    bytes(split(call)?.0, ptr, size)?;
    Ok(())
}

/// Gives bytes to the guest: allocates in its memory, copies, and stores pointer and length where it asked. The guest
/// owns them from then on. Nothing is allocated for no bytes: SDKs do not cope with an allocation of size 0.
pub(crate) fn hand_over(call: &mut Call<'_>, value: &[u8], ptr_at: u32, len_at: u32) -> Hostcall {
    check_writable(call, ptr_at, 4)?;
    check_writable(call, len_at, 4)?;
    let ptr = if value.is_empty() { 0 } else { allocate_and_copy(call, value)? };
    store_u32(call, ptr_at, ptr)?;
    store_u32(call, len_at, u32::try_from(value.len()).map_err(|_| Status::InternalFailure)?)
}

fn allocate_and_copy(call: &mut Call<'_>, value: &[u8]) -> Hostcall<u32> {
    let len = u32::try_from(value.len()).map_err(|_| Status::InternalFailure)?;
    let host = call.data_mut();
    let allocate = host.allocate.clone().ok_or(GuestStop::NoAllocator)?;
    let phase = std::mem::replace(&mut host.phase, Phase::Allocating);
    let allocated = allocate.call(&mut *call, len);
    call.data_mut().phase = phase;
    let ptr = allocated.map_err(Stop::Trap)?;
    if ptr == 0 {
        return Err(GuestStop::AllocatedNothing(value.len()).into());
    }
    // The allocator may have grown the memory: look it up again.
    let (memory, _) = split(call)?;
    write_at(memory, ptr, value).map_err(|_| GuestStop::AllocatedOutside { ptr, len: value.len() })?;
    Ok(ptr)
}

/// Runs `use_env` with the effective context's environment taken out of the store, so that what it lends can be copied
/// into guest memory directly. Nothing if no environment is lent for the effective context.
pub(crate) fn with_env<'c, R>(
    call: &mut Call<'c>,
    use_env: impl FnOnce(&mut Call<'c>, &mut dyn StreamEnv) -> R,
) -> Option<R> {
    /// Puts the environment back, come what may: the gateway must have it again after a panic, too.
    struct Taken<'a, 'c> {
        call: &'a mut Call<'c>,
        env: Box<dyn StreamEnv>,
    }
    impl Drop for Taken<'_, '_> {
        fn drop(&mut self) {
            let env = std::mem::replace(&mut self.env, Box::new(crate::env::NoEnv));
            // The guest cannot have changed the context meanwhile: only its allocator runs.
            if let Some(slot) = self.call.data_mut().env_slot() {
                *slot = Some(env);
            }
        }
    }
    let env = call.data_mut().env_slot()?.take()?;
    let mut taken = Taken { call, env };
    let taken = &mut taken;
    Some(use_env(taken.call, &mut *taken.env))
}
