//! The engine model: a pure state machine that is told the time.
//!
//! Each of [`Engine::submit`], [`Engine::abort`], [`Engine::open_session`] and [`Engine::close_session`] takes the time in
//! microseconds; [`Engine::step`] does everything that was due up to a time and returns what happened, and
//! [`Engine::next_wake`] tells when there is something to do. Times never go back.
//!
//! The model: one batch at a time. Prefill goes first: waiting requests that fit are taken in order until a chunk is
//! full, and take their uncached tokens over the prefill rate. Otherwise one decode step gives every running request one
//! token. The first in line that does not fit blocks the others, unless it may push out requests of a priority lower by
//! more than 10. A pool that runs dry while decoding puts a request back into the queue.

mod batch;
mod radix;
mod request;
mod session;

pub use request::{Event, EventKind, Finish, Load, Logged, Reason, Request, RequestKey, SessionParams};

use crate::{
    config::SimConfig,
    output::{self, Ending, Limits, Plan},
    tokenizer::TokenId,
};
use batch::Batch;
use hashbrown::HashMap;
use radix::{NodeId, Radix};
use session::{Consequence, Entry, Sessions, Slot};
use std::sync::Arc;

/// Sessions are checked this often.
const TICK_US: u64 = 1_000_000;

/// A request inside the engine.
#[derive(Debug)]
struct Active {
    key: RequestKey,
    rid: String,
    /// Prompt, then the outputs so far.
    tokens: Vec<TokenId>,
    prompt_tokens: usize,
    plan: Plan,
    max_new_tokens: usize,
    priority: i64,
    namespace: u64,
    tag: Option<u64>,
    session: Option<SessionParams>,
    refusal: Option<String>,
    /// The locked part in the tree.
    node: Option<NodeId>,
    tree_tokens: usize,
    /// Tokens outside the tree, whole pages.
    private: usize,
    /// True once the row and KV of a streaming session are this turn's.
    owns_slot: bool,
    /// Tokens with KV.
    computed: usize,
    cached_tokens: Option<usize>,
    uncached_when_queued: usize,
    retractions: usize,
    started: bool,
    aborted: bool,
}

impl Active {
    fn outputs(&self) -> usize {
        self.tokens.len() - self.prompt_tokens
    }
}

/// One engine: the scheduler and pool of one data-parallel rank.
#[derive(Debug)]
pub struct Engine {
    config: Arc<SimConfig>,
    radix: Radix,
    sessions: Sessions,
    /// Live generation of each `session_id` tag.
    tags: HashMap<String, u64>,
    waiting: Vec<Active>,
    running: Vec<Active>,
    /// A long prompt of which some is computed.
    chunked: Option<RequestKey>,
    batch: Option<Batch>,
    events: Vec<Event>,
    next_key: RequestKey,
    next_tag: u64,
    now_us: u64,
    next_tick_us: u64,
    paused: bool,
    crashed: bool,
    load: Load,
    steps_since_load: u32,
    logged: Logged,
    steps_since_log: u32,
}

impl Engine {
    /// An empty engine at time 0.
    pub fn new(config: Arc<SimConfig>) -> Self {
        Self {
            radix: Radix::new(config.page_size, config.eviction),
            sessions: Sessions::new(config.crash_mode),
            config,
            tags: HashMap::new(),
            waiting: Vec::new(),
            running: Vec::new(),
            chunked: None,
            batch: None,
            events: Vec::new(),
            next_key: 1,
            next_tag: 1,
            now_us: 0,
            next_tick_us: TICK_US,
            paused: false,
            crashed: false,
            load: Load::default(),
            steps_since_load: 0,
            logged: Logged::default(),
            steps_since_log: 0,
        }
    }

