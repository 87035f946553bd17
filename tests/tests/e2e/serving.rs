//! What is reachable and what is not, and which headers travel.

use serde_json::{Value, json};
use turnstile_tests::harness::{CHAT, Request, Scripted, Setup, WorkerExt, chat, send};

/// Each inference path, the path that the worker is asked, and a body.
fn inference_routes() -> Vec<(&'static str, &'static str, Value)> {
    let prompt = json!({"model": "sim", "prompt": "Hello"});
    let messages = json!({"model": "sim", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]});
    vec![
        (CHAT, CHAT, chat("Hello")),
        ("/v1/completions", "/v1/completions", prompt.clone()),
        ("/generate", "/generate", json!({"text": "Hello"})),
        ("/v1/responses", "/v1/responses", json!({"model": "sim", "input": "Hello"})),
        ("/v1/messages", "/v1/messages", messages.clone()),
        ("/v1/messages/count_tokens", "/v1/messages/count_tokens", messages),
        ("/v1/embeddings", "/v1/embeddings", json!({"model": "sim", "input": "Hello"})),
        ("/v1/rerank", "/v1/rerank", json!({"model": "sim", "query": "a", "documents": ["b"]})),
        ("/v1/score", "/v1/score", json!({"model": "sim", "query": "a", "items": ["b"], "label_token_ids": [1]})),
        ("/tokenize", "/tokenize", prompt.clone()),
        ("/v1/tokenize", "/tokenize", prompt),
        ("/detokenize", "/detokenize", json!({"model": "sim", "tokens": [72, 105]})),
        ("/v1/detokenize", "/detokenize", json!({"model": "sim", "tokens": [72, 105]})),
    ]
}

/// What changes or reveals an engine, and what only the gateway may ask.
const NEVER_REACHABLE: [&str; 71] = [
    "/open_session",
    "/close_session",
    "/abort_request",
    "/flush_cache",
    "/flush_cache?timeout=1",
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
    "/update_weights_from_distributed",
    "/update_weights_from_ipc",
    "/begin_weight_update",
    "/end_weight_update",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/init_weights_send_group_for_remote_instance",
    "/send_weights_to_remote_instance",
    "/update_weight_version",
    "/get_weights_by_name",
    "/weights_checker",
    "/load_lora_adapter",
    "/load_lora_adapter_from_tensors",
    "/unload_lora_adapter",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/set_internal_state",
    "/slow_down",
    "/start_profile",
    "/stop_profile",
    "/set_trace_level",
    "/freeze_gc",
    "/configure_logging",
    "/pd_role_switch",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/get_hicache_l3_cache_layout",
    "/hicache/storage-backend",
    "/clear_hicache_storage_backend",
    "/start_expert_distribution_record",
    "/stop_expert_distribution_record",
    "/dump_expert_distribution_record",
    "/add_external_corpus",
    "/remove_external_corpus",
    "/list_external_corpora",
    "/get_remote_instance_transfer_engine_info",
    "/dumper/start",
    "/server_info",
    "/get_server_info",
    "/model_info",
    "/get_model_info",
    "/v1/loads",
    "/get_load",
    "/weight_version",
    "/get_weight_version",
    "/metrics",
    "/metrics/",
    "/health_generate",
    "/ping",
    "/openapi.json",
    "/docs",
    "/redoc",
    "/parse_function_call",
    "/separate_reasoning",
    "/invocations",
    "/vertex_generate",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/api/tags",
    "/v1/responses/resp_1",
    "/",
];

