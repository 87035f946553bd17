//! Plugins that call upstreams over HTTP.

use serde_json::json;
use tokio::net::TcpSocket;
use turnstile_sim::{Fault, FaultKind};
use turnstile_tests::harness::{
    Answer, CHAT, Guest, PluginText, Request, Rig, Service, Setup, WorkerExt, built_in, chat, send, until,
};

/// Asks the service about each request and waits for what it says: the request goes on with the answer's body in
/// `x-checked`, or is answered 403 with the reason of the failure. The context that waits is at 4096.
fn gate(upstream: &str, path: &str, timeout_ms: u32) -> Guest {
    Guest::new(
        r#"(data (i32.const 600) "x-checkednone")
        (func (export "proxy_on_request_headers") (param $context i32) (param i32 i32) (result i32)
          (i32.store (i32.const 4096) (local.get $context))
          (if (call $call) (then (call $deny (i32.const 0) (i32.const 0))))
          (i32.const 1))
        (func $deny (param $text i32) (param $length i32)
          (drop (call $respond (i32.const 403) (i32.const 0) (i32.const 0) (local.get $text) (local.get $length)
            (i32.const 0) (i32.const 0) (i32.const -1))))
        (func (export "proxy_on_http_call_response") (param $root i32) (param i32) (param $headers i32) (param i32 i32)
          (drop (call $effective (i32.load (i32.const 4096))))
          (if (i32.eqz (local.get $headers)) (then
            (drop (call $get_status (i32.const 4100) (i32.const 4104) (i32.const 4108)))
            (call $deny (i32.load (i32.const 4104)) (i32.load (i32.const 4108)))
            (return)))
          (drop (call $get_buffer (i32.const 4) (i32.const 0) (i32.const 9) (i32.const 4104) (i32.const 4108)))
          (if (i32.eqz (i32.load (i32.const 4108))) (then
            (i32.store (i32.const 4104) (i32.const 609)) (i32.store (i32.const 4108) (i32.const 4))))
          (drop (call $replace_header (i32.const 0) (i32.const 600) (i32.const 9)
            (i32.load (i32.const 4104)) (i32.load (i32.const 4108))))
          (drop (call $continue_stream (i32.const 0))))"#,
    )
    .calls(upstream, path, timeout_ms)
}

fn plugin(phase: &'static str) -> PluginText {
    PluginText::new("gate", "gate.wasm", phase).key("upstreams = [\"service\"]").key("callback_timeout_ms = 60000")
}

fn setup(service: &Service, guest: &Guest, plugin: PluginText) -> Setup {
    let all: Vec<PluginText> = std::iter::once(plugin).chain(built_in()).collect();
    Setup::new().file("gate.wasm", guest.wasm()).plugins(&all).upstream("service", &service.url(), "")
}

