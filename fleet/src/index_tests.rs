#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

const W: WorkerId = WorkerId(1);

fn index(capacity: usize) -> PrefixIndex {
    PrefixIndex::new(capacity)
}

/// Hashes chained as prompts chain them: the hash of a block stands for all before it.
fn chain(labels: &[u64]) -> Vec<u64> {
    labels
        .iter()
        .scan(0, |before, &label| {
            *before = crate::cost::mix(*before ^ crate::cost::mix(label));
            Some(*before)
        })
        .collect()
}

fn long_chain(seed: u64, blocks: u64) -> Vec<u64> {
    chain(&(0..blocks).map(|block| seed << 32 | block).collect::<Vec<_>>())
}

#[test]
fn a_prompt_matches_as_far_as_it_is_the_same() {
    let mut index = index(100);
    index.insert(W, &chain(&[1, 2, 3, 4]));
    assert_eq!(index.matched(W, &chain(&[1, 2, 3, 4, 5, 6])), 4);
    assert_eq!(index.matched(W, &chain(&[1, 2, 9, 4])), 2);
    assert_eq!(index.matched(W, &chain(&[2, 1])), 0);
    assert_eq!(index.matched(W, &[]), 0);
    assert_eq!(index.matched(WorkerId(2), &chain(&[1, 2])), 0);
    assert_eq!(index.len(), 4);
}

#[test]
fn every_length_is_found() {
    let all = long_chain(1, 70);
    for known in 0..=all.len() {
        let mut index = index(100);
        index.insert(W, &all[..known]);
        for asked in 0..=all.len() {
            assert_eq!(index.matched(W, &all[..asked]), known.min(asked), "{asked} of {known}");
            for hint in [0, 1, known, asked, 30, 99] {
                let matched = index.workers.get(&W).map_or(0, |blocks| blocks.matched(&all[..asked], hint));
                assert_eq!(matched, known.min(asked), "{asked} of {known} with {hint}");
            }
        }
    }
}

#[test]
fn many_workers_are_matched_in_their_order() {
    let mut index = index(100);
    let all = long_chain(1, 9);
    for worker in 0..4 {
        index.insert(WorkerId(worker), &all[..worker as usize * 2]);
    }
    let mut out = vec![77];
    index.matched_all([3, 0, 9, 1].map(WorkerId), &all, &mut out);
    assert_eq!(out, [6, 0, 0, 2]);
}

#[test]
fn the_tail_goes_before_the_head_and_the_old_before_the_new() {
    let mut index = index(6);
    let (old, new) = (long_chain(1, 4), long_chain(2, 4));
    index.insert(W, &old);
    index.insert(W, &new);
    assert_eq!((index.matched(W, &old), index.matched(W, &new)), (2, 4));
    index.insert(W, &old[..1]);
    index.insert(W, &long_chain(3, 2));
    assert_eq!((index.matched(W, &old), index.matched(W, &new)), (1, 3));
}

#[test]
fn of_a_prompt_that_is_too_long_the_head_is_kept() {
    let mut index = index(5);
    let all = long_chain(1, 9);
    index.insert(W, &all);
    assert_eq!(index.matched(W, &all), 5);
    assert_eq!(index.len(), 5);
}

#[test]
fn a_shared_head_stays_while_any_prompt_uses_it() {
    let mut index = index(6);
    index.insert(W, &chain(&[1, 2, 10]));
    index.insert(W, &chain(&[1, 2, 20]));
    for round in 30..60 {
        index.insert(W, &chain(&[1, 2, round]));
    }
    assert_eq!(index.matched(W, &chain(&[1, 2])), 2);
}

#[test]
fn a_report_drops_what_is_gone_and_all_that_hung_on_it() {
    let mut index = index(100);
    let (a, b, c) = (chain(&[1, 2, 3, 4]), chain(&[1, 2, 7]), chain(&[1, 8]));
    for prompt in [&a, &b, &c] {
        index.insert(W, prompt);
    }
    assert_eq!(index.correct(W, &a, 1), 4, "2, 3, 4 and the 7 that followed 2");
    assert_eq!([&a, &b, &c].map(|prompt| index.matched(W, prompt)), [1, 1, 2]);
    assert_eq!(index.correct(W, &a, 1), 0);
    assert_eq!(index.correct(W, &a, 4), 0, "a worker that has all corrects nothing");
    assert_eq!(index.correct(W, &a, 99), 0);
    assert_eq!(index.correct(WorkerId(9), &a, 0), 0);
    index.insert(W, &a);
    assert_eq!(index.matched(W, &a), 4);
    assert_eq!(index.correct(W, &c, 0), 5);
    assert!(index.is_empty());
}

