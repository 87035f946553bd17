//! The chat template: ChatML with the tools in the system block.
//!
//! ```text
//! <|im_start|>system
//! SYSTEM
//!
//! # Tools
//! <tools>
//! {"type": "function", …}
//! </tools><|im_end|>
//! <|im_start|>user
//! QUESTION<|im_end|>
//! <|im_start|>assistant
//! ```
//!
//! With a reasoning model, the reasoning of assistant turns before the last user message is dropped and that of later
//! ones kept, so the KV of a thinking turn is not reusable by the next user turn.

use crate::pytext;
use serde_json::Value;

/// The text of a message's `content`: a string, or the text parts of a list; images and the like become a marker.
pub(crate) fn content_text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts
            .iter()
            .map(|part| match part.get("text").and_then(Value::as_str).or_else(|| part.as_str()) {
                Some(text) => text.to_owned(),
                None => match part.get("content") {
                    Some(inner) => content_text(inner),
                    None => "<|media|>".to_owned(),
                },
            })
            .collect(),
        Value::Null => String::new(),
        other => pytext::json(other),
    }
}

fn role(message: &Value) -> &str {
    message.get("role").and_then(Value::as_str).unwrap_or("user")
}

fn text(message: &Value) -> String {
    message.get("content").map(content_text).unwrap_or_default()
}

/// Renders a conversation.
pub(crate) fn render(messages: &[Value], tools: &[Value], add_generation_prompt: bool, reasoning: bool) -> String {
    let mut out = String::new();
    let (system, rest) = match messages.split_first() {
        Some((first, rest)) if matches!(role(first), "system" | "developer") => (Some(text(first)), rest),
        _ => (None, messages),
    };
    if !tools.is_empty() {
        out.push_str("<|im_start|>system\n");
        if let Some(system) = &system {
            out.push_str(system);
            out.push_str("\n\n");
        }
        out.push_str("# Tools\n<tools>");
        for tool in tools {
            out.push('\n');
            out.push_str(&pytext::json(tool));
        }
        out.push_str("\n</tools><|im_end|>\n");
    } else if let Some(system) = &system {
        out.push_str("<|im_start|>system\n");
        out.push_str(system);
        out.push_str("<|im_end|>\n");
    }
    let last_user = rest.iter().rposition(|message| role(message) == "user").unwrap_or(0);
    for (place, message) in rest.iter().enumerate() {
        out.push_str("<|im_start|>");
        out.push_str(role(message));
        out.push('\n');
        render_body(message, reasoning, place > last_user, &mut out);
        out.push_str("<|im_end|>\n");
    }
    if add_generation_prompt {
        out.push_str("<|im_start|>assistant\n");
    }
    out
}

fn render_body(message: &Value, reasoning: bool, keep_reasoning: bool, out: &mut String) {
    let content = text(message);
    let mut content = content.as_str();
    if reasoning && role(message) == "assistant" {
        let inline = content.split_once("</think>");
        if let Some((_, answer)) = inline {
            content = answer;
        }
        let thought = match message.get("reasoning_content").and_then(Value::as_str) {
            Some(thought) => Some(thought),
            None => inline.map(|(thought, _)| thought.strip_prefix("<think>").unwrap_or(thought)),
        };
        if let (true, Some(thought)) = (keep_reasoning, thought) {
            out.push_str("<think>");
            out.push_str(thought);
            out.push_str("</think>");
        }
    }
    out.push_str(content);
    let calls = message.get("tool_calls").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    for (place, call) in calls.iter().enumerate() {
        if place > 0 || !content.is_empty() {
            out.push('\n');
        }
        let function = call.get("function").unwrap_or(&Value::Null);
        let arguments = match function.get("arguments") {
            Some(Value::String(text)) => text.clone(),
            Some(other) => pytext::json(other),
            None => "{}".to_owned(),
        };
        out.push_str(&tool_call_text(function.get("name").and_then(Value::as_str).unwrap_or_default(), &arguments));
    }
}

/// How a tool call is written in a prompt and in an output.
pub(crate) fn tool_call_text(name: &str, arguments: &str) -> String {
    format!("<tool_call>\n{{\"name\": {}, \"arguments\": {arguments}}}\n</tool_call>", Value::from(name))
}

#[cfg(test)]
#[path = "template_tests.rs"]
mod tests;
