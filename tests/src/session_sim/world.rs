//! The gateway, its workers and its clients in virtual time. Decisions are the gateway's own: session table, attempt's hold,
//! waiting turns, queue, placement and worker model are the crate `turnstile-fleet`'s; engines are the simulator's, in the mode in which
//! they end as a stock server does. Here are only the messages between them, and what happens to messages.

use super::check::Truth;
use super::dice::Dice;
use super::plan::{Client, Plan, Step};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;
use turnstile_fleet::identity::session_key;
use turnstile_fleet::ids::{SessionKey, TenantId, WorkerId};
use turnstile_fleet::queue::{Queue, QueueOptions};
use turnstile_fleet::session::{
    AttemptEnd, CloseResult, ContextNote, EngineClose, Hold, OpenResult, Refused, SessionMode, SessionOptions,
    Sessions, Usage, WaitTicket,
};
use turnstile_fleet::worker::{Capabilities, Flight, Load, Worker as Model, WorkerState};
use turnstile_sim::SimConfig;
use turnstile_sim::engine::{Engine, EventKind, Reason, RequestKey};

/// How long a turn may take in all, ms.
pub const TOTAL_MS: u64 = 30_000;
/// `sessions.busy_wait_ms`.
pub const BUSY_WAIT_MS: u64 = 10_000;
/// How long a turn waits for one that runs with `busy = "refuse"`.
pub const REFUSE_GRACE_MS: u64 = 100;
/// `timeouts.side_request_s`.
const SIDE_TIMEOUT_MS: u64 = 3_000;
/// Attempts of a turn.
pub const ATTEMPTS: u32 = 3;
/// Between probes of a worker.
const PROBE_MS: u64 = 250;
/// Between sweeps of the table.
pub const SWEEP_MS: u64 = 500;
/// Our side's longest idle timeout is 8 s; the engine's own is longer by turn and margin.
const MARGIN_MS: u64 = 5_000;

/// What happens at a moment.
#[derive(Debug, Clone)]
pub enum Event {
    /// A turn arrives.
    Arrive(usize),
    /// A turn that waits looks again.
    Again(usize),
    /// Its client leaves.
    Leave(usize),
    /// It has taken too long.
    TurnOver(usize),
    /// `/open_session` is there, and takes so long.
    OpenAt(usize, u64),
    /// Its answer, or the end of the patience.
    OpenBack(usize, OpenResult),
    /// A turn is there.
    TurnAt(usize),
    /// How it ended, at the gateway.
    Back(usize, AttemptEnd),
    /// `/abort_request`, or the end of the connection, is there.
    StopAt(usize),
    /// How long after it was told to stop the worker may not have let go, ms.
    Stopped(Arc<str>, u64),
    /// The pause after that is over.
    Release(Arc<str>),
    /// `/close_session` is there, and is answered so.
    CloseAt(EngineClose, CloseResult),
    /// Its answer.
    CloseBack(Arc<str>, CloseResult),
    /// Overdue sessions and closes.
    Sweep,
    /// Probes, and what they find.
    Probe,
    /// Once a second: what befalls the fleet.
    Second,
    /// A process starts again.
    Start(usize),
    /// A reload names the worker again, as a new one.
    Add(usize),
    /// An engine has something to do.
    Engine(usize, u32),
}

/// One process.
pub struct Process {
    /// Its ranks; none while it is down.
    pub engines: Vec<Engine>,
    /// Which start of it this is.
    pub epoch: u32,
    wake_at: Option<u64>,
}

/// A worker as the configuration names it.
pub struct Member {
    pub process: usize,
    pub model: Model,
    pub configured: bool,
    epoch: u32,
    bad: u32,
}

impl Member {
    /// Its probes have met this start of the process.
    pub fn knows(&self, process: &Process) -> bool {
        self.epoch == process.epoch && !process.engines.is_empty()
    }
}

/// Where a turn stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    Waiting,
    Queued,
    Placed(usize),
    Done,
}

/// One turn.
pub struct Turn {
    pub client: usize,
    pub step: usize,
    pub key: SessionKey,
    pub stage: Stage,
    pub ticket: Option<WaitTicket>,
    pub excluded: Vec<WorkerId>,
    pub attempts: u32,
    pub wait_until: u64,
    pub refuse_at: u64,
}

