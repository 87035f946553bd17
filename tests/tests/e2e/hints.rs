//! `nvext` and the headers beside it.

use serde_json::{Value, json};
use turnstile_tests::harness::{CHAT, Request, Setup, WorkerExt, chat_with, send};

const MEMBERS: [&str; 3] =
    [r#""model":"sim""#, r#""messages":[{"role":"user","content":"Hello"}]"#, r#""temperature":0.5"#];

#[tokio::test(flavor = "multi_thread")]
async fn hints_count_wherever_nvext_stands_and_it_never_goes_on() {
    let rig = Setup::new().start().await;
    for key in ["nvext", "nv\\u0065xt"] {
        for place in 0..=MEMBERS.len() {
            rig.worker().clear_requests();
            let mut members = MEMBERS.map(str::to_owned).to_vec();
            members.insert(place, format!("\"{key}\" : {{\"agent_hints\":{{\"priority\":7,\"osl\":20}}}}"));
            let answer = rig.send(&Request::post(CHAT, format!("{{{}}}", members.join(" , ")))).await;
            assert_eq!(answer.status, 200);
            let seen = &rig.worker().on(CHAT)[0];
            let text = String::from_utf8_lossy(&seen.body).into_owned();
            assert!(!text.contains("agent_hints") && !text.contains("xt\""), "{text}");
            assert_eq!(seen.json()["priority"], 7);
            assert_eq!(seen.json()["temperature"], 0.5);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nvext_reaches_no_worker_on_any_route() {
    let rig = Setup::new().start().await;
    let user = json!([{"role": "user", "content": "Hello"}]);
    for (path, body) in [
        (CHAT, json!({"messages": user})),
        ("/v1/completions", json!({"prompt": "Hello"})),
        ("/generate", json!({"text": "Hello"})),
        ("/v1/responses", json!({"input": "Hello"})),
        ("/v1/messages", json!({"messages": user, "max_tokens": 4})),
        ("/v1/messages/count_tokens", json!({"messages": user})),
        ("/v1/embeddings", json!({"input": "Hello"})),
        ("/v1/rerank", json!({"query": "a", "documents": ["b"]})),
        ("/v1/score", json!({"query": "a", "items": ["b"]})),
        ("/tokenize", json!({"prompt": "Hello"})),
        ("/detokenize", json!({"tokens": [72]})),
    ] {
        rig.worker().clear_requests();
        let mut body = body;
        body["model"] = json!("sim");
        body["nvext"] =
            json!({"agent_hints": {"priority": 1}, "session_control": {"session_id": "s", "action": "bind"}});
        rig.post(path, &body).await;
        let seen = &rig.worker().on(path)[0];
        assert!(seen.json().get("nvext").is_none(), "{path}");
        body["nvext"] = json!({"agent_hints": {"priority": "high"}});
        assert_eq!(rig.post(path, &body).await.status, 400, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hint_of_the_wrong_type_is_400_and_names_its_field() {
    let rig = Setup::new().start().await;
    let hint = |name: &str, value: Value| json!({"agent_hints": {name: value}});
    let control = |value: Value| json!({"session_control": value});
    for (nvext, field) in [
        (json!([]), "nvext"),
        (json!({"agent_hints": 1}), "nvext.agent_hints"),
        (hint("priority", json!("10")), "nvext.agent_hints.priority"),
        (hint("priority", json!(1.5)), "nvext.agent_hints.priority"),
        (hint("priority", json!(true)), "nvext.agent_hints.priority"),
        (hint("priority", json!(1_u64 << 40)), "nvext.agent_hints.priority"),
        (hint("strict_priority", json!(-1)), "nvext.agent_hints.strict_priority"),
        (hint("osl", json!("long")), "nvext.agent_hints.osl"),
        (hint("speculative_prefill", json!("true")), "nvext.agent_hints.speculative_prefill"),
        (hint("latency_sensitivity", json!([])), "nvext.agent_hints.latency_sensitivity"),
        (json!({"session_control": "s"}), "nvext.session_control"),
        (control(json!({"session_id": 5})), "nvext.session_control.session_id"),
        (control(json!({"session_id": ""})), "nvext.session_control.session_id"),
        (control(json!({"session_id": "x".repeat(300)})), "nvext.session_control.session_id"),
        (control(json!({"action": "bind"})), "nvext.session_control.session_id"),
        (control(json!({"session_id": "s", "action": "end"})), "nvext.session_control.action"),
        (control(json!({"session_id": "s", "timeout": "300"})), "nvext.session_control.timeout"),
        (control(json!({"session_id": "s", "timeout": 0})), "nvext.session_control.timeout"),
    ] {
        let answer = rig.post(CHAT, &chat_with("Hello", nvext.clone())).await;
        assert_eq!((answer.status, answer.error()["param"].as_str()), (400, Some(field)), "{nvext}");
        assert!(answer.error()["message"].as_str().unwrap().contains(field), "{}", answer.text());
    }
    assert!(rig.worker().turns().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_keys_and_nulls_do_no_harm_and_are_counted() {
    let rig = Setup::new().start().await;
    let nvext = json!({
        "annotations": ["x"], "agent_hints": {"mood": 1, "priority": null}, "session_control": {"color": "red"},
    });
    assert_eq!(rig.post(CHAT, &chat_with("Hello", nvext)).await.status, 200);
    let counted = rig.metric("turnstile_ignored_hints_total", &[("cause", "unknown_key")]).await;
    assert_eq!(counted, 3.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn dynamo_headers_override_the_body() {
    let rig = Setup::new().start().await;
    let nvext = json!({"agent_hints": {"priority": 3}, "session_control": {"session_id": "body"}});
    let request = Request::json(CHAT, &chat_with("Hello", nvext)).header("x-dynamo-request-priority", "-4");
    let answer = rig.send(&request).await;
    assert_eq!(rig.worker().on(CHAT)[0].json()["priority"], -4);
    assert_eq!(rig.record_of(&answer).await["priority"], -4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_header_that_cannot_be_read_is_ignored_and_counted() {
    let rig = Setup::new().start().await;
    let nvext = json!({"agent_hints": {"priority": 3}});
    let request = Request::json(CHAT, &chat_with("Hello", nvext)).header("x-dynamo-request-priority", "high");
    assert_eq!(rig.send(&request).await.status, 200);
    assert_eq!(rig.worker().on(CHAT)[0].json()["priority"], 3);
    assert_eq!(rig.metric("turnstile_ignored_hints_total", &[("cause", "bad_header")]).await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_priority_reaches_the_worker_where_the_route_has_one() {
    let rig = Setup::new().start().await;
    let user = json!([{"role": "user", "content": "Hello"}]);
    for (path, body, reaches) in [
        (CHAT, json!({"messages": user}), true),
        ("/v1/completions", json!({"prompt": "Hello"}), true),
        ("/generate", json!({"text": "Hello"}), true),
        ("/v1/responses", json!({"input": "Hello"}), false),
        ("/v1/messages", json!({"messages": user, "max_tokens": 4}), false),
    ] {
        rig.worker().clear_requests();
        let mut body = body;
        body["model"] = json!("sim");
        body["nvext"] = json!({"agent_hints": {"priority": 10}});
        let answer = rig.post(path, &body).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        let seen = rig.worker().on(path)[0].json();
        assert_eq!(seen.get("priority").and_then(Value::as_i64), reaches.then_some(10), "{path}");
        let record = rig.record_of(&answer).await;
        assert_eq!(record["engine_priority"].as_i64(), reaches.then_some(10), "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_engines_priority_is_signed_and_bounded() {
    let rig = Setup::new().start().await;
    for (asked, sent) in [(-5, -5), (10_000, 100), (-10_000, -99), (0, 0)] {
        rig.worker().clear_requests();
        rig.post(CHAT, &chat_with("Hello", json!({"agent_hints": {"priority": asked}}))).await;
        assert_eq!(rig.worker().on(CHAT)[0].json()["priority"], sent, "{asked}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_without_priorities_is_sent_none() {
    // This one would refuse a request that carries one.
    let config = |c: &mut turnstile_sim::SimConfig| {
        c.enable_priority_scheduling = false;
        c.abort_on_priority_when_disabled = true;
    };
    let rig = Setup::new().sim(config).start().await;
    let answer = rig.post(CHAT, &chat_with("Hello", json!({"agent_hints": {"priority": 5}}))).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert!(rig.worker().on(CHAT)[0].json().get("priority").is_none());
}

#[tokio::test(flavor = "multi_thread")]
async fn hints_of_every_kind_show_in_an_explanation() {
    let rig = Setup::new().start().await;
    let hints = json!({"strict_priority": 2, "latency_sensitivity": 2.5, "osl": 400});
    let question = json!({"body": chat_with("Hello", json!({"agent_hints": hints}))});
    let answer = send(rig.admin_addr(), &Request::json("/explain", &question)).await.json();
    assert_eq!((&answer["queue"]["tier"], &answer["queue"]["head_start_ms"]), (&json!(2), &json!(2500)));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_expected_output_counts_as_load_until_the_turn_has_ended() {
    let rig = Setup::new().start().await;
    rig.worker().hold().await;
    let body = chat_with("Hello", json!({"agent_hints": {"osl": 4321}}));
    let mut connection = rig.begin(&Request::json(CHAT, &body)).await;
    turnstile_tests::harness::until("in flight", async || rig.in_flight() == 1).await;
    let worker = rig.gateway().fleet.workers.current().remove(0);
    assert_eq!(worker.view(0).expected_decode_tokens, 4321);
    rig.worker().release().await;
    assert_eq!(connection.answer().await.status, 200);
    rig.idle().await;
    assert_eq!(worker.view(0).expected_decode_tokens, 0);
}
