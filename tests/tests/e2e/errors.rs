//! What clients are told when something is wrong: one table, in the shape of each protocol, without what is not theirs.

use serde_json::{Value, json};
use turnstile_sim::{Fault, FaultKind, Place};
use turnstile_tests::harness::{
    Answer, CHAT, PluginText, Request, Rig, Scripted, Setup, WorkerExt, chat, chat_stream, module, until,
};

/// The protocols, each by a path and a body.
pub(super) fn asked(stream: bool) -> Vec<(&'static str, Value)> {
    let messages = json!([{"role": "user", "content": "Hello [[sim:tokens=40]]"}]);
    vec![
        (CHAT, json!({"model": "sim", "messages": messages, "stream": stream})),
        ("/v1/completions", json!({"model": "sim", "prompt": "Hello", "max_tokens": 40, "stream": stream})),
        ("/v1/responses", json!({"model": "sim", "input": "Hello", "max_output_tokens": 40, "stream": stream})),
        ("/v1/messages", json!({"model": "sim", "max_tokens": 40, "messages": messages, "stream": stream})),
        ("/generate", json!({"text": "Hello", "sampling_params": {"max_new_tokens": 40}, "stream": stream})),
    ]
}

/// An error as its protocol has it: message, code, OpenAI type, Anthropic type.
pub(super) struct Wanted {
    status: u16,
    message: &'static str,
    code: &'static str,
    openai: &'static str,
    anthropic: &'static str,
}

pub(super) const fn wanted(
    status: u16,
    code: &'static str,
    openai: &'static str,
    anthropic: &'static str,
    message: &'static str,
) -> Wanted {
    Wanted { status, message, code, openai, anthropic }
}

pub(super) fn assert_told(path: &str, answer: &Answer, wanted: &Wanted) {
    assert_eq!(answer.status, wanted.status, "{path}: {}", answer.text());
    assert_eq!(answer.header("content-type"), Some("application/json"), "{path}");
    assert!(answer.complete && answer.header("x-request-id").is_some(), "{path}");
    for hidden in ["server", "vary"] {
        assert_eq!(answer.header(hidden), None, "{path}");
    }
    let body = answer.json();
    let error = &body["error"];
    match path {
        "/v1/messages" => {
            assert_eq!((&body["type"], &error["type"]), (&json!("error"), &json!(wanted.anthropic)), "{path}");
            assert!(error["message"].as_str().unwrap().ends_with(wanted.message), "{path}: {body}");
        }
        "/generate" => assert_eq!(*error, json!({"message": wanted.message, "code": wanted.code}), "{path}"),
        _ => {
            assert_eq!((&error["type"], &error["code"]), (&json!(wanted.openai), &json!(wanted.code)), "{path}");
            assert_eq!(error["message"], wanted.message, "{path}");
        }
    }
}

pub(super) const INVALID: &str = "invalid_request_error";