/// One attempt of a turn.
pub struct Attempt {
    pub turn: usize,
    pub hold: Hold,
    pub member: usize,
    pub engine_id: Option<Arc<str>>,
    pub mode: SessionMode,
    pub rank: u32,
    pub note: Option<ContextNote>,
    pub flight: Option<Flight>,
    /// The lease waits for the open's answer.
    pub opening: bool,
    /// Process, epoch, rank and number of its request.
    pub running: Option<(usize, u32, usize, RequestKey)>,
    pub over: bool,
}

/// All of it.
pub struct World {
    pub plan: Plan,
    pub now: u64,
    heap: BinaryHeap<Reverse<(u64, u64, usize)>>,
    events: Vec<Option<Event>>,
    free: Vec<usize>,
    sequence: u64,
    pub dice: Dice,
    pub table: Sessions,
    pub queue: Queue,
    pub processes: Vec<Process>,
    pub members: Vec<Member>,
    pub turns: Vec<Turn>,
    pub attempts: Vec<Attempt>,
    /// Those that are not over.
    pub open: BTreeSet<usize>,
    /// Requests of an engine, by where they run.
    pub running: BTreeMap<(usize, u32, usize, RequestKey), usize>,
    pub waiting: BTreeMap<WaitTicket, usize>,
    /// Closes that are out.
    pub side: BTreeSet<Arc<str>>,
    pub truth: Truth,
    pub config: Arc<SimConfig>,
    pub calm: bool,
    /// Tells each event.
    pub trace: bool,
}

impl World {
    /// The beginning of a schedule, without the clients left out.
    pub fn new(plan: Plan, left_out: &BTreeSet<usize>) -> Self {
        let config = Arc::new(SimConfig {
            max_running_requests: plan.rows,
            max_total_tokens: plan.pool,
            context_length: 4_096,
            decode_ms_base: 20.0,
            enable_streaming_session: true,
            enable_session_radix_cache: plan.tags,
            crash_mode: true,
            ..SimConfig::default()
        });
        let options = SessionOptions {
            max_sessions: plan.max_sessions,
            default_ttl_ms: 4_000,
            max_turn_ms: TOTAL_MS,
            engine_timeout_margin_ms: MARGIN_MS,
            evict_after_idle_ms: 1_000,
        };
        let mut world = Self {
            now: 0,
            heap: BinaryHeap::new(),
            events: Vec::new(),
            free: Vec::new(),
            sequence: 0,
            dice: Dice::new(plan.seed, 1),
            table: Sessions::new(options, plan.seed),
            queue: Queue::new(QueueOptions { max_tickets: 64, max_bytes: 1 << 30, fairness: None }),
            processes: Vec::new(),
            members: Vec::new(),
            turns: Vec::new(),
            attempts: Vec::new(),
            open: BTreeSet::new(),
            running: BTreeMap::new(),
            waiting: BTreeMap::new(),
            side: BTreeSet::new(),
            truth: Truth::default(),
            config,
            calm: false,
            trace: false,
            plan,
        };
        for process in 0..world.plan.processes {
            world.processes.push(Process { engines: Vec::new(), epoch: 0, wake_at: None });
            world.start(process);
            world.name(process);
        }
        for client in 0..world.plan.clients.len() {
            if left_out.contains(&client) {
                continue;
            }
            let Client { tenant, text, steps, .. } = world.plan.clients[client].clone();
            let key = session_key(7, TenantId(tenant), &text);
            world.truth.owner(key, tenant, &text);
            for (step, Step { at_ms, .. }) in steps.into_iter().enumerate() {
                let turn = world.turns.len();
                world.turns.push(Turn {
                    client,
                    step,
                    key,
                    stage: Stage::Waiting,
                    ticket: None,
                    excluded: Vec::new(),
                    attempts: 0,
                    wait_until: 0,
                    refuse_at: 0,
                });
                world.at(at_ms, Event::Arrive(turn));
            }
        }
        world.at(SWEEP_MS, Event::Sweep);
        world.at(PROBE_MS, Event::Probe);
        world.at(1_000, Event::Second);
        world
    }

    // === time ===

