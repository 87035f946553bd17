#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::identity::IdentityOptions;
use crate::prefix::PrefixOptions;
use crate::reply::ToolCall;
use crate::steering::SteeringOptions;
use crate::turn::{UnderstandOptions, UpstreamPlan, understand};

/// One recorded answer of a real worker.
struct Recorded {
    name: String,
    route: Route,
    stream: bool,
    body: Vec<u8>,
}

/// What an observer made of an answer.
#[derive(Debug, PartialEq)]
struct Outcome {
    sent: Vec<u8>,
    seen: Observation,
    failed_first: Option<WorkerError>,
    reply: Option<Reply>,
}

fn fixtures(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(folder)
}

fn recorded() -> Vec<Recorded> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(fixtures("transcripts")).unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let request = text.split(">>> REQUEST\n").nth(1).unwrap();
        let route = Route::from_path(request.split_whitespace().nth(1).unwrap()).unwrap();
        let response = text.split("<<< RESPONSE").nth(1).unwrap();
        let (head, body) = response.split_once("\n\n").unwrap();
        all.push(Recorded {
            name: path.file_stem().unwrap().to_string_lossy().into_owned(),
            route,
            stream: head.contains("text/event-stream"),
            body: body.as_bytes().to_vec(),
        });
    }
    assert!(all.len() >= 25);
    all
}

fn named(name: &str) -> Recorded {
    recorded().into_iter().find(|r| r.name == name).unwrap()
}

fn watch<'a>(
    route: Route,
    stream: bool,
    options: &ObserveOptions,
    chunks: impl IntoIterator<Item = &'a [u8]>,
) -> Outcome {
    let mut observer = Observer::new(route, stream, options.clone());
    let mut out = Vec::new();
    for chunk in chunks {
        observer.push(Bytes::copy_from_slice(chunk), &mut out);
    }
    observer.finish(&mut out);
    let failed_first = match observer.first_event() {
        FirstEvent::Error(error) => Some(error.clone()),
        _ => None,
    };
    let seen = observer.observation().clone();
    Outcome { sent: out.concat(), seen, failed_first, reply: observer.take_reply() }
}

fn whole(recorded: &Recorded, options: &ObserveOptions) -> Outcome {
    watch(recorded.route, recorded.stream, options, [&recorded.body[..]])
}

fn collecting() -> ObserveOptions {
    ObserveOptions { collect_reply: true, ..ObserveOptions::default() }
}

fn stripping() -> ObserveOptions {
    ObserveOptions {
        strip_usage: true,
        strip_cached_details: true,
        cached_details_asked: true,
        ..ObserveOptions::default()
    }
}

/// What a plain parse of everything says: usage, the last finish reason, events with data.
fn plain(recorded: &Recorded) -> (Usage, Option<String>, u64) {
    let text = String::from_utf8(recorded.body.clone()).unwrap();
    let events: Vec<Value> = if recorded.stream {
        let lines = text.lines().filter_map(|line| line.strip_prefix("data: "));
        lines.filter(|data| *data != "[DONE]").map(|data| serde_json::from_str(data).unwrap()).collect()
    } else {
        vec![serde_json::from_str(&text).unwrap()]
    };
    let mut usage = Usage::default();
    let mut finish = None;
    let set = |to: &mut Option<u64>, value: &Value| *to = value.as_u64().or(*to);
    for event in events.iter().flat_map(|e| e.as_array().cloned().unwrap_or_else(|| vec![e.clone()])) {
        let ext = &event["sglext"]["cached_tokens_details"];
        for usage_at in [&event["usage"], &event["response"]["usage"], &event["message"]["usage"]] {
            let beside = usage_at["cache_read_input_tokens"].as_u64().unwrap_or(0);
            set(&mut usage.prompt_tokens, &usage_at["prompt_tokens"]);
            if let Some(input) = usage_at["input_tokens"].as_u64() {
                usage.prompt_tokens = Some(input + beside);
            }
            set(&mut usage.completion_tokens, &usage_at["completion_tokens"]);
            set(&mut usage.completion_tokens, &usage_at["output_tokens"]);
            set(&mut usage.cached_tokens, &usage_at["prompt_tokens_details"]["cached_tokens"]);
            set(&mut usage.cached_tokens, &usage_at["input_tokens_details"]["cached_tokens"]);
            set(&mut usage.cached_tokens, &usage_at["cache_read_input_tokens"]);
        }
        if ext.is_object() {
            usage.cached_tokens = Some(ext["device"].as_u64().unwrap() + ext["host"].as_u64().unwrap());
        }
        let meta = &event["meta_info"];
        if meta["finish_reason"].is_object() && meta["finish_reason"]["type"] != "abort" {
            for (sum, key) in [
                (&mut usage.prompt_tokens, "prompt_tokens"),
                (&mut usage.completion_tokens, "completion_tokens"),
                (&mut usage.cached_tokens, "cached_tokens"),
            ] {
                *sum = Some(sum.unwrap_or(0) + meta[key].as_u64().unwrap());
            }
            finish = meta["finish_reason"]["type"].as_str().map(String::from);
        }
        let reasons = event["choices"].as_array().into_iter().flatten().map(|c| &c["finish_reason"]);
        let others = [
            &event["stop_reason"],
            &event["delta"]["stop_reason"],
            &event["incomplete_details"]["reason"],
            &event["response"]["incomplete_details"]["reason"],
        ];
        for reason in reasons.chain(others) {
            finish = reason.as_str().map(String::from).or(finish);
        }
    }
    (usage, finish, if recorded.stream { events.len() as u64 } else { 0 })
}