#[tokio::test(flavor = "multi_thread")]
async fn every_inference_route_reaches_its_path_on_the_worker() {
    let rig = Setup::new().start().await;
    for (path, worker_path, body) in inference_routes() {
        rig.worker().clear_requests();
        let answer = rig.post(path, &body).await;
        assert_eq!(rig.worker().on(worker_path).len(), 1, "{path}");
        let direct = send(rig.worker().addr(), &Request::json(worker_path, &body)).await;
        assert_eq!(answer.status, direct.status, "{path}: {}", answer.text());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn any_other_path_is_404_in_the_openai_shape() {
    let rig = Setup::new().start().await;
    for request in [Request::get("/nonsense"), Request::json("/v1/nonsense", &chat("Hello"))] {
        let answer = rig.send(&request).await;
        assert_eq!(answer.status, 404);
        assert_eq!(answer.header("content-type"), Some("application/json"));
        let error = answer.error();
        assert_eq!((&error["type"], &error["code"]), (&json!("invalid_request_error"), &json!("not_found")));
        assert!(error["message"].as_str().unwrap().contains("nonsense") && error["param"].is_null(), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_administrative_or_session_route_of_the_engine_is_reachable() {
    let rig = Setup::new().sim(|c| c.enable_streaming_session = true).start().await;
    let mut connection = rig.connect().await;
    for path in NEVER_REACHABLE {
        connection.send(&Request::get(path)).await;
        assert_eq!(connection.answer().await.status, 404, "GET {path}");
        // Trailing slashes and doubled ones are no way around it.
        let forms = [path.to_owned(), format!("/{path}"), format!("{path}/"), path.replacen('/', "/%2e/", 1)];
        for form in forms {
            let answer = rig.post(&form, &json!({"session_id": "s"})).await;
            assert_eq!(answer.status, 404, "POST {form}");
        }
    }
    let probes = ["/ready", "/health", "/v1/loads", "/server_info", "/model_info"];
    let others: Vec<_> = rig.worker().requests().into_iter().filter(|r| !probes.contains(&r.path.as_str())).collect();
    assert!(others.is_empty(), "{others:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn inference_takes_post_only() {
    let rig = Setup::new().start().await;
    for method in ["GET", "PUT", "DELETE", "HEAD"] {
        for path in [CHAT, "/generate", "/v1/messages"] {
            let mut connection = rig.begin(&Request::new(method, path)).await;
            assert_eq!(connection.head().await.status, 405, "{method} {path}");
        }
    }
    assert!(rig.worker().turns().is_empty());
    assert_eq!(rig.post("/health", &json!({})).await.status, 405);
}

#[tokio::test(flavor = "multi_thread")]
async fn models_of_all_pools_are_one_list() {
    let rig = Setup::new()
        .worker(|c| c.model = "alpha".into())
        .worker(|c| c.model = "beta".into())
        .pool("one", "models = [\"alpha\", \"alpha-alias\"]", &[0])
        .pool("two", "", &[1])
        .start()
        .await;
    let list = rig.get("/v1/models").await.json();
    let ids: Vec<_> = list["data"].as_array().unwrap().iter().map(|card| card["id"].as_str().unwrap()).collect();
    assert_eq!((list["object"].as_str(), ids), (Some("list"), vec!["alpha", "alpha-alias", "beta"]));
    assert_eq!(rig.get("/v1/models/beta").await.json()["id"], "beta");
    let unknown = rig.get("/v1/models/gamma").await;
    assert_eq!((unknown.status, &unknown.error()["code"]), (404, &json!("model_not_found")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_goes_to_the_pool_of_its_model() {
    let rig = Setup::new().workers(2).pool("one", "models = [\"alpha\"]", &[0]).pool("two", "", &[1]).start().await;
    let mut body = chat("Hello");
    for (model, at) in [("alpha", 0), ("anything", 1), ("alpha", 0)] {
        body["model"] = json!(model);
        let answer = rig.explain(CHAT, &body).await;
        assert_eq!(answer.header("x-turnstile-worker"), Some(rig.workers[at].id().as_str()), "{model}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_no_pool_serves_is_404() {
    let rig = Setup::new().workers(1).pool("one", "models = [\"alpha\"]", &[0]).start().await;
    let answer = rig.post(CHAT, &chat("Hello")).await;
    let error = answer.error();
    assert_eq!((answer.status, &error["code"], &error["param"]), (404, &json!("model_not_found"), &json!("model")));
    let anthropic = json!({"model": "sim", "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]});
    let answer = rig.post("/v1/messages", &anthropic).await;
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (404, &json!("not_found_error")));
    assert!(rig.worker().turns().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn health_follows_the_workers_and_liveness_does_not() {
    let rig = Setup::new().start().await;
    for path in ["/health", "/ready", "/live"] {
        assert_eq!(rig.get(path).await.status, 200, "{path}");
    }
    rig.worker().die().await;
    turnstile_tests::harness::until("the worker is missed", async || rig.gateway().ready_workers() == 0).await;
    for (path, status) in [("/health", 503), ("/ready", 503), ("/live", 200)] {
        assert_eq!(rig.get(path).await.status, status, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_worker_a_turn_is_503_with_a_time_to_come_back() {
    let rig = Setup::new().sim(|c| c.warmup_s = 1e9).start_unready().await;
    let answer = rig.post(CHAT, &chat("Hello")).await;
    assert_eq!((answer.status, &answer.error()["code"]), (503, &json!("no_worker")));
    assert!(answer.header("retry-after").unwrap().parse::<u32>().unwrap() >= 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_id_is_kept_or_made_and_returned_everywhere() {
    let rig = Setup::new().start().await;
    let answer = rig.send(&Request::json(CHAT, &chat("Hello")).header("x-request-id", "mine-1")).await;
    assert_eq!(answer.header("x-request-id"), Some("mine-1"));
    assert_eq!(rig.worker().on(CHAT)[0].headers["x-request-id"], "mine-1");
    let made = rig.post(CHAT, &chat("Hello")).await;
    let id = made.header("x-request-id").unwrap();
    assert_eq!(id.len(), 32);
    assert_eq!(rig.worker().on(CHAT)[1].headers["x-request-id"], id);
    for path in ["/nonsense", "/health", "/v1/models"] {
        let answer = rig.send(&Request::get(path).header("x-request-id", "mine-2")).await;
        assert_eq!(answer.header("x-request-id"), Some("mine-2"), "{path}");
    }
    let odd = rig.send(&Request::json(CHAT, &chat("Hello")).header("x-request-id", "has space")).await;
    assert_ne!(odd.header("x-request-id"), Some("has space"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_engines_request_id_is_ours_and_new_for_each_turn() {
    let rig = Setup::new().start().await;
    let mut body = chat("Hello");
    body["rid"] = json!("client-chosen");
    for _ in 0..2 {
        assert_eq!(rig.post(CHAT, &body).await.status, 200);
    }
    let seen: Vec<Value> = rig.worker().on(CHAT).iter().map(|r| r.json()["rid"].clone()).collect();
    assert!(seen[0].is_string() && seen[0] != seen[1] && seen[0] != "client-chosen", "{seen:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn hop_by_hop_and_steering_headers_stop_at_the_gateway() {
    let rig = Setup::new().start().await;
    let request = Request::json(CHAT, &chat("Hello"))
        .header("connection", "keep-alive, x-hop")
        .header("x-hop", "1")
        .header("keep-alive", "timeout=5")
        .header("te", "trailers")
        .header("proxy-authorization", "Basic x")
        .header("accept-encoding", "gzip")
        .header("x-turnstile-worker", "forged")
        .header("x-data-parallel-rank", "1")
        .header("x-override-priority", "9")
        .header("x-smg-routing-key", "k")
        .header("authorization", "Bearer client-key")
        .header("x-custom", "kept");
    assert_eq!(rig.send(&request).await.status, 200);
    let headers = rig.worker().on(CHAT)[0].headers.clone();
    for name in [
        "x-hop",
        "keep-alive",
        "te",
        "proxy-authorization",
        "accept-encoding",
        "x-turnstile-worker",
        "x-data-parallel-rank",
        "x-override-priority",
        "x-smg-routing-key",
    ] {
        assert!(!headers.contains_key(name), "{name} reached the worker");
    }
    assert!(headers.get("connection").is_none_or(|v| !v.to_str().unwrap().contains("x-hop")));
    assert_eq!(headers["x-custom"], "kept");
    assert_eq!(headers["authorization"], "Bearer client-key");
    assert_eq!(headers["host"], rig.worker().id().as_str());
}

#[tokio::test(flavor = "multi_thread")]
async fn hop_by_hop_headers_of_a_worker_stop_at_the_gateway() {
    let body = r#"{"tokens":[1]}"#;
    let answer = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\n\
         Keep-Alive: timeout=5\r\nProxy-Authenticate: Basic\r\nTrailer: x\r\nX-Custom: kept\r\nX-Request-Id: theirs\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let worker = Scripted::start(answer).await;
    let rig = Setup::new().external(worker.url()).start().await;
    let answer = rig.post("/tokenize", &json!({"prompt": "Hello"})).await;
    assert_eq!((answer.status, answer.text().as_str()), (200, body));
    for name in ["x-hop", "keep-alive", "proxy-authenticate", "trailer"] {
        assert_eq!(answer.header(name), None, "{name}");
    }
    assert_eq!(answer.header("x-custom"), Some("kept"));
    let ids: Vec<_> = answer.headers.iter().filter(|(name, _)| name == "x-request-id").collect();
    assert_eq!(ids.len(), 1, "{ids:?}");
    assert_ne!(answer.header("x-request-id"), Some("theirs"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workers_key_replaces_the_clients() {
    let rig = Setup::new()
        .sim(|c| c.api_key = Some("worker-key".into()))
        .workers(1)
        .pool("one", "api_key = \"worker-key\"", &[0])
        .start()
        .await;
    let request = Request::json(CHAT, &chat("Hello")).header("authorization", "Bearer client-key");
    assert_eq!(rig.send(&request).await.status, 200);
    assert_eq!(rig.worker().on(CHAT)[0].headers["authorization"], "Bearer worker-key");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_connection_serves_many_requests_in_a_row() {
    let rig = Setup::new().start().await;
    let mut connection = rig.connect().await;
    for request in [
        Request::json(CHAT, &chat("one")),
        Request::get("/health"),
        Request::get("/nonsense"),
        Request::json("/generate", &json!({"text": "two"})),
        Request::json(CHAT, &turnstile_tests::harness::chat_stream("three")),
        Request::json(CHAT, &json!({"model": 5})),
        Request::json(CHAT, &chat("four")),
    ] {
        connection.send(&request).await;
        assert!(connection.answer().await.complete, "{request:?}");
    }
    assert_eq!(rig.worker().turns().len(), 4);
}
