//! The workers, each a process of its own.

use super::trouble;
use reqwest::Client;
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

/// The longest wait for a worker to say where it listens.
const PATIENCE: Duration = Duration::from_secs(30);

/// A worker's process.
pub struct Worker {
    /// Its place.
    pub place: usize,
    /// Its port, over all its lives.
    pub port: u16,
    child: Option<Child>,
    program: PathBuf,
    /// Its schedule of faults, and the file it stands in.
    pub schedule: String,
    file: PathBuf,
    /// When its schedule began, for each of its processes.
    pub began: Vec<Instant>,
    /// The next hit to be read.
    next_hit: u64,
}

/// What the workers hold, all together.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held {
    pub requests: u64,
    pub sessions: u64,
    pub tags: u64,
    pub hazards: u64,
}

impl Worker {
    /// Starts it, on a port that is free.
    ///
    /// # Errors
    /// It did not start.
    pub async fn start(program: &Path, dir: &Path, place: usize, schedule: String) -> Result<Self, String> {
        let file = dir.join(format!("faults-{place}.toml"));
        std::fs::write(&file, &schedule).map_err(|e| format!("{}: {e}", file.display()))?;
        let mut worker = Self {
            place,
            port: 0,
            child: None,
            program: program.to_owned(),
            schedule,
            file,
            began: Vec::new(),
            next_hit: 0,
        };
        worker.begin().await?;
        Ok(worker)
    }

    /// Starts its process.
    ///
    /// # Errors
    /// It did not start.
    pub async fn begin(&mut self) -> Result<(), String> {
        let mut child = Command::new(&self.program)
            .args(["sim", "--workers", "1", "--port", &self.port.to_string(), "--speed", "20", "--streaming-session"])
            .arg("--faults")
            .arg(&self.file)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| format!("{}: {e}", self.program.display()))?;
        let stdout = child.stdout.take().ok_or("a worker without standard output")?;
        let mut line = String::new();
        let mut reader = BufReader::new(stdout);
        let said = tokio::time::timeout(PATIENCE, reader.read_line(&mut line)).await;
        let port = line.trim().rsplit(':').next().and_then(|port| port.parse().ok());
        match (said, port) {
            (Ok(Ok(_)), Some(port)) => self.port = port,
            _ => return Err(format!("worker {} did not start: {line}", self.place)),
        }
        self.began.push(Instant::now());
        self.next_hit = 0;
        self.child = Some(child);
        Ok(())
    }

    /// `kill -9`.
    ///
    /// # Errors
    /// It had ended by itself.
    pub async fn kill(&mut self) -> Result<(), String> {
        let mut child = self.child.take().ok_or_else(|| format!("worker {} does not run", self.place))?;
        if let Ok(Some(status)) = child.try_wait() {
            return Err(format!("worker {} had ended by itself: {status}", self.place));
        }
        child.kill().await.map_err(|e| e.to_string())
    }

    /// Whether its process runs.
    pub fn runs(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    /// Reads which requests faults have hit since the last time, by their id.
    pub async fn read_hits(&mut self, client: &Client, hits: &mut HashMap<String, Vec<String>>) {
        // A worker that is away has nothing to say now, and says it later.
        let Ok(answer) = client.get(self.url(&format!("/_sim/hits?from={}", self.next_hit))).send().await else {
            return;
        };
        let Ok(list) = answer.json::<Vec<Value>>().await else { return };
        for hit in list {
            self.next_hit = hit["number"].as_u64().map_or(self.next_hit, |number| number + 1);
            if let (Some(id), Some(kind)) = (hit["request_id"].as_str(), hit["kind"].as_str()) {
                hits.entry(id.to_owned()).or_default().push(kind.to_owned());
            }
        }
    }

    /// Ends all faults, as often as it takes to reach it.
    pub async fn clear(&self, client: &Client) -> bool {
        let cleared = client.delete(self.url("/_sim/fault")).send().await;
        cleared.is_ok_and(|answer| answer.status().is_success())
    }

    /// What it holds; none while it cannot be reached.
    pub async fn held(&self, client: &Client) -> Option<Held> {
        let state: Value = client.get(self.url("/_sim/state")).send().await.ok()?.json().await.ok()?;
        let number = |key: &str| state[key].as_u64();
        Some(Held {
            requests: number("requests")?,
            sessions: number("sessions")?,
            tags: number("tags")?,
            hazards: number("hazards")?,
        })
    }

    /// When it was away by its schedule.
    ///
    /// # Errors
    /// The schedule cannot be read.
    pub fn windows(&self) -> Result<Vec<trouble::Window>, String> {
        let mut windows = Vec::new();
        for (life, began) in self.began.iter().enumerate() {
            let end = self.began.get(life + 1).copied().unwrap_or_else(Instant::now);
            windows.extend(trouble::windows(self.place, &self.schedule, *began, end)?);
        }
        Ok(windows)
    }
}

/// What all of them hold; none while one cannot be reached.
pub async fn held(workers: &[Worker], client: &Client) -> Option<Held> {
    let mut sum = Held::default();
    for worker in workers {
        let held = worker.held(client).await?;
        sum.requests += held.requests;
        sum.sessions += held.sessions;
        sum.tags += held.tags;
        sum.hazards += held.hazards;
    }
    Some(sum)
}
