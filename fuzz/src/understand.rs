//! Whole requests.

use bytes::Bytes;
use turnstile_fleet::body::{Edits, Members, rewrite, scan};
use turnstile_fleet::hints::MAX_TIMEOUT_S;
use turnstile_fleet::identity::IdentityOptions;
use turnstile_fleet::prefix::PrefixOptions;
use turnstile_fleet::route::Route;
use turnstile_fleet::steering::SteeringOptions;
use turnstile_fleet::turn::{Turn, UnderstandOptions, UpstreamPlan, understand as read};

use super::input::request;
use super::model;

const BLOCK_BYTES: usize = 64;
const MAX_BLOCKS: usize = 200;

/// A request is understood or refused with the member's name; its body for a worker keeps what is not ours; a prompt that
/// grows at its end keeps the hashes it had. The input is a request as text.
pub fn understand(data: &[u8]) {
    let (route, headers, body) = request(data);
    let options = UnderstandOptions {
        identity: IdentityOptions::new(7),
        prefix: PrefixOptions::new(BLOCK_BYTES, MAX_BLOCKS, 7),
        steering: SteeringOptions::default(),
    };
    let body = Bytes::copy_from_slice(body);
    let turn = match read(route, &headers, body.clone(), &options) {
        Ok(turn) => turn,
        Err(error) => {
            assert!(!error.message.is_empty() && error.message.len() < 300, "{error}");
            assert!(error.message.starts_with(&error.field), "{error}");
            return;
        }
    };
    assert!(turn.n >= 1);
    assert!(turn.hints.latency_sensitivity.is_none_or(|s| s.is_finite() && s >= 0.0));
    assert!(turn.control.timeout_s.is_none_or(|s| s > 0.0 && s <= MAX_TIMEOUT_S));
    assert!(turn.unknown_hint_keys.names.len() <= 8);
    assert!(turn.prefix.blocks.len() <= MAX_BLOCKS.min(body.len() / BLOCK_BYTES + 1));
    assert!(turn.prefix.bytes <= body.len());
    for ratio in [0.0, 4.0, -1.0, f64::NAN, f64::INFINITY] {
        turn.prompt_tokens(ratio);
    }

    let nothing = UpstreamPlan::default();
    let everything = UpstreamPlan {
        rid: Some("rid-\"1\""),
        priority: Some(-3),
        session_id: Some("s"),
        session_params_id: Some("p"),
        dp_rank: Some(1),
        ask_usage: true,
    };
    let tagged = UpstreamPlan { session_params_id: None, ask_usage: false, ..everything };
    for plan in [nothing, tagged, everything] {
        worker_body(&turn, &plan);
    }
    if let Some(grown) = grown(route, &turn.members) {
        let grown = read(route, &headers, grown, &options).expect("one more message changes nothing else");
        assert!(grown.prefix.blocks.starts_with(&turn.prefix.blocks), "a longer prompt lost its beginning");
        assert!(grown.prefix.bytes > turn.prefix.bytes);
        if turn.identity.tree.is_some() || !turn.prefix.blocks.is_empty() {
            assert_eq!(grown.prefix.affinity_hash, turn.prefix.affinity_hash);
        }
    }
}

/// What a worker gets: nothing that steers it but what the plan says, and all else as the client wrote it.
fn worker_body(turn: &Turn, plan: &UpstreamPlan<'_>) {
    turn.observe_options(plan, true);
    let sent = turn.upstream_body(plan).joined();
    let sent = model::members(&sent).expect("a worker gets a JSON object");
    let steering = turn.steering_members();
    let asked = ["stream_options", "return_cached_tokens_details"];
    let ours = ["rid", "request_id", "priority", "session_id", "session_params", "routed_dp_rank"];
    for (index, member) in sent.iter().enumerate() {
        let key = member.key.as_str();
        assert_ne!(key, "nvext");
        if ["cache_salt", "extra_key"].contains(&key) {
            assert!(is_scoped(member.raw), "{key} reached the worker");
            continue;
        }
        if steering.contains(&key) || (ours.contains(&key) && !turn.members.contains(key)) {
            assert!(ours.contains(&key), "{key} reached the worker");
            assert_eq!(sent.iter().position(|other| other.key == key), Some(index), "{key} is there once");
            let value = match key {
                "rid" | "request_id" => plan.rid.map(|rid| serde_json::to_string(rid).expect("text")),
                "priority" => plan.priority.map(|priority| priority.to_string()),
                "session_id" => plan.session_id.map(|id| format!("{id:?}")),
                "session_params" => plan.session_params_id.map(|id| format!("{{\"id\":{id:?}}}")),
                _ => plan.dp_rank.map(|rank| rank.to_string()),
            };
            assert_eq!(Some(member.raw), value.as_deref(), "{key}");
        }
    }
    let not_ours = |key: &str| key != "nvext" && !steering.contains(&key) && !(plan.ask_usage && asked.contains(&key));
    let kept = |list: &[model::Member<'_>]| {
        let kept = list.iter().filter(|m| not_ours(&m.key) && turn.members.contains(&m.key));
        kept.map(|m| (m.key.clone(), m.raw.to_owned())).collect::<Vec<_>>()
    };
    let came = model::members(&turn.body).expect("it was understood");
    assert_eq!(kept(&sent), kept(&came));
}

/// A digest, a list of digests, or nothing in the place of one.
fn is_scoped(raw: &str) -> bool {
    let digest = |text: &str| text.is_empty() || (text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit()));
    match serde_json::from_str(raw) {
        Ok(serde_json::Value::String(text)) => digest(&text),
        Ok(serde_json::Value::Array(list)) => list.iter().all(|item| item.as_str().is_some_and(digest)),
        _ => false,
    }
}

/// The body with one thing more at the end of its prompt, if it has one that can grow.
fn grown(route: Route, members: &Members) -> Option<Bytes> {
    let ids = members.value("input_ids").is_some();
    let key = match route {
        Route::Chat | Route::Generate if ids => "input_ids",
        Route::Chat | Route::Messages | Route::CountTokens | Route::Tokenize => "messages",
        Route::Responses | Route::Embeddings => "input",
        Route::Completions => "prompt",
        Route::Generate => "text",
        Route::Rerank | Route::Score | Route::Detokenize => return None,
    };
    let raw = String::from_utf8(members.raw(key)?.to_vec()).expect("a body is UTF-8");
    let longer = if let Some(open) = raw.strip_suffix(']') {
        let open = open.trim_ascii_end();
        let comma = if open == "[" { "" } else { "," };
        format!("{open}{comma}{{\"role\":\"user\",\"content\":\"and then?\"}} ]")
    } else if let Some(open) = raw.strip_suffix('"') {
        format!("{open} and then?\"")
    } else {
        return None;
    };
    let grown = rewrite(members, Edits::new().set(key, longer));
    assert!(scan(&grown).is_ok());
    Some(grown)
}
