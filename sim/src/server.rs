//! The worker as a server: sockets, connections, life and death.

use crate::{
    config::SimConfig,
    driver::Driver,
    fault::Faults,
    http::{self, Body},
};
use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::{HeaderMap, Method, Request, Response, body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use parking_lot::Mutex;
use std::{
    collections::VecDeque,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use tokio::{
    net::{TcpListener, TcpStream, ToSocketAddrs},
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
    pub(crate) driver: Arc<Driver>,
    pub(crate) faults: Arc<Faults>,
    pub(crate) addr: SocketAddr,
    pub(crate) started: Instant,
    pub(crate) draining: AtomicBool,
    pub(crate) paused: AtomicBool,
    recorded: Mutex<Log>,
    ids: AtomicU64,
    stop: watch::Sender<bool>,
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

    /// Cuts every connection and closes the port.
    pub(crate) fn kill(&self) {
        self.stop.send_replace(true);
    }

    pub(crate) fn recorded(&self) -> Vec<Recorded> {
        self.recorded.lock().requests.iter().cloned().collect()
    }

    fn record(&self, parts: &hyper::http::request::Parts, body: &Bytes) {
        let mut log = self.recorded.lock();
        log.bytes += body.len();
        log.requests.push_back(Recorded {
            method: parts.method.clone(),
            path: parts.uri.path().to_owned(),
            query: parts.uri.query().map(str::to_owned),
            headers: parts.headers.clone(),
            body: body.clone(),
            at_ms: u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
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
        let listener = TcpListener::bind(addr).await?;
        let config = Arc::new(config);
        let shared = Arc::new(Shared {
            driver: Arc::new(Driver::new(Arc::clone(&config))),
            config,
            faults: Arc::new(Faults::default()),
            addr: listener.local_addr()?,
            started: Instant::now(),
            draining: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            recorded: Mutex::new(Log::default()),
            ids: AtomicU64::new(0),
            stop: watch::channel(false).0,
        });
        let mut tasks = JoinSet::new();
        let driver = Arc::clone(&shared);
        tasks.spawn(async move {
            let mut stop = driver.stop.subscribe();
            let mut crash = driver.driver.crash_watch();
            tokio::select! {
                () = driver.driver.run() => {}
                () = becomes_true(&mut stop) => {}
                () = becomes_true(&mut crash) => driver.kill(),
            }
        });
        tasks.spawn(accept(listener, Arc::clone(&shared)));
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

    /// The faults in force.
    pub fn faults(&self) -> &Faults {
        &self.shared.faults
    }

    /// Requests in the engine, waiting or running.
    pub fn engine_requests(&self) -> usize {
        self.shared.driver.requests()
    }

    /// Sessions that are open or closing, and tags in use, of all ranks together.
    pub fn open_sessions(&self) -> (usize, usize) {
        self.shared.driver.sessions()
    }

    /// With `crash_mode` off: how many turns or closes would have ended a stock server.
    pub fn hazards(&self) -> u64 {
        self.shared.driver.hazards()
    }

    /// False once it was killed or crashed.
    pub fn is_alive(&self) -> bool {
        !*self.shared.stop.borrow()
    }

    /// Waits until it is dead.
    pub async fn died(&self) {
        becomes_true(&mut self.shared.stop.subscribe()).await;
    }

    /// What SIGTERM does: the probes answer 503 at once, requests are still served, and once none is left (looked at every
    /// 5 seconds of engine time) the worker ends.
    pub fn drain(&mut self) {
        self.shared.draining.store(true, Ordering::Relaxed);
        let shared = Arc::clone(&self.shared);
        self.tasks.spawn(async move {
            loop {
                tokio::time::sleep(shared.driver.span(DRAIN_POLL_S)).await;
                if shared.driver.requests() == 0 {
                    break;
                }
            }
            shared.kill();
        });
    }

    /// Ends as a crash does: every connection is cut and the port closed, at once.
    pub fn kill(&self) {
        self.shared.kill();
    }

    /// Ends now and waits until every task has ended and the port is free.
    pub async fn shutdown(mut self) {
        self.shared.kill();
        while self.tasks.join_next().await.is_some() {}
    }
}

impl Drop for SimWorker {
    fn drop(&mut self) {
        self.shared.kill();
    }
}

async fn becomes_true(flag: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone, which is the end as well.
    let _ = flag.wait_for(|set| *set).await;
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    let mut stop = shared.stop.subscribe();
    loop {
        tokio::select! {
            () = becomes_true(&mut stop) => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(serve(stream, Arc::clone(&shared)));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
            Some(_) = connections.join_next() => {}
        }
    }
    drop(listener);
    connections.shutdown().await;
}

/// Requests under way on a connection, and when the last one ended.
#[derive(Default)]
pub(crate) struct Activity {
    open: AtomicUsize,
    idle_since: Mutex<Option<tokio::time::Instant>>,
}

/// One request under way.
pub(crate) struct Busy(Arc<Activity>);

impl Busy {
    fn new(activity: &Arc<Activity>) -> Self {
        activity.open.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(activity))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        *self.0.idle_since.lock() = Some(tokio::time::Instant::now());
        self.0.open.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn serve(stream: TcpStream, shared: Arc<Shared>) {
    let _ = stream.set_nodelay(true);
    let activity = Arc::new(Activity::default());
    let mut stop = shared.stop.subscribe();
    let keep_alive = Duration::from_secs_f64(shared.config.keep_alive_s.clamp(0.001, 1e6));
    let service = service_fn({
        let (shared, activity) = (Arc::clone(&shared), Arc::clone(&activity));
        move |request| answer(request, Arc::clone(&shared), Busy::new(&activity))
    });
    let builder = auto::Builder::new(TokioExecutor::new());
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    loop {
        let idle_since = *activity.idle_since.lock();
        let busy = activity.open.load(Ordering::Relaxed) > 0;
        let due = match idle_since {
            Some(since) if !busy => since + keep_alive,
            _ => tokio::time::Instant::now() + keep_alive,
        };
        tokio::select! {
            () = becomes_true(&mut stop) => break,
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "connection ended");
                }
                break;
            }
            () = tokio::time::sleep_until(due) => {
                let idle = activity.open.load(Ordering::Relaxed) == 0
                    && activity.idle_since.lock().is_some_and(|since| since.elapsed() >= keep_alive);
                if idle {
                    connection.as_mut().graceful_shutdown();
                    // Nothing is under way, so this ends at once.
                    let _ = connection.as_mut().await;
                    break;
                }
            }
        }
    }
}

async fn answer(request: Request<Incoming>, shared: Arc<Shared>, busy: Busy) -> Result<Response<Body>, io::Error> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
    if !parts.uri.path().starts_with("/_sim/") {
        shared.record(&parts, &body);
    }
    let response = http::respond(&shared, &parts, body).await?;
    // The request is under way until its body has gone out.
    Ok(response.map(|body| http::holding(body, busy)))
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
