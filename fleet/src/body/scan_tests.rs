#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;

use proptest::prelude::*;
use serde_json::value::RawValue;

use super::*;

fn found(text: &[u8]) -> Option<Vec<Found>> {
    let mut list = Vec::new();
    let scanned = members(text, |found| {
        list.push(found);
        true
    });
    scanned.ok().map(|_| list)
}

/// What serde_json says, keys with escapes of half a character aside.
fn is_object(text: &[u8]) -> bool {
    let first = text.iter().find(|b| !b.is_ascii_whitespace());
    first == Some(&b'{') && serde_json::from_slice::<&RawValue>(text).is_ok()
}

/// The values of the members, as serde_json cuts them; the last of equal keys.
fn values(text: &[u8]) -> Option<HashMap<String, &RawValue>> {
    serde_json::from_slice(text).ok()
}

fn agree(text: &[u8]) {
    let shown = String::from_utf8_lossy(text);
    let ours = found(text);
    assert_eq!(ours.is_some(), is_object(text), "{shown}");
    let (Some(ours), Some(theirs)) = (ours, values(text)) else { return };
    let mut last = HashMap::new();
    for one in ours {
        let key: String = serde_json::from_slice(&text[one.key..=one.key_end]).unwrap();
        last.insert(key, std::str::from_utf8(&text[one.value..one.end]).unwrap());
    }
    assert_eq!(last, theirs.into_iter().map(|(key, value)| (key, value.get())).collect(), "{shown}");
}

