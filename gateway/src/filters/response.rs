//! The response side: the body piece by piece, and trailers.

use super::{Asked, BodyPause, FilterRun, FilterVerdict, HeldPart, Side, Step, Stopped, joined};
use crate::errors::{Kind, Refusal};
use crate::forward::relay::{ResponseFilter, Stop};
use crate::policy::Event;
use crate::trailers;
use bytes::{Bytes, BytesMut};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use http::HeaderMap;
use pingora_http::ResponseHeader;
use turnstile_plugins::{Body, Callback, FaultKind, FieldMap, Injected};

/// The response-body side of the filters. A filter that pauses holds what it has seen until it goes on.
pub struct ChunkFilter<'a> {
    run: &'a mut FilterRun,
    /// What each filter that has paused holds, by position.
    held: Vec<Option<HeldPart>>,
    /// How many of them, from the first, see what comes: once one has ended the answer, those in front of it.
    reach: usize,
    /// One that waited and goes on.
    going: Option<usize>,
    /// The answer is no worker's: what is asked of its filters from elsewhere by now comes too late.
    local: bool,
}

impl FilterRun {
    /// The body of an answer, piece by piece.
    pub fn response_body(&mut self) -> ChunkFilter<'_> {
        let held = vec![None; self.streams.len()];
        let reach = self.entered;
        ChunkFilter { run: self, held, reach, going: None, local: false }
    }

    /// The whole body of an answer that the gateway or a plugin gives.
    ///
    /// # Errors
    /// As of [`ResponseFilter::chunk`].
    pub async fn local_body(&mut self, body: Bytes) -> Result<Bytes, Stop> {
        let mut filter = self.response_body();
        filter.local = true;
        filter.pass(body, true).await
    }
}

// === impl ChunkFilter ===

