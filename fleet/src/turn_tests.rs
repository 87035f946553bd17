#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use http::HeaderValue;

use crate::steering::SteeringOptions;

use super::*;

fn options() -> UnderstandOptions {
    UnderstandOptions {
        identity: IdentityOptions::new(7),
        prefix: PrefixOptions::new(64, 1000, 7),
        steering: SteeringOptions::default(),
    }
}

fn turn_with(route: Route, body: &str, list: &[(&'static str, &str)]) -> Result<Turn, BodyError> {
    let mut headers = HeaderMap::new();
    for (name, value) in list {
        headers.append(*name, HeaderValue::from_str(value).unwrap());
    }
    understand(route, &headers, Bytes::copy_from_slice(body.as_bytes()), &options())
}

fn turn(route: Route, body: &str) -> Turn {
    turn_with(route, body, &[]).unwrap()
}

fn sent(turn: &Turn, plan: &UpstreamPlan<'_>) -> String {
    String::from_utf8(turn.upstream_body(plan).joined().to_vec()).unwrap()
}

const FULL: UpstreamPlan<'static> = UpstreamPlan {
    rid: Some("r-1"),
    priority: Some(-5),
    session_id: Some("tag"),
    session_params_id: None,
    dp_rank: Some(1),
    ask_usage: false,
};

#[test]
fn a_turn_knows_what_was_asked() {
    let turn = turn(
        Route::Chat,
        r#"{"model":"m","stream":true,"n":2,"max_tokens":7,"max_completion_tokens":9,"messages":[{"role":"user","content":"hi"}],
            "stream_options":{"include_usage":true},"return_cached_tokens_details":true,"nvext":{"x":1}}"#,
    );
    assert_eq!(turn.model.as_deref(), Some("m"));
    assert!(turn.stream && turn.asked_usage && turn.asked_cached_details);
    assert_eq!((turn.n, turn.max_tokens), (2, Some(9)));
    assert_eq!(turn.unknown_hint_keys.names, ["nvext.x"]);
}

