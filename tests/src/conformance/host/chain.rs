//! How the pieces of a message go through a chain of filters, as in Envoy: each piece goes as far as it can, and waits with
//! the filter that stopped it.

use bytes::Bytes;
use std::collections::VecDeque;

/// A piece of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Headers; `true`: nothing follows.
    Headers(bool),
    /// A piece of the body; `true`: nothing follows.
    Data(Bytes, bool),
    /// Trailers, with which it ends.
    Trailers,
}

/// What a filter says to a piece.
pub enum Said {
    /// It goes on. For data: these bytes.
    Continue(Bytes),
    /// It waits, for data with these bytes.
    Pause(Bytes),
    /// It waits with these bytes under flow control: they are not shown again.
    Keep(Bytes),
    /// Headers wait, and the body comes to the filter all the same.
    PauseHeaders,
    /// The headers go on, and nothing after them.
    EndStream,
    /// The message is not for this chain any more.
    Stop(End),
}

/// Why a message ended before its end.
#[derive(Debug)]
pub enum End {
    /// A filter answers.
    Answer(Box<turnstile_plugins::LocalResponse>),
    /// A filter whose failure counts has failed.
    Failed,
    /// A filter breaks the exchange.
    Closed,
    /// More would have to be held than may be.
    TooLarge,
}

/// A filter's place in the chain.
#[derive(Default)]
struct Place {
    queue: VecDeque<Piece>,
    /// Headers or trailers that wait until the filter continues.
    stopped: Option<Piece>,
    /// Headers that wait until the filter continues, by a body or otherwise.
    headers: Option<Piece>,
    /// It has ended the message with a piece of its own.
    closed: bool,
    held: Vec<u8>,
    /// Held bytes in front of those, which are not shown again.
    kept: Vec<u8>,
    /// It holds as much as it may, under flow control.
    full: bool,
    /// The held bytes are the last.
    held_end: bool,
    /// The filter has paused on a body.
    holds: bool,
}

/// A message on its way through a chain.
pub struct Chain {
    places: Vec<Place>,
    /// Pieces that have passed all filters.
    pub out: Vec<Piece>,
    most_held: usize,
    ended: bool,
}

impl Chain {
    /// A chain of so many filters, each of which may hold so many bytes.
    pub fn new(filters: usize, most_held: usize) -> Self {
        let places = std::iter::repeat_with(Place::default).take(filters).collect();
        Self { places, out: Vec::new(), most_held, ended: false }
    }

    /// Whether the whole message has passed.
    pub fn is_through(&self) -> bool {
        self.ended
            || self
                .out
                .iter()
                .any(|piece| matches!(piece, Piece::Headers(true) | Piece::Data(_, true) | Piece::Trailers))
    }

    /// Whether a filter holds as much as it may, so that nothing is to be let in until it continues.
    pub fn is_full(&self) -> bool {
        self.places.iter().any(|place| place.full)
    }

    /// Lets a piece in. `say` asks a filter: its place, the piece with all bytes it holds.
    ///
    /// # Errors
    /// The message ended.
    pub fn push(&mut self, piece: Piece, say: &mut dyn FnMut(usize, &Piece) -> Said) -> Result<(), End> {
        self.pass(0, piece);
        self.run(say)
    }

    /// A filter continues.
    ///
    /// # Errors
    /// The message ended.
    pub fn resume(&mut self, at: usize, say: &mut dyn FnMut(usize, &Piece) -> Said) -> Result<(), End> {
        let Some(place) = self.places.get_mut(at) else { return Ok(()) };
        if let Some(headers) = place.headers.take() {
            self.pass(at + 1, headers);
            self.release(at);
        } else if let Some(piece) = place.stopped.take() {
            self.release(at);
            self.pass(at + 1, piece);
        } else if place.holds {
            self.release(at);
        }
        self.run(say)
    }

    /// A filter puts a piece of its own behind what it has let go.
    ///
    /// # Errors
    /// The message ended.
    pub fn inject(
        &mut self,
        at: usize,
        data: Bytes,
        end: bool,
        say: &mut dyn FnMut(usize, &Piece) -> Said,
    ) -> Result<(), End> {
        let Some(place) = self.places.get_mut(at) else { return Ok(()) };
        if place.closed {
            return Ok(());
        }
        place.closed = end;
        if let Some(headers) = place.headers.take() {
            self.pass(at + 1, headers);
        }
        self.pass(at + 1, Piece::Data(data, end));
        self.run(say)
    }

