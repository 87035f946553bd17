//! Header maps.

use turnstile_plugins::pairs;

use crate::rig::{Guest, Rig, header, request, results, text, with_response};

const NAMES: &str = r#"
(data (i32.const 100) "Accept")   ;; 100, 6
(data (i32.const 110) "x-raw")    ;; 110, 5
(data (i32.const 120) "x-none")   ;; 120, 6
(data (i32.const 130) "x-new")    ;; 130, 5
(data (i32.const 140) "a\0d\0ax: y")  ;; 140, 7: a CR LF x: y
(data (i32.const 150) ":path")    ;; 150, 5
(data (i32.const 160) "value")    ;; 160, 5
(data (i32.const 170) ":scheme")  ;; 170, 7
(data (i32.const 180) "bad name") ;; 180, 8
"#;

fn guest(body: &str) -> Guest {
    Guest::on_request_headers(body).also(NAMES)
}

#[test]
fn a_read_ignores_case_gives_the_first_value_and_tells_a_missing_one() {
    let rig = guest(
        r#"(call $put (call $get_header (i32.const 0) (i32.const 100) (i32.const 6) (i32.const 0) (i32.const 4)))
           (call $text (i32.load (i32.const 0)) (i32.load (i32.const 4)))
           (call $put (call $get_header (i32.const 0) (i32.const 120) (i32.const 6) (i32.const 0) (i32.const 4)))"#,
    )
    .start();
    let mut env = request();
    assert_eq!(rig.results(&mut env), [0, 1]);
    assert_eq!(text(&env), "first");
}

#[test]
fn the_whole_map_is_read_with_pseudo_headers_and_raw_values() {
    let rig = guest(
        r#"(call $put (call $get_pairs (i32.const 0) (i32.const 0) (i32.const 4)))
           (call $put (call $map_size (i32.const 0) (i32.const 8)))
           (call $put (i32.eq (i32.load (i32.const 4)) (i32.load (i32.const 8))))
           ;; hands the map back through a property
           (call $put (call $set_property (i32.const 160) (i32.const 5) (i32.load (i32.const 0)) (i32.load (i32.const 4))))"#,
    )
    .start();
    let mut env = request();
    assert_eq!(rig.results(&mut env), [0, 0, 1, 0]);
    let bytes = env.properties.get(b"value".as_slice()).unwrap().clone();
    let pairs = pairs::parse(&bytes).unwrap();
    assert_eq!(pairs.len(), 7);
    assert_eq!(pairs[1], (b":path".as_slice(), b"/v1/chat/completions?x=1".as_slice()));
    assert!(pairs.contains(&(b"x-raw".as_slice(), b"\xff\xfe".as_slice())));
}

#[test]
fn values_are_added_replaced_and_removed() {
    let rig = guest(
        r#"(call $put (call $add_header (i32.const 0) (i32.const 130) (i32.const 5) (i32.const 160) (i32.const 5)))
           (call $put (call $replace_header (i32.const 0) (i32.const 100) (i32.const 6) (i32.const 160) (i32.const 5)))
           (call $put (call $remove_header (i32.const 0) (i32.const 110) (i32.const 5)))
           (call $put (call $remove_header (i32.const 0) (i32.const 120) (i32.const 6)))
           (call $put (call $replace_header (i32.const 0) (i32.const 120) (i32.const 6) (i32.const 0) (i32.const 0)))"#,
    )
    .start();
    let mut env = request();
    assert_eq!(rig.results(&mut env), [0; 5], "removing what is absent is fine, an empty value is a value");
    assert_eq!(header(&env, "x-new").unwrap(), b"value");
    assert_eq!(env.request.as_ref().unwrap().fields.fields.get_all("accept").iter().count(), 1);
    assert_eq!(header(&env, "accept").unwrap(), b"value");
    assert_eq!(header(&env, "x-raw"), None);
    assert_eq!(header(&env, "x-none").unwrap(), b"");
}