    /// Something will happen at a time.
    pub fn at(&mut self, at_ms: u64, event: Event) {
        let place = self.free.pop().unwrap_or_else(|| {
            self.events.push(None);
            self.events.len() - 1
        });
        self.events[place] = Some(event);
        self.sequence += 1;
        self.heap.push(Reverse((at_ms.max(self.now), self.sequence, place)));
    }

    /// Something will happen after the time a message takes.
    pub fn soon(&mut self, event: Event) {
        let slow = self.dice.chance(self.plan.faults.slow);
        let pause = if slow { self.dice.within(20, 600) } else { self.dice.within(0, 8) };
        self.at(self.now + pause, event);
    }

    /// The next event, with the time set to it.
    pub fn next(&mut self) -> Option<Event> {
        let Reverse((at_ms, _, place)) = self.heap.pop()?;
        self.now = at_ms;
        self.free.push(place);
        self.events[place].take()
    }

    /// Takes an event.
    pub fn happen(&mut self, event: Event) {
        if self.trace && !matches!(event, Event::Sweep | Event::Probe | Event::Engine(..)) {
            let key = |turn: usize| format!("turn {turn} of client {}", self.turns[turn].client);
            match &event {
                Event::Arrive(turn) => println!("{:>6} {} {:?}", self.now, key(*turn), self.step(*turn)),
                Event::Again(turn) | Event::Leave(turn) | Event::TurnOver(turn) => {
                    println!("{:>6} {} {:?} {event:?}", self.now, key(*turn), self.turns[*turn].stage);
                }
                Event::Back(attempt, _) | Event::TurnAt(attempt) | Event::OpenBack(attempt, _) => {
                    let Attempt { turn, engine_id, note, .. } = &self.attempts[*attempt];
                    println!("{:>6} {} {event:?} {engine_id:?} {note:?}", self.now, key(*turn));
                }
                _ => println!("{:>6} {event:?}", self.now),
            }
        }
        match event {
            Event::Arrive(turn) => self.arrive(turn),
            Event::Again(turn) => self.again(turn),
            Event::Leave(turn) => self.leave(turn),
            Event::TurnOver(turn) => self.turn_over(turn),
            Event::OpenAt(attempt, takes_ms) => self.open_at(attempt, takes_ms),
            Event::OpenBack(attempt, result) => self.open_back(attempt, result),
            Event::TurnAt(attempt) => self.turn_at(attempt),
            Event::Back(attempt, how) => self.back(attempt, how),
            Event::StopAt(attempt) => self.stop_at(attempt),
            Event::Stopped(engine_id, pause) => {
                self.at(self.now + pause, Event::Release(engine_id));
            }
            Event::Release(engine_id) => {
                let closes = self.table.released_engine(&engine_id);
                self.send(closes);
                self.wake_all();
            }
            Event::CloseAt(close, result) => self.close_at(&close, result),
            Event::CloseBack(engine_id, result) => {
                self.side.remove(&engine_id);
                self.table.close_result(&engine_id, result, self.now);
                self.truth.close_result(&engine_id, result);
                self.wake_all();
            }
            Event::Sweep => {
                let closes = self.table.expire(self.now);
                self.send(closes);
                self.at(self.now + SWEEP_MS, Event::Sweep);
            }
            Event::Probe => {
                (0..self.members.len()).for_each(|member| self.probe(member));
                self.at(self.now + PROBE_MS, Event::Probe);
                self.dispatch();
            }
            Event::Second => self.second(),
            Event::Start(process) => self.start(process),
            Event::Add(process) => self.name(process),
            Event::Engine(process, epoch) => {
                if self.processes[process].epoch == epoch {
                    self.processes[process].wake_at = None;
                    self.run(process);
                }
            }
        }
    }

    // === the fleet ===

    fn start(&mut self, process: usize) {
        let one = &mut self.processes[process];
        one.epoch += 1;
        one.engines = (0..self.plan.ranks).map(|_| Engine::new(Arc::clone(&self.config))).collect();
        one.wake_at = None;
    }

