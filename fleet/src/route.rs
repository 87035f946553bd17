//! The inference routes of a worker, and what each of them takes.
//!
//! One table for every question of the form "may this member be sent there"; the facts are those of SGLang 0.5.23.

use std::fmt;

/// The wire protocol of a route: how its bodies, errors and streams are shaped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// OpenAI chat and completions, and the routes shaped like them.
    OpenAi,
    /// OpenAI Responses.
    Responses,
    /// Anthropic Messages.
    Anthropic,
    /// SGLang's own `/generate`, tokenize and detokenize.
    Native,
}

impl Protocol {
    /// The name used in facts and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::OpenAi => "openai",
            Self::Responses => "responses",
            Self::Anthropic => "anthropic",
            Self::Native => "native",
        }
    }
}

/// An inference route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/generate`
    Generate,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages`
    Messages,
    /// `/v1/messages/count_tokens`
    CountTokens,
    /// `/v1/embeddings`
    Embeddings,
    /// `/v1/rerank`
    Rerank,
    /// `/v1/score`
    Score,
    /// `/tokenize`, `/v1/tokenize`
    Tokenize,
    /// `/detokenize`, `/v1/detokenize`
    Detokenize,
}

// === impl Route ===

impl Route {
    /// Every route, in the order of the metrics documentation.
    pub const ALL: [Self; 11] = [
        Self::Chat,
        Self::Completions,
        Self::Generate,
        Self::Responses,
        Self::Messages,
        Self::CountTokens,
        Self::Embeddings,
        Self::Rerank,
        Self::Score,
        Self::Tokenize,
        Self::Detokenize,
    ];

    /// The route of a request path (without its query), or none if the path is not an inference route.
    pub fn from_path(path: &str) -> Option<Self> {
        Some(match path {
            "/v1/chat/completions" => Self::Chat,
            "/v1/completions" => Self::Completions,
            "/generate" => Self::Generate,
            "/v1/responses" => Self::Responses,
            "/v1/messages" => Self::Messages,
            "/v1/messages/count_tokens" => Self::CountTokens,
            "/v1/embeddings" => Self::Embeddings,
            "/v1/rerank" => Self::Rerank,
            "/v1/score" => Self::Score,
            "/tokenize" | "/v1/tokenize" => Self::Tokenize,
            "/detokenize" | "/v1/detokenize" => Self::Detokenize,
            _ => return None,
        })
    }

    /// The name used in facts and as a metric label.
    pub fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "completions",
            Self::Generate => "generate",
            Self::Responses => "responses",
            Self::Messages => "messages",
            Self::CountTokens => "count_tokens",
            Self::Embeddings => "embeddings",
            Self::Rerank => "rerank",
            Self::Score => "score",
            Self::Tokenize => "tokenize",
            Self::Detokenize => "detokenize",
        }
    }

    /// The path asked of the worker. Aliases are written in the form that every SGLang release serves.
    pub fn worker_path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
            Self::Generate => "/generate",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
            Self::CountTokens => "/v1/messages/count_tokens",
            Self::Embeddings => "/v1/embeddings",
            Self::Rerank => "/v1/rerank",
            Self::Score => "/v1/score",
            Self::Tokenize => "/tokenize",
            Self::Detokenize => "/detokenize",
        }
    }

    /// How the route's bodies and streams are shaped.
    pub fn protocol(self) -> Protocol {
        match self {
            Self::Chat | Self::Completions | Self::Embeddings | Self::Rerank | Self::Score => Protocol::OpenAi,
            Self::Responses => Protocol::Responses,
            Self::Messages | Self::CountTokens => Protocol::Anthropic,
            Self::Generate | Self::Tokenize | Self::Detokenize => Protocol::Native,
        }
    }

    /// Whether the route runs prefill and decode, so that queue, sessions and prefix cache matter.
    pub fn generates(self) -> bool {
        matches!(self, Self::Chat | Self::Completions | Self::Generate | Self::Responses | Self::Messages)
    }

    /// Whether a `priority` member has an effect. Responses declares the field and drops it; Messages has none.
    pub fn takes_priority(self) -> bool {
        matches!(self, Self::Chat | Self::Completions | Self::Generate | Self::Embeddings)
    }

    /// Whether a top-level `session_id` (radix tag) is read.
    pub fn takes_session_id(self) -> bool {
        matches!(self, Self::Chat | Self::Completions | Self::Generate | Self::Responses)
    }

    /// Whether `session_params` is honoured. The OpenAI routes parse and then drop it.
    pub fn takes_session_params(self) -> bool {
        matches!(self, Self::Generate)
    }

    /// Whether `routed_dp_rank` in the body pins the data-parallel rank.
    pub fn takes_dp_rank(self) -> bool {
        self.generates()
    }

    /// Whether `cache_salt` and `extra_key` keep the request's cache apart. Messages has neither.
    pub fn takes_cache_salt(self) -> bool {
        matches!(self, Self::Chat | Self::Completions | Self::Generate | Self::Responses)
    }

    /// The member that names the engine's request id, if the route has one. The value becomes the id of the answer and must
    /// be unique among live requests; on Responses it should keep the `resp_` prefix that clients expect.
    pub fn takes_rid(self) -> Option<&'static str> {
        match self {
            Self::Chat | Self::Completions | Self::Generate | Self::Embeddings => Some("rid"),
            Self::Responses => Some("request_id"),
            _ => None,
        }
    }

    /// Whether `stream_options.include_usage` is read, that is, whether a stream tells its usage only when asked.
    pub fn takes_stream_options(self) -> bool {
        matches!(self, Self::Chat | Self::Completions)
    }

    /// Whether `return_cached_tokens_details` is read. The other generating routes report cached tokens by themselves
    /// (`/generate`, Responses) or only with the worker's `--enable-cache-report` (Messages).
    pub fn takes_cached_details(self) -> bool {
        matches!(self, Self::Chat | Self::Completions)
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
#[path = "route_tests.rs"]
mod tests;
