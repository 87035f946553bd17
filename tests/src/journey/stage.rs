//! The gateway in front of simulated workers, the agents on it, and what an operator sees of both.

use super::agents::{AGENTS, Agents, Traffic};
use super::configuration::{Pool, Station, file};
use super::project::NAME;
use crate::harness::{Samples, swap};
use crate::process::Gateway;
use reqwest::Client;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;
use turnstile_sim::{SimConfig, SimWorker};

/// Workers of each pool.
pub const WORKERS: usize = 3;
/// The pool that the agents use.
pub const BUSY: &str = "sim";
/// A pool on which nothing happens but what the steps ask of it.
pub const QUIET: &str = "quiet";
/// The longest wait for anything that has to come.
const PATIENCE: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(10);

/// Everything that runs.
pub struct Stage {
    busy: Vec<SimWorker>,
    quiet: Vec<SimWorker>,
    twin: SimWorker,
    pub gateway: Gateway,
    pub agents: Agents,
    client: Client,
    /// The gateway's folder.
    pub dir: PathBuf,
    log: Log,
    asked: u32,
}

/// The access log as far as it was read.
struct Log {
    path: PathBuf,
    read: usize,
    records: Vec<Value>,
}

async fn workers(model: &str, count: usize) -> Result<Vec<SimWorker>, String> {
    let config = SimConfig { model: model.to_owned(), speed: 10.0, record_limit: 100, ..SimConfig::default() };
    let mut workers = Vec::new();
    for _ in 0..count {
        workers.push(SimWorker::start("127.0.0.1:0", config.clone()).await.map_err(|e| e.to_string())?);
    }
    Ok(workers)
}

impl Stage {
    /// Starts it all in a folder that is made, with the built-in policies, and waits until the gateway sees every worker.
    ///
    /// # Errors
    /// Something did not start.
    pub async fn set(dir: &Path) -> Result<Self, String> {
        std::fs::create_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
        let (busy, quiet) = (workers(BUSY, WORKERS).await?, workers(QUIET, WORKERS).await?);
        let twin = workers(BUSY, 1).await?.pop().ok_or("no worker to ask directly")?;
        let config = dir.join("turnstile.toml");
        swap(&config, file(&pools(&busy, &quiet), Station::Before));
        let gateway = Gateway::start(&config).await?;
        // Workers close connections that are idle for 5 s, perhaps as a request comes.
        let client = Client::builder().no_proxy().pool_idle_timeout(Duration::from_secs(2));
        let client = client.build().map_err(|e| e.to_string())?;
        let agents = Agents::start(client.clone(), gateway.address, twin.addr(), BUSY);
        let log = Log { path: dir.join("access.log"), read: 0, records: Vec::new() };
        let mut stage = Self { busy, quiet, twin, gateway, agents, client, dir: dir.to_owned(), log, asked: 0 };
        stage
            .until("every worker is ready", async |stage| {
                let ready = stage.metrics().await?.sum("turnstile_worker_state", &[("state", "ready")]);
                Ok((ready >= (2 * WORKERS) as f64).then_some(()))
            })
            .await?;
        stage.goes_on().await?;
        Ok(stage)
    }

    /// What there is.
    pub fn described(&self) -> String {
        format!("built-in policies before {} workers, {AGENTS} agents streaming", 2 * WORKERS)
    }

