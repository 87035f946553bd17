//! A real Redis server, for tests of what plugins ask of one.

use super::wait::until_some;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::Stdio;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

/// How many ports are tried.
const ATTEMPTS: usize = 5;

/// A server. Dropped, it ends.
pub struct RedisServer {
    port: u16,
    arguments: Vec<String>,
    dir: TempDir,
    child: Option<Child>,
}

impl RedisServer {
    /// Starts one, with more options such as `--requirepass`.
    ///
    /// # Panics
    /// When there is no `redis-server`: a test that talks to none must not pass.
    pub async fn start(arguments: &[&str]) -> Self {
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        let mut server = Self { port: 0, arguments, dir: TempDir::new().unwrap(), child: None };
        for _ in 0..ATTEMPTS {
            server.port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
            if server.comes_up().await {
                return server;
            }
        }
        panic!("redis-server does not start: {}", server.said());
    }

    /// Starts it again on the same port.
    ///
    /// # Panics
    /// When somebody else has the port now.
    pub async fn run(&mut self) {
        assert!(self.comes_up().await, "redis-server does not start again: {}", self.said());
    }

    /// False when it ends instead: another process took the port in between. That one would take connections as well, so it is
    /// the server's own word that counts.
    async fn comes_up(&mut self) -> bool {
        let _ = std::fs::remove_file(self.log());
        let child = Command::new("redis-server")
            .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--port"])
            .arg(self.port.to_string())
            .arg("--dir")
            .arg(self.dir.path())
            .arg("--logfile")
            .arg(self.log())
            .args(&self.arguments)
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn();
        let mut child = child.expect("redis-server; scripts/redis.sh installs it");
        let up = until_some("the Redis server is up", async || {
            let up = self.said().contains("Ready to accept connections").then_some(true);
            up.or_else(|| child.try_wait().unwrap().map(|_| false))
        });
        let up = up.await;
        self.child = up.then_some(child);
        up
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    fn said(&self) -> String {
        std::fs::read_to_string(self.log()).unwrap_or_default()
    }

    /// Ends it.
    pub async fn stop(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().await.unwrap();
        }
    }

    fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// `redis://host:port`
    pub fn url(&self) -> String {
        format!("redis://{}", self.addr())
    }

    /// What it answers to commands, one a line, past the gateway.
    pub async fn ask(&self, commands: &str) -> String {
        let mut stream = TcpStream::connect(self.addr()).await.unwrap();
        stream.write_all(format!("{commands}\r\nQUIT\r\n").as_bytes()).await.unwrap();
        let mut reply = String::new();
        stream.read_to_string(&mut reply).await.unwrap();
        reply
    }
}
