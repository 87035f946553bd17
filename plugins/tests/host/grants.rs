//! What a plugin may not see or call unless it was granted.

use turnstile_plugins::{Dialect, HttpEnv, Lent, SecretHeaders, TARGET_HEADERS};

use crate::rig::{Guest, Rig, header, map, request, results};

fn secret_request() -> Lent<HttpEnv> {
    let mut env = request();
    let fields = env.request.as_mut().unwrap().fields.fields_mut();
    fields.insert("authorization", "Bearer key".parse().unwrap());
    fields.insert("cookie", "a=1".parse().unwrap());
    env.properties.insert(b"request\0headers\0authorization".to_vec(), b"Bearer key".to_vec());
    env
}

const NAMES: &str = r#"
(data (i32.const 100) "Authorization")
(data (i32.const 120) "request\00headers\00authorization")
(data (i32.const 160) "x")
"#;

const READS: &str = r#"
(call $put (local.get $n))
(call $put (call $get_header (i32.const 0) (i32.const 100) (i32.const 13) (i32.const 0) (i32.const 4)))
(call $put (call $get_property (i32.const 120) (i32.const 29) (i32.const 0) (i32.const 4)))
(call $put (call $replace_header (i32.const 0) (i32.const 100) (i32.const 13) (i32.const 160) (i32.const 1)))
(call $put (call $remove_header (i32.const 0) (i32.const 100) (i32.const 13)))
(call $put (call $get_pairs (i32.const 0) (i32.const 0) (i32.const 4)))
(call $put (i32.load (i32.load (i32.const 0))))
"#;

#[test]
fn secret_headers_are_absent_and_stay_as_they_are() {
    let rig = Guest::on_request_headers(READS).also(NAMES).start();
    let mut env = secret_request();
    assert_eq!(rig.results(&mut env), [7, 1, 1, 0, 0, 0, 7], "7 pairs of 9");
    assert_eq!(header(&env, "authorization").unwrap(), b"Bearer key");
    assert_eq!(rig.plugin.stats().tolerated, 2);

    let mut strict = Guest::on_request_headers(READS).also(NAMES).spec();
    strict.lenient = false;
    assert_eq!(Rig::start(strict).unwrap().results(&mut secret_request()), [7, 1, 1, 2, 2, 0, 7]);
}

#[test]
fn granted_headers_are_read_and_written() {
    let mut spec = Guest::on_request_headers(READS).also(NAMES).spec();
    spec.hidden_headers = SecretHeaders::ALL.without("authorization");
    let rig = Rig::start(spec).unwrap();
    let mut env = secret_request();
    assert_eq!(rig.results(&mut env), [8, 0, 0, 0, 0, 0, 7]);
    assert_eq!(header(&env, "authorization"), None);
    assert_eq!(header(&env, "cookie").unwrap(), b"a=1");
}

#[test]
fn a_whole_map_that_is_replaced_keeps_what_its_guest_does_not_see() {
    let pairs = map(&[("x-new", "1")]);
    let body = format!("(call $put (call $set_pairs (i32.const 0) (i32.const 200) (i32.const {})))", pairs.len());
    let rig = Guest::on_request_headers(&body).also(&crate::rig::data(200, &pairs)).start();
    let mut env = secret_request();
    assert_eq!(rig.results(&mut env), [0]);
    assert_eq!(header(&env, "x-new").unwrap(), b"1");
    assert_eq!(header(&env, "accept"), None);
    assert_eq!(header(&env, "authorization").unwrap(), b"Bearer key");
}