    fn kill(&mut self, process: usize) {
        self.processes[process].engines.clear();
        self.truth.count("processes killed");
        let cut: Vec<_> =
            self.running.range((process, 0, 0, 0)..(process + 1, 0, 0, 0)).map(|(at, a)| (*at, *a)).collect();
        for (at, attempt) in cut {
            self.running.remove(&at);
            self.soon(Event::Back(attempt, AttemptEnd::Broken));
        }
        let down = self.dice.within(50, 4_000);
        self.at(self.now + down, Event::Start(process));
    }

    fn second(&mut self) {
        if self.calm {
            return;
        }
        for process in 0..self.processes.len() {
            if !self.processes[process].engines.is_empty() && self.dice.chance(self.plan.faults.kill) {
                self.kill(process);
            }
            let member = self.members.iter().rposition(|m| m.process == process && m.configured);
            if let Some(member) = member
                && self.members.iter().filter(|m| m.configured).count() > 1
                && self.dice.chance(self.plan.faults.remove)
            {
                self.members[member].configured = false;
                self.members[member].model.state = WorkerState::Draining;
                let worker = self.members[member].model.index;
                let loss = self.table.worker_removed(worker);
                self.truth.removed(worker);
                self.send(loss.closes);
                self.wake_all();
                let back = self.dice.within(100, 5_000);
                self.at(self.now + back, Event::Add(process));
            }
        }
        self.at(self.now + 1_000, Event::Second);
    }

    /// The configuration names a process, as a worker it never had before.
    fn name(&mut self, process: usize) {
        let index = WorkerId(u32::try_from(self.members.len()).unwrap_or(u32::MAX));
        let mut model = Model::new(format!("w{process}"), index);
        model.state = WorkerState::Starting;
        model.capabilities =
            Capabilities { tag: self.plan.tags, stream: true, priority: false, dp_size: self.plan.ranks };
        let member = Member { process, model, configured: true, epoch: 0, bad: 0 };
        self.members.push(member);
        self.probe(self.members.len() - 1);
    }

    fn probe(&mut self, member: usize) {
        let one = &mut self.members[member];
        if !one.configured {
            return;
        }
        let process = &self.processes[one.process];
        let worker = one.model.index;
        if process.engines.is_empty() {
            one.bad += 1;
            if one.bad == 2 {
                one.model.state = WorkerState::Unhealthy;
                let loss = self.table.worker_lost(worker);
                self.send(loss.closes);
                self.wake_all();
            }
            return;
        }
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let mut load = Load::default();
        for engine in &process.engines {
            load.running += number(engine.load().running);
            load.waiting += number(engine.load().waiting);
            load.kv_used_tokens += engine.load().used_tokens as u64;
            load.max_running += number(self.plan.rows);
            load.kv_capacity_tokens += self.plan.pool as u64;
        }
        let restarted = one.epoch != 0 && one.epoch != process.epoch;
        let back = one.model.state != WorkerState::Ready;
        one.epoch = process.epoch;
        one.bad = 0;
        one.model.state = WorkerState::Ready;
        if restarted {
            one.model.restarted();
        }
        one.model.report(load);
        if restarted {
            let loss = self.table.worker_restarted(worker);
            self.send(loss.closes);
        }
        if back {
            let closes = self.table.worker_back(worker);
            self.send(closes);
        }
        if restarted || back {
            self.wake_all();
        }
    }

