//! One turn: what is asked, what is done with the answer, what came of it.

use super::protocol::Protocol;
use reqwest::Client;
use serde_json::Value;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// The longest that a turn may take, whatever happens to it.
const PATIENCE: Duration = Duration::from_secs(90);

/// What the client does with the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// Reads it.
    Read,
    /// Reads it with a pause before each piece.
    Slow(Duration),
    /// Leaves after so many pieces.
    Leave(usize),
}

/// What the answer has to be.
#[derive(Clone, Debug)]
pub enum Want {
    /// This text.
    Text(String),
    /// A call of a tool with these arguments.
    Tool(String, Value),
    /// 400 that names this field.
    Refusal(&'static str),
}

/// A turn to be sent.
pub struct Turn {
    /// `x-request-id`.
    pub id: String,
    pub protocol: Protocol,
    pub stream: bool,
    pub body: Value,
    pub headers: Vec<(&'static str, String)>,
    pub manner: Manner,
    pub want: Want,
    /// It is a turn of a streaming session, which is never sent twice.
    pub once: bool,
}

/// What came of a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The right answer.
    Right,
    /// The client left, and what it had read was right.
    Left,
    /// Anything else.
    Failed(Failure),
}

/// How a turn failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// In a few words, the same for the same kind.
    pub what: String,
    /// What there is more to tell.
    pub detail: String,
    /// The answer had begun: its status was 200.
    pub begun: bool,
}

/// A turn that has ended.
pub struct Ended {
    pub id: String,
    pub once: bool,
    pub began: Instant,
    pub ended: Instant,
    pub outcome: Outcome,
}

impl Turn {
    /// Sends it and reads the answer.
    pub async fn send(self, client: &Client, gateway: SocketAddr) -> Ended {
        let began = Instant::now();
        let outcome = match tokio::time::timeout(PATIENCE, self.exchange(client, gateway)).await {
            Ok(outcome) => outcome,
            Err(_) => failed("no end", format!("after {PATIENCE:?}"), false),
        };
        Ended { id: self.id, once: self.once, began, ended: Instant::now(), outcome }
    }

    async fn exchange(&self, client: &Client, gateway: SocketAddr) -> Outcome {
        let mut request = client
            .post(format!("http://{gateway}{}", self.protocol.path()))
            .header("x-request-id", &self.id)
            .json(&self.body);
        for (name, value) in &self.headers {
            request = request.header(*name, value);
        }
        let mut response = match request.send().await {
            Ok(response) => response,
            Err(error) => return failed("no answer", error.to_string(), false),
        };
        let status = response.status().as_u16();
        let mut body = Vec::new();
        let mut pieces = 0;
        loop {
            if self.manner == Manner::Leave(pieces) && status == 200 {
                return self.judge_part(&body);
            }
            if let Manner::Slow(pause) = self.manner {
                tokio::time::sleep(pause).await;
            }
            match response.chunk().await {
                Ok(Some(piece)) => body.extend_from_slice(&piece),
                Ok(None) => break,
                Err(_) => return failed("broken off", format!("after {} bytes", body.len()), status == 200),
            }
            pieces += 1;
        }
        self.judge(status, &body)
    }

    fn judge_part(&self, body: &[u8]) -> Outcome {
        let reading = self.protocol.read(body, self.stream);
        match (&self.want, reading.error) {
            (_, Some(error)) => failed("error event", error, true),
            (Want::Text(text), None) if self.stream && !text.starts_with(&reading.text) => {
                failed("altered", format!("{:?} instead of {text:?}", reading.text), true)
            }
            _ => Outcome::Left,
        }
    }

    fn judge(&self, status: u16, body: &[u8]) -> Outcome {
        let text = || String::from_utf8_lossy(body).chars().take(300).collect::<String>();
        if let Want::Refusal(field) = &self.want {
            let right = status == 400 && text().contains(field);
            return if right { Outcome::Right } else { failed("no refusal", format!("{status}: {}", text()), false) };
        }
        if status != 200 {
            return failed(&format!("status {status}"), text(), false);
        }
        let reading = self.protocol.read(body, self.stream);
        if let Some(error) = reading.error {
            return failed("error event", error, true);
        }
        if !reading.ended {
            return failed("no end mark", text(), true);
        }
        let right = match (&self.want, &reading.tool) {
            (Want::Text(wanted), _) => reading.text == *wanted,
            (Want::Tool(name, wanted), Some((called, arguments))) => {
                called == name && serde_json::from_str::<Value>(arguments).is_ok_and(|given| given == *wanted)
            }
            _ => false,
        };
        if right { Outcome::Right } else { failed("altered", format!("{reading:?} instead of {:?}", self.want), true) }
    }
}

fn failed(what: &str, detail: String, begun: bool) -> Outcome {
    Outcome::Failed(Failure { what: what.to_owned(), detail, begun })
}