#[test]
fn recorded_answers_pass_byte_for_byte_and_say_what_a_parse_says() {
    for recorded in recorded() {
        for options in [ObserveOptions::default(), collecting()] {
            let outcome = whole(&recorded, &options);
            assert_eq!(outcome.sent, recorded.body, "{}", recorded.name);
            let (usage, finish, events) = plain(&recorded);
            assert_eq!(outcome.seen.usage, usage, "{}", recorded.name);
            assert_eq!(outcome.seen.finish_reason, finish, "{}", recorded.name);
            assert_eq!(outcome.seen.events, events, "{}", recorded.name);
            assert!(!outcome.seen.incomplete && outcome.seen.done, "{}", recorded.name);
        }
    }
}

#[test]
fn no_split_of_the_bytes_makes_a_difference() {
    for recorded in recorded() {
        for options in [collecting(), stripping()] {
            let expected = whole(&recorded, &options);
            let single = recorded.body.chunks(1);
            assert_eq!(watch(recorded.route, recorded.stream, &options, single), expected, "{}", recorded.name);
            for at in 0..=recorded.body.len() {
                let (head, tail) = recorded.body.split_at(at);
                let outcome = watch(recorded.route, recorded.stream, &options, [head, tail]);
                assert_eq!(outcome, expected, "{} at {at}", recorded.name);
            }
        }
    }
}

#[test]
fn carriage_returns_make_no_difference() {
    for recorded in recorded().into_iter().filter(|r| r.stream) {
        let crlf = String::from_utf8(recorded.body.clone()).unwrap().replace('\n', "\r\n").into_bytes();
        let expected = whole(&recorded, &collecting());
        for size in [1, 2, 7, usize::MAX] {
            let outcome = watch(recorded.route, true, &collecting(), crlf.chunks(size));
            assert_eq!(outcome.sent, crlf, "{}", recorded.name);
            assert_eq!(outcome.seen, expected.seen, "{}", recorded.name);
            assert_eq!(outcome.reply, expected.reply, "{}", recorded.name);
        }
    }
}

