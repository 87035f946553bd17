//! Probes, model and server facts, loads, the tokenizer.

use super::{
    fields, frontend,
    reply::{self, Body},
    validate::{self, Endpoint, Flaw},
};
use crate::{
    config::{Eviction, Frontend},
    engine::Load,
    pytext::{repr, repr_str},
    server::{Shared, unix_us},
    template, tokenizer,
};
use hyper::{Response, StatusCode, http::request::Parts};
use serde_json::{Map, Value, json};
use std::{
    fmt::Write as _,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

/// Time that a health probe takes at least, in seconds.
const HEALTH_S: f64 = 1.0;

/// Time after which a health probe of a paused engine gives up, in seconds.
const HEALTH_LIMIT_S: f64 = 20.0;

/// The tokenizer's own limit, which `/tokenize` reports instead of the context length.
const TOKENIZER_MAX_LEN: usize = 131_072;

fn up(shared: &Shared) -> bool {
    let life = shared.life();
    life.warm_at <= Instant::now() && !life.draining.load(Ordering::Relaxed)
}

/// `/health` and `/health_generate`: a generation of one token, never faster than a second; a wedged pool passes.
pub(super) async fn health(shared: &Arc<Shared>) -> Response<Body> {
    if !up(shared) {
        return reply::empty(StatusCode::SERVICE_UNAVAILABLE);
    }
    if shared.life().paused.load(Ordering::Relaxed) {
        tokio::time::sleep(shared.driver().span(HEALTH_LIMIT_S)).await;
        return reply::empty(StatusCode::SERVICE_UNAVAILABLE);
    }
    tokio::time::sleep(shared.driver().span(HEALTH_S)).await;
    reply::empty(StatusCode::OK)
}

/// `/ready`: a flag, told at once.
pub(super) fn ready(shared: &Shared) -> Response<Body> {
    let ready = up(shared) && !shared.life().paused.load(Ordering::Relaxed);
    reply::empty(if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE })
}

fn card(shared: &Shared) -> Value {
    json!({
        "id": shared.config.model, "object": "model", "created": unix_us() / 1_000_000, "owned_by": "sglang",
        "root": shared.config.model, "parent": null, "max_model_len": shared.config.context_length,
    })
}

/// `/v1/models`
pub(super) fn models(shared: &Shared) -> Response<Body> {
    reply::json_value(StatusCode::OK, &json!({"object": "list", "data": [card(shared)]}))
}

/// `/v1/models/{id}`
pub(super) fn model(shared: &Shared, id: &str) -> Response<Body> {
    if id == shared.config.model {
        return reply::json_value(StatusCode::OK, &card(shared));
    }
    let body = json!({"error": {
        "message": format!("The model '{id}' does not exist"), "type": "invalid_request_error", "param": "model",
        "code": "model_not_found",
    }});
    reply::json_value(StatusCode::NOT_FOUND, &body)
}

fn model_path(shared: &Shared) -> String {
    format!("/models/{}", shared.config.model)
}

/// `/model_info`
pub(super) fn model_info(shared: &Shared) -> Response<Body> {
    let body = json!({
        "model_path": model_path(shared),
        "served_model_name": shared.config.model,
        "tokenizer_path": model_path(shared),
        "is_generation": true,
        "preferred_sampling_params": null,
        "weight_version": "default",
        "load_format": "dummy",
        "reasoning_parser": shared.config.reasoning.then_some("qwen3"),
        "tool_call_parser": shared.config.tool_call_parser.then_some("qwen"),
        "disaggregation_mode": "null",
        "has_image_understanding": false,
        "has_audio_understanding": false,
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
    });
    reply::json_value(StatusCode::OK, &body)
}

