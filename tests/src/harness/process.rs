//! Gateway and workers as processes of their own, for what only the end of a process can show.

use super::client::{Answer, Request, send};
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::task::JoinSet;

/// The longest wait for a start (modules are compiled then, by a machine that may be busy) or an end.
const PATIENCE: Duration = Duration::from_secs(240);
/// How often a condition is looked at.
const LOOK: Duration = Duration::from_millis(2);

/// A process, and what it has printed. Dropped, it is killed.
struct Process {
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
    /// Read what it prints, until it has ended.
    readers: JoinSet<()>,
}

/// What `look` finds, as soon as it does.
async fn found<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let looking = async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            tokio::time::sleep(LOOK).await;
        }
    };
    tokio::time::timeout(PATIENCE, looking).await.unwrap_or_else(|_| panic!("waited in vain: {what}"))
}

/// A gateway.
pub struct GatewayProcess {
    process: Process,
    /// Where clients connect.
    pub addr: SocketAddr,
    /// Where administrators connect.
    pub admin: SocketAddr,
}

/// A simulated worker.
pub struct WorkerProcess {
    _process: Process,
    /// Where it listens.
    pub addr: SocketAddr,
}

// === impl Process ===

impl Process {
    fn start(binary: &str, arguments: &[&str], log: bool) -> Self {
        let (stdout, stderr) = if log { (Stdio::null(), Stdio::piped()) } else { (Stdio::piped(), Stdio::inherit()) };
        let mut command = Command::new(binary);
        command.args(arguments).stdin(Stdio::null()).stdout(stdout).stderr(stderr).kill_on_drop(true);
        let mut child = command.spawn().unwrap();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let mut readers = JoinSet::new();
        if let Some(stderr) = child.stderr.take() {
            readers.spawn(keep(stderr, Arc::clone(&lines)));
        }
        if let Some(stdout) = child.stdout.take() {
            readers.spawn(keep(stdout, Arc::clone(&lines)));
        }
        Self { child, lines, readers }
    }

    fn text(&self) -> String {
        self.lines.lock().join("\n")
    }

    /// What `find` finds in a line, as soon as there is one.
    async fn line<T>(&self, what: &str, find: impl Fn(&str) -> Option<T>) -> T {
        found(what, async || self.lines.lock().iter().find_map(|line| find(line))).await
    }

    async fn signal(&self, name: &str) {
        let pid = self.child.id().expect("it runs").to_string();
        let status = Command::new("sh").args(["-c", "kill -s \"$0\" \"$1\"", name, &pid]).status().await.unwrap();
        assert!(status.success());
    }

    /// Waits for its end. All that it has printed is there then.
    async fn ended(&mut self) -> ExitStatus {
        let (child, readers) = (&mut self.child, &mut self.readers);
        let ending = async {
            let status = child.wait().await;
            while readers.join_next().await.is_some() {}
            status
        };
        let ended = tokio::time::timeout(PATIENCE, ending).await;
        ended.unwrap_or_else(|_| panic!("it runs on\n{}", self.text())).unwrap()
    }
}

async fn keep(output: impl AsyncRead + Unpin, lines: Arc<Mutex<Vec<String>>>) {
    let mut read = BufReader::new(output).lines();
    while let Ok(Some(line)) = read.next_line().await {
        lines.lock().push(line);
    }
}

// === impl GatewayProcess ===

impl GatewayProcess {
    /// Starts one, without waiting that it serves.
    fn spawn(binary: &str, config: &Path) -> Process {
        Process::start(binary, &["run", "--config", config.to_str().unwrap()], true)
    }

    /// Starts one and waits until it serves.
    pub async fn start(binary: &str, config: &Path) -> Self {
        let process = Self::spawn(binary, config);
        let told = |name: &'static str| {
            move |line: &str| {
                let event: Value = serde_json::from_str(line).unwrap_or_default();
                event.get(name).and_then(Value::as_str).and_then(|address| address.parse().ok())
            }
        };
        let addr = process.line("where it listens", told("listener")).await;
        let admin = process.line("where it is administered", told("admin")).await;
        let gateway = Self { process, addr, admin };
        found("it is ready", async || {
            let answer = send(addr, &Request::get("/ready")).await;
            (answer.status == 200 && answer.json()["ready_workers"] == gateway.workers().await).then_some(())
        })
        .await;
        gateway
    }

    /// Starts one that cannot start; what it said.
    pub async fn refused(binary: &str, config: &Path) -> String {
        let mut process = Self::spawn(binary, config);
        assert!(!process.ended().await.success());
        process.text()
    }

    /// How many workers it has that do not drain.
    async fn workers(&self) -> usize {
        let workers = self.admin("GET", "/workers").await.json();
        workers["workers"].as_array().unwrap().iter().filter(|worker| worker["draining"] == false).count()
    }

    /// Asks the admin listener.
    pub async fn admin(&self, method: &str, path: &str) -> Answer {
        send(self.admin, &Request::new(method, path)).await
    }

    /// One metric without labels.
    pub async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        super::Samples::new(self.admin("GET", "/metrics").await.text()).sum(name, labels)
    }

    /// What it has logged.
    pub fn log(&self) -> String {
        self.process.text()
    }

    /// Ends it as `kill -9` does.
    pub async fn kill(mut self) {
        self.process.child.start_kill().unwrap();
        self.process.ended().await;
    }

    /// Sends it a signal.
    pub async fn signal(&self, name: &str) {
        self.process.signal(name).await;
    }

    /// Waits for its end. How it ended, and what it has logged.
    pub async fn ended(mut self) -> (ExitStatus, String) {
        let status = self.process.ended().await;
        let log = self.process.text();
        assert!(log.contains("\"stopped\""), "its last word is missing\n{log}");
        (status, log)
    }
}

// === impl WorkerProcess ===

impl WorkerProcess {
    /// Starts one with arguments of `turnstile sim`.
    pub async fn start(binary: &str, arguments: &[&str]) -> Self {
        let arguments = [&["sim", "--workers", "1", "--port", "0"], arguments].concat();
        let process = Process::start(binary, &arguments, false);
        let addr = process.line("its URL", |line| line.strip_prefix("http://")?.parse().ok()).await;
        Self { _process: process, addr }
    }

    /// What came in on a path, in order, as JSON.
    pub async fn on(&self, path: &str) -> Vec<Value> {
        let all = send(self.addr, &Request::get("/_sim/requests")).await.json();
        let on = all.as_array().unwrap().iter().filter(|request| request["path"] == path);
        on.map(|request| serde_json::from_str(request["body"].as_str().unwrap()).unwrap()).collect()
    }

    /// Ids of the engine sessions that were opened here and not closed since, streaming ones and tags.
    pub async fn open(&self) -> BTreeSet<String> {
        let all = send(self.addr, &Request::get("/_sim/requests")).await.json();
        let mut open = BTreeSet::new();
        for request in all.as_array().unwrap() {
            let body: Value = serde_json::from_str(request["body"].as_str().unwrap()).unwrap_or_default();
            let Some(id) = body["session_id"].as_str().map(str::to_owned) else { continue };
            if request["path"] == "/close_session" {
                open.remove(&id);
            } else {
                open.insert(id);
            }
        }
        open
    }

    /// What the engine tells of itself.
    pub async fn state(&self) -> Value {
        send(self.addr, &Request::get("/_sim/state")).await.json()
    }
}