/// The same request was put to a worker twice, as a client wrote it and with our asking; ids and times are evened out. What
/// comes out of the second must be the first.
#[test]
fn an_answer_we_asked_more_of_comes_out_as_if_we_had_not() {
    let options = UnderstandOptions {
        identity: IdentityOptions::new(7),
        prefix: PrefixOptions::new(64, 1000, 7),
        steering: SteeringOptions::default(),
    };
    let plan = UpstreamPlan { ask_usage: true, ..UpstreamPlan::default() };
    let mut count = 0;
    for entry in std::fs::read_dir(fixtures("pairs")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().unwrap() != "request" {
            continue;
        }
        count += 1;
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let route = if name.starts_with("chat") { Route::Chat } else { Route::Completions };
        let request = Bytes::from(std::fs::read(&path).unwrap());
        let turn = understand(route, &http::HeaderMap::new(), request, &options).unwrap();
        let observe = turn.observe_options(&plan, true);
        let asked = std::fs::read(path.with_extension("asked")).unwrap();
        let expected = std::fs::read(path.with_extension("plain")).unwrap();
        let shown = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        for size in [1, 3, 100, asked.len()] {
            let outcome = watch(route, turn.stream, &observe, asked.chunks(size));
            assert_eq!(shown(&outcome.sent), shown(&expected), "{name}");
            assert!(outcome.seen.usage.prompt_tokens.is_some(), "{name}");
            assert!(outcome.seen.usage.completion_tokens.is_some(), "{name}");
            assert!(outcome.seen.usage.cached_tokens.is_some_and(|cached| cached > 0), "{name}");
        }
        for at in 0..=asked.len() {
            let (head, tail) = asked.split_at(at);
            assert_eq!(watch(route, turn.stream, &observe, [head, tail]).sent, expected, "{name} at {at}");
        }
        if turn.stream {
            let crlf = |bytes: &[u8]| shown(bytes).replace('\n', "\r\n").into_bytes();
            assert_eq!(watch(route, true, &observe, crlf(&asked).chunks(5)).sent, crlf(&expected), "{name}");
        }
    }
    assert!(count >= 10);
}

#[test]
fn chunks_pass_without_being_copied() {
    let recorded = named("chat_stream_usage");
    let mut events: Vec<Bytes> = Vec::new();
    let body = Bytes::from(recorded.body);
    let mut at = 0;
    while let Some(end) = body[at..].windows(2).position(|pair| pair == b"\n\n") {
        events.push(body.slice(at..at + end + 2));
        at += end + 2;
    }
    for options in [ObserveOptions::default(), stripping()] {
        let mut observer = Observer::new(Route::Chat, true, options.clone());
        for (index, event) in events.iter().enumerate() {
            let mut out = Vec::new();
            observer.push(event.clone(), &mut out);
            let is_usage = index + 2 == events.len();
            if is_usage && options.strip_usage {
                assert!(out.is_empty());
            } else {
                assert_eq!(out.len(), 1);
                assert_eq!(out[0].as_ptr(), event.as_ptr(), "event {index}");
            }
        }
    }
}

#[test]
fn a_begun_event_waits_only_where_something_is_taken_out() {
    let part = Bytes::from_static(b"data: {\"choices\":[{\"index\":0");
    let mut out = Vec::new();
    Observer::new(Route::Chat, true, ObserveOptions::default()).push(part.clone(), &mut out);
    assert_eq!(out.len(), 1);
    let mut out = Vec::new();
    let mut observer = Observer::new(Route::Chat, true, stripping());
    observer.push(part.clone(), &mut out);
    assert!(out.is_empty());
    // A stream cut there still hands over what it got.
    observer.finish(&mut out);
    assert_eq!(out.concat(), part);
}

#[test]
fn an_error_as_first_event_is_known_before_anything_is_committed() {
    for (name, status, words) in [
        ("queue_full_503_stream", 503, "The request queue is full."),
        ("queue_full_generate_stream", 503, "The request queue is full."),
        ("session_unknown_id_stream", 400, "does not exist"),
        ("chat_priority_abort_when_disabled_stream", 503, "priority"),
        ("queue_full_503_chat", 503, "The request queue is full."),
        ("queue_full_messages", 503, "Internal server error"),
        ("queue_full_responses", 503, "The request queue is full."),
    ] {
        let recorded = named(name);
        let error = whole(&recorded, &collecting()).failed_first.unwrap_or_else(|| panic!("{name} is an error"));
        assert_eq!(error.status, status, "{name}");
        assert!(error.message.contains(words), "{name}: {}", error.message);
    }
    let mut observer = Observer::new(Route::Chat, true, ObserveOptions::default());
    let mut out = Vec::new();
    observer.push(Bytes::from_static(b": waiting\n\ndata: {\"choices\":"), &mut out);
    assert_eq!(observer.first_event(), FirstEvent::None);
    observer.push(Bytes::from_static(b"[{\"index\":0,\"delta\":{\"content\":\"x\"}}]}\n\n"), &mut out);
    assert_eq!(observer.first_event(), FirstEvent::Data);
    observer.push(Bytes::from_static(b"data: {\"error\":{\"message\":\"late\",\"code\":500}}\n\n"), &mut out);
    assert_eq!(observer.first_event(), FirstEvent::Data);
    assert_eq!(observer.observation().error.as_ref().unwrap().message, "late");
}

