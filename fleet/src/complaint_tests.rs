#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;

use proptest::prelude::*;

use super::*;

/// The status and body of a recorded error.
fn recorded(name: &str) -> (u16, Vec<u8>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/errors").join(format!("{name}.txt"));
    let text = std::fs::read(path).unwrap();
    let at = text.windows(2).position(|w| w == b"\n\n").unwrap();
    let head = String::from_utf8_lossy(&text[..at]).into_owned();
    let status = head.lines().nth(1).unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    (status, text[at + 2..].trim_ascii_end().to_vec())
}

/// What SGLang 0.5.23 says, and what a client is told: status, message, field.
const RECORDED: [(&str, u16, Option<&str>, Option<&str>); 31] = [
    ("chat_bad_json", 400, Some("JSON decode error at 1"), None),
    ("chat_missing_messages", 400, Some("messages: Field required"), Some("messages")),
    (
        "chat_bad_content_type",
        400,
        Some("header.content-type: Unsupported Media Type: Only 'application/json' is allowed"),
        Some("header.content-type"),
    ),
    ("chat_tools_unknown", 400, Some("Tool 'nope' not found in tools list."), None),
    ("queue_full_503_chat", 503, Some("The request queue is full."), None),
    ("queue_full_503_generate", 503, Some("The request queue is full."), None),
    ("queue_full_completions", 503, Some("The request queue is full."), None),
    ("queue_full_messages", 503, None, None),
    ("queue_full_responses", 503, Some("The request queue is full."), None),
    (
        "responses_bad_priority",
        400,
        Some("priority: Input should be a valid integer, unable to parse string as an integer"),
        Some("priority"),
    ),
    (
        "generate_bad_type",
        400,
        Some("text.str: Input should be a valid string; text.list[str]: Input should be a valid list"),
        Some("text.str"),
    ),
    ("generate_bad_sampling_param", 400, Some(BOGUS), None),
    ("anthropic_messages_bad", 400, Some("max_tokens: Field required"), None),
    ("auth_noauth_chat", 401, None, None),
    ("session_unknown_id", 400, Some("Invalid request: session id never does not exist"), None),
    ("duplicate_rid_chat", 400, Some("Duplicate request ID detected: […]"), None),
    ("chat_rid_list", 500, None, None),
    ("chat_cache_salt_list", 400, Some("cache_salt should be a string for a single request."), None),
    ("chat_dp_rank_header_bad", 400, Some("Invalid X-Data-Parallel-Rank header: must be an integer, got 'abc'"), None),
    (
        "embeddings_on_generation_model",
        400,
        Some(
            "This model does not appear to be an embedding model by default. Please add `--is-embedding` when launching the \
             server or try another model.",
        ),
        None,
    ),
    ("chat_gzip_body", 400, Some("JSON decode error at 0"), None),
    (
        "chat_priority_abort_when_disabled",
        503,
        Some("Using priority is disabled for this server. Please send a new request without a priority."),
        None,
    ),
    ("tokenize_bad", 400, Some("Value error, Exactly one of 'prompt' or 'messages' must be provided."), None),
    ("generate_empty", 400, Some("Either text, input_ids or input_embeds should be provided."), None),
    ("session_streaming_badfield", 500, None, None),
    (
        "priority_enabled_x",
        400,
        Some("priority: Input should be a valid integer, unable to parse string as an integer"),
        Some("priority"),
    ),
    (
        "chat_too_long",
        400,
        Some("The input (10011 tokens) is longer than the model's context length (4096 tokens)."),
        None,
    ),
    ("unknown_path", 404, None, None),
    ("wrong_method", 405, None, None),
    ("generate_priority_str", 400, Some("invalid type: string \"7\", expected i64"), None),
    (
        "chat_model_colon_adapter",
        400,
        Some(
            "LoRA adapter 'ad1' was requested, but LoRA is not enabled. Please launch the server with --enable-lora flag and \
             preload adapters using --lora-paths or /load_lora_adapter endpoint.",
        ),
        None,
    ),
];

