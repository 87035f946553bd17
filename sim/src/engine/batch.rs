//! Batches: who is taken, how long it takes, what it gives.

use super::{Active, Engine, EventKind, Load, Logged, Reason, RequestKey};
use crate::output::Ending;
use std::cmp::Reverse;

/// A waiting request pushes out running ones whose priority is lower by more than this.
const PREEMPTION_THRESHOLD: i128 = 10;
/// Room kept for one request's outputs is counted up to this many tokens.
const RESERVED_OUTPUT_TOKENS: usize = 4096;
/// Part of that room kept for requests that already run: most end early. Between SGLang's start (0.7) and floor (0.1).
const RUNNING_RESERVE: f64 = 0.3;
/// While decoding, the load is published once in so many steps.
const LOAD_INTERVAL_STEPS: u32 = 15;

/// While decoding, the gauges are written once in so many steps.
const LOG_INTERVAL_STEPS: u32 = 40;

/// What the engine computes at the moment.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) ends_us: u64,
    started_us: u64,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// Tokens of each request.
    Prefill(Vec<(RequestKey, usize)>),
    Decode,
}

fn micros(ms: f64) -> u64 {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "durations are small and casts saturate"
    )]
    let us = (ms * 1000.0).round() as u64;
    us.max(1)
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
fn float(count: usize) -> f64 {
    count as f64
}

impl Engine {
    /// Starts the next batch if none runs.
    pub(super) fn schedule(&mut self) {
        if self.batch.is_some() || self.paused || self.crashed {
            return self.publish_when_idle();
        }
        let prefill = self.take_prefill();
        let kind = if !prefill.is_empty() {
            Kind::Prefill(prefill)
        } else if self.make_decode_room() {
            Kind::Decode
        } else {
            return self.publish_when_idle();
        };
        let step_ms = self.config.decode_ms_base + self.config.decode_ms_per_running * float(self.running.len());
        let took_ms = match &kind {
            // No pass is faster than an empty decode step.
            Kind::Prefill(parts) => {
                let tokens: usize = parts.iter().map(|(_, tokens)| tokens).sum();
                (float(tokens) * 1000.0 / self.config.prefill_tokens_per_s.max(1.0)).max(self.config.decode_ms_base)
            }
            Kind::Decode => step_ms,
        };
        let prefill = matches!(kind, Kind::Prefill(_));
        self.batch = Some(Batch { ends_us: self.now_us + micros(took_ms), started_us: self.now_us, kind });
        if prefill {
            self.publish_load();
            self.log_batch();
        }
    }

    fn publish_when_idle(&mut self) {
        if self.batch.is_none() {
            self.publish_load();
        }
    }

    /// Moves waiting requests that fit into the batch; returns the tokens to compute of each.
    fn take_prefill(&mut self) -> Vec<(RequestKey, usize)> {
        let mut budget = self.config.chunked_prefill_size.max(1);
        let mut parts = Vec::new();
        if let Some(active) = self.chunked.and_then(|key| self.running.iter().find(|active| active.key == key)) {
            let rest = active.tokens.len() - active.computed;
            parts.push((active.key, rest.min(budget)));
            if rest > budget {
                return parts;
            }
            budget -= rest;
        }
        self.chunked = None;
        let by_priority = self.config.enable_priority_scheduling;
        self.waiting.sort_by_key(|active| (by_priority.then_some(Reverse(active.priority)), active.key));
        while budget > 0 && !self.waiting.is_empty() && self.admit_first() {
            let Some(active) = self.running.last() else { break };
            let rest = active.tokens.len() - active.computed;
            parts.push((active.key, rest.min(budget)));
            if rest > budget {
                self.chunked = Some(active.key);
            }
            budget -= rest.min(budget);
        }
        if let Some(prompt) = parts.iter().map(|(key, _)| self.prompt_of(*key)).reduce(|a, b| (a.0 + b.0, a.1 + b.1)) {
            self.load.cache_hit_rate = float(prompt.1) / float(prompt.0.max(1));
        }
        parts
    }

    /// Prompt tokens and cached ones of a running request.
    fn prompt_of(&self, key: RequestKey) -> (usize, usize) {
        let active = self.running.iter().find(|active| active.key == key);
        active.map(|active| (active.prompt_tokens, active.cached_tokens.unwrap_or_default())).unwrap_or_default()
    }

    fn has_row(&self) -> bool {
        self.running.len() + self.sessions.idle_slots().count() < self.config.max_running_requests
    }

