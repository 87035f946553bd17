//! A turn on its way through the gateway, as `exchange/turn.rs` and `exchange/attempt.rs` lead it.

use super::check::Outcome;
use super::plan::{Client, Step};
use super::world::{ATTEMPTS, Attempt, BUSY_WAIT_MS, Event, REFUSE_GRACE_MS, Stage, TOTAL_MS, World};
use turnstile_fleet::cost::mix;
use turnstile_fleet::decision::{Bound, Candidates, DecideOptions, OrderInput, RouteInput, SessionInput, decide};
use turnstile_fleet::ids::WorkerId;
use turnstile_fleet::queue::Ticket;
use turnstile_fleet::session::{
    Accepts, AttemptEnd, BeginTurn, Busy, ContextNote, Hold, OpenResult, Outcome as Begun, RELEASE_UNTOLD_MS, Refused,
    SessionAction, SessionMode, StreamCap, release_after_ms,
};
use turnstile_fleet::worker::{LimitOptions, WorkerView};
use turnstile_sim::engine::{Request, SessionParams};

/// Shares of a worker that streaming sessions may hold.
const SHARE: f64 = 0.5;

impl World {
    fn client(&self, turn: usize) -> &Client {
        &self.plan.clients[self.turns[turn].client]
    }

    pub(super) fn step(&self, turn: usize) -> &Step {
        &self.client(turn).steps[self.turns[turn].step]
    }

    // === arrival and waiting ===

    pub(super) fn arrive(&mut self, turn: usize) {
        let step = self.step(turn).clone();
        let one = &mut self.turns[turn];
        one.wait_until = self.now + BUSY_WAIT_MS;
        one.refuse_at = self.now + if self.plan.refuse { REFUSE_GRACE_MS } else { BUSY_WAIT_MS };
        self.truth.arrived(turn);
        if let Some(after) = step.leaves_after_ms {
            self.at(self.now + after, Event::Leave(turn));
        }
        self.at(self.now + TOTAL_MS, Event::TurnOver(turn));
        self.place(turn);
    }

    pub(super) fn again(&mut self, turn: usize) {
        if self.turns[turn].stage == Stage::Waiting {
            self.place(turn);
        }
    }

    pub(super) fn leave(&mut self, turn: usize) {
        self.give_up(turn, Outcome::Left);
    }

    pub(super) fn turn_over(&mut self, turn: usize) {
        self.give_up(turn, Outcome::Timeout);
    }

    /// The turn ends from outside, wherever it stands.
    fn give_up(&mut self, turn: usize, outcome: Outcome) {
        match self.turns[turn].stage {
            Stage::Done => return,
            Stage::Waiting => {}
            Stage::Queued => {
                self.queue.remove(turn as u64);
            }
            Stage::Placed(attempt) => {
                self.end(attempt, AttemptEnd::Cut);
            }
        }
        self.done(turn, outcome);
    }

    fn done(&mut self, turn: usize, outcome: Outcome) {
        if self.turns[turn].stage == Stage::Done {
            self.truth.wrong("a turn ended twice");
        }
        self.turns[turn].stage = Stage::Done;
        self.wait_no_more(turn);
        self.truth.outcome(turn, outcome);
        self.dispatch();
    }

    fn wait_no_more(&mut self, turn: usize) {
        if let Some(ticket) = self.turns[turn].ticket.take() {
            let key = self.turns[turn].key;
            self.table.waits_no_more(key, ticket);
            self.waiting.remove(&ticket);
            self.wake(key);
        }
    }

    fn busy(&mut self, turn: usize, why: Busy) {
        let until = if why == Busy::Turn { self.turns[turn].refuse_at } else { self.turns[turn].wait_until };
        if self.now >= until {
            return self.done(turn, Outcome::Busy);
        }
        let key = self.turns[turn].key;
        self.turns[turn].stage = Stage::Waiting;
        match self.turns[turn].ticket {
            Some(ticket) => {
                self.table.waits_for(key, ticket, why);
                self.at(until, Event::Again(turn));
            }
            None => {
                let ticket = self.table.wait(key, why);
                self.turns[turn].ticket = Some(ticket);
                self.waiting.insert(ticket, turn);
                self.place(turn);
            }
        }
    }

