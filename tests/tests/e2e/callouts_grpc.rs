//! Plugins that call upstreams over gRPC.

use turnstile_tests::harness::{
    Answer, Authority, CHAT, Guest, PluginText, Rig, Service, Setup, TlsFront, built_in, chat,
};

/// Begins a call with `$begin` when a request comes and answers with what it was told, each event as a letter: i(nitial
/// metadata), m(essage) with the message, t(railing metadata), c(lose) with the status as a digit.
fn guest(method: &str, begin: &str) -> Guest {
    Guest::new(&format!(
        r#"(data (i32.const 5000) "service")
        (data (i32.const 5100) "test.Echo")
        (data (i32.const 5200) "{method}")
        (data (i32.const 5300) "hello")
        (global $context (mut i32) (i32.const 0))
        (global $at (mut i32) (i32.const 6000))
        (func $unary (param $timeout i32) (result i32)
          (call $grpc_call (i32.const 5000) (i32.const 7) (i32.const 5100) (i32.const 9) (i32.const 5200) (i32.const {length})
            (i32.const 0) (i32.const 0) (i32.const 5300) (i32.const 5) (local.get $timeout) (i32.const 5900)))
        (func $stream (result i32)
          (call $grpc_stream (i32.const 5000) (i32.const 7) (i32.const 5100) (i32.const 9) (i32.const 5200) (i32.const {length})
            (i32.const 0) (i32.const 0) (i32.const 5900)))
        (func $send (param $n i32) (param $end i32)
          (if (call $grpc_send (i32.load (i32.const 5900)) (i32.const 5300) (local.get $n) (local.get $end)) (then unreachable)))
        (func $letter (param $letter i32)
          (i32.store8 (global.get $at) (local.get $letter))
          (global.set $at (i32.add (global.get $at) (i32.const 1))))
        (func $answer
          (drop (call $effective (global.get $context)))
          (drop (call $respond (i32.const 403) (i32.const 0) (i32.const 0)
            (i32.const 6000) (i32.sub (global.get $at) (i32.const 6000)) (i32.const 0) (i32.const 0) (i32.const -1))))
        (func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
          (global.set $context (local.get 0))
          (if {begin} (then unreachable))
          (i32.const 1))
        (func (export "proxy_on_grpc_receive_initial_metadata") (param i32 i32 i32) (call $letter (i32.const 105)))
        (func (export "proxy_on_grpc_receive") (param i32 i32 i32)
          (call $letter (i32.const 109))
          (drop (call $get_buffer (i32.const 5) (i32.const 0) (i32.const 9) (i32.const 5904) (i32.const 5908)))
          (memory.copy (global.get $at) (i32.load (i32.const 5904)) (i32.load (i32.const 5908)))
          (global.set $at (i32.add (global.get $at) (i32.load (i32.const 5908))))
          (if (i32.const {unary}) (then (call $answer))))
        (func (export "proxy_on_grpc_receive_trailing_metadata") (param i32 i32 i32) (call $letter (i32.const 116)))
        (func (export "proxy_on_grpc_close") (param i32 i32 i32)
          (call $letter (i32.const 99))
          (call $letter (i32.add (i32.const 48) (local.get 2)))
          (call $answer))"#,
        length = method.len(),
        unary = i32::from(begin.contains("$unary")),
    ))
}

async fn rig(url: &str, guest: &Guest, keys: &str) -> Rig {
    setup(url, guest, keys).start().await
}

fn setup(url: &str, guest: &Guest, keys: &str) -> Setup {
    let plugin = PluginText::new("caller", "caller.wasm", "filter")
        .key("upstreams = [\"service\"]")
        .key("callback_timeout_ms = 60000");
    let all: Vec<PluginText> = std::iter::once(plugin).chain(built_in()).collect();
    let setup = Setup::new().file("caller.wasm", guest.wasm()).plugins(&all);
    setup.upstream("service", url, keys)
}

async fn told(service: &Service, method: &str, begin: &str) -> String {
    let rig = rig(&service.url(), &guest(method, begin), "h2c = true").await;
    let answer: Answer = rig.post(CHAT, &chat("Hello")).await;
    assert_eq!(answer.status, 403, "{}", answer.text());
    answer.text()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unary_call_brings_its_message() {
    let service = Service::start().await;
    assert_eq!(told(&service, "Unary", "(call $unary (i32.const 0))").await, "mhello");
    let call = service.calls().pop().unwrap();
    assert_eq!(call.headers["content-type"], "application/grpc");
    assert_eq!(
        (call.headers["te"].to_str().unwrap(), call.headers["grpc-timeout"].to_str().unwrap()),
        ("trailers", "10000m")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_unary_call_that_fails_brings_its_status() {
    let service = Service::start().await;
    assert_eq!(told(&service, "Denied", "(call $unary (i32.const 0))").await, "c7");
    assert_eq!(told(&service, "Silent", "(call $unary (i32.const 50))").await, "c4");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_goes_both_ways() {
    let service = Service::start().await;
    let begin = "(block (result i32) (drop (call $stream)) (call $send (i32.const 5) (i32.const 0))
                   (call $send (i32.const 2) (i32.const 0)) (call $send (i32.const 0) (i32.const 1)) (i32.const 0))";
    assert_eq!(told(&service, "Stream", begin).await, "imhellomhemtc0");
    let denied = "(call $stream)";
    assert_eq!(told(&service, "Denied", denied).await, "c7");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upstream_without_http2_is_unavailable() {
    let service = Service::start().await;
    let rig = rig(&service.url(), &guest("Unary", "(call $unary (i32.const 0))"), "").await;
    // 14 behind the digits.
    assert_eq!(rig.post(CHAT, &chat("Hello")).await.text(), "c>");
}

#[tokio::test(flavor = "multi_thread")]
async fn over_tls_http2_is_agreed_on_and_the_server_verified() {
    let (service, authority, other) = (Service::start().await, Authority::new("ours"), Authority::new("another"));
    let own = authority.sign(&["service.test"]);
    let front = TlsFront::start(&service.url(), &own, &["h2"], Some(&authority)).await;
    let client = authority.sign(&["gateway.test"]);
    let unary = guest("Unary", "(call $unary (i32.const 0))");
    for (keys, told) in [
        (
            "ca_file = \"ca.pem\"\nserver_name = \"service.test\"\nclient_cert = \"c.pem\"\nclient_key = \"c.key\"",
            "mhello",
        ),
        // 14, which comes behind the digits, each time.
        ("ca_file = \"ca.pem\"\nserver_name = \"service.test\"", "c>"),
        ("ca_file = \"ca.pem\"\nclient_cert = \"c.pem\"\nclient_key = \"c.key\"", "c>"),
        (
            "ca_file = \"other.pem\"\nserver_name = \"service.test\"\nclient_cert = \"c.pem\"\nclient_key = \"c.key\"",
            "c>",
        ),
        ("server_name = \"service.test\"\nclient_cert = \"c.pem\"\nclient_key = \"c.key\"", "c>"),
    ] {
        let setup = setup(&front.url(), &unary, keys).file("ca.pem", authority.pem()).file("other.pem", other.pem());
        let rig = setup.file("c.pem", client.cert.as_str()).file("c.key", client.key.as_str()).start().await;
        assert_eq!(rig.post(CHAT, &chat("Hello")).await.text(), told, "{keys}");
    }
    assert_eq!(service.calls().len(), 1, "nothing was sent where a side was not content");
}