    /// Moves the first waiting request into the batch, with its KV; false if it has to wait.
    fn admit_first(&mut self) -> bool {
        let mut active = self.waiting.remove(0);
        let total = active.tokens.len();
        let slot = match &active.session {
            Some(params) if active.refusal.is_none() => self.sessions.slot(&params.id).copied(),
            _ => None,
        };
        let cached = match slot {
            Some(slot) => slot.committed.min(total - 1),
            None if active.refusal.is_some() => 0,
            None => {
                let reusable = active.tokens.get(..total - 1).unwrap_or_default();
                let priority = self.kv_priority(active.priority);
                let found = self.radix.find(active.namespace, reusable, priority);
                self.radix.lock(found.node);
                active.node = Some(found.node);
                active.tree_tokens = found.tokens;
                found.tokens
            }
        };
        let held = slot.map_or(active.tree_tokens, |slot| slot.tree_tokens + slot.private);
        let new = self.round_up(total).saturating_sub(held);
        if !self.make_room_for(&active, new) {
            if let Some(node) = active.node.take() {
                self.radix.unlock(node);
            }
            active.tree_tokens = 0;
            self.waiting.insert(0, active);
            return false;
        }
        if let (Some(slot), Some(params)) = (slot, &active.session) {
            self.sessions.take_slot(&params.id);
            active.node = slot.node;
            active.tree_tokens = slot.tree_tokens;
            active.private = slot.private;
            active.owns_slot = true;
        }
        active.private += new;
        active.computed = cached;
        active.cached_tokens.get_or_insert(cached);
        self.running.push(active);
        true
    }

    /// Makes a row and `new` tokens free for a waiting request, if that can be done.
    fn make_room_for(&mut self, active: &Active, new: usize) -> bool {
        let outputs = active.max_new_tokens.saturating_sub(active.outputs()).min(RESERVED_OUTPUT_TOKENS);
        let reserved = float(self.running.iter().map(reserve).sum()) * RUNNING_RESERVE;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a part of a token count")]
        let reserved = reserved as usize;
        // An empty batch has nobody to keep room for.
        let wanted = if self.running.is_empty() { new } else { new + self.round_up(outputs) + reserved };
        let mut missing_rows = usize::from(!self.has_row());
        let mut missing = wanted.saturating_sub(self.free_tokens() + self.radix.evictable());
        if missing_rows > 0 || missing > 0 {
            let mut victims = Vec::new();
            for (key, held) in self.preemptible(active.priority) {
                if missing_rows == 0 && missing == 0 {
                    break;
                }
                missing_rows = 0;
                missing = missing.saturating_sub(held);
                victims.push(key);
            }
            if missing_rows > 0 || missing > 0 {
                return false;
            }
            for key in victims {
                self.retract(key);
            }
        }
        let short = new.saturating_sub(self.free_tokens());
        self.radix.evict(short);
        self.free_tokens() >= new
    }

    /// Running requests that one of this priority may push out, the least first, and the tokens that gives.
    fn preemptible(&self, priority: i64) -> Vec<(RequestKey, usize)> {
        if !self.config.enable_priority_scheduling {
            return Vec::new();
        }
        let mut victims: Vec<&Active> = self
            .running
            .iter()
            .filter(|other| other.refusal.is_none() && Some(other.key) != self.chunked)
            .filter(|other| i128::from(priority) - i128::from(other.priority) > PREEMPTION_THRESHOLD)
            .collect();
        victims.sort_by_key(|other| (other.priority, Reverse(other.key)));
        victims.iter().map(|other| (other.key, other.private + other.tree_tokens + reserve(other) / 4)).collect()
    }

    /// Puts a running request back into the queue.
    fn retract(&mut self, key: RequestKey) {
        let Some(place) = self.running.iter().position(|active| active.key == key) else { return };
        let mut active = self.running.remove(place);
        if active.owns_slot {
            // The session's KV leaves its row; the turn finds it in the tree again unless it is dropped meanwhile.
            let tokens = active.tokens.get(..active.computed).unwrap_or_default();
            self.radix.insert(active.namespace, tokens, self.kv_priority(active.priority), active.tag);
        }
        if let Some(node) = active.node.take() {
            self.radix.unlock(node);
        }
        active.owns_slot = false;
        active.tree_tokens = 0;
        active.private = 0;
        active.computed = 0;
        active.retractions += 1;
        self.waiting.push(active);
    }

    /// Makes room for one more token of every running request; false when nothing runs.
    fn make_decode_room(&mut self) -> bool {
        loop {
            let needs: Vec<usize> = self.running.iter().map(|active| self.page_need(active)).collect();
            let need: usize = needs.iter().sum();
            let short = need.saturating_sub(self.free_tokens());
            if short == 0 || self.radix.evict(short) >= short {
                for (active, need) in self.running.iter_mut().zip(needs) {
                    active.private += need;
                }
                return !self.running.is_empty();
            }
            // The one with the fewest outputs loses the least.
            let victim = self
                .running
                .iter()
                .min_by_key(|active| (active.outputs(), Reverse(active.prompt_tokens)))
                .map(|active| active.key);
            match victim {
                Some(key) if self.running.len() > 1 => self.retract(key),
                Some(_) => {
                    if let Some(active) = self.running.pop() {
                        self.end(active, Reason::Aborted);
                    }
                }
                None => return false,
            }
        }
    }

