//! The worker as others see it: starting, asking, ending.

use crate::{
    config::SimConfig,
    driver::Driver,
    fault::Faults,
    life::{self, End, Life},
    port::Port,
};
use bytes::Bytes;
use hyper::{HeaderMap, Method};
use parking_lot::Mutex;
use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use tokio::{
    net::{ToSocketAddrs, lookup_host},
    sync::watch,
    task::JoinSet,
};

/// A draining worker looks this often whether it is idle, in seconds.
const DRAIN_POLL_S: f64 = 5.0;

/// A request as it came in.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// Method.
    pub method: Method,
    /// Path, without the query.
    pub path: String,
    /// Query, without the question mark.
    pub query: Option<String>,
    /// Headers.
    pub headers: HeaderMap,
    /// The whole body.
    pub body: Bytes,
    /// Milliseconds since the worker started, when the body was complete.
    pub at_ms: u64,
}

impl Recorded {
    /// The body as JSON; null when it is none.
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }
}

/// A request that a fault hit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hit {
    /// Counts from 0.
    pub number: u64,
    /// The fault, as it is written down.
    pub kind: &'static str,
    /// Path of the request.
    pub path: String,
    /// Its `x-request-id`.
    pub request_id: Option<String>,
    /// Milliseconds since the worker started.
    pub at_ms: u64,
}

/// The last hits.
#[derive(Default)]
struct Hits {
    list: VecDeque<Hit>,
    next: u64,
}

/// The recorded requests and the bytes of their bodies.
#[derive(Default)]
struct Log {
    requests: VecDeque<Recorded>,
    bytes: usize,
}

impl Log {
    fn drop_oldest(&mut self) {
        if let Some(oldest) = self.requests.pop_front() {
            self.bytes -= oldest.body.len();
        }
    }
}

/// What all connections of a worker share.
pub(crate) struct Shared {
    pub(crate) config: Arc<SimConfig>,
    pub(crate) faults: Faults,
    pub(crate) addr: SocketAddr,
    life: Mutex<Arc<Life>>,
    lives: AtomicU64,
    killed: AtomicBool,
    started: Instant,
    recorded: Mutex<Log>,
    hits: Mutex<Hits>,
    ids: AtomicU64,
    dead: watch::Sender<bool>,
}

impl Shared {
    /// A new id of 32 hex digits.
    pub(crate) fn new_id(&self) -> String {
        let count = self.ids.fetch_add(1, Ordering::Relaxed);
        let mut bytes = [0; 32];
        let parts = [self.config.seed, u64::from(self.addr.port()), count, unix_us()];
        for (place, part) in bytes.chunks_mut(8).zip(parts) {
            place.copy_from_slice(&part.to_le_bytes());
        }
        format!("{:032x}", xxhash_rust::xxh3::xxh3_128(&bytes))
    }

    /// The life that goes on.
    pub(crate) fn life(&self) -> Arc<Life> {
        Arc::clone(&self.life.lock())
    }

    /// Its engines.
    pub(crate) fn driver(&self) -> Arc<Driver> {
        Arc::clone(&self.life.lock().driver)
    }

    /// How many lives there were, this one included.
    pub(crate) fn lives(&self) -> u64 {
        self.lives.load(Ordering::Relaxed)
    }

    /// Begins the next life, with empty engines.
    pub(crate) fn begin_life(&self, warm_at: Instant) {
        *self.life.lock() = Arc::new(Life::new(Driver::new(Arc::clone(&self.config)), warm_at));
        self.lives.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends this life, and there is no next one.
    pub(crate) fn kill(&self) {
        // First the mark: a life that begins meanwhile is ended by it.
        self.killed.store(true, Ordering::SeqCst);
        self.life().end(End::Death);
    }

    pub(crate) fn is_killed(&self) -> bool {
        self.killed.load(Ordering::SeqCst)
    }

    /// The port is closed and every connection gone.
    pub(crate) fn bury(&self) {
        self.dead.send_replace(true);
    }

    fn at_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Notes that a fault hit a request.
    pub(crate) fn hit(&self, kind: &'static str, path: &str, request_id: Option<String>) {
        let mut hits = self.hits.lock();
        let hit = Hit { number: hits.next, kind, path: path.to_owned(), request_id, at_ms: self.at_ms() };
        hits.next += 1;
        hits.list.push_back(hit);
        while hits.list.len() > self.config.record_limit {
            hits.list.pop_front();
        }
    }

    /// The hits kept, from this number on.
    pub(crate) fn hits(&self, from: u64) -> Vec<Hit> {
        self.hits.lock().list.iter().filter(|hit| hit.number >= from).cloned().collect()
    }

    pub(crate) fn recorded(&self) -> Vec<Recorded> {
        self.recorded.lock().requests.iter().cloned().collect()
    }

    pub(crate) fn record(&self, parts: &hyper::http::request::Parts, body: &Bytes) {
        let mut log = self.recorded.lock();
        log.bytes += body.len();
        log.requests.push_back(Recorded {
            method: parts.method.clone(),
            path: parts.uri.path().to_owned(),
            query: parts.uri.query().map(str::to_owned),
            headers: parts.headers.clone(),
            body: body.clone(),
            at_ms: self.at_ms(),
        });
        while log.requests.len() > self.config.record_limit || log.bytes > self.config.record_bytes {
            if log.requests.is_empty() {
                break;
            }
            log.drop_oldest();
        }
    }
}

/// Microseconds since 1970.
pub(crate) fn unix_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map(|now| u64::try_from(now.as_micros()).unwrap_or(0)).unwrap_or(0)
}

/// A running simulated worker. Dropped, it stops as if killed.
pub struct SimWorker {
    shared: Arc<Shared>,
    tasks: JoinSet<()>,
}

