#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use super::*;

fn run(start: u32, len: u32) -> Vec<u32> {
    (start..start + len).collect()
}

#[test]
fn a_shared_prefix_is_found_in_whole_pages() {
    let mut tree = Radix::new(4, Eviction::Lru);
    let (end, known) = tree.insert(0, &run(0, 10), 0, None);
    assert_eq!((end.tokens, known, tree.size()), (8, 0, 8));
    assert_eq!(tree.peek(0, &run(0, 7)), 4);
    assert_eq!(tree.find(0, &run(0, 7), 0).tokens, 4);
    assert_eq!(tree.peek(1, &run(0, 7)), 0);
    tree.check_invariants();
}

#[test]
fn a_second_branch_adds_only_what_is_new() {
    let mut tree = Radix::new(1, Eviction::Lru);
    tree.insert(0, &run(0, 10), 0, None);
    let mut other = run(0, 5);
    other.extend(run(100, 5));
    let (_, known) = tree.insert(0, &other, 0, None);
    assert_eq!((known, tree.size()), (5, 15));
    tree.check_invariants();
}

#[test]
fn the_least_recently_used_leaf_goes_first_and_locked_ones_stay() {
    let mut tree = Radix::new(1, Eviction::Lru);
    tree.insert(0, &run(0, 10), 0, None);
    tree.insert(0, &run(100, 10), 0, None);
    let held = tree.find(0, &run(0, 10), 0);
    tree.lock(held.node);
    assert_eq!(tree.evictable(), 10);
    assert_eq!(tree.evict(50), 10);
    assert_eq!(tree.peek(0, &run(0, 10)), 10);
    tree.unlock(held.node);
    tree.check_invariants();
    assert_eq!(tree.evict(1), 10);
}

#[test]
fn priority_eviction_keeps_the_highest_priority_that_used_a_node() {
    let mut tree = Radix::new(1, Eviction::Priority);
    tree.insert(0, &run(0, 10), 10, None);
    tree.insert(0, &run(100, 10), 0, None);
    tree.find(0, &run(0, 10), -3);
    tree.evict(5);
    assert_eq!((tree.peek(0, &run(0, 10)), tree.peek(0, &run(100, 10))), (10, 0));
}

#[test]
fn tagged_kv_outlives_untagged_until_the_tag_ends() {
    let mut tree = Radix::new(1, Eviction::Lru);
    tree.protect(7);
    tree.insert(0, &run(0, 10), 0, Some(7));
    tree.insert(0, &run(100, 10), 0, None);
    tree.evict(5);
    assert_eq!((tree.peek(0, &run(0, 10)), tree.peek(0, &run(100, 10))), (10, 0));
    tree.insert(0, &run(100, 10), 0, None);
    tree.unprotect(7);
    tree.evict(5);
    assert_eq!((tree.peek(0, &run(0, 10)), tree.peek(0, &run(100, 10))), (0, 10));
}

#[test]
fn splitting_a_locked_node_keeps_the_sums() {
    let mut tree = Radix::new(1, Eviction::Lru);
    let (held, _) = tree.insert(0, &run(0, 10), 0, None);
    tree.lock(held.node);
    let upper = tree.find(0, &run(0, 4), 0);
    tree.lock(upper.node);
    tree.check_invariants();
    tree.unlock(held.node);
    tree.check_invariants();
    assert_eq!(tree.evictable(), 6);
}
