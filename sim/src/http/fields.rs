//! Request fields that several endpoints share.

use super::{
    reply::{self, Body},
    validate::{self, Endpoint, Flaw},
};
use crate::{config::Frontend, engine::Request, output::Script, server::Shared, template, tokenizer};
use hyper::{HeaderMap, Response, StatusCode};
use serde_json::{Map, Value};
use xxhash_rust::xxh3::xxh3_64;

/// The answer to a request that is not taken.
pub(super) type Refused = Box<Response<Body>>;

/// What an OpenAI endpoint was asked for, apart from the prompt.
pub(super) struct Common {
    pub model: String,
    pub rid: Option<String>,
    pub priority: Option<i64>,
    pub session_id: Option<String>,
    pub namespace: u64,
    pub rank: Option<usize>,
    pub stream: bool,
    pub n: usize,
    pub include_usage: bool,
    pub continuous_usage: bool,
    pub cached_tokens_details: bool,
}

/// A truth value, false if absent.
pub(super) fn flag(body: &Map<String, Value>, field: &str) -> bool {
    body.get(field).and_then(Value::as_bool).unwrap_or_default()
}

/// A text, none if absent or no text.
pub(super) fn text(body: &Map<String, Value>, field: &str) -> Option<String> {
    body.get(field).and_then(Value::as_str).map(str::to_owned)
}

/// A number of tokens.
pub(super) fn count(body: &Map<String, Value>, field: &str) -> Option<i64> {
    body.get(field).and_then(Value::as_i64)
}

/// Stop strings, one or several.
pub(super) fn stops(value: Option<&Value>) -> Vec<String> {
    match value {
        Some(Value::String(stop)) => vec![stop.clone()],
        Some(Value::Array(stops)) => stops.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        _ => Vec::new(),
    }
}

/// Token ids.
pub(super) fn ids(value: Option<&Value>) -> Option<Vec<u32>> {
    let list = value?.as_array()?;
    list.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok())).collect()
}

/// The namespace of `cache_salt` and `extra_key`; empty texts are none.
pub(super) fn namespace(body: &Map<String, Value>) -> u64 {
    let salt = text(body, "cache_salt").unwrap_or_default();
    let key = text(body, "extra_key").unwrap_or_default();
    if salt.is_empty() && key.is_empty() { 0 } else { xxh3_64(format!("{}:{salt}{key}", salt.len()).as_bytes()) }
}

/// An override header (off by default): none when it is not there.
pub(super) fn override_header<'a>(shared: &Shared, headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let enabled = shared.config.enable_header_overrides;
    headers.get(format!("x-override-{name}")).filter(|_| enabled).and_then(|value| value.to_str().ok())
}

fn override_number(shared: &Shared, headers: &HeaderMap, name: &str) -> Result<Option<i64>, Refused> {
    let Some(given) = override_header(shared, headers, name) else { return Ok(None) };
    given.trim().parse().map(Some).map_err(|_| {
        let message =
            format!("invalid x-override-{name} header '{given}': invalid literal for int() with base 10: '{given}'");
        Box::new(reply::flat_error(StatusCode::BAD_REQUEST, &message, "400"))
    })
}

/// The priority given by an override header.
pub(super) fn override_priority(shared: &Shared, headers: &HeaderMap) -> Result<Option<i64>, Refused> {
    override_number(shared, headers, "priority")
}

/// The rank asked for in the body, if it is one; the message if it is not.
pub(super) fn rank(shared: &Shared, asked: Option<i64>) -> Result<Option<usize>, String> {
    let Some(asked) = asked else { return Ok(None) };
    let size = shared.config.dp_size.max(1);
    match usize::try_from(asked).ok().filter(|rank| *rank < size) {
        Some(rank) => Ok(Some(rank)),
        None => Err(format!("routed_dp_rank={asked} out of range [0, {size})")),
    }
}

/// The rank in the body, under either name.
pub(super) fn body_rank(body: &Map<String, Value>) -> Option<i64> {
    count(body, "routed_dp_rank").or_else(|| count(body, "data_parallel_rank"))
}

