//! A turn comes: it is told to the policies of the phase `admit`, and goes on or waits.

use super::{Event, Guest, POOL, World, request, stopped};
use crate::deliberation::{self, Order, Rules};
use crate::policy::{PolicyEnv, RequestHead, TurnFacts, TurnPolicies};
use bytes::Bytes;
use http::{HeaderMap, Method};
use std::cmp::Reverse;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use turnstile_fleet::queue::Ticket;
use turnstile_fleet::turn::Turn;

impl World<'_> {
    pub(super) fn arrive(&mut self, number: usize) -> Result<(), String> {
        let (turn, action) = self.work.turn(number)?;
        let turn = Arc::new(turn);
        let now_ms = self.now_ms();
        if let Some(result) = self.results.get_mut(number) {
            result.arrived_us = self.now_us;
        }
        let session = turn.identity.session.as_ref().and_then(|session| self.sessions.view(session.key, now_ms));
        let facts = Arc::new(TurnFacts {
            prompt_tokens: turn.prompt_tokens(self.bytes_per_token.get()),
            action,
            number: session.as_ref().map_or(1, |s| s.turns.saturating_add(s.in_flight).saturating_add(1)),
            head: self.head(number, &turn),
            turn: Arc::clone(&turn),
        });
        let env = PolicyEnv::new(Arc::clone(&facts), session, Arc::clone(&self.store));
        let mut policies = TurnPolicies::new(Arc::clone(&self.chain), env, 0, Arc::clone(&self.metrics));
        let request = request(&turn, facts.prompt_tokens, action);
        let rules = Rules { decide: &self.decide, max_ttl_ms: self.max_ttl_ms };
        let order = match deliberation::order(&request, rules, &mut policies) {
            Ok(order) => order,
            Err(stop) => {
                let why = stopped(&stop);
                let none = Order { tier: 0, head_start_ms: 0, flow: 0, deadline_ms: None };
                let guest = Guest { turn: Arc::clone(&turn), facts, policies, action, order: none };
                self.refuse(number, Some(guest), why);
                return Ok(());
            }
        };
        let guest = Guest { turn, facts, policies, action, order };
        // Whoever waits goes first.
        if self.queue.is_empty() && self.free() > 0 {
            self.place(number, guest);
            return Ok(());
        }
        let wait_ms = guest.order.deadline_ms.map_or(self.max_wait_ms, |wait| wait.min(self.max_wait_ms));
        let ticket = Ticket {
            id: number as u64,
            tier: guest.order.tier,
            head_start_ms: guest.order.head_start_ms,
            arrival_ms: now_ms,
            flow: guest.order.flow,
            uncached_tokens: guest.facts.prompt_tokens,
            bytes: guest.turn.body.len() as u64,
            deadline_ms: Some(now_ms.saturating_add(wait_ms)),
            pool: POOL,
            pinned: None,
        };
        match self.queue.push(ticket) {
            Ok(_) => {
                self.waiting.insert(number, guest);
                // In whole ms, as the deadline: never before it.
                let due = (self.now_us / 1000).saturating_add(wait_ms).saturating_mul(1000);
                self.events.push(Reverse((due.max(self.now_us), Event::Expire)));
                self.dispatch();
            }
            Err(_) => self.refuse(number, Some(guest), "the queue was full"),
        }
        Ok(())
    }

    fn head(&self, number: usize, turn: &Turn) -> RequestHead {
        let arrived = Duration::from_millis(self.work.first_ms) + Duration::from_micros(self.now_us);
        RequestHead {
            method: Method::POST,
            path: Bytes::from_static(turn.route.worker_path().as_bytes()),
            authority: Bytes::new(),
            headers: Arc::new(HeaderMap::new()),
            request_id: Arc::from(format!("replay-{number}")),
            peer: None,
            connection: 0,
            protocol: "HTTP/1.1",
            arrived: SystemTime::UNIX_EPOCH + arrived,
        }
    }
}
