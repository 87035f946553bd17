//! A replay under one policy, in virtual time: the shipped fleet code and policies before engine models.
//!
//! What is left out is the network: a request reaches its worker at once, an answer its client. Nothing fails.

mod answer;
mod arrival;
mod dispatch;

use super::policy::{Policy, Rule};
use super::results::TurnResult;
use super::station::Station;
use super::workload::{Arrival, Workload};
use crate::deliberation::{Order, Request, Stop};
use crate::gateway::STORE;
use crate::generation::{decide_options, queue_options, session_options};
use crate::metrics::Metrics;
use crate::policy::store::SharedStore;
use crate::policy::{ChainPlugin, PolicyStore, TurnFacts, TurnPolicies};
use hashbrown::HashMap;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use turnstile_fleet::decision::DecideOptions;
use turnstile_fleet::index::PrefixIndex;
use turnstile_fleet::prefix::BytesPerToken;
use turnstile_fleet::queue::Queue;
use turnstile_fleet::session::{Hold, SessionAction, Sessions};
use turnstile_fleet::turn::Turn;
use turnstile_fleet::worker::Flight;
use turnstile_sim::engine::RequestKey;

/// What the clock of the fleet code shows at the beginning, ms: as in a gateway, more than the longest timeout.
const FIRST_MS: u64 = 1 << 33;
/// The pool of all turns.
const POOL: u32 = 0;
/// How often plugins' timers are looked at, µs, as the gateway does.
const TICK_US: u64 = 20_000;
/// Timers are looked at so often at most while there is no turn; what is left of the pause passes at once.
const IDLE_TICKS: u64 = 500;
/// How often overdue sessions are looked for, µs, as the gateway does.
const EXPIRE_US: u64 = 500_000;

/// What happens at a time. At one time, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The gateway reads a worker's load.
    Probe(usize),
    /// A turn waited too long, perhaps.
    Expire,
    /// A turn comes.
    Arrive(usize),
}

/// A turn that has come and waits or runs.
struct Guest {
    turn: Arc<Turn>,
    facts: Arc<TurnFacts>,
    policies: TurnPolicies,
    action: SessionAction,
    order: Order,
}

/// A turn on a worker.
struct Running {
    number: usize,
    guest: Guest,
    flight: Flight,
    hold: Hold,
    started_us: u64,
    first_us: Option<u64>,
    matched_blocks: usize,
    cached: u64,
}

/// A fleet, a gateway before it, and the turns.
pub struct World<'a> {
    work: &'a Workload,
    policy: &'a Policy,
    decide: DecideOptions,
    max_ttl_ms: u64,
    seed: u64,
    metrics: Arc<Metrics>,
    store: Arc<dyn PolicyStore>,
    chain: Arc<[ChainPlugin]>,
    stations: Vec<Station>,
    index: PrefixIndex,
    sessions: Sessions,
    queue: Queue,
    bytes_per_token: BytesPerToken,
    now_us: u64,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    probed: Vec<bool>,
    load_every_us: u64,
    max_wait_ms: u64,
    next_tick_us: u64,
    next_expire_us: u64,
    waiting: HashMap<usize, Guest>,
    running: HashMap<(usize, RequestKey), Running>,
    followers: HashMap<usize, Vec<(usize, u64)>>,
    placed: u64,
    results: Vec<TurnResult>,
}

impl<'a> World<'a> {
    /// A world before its first turn.
    ///
    /// # Errors
    /// The metrics registry, which a test excludes.
    pub fn new(work: &'a Workload, policy: &'a Policy, stations: Vec<Station>, seed: u64) -> Result<Self, String> {
        let config = &policy.config;
        let routing = &config.routing;
        let bytes_per_token = BytesPerToken::new(routing.bytes_per_token);
        let mut index = PrefixIndex::new(usize::try_from(routing.index_blocks_per_worker).unwrap_or(usize::MAX));
        let most = usize::try_from(routing.index_blocks_per_worker).unwrap_or(usize::MAX);
        let block_bytes = work.entry(0).map_or(0, |entry| entry.line.block_bytes as usize);
        for station in &stations {
            let capacity = station.model.load().kv_capacity_tokens;
            let blocks = PrefixIndex::capacity_for(capacity, bytes_per_token.get(), block_bytes, most);
            index.set_capacity(station.model.index, blocks);
        }
        let chain: Arc<[ChainPlugin]> = match &policy.rule {
            Rule::Chain(chain) => Arc::clone(chain),
            Rule::Baseline(_) => Vec::new().into(),
        };
        let count = stations.len();
        let mut world = Self {
            work,
            policy,
            decide: decide_options(config),
            max_ttl_ms: config.sessions.max_timeout_s.saturating_mul(1000),
            seed,
            metrics: Arc::new(Metrics::new().map_err(|e| e.to_string())?),
            store: Arc::new(SharedStore(policy.shared.data.space(STORE))),
            chain,
            stations,
            index,
            sessions: Sessions::new(session_options(config), seed),
            queue: Queue::new(queue_options(config)),
            bytes_per_token,
            now_us: 0,
            events: BinaryHeap::new(),
            probed: vec![false; count],
            load_every_us: routing.load_interval_ms.saturating_mul(1000),
            max_wait_ms: config.admission.max_wait_ms,
            next_tick_us: TICK_US,
            next_expire_us: EXPIRE_US,
            waiting: HashMap::new(),
            running: HashMap::new(),
            followers: HashMap::new(),
            placed: 0,
            results: vec![TurnResult::default(); work.turns()],
        };
        for number in 0..work.turns() {
            match work.arrival(number) {
                Some(Arrival::At(at)) => world.events.push(Reverse((at, Event::Arrive(number)))),
                Some(Arrival::After(other, pause)) => {
                    world.followers.entry(other).or_default().push((number, pause));
                }
                None => {}
            }
        }
        Ok(world)
    }

