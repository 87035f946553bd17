//! The rounds: the same requests to each proxy in turn, and the CPU time that each proxy spent on them.

use crate::load::Connections;
use crate::process::{Role, cpu_ns, free_address, listens, resident_bytes};
use crate::report::{Case, Figure};
use crate::requests::{Mix, Shape};
use serde_json::Value;
use std::fmt::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;
use turnstile_tests::process::Gateway;

/// Ports of the upstream: so many workers in one pool.
pub const WORKERS: usize = 8;
/// Clients at a time, for whole answers.
const CLIENTS: usize = 16;
/// Clients at a time, for streams.
const STREAMS: usize = 64;
/// After the last answer the proxy has a little left to do: its log, its sums.
const SETTLE: Duration = Duration::from_millis(50);
/// Memory that is not given back within so many looks stays. The gateway's allocator waits a second before it gives any back.
const CALM_LOOKS: usize = 15;
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// How much is sent.
#[derive(Clone)]
pub struct Effort {
    /// Only kinds of requests whose name has this in it.
    pub only: String,
    /// Rounds.
    pub rounds: usize,
    /// Divides the number of requests.
    pub divide: usize,
    /// Idle connections, twice: those that are there before, and those that are weighed.
    pub idle: usize,
}

/// The proxies.
pub struct Proxies {
    upstream: Role,
    plain: Role,
    gateways: [Gateway; 2],
    all: [(SocketAddr, u32); 3],
}

impl Proxies {
    /// Starts them all.
    ///
    /// # Errors
    /// One did not start.
    pub async fn start(dir: &Path) -> Result<Self, String> {
        let upstream = Role::start(&["--role", "upstream", &WORKERS.to_string()]).await?;
        let address = free_address()?;
        let plain = Role::start(&["--role", "plain", &address.to_string(), &upstream.said]).await?;
        listens(address).await?;
        let full = gateway(dir, "full", &upstream.said, true).await?;
        let bare = gateway(dir, "bare", &upstream.said, false).await?;
        let pid = |gateway: &Gateway| gateway.child.id().ok_or("a gateway has ended");
        let all = [(address, plain.pid()?), (full.address, pid(&full)?), (bare.address, pid(&bare)?)];
        Ok(Self { upstream, plain, gateways: [full, bare], all })
    }

    /// Ends them all.
    ///
    /// # Errors
    /// A gateway did not end well.
    pub async fn stop(self) -> Result<(), String> {
        for gateway in self.gateways {
            let (status, log) = gateway.stop().await?;
            if !status.success() {
                return Err(format!("a gateway ended with {status}:\n{}", log.join("\n")));
            }
        }
        self.plain.end().await;
        self.upstream.end().await;
        Ok(())
    }

    /// Resident memory that an idle keep-alive connection adds, after one small request on each.
    ///
    /// As many connections are there before, and stay: what an allocator takes at first and keeps for later is theirs. What it
    /// will give back to the kernel is waited for.
    ///
    /// # Errors
    /// A request failed.
    pub async fn idle_connections(&self, count: usize) -> Result<Vec<Figure>, String> {
        let mut figures = Vec::new();
        let mix = Mix::single();
        let request = mix.requests.first().ok_or("no request")?;
        let names = ["one idle keep-alive connection, plain pingora", "one idle keep-alive connection, turnstile"];
        for (name, (address, pid)) in names.into_iter().zip(self.all) {
            Connections::open(address, CLIENTS).await?.send(&mix.requests, 0, 500).await?;
            let mut first = Connections::open(address, count).await?;
            first.each(request).await?;
            let before = settled_bytes(pid).await?;
            let mut idle = Connections::open(address, count).await?;
            idle.each(request).await?;
            let grown = settled_bytes(pid).await?.saturating_sub(before);
            let budget = if name.ends_with("turnstile") { "<= 32 KB" } else { "" };
            figures.push(Figure { name: name.into(), value: grown as f64 / count as f64 / 1024.0, unit: "KB", budget });
        }
        Ok(figures)
    }

    /// CPU of each kind of request.
    ///
    /// # Errors
    /// A request failed.
    pub async fn cases(&self, effort: &Effort) -> Result<Vec<Case>, String> {
        let kinds = [
            Kind::whole("chat 500 B", 500, 64, 8, 4000, Some(2.0)),
            Kind::whole("chat 30 KB", 30_000, 32, 4, 2000, None),
            Kind::whole("chat 400 KB", 400_000, 12, 4, 480, Some(1.3)),
            Kind::stream("SSE chunk, each alone (2 ms between)", "1 2", Some(1.3)),
            Kind::stream("SSE chunk, in bursts of 8 (16 ms between)", "8 16", Some(1.3)),
        ];
        let mut cases = Vec::new();
        for kind in kinds.iter().filter(|kind| kind.name.contains(&effort.only)) {
            let case = self.case(kind, effort).await?;
            cases.push(case);
        }
        Ok(cases)
    }

    async fn case(&self, kind: &Kind, effort: &Effort) -> Result<Case, String> {
        let mixes = kind.mixes();
        let size = mixes.first().map_or(0, |mix| mix.body_bytes);
        let name =
            if kind.chunks == 0.0 { format!("{} ({size} B on average)", kind.name) } else { kind.name.to_owned() };
        let mut case = Case::new(name, kind.budget);
        let total = kind.total(effort);
        let mut from = 0;
        for round in 0..effort.rounds {
            for turn in 0..self.all.len() {
                let proxy = (round + turn) % self.all.len();
                let Some(&(address, pid)) = self.all.get(proxy) else { continue };
                let cost = kind.cost_us(&mixes, address, pid, from, total).await?;
                if let Some(rounds) = case.rounds.get_mut(proxy) {
                    rounds.push(cost);
                }
            }
            from += total;
            eprintln!("{}: round {} of {}", kind.name, round + 1, effort.rounds);
        }
        Ok(case)
    }
}