/// `/server_info`: the flags, and, as in the real server, the keys in clear.
pub(super) fn server_info(shared: &Shared) -> Response<Body> {
    let config = &shared.config;
    let eviction = match config.eviction {
        Eviction::Lru => "lru",
        Eviction::Priority => "priority",
    };
    let internal: Vec<Value> = shared
        .driver()
        .loads()
        .1
        .iter()
        .map(|load| {
            json!({
                "effective_max_running_requests_per_dp": config.max_running_requests,
                "last_gen_throughput": load.gen_throughput,
                "memory_usage": {"weight": 0.0, "kvcache": 0.0, "token_capacity": config.max_total_tokens},
            })
        })
        .collect();
    let mut body = json!({
        "model_path": model_path(shared),
        "tokenizer_path": model_path(shared),
        "skip_tokenizer_init": false,
        "context_length": config.context_length,
        "is_embedding": false,
        "max_running_requests": config.max_running_requests,
        "max_queued_requests": config.max_queued_requests,
        "max_total_tokens": config.max_total_tokens,
        "chunked_prefill_size": config.chunked_prefill_size,
        "schedule_policy": "fcfs",
        "enable_priority_scheduling": config.enable_priority_scheduling,
        "disable_priority_preemption": false,
        "default_priority_value": null,
        "abort_on_priority_when_disabled": config.abort_on_priority_when_disabled,
        "schedule_low_priority_values_first": false,
        "priority_scheduling_preemption_threshold": 10,
        "page_size": config.page_size,
        "radix_eviction_policy": eviction,
        "disable_radix_cache": false,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": config.dp_size.max(1),
        "load_balance_method": "round_robin",
        "device": "sim",
    });
    let rest = json!({
        "host": shared.addr.ip().to_string(),
        "port": shared.addr.port(),
        "api_key": config.api_key,
        "admin_api_key": config.admin_api_key,
        "served_model_name": config.model,
        "weight_version": "default",
        "enable_cache_report": config.enable_cache_report,
        "reasoning_parser": config.reasoning.then_some("qwen3"),
        "tool_call_parser": config.tool_call_parser.then_some("qwen"),
        "stream_response_default_include_usage": config.stream_response_default_include_usage,
        "incremental_streaming_output": config.incremental_streaming_output,
        "enable_streaming_session": config.enable_streaming_session,
        "enable_session_radix_cache": config.enable_session_radix_cache,
        "enable_metrics": config.enable_metrics,
        "kv_events_config": null,
        "disaggregation_mode": "null",
        "enable_response_store": false,
        "launch_command": launch_command(shared),
        "status": "ready",
        "max_total_num_tokens": config.max_total_tokens,
        "max_req_input_len": config.max_input_tokens(),
        "kv_events": null,
        "internal_states": internal,
        "version": config.release.text(),
        "frontend": match config.frontend { Frontend::Python => "python", Frontend::Rust => "rust" },
    });
    if let (Some(body), Value::Object(rest)) = (body.as_object_mut(), rest) {
        body.extend(rest);
    }
    reply::json_value(StatusCode::OK, &body)
}

fn launch_command(shared: &Shared) -> String {
    let config = &shared.config;
    let mut command = format!("--model-path {} --port {}", model_path(shared), shared.addr.port());
    for (set, name) in [
        (config.enable_streaming_session, "--enable-streaming-session"),
        (config.enable_session_radix_cache, "--enable-session-radix-cache"),
        (config.enable_priority_scheduling, "--enable-priority-scheduling"),
        (config.enable_cache_report, "--enable-cache-report"),
    ] {
        if set {
            command.push(' ');
            command.push_str(name);
        }
    }
    for (key, name) in [(&config.api_key, "--api-key"), (&config.admin_api_key, "--admin-api-key")] {
        if let Some(key) = key {
            let _ = write!(command, " {name} {key}");
        }
    }
    command
}