impl ChunkFilter<'_> {
    /// The filter at `at` ends the answer: what comes after that is for those in front of it.
    fn ends<T>(&mut self, at: usize, verdict: FilterVerdict) -> Result<T, Stop> {
        self.reach = at;
        Err(match verdict {
            FilterVerdict::Answer(response) => Stop::Answers(response),
            FilterVerdict::Failed(refusal) => Stop::Failed(refusal.message),
            FilterVerdict::Close | FilterVerdict::Go => Stop::Closes,
        })
    }

    /// The paused filter nearest to the client, whose part its callbacks see.
    fn nearest_held(&self) -> Option<usize> {
        self.held.iter().position(Option::is_some)
    }

    fn take(&mut self, at: usize) -> HeldPart {
        self.held.get_mut(at).and_then(Option::take).unwrap_or_default()
    }

    fn put(&mut self, at: usize, held: HeldPart) {
        if let Some(place) = self.held.get_mut(at) {
            *place = Some(held);
        }
    }

    /// The filter that holds as much as it may, if one does: nothing is to be read until it goes on.
    fn full(&self) -> Option<usize> {
        self.held.iter().rposition(|held| held.as_ref().is_some_and(|held| held.full))
    }

    /// A chunk as it came from the worker.
    async fn pass(&mut self, chunk: Bytes, end: bool) -> Result<Bytes, Stop> {
        self.run.env.response_size += chunk.len();
        let from = self.reach;
        // The filters know already that nothing follows the head.
        if self.run.ends_with_head && chunk.is_empty() {
            return Ok(chunk);
        }
        let mut out = Bytes::new();
        if !self.run.response_ended {
            out = self.catch_up().await?;
        }
        if !self.run.response_ended {
            out = joined(out.into(), self.pass_from(chunk, from, end).await?);
        }
        if end {
            self.settle_head().await?;
        }
        Ok(out)
    }

    /// At the end of the worker's answer, when a filter has ended it behind its head: waits until no filter stops that head any
    /// more.
    async fn settle_head(&mut self) -> Result<(), Stop> {
        while self.run.response_ended
            && let Some(Stopped { at, .. }) = self.run.response_stopped
        {
            if let Some(verdict) = self.run.wait(at, Side::Response, std::future::pending()).await {
                return self.ends(at, verdict);
            }
            self.let_go(at)?;
        }
        Ok(())
    }

    /// What callbacks of other contexts have asked for since, as it comes out.
    async fn catch_up(&mut self) -> Result<Bytes, Stop> {
        let mut out = BytesMut::from(self.pass_injected().await?);
        let local = self.local;
        for at in (0..self.reach).rev().take_while(|_| !local) {
            let Some(effects) = self.run.asked_apart(at) else { continue };
            let waits = self.waits(at);
            match self.run.asked(Side::Response, waits, at, Ok(effects)) {
                Asked::Nothing => out.extend_from_slice(&self.pass_injected().await?),
                Asked::Go => out.extend_from_slice(&self.go_on(at).await?),
                Asked::End(verdict) => return self.ends(at, verdict),
            }
        }
        Ok(out.freeze())
    }

    /// Whether a filter waits with something: the head of the answer, or a part of its body.
    fn waits(&self, at: usize) -> bool {
        self.run.response_stopped.is_some_and(|stopped| stopped.at == at)
            || self.held.get(at).is_some_and(Option::is_some)
    }

    /// What filters have put into the body goes on, below each of them.
    async fn pass_injected(&mut self) -> Result<Bytes, Stop> {
        let mut out = BytesMut::new();
        // All at once: on its way a piece meets only what filters below put in because of it.
        for (at, Injected { data, end }) in self.run.take_injected() {
            // Whoever has not seen the head of the answer has nothing to add to its body.
            let unseen = self.run.response_stopped.is_some_and(|stopped| at < stopped.at);
            if self.run.response_ended || unseen {
                continue;
            }
            // A head that the filter has stopped goes before.
            self.let_go(at)?;
            let passed = self.pass_boxed(data, at, end).await?;
            out.extend_from_slice(&passed);
            // Whatever comes after the piece that is the last comes too late.
            self.run.response_ended |= end;
        }
        Ok(out.freeze())
    }

    /// A filter goes on: so does the head of the answer, if that is what it has stopped.
    fn let_go(&mut self, at: usize) -> Result<(), Stop> {
        if self.run.response_stopped.is_none_or(|stopped| stopped.at != at) {
            return Ok(());
        }
        self.run.response_stopped = None;
        match self.run.late_response_heads(at) {
            Some(verdict) => self.ends(at, verdict),
            None => Ok(()),
        }
    }

    /// As [`ChunkFilter::pass_from`], which comes back to itself by what filters inject.
    fn pass_boxed(&mut self, chunk: Bytes, from: usize, end: bool) -> BoxFuture<'_, Result<Bytes, Stop>> {
        self.pass_from(chunk, from, end).boxed()
    }

    /// A chunk on its way through the filters below `from`, last to first.
    async fn pass_from(&mut self, chunk: Bytes, from: usize, end: bool) -> Result<Bytes, Stop> {
        let mut chunk = chunk;
        // What filters have put in front of it.
        let mut before = BytesMut::new();
        for at in (0..from).rev() {
            if chunk.is_empty() && !end || self.run.response_ended {
                return Ok(before.freeze());
            }
            if self.run.response_stopped == Some(Stopped { at, all: true }) {
                let mut bytes = self.take(at).bytes;
                bytes.extend_from_slice(&chunk);
                if !self.may_hold(at, bytes.len())? {
                    chunk = bytes.freeze();
                    self.let_go(at)?;
                    continue;
                }
                self.put(at, HeldPart { bytes, shown: true, full: false });
                if !end {
                    return Ok(before.freeze());
                }
                if let Some(verdict) = self.run.wait(at, Side::Response, std::future::pending()).await {
                    return self.ends(at, verdict);
                }
                chunk = Bytes::new();
                self.let_go(at)?;
            }
            if !self.run.wants(at, Callback::ResponseBody) {
                self.let_go(at)?;
                chunk = joined(self.take(at).bytes, chunk);
                continue;
            }
            let (behind, seen) = self.take(at).meets(chunk);
            let size = seen.len();
            self.run.env.chunk = Body::new(seen);
            let step = self.run.call(at, Side::Response, |s, env| s.on_response_body(env, size, end));
            chunk = self.run.env.take_chunk();
            if matches!(step, Step::Go) {
                self.let_go(at)?;
            }
            before.extend_from_slice(&self.pass_injected().await?);
            let pause = match step {
                Step::Go => {
                    chunk = joined(behind, chunk);
                    continue;
                }
                Step::End(verdict) => return self.ends(at, verdict),
                Step::Paused(_) if self.run.response_ended => return Ok(before.freeze()),
                Step::Paused(pause) => pause,
            };
            if pause == BodyPause::Drop {
                chunk = Bytes::new();
            }
            let size = behind.len() + chunk.len();
            let full = size > self.run.most_held(at);
            chunk = joined(behind, chunk);
            if pause == BodyPause::Hold && !self.may_hold(at, size)? {
                self.let_go(at)?;
                continue;
            }
            if !end {
                self.put(at, HeldPart { bytes: chunk.into(), shown: pause == BodyPause::Hold, full });
                return Ok(before.freeze());
            }
            self.run.env.chunk = Body::new(chunk);
            // The relay looks out for the client.
            if let Some(verdict) = self.run.wait(at, Side::Response, std::future::pending()).await {
                return self.ends(at, verdict);
            }
            chunk = self.run.env.take_chunk();
            self.let_go(at)?;
            before.extend_from_slice(&self.pass_injected().await?);
        }
        Ok(if self.run.response_ended { before.freeze() } else { joined(before, chunk) })
    }

    /// Whether a filter may hold so much. One that holds too much has failed: false if the answer goes on without it.
    fn may_hold(&mut self, at: usize, size: usize) -> Result<bool, Stop> {
        let most = self.run.most_held(at);
        if size <= most {
            return Ok(true);
        }
        let message = format!("it holds more than {most} bytes of a response body");
        match self.run.failed(at, FaultKind::Memory, &message) {
            Some(verdict) => self.ends(at, verdict),
            None => Ok(false),
        }
    }

    /// Waits until a filter that holds something lets it go, or puts something in. Loses nothing when it is given up.
    async fn ready(&mut self) -> Result<(), Stop> {
        loop {
            if self.going.is_some() || !self.run.injected.is_empty() {
                return Ok(());
            }
            let stopped = self.run.response_stopped;
            let holds = stopped.map(|stopped| stopped.at).or_else(|| self.nearest_held());
            let Some(holds) = holds else {
                if !self.run.may_be_asked() {
                    return std::future::pending().await;
                }
                let (from, effects) = self.run.effects().await;
                match self.run.asked(Side::Response, false, from, effects) {
                    Asked::End(verdict) => return self.ends(from, verdict),
                    Asked::Go | Asked::Nothing => continue,
                }
            };
            // What a filter holds lies where callbacks for it see it, for as long as nothing else happens.
            let full = self.full();
            let shown = Shown::new(self, holds);
            let for_body = stopped.is_some_and(|stopped| !stopped.all) && shown.part.is_none();
            let ended = shown.filter.run.response_ended;
            let (from, effects) = if for_body && full.is_none() && !ended {
                // It waits for the body, which takes as long as it takes.
                let (from, effects) = shown.filter.run.effects().await;
                (from, Some(effects))
            } else {
                shown.filter.run.patiently(full.unwrap_or(holds)).await
            };
            let waits = from == holds || shown.filter.held.get(from).is_some_and(Option::is_some);
            let asked = match effects {
                Some(effects) => shown.filter.run.asked(Side::Response, waits, from, effects),
                None => match shown.filter.run.too_long(from) {
                    Some(verdict) => Asked::End(verdict),
                    None => Asked::Go,
                },
            };
            drop(shown);
            match asked {
                Asked::Nothing => {}
                Asked::End(verdict) => return self.ends(from, verdict),
                Asked::Go => self.going = Some(from),
            }
        }
    }

    /// What [`ChunkFilter::ready`] has waited for. To be run to its end: pieces are on their way in it.
    async fn release(&mut self) -> Result<Bytes, Stop> {
        match self.going.take() {
            Some(from) => self.go_on(from).await,
            None => self.pass_injected().await,
        }
    }

    /// A filter that waited goes on, and with it what it held.
    async fn go_on(&mut self, from: usize) -> Result<Bytes, Stop> {
        // One that stopped at the head has not seen the body.
        let all = self.run.response_stopped == Some(Stopped { at: from, all: true });
        let before = self.pass_injected().await?;
        let held = self.take(from).bytes.freeze();
        self.let_go(from)?;
        let passed = self.pass_from(held, if all { from + 1 } else { from }, false).await?;
        Ok(joined(before.into(), passed))
    }

    async fn pass_trailers(&mut self, trailers: HeaderMap) -> Result<(Bytes, HeaderMap), Stop> {
        // They were told that the answer ends with its head.
        if self.run.ends_with_head {
            return Ok((Bytes::new(), HeaderMap::new()));
        }
        self.run.env.response_trailers = Some(FieldMap::new(trailers));
        let mut out = BytesMut::new();
        if !self.run.response_ended {
            out.extend_from_slice(&self.catch_up().await?);
        }
        for at in (0..self.reach).rev() {
            if self.run.response_ended {
                break;
            }
            if self.run.response_stopped == Some(Stopped { at, all: true }) {
                if let Some(verdict) = self.run.wait(at, Side::Response, std::future::pending()).await {
                    return self.ends(at, verdict);
                }
                let held = self.take(at).bytes.freeze();
                self.let_go(at)?;
                out.extend_from_slice(&self.pass_from(held, at + 1, false).await?);
            }
            let holds = self.held.get(at).is_some_and(Option::is_some);
            if holds {
                let held = self.take(at).bytes.freeze();
                self.run.env.chunk = Body::new(held);
            }
            let waits = match self.run.call(at, Side::Response, |s, env| s.on_response_trailers(env)) {
                Step::Go => None,
                Step::Paused(_) => self.run.wait(at, Side::Response, std::future::pending()).await,
                Step::End(verdict) => Some(verdict),
            };
            if let Some(verdict) = waits {
                return self.ends(at, verdict);
            }
            let held = self.run.env.take_chunk();
            self.let_go(at)?;
            out.extend_from_slice(&self.pass_injected().await?);
            if holds {
                out.extend_from_slice(&self.pass_from(held, at, false).await?);
            }
        }
        if self.run.response_ended {
            // Nothing stands behind the last piece that a filter has put in.
            self.settle_head().await?;
            return Ok((out.freeze(), HeaderMap::new()));
        }
        let left = self.run.env.response_trailers.as_ref().map(|map| (*map.fields).clone()).unwrap_or_default();
        Ok((out.freeze(), trailers::passing(left)))
    }
}

