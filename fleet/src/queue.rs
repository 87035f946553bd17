//! The queue of turns that wait for a worker: bounded, ordered by urgency, fair if asked to be.
//!
//! Order: higher tier first; within a tier by arrival minus head start, earlier first; then by sequence of arrival. A priority
//! is so many seconds of head start (negative: setback), not a rank, so everything within a tier ages: a turn is overtaken
//! only by turns that arrive within that many seconds after it. Tiers are strict and do not age against each other: who may use
//! a tier above 0 is a question of configuration.
//!
//! With [`Fairness`], a flow (an agent tree, a session, a tenant) that brings more uncached tokens than its rate is set back by
//! the time it is ahead of that rate, up to a bound. The setback is fixed on arrival and bounded, so ageing still holds.
//!
//! A head that cannot go is skipped: the next turn that can goes.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::ids::WorkerId;

/// A turn that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticket {
    /// Name of the turn, unique among those that wait.
    pub id: u64,
    /// Strict tier, higher first.
    pub tier: u32,
    /// Head start against arrival, ms; negative is a setback.
    pub head_start_ms: i64,
    /// When it came.
    pub arrival_ms: u64,
    /// Whose fair share it is charged to.
    pub flow: u64,
    /// Tokens that a worker would have to prefill, as estimated.
    pub uncached_tokens: u64,
    /// Bytes of body it holds.
    pub bytes: u64,
    /// When waiting longer makes no sense.
    pub deadline_ms: Option<u64>,
    /// Its pool.
    pub pool: u32,
    /// The only worker it can go to: that of its streaming session.
    pub pinned: Option<WorkerId>,
}

/// Bounds of the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueOptions {
    /// Most turns that wait.
    pub max_tickets: usize,
    /// Most bytes of body that they hold together.
    pub max_bytes: u64,
    /// Fairness between flows; off by default.
    pub fairness: Option<Fairness>,
}

/// A rate that each flow may use before it is set back. A leaky bucket for each flow: an arrival adds its uncached tokens, the
/// rate takes them out again, and what is in the bucket, in time at that rate, is the setback of the next arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fairness {
    /// Uncached tokens a second.
    pub tokens_per_s: u64,
    /// Longest setback, ms.
    pub max_setback_ms: u64,
}

/// Why a turn may not wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Full {
    /// Too many turns wait.
    #[error("too many turns wait")]
    Tickets,
    /// The turns that wait hold too many bytes.
    #[error("the turns that wait hold too many bytes")]
    Bytes,
    /// A turn with this id waits already.
    #[error("a turn with this id waits already")]
    Duplicate,
}

/// The queue.
#[derive(Debug)]
pub struct Queue {
    options: QueueOptions,
    order: BTreeMap<Place, Ticket>,
    places: HashMap<u64, Place>,
    deadlines: BTreeSet<(u64, u64)>,
    bytes: u64,
    sequence: u64,
    flows: HashMap<u64, Bucket>,
    drain: Drain,
}

/// Where a ticket stands: smaller goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    tier: Reverse<u32>,
    effective_ms: i64,
    sequence: u64,
}

/// Uncached tokens of a flow beyond its rate, at a time.
#[derive(Debug, Clone, Copy)]
struct Bucket {
    token_ms: u64,
    at_ms: u64,
}

/// How fast turns leave, measured only while some wait.
#[derive(Debug, Default)]
struct Drain {
    /// Average time between two departures, ms.
    gap_ms: Option<f64>,
    /// Since when the next departure is awaited.
    since_ms: u64,
}

/// Share of one departure in the average.
const DRAIN_WEIGHT: f64 = 0.1;

/// Flows remembered for each ticket that may wait; beyond, flows that owe nothing are forgotten, and if that does not help new
/// ones are not charged.
const FLOWS_PER_TICKET: usize = 4;

// === impl QueueOptions ===