    /// Does what is due in the engines of a process, and remembers when there is more.
    pub fn run(&mut self, process: usize) {
        let epoch = self.processes[process].epoch;
        let mut happened = Vec::new();
        for (rank, engine) in self.processes[process].engines.iter_mut().enumerate() {
            happened.extend(engine.step(self.now * 1_000).into_iter().map(|event| (rank, event)));
        }
        for (rank, event) in happened {
            let EventKind::Finished(finish) = event.kind else { continue };
            let at = (process, epoch, rank, event.key);
            let Some(attempt) = self.running.remove(&at) else { continue };
            let turn = self.attempts[attempt].turn;
            let how = match &finish.reason {
                Reason::Aborted | Reason::AbortedInQueue => AttemptEnd::Answered { usage: None, whole: false },
                Reason::Rejected(..) => AttemptEnd::Refused(Refused::Other),
                Reason::Refused(text) => AttemptEnd::Refused(Refused::of(text.as_bytes())),
                Reason::StopToken(_) | Reason::StopText(_) | Reason::Length(_) => AttemptEnd::Answered {
                    usage: Some(Usage {
                        prompt_tokens: finish.prompt_tokens as u64,
                        completion_tokens: finish.completion_tokens as u64,
                        cached_tokens: finish.cached_tokens as u64,
                    }),
                    whole: true,
                },
            };
            let step = &self.plan.clients[self.turns[turn].client].steps[self.turns[turn].step];
            if how == AttemptEnd::Refused(Refused::SessionBusy) {
                self.truth.count("turns refused by an engine for one that was cut");
            }
            self.truth.engine_ended(attempt, turn, step.tokens, &self.attempts[attempt], &how);
            self.soon(Event::Back(attempt, how));
        }
        if self.processes[process].engines.iter().any(Engine::crashed) {
            self.truth.wrong("a turn or a close ended the server");
        }
        let next = self.processes[process].engines.iter().filter_map(Engine::next_wake).min();
        if let Some(next_us) = next {
            let next = (next_us.div_ceil(1_000)).max(self.now);
            if self.processes[process].wake_at.is_none_or(|at| next < at) {
                self.processes[process].wake_at = Some(next);
                self.at(next, Event::Engine(process, epoch));
            }
        }
    }

    fn close_at(&mut self, close: &EngineClose, result: CloseResult) {
        let process = self.members[close.worker.0 as usize].process;
        let id = &close.engine_id;
        let up = !self.processes[process].engines.is_empty();
        // Refused and failed closes do nothing, but for those whose answer is lost.
        let arrives = up && (result == CloseResult::Closed || (result == CloseResult::Failed && self.dice.chance(300)));
        if arrives {
            let busy = self
                .running
                .iter()
                .any(|(at, attempt)| at.0 == process && self.attempts[*attempt].engine_id.as_ref() == Some(id));
            if busy && close.mode == SessionMode::Stream {
                self.truth.wrong("a close during a turn");
            }
            let now_us = self.now * 1_000;
            for engine in &mut self.processes[process].engines {
                engine.close_session(now_us, id);
            }
            self.run(process);
        }
        let result = if up { result } else { CloseResult::Failed };
        self.soon(Event::CloseBack(Arc::clone(id), result));
    }

    /// Sends closes, each once.
    pub fn send(&mut self, closes: Vec<EngineClose>) {
        for close in closes {
            if self.side.contains(&close.engine_id) {
                self.truth.wrong("two closes of one engine session at a time");
            }
            if self.side.len() >= self.plan.side_queue {
                self.table.close_result(&close.engine_id, CloseResult::NoRoom, self.now);
                self.truth.close_result(&close.engine_id, CloseResult::NoRoom);
                continue;
            }
            self.side.insert(Arc::clone(&close.engine_id));
            let result = if self.calm {
                CloseResult::Closed
            } else if self.dice.chance(self.plan.faults.fail_close) {
                CloseResult::Failed
            } else if self.dice.chance(self.plan.faults.refuse_close) {
                CloseResult::Refused
            } else {
                CloseResult::Closed
            };
            self.soon(Event::CloseAt(close, result));
        }
    }

    /// Wakes the first turn that waits for a session.
    pub fn wake(&mut self, key: SessionKey) {
        if let Some(turn) = self.table.first_waiting(key).and_then(|ticket| self.waiting.get(&ticket)).copied() {
            self.soon(Event::Again(turn));
        }
    }

    /// Wakes the first of each session.
    pub fn wake_all(&mut self) {
        let first: Vec<WaitTicket> = self.table.first_waiting_of_all().map(|(ticket, _)| ticket).collect();
        for ticket in first {
            if let Some(&turn) = self.waiting.get(&ticket) {
                self.soon(Event::Again(turn));
            }
        }
    }

    /// How long an open takes, and whether its answer comes in time.
    pub fn open_fate(&mut self) -> (u64, bool) {
        if self.dice.chance(self.plan.faults.slow_open) { (self.dice.within(0, 4_000), false) } else { (0, true) }
    }

    /// When an open without an answer is given up.
    pub fn open_patience(&self) -> u64 {
        self.now + SIDE_TIMEOUT_MS
    }
}