#[test]
fn a_stream_of_responses_has_not_begun_with_the_events_that_only_open_it() {
    let event = |kind: &str, more: &str| format!("event: {kind}\ndata: {{\"type\":\"{kind}\"{more}}}\n\n");
    let opening = [event("response.created", ""), event("response.in_progress", "")].concat();
    let failed =
        event("response.failed", ",\"response\":{\"status\":\"failed\",\"error\":{\"code\":503,\"message\":\"full\"}}");
    let delta = event("response.output_text.delta", ",\"delta\":\"x\"");
    for (next, fails) in [(failed, true), (delta, false)] {
        let mut observer = Observer::new(Route::Responses, true, ObserveOptions::default());
        let mut out = Vec::new();
        assert!(!observer.has_opened());
        observer.push(Bytes::from(opening.clone()), &mut out);
        assert!(observer.has_opened() && observer.first_event() == FirstEvent::None);
        observer.push(Bytes::from(next.clone()), &mut out);
        assert_eq!(matches!(observer.first_event(), FirstEvent::Error(error) if error.status == 503), fails);
        assert_eq!(out.concat(), [opening.as_bytes(), next.as_bytes()].concat(), "nothing is changed");
    }
}

#[test]
fn tool_calls_are_named_and_put_together() {
    let recorded = named("chat_tools_required_stream");
    let outcome = whole(&recorded, &collecting());
    assert_eq!(outcome.seen.tool_calls, ["get_weather"]);
    let reply = outcome.reply.unwrap();
    assert_eq!(reply.content, None);
    assert_eq!(
        reply.tool_calls,
        [ToolCall {
            id: "call_8f0629a94aeb42b296b87a3f".into(),
            name: "get_weather".into(),
            arguments: "{\"U\": {\"U\": {}}}".into()
        }]
    );
    assert_eq!(whole(&recorded, &ObserveOptions::default()).reply, None);
    assert_eq!(whole(&named("anthropic_tools_stream"), &ObserveOptions::default()).seen.tool_calls, ["get_weather"]);
}

#[test]
fn reasoning_is_kept_apart_from_content() {
    for name in ["chat_stream", "chat_nonstream_cached"] {
        let reply = whole(&named(name), &collecting()).reply.unwrap();
        assert_eq!((reply.content, reply.reasoning_content.as_deref()), (None, Some("\n\n")), "{name}");
        assert_eq!(reply.finish_reason, "length");
    }
    let reply = whole(&named("chat_stream_default_usage"), &collecting()).reply.unwrap();
    assert_eq!(reply.content.as_deref(), Some("\n"));
}

#[test]
fn several_answers_make_no_reply() {
    assert_eq!(whole(&named("chat_stream_n2"), &collecting()).reply, None);
}

#[test]
fn a_json_answer_with_tool_calls_is_put_together_too() {
    let body = br#"{"choices":[{"index":0,"message":{"role":"assistant","content":"Wait.","reasoning_content":null,
        "tool_calls":[{"id":"c1","index":0,"type":"function","function":{"name":"f","arguments":"{\"a\":1}"}},
        {"id":"c2","type":"function","function":{"name":"g","arguments":""}}]},"finish_reason":"tool_calls"}],
        "usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":null}}"#;
    let outcome = watch(Route::Chat, false, &collecting(), body.chunks(10));
    assert_eq!(outcome.seen.tool_calls, ["f", "g"]);
    let reply = outcome.reply.unwrap();
    assert_eq!(reply.content.as_deref(), Some("Wait."));
    assert_eq!(reply.tool_calls[1].id, "c2");
    assert_eq!(reply.tool_calls[0].arguments, "{\"a\":1}");
}

