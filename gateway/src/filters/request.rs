//! The request side: head, body piece by piece, trailers.

use super::{Asked, BodyPause, FilterRun, FilterVerdict, HeldPart, Side, Step, joined};
use crate::errors::{Kind, Refusal};
use crate::forward::client_gone;
use crate::request_body::{self, BodyLimits, Held, Pieces};
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use pingora_core::protocols::http::ServerSession;
use turnstile_plugins::{Body, Callback};

/// A request's body on its way through the filters.
struct Passing {
    /// What each filter that has paused holds, by position.
    held: Vec<Option<HeldPart>>,
    /// What has come out behind the last filter: one piece as it came, several joined.
    out: Bytes,
    joined: BytesMut,
    most: BodyLimits,
}

/// Where the pieces come from.
enum Source {
    Client(Pieces),
    /// Read, and decoded, before the filters see it.
    Whole(Option<Bytes>),
}

impl FilterRun {
    /// The request's head. `end`: nothing follows it.
    pub async fn request_headers(&mut self, client: &mut ServerSession, end: bool) -> FilterVerdict {
        self.heads_from(client, 0, end).await
    }

    /// The request's head, for the filters from one on. It goes as far as to the one that stops it.
    async fn heads_from(&mut self, client: &mut ServerSession, from: usize, end: bool) -> FilterVerdict {
        for at in from..self.streams.len() {
            let end = end || self.request_ended;
            let step = self.call(at, Side::Request, |s, env| s.on_request_headers(env, end));
            self.entered = at + 1;
            match step {
                Step::Go => {}
                Step::Paused(BodyPause::GoesOn) if !end => {
                    self.request_stopped = Some(at);
                    return FilterVerdict::Go;
                }
                Step::Paused(BodyPause::GoesOn) if self.waits_for_a_body(at, Callback::RequestBody) => {
                    if let Some(verdict) = self.no_body(client, at).await {
                        return verdict;
                    }
                }
                Step::Paused(_) => {
                    if let Some(verdict) = self.wait(at, Side::Request, client_gone(client)).await {
                        return verdict;
                    }
                }
                Step::End(verdict) => return verdict,
            }
        }
        FilterVerdict::Go
    }

    /// Whether a filter that has stopped at a head has nothing to go on by but a body.
    pub(super) fn waits_for_a_body(&self, at: usize, callback: Callback) -> bool {
        self.wants(at, callback) && !self.has_calls(at)
    }

    /// Tells a filter that waits for the body of a request without one.
    async fn no_body(&mut self, client: &mut ServerSession, at: usize) -> Option<FilterVerdict> {
        self.env.body = Body::default();
        match self.call(at, Side::Request, |s, env| s.on_request_body(env, 0, true)) {
            Step::Go => None,
            Step::Paused(_) => self.wait(at, Side::Request, client_gone(client)).await,
            Step::End(verdict) => Some(verdict),
        }
    }

    /// A filter goes on: so does the head, if that is what it has stopped.
    async fn let_head_go(&mut self, client: &mut ServerSession, at: usize) -> Result<(), FilterVerdict> {
        if self.request_stopped != Some(at) {
            return Ok(());
        }
        self.request_stopped = None;
        match self.heads_from(client, at + 1, false).await {
            FilterVerdict::Go => Ok(()),
            verdict => Err(verdict),
        }
    }

    /// Reads the request's body through the filters: what comes out behind the last of them.
    ///
    /// # Errors
    /// The filters' verdict, or the refusal of a body that cannot be read.
    pub async fn request_body(
        &mut self,
        client: &mut ServerSession,
        limits: BodyLimits,
        room: &mut Held,
    ) -> Result<Bytes, FilterVerdict> {
        let mut passing =
            Passing { held: vec![None; self.streams.len()], out: Bytes::new(), joined: BytesMut::new(), most: limits };
        let wanted = (0..self.streams.len()).any(|at| self.wants(at, Callback::RequestBody));
        let watched = wanted || self.request_stopped.is_some();
        let coded = client.req_header().headers.contains_key(header::CONTENT_ENCODING);
        let mut source = if watched && !coded {
            Source::Client(Pieces::begin(client, limits).await.map_err(FilterVerdict::Failed)?)
        } else {
            let body = request_body::read(client, limits, room).await.map_err(FilterVerdict::Failed)?;
            if coded {
                // What the filters see from now on is decoded.
                self.env.request.fields.fields_mut().remove(header::CONTENT_ENCODING);
            }
            Source::Whole(Some(body))
        };
        loop {
            let piece = self.next_piece(client, &mut source, room, &mut passing).await?;
            let last = piece.is_none() || request_body::is_read(client);
            let trailers = if last { request_body::trailers(client) } else { None };
            let piece = piece.unwrap_or_default();
            self.env.request_size += piece.len();
            if !self.request_ended {
                self.pass(client, &mut passing, piece, 0, last && trailers.is_none()).await?;
            }
            if last {
                if let Some(trailers) = trailers {
                    self.trailers(client, trailers, &mut passing).await?;
                }
                return Ok(passing.into_body());
            }
        }
    }

