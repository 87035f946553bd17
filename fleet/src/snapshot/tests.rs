#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use super::*;
use proptest::prelude::*;

fn session(n: u128) -> SavedSession {
    SavedSession {
        key: SessionKey(n),
        mode: SessionMode::Tag,
        wish: Some(ModeWish::Auto),
        worker: Some(WorkerId(0)),
        rank: Some(1),
        tag: Some(format!("ts-{n:032x}-00000000000000aa-{n:x}").into()),
        has_context: false,
        ttl_ms: 300_000,
        age_ms: 9_000,
        idle_ms: u64::try_from(n).unwrap() * 10,
        turns: 3,
        last_tokens: 1_234,
        last_cached_tokens: 1_000,
    }
}

fn snapshot() -> Snapshot {
    let bare = SavedSession {
        mode: SessionMode::Stream,
        wish: None,
        worker: None,
        rank: None,
        tag: None,
        has_context: true,
        ..session(9)
    };
    let block = |hash, parent| SavedBlock { hash, parent };
    Snapshot {
        saved_at_ms: 1_764_000_000_000,
        seed_mark: seed_mark(7),
        block_bytes: 512,
        workers: vec![
            SavedWorker { id: "a".into(), url: "http://a:1".into(), draining: true, prefill_total: 5 },
            SavedWorker { id: "wörker".into(), url: "https://b".into(), ..SavedWorker::default() },
        ],
        sessions: vec![session(1), session(2), bare],
        index: vec![
            SavedIndex { worker: WorkerId(1), blocks: vec![block(1, None), block(2, Some(0)), block(3, None)] },
            SavedIndex { worker: WorkerId(0), blocks: Vec::new() },
        ],
    }
}

#[test]
fn what_is_written_is_read() {
    let file = snapshot().encode(usize::MAX);
    assert_eq!(Snapshot::decode(&file), Ok(snapshot()));
    assert_eq!(Snapshot::decode(&Snapshot::default().encode(0)), Ok(Snapshot::default()));
}

#[test]
fn a_file_of_another_kind_version_or_length_is_told_apart() {
    let file = snapshot().encode(usize::MAX);
    assert_eq!(Snapshot::decode(b""), Err(SnapshotError::Foreign));
    assert_eq!(Snapshot::decode(b"SQLite format 3\0 and so on"), Err(SnapshotError::Foreign));
    let mut newer = file.clone();
    newer[8] = 2;
    assert_eq!(Snapshot::decode(&newer), Err(SnapshotError::Version(2)));
    for end in 12..file.len() {
        assert!(matches!(Snapshot::decode(&file[..end]), Err(SnapshotError::Length { .. })), "cut at {end}");
    }
    let longer = [file.as_slice(), b"\0"].concat();
    assert!(matches!(Snapshot::decode(&longer), Err(SnapshotError::Length { .. })));
}

#[test]
fn a_changed_bit_anywhere_is_found() {
    let file = snapshot().encode(usize::MAX);
    for at in 0..file.len() * 8 {
        let mut changed = file.clone();
        changed[at / 8] ^= 1 << (at % 8);
        assert!(Snapshot::decode(&changed).is_err(), "bit {at}");
    }
}

/// With a checksum that fits, as somebody who writes files on purpose would have it.
fn resealed(mut file: Vec<u8>) -> Vec<u8> {
    let (length, hash) = (file.len() - HEAD_BYTES, xxh3_64(&file[HEAD_BYTES..]));
    put(&mut file, 12, length as u64);
    put(&mut file, 20, hash);
    file
}

#[test]
fn what_makes_no_sense_is_refused_although_the_checksum_is_right() {
    let file = snapshot().encode(usize::MAX);
    let mut huge = file.clone();
    huge[HEAD_BYTES + 20..HEAD_BYTES + 24].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(Snapshot::decode(&resealed(huge)), Err(SnapshotError::Malformed("the number of workers")));
    let more = [file.as_slice(), b"x"].concat();
    assert_eq!(Snapshot::decode(&resealed(more)), Err(SnapshotError::Malformed("what follows the index")));

    let mut stranger = snapshot();
    stranger.sessions[0].worker = Some(WorkerId(2));
    assert_eq!(Snapshot::decode(&stranger.encode(usize::MAX)), Err(SnapshotError::Malformed("a session")));
    let mut forward = snapshot();
    forward.index[0].blocks[0].parent = Some(0);
    assert_eq!(Snapshot::decode(&forward.encode(usize::MAX)), Err(SnapshotError::Malformed("an index")));
}

#[test]
fn a_file_stays_within_its_bound_and_keeps_what_was_used_last() {
    let mut whole = snapshot();
    whole.sessions = (1..100).map(session).collect();
    whole.index[0].blocks =
        (0..1_000).map(|n| SavedBlock { hash: n, parent: n.checked_sub(1).map(|p| p as u32) }).collect();
    let size = whole.encode(usize::MAX).len();
    for bound in [400, 2_000, 10_000, 14_000, size - 1, size] {
        let file = whole.encode(bound);
        assert!(file.len() <= bound, "{} of {bound}", file.len());
        let kept = Snapshot::decode(&file).unwrap();
        let keys: Vec<u128> = kept.sessions.iter().map(|session| session.key.0).collect();
        assert_eq!(keys, (1..=keys.len() as u128).collect::<Vec<_>>(), "the longest idle go first");
        let blocks = &kept.index[0].blocks;
        assert!(kept.sessions.len() == 99 || blocks.is_empty(), "sessions come before blocks");
        assert_eq!(blocks[..], whole.index[0].blocks[..blocks.len()]);
    }
}

#[test]
fn the_mark_of_a_seed_tells_seeds_apart_and_is_not_the_seed() {
    assert_eq!(seed_mark(7), seed_mark(7));
    assert_ne!(seed_mark(7), seed_mark(8));
    assert_ne!(seed_mark(7), 7);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_have_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..400), sealed in any::<bool>()) {
        let mut file = snapshot().encode(usize::MAX)[..HEAD_BYTES].to_vec();
        file.extend_from_slice(&bytes);
        let _ = Snapshot::decode(&if sealed { resealed(file) } else { bytes });
    }

    #[test]
    fn a_sealed_file_with_changed_bytes_has_an_answer(changes in prop::collection::vec((any::<u16>(), any::<u8>()), 1..6)) {
        let mut file = snapshot().encode(usize::MAX);
        for (at, byte) in changes {
            let at = HEAD_BYTES + usize::from(at) % (file.len() - HEAD_BYTES);
            file[at] = byte;
        }
        if let Ok(read) = Snapshot::decode(&resealed(file)) {
            prop_assert_eq!(Snapshot::decode(&read.encode(usize::MAX)), Ok(read));
        }
    }
}
