#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;

fn request() -> RequestMap {
    let mut fields = HeaderMap::new();
    fields.insert(HOST, HeaderValue::from_static("api.test"));
    fields.append("accept", HeaderValue::from_static("a"));
    fields.append("accept", HeaderValue::from_static("b"));
    RequestMap::new(Method::POST, "/v1/chat?x=1", "", fields)
}

fn listed(map: &dyn HeaderPairs) -> Vec<(String, String)> {
    let mut pairs = Vec::new();
    map.for_each(&mut |name, value| {
        pairs.push((String::from_utf8_lossy(name).into_owned(), String::from_utf8_lossy(value).into_owned()));
    });
    pairs
}

fn get(map: &dyn HeaderPairs, name: &str) -> Option<String> {
    map.get(name.as_bytes()).map(|value| String::from_utf8_lossy(&value).into_owned())
}

#[test]
fn pseudo_headers_come_first_and_host_is_authority() {
    let map = request();
    let pairs = listed(&map);
    assert_eq!(pairs.len(), map.len());
    assert_eq!(
        pairs[..4].iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
        [":authority", ":path", ":method", ":scheme"]
    );
    assert_eq!(get(&map, ":path").unwrap(), "/v1/chat?x=1");
    assert_eq!(get(&map, "host"), get(&map, ":authority"));
    assert_eq!(get(&map, "host").unwrap(), "api.test");
}

#[test]
fn names_match_in_any_case_and_a_read_gives_the_first_value() {
    let mut map = request();
    assert_eq!(get(&map, "ACCEPT").unwrap(), "a");
    map.replace(b"Accept", b"c").unwrap();
    assert_eq!(get(&map, "accept").unwrap(), "c");
    assert_eq!(map.len(), 4 + 1);
    map.remove(b"aCCEPT").unwrap();
    map.remove(b"accept").unwrap();
    assert_eq!(get(&map, "accept"), None);
}

#[test]
fn values_are_bytes_and_line_breaks_are_refused() {
    let mut map = request();
    map.add(b"x-raw", b"\xff\xfe").unwrap();
    assert_eq!(&*map.get(b"x-raw").unwrap(), b"\xff\xfe");
    assert_eq!(map.add(b"x-bad", b"a\r\nx: y"), Err(Status::BadArgument));
    assert_eq!(map.add(b"x bad", b"a"), Err(Status::BadArgument));
    assert_eq!(get(&map, "x-bad"), None);
}

#[test]
fn pseudo_headers_can_be_set_within_reason() {
    let mut map = request();
    map.replace(b":path", b"/other").unwrap();
    map.add(b":method", b"PUT").unwrap();
    map.replace(b"Host", b"b.test").unwrap();
    assert_eq!((get(&map, ":path").unwrap(), map.method.clone()), ("/other".to_owned(), Method::PUT));
    assert_eq!(get(&map, ":authority").unwrap(), "b.test");
    for (name, value) in
        [(":scheme", "https"), (":path", "no-slash"), (":path", "/a b"), (":method", "a b"), (":x", "1"), ("host", "")]
    {
        assert_eq!(map.replace(name.as_bytes(), value.as_bytes()), Err(Status::BadArgument), "{name}");
    }
    assert_eq!(map.remove(b":path"), Err(Status::BadArgument));
}

#[test]
fn a_content_length_must_be_a_number_and_is_single() {
    let mut map = request();
    map.add(b"content-length", b"10").unwrap();
    map.add(b"content-length", b"11").unwrap();
    assert_eq!(map.fields.fields.get_all(CONTENT_LENGTH).iter().count(), 1);
    for value in [b"".as_slice(), b"-1", b"1x"] {
        assert_eq!(map.replace(b"content-length", value), Err(Status::BadArgument));
    }
}

#[test]
fn a_whole_map_is_replaced_or_left_alone() {
    let mut map = request();
    assert_eq!(map.replace_all(&[(b"x", b"1"), (b"y", b"\n")]), Err(Status::BadArgument));
    assert_eq!(get(&map, "accept").unwrap(), "a");
    map.replace_all(&[(b":path", b"/p"), (b":scheme", b"https"), (b"x", b"1"), (b"x", b"2")]).unwrap();
    assert_eq!(get(&map, "accept"), None);
    assert_eq!(get(&map, ":path").unwrap(), "/p");
    assert_eq!(get(&map, ":scheme").unwrap(), "http");
    assert_eq!(get(&map, ":authority").unwrap(), "api.test");
    assert_eq!(map.fields.len(), 2);
}

#[test]
fn a_status_out_of_range_is_refused() {
    let mut map = ResponseMap::new(StatusCode::OK, HeaderMap::new());
    map.replace(b":status", b"404").unwrap();
    for value in ["100", "600", "999", "x", ""] {
        assert_eq!(map.replace(b":status", value.as_bytes()), Err(Status::BadArgument));
    }
    assert_eq!(get(&map, ":Status").unwrap(), "404");
}

#[test]
fn body_edits_follow_the_length_rules() {
    let body = |range: Range<usize>, data: &str| {
        let mut body = Body::new("hello");
        body.replace(range, data.as_bytes());
        String::from_utf8(body.bytes.to_vec()).unwrap()
    };
    assert_eq!(body(0..0, ">"), ">hello");
    assert_eq!(body(5..5, "<"), "hello<");
    assert_eq!(body(9..12, "<"), "hello<");
    assert_eq!(body(1..3, "E"), "hElo");
    assert_eq!(body(0..usize::MAX, "new"), "new");
    assert_eq!(body(0..5, ""), "");
}

#[test]
fn a_map_grows_no_larger_than_one_that_can_be_handed_over() {
    let mut map = FieldMap::default();
    let full = (0..2 * pairs::MAX_PAIRS).position(|n| map.add(format!("x-{n}").as_bytes(), b"v").is_err());
    assert_eq!(full, Some(pairs::MAX_PAIRS));
    assert!(map.replace(b"x-new", b"v").is_err());
    map.replace(b"x-0", b"w").unwrap();
    map.remove(b"x-1").unwrap();
    map.add(b"x-new", b"v").unwrap();

    let mut map = FieldMap::default();
    let half = vec![b'v'; pairs::MAX_BYTES / 2 - 1];
    map.add(b"a", &half).unwrap();
    map.add(b"b", &half).unwrap();
    assert!(map.add(b"c", b"").is_err());
    map.replace(b"b", &half).unwrap();
    assert_eq!(map.len(), 2);
}

#[test]
fn a_head_that_has_gone_on_is_read_only() {
    let mut request = RequestMap::new(Method::GET, "/", "a", HeaderMap::new());
    request.add(b"x", b"1").unwrap();
    request.seal();
    let mut response = ResponseMap::new(StatusCode::OK, HeaderMap::new());
    response.seal();
    for map in [&mut request as &mut dyn HeaderPairs, &mut response] {
        let before = map.len();
        assert_eq!(map.add(b"x", b"2"), Err(Status::BadArgument));
        assert_eq!(map.replace(b"x", b"2"), Err(Status::BadArgument));
        assert_eq!(map.remove(b"x"), Err(Status::BadArgument));
        assert_eq!(map.replace_all(&[]), Err(Status::BadArgument));
        assert_eq!(map.len(), before);
    }
    assert_eq!(request.get(b"x").unwrap(), b"1".as_slice());
}
