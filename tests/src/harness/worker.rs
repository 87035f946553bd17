//! What tests ask of a simulated worker beyond its own functions.

use super::client::{Request, send};
use super::wait::until;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use turnstile_sim::{Recorded, SimWorker};

/// Tests' view of a simulated worker.
pub trait WorkerExt {
    /// What came in on a path, in order.
    fn on(&self, path: &str) -> Vec<Recorded>;
    /// What came in that generates, by whatever route, in order.
    fn turns(&self) -> Vec<Recorded>;
    /// Stops the engine at once: what comes in waits, probes stay well.
    fn hold(&self) -> impl Future<Output = ()>;
    /// Lets the engine go on.
    fn release(&self) -> impl Future<Output = ()>;
    /// Ends it as a crash does, and waits until connections to it are refused.
    fn die(&self) -> impl Future<Output = ()>;
    /// `host:port`, which is its id in a gateway.
    fn id(&self) -> String;
}

const GENERATING: [&str; 5] = ["/v1/chat/completions", "/v1/completions", "/generate", "/v1/responses", "/v1/messages"];

// === impl SimWorker ===

impl WorkerExt for SimWorker {
    fn on(&self, path: &str) -> Vec<Recorded> {
        self.requests().into_iter().filter(|request| request.path == path).collect()
    }

    fn turns(&self) -> Vec<Recorded> {
        self.requests().into_iter().filter(|request| GENERATING.contains(&request.path.as_str())).collect()
    }

    async fn hold(&self) {
        control(self, &json!({"kind": "wedge"})).await;
    }

    async fn release(&self) {
        control(self, &json!({"kind": "unwedge"})).await;
    }

    async fn die(&self) {
        self.kill();
        // Until then the port takes connections, which end without an answer: a fault of another kind.
        self.died().await;
        until("connections are refused", async || TcpStream::connect(self.addr()).await.is_err()).await;
    }

    fn id(&self) -> String {
        self.addr().to_string()
    }
}

async fn control(worker: &SimWorker, fault: &Value) {
    let answer = send(worker.addr(), &Request::json("/_sim/fault", fault)).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
}
