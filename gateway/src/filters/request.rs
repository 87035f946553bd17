//! The request side: head, body piece by piece, trailers.

use super::{Asked, FilterRun, FilterVerdict, Side, Step};
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
    held: Vec<Option<Bytes>>,
    /// What has come out behind the last filter.
    out: Vec<Bytes>,
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
        for at in 0..self.streams.len() {
            let end = end || self.request_ended;
            let step = self.call(at, Side::Request, |s, env| s.on_request_headers(env, end));
            self.entered = at + 1;
            match step {
                Step::Go => {}
                Step::Paused { .. } => {
                    if let Some(verdict) = self.wait(at, Side::Request, client_gone(client)).await {
                        return verdict;
                    }
                }
                Step::End(verdict) => return verdict,
            }
        }
        FilterVerdict::Go
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
        let mut passing = Passing { held: vec![None; self.streams.len()], out: Vec::new(), most: limits };
        let watched = (0..self.streams.len()).any(|at| self.wants(at, Callback::RequestBody));
        let coded = client.req_header().headers.contains_key(header::CONTENT_ENCODING);
        let mut source = if watched && !coded {
            Source::Client(Pieces::begin(client, limits).await.map_err(FilterVerdict::Failed)?)
        } else {
            let body = request_body::read(client, limits, room).await.map_err(FilterVerdict::Failed)?;
            if coded {
                // What the filters see from now on is decoded.
                self.env.request.fields.fields.remove(header::CONTENT_ENCODING);
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
            let Some(holds) = passing.last_held() else {
                return pieces.next(client, room).await.map_err(FilterVerdict::Failed);
            };
            // What it holds is what callbacks for it see.
            self.env.body = Body::new(passing.take(holds));
            let came = {
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
                                Asked::Go => break Err((from, None)),
                                Asked::End(verdict) => break Err((from, Some(verdict))),
                            }
                        }
                        piece = &mut read => break Ok(piece),
                    }
                }
            };
            passing.put(holds, self.env.take_body());
            match came {
                Ok(piece) => return piece.map_err(FilterVerdict::Failed),
                Err((_, Some(verdict))) => return Err(verdict),
                Err((from, None)) => {
                    let piece = passing.take(from);
                    self.pass(client, passing, piece, from + 1, false).await?;
                }
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
            if !self.wants(at, Callback::RequestBody) {
                continue;
            }
            piece = joined(&passing.take(at), &piece);
            let size = piece.len();
            self.env.body = Body::new(piece);
            let drops_body = match self.call(at, Side::Request, |s, env| s.on_request_body(env, size, end)) {
                Step::Go => {
                    piece = self.env.take_body();
                    continue;
                }
                Step::End(verdict) => return Err(verdict),
                Step::Paused { drops_body } => drops_body,
            };
            if drops_body {
                self.env.body = Body::default();
            }
            let most = self.most_held(at);
            if self.env.body.bytes.len() > most {
                let name = self.generation.chain.get(at).map_or("", |c| &*c.name);
                let message = format!("the request body is larger than the {most} bytes held for the filter {name}");
                return Err(FilterVerdict::Failed(Refusal::new(Kind::TooLarge, message)));
            }
            if !end {
                passing.put(at, self.env.take_body());
                return Ok(());
            }
            if let Some(verdict) = self.wait(at, Side::Request, client_gone(client)).await {
                return Err(verdict);
            }
            piece = self.env.take_body();
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
                self.env.body = Body::new(passing.take(at));
            }
            let waits = match self.call(at, Side::Request, |s, env| s.on_request_trailers(env)) {
                Step::Go => None,
                Step::Paused { .. } => self.wait(at, Side::Request, client_gone(client)).await,
                Step::End(verdict) => Some(verdict),
            };
            if let Some(verdict) = waits {
                return Err(verdict);
            }
            if holds {
                let piece = self.env.take_body();
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

    fn take(&mut self, at: usize) -> Bytes {
        self.held.get_mut(at).and_then(Option::take).unwrap_or_default()
    }

    fn put(&mut self, at: usize, piece: Bytes) {
        if let Some(place) = self.held.get_mut(at) {
            *place = Some(piece);
        }
    }

    /// Filters may make more of a body than may come.
    fn came_out(&mut self, piece: Bytes) -> Result<(), FilterVerdict> {
        if !piece.is_empty() {
            self.out.push(piece);
        }
        if self.out.iter().map(Bytes::len).sum::<usize>() > self.most.bytes {
            return Err(FilterVerdict::Failed(request_body::too_large(self.most)));
        }
        Ok(())
    }

    fn into_body(mut self) -> Bytes {
        match self.out.len() {
            0 => Bytes::new(),
            1 => self.out.pop().unwrap_or_default(),
            _ => Bytes::from(self.out.concat()),
        }
    }
}

fn joined(first: &Bytes, second: &Bytes) -> Bytes {
    match (first.is_empty(), second.is_empty()) {
        (true, _) => second.clone(),
        (_, true) => first.clone(),
        _ => {
            let mut both = BytesMut::with_capacity(first.len() + second.len());
            both.extend_from_slice(first);
            both.extend_from_slice(second);
            both.freeze()
        }
    }
}