    // === placement ===

    fn place(&mut self, turn: usize) {
        let (key, ticket) = (self.turns[turn].key, self.turns[turn].ticket);
        let deltas = self.client(turn).deltas;
        let (pinned, busy) =
            if deltas { self.table.pin(key, ticket, self.now).unwrap_or_default() } else { (None, None) };
        if let Some(why) = busy {
            return self.busy(turn, why);
        }
        if !self.has_room(pinned) {
            return self.enqueue(turn, pinned);
        }
        let views = self.views();
        let session = self.table.view(key, self.now);
        let bound = session.as_ref().and_then(|s| s.worker.map(|worker| Bound { worker, mode: s.mode }));
        let step = self.step(turn).clone();
        let cached = vec![0; views.len()];
        let excluded = self.turns[turn].excluded.clone();
        let input = RouteInput {
            candidates: Candidates::new(&views, &cached),
            prompt_tokens: step.tokens as u64,
            affinity_hash: mix(turn as u64),
            bound,
            excluded: &excluded,
        };
        let wanted = SessionInput {
            named: true,
            action: (step.action != SessionAction::None).then_some(step.action),
            live: session.is_some(),
            ttl_ms: Some(self.client(turn).ttl_ms),
        };
        let decision = decide(&input, &OrderInput::default(), &wanted, &DecideOptions::default());
        let Some(target) = decision.route.target else { return self.done(turn, Outcome::NoWorker) };
        let seen = views.iter().find(|view| view.index == target).cloned();
        let Some(view) = seen else { return self.done(turn, Outcome::NoWorker) };
        let begin = self.table.begin(&BeginTurn {
            key,
            action: decision.session.action.unwrap_or(SessionAction::None),
            wish: decision.session.mode,
            ttl_ms: decision.session.ttl_ms,
            worker: target,
            rank: None,
            capabilities: view.capabilities,
            accepts: Accepts { session_params: deltas, session_id: true },
            cap: StreamCap::share_of(&view, SHARE, SHARE),
            ticket,
            now_ms: self.now,
        });
        self.send(begin.closes);
        match begin.outcome {
            Begun::Busy(why) => self.busy(turn, why),
            Begun::Ready(lease) => {
                if !self.members[lease.worker.0 as usize].configured {
                    // Its worker is none of the pool's any more.
                    let closes = self.table.end(lease, turnstile_fleet::session::TurnEnd::NotServed, self.now);
                    self.send(closes);
                    let closes = self.table.unbind(key);
                    self.send(closes);
                    return self.place(turn);
                }
                let note = ContextNote::of(&lease);
                let member = lease.worker.0 as usize;
                let before = |other: u64| ticket.is_none_or(|mine| other < mine);
                let mut waiting = self.waiting.iter().filter(|(_, other)| self.turns[**other].key == key);
                if lease.mode == SessionMode::Stream && waiting.any(|(&other, _)| before(other)) {
                    self.truth.wrong("a turn overtook one that waits for the same session");
                }
                self.start_attempt(turn, member, Hold::new(Some(lease)), note);
            }
            Begun::Ordinary(why) => {
                self.start_attempt(turn, target.0 as usize, Hold::new(None), Some(ContextNote::NoSession(why)));
            }
        }
    }

    fn views(&self) -> Vec<WorkerView> {
        let configured = self.members.iter().filter(|member| member.configured);
        configured.map(|member| member.model.view(self.table.held(member.model.index).idle_rows)).collect()
    }

