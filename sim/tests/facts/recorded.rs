//! The recorded exchanges, asked again.

use crate::{fixture::Fixture, worker};
use turnstile_sim::{SimConfig, SimWorker};

pub async fn check(worker: &SimWorker, name: &str, except: &[&str]) {
    let fixture = Fixture::read(name);
    fixture.compare(&fixture.ask(worker).await, except);
}

/// Asks twice, so that the second answer finds the prompt cached.
pub async fn check_cached(worker: &SimWorker, name: &str, except: &[&str]) {
    let fixture = Fixture::read(name);
    fixture.ask(worker).await;
    fixture.compare(&fixture.ask(worker).await, except);
}

fn stock(config: &mut SimConfig) {
    config.enable_cache_report = true;
    config.enable_streaming_session = true;
    config.enable_priority_scheduling = true;
}

#[tokio::test]
async fn chat_with_a_reasoning_parser() {
    let worker = worker(|config| {
        stock(config);
        config.reasoning = true;
    })
    .await;
    check(&worker, "chat_nonstream", &[]).await;
    check(&worker, "chat_nonstream_cached", &[]).await;
    for name in [
        "chat_stream",
        "chat_stream_usage",
        "chat_stream_continuous_usage",
        "chat_rid",
        "chat_session_id",
        "chat_session_id_and_params",
        "chat_session_params_ignored",
        "chat_unknown_fields",
        "chat_unknown_model",
        "chat_bad_content_type",
        "chat_bad_json",
        "chat_missing_messages",
        "chat_empty_messages",
        "chat_max_tokens_over",
        "chat_model_colon_adapter",
        "anthropic_messages",
        "anthropic_messages_stream",
        "anthropic_messages_bad",
        "anthropic_count_tokens",
        "responses_nonstream",
        "responses_stream",
        "responses_bad_priority",
        "responses_store_retrieve",
    ] {
        check(&worker, name, &[]).await;
    }
}

#[tokio::test]
async fn chat_without_a_reasoning_parser() {
    let worker = worker(stock).await;
    check_cached(&worker, "chat_bootstrap_on_unified", &[]).await;
    for name in [
        "chat_max_tokens_0",
        "chat_max_tokens_1",
        "chat_return_meta_info_stream",
        "chat_sum_over_window",
        "chat_cache_salt_list",
        "chat_rid_list",
        "chat_routed_dp_rank0",
        "chat_routed_dp_rank7",
        "chat_dp_rank_header",
        "chat_dp_rank_header_bad",
        "chat_data_parallel_rank_alias",
        "chat_tools_unknown",
        "chat_n2_rid",
        "chat_return_ids",
        "chat_return_ids_stream_framed",
        "priority_enabled_-5",
        "priority_enabled_0",
        "priority_enabled_10",
        "priority_enabled_1_5",
        "priority_enabled_4611686018427387904",
        "priority_enabled_7",
        "priority_enabled_9223372036854775808",
        "priority_enabled_None",
        "priority_enabled_True",
        "priority_enabled_x",
        "x_override_priority_ignored",
        "warm_neg",
    ] {
        check(&worker, name, &[]).await;
    }
    // A random model never ends by itself.
    check(&worker, "chat_tools_none", &["finish_reason", "matched_stop"]).await;
    check_cached(&worker, "chat_tools_required_stream", &["finish_reason"]).await;
    check_cached(&worker, "warm_max_completion_tokens_0", &[]).await;
}

#[tokio::test]
async fn chat_without_the_cache_report() {
    let worker = worker(|_| ()).await;
    check(&worker, "chat_no_cache_report", &[]).await;
    for name in [
        "chat_no_cache_report_flag",
        "chat_headers_echo",
        "chat_priority_when_disabled_default",
        "chat_priority_when_disabled_out_of_range",
        "anthropic_no_cache_report",
        "open_streaming_when_disabled",
        "open_plain_when_streaming_disabled",
        "metrics_disabled",
    ] {
        check(&worker, name, &[]).await;
    }
}

#[tokio::test]
async fn priority_refused_when_scheduling_is_off() {
    let worker = worker(|config| {
        config.abort_on_priority_when_disabled = true;
        config.stream_response_default_include_usage = true;
    })
    .await;
    for name in [
        "chat_priority_abort_when_disabled",
        "chat_priority_abort_when_disabled_stream",
        "chat_no_priority_ok",
        "chat_stream_default_usage",
        "generate_priority_abort_when_disabled",
    ] {
        check(&worker, name, &[]).await;
    }
}

