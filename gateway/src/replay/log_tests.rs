#![allow(clippy::unwrap_used)]

use super::*;
use crate::recording::encode_blocks;
use crate::recording::line::text;

fn read(files: &[&str]) -> Result<Log, String> {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<PathBuf> = (0..files.len()).map(|n| dir.path().join(format!("f{n}"))).collect();
    for (path, text) in paths.iter().zip(files) {
        std::fs::write(path, text).unwrap();
    }
    let cut = format!("{}/", dir.path().display());
    Log::read(&paths, Format::Auto).map_err(|error| error.replace(&cut, ""))
}

fn turn(ts: u64, base: Option<(&str, u64)>, blocks: &[u64]) -> String {
    let line = TurnLine {
        ts,
        route: "chat".into(),
        tenant: "0000000000000001".into(),
        block_bytes: 512,
        prompt_bytes: 5_000,
        base: base.map(|(hash, _)| hash.to_owned()),
        base_blocks: base.map_or(0, |(_, blocks)| blocks),
        blocks: encode_blocks(blocks),
        ..TurnLine::default()
    };
    text("turn", &line).unwrap() + "\n"
}

#[test]
fn chains_are_put_together_again_in_the_order_of_arrival() {
    let file = turn(20, None, &[1, 2]) + &turn(10, Some(("0000000000000002", 2)), &[3]);
    let log = read(&[&file]).unwrap();
    let chains: Vec<Vec<u64>> = log.entries.iter().map(|entry| log.blocks.chain(entry.leaf)).collect();
    assert_eq!(chains, [vec![1, 2, 3], vec![1, 2]]);
    assert_eq!(log.notes, Notes { lines: 2, ..Notes::default() });
}

#[test]
fn a_lost_line_leaves_what_hangs_on_it_shared() {
    let file = turn(1, Some(("0000000000000009", 4)), &[10]) + &turn(2, Some(("0000000000000009", 4)), &[11]);
    let log = read(&[&file]).unwrap();
    let chains: Vec<Vec<u64>> = log.entries.iter().map(|entry| log.blocks.chain(entry.leaf)).collect();
    assert_eq!(chains[0][..4], chains[1][..4]);
    assert_eq!((chains[0].len(), log.notes.incomplete), (5, 1));
}

#[test]
fn a_cut_last_line_is_counted() {
    let whole = turn(1, None, &[1]);
    let file = whole.clone() + &whole[..whole.len() / 2];
    let log = read(&[&file, &whole]).unwrap();
    assert_eq!((log.entries.len(), log.notes.cut), (2, 1));
    // Nothing but a cut line.
    assert_eq!(read(&["{\"v\":1,\"ki"]).unwrap().notes.cut, 1);
}

#[test]
fn a_cut_line_that_the_next_process_marked_is_counted() {
    let whole = turn(1, None, &[1]);
    let half = &whole[..whole.len() / 2];
    let marked = format!("{whole}{half}\n{{\"v\":1,\"kind\":\"cut\"}}\n{whole}");
    let log = read(&[&marked]).unwrap();
    assert_eq!((log.entries.len(), log.notes.cut), (2, 1));
    let error = read(&[&format!("{whole}{half}\n{whole}")]).unwrap_err();
    assert!(error.starts_with("f0:2: not a line of a recording"), "{error}");
    let error = read(&[&format!("{whole}{half}\n")]).unwrap_err();
    assert!(error.starts_with("f0:2: not a line of a recording"), "{error}");
}

