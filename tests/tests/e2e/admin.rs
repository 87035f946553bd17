//! The admin listener, and explanations of decisions.

use serde_json::{Value, json};
use turnstile_tests::harness::{Answer, CHAT, Request, Rig, Setup, WorkerExt, chat, chat_with, send, until};

const PAGES: [&str; 5] = ["/metrics", "/workers", "/sessions", "/plugins", "/config"];

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

async fn explain(rig: &Rig, question: &Value) -> Answer {
    rig.settled().await;
    send(rig.admin_addr(), &Request::json("/explain", question)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configured_token_is_asked_for() {
    let rig = Setup::new().set("admin.token", "\"sesame\"").start().await;
    for path in PAGES {
        assert_eq!(rig.admin(path).await.status, 401, "{path}");
        for wrong in ["Bearer wrong", "Bearer ", "Bearer sesame2", "Basic sesame", "sesame"] {
            let request = Request::get(path).header("authorization", wrong);
            assert_eq!(send(rig.admin_addr(), &request).await.status, 401, "{path} {wrong}");
        }
        let request = Request::get(path).header("authorization", "Bearer sesame");
        assert_eq!(send(rig.admin_addr(), &request).await.status, 200, "{path}");
    }
    for path in ["/reload", "/explain"] {
        assert_eq!(send(rig.admin_addr(), &Request::new("POST", path)).await.status, 401, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_page_shows_a_secret() {
    let rig = Setup::new()
        .sim(|c| c.api_key = Some("worker-secret".into()))
        .workers(1)
        .pool("default", "api_key = \"worker-secret\"", &[0])
        .set("admin.token", "\"admin-secret\"")
        .start()
        .await;
    let nvext = json!({"session_control": {"session_id": "session-secret", "action": "bind"}});
    let request =
        Request::json(CHAT, &chat_with("prompt-secret", nvext)).header("authorization", "Bearer client-secret");
    let answer = rig.send(&request).await;
    assert_eq!(answer.status, 200);
    rig.settled().await;
    for path in PAGES {
        let page = send(rig.admin_addr(), &Request::get(path).header("authorization", "Bearer admin-secret")).await;
        assert!(!page.text().contains("-secret"), "{path}: {}", page.text());
    }
    let record = rig.record_of(&answer).await.to_string();
    assert!(!record.contains("-secret"), "{record}");
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_have_the_shapes_that_scripts_rely_on() {
    let rig = Setup::new()
        .sim(|c| c.enable_session_radix_cache = true)
        .workers(2)
        .pool("default", "", &[0, 1])
        .worker_keys(0, "id = \"left\", labels = { gpu = \"h200\" }")
        .start()
        .await;
    let nvext = json!({"session_control": {"session_id": "s", "action": "open", "timeout": 60}});
    assert_eq!(rig.post(CHAT, &chat_with("Hello", nvext)).await.status, 200);

    let workers = rig.admin("/workers").await.json();
    let left = &workers["workers"][0];
    assert_eq!(
        (&left["id"], &left["labels"], &left["pool"]),
        (&json!("left"), &json!({"gpu": "h200"}), &json!("default"))
    );
    assert_eq!((&left["state"], &left["capabilities"]), (&json!("ready"), &json!(["tag", "priority"])));
    assert_eq!((&workers["queue_depth"], &left["sglang"]), (&json!(0), &json!("0.5.23")));
    for number in ["in_flight", "running", "waiting", "max_running", "kv_used_tokens", "kv_capacity_tokens"] {
        assert!(left[number].is_u64(), "{number}: {left}");
    }

    let sessions = rig.admin("/sessions").await.json();
    let session = &sessions["sessions"][0];
    assert_eq!((&sessions["counts"]["tag"], &session["mode"]), (&json!(1), &json!("tag")));
    assert_eq!((&session["ttl_ms"], &session["turns"], &session["in_flight"]), (&json!(60_000), &json!(1), &json!(0)));
    assert!(session["worker"].is_string() && session["held_tokens"].is_u64(), "{session}");

    let plugins = rig.admin("/plugins").await.json();
    let list = plugins["plugins"].as_array().unwrap();
    let names: Vec<_> = list.iter().map(|plugin| plugin["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["priority-queue", "session-binding", "kv-affinity"]);
    for plugin in list {
        assert!(
            plugin["calls"].as_u64().unwrap() > 0 && plugin["healthy_instances"] == plugin["instances"],
            "{plugin}"
        );
        assert_eq!(plugin["sha256"].as_str().unwrap().len(), 64);
    }

    let config = rig.admin("/config").await.json();
    assert_eq!(keys(&config), ["generation", "loaded_at", "file", "last_reload_error", "follows_file", "config"]);
    assert_eq!(config["config"]["retry"]["backoff_ms"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn paths_and_methods_that_are_none_are_refused() {
    let rig = Setup::new().start().await;
    assert_eq!(rig.admin("/nonsense").await.status, 404);
    for (method, path) in [("GET", "/reload"), ("GET", "/explain"), ("POST", "/metrics"), ("DELETE", "/sessions")] {
        assert_eq!(send(rig.admin_addr(), &Request::new(method, path)).await.status, 405, "{method} {path}");
    }
    assert_eq!(rig.get("/workers").await.status, 404, "the client's listener has none of it");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_a_client_sends_becomes_a_label() {
    let rig = Setup::new().start().await;
    let mut body =
        chat_with("Hello", json!({"session_control": {"session_id": "marker", "action": "bind"}, "marker": 1}));
    body["model"] = json!("marker");
    let request = Request::json(CHAT, &body).header("x-request-id", "marker").header("user-agent", "marker");
    assert_eq!(rig.send(&request).await.status, 200);
    rig.send(&Request::json("/marker", &json!({}))).await;
    assert!(!rig.metrics().await.text().contains("marker"));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_metric_shown_is_documented() {
    let rig = Setup::new().start().await;
    assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200);
    let described: Vec<String> = rig.gateway().metrics.described().into_iter().map(|m| m.name).collect();
    let text = rig.metrics().await.text().to_owned();
    let shown: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    assert!(shown.len() > 15, "{shown:?}");
    for name in shown {
        assert!(described.iter().any(|known| known == name) || name == "turnstile_plugin_custom", "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_placed_turn_is_explained_before_and_in_its_answer() {
    let rig = Setup::new().workers(2).start().await;
    let told = explain(&rig, &json!({"body": chat("Hello")})).await.json();
    assert_eq!((&told["pool"], &told["route"], &told["session"]), (&json!("default"), &json!("chat"), &Value::Null));
    assert_eq!(told["candidates"].as_array().unwrap().len(), 2);
    assert_eq!((&told["policies_followed"], &told["queue"]["depth"]), (&json!(true), &json!(0)));
    let answer = rig.explain(CHAT, &chat("Hello")).await;
    assert_eq!(answer.header("x-turnstile-worker"), told["worker"].as_str());
    assert_eq!(answer.header("x-turnstile-reason"), told["reason"].as_str());
    assert_eq!(answer.header("x-turnstile-queue-wait-ms"), Some("0"));
    assert_eq!(answer.header("x-turnstile-cached-estimate"), Some("0"));
    assert_eq!(answer.header("x-turnstile-cached-tokens"), Some("0"));
    assert_eq!(answer.header("x-turnstile-generation"), Some("1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queued_turn_is_explained_while_it_waits_and_in_its_answer() {
    let rig = Setup::new().set("admission.max_in_flight_per_worker", "1").start().await;
    rig.worker().hold().await;
    let mut first = rig.begin(&Request::json(CHAT, &chat("first"))).await;
    until("in flight", async || rig.in_flight() == 1).await;
    let body = chat_with("second", json!({"agent_hints": {"priority": 10, "strict_priority": 1}}));
    let mut second = rig.begin(&Request::json(CHAT, &body).header("x-turnstile-explain", "1")).await;
    rig.until_queued(1).await;
    let told = explain(&rig, &json!({"body": body})).await.json();
    let queue = &told["queue"];
    assert_eq!((&queue["depth"], &queue["tier"], &queue["head_start_ms"]), (&json!(1), &json!(1), &json!(10_000)));
    assert_eq!((&told["candidates"][0]["at_limit"], &told["candidates"][0]["in_flight"]), (&json!(true), &json!(1)));
    rig.worker().release().await;
    first.answer().await;
    let answer = second.answer().await;
    assert!(answer.header("x-turnstile-queue-wait-ms").is_some() && answer.header("x-turnstile-reason").is_some());
    assert_eq!(rig.admin("/workers").await.json()["queue_depth"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bound_turn_is_explained_before_and_in_its_answer() {
    let rig = Setup::new().workers(3).start().await;
    let bind = chat_with("Hello", json!({"session_control": {"session_id": "s", "action": "bind"}}));
    let first = rig.explain(CHAT, &bind).await;
    let next = chat_with("Something else", json!({"session_control": {"session_id": "s"}}));
    let told = explain(&rig, &json!({"body": next})).await.json();
    assert_eq!(told["worker"].as_str(), first.header("x-turnstile-worker"));
    assert_eq!((&told["session"]["worker"], &told["session"]["mode"]), (&told["worker"], &json!("affinity")));
    assert_eq!((&told["session"]["turns"], &told["reason"]), (&json!(1), &json!("bound")));
    assert_eq!(told["identity"]["session"], "s");
    let answer = rig.explain(CHAT, &next).await;
    assert_eq!(answer.header("x-turnstile-worker"), told["worker"].as_str());
    assert_eq!(answer.header("x-turnstile-reason"), Some("bound"));
    assert_eq!(answer.header("x-turnstile-session"), Some("affinity"));
    let record = rig.record_of(&answer).await;
    assert_eq!((&record["reason"], &record["turn"]), (&json!("bound"), &json!(2)));
    assert_eq!(rig.metric("turnstile_decisions_total", &[("reason", "bound")]).await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_explanation_changes_nothing() {
    let rig = Setup::new().sim(|c| c.enable_session_radix_cache = true).start().await;
    let nvext = json!({"session_control": {"session_id": "s", "action": "open"}});
    let body = chat_with("Hello", nvext);
    let before = explain(&rig, &json!({"body": body, "headers": {"x-a": "b"}, "path": CHAT})).await;
    assert_eq!(before.status, 200);
    assert_eq!((rig.in_flight(), rig.worker().turns().len()), (0, 0));
    assert_eq!(rig.admin("/sessions").await.json()["listed"], 0);
    let again = explain(&rig, &json!({"body": body})).await.json();
    assert_eq!((&again["session"], &again["candidates"][0]["cached_tokens"]), (&Value::Null, &json!(0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_question_is_400() {
    let rig = Setup::new().start().await;
    for question in [
        json!({}),
        json!({"body": chat("Hello"), "path": "/nonsense"}),
        json!({"body": [], "path": CHAT}),
        json!({"body": chat("Hello"), "headers": {"bad name": "x"}}),
        json!({"body": chat_with("Hello", json!([]))}),
    ] {
        assert_eq!(explain(&rig, &question).await.status, 400, "{question}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn explain_headers_need_both_the_configuration_and_the_request() {
    let rig = Setup::new().start().await;
    let plain = rig.post(CHAT, &chat("Hello")).await;
    assert!(plain.headers.iter().all(|(name, _)| !name.starts_with("x-turnstile-")));
    let off = Setup::new().set("logging.explain_headers", "false").start().await;
    let answer = off.explain(CHAT, &chat("Hello")).await;
    assert!(answer.headers.iter().all(|(name, _)| !name.starts_with("x-turnstile-")));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_record_of_a_turn_tells_what_was_decided_and_what_came_of_it() {
    let rig = Setup::new().workers(2).start().await;
    let mut body = chat_with("Hello", json!({"agent_hints": {"priority": 2}}));
    body["stream"] = json!(true);
    let answer = rig.explain(CHAT, &body).await;
    let record = rig.record_of(&answer).await;
    assert_eq!(record["worker"].as_str(), answer.header("x-turnstile-worker"));
    assert_eq!(
        (&record["route"], &record["pool"], &record["status"]),
        (&json!("chat"), &json!("default"), &json!(200))
    );
    assert_eq!(
        (&record["end"], &record["finish_reason"], &record["attempts"]),
        (&json!("finished"), &json!("stop"), &json!(1))
    );
    assert_eq!(
        (&record["priority"], &record["engine_priority"], &record["stream"]),
        (&json!(2), &json!(2), &json!(true))
    );
    assert_eq!(record["candidates"].as_array().unwrap().len(), 2);
    for number in ["prompt_tokens", "completion_tokens", "cached_tokens", "ttft_ms", "total_ms", "predicted_cached"] {
        assert!(record[number].is_number(), "{number}: {record}");
    }
}
