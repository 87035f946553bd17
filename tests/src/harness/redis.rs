//! A real Redis server, for tests of what plugins ask of one.

use super::wait::until;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::Stdio;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

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
        // Another process may take the port in between; then the server does not come up, and the test says so.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
        let mut server = Self { port, arguments, dir: TempDir::new().unwrap(), child: None };
        server.run().await;
        server
    }

    /// Starts it again on the same port.
    pub async fn run(&mut self) {
        let child = Command::new("redis-server")
            .args(["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--port"])
            .arg(self.port.to_string())
            .arg("--dir")
            .arg(self.dir.path())
            .args(&self.arguments)
            .stdout(Stdio::null())
            .kill_on_drop(true)
            .spawn();
        self.child = Some(child.expect("redis-server; scripts/redis.sh installs it"));
        until("the Redis server listens", async || TcpStream::connect(self.addr()).await.is_ok()).await;
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
