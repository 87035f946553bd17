#![allow(clippy::unwrap_used)]

use super::*;

fn header(version: u32, record: u32, count: u32) -> Vec<u8> {
    [version, record, count, 0].iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// A record whose every field differs, laid out by hand from the documented offsets.
fn record() -> Vec<u8> {
    let mut bytes = vec![0u8; 104];
    for (offset, value) in [(0, 7u32), (4, 1), (8, 5), (12, 3), (16, 11), (20, 2), (24, 64), (28, 3)] {
        bytes.splice(offset..offset + 4, value.to_le_bytes());
    }
    for (offset, value) in [(32, 900u64), (40, 10_000), (48, 1 << 40), (56, 512), (88, 77), (96, 1234)] {
        bytes.splice(offset..offset + 8, value.to_le_bytes());
    }
    for (offset, value) in [(64, 8000.5f64), (72, 120.0), (80, 9.25)] {
        bytes.splice(offset..offset + 8, value.to_le_bytes());
    }
    bytes
}

#[test]
fn every_field_is_read_from_its_documented_offset() {
    let table = [header(1, 104, 1), record()].concat();
    let worker = Workers::parse(table).unwrap().iter().next().unwrap();
    assert_eq!(
        worker,
        Worker {
            index: 7,
            state: WorkerState::Draining,
            capabilities: 5,
            in_flight: 3,
            running: 11,
            waiting: 2,
            max_running: 64,
            flags: 3,
            waiting_uncached_tokens: 900,
            kv_used_tokens: 10_000,
            kv_capacity_tokens: 1 << 40,
            cached_tokens: 512,
            prefill_tokens_per_s: 8000.5,
            ttft_ms: 120.0,
            itl_ms: 9.25,
            pending_prefill_tokens: 77,
            expected_decode_tokens: 1234,
        }
    );
    assert!(worker.is_bound() && worker.is_at_limit() && !worker.is_excluded() && !worker.is_candidate());
    assert!(worker.can_tag() && !worker.can_stream() && worker.takes_priority());
}

#[test]
fn what_is_written_is_read_back() {
    let worker = Workers::parse([header(1, 104, 1), record()].concat()).unwrap().iter().next().unwrap();
    let mut table = header(1, 104, 1);
    worker.write(&mut table);
    assert_eq!(Workers::parse(table).unwrap().iter().next(), Some(worker));
}

#[test]
fn records_may_grow() {
    let mut table = header(1, 120, 2);
    for index in [4u32, 9] {
        let mut bytes = record();
        bytes.splice(0..4, index.to_le_bytes());
        table.extend(bytes);
        table.extend([0xff; 16]);
    }
    let indices: Vec<u32> = Workers::parse(table).unwrap().iter().map(|worker| worker.index).collect();
    assert_eq!(indices, [4, 9]);
}

#[test]
fn bytes_after_the_last_record_are_ignored() {
    let table = [header(1, 104, 1), record(), record()].concat();
    assert_eq!(Workers::parse(table).unwrap().iter().count(), 1);
}

#[test]
fn a_table_that_cannot_be_right_is_refused() {
    let cases = [
        (vec![], TableError::Truncated),
        (vec![1, 0, 0], TableError::Truncated),
        (header(1, 104, 0).split_off(8), TableError::Version(0)),
        (header(2, 104, 0), TableError::Version(2)),
        (header(1, 96, 0), TableError::RecordSize(96)),
        (header(1, 104, 1), TableError::Truncated),
        ([header(1, 104, 2), record()].concat(), TableError::Truncated),
        (header(1, u32::MAX, u32::MAX), TableError::Truncated),
    ];
    for (table, error) in cases {
        assert_eq!(Workers::parse(table.clone()), Err(error), "{table:?}");
    }
}

#[test]
fn unknown_states_take_no_turns() {
    let mut bytes = record();
    bytes.splice(4..8, 17u32.to_le_bytes());
    let workers = Workers::parse([header(1, 104, 1), bytes].concat()).unwrap();
    assert!(workers.iter().all(|worker| worker.state == WorkerState::Starting && !worker.is_candidate()));
}

#[test]
fn an_empty_table_has_no_workers() {
    let workers = Workers::parse(header(1, 104, 0)).unwrap();
    assert!(workers.is_empty() && workers.bound().is_none());
}

#[test]
fn no_bytes_make_it_panic() {
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 33
    };
    let good = [header(1, 104, 2), record(), record()].concat();
    for _ in 0..5_000 {
        let mut table = good.clone();
        table.truncate(random() as usize % (good.len() + 1));
        for _ in 0..random() % 4 {
            let at = random() as usize % good.len().min(40);
            if let Some(byte) = table.get_mut(at) {
                *byte = random() as u8;
            }
        }
        if let Ok(workers) = Workers::parse(table) {
            assert!(workers.iter().count() <= workers.len());
        }
    }
}