    fn page_need(&self, active: &Active) -> usize {
        self.round_up(active.tokens.len()).saturating_sub(active.tree_tokens + active.private)
    }

    /// Gives out what the batch computed.
    pub(super) fn complete_batch(&mut self) {
        let Some(batch) = self.batch.take() else { return };
        let took_us = batch.ends_us.saturating_sub(batch.started_us);
        match batch.kind {
            Kind::Prefill(parts) => {
                let tokens: usize = parts.iter().map(|(_, tokens)| tokens).sum();
                self.load.prefill_uncached_tokens += tokens as u64;
                self.load.prefill_busy_us += took_us;
                for (key, tokens) in parts {
                    self.complete_prefill(key, tokens);
                }
            }
            Kind::Decode => {
                let running = float(self.running.len());
                #[expect(clippy::cast_precision_loss, reason = "a step is far below 2^52 microseconds")]
                let us = took_us as f64;
                let step = [1.0, running, us, running * running, running * us, running];
                for (sum, add) in self.load.decode_moments.iter_mut().zip(step) {
                    *sum += add;
                }
                let keys: Vec<RequestKey> = self.running.iter().map(|active| active.key).collect();
                for key in keys {
                    let Some(place) = self.running.iter().position(|active| active.key == key) else { continue };
                    let mut active = self.running.remove(place);
                    active.computed = active.tokens.len();
                    self.give_token(active, place);
                }
                self.load.gen_throughput = running * 1e6 / us.max(1.0);
                self.steps_since_load += 1;
                if self.steps_since_load >= LOAD_INTERVAL_STEPS {
                    self.publish_load();
                }
                self.steps_since_log += 1;
                if self.steps_since_log >= LOG_INTERVAL_STEPS {
                    self.log_batch();
                }
            }
        }
    }

    fn complete_prefill(&mut self, key: RequestKey, tokens: usize) {
        let Some(place) = self.running.iter().position(|active| active.key == key) else { return };
        let mut active = self.running.remove(place);
        active.computed += tokens;
        let whole = active.computed >= active.tokens.len();
        if active.aborted && !whole {
            self.chunked = self.chunked.filter(|chunked| *chunked != key);
            return self.end(active, Reason::Aborted);
        }
        if !whole {
            return self.running.insert(place, active);
        }
        if active.refusal.is_none() && !active.owns_slot {
            let priority = self.kv_priority(active.priority);
            let (end, _) = self.radix.insert(active.namespace, &active.tokens, priority, active.tag);
            self.radix.lock(end.node);
            if let Some(old) = active.node.replace(end.node) {
                self.radix.unlock(old);
            }
            active.tree_tokens = end.tokens;
            active.private = self.round_up(active.tokens.len()) - end.tokens;
        }
        if !active.started {
            active.started = true;
            let started = EventKind::Started {
                prompt_tokens: active.prompt_tokens,
                cached_tokens: active.cached_tokens.unwrap_or_default(),
            };
            self.event(key, started);
        }
        self.give_token(active, place);
    }

    /// Adds one output token and ends the request if it was the last.
    fn give_token(&mut self, mut active: Active, place: usize) {
        let id = active.plan.ids.get(active.outputs()).copied();
        active.tokens.extend(id);
        let done = active.outputs() >= active.plan.ids.len();
        let reason = match (&active.refusal, active.aborted) {
            (Some(text), _) => Some(Reason::Refused(text.clone())),
            (None, true) => Some(Reason::Aborted),
            (None, false) => done.then(|| match &active.plan.ending {
                Ending::EndToken(id) => Reason::StopToken(*id),
                Ending::StopText(text) => Reason::StopText(text.clone()),
                Ending::Length => Reason::Length(active.outputs()),
            }),
        };
        if let Some(id) = id {
            self.event(active.key, EventKind::Token { id, last: reason.is_some() });
        }
        let Some(reason) = reason else { return self.running.insert(place, active) };
        self.end(active, reason);
    }

    fn log_batch(&mut self) {
        self.steps_since_log = 0;
        let load = self.current_load();
        self.logged = Logged { load, sessions: self.sessions.streaming(), held_tokens: self.held_tokens() };
    }

    fn publish_load(&mut self) {
        self.steps_since_load = 0;
        self.load = self.current_load();
    }

    fn current_load(&self) -> Load {
        let used = self.config.max_total_tokens.saturating_sub(self.free_tokens() + self.radix.evictable());
        Load {
            running: self.running.len(),
            waiting: self.waiting.len(),
            waiting_uncached_tokens: self.waiting.iter().map(|active| active.uncached_when_queued).sum(),
            used_tokens: used,
            gen_throughput: if self.batch.is_some() || !self.running.is_empty() {
                self.load.gen_throughput
            } else {
                0.0
            },
            ..self.load.clone()
        }
    }
}

/// Output tokens that room may be needed for.
fn reserve(active: &Active) -> usize {
    active.max_new_tokens.saturating_sub(active.outputs()).min(RESERVED_OUTPUT_TOKENS)
}
