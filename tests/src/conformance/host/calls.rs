//! Calls that guests make of the host library: answered here as the test's callees would.

use crate::conformance::case::{Answer, Instead, value_bytes};
use crate::conformance::observed::Recorded;
use crate::conformance::server::{fields, header_map};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use turnstile_plugins::{
    CallCommand, CallHandle, CallId, Callout, GRPC_UNAVAILABLE, GrpcCallout, GrpcEvent, HttpCallout, HttpReply,
    RedisCallout,
};

/// The callees of a test.
#[derive(Default)]
pub struct Calls {
    callees: BTreeMap<String, Answer>,
    asked: Mutex<Vec<CallCommand>>,
    open: Mutex<Vec<Open>>,
    got: Mutex<BTreeMap<String, Vec<Recorded>>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Http,
    Grpc,
    Redis,
}

/// A call that has not been answered.
struct Open {
    handle: CallHandle,
    upstream: String,
    got: Recorded,
    answer: Answer,
    kind: Kind,
    /// Nobody answers; at this time the caller's patience ends.
    ends_ms: Option<u64>,
}

impl Calls {
    /// Callees that answer so.
    pub fn new(callees: BTreeMap<String, Answer>) -> Self {
        Self { callees, ..Self::default() }
    }

    /// Whether there is such a callee, and it speaks HTTP.
    pub fn knows(&self, upstream: &str) -> bool {
        self.callees.get(upstream).is_some_and(|answer| answer.redis.is_none())
    }

    /// Whether there is such a callee, and it speaks Redis' protocol.
    pub fn knows_redis(&self, upstream: &str) -> bool {
        self.callees.get(upstream).is_some_and(|answer| answer.redis.is_some())
    }

    /// What a guest asked, to be done when no guest runs.
    pub fn ask(&self, command: CallCommand) {
        self.asked.lock().push(command);
    }

    /// What callees got since the last question.
    pub fn take(&self) -> BTreeMap<String, Vec<Recorded>> {
        std::mem::take(&mut *self.got.lock())
    }

    /// Does what was asked, and ends calls whose time is over. Replies may ask for more: that comes the next time.
    pub fn serve(&self, now_ms: u64) {
        let commands = std::mem::take(&mut *self.asked.lock());
        for command in commands {
            match command {
                CallCommand::Start(handle, callout) => self.start(handle, *callout, now_ms),
                CallCommand::Send { id, message, end } => {
                    if let Some(open) = self.open.lock().iter_mut().find(|open| open.handle.id() == id) {
                        open.got.body.extend_from_slice(&message);
                    }
                    if end {
                        self.sent_all(id);
                    }
                }
                CallCommand::Close(id) => self.sent_all(id),
                CallCommand::Cancel(id) => drop(self.remove(id)),
            }
        }
        let over = |open: &Open| open.ends_ms.is_some_and(|end| end <= now_ms);
        while let Some(id) = { self.open.lock().iter().find(|open| over(open)).map(|open| open.handle.id()) } {
            if let Some(open) = self.remove(id) {
                fail(open, "no answer in time");
            }
        }
    }