impl SimWorker {
    /// Starts a worker that listens on `addr`; port 0 picks a free one.
    ///
    /// # Errors
    /// The address cannot be listened on.
    pub async fn start(addr: impl ToSocketAddrs, config: SimConfig) -> io::Result<Self> {
        let mut port = Err(io::Error::from(io::ErrorKind::AddrNotAvailable));
        for addr in lookup_host(addr).await? {
            port = Port::take(addr);
            if port.is_ok() {
                break;
            }
        }
        let mut port = port?;
        let config = Arc::new(config);
        let driver = Driver::new(Arc::clone(&config));
        let (down, warmup) = (driver.span(config.boot_s), driver.span(config.warmup_s));
        if down.is_zero() {
            port.listen()?;
        }
        let shared = Arc::new(Shared {
            faults: Faults::default(),
            addr: port.addr(),
            life: Mutex::new(Arc::new(Life::new(driver, Instant::now() + down + warmup))),
            lives: AtomicU64::new(1),
            killed: AtomicBool::new(false),
            config,
            started: Instant::now(),
            recorded: Mutex::new(Log::default()),
            hits: Mutex::new(Hits::default()),
            ids: AtomicU64::new(0),
            dead: watch::channel(false).0,
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(life::supervise(port, Arc::clone(&shared), down));
        Ok(Self { shared, tasks })
    }

    /// The address it listens on.
    pub fn addr(&self) -> SocketAddr {
        self.shared.addr
    }

    /// `http://host:port`.
    pub fn url(&self) -> String {
        format!("http://{}", self.shared.addr)
    }

    /// The configuration it runs with.
    pub fn config(&self) -> &SimConfig {
        &self.shared.config
    }

    /// Everything received so far (up to `record_limit` and `record_bytes`), in the order in which the bodies were complete. Requests to
    /// `/_sim/` are not in it.
    pub fn requests(&self) -> Vec<Recorded> {
        self.shared.recorded()
    }

    /// Forgets what was received so far.
    pub fn clear_requests(&self) {
        *self.shared.recorded.lock() = Log::default();
    }

    /// The requests that a fault hit, the last `record_limit` of them; also those under way when the worker died or restarted.
    pub fn hits(&self) -> Vec<Hit> {
        self.shared.hits(0)
    }

    /// The faults in force.
    pub fn faults(&self) -> &Faults {
        &self.shared.faults
    }

    /// Requests in the engine, waiting or running.
    pub fn engine_requests(&self) -> usize {
        self.shared.driver().requests()
    }

    /// Sessions that are open or closing, and tags in use, of all ranks together.
    pub fn open_sessions(&self) -> (usize, usize) {
        self.shared.driver().sessions()
    }

    /// With `crash_mode` off: how many turns or closes would have ended a stock server.
    pub fn hazards(&self) -> u64 {
        self.shared.driver().hazards()
    }

    /// False once it is dead: the port closed, every connection gone, and no restart to come.
    pub fn is_alive(&self) -> bool {
        !*self.shared.dead.borrow()
    }

    /// Waits until it is dead.
    pub async fn died(&self) {
        // An error means that it is gone altogether.
        let _ = self.shared.dead.subscribe().wait_for(|dead| *dead).await;
    }

    /// What SIGTERM does: the probes answer 503 at once, requests are still served, and once none is left (looked at every
    /// 5 seconds of engine time) the worker ends.
    pub fn drain(&mut self) {
        let shared = Arc::clone(&self.shared);
        let life = shared.life();
        life.draining.store(true, Ordering::Relaxed);
        self.tasks.spawn(async move {
            loop {
                tokio::time::sleep(life.driver.span(DRAIN_POLL_S)).await;
                if life.is_idle() {
                    break;
                }
            }
            shared.kill();
        });
    }

    /// Ends as a crash does, and comes back after `down`, with the probes well after `warmup` more. The engine is empty then.
    pub fn restart(&self, down: Duration, warmup: Duration) {
        self.shared.life().end(End::Restart { down, warmup });
    }

    /// Ends as a crash does: requests under way are reset and the port is closed, at once.
    pub fn kill(&self) {
        self.shared.kill();
    }

    /// Ends now and waits until every task has ended and the port is free.
    pub async fn shutdown(mut self) {
        self.kill();
        while self.tasks.join_next().await.is_some() {}
    }
}

impl Drop for SimWorker {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Several workers of one configuration.
pub struct SimFleet {
    workers: Vec<SimWorker>,
}

impl SimFleet {
    /// Starts `count` workers on 127.0.0.1, on ports from `base_port` upwards, or on free ports when it is 0.
    ///
    /// # Errors
    /// A port is taken, or there are none left.
    pub async fn start(count: usize, base_port: u16, config: SimConfig) -> io::Result<Self> {
        let mut workers = Vec::with_capacity(count);
        for place in 0..count {
            let port = match base_port {
                0 => 0,
                base => u16::try_from(place)
                    .ok()
                    .and_then(|place| base.checked_add(place))
                    .ok_or_else(|| io::Error::other("ports run out"))?,
            };
            workers.push(SimWorker::start(("127.0.0.1", port), config.clone()).await?);
        }
        Ok(Self { workers })
    }

    /// The workers, in the order of their ports.
    pub fn workers(&self) -> &[SimWorker] {
        &self.workers
    }

    /// The workers, to change or take out.
    pub fn workers_mut(&mut self) -> &mut Vec<SimWorker> {
        &mut self.workers
    }

    /// The URLs of all.
    pub fn urls(&self) -> Vec<String> {
        self.workers.iter().map(SimWorker::url).collect()
    }

    /// Ends all.
    pub async fn shutdown(self) {
        for worker in self.workers {
            worker.shutdown().await;
        }
    }
}