/// Reads the shared fields of an OpenAI request.
pub(super) fn common(
    shared: &Shared,
    endpoint: Endpoint,
    headers: &HeaderMap,
    body: &Map<String, Value>,
) -> Result<Common, Refused> {
    let priority = match body.get("priority") {
        None | Some(Value::Null) => None,
        Some(value) => {
            let read = validate::integer("priority", value).map_err(|flaw| Box::new(invalid(endpoint, flaw)))?;
            let range = "priority must be a signed 64-bit integer between -9223372036854775808 and 9223372036854775807";
            Some(read.ok_or_else(|| Box::new(reply::bad_request(range)))?)
        }
    };
    if matches!(body.get("rid"), Some(Value::Array(_))) {
        let message = "Internal server error: unhashable type: 'list'";
        return Err(Box::new(reply::flat_error(StatusCode::INTERNAL_SERVER_ERROR, message, "InternalServerError")));
    }
    for field in ["cache_salt", "extra_key"] {
        if matches!(body.get(field), Some(Value::Array(_))) {
            let message = format!("{field} should be a string for a single request.");
            return Err(Box::new(reply::bad_request(&message)));
        }
    }
    let header_rank = match headers.get("x-data-parallel-rank").filter(|_| shared.config.frontend == Frontend::Python) {
        None => None,
        Some(value) => {
            let given = String::from_utf8_lossy(value.as_bytes()).into_owned();
            let read: i64 = given.trim().parse().map_err(|_| {
                let message = format!("Invalid X-Data-Parallel-Rank header: must be an integer, got '{given}'");
                Box::new(reply::flat_error(StatusCode::BAD_REQUEST, &message, "400"))
            })?;
            Some(read)
        }
    };
    let header_rank = override_number(shared, headers, "routed-dp-rank")?.or(header_rank);
    let rank = rank(shared, header_rank.or_else(|| body_rank(body)))
        .map_err(|message| Box::new(reply::bad_request(&message)))?;
    let n = count(body, "n").and_then(|n| usize::try_from(n).ok()).unwrap_or(1).clamp(1, 128);
    let options = body.get("stream_options").and_then(Value::as_object);
    let option = |name| options.is_some_and(|options| flag(options, name));
    let model = text(body, "model").unwrap_or_else(|| "default".to_owned());
    if let Some((_, adapter)) = model.split_once(':') {
        let message = format!(
            "LoRA adapter '{adapter}' was requested, but LoRA is not enabled. Please launch the server with --enable-lora \
             flag and preload adapters using --lora-paths or /load_lora_adapter endpoint."
        );
        return Err(Box::new(reply::bad_request(&message)));
    }
    Ok(Common {
        model,
        rid: override_header(shared, headers, "rid").map(str::to_owned).or_else(|| text(body, "rid")),
        priority: override_priority(shared, headers)?.or(priority),
        session_id: text(body, "session_id"),
        namespace: namespace(body),
        rank,
        stream: flag(body, "stream"),
        n,
        include_usage: option("include_usage") || shared.config.stream_response_default_include_usage,
        continuous_usage: option("include_usage") && option("continuous_usage_stats"),
        cached_tokens_details: flag(body, "return_cached_tokens_details"),
    })
}

/// A schema error with one flaw.
pub(super) fn invalid(endpoint: Endpoint, flaw: Flaw) -> Response<Body> {
    reply::invalid(&validate::message(endpoint, &[flaw]))
}

/// Checks prompt and output against the context; the message if they are too long.
pub(super) fn check_length(
    shared: &Shared,
    prompt: usize,
    max_new_tokens: Option<i64>,
) -> Result<Option<usize>, String> {
    let context = shared.config.context_length;
    if prompt >= context {
        return Err(format!(
            "The input ({prompt} tokens) is longer than the model's context length ({context} tokens)."
        ));
    }
    let Some(asked) = max_new_tokens else { return Ok(None) };
    let asked = usize::try_from(asked).map_err(|_| format!("max_new_tokens must be at least 0, got {asked}."))?;
    if prompt.saturating_add(asked) > context {
        return Err(format!(
            "Requested token count exceeds the model's maximum context length of {context} tokens. You requested a total of \
             {} tokens: {prompt} tokens from the input messages and {asked} tokens for the completion. Please reduce the \
             number of tokens in the input messages or the completion to fit within the limit.",
            prompt.saturating_add(asked)
        ));
    }
    Ok(Some(asked))
}

/// The requests for the choices of one OpenAI request. Given a rid and several choices, the rid is not used.
pub(super) fn choices(shared: &Shared, common: &Common, prompts: &[Vec<u32>], base: &Request) -> Vec<Request> {
    let single = common.n * prompts.len() == 1;
    prompts
        .iter()
        .flat_map(|prompt| std::iter::repeat_n(prompt, common.n))
        .map(|prompt| Request {
            rid: common.rid.clone().filter(|_| single).unwrap_or_else(|| shared.new_id()),
            prompt: prompt.clone(),
            priority: common.priority,
            namespace: common.namespace,
            tag: common.session_id.clone(),
            ..base.clone()
        })
        .collect()
}

/// A conversation as tokens, and the directives of its last user message.
pub(super) fn conversation(shared: &Shared, messages: &[Value], tools: &[Value]) -> (Vec<u32>, Script) {
    let prompt = template::render(messages, tools, true, shared.config.reasoning);
    let user = messages.iter().rev().find(|message| message.get("role").and_then(Value::as_str) == Some("user"));
    let words = user.and_then(|message| message.get("content")).map(template::content_text).unwrap_or_default();
    (tokenizer::encode(&prompt), Script::parse(&words))
}
