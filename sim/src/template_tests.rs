#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use super::*;
use serde_json::json;

fn conversation(value: Value) -> Vec<Value> {
    value.as_array().unwrap().clone()
}

#[test]
fn tools_stand_in_the_system_block() {
    let messages = conversation(json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]));
    let text = render(&messages, &[json!({"type": "function"})], true, false);
    assert_eq!(
        text,
        "<|im_start|>system\nBe brief.\n\n# Tools\n<tools>\n{\"type\": \"function\"}\n</tools><|im_end|>\n\
         <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    );
}

#[test]
fn reasoning_of_earlier_turns_is_dropped_and_that_of_the_running_tool_loop_kept() {
    let messages = conversation(json!([
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "old"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d", "reasoning_content": "new"},
        {"role": "tool", "content": "e"},
    ]));
    let text = render(&messages, &[], false, true);
    assert!(!text.contains("old") && text.contains("<think>new</think>d"), "{text}");
    assert!(!render(&messages, &[], false, false).contains("new"));
}

#[test]
fn a_growing_conversation_keeps_its_prefix() {
    let messages = conversation(json!([
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{\"x\": 1}"}}]},
        {"role": "tool", "content": "1"},
    ]));
    let first = render(&messages[..1], &[], true, false);
    let all = render(&messages, &[], true, false);
    let called = format!("{first}{}<|im_end|>\n", tool_call_text("f", "{\"x\": 1}"));
    assert!(all.starts_with(&called), "{all}");
}
