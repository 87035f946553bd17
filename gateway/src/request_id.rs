//! Request ids: the client's `x-request-id` where it is sane, else one of ours; and the engine's `rid`, one per attempt.

use std::cell::RefCell;

/// Ids that a thread takes from the kernel at a time: a call of the kernel costs more than all else about an id.
const STOCK: usize = 32;

/// The longest `x-request-id` kept, in bytes.
pub const MAX_LEN: usize = 128;

/// 128 random bits as 32 hex digits.
pub fn random_hex() -> String {
    format!("{:032x}", random_u128())
}

/// 128 random bits, as good as the kernel's: who knows an id can ask a worker for the answer that goes by it.
pub fn random_u128() -> u128 {
    thread_local! {
        static IDS: RefCell<Vec<[u8; 16]>> = const { RefCell::new(Vec::new()) };
    }
    IDS.with_borrow_mut(|ids| {
        if ids.is_empty() {
            ids.resize(STOCK, [0; 16]);
            if getrandom::fill(ids.as_flattened_mut()).is_err() {
                ids.clear();
            }
        }
        match ids.pop() {
            Some(id) => u128::from_le_bytes(id),
            // The kernel refused entropy; a time-based id is still unique in this process.
            None => (u128::from(crate::clock::unix_ms()) << 64) | u128::from(crate::clock::now_ms()),
        }
    })
}

/// The id a request goes by: the client's, when it is at most [`MAX_LEN`] visible ASCII characters, else a fresh one.
pub fn choose(client: Option<&[u8]>) -> String {
    match client {
        Some(id) if !id.is_empty() && id.len() <= MAX_LEN && id.iter().all(|b| b.is_ascii_graphic()) => {
            String::from_utf8_lossy(id).into_owned()
        }
        _ => random_hex(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_sane_client_id_is_kept_and_an_odd_one_replaced() {
        assert_eq!(choose(Some(b"abc-123")), "abc-123");
        for odd in [&b""[..], b"has space", b"new\nline", &[b'a'; MAX_LEN + 1], b"\xff"] {
            let id = choose(Some(odd));
            assert_eq!(id.len(), 32, "{odd:?}");
        }
        assert_ne!(choose(None), choose(None));
    }

    #[test]
    fn no_id_comes_twice() {
        let mut ids: Vec<u128> = (0..10 * STOCK).map(|_| random_u128()).collect();
        ids.extend(std::thread::spawn(|| (0..10 * STOCK).map(|_| random_u128()).collect::<Vec<_>>()).join().unwrap());
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), 20 * STOCK);
    }
}
