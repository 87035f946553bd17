//! The one table of errors that a client can get: the gateway's own, and what a worker's become. Status, error type in each
//! protocol, whose fault it was, and the metric label. `docs/errors.md` is written from it.

mod page;

pub use page::page;

use bytes::Bytes;
use serde_json::json;
use turnstile_fleet::route::Protocol;

/// Why a client gets an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The body or a header is not what the route takes.
    BadRequest,
    /// The admin listener wants a bearer token.
    Unauthorized,
    /// No such path here.
    NotFound,
    /// The path exists, the method does not.
    MethodNotAllowed,
    /// No pool serves the model.
    ModelNotFound,
    /// The body did not arrive in time.
    RequestTimeout,
    /// The body is over `limits.body_bytes`.
    TooLarge,
    /// The headers are over their limits.
    HeaderTooLarge,
    /// The request target is over `limits.uri_bytes`.
    UriTooLong,
    /// The body's content encoding is not decoded here.
    UnsupportedEncoding,
    /// An `Expect` that nobody meets.
    ExpectationFailed,
    /// Another turn of the same streaming session is running.
    SessionBusy,
    /// The listener has as many connections as it may.
    TooManyConnections,
    /// The queue is full.
    QueueFull,
    /// The turn waited longer than its deadline.
    QueueTimeout,
    /// No worker of the pool is ready.
    NoWorker,
    /// The gateway is shutting down.
    Draining,
    /// A plugin with `on_error = "closed"` failed.
    Plugin,
    /// The worker could not be reached or cut the connection before its answer.
    Upstream,
    /// The worker did not answer in time.
    UpstreamTimeout,
    /// The worker's answer was not HTTP we can relay.
    UpstreamProtocol,
    /// The worker's answer broke off after some of it had reached the client.
    BrokenOff,
    /// The worker refused the request.
    WorkerRefused,
    /// The worker says that the prompt does not fit into the model's context.
    ContextLength,
    /// The worker refused the client's credential.
    WorkerUnauthorized,
    /// The worker refused the gateway's key.
    WorkerKey,
    /// The worker forbids the request to this credential.
    WorkerForbidden,
    /// The worker does not serve the route.
    WorkerRoute,
    /// The worker takes no body of this size.
    WorkerTooLarge,
    /// The worker, and every other that was tried, is full.
    WorkerOverloaded,
    /// The worker failed.
    WorkerFailed,
    /// The client left before an answer could be given.
    ClientGone,
    /// A fault of ours.
    Internal,
}

/// Who is to blame, for the metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// The client.
    Client,
    /// A worker.
    Worker,
    /// The gateway, its configuration or a plugin.
    Gateway,
    /// Nobody: there is more work than room.
    Load,
}

/// One line of the table.
#[derive(Debug, Clone, Copy)]
pub struct Row {
    /// HTTP status.
    pub status: u16,
    /// `error.type` in the OpenAI shape.
    pub openai: &'static str,
    /// `error.type` in the Anthropic shape.
    pub anthropic: &'static str,
    /// `error.code` in the OpenAI shape, and the metric label.
    pub code: &'static str,
    /// Whose fault.
    pub blame: Blame,
}

impl Kind {
    /// Every kind, for tests and documentation.
    pub const ALL: [Kind; 33] = [
        Kind::BadRequest,
        Kind::Unauthorized,
        Kind::NotFound,
        Kind::MethodNotAllowed,
        Kind::ModelNotFound,
        Kind::RequestTimeout,
        Kind::TooLarge,
        Kind::HeaderTooLarge,
        Kind::UriTooLong,
        Kind::UnsupportedEncoding,
        Kind::ExpectationFailed,
        Kind::SessionBusy,
        Kind::TooManyConnections,
        Kind::QueueFull,
        Kind::QueueTimeout,
        Kind::NoWorker,
        Kind::Draining,
        Kind::Plugin,
        Kind::Upstream,
        Kind::UpstreamTimeout,
        Kind::UpstreamProtocol,
        Kind::BrokenOff,
        Kind::WorkerRefused,
        Kind::ContextLength,
        Kind::WorkerUnauthorized,
        Kind::WorkerKey,
        Kind::WorkerForbidden,
        Kind::WorkerRoute,
        Kind::WorkerTooLarge,
        Kind::WorkerOverloaded,
        Kind::WorkerFailed,
        Kind::ClientGone,
        Kind::Internal,
    ];

