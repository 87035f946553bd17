//! What a callback did: the action it chose, the effects it asked for, or the fault it died of.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderName, HeaderValue};

/// What the guest wants to happen to the stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Action {
    /// Go on to the next plugin.
    #[default]
    Continue,
    /// Stop here until the guest continues the stream; unknown action numbers count as this.
    Pause,
}

/// An answer made by the plugin instead of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalResponse {
    /// 200 to 599.
    pub status: u16,
    /// Reason for the log, never sent to the client.
    pub details: String,
    /// The response's body.
    pub body: Bytes,
    /// Headers to add; those that HTTP forbids were dropped.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// The gRPC status, if the guest gave one.
    pub grpc_status: Option<i32>,
}

/// A piece of a response's body that a plugin made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Injected {
    /// The bytes.
    pub data: Bytes,
    /// Nothing follows it.
    pub end: bool,
}

/// What a guest asked for; the caller applies it after the callback has returned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// Answer the client with this; other filters of the request side are skipped.
    pub local_response: Option<Box<LocalResponse>>,
    /// Go on with a paused request.
    pub continue_request: bool,
    /// Go on with a paused response.
    pub continue_response: bool,
    /// Break the exchange on the client's side.
    pub close_downstream: bool,
    /// Break the exchange on the worker's side.
    pub close_upstream: bool,
    /// Send the headers with nothing after them (header callbacks that returned 2).
    pub end_stream: bool,
    /// Pieces of the response's body that go to the client without the plugin seeing them, in front of what its callback lets
    /// through. Higress' dialect only.
    pub injected: Vec<Injected>,
    /// The guest changed something that routing depends on and asks for a new choice (0.1.0 only).
    pub clear_route_cache: bool,
}

impl Effects {
    /// True if the guest asked for nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// True if a stream that waits does not wait any longer for it.
    pub(crate) fn resumes(&self) -> bool {
        self.continue_request
            || self.continue_response
            || self.local_response.is_some()
            || self.close_downstream
            || self.close_upstream
            || self.injected.iter().any(|piece| piece.end)
    }

    /// Adds later effects; the first local response stays.
    pub fn merge(&mut self, later: Effects) {
        if self.local_response.is_none() {
            self.local_response = later.local_response;
        }
        self.continue_request |= later.continue_request;
        self.continue_response |= later.continue_response;
        self.close_downstream |= later.close_downstream;
        self.close_upstream |= later.close_upstream;
        self.end_stream |= later.end_stream;
        self.injected.extend(later.injected);
        self.clear_route_cache |= later.clear_route_cache;
    }
}

/// A callback that returned.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CallOutcome {
    /// As the guest returned it; see [`CallOutcome::paused_request`] for what it comes to.
    pub action: Action,
    /// What the guest asked for.
    pub effects: Effects,
    /// A headers callback that paused, and stops only what lies behind the plugin: its own body callbacks go on, and the first
    /// of them that continues lets the headers go. Higress' dialect only.
    pub body_goes_on: bool,
    /// A body callback that paused and wants nothing held: what it saw goes nowhere.
    pub drops_body: bool,
    /// A body callback that paused under flow control: what it saw is held and not shown again, and when that is more than may be
    /// held, nothing more is read until it goes on.
    pub flow_control: bool,
}

impl CallOutcome {
    /// True if a request-side callback paused and did not continue the stream itself.
    pub fn paused_request(&self) -> bool {
        self.action == Action::Pause && !self.effects.continue_request && self.effects.local_response.is_none()
    }

    /// True if a response-side callback paused and did not continue the stream itself.
    pub fn paused_response(&self) -> bool {
        self.action == Action::Pause && !self.effects.continue_response && self.effects.local_response.is_none()
    }
}

/// Why a callback did not return.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// The guest trapped (a panic, usually).
    Trap,
    /// The guest ran past its deadline.
    Deadline,
    /// The guest trapped after its memory limit refused it more.
    Memory,
    /// The guest used up its stack.
    Stack,
    /// The guest called `proc_exit` or `abort`.
    Exit,
    /// The guest's allocator gave back memory that is not there.
    Allocator,
    /// This host failed while serving the guest.
    Host,
    /// The instance that held this stream is gone, through the fault of another stream.
    Lost,
    /// No instance is healthy now.
    Unavailable,
}

impl FaultKind {
    /// Every kind, in the order of [`FaultKind::index`].
    pub const ALL: [FaultKind; 9] = [
        Self::Trap,
        Self::Deadline,
        Self::Memory,
        Self::Stack,
        Self::Exit,
        Self::Allocator,
        Self::Host,
        Self::Lost,
        Self::Unavailable,
    ];

    /// A label for metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Trap => "trap",
            Self::Deadline => "deadline",
            Self::Memory => "memory",
            Self::Stack => "stack",
            Self::Exit => "exit",
            Self::Allocator => "allocator",
            Self::Host => "host",
            Self::Lost => "lost",
            Self::Unavailable => "unavailable",
        }
    }

    /// Position in [`FaultKind::ALL`].
    pub fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A callback that did not return. The caller applies the plugin's `on_error` policy.
#[derive(Clone, Debug, thiserror::Error)]
#[error("plugin {plugin}: {kind}: {message}")]
pub struct Fault {
    /// The plugin's name.
    pub plugin: Arc<str>,
    /// What happened.
    pub kind: FaultKind,
    /// Detail for the log, with the guest's backtrace if there is one.
    pub message: String,
}

/// Result of entering a guest.
pub type CallResult = Result<CallOutcome, Box<Fault>>;

/// The step of a plugin's start that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartPhase {
    /// The bytes are not a module that can run here.
    Compile,
    /// The module announces no known ABI version, or more than one.
    Marker,
    /// An import is unknown or has another type, or an export has another type.
    Link,
    /// Memory could not be set up, or the module's start function failed.
    Instantiate,
    /// `_initialize`, `main` or `_start`.
    Initialize,
    /// `proxy_on_context_create` of the root context.
    ContextCreate,
    /// `proxy_on_vm_start`.
    VmStart,
    /// `proxy_on_configure`.
    Configure,
}

impl fmt::Display for StartPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Compile => "compile",
            Self::Marker => "ABI version",
            Self::Link => "link",
            Self::Instantiate => "instantiate",
            Self::Initialize => "initialize",
            Self::ContextCreate => "root context",
            Self::VmStart => "VM start",
            Self::Configure => "configure",
        })
    }
}

/// A plugin that could not be started.
#[derive(Clone, Debug, thiserror::Error)]
#[error("plugin {plugin} failed to start ({phase}): {message}")]
pub struct PluginError {
    /// The plugin's name.
    pub plugin: Arc<str>,
    /// The step that failed.
    pub phase: StartPhase,
    /// What went wrong, with the guest's backtrace if there is one.
    pub message: String,
}
