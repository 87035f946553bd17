//! What is sent: chat turns of agents. Conversations grow: a later turn of a session begins with the earlier one's messages.

use bytes::Bytes;
use serde_json::json;
use std::fmt::Write as _;

/// A mix of requests.
pub struct Mix {
    /// Whole requests, head and body.
    pub requests: Vec<Bytes>,
    /// Bytes of their bodies on average.
    pub body_bytes: usize,
}

/// How a mix is made.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Conversations.
    pub sessions: usize,
    /// Turns of each.
    pub turns: usize,
    /// Bytes of the longest body, roughly.
    pub bytes: usize,
}

const SYSTEM: &str = "You mend programs.";
/// Bytes of one message.
const MESSAGE: usize = 2048;

impl Mix {
    /// Turns of agents that name their session and its priority. `stream`: the upstream's script.
    pub fn new(shape: Shape, stream: Option<&str>) -> Self {
        let mut requests = Vec::with_capacity(shape.sessions * shape.turns);
        let mut bytes = 0;
        // Turn by turn, as they would come, not session by session.
        for turn in 0..shape.turns {
            for session in 0..shape.sessions {
                let body = body(shape, session, turn, stream.is_some());
                bytes += body.len();
                requests.push(request(&body, stream));
            }
        }
        let body_bytes = bytes / requests.len().max(1);
        Self { requests, body_bytes }
    }

    /// One small request without a session.
    pub fn single() -> Self {
        let body = json!({"model": "bench", "messages": [{"role": "user", "content": "hello"}]}).to_string();
        Self { requests: vec![request(&body, None)], body_bytes: body.len() }
    }
}

/// The body of one turn. A share of it is new in every turn.
pub fn body(shape: Shape, session: usize, turn: usize, stream: bool) -> String {
    let mut control = json!({"session_id": format!("agent-{session:04}-{}", shape.bytes)});
    if turn == 0 {
        control["action"] = "bind".into();
    }
    let hints = json!({"priority": session % 7, "osl": 256});
    let mut body = json!({
        "model": "bench", "messages": [], "stream": stream, "max_tokens": 256, "temperature": 0.2,
        "nvext": {"agent_hints": hints, "session_control": control},
    });
    // What is in there beside the text: members, and the frame of each message.
    let frame = body.to_string().len() + SYSTEM.len() + 40;
    let newest = (shape.bytes / 40).max(24);
    let room = shape.bytes.saturating_sub(frame + (shape.turns - 1 - turn) * newest).max(32);
    let text = code(session, room - room / (MESSAGE / 40));
    let mut messages = vec![json!({"role": "system", "content": SYSTEM})];
    for (place, part) in text.as_bytes().chunks(MESSAGE).enumerate() {
        let role = if place % 2 == 0 { "user" } else { "assistant" };
        messages.push(json!({"role": role, "content": String::from_utf8_lossy(part)}));
    }
    if let Some(last) = messages.last_mut() {
        last["role"] = "user".into();
    }
    body["messages"] = messages.into();
    body.to_string()
}

/// Code-like text of a session: the same beginning whatever its length.
fn code(session: usize, bytes: usize) -> String {
    const NAMES: [&str; 8] = ["header", "value", "offset", "buffer", "length", "token", "state", "index"];
    let mut text = String::with_capacity(bytes + 80);
    let mut seed = session as u64 + 1;
    let mut line = 0;
    while text.len() < bytes {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let name = NAMES.get((seed >> 33) as usize % NAMES.len()).copied().unwrap_or("value");
        let number = seed >> 48;
        let _ = match line % 4 {
            0 => writeln!(text, "fn read_{name}_{number}(input: &[u8]) -> Option<usize> {{"),
            1 => writeln!(text, "    let {name} = input.get({number}..)?;"),
            2 => writeln!(text, "    if {name}.is_empty() {{ return None; }} // {session}"),
            _ => writeln!(text, "    Some({name}.len() + {number})\n}}"),
        };
        line += 1;
    }
    text.truncate(bytes);
    text
}

/// The head is that of the OpenAI SDK for Python.
fn request(body: &str, stream: Option<&str>) -> Bytes {
    let script = stream.map(|s| format!("{}: {s}\r\n", crate::upstream::SCRIPT)).unwrap_or_default();
    Bytes::from(format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: gateway.example:8080\r\nAccept-Encoding: gzip, deflate\r\n\
         Connection: keep-alive\r\nAccept: application/json\r\nContent-Type: application/json\r\n\
         User-Agent: OpenAI/Python 2.8.1\r\nX-Stainless-Lang: python\r\nX-Stainless-Package-Version: 2.8.1\r\n\
         X-Stainless-OS: Linux\r\nX-Stainless-Arch: x64\r\nX-Stainless-Runtime: CPython\r\n\
         X-Stainless-Runtime-Version: 3.12.8\r\nX-Stainless-Async: async:asyncio\r\nx-stainless-retry-count: 0\r\n\
         x-stainless-read-timeout: 600\r\nAuthorization: Bearer sk-0123456789abcdef0123456789abcdef\r\n{script}\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    ))
}
