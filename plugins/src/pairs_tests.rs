#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use http::{HeaderMap, HeaderName, HeaderValue};

use super::*;
use crate::http_env::FieldMap;

fn map(pairs: &[(&str, &[u8])]) -> FieldMap {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        headers.append(HeaderName::from_bytes(name.as_bytes()).unwrap(), HeaderValue::from_bytes(value).unwrap());
    }
    FieldMap::new(headers)
}

#[test]
fn a_map_written_is_the_map_read() {
    let map = map(&[("accept", b"*/*"), ("x-raw", b"\xff\xfe"), ("x-empty", b""), ("accept", b"text/html")]);
    let mut bytes = Vec::new();
    write(&map, &mut bytes);
    assert_eq!(bytes.len(), serialized_len(&map));
    let pairs = parse(&bytes).unwrap();
    assert_eq!(pairs.len(), 4);
    assert!(pairs.contains(&(b"x-raw".as_slice(), b"\xff\xfe".as_slice())));
    assert!(pairs.contains(&(b"x-empty".as_slice(), b"".as_slice())));
}

#[test]
fn every_spelling_of_an_empty_map_is_empty() {
    for bytes in [b"".as_slice(), b"\0", b"\0\0\0\0"] {
        assert_eq!(parse(bytes), Ok(Vec::new()));
    }
}

#[test]
fn lengths_that_do_not_fit_are_malformed() {
    let mut bytes = Vec::new();
    write(&map(&[("a", b"bc")]), &mut bytes);
    for cut in 1..bytes.len() {
        assert_eq!(parse(&bytes[..cut]), Err(PairsError::Malformed), "cut at {cut}");
    }
    let mut huge = bytes.clone();
    huge[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(parse(&huge), Err(PairsError::Malformed));
    let mut no_nul = bytes.clone();
    *no_nul.last_mut().unwrap() = b'x';
    assert_eq!(parse(&no_nul), Err(PairsError::Malformed));
}

#[test]
fn too_many_pairs_or_bytes_are_refused() {
    let mut many = (MAX_PAIRS as u32 + 1).to_le_bytes().to_vec();
    many.resize(4 + (MAX_PAIRS + 1) * 10, 0);
    assert_eq!(parse(&many), Err(PairsError::TooLarge));
    assert_eq!(parse(&vec![1; MAX_BYTES + 1]), Err(PairsError::TooLarge));
}

#[test]
fn values_that_could_split_a_header_are_invalid() {
    for value in [b"a\r\nx: y".as_slice(), b"a\n", b"\r", b"a\0b"] {
        assert!(!is_valid_value(value));
    }
    assert!(is_valid_value(b"\xff plain \t"));
    for name in [b"".as_slice(), b":", b"a b", b"a\r\n", b"a:b"] {
        assert!(!is_valid_name(name));
    }
    assert!(is_valid_name(b":path") && is_valid_name(b"X-Name"));
}
