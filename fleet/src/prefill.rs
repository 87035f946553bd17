//! The body of a speculative prefill: the request that the client is about to send, as far as it is known.
//!
//! Seen on SGLang 0.5.23: an assistant message at the end of `messages` is not rendered as one. Its text becomes a user
//! message, its tool calls are lost; with `continue_final_message` only its bare text follows the generation prompt, behind
//! whatever a thinking template opens there. What renders as in the real next turn is the message with the next one behind
//! it, so that is what is sent: an empty result for each tool call, or an empty user message. The next turn then differs
//! first inside that last message. Measured on a tool-calling turn of 368 prompt tokens, cached for the real one: 254 without
//! a prefill, 253 with the message at the end, 352 with an empty result behind it.

use bytes::Bytes;
use serde::Serialize;

use crate::body::rewrite;
use crate::reply::Reply;
use crate::route::Route;
use crate::turn::{Turn, UpstreamPlan};

/// Members of a chat request that do not change the prompt, but would cost time, add output or fail beside the others.
/// What templates read (tools, template arguments, reasoning effort) and what keys the cache (model, salt, adapter) stays.
const UNNEEDED: [&str; 37] = [
    "stream_options",
    "max_completion_tokens",
    "n",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "no_stop_trim",
    "min_tokens",
    "ignore_eos",
    "response_format",
    "regex",
    "ebnf",
    "logprobs",
    "top_logprobs",
    "logit_bias",
    "sampling_logprobs_mode",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "custom_params",
    "watermark",
    "user",
    "return_hidden_states",
    "return_routed_experts",
    "return_cached_tokens_details",
    "return_spec_tokens_details",
    "return_prompt_token_ids",
    "return_token_ids",
    "return_meta_info",
    "return_input_ids_in_sglext",
    "return_output_ids_in_sglext",
    "return_sampling_mask",
];

#[derive(Serialize)]
struct Assistant<'a> {
    role: &'static str,
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Call<'a>>,
}

#[derive(Serialize)]
struct Call<'a> {
    id: &'a str,
    r#type: &'static str,
    function: Function<'a>,
}

#[derive(Serialize)]
struct Function<'a> {
    name: &'a str,
    arguments: &'a str,
}

#[derive(Serialize)]
struct Next<'a> {
    role: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_call_id: Option<&'a str>,
    content: &'static str,
}

/// The body that warms the turn after `turn`, whose answer was `reply`; none where that cannot be known: another route than
/// chat, several answers, a prompt given as token ids, an answer that continues the client's own last message, an empty one.
///
/// `plan` steers it as it does a turn: priority (the lowest), the session's tag, the rank and a request id. Its `ask_usage`
/// has no effect; the answer is not streamed and tells its usage.
pub fn next_turn_body(turn: &Turn, reply: &Reply, plan: &UpstreamPlan<'_>) -> Option<Bytes> {
    if turn.route != Route::Chat || turn.n != 1 {
        return None;
    }
    if turn.members.value("input_ids").is_some() || turn.members.truthy("continue_final_message") {
        return None;
    }
    if reply.content.is_none() && reply.tool_calls.is_empty() {
        return None;
    }
    let mut edits = turn.base_edits();
    for member in UNNEEDED {
        if turn.members.contains(member) {
            edits.remove(member);
        }
    }
    edits.set("messages", messages(turn, reply)?);
    edits.set("stream", "false");
    edits.set("max_tokens", "1");
    // `tool_choice` stays: `none` and a named tool change which tools are rendered, and some templates print `required`.
    turn.steer(plan, &mut edits);
    Some(rewrite(&turn.members, &edits))
}

/// The client's messages as they are, the answer, and an empty beginning of what must follow it.
fn messages(turn: &Turn, reply: &Reply) -> Option<String> {
    let raw = turn.members.raw("messages")?;
    let history = std::str::from_utf8(raw).ok()?.strip_prefix('[')?.strip_suffix(']')?.trim_end();
    let assistant = Assistant {
        role: "assistant",
        content: reply.content.as_deref(),
        tool_calls: reply
            .tool_calls
            .iter()
            .map(|call| Call {
                id: &call.id,
                r#type: "function",
                function: Function { name: &call.name, arguments: &call.arguments },
            })
            .collect(),
    };
    let mut next: Vec<Next<'_>> =
        reply.tool_calls.iter().map(|call| Next { role: "tool", tool_call_id: Some(&call.id), content: "" }).collect();
    if next.is_empty() {
        next.push(Next { role: "user", tool_call_id: None, content: "" });
    }
    let mut all = String::with_capacity(history.len() + 1024);
    all.push('[');
    all.push_str(history);
    if !history.trim_start().is_empty() {
        all.push(',');
    }
    all.push_str(&serde_json::to_string(&assistant).ok()?);
    for message in &next {
        all.push(',');
        all.push_str(&serde_json::to_string(message).ok()?);
    }
    all.push(']');
    Some(all)
}

#[cfg(test)]
#[path = "prefill_tests.rs"]
mod tests;
