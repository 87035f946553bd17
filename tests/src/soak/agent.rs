//! Agents: conversations of every protocol, with and without sessions, well behaved and not.

use super::dice::Dice;
use super::protocol::Protocol;
use super::turn::{Ended, Manner, Turn, Want};
use reqwest::Client;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::mpsc::Sender;

const WORDS: [&str; 16] = [
    "river", "bridge", "night", "copper", "letter", "garden", "winter", "ladder", "signal", "harbour", "meadow",
    "engine", "paper", "thunder", "corner", "silver",
];

/// One agent.
pub struct Agent {
    pub number: u64,
    pub dice: Dice,
    pub client: Client,
    pub gateway: SocketAddr,
    pub stop: Arc<AtomicBool>,
    pub ended: Sender<Ended>,
    /// Turns sent so far.
    pub sent: u64,
}

/// How a conversation is named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Naming {
    Nothing,
    Header,
    Bind,
    /// Tags, or a streaming session on `/generate`.
    Open,
}

/// One conversation.
struct Talk {
    name: String,
    parent: Option<String>,
    protocol: Protocol,
    naming: Naming,
    warm: bool,
    said: Vec<String>,
}

impl Agent {
    /// One conversation after another, until told to stop.
    pub async fn run(mut self) {
        while !self.stop.load(Ordering::Relaxed) {
            let talk = self.talk(None);
            self.hold(talk).await;
        }
    }

    fn talk(&mut self, parent: Option<String>) -> Talk {
        const PROTOCOLS: [Protocol; 8] = [
            Protocol::Chat,
            Protocol::Chat,
            Protocol::Chat,
            Protocol::Messages,
            Protocol::Responses,
            Protocol::Completions,
            Protocol::Generate,
            Protocol::Generate,
        ];
        const NAMINGS: [Naming; 5] = [Naming::Nothing, Naming::Header, Naming::Bind, Naming::Open, Naming::Open];
        Talk {
            name: format!("talk-{}-{}", self.number, self.sent),
            parent,
            protocol: self.dice.pick(&PROTOCOLS).copied().unwrap_or(Protocol::Chat),
            naming: self.dice.pick(&NAMINGS).copied().unwrap_or(Naming::Nothing),
            warm: self.dice.percent(30),
            said: Vec::new(),
        }
    }

    async fn hold(&mut self, mut talk: Talk) {
        let turns = self.dice.between(1, 7);
        for turn in 0..turns {
            if self.stop.load(Ordering::Relaxed) && turn > 0 {
                break;
            }
            let last = turn + 1 == turns;
            if self.dice.percent(6) {
                // Two at a time, as a client does that does not wait.
                let (one, other) = (self.turn(&mut talk, false), self.turn(&mut talk, false));
                let (one, other) =
                    tokio::join!(one.send(&self.client, self.gateway), other.send(&self.client, self.gateway));
                self.report(one).await;
                self.report(other).await;
            } else {
                let turn = self.turn(&mut talk, last);
                let ended = turn.send(&self.client, self.gateway).await;
                self.report(ended).await;
            }
            if self.dice.percent(5) && talk.parent.is_none() {
                let child = self.talk(Some(talk.name.clone()));
                Box::pin(self.hold(child)).await;
            }
            let pause = Duration::from_millis(self.dice.between(5, 200));
            tokio::time::sleep(pause).await;
        }
    }

    async fn report(&self, ended: Ended) {
        // The other end outlives the agents.
        let _ = self.ended.send(ended).await;
    }

    fn words(&mut self, count: u64) -> String {
        let mut text = format!("{} {}", self.number, self.sent);
        for _ in 0..count {
            text.push(' ');
            text.push_str(self.dice.pick(&WORDS).copied().unwrap_or_default());
        }
        text
    }

    fn turn(&mut self, talk: &mut Talk, last: bool) -> Turn {
        self.sent += 1;
        let id = format!("soak-{}-{}", self.number, self.sent);
        let stream = self.dice.percent(70);
        let tools = matches!(talk.protocol, Protocol::Chat | Protocol::Messages | Protocol::Responses);
        let calls = tools && self.dice.percent(20);
        let manner = match self.dice.between(0, 100) {
            0..8 => Manner::Leave(usize::try_from(self.dice.between(0, 12)).unwrap_or_default()),
            8..12 if stream => Manner::Slow(Duration::from_millis(self.dice.between(5, 40))),
            _ => Manner::Read,
        };
        let (directive, mut want) = if calls {
            let arguments = json!({"path": self.words(2), "line": self.sent});
            (format!("[[sim:tool=read_file {arguments}]]"), Want::Tool("read_file".into(), arguments))
        } else {
            let length = if matches!(manner, Manner::Slow(_)) { 60 } else { self.dice.between(3, 40) };
            let text = self.words(length);
            (format!("[[sim:text={text}]]"), Want::Text(text))
        };
        let said = format!("{} {directive}", self.words(6));
        let mut body = talk.protocol.body(&talk.said, &said, stream, calls);
        let mut headers = Vec::new();
        let mut nvext = json!({});
        match talk.naming {
            Naming::Nothing => {}
            Naming::Header => headers.push(("x-dynamo-session-id", talk.name.clone())),
            Naming::Bind | Naming::Open => {
                let open = talk.naming == Naming::Open;
                let action = match (last, open) {
                    (true, _) => Some("close"),
                    (false, true) if talk.said.is_empty() => Some("open"),
                    (false, false) => Some("bind"),
                    (false, true) => None,
                };
                nvext["session_control"] = json!({"session_id": talk.name, "timeout": 3});
                if let Some(action) = action.filter(|_| !(last && self.dice.percent(30))) {
                    nvext["session_control"]["action"] = json!(action);
                }
            }
        }
        if let Some(parent) = &talk.parent {
            headers.push(("x-dynamo-parent-session-id", parent.clone()));
        }
        if talk.warm {
            nvext["agent_hints"] = json!({"speculative_prefill": true, "osl": 40});
        }
        if self.dice.percent(20) {
            nvext["agent_hints"]["priority"] = json!(self.dice.between(0, 30) as i64 - 10);
        }
        if self.dice.percent(1) {
            nvext["agent_hints"]["priority"] = json!("high");
            want = Want::Refusal("priority");
        }
        if nvext != json!({}) {
            body["nvext"] = nvext;
        }
        if self.dice.percent(4) {
            // A large body; the workers ignore what they do not know.
            let size = usize::try_from(self.dice.between(100_000, 1_500_000)).unwrap_or_default();
            body["padding"] = Value::from("x".repeat(size));
        }
        if self.number.is_multiple_of(4) {
            headers.push(("authorization", format!("Bearer tenant-{}", self.number)));
        }
        // What was said stays short: the template is rendered anew each time.
        if talk.said.len() < 8 && matches!(talk.protocol, Protocol::Chat | Protocol::Messages) {
            talk.said.push(said.clone());
            talk.said.push("noted".into());
        } else if talk.said.is_empty() {
            talk.said.push(said.clone());
        }
        let once = talk.protocol == Protocol::Generate && talk.naming == Naming::Open;
        Turn { id, protocol: talk.protocol, stream, body, headers, manner, want, once }
    }
}