#[test]
fn text_that_looks_like_a_key_is_text() {
    let content = r#"\"finish_reason\":\"stop\",\"usage\":{\"prompt_tokens\":9},\"error\":{\"code\":1},\"sglext\":{},data: [DONE]"#;
    let event = format!(
        "data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{content}\"}},\"finish_reason\":null}}]}}\n\n"
    );
    let outcome = watch(Route::Chat, true, &stripping(), [event.as_bytes()]);
    assert_eq!(outcome.sent, event.as_bytes());
    assert_eq!(outcome.seen, Observation { events: 1, content_events: 1, ..Observation::default() });
}

#[test]
fn data_on_several_lines_is_one_event() {
    let event =
        b"event: x\ndata: {\"choices\":[],\ndata:\"usage\":{\"prompt_tokens\":3,\ndata: \"completion_tokens\":1}}\n\n";
    let outcome = watch(Route::Chat, true, &ObserveOptions::default(), event.chunks(4));
    assert_eq!(outcome.seen.usage.prompt_tokens, Some(3));
    assert_eq!(outcome.seen.usage.completion_tokens, Some(1));
    assert_eq!(watch(Route::Chat, true, &stripping(), event.chunks(4)).sent, b"");
}

#[test]
fn comments_and_empty_lines_pass_and_count_for_nothing() {
    let bytes = b"\n\n: ping\n\nretry: 5\nid: 1\n\ndata: [DONE]\n\n";
    let outcome = watch(Route::Chat, true, &stripping(), bytes.chunks(3));
    assert_eq!(outcome.sent, bytes);
    assert_eq!((outcome.seen.events, outcome.seen.done), (0, true));
}

#[test]
fn a_last_event_without_its_empty_line_still_counts() {
    let outcome = watch(Route::Chat, true, &stripping(), [&b"data: [DONE]\n"[..]]);
    assert!(outcome.seen.done);
    assert_eq!(outcome.sent, b"data: [DONE]\n");
    assert!(!watch(Route::Chat, true, &stripping(), [&b"data: [DONE]"[..]]).seen.done);
}

#[test]
fn an_event_over_the_bound_passes_unobserved_and_the_next_is_seen() {
    let big = format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{}\"}}}}]}}\n\n", "x".repeat(500));
    let bytes = [big.as_bytes(), b"data: [DONE]\n\n"].concat();
    for options in [stripping(), ObserveOptions::default()] {
        let options = ObserveOptions { max_event_bytes: 100, ..options };
        for split in [1, 33, 99, bytes.len()] {
            let outcome = watch(Route::Chat, true, &options, bytes.chunks(split));
            assert_eq!(outcome.sent, bytes);
            assert!(outcome.seen.incomplete && outcome.seen.done, "in pieces of {split}");
            assert_eq!(outcome.seen.events, 0);
        }
    }
}

#[test]
fn a_message_with_an_unobserved_piece_is_not_gathered() {
    let piece = |text: &str, end: &str| {
        format!(
            "data: {{\"choices\":[{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}},\"finish_reason\":{end}}}]}}\n\n"
        )
    };
    let bytes = [piece(&"x".repeat(500), "null"), piece("y", "\"stop\"")].concat();
    for (bound, whole) in [(100, false), (1000, true)] {
        let options = ObserveOptions { collect_reply: true, max_event_bytes: bound, ..ObserveOptions::default() };
        let mut observer = Observer::new(Route::Chat, true, options);
        observer.push(Bytes::copy_from_slice(bytes.as_bytes()), &mut Vec::new());
        observer.finish(&mut Vec::new());
        assert_eq!(observer.take_reply().is_some(), whole);
    }
}

#[test]
fn a_json_answer_over_the_bound_passes_unobserved() {
    let recorded = named("chat_nonstream_cached");
    let options = ObserveOptions { max_body_bytes: 100, ..stripping() };
    let outcome = watch(Route::Chat, false, &options, recorded.body.chunks(30));
    assert_eq!(outcome.sent, recorded.body);
    assert!(outcome.seen.incomplete);
    assert_eq!(outcome.seen.usage, Usage::default());
}

