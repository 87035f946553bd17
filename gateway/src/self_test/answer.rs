//! The answer that a filter is tried on: what a worker might say to the recorded request.

use crate::recorded_request::RecordedRequest;
use crate::workbench::filter::exchange_file::Message;
use bytes::Bytes;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue};
use serde_json::{Value, json};
use turnstile_fleet::route::Route;

/// An answer in the form that the request asks for: one JSON text, or events where it says `"stream": true`.
pub fn sample(request: &RecordedRequest, body: &Value) -> Message {
    let model = body["model"].as_str().unwrap_or("self-test");
    if body["stream"] == true
        && let Some(events) = events(request.route, model)
    {
        let headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"))]);
        return Message { headers, pieces: events.into_iter().map(Bytes::from).collect(), trailers: HeaderMap::new() };
    }
    let text = whole(request.route, model).to_string();
    let headers = HeaderMap::from_iter([
        (CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (CONTENT_LENGTH, HeaderValue::from(text.len())),
    ]);
    Message { headers, pieces: vec![text.into()], trailers: HeaderMap::new() }
}

fn whole(route: Route, model: &str) -> Value {
    let usage = json!({"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2});
    match route {
        Route::Chat => json!({
            "id": "self-test", "object": "chat.completion", "created": 0, "model": model,
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
            "usage": usage,
        }),
        Route::Completions => json!({
            "id": "self-test", "object": "text_completion", "created": 0, "model": model,
            "choices": [{"index": 0, "text": "ok", "finish_reason": "stop"}], "usage": usage,
        }),
        Route::Generate => json!({
            "text": "ok",
            "meta_info": {
                "id": "self-test", "finish_reason": {"type": "stop"}, "prompt_tokens": 1, "completion_tokens": 1,
            },
        }),
        Route::Responses => json!({
            "id": "self-test", "object": "response", "created_at": 0, "status": "completed", "model": model,
            "output": [{
                "id": "self-test", "type": "message", "status": "completed", "role": "assistant",
                "content": [{"type": "output_text", "text": "ok", "annotations": []}],
            }],
            "usage": {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2},
        }),
        Route::Messages => json!({
            "id": "self-test", "type": "message", "role": "assistant", "model": model,
            "content": [{"type": "text", "text": "ok"}], "stop_reason": "end_turn", "stop_sequence": null,
            "usage": {"input_tokens": 1, "output_tokens": 1},
        }),
        Route::CountTokens => json!({"input_tokens": 1}),
        Route::Embeddings => json!({
            "object": "list", "model": model, "data": [{"object": "embedding", "index": 0, "embedding": [0.5]}],
            "usage": {"prompt_tokens": 1, "total_tokens": 1},
        }),
        Route::Rerank => json!([{"index": 0, "score": 0.5}]),
        Route::Score => json!({"object": "scoring", "model": model, "scores": [[0.5]]}),
        Route::Tokenize => json!({"tokens": [1], "count": 1, "max_model_len": 1}),
        Route::Detokenize => json!({"text": "ok"}),
    }
}

/// The same as events, for the routes that stream.
fn events(route: Route, model: &str) -> Option<Vec<String>> {
    let chunk = |object: &str, choice: Value| {
        let chunk = json!({"id": "self-test", "object": object, "created": 0, "model": model, "choices": [choice]});
        format!("data: {chunk}\n\n")
    };
    let done = || "data: [DONE]\n\n".to_owned();
    let named = |event: Value| format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap_or_default());
    Some(match route {
        Route::Chat => {
            let delta = json!({"role": "assistant", "content": "ok"});
            let first = json!({"index": 0, "delta": delta, "finish_reason": null});
            let last = json!({"index": 0, "delta": {}, "finish_reason": "stop"});
            let object = "chat.completion.chunk";
            vec![chunk(object, first), chunk(object, last), done()]
        }
        Route::Completions => {
            let choice = json!({"index": 0, "text": "ok", "finish_reason": "stop"});
            vec![chunk("text_completion", choice), done()]
        }
        Route::Generate => vec![format!("data: {}\n\n", whole(route, model)), done()],
        Route::Responses => {
            let created = json!({"id": "self-test", "object": "response", "status": "in_progress", "output": []});
            let delta = json!({
                "type": "response.output_text.delta", "item_id": "self-test", "output_index": 0, "content_index": 0,
                "delta": "ok",
            });
            vec![
                named(json!({"type": "response.created", "response": created})),
                named(delta),
                named(json!({"type": "response.completed", "response": whole(route, model)})),
            ]
        }
        Route::Messages => {
            let mut message = whole(route, model);
            message["content"] = json!([]);
            message["stop_reason"] = Value::Null;
            let text = json!({"type": "text", "text": ""});
            let delta = json!({"type": "text_delta", "text": "ok"});
            vec![
                named(json!({"type": "message_start", "message": message})),
                named(json!({"type": "content_block_start", "index": 0, "content_block": text})),
                named(json!({"type": "content_block_delta", "index": 0, "delta": delta})),
                named(json!({"type": "content_block_stop", "index": 0})),
                named(json!({
                    "type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": null},
                    "usage": {"output_tokens": 1},
                })),
                named(json!({"type": "message_stop"})),
            ]
        }
        _ => return None,
    })
}
