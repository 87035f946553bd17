//! Who answers a filter's calls: the file of the exchange.

use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use turnstile_plugins::{CallCommand, Callout, GRPC_UNAVAILABLE, GrpcEvent, HttpReply};

use super::changes::{fields, shown};

/// Calls that are remembered; what is beyond is answered and not shown.
const MAX_SHOWN_CALLS: usize = 100;

/// The callees of one trial.
#[derive(Default)]
pub struct Callees {
    replies: Mutex<BTreeMap<String, VecDeque<Option<HttpReply>>>>,
    names: Vec<String>,
    asked: Mutex<Vec<CallCommand>>,
    calls: Mutex<Vec<Value>>,
}

impl Callees {
    /// Callees that answer so, one call after the other.
    pub fn new(replies: &BTreeMap<String, Vec<Option<HttpReply>>>) -> Self {
        let names = replies.keys().cloned().collect();
        let replies = replies.iter().map(|(name, list)| (name.clone(), list.iter().cloned().collect())).collect();
        Self { replies: Mutex::new(replies), names, ..Self::default() }
    }

    /// Whether there is such a callee.
    pub fn knows(&self, upstream: &str) -> bool {
        self.names.iter().any(|name| name == upstream)
    }

    /// A command, to be done when no guest runs.
    pub fn ask(&self, command: CallCommand) {
        self.asked.lock().push(command);
    }

    /// The calls so far, with what was answered.
    pub fn calls(&self) -> Vec<Value> {
        self.calls.lock().clone()
    }

    /// Answers what was asked. Replies may ask for more: that is answered the next time. Whether there was anything.
    pub fn serve(&self) -> bool {
        let commands = std::mem::take(&mut *self.asked.lock());
        let any = !commands.is_empty();
        for command in commands {
            // Nothing is open beyond this call, so there is nothing to send on, to close or to break off.
            let CallCommand::Start(mut handle, callout) = command else { continue };
            match *callout {
                Callout::Http(call) => {
                    let next = self.replies.lock().get_mut(&call.upstream).and_then(VecDeque::pop_front).flatten();
                    let reply = match &next {
                        Some(reply) => json!({"status": reply.status.as_u16(), "body": shown(&reply.body)}),
                        None => Value::Null,
                    };
                    self.show(json!({
                        "upstream": call.upstream,
                        "method": call.method.as_str(),
                        "path": call.path,
                        "authority": call.authority,
                        "headers": fields(&call.headers),
                        "body": shown(&call.body),
                        "timeout_ms": call.timeout.map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)),
                        "reply": reply,
                    }));
                    // A fault of the guest is seen in what becomes of its stream. So below.
                    let _ = handle.http(next.ok_or_else(|| "there is no answer to it in the file".to_owned()));
                }
                Callout::Redis(call) => {
                    self.show(json!({
                        "upstream": call.upstream,
                        "redis_bytes": call.command.len(),
                        "reply": Value::Null,
                    }));
                    let _ = handle.redis(Err("calls to Redis are not answered here".to_owned()));
                }
                Callout::Grpc(call) => {
                    self.show(json!({
                        "upstream": call.upstream,
                        "grpc": format!("{}/{}", call.service, call.method),
                        "metadata": fields(&call.metadata),
                        "message_bytes": call.message.as_ref().map(bytes::Bytes::len),
                        "reply": Value::Null,
                    }));
                    let message = "gRPC calls are not answered here".to_owned();
                    let _ = handle.grpc(GrpcEvent::Close { status: GRPC_UNAVAILABLE, message });
                }
            }
        }
        any
    }

    fn show(&self, call: Value) {
        let mut calls = self.calls.lock();
        if calls.len() < MAX_SHOWN_CALLS {
            calls.push(call);
        }
    }
}
