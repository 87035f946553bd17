//! Runs the engines of one worker along tokio's clock and hands their events to the requests that wait for them.

use crate::{
    config::SimConfig,
    engine::{Engine, EventKind, Finish, Load, Logged, Request, RequestKey},
    server::unix_us,
};
use hashbrown::{HashMap, HashSet};
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::{Notify, mpsc, watch},
    time::Instant,
};

/// A client that waits for a whole answer is seen to be gone by a poll of this period, in seconds.
const DISCONNECT_POLL_S: f64 = 4.0;

tokio::task_local! {
    /// The engine refuses what is submitted meanwhile, with this status and text.
    pub(crate) static REJECTION: (u16, String);
}

/// Which engine, which request.
type Place = (usize, RequestKey);

struct Route {
    to: mpsc::Sender<(usize, EventKind)>,
    choice: usize,
}

struct Inner {
    engines: Vec<Engine>,
    routes: HashMap<Place, Route>,
    rids: HashSet<String>,
    next_rank: usize,
    late_aborts: Vec<(u64, Place)>,
    /// What is published while the scheduler is stuck, and since when, in microseconds since 1970.
    frozen: Option<(u64, Vec<Load>)>,
}

/// The engines and their clock.
pub(crate) struct Driver {
    config: Arc<SimConfig>,
    started: Instant,
    inner: Mutex<Inner>,
    wake: Notify,
    crashed: watch::Sender<bool>,
}

/// A request that a client waits for. Dropped before its end, it is given up.
pub(crate) struct Live {
    driver: Arc<Driver>,
    events: mpsc::Receiver<(usize, EventKind)>,
    places: Vec<Place>,
    rids: Vec<String>,
    open: usize,
    streams: bool,
}

impl Driver {
    pub(crate) fn new(config: Arc<SimConfig>) -> Self {
        let engines = (0..config.dp_size.max(1)).map(|_| Engine::new(Arc::clone(&config))).collect();
        Self {
            config,
            started: Instant::now(),
            inner: Mutex::new(Inner {
                engines,
                routes: HashMap::new(),
                rids: HashSet::new(),
                next_rank: 0,
                late_aborts: Vec::new(),
                frozen: None,
            }),
            wake: Notify::new(),
            crashed: watch::channel(false).0,
        }
    }

