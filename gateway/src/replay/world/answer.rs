//! A worker goes on: first tokens, ends, and what is learned from them.

use super::{Event, Guest, Running, World};
use crate::policy::{EndFacts, Ended, Event as PolicyEvent};
use std::cmp::Reverse;
use std::sync::Arc;
use turnstile_fleet::observe::Happening;
use turnstile_fleet::session::{AttemptEnd, CloseResult, EngineClose, Refused, Usage};
use turnstile_sim::engine::{EventKind, Finish, Reason};

impl World<'_> {
    pub(super) fn step(&mut self, place: usize) {
        let Some(station) = self.stations.get_mut(place) else { return };
        for event in station.engine.step(self.now_us) {
            match event.kind {
                EventKind::Started { cached_tokens, .. } => {
                    if let Some(running) = self.running.get_mut(&(place, event.key)) {
                        running.cached = cached_tokens as u64;
                    }
                }
                EventKind::Token { .. } => {
                    if let Some(running) = self.running.get_mut(&(place, event.key))
                        && running.first_us.is_none()
                    {
                        running.first_us = Some(self.now_us);
                        if running.guest.turn.stream {
                            let arrived_us = self.results.get(running.number).map_or(0, |result| result.arrived_us);
                            let at_ms = self.now_us.saturating_sub(arrived_us) / 1_000;
                            // What breaks an answer off in a gateway changes nothing here: the turn was served once.
                            let _ = running.guest.policies.tell(&PolicyEvent::of(&Happening::FirstToken, at_ms));
                        }
                        if let Some(station) = self.stations.get_mut(place) {
                            station.model.flights.first_byte(&mut running.flight);
                        }
                    }
                }
                EventKind::Finished(finish) => {
                    if let Some(running) = self.running.remove(&(place, event.key)) {
                        self.finish(place, running, &finish);
                    }
                }
            }
        }
    }

    fn finish(&mut self, place: usize, running: Running, finish: &Finish) {
        let Running { number, mut guest, flight, mut hold, started_us, first_us, matched_blocks, cached } = running;
        let served = matches!(finish.reason, Reason::StopToken(_) | Reason::StopText(_) | Reason::Length(_));
        let now_ms = self.now_ms();
        let (prompt, completion) = (finish.prompt_tokens as u64, finish.completion_tokens as u64);
        let arrived_us = self.results.get(number).map_or(0, |result| result.arrived_us);
        let ms = |us: u64| us as f64 / 1e3;
        let ttft_ms = first_us.map(|first| ms(first - started_us));
        let Some(station) = self.stations.get_mut(place) else { return };
        station.model.flights.finish(flight);
        let how = if served {
            if guest.turn.stream && completion > 1 {
                let decode_ms = first_us.map_or(0.0, |first| ms(self.now_us - first));
                station.model.rates.observe_decode(completion - 1, decode_ms);
            }
            self.bytes_per_token.learn(guest.turn.prefix.bytes, prompt);
            if let Some(ttft_ms) = ttft_ms.filter(|_| guest.turn.stream) {
                station.model.rates.observe_ttft(prompt.saturating_sub(cached), ttft_ms);
            }
            let reported = guest.turn.prefix.blocks_of(cached, prompt);
            if let Some(reported) = reported.filter(|reported| matched_blocks > *reported) {
                self.index.correct(station.model.index, &guest.turn.prefix.blocks, reported);
                self.index.insert(station.model.index, &guest.turn.prefix.blocks);
            }
            let usage = Usage { prompt_tokens: prompt, completion_tokens: completion, cached_tokens: cached };
            AttemptEnd::Answered { usage: Some(usage), whole: true }
        } else {
            AttemptEnd::Refused(Refused::Other)
        };
        let worker = Arc::clone(&station.model.id);
        let parting = hold.end(&mut self.sessions, how, now_ms);
        self.close(parting.closes);
        guest.policies.env.finish(EndFacts {
            worker: Some(worker),
            status: if served { 200 } else { 400 },
            prompt_tokens: served.then_some(prompt),
            completion_tokens: served.then_some(completion),
            cached_tokens: served.then_some(cached),
            ttft_ms: first_us.map(|first| ms(first - arrived_us)).filter(|_| served),
            finish_reason: served.then(|| "stop".to_owned()),
        });
        let ended = Ended {
            at_ms: self.now_us.saturating_sub(arrived_us) / 1_000,
            prompt_tokens: served.then_some(prompt),
            completion_tokens: served.then_some(completion),
            cached_tokens: served.then_some(cached),
            outcome: if served { "finished" } else { "refused" },
            status: if served { 200 } else { 400 },
            left_out: 0,
        };
        if served {
            let finish = Happening::Finish { reason: "stop".to_owned() };
            let _ = guest.policies.tell(&PolicyEvent::of(&finish, ended.at_ms));
        }
        guest.policies.tell_last(&ended);
        guest.policies.finish();
        if let Some(result) = self.results.get_mut(number) {
            result.ended_us = self.now_us;
            if served {
                result.first_us = first_us;
                result.prompt_tokens = prompt;
                result.cached_tokens = cached;
                result.completion_tokens = completion;
            } else {
                result.refused = Some(match finish.reason {
                    Reason::Refused(_) => "longer than the KV pool of a worker",
                    _ => "its worker ran out of KV",
                });
            }
        }
        self.follow(number);
        self.dispatch();
    }

    /// A turn gets no answer of a worker's.
    pub(super) fn refuse(&mut self, number: usize, guest: Option<Guest>, why: &'static str) {
        if let Some(mut guest) = guest {
            guest.policies.env.finish(EndFacts { status: 503, ..EndFacts::default() });
            let arrived_us = self.results.get(number).map_or(0, |result| result.arrived_us);
            let at_ms = self.now_us.saturating_sub(arrived_us) / 1_000;
            guest.policies.tell_last(&Ended { at_ms, outcome: "refused", status: 503, ..Ended::default() });
            guest.policies.finish();
        }
        if let Some(result) = self.results.get_mut(number) {
            result.ended_us = self.now_us;
            result.refused = Some(why);
        }
        self.follow(number);
    }

    /// The turns that waited for this one's end.
    pub(super) fn follow(&mut self, number: usize) {
        for (next, pause) in self.followers.remove(&number).unwrap_or_default() {
            self.events.push(Reverse((self.now_us.saturating_add(pause), Event::Arrive(next))));
        }
    }

    pub(super) fn close(&mut self, closes: Vec<EngineClose>) {
        for close in closes {
            let at = self.stations.iter_mut().find(|station| station.model.index == close.worker);
            if let Some(station) = at {
                station.engine.close_session(self.now_us, &close.engine_id);
            }
            self.sessions.close_result(&close.engine_id, CloseResult::Closed, self.now_ms());
        }
    }
}