#[test]
fn a_local_response_sets_no_cookie_without_the_grant() {
    let pairs = map(&[("set-cookie", "a=1"), ("x-a", "1")]);
    let body = format!(
        "(call $put (call $local_response (i32.const 403) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)
           (i32.const 200) (i32.const {}) (i32.const -1)))",
        pairs.len()
    );
    for (hidden, expected) in [(SecretHeaders::ALL, 1), (SecretHeaders::NONE, 2)] {
        let mut spec = Guest::on_request_headers(&body).also(&crate::rig::data(200, &pairs)).spec();
        spec.hidden_headers = hidden;
        let rig = Rig::start(spec).unwrap();
        let mut env = request();
        let response = rig.stream().on_request_headers(&mut env, true).unwrap().effects.local_response.unwrap();
        assert_eq!(response.headers.len(), expected);
    }
}

#[test]
fn an_import_that_does_not_exist_cannot_be_allowed() {
    let mut spec = Guest::new("").spec();
    spec.allowed_imports = Some(vec!["proxy_log".to_owned(), "fd_write".to_owned(), "proxy_htp_call".to_owned()]);
    let error = Rig::start(spec).err().unwrap();
    assert!(error.message.contains("proxy_htp_call"), "{error}");
}

#[test]
fn imports_that_are_not_allowed_answer_so_and_do_nothing() {
    let guest = Guest::on_request_headers(
        "(call $put (call $replace_header (i32.const 0) (i32.const 160) (i32.const 1) (i32.const 160) (i32.const 1)))
         (call $put (call $random (i32.const 0) (i32.const 4)))
         (call $put (call $yield))",
    )
    .import(r#"(import "wasi_snapshot_preview1" "random_get" (func $random (param i32 i32) (result i32)))"#)
    .import(r#"(import "wasi_snapshot_preview1" "sched_yield" (func $yield (result i32)))"#)
    .also(NAMES);
    let mut spec = guest.spec();
    spec.allowed_imports = Some(["proxy_set_property", "proxy_log", "sched_yield"].map(str::to_owned).to_vec());
    let rig = Rig::start(spec).unwrap();
    let mut env = request();
    rig.stream().on_request_headers(&mut env, true).unwrap();
    assert_eq!(results(&env), [10, 76, 0]);
    assert_eq!(header(&env, "x"), None);
    assert_eq!(rig.lines().len(), 1, "said once");
}

#[test]
fn a_whole_map_as_a_property_shows_no_more_than_the_map() {
    let reads = "(call $put (call $get_property (i32.const 100) (i32.const 15) (i32.const 0) (i32.const 4)))
                 (call $put (i32.load (i32.load (i32.const 0))))";
    let rig = Guest::on_request_headers(reads).also(r#"(data (i32.const 100) "request\00headers")"#).start();
    assert_eq!(rig.results(&mut secret_request()), [0, 7], "7 pairs of 9");
}

/// A guest that names a host in a request's headers and reads it back.
fn targets() -> Guest {
    Guest::on_request_headers(
        "(call $put (local.get $n))
         (call $put (call $replace_header (i32.const 0) (i32.const 100) (i32.const 24) (i32.const 160) (i32.const 1)))
         (call $put (call $get_header (i32.const 0) (i32.const 100) (i32.const 24) (i32.const 0) (i32.const 4)))",
    )
    .also(r#"(data (i32.const 100) "X-Higress-Target-Cluster") (data (i32.const 160) "x")"#)
}

#[test]
fn headers_that_name_a_host_are_for_plugins_of_higress_only() {
    let name = TARGET_HEADERS[2];
    let with_one = || {
        let mut env = request();
        env.request.as_mut().unwrap().fields.fields_mut().insert(name, "theirs".parse().unwrap());
        env
    };
    let mut env = with_one();
    assert_eq!(targets().start().results(&mut env), [7, 0, 1], "absent, and writing it does nothing");
    assert_eq!(header(&env, name).unwrap(), b"theirs");

    let mut spec = targets().spec();
    spec.dialect = Dialect::Higress;
    let mut env = with_one();
    assert_eq!(Rig::start(spec).unwrap().results(&mut env), [8, 0, 0]);
    assert_eq!(header(&env, name).unwrap(), b"x");
}