    /// Engine time now, in microseconds.
    fn now_us(&self) -> u64 {
        let elapsed = self.started.elapsed().mul_f64(self.config.speed.max(1e-6));
        u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX)
    }

    /// A span of engine time as the clock counts it.
    pub(crate) fn span(&self, seconds: f64) -> Duration {
        Duration::from_secs_f64((seconds / self.config.speed.max(1e-6)).clamp(0.0, 1e9))
    }

    /// Becomes true when an engine hit the assertion that ends the worker.
    pub(crate) fn crash_watch(&self) -> watch::Receiver<bool> {
        self.crashed.subscribe()
    }

    pub(crate) fn has_crashed(&self) -> bool {
        *self.crashed.borrow()
    }

    /// Keeps the engines going; never ends by itself.
    pub(crate) async fn run(&self) {
        loop {
            let due = {
                let mut inner = self.inner.lock();
                self.pump(&mut inner);
                let late = inner.late_aborts.iter().map(|(due, _)| *due).min();
                inner.engines.iter().filter_map(Engine::next_wake).chain(late).min()
            };
            match due {
                Some(due_us) => {
                    let at = self.started + Duration::from_micros(due_us).div_f64(self.config.speed.max(1e-6));
                    tokio::select! {
                        () = tokio::time::sleep_until(at) => {}
                        () = self.wake.notified() => {}
                    }
                }
                None => self.wake.notified().await,
            }
        }
    }

    fn pump(&self, inner: &mut Inner) {
        let now_us = self.now_us();
        let (due, later) = std::mem::take(&mut inner.late_aborts).into_iter().partition(|(due, _)| *due <= now_us);
        inner.late_aborts = later;
        let due: Vec<(u64, Place)> = due;
        for (_, (rank, key)) in due {
            if let Some(engine) = inner.engines.get_mut(rank) {
                engine.abort(now_us, key);
            }
        }
        for (rank, engine) in inner.engines.iter_mut().enumerate() {
            for event in engine.step(now_us) {
                let place = (rank, event.key);
                let ended = matches!(event.kind, EventKind::Finished(_));
                if let Some(route) = inner.routes.get(&place) {
                    // The receiver may be gone; its request is then being given up.
                    let _ = route.to.try_send((route.choice, event.kind));
                }
                if ended {
                    inner.routes.remove(&place);
                }
            }
            if engine.crashed() {
                self.crashed.send_replace(true);
            }
        }
    }

    /// Submits the requests of one HTTP request, as its choices. Fails with the rid that is already live.
    pub(crate) fn submit(
        self: &Arc<Self>,
        rank: Option<usize>,
        requests: Vec<Request>,
        streams: bool,
    ) -> Result<Live, String> {
        // An output has at most a context of tokens, a beginning and an end, so a client that reads slowly loses nothing.
        let (to, events) = mpsc::channel(requests.len().max(1) * (self.config.context_length + 4));
        let mut inner = self.inner.lock();
        let rids: Vec<String> = requests.iter().map(|request| request.rid.clone()).collect();
        if let Some(taken) = rids.iter().find(|rid| inner.rids.contains(*rid)) {
            return Err(taken.clone());
        }
        inner.rids.extend(rids.iter().cloned());
        if let Ok((status, message)) = REJECTION.try_with(Clone::clone) {
            for choice in 0..rids.len() {
                // There is room for whole outputs.
                let _ = to.try_send((choice, EventKind::Finished(Finish::rejected(status, &message))));
            }
            let open = rids.len();
            return Ok(Live { driver: Arc::clone(self), events, places: Vec::new(), rids, open, streams });
        }
        let now_us = self.now_us();
        let mut places = Vec::with_capacity(requests.len());
        for (choice, request) in requests.into_iter().enumerate() {
            let rank = rank.unwrap_or(inner.next_rank) % inner.engines.len();
            inner.next_rank = (inner.next_rank + 1) % inner.engines.len();
            let Some(engine) = inner.engines.get_mut(rank) else { continue };
            let place = (rank, engine.submit(now_us, request));
            inner.routes.insert(place, Route { to: to.clone(), choice });
            places.push(place);
        }
        self.pump(&mut inner);
        drop(inner);
        self.wake.notify_one();
        let open = places.len();
        Ok(Live { driver: Arc::clone(self), events, places, rids, open, streams })
    }

    /// Does something to every engine; returns the first one's answer.
    pub(crate) fn each<T>(&self, mut act: impl FnMut(u64, &mut Engine) -> T) -> Option<T> {
        let mut inner = self.inner.lock();
        let now_us = self.now_us();
        let mut first = None;
        for engine in &mut inner.engines {
            let answer = act(now_us, engine);
            first.get_or_insert(answer);
        }
        self.pump(&mut inner);
        drop(inner);
        self.wake.notify_one();
        first
    }

    /// Gives up the live requests with this rid, or all.
    pub(crate) fn abort(&self, lives: impl Fn(&str) -> bool) {
        self.each(|now_us, engine| {
            for key in engine.keys_of(&lives) {
                engine.abort(now_us, key);
            }
        });
    }

    /// The published load of each rank, and when it was published, in microseconds since 1970.
    pub(crate) fn loads(&self) -> (u64, Vec<Load>) {
        let mut inner = self.inner.lock();
        self.pump(&mut inner);
        match &inner.frozen {
            Some(frozen) => frozen.clone(),
            None => (unix_us(), inner.engines.iter().map(|engine| engine.load().clone()).collect()),
        }
    }

    /// The gauges of each rank as last written.
    pub(crate) fn logged(&self) -> Vec<Logged> {
        let mut inner = self.inner.lock();
        self.pump(&mut inner);
        inner.engines.iter().map(|engine| engine.logged().clone()).collect()
    }

    /// Stops the engines. `frozen`: what they publish stays what it is, too.
    pub(crate) fn wedge(&self, frozen: bool) {
        if frozen {
            let last = self.loads();
            self.inner.lock().frozen.get_or_insert(last);
        }
        self.each(|now_us, engine| engine.set_paused(now_us, true));
    }

    /// Lets the engines go on.
    pub(crate) fn unwedge(&self) {
        self.inner.lock().frozen = None;
        self.each(|now_us, engine| engine.set_paused(now_us, false));
    }

    /// Tokens of KV that streaming sessions hold between turns, on all ranks together.
    pub(crate) fn held_tokens(&self) -> usize {
        self.inner.lock().engines.iter().map(Engine::held_tokens).sum()
    }

    /// Requests in any engine.
    pub(crate) fn requests(&self) -> usize {
        self.inner.lock().engines.iter().map(Engine::requests).sum()
    }

    /// Sessions that are open or closing, and tags in use, of all ranks together.
    pub(crate) fn sessions(&self) -> (usize, usize) {
        let counts = |sum: (usize, usize), engine: &Engine| (sum.0 + engine.sessions().0, sum.1 + engine.sessions().1);
        self.inner.lock().engines.iter().fold((0, 0), counts)
    }

    /// Would-be crashes of all ranks.
    pub(crate) fn hazards(&self) -> u64 {
        self.inner.lock().engines.iter().map(Engine::hazards).sum()
    }
}

impl Live {
    /// The next event and the choice it belongs to; none after the last choice ended.
    pub(crate) async fn next(&mut self) -> Option<(usize, EventKind)> {
        if self.open == 0 {
            return None;
        }
        let (choice, event) = self.events.recv().await?;
        if matches!(event, EventKind::Finished(_)) {
            self.open -= 1;
            if self.open == 0 {
                self.forget_rids();
            }
        }
        Some((choice, event))
    }

    /// The rid of a choice.
    pub(crate) fn rid(&self, choice: usize) -> &str {
        self.rids.get(choice).map(String::as_str).unwrap_or_default()
    }

    /// The rank that serves a choice.
    pub(crate) fn rank(&self, choice: usize) -> usize {
        self.places.get(choice).map(|(rank, _)| *rank).unwrap_or_default()
    }

    fn forget_rids(&self) {
        let mut inner = self.driver.inner.lock();
        for rid in &self.rids {
            inner.rids.remove(rid);
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        if self.open == 0 {
            return;
        }
        self.forget_rids();
        let mut inner = self.driver.inner.lock();
        let now_us = self.driver.now_us();
        if self.streams {
            for (rank, key) in &self.places {
                if let Some(engine) = inner.engines.get_mut(*rank) {
                    engine.abort(now_us, *key);
                }
            }
        } else {
            #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a small constant")]
            let due = now_us + (DISCONNECT_POLL_S * 1e6) as u64;
            inner.late_aborts.extend(self.places.iter().map(|place| (due, *place)));
        }
        self.driver.pump(&mut inner);
        drop(inner);
        self.driver.wake.notify_one();
    }
}
