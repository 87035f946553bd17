//! Plugins made for Higress: hosts they want, headers they write, and who may not.

use crate::trials::writing;
use serde_json::Value;
use std::path::PathBuf;
use turnstile_tests::harness::{
    Answer, CHAT, Flood, PluginText, Request, Rig, Scripted, Setup, WorkerExt, built_in, chat, chat_stream, logs, until,
};

/// The probe of the conformance kit in Higress' dialect, with a program.
pub fn probe(name: &str, program: &str) -> PluginText {
    let guests = std::env::var_os("CONFORMANCE_GUESTS").map(PathBuf::from);
    let guests = guests.unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../conformance/guests"));
    PluginText::new(name, guests.join("probe-higress.wasm").display().to_string(), "filter")
        .key("dialect = \"higress\"")
        .key("instances = 1")
        .key("callback_timeout_ms = 60000")
        .key(format!("config.program = {}", toml::Value::String(program.to_owned())))
}

/// What plugins of this name have logged.
pub fn said(name: &str) -> Vec<String> {
    let lines = logs().plugin_lines();
    lines.into_iter().filter(|(plugin, _)| plugin == name).map(|(_, line)| line).collect()
}

async fn two_workers(name: &str, program: &str) -> Rig {
    logs();
    let all: Vec<PluginText> = std::iter::once(probe(name, program)).chain(built_in()).collect();
    let setup = Setup::new().workers(2).pool("default", "", &[0, 1]);
    let setup = setup.worker_keys(0, "id = \"left\"").worker_keys(1, "id = \"right\"");
    setup.plugins(&all).start().await
}

