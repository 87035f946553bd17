//! The response side: head, body piece by piece, trailers.

use super::{Asked, BodyPause, FilterRun, FilterVerdict, HeldPart, Side, Step, joined};
use crate::errors::{Kind, Refusal};
use crate::forward::relay::{ResponseFilter, Stop};
use crate::headers::{connection_listed, is_hop_by_hop};
use crate::policy::Event;
use crate::trailers;
use bytes::{Bytes, BytesMut};
use futures::FutureExt as _;
use futures::future::BoxFuture;
use http::{HeaderMap, header};
use pingora_http::ResponseHeader;
use turnstile_plugins::{Body, Callback, FaultKind, FieldMap, ResponseMap};

/// The response-body side of the filters. A filter that pauses holds what it has seen until it goes on.
pub struct ChunkFilter<'a> {
    run: &'a mut FilterRun,
    /// What each filter that has paused holds, by position.
    held: Vec<Option<HeldPart>>,
    /// How many of them, from the first, see what comes: once one has ended the answer, those in front of it.
    reach: usize,
}

impl FilterRun {
    /// The head of an answer. What the filters changed is written back to `head`. `end`: nothing follows it. `gone` resolves
    /// when the client has left.
    pub async fn response_headers(
        &mut self,
        head: &mut ResponseHeader,
        end: bool,
        gone: impl Future<Output = ()>,
    ) -> FilterVerdict {
        self.answered = true;
        self.ends_with_head = end;
        self.env.response = Some(ResponseMap::new(head.status, head.headers.clone()));
        tokio::pin!(gone);
        for at in (0..self.entered).rev() {
            let end = end || self.response_ended;
            let waits = match self.call(at, Side::Response, |s, env| s.on_response_headers(env, end)) {
                Step::Go => None,
                Step::Paused(_) => self.wait(at, Side::Response, &mut gone).await,
                Step::End(verdict) => Some(verdict),
            };
            if let Some(verdict) = waits {
                return verdict;
            }
        }
        let Some(map) = &self.env.response else { return FilterVerdict::Go };
        let framing = head.headers.get(header::TRANSFER_ENCODING).cloned();
        let listed = connection_listed(&map.fields.fields);
        let Ok(mut changed) = ResponseHeader::build(map.status, Some(map.fields.fields.len() + 1)) else {
            return FilterVerdict::Go;
        };
        for (name, value) in &map.fields.fields {
            // The body may still change, so no length holds; the connection, and with it the framing, is the gateway's.
            if *name != header::CONTENT_LENGTH && !is_hop_by_hop(name, &listed) {
                let _ = changed.append_header(name.clone(), value.clone());
            }
        }
        if let Some(framing) = framing {
            let _ = changed.insert_header(header::TRANSFER_ENCODING, framing);
        }
        *head = changed;
        if let Some(map) = &mut self.env.response {
            map.seal();
        }
        FilterVerdict::Go
    }

    /// The body of an answer, piece by piece.
    pub fn response_body(&mut self) -> ChunkFilter<'_> {
        let held = vec![None; self.streams.len()];
        let reach = self.entered;
        ChunkFilter { run: self, held, reach }
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

    /// Whether a filter holds as much as it may, and nothing is to be read until it goes on.
    fn is_full(&self) -> bool {
        self.held.iter().flatten().any(|held| held.full)
    }

    /// A chunk as it came from the worker.
    async fn pass(&mut self, chunk: Bytes, end: bool) -> Result<Bytes, Stop> {
        self.run.env.response_size += chunk.len();
        let from = self.reach;
        // The filters know already that nothing follows the head.
        if self.run.ends_with_head && chunk.is_empty() {
            return Ok(chunk);
        }
        // A filter has ended the answer behind its head.
        if self.run.response_ended {
            return Ok(Bytes::new());
        }
        self.pass_from(chunk, from, end).await
    }