impl From<Stop> for FilterVerdict {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Failed(words) => Self::Failed(Refusal::new(Kind::Plugin, words)),
            Stop::Answers(response) => Self::Answer(response),
            Stop::Closes => Self::Close,
        }
    }
}

impl ResponseFilter for ChunkFilter<'_> {
    fn chunk(&mut self, chunk: Bytes, end: bool) -> BoxFuture<'_, Result<Bytes, Stop>> {
        self.pass(chunk, end).boxed()
    }

    fn ready(&mut self) -> BoxFuture<'_, Result<(), Stop>> {
        ChunkFilter::ready(self).boxed()
    }

    fn release(&mut self) -> BoxFuture<'_, Result<Bytes, Stop>> {
        ChunkFilter::release(self).boxed()
    }

    fn has_ended(&self) -> bool {
        // A head that waits for a filter has not gone on.
        self.run.response_ended && self.run.response_stopped.is_none()
    }

    fn takes_more(&self) -> bool {
        // Of an answer that has ended only the head is waited for.
        let settles = self.run.response_ended && self.run.response_stopped.is_some();
        self.full().is_none() && !settles
    }

    fn changed_head(&mut self) -> Option<ResponseHeader> {
        self.run.changed_response_head()
    }

    fn trailers(&mut self, trailers: HeaderMap) -> BoxFuture<'_, Result<(Bytes, HeaderMap), Stop>> {
        self.pass_trailers(trailers).boxed()
    }

    fn told(&mut self, event: &Event) -> Result<(), Stop> {
        match self.run.tell(event) {
            Ok(()) => Ok(()),
            Err((at, verdict)) => self.ends(at, verdict),
        }
    }
}

/// A part that is held, where callbacks see it. Goes back when this is dropped.
struct Shown<'a, 'b> {
    filter: &'a mut ChunkFilter<'b>,
    at: usize,
    /// What it is besides its bytes. Nothing: it holds nothing, not even the place for it.
    part: Option<HeldPart>,
}

impl<'a, 'b> Shown<'a, 'b> {
    fn new(filter: &'a mut ChunkFilter<'b>, at: usize) -> Self {
        let mut part = filter.held.get_mut(at).and_then(Option::take);
        let bytes = part.as_mut().map(|part| std::mem::take(&mut part.bytes)).unwrap_or_default();
        filter.run.env.chunk = Body::new(bytes.freeze());
        Self { filter, at, part }
    }
}

impl Drop for Shown<'_, '_> {
    fn drop(&mut self) {
        let bytes = self.filter.run.env.take_chunk().into();
        if let Some(part) = HeldPart::seen(self.part.take(), bytes) {
            self.filter.put(self.at, part);
        }
    }
}
