//! The radix cache, and sessions as tags on it.

use crate::{
    client::{get, post},
    recorded::{check, check_cached},
    sessions::streaming,
    worker,
};
use serde_json::{Value, json};
use turnstile_sim::{Eviction, SimConfig, SimWorker};

/// 500 tokens that no other letter shares.
async fn use_prompt(worker: &SimWorker, letter: u32, more: Value) -> u64 {
    let ids: Vec<u32> = (0..500).map(|place| 600 + letter * 1000 + place).collect();
    let mut body = json!({"input_ids": ids, "sampling_params": {"max_new_tokens": 2, "ignore_eos": true}});
    for (key, value) in more.as_object().unwrap() {
        body[key] = value.clone();
    }
    let answer = post(worker, "/generate", body).await;
    answer.json()["meta_info"]["cached_tokens"].as_u64().unwrap_or_else(|| panic!("{}", answer.text()))
}

fn small(config: &mut SimConfig) {
    config.max_total_tokens = 2000;
    config.enable_session_radix_cache = true;
}

#[tokio::test]
async fn fact_70_at_most_all_but_one_token_are_reused() {
    let worker = worker(|_| ()).await;
    assert_eq!(use_prompt(&worker, 0, json!({})).await, 0);
    assert_eq!(use_prompt(&worker, 0, json!({})).await, 499);
}

#[tokio::test]
async fn fact_70_only_whole_pages_are_reused() {
    let worker = worker(|config| config.page_size = 16).await;
    use_prompt(&worker, 0, json!({})).await;
    assert_eq!(use_prompt(&worker, 0, json!({})).await, 496);
}

#[tokio::test]
async fn salts_and_keys_share_nothing() {
    let worker = worker(|_| ()).await;
    for more in [json!({}), json!({"cache_salt": "a"}), json!({"cache_salt": "b"}), json!({"extra_key": "a"})] {
        assert_eq!(use_prompt(&worker, 0, more.clone()).await, 0, "{more}");
        assert_eq!(use_prompt(&worker, 0, more.clone()).await, 499, "{more}");
    }
    assert_eq!(use_prompt(&worker, 0, json!({"cache_salt": ""})).await, 499);
}

#[tokio::test]
async fn a_tag_protects_until_its_close() {
    let worker = worker(small).await;
    use_prompt(&worker, 0, json!({"session_id": "s"})).await;
    use_prompt(&worker, 1, json!({})).await;
    for letter in 2..5 {
        use_prompt(&worker, letter, json!({})).await;
    }
    assert_eq!(use_prompt(&worker, 0, json!({"session_id": "s"})).await, 499);
    // A close only ends the protection.
    assert_eq!(post(&worker, "/close_session", json!({"session_id": "s"})).await.status, 200);
    assert_eq!(use_prompt(&worker, 0, json!({})).await, 499);
    for letter in 5..9 {
        use_prompt(&worker, letter, json!({})).await;
    }
    assert_eq!(use_prompt(&worker, 0, json!({})).await, 0);
}

#[tokio::test]
async fn tags_do_not_pin() {
    let worker = worker(small).await;
    for letter in 0..6 {
        use_prompt(&worker, letter, json!({"session_id": format!("s{letter}")})).await;
    }
    assert_eq!(use_prompt(&worker, 5, json!({})).await, 499);
}

#[tokio::test]
async fn a_tag_and_an_opened_session_may_have_one_name() {
    let worker = worker(small).await;
    use_prompt(&worker, 0, json!({"session_id": "s"})).await;
    let open = json!({"capacity_of_str_len": 1, "session_id": "s"});
    assert_eq!(post(&worker, "/open_session", open).await.status, 200);
    assert_eq!(use_prompt(&worker, 0, json!({"session_id": "s"})).await, 499);
}

#[tokio::test]
async fn priority_eviction_drops_the_lowest_first() {
    let worker = worker(|config| {
        config.max_total_tokens = 2000;
        config.eviction = Eviction::Priority;
        config.enable_priority_scheduling = true;
    })
    .await;
    use_prompt(&worker, 0, json!({"priority": 10})).await;
    use_prompt(&worker, 1, json!({"priority": 0})).await;
    for letter in 2..5 {
        use_prompt(&worker, letter, json!({"priority": 5})).await;
    }
    assert_eq!(use_prompt(&worker, 0, json!({"priority": 10})).await, 499);
    assert_eq!(use_prompt(&worker, 1, json!({"priority": 0})).await, 0);
}