#[test]
fn details_asked_for_and_absent_mean_nothing_was_cached() {
    let stream = b"data: {\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n";
    assert_eq!(watch(Route::Chat, true, &stripping(), [&stream[..]]).seen.usage.cached_tokens, Some(0));
    assert_eq!(watch(Route::Chat, true, &ObserveOptions::default(), [&stream[..]]).seen.usage.cached_tokens, None);
    let cut = &stream[..20];
    assert_eq!(watch(Route::Chat, true, &stripping(), [cut]).seen.usage.cached_tokens, None);
}

#[test]
fn answers_that_are_no_json_pass() {
    for (stream, body) in
        [(false, &b"Internal Server Error"[..]), (true, b"data: not json \"error\": 1\n\n"), (true, b"\xff\xfe\n\n")]
    {
        for options in [stripping(), collecting()] {
            let outcome = watch(Route::Chat, stream, &options, body.chunks(2));
            assert_eq!(outcome.sent, body);
            assert_eq!(outcome.seen.error, None);
        }
    }
}

#[test]
fn responses_events_tell_tools_deltas_and_failures() {
    let bytes = concat!(
        "event: response.output_item.added\ndata: {\"type\":\"response.output_item.added\",\"item\":{\"type\":\"function_call\",\"name\":\"f\"}}\n\n",
        "event: response.output_text.delta\ndata: {\"type\":\"response.output_text.delta\",\"delta\":\"x\"}\n\n",
        "data: {\"type\":\"response.function_call_arguments.delta\",\"delta\":\"x\"}\n\n",
        "event: response.completed\ndata: {\"type\":\"response.completed\",\"response\":{\"status\":\"completed\",\"usage\":{\"input_tokens\":4,\"output_tokens\":2,\"input_tokens_details\":{\"cached_tokens\":3}}}}\n\n",
    );
    let seen = watch(Route::Responses, true, &ObserveOptions::default(), [bytes.as_bytes()]).seen;
    assert_eq!(seen.tool_calls, ["f"]);
    assert_eq!((seen.content_events, seen.done), (2, true));
    assert_eq!(seen.finish_reason.as_deref(), Some("completed"));
    assert_eq!(seen.usage, Usage { prompt_tokens: Some(4), completion_tokens: Some(2), cached_tokens: Some(3) });

    let failed = "event: response.failed\ndata: {\"response\":{\"status\":\"failed\",\"error\":{\"code\":\"server_error\",\"message\":\"m\"}}}\n\n";
    let seen = watch(Route::Responses, true, &ObserveOptions::default(), [failed.as_bytes()]).seen;
    assert_eq!(seen.error, Some(WorkerError { status: 500, message: "m".into() }));
}

#[test]
fn a_native_batch_adds_up() {
    let seen = whole(&named("generate_batch"), &ObserveOptions::default()).seen;
    assert_eq!(seen.usage, plain(&named("generate_batch")).0);
    assert!(seen.usage.prompt_tokens.unwrap() > 0);
}

#[test]
fn token_events_are_counted_for_the_pace() {
    // Role, two deltas; the empty chunk that only says why it ended brings none.
    assert_eq!(whole(&named("chat_stream"), &ObserveOptions::default()).seen.content_events, 3);
    assert_eq!(whole(&named("chat_stream"), &collecting()).seen.content_events, 3);
    assert_eq!(whole(&named("generate_stream"), &ObserveOptions::default()).seen.content_events, 3);
    assert_eq!(whole(&named("anthropic_tools_stream"), &ObserveOptions::default()).seen.content_events, 2);
}

proptest! {
    #[test]
    fn random_splits_make_no_difference(seed in prop::collection::vec(1_usize..200, 1..40), pick in 0_usize..1000) {
        let all = recorded();
        let recorded = &all[pick % all.len()];
        let mut rest = &recorded.body[..];
        let mut chunks = Vec::new();
        for size in seed.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (head, tail) = rest.split_at((*size).min(rest.len()));
            chunks.push(head);
            rest = tail;
        }
        for options in [collecting(), stripping()] {
            let outcome = watch(recorded.route, recorded.stream, &options, chunks.iter().copied());
            prop_assert_eq!(outcome, whole(recorded, &options));
        }
    }

    #[test]
    fn nothing_a_worker_sends_is_changed_or_harmful(
        pieces in prop::collection::vec(prop::sample::select(vec![
            "data:", "data: ", "event: error", "\n", "\n\n", "\r\n", "\r", "{", "}", "[", "]", "\"usage\":", "\"error\":", "null", "\"finish_reason\":\"stop\"",
            "{\"choices\":[{\"index\":0,\"delta\":{\"content\":\"x\"}}]}", "[DONE]", "\"sglext\":{\"cached_tokens_details\":{}}", "é", ": c", "1e999",
        ]), 0..30),
        stream in any::<bool>(),
        route in prop::sample::select(Route::ALL.to_vec()),
        size in 1_usize..50,
    ) {
        let bytes = pieces.concat().into_bytes();
        let outcome = watch(route, stream, &collecting(), bytes.chunks(size));
        prop_assert_eq!(outcome.sent, bytes);
    }
}