    /// Waits until `look` finds something. What the agents find wrong ends the wait.
    ///
    /// # Errors
    /// It did not within the time allowed, or a turn failed.
    pub async fn until<T>(
        &mut self,
        what: &str,
        mut look: impl AsyncFnMut(&mut Self) -> Result<Option<T>, String>,
    ) -> Result<T, String> {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            self.agents.traffic()?;
            if let Some(found) = look(self).await? {
                return Ok(found);
            }
            if tokio::time::Instant::now() > deadline {
                return Err(format!("waited in vain until {what}"));
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Waits until every agent has had turns.
    ///
    /// # Errors
    /// A turn failed.
    pub async fn goes_on(&mut self) -> Result<Traffic, String> {
        let goal = self.agents.traffic()?.turns + 3 * AGENTS;
        self.until("the agents go on", async |stage| {
            let traffic = stage.agents.traffic()?;
            Ok((traffic.turns >= goal).then_some(traffic))
        })
        .await
    }

    /// Changes the configuration file and waits until the gateway has it. Returns the generation's number.
    ///
    /// # Errors
    /// The gateway refuses it.
    pub async fn edit(&mut self, station: Station) -> Result<u64, String> {
        let before = self.generation().await?;
        swap(&self.dir.join("turnstile.toml"), file(&pools(&self.busy, &self.quiet), station));
        self.next_generation(before).await
    }

    /// Waits for the generation behind this one.
    ///
    /// # Errors
    /// The gateway refuses what it found.
    pub async fn next_generation(&mut self, before: u64) -> Result<u64, String> {
        let changed = self.until("the gateway has the change", async |stage| {
            let now = stage.generation().await?;
            Ok((now > before).then_some(now))
        });
        match changed.await {
            Ok(now) => Ok(now),
            Err(e) => Err(format!("{e}: {}", self.admin("/config").await?["last_reload_error"])),
        }
    }

    /// The number of the generation that serves.
    ///
    /// # Errors
    /// The gateway does not answer.
    pub async fn generation(&self) -> Result<u64, String> {
        self.admin("/config").await?["generation"].as_u64().ok_or_else(|| "no generation in /config".to_owned())
    }

    /// A page of the admin listener.
    ///
    /// # Errors
    /// The gateway does not answer.
    pub async fn admin(&self, page: &str) -> Result<Value, String> {
        serde_json::from_str(&self.admin_text(page).await?).map_err(|e| format!("{page}: {e}"))
    }

    async fn admin_text(&self, page: &str) -> Result<String, String> {
        let fail = |e: reqwest::Error| format!("{page}: {e}");
        let answer = self.client.get(format!("http://{}{page}", self.gateway.admin)).send().await.map_err(fail)?;
        answer.text().await.map_err(fail)
    }

    /// The metrics.
    ///
    /// # Errors
    /// The gateway does not answer.
    pub async fn metrics(&self) -> Result<Samples, String> {
        Ok(Samples::new(self.admin_text("/metrics").await?))
    }

    /// The new policy in the list of plugins.
    ///
    /// # Errors
    /// It is not there.
    pub async fn plugin(&self) -> Result<Value, String> {
        let page = self.admin("/plugins").await?;
        let list = page["plugins"].as_array().cloned().unwrap_or_default();
        list.into_iter().find(|plugin| plugin["name"] == NAME).ok_or_else(|| format!("no plugin {NAME} in /plugins"))
    }

    /// A turn of nobody's session with a prompt that no worker knows, on workers that have nothing to do: its record.
    ///
    /// # Errors
    /// No answer.
    pub async fn ask_quietly(&mut self) -> Result<Value, String> {
        self.quiet_is_idle().await?;
        self.asked += 1;
        let id = format!("quiet-{}", self.asked);
        let answer = self
            .client
            .post(format!("http://{}/v1/chat/completions", self.gateway.address))
            .header("x-request-id", &id)
            .json(&quiet_body(self.asked))
            .send()
            .await
            .map_err(|e| e.to_string())?;
        let status = answer.status();
        let text = answer.text().await.map_err(|e| e.to_string())?;
        if !status.is_success() {
            return Err(format!("{id}: status {status}: {text}"));
        }
        self.until(&format!("{id} is in the access log"), async |stage| {
            Ok(stage.log.all()?.iter().rev().find(|record| record["request_id"] == id.as_str()).cloned())
        })
        .await
    }

    /// Waits until the gateway sees the quiet workers idle. What it has read of them may be older than their last turn, and an
    /// older report on its way: so it has to ask each of them twice from now on, the second time when it has the first answer.
    ///
    /// # Errors
    /// They stay busy, or the gateway does not answer.
    pub async fn quiet_is_idle(&mut self) -> Result<(), String> {
        // The workers' clocks; each keeps its last requests.
        let reports = |worker: &SimWorker, since: u64| {
            let asked = worker.requests().into_iter().filter(|request| request.path == "/v1/loads");
            asked.map(|request| request.at_ms).filter(|at_ms| *at_ms > since).collect::<Vec<u64>>()
        };
        let last = |worker: &SimWorker| reports(worker, 0).into_iter().max().unwrap_or(0);
        let began: Vec<u64> = self.quiet.iter().map(last).collect();
        self.until("the quiet workers are seen idle", async |stage| {
            if stage.quiet.iter().zip(&began).any(|(worker, since)| reports(worker, *since).len() < 2) {
                return Ok(None);
            }
            let page = stage.admin("/workers").await?;
            let workers = page["workers"].as_array().map(Vec::as_slice).unwrap_or_default();
            let quiet: Vec<&Value> = workers.iter().filter(|worker| worker["pool"] == QUIET).collect();
            let idle = |worker: &&Value| ["in_flight", "running", "waiting"].iter().all(|count| worker[*count] == 0);
            match quiet.len() {
                WORKERS => Ok(quiet.iter().all(idle).then_some(())),
                _ => Err(format!("/workers: {page}")),
            }
        })
        .await
    }

    /// What `turnstile explain` is asked about: such a turn.
    pub fn quiet_question() -> String {
        quiet_body(0).to_string()
    }

    /// The records of a generation so far, those of turns of the agents.
    ///
    /// # Errors
    /// The log cannot be read.
    pub fn records(&mut self, generation: u64) -> Result<Vec<Value>, String> {
        let records = self.log.all()?.iter();
        let own = records.filter(|record| record["generation"] == generation && record["pool"] == BUSY);
        Ok(own.cloned().collect())
    }

    /// The same, once there is one: lines are written a little after their answers.
    ///
    /// # Errors
    /// The log cannot be read, or there is none for too long.
    pub async fn served_by(&mut self, generation: u64) -> Result<Vec<Value>, String> {
        self.until("the access log tells of the generation", async |stage| {
            Ok(Some(stage.records(generation)?).filter(|records| !records.is_empty()))
        })
        .await
    }

    /// Ends the agents, then the gateway, then the workers. Returns what was seen over all.
    ///
    /// # Errors
    /// A turn failed, was altered or was sent twice, or the gateway did not end well.
    pub async fn strike(self) -> Result<(String, Traffic), String> {
        let Self { busy, quiet, twin, mut gateway, agents, mut log, .. } = self;
        let traffic = agents.end().await;
        let restarted = !matches!(gateway.child.try_wait(), Ok(None));
        let ended = gateway.stop().await;
        for worker in busy.into_iter().chain(quiet).chain([twin]) {
            worker.shutdown().await;
        }
        let (traffic, (status, lines)) = (traffic?, ended?);
        if restarted || !status.success() {
            return Err(format!("the gateway ended with {status}:\n{}", lines.join("\n")));
        }
        let records = log.all()?;
        let whole = |record: &&Value| record["status"] == 200 && record["end"] == "finished" && record["attempts"] == 1;
        if let Some(record) = records.iter().find(|record| !whole(record)) {
            return Err(format!("a turn did not end well: {record}"));
        }
        let of_agents = records.iter().filter(|record| record["pool"] == BUSY).count() as u64;
        if of_agents != traffic.turns {
            return Err(format!("{} turns, and {of_agents} lines in the access log", traffic.turns));
        }
        let Traffic { turns, sessions, events } = traffic;
        let seen = format!(
            "{turns} streaming turns of {sessions} conversations, {events} events, each as a worker says it: 0 failed, 0 altered; the \
             gateway was started once"
        );
        Ok((seen, traffic))
    }
}

fn pools<'a>(busy: &[SimWorker], quiet: &[SimWorker]) -> [Pool<'a>; 2] {
    let urls = |workers: &[SimWorker]| workers.iter().map(SimWorker::url).collect();
    [
        Pool { name: BUSY, model: None, workers: urls(busy) },
        Pool { name: QUIET, model: Some(QUIET), workers: urls(quiet) },
    ]
}

fn quiet_body(number: u32) -> Value {
    let text = format!("Question {number}: {}[[sim:tokens=4]]", format!("What is {number}? ").repeat(80));
    json!({"model": QUIET, "messages": [{"role": "user", "content": text}]})
}

// === impl Log ===

impl Log {
    /// All records that are there by now.
    fn all(&mut self) -> Result<&[Value], String> {
        let fail = |e: std::io::Error| format!("{}: {e}", self.path.display());
        let text = match std::fs::read(&self.path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(e) => return Err(fail(e)),
        };
        let new = text.get(self.read..).unwrap_or_default();
        // The last line may be half written.
        let whole = new.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        for line in new.get(..whole).unwrap_or_default().split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let record = serde_json::from_slice(line).map_err(|e| format!("{}: {e}", self.path.display()))?;
            self.records.push(record);
        }
        self.read += whole;
        Ok(&self.records)
    }
}