    fn pass(&mut self, to: usize, piece: Piece) {
        match self.places.get_mut(to) {
            Some(place) => place.queue.push_back(piece),
            None if self.ended => {}
            None => self.out.push(piece),
        }
    }

    /// Passes on what a filter holds.
    fn release(&mut self, at: usize) {
        let Some(place) = self.places.get_mut(at) else { return };
        (place.holds, place.full) = (false, false);
        let mut held = std::mem::take(&mut place.kept);
        held.append(&mut place.held);
        let end = std::mem::take(&mut place.held_end);
        if !place.closed && (!held.is_empty() || end) {
            self.pass(at + 1, Piece::Data(held.into(), end));
        }
    }

    fn run(&mut self, say: &mut dyn FnMut(usize, &Piece) -> Said) -> Result<(), End> {
        // A piece goes as far as it can before the next one begins.
        let works = |place: &Place| place.stopped.is_none() && !place.queue.is_empty();
        while let Some(at) = self.places.iter().rposition(works) {
            let Some(piece) = self.places.get_mut(at).and_then(|place| place.queue.pop_front()) else { break };
            self.one(at, piece, say)?;
        }
        Ok(())
    }

    fn one(&mut self, at: usize, piece: Piece, say: &mut dyn FnMut(usize, &Piece) -> Said) -> Result<(), End> {
        let Some(place) = self.places.get_mut(at) else { return Ok(()) };
        let piece = match piece {
            Piece::Data(bytes, end) => {
                place.held.extend_from_slice(&bytes);
                Piece::Data(std::mem::take(&mut place.held).into(), end)
            }
            other => other,
        };
        let said = say(at, &piece);
        match (piece, said) {
            (_, Said::Stop(end)) => return Err(end),
            (Piece::Headers(_), Said::EndStream) => {
                self.pass(at + 1, Piece::Headers(true));
                self.ended = true;
            }
            (Piece::Headers(end), Said::PauseHeaders) => {
                if let Some(place) = self.places.get_mut(at) {
                    place.headers = Some(Piece::Headers(end));
                    if end {
                        // No body is on its way: the filter is told so.
                        place.queue.push_front(Piece::Data(Bytes::new(), true));
                    }
                }
            }
            (Piece::Data(_, end), Said::Continue(bytes)) => {
                let Some(place) = self.places.get_mut(at) else { return Ok(()) };
                (place.holds, place.full) = (false, false);
                let mut whole = std::mem::take(&mut place.kept);
                whole.extend_from_slice(&bytes);
                let closed = place.closed;
                let headers = place.headers.take();
                let bodiless = headers == Some(Piece::Headers(true));
                if let Some(headers) = headers {
                    self.pass(at + 1, headers);
                }
                if !closed && !bodiless {
                    self.pass(at + 1, Piece::Data(whole.into(), end));
                }
            }
            (Piece::Data(_, end), Said::Pause(bytes)) => {
                if let Some(place) = self.places.get_mut(at) {
                    place.held.append(&mut place.kept);
                    place.held.extend_from_slice(&bytes);
                    place.held_end = end;
                    place.holds = true;
                    if place.held.len() > self.most_held {
                        return Err(End::TooLarge);
                    }
                }
            }
            (Piece::Data(_, end), Said::Keep(bytes)) => {
                if let Some(place) = self.places.get_mut(at) {
                    place.kept.extend_from_slice(&bytes);
                    place.held_end = end;
                    place.holds = true;
                    place.full = place.kept.len() > self.most_held;
                }
            }
            (piece, Said::Pause(_) | Said::Keep(_)) => {
                if let Some(place) = self.places.get_mut(at) {
                    place.stopped = Some(piece);
                }
            }
            (piece, _) => {
                if piece == Piece::Trailers {
                    if let Some(headers) = self.places.get_mut(at).and_then(|place| place.headers.take()) {
                        self.pass(at + 1, headers);
                    }
                    self.release(at);
                }
                self.pass(at + 1, piece);
            }
        }
        Ok(())
    }
}