#[test]
fn the_message_of_an_error_event_is_cleaned_in_place_however_the_stream_is_cut() {
    let cleaning = ObserveOptions { clean_errors: true, ..ObserveOptions::default() };
    for (route, first, told) in [
        (
            Route::Chat,
            r#"data: {"choices":[{"index":0,"delta":{"content":"a"}}]}"#,
            r#"data: {"error":{"message":"M","code":500}}"#,
        ),
        (Route::Generate, r#"data: {"text":"a","meta_info":{}}"#, r#"data: {"error":{"message":"M"}}"#),
        (
            Route::Messages,
            "event: content_block_delta\ndata: {}",
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\",\"message\":\"M\"}}",
        ),
        (
            Route::Responses,
            "event: response.output_text.delta\ndata: {}",
            "event: response.failed\ndata: {\"response\":{\"status\":\"failed\",\"error\":{\"message\":\"M\"}}}",
        ),
    ] {
        let stream = |message: &str| format!("{first}\n\n{}\n\ndata: [DONE]\n\n", told.replace('M', message));
        let (sent, wanted) = (stream("see /srv/x/y.py"), stream("see […]"));
        for size in [1, 7, 4096] {
            let outcome = watch(route, true, &cleaning, sent.as_bytes().chunks(size));
            assert_eq!(String::from_utf8(outcome.sent).unwrap(), wanted, "{route} in pieces of {size}");
            assert!(outcome.seen.error.is_some() && outcome.failed_first.is_none(), "{route}");
        }
    }
}

#[test]
fn a_stream_that_is_cleaned_ends_between_events_wherever_it_is_cut() {
    let cleaning = ObserveOptions { clean_errors: true, max_event_bytes: 64, ..ObserveOptions::default() };
    let stream = b"data: {\"a\":1}\n\ndata: {\"b\":2}\n\n";
    for cut in 0..stream.len() {
        let mut observer = Observer::new(Route::Messages, true, cleaning.clone());
        let mut out = Vec::new();
        observer.push(Bytes::copy_from_slice(&stream[..cut]), &mut out);
        let sent = out.concat();
        assert!(observer.between_events() && (sent.is_empty() || sent.ends_with(b"\n\n")), "{cut}");
    }
    let mut observer = Observer::new(Route::Messages, true, cleaning.clone());
    let mut out = Vec::new();
    observer.push(Bytes::from(vec![b'x'; 100]), &mut out);
    assert!(!observer.between_events(), "an event too long to be held has begun");
    observer.push(Bytes::from_static(b"\n\n"), &mut out);
    assert!(observer.between_events());
    assert!(!Observer::new(Route::Messages, false, cleaning).between_events());
}

/// Everything that can be asked for.
const ALL: Asked = Asked { first_token: true, tool_call: true, finish: true };

/// What happens in an answer, in short, however it is cut into pieces.
fn happenings(route: Route, stream: bool, asked: Asked, body: &[u8]) -> (Vec<String>, Observation) {
    let mut told: Option<(Vec<String>, Observation)> = None;
    for size in [1, 7, 64, body.len().max(1)] {
        let mut observer = Observer::new(route, stream, ObserveOptions { asked, ..ObserveOptions::default() });
        let mut out = Vec::new();
        let mut seen = Vec::new();
        for chunk in body.chunks(size) {
            observer.push(Bytes::copy_from_slice(chunk), &mut out);
            seen.append(&mut observer.take_happenings());
        }
        observer.finish(&mut out);
        seen.append(&mut observer.take_happenings());
        assert_eq!(out.concat(), body, "asking changes no byte");
        let seen = seen.into_iter().map(|one| match one {
            Happening::FirstToken => "first".to_owned(),
            Happening::ToolCall { number, name } => format!("{number}:{name}"),
            Happening::Finish { reason } => reason,
        });
        let now = (seen.collect(), observer.observation().clone());
        assert_eq!(*told.get_or_insert_with(|| now.clone()), now, "in pieces of {size}");
    }
    told.unwrap()
}

#[test]
fn recorded_answers_tell_what_happens_in_them_in_order() {
    for recorded in recorded() {
        let (told, seen) = happenings(recorded.route, recorded.stream, ALL, &recorded.body);
        let mut expected = Vec::new();
        if recorded.stream && (seen.content_events > 0 || !seen.tool_calls.is_empty()) {
            expected.push("first".to_owned());
        }
        expected.extend(seen.tool_calls.iter().enumerate().map(|(at, name)| format!("{at}:{name}")));
        expected.extend(seen.finish_reason.clone());
        // Of several answers in one each finishes.
        let told: Vec<_> = told.iter().enumerate().filter(|(at, one)| told.get(at + 1) != Some(one)).collect();
        let told: Vec<String> = told.into_iter().map(|(_, one)| one.clone()).collect();
        assert_eq!(told, expected, "{}", recorded.name);
        assert_eq!(seen.left_out, 0, "{}", recorded.name);
    }
}

#[test]
fn only_what_was_asked_for_is_kept() {
    let body = &named("chat_tools_required_stream").body;
    let of = |asked| happenings(Route::Chat, true, asked, body).0;
    assert_eq!(of(Asked::default()), [""; 0]);
    let all = of(ALL);
    assert_eq!(of(Asked { first_token: true, ..Asked::default() }), all[..1]);
    assert_eq!(of(Asked { tool_call: true, ..Asked::default() }), all[1..all.len() - 1]);
    assert_eq!(of(Asked { finish: true, ..Asked::default() }), all[all.len() - 1..]);
}

#[test]
fn the_chunk_that_only_opens_a_message_has_no_token() {
    let opening = r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#;
    let body = format!("data: {opening}\n\ndata: {opening}\n\n");
    assert_eq!(happenings(Route::Chat, true, ALL, body.as_bytes()).0, [""; 0]);
    let token = opening.replace("\"\"", "\"a\"");
    let body = format!("{body}data: {token}\n\ndata: {token}\n\n");
    assert_eq!(happenings(Route::Chat, true, ALL, body.as_bytes()).0, ["first"]);
}

#[test]
fn too_many_of_a_kind_are_left_out_and_counted() {
    let calls: String = (0..100)
        .map(|n| {
            let call = format!(r#"{{"index":{n},"function":{{"name":"tool-{n}"}}}}"#);
            format!("data: {{\"choices\":[{{\"delta\":{{\"tool_calls\":[{call}]}}}}]}}\n\n")
        })
        .collect();
    let ends = "data: {\"choices\":[{\"finish_reason\":\"tool_calls\"}]}\n\n".repeat(70);
    let (told, seen) = happenings(Route::Chat, true, ALL, format!("{calls}{ends}data: [DONE]\n\n").as_bytes());
    assert_eq!(told.len(), 1 + 64 + 64);
    assert_eq!((told[1].as_str(), told[64].as_str(), told[65].as_str()), ("0:tool-0", "63:tool-63", "tool_calls"));
    assert_eq!((seen.left_out, seen.tool_calls.len()), (36 + 6, 64));
    // Nothing is left out of what nobody asked for.
    assert_eq!(happenings(Route::Chat, true, Asked::default(), calls.as_bytes()).1.left_out, 0);
}

#[test]
fn names_and_reasons_are_cut() {
    let long = "x".repeat(10_000);
    let body = format!(
        r#"{{"choices":[{{"message":{{"tool_calls":[{{"function":{{"name":"{long}"}}}}]}},"finish_reason":"{long}"}}]}}"#
    );
    let (told, _) = happenings(Route::Chat, false, ALL, body.as_bytes());
    assert_eq!(told, [format!("0:{}", "x".repeat(128)), "x".repeat(64)]);
}