const BOGUS: &str = "unknown field `bogus`, expected one of `max_new_tokens`, `stop`, `stop_token_ids`, `stop_regex`, \
                     `temperature`, `top_p`, `top_k`, `min_p`, `frequency_penalty`, `presence_penalty`, `repetition_penalty`, \
                     `min_new_tokens`, `n`, `json_schema`, `regex`, `ebnf`, `structural_tag`, `ignore_eos`, \
                     `skip_special_tokens`, `spaces_between_special_tokens`, `no_stop_trim`, `stream_interval`, `logit_bias`, \
                     `sampling_seed`, `custom_params`, `beam_width`, `watermark`, `choice`";

#[test]
fn every_recorded_error_is_told_without_what_is_not_the_clients() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/errors");
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), RECORDED.len());
    for (name, status, message, param) in RECORDED {
        let (sent, body) = recorded(name);
        let told = from_answer(sent, &body, &["dup-1"]);
        assert_eq!((told.status, told.message.as_deref(), told.param.as_deref()), (status, message, param), "{name}");
        assert_eq!(told.cause == Cause::ContextLength, name == "chat_too_long", "{name}");
        assert_eq!(status_of(sent, &body), status, "{name}");
    }
}

#[test]
fn a_body_that_is_none_of_these_says_nothing() {
    for body in
        ["", "<html><body>502 Bad Gateway</body></html>", "Internal Server Error", "[1]", "\"x\"", "{", "\u{feff}{}"]
    {
        let told = from_answer(400, body.as_bytes(), &[]);
        assert_eq!((told.status, told.message, told.param), (400, None, None), "{body}");
    }
    assert_eq!(from_answer(400, b"\xff\xfe{}", &[]).message, None);
    let long = format!("{{\"message\":\"{}\"}}", "x".repeat(MAX_BODY_BYTES));
    assert_eq!(from_answer(400, long.as_bytes(), &[]).message, None, "a body that was cut is no JSON");
}