async fn asked(rig: &Rig) -> Answer {
    rig.post(CHAT, &chat("Hello")).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_filter_waits_for_an_answer_and_edits_the_request_with_it() {
    let service = Service::start().await;
    for keys in ["", "h2c = true"] {
        let all: Vec<PluginText> = std::iter::once(plugin("filter")).chain(built_in()).collect();
        let setup = Setup::new().file("gate.wasm", gate("service", "/check", 0).wasm()).plugins(&all);
        let rig = setup.upstream("service", &service.url(), keys).start().await;
        for _ in 0..2 {
            assert_eq!(asked(&rig).await.status, 200);
        }
        assert_eq!(rig.worker().on(CHAT)[1].headers["x-checked"], "pong");
        let call = service.calls().pop().unwrap();
        assert_eq!((call.target.as_str(), call.authority.as_str()), ("POST /check", "service.test"));
        assert_eq!((&call.body[..], call.headers["x-from"].to_str().unwrap()), (&b"ping"[..], "guest"));
        let labels = [("plugin", "gate"), ("upstream", "service"), ("result", "ok")];
        assert_eq!(rig.metric("turnstile_plugin_callouts_total", &labels).await, 2.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn policies_wait_for_answers_too() {
    for phase in ["admit", "route"] {
        let service = Service::start().await;
        let rig = setup(&service, &gate("service", "/hold", 0), plugin(phase)).start().await;
        let mut waiting = rig.begin(&Request::json(CHAT, &chat("Hello"))).await;
        until("the call", async || service.calls().len() == 1).await;
        assert!(rig.worker().turns().is_empty(), "{phase}");
        service.release();
        assert_eq!(waiting.answer().await.status, 200, "{phase}");
        assert_eq!(rig.worker().turns().len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_a_policy_held_over_a_reload_waits_for_the_workers_that_came() {
    let service = Service::start().await;
    let setup = setup(&service, &gate("service", "/hold", 0), plugin("route"));
    let setup = setup.set("routing.unhealthy_after", "1000").workers(2).pool("default", "", &[0]);
    let mut rig = setup.start().await;
    let mut waiting = rig.begin(&Request::json(CHAT, &chat("Hello"))).await;
    until("the call", async || service.calls().len() == 1).await;
    // The worker that it was let through to goes, and the one that comes is not up yet.
    rig.workers[1].faults().add(Fault::always(FaultKind::Status(503, None)).on("/ready"));
    rig.edit(|setup| setup.set_pool_workers("default", &[1]));
    rig.generation(2).await;
    service.release();
    rig.until_queued(1).await;
    rig.workers[1].faults().clear();
    assert_eq!(waiting.answer().await.status, 200);
    assert_eq!((rig.workers[0].turns().len(), rig.workers[1].turns().len()), (0, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_is_called_when_its_workers_are_up_that_a_reload_has_brought() {
    let plugin = PluginText::new("gate", "gate.wasm", "filter")
        .key("upstreams = [\"default\"]")
        .key("callback_timeout_ms = 60000")
        .key("pause_timeout_ms = 60000");
    let setup = setup(&Service::start().await, &gate("default", "/v1/models", 0), plugin);
    let mut rig = setup.set("routing.unhealthy_after", "1000").workers(2).pool("default", "", &[0]).start().await;
    rig.workers[1].faults().add(Fault::always(FaultKind::Status(503, None)).on("/ready"));
    rig.edit(|setup| setup.set_pool_workers("default", &[1]));
    rig.generation(2).await;
    let mut waiting = rig.begin(&Request::json(CHAT, &chat("Hello"))).await;
    until("it is asked for", async || rig.workers[1].on("/ready").len() > 2).await;
    rig.workers[1].faults().clear();
    let answer = waiting.answer().await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(rig.workers[1].on(CHAT).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_that_fail_are_answered_with_their_reason() {
    let service = Service::start().await;
    for (path, timeout_ms, reason) in
        [("/hold", 50, "no answer within 50ms"), ("/cut", 0, ""), ("/large/5000000", 0, "larger than 4194304 bytes")]
    {
        let rig = setup(&service, &gate("service", path, timeout_ms), plugin("filter")).start().await;
        let answer = asked(&rig).await;
        assert_eq!(answer.status, 403, "{path}");
        assert!(!answer.text().is_empty() && answer.text().contains(reason), "{path}: {}", answer.text());
        assert!(rig.worker().turns().is_empty());
    }
    // Nobody listens there, and as long as it is bound no other process gets the port.
    let gone = TcpSocket::new_v4().unwrap();
    gone.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let url = format!("http://{}", gone.local_addr().unwrap());
    let all: Vec<PluginText> = std::iter::once(plugin("filter")).chain(built_in()).collect();
    let setup = Setup::new().file("gate.wasm", gate("service", "/", 0).wasm()).plugins(&all);
    let rig = setup.upstream("service", &url, "").start().await;
    let answer = asked(&rig).await;
    assert_eq!(answer.status, 403);
    assert!(answer.text().contains("refused"), "{}", answer.text());
    let labels = [("plugin", "gate"), ("upstream", "service"), ("result", "failed")];
    assert_eq!(rig.metric("turnstile_plugin_callouts_total", &labels).await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_of_all_kinds_come_through() {
    let service = Service::start().await;
    for (path, checked) in [("/status/204", "none"), ("/status/500", "none"), ("/large/1000000", "xxxxxxxxx")] {
        let rig = setup(&service, &gate("service", path, 0), plugin("filter")).start().await;
        assert_eq!(asked(&rig).await.status, 200, "{path}");
        assert_eq!(rig.worker().on(CHAT)[0].headers["x-checked"], checked, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_is_called_by_its_name_with_its_key() {
    let rig = setup(&Service::start().await, &gate("default", "/v1/models", 0), {
        PluginText::new("gate", "gate.wasm", "filter").key("upstreams = [\"default\"]")
    })
    .start()
    .await;
    let answer = asked(&rig).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(
        rig.worker().requests().iter().any(|seen| seen.path == "/v1/models" && seen.headers.contains_key("x-from"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_plugin_was_not_given_it_cannot_call() {
    let service = Service::start().await;
    let rig = setup(&service, &gate("service", "/", 0), PluginText::new("gate", "gate.wasm", "filter")).start().await;
    assert_eq!(asked(&rig).await.status, 403);
    assert!(service.calls().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_takes_its_calls_along() {
    let service = Service::start().await;
    let rig = setup(&service, &gate("service", "/hold", 0), plugin("filter")).start().await;
    let waiting = rig.begin(&Request::json(CHAT, &chat("Hello"))).await;
    until("the call", async || service.open() == 1).await;
    drop(waiting);
    until("the call is broken off", async || service.open() == 0).await;
    until("the record", async || rig.access_log().iter().any(|record| record["end"] == "client_gone")).await;
    service.release();
    assert_eq!(asked(&rig).await.status, 200, "the plugin lives on");
}

#[tokio::test(flavor = "multi_thread")]
async fn roots_call_from_configure_and_ticks() {
    let service = Service::start().await;
    let guest = Guest::new(
        r#"(func (export "proxy_on_configure") (param i32 i32) (result i32)
             (drop (call $call)) (drop (call $set_tick (i32.const 10))) (i32.const 1))
           (func (export "proxy_on_tick") (param i32)
             (drop (call $set_tick (i32.const 0))) (drop (call $call)))
           (func (export "proxy_on_http_call_response") (param i32 i32 i32 i32 i32)
             (drop (call $set_shared (i32.const 5100) (i32.const 4) (i32.const 5100) (i32.const 4) (i32.const 0))))"#,
    )
    .calls("service", "/root", 0);
    let rig = setup(&service, &guest, plugin("filter").key("instances = 1")).start().await;
    until("both calls", async || service.calls().len() == 2).await;
    let space = rig.gateway().foundation.shared.data.space("gate");
    until("an answer", async || space.get(b"ping").is_some()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trap_in_the_reply_is_the_fault_of_the_stream_that_waits() {
    let service = Service::start().await;
    for (on_error, status) in [("closed", 500), ("open", 200)] {
        let guest = Guest::new(
            r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (drop (call $call)) (i32.const 1))
               (func (export "proxy_on_http_call_response") (param i32 i32 i32 i32 i32) unreachable)"#,
        )
        .calls("service", "/", 0);
        let rig = setup(&service, &guest, plugin("filter").key(format!("on_error = {on_error:?}"))).start().await;
        assert_eq!(asked(&rig).await.status, status, "{on_error}");
        assert_eq!(rig.metric("turnstile_plugin_faults_total", &[("kind", "trap")]).await, 1.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_nobody_vouches_for_is_refused() {
    // Whatever listens there, it speaks no TLS.
    let service = Service::start().await;
    let all: Vec<PluginText> = std::iter::once(plugin("filter")).chain(built_in()).collect();
    let setup = Setup::new().file("gate.wasm", gate("service", "/", 0).wasm()).plugins(&all);
    let rig = setup.upstream("service", &service.url().replace("http", "https"), "").start().await;
    let answer = asked(&rig).await;
    assert_eq!(answer.status, 403);
    assert!(service.calls().is_empty());
    let summary = rig.admin("/plugins").await.json();
    assert_eq!(summary["plugins"][0]["name"], json!("gate"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_that_waits_for_nothing_has_failed_after_its_time() {
    let guest =
        Guest::new(r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32) (i32.const 1))"#);
    let service = Service::start().await;
    for phase in ["admit", "route"] {
        for (on_error, status) in [("fallback", 200), ("closed", 500)] {
            let plugin = plugin(phase).key("pause_timeout_ms = 50").key(format!("on_error = {on_error:?}"));
            let rig = setup(&service, &guest, plugin).start().await;
            let answer = asked(&rig).await;
            assert_eq!(answer.status, status, "{phase} {on_error}: {}", answer.text());
            // A turn that is only thought through waits for nobody.
            let question = Request::json("/explain", &json!({"body": chat("Hello")}));
            let explained = send(rig.admin_addr(), &question).await;
            assert_eq!((explained.status, explained.json()["worker"].is_string()), (200, true), "{}", explained.text());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_answers_and_closes_while_it_waits() {
    let service = Service::start().await;
    let rig = setup(&service, &gate("service", "/cut", 0), plugin("route")).start().await;
    assert_eq!(asked(&rig).await.status, 403);
    let closing = Guest::new(
        r#"(func (export "proxy_on_request_headers") (param i32 i32 i32) (result i32)
             (drop (call $close_stream (i32.const 0))) (i32.const 0))"#,
    );
    let rig = setup(&service, &closing, plugin("admit")).start().await;
    assert!(rig.begin(&Request::json(CHAT, &chat("Hello"))).await.try_head().await.is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_are_for_plugins_that_were_granted_them() {
    // Tells in the answer whether it sees the header.
    let guest = Guest::new(
        r#"(data (i32.const 600) "authorizationx-sees1")
        (func (export "proxy_on_response_headers") (param i32 i32 i32) (result i32)
          (if (i32.eqz (call $get_header (i32.const 0) (i32.const 600) (i32.const 13) (i32.const 4104) (i32.const 4108)))
            (then (drop (call $add_header (i32.const 2) (i32.const 613) (i32.const 6) (i32.const 619) (i32.const 1)))))
          (i32.const 0))"#,
    );
    let service = Service::start().await;
    for (keys, sees) in [("", None), ("secret_headers = [\"authorization\"]", Some("1"))] {
        let rig = setup(&service, &guest, plugin("filter").key(keys)).start().await;
        let request = Request::json(CHAT, &chat("Hello")).header("authorization", "Bearer key");
        assert_eq!(rig.send(&request).await.header("x-sees"), sees);
    }
}
