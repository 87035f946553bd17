#![allow(clippy::unwrap_used)]

use super::*;
use http::{HeaderValue, Method, StatusCode};
use std::time::UNIX_EPOCH;

fn env() -> FilterEnv {
    let mut headers = HeaderMap::new();
    headers.insert("x-a.b", HeaderValue::from_static("dots"));
    let head = RequestHead {
        method: Method::POST,
        path: "/v1/x?q=1".into(),
        authority: "h".into(),
        headers: Arc::new(headers),
        request_id: Arc::from("r"),
        peer: "127.0.0.1:99".parse().ok(),
        connection: 0,
        protocol: "HTTP/1.1",
        arrived: UNIX_EPOCH,
    };
    FilterEnv::new(head)
}

fn read(env: &mut FilterEnv, path: &str) -> Option<Vec<u8>> {
    env.property(path.replace('.', "\0").as_bytes()).map(Cow::into_owned)
}

fn number(n: i64) -> Option<Vec<u8>> {
    Some(n.to_le_bytes().to_vec())
}

#[test]
fn numbers_are_eight_bytes_booleans_one_and_maps_pairs() {
    let mut env = env();
    env.request_size = 3;
    env.local = "127.0.0.1:80".parse().ok();
    env.placed = Some(PlacedAt { pool: Arc::from("pool"), address: "10.0.0.1:30000".into(), connection: None });
    assert_eq!(read(&mut env, "request.size"), number(3));
    assert_eq!(read(&mut env, "request.time"), number(0));
    assert_eq!(read(&mut env, "source.port"), number(99));
    assert_eq!(read(&mut env, "destination.port"), number(80));
    assert_eq!(read(&mut env, "upstream.port"), number(30_000));
    assert_eq!(read(&mut env, "cluster_name").unwrap(), b"pool");
    assert_eq!(read(&mut env, "listener_direction"), number(1));
    assert_eq!(read(&mut env, "connection.mtls"), Some(vec![0]));
    let map = read(&mut env, "request.headers").unwrap();
    assert_eq!(pairs::parse(&map).unwrap().last().unwrap(), &(&b"x-a.b"[..], &b"dots"[..]));
    assert!(read(&mut env, "request.nothing").is_none());
}

#[test]
fn the_size_is_what_the_client_says_it_will_be() {
    let mut env = env();
    assert_eq!(read(&mut env, "request.size"), number(0));
    env.request.add(b"content-length", b"45").unwrap();
    assert_eq!(read(&mut env, "request.size"), number(45));
}

#[test]
fn what_is_seen_of_a_request_is_what_filters_have_made_of_it() {
    let mut env = env();
    let seen = |env: &mut FilterEnv| {
        ["request.path", "request.url_path", "request.query", "request.useragent", "request.referer"]
            .map(|name| read(env, name).map(|value| String::from_utf8(value).unwrap()))
    };
    let some = |text: &str| Some(text.to_owned());
    assert_eq!(seen(&mut env), [some("/v1/x?q=1"), some("/v1/x"), some("q=1"), None, None]);
    env.request.replace(b":path", b"/admin?").unwrap();
    env.request.add(b"user-agent", b"agent").unwrap();
    env.request.add(b"referer", b"here").unwrap();
    assert_eq!(seen(&mut env), [some("/admin?"), some("/admin"), some(""), some("agent"), some("here")]);
    env.request.replace(b":path", b"/plain").unwrap();
    env.request.remove(b"user-agent").unwrap();
    assert_eq!(seen(&mut env), [some("/plain"), some("/plain"), None, None, some("here")]);
}

#[test]
fn a_header_name_may_hold_dots() {
    let mut env = env();
    assert_eq!(env.property(b"request\0headers\0x-a.b").unwrap(), b"dots".as_slice());
    assert_eq!(env.property(b"request.headers.x-a.b").unwrap(), b"dots".as_slice());
}

#[test]
fn the_answer_is_there_once_it_is() {
    let mut env = env();
    for name in ["response.code", "response.size", "response.headers", "upstream.address", "cluster_name"] {
        assert!(read(&mut env, name).is_none(), "{name}");
    }
    let mut headers = HeaderMap::new();
    headers.insert("x-a", HeaderValue::from_static("1"));
    headers.append("x-b", HeaderValue::from_static("1"));
    headers.append("x-b", HeaderValue::from_static("2"));
    env.response = Some(ResponseMap::new(StatusCode::CREATED, headers));
    env.response_size = 5;
    assert_eq!(read(&mut env, "response.code"), number(201));
    assert_eq!(read(&mut env, "response.size"), number(5));
    assert_eq!(read(&mut env, "response.headers.x-a").unwrap(), b"1");
    assert_eq!(read(&mut env, "response.headers.x-b").unwrap(), b"1,2", "all values");
    assert_eq!(read(&mut env, "response.code_details").unwrap(), b"via_upstream");
}

#[test]
fn what_plugins_wrote_is_found_bare_and_behind_wasm() {
    let mut env = env();
    env.set_property(b"my\0own", b"1").unwrap();
    assert_eq!(env.property(b"my\0own").unwrap(), b"1".as_slice());
    assert_eq!(env.property(b"wasm\0my\0own").unwrap(), b"1".as_slice());
    assert_eq!(env.property(b"wasm.my\0own").unwrap(), b"1".as_slice());
    assert!(env.property(b"wasm\0my").is_none());
}
