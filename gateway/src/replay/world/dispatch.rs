//! A turn gets its place: policies of the phase `route`, session, worker.

use super::{Guest, Running, World, request, stopped};
use crate::deliberation::{Deliberation, Host, Request, Rules, Scene, cached_tokens, decided_key, session_plan};
use crate::replay::policy::Rule;
use crate::replay::station::Station;
use std::sync::Arc;
use turnstile_fleet::decision::{Decision, EnginePriority};
use turnstile_fleet::session::{Hold, Outcome, SessionAction, SessionMode};
use turnstile_fleet::worker::{WorkerView, room};
use turnstile_sim::engine::Request as EngineRequest;

impl World<'_> {
    fn views(&self) -> Vec<WorkerView> {
        let view = |station: &Station| station.model.view(self.sessions.held(station.model.index).idle_rows);
        self.stations.iter().map(view).collect()
    }

    pub(super) fn free(&self) -> u32 {
        room(&self.views(), &self.decide.limits)
    }

    /// Lets through whoever can go now.
    pub(super) fn dispatch(&mut self) {
        while !self.queue.is_empty() {
            let free = self.free();
            let Some(ticket) = self.queue.pop_next(self.now_ms(), |_| free > 0) else { return };
            let number = usize::try_from(ticket.id).unwrap_or(usize::MAX);
            if let Some(guest) = self.waiting.remove(&number) {
                self.place(number, guest);
            }
        }
    }

    pub(super) fn place(&mut self, number: usize, mut guest: Guest) {
        let turn = Arc::clone(&guest.turn);
        let views: Arc<[WorkerView]> = self.views().into();
        let prompt_tokens = guest.facts.prompt_tokens;
        let mut matched = Vec::new();
        self.index.matched_all(views.iter().map(|view| view.index), &turn.prefix.blocks, &mut matched);
        let cached = cached_tokens(&turn, &matched, self.bytes_per_token.get(), prompt_tokens);
        let own = turn.identity.session.as_ref().map(|session| session.key);
        let session = own.and_then(|key| self.sessions.view(key, self.now_ms()));
        let scene = Scene { views, cached, session };
        let request = request(&turn, prompt_tokens, guest.action);
        let rules = Rules { decide: &self.decide, max_ttl_ms: self.max_ttl_ms };
        let deliberation = Deliberation::new(&request, &scene, rules);
        let decided = match &self.policy.rule {
            Rule::Chain(_) => deliberation.decide(&mut guest.policies).map(|(decision, _)| decision),
            Rule::Baseline(baseline) => {
                let full = |view: &WorkerView| view.at_limit(&self.decide.limits);
                let mut decision = Decision::default();
                decision.route.target = baseline.choose(&scene.views, full, self.placed, self.seed);
                decision.session.action = Some(SessionAction::None);
                deliberation.settle(&mut decision);
                Ok(decision)
            }
        };
        let decision = match decided {
            Ok(decision) => decision,
            Err(stop) => {
                let why = stopped(&stop);
                return self.refuse(number, Some(guest), why);
            }
        };
        let target = decision.route.target;
        let Some(place) = self.stations.iter().position(|station| Some(station.model.index) == target) else {
            return self.refuse(number, Some(guest), "no worker could take it");
        };
        self.placed += 1;
        let predicted = scene.cached.get(place).copied().unwrap_or(0);
        let matched_blocks = matched.get(place).copied().unwrap_or(0);
        let hold = self.enter_session(&request, &decision, place);
        self.send(number, guest, place, &decision, hold, (predicted, matched_blocks));
    }

    /// Puts a turn into its session.
    fn enter_session(&mut self, request: &Request<'_>, decision: &Decision, place: usize) -> Hold {
        let key = decided_key(self.seed, request.turn, decision);
        let (Some(key), Some(station)) = (key, self.stations.get(place)) else { return Hold::new(None) };
        let host = Host {
            worker: station.model.index,
            capabilities: station.model.capabilities,
            max_running: station.model.load().max_running,
            kv_capacity_tokens: station.model.load().kv_capacity_tokens,
        };
        let plan = session_plan(request, key, decision, host, &self.policy.config.sessions, self.now_ms());
        let begin = self.sessions.begin(&plan);
        self.close(begin.closes);
        match begin.outcome {
            Outcome::Ready(lease) => Hold::new(Some(lease)),
            // Only streaming sessions are ever busy, and there are none.
            Outcome::Ordinary(_) | Outcome::Busy(_) => Hold::new(None),
        }
    }

    fn send(
        &mut self,
        number: usize,
        guest: Guest,
        place: usize,
        decision: &Decision,
        mut hold: Hold,
        (predicted, matched_blocks): (u64, usize),
    ) {
        let (Some(prompt), Some(station)) = (self.work.prompts.list.get(number), self.stations.get_mut(place)) else {
            return;
        };
        let sequences = &self.work.prompts.sequences;
        let output = sequences.behind(prompt.with_answer, prompt.sequence);
        let priority = match decision.engine_priority {
            Some(EnginePriority::Send(priority)) if station.model.capabilities.priority => Some(priority),
            _ => None,
        };
        let tag = hold.lease().filter(|lease| lease.mode == SessionMode::Tag).and_then(|lease| lease.engine_id.clone());
        let request = EngineRequest {
            rid: number.to_string(),
            prompt: sequences.lay_out(prompt.sequence),
            priority: priority.filter(|_| guest.turn.route.takes_priority()),
            max_new_tokens: Some(output.len()),
            output: Some(output),
            tag: tag.map(|id| id.to_string()),
            ..EngineRequest::default()
        };
        let uncached = guest.facts.prompt_tokens.saturating_sub(predicted);
        let flight = station.model.flights.dispatch(uncached, u64::from(guest.turn.hints.osl.unwrap_or(0)));
        self.index.insert(station.model.index, &guest.turn.prefix.blocks);
        hold.sent();
        let key = station.engine.submit(self.now_us, request);
        if let Some(result) = self.results.get_mut(number) {
            result.worker = u32::try_from(place).ok();
            result.placed_us = self.now_us;
            result.predicted_cached = predicted;
        }
        let running =
            Running { number, guest, flight, hold, started_us: self.now_us, first_us: None, matched_blocks, cached: 0 };
        self.running.insert((place, key), running);
        self.watch(place);
    }
}
