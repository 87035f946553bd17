//! An agent's client: chat turns with a streamed answer.

use reqwest::{Client, Response};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::SocketAddr;

/// One request.
#[derive(Clone)]
pub struct Turn {
    /// `x-request-id`, and the turn's name in the account.
    pub name: String,
    /// The body.
    pub body: Value,
    /// Further headers.
    pub headers: Vec<(&'static str, String)>,
}

/// What came back.
#[derive(Default)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// `x-turnstile-*` headers.
    pub explained: BTreeMap<String, String>,
    /// The assistant message, as it goes into the history.
    pub content: String,
    /// Tool calls: id, name, arguments.
    pub tool_calls: Vec<[String; 3]>,
    /// Why it ended.
    pub finish_reason: String,
    /// Data events, `[DONE]` included.
    pub events: usize,
    /// The last event was `[DONE]`.
    pub done: bool,
    /// A usage that nobody asked for.
    pub usage: bool,
}

/// An answer on its way.
pub struct Stream {
    response: Response,
    rest: Vec<u8>,
    answer: Answer,
}

/// Sends a turn and waits for the head of its answer.
///
/// # Errors
/// No answer.
pub async fn send(client: &Client, gateway: SocketAddr, turn: &Turn) -> Result<Stream, String> {
    let mut request = client
        .post(format!("http://{gateway}/v1/chat/completions"))
        .header("x-request-id", &turn.name)
        .header("x-turnstile-explain", "1")
        .header("authorization", "Bearer demo")
        .json(&turn.body);
    for (name, value) in &turn.headers {
        request = request.header(*name, value);
    }
    let response = request.send().await.map_err(|e| format!("{}: {e}", turn.name))?;
    let explained = response
        .headers()
        .iter()
        .filter(|(name, _)| name.as_str().starts_with("x-turnstile-"))
        .map(|(name, value)| (name.to_string(), value.to_str().unwrap_or_default().to_owned()))
        .collect();
    let answer = Answer { status: response.status().as_u16(), explained, ..Answer::default() };
    Ok(Stream { response, rest: Vec::new(), answer })
}

impl Stream {
    /// Reads one more piece of the body. False at its end.
    ///
    /// # Errors
    /// The answer broke off.
    pub async fn more(&mut self) -> Result<bool, String> {
        let Some(chunk) = self.response.chunk().await.map_err(|e| format!("the answer broke off: {e}"))? else {
            return Ok(false);
        };
        self.rest.extend_from_slice(&chunk);
        while let Some(end) = self.rest.windows(2).position(|pair| pair == b"\n\n") {
            let event: Vec<u8> = self.rest.drain(..end + 2).collect();
            let text = String::from_utf8_lossy(&event);
            if let Some(data) = text.trim().strip_prefix("data: ") {
                self.answer.take(data);
            }
        }
        Ok(true)
    }

    /// Some of the answer's text is there.
    pub fn has_text(&self) -> bool {
        !self.answer.content.is_empty()
    }

    /// Data events so far.
    pub fn events(&self) -> usize {
        self.answer.events
    }

    /// Reads to the end.
    ///
    /// # Errors
    /// The answer broke off.
    pub async fn finish(mut self) -> Result<Answer, String> {
        while self.more().await? {}
        if self.answer.status != 200 {
            self.answer.content = String::from_utf8_lossy(&self.rest).into_owned();
        }
        Ok(self.answer)
    }
}

impl Answer {
    fn take(&mut self, data: &str) {
        self.events += 1;
        self.done = data == "[DONE]";
        let event: Value = serde_json::from_str(data).unwrap_or_default();
        self.usage |= event.get("usage").is_some_and(|usage| !usage.is_null());
        let choice = event.pointer("/choices/0").unwrap_or(&Value::Null);
        let text = |value: &Value, key: &str| value.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let delta = choice.get("delta").unwrap_or(&Value::Null);
        self.content.push_str(&text(delta, "content"));
        for call in delta.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
            let function = call.get("function").unwrap_or(&Value::Null);
            if call.get("id").is_some_and(Value::is_string) {
                self.tool_calls.push([text(call, "id"), text(function, "name"), String::new()]);
            }
            if let Some([_, _, arguments]) = self.tool_calls.last_mut() {
                arguments.push_str(&text(function, "arguments"));
            }
        }
        if choice.get("finish_reason").is_some_and(Value::is_string) {
            self.finish_reason = text(choice, "finish_reason");
        }
    }

    /// The assistant message for the history. Reasoning is not sent back, as most clients do.
    pub fn message(&self) -> Value {
        let mut message = json!({"role": "assistant", "content": self.content});
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.iter().map(|[id, name, arguments]| {
                json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
            });
            message["tool_calls"] = calls.collect();
        }
        message
    }
}
