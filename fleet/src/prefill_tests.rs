#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use serde_json::{Value, json};

use super::*;
use crate::identity::IdentityOptions;
use crate::prefix::PrefixOptions;
use crate::reply::ToolCall;
use crate::steering::SteeringOptions;
use crate::turn::{UnderstandOptions, understand};

fn turn_on(route: Route, body: &str) -> Turn {
    let options = UnderstandOptions {
        identity: IdentityOptions::new(7),
        prefix: PrefixOptions::new(64, 1000, 7),
        steering: SteeringOptions::default(),
    };
    understand(route, &http::HeaderMap::new(), Bytes::copy_from_slice(body.as_bytes()), &options).unwrap()
}

fn text(content: &str) -> Reply {
    Reply {
        content: Some(content.into()),
        reasoning_content: Some("secret thoughts".into()),
        tool_calls: Vec::new(),
        finish_reason: "stop".into(),
    }
}

fn calls(names: &[&str]) -> Reply {
    Reply {
        content: None,
        reasoning_content: None,
        tool_calls: names
            .iter()
            .map(|name| ToolCall { id: format!("call_{name}"), name: (*name).into(), arguments: "{\"a\": 1}".into() })
            .collect(),
        finish_reason: "tool_calls".into(),
    }
}

fn body(turn: &Turn, reply: &Reply) -> Value {
    let plan =
        UpstreamPlan { rid: Some("w-1"), priority: Some(-100), session_id: Some("tag"), ..UpstreamPlan::default() };
    serde_json::from_slice(&next_turn_body(turn, reply, &plan).unwrap()).unwrap()
}

const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"h\u0069"} ],"tools":[{"type":"function"}],
    "tool_choice":"auto","chat_template_kwargs":{"x":1},"cache_salt":"s","lora_path":"l","reasoning_effort":"low","stream":true,
    "stream_options":{"include_usage":true},"max_tokens":500,"max_completion_tokens":600,"n":1,"temperature":0.3,"stop":["x"],
    "response_format":{"type":"json_object"},"logprobs":true,"top_logprobs":3,"nvext":{"agent_hints":{"speculative_prefill":true}},
    "return_meta_info":true,"rid":"client","session_params":{"id":"x"}}"#;

#[test]
fn a_text_answer_is_followed_by_an_empty_user_message() {
    assert_eq!(
        body(&turn_on(Route::Chat, CHAT), &text("hel\"lo")),
        json!({
            "model": "m",
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "hel\"lo"},
                {"role": "user", "content": ""},
            ],
            "tools": [{"type": "function"}],
            "tool_choice": "auto",
            "chat_template_kwargs": {"x": 1},
            // Of no credential.
            "cache_salt": "c46f56034ce704ee42e8205305153c4e",
            "lora_path": "l",
            "reasoning_effort": "low",
            "stream": false,
            "max_tokens": 1,
            "rid": "w-1",
            "priority": -100,
            "session_id": "tag",
        })
    );
}

#[test]
fn tool_calls_are_followed_by_an_empty_result_each() {
    let sent = body(&turn_on(Route::Chat, r#"{"messages":[{"role":"user","content":"hi"}]}"#), &calls(&["f", "g"]));
    let call = |name: &str| json!({"id": format!("call_{name}"), "type": "function", "function": {"name": name, "arguments": "{\"a\": 1}"}});
    assert_eq!(
        sent["messages"],
        json!([
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": null, "tool_calls": [call("f"), call("g")]},
            {"role": "tool", "tool_call_id": "call_f", "content": ""},
            {"role": "tool", "tool_call_id": "call_g", "content": ""},
        ])
    );
}

#[test]
fn the_history_keeps_its_bytes() {
    let sent = next_turn_body(&turn_on(Route::Chat, CHAT), &text("x"), &UpstreamPlan::default()).unwrap();
    let sent = String::from_utf8(sent.to_vec()).unwrap();
    assert!(
        sent.contains(r#""messages":[{"role":"user","content":"h\u0069"},{"role":"assistant","content":"x"}"#),
        "{sent}"
    );
    assert!(!sent.contains("secret"));
}

#[test]
fn the_warmed_prompt_is_a_prefix_of_the_next_turns() {
    let history =
        (0..9).map(|n| format!("{{\"role\":\"user\",\"content\":\"message {n}\"}}")).collect::<Vec<_>>().join(",");
    let first = turn_on(Route::Chat, &format!("{{\"messages\":[{history}]}}"));
    let warm = next_turn_body(&first, &text("an answer"), &UpstreamPlan::default()).unwrap();
    let warm = turn_on(Route::Chat, std::str::from_utf8(&warm).unwrap()).prefix.blocks;
    let next = turn_on(
        Route::Chat,
        &format!(
            "{{\"messages\":[{history},{{\"role\":\"assistant\",\"content\":\"an answer\"}},{{\"role\":\"user\",\"content\":\"more {}\"}}]}}",
            "x".repeat(200)
        ),
    );
    assert!(warm.len() > first.prefix.blocks.len());
    assert_eq!(next.prefix.blocks[..warm.len() - 1], warm[..warm.len() - 1]);
}

#[test]
fn what_cannot_be_known_is_not_warmed() {
    let plan = UpstreamPlan::default();
    let refused = |route, body: &str, reply: &Reply| {
        assert_eq!(next_turn_body(&turn_on(route, body), reply, &plan), None, "{body}")
    };
    refused(Route::Completions, r#"{"prompt":"x"}"#, &text("a"));
    refused(Route::Responses, r#"{"input":"x"}"#, &text("a"));
    refused(Route::Chat, r#"{"messages":[],"n":2}"#, &text("a"));
    refused(Route::Chat, r#"{"messages":[],"input_ids":[1]}"#, &text("a"));
    refused(Route::Chat, r#"{"messages":[],"continue_final_message":true}"#, &text("a"));
    refused(Route::Chat, r#"{"messages":"x"}"#, &text("a"));
    refused(Route::Chat, r#"{}"#, &text("a"));
    let empty = Reply { content: None, ..text("") };
    refused(Route::Chat, r#"{"messages":[]}"#, &empty);
}

#[test]
fn an_empty_history_makes_no_stray_comma() {
    let sent = body(&turn_on(Route::Chat, r#"{"messages":[ ]}"#), &text("a"));
    assert_eq!(sent["messages"], json!([{"role": "assistant", "content": "a"}, {"role": "user", "content": ""}]));
}
