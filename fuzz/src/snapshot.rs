//! The state snapshot.

use turnstile_fleet::snapshot::{Snapshot, SnapshotError};
use xxhash_rust::xxh3::xxh3_64;

/// Any bytes are a snapshot or an error; what is read comes out of being written and read again, and fits its bound without
/// losing a worker. The input is a file, and what lies behind the head of one.
pub fn snapshot(data: &[u8]) {
    check(data);
    // With a head that fits, as somebody who writes files on purpose would have it.
    let (length, hash) = ((data.len() as u64).to_le_bytes(), xxh3_64(data).to_le_bytes());
    let version = 1_u32.to_le_bytes();
    check(&[b"TURNSNAP", &version[..], &length, &hash, data].concat());
}

fn check(file: &[u8]) {
    let read = match Snapshot::decode(file) {
        Ok(read) => read,
        Err(error) => {
            assert!(error.to_string().len() < 200);
            assert!(error != SnapshotError::Foreign || !file.starts_with(b"TURNSNAP") || file.len() < 12);
            return;
        }
    };
    let workers = read.workers.len();
    assert!(read.sessions.iter().filter_map(|s| s.worker).all(|worker| (worker.0 as usize) < workers));
    assert!(read.index.iter().all(|index| (index.worker.0 as usize) < workers));
    let whole = read.encode(usize::MAX);
    assert_eq!(Snapshot::decode(&whole).expect("what was written is read"), read);
    for bound in [0, whole.len() / 2, whole.len()] {
        let bounded = read.encode(bound);
        let kept = Snapshot::decode(&bounded).expect("a bounded snapshot is one");
        assert_eq!(kept.workers, read.workers);
        assert!(kept.sessions.iter().all(|session| read.sessions.contains(session)));
        let without = Snapshot { sessions: Vec::new(), index: Vec::new(), ..read.clone() }.encode(usize::MAX).len();
        assert!(bounded.len() <= bound.max(without + 8 * read.index.len()), "{} of {bound} bytes", bounded.len());
    }
}
