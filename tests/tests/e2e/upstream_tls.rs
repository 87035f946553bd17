//! TLS to workers and upstreams: who is trusted, by what name, by what the gateway shows itself, and what a reload changes.

use turnstile_tests::harness::{
    Answer, Authority, CHAT, Certified, Guest, PluginText, Rig, Scripted, Service, Setup, TlsFront, built_in, chat,
    swap, until,
};

const NAME: &str = "worker.test";
const BY_NAME: &str = "ca_file = \"ca.pem\"\nserver_name = \"worker.test\"";

/// A worker's answer: a whole chat completion.
fn answer() -> String {
    let body = r#"{"id":"1","object":"chat.completion","model":"sim","choices":[{"index":0,"message":{"role":"assistant","content":"Hi"},"finish_reason":"stop"}]}"#;
    format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// A worker behind TLS with this certificate.
async fn worker(own: &Certified, clients: Option<&Authority>) -> (Scripted, TlsFront) {
    let worker = Scripted::start(answer()).await;
    let front = TlsFront::start(&worker.url(), own, &["http/1.1"], clients).await;
    (worker, front)
}

fn setup(front: &TlsFront, keys: &str, authority: &Authority) -> Setup {
    let setup = Setup::new().external(front.url()).pool("default", keys, &[0]);
    setup.file("ca.pem", authority.pem()).set("routing.unhealthy_after", "1")
}

async fn ask(rig: &Rig) -> Answer {
    rig.post(CHAT, &chat("Hello")).await
}

/// Probes have failed, requests are refused, and nothing has come to the worker.
async fn is_refused(rig: &Rig, worker: &Scripted, front: &TlsFront, why: &str) {
    let labels = [("state", "unhealthy")];
    until(why, async || rig.metric("turnstile_worker_state", &labels).await == 1.0).await;
    assert_eq!(ask(rig).await.status, 503, "{why}");
    assert_eq!((worker.heads().len(), front.accepted()), (0, 0), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_is_known_by_its_authority_and_its_name_or_address() {
    let authority = Authority::new("ours");
    for (names, keys) in [(NAME, BY_NAME), ("127.0.0.1", "ca_file = \"ca.pem\"")] {
        let (worker, front) = worker(&authority.sign(&[names]), None).await;
        let rig = setup(&front, keys, &authority).start().await;
        let answer = ask(&rig).await;
        assert_eq!((answer.status, worker.heads().len()), (200, 1), "{}", answer.text());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_not_known_gets_nothing() {
    let (ours, another) = (Authority::new("ours"), Authority::new("another"));
    for (why, own, keys) in [
        ("another authority", another.sign(&[NAME]), BY_NAME),
        ("another name", ours.sign(&["other.test"]), BY_NAME),
        ("an address that the certificate does not have", ours.sign(&[NAME]), "ca_file = \"ca.pem\""),
        ("out of date", ours.sign_expired(&[NAME]), BY_NAME),
        ("no authority that the system knows", ours.sign(&[NAME]), "server_name = \"worker.test\""),
    ] {
        let (worker, front) = worker(&own, None).await;
        let rig = setup(&front, keys, &ours).start_unready().await;
        is_refused(&rig, &worker, &front, why).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_gateway_shows_itself_by_its_certificate() {
    let (authority, another) = (Authority::new("ours"), Authority::new("another"));
    let own = authority.sign(&[NAME]);
    let keys = format!("{BY_NAME}\nclient_cert = \"gateway.pem\"\nclient_key = \"gateway.key\"");
    let with = |front: &TlsFront, shown: &Certified| {
        let setup = setup(front, &keys, &authority).file("gateway.pem", shown.cert.as_str());
        setup.file("gateway.key", shown.key.as_str())
    };
    let (behind, front) = worker(&own, Some(&authority)).await;
    let rig = with(&front, &authority.sign(&["gateway.test"])).start().await;
    assert_eq!((ask(&rig).await.status, behind.heads().len()), (200, 1));

    let (behind, front) = worker(&own, Some(&authority)).await;
    let rig = with(&front, &another.sign(&["gateway.test"])).start_unready().await;
    is_refused(&rig, &behind, &front, "a certificate of another authority").await;

    let (behind, front) = worker(&own, Some(&authority)).await;
    let rig = setup(&front, BY_NAME, &authority).start_unready().await;
    is_refused(&rig, &behind, &front, "no certificate").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_changes_is_read_again_and_connections_under_the_old_one_are_not_used() {
    let (ours, another) = (Authority::new("ours"), Authority::new("another"));
    let (worker, front) = worker(&ours.sign(&[NAME]), None).await;
    let rig = setup(&front, BY_NAME, &another).start_unready().await;
    is_refused(&rig, &worker, &front, "the wrong authority").await;
    let file = rig.dir().join("ca.pem");
    swap(&file, ours.pem());
    rig.ready().await;
    assert_eq!(ask(&rig).await.status, 200);
    swap(&file, another.pem());
    let labels = [("state", "unhealthy")];
    until("the worker is not trusted", async || rig.metric("turnstile_worker_state", &labels).await == 1.0).await;
    assert_eq!(ask(&rig).await.status, 503);
    // One that holds both is what a change of authorities goes through.
    swap(&file, [ours.pem(), another.pem()].concat());
    rig.ready().await;
    assert_eq!(ask(&rig).await.status, 200);
    assert_eq!(worker.heads().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_file_keeps_what_was_and_is_named() {
    let ours = Authority::new("ours");
    let (_worker, front) = worker(&ours.sign(&[NAME]), None).await;
    let rig = setup(&front, BY_NAME, &ours).start().await;
    swap(&rig.dir().join("ca.pem"), "no certificate at all");
    let failed = [("result", "failed")];
    until("the reload", async || rig.metric("turnstile_reloads_total", &failed).await >= 1.0).await;
    let reason = rig.admin("/config").await.json()["last_reload_error"].as_str().unwrap().to_owned();
    assert!(reason.contains("pools.default.ca_file: ") && reason.contains("ca.pem: has no certificate"), "{reason}");
    assert_eq!(ask(&rig).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_followed_is_named_at_the_start() {
    let ours = Authority::new("ours");
    let (_worker, front) = worker(&ours.sign(&[NAME]), None).await;
    let (one, two) = (ours.sign(&["a.test"]), ours.sign(&["b.test"]));
    let mangled = ours.pem().replacen("MII", "AAA", 1);
    let own = "client_cert = \"own.pem\"\nclient_key = \"own.key\"";
    for (keys, cert, key, said) in [
        ("ca_file = \"mangled.pem\"", &one.cert, &one.key, "pools.default.ca_file: "),
        (own, &one.cert, &two.key, "own.key: is not the key of "),
        (own, &one.cert, &one.cert, "own.key: has no private key"),
        (own, &one.key, &one.key, "own.pem: has no certificate"),
        ("server_name = \"no name!\"", &one.cert, &one.key, "pools.default.server_name: "),
        ("ca_file = \"missing.pem\"", &one.cert, &one.key, "pools[0].ca_file: cannot read "),
        ("client_cert = \"own.pem\"", &one.cert, &one.key, "pools[0].client_cert: needs its private key: client_key"),
        ("client_key = \"own.key\"", &one.cert, &one.key, "pools[0].client_key: needs the certificate"),
    ] {
        let setup = setup(&front, keys, &ours).file("mangled.pem", mangled.as_str());
        let setup = setup.file("own.pem", cert.as_str()).file("own.key", key.as_str());
        let refusal = setup.try_start().await.err().unwrap_or_else(|| panic!("{keys} is taken"));
        assert!(refusal.contains(said), "{keys}: {refusal}");
    }
}

/// Asks the upstream `service` about each request, and answers with what it says: its body, or `none`.
fn asks_service() -> Guest {
    Guest::new(
        r#"(func (export "proxy_on_request_headers") (param $context i32) (param i32 i32) (result i32)
          (i32.store (i32.const 4096) (local.get $context))
          (if (call $call) (then unreachable))
          (i32.const 1))
        (data (i32.const 600) "none")
        (func (export "proxy_on_http_call_response") (param $root i32) (param i32) (param $headers i32) (param i32 i32)
          (drop (call $effective (i32.load (i32.const 4096))))
          (i32.store (i32.const 4104) (i32.const 600))
          (i32.store (i32.const 4108) (i32.const 4))
          (if (local.get $headers) (then
            (drop (call $get_buffer (i32.const 4) (i32.const 0) (i32.const 9) (i32.const 4104) (i32.const 4108)))))
          (drop (call $respond (i32.const 403) (i32.const 0) (i32.const 0) (i32.load (i32.const 4104))
            (i32.load (i32.const 4108)) (i32.const 0) (i32.const 0) (i32.const -1))))"#,
    )
    .calls("service", "/check", 0)
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_of_plugins_are_held_to_the_same() {
    let (ours, another) = (Authority::new("ours"), Authority::new("another"));
    for protocols in [&["h2"][..], &["http/1.1"][..]] {
        let service = Service::start().await;
        let front = TlsFront::start(&service.url(), &ours.sign(&["service.test"]), protocols, None).await;
        for (authority, keys, told) in [
            (&ours, "ca_file = \"ca.pem\"\nserver_name = \"service.test\"", "pong"),
            (&another, "ca_file = \"ca.pem\"\nserver_name = \"service.test\"", "none"),
            (&ours, "ca_file = \"ca.pem\"\nserver_name = \"other.test\"", "none"),
            (&ours, "ca_file = \"ca.pem\"", "none"),
            (&ours, "server_name = \"service.test\"", "none"),
            (&another, "verify = false", "pong"),
        ] {
            let plugin = PluginText::new("gate", "gate.wasm", "filter").key("upstreams = [\"service\"]");
            let all: Vec<PluginText> =
                std::iter::once(plugin.key("callback_timeout_ms = 60000")).chain(built_in()).collect();
            let setup = Setup::new().file("gate.wasm", asks_service().wasm()).file("ca.pem", authority.pem());
            let rig = setup.plugins(&all).upstream("service", &front.url(), keys).start().await;
            assert_eq!(ask(&rig).await.text(), told, "{protocols:?} {keys}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_calls_by_a_file_that_has_changed() {
    let (ours, another) = (Authority::new("ours"), Authority::new("another"));
    let service = Service::start().await;
    let front = TlsFront::start(&service.url(), &ours.sign(&["service.test"]), &["h2"], None).await;
    let plugin = PluginText::new("gate", "gate.wasm", "filter").key("upstreams = [\"service\"]");
    let all: Vec<PluginText> = std::iter::once(plugin.key("callback_timeout_ms = 60000")).chain(built_in()).collect();
    let setup = Setup::new().file("gate.wasm", asks_service().wasm()).file("ca.pem", another.pem()).plugins(&all);
    let keys = "ca_file = \"ca.pem\"\nserver_name = \"service.test\"";
    let rig = setup.upstream("service", &front.url(), keys).start().await;
    assert_eq!(ask(&rig).await.text(), "none");
    swap(&rig.dir().join("ca.pem"), ours.pem());
    until("the new authority", async || ask(&rig).await.text() == "pong").await;
}
