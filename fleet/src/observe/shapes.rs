//! The parts of the workers' JSON that are read. Everything is optional and loosely typed: an answer in a shape we do not
//! know must still pass.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::body::text_of;

/// A JSON value kept as its text.
pub(crate) type Raw<'a> = Option<&'a RawValue>;

/// An OpenAI answer or a chunk of one; also the flat and the nested error.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct OpenAi<'a> {
    #[serde(borrow)]
    pub(super) choices: Option<Vec<Choice<'a>>>,
    #[serde(borrow)]
    pub(super) usage: Raw<'a>,
    #[serde(borrow)]
    pub(super) sglext: Raw<'a>,
    #[serde(borrow)]
    pub(super) error: Raw<'a>,
    #[serde(borrow)]
    pub(super) object: Raw<'a>,
    #[serde(borrow)]
    pub(super) message: Raw<'a>,
    #[serde(borrow)]
    pub(super) code: Raw<'a>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Choice<'a> {
    pub(super) index: Option<u64>,
    #[serde(borrow)]
    pub(super) text: Raw<'a>,
    #[serde(borrow)]
    pub(super) finish_reason: Raw<'a>,
    /// What a chunk adds.
    #[serde(borrow)]
    pub(super) delta: Option<Message<'a>>,
    /// The whole message.
    #[serde(borrow)]
    pub(super) message: Option<Message<'a>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Message<'a> {
    #[serde(borrow)]
    pub(super) content: Raw<'a>,
    #[serde(borrow)]
    pub(super) reasoning_content: Raw<'a>,
    #[serde(borrow)]
    pub(super) tool_calls: Option<Vec<ToolCall<'a>>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct ToolCall<'a> {
    pub(super) index: Option<u64>,
    #[serde(borrow)]
    pub(super) id: Raw<'a>,
    #[serde(borrow)]
    pub(super) function: Option<Function<'a>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Function<'a> {
    #[serde(borrow)]
    pub(super) name: Raw<'a>,
    #[serde(borrow)]
    pub(super) arguments: Raw<'a>,
}

/// Usage of any protocol.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct UsageShape {
    pub(super) prompt_tokens: Option<u64>,
    pub(super) completion_tokens: Option<u64>,
    pub(super) prompt_tokens_details: Option<CachedTokens>,
    pub(super) input_tokens: Option<u64>,
    pub(super) output_tokens: Option<u64>,
    pub(super) input_tokens_details: Option<CachedTokens>,
    pub(super) cache_read_input_tokens: Option<u64>,
    pub(super) cache_creation_input_tokens: Option<u64>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct CachedTokens {
    pub(super) cached_tokens: Option<u64>,
}

/// `sglext`, as far as it is read.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct SglExt {
    pub(super) cached_tokens_details: Option<CachedDetails>,
}

/// Cached tokens by the tier that held them.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct CachedDetails {
    pub(super) device: Option<u64>,
    pub(super) host: Option<u64>,
    pub(super) storage: Option<u64>,
}

/// An answer of `/generate` or a chunk of one.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Generated<'a> {
    #[serde(borrow)]
    pub(super) meta_info: Option<MetaInfo<'a>>,
    #[serde(borrow)]
    pub(super) error: Raw<'a>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct MetaInfo<'a> {
    #[serde(borrow)]
    pub(super) finish_reason: Raw<'a>,
    pub(super) prompt_tokens: Option<u64>,
    pub(super) completion_tokens: Option<u64>,
    pub(super) cached_tokens: Option<u64>,
}

/// The finish reason of `/generate`.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Finish<'a> {
    #[serde(borrow, rename = "type")]
    pub(super) kind: Raw<'a>,
    pub(super) status_code: Option<u16>,
    #[serde(borrow)]
    pub(super) message: Raw<'a>,
}

/// A Responses answer, or an event about one.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Response<'a> {
    #[serde(borrow)]
    pub(super) response: Option<Box<Response<'a>>>,
    #[serde(borrow)]
    pub(super) usage: Raw<'a>,
    #[serde(borrow)]
    pub(super) status: Raw<'a>,
    #[serde(borrow)]
    pub(super) incomplete_details: Option<Reason<'a>>,
    #[serde(borrow)]
    pub(super) error: Raw<'a>,
    #[serde(borrow)]
    pub(super) message: Raw<'a>,
    #[serde(borrow)]
    pub(super) code: Raw<'a>,
    #[serde(borrow)]
    pub(super) item: Option<Item<'a>>,
    #[serde(borrow)]
    pub(super) output: Option<Vec<Item<'a>>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Reason<'a> {
    #[serde(borrow)]
    pub(super) reason: Raw<'a>,
}

/// A piece of output: a Responses item or an Anthropic content block.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Item<'a> {
    #[serde(borrow, rename = "type")]
    pub(super) kind: Raw<'a>,
    #[serde(borrow)]
    pub(super) name: Raw<'a>,
}

/// An Anthropic message, or an event about one.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Anthropic<'a> {
    #[serde(borrow)]
    pub(super) message: Option<Box<Anthropic<'a>>>,
    #[serde(borrow)]
    pub(super) usage: Raw<'a>,
    #[serde(borrow)]
    pub(super) stop_reason: Raw<'a>,
    #[serde(borrow)]
    pub(super) delta: Option<Box<Anthropic<'a>>>,
    #[serde(borrow)]
    pub(super) content: Option<Vec<Item<'a>>>,
    #[serde(borrow)]
    pub(super) content_block: Option<Item<'a>>,
    #[serde(borrow)]
    pub(super) error: Raw<'a>,
}

/// The inside of an error.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct ErrorShape<'a> {
    #[serde(borrow)]
    pub(super) message: Raw<'a>,
    #[serde(borrow)]
    pub(super) code: Raw<'a>,
    #[serde(borrow, rename = "type")]
    pub(super) kind: Raw<'a>,
}

/// The text of a value that is a string.
pub(crate) fn text(raw: Raw<'_>) -> Option<Cow<'_, str>> {
    raw.and_then(|raw| text_of(raw.get().as_bytes()))
}

/// A value of a known shape; none where it is of another.
pub(crate) fn read<'a, T: Deserialize<'a>>(raw: Raw<'a>) -> Option<T> {
    serde_json::from_str(raw?.get()).ok()
}
