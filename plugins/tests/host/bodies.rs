//! Body buffers.

use turnstile_plugins::{BufferType, HttpEnv, Lent, StreamEnv};

use crate::rig::{Guest, Rig, request, request_with_body, results, text, with_response};

/// A guest that does this when body arrives, on either side.
fn guest(body: &str) -> Guest {
    Guest::new(&format!(
        r#"(func (export "proxy_on_request_body") (param $context i32) (param $size i32) (param $eos i32) (result i32)
             {body} (call $flush) (i32.const 0))
           (func (export "proxy_on_response_body") (param $context i32) (param $size i32) (param $eos i32) (result i32)
             {body} (call $flush) (i32.const 0))
           (data (i32.const 100) "<<>>")"#
    ))
}

fn request_body(env: &mut Lent<HttpEnv>) -> String {
    String::from_utf8(env.buffer(BufferType::RequestBody).unwrap().to_vec()).unwrap()
}

#[test]
fn a_body_is_read_whole_in_part_and_beyond_its_end() {
    let rig = guest(
        r#"(call $put (local.get $size)) (call $put (local.get $eos))
           (call $put (call $get_buffer (i32.const 0) (i32.const 1) (i32.const 3) (i32.const 0) (i32.const 4)))
           (call $text (i32.load (i32.const 0)) (i32.load (i32.const 4)))
           (call $put (call $get_buffer (i32.const 0) (i32.const 9) (i32.const 3) (i32.const 0) (i32.const 4)))
           (call $put (i32.load (i32.const 4)))
           (call $put (call $get_buffer (i32.const 0) (i32.const 0) (i32.const -1) (i32.const 0) (i32.const 4)))
           (call $put (i32.load (i32.const 4)))
           (call $put (call $get_buffer (i32.const 0) (i32.const 2) (i32.const -1) (i32.const 0) (i32.const 4)))
           (call $put (i32.load (i32.const 4)))
           (call $put (call $buffer_status (i32.const 0) (i32.const 0) (i32.const 4)))
           (call $put (i32.load (i32.const 0)))"#,
    )
    .start();
    let mut env = request_with_body("hello");
    rig.stream().on_request_body(&mut env, 5, true).unwrap();
    assert_eq!(results(&env), [5, 1, 0, 0, 0, 0, 5, 0, 3, 0, 5]);
    assert_eq!(text(&env), "ell");
}

fn edited(start: u32, size: u32) -> String {
    let edit = format!(
        "(call $put (call $set_buffer (i32.const 0) (i32.const {start}) (i32.const {size}) (i32.const 100) (i32.const 4)))"
    );
    let rig = guest(&edit).start();
    let mut env = request_with_body("hello");
    rig.stream().on_request_body(&mut env, 5, true).unwrap();
    assert_eq!(results(&env), [0]);
    request_body(&mut env)
}

#[test]
fn a_body_is_prepended_appended_and_replaced_whole_or_in_part() {
    assert_eq!(edited(0, 0), "<<>>hello");
    assert_eq!(edited(5, 0), "hello<<>>");
    assert_eq!(edited(500, 7), "hello<<>>");
    assert_eq!(edited(0, 5), "<<>>");
    assert_eq!(edited(0, u32::MAX), "<<>>");
    assert_eq!(edited(1, 2), "h<<>>lo");
    assert_eq!(edited(u32::MAX, u32::MAX), "hello<<>>");
}

#[test]
fn a_response_body_is_its_own_buffer() {
    let rig = guest(
        "(call $put (call $set_buffer (i32.const 1) (i32.const 0) (local.get $size) (i32.const 100) (i32.const 2)))",
    )
    .start();
    let mut env = with_response(request_with_body("request"), "response");
    rig.stream().on_response_body(&mut env, 8, true).unwrap();
    assert_eq!(env.buffer(BufferType::ResponseBody).unwrap(), b"<<");
    assert_eq!(request_body(&mut env), "request");
}

