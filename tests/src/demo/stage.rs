//! What the story plays on: three simulated workers, the gateway, a client, the gateway's log.

use crate::account::Record;
use crate::client::{self, Answer, Stream, Turn};
use serde_json::Value;
use std::fmt::Write as _;
use std::future::Future;
use std::path::PathBuf;
use std::time::Duration;
use tempfile::TempDir;
use turnstile_sim::{Recorded, SimConfig, SimWorker};
use turnstile_tests::process::Gateway;

/// Rows of each worker: few, so that a queue forms.
pub const ROWS: usize = 2;
/// How many workers there are.
pub const WORKERS: usize = 3;
/// The longest wait for anything that has to come.
const PATIENCE: Duration = Duration::from_secs(20);

/// Everything that runs.
pub struct Stage {
    /// The workers, `sim-0` first.
    pub workers: Vec<SimWorker>,
    /// The gateway.
    pub gateway: Gateway,
    client: reqwest::Client,
    log: PathBuf,
    // Last: removed when nothing writes to it any more.
    _dir: TempDir,
}

/// A request that a worker received.
pub struct Received {
    /// Which worker.
    pub worker: usize,
    /// The request.
    pub request: Recorded,
}

impl Stage {
    /// Starts it all and waits until the gateway sees every worker ready.
    ///
    /// # Errors
    /// Something did not start.
    pub async fn set() -> Result<Self, String> {
        let dir = tempfile::Builder::new().prefix("turnstile-demo-").tempdir().map_err(|e| e.to_string())?;
        let log = dir.path().join("access.log");
        let sim = SimConfig {
            max_running_requests: ROWS,
            enable_session_radix_cache: true,
            enable_priority_scheduling: true,
            enable_cache_report: true,
            reasoning: true,
            ..SimConfig::default()
        };
        let mut workers = Vec::new();
        let mut pool = String::from("[[pools]]\n");
        for place in 0..WORKERS {
            let worker = SimWorker::start("127.0.0.1:0", sim.clone()).await.map_err(|e| e.to_string())?;
            let _ = write!(pool, "[[pools.workers]]\nid = \"sim-{place}\"\nurl = \"{}\"\n", worker.url());
            workers.push(worker);
        }
        // A JSON string is a TOML string.
        let text = |path: PathBuf| Value::from(path.display().to_string());
        let config = format!(
            "threads = 2\n[[listeners]]\naddress = \"127.0.0.1:0\"\n[admin]\naddress = \"127.0.0.1:0\"\n{pool}\
             [logging]\naccess = {}\nexplain_headers = true\n[state]\ndir = {}\n",
            text(log.clone()),
            text(dir.path().join("state"))
        );
        let path = dir.path().join("turnstile.toml");
        std::fs::write(&path, config).map_err(|e| format!("{}: {e}", path.display()))?;
        let gateway = Gateway::start(&path).await?;
        let client = reqwest::Client::builder().no_proxy().build().map_err(|e| e.to_string())?;
        let stage = Self { workers, gateway, client, log, _dir: dir };
        stage.until("three ready workers", async || (stage.ready().await? == WORKERS).then_some(())).await?;
        Ok(stage)
    }

