//! The lives of a worker, from a start to a crash: engine, listener, connections.

use crate::{
    driver::Driver,
    fault::{Action, FaultKind, Moment},
    http::{self, Body},
    port::Port,
    server::Shared,
    wire::Wire,
};
use http_body_util::BodyExt as _;
use hyper::{Request, Response, body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use parking_lot::Mutex;
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::{sync::watch, task::JoinSet};

/// The wait after a listener or an address failed.
const RETRY: Duration = Duration::from_millis(50);

/// What one life of a worker has, and the next one does not.
pub(crate) struct Life {
    pub(crate) driver: Arc<Driver>,
    /// The probes are well from then on.
    pub(crate) warm_at: Instant,
    pub(crate) draining: AtomicBool,
    pub(crate) paused: AtomicBool,
    /// Requests whose answers have not gone out whole.
    under_way: AtomicUsize,
    end: watch::Sender<Option<End>>,
}

/// How a life ends.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    /// There is no next one.
    Death,
    /// The next one begins after `down` and is well after `warmup`.
    Restart { down: Duration, warmup: Duration },
}

impl Life {
    pub(crate) fn new(driver: Driver, warm_at: Instant) -> Self {
        Self {
            driver: Arc::new(driver),
            warm_at,
            draining: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            under_way: AtomicUsize::new(0),
            end: watch::channel(None).0,
        }
    }

    /// Nothing is computed, and nothing is still to be sent.
    pub(crate) fn is_idle(&self) -> bool {
        self.driver.requests() == 0 && self.under_way.load(Ordering::Relaxed) == 0
    }

    /// Ends it; the first end counts.
    pub(crate) fn end(&self, end: End) {
        self.end.send_if_modified(|set| {
            let first = set.is_none();
            set.get_or_insert(end);
            first
        });
    }

    /// It has ended, though not everybody may have seen that.
    fn is_over(&self) -> bool {
        self.end.borrow().is_some() || self.driver.has_crashed()
    }

    /// Waits for ever once it is over: nothing is answered any more, and the connection is about to go.
    async fn goes_on(&self) {
        if self.is_over() {
            std::future::pending::<()>().await;
        }
    }

    async fn ended(&self) -> End {
        let mut end = self.end.subscribe();
        let ended = end.wait_for(Option::is_some).await;
        ended.ok().and_then(|end| *end).unwrap_or(End::Death)
    }
}

/// Lives one life after another, until one ends in death. `down`: before the first.
pub(crate) async fn supervise(mut port: Port, shared: Arc<Shared>, mut down: Duration) {
    loop {
        let life = shared.life();
        let end = tokio::select! {
            end = life.ended() => end,
            () = tokio::time::sleep(down) => {
                let mut connections = JoinSet::new();
                let end = live(&mut port, &shared, &life, &mut connections).await;
                // Each sees the end for itself, so that it can tell whether it had something under way.
                while connections.join_next().await.is_some() {}
                end
            }
        };
        match end {
            End::Death => break,
            End::Restart { down: next, warmup } => {
                hold(&mut port);
                down = next;
                shared.begin_life(Instant::now() + down + warmup);
                if shared.is_killed() {
                    break;
                }
            }
        }
    }
    drop(port);
    shared.bury();
}

fn hold(port: &mut Port) {
    if let Err(error) = port.hold() {
        tracing::warn!(%error, "cannot keep the address");
    }
}

async fn live(port: &mut Port, shared: &Arc<Shared>, life: &Arc<Life>, connections: &mut JoinSet<()>) -> End {
    let mut crash = life.driver.crash_watch();
    let faults = async {
        loop {
            shared.act();
            shared.faults.until_due().await;
        }
    };
    // None of these ends; each gets its turn.
    let works = async {
        tokio::select! {
            () = life.driver.run() => {}
            () = faults => {}
            () = accept(port, shared, life, connections) => {}
        }
    };
    tokio::select! {
        // A life that is over does nothing more.
        biased;
        end = life.ended() => end,
        // The watch ends only with the driver.
        _ = crash.wait_for(|crashed| *crashed) => {
            shared.kill();
            End::Death
        }
        () = works => End::Death,
    }
}

/// Takes connections for ever.
async fn accept(port: &mut Port, shared: &Arc<Shared>, life: &Arc<Life>, connections: &mut JoinSet<()>) {
    let mut refusing = shared.faults.refusing().subscribe();
    loop {
        let refuse = *refusing.borrow_and_update();
        let changed = if refuse { port.hold() } else { port.listen() };
        if let Err(error) = changed {
            tracing::warn!(%error, refuse, "cannot change the listener");
            tokio::time::sleep(RETRY).await;
            continue;
        }
        loop {
            tokio::select! {
                // An error means that the worker is gone, and this with it.
                _ = refusing.changed() => break,
                accepted = port.accept() => match accepted {
                    Ok(stream) => {
                        let _ = stream.set_nodelay(true);
                        connections.spawn(serve(Wire::new(stream), Arc::clone(shared), Arc::clone(life)));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot accept");
                        tokio::time::sleep(RETRY).await;
                    }
                },
                Some(_) = connections.join_next() => {}
            }
        }
    }
}