#[test]
fn a_map_read_can_be_handed_back_whole() {
    let rig = guest(
        r#"(call $put (call $get_pairs (i32.const 0) (i32.const 0) (i32.const 4)))
           (call $put (call $set_pairs (i32.const 0) (i32.load (i32.const 0)) (i32.load (i32.const 4))))
           (call $put (call $set_pairs (i32.const 2) (i32.const 0) (i32.const 0)))"#,
    )
    .start();
    let mut env = with_response(request(), "");
    assert_eq!(rig.results(&mut env), [0, 0, 0]);
    assert_eq!(header(&env, ":path").unwrap(), b"/v1/chat/completions?x=1");
    assert_eq!(header(&env, "x-raw").unwrap(), b"\xff\xfe");
    assert_eq!(env.request.as_ref().unwrap().fields.fields.len(), 3);
    assert!(env.response.as_ref().unwrap().fields.fields.is_empty(), "zero bytes are an empty map");
}

const MISTAKES: &str = r#"
(call $put (call $add_header (i32.const 0) (i32.const 130) (i32.const 5) (i32.const 140) (i32.const 7)))
(call $put (call $replace_header (i32.const 0) (i32.const 140) (i32.const 7) (i32.const 160) (i32.const 5)))
(call $put (call $add_header (i32.const 0) (i32.const 180) (i32.const 8) (i32.const 160) (i32.const 5)))
(call $put (call $replace_header (i32.const 0) (i32.const 170) (i32.const 7) (i32.const 160) (i32.const 5)))
(call $put (call $set_pairs (i32.const 0) (i32.const 160) (i32.const 5)))
(call $put (call $add_header (i32.const 2) (i32.const 130) (i32.const 5) (i32.const 160) (i32.const 5)))
(call $put (call $get_header (i32.const 2) (i32.const 100) (i32.const 6) (i32.const 0) (i32.const 4)))
"#;

#[test]
fn a_lenient_plugin_s_mistakes_change_nothing_and_are_logged() {
    let rig = guest(MISTAKES).start();
    let mut env = request();
    assert_eq!(rig.results(&mut env), [0, 0, 0, 0, 0, 0, 1], "a value of a map that is not there is not found");
    assert_eq!(header(&env, "x-new"), None, "no line break gets into a header");
    assert_eq!(header(&env, ":scheme").unwrap(), b"http");
    assert_eq!(env.request.as_ref().unwrap().fields.fields.len(), 3);
    assert_eq!(rig.lines().len(), 6);
    assert_eq!(rig.plugin.stats().tolerated, 6);
}

#[test]
fn a_strict_plugin_hears_of_its_mistakes() {
    let mut spec = guest(MISTAKES).spec();
    spec.lenient = false;
    let rig = Rig::start(spec).unwrap();
    assert_eq!(rig.results_of_request(), [2; 7]);
    assert_eq!(rig.plugin.stats().tolerated, 0);
}

#[test]
fn unknown_map_numbers_are_bad_arguments_and_absent_maps_read_as_empty() {
    let rig = guest(
        r#"(call $put (call $get_header (i32.const 8) (i32.const 100) (i32.const 6) (i32.const 0) (i32.const 4)))
           (call $put (call $add_header (i32.const -1) (i32.const 130) (i32.const 5) (i32.const 160) (i32.const 5)))
           (call $put (call $get_pairs (i32.const 99) (i32.const 0) (i32.const 4)))
           (call $put (call $get_pairs (i32.const 3) (i32.const 0) (i32.const 4)))
           (call $put (i32.load (i32.const 4)))"#,
    )
    .start();
    assert_eq!(rig.results_of_request(), [2, 2, 2, 0, 0]);
}

#[test]
fn a_response_s_headers_are_changed_in_its_callback() {
    let rig = Guest::new(
        r#"(func (export "proxy_on_response_headers") (param i32 i32 i32) (result i32)
             (call $put (local.get 1))
             (call $put (call $replace_header (i32.const 2) (i32.const 200) (i32.const 7) (i32.const 210) (i32.const 3)))
             (call $put (call $replace_header (i32.const 2) (i32.const 200) (i32.const 7) (i32.const 220) (i32.const 3)))
             (call $put (call $get_header (i32.const 0) (i32.const 150) (i32.const 5) (i32.const 0) (i32.const 4)))
             (call $flush) (i32.const 0))
           (data (i32.const 200) ":status") (data (i32.const 210) "404") (data (i32.const 220) "999")"#,
    )
    .also(NAMES)
    .start();
    let mut env = with_response(request(), "");
    rig.stream().on_response_headers(&mut env, true).unwrap();
    assert_eq!(results(&env), [2, 0, 0, 0], "the request stays readable");
    assert_eq!(env.response.as_ref().unwrap().status, 404, "a status out of range is ignored");
}