    fn has_room(&self, pinned: Option<WorkerId>) -> bool {
        let limits = LimitOptions::default();
        if let Some(worker) = pinned {
            let model = &self.members[worker.0 as usize].model;
            return !model.view(0).at_limit(&limits);
        }
        let mut ready = self.views().into_iter().filter(WorkerView::is_ready).peekable();
        ready.peek().is_none() || ready.any(|view| !view.at_limit(&limits))
    }

    fn enqueue(&mut self, turn: usize, pinned: Option<WorkerId>) {
        let ticket = Ticket {
            id: turn as u64,
            tier: 0,
            head_start_ms: 0,
            arrival_ms: self.now,
            flow: 0,
            uncached_tokens: 1,
            bytes: 1,
            deadline_ms: None,
            pool: 0,
            pinned,
        };
        match self.queue.push(ticket) {
            Ok(_) => self.turns[turn].stage = Stage::Queued,
            Err(_) => self.done(turn, Outcome::QueueFull),
        }
    }

    /// Lets through whoever can go now.
    pub(super) fn dispatch(&mut self) {
        // A turn that comes out may go back at once, behind a session that is busy; so each is taken out once.
        for _ in 0..self.queue.len() {
            let room: Vec<(Option<WorkerId>, bool)> =
                self.queue.iter().map(|ticket| (ticket.pinned, self.has_room(ticket.pinned))).collect();
            let next = self
                .queue
                .pop_next(self.now, |ticket| room.iter().any(|(pinned, room)| *pinned == ticket.pinned && *room));
            let Some(next) = next else { return };
            let turn = next.id as usize;
            self.turns[turn].stage = Stage::Waiting;
            self.place(turn);
        }
    }

    // === an attempt ===

    fn start_attempt(&mut self, turn: usize, member: usize, hold: Hold, note: Option<ContextNote>) {
        let lease = hold.lease();
        let (engine_id, mode) = lease.map_or((None, SessionMode::Affinity), |l| (l.engine_id.clone(), l.mode));
        let opening = lease.is_some_and(|lease| lease.open_timeout_ms.is_some());
        let rank = lease.and_then(|lease| lease.rank).unwrap_or(turn as u32 % self.plan.ranks);
        let flight = self.members[member].model.flights.dispatch(1, 1);
        let attempt = self.attempts.len();
        self.attempts.push(Attempt {
            turn,
            hold,
            member,
            engine_id: engine_id.clone(),
            mode,
            rank,
            note,
            flight: Some(flight),
            opening,
            running: None,
            over: false,
        });
        self.open.insert(attempt);
        self.truth.began(attempt, self.turns[turn].key);
        self.turns[turn].stage = Stage::Placed(attempt);
        self.turns[turn].attempts += 1;
        self.wait_no_more(turn);
        if opening {
            let (takes_ms, answered) = self.open_fate();
            if !answered {
                let until = self.open_patience();
                self.at(until, Event::OpenBack(attempt, OpenResult::Unknown));
            }
            self.soon(Event::OpenAt(attempt, takes_ms));
        } else {
            self.send_turn(attempt);
        }
    }

    fn send_turn(&mut self, attempt: usize) {
        self.attempts[attempt].hold.sent();
        self.soon(Event::TurnAt(attempt));
    }

