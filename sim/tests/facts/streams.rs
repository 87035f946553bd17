//! What an answer looks like, whole and as a stream.

use crate::{
    client::{Connection, post},
    recorded::{check, check_cached},
    worker,
};
use serde_json::{Value, json};
use std::time::Duration;

fn chat(content: &str) -> Value {
    json!({"model": "tiny", "messages": [{"role": "user", "content": content}]})
}

fn with(mut body: Value, more: Value) -> Value {
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

const TOOL: &str = "read_file";

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": TOOL, "parameters": {"type": "object"}}}])
}

#[tokio::test]
async fn a_stream_holds_the_same_answer_as_a_whole() {
    let worker = worker(|config| config.reasoning = true).await;
    let body = chat("[[sim:think=20]] [[sim:tokens=30]]");
    let whole = post(&worker, "/v1/chat/completions", body.clone()).await.json();
    let stream = post(&worker, "/v1/chat/completions", with(body, json!({"stream": true}))).await;
    let (mut content, mut reasoning) = (String::new(), String::new());
    for event in stream.json_events() {
        let delta = &event["choices"][0]["delta"];
        assert!(delta.get("reasoning_content").is_some(), "every delta has it: {event}");
        content.push_str(delta["content"].as_str().unwrap_or_default());
        reasoning.push_str(delta["reasoning_content"].as_str().unwrap_or_default());
    }
    let message = &whole["choices"][0]["message"];
    assert_eq!((&json!(content), &json!(reasoning)), (&message["content"], &message["reasoning_content"]));
    assert_eq!((&whole["usage"]["completion_tokens"], &whole["usage"]["reasoning_tokens"]), (&json!(50), &json!(20)));
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn fact_56_usage_comes_only_when_asked_for() {
    let worker = worker(|config| config.enable_cache_report = true).await;
    let body = with(chat("hi"), json!({"stream": true, "max_tokens": 3}));
    let plain = post(&worker, "/v1/chat/completions", body.clone()).await;
    assert!(!plain.text().contains("\"usage\":{"));
    let more = json!({"stream_options": {"include_usage": true}, "return_cached_tokens_details": true});
    let asked = post(&worker, "/v1/chat/completions", with(body, more)).await.json_events();
    let (sglext, usage) = (&asked[asked.len() - 2], &asked[asked.len() - 1]);
    assert_eq!((&sglext["choices"], &usage["choices"]), (&json!([]), &json!([])));
    let cached = usage["usage"]["prompt_tokens_details"]["cached_tokens"].clone();
    assert_eq!(cached, usage["usage"]["prompt_tokens"].as_u64().unwrap() - 1);
    assert_eq!(sglext["sglext"]["cached_tokens_details"], json!({"device": cached, "host": 0}));
}

#[tokio::test]
async fn fact_60_two_choices_have_two_ids_in_a_stream() {
    let worker = worker(|_| ()).await;
    let body = with(chat("hi"), json!({"stream": true, "n": 2, "max_tokens": 3}));
    let events = post(&worker, "/v1/chat/completions", body).await.json_events();
    let id_of = |index: u64| {
        let event = events.iter().find(|event| event["choices"][0]["index"] == index).unwrap();
        event["id"].as_str().unwrap().to_owned()
    };
    assert_ne!(id_of(0), id_of(1));
}

#[tokio::test]
async fn fact_62_a_warm_up_without_output_caches_its_prompt() {
    let worker = worker(|config| config.enable_cache_report = true).await;
    let body = with(chat("a completely new prompt for warming"), json!({"max_tokens": 0}));
    let warm = post(&worker, "/v1/chat/completions", body.clone()).await.json();
    assert_eq!(
        (&warm["usage"]["completion_tokens"], &warm["choices"][0]["finish_reason"]),
        (&json!(0), &json!("length"))
    );
    let real = post(&worker, "/v1/chat/completions", with(body, json!({"max_tokens": 2}))).await.json();
    let usage = &real["usage"];
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"].as_u64().unwrap() - 1);
}

#[tokio::test]
async fn fact_61_nothing_is_sent_before_the_first_token_on_chat_and_headers_at_once_elsewhere() {
    let worker = worker(|_| ()).await;
    post(&worker, "/_sim/fault", json!({"kind": "wedge"})).await;
    let stream = json!({"stream": true});
    let prompt = json!({"model": "tiny", "prompt": "x", "stream": true});
    let mut silent = [Connection::open(worker.addr()).await, Connection::open(worker.addr()).await];
    silent[0].post("/v1/chat/completions", &with(chat("hi"), stream.clone())).await;
    silent[1].post("/v1/completions", &prompt).await;
    let mut messages = Connection::open(worker.addr()).await;
    messages.post("/v1/messages", &with(chat("hi"), json!({"stream": true, "max_tokens": 3}))).await;
    messages.read_until("text/event-stream").await;
    let mut generate = Connection::open(worker.addr()).await;
    generate.post("/generate", &json!({"text": "x", "stream": true})).await;
    generate.read_until("text/event-stream").await;
    let mut responses = Connection::open(worker.addr()).await;
    responses.post("/v1/responses", &json!({"model": "tiny", "input": "x", "stream": true})).await;
    responses.read_until("response.in_progress").await;
    for connection in &mut silent {
        let first = tokio::time::timeout(Duration::from_millis(100), connection.read_until("HTTP")).await;
        assert!(first.is_err());
    }
    post(&worker, "/_sim/fault", json!({"kind": "unwedge"})).await;
    for connection in &mut silent {
        connection.read_until("[DONE]").await;
    }
}

#[tokio::test]
async fn fact_58_a_native_stream_is_cumulative_unless_told_otherwise() {
    for incremental in [false, true] {
        let worker = worker(|config| config.incremental_streaming_output = incremental).await;
        let body = json!({"text": "x", "stream": true, "sampling_params": {"max_new_tokens": 5, "ignore_eos": true}});
        let events = post(&worker, "/generate", body).await.json_events();
        let counts: Vec<usize> = events.iter().map(|event| event["output_ids"].as_array().unwrap().len()).collect();
        assert_eq!(counts, if incremental { vec![1; 5] } else { vec![1, 2, 3, 4, 5] });
        assert_eq!(events[4]["meta_info"]["finish_reason"], json!({"type": "length", "length": 5}));
    }
}

#[tokio::test]
async fn a_scripted_tool_call_comes_out_on_every_protocol() {
    let worker = worker(|_| ()).await;
    let words = "[[sim:tool=read_file {\"path\": \"a.rs\", \"lines\": [1, 20]}]]";
    let arguments = "{\"path\": \"a.rs\", \"lines\": [1, 20]}";
    let body = with(chat(words), json!({"tools": tools()}));
    let whole = post(&worker, "/v1/chat/completions", body.clone()).await.json();
    let choice = &whole["choices"][0];
    let function = &choice["message"]["tool_calls"][0]["function"];
    assert_eq!((&function["name"], &function["arguments"]), (&json!(TOOL), &json!(arguments)));
    assert_eq!((&choice["finish_reason"], &choice["matched_stop"]), (&json!("tool_calls"), &Value::Null));
    let stream = post(&worker, "/v1/chat/completions", with(body, json!({"stream": true}))).await;
    let events = stream.json_events();
    let deltas: Vec<&Value> = events
        .iter()
        .map(|event| &event["choices"][0]["delta"]["tool_calls"][0])
        .filter(|call| call.is_object())
        .collect();
    assert_eq!((&deltas[0]["function"]["name"], &deltas[0]["function"]["arguments"]), (&json!(TOOL), &json!("")));
    assert!(deltas[1..].iter().all(|delta| delta["id"].is_null() && delta["function"]["name"].is_null()));
    let streamed: String = deltas.iter().filter_map(|delta| delta["function"]["arguments"].as_str()).collect();
    assert_eq!(streamed, arguments);
    let anthropic = json!({
        "model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": words}],
        "tools": [{"name": TOOL, "input_schema": {"type": "object"}}],
    });
    let message = post(&worker, "/v1/messages", anthropic).await.json();
    assert_eq!(
        (&message["stop_reason"], &message["content"][0]["input"]["path"]),
        (&json!("tool_use"), &json!("a.rs"))
    );
    let input = json!({"model": "tiny", "input": words, "tools": [{"type": "function", "name": TOOL}]});
    let response = post(&worker, "/v1/responses", input).await.json();
    let item = &response["output"][0];
    assert_eq!((&item["type"], &item["arguments"]), (&json!("function_call"), &json!(arguments)));
}