#[test]
fn members_are_found_where_they_stand() {
    let text = br#" { "a" : [1, "]"] , "b\n":{"c":"}"} } "#;
    let list = found(text).unwrap();
    let of = |from: usize, to: usize| std::str::from_utf8(&text[from..to]).unwrap();
    assert_eq!(list.len(), 2);
    assert_eq!(of(list[0].key, list[0].key_end + 1), "\"a\"");
    assert_eq!(of(list[0].value, list[0].end), "[1, \"]\"]");
    assert_eq!(of(list[1].key, list[1].key_end + 1), r#""b\n""#);
    assert_eq!(of(list[1].value, list[1].end), "{\"c\":\"}\"}");
    assert_eq!(members(text, |_| true), Ok(2));
    assert_eq!(found(b"{ }"), Some(Vec::new()));
}

#[test]
fn whoever_has_enough_stops_the_scan() {
    let mut seen = 0;
    let stopped = members(b"{\"a\":1,\"b\":2,\"c\":oops", |_| {
        seen += 1;
        seen < 2
    });
    assert_eq!((stopped, seen), (Err(Fault::Stopped), 2));
    let broken = members(b"{\"a\":\"\xff\",\"b\":2}", |found| found.value < 6);
    assert_eq!(broken, Err(Fault::Malformed), "what was passed has to be text");
}

/// Every mark at every place of a block, near the end of the text and far from it.
#[test]
fn strings_end_and_break_at_every_offset() {
    let marks: [&[u8]; 14] = [
        b"",
        b"\"",
        b"\\\"",
        b"\\\\",
        b"\\n",
        b"\\u00e9",
        b"\\u12",
        b"\\u12g4",
        b"\\x",
        b"\\",
        b"\n",
        b"\x1f",
        b"\x7f\xc3\xa9",
        b"\xc3",
    ];
    for mark in marks {
        for before in 0..140 {
            for after in [0, 1, 70] {
                let text = [b"{\"k\":\"", &*vec![b'x'; before], mark, &*vec![b'y'; after], b"\"}"].concat();
                agree(&text);
                // The string that has no end.
                agree(&text[..text.len() - 2]);
            }
        }
    }
}

#[test]
fn what_a_parser_refuses_is_refused() {
    let texts = [
        "{\"a\":1 2}",
        "{\"a\":[1,]}",
        "{\"a\":[,1]}",
        "{\"a\":{\"b\":1,}}",
        "{\"a\":{\"b\"}}",
        "{\"a\":{1:2}}",
        "{\"a\":[1}",
        "{\"a\":{]}",
        "{\"a\":{\"b\":[}}",
        "{\"a\" 1}",
        "{\"a\"::1}",
        "{,}",
        "{\"a\":}",
        "{\"a\":tru}",
        "{\"a\":truex}",
        "{\"a\":nulll}",
        "{\"a\":-}",
        "{\"a\":+1}",
        "{\"a\":.5}",
        "{\"a\":1.}",
        "{\"a\":1e}",
        "{\"a\":1e+}",
        "{\"a\":00}",
        "{\"a\":-01}",
        "{\"a\":0x1}",
        "{\"a\":1}\u{a0}",
        "{\"a\":1}\u{c}",
        "\u{feff}{}",
        "{}{}",
        "{}]",
        "{",
        "",
        " ",
        "[{}]",
        "{\"a\":[[[[}]]]]",
    ];
    for text in texts {
        assert_eq!(found(text.as_bytes()), None, "{text}");
        agree(text.as_bytes());
    }
    for text in ["{\"a\":-0.0e-10}", "{\"a\":1E5}", "\t\r\n{\"a\":[[],{},\"\",0,true,false,null]}\n", "{\"\":\"\"}"] {
        assert!(found(text.as_bytes()).is_some(), "{text}");
        agree(text.as_bytes());
    }
}

fn marks_one_by_one(block: &[u8; BLOCK]) -> (u64, bool) {
    let special = |byte: u8| byte < 0x20 || byte == b'"' || byte == b'\\';
    let bits = block.iter().enumerate().map(|(at, byte)| u64::from(special(*byte)) << at).sum();
    (bits, !block.is_ascii())
}

/// JSON with long strings, and what is beside JSON: a few bytes of it changed, cut, doubled.
fn nearly_json() -> impl Strategy<Value = Vec<u8>> {
    let text = prop_oneof![
        "[ -~]{0,90}".prop_map(|text| serde_json::to_string(&text).unwrap()),
        "\\PC{0,40}".prop_map(|text| serde_json::to_string(&text).unwrap()),
        "(\\\\n|\\\\\"|\\\\u00[0-9a-f]{2}|[a-z ]{1,30}){0,8}".prop_map(|text| format!("\"{text}\"")),
    ];
    let leaf = prop_oneof![
        text.clone(),
        prop::sample::select(vec!["0", "-1.5e3", "true", "false", "null", "[]", "{}", " 12 "]).prop_map(String::from),
    ];
    let value = leaf.prop_recursive(4, 24, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(|list| format!("[{}]", list.join(", "))),
            prop::collection::vec((text.clone(), inner), 0..4).prop_map(|list| {
                let list: Vec<String> = list.into_iter().map(|(key, value)| format!("{key}:{value}")).collect();
                format!("{{{}}}", list.join(","))
            }),
        ]
    });
    let body = prop::collection::vec(("[a-c]", value), 0..5).prop_map(|list| {
        let list: Vec<String> = list.into_iter().map(|(key, value)| format!("\"{key}\" :{value}")).collect();
        format!("{{{}}}", list.join(" , ")).into_bytes()
    });
    let wrong = prop::sample::select(b"{}[]\",:\\u0e-. \n\0\x7f\xc3\xa9\xff".to_vec());
    (body, prop::collection::vec((any::<prop::sample::Index>(), 0..4u8, wrong), 0..3)).prop_map(
        |(mut body, changes)| {
            for (at, kind, byte) in changes {
                let at = at.index(body.len());
                match kind {
                    0 => body[at] = byte,
                    1 => body.insert(at, byte),
                    2 => body.truncate(at.max(1)),
                    _ => drop(body.remove(at)),
                }
                if body.is_empty() {
                    body.push(byte);
                }
            }
            body
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn accepts_what_a_parser_accepts_and_cuts_as_it_does(text in nearly_json()) {
        agree(&text);
    }

    #[test]
    fn blocks_are_marked_as_byte_by_byte(bytes in prop::collection::vec(any::<u8>(), BLOCK)) {
        let block: &[u8; BLOCK] = bytes.first_chunk().unwrap();
        let (special, not_ascii) = marks_one_by_one(block);
        let marks = Marks::of(block);
        prop_assert_eq!((marks.special, marks.not_ascii), (special, not_ascii));
    }
}