impl Default for QueueOptions {
    fn default() -> Self {
        Self { max_tickets: 4_096, max_bytes: 1 << 30, fairness: None }
    }
}

// === impl Queue ===

impl Queue {
    /// An empty queue.
    pub fn new(options: QueueOptions) -> Self {
        Self {
            options,
            order: BTreeMap::new(),
            places: HashMap::new(),
            deadlines: BTreeSet::new(),
            bytes: 0,
            sequence: 0,
            flows: HashMap::new(),
            drain: Drain::default(),
        }
    }

    /// New options. Turns that wait already stay, also beyond new bounds.
    pub fn set_options(&mut self, options: QueueOptions) {
        self.options = options;
    }

    /// Puts a turn into its place. Returns how many are before it.
    ///
    /// # Errors
    /// The queue is full, or the id waits already; nothing changed.
    pub fn push(&mut self, ticket: Ticket) -> Result<usize, Full> {
        if self.places.contains_key(&ticket.id) {
            return Err(Full::Duplicate);
        }
        if self.order.len() >= self.options.max_tickets {
            return Err(Full::Tickets);
        }
        let bytes = self.bytes.saturating_add(ticket.bytes);
        if bytes > self.options.max_bytes {
            return Err(Full::Bytes);
        }
        if self.order.is_empty() {
            self.drain.since_ms = ticket.arrival_ms;
        }
        let setback_ms = self.charge(&ticket);
        let arrival_ms = i64::try_from(ticket.arrival_ms).unwrap_or(i64::MAX);
        let place = Place {
            tier: Reverse(ticket.tier),
            effective_ms: arrival_ms.saturating_sub(ticket.head_start_ms).saturating_add(setback_ms),
            sequence: self.sequence,
        };
        self.sequence += 1;
        self.bytes = bytes;
        if let Some(deadline_ms) = ticket.deadline_ms {
            self.deadlines.insert((deadline_ms, ticket.id));
        }
        self.places.insert(ticket.id, place);
        self.order.insert(place, ticket);
        Ok(self.order.range(..place).count())
    }

    /// Takes out the first turn that can go. `admissible` is asked in order, until it says yes.
    pub fn pop_next(&mut self, now_ms: u64, mut admissible: impl FnMut(&Ticket) -> bool) -> Option<Ticket> {
        let id = self.order.values().find(|ticket| admissible(ticket))?.id;
        let ticket = self.take(id);
        self.drain.departed(now_ms);
        ticket
    }

    /// The turns in their order.
    pub fn iter(&self) -> impl Iterator<Item = &Ticket> {
        self.order.values()
    }

    /// Takes out a turn whose client left. What its flow was charged is given back.
    pub fn remove(&mut self, id: u64) -> Option<Ticket> {
        let ticket = self.take(id)?;
        self.refund(&ticket);
        Some(ticket)
    }

    /// Takes out the turns whose deadline has passed, the longest overdue first.
    pub fn expired(&mut self, now_ms: u64) -> Vec<Ticket> {
        let mut expired = Vec::new();
        while let Some(&(deadline_ms, id)) = self.deadlines.first() {
            if deadline_ms > now_ms {
                break;
            }
            let Some(ticket) = self.remove(id) else { break };
            expired.push(ticket);
        }
        expired
    }

    /// The next deadline.
    pub fn next_deadline_ms(&self) -> Option<u64> {
        self.deadlines.first().map(|&(deadline_ms, _)| deadline_ms)
    }

    /// How many turns are before this one; `None` if it does not wait.
    pub fn position(&self, id: u64) -> Option<usize> {
        self.places.get(&id).map(|place| self.order.range(..place).count())
    }