#[tokio::test]
async fn a_conversation_finds_its_turns_again() {
    let worker = worker(|config| config.enable_cache_report = true).await;
    let mut messages = vec![json!({"role": "user", "content": "Tell me something long about rivers and bridges."})];
    let mut last_total = 0;
    for turn in 0..4 {
        let body = json!({"model": "tiny", "messages": messages, "session_id": "s"});
        let answer = post(&worker, "/v1/chat/completions", body).await.json();
        let usage = &answer["usage"];
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        if turn > 0 {
            assert_eq!(cached, last_total - 1, "all of the last turn but its end");
        }
        last_total = usage["total_tokens"].as_u64().unwrap();
        messages.push(answer["choices"][0]["message"].clone());
        messages.push(json!({"role": "user", "content": "Go on."}));
    }
}

#[tokio::test]
async fn reasoning_is_lost_to_the_next_turn_unless_it_is_warmed() {
    let worker = worker(|config| {
        config.enable_cache_report = true;
        config.reasoning = true;
    })
    .await;
    let cached = async |messages: &[Value], max_tokens: Value| {
        let body = json!({"model": "tiny", "messages": messages, "max_tokens": max_tokens});
        let answer = post(&worker, "/v1/chat/completions", body).await.json();
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        (cached, answer["choices"][0]["message"].clone())
    };
    let follow_up = async |name: &str, warm: bool| {
        let mut messages = vec![json!({"role": "user", "content": format!("[[sim:think=40]] {name}")})];
        let (_, message) = cached(&messages, Value::Null).await;
        messages.push(message);
        messages.push(json!({"role": "user", "content": ""}));
        if warm {
            cached(&messages, json!(1)).await;
        }
        messages.pop();
        messages.push(json!({"role": "user", "content": "next"}));
        cached(&messages, Value::Null).await.0
    };
    let (cold, warm) = (follow_up("a", false).await, follow_up("b", true).await);
    assert!(warm > cold + 20, "{cold} {warm}");
}

#[tokio::test]
async fn fact_21_a_tag_and_a_session_exclude_each_other() {
    let worker = worker(streaming).await;
    check(&worker, "session_id_and_params", &[]).await;
}

#[tokio::test]
async fn fact_22_session_params_are_nothing_to_chat_and_completions() {
    let worker = worker(|config| {
        streaming(config);
        config.enable_cache_report = true;
    })
    .await;
    check_cached(&worker, "completions_session_params_ignored", &[]).await;
    for params in [json!({"id": "never opened"}), json!({"bogus": 1}), json!({}), json!({"id": "s", "replace": true})] {
        let chat = json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "session_params": params});
        assert_eq!(post(&worker, "/v1/chat/completions", chat).await.status, 200, "{params}");
        let completion = json!({"model": "tiny", "prompt": "hi", "session_params": params});
        assert_eq!(post(&worker, "/v1/completions", completion).await.status, 200, "{params}");
    }
    assert_eq!(get(&worker, "/_sim/state").await.json()["sessions"], 0);
}

#[tokio::test]
async fn fact_23_a_session_id_on_chat_changes_no_output() {
    for tags in [false, true] {
        let worker = worker(|config| {
            config.enable_session_radix_cache = tags;
            config.enable_cache_report = true;
            config.reasoning = true;
        })
        .await;
        check(&worker, "chat_session_id", &[]).await;
        let chat = |more: Value| {
            let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "hello"}]});
            body["session_id"] = more;
            body
        };
        let plain = post(&worker, "/v1/chat/completions", chat(Value::Null)).await.json();
        let tagged = post(&worker, "/v1/chat/completions", chat(json!("another"))).await.json();
        assert_eq!(plain["choices"][0]["message"], tagged["choices"][0]["message"]);
        assert_eq!(get(&worker, "/_sim/state").await.json()["tags"], if tags { 2 } else { 0 });
    }
}