#[test]
fn limits_are_found_where_each_route_has_them() {
    let generate = turn(Route::Generate, r#"{"text":"x","sampling_params":{"max_new_tokens":5,"n":3}}"#);
    assert_eq!((generate.max_tokens, generate.n), (Some(5), 3));
    assert_eq!(turn(Route::Responses, r#"{"max_output_tokens":6}"#).max_tokens, Some(6));
    assert_eq!(turn(Route::Messages, r#"{"max_tokens":8}"#).max_tokens, Some(8));
    assert_eq!(turn(Route::Chat, r#"{"max_tokens":-1,"n":0}"#).max_tokens, None);
    assert_eq!(turn(Route::Chat, r#"{"n":0}"#).n, 1);
}

#[test]
fn a_session_id_longer_than_configured_is_refused_by_name() {
    let sessions = turnstile_config::Sessions { id_max_bytes: 16, ..turnstile_config::Sessions::default() };
    let options = UnderstandOptions { identity: IdentityOptions::from_config(&sessions, 7), ..options() };
    let read = |id: &str| {
        let body = format!(r#"{{"nvext":{{"session_control":{{"session_id":"{id}"}}}}}}"#);
        understand(Route::Chat, &HeaderMap::new(), Bytes::from(body), &options)
    };
    assert_eq!(read("0123456789abcdef").unwrap().identity.session.unwrap().text, "0123456789abcdef");
    assert_eq!(read("0123456789abcdefg").unwrap_err().field, "nvext.session_control.session_id");
}

#[test]
fn a_model_that_is_no_string_is_refused_and_none_is_allowed() {
    assert_eq!(turn_with(Route::Chat, r#"{"model":5}"#, &[]).unwrap_err().field, "model");
    assert_eq!(turn(Route::Chat, r#"{"model":null}"#).model, None);
    assert_eq!(turn(Route::Chat, "{}").model, None);
}

#[test]
fn an_action_needs_a_session_from_somewhere() {
    let body = r#"{"nvext":{"session_control":{"action":"open"}}}"#;
    assert_eq!(turn_with(Route::Chat, body, &[]).unwrap_err().field, "nvext.session_control.session_id");
    let turn = turn_with(Route::Chat, body, &[("x-dynamo-session-id", "s")]).unwrap();
    assert_eq!(turn.identity.session.unwrap().text, "s");
}

#[test]
fn prompt_tokens_follow_the_size_of_the_prompt() {
    let turn = turn(Route::Completions, &format!("{{\"prompt\":\"{}\"}}", "x".repeat(399)));
    assert_eq!(turn.prompt_tokens(4.0), 100);
    assert_eq!(turn.prompt_tokens(0.0), 4000);
    assert_eq!(turn.prompt_tokens(f64::NAN), 4000);
}

#[test]
fn nvext_and_steering_members_never_reach_the_worker() {
    let body = concat!(
        r#"{"rid":"x","model":"m","messages":[],"priority":1,"session_id":"a","session_params":{"id":"b"},"#,
        r#""routed_dp_rank":3,"data_parallel_rank":3,"disagg_prefill_dp_rank":1,"bootstrap_host":"h","bootstrap_port":1,"#,
        r#""bootstrap_room":2,"kv_hints":{},"http_worker_ipc":"p","nvext":{},"temperature":0.50}"#
    );
    let turn = turn(Route::Chat, body);
    assert_eq!(sent(&turn, &UpstreamPlan::default()), r#"{"model":"m","messages":[],"temperature":0.50}"#);
}

#[test]
fn each_route_gets_of_the_plan_what_it_takes() {
    let with = |route, body: &str| sent(&turn(route, body), &FULL);
    let common = r#","priority":-5,"session_id":"tag","routed_dp_rank":1}"#;
    assert_eq!(with(Route::Chat, r#"{"a":1}"#), format!(r#"{{"a":1,"rid":"r-1"{common}"#));
    assert_eq!(with(Route::Completions, r#"{"a":1}"#), format!(r#"{{"a":1,"rid":"r-1"{common}"#));
    assert_eq!(with(Route::Generate, r#"{"a":1}"#), format!(r#"{{"a":1,"rid":"r-1"{common}"#));
    assert_eq!(
        with(Route::Responses, r#"{"request_id":"mine"}"#),
        r#"{"request_id":"r-1","session_id":"tag","routed_dp_rank":1}"#
    );
    assert_eq!(with(Route::Messages, "{}"), r#"{"routed_dp_rank":1}"#);
    assert_eq!(with(Route::Embeddings, "{}"), r#"{"rid":"r-1","priority":-5}"#);
    assert_eq!(with(Route::Tokenize, r#"{"prompt":"x"}"#), r#"{"prompt":"x"}"#);
}

#[test]
fn a_streaming_session_excludes_the_tag_and_exists_only_on_generate() {
    let plan = UpstreamPlan { session_params_id: Some("s\"1"), session_id: Some("tag"), ..UpstreamPlan::default() };
    let mine = r#"{"text":"x","session_params":null}"#;
    assert_eq!(sent(&turn(Route::Generate, mine), &plan), r#"{"text":"x","session_params":{"id":"s\"1"}}"#);
    assert_eq!(sent(&turn(Route::Generate, mine), &UpstreamPlan::default()), r#"{"text":"x"}"#);
    assert_eq!(sent(&turn(Route::Chat, "{}"), &plan), r#"{"session_id":"tag"}"#);
}

#[test]
fn usage_is_asked_for_only_where_it_is_not_told_anyway() {
    let ask = UpstreamPlan { ask_usage: true, ..UpstreamPlan::default() };
    let with = |route, body: &str| sent(&turn(route, body), &ask);
    let details = r#""return_cached_tokens_details":true"#;
    assert_eq!(
        with(Route::Chat, r#"{"stream":true}"#),
        format!(r#"{{"stream":true,"stream_options":{{"include_usage":true}},{details}}}"#)
    );
    assert_eq!(with(Route::Chat, r#"{"stream":false}"#), format!(r#"{{"stream":false,{details}}}"#));
    assert_eq!(
        with(Route::Completions, r#"{"stream":true,"stream_options":{"continuous_usage_stats": true}}"#),
        format!(
            r#"{{"stream":true,"stream_options":{{"continuous_usage_stats": true,"include_usage":true}},{details}}}"#
        )
    );
    assert_eq!(
        with(Route::Chat, r#"{"stream":true,"stream_options":{"include_usage":false}}"#),
        format!(r#"{{"stream":true,"stream_options":{{"include_usage":true}},{details}}}"#)
    );
    let asked = r#"{"stream":true,"stream_options":{"include_usage":true},"return_cached_tokens_details":true}"#;
    assert_eq!(with(Route::Chat, asked), asked);
    for route in [Route::Generate, Route::Responses, Route::Messages] {
        assert_eq!(with(route, r#"{"stream":true}"#), r#"{"stream":true}"#);
    }
}

#[test]
fn only_what_we_asked_for_is_taken_out_of_the_answer() {
    let ask = UpstreamPlan { ask_usage: true, ..UpstreamPlan::default() };
    let flags = |route, body: &str, plan: &UpstreamPlan<'_>| {
        let options = turn(route, body).observe_options(plan, false);
        (options.strip_usage, options.strip_cached_details, options.cached_details_asked)
    };
    assert_eq!(flags(Route::Chat, r#"{"stream":true}"#, &ask), (true, true, true));
    assert_eq!(flags(Route::Chat, "{}", &ask), (false, true, true));
    assert_eq!(flags(Route::Chat, r#"{"stream":true}"#, &UpstreamPlan::default()), (false, false, false));
    let asked = r#"{"stream":true,"stream_options":{"include_usage":true},"return_cached_tokens_details":true}"#;
    assert_eq!(flags(Route::Chat, asked, &ask), (false, false, true));
    assert_eq!(flags(Route::Generate, r#"{"stream":true}"#, &ask), (false, false, false));
    // Options that the worker will refuse are left to it.
    let broken = r#"{"stream":true,"stream_options":[1]}"#;
    assert_eq!(flags(Route::Chat, broken, &ask), (false, true, true));
    assert!(sent(&turn(Route::Chat, broken), &ask).contains("\"stream_options\":[1]"));
}

#[test]
fn a_body_with_nothing_of_ours_is_passed_as_the_same_buffer() {
    let turn = turn(Route::Chat, r#"{"model":"m","messages":[]}"#);
    assert_eq!(turn.upstream_body(&UpstreamPlan::default()).joined().as_ptr(), turn.body.as_ptr());
}