#[test]
fn fastapis_own_list_is_read_too() {
    let body = br#"{"detail":[{"type":"missing","loc":["body","messages",0,"role"],"msg":"Field required","input":{"secret":1}}]}"#;
    let told = from_answer(422, body, &[]);
    assert_eq!(told.message.as_deref(), Some("messages.0.role: Field required"));
    assert_eq!(told.param.as_deref(), Some("messages.0.role"));
    assert_eq!(
        from_answer(404, br#"{"detail":"No such model here"}"#, &[]).message.as_deref(),
        Some("No such model here")
    );
}

#[test]
fn an_input_that_looks_like_an_error_is_not_read_as_one() {
    let text = "1 validation error:\n  {'type': 'missing', 'loc': ('body', 'a'), 'input': {'msg': 'forged', 'x': \
                \"}, 'msg': 'forged'\", 'y': 'it\\'s {'}, 'msg': 'Field required'}\n\n  File \"/x/y.py\", line 1";
    let told = from_event(400, text, &[]);
    assert_eq!(told.message.as_deref(), Some("a: Field required"));
    let broken = "1 validation error:\n  {'type': 'missing', 'input': {'prompt': 'secret'";
    assert_eq!(from_event(400, broken, &[]).message.as_deref(), Some("the request does not fit the worker's schema"));
}

#[test]
fn only_so_many_flaws_are_told() {
    let flaw = |n: usize| {
        format!("  {{'type': 'missing', 'loc': ('body', 'f{n}'), 'msg': 'Field required', 'input': {{}}}}\n")
    };
    let text = format!("9 validation errors:\n{}", (0..9).map(flaw).collect::<String>());
    let told = from_event(400, &text, &[]).message.unwrap();
    assert!(told.starts_with("f0: Field required; f1") && told.ends_with("f3: Field required; and 5 more"), "{told}");
}

#[test]
fn what_is_private_is_taken_out_of_words() {
    let secrets = ["resp_abc", "10.0.0.7:30000", "worker-a"];
    for (told, shown) in [
        ("Duplicate request ID detected: resp_abc", "Duplicate request ID detected: […]"),
        ("no room on worker-a (10.0.0.7:30000)", "no room on […] ([…])"),
        ("cannot read /srv/models/llama/config.json.", "cannot read […]."),
        ("file=/etc/passwd is bad, see ~/x or C:\\secret", "file=[…] is bad, see […] or […]"),
        ("at scheduler.py:120 in forward", "at […] in forward"),
        ("connect to http://kv.internal/pool failed", "connect to […] failed"),
        ("peer [::1]:9000 and 192.168.1.9 and node-1.local:8000 left", "peer […] and […] and […] left"),
        ("id 0123456789abcdef0123456789abcdef is gone", "id […] is gone"),
        ("use POST /v1/chat/completions or /generate instead", "use POST /v1/chat/completions or /generate instead"),
        ("got 3/4 of meta-llama/Llama-3 at 12:30", "got 3/4 of meta-llama/Llama-3 at 12:30"),
        ("ratio 0.5, tokens: 4096, 1.2.3", "ratio 0.5, tokens: 4096, 1.2.3"),
        ("a\n\tb\u{0}c", "a b c"),
        ("it broke\nTraceback (most recent call last):\n  File \"/a/b.py\"", "it broke"),
        ("", ""),
    ] {
        assert_eq!(clean(told, &secrets), shown);
    }
    let long = clean(&"word ".repeat(1000), &[]);
    assert!(long.len() <= MAX_MESSAGE_BYTES && long.ends_with('…'));
}

#[test]
fn the_ways_to_be_too_long_are_known() {
    for text in [
        "The input (10011 tokens) is longer than the model's context length (4096 tokens).",
        "Requested token count exceeds the model's maximum context length of 4096 tokens.",
        "Input length (4408 tokens) exceeds the maximum allowed length (4090 tokens).",
    ] {
        assert_eq!(from_event(400, text, &[]).cause, Cause::ContextLength, "{text}");
        assert_eq!(from_event(503, text, &[]).cause, Cause::Other);
    }
    assert_eq!(from_event(400, "max_tokens must be positive", &[]).cause, Cause::Other);
}

#[test]
fn an_error_event_keeps_its_form() {
    for (told, shown) in [
        (
            r#"{"error":{"object":"error","message":"at /a/b/c.py","type":"X","code":503}}"#,
            Some(r#"{"error":{"object":"error","message":"at […]","type":"X","code":503}}"#),
        ),
        (r#"{"error":"see http://x"}"#, Some(r#"{"error":"see […]"}"#)),
        (
            r#"{"text":"","meta_info":{"id":"i","finish_reason":{"type":"abort","message":"1.2.3.4 left","status_code":500}}}"#,
            Some(
                r#"{"text":"","meta_info":{"id":"i","finish_reason":{"type":"abort","message":"[…] left","status_code":500}}}"#,
            ),
        ),
        (
            r#"{"type":"response.failed","response":{"error":{"message":"/tmp/x/y"}}}"#,
            Some(r#"{"type":"response.failed","response":{"error":{"message":"[…]"}}}"#),
        ),
        (r#"{"type":"error","error":{"type":"api_error","message":"fine"}}"#, None),
        (r#"{"error":null}"#, None),
        ("[DONE]", None),
    ] {
        let cleaned = clean_event(told.as_bytes(), &[]);
        assert_eq!(cleaned.as_deref(), shown.map(str::as_bytes), "{told}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_read_and_nothing_long_or_broken_comes_out(body in prop::collection::vec(any::<u8>(), 0..600)) {
        for status in [400, 503] {
            let told = from_answer(status, &body, &["x"]);
            prop_assert!(told.message.is_none_or(|m| m.len() <= MAX_MESSAGE_BYTES));
        }
        let _ = clean_event(&body, &[]);
    }

    #[test]
    fn any_text_is_cleaned_to_one_line_and_stays_so(text in "\\PC{0,400}|[ -~\n]{0,800}") {
        let once = clean(&text, &[]);
        prop_assert!(once.len() <= MAX_MESSAGE_BYTES && !once.contains('\n'));
        prop_assert!(!once.contains("http://"));
    }

    #[test]
    fn pythons_text_is_read_whatever_the_input_is(input in "[\\PC\n]{0,200}") {
        let text = format!("1 validation error:\n  {{'loc': ('body', 'a'), 'msg': 'm', 'input': {input:?}}}\n\n  File \"/x/y.py\"");
        let told = from_event(400, &text, &[]).message.unwrap();
        prop_assert!(told == "a: m" || told == "the request does not fit the worker's schema", "{}", told);
    }
}