    /// The table.
    pub const fn row(self) -> Row {
        const fn row(
            status: u16,
            openai: &'static str,
            anthropic: &'static str,
            code: &'static str,
            blame: Blame,
        ) -> Row {
            Row { status, openai, anthropic, code, blame }
        }
        const BAD: &str = "invalid_request_error";
        match self {
            Kind::BadRequest => row(400, BAD, BAD, "bad_request", Blame::Client),
            Kind::Unauthorized => {
                row(401, "authentication_error", "authentication_error", "unauthorized", Blame::Client)
            }
            Kind::NotFound => row(404, BAD, "not_found_error", "not_found", Blame::Client),
            Kind::MethodNotAllowed => row(405, BAD, BAD, "method_not_allowed", Blame::Client),
            Kind::ModelNotFound => row(404, BAD, "not_found_error", "model_not_found", Blame::Client),
            Kind::RequestTimeout => row(408, BAD, BAD, "request_timeout", Blame::Client),
            Kind::TooLarge => row(413, BAD, "request_too_large", "body_too_large", Blame::Client),
            Kind::HeaderTooLarge => row(431, BAD, BAD, "header_too_large", Blame::Client),
            Kind::UriTooLong => row(414, BAD, BAD, "uri_too_long", Blame::Client),
            Kind::UnsupportedEncoding => row(415, BAD, BAD, "unsupported_encoding", Blame::Client),
            Kind::ExpectationFailed => row(417, BAD, BAD, "expectation_failed", Blame::Client),
            Kind::SessionBusy => row(409, "conflict_error", BAD, "session_busy", Blame::Client),
            Kind::TooManyConnections => {
                row(503, "overloaded_error", "overloaded_error", "too_many_connections", Blame::Load)
            }
            Kind::QueueFull => row(503, "overloaded_error", "overloaded_error", "queue_full", Blame::Load),
            Kind::QueueTimeout => row(503, "overloaded_error", "overloaded_error", "queue_timeout", Blame::Load),
            Kind::NoWorker => row(503, "server_error", "overloaded_error", "no_worker", Blame::Worker),
            Kind::Draining => row(503, "server_error", "overloaded_error", "draining", Blame::Gateway),
            Kind::Plugin => row(500, "server_error", "api_error", "plugin_failed", Blame::Gateway),
            Kind::Upstream => row(502, "server_error", "api_error", "worker_unreachable", Blame::Worker),
            Kind::UpstreamTimeout => row(504, "server_error", "timeout_error", "worker_timeout", Blame::Worker),
            Kind::UpstreamProtocol => row(502, "server_error", "api_error", "worker_protocol", Blame::Worker),
            Kind::BrokenOff => row(502, "server_error", "api_error", "broken_off", Blame::Worker),
            Kind::WorkerRefused => row(400, BAD, BAD, "request_refused", Blame::Client),
            Kind::ContextLength => row(400, BAD, BAD, "context_length_exceeded", Blame::Client),
            Kind::WorkerUnauthorized => {
                row(401, "authentication_error", "authentication_error", "invalid_credential", Blame::Client)
            }
            Kind::WorkerKey => row(502, "server_error", "api_error", "worker_key_refused", Blame::Gateway),
            Kind::WorkerForbidden => row(403, "permission_error", "permission_error", "forbidden", Blame::Client),
            Kind::WorkerRoute => row(404, BAD, "not_found_error", "route_not_served", Blame::Client),
            Kind::WorkerTooLarge => row(413, BAD, "request_too_large", "request_too_large", Blame::Client),
            Kind::WorkerOverloaded => {
                row(503, "overloaded_error", "overloaded_error", "worker_overloaded", Blame::Load)
            }
            Kind::WorkerFailed => row(500, "server_error", "api_error", "worker_failed", Blame::Worker),
            Kind::ClientGone => row(499, BAD, BAD, "client_gone", Blame::Client),
            Kind::Internal => row(500, "server_error", "api_error", "internal", Blame::Gateway),
        }
    }
}

