//! What a module has to stand before it goes live: its digest, where it comes from, a recorded request, and how its instances
//! are kept.

use crate::reload::reload;
use parking_lot::Mutex;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use turnstile_tests::harness::{
    CHAT, Guest, PluginText, Request, Rig, Setup, WorkerExt, built_in, chat, logs, swap, until,
};

fn with(extra: PluginText) -> Vec<PluginText> {
    std::iter::once(extra.key("callback_timeout_ms = 60000")).chain(built_in()).collect()
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

/// A filter that adds a header to requests.
fn filter(name: &str) -> Vec<u8> {
    let body = "(drop (call $add_header (i32.const 0) (i32.const 100) (i32.const 6) (i32.const 110) (i32.const 3)))";
    Guest::on_request(body).also(&format!(r#"(data (i32.const 100) "{name}") (data (i32.const 110) "yes")"#)).wasm()
}

async fn plugin(rig: &Rig, name: &str) -> Value {
    let list = rig.admin("/plugins").await.json();
    list["plugins"].as_array().unwrap().iter().find(|p| p["name"] == name).unwrap().clone()
}

async fn refused(rig: &Rig) -> String {
    let before = rig.gateway().generation.load().number;
    let answer = reload(rig).await;
    assert_eq!(answer.status, 400, "{}", answer.text());
    assert_eq!(rig.gateway().generation.load().number, before);
    assert_eq!(rig.post(CHAT, &chat("still there")).await.status, 200);
    answer.error()["message"].as_str().unwrap().to_owned()
}

/// Serves one file by HTTP, to whoever asks, for as long as the runtime lives. An empty one is 500.
async fn serve(module: Arc<Mutex<Vec<u8>>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/policies/extra.wasm", listener.local_addr().unwrap());
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            assert!(head.starts_with(b"GET /policies/extra.wasm HTTP/1.1\r\n"));
            let body = module.lock().clone();
            let status = if body.is_empty() { "500 Internal Server Error" } else { "200 OK" };
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n", body.len());
            stream.write_all(&[answer.as_bytes(), &body].concat()).await.unwrap();
        }
    });
    url
}