    pub(super) fn open_at(&mut self, attempt: usize, takes_ms: u64) {
        if takes_ms > 0 {
            // The worker is slow: it works on the open when its client may have given it up.
            return self.at(self.now + takes_ms, Event::OpenAt(attempt, 0));
        }
        let Attempt { member, engine_id, .. } = &self.attempts[attempt];
        let process = self.members[*member].process;
        let Some(id) = engine_id.clone() else { return };
        if self.processes[process].engines.is_empty() {
            return self.soon(Event::OpenBack(attempt, OpenResult::Unknown));
        }
        if self.dice.chance(self.plan.faults.refuse_open) {
            return self.soon(Event::OpenBack(attempt, OpenResult::Refused));
        }
        let timeout_s = (self.client(self.attempts[attempt].turn).ttl_ms + TOTAL_MS + 5_000) as f64 / 1_000.0;
        let now_us = self.now * 1_000;
        let mut opened = true;
        for engine in &mut self.processes[process].engines {
            opened &= engine.open_session(now_us, &id, true, Some(timeout_s));
        }
        if !opened {
            self.truth.wrong("an engine id was opened twice");
        }
        let key = self.turns[self.attempts[attempt].turn].key;
        let worker = self.members[self.attempts[attempt].member].model.index;
        self.truth.opened(&id, key, worker);
        self.run(process);
        self.soon(Event::OpenBack(attempt, OpenResult::Opened));
    }

    pub(super) fn open_back(&mut self, attempt: usize, result: OpenResult) {
        if !std::mem::take(&mut self.attempts[attempt].opening) {
            return;
        }
        let Some(id) = self.attempts[attempt].engine_id.clone() else { return };
        let now = self.now;
        let one = &mut self.attempts[attempt];
        if one.over {
            let closes = self.table.opened_late(&id, result);
            self.send(closes);
            return self.wake_all();
        }
        let Some(lease) = one.hold.lease_mut() else { return };
        let closes = self.table.opened(lease, result, now);
        (one.engine_id, one.mode, one.note) = (lease.engine_id.clone(), lease.mode, ContextNote::of(lease));
        let key = lease.key;
        self.send(closes);
        self.wake(key);
        self.send_turn(attempt);
    }

    pub(super) fn turn_at(&mut self, attempt: usize) {
        let Attempt { turn, member, engine_id, mode, rank, over, .. } = &self.attempts[attempt];
        let (turn, member, mode, rank, over) = (*turn, *member, *mode, *rank as usize, *over);
        let engine_id = engine_id.clone();
        let process = self.members[member].process;
        if over {
            // The connection ended before the worker read the request.
            return;
        }
        if self.processes[process].engines.is_empty() {
            return self.soon(Event::Back(attempt, AttemptEnd::Unreachable));
        }
        if self.dice.chance(self.plan.faults.refuse_turn) {
            return self.soon(Event::Back(attempt, AttemptEnd::Refused(Refused::Other)));
        }
        let step = self.step(turn).clone();
        let mut request = Request {
            rid: format!("r{attempt}"),
            prompt: (0..step.tokens).map(|n| (mix((turn * 1_000 + n) as u64) % 50_000) as u32 + 10).collect(),
            max_new_tokens: Some(step.output),
            ignore_eos: true,
            ..Request::default()
        };
        match (&engine_id, mode) {
            (Some(id), SessionMode::Stream) => {
                request.session = Some(SessionParams { id: id.to_string(), ..SessionParams::default() });
            }
            (Some(id), SessionMode::Tag) => request.tag = Some(id.to_string()),
            _ => {}
        }
        let (epoch, key) = (self.processes[process].epoch, self.turns[turn].key);
        if let Some(id) = &engine_id {
            self.truth.entered(id, key, self.members[member].model.index, mode);
            let beside = self.running.values().any(|other| self.attempts[*other].engine_id.as_ref() == Some(id));
            // The table may not know that the engine still has a turn that was cut; then the engine refuses this one.
            let cut = self
                .running
                .values()
                .any(|other| self.attempts[*other].engine_id.as_ref() == Some(id) && self.attempts[*other].over);
            if mode == SessionMode::Stream && beside && !cut {
                self.truth.wrong("two turns at a time in a streaming session");
            }
        }
        let now_us = self.now * 1_000;
        let Some(engine) = self.processes[process].engines.get_mut(rank) else { return };
        let number = engine.submit(now_us, request);
        let at = (process, epoch, rank, number);
        self.running.insert(at, attempt);
        self.attempts[attempt].running = Some(at);
        self.run(process);
        if self.dice.chance(self.plan.faults.cut) {
            let after = self.dice.below(400);
            self.at(self.now + after, Event::Back(attempt, AttemptEnd::Broken));
        }
    }