    /// Reads on, while filters that hold a part may let it go.
    async fn next_piece(
        &mut self,
        client: &mut ServerSession,
        source: &mut Source,
        room: &mut Held,
        passing: &mut Passing,
    ) -> Result<Option<Bytes>, FilterVerdict> {
        let pieces = match source {
            Source::Client(pieces) => pieces,
            Source::Whole(body) => return Ok(body.take()),
        };
        loop {
            let Some(holds) = self.request_stopped.or(passing.last_held()) else {
                return pieces.next(client, room).await.map_err(FilterVerdict::Failed);
            };
            // What it holds is what callbacks for it see.
            let mut part = passing.take_held(holds);
            let full = passing.full().or(part.as_ref().is_some_and(|part| part.full).then_some(holds));
            let bytes = part.as_mut().map(|part| std::mem::take(&mut part.bytes)).unwrap_or_default();
            self.env.body = Body::new(bytes.freeze());
            let came = match full {
                Some(full) => self.let_go(client, passing, holds, full).await.map(|()| None),
                None => self.read_or_let_go(client, pieces, room, passing, holds).await,
            };
            let bytes = self.env.take_body().into();
            if let Some(part) = HeldPart::seen(part, bytes) {
                passing.put(holds, part);
            }
            match came {
                Ok(Some(piece)) => return piece.map_err(FilterVerdict::Failed),
                Ok(None) => {}
                Err((_, Some(verdict))) => return Err(verdict),
                Err((from, None)) => {
                    let piece = passing.take(from).bytes.freeze();
                    self.let_head_go(client, from).await?;
                    self.pass(client, passing, piece, from + 1, false).await?;
                }
            }
        }
    }

    /// Reads the next piece, unless a filter lets go before it has come: its place, or the end of all.
    async fn read_or_let_go(
        &mut self,
        client: &mut ServerSession,
        pieces: &mut Pieces,
        room: &mut Held,
        passing: &Passing,
        holds: usize,
    ) -> Result<Option<Result<Option<Bytes>, Refusal>>, (usize, Option<FilterVerdict>)> {
        // Kept over wake-ups: a read that is given up might lose what it has.
        let read = pieces.next(client, room);
        tokio::pin!(read);
        loop {
            tokio::select! {
                // What is to go on goes before the next piece does.
                biased;
                (from, effects) = self.effects() => {
                    let waits = from == holds || passing.holds(from);
                    match self.asked(Side::Request, waits, from, effects) {
                        Asked::Nothing => {}
                        Asked::Go => return Err((from, None)),
                        Asked::End(verdict) => return Err((from, Some(verdict))),
                    }
                }
                piece = &mut read => return Ok(Some(piece)),
            }
        }
    }

    /// Waits, without reading on, until a filter lets go, since the one at `full` holds as much as it may. As any filter that has
    /// paused with nothing to come for it, it has its time.
    async fn let_go(
        &mut self,
        client: &mut ServerSession,
        passing: &Passing,
        holds: usize,
        full: usize,
    ) -> Result<(), (usize, Option<FilterVerdict>)> {
        let gone = client_gone(client);
        tokio::pin!(gone);
        loop {
            let (from, effects) = tokio::select! {
                asked = self.patiently(full) => asked,
                () = &mut gone => return Err((full, Some(self.client_left()))),
            };
            let asked = match effects {
                Some(effects) => self.asked(Side::Request, from == holds || passing.holds(from), from, effects),
                None => self.too_long(full).map_or(Asked::Go, Asked::End),
            };
            match asked {
                Asked::Nothing => {}
                Asked::Go => return Err((from, None)),
                Asked::End(verdict) => return Err((from, Some(verdict))),
            }
        }
    }

