//! The gateway as a child process: the real binary, which stands beside this one.

use serde_json::Value;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStderr, Command};
use tokio::task::JoinHandle;

/// Lines of the gateway's own log that are kept for a failure.
const LOG_LINES: usize = 200;
/// The longest wait for a start (modules are compiled then, by a machine that may be busy) or an end.
const PATIENCE: Duration = Duration::from_secs(240);

/// A running gateway. Dropped, it is killed.
pub struct Gateway {
    /// The process.
    pub child: Child,
    log: JoinHandle<Vec<String>>,
    /// Where clients connect.
    pub address: SocketAddr,
    /// Where it is administered.
    pub admin: SocketAddr,
}

/// The gateway's binary.
///
/// # Errors
/// It was not built.
pub fn binary() -> Result<PathBuf, String> {
    let own = std::env::current_exe().map_err(|e| format!("cannot tell where this program is: {e}"))?;
    let path = own.with_file_name("turnstile");
    if path.is_file() { Ok(path) } else { Err(format!("there is no gateway at {}: build it first", path.display())) }
}

impl Gateway {
    /// Starts one with a configuration file and waits until it listens.
    ///
    /// # Errors
    /// It did not start; its log is part of the text.
    pub async fn start(config: &Path) -> Result<Self, String> {
        Self::start_program(&binary()?, config).await
    }

    /// The same with another program that takes the gateway's arguments.
    ///
    /// # Errors
    /// As with [`Gateway::start`].
    pub async fn start_program(program: &Path, config: &Path) -> Result<Self, String> {
        let mut child = Command::new(program)
            .arg("run")
            .arg("--config")
            .arg(config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| format!("cannot start the gateway: {e}"))?;
        let stderr = child.stderr.take().ok_or("the gateway has no standard error")?;
        let mut lines = BufReader::new(stderr).lines();
        let mut seen = Vec::new();
        let (mut address, mut admin) = (None, None);
        let listening = async {
            while address.is_none() || admin.is_none() {
                let Ok(Some(line)) = lines.next_line().await else { return Err("the gateway ended") };
                let event: Value = serde_json::from_str(&line).unwrap_or_default();
                let found = |name: &str| event.get(name).and_then(Value::as_str).and_then(|a| a.parse().ok());
                address = address.or_else(|| found("listener"));
                admin = admin.or_else(|| found("admin"));
                seen.push(line);
            }
            Ok(())
        };
        let started =
            tokio::time::timeout(PATIENCE, listening).await.unwrap_or(Err("the gateway did not start in time"));
        match (started, address, admin) {
            (Ok(()), Some(address), Some(admin)) => {
                Ok(Self { child, log: tokio::spawn(collect(lines, seen)), address, admin })
            }
            (started, ..) => {
                Err(format!("{}:\n{}", started.err().unwrap_or("no address in the gateway's log"), seen.join("\n")))
            }
        }
    }

    /// Asks it to stop (SIGTERM) and waits for its end. Returns how it ended, and the last lines of its log.
    ///
    /// # Errors
    /// It did not stop in time; it is killed then.
    pub async fn stop(mut self) -> Result<(ExitStatus, Vec<String>), String> {
        if let Some(pid) = self.child.id() {
            terminate(pid).await?;
        }
        match tokio::time::timeout(PATIENCE, self.child.wait()).await {
            Ok(Ok(status)) => Ok((status, self.log.await.unwrap_or_default())),
            Ok(Err(error)) => Err(format!("cannot wait for the gateway: {error}")),
            Err(_) => {
                let _ = self.child.kill().await;
                Err("the gateway did not stop when told to".into())
            }
        }
    }
}

async fn collect(mut lines: Lines<BufReader<ChildStderr>>, mut kept: Vec<String>) -> Vec<String> {
    while let Ok(Some(line)) = lines.next_line().await {
        if kept.len() >= LOG_LINES {
            kept.remove(0);
        }
        kept.push(line);
    }
    kept
}

/// The shell's `kill` is everywhere, and needs no unsafe call of ours.
async fn terminate(pid: u32) -> Result<(), String> {
    let status = Command::new("sh").args(["-c", "kill -TERM \"$0\"", &pid.to_string()]).status().await;
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("kill: {status}")),
        Err(error) => Err(format!("cannot run sh: {error}")),
    }
}