async fn worker_of(rig: &Rig, answer: &Answer) -> (String, Value) {
    let record = rig.record_of(answer).await;
    (record["worker"].as_str().unwrap().to_owned(), record["wanted"].clone())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_module_of_the_dialect_needs_to_be_asked_for() {
    let guests = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../conformance/guests");
    let plugin = PluginText::new("plain", guests.join("probe-higress.wasm").display().to_string(), "filter");
    let refusal = Setup::new().workers(1).plugins(&[plugin]).try_start().await.err().unwrap();
    assert!(refusal.contains("dialect = \"higress\""), "{refusal}");
    let policy = PluginText::new("policy", "builtin:kv-affinity", "route").key("dialect = \"higress\"");
    let refusal = Setup::new().workers(1).plugins(&[policy]).try_start().await.err().unwrap();
    assert!(refusal.contains("dialect") && refusal.contains("filter"), "{refusal}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_named_in_a_header_is_the_worker_of_that_name() {
    for (name, cluster) in
        [("left", "outbound|80||left.static"), ("right", "right"), ("right", "outbound|1|v|right.ns.svc")]
    {
        let program = format!(
            "on request_headers\n  - replace_header_map_value request_headers x-higress-target-cluster {cluster}\n"
        );
        let rig = two_workers("cluster", &program).await;
        for _ in 0..4 {
            let answer = rig.post(CHAT, &chat("Hello")).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            assert_eq!(worker_of(&rig, &answer).await, (name.to_owned(), "followed".into()), "{cluster}");
        }
        assert_eq!(rig.metric("turnstile_wanted_hosts_total", &[("result", "followed")]).await, 4.0);
        let seen = rig.workers[usize::from(name == "right")].on(CHAT);
        assert!(
            seen.len() == 4 && seen.iter().all(|request| !request.headers.contains_key("x-higress-target-cluster"))
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_that_has_read_the_body_overrides_the_host() {
    // The hosts are listed by address; the first of them is taken each time.
    let program = "on request_headers\n  return 1\non request_body\n  if $2 == 0\n    return pause\n  end\n  \
                   get_upstream_hosts\n  - get_header_map_value request_headers x-host\n  \
                   - set_upstream_override_host $text\n";
    let rig = two_workers("override", program).await;
    let workers = rig.admin("/workers").await.json();
    for worker in workers["workers"].as_array().unwrap() {
        let (id, url) = (worker["id"].as_str().unwrap(), worker["url"].as_str().unwrap());
        let address = url.strip_prefix("http://").unwrap();
        let mut connection = rig.connect().await;
        for _ in 0..3 {
            connection.send(&Request::json(CHAT, &chat("Hello")).header("x-host", address)).await;
            let answer = connection.answer().await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            assert_eq!(worker_of(&rig, &answer).await, (id.to_owned(), "followed".into()));
        }
        let list = said("override").pop().unwrap();
        assert!(list.contains(address) && list.contains("\"health_status\":\"Healthy\""), "{list}");
        assert!(list.contains("vllm:num_requests_waiting"), "{list}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_none_of_the_pool_is_counted_and_another_serves() {
    let program = "on request_headers\n  - get_header_map_value request_headers x-host\n  \
                   - set_upstream_override_host $text\n";
    let rig = two_workers("unknown", program).await;
    for host in ["203.0.113.9:1", "nowhere", "a,b", "127.0.0.1:1"] {
        let answer = rig.send(&Request::json(CHAT, &chat("Hello")).header("x-host", host)).await;
        assert_eq!(answer.status, 200, "{host}: {}", answer.text());
        assert_eq!(worker_of(&rig, &answer).await.1, "unknown", "{host}");
    }
    assert_eq!(rig.metric("turnstile_wanted_hosts_total", &[("result", "unknown")]).await, 4.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_takes_no_turns_is_not_chosen_whoever_wants_it() {
    let rig = two_workers("drained", "on request_headers\n  - set_upstream_override_host right\n").await;
    let answer = rig.post(CHAT, &chat("Hello")).await;
    assert_eq!(worker_of(&rig, &answer).await, ("right".to_owned(), "followed".into()));
    let drained = turnstile_tests::harness::send(rig.admin_addr(), &Request::post("/workers/right/drain", "")).await;
    assert!(drained.status < 300, "{}", drained.text());
    let answer = rig.post(CHAT, &chat("Hello")).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(worker_of(&rig, &answer).await, ("left".to_owned(), "unavailable".into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_a_policy_excludes_is_not_chosen_whoever_wants_it() {
    logs();
    let wants = probe("wants", "on request_headers\n  - set_upstream_override_host right\n");
    let excludes = PluginText::new("excludes", "excludes.wasm", "route").key("callback_timeout_ms = 60000");
    let all: Vec<PluginText> = std::iter::once(wants).chain(built_in()).chain([excludes]).collect();
    let setup = Setup::new().workers(2).pool("default", "", &[0, 1]);
    let setup = setup.worker_keys(0, "id = \"left\"").worker_keys(1, "id = \"right\"");
    let excludes = writing(&[("route.exclude", "right")]);
    let rig = setup.plugins(&all).file("excludes.wasm", excludes.wasm()).start().await;
    for _ in 0..4 {
        let answer = rig.post(CHAT, &chat("Hello")).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(worker_of(&rig, &answer).await, ("left".to_owned(), "barred".into()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_streaming_session_stays_where_it_is() {
    logs();
    let program = "on request_headers\n  - get_header_map_value request_headers x-host\n  \
                   - set_upstream_override_host $text\n";
    let all: Vec<PluginText> = std::iter::once(probe("pinned", program)).chain(built_in()).collect();
    let setup = Setup::new().sim(|sim| sim.enable_streaming_session = true).workers(2).pool("default", "", &[0, 1]);
    let setup = setup.worker_keys(0, "id = \"left\"").worker_keys(1, "id = \"right\"");
    let rig = setup.plugins(&all).start().await;
    let turn = |host: &str| {
        let body = serde_json::json!({
            "text": "Hello", "sampling_params": {"max_new_tokens": 4},
            "nvext": {"session_control": {"session_id": "s", "action": "open"}},
        });
        Request::json("/generate", &body).header("x-host", host)
    };
    let first = rig.send(&turn("left")).await;
    assert_eq!(first.status, 200, "{}", first.text());
    assert_eq!(worker_of(&rig, &first).await, ("left".to_owned(), "followed".into()));
    let second = rig.send(&turn("right")).await;
    assert_eq!(second.status, 200, "{}", second.text());
    assert_eq!(worker_of(&rig, &second).await, ("left".to_owned(), "barred".into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_is_another_pool_takes_no_open_streaming_session_along() {
    let program = "on request_headers\n  - get_header_map_value request_headers x-host\n  \
                   - replace_header_map_value request_headers x-higress-target-cluster $text\n";
    let all: Vec<PluginText> = std::iter::once(probe("to-pools", program)).chain(built_in()).collect();
    let setup = Setup::new().sim(|sim| sim.enable_streaming_session = true).workers(2);
    let setup = setup.pool("first", "", &[0]).pool("second", "models = [\"other\"]", &[1]);
    let rig = setup.plugins(&all).start().await;
    for (session, cluster, pool, wanted) in [
        ("s", "first", "first", "followed"),
        ("s", "outbound|80||second.static", "first", "barred"),
        ("t", "outbound|80||second.static", "second", "followed"),
        ("u", "third", "first", "unknown"),
    ] {
        let body = serde_json::json!({
            "text": "Hello", "sampling_params": {"max_new_tokens": 4},
            "nvext": {"session_control": {"session_id": session, "action": "open"}},
        });
        let answer = rig.send(&Request::json("/generate", &body).header("x-host", cluster)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let record = rig.record_of(&answer).await;
        assert_eq!((&record["pool"], &record["wanted"]), (&pool.into(), &wanted.into()), "{session} to {cluster}");
    }
}

const TARGETS: [(&str, &str); 3] = [
    ("x-higress-target-cluster", "right"),
    ("x-gateway-destination-endpoint", "right"),
    ("X-Envoy-Original-Dst-Host", "right"),
];

fn forged() -> Request {
    TARGETS.iter().fold(Request::json(CHAT, &chat("Hello")), |request, (name, value)| request.header(name, value))
}

#[tokio::test(flavor = "multi_thread")]
async fn what_clients_send_in_those_headers_ends_at_the_gateway() {
    let program = "on request_headers\n  get_header_map_value request_headers x-higress-target-cluster\n  \
                   get_header_map_value request_headers x-gateway-destination-endpoint\n  \
                   get_header_map_value request_headers x-envoy-original-dst-host\n";
    let with = two_workers("forged", program).await;
    let without = Setup::new().start().await;
    for rig in [&with, &without] {
        let answer = rig.send(&forged()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let (_, wanted) = worker_of(rig, &answer).await;
        assert_eq!(wanted, Value::Null);
        let seen: Vec<_> = rig.workers.iter().flat_map(|worker| worker.on(CHAT)).collect();
        assert_eq!(seen.len(), 1);
        for (name, _) in TARGETS {
            assert!(!seen[0].headers.contains_key(name), "{name}");
        }
        // Nor on any other way through.
        let models = TARGETS.iter().fold(Request::get("/v1/models"), |request, (name, v)| request.header(name, v));
        assert_eq!(rig.send(&models).await.status, 200);
    }
    let lines = said("forged");
    assert!(lines.len() == 3 && lines.iter().all(|line| line.ends_with("NOT_FOUND")), "{lines:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plugin_of_another_dialect_has_no_say() {
    logs();
    let guests = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../conformance/guests");
    let program = "on request_headers\n  - replace_header_map_value request_headers x-higress-target-cluster right\n  \
                   get_header_map_value request_headers x-higress-target-cluster\n";
    let plain = PluginText::new("plain-probe", guests.join("probe.wasm").display().to_string(), "filter")
        .key("callback_timeout_ms = 60000")
        .key(format!("config.program = {}", toml::Value::String(program.to_owned())));
    let all: Vec<PluginText> = std::iter::once(plain).chain(built_in()).collect();
    let setup = Setup::new().workers(2).pool("default", "", &[0, 1]).worker_keys(1, "id = \"right\"");
    let rig = setup.plugins(&all).start().await;
    let answer = rig.post(CHAT, &chat("Hello")).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let (_, wanted) = worker_of(&rig, &answer).await;
    assert_eq!(wanted, Value::Null);
    let seen: Vec<_> = rig.workers.iter().flat_map(|worker| worker.on(CHAT)).collect();
    assert!(seen.len() == 1 && !seen[0].headers.contains_key("x-higress-target-cluster"));
    assert!(said("plain-probe").last().unwrap().ends_with("NOT_FOUND"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_can_name_a_pool() {
    let program = "on request_headers\n  - replace_header_map_value request_headers x-higress-target-cluster \
                   \"outbound|80||second.static\"\n";
    let all: Vec<PluginText> = std::iter::once(probe("to-pool", program)).chain(built_in()).collect();
    let setup = Setup::new().workers(2).pool("first", "", &[0]).pool("second", "models = [\"other\"]", &[1]);
    let rig = setup.plugins(&all).start().await;
    let answer = rig.post(CHAT, &chat("Hello")).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(rig.record_of(&answer).await["pool"], "second");
}

#[tokio::test(flavor = "multi_thread")]
async fn plugins_of_the_dialect_share_their_data() {
    logs();
    let writer = probe("writer", "on request_headers\n  - set_shared_data k v 0\n");
    let reader = probe("reader", "on request_headers\n  get_shared_data k =c\n");
    let all: Vec<PluginText> = [writer, reader].into_iter().chain(built_in()).collect();
    let rig = Setup::new().plugins(&all).start().await;
    assert_eq!(rig.post(CHAT, &chat("Hello")).await.status, 200);
    assert_eq!(said("reader").last().unwrap(), "> get_shared_data k =c = OK v");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_last_piece_ends_the_answer_and_the_worker_is_told_to_stop() {
    let injects =
        "on response_body\n  - inject_encoded_data_to_filter_chain \"data: [DONE]\\n\\n\" 1\n  return continue\n";
    let at_the_head = "on response_headers\n  return 2\n";
    for (name, program, text) in [("last-piece", injects, "data: [DONE]\n\n"), ("head-only", at_the_head, "")] {
        logs();
        let worker = Flood::start().await;
        let all: Vec<PluginText> = std::iter::once(probe(name, program)).chain(built_in()).collect();
        let rig = Setup::new().workers(0).external(worker.url()).plugins(&all).start().await;
        // The connection serves the next turn as well.
        let mut connection = rig.connect().await;
        for turn in 1..=2 {
            connection.send(&Request::json(CHAT, &chat_stream("Hello"))).await;
            let answer = connection.answer().await;
            assert_eq!((answer.status, answer.complete), (200, true), "{name}");
            assert!(answer.text().ends_with(text) && (name != "head-only" || answer.body.is_empty()), "{name}");
            assert_eq!(rig.record_of(&answer).await["end"], "plugin_end", "{name}");
            until("the worker's stream is broken off", async || worker.ended() == turn).await;
        }
        let ended = rig.metric("turnstile_attempts_total", &[("result", "plugin_end")]).await;
        assert_eq!(ended, 2.0, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_whole_answer_that_ends_at_its_head_is_not_waited_for() {
    logs();
    // Most of the body never comes.
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{";
    let worker = Scripted::start(head).await;
    let filter = probe("at-once", "on response_headers\n  return 2\n");
    let all: Vec<PluginText> = std::iter::once(filter).chain(built_in()).collect();
    let rig = Setup::new().workers(0).external(worker.url()).plugins(&all).start().await;
    let answer = rig.post(CHAT, &chat("Hello")).await;
    assert_eq!((answer.status, answer.complete, answer.body.len()), (200, true, 0));
    assert_eq!(rig.record_of(&answer).await["end"], "plugin_end");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_last_piece_behind_all_that_the_worker_has_said_leaves_the_turn_finished() {
    logs();
    let event = "data: {\"id\":\"1\",\"object\":\"chat.completion.chunk\",\"model\":\"sim\",\"choices\":[{\"index\":0,\
                 \"delta\":{\"content\":\"Hi\"},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
    // The last chunk is missing, as if it came in a packet of its own.
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let worker = Scripted::start(format!("{head}{:x}\r\n{event}\r\n", event.len())).await;
    let filter =
        probe("own-end", "on response_body\n  - inject_encoded_data_to_filter_chain \"data: [DONE]\\n\\n\" 1\n");
    let all: Vec<PluginText> = std::iter::once(filter).chain(built_in()).collect();
    let rig = Setup::new().workers(0).external(worker.url()).plugins(&all).start().await;
    let answer = rig.post(CHAT, &chat_stream("Hello")).await;
    assert_eq!((answer.status, answer.complete, answer.text().as_str()), (200, true, "data: [DONE]\n\n"));
    assert_eq!(rig.record_of(&answer).await["end"], "finished");
}