    /// Waits until `look` finds something.
    ///
    /// # Errors
    /// It did not within the time allowed.
    pub async fn until<T, F: Future<Output = Option<T>>>(
        &self,
        what: &str,
        mut look: impl FnMut() -> F,
    ) -> Result<T, String> {
        let waiting = async {
            loop {
                if let Some(found) = look().await {
                    return found;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(PATIENCE, waiting).await.map_err(|_| format!("waited in vain for {what}"))
    }

    /// A turn whose answer has begun.
    ///
    /// # Errors
    /// No answer.
    pub async fn begin(&self, turn: &Turn) -> Result<Stream, String> {
        client::send(&self.client, self.gateway.address, turn).await
    }

    /// A whole turn, with its record.
    ///
    /// # Errors
    /// The answer is not a whole one.
    pub async fn turn(&self, turn: &Turn) -> Result<(Answer, Record), String> {
        let stream = self.begin(turn).await?;
        self.end(turn, stream).await
    }

    /// The rest of a turn, with its record.
    ///
    /// # Errors
    /// The answer is not a whole one.
    pub async fn end(&self, turn: &Turn, stream: Stream) -> Result<(Answer, Record), String> {
        let answer = stream.finish().await?;
        if answer.status != 200 || !answer.done {
            return Err(format!("{}: status {}: {}", turn.name, answer.status, answer.content));
        }
        if answer.usage {
            return Err(format!("{}: the client got a usage event that it had not asked for", turn.name));
        }
        Ok((answer, self.record(&turn.name).await?))
    }

    /// The log's line of a turn.
    ///
    /// # Errors
    /// There is none.
    pub async fn record(&self, name: &str) -> Result<Record, String> {
        let find = async || {
            let text = std::fs::read_to_string(&self.log).unwrap_or_default();
            let mut records = text.lines().filter_map(|line| serde_json::from_str(line).ok()).map(Record);
            records.find(|record| record.text("request_id") == name)
        };
        self.until(&format!("the log line of {name}"), find).await
    }

    /// A JSON page of the admin listener.
    pub async fn admin(&self, page: &str) -> Option<Value> {
        self.admin_text(page).await.and_then(|text| serde_json::from_str(&text).ok())
    }

    /// A page of the admin listener.
    pub async fn admin_text(&self, page: &str) -> Option<String> {
        let url = format!("http://{}/{page}", self.gateway.admin);
        self.client.get(url).send().await.ok()?.text().await.ok()
    }

    async fn ready(&self) -> Option<usize> {
        let page = self.admin("workers").await?;
        let workers = page.get("workers")?.as_array()?;
        Some(workers.iter().filter(|w| w.get("state").and_then(Value::as_str) == Some("ready")).count())
    }

    /// Turns in the gateway's queue.
    pub async fn queued(&self) -> Option<u64> {
        self.admin("workers").await?.get("queue_depth")?.as_u64()
    }

    /// Everything the workers received that matches, worker by worker.
    pub fn received(&self, matches: impl Fn(&Recorded) -> bool) -> Vec<Received> {
        let of = |(worker, sim): (usize, &SimWorker)| {
            sim.requests().into_iter().map(move |request| Received { worker, request }).collect::<Vec<_>>()
        };
        self.workers.iter().enumerate().flat_map(of).filter(|received| matches(&received.request)).collect()
    }

    /// The body that a worker received for a turn.
    pub fn body_of(&self, record: &Record) -> Value {
        let rid = record.text("rid").to_owned();
        let found =
            self.received(|r| r.path == "/v1/chat/completions" && r.json().get("rid") == Some(&rid.clone().into()));
        found.first().map(|received| received.request.json()).unwrap_or_default()
    }

    /// A turn's place among those that workers received. Of two on the same worker the first to arrive there comes first;
    /// places of turns on different workers say nothing.
    pub fn place_of(&self, record: &Record) -> Option<usize> {
        let rid = Value::from(record.text("rid"));
        let turns = self.received(|request| request.path == "/v1/chat/completions");
        turns.iter().position(|received| received.request.json().get("rid") == Some(&rid))
    }

    /// Closes of engine sessions that workers received.
    pub fn closes(&self) -> Vec<Received> {
        self.received(|request| request.path == "/close_session")
    }

    /// Stops the gateway, then the workers.
    ///
    /// # Errors
    /// The gateway did not end well.
    pub async fn strike(self) -> Result<(), String> {
        let (status, log) = self.gateway.stop().await?;
        for worker in self.workers {
            worker.shutdown().await;
        }
        if status.success() { Ok(()) } else { Err(format!("the gateway ended with {status}:\n{}", log.join("\n"))) }
    }
}