#[test]
fn a_worker_can_be_forgotten() {
    let mut index = index(100);
    index.insert(W, &long_chain(1, 5));
    index.insert(WorkerId(2), &long_chain(1, 3));
    index.forget(W);
    assert_eq!((index.matched(W, &long_chain(1, 5)), index.len(), index.len_of(WorkerId(2))), (0, 3, 3));
}

#[test]
fn a_smaller_bound_drops_the_oldest_and_its_memory() {
    let mut index = index(10_000);
    index.insert(W, &long_chain(1, 5_000));
    index.insert(W, &long_chain(2, 5_000));
    let before = index.memory_bytes();
    index.set_capacity(W, 2_000);
    assert_eq!(
        (index.len(), index.matched(W, &long_chain(1, 5_000)), index.matched(W, &long_chain(2, 5_000))),
        (2_000, 0, 2_000)
    );
    assert!(index.memory_bytes() <= 2_000 * MAX_BYTES_PER_BLOCK && index.memory_bytes() < before);
    index.set_capacity(W, 3_000);
    index.insert(W, &long_chain(3, 1_000));
    assert_eq!((index.len(), index.matched(W, &long_chain(2, 5_000))), (3_000, 2_000));
}

#[test]
fn memory_stays_below_its_bound_while_filling_and_churning() {
    for capacity in [64, 100, 1_000, 1_793, 3_585, 20_000] {
        let mut index = index(capacity);
        for seed in 0..40 {
            index.insert(W, &long_chain(seed, capacity as u64 / 7 + 1));
            let memory = index.memory_bytes();
            assert!(memory <= capacity * MAX_BYTES_PER_BLOCK, "{memory} bytes for {capacity} blocks");
        }
        assert_eq!(index.len(), capacity);
    }
}

#[test]
fn memory_follows_the_blocks_while_there_are_few() {
    let mut index = index(1_000_000);
    for seed in 0..300 {
        index.insert(W, &long_chain(seed, 70));
        let (memory, blocks) = (index.memory_bytes(), index.len());
        assert!(memory <= blocks * MAX_BYTES_PER_BLOCK, "{memory} bytes for {blocks} blocks");
    }
}

#[test]
fn a_bound_follows_from_the_kv_cache_of_the_worker() {
    assert_eq!(PrefixIndex::capacity_for(1_000_000, 4.0, 512, 100_000), 7_812);
    assert_eq!(PrefixIndex::capacity_for(1_000_000_000, 4.0, 512, 100_000), 100_000);
    assert_eq!(PrefixIndex::capacity_for(0, 4.0, 512, 100_000), 100_000, "unknown");
    assert_eq!(PrefixIndex::capacity_for(10, 4.0, 512, 100_000), 1);
    for bytes_per_token in [0.0, -1.0, f64::NAN] {
        assert_eq!(PrefixIndex::capacity_for(1_000, bytes_per_token, 512, 7), 7);
    }
}

// === against a model ===

#[derive(Debug, Clone)]
enum Step {
    Insert(Vec<u64>),
    Match(Vec<u64>),
    Correct(Vec<u64>, usize),
    Bound(usize),
    Restart,
}

/// Prompts of few different blocks, so that they share heads and branch.
fn labels() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(0..3_u64, 0..8)
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => labels().prop_map(Step::Insert),
        4 => labels().prop_map(Step::Match),
        2 => (labels(), 0..8_usize).prop_map(|(labels, reported)| Step::Correct(labels, reported)),
        1 => (1..20_usize).prop_map(Step::Bound),
        1 => Just(Step::Restart),
    ];
    prop::collection::vec(step, 0..60)
}

