//! The one table of answers the gateway gives on its own account: status, error type in each protocol, whether another
//! worker may be tried, whose fault it was, and the metric label.

use bytes::Bytes;
use serde_json::json;
use turnstile_fleet::route::Protocol;

/// Why the gateway answered instead of a worker.
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
    /// A header or the request target is over its limit.
    HeaderTooLarge,
    /// Another turn of the same streaming session is running.
    SessionBusy,
    /// `open_session` was refused or failed on the worker.
    SessionOpen,
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
    pub const ALL: [Kind; 20] = [
        Kind::BadRequest,
        Kind::Unauthorized,
        Kind::NotFound,
        Kind::MethodNotAllowed,
        Kind::ModelNotFound,
        Kind::RequestTimeout,
        Kind::TooLarge,
        Kind::HeaderTooLarge,
        Kind::SessionBusy,
        Kind::SessionOpen,
        Kind::QueueFull,
        Kind::QueueTimeout,
        Kind::NoWorker,
        Kind::Draining,
        Kind::Plugin,
        Kind::Upstream,
        Kind::UpstreamTimeout,
        Kind::UpstreamProtocol,
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
            Kind::SessionBusy => row(409, "conflict_error", BAD, "session_busy", Blame::Client),
            Kind::SessionOpen => row(502, "server_error", "api_error", "session_open_failed", Blame::Worker),
            Kind::QueueFull => row(503, "overloaded_error", "overloaded_error", "queue_full", Blame::Load),
            Kind::QueueTimeout => row(503, "overloaded_error", "overloaded_error", "queue_timeout", Blame::Load),
            Kind::NoWorker => row(503, "server_error", "overloaded_error", "no_worker", Blame::Worker),
            Kind::Draining => row(503, "server_error", "overloaded_error", "draining", Blame::Gateway),
            Kind::Plugin => row(500, "server_error", "api_error", "plugin_failed", Blame::Gateway),
            Kind::Upstream => row(502, "server_error", "api_error", "worker_unreachable", Blame::Worker),
            Kind::UpstreamTimeout => row(504, "server_error", "timeout_error", "worker_timeout", Blame::Worker),
            Kind::UpstreamProtocol => row(502, "server_error", "api_error", "worker_protocol", Blame::Worker),
            Kind::ClientGone => row(499, BAD, BAD, "client_gone", Blame::Client),
            Kind::Internal => row(500, "server_error", "api_error", "internal", Blame::Gateway),
        }
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
}

impl Refusal {
    /// A refusal without a field or a time to come back.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), param: None, retry_after_s: None, status: None }
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

    /// The HTTP status to answer with.
    pub fn status(&self) -> u16 {
        self.status.unwrap_or(self.kind.row().status)
    }

    /// The body, in the shape of the protocol that was asked.
    pub fn body(&self, protocol: Protocol) -> Bytes {
        let row = self.kind.row();
        let value = match protocol {
            Protocol::OpenAi | Protocol::Responses => json!({"error": {
                "message": self.message, "type": row.openai, "param": self.param, "code": row.code,
            }}),
            Protocol::Anthropic => {
                json!({"type": "error", "error": {"type": row.anthropic, "message": self.message}})
            }
            Protocol::Native => json!({"error": {"message": self.message, "code": row.code}}),
        };
        Bytes::from(value.to_string())
    }
}

#[cfg(test)]
#[path = "errors_tests.rs"]
mod tests;
