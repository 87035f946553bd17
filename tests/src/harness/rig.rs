//! A gateway that runs, with its workers.

use super::client::{Answer, Connection, Request, send};
use super::metrics::Samples;
use super::modules::swap;
use super::setup::Setup;
use super::wait::{until, until_some};
use super::worker::WorkerExt;
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use turnstile::gateway::Gateway;
use turnstile::reload::Source;
use turnstile::run::Running;
use turnstile_sim::SimWorker;

/// A gateway that runs, with its workers. Dropped, all of it ends.
pub struct Rig {
    running: Running,
    /// The workers.
    pub workers: Vec<SimWorker>,
    setup: Setup,
    dir: TempDir,
    answered: Mutex<Answered>,
}

/// Requests of which the gateway has to write in its access log, since they were answered.
#[derive(Default)]
struct Answered {
    /// How often each id was answered.
    times: HashMap<String, usize>,
    /// Those of which the log has not been seen to tell.
    open: HashSet<String>,
}

// === impl Rig ===

impl Rig {
    pub(super) async fn start(setup: Setup) -> Self {
        Self::try_start(setup).await.unwrap_or_else(|refusal| panic!("{refusal}"))
    }

    pub(super) async fn try_start(setup: Setup) -> Result<Self, String> {
        let mut workers = Vec::new();
        for config in &setup.workers {
            workers.push(SimWorker::start("127.0.0.1:0", config.clone()).await.unwrap());
        }
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes) in &setup.files {
            std::fs::write(dir.path().join(name), bytes).unwrap();
        }
        let urls: Vec<String> = workers.iter().map(SimWorker::url).collect();
        let path = dir.path().join("turnstile.toml");
        std::fs::write(&path, setup.render(&urls)).unwrap();
        let source =
            Source { path: Some(path.clone()), fixed: None, listen: None, admin: None, explain_headers: false };
        let running = Running::start(source).await;
        let running = running.map_err(|e| format!("{e}\n{}", std::fs::read_to_string(&path).unwrap()))?;
        Ok(Self { running, workers, setup, dir, answered: Mutex::default() })
    }

    /// Waits until every worker is ready.
    pub async fn ready(&self) {
        let all = self.setup.named_workers();
        until("all workers ready", async || self.gateway().ready_workers() == all).await;
    }

    /// The gateway.
    pub fn gateway(&self) -> &Arc<Gateway> {
        &self.running.gateway
    }

    /// The gateway as a process has it.
    pub fn running(&self) -> &Running {
        &self.running
    }

    /// Where clients connect.
    pub fn addr(&self) -> SocketAddr {
        *self.running.addresses.first().unwrap()
    }

    /// Where administrators connect.
    pub fn admin_addr(&self) -> SocketAddr {
        self.running.admin.unwrap()
    }

    /// Directory of the configuration file.
    pub fn dir(&self) -> &std::path::Path {
        self.dir.path()
    }

    /// The configuration file.
    pub fn config_path(&self) -> PathBuf {
        self.dir.path().join("turnstile.toml")
    }

    /// The only worker.
    pub fn worker(&self) -> &SimWorker {
        assert_eq!(self.workers.len(), 1);
        self.workers.first().unwrap()
    }

    /// The worker with this id.
    pub fn worker_by_id(&self, id: &str) -> &SimWorker {
        self.workers.iter().find(|worker| worker.id() == id).unwrap_or_else(|| panic!("no worker {id}"))
    }

    // === requests ===

    /// A connection to the gateway.
    pub async fn connect(&self) -> Connection {
        Connection::open(self.addr()).await
    }

    /// Sends a request on a connection of its own.
    pub async fn send(&self, request: &Request) -> Answer {
        let answer = send(self.addr(), request).await;
        if let Some(id) = answer.header("x-request-id").filter(|_| request.is_inference()) {
            let mut answered = self.answered.lock();
            *answered.times.entry(id.to_owned()).or_default() += 1;
            answered.open.insert(id.to_owned());
        }
        answer
    }

    /// Waits until the gateway is done with every request that [`Rig::send`] has an answer to: much of what there is to see of a
    /// request comes after its answer, and last of all the line in the access log.
    pub async fn settled(&self) {
        if self.answered.lock().open.is_empty() {
            return;
        }
        until("the access log tells of all that was answered", async || {
            let mut lines: HashMap<String, usize> = HashMap::new();
            for line in self.access_log() {
                *lines.entry(line["request_id"].as_str().unwrap().to_owned()).or_default() += 1;
            }
            let mut answered = self.answered.lock();
            let Answered { times, open } = &mut *answered;
            open.retain(|id| lines.get(id) < times.get(id));
            open.is_empty()
        })
        .await;
    }

    /// GETs.
    pub async fn get(&self, path: &str) -> Answer {
        self.send(&Request::get(path)).await
    }

    /// POSTs JSON.
    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send(&Request::json(path, body)).await
    }

    /// POSTs JSON, and has the decision explained in headers.
    pub async fn explain(&self, path: &str, body: &Value) -> Answer {
        self.send(&Request::json(path, body).header("x-turnstile-explain", "1")).await
    }

    /// Sends a request on a connection of its own and leaves it there: the answer is read later.
    pub async fn begin(&self, request: &Request) -> Connection {
        let mut connection = self.connect().await;
        connection.send(request).await;
        connection
    }

    /// GETs from the admin listener, when the gateway is done with what it has answered.
    pub async fn admin(&self, path: &str) -> Answer {
        self.settled().await;
        send(self.admin_addr(), &Request::get(path)).await
    }

    // === what is to be seen ===

    /// The metrics as they are now.
    pub async fn metrics(&self) -> Samples {
        let answer = self.admin("/metrics").await;
        assert_eq!(answer.status, 200);
        Samples::new(answer.text())
    }

    /// The sum of the samples of one metric that carry all these labels.
    pub async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.metrics().await.sum(name, labels)
    }

    /// Waits until a metric is at least this.
    pub async fn until_metric(&self, name: &str, labels: &[(&str, &str)], least: f64) {
        let what = format!("{name}{labels:?} >= {least}");
        until(&what, async || self.metric(name, labels).await >= least).await;
    }

    /// The lines of the access log so far.
    pub fn access_log(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.dir.path().join("access.log")).unwrap_or_default();
        // The last line may be half written.
        let whole = text.rfind('\n').map_or("", |end| text.get(..end).unwrap());
        whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The access log, once it has so many lines: they are written a little after their answers.
    pub async fn access_log_of(&self, lines: usize) -> Vec<Value> {
        let whole = || Some(self.access_log()).filter(|log| log.len() >= lines);
        until_some(&format!("{lines} lines in the access log"), async || whole()).await
    }

    /// The line of the access log about the request of this id.
    pub async fn record(&self, request_id: &str) -> Value {
        let find = || self.access_log().into_iter().find(|line| line["request_id"] == request_id);
        until_some(&format!("the log line of {request_id}"), async || find()).await
    }

    /// The log line about the request behind an answer.
    pub async fn record_of(&self, answer: &Answer) -> Value {
        self.record(answer.header("x-request-id").unwrap()).await
    }

    /// Waits until so many turns stand in the queue.
    pub async fn until_queued(&self, depth: usize) {
        until(&format!("{depth} turns wait"), async || self.gateway().fleet.admission.depth() == depth).await;
    }

    /// Turns that the gateway counts as in flight, over all workers.
    pub fn in_flight(&self) -> u32 {
        self.gateway().fleet.workers.current().iter().map(|worker| worker.view(0).in_flight).sum()
    }

    /// Waits until nothing is in flight in the gateway or on any worker that lives.
    pub async fn idle(&self) {
        until("nothing in flight", async || {
            let engines = self.workers.iter().filter(|worker| worker.is_alive()).map(SimWorker::engine_requests);
            self.in_flight() == 0 && engines.sum::<usize>() == 0
        })
        .await;
    }

    // === reload ===

    /// Changes the configuration file, as an editor does.
    pub fn edit(&mut self, change: impl FnOnce(&mut Setup)) {
        change(&mut self.setup);
        let urls: Vec<String> = self.workers.iter().map(SimWorker::url).collect();
        swap(&self.config_path(), self.setup.render(&urls));
    }

    /// Sets one key in the configuration file.
    pub fn edit_key(&mut self, key: &str, value: &str) {
        self.edit(|setup| setup.put(key, value));
    }

    /// Waits until this generation serves.
    pub async fn generation(&self, number: u64) {
        let what = format!("generation {number}");
        until(&what, async || self.gateway().generation.load().number >= number).await;
    }

    /// Starts one more worker, which no pool names yet.
    pub async fn add_worker(&mut self) -> usize {
        let config = self.setup.workers.first().unwrap().clone();
        self.workers.push(SimWorker::start("127.0.0.1:0", config.clone()).await.unwrap());
        self.setup.workers.push(config);
        self.workers.len() - 1
    }

    /// Stops the gateway, in a hurry once the token says so, and leaves the workers.
    pub async fn stop_unless(self, hurry: &CancellationToken) -> Vec<SimWorker> {
        self.running.stop_unless(hurry).await;
        self.workers
    }

    /// Stops the gateway in good order, and leaves the workers.
    pub async fn stop(self) -> Vec<SimWorker> {
        self.running.stop().await;
        self.workers
    }
}