#[tokio::test]
async fn without_a_tool_parser_a_call_is_text() {
    let worker = worker(|config| config.tool_call_parser = false).await;
    let body = with(chat("[[sim:tool=read_file {}]]"), json!({"tools": tools()}));
    let whole = post(&worker, "/v1/chat/completions", body).await.json();
    let text = whole["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert!(text.starts_with("<tool_call>"), "{text}");
}

#[tokio::test]
async fn a_stop_string_ends_the_text_before_it_also_in_a_stream() {
    let worker = worker(|_| ()).await;
    let body = with(chat("[[sim:text=one two three]]"), json!({"stop": "two"}));
    let whole = post(&worker, "/v1/chat/completions", body.clone()).await.json();
    let choice = &whole["choices"][0];
    assert_eq!((&choice["message"]["content"], &choice["matched_stop"]), (&json!("one "), &json!("two")));
    let stream = post(&worker, "/v1/chat/completions", with(body, json!({"stream": true}))).await.json_events();
    let text: String = stream.iter().filter_map(|event| event["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "one ");
}

#[tokio::test]
async fn fact_63_anthropic_input_excludes_the_cached_part_only_with_the_report() {
    for report in [false, true] {
        let worker = worker(|config| config.enable_cache_report = report).await;
        let body = with(chat("hi"), json!({"max_tokens": 2}));
        let first = post(&worker, "/v1/messages", body.clone()).await.json();
        let again = post(&worker, "/v1/messages", body).await.json();
        let prompt = first["usage"]["input_tokens"].as_u64().unwrap();
        let wanted = if report { 1 } else { prompt };
        assert_eq!(again["usage"]["input_tokens"], wanted);
        assert_eq!(again["usage"].get("cache_read_input_tokens").is_some(), report);
    }
}

#[tokio::test]
async fn tokens_can_be_turned_into_text_and_back() {
    let worker = worker(|_| ()).await;
    let tokens = post(&worker, "/tokenize", json!({"prompt": "The capital"})).await.json();
    let text = post(&worker, "/detokenize", json!({"tokens": tokens["tokens"]})).await.json();
    assert_eq!(text["text"], "The capital");
    let chat_tokens = post(&worker, "/tokenize", json!({"messages": chat("hi")["messages"]})).await.json();
    let asked = with(chat("hi"), json!({"return_input_ids_in_sglext": true, "max_tokens": 1}));
    let answer = post(&worker, "/v1/chat/completions", asked).await.json();
    assert_eq!(answer["sglext"]["input_ids"], chat_tokens["tokens"]);
}

#[tokio::test]
async fn fact_55_a_chat_stream_has_its_order_and_reasoning_in_every_delta() {
    let reasoning = worker(|config| (config.reasoning, config.enable_cache_report) = (true, true)).await;
    check(&reasoning, "chat_stream", &[]).await;
    check(&reasoning, "chat_stream_usage", &[]).await;
    check(&reasoning, "chat_stream_continuous_usage", &[]).await;
    let plain = worker(|config| config.enable_cache_report = true).await;
    check_cached(&plain, "chat_tools_required_stream", &["finish_reason"]).await;
    let words = "[[sim:tool=read_file {}]]";
    let more = json!({"stream": true, "tools": tools(), "stream_options": {"include_usage": true},
        "return_cached_tokens_details": true});
    let stream = post(&plain, "/v1/chat/completions", with(chat(words), more)).await;
    let events = stream.json_events();
    let first = &events[0]["choices"][0]["delta"];
    assert_eq!((&first["role"], &first["content"]), (&json!("assistant"), &json!("")));
    let finish = events.iter().position(|event| event["choices"][0]["finish_reason"].is_string()).unwrap();
    let empty: Vec<&Value> = events[finish + 1..].iter().map(|event| &event["choices"]).collect();
    assert_eq!(empty, [&json!([]), &json!([])], "sglext, then usage");
    assert!(events[finish + 1]["sglext"].is_object() && events[finish + 2]["usage"].is_object());
    assert!(events[..finish].iter().all(|event| event["choices"][0]["delta"].get("reasoning_content").is_some()));
    assert_eq!(stream.events().last().unwrap(), "[DONE]");
}

#[tokio::test]
async fn fact_56_cached_tokens_are_null_without_the_report() {
    let worker = worker(|_| ()).await;
    check(&worker, "chat_no_cache_report", &[]).await;
    check(&worker, "chat_no_cache_report_flag", &[]).await;
    let default = self::worker(|config| {
        config.stream_response_default_include_usage = true;
        config.abort_on_priority_when_disabled = true;
    })
    .await;
    check(&default, "chat_stream_default_usage", &[]).await;
}

#[tokio::test]
async fn fact_57_details_come_in_a_chunk_of_their_own_before_the_usage() {
    for report in [false, true] {
        let worker = worker(|config| config.enable_cache_report = report).await;
        let more =
            json!({"stream": true, "stream_options": {"include_usage": true}, "return_cached_tokens_details": true});
        let body = with(chat("hi"), more);
        post(&worker, "/v1/chat/completions", body.clone()).await;
        let events = post(&worker, "/v1/chat/completions", body).await.json_events();
        let (sglext, usage) = (&events[events.len() - 2], &events[events.len() - 1]);
        assert_eq!((&sglext["choices"], &usage["choices"]), (&json!([]), &json!([])));
        assert!(sglext["sglext"]["cached_tokens_details"]["device"].as_u64().unwrap() > 0, "{sglext}");
        assert!(sglext.get("usage").is_none_or(Value::is_null) && usage["usage"].is_object());
    }
}

#[tokio::test]
async fn fact_58_the_recorded_native_streams() {
    let worker = worker(|config| config.enable_cache_report = true).await;
    check_cached(&worker, "generate_stream", &[]).await;
    let incremental = self::worker(|config| config.incremental_streaming_output = true).await;
    check_cached(&incremental, "generate_stream_incremental", &["cached_tokens_details"]).await;
}

#[tokio::test]
async fn fact_59_an_error_in_a_stream_is_an_event_under_status_200() {
    let worker = worker(|config| config.abort_on_priority_when_disabled = true).await;
    let body = with(chat("hi"), json!({"stream": true, "priority": 1}));
    let refused = post(&worker, "/v1/chat/completions", body).await;
    assert_eq!((refused.status, refused.header("content-type")), (200, Some("text/event-stream; charset=utf-8")));
    assert_eq!(refused.json_events()[0]["error"]["type"], "SERVICE_UNAVAILABLE");
    assert_eq!(refused.events().last().unwrap(), "[DONE]");
    let unknown = json!({"text": "x", "stream": true, "session_params": {"id": "nope"}});
    let unknown = post(&worker, "/generate", unknown).await;
    assert_eq!(unknown.status, 200);
    assert_eq!(unknown.json_events()[0]["meta_info"]["finish_reason"]["type"], "abort");
    assert_eq!(unknown.events().last().unwrap(), "[DONE]");
}

#[tokio::test]
async fn fact_60_the_recorded_stream_of_two_choices() {
    let worker = worker(|config| config.enable_cache_report = true).await;
    check(&worker, "chat_n2_rid", &[]).await;
}

#[tokio::test]
async fn fact_62_the_recorded_warm_ups() {
    let worker = worker(|config| config.enable_cache_report = true).await;
    check(&worker, "chat_max_tokens_0", &[]).await;
    check_cached(&worker, "generate_max_new_tokens_0", &[]).await;
    check_cached(&worker, "warm_max_completion_tokens_0", &[]).await;
}

#[tokio::test]
async fn fact_63_the_recorded_messages() {
    let report = worker(|config| (config.reasoning, config.enable_cache_report) = (true, true)).await;
    check(&report, "anthropic_messages", &[]).await;
    check(&report, "anthropic_messages_stream", &[]).await;
    let plain = worker(|_| ()).await;
    check(&plain, "anthropic_no_cache_report", &[]).await;
}

#[tokio::test]
async fn fact_64_meta_info_and_a_stream_exclude_each_other() {
    let worker = worker(|_| ()).await;
    check(&worker, "chat_return_meta_info_stream", &[]).await;
    let body = with(chat("hi"), json!({"return_meta_info": true}));
    assert!(post(&worker, "/v1/chat/completions", body).await.json()["choices"][0]["meta_info"].is_object());
}

#[tokio::test]
async fn fact_70_inside_a_streaming_session_pages_do_not_matter() {
    let worker = worker(|config| {
        config.page_size = 16;
        config.enable_streaming_session = true;
    })
    .await;
    let open = json!({"capacity_of_str_len": 1, "session_id": "s", "streaming": true});
    assert_eq!(post(&worker, "/open_session", open).await.status, 200);
    let turn = |text: &str| {
        json!({"text": text, "sampling_params": {"max_new_tokens": 6, "ignore_eos": true},
        "session_params": {"id": "s"}})
    };
    let first = post(&worker, "/generate", turn("You are a helpful assistant.")).await.json();
    let second = post(&worker, "/generate", turn(" Go on.")).await.json();
    let context = first["meta_info"]["prompt_tokens"].as_u64().unwrap() + 6;
    assert_eq!(second["meta_info"]["cached_tokens"].as_u64().unwrap(), context - 1);
    assert_ne!((context - 1) % 16, 0, "of no whole number of pages");
}

#[tokio::test]
async fn fact_72_prompt_and_output_over_the_window_are_refused() {
    let worker = worker(|_| ()).await;
    check(&worker, "chat_sum_over_window", &[]).await;
    check(&worker, "generate_sum_over_window", &[]).await;
    check(&worker, "chat_max_tokens_over", &[]).await;
}
