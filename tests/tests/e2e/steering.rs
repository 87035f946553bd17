//! Fields that would steer a worker or forge what the gateway says: none gets past, and no tenant reaches another's cache,
//! session or request.

use serde_json::{Value, json};
use turnstile_fleet::steering::{Action, ROWS};
use turnstile_tests::harness::{CHAT, Request, Rig, Setup, WorkerExt, chat, chat_with};

/// Each generating route and a body for it.
fn routes(text: &str) -> Vec<(&'static str, Value)> {
    let messages = json!([{"role": "user", "content": text}]);
    vec![
        (CHAT, json!({"model": "sim", "messages": messages})),
        ("/v1/completions", json!({"model": "sim", "prompt": text})),
        ("/generate", json!({"text": text})),
        ("/v1/responses", json!({"model": "sim", "input": text})),
        ("/v1/messages", json!({"model": "sim", "max_tokens": 8, "messages": messages})),
    ]
}

fn by(tenant: &str, path: &str, body: &Value) -> Request {
    Request::json(path, body).header("authorization", &format!("Bearer {tenant}"))
}

async fn last(rig: &Rig, path: &str) -> Value {
    rig.worker().on(path).last().unwrap().json()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_member_of_the_table_reaches_a_worker_on_any_route_as_it_came() {
    let rig = Setup::new().start().await;
    for (path, body) in routes("Hello") {
        for row in ROWS {
            for member in row.members {
                let mut body = body.clone();
                body[member] = json!("forged");
                let answer = rig.post(path, &body).await;
                let taken = row.rule.choices()[0];
                if answer.status == 400 {
                    let named = answer.json()["error"]["message"].as_str().unwrap().starts_with(member);
                    assert!(named, "{path} {member}: {}", answer.text());
                    continue;
                }
                assert_eq!(answer.status, 200, "{path} {member}: {}", answer.text());
                let seen = last(&rig, path).await;
                let passes = taken == Action::Pass || (*member == "request_id" && path != "/v1/responses");
                assert_eq!(seen.get(member) == Some(&json!("forged")), passes, "{path} {member}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_member_that_asks_for_what_cannot_be_had_is_refused_by_name() {
    let rig = Setup::new().start().await;
    for (path, member, value) in [
        ("/generate", "session_params", json!({"id": "s"})),
        (CHAT, "custom_logit_processor", json!("code")),
        ("/generate", "custom_logit_processor", json!([null, "code"])),
    ] {
        let mut body = routes("Hello").into_iter().find(|(known, _)| *known == path).unwrap().1;
        body[member] = value;
        let answer = rig.post(path, &body).await;
        assert_eq!(answer.status, 400, "{path} {member}");
        let message = answer.error()["message"].as_str().unwrap().to_owned();
        assert_eq!(message, format!("{member} is not taken from clients (steering.{member} = \"refuse\")"));
    }
    assert!(rig.worker().turns().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn each_option_changes_what_becomes_of_its_field() {
    let rig = Setup::new()
        .set("steering.session_params", "\"drop\"")
        .set("steering.kv_hints", "\"pass\"")
        .set("steering.priority", "\"drop\"")
        .set("steering.lora_path", "\"refuse\"")
        .set("steering.override_headers", "\"refuse\"")
        .set("steering.credentials", "\"drop\"")
        .set("steering.dynamo_headers", "\"pass\"")
        .start()
        .await;
    let mut body = json!({"text": "x", "session_params": {"id": "s"}, "kv_hints": {"a": 1}, "priority": "no number"});
    let request = by("a", "/generate", &body).header("x-dynamo-meta-x", "1").header("x-api-key", "k");
    assert_eq!(rig.send(&request).await.status, 200);
    let seen = rig.worker().on("/generate").remove(0);
    let keys: Vec<String> = seen.json().as_object().unwrap().keys().cloned().collect();
    assert_eq!(keys, ["text", "kv_hints", "rid"]);
    for (header, passes) in [("authorization", false), ("x-api-key", false), ("x-dynamo-meta-x", true)] {
        assert_eq!(seen.headers.contains_key(header), passes, "{header}");
    }
    body["lora_path"] = json!("adapter");
    assert_eq!(rig.post("/generate", &body).await.status, 400);
    let answer = rig.send(&Request::json(CHAT, &chat("Hello")).header("x-override-priority", "9")).await;
    assert!(answer.error()["message"].as_str().unwrap().starts_with("x-override-priority "), "{}", answer.text());
    assert_eq!(rig.metric("turnstile_steering_total", &[("option", "session_params"), ("action", "drop")]).await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn forged_headers_do_not_reach_a_worker() {
    let rig = Setup::new().start().await;
    let forged = [
        ("x-override-rid", "mine"),
        ("x-override-priority", "99"),
        ("X-Data-Parallel-Rank", "1"),
        ("x-dp-rank", "1"),
        ("x-turnstile-worker", "other"),
        ("x-smg-routing-key", "k"),
        ("x-dynamo-worker-instance-id", "7"),
        ("x-dynamo-session-id", "s"),
        ("x-tenant-id", "t"),
        ("x-forwarded-port", "1"),
        ("forwarded", "for=1.1.1.1"),
        ("proxy-authorization", "Basic x"),
        ("keep-alive", "timeout=1"),
        ("te", "trailers"),
        ("x-private", "1"),
    ];
    let mut request = Request::json(CHAT, &chat("Hello")).header("connection", "keep-alive, x-private");
    for (name, value) in forged {
        request = request.header(name, value);
    }
    let request = request.header("x-forwarded-for", "1.1.1.1").header("x-real-ip", "1.1.1.1").header("x-mine", "kept");
    assert_eq!(rig.send(&request).await.status, 200);
    let seen = &rig.worker().on(CHAT)[0].headers;
    for (name, _) in forged {
        assert!(!seen.contains_key(name.to_ascii_lowercase()), "{name}");
    }
    let all = |name: &str| seen.get_all(name).iter().map(|v| v.to_str().unwrap().to_owned()).collect::<Vec<_>>();
    assert_eq!(all("x-mine"), ["kept"]);
    assert_eq!(all("x-forwarded-for"), ["127.0.0.1"]);
    assert_eq!(all("x-real-ip"), ["127.0.0.1"]);
    assert_eq!((all("x-forwarded-proto"), all("x-forwarded-host")), (vec!["http".into()], vec!["gateway".into()]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_trusted_proxy_is_believed_about_its_client() {
    let rig = Setup::new().set("forwarded.trusted", "[\"127.0.0.0/8\"]").start().await;
    let request = Request::json(CHAT, &chat("Hello")).header("x-forwarded-for", "1.1.1.1, 2.2.2.2");
    let request = request.header("x-forwarded-proto", "https").header("x-real-ip", "1.1.1.1");
    assert_eq!(rig.send(&request).await.status, 200);
    let seen = &rig.worker().on(CHAT)[0].headers;
    assert_eq!(seen["x-forwarded-for"], "1.1.1.1, 2.2.2.2, 127.0.0.1");
    assert_eq!(
        (&seen["x-forwarded-proto"], &seen["x-real-ip"]),
        (&"https".parse().unwrap(), &"1.1.1.1".parse().unwrap())
    );
    let rig = Setup::new().set("forwarded.send", "\"none\"").start().await;
    assert_eq!(rig.send(&request).await.status, 200);
    let seen = &rig.worker().on(CHAT)[0].headers;
    assert!(seen.keys().all(|name| !name.as_str().contains("forwarded") && name != "x-real-ip"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workers_own_key_takes_the_place_of_every_credential_of_the_client() {
    let rig = Setup::new().workers(1).pool("one", "api_key = \"worker-key\"", &[0]).start().await;
    assert_eq!(rig.send(&by("a", CHAT, &chat("Hello")).header("x-api-key", "k")).await.status, 200);
    let seen = &rig.worker().on(CHAT)[0].headers;
    assert_eq!((&seen["authorization"], seen.get("x-api-key")), (&"Bearer worker-key".parse().unwrap(), None));
}

/// Tokens of a prompt that the worker found in its cache.
async fn cached(rig: &Rig, request: &Request) -> u64 {
    let answer = rig.send(request).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    rig.record_of(&answer).await["cached_tokens"].as_u64().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_tenant_reaches_anothers_cache_by_its_name() {
    let rig = Setup::new().sim(|c| c.enable_cache_report = true).start().await;
    for (n, key) in ["cache_salt", "extra_key"].into_iter().enumerate() {
        let prompt = format!("{n} {}", "a long common beginning of a prompt ".repeat(20));
        for (path, body) in routes(&prompt).into_iter().take(4) {
            let mut salted = body.clone();
            salted[key] = json!("name");
            // Each route renders its own prompt: begin it with the route, so that none warms another.
            let salted = mark(path, &salted);
            let plain = mark(path, &body);
            assert!(cached(&rig, &by("a", path, &salted)).await < 20, "{path} {key}: cold");
            let theirs = last(&rig, path).await[key].clone();
            assert!(cached(&rig, &by("a", path, &salted)).await > 100, "{path} {key}: the tenant's own");
            assert!(cached(&rig, &by("b", path, &salted)).await < 20, "{path} {key}: the same name of another");
            assert!(cached(&rig, &Request::json(path, &salted)).await < 20, "{path} {key}: without a credential");
            let mut forged = salted.clone();
            forged[key] = theirs.clone();
            assert!(cached(&rig, &by("b", path, &forged)).await < 20, "{path} {key}: the name that the worker knows");
            let escaped = plain.to_string().replacen('{', &format!("{{\"{}\":{theirs},", escape(key)), 1);
            let request = Request::post(path, escaped).header("authorization", "Bearer c");
            assert!(cached(&rig, &request).await < 20, "{path} {key}: escaped");
            assert!(cached(&rig, &by("b", path, &plain)).await < 20, "{path} {key}: without the name");
        }
    }
}

/// The same body with a prompt of its own for each route.
fn mark(path: &str, body: &Value) -> Value {
    let mut body = body.clone();
    for key in ["prompt", "text", "input"] {
        if let Some(text) = body.get(key).and_then(Value::as_str) {
            body[key] = json!(format!("{path} {text}"));
        }
    }
    body
}

/// A key with its first letter escaped.
fn escape(key: &str) -> String {
    format!("\\u{:04x}{}", key.as_bytes()[0], &key[1..])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_is_scoped_prompt_by_prompt() {
    let rig = Setup::new().start().await;
    let body = json!({"text": ["one", "two"], "cache_salt": ["x", "x"], "extra_key": ["", "y"], "rid": ["a", "b"]});
    for tenant in ["a", "b"] {
        rig.send(&by(tenant, "/generate", &body)).await;
    }
    let seen: Vec<Value> = rig.worker().on("/generate").iter().map(|request| request.json()).collect();
    for body in &seen {
        assert!(body.get("rid").is_none() && body["cache_salt"][0] == body["cache_salt"][1]);
        assert_eq!(body["extra_key"][0], "");
    }
    assert_ne!(seen[0]["cache_salt"], seen[1]["cache_salt"]);
    assert_ne!(seen[0]["extra_key"][1], seen[1]["extra_key"][1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn isolation_keeps_credentials_apart_that_name_nothing() {
    let rig =
        Setup::new().sim(|c| c.enable_cache_report = true).set("steering.cache_salt", "\"isolate\"").start().await;
    let body = chat(&"a long common beginning of a prompt ".repeat(20));
    assert!(cached(&rig, &by("a", CHAT, &body)).await < 20);
    assert!(cached(&rig, &by("a", CHAT, &body)).await > 100);
    assert!(cached(&rig, &by("b", CHAT, &body)).await < 20);
    assert!(cached(&rig, &by("b", CHAT, &body)).await > 100);
    // What the gateway expects follows what the worker has.
    let answer = rig.send(&by("c", CHAT, &body)).await;
    let record = rig.record_of(&answer).await;
    assert_eq!((&record["predicted_cached"], record["cached_tokens"].as_u64().unwrap() < 20), (&json!(0), true));
}

#[tokio::test(flavor = "multi_thread")]
async fn dynamos_names_for_a_namespace_are_taken_and_scoped() {
    let rig = Setup::new().start().await;
    let salts = async |request: Request| {
        assert_eq!(rig.send(&request).await.status, 200);
        last(&rig, CHAT).await["cache_salt"].clone()
    };
    let plain = salts(by(
        "a",
        CHAT,
        &json!({"model": "sim", "messages": [{"role": "user", "content": "x"}], "cache_salt": "t"}),
    ))
    .await;
    assert_eq!(salts(by("a", CHAT, &chat_with("x", json!({"cache_salt": "t"})))).await, plain);
    assert_eq!(
        salts(by("a", CHAT, &chat_with("x", json!({"cache_salt": "u"}))).header("x-tenant-id", "t")).await,
        plain
    );
    assert_ne!(salts(by("b", CHAT, &chat("x")).header("x-tenant-id", "t")).await, plain);
    assert_eq!(rig.metric("turnstile_ignored_hints_total", &[("cause", "unknown_key")]).await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_tenant_reaches_anothers_session_or_request() {
    let rig = Setup::new().sim(|c| c.enable_session_radix_cache = true).start().await;
    let open = chat_with("Hello", json!({"session_control": {"session_id": "s", "action": "open"}}));
    let mut tags = Vec::new();
    for tenant in ["a", "b"] {
        assert_eq!(rig.send(&by(tenant, CHAT, &open)).await.status, 200);
        let seen = last(&rig, CHAT).await;
        assert_ne!(seen["rid"], Value::Null);
        tags.push((seen["session_id"].clone(), seen["rid"].clone()));
    }
    let (mine, theirs) = (&tags[0], &tags[1]);
    assert!(mine.0.is_string() && theirs.0.is_string() && mine != theirs, "{tags:?}");
    // Whatever of the other's it names, the worker does not hear it.
    for (path, body) in routes("Hello") {
        for (session, rid) in [mine, theirs] {
            let mut body = body.clone();
            body["session_id"] = session.clone();
            body["rid"] = rid.clone();
            body["request_id"] = rid.clone();
            body["nvext"] = json!({"session_control": {"session_id": session}});
            assert_eq!(rig.send(&by("c", path, &body)).await.status, 200, "{path}");
            let seen = last(&rig, path).await.to_string();
            assert!(!seen.contains(session.as_str().unwrap()), "{path}: {seen}");
            assert!(path != "/v1/responses" || !seen.contains(rid.as_str().unwrap()), "{path}: {seen}");
            assert_ne!(last(&rig, path).await["rid"], *rid, "{path}");
        }
    }
    assert_eq!(rig.worker().on("/close_session").len() + rig.worker().on("/abort_request").len(), 0);
}