const WRONG_BUFFERS: &str = r#"
(call $put (call $get_buffer (i32.const 0) (i32.const 0) (i32.const 9) (i32.const 0) (i32.const 4)))
(call $put (call $get_buffer (i32.const 3) (i32.const 0) (i32.const 9) (i32.const 0) (i32.const 4)))
(call $put (call $get_buffer (i32.const 9) (i32.const 0) (i32.const 9) (i32.const 0) (i32.const 4)))
(call $put (call $set_buffer (i32.const 7) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 1)))
(call $put (call $set_buffer (i32.const 99) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 1)))
(call $put (call $set_buffer (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 1)))
"#;

#[test]
fn buffers_that_are_not_there_or_not_writable_say_so() {
    let guest = Guest::on_request_headers(WRONG_BUFFERS);
    assert_eq!(guest.start().results_of_request(), [1, 1, 2, 2, 2, 0]);
    let mut spec = guest.spec();
    spec.lenient = false;
    assert_eq!(Rig::start(spec).unwrap().results_of_request(), [1, 1, 2, 2, 2, 1]);
}

#[test]
fn a_range_that_overflows_is_a_bad_argument_for_a_strict_plugin() {
    let guest =
        guest("(call $put (call $get_buffer (i32.const 0) (i32.const 2) (i32.const -1) (i32.const 0) (i32.const 4)))");
    let mut spec = guest.spec();
    spec.lenient = false;
    let rig = Rig::start(spec).unwrap();
    let mut env = request_with_body("hello");
    rig.stream().on_request_body(&mut env, 5, true).unwrap();
    assert_eq!(results(&env), [2]);
}

#[test]
fn a_body_cannot_be_made_larger_than_may_be_held() {
    let guest = guest(
        r#"(call $put (call $set_buffer (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 100) (i32.const 4)))
           (call $put (call $set_buffer (i32.const 0) (i32.const 0) (i32.const 3) (i32.const 100) (i32.const 4)))"#,
    );
    let mut spec = guest.spec();
    spec.limits.held_body_bytes = 8;
    let rig = Rig::start(spec).unwrap();
    let mut env = request_with_body("hello");
    rig.stream().on_request_body(&mut env, 5, true).unwrap();
    assert_eq!(results(&env), [2, 0]);
    assert_eq!(request_body(&mut env), "<<>>lo");
}

#[test]
fn a_large_body_reaches_the_guest_whole() {
    static LARGE: std::sync::LazyLock<String> = std::sync::LazyLock::new(|| "0123456789abcdef".repeat(256 * 1024));
    let rig = guest(
        r#"(call $put (call $get_buffer (i32.const 0) (i32.const 0) (i32.const -1) (i32.const 0) (i32.const 4)))
           (call $put (i32.load (i32.const 4)))
           (call $text (i32.sub (i32.add (i32.load (i32.const 0)) (i32.load (i32.const 4))) (i32.const 4)) (i32.const 4))"#,
    )
    .start();
    let mut env = request_with_body(LARGE.as_str());
    rig.stream().on_request_body(&mut env, LARGE.len(), true).unwrap();
    assert_eq!(results(&env), [0, 4 << 20]);
    assert_eq!(text(&env), "cdef");
}

#[test]
fn pause_holds_until_the_guest_continues() {
    let rig = Guest::new(
        r#"(func (export "proxy_on_request_body") (param i32 i32 i32) (result i32)
             (if (result i32) (local.get 2) (then (i32.const 0)) (else (i32.const 1))))
           (func (export "proxy_on_response_body") (param i32 i32 i32) (result i32)
             (drop (call $continue_stream (i32.const 1))) (i32.const 1))"#,
    )
    .start();
    let mut env = request();
    let mut stream = rig.stream();
    assert!(stream.on_request_body(&mut env, 1, false).unwrap().paused_request());
    assert!(!stream.on_request_body(&mut env, 1, true).unwrap().paused_request());
    let outcome = stream.on_response_body(&mut env, 1, true).unwrap();
    assert!(outcome.effects.continue_response && !outcome.paused_response(), "it continued by itself");
}