    fn start(&self, handle: CallHandle, callout: Callout, now_ms: u64) {
        let (upstream, got, timeout, streams) = match &callout {
            Callout::Http(call) => (call.upstream.clone(), http_request(call), call.timeout, false),
            Callout::Grpc(call) => (call.upstream.clone(), grpc_request(call), call.timeout, call.message.is_none()),
            Callout::Redis(call) => (call.upstream.clone(), redis_request(call), call.timeout, false),
        };
        let Some(answer) = self.callees.get(&upstream).cloned() else { return };
        let silent = answer.instead == Some(Instead::Silence);
        let patience = timeout.map_or(10_000, |timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX));
        let ends_ms = silent.then(|| now_ms.saturating_add(patience));
        let kind = match callout {
            Callout::Http(_) => Kind::Http,
            Callout::Grpc(_) => Kind::Grpc,
            Callout::Redis(_) => Kind::Redis,
        };
        let open = Open { handle, upstream, got, answer, kind, ends_ms };
        match (silent, streams) {
            (false, false) => self.answer(open),
            (true, false) => {
                self.got.lock().entry(open.upstream.clone()).or_default().push(open.got.clone());
                self.open.lock().push(open);
            }
            (_, true) => self.open.lock().push(open),
        }
    }

    fn sent_all(&self, id: CallId) {
        if let Some(open) = self.remove(id) {
            self.answer(open);
        }
    }

    fn remove(&self, id: CallId) -> Option<Open> {
        let mut open = self.open.lock();
        let at = open.iter().position(|open| open.handle.id() == id)?;
        Some(open.swap_remove(at))
    }

    fn answer(&self, open: Open) {
        if open.answer.instead != Some(Instead::Refuse) {
            self.got.lock().entry(open.upstream.clone()).or_default().push(open.got.clone());
        }
        if open.answer.instead.is_some() {
            return fail(open, "the connection failed");
        }
        let Open { mut handle, answer, kind, got, .. } = open;
        if kind == Kind::Redis {
            let reply = value_bytes(answer.redis.as_deref().unwrap_or_default());
            let _ = handle.redis(Ok(Bytes::from(reply)));
            return;
        }
        if kind == Kind::Http {
            let body = if got.method == "HEAD" { Vec::new() } else { answer.body.whole() };
            let reply = HttpReply {
                status: StatusCode::from_u16(answer.status).unwrap_or_default(),
                headers: header_map(&answer.headers),
                body: Bytes::from(body),
                trailers: header_map(&answer.trailers),
            };
            // A fault of the guest is seen in what becomes of its streams. So below.
            let _ = handle.http(Ok(reply));
            return;
        }
        let mut trailers = header_map(&answer.trailers);
        let told = |trailers: &mut HeaderMap, name: &str| {
            trailers.remove(name).and_then(|v| v.to_str().ok().map(str::to_owned))
        };
        let status = told(&mut trailers, "grpc-status").and_then(|text| text.parse().ok()).unwrap_or(GRPC_UNAVAILABLE);
        let message = told(&mut trailers, "grpc-message").unwrap_or_default();
        let messages = answer.grpc.unwrap_or_default().into_iter().map(|text| GrpcEvent::Message(Bytes::from(text)));
        let events = std::iter::once(GrpcEvent::InitialMetadata(header_map(&answer.headers)))
            .chain(messages)
            .chain([GrpcEvent::TrailingMetadata(trailers), GrpcEvent::Close { status, message }]);
        for event in events {
            if !handle.grpc(event).unwrap_or(false) {
                return;
            }
        }
    }
}

fn fail(open: Open, reason: &str) {
    let Open { mut handle, kind, .. } = open;
    let reason = reason.to_owned();
    let _ = match kind {
        Kind::Http => handle.http(Err(reason)),
        Kind::Redis => handle.redis(Err(reason)),
        Kind::Grpc => handle.grpc(GrpcEvent::Close { status: GRPC_UNAVAILABLE, message: reason }).map(|_| ()),
    };
}

fn http_request(call: &HttpCallout) -> Recorded {
    let mut headers = fields(&call.headers);
    headers.push(("host".into(), call.authority.clone().into_bytes()));
    Recorded {
        method: call.method.to_string(),
        path: call.path.clone(),
        headers,
        body: call.body.to_vec(),
        trailers: fields(&call.trailers),
    }
}

/// The command as it goes over the wire.
fn redis_request(call: &RedisCallout) -> Recorded {
    let mut body = format!("*{}\r\n", call.command.len()).into_bytes();
    for word in &call.command {
        body.extend(format!("${}\r\n", word.len()).into_bytes());
        body.extend_from_slice(word);
        body.extend_from_slice(b"\r\n");
    }
    Recorded { body, ..Recorded::default() }
}

fn grpc_request(call: &GrpcCallout) -> Recorded {
    Recorded {
        method: "POST".into(),
        path: format!("/{}/{}", call.service, call.method),
        headers: fields(&call.metadata),
        body: call.message.clone().unwrap_or_default().to_vec(),
        trailers: Vec::new(),
    }
}
