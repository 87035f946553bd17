//! Who answers a filter's calls: the file of the exchange.

use crate::workbench::waiting::Answers;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use turnstile_plugins::{CallCommand, Callout, Fault, GRPC_UNAVAILABLE, GrpcEvent, HttpReply};

use super::changes::{fields, shown};

/// Calls that are remembered; what is beyond is answered and not shown.
const MAX_SHOWN_CALLS: usize = 100;

/// Answers that are still to be given, by upstream.
type Queues = BTreeMap<String, VecDeque<Option<HttpReply>>>;

/// The callees of one trial.
#[derive(Default)]
pub struct Callees {
    /// Why all calls fail, if they do.
    gone: Option<&'static str>,
    replies: Mutex<Queues>,
    names: Vec<String>,
    asked: Mutex<Vec<CallCommand>>,
    calls: Mutex<Vec<Value>>,
    fault: Mutex<Option<String>>,
}

impl Callees {
    /// Callees that answer so, one call after the other.
    pub fn new(replies: &BTreeMap<String, Vec<Option<HttpReply>>>) -> Self {
        let names = replies.keys().cloned().collect();
        Self { replies: Mutex::new(queues(replies)), names, ..Self::default() }
    }

    /// Callees that nobody can reach: every call fails.
    pub fn unreachable() -> Self {
        Self { gone: Some("the upstream cannot be reached"), ..Self::default() }
    }

    /// From here on they answer as they did at first.
    pub fn renew(&self, replies: &BTreeMap<String, Vec<Option<HttpReply>>>) {
        *self.replies.lock() = queues(replies);
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

    /// Why a callback that was told of an answer did not return, if one did not.
    pub fn fault(&self) -> Option<String> {
        self.fault.lock().clone()
    }

    /// Why a call fails; `usual`: where some would not.
    fn why(&self, usual: &str) -> String {
        self.gone.unwrap_or(usual).to_owned()
    }

    fn told(&self, told: Result<(), Box<Fault>>) {
        if let Err(fault) = told {
            self.fault.lock().get_or_insert_with(|| fault.to_string());
        }
    }

    fn show(&self, call: Value) {
        let mut calls = self.calls.lock();
        if calls.len() < MAX_SHOWN_CALLS {
            calls.push(call);
        }
    }
}

fn queues(replies: &BTreeMap<String, Vec<Option<HttpReply>>>) -> Queues {
    replies.iter().map(|(name, list)| (name.clone(), list.iter().cloned().collect())).collect()
}

impl Answers for Callees {
    fn serve(&self, _: u64) -> bool {
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
                    self.told(handle.http(next.ok_or_else(|| self.why("there is no answer to it in the file"))));
                }
                Callout::Redis(call) => {
                    self.show(json!({
                        "upstream": call.upstream,
                        "redis_bytes": call.command.len(),
                        "reply": Value::Null,
                    }));
                    self.told(handle.redis(Err(self.why("calls to Redis are not answered here"))));
                }
                Callout::Grpc(call) => {
                    self.show(json!({
                        "upstream": call.upstream,
                        "grpc": format!("{}/{}", call.service, call.method),
                        "metadata": fields(&call.metadata),
                        "message_bytes": call.message.as_ref().map(bytes::Bytes::len),
                        "reply": Value::Null,
                    }));
                    let message = self.why("gRPC calls are not answered here");
                    self.told(handle.grpc(GrpcEvent::Close { status: GRPC_UNAVAILABLE, message }).map(|_| ()));
                }
            }
        }
        any
    }
}