impl Shared {
    /// Does what is due without a request.
    pub(crate) fn act(&self) {
        for action in self.faults.due() {
            match action {
                Action::Begin(kind) => self.suffer(&kind),
                Action::End(FaultKind::Refuse) => {
                    self.faults.refusing().send_replace(false);
                }
                Action::End(_) => self.suffer(&FaultKind::Unwedge),
            }
        }
    }

    /// A fault of the worker as a whole; others are nothing here.
    pub(crate) fn suffer(&self, kind: &FaultKind) {
        let life = self.life();
        match kind {
            FaultKind::Crash => self.kill(),
            FaultKind::Restart { down, warmup } => life.end(End::Restart { down: *down, warmup: *warmup }),
            FaultKind::Refuse => {
                self.faults.refusing().send_replace(true);
            }
            FaultKind::Wedge { frozen } => life.driver.wedge(*frozen),
            FaultKind::Unwedge => life.driver.unwedge(),
            _ => {}
        }
    }
}

/// Requests under way on a connection, and when the last one ended.
#[derive(Default)]
pub(crate) struct Activity {
    open: Mutex<Vec<UnderWay>>,
    idle_since: Mutex<Option<tokio::time::Instant>>,
}

struct UnderWay {
    number: u64,
    path: String,
    request_id: Option<String>,
}

/// One request under way.
pub(crate) struct Busy {
    life: Arc<Life>,
    activity: Arc<Activity>,
    number: u64,
}

impl Activity {
    fn is_busy(&self) -> bool {
        !self.open.lock().is_empty()
    }

    /// The connection is cut.
    fn lose(&self, shared: &Shared, end: End) {
        let kind = match end {
            End::Death => "crash",
            End::Restart { .. } => "restart",
        };
        for lost in self.open.lock().drain(..).filter(|lost| !lost.path.starts_with("/_sim/")) {
            shared.hit(kind, &lost.path, lost.request_id);
        }
    }
}

impl Busy {
    fn new(life: &Arc<Life>, activity: &Arc<Activity>, request: &Request<Incoming>) -> Self {
        life.under_way.fetch_add(1, Ordering::Relaxed);
        let mut open = activity.open.lock();
        // Different from all that are under way.
        let number = open.last().map_or(0, |last| last.number + 1);
        let path = request.uri().path().to_owned();
        open.push(UnderWay { number, path, request_id: http::request_id(request.headers()) });
        Self { life: Arc::clone(life), activity: Arc::clone(activity), number }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        *self.activity.idle_since.lock() = Some(tokio::time::Instant::now());
        self.activity.open.lock().retain(|open| open.number != self.number);
        self.life.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn serve(wire: Wire, shared: Arc<Shared>, life: Arc<Life>) {
    let activity = Arc::new(Activity::default());
    let mut refusing = shared.faults.refusing().subscribe();
    let keep_alive = Duration::from_secs_f64(shared.config.keep_alive_s.clamp(0.001, 1e6));
    let service = service_fn({
        let (shared, life, activity, wire) =
            (Arc::clone(&shared), Arc::clone(&life), Arc::clone(&activity), wire.clone());
        move |request: Request<Incoming>| {
            let busy = Busy::new(&life, &activity, &request);
            answer(request, Arc::clone(&shared), wire.clone(), busy)
        }
    });
    let builder = auto::Builder::new(TokioExecutor::new());
    let connection = builder.serve_connection(TokioIo::new(wire.clone()), service);
    tokio::pin!(connection);
    loop {
        let idle_since = *activity.idle_since.lock();
        let due = match idle_since {
            Some(since) if !activity.is_busy() => since + keep_alive,
            _ => tokio::time::Instant::now() + keep_alive,
        };
        let idle = tokio::select! {
            // What comes after the end is not even read.
            biased;
            end = life.ended() => {
                if activity.is_busy() {
                    activity.lose(&shared, end);
                    wire.reset_at_close();
                }
                break;
            }
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "connection ended");
                }
                break;
            }
            _ = refusing.wait_for(|refuse| *refuse), if !activity.is_busy() => true,
            () = tokio::time::sleep_until(due) => {
                activity.idle_since.lock().is_some_and(|since| since.elapsed() >= keep_alive)
            }
        };
        if idle && !activity.is_busy() {
            connection.as_mut().graceful_shutdown();
            tokio::select! {
                biased;
                _ = life.ended() => {}
                // Nothing is under way, so this ends at once.
                _ = connection.as_mut() => {}
            }
            break;
        }
    }
}

/// Answers a request, unless the life ends before that. What `/_sim/` was asked for it does, even if that is the end.
async fn answer(
    request: Request<Incoming>,
    shared: Arc<Shared>,
    wire: Wire,
    busy: Busy,
) -> Result<Response<Body>, io::Error> {
    let (parts, body) = request.into_parts();
    busy.life.goes_on().await;
    let response = match http::trouble(&shared, &parts, &wire, Moment::Early).await? {
        http::Trouble::Answer(response) => response,
        http::Trouble::Work(_) => {
            let body = body.collect().await.map_err(io::Error::other)?.to_bytes();
            busy.life.goes_on().await;
            let of_the_worker = !parts.uri.path().starts_with("/_sim/");
            if of_the_worker {
                shared.record(&parts, &body);
            }
            let response = http::respond(&shared, &parts, body, &wire).await?;
            if of_the_worker {
                busy.life.goes_on().await;
            }
            response
        }
    };
    // The request is under way until its body has gone out.
    Ok(response.map(|body| http::holding(body, busy)))
}
