#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;

#[test]
fn a_conditional_write_needs_the_number_of_the_last_write() {
    let space = SharedData::default().space("vm");
    assert_eq!(space.set(b"k", b"x", 7), Err(SharedDataError::CasMismatch), "an absent key has no number");
    space.set(b"k", b"1", 0).unwrap();
    let (value, cas) = space.get(b"k").unwrap();
    assert_eq!(&value[..], b"1");
    assert_ne!(cas, 0);
    space.set(b"k", b"2", cas).unwrap();
    assert_eq!(space.set(b"k", b"3", cas), Err(SharedDataError::CasMismatch));
    assert_eq!(&space.get(b"k").unwrap().0[..], b"2");
}

#[test]
fn an_empty_value_is_a_value() {
    let space = SharedData::default().space("vm");
    space.set(b"k", b"", 0).unwrap();
    assert_eq!(space.get(b"k").unwrap().0.len(), 0);
}

#[test]
fn name_spaces_are_apart_and_found_again() {
    let data = SharedData::default();
    data.space("a").set(b"k", b"a", 0).unwrap();
    assert!(data.space("b").get(b"k").is_none());
    assert_eq!(&data.space("a").get(b"k").unwrap().0[..], b"a");
}

#[test]
fn concurrent_conditional_writers_lose_no_update() {
    let data = SharedData::default();
    data.space("vm").set(b"n", &0_u64.to_le_bytes(), 0).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let space = data.space("vm");
                for _ in 0..500 {
                    loop {
                        let (value, cas) = space.get(b"n").unwrap();
                        let n = u64::from_le_bytes(value[..].try_into().unwrap()) + 1;
                        if space.set(b"n", &n.to_le_bytes(), cas).is_ok() {
                            break;
                        }
                    }
                }
            });
        }
    });
    let (value, _) = data.space("vm").get(b"n").unwrap();
    assert_eq!(u64::from_le_bytes(value[..].try_into().unwrap()), 2000);
}

#[test]
fn a_full_name_space_refuses_growth_but_not_replacement() {
    let data = SharedData::new(200);
    let space = data.space("vm");
    space.set(b"a", &[1; 100], 0).unwrap();
    assert_eq!(space.set(b"b", &[2; 100], 0), Err(SharedDataError::Full));
    space.set(b"a", &[3; 50], 0).unwrap();
    assert_eq!(space.bytes(), 1 + 50 + ENTRY_OVERHEAD);
    assert_eq!(data.usage(), vec![("vm".to_owned(), 1 + 50 + ENTRY_OVERHEAD)]);
}

#[test]
fn a_forgotten_name_space_starts_empty() {
    let data = SharedData::default();
    let held = data.space("vm");
    held.set(b"k", b"v", 0).unwrap();
    data.space("other").set(b"k", b"v", 0).unwrap();
    data.retain(|vm_id| vm_id == "other");
    assert!(data.space("vm").get(b"k").is_none());
    assert!(data.space("other").get(b"k").is_some());
    assert!(held.get(b"k").is_some(), "who still holds it keeps it");
}
