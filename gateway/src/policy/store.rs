//! Where `turnstile.kv_get`, `turnstile.kv_entry` and `turnstile.kv_cas` read and write.

use super::env::PolicyStore;
use std::sync::Arc;
use turnstile_plugins::NameSpace;

/// A name space of the process's shared data.
pub struct SharedStore(pub NameSpace);

impl PolicyStore for SharedStore {
    fn get(&self, key: &[u8]) -> Option<(Vec<u8>, u64)> {
        self.0.get(key).map(|(value, cas)| (value.to_vec(), u64::from(cas)))
    }

    fn compare_and_set(&self, key: &[u8], value: &[u8], version: u64) -> bool {
        let cas = u32::try_from(version).unwrap_or(u32::MAX);
        self.0.set(key, value, cas).is_ok()
    }
}

/// What a shadow sees: its own data, and beneath them the data of all, which it does not write.
pub struct ShadowStore {
    /// Its own.
    pub own: Arc<dyn PolicyStore>,
    /// Everybody's.
    pub beneath: Arc<dyn PolicyStore>,
}

/// Marks the versions of a shadow's own data: both stores count from 1.
const OWN: u64 = 1 << 32;

impl PolicyStore for ShadowStore {
    fn get(&self, key: &[u8]) -> Option<(Vec<u8>, u64)> {
        let own = self.own.get(key).map(|(value, version)| (value, version | OWN));
        own.or_else(|| self.beneath.get(key))
    }

    fn compare_and_set(&self, key: &[u8], value: &[u8], version: u64) -> bool {
        if self.own.get(key).is_some() {
            let is_own = version == 0 || version & OWN != 0;
            return is_own && self.own.compare_and_set(key, value, version & !OWN);
        }
        // Its first write of a key: the version it knows is everybody's.
        let known = self.beneath.get(key).map_or(0, |(_, version)| version);
        (version == 0 || version == known) && self.own.compare_and_set(key, value, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use turnstile_plugins::SharedState;

    #[test]
    fn a_shadow_reads_what_all_wrote_and_writes_for_itself() {
        let shared = SharedState::default();
        let all: Arc<dyn PolicyStore> = Arc::new(SharedStore(shared.data.space("all")));
        let own: Arc<dyn PolicyStore> = Arc::new(SharedStore(shared.data.space("own")));
        let shadow = ShadowStore { own, beneath: Arc::clone(&all) };
        let value = |store: &dyn PolicyStore| store.get(b"k").map(|(value, _)| value);
        assert!(all.compare_and_set(b"k", b"theirs", 0));
        let (seen, version) = shadow.get(b"k").unwrap_or_default();
        assert_eq!(seen, b"theirs");
        assert!(!shadow.compare_and_set(b"k", b"mine", version + 1), "not the version that is there");
        assert!(shadow.compare_and_set(b"k", b"mine", version));
        assert_eq!((value(&shadow), value(&*all)), (Some(b"mine".to_vec()), Some(b"theirs".to_vec())));
        // From now on its own version counts, and that of the others does not, whatever its number.
        assert!(!shadow.compare_and_set(b"k", b"stale", version));
        let (_, version) = shadow.get(b"k").unwrap_or_default();
        assert!(!shadow.compare_and_set(b"k", b"late", version + 7));
        assert!(shadow.compare_and_set(b"k", b"again", version));
        assert_eq!((value(&shadow), value(&*all)), (Some(b"again".to_vec()), Some(b"theirs".to_vec())));
    }
}