/// `/v1/loads`
pub(super) fn loads(shared: &Shared, query: &str) -> Response<Body> {
    const SECTIONS: [&str; 7] = ["core", "memory", "spec", "lora", "disagg", "queues", "all"];
    let parameter = |name: &str| query.split('&').filter_map(|pair| pair.split_once('=')).find(|(key, _)| *key == name);
    let wanted: Vec<String> = parameter("include")
        .map(|(_, list)| list.replace("%2C", ",").split(',').map(|section| section.trim().to_owned()).collect())
        .unwrap_or_else(|| vec!["all".to_owned()]);
    let unknown: Vec<&str> = wanted.iter().map(String::as_str).filter(|name| !SECTIONS.contains(name)).collect();
    if !unknown.is_empty() {
        return frontend::bad_sections(&shared.config, &unknown, &SECTIONS);
    }
    let only = parameter("dp_rank").and_then(|(_, rank)| rank.parse::<usize>().ok());
    let has = |section: &str| wanted.iter().any(|wanted| wanted == section || wanted == "all");
    let (published_us, ranks) = shared.driver().loads();
    let loads: Vec<Map<String, Value>> = ranks
        .iter()
        .enumerate()
        .filter(|(rank, _)| only.is_none_or(|only| only == *rank))
        .map(|(rank, load)| {
            let mut body = core_load(shared, rank, load, published_us);
            if has("memory") {
                let memory = json!({"weight_gb": 0.0, "kv_cache_gb": 0.0, "graph_gb": 0.0,
                    "token_capacity": shared.config.max_total_tokens});
                body.insert("memory".to_owned(), memory);
            }
            if has("disagg") {
                let disaggregation = json!({"mode": "null", "prefill_bootstrap_queue_reqs": 0,
                    "prefill_inflight_queue_reqs": 0, "decode_prealloc_queue_reqs": 0, "decode_transfer_queue_reqs": 0,
                    "decode_retracted_queue_reqs": 0, "kv_transfer_speed_gb_s": 0.0, "kv_transfer_latency_ms": 0.0});
                body.insert("disaggregation".to_owned(), disaggregation);
            }
            if has("queues") {
                let queues =
                    json!({"waiting": load.waiting, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0});
                body.insert("queues".to_owned(), queues);
            }
            body
        })
        .collect();
    if parameter("format").is_some_and(|(_, format)| format == "prometheus") {
        return reply::text(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", prometheus(&loads));
    }
    let body = json!({
        "timestamp": iso_time(unix_us()), "version": shared.config.release.text(), "accelerator": null, "num_accelerators": 1, "loads": loads,
    });
    reply::json_value(StatusCode::OK, &body)
}

/// `/get_load` of old releases.
pub(super) fn get_load(shared: &Shared) -> Response<Body> {
    let (published_us, ranks) = shared.driver().loads();
    let ranks = ranks.iter().enumerate().map(|(rank, load)| {
        json!({
            "dp_rank": rank,
            "num_reqs": load.running + load.waiting,
            "num_waiting_reqs": load.waiting,
            "num_tokens": load.used_tokens + load.waiting_uncached_tokens,
            "num_pending_tokens": load.waiting_uncached_tokens,
            "ts_tic": seconds(published_us),
        })
    });
    reply::json_value(StatusCode::OK, &ranks.collect())
}

#[expect(clippy::cast_precision_loss, reason = "a time needs no more")]
fn seconds(us: u64) -> f64 {
    us as f64 / 1e6
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
fn core_load(shared: &Shared, rank: usize, load: &Load, published_us: u64) -> Map<String, Value> {
    let capacity = shared.config.max_total_tokens;
    let round4 = |share: f64| (share * 1e4).round() / 1e4;
    let total = load.used_tokens + load.waiting_uncached_tokens;
    let body = json!({
        "timestamp": seconds(published_us),
        "dp_rank": rank,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_waiting_uncached_tokens": load.waiting_uncached_tokens,
        "num_used_tokens": load.used_tokens,
        "num_total_tokens": total,
        "num_active_tokens": total,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": capacity,
        "max_running_requests": shared.config.max_running_requests,
        "token_usage": round4(load.used_tokens as f64 / capacity.max(1) as f64),
        "gen_throughput": (load.gen_throughput * 100.0).round() / 100.0,
        "cache_hit_rate": round4(load.cache_hit_rate),
        "utilization": 0.0,
        "total_prefill_uncached_tokens": load.prefill_uncached_tokens,
        "total_prefill_busy_us": load.prefill_busy_us,
        "decode_moments": load.decode_moments,
    });
    match body {
        Value::Object(body) => body,
        _ => Map::new(),
    }
}

/// Every number of every rank, sections prefixed by their name.
fn prometheus(loads: &[Map<String, Value>]) -> String {
    let mut series: Vec<(String, Vec<String>)> = Vec::new();
    let mut add = |name: String, rank: &Value, value: &Value| {
        if !value.is_number() || name == "dp_rank" {
            return;
        }
        let line = format!("sglang_{name}{{dp_rank=\"{rank}\"}} {value}\n");
        match series.iter_mut().find(|(known, _)| *known == name) {
            Some((_, lines)) => lines.push(line),
            None => series.push((name, vec![line])),
        }
    };
    for load in loads {
        let rank = load.get("dp_rank").unwrap_or(&Value::Null);
        for (name, value) in load {
            match value {
                Value::Object(section) => {
                    let prefix = if name == "disaggregation" { "disagg" } else { name };
                    for (inner, value) in section {
                        add(format!("{prefix}_{inner}"), rank, value);
                    }
                }
                value if name != "max_running_requests" || value.is_number() => add(name.clone(), rank, value),
                _ => {}
            }
        }
    }
    series.into_iter().map(|(name, lines)| format!("# TYPE sglang_{name} gauge\n{}", lines.concat())).collect()
}

/// A time as `2026-01-31T23:59:59.000000+00:00`.
fn iso_time(unix_us: u64) -> String {
    let (seconds, micros) = (unix_us / 1_000_000, unix_us % 1_000_000);
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    // Days since 1970 to a date: count from the first of March of year 0, in eras of 400 years.
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (of_day / 3600, of_day % 3600 / 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}+00:00")
}

const TOKENIZE: Endpoint = Endpoint { path: "/tokenize", function: "openai_v1_tokenize", line: 1906 };
const DETOKENIZE: Endpoint = Endpoint { path: "/detokenize", function: "openai_v1_detokenize", line: 1924 };

/// `/tokenize`: a text, or a conversation rendered as for chat.
pub(super) fn tokenize(shared: &Shared, parts: &Parts, body: &[u8]) -> Response<Body> {
    let body = match validate::typed_object(TOKENIZE, &parts.headers, body) {
        Ok(body) => body,
        Err(error) => return error.flat(),
    };
    let tokens = match (body.get("prompt"), body.get("messages")) {
        (Some(Value::String(text)), None) => json!(tokenizer::encode(text)),
        (Some(Value::Array(texts)), None) => {
            texts.iter().map(|text| json!(tokenizer::encode(text.as_str().unwrap_or_default()))).collect()
        }
        (None, Some(Value::Array(messages))) => {
            let tools = body.get("tools").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
            let prompt = body.get("add_generation_prompt").and_then(Value::as_bool).unwrap_or(true);
            json!(tokenizer::encode(&template::render(messages, tools, prompt, shared.config.reasoning)))
        }
        _ => {
            let text = "Exactly one of 'prompt' or 'messages' must be provided.";
            let flaw = Flaw {
                kind: "value_error",
                place: vec![repr_str("body")],
                message: format!("Value error, {text}"),
                input: repr(&Value::Object(body.clone())),
                context: Some(format!("{{'error': ValueError(\"{text}\")}}")),
            };
            return fields::invalid(TOKENIZE, flaw);
        }
    };
    let counted = tokens.as_array().map_or(Value::Null, |list| match list.first() {
        Some(Value::Array(_)) => list.iter().map(|ids| json!(ids.as_array().map_or(0, Vec::len))).collect(),
        _ => json!(list.len()),
    });
    let body = json!({"tokens": tokens, "count": counted, "max_model_len": TOKENIZER_MAX_LEN});
    reply::json_value(StatusCode::OK, &body)
}

/// `/detokenize`
pub(super) fn detokenize(parts: &Parts, body: &[u8]) -> Response<Body> {
    let body = match validate::typed_object(DETOKENIZE, &parts.headers, body) {
        Ok(body) => body,
        Err(error) => return error.flat(),
    };
    let Some(tokens) = body.get("tokens") else {
        return fields::invalid(DETOKENIZE, Flaw::missing("tokens", &body));
    };
    match fields::ids(Some(tokens)) {
        Some(ids) => reply::json_value(StatusCode::OK, &json!({"text": tokenizer::decode(&ids)})),
        None => {
            let flaw = Flaw::at("list_type", "tokens", "Input should be a valid list", tokens);
            fields::invalid(DETOKENIZE, flaw)
        }
    }
}

/// Embeddings, rerank and the like, on a generation model.
pub(super) fn no_embedding() -> Response<Body> {
    let message = "This model does not appear to be an embedding model by default. Please add `--is-embedding` when \
                   launching the server or try another model.";
    reply::bad_request(message)
}

const SCORE: Endpoint = Endpoint { path: "/v1/score", function: "v1_score_request", line: 2030 };

/// `/v1/score`: every label gets the same share.
pub(super) fn score(parts: &Parts, body: &[u8]) -> Response<Body> {
    let body = match validate::typed_object(SCORE, &parts.headers, body) {
        Ok(body) => body,
        Err(error) => return error.flat(),
    };
    let items = body.get("items").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let labels = body.get("label_token_ids").and_then(Value::as_array).map_or(0, Vec::len);
    let query = tokenizer::encode(&fields::text(&body, "query").unwrap_or_default()).len();
    let prompt: usize =
        items.iter().map(|item| query + tokenizer::encode(item.as_str().unwrap_or_default()).len()).sum();
    let scores: Vec<Vec<f64>> = items.iter().map(|_| vec![1.0 / 1024.0; labels]).collect();
    let body = json!({
        "scores": scores, "pooled_hidden_states": null, "token_logprobs": null,
        "model": fields::text(&body, "model").unwrap_or_default(),
        "usage": {
            "prompt_tokens": prompt, "total_tokens": prompt, "completion_tokens": 0, "prompt_tokens_details": null,
            "reasoning_tokens": 0, "completion_tokens_details": null,
        },
        "object": "scoring",
    });
    reply::json_value(StatusCode::OK, &body)
}