    /// Takes a request. What becomes of it comes out of [`Engine::step`] under the returned key.
    pub fn submit(&mut self, now_us: u64, request: Request) -> RequestKey {
        self.advance(now_us);
        let key = self.next_key;
        self.next_key += 1;
        let mut refusal = None;
        let mut prompt = request.prompt;
        if let Some(params) = &request.session {
            match self.sessions.enter(now_us, key, params, &prompt) {
                Entry::Run(tokens) => prompt = tokens,
                Entry::Refuse(text) => refusal = Some(text),
            }
        }
        let most = self.config.max_input_tokens().min(self.config.max_total_tokens.saturating_sub(2));
        if refusal.is_none() && prompt.len() > most {
            let text = format!(
                "Input length ({} tokens) exceeds the maximum allowed length ({most} tokens). Use a shorter input or enable \
                 --allow-auto-truncate.",
                prompt.len()
            );
            if let Some(params) = &request.session {
                let end = self.sessions.end_turn(key, params, &request.rid, None);
                self.apply(end);
            }
            refusal = Some(text);
        }
        if refusal.is_some() || prompt.is_empty() {
            prompt = vec![0];
        }
        let room = self.config.context_length.min(self.config.max_total_tokens).saturating_sub(prompt.len() + 2).max(1);
        let max_new_tokens = match (request.max_new_tokens, request.ignore_eos) {
            (Some(asked), _) => asked.min(room),
            (None, true) => self.config.default_output_tokens.min(room),
            (None, false) => room,
        };
        let limits = Limits { max_new_tokens, ignore_eos: request.ignore_eos, stop: request.stop };
        let plan = match (&refusal, request.output) {
            (Some(_), _) => Plan { ids: vec![0], ending: Ending::Length, reasoning_tokens: 0 },
            (None, Some(ids)) => Plan::exact(ids, max_new_tokens),
            (None, None) => output::plan(&self.config, &prompt, &request.script, &limits),
        };
        let tag = request.tag.filter(|_| self.config.has_tags()).map(|id| self.tag(&id));
        let uncached = prompt.len() - self.radix.peek(request.namespace, &prompt).min(prompt.len() - 1);
        let active = Active {
            key,
            rid: request.rid,
            prompt_tokens: prompt.len(),
            tokens: prompt,
            plan,
            max_new_tokens,
            priority: request.priority.unwrap_or(i64::MIN),
            namespace: request.namespace,
            tag,
            session: request.session,
            refusal,
            node: None,
            tree_tokens: 0,
            private: 0,
            owns_slot: false,
            computed: 0,
            cached_tokens: None,
            uncached_when_queued: uncached,
            retractions: 0,
            started: false,
            aborted: false,
        };
        self.enqueue(active, request.priority.is_some());
        self.schedule();
        key
    }

    fn tag(&mut self, id: &str) -> u64 {
        if let Some(tag) = self.tags.get(id) {
            return *tag;
        }
        let tag = self.next_tag;
        self.next_tag += 1;
        self.tags.insert(id.to_owned(), tag);
        self.radix.protect(tag);
        tag
    }

    fn enqueue(&mut self, active: Active, has_priority: bool) {
        if has_priority && !self.config.enable_priority_scheduling && self.config.abort_on_priority_when_disabled {
            let text = "Using priority is disabled for this server. Please send a new request without a priority.";
            return self.reject(active, text);
        }
        if self.config.max_queued_requests.is_some_and(|most| self.waiting.len() >= most) {
            let worst = self
                .waiting
                .iter()
                .enumerate()
                .filter(|_| self.config.enable_priority_scheduling)
                .min_by_key(|(_, other)| (other.priority, std::cmp::Reverse(other.key)))
                .filter(|(_, worst)| worst.priority < active.priority)
                .map(|(place, _)| place);
            let Some(place) = worst else { return self.reject(active, "The request queue is full.") };
            let loser = self.waiting.remove(place);
            self.reject(loser, "The request is aborted by a higher priority request.");
        }
        self.waiting.push(active);
    }

    fn reject(&mut self, active: Active, text: &str) {
        self.end(active, Reason::Rejected(503, text.to_owned()));
    }

