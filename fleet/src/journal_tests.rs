#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
use super::*;
use proptest::prelude::*;

fn open(id: &str) -> Record {
    Record::Open(OpenRecord {
        id: id.into(),
        stream: id.len().is_multiple_of(2),
        worker: "worker \"one\"\nof two".into(),
        url: "http://127.0.0.1:30000".into(),
        rank: (id.len() > 3).then_some(1),
        timeout_ms: 640_000,
    })
}

fn gone(id: &str) -> Record {
    Record::Gone(id.into())
}

fn journal(records: &[Record]) -> Vec<u8> {
    let mut bytes = Vec::new();
    records.iter().for_each(|record| record.write(&mut bytes));
    bytes
}

fn ids(replay: &Replay) -> Vec<&str> {
    replay.open.keys().map(|id| &**id).collect()
}

#[test]
fn what_was_opened_and_not_closed_is_left() {
    let records = [open("a"), open("b"), gone("a"), open("c"), gone("never"), open("c"), open("long")];
    let replay = Replay::of(&journal(&records));
    assert_eq!((ids(&replay), replay.damaged), (vec!["b", "c", "long"], 0));
    let Record::Open(long) = open("long") else { panic!() };
    assert_eq!(replay.open["long"], long);
    assert_eq!(Replay::of(b""), Replay::default());
}

#[test]
fn a_cut_last_line_costs_only_itself_and_is_no_damage() {
    let whole = journal(&[open("a"), open("b")]);
    let first = journal(&[open("a")]).len();
    for end in 0..whole.len() {
        let replay = Replay::of(&whole[..end]);
        assert_eq!((ids(&replay), replay.damaged), (if end < first { vec![] } else { vec!["a"] }, 0), "cut at {end}");
    }
}

#[test]
fn a_changed_line_is_counted_and_the_others_stand() {
    let whole = journal(&[open("a"), open("b"), open("c")]);
    let text = String::from_utf8(whole).unwrap();
    let replay = Replay::of(text.replace("\"b\"", "\"x\"").as_bytes());
    assert_eq!((ids(&replay), replay.damaged), (vec!["a", "c"], 1));
    let replay = Replay::of(format!("{text}garbage\n\n0000 {{}}\n{text}").as_bytes());
    assert_eq!((ids(&replay), replay.damaged), (vec!["a", "b", "c"], 2));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_have_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let lines = bytes.iter().filter(|&&byte| byte == b'\n').count();
        prop_assert!(Replay::of(&bytes).damaged <= lines);
    }
}
