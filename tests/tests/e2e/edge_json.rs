//! Bodies that are JSON of a kind nobody hopes for, and bodies that are none. What SGLang takes is passed on as it came; what
//! the gateway has to read is read as SGLang reads it.

use serde_json::{Value, json};
use turnstile_tests::harness::{Answer, CHAT, Request, Rig, Setup, WorkerExt};

/// What every body here has.
const MESSAGES: &str = r#""messages":[{"role":"user","content":"Hello"}]"#;

async fn post(rig: &Rig, body: impl Into<Vec<u8>>) -> Answer {
    rig.worker().clear_requests();
    rig.send(&Request::post(CHAT, body)).await
}

/// The body that the worker got.
fn seen(rig: &Rig) -> String {
    String::from_utf8(rig.worker().on(CHAT)[0].body.to_vec()).unwrap()
}

fn assert_bad_request(rig: &Rig, answer: &Answer, what: &str) {
    assert_eq!(answer.status, 400, "{what}: {}", answer.text());
    let error = answer.error();
    assert_eq!(error["code"], "bad_request", "{what}");
    assert!(error["message"].as_str().unwrap().len() > 5, "{what}: {error}");
    assert!(rig.worker().turns().is_empty(), "{what}");
}

#[tokio::test(flavor = "multi_thread")]
async fn of_equal_keys_the_last_counts_as_it_does_for_the_worker() {
    let rig = Setup::new().workers(2).pool("a", "models = [\"a\"]", &[0]).pool("b", "models = [\"b\"]", &[1]);
    let rig = rig.start().await;
    let body = format!(r#"{{"model":"a",{MESSAGES},"stream":true,"model":"b","stream":false}}"#);
    let answer = rig.send(&Request::post(CHAT, body.clone())).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.header("content-type"), Some("application/json"), "the last stream is false");
    assert!(rig.workers[0].turns().is_empty());
    let seen = String::from_utf8(rig.workers[1].turns()[0].body.to_vec()).unwrap();
    assert!(seen.starts_with(body.strip_suffix('}').unwrap()), "the client's bytes are left alone: {seen}");
    let unknown = format!(r#"{{"model":"a",{MESSAGES},"model":"c"}}"#);
    assert_eq!(rig.send(&Request::post(CHAT, unknown)).await.error()["code"], "model_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn of_several_nvext_the_last_is_read_and_none_reaches_the_worker() {
    let rig = Setup::new().start().await;
    for body in [
        format!(
            r#"{{"nvext":{{"agent_hints":{{"priority":1}}}},"model":"sim","nvext":{{"agent_hints":{{"priority":7}}}},{MESSAGES}}}"#
        ),
        format!(r#"{{"nvext":5,"model":"sim","n\u0076ext":{{"agent_hints":{{"priority":7}}}},{MESSAGES}}}"#),
        format!(
            r#"{{"model":"sim",{MESSAGES},"\u006e\u0076\u0065\u0078\u0074":{{"agent_hints":{{"priority":1,"priority":7}}}}}}"#
        ),
    ] {
        let answer = post(&rig, body.clone()).await;
        assert_eq!(answer.status, 200, "{body}: {}", answer.text());
        assert_eq!(rig.record_of(&answer).await["priority"], 7, "{body}");
        let seen = seen(&rig);
        assert!(!seen.contains("agent_hints"), "{seen}");
        let members: Value = serde_json::from_str(&seen).unwrap();
        assert!(members.get("nvext").is_none(), "{seen}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_written_with_escapes_are_the_keys_they_spell() {
    let rig = Setup::new().start().await;
    // The model is found, what steers the engine is not let through, what is the client's stays as it was written.
    let body = format!(
        r#"{{"mod\u0065l":"sim",{MESSAGES},"session\u005fid":"x","\u0072outed_dp_rank":1,"tempera\u0074ure":0.50,"\u00e9":"\u00E9\/"}}"#
    );
    let answer = post(&rig, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let seen = seen(&rig);
    assert!(seen.contains(r#""mod\u0065l":"sim""#) && seen.contains(r#""tempera\u0074ure":0.50"#), "{seen}");
    assert!(seen.contains(r#""\u00e9":"\u00E9\/""#), "{seen}");
    let members: Value = serde_json::from_str(&seen).unwrap();
    for key in ["session_id", "routed_dp_rank"] {
        assert!(members.get(key).is_none(), "{key}: {seen}");
    }
    let unknown = format!(r#"{{"mod\u0065l":"nobody",{MESSAGES}}}"#);
    let rig = Setup::new().pool("p", "models = [\"sim\"]", &[0]).workers(1).start().await;
    assert_eq!(post(&rig, unknown).await.error()["code"], "model_not_found");
}

#[tokio::test(flavor = "multi_thread")]
async fn numbers_and_strings_reach_the_worker_as_they_were_written() {
    let rig = Setup::new().start().await;
    let long = "9".repeat(5000);
    for value in [
        "1e400",
        "-0",
        "1E+2",
        "123456789012345678901234567890",
        "0.1000000000000000055511151231257827",
        long.as_str(),
        r#""\ud83d\ude00""#,
        r#""\u0000""#,
        r#""\ud800""#,
        "\"\u{2028}\u{10ffff}\"",
        "[[],{},null,true]",
    ] {
        // Whatever the worker makes of it.
        post(&rig, format!(r#"{{"model":"sim",{MESSAGES},"unknown":{value},"max_tokens":4}}"#)).await;
        assert!(seen(&rig).contains(&format!(r#""unknown":{value},"max_tokens":4"#)), "{value:.50}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn depth_alone_is_no_fault() {
    let rig = Setup::new().start().await;
    for depth in [1000, 100_000] {
        let deep = format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        let answer = post(&rig, format!(r#"{{"model":"sim",{MESSAGES},"metadata":{deep}}}"#)).await;
        // The simulated worker, like SGLang, reads no document of such depth; the gateway has passed it on.
        assert!(answer.status == 200 || answer.status == 400, "{depth}: {}", answer.text());
        assert_eq!(rig.worker().on(CHAT).len(), 1, "{depth}");
        assert!(seen(&rig).contains(&deep), "{depth}");
    }
    // Where the gateway has to read, depth is a wrong type like any other, or ignored.
    let deep = format!("{}1{}", "{\"a\":".repeat(50_000), "}".repeat(50_000));
    for key in ["nvext", "messages", "model", "stream", "tools", "stream_options"] {
        let answer = rig.send(&Request::post(CHAT, format!(r#"{{"model":"sim",{MESSAGES},"{key}":{deep}}}"#))).await;
        assert!(matches!(answer.status, 200 | 400 | 404), "{key}: {}", answer.text());
    }
    // One that never closes.
    let open = "[".repeat(1 << 20);
    let answer = post(&rig, format!(r#"{{"model":"sim","messages":{open}"#)).await;
    assert_bad_request(&rig, &answer, "a million open brackets");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_json_object_is_400_before_any_worker() {
    let rig = Setup::new().start().await;
    let whole = format!(r#"{{"model":"sim",{MESSAGES}}}"#);
    let with = |bytes: &[u8]| [br#"{"model":"sim","x":""#, bytes, br#"","#, &whole.as_bytes()[1..]].concat();
    let utf16: Vec<u8> = whole.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("nothing", Vec::new()),
        ("white space", b" \r\n\t".to_vec()),
        ("a byte order mark", [b"\xef\xbb\xbf", whole.as_bytes()].concat()),
        ("UTF-16", utf16),
        ("invalid UTF-8 in a string", with(b"\xff\xfe")),
        ("a cut UTF-8 character", with(b"\xc3")),
        ("an overlong UTF-8 character", with(b"\xc0\xaf")),
        ("a surrogate in UTF-8", with(b"\xed\xa0\x80")),
        ("NUL in a string", with(b"\0")),
        ("a line end in a string", with(b"\n")),
        ("NUL before", [b"\0", whole.as_bytes()].concat()),
        ("NUL behind", [whole.as_bytes(), b"\0"].concat()),
        ("a second document", [whole.as_bytes(), whole.as_bytes()].concat()),
        ("a list", format!("[{whole}]").into_bytes()),
        ("a string", b"\"model\"".to_vec()),
        ("a number", b"1".to_vec()),
        ("null", b"null".to_vec()),
        ("true", b"true".to_vec()),
        ("a comma too many", whole.replace("}]}", "}],}").into_bytes()),
        ("a cut body", whole.as_bytes()[..whole.len() - 1].to_vec()),
        ("single quotes", whole.replace('"', "'").into_bytes()),
        ("a comment", whole.replace("\"model\"", "/* */\"model\"").into_bytes()),
        ("NaN", whole.replace("\"sim\"", "NaN").into_bytes()),
        ("an unquoted key", whole.replace("\"model\"", "model").into_bytes()),
        ("a bad escape", with(br"\x41")),
        ("half an escape", with(br"\u12")),
        ("a form", b"model=sim&messages=Hello".to_vec()),
        ("a number with a leading zero", whole.replace("\"sim\"", "01").into_bytes()),
    ];
    for (what, body) in cases {
        let answer = post(&rig, body.clone()).await;
        assert_bad_request(&rig, &answer, what);
        for path in ["/v1/completions", "/generate", "/v1/responses", "/v1/messages", "/tokenize", "/v1/embeddings"] {
            assert_eq!(rig.send(&Request::post(path, body.clone())).await.status, 400, "{what} on {path}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nvext_of_no_use_is_no_reason_to_fail_and_of_a_wrong_type_is_named() {
    let rig = Setup::new().start().await;
    for nvext in ["null", "{}", r#"{"agent_hints":null,"session_control":null}"#, r#"{"unknown":[1,{"a":2}]}"#] {
        let answer = post(&rig, format!(r#"{{"model":"sim","nvext":{nvext},{MESSAGES}}}"#)).await;
        assert_eq!(answer.status, 200, "{nvext}: {}", answer.text());
        assert!(!seen(&rig).contains("nvext"), "{nvext}");
    }
    for (nvext, param) in [
        ("5", "nvext"),
        ("\"x\"", "nvext"),
        ("[]", "nvext"),
        ("true", "nvext"),
        (r#"{"agent_hints":[]}"#, "nvext.agent_hints"),
        (r#"{"agent_hints":{"priority":"high"}}"#, "nvext.agent_hints.priority"),
        (r#"{"session_control":7}"#, "nvext.session_control"),
        (r#"{"session_control":{"session_id":7,"action":"bind"}}"#, "nvext.session_control.session_id"),
        (r#"{"session_control":{"session_id":"s","action":"fly"}}"#, "nvext.session_control.action"),
    ] {
        let answer = post(&rig, format!(r#"{{"model":"sim","nvext":{nvext},{MESSAGES}}}"#)).await;
        assert_bad_request(&rig, &answer, nvext);
        assert_eq!(answer.error()["param"], param, "{nvext}: {}", answer.text());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_content_type_says_is_for_the_worker_to_judge() {
    let rig = Setup::new().start().await;
    let body = format!(r#"{{"model":"sim",{MESSAGES}}}"#);
    for content_type in
        [None, Some("text/plain"), Some("application/json; charset=latin1"), Some("multipart/form-data; boundary=x")]
    {
        rig.worker().clear_requests();
        let mut head = format!("POST {CHAT} HTTP/1.1\r\nhost: gateway\r\ncontent-length: {}\r\n", body.len());
        if let Some(content_type) = content_type {
            head.push_str(&format!("content-type: {content_type}\r\n"));
        }
        let request = format!("{head}\r\n{body}");
        let ask = async |addr| {
            let mut connection = turnstile_tests::harness::Connection::open(addr).await;
            connection.write(request.as_bytes()).await;
            connection.answer().await
        };
        let through = ask(rig.addr()).await;
        let told = rig.worker().on(CHAT)[0].headers.get("content-type").map(|v| v.to_str().unwrap().to_owned());
        assert_eq!(told.as_deref(), content_type, "passed on as it is");
        let direct = ask(rig.worker().addr()).await;
        assert_eq!(through.status, direct.status, "{content_type:?}");
    }
    let form = "--x\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nsim\r\n--x--\r\n";
    let multipart = Request::new("POST", CHAT).header("content-type", "multipart/form-data; boundary=x");
    let answer = rig.send(&multipart.with_body(form)).await;
    assert_eq!((answer.status, &answer.error()["code"]), (400, &json!("bad_request")));
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_of_nothing_but_structure_cost_no_more_than_their_size() {
    let rig = Setup::new().start().await;
    let members = format!("{{{}\"model\":\"sim\"}}", "\"a\":1,".repeat(200_000));
    let brackets = format!(r#"{{"model":"sim","messages":[{}[]]}}"#, "[],".repeat(200_000));
    let objects = format!(r#"{{"model":"sim","messages":[{}{{}}]}}"#, "{},".repeat(200_000));
    let escapes = format!(r#"{{"model":"sim",{MESSAGES},"x":"{}"}}"#, r"\u0041".repeat(200_000));
    let key = format!(r#"{{"model":"sim",{MESSAGES},"{}":1}}"#, r"\u0041".repeat(200_000));
    let before = crate::edge_bodies::resident();
    for body in [members, brackets, objects, escapes, key] {
        let answer = post(&rig, body).await;
        assert!(matches!(answer.status, 200 | 400), "{}", answer.text());
    }
    let grown = crate::edge_bodies::resident().saturating_sub(before);
    assert!(grown < 128 << 20, "bodies of a megabyte grew the process by {grown} bytes");
}