    /// Gives up the request of this rid, at the end of the running step if it runs. Unknown rids are nothing.
    pub fn abort(&mut self, now_us: u64, key: RequestKey) {
        self.advance(now_us);
        if let Some(place) = self.waiting.iter().position(|active| active.key == key) {
            let active = self.waiting.remove(place);
            let reason = if active.retractions > 0 { Reason::Aborted } else { Reason::AbortedInQueue };
            self.end(active, reason);
            self.schedule();
        } else if let Some(active) = self.running.iter_mut().find(|active| active.key == key) {
            active.aborted = true;
        }
    }

    /// Opens a session; false when the id is open or closing. `timeout_s` is the idle limit in seconds; none never ends.
    pub fn open_session(&mut self, now_us: u64, id: &str, streaming: bool, timeout_s: Option<f64>) -> bool {
        self.advance(now_us);
        self.sessions.open(now_us, id, streaming, timeout_s)
    }

    /// Closes a session of either kind, and ends the protection of a tag of this name.
    pub fn close_session(&mut self, now_us: u64, id: &str) {
        self.advance(now_us);
        if let Some(tag) = self.tags.remove(id) {
            self.radix.unprotect(tag);
        }
        let end = self.sessions.close(id);
        self.apply(end);
        self.schedule();
    }

    /// Whether a session of this id is open or closing.
    pub fn has_session(&self, id: &str) -> bool {
        self.sessions.is_open(id)
    }

    /// Sessions that are open or closing, and tags whose protection has not ended.
    pub fn sessions(&self) -> (usize, usize) {
        (self.sessions.len(), self.tags.len())
    }

    /// Tokens of KV that streaming sessions hold between turns.
    pub fn held_tokens(&self) -> usize {
        self.sessions.idle_slots().map(|slot| slot.committed).sum()
    }

    /// Drops all cached KV; false (and nothing done) while a request is in the engine or a session holds KV.
    pub fn flush(&mut self, now_us: u64) -> bool {
        self.advance(now_us);
        let idle = self.running.is_empty() && self.waiting.is_empty() && self.sessions.idle_slots().next().is_none();
        if idle {
            self.radix.clear();
        }
        idle
    }

    /// Stops or resumes the taking of batches.
    pub fn set_paused(&mut self, now_us: u64, paused: bool) {
        self.advance(now_us);
        self.paused = paused;
        self.schedule();
    }

    /// Does what was due up to `now_us` and returns what happened, in order.
    pub fn step(&mut self, now_us: u64) -> Vec<Event> {
        self.advance(now_us);
        std::mem::take(&mut self.events)
    }

    /// When [`Engine::step`] has something to do next; none while nothing goes on by itself.
    pub fn next_wake(&self) -> Option<u64> {
        let tick = self.sessions.needs_ticks().then_some(self.next_tick_us);
        let batch = self.batch.as_ref().map(|batch| batch.ends_us);
        let pending = (!self.events.is_empty()).then_some(self.now_us);
        [tick, batch, pending].into_iter().flatten().min()
    }

    /// True once the scheduler hit the assertion that ends a stock server.
    pub fn crashed(&self) -> bool {
        self.crashed
    }

    /// What would have been crashes, with `crash_mode` off.
    pub fn hazards(&self) -> u64 {
        self.sessions.hazards
    }

    /// The live requests whose rid fits.
    pub fn keys_of(&self, lives: impl Fn(&str) -> bool) -> Vec<RequestKey> {
        let all = self.waiting.iter().chain(&self.running);
        all.filter(|active| lives(&active.rid)).map(|active| active.key).collect()
    }

    /// Requests in the queue or the batch.
    pub fn requests(&self) -> usize {
        self.waiting.len() + self.running.len()
    }

    /// The load as last published: at once for prefill and when idle, every 15 steps while decoding.
    pub fn load(&self) -> &Load {
        &self.load
    }

    /// The gauges of `/metrics` as last written: when a prefill batch begins, and every 40 decode steps.
    pub fn logged(&self) -> &Logged {
        &self.logged
    }

    /// The configuration.
    pub fn config(&self) -> &SimConfig {
        &self.config
    }

