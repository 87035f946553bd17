//! Child processes and what they cost: CPU time and memory, as the kernel counts them.

use std::net::{SocketAddr, TcpListener};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

pub use turnstile_tests::process::resident_bytes;

/// The longest wait for a child to be ready.
const PATIENCE: Duration = Duration::from_secs(30);

/// A child of this program in another role. It ends when its standard input does, so that none outlives its parent.
pub struct Role {
    child: Child,
    /// What it printed first.
    pub said: String,
}

impl Role {
    /// Starts this program again with `arguments`, and waits for its first line.
    ///
    /// # Errors
    /// It did not start.
    pub async fn start(arguments: &[&str]) -> Result<Self, String> {
        let own = std::env::current_exe().map_err(|e| e.to_string())?;
        let mut child = Command::new(own)
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(|e| e.to_string())?;
        let stdout = child.stdout.take().ok_or("no standard output")?;
        let mut said = String::new();
        let mut reader = BufReader::new(stdout);
        let read = tokio::time::timeout(PATIENCE, reader.read_line(&mut said)).await;
        match read {
            Ok(Ok(1..)) => Ok(Self { child, said: said.trim().to_owned() }),
            _ => Err(format!("{arguments:?} did not start")),
        }
    }

    /// Its process id.
    ///
    /// # Errors
    /// It has ended.
    pub fn pid(&self) -> Result<u32, String> {
        self.child.id().ok_or_else(|| "a child has ended".into())
    }

    /// Ends it.
    pub async fn end(mut self) {
        let _ = self.child.kill().await;
    }
}

/// Blocks until standard input ends: the parent is gone, or wants this child to go.
pub fn wait_for_parent() {
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
}

/// An address that was free a moment ago, for a server that cannot tell which port it got.
///
/// # Errors
/// No port is free.
pub fn free_address() -> Result<SocketAddr, String> {
    TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).map_err(|e| e.to_string())
}

/// Waits until something listens at `address`.
///
/// # Errors
/// Nothing did in time.
pub async fn listens(address: SocketAddr) -> Result<(), String> {
    let waiting = async {
        while tokio::net::TcpStream::connect(address).await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.map_err(|_| format!("nothing listens at {address}"))
}

/// CPU time of all threads of a process, nanoseconds. A thread that runs at this moment counts up to its last tick.
///
/// # Errors
/// The process is gone, or the kernel keeps no such statistics.
pub fn cpu_ns(pid: u32) -> Result<u64, String> {
    let directory = format!("/proc/{pid}/task");
    let tasks = std::fs::read_dir(&directory).map_err(|e| format!("{directory}: {e}"))?;
    let mut sum = 0;
    for task in tasks.flatten() {
        // A thread that has just ended is one that did not run in between.
        let text = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        sum += first_number(&text);
    }
    if sum == 0 { Err(format!("{directory}: no CPU time is counted there")) } else { Ok(sum) }
}

/// CPU time of the calling thread, nanoseconds, exact to a tick (1 to 10 ms).
pub fn own_cpu_ns() -> u64 {
    first_number(&std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default())
}

fn first_number(text: &str) -> u64 {
    text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0)
}