/// A kind of request.
pub struct Kind {
    /// Its name.
    pub name: &'static str,
    shape: Shape,
    scripts: Vec<Option<String>>,
    clients: usize,
    total: usize,
    /// Chunks that the longer stream has more.
    chunks: f64,
    budget: Option<f64>,
}

impl Kind {
    /// The requests themselves.
    pub fn mixes(&self) -> Vec<Mix> {
        self.scripts.iter().map(|script| Mix::new(self.shape, script.as_deref())).collect()
    }

    /// How many are sent in a round.
    pub fn total(&self, effort: &Effort) -> usize {
        (self.total / effort.divide).max(self.clients)
    }

    /// CPU that a proxy spends on one request, or on one chunk, us. The requests are taken from place `from` on.
    ///
    /// # Errors
    /// A request failed, or the proxy is gone.
    pub async fn cost_us(
        &self,
        mixes: &[Mix],
        address: SocketAddr,
        pid: u32,
        from: usize,
        total: usize,
    ) -> Result<f64, String> {
        let mut costs = Vec::new();
        for mix in mixes {
            let mut clients = Connections::open(address, self.clients).await?;
            // Connections and pools are warm before anything is counted.
            clients.send(&mix.requests, from, 2 * self.clients).await?;
            tokio::time::sleep(SETTLE).await;
            let before = cpu_ns(pid)?;
            clients.send(&mix.requests, from, total).await?;
            tokio::time::sleep(SETTLE).await;
            costs.push((cpu_ns(pid)? - before) as f64 / total as f64 / 1e3);
        }
        Ok(match costs.as_slice() {
            // What the longer stream costs more than the shorter, over the chunks it has more.
            [short, long] => (long - short) / self.chunks,
            [whole, ..] => *whole,
            [] => 0.0,
        })
    }

    /// Answered as a whole.
    pub fn whole(
        name: &'static str,
        bytes: usize,
        sessions: usize,
        turns: usize,
        total: usize,
        budget: Option<f64>,
    ) -> Self {
        let shape = Shape { sessions, turns, bytes };
        Self { name, shape, scripts: vec![None], clients: CLIENTS, total, chunks: 0.0, budget }
    }

    /// Answered by a stream, of which the cost of a chunk is wanted.
    pub fn stream(name: &'static str, rhythm: &str, budget: Option<f64>) -> Self {
        let (short, long) = (16, 216);
        Self {
            name,
            shape: Shape { sessions: 64, turns: 8, bytes: 500 },
            scripts: [short, long].map(|chunks| Some(format!("{chunks} {rhythm}"))).into(),
            clients: STREAMS,
            total: 256,
            chunks: f64::from(long - short),
            budget,
        }
    }
}

/// Resident memory of a process once it does not shrink any more.
async fn settled_bytes(pid: u32) -> Result<u64, String> {
    let mut least = resident_bytes(pid)?;
    let mut calm = 0;
    while calm < CALM_LOOKS {
        tokio::time::sleep(LOOK_EVERY).await;
        let now = resident_bytes(pid)?;
        calm = if now < least { 0 } else { calm + 1 };
        least = least.min(now);
    }
    Ok(least)
}

async fn gateway(dir: &Path, name: &str, upstreams: &str, full: bool) -> Result<Gateway, String> {
    let text = |path: std::path::PathBuf| Value::from(path.display().to_string());
    let mut config = String::from(if full { "" } else { "plugins = []\n" });
    // Not beside the configuration, whose directory is watched.
    let logs = dir.join("log");
    std::fs::create_dir_all(&logs).map_err(|e| format!("{}: {e}", logs.display()))?;
    let access = if full { text(logs.join("access.log")) } else { "off".into() };
    let _ = write!(
        config,
        "threads = 1\n[[listeners]]\naddress = \"127.0.0.1:0\"\n[admin]\naddress = \"127.0.0.1:0\"\n\
         [logging]\naccess = {access}\n[state]\ndir = {}\n[[pools]]\nworkers = [\n",
        text(dir.join("state"))
    );
    for address in upstreams.split(' ') {
        let _ = writeln!(config, "  \"http://{address}\",");
    }
    config.push_str("]\n");
    let path = dir.join(format!("{name}.toml"));
    std::fs::write(&path, config).map_err(|e| format!("{}: {e}", path.display()))?;
    let gateway = Gateway::start(&path).await?;
    ready(&gateway).await?;
    Ok(gateway)
}

/// Waits until the gateway sees every worker ready.
pub async fn ready(gateway: &Gateway) -> Result<(), String> {
    let client = reqwest::Client::builder().no_proxy().build().map_err(|e| e.to_string())?;
    let url = format!("http://{}/workers", gateway.admin);
    let waiting = async {
        loop {
            let page = async { client.get(&url).send().await?.json::<Value>().await };
            let page = page.await.unwrap_or_default();
            let workers = page.get("workers").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
            let ready = workers.iter().filter(|w| w.get("state").and_then(Value::as_str) == Some("ready")).count();
            if ready == WORKERS {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let waited = tokio::time::timeout(Duration::from_secs(30), waiting).await;
    waited.map_err(|_| "the gateway does not see its workers ready".into())
}