    fn advance(&mut self, now_us: u64) {
        while !self.crashed {
            let batch = self.batch.as_ref().map(|batch| batch.ends_us).filter(|due| *due <= now_us);
            let tick = (self.next_tick_us <= now_us && self.sessions.needs_ticks()).then_some(self.next_tick_us);
            match (batch, tick) {
                (None, None) => break,
                (Some(batch), tick) if tick.is_none_or(|tick| batch <= tick) => {
                    self.now_us = self.now_us.max(batch);
                    self.complete_batch();
                }
                (_, Some(tick)) => {
                    self.now_us = self.now_us.max(tick);
                    self.next_tick_us = tick + TICK_US;
                    for slot in self.sessions.tick(tick) {
                        self.free_slot(slot);
                    }
                }
                (Some(_), None) => break,
            }
            self.schedule();
        }
        self.now_us = self.now_us.max(now_us);
        if self.next_tick_us <= self.now_us {
            self.next_tick_us = (self.now_us / TICK_US + 1) * TICK_US;
        }
    }

    fn event(&mut self, key: RequestKey, kind: EventKind) {
        self.events.push(Event { key, at_us: self.now_us, kind });
    }

    fn apply(&mut self, consequence: Consequence) {
        if let Some(slot) = consequence.release {
            self.free_slot(slot);
        }
        self.crashed |= consequence.crash;
    }

    fn free_slot(&mut self, slot: Slot) {
        if let Some(node) = slot.node {
            self.radix.unlock(node);
        }
    }

    /// Tokens in no use at all.
    fn free_tokens(&self) -> usize {
        let held: usize = self.running.iter().map(|active| active.private).sum::<usize>()
            + self.sessions.idle_slots().map(|slot| slot.private).sum::<usize>();
        self.config.max_total_tokens.saturating_sub(held + self.radix.size())
    }

    fn round_up(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.config.page_size.max(1)) * self.config.page_size.max(1)
    }

    /// Ends a request: its KV goes to the session or the tree, and the answer out.
    fn end(&mut self, mut active: Active, reason: Reason) {
        let ran = active.cached_tokens.is_some();
        let good = ran && !matches!(reason, Reason::Aborted | Reason::Refused(_));
        let mut kept = None;
        if ran && active.refusal.is_none() {
            let keeps = good && active.session.as_ref().is_some_and(|params| self.sessions.keeps_kv(&params.id));
            // The KV of the last output token was never computed.
            let with_kv = active.computed.min(active.tokens.len());
            if keeps {
                kept = Some(Slot {
                    node: active.node.take(),
                    tree_tokens: active.tree_tokens,
                    private: active.private,
                    committed: with_kv,
                });
            } else {
                let tokens = active.tokens.get(..with_kv).unwrap_or_default();
                self.radix.insert(active.namespace, tokens, self.kv_priority(active.priority), active.tag);
            }
        }
        if let Some(node) = active.node.take() {
            self.radix.unlock(node);
        }
        let outputs = active.outputs();
        if let Some(params) = &active.session {
            let end = match (&active.refusal, good) {
                (Some(_), _) => {
                    self.sessions.refusal_done(&params.id);
                    Consequence::default()
                }
                (None, true) => {
                    let (prompt, output) = active.tokens.split_at(active.prompt_tokens);
                    let finished = (prompt.to_vec(), output.to_vec(), kept);
                    self.sessions.end_turn(active.key, params, &active.rid, Some(finished))
                }
                (None, false) => self.sessions.end_turn(active.key, params, &active.rid, None),
            };
            self.apply(end);
            if self.crashed {
                // The scheduler dies before it tells anyone.
                return;
            }
        }
        let finish = Finish {
            prompt_tokens: if ran { active.prompt_tokens } else { 0 },
            cached_tokens: active.cached_tokens.unwrap_or_default(),
            completion_tokens: outputs,
            reasoning_tokens: active.plan.reasoning_tokens.min(outputs),
            retractions: active.retractions,
            reason,
        };
        self.event(active.key, EventKind::Finished(finish));
    }

    /// The priority that a cached page gets.
    fn kv_priority(&self, priority: i64) -> i64 {
        if priority == i64::MIN && !self.config.enable_priority_scheduling { 0 } else { priority }
    }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