#[test]
fn wrong_lines_are_named() {
    let good = turn(1, None, &[1]);
    let with = |member: &str, value: serde_json::Value| {
        let mut line: serde_json::Value = serde_json::from_str(&good).unwrap();
        line[member] = value;
        format!("{good}{line}\n")
    };
    let cases = [
        ("hello\n".to_owned(), "f0:1: neither a turn that was recorded nor a row of a Mooncake trace"),
        (with("v", 2.into()), "f0:2: version 2 (this turnstile reads 1)"),
        (with("ts", "x".into()), "f0:2: invalid type: string"),
        (with("base", "xyz".into()), "f0:2: base: expected 16 hexadecimal digits, found \"xyz\""),
        (with("base", "0000000000000001".into()), "f0:2: base without base_blocks"),
        (with("base_blocks", 3.into()), "f0:2: base_blocks without base"),
        (with("blocks", "AAAA".into()), "f0:2: blocks: not a whole number of 8-byte hashes"),
        (with("block_bytes", 1.into()), "f0:2: block_bytes: expected 64 to 1048576, found 1"),
        (with("prompt_tokens", 99_999_999.into()), "f0:2: prompt_tokens: more than 16777216"),
        (with("ts", 9_999_999_999_999_u64.into()), "f0:2: ts: 9999999999999 is no Unix time in ms"),
        (with("total_ms", (-1.0).into()), "f0:2: total_ms or ttft_ms: not a time in ms"),
        (with("timeout_s", 0.0.into()), "f0:2: timeout_s or latency_sensitivity: not a number of seconds"),
    ];
    for (file, wanted) in cases {
        let error = read(&[&file]).unwrap_err();
        assert!(error.starts_with(wanted), "{error}");
    }
    assert!(Log::read(&["/nowhere/log".into()], Format::Auto).unwrap_err().starts_with("/nowhere/log: "));
    // Kinds of a later writer are passed over.
    let later = format!("{good}{{\"v\":1,\"kind\":\"new\"}}\n{{\"v\":1,\"kind\":\"lost\",\"lost\":3}}\n");
    assert_eq!(read(&[&later]).unwrap().notes.lost, 3);
}

#[test]
fn a_mooncake_trace_is_known_by_its_rows() {
    let rows = "{\"timestamp\": 0, \"input_length\": 1030, \"output_length\": 5, \"hash_ids\": [46, 47, 48]}\n\
                {\"timestamp\": 27.5, \"input_length\": 1024, \"output_length\": 0, \"hash_ids\": [46, 47]}\n";
    let log = read(&[rows]).unwrap();
    let [first, second] = &log.entries[..] else { unreachable!("two rows") };
    // The third block of the first is a part of one.
    assert_eq!(first.leaf, second.leaf);
    assert_eq!((log.blocks.depth(first.leaf), first.line.prompt_tokens), (2, Some(1030)));
    assert_eq!((second.line.ts, second.line.completion_tokens), (27, Some(1)));

    let error = |row: &str| read(&[&format!("{rows}{row}\n")]).unwrap_err();
    assert!(
        error(r#"{"timestamp": 0, "input_length": 1030, "output_length": 5, "hash_ids": [46]}"#)
            .starts_with("f0:3: hash_ids: 1 blocks of 512 tokens cannot be 1030 tokens")
    );
    assert!(
        error(r#"{"timestamp": 0, "input_length": 0, "output_length": 5, "hash_ids": []}"#)
            .starts_with("f0:3: input_length or output_length")
    );
    assert!(error("{}").starts_with("f0:3: not a row of a Mooncake trace: missing field"));
    assert_eq!(read(&[&rows[..rows.len() - 9]]).unwrap().notes.cut, 1);
}

#[test]
fn damaged_logs_are_read_or_refused() {
    use crate::replay::virtual_time::Dice;
    use crate::replay::workload::{Timing, Workload};
    let good = turn(1, None, &[1, 2]) + &turn(20, Some(("0000000000000002", 2)), &[3]) + &turn(30, None, &[1, 2, 9]);
    let pieces = ["0", "9", "-", ".", "e", "\"", "{", "}", "[", ",", "null", "true", "\n", "\u{e9}", "99999999999999"];
    let mut dice = Dice::new(1);
    let (mut refused, mut played) = (0, 0);
    for _ in 0..3_000 {
        let mut text = good.clone();
        for _ in 0..=dice.below(3) {
            let at = usize::try_from(dice.below(text.len() as u64)).unwrap();
            let to = (at + usize::try_from(dice.below(4)).unwrap()).min(text.len());
            let piece = pieces[usize::try_from(dice.below(pieces.len() as u64)).unwrap()];
            // A place within a character is left as it is.
            if text.is_char_boundary(at) && text.is_char_boundary(to) {
                text.replace_range(at..to, piece);
            }
        }
        let timing = Timing { closed: true, speed: 1.0 };
        match read(&[&text]).and_then(|log| Workload::new(log, timing)).and_then(|work| work.check()) {
            Ok(()) => played += 1,
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 300 && played > 300, "{refused} refused, {played} played");
}