    pub(super) fn back(&mut self, attempt: usize, how: AttemptEnd) {
        if self.attempts[attempt].over {
            return;
        }
        let turn = self.attempts[attempt].turn;
        let note = self.attempts[attempt].note;
        let worker = self.members[self.attempts[attempt].member].model.index;
        if let AttemptEnd::Answered { whole: true, .. } = how
            && self.client(turn).deltas
        {
            // Before the end, which lets the next turn begin: its client knows what this one was told.
            let Attempt { engine_id, mode, .. } = &self.attempts[attempt];
            let id = engine_id.clone().filter(|_| *mode == SessionMode::Stream);
            self.truth.answered(self.turns[turn].key, turn, attempt, id.as_deref(), note);
        }
        let again = self.end(attempt, how);
        match how {
            AttemptEnd::Answered { whole, .. } => {
                return self.done(turn, if whole { Outcome::Answered } else { Outcome::Aborted });
            }
            AttemptEnd::Refused(_) if again => {}
            AttemptEnd::Cut | AttemptEnd::Broken | AttemptEnd::Unreachable | AttemptEnd::Refused(_) => {
                self.turns[turn].excluded.push(worker)
            }
        }
        if self.turns[turn].attempts >= ATTEMPTS {
            return self.done(turn, Outcome::Failed);
        }
        self.turns[turn].stage = Stage::Waiting;
        self.turns[turn].wait_until = self.now + BUSY_WAIT_MS;
        self.turns[turn].refuse_at = self.now + if self.plan.refuse { REFUSE_GRACE_MS } else { BUSY_WAIT_MS };
        self.soon(Event::Again(turn));
    }

    /// Ends an attempt, and does what has to follow.
    fn end(&mut self, attempt: usize, how: AttemptEnd) -> bool {
        let one = &mut self.attempts[attempt];
        if std::mem::replace(&mut one.over, true) {
            return false;
        }
        self.open.remove(&attempt);
        let key = self.turns[one.turn].key;
        let member = one.member;
        if let Some(flight) = one.flight.take() {
            self.members[one.member].model.flights.finish(flight);
        }
        let parting = one.hold.end(&mut self.table, how, self.now);
        self.send(parting.closes);
        self.wake(key);
        if parting.abort {
            let lost = self.dice.chance(self.plan.faults.lose_abort);
            // The end of the connection: seen at once, or by a poll.
            let noticed = if self.dice.chance(500) { self.dice.below(20) } else { self.dice.below(4_000) };
            self.at(self.now + noticed, Event::StopAt(attempt));
            let pause = self.dice.within(1, 60);
            if !lost {
                self.at(self.now + pause / 2, Event::StopAt(attempt));
            }
            if let Some(id) = parting.release {
                let rate = self.members[member].model.rates.prefill_tokens_per_s();
                let chunk = i64::try_from(self.config.chunked_prefill_size).ok();
                let lets_go = if lost { RELEASE_UNTOLD_MS } else { release_after_ms(chunk, rate) };
                self.at(self.now + pause, Event::Stopped(id, lets_go));
            }
        } else if let Some(id) = parting.release {
            self.soon(Event::Stopped(id, RELEASE_UNTOLD_MS));
        }
        self.dispatch();
        parting.again
    }

    pub(super) fn stop_at(&mut self, attempt: usize) {
        let Some((process, epoch, rank, number)) = self.attempts[attempt].running else { return };
        if self.processes[process].epoch != epoch {
            return;
        }
        let now_us = self.now * 1_000;
        if let Some(engine) = self.processes[process].engines.get_mut(rank) {
            engine.abort(now_us, number);
            self.run(process);
        }
    }
}