    /// A chunk on its way through the filters below `from`, last to first.
    async fn pass_from(&mut self, chunk: Bytes, from: usize, end: bool) -> Result<Bytes, Stop> {
        let mut chunk = chunk;
        for at in (0..from).rev() {
            if chunk.is_empty() && !end {
                return Ok(chunk);
            }
            if !self.run.wants(at, Callback::ResponseBody) {
                continue;
            }
            let (behind, seen) = self.take(at).meets(chunk);
            let size = seen.len();
            self.run.env.chunk = Body::new(seen);
            let pause = match self.run.call(at, Side::Response, |s, env| s.on_response_body(env, size, end)) {
                Step::Go => {
                    chunk = joined(behind, self.run.env.take_chunk());
                    continue;
                }
                Step::End(verdict) => return self.ends(at, verdict),
                Step::Paused(pause) => pause,
            };
            if pause == BodyPause::Drop {
                self.run.env.chunk = Body::default();
            }
            let most = self.run.most_held(at);
            let over = behind.len() + self.run.env.chunk.bytes.len() > most;
            if over && pause == BodyPause::Hold {
                let message = format!("it holds more than {most} bytes of a response body");
                match self.run.failed(at, FaultKind::Memory, &message) {
                    Some(verdict) => return self.ends(at, verdict),
                    None => {
                        chunk = joined(behind, self.run.env.take_chunk());
                        continue;
                    }
                }
            }
            let bytes: BytesMut = joined(behind, self.run.env.take_chunk()).into();
            if !end {
                self.put(at, HeldPart { bytes, shown: pause == BodyPause::Hold, full: over });
                return Ok(Bytes::new());
            }
            self.run.env.chunk = Body::new(bytes.freeze());
            // The relay looks out for the client.
            if let Some(verdict) = self.run.wait(at, Side::Response, std::future::pending()).await {
                return self.ends(at, verdict);
            }
            chunk = self.run.env.take_chunk();
        }
        Ok(chunk)
    }

    /// Waits until a filter that holds something lets it go.
    async fn released(&mut self) -> Result<Bytes, Stop> {
        loop {
            let Some(holds) = self.nearest_held() else { return std::future::pending().await };
            // What a filter holds lies where callbacks for it see it, for as long as nothing else happens.
            let shown = Shown::new(self, holds);
            let (from, effects) = shown.filter.run.patiently(holds).await;
            let waits = from == holds || shown.filter.held.get(from).is_some_and(Option::is_some);
            let asked = match effects {
                Some(effects) => shown.filter.run.asked(Side::Response, waits, from, effects),
                None => match shown.filter.run.too_long(holds) {
                    Some(verdict) => Asked::End(verdict),
                    None => Asked::Go,
                },
            };
            drop(shown);
            match asked {
                Asked::Nothing => {}
                Asked::End(verdict) => return self.ends(from, verdict),
                Asked::Go => {
                    let held = self.take(from).bytes.freeze();
                    return self.pass_from(held, from, false).await;
                }
            }
        }
    }

    async fn pass_trailers(&mut self, trailers: HeaderMap) -> Result<(Bytes, HeaderMap), Stop> {
        // A filter has ended the answer behind its head, or they were told that it ends there.
        if self.run.response_ended || self.run.ends_with_head {
            return Ok((Bytes::new(), HeaderMap::new()));
        }
        self.run.env.response_trailers = Some(FieldMap::new(trailers));
        let mut out = BytesMut::new();
        for at in (0..self.reach).rev() {
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
            if holds {
                let held = self.run.env.take_chunk();
                out.extend_from_slice(&self.pass_from(held, at, false).await?);
            }
        }
        let left = self.run.env.response_trailers.as_ref().map(|map| map.fields.clone()).unwrap_or_default();
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

    fn released(&mut self) -> BoxFuture<'_, Result<Bytes, Stop>> {
        ChunkFilter::released(self).boxed()
    }

    fn takes_more(&self) -> bool {
        !self.is_full()
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
    /// What it is besides its bytes.
    part: HeldPart,
}

impl<'a, 'b> Shown<'a, 'b> {
    fn new(filter: &'a mut ChunkFilter<'b>, at: usize) -> Self {
        let mut part = filter.take(at);
        filter.run.env.chunk = Body::new(std::mem::take(&mut part.bytes).freeze());
        Self { filter, at, part }
    }
}

impl Drop for Shown<'_, '_> {
    fn drop(&mut self) {
        let part = std::mem::take(&mut self.part);
        let bytes = self.filter.run.env.take_chunk().into();
        self.filter.put(self.at, HeldPart { bytes, ..part });
    }
}