    /// A piece on its way through the filters from one on. What comes out behind the last is kept.
    async fn pass(
        &mut self,
        client: &mut ServerSession,
        passing: &mut Passing,
        piece: Bytes,
        from: usize,
        end: bool,
    ) -> Result<(), FilterVerdict> {
        let mut piece = piece;
        for at in from..self.streams.len() {
            if piece.is_empty() && !end {
                return Ok(());
            }
            // A head that ended the request has let nothing behind it.
            if self.request_ended {
                return Ok(());
            }
            if !self.wants(at, Callback::RequestBody) {
                self.let_head_go(client, at).await?;
                continue;
            }
            let (behind, seen) = passing.take(at).meets(piece);
            let size = seen.len();
            self.env.body = Body::new(seen);
            let pause = match self.call(at, Side::Request, |s, env| s.on_request_body(env, size, end)) {
                Step::Go => {
                    piece = joined(behind, self.env.take_body());
                    self.let_head_go(client, at).await?;
                    continue;
                }
                Step::End(verdict) => return Err(verdict),
                Step::Paused(pause) => pause,
            };
            if pause == BodyPause::Drop {
                self.env.body = Body::default();
            }
            let most = self.most_held(at);
            let over = behind.len() + self.env.body.bytes.len() > most;
            if over && pause == BodyPause::Hold {
                let name = self.generation.chain.get(at).map_or("", |c| &*c.name);
                let message = format!("the request body is larger than the {most} bytes held for the filter {name}");
                return Err(FilterVerdict::Failed(Refusal::new(Kind::TooLarge, message)));
            }
            let bytes: BytesMut = joined(behind, self.env.take_body()).into();
            if !end {
                passing.put(at, HeldPart { bytes, shown: pause == BodyPause::Hold, full: over });
                return Ok(());
            }
            self.env.body = Body::new(bytes.freeze());
            if let Some(verdict) = self.wait(at, Side::Request, client_gone(client)).await {
                return Err(verdict);
            }
            piece = self.env.take_body();
            self.let_head_go(client, at).await?;
        }
        if self.request_ended {
            return Ok(());
        }
        passing.came_out(piece)
    }

    /// What filters hold goes on before the trailers do.
    async fn trailers(
        &mut self,
        client: &mut ServerSession,
        trailers: HeaderMap,
        passing: &mut Passing,
    ) -> Result<(), FilterVerdict> {
        self.env.set_request_trailers(trailers);
        for at in 0..self.streams.len() {
            let holds = passing.holds(at);
            if holds {
                self.env.body = Body::new(passing.take(at).bytes.freeze());
            }
            let waits = match self.call(at, Side::Request, |s, env| s.on_request_trailers(env)) {
                Step::Go => None,
                Step::Paused(_) => self.wait(at, Side::Request, client_gone(client)).await,
                Step::End(verdict) => Some(verdict),
            };
            if let Some(verdict) = waits {
                return Err(verdict);
            }
            let piece = self.env.take_body();
            self.let_head_go(client, at).await?;
            if holds {
                self.pass(client, passing, piece, at + 1, false).await?;
            }
        }
        Ok(())
    }
}

// === impl Passing ===

impl Passing {
    fn holds(&self, at: usize) -> bool {
        matches!(self.held.get(at), Some(Some(_)))
    }

    /// The filter nearest to the worker that holds something.
    fn last_held(&self) -> Option<usize> {
        self.held.iter().rposition(Option::is_some)
    }

    /// The filter that holds as much as it may, if one does: nothing is to be read until it goes on.
    fn full(&self) -> Option<usize> {
        self.held.iter().position(|held| held.as_ref().is_some_and(|held| held.full))
    }

    fn take_held(&mut self, at: usize) -> Option<HeldPart> {
        self.held.get_mut(at).and_then(Option::take)
    }

    fn take(&mut self, at: usize) -> HeldPart {
        self.take_held(at).unwrap_or_default()
    }

    fn put(&mut self, at: usize, held: HeldPart) {
        if let Some(place) = self.held.get_mut(at) {
            *place = Some(held);
        }
    }

    /// Filters may make more of a body than may come.
    fn came_out(&mut self, piece: Bytes) -> Result<(), FilterVerdict> {
        if self.out.len() + self.joined.len() + piece.len() > self.most.bytes {
            return Err(FilterVerdict::Failed(request_body::too_large(self.most)));
        }
        if self.out.is_empty() && self.joined.is_empty() {
            self.out = piece;
        } else if !piece.is_empty() {
            // A short piece may be all that is used of a large buffer.
            let first = std::mem::take(&mut self.out);
            self.joined.reserve(first.len() + piece.len());
            self.joined.extend_from_slice(&first);
            self.joined.extend_from_slice(&piece);
        }
        Ok(())
    }

    fn into_body(self) -> Bytes {
        if self.joined.is_empty() { self.out } else { self.joined.freeze() }
    }
}