#[tokio::test(flavor = "multi_thread")]
async fn what_a_worker_says_is_told_in_the_tables_words_and_the_protocols_shape() {
    let flat = |message: &str| json!({"object": "error", "message": message, "type": "X", "code": 1}).to_string();
    let cases = [
        (
            400,
            flat("Tool 'nope' not found."),
            wanted(400, "request_refused", INVALID, INVALID, "Tool 'nope' not found."),
        ),
        (
            422,
            json!({"detail": [{"loc": ["body", "n"], "msg": "Too many", "input": "secret"}]}).to_string(),
            wanted(422, "request_refused", INVALID, INVALID, "n: Too many"),
        ),
        (
            400,
            flat("The input (9 tokens) is longer than the model's context length (8 tokens)."),
            wanted(
                400,
                "context_length_exceeded",
                INVALID,
                INVALID,
                "The input (9 tokens) is longer than the model's context length (8 tokens).",
            ),
        ),
        (
            400,
            "<html>no</html>".into(),
            wanted(400, "request_refused", INVALID, INVALID, "the worker refused the request"),
        ),
        (
            401,
            "{\"error\":\"Unauthorized\"}".into(),
            wanted(
                401,
                "invalid_credential",
                "authentication_error",
                "authentication_error",
                "the worker does not know this credential",
            ),
        ),
        (
            403,
            "{\"error\":\"Forbidden\"}".into(),
            wanted(403, "forbidden", "permission_error", "permission_error", "the worker forbids this"),
        ),
        (
            404,
            "{\"detail\":\"Not Found\"}".into(),
            wanted(404, "route_not_served", INVALID, "not_found_error", "the model's workers do not serve this route"),
        ),
        (
            413,
            "too much".into(),
            wanted(413, "request_too_large", INVALID, "request_too_large", "the worker takes no body of this size"),
        ),
        (
            429,
            "".into(),
            wanted(503, "worker_overloaded", "overloaded_error", "overloaded_error", "the worker is overloaded"),
        ),
        (
            503,
            flat("The request queue is full."),
            wanted(503, "worker_overloaded", "overloaded_error", "overloaded_error", "The request queue is full."),
        ),
        (
            400,
            json!({"error": {"message": "503: The request queue is full.", "code": 400}}).to_string(),
            wanted(503, "worker_overloaded", "overloaded_error", "overloaded_error", "The request queue is full."),
        ),
        (
            500,
            flat("Internal server error: unhashable type at /srv/sglang/x.py"),
            wanted(500, "worker_failed", "server_error", "api_error", "the worker failed to serve the request"),
        ),
        (
            502,
            "<html><center>nginx</center></html>".into(),
            wanted(502, "worker_failed", "server_error", "api_error", "the worker failed to serve the request"),
        ),
        (
            504,
            "".into(),
            wanted(504, "worker_timeout", "server_error", "timeout_error", "the worker did not answer in time"),
        ),
    ];
    let rig = Setup::new().set("retry.attempts", "1").start().await;
    for (status, body, wanted) in cases {
        for (path, request) in asked(status % 2 == 0) {
            rig.worker().faults().add(Fault::once(FaultKind::Status(status, Some(body.clone()))));
            let answer = rig.post(path, &request).await;
            assert_told(path, &answer, &wanted);
            let record = rig.record_of(&answer).await;
            assert_eq!((&record["error"], &record["end"]), (&json!(wanted.code), &json!("worker_error")), "{path}");
        }
    }
    assert_eq!(rig.metric("turnstile_refusals_total", &[("code", "request_refused")]).await, 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_does_not_fit_the_workers_schema_is_told_which_field_and_nothing_else() {
    let rig = Setup::new().start().await;
    let secret = "the whole prompt of somebody";
    for (path, body, message, param) in [
        (CHAT, json!({"model": "sim", "input": secret}), "messages: Field required", Some("messages")),
        (
            "/v1/messages",
            json!({"model": "sim", "metadata": {"x": secret}, "messages": []}),
            "max_tokens: Field required",
            None,
        ),
        ("/generate", json!({"nothing": secret}), "Either text, input_ids or input_embeds should be provided.", None),
        (
            "/tokenize",
            json!({"x": secret}),
            "Value error, Exactly one of 'prompt' or 'messages' must be provided.",
            None,
        ),
    ] {
        let answer = rig.post(path, &body).await;
        assert_eq!((answer.status, &answer.error()["message"]), (400, &json!(message)), "{path}");
        assert_eq!(answer.error().get("param").and_then(Value::as_str), param, "{path}");
        for hidden in [secret, "File", "site-packages", ".py", "input'"] {
            assert!(!answer.text().contains(hidden), "{path}: {}", answer.text());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_in_the_first_event_becomes_a_status_and_a_body() {
    let rig = Setup::new().set("retry.attempts", "1").start().await;
    for (code, told, wanted) in [
        (
            503,
            "The request queue is full.",
            wanted(503, "worker_overloaded", "overloaded_error", "overloaded_error", "The request queue is full."),
        ),
        (400, "session at /srv/x/y.py", wanted(400, "request_refused", INVALID, INVALID, "session at […]")),
        (
            500,
            "KeyError: 'x'",
            wanted(500, "worker_failed", "server_error", "api_error", "the worker failed to serve the request"),
        ),
    ] {
        for (path, request) in
            asked(true).into_iter().filter(|(path, _)| matches!(*path, CHAT | "/v1/completions" | "/generate"))
        {
            rig.worker().faults().add(Fault::once(FaultKind::ErrorEvent(code, told.into())));
            assert_told(path, &rig.post(path, &request).await, &wanted);
        }
    }
    for (path, name) in [("/v1/messages", "error"), ("/v1/responses", "response.failed")] {
        let data = match name {
            "error" => json!({"type": "error", "error": {"type": "overloaded_error", "message": "full"}}),
            _ => json!({"type": name, "response": {"status": "failed", "error": {"code": 503, "message": "full"}}}),
        };
        let answer = stream_of(&format!("event: {name}\ndata: {data}\n\n"));
        let worker = Scripted::start(answer).await;
        let rig = Setup::new().external(worker.url()).pool("one", "", &[0]).set("retry.attempts", "1");
        let rig = rig.start().await;
        let request = asked(true).into_iter().find(|(known, _)| *known == path).unwrap().1;
        let answer = rig.post(path, &request).await;
        assert_told(path, &answer, &wanted(503, "worker_overloaded", "overloaded_error", "overloaded_error", "full"));
    }
}

fn stream_of(events: &str) -> String {
    format!("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {}\r\n\r\n{events}", events.len())
}

#[tokio::test(flavor = "multi_thread")]
async fn overload_has_the_configured_status_and_says_when_to_come_back() {
    let rig = Setup::new().set("retry.attempts", "1").set("admission.overload_status", "429").start().await;
    let wanted = wanted(429, "worker_overloaded", "rate_limit_error", "rate_limit_error", "The request queue is full.");
    for (path, request) in asked(false) {
        rig.worker().faults().add(Fault::once(FaultKind::Status(
            503,
            Some(json!({"object": "error", "message": "The request queue is full."}).to_string()),
        )));
        let answer = rig.post(path, &request).await;
        assert_told(path, &answer, &wanted);
        assert_eq!(answer.header("retry-after"), Some("1"), "{path}: nothing has been measured");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workers_own_time_to_come_back_is_passed_on_when_it_makes_sense() {
    for (told, passed) in
        [("17", "17"), ("0", "1"), ("99999", "1"), ("Wed, 21 Oct 2099 07:28:00 GMT", "1"), ("-3", "1")]
    {
        let answer = format!("HTTP/1.1 503 Busy\r\nretry-after: {told}\r\ncontent-length: 0\r\n\r\n");
        let worker = Scripted::start(answer).await;
        let rig = Setup::new().external(worker.url()).pool("one", "", &[0]);
        let rig = rig.set("retry.attempts", "1").start().await;
        let answer = rig.post(CHAT, &chat("Hello")).await;
        assert_eq!((answer.status, answer.header("retry-after")), (503, Some(passed)), "{told}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_head_that_is_no_answer_is_not_relayed() {
    for head in [
        "HTTP/1.1 301 Moved\r\nlocation: http://elsewhere/\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 307 Moved\r\nlocation: http://elsewhere/\r\ncontent-length: 2\r\n\r\nxx",
        "HTTP/1.1 304 Not Modified\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
    ] {
        let worker = Scripted::start(head).await;
        let rig = Setup::new().external(worker.url()).pool("one", "", &[0]);
        let rig = rig.set("retry.attempts", "1").set("timeouts.first_byte_s", "5").start().await;
        for (path, request) in asked(false) {
            let answer = rig.post(path, &request).await;
            assert_eq!(answer.status, 502, "{head}: {}", answer.text());
            assert_eq!(answer.header("location"), None);
            assert!(answer.complete && !answer.text().contains("elsewhere"));
            let error = answer.json()["error"].clone();
            let kind = if path == "/v1/messages" { &error["type"] } else { &error["code"] };
            assert!(["worker_protocol", "api_error"].contains(&kind.as_str().unwrap()), "{head}: {error}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_breaks_says_so_in_its_protocol_and_ends_short() {
    let rig = Setup::new().start().await;
    for (path, request) in asked(true) {
        rig.worker().faults().add(Fault::once(FaultKind::Cut(Place::Body(1500))));
        let answer = rig.post(path, &request).await;
        assert_eq!((answer.status, answer.complete), (200, false), "{path}: {}", answer.text());
        let text = answer.text();
        assert!(text.ends_with("\n\n") && !text.contains("[DONE]"), "{path}: {text}");
        let last = text.trim_end().rsplit("\n\n").next().unwrap().to_owned();
        let data: Value = serde_json::from_str(last.split_once("data: ").unwrap().1).unwrap();
        match path {
            "/v1/messages" => {
                assert!(last.starts_with("event: error\n") && data["error"]["type"] == "api_error", "{last}");
            }
            "/v1/responses" => assert!(last.starts_with("event: error\n") && data["code"] == "broken_off", "{last}"),
            _ => assert_eq!(data["error"]["code"], "broken_off", "{path}: {last}"),
        }
        // Every event before it came whole.
        for event in text.trim_end().split("\n\n") {
            let data = event.split_once("data: ").unwrap().1;
            assert!(serde_json::from_str::<Value>(data).is_ok(), "{path}: {event}");
        }
        assert_eq!(rig.record_of(&answer).await["end"], "cut");
    }
    rig.idle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_event_in_a_stream_that_has_begun_passes_cleaned() {
    let first = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"a\"}}]}\n\n";
    let error =
        "data: {\"error\":{\"object\":\"error\",\"message\":\"M\",\"type\":\"X\",\"param\":null,\"code\":500}}\n\n";
    let stream = |message: &str| format!("{first}{}data: [DONE]\n\n", error.replace('M', message));
    let worker = Scripted::start(stream_of(&stream("died in /srv/sglang/a.py on 10.1.2.3:30000"))).await;
    let rig = Setup::new().external(worker.url()).pool("one", "", &[0]).start().await;
    let answer = rig.post(CHAT, &chat_stream("Hello")).await;
    assert_eq!((answer.status, answer.complete), (200, true));
    assert_eq!(answer.text(), stream("died in […] on […]"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_of_the_configuration_that_a_worker_refuses_is_not_the_clients_fault() {
    let rig = Setup::new().set("retry.attempts", "1").workers(1).pool("one", "api_key = \"mine\"", &[0]).start().await;
    rig.worker().faults().add(Fault::always(FaultKind::Status(401, Some("{\"error\":\"Unauthorized\"}".into()))));
    for (path, request) in asked(false) {
        let answer = rig.post(path, &request).await;
        let wanted = wanted(502, "worker_key_refused", "server_error", "api_error", "the worker refuses the gateway");
        assert_told(path, &answer, &wanted);
    }
}

async fn assert_refused(rig: &Rig, wanted: &Wanted, retry_after: Option<&str>) {
    for (path, request) in asked(false) {
        let answer = rig.post(path, &request).await;
        assert_told(path, &answer, wanted);
        assert_eq!(answer.header("retry-after"), retry_after, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_worker_the_client_is_told_when_they_are_looked_at_again() {
    let rig = Setup::new().set("routing.probe_interval_ms", "2500").set("routing.unhealthy_after", "1").start().await;
    for worker in &rig.workers {
        worker.die().await;
    }
    until("no worker is ready", async || rig.gateway().ready_workers() == 0).await;
    let wanted = wanted(503, "no_worker", "server_error", "overloaded_error", "no worker is ready");
    assert_refused(&rig, &wanted, Some("3")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn our_own_refusals_have_the_shape_of_the_protocol() {
    let rig = Setup::new()
        .set("limits.body_bytes", "\"2KiB\"")
        .pool("one", "models = [\"sim\"]", &[0])
        .workers(1)
        .start()
        .await;
    for (path, request) in asked(false) {
        let mut unknown = request.clone();
        unknown["model"] = json!("nope");
        let answer = rig.post(path, &unknown).await;
        let message = "the model \"nope\" does not exist";
        assert_told(path, &answer, &wanted(404, "model_not_found", INVALID, "not_found_error", message));
        let answer = rig.send(&Request::post(path, "[]")).await;
        let message = "the request body is JSON but not an object; a JSON object is expected";
        assert_told(path, &answer, &wanted(400, "bad_request", INVALID, INVALID, message));
        let answer = rig.send(&Request::get(path)).await;
        let message = format!("{path} takes POST only").leak();
        assert_told(path, &answer, &wanted(405, "method_not_allowed", INVALID, INVALID, message));
        let answer = rig.send(&Request::post(path, vec![b' '; 4096])).await;
        assert_eq!(answer.status, 413, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_in_vain_is_told_in_every_protocol() {
    for (status, kind) in [("503", "overloaded_error"), ("429", "rate_limit_error")] {
        let rig = Setup::new()
            .set("admission.max_in_flight_per_worker", "1")
            .set("admission.max_wait_ms", "200")
            .set("admission.overload_status", status)
            .start()
            .await;
        rig.worker().hold().await;
        let _first = rig.begin(&Request::json(CHAT, &chat("first"))).await;
        until("the place is taken", async || rig.in_flight() == 1).await;
        let status = status.parse().unwrap();
        let timeout = wanted(status, "queue_timeout", kind, kind, "no worker had room within 200 ms");
        assert_refused(&rig, &timeout, Some("1")).await;
        rig.worker().release().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_is_told_in_every_protocol() {
    for (status, kind) in [(503, "overloaded_error"), (429, "rate_limit_error")] {
        let rig = Setup::new()
            .set("admission.max_in_flight_per_worker", "1")
            .set("admission.max_queue", "1")
            .set("admission.overload_status", &status.to_string())
            .start()
            .await;
        rig.worker().hold().await;
        let _first = rig.begin(&Request::json(CHAT, &chat("first"))).await;
        until("the place is taken", async || rig.in_flight() == 1).await;
        let _second = rig.begin(&Request::json(CHAT, &chat("waits"))).await;
        rig.until_queued(1).await;
        let full = wanted(status, "queue_full", kind, kind, "the queue is full: too many turns wait");
        assert_refused(&rig, &full, Some("1")).await;
        rig.worker().release().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_and_unreachable_workers_are_told_in_every_protocol() {
    let rig = Setup::new()
        .set("retry.attempts", "1")
        .set("timeouts.first_byte_s", "1")
        .set("routing.unhealthy_after", "1000")
        .set("limits.header_bytes", "\"1KiB\"")
        .start()
        .await;
    for (path, request) in asked(false) {
        let long = rig.send(&Request::json(path, &request).header("x-long", &"a".repeat(2000))).await;
        let message = "the request headers are larger than limits.header_bytes = 1024 bytes";
        assert_told(path, &long, &wanted(431, "header_too_large", INVALID, INVALID, message));
        rig.worker().faults().add(Fault::once(FaultKind::Hang));
        let wanted =
            wanted(504, "worker_timeout", "server_error", "timeout_error", "the worker did not answer in time");
        assert_told(path, &rig.post(path, &request).await, &wanted);
    }
    rig.worker().die().await;
    let gone = wanted(502, "worker_unreachable", "server_error", "api_error", "no worker could be reached");
    assert_refused(&rig, &gone, Some("1")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_filter_is_told_in_every_protocol() {
    let hello = module("test/hello").display().to_string();
    let hello = PluginText::new("hello", hello, "filter");
    for (path, request) in asked(false) {
        let rig = Setup::new().plugins(std::slice::from_ref(&hello)).start().await;
        let answer = rig.send(&Request::json(path, &request).header("x-trap", "1")).await;
        assert_told(
            path,
            &answer,
            &wanted(500, "plugin_failed", "server_error", "api_error", "the filter hello failed"),
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_another_origin_can_read_errors_as_it_reads_answers() {
    let rig = Setup::new().set("retry.attempts", "1").start().await;
    rig.worker().faults().add(Fault::always(FaultKind::Status(400, None)));
    for body in ["{", "{\"model\":\"sim\",\"messages\":[]}"] {
        let answer = rig.send(&Request::post(CHAT, body).header("origin", "https://page.example")).await;
        assert_eq!((answer.status, answer.header("vary")), (400, Some("Origin")), "{}", answer.text());
        assert_eq!(answer.header("access-control-allow-origin"), Some("https://page.example"));
        assert_eq!(answer.header("access-control-allow-credentials"), Some("true"));
        assert_eq!(rig.send(&Request::post(CHAT, body)).await.header("access-control-allow-origin"), None);
    }
}
