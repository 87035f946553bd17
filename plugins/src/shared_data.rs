//! Key-value data that outlives instances and reloads: one store for the process, a name space for each VM id.

use std::sync::Arc;

use bytes::Bytes;
use hashbrown::HashMap;
use parking_lot::Mutex;

/// What each entry costs beside its key and value, bytes; an estimate of the table's own use.
const ENTRY_OVERHEAD: usize = 64;

/// All name spaces of shared data. Cheap to clone; clones are the same store.
#[derive(Clone, Debug)]
pub struct SharedData {
    spaces: Arc<Mutex<HashMap<String, NameSpace>>>,
    bytes_per_space: usize,
}

/// The data of one VM id. Cheap to clone; clones are the same data.
#[derive(Clone, Debug)]
pub struct NameSpace {
    data: Arc<Mutex<Table>>,
    limit: usize,
}

#[derive(Debug, Default)]
struct Table {
    entries: HashMap<Box<[u8]>, Entry>,
    bytes: usize,
    last_cas: u32,
}

#[derive(Debug)]
struct Entry {
    value: Bytes,
    cas: u32,
}

/// Why a write was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SharedDataError {
    /// The value changed since it was read.
    #[error("the value changed since it was read")]
    CasMismatch,
    /// The name space is full.
    #[error("shared data is full")]
    Full,
}

// === impl SharedData ===

impl Default for SharedData {
    fn default() -> Self {
        Self::new(64 << 20)
    }
}

impl SharedData {
    /// A store whose name spaces hold at most so many bytes each.
    pub fn new(bytes_per_space: usize) -> Self {
        Self { spaces: Arc::default(), bytes_per_space }
    }

    /// The name space of a VM id, made if it is new.
    pub fn space(&self, vm_id: &str) -> NameSpace {
        let mut spaces = self.spaces.lock();
        if let Some(space) = spaces.get(vm_id) {
            return space.clone();
        }
        let space = NameSpace { data: Arc::default(), limit: self.bytes_per_space };
        spaces.insert(vm_id.to_owned(), space.clone());
        space
    }

    /// Forgets the VM ids that are not wanted any more; plugins that still hold such a name space keep its data to themselves.
    pub fn retain(&self, mut wanted: impl FnMut(&str) -> bool) {
        self.spaces.lock().retain(|vm_id, _| wanted(vm_id));
    }

    /// Bytes used by each VM id.
    pub fn usage(&self) -> Vec<(String, usize)> {
        self.spaces.lock().iter().map(|(id, space)| (id.clone(), space.bytes())).collect()
    }
}

// === impl NameSpace ===

impl NameSpace {
    /// A value and the number that a conditional write must quote; the number is never 0.
    pub fn get(&self, key: &[u8]) -> Option<(Bytes, u32)> {
        self.data.lock().entries.get(key).map(|entry| (entry.value.clone(), entry.cas))
    }

    /// Writes a value. `cas` 0 writes always; else the entry must exist and still have this number.
    ///
    /// # Errors
    /// [`SharedDataError`]; nothing was written then.
    pub fn set(&self, key: &[u8], value: &[u8], cas: u32) -> Result<(), SharedDataError> {
        let mut table = self.data.lock();
        let table = &mut *table;
        let present = table.entries.get_mut(key);
        if cas != 0 && present.as_ref().is_none_or(|entry| entry.cas != cas) {
            return Err(SharedDataError::CasMismatch);
        }
        let old = present.as_ref().map_or(0, |entry| key.len() + entry.value.len() + ENTRY_OVERHEAD);
        let new = key.len() + value.len() + ENTRY_OVERHEAD;
        let bytes = table.bytes - old + new;
        if bytes > self.limit && new > old {
            return Err(SharedDataError::Full);
        }
        table.bytes = bytes;
        // Skips 0, which means "write always" in a guest's call.
        table.last_cas = table.last_cas.checked_add(1).unwrap_or(1);
        let entry = Entry { value: Bytes::copy_from_slice(value), cas: table.last_cas };
        match present {
            Some(slot) => *slot = entry,
            None => {
                table.entries.insert(key.into(), entry);
            }
        }
        Ok(())
    }

    /// Bytes in use, keys and bookkeeping included.
    pub fn bytes(&self) -> usize {
        self.data.lock().bytes
    }
}

#[cfg(test)]
#[path = "shared_data_tests.rs"]
mod tests;