/// Prefixes as they are, the least recently used first.
struct Model {
    capacity: usize,
    prefixes: Vec<Vec<u64>>,
}

impl Model {
    fn insert(&mut self, labels: &[u64]) {
        let labels = &labels[..labels.len().min(self.capacity)];
        for end in (1..=labels.len()).rev() {
            self.prefixes.retain(|prefix| prefix != &labels[..end]);
            self.prefixes.push(labels[..end].to_vec());
        }
        self.trim();
    }

    fn trim(&mut self) {
        let over = self.prefixes.len().saturating_sub(self.capacity);
        self.prefixes.drain(..over);
    }

    fn matched(&self, labels: &[u64]) -> usize {
        (1..=labels.len()).take_while(|&end| self.prefixes.iter().any(|prefix| prefix == &labels[..end])).count()
    }

    fn correct(&mut self, labels: &[u64], reported: usize) -> usize {
        let Some(lost) = labels.get(..=reported) else { return 0 };
        let before = self.prefixes.len();
        self.prefixes.retain(|prefix| !prefix.starts_with(lost));
        before - self.prefixes.len()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_index_behaves_as_a_list_of_prefixes(steps in steps(), capacity in 1..20_usize) {
        let mut index = index(capacity);
        let mut model = Model { capacity, prefixes: Vec::new() };
        for step in steps {
            match step {
                Step::Insert(labels) => {
                    index.insert(W, &chain(&labels));
                    model.insert(&labels);
                }
                Step::Match(labels) => prop_assert_eq!(index.matched(W, &chain(&labels)), model.matched(&labels)),
                Step::Correct(labels, reported) => {
                    prop_assert_eq!(index.correct(W, &chain(&labels), reported), model.correct(&labels, reported));
                }
                Step::Restart => {
                    if let Some(blocks) = index.copy_of(W) {
                        index.restore(W, &blocks.list(usize::MAX));
                    }
                }
                Step::Bound(capacity) => {
                    index.set_capacity(W, capacity);
                    model.capacity = capacity;
                    model.trim();
                }
            }
            prop_assert_eq!(index.len(), model.prefixes.len());
            if let Some(blocks) = index.workers.get(&W) {
                blocks.check();
            }
        }
        for prefix in &model.prefixes {
            prop_assert_eq!(index.matched(W, &chain(prefix)), prefix.len());
        }
    }

    /// Hashes are not secrets: a client may make them collide. That may cost it hits, and nothing else.
    #[test]
    fn colliding_hashes_break_nothing(chains in prop::collection::vec(prop::collection::vec(0..6_u64, 0..7), 0..30)) {
        let mut index = index(4);
        for (at, chain) in chains.iter().enumerate() {
            index.insert(W, chain);
            if at % 3 == 0 {
                index.correct(W, chain, at % 5);
            }
            let matched = index.matched(W, chain);
            prop_assert!(matched <= chain.len());
            if let Some(blocks) = index.workers.get(&W) {
                blocks.check();
            }
        }
        prop_assert!(index.len() <= 4.min(chains.iter().flatten().collect::<HashSet<_>>().len()));
    }

    /// A list from a file may say anything.
    #[test]
    fn any_list_of_blocks_is_taken_over_as_far_as_it_makes_sense(
        list in prop::collection::vec((0..12_u64, prop::option::of(0..20_u32)), 0..20),
        most in 0..20_usize,
    ) {
        let list: Vec<SavedBlock> = list.into_iter().map(|(hash, parent)| SavedBlock { hash, parent }).collect();
        let mut index = index(6);
        index.restore(W, &list);
        index.workers[&W].check();
        let kept = index.copy_of(W).unwrap().list(usize::MAX);
        prop_assert_eq!(kept.len(), index.len_of(W));
        // What is left out at the end takes nothing with it.
        let copied = index.copy_of(W).unwrap();
        prop_assert_eq!(&copied.list(most)[..], &kept[..most.min(kept.len())]);
        index.restore(W, &kept);
        prop_assert_eq!(index.copy_of(W).unwrap().list(usize::MAX), kept);
        index.insert(W, &[1, 2, 3]);
        index.workers[&W].check();
    }
}