    /// Plays all turns.
    ///
    /// # Errors
    /// A turn that cannot be made, which was checked before.
    pub fn run(mut self) -> Result<Vec<TurnResult>, String> {
        loop {
            let event = self.events.peek().map(|Reverse((at, _))| *at);
            let engine = (0..self.stations.len())
                .filter_map(|place| self.stations.get(place)?.engine.next_wake().map(|at| (at, place)))
                .min();
            match (engine, event) {
                (Some((at, place)), event) if event.is_none_or(|event| at <= event) => {
                    self.advance(at);
                    self.step(place);
                }
                (_, Some(_)) => {
                    let Some(Reverse((at, event))) = self.events.pop() else { break };
                    self.advance(at);
                    self.happen(event)?;
                }
                _ => break,
            }
        }
        for plugin in self.chain.iter() {
            plugin.plugin.shut_down(self.now_ms());
        }
        Ok(self.results)
    }

    fn now_ms(&self) -> u64 {
        FIRST_MS + self.now_us / 1000
    }

    /// Moves the clock, and does what the gateway does by itself from time to time.
    fn advance(&mut self, at: u64) {
        if !self.chain.is_empty() {
            let idle = self.running.is_empty() && self.waiting.is_empty();
            let mut ticks = 0;
            while self.next_tick_us <= at {
                if idle && ticks >= IDLE_TICKS {
                    self.next_tick_us = at / TICK_US * TICK_US;
                }
                self.policy.services.set(self.next_tick_us);
                for plugin in self.chain.iter() {
                    plugin.plugin.tick(FIRST_MS + self.next_tick_us / 1000);
                }
                self.next_tick_us += TICK_US;
                ticks += 1;
            }
        }
        self.now_us = self.now_us.max(at);
        self.policy.services.set(self.now_us);
        if self.now_us >= self.next_expire_us {
            self.next_expire_us = (self.now_us / EXPIRE_US + 1) * EXPIRE_US;
            let closes = self.sessions.expire(self.now_ms());
            self.close(closes);
        }
    }

    fn happen(&mut self, event: Event) -> Result<(), String> {
        match event {
            Event::Probe(place) => {
                if let Some(station) = self.stations.get_mut(place) {
                    station.report();
                    let again = !station.is_seen_idle();
                    if let Some(probed) = self.probed.get_mut(place) {
                        *probed = again;
                    }
                    if again {
                        self.events.push(Reverse((self.now_us + self.load_every_us, Event::Probe(place))));
                    }
                }
                self.dispatch();
                Ok(())
            }
            Event::Expire => {
                for ticket in self.queue.expired(self.now_ms()) {
                    let number = usize::try_from(ticket.id).unwrap_or(usize::MAX);
                    if let Some(guest) = self.waiting.remove(&number) {
                        self.refuse(number, Some(guest), "waited too long");
                    }
                }
                self.dispatch();
                Ok(())
            }
            Event::Arrive(number) => self.arrive(number),
        }
    }

    /// A worker's load is read again while it has something to do. What it would have told meanwhile is what it told last.
    fn watch(&mut self, place: usize) {
        if let Some(probed) = self.probed.get_mut(place)
            && !std::mem::replace(probed, true)
        {
            let next = (self.now_us / self.load_every_us + 1) * self.load_every_us;
            self.events.push(Reverse((next, Event::Probe(place))));
        }
    }
}

fn request(turn: &Turn, prompt_tokens: u64, action: SessionAction) -> Request<'_> {
    Request { turn, prompt_tokens, action, excluded: &[], attempt: 0, last_error: None, ticket: None, wanted: None }
}

fn stopped(stop: &Stop) -> &'static str {
    match stop {
        Stop::Answer(..) => "a policy answered",
        Stop::Closed(_) => "a policy failed closed",
        Stop::Close(_) => "a policy broke it off",
        // Nobody waits here, so that policies that pause go on.
        Stop::Paused => "a policy paused",
    }
}
