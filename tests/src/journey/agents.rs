//! Agents whose conversations go on all the time. Each streamed answer is compared with what a worker says directly.

use crate::harness::scrub;
use parking_lot::Mutex;
use reqwest::Client;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;

/// Agents at a time.
pub const AGENTS: u64 = 6;
/// Turns of a conversation.
const TURNS: u64 = 4;
/// What an agent thinks between two turns.
const PAUSE: Duration = Duration::from_millis(20);
/// The longest that a turn may take.
const PATIENCE: Duration = Duration::from_secs(120);
/// The path that they use.
const CHAT: &str = "/v1/chat/completions";

/// What went through.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    pub turns: u64,
    pub sessions: u64,
    /// Events of the streams.
    pub events: u64,
}

/// The agents. Dropped, they end.
pub struct Agents {
    shared: Arc<Shared>,
    tasks: JoinSet<()>,
}

struct Shared {
    client: Client,
    gateway: SocketAddr,
    /// A worker that only they ask.
    twin: SocketAddr,
    model: &'static str,
    stop: AtomicBool,
    turns: AtomicU64,
    sessions: AtomicU64,
    events: AtomicU64,
    wrong: Mutex<Vec<String>>,
}

// === impl Traffic ===

impl Traffic {
    /// Adds what went through elsewhere.
    pub fn add(&mut self, other: &Self) {
        self.turns += other.turns;
        self.sessions += other.sessions;
        self.events += other.events;
    }
}

// === impl Agents ===

impl Agents {
    /// Starts them.
    pub fn start(client: Client, gateway: SocketAddr, twin: SocketAddr, model: &'static str) -> Self {
        let shared = Arc::new(Shared {
            client,
            gateway,
            twin,
            model,
            stop: AtomicBool::new(false),
            turns: AtomicU64::new(0),
            sessions: AtomicU64::new(0),
            events: AtomicU64::new(0),
            wrong: Mutex::new(Vec::new()),
        });
        let mut tasks = JoinSet::new();
        for agent in 0..AGENTS {
            let shared = Arc::clone(&shared);
            tasks.spawn(async move { shared.converse(agent).await });
        }
        Self { shared, tasks }
    }

    /// What went through so far.
    ///
    /// # Errors
    /// The first turn that failed or was altered.
    pub fn traffic(&self) -> Result<Traffic, String> {
        if let Some(first) = self.shared.wrong.lock().first() {
            return Err(first.clone());
        }
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let Shared { turns, sessions, events, .. } = &*self.shared;
        Ok(Traffic { turns: read(turns), sessions: read(sessions), events: read(events) })
    }

    /// Ends them, each after the turn that it is in.
    ///
    /// # Errors
    /// As with [`Agents::traffic`].
    pub async fn end(mut self) -> Result<Traffic, String> {
        self.shared.stop.store(true, Ordering::Relaxed);
        while let Some(ended) = self.tasks.join_next().await {
            ended.map_err(|e| format!("an agent broke down: {e}"))?;
        }
        self.traffic()
    }
}

// === impl Shared ===

impl Shared {
    /// One conversation after another.
    async fn converse(&self, agent: u64) {
        for number in 0_u64.. {
            let session = format!("agent-{agent}-talk-{number}");
            self.sessions.fetch_add(1, Ordering::Relaxed);
            let mut messages = vec![json!({"role": "system", "content": "You repair parsers. ".repeat(40)})];
            for turn in 0..TURNS {
                if self.stop.load(Ordering::Relaxed) {
                    return;
                }
                let said =
                    format!("{session}, step {turn}: {}[[sim:tokens=24]]", "Look at the parser again. ".repeat(30));
                messages.push(json!({"role": "user", "content": said}));
                match self.turn(&session, &messages).await {
                    Ok(answer) => messages.push(json!({"role": "assistant", "content": answer})),
                    Err(reason) => self.wrong.lock().push(format!("{session}, turn {turn}: {reason}")),
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
    }

    /// One turn, compared. Returns the assistant's text.
    async fn turn(&self, session: &str, messages: &[Value]) -> Result<String, String> {
        let mut body = json!({"model": self.model, "stream": true, "messages": messages});
        let direct = self.ask(self.twin, &body).await.map_err(|e| format!("a worker asked directly: {e}"))?;
        body["nvext"] = json!({"session_control": {"session_id": session}});
        let through = self.ask(self.gateway, &body).await?;
        if !through.ends_with("data: [DONE]\n\n") {
            return Err(format!("the stream broke off: {through}"));
        }
        if scrub(&through) != scrub(&direct) {
            return Err(format!("altered: {through}\ninstead of {direct}"));
        }
        self.turns.fetch_add(1, Ordering::Relaxed);
        self.events.fetch_add(through.matches("data: ").count() as u64, Ordering::Relaxed);
        Ok(text_of(&through))
    }

    async fn ask(&self, address: SocketAddr, body: &Value) -> Result<String, String> {
        let exchange = async {
            let answer = self.client.post(format!("http://{address}{CHAT}")).json(body).send().await?;
            let status = answer.status();
            Ok((status, answer.text().await?))
        };
        let ended = tokio::time::timeout(PATIENCE, exchange).await.map_err(|_| format!("no end after {PATIENCE:?}"))?;
        let (status, text) = ended.map_err(|e: reqwest::Error| e.to_string())?;
        if status.is_success() { Ok(text) } else { Err(format!("status {status}: {text}")) }
    }
}

/// The text that the events of a stream make up.
fn text_of(stream: &str) -> String {
    let data = stream.lines().filter_map(|line| line.strip_prefix("data: "));
    let events = data.filter_map(|data| serde_json::from_str::<Value>(data).ok());
    events.filter_map(|event| event.pointer("/choices/0/delta/content")?.as_str().map(str::to_owned)).collect()
}