impl Kind {
    /// True for what a worker said, as against what the gateway says on its own account.
    pub const fn is_workers(self) -> bool {
        matches!(
            self,
            Kind::WorkerRefused
                | Kind::ContextLength
                | Kind::WorkerUnauthorized
                | Kind::WorkerForbidden
                | Kind::WorkerRoute
                | Kind::WorkerTooLarge
                | Kind::WorkerOverloaded
                | Kind::WorkerFailed
        )
    }
}

/// An answer of ours: a kind, a sentence for the reader, and when it makes sense to come back.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{}: {message}", .kind.row().code)]
pub struct Refusal {
    /// The line of the table.
    pub kind: Kind,
    /// What went wrong, naming the field, header or option.
    pub message: String,
    /// The request field at fault, for `error.param`.
    pub param: Option<String>,
    /// Seconds, for `Retry-After`.
    pub retry_after_s: Option<u32>,
    /// Replaces the table's status where an option says so (`admission.overload_status`).
    pub status: Option<u16>,
    /// A header that tells what would be accepted (`Allow`, `Accept-Encoding`).
    pub header: Option<(&'static str, &'static str)>,
    /// The connection ends after it: where the request itself ended is in doubt.
    pub closes: bool,
}

impl Refusal {
    /// A refusal without a field or a time to come back.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            param: None,
            retry_after_s: None,
            status: None,
            header: None,
            closes: false,
        }
    }

    /// Names the request field at fault.
    pub fn with_param(mut self, param: impl Into<String>) -> Self {
        self.param = Some(param.into());
        self
    }

    /// Says when to come back, in seconds.
    pub fn with_retry_after(mut self, seconds: u32) -> Self {
        self.retry_after_s = Some(seconds);
        self
    }

    /// Overrides the table's status.
    pub fn with_status(mut self, status: u16) -> Self {
        self.status = Some(status);
        self
    }

    /// Adds a header that tells what would be accepted.
    pub fn with_header(mut self, name: &'static str, value: &'static str) -> Self {
        self.header = Some((name, value));
        self
    }

    /// Ends the connection with it.
    pub fn closing(mut self) -> Self {
        self.closes = true;
        self
    }

    /// The HTTP status to answer with.
    pub fn status(&self) -> u16 {
        self.status.unwrap_or(self.kind.row().status)
    }

    /// The error's type in a protocol. Where an option turns overload into 429, it is the type that goes with that.
    fn error_type(&self, protocol: Protocol) -> &'static str {
        let row = self.kind.row();
        match protocol {
            _ if self.status() == 429 => "rate_limit_error",
            Protocol::Anthropic => row.anthropic,
            _ => row.openai,
        }
    }

    /// The message in a protocol. Clients of Anthropic's know a prompt that is too long by these words alone.
    fn message(&self, protocol: Protocol) -> String {
        match (self.kind, protocol) {
            (Kind::ContextLength, Protocol::Anthropic) => format!("prompt is too long: {}", self.message),
            _ => self.message.clone(),
        }
    }

    /// The body, in the shape of the protocol that was asked.
    pub fn body(&self, protocol: Protocol) -> Bytes {
        let (code, kind, message) = (self.kind.row().code, self.error_type(protocol), self.message(protocol));
        let value = match protocol {
            Protocol::OpenAi | Protocol::Responses => {
                json!({"error": {"message": message, "type": kind, "param": self.param, "code": code}})
            }
            Protocol::Anthropic => json!({"type": "error", "error": {"type": kind, "message": message}}),
            Protocol::Native => json!({"error": {"message": message, "code": code}}),
        };
        Bytes::from(value.to_string())
    }

    /// The event that tells it in a stream that has begun. No end mark follows.
    pub fn event(&self, protocol: Protocol) -> Bytes {
        let (code, message) = (self.kind.row().code, self.message(protocol));
        let text = match protocol {
            Protocol::OpenAi | Protocol::Native => {
                format!("data: {}\n\n", String::from_utf8_lossy(&self.body(protocol)))
            }
            Protocol::Anthropic => format!("event: error\ndata: {}\n\n", String::from_utf8_lossy(&self.body(protocol))),
            Protocol::Responses => {
                let data = json!({"type": "error", "code": code, "message": message, "param": self.param});
                format!("event: error\ndata: {data}\n\n")
            }
        };
        Bytes::from(text)
    }
}

#[cfg(test)]
#[path = "errors_tests.rs"]
mod tests;