#[tokio::test]
async fn completions_and_generate() {
    let worker = worker(stock).await;
    for name in ["completions_nonstream", "completions_session_params_ignored", "completions_stream"] {
        check_cached(&worker, name, &[]).await;
    }
    check(&worker, "completions_batch", &[]).await;
    check_cached(&worker, "generate_stream", &[]).await;
    for name in [
        "generate_bad_sampling_param",
        "generate_bad_type",
        "generate_empty",
        "generate_priority_str",
        "generate_sum_over_window",
        "generate_batch",
    ] {
        check(&worker, name, &[]).await;
    }
    check_cached(&worker, "generate_max_new_tokens_0", &[]).await;
}

#[tokio::test]
async fn sessions_and_controls() {
    let worker = worker(stock).await;
    for name in [
        "open_session_minimal",
        "open_session_named",
        "open_session_duplicate",
        "open_session_empty_id",
        "open_session_get_with_body",
        "open_session_missing_capacity",
        "open_session_bad_type",
        "open_session_unknown_field",
        "open_session_negative_timeout",
        "close_session_ok",
        "close_session_unknown",
        "close_session_missing_id",
        "abort_unknown_rid",
        "abort_empty",
        "flush_cache",
        "session_id_and_params",
        "session_unknown_id",
        "session_unknown_id_stream",
        "session_params_rid_only",
    ] {
        check(&worker, name, &["cached_tokens_details"]).await;
    }
}

#[tokio::test]
async fn facts_and_probes() {
    let worker = worker(stock).await;
    for name in [
        "health",
        "health_generate",
        "ready",
        "ping",
        "root",
        "v1_models",
        "v1_models_unknown",
        "v1_loads",
        "v1_loads_core",
        "v1_loads_bad_rank",
        "v1_loads_bad_section",
        "get_load",
        "unknown_path",
        "wrong_method",
        "tokenize",
        "tokenize_bad",
        "tokenize_chat",
        "detokenize",
        "embeddings_on_generation_model",
        "rerank_on_generation_model",
        "score",
    ] {
        check(&worker, name, &[]).await;
    }
}

#[tokio::test]
async fn keys() {
    let worker = worker(|config| {
        stock(config);
        config.api_key = Some("sk-user".to_owned());
        config.admin_api_key = Some("sk-admin".to_owned());
        config.dp_size = 2;
        config.enable_header_overrides = true;
    })
    .await;
    for name in [
        "auth_adminkey_chat",
        "auth_adminkey_flush",
        "auth_adminkey_open_session",
        "auth_badauth_chat",
        "auth_noauth_chat",
        "auth_noauth_health",
        "auth_noauth_models",
        "auth_noauth_options",
        "auth_noauth_ping",
        "auth_noauth_ready",
        "auth_noauth_unknown",
        "auth_noauth_v1_loads",
        "auth_userkey_abort",
        "auth_userkey_flush",
        "auth_userkey_open_session",
        "dp_override_header_bad",
        "dp_override_header_bad_chat",
        "dp_generate_routed_-1",
        "dp_generate_routed_2",
        "dp_loads",
    ] {
        check(&worker, name, &[]).await;
    }
}

#[tokio::test]
async fn wrong_bodies_and_plain_text() {
    let worker = worker(stock).await;
    for name in [
        "chat_bad_messages_type",
        "chat_truncated_json",
        "chat_array_body",
        "chat_empty_body",
        "anthropic_missing_messages",
        "anthropic_bad_json",
        "anthropic_count_missing",
        "responses_text",
        "responses_missing_input",
        "responses_bad_json",
        "generate_bad_json",
        "completions_missing_prompt",
        "open_session_bad_json",
        "abort_bad_type",
        "detokenize_missing",
    ] {
        check(&worker, name, &[]).await;
    }
    // Warm, so that the streams tell of cached tokens as the recorded ones do.
    for name in ["anthropic_text_stream", "responses_text_stream"] {
        check_cached(&worker, name, &[]).await;
    }
    check(&worker, "pause_ok", &[]).await;
    check(&worker, "continue_ok", &[]).await;
}