#[tokio::test(flavor = "multi_thread")]
async fn a_module_with_another_digest_than_the_pinned_one_is_refused_with_both() {
    let (good, other) = (filter("x-good"), filter("x-evil"));
    let pinned =
        |digest: &str| with(PluginText::new("extra", "extra.wasm", "filter").key(format!("sha256 = {digest:?}")));
    // Spelled in capitals it is the same.
    let mut rig =
        Setup::new().plugins(&pinned(&hex(&good).to_uppercase())).file("extra.wasm", good.clone()).start().await;
    assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200);
    swap(&rig.dir().join("extra.wasm"), &other);
    let message = refused(&rig).await;
    assert!(message.contains(&hex(&good)) && message.contains(&hex(&other)), "{message}");
    assert!(message.starts_with("plugins.extra: ") && message.contains("extra.wasm"), "{message}");
    rig.edit(|setup| setup.set_plugins(&pinned(&hex(&other))));
    rig.generation(2).await;
    assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200);
    assert_eq!(rig.worker().on(CHAT).last().unwrap().headers["x-evil"], "yes");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_module_comes_from_a_url_when_it_has_the_digest_and_the_next_reload_tries_again_when_not() {
    let module = filter("x-fetc");
    // Nothing of it is kept from an earlier run of this test.
    let unique = Guest::new(&format!("(data (i32.const 900) {:?})", format!("{:?}", std::time::Instant::now())));
    let wanted = [module, unique.wasm()].map(|wasm| (hex(&wasm), wasm));
    let served = Arc::new(Mutex::new(Vec::new()));
    let url = serve(Arc::clone(&served)).await;
    let from = |digest: &str| with(PluginText::new("extra", url.clone(), "filter").key(format!("sha256 = {digest:?}")));
    let mut rig = Setup::new().start().await;
    let (digest, wasm) = &wanted[1];
    rig.edit(|setup| setup.set_plugins(&from(digest)));
    let message = refused(&rig).await;
    assert!(message.contains(&url) && message.contains("answered 500"), "{message}");
    // What came is not what was asked for.
    served.lock().extend_from_slice(&wanted[0].1);
    let message = refused(&rig).await;
    assert!(message.contains(&wanted[0].0) && message.contains(digest), "{message}");
    served.lock().clone_from(wasm);
    assert_eq!(reload(&rig).await.status, 200);
    rig.generation(2).await;
    let facts = plugin(&rig, "extra").await;
    assert_eq!((&facts["sha256"], &facts["wasm"]), (&json!(digest), &json!(url)));
    // It is kept: nobody has to be there for the next generation, nor for another gateway with the same directory.
    served.lock().clear();
    rig.edit_key("limits.body_bytes", "\"4KiB\"");
    rig.generation(3).await;
    let second = Setup::new().plugins(&from(digest)).start().await;
    assert_eq!(plugin(&second, "extra").await["sha256"], json!(digest));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_module_that_asks_for_what_the_gateway_does_not_have_is_refused_by_the_name_of_the_import() {
    let strange = Guest::new("").import(r#"(import "env" "proxy_make_coffee" (func (param i32) (result i32)))"#);
    let rig = Setup::new()
        .plugins(&with(PluginText::new("extra", "extra.wasm", "filter")))
        .file("extra.wasm", filter("x-good"))
        .start()
        .await;
    swap(&rig.dir().join("extra.wasm"), strange.wasm());
    let message = refused(&rig).await;
    assert!(message.contains("proxy_make_coffee") && message.contains("extra.wasm"), "{message}");
}

const TURN: &str =
    r#"{"headers": {"x-do": "HOW"}, "body": {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}}"#;

/// Does what the header `x-do` of the request says: `t` traps, `l` loops, `w` names a worker that is not there.
fn obedient() -> Guest {
    Guest::on_request(
        "(local.set $n (call $asked))
         (if (i32.eq (local.get $n) (i32.const 116)) (then unreachable))
         (if (i32.eq (local.get $n) (i32.const 108)) (then (loop $on (br $on))))
         (if (i32.eq (local.get $n) (i32.const 119))
           (then (drop (call $set_property (i32.const 100) (i32.const 12) (i32.const 120) (i32.const 7)))))",
    )
    .also(r#"(data (i32.const 100) "route.target") (data (i32.const 120) "nowhere")"#)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_does_not_get_through_its_recorded_request_does_not_go_live() {
    let policy = |timeout_ms: u32| {
        let text = PluginText::new("tried", "tried.wasm", "route").key(format!("callback_timeout_ms = {timeout_ms}"));
        let chain: Vec<_> = std::iter::once(text.key("self_test = \"turn.json\"")).chain(built_in()).collect();
        chain
    };
    let turn = |how: &str| TURN.replace("HOW", how);
    let mut rig = Setup::new().start().await;
    for (how, timeout_ms, reason) in [
        ("t", 60_000, "trap"),
        ("l", 20, "deadline"),
        ("w", 60_000, "wrote route.target: no such worker among the candidates"),
    ] {
        std::fs::write(rig.dir().join("tried.wasm"), obedient().wasm()).unwrap();
        std::fs::write(rig.dir().join("turn.json"), turn(how)).unwrap();
        rig.edit(|setup| setup.set_plugins(&policy(timeout_ms)));
        let message = refused(&rig).await;
        assert!(message.contains("plugins.tried: self_test ") && message.contains("turn.json"), "{message}");
        assert!(message.contains(reason), "{reason}: {message}");
    }
    swap(&rig.dir().join("turn.json"), "{\"body\": ");
    assert!(refused(&rig).await.contains("expected {path, headers, body}"));
    // The file of the request is watched like the module.
    swap(&rig.dir().join("turn.json"), turn("nothing"));
    assert_eq!(reload(&rig).await.status, 200);
    rig.generation(2).await;
    let facts = plugin(&rig, "tried").await;
    assert_eq!(
        (&facts["state"], &facts["calls"]),
        (&json!("serving"), &json!(0)),
        "what serves has seen nothing of it"
    );
    assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_that_answers_its_recorded_request_itself_does_not_go_live() {
    let answers = Guest::new(
        r#"(func (export "proxy_on_request_body") (param i32 i32 i32) (result i32)
             (drop (call $local_response (i32.const 403) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)
               (i32.const 0) (i32.const 0) (i32.const -1)))
             (i32.const 1))"#,
    )
    .import(
        r#"(import "env" "proxy_send_local_response"
             (func $local_response (param i32 i32 i32 i32 i32 i32 i32 i32) (result i32)))"#,
    );
    let text = PluginText::new("tried", "tried.wasm", "filter").key("self_test = \"turn.json\"");
    let rig =
        Setup::new().plugins(&with(text)).file("tried.wasm", filter("x-good")).file("turn.json", TURN).start().await;
    swap(&rig.dir().join("tried.wasm"), answers.wasm());
    let message = refused(&rig).await;
    assert!(message.contains("the request was answered with 403 instead of going on"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_that_grows_is_recycled_while_a_stream_goes_on() {
    let log = logs();
    let growing = Guest::new(
        r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
             (drop (memory.grow (i32.const 32))) (i32.const 0))
           (func (export "proxy_on_response_body") (param i32 i32 i32) (result i32) (i32.const 0))"#,
    );
    let text = PluginText::new("growing", "growing.wasm", "filter").key("recycle_memory_mib = 1");
    let rig = Setup::new().plugins(&with(text)).file("growing.wasm", growing.wasm()).start().await;
    rig.worker().hold().await;
    let mut stream = rig.begin(&Request::json(CHAT, &chat("Hello"))).await;
    until("it is replaced", async || plugin(&rig, "growing").await["recycled"] == 1).await;
    rig.worker().release().await;
    let answer = stream.answer().await;
    assert_eq!((answer.status, answer.complete), (200, true));
    assert_eq!(plugin(&rig, "growing").await["faults"], json!({}));
    assert!(log.has(&["plugin instances replaced: memory had grown", "plugin=growing"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn with_stream_isolation_what_one_request_breaks_is_whole_for_the_next() {
    // Remembers in its memory that it was asked to; then it traps.
    let guest = Guest::on_request(
        "(if (global.get $spoilt) (then unreachable))
         (if (i32.eq (call $asked) (i32.const 115)) (then (global.set $spoilt (i32.const 1))))",
    )
    .also("(global $spoilt (mut i32) (i32.const 0))");
    let text = |isolation: &str| {
        with(PluginText::new("extra", "extra.wasm", "filter").key(format!("isolation = {isolation:?}")))
    };
    let mut rig = Setup::new().plugins(&text("stream")).file("extra.wasm", guest.wasm()).start().await;
    let spoil = Request::json(CHAT, &chat("Hello")).header("x-do", "s");
    for _ in 0..3 {
        assert_eq!(rig.send(&spoil).await.status, 200);
        assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200);
    }
    assert_eq!(plugin(&rig, "extra").await["isolation"], "stream");
    rig.edit(|setup| setup.set_plugins(&text("shared")));
    rig.generation(2).await;
    assert_eq!(rig.send(&spoil).await.status, 200);
    assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 500, "closed");
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_an_old_generation_lose_their_plugin_when_its_time_is_over() {
    let log = logs();
    // It would add a header to the answer.
    let guest = Guest::new(
        r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (i32.const 0))
           (func (export "proxy_on_response_headers") (param i32 i32 i32) (result i32)
             (drop (call $add_header (i32.const 2) (i32.const 100) (i32.const 6) (i32.const 110) (i32.const 3)))
             (i32.const 0))"#,
    )
    .also(r#"(data (i32.const 100) "x-seen") (data (i32.const 110) "yes")"#);
    for (on_error, status) in [("open", 200), ("closed", 500)] {
        let name = format!("old-{on_error}");
        let text = PluginText::new(&name, "old.wasm", "filter").key(format!("on_error = {on_error:?}"));
        let text = text.key("drain_s = 1");
        let mut rig = Setup::new().plugins(&with(text)).file("old.wasm", guest.wasm()).start().await;
        rig.worker().hold().await;
        let mut stream = rig.begin(&Request::json(CHAT, &chat("Hello"))).await;
        until("it is on its worker", async || rig.worker().on(CHAT).len() == 1).await;
        rig.edit(|setup| setup.set_plugins(&built_in()));
        rig.generation(2).await;
        until("its time is over", async || log.has(&["drain_s is over", &format!("plugin={name}")])).await;
        rig.worker().release().await;
        let answer = stream.answer().await;
        assert_eq!(answer.status, status, "{on_error}");
        assert_eq!(answer.header("x-seen"), None);
        until("nothing is left of it", async || rig.metric("turnstile_generations_alive", &[]).await <= 2.0).await;
    }
}