    /// How long a turn with `position` turns before it will wait, by the rate at which turns have been leaving. A rate that has
    /// stopped is not believed: the time without a departure counts. `None` until one has left.
    pub fn estimate_wait_ms(&self, position: usize, now_ms: u64) -> Option<u64> {
        let gap_ms = self.drain.gap_ms?;
        let stalled_ms = if self.order.is_empty() { 0 } else { now_ms.saturating_sub(self.drain.since_ms) };
        let wait_ms = gap_ms * position as f64 + gap_ms.max(stalled_ms as f64);
        Some(wait_ms.round() as u64)
    }

    /// An honest `Retry-After` in whole seconds, for a turn refused now: when the queue, as it stands, will have drained. At
    /// least 1, at most `most_s`; `unknown_s` until a turn has left.
    pub fn retry_after_s(&self, now_ms: u64, unknown_s: u64, most_s: u64) -> u64 {
        let wait_s = self.estimate_wait_ms(self.order.len(), now_ms).map_or(unknown_s, |ms| ms.div_ceil(1_000));
        wait_s.min(most_s).max(1)
    }

    /// Turns that wait.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether none does.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// Bytes that they hold.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    fn take(&mut self, id: u64) -> Option<Ticket> {
        let place = self.places.remove(&id)?;
        let ticket = self.order.remove(&place)?;
        self.bytes = self.bytes.saturating_sub(ticket.bytes);
        if let Some(deadline_ms) = ticket.deadline_ms {
            self.deadlines.remove(&(deadline_ms, id));
        }
        Some(ticket)
    }

    /// The setback of an arrival, ms; its tokens count against the next ones of its flow.
    fn charge(&mut self, ticket: &Ticket) -> i64 {
        let Some(fairness) = self.options.fairness else { return 0 };
        let rate = fairness.tokens_per_s.max(1);
        let most = FLOWS_PER_TICKET.saturating_mul(self.options.max_tickets);
        if self.flows.len() >= most && !self.flows.contains_key(&ticket.flow) {
            self.flows.retain(|_, bucket| bucket.level(rate, ticket.arrival_ms) > 0);
            if self.flows.len() >= most {
                return 0;
            }
        }
        let bucket = self.flows.entry(ticket.flow).or_insert(Bucket { token_ms: 0, at_ms: ticket.arrival_ms });
        bucket.token_ms = bucket.level(rate, ticket.arrival_ms);
        bucket.at_ms = bucket.at_ms.max(ticket.arrival_ms);
        let setback_ms = (bucket.token_ms / rate).min(fairness.max_setback_ms);
        // No deeper than the longest setback: a flow that was wild once is not punished for hours.
        let most = fairness.max_setback_ms.saturating_mul(rate).saturating_add(ticket.token_ms());
        bucket.token_ms = bucket.token_ms.saturating_add(ticket.token_ms()).min(most);
        i64::try_from(setback_ms).unwrap_or(i64::MAX)
    }

    fn refund(&mut self, ticket: &Ticket) {
        if let Some(bucket) = self.flows.get_mut(&ticket.flow) {
            bucket.token_ms = bucket.token_ms.saturating_sub(ticket.token_ms());
        }
    }
}

// === impl Ticket ===

impl Ticket {
    /// Its uncached tokens in thousandths, so that a rate in tokens a second takes out whole numbers each millisecond.
    fn token_ms(&self) -> u64 {
        self.uncached_tokens.saturating_mul(1_000)
    }
}

// === impl Bucket ===

impl Bucket {
    fn level(&self, rate: u64, now_ms: u64) -> u64 {
        self.token_ms.saturating_sub(now_ms.saturating_sub(self.at_ms).saturating_mul(rate))
    }
}

// === impl Drain ===

impl Drain {
    fn departed(&mut self, now_ms: u64) {
        let gap_ms = now_ms.saturating_sub(self.since_ms) as f64;
        self.since_ms = self.since_ms.max(now_ms);
        self.gap_ms = Some(match self.gap_ms {
            Some(average_ms) => average_ms + DRAIN_WEIGHT * (gap_ms - average_ms),
            None => gap_ms,
        });
    }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
