#![allow(clippy::unwrap_used)]

use super::line::{Head, VERSION};
use super::*;
use serde_json::Value;
use std::path::Path;

fn lines(path: &Path) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn turn(number: u32) -> TurnLine {
    TurnLine { pool: "p".into(), route: "chat".into(), turn: Some(number), ..TurnLine::default() }
}

fn chain(len: u64) -> Vec<u64> {
    (1..=len).map(|block| block * 0x0101_0101_0101_0101).collect()
}

#[test]
fn a_turn_brings_only_the_blocks_that_are_new() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.jsonl");
    let mut file = RecordFile::open(path.clone(), 1 << 20, 2).unwrap();
    assert!(file.turn(turn(1), &chain(3)));
    assert!(file.turn(turn(2), &chain(5)));
    assert!(file.turn(turn(3), &chain(5)));
    file.flush();
    let lines = lines(&path);
    let new: Vec<Vec<u64>> =
        lines.iter().map(|line| decode_blocks(line["blocks"].as_str().unwrap_or_default()).unwrap()).collect();
    assert_eq!(new, [chain(3), chain(5)[3..].to_vec(), vec![]]);
    assert_eq!(lines[0]["base"], Value::Null);
    assert_eq!((&lines[1]["base"], &lines[1]["base_blocks"]), (&"0303030303030303".into(), &3.into()));
    assert_eq!((&lines[2]["base"], &lines[2]["base_blocks"]), (&"0505050505050505".into(), &5.into()));
    for line in lines {
        let head: Head = serde_json::from_value(line).unwrap();
        assert_eq!((head.v, head.kind.as_str()), (VERSION, "turn"));
    }
}

#[test]
fn every_file_is_complete_and_the_number_of_them_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.jsonl");
    let mut file = RecordFile::open(path.clone(), 2_000, 3).unwrap();
    file.fleet(&FleetLine { generation: 7, ..FleetLine::default() });
    for number in 0..40 {
        assert!(file.turn(turn(number), &chain(4)));
    }
    file.flush();
    let mut names: Vec<String> =
        std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["t.jsonl", "t.jsonl.1", "t.jsonl.2"]);
    let mut numbers = Vec::new();
    for name in names.iter().rev() {
        let path = dir.path().join(name);
        assert!(std::fs::metadata(&path).unwrap().len() <= 2_000);
        let lines = lines(&path);
        assert_eq!((&lines[0]["kind"], &lines[0]["generation"]), (&"fleet".into(), &7.into()), "{name}");
        assert_eq!(decode_blocks(lines[1]["blocks"].as_str().unwrap()).unwrap(), chain(4), "{name}");
        assert_eq!(lines[2]["base_blocks"], 4);
        numbers.extend(lines[1..].iter().map(|line| line["turn"].as_u64().unwrap()));
    }
    let last: Vec<u64> = (40 - numbers.len() as u64..40).collect();
    assert_eq!(numbers, last, "the newest turns, in order");
}

#[test]
fn a_line_that_was_cut_is_marked_by_the_next_process() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.jsonl");
    std::fs::write(&path, "{\"v\":1,\"kind\":\"tu").unwrap();
    let mut file = RecordFile::open(path.clone(), 1 << 20, 2).unwrap();
    assert!(file.turn(turn(1), &chain(1)));
    file.flush();
    let text = std::fs::read_to_string(&path).unwrap();
    let kinds: Vec<Option<Head>> = text.lines().map(|line| serde_json::from_str(line).ok()).collect();
    assert_eq!(kinds.len(), 3);
    assert_eq!(kinds[0], None);
    assert_eq!(kinds[1].as_ref().unwrap().kind, "cut");
}

#[test]
fn a_file_that_cannot_be_replaced_loses_turns_and_not_the_bound() {
    let dir = tempfile::tempdir().unwrap();
    let inner = dir.path().join("inner");
    std::fs::create_dir(&inner).unwrap();
    let path = inner.join("t.jsonl");
    let mut file = RecordFile::open(path.clone(), 600, 2).unwrap();
    assert!(file.turn(turn(1), &chain(1)));
    // With its directory gone, neither a new file nor a new name can be had.
    std::fs::remove_dir_all(&inner).unwrap();
    let written = (0..10).filter(|_| file.turn(turn(2), &chain(1))).count();
    assert!(written < 3, "{written} turns of 10 went beyond 600 bytes");
}

#[test]
fn the_writer_ends_with_everything_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.jsonl");
    let logging = Logging { record: Some(path.clone()), ..Logging::default() };
    let recording = Recording::open(&logging).unwrap().unwrap();
    for number in 0..100 {
        let draft = Draft { line: turn(number), blocks: chain(3) };
        recording.turn(Box::new(draft), &Record { turn: Some(number), ..Record::default() });
    }
    // More than may wait at a time.
    let long = Draft { line: turn(100), blocks: vec![1; BACKLOG_BYTES / 8 + 1] };
    recording.turn(Box::new(long), &Record::default());
    drop(recording);
    let lines = lines(&path);
    assert_eq!(lines.iter().filter(|line| line["kind"] == "turn").count(), 100);
    assert_eq!(lines.iter().find(|line| line["kind"] == "lost").unwrap()["lost"], 1);
    assert!(Recording::open(&Logging::default()).unwrap().is_none(), "off unless configured");
}

#[test]
fn hashes_survive_the_way_through_text() {
    for len in 0..20 {
        assert_eq!(decode_blocks(&encode_blocks(&chain(len))), Ok(chain(len)));
    }
    assert!(decode_blocks("AAAA").is_err());
    assert!(decode_blocks("!").is_err());
}
